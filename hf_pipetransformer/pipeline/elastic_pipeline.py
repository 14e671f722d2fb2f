"""How a model that runs as a pipeline of K stages x R replicas goes from one layout to another.

The Trainer's loop sees an `ElasticPipeline` as its `model`. The `PlacedPipeline` inside it is built anew for each
layout; the handle, the optimizer and the user's model remain the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..model.frozen_prefix import FreezableLayers
from ..model.layer_stack import LayerStack
from ..model.mapped_weights import into_memory
from ..model.micro_batch import Batch
from ..planning.layout import Layout
from ..progress import PROGRESS
from .engines.engine import Execution, StepLoss
from .handle import ModelHandle
from .mesh import ProcessMesh
from .moves import Distribution, Transformation, move, timed_phase
from .optimizer_state import OptimizerState, unwrapped
from .placed import PlacedPipeline, WrapReplicas
from .stage import Shortcut
from .virtual_stages import VirtualStages
from .weights import Weights


class ElasticPipeline(ModelHandle):
    """One process's part in running a model under a layout, and under the layouts that follow it.

    Args:
        stack: the units of the model, which is complete on every process.
        mesh: all processes of the run.
        device: the device of this process.
        wrap_replicas: creates the DDP wrapper.
        freezable: the layers of the model that can be frozen; None if the model is never frozen.
        is_lazy: whether the model's weights are mapped from files, and no process has memory for all of them.
    """

    def __init__(
        self,
        stack: LayerStack,
        mesh: ProcessMesh,
        device: torch.device,
        wrap_replicas: WrapReplicas,
        freezable: FreezableLayers | None = None,
        is_lazy: bool = False,
    ) -> None:
        super().__init__(stack, mesh, device)
        self.weights = Weights(stack.table, mesh, device)
        self.freezable = freezable
        self.is_lazy = is_lazy
        self.execution = Execution()
        """How the model is run; given to `place`."""
        self.shortcut: Shortcut | None = None
        self._wrap_replicas = wrap_replicas
        self._optimizer: OptimizerState | None = None

    # ------------------------------------------------------------------------------------ changing the layout
    def place(self, layout: Layout, execution: Execution | None = None, keep_weights_aside: bool = False) -> None:
        """Take the role that `layout` has for this process. Collective over all processes.

        Args:
            layout: the same on every process.
            execution: how the model is run, under this layout and later ones.
            keep_weights_aside: keep the complete weights where they are, for `put_back`. Meant for an evaluation,
                which does not change them.
        """
        assert not self.is_placed, "the model must be whole"
        self.execution = execution or Execution()
        self.weights.read_flags()
        if keep_weights_aside:
            self.weights.set_aside()
        self._freeze(layout)
        self.layout = layout
        self._move(layout, None if keep_weights_aside else self._optimizer)
        if self.is_lazy and self.device.type == "cpu":  # a device copies them anyway
            into_memory(self.stack.table[name] for name in self.weights.held)
        if layout.pipeline_parallel_size > 1:  # as they are where a later layout moves them to
            self.weights.make_contiguous()
        self.weights.hold()
        self.stack.runner.install()
        self._build(takes_optimizer=not keep_weights_aside)

    def _move(self, layout: Layout, optimizer: OptimizerState | None) -> int:
        """Distribute weights and optimizer state as a layout says: `moves.move`. Collective over all processes."""
        return move(Distribution.under(layout, self.stack, optimizer), self.weights, optimizer)

    def transform(self, layout: Layout) -> Transformation:
        """Change to another layout, between two optimizer steps. Collective over all processes.

        1. Freeze: the newly frozen parameters lose gradient and optimizer state.
        2. Move: parameters and their optimizer state go to the ranks that hold them under the new layout. Each process
           meanwhile frees the parameters that it no longer holds, which bounds the memory needed (`moves`).
        3. Drop: parameters that this process no longer holds are placeholders; buffers are on the device.
        4. Build: stage, groups, DDP and schedule. The optimizer and its groups stay; the parameters in them change.

        The Trainer's loop, the learning rate schedule and the gradient scaler are not affected.

        Args:
            layout: the same on every process; it may have fewer or more stages. Frozen units stay frozen.

        Returns:
            The cost of the transformation on this process.
        """
        before = self.current_layout
        self.weights.follow_flags()
        self.synchronise_buffers()
        assert layout.num_frozen_layers >= before.num_frozen_layers, "frozen layers do not thaw"
        seconds: dict[str, float] = {}
        with timed_phase("freeze", seconds):
            stopped = self._freeze(layout)
            if self._optimizer is not None:
                self._optimizer.keep_what_is_here()
            self._close()
        with timed_phase("move", seconds):
            moved = self._move(layout, self._optimizer)
        self.layout = layout
        with timed_phase("drop", seconds):
            self.weights.hold()
        with timed_phase("build", seconds):
            self._build()
        PROGRESS.forget_pace()
        return Transformation(before, layout, seconds, moved, stopped)

    def replace_layout(self, layout: Layout) -> None:
        """Change to a layout of one stage with the same frozen layers and another number of cached ones.

        Each process keeps the same units and either runs the cached ones or skips them, so the placement stays as it
        is. Not collective.
        """
        assert self.num_stages == layout.pipeline_parallel_size == 1
        assert self.current_layout.num_frozen_layers == layout.num_frozen_layers
        self.layout = layout

    def follow_flags(self, thaws: bool = False) -> bool:
        """Follow the `requires_grad` flags that the user's code has set: train exactly these parameters.

        Collective over all processes. Call it between two passes; the layout stays in force.

        Args:
            thaws: whether frozen layers may be trained again. If any is, no layer is frozen any more.

        Returns:
            Whether a frozen layer is trained again.

        Raises:
            ValueError: if parameters that a freeze policy has frozen require a gradient again.
        """
        thawed = self.weights.follow_flags(thaws)
        shared_are_summed = self.running.gradients.shared_are_summed
        self._close()
        if thawed:
            self.layout = replace(self.current_layout, num_frozen_layers=0, num_cached_layers=0)
        self.weights.hold()
        if self.current_layout.shards_optimizer:
            self._move(self.current_layout, self._optimizer)  # a callback may have added parameters to the optimizer
        # gradients may still be accumulating: remember whether shared parameters' gradients are already summed
        self._build().gradients.shared_are_summed = shared_are_summed
        PROGRESS.forget_pace()
        return thawed

    def _freeze(self, layout: Layout) -> frozenset[str]:
        if not layout.num_frozen_layers:
            return frozenset()
        assert self.freezable is not None
        return self.weights.freeze(self.freezable.frozen(layout.num_frozen_layers))

    def _restrict_to_units_here(self) -> None:
        """Let the model compute this process's units only, if there are several stages."""
        units = self.current_layout.units_of(self.stage_index)
        self.stack.runner.restrict_to(units if self.num_stages > 1 else None)

    def _build(self, takes_optimizer: bool = True) -> PlacedPipeline:
        """Build the pipeline for the layout; its parameters must already be here. Collective over all processes."""
        layout = self.current_layout
        self._restrict_to_units_here()
        self.stack.runner.freeze(layout.num_frozen_layers)
        if self._optimizer is not None and takes_optimizer:
            self._optimizer.keep_what_is_here()
            self._share_updates(self._optimizer)
        stage = VirtualStages(self.stack, layout.ranges_of(self.stage_index), self.device)
        stage.use_shortcut(self.shortcut)
        placed = PlacedPipeline(
            layout, stage, self.weights.is_trainable, self.mesh, self._wrap_replicas, self.execution
        )
        self.placed, self.stage = placed, stage
        self.train(self.training)
        return placed

    def _share_updates(self, optimizer: OptimizerState) -> None:
        layout = self.current_layout
        group = self.mesh.groups(layout.pipeline_parallel_size).replicas if layout.shards_optimizer else None
        optimizer.share_updates(group, layout.ranks_of_stage(self.stage_index))

    def _close(self) -> None:
        if self.placed is not None:
            self.placed.close()
        self.placed = self.stage = None

    def synchronise_buffers(self) -> None:
        """Give every process the buffers of the process that has their values. Collective over all processes."""
        self.weights.synchronise_buffers(self.current_layout.ranks_of_pipeline(0))

    # ------------------------------------------------------------------------------------ leaving a layout
    def put_back(self) -> None:
        """Restore the complete weights that `place` has set aside, after an evaluation. No communication."""
        self._leave_layout()
        self.weights.put_back()

    def gather(self, device: torch.device) -> None:
        """Make the model, and if possible the optimizer, complete again everywhere. Collective over all processes.

        Args:
            device: the device that the weights are moved to.
        """
        self.synchronise_buffers()
        self._leave_layout()
        self.weights.gather(device)
        if self._optimizer is not None:
            self._optimizer.share_outside()
            if device == self.device:
                self._optimizer.gather(device)
        self.detach_optimizer()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, every process has the complete weights and may call the model as often as it likes, for generation.

        The layout stays in force: stage, optimizer state and gradients are not touched, and afterwards the parameters
        of other stages are placeholders again. Without effect if there is one stage. Collective over all processes.
        """
        if not self.is_split:
            yield
            return
        self.synchronise_buffers()
        with self.weights.whole():
            self.stack.runner.restrict_to(None)
            try:
                yield
            finally:
                self._restrict_to_units_here()

    def _leave_layout(self) -> None:
        self.shortcut = None  # the weights may change from here on
        self.stack.runner.restrict_to(None)
        self.stack.runner.remove()
        self._close()
        self.layout = None

    # ------------------------------------------------------------------------------------ frozen layers' outputs
    def use_shortcut(self, shortcut: Shortcut | None) -> None:
        """From now on, skip layers if `shortcut` has their outputs; None stops using one."""
        self.shortcut = shortcut
        if self.stage is not None:
            self.stage.use_shortcut(shortcut)

    # ------------------------------------------------------------------------------------ training steps
    def step(self, batch: Batch, loss: StepLoss) -> None:
        """Run forward and backward of this pipeline's share of a batch: `PlacedPipeline.step`.

        Collective over all processes. Gradients are complete afterwards, unless inside `no_sync`.
        """
        self._adopt_added()  # by a callback
        self.running.step(batch, loss, self._gradients_synchronise)
        self._adopt_added()  # by the loss
        if self._optimizer is not None and self._optimizer.outside and self._gradients_synchronise:
            replicas = self.mesh.groups(self.num_stages).replicas
            self._optimizer.average_outside(replicas if self.computes_loss else None)

    def _adopt_added(self) -> None:
        """Adopt parameters that the user's code has added to the optimizer of replicas: the same on all of them."""
        has_added = self._optimizer is not None and self.num_replicas > 1 and self._optimizer.adopt_added()
        if has_added and self.num_stages == 1:
            self._share_outside()

    def clip_grad_norm(
        self,
        parameters: Iterable[nn.Parameter],
        max_norm: float,
        unscale: Callable[[], None] | None = None,
        loss_scale: float = 1.0,
    ) -> torch.Tensor:
        """Clip by the norm of the gradient over all stages: `StageGradients.clip`. Collective over the pipeline."""
        return self.running.gradients.clip(parameters, max_norm, unscale, loss_scale, self._optimizer)

    # ------------------------------------------------------------------------------------ the optimizer
    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer of the whole model's parameters update the parameters here, now and after `place`.

        Collective over all processes.
        """
        self._optimizer = OptimizerState(unwrapped(optimizer), self.stack.table, self.weights, self.mesh)
        self._share_outside()
        if self.layout is not None and self.layout.shards_optimizer:
            self._move(self.layout, self._optimizer)
            self._share_updates(self._optimizer)

    def adopt_outside(self) -> None:
        """Train parameters outside of the model that the user has added to the optimizer since it was attached.

        Collective over all processes.
        """
        self.optimizer_state.adopt_added()
        self._share_outside()

    def before_update(self) -> None:
        """The optimizer's step follows. Not collective."""
        if self._optimizer is not None:
            self._optimizer.put_hooks_in_order()

    def _share_outside(self) -> None:
        outside = self.optimizer_state.outside
        if outside and self.layout is not None and self.num_stages > 1 and not self.execution.is_driven:
            raise ValueError(
                f"{len(outside)} parameters of the optimizer do not belong to the model (one has shape"
                f" {tuple(outside[0].shape)}), and processes that freezing makes replicas would not have their values."
                " Leave loss_reduction out (the loss is then computed on whole batches, by the same processes in each"
                " step), register them in the model, or set pipeline_parallel_size=1."
            )
        self.optimizer_state.share_outside()

    def refuse_incomplete_optimizer(self) -> None:
        """From now on, refuse steps of an optimizer that updates one stage. It stays attached, for saving."""
        if self._optimizer is not None:
            self._optimizer.refuse_use()

    def detach_optimizer(self) -> None:
        """Release the attached optimizer, which the next training attaches anew. Not collective."""
        if self._optimizer is not None:
            self._optimizer.release()
            self._optimizer = None

    def updates_with(self, optimizer: Any) -> bool:
        """Whether this optimizer is the attached one, with or without Accelerate's wrapper."""
        return self._optimizer is not None and self._optimizer.optimizer is unwrapped(optimizer)

    @property
    def optimizer_state(self) -> OptimizerState:
        assert self._optimizer is not None, "attach_optimizer() first"
        return self._optimizer
