"""Detect changes in the function that frozen layers compute, to which all cached outputs belong.

    generation opened   name(boundary)    digests of weights, buffers and the outputs for a few samples -> its name
    check               what_changed()    weights, buffers, and the outputs for the same samples: are they unchanged?
    each step           looks_same()      one number of each weight, buffers' versions, plain attributes

A configuration does not show a changed activation function in a user's module, an adapter's scale, a pruning mask or a
hook. The outputs do, if they change for these samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn

from ..cache.cache_probe import SAME
from ..model.nested import on_device
from ..model.placeholders import values_of
from ..pipeline.elastic_pipeline import ElasticPipeline

MOST_NUMBERS = 2**16
"""Maximum number of values of an output, evenly spaced, that are kept for comparisons."""
MOST_ENTRIES = 64
"""Maximum number of entries in a container that is a setting; larger ones are data."""
REGISTRIES = ("_modules", "_forward_hooks", "_forward_pre_hooks")
"""Private attributes of a module that affect what it computes."""
OTHER_WEIGHTS = "the frozen layers' weights or buffers have been changed"
OTHER_OUTPUTS = (
    "the frozen layers return different outputs for the same samples than before, although their weights are the same"
    " (an attribute, a hook, an adapter's scale or the attention implementation has changed, or they draw random"
    " numbers)"
)


class FrozenFunction:
    """The function of a model's first units, all frozen, whose outputs are cached.

    Args:
        pipeline: the model.
        rows: a few samples of the dataset, collated, the same on every process.
    """

    def __init__(self, pipeline: ElasticPipeline, rows: Mapping[str, Any]) -> None:
        self._pipeline = pipeline
        self._rows = on_device(rows, pipeline.device)
        self._boundary = 0
        self._digests: dict[str, str] = {}  # weight name -> digest
        self._outputs: list[torch.Tensor] = []  # some values of each output for the samples, since opening
        self._num_looks = 0
        self._norms: list[float] = []  # norms of the frozen weights on this process
        self._numbers: list[float] = []  # one value of each frozen weight on this process
        self._holders: list[nn.Module] = []  # modules that hold frozen parameters or belong to frozen layers
        self._buffers: list[tuple[torch.Tensor, int, float]] = []  # with version and checksum
        self._attributes: dict[tuple[int, str], Any] = {}
        self._moving: set[tuple[int, str]] = set()  # attributes that change without changing the outputs

    def forget_weights(self) -> None:
        """Discard the digests of weights, because the weights may have changed since they were digested."""
        self._digests.clear()

    def name(self, boundary: int) -> str:
        """Return a digest of the function of the first `boundary` units, which are frozen from now on.

        Collective over all processes.
        """
        self._boundary, self._num_looks = boundary, 0
        pipeline = self._pipeline
        stage, table = pipeline.stage, pipeline.stack.table
        assert stage is not None
        pipeline.weights.onload()
        names = pipeline.stack.owned(0, boundary)
        mine = {name: self._digests.get(name) or digest_of(table[name]) for name in stage.names if name in names}
        buffers = [digest_of(buffer) for buffer in self._find_buffers()]
        outputs = pipeline.outputs_of_frozen(self._rows, boundary, seed=0) or ()
        here = (mine, buffers, [digest_of(output) for output in outputs], [_some_numbers(o) for o in outputs])
        everyone = pipeline.mesh.gather_objects(here)
        for weights, *_ in everyone:
            self._digests.update(weights)
        # the stages of the first pipeline, in order; the last frozen unit is on one of them
        of_first = [everyone[rank] for rank in pipeline.current_plan.ranks_of_pipeline(0)]
        digests = [digest for _, _, found, _ in of_first for digest in found]
        self._outputs = [numbers for *_, found in of_first for numbers in found]
        of_weights = [f"{name} {self._digests[name]}" for name in sorted(names)]
        content = [str(boundary), *of_weights, *of_first[0][1], *digests]
        return xxhash.xxh3_128_hexdigest("\n".join(content).encode())

    def note(self) -> None:
        """Record the weights and buffers on this process under the plan in force. Not collective."""
        self._norms, self._numbers = self._norms_here(), self._numbers_here()
        self._buffers = [(buffer, _version(buffer), float(_checksum(buffer))) for buffer in self._find_buffers()]
        self._attributes = self._attributes_here()

    def what_changed(self) -> str | None:
        """Return why the cached outputs are no longer those of the frozen layers; None if they are.

        Collective over all processes.
        """
        self._num_looks += 1
        weights_hold = (self._norms, self._numbers) == (self._norms_here(), self._numbers_here())
        noted = [checksum for *_, checksum in self._buffers]
        weights_hold &= noted == [float(_checksum(buffer)) for buffer in self._find_buffers()]
        # with another seed each time, because frozen layers must not depend on random numbers
        outputs = self._pipeline.outputs_of_frozen(self._rows, self._boundary, seed=self._num_looks)
        outputs_hold = outputs is None or _are_same([_some_numbers(output) for output in outputs], self._outputs)
        self._pipeline.offload_cached_layers()
        votes = self._pipeline.mesh.gather_objects((weights_hold, outputs_hold))
        if not all(weights for weights, _ in votes):
            return OTHER_WEIGHTS
        if not all(outputs for _, outputs in votes):
            return OTHER_OUTPUTS
        attributes = self._attributes_here()
        self._moving |= {key for key, value in attributes.items() if self._attributes.get(key) != value}
        self._attributes = attributes
        return None

    def looks_same(self) -> bool:
        """Whether a cheap check finds no change. Not collective.

        Weights must not be offloaded.
        """
        attributes = self._attributes_here()
        return (
            self._numbers == self._numbers_here()
            and all(self._attributes.get(key) == value for key, value in attributes.items() if key not in self._moving)
            and self._buffers_look_same()
        )

    # ------------------------------------------------------------------------------------ what is here
    def _norms_here(self) -> list[float]:
        self._pipeline.weights.onload()
        # in float32 at least: in 16 bits, similar weights would have equal norms
        norms = [
            torch.linalg.vector_norm(v.to(torch.promote_types(v.dtype, torch.float32))).double()
            for v in self._frozen_here()
        ]
        return torch.stack(norms).tolist() if norms else []

    def _numbers_here(self) -> list[float]:
        numbers = [v.reshape(-1)[v.numel() // 2].float() for v in self._frozen_here() if v.numel()]
        return torch.stack(numbers).tolist() if numbers else []

    def _frozen_here(self) -> list[torch.Tensor]:
        pipeline = self._pipeline
        assert pipeline.stage is not None and pipeline.freezable is not None
        names = pipeline.freezable.frozen(self._boundary)
        return [v for name in pipeline.stage.names if name in names for v in values_of(pipeline.stack.table[name])]

    def _find_buffers(self) -> list[torch.Tensor]:
        """Return the buffers (running statistics, masks) of frozen layers and of modules with frozen parameters."""
        stack = self._pipeline.stack
        assert self._pipeline.freezable is not None
        names = self._pipeline.freezable.frozen(self._boundary)
        frozen = {id(stack.table[name]) for name in names}
        layers = {module for unit in stack.units[: self._boundary] for module in unit.module.modules()}
        self._holders = [
            module
            for module in stack.model.modules()
            if module in layers or any(id(p) in frozen for p in module.parameters(recurse=False))
        ]
        return self._buffers_of_holders()

    def _buffers_of_holders(self) -> list[torch.Tensor]:
        buffers = (buffer for module in self._holders for buffer in module.buffers(recurse=False))
        return [buffer for buffer in buffers if buffer.numel()]

    def _buffers_look_same(self) -> bool:
        """Whether buffers are unchanged. Values are compared only if a buffer was written to.

        DDP writes the same values in each step.
        """
        buffers = self._buffers_of_holders()
        return len(buffers) == len(self._buffers) and all(
            (buffer is noted and _version(buffer) == version) or float(_checksum(buffer)) == checksum
            for buffer, (noted, version, checksum) in zip(buffers, self._buffers, strict=True)
        )

    def _attributes_here(self) -> dict[tuple[int, str], Any]:
        """Return the settings of the modules in `_holders`: numbers, names, functions, submodules, hooks."""
        return {
            (number, name): _setting(value)
            for number, module in enumerate(self._holders)
            for name, value in vars(module).items()
            if name in REGISTRIES or not (name.startswith("_") or name == "training")
        }


def digest_of(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's dtype, shape and all bits."""
    content = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    for value in values_of(tensor):
        content += value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return xxhash.xxh3_128_hexdigest(content)


def _setting(value: Any, is_inside: bool = False) -> Any:
    """Return a value that can be compared with a later one; None for tensors and other objects, not settings."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, nn.Module) or callable(value):
        return id(value)
    if hasattr(value, "_attn_implementation"):  # a model's configuration
        return str(value._attn_implementation)
    if isinstance(value, dict) and len(value) <= MOST_ENTRIES and not is_inside:
        # without this package's own hooks, which are added and removed in each pass
        return [(str(key), _setting(entry, True)) for key, entry in value.items() if not _is_ours(entry)]
    if isinstance(value, (list, tuple)) and len(value) <= MOST_ENTRIES and not is_inside:
        return [_setting(entry, True) for entry in value]
    return None


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", None)).partition(".")[0] == __name__.partition(".")[0]


def _some_numbers(output: torch.Tensor) -> torch.Tensor:
    flat = output.detach().reshape(-1)
    if flat.numel() > MOST_NUMBERS:
        flat = flat[torch.linspace(0, flat.numel() - 1, MOST_NUMBERS, dtype=torch.float64, device=flat.device).long()]
    return flat.double().cpu()


def _are_same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether values differ by no more than is accepted if the same kernels run on the same shapes."""
    return len(actual) == len(expected) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=SAME * _largest(b), equal_nan=True)
        for a, b in zip(actual, expected, strict=True)
    )


def _largest(values: torch.Tensor) -> float:
    return float(values.nan_to_num(posinf=0.0, neginf=0.0).abs().max()) if values.numel() else 0.0


def _version(buffer: torch.Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version


def _checksum(buffer: torch.Tensor) -> torch.Tensor:
    """Return a number that changes if values change or swap places, as they may in a mask."""
    values = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    values = values.detach().reshape(-1).double().nan_to_num()
    return values @ torch.arange(1, values.numel() + 1, dtype=torch.float64, device=values.device).sqrt()
