"""Creates the activation cache when training begins. A probe on a few samples decides which outputs may be cached."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import pad

from ...data.node_order import node_name
from ...data.numbered_batches import NumberedBatches, TrainingBatches
from ...logs import log_once
from ...model.example_inputs import ExampleInputs, made_inputs
from ...model.left_as_found import left_as_found
from ...model.micro_batch import Batch
from ...model.nested import on_device
from ...planning.costs import UnitCost
from ...planning.tables import MIB
from ...randomness import seeded
from ...run.job import TrainingJob
from ...run.setup.placing import Findings
from ...run.setup.probing import SampleCollator
from ...training_args import CACHE_DTYPES
from .cache.activation_cache import ActivationCache
from .cache.activation_files import FORMAT_VERSION
from .cache.cache_probe import probe_boundaries
from .cache.content_keys import KeyingCollator, sequences_per_sample
from .cache.file_store import FileStore
from .cache.known_code import UsersHooks
from .cache.probe_batches import Collator, varied_samples
from .cache_control import HARDLY_ANY, AutoCache

logger = logging.getLogger(__name__)

MADE_TOKENS = (4, 13, 3)
"""Numbers of tokens of generated samples, as a range: 4, 7, 10."""
SAMPLES_TO_PROBE = 32
"""Number of candidate samples for the probe of the cache."""


def check_folder(
    job: TrainingJob, data: TrainingBatches, unit_costs: Sequence[UnitCost], generations: Path
) -> str | None:
    """Return why the cache's folder cannot be used, or None. Collective over all processes.

    Args:
        job: the training job.
        data: the training batches.
        unit_costs: costs of the model's units, for the length of the longest of a few samples.
        generations: a path in the folder.

    Raises:
        ValueError: the folder cannot be used, with `activation_cache="on"`; or others may write to it. All processes
            raise it.
    """
    store, mesh, args = FileStore(generations.parent, user=generations.stem), job.mesh, job.args
    nodes: list[str] = mesh.gather_objects(node_name())
    needed = max(epoch_bytes(job, data, unit_costs, nodes), default=None)
    found = _trouble_with(store, needed) if nodes.index(node_name()) == mesh.rank else None
    trouble = next(filter(None, mesh.gather_objects(found)), None)
    if trouble is None:
        return None
    why, must_end = trouble
    if args.activation_cache == "on" or (must_end and args.activation_cache_dir is not None):
        raise ValueError(why)
    log_once(logger, logging.WARNING, "The activation cache is off: %s", why)
    return why


def epoch_bytes(
    job: TrainingJob, data: TrainingBatches, unit_costs: Sequence[UnitCost], nodes: Sequence[str]
) -> list[int]:
    """Return a node's bytes per epoch at each boundary between units; empty if the number of samples is unknown."""
    if not isinstance(data.dataset, Sized):
        return []
    dtype = CACHE_DTYPES[job.args.activation_cache_dtype]
    half = 2 if dtype == torch.bfloat16 and job.mixed_precision == "no" else 1
    return [len(data.dataset) * unit.boundary_bytes // half // len(set(nodes)) for unit in unit_costs[:-1]]


def _trouble_with(store: FileStore, needed: int | None) -> tuple[str, bool] | None:
    """Return why a store is unusable, and whether others could write to it; None if it is usable."""
    folder, refusal = store.folder, store.why_refused()
    if refusal is not None:
        return (
            f"activation_cache_dir: the folder {folder} cannot be used for the activation cache: {refusal}. Set"
            " activation_cache_dir to a folder that only you can write to (chmod go-w), or to one that does not exist"
            " yet.",
            True,
        )
    unwritable, usable = store.why_unwritable(), store.usable_bytes()
    if unwritable is not None:
        why = f"the folder {folder} of the activation cache cannot be written to ({unwritable})"
    elif usable is None or usable > HARDLY_ANY * (needed or 1):
        return None
    else:
        wanted = f"; frozen layers' outputs for all samples need up to {needed / MIB:,.1f} MiB" if needed else ""
        room = f"{usable / MIB:,.1f} MiB may be used{wanted}"
        why = f"the disk of the activation cache's folder {folder} is full ({room})"
    remedy = "Set activation_cache_dir to a folder that can be written to, on a disk with enough space, or set"
    return f"activation_cache_dir: {why}. {remedy} activation_cache='off'.", False


def make_cache(
    found: Findings,
    job: TrainingJob,
    data: TrainingBatches,
    generations: Path,
    most: int | None = None,
) -> AutoCache:
    """Create the cache. It is off for layers that must not be cached. Collective over all processes.

    Args:
        found: the complete model and its loss.
        job: as for `check_folder`.
        data: as for `check_folder`.
        generations: this training's path in the folder of the store.
        most: maximum number of frozen layers, if known. Keys then contain only the inputs that these layers read.
    """
    pipeline, loss, examples = found.cut.pipeline, found.loss, found.cut.examples
    args, trainer, runner = job.args, job.trainer, pipeline.stack.runner
    assert pipeline.freezable is not None and examples is not None
    collate: Collator = SampleCollator(job, data.collate_fn)
    not_in_keys = job.not_in_keys | runner.called.kept_back

    def loss_of_batch(batch: Batch) -> torch.Tensor:
        # `_prepare_inputs` may draw random numbers, or collect metrics
        with seeded(args.seed), left_as_found(trainer):
            return loss.of_batch(dict(trainer._prepare_inputs(dict(batch))))

    why_not: str | None = None
    every: Sequence[Any] = data.spread_rows(SAMPLES_TO_PROBE)
    if not runner.takes_batch:
        every, collate = _rows_of_calls(job.model, examples, every, collate)
    samples = varied_samples(every, collate)
    probe = partial(
        probe_boundaries,
        pipeline.stack,
        pipeline.freezable,
        samples,
        collate,
        ignored=not_in_keys,
        # a user's loss is not run here: it may read all of the model's outputs, including the padding
        loss_of=loss_of_batch if loss.is_stock else None,
        is_read_whole=not loss.is_stock,
        most=most,
    )
    keeps_padding = pipeline.mesh.any(UsersHooks(job.model).are_any)  # they may read padding anywhere
    with trainer.compute_loss_context_manager():
        trial = probe(keeps_padding=keeps_padding)
        if not keeps_padding and all(v.slot is None for v in trial.verdicts):  # perhaps some code reads the padding
            with_padding = probe(keeps_padding=True)
            keeps_padding = any(verdict.slot is not None for verdict in with_padding.verdicts)
            trial = with_padding if keeps_padding else trial
    verdicts, unread = trial.verdicts, trial.unread
    if len(set(pipeline.mesh.gather_objects((unread, keeps_padding)))) > 1:
        why_not = "processes have found that it depends on different inputs, or on the padding in some only"
    not_in_keys |= unread
    if isinstance(data, NumberedBatches):  # for other batches, the model's calls are looked up by their inputs
        data.wrap_collator(partial(KeyingCollator, ignored=not_in_keys, keeps_padding=keeps_padding))
    if why_not is not None:
        verdicts = tuple(replace(verdict, slot=None, reason=why_not) for verdict in verdicts)
    slots = {v.num_frozen: v.slot for v in verdicts if v.slot is not None}
    # probe_boundaries has refused a collator that cannot collate all of them together
    rows = on_device(collate(samples) if slots else {}, torch.device("cpu"))
    sequences = sequences_per_sample(rows)
    mesh = pipeline.mesh
    reasons: dict[int, str | None] = {}
    for reason in mesh.gather_objects({v.num_frozen: v.reason for v in verdicts}):
        reasons = {f: reasons.get(f) or reason[f] for f in reason}
    store = FileStore(generations.parent, user=generations.stem)
    store.limit(args.activation_cache_max_gib)
    storage_dtype = CACHE_DTYPES[args.activation_cache_dtype]
    cache = ActivationCache(
        pipeline.stack,
        slots,
        store,
        storage_dtype,
        pipeline.device,
        any(verdict.padded_left for verdict in verdicts),
        not_in_keys,
        keeps_padding,
    )
    cache.is_loss_of_user = not loss.is_stock
    is_users = job.watches_steps or any(map(job.overrides, ("training_step", "get_batch_samples", "_prepare_inputs")))
    cache.may_be_written = mesh.any(is_users or not loss.is_stock)
    cache.shows_padding = mesh.any(trial.shows_padding)
    description = f"{describe_model(pipeline.model, job.mixed_precision)} {storage_dtype}"
    return AutoCache(
        pipeline,
        cache,
        store,
        reasons,
        is_forced=args.activation_cache == "on",
        seconds_per_row=[unit.forward.per_row / sequences for unit in found.times.units]
        if found.times is not None
        else None,
        # process 0's description: some values have no fixed text representation
        description=mesh.gather_objects(description)[0],
        is_shared=job.shares_store,
        rows=mesh.gather_objects(rows if mesh.rank == 0 else {})[0],
        epoch_bytes=epoch_bytes(job, data, found.cut.unit_costs, mesh.gather_objects(node_name())),
        calls_per_sample=examples.num_calls,
    )


def _rows_of_calls(
    model: nn.Module, examples: ExampleInputs, samples: Sequence[Any], collate: Collator
) -> tuple[Sequence[Any], Collator]:
    """Return samples that are single inputs of the model, and their collator, for a loss with inputs of its own.

    If the batch has none, they are generated, with increasing numbers of tokens.
    """
    if not examples.are_made:
        return samples, lambda rows: examples.of(model, collate(rows))
    made = [made_inputs(model, 1, tokens=tokens) or {} for tokens in range(*MADE_TOKENS)]
    return made, _padded_together


def _padded_together(rows: Sequence[Batch]) -> Batch:
    """Join batches of one sample each into one batch. Shorter tensors are padded with 0."""
    batch = {}
    for name in rows[0]:
        longest = max(row[name].shape[-1] for row in rows)
        batch[name] = torch.cat([pad(row[name], (0, longest - row[name].shape[-1])) for row in rows])
    return batch


def describe_model(model: nn.Module, precision: str) -> str:
    """Describe the dependencies of frozen layers' outputs besides weights and buffers, as far as they have names."""
    config: Any = getattr(model, "config", None)
    values: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {"config": repr(config)}
    return json.dumps(
        {
            "class": type(model).__qualname__,
            "config": {key: value for key, value in values.items() if not _is_of_head_or_training(key)},
            "attention": getattr(config, "_attn_implementation", None),
            "precision": precision,
            "versions": [torch.__version__, transformers.__version__, FORMAT_VERSION],
        },
        sort_keys=True,
        default=str,
    )


def _is_of_head_or_training(name: str) -> bool:
    """Whether a field of a configuration does not affect frozen layers, which run in evaluation mode.

    A wrong answer still shows in the frozen layers' outputs, which are also part of a generation's name.
    """
    return name in ("_name_or_path", "id2label", "label2id", "problem_type") or "dropout" in name or "pdrop" in name
