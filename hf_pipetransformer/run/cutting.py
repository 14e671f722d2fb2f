"""Split a model into units: what they are, their costs and times, and the `ElasticPipeline` that runs them.

The units are found once and kept as long as the model, so a second `train()` splits it at the same places.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..cache.content_keys import KEYS_NAME, KeyedInputs, added_settings, named_inputs
from ..errors import UnsupportedModelError, is_out_of_memory
from ..file_formats import UNIT_TIMES, read_json
from ..logs import log_once
from ..model.frozen_prefix import FreezableLayers
from ..model.layer_range import CalledWith
from ..model.layer_stack import (
    LayerStack,
    StackDescription,
    refuse_overlapping_weights,
    refuse_weights_with_state,
)
from ..model.left_as_found import left_as_found
from ..model.micro_batch import (
    Batch,
    as_the_user_made_it,
    naming_long_rows,
    refuse_unnamed,
    refuse_without_tensors,
    slice_rows,
    with_name,
)
from ..model.nested import in_new_containers, tensors_of
from ..model.placeholders import ParameterTable, evaluation_mode, num_bytes
from ..model.training_check import check_training
from ..pipeline.devices import fits, is_on, name_of_device
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..pipeline.mesh import ProcessMesh, can_be_sent
from ..pipeline.stage import StageModule
from ..pipeline.state import synchronise_buffers, synchronise_weights
from ..planning.costs import UnitCost, cost_of_whole, measure_costs
from ..planning.layout import AUTO
from ..planning.unit_times import ModelTimes, measure_times, slowest
from ..randomness import generators_kept, global_state_kept, seeded
from .consistency import check_same_everywhere
from .job import TrainingJob, refuse_distributed_model
from .lazy_model import agree_on_laziness, sparing_memory, weights_in_checkpoint
from .probed_once import found_by_each
from .samples import SampleCollator

logger = logging.getLogger(__name__)

SAMPLE_ROWS = 2
"""Number of samples on which the model's units are found."""
MOST_ROWS_TO_TIME = 8
"""Maximum number of samples on which the model's units are timed; the time grows in proportion to it."""
TIMES = "part_times.json"
"""File in a checkpoint with the times of the model's units, measured when training began."""


@dataclass(frozen=True)
class Timing:
    """Times that are measured once for a model and never again, because other times could give other plans.

    Attributes:
        times: times of the model's units; None if they could not be measured.
        measured_on: everything that the times depend on, in plain values for JSON.
    """

    times: ModelTimes | None
    measured_on: Mapping[str, Any]

    def write(self, checkpoint: Path) -> None:
        """Write the times into a checkpoint, for the job that resumes from it."""
        if self.times is not None:
            content = {"measured": self.measured_on, "times": asdict(self.times)}
            (checkpoint / TIMES).write_text(json.dumps(content), encoding="utf-8")


@dataclass
class CutModel:
    """A model with the units into which it can be split.

    Attributes:
        pipeline: runs the model, as a whole or by a plan.
        unit_costs: the cost of each unit.
        timing: the times of the units; None until `time_model` has been called.
    """

    pipeline: ElasticPipeline
    unit_costs: tuple[UnitCost, ...]
    timing: Timing | None = None

    def serves(self, job: TrainingJob) -> bool:
        """Whether it belongs to the job's model and provides everything the job needs.

        It may have been made for an evaluation or an earlier training, before a freeze callback was added or stages
        were requested.
        """
        return (
            self.pipeline.model is job.model
            and (self.pipeline.freezable is not None or job.freeze_callback is None)
            and (bool(self.pipeline.stack.units) or not _needs_units(job))
        )

    def write_times(self, checkpoint: Path) -> None:
        """Write the measured times into a checkpoint, if there are any."""
        if self.timing is not None:
            self.timing.write(checkpoint)

    @property
    def stays_distributed(self) -> bool:
        """Whether each process has its part of a model that was loaded lazily, and nobody has asked for the rest."""
        return self.pipeline.is_lazy and self.pipeline.is_split

    def refuse_second_training(self) -> None:
        """Refuse to train a model whose weights an earlier training has left on the processes.

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

        Collective over all processes. Does nothing if the model is not placed.
        """
        if self.pipeline.is_placed:
            size = sum(map(num_bytes, self.pipeline.model.parameters()))
            device = self.pipeline.device
            self.pipeline.gather(device if fits(size, device) else torch.device("cpu"))


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
    in_checkpoint = weights_in_checkpoint(ParameterTable(model), mesh) if lazy else frozenset[str]()
    with sparing_memory(model):
        stack, freezable, unit_costs = _find(job, rows, collate)
        _make_equal(stack, mesh, in_checkpoint)
    # this only patches the forward for mixed precision, as for DDP
    job.trainer.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    wrap = partial(_wrap_replicas, job)
    return CutModel(ElasticPipeline(stack, mesh, job.device, wrap, freezable, lazy), unit_costs)


def _find(
    job: TrainingJob, rows: Sequence[Any], collate: SampleCollator | None
) -> tuple[LayerStack, FreezableLayers | None, tuple[UnitCost, ...]]:
    """`find_units`, without the pipeline. Collective over all processes."""
    mesh, model = job.mesh, job.model
    sample: Batch = {}
    if _needs_units(job) or mesh.world_size > 1:
        assert collate is not None
        sample = _sample_alike(job, rows[: min(SAMPLE_ROWS, job.rows_at_once)], collate)
    if _needs_units(job):
        try:
            return _find_layers(job, rows, collate, sample)
        except UnsupportedModelError as error:  # every process raises it
            if job.args.uses_pipeline or job.freeze_callback is not None:
                raise
            log_once(logger, logging.WARNING, "The layers of the model cannot be found: %s", error)
    stack = LayerStack.uncut(model)
    if mesh.world_size > 1:
        with mesh.failing_together(), global_state_kept():
            stack.runner.takes_batch = how_called(job, sample).takes_batch
        refuse_different_calls(job, stack)
    return stack, None, (cost_of_whole(stack),)


def _find_layers(
    job: TrainingJob, rows: Sequence[Any], collate: SampleCollator | None, sample: Batch
) -> tuple[LayerStack, FreezableLayers | None, tuple[UnitCost, ...]]:
    """`_find` of a model whose layers are needed. Collective over all processes."""
    mesh, model = job.mesh, job.model
    assert collate is not None
    if job.args.uses_pipeline:
        refuse_unnamed(sample)
        refuse_without_tensors(sample)
    tells = job.is_probed_once(collate)
    with mesh.failing_together(), global_state_kept():
        padded = collate.padded(rows)
        called = how_called(job, sample)
    told = found_by_each(mesh, True, partial(_tell, job, called, sample, padded))[0] if tells else None
    if told is not None:
        stack, freezable, unit_costs = LayerStack.of(model, told.stack), told.freezable, told.unit_costs
        called.note(stack)
    else:
        with mesh.failing_together(), global_state_kept():
            stack, freezable, unit_costs = _take_apart(job, called, sample, padded)
    refuse_different_calls(job, stack)
    return stack, freezable, unit_costs


def refuse_different_calls(job: TrainingJob, stack: LayerStack) -> None:
    """Check that the loss calls the model in the same way on every process, and agree on what each has found.

    That is whether it fails on a part of a batch, whose inputs may be random. Collective over all processes.

    Raises:
        ValueError: it does not, so the processes would reduce gradients in different ways.
    """
    runner = stack.runner
    called = runner.called
    mine = (runner.takes_batch, runner.nested_in, sorted(called.kept_back), sorted(map(str, called.added.items())))
    found = job.mesh.gather_objects((mine, stack.fails_on_parts))
    everyone, fails = zip(*found, strict=True)
    stack.fails_on_parts = next(filter(None, fails), "")
    other = next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None)
    if other is not None:
        raise ValueError(
            f"compute_loss calls the model in one way on process 0 and in another on process {other} (inputs that it"
            " passes on, keeps back or adds). Give all processes batches with the same inputs, and a loss that accepts"
            " each of them."
        )


def _needs_units(job: TrainingJob) -> bool:
    """Whether the model's layers are needed: to split it, to freeze it, or to predict the memory that it takes."""
    predicts = job.args.replica_sharding == AUTO and job.mesh.world_size > 1
    return job.args.uses_pipeline or job.freeze_callback is not None or predicts


def _sample_alike(job: TrainingJob, rows: Sequence[Any], collate: SampleCollator) -> Batch:
    """Collate these samples, and check that all processes have the same model and, if it is shared, the same batch.

    Collective over all processes.
    """
    sample = collate(rows)
    if not collate.is_shared:
        check_same_everywhere(job.mesh, job.model, {})
        return sample

    def draw() -> Batch:
        with seeded(job.args.seed):  # the collator draws the same from the global generators on every process
            return dict(with_name(collate.collate_fn(list(rows))))

    with generators_kept(collate.collate_fn):
        check_same_everywhere(job.mesh, job.model, sample, draw, rows)
    return sample


@dataclass(frozen=True)
class _Told:
    """What `_take_apart` has found, as one process tells it to the others."""

    stack: StackDescription
    freezable: FreezableLayers | None
    unit_costs: tuple[UnitCost, ...]


def _tell(job: TrainingJob, called: HowCalled, sample: Batch, padded: Batch) -> _Told | None:
    """Take the model apart for other processes; None if its layers return objects that cannot be sent to them."""
    with global_state_kept():
        stack, freezable, unit_costs = _take_apart(job, called, sample, padded)
    told = _Told(stack.describe(), freezable, unit_costs)
    return told if can_be_sent(told) else None


def _take_apart(
    job: TrainingJob, called: HowCalled, sample: Batch, padded: Batch
) -> tuple[LayerStack, FreezableLayers | None, tuple[UnitCost, ...]]:
    """Return the model's units, the layers that can be frozen (None without a freeze callback) and the unit costs.

    Raises:
        UnsupportedModelError: the model has no units, or has several stages and is not called on the batch's inputs.
    """
    model = job.model
    inputs, padded = called.inputs(job, sample), called.inputs(job, padded)
    freezable = None
    with naming_long_rows(model, padded), left_as_found(model):
        stack = LayerStack.discover(model, inputs, called.nested_in, job.args.pipeline_layers)
        called.note(stack)
        if job.args.uses_pipeline:
            refuse_weights_with_state(model)
            refuse_overlapping_weights(model)
        if job.freeze_callback is not None or job.may_follow_freezing:
            freezable = FreezableLayers.of(stack, inputs, job.args.eval_frozen_modules)
        unit_costs = _costs_of_units(job, stack, padded, freezable.never_frozen if freezable else ())
        if job.args.uses_pipeline:
            stack.fails_on_parts = check_training(stack, inputs) or stack.fails_on_parts
    return stack, freezable, unit_costs


class _FirstCall(BaseException):
    """Raised to leave a loss at its first call of the model. No `except Exception` in a user's loss catches it."""


def calls_of_loss(job: TrainingJob, batch: Batch, only_first: bool = False) -> tuple[list[Batch], KeyedInputs]:
    """Compute the loss of a batch, and return the inputs of each call of the model, and the prepared batch's.

    Inputs are by name, as they were when the model was called. If `compute_loss` fails, the calls before that are
    returned: the same error will show when the model itself is called, or in the first step.

    Args:
        job: the training job.
        batch: the batch.
        only_first: whether to leave the loss at its first call, so that the model does not run.
    """
    trainer, model = job.trainer, job.model
    given = KeyedInputs({})
    with (
        evaluation_mode(model),
        torch.no_grad(),
        left_as_found(model, trainer),
        seeded(job.args.seed),
        noting_calls(model, only_first) as calls,
    ):
        inputs = job.on_models_device(dict(with_name(trainer._prepare_inputs(as_the_user_made_it(dict(batch))))))
        given = KeyedInputs(inputs)
        with job.computing_loss():
            trainer.compute_loss(model, as_the_user_made_it(inputs))
    return calls, given


@contextmanager
def noting_calls(model: nn.Module, only_first: bool) -> Iterator[list[Batch]]:
    """Yield a list of the inputs, by name, of each call of a model inside the context.

    An error inside ends the context, and is not raised again unless it is one of memory.

    Args:
        model: the model.
        only_first: whether to leave the context at the first call, so that the model does not run.
    """
    calls: list[Batch] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = named_inputs(module, args, kwargs)
        # the model may write into a dict that it is called on
        calls.append({n: in_new_containers(v) if isinstance(v, Mapping) else v for n, v in inputs.items()})
        if only_first:
            raise _FirstCall

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    except _FirstCall:
        pass
    except Exception as error:
        if is_out_of_memory(error):
            raise
    finally:
        hook.remove()


@dataclass(frozen=True)
class HowCalled:
    """How `compute_loss` calls the model.

    Attributes:
        called: which of the batch's inputs it passes to the model, if it calls it on them.
        takes_batch: whether it calls the model on the batch's inputs.
        nested_in: the model's only argument, if that is a dict of inputs (`LayerRangeRunner.nested_in`).
    """

    called: CalledWith = field(default_factory=CalledWith)
    takes_batch: bool = True
    nested_in: str | None = None

    def inputs(self, job: TrainingJob, batch: Batch) -> Batch:
        """Return inputs of the model for probes on a batch: the batch's own, or those of the loss's first call."""
        if self.takes_batch:
            return {name: value for name, value in batch.items() if name not in self.called.kept_back}
        calls, _ = calls_of_loss(job, batch, only_first=True)
        assert calls, "the loss has called the model on another batch"
        return calls[0] if self.nested_in is None else dict(calls[0][self.nested_in])

    def note(self, stack: LayerStack) -> None:
        """Tell it to the runner of a model's units."""
        stack.runner.called = self.called
        stack.runner.takes_batch = self.takes_batch


def how_called(job: TrainingJob, sample: Batch) -> HowCalled:
    """Find out on what `compute_loss` calls the model, from a batch of a few samples."""
    if not job.overrides_loss:
        return HowCalled(job.called_by_stock(sample))
    calls, given = calls_of_loss(job, sample, only_first=True)
    if not calls:
        return HowCalled()
    call = calls[0]
    if call.keys().isdisjoint(sample) and tensors_of(call):
        only = next(iter(call)) if len(call) == 1 else None
        is_nested = only is not None and isinstance(call[only], Mapping)
        return HowCalled(takes_batch=False, nested_in=only if is_nested else None)
    if given.are_exchanged(call, job.not_in_keys):
        return HowCalled()
    return HowCalled(called_with(sample, call))


def called_with(batch: Batch, call: Batch) -> CalledWith:
    """Return which inputs of a batch a call of the model had, and what it had besides."""
    return CalledWith(frozenset(batch) - call.keys() - {KEYS_NAME}, added_settings(batch, call))


def _costs_of_units(
    job: TrainingJob, stack: LayerStack, padded: Batch, never_frozen: Collection[str]
) -> tuple[UnitCost, ...]:
    """Measure the cost of each unit, and note in `stack.fails_on_parts` whether batches cannot be split by sample."""
    try:
        return measure_costs(stack, slice_rows(padded, 0, SAMPLE_ROWS), never_frozen)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        costs = measure_costs(stack, padded, never_frozen)  # fails in the same way if slicing is not the reason
        if job.args.uses_pipeline:
            stack.fails_on_parts = (
                f"it runs on a whole batch, but fails on the first {SAMPLE_ROWS} samples of each of its inputs"
                f" ({type(error).__name__}: {error})"
            )
        return costs


def _make_equal(stack: LayerStack, mesh: ProcessMesh, known_equal: Collection[str]) -> None:
    """Make weights and buffers equal to those of process 0, as DDP does. Collective over all processes."""
    different = synchronise_weights(stack.table, mesh, known_equal) + synchronise_buffers(
        stack.model, mesh, lambda _: 0
    )
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


# ---------------------------------------------------------------------------------------------------------
# Times
# ---------------------------------------------------------------------------------------------------------


def time_model(
    job: TrainingJob, cut: CutModel, rows: Sequence[Any], collate: SampleCollator | None, checkpoint: Path | None
) -> ModelTimes | None:
    """Measure the times of the model's units: for predictions, and to decide whether the cache is faster.

    Collective over all processes. Times differ from run to run
    and so may the decisions, so nothing is measured with `full_determinism`. A resumed training keeps the times
    measured when it began, and therefore its plans. A model that was loaded lazily is not timed either.

    Args:
        job: the training job.
        cut: the complete model; it stores the times.
        rows: samples.
        collate: collates these samples.
        checkpoint: the checkpoint to resume from, if any.
    """
    if cut.pipeline.is_lazy or cut.pipeline.stack.fails_on_parts:
        return None  # reading the weights from the files would be measured; times follow from parts of a batch
    if job.args.full_determinism or not (job.args.uses_pipeline or job.may_cache):
        return None
    if cut.timing is None:
        assert collate is not None
        batch = collate(rows[: min(job.args.per_device_train_batch_size, MOST_ROWS_TO_TIME)])
        # those of process 0: hosts may differ, and all processes must arrive at the same plan
        measured_on = job.mesh.gather_objects(_what_is_measured(job, cut, batch))[0]
        times = job.mesh.gather_objects(_read_times(cut, measured_on, checkpoint))[0]
        if times is None:
            with job.trainer.compute_loss_context_manager():
                runner = cut.pipeline.stack.runner
                if not runner.takes_batch:
                    batch = HowCalled(takes_batch=False, nested_in=runner.nested_in).inputs(job, batch)
                times = _time_parts(cut.pipeline, batch, job.device)
        cut.timing = Timing(times, measured_on)
    return cut.timing.times


def _read_times(cut: CutModel, measured_on: Mapping[str, Any], checkpoint: Path | None) -> ModelTimes | None:
    """Return the times in the checkpoint to resume from; None if it has none for this machine and job."""
    if checkpoint is None:
        return None
    try:
        content = read_json(checkpoint / TIMES, UNIT_TIMES)
        times = ModelTimes.of_plain(content["times"])
        is_of_this = content["measured"] == measured_on and len(times.units) == len(cut.unit_costs)
    except (OSError, ValueError, TypeError):
        return None
    return times if is_of_this else None


def _what_is_measured(job: TrainingJob, cut: CutModel, batch: Batch) -> dict[str, Any]:
    """Return everything that times depend on, in plain values for JSON. If it changes they are measured again."""
    model = job.model
    return {
        "device": name_of_device(job.device),
        "processes": job.args.world_size,
        "threads": torch.get_num_threads(),
        "inputs": {name: list(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)},
        "trainable_bytes": [unit.trainable_bytes for unit in cut.unit_costs],
        "checkpointing": sum(bool(getattr(module, "gradient_checkpointing", False)) for module in model.modules()),
        "attention": str(getattr(getattr(model, "config", None), "_attn_implementation", None)),
        "precision": job.mixed_precision,
        "torch": torch.__version__,
    }


def _time_parts(pipeline: ElasticPipeline, batch: Batch, device: torch.device) -> ModelTimes | None:
    """Time the units of a complete model; the slowest process counts. Collective over all processes.

    Returns:
        The times; None if the model is not on the device because it does not fit, or if it cannot be timed.
    """
    mesh = pipeline.mesh
    is_here = all(parameter.device.type == device.type for parameter in pipeline.model.parameters())
    if not all(mesh.gather_objects(is_here)):
        return None
    per_byte = mesh.seconds_per_reduced_byte(device)
    times: ModelTimes | None = None
    try:
        times = measure_times(pipeline.stack, batch, per_byte)
    except RuntimeError as error:  # out of memory, for one
        logger.warning("The model's layers could not be timed (%s), so the plan is based on FLOPs.", error)
    everyone = mesh.gather_objects(times)
    measured = [theirs for theirs in everyone if theirs is not None]
    return slowest(measured) if len(measured) == len(everyone) else None
