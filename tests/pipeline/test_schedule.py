"""A pipeline's gradients are those of the uncut model, for every schedule and number of micro-batches."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from model_zoo import MODELS
from selection import slow
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.model.micro_batch import Batch, slice_rows
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.pipeline.messages import PipelineMessages
from hf_pipetransformer.pipeline.placed import shape_books
from hf_pipetransformer.pipeline.schedule import KEPT_SCHEDULES, PipelineScheduler
from hf_pipetransformer.pipeline.virtual_stages import VirtualStages
from hf_pipetransformer.planning.schedules import schedule_named

ZOO_MODEL = MODELS["bert-classification"]  # four units and no shared parameter
TOLERANCE = 1e-5


class Pipeline:
    """This rank's part of K x V stages, and the schedule that drives it. A micro-batch's loss is its mean / M."""

    def __init__(self, stages: int, schedule: str, frozen_units: int = 0, virtual: int = 1) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        mesh = ProcessMesh(timedelta(seconds=60))
        groups = mesh.groups(stages)
        self.model = ZOO_MODEL.build()
        stack = LayerStack.discover(self.model, ZOO_MODEL.batch(2))
        for name in stack.owned(0, frozen_units):
            stack.table[name].requires_grad_(False)
        stack.runner.install()
        self.stack, self.num_stages, self.num_microbatches = stack, stages, 1
        units = stack.num_units // (stages * virtual)
        placement = schedule_named(schedule).placement(stages, virtual)
        self.index, self.replica = placement.position_of(mesh.rank % stages), mesh.rank // stages
        ranges = [range(i * units, (i + 1) * units) for i in placement.held_by(self.index)]
        self.stage = VirtualStages(stack, ranges, self.loss_of, torch.device("cpu"))
        modules: list[nn.Module] = list(self.stage.stages)
        if groups.replicas is not None:
            modules = [DistributedDataParallel(self.stage.first, process_group=groups.replicas, init_sync=False)]
        ranks = [self.replica * stages + placement.position_of(stage) for stage in range(stages)]
        control = groups.pipeline_control
        messages = PipelineMessages(ranks, self.index, groups.pipeline, control, torch.device("cpu"), placement)
        self.scheduler = PipelineScheduler(
            self.stage, modules, self.index, placement, groups.pipeline, shape_books(self.stage, messages), schedule
        )

    def loss_of(self, model: nn.Module, micro_batch: Batch) -> torch.Tensor:
        return model(**micro_batch).loss / self.num_microbatches

    def step(self, batch: Batch, num_microbatches: int, synchronise: bool = True) -> None:
        self.num_microbatches = num_microbatches
        self.scheduler.step(batch, num_microbatches, synchronise)

    def take_gradients(self) -> dict[str, torch.Tensor | None]:
        gradients = {name: self.stack.table[name].grad for name in self.stage.names}
        self.stage.zero_grad(set_to_none=True)
        return gradients


def uncut_gradients(*batches: Batch, frozen: tuple[str, ...] = ()) -> dict[str, torch.Tensor | None]:
    """Added up over the batches."""
    model = ZOO_MODEL.build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    for batch in batches:
        model(**batch).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal(actual: dict, expected: dict) -> None:
    for name, gradient in actual.items():
        if gradient is None or expected[name] is None:
            assert gradient is expected[name], name
        else:
            assert (gradient - expected[name]).abs().max() <= TOLERANCE, name


def batch_of(rows: int, length: int = 7, seed: int = 5) -> Batch:
    batch = ZOO_MODEL.batch(rows, seed)
    return {name: tensor[:, :length] if tensor.dim() > 1 else tensor for name, tensor in batch.items()}


# ---------------------------------------------------------------------------------------------------------


def every_number_of_microbatches(rank, world_size, schedule):
    pipeline, expected = Pipeline(4, schedule), uncut_gradients(batch_of(8))
    for count in (1, 2, 4, 8):
        pipeline.step(batch_of(8), count)
        assert_equal(pipeline.take_gradients(), expected)
    return [type(schedule).__name__ for _, schedule in pipeline.scheduler._built.values()]


@pytest.mark.parametrize(
    ("schedule", "run_by"),
    [
        ("gpipe", ["ScheduleGPipe"] * 4),
        ("1f1b", ["ScheduleGPipe", "ScheduleGPipe", "Schedule1F1B", "Schedule1F1B"]),  # 1F1B needs as many as stages
    ],
)
def test_gradients_for_every_number_of_microbatches(schedule, run_by):
    assert run_ranks(every_number_of_microbatches, 4, schedule) == [run_by] * 4


def changing_shapes(rank, world_size, schedule):
    """Longer, shorter, fewer rows, and the first shape again: torch would read old buffers or abort."""
    pipeline = Pipeline(4, schedule)
    for rows, length, count in [(8, 5, 4), (8, 7, 4), (4, 5, 4), (4, 7, 2), (1, 6, 1), (4, 6, 2), (8, 5, 4)]:
        batch = batch_of(rows, length, seed=rows + length)
        pipeline.step(batch, count)
        assert_equal(pipeline.take_gradients(), uncut_gradients(batch))
    for length in range(1, 8):  # no more than a bounded number of receive buffers is kept
        for rows in (1, 2, 3):
            pipeline.step(batch_of(rows, length), 1)
    return len(pipeline.scheduler._built)


@pytest.mark.parametrize("schedule", ["1f1b", *slow("gpipe")])
def test_shapes_that_change_between_steps(schedule):
    assert run_ranks(changing_shapes, 4, schedule) == [KEPT_SCHEDULES] * 4


def interleaved(rank, world_size, name, frozen_units):
    """2 processes with two stages each; batches that change their shape, and every number of micro-batches."""
    pipeline, schedule = Pipeline(2, name, frozen_units, virtual=2), schedule_named(name)
    held = schedule.placement(2, 2).held_by(pipeline.index)
    frozen = tuple(pipeline.stack.owned(0, frozen_units))
    expected = uncut_gradients(batch_of(12), frozen=frozen)
    for count in (1, 2, 3, 4, 6, 12):
        pipeline.step(batch_of(12), count)
        assert_equal(pipeline.take_gradients(), expected)
        built = next(reversed(pipeline.scheduler._built.values()))[1]
        of_torch = [str(action) for action in built.pipeline_order[pipeline.index] if action is not None]
        names = {"forward": "F", "backward": "I" if schedule.splits_backward else "B", "weights": "W"}
        order = schedule.order_of_work(pipeline.index, 2, count, 2)
        assert of_torch == [f"{held[part]}{names[kind]}{i}" for kind, part, i in order]
    pipeline.step(batch_of(8, 5), 4)
    pipeline.step(batch_of(4, 6), 2)
    together = uncut_gradients(batch_of(8, 5), batch_of(4, 6), frozen=frozen)
    assert_equal(pipeline.take_gradients(), together)
    return type(built).__name__


@pytest.mark.parametrize("frozen_units", [0, *slow(1, 3)])
@pytest.mark.parametrize(
    ("name", "run_by"), [("interleaved1f1b", "ScheduleInterleaved1F1B"), ("zbv", "ScheduleZBVZeroBubble")]
)
def test_gradients_of_an_interleaved_schedule(name, run_by, frozen_units):
    assert run_ranks(interleaved, 2, name, frozen_units) == [run_by] * 2


def frozen_stages(rank, world_size, schedule, frozen_units):
    pipeline = Pipeline(4, schedule, frozen_units)
    expected = uncut_gradients(batch_of(8), frozen=tuple(pipeline.stack.owned(0, frozen_units)))
    for count in (2, 4, 8):
        pipeline.step(batch_of(8), count)
        gradients = pipeline.take_gradients()
        assert_equal(gradients, expected)
    return any(gradient is not None for gradient in gradients.values())


@pytest.mark.parametrize("schedule", ["1f1b", *slow("gpipe")])
@pytest.mark.parametrize("frozen_units", [1, 3])
def test_frozen_first_stages_take_part_without_a_backward(schedule, frozen_units):
    trained = run_ranks(frozen_stages, 4, schedule, frozen_units)
    assert trained[::-1] == [stage >= frozen_units for stage in range(4)]


def accumulation(rank, world_size, schedule):
    """2 stages x 2 replicas, two micro-steps of 4 rows for each replica."""
    pipeline = Pipeline(2, schedule)
    first, second = batch_of(8, seed=1), batch_of(8, seed=2)
    mine = [slice_rows(batch, 4 * pipeline.replica, 4 * pipeline.replica + 4) for batch in (first, second)]
    pipeline.step(mine[0], 4, synchronise=False)
    own = {name: pipeline.stack.table[name].grad.clone() for name in pipeline.stage.names}
    assert_equal(own, uncut_gradients(mine[0]))  # nothing has come from the other replica
    pipeline.step(mine[1], 2, synchronise=True)
    assert_equal(pipeline.take_gradients(), uncut_gradients(first, second))  # DDP's mean of means of equal size
    pipeline.step(mine[0], 4)
    assert_equal(pipeline.take_gradients(), uncut_gradients(first))


@pytest.mark.parametrize("schedule", ["1f1b", *slow("gpipe")])
def test_accumulation_reduces_over_the_replicas_at_the_last_step_only(schedule):
    run_ranks(accumulation, 4, schedule)


def failing_step(rank, world_size):
    """A step that fails on every stage leaves nothing behind that the next one would take for its own."""
    pipeline = Pipeline(2, "gpipe")
    pipeline.step(batch_of(4), 2)
    expected = pipeline.take_gradients()
    with pytest.raises(AssertionError, match="4 samples are not divisible into 3"):
        pipeline.step(batch_of(4), 3)
    assert pipeline.stage.micro_batches == ()
    pipeline.step(batch_of(4), 2)
    assert_equal(pipeline.take_gradients(), expected)


def test_the_step_after_a_failed_one():
    run_ranks(failing_step, 2)


class IgnoresTheLayers(Pipeline):
    def loss_of(self, model: nn.Module, micro_batch: Batch) -> torch.Tensor:
        model(**micro_batch)
        return model.classifier.bias.sum() / self.num_microbatches


def ignored_layers(rank, world_size):
    pipeline = IgnoresTheLayers(2, "1f1b")
    for count in (2, 4):
        pipeline.step(batch_of(4), count)
        found = {name: gradient for name, gradient in pipeline.take_gradients().items() if gradient is not None}
    return {name: gradient.unique().tolist() for name, gradient in found.items()}


def test_layers_that_a_loss_does_not_depend_on_get_zeros():
    last, first = run_ranks(ignored_layers, 2)
    assert set(first) >= {"bert.encoder.layer.0.output.dense.weight", "bert.encoder.layer.1.output.dense.weight"}
    assert all(values == [0.0] for values in first.values())
    assert last == {"classifier.bias": [1.0]}
