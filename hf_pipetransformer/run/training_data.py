"""The loaders: that of the training, taken apart into numbered batches, and those of evaluations."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..cache.content_keys import KeyingCollator
from ..cache.sharing import ReadAhead, current_file, node_name, node_shares
from ..data.numbered_batches import GivenBatches, KeysApart, NumberedBatches, NumberedLoader, refuse_empty
from ..resilience.preemption import WorkerStart
from .job import TrainingJob, whole_stream

CACHE_FOLDER = "_activation_cache"
"""In `output_dir`. What begins so is not pushed to the Hub."""


def numbered_loader(
    job: TrainingJob, make_stock: Callable[[], DataLoader], generations: Path | None
) -> NumberedLoader:
    """The training's loader, of which each pipeline takes its slice. Collective over all processes.

    Args:
        job: the training.
        make_stock: makes the stock Trainer's loader, which has chosen columns, collator and (seedable) sampler.
        generations: as `generations_file` returns it; None: nothing is cached.

    Raises:
        ValueError: the dataset is empty.
    """
    args = job.args
    refuse_empty(job.trainer.train_dataset)
    stock = make_stock()
    dataset = stock.dataset
    is_iterable = isinstance(dataset, IterableDataset)
    if is_iterable:
        dataset = whole_stream(dataset)
    nodes = job.mesh.gather_objects(node_name()) if generations is not None else []  # of each rank
    return NumberedLoader(
        NumberedBatches(
            dataset,
            None if is_iterable else _sampler_of(stock),
            stock.collate_fn,
            job.trainer._train_batch_size * args.world_size,
            drop_last=args.dataloader_drop_last,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            keyed=partial(keying_collator, job, generations) if generations is not None else None,
            node_shares=node_shares(nodes) if generations is not None else (1,),
            agree=partial(_order_of_first, job),
            # several processes have drawn different numbers, and the order is to be that of any layout
            draws_as_stock=args.world_size == 1,
            num_workers=args.dataloader_num_workers,
            pin_memory=stock.pin_memory,
            worker_init_fn=WorkerStart(stock.worker_init_fn),
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=stock.multiprocessing_context,
        )
    )


def given_batches(job: TrainingJob, dataloader: Any) -> GivenBatches:
    """Of a training loader that the user has made.

    Raises:
        ValueError: there are several processes or stages, or layers freeze.
    """
    if job.mesh.world_size > 1 or job.args.uses_pipeline or job.freeze_callback is not None:
        raise ValueError(
            "The training loader was not made by PipeTransformerTrainer.get_train_dataloader, so it cannot be"
            " divided among pipelines, nor its samples be found again when layers freeze. Pass train_dataset"
            " and data_collator (or override _get_train_sampler) instead of overriding get_train_dataloader."
        )
    return GivenBatches(getattr(dataloader, "dataset", None), partial(job.rows_of_loader, dataloader))


def evaluation_loader(job: TrainingJob, loader: Any) -> Any:
    """The stock one, whose workers outlive a SIGTERM; without keys in its batches, whoever iterates."""
    set_workers_apart(loader)
    # workers that last keep the collator that they began with: whoever iterates is to see no keys
    keeps_keys = job.may_cache and job.args.dataloader_persistent_workers
    return KeysApart(loader) if keeps_keys else loader


def set_workers_apart(loader: Any) -> None:
    """Let a loader's workers leave the process group, which is sent SIGTERM."""
    base = getattr(loader, "base_dataloader", loader)
    if isinstance(base, DataLoader) and not isinstance(base.worker_init_fn, WorkerStart):
        base.worker_init_fn = WorkerStart(base.worker_init_fn)


def generations_file(job: TrainingJob) -> Path | None:
    """The file that names what is read from the cache; None: nothing is cached. Collective over all processes."""
    if not job.may_cache:
        return None
    nodes = job.mesh.gather_objects(node_name())
    # processes share it, even if each was given a temporary output_dir of its own
    output_dir = job.mesh.gather_objects(job.args.output_dir or ".")[0]
    folder = job.args.activation_cache_dir or os.path.join(output_dir, CACHE_FOLDER)
    return current_file(folder, output_dir, nodes)


def keying_collator(job: TrainingJob, generations: Path, collate_fn: Any) -> KeyingCollator:
    """The user's collator, which adds each row's key for the cache.

    Args:
        job: the training.
        generations: as `generations_file` returns it.
        collate_fn: the user's.
    """
    return KeyingCollator(collate_fn, ReadAhead(generations), job.not_in_keys)


def _order_of_first(job: TrainingJob, order: list[int]) -> list[int]:
    """Rank 0's order: a sampler may draw what it likes."""
    if job.mesh.world_size == 1:
        return order
    return job.mesh.broadcast_tensor(torch.tensor(order, dtype=torch.int64), source=0).tolist()


def _sampler_of(loader: DataLoader) -> Any:
    """The sampler over all samples, below the batch samplers that Accelerate has put around it for its processes."""
    batch_sampler: Any = loader.batch_sampler
    while hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler.sampler
