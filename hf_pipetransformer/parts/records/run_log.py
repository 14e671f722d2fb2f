"""Logging of a run: lines in the log, metrics for the Trainer's loggers, and records for the report."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerState

from ...errors import ONE_LINE
from ...logs import log_on_main
from ...model.frozen_prefix import FreezableLayers
from ...pipeline.moves import Transformation
from ...planning.layout import AUTO, Layout
from ...planning.planner import Planner
from ...planning.tables import MIB
from ...run.parts import Ending, LayoutChange, RunPart, StepFacts
from ...run.run import PipelineRun
from .files import BEGINNINGS, SLICES, layout_of, sentence_on_frozen, slices_of
from .model_card import add_to_card
from .recorder import RunRecorder, facts_of_run, frozen_by_user
from .sentences import describe_frozen, describe_layout, describe_slices, many

if TYPE_CHECKING:  # types only: these packages are optional
    from ...token_slices.slice_timeline import SlicePlan
    from ..prefix_cache.cache.cache_counts import CacheCounts
    from ..prefix_cache.cache_control import AutoCache, EpochReport

logger = logging.getLogger(__name__)

MOST_SHAPES_TO_LOG = 8
"""Maximum number of batch shapes to log slices for; there may be hundreds of shapes."""
PRINTING = (PrinterCallback, ProgressCallback)
"""Callbacks that print each log as a dictionary."""


class RunLog(RunPart):
    """Writes the log lines, the metrics and the record of one `train()`.

    Args:
        run: the run of the training.
    """

    def __init__(self, run: PipelineRun) -> None:
        self._run, self._job = run, run.job
        self.recorder = RunRecorder(run.job.args)
        self._num_shapes = 0  # number of shapes logged under the current plan
        self._planner: Planner | None = None
        self._plan: Layout | None = None
        # forward (or backward) passes of single layers over single samples: all that a training without freezing
        # would run, and the skipped ones
        self._passes = self._backward_skipped = self._forward_skipped = 0
        self._rows_before = 0  # number of samples in earlier epochs
        self._passes_per_sample = 1
        self._rows_read = 0
        self._num_changes = 0
        self._users_frozen: dict[str, Any] | None = None  # modules that the user has frozen
        self._has_warned = False
        self._read_for_loss = False  # whether outputs of frozen modules that the loss calls were read
        self._why_not_read: Mapping[str, str] = {}  # module that the user has frozen -> why it was computed

    # ------------------------------------------------------------------------------------ as a part
    def around_train(self) -> AbstractContextManager[Any]:
        return self.recorder.recording(self._job.trainer, before=[self._run])

    def around(self, activity: str) -> AbstractContextManager[Any]:
        return self.recorder.doing(activity)

    def train_begins(self) -> None:
        self._announce()
        if self._run.checkpoint is None and not any(part.may_thaw for part in self._run.parts):
            self._say_what_freezing_costs()

    def epoch_begins(self) -> None:
        self._rows_before = self.recorder.total.rows

    def step_begins(self, is_first: bool) -> None:
        if is_first and (self._job.freeze_callback is not None or self._job.args.uses_pipeline):
            self._log_layout({})
        if not self._run.is_within_epoch:
            self.follow_users_freezing()

    def stepped(self, facts: StepFacts, loss: torch.Tensor) -> None:
        self.recorder.count_batch(facts.rows, facts.num_parts, loss)

    def layout_changed(self, change: LayoutChange) -> None:
        if change.transformation is None:
            self.cached(change.after)
        else:
            self.transformed(change.transformation, self._run.pipeline.freezable)

    def told(self, topic: str, value: Any) -> None:
        topics: dict[str, Callable[[Any], None]] = {
            "sentence": self._log_sentence,
            "metrics": self._log_metrics,
            "slices": self.sliced,
            "cache_epoch": self.cache_epoch,
            "front_epoch": self.front_epoch,
            "calls_epoch": self.calls_epoch,
            "not_read": self._record_not_read,
            "interrupted": lambda ending: self.interrupted(*ending),
        }
        if topic in topics:
            topics[topic](value)

    def close(self, ending: Ending) -> None:
        if ending.error is None:
            self.conclude()

    def add_to_card(self, folder: Path) -> None:
        if self.recorder.run is not None:
            try:
                add_to_card(folder, self.recorder.run)
            except (OSError, ValueError) as error:  # the training itself has succeeded
                logger.warning("The model card says nothing about layouts, freezes and the cache: %s", error)

    # ------------------------------------------------------------------------------------ at the start
    def chosen(self, is_resumed: bool) -> None:
        """Log the choices for the first plan, unless the job is resumed, and warn of values that are replaced.

        Called before the model is placed, when no policy has frozen layers yet.
        """
        planner = self._run.planner
        self._users_frozen = frozen_by_user(self._job.model)
        if is_resumed:
            return
        first, args = planner.first, self._job.args
        if args.pipeline_parallel_size == AUTO:
            needed, budget = max(planner.stage_bytes(first)) / MIB, planner.memory_budget_bytes
            why = "the memory of a device is not known, so the model counts as fitting one"
            if budget is not None:
                why = f"its largest stage needs about {needed:,.0f} MiB of the {budget / MIB:,.0f} MiB of a device"
            self._say(f"pipeline_parallel_size='auto' is {first.pipeline_parallel_size}: {why}.")
        rows, given, used = first.rows_per_pipeline, args.num_microbatches, first.num_microbatches
        if first.pipeline_parallel_size > 1 and given not in (AUTO, used):
            self._say(
                f"num_microbatches={given}, but {used} are used: a pipeline's batch of {rows} samples"
                f" (per_device_train_batch_size x {first.pipeline_parallel_size} stages) must be divided evenly, in a"
                f" number that schedule {first.runs_as} accepts. Set num_microbatches to a divisor of {rows}, or to"
                " 'auto'.",
                logging.WARNING,
            )

    def placed(self, layout: Layout) -> None:
        """Record the first plan, after the model has been placed. Collective over all processes."""
        self._planner = self._run.planner
        self._say(self._planner.describe(layout), logging.DEBUG)
        facts = facts_of_run(self._job.model, self._job.args)
        self._record(BEGINNINGS[bool(self._state.global_step)], layout, facts=facts)

    def _say_what_freezing_costs(self) -> None:
        """Log the cost of this training in plain epochs, if the policy's decisions are known in advance.

        Logs a warning instead if freezing saves hardly any time.
        """
        callback, args, freezable = self._job.freeze_callback, self._job.args, self._run.pipeline.freezable
        if callback is None or freezable is None or callback.freeze_strategy != "epoch" or args.max_steps > 0:
            return
        from ..freezing.policies import policy_description  # here: a training without a policy does not need it
        from ..freezing.schedule_cost import WORTH_FREEZING, frozen_in_epochs, plain_epochs

        policy, epochs = callback.policy, math.ceil(args.num_train_epochs)
        if policy_description(policy) is None or policy.needs_gradient_norms:
            return
        frozen = frozen_in_epochs(
            policy, freezable.num_layers, freezable.max_frozen, epochs, 1, callback.max_frozen_layers
        )
        if not any(frozen):
            return  # `_announce` has warned of it
        cost = plain_epochs(frozen, freezable.num_layers, self._cache is not None)
        if epochs < WORTH_FREEZING * cost and not self._job.shares_store:
            self._say(
                f"Freezing saves only {1 - cost / epochs:.0%} of the layers' operations in this training of {epochs}"
                " epochs, because frozen layers are read from the cache in the epochs after the one in which they"
                " freeze. Set freeze_policy='none', freeze earlier, or train for more epochs.",
                logging.WARNING,
            )
        else:
            self._say(
                f"{epochs} epochs with this policy cost about {cost:.1f} plain epochs. Plain training for that long,"
                " with a tuned learning rate, may reach a better accuracy."
            )

    def _announce(self) -> None:
        """Log the line about the training that begins, once the trainer knows its steps and epochs."""
        callback, plan = self._job.freeze_callback, self._plan
        assert plan is not None
        self._passes_per_sample = max(part.calls_per_sample for part in self._run.parts)
        parts = [f"{type(self._job.model).__name__} in {describe_layout(plan)}"]
        if plan.pipeline_parallel_size > 1:
            m = plan.num_microbatches
            samples = many(plan.rows_per_pipeline // m, "sample")
            parts.append(f"{many(m, 'micro-batch', 'es')} of {samples}, schedule {plan.schedule}")
        parts += ["replicas divide the optimizer state"] if plan.shards_optimizer else []
        parts += [sentence_on_frozen(self._users_frozen)] if self._users_frozen is not None else []
        parts += [text for part in self._run.parts.having("describe") if (text := part.describe()) is not None]
        if callback is not None and self._run.parts.get("prefix_cache") is None:
            parts.append(f"cache: off ({self._job.why_not_cached})")
        if self._job.args.token_slices == "auto":
            parts.append("token slices are chosen by measured times, so another run may differ by rounding")
        self._say("; ".join(parts) + ".")
        if callback is not None and callback.freezes_nothing(self._state):
            self._warn_of_nothing_frozen("will freeze no layer")

    # ------------------------------------------------------------------------------------ in training
    def cached(self, plan: Layout) -> None:
        """Log a plan that changes only the number of cached layers. Collective over all processes."""
        numbers = self._record("cache", plan)
        self._say(f"Step {self._state.global_step}: {describe_frozen(plan)}; no weights move.")
        self._log_layout(numbers)

    def transformed(self, change: Transformation, freezable: FreezableLayers | None) -> None:
        """Write a transformation to the log, the run's file and the metrics. Collective over all processes."""
        self._num_shapes = 0
        everyone = self._job.mesh.gather_objects((dict(change.seconds), change.bytes_moved))
        phases = {phase: max(seconds[phase] for seconds, _ in everyone) for phase in change.seconds}
        total = max(sum(seconds.values()) for seconds, _ in everyone)
        moved = sum(count for _, count in everyone)
        before, after, level = change.before, change.after, logging.INFO
        parts = [describe_frozen(after), f"{describe_layout(before)} -> {describe_layout(after)}"]
        if after.num_frozen_layers > before.num_frozen_layers:
            assert freezable is not None
            frozen = before.num_frozen_layers, after.num_frozen_layers
            parts.insert(0, freezable.describe_freeze(*frozen, change.stopped))
            level = logging.INFO if change.stopped else logging.WARNING
        moves = f"{moved / MIB:.1f} MiB moved in {total:.3f} s"
        self._say(f"Step {self._state.global_step}: {'; '.join(parts)}, {moves}.", level)
        # a freeze alone does not change how the model is split
        self._num_changes += (before.data_parallel_size, before.stage_bounds, before.pipeline_parallel_size) != (
            after.data_parallel_size,
            after.stage_bounds,
            after.pipeline_parallel_size,
        )
        numbers = self._record("transform", after, seconds=total, bytes_moved=moved, phases=phases)
        self._log_layout({**numbers, "transform_seconds": total, "transform_bytes": moved})

    def sliced(self, plan: SlicePlan) -> None:
        """Log and record how a batch of a new shape is split, for the first shapes of a layout."""
        if self._num_shapes == MOST_SHAPES_TO_LOG:
            return
        self._num_shapes += 1
        self._say(describe_slices(plan), logging.DEBUG)
        assert self._planner is not None and self._plan is not None
        # slices of the main process's replica; other replicas may split their batches differently
        slices = {"replica": self._plan.replica_of(0), **slices_of(plan)}
        self.recorder.record_event(SLICES, self._planner, self._plan, self._state, slices=slices)

    def follow_users_freezing(self) -> None:
        """Record a change of the user's frozen modules. Call it at the first step of each epoch.

        With a freeze policy or several stages it returns at once: the model's flags then have another meaning.
        """
        if self._job.freeze_callback is not None or self._job.args.uses_pipeline:
            return
        frozen = frozen_by_user(self._job.model)
        if frozen != self._users_frozen:
            assert self._planner is not None and self._plan is not None
            self._users_frozen = frozen
            self.recorder.record_event(
                "modules", self._planner, self._plan, self._state, frozen_modules=self._users_frozen
            )

    def _log_sentence(self, sentence: str | None) -> None:
        """Log a sentence, if there is one."""
        if sentence is not None:
            self._say(sentence)

    def cache_epoch(self, report: EpochReport) -> None:
        """Log the use of the cache in the epoch that has ended."""
        metrics, parts = self._cache_metrics(report), []
        found = metrics["cache_hit_rate"] + metrics["cache_older_hit_rate"]
        if found:
            skipped, passes = metrics["cache_layers_skipped"], "the layers' forward passes"
            passes = passes if report.skipped is None else "the forward pass"
            parts.append(f"{found:.0%} of the samples found ({skipped:.0%} of {passes} skipped)")
        if metrics["cache_rows_stored"]:
            parts.append(f"{metrics['cache_rows_stored']:,.0f} samples stored")
        used, size = ", ".join(parts) or "no samples found or stored", f"{report.nbytes / MIB:,.1f} MiB"
        self._say(f"Epoch {self._state.epoch or 0.0:.4g}, cache: {used}; {size}.")
        if self._job.freeze_callback is not None:
            self._log_metrics(metrics)
        else:  # no call of `log`: trainers that override it count their calls
            self.recorder.record_log(metrics, self._state)

    def front_epoch(self, report: EpochReport) -> None:
        """Log the use of the cache of frozen modules in the epoch that has ended."""
        rows = self.recorder.total.rows - self._rows_before
        assert self._plan is not None
        self._forward_skipped += round((report.skipped or 0.0) * rows * self._plan.num_units)
        self._rows_read += round(report.counts.found / max(report.counts.rows, 1) * rows)
        self.cache_epoch(report)

    def calls_epoch(self, counts: Mapping[str, CacheCounts]) -> None:
        """Log for how many samples outputs of frozen modules that the loss calls were read in the epoch."""
        for name, of in counts.items():
            if of.layers_skipped:
                read = f"{of.layers_skipped:,} of {of.rows:,} samples read"
                self._say(f"Epoch {self._state.epoch or 0.0:.4g}, called by the loss: {name}, {read} from the cache.")
                self._read_for_loss = True
        rows, read = (sum(getattr(of, what) for of in counts.values()) for what in ("rows", "layers_skipped"))
        self.recorder.record_log({"frozen_calls_read": read / max(rows, 1)}, self._state)

    # ------------------------------------------------------------------------------------ at the end
    def release(self) -> None:
        """Record the facts known only after the last step. Collective over all processes."""
        self._end_layout()
        job, frozen, cache = self._job, self._users_frozen, self._cache
        is_whole = job.freeze_callback is None and not job.args.uses_pipeline
        if frozen is not None and is_whole and not job.may_cache_front:
            reason = "torch_compile=True" if job.args.torch_compile else job.why_not_cached
            self.recorder.record_cache_off(str(reason), self._state.global_step, ", ".join(frozen["names"]))
        for module, why in self._why_not_read.items():
            self.recorder.record_cache_off(why, self._state.global_step, module)
        part = self._run.parts.get("prefix_cache")
        off = cache.reason_off if cache is not None else part.why_not if part is not None else None
        if off is not None:
            self.recorder.record_cache_off(off, self._state.global_step)
        elif cache is not None:
            report = cache.epoch_report()
            if report.counts.rows:
                self.recorder.record_log(self._cache_metrics(report), self._state)
        self._forward_skipped += cache.layers_skipped if cache is not None else 0

    def conclude(self) -> None:
        """Log the line about the training that has ended."""
        if self._plan is None:
            return
        done, callback, passes, skipped = self.recorder.total, self._job.freeze_callback, max(self._passes, 1), ""
        if callback is not None:
            skipped = (
                f" Skipped {self._backward_skipped / passes:.1%} of the layers' backward passes and"
                f" {self._forward_skipped / passes:.1%} of their forward passes; the layout changed"
                f" {many(self._num_changes, 'time')}."
            )
        elif self._users_frozen is not None:
            skipped = f" {sentence_on_frozen(self._users_frozen)}; {self._what_was_read()}."
        longest = sorted(done.seconds.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in longest if seconds >= 0.05)
        self._say(
            f"Trained {many(done.steps, 'step')} in {sum(done.seconds.values()):.1f} s ({parts}).{skipped} Report:"
            f" hf-pipetransformer report {self._job.args.output_dir or '.'}"
        )
        if callback is not None and not callback.num_frozen and not self._has_warned:
            self._warn_of_nothing_frozen("has frozen no layer")

    def interrupted(self, interrupt: KeyboardInterrupt, newest: Path | None, of_cache: str) -> None:
        """Log the newest checkpoint and the state of the cache after Ctrl-C.

        Args:
            interrupt: the exception.
            newest: the checkpoint to resume from, if there is one.
            of_cache: a sentence on the cache.
        """
        if self._job.trainer.is_world_process_zero():
            resumed = f"Resume from {newest}" if newest is not None else "No checkpoint was saved"
            at = f"step {self._state.global_step} of {self._state.max_steps}"
            logger.warning("Interrupted at %s. %s.%s", at, resumed, of_cache)
        if self._job.mesh.world_size > 1:
            setattr(interrupt, ONE_LINE, "")  # a launcher passes the signal to all processes; one line is enough

    # ------------------------------------------------------------------------------------ inside
    @property
    def _cache(self) -> AutoCache | None:
        """The cache of frozen layers' outputs, if there is one."""
        part = self._run.parts.get("prefix_cache")
        return part.cache if part is not None else None

    def _record_not_read(self, reasons: Mapping[str, str]) -> None:
        self._why_not_read = {**self._why_not_read, **reasons}

    @property
    def _state(self) -> TrainerState:
        return self._job.trainer.state

    def _say(self, line: object, level: int = logging.INFO) -> None:
        log_on_main(logger, self._job.args, line, level)

    def _what_was_read(self) -> str:
        """Return a clause on the forward passes skipped by reading outputs of the user's frozen modules."""
        skipped = self._forward_skipped / max(self._passes, 1)
        if not self._rows_read and skipped:  # several stages: the cache of frozen layers has read them
            return f"outputs of frozen layers were read, which skipped {skipped:.0%} of the layers' forward passes"
        if not self._rows_read and self._read_for_loss:
            return "outputs of frozen modules that the loss calls were read from the cache"
        if not self._rows_read:
            return "no output of a frozen module was read from the cache in training"
        rows = max(self.recorder.total.rows, 1)
        return (
            f"outputs of frozen modules were read for {self._rows_read / rows:.0%} of the samples, which skipped"
            f" {skipped:.0%} of the forward passes"
        )

    def _warn_of_nothing_frozen(self, what: str) -> None:
        """Warn that the freeze policy freezes no layer, and name the fields to change."""
        callback = self._job.freeze_callback
        assert callback is not None
        from ..freezing.policies import NeverFreeze, policy_description

        known = policy_description(callback.policy)
        self._has_warned = True
        if isinstance(callback.policy, NeverFreeze):
            return
        policy = f"freeze_policy={known['name']!r}" if known is not None else type(callback.policy).__name__
        when = (
            f"every freeze_steps={callback.freeze_steps:g} steps, of {self._state.max_steps}"
            if callback.freeze_strategy == "steps"
            else f"at the start of each epoch but the first, of {self._state.num_train_epochs}"
        )
        self._say(
            f"{policy} {what} in this training. It decides {when}. Train for longer, decide more often"
            " (freeze_strategy='steps' with freeze_steps), set a freeze_schedule that begins at 0, or"
            " freeze_policy='none'.",
            logging.WARNING,
        )

    def _record(self, event: str, plan: Layout, **measured: Any) -> dict[str, float]:
        """Write an event, and the memory usage of the previous layout. Collective over all processes.

        Returns:
            Metrics of the previous layout, if it has run steps.
        """
        numbers = self._end_layout()
        self._plan = plan
        assert self._planner is not None
        frozen = self._users_frozen
        self.recorder.record_event(event, self._planner, plan, self._state, frozen_modules=frozen, **measured)
        return numbers

    def _end_layout(self) -> dict[str, float]:
        """Record the memory usage of the layout that ends, and return its metrics. Collective over all processes."""
        done = self.recorder.end_layout(self._job.mesh.gather_objects, self._state.global_step)
        if self._plan is not None:
            samples = done.rows * self._passes_per_sample
            self._passes += samples * self._plan.num_units
            self._backward_skipped += samples * self._plan.num_frozen_layers
        return {"step_seconds": done.seconds["steps"] / done.steps} if done.steps else {}

    def _log_layout(self, numbers: dict[str, float]) -> None:
        """Log the current plan and other numbers as metrics, on all processes."""
        assert self._plan is not None
        layout = {key: value for key, value in layout_of(self._plan).items() if isinstance(value, int)}
        self._log_metrics({**layout, **numbers})

    def _log_metrics(self, metrics: dict[str, float]) -> None:
        """Log metrics for `report_to` and callbacks. They are not printed: a sentence has the same numbers.

        Calls the stock `Trainer.log`: a user's own `log` may average values that their loss has collected since its
        last call. A user's `on_log` may call the model, so all processes meet afterwards.
        """
        handler = self._job.trainer.callback_handler
        printing = [callback for callback in handler.callbacks if type(callback) in PRINTING]
        for callback in printing:
            callback.on_log = lambda *_, **__: None
        try:
            Trainer.log(self._job.trainer, metrics)
        finally:
            for callback in printing:
                del callback.on_log
        self._run.serve_callbacks()

    def _cache_metrics(self, report: EpochReport) -> dict[str, float]:
        """Return the use of the activation cache in an epoch as metrics."""
        assert self._plan is not None
        counts, rows = report.counts, max(report.counts.rows, 1)
        # share of the forward passes: a cached output of f of L layers counts f / L
        of_layers = counts.layers_skipped / (rows * self._plan.num_units)
        return {
            "cache_layers_skipped": round(of_layers if report.skipped is None else report.skipped, 4),
            "cache_hit_rate": round(counts.hits / rows, 4),
            "cache_older_hit_rate": round(counts.older_hits / rows, 4),
            "cache_rows_stored": counts.stored + counts.older_stored,
            "cache_rows_dropped": counts.dropped,
            "cache_load_seconds": round(counts.load_seconds, 3),
            "cache_bytes": report.nbytes,
        }
