"""The orders of the last stage to the stages below, and a stage's part in a call of the model."""

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
"""Name in an order for a positional argument of the call."""
PLAIN = (
    *(torch.Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(bool, int, float, complex, str, bytes, enum.Enum, slice, range, np.ndarray, np.generic),
)
"""Classes of values in an order, besides containers."""
SEEDS_APART = 104729
"""Difference between the seeds of neighbouring stages."""


@dataclass(frozen=True)
class Own:
    """Stands for one of the batch's own tensors: every stage has them."""

    index: int


@dataclass(frozen=True)
class Forward:
    """Run a call's micro-batches.

    Attributes:
        call: number of the call.
        module: name of the called module; empty for the model.
        spans: first row, and row after the last one, of each micro-batch; empty for an unsplit call.
        has_gradients: whether autograd is on.
        wanted: indices of the input tensors that the user's code may request gradients of.
        seed: seed of the random numbers in the layers; None if layers draw none.
        autocast: whether autocast is on, and its dtype.
        changes: changes of the model's modules by the loss since the last order.
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
        only_inputs: whether only gradients of the call's inputs are requested (`torch.autograd.grad`).
        keeps_graph: whether another backward may follow (`retain_graph`).
        changes: changes of the model's modules since the last forward: checkpointed layers run again with them.
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
        changes: changes of the model's modules since the last forward. They persist.
    """

    changes: Changes


def refuse_objects(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Refuse a call with an object as input: each stage would have its own copy. Only values are sent.

    Raises:
        ValueError: an input is or contains an object besides tensors, plain values and containers of them.
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
    """Return the first value in a nested value that is not plain; None if there is none."""
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
    """Whether the user's code runs here, with served calls."""

    def __init__(self, stage: StageModule, messages: PipelineMessages) -> None:
        self.stage, self.messages = stage, messages
        self.model, self.runner = stage.stack.model, stage.stack.runner
        self.index = messages.stage_index
        self.modules = _modules_around_all(self.model, [unit.module for unit in stage.stack.units])
        """Modules with served calls, by name."""
        self.innermost = [*self.modules][-1]
        """Name of the innermost of them. It contains the layers."""
        self._copies = any(map(is_users, self.modules.values()))
        self._pending: Pending = []

    def parts(self, inputs: Batch, spans: Sequence[tuple[int, int]]) -> list[Batch]:
        """Return the inputs of each micro-batch. They are copies if the model may write into them."""
        parts = [slice_rows(inputs, start, stop) for start, stop in spans] or [dict(inputs)]
        if not self._copies:
            return parts
        return [recursively_apply(lambda tensor: tensor.clone(), part) for part in parts]

    def send(self, tree: Any, stage: int) -> None:
        """Begin to send a value to a stage."""
        self.keep(self.messages.send_tree(tree, stage))

    def keep(self, pending: Pending) -> None:
        """Keep pending messages until they have arrived.

        Earlier messages are released: a gradient cache makes hundreds of calls in a step.
        """
        self._pending = [(work, kept) for work, kept in self._pending if not work.is_completed()] + pending

    def wait(self) -> None:
        """Wait until all messages are sent."""
        wait_for(self._pending)
        self._pending = []

    @contextmanager
    def running(self, order: Forward, part: int, forward: Callable[..., Any]) -> Iterator[None]:
        """Inside the context, the runner runs a micro-batch with the call's own arguments and modes."""
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
        """Return a function that calls `forward` on the inputs of an order, some of them by position."""

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
    """Return the modules that contain all layers and can be called, by name. A user's loss may call them."""
    inside = set(layers)
    return {
        name: module
        for name, module in model.named_modules()
        if module not in inside and has_own_forward(module) and inside.issubset(module.modules())
    }


def autocast_state(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
