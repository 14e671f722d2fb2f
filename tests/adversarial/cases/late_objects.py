"""Gradients without a parameter, objects of the trainer that the loss changes, and objects that are looked into."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..kit import LABELS, Each, Script, bert, case, classified, pool, samples
from .attack_front import OnBert
from .attack_recipes_front import of

REENTRANT = {"use_reentrant": True}

# ---------------------------------------------------------------------------------------------------------
# Reentrant gradient checkpoints: a trained layer gets a gradient only if its input requires one
# ---------------------------------------------------------------------------------------------------------


def half_frozen(model: Any = None, **fields: Any) -> Script:
    """A BERT whose embeddings and lower layers are frozen."""
    model = model or bert()
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[:2].requires_grad_(False)
    return of(model, data=samples(32, 8, 8), **fields)


@case("K1")
def reentrant_checkpoints_above_frozen_layers() -> Script:
    """The embeddings' output is made to require a gradient, which upper layers need in reentrant checkpoints."""
    return half_frozen(options={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": REENTRANT})


@case("K1")
def reentrant_checkpoints_by_hand() -> Script:
    """The script itself turns reentrant checkpoints on."""
    model = bert()
    model.gradient_checkpointing_enable(REENTRANT)
    return half_frozen(model)


@case("K1")
def reentrant_checkpoints_above_adapters() -> Script:
    """Adapters of upper layers alone are trained, in reentrant checkpoints."""
    chosen: dict[str, Any] = {"target_modules": ["query", "value"], "layers_to_transform": [2, 3]}
    model = get_peft_model(bert(), LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False, **chosen))
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": REENTRANT}
    return of(model, data=samples(32, 8, 8), options=options)


@case("K1")
def reentrant_checkpoints_from_the_third_epoch() -> Script:
    """A callback turns reentrant checkpoints on while outputs of frozen layers are read."""

    def turn_on(callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 8:
            model.gradient_checkpointing_enable(REENTRANT)

    return half_frozen(callbacks=[Each(turn_on, "on_step_begin")])


class Checkpointed(OnBert):
    """Runs the frozen BERT in a reentrant checkpoint of its own, and a trained layer in another one."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.layer, self.writes = nn.Linear(self.head.in_features, self.head.in_features), writes
        self.bert.enable_input_require_grads()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedded(input_ids, attention_mask)
        if self.writes:
            x = x.mul_(1.5)
        x = checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=True)
        return classified(self.head(pool(x, attention_mask)), labels)

    def embedded(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


class Inside(Checkpointed):
    def embedded(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        anything = torch.ones(1, requires_grad=True)
        run: Any = super().embedded
        return checkpoint(lambda _: run(input_ids, attention_mask), anything, use_reentrant=True)


@case("K1")
def reentrant_checkpoint_of_a_layer_above() -> Script:
    """A trained layer of the user's runs in a reentrant checkpoint above a frozen BERT."""
    return of(Checkpointed(), data=samples(32, 8, 8))


@case("K1")
def reentrant_checkpoint_around_the_frozen_module() -> Script:
    """The frozen module itself runs in a reentrant checkpoint: its output gets a graph after it has returned."""
    return of(Inside(), data=samples(32, 8, 8))


@case("K1")
def written_output_that_requires_a_gradient() -> Script:
    """The model writes into a copy of the output, which requires a gradient, in place."""
    return of(Checkpointed(writes=True), data=samples(32, 8, 8))


# ---------------------------------------------------------------------------------------------------------
# Dicts of the user's that compute their values
# ---------------------------------------------------------------------------------------------------------


class Lazy(dict[str, Any]):
    """A dict that counts how often its values are asked for."""

    num_asked = 0

    def _asked(self) -> None:
        type(self).num_asked += 1

    def items(self) -> Any:
        self._asked()
        return super().items()

    def values(self) -> Any:
        self._asked()
        return super().values()

    def __iter__(self) -> Any:
        self._asked()
        return super().__iter__()
