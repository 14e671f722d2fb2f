"""AutoCache in one process: read frozen layers' outputs from the store; compute and store the missing ones.

    samples of a micro-batch     a    b    c    d           f = 4 layers are frozen, 2 in an earlier epoch
    in the store                 4    2    -    4           begin() looks for 4, then for 2
    run                         2-4  0-4                    c from the first unit, b from the third, without a graph
    continue together from 4     a    b    c    d
    put                               b    c

If all samples are found at the same boundary, no layer runs twice: the stage's own pass starts at that boundary, and
its state at the last frozen layer is put into the store.

On the last stage (with K = 1, the only one), a user's `compute_loss` calls the model. It may call the model on other
inputs than the looked-up ones: for example on mixed samples, in training only, in some of the steps. On any stage, a
user's forward pre-hook may change the inputs. Therefore the cache first waits until the model's own `forward` is about
to run on exactly the looked-up inputs. Only then does it store states and, on the last stage, use states from the
store.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ....logs import log_once
from ....model.called_inputs import LABELS_AND_DECODER, BatchTags, RecordedInputs, added_settings, named_inputs
from ....model.layer_range import Carry, Observer, Unit, tensors_of
from ....model.layer_stack import CarrySlot, LayerStack
from ....model.micro_batch import Batch, select_rows
from ....model.plain_runs import state_of_torch
from .batch_entries import BatchEntries
from .cache_counts import CacheCounts
from .content_keys import entries_of, padded_length, sequences_per_sample
from .file_store import FileStore, StoreFull
from .reading import Found, Generation, States, StoreReading, joined
from .side_stream import SideStream
from .writing import FULL, StoreWriting

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_MARKS = 600.0
"""Interval at which a training marks its generations as in use: other trainings do not evict marked ones."""

OTHER_SETTINGS = "autocast, or another setting of torch, differs from that of the first step"
"""Why a pass computes frozen layers."""
RECORDS = ("output_hidden_states", "output_attentions")
"""Arguments of a call that make a model return the outputs of each layer."""

SECONDS_MARKS_LAST = 2 * SECONDS_BETWEEN_MARKS


class ActivationCache:
    """Reads and writes the store from one process, for one model.

    Args:
        stack: the model's units.
        slots: boundary (a number of units) -> the output tensor to cache there. Only boundaries that may be cached.
        store: the store of this node.
        storage_dtype: data type of the stored states; None keeps the data type of the computation.
        device: device of this process.
        padded_left: whether samples with padding on the left may be cached, too.
        ignored: names of inputs that are not part of a key.
        keeps_padding: whether samples are stored with their padding. The padding is then part of their keys.
    """

    def __init__(
        self,
        stack: LayerStack,
        slots: Mapping[int, CarrySlot],
        store: FileStore,
        storage_dtype: torch.dtype | None,
        device: torch.device,
        padded_left: bool = False,
        ignored: Collection[str] = LABELS_AND_DECODER,
        keeps_padding: bool = False,
    ) -> None:
        self.keeps_padding = keeps_padding
        self.shows_padding = False
        """Whether outputs for padding differ from the model's, as entries have no padding."""
        self.counts = CacheCounts()
        """Counts of the training."""
        self.evaluated = CacheCounts()
        """Counts of the latest evaluation (`counting_evaluation`)."""
        self.met_other_inputs = False
        """Whether a training step called the model on other inputs than the looked-up ones."""
        self.is_same_function: Callable[[bool], bool] = lambda values: True
        """Whether the frozen layers are those of the stored outputs; with `values`, their weights count as well."""
        self._has_asked = self._met_other_function = False  # whether they were, since `take_met_other_function`
        self.settings: Mapping[str, Any] | None = None
        """Arguments that the loss adds to every batch without affecting frozen layers; None until the first call."""
        self.is_loss_of_user = True
        """Whether the loss is the user's: it may change the layers before it calls the model."""
        self.may_be_written = True
        """Whether the user's code may write to weights in or between steps: then their values are compared."""
        self._stack, self._slots, self._store = stack, slots, store
        self._reading = StoreReading(copies := SideStream(device))
        self._writing = StoreWriting(store, copies, time.time() - SECONDS_MARKS_LAST)
        self._padded_left, self._ignored = padded_left, frozenset(ignored)
        self._num_calls = 0  # calls of the model in the current pass of `watching_calls`
        self._has_adapters = any(hasattr(module, "adapter_layer_names") for module in stack.model.modules())
        # inputs of a looked-up call, and the function that begins the call at the boundary of their states
        self._awaited: tuple[RecordedInputs, Callable[[], None]] | None = None
        self._hook: RemovableHandle | None = None
        self._storage_dtype, self._device, self._writes = storage_dtype, device, False
        # in passes, and in calls of the whole model; states belong to the first ones
        self._settings_of_torch: dict[bool, list[str]] = {}

    # ------------------------------------------------------------------------------------ generations
    def advance(self, num_frozen: int, fingerprint: str, is_new: bool = False) -> None:
        """Make the outputs of the first `num_frozen` units the current generation. Older ones are still looked up.

        Args:
            num_frozen: number of units.
            fingerprint: fingerprint of their weights.
            is_new: whether the generation is still empty. It is then not read before `read_all`: otherwise a sample's
                second occurrence would be a hit or a miss depending on the speed of the writer.
        """
        self.flush()
        counts = self.counts  # no sample has been counted at the new boundary yet
        counts.older_hits, counts.hits = counts.found, 0
        counts.older_stored, counts.stored, counts.present = counts.older_stored + counts.stored, 0, 0
        if (num_frozen, fingerprint) not in self.generations:
            newest = Generation(num_frozen, fingerprint, self._store.reader(num_frozen, fingerprint))
            self._reading.use([newest, *self._reading.generations])
            if is_new:
                self._reading.unread.add((num_frozen, fingerprint))
        self._writing.close_generation()
        self.resume_writing()

    def read_all(self) -> None:
        """Read all generations from now on, including generations that were new in the last epoch."""
        self._reading.unread.clear()

    def forget(self, keep: int) -> list[tuple[int, str]]:
        """Keep only the newest `keep` generations. Return the others, which may be deleted."""
        if not keep:
            self.flush()
            self._writing.close_generation()
        older = self.generations[keep:]
        self._reading.use(self._reading.generations[:keep])
        return older

    @property
    def generations(self) -> list[tuple[int, str]]:
        """(number of units, fingerprint) of the generations to look up, newest first."""
        return [generation.name for generation in self._reading.generations]

    def write(self, writes: bool) -> None:
        """Set whether to store states from now on: only if a process will read them."""
        self._writes = writes

    # ------------------------------------------------------------------------------------ reading
    def time_reading(self) -> float | None:
        """Return the seconds per sample to read back the latest stored states; None if this process stored none."""
        self.flush()
        if self._writing.last is None:
            return None
        found = self._reading.find(self._writing.last, self._stack.num_units)
        here = found.states.get(self._reading.generations[0].num_frozen)
        return found.seconds / len(here[0]) if here else None

    def read_ahead(self, tags: BatchTags, stop: int) -> None:
        """Begin to read the samples of the next batch.

        Args:
            tags: the samples' keys, as tags, and their inputs.
            stop: the first unit that does not belong to this stage.
        """
        entries = BatchEntries.of_tags(tags.tensor, padded_length(tags.inputs.named, self._ignored))
        if entries is not None and not self._is_refused(entries):
            self._reading.read_ahead(entries, stop)

    def begin(
        self, batch: Batch, tags: torch.Tensor, start: int, carry: Carry | None, stop: int
    ) -> tuple[int, Carry | None]:
        """Look up the samples' states for a pass over the units [start, stop) that the caller starts.

        Args:
            batch: the model's inputs on its device, without tags.
            tags: the samples' keys, as tags.
            start: the first unit of this stage.
            carry: outputs of the earlier units; None if there are none.
            stop: the first unit that does not belong to this stage.

        Returns:
            The unit to continue with, and the outputs of the units before it. These are `start` and `carry` if no
            sample was found, or if the pass includes the head: the found states then wait for the model's call.
        """
        entries = BatchEntries.of_tags(tags, padded_length(batch, self._ignored))
        if entries is None:
            return start, carry
        includes_head = stop == self._stack.num_units
        # on an accelerator, asking for values waits for all that runs there: once a step, if no loss may change them
        is_asked_later = includes_head and self.is_loss_of_user
        is_same = is_asked_later or self._is_function_same(values=self.may_be_written and not self._has_asked)
        if not is_same or not (includes_head or self._is_computed_as_before(is_call=False)):
            return start, carry
        if includes_head and self._awaited is not None:  # the previous pass did not call the whole model
            self.met_other_inputs = True
        level, found = self._look_up(batch, entries, stop) if start == 0 else (0, None)
        begin = max(start, level)
        observer = self.observer(entries, begin, stop)
        if includes_head:
            self._await(batch, begin, found, observer)
            return start, carry
        if begin < stop:
            self._await(self._stack.runner.arguments(batch), begin, None, observer)
        return (level, found) if level else (start, carry)

    def _look_up(self, batch: Batch, entries: BatchEntries, stop: int) -> tuple[int, Carry | None]:
        """Find the samples' states at the highest boundary in the store, and compute the others up to that boundary.

        Returns that boundary and the outputs of the units before it; 0 and None if no sample was found.
        """
        size = sequences_per_sample(batch)
        read = self._find(entries, stop)
        found = _of_whole_samples(read.states, size)
        self._count(found, read.seconds)
        if not found:
            return 0, None
        level = max(found)
        if list(found) == [level] and len(found[level][0]) == len(entries.spans):
            return level, self._as_carry(level, found[level][1])
        missing = sorted(set(range(len(entries.spans))) - {row for rows, _ in found.values() for row in rows})
        states: list[tuple[list[int], torch.Tensor]] = [found.pop(level)]
        for start, rows, state in [*((f, *value) for f, value in found.items()), (0, missing, None)]:
            if rows:
                part = select_rows(batch, sorted({row // size for row in rows}))
                states.append((rows, self._run(start, level, state, part, entries.chosen(rows))))
        if self.met_other_inputs:  # in one of the passes above
            return 0, None
        place = {
            row: (state.to(states[0][1].dtype), index) for rows, state in states for index, row in enumerate(rows)
        }
        return level, self._as_carry(level, joined([place[row] for row in range(len(entries.spans))]))

    def _find(self, entries: BatchEntries, stop: int) -> Found:
        """Find samples in the store. Call `_count` with the used ones."""
        self.counts.rows += len(entries.spans)
        if self._is_refused(entries):
            return Found({})
        found = self._reading.find(entries, stop)
        self.counts.damaged += found.damaged
        return found

    def _count(self, used: States, seconds: float) -> None:
        self.counts.load_seconds += seconds if used else 0.0
        for num_frozen, (rows, _) in used.items():
            self.counts.layers_skipped += num_frozen * len(rows)
            if num_frozen == self._reading.generations[0].num_frozen:
                self.counts.hits += len(rows)
            else:
                self.counts.older_hits += len(rows)

    def _run(
        self, start: int, stop: int, state: torch.Tensor | None, batch: Batch, entries: BatchEntries
    ) -> torch.Tensor:
        """Compute a few samples from one boundary to another. Store them if the frozen layers end there."""
        carry = None if state is None else self._as_carry(start, state)
        runner = self._stack.runner
        self._await(runner.arguments(batch), start, None, self.observer(entries, start, stop))
        with torch.no_grad():
            reached = runner.run(start, stop, carry, batch)
        slot = self._slots[stop]
        return reached[slot.stack][slot.position]

    def _as_carry(self, boundary: int, state: torch.Tensor) -> Carry:
        """Return the state, with placeholders for the tensors that are not read above the boundary.

        Placeholders have the state's shape: the model's code may slice them without reading the values.
        """
        slot, runner = self._slots[boundary], self._stack.runner
        unread = state.new_zeros(()).expand(state.shape)
        carry = {
            stack: tuple(unread for _ in runner.floating_outputs(stack))
            for stack in {unit.stack for unit in self._stack.units[:boundary]}
        }
        before, after = carry[slot.stack][: slot.position], carry[slot.stack][slot.position + 1 :]
        return {**carry, slot.stack: (*before, state, *after)}

    # ------------------------------------------------------------------------------------ a pass started by the user
    @contextmanager
    def watching_calls(self) -> Iterator[None]:
        """Inside the context, in a pass to the end, look up and store each call of the model by its own inputs.

        For losses that call the model on inputs of their own (pairs of sentences), and for batches without keys. In
        the latter only the first call is looked up. A call reads all of its samples, or computes all of them.
        """
        self._num_calls, self._awaited = 0, None
        self._before_calls(self._on_own_call)
        try:
            yield
        finally:
            self._remove_hook()

    def _on_own_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        runner, stop = self._stack.runner, self._stack.num_units
        self._num_calls += 1
        # keys contain only the inputs, but a loss may turn adapters off for some of its calls
        if self._has_adapters if not runner.takes_batch else self._num_calls > 1:
            return
        if not self._is_function_same() or not self._is_computed_as_before(is_call=True):
            return
        called = named_inputs(self._stack.model, args, kwargs)
        inputs = runner.batch_of(called)
        nested_in = runner.called.nested_in
        is_plain = nested_in is None or all(called[name] is None for name in called.keys() - {nested_in})
        if not is_plain or self.is_called_otherwise(inputs):  # keys contain only that dict
            return
        entries = entries_of(inputs, self._ignored, self.keeps_padding) if inputs else None
        if entries is None or self._is_refused(entries):
            self.counts.rows += 0 if entries is None else len(entries.spans)
            return
        found = self._find(entries, stop)
        used = {f: state for f, state in found.states.items() if len(state[0]) == len(entries.spans)}
        self._count(used, found.seconds)
        level, carry = next(((f, self._as_carry(f, state)) for f, (_, state) in used.items()), (0, None))
        runner.begin_elsewhere(level, carry, self.observer(entries, level, stop))

    def is_called_otherwise(self, called: Mapping[str, Any]) -> bool:
        """Whether keys do not cover the inputs of a call, or entries do not have its outputs.

        A prediction without labels computes no loss, and may pass on arguments that the loss keeps back. An entry has
        the outputs of one layer only.
        """
        kept_back = self._stack.runner.called.kept_back - LABELS_AND_DECODER
        is_less = any(name not in called for name in self.settings or ())
        return is_less or any(called.get(n) is not None for n in kept_back) or any(map(called.get, RECORDS))

    def _is_computed_as_before(self, is_call: bool) -> bool:
        """Whether torch has the settings of the first pass, or of the first call of the model. If not, log it."""
        seen, now = self._settings_of_torch.setdefault(is_call, []), state_of_torch(self._device.type)
        if now not in seen:
            seen.append(now)
            if now != seen[0]:
                log_once(logger, logging.WARNING, "Frozen layers are computed in some steps: %s.", OTHER_SETTINGS)
        return now == seen[0]

    def _is_function_same(self, values: bool = True) -> bool:
        self._has_asked, is_other = True, self._met_other_function or not self.is_same_function(values)
        self._met_other_function = is_other
        return not is_other

    def take_met_other_function(self) -> bool:
        """Whether the frozen layers were not those of the stored outputs, in a step since the last call."""
        met, self._has_asked, self._met_other_function = self._met_other_function, False, False
        return met

    def _await(self, inputs: Batch, start: int, carry: Carry | None, observer: Observer | None) -> None:
        """Wait for the model to be called on these inputs."""
        begin = partial(self._stack.runner.begin_elsewhere, start, carry, observer)
        self._awaited = RecordedInputs(inputs), begin
        self._before_calls(self.begin_call)

    def _before_calls(self, react: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Call `react` before each of the model's next calls in a pass, instead of an earlier function.

        The hook is registered for each pass: it must run after the user's hooks, which may change the inputs.
        """

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is self._stack.model and self._stack.runner.is_running:  # not for a copy of the model
                react(args, kwargs)

        self._remove_hook()
        self._hook = self._stack.model.register_forward_pre_hook(hook, with_kwargs=True)

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def begin_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call of the model at the found states, if its inputs are the looked-up ones.

        Code that calls the model's forward in a pass without its hooks must call this before.
        """
        awaited, runner = self._awaited, self._stack.runner
        if awaited is None or not runner.is_running:
            return
        self._awaited = None
        called = named_inputs(self._stack.model, args, kwargs)
        if self.is_called_otherwise(called) or not self._is_computed_as_before(is_call=True):
            return
        if self.is_loss_of_user and not self._is_function_same():
            return
        inputs, begin = awaited
        added = added_settings(inputs.named, called)
        if added and self.settings is None:
            return  # the first step
        if added == (self.settings or {}):
            called = {name: value for name, value in called.items() if name not in added}
        if not inputs.are(called, self._ignored):
            self.met_other_inputs = True
            return
        begin()

    # ------------------------------------------------------------------------------------ writing
    def observer(self, entries: BatchEntries, start: int, stop: int) -> Observer | None:
        """Return the observer that stores a state, if the frozen layers end in a pass over [start, stop)."""
        if not self._reading.generations or not self._writes or self._writing.failure is not None:
            return None
        end = self._reading.generations[0].num_frozen
        if not start < end <= stop:
            return None
        slot = self._slots[end]
        position = start
        state: torch.Tensor | None = None  # the last layer's output may not be the state

        def observer(unit: Unit, output: Any) -> None:
            nonlocal position, state
            position += 1
            if unit.stack == slot.stack:
                state = tensors_of(output)[slot.position]
            if position == end and state is not None:
                self._put(entries, state)

        return observer

    def _put(self, entries: BatchEntries, state: torch.Tensor) -> None:
        if self._is_refused(entries):
            return
        counts = self.counts  # `self.counts` may be replaced before the states are written

        def done(stored: int, present: int) -> None:
            counts.stored += stored
            counts.present += present

        dtype = self._storage_dtype or state.dtype
        if not self._writing.put(self._reading.generations[0].name, entries, state, dtype, done):
            counts.dropped += len(entries.spans)

    def _is_refused(self, entries: BatchEntries) -> bool:
        """Whether a batch is neither stored nor looked up: its samples are padded on the left."""
        return not self._padded_left and any(span.start for span in entries.spans)

    def stop_writing(self, error: OSError) -> None:
        """Stop writing after an error. Stored states are still read, and others are recomputed from now on."""
        self._writing.failure = error

    def resume_writing(self) -> None:
        """Resume writing: there may be space again."""
        self._writing.failure = None

    @property
    def is_full(self) -> bool:
        """Whether writing stopped because of missing space."""
        return self._writing.failure is not None and self._writing.failure.errno in FULL

    @property
    def why_full(self) -> str | None:
        """The reason for which writing stopped, in words; None if it has not stopped."""
        error = self._writing.failure
        return error.strerror if isinstance(error, StoreFull) else str(error) if error is not None else None

    def flush(self) -> None:
        """Wait until all pending states are written."""
        self._writing.flush()

    def close(self) -> None:
        self._remove_hook()
        self._writing.close()
        self._reading.close()

    @contextmanager
    def counting_evaluation(self) -> Iterator[None]:
        """Inside the context, count for an evaluation, separately from the training."""
        counts, self.counts, met_other_inputs = self.counts, CacheCounts(), self.met_other_inputs
        try:
            yield
        finally:
            self.evaluated, self.counts = self.counts, counts
            self.met_other_inputs, self._awaited = met_other_inputs, None
            self.take_met_other_function()

    def take_counts(self) -> CacheCounts:
        """Return the counts since the last call, and reset them."""
        counts, self.counts = self.counts, CacheCounts()
        return counts


def _of_whole_samples(found: States, sequences: int) -> States:
    """Keep the rows of samples whose sequences, which follow one another, were all found at the same boundary."""
    if sequences == 1:
        return found
    kept = {}
    for num_frozen, (rows, states) in found.items():
        counts = Counter(row // sequences for row in rows)
        places = [place for place, row in enumerate(rows) if counts[row // sequences] == sequences]
        if places:
            kept[num_frozen] = [rows[place] for place in places], joined([(states, place) for place in places])
    return kept
