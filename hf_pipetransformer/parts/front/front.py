"""Computes the frozen front of a model once for each sample: its outputs are stored, and given back afterwards.

    in a call of the model     none of its samples is in the store      some are, or all
    a module of the front      runs; what is needed of its output       runs on the others only; returns what
                               is stored when the call has ended        was stored, in the same containers

A value that is neither needed nor stored cannot be read. What could make a stored value a wrong one is looked at in
each call: the front's weights, buffers, flags and modes, the shapes that its modules are called on, and how often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ...model.called_inputs import version_of
from ...model.left_as_found import left_as_found
from ...model.method_override import MethodOverride
from ...model.micro_batch import Batch
from ...model.origins import NOT_OF_STATES
from ...pipeline.devices import synchronise
from ...randomness import generators_kept, global_state_kept, set_torch_states, torch_states
from ..prefix_cache.cache.cache_counts import CacheCounts
from ..prefix_cache.cache.comparing import TOLERANCES, relative_difference, rounding_of
from ..prefix_cache.cache.guards import unnoticed
from .calls import Call, Known, KnownBatch, ReturnedLeaf, ReturnedObject, returned
from .entries import FrontEntries, Leaf
from .finding import (
    FoundFront,
    Ran,
    arguments_of,
    other_randomness,
    rows_of,
    tensors_in,
    users_hooks_at_rest,
    versions_of,
)
from .rows import CAUSAL, DIGEST_BYTES, NO_MASK, ArgumentDigests, PaddingValues, keys_of, leaves_of, tokens_of
from .trial import FrontTrial, cleared, is_wide, noisy, rows_in

NOT_KEPT = "is not kept, as nothing had read it when the frozen modules were looked for"
ITEMS = "num_items_in_batch"
VERIFYING = 0.03
"""Share of the time that comparing stored outputs with computed ones may take."""
LEAST_BETWEEN, MOST_BETWEEN = 16, 256
"""Number of calls that are read between two comparisons: at least, and where times may not decide."""


def _masks_in(digests: torch.Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in digests[:, DIGEST_BYTES // 2 :]]


def _differ(one: Any, other: Any) -> bool:
    return not torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one != other)


EITHER = {NO_MASK, CAUSAL}


class OtherCallsError(Exception):
    """The front is called in another way than before, so what is stored is of no use in this call."""


class _NewCallError(Exception):
    """A module of the front is called on something else than when what is stored was computed."""


class _AllRanError(Exception):
    """Ends a forward pass of which only the front is wanted."""


class FrozenFront:
    """The front of a model, from the call after the one in which it was found until `close`.

    Args:
        model: the model.
        found: its front.
        entries: what is stored.
        device: where the model computes.
        storage_dtype: data type in which fractions are stored; None stores them as they are computed.
        is_timed: whether measurements may decide when stored outputs are compared with computed ones.
    """

    def __init__(
        self,
        model: nn.Module,
        found: FoundFront,
        entries: FrontEntries,
        device: torch.device,
        storage_dtype: torch.dtype | None = None,
        is_timed: bool = True,
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
        self._verified = 0.0, 0.0, 0
        """When that was, what computing took, and how many calls had been read."""
        self._looks_for_draws = False  # in each module, as random numbers are drawn somewhere in the model
        self.num_missed = self.num_found = self.num_read = 0
        """Number of calls of which nothing was found, of the others, and of those of these that were read."""
        self._model, self._entries, self._device, self._storage_dtype = model, entries, device, storage_dtype
        self.trial = FrontTrial(found, self._tried)
        """What trials have shown of it."""
        self._known: dict[Any, dict[str, Known]] = {}
        self._around: str | None = None  # what it is called on besides tensors, on which names, autocast, and adapters
        self._padding = PaddingValues()
        self._implies_causal = False  # the modules do without a mask what they do with a causal one
        self._with_adapters = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
        self._call: Call | None = None
        self._stored, self._is_timed = found.stored, is_timed
        self._overrides: list[MethodOverride] = []
        self.open()

    def open(self) -> None:
        """Look at the calls of the modules, until `close`."""
        for name in self.found.needed if not self._overrides else ():
            module = self._model.get_submodule(name)
            self._overrides.append(MethodOverride(module, "forward", partial(self._forward, name, module.forward)))

    def close(self) -> None:
        """Let the modules run as they are."""
        for override in self._overrides:
            override.remove()
        self._overrides = []

    # ------------------------------------------------------------------------------------ calls of the model
    def run(self, inputs: Batch, forward: Callable[[], Any], reads: bool, writes: bool) -> Any:
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
        if self.trial.is_noisy:
            self._call = Call(batch)
            try:
                return forward()
            finally:
                self._call = None
        # with a loss that may read padding, what is read must not have another
        may_read = not self.trial.awaits_loss or batch.tokens is None or not batch.tokens.has_padding
        found = self._read(batch) if reads and may_read else None
        hits = 0 if found is None else batch.rows - len(found.missing)
        self.counts += CacheCounts(batch.rows, hits)
        self.num_missed += reads and found is None
        self.num_found += found is not None
        if found is not None and self.is_verified and self._must_verify_again():
            self.is_verified = False
        if found is not None and self.is_verified:
            before = torch_states()
            self._call = found
            try:
                output = forward()
                self.num_read += 1
                self.counts.layers_skipped += hits  # of one layer, which the front counts as
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
        self._call = call = Call(batch)
        began, states = time.perf_counter(), other_randomness()
        try:
            output = forward()
        finally:
            self._call = None
        synchronise(self._device)
        seconds = time.perf_counter() - began
        if states != other_randomness() and not self._looks_for_draws:
            self._looks_for_draws = True  # from the next call on; of this one, nothing is stored
            return output
        of_now = {name: versions_of([*given, *leaves]) for name, (given, _, leaves, _) in call.ran.items()}
        if of_now != call.versions:
            self.trouble = "the model writes into it"
        elif found is None:
            self.learn(inputs, call.ran, call.seconds, seconds, writes)
        else:
            self._compare(call, found)
            self.is_verified = True
            self._verified = time.perf_counter(), seconds, self.num_read
            if found.missing and writes and self.trouble is None:
                self._write(Call(batch, found.known, ran=call.ran))
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
        if batch is None or ran.keys() != self.found.needed.keys():
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
            self._write(Call(batch, known, ran=dict(ran)))

    def _tried(self, forward: Callable[[], Any]) -> dict[str, Ran]:
        """What the modules have returned in a call that leaves the model as it was, and ends when all have run."""
        self._call = call = Call(ends=True)
        try:
            kept = left_as_found(self._model), global_state_kept(), generators_kept(self._model)
            with torch.no_grad(), users_hooks_at_rest(self._model), kept[0], kept[1], kept[2]:
                forward()
        except _AllRanError:
            pass
        except Exception:  # samples have different numbers of images, perhaps
            return {}
        finally:
            self._call = None
        return call.ran

    # ------------------------------------------------------------------------------------ inside
    def _compare(self, call: Call, found: Call) -> None:
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
            if self.trial.wide.get((name, position)) and tokens is not None and not self.trial.keeps_padding:
                pair = [cleared(tensor, tokens.lengths) for tensor in pair]
            computed, expected = (tensor.unflatten(0, (rows, -1))[there] for tensor in pair)
            rounding = max(rounding_of(expected), TOLERANCES.get(self._storage_dtype or expected.dtype, 0.0))
            if relative_difference([computed], [expected]) > rounding:
                self.trouble = f"{name} is called on something else than before"
                return
        digests = self._digests_of(call.batch, call.ran)
        for name, (_, others, *_) in call.ran.items():
            found.known[name].others.add(others)
            pairs = zip(*(_masks_in(of[name][there.cpu()]) for of in (digests, found.digests)), strict=True)
            self._implies_causal |= any(set(pair) == EITHER for pair in pairs)

    def _generators(self) -> list[Any]:
        """States of the generators from which a module may draw."""
        return [*torch_states(), *(other_randomness() if self._looks_for_draws else ())]

    def _must_verify_again(self) -> bool:
        """Whether stored outputs are compared with computed ones once more: something unseen may have changed.

        That takes at most `VERIFYING` of the time. Where runs must repeat bit by bit, it takes place at fixed times.
        """
        at, seconds, num_read = self._verified
        if self._is_timed:
            is_due = seconds < VERIFYING * (time.perf_counter() - at)
            return is_due and self.num_read - num_read >= LEAST_BETWEEN
        return self.num_read - num_read >= MOST_BETWEEN

    def _described(self, inputs: Batch) -> KnownBatch | None:
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
        tokens = tokens_of(inputs) if self.trial.cuts_padding else None  # otherwise padding is stored
        reads = self.found.reads
        rows = rows_of(reads, inputs) if reads <= inputs.keys() else None
        if not rows or (tokens is not None and rows != len(tokens.lengths)):
            return None
        if tokens is not None and self.trial.keeps_padding and not self._padding.is_same(inputs, reads, tokens):
            return None
        keys = keys_of({name: inputs[name] for name in reads}, rows, tokens, f"{plain} {tokens is not None}")
        if keys is None:
            return None
        leaves = [leaf for name in sorted(reads) for leaf in leaves_of(inputs[name], name)]
        given = [(n, t, is_wide(n, t, tokens)) for n, t in leaves if isinstance(t, torch.Tensor)]
        shapes = [(n, t.dtype, wide, tuple(t.shape[2 if wide else 1 :])) for n, t, wide in given]
        covered = {
            id(leaf): (number, version_of(leaf))
            for number, (name, leaf) in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and name not in NOT_OF_STATES
        }
        return KnownBatch(keys, tokens, (repr(shapes), rows == 1), covered)

    def _known_by(self, batch: KnownBatch, ran: Mapping[str, Ran]) -> dict[str, Known]:
        wide = {} if batch.tokens is None else self.trial.wide
        known = {}
        for name, (_, others, leaves, structure) in ran.items():
            of_leaves = (returned(leaf, batch.rows, wide.get((name, k), ())) for k, leaf in enumerate(leaves))
            known[name] = Known({others}, tuple(of_leaves), structure)
        return known

    def _layout(self, known: Mapping[str, Known]) -> list[Leaf]:
        rows = [known[name].leaves[position].row for name, position in self._stored]
        digests = Leaf(torch.uint8, (1, DIGEST_BYTES * len(self.found.needed)))
        return [*(Leaf(self._stored_as(row.dtype), row.shape) for row in rows), digests]

    def _stored_as(self, dtype: torch.dtype) -> torch.dtype:
        return self._storage_dtype if self._storage_dtype is not None and dtype.is_floating_point else dtype

    def _read(self, batch: KnownBatch) -> Call | None:
        """What is stored of a batch, as the call in which it is given back; None if it is nothing."""
        known = self._known.get(batch.signature)
        if known is None:
            return None
        began = time.perf_counter()
        missing, tensors = self._entries.read(
            batch.keys, self._layout(known), batch.tokens, self._device, self.trial.keeps_padding
        )
        if not tensors:
            return None
        *leaves, digests = tensors
        given_back = {
            (name, position): leaf.to(known[name].leaves[position].row.dtype)
            for (name, position), leaf in zip(self._stored, leaves, strict=True)
        }
        by_module = dict(zip(self.found.needed, digests.cpu().split(DIGEST_BYTES, dim=1), strict=True))
        self.counts.load_seconds += time.perf_counter() - began
        return Call(batch, known, given_back, by_module, missing)

    def _digests_of(self, batch: KnownBatch, ran: Mapping[str, Ran]) -> dict[str, torch.Tensor]:
        """Of what the modules were called on, beside one another's outputs."""
        of_front = {id(leaf) for *_, leaves, _ in ran.values() for leaf in leaves}
        made = ArgumentDigests(batch.rows, batch.tokens, batch.covered)
        return {name: made.of(ran[name][0], of_front, self.trial.has_rows.get(name, ())) for name in self.found.needed}

    def _are_equal(self, digests: torch.Tensor, stored: torch.Tensor) -> bool:
        """Whether a module is called on what it was called on, apart from masks that are known to change nothing."""
        if torch.equal(digests, stored):
            return True
        half = DIGEST_BYTES // 2
        pairs = zip(_masks_in(digests), _masks_in(stored), strict=True)
        are_masks = all(one == other or (self._implies_causal and {one, other} == EITHER) for one, other in pairs)
        return are_masks and torch.equal(digests[:, :half], stored[:, :half])

    def _write(self, call: Call) -> None:
        """Store what the modules have returned in a call; of one in which something was given back, the rest."""
        batch = call.batch
        assert batch is not None
        digests = self._digests_of(batch, call.ran)
        leaves = [call.ran[name][2][position].detach() for name, position in self._stored]
        tensors = [*(leaf.to(self._stored_as(leaf.dtype)) for leaf in leaves), torch.cat(list(digests.values()), 1)]
        keys, lengths = list(batch.keys), None if batch.tokens is None else list(batch.tokens.lengths)
        if self.trial.keeps_padding and batch.tokens is not None:
            lengths = [batch.width] * batch.rows
        if call.missing:
            tensors = [rows_in(tensor, batch.rows, call.missing) for tensor in tensors]
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
        began, states = time.perf_counter(), self._generators()
        with unnoticed():
            output = forward(*args, **kwargs)
        synchronise(self._device)
        call.seconds += time.perf_counter() - began
        if any(map(_differ, states, self._generators())):
            self.trouble = f"{name} draws random numbers"
        # the leaves, as the model may write into a container afterwards
        leaves, structure = tree_flatten(output)
        given, others = arguments_of(args, kwargs)
        if self.trial.is_noisy and call.batch is not None and call.batch.tokens is not None:
            lengths, wide = call.batch.tokens.lengths, self.trial.wide
            self.trial.has_made_noise |= call.batch.tokens.has_padding
            changed = [noisy(leaf, lengths) if wide.get((name, k)) else leaf for k, leaf in enumerate(leaves)]
            return tree_unflatten(changed, structure)
        call.ran[name] = given, others, leaves, structure
        call.versions[name] = versions_of([*given, *leaves])
        if call.ends and call.ran.keys() == self.found.needed.keys():
            raise _AllRanError
        return output

    def _given_back(
        self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
    ) -> Any:
        """What a module would return: what is stored, and what it returns for the samples of which nothing is."""
        assert call.batch is not None and call.given_back is not None
        known, batch = call.known[name], call.batch
        given, others = arguments_of(args, kwargs)
        if any(tensor.requires_grad for tensor in given):
            raise OtherCallsError(f"{name} is called on something that is trained")
        of_front = {id(leaf) for *_, earlier, _ in call.ran.values() for leaf in earlier}
        call.made = call.made or ArgumentDigests(batch.rows, batch.tokens, batch.covered)
        digests = call.made.of(given, of_front, self.trial.has_rows.get(name, ()))
        digests[call.missing] = call.digests[name][call.missing]
        if others not in known.others or not self._are_equal(digests, call.digests[name]):
            raise _NewCallError
        computed = self._of_missing(name, forward, args, kwargs, call) if call.missing else []
        leaves = []
        for position, leaf in enumerate(known.leaves):
            value = call.given_back.get((name, position), leaf)
            if isinstance(value, (ReturnedLeaf, ReturnedObject)):
                value = value.hidden(batch.rows, batch.width, f"the output of {name} {NOT_KEPT}")
            elif computed and isinstance(leaf, ReturnedLeaf):
                into = value.unflatten(0, (batch.rows, -1))
                into[call.missing] = computed[position].unflatten(0, (len(call.missing), -1)).to(into.dtype)
            if computed and isinstance(leaf, ReturnedLeaf):
                call.computed[id(value)] = computed[position]
            leaves.append(value)
        call.ran[name] = given, others, leaves, known.structure
        return tree_unflatten(leaves, known.structure)

    def _of_missing(
        self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: Call
    ) -> list[Any]:
        """The leaves of what a module returns for the samples of which nothing is stored."""
        assert call.batch is not None
        given, has_rows = arguments_of(args, kwargs)[0], self.trial.has_rows.get(name, ())
        if len(given) != len(has_rows):
            raise _NewCallError
        rows, of_rows = call.batch.rows, {id(tensor) for tensor, has in zip(given, has_rows, strict=True) if has}

        def chosen(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in call.computed:
                return call.computed[id(tensor)]
            return rows_in(tensor, rows, call.missing) if id(tensor) in of_rows else tensor

        args, kwargs = tree_map_only(torch.Tensor, chosen, (args, kwargs))
        try:
            with torch.no_grad(), unnoticed():
                leaves, structure = tree_flatten(forward(*args, **kwargs))
        except Exception as error:  # it does not run on a part of the samples
            raise _NewCallError from error
        known = call.known[name]
        if structure != known.structure:
            raise _NewCallError
        for leaf, found in zip(known.leaves, leaves, strict=True):
            if isinstance(leaf, ReturnedLeaf) and leaf.is_of_rows:
                first, *rest = leaf.row.sized(call.batch.width)
                if not isinstance(found, torch.Tensor) or found.shape != (first * len(call.missing), *rest):
                    raise _NewCallError  # it depends on the other samples
        return leaves
