"""Runs an overridden `log` on the stages that compute the loss. All processes log the same values.

A `log` that averages values from `compute_loss` finds these values on the last stages only. When the Trainer calls
`log`, the user's method runs on the last stages. Every process then logs the values that the method passes to the
stock `log` on rank 0:

    rank 0   user's log: ... super().log(logs) ─┐ callbacks ... goes on, and returns ────┐
    rank 1   waits                              └ stock log(logs): callbacks             └ the caller's dict = rank 0's

Calls of `log` by the user's own code concern this process only, as under the stock Trainer.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from transformers import Trainer, TrainerCallback, TrainerState

from ...errors import PeerFailedError, in_one_line
from ...pipeline.elastic_pipeline import ElasticPipeline
from ...pipeline.mesh import can_be_sent
from ...run.collectives import among_last_stages
from ...run.job import TrainingJob
from .effects import Snapshot, share


class UsersLog:
    """Replaces the trainer's `log` on the instance.

    Args:
        job: the training or evaluation job.
        users: the user's method.
    """

    def __init__(self, job: TrainingJob, users: Callable[..., None]) -> None:
        self._job, self._users = job, users
        self._follows: Callable[[], ElasticPipeline | None] = lambda: None
        self._is_split = self._has_loss = False
        self._replica = 0
        self._last_stages: dist.ProcessGroup | None = None

    def follow(self, pipeline: ElasticPipeline) -> None:
        """Log from now on where this pipeline computes the loss; after an evaluation, where it last did."""
        self._follows = weakref.ref(pipeline)
        self._look()

    def __call__(self, *args: Any, **keywords: Any) -> None:
        self._look()
        caller = str(sys._getframe(1).f_globals.get("__name__", ""))
        if not self._is_split or not caller.startswith("transformers."):
            return self._users(*args, **keywords)
        pipeline = self._follows()
        serve_callbacks = pipeline.serve_callbacks if pipeline is not None else lambda: None
        point = LogPoint(self._job, serve_callbacks, self._last_stages, self._replica)
        point.run(self._users if self._has_loss else None, *args, **keywords)

    def _look(self) -> None:
        pipeline = self._follows()
        if pipeline is not None and pipeline.is_placed:
            self._is_split, self._has_loss = pipeline.num_stages > 1, pipeline.computes_loss
            self._replica = pipeline.replica_index
            self._last_stages = pipeline.last_stages if self._has_loss else None


def take_over(job: TrainingJob, pipeline: ElasticPipeline) -> None:
    """Run the user's `log` on the stages where a placed pipeline computes the loss, if `log` is overridden."""
    trainer: Any = job.trainer
    log = vars(trainer).get("log")
    if not isinstance(log, UsersLog):
        if not job.overrides("log"):
            return
        log = trainer.log = UsersLog(job, trainer.log)
    log.follow(pipeline)


@dataclass(frozen=True)
class _Over:
    """The user's `log` has returned on rank 0.

    Attributes:
        names: the names in the dict that it was called with, as it has left the dict.
        values: the values of those that can be sent.
    """

    names: Sequence[str]
    values: dict[str, Any]

    def write_into(self, logs: dict[str, Any]) -> None:
        """Change the dict of another process's caller likewise. Values that cannot be sent stay its own."""
        now = {**logs, **self.values}
        logs.clear()
        logs.update({name: now[name] for name in self.names if name in now})


class LogPoint(TrainerCallback):
    """One call of `log` by the Trainer, on all processes. During the call it is the first callback.

    Args:
        job: the training or evaluation job.
        serve_callbacks: serves calls of the model by the user's `log` on other processes.
        last_stages: on a last stage, the last stages of all pipelines; None if there is only one.
        replica: number of this process's pipeline.
    """

    def __init__(
        self,
        job: TrainingJob,
        serve_callbacks: Callable[[], None],
        last_stages: dist.ProcessGroup | None,
        replica: int,
    ) -> None:
        self._job, self._serve_callbacks, self._last_stages, self._replica = job, serve_callbacks, last_stages, replica
        self._is_first = job.mesh.rank == 0
        self._among = ExitStack()
        self._depth = 0  # depth of nested calls of the stock `log`; a callback may call `log`
        self._over: _Over | None = None

    def run(self, users: Callable[..., None] | None, *args: Any, **keywords: Any) -> None:
        """Run the user's `log`, or the stock `log` with rank 0's values. Collective over all processes.

        Args:
            users: the user's method; None on a process where the loss has not run.
            args: positional arguments of the method.
            keywords: its keyword arguments.
        """
        trainer, before = self._job.trainer, Snapshot(self._job.trainer)
        callbacks = trainer.callback_handler.callbacks
        behind = _Behind(self)
        callbacks.insert(0, self)
        callbacks.append(behind)
        try:
            of_caller: dict[str, Any] = next(iter((*args, *keywords.values())), {})
            if users is not None:
                self._run_users(users, *args, **keywords)
            if self._is_first:
                self._exchange(_Over([*of_caller], _sendable(of_caller)))
            while self._over is None:
                logs = self._exchange(None)
                if logs is not None:
                    self._depth = 1  # rank 0 has sent the values
                    Trainer.log(trainer, logs)
            if users is None:
                self._over.write_into(of_caller)
            changes = before.changes(trainer) if users is not None else None
            share(trainer, self._job.mesh, self._replica, changes, before)
        finally:
            callbacks.remove(self)
            callbacks.remove(behind)

    def _run_users(self, users: Callable[..., None], *args: Any, **keywords: Any) -> None:
        with self._among:
            self._go_among()
            try:
                users(*args, **keywords)
            except Exception as error:
                self._among.close()
                if self._is_first and not self._depth:  # else all processes are in the stock method
                    self._exchange(PeerFailedError(f"rank 0 failed in log(): {in_one_line(error)}"))
                raise

    def _go_among(self) -> None:
        among = among_last_stages(self._job.trainer.accelerator, self._job.mesh, self._last_stages)
        self._among.enter_context(among)

    def _exchange(self, mine: dict[str, Any] | _Over | PeerFailedError | None) -> dict[str, Any] | None:
        """Return the values that rank 0 logs; None if `log` is over. Collective over all processes.

        Raises:
            PeerFailedError: rank 0 has failed.
        """
        self._serve_callbacks()
        logs = self._job.mesh.of_first(mine)
        self._over = logs if isinstance(logs, _Over) else None
        if isinstance(logs, PeerFailedError) and not self._is_first:
            raise logs
        return logs if isinstance(logs, dict) else None

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        """The stock `log` was called. The other callbacks follow, on all processes."""
        self._depth += 1
        if self._depth > 1:
            return
        self._among.close()
        if self._over is not None:  # rank 0 has logged less often
            return
        everywhere = self._exchange(_sendable(logs) if self._is_first else None)
        if everywhere is not None and not self._is_first:
            logs.clear()
            logs.update(everywhere)
            state.log_history[-1] = {**everywhere, "step": state.global_step}

    def behind_callbacks(self) -> None:
        """All callbacks have seen the logged values."""
        self._depth -= 1
        if not self._depth:
            self._go_among()


class _Behind(TrainerCallback):
    """The last of the callbacks."""

    def __init__(self, point: LogPoint) -> None:
        self._point = point

    def on_log(self, *_: Any, **__: Any) -> None:
        self._point.behind_callbacks()


def _sendable(logs: dict[str, Any]) -> dict[str, Any]:
    """The values that can be sent to other processes, with tensors on the CPU."""

    def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().cpu()

    return {name: recursively_apply(on_cpu, value) for name, value in logs.items() if can_be_sent(value)}
