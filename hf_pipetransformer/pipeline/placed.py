"""One layout on one process: the stage, its position in the pipeline, and the way of batches through it.

An `ElasticPipeline` lives as long as the model. A `PlacedPipeline` is built for one layout and discarded with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..model.called_inputs import BatchTags
from ..model.layer_range import CalledWith
from ..model.micro_batch import Batch
from ..model.refusals import refuse_recorded
from ..model.tags import without_tags
from ..planning.layout import Layout
from . import prediction
from .engines.dispatch import engine_for, server_for
from .engines.engine import Execution, Position, StepLoss
from .gradients import ReducedParameters, StageGradients, shared_parameters, trainable_parameters
from .mesh import ProcessMesh
from .messages import PipelineMessages
from .stage import StageModule
from .virtual_stages import VirtualStages

WrapReplicas = Callable[[StageModule, dist.ProcessGroup, bool], DistributedDataParallel]
"""Wraps a stage in DDP over a group; the flag says whether some of its parameters may end without a gradient."""

DDP_PARTS = ("reducer", "logger")
"""Attributes of DDP's wrapper that hold its buckets."""


class PlacedPipeline:
    """One process's part in running a layout. Building it is collective over all processes.

    Args:
        layout: the same on every process. The parameters that it assigns to this process must be here, with their
            `requires_grad` flags set.
        stage: this process's virtual stages under the layout.
        is_trainable: whether a parameter of the model is trained, on this or another process.
        mesh: all processes of the run.
        wrap_replicas: creates the DDP wrapper.
        execution: how the model is run under the layout, which decides about the engine.
    """

    def __init__(
        self,
        layout: Layout,
        stage: VirtualStages,
        is_trainable: Callable[[str], bool],
        mesh: ProcessMesh,
        wrap_replicas: WrapReplicas,
        execution: Execution,
    ) -> None:
        groups = mesh.groups(layout.pipeline_parallel_size)
        engine = engine_for(layout, execution)
        self.stage = stage
        self.messages = PipelineMessages(
            layout.ranks_of_pipeline(layout.replica_of(mesh.rank)),
            layout.stage_of(mesh.rank),
            groups.pipeline,
            groups.pipeline_control,
            stage.device,
            layout.placement,
        )
        self.computes_loss = self.messages.stage_index == self.messages.last
        """Whether this process computes the loss."""
        shared = shared_parameters(layout, stage, is_trainable, mesh)
        replicated: ReducedParameters | None = None
        self.wrapped: DistributedDataParallel | None = None
        """The stage wrapped in DDP, which averages gradients over the replicas during the backward pass."""
        if groups.replicas is not None:
            trainable, unreached = trainable_parameters(layout, stage, engine.may_reach_nothing, execution.unreached)
            # DDP counts a gradient once only: not of a loss that calls the model several times, also in the backward,
            # and not of a parameter of several virtual stages
            if engine.reduces_at_end or not stage.stack.runner.takes_batch or layout.num_virtual_stages > 1:
                replicated = ReducedParameters(
                    tuple(name for name in trainable if name not in unreached),
                    groups.replicas,
                    tuple(name for name in trainable if name in unreached),
                )
            elif trainable:
                self.wrapped = wrap_replicas(stage.first, groups.replicas, not unreached.isdisjoint(trainable))
        self.gradients = StageGradients(stage, groups.pipeline, shared, replicated)
        self._server = cache(partial(server_for, layout, stage, self.messages, execution))
        self._callback_server = self._server() if execution.serves_callbacks else None
        self.engine = engine(Position(layout, stage, self.messages, mesh, execution, self.wrapped, self._server))

    def close(self) -> None:
        """Undo the changes that this layout made to the model's modules, and free the buckets of DDP."""
        if self._callback_server is not None:
            self._callback_server.close()
        if self.wrapped is not None:
            # The buckets are as large as all gradients here. A remaining reference to the wrapper (of a callback, or a
            # traceback that waits for Python's garbage collector) would keep them; the logger refers to the reducer.
            for part in DDP_PARTS:
                vars(self.wrapped).pop(part, None)

    # ------------------------------------------------------------------------------------ steps
    def prepare(self, batch: Batch, loss: StepLoss) -> None:
        """Decide how a batch of a new shape is split, which may run parts of it. Collective over the pipeline."""
        with self.stage.computing(loss.of_part):
            self.engine.prepare(batch)

    def step(self, batch: Batch, loss: StepLoss, gradients_synchronise: bool = True) -> None:
        """Run forward and backward of this pipeline's share of a batch. Collective over all processes.

        Gradients are summed over micro-batches and added to the existing ones.

        Args:
            batch: keyword arguments of the model, on the device; the same on all stages of a pipeline.
            loss: the loss of this step.
            gradients_synchronise: complete the gradients: sum shared parameters' gradients over the stages, and
                average over the replicas, as DDP does.
        """
        self.gradients.begin()
        with self.stage.computing(loss.of_part):
            self.engine.step(batch, loss, gradients_synchronise)
        if gradients_synchronise:
            self.gradients.complete()

    def drop_zeros(self) -> None:
        """Leave lower stages without a gradient if none has come to them, on any replica, in the last step.

        Otherwise they have zeros, which the optimizer would use. Collective over all processes.
        """
        layout, mesh = self.engine.position.layout, self.engine.position.mesh
        cuts = mesh.gather_objects(self.engine.cut)
        of_replicas = [layout.ranks_of_pipeline(replica) for replica in range(layout.data_parallel_size)]
        self.gradients.drop_below(min(max(cuts[rank] for rank in ranks) for ranks in of_replicas))

    # ------------------------------------------------------------------------------------ calls that are served
    @property
    def can_serve(self) -> bool:
        """Whether calls of the model can be served: there are several stages, each with layers that follow another."""
        return self._server() is not None

    @property
    def serves_callbacks(self) -> bool:
        """Whether calls of the model that other processes make outside of the steps are served."""
        return self._callback_server is not None

    def serve_callbacks(self) -> None:
        """Serve other processes' calls outside of the steps. Collective over the pipeline."""
        if self._callback_server is not None:
            self._callback_server.serve_callbacks()

    @contextmanager
    def serving_callbacks(self) -> Iterator[None]:
        """Inside, calls outside of the steps are served if they can be. Collective over the pipeline."""
        server = self._server() if self._callback_server is None else None
        if server is None:
            yield
            return
        self._callback_server = server
        try:
            with server.serving_callbacks():
                yield
        finally:
            self._callback_server = None

    # ------------------------------------------------------------------------------------ without gradients
    def predict(self, batch: Batch, called: CalledWith, head: Callable[[Batch], Any]) -> Any:
        """The last stage's outputs for this process's own batch, prepared: `prediction.predict`.

        Collective over the pipeline.

        Args:
            batch: this process's samples.
            called: how `head` calls the model on them.
            head: as in `prediction.predict`.

        Raises:
            ValueError: attentions are asked for, or routers' outputs (`refuse_recorded`).
        """
        refuse_recorded(self.stage.stack.model, batch)
        return prediction.predict(self.stage, self.messages, self.messages.of_each_stage((batch, called)), head)

    def predict_served(self, batch: Batch, code: Callable[[Batch], Any], unread: Collection[str]) -> Any:
        """Run the user's code on the last stage for each process's batch. All stages serve its calls of the model.

        Collective over the pipeline.

        Args:
            batch: this process's samples, prepared.
            code: the user's code, as a function of a batch; it returns nested containers of tensors.
            unread: as of `StepLoss`.

        Returns:
            The result for this process's own batch.
        """
        server = self._server()
        assert server is not None
        results = []
        for rows in self.messages.of_each_stage(batch):
            inputs = without_tags(rows)
            with torch.no_grad():
                results.append(server.serve(rows, partial(code, inputs), unread))
        return self.messages.scatter(results)

    def read_ahead(self, tags: BatchTags | None) -> None:
        """On the first stage, let the shortcut prepare for the next batch. Not collective.

        Args:
            tags: the tags of the next batch; None if they are not known.
        """
        first = self.stage.first
        if first.shortcut is not None and not first.start and tags is not None:
            first.shortcut.read_ahead(tags, first.stop)
