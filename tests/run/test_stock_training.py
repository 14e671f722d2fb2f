"""Trainings, evaluations, optimizers and checkpoints are those of the stock Trainer; see `test_stock_behaviour.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from stock_scripts import (
    SAVES,
    Classes,
    Line,
    LineConfig,
    NoisyLine,
    Points,
    PretrainedLine,
    Scenario,
    error_of,
    names_of,
    outcome,
    rounded,
    run,
    scenario,
    scenarios_of,
)
from torch import nn
from transformers import (
    TrainerCallback,
    default_data_collator,
)

from hf_pipetransformer.resilience.checkpoint_folders import MANIFEST


# ------------------------------------------------------------------------------------------ training
@scenario
def seeds_and_models_made_by_a_function(given: Classes) -> Any:
    found = []
    for make in (lambda: Line(), lambda trial: Line(1.0)):
        trainer = given.make(model_init=make)
        found += [outcome(trainer), outcome(trainer)]
        trainer.args.seed = 314
        found.append(outcome(trainer))
    return found, error_of(lambda: given.make(model_init=lambda one, two: Line()))


@scenario
def models_without_a_loss(given: Classes) -> Any:
    class Silent(Line):
        def forward(self, x: Any, labels: Any = None, **_: Any) -> Any:
            return {"y": self.slope * x}

    trainer = given.make(Silent())
    return error_of(trainer.train), error_of(lambda: trainer.predict(Points(4)))


@scenario
def compiled_models(given: Classes) -> Any:
    compiled: Any = torch.compile(Line(), backend="eager")
    options = {"max_steps": 2, "remove_unused_columns": False}
    return outcome(given.make(torch_compile=True, torch_compile_backend="eager", **options)), outcome(
        given.make(compiled, **options)
    )


@scenario
def batch_sizes_that_do_not_fit(given: Classes) -> Any:
    class RunsOut(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.train_batch_size >= 16:
                raise RuntimeError("CUDA out of memory.")

    options = {"per_device_train_batch_size": 16, "auto_find_batch_size": True, "save_strategy": "steps"}
    trainer = given.make(callbacks=[RunsOut()], max_steps=2, save_steps=1, **options)
    trainer.train()
    again = given.make(max_steps=2, save_steps=1, **options)
    again.train(resume_from_checkpoint=True)
    return trainer._train_batch_size, again._train_batch_size


@scenario
def trainings_one_after_another(given: Classes) -> Any:
    trainer = given.make()
    first, second = outcome(trainer), outcome(trainer)
    return first, second, trainer.model_wrapped is trainer.model, trainer.is_in_train, rounded(trainer.evaluate())


# ------------------------------------------------------------------------------------------ evaluation
def accuracy(evaluated: Any) -> dict[str, float]:
    predictions = evaluated.predictions[0] if isinstance(evaluated.predictions, tuple) else evaluated.predictions
    return {"near": float((numpy.abs(predictions - evaluated.label_ids) < 1).mean())}


@scenario
def evaluations(given: Classes) -> Any:
    options: list[dict[str, Any]] = [
        {},
        {"eval_accumulation_steps": 1},
        {"prediction_loss_only": True},
        {"eval_use_gather_object": True},
        {"bf16_full_eval": True},
        {"preprocess_logits_for_metrics": lambda logits, labels: logits + 1},
        {"eval_dataset": {"one": Points(5), "two": Points(9)}},
        {"include_for_metrics": ["loss"]},
    ]
    return [rounded(given.make(Line(1.5), compute_metrics=accuracy, **one).evaluate()) for one in options]


@scenario
def metrics_batch_by_batch(given: Classes) -> Any:
    seen: list[int] = []

    def count(evaluated: Any, compute_result: bool) -> dict[str, Any]:
        seen.append(len(evaluated.label_ids))
        return {"batches": len(seen), "rows": sum(seen)} if compute_result else {}

    return rounded(given.make(compute_metrics=count, batch_eval_metrics=True, per_device_eval_batch_size=4).evaluate())


@scenario
def predictions(given: Classes) -> Any:
    class Twice(Line):
        def forward(self, x: Any, labels: Any = None, **_: Any) -> Any:
            loss, y = super().forward(x, labels)
            return loss, y, 2 * y

    names = ("labels", "more")
    trainer = given.make(Twice(1.5), label_names=list(names))
    several = trainer.predict(Points(11, labels=names))
    ragged = [
        {"x": numpy.ones(1 + index // 8, "f4"), "labels": numpy.ones(1 + index // 8, "f4")} for index in range(20)
    ]
    padded = given.make(eval_accumulation_steps=1).predict(ragged)
    parts = (several.predictions, several.label_ids, several.metrics, padded.predictions, padded.label_ids)
    return [rounded(part) for part in parts]


@scenario
def steps_by_hand(given: Classes) -> Any:
    trainer = given.make(Line(1.5), compute_loss_func=lambda outputs, labels, **_: (outputs[0] - labels).abs().mean())
    batch = default_data_collator([Points()[index] for index in range(4)])
    trained = trainer.training_step(trainer.model, dict(batch), 4)
    return rounded(trained), rounded(trainer.prediction_step(trainer.model, dict(batch), prediction_loss_only=True)[0])


# ------------------------------------------------------------------------------------------ optimizers
@scenario
def optimizers_of_the_users_own(given: Classes) -> Any:
    found = []
    for has_scheduler in (False, True):
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) if has_scheduler else None
        trainer = given.make(model, optimizers=(optimizer, scheduler))
        found.append([outcome(trainer), trainer.lr_scheduler is scheduler])
    by_class = (torch.optim.SGD, {"lr": 0.05})
    found.append(outcome(given.make(optimizer_cls_and_kwargs=by_class)))
    return found, error_of(lambda: given.make(optimizer_cls_and_kwargs=by_class, optimizers=(optimizer, None)))


@scenario
def schedules_optimizers_and_lengths(given: Classes) -> Any:
    options: list[dict[str, Any]] = [
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 3.0, "lr_end": 1e-3}, "warmup_steps": 2},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.02}, "warmup_steps": 0.25},
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "eval_strategy": "epoch",
            "lr_scheduler_kwargs": {"patience": 0},
        },
        {"optim": "adafactor", "max_grad_norm": 0.1, "num_train_epochs": 1.5},
        {"optim": "sgd", "max_grad_norm": 0.0, "num_train_epochs": 1, "dataloader_drop_last": True},
        {"optim": "adagrad", "max_steps": 7, "gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 50},
    ]
    return [outcome(given.make(**one)) for one in options]


@scenario
def what_is_asked_of_an_optimizer(given: Classes) -> Any:
    trainer = given.make(PretrainedLine(LineConfig()), weight_decay=0.1)
    before = error_of(trainer.get_learning_rates)
    trainer.create_optimizer_and_scheduler(num_training_steps=9)
    groups = [[len(group["params"]), group["weight_decay"]] for group in trainer.optimizer.param_groups]
    return before, trainer.get_learning_rates(), trainer.get_num_trainable_parameters(), groups, outcome(trainer)


@scenario
def parameters_that_do_not_train(given: Classes) -> Any:
    class Unused(Line):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))

    model = Unused()
    model.offset.requires_grad_(False)
    return outcome(given.make(model)), model.offset.requires_grad


# ------------------------------------------------------------------------------------------ checkpoints
@scenario
def files_of_a_checkpoint(given: Classes) -> Any:
    found = []
    for model, options in ((PretrainedLine(LineConfig()), {}), (Line(), {}), (Line(), {"save_only_model": True})):
        folder = given.folder / str(len(found))
        given.make(model, output_dir=str(folder), max_steps=2, **SAVES, **options).train()
        files = {path.name for path in (folder / "checkpoint-2").iterdir()}
        state = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())
        found.append([sorted(files - {MANIFEST}), sorted(state)])
    return found


@scenario
def resuming(given: Classes) -> Any:
    found = []
    for make in (lambda: PretrainedLine(LineConfig()), NoisyLine):
        for options in ({}, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3}):
            once = given.make(make(), **SAVES, **options)
            found.append(outcome(once))
            again = given.make(make(), **SAVES, **options)
            found.append(outcome(again, resume_from_checkpoint=str(given.folder / "checkpoint-4")))
            assert found[-1][1] == found[-2][1]
    return found


@scenario
def checkpoints_that_are_not_there(given: Classes) -> Any:
    named = error_of(lambda: given.make().train(resume_from_checkpoint="nowhere"))
    return named, error_of(lambda: given.make().train(resume_from_checkpoint=True)).replace(str(given.folder), "")


@scenario
def checkpoints_that_are_kept(given: Classes) -> Any:
    steps = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 8}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    found = []
    alone = {**steps, "metric_for_best_model": "loss", "save_strategy": "best", "save_total_limit": None}
    for options in ({}, {**steps, **best}, alone):
        trainer = given.make(**{"save_total_limit": 1, **SAVES, **options})
        found.append([outcome(trainer), Path(trainer.state.best_model_checkpoint or "none").name, given.checkpoints])
    return found


@scenario
def saving_by_hand(given: Classes) -> Any:
    trainer = given.make(PretrainedLine(LineConfig()), max_steps=2)
    trainer.save_model(str(given.folder / "before"))
    result = trainer.train()
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    trainer._save_checkpoint(trainer.model, None)
    resumed = given.make(PretrainedLine(LineConfig()), max_steps=4)
    files = sorted(path.name for path in (given.folder / "before").iterdir())
    return files, outcome(resumed, resume_from_checkpoint=True), sorted(result.metrics)


@scenario
def checkpoint_just_in_time(given: Classes) -> Any:
    class AsksForIt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                names = {type(one).__name__: one for one in trainer.callback_handler.callbacks}
                names["JITCheckpointCallback"].jit_manager._enable_checkpoint()  # as its handler of SIGTERM does

    trainer = given.make(enable_jit_checkpoint=True, callbacks=[AsksForIt()])
    return outcome(trainer), given.checkpoints, names_of(trainer.callback_handler.callbacks)[-2:]


@pytest.mark.parametrize("script", scenarios_of(__name__), ids=lambda script: script.__name__)
def test_a_script_does_the_same_with_our_classes(script: Scenario, tmp_path: Path) -> None:
    expected, found = (run(script, tmp_path, is_ours) for is_ours in (False, True))
    assert found == expected
