"""Losses and trainers that ask for other processes, as code for several GPUs does."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
import torch.distributed.nn
from torch import Tensor
from torch.nn import functional as F

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
    with_loss,
)

ADAMW: dict[str, Any] = {
    "max_steps": 6,
    "optim": "adamw_torch",
    "learning_rate": 5e-3,
    "adam_epsilon": 1e-3,
    "weight_decay": 0.01,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "linear",
}

# ---------------------------------------------------------------------------------------------------------
# In-batch negatives over all processes
# ---------------------------------------------------------------------------------------------------------

Gather = Callable[[Any, Tensor], Tensor]
"""(trainer, [B, ...]) -> the rows of all processes."""


def by_accelerator(trainer: Any, rows: Tensor) -> Tensor:
    return trainer.accelerator.gather(rows)


def by_torch(trainer: Any, rows: Tensor) -> Tensor:
    gathered = [torch.empty_like(rows) for _ in range(trainer.accelerator.num_processes)]
    torch.distributed.all_gather(gathered, rows)
    return torch.cat(gathered)


def number_by_accelerator(trainer: Any) -> int:
    return trainer.accelerator.num_processes


def in_batch_negatives(
    number: Callable[[Any], int] = number_by_accelerator, gather: Gather = by_accelerator, by_offset: bool = False
) -> Script:
    """A supervised contrastive loss, as dense-retrieval code writes it.

    Embeddings of all processes are gathered, own ones with gradients, and the loss is multiplied by the number of
    processes, because DDP averages.

    Args:
        number: Returns the number of processes.
        gather: Returns the rows of all processes.
        by_offset: Add a term with labels that begin at the process's first row.
    """

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        own, labels = F.normalize(outputs.logits, dim=-1), inputs["labels"]
        processes, index = number(trainer), trainer.accelerator.process_index
        rows = own
        if processes > 1:
            rows, labels = gather(trainer, own.detach()), gather(trainer, labels)
            place = index if len(rows) == processes * len(own) else 0
            rows = torch.cat([rows[: place * len(own)], own, rows[(place + 1) * len(own) :]])
        itself = torch.eye(len(rows))
        scores = rows @ rows.T / 0.3 - 1e4 * itself
        same = (labels[:, None] == labels) & ~itself.bool()
        value = -(scores.log_softmax(1) * same).sum() / len(rows)
        if by_offset:
            value = value + F.cross_entropy(own @ rows.T, index * len(own) + torch.arange(len(own)))
        return value * processes, outputs

    data = samples(32, shortest=12, longest=12, labels=6)
    options = {**ADAMW, "max_grad_norm": 0.0}
    return Script(model=bert(num_labels=6), data=data, trainer=own_loss(loss), options=options)


@case("K2")
def negatives_by_accelerator() -> Script:
    """`accelerator.gather` and `accelerator.num_processes`."""
    return in_batch_negatives()


@case("K2")
def negatives_by_world_size() -> Script:
    """`accelerator.gather` and `torch.distributed.get_world_size()`."""

    def number(trainer: Any) -> int:
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    return in_batch_negatives(number)


@case("K2")
def negatives_by_arguments() -> Script:
    """`accelerator.gather` and `args.world_size`."""
    return in_batch_negatives(lambda trainer: trainer.args.world_size)


@case("K2")
def negatives_by_offset() -> Script:
    """Labels begin at `accelerator.process_index` times the number of rows."""
    return in_batch_negatives(by_offset=True)


@case("K2")
def negatives_by_torch() -> Script:
    """`torch.distributed.all_gather` and `accelerator.num_processes`."""
    return in_batch_negatives(gather=by_torch)


# ---------------------------------------------------------------------------------------------------------
# Other code that asks for all processes
# ---------------------------------------------------------------------------------------------------------


def mean_of_all(value: Tensor) -> Tensor:
    """The mean over all processes, by `torch.distributed`."""
    total = value.detach().clone()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
        total /= torch.distributed.get_world_size()
    return total


@case("K2", "K2R2")
def scaled_by_all_reduce() -> Script:
    """The loss is multiplied by a mean over all processes, by `torch.distributed.all_reduce`."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs["loss"] * (1 + mean_of_all(outputs["loss"])), outputs

    return with_loss(loss)


@case("K2", "K2R2")
def negatives_with_gradients() -> Script:
    """Rows of all processes by `torch.distributed.nn.functional.all_gather`, through which gradients go back."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(input_ids=inputs["input_ids"])
        rows, labels = outputs["logits"], inputs["labels"]
        if trainer.accelerator.num_processes > 1:
            rows = torch.cat(torch.distributed.nn.functional.all_gather(rows))
            labels = trainer.accelerator.gather(labels)
        same = (labels[:, None] == labels).float()
        return F.binary_cross_entropy_with_logits(rows @ rows.T, same), outputs

    return with_loss(loss)


@case("K2", "K2R2")
def waits_for_everyone() -> Script:
    """Barriers in the loss, and what only the main process or each in its turn does."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        trainer.accelerator.wait_for_everyone()
        with trainer.accelerator.main_process_first():
            outputs = model(**inputs)
        with trainer.args.main_process_first():
            weights = [torch.ones(()) if trainer.accelerator.is_main_process else torch.zeros(())]
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.broadcast(weights[0], src=0)
        return outputs["loss"] * weights[0], outputs

    return with_loss(loss)


@case("K2")
def noise_by_index() -> Script:
    """Noise from a generator that is seeded by `args.process_index` and `args.world_size`."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs, step = model(**inputs), trainer.state.global_step
        seed = 10 * step + 3 * trainer.args.process_index + trainer.args.world_size
        noise = torch.rand(outputs["logits"].shape, generator=torch.Generator().manual_seed(seed))
        main = float(trainer.is_world_process_zero() and trainer.args.should_save)
        return outputs["loss"] + main * (noise * outputs["logits"]).mean(), outputs

    return with_loss(loss)


@case("K2")
def own_part_of_a_list() -> Script:
    """`split_between_processes`, and a part of the batch that is chosen by the index."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        number, index = trainer.accelerator.num_processes, trainer.accelerator.process_index
        with trainer.accelerator.split_between_processes([0.5, 1.0, 1.5, 2.0]) as factors:
            outputs = model(**{name: value[index::number] for name, value in inputs.items()})
            return outputs["loss"] * sum(factors), outputs

    return with_loss(loss)


@case("K2", "K2R2")
def counts_in_the_backward() -> Script:
    """A hook on the gradient of the logits, which sums over the processes."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)

        def scale(gradient: Tensor) -> Tensor:
            ones = trainer.accelerator.reduce(torch.ones(()), "sum")
            return gradient * ones / trainer.accelerator.num_processes * mean_of_all(torch.tensor(2.0))

        outputs["logits"].register_hook(scale)
        return F.cross_entropy(outputs["logits"], inputs["labels"]), outputs

    return with_loss(loss)


@case("K2", "K2R2")
def counts_in_evaluations() -> Script:
    """The loss is scaled by a sum over the processes and their number, also in evaluations."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        number = trainer.accelerator.gather(torch.ones(1)).sum() / trainer.accelerator.num_processes
        return outputs["loss"] * number * (1 + mean_of_all(torch.ones(()))), outputs

    return with_loss(loss, options={"eval_strategy": "steps", "eval_steps": 2}, keywords={"eval_dataset": samples(16)})


@case("K2", "K2R2")
def counts_beside_the_loss() -> Script:
    """A callback and `training_step` see all processes."""
    seen: list[Any] = []

    def note(trainer: Any) -> None:
        number = trainer.accelerator.num_processes
        agree = number == trainer.args.world_size == int(trainer.accelerator.reduce(torch.ones(()), "sum"))
        seen.append(agree and number == int(os.environ.get("WORLD_SIZE", 1)))

    class Notes:
        def training_step(self, *args: Any, **keywords: Any) -> Any:
            note(self)
            loss = super().training_step(*args, **keywords)  # type: ignore[misc]
            note(self)
            return loss

    callback = Each(lambda each, *_, **__: note(each.trainer))
    return with_loss(trainer=own_loss(plain_loss, Notes), callbacks=[callback], observe=lambda _: {"seen": list(seen)})


@case("K2")
def counts_of_a_declared_loss() -> Script:
    """A loss that is declared to be a mean: each micro-batch is a process's own."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        number = trainer.accelerator.num_processes * trainer.args.world_size
        if torch.distributed.is_initialized():
            number *= torch.distributed.get_world_size()
        return outputs["loss"] * number, outputs

    return with_loss(loss, product={"loss_reduction": "mean"})


# ---------------------------------------------------------------------------------------------------------
# Logs and evaluations
# ---------------------------------------------------------------------------------------------------------


class PartsOfTheLoss:
    """Collects the parts of the loss, and logs their means."""

    parts: Any = ()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        penalty = 0.1 * outputs.logits.pow(2).mean()
        if model.training:
            self.parts = [*self.parts, (outputs.loss.item(), penalty.item())]
        loss = outputs.loss + penalty
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **keywords: Any) -> None:
        if "loss" in logs:
            logs["entropy"] = sum(part[0] for part in self.parts) / len(self.parts)
            logs["penalty"] = sum(part[1] for part in self.parts) / len(self.parts)
            self.parts = []
        super().log(logs, *args, **keywords)  # type: ignore[misc]


@case("K2")
def parts_of_the_loss_in_log() -> Script:
    """An override of `log` averages what `compute_loss` has collected."""

    def observe(trainer: Any) -> dict[str, Any]:
        history = trainer.state.log_history
        return {name: [entry[name] for entry in history if name in entry] for name in ("entropy", "penalty")}

    data = samples(48, shortest=6, longest=15)
    return Script(model=bert(), data=data, trainer=PartsOfTheLoss, options=ADAMW, observe=observe)


def logged(*names: str) -> Any:
    """Observes what every process has logged under these names."""
    return lambda trainer: {
        name: [float(entry[name]) for entry in trainer.state.log_history if name in entry] for name in names
    }


def with_log(log: Any, loss: Any = None, *names: str, **fields: Any) -> Script:
    """A loss that collects its values in `trainer.parts`; `log(trainer, logs, stock)` overrides the trainer's."""

    def collecting(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        value, outputs = (loss or plain_loss)(trainer, model, inputs)
        trainer.parts = [*getattr(trainer, "parts", []), value.item()]
        return value, outputs

    class Logs:
        def log(self, logs: dict[str, Any], *args: Any, **keywords: Any) -> None:
            log(self, logs, lambda: super(Logs, self).log(logs, *args, **keywords))  # type: ignore[misc]

    fields = {"observe": logged("mean", *names), **fields}
    return with_loss(trainer=own_loss(collecting, Logs), **fields)


def take_mean(trainer: Any) -> float:
    """The mean of the collected values; they are deleted."""
    parts, trainer.parts = trainer.parts, []
    return sum(parts) / len(parts)


def log_mean(trainer: Any, logs: dict[str, Any], stock: Any) -> None:
    if "loss" in logs or "eval_loss" in logs:
        logs["mean"] = take_mean(trainer)
    stock()


@case("K2")
def mean_in_log() -> Script:
    """The mean of the losses of two steps."""
    return with_log(log_mean, options={"logging_steps": 2})


@case("K2")
def mean_in_log_of_a_declared_loss() -> Script:
    """The mean of the losses of two steps; the loss is declared a mean, and has parts for each micro-batch."""
    return with_log(log_mean, product={"loss_reduction": "mean"})


@case("K2")
def mean_in_log_of_evaluations() -> Script:
    """The mean of losses in training and evaluation, also outside of the training."""

    def drive(trainer: Any) -> None:
        trainer.evaluate()
        trainer.train()
        trainer.evaluate()

    options = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 8}
    return with_log(log_mean, None, drive=drive, options=options, keywords={"eval_dataset": samples(16)})


@case("K2")
def mean_in_every_log() -> Script:
    """Every call of `log` takes the mean; the last one adds a part."""

    def log(trainer: Any, logs: dict[str, Any], stock: Any) -> None:
        if "train_runtime" in logs:
            trainer.parts = [0.0]
        logs["mean"] = take_mean(trainer)
        stock()

    return with_log(log)


@case("K2", "K2R2")
def mean_of_all_in_log() -> Script:
    """The mean over all processes, by the accelerator and by `torch.distributed`."""

    def log(trainer: Any, logs: dict[str, Any], stock: Any) -> None:
        if "loss" in logs:
            mean = torch.tensor(take_mean(trainer))
            logs["mean"] = trainer.accelerator.gather(mean[None]).mean()
            logs["again"] = mean_of_all(mean)
        stock()
        trainer.accelerator.wait_for_everyone()

    return with_log(log, None, "again")


@case("K2", "K2R2")
def callbacks_read_what_is_logged() -> Script:
    """A callback lowers the learning rate by what an override of `log` has averaged over all processes."""

    def log(trainer: Any, logs: dict[str, Any], stock: Any) -> None:
        if "loss" in logs:
            logs["mean"] = float(mean_of_all(torch.tensor(take_mean(trainer))))
        stock()

    def act(callback: Each, state: Any, control: Any, logs: Any = None, optimizer: Any = None, **_: Any) -> None:
        for group in optimizer.param_groups if "mean" in logs else ():
            group["lr"] = 0.05 * logs["mean"]

    return with_log(log, callbacks=[Each(act, "on_log")])


@case("K2")
def callbacks_in_log_see_all_processes() -> Script:
    """A callback that sums over all processes when something is logged, and logs something itself."""
    seen: list[Any] = []

    def act(callback: Each, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "mean" in logs:
            number = int(callback.trainer.accelerator.reduce(torch.ones(()), "sum"))
            seen.append(number == callback.trainer.args.world_size == int(os.environ.get("WORLD_SIZE", 1)))
            callback.trainer.log({"inner": logs["mean"] + 1})

    names = ("inner",)
    observe = lambda trainer: {"seen": list(seen), **logged("mean", *names)(trainer)}  # noqa: E731
    return with_log(log_mean, callbacks=[Each(act, "on_log")], observe=observe)


@case("K2")
def logs_within_the_loss() -> Script:
    """The loss calls `log`."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        trainer.log({"inner": outputs["loss"].item()})
        return outputs["loss"], outputs

    def observe(trainer: Any) -> dict[str, Any]:
        return logged("mean", "inner")(trainer) if trainer.args.process_index == 0 else {}

    return with_log(log_mean, loss, observe=observe)


@case("K2", expect="exact", because="should_log")
def main_process_logs() -> Script:
    """A callback of the main process calls `log`."""

    def act(callback: Each, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            callback.trainer.log({"step_number": float(state.global_step)})

    return with_log(log_mean, callbacks=[Each(act)])


@case("K2")
def logs_twice_or_not() -> Script:
    """`log` calls the stock one twice in one step, and not at all in another."""

    def log(trainer: Any, logs: dict[str, Any], stock: Any) -> None:
        if "loss" not in logs:
            return stock()
        logs["mean"] = take_mean(trainer)
        for _ in range(trainer.state.global_step % 3):
            stock()

    return with_log(log)


@case("K2")
def tensors_in_log() -> Script:
    """`log` adds a tensor, and an object that cannot be sent."""

    def log(trainer: Any, logs: dict[str, Any], stock: Any) -> None:
        if "loss" in logs:
            logs["mean"] = torch.tensor(take_mean(trainer))
            logs["function"] = lambda: None
        stock()

    return with_log(log)


@case("K2")
def model_in_log() -> Script:
    """`log` calls the model."""

    def log(trainer: Any, logs: dict[str, Any], stock: Any) -> None:
        if "loss" in logs:
            words = torch.arange(8)[None] + 5
            with torch.no_grad():
                logs["mean"] = take_mean(trainer) + trainer.model(words)["logits"].sum().item()
        stock()

    return with_log(log, callbacks=[Each(lambda *_, **__: None)])


@case("K2", expect="crash", because="division by zero")
def log_fails() -> Script:
    """`log` divides by zero."""

    def log(trainer: Any, logs: dict[str, Any], stock: Any) -> None:
        stock()
        if trainer.state.global_step == 2:
            trainer.parts = []
        take_mean(trainer)

    return with_log(log)


@case("K2")
def evaluations_outside_interleaved() -> Script:
    """Two calls of the model, interleaved stages, and `evaluate()` before and after the training."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        words = {name: value for name, value in inputs.items() if name != "labels"}
        first, second = model(**words)["logits"], model(**words)["logits"]
        entropy = F.cross_entropy(first, inputs["labels"]) + F.cross_entropy(second, inputs["labels"])
        distance = F.kl_div(first.log_softmax(-1), (second * 1.1).softmax(-1), reduction="batchmean")
        return entropy + distance, {"logits": first}

    def drive(trainer: Any) -> list[float]:
        before = trainer.evaluate(trainer.train_dataset)["eval_loss"]
        trainer.train()
        return [before, trainer.evaluate(trainer.train_dataset)["eval_loss"]]

    data = samples(48, shortest=6, longest=15)
    product = {"num_microbatches": 4, "pipeline_schedule": "interleaved1f1b"}
    return Script(model=bert(), data=data, trainer=own_loss(loss), options=ADAMW, drive=drive, product=product)


INTERLEAVED = {"pipeline_schedule": "interleaved1f1b"}


def two_calls(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
    """The distance of two calls of the model, on the batch and on its words in another order."""
    first, second = model(inputs["input_ids"])["logits"], model(inputs["input_ids"].flip(0))["logits"]
    return F.cross_entropy(first, inputs["labels"]) + (first - second).pow(2).mean(), {"logits": first}


def evaluated_outside(loss: Any = two_calls, **fields: Any) -> Script:
    """Evaluations before and after the training."""

    def drive(trainer: Any) -> list[float]:
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        return [before, trainer.evaluate()["eval_loss"]]

    fields = {"model": Network(4), "drive": drive, "keywords": {"eval_dataset": samples(16, seed=4)}, **fields}
    return with_loss(loss, **fields)


@case("K2")
def two_calls_outside_interleaved() -> Script:
    """`evaluate()` before and after the training with a loss of two calls, interleaved stages."""
    return evaluated_outside(product=INTERLEAVED)


@case("K2")
def two_calls_outside_zbv() -> Script:
    """`evaluate()` before and after the training with a loss of two calls, ZBV."""
    return evaluated_outside(product={"pipeline_schedule": "zbv"})


@case("K2R2")
def two_calls_outside_with_replicas() -> Script:
    """`evaluate()` with a loss of two calls, interleaved, with replicas; no training, as replicas average losses."""

    def drive(trainer: Any) -> list[float]:
        return [trainer.evaluate()["eval_loss"], trainer.evaluate(samples(32))["eval_loss"]]

    return evaluated_outside(product=INTERLEAVED, drive=drive, options={"per_device_eval_batch_size": 1})


@case("K2")
def declared_outside_interleaved() -> Script:
    """`evaluate()` outside of a training, with a loss that is declared to be a mean, interleaved stages."""
    return evaluated_outside(plain_loss, product={**INTERLEAVED, "loss_reduction": "mean"})


@case("K2")
def predictions_outside_interleaved() -> Script:
    """`predict()` without a training, with a loss of two calls, and then the stock loss's `evaluate()`."""

    def drive(trainer: Any) -> list[Any]:
        output = trainer.predict(samples(12))
        return [output.predictions.tolist(), output.metrics["test_loss"]]

    return evaluated_outside(product=INTERLEAVED, drive=drive)


@case("K2")
def calls_in_prediction_step_outside() -> Script:
    """`prediction_step` calls the model twice, in evaluations outside of the training, interleaved stages."""

    class Predicts:
        def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            with torch.no_grad():
                first, second = model(inputs["input_ids"])["logits"], model(inputs["input_ids"].flip(1))["logits"]
            return F.cross_entropy(first + second, inputs["labels"]), first, inputs["labels"]

    def drive(trainer: Any) -> list[float]:
        return [trainer.evaluate()["eval_loss"], trainer.evaluate(samples(8))["eval_loss"]]

    return evaluated_outside(trainer=Predicts, product=INTERLEAVED, drive=drive)


@case("K2")
def calls_in_callbacks_outside() -> Script:
    """A callback of the main process calls the model at each step of an evaluation outside of the training."""
    seen: list[float] = []

    def act(callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if callback.trainer.args.process_index == 0:
            with torch.no_grad():
                seen.append(callback.trainer.model(torch.arange(8)[None] + 5)["logits"].sum().item())

    def drive(trainer: Any) -> Any:
        return [trainer.evaluate()["eval_loss"], seen[:1]]

    return evaluated_outside(callbacks=[Each(act, "on_prediction_step")], product=INTERLEAVED, drive=drive)
