"""Measures the share of some modules in a training step, during a few steps of the training itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...model.method_override import MethodOverride, original_method
from ...pipeline.devices import synchronise

STEPS = 3
"""Number of measured steps. Their median is used, because one of them may save a checkpoint."""


class ModuleTimer:
    """Times the calls of modules, from the first step that begins until `STEPS` steps have been measured.

    A step lasts until the next one begins: backward, optimizer and data loading are part of it.

    Args:
        model: the model.
        names: names of the modules; no module may contain another.
        device: device of the model.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], device: torch.device) -> None:
        self.names = tuple(names)
        self._device = device
        self._began: float | None = None
        self._seconds, self._shares = 0.0, list[float]()
        self._overrides = [
            MethodOverride(module, "forward", partial(self._forward, original_method(module)))
            for module in map(model.get_submodule, names)
        ]

    def begin_step(self) -> None:
        """A step begins, and the previous step ends."""
        synchronise(self._device)
        now = time.perf_counter()
        if self._began is not None:
            self._shares.append(self._seconds / (now - self._began))
        self._began, self._seconds = now, 0.0

    def interrupt(self) -> None:
        """Discard the current step, because other work runs before the next step."""
        self._began = None

    @property
    def share(self) -> float | None:
        """The share of a step that the modules take, from 0 to 1; None until enough steps have been measured."""
        return statistics.median(self._shares) if len(self._shares) >= STEPS else None

    def close(self) -> None:
        """Restore the modules' own forward."""
        for override in self._overrides:
            override.remove()
        self._overrides = []

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        synchronise(self._device)
        began = time.perf_counter()
        try:
            return forward(*args, **kwargs)
        finally:
            synchronise(self._device)
            self._seconds += time.perf_counter() - began
