"""Computes the frozen front of a model once for each sample: stores its outputs, and returns them in later calls.

    in a call of the model     none of its samples is in the store      some or all samples are in the store
    a module of the front      runs; the needed leaves of its output    runs on the missing samples only; returns the
                               are stored when the call has ended       stored values, in the same containers

A value that is neither needed nor stored cannot be read. Each call checks for changes that invalidate stored values:
in the front's weights, buffers, flags and modes, in its modules' input shapes, and in the number of their calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...model.left_as_found import left_as_found
from ...model.method_override import MethodOverride, original_method
from ...model.micro_batch import Batch
from ...model.nested import in_new_tensors
from ...model.plain_runs import runs_plainly
from ...pipeline.devices import synchronise
from ...randomness import generators_kept, global_state_kept, other_randomness, set_torch_states, torch_states
from ..prefix_cache.cache.cache_counts import CacheCounts
from ..prefix_cache.cache.comparing import TOLERANCES, relative_difference, rounding_of
from ..prefix_cache.cache.guards import unnoticed
from ..prefix_cache.cache.known_code import UsersHooks, foreign_code
from .calls import (
    AllRanError,
    FrontCall,
    Known,
    KnownBatch,
    LateOutput,
    NewCallError,
    OtherCallsError,
    ReturnedLeaf,
    ReturnedObject,
    Same,
    of_missing,
    returned_by,
)
from .described import InputDescriber
from .divided import rows_of
from .entries import FrontEntries, Leaf
from .finding import FoundFront, RecordedCall, arguments_of, users_hooks_at_rest, versions_of
from .rows import (
    DIGEST_BYTES,
    EITHER,
    ArgumentDigests,
    Divided,
    are_equal,
    differ,
    masks_in,
    with_more_columns,
)
from .trial import FrontTrial, cleared, settings_around, some_rows

NOT_KEPT = "is not kept, as it was not read when the frozen modules were looked for"
MORE = "something reads more of it than before"
VERIFYING = 0.03
"""Upper bound for the share of the time spent on comparing stored outputs with computed ones."""
LEAST_BETWEEN, MOST_BETWEEN = 16, 256
"""Number of calls read between two comparisons: the minimum, and the number used if times may not decide."""
WIDER = 2
"""Maximum ratio of the width at which a sample is computed to its batch's width. Wider batches can read it later."""
TRIES_TO_WIDEN = 3
"""Number of failed attempts to compute or read samples with more padding, after which the front stops trying."""


class FrozenFront:
    """The front of a model, from the call after its discovery until `close`.

    Args:
        model: the model.
        found: its front.
        entries: the stored outputs.
        device: device of the model.
        storage_dtype: dtype of stored floating-point outputs; None keeps the computed dtype.
        is_timed: whether measurements may decide when stored outputs are compared with computed ones.
        what_changed: as `WatchedWeights.what_changed`; asked at the first module, as the forward around may change it.
    """

    def __init__(
        self,
        model: nn.Module,
        found: FoundFront,
        entries: FrontEntries,
        device: torch.device,
        storage_dtype: torch.dtype | None = None,
        is_timed: bool = True,
        what_changed: Callable[..., str | None] = lambda **_: None,
    ) -> None:
        self.found = found
        self.seconds_per_row = self.share = 0.0
        """Seconds of the front's modules for one row, and their share of the forward pass, in the last timed call."""
        self.counts = CacheCounts()
        """Counts over the samples of all calls since they were last taken."""
        self.trouble: str | None = None
        """Why the stored outputs can no longer be used."""
        self.is_verified = False
        """Whether the stored outputs of one call were compared with computed ones: once in each epoch."""
        self._verified = 0.0, 0.0, 0
        """Time of that comparison, seconds that computing took, and number of calls read until then."""
        self._looks_for_draws = False  # in each module, because some module of the model draws random numbers
        self.num_missed = self.num_found = self.num_read = self.num_unmatched = 0
        """Number of calls without a stored sample, with one, read, and (in a row) stored for other arguments only."""
        self._model, self._entries, self._device, self._storage_dtype = model, entries, device, storage_dtype
        self.trial = FrontTrial(found, self._tried, UsersHooks(model), lambda: settings_around(model, found.needed))
        """Results of the front's trials."""
        self._known: dict[Any, dict[str, Known]] = {}
        self.inputs = InputDescriber(model, found.reads, device, self.trial)
        """Describes the inputs of calls."""
        self._widest, self._tries_to_widen = 0, TRIES_TO_WIDEN  # columns of the widest batch; attempts left
        self._implies_causal = False  # without a mask, the modules compute the same as with a causal mask
        self._call: FrontCall | None = None
        self._stored, self._is_timed, self._what_changed = found.stored, is_timed, what_changed
        self._overrides: list[MethodOverride] = []
        self.open()

    def open(self) -> None:
        """Intercept the calls of the front's modules until `close`."""
        for name in self.found.needed if not self._overrides else ():
            module = self._model.get_submodule(name)
            run = partial(self._forward, name, original_method(module))
            self._overrides.append(MethodOverride(module, "forward", run))

    def close(self) -> None:
        """Restore the modules' own forward."""
        for override in self._overrides:
            override.remove()
        self._overrides = []

    def needs(self, inputs: Batch) -> bool:
        """Whether a call has several rows, but the front was tried on a single row."""
        reads = self.found.reads
        rows = rows_of(reads, inputs) if self.trial.is_of_one and reads <= inputs.keys() else None
        return rows is not None and rows.count > 1

    # ------------------------------------------------------------------------------------ calls of the model
    def run(
        self,
        inputs: Batch,
        forward: Callable[[], Any],
        reads: bool,
        writes: bool,
        run_on: Callable[[Batch], Any] | None = None,
    ) -> Any:
        """Run a call of the model. The front is computed, or its stored outputs are returned.

        Args:
            inputs: the model's arguments, by name.
            forward: runs the model's forward.
            reads: whether stored outputs may be returned.
            writes: whether missing outputs are stored.
            run_on: runs the front on a batch; None if outputs must keep this batch's padding.

        Raises:
            OtherCallsError: more of an output is read than before; the call must be repeated without stored outputs.
        """
        batch = self.inputs.described(inputs)
        if batch is None:
            return forward()
        if self.trial.is_noisy:
            self._call = FrontCall(batch)
            try:
                return forward()
            finally:
                self._call = None
        # something may read padding, and stored outputs may have other padding
        may_read = not batch.entries.has_padding or not self.trial.may_show_padding
        found = self._read(batch) if reads and may_read else None
        hits = 0 if found is None else batch.rows.count - len(found.missing)
        self.counts += CacheCounts(batch.rows.count, hits)
        self.num_missed += reads and found is None
        self.num_found += found is not None
        self._widest = max(self._widest, batch.entries.width)
        wider = self._computed_wider(inputs, batch, found, run_on) if writes and run_on is not None else None
        found = wider or found
        if found is not None and self.is_verified and self._must_verify_again():
            self.is_verified = False
        if found is not None and self.is_verified:
            before = torch_states()
            self._call = found
            try:
                output = forward()
            except ValueError as error:
                if NOT_KEPT not in str(error):
                    raise
                set_torch_states(before)
                raise OtherCallsError(MORE) from error
            finally:
                self._call = None
            if found.is_apart:
                self.num_unmatched += 1
                return output
            if not found.is_other:
                self.num_read, self.num_unmatched = self.num_read + (hits > 0), 0
                self.counts.layers_skipped += hits  # of one layer, which the front counts as
                if found.missing and writes:
                    self._write(found)
            elif self.trouble is None:  # e.g. no mask for a batch without padding: the outputs may still be valid
                self._tries_to_widen -= wider is not None
                self.num_unmatched += not found.missing  # a module may not run on missing samples alone
                self._compare(found, found)
            return output
        self._call = call = FrontCall(batch)
        began, states = time.perf_counter(), other_randomness()
        try:
            output = forward()
        finally:
            self._call = None
        synchronise(self._device)
        seconds = time.perf_counter() - began
        if call.is_apart:
            return output
        if states != other_randomness() and not self._looks_for_draws:
            self._looks_for_draws = True  # from the next call on; this call stores no outputs
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
                self._write(FrontCall(batch, found.known, ran=call.ran))
        return output

    def learn(
        self, inputs: Batch, ran: Mapping[str, RecordedCall], seconds: float, of_call: float, writes: bool
    ) -> None:
        """Record the outputs of the front's modules in a call of the model.

        Args:
            inputs: the model's arguments.
            ran: inputs and outputs of each module.
            seconds: duration of the modules' calls.
            of_call: duration of the model's call.
            writes: whether to store the outputs.
        """
        batch = self.inputs.described(inputs)
        if batch is None or ran.keys() != self.found.needed.keys():
            return
        self.seconds_per_row, self.share = seconds / batch.rows.count, seconds / of_call
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
            self._write(FrontCall(batch, known, ran=dict(ran)))

    def _computed_wider(
        self, inputs: Batch, batch: KnownBatch, found: FrontCall | None, run_on: Callable[[Batch], Any]
    ) -> FrontCall | None:
        """Compute missing samples at the width of the widest batch so far, store and read them, if padding is stored.

        Another epoch has them in other batches. The values of padding do not depend on the columns behind it.
        """
        missing = list(range(batch.rows.count)) if found is None else found.missing
        columns = min(self._widest, WIDER * batch.entries.width) - batch.entries.width
        may_be = self.trial.keeps_padding and batch.signature in self._known and self._tries_to_widen > 0
        if not may_be or not missing or columns <= 0 or not self.inputs.knows_padding(inputs, batch.entries):
            return None
        some = in_new_tensors(some_rows(inputs, inputs, batch.rows, missing))
        wide = with_more_columns(some, columns, self.inputs.padding.known)
        described = self.inputs.described(wide)
        ran = {} if described is None else self._tried(run_on, wide)
        if described is None or ran.keys() != self.found.needed.keys():
            self._tries_to_widen -= 1
            return None
        self._write(FrontCall(described, self._known_by(described, ran), ran=ran))
        seconds = self.counts.load_seconds
        found = self._read(batch)
        self.counts.load_seconds = seconds  # these seconds count only in an epoch that reads
        return found

    def _tried(self, forward: Callable[[Batch], Any], batch: Batch) -> dict[str, RecordedCall]:
        """Return the modules' outputs on a batch of the trial's own. The call ends when all have run.

        Restores the model's state.
        """
        self._call = call = FrontCall(ends=True)
        try:
            state, generators = global_state_kept(), generators_kept(self._model)
            with torch.no_grad(), users_hooks_at_rest(self._model), left_as_found(self._model), state, generators:
                forward(batch)
        except AllRanError:
            pass
        except Exception:  # samples have different numbers of images, perhaps
            return {}
        finally:
            self._call = None
        return call.ran

    # ------------------------------------------------------------------------------------ inside
    def _compare(self, call: FrontCall, found: FrontCall) -> None:
        """Compare the modules' outputs in a new kind of call with the samples' stored outputs."""
        assert call.batch is not None and found.given_back is not None
        for (name, position), stored in found.given_back.items():
            if name not in call.ran:
                self.trouble = f"{name} is not called in each forward pass"
                return
            rows, (*_, leaves, structure) = call.batch.rows, call.ran[name]
            there = sorted(set(range(rows.count)) - set(found.missing))
            if structure != found.known[name].structure or leaves[position].shape != stored.shape:
                self.trouble = f"{name} returns something else than before"
                return
            pair, entries = [leaves[position].detach(), stored], call.batch.entries
            if self.trial.wide.get((name, position)) and entries.width and not self.trial.keeps_padding:
                pair = [cleared(tensor, entries.lengths) for tensor in pair]
            computed, expected = (rows.some(tensor, there) for tensor in pair)
            rounding = max(rounding_of(expected), TOLERANCES.get(self._storage_dtype or expected.dtype, 0.0))
            if relative_difference([computed], [expected]) > rounding:
                self.trouble = f"{name} is called on something else than before"
                return
        digests = self._digests_of(call.batch, call.ran)
        for name, (_, others, *_) in call.ran.items():
            found.known[name].others.add(others)
            masks = (masks_in(of[name][there]) for of in (digests, found.digests))
            is_new = EITHER in map(set, zip(*masks, strict=True))
            self._implies_causal |= is_new and not foreign_code(self._model.get_submodule(name))

    def _generators(self) -> list[Any]:
        """States of the generators that a module may draw from."""
        return [*torch_states(), *(other_randomness() if self._looks_for_draws else ())]

    def _must_verify_again(self) -> bool:
        """Whether to compare stored outputs with computed ones again, because something unseen may have changed.

        This takes at most `VERIFYING` of the time. Where runs must repeat bit by bit, it happens at fixed calls.
        """
        at, seconds, num_read = self._verified
        if self._is_timed:
            is_due = seconds < VERIFYING * (time.perf_counter() - at)
            return is_due and self.num_read - num_read >= LEAST_BETWEEN
        return self.num_read - num_read >= MOST_BETWEEN

    def _known_by(self, batch: KnownBatch, ran: Mapping[str, RecordedCall]) -> dict[str, Known]:
        wide = self.trial.wide if batch.entries.width else {}
        return {name: Known.of(recorded, name, batch.rows, wide) for name, recorded in ran.items()}

    def _layout(self, known: Mapping[str, Known]) -> list[Leaf]:
        rows = [known[name].leaves[position].row for name, position in self._stored]
        digests = Leaf(torch.uint8, (1, DIGEST_BYTES * len(self.found.needed)))
        return [*(replace(row, dtype=self._stored_as(row.dtype)) for row in rows), digests]

    def _stored_as(self, dtype: torch.dtype) -> torch.dtype:
        return self._storage_dtype if self._storage_dtype is not None and dtype.is_floating_point else dtype

    def _read(self, batch: KnownBatch) -> FrontCall | None:
        """Return the call that returns the batch's stored outputs; None if none are stored."""
        known = self._known.get(batch.signature)
        if known is None:
            return None
        began = time.perf_counter()
        missing, tensors = self._entries.read(
            batch.entries, batch.rows, self._layout(known), self._device, self.trial.keeps_padding
        )
        if not tensors:
            return None
        *leaves, digests = tensors
        given_back = {
            (name, position): known[name].leaves[position].as_returned(leaf)
            for (name, position), leaf in zip(self._stored, leaves, strict=True)
        }
        by_module = dict(zip(self.found.needed, digests.cpu().split(DIGEST_BYTES, dim=1), strict=True))
        self.counts.load_seconds += time.perf_counter() - began
        return FrontCall(batch, known, given_back, by_module, missing)

    def _digests_of(self, batch: KnownBatch, ran: Mapping[str, RecordedCall]) -> dict[str, torch.Tensor]:
        """Digests of the modules' arguments, without the outputs of other modules of the front."""
        of_front = dict(pair for recorded in ran.values() for pair in returned_by(recorded).items())
        made, known = ArgumentDigests(batch.rows, batch.entries, batch.covered), self.trial.arguments
        return {n: made.of(ran[n][0], ran[n][1].plain, of_front, known.get(n, Divided())) for n in self.found.needed}

    def _write(self, call: FrontCall) -> None:
        """Store the modules' outputs in a call. If stored samples were read in it, store only the missing ones."""
        batch = call.batch
        assert batch is not None
        digests = torch.cat(list(self._digests_of(batch, call.ran).values()), 1)
        leaves = [call.ran[name][2][position] for name, position in self._stored]
        entries, rows = batch.entries, batch.rows
        if call.missing:  # as they were computed: the model may have written into what it was given
            leaves, digests = [call.computed[id(leaf)] for leaf in leaves], rows.some(digests, call.missing)
            entries, rows = entries.chosen(call.missing), rows.chosen(call.missing)
        tensors = [*(leaf.detach().to(self._stored_as(leaf.dtype)) for leaf in leaves), digests]
        layout = self._layout(call.known)
        self.counts.stored += self._entries.write(entries, rows, tensors, layout, self.trial.keeps_padding)

    def _forward(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = self._call
        if call is None or not call.is_here:
            return forward(*args, **kwargs)
        call.is_apart |= not runs_plainly()
        if not call.ran and not call.is_apart:
            call.is_apart = not self.inputs.is_called_as_before()
            if not call.ends and not self.trial.is_noisy and (why := self._what_changed(values=False)) is not None:
                call.is_apart, self.trouble = True, why
                module = self._model.get_submodule(name)
                is_wrapped = vars(module).get("forward") not in self._overrides  # by a forward that calls this one
                self.close()
                return (forward if is_wrapped else module.forward)(*args, **kwargs)  # its class may have another one
        if call.is_apart:
            return forward(*args, **kwargs)
        if name in call.ran:
            self.trouble = f"{name} is called several times in a forward pass"
            return forward(*args, **kwargs)
        if call.given_back is not None and not call.is_other:
            try:
                return self._given_back(name, forward, args, kwargs, call)
            except NewCallError as error:  # this module runs, and those that may be given its output
                call.is_other, self.trouble = True, str(error) or self.trouble
        synchronise(self._device)
        began, states = time.perf_counter(), self._generators()
        with unnoticed():
            output = forward(*args, **kwargs)
        synchronise(self._device)
        call.seconds += time.perf_counter() - began
        if any(map(differ, states, self._generators())):
            self.trouble = f"{name} draws random numbers"
        # the leaves, as the model may write into a container afterwards
        leaves, structure = tree_flatten(output)
        given, others = arguments_of(args, kwargs)
        self.trouble = others.why_not or self.trouble
        if self.trial.is_noisy and call.batch is not None and call.batch.entries.width:
            return tree_unflatten(self.trial.with_noise(name, leaves, call.batch.entries), structure)
        call.note(name, (given, others, leaves, structure))
        call.versions[name] = versions_of([*given, *leaves])
        if call.ends and call.ran.keys() == self.found.needed.keys():
            raise AllRanError
        return output

    def _given_back(
        self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], call: FrontCall
    ) -> Any:
        """Return a module's output: stored values, and computed ones for the missing samples."""
        assert call.batch is not None and call.given_back is not None
        known, batch = call.known[name], call.batch
        given, others = arguments_of(args, kwargs)
        known.refuse(name, given, others)
        call.made = call.made or ArgumentDigests(batch.rows, batch.entries, batch.covered)
        divided = self.trial.arguments.get(name, Divided())
        digests = call.made.of(given, others.plain, call.returned, divided)
        digests[call.missing] = call.digests[name][call.missing]
        if others not in known.others or not are_equal(digests, call.digests[name], self._implies_causal):
            raise NewCallError
        module, parts = self._model.get_submodule(name), divided.rows
        computed = of_missing(module, forward, args, kwargs, call, known, parts) if call.missing else []
        returned = [call.given_back.get((name, position), leaf) for position, leaf in enumerate(known.leaves)]
        is_kept = not any(isinstance(value, ReturnedLeaf) for value in returned)
        late = None if is_kept else LateOutput(forward, args, kwargs, self._device.type, call)

        def whole(position: int) -> torch.Tensor | None:
            """A leaf that is not kept, and is read now; None if the module may now return something else."""
            assert late is not None
            with late.as_called():
                if not self.inputs.is_called_as_before() or self._what_changed() is not None:
                    return None
                value = late.leaf(position)
            if value is not None:  # the model may write into it: the modules that follow run
                self.trouble, call.is_other = MORE, True
            return known.leaves[position].connected(value) if isinstance(value, torch.Tensor) else None

        leaves: list[Any] = []
        for position, (leaf, value) in enumerate(zip(known.leaves, returned, strict=True)):
            if isinstance(leaf, Same):
                leaves.append(leaves[leaf.first])
                continue
            if isinstance(value, (ReturnedLeaf, ReturnedObject)):
                text, later = f"the output of {name} {NOT_KEPT}", partial(whole, position)
                value = value.hidden(batch.rows, batch.entries.width, text, later)
            elif isinstance(leaf, ReturnedLeaf):
                if computed:
                    batch.rows.put(value, call.missing, computed[position])
                value = leaf.connected(value)
            if computed and isinstance(leaf, ReturnedLeaf):
                call.computed[id(value)] = computed[position]
            leaves.append(value)
        call.note(name, (given, others, leaves, known.structure))
        return tree_unflatten(leaves, known.structure)
