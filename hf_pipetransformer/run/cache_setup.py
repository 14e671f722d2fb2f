"""The cache of a training that begins: which outputs of frozen layers may be kept is tried on a few rows."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path

import torch

from ..cache.cache_probe import probe_boundaries, varied_samples
from ..model.micro_batch import Batch
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..planning.unit_times import ModelTimes
from ..randomness import seeded
from ..training_args import CACHE_DTYPES
from .cache_control import AutoCache
from .job import TrainingJob
from .setup import TrainingData

SAMPLES_TO_PROBE = 32
"""Samples among which those are chosen on which it is tried whether frozen layers can be cached."""
UNKNOWN_SIZE = 2**20
"""Samples that are expected of a stream."""


def make_cache(
    job: TrainingJob, pipeline: ElasticPipeline, data: TrainingData, times: ModelTimes | None, generations: Path
) -> AutoCache:
    """The cache; it knows whether the model allows it. Collective over all processes.

    Args:
        job: the training.
        pipeline: the model, whole.
        data: of the training.
        times: of the model's parts, where they were measured.
        generations: file that names what is read from the cache.
    """
    args, trainer = job.args, job.trainer
    assert pipeline.freezable is not None
    collate = job.collator(data.collate_fn)

    def loss_of(batch: Batch) -> torch.Tensor:
        with seeded(args.seed):  # what the user's methods make of the inputs may be random
            loss = trainer.compute_loss(job.model, dict(trainer._prepare_inputs(dict(batch))))
        assert isinstance(loss, torch.Tensor)
        return loss.mean()

    samples = varied_samples(data.spread_rows(SAMPLES_TO_PROBE), collate)
    with trainer.compute_loss_context_manager():
        verdicts = probe_boundaries(
            pipeline.stack, pipeline.freezable, samples, collate, ignored=job.not_in_keys, loss_of=loss_of
        )
    return AutoCache.make(
        pipeline,
        verdicts,
        current=generations,
        is_shared=args.activation_cache_dir is not None,
        max_gib=args.activation_cache_max_gib,
        storage_dtype=CACHE_DTYPES[args.activation_cache_dtype],
        capacity=sum(len(dataset) if isinstance(dataset, Sized) else UNKNOWN_SIZE for dataset in job.datasets),
        is_forced=args.activation_cache == "on",
        seconds_per_row=[unit.forward.per_row for unit in times.units] if times is not None else None,
        precision=job.mixed_precision,
        # a collator that cannot take them together has been refused above
        rows=collate(samples) if any(verdict.slot is not None for verdict in verdicts) else {},
        ignored=job.not_in_keys,
    )
