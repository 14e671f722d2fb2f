"""Keys and values of earlier slices: attention over a sequence that runs a few tokens at a time.

A causal model's tokens [a, b) need only the keys and values of earlier tokens. Generation keeps these in a
`transformers.Cache`. The cache in this module does the same, and also gives keys and values gradients (TeraPipe, ICML
2021, section 3.2).

    forward    slice 0        slice 1        slice 2
                 k, v ────────→ reads ────────→ reads
                   └────────────────────────────→
    backward   adds     ←───── stores gradients
                              adds     ←────── stores gradients

Forwards run from the first slice to the last, backwards from the last to the first. A slice's backward stores the
gradients of earlier tokens' keys and values here, and the backward of their own slice adds them to its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ..errors import UnsupportedModelError

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the `Cache` argument: since transformers 5.24, and in older versions and users' own models."""


@dataclass(frozen=True)
class Windows:
    """The tokens of a sequence that a token can attend to.

    Attributes:
        layers: kind of attention and width of the window, for each layer.
        separates_documents: whether documents packed into one sample do not attend to each other. A probe finds it
            (`probe_slicing`), because configurations do not specify it.
        allows_left_padding: whether slices give the same result with padding before the tokens. The probe finds this,
            too; False for models that compute positions from the padding in their input (RoBERTa).
    """

    layers: tuple[tuple[str, int | None], ...]
    separates_documents: bool = True
    allows_left_padding: bool = True


def attention_windows(model: Any) -> Windows:
    """Return the attention windows of a causal model's layers, from its configuration.

    Raises:
        UnsupportedModelError: if a layer has state besides keys and values (recurrent, convolutional), or reads
            another layer's keys and values.
    """
    config = model.config.get_text_config(decoder=True)
    remedy = "Set token_slices='off'."
    if getattr(config, "is_encoder_decoder", False) or not hasattr(config, "num_hidden_layers"):
        raise UnsupportedModelError(
            model, "only decoders with causal attention can be split along their tokens.", remedy
        )
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        raise UnsupportedModelError(model, "its layers share keys and values, which is not supported.", remedy)
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = [SLIDING if window is not None else CHUNKED if chunk is not None else FULL] * config.num_hidden_layers
    unknown = sorted(set(kinds) - {FULL, SLIDING, CHUNKED})
    if unknown:
        raise UnsupportedModelError(
            model, f"layers of type {', '.join(unknown)} keep a state that cannot be split along the tokens.", remedy
        )
    width = {FULL: None, SLIDING: window, CHUNKED: chunk}
    return Windows(tuple((kind, width[kind]) for kind in kinds))


class SequenceStates:
    """Keys and values of one micro-batch's sequence, in the layers that this process runs.

    Args:
        windows: attention windows of all layers of the model.
        length: number of tokens of the sequence.
        is_trimmed: whether a layer with a sliding window gets only the tokens inside its window. Must be False if
            masks of the whole sequence are given.
        num_frozen: number of frozen layers at the bottom, which run once and without a graph. Their keys and values
            are released with the last slice. In other layers gradient checkpointing may recompute a slice, whether or
            not its keys and values have a gradient.
    """

    def __init__(self, windows: Windows, length: int, is_trimmed: bool = True, num_frozen: int = 0) -> None:
        self.windows = windows
        self.length = length
        self.num_frozen = num_frozen
        self._is_trimmed = is_trimmed
        self._layers: dict[int, _LayerStates] = {}

    def slice(self, start: int, stop: int) -> SliceCache:
        """Return the cache for the model's forward of the tokens [start, stop)."""
        return SliceCache(self, start, stop)

    def of_layer(self, index: int) -> _LayerStates:
        if index not in self._layers:
            self._layers[index] = _LayerStates(self.length)
        return self._layers[index]

    def forget(self) -> None:
        """Release all states after the backward of the first slice: layers without gradients of keys do not do so."""
        self._layers.clear()

    def first_visible(self, index: int, start: int) -> int:
        """Return the first token that tokens from `start` on can attend to in this layer."""
        kind, width = self.windows.layers[index]
        return max(0, start - width + 1) if kind == SLIDING and width and self._is_trimmed else 0


class SliceCache(Cache):
    """A view of the states for one slice. Gradient checkpointing may call `update` again."""

    def __init__(self, states: SequenceStates, start: int, stop: int) -> None:
        self._slices = [_SliceLayer(states, index, start, stop) for index in range(len(states.windows.layers))]
        super().__init__(layers=list(self._slices))

    @property
    def num_updated(self) -> int:
        """Number of layers that have stored their keys and values."""
        return sum(layer.is_updated for layer in self._slices)


def cache_argument(model: nn.Module) -> str:
    """Return the name of the `Cache` argument of a model's forward.

    A wrapper such as PEFT's passes arguments on: the inner forward then decides.
    """
    for module in model.modules():
        accepted = inspect.signature(module.forward).parameters
        for name in CACHE_ARGUMENTS:
            if name in accepted:
                return name
    return CACHE_ARGUMENTS[-1]


def slice_cache_in(batch: Mapping[str, Any]) -> SliceCache | None:
    """Return the cache in a slice's keyword arguments; None in the arguments of a whole sequence."""
    return next((value for value in batch.values() if isinstance(value, SliceCache)), None)


class _SliceLayer(CacheLayerMixin):
    def __init__(self, states: SequenceStates, index: int, start: int, stop: int) -> None:
        super().__init__()
        self._states, self._index, self._start, self._stop = states, index, start, stop
        self._visible = states.first_visible(index, start)
        self.is_sliding = states.windows.layers[index][0] != FULL
        self.is_initialized = True
        self.is_updated = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.is_updated = True
        states = self._states.of_layer(self._index)
        extended = _Extend.apply(key_states, value_states, states, self._visible, self._start, self._stop)
        if self._stop == self._states.length and self._index < self._states.num_frozen:
            states.forget()
        return extended

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._start + query_length - self._visible, self._visible

    def get_seq_length(self) -> int:
        return self._start

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # name of this method before transformers 5.20


class _LayerStates:
    """Keys and values of one layer for the whole sequence, and the gradients that later slices have stored."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._values: list[torch.Tensor | None] = [None, None]
        self._gradients: list[torch.Tensor | None] = [None, None]
        self._backward_from = length

    def put(self, which: int, new: torch.Tensor, visible: int, start: int, stop: int) -> torch.Tensor:
        """Store the values of the tokens [start, stop), and return the values of [visible, stop)."""
        kept = self._values[which]
        if kept is None:
            kept = self._values[which] = new.new_zeros(*new.shape[:2], self.length, new.shape[3])
        # through .data: earlier slices keep views of this memory for their backward, and autograd would treat this
        # write as a change of their saved tensors, although it is to other tokens
        kept.data[:, :, start:stop].copy_(new)
        return kept.data[:, :, visible:stop]

    def begin_backward(self, start: int, stop: int) -> None:
        if stop != self._backward_from:
            raise RuntimeError(
                f"The backward pass of tokens {start} to {stop - 1} ran after that of tokens from"
                f" {self._backward_from} on, but slices must run backward from the last to the first, each once."
            )
        self._backward_from = start

    def take_up(self, which: int, gradient: torch.Tensor, visible: int, start: int, stop: int) -> torch.Tensor:
        """Store the gradients of earlier tokens [visible, start), and return the gradients of the slice's tokens."""
        own = gradient[:, :, start - visible :]
        parked = self._gradients[which]
        if parked is not None:
            own = own + parked[:, :, start:stop].to(gradient.dtype)
        if start > visible:
            if parked is None:
                # a sum over many slices: in half precision, small contributions would be lost
                dtype = torch.promote_types(gradient.dtype, torch.float32)
                shape = (*gradient.shape[:2], self.length, gradient.shape[3])
                parked = self._gradients[which] = torch.zeros(shape, dtype=dtype, device=gradient.device)
            parked[:, :, visible:start] += gradient[:, :, : start - visible]
        if start == 0:
            self._values[which] = self._gradients[which] = None
        return own

    def forget(self) -> None:
        self._values = [None, None]


class _Extend(torch.autograd.Function):
    """Extends the keys and values of a slice to all tokens that the slice can see."""

    @staticmethod
    def forward(
        ctx: Any, keys: torch.Tensor, values: torch.Tensor, states: _LayerStates, visible: int, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.states, ctx.span = states, (visible, start, stop)
        return states.put(0, keys, visible, start, stop), states.put(1, values, visible, start, stop)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        visible, start, stop = ctx.span
        ctx.states.begin_backward(start, stop)
        of_keys, of_values = (ctx.states.take_up(i, g, visible, start, stop) for i, g in enumerate(gradients))
        return of_keys, of_values, None, None, None, None
