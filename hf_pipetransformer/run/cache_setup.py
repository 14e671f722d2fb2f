"""The cache of a training that begins: which outputs of frozen layers may be kept is tried on a few rows."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sized
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ..cache.activation_cache import ActivationCache
from ..cache.activation_store import ActivationStore
from ..cache.cache_probe import probe_boundaries, varied_samples
from ..cache.sharing import size_limit
from ..model.micro_batch import Batch, on_device
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

LEAST_CAPACITY = 4096
"""In a small table processes would more often write to one bucket at once, and one of them would lose a row."""


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

    Raises:
        ValueError: the user's folder is not the user's alone to write.
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
    slots = {v.num_frozen: v.slot for v in verdicts if v.slot is not None}
    # a collator that cannot take them together has been refused above
    rows = on_device(collate(samples) if slots else {}, torch.device("cpu"))
    mesh = pipeline.mesh
    reasons: dict[int, str | None] = {}
    for reason in mesh.gather_objects({v.num_frozen: v.reason for v in verdicts}):
        reasons = {f: reasons.get(f) or reason[f] for f in reason}
    store = ActivationStore(generations.parent, user=generations.stem)
    refusal = next(filter(None, mesh.gather_objects(store.why_refused())), None)
    if refusal is not None and args.activation_cache_dir is not None:
        raise ValueError(
            f"activation_cache_dir: the folder {store.folder} cannot hold activations: {refusal}. Give a folder of"
            " your own that only you can write to (chmod go-w), or one that does not exist yet."
        )
    if refusal is not None:
        why = f"the folder {store.folder} is not this user's alone to write: {refusal}"
        reasons = {f: reasons[f] or why for f in reasons}
    store.max_bytes = size_limit(store, args.activation_cache_max_gib)
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
        job.not_in_keys,
    )
    description = f"{describe_model(pipeline.model, job.mixed_precision)} {storage_dtype}"
    return AutoCache(
        pipeline,
        cache,
        store,
        reasons,
        is_forced=args.activation_cache == "on",
        seconds_per_row=[unit.forward.per_row for unit in times.units] if times is not None else None,
        # the first process's: what has no fixed text differs between them
        description=mesh.gather_objects(description)[0],
        current=generations,
        is_shared=args.activation_cache_dir is not None,
        rows=mesh.gather_objects(rows if mesh.rank == 0 else {})[0],
    )


def _expected_samples(job: TrainingJob) -> int:
    """Of all data sets; of a stream a guess."""
    return sum(len(dataset) if isinstance(dataset, Sized) else UNKNOWN_SIZE for dataset in job.datasets)


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
