"""What the Trainer's loop and user code see in place of the model: a module, as DDP's wrapper is one.

model(**batch)                the model's own forward; without gradients, also where it is split over stages
parameters(), zero_grad()     of this process's stage
modules(), other attributes   of the user's model
no_sync()                     as DDP's
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..model.called_inputs import named_inputs
from ..model.layer_range import CalledWith
from ..model.layer_stack import LayerStack
from ..model.nested import on_device
from ..planning.layout import Layout
from .mesh import ProcessMesh
from .placed import PlacedPipeline
from .virtual_stages import VirtualStages


class ModelHandle(nn.Module):
    """A model under the layout that is in force. `ElasticPipeline` changes the layout.

    Its only child is the current stage: `parameters()`, `zero_grad()`, `train()` and `no_sync()` act on it. With one
    stage, its parameters are also those that the user's code has added to the model since it was placed.

    Args:
        stack: the units of the model, which is complete on every process.
        mesh: all processes of the run.
        device: the device of this process.
    """

    stack: LayerStack
    stage: VirtualStages | None

    def __init__(self, stack: LayerStack, mesh: ProcessMesh, device: torch.device) -> None:
        super().__init__()
        self.__dict__["stack"] = stack  # not registered as a child: the stage registers the parameters that are here
        self.mesh = mesh
        self.device = device
        self.layout: Layout | None = None
        """The layout by which the weights are distributed; None while the model is complete on every process."""
        self.placed: PlacedPipeline | None = None
        """The pipeline under this layout; None before `place`, after leaving the layout, and between two layouts."""
        self.stage = None  # the stage of `placed`, registered as a child
        self._gradients_synchronise = True

    # ------------------------------------------------------------------------------------ layout
    @property
    def model(self) -> nn.Module:
        """The user's model. While a layout is in force, the parameters of other stages are placeholders."""
        return self.stack.model

    @property
    def is_placed(self) -> bool:
        return self.layout is not None

    @property
    def is_split(self) -> bool:
        """Whether each process has the weights of its own stage only. False inside `whole`."""
        return self.stack.runner.is_restricted

    @property
    def current_layout(self) -> Layout:
        assert self.layout is not None, "place() first"
        return self.layout

    @property
    def num_stages(self) -> int:
        return self.current_layout.pipeline_parallel_size

    @property
    def num_replicas(self) -> int:
        return self.current_layout.data_parallel_size

    @property
    def stage_index(self) -> int:
        return self.current_layout.stage_of(self.mesh.rank)

    @property
    def last_stages(self) -> dist.ProcessGroup | None:
        """On a last stage, the last stages of all pipelines, if there are several stages and several pipelines."""
        return self.mesh.groups(self.num_stages).replicas if self.num_stages > 1 else None

    @property
    def computes_loss(self) -> bool:
        """Whether this process computes the loss. All stages of the pipeline train on the batch of this process."""
        return self.running.computes_loss

    @property
    def replica_index(self) -> int:
        return self.current_layout.replica_of(self.mesh.rank)

    @property
    def running(self) -> PlacedPipeline:
        """The pipeline under the layout in force."""
        assert self.placed is not None, "place() first"
        return self.placed

    # ------------------------------------------------------------------------------------ interface of nn.Module
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        mine = list(super().named_parameters(prefix, recurse, remove_duplicate))
        yield from mine
        if recurse and self.layout is not None and self.num_stages == 1 and self.stack.table.exchanged():
            known = {id(parameter) for _, parameter in mine}
            for name, parameter in self.model.named_parameters(f"{prefix}{'.' * bool(prefix)}model"):
                if id(parameter) not in known:
                    yield name, parameter

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """This module and the model's modules, as under DDP: a user's `prediction_step` may set their modes."""
        yield self
        yield from self.model.modules(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The model's own attribute: a user's `prediction_step` may call a part of the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            stack = vars(self).get("stack")
            if stack is None or name.startswith("__"):
                raise
            return getattr(stack.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the user's model, once that is placed: a user's `training_step` may set a flag of it."""
        own = vars(self)
        if own.get("layout") is None or name in own or name in self._modules or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.stack.model, name, value)

    def __delattr__(self, name: str) -> None:
        own = vars(self)
        if (
            own.get("layout") is None
            or name in own
            or hasattr(type(self), name)
            or not hasattr(self.stack.model, name)
        ):
            super().__delattr__(name)
        else:
            delattr(self.stack.model, name)

    def train(self, mode: bool = True) -> ModelHandle:
        super().train(mode)  # sets the mode of the stage, which sets the model's
        if self.stage is None:
            self.model.train(mode)
        return self

    def forward(self, *positional: Any, **batch: Any) -> Any:
        """The model's own forward, for a user's `training_step` or `prediction_step` that calls the model it is given.

        Without gradients, each stage of a pipeline gets the outputs for its own batch (`PlacedPipeline.predict`);
        this is collective over the pipeline.

        Raises:
            ValueError: if gradients are computed and there are several stages, where a single stage has no output, or
                several replicas, where DDP would not see the call.
        """
        is_trained = torch.is_grad_enabled() and self.training
        if self.is_split:
            if not is_trained and self.running.serves_callbacks:
                return self.model(*positional, **batch)
            if not is_trained:
                inputs = on_device(dict(named_inputs(self.model, positional, batch)), self.device)
                return self.running.predict(inputs, CalledWith(), lambda rows: self.model(**rows))
            raise ValueError(
                "The model is split over several stages, and during training a single stage has no model output. In"
                " your training_step call super().training_step(), and compute your loss in compute_loss; or set"
                " pipeline_parallel_size=1."
            )
        if self.placed is not None and self.num_replicas > 1 and is_trained:
            raise ValueError(
                f"The gradients of the {self.num_replicas} replicas are averaged only in the Trainer's own"
                " training_step. Call super().training_step() and compute your loss in compute_loss, or train in one"
                " process."
            )
        if not self.is_placed or not self.stack.runner.num_frozen:
            return self.model(*positional, **batch)
        with self.stack.runner.to_the_end(0, None):
            return self.model(*positional, **batch)

    def serve_callbacks(self) -> None:
        """Serve the model calls of other processes' callbacks, before the next operation of all processes.

        Collective over the pipeline.
        """
        if self.placed is not None:
            self.placed.serve_callbacks()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside this context, gradients are accumulated and not yet reduced over the replicas."""
        self._gradients_synchronise = False
        try:
            yield
        finally:
            self._gradients_synchronise = True
