"""Describes the inputs of a call of the model: its rows, their entries, and the state in which modules are called."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from ...model.called_inputs import NOT_OF_STATES, version_of
from ...model.micro_batch import Batch, batch_rows
from ...model.plain_runs import state_of_torch
from ..prefix_cache.cache.batch_entries import WHOLE, Tokens
from ..prefix_cache.cache.known_code import foreign_code, is_known
from ..prefix_cache.cache.origins import tensors_in
from ..prefix_cache.cache.values import own_forward
from .calls import KnownBatch
from .divided import Rows, rows_of
from .finding import states_of, with_adapters
from .reasons import NO_ROWS, OTHER_STATE, OTHER_VALUES
from .rows import PaddingValues, entries_of, is_wide, leaves_of, tokens_of
from .trial import FrontTrial

ITEMS = "num_items_in_batch"


class InputDescriber:
    """Describes the inputs of a front's calls.

    Args:
        model: the model.
        reads: names of the batch inputs that the front depends on.
        device: device of the model.
        trial: the front's trial.
    """

    def __init__(self, model: nn.Module, reads: Collection[str], device: torch.device, trial: FrontTrial) -> None:
        self.padding = PaddingValues()
        """The padding values of the inputs."""
        self._reads, self._device, self._trial = frozenset(reads), device, trial
        self._with_adapters = with_adapters(model)
        self._has_users_code = bool(foreign_code(model))  # around the front, perhaps
        self._spaces = [vars(module) for module in model.modules() if next(module.children(), None) is not None]
        # arguments that are no tensors and input names; torch and adapters
        self._around: tuple[dict[str, str], str] | None = None
        self.num_refused = 0
        """Calls in a row that were not described, although they have all inputs."""
        self._why_not, self._has_told = "", False
        self._inside: str | None = None  # torch and adapters where the front's first module is called

    @property
    def _state(self) -> str:
        """The state of torch and of the adapters, in words."""
        return f"{state_of_torch(self._device.type)} {states_of(self._with_adapters)}"

    def is_called_as_before(self) -> bool:
        """Whether torch and adapters are as when the front was tried. Asked where its first module is called.

        The forward of the model around it may set them.
        """
        state = self._state
        self._inside = self._inside or state
        return state == self._inside

    def knows_padding(self, inputs: Batch, tokens: Tokens) -> bool:
        """Whether more padding can be added to the inputs."""
        return self.padding.are_known(inputs, self._reads, tokens)

    def rows(self, inputs: Batch) -> Rows | None:
        """The rows that have an entry each; None if the call cannot be divided into them."""
        rows = rows_of(self._reads, inputs) if self._reads <= inputs.keys() else None
        if rows is None or not self._trial.is_by_sample:
            return rows
        samples = batch_rows(inputs)
        return Rows(samples) if samples and rows.count % samples == 0 and not rows.patches else None

    def _refuse(self, inputs: Batch, why: str) -> None:
        """Record why a call is not described. Without all inputs of the front (images, say), it is not computed."""
        if all(tensors_in(inputs.get(name)) for name in self._reads):
            self._why_not, self.num_refused = why, self.num_refused + 1

    def take_why_not(self, again: bool = False) -> str:
        """Why a call could not be described; empty if all could, or, without `again`, if it was taken before."""
        why = self._why_not if again or not self._has_told else ""
        self._has_told |= bool(why)
        return why

    def described(self, inputs: Batch) -> KnownBatch | None:
        """Describe the inputs of a call; None if the call can neither be stored nor read."""
        values = {name: value for name, value in inputs.items() if not tensors_in(value) and name != ITEMS}
        plain = {name: value for name, value in values.items() if name not in NOT_OF_STATES}
        names = sorted(inputs.keys() - NOT_OF_STATES)
        state = self._state
        named = {**values, **{name: "" for name in names if name not in values}}
        around = {name: repr(value) for name, value in named.items()}
        self._around = self._around or (around, state)
        if (around, state) != self._around:
            first = self._around[0]
            others = [name for name in sorted({*around, *first}) if around.get(name) != first.get(name)]
            self._refuse(inputs, OTHER_VALUES.format(", ".join(others)) if others else OTHER_STATE)
            return None
        tokens = tokens_of(inputs) if self._trial.cuts_padding else None  # else padding is stored
        rows = self.rows(inputs)
        if rows is None or (rows.count > 1 and self._trial.is_of_one):
            self._refuse(inputs, NO_ROWS)
            return None
        self.num_refused = 0
        tokens = tokens or Tokens((WHOLE,) * rows.count, 0)
        if rows.count != len(tokens.spans):
            return None
        if self._trial.keeps_padding and not self.padding.is_same(inputs, self._reads, tokens):
            return None
        leaves = list(leaves_of({name: inputs[name] for name in self._reads}))
        entries = entries_of(leaves, rows, tokens, f"{plain} {tokens.width > 0} {state} {self._inside}")
        if entries is None:
            return None
        given = [(k, n, t, is_wide(n, t, tokens)) for k, (n, t) in enumerate(leaves) if isinstance(t, torch.Tensor)]
        shapes = [(n, t.dtype, wide, tuple(t.shape[2 if wide else 1 :])) for _, n, t, wide in given]
        times = {len(t) // rows.count for _, _, t, _ in given if t.dim()} if self._trial.is_by_sample else ()
        # a user's code or hook may write into them unseen (`.data`, NumPy): where it may, they are compared by value
        is_plain = (
            not self._has_users_code and not self._trial.hooks.are_any and not any(map(_has_users, self._spaces))
        )
        inputs_given = given if is_plain else []
        covered = {id(t): (k, version_of(t)) for k, name, t, _ in inputs_given if name not in NOT_OF_STATES}
        signature = repr((shapes, times)), rows.count == 1, torch.is_grad_enabled()
        return KnownBatch(entries, rows, signature, covered)


def _has_users(attributes: Mapping[str, Any]) -> bool:
    """Whether a module with these attributes has a `forward` of the user's in place of its class's."""
    return "forward" in attributes and not is_known(own_forward(attributes))
