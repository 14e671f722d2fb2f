"""Create the activation cache when training begins. A probe on a few samples tells which outputs may be cached."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ...data.node_order import node_name
from ...data.numbered_batches import NumberedBatches, TrainingBatches
from ...logs import log_once
from ...model.layer_stack import LayerStack
from ...model.left_as_found import left_as_found
from ...model.micro_batch import Batch, batch_rows
from ...model.nested import on_device, tensors_of
from ...model.placeholders import evaluation_mode
from ...pipeline.elastic_pipeline import ElasticPipeline
from ...planning.costs import UnitCost
from ...planning.tables import MIB
from ...planning.unit_times import ModelTimes
from ...randomness import seeded
from ...run.job import TrainingJob
from ...run.loss import Loss
from ...run.probing import SampleCollator, calls_of_loss
from ...training_args import CACHE_DTYPES
from .cache.activation_cache import ActivationCache
from .cache.activation_files import FORMAT_VERSION
from .cache.cache_probe import probe_boundaries
from .cache.content_keys import KeyingCollator, sequences_per_sample
from .cache.file_store import FileStore
from .cache.probe_batches import varied_samples
from .cache_control import HARDLY_ANY, AutoCache

logger = logging.getLogger(__name__)

SAMPLES_TO_PROBE = 32
"""Number of samples from which those are chosen that probe whether frozen layers can be cached."""


def check_folder(
    job: TrainingJob, data: TrainingBatches, unit_costs: Sequence[UnitCost], generations: Path
) -> str | None:
    """Return why the cache's folder cannot be used, or None. Collective over all processes.

    Args:
        job: the training job.
        data: the training batches.
        unit_costs: costs of the model's units, for samples as long as the longest of a few.
        generations: a file in the folder.

    Raises:
        ValueError: it cannot be used, with `activation_cache="on"`; or others may write to it. All processes raise it.
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
    """What a node stores of an epoch behind each unit but the last; empty if the number of samples is not known."""
    if not isinstance(data.dataset, Sized):
        return []
    dtype = CACHE_DTYPES[job.args.activation_cache_dtype]
    half = 2 if dtype == torch.bfloat16 and job.mixed_precision == "no" else 1
    return [len(data.dataset) * unit.boundary_bytes // half // len(set(nodes)) for unit in unit_costs[:-1]]


def _trouble_with(store: FileStore, needed: int | None) -> tuple[str, bool] | None:
    """Why a store is of no use, and whether others could write to it; or None."""
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
    pipeline: ElasticPipeline,
    times: ModelTimes | None,
    job: TrainingJob,
    data: TrainingBatches,
    unit_costs: Sequence[UnitCost],
    generations: Path,
    most: int | None = None,
) -> AutoCache:
    """Create the cache, which is off for layers whose outputs must not be cached. Collective over all processes.

    Args:
        pipeline: runs the model, which is complete.
        times: times of the model's units, if they were measured.
        job, data, unit_costs: as for `check_folder`.
        generations: this training's name in the folder of the store.
        most: number of layers that will be frozen at most, if it is known; keys have only what these read.
    """
    args, trainer, runner = job.args, job.trainer, pipeline.stack.runner
    assert pipeline.freezable is not None
    collate: Callable[[Sequence[Any]], Batch] = SampleCollator(job, data.collate_fn)
    not_in_keys = job.not_in_keys | runner.called.kept_back

    def loss_of_batch(batch: Batch) -> torch.Tensor:
        # methods that the user has overridden may draw random numbers, or collect metrics
        with seeded(args.seed), left_as_found(trainer):
            return Loss(job).of_batch(dict(trainer._prepare_inputs(dict(batch))))

    why_not: str | None = None
    calls_per_sample = 1
    loss_of: Callable[[Batch], torch.Tensor] = loss_of_batch
    if not runner.takes_batch:
        of_calls = LossCalls(job, pipeline.stack, collate, loss_of)
        collate, loss_of = of_calls.first_call, of_calls.loss_of
    samples = varied_samples(data.spread_rows(SAMPLES_TO_PROBE), collate)
    if not runner.takes_batch:
        why_not, calls_per_sample = of_calls.examine(samples)
    probe = partial(
        probe_boundaries,
        pipeline.stack,
        pipeline.freezable,
        samples,
        collate,
        ignored=not_in_keys,
        loss_of=loss_of,
        most=most,
    )
    keeps_padding = False
    with trainer.compute_loss_context_manager():
        trial = probe()
        if all(verdict.slot is None for verdict in trial.verdicts):  # perhaps something reads the padding
            with_padding = probe(keeps_padding=True)
            keeps_padding = any(verdict.slot is not None for verdict in with_padding.verdicts)
            trial = with_padding if keeps_padding else trial
    verdicts, unread = trial.verdicts, trial.unread
    if len(set(pipeline.mesh.gather_objects((unread, keeps_padding)))) > 1:
        why_not = "processes have found that it depends on different inputs, or on the padding in some only"
    not_in_keys |= unread
    if isinstance(data, NumberedBatches):  # of other batches the model's calls are looked up, by their inputs
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
    description = f"{describe_model(pipeline.model, job.mixed_precision)} {storage_dtype}"
    return AutoCache(
        pipeline,
        cache,
        store,
        reasons,
        is_forced=args.activation_cache == "on",
        seconds_per_row=[unit.forward.per_row / sequences for unit in times.units] if times is not None else None,
        # that of process 0: values without a fixed text representation differ between processes
        description=mesh.gather_objects(description)[0],
        is_shared=job.shares_store,
        rows=mesh.gather_objects(rows if mesh.rank == 0 else {})[0],
        epoch_bytes=epoch_bytes(job, data, unit_costs, mesh.gather_objects(node_name())),
        calls_per_sample=calls_per_sample,
    )


class LossCalls:
    """The calls of a model by a loss that does not call it on the batch's own inputs, on a few samples.

    Args:
        job: the training job.
        stack: the model's units.
        collate: collates samples.
        loss_of: computes the loss of a batch.
    """

    def __init__(
        self,
        job: TrainingJob,
        stack: LayerStack,
        collate: Callable[[Sequence[Any]], Batch],
        loss_of: Callable[[Batch], torch.Tensor],
    ) -> None:
        self._job, self._stack, self._collate, self._loss_of = job, stack, collate, loss_of
        self._batch: Batch = {}  # of all samples, as they are collated

    def first_call(self, samples: Sequence[Any]) -> Batch:
        """Collate samples, and return the inputs of the loss's first call of the model.

        Raises:
            ValueError: they are not the inputs of one sample each.
        """
        calls, _ = calls_of_loss(self._job, self._collate(samples), only_first=True)
        inputs = self._stack.runner.batch_of(calls[0]) if calls else {}
        if not tensors_of(inputs) or batch_rows(inputs) != len(samples):
            raise ValueError("the loss does not call the model on one entry for each sample")
        return inputs

    def examine(self, samples: Sequence[Any]) -> tuple[str | None, int]:
        """Check that each call returns what the model returns for the same inputs. It runs the loss of the samples.

        A loss that turns adapters off for some of its calls would find the states of other calls in the cache.

        Returns:
            Why the calls cannot be cached, or None; and the number of inputs in them for each sample.
        """
        model, runner = self._stack.model, self._stack.runner
        self._batch = self._collate(samples)
        seen: list[torch.Tensor] = []
        hook = self._stack.units[-1].module.register_forward_hook(lambda *call: seen.extend(tensors_of(call[2])[:1]))
        try:
            calls, _ = calls_of_loss(self._job, self._batch)
            of_loss = list(seen)
            seen.clear()
            with evaluation_mode(model), torch.no_grad(), left_as_found(model), seeded(self._job.args.seed):
                for call in calls:
                    model(**runner.arguments(runner.batch_of(call)))
        finally:
            hook.remove()
        are_same = len(seen) == len(of_loss) and all(
            a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)
            for a, b in zip(seen, of_loss, strict=False)
        )
        rows = sum(batch_rows(call) for call in calls)
        why = "the loss changes the model between its calls, for example by turning adapters off"
        return None if are_same else why, max(-(-rows // max(len(samples), 1)), 1)

    def loss_of(self, inputs: Batch) -> torch.Tensor:
        """Return the loss of the samples that were examined, with these inputs in place of those of the first call."""
        model, runner = self._stack.model, self._stack.runner
        given: list[Batch] = [runner.arguments(inputs)]

        def replace_first(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return ((), given.pop()) if given else (args, kwargs)

        hook = model.register_forward_pre_hook(replace_first, with_kwargs=True)
        try:
            return self._loss_of(self._batch)
        finally:
            hook.remove()


def describe_model(model: nn.Module, precision: str) -> str:
    """Describe what frozen layers' outputs depend on besides weights and buffers, as far as it can be named."""
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

    What this is wrong about shows in the frozen layers' outputs, which are part of a generation's name as well.
    """
    return name in ("_name_or_path", "id2label", "label2id", "problem_type") or "dropout" in name or "pdrop" in name
