"""AutoCache: decides when and for how many layers to cache outputs (PipeTransformer, ICML 2021, section 3.4).

    epoch           1           2           3           4           5
    frozen          0           4           4           7           7
    put             -           4           -           7           -        outputs of the first 4 or 7 layers
    read            -           -           4           4           7
    cached          0           0           4           4           7        `Layout.num_cached_layers`

    frozen from the start, a folder that trainings share:
    first training  f frozen, put in every epoch, also in the last one; later ones read them from the first step

While an epoch fills the store, the frozen layers run distributed over the stages. Once nearly all samples of an epoch
are in the store, the layers count as cached: they are free, and the remaining layers are rebalanced. All decisions are
made between two steps, from the counts of all processes, which are exchanged over the control group.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import xxhash
from transformers import TrainerState

from ...data.node_order import node_name
from ...pipeline.elastic_pipeline import ElasticPipeline
from ...planning.predictions import is_worth_loading
from ...planning.tables import MIB
from .cache.activation_cache import SECONDS_BETWEEN_MARKS, ActivationCache
from .cache.cache_counts import CacheCounts
from .cache.file_store import FileStore
from .frozen_function import OTHER_SETTINGS, FrozenFunction

logger = logging.getLogger(__name__)

ENOUGH = 0.9
"""Minimum fraction of an epoch's samples in the store for the layers to count as cached."""
HARDLY_ANY = 0.05
"""Fraction of found samples below which the inputs are assumed to change from epoch to epoch."""
EARLY_STEPS = 16
"""Number of steps of the first reading epoch before a check that at least one sample was found."""
SLOW_EPOCHS = 2
"""Number of consecutive epochs with slower loading than computing after which the cache is turned off.

It is above 1, because the first epoch may have read from a cold disk.
"""
OTHER_INPUTS = (
    "compute_loss, _prepare_inputs, training_step or a forward pre-hook changes the inputs before the model receives"
    " them, or calls a part of the model, but cached outputs belong to what the data collator returns; change the"
    " inputs in the data collator instead"
)
NOTHING_KEPT = (
    "none of an epoch's samples could be cached (possible reasons: padding on the left where the probed samples had"
    " none; an attention mask that is not [samples, tokens] of 0 and 1; inputs other than tensors)"
)


@dataclass(frozen=True)
class EpochReport:
    """The use of the cache in an epoch, over all processes.

    Attributes:
        counts: counts of samples, summed over all processes.
        nbytes: size of the store on this node, in bytes.
        failure: why a process can no longer write; None if all can write.
        is_full: whether a process cannot write for lack of space.
        skipped: share of skipped forward passes, if it is not counted by layers.
    """

    counts: CacheCounts
    nbytes: int
    failure: str | None
    is_full: bool
    skipped: float | None = None


class AutoCache:
    """Decides about the cache for all processes together.

    Every method except `abandon` and `close` is collective over all processes.

    Args:
        pipeline: the model.
        cache: reads and writes the store in this process.
        store: the store of this node.
        reasons: number of layers -> why their output must not be cached; None if it may be cached.
        is_forced: cache even if loading is slower than computing.
        seconds_per_row: forward time per sample (per sequence of it) of each unit, in seconds; None if not measured.
        description: all dependencies of the hidden states besides the weights.
        is_shared: whether other trainings may use the store, too. Generations that they may read are then kept.
        rows: a few samples, collated, the same on every process. The frozen layers' outputs for them are part of a
            generation's name.
        epoch_bytes: bytes per epoch on a node at each boundary; empty if unknown.
        calls_per_sample: number of model inputs per sample of the dataset (two for a pair of sentences).
    """

    def __init__(
        self,
        pipeline: ElasticPipeline,
        cache: ActivationCache,
        store: FileStore,
        reasons: Mapping[int, str | None],
        is_forced: bool,
        seconds_per_row: Sequence[float] | None,
        description: str,
        is_shared: bool,
        rows: Mapping[str, Any],
        epoch_bytes: Sequence[int] = (),
        calls_per_sample: int = 1,
    ) -> None:
        self.cache = cache
        self.num_cached = 0
        """Number of layers that count as cached."""
        self.calls_per_sample = calls_per_sample
        """Number of model inputs per sample of the dataset."""
        self.layers_skipped = 0
        """Number of skipped layers in this training, summed over the samples, on all processes."""
        self.reason_off: str | None = None
        """Why the cache is off; None if it is in use."""
        self._may_pay_later = False  # whether the cache may pay when more layers are frozen
        self._pipeline, self._mesh, self._store = pipeline, pipeline.mesh, store
        self._allowed = [f for f, reason in reasons.items() if reason is None]
        self._reasons = reasons
        self._is_forced = is_forced
        self._seconds_per_row = seconds_per_row
        self._description = description
        self._is_shared = is_shared
        self._epoch_bytes = epoch_bytes
        self._serves_others = False  # whether other trainings may freeze the same layers with the same weights
        self._repeats = True  # whether the epoch's samples may recur
        self._function = FrozenFunction(pipeline, rows)
        cache.is_same_function = self._function.looks_same
        self._nodes: list[str] = self._mesh.gather_objects(node_name())  # node of each rank
        self._is_first_here = self._nodes.index(node_name()) == self._mesh.rank
        self._boundary = 0  # number of layers below the stored outputs
        self._num_epochs = 0  # number of epochs begun in this `train()`
        # state of the epoch: whether later epochs read its stored outputs, whether its generation has been open since
        # the first batch, and the number of steps begun
        self._writes, self._is_whole, self._num_steps = False, True, 0
        self._marked = time.monotonic()
        self._in_store = 0  # number of stored samples at the end of the last epoch
        self._had_rows = False  # whether an earlier epoch has found its samples
        self._slow_epochs = 0  # number of consecutive slow epochs
        self._warned: set[str] = set()  # format strings of logged warnings

    @property
    def is_on(self) -> bool:
        return self.reason_off is None

    def describe(self) -> str:
        """Return the state of the cache in words, with the reason if it is off."""
        if not self._allowed:
            return f"off ({next(filter(None, self._reasons.values()), 'this model has no layer that may be cached')})"
        return "on" if self._is_forced else "auto (used only if faster)"

    # ------------------------------------------------------------------------------------ decisions
    def freeze(self, num_frozen: int, is_start: bool = False, goes_on: bool = False) -> str | None:
        """Start to store the outputs of frozen layers, after the first `num_frozen` layers have been frozen.

        Args:
            num_frozen: number of frozen layers.
            is_start: whether they were frozen before the first step, with their loaded weights.
            goes_on: whether the resumed job had cached them. They count as cached if all nodes still have them.

        Returns:
            A sentence on the outputs to store, if they are new; otherwise None.
        """
        if not (self.is_on or self._may_pay_later):
            return None
        before = self._boundary
        highest = self._pipeline.current_layout.most_cached_on(self._nodes, num_frozen)
        boundary = max((allowed for allowed in self._allowed if allowed <= highest), default=0)
        if not self._allowed:
            self._turn_off(f"the outputs of this model's layers cannot be cached: {self._reasons.get(highest)}")
        elif not boundary:
            if self._mesh.rank == 0:
                logger.info(
                    "Nothing is cached yet: of %d frozen layers, at most the first %d can be cached with the current"
                    " plan, but for this model the output of fewer than %d layers cannot be cached.",
                    num_frozen,
                    highest,
                    min(self._allowed),
                )
        elif boundary > self._boundary:
            self._boundary = boundary
            self._serves_others = self._is_shared and is_start
            self._is_whole &= not self._num_steps
            if not self.is_on:  # the weights were not checked while it was off
                self.reason_off = None
                self._function.forget_weights()
            self._writes |= self._serves_others and self._repeats
            self.cache.write(self._writes)  # it may have been off
            fingerprint = xxhash.xxh3_128_hexdigest(f"{self._description} {self._function.name(boundary)}".encode())
            # gathering is also a barrier: no process writes before all have looked
            exists = all(self._mesh.gather_objects((boundary, fingerprint) in self._store.generations()))
            self.cache.advance(boundary, fingerprint, is_new=not exists)
            self._mark_used()  # an earlier training may have created the generation
            self._pipeline.use_shortcut(self.cache)
            if exists and (self._is_shared or goes_on):  # missing entries are noticed later, as misses
                self.num_cached, self._had_rows = boundary, True
                if self._mesh.rank == 0:
                    logger.info("The activation cache holds the outputs of the first %d layers already.", boundary)
        # records this process's weights under the current plan
        self._function.note()
        self.judge_settings()
        if boundary <= before or self.num_cached == boundary or not (self.is_on and self._writes):
            return None
        size = self._epoch_bytes[boundary - 1] if boundary <= len(self._epoch_bytes) else None
        of_epoch = self._store.epoch_in_words(size, is_bound=True)
        first = "layer" if boundary == 1 else f"{boundary} layers"
        return f"The output of the first {first} is stored for later epochs{of_epoch}."

    def follow(
        self, num_epochs_begun: int, state: TrainerState, *, may_never_repeat: bool, doubts_function: bool
    ) -> EpochReport | None:
        """Update the cache at the beginning of a step, and of an epoch if one begins with it.

        Args:
            num_epochs_begun: number of epochs begun in this `train()`.
            state: the trainer's state.
            may_never_repeat: whether the data may never repeat.
            doubts_function: whether the frozen layers may be others than before: some process has seen a change, or a
                callback has got the weights.

        Returns:
            The report of the last epoch if a new one begins and the cache was in use, otherwise None.
        """
        if num_epochs_begun == self._num_epochs:
            if doubts_function:
                self.check_weights()
            self._begin_step()
            return None
        self._num_epochs = num_epochs_begun
        done = state.epoch or 0.0
        epochs_left = state.num_train_epochs - 1 - math.floor(done + 1e-6)
        # a stream may never repeat, so its outputs are stored from the second epoch on
        self._repeats = num_epochs_begun > 1 or not may_never_repeat
        wrote, was_whole = self._writes, self._is_whole
        self._writes, self._num_steps = (epochs_left >= 1 or self._serves_others) and self._repeats, 0
        # for a stream without a length, `state.epoch` is inexact: the Trainer derives it from steps
        self._is_whole = num_epochs_begun > 1 or abs(done - round(done)) < 1e-6
        self.cache.write(self._writes)
        self.cache.read_all()
        self.check_weights()
        return self._end_epoch(wrote, was_whole) if self.is_on and self._boundary else None

    def _end_epoch(self, wrote: bool, was_whole: bool) -> EpochReport | None:
        """Update the cache after an epoch, and return the epoch's report; None if no sample was looked up."""
        report = self.epoch_report()
        counts = report.counts
        was_used = counts.found or counts.stored or counts.present or counts.dropped or report.failure
        if wrote and was_whole and not was_used:
            self._turn_off(NOTHING_KEPT)
        if not counts.rows:
            return None
        expected = counts.rows if self.num_cached else self._in_store
        self._in_store = max(counts.found, counts.hits + counts.stored + counts.present, counts.older_stored)
        self._slow_epochs = self._slow_epochs + 1 if self.num_cached and self._is_slow(counts) else 0
        if expected >= HARDLY_ANY * counts.rows and counts.found < HARDLY_ANY * expected:
            self._miss_all(counts)
        elif self._slow_epochs >= SLOW_EPOCHS:
            self._turn_off_as_slow(counts.load_seconds / counts.found)
        elif self.num_cached < self._boundary and was_whole and _is_filled(counts):
            if self._is_forced or self._pays():
                self.num_cached = self._boundary
                self._release_generations(self.cache.forget(keep=1))
        elif self._writes and report.is_full and len(self.cache.generations) > 1:
            # no space for two generations: remove the lower one, and refill the store in the next epoch
            self.num_cached = self._in_store = 0
            self._release_generations(self.cache.forget(keep=1))
            self.cache.resume_writing()
        self._had_rows |= counts.found >= HARDLY_ANY * counts.rows
        return report

    def _begin_step(self) -> None:
        """Turn the cache off early if the first reading epoch finds no samples."""
        self._num_steps += 1
        if time.monotonic() - self._marked > SECONDS_BETWEEN_MARKS:
            self._mark_used()
        if self.num_cached and not self._had_rows and self._num_steps == EARLY_STEPS + 1:
            counts = reduce(add, self._mesh.gather_objects(self.cache.counts))
            if counts.rows and not counts.found:
                self._turn_off(_changing(counts))

    def epoch_report(self) -> EpochReport:
        """Return and reset the counts since the last call."""
        self.cache.flush()
        everyone = self._mesh.gather_objects((self.cache.take_counts(), self.cache.why_full, self.cache.is_full))
        failure = next((why for _, why, _ in everyone if why is not None), None)
        if failure is not None:
            self._warn_once(
                "The activation cache stores no further samples (%s). Samples that it already holds are read from it,"
                " and the others are computed.",
                failure,
            )
        counts = reduce(add, (counts for counts, *_ in everyone))
        self.layers_skipped += counts.layers_skipped
        if counts.dropped:
            self._warn_once(
                "%d samples of an epoch were not stored in the activation cache, because writing is slower than"
                " training; they are recomputed. Which ones depends on the disk's speed, so another run may differ by"
                " rounding. activation_cache='off' avoids this.",
                counts.dropped,
            )
        if counts.damaged:
            self._warn_once(
                "%d samples in the activation cache are damaged (its files were changed or truncated); they are"
                " recomputed.",
                counts.damaged,
            )
        return EpochReport(counts, self._store.nbytes(), failure, any(is_full for *_, is_full in everyone))

    def _warn_once(self, message: str, *values: Any) -> None:
        """Log a warning once, on the first process."""
        if self._mesh.rank == 0 and message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *values)

    def _pays(self) -> bool:
        """Whether loading is sufficiently faster than computing, as far as measured. If not, turns the cache off."""
        measured = self._mesh.gather_objects(self.cache.time_reading())
        loading = max((seconds for seconds in measured if seconds is not None), default=None)
        if loading is None or self._seconds_per_row is None or not self._seconds_of_computing:
            return True
        # on an accelerator, loading overlaps at least the first stage's other units; a CPU loads with the same cores
        units = slice(self._boundary, self._pipeline.current_layout.stage_bounds[1])
        beside = 0.0 if self._pipeline.device.type == "cpu" else sum(self._seconds_per_row[units])
        if is_worth_loading(loading, self._seconds_of_computing, beside):
            return True
        self._turn_off_as_slow(loading)
        return False

    def _is_slow(self, counts: CacheCounts) -> bool:
        """Whether computing the outputs for the epoch's samples would have been faster than loading them.

        The disk may be slower than in the timing before the decision to cache.
        """
        return (
            not self._is_forced
            and self._seconds_per_row is not None
            and counts.load_seconds > self._seconds_of_computing * counts.found > 0.0  # a busy machine may measure 0
        )

    @property
    def _seconds_of_computing(self) -> float:
        """Time to compute a sample's output of the layers up to the boundary, in seconds."""
        assert self._seconds_per_row is not None
        return sum(self._seconds_per_row[: self._boundary])

    def _turn_off_as_slow(self, loading: float) -> None:
        self._turn_off(
            f"loading a sample takes {1e3 * loading:.3g} ms, but computing the {self._boundary} frozen layers takes"
            f" only {1e3 * self._seconds_of_computing:.3g} ms (measured: another run may decide otherwise, and then"
            " differ by rounding; activation_cache='on' or 'off' settles it)",
            may_pay_later=True,
        )

    def _miss_all(self, counts: CacheCounts) -> None:
        """React to hardly any found samples: the inputs change, or the store was deleted."""
        if not self._had_rows:
            self._turn_off(_changing(counts))
            return
        self._had_rows = False  # if the next epoch finds none either, the inputs do change
        if not _is_filled(counts):
            self.num_cached = 0
        self.cache.resume_writing()
        if self._mesh.rank == 0:
            logger.warning(
                "The activation cache has lost samples: of %d samples in this epoch, %d were found. It is refilled.",
                counts.rows,
                counts.found,
            )

    def judge_settings(self) -> None:
        """Turn the cache off if frozen layers, or outputs at padding, may depend on the loss's settings.

        With several stages, calls with settings are not looked up.
        """
        given = self.cache.settings if self.is_on and self._boundary and self._pipeline.num_stages == 1 else None
        if given and (not self.cache.keeps_padding or self._function.depends_on(given)):
            self._turn_off(OTHER_INPUTS)

    def disable(self, reason: str) -> None:
        """Turn the cache off, unless it is off already."""
        if self.is_on:
            self._turn_off(reason)

    def check_weights(self) -> None:
        """Turn the cache off if a callback has changed the weights of frozen layers.

        Outputs stored since the last check may come from the changed weights under the original weights' name, so they
        are deleted.
        """
        if self.is_on and self._boundary:
            changed = self._function.what_changed()
            if changed is not None:
                # where settings have changed, layers were computed, and this stage has stored nothing
                is_noticed = changed == OTHER_SETTINGS and self._pipeline.num_stages == 1
                self._turn_off(changed, are_wrong=not is_noticed)

    def _turn_off(self, reason: str, may_pay_later: bool = False, are_wrong: bool = False) -> None:
        """Turn the cache off, for good or until more layers are frozen.

        Args:
            reason: the reason, for the log.
            may_pay_later: whether to turn it on again when more layers are frozen.
            are_wrong: whether the stored outputs may be wrong. They are then deleted even if other trainings share the
                store.
        """
        self.reason_off = reason
        self._may_pay_later = may_pay_later
        self.num_cached = self._in_store = 0
        self.cache.write(False)
        self.cache.flush()
        generations = self.cache.forget(keep=0)
        # also a barrier: all processes have closed their files
        self.layers_skipped += sum(self._mesh.gather_objects(self.cache.take_counts().layers_skipped))
        self._release_generations(generations, are_wrong)
        self._pipeline.use_shortcut(None)
        if self._mesh.rank == 0:
            until = " until more layers are frozen" if may_pay_later else ""
            logger.warning("The activation cache is off%s: %s.", until, reason)

    def _mark_used(self) -> None:
        self._marked = time.monotonic()
        for generation in self.cache.generations:
            self._store.mark_used(*generation)

    def _release_generations(self, generations: Sequence[tuple[int, str]], are_wrong: bool = False) -> None:
        """Delete generations that this training no longer needs.

        In a shared store they are only marked, and deleted when space is needed, unless they are wrong.
        """
        if not self._is_first_here:
            return
        for generation in generations:
            with suppress(OSError):
                if self._is_shared and not are_wrong:
                    self._store.mark_superseded(*generation)
                else:
                    self._store.delete(*generation)

    # ------------------------------------------------------------------------------------ the frozen layers
    def weights_hold(self) -> bool:
        """Whether the frozen layers still compute the same function. A callback may have changed them."""
        return self._function.what_changed() is None

    def abandon(self, is_resumable: bool) -> str:
        """Stop storing, and remove a store that cannot be used again. Not collective; any thread may call it.

        Args:
            is_resumable: whether this training can be resumed, with the stored outputs.

        Returns:
            A sentence on the store, for a message.
        """
        self.cache.stop_writing(OSError("the training was interrupted"))
        folder = self._store.folder
        if not folder.is_dir():
            return ""
        if is_resumable or self._is_shared:
            return f" The activation cache is kept in {folder} ({self._store.nbytes() / MIB:.1f} MiB)."
        if self._is_first_here:
            self._store.remove()
        return f" The activation cache in {folder} was removed."

    def close(self, has_ended: bool) -> None:
        """End the use of the cache. Not collective.

        Args:
            has_ended: whether this training will not be resumed. Generations that only it could use are then removed.
        """
        self._pipeline.use_shortcut(None)
        self._function.release()
        self.cache.close()
        if has_ended and self._is_first_here and not self._is_shared:
            self._store.remove()


def _is_filled(counts: CacheCounts) -> bool:
    return counts.hits + counts.stored + counts.present >= ENOUGH * counts.rows


def _changing(counts: CacheCounts) -> str:
    return (
        f"of {counts.rows} samples {counts.found} were found; the inputs of a sample probably change from epoch to"
        " epoch (for example by random augmentation, or masking in the data collator)"
    )
