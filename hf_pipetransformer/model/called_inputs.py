"""Compares the inputs of a call of the model with the inputs of the batch."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .tags import TAGS, blanked

LABELS_AND_DECODER: frozenset[str] = frozenset(
    {"labels", "label", "label_ids", "decoder_input_ids", "decoder_attention_mask"}
)
"""Inputs that only the loss, or the decoder of an encoder-decoder model, reads."""

SELECTING: frozenset[str] = frozenset({"output_attentions", "output_hidden_states", "return_dict", "use_cache"})
"""Arguments that select what a module returns."""

NOT_OF_STATES: frozenset[str] = SELECTING | {"num_items_in_batch", "return_loss", "shift_labels", "skip_logits"}
"""Model arguments that select the returned values and the form of the loss; they change no layer's output."""

PLAIN = (bool, int, float, str, type(None))

ROUNDING = 2.0**-7
"""Bound on the change when an input is converted to bf16, relative to the largest value, with some margin."""


class RecordedInputs:
    """A snapshot of a batch's inputs, to be compared with the inputs of the model's calls.

    It detects a mixup that replaces inputs, and one that writes into them. A comparison checks each tensor's identity
    and version; values are compared only if the tensor object differs.

    Args:
        batch: the model's inputs.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self._inputs = {name: (value, version_of(value)) for name, value in batch.items() if name != TAGS}

    @property
    def named(self) -> dict[str, Any]:
        return {name: value for name, (value, _) in self._inputs.items()}

    def are(self, inputs: Mapping[str, Any], ignored: Collection[str]) -> bool:
        """Whether a model that is called on these inputs computes the same states.

        Args:
            inputs: the model's arguments.
            ignored: names of inputs that no frozen layer reads.
        """
        return not self._others(inputs, {*ignored, *NOT_OF_STATES}, rounding=0.0)

    def exchanged(self, inputs: Mapping[str, Any], ignored: Collection[str], defaults: Mapping[str, Any]) -> list[str]:
        """Names of the inputs that are changed, missing or added. Rounding to another dtype is not a change.

        Args:
            inputs: the model's arguments.
            ignored: names of inputs that are not compared.
            defaults: the default values of the forward's parameters.
        """
        unread = {*ignored, *NOT_OF_STATES}
        others = self._others(inputs, unread, ROUNDING)
        return [n for n in others if n in self._inputs or not _is_default(n, inputs[n], defaults)]

    def _others(self, inputs: Mapping[str, Any], unread: Collection[str], rounding: float) -> list[str]:
        given = {name: noted for name, noted in self._inputs.items() if name not in unread}
        changed = [
            name
            for name, (value, version) in given.items()
            if not (name in inputs and _is_same(value, version, inputs[name], rounding))
            and not (rounding and value is None and inputs.get(name) is None)
        ]
        added = (name for name, value in inputs.items() if value is not None and name not in self._inputs)
        return [*changed, *(name for name in added if name not in unread)]


@dataclass(frozen=True)
class BatchTags:
    """The tags of a batch, taken out of it, because the user's methods get the batch as the collator returned it.

    Attributes:
        tensor: the tags.
        inputs: the inputs that the tags belong to.
    """

    tensor: torch.Tensor
    inputs: RecordedInputs

    @classmethod
    def taken_out_of(cls, batch: Any) -> tuple[Any, BatchTags | None]:
        """Return the batch without its tags, and the tags; None if it has none."""
        if not isinstance(batch, Mapping) or TAGS not in batch:
            return batch, None
        tensor = batch[TAGS]
        if isinstance(batch, MutableMapping):
            del batch[TAGS]
        else:
            batch = {name: value for name, value in batch.items() if name != TAGS}
        return batch, cls(tensor, RecordedInputs(batch))

    def blank(self) -> BatchTags:
        """The same with blank tags, for use where the tags must have no effect."""
        return BatchTags(blanked(self.tensor), self.inputs)


def named_inputs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call of the model, by name."""
    if not args:
        return kwargs
    names = itertools.islice(inspect.signature(type(model).forward).parameters, 1, None)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def added_settings(batch: Collection[str], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The plain values among a model's arguments that are not in the batch and may change hidden states.

    Args:
        batch: the names of the batch's entries.
        inputs: the model's arguments in a call on this batch.
    """
    unknown = inputs.keys() - NOT_OF_STATES - set(batch)
    return {name: inputs[name] for name in unknown if inputs[name] is not None and isinstance(inputs[name], PLAIN)}


def defaults_of(model: nn.Module) -> dict[str, Any]:
    """The default values of a forward's parameters."""
    return {name: p.default for name, p in inspect.signature(type(model).forward).parameters.items()}


def _is_default(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    return isinstance(value, PLAIN) and name in defaults and _is_same(defaults[name], 0, value)


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
