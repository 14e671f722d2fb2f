"""Computes the frozen front of a model once for each sample: its outputs are stored, and given back afterwards.

    in a call of the model     none of its samples is in the store      some are, or all
    a module of the front      runs; what is needed of its output       runs on the others only; returns what
                               is stored when the call has ended        was stored, in the same containers

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
from accelerate.utils import recursively_apply
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from ..cache.activation_cache import CacheCounts
from ..cache.cache_probe import SAME, TOLERANCES, relative_difference, rounding_of
from ..cache.content_keys import NOT_OF_STATES, TOKEN_INPUTS, version_of
from ..model.elsewhere import hidden_like
from ..model.left_as_found import left_as_found
from ..model.method_override import MethodOverride
from ..model.micro_batch import Batch, batch_rows
from ..pipeline.devices import synchronise
from ..randomness import generators_kept, global_state_kept, set_torch_states, torch_states
from .entries import TOKENS, FrontEntries, Leaf
from .finding import FoundFront, Ran, arguments_of, rows_of, tensors_in, versions_of
from .rows import (
    DIGEST_BYTES,
    ArgumentDigests,
    Tokens,
    keys_of,
    leaves_of,
    tokens_of,
    with_less_columns,
)

T = TypeVar("T")

NOT_KEPT = "is not kept, as nothing had read it when the frozen modules were looked for"
REMEDY = "Set activation_cache='off'"

ITEMS = "num_items_in_batch"
MOST_TRIES = 3
"""Number of batches on which it is tried whether a loss reads padding."""
LOUD = 2.0
"""Amplitude of the noise in place of padding, relative to the largest value."""


class OtherCallsError(Exception):
    """The front is called in another way than before, so what is stored is of no use in this call."""


class _NewCallError(Exception):
    """A module of the front is called on something else than when what is stored was computed."""


class _AllRanError(Exception):
    """Ends a forward pass of which only the front is wanted."""


@dataclass(frozen=True)
class _Leaf:
    """A tensor in the output of a module: its device, and what one row of it is; or all, if it is not of rows."""

    device: torch.device
    row: Leaf
    is_of_rows: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, rows: int, wide: Collection[int]) -> _Leaf:
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
class _Known:
    """How a module is called, and what it returns, for inputs of some shape.

    Attributes:
        others: arguments that are no tensors, in each way in which it was called.
        leaves: of its output: tensors as `_Leaf`, other values as they are.
        structure: the containers of the leaves.
    """

    others: set[str]
    leaves: tuple[Any, ...]
    structure: TreeSpec


@dataclass(frozen=True)
class _Batch:
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
class _Call:
    """A call of the model.

    Attributes:
        batch: what is known of its inputs; None in a trial.
        known: of each module, if something is given back.
        given_back: what is given back, by module and leaf; None if all modules run on all samples.
        digests: of the arguments, when what is given back was computed, for each module.
        missing: rows that are computed, and not given back.
        ran: the modules that have been called; with their outputs, if they ran.
        computed: for the missing rows only, what a tensor in an output stands for, by its identity.
    """

    batch: _Batch | None = None
    known: Mapping[str, _Known] = field(default_factory=dict)
    given_back: dict[tuple[str, int], torch.Tensor] | None = None
    digests: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    ran: dict[str, Ran] = field(default_factory=dict)
    computed: dict[int, torch.Tensor] = field(default_factory=dict)
    made: ArgumentDigests | None = None  # in this call
    seconds: float = 0.0  # of the modules that ran
    versions: dict[str, list[int]] = field(default_factory=dict)  # of inputs and outputs, when they were returned
    ends: bool = False  # when all modules have run


class FrozenFront:
    """The front of a model, from the call after the one in which it was found until `close`.

    Args:
        model: the model.
        found: its front.
        entries: what is stored.
        device: where the model computes.
        storage_dtype: data type in which fractions are stored; None stores them as they are computed.
    """

    def __init__(
        self,
        model: nn.Module,
        found: FoundFront,
        entries: FrontEntries,
        device: torch.device,
        storage_dtype: torch.dtype | None = None,
    ) -> None:
        self.found = found
        self.seconds_per_row = 0.0
        """Of the front's modules, in the call that was timed last."""
        self.share = 0.0
        """Their share of the model's forward pass in it."""
        self.counts = CacheCounts()
        """Of the samples of all calls, until they are taken."""
        self.trouble: str | None = None
        """Why what is stored is of no use any more."""
        self.is_verified = False
        """Whether what is stored was compared with what is computed, of one call: once in each epoch."""
        self.num_missed = self.num_read = 0
        """Number of calls of which nothing was found, and of those that were read."""
        self._model, self._entries, self._device, self._storage_dtype = model, entries, device, storage_dtype
        self.cuts_padding = False
        """Whether samples are stored without their padding."""
        self.awaits_loss = False
        """Whether it must be found out yet whether the loss reads padding in what the model returns (`try_loss`)."""
        self._is_noisy = self._has_made_noise = False
        self._num_tries = 0  # of losses
        self._has_rows: dict[str, tuple[bool, ...]] = {}  # of the tensors among a module's arguments
        self._wide: dict[tuple[str, int], tuple[int, ...]] = {}  # dimensions of leaves that are as wide as the batch
        self._known: dict[Any, dict[str, _Known]] = {}
        self._around: str | None = None  # what it is called on besides tensors, on which names, autocast, and adapters
        self._with_adapters = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
        self._call: _Call | None = None
        self._modules = {module.name: module for module in found.modules}
        self._stored = [(m.name, position) for m in found.modules for position in m.needed]  # leaves of an entry
        self._overrides: list[MethodOverride] = []
        self.open()

    def open(self) -> None:
        """Look at the calls of the modules, until `close`."""
        for name in self._modules if not self._overrides else ():
            module = self._model.get_submodule(name)
            self._overrides.append(MethodOverride(module, "forward", partial(self._forward, name, module.forward)))

    def close(self) -> None:
        """Let the modules run as they are."""
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
        batch = self._described(inputs)
        if batch is None:
            return forward()
        if self._is_noisy:
            self._call = _Call(batch)
            try:
                return forward()
            finally:
                self._call = None
        self.counts.rows += batch.rows
        # with a loss that may read padding, what is read must not have another
        may_read = not self.awaits_loss or batch.tokens is None or not batch.tokens.has_padding
        found = self._read(batch) if reads and may_read else None
        self.num_missed += reads and found is None
        if found is not None and self.is_verified:
            before = torch_states()
            self._call = found
            try:
                output = forward()
                self.num_read += 1
                given_back = batch.rows - len(found.missing)
                self.counts.hits += given_back
                self.counts.layers_skipped += given_back  # of one layer, which the front counts as
                if found.missing and writes:
                    self._write(found)
                return output
            except OtherCallsError:
                set_torch_states(before)
                raise
            except ValueError as error:
                if NOT_KEPT not in str(error):
                    raise
                set_torch_states(before)
                raise OtherCallsError("something reads more of it than before") from error
            except _NewCallError:  # without a mask, where a batch has no padding: what is stored may hold all the same
                set_torch_states(before)
            finally:
                self._call = None
        self._call = call = _Call(batch)
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
        elif found is None:
            self.learn(inputs, call.ran, call.seconds, seconds, writes)
        else:
            self._compare(call, found)
            self.is_verified = True
            self.counts.hits += batch.rows - len(found.missing)
            if found.missing and writes and self.trouble is None:
                self._write(_Call(batch, found.known, ran=call.ran))
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
        batch = self._described(inputs)
        if batch is None or ran.keys() != self._modules.keys():
            return
        self.seconds_per_row, self.share = seconds / batch.rows, seconds / of_call
        known = self._known_by(batch, ran)
        if not all(known[name].leaves[position].is_of_rows for name, position in self._stored):
            return
        if batch.signature not in self._known:
            self._known[batch.signature] = known
        else:
            for name, of_module in known.items():
                if of_module.leaves != self._known[batch.signature][name].leaves:
                    self.trouble = f"the shape of what {name} returns depends on the values of its inputs"
                    return
                self._known[batch.signature][name].others.update(of_module.others)
        if writes:
            self._write(_Call(batch, known, ran=dict(ran)))

    def is_of_samples(
        self,
        inputs: Batch,
        calls: Mapping[str, Ran],
        forward: Callable[[Batch], Any],
        may_cut: bool = True,
    ) -> bool:
        """Whether half of the samples alone have the same outputs of the front, up to rounding.

        It finds out as well whether padding may be left out (`cuts_padding`), as far as the outputs show it.

        Args:
            inputs: what the model was called on.
            calls: what the modules were called on, and have returned.
            forward: runs the model's forward on a batch.
            may_cut: whether padding may be left out.
        """
        rows, tokens = batch_rows(inputs), self._cuttable(inputs) if may_cut else None
        if tokens is not None and len(tokens.lengths) == rows:
            columns = max(1, tokens.width // 4)
            batch = with_less_columns(inputs, columns, removes=False)
            half = _half(with_less_columns(batch, columns, removes=True))
            ran, part = (self._tried(_Call(ends=True), partial(forward, given)) for given in (batch, half))
            if self._hold(ran, part, rows, tokens.cut(columns), columns):
                self.cuts_padding = self.awaits_loss = True
                return True
        part = self._tried(_Call(ends=True), partial(forward, _half(inputs)))
        return self._hold(calls, part, rows)

    def _cuttable(self, inputs: Batch) -> Tokens | None:
        """The samples' own tokens, if the front reads some that may be cut."""
        tokens = tokens_of(inputs)
        leaves = [leaf for name in self.found.reads & inputs.keys() for leaf in leaves_of(inputs[name], name)]
        is_any = any(_is_wide(name, leaf, tokens) for name, leaf in leaves if isinstance(leaf, torch.Tensor))
        return tokens if is_any and tokens is not None and tokens.width > 1 else None

    def _hold(
        self,
        ran: Mapping[str, Ran],
        half: Mapping[str, Ran],
        rows: int,
        tokens: Tokens | None = None,
        columns: int = 0,
    ) -> bool:
        """Whether outputs are the same for half of the samples alone, with so many columns of padding less."""
        wide: dict[tuple[str, int], tuple[int, ...]] = {}
        if not ran.keys() == half.keys() == self._modules.keys():
            return False
        pairs = ((n, k, *pair) for n in ran for k, pair in enumerate(zip(ran[n][2], half[n][2], strict=False)))
        for name, position, whole, part in pairs:
            is_stored = (name, position) in self._stored
            if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor):
                continue
            if whole.dim() != part.dim():
                return False
            expected = _half_of(whole, rows)
            dims = tuple(dim for dim in range(1, whole.dim()) if whole.shape[dim] != part.shape[dim])
            if tokens is not None:
                wide[name, position] = dims
                if any((whole.shape[d], part.shape[d]) != (tokens.width, tokens.width - columns) for d in dims):
                    return False
                if dims == (1,):
                    expected, part = (_cleared(t, tokens.lengths[::2]) for t in (expected[:, :-columns], part))
            if is_stored and not self._is_same(part, expected):  # also where they are wide elsewhere
                return False
        self._wide = wide
        self._note_rows(ran, half, rows)
        return True

    def try_loss(self, loss_of: Callable[[], torch.Tensor]) -> None:
        """Find out whether anything up to the loss reads padding in the outputs; then samples keep theirs.

        The rest of the model, and the loss, run with noise in its place.

        Args:
            loss_of: computes the loss of a batch, and leaves everything as it was.
        """
        self.awaits_loss = self._has_made_noise = False
        self._num_tries += 1
        losses = []
        try:
            for self._is_noisy in (False, True):
                losses.append(loss_of().detach())
        except Exception:  # it needs gradients, perhaps
            losses.clear()
        finally:
            self._is_noisy = False
        if losses and not self._has_made_noise and self._num_tries < MOST_TRIES:
            self.awaits_loss = True  # the model was called on something without padding
        elif not losses or not self._has_made_noise or relative_difference(losses[1:], losses[:1]) > SAME:
            self.cuts_padding, self._wide, self._known = False, {}, {}

    def _note_rows(self, whole: Mapping[str, Ran], half: Mapping[str, Ran], rows: int) -> None:
        """Note which of the tensors that a module is called on have entries for each row: they became half as long."""
        less = -(-rows // 2)
        for name in whole.keys() & half.keys() if less < rows else ():
            pairs = zip(whole[name][0], half[name][0], strict=False)
            self._has_rows[name] = tuple(
                one.dim() == other.dim() > 0 and len(one) * less == len(other) * rows > 0 for one, other in pairs
            )

    def _tried(self, call: _Call, forward: Callable[[], Any]) -> dict[str, Ran]:
        """What the modules have returned in a call that leaves the model as it was."""
        self._call = call
        try:
            with torch.no_grad(), left_as_found(self._model), global_state_kept(), generators_kept(self._model):
                forward()
        except _AllRanError:
            pass
        except Exception:  # samples have different numbers of images, perhaps
            return {}
        finally:
            self._call = None
        return call.ran

    # ------------------------------------------------------------------------------------ inside
    def _is_same(self, computed: torch.Tensor, expected: torch.Tensor, is_stored: bool = False) -> bool:
        tolerance = rounding_of(expected)
        if is_stored and self._storage_dtype is not None:
            tolerance = max(tolerance, TOLERANCES.get(self._storage_dtype, 0.0))
        return relative_difference([computed.detach()], [expected.detach()]) <= tolerance

    def _compare(self, call: _Call, found: _Call) -> None:
        """Compare what modules return, which are called in a new way, with what is stored of the samples."""
        assert call.batch is not None and found.given_back is not None
        tokens = call.batch.tokens
        for (name, position), stored in found.given_back.items():
            if name not in call.ran:
                self.trouble = f"{name} is not called in each forward pass"
                return
            rows = call.batch.rows
            there = torch.tensor(sorted(set(range(rows)) - set(found.missing)), device=stored.device)
            pair = [call.ran[name][2][position].detach(), stored]
            if pair[0].shape != stored.shape:
                self.trouble = f"{name} returns something else than before"
                return
            if self._wide.get((name, position)) and tokens is not None:
                pair = [_cleared(tensor, tokens.lengths) for tensor in pair]
            computed, expected = (tensor.unflatten(0, (rows, -1))[there] for tensor in pair)
            if not self._is_same(computed, expected, is_stored=True):
                self.trouble = f"{name} is called on something else than before"
                return
        for name, (_, others, *_) in call.ran.items():
            found.known[name].others.add(others)

    def _described(self, inputs: Batch) -> _Batch | None:
        """What is known of what the model is called on; None if nothing is stored of it, or read."""
        values = {name: value for name, value in inputs.items() if not tensors_in(value) and name != ITEMS}
        device = self._device.type
        plain = {name: value for name, value in values.items() if name not in NOT_OF_STATES}
        names = sorted(inputs.keys() - NOT_OF_STATES)
        adapters = [(m._disable_adapters, m._active_adapter) for m in self._with_adapters]
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        around = repr((values, names, autocast, adapters))
        self._around = self._around or around
        if around != self._around:
            return None
        tokens = tokens_of(inputs) if self.cuts_padding else None  # without, samples are stored with their padding
        reads = self.found.reads
        rows = rows_of(reads, inputs) if reads <= inputs.keys() else None
        if not rows or (tokens is not None and rows != len(tokens.lengths)):
            return None
        keys = keys_of({name: inputs[name] for name in reads}, rows, tokens, f"{plain} {tokens is not None}")
        if keys is None:
            return None
        leaves = [leaf for name in sorted(reads) for leaf in leaves_of(inputs[name], name)]
        shapes = [(n, t.dtype, _without_width(n, t, tokens)) for n, t in leaves if isinstance(t, torch.Tensor)]
        covered = {
            id(leaf): (number, version_of(leaf))
            for number, (name, leaf) in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and name not in NOT_OF_STATES
        }
        return _Batch(keys, tokens, (repr(shapes), rows == 1), covered)

    def _known_by(self, batch: _Batch, ran: Mapping[str, Ran]) -> dict[str, _Known]:
        return {
            name: _Known(
                {others},
                tuple(
                    _Leaf.of(leaf, batch.rows, () if batch.tokens is None else self._wide.get((name, position), ()))
                    if isinstance(leaf, torch.Tensor)
                    else leaf
                    for position, leaf in enumerate(leaves)
                ),
                structure,
            )
            for name, (_, others, leaves, structure) in ran.items()
        }

    def _layout(self, known: Mapping[str, _Known]) -> list[Leaf]:
        rows = [known[name].leaves[position].row for name, position in self._stored]
        digests = Leaf(torch.uint8, (1, DIGEST_BYTES * len(self._modules)))
        return [*(Leaf(self._stored_as(row.dtype), row.shape) for row in rows), digests]

    def _stored_as(self, dtype: torch.dtype) -> torch.dtype:
        return self._storage_dtype if self._storage_dtype is not None and dtype.is_floating_point else dtype

    def _read(self, batch: _Batch) -> _Call | None:
        """What is stored of a batch, as the call in which it is given back; None if it is nothing."""
        known = self._known.get(batch.signature)
        if known is None:
            return None
        began = time.perf_counter()
        missing, tensors = self._entries.read(batch.keys, self._layout(known), batch.tokens, self._device)
        if not tensors:
            return None
        *leaves, digests = tensors
        given_back = {
            (name, position): leaf.to(known[name].leaves[position].row.dtype)
            for (name, position), leaf in zip(self._stored, leaves, strict=True)
        }
        by_module = dict(zip(self._modules, digests.cpu().split(DIGEST_BYTES, dim=1), strict=True))
        self.counts.load_seconds += time.perf_counter() - began
        return _Call(batch, known, given_back, by_module, missing)

    def _write(self, call: _Call) -> None:
        """Store what the modules have returned in a call; of one in which something was given back, the rest."""
        batch = call.batch
        assert batch is not None
        of_front = {id(leaf) for *_, leaves, _ in call.ran.values() for leaf in leaves}
        made = ArgumentDigests(batch.rows, batch.tokens, batch.covered)
        digests = [made.of(call.ran[name][0], of_front, self._has_rows.get(name, ())) for name in self._modules]
        leaves = [call.ran[name][2][position].detach() for name, position in self._stored]
        tensors = [*(leaf.to(self._stored_as(leaf.dtype)) for leaf in leaves), torch.cat(digests, 1)]
        keys, lengths = list(batch.keys), None if batch.tokens is None else list(batch.tokens.lengths)
        if call.missing:
            index = torch.tensor(call.missing)
            tensors = [t.unflatten(0, (batch.rows, -1))[index.to(t.device)].flatten(0, 1) for t in tensors]
            keys, lengths = [keys[n] for n in call.missing], lengths and [lengths[n] for n in call.missing]
        self.counts.stored += self._entries.write(keys, tensors, self._layout(call.known), lengths)

    def _forward(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = self._call
        if call is None:
            return forward(*args, **kwargs)
        if name in call.ran:
            raise OtherCallsError(f"{name} is called several times in a forward pass")
        if call.given_back is not None:
            return self._given_back(name, forward, args, kwargs, call)
        synchronise(self._device)
        began = time.perf_counter()
        output = forward(*args, **kwargs)
        synchronise(self._device)
        call.seconds += time.perf_counter() - began
        # the leaves, as the model may write into a container afterwards
        leaves, structure = tree_flatten(output)
        given, others = arguments_of(args, kwargs)
        if self._is_noisy and call.batch is not None and call.batch.tokens is not None:
            lengths = call.batch.tokens.lengths
            self._has_made_noise |= call.batch.tokens.has_padding
            wide = [
                leaf if not self._wide.get((name, k)) else _with_noise(leaf, lengths) for k, leaf in enumerate(leaves)
            ]
            return tree_unflatten(wide, structure)
        call.ran[name] = given, others, leaves, structure
        call.versions[name] = versions_of([*given, *leaves])
        if call.ends and call.ran.keys() == self._modules.keys():
            raise _AllRanError
        return output

    def _given_back(
        self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: _Call
    ) -> Any:
        """What a module would return: what is stored, and what it returns for the samples of which nothing is."""
        assert call.batch is not None and call.given_back is not None
        known, rows = call.known[name], call.batch.rows
        given, others = arguments_of(args, kwargs)
        if any(tensor.requires_grad for tensor in given):
            raise OtherCallsError(f"{name} is called on something that is trained")
        of_front = {id(leaf) for *_, earlier, _ in call.ran.values() for leaf in earlier}
        call.made = call.made or ArgumentDigests(rows, call.batch.tokens, call.batch.covered)
        now, there = call.made.of(given, of_front, self._has_rows.get(name, ())), torch.ones(rows, dtype=torch.bool)
        there[call.missing] = False
        if others not in known.others or not torch.equal(now[there], call.digests[name][there]):
            raise _NewCallError
        computed = self._of_missing(name, rows, forward, args, kwargs, call) if call.missing else None
        leaves = []
        for position, leaf in enumerate(known.leaves):
            if isinstance(leaf, _Leaf):
                stored = call.given_back.get((name, position))
                text = f"the output of {name} {NOT_KEPT}"
                value = stored if stored is not None else leaf.hidden(rows, call.batch.width, text)
                if computed is not None:
                    if stored is not None:
                        into = stored.unflatten(0, (rows, -1))
                        into[call.missing] = computed[position].unflatten(0, (len(call.missing), -1)).to(into.dtype)
                    call.computed[id(value)] = computed[position]
                leaves.append(value)
            else:
                leaves.append(leaf)
        call.ran[name] = given, others, leaves, known.structure
        return tree_unflatten(leaves, known.structure)

    def _of_missing(
        self,
        name: str,
        rows: int,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: _Call,
    ) -> list[Any]:
        """The leaves of what a module returns for the samples of which nothing is stored."""

        given, has_rows = arguments_of(args, kwargs)[0], self._has_rows.get(name, ())
        if len(given) != len(has_rows):
            raise _NewCallError
        of_rows = {id(tensor) for tensor, has in zip(given, has_rows, strict=True) if has}

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in call.computed:
                return call.computed[id(tensor)]
            if id(tensor) not in of_rows:
                return tensor
            return tensor.unflatten(0, (rows, -1))[call.missing].flatten(0, 1)

        args, kwargs = tree_map_only(torch.Tensor, chosen, (args, kwargs))
        try:
            with torch.no_grad():
                leaves, structure = tree_flatten(forward(*args, **kwargs))
        except Exception as error:  # it does not run on a part of the samples
            raise _NewCallError from error
        known = call.known[name]
        width, count = call.batch.width if call.batch is not None else 0, len(call.missing)
        if structure != known.structure:
            raise _NewCallError
        for leaf, found in zip(known.leaves, leaves, strict=True):
            if isinstance(leaf, _Leaf) and leaf.is_of_rows:
                first, *rest = leaf.row.sized(width)
                if not isinstance(found, torch.Tensor) or found.shape != (first * count, *rest):
                    raise _NewCallError  # it depends on the other samples
        return leaves


def _half(inputs: Batch) -> Batch:
    rows = batch_rows(inputs)
    half: Batch = recursively_apply(lambda tensor: _half_of(tensor, rows), inputs)
    return half


def _half_of(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Every other sample's entries: several images of a sample follow one another."""
    if not tensor.dim() or len(tensor) % rows:
        return tensor
    return tensor.unflatten(0, (rows, -1))[::2].flatten(0, 1)


def _cleared(tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The same with 0 as padding."""
    cleared = tensor.detach().clone()
    for row, length in zip(cleared.unflatten(0, (len(lengths), -1)), lengths, strict=True):
        row[:, length:] = 0
    return cleared


def _with_noise(tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The same with noise as padding, if there are fractions in it."""
    noisy = tensor.detach().clone()
    if noisy.is_floating_point():
        generator = torch.Generator(noisy.device).manual_seed(0)  # the global one is the model's
        noise = torch.randn(noisy.shape, generator=generator, dtype=noisy.dtype, device=noisy.device)
        noise = LOUD * noisy.abs().max() * noise
        for row, (into, length) in enumerate(zip(noisy.unflatten(0, (len(lengths), -1)), lengths, strict=True)):
            into[:, length:] = noise.unflatten(0, (len(lengths), -1))[row][:, length:]
    return noisy


def _without_width(name: str, tensor: torch.Tensor, tokens: Tokens | None) -> tuple[int, ...]:
    shape = tuple(tensor.shape[1:])
    return (TOKENS, *shape[1:]) if _is_wide(name, tensor, tokens) else shape


def _is_wide(name: str, tensor: torch.Tensor, tokens: Tokens | None) -> bool:
    return tokens is not None and name in TOKEN_INPUTS and tensor.shape[1:2] == (tokens.width,)
