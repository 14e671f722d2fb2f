"""Create the activation cache when training begins. A probe on a few samples tells which outputs may be cached."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sized
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ..cache.activation_cache import ActivationCache
from ..cache.cache_probe import probe_boundaries, varied_samples
from ..cache.sharing import open_store
from ..data.numbered_batches import NumberedBatches, TrainingBatches
from ..model.micro_batch import Batch
from ..model.nested import on_device
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..planning.unit_times import ModelTimes
from ..randomness import seeded
from ..training_args import CACHE_DTYPES
from .cache_control import AutoCache
from .job import TrainingJob

SAMPLES_TO_PROBE = 32
"""Number of samples from which those are chosen that probe whether frozen layers can be cached."""
UNKNOWN_SIZE = 2**20
"""Number of samples assumed for a stream without a length."""

LEAST_CAPACITY = 4096
"""Minimum capacity of the key table, in samples.

In a smaller one several processes would more often write to the same bucket at once, and one of them would lose its
entry.
"""


def make_cache(
    job: TrainingJob, pipeline: ElasticPipeline, data: TrainingBatches, times: ModelTimes | None, generations: Path
) -> AutoCache:
    """Create the cache, which is off for layers whose outputs must not be cached. Collective over all processes.

    Args:
        job: the training job.
        pipeline: runs the model, which is complete.
        data: the training batches.
        times: times of the model's units, if they were measured.
        generations: the file that names the cache generations being read.

    Raises:
        ValueError: users other than this one can write to the folder `activation_cache_dir`.
    """
    args, trainer = job.args, job.trainer
    assert pipeline.freezable is not None
    collate = job.collator(data.collate_fn)
    not_in_keys = job.not_in_keys | pipeline.stack.runner.kept_back
    if isinstance(data, NumberedBatches):
        data.leave_out_of_keys(pipeline.stack.runner.kept_back)

    def loss_of(batch: Batch) -> torch.Tensor:
        with seeded(args.seed):  # methods that the user has overridden may draw random numbers
            inputs = dict(trainer._prepare_inputs(dict(batch)))
            with job.computing_loss():
                loss = trainer.compute_loss(job.model, inputs)
        assert isinstance(loss, torch.Tensor)
        return loss.mean()

    samples = varied_samples(data.spread_rows(SAMPLES_TO_PROBE), collate)
    with trainer.compute_loss_context_manager():
        verdicts = probe_boundaries(
            pipeline.stack, pipeline.freezable, samples, collate, ignored=not_in_keys, loss_of=loss_of
        )
    slots = {v.num_frozen: v.slot for v in verdicts if v.slot is not None}
    # probe_boundaries has refused a collator that cannot collate all of them together
    rows = on_device(collate(samples) if slots else {}, torch.device("cpu"))
    mesh = pipeline.mesh
    reasons: dict[int, str | None] = {}
    for reason in mesh.gather_objects({v.num_frozen: v.reason for v in verdicts}):
        reasons = {f: reasons.get(f) or reason[f] for f in reason}
    store = open_store(generations.parent, user=generations.stem)
    refusal = next(filter(None, mesh.gather_objects(store.why_refused())), None)
    if refusal is not None and args.activation_cache_dir is not None:
        raise ValueError(
            f"activation_cache_dir: the folder {generations.parent} cannot be used for the activation cache:"
            f" {refusal}. Set activation_cache_dir to a folder that only you can write to (chmod go-w), or to one that"
            " does not exist yet."
        )
    if refusal is not None:
        why = f"the folder {generations.parent} must be writable by this user only: {refusal}"
        reasons = {f: reasons[f] or why for f in reasons}
    store.limit(args.activation_cache_max_gib)
    storage_dtype = CACHE_DTYPES[args.activation_cache_dtype]
    cache = ActivationCache(
        pipeline.stack,
        slots,
        store,
        mesh.rank,
        max(_expected_samples(job), LEAST_CAPACITY),
        storage_dtype,
        pipeline.device,
        any(verdict.padded_left for verdict in verdicts),
        not_in_keys,
    )
    description = f"{describe_model(pipeline.model, job.mixed_precision)} {storage_dtype}"
    return AutoCache(
        pipeline,
        cache,
        store,
        reasons,
        is_forced=args.activation_cache == "on",
        seconds_per_row=[unit.forward.per_row for unit in times.units] if times is not None else None,
        # that of process 0: values without a fixed text representation differ between processes
        description=mesh.gather_objects(description)[0],
        current=generations,
        is_shared=args.activation_cache_dir is not None,
        rows=mesh.gather_objects(rows if mesh.rank == 0 else {})[0],
    )


def _expected_samples(job: TrainingJob) -> int:
    """Return the number of samples in all datasets; a stream counts as `UNKNOWN_SIZE`."""
    return sum(len(dataset) if isinstance(dataset, Sized) else UNKNOWN_SIZE for dataset in job.datasets)


def describe_model(model: nn.Module, precision: str, ignored: Collection[str] = ("_name_or_path",)) -> str:
    """Describe what a model's hidden states depend on besides weights and buffers, as far as it can be named."""
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
