"""Teachers in evaluations: what they are called on there, and what happens to them between two evaluations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kit import Each, Inputs, Script, case, samples
from .late_teachers import distil, kd, plainly, read_of, teacher_of_four

EACH_EPOCH = {"eval_strategy": "epoch"}


def evaluated(further: Any, *acts: tuple[Any, str], **fields: Any) -> Script:
    """`distil` with an evaluation of other samples after each epoch."""
    keywords = {"eval_dataset": samples(16, 4, 9, seed=9), **fields.pop("keywords", {})}
    options = {**EACH_EPOCH, **fields.pop("options", {})}
    callbacks = [Each(act, event) for act, event in acts]
    return distil(further, keywords=keywords, options=options, callbacks=callbacks, **fields)


def changed_if(trainer: Any, further: Any) -> None:
    with torch.no_grad():
        if trainer.state.epoch > 2.5:
            further(trainer.teacher)


@case("K1", "R2", "K2", "K2R2")
def teacher_is_read_in_evaluations() -> Script:
    """The loss of each evaluation is compared."""
    return evaluated(plainly)


@case("K1")
def evaluations_in_the_middle_of_accumulation() -> Script:
    """Evaluations come after every third step of two batches."""
    options = {"eval_strategy": "steps", "eval_steps": 3, "gradient_accumulation_steps": 2}
    return evaluated(plainly, options=options, batch=4)


@case("K1", "K2")
def teacher_written_to_before_the_third_evaluation() -> Script:
    """`.data` of one weight is written to before an evaluation."""

    def write(teacher: Any) -> None:
        teacher.bert.encoder.layer[1].output.dense.weight.data[0] += 2.0

    def act(callback: Any, *_: Any, **others: Any) -> None:
        changed_if(callback.trainer, write)

    return evaluated(plainly, (act, "on_epoch_end"))


@case("K1")
def teacher_swapped_for_evaluations() -> Script:
    """Evaluations use another teacher, under the same name."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            trainer.teacher = trainer.teachers[model.training]
            return kd(outputs.logits, trainer.teacher(**read_of(inputs)).logits)

    def wire(trainer: Any) -> None:
        trainer.teachers = {True: trainer.teacher, False: teacher_of_four(4)}

    return evaluated(further, wire=wire)


@case("K1", "K2")
def teacher_on_chosen_words_in_evaluations() -> Script:
    """In evaluations the teacher gets words that the student's logits choose."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        given = read_of(inputs)
        if not model.training:
            chosen = outputs.logits.argmax(-1, keepdim=True)
            given["input_ids"] = (given["input_ids"] + chosen) % 20 + 2
        with torch.no_grad():
            return kd(outputs.logits, trainer.teacher(**given).logits)

    return evaluated(further)


@case("K1", "K2")
def teacher_shows_more_in_evaluations() -> Script:
    """In evaluations hidden states are read, which no step reads; the metrics get the teacher's logits."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            theirs = trainer.teacher(**read_of(inputs), output_hidden_states=not model.training)
        if not model.training:
            outputs["hidden_states"] = theirs.hidden_states[1].mean(1)
            return kd(outputs.logits, theirs.logits) + theirs.hidden_states[2].square().mean()
        return kd(outputs.logits, theirs.logits)

    def metrics(prediction: Any) -> dict[str, float]:
        return {"loss_of_states": float(prediction.predictions[1].sum())}

    return evaluated(further, keywords={"compute_metrics": metrics})


@case("K1", "R2")
def two_data_sets_with_a_teacher() -> Script:
    """One is a part of the other, and both are evaluated after each epoch; the training ends with a prediction."""
    data = samples(16, 4, 9, seed=9)
    sets = {"all": data, "some": type(data)([data[i] for i in (3, 1, 7, 12)])}

    def drive(trainer: Any) -> Any:
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "eval_some_loss" in entry]
        return [entry["eval_some_loss"] for entry in logged], trainer.predict(data).metrics["test_loss"]

    return evaluated(plainly, keywords={"eval_dataset": sets}, drive=drive)


@case("K1")
def evaluation_inside_of_a_step() -> Script:
    """The loss evaluates once in the second epoch, between the teacher's call and its own end."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            first = trainer.teacher(**read_of(inputs)).logits
        if model.training and trainer.state.global_step == 7:
            trainer.evaluate()
            model.train()
        return kd(outputs.logits, first) + plainly(trainer, model, outputs, inputs)

    return evaluated(further)


@case("K1")
def teacher_of_the_best_checkpoint() -> Script:
    """The best model is loaded at the end, and evaluated again."""

    def drive(trainer: Any) -> Any:
        trainer.train()
        return trainer.evaluate()["eval_loss"]

    options = {"save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    return evaluated(plainly, options=options, drive=drive)
