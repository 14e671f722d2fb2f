"""Units that are not computed again for arguments for which they have been computed.

A loss is probed with one batch many times: with other labels, other numbers of items, other weights of the last unit.
What the units below the last one return is the same each time, and takes nearly all of the time.

    loss(batch, n)      unit 0 ... L - 2 computed, kept   unit L - 1 computed   head computed
    loss(batch, 2 n)    unit 0 ... L - 2 RECALLED         unit L - 1 computed   head computed
    loss(part, n)       unit 0 ... L - 2 computed, kept   unit L - 1 computed   head computed

Use it only where nothing but arguments and weights determines what a unit returns (no random numbers, no state), and
where weights do not change; and not for units inside which hooks are called, which would not be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn

from .layer_range import MethodOverride
from .nested import tensors_of

NOT_OF_UNITS = frozenset({"num_items_in_batch"})
"""Arguments for the loss that transformers' models hand to their layers, too."""


class RememberedUnits:
    """What units have returned for which arguments.

    It takes at most as much memory as the weights of the largest unit; what would exceed this is computed again.

    Args:
        modules: the units' modules.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = tuple(dict.fromkeys(modules))
        sizes = (sum(parameter.nbytes for parameter in module.parameters()) for module in self._modules)
        self._most_bytes = self._bytes_left = max(sizes, default=0)
        self._outputs: dict[Hashable, Any] = {}

    def forget(self) -> None:
        """Compute everything anew from now on."""
        self._outputs.clear()
        self._bytes_left = self._most_bytes

    @contextmanager
    def recalling(self) -> Iterator[None]:
        """Inside, the units return what they have returned in such a context for the same arguments."""
        overrides = [
            MethodOverride(module, "forward", self._remembering(number, module, module.forward))
            for number, module in enumerate(self._modules)
        ]
        try:
            yield
        finally:
            for override in overrides:
                override.remove()

    def _remembering(self, number: int, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            named = {name: value for name, value in kwargs.items() if name not in NOT_OF_UNITS}
            try:
                key = (number, module.training, _content_of(args), _content_of(named))
            except _NotPlainError:
                return original(*args, **kwargs)
            if key in self._outputs:
                return recursively_apply(torch.clone, self._outputs[key])
            given = tensors_of((args, kwargs))
            versions = [tensor._version for tensor in given]
            output = original(*args, **kwargs)
            if versions == [tensor._version for tensor in given]:
                self._keep(key, output)
            return output

        return forward

    def _keep(self, key: Hashable, output: Any) -> None:
        """Keep copies of an output, which the model may change in place, if it is plain and has no graph."""
        tensors = tensors_of(output)
        size = sum(tensor.nbytes for tensor in tensors)
        if size > self._bytes_left or not _is_plain(output) or any(tensor.requires_grad for tensor in tensors):
            return
        self._outputs[key] = recursively_apply(torch.clone, output)
        self._bytes_left -= size


class _NotPlainError(Exception):
    """Raised for a value that is not made of tensors and numbers."""


def _is_plain(value: Any) -> bool:
    try:
        _content_of(value, of_tensor=lambda _: None)
    except _NotPlainError:
        return False
    return True


def _digest(tensor: torch.Tensor) -> Hashable:
    try:
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    except RuntimeError:  # it is nested, lazily conjugated or on the meta device
        raise _NotPlainError from None
    return (str(tensor.dtype), tuple(tensor.shape), hashlib.blake2b(content.data).digest())


def _content_of(value: Any, of_tensor: Callable[[torch.Tensor], Hashable] = _digest) -> Hashable:
    """What makes two values equal: digests of the tensors, and everything else."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return of_tensor(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return (type(value).__name__, value)
    if isinstance(value, Mapping):
        return (type(value).__name__, *((name, _content_of(entry, of_tensor)) for name, entry in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_content_of(entry, of_tensor) for entry in value))
    raise _NotPlainError
