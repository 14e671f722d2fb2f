"""What a model is made of: the units that it can be cut into, what they cost and take, and the handle that runs them.

Found once, and kept as long as the model: a second `train()` cuts it in the same places.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..cache.content_keys import KeyedInputs, named_inputs
from ..errors import UnsupportedModelError, is_out_of_memory
from ..model.frozen_prefix import FreezableLayers
from ..model.layer_stack import LayerStack, refuse_batch_statistics
from ..model.left_as_found import left_as_found
from ..model.loss_probe import raise_for_exchanged_inputs
from ..model.micro_batch import Batch, naming_long_rows, slice_rows
from ..model.placeholders import evaluation_mode
from ..pipeline.devices import fits, name_of_device
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..pipeline.mesh import ProcessMesh
from ..pipeline.stage import StageModule
from ..pipeline.state import synchronise_buffers, synchronise_weights
from ..planning.costs import UnitCost, cost_of_whole, measure_costs
from ..planning.unit_times import ModelTimes, measure_times, slowest
from ..randomness import generators_kept, seeded
from .agreement import check_same_everywhere
from .job import TrainingJob, refuse_distributed_model
from .samples import SampleCollator

logger = logging.getLogger(__name__)

SAMPLE_ROWS = 2
"""Rows on which the model's units are found."""
MOST_ROWS_TO_TIME = 8
"""Rows on which the model's parts are timed; more of them take as much longer."""
TIMES = "part_times.json"
"""In a checkpoint: what the model's parts took when the training began."""


@dataclass(frozen=True)
class Timing:
    """Measured once for a model, and again by nobody: other times would be other plans.

    Attributes:
        times: of the model's parts; None where they could not be measured.
        measured_on: all that times depend on, in JSON's values.
    """

    times: ModelTimes | None
    measured_on: Mapping[str, Any]

    def write(self, checkpoint: Path) -> None:
        """Into a checkpoint, for the job that resumes from it."""
        if self.times is not None:
            content = {"measured": self.measured_on, "times": asdict(self.times)}
            (checkpoint / TIMES).write_text(json.dumps(content), encoding="utf-8")


@dataclass
class CutModel:
    """A model and what it was found to be made of.

    Attributes:
        pipeline: runs it, whole or by a plan.
        unit_costs: of each unit.
        timing: None until `time_model` has been asked.
    """

    pipeline: ElasticPipeline
    unit_costs: tuple[UnitCost, ...]
    timing: Timing | None = None

    def serves(self, job: TrainingJob) -> bool:
        """Whether it was found for this model, and for all that the job asks of it.

        It may have been made for an evaluation, or an earlier training, before a freeze callback was added or stages
        asked for.
        """
        return (
            self.pipeline.model is job.model
            and (self.pipeline.freezable is not None or job.freeze_callback is None)
            and (bool(self.pipeline.stack.units) or not job.args.uses_pipeline)
        )

    def make_whole(self) -> None:
        """Bring all weights back into the model on every process: to the device if they fit, else to the CPU.

        Collective over all processes; nothing to do where it is whole.
        """
        if self.pipeline.is_placed:
            size = sum(p.nbytes for p in self.pipeline.model.parameters())
            device = self.pipeline.device
            self.pipeline.gather(device if fits(size, device) else torch.device("cpu"))


def find_units(job: TrainingJob, rows: Sequence[Any], collate: SampleCollator | None) -> CutModel:
    """Find out on a few rows of data what the model is made of. Collective over all processes.

    Args:
        job: the training, or evaluation.
        rows: samples, at least `SAMPLE_ROWS`, where the job is probed.
        collate: of these; None with `rows` empty.

    Raises:
        ValueError: the processes have different models or data.
        UnsupportedModelError: the model cannot be cut, or frozen, as the job asks.
    """
    mesh, model = job.mesh, job.model
    if job.args.uses_pipeline:
        refuse_distributed_model(model)  # model_init may have made it
    if fits(sum(p.nbytes for p in model.parameters()), job.device):
        model.to(job.device)  # some kernels run there only
    sample: Batch = {}
    if _cuts_or_freezes(job) or mesh.world_size > 1:
        assert collate is not None
        sample = _sample_alike(job, rows[: min(SAMPLE_ROWS, job.rows_at_once)], collate)
    if _cuts_or_freezes(job):
        assert collate is not None
        with mesh.failing_together(), torch.random.fork_rng(devices=[]):
            stack, freezable, unit_costs = _take_apart(job, sample, collate.padded(rows))
    else:
        stack, freezable = LayerStack.uncut(model), None
        unit_costs = (cost_of_whole(stack),)
    _make_equal(stack, mesh)
    # patches the forward for mixed precision, as it would for DDP, and nothing else
    job.trainer.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    return CutModel(ElasticPipeline(stack, mesh, job.device, partial(_wrap_replicas, job), freezable), unit_costs)


def _cuts_or_freezes(job: TrainingJob) -> bool:
    return job.args.uses_pipeline or job.freeze_callback is not None


def _sample_alike(job: TrainingJob, rows: Sequence[Any], collate: SampleCollator) -> Batch:
    """A batch of these rows, which all processes have alike. Collective over all processes."""
    sample = collate(rows)

    def draw() -> Batch:
        with seeded(job.args.seed):  # what it draws from the global generators is the same everywhere
            return dict(collate.collate_fn(list(rows)))

    with generators_kept(collate.collate_fn):
        check_same_everywhere(job.mesh, job.model, sample, draw, rows)
    return sample


def _take_apart(
    job: TrainingJob, sample: Batch, padded: Batch
) -> tuple[LayerStack, FreezableLayers | None, tuple[UnitCost, ...]]:
    """What can be cut, and frozen; and what its parts cost."""
    model = job.model
    kept_back = _names_kept_back(job, sample)
    inputs, padded = (
        {name: value for name, value in batch.items() if name not in kept_back} for batch in (sample, padded)
    )
    freezable = None
    with naming_long_rows(model, padded), left_as_found(model):
        stack = LayerStack.discover(model, inputs)
        stack.runner.kept_back = kept_back
        if job.args.uses_pipeline:
            refuse_batch_statistics(model)
        if job.freeze_callback is not None:
            freezable = FreezableLayers.of(stack, inputs)
        unit_costs = _costs_of_units(job, stack, padded, freezable.never_frozen if freezable else ())
    return stack, freezable, unit_costs


def _names_kept_back(job: TrainingJob, sample: Batch) -> frozenset[str]:
    """Inputs that compute_loss keeps from the model: sample weights that it takes out, labels of its own."""
    calls: list[Mapping[str, Any]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(dict(named_inputs(module, args, kwargs)))

    trainer, model = job.trainer, job.model
    given = KeyedInputs({})
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with evaluation_mode(model), torch.no_grad(), left_as_found(model, trainer), seeded(job.args.seed):
            inputs = dict(trainer._prepare_inputs(dict(sample)))
            given = KeyedInputs(inputs)
            with trainer.compute_loss_context_manager():
                trainer.compute_loss(model, inputs)
    except Exception as error:  # whatever is wrong shows where the model itself is called
        if is_out_of_memory(error):
            raise
    finally:
        hook.remove()
    if not calls:
        return frozenset()
    if given.are_exchanged(calls[0], job.not_in_keys):
        if job.args.uses_pipeline:
            raise_for_exchanged_inputs(model)
        return frozenset()
    return frozenset(sample) - calls[0].keys()


def _costs_of_units(
    job: TrainingJob, stack: LayerStack, padded: Batch, never_frozen: Collection[str]
) -> tuple[UnitCost, ...]:
    """
    Raises:
        UnsupportedModelError: batches cannot be cut by rows.
    """
    try:
        return measure_costs(stack, slice_rows(padded, 0, SAMPLE_ROWS), never_frozen)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        costs = measure_costs(stack, padded, never_frozen)  # fails likewise where that is not the reason
        if not job.args.uses_pipeline:
            return costs
        raise UnsupportedModelError(
            job.model,
            f"it takes a whole batch, but not the first {SAMPLE_ROWS} rows of each of its inputs"
            f" ({type(error).__name__}: {error}), so batches cannot be cut into micro-batches.",
            "Let the data collator return one entry for each row in all inputs (documents as a second dimension,"
            " padded), or set pipeline_parallel_size=1.",
        ) from error


def _make_equal(stack: LayerStack, mesh: ProcessMesh) -> None:
    """Weights and buffers, as DDP does when it begins. Collective over all processes."""
    different = synchronise_weights(stack.table, mesh) + synchronise_buffers(stack.model, mesh, lambda _: 0)
    if different:
        logger.warning(
            "%d parameters and buffers differed between the processes and were set to those of process 0, as DDP"
            " does (%s%s)."
            " Call set_seed() before the model is made to avoid this.",
            len(different),
            ", ".join(different[:3]),
            ", ..." if len(different) > 3 else "",
        )


def _wrap_replicas(
    job: TrainingJob, stage: StageModule, group: dist.ProcessGroup, may_be_unused: bool
) -> DistributedDataParallel:
    """DDP over the replicas of a stage, by Accelerate's handler and the `ddp_*` arguments."""
    handler = job.trainer.accelerator.ddp_handler
    options: dict[str, Any] = handler.to_kwargs() if handler is not None else {}
    if job.args.ddp_find_unused_parameters is None:
        # the Trainer looks for unused parameters in every step; here the loss of the sample has told
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
    """Seconds of the model's parts, where they decide something: K, M, whether the cache pays. Collective.

    They may decide otherwise in another run, which `full_determinism` forbids. A training that is resumed where it
    was interrupted keeps the times that it began with, and so its plans.

    Args:
        job: the training.
        cut: the model, whole; it keeps what is measured.
        rows: samples.
        collate: of these.
        checkpoint: that is resumed from.
    """
    if job.args.full_determinism or not (job.args.uses_pipeline or job.may_cache):
        return None
    if cut.timing is None:
        assert collate is not None
        batch = collate(rows[: min(job.args.per_device_train_batch_size, MOST_ROWS_TO_TIME)])
        # the first process's: hosts may differ, and all are to come to the same plan
        measured_on = job.mesh.gather_objects(_what_is_measured(job, cut, batch))[0]
        times = job.mesh.gather_objects(_read_times(cut, measured_on, checkpoint))[0]
        if times is None:
            with job.trainer.compute_loss_context_manager():
                times = _time_parts(cut.pipeline, batch, job.device)
        cut.timing = Timing(times, measured_on)
    return cut.timing.times


def _read_times(cut: CutModel, measured_on: Mapping[str, Any], checkpoint: Path | None) -> ModelTimes | None:
    """Those of the checkpoint that is resumed from; None if it has none of such a machine and job."""
    if checkpoint is None:
        return None
    try:
        content = json.loads((checkpoint / TIMES).read_text(encoding="utf-8"))
        times = ModelTimes.of_plain(content["times"])
        is_of_this = content["measured"] == measured_on and len(times.units) == len(cut.unit_costs)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return times if is_of_this else None


def _what_is_measured(job: TrainingJob, cut: CutModel, batch: Batch) -> dict[str, Any]:
    """All that times depend on, in JSON's values: with any of it changed they are measured again."""
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
    """Time the parts of a complete model on the slowest process. Collective over all processes.

    Returns:
        None where the model is not on the device, because it does not fit, or cannot be timed.
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
        logger.warning("The model's parts cannot be timed (%s): the plan goes by FLOPs.", error)
    everyone = mesh.gather_objects(times)
    measured = [theirs for theirs in everyone if theirs is not None]
    return slowest(measured) if len(measured) == len(everyone) else None
