"""What is known of a call of the model, and of the modules of its front in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only

from ...model.elsewhere import hidden_like
from ..prefix_cache.cache.guards import unnoticed
from .divided import EACH, Rows
from .entries import TOKENS, Leaf, dense_order
from .finding import RecordedCall, arguments_of
from .rows import ArgumentDigests, Tokens

REMEDY = "Set activation_cache='off'"


class OtherCallsError(Exception):
    """The front is called in another way than before, so what is stored is of no use in this call."""


class NewCallError(Exception):
    """A module of the front is called on something else than when what is stored was computed."""


class AllRanError(Exception):
    """Ends a forward pass of which only the front is wanted."""


@dataclass(frozen=True)
class ReturnedLeaf:
    """A tensor in the output of a module: its device, and what one row of it is; or all, if it is not of rows.

    `order` has its dimensions as they lie in memory: what reads it would round otherwise in another order.
    """

    device: torch.device
    row: Leaf
    is_of_rows: bool
    order: tuple[int, ...] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, tensor: torch.Tensor, rows: Rows, wide: Collection[int]) -> ReturnedLeaf:
        shape = [TOKENS if dim in wide else size for dim, size in enumerate(tensor.shape)]
        per = rows.patches_per_entry(len(tensor)) if tensor.dim() else None
        if per is not None:
            shape[0] = 1 if per else shape[0] // rows.count
        leaf = Leaf(tensor.dtype, tuple(shape), per or EACH)
        return cls(tensor.device, leaf, per is not None, dense_order(tensor))

    def as_returned(self, stored: torch.Tensor) -> torch.Tensor:
        """What is read from the store, as the module returns it."""
        if self.order is None or self.order == tuple(range(stored.dim())):
            return stored.to(self.row.dtype)
        made = torch.empty_permuted(stored.shape, self.order, dtype=self.row.dtype, device=stored.device)
        return made.copy_(stored)

    def sized(self, rows: Rows, width: int) -> tuple[int, ...]:
        """The shape for these rows in a batch of this width."""
        first, *rest = self.row.sized(width)
        return (self.row.length(rows) if self.is_of_rows else first), *rest

    def hidden(self, rows: Rows, width: int, text: str) -> torch.Tensor:
        shape = self.sized(rows, width)
        return hidden_like(torch.empty((), dtype=self.row.dtype, device=self.device).expand(shape), text, REMEDY)


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
        keys: of the rows.
        rows: samples, or images.
        tokens: which columns belong to the samples, if padding is not stored.
        signature: what the shapes of the front's outputs depend on.
        covered: of the tensors that the keys are made of, by their identity: which it is, and its number of writes.
    """

    keys: Sequence[bytes]
    rows: Rows
    tokens: Tokens | None
    signature: Any
    covered: Mapping[int, tuple[int, int]]

    @property
    def width(self) -> int:
        return 0 if self.tokens is None else self.tokens.width


@dataclass
class FrontCall:
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
    ran: dict[str, RecordedCall] = field(default_factory=dict)
    made: ArgumentDigests | None = None  # in this call
    seconds: float = 0.0  # of the modules that ran
    versions: dict[str, list[int]] = field(default_factory=dict)  # of inputs and outputs, when they were returned
    ends: bool = False  # when all modules have run


def of_missing(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: FrontCall,
    known: Known,
    has_rows: Sequence[bool],
) -> list[Any]:
    """The leaves of what a module returns for the rows of which nothing is stored.

    Args:
        forward: the module's.
        args, kwargs: what it is called on.
        call: the call of the model.
        known: how the module is called.
        has_rows: which of the tensors that it is called on are divided among the rows.

    Raises:
        NewCallError: it does not run on some of the rows, or returns something else for them.
    """
    assert call.batch is not None
    given = arguments_of(args, kwargs)[0]
    if len(given) != len(has_rows):
        raise NewCallError
    rows, of_rows = call.batch.rows, {id(tensor) for tensor, has in zip(given, has_rows, strict=True) if has}

    def chosen(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in call.computed:
            return call.computed[id(tensor)]
        return rows.some(tensor, call.missing) if id(tensor) in of_rows else tensor

    args, kwargs = tree_map_only(torch.Tensor, chosen, (args, kwargs))
    try:
        with torch.no_grad(), unnoticed():
            leaves, structure = tree_flatten(forward(*args, **kwargs))
    except Exception as error:  # it does not run on a part of the samples
        raise NewCallError from error
    if structure != known.structure:
        raise NewCallError
    for leaf, found in zip(known.leaves, leaves, strict=True):
        if isinstance(leaf, ReturnedLeaf) and leaf.is_of_rows:
            shape = leaf.sized(rows.chosen(call.missing), call.batch.width)
            if not isinstance(found, torch.Tensor) or found.shape != shape:
                raise NewCallError  # it depends on the other samples
    return leaves
