"""The numbered loader gives every sample once and in one order, however often it is sliced anew.

Four ranks are played by four loaders in this process; K of them in a row form a pipeline.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import numpy
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from hf_pipetransformer.data.loaders import NumberedLoader
from hf_pipetransformer.data.numbered_batches import BatchSlice, NumberedBatches
from hf_pipetransformer.data.sample_order import SampleOrder

WORLD = 4
GLOBAL_BATCH = 16
SIZES = (83, 64, 65, 15, 3)

StagesAt = Callable[[int], int]  # batch number -> K
LAYOUTS: dict[str, StagesAt] = {
    "2 stages": lambda number: 2,
    "another at every batch": lambda number: (4, 2, 1, 2, 4, 1)[number % 6],
}


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
    """The same without a length; workers take turns batch by batch, as the loader asks them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        return iter(range(worker.id if worker else 0, self.size, worker.num_workers if worker else 1))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


class OneShotStream(IterableDataset):
    """Gives its samples once in its life, as a socket would."""

    def __init__(self, size: int) -> None:
        self.samples = iter(range(size))

    def __iter__(self) -> Iterator[int]:
        return self.samples


def draw() -> tuple[float, float, float]:
    return random.random(), torch.rand(()).item(), numpy.random.rand()


class AugmentedNumbers(Numbers):
    def __getitem__(self, index: int) -> tuple:
        return index, *draw()


class AugmentedStream(Stream):
    def __iter__(self) -> Iterator[tuple]:
        return ((index, *draw()) for index in super().__iter__())


def masking_collator(samples: list) -> dict:
    """Draws random numbers, as the one for masked language modelling does."""
    return {"samples": samples, "mask": torch.rand(len(samples)).tolist(), "drawn": draw()}


def make_loader(dataset: Dataset, collator: Callable = list, shuffle: bool = True, **options) -> NumberedLoader:
    sampler = None
    if not isinstance(dataset, IterableDataset):
        sampler = SeedableRandomSampler(dataset, data_seed=3) if shuffle else SequentialSampler(dataset)
    order = SampleOrder(sampler, GLOBAL_BATCH, **{n: options.pop(n) for n in ("seed", "agree") if n in options})
    return NumberedLoader(NumberedBatches(dataset, order, collator, **options))


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dataset", [Numbers, Stream])
def test_every_sample_once_in_the_order_of_the_sampler(dataset, layout):
    for size, drop_last in itertools.product(SIZES, (False, True)):
        loaders = [make_loader(dataset(size), drop_last=drop_last) for _ in range(WORLD)]
        for epoch in range(2):
            order = shuffled_order(size, epoch) if dataset is Numbers else list(range(size))
            assert one_epoch(loaders, epoch, LAYOUTS[layout]) == in_batches(order, drop_last)


@pytest.mark.parametrize("dataset", [Numbers, Stream, SizedStream])
def test_skipping_on_resume(dataset):
    loaders = [make_loader(dataset(83)) for _ in range(WORLD)]
    for epoch, skip in ((5, 2), (6, 0)):
        order = shuffled_order(83, epoch) if dataset is Numbers else list(range(83))
        assert one_epoch(loaders, epoch, LAYOUTS["another at every batch"], skip) == in_batches(order)[skip:]


def test_an_epoch_that_was_begun_on_two_nodes_ends_in_their_order() -> None:
    """Whatever the nodes and the batches are now; the next epoch has the order of its own nodes."""

    def batches(shares: tuple[int, ...], rows: int) -> NumberedBatches:
        sampler = SeedableRandomSampler(Numbers(64), data_seed=3)
        return NumberedBatches(Numbers(64), SampleOrder(sampler, rows, node_shares=shares), list)

    before, undisturbed, after = batches((2, 2), 16), batches((2, 2), 16), batches((1,), 8)
    seen = [row for number in range(2) for row in before[number]]
    after.keep_order(0, **before.memory)
    seen += [row for number in range(4, 8) for row in after[number]]
    assert seen == [row for number in range(4) for row in undisturbed[number]]
    for own in (after, fresh := batches((1,), 8)):
        own.set_epoch(1)
    assert [after[number] for number in range(8)] == [fresh[number] for number in range(8)]
    assert after.memory["shares"] == (1,) and after.memory["rows"] == 8


@pytest.mark.parametrize(("dataset", "options"), [(Numbers, {"persistent_workers": True}), (Stream, {})])
def test_workers(dataset, options):
    """A new slice starts the workers over; what they had fetched ahead is fetched again."""
    loaders = [make_loader(dataset(83), shuffle=False, num_workers=2, **options) for _ in range(WORLD)]
    for epoch in range(2):
        batches = one_epoch(loaders, epoch, lambda number: 4 if number < 3 else 1)
        assert sorted(itertools.chain(*batches)) == list(range(83))
        if dataset is Numbers:
            assert batches == in_batches(list(range(83)))


# ---------------------------------------------------------------------------------------------------------
# Lengths, epochs, samplers
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [Numbers, Stream])
def test_epochs_reach_the_dataset_before_it_is_read(dataset):
    loader = make_loader(dataset(20))
    loader.dataset.sample_rows(2)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        list(loader)
    assert sorted(set(loader.dataset.dataset.epochs)) == [0, 1]
    assert loader.dataset.dataset.epochs == sorted(loader.dataset.dataset.epochs)


@pytest.mark.parametrize("has_a_seed", [True, False])
def test_an_order_that_depends_on_the_number_of_processes_is_told(has_a_seed, caplog):
    """On one process the global generator draws it, as in the stock Trainer; on several it is seeded for that."""
    data = Numbers(83)

    def lines(draws_as_stock: bool) -> list[str]:
        sampler = SeedableRandomSampler(data, data_seed=3) if has_a_seed else RandomSampler(data)
        order = SampleOrder(sampler, GLOBAL_BATCH, draws_as_stock=draws_as_stock)
        loader = NumberedLoader(NumberedBatches(data, order, list))
        caplog.clear()
        with caplog.at_level("INFO", "hf_pipetransformer"):
            for epoch in range(2):
                loader.set_epoch(epoch)
                list(loader)
        return [record.getMessage() for record in caplog.records if "global random generators" in record.getMessage()]

    assert not lines(draws_as_stock=True)
    assert len(lines(draws_as_stock=False)) == (0 if has_a_seed else 1)


@pytest.mark.parametrize("reads_to_the_end", [True, False])
def test_passes_whose_epoch_nobody_sets(reads_to_the_end):
    """A user's wrapper without `set_epoch`; the loop knows the length and may not ask for more than the last batch.

    As with Accelerate's loader: only a sampler that is told the epoch gives the same order in a pass after one that
    was not read to its end.
    """
    data = Numbers(83)

    def passes(sampler: Callable[[], Sampler]) -> list[list[int]]:
        orders = [SampleOrder(sampler(), GLOBAL_BATCH, seed=1) for _ in range(2)]
        loaders = [NumberedLoader(NumberedBatches(data, order, list)) for order in orders]
        found = []
        for _ in range(3):
            orders = []
            for seed, loader in enumerate(loaders):  # two processes, whose own random states say nothing
                torch.manual_seed(seed)
                batches = iter(loader)
                read = list(batches) if reads_to_the_end else [next(batches) for _ in range(len(loader))]
                orders.append(list(itertools.chain(*read)))
            assert orders[0] == orders[1]
            found.append(orders[0])
        assert all(sorted(order) == list(range(83)) for order in found)
        return found

    first, second, third = passes(lambda: RandomSampler(data))
    assert first != second and second != third and first != third
    first, second, _ = passes(lambda: SeedableRandomSampler(data, data_seed=3))
    assert (first == second) == (not reads_to_the_end)


def test_the_order_is_agreed_upon_once_per_epoch():
    asked = []

    def reversed_by_rank_zero(order: Sequence[int]) -> Sequence[int]:
        asked.append(list(order))
        return order[::-1]

    loader = make_loader(Numbers(40), shuffle=False, agree=reversed_by_rank_zero)
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert list(itertools.chain(*loader)) == list(range(39, -1, -1))
    assert asked == [list(range(40))] * 2


# ---------------------------------------------------------------------------------------------------------
# Random numbers
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dataset", "workers"), [(AugmentedNumbers, 2), (AugmentedStream, 0)])
def test_random_draws_are_the_same_within_a_pipeline(dataset, workers):
    """K = 4 for two batches, then K = 2. The ranks' own random states differ, and stay as they are."""
    loaders = [make_loader(dataset(83), masking_collator, num_workers=workers) for _ in range(WORLD)]
    for loader in loaders:
        loader.set_epoch(0)
    iterators = [iter(loader) for loader in loaders]
    for number in range(5):
        stages = 4 if number < 2 else 2
        batches = []
        for rank in range(WORLD):
            loaders[rank].dataset.reslice(WORLD // stages, rank // stages)
            random.seed(100 + rank), torch.manual_seed(100 + rank), numpy.random.seed(100 + rank)
            expected = draw()
            random.seed(100 + rank), torch.manual_seed(100 + rank), numpy.random.seed(100 + rank)
            batches.append(next(iterators[rank]))
            assert draw() == expected
        for rank in range(WORLD):
            assert batches[rank] == batches[rank - rank % stages]
        if stages == 2:
            assert batches[0]["mask"] != batches[2]["mask"], "two pipelines draw different masks"


# ---------------------------------------------------------------------------------------------------------
# The first rows, read before training
# ---------------------------------------------------------------------------------------------------------


def test_looking_at_the_first_rows_of_a_one_shot_stream_loses_nothing():
    loaders = [make_loader(OneShotStream(83)) for _ in range(WORLD)]
    for loader in loaders:
        assert loader.dataset.sample_rows(4) == [0, 1, 2, 3]
        assert loader.dataset.sample_rows(2) == [0, 1]
        loader.dataset.key_by(frozenset({"weights"}))  # keys of fewer inputs
    assert one_epoch(loaders, 0, LAYOUTS["another at every batch"], 2) == in_batches(list(range(83)))[2:]


@pytest.mark.parametrize("dataset", [AugmentedNumbers, AugmentedStream])
def test_first_rows_are_the_same_everywhere_and_draw_nothing_from_the_run(dataset):
    def rows(rank: int) -> list:
        torch.manual_seed(rank), random.seed(rank), numpy.random.seed(rank)
        sampled = make_loader(dataset(20)).dataset.sample_rows(4)
        after = draw()
        torch.manual_seed(rank), random.seed(rank), numpy.random.seed(rank)
        assert draw() == after
        return sampled

    assert rows(0) == rows(1)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Numbers(0), "Numbers.* is empty"),
        (Stream(0), "Stream.* is empty"),
        (Stream(3), "Stream.*dataloader_drop_last"),  # ends before the first whole batch
    ],
)
def test_too_few_samples_are_an_error_that_names_the_dataset(dataset: Dataset, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_loader(dataset, shuffle=False, drop_last=True).dataset.sample_rows(2)


def test_rows_fetched_together():
    class Table(Numbers):
        def __getitems__(self, rows: list[int]) -> list[int]:
            assert type(rows) is list  # `datasets` looks at the type
            return [10 * row for row in rows]

    assert list(itertools.chain(*make_loader(Table(20), shuffle=False))) == [10 * row for row in range(20)]


@pytest.mark.parametrize("dataset", [Numbers(40), Stream(40)], ids=["map", "stream"])
def test_the_next_slice_is_known_ahead(dataset: Dataset) -> None:
    """40 samples are batches of 16, 16 and 8; of each, this pipeline takes the second half."""
    loader = make_loader(dataset, shuffle=False)
    loader.dataset.reslice(2, 1)
    ahead = []
    for batch in loader:
        following = loader.dataset.next_slice
        ahead.append((batch[0], following and (following.rows, following.global_rows)))
    assert ahead == [(8, (8, 16)), (24, (4, 8)), (36, None)]
    batches = iter(loader)
    next(batches)
    loader.dataset.reslice(4, 3)
    assert next(batches) == list(range(28, 32)) and loader.dataset.last_slice == BatchSlice(4, 16)
