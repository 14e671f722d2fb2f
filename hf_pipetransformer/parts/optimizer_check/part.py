"""Refuses optimizers, hooks and settings that would differ between the stages of a pipeline.

optimizer    computes one value from all gradients (Prodigy)      refused before the first step (`coupling.py`)
parameters   added, replaced or removed (a new head, pruning)     refused in that step
hooks        registered after the loss was found to add up        refused in that step
settings     of the groups (lr) differed in an update             refused in the next step, or at the end
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ...errors import is_users
from ...model.layer_stack import hooked
from ...pipeline.optimizer_state import unwrapped
from ...planning.layout import Layout
from ...run.parts import Ending, RunPart, StepFacts
from ...run.run import PipelineRun
from ...run.setup.placing import Findings
from .coupling import coupling_of

BITS = 16
"""Length of the checksum of the groups' settings. In each step, one pair of different settings in 65,536 is missed."""

Settings = list[dict[str, float | tuple[float, ...]]]
"""The numbers in each group of an optimizer."""


class OptimizerCheck(RunPart):
    """Compares the optimizers of all processes.

    Each process votes with every bit of the checksum of its settings, and with the bit's complement. The checksums
    differ if one process has voted for a bit, and another one for its complement.

    Args:
        run: the run of the training.
    """

    num_votes = 2 + 2 * BITS

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._divides = False  # whether the loss is computed on parts of a batch, as there were no hooks
        self._late_hook = ""  # description of a hook that was registered later
        self._exchanged: list[str] = []  # names of parameters
        self._used: Settings = []  # in the last update
        self._hooks: list[RemovableHandle] = []

    def optimizer_found(self, optimizer: torch.optim.Optimizer, layout: Layout) -> None:
        if layout.pipeline_parallel_size > 1 or layout.shards_optimizer:
            why = coupling_of(self._run.job, self._run.pipeline.stack, optimizer, layout)
            if why is not None:
                raise ValueError(why)
        # in the update, because a scheduler sets the rate after it, and a loss of the last stage may do before it
        self._hooks.append(unwrapped(optimizer).register_step_post_hook(self._note_settings))

    def _note_settings(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._run.is_placed and self._is_divided:
            groups = optimizer.param_groups
            self._used = [{name: value for name, value in group.items() if _is_setting(value)} for group in groups]

    def found(self, found: Findings) -> None:
        self._divides = not found.is_driven

    def vote(self, facts: StepFacts) -> tuple[bool, ...]:
        pipeline = self._run.pipeline
        has_stages = pipeline.num_stages > 1
        self._exchanged = pipeline.stack.table.exchanged() if has_stages else []
        self._late_hook = hooked(self._run.job.model, _are_users) if has_stages and self._divides else ""
        checksum = zlib.crc32(repr(self._used).encode())
        bits = [bool(checksum >> bit & 1) for bit in range(BITS)]
        return (bool(self._exchanged), bool(self._late_hook), *bits, *(not bit for bit in bits))

    def heard(self, votes: tuple[bool, ...]) -> None:
        """Collective over all processes if there is something to refuse.

        Raises:
            ValueError: parameters or hooks have changed, or settings differ. Every process raises it.
        """
        mesh, (has_exchanged, has_late_hook, *bits) = self._run.job.mesh, votes
        if has_exchanged:
            names = next(filter(None, mesh.gather_objects(self._exchanged)))
            raise ValueError(
                f"pipeline_parallel_size={self._run.pipeline.num_stages}, but {names[0]!r} and {len(names) - 1} more"
                " parameters were added to the model, replaced or removed during the training (probably by a callback:"
                " a new head, pruning, layers cut off). The other stages do not have them. Change the values in place,"
                " change the model before train(), or set pipeline_parallel_size=1."
            )
        if has_late_hook:
            why = next(filter(None, mesh.gather_objects(self._late_hook)))
            raise ValueError(
                f"pipeline_parallel_size={self._run.pipeline.num_stages}: {why}, and it was registered after the"
                " training had begun to divide its batches. Register it before train(): then batches are not divided."
            )
        if any(one and other for one, other in zip(bits[:BITS], bits[BITS:], strict=True)):
            self._refuse_different_settings()

    def train_ends(self) -> None:
        self._refuse_different_settings()

    def close(self, ending: Ending) -> None:
        for hook in self._hooks:
            hook.remove()

    def _refuse_different_settings(self) -> None:
        """Raise a `ValueError` on all processes if settings differ. Collective over all processes."""
        if not self._run.is_placed or not self._is_divided:
            return
        everyone = self._run.job.mesh.gather_objects(self._used)
        for rank, theirs in enumerate(everyone):
            for number, (mine, other) in enumerate(zip(everyone[0], theirs, strict=False)):
                name = next((name for name in mine if repr(mine[name]) != repr(other.get(name))), None)
                if name is not None:
                    raise ValueError(
                        f"optimizer.param_groups[{number}][{name!r}] is {mine[name]} on process 0, but"
                        f" {other.get(name)} on process {rank}: it was set from something that differs between"
                        " processes, such as gradients, of which each process has only its own layers'. Set it from"
                        " values that all processes have (the step, metrics, the norm that accelerator.clip_grad_norm_"
                        " returns), or set pipeline_parallel_size=1 and replica_sharding='none'."
                    )

    @property
    def _is_divided(self) -> bool:
        layout = self._run.pipeline.current_layout
        return layout.pipeline_parallel_size > 1 or layout.shards_optimizer


def _are_users(*tables: Mapping[int, Any] | None) -> bool:
    """Whether there is a hook of the user's. Those of installed packages (W&B, for example) only observe."""
    return any(is_users(hook) for table in tables if table for hook in table.values())


def _is_setting(value: Any) -> bool:
    """Whether a value of a group is a number or several. A tensor may be on a device, and reading it would wait."""
    return isinstance(value, (int, float)) or (isinstance(value, tuple) and all(map(_is_setting, value)))


def make(run: PipelineRun) -> OptimizerCheck:
    """Return the part of a run."""
    return OptimizerCheck(run)
