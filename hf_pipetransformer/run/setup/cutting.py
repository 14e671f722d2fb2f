"""Split a model into units: the units, their costs and times, and the `ElasticPipeline` that runs them.

The units are found once and kept as long as the model. A second `train()` splits it at the same places.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ...errors import UnsupportedModelError, is_out_of_memory
from ...logs import log_once
from ...model.example_inputs import ExampleInputs, names_taken
from ...model.frozen_prefix import FreezableLayers
from ...model.layer_stack import LayerStack, StackDescription
from ...model.left_as_found import left_as_found
from ...model.micro_batch import (
    Batch,
    naming_long_rows,
    numbers_of_rows,
    refuse_unnamed,
    refuse_without_tensors,
    slice_rows,
)
from ...model.nested import tensors_of
from ...model.placeholders import ParameterTable, num_bytes
from ...model.refusals import refuse_overlapping_weights, refuse_weights_with_state
from ...model.training_check import check_training, why_mixed
from ...model.units import CalledWith
from ...pipeline.devices import fits, is_on, memory_budget
from ...pipeline.elastic_pipeline import ElasticPipeline
from ...pipeline.mesh import ProcessMesh, can_be_sent
from ...pipeline.stage import StageModule
from ...pipeline.weights import synchronise
from ...planning.costs import UnitCost, cost_of_whole, measure_costs
from ...planning.layout import AUTO
from ...planning.planner import Planner, Request
from ...planning.unit_times import ModelTimes, measure_times, slowest
from ...randomness import global_state_kept
from ...training_args import PipeTransformerTrainingArguments
from ..job import TrainingJob, refuse_distributed_model
from ..lazy_model import agree_on_laziness, loading
from .consistency import check_same_everywhere
from .probing import SampleCollator, examples_of, first_that_runs, found_by_each

logger = logging.getLogger(__name__)

SAMPLE_ROWS = 2
"""Number of samples for finding the model's units."""
MOST_ROWS_TO_TIME = 8
"""Maximum number of samples for timing the model's units; the time grows in proportion to it."""


@dataclass
class CutModel:
    """A model, and the units for splitting it.

    Attributes:
        pipeline: runs the model, as a whole or in a layout.
        unit_costs: the cost of each unit.
        examples: the inputs of a batch that the model was probed on; None if it was not probed.
        times: the times of the units; None if they could not be measured, or before `time_model`.
        is_timed: whether the times have been measured. A second training uses the same times.
    """

    pipeline: ElasticPipeline
    unit_costs: tuple[UnitCost, ...]
    examples: ExampleInputs | None
    times: ModelTimes | None = None
    is_timed: bool = False

    def serves(self, job: TrainingJob) -> bool:
        """Whether this is the job's model, with the units that the job needs.

        It may have been made for an evaluation or an earlier training, before a freeze callback was added, stages were
        requested, or the user's code gave the model another head.
        """
        return (
            self.pipeline.model is job.model
            and not self.pipeline.stack.table.exchanged()
            and (self.pipeline.freezable is not None or job.freeze_callback is None)
            and (bool(self.pipeline.stack.units) or not _needs_units(job))
        )

    @property
    def stays_distributed(self) -> bool:
        """Whether each process has its part of a lazily loaded model, which has not been gathered."""
        return self.pipeline.is_lazy and self.pipeline.is_split

    def refuse_second_training(self) -> None:
        """Refuse to train a model again if its weights are still distributed over the processes.

        Raises:
            ValueError: `stays_distributed`.
        """
        if self.stays_distributed:
            raise ValueError(
                f"The weights of the {type(self.pipeline.model).__name__}, which was loaded lazily, are still"
                " distributed over the processes by an earlier train(). To train again, call"
                " trainer.save_model(folder) and pass load_lazily(..., folder) to a new trainer; or call"
                " trainer.make_model_whole() first, if each process has memory for the whole model."
            )

    def finish(self) -> None:
        """Make the model whole after a training, unless it was loaded lazily. Collective over all processes."""
        if not self.stays_distributed:
            return self.make_whole()
        if self.pipeline.mesh.rank == 0:
            logger.warning(
                "Training has ended, and each process keeps the weights of its own stage of %s only, because the model"
                " was loaded lazily. evaluate(), predict() and save_model() work on all processes together;"
                " make_model_whole() gathers all weights on every process.",
                type(self.pipeline.model).__name__,
            )

    def make_whole(self) -> None:
        """Gather all weights into the model on every process: on the device if they fit, otherwise on the CPU.

        Collective over all processes. Without effect if the model is not placed.
        """
        if self.pipeline.is_placed:
            size = sum(map(num_bytes, self.pipeline.model.parameters()))
            device, mesh = self.pipeline.device, self.pipeline.mesh
            self.pipeline.gather(torch.device("cpu") if mesh.any(not fits(size, device)) else device)


FindUnits = Callable[[Sequence[Any], SampleCollator | None], CutModel]
"""Finds the units of the trainer's model, or returns those found before. Collective over all processes."""


def find_units(job: TrainingJob, rows: Sequence[Any], collate: SampleCollator | None) -> CutModel:
    """Find the units of the job's model on a few samples of the data. Collective over all processes.

    Args:
        job: the training or evaluation job.
        rows: samples, at least `SAMPLE_ROWS` if the job is probed.
        collate: collates these samples; None if `rows` is empty.

    Raises:
        ValueError: the processes have different models or data, or the collator returns no dict of inputs.
        UnsupportedModelError: the model cannot be split, or frozen, as the job requires.
    """
    mesh, model = job.mesh, job.model
    if job.args.uses_pipeline:
        refuse_distributed_model(model)  # model_init may have returned such a model
    # a quantised model is often on its device already, and may refuse to be moved
    lazy = agree_on_laziness(model, mesh)
    if not lazy and not is_on(model, job.device) and fits(sum(map(num_bytes, model.parameters())), job.device):
        model.to(job.device)  # some kernels only run there
    in_checkpoint = loading().weights_in_checkpoint(ParameterTable(model), mesh) if lazy else frozenset[str]()
    stack, freezable, unit_costs, examples = _find(job, rows, collate)
    _make_equal(stack, mesh, in_checkpoint)
    # this only patches the forward for mixed precision, as for DDP
    job.trainer.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    wrap = partial(_wrap_replicas, job)
    return CutModel(ElasticPipeline(stack, mesh, job.device, wrap, freezable, lazy), unit_costs, examples)


_Found = tuple[LayerStack, FreezableLayers | None, tuple[UnitCost, ...], ExampleInputs | None]


def _find(job: TrainingJob, rows: Sequence[Any], collate: SampleCollator | None) -> _Found:
    """`find_units`, without the pipeline. Collective over all processes."""
    mesh, model = job.mesh, job.model
    sample: Batch = {}
    if _needs_units(job) or mesh.world_size > 1:
        assert collate is not None
        few = rows[: min(SAMPLE_ROWS, job.rows_at_once)]
        sample = collate(few)
        check_same_everywhere(mesh, model, *((sample, few) if collate.is_shared else ({},)))
    if _needs_units(job):
        try:
            return _find_layers(job, rows, collate, sample)
        except UnsupportedModelError as error:  # every process raises it
            if job.args.uses_pipeline or job.freeze_callback is not None:
                raise
            log_once(logger, logging.WARNING, "The layers of the model cannot be found: %s", error)
    called = CalledWith()
    if mesh.world_size > 1:
        # a model that is not called on the batch's inputs may be called anywhere, also in the backward
        takes_batch = not job.overrides_loss or bool(
            tensors_of([sample[name] for name in names_taken(model, sample) - job.not_in_keys])
        )
        called = CalledWith(takes_batch=takes_batch)
        agree_on_inputs(job, str(takes_batch), "")
    stack = LayerStack.uncut(model, called)
    return stack, None, (cost_of_whole(stack),), None


def _find_layers(job: TrainingJob, rows: Sequence[Any], collate: SampleCollator | None, sample: Batch) -> _Found:
    """`_find` for a model that must have layers. Collective over all processes."""
    mesh, model = job.mesh, job.model
    assert collate is not None
    if job.args.uses_pipeline:
        refuse_unnamed(sample)
        refuse_without_tensors(sample)
    with mesh.failing_together(), global_state_kept():
        padded = collate.padded(rows)
        examples = examples_of(job, sample)
    probe = partial(_probe_units, job, examples, sample, padded)
    probed: _Probed | None = None
    if collate.is_probed_once:
        # None if its layers return objects that cannot be sent to other processes
        probed = found_by_each(mesh, True, lambda: found if can_be_sent(found := probe()) else None)[0]
    if probed is None:
        with mesh.failing_together():
            probed = probe()
    whole_because = agree_on_inputs(job, probed.examples.described(), probed.stack.whole_because)
    stack = LayerStack.of(model, replace(probed.stack, whole_because=whole_because))
    return stack, probed.freezable, probed.unit_costs, probed.examples


def agree_on_inputs(job: TrainingJob, described: str, whole_because: str) -> str:
    """Check that the batches of all processes have the same inputs of the model, and agree on how they are run.

    Collective over all processes.

    Args:
        job: the training job.
        described: which inputs of the batch are the model's.
        whole_because: `LayerStack.whole_because`, as this process has found it. The inputs may be random.

    Returns:
        The same on every process.

    Raises:
        ValueError: they have not, so the processes would reduce gradients in different ways.
    """
    everyone, reasons = zip(*job.mesh.gather_objects((described, whole_because)), strict=True)
    other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
    if other is not None:
        raise ValueError(
            f"By their names, batches have other inputs of the model on process 0 than on process {other}. Give all"
            " processes batches with the same inputs."
        )
    return next(filter(None, reasons), "")


def _needs_units(job: TrainingJob) -> bool:
    """Whether the model's layers are needed: to split it, to freeze it, or to predict the memory that it takes."""
    predicts = job.args.replica_sharding == AUTO and job.mesh.world_size > 1
    return job.args.uses_pipeline or job.freeze_callback is not None or predicts


@dataclass(frozen=True)
class _Probed:
    """The results of probing a model, without the model."""

    stack: StackDescription
    freezable: FreezableLayers | None
    unit_costs: tuple[UnitCost, ...]
    examples: ExampleInputs


def _probe_units(job: TrainingJob, places: Sequence[ExampleInputs], sample: Batch, padded: Batch) -> _Probed:
    """Find the model's units, the layers that can be frozen (None without a freeze callback) and the unit costs.

    Raises:
        UnsupportedModelError: the model has no units.
    """
    model = job.model
    freezable = None
    with global_state_kept(), naming_long_rows(model, padded), left_as_found(model):
        examples = first_that_runs(job, places, sample)
        inputs, padded = examples.of(model, sample), examples.of(model, padded)
        stack = LayerStack.discover(model, inputs, examples.called, job.args.pipeline_layers, job.args.uses_pipeline)
        if job.args.uses_pipeline:
            refuse_weights_with_state(model)
            refuse_overlapping_weights(model)
        if job.freeze_callback is not None or job.may_follow_freezing:
            freezable = FreezableLayers.of(stack, inputs, job.args.eval_frozen_modules)
        unit_costs, whole_because = _costs_of_units(stack, padded, freezable.never_frozen if freezable else ())
        if job.args.uses_pipeline:
            whole_because = check_training(stack, inputs) or whole_because or _why_no_rows(inputs, padded)
            whole_because = whole_because or stack.whole_because or why_mixed(stack, inputs)
    found = replace(stack.describe(), whole_because=whole_because if job.args.uses_pipeline else "")
    return _Probed(found, freezable, unit_costs, examples)


def _costs_of_units(
    stack: LayerStack, padded: Batch, never_frozen: Collection[str]
) -> tuple[tuple[UnitCost, ...], str]:
    """Return the cost of each unit, and why batches cannot be split by sample; empty if they can."""
    try:
        return measure_costs(stack, slice_rows(padded, 0, SAMPLE_ROWS), never_frozen), ""
    except Exception as error:
        if is_out_of_memory(error):
            raise
        costs = measure_costs(stack, padded, never_frozen)  # fails in the same way if slicing is not the reason
        return costs, (
            f"it runs on a whole batch, but fails on the first {SAMPLE_ROWS} samples of each of its inputs"
            f" ({type(error).__name__}: {error})"
        )


def _why_no_rows(*batches: Batch) -> str:
    """Why batches cannot be split by sample, if tensors have different numbers of rows; otherwise empty."""
    for batch in batches:
        if len(numbers_of_rows(batch)) > 1:
            rows = ", ".join(f"{name} {sorted(n)[0]}" for name, v in batch.items() if (n := numbers_of_rows(v)))
            return f"its inputs have different numbers of rows ({rows}), so not each row is a sample"
    return ""


def _make_equal(stack: LayerStack, mesh: ProcessMesh, known_equal: Collection[str]) -> None:
    """Give all processes the weights and buffers of process 0, as DDP does. Collective over all processes."""
    weights = {name: stack.table[name] for name in stack.table.names if name not in known_equal}
    different = synchronise({**weights, **dict(stack.model.named_buffers())}, mesh)
    if different:
        log_once(
            logger,
            logging.WARNING,
            "%d parameters and buffers differed between the processes and were set to those of process 0, as DDP"
            " does (%s%s)."
            " Call set_seed() before creating the model to avoid this.",
            len(different),
            ", ".join(different[:3]),
            ", ..." if len(different) > 3 else "",
        )


def _wrap_replicas(
    job: TrainingJob, stage: StageModule, group: dist.ProcessGroup, may_be_unused: bool
) -> DistributedDataParallel:
    """Wrap a stage in DDP over its replicas, as Accelerate's handler and the `ddp_*` arguments say."""
    handler = job.trainer.accelerator.ddp_handler
    options: dict[str, Any] = handler.to_kwargs() if handler is not None else {}
    if job.args.ddp_find_unused_parameters is None:
        # the Trainer searches for unused parameters in every step; here the probe of the loss has found them
        options["find_unused_parameters"] = may_be_unused
    options["gradient_as_bucket_view"] = True  # saves a copy of all gradients
    module = DistributedDataParallel(stage, process_group=group, init_sync=False, **options)
    if handler is not None:
        handler.register_comm_hook(module)
    return module


def make_planner(
    args: PipeTransformerTrainingArguments,
    unit_costs: Sequence[UnitCost],
    mesh: ProcessMesh,
    times: ModelTimes | None = None,
    *,
    is_driven: bool = False,
    autocasts: bool = False,
) -> Planner:
    """Make the planner, the same on every process. Collective over all processes.

    Args:
        args: the training arguments.
        unit_costs: the costs of the model's units.
        mesh: the processes.
        times: measured times, the same on every process; None if the model was not timed.
        is_driven: whether the loss drives the pipeline.
        autocasts: whether autocast computes in 16 bits, and keeps copies of weights.
    """
    budgets = mesh.gather_objects(memory_budget(args.device, args.world_size))
    return Planner(
        unit_costs=tuple(unit_costs),
        times=times,
        memory_budget_bytes=min((budget for budget in budgets if budget is not None), default=None),
        autocasts=autocasts,
        world_size=mesh.world_size,
        request=Request(
            args.pipeline_parallel_size,
            args.per_device_train_batch_size,
            args.elastic,
            args.pipeline_schedule,
            args.num_microbatches,
            args.replica_sharding,
            args.num_virtual_stages,
            is_driven,
        ),
    )


# ---------------------------------------------------------------------------------------------------------
# Times
# ---------------------------------------------------------------------------------------------------------


def time_model(
    job: TrainingJob, cut: CutModel, rows: Sequence[Any], collate: SampleCollator | None
) -> ModelTimes | None:
    """Measure the times of the model's units: for predictions, and to decide whether the cache is faster.

    Collective over all processes. Times differ from run to run, and so may the decisions. The model is therefore not
    timed with `full_determinism`. A lazily loaded model is not timed either.

    Args:
        job: the training job.
        cut: the complete model; it keeps the times.
        rows: samples.
        collate: collates these samples.
    """
    if cut.pipeline.is_lazy or cut.pipeline.stack.whole_because:
        return None  # reading the weights from the files would be measured; times follow from parts of a batch
    if job.args.full_determinism or not (job.args.uses_pipeline or job.may_cache):
        return None
    if not cut.is_timed:
        assert collate is not None
        batch = collate(rows[: min(job.args.per_device_train_batch_size, MOST_ROWS_TO_TIME)])
        with job.trainer.compute_loss_context_manager():
            if cut.examples is not None and not cut.examples.called.takes_batch:
                batch = cut.examples.of(job.model, batch)
            cut.times, cut.is_timed = _time_parts(cut.pipeline, batch, job.device), True
    return cut.times


def _time_parts(pipeline: ElasticPipeline, batch: Batch, device: torch.device) -> ModelTimes | None:
    """Time the units of a complete model; the slowest process counts. Collective over all processes.

    Returns:
        The times; None if the model is not on the device because it does not fit, or if it cannot be timed.
    """
    mesh = pipeline.mesh
    is_here = all(parameter.device.type == device.type for parameter in pipeline.model.parameters())
    if not all(mesh.gather_objects(is_here)):
        return None
    times: ModelTimes | None = None
    try:
        times = measure_times(pipeline.stack, batch)
    except Exception as error:  # out of memory, or a loss in the forward that does not run on a part of the rows
        logger.warning("The model's layers could not be timed (%s); predictions go without it.", error)
    everyone = mesh.gather_objects(times)
    measured = [theirs for theirs in everyone if theirs is not None]
    return slowest(measured) if len(measured) == len(everyone) else None
