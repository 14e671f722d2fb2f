"""The parts that the cases share: tiny models, data, the registry of cases, and the kinds of failures known today.

    @case("K2", fails=INSTRUMENTED_MODEL)
    def rate_of_dropout() -> Script:
        '''The loss sets the dropout rate of each layer.'''
        return with_loss(loss)

A case is a function that returns a `Script`. It is called anew in each process. `fails` says why a case fails today,
and marks its test as a strict `pytest.mark.xfail`: once the case passes, `fails` has to be removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback
from user_code.kit import Case as UsersCase
from user_code.kit import Job, Layout, Rows

VOCABULARY, WIDTH, LABELS, FIRST_WORD = 64, 16, 3, 5
BATCH = 8

LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("K1", world=1, stages=1),
        Layout("K2", world=2, stages=2),
        Layout("K3", world=3, stages=3),
        Layout("R2", world=2, stages=1),
        Layout("K2R2", world=4, stages=2),
    )
}
"""K: number of stages. R: number of replicas."""

# ---------------------------------------------------------------------------------------------------------
# Why cases fail today
# ---------------------------------------------------------------------------------------------------------

INSTRUMENTED_MODEL = "the library's instrumentation is part of the user's model"

# ---------------------------------------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------------------------------------


@dataclass
class Script(Job):
    """The arguments of a Trainer, and the rest of the user's script.

    Attributes:
        batch: Samples of a micro-step over all processes.
        product: Arguments of the product alone.
        wire: Called with the trainer before it trains.
        drive: Trains; its result is compared as well.
    """

    batch: int = BATCH
    product: dict[str, Any] = field(default_factory=dict)
    wire: Callable[[Any], None] = lambda trainer: None


@dataclass(frozen=True)
class Case(UsersCase):
    """One case.

    Attributes:
        fails: Layout -> why the case fails there today.
        slack: Factor of the tolerances of `user_code.verdicts`.
    """

    fails: dict[str, str] = field(default_factory=dict)
    slack: float = 1.0


CASES: dict[str, Case] = {}


def case(
    *layouts: str, expect: str = "equal", because: str = "", fails: str | dict[str, str] = "", slack: float = 1.0
) -> Callable[[Callable[[], Script]], Callable[[], Script]]:
    """Enter a function into `CASES`.

    Args:
        *layouts: Names in `LAYOUTS`.
        expect: "equal"; "exact" (equal, or refused on all processes); "crash" (the user's own error, and no hang).
        because: Part of the message of the refusal or the error: the name of the setting or call that is refused.
        fails: Why the case fails today, in all layouts or by layout.
        slack: Factor of the tolerances.
    """
    assert set(layouts) <= set(LAYOUTS)

    def enter(make: Callable[[], Script]) -> Callable[[], Script]:
        name = make.__name__
        assert name not in CASES, name
        reasons = fails if isinstance(fails, dict) else dict.fromkeys(layouts, fails) if fails else {}
        what = (make.__doc__ or "").strip().partition("\n")[0]
        CASES[name] = Case(name, what, make.__module__, make, layouts, expect, because, reasons, slack)
        return make

    return enter


# ---------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """[B, S, H] -> [B, S, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + torch.tanh(self.linear(x)))


class Backbone(nn.Module):
    """Embeddings and layers."""

    def __init__(self, layers: int = 6, layer: type[nn.Module] = Layer) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def pool(x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """[B, S, H] -> [B, H]: the mean over positions that are not padding."""
    if attention_mask is None:
        return x.mean(1)
    return (x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)


def classified(logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    """The outputs of a classifier, with a loss if there are labels."""
    return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Network(Backbone):
    """A classifier of the user's own. All parameters are trained."""

    def __init__(self, layers: int = 3, layer: type[nn.Module] = Layer) -> None:
        super().__init__(layers, layer)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        return classified(self.head(pool(super().forward(input_ids), attention_mask)), labels)


class FrozenBackbone(nn.Module):
    """A trained head on a frozen backbone."""

    def __init__(self, backbone: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone: Any = backbone or Backbone()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, LABELS))
        self.backbone.requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return classified(self.head(pool(self.backbone(input_ids, attention_mask), attention_mask)), labels)


def bert_config(**changes: Any) -> BertConfig:
    """A tiny BERT without dropout."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": 2}
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 32}
    return BertConfig(**{"vocab_size": VOCABULARY, "num_labels": LABELS, **sizes, **plain, **changes})


def bert(**changes: Any) -> BertForSequenceClassification:
    return BertForSequenceClassification(bert_config(**changes))


# ---------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------


def samples(
    number: int = 32, shortest: int = 8, longest: int = 8, seed: int = 7, labels: int = LABELS, by_word: bool = False
) -> Rows:
    """Random words with labels.

    Args:
        number: Of samples.
        shortest: Least number of words.
        longest: Largest number of words.
        seed: Of the words.
        labels: Number of classes.
        by_word: One label for each word, in place of one for each sample.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(number):
        length = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        words = torch.randint(FIRST_WORD, VOCABULARY, (length,), generator=generator)
        label = words % labels if by_word else words.sum() % labels
        rows.append({"input_ids": words, "attention_mask": torch.ones_like(words), "labels": label})
    return Rows(rows)


def pad(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Words are padded with 0, labels of words with -100."""
    longest = max(len(row["input_ids"]) for row in rows)

    def column(name: str) -> Tensor:
        filler = -100 if name == "labels" else 0
        return torch.stack(
            [F.pad(r[name], (0, longest - len(r[name])), value=filler) if r[name].dim() else r[name] for r in rows]
        )

    return {name: column(name) for name in rows[0]}


# ---------------------------------------------------------------------------------------------------------
# Losses and callbacks
# ---------------------------------------------------------------------------------------------------------

Inputs = dict[str, Tensor]
LossAndOutputs = tuple[Tensor, Any]
Loss = Callable[[Any, Any, Inputs], LossAndOutputs]
"""(trainer, model, inputs) -> loss, outputs."""


def own_loss(loss: Loss, *bases: type) -> type:
    """A mixin for a Trainer, with the given function as `compute_loss`."""

    class OwnLoss(*bases):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            value, outputs = loss(self, model, inputs)
            return (value, outputs) if return_outputs else value

    return OwnLoss


def plain_loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
    """The model's own loss, by a `compute_loss` of the user's."""
    outputs = model(**inputs)
    return outputs["loss"], outputs


def with_loss(loss: Loss = plain_loss, model: nn.Module | None = None, **fields: Any) -> Script:
    """Six steps of a classifier with the user's loss."""
    fields = {"data": samples(48), "trainer": own_loss(loss), **fields}
    fields["options"] = {"num_train_epochs": 1, **fields.get("options", {})}
    return Script(model=model or Network(), **fields)


def train_and_resume(trainer: Any) -> None:
    """Train, spoil the weights, and train again from the checkpoint of step 3."""
    trainer.train()
    trainer.model.load_state_dict({k: v * 0 + 1 for k, v in trainer.model.state_dict().items()})
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-3")


class Each(TrainerCallback):
    """Calls `act(callback, state, control, **others)` at an event; `callback.trainer` is the trainer."""

    trainer: Any

    def __init__(self, act: Callable[..., None], event: str = "on_step_end") -> None:
        self.act = act
        setattr(self, event, self._run)

    def _run(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.act(self, state, control, **others)


class At(TrainerCallback):
    """Calls `change(model, step)`, without gradients, at an event of some steps."""

    def __init__(self, change: Callable[[Any, int], None], steps: Iterable[int], event: str = "on_step_begin") -> None:
        self.change, self.steps = change, tuple(steps)
        setattr(self, event, self._run)

    def _run(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step in self.steps:
            with torch.no_grad():
                self.change(model, state.global_step)
