"""Code that shows how often it has been run: in the loss, or in a frozen module."""

from __future__ import annotations

import copy
import os
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from ..kit import (
    VOCABULARY,
    WIDTH,
    At,
    Backbone,
    FrozenBackbone,
    Inputs,
    Loss,
    LossAndOutputs,
    Script,
    case,
    classified,
    own_loss,
    pad,
    plain_loss,
    pool,
    samples,
)

RAGGED: dict[str, Any] = {"number": 40, "shortest": 4, "longest": 14}


def ragged(loss: Loss = plain_loss, model: nn.Module | None = None, epochs: int = 2, **fields: Any) -> Script:
    """A frozen backbone on samples of other lengths, and the user's loss."""
    options = {"num_train_epochs": epochs}
    model = model or FrozenBackbone()
    return Script(model=model, data=samples(**RAGGED), trainer=own_loss(loss), options=options, **fields)


def weighted(weight: Any, wire: Any, is_late: bool = False, **fields: Any) -> Script:
    """The loss is multiplied by `weight(trainer, inputs)`, computed before or after the call of the model."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        factor = None if is_late else weight(trainer, inputs)
        outputs = model(**inputs)
        return outputs["loss"] * (weight(trainer, inputs) if is_late else factor), outputs

    return ragged(loss, wire=wire, **fields)


# ---------------------------------------------------------------------------------------------------------
# State of the loss
# ---------------------------------------------------------------------------------------------------------


def begin_weights(trainer: Any) -> None:
    """Give the trainer an iterator over weights."""
    trainer.weights = iter([1 + 0.1 * k for k in range(1000)])


@case("K1", "K2")
def second_iterator() -> Script:
    """The loss takes a weight from an iterator of its own, as replay of other data does."""
    return weighted(lambda trainer, inputs: next(trainer.weights), begin_weights)


@case("K1", "K2")
def second_iterator_after_the_call() -> Script:
    """The loss takes a weight from an iterator of its own, after the model has been called."""
    return weighted(lambda trainer, inputs: next(trainer.weights), begin_weights, is_late=True)


@case("K1", "K2")
def second_loader() -> Script:
    """The loss takes a batch from a data loader of its own."""

    def wire(trainer: Any) -> None:
        trainer.other = iter(DataLoader([torch.tensor(1 + 0.1 * k) for k in range(400)], batch_size=2))

    return weighted(lambda trainer, inputs: next(trainer.other).mean(), wire)


@case("K1", "K2")
def queue_of_labels() -> Script:
    """The loss takes from a queue, and puts its labels' mean in."""

    def wire(trainer: Any) -> None:
        trainer.queue = queue.Queue()
        for k in range(8):
            trainer.queue.put(k / 8)

    def weight(trainer: Any, inputs: Inputs) -> float:
        taken = trainer.queue.get()
        trainer.queue.put(float(inputs["labels"].float().mean()))
        return 1 + taken

    return weighted(weight, wire)


COUNTED = [0]


@case("K1", "K2")
def counter_of_the_script() -> Script:
    """The loss counts its runs in a variable of the script's module."""

    def weight(trainer: Any, inputs: Inputs) -> float:
        COUNTED[0] += 1
        return 1 + 0.1 * COUNTED[0]

    return weighted(weight, lambda trainer: None)


@case("K1", "K2")
def counter_in_objects() -> Script:
    """The loss counts its runs in an object of an object of the trainer."""

    def wire(trainer: Any) -> None:
        trainer.meter = SimpleNamespace(inner=SimpleNamespace(runs=0))

    def weight(trainer: Any, inputs: Inputs) -> float:
        trainer.meter.inner.runs += 1
        return 1 + 0.1 * trainer.meter.inner.runs

    return weighted(weight, wire)


@case("K1", "K2")
def log_in_the_loss() -> Script:
    """The loss logs a number in each run."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        if model.training:
            trainer.log({"mine": float(outputs["loss"].detach())})
        return outputs["loss"], outputs

    return ragged(
        loss, observe=lambda trainer: {"mine": [e["mine"] for e in trainer.state.log_history if "mine" in e]}
    )


@case("K1", "K2")
def critic_with_an_optimizer() -> Script:
    """A critic is trained by an optimizer of its own inside the loss."""

    def wire(trainer: Any) -> None:
        torch.manual_seed(4)
        trainer.critic = nn.Linear(3, 1)
        trainer.critic_optimizer = torch.optim.SGD(trainer.critic.parameters(), lr=0.1)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        with torch.enable_grad():
            judged = trainer.critic(outputs["logits"].detach())
            trainer.critic_optimizer.zero_grad()
            (judged - inputs["labels"][:, None].float()).pow(2).mean().backward()
            trainer.critic_optimizer.step()
        return outputs["loss"] + 0.1 * trainer.critic(outputs["logits"]).mean(), outputs

    return ragged(loss, wire=wire)


@case("K1", "K2")
def file_of_lines() -> Script:
    """The loss appends a line to a file in each run."""
    path = Path(f"lines-{os.getpid()}.txt")

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if model.training:
            with path.open("a") as file:
                file.write("step\n")
        return plain_loss(trainer, model, inputs)

    return ragged(loss, observe=lambda trainer: {"lines": len(path.read_text().split()) if path.exists() else 0})


@case("K1")
def trained_twice() -> Script:
    """`train()` is called again with more epochs."""

    def drive(trainer: Any) -> None:
        trainer.train()
        trainer.args.num_train_epochs = 4
        trainer.train()

    return ragged(drive=drive)


# ---------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------


class EditedLater(FrozenBackbone):
    """The embeddings are used twice, and edited in place from the 15th run on."""

    runs = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.runs += self.training
        x = self.backbone.embedding(input_ids)
        if self.runs > 14:
            x.mul_(0.3)
        y = x
        for layer in self.backbone.layers:
            y = layer(y)
        return classified(self.head(pool(y, attention_mask) + pool(x, attention_mask)), labels)


@case("K1")
def intermediate_output_edited_later() -> Script:
    """A frozen module's output is edited in place, in later steps only."""
    return ragged(model=EditedLater(), epochs=4)


class MomentumContrast(nn.Module):
    """A trained encoder, and a frozen one that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = Backbone()
        self.keys = copy.deepcopy(self.queries).requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        queries, keys = self.queries(input_ids).mean(1), self.keys(input_ids).mean(1)
        logits = F.normalize(queries, dim=1) @ F.normalize(keys, dim=1).t() / 0.2
        return {"loss": F.cross_entropy(logits, torch.arange(len(logits))), "logits": logits}


def momentum_contrast(momentum: float) -> Script:
    """The frozen encoder follows through `.data`, as in the code of the MoCo paper."""

    def follow(model: Any, step: int) -> None:
        for trained, frozen in zip(model.queries.parameters(), model.keys.parameters(), strict=True):
            frozen.data = frozen.data * momentum + trained.data * (1 - momentum)

    return ragged(model=MomentumContrast(), callbacks=[At(follow, range(100), "on_step_end")])


@case("K1")
def momentum_encoder() -> Script:
    """A frozen encoder that follows the trained one."""
    return momentum_contrast(0.999)


@case("K1")
def momentum_encoder_that_hardly_moves() -> Script:
    """A frozen encoder follows the trained one, by less than rounding can show."""
    return momentum_contrast(0.9999999)


@case("K1")
def tied_frozen_embeddings() -> Script:
    """A GPT-2 with frozen embeddings, which are also its head, and a frozen first layer."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 3, "n_head": 2, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=1, eos_token_id=2))
    for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0]):
        part.requires_grad_(False)

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return pad([{**row, "labels": row["input_ids"]} for row in rows])

    return ragged(model=model, epochs=3, collator=collate)
