"""The permanent handle: a model as a pipeline of K stages x R replicas.

The Trainer's loop knows an `ElasticPipeline` as its `model`. What runs inside, a `PlacedPipeline`, is built anew for
another plan; the handle, the optimizer and the user's model stay the same objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from ..cache.activation_cache import ActivationCache
from ..cache.content_keys import named_inputs
from ..model.frozen_prefix import FreezableLayers
from ..model.layer_stack import LayerStack
from ..model.micro_batch import Batch, on_device
from ..planning.plan import PipelinePlan
from ..resilience.progress import PROGRESS, phase
from . import prediction
from .holders import holders_under, source_of_buffers
from .mesh import ProcessMesh
from .placed import PlacedPipeline, SequenceSlicing, WrapReplicas
from .stage import LossFunction, StageModule
from .state import Holders, OptimizerState, WeightState, WholeParameter, exchange, moves_between, synchronise_buffers


@dataclass(frozen=True)
class Transformation:
    """What going over to another plan took, on one process.

    Attributes:
        before: the plan that was in force.
        after: the plan that is.
        seconds: by phase: freeze, move, drop, build.
        bytes_moved: received by this process.
    """

    before: PipelinePlan
    after: PipelinePlan
    seconds: Mapping[str, float]
    bytes_moved: int


class ElasticPipeline(nn.Module):
    """One process's part in running a model by a plan, and by the next one.

    Its only child is the current stage: `parameters()`, `zero_grad()`, `train()` and `no_sync()` act on it.

    Args:
        stack: the units of the model, which is complete on every process.
        mesh: the processes.
        device: of this process.
        wrap_replicas: makes the DDP wrapper.
        freezable: what freezing means for the model; None: it is never frozen.
    """

    stack: LayerStack
    stage: StageModule | None

    def __init__(
        self,
        stack: LayerStack,
        mesh: ProcessMesh,
        device: torch.device,
        wrap_replicas: WrapReplicas,
        freezable: FreezableLayers | None = None,
    ) -> None:
        super().__init__()
        self.__dict__["stack"] = stack  # not registered: the stage registers what is here
        self.mesh = mesh
        self.device = device
        self.weights = WeightState(stack.table, mesh)
        self.freezable = freezable
        self.slicing: SequenceSlicing | None = None
        """Cut sequences along their tokens as well, from the next plan on."""
        self.cache: ActivationCache | None = None
        self.offloads = device.type != "cpu"
        """Whether cached layers' weights leave the device; on the CPU they would gain nothing."""
        self.plan: PipelinePlan | None = None
        """By which the weights are spread; None: the model is whole."""
        self.placed: PlacedPipeline | None = None
        """What runs the plan; None while nothing does: before and after, and between two plans."""
        self.stage = None  # of what is placed, registered
        self._wrap_replicas = wrap_replicas
        self._loss_of: LossFunction | None = None  # until the plan is left
        self._optimizer: OptimizerState | None = None
        self._set_aside: dict[str, WholeParameter] | None = None
        self._gradients_synchronise = True

    # ------------------------------------------------------------------------------------ layout
    @property
    def model(self) -> nn.Module:
        """The user's model. While a plan is in force, the parameters of other stages are placeholders."""
        return self.stack.model

    @property
    def is_placed(self) -> bool:
        return self.plan is not None

    @property
    def current_plan(self) -> PipelinePlan:
        assert self.plan is not None, "place() first"
        return self.plan

    @property
    def num_stages(self) -> int:
        return self.current_plan.pipeline_parallel_size

    @property
    def num_replicas(self) -> int:
        return self.current_plan.data_parallel_size

    @property
    def stage_index(self) -> int:
        return self.current_plan.stage_of(self.mesh.rank)

    @property
    def replica_index(self) -> int:
        return self.current_plan.replica_of(self.mesh.rank)

    def holders(self) -> Holders:
        """The ranks that hold each parameter under the plan in force."""
        return holders_under(self.current_plan, self.stack)

    @property
    def missing_parameters(self) -> dict[str, nn.Parameter]:
        """Those that other stages hold, by name."""
        table = self.stack.table
        return {name: table[name] for name in table.names if not self.weights.is_here(name)}

    # ------------------------------------------------------------------------------------ from plan to plan
    def place(self, plan: PipelinePlan, loss_of: LossFunction | None = None, keep_weights_aside: bool = False) -> None:
        """Take the role that `plan` has for this process. Collective over all processes.

        Args:
            plan: the same on every process.
            loss_of: computes a micro-batch's part of the loss, on the last stage, until the plans are left; None: an
                evaluation, nobody trains.
            keep_weights_aside: keep the complete weights where they are, for `put_back`; for an evaluation, which
                does not change them.
        """
        assert not self.is_placed, "the model must be whole"
        self.weights.read_flags()
        if keep_weights_aside:
            self._set_aside = self.weights.set_aside()
        elif self._optimizer is not None:
            self._bring_optimizer_state(self._optimizer, holders_under(plan, self.stack))
        self._freeze(plan)
        self.plan, self._loss_of = plan, loss_of
        self.weights.keep_only(self._names_here(), self.device)
        self.stack.runner.install()
        self._build(takes_optimizer=not keep_weights_aside)

    def _bring_optimizer_state(self, optimizer: OptimizerState, holders: Holders) -> None:
        """What an earlier training has left where its last plan had the parameters. Collective over all processes."""
        before = optimizer.holders()
        moves = moves_between(before, {name: holders[name] for name in before})
        exchange(moves, self.stack.table, self.weights, optimizer, self.mesh, self.device)

    def transform(self, plan: PipelinePlan) -> Transformation:
        """Go over to another plan, between two optimizer steps. Collective over all processes.

        1. Freeze: the newly frozen parameters lose gradient and optimizer state.
        2. Move: parameters and their optimizer state go to the ranks that hold them under the new plan.
        3. Drop: what this process holds no more becomes a placeholder.
        4. Build: stage, groups, DDP and schedule. The optimizer and its groups stay, with other parameters in them.

        The Trainer's loop, the learning rate schedule and the gradient scaler notice nothing.

        Args:
            plan: the same on every process; it may have fewer or more stages. Frozen units stay frozen.

        Returns:
            What it took, on this process.
        """
        before = self.current_plan
        self.weights.onload()
        self.weights.follow_flags(self.holders())
        self.synchronise_buffers()
        assert plan.num_frozen_layers >= before.num_frozen_layers, "frozen layers do not thaw"
        seconds: dict[str, float] = {}
        with _timed_phase("freeze", seconds):
            self._freeze(plan)
            if self._optimizer is not None:
                self._optimizer.keep_what_is_here()
            self._close()
        with _timed_phase("move", seconds):
            moves = moves_between(self.holders(), holders_under(plan, self.stack))
            moved = exchange(moves, self.stack.table, self.weights, self._optimizer, self.mesh, self.device)
        self.plan = plan
        with _timed_phase("drop", seconds):
            self.weights.keep_only(self._names_here(), self.device)
        with _timed_phase("build", seconds):
            self._build()
        PROGRESS.forget_pace()
        return Transformation(before, plan, seconds, moved)

    def replace_plan(self, plan: PipelinePlan) -> None:
        """Go over to a plan of one stage with the same frozen layers, which counts other ones as cached.

        Each process does the same work at the same place, or none in its stead: what is placed stays. Not collective.
        """
        assert self.num_stages == plan.pipeline_parallel_size == 1
        assert self.current_plan.num_frozen_layers == plan.num_frozen_layers
        self.plan = plan

    def follow_flags(self) -> None:
        """Train what the user's code has set `requires_grad` for, and nothing else. Collective over all processes.

        Between two passes; the plan stays in force.

        Raises:
            ValueError: parameters that a freeze policy has frozen require a gradient again.
        """
        self.weights.onload()
        self.weights.follow_flags(self.holders())
        shared_are_summed = self._current.gradients.shared_are_summed
        self._close()
        self.weights.keep_only(self._names_here(), self.device)
        # gradients may go on accumulating
        self._build().gradients.shared_are_summed = shared_are_summed
        PROGRESS.forget_pace()

    def _freeze(self, plan: PipelinePlan) -> None:
        if plan.num_frozen_layers:
            assert self.freezable is not None
            self.weights.freeze(self.freezable.frozen(plan.num_frozen_layers))

    def _bounds(self) -> tuple[int, int]:
        """This process's units: the first, and the first after them."""
        start, stop = self.current_plan.stage_bounds[self.stage_index : self.stage_index + 2]
        return start, stop

    def _names_here(self) -> frozenset[str]:
        """The parameters that this process holds under the plan."""
        return self.stack.owned(*self._bounds())

    def _build(self, takes_optimizer: bool = True) -> PlacedPipeline:
        """What runs the plan, whose parameters are here. Collective over all processes."""
        plan, (start, stop) = self.current_plan, self._bounds()
        self.stack.runner.restrict_to(range(start, stop) if self.num_stages > 1 else None)
        self.stack.runner.freeze(plan.num_frozen_layers)
        if self._optimizer is not None and takes_optimizer:
            self._optimizer.keep_what_is_here()
        stage = StageModule(self.stack, start, stop, self._loss_of, self.device)
        stage.cache = self.cache
        placed = PlacedPipeline(
            plan, stage, self.weights.is_trainable, self.mesh, self._wrap_replicas, slicing=self.slicing
        )
        self.placed, self.stage = placed, stage
        self.train(self.training)
        self.offload_cached_layers()
        return placed

    def _close(self) -> None:
        if self.placed is not None:
            self.placed.close()
        self.placed = self.stage = None

    @property
    def _current(self) -> PlacedPipeline:
        assert self.placed is not None, "place() first"
        return self.placed

    # ------------------------------------------------------------------------------------ whole again
    def put_back(self) -> None:
        """After an evaluation: the complete weights that `place` has set aside. No communication."""
        assert self._set_aside is not None
        weights, self._set_aside = self._set_aside, None
        self._leave_plan()
        self.weights.put_back(weights)

    def gather(self, device: torch.device) -> None:
        """Make the model whole again on every process. Collective over all processes.

        Args:
            device: where the weights go.
        """
        self.synchronise_buffers()
        holders = self.holders()
        self._leave_plan()
        self.weights.restore(holders, device)

    def _leave_plan(self) -> None:
        self.weights.onload()
        self.cache = None  # the weights may change from here on
        self.stack.runner.restrict_to(None)
        self.stack.runner.remove()
        self._close()
        self.plan, self._loss_of = None, None

    def synchronise_buffers(self) -> None:
        """Give every process the buffers of the process that runs their module. Collective over all processes.

        The first replica's count, as under DDP.
        """
        synchronise_buffers(self.model, self.mesh, source_of_buffers(self.stack.table, self.holders()))

    # ------------------------------------------------------------------------------------ frozen layers' outputs
    def use_cache(self, cache: ActivationCache | None) -> None:
        """From now on take frozen layers' outputs from a cache, or no longer."""
        self.cache = cache
        if self.stage is not None:
            self.stage.cache = cache

    def offload_cached_layers(self) -> None:
        """Free the device of the weights that only cached layers need.

        The first forward that runs a cached layer, whoever asks for it, brings them back.
        """
        plan, stage = self.current_plan, self.stage
        if not self.offloads or stage is None or stage.start or not plan.num_cached_layers:
            return
        assert self.freezable is not None
        needed = self.stack.owned(plan.num_cached_layers, stage.stop)
        if stage.is_last:
            needed |= self.freezable.head
        runs_cached_layers = lambda: self.stack.runner.start_of_pass < plan.num_cached_layers  # noqa: E731
        self.weights.offload(self.freezable.frozen(plan.num_cached_layers) - needed, runs_cached_layers)

    def outputs_of_frozen(self, batch: Batch, boundary: int, seed: int) -> tuple[torch.Tensor, ...] | None:
        """What the first `boundary` units, all frozen, make of a few rows in training: `prediction.outputs_of_frozen`.

        Collective over the pipeline.
        """
        self.weights.onload()
        return prediction.outputs_of_frozen(self._current.stage, self._current.messages, batch, boundary, seed)

    # ------------------------------------------------------------------------------------ the module's face
    def train(self, mode: bool = True) -> ElasticPipeline:
        super().train(mode)  # of the stage, which sets the model's
        if self.stage is None:
            self.model.train(mode)
        return self

    def forward(self, *positional: Any, **batch: Any) -> Any:
        """The model's own, where a `training_step` or `prediction_step` of the user's calls what it was given.

        Without gradients each stage of a pipeline gets the outputs for its own batch (`predict`); this is collective
        over the pipeline.

        Raises:
            ValueError: where gradients are computed one stage of several has no output; nor would DDP see it.
        """
        is_trained = torch.is_grad_enabled() and self.training
        if self.is_placed and self.num_stages > 1:
            if not is_trained:
                inputs = dict(named_inputs(self.model, positional, batch))
                to_device = partial(on_device, device=self.device)
                return self.predict(inputs, to_device, lambda rows: self.model(**rows))
            raise ValueError(
                "The model is spread over several stages: in training one alone has no output. Call"
                " super().training_step() in a training_step of your own and put your loss into compute_loss; or set"
                " pipeline_parallel_size=1."
            )
        if self.placed is not None and self.placed.wrapped is not None and is_trained:
            raise ValueError(
                f"The gradients of {self.num_replicas} replicas are averaged where the Trainer's own training_step"
                " runs: call super().training_step() and put your loss into compute_loss, or train in one process."
            )
        if not self.is_placed or not self.stack.runner.num_frozen:
            return self.model(*positional, **batch)
        with self.stack.runner.to_the_end(0, None):
            return self.model(*positional, **batch)

    def predict(self, batch: Batch, prepare: Callable[[Batch], Batch], head: Callable[[Batch], Any]) -> Any:
        """What the last stage makes of this process's own batch: `prediction.predict`.

        Collective over the pipeline.
        """
        return prediction.predict(self._current.stage, self._current.messages, batch, prepare, head)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are accumulated and not yet reduced over the replicas."""
        self._gradients_synchronise = False
        try:
            yield
        finally:
            self._gradients_synchronise = True

    # ------------------------------------------------------------------------------------ training, as it is placed
    def share(self, mine: Any) -> Any:
        """The first stage's value on all stages: the batch that all train on. Collective over the pipeline."""
        return self._current.share(mine)

    def prepare(self, batch: Batch) -> None:
        """Settle how a batch of a new shape is cut, which may run parts of it. Collective over the pipeline."""
        self._current.prepare(batch)

    def step(self, batch: Batch, keeps_received: bool = False) -> list[Sequence[torch.Tensor]]:
        """Forward and backward of this pipeline's slice of a batch: `PlacedPipeline.step`.

        Collective over all processes. Gradients are complete afterwards, unless inside `no_sync`.
        """
        return self._current.step(batch, self._gradients_synchronise, keeps_received)

    def losses_of_parts_and_whole(
        self, batch: Batch, received: Sequence[Sequence[torch.Tensor]], part_of_loss: LossFunction
    ) -> list[torch.Tensor]:
        """On the last stage, after a step: `PlacedPipeline.losses_of_parts_and_whole`. Not collective."""
        return self._current.losses_of_parts_and_whole(batch, received, part_of_loss)

    @property
    def settled_microbatches(self) -> dict[tuple[int, int], int]:
        """Of this pipeline under the plan in force, where M was tried: (rows, elements of a row) -> M."""
        return self._current.settled_microbatches

    def settle_microbatches(self, settled: Mapping[tuple[int, int], int]) -> None:
        """Go on with what an earlier job has settled under this plan."""
        self._current.settle_microbatches(settled)

    def clip_grad_norm(
        self, max_norm: float, unscale: Callable[[], None] | None = None, loss_scale: float = 1.0
    ) -> torch.Tensor:
        """Clip by the norm of the whole model's gradient: `StageGradients.clip`. Collective over the pipeline."""
        stand_in = self._optimizer.stand_in if self._optimizer is not None else None
        return self._current.gradients.clip(max_norm, unscale, loss_scale, stand_in)

    def squared_gradient_norms(self, loss_scale: float = 1.0) -> torch.Tensor:
        """Of each unit, before clipping: `StageGradients.squared_norms`. Collective over the pipeline."""
        assert self.freezable is not None
        return self._current.gradients.squared_norms(self.freezable.inside, loss_scale)

    # ------------------------------------------------------------------------------------ the optimizer
    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer over the whole model's parameters update those that are here, now and after `place`."""
        self._optimizer = OptimizerState(unwrapped(optimizer), self.stack.table, self.weights, self.mesh)

    def detach_optimizer(self) -> None:
        """Give back the optimizer that was adopted, for another pipeline of the model to adopt. Not collective."""
        if self._optimizer is not None:
            self._optimizer.release()
            self._optimizer = None

    def updates_with(self, optimizer: Any) -> bool:
        """Whether this optimizer is the one that was adopted last, with or without Accelerate's wrapper."""
        return self._optimizer is not None and self._optimizer.optimizer is unwrapped(optimizer)

    @property
    def optimizer_state(self) -> OptimizerState:
        assert self._optimizer is not None, "adopt() an optimizer first"
        return self._optimizer


@contextmanager
def _timed_phase(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """A phase of a transformation."""
    began = time.perf_counter()
    with phase(name):
        yield
    seconds[name] = time.perf_counter() - began


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
