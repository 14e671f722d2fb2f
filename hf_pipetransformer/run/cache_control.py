"""AutoCache: when frozen layers are cached, and how far up (PipeTransformer, ICML 2021, section 3.4).

    epoch           1           2           3           4           5
    frozen          0           4           4           7           7
    put             -           4           -           7           -        what the first so many layers give
    read            -           -           4           4           7
    cached          0           0           4           4           7        `PipelinePlan.num_cached_layers`

While an epoch fills the store, the frozen layers run spread over the pipeline. Once nearly all of an epoch's rows are
in the store, the layers count as cached: they cost nothing, and the others are balanced anew. All decisions are made
between two steps, over the control group, from the numbers of all processes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import add
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from torch import nn
from torch.utils.data import get_worker_info
from transformers import TrainerState

from ..cache.activation_cache import SECONDS_BETWEEN_MARKS, ActivationCache, CacheCounts
from ..cache.activation_files import open_private
from ..cache.activation_store import ActivationStore, GenerationReader
from ..cache.cache_probe import CacheVerdict
from ..cache.content_keys import NOT_IN_KEYS
from ..model.micro_batch import on_device
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..planning.cached_layers import boundary_to_cache, is_worth_loading, most_cached_layers
from .frozen_function import FrozenFunction

logger = logging.getLogger(__name__)

ENOUGH = 0.9
"""Share of an epoch's rows in the store, from which on the layers count as cached."""
HARDLY_ANY = 0.05
"""Share of the rows found, below which the inputs change from epoch to epoch."""
EARLY_STEPS = 16
"""After so many steps of the first epoch that reads, it is looked whether anything is found at all."""
SLOW_EPOCHS = 2
"""So many epochs in a row in which loading took longer than computing would: the first may have met a cold disk."""
LEAST_CAPACITY = 4096
"""In a small table processes would more often write to one bucket at once, and one of them would lose a row."""
OTHER_INPUTS = (
    "compute_loss, _prepare_inputs, training_step or a forward pre-hook has changed the inputs before the model sees"
    " them, or calls a part of the model; what is kept belongs to what the data collator returns: change them there"
)
NOTHING_KEPT = (
    "none of an epoch's rows could be kept (padding on the left, where the examined rows had none; an attention mask"
    " that is not [rows, tokens] of 0 and 1; inputs other than tensors)"
)
USABLE_DISK = 0.8
"""Share of the free disk that the store may fill, where no limit is given."""


@dataclass(frozen=True)
class EpochReport:
    """What became of the cache in an epoch, over all processes.

    Attributes:
        counts: of rows.
        nbytes: size of the store on this node.
        failure: why a process cannot write any more; None: all can.
        is_full: one cannot because there is no room.
    """

    counts: CacheCounts
    nbytes: int
    failure: str | None
    is_full: bool


class AutoCache:
    """Decides for all processes together. Every method but `close` is collective over all processes.

    Args:
        pipeline: the model.
        cache: this process's way to the store.
        store: of this node.
        reasons: for each number of layers why their output must not be kept; None: it may.
        is_forced: do not ask whether it pays.
        seconds_per_row: of computing, for each unit, where it has been measured.
        description: whatever the states depend on besides the weights.
        current: file that names the generations which are read now, for the loaders' workers.
        is_shared: other trainings may use the store, too: nothing is deleted that they may read.
        rows: a few of the data set, collated, the same on every process: what the frozen layers make of them is part
            of a generation's name.
    """

    def __init__(
        self,
        pipeline: ElasticPipeline,
        cache: ActivationCache,
        store: ActivationStore,
        reasons: Mapping[int, str | None],
        is_forced: bool,
        seconds_per_row: Sequence[float] | None,
        description: str,
        current: Path,
        is_shared: bool,
        rows: Mapping[str, Any],
    ) -> None:
        self.cache = cache
        self.num_cached = 0
        """Layers that count as cached."""
        self.reason_off: str | None = None
        """Why nothing is kept; None: it is."""
        self._may_pay_later = False  # it is off until more layers are frozen
        self._pipeline, self._mesh, self._store = pipeline, pipeline.mesh, store
        self._allowed = [f for f, reason in reasons.items() if reason is None]
        self._reasons = reasons
        self._is_forced = is_forced
        self._seconds_per_row = seconds_per_row
        self._description = description
        self._current, self._is_shared = current, is_shared
        self._function = FrozenFunction(pipeline, rows)
        self._nodes: list[str] = self._mesh.gather_objects(node_name())  # of each rank
        self._is_first_here = self._nodes.index(node_name()) == self._mesh.rank
        self._boundary = 0  # that is filled
        self._num_epochs = 0  # begun in this `train()`
        self._steps = 0  # of this epoch
        self._began_late = False  # to fill the store, in the middle of this epoch: not all of its rows were seen
        self._writes = False  # what is put in this epoch will be read
        self._marked = time.monotonic()
        self._reads_first = False  # this epoch is the first one that reads
        self._in_store = 0  # rows, when the last epoch ended
        self._had_rows = False  # an earlier epoch has found what it looked for
        self._slow_epochs = 0  # in a row
        self._has_said_full = self._has_said_damaged = False

    @classmethod
    def make(
        cls,
        pipeline: ElasticPipeline,
        verdicts: Sequence[CacheVerdict],
        *,
        current: Path,
        is_shared: bool,
        max_gib: float | None,
        storage_dtype: torch.dtype | None,
        capacity: int,
        is_forced: bool,
        seconds_per_row: Sequence[float] | None,
        precision: str,
        rows: Mapping[str, Any],
        ignored: Collection[str] = NOT_IN_KEYS,
    ) -> AutoCache:
        """The cache of a training that begins. Collective over all processes.

        Args:
            pipeline: the model, complete.
            verdicts: of this process, on which boundaries may be cached.
            current: file in the folder of the store that names the generations which are read now.
            is_shared: with other trainings.
            max_gib: limit on its size.
            storage_dtype: None: as computed.
            capacity: samples that are expected.
            is_forced: do not ask whether it pays.
            seconds_per_row: of computing, for each unit; None: not known.
            precision: name of the mixed precision.
            rows: a few of the data set, collated; the first process's are used.
            ignored: inputs that are no part of a key.
        """
        slots = {v.num_frozen: v.slot for v in verdicts if v.slot is not None}
        reasons: dict[int, str | None] = {}
        for reason in pipeline.mesh.gather_objects({v.num_frozen: v.reason for v in verdicts}):
            reasons = {f: reasons.get(f) or reason[f] for f in reason}
        store = ActivationStore(current.parent, user=current.stem)
        refusal = next(filter(None, pipeline.mesh.gather_objects(store.why_refused())), None)
        if refusal is not None and is_shared:
            raise ValueError(
                f"activation_cache_dir: the folder {store.folder} cannot hold activations: {refusal}. Give a folder of"
                " your own that only you can write to (chmod go-w), or one that does not exist yet."
            )
        if refusal is not None:
            why = f"the folder {store.folder} is not this user's alone to write: {refusal}"
            reasons = {f: reasons[f] or why for f in reasons}
        store.max_bytes = size_limit(store, max_gib)
        rank = pipeline.mesh.rank
        capacity = max(capacity, LEAST_CAPACITY)
        padded_left = any(verdict.padded_left for verdict in verdicts)
        cache = ActivationCache(
            pipeline.stack, slots, store, rank, capacity, storage_dtype, pipeline.device, padded_left, ignored
        )
        description = f"{describe_model(pipeline.model, precision)} {storage_dtype}"
        description = pipeline.mesh.gather_objects(description)[0]  # what has no fixed text differs between processes
        on_cpu = on_device(rows, torch.device("cpu"))
        everyone = pipeline.mesh.gather_objects(on_cpu if rank == 0 else {})
        return cls(
            pipeline, cache, store, reasons, is_forced, seconds_per_row, description, current, is_shared, everyone[0]
        )

    @property
    def is_on(self) -> bool:
        return self.reason_off is None

    # ------------------------------------------------------------------------------------ decisions
    def freeze(self, num_frozen: int) -> None:
        """The first layers have been frozen: fill the store with what they give from now on."""
        if not self.is_on and not self._may_pay_later:
            return
        highest = most_cached_layers(self._pipeline.current_plan, num_frozen, self._nodes)
        boundary = boundary_to_cache(self._allowed, highest)
        if not self._allowed:
            self._turn_off(f"the outputs of this model's layers cannot be kept: {self._reasons.get(highest)}")
        elif not boundary:
            self._say_why_not(num_frozen, highest)
        elif boundary > self._boundary:
            self._boundary = boundary
            self._began_late |= self._steps > 0
            if not self.is_on:  # while it was off nobody has looked at the weights
                self.reason_off = None
                self._function.forget_weights()
            self.cache.write(self._writes)  # it may have been off
            fingerprint = xxhash.xxh3_128_hexdigest(f"{self._description} {self._function.name(boundary)}".encode())
            self.cache.advance(boundary, fingerprint)
            self._mark_used()  # an earlier training may have made it
            self._publish()
            self._pipeline.use_cache(self.cache)
        # of what this process holds under the plan now in force
        self._function.note()

    def resume(self, num_cached: int) -> None:
        """Count layers as cached as the job did that is gone on with, where all nodes still have what they gave."""
        self._pipeline.weights.onload()  # their names in the store come from them
        self.freeze(num_cached)
        has_all = self._boundary == num_cached and self.cache.generations[0] in self._store.generations()
        if all(self._mesh.gather_objects(has_all)):
            self.num_cached, self._had_rows = num_cached, True

    def follow(
        self, num_epochs_begun: int, state: TrainerState, *, may_never_repeat: bool, doubts_weights: bool
    ) -> EpochReport | None:
        """A step begins, or an epoch with it.

        Args:
            num_epochs_begun: in this `train()`.
            state: of the trainer.
            may_never_repeat: whether the data may not come to their beginning again.
            doubts_weights: a callback may have changed the frozen layers' weights since the last step.

        Returns:
            What the last epoch brought, where one begins and the cache was in use.
        """
        if num_epochs_begun == self._num_epochs:
            if doubts_weights:
                self.check_weights()
            self.begin_step()
            return None
        self._num_epochs = num_epochs_begun
        done = state.epoch or 0.0
        epochs_left = state.num_train_epochs - 1 - math.floor(done + 1e-6)
        # a stream may never come to its beginning again: what it gives is put from its second epoch on
        repeats = num_epochs_begun > 1 or not may_never_repeat
        # a stream without a length has no part of an epoch: there the Trainer counts by its steps
        is_whole = num_epochs_begun > 1 or abs(done - round(done)) < 1e-6
        return self.begin_epoch(epochs_left >= 1 and repeats, is_whole)

    def begin_epoch(self, writes: bool, is_whole: bool = True) -> EpochReport | None:
        """Look back on the epoch that has ended, and decide for the one that begins.

        Args:
            writes: whether what is put in the epoch that begins will be read in a later one.
            is_whole: it begins with its first batch; not so where a training is resumed.

        Returns:
            What the last epoch brought; None where the cache was not in use.
        """
        self._steps = 0
        began_late, self._began_late = self._began_late, not is_whole
        self._reads_first = False
        wrote_all, self._writes = self._writes and not began_late, writes
        self.cache.write(writes)
        self.check_weights()
        if not self.is_on or not self._boundary:
            return None
        report = self.epoch_report()
        counts = report.counts
        if wrote_all and not (counts.found or counts.stored or counts.present or counts.dropped or report.failure):
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
        elif self.num_cached < self._boundary and not began_late and _is_filled(counts):
            self._count_as_cached()
        elif writes and report.is_full and len(self.cache.generations) > 1:
            # no room for two: what fewer layers gave makes way, and the next epoch fills the store from the start
            self.num_cached = self._in_store = 0
            older = self.cache.forget(keep=1)
            self._publish()
            self._release_generations(older)
            self.cache.resume_writing()
        self._had_rows |= counts.found >= HARDLY_ANY * counts.rows
        return report

    def begin_step(self) -> None:
        """Look early whether the first epoch that reads finds anything."""
        self._steps += 1
        if time.monotonic() - self._marked > SECONDS_BETWEEN_MARKS:
            self._mark_used()
        if self._reads_first and self._steps == EARLY_STEPS + 1:
            self._reads_first = False
            everyone = self._mesh.gather_objects(self.cache.counts)
            counts = reduce(add, everyone)
            if counts.rows and not counts.found:
                self._turn_off(_changing(counts))

    def epoch_report(self) -> EpochReport:
        """What has been counted since the last call."""
        self.cache.flush()
        everyone = self._mesh.gather_objects((self.cache.take_counts(), self.cache.why_full, self.cache.is_full))
        failure = next((why for _, why, _ in everyone if why is not None), None)
        if failure is not None and not self._has_said_full and self._mesh.rank == 0:
            self._has_said_full = True
            logger.warning(
                "The activation cache takes nothing more (%s): what it has is used, the rest is computed.", failure
            )
        counts = reduce(add, (counts for counts, *_ in everyone))
        if counts.damaged and not self._has_said_damaged and self._mesh.rank == 0:
            self._has_said_damaged = True
            logger.warning(
                "%d rows in the activation cache are damaged (its files have been changed or cut short): they are"
                " computed again.",
                counts.damaged,
            )
        return EpochReport(counts, self._store.nbytes(), failure, any(is_full for *_, is_full in everyone))

    def _count_as_cached(self) -> None:
        if not self._is_forced and not self._pays():
            return
        self.num_cached = self._boundary
        self._reads_first = True
        older = self.cache.forget(keep=1)
        self._publish()
        self._release_generations(older)

    def _pays(self) -> bool:
        loading = [seconds for seconds in self._mesh.gather_objects(self.cache.time_reading()) if seconds is not None]
        if self._seconds_per_row is None or not loading:
            return True
        if is_worth_loading(max(loading), self._seconds_of_computing):
            return True
        self._turn_off_as_slow(max(loading))
        return False

    def _is_slow(self, counts: CacheCounts) -> bool:
        """Whether computing an epoch's rows would have been faster: a disk may be slower than what was tried."""
        return (
            not self._is_forced
            and self._seconds_per_row is not None
            and counts.load_seconds > self._seconds_of_computing * counts.found
        )

    @property
    def _seconds_of_computing(self) -> float:
        """A row's states where the frozen layers end."""
        assert self._seconds_per_row is not None
        return sum(self._seconds_per_row[: self._boundary])

    def _turn_off_as_slow(self, loading: float) -> None:
        self._turn_off(
            f"loading takes {1e3 * loading:.3g} ms a row, computing the {self._boundary} frozen layers"
            f" {1e3 * self._seconds_of_computing:.3g} ms",
            may_pay_later=True,
        )

    def _miss_all(self, counts: CacheCounts) -> None:
        """Hardly any row was found of those that are in the store: other inputs, or somebody has deleted it."""
        if not self._had_rows:
            self._turn_off(_changing(counts))
            return
        self._had_rows = False  # if none is found again, inputs do change
        if not _is_filled(counts):
            self.num_cached = 0
        self.cache.resume_writing()
        if self._mesh.rank == 0:
            logger.warning(
                "The activation cache has lost its rows: of %d in this epoch %d were found. It is filled anew.",
                counts.rows,
                counts.found,
            )

    def disable(self, reason: str) -> None:
        """Keep nothing from now on, if it is not off already."""
        if self.is_on:
            self._turn_off(reason)

    def check_weights(self) -> None:
        """Keep nothing from now on if a callback has put other weights into frozen layers.

        What was put since the last look is theirs, under the name of the earlier ones: it must not be found again.
        """
        if self.is_on and self._boundary:
            changed = self._function.what_changed()
            if changed is not None:
                self._turn_off(changed, are_wrong=True)

    def _say_why_not(self, num_frozen: int, highest: int) -> None:
        if self._mesh.rank == 0:
            logger.info(
                "Nothing is cached yet: of %d frozen layers the first %d can be under this layout, and the output of"
                " fewer than %d must not be kept.",
                num_frozen,
                highest,
                min(self._allowed),
            )

    def _turn_off(self, reason: str, may_pay_later: bool = False, are_wrong: bool = False) -> None:
        """Keep nothing from now on, or until more layers are frozen; delete it whoever uses it if it is wrong."""
        self.reason_off = reason
        self._may_pay_later = may_pay_later
        self.num_cached = self._in_store = 0
        self.cache.write(False)
        self.cache.flush()
        generations = self.cache.forget(keep=0)
        self._mesh.gather_objects(None)  # all have written, and closed their files
        self._publish()
        self._release_generations(generations, are_wrong)
        self._pipeline.use_cache(None)
        if self._mesh.rank == 0:
            until = " until more layers are frozen" if may_pay_later else ""
            logger.log(
                logging.INFO if may_pay_later else logging.WARNING, "The activation cache is off%s: %s.", until, reason
            )

    def _mark_used(self) -> None:
        self._marked = time.monotonic()
        for generation in self.cache.generations:
            self._store.mark_used(*generation)

    def _release_generations(self, generations: Sequence[tuple[int, str]], are_wrong: bool = False) -> None:
        """This training needs them no more. Where others may, they go when there is need of room."""
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
        """Whether the frozen layers give what they gave when they froze: a callback may have changed them."""
        return self._function.what_changed() is None

    def weights_look_same(self) -> bool:
        """Whether one number of each frozen tensor is as it was: cheap enough for each step, where callbacks have one.

        Not collective. Weights must not be offloaded.
        """
        return not self.is_on or self._function.looks_same()

    def _publish(self) -> None:
        if self._is_first_here:
            with suppress(OSError):  # without it nobody reads ahead
                publish(self._current, self.cache.generations)

    def close(self, has_ended: bool) -> None:
        """End the use of the cache. Not collective.

        Args:
            has_ended: nobody will go on with this training; what only it could use is removed.
        """
        self._pipeline.use_cache(None)
        self.cache.close()
        if not has_ended or not self._is_first_here:
            return
        if self._is_shared:
            with suppress(OSError):
                self._current.unlink()
        else:
            folder = self._store.folder
            shutil.rmtree(folder, ignore_errors=True)
            if folder.name == node_name():
                with suppress(OSError):  # the last node's
                    folder.parent.rmdir()


class ReadAhead:
    """In a loader's worker: asks the kernel to read what the step will need. Follows the generations in use.

    Args:
        current: file in the folder of the store that names them.
    """

    def __init__(self, current: Path) -> None:
        self._current = current
        self._stamp: tuple[int, int] | None = None
        self._readers: list[GenerationReader] = []

    def __call__(self, keys: list[bytes]) -> None:
        if get_worker_info() is None:
            return  # the step comes at once
        with suppress(OSError, ValueError, TypeError):  # whatever the file says, the step reads for itself
            self._follow()
        for reader in self._readers:
            reader.prefetch(keys)

    def _follow(self) -> None:
        status = os.stat(self._current)
        if self._stamp != (status.st_mtime_ns, status.st_ino):
            store = ActivationStore(self._current.parent)
            for reader in self._readers:
                reader.close()
            with open(open_private(self._current, os.O_RDONLY), encoding="utf-8") as file:
                self._readers = [store.reader(*generation) for generation in json.load(file)]
            self._stamp = (status.st_mtime_ns, status.st_ino)


def publish(current: Path, generations: Sequence[tuple[int, str]]) -> None:
    """Tell the loaders' workers which generations are read now."""
    current.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = current.with_name(f"{current.name}.{os.getpid()}")
    try:
        new.unlink(missing_ok=True)
        with open(open_private(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
            json.dump(generations, file)
        os.replace(new, current)
    finally:
        new.unlink(missing_ok=True)  # of a full disk


def current_file(folder: str | os.PathLike[str], output_dir: str, nodes: Sequence[str]) -> Path:
    """Where a training names the generations that it reads: of several in one folder each has a file of its own.

    Args:
        folder: of the stores.
        output_dir: of the training.
        nodes: name of each rank's node.
    """
    return (
        store_folder(folder, nodes) / f"current-{xxhash.xxh3_64_hexdigest(os.path.abspath(output_dir).encode())}.json"
    )


def store_folder(folder: str | os.PathLike[str], nodes: Sequence[str]) -> Path:
    """Each node has a folder of its own: nodes may share a file system, but they do not share a page cache."""
    return Path(folder, node_name()).absolute() if len(set(nodes)) > 1 else Path(folder).absolute()


def node_shares(nodes: Sequence[str]) -> tuple[int, ...]:
    """Processes on each node, in the order of ranks.

    One share for all where the nodes have different numbers of processes, or where their ranks alternate: the rows of
    a batch are not divided by node then.

    Args:
        nodes: name of each rank's node (`node_name`). Launchers other than `torchrun` may give no number of processes.
    """
    shares = tuple(len(list(ranks)) for _, ranks in groupby(nodes))
    return shares if len(shares) == len(set(nodes)) and len(set(shares)) == 1 else (len(nodes),)


def node_name() -> str:
    """Of this process's node: the host, and the launcher's number of it, as several may be one host in a test."""
    return f"{socket.gethostname()}-{os.environ.get('GROUP_RANK', 0)}"


def size_limit(store: ActivationStore, max_gib: float | None) -> int:
    """Bytes that the store may take: as given, and not more than the disk has, where that can be found out."""
    try:
        folder = store.folder
        while not folder.exists():
            folder = folder.parent
        most = store.nbytes() + int(shutil.disk_usage(folder).free * USABLE_DISK)
    except OSError:
        most = sys.maxsize  # who writes will be told what is wrong with the folder
    return most if max_gib is None else int(min(max_gib * 2**30, most))


def describe_model(model: nn.Module, precision: str, ignored: Collection[str] = ("_name_or_path",)) -> str:
    """What a model's states depend on besides its weights and buffers, as far as it can be named."""
    config: Any = getattr(model, "config", None)
    values: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {"config": repr(config)}
    return json.dumps(
        {
            "class": type(model).__qualname__,
            "config": {key: value for key, value in values.items() if key not in ignored},
            "attention": getattr(config, "_attn_implementation", None),
            "precision": precision,
            "versions": [torch.__version__, transformers.__version__],
        },
        sort_keys=True,
        default=str,
    )


def _is_filled(counts: CacheCounts) -> bool:
    return counts.hits + counts.stored + counts.present >= ENOUGH * counts.rows


def _changing(counts: CacheCounts) -> str:
    return (
        f"of {counts.rows} rows {counts.found} were found; the inputs of a sample change from epoch to epoch (random"
        " augmentation, masking by the collator?)"
    )
