"""The numbered loader gives every sample once and in one order, however often it is sliced anew.

Four ranks are played by four loaders in this process; K of them in a row form a pipeline.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from hf_pipetransformer.data.loaders import NumberedLoader
from hf_pipetransformer.data.numbered_batches import NumberedBatches
from hf_pipetransformer.data.sample_order import SampleOrder
from hf_pipetransformer.parts.prefix_cache.cache.content_keys import KeyingCollator

WORLD = 4
GLOBAL_BATCH = 16
SIZES = (83, 64, 65, 15, 3)

StagesAt = Callable[[int], int]  # batch number -> K


def changing(number: int) -> int:
    return (4, 2, 1, 2, 4, 1)[number % 6]


class Numbers(Dataset):
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Stream(IterableDataset):
    """The same without a length."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def make_loader(dataset: Dataset, collator: Callable = list, shuffle: bool = True, **options) -> NumberedLoader:
    sampler = None
    if not isinstance(dataset, IterableDataset):
        sampler = SeedableRandomSampler(dataset, data_seed=3) if shuffle else SequentialSampler(dataset)
    return NumberedLoader(NumberedBatches(dataset, SampleOrder(sampler, GLOBAL_BATCH), collator, **options))


def one_epoch(loaders: list[NumberedLoader], epoch: int, stages_at: StagesAt, skip: int = 0) -> list[list[int]]:
    """The global batches as the pipelines see them together; the ranks of a pipeline must see the same."""
    current = [skip_first_batches(loader, skip) if skip else loader for loader in loaders]
    for loader in current:  # as the Trainer does it
        for settable in (loader, getattr(loader.batch_sampler, "batch_sampler", None)):
            if hasattr(settable, "set_epoch"):
                settable.set_epoch(epoch)
    iterators = [iter(loader) for loader in current]
    batches: list[list[int]] = []
    for number in itertools.count(skip):
        stages = stages_at(number)
        rows, slices = [], []
        for rank, (loader, iterator) in enumerate(zip(loaders, iterators, strict=True)):
            loader.dataset.reslice(WORLD // stages, rank // stages)
            batch = next(iterator, None)
            part = loader.dataset.last_slice
            rows.append(batch[: part.rows] if batch is not None else None)
            slices.append(part)
        if rows[0] is None:
            assert rows == [None] * WORLD
            return batches
        assert all(rows[rank] == rows[rank - rank % stages] for rank in range(WORLD))
        batches.append([row for rank in range(0, WORLD, stages) for row in rows[rank]])
        assert all(part.global_rows == len(batches[-1]) for part in slices)


def in_batches(order: list[int], drop_last: bool = False) -> list[list[int]]:
    batches = [order[i : i + GLOBAL_BATCH] for i in range(0, len(order), GLOBAL_BATCH)]
    return [batch for batch in batches if len(batch) == GLOBAL_BATCH or not drop_last]


def shuffled_order(size: int, epoch: int) -> list[int]:
    sampler = SeedableRandomSampler(Numbers(size), data_seed=3)
    sampler.set_epoch(epoch)
    return list(sampler)


# ---------------------------------------------------------------------------------------------------------
# Every sample once, in the same order
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Numbers, Stream])
def test_every_sample_once_in_the_order_of_the_sampler(dataset):
    """An epoch in the middle has skipped batches, as in a resumed training."""
    for size, drop_last in itertools.product(SIZES, (False, True)):
        loaders = [make_loader(dataset(size), drop_last=drop_last) for _ in range(WORLD)]
        for epoch, skip in ((0, 0), (1, 0), (5, 2 if size > 64 else 0), (6, 0)):
            order = shuffled_order(size, epoch) if dataset is Numbers else list(range(size))
            assert one_epoch(loaders, epoch, changing, skip) == in_batches(order, drop_last)[skip:]
        told = loaders[0].dataset.dataset.epochs
        assert told == sorted(told) and set(told) == {0, 1, 5, 6}, "each before it is read"


def test_an_epoch_that_was_begun_on_two_nodes_ends_in_their_order() -> None:
    """With other nodes and batches, the begun epoch ends in the old order; the next epoch has the new order."""

    def batches(shares: tuple[int, ...], rows: int) -> NumberedBatches:
        sampler = SeedableRandomSampler(Numbers(64), data_seed=3)
        return NumberedBatches(Numbers(64), SampleOrder(sampler, rows, node_shares=shares), list)

    before, undisturbed, after = batches((2, 2), 16), batches((2, 2), 16), batches((1,), 8)
    seen = [row for number in range(2) for row in before[number]]
    after.load_state_dict(0, before.state_dict())
    seen += [row for number in range(4, 8) for row in after[number]]
    assert seen == [row for number in range(4) for row in undisturbed[number]]
    for own in (after, fresh := batches((1,), 8)):
        own.set_epoch(1)
    assert [after[number] for number in range(8)] == [fresh[number] for number in range(8)]
    state = after.state_dict()
    assert state["shares"] == (1,) and state["rows"] == 8


def test_workers():
    """A new slice starts the workers again; they fetch the same batches again."""
    options = {"shuffle": False, "num_workers": 2, "persistent_workers": True}
    loaders = [make_loader(Numbers(83), **options) for _ in range(WORLD)]
    for epoch in range(2):
        assert one_epoch(loaders, epoch, lambda number: 4 if number < 3 else 1) == in_batches(list(range(83)))


class Wrapped:
    """A collator around the loader's, as a callback sets it."""

    def __init__(self, inner: Callable) -> None:
        self.inner = inner

    def __call__(self, rows: list[int]) -> list[int]:
        return [-row for row in self.inner(rows)]


def test_a_wrapped_collator_gets_samples_also_in_spawned_workers():
    for num_workers in (0, 1):
        workers = {"num_workers": 1, "multiprocessing_context": "spawn"} if num_workers else {}
        loader = make_loader(Numbers(32), shuffle=False, **workers)
        loader.collate_fn = Wrapped(loader.collate_fn)
        assert [row for batch in loader for row in batch] == [-row for row in range(32)]
        alive = weakref.ref(loader)
        del loader
        assert alive() is None


# ---------------------------------------------------------------------------------------------------------
# Lengths, epochs, samplers
# ---------------------------------------------------------------------------------------------------------


def test_passes_whose_epoch_nobody_sets():
    """A user's wrapper without `set_epoch`; the loop knows the length and may not ask for more than the last batch.

    As with Accelerate's loader, each pass that is read to its end is followed by one in another order.
    """
    data = Numbers(83)
    for sampler in (RandomSampler, partial(SeedableRandomSampler, data_seed=3)):
        orders = [SampleOrder(sampler(data), GLOBAL_BATCH, seed=1) for _ in range(2)]
        loaders = [NumberedLoader(NumberedBatches(data, order, list)) for order in orders]
        found = []
        for _ in range(3):
            read = []
            for seed, loader in enumerate(loaders):  # two processes; their own random states do not matter
                torch.manual_seed(seed)
                read.append(list(itertools.chain(*loader)))
            assert read[0] == read[1] and sorted(read[0]) == list(range(83))
            found.append(read[0])
        assert found[0] != found[1] and found[1] != found[2] and found[0] != found[2]


# ---------------------------------------------------------------------------------------------------------
# The first rows, read before training
# ---------------------------------------------------------------------------------------------------------


class OneShotStream(Stream):
    """Gives its samples once in its life, as a socket would."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.samples = super().__iter__()

    def __iter__(self) -> Iterator[int]:
        return self.samples


def test_looking_at_the_first_rows_of_a_one_shot_stream_loses_nothing():
    loaders = [make_loader(OneShotStream(83)) for _ in range(WORLD)]
    for loader in loaders:
        assert loader.dataset.sample_rows(4) == [0, 1, 2, 3]
        assert loader.dataset.sample_rows(2) == [0, 1]
        loader.dataset.wrap_collator(partial(KeyingCollator, ignored=frozenset({"weights"})))  # keys of fewer inputs
    assert one_epoch(loaders, 0, changing, 2) == in_batches(list(range(83)))[2:]


def test_too_few_samples_are_an_error_that_names_the_dataset() -> None:
    for dataset, message in ((Numbers(0), "Numbers.* is empty"), (Stream(3), "Stream.*dataloader_drop_last")):
        with pytest.raises(ValueError, match=message):
            make_loader(dataset, shuffle=False, drop_last=True).dataset.sample_rows(2)
