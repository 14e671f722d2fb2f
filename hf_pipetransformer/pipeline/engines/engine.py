"""The interface of an engine, and the settings and objects that it is built from."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...model.micro_batch import Batch
from ...planning.layout import Layout
from ..mesh import ProcessMesh
from ..messages import PipelineMessages
from ..shape_book import ShapeBook
from ..virtual_stages import VirtualStages

T = TypeVar("T")


@dataclass(frozen=True)
class Execution:
    """How a model is run, under each layout.

    Attributes:
        slicing: how sequences are split along their tokens, if there are several stages; None for whole sequences. It
            is a `token_slices.engine.Slicing`, a class that the core does not import.
        is_driven: whether the loss drives the pipeline, if there are several stages (`StepLoss.drive`).
        serves_callbacks: whether calls of the model outside of the steps are served, if they can be
            (`CallServer.serve_callbacks`).
        unreached: names of the parameters that may end a step without a gradient, as determined by setup.
    """

    slicing: object | None = None
    is_driven: bool = False
    serves_callbacks: bool = False
    unreached: frozenset[str] = frozenset()


class StepLoss(Protocol):
    """The loss of one step, on the last stage. An engine asks for it in one of two ways."""

    def of_part(self, model: nn.Module, micro_batch: Batch) -> torch.Tensor:
        """Call the model on a micro-batch, and return this micro-batch's part of the loss, a tensor of one element."""

    def backward(self, part: torch.Tensor) -> None:
        """Run the backward of a value of `of_part`, on a single stage."""

    def drive(self) -> None:
        """Compute the loss of the whole batch, and its backward; each call of the model in it is served."""

    @property
    def unread(self) -> Collection[str]:
        """Names of inputs that frozen layers do not read. Tags do not depend on them."""


class CallServer(Protocol):
    """Serves calls of the model that only some stages of a pipeline make (`parts.driven.engine.StageServer`)."""

    def serve(self, batch: Batch, code: Callable[[], T], unread: Collection[str] = ()) -> T | None:
        """Run the user's code on the last stage. All stages serve its calls of the model.

        Collective over the pipeline.

        Args:
            batch: the batch that all stages have, prepared.
            code: the user's code, which may call the model on any inputs.
            unread: as of `StepLoss`.

        Returns:
            The code's result on the last stage.
        """

    def serve_callbacks(self) -> None:
        """Serve other processes' calls outside of the steps, until there are none. Collective over the pipeline."""

    def serving_callbacks(self) -> AbstractContextManager[None]:
        """Inside, calls outside of the steps are served as well, although not in all of the training."""

    def close(self) -> None:
        """Serve no more calls."""


@dataclass(frozen=True)
class Position:
    """One process's position under a layout.

    Attributes:
        layout: the layout.
        stage: this process's virtual stages.
        messages: sends to and receives from the other stages.
        mesh: all processes of the run.
        execution: how the model is run.
        wrapped: the stage wrapped in DDP; None if DDP does not average its gradients.
        server: returns the server for calls of the model, the same each time; None if they cannot be served.
    """

    layout: Layout
    stage: VirtualStages
    messages: PipelineMessages
    mesh: ProcessMesh
    execution: Execution
    wrapped: DistributedDataParallel | None
    server: Callable[[], CallServer | None]

    def shape_books(self) -> list[ShapeBook]:
        """Return a book of shapes for each virtual stage of this process, which learns them from its neighbours."""
        messages = self.messages
        return [
            ShapeBook(stage, partial(messages.receive_shapes, index), partial(messages.send_shapes, index))
            for index, stage in zip(messages.virtual_stages, self.stage.stages, strict=True)
        ]


class Engine:
    """Runs the steps of a layout. Creating it is collective over all processes.

    Args:
        position: of this process.
    """

    reduces_at_end: ClassVar[bool] = False
    """Whether gradients are averaged over the replicas after the step, in the place of DDP."""
    may_reach_nothing: ClassVar[bool] = False
    """Whether any parameter may end a step without a gradient."""

    def __init__(self, position: Position) -> None:
        self.position = position

    @property
    def cut(self) -> int:
        """Index of the unit below which no gradient came in the last step, as far as seen here; 0: they all came.

        For example, the model detaches its features in the first epoch. Only for engines that send zeros instead.
        """
        return 0

    def prepare(self, batch: Batch) -> None:
        """Decide how a batch of a new shape is split, which may run parts of it. Collective over the pipeline."""

    def step(self, batch: Batch, loss: StepLoss, gradients_synchronise: bool) -> None:
        """Run forward and backward of this pipeline's share of a batch. Collective over the pipeline.

        Args:
            batch: keyword arguments of the model, on the device; the same on all stages of a pipeline.
            loss: the loss of this step; the last stage has its `of_part`.
            gradients_synchronise: whether DDP reduces gradients over the replicas.
        """
        raise NotImplementedError
