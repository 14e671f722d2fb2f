"""Records of a call of the model, and of the calls of its front's modules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from ...model.called_inputs import version_of
from ...model.elsewhere import Postponed, Unreadable, hidden_like
from ..prefix_cache.cache.batch_entries import BatchEntries
from ..prefix_cache.cache.guards import unnoticed
from .divided import EACH, Rows
from .entries import TOKENS, Leaf, dense_order
from .finding import CHANGES, REENTRANT, Others, RecordedCall, arguments_of, buffers_of, first_positions
from .rows import ArgumentDigests

REMEDY = "Set activation_cache='off'"
LARGEST_COPY = 2**18
"""Maximum size of an argument that is copied, in bytes. Masks and positions are smaller."""


class OtherCallsError(Exception):
    """The front is called differently than before, so this call cannot use stored outputs."""


class NewCallError(Exception):
    """A module of the front has other arguments than when its stored outputs were computed."""


class AllRanError(Exception):
    """Ends a forward pass once all modules of the front have run."""


@dataclass(frozen=True)
class ReturnedLeaf:
    """A tensor in a module's output: its device, and the type and shape of one row (of all, if it has no rows).

    `order` lists its dimensions as they lie in memory. With another order, modules that read it may round differently.
    `requires_grad` tells whether it required a gradient. As all parameters of the front are frozen, some other tensor
    did: transformers sets this on embeddings for reentrant gradient checkpoints. `is_leaf` as in torch.
    """

    device: torch.device
    row: Leaf
    is_of_rows: bool
    order: tuple[int, ...] | None = field(default=None, compare=False)
    requires_grad: bool = field(default=False, compare=False)
    is_leaf: bool = field(default=True, compare=False)

    @classmethod
    def of(cls, tensor: torch.Tensor, rows: Rows, wide: Collection[int]) -> ReturnedLeaf:
        shape = [TOKENS if dim in wide else size for dim, size in enumerate(tensor.shape)]
        per = rows.patches_per_entry(len(tensor)) if tensor.dim() else None
        if per is not None:
            shape[0] = 1 if per else shape[0] // rows.count
        leaf = Leaf(tensor.dtype, tuple(shape), per or EACH)
        flags = tensor.requires_grad, tensor.is_leaf
        return cls(tensor.device, leaf, per is not None, dense_order(tensor), *flags)

    def as_returned(self, stored: torch.Tensor) -> torch.Tensor:
        """Convert a tensor from the store to the dtype and memory order that the module returns."""
        if self.order is None or self.order == tuple(range(stored.dim())):
            return stored.to(self.row.dtype)
        made = torch.empty_permuted(stored.shape, self.order, dtype=self.row.dtype, device=stored.device)
        return made.copy_(stored)

    def connected(self, value: torch.Tensor) -> torch.Tensor:
        """The value, requiring a gradient if the module's output did: reentrant gradient checkpoints compute by it."""
        if not self.requires_grad or not torch.is_grad_enabled():
            return value
        if self.is_leaf:
            return value.detach().requires_grad_()
        origin = torch.empty(0, device=value.device, requires_grad=True)
        connected: torch.Tensor = _Connected.apply(value.detach(), origin)
        return connected

    def sized(self, rows: Rows, width: int) -> tuple[int, ...]:
        """Shape of the tensor for these rows in a batch of this width."""
        shape = self.row.sized(width)
        return (self.row.length(rows), *shape[1:]) if self.is_of_rows else shape

    def hidden(
        self, rows: Rows, width: int, text: str, computed: Callable[[], torch.Tensor | None] | None = None
    ) -> torch.Tensor:
        like = torch.empty((), dtype=self.row.dtype, device=self.device).expand(self.sized(rows, width))
        return hidden_like(like, text, REMEDY, computed)


class _Connected(torch.autograd.Function):
    """Makes a tensor a result of `origin`, in place. As no leaf of the graph, the model may write into it."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, origin: torch.Tensor) -> torch.Tensor:
        context.mark_dirty(value)
        return value

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return None, None


@dataclass(frozen=True)
class ReturnedObject:
    """A cache of keys and values in the output of a module, which is never read: its class, and its attributes."""

    kind: type
    attributes: frozenset[str]

    def hidden(self, rows: Rows, width: int, text: str, computed: Any = None) -> HiddenObject:
        return HiddenObject(text, self)


@dataclass(frozen=True)
class Same:
    """The very tensor that is also an earlier leaf of the output. A write into one is a write into both.

    Attributes:
        first: position of the earlier leaf.
    """

    first: int


class HiddenObject(Unreadable):
    """Stands for an object that is not kept. It cannot be read; it lacks the attributes that the object lacks."""

    def __init__(self, text: str, of: ReturnedObject) -> None:
        super().__init__(f"{text} ({of.kind.__name__})", REMEDY)
        self.__dict__.update(attributes=of.attributes, kind=of.kind)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the object, for `isinstance`."""
        return self.__dict__["kind"]

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["attributes"]:
            return Unreadable.__getattr__(self, name)  # type: ignore[attr-defined]  # refuses
        raise AttributeError(name)


def returned(value: Any, rows: Rows, wide: Collection[int]) -> Any:
    """The description of a leaf of an output; plain values describe themselves."""
    if isinstance(value, torch.Tensor):
        return ReturnedLeaf.of(value, rows, wide)
    return value if value is None else ReturnedObject(type(value), frozenset(dir(value)))


@dataclass(frozen=True)
class Known:
    """The arguments and outputs of a module for inputs of one shape.

    Attributes:
        others: the arguments that are no tensors, for each kind of call so far.
        leaves: leaves of the output: tensors as `ReturnedLeaf`, or as `Same` if they are there before; objects as
            `ReturnedObject`; None unchanged.
        structure: the containers of the leaves.
    """

    others: set[Others]
    leaves: tuple[Any, ...]
    structure: TreeSpec

    @classmethod
    def of(
        cls, recorded: RecordedCall, name: str, rows: Rows, wide: Mapping[tuple[str, int], Collection[int]]
    ) -> Known:
        """Describe a call of the module.

        Args:
            recorded: the call.
            name: name of the module.
            rows: the rows of the call.
            wide: for leaves of outputs, the dimensions that have the width of the batch.
        """
        _, others, leaves, structure = recorded
        first = first_positions(leaves)
        kept = (
            returned(leaf, rows, wide.get((name, k), ())) if first[k] == k else Same(first[k])
            for k, leaf in enumerate(leaves)
        )
        return cls({others}, tuple(kept), structure)

    def refuse(self, name: str, given: Sequence[torch.Tensor], others: Others) -> None:
        """Raise an error if a gradient may have to flow through the module, or an argument may change unseen.

        Args:
            name: name of the module.
            given: the tensors among its arguments.
            others: its other arguments.

        Raises:
            NewCallError: an argument requires a gradient, or the output gets a graph after the module has returned; or
                an argument is an object.
        """
        if others.odd:
            raise NewCallError(others.why_not)
        if any(tensor.requires_grad for tensor in given):
            raise NewCallError(f"{name} is called on something that requires a gradient")
        leaves = [leaf for leaf in self.leaves if isinstance(leaf, ReturnedLeaf)]
        if not torch.is_grad_enabled() and any(leaf.requires_grad and not leaf.is_leaf for leaf in leaves):
            raise NewCallError(REENTRANT)


@dataclass(frozen=True)
class KnownBatch:
    """Description of the inputs of a call.

    Attributes:
        entries: the rows' entries, with the columns that belong to the samples, if padding is not stored.
        rows: samples, or images.
        signature: the values that determine the shapes of the front's outputs.
        covered: id of each tensor in the keys -> its number, and its count of writes.
    """

    entries: BatchEntries
    rows: Rows
    signature: Any
    covered: Mapping[int, tuple[int, int]]


@dataclass
class FrontCall:
    """A call of the model.

    Attributes:
        batch: description of its inputs; None in a trial.
        known: records of the modules, if stored outputs are returned.
        given_back: the stored outputs, by module and leaf; None if all modules run on all samples.
        digests: for each module, digests of its arguments when the stored outputs were computed.
        missing: rows without stored outputs, which are computed.
        ran: the calls of the modules so far, with their outputs.
        is_other: whether a module was called on something else than before. From this module on all run.
        is_apart: whether autocast, adapters or settings differ where the front is called, or something transforms its
            operations. From there on all modules run as they are.
        thread: the thread that the call runs on. On other threads modules run as they are.
    """

    batch: KnownBatch | None = None
    known: Mapping[str, Known] = field(default_factory=dict)
    given_back: dict[tuple[str, int], torch.Tensor] | None = None
    digests: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    computed: dict[int, torch.Tensor] = field(default_factory=dict)  # id of an output tensor -> its missing rows
    ran: dict[str, RecordedCall] = field(default_factory=dict)
    is_other: bool = False
    is_apart: bool = False
    made: ArgumentDigests | None = None  # digests computed in this call
    seconds: float = 0.0  # duration of the modules that ran
    versions: dict[str, list[int]] = field(default_factory=dict)  # of inputs and outputs, when the module returned
    returned: dict[int, int] = field(default_factory=dict)  # id of a tensor that a module returned -> count of writes
    copies: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # arguments, by id and count of writes
    ends: bool = False  # when all modules have run
    thread: int = field(default_factory=threading.get_ident)

    def note(self, name: str, recorded: RecordedCall) -> None:
        """Record a module's call when it returns."""
        self.ran[name] = recorded
        self.returned |= returned_by(recorded)

    @property
    def is_here(self) -> bool:
        """Whether the call runs on this thread."""
        return not torch.compiler.is_compiling() and self.thread == threading.get_ident()


def returned_by(recorded: RecordedCall) -> dict[int, int]:
    """Identities of the tensors that a call has returned, with their numbers of writes.

    Without those of inference mode, which counts no writes: they are compared by value where they are passed on.
    """
    leaves = [leaf for leaf in recorded[2] if not (isinstance(leaf, torch.Tensor) and leaf.is_inference())]
    return {id(leaf): version_of(leaf) for leaf in leaves}


class LateOutput:
    """Computes the output of a module when something of it is read that is not kept.

    Args:
        forward: the module's own forward.
        args: its positional arguments.
        kwargs: its named arguments.
        device: type of its device.
        call: the call of the model. Small arguments that it has computed are copied, as it may write into them.
    """

    def __init__(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device: str, call: FrontCall
    ) -> None:
        assert call.batch is not None
        self._forward, self._device, self._copies = forward, device, call.copies
        self._given, self._structure = tree_flatten((args, kwargs))
        self._versions = list(map(version_of, self._given))
        self._autocast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self._leaves: list[Any] = []
        covered = call.batch.covered
        for leaf, version in zip(self._given, self._versions, strict=True):
            is_dense = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
            is_own = is_dense and id(leaf) not in call.returned and id(leaf) not in covered
            if is_own and (id(leaf), version) not in call.copies and leaf.nbytes <= LARGEST_COPY:
                call.copies[id(leaf), version] = leaf.detach().clone()

    @contextmanager
    def as_called(self) -> Iterator[None]:
        """Inside, the module runs as where it was called."""
        dtype, is_cast = self._autocast
        with torch.autocast(self._device, dtype, is_cast), torch.no_grad(), unnoticed():
            yield

    def leaf(self, position: int) -> Any:
        """A leaf of the output; None if an argument has been written to. Inside of `as_called`."""
        if not self._leaves:
            pairs = zip(self._given, self._versions, strict=True)
            given = [one if _is_as_it_was(one, v) else self._copies.get((id(one), v)) for one, v in pairs]
            if any(one is not None and new is None for one, new in zip(self._given, given, strict=True)):
                return None
            args, kwargs = tree_unflatten(given, self._structure)
            self._leaves = tree_flatten(self._forward(*args, **kwargs))[0]
        return self._leaves[position]


def _is_as_it_was(value: Any, version: int) -> bool:
    """Whether a tensor has not been written to since it had this number of writes. True for other values."""
    return version_of(value) == version and not (isinstance(value, Postponed) and value.is_written_to)


def of_missing(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: FrontCall,
    known: Known,
    has_rows: Sequence[bool],
) -> list[Any]:
    """Run a module on the missing rows, and return the leaves of its output.

    Args:
        module: the module.
        forward: its own forward.
        args: its positional arguments for all rows.
        kwargs: its named arguments for all rows.
        call: the call of the model.
        known: the record of the module.
        has_rows: for each tensor among the arguments, whether it is divided among the rows.

    Raises:
        NewCallError: it does not run on a part of the rows, or its output has another structure or shape for them; or
            it changes its buffers, by which it would compute the other rows as well.
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
    before = buffers_of(module)
    try:
        with torch.no_grad(), unnoticed():
            leaves, structure = tree_flatten(forward(*args, **kwargs))
    except Exception as error:  # the module does not run on a part of the samples
        raise NewCallError from error
    if buffers_of(module) != before:
        raise NewCallError(CHANGES)
    if structure != known.structure:
        raise NewCallError
    for leaf, found in zip(known.leaves, leaves, strict=True):
        if isinstance(leaf, ReturnedLeaf) and leaf.is_of_rows:
            shape = leaf.sized(rows.chosen(call.missing), call.batch.entries.width)
            if not isinstance(found, torch.Tensor) or found.shape != shape:
                raise NewCallError  # the shape depends on the other samples
    return leaves
