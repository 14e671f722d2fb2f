"""What a stage is told to do for calls of the model on the last stage, and how any stage runs its part of a call."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import recursively_apply
from torch import nn

from ...model.layer_range import CalledWith, has_own_forward
from ...model.micro_batch import Batch, slice_rows
from ...model.training_check import is_users
from ...pipeline.messages import Pending, PipelineMessages, wait_for
from ...pipeline.stage import StageModule
from ...progress import PROGRESS
from ...randomness import seeded
from .module_state import Changes

POSITIONAL = "positional argument {}"
"""Name of an argument that a call passes by position, in an order."""
PLAIN = (
    *(torch.Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(bool, int, float, complex, str, bytes, enum.Enum, slice, range, np.ndarray, np.generic),
)
"""Classes of the values that an order may contain, besides containers."""
SEEDS_APART = 104729
"""Difference between the seeds of neighbouring stages."""


@dataclass(frozen=True)
class Own:
    """Stands for one of the batch's own tensors, which every stage has."""

    index: int


@dataclass(frozen=True)
class Forward:
    """Run a call's micro-batches.

    Attributes:
        call: number of the call.
        module: name of the module that was called; empty for the model.
        spans: first row, and row after the last one, of each micro-batch; empty for a call that is not split.
        has_gradients: whether autograd is on.
        wanted: which of the inputs' tensors, by their order, the user's code may ask a gradient of.
        seed: seed of the random numbers in the layers; None if they draw none.
        autocast: whether autocast is on, and its dtype.
        changes: of the model's modules, by the loss since the last order.
    """

    call: int
    module: str
    spans: tuple[tuple[int, int], ...]
    has_gradients: bool
    wanted: tuple[int, ...]
    seed: int | None
    autocast: tuple[bool, torch.dtype]
    changes: Changes


@dataclass(frozen=True)
class Backward:
    """Run the backward of a micro-batch.

    Attributes:
        call: number of the call.
        part: index of the micro-batch.
        only_inputs: whether only the gradients of the call's inputs are asked for (`torch.autograd.grad`).
        keeps_graph: whether another backward may follow (`retain_graph`).
        changes: of the model's modules since the last forward; checkpointed layers run again, as things are now.
    """

    call: int
    part: int
    only_inputs: bool
    keeps_graph: bool
    changes: Changes


@dataclass(frozen=True)
class Ask:
    """Send the gradients of the inputs of a call."""

    call: int


@dataclass(frozen=True)
class End:
    """The user's code has returned.

    Attributes:
        changes: of the model's modules since the last forward, which stay.
    """

    changes: Changes


def refuse_objects(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Refuse a call on something of which each stage would have a copy: only values travel, not objects.

    Raises:
        ValueError: an input is or contains something other than tensors, plain values and containers of them.
    """
    for name, value in inputs.items():
        found = _first_object(value)
        if found is not None:
            raise ValueError(
                f"{type(model).__name__} is called on {name}, which contains a {type(found).__name__}. Each pipeline"
                " stage would have a copy of it, and changes on one would not reach the others. Call the model on"
                " tensors and plain values only (without a cache of keys and values, for example), or set"
                " pipeline_parallel_size=1."
            )


def _first_object(value: Any) -> Any:
    """The first value that is not plain in a nested value; None if there is none."""
    if value is None or isinstance(value, PLAIN):
        return None
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        entries = value.values() if isinstance(value, Mapping) else value
        return next((found for entry in entries if (found := _first_object(entry)) is not None), None)
    return value


class StageCalls:
    """One stage's part in calls of the model.

    Args:
        stage: this process's stage, one of several with contiguous layers.
        messages: sends to and receives from the other stages.
    """

    is_driving = False
    """Whether the user's code runs here, and its calls are served."""

    def __init__(self, stage: StageModule, messages: PipelineMessages) -> None:
        self.stage, self.messages = stage, messages
        self.model, self.runner = stage.stack.model, stage.stack.runner
        self.index = messages.stage_index
        self.modules = _modules_around_all(self.model, [unit.module for unit in stage.stack.units])
        """The modules whose calls are served, by name."""
        self._copies = any(map(is_users, self.modules.values()))
        self._pending: Pending = []

    def parts(self, inputs: Batch, spans: Sequence[tuple[int, int]]) -> list[Batch]:
        """The inputs of each micro-batch; copies, if the model may write into them."""
        parts = [slice_rows(inputs, start, stop) for start, stop in spans] or [dict(inputs)]
        if not self._copies:
            return parts
        return [recursively_apply(lambda tensor: tensor.clone(), part) for part in parts]

    def send(self, tree: Any, stage: int) -> None:
        """Begin to send a value to a stage."""
        self.keep(self.messages.send_tree(tree, stage))

    def keep(self, pending: Pending) -> None:
        """Keep what is being sent until it has arrived.

        The rest is let go of: a gradient cache makes hundreds of calls before the step is over.
        """
        self._pending = [(work, kept) for work, kept in self._pending if not work.is_completed()] + pending

    def wait(self) -> None:
        """Wait until all is sent."""
        wait_for(self._pending)
        self._pending = []

    @contextmanager
    def running(self, order: Forward, part: int, forward: Callable[..., Any]) -> Iterator[None]:
        """Inside, the runner runs a micro-batch of a call as the call was made."""
        PROGRESS.tick()
        enabled, dtype = order.autocast
        seed = None if order.seed is None else order.seed + part + SEEDS_APART * self.index
        with (
            torch.set_grad_enabled(order.has_gradients),
            torch.autocast(self.stage.device.type, dtype, enabled=enabled),
            seeded(seed) if seed is not None else nullcontext(),
            self.runner.calling_with(CalledWith()),
            self.runner.calling_through(self._with_positional(forward)),
        ):
            yield

    def _with_positional(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Call `forward` on the inputs of an order, some of which were passed by position."""

        def call(**inputs: Any) -> Any:
            args: list[Any] = []
            while (name := POSITIONAL.format(len(args))) in inputs:
                args.append(inputs.pop(name))
            self.begin_in_shortcut(tuple(args), inputs)
            return forward(*args, **inputs)

        return call

    def begin_in_shortcut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.stage.shortcut is not None:
            self.stage.shortcut.begin_call(args, kwargs)


def _modules_around_all(model: nn.Module, layers: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The modules that contain all layers and can be called, by name: what a user's loss may call."""
    inside = set(layers)
    return {
        name: module
        for name, module in model.named_modules()
        if module not in inside and has_own_forward(module) and inside.issubset(module.modules())
    }


def autocast_state(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
