"""Losses and trainers that ask for other processes, as code for several GPUs does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional as F

from ..kit import (
    EVALUATION_LAYOUT,
    LOG_WITHOUT_LOSS,
    TWO_NUMBERS_OF_PROCESSES,
    Inputs,
    LossAndOutputs,
    Script,
    bert,
    case,
    own_loss,
    samples,
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
        by_offset: Add a term whose labels begin at the process's first row.
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


@case("K2", fails=TWO_NUMBERS_OF_PROCESSES)
def negatives_by_accelerator() -> Script:
    """`accelerator.gather` and `accelerator.num_processes`."""
    return in_batch_negatives()


@case("K2", fails=TWO_NUMBERS_OF_PROCESSES)
def negatives_by_world_size() -> Script:
    """`accelerator.gather` and `torch.distributed.get_world_size()`."""

    def number(trainer: Any) -> int:
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1

    return in_batch_negatives(number)


@case("K2", fails=TWO_NUMBERS_OF_PROCESSES)
def negatives_by_arguments() -> Script:
    """`accelerator.gather` and `args.world_size`."""
    return in_batch_negatives(lambda trainer: trainer.args.world_size)


@case("K2", fails=TWO_NUMBERS_OF_PROCESSES)
def negatives_by_offset() -> Script:
    """Labels begin at `accelerator.process_index` times the number of rows."""
    return in_batch_negatives(by_offset=True)


@case("K2", fails=TWO_NUMBERS_OF_PROCESSES)
def negatives_by_torch() -> Script:
    """`torch.distributed.all_gather` and `accelerator.num_processes`."""
    return in_batch_negatives(gather=by_torch)


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


@case("K2", fails=LOG_WITHOUT_LOSS)
def parts_of_the_loss_in_log() -> Script:
    """An override of `log` averages what `compute_loss` has collected."""

    def observe(trainer: Any) -> dict[str, Any]:
        history = trainer.state.log_history
        return {name: [entry[name] for entry in history if name in entry] for name in ("entropy", "penalty")}

    data = samples(48, shortest=6, longest=15)
    return Script(model=bert(), data=data, trainer=PartsOfTheLoss, options=ADAMW, observe=observe)


@case("K2", fails=EVALUATION_LAYOUT)
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
