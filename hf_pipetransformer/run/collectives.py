"""Collectives that user code calls where only the last stage of a pipeline runs: `compute_loss`, `prediction_step`.

`gather`, `gather_for_metrics`, `reduce` and `pad_across_processes` of the accelerator return this process's values
there, as in a training on one process. `torch.distributed` is left alone: a collective of all processes would wait for
the other stages, which never enter it, until the watchdog ends the job and names both.

The values that such code logs (TRL's trainers override `log`) exist on the last stage only, of which rank 0 is one;
`LogsOfAllStages` averages those of its replicas, and gives them to the other stages.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..pipeline.mesh import ProcessMesh

GATHERING = ("gather", "gather_for_metrics", "pad_across_processes", "reduce")
"""Methods of an `Accelerator` that return their first argument when there is one process."""
TIMES = ("_runtime", "_per_second")
"""How keys end whose values are each process's own."""
LIBRARIES = ("transformers", "hf_pipetransformer", "trl", "sentence_transformers")
"""Packages whose trainers log on every process. A user's own `log` or `evaluate` may log on the first one alone."""


@contextmanager
def of_this_process(accelerator: Accelerator) -> Iterator[None]:
    """Inside the context, the accelerator's collectives mean this process alone."""
    methods = {name: vars(accelerator).get(name) for name in GATHERING}
    vars(accelerator).update(dict.fromkeys(GATHERING, _first))
    try:
        yield
    finally:
        for name, method in methods.items():
            del vars(accelerator)[name]
            if method is not None:  # the user had replaced it, or the code around this context
                vars(accelerator)[name] = method


def _first(*values: Any, **named: Any) -> Any:
    """Return the first argument, whatever its name."""
    return values[0] if values else next(iter(named.values()))


class LogsOfAllStages(TrainerCallback):
    """Makes the logs of all processes alike: what only the last stage has collected reaches all.

    Several processes of the last stage (replicas) have each collected values of their own samples; numbers that differ
    are averaged. All processes then decide alike by a metric. Nothing is exchanged where a user's own `log` (after an
    evaluation also `evaluate`) may keep processes from logging, nor outside of the trainer's own loops.

    Args:
        trainer_class: class of the trainer.
        mesh_of: returns the groups of all processes.
        is_training: returns whether a `train()` is running.
    """

    def __init__(
        self, trainer_class: type, mesh_of: Callable[[], ProcessMesh], is_training: Callable[[], bool]
    ) -> None:
        self._mesh_of, self._is_training = mesh_of, is_training
        self._all_log = _is_of_libraries(trainer_class, "log")
        self._all_log_evaluations = self._all_log and _is_of_libraries(trainer_class, "evaluate")
        self._evaluations = 0  # that are running

    @contextmanager
    def of_evaluation(self) -> Iterator[None]:
        """Inside the context, an evaluation that all processes run logs its metrics."""
        self._evaluations += 1
        try:
            yield
        finally:
            self._evaluations -= 1

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None:
            return
        is_of_loop = self._is_training() and ("train_runtime" in logs or ("loss" in logs and "learning_rate" in logs))
        # other logs may be of one process alone
        is_evaluation = self._evaluations > 0 and any(key.endswith("_runtime") for key in logs)
        if not (self._all_log if is_of_loop else is_evaluation and self._all_log_evaluations):
            return
        everyone = self._mesh_of().gather_objects(logs)
        for key in dict.fromkeys(key for theirs in everyone for key in theirs):
            values = [theirs[key] for theirs in everyone if key in theirs]
            if key in logs and key.endswith(TIMES):
                continue
            are_numbers = all(isinstance(value, (int, float)) for value in values)
            are_alike = all(value == values[0] for value in values)  # their mean may be rounded
            logs[key] = statistics.fmean(values) if are_numbers and not are_alike else values[0]
        if state.log_history:
            state.log_history[-1].update(logs)  # the stock method has copied the logs


def _is_of_libraries(trainer_class: type, method: str) -> bool:
    """Whether only libraries define this method of a trainer."""
    owners = (cls.__module__.partition(".")[0] for cls in trainer_class.__mro__ if method in vars(cls))
    return all(owner in LIBRARIES for owner in owners)
