"""The data loaders: the training loader, which yields numbered batches, and the evaluation loaders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ..data.loaders import LoaderWithoutTags, NumberedLoader
from ..data.node_order import Order, node_name, node_shares
from ..data.numbered_batches import (
    GivenBatches,
    NumberedBatches,
    TrainingBatches,
    refuse_empty,
)
from ..data.sample_order import SampleOrder
from ..model.method_override import having
from ..resilience.worker_start import WorkerStart
from .job import TrainingJob, whole_stream


def training_loader(
    job: TrainingJob, make_stock: Callable[[], DataLoader], keeps_nodes: bool, is_alone: bool = False
) -> NumberedLoader | DataLoader:
    """Return the training loader. Each pipeline takes its slice of every batch. Collective over all processes.

    If a batch sampler of another library groups the batches (sentence-transformers' batches without duplicates), this
    is the stock Trainer's loader, and each process takes its own batches from it.

    Args:
        job: the training job.
        make_stock: makes the stock Trainer's loader, with its columns, collator and (seedable) sampler.
        keeps_nodes: whether each node gets the same samples in every epoch, because it may cache their outputs.
        is_alone: whether a process may ask alone, in a callback; then it is not collective.

    Raises:
        ValueError: the dataset is empty, or batches are grouped in a way of their own and there are several stages.
    """
    args = job.args
    refuse_empty(job.trainer.train_dataset)
    accelerator = job.trainer.accelerator
    with having(accelerator, prepare=partial(_prepared, job, accelerator.prepare)):
        stock = make_stock()  # another library's, if one of its classes follows ours
    if not isinstance(stock, DataLoader):
        return stock
    dataset = stock.dataset
    is_iterable = isinstance(dataset, IterableDataset)
    if is_iterable:
        dataset = whole_stream(dataset)
    elif (grouped := _groups_batches(stock)) is not None:
        if job.args.uses_pipeline:
            raise ValueError(
                f"The training DataLoader groups its samples by a {grouped}, so its batches cannot be divided among"
                " pipelines. Use a sampler instead of a batch sampler, or set pipeline_parallel_size=1."
            )
        return stock
    nodes = job.mesh.gather_objects(node_name()) if keeps_nodes else []  # the node of each rank
    batches = _batch_sampler_of(stock)
    order = SampleOrder(
        None if is_iterable else batches.sampler,
        (getattr(batches, "batch_size", None) or job.trainer._train_batch_size) * args.world_size,
        seed=args.data_seed if args.data_seed is not None else args.seed,
        node_shares=node_shares(nodes) if keeps_nodes else (1,),
        agree=(lambda order: order) if is_alone else partial(_order_of_first, job),
        # several processes would draw different numbers, and the order must not depend on the layout
        draws_as_stock=args.world_size == 1,
    )
    return NumberedLoader(
        NumberedBatches(
            dataset,
            order,
            stock.collate_fn,
            drop_last=args.dataloader_drop_last if is_iterable else batches.drop_last,
            most_batches=args.max_steps * args.gradient_accumulation_steps if args.max_steps > 0 else None,
            num_workers=args.dataloader_num_workers,
            pin_memory=stock.pin_memory,
            worker_init_fn=WorkerStart(stock.worker_init_fn),
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=stock.multiprocessing_context,
        )
    )


def batches_of_loop(job: TrainingJob, dataloader: Any, made: NumberedLoader | None) -> TrainingBatches:
    """The batches that the loop reads.

    Args:
        job: the training.
        dataloader: the loader that the loop iterates over.
        made: the latest loader that `numbered_loader` has made; the loop's may be a user's wrapper around it.

    Raises:
        ValueError: as `given_batches`.
    """
    if isinstance(dataloader, NumberedLoader):
        dataloader.is_of_loop = True
        return dataloader.dataset
    return made.dataset if made is not None else given_batches(job, dataloader)


def given_batches(job: TrainingJob, dataloader: Any) -> GivenBatches:
    """Return the batches of a training loader that the user has made. Collective over all processes.

    Raises:
        ValueError: there are several stages, or the processes' loaders have different lengths.
    """
    if job.args.uses_pipeline:
        raise ValueError(
            "The training DataLoader was not created by PipeTransformerTrainer.get_train_dataloader, so its batches"
            " cannot be distributed over pipelines. Pass train_dataset and data_collator (or override"
            " _get_train_sampler) instead of overriding get_train_dataloader, or set pipeline_parallel_size=1."
        )
    try:
        length = len(dataloader)
    except TypeError:  # a stream
        length = None
    refuse_different_numbers(job, length, "")
    dataset = getattr(dataloader, "dataset", None)
    return GivenBatches(dataset, job.args.world_size, partial(job.rows_of_loader, dataloader))


def refuse_different_numbers(job: TrainingJob, mine: int | None, when: str) -> None:
    """Compare how many batches the processes' own loaders have given or will give. Collective over all processes.

    Raises:
        ValueError: the numbers differ: some processes would wait for others that have no batch any more.
    """
    everyone = job.mesh.gather_objects(mine)
    rank = next((rank for rank, number in enumerate(everyone) if number != everyone[0]), None)
    if rank is not None:
        raise ValueError(
            f"The training DataLoaders of the processes have different numbers of batches{when}: process 0 has"
            f" {everyone[0]}, process {rank} has {everyone[rank]}. Give every process the same number of batches, for"
            " example with drop_last=True."
        )


def evaluation_loader(job: TrainingJob, loader: Any) -> Any:
    """Return the stock loader with workers that survive a SIGTERM, and without tags in its batches."""
    shield_workers_from_sigterm(loader)
    # persistent workers keep the collator that they started with, and user code that iterates must not see keys
    keeps_keys = job.may_cache and job.args.dataloader_persistent_workers
    return LoaderWithoutTags(loader) if keeps_keys else loader


def shield_workers_from_sigterm(loader: Any) -> None:
    """Make a loader's workers leave the process group that receives SIGTERM."""
    base = getattr(loader, "base_dataloader", loader)
    if isinstance(base, DataLoader) and not isinstance(base.worker_init_fn, WorkerStart):
        base.worker_init_fn = WorkerStart(base.worker_init_fn)


def may_cache(job: TrainingJob, is_training: bool = True) -> bool:
    """Whether frozen layers' outputs may be cached.

    Collective over all processes during training, because the answer depends on the weights on each process. Not
    collective outside of training, where a process may ask for a loader alone.
    """
    return all(job.mesh.gather_objects(job.may_cache)) if is_training else job.may_cache


def _prepared(job: TrainingJob, prepare: Callable[..., Any], *given: Any, **keywords: Any) -> Any:
    """Prepare the stock Trainer's loader. On several processes it stays as it is if only its parts are used.

    Accelerate would give each process its shard of a stream, and a sampler a generator that no checkpoint contains.
    """
    if job.args.world_size > 1 and len(given) == 1 and isinstance(given[0], DataLoader):
        loader = given[0]
        is_stream = isinstance(loader.dataset, IterableDataset)
        is_plain = not job.trainer.accelerator.use_seedable_sampler
        if is_stream or (is_plain and _groups_batches(loader) is None):
            return loader
    return prepare(*given, **keywords)


def _order_of_first(job: TrainingJob, order: Order) -> Order:
    """Return rank 0's order on all processes, because a sampler may draw differently on each process."""
    if not job.is_connected or job.mesh.world_size == 1 or isinstance(order, range):
        return order
    theirs: Order = job.mesh.broadcast_tensor(torch.as_tensor(order, dtype=torch.int64), source=0).numpy()
    return theirs


def _groups_batches(loader: DataLoader) -> str | None:
    """Return the class of a batch sampler that does more than cut a sampler's order into batches, otherwise None."""
    kind = type(_batch_sampler_of(loader))
    return None if getattr(kind, "__iter__", None) is BatchSampler.__iter__ else kind.__name__


def _batch_sampler_of(loader: DataLoader) -> Any:
    """Return the batch sampler, without Accelerate's wrappers around it."""
    batch_sampler: Any = loader.batch_sampler
    while hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler
