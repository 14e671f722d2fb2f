"""The inputs that a model is called on, compared with those of the batch."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .origins import NOT_OF_STATES
from .tags import TAGS, blanked

LABELS_AND_DECODER: frozenset[str] = frozenset(
    {"labels", "label", "label_ids", "decoder_input_ids", "decoder_attention_mask"}
)
"""Inputs that only the loss, or the decoder of an encoder-decoder model, reads."""

PLAIN = (bool, int, float, str, type(None))

ROUNDING = 2.0**-7
"""Bound on the change when an input is converted to bf16, relative to the largest value, with some margin."""


class RecordedInputs:
    """A batch's inputs at this moment, to be compared with those that the model is called on.

    It detects a mixup that replaces the inputs as well as one that writes into them, at any time. Comparing costs a
    check of each tensor's identity and version; values are compared only if the tensor object differs.

    Args:
        batch: the model's inputs.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self._inputs = {name: (value, version_of(value)) for name, value in batch.items() if name != TAGS}

    @property
    def named(self) -> dict[str, Any]:
        return {name: value for name, (value, _) in self._inputs.items()}

    def are(self, inputs: Mapping[str, Any], ignored: Collection[str], added: Mapping[str, Any] | None = None) -> bool:
        """Whether a model that is called on these inputs computes the same states.

        Args:
            inputs: the model's arguments.
            ignored: names of inputs that no frozen layer reads.
            added: settings that the loss adds to every batch, by name (`added_settings`).
        """
        unread = {*ignored, *NOT_OF_STATES}
        are_here = all(
            name in inputs and _is_same(value, version, inputs[name])
            for name, (value, version) in self._inputs.items()
            if name not in unread
        )
        return are_here and all(
            name in self._inputs or name in unread or value is None or _is_setting(added or {}, name, value)
            for name, value in inputs.items()
        )

    def are_exchanged(self, inputs: Mapping[str, Any], ignored: Collection[str]) -> bool:
        """Whether the model is called on different inputs, beyond what rounding to another data type explains.

        An input that is only missing, or only added, may be the model's default, or the loss's own.
        """
        mine = self._inputs.keys() - {*ignored, *NOT_OF_STATES}
        known = {id(value) for value, _ in self._inputs.values()}
        added = [
            name
            for name in inputs.keys() - {*self._inputs, *ignored, *NOT_OF_STATES}
            if isinstance(inputs[name], torch.Tensor) and id(inputs[name]) not in known
        ]
        return bool(added and mine - inputs.keys()) or any(
            not _is_same(*self._inputs[name], inputs[name], ROUNDING) for name in mine & inputs.keys()
        )


@dataclass(frozen=True)
class TagsApart:
    """The tags of a batch, taken out of it, so that a user's methods get the batch as their collator returned it.

    Attributes:
        tensor: the tags.
        inputs: the inputs to which the tags belong.
    """

    tensor: torch.Tensor
    inputs: RecordedInputs

    @classmethod
    def taken_out_of(cls, batch: Any) -> tuple[Any, TagsApart | None]:
        """Return the batch without its tags, and the tags; None if it has none."""
        if not isinstance(batch, Mapping) or TAGS not in batch:
            return batch, None
        tensor = batch[TAGS]
        if isinstance(batch, MutableMapping):
            del batch[TAGS]
        else:
            batch = {name: value for name, value in batch.items() if name != TAGS}
        return batch, cls(tensor, RecordedInputs(batch))

    def blank(self) -> TagsApart:
        """The same with blank tags, for use where the tags must have no effect."""
        return TagsApart(blanked(self.tensor), self.inputs)


def added_settings(batch: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values among a model's arguments that are not in the batch: the loss adds them to every batch.

    Args:
        batch: the batch.
        inputs: the model's arguments in a call on this batch.
    """
    varying = NOT_OF_STATES - {"use_cache"}  # a call's number of items
    return {
        name: value
        for name, value in inputs.items()
        if name not in batch and name not in varying and value is not None and isinstance(value, PLAIN)
    }


def _is_setting(added: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in added and type(value) is type(added[name]) and value == added[name]


def named_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inputs that a model is called on, by name."""
    if not args:
        return kwargs
    names = itertools.islice(inspect.signature(type(model).forward).parameters, 1, None)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def version_of(value: Any) -> int:
    """Number of writes into a tensor; inference-mode tensors do not count them."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _is_same(noted: Any, version: int, value: Any, rounding: float = 0.0) -> bool:
    """Whether a value equals the recorded one. It waits for the device only if the tensor object differs."""
    if version_of(noted) != version:
        return False
    if value is noted:
        return True
    if isinstance(noted, PLAIN):
        return type(noted) is type(value) and noted == value
    if not isinstance(noted, torch.Tensor):
        return rounding > 0  # a batch with keys has no such values; other arguments may be anything
    if not isinstance(value, torch.Tensor) or value.shape != noted.shape:
        return False
    if not value.layout == noted.layout == torch.strided:
        return False
    value = value.to(noted.device)
    if rounding and noted.numel() and noted.is_floating_point():
        difference = (value.float() - noted.float()).abs().max()
        return bool(difference <= rounding * noted.float().abs().max())
    return (rounding > 0 or value.dtype == noted.dtype) and torch.equal(value.to(noted.dtype), noted)
