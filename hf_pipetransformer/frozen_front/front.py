"""Computes the frozen front of a model once for each sample: its outputs are stored, and given back afterwards.

    in a call of the model     its samples are not all in the store     they are
    a module of the front      runs; what is needed of its output       does not run; returns what was
                               is stored when the call has ended        stored, in the same containers

A value that is neither needed nor stored cannot be read. What could make a stored value a wrong one is looked at in
each call: the front's weights, buffers, flags and modes, the shapes that its modules are called on, and how often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import xxhash
from accelerate.utils import recursively_apply
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..cache.cache_probe import relative_difference, rounding_of
from ..cache.content_keys import NOT_OF_STATES, RowKey, row_keys
from ..model.elsewhere import hidden_like
from ..model.layer_range import MethodOverride
from ..model.left_as_found import left_as_found
from ..model.micro_batch import Batch, batch_rows
from ..pipeline.devices import synchronise
from ..randomness import generators_kept, global_state_kept
from .entries import FrontEntries
from .finding import FoundFront, Ran, arguments_of, random_state, tensors_in, versions_of

T = TypeVar("T")

NOT_KEPT = "is not kept, as nothing had read it when the frozen modules were looked for"
REMEDY = "Set activation_cache='off'"

ARGUMENTS = -1
"""In place of the position of a leaf: a digest of what the module was called on."""
DIGEST_BYTES = 16

Shape = tuple[int | None, ...]
"""Of a tensor; None stands for the number of rows."""


class OtherCallsError(Exception):
    """The front is called in another way than before, so what is stored is of no use in this call."""


class _NewCallError(Exception):
    """A module of the front is called on tensors of other shapes than before, or on another number of them."""


class _AllRanError(Exception):
    """Ends a forward pass of which only the front is wanted."""


@dataclass(frozen=True)
class _Leaf:
    """A tensor in the output of a module: a tensor without memory, with one row; and the shape."""

    like: torch.Tensor
    shape: Shape

    @classmethod
    def of(cls, tensor: torch.Tensor, rows: int) -> _Leaf:
        return cls(torch.empty((), dtype=tensor.dtype, device=tensor.device), _shape(tensor, rows))

    def sized(self, rows: int) -> tuple[int, ...]:
        return tuple(rows if size is None else size for size in self.shape)


@dataclass(frozen=True)
class _Known:
    """How a module is called, and what it returns, for inputs of some shape.

    Attributes:
        given: shapes of the tensors in its arguments, and its other arguments, in each way in which it was called.
        leaves: of its output: tensors as `_Leaf`, other values as they are.
        structure: the containers of the leaves.
    """

    given: set[tuple[tuple[Shape, ...], str]]
    leaves: tuple[Any, ...]
    structure: TreeSpec

    @classmethod
    def of(cls, given: list[torch.Tensor], others: str, leaves: list[Any], structure: TreeSpec, rows: int) -> _Known:
        return cls(
            {(_shapes(given, rows), others)},
            tuple(_Leaf.of(leaf, rows) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
            structure,
        )


def _shapes(tensors: Sequence[torch.Tensor], rows: int) -> tuple[Shape, ...]:
    return tuple(_shape(tensor, rows) for tensor in tensors)


def _shape(tensor: torch.Tensor, rows: int) -> Shape:
    return tuple(None if not position and size == rows else size for position, size in enumerate(tensor.shape))


@dataclass
class _Call:
    """A call of the model.

    Attributes:
        given_back: what is given back, by module and leaf; None if the modules run.
        known: of each module.
        rows: number of rows of what each module reads.
        ran: the modules that have been called; with their outputs, if they ran.
    """

    given_back: dict[tuple[str, int], torch.Tensor] | None
    known: Mapping[str, _Known]
    rows: Mapping[str, int]
    ran: dict[str, Ran] = field(default_factory=dict)
    seconds: float = 0.0  # of the modules that ran
    versions: dict[str, list[int]] = field(default_factory=dict)  # of inputs and outputs, when they were returned
    ends: bool = False  # when all modules have run


class FrozenFront:
    """The front of a model, from the call after the one in which it was found until `close`.

    Args:
        model: the model.
        found: its front.
        entries: what is stored; one store for each set of inputs that modules read.
        device: where the model computes.
    """

    def __init__(
        self,
        model: nn.Module,
        found: FoundFront,
        entries: Mapping[frozenset[str], FrontEntries],
        device: torch.device,
    ) -> None:
        self.found = found
        self.seconds_per_row = 0.0
        """Of the front's modules, in the call that was timed last."""
        self.share = 0.0
        """Their share of the model's forward pass in it."""
        self.reading_seconds = 0.0
        self.trouble: str | None = None
        """Why what is stored is of no use any more."""
        self.is_verified = False
        """Whether what is stored was compared with what is computed, of one call: once in each epoch."""
        self.num_asked = self.num_read = self.rows_read = self.rows_asked = 0
        """Number of calls that were looked up, that were read, of their samples, and of all calls' samples."""
        self._model, self._entries, self._device = model, entries, device
        self._known: dict[Any, dict[str, _Known]] = {}
        self._around: str | None = None  # what it is called on besides tensors, on which names, and autocast
        self._call: _Call | None = None
        self._modules = {module.name: module for module in found.modules}
        self._overrides = []
        for name in self._modules:
            module = model.get_submodule(name)
            self._overrides.append(MethodOverride(module, "forward", partial(self._forward, name, module.forward)))

    def close(self) -> None:
        """Let the modules run again."""
        for override in self._overrides:
            override.remove()
        self._overrides = []

    # ------------------------------------------------------------------------------------ calls of the model
    def run(self, inputs: Batch, forward: Callable[[], T], reads: bool, writes: bool) -> T:
        """Run a call of the model, in which the front is computed or given back.

        Args:
            inputs: what the model is called on, by name.
            forward: runs its forward.
            reads: whether stored outputs may be given back.
            writes: whether outputs that are not in the store are stored.

        Raises:
            OtherCallsError: the front is not called as before, and nothing was given back.
        """
        keyed = self._keyed(inputs)
        if keyed is None:
            return forward()
        keys, rows, signature = keyed
        known = self._known.get(signature, {})
        self.rows_asked += max(rows.values())
        given_back = self._read(keys, known, rows) if reads and known else None
        self.num_asked += reads
        if given_back is not None and self.is_verified:
            before = random_state(self._device)
            self._call = _Call(given_back, known, rows)
            try:
                output = forward()
                self.num_read += 1
                self.rows_read += max(rows.values())
                return output
            except OtherCallsError:
                set_random_state(before, self._device)
                raise
            except ValueError as error:
                if NOT_KEPT not in str(error):
                    raise
                set_random_state(before, self._device)
                raise OtherCallsError("something reads more of it than before") from error
            except _NewCallError:  # without a mask, where a batch has no padding: what is stored may hold all the same
                set_random_state(before, self._device)
            finally:
                self._call = None
        self._call = call = _Call(None, known, rows)
        began = time.perf_counter()
        try:
            output = forward()
        finally:
            self._call = None
        synchronise(self._device)
        seconds = time.perf_counter() - began
        of_now = {name: versions_of([*given, *leaves]) for name, (given, _, leaves, _) in call.ran.items()}
        if of_now != call.versions:
            self.trouble = "the model writes into it"
        elif given_back is None:
            self.learn(inputs, call.ran, call.seconds, seconds, writes)
        else:
            self._compare(call, given_back)
            self.is_verified = True
        return output

    def learn(self, inputs: Batch, ran: Mapping[str, Ran], seconds: float, of_call: float, writes: bool) -> None:
        """Take over what the front's modules have returned in a call of the model.

        Args:
            inputs: what the model was called on.
            ran: what each of the modules was called on, and has returned.
            seconds: how long they ran.
            of_call: how long the model ran.
            writes: whether to store it.
        """
        keyed = self._keyed(inputs)
        if keyed is None or ran.keys() != self._modules.keys():
            return
        keys, rows, signature = keyed
        self.seconds_per_row, self.share = seconds / max(rows.values()), seconds / of_call
        known = {name: _Known.of(*call, rows[name]) for name, call in ran.items()}
        odd = [n for n in known if any(known[n].leaves[k].shape[:1] != (None,) for k in self._modules[n].needed)]
        if odd:  # there may be one row only, of which shapes do not show it
            return
        self._known[signature] = known
        if writes:
            of_front = {id(leaf) for *_, leaves, _ in ran.values() for leaf in leaves}
            for reads, entries in self._entries.items():
                leaves = [
                    ran[name][2][position] if position != ARGUMENTS else _digests(ran[name][0], of_front, rows[name])
                    for name, position in self._stored_by(reads)
                ]
                entries.write([key.digest for key in keys[reads]], leaves)

    def agrees(self, inputs: Batch, calls: Mapping[str, Ran], forward: Callable[[Batch], Any]) -> bool:
        """Whether half of the samples alone have the same outputs of the front, up to rounding.

        Args:
            inputs: what the model was called on.
            calls: as in `learn`.
            forward: runs the model's forward on a batch.
        """
        rows = batch_rows(inputs)
        half = torch.arange(0, rows, 2)

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            """Every other sample's entries: several images of a sample follow one another."""
            if not tensor.dim() or len(tensor) % rows:
                return tensor
            return tensor.unflatten(0, (rows, -1))[half.to(tensor.device)].flatten(0, 1)

        self._call = call = _Call(None, {}, {}, ends=True)
        try:
            with torch.no_grad(), left_as_found(self._model), global_state_kept(), generators_kept(self._model):
                forward(recursively_apply(chosen, inputs))
        except _AllRanError:
            pass
        except Exception:  # samples have different numbers of images, perhaps
            return False
        finally:
            self._call = None
        if call.ran.keys() != self._modules.keys():
            return False
        for name, module in self._modules.items():
            whole, part = calls[name][2], call.ran[name][2]
            for position in module.needed:
                expected, found = whole[position], part[position]
                if relative_difference([found.detach()], [chosen(expected.detach())]) > rounding_of(expected):
                    return False
        return True

    # ------------------------------------------------------------------------------------ inside
    def _compare(self, call: _Call, given_back: Mapping[tuple[str, int], torch.Tensor]) -> None:
        """Compare what modules return, which are called in a new way, with what is stored of the samples."""
        for (name, position), stored in given_back.items():
            if position == ARGUMENTS:
                continue
            computed = call.ran[name][2][position].detach() if name in call.ran else None
            if computed is None or relative_difference([computed], [stored]) > rounding_of(stored):
                self.trouble = f"{name} is called on something else than before"
                return
        for name, (given, others, *_) in call.ran.items():
            call.known[name].given.add((_shapes(given, call.rows[name]), others))

    def _keyed(self, inputs: Batch) -> tuple[dict[frozenset[str], list[RowKey]], dict[str, int], Any] | None:
        """The keys of what is read, the number of its rows for each module, and what outputs' shapes depend on."""
        keys: dict[frozenset[str], list[RowKey]] = {}
        plain = {name: value for name, value in inputs.items() if not tensors_in(value)}
        device = self._device.type
        plain = {name: value for name, value in plain.items() if name not in NOT_OF_STATES}
        names = sorted(inputs.keys() - NOT_OF_STATES)
        around = plain, names, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        if self._around is None:
            self._around = repr(around)
        if repr(around) != self._around:
            return None
        for reads in self._entries:
            if not reads <= inputs.keys():
                return None
            read = {name: inputs[name] for name in reads}
            if any(tensor.requires_grad for tensor in tensors_in(read)):
                return None
            found = row_keys({**read, **plain}, NOT_OF_STATES, keeps_padding=True)
            if not found:
                return None
            keys[reads] = found
        rows = {name: len(keys[module.reads]) for name, module in self._modules.items() if module.reads in keys}
        for name, module in self._modules.items():  # one that feeds others, and of which nothing is stored
            if name not in rows:
                rows[name] = len(tensors_in(inputs[next(iter(module.reads))])[0])
        of_all = frozenset().union(*(module.reads for module in self._modules.values()))
        shapes = [(n, [(t.dtype, t.shape[1:]) for t in tensors_in(inputs[n])]) for n in sorted(of_all)]
        return keys, rows, (repr(shapes), min(rows.values()) == 1)

    def _stored_by(self, reads: frozenset[str]) -> list[tuple[str, int]]:
        """The leaves that one entry has, by module and position."""
        return [
            (module.name, position)
            for module in self.found.modules
            if module.reads == reads
            for position in (*module.needed, ARGUMENTS)
        ]

    def _read(
        self, keys: Mapping[frozenset[str], Sequence[RowKey]], known: Mapping[str, _Known], rows: Mapping[str, int]
    ) -> dict[tuple[str, int], torch.Tensor] | None:
        began = time.perf_counter()
        given_back: dict[tuple[str, int], torch.Tensor] = {}
        for reads, entries in self._entries.items():
            stored = self._stored_by(reads)
            shapes = [
                (torch.uint8, (len(keys[reads]), DIGEST_BYTES))
                if position == ARGUMENTS
                else (known[name].leaves[position].like.dtype, known[name].leaves[position].sized(len(keys[reads])))
                for name, position in stored
            ]
            found = entries.read([key.digest for key in keys[reads]], shapes, self._device)
            if found is None:
                return None
            given_back |= dict(zip(stored, found, strict=True))
        self.reading_seconds += time.perf_counter() - began
        return given_back

    def _forward(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = self._call
        if call is None:
            return forward(*args, **kwargs)
        if name in call.ran:
            raise OtherCallsError(f"{name} is called several times in a forward pass")
        if call.given_back is None:
            synchronise(self._device)
            began = time.perf_counter()
            output = forward(*args, **kwargs)
            synchronise(self._device)
            call.seconds += time.perf_counter() - began
            # the leaves, as the model may write into a container afterwards
            leaves, structure = tree_flatten(output)
            given, others = arguments_of(args, kwargs)
            call.ran[name] = given, others, leaves, structure
            call.versions[name] = versions_of([*given, *leaves])
            if call.ends and call.ran.keys() == self._modules.keys():
                raise _AllRanError
            return output
        known, rows = call.known[name], call.rows[name]
        given, others = arguments_of(args, kwargs)
        leaves = [self._leaf(name, position, leaf, call) for position, leaf in enumerate(known.leaves)]
        of_front = {id(leaf) for *_, earlier, _ in call.ran.values() for leaf in earlier}
        call.ran[name] = given, others, leaves, known.structure
        if any(tensor.requires_grad for tensor in given):
            raise OtherCallsError(f"{name} is called on something that is trained")
        if (_shapes(given, rows), others) not in known.given:
            raise _NewCallError
        stored = call.given_back.get((name, ARGUMENTS))
        if stored is not None and not torch.equal(stored.cpu(), _digests(given, of_front, rows)):
            raise _NewCallError
        return tree_unflatten(leaves, known.structure)

    def _leaf(self, name: str, position: int, leaf: Any, call: _Call) -> Any:
        assert call.given_back is not None
        if not isinstance(leaf, _Leaf):
            return leaf
        if (name, position) in call.given_back:
            return call.given_back[name, position]
        return hidden_like(leaf.like.expand(leaf.sized(call.rows[name])), f"the output of {name} {NOT_KEPT}", REMEDY)


def _digests(given: Sequence[torch.Tensor], of_front: Collection[int], rows: int) -> torch.Tensor:
    """For each row, a digest of what a module is called on, without what comes from the front itself.

    Masks of truth values are left out: a model may pass none where a batch has no padding.

    Returns:
        `[rows, DIGEST_BYTES]`, uint8, on the CPU.
    """
    digests = [xxhash.xxh3_128() for _ in range(rows)]
    for tensor in given:
        if id(tensor) in of_front or tensor.dtype is torch.bool or not tensor.numel():
            continue
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        parts = values.reshape(rows, -1) if tensor.dim() and len(tensor) == rows else [values] * rows
        for digest, part in zip(digests, parts, strict=True):
            digest.update(part.data)
    content = bytearray(b"".join(digest.digest() for digest in digests))
    return torch.frombuffer(content, dtype=torch.uint8).view(rows, DIGEST_BYTES)


def set_random_state(states: Sequence[torch.Tensor], device: torch.device) -> None:
    """Set the states that `random_state` has returned."""
    torch.default_generator.set_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)
