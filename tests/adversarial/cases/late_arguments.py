"""What scripts do beside the loss: passes over the training loader, evaluations of their own, a replaced backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import MixtralConfig, MixtralForCausalLM, YolosConfig, YolosForObjectDetection

from ..kit import (
    Each,
    Inputs,
    LossAndOutputs,
    Network,
    Script,
    bert,
    case,
    own_loss,
    plain_loss,
    samples,
    train_and_resume,
    with_loss,
)

Act = Callable[[Any, Any], None]
"""(trainer, training loader)."""


def observed(trainer: Any) -> dict[str, Any]:
    return {"noted": getattr(trainer, "noted", [])}


def note(trainer: Any, number: Any) -> None:
    trainer.noted = [*getattr(trainer, "noted", []), float(number)]


def of_bert(**fields: Any) -> Script:
    """Six steps in each epoch, whose notes are compared."""
    options = {"num_train_epochs": 1, **fields.pop("options", {})}
    return Script(**{"model": bert(), "data": samples(48), "options": options, "observe": observed, **fields})


# ---------------------------------------------------------------------------------------------------------
# Passes over the training loader
# ---------------------------------------------------------------------------------------------------------


def words_in(batches: Any) -> Tensor:
    """Another number for each order of the batches."""
    return sum((1 + place) * batch["input_ids"].sum() for place, batch in enumerate(batches))  # type: ignore[return-value]


def reading(act: Act, *events: str) -> Script:
    """Callbacks of two epochs get the training loader."""

    def run(callback: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        act(callback.trainer, train_dataloader)

    return of_bert(callbacks=[Each(run, event) for event in events], options={"num_train_epochs": 2})


@case("K1", "K2")
def loader_is_read_in_each_step() -> Script:
    """A callback reads the whole training loader after each step, as to recompute statistics."""
    return reading(lambda trainer, loader: note(trainer, words_in(loader)), "on_step_end", "on_epoch_end")


@case("K2")
def loader_is_read_on_main_process() -> Script:
    """The main process looks at a batch, and makes a training loader of its own, before and after steps."""

    def act(trainer: Any, loader: Any) -> None:
        if trainer.is_world_process_zero():
            next(iter(loader))
            next(iter(trainer.get_train_dataloader()))

    return reading(act, "on_train_begin", "on_step_end")


# ---------------------------------------------------------------------------------------------------------
# Calls of the model in overrides
# ---------------------------------------------------------------------------------------------------------


def ask(trainer: Any) -> None:
    """Call the model in evaluation mode."""
    trainer.model.eval()
    with torch.no_grad():
        words = torch.arange(5, 13)[None]
        note(trainer, trainer.model(input_ids=words, attention_mask=torch.ones_like(words)).logits.abs().sum())
    trainer.model.train()


class OwnEvaluation:
    """Evaluates by a loop of its own, as many trainers for ranking and generation do."""

    def evaluate(self: Any, *_: Any, **__: Any) -> dict[str, float]:
        self.model.eval()
        losses = []
        for batch in self.get_eval_dataloader():
            batch = self._prepare_inputs(batch)
            with torch.no_grad():
                loss = self.model(**batch).loss
            losses.append(self.accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
        metrics = {"eval_loss": float(torch.cat(losses).mean())}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


@case("K2")
def evaluation_of_ones_own() -> Script:
    """`evaluate` is overridden by a loop that calls the model; there are no callbacks."""
    return of_bert(
        trainer=OwnEvaluation,
        keywords={"eval_dataset": samples(24, seed=3)},
        options={"eval_strategy": "steps", "eval_steps": 2},
    )


@case("K2")
def metrics_call_the_model() -> Script:
    """`compute_metrics` calls the model, as for examples of its answers; there are no callbacks."""
    kept: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        ask(kept[0])
        return {"sum": float(abs(prediction.predictions).sum())}

    return of_bert(
        wire=kept.append,
        keywords={"eval_dataset": samples(24, seed=3), "compute_metrics": metrics},
        options={"eval_strategy": "steps", "eval_steps": 2},
    )


@case("K2")
def metrics_call_the_model_outside() -> Script:
    """The same before the training."""

    def drive(trainer: Any) -> Any:
        note(trainer, trainer.evaluate()["eval_sum"])
        return trainer.train()

    script = metrics_call_the_model()
    script.drive, script.options["eval_strategy"] = drive, "no"
    return script


@case("K2")
def model_called_before_clipping() -> Script:
    """The main process calls the model after the step in `training_step`; gradients are clipped next."""

    class Asking:
        def training_step(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
            if self.is_world_process_zero():
                ask(self)
            return loss

    return of_bert(
        trainer=Asking, callbacks=[Each(lambda *_, **__: None)], options={"num_train_epochs": 1, "max_grad_norm": 0.5}
    )


# ---------------------------------------------------------------------------------------------------------
# Backward, and losses that count over all processes
# ---------------------------------------------------------------------------------------------------------


def double(trainer: Any) -> None:
    stock = trainer.accelerator.backward

    @functools.wraps(stock)
    def backward(loss: Tensor, **kwargs: Any) -> None:
        note(trainer, loss)
        stock(loss * 2, **kwargs)

    trainer.accelerator.backward = backward


@case("K1")
def backward_replaced() -> Script:
    """`accelerator.backward` is replaced by a function that notes the loss and doubles it."""
    return of_bert(wire=double, trainer=own_loss(plain_loss), batch=4, options={"gradient_accumulation_steps": 2})


@case("K2", expect="exact", because="accelerator.backward was replaced")
def backward_replaced_in_stages() -> Script:
    """The same with several stages."""
    return of_bert(wire=double, trainer=own_loss(plain_loss))


class Boxes(Dataset[Any]):
    """Images with one box each."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        boxes = torch.rand(1, 4, generator=generator) * 0.4 + 0.3
        image = torch.randn(3, 16, 16, generator=generator)
        return {"pixel_values": image, "labels": {"class_labels": torch.tensor([index % 3]), "boxes": boxes}}


@case("R2")
def detection() -> Script:
    """A detector of transformers, whose loss divides by the number of boxes over all processes."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    of_image = {"image_size": [16, 16], "patch_size": 8, "num_detection_tokens": 4, "num_labels": 3}
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "use_mid_position_embeddings": False}

    def collate(rows: list[Any]) -> dict[str, Any]:
        return {
            "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
            "labels": [row["labels"] for row in rows],
        }

    model = YolosForObjectDetection(YolosConfig(**sizes, **of_image, **plain))
    options = {"num_train_epochs": 1, "learning_rate": 1e-3, "eval_strategy": "epoch"}
    keywords = {"eval_dataset": Boxes()}
    return Script(model=model, data=Boxes(), collator=collate, options=options, keywords=keywords)


# ---------------------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------------------


@case("K2")
def adagrad() -> Script:
    """Adagrad, which makes its state when it is created, and a checkpoint from which the training is resumed."""
    return of_bert(
        model=Network(),
        drive=train_and_resume,
        options={"optim": "adagrad", "max_grad_norm": 0.5, "save_strategy": "steps", "save_steps": 3},
    )


@case("K2", expect="exact", because="output_router_logits=True was passed")
def router_loss_of_a_call() -> Script:
    """The loss asks a mixture of experts for its routers' loss by an argument; the configuration does not."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs, output_router_logits=True)
        return outputs.loss + 0.1 * outputs.aux_loss, outputs

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=64, num_key_value_heads=1, num_local_experts=4, **sizes))
    return with_loss(loss, model, data=samples(48, by_word=True), product={"num_microbatches": 1})
