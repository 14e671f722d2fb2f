"""Records, function by function during a forward pass, the inputs and parameters that each tensor depends on.

It needs no names, model families or gradients: reads of a weight's values without a gradient are recorded as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ....model.called_inputs import NOT_OF_STATES
from ....randomness import torch_states

TRAINED, RANDOM, UNKNOWN = "<trained>", "<random>", "<unknown>"
"""The origins of a tensor besides inputs of the batch."""

METADATA = frozenset(
    {
        "_base",
        "_version",
        "data_ptr",
        "device",
        "dim",
        "dtype",
        "element_size",
        "get_device",
        "grad_fn",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "is_leaf",
        "is_meta",
        "is_nested",
        "is_quantized",
        "is_sparse",
        "itemsize",
        "layout",
        "nbytes",
        "ndim",
        "ndimension",
        "nelement",
        "numel",
        "requires_grad",
        "shape",
        "size",
        "stride",
    }
)
"""What may be asked of a tensor without looking at its values. Shapes are compared where they matter (`front`)."""


_entered: list[Origins] = []
"""Those that watch now."""


class Origins(TorchFunctionMode):
    """Inside, records each tensor's origins, and the tensors that code outside of frozen modules reads.

    Args:
        model: the model.
        inputs: its arguments, by name.
        weights: parameters that are recorded as origins, each by its name. All other trained parameters have the name
            `TRAINED`.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        weights: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        super().__init__()
        self.is_inside = self.is_paused = False  # in a frozen module; in this one
        self.decided: set[str] = set()  # origins of values that the program has read
        self.inside_of = ""  # name of the frozen module that runs
        self.leaking: set[str] = set()  # frozen modules with tensors that are read but not returned
        self._made_inside: Any = WeakIdKeyDictionary()  # tensor -> the frozen module that made it
        self._groups: Any = WeakIdKeyDictionary()  # tensor -> origins of it and all its views
        self._read: Any = WeakIdKeyDictionary()
        names = {id(parameter): name for name, parameter in (weights or {}).items()}
        for parameter in model.parameters():
            trained = {TRAINED} if parameter.requires_grad else set()
            self._groups[parameter] = {names[id(parameter)]} if id(parameter) in names else trained
        for module in model.modules():
            for constant in (*module._buffers.values(), *vars(module).values()):
                if isinstance(constant, torch.Tensor):
                    self._groups[constant] = set()
        for name, value in inputs.items():
            for tensor in tensors_in(value):  # models hand on what only their loss needs
                self.of(tensor, set()).update({name} - NOT_OF_STATES)

    def __enter__(self) -> Origins:
        _entered.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _entered.remove(self)

    def take_constants(self, other: Origins) -> None:
        """Count tensors that another pass has not made either, and that are the same now, as constants."""
        for tensor, names in list(other._groups.items()):
            if UNKNOWN in names and tensor not in self._groups:
                self._groups[tensor] = set()

    def of(self, tensor: torch.Tensor, default: set[str] | None = None) -> set[str]:
        base = tensor if tensor._base is None else tensor._base
        if base not in self._groups:
            self._groups[base] = {UNKNOWN} if default is None else default
        return self._groups[base]

    def union(self, tensors: Sequence[torch.Tensor]) -> set[str]:
        return set().union(*map(self.of, tensors))

    def is_read(self, tensor: torch.Tensor) -> bool:
        return tensor in self._read

    def note_read(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._read[tensor] = True
            if tensor in self._made_inside:
                self.leaking.add(self._made_inside[tensor])

    def returned(self, output: Any) -> Any:
        """A frozen module's output in new tensor objects, because tensors made inside may also have been recorded.

        A tensor that is there several times is the same new object each time.

        Args:
            output: what its forward has returned.
        """
        others: Any = WeakIdKeyDictionary()

        def alias(tensor: torch.Tensor) -> torch.Tensor:
            if tensor not in self._made_inside:
                return tensor
            if tensor not in others:
                others[tensor] = tensor.view_as(tensor)  # with its graph: wav2vec2's features require a gradient
                self.of(others[tensor], set()).update(self.of(tensor))
            return others[tensor]

        return tree_map_only(torch.Tensor, alias, output)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.compiler.is_compiling():  # a compiled function runs without this mode
            return func(*args, **kwargs)
        name = func.__name__
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        if name == "data_ptr" and not self.is_paused and not self.is_inside:
            self.note_read(tensors_in(args))  # code outside of Python may read through the pointer
        if self.is_paused or name in METADATA:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        before = torch_states()
        result = func(*args, **kwargs)
        origins = self.union(given)
        if kwargs.get("generator") is not None:
            origins.add(RANDOM)
        if name == "from_numpy":
            origins.add(UNKNOWN)
        if any(not torch.equal(a, b) for a, b in zip(before, torch_states(), strict=True)):
            origins.add(RANDOM)
        if not self.is_inside:
            self.note_read(given)
        made = tensors_in(result)
        if self.is_inside:
            given_ids = set(map(id, given))
            self._made_inside.update({one: self.inside_of for one in made if id(one) not in given_ids})
        changed = [*(given[:1] if _is_in_place(name) else []), *tensors_in(kwargs.get("out"))]
        for tensor in (*made, *changed):
            self.of(tensor, set()).update(origins)
        if not made and not changed:
            self.decided |= origins
        return result


def as_one_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that `Origins` does not look into: its results depend on all tensors among its arguments.

    Its inside may receive tensors from other processes; they have no recorded sources.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        watching = [origins for origins in _entered if not origins.is_paused]
        if not watching:
            return function(*args, **kwargs)
        for origins in watching:
            origins.is_paused = True
        given, before = tensors_in((args, kwargs)), torch_states()
        try:
            result = function(*args, **kwargs)
            draws = not all(map(torch.equal, before, torch_states()))
        finally:
            for origins in watching:
                origins.is_paused = False
        for origins in watching:
            of = origins.union(given) | ({RANDOM} if draws else set())
            for tensor in tensors_in(result):
                origins.of(tensor, set()).update(of)
        return result

    return run


def _is_in_place(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, in containers of any kind."""
    found: list[torch.Tensor] = []
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, Mapping):  # a tokenizer's BatchEncoding is no dict
            found += tensors_in(dict(leaf))
    return found
