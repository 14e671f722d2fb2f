"""What is known of a call of the model, and of the modules of its front in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from ...model.elsewhere import Unreadable, hidden_like
from .entries import TOKENS, Leaf
from .finding import Ran
from .rows import ArgumentDigests, Tokens

REMEDY = "Set activation_cache='off'"


@dataclass(frozen=True)
class ReturnedLeaf:
    """A tensor in the output of a module: its device, and what one row of it is; or all, if it is not of rows."""

    device: torch.device
    row: Leaf
    is_of_rows: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, rows: int, wide: Collection[int]) -> ReturnedLeaf:
        shape = [TOKENS if dim in wide else size for dim, size in enumerate(tensor.shape)]
        is_of_rows = tensor.dim() > 0 and len(tensor) > 0 and len(tensor) % rows == 0
        if is_of_rows:
            shape[0] //= rows
        return cls(tensor.device, Leaf(tensor.dtype, tuple(shape)), is_of_rows)

    def hidden(self, rows: int, width: int, text: str) -> torch.Tensor:
        shape = list(self.row.sized(width))
        if self.is_of_rows:
            shape[0] *= rows
        return hidden_like(torch.empty((), dtype=self.row.dtype, device=self.device).expand(shape), text, REMEDY)


@dataclass(frozen=True)
class ReturnedObject:
    """A cache of keys and values in the output of a module, which nothing reads: its class, and its attributes."""

    kind: type
    attributes: frozenset[str]

    def hidden(self, rows: int, width: int, text: str) -> HiddenObject:
        return HiddenObject(text, self)


class HiddenObject(Unreadable):
    """Stands for an object that is not kept. It cannot be read; it lacks the attributes that the object lacks."""

    def __init__(self, text: str, of: ReturnedObject) -> None:
        super().__init__(f"{text} ({of.kind.__name__})", REMEDY)
        self.__dict__["attributes"] = of.attributes

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["attributes"]:
            return Unreadable.__getattr__(self, name)  # type: ignore[attr-defined]  # refuses
        raise AttributeError(name)


def returned(value: Any, rows: int, wide: Collection[int]) -> Any:
    """What is known of a leaf of an output; plain values are known as they are."""
    if isinstance(value, torch.Tensor):
        return ReturnedLeaf.of(value, rows, wide)
    return value if value is None else ReturnedObject(type(value), frozenset(dir(value)))


@dataclass(frozen=True)
class Known:
    """How a module is called, and what it returns, for inputs of some shape.

    Attributes:
        others: arguments that are no tensors, in each way in which it was called.
        leaves: of its output: tensors as `ReturnedLeaf`, other values as they are.
        structure: the containers of the leaves.
    """

    others: set[str]
    leaves: tuple[Any, ...]
    structure: TreeSpec


@dataclass(frozen=True)
class KnownBatch:
    """What is known of the inputs of a call.

    Attributes:
        keys: of the samples.
        tokens: which columns belong to the samples, if padding is not stored.
        signature: what the shapes of the front's outputs depend on.
        covered: of the tensors that the keys are made of, by their identity: which it is, and its number of writes.
    """

    keys: Sequence[bytes]
    tokens: Tokens | None
    signature: Any
    covered: Mapping[int, tuple[int, int]]

    @property
    def width(self) -> int:
        return 0 if self.tokens is None else self.tokens.width

    @property
    def rows(self) -> int:
        return len(self.keys)


@dataclass
class Call:
    """A call of the model.

    Attributes:
        batch: what is known of its inputs; None in a trial.
        known: of each module, if something is given back.
        given_back: what is given back, by module and leaf; None if all modules run on all samples.
        digests: of the arguments, when what is given back was computed, for each module.
        missing: rows that are computed, and not given back.
        ran: the modules that have been called, with what they have returned.
    """

    batch: KnownBatch | None = None
    known: Mapping[str, Known] = field(default_factory=dict)
    given_back: dict[tuple[str, int], torch.Tensor] | None = None
    digests: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    computed: dict[int, torch.Tensor] = field(default_factory=dict)  # of these rows, for a tensor in an output
    ran: dict[str, Ran] = field(default_factory=dict)
    made: ArgumentDigests | None = None  # in this call
    seconds: float = 0.0  # of the modules that ran
    versions: dict[str, list[int]] = field(default_factory=dict)  # of inputs and outputs, when they were returned
    ends: bool = False  # when all modules have run
