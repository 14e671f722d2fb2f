"""Splits a batch of sequences along its tokens.

Labels are shifted on the whole sequence before the split. Otherwise the last token of each slice would lose its label:

    input_ids      the  cat │ sat  down          slice 0: the cat   slice 1: sat down
    shift_labels   cat  sat │ down  -                     cat sat            down -
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UnsupportedModelError
from ..model.loss_scaling import IGNORED
from ..model.micro_batch import Batch
from .kv_slices import CHUNKED, FULL, SLIDING, SequenceStates, SliceCache, Windows, cache_argument

MASKS = {FULL: create_causal_mask, SLIDING: create_sliding_window_causal_mask}
REMEDY = "Set token_slices='off'."
ROTARY_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings with frequencies that depend on the length of the input sequence."""


def sequence_length(batch: Mapping[str, Any]) -> int:
    """Number of tokens of a sample.

    Raises:
        ValueError: if the batch has no tokens.
    """
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(batch.get(name), torch.Tensor):
            return int(batch[name].shape[1])
    raise ValueError(
        f"token_slices requires input_ids in each batch, but this one has {', '.join(sorted(batch))}. Set"
        " token_slices='off' or change the data collator."
    )


class SlicedSequence:
    """One micro-batch in slices that share their keys and values.

    Args:
        model: a causal model that `probe_slicing` has accepted.
        batch: keyword arguments of the model's forward, samples x tokens.
        lengths: lengths of the slices; they add up to the number of tokens.
        windows: attention windows of the model, from `probe_slicing`.
        num_frozen: number of layers at the bottom that run without a graph.
    """

    def __init__(
        self, model: nn.Module, batch: Batch, lengths: Sequence[int], windows: Windows, num_frozen: int = 0
    ) -> None:
        self.length = sequence_length(batch)
        self.spans = tuple(pairwise(accumulate(lengths, initial=0)))
        assert self.spans[-1][1] == self.length, (lengths, self.length)
        self._batch = batch
        self._states: SequenceStates | None = None
        if len(self.spans) == 1:
            return
        if not windows.allows_left_padding:
            _refuse_left_padding(model, batch)
        self._batch = _with_shifted_labels(batch)
        masks = _masks_of_packed_rows(model, batch, windows)
        if masks is not None:
            self._batch["attention_mask"] = masks
        given = self._batch.get("attention_mask")  # a user's 4-D mask has a column for each token before a slice
        is_trimmed = given is None or (isinstance(given, torch.Tensor) and given.dim() == 2)
        self._cache_argument = cache_argument(model)
        self._states = SequenceStates(windows, self.length, is_trimmed=is_trimmed, num_frozen=num_frozen)

    def slice(self, number: int) -> Batch:
        """Return the keyword arguments of the forward for one slice. Slices must be run in order."""
        if self._states is None:
            return {**self._batch, "use_cache": False}  # layers that are recomputed would append to a cache twice
        start, stop = self.spans[number]
        part = {
            name: recursively_apply(partial(self._cut, name, start, stop), value)
            for name, value in self._batch.items()
        }
        return {**part, self._cache_argument: self._states.slice(start, stop), "use_cache": False}

    def forget(self) -> None:
        """Release keys and values. Called after the backward of the first slice."""
        if self._states is not None:
            self._states.forget()

    def _cut(self, name: str, start: int, stop: int, value: torch.Tensor) -> torch.Tensor:
        if name == "attention_mask":  # covers all tokens that the slice can see
            return value[:, :stop] if value.dim() == 2 else value[:, :, start:stop, :stop]
        if value.dim() >= 2 and value.shape[1] == self.length:
            return value[:, start:stop].contiguous()  # losses take views of their labels
        return value


def _refuse_left_padding(model: nn.Module, batch: Batch) -> None:
    words, padding = batch.get("input_ids"), padding_word(model)
    if padding is None or not isinstance(words, torch.Tensor) or batch.get("position_ids") is not None:
        return
    is_word = words != padding
    if bool((~is_word[:, :-1] & is_word[:, 1:]).any()):
        raise UnsupportedModelError(
            model,
            "it computes positions from the padding, and a sample has padding before its tokens, which later slices"
            " would not see.",
            "Pad on the right (tokenizer.padding_side='right'), or set token_slices='off'.",
        )


def padding_word(model: nn.Module) -> int | None:
    """Return the padding token of a model, from its configuration; None if it has none."""
    config: Any = model.config
    number = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    return number if isinstance(number, int) and number >= 0 else None


def _with_shifted_labels(batch: Batch) -> Batch:
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or "shift_labels" in batch:
        return dict(batch)
    return {**batch, "shift_labels": nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]}


def _masks_of_packed_rows(model: nn.Module, batch: Batch, windows: Windows) -> dict[str, Any] | torch.Tensor | None:
    """Return masks of the whole sequence if a sample contains several documents; otherwise None.

    A model recognises a packed sample by restarting positions, but only without a cache. So masks are needed.
    """
    positions = _restarting_positions(model, batch)
    if positions is None:
        return None
    if not windows.separates_documents:
        raise UnsupportedModelError(
            model,
            "its attention does not separate documents that are packed into one sample (position_ids that restart).",
            "Make each document its own sample, or set token_slices='off'.",
        )
    kinds = {kind for kind, _ in windows.layers}
    if CHUNKED in kinds:
        raise UnsupportedModelError(
            model, "samples packed with several documents are not supported with chunked attention.", REMEDY
        )
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    assert isinstance(tokens, torch.Tensor)
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    like = torch.empty(*tokens.shape[:2], 1, dtype=dtype, device=tokens.device)
    config: Any = model.config
    masks: dict[str, Any] = {
        # positional, without attention mask and cache: the cache has another name before transformers 5.24
        kind: MASKS[kind](config.get_text_config(decoder=True), like, None, None, positions)
        for kind in kinds
    }
    if not all(isinstance(mask, torch.Tensor) and mask.dim() == 4 for mask in masks.values()):
        raise UnsupportedModelError(
            model,
            "samples packed with several documents need sdpa or eager attention to be split along their tokens.",
            REMEDY,
        )
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _restarting_positions(model: nn.Module, batch: Batch) -> torch.Tensor | None:
    """Return the positions of a batch if its samples contain several documents; otherwise None."""
    if "cu_seq_lens_q" in batch:
        raise UnsupportedModelError(
            model, "samples packed without padding (cu_seq_lens_q) cannot be split along their tokens.", REMEDY
        )
    positions = batch.get("position_ids")
    if not isinstance(positions, torch.Tensor) or batch.get("attention_mask") is not None:
        return None
    return None if bool((positions[:, 1:] - positions[:, :-1] == 1).all()) else positions


@contextmanager
def running_slices(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Inside the context, the model's forward accepts slices of this batch.

    - Gradient checkpointing keeps the layers' cache: storing the same keys and values again does no harm.
    - Rotary embeddings that depend on the length of their input also get the last position of the whole batch.
    """
    before: list[tuple[nn.Module, str, Any]] = []

    def put(module: nn.Module, name: str, value: Any) -> None:
        before.append((module, name, module.__dict__.get(name, _ABSENT)))
        module.__dict__[name] = value

    hooks = []
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            if isinstance(module, GradientCheckpointingLayer):
                put(module, "_can_checkpoint_with_cache", True)
            else:  # a model's own flag only makes it drop its cache
                put(module, "gradient_checkpointing", False)
        if _goes_by_length(module):
            hooks.append(module.register_forward_pre_hook(_show_position(_last_position(batch)), with_kwargs=True))
            hooks.append(module.register_forward_hook(lambda _m, _i, outputs: tuple(o[:, :-1] for o in outputs)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, value in reversed(before):
            if value is _ABSENT:
                del module.__dict__[name]
            else:
                module.__dict__[name] = value


_ABSENT = object()


def _goes_by_length(module: nn.Module) -> bool:
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else (kind,)
    return any(one in ROTARY_BY_LENGTH for one in kinds)


def _last_position(batch: Batch) -> int:
    positions = batch.get("position_ids")
    return int(positions.max()) if isinstance(positions, torch.Tensor) else sequence_length(batch) - 1


def _show_position(position: int) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        longer = torch.cat([positions, positions.new_full((positions.shape[0], 1), position)], dim=1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    return hook


def first_tokens(batch: Batch, count: int) -> Batch:
    """Return the first `count` tokens of each sample."""
    length = sequence_length(batch)
    part: Batch = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == length:
            value = value[:, :count]
        part[name] = value
    return part


def check_updates(model: nn.Module, cache: SliceCache, expected: int) -> None:
    """Check after a slice's forward that all `expected` layers have stored their keys and values.

    Raises:
        UnsupportedModelError: if a layer has not stored them: later slices would not see this slice.
    """
    if cache.num_updated != expected:
        raise UnsupportedModelError(
            model,
            f"only {cache.num_updated} of {expected} layers stored their keys and values in the cache, so later"
            " tokens would not see the earlier ones in the other layers.",
            REMEDY,
        )
