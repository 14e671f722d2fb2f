"""What runs one plan on one process: the stage, its position in the pipeline, and how batches pass through it.

An `ElasticPipeline` lives as long as the model. A `PlacedPipeline` is built for one plan and discarded with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..model.called_inputs import TagsApart
from ..model.layer_range import CalledWith
from ..model.micro_batch import Batch, batch_rows
from ..model.tags import without_tags
from ..parts.driven.calls_apart import CallsApart
from ..parts.driven.served_calls import ServedCalls
from ..parts.driven.serving import ServingStage
from ..planning.layout import Layout
from . import prediction
from .gradients import ReducedParameters, StageGradients
from .mesh import ProcessMesh
from .messages import PipelineMessages
from .schedule import PipelineScheduler
from .stage import FIRST, ShapeBook, StageModule
from .virtual_stages import VirtualStages

T = TypeVar("T")

WrapReplicas = Callable[[StageModule, dist.ProcessGroup, bool], DistributedDataParallel]
"""Wraps a stage in DDP over a group; the flag says whether some of its parameters may end without a gradient."""


DDP_PARTS = ("reducer", "logger")
"""Attributes of DDP's wrapper that hold its buckets."""


class SliceSchedule(Protocol):
    """Runs the steps of a plan on slices of sequences."""

    def parts_of(self, batch: Batch) -> Any:
        """Decide how a batch of a new shape is split. Collective over the pipeline."""

    def step(self, batch: Batch) -> None:
        """Run forward and backward of a batch. Collective over the pipeline."""


class SequenceSlicing(Protocol):
    """Creates a `SliceSchedule` for a plan (`token_slices`, which builds on this package)."""

    def schedule(
        self,
        plan: Layout,
        stage: StageModule,
        messages: PipelineMessages,
        second_group: dist.ProcessGroup | None,
        shape_book: ShapeBook,
    ) -> SliceSchedule:
        """Create the schedule. Collective over the pipeline."""


@dataclass(frozen=True)
class Ways:
    """How a model is run, whatever the layout.

    Attributes:
        slicing: splits sequences along their tokens as well, if there are several stages.
        is_driven: whether the loss drives the pipeline, if there are several stages (`step` with `code`).
        serves_callbacks: whether calls of the model outside of the steps are served (`arrive`), if they can be.
    """

    slicing: SequenceSlicing | None = None
    is_driven: bool = False
    serves_callbacks: bool = False


class PlacedPipeline:
    """One process's part in running a plan. Building it is collective over all processes.

    A step is run in one of four ways: by a token schedule if sequences are split, by the loss if it drives the
    pipeline (`ServedCalls`), otherwise by a schedule of micro-batches; with a single stage there is no schedule, and a
    step costs what it costs in the stock Trainer.

    Args:
        plan: the same on every process. The parameters that it assigns to this process must be here, with their
            `requires_grad` flags set.
        stage: what this process holds under the plan.
        is_trainable: whether a parameter of the model is trained, on this or another process.
        mesh: all processes of the run.
        wrap_replicas: creates the DDP wrapper.
        ways: how the model is run under it.
    """

    def __init__(
        self,
        plan: Layout,
        stage: VirtualStages,
        is_trainable: Callable[[str], bool],
        mesh: ProcessMesh,
        wrap_replicas: WrapReplicas,
        ways: Ways,
    ) -> None:
        groups = mesh.groups(plan.pipeline_parallel_size)
        ranks = plan.ranks_of_pipeline(plan.replica_of(mesh.rank))
        self.stage = stage
        self.messages = PipelineMessages(
            ranks,
            plan.stage_of(mesh.rank),
            groups.pipeline,
            groups.pipeline_control,
            stage.device,
            plan.placement,
        )
        shared = _shared_parameters(plan, stage, is_trainable, mesh)
        trainable = [name for name in stage.names if stage.stack.table[name].requires_grad]
        unreached = stage.stack.unreached | (stage.stack.only_returned if stage.has_last_unit else frozenset())
        if groups.pipeline is None and stage.stack.is_random:
            unreached |= frozenset(trainable)  # each step may skip other layers; a model that does so is never cut
        slicing, is_driven = ways.slicing, ways.is_driven and groups.pipeline is not None
        if is_driven:
            unreached |= frozenset(trainable)  # the loss may call the model on anything, or not at all
        slices_tokens = slicing is not None and groups.pipeline is not None
        replicated: ReducedParameters | None = None
        self.wrapped: DistributedDataParallel | None = None
        """The stage wrapped in DDP, which averages gradients over the replicas during the backward pass."""
        # DDP counts a gradient once only: not of a loss that calls the model several times, also in the backward, and
        # not of a parameter of several virtual stages
        averages_at_end = (
            slices_tokens or is_driven or not stage.stack.runner.takes_batch or plan.num_virtual_stages > 1
        )
        if groups.replicas is not None and averages_at_end:
            replicated = ReducedParameters(
                tuple(name for name in trainable if name not in unreached),
                groups.replicas,
                tuple(name for name in trainable if name in unreached),
            )
        elif groups.replicas is not None and trainable:
            self.wrapped = wrap_replicas(stage.first, groups.replicas, not unreached.isdisjoint(trainable))
        self.computes_loss = self.messages.stage_index == self.messages.last
        """Whether this process computes the loss."""
        self.gradients = StageGradients(stage, groups.pipeline, shared, replicated)
        self._token_scheduler: SliceSchedule | None = None
        self._scheduler: PipelineScheduler | None = None
        self._num_microbatches = cache(plan.num_microbatches_for)
        self._served: ServedCalls | ServingStage | None = None
        self.apart: CallsApart | None = None
        """Serves calls of the model that other processes make outside of the steps; None if nobody may make any."""
        if groups.pipeline is None:
            return
        if plan.num_virtual_stages == 1:
            most_parts = plan.requested_microbatches or plan.num_microbatches
            if stage.has_last_unit:
                self._served = ServedCalls(stage.last, self.messages, most_parts)
            else:
                self._served = ServingStage(stage.last, self.messages)
        if self._served is not None and ways.serves_callbacks:
            self.apart = CallsApart(self._served)
        if is_driven:
            return  # no schedule: the loss's calls are served
        books = shape_books(stage, self.messages)
        if slicing is not None:
            second_group = mesh.second_pipeline_group(plan.pipeline_parallel_size)
            self._token_scheduler = slicing.schedule(plan, stage.first, self.messages, second_group, books[0])
            return
        modules: Sequence[nn.Module] = stage.stages if self.wrapped is None else (self.wrapped,)
        self._scheduler = PipelineScheduler(stage, modules, self.messages, books, plan.schedule)

    def close(self) -> None:
        """Undo the changes that this plan made to the model's modules, and free the buckets of DDP."""
        if self.apart is not None:
            self.apart.close()
        if self.wrapped is not None:
            # The buckets are as large as all gradients here. Whoever still refers to the wrapper (a callback, or a
            # traceback that waits for Python's garbage collector) would keep them; the logger refers to the reducer.
            for part in DDP_PARTS:
                vars(self.wrapped).pop(part, None)

    # ------------------------------------------------------------------------------------ steps
    def prepare(self, batch: Batch) -> None:
        """Decide how a batch of a new shape is split, which may run parts of it. Collective over the pipeline."""
        if self._token_scheduler is not None:
            self._token_scheduler.parts_of(batch)

    def step(
        self,
        batch: Batch,
        gradients_synchronise: bool = True,
        code: Callable[[], None] | None = None,
        unread: Collection[str] = (),
    ) -> None:
        """Run forward and backward of this pipeline's share of a batch. Collective over all processes.

        Gradients are summed over micro-batches and added to the existing ones.

        Args:
            batch: keyword arguments of the model, on the device; the same on all stages of a pipeline.
            gradients_synchronise: complete the gradients: sum those of shared parameters over the stages, and average
                over the replicas, as DDP does.
            code: if the loss drives the pipeline: the loss and its backward, whose calls of the model are served.
            unread: as in `ServedCalls.run`.
        """
        self.gradients.keep_sums_once()
        if code is not None:
            self.serve(batch, code, unread)
        elif self._token_scheduler is not None:
            self._token_scheduler.step(batch)
        elif self._scheduler is not None:
            self._scheduler.step(batch, self._num_microbatches(batch_rows(batch)), gradients_synchronise)
        else:
            self._step_alone(batch, gradients_synchronise)
        if gradients_synchronise:
            self.gradients.complete()

    def serve(self, batch: Batch, code: Callable[[], T], unread: Collection[str] = ()) -> T | None:
        """Run the user's code on the last stage, whose calls of the model all stages serve: `ServedCalls`.

        Collective over the pipeline, which must have no virtual stages.

        Returns:
            What the code returns, on the last stage.
        """
        assert self._served is not None
        return self._served.run(batch, code, unread)

    @property
    def can_serve(self) -> bool:
        """Whether calls of the model can be served: there are several stages, each with layers that follow another."""
        return self._served is not None

    # ------------------------------------------------------------------------------------ without gradients
    def predict(self, batch: Batch, called: CalledWith, head: Callable[[Batch], Any]) -> Any:
        """The last stage's outputs for this process's own batch, prepared: `prediction.predict`.

        Collective over the pipeline.

        Args:
            batch: this process's samples.
            called: how `head` calls the model on them.
            head: as in `prediction.predict`.
        """
        return prediction.predict(self.stage, self.messages, self.messages.of_each_stage((batch, called)), head)

    def predict_served(self, batch: Batch, code: Callable[[Batch], Any], unread: Collection[str]) -> Any:
        """Run the user's code on the last stage for each process's batch, whose calls of the model all stages serve.

        Collective over the pipeline.

        Args:
            batch: this process's samples, prepared.
            code: the user's code, as a function of a batch; it returns nested containers of tensors.
            unread: as in `ServedCalls.run`.

        Returns:
            The result for this process's own batch.
        """
        results = []
        for rows in self.messages.of_each_stage(batch):
            inputs = without_tags(rows)
            with torch.no_grad():
                results.append(self.serve(rows, partial(code, inputs), unread))
        return self.messages.scatter(results)

    def read_ahead(self, tags: TagsApart | None) -> None:
        """On the first stage, let the shortcut prepare for the next batch. Not collective.

        Args:
            tags: the tags of the next batch; None if they are not known.
        """
        first = self.stage.first
        if first.shortcut is not None and not first.start and tags is not None:
            first.shortcut.read_ahead(tags, first.stop)

    # ------------------------------------------------------------------------------------ inside
    def _step_alone(self, batch: Batch, gradients_synchronise: bool) -> None:
        stage, wrapped = self.stage.first, self.wrapped
        unreduced = wrapped.no_sync() if wrapped is not None and not gradients_synchronise else nullcontext()
        with stage.holding((batch,)), unreduced:
            (wrapped if wrapped is not None else stage)(index=FIRST).backward()


def shape_books(held: VirtualStages, messages: PipelineMessages) -> list[ShapeBook]:
    """Return a book of shapes for each virtual stage of this process, which learns them from its neighbours."""
    return [
        ShapeBook(stage, partial(messages.receive_shapes, index), partial(messages.send_shapes, index))
        for index, stage in zip(messages.virtual_stages, held.stages, strict=True)
    ]


def _shared_parameters(
    plan: Layout, stage: VirtualStages, is_trainable: Callable[[str], bool], mesh: ProcessMesh
) -> list[ReducedParameters]:
    """Group the trainable parameters that this stage and others hold by these. Collective over all processes."""
    by_stages: dict[tuple[int, ...], list[str]] = {}
    for name, virtual_stages in stage.stack.shared(plan.stage_bounds).items():
        stages = tuple(sorted({plan.placement.stage_of(index) for index in virtual_stages}))
        if is_trainable(name) and len(stages) > 1:
            by_stages.setdefault(stages, []).append(name)
    pipelines = [plan.ranks_of_pipeline(replica) for replica in range(plan.data_parallel_size)]
    groups = {s: mesh.subgroup([[ranks[stage] for stage in s] for ranks in pipelines]) for s in by_stages}
    return [ReducedParameters(tuple(by_stages[s]), group) for s, group in groups.items() if group is not None]
