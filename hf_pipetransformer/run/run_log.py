"""Records of a run: lines in the log, metrics for the Trainer's loggers, and records for the report."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from transformers import Trainer, TrainerCallback

from ..freezing.policies import policy_description
from ..freezing.schedule_cost import WORTH_FREEZING, frozen_in_epochs, plain_epochs
from ..model.frozen_prefix import FreezableLayers
from ..pipeline.elastic_pipeline import Transformation
from ..planning.layout import Layout
from ..planning.planner import ConsideredSchedule, Planner
from ..token_slices.slice_planning import RowSlices
from . import events_file
from .cache_control import AutoCache, EpochReport
from .job import TrainingJob
from .metrics_file import RunRecorder, StepsDone, facts_of_run
from .sentences import (
    NotComputed,
    describe_change,
    describe_end,
    describe_frozen,
    describe_schedules,
    describe_start,
)

logger = logging.getLogger(__name__)

MOST_SHAPES_TO_LOG = 8
"""Maximum number of batch shapes whose slices are logged; there may be hundreds of shapes."""


@contextmanager
def recording(trainer: Trainer, recorder: RunRecorder, before: Sequence[TrainerCallback] = ()) -> Iterator[None]:
    """Record a `train()` inside the context, and how it ends.

    Args:
        trainer: the trainer.
        recorder: a new recorder.
        before: callbacks to be placed before the recorder. These callbacks and the recorder are placed before all
            others: loggers that save the model at the end must find it complete, and some callbacks remove numbers
            from the logs.
    """
    handler = trainer.callback_handler
    # the recorder of the last training has stayed, for what was logged behind it
    others = [c for c in handler.callbacks if not isinstance(c, RunRecorder)]
    handler.callbacks[:] = [*before, recorder, *others]
    recorder.begin(trainer.is_world_process_zero())
    has_ended = False
    try:
        yield
        has_ended = True
    finally:
        recorder.end(has_ended, trainer.state.global_step)
        handler.callbacks[:] = [c for c in handler.callbacks if not any(c is one for one in before)]


class RunLog:
    """Writes the log lines, metrics and records of one `train()`.

    Args:
        job: the training job.
        arrive: `PipelineRun.arrive`.
    """

    def __init__(self, job: TrainingJob, arrive: Callable[[], None]) -> None:
        self._arrive = arrive
        self.recorder = RunRecorder(job.args)
        self._job = job
        self._num_shapes = 0  # number of shapes logged under the plan in force
        self._planner: Planner | None = None
        self._plan: Layout | None = None
        self._spared = NotComputed()
        self._num_changes = 0
        self._owes_layout = False
        self._why_not_cached: str | None = None
        self._first_step = 0
        self._passes_per_sample = 1

    def recording(self, before: Sequence[TrainerCallback]) -> AbstractContextManager[None]:
        """Return the context manager `recording` for this job's trainer and recorder."""
        return recording(self._job.trainer, self.recorder, before)

    def schedule_chosen(self, considered: Sequence[ConsideredSchedule]) -> None:
        """Log which schedule was chosen; nothing if it was given. Only the main process logs."""
        if considered and self._job.trainer.is_world_process_zero():
            logger.info("%s", describe_schedules(considered))

    def begin(self, planner: Planner, plan: Layout) -> None:
        """Record the first plan, after the model has been placed. Collective over all processes."""
        self._planner = planner
        self._first_step = self._job.trainer.state.global_step
        if self._job.trainer.is_world_process_zero():
            logger.debug("%s", planner.describe(plan))
        facts = facts_of_run(self._job.model, self._job.args)
        self._record("resume" if self._first_step else "start", plan, facts=facts)

    def say_what_freezing_costs(self, freezable: FreezableLayers | None, caches: bool) -> None:
        """Log how many epochs of plain training cost as much as this one, where the freeze policy tells beforehand.

        Only the main process logs, a warning if freezing saves next to nothing.

        Args:
            freezable: the model's layers that can be frozen; None if there are none.
            caches: whether frozen layers' outputs are cached.
        """
        callback, args = self._job.freeze_callback, self._job.args
        if callback is None or freezable is None or not self._job.trainer.is_world_process_zero():
            return
        policy, epochs = callback.policy, math.ceil(args.num_train_epochs)
        is_known = policy_description(policy) is not None and not policy.needs_gradient_norms
        if not is_known or callback.freeze_strategy != "epoch" or args.max_steps > 0:
            return
        frozen = frozen_in_epochs(
            policy, freezable.num_layers, freezable.max_frozen, epochs, 1, callback.max_frozen_layers
        )
        if not any(frozen):
            return  # the arguments have warned of it
        cost = plain_epochs(frozen, freezable.num_layers, caches)
        if epochs < WORTH_FREEZING * cost and not self._job.shares_store:
            logger.warning(
                "Freezing saves only %.0f%% of the layers' operations in this training of %d epochs, because frozen"
                " layers are read from the cache in the epochs after the one in which they freeze. Set"
                " freeze_policy='none', freeze earlier, or train for more epochs (docs/when_it_pays.md).",
                100 * (1 - cost / epochs),
                epochs,
            )
        else:
            logger.info(
                "With this freeze policy the layers of %d epochs cost as much as those of %.1f epochs in which nothing"
                " is frozen. Plain training with a learning rate tuned for so many epochs may reach more"
                " (docs/when_it_pays.md).",
                epochs,
                cost,
            )

    def announce(self, cache: AutoCache | None, why_not_cached: str | None) -> None:
        """Log the line about the training that begins, once the trainer knows its steps and epochs.

        Args:
            cache: the cache of frozen layers' outputs, if there is one.
            why_not_cached: why there is none although the arguments allow one.
        """
        trainer, args, callback = self._job.trainer, self._job.args, self._job.freeze_callback
        assert self._plan is not None
        self._why_not_cached = why_not_cached
        self._passes_per_sample = cache.calls_per_sample if cache is not None else 1
        self._owes_layout = callback is not None or args.uses_pipeline
        if not trainer.is_world_process_zero():
            return
        freezing = None if callback is None else callback.describe(trainer.state)
        of_cache = None
        if callback is not None:
            why = f"off ({why_not_cached or self._job.why_not_cached})"
            of_cache = cache.describe() if cache is not None else why
        timed = "token slices are chosen" if args.token_slices == "auto" else ""
        model = type(self._job.model).__name__
        logger.info("%s", describe_start(model, self._plan, freezing, of_cache, timed))

    def show_layout(self) -> None:
        """Log the first plan as metrics, before the first step. Collective over all processes."""
        if self._owes_layout:
            self._owes_layout = False
            assert self._plan is not None
            self._log(self._numbers_of(self._plan))

    def _record(self, event: str, plan: Layout, **measured: Any) -> dict[str, float]:
        """Write an event, and the usage under the layout before it. Collective over all processes.

        Returns:
            Metrics of the layout before, if steps were run under it.
        """
        self._record_usage()
        before, done = self._plan, self.recorder.take_steps()
        if before is not None:
            self._count_spared(before, done)
        self._plan = plan
        self._write(event, plan, **measured)
        return {"step_seconds": done.seconds / done.steps} if done.steps else {}

    def _count_spared(self, plan: Layout, done: StepsDone) -> None:
        samples = done.rows * self._passes_per_sample
        self._spared.passes += samples * plan.num_units
        self._spared.backward += samples * plan.num_frozen_layers

    def _numbers_of(self, plan: Layout) -> dict[str, float]:
        layout = events_file.layout_of(plan)
        return {key: value for key, value in layout.items() if isinstance(value, int)}

    def _log(self, numbers: dict[str, float]) -> None:
        """Log metrics, on all processes. The user's `on_log` may call the model, before what follows is collective."""
        self._job.trainer.log(numbers)
        self._arrive()

    def cached(self, plan: Layout) -> None:
        """Log a plan in which another number of layers counts as cached, and nothing moves. Collective."""
        numbers = self._record("cache", plan)
        step = self._job.trainer.state.global_step
        if self._job.trainer.is_world_process_zero():
            logger.info("Step %d: %s; nothing moves.", step, describe_frozen(plan))
        self._log({**self._numbers_of(plan), **numbers})

    def transformed(self, change: Transformation, freezable: FreezableLayers | None) -> None:
        """Write a transformation to the log, the run's file and the metrics. Collective over all processes."""
        self._num_shapes = 0
        everyone = self._job.mesh.gather_objects((dict(change.seconds), change.bytes_moved))
        phases = {phase: max(seconds[phase] for seconds, _ in everyone) for phase in change.seconds}
        total = max(sum(seconds.values()) for seconds, _ in everyone)
        moved = sum(count for _, count in everyone)
        if self._job.trainer.is_world_process_zero():
            before, after = change.before.num_frozen_layers, change.after.num_frozen_layers
            freeze, level = "", logging.INFO
            if after > before:
                assert freezable is not None
                freeze = freezable.describe_freeze(before, after, change.stopped)
                level = logging.INFO if change.stopped else logging.WARNING
            step = self._job.trainer.state.global_step
            logger.log(level, "%s", describe_change(change, step, total, moved, freeze))
        self._num_changes += 1
        measured = self._record("transform", change.after, seconds=total, bytes_moved=moved, phases=phases)
        numbers = self._numbers_of(change.after)
        self._log({**numbers, **measured, "transform_seconds": total, "transform_bytes": moved})

    def sliced(self, parts: Sequence[RowSlices], seconds: float | None) -> None:
        """Log and record how a batch of a new shape is split, for the first shapes. Only the main process writes."""
        if not self._job.trainer.is_world_process_zero() or self._num_shapes == MOST_SHAPES_TO_LOG:
            return
        self._num_shapes += 1
        logger.debug("%s", events_file.describe_slices(parts, seconds))
        assert self._plan is not None
        self._write(events_file.SLICES, self._plan, slices=events_file.slices_of(parts, seconds))

    def cache_epoch(self, report: EpochReport) -> None:
        """Log the use of the cache in the epoch that has ended, as metrics."""
        self._log(self._cache_metrics(report))

    def end(self, cache: AutoCache | None) -> None:
        """Record what is only known after the last step. Collective over all processes."""
        state = self._job.trainer.state
        self._record_usage()
        if cache is not None and cache.reason_off is not None:
            self.recorder.record_cache_off(cache.reason_off, state.global_step)
        elif self._why_not_cached is not None:
            self.recorder.record_cache_off(self._why_not_cached, state.global_step)
        elif cache is not None:
            report = cache.epoch_report()
            if report.counts.rows:
                self.recorder.record_log(self._cache_metrics(report), state)
        if self._plan is not None:
            self._count_spared(self._plan, self.recorder.take_steps())
        self._spared.forward = cache.layers_skipped if cache is not None else 0

    def conclude(self) -> None:
        """Log the line about the training that has ended."""
        job = self._job
        if self._plan is None or not job.trainer.is_world_process_zero():
            return
        steps = job.trainer.state.global_step - self._first_step
        spared = self._spared if job.freeze_callback is not None else None
        folder = job.args.output_dir or "."
        logger.info("%s", describe_end(steps, self.recorder.total_seconds, spared, self._num_changes, folder))

    def _cache_metrics(self, report: EpochReport) -> dict[str, float]:
        assert self._plan is not None
        return events_file.cache_metrics(report.counts, report.nbytes, self._plan.num_units)

    def _record_usage(self) -> None:
        everyone = self._job.mesh.gather_objects(self.recorder.take_usage())
        self.recorder.record_usage(everyone, self._job.trainer.state.global_step)

    def _write(self, event: str, plan: Layout, **values: Any) -> None:
        trainer = self._job.trainer
        if trainer.is_world_process_zero():
            assert self._planner is not None
            folder, step, epoch = trainer.args.output_dir or ".", trainer.state.global_step, trainer.state.epoch or 0.0
            events_file.record(folder, event, self._planner, plan, step, epoch, run=self.recorder.run, **values)
