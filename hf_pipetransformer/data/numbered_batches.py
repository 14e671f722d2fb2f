"""The training loader: a global sequence of numbered batches. Each pipeline takes its slice.

The order of the samples and the content of a batch depend only on (seed, epoch, number), not on the number of
pipelines. (In one process, a sampler without its own seed draws as in the stock Trainer.)

    batch number        0                1                2
    samples        [7 3 9 1 | ...]  [4 8 0 5 | ...]  [2 6]          one global batch is per_device_batch x world size
    pipeline 0      7 3              4 8              2
    pipeline 1      9 1              0 5              6

`NumberedLoader` is a plain DataLoader over the numbers, in the main process and without prefetching. All operations of
the Trainer and Accelerate on a loader (length, skipping on resume, epochs) act on numbers. It reads from
`NumberedBatches`, which runs the user's dataset, collator and workers over the slices.

Like Accelerate's loader, `NumberedBatches` reads one batch ahead: batch n + 1 is read before batch n is trained on. So
a dataset that a callback changes gives the same samples as with the stock Trainer, and the activation cache can fetch
the next batch's entries while this one is computed.
"""

from __future__ import annotations

import copy
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ..model.called_inputs import BatchTags
from ..model.left_as_found import left_as_found
from ..model.micro_batch import batch_rows, with_name
from ..progress import PROGRESS
from ..randomness import generators_kept, seed_all, seeded
from .node_order import Order
from .sample_order import SampleOrder

logger = logging.getLogger(__name__)

Collator = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class BatchSlice:
    """This process's slice of the global batch that was read last."""

    rows: int  # samples of this pipeline; 0 if it got samples that must not count
    global_rows: int
    tags: BatchTags | None = field(default=None, compare=False)  # tags of these samples, on the CPU
    items: int | float = 0  # number of items in the slice for the loss, from the collator


@dataclass(frozen=True)
class _ReadBatch:
    """A batch that was read.

    Attributes:
        number: number of the batch.
        batch: this pipeline's slice, collated, without tags; None after the last batch.
        part: describes the slice; None after the last batch.
        samples: the whole global batch of an iterable dataset, which cannot be read again; otherwise None.
    """

    number: int
    batch: Any = None
    part: BatchSlice | None = None
    samples: list[Any] | None = None


def part_of(rows: int, parts: int, index: int, least: int = 1) -> tuple[int, int]:
    """Return the bounds [start, stop) of part `index` of `rows` samples.

    The sizes differ by at most one. If a part would have fewer than `least` samples, there are fewer parts, and the
    last ones are empty.
    """
    parts = max(1, min(parts, rows // least))
    return min(rows, rows * index // parts), min(rows, rows * (index + 1) // parts)


class _SeededRows(list[int]):
    """Indices of the samples of one slice, with the seed of its batch."""

    seed = 0


class _SeededDataset(Dataset[Any]):
    """The user's dataset. Seeds the process (or the worker process) before it reads a slice."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, rows: _SeededRows) -> list[Any]:
        seed_all(rows.seed)
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(list(rows))
        return [self.dataset[index] for index in rows]


class _Slices(Sampler[list[int]]):
    """This pipeline's sample indices in each batch from the next number on."""

    def __init__(self, batches: NumberedBatches) -> None:
        # in a reference cycle, workers would outlive the loader until the next garbage collection, and stop slowly
        self._batches: NumberedBatches = weakref.proxy(batches)

    def __iter__(self) -> Iterator[list[int]]:
        known, next_number = self._batches.num_batches, self._batches.next_number
        for number in itertools.count(next_number) if known is None else range(next_number, known):
            if not self._batches.has(number):
                return  # a sampler whose `__len__` is unknown, or greater than this epoch's number of samples
            yield self._batches.slice_of(number)


class NumberedBatches(Dataset[Any]):
    """Maps a batch number to this pipeline's slice of the batch, collated.

    `len()` is the number of samples, as the Trainer expects of a loader's dataset; the number of batches is
    `num_batches`.

    Args:
        dataset: map-style or iterable dataset.
        order: the order of a map-style dataset's samples; the sampler's `set_epoch` is called if it exists.
        collate_fn: the user's collator.
        drop_last: whether to omit a last batch that is not full.
        most_batches: number of batches that are read of a sampler without `__len__`; None for all.
        loader_options: further arguments of `DataLoader` (workers, pinning).
    """

    is_shared = True
    """Whether all processes read the same samples."""

    def __init__(
        self,
        dataset: Any,
        order: SampleOrder,
        collate_fn: Collator,
        drop_last: bool = False,
        most_batches: int | None = None,
        **loader_options: Any,
    ) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._wrap_collator: Callable[[Collator], Collator] | None = None
        self.order = order
        self.global_batch_size = order.batch_size
        self.drop_last = drop_last
        self.last_slice = BatchSlice(0, 0)
        self.latest: Any = None
        """The batch that was read last, until the loader hands it on."""
        self._parts, self._index = 1, 0
        self._epoch = 0
        self._order: Order | None = None
        self.next_number = 0  # number of the batch that `_iterator` yields next
        self._iterator: Iterator[Any] | None = None
        self._peeked: list[Any] | None = None  # batch 0 of an iterable dataset, if it was read for `sample_rows`
        self._ahead: _ReadBatch | None = None  # the batch after the last returned one
        self.is_iterable = self.may_never_repeat = isinstance(dataset, IterableDataset)
        ordered = dataset if self.is_iterable else order.sampler
        self.num_batches: int | None = None  # the length of an iterable dataset is rarely known
        if isinstance(ordered, Sized):
            full, rest = divmod(len(ordered), self.global_batch_size)
            self.num_batches = full + (1 if rest and not drop_last else 0)
        most_batches = most_batches if self.num_batches is None else self.num_batches
        # one more, as Accelerate reads ahead: an endless sampler begins another pass there
        self._most_rows = None if most_batches is None else (most_batches + 1) * self.global_batch_size
        self._loader_options = loader_options
        self._loader = self._make_loader()

    def _make_loader(self) -> DataLoader[Any]:
        if self.is_iterable:
            # reads whole global batches: the slices are known only when their samples arrive
            return DataLoader(
                self.dataset,
                batch_size=self.global_batch_size,
                drop_last=self.drop_last,
                collate_fn=_as_list,
                **self._loader_options,
            )
        return DataLoader(
            _SeededDataset(self.dataset),
            batch_sampler=_Slices(self),
            collate_fn=self._wrapped_collate_fn(),
            **self._loader_options,
        )

    def _wrapped_collate_fn(self) -> Collator:
        return self.collate_fn if self._wrap_collator is None else self._wrap_collator(self.collate_fn)

    def use_collator(self, collate_fn: Collator) -> None:
        """Change the collator; takes effect when an epoch begins."""
        self.collate_fn = collate_fn
        self._iterator, self._ahead, self._loader = None, None, self._make_loader()

    def wrap_collator(self, wrap: Callable[[Collator], Collator]) -> None:
        """Let a part of the training add tags to collated batches. Takes effect when an epoch begins.

        Args:
            wrap: returns a collator that calls the given one. It must be picklable if the given one is.

        Raises:
            ValueError: another part already adds tags; only one part may.
        """
        if self._wrap_collator is not None:
            raise ValueError(
                "Two parts of the training add tags to batches. Set activation_cache='off', or remove the other part."
            )
        self._wrap_collator = wrap
        if not self.is_iterable:  # iterables are collated in this process, and must not be read twice
            self.use_collator(self.collate_fn)

    def __len__(self) -> int:
        return len(self.dataset)

    def close(self) -> None:
        """Stop the workers. They start again when the next batch is requested."""
        self._iterator = self._ahead = None

    def state_dict(self) -> dict[str, Any]:
        """The state that determines the order of the current epoch, for a checkpoint, as plain values for JSON."""
        return self.order.state_dict(self._epoch)

    def load_state_dict(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Finish an epoch that another job began, in the order that it had there (`SampleOrder.load_state_dict`)."""
        self.order.load_state_dict(epoch, **state)

    @property
    def epoch(self) -> int:
        """Number of the current epoch."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        if self._peeked is not None and epoch == self._epoch:
            return  # the first batch of this epoch has been read already and is kept
        self._enter(epoch)
        for part in (self.order.sampler, self.dataset):
            follow = getattr(part, "set_epoch", None)
            if follow is not None:
                follow(epoch)

    def begin_again(self) -> None:
        """Begin another pass without a new epoch number, like Accelerate's loader: the sampler draws again.

        A sampler with `set_epoch` gets the same number as before. Any other sampler draws a new order.
        """
        if self.is_iterable or hasattr(self.order.sampler, "set_epoch"):
            self.set_epoch(self._epoch)
        else:
            self._enter(self._epoch + 1)  # seeds depend on the epoch number

    def aside(self, epoch: int) -> NumberedBatches:
        """Return the same batches for a pass of the user's code: it has a position of its own. Not collective."""
        other = copy.copy(self)
        other.order, other._peeked = self.order.aside(), None
        other.set_epoch(epoch)
        other._loader = other._make_loader()
        return other

    def _enter(self, epoch: int) -> None:
        self._epoch, self._order, self._iterator, self._peeked, self._ahead = epoch, None, None, None, None

    def reslice(self, parts: int, index: int) -> None:
        """Take slice `index` of `parts` from the next number on. Prefetched batches are read again, without loss."""
        if (parts, index) != (self._parts, self._index):
            self._parts, self._index = parts, index
            if not self.is_iterable:
                self._iterator = self._ahead = None
            elif self._ahead is not None and self._ahead.samples is not None:
                self._ahead = self._sliced(self._ahead.number, self._ahead.samples)

    def sample_rows(self, count: int) -> list[Any]:
        """Return a few samples, the same on every process, without advancing in the data."""
        if not self.is_iterable:
            with self._looking():
                return first_samples(self.dataset, count)
        if self._peeked is None:  # an iterable may yield its samples only once: keep them for batch 0
            self.set_epoch(self._epoch)
            self._start_at(0)
            self._peeked = self._read(0, [])
        return _repeated(self._peeked, count, self.dataset)

    def spread_rows(self, count: int) -> list[Any]:
        """Return samples spread over the data set, which may be sorted; the first samples of an iterable."""
        if self.is_iterable:
            return self.sample_rows(count)
        with self._looking():
            return [self.dataset[len(self.dataset) * k // count] for k in range(min(count, len(self.dataset)))]

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Context for reading samples without training. Generators and the data set's state are restored."""
        with seeded(self.order.seed), generators_kept(self.dataset), left_as_found(self.dataset):
            yield

    def __getitem__(self, number: int) -> Any:
        read, self._ahead = self._ahead, None
        if read is None or read.number != number:
            read = self._read_slice(number)
        if read.part is None:
            raise StopIteration
        self._ahead = self._read_slice(number + 1)
        self.last_slice, self.latest = read.part, read.batch
        return read.batch

    @property
    def next_slice(self) -> BatchSlice | None:
        """The slice that was read ahead; None at the end of an epoch."""
        return None if self._ahead is None else self._ahead.part

    def has(self, number: int) -> bool:
        """Whether the epoch's order has samples for a batch: for a full one, if others are left out."""
        return len(self._rows_of(number)) >= (self.global_batch_size if self.drop_last else 1)

    def slice_of(self, number: int) -> list[int]:
        """Return this pipeline's sample indices of a batch, for the inner loader."""
        rows = self._rows_of(number)
        start, stop = part_of(len(rows), self._parts, self._index, self._least_rows)
        mine = _SeededRows(rows[start:stop] or rows[: self._least_rows])  # instead of none: these will not count
        mine.seed = self._slice_seed(number, start)
        return mine

    # ------------------------------------------------------------------------------------ inside
    @property
    def _least_rows(self) -> int:
        """Number of samples of a slice at least: two in a short batch, too, since over one there is no deviation."""
        return max(1, min(2, self.global_batch_size // self._parts))

    def _rows_of(self, number: int) -> list[int]:
        assert self._order is not None
        rows = self._order[number * self.global_batch_size : (number + 1) * self.global_batch_size]
        return rows.tolist() if isinstance(rows, np.ndarray) else list(rows)

    def _batch_seed(self, number: int) -> int:
        return self.order.seed + 7919 * self._epoch + 104729 * number + 1

    def _slice_seed(self, number: int, start: int) -> int:
        """Seed of a slice that starts at this index. Pipelines then draw different augmentations."""
        return self._batch_seed(number) + 1 + start

    def _read_slice(self, number: int) -> _ReadBatch:
        """Read this pipeline's slice of a batch. The number may be past the last batch."""
        if self.num_batches is not None and number >= self.num_batches and not self.is_iterable:
            return _ReadBatch(number)
        self._go_to(number)
        try:
            read, self._peeked = self._peeked or self._read(number), None
        except StopIteration:
            return _ReadBatch(number)
        self.next_number = number + 1
        return self._sliced(number, read)

    def _sliced(self, number: int, read: Any) -> _ReadBatch:
        """Return this pipeline's slice of a batch from the inner loader."""
        global_rows = len(read) if self.is_iterable else len(self._rows_of(number))
        start, stop = part_of(global_rows, self._parts, self._index, self._least_rows)
        batch = read
        if self.is_iterable:
            with seeded(self._slice_seed(number, start)):
                batch = self._wrapped_collate_fn()(read[start:stop] or read[: self._least_rows])
        # separate from the batch: the Trainer would move tags to the device, and models do not accept them
        batch, tags = BatchTags.taken_out_of(batch)
        part = BatchSlice(stop - start, global_rows, tags)
        return _ReadBatch(number, batch, part, read if self.is_iterable else None)

    def _go_to(self, number: int) -> None:
        """Advance to batch `number`, for the next `_read`."""
        if not self.is_iterable:
            if self._iterator is None or self.next_number != number:
                self._start_at(number)
            return
        if self._iterator is None or self.next_number > number:
            self._start_at(0)
        while self.next_number < number:  # an iterable has no random access: earlier batches are read and discarded
            PROGRESS.tick()
            if self._peeked is None:
                self._read(self.next_number)
            self._peeked = None
            self.next_number += 1

    def _start_at(self, number: int) -> None:
        if self._order is None and not self.is_iterable:
            self._order = self.order.of_epoch(self._epoch, len(self), self._most_rows)
        self.next_number, self._peeked = number, None
        with seeded(self._batch_seed(number)):  # DataLoader draws its workers' base seed here
            self._iterator = iter(self._loader)

    def _read(self, number: int, *default: Any) -> Any:
        assert self._iterator is not None
        with seeded(self._batch_seed(number)):
            return next(self._iterator, *default)


class GivenBatches:
    """The batches of a training loader that the user has created. Each process trains on its own loader.

    Used in place of `NumberedBatches` if each process holds the whole model: the Trainer reads the loader directly, as
    the stock Trainer does. As under DDP, batches of one step on different processes have the same weight.

    Args:
        dataset: the loader's dataset, which may differ between processes; None if it has none.
        processes: number of processes.
        sample: returns a few samples and their collator, without advancing in the data; called on first use.
    """

    is_shared = False
    """Whether all processes read the same samples."""

    may_never_repeat = True
    """True, because the loader's order is unknown."""
    next_slice: BatchSlice | None = None
    """None, because the Trainer reads the loader."""

    def __init__(self, dataset: Any, processes: int, sample: Callable[[], tuple[list[Any], Collator]]) -> None:
        self.dataset = dataset
        self._processes = processes
        self._sample = sample
        self._sampled: tuple[list[Any], Collator] | None = None

    def sample_rows(self, count: int) -> list[Any]:
        """Return a few samples."""
        return self._samples[0][:count]

    def spread_rows(self, count: int) -> list[Any]:
        """Return the same samples: the loader may map the dataset in any way."""
        return self.sample_rows(count)

    @property
    def collate_fn(self) -> Collator:
        """The collator of these samples."""
        return self._samples[1]

    @property
    def _samples(self) -> tuple[list[Any], Collator]:
        if self._sampled is None:
            self._sampled = self._sample()
        return self._sampled

    def slice_of(self, batch: Any) -> BatchSlice:
        """Return the whole batch as this process's slice. Assumes that other processes' batches are as large."""
        rows = batch_rows(with_name(batch), default=1)
        return BatchSlice(rows, rows * self._processes)

    def state_dict(self) -> dict[str, Any]:
        """Empty, because the loader's order is unknown."""
        return {}

    def load_state_dict(self, epoch: int, state: Mapping[str, Any]) -> None:
        """No effect: the user's loader has its own order."""

    def reslice(self, parts: int, index: int) -> None:
        """Check that each process takes its own batches."""
        assert parts == self._processes, (parts, index)

    def close(self) -> None:
        """No effect: the user owns the loader."""


TrainingBatches = NumberedBatches | GivenBatches
"""The batches of a training."""


def first_samples(dataset: Any, count: int) -> list[Any]:
    """Return the first samples of a dataset, repeated if it has fewer.

    Raises:
        ValueError: if the dataset is empty.
    """
    if isinstance(dataset, IterableDataset):
        samples = list(itertools.islice(iter(dataset), count))
    else:
        samples = [dataset[index] for index in range(min(count, len(dataset)))]
    return _repeated(samples, count, dataset)


def refuse_empty(dataset: Any) -> None:
    """Refuse a dataset without samples, if its length is known.

    Raises:
        ValueError: if the length is 0.
    """
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise ValueError(f"train_dataset ({type(dataset).__name__}) is empty. Pass one with at least one sample.")


def _repeated(samples: list[Any], count: int, dataset: Any) -> list[Any]:
    if not samples:
        raise ValueError(
            f"The dataset ({type(dataset).__name__}) is empty, or has less than one full batch and"
            " dataloader_drop_last=True, so there is no batch to infer shapes from. Pass more samples, or set"
            " dataloader_drop_last=False."
        )
    return (samples * count)[:count]


def _as_list(samples: list[Any]) -> list[Any]:
    return samples
