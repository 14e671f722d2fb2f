"""One `train()` of a pipeline: an object that exists from its beginning to its end.

    STEP         get_batch_samples -> take: adapt, then the batches of a step, counted over the replicas
                 training_step -> step -> Steps.step (steps.py)
    TRANSFORM    adapt: the cache's decision, an agreed freeze -> Planner.next -> ElasticPipeline.transform
    CHECKPOINT   CheckpointWrite stores `memory`

The stock loop drives it, through the trainer's overrides and as a callback.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from ..data.loaders import NumberedLoader
from ..data.numbered_batches import TrainingBatches
from ..parts.freezing.callback import LayerFreezeCallback
from ..parts.freezing.policies import agreed_num_frozen
from ..parts.freezing.users_freezing import UsersFreezing, attach_freezing
from ..parts.front.front_cache import FrontCache
from ..parts.preemption.preemption import Preemption
from ..parts.prefix_cache.cache_control import OTHER_INPUTS, AutoCache
from ..parts.records.run_log import RunLog
from ..parts.watchdog.watchdog import Watchdog
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..pipeline.engines.engine import Ways
from ..pipeline.optimizer_state import unwrapped
from ..planning.layout import Layout
from ..planning.planner import Planner
from ..progress import PROGRESS, phase
from ..resilience.exit import SECONDS, note_training
from .batches import BatchesInEpoch
from .cutting import CutModel
from .evaluation import FindUnits, refuse_generation_that_does_not_fit
from .job import TrainingJob
from .lazy_model import warn_of_unsaved
from .optimizer_probe import coupling_of
from .placing import examine, find_cache, first_layout
from .resuming import recall, refuse_best_model_that_some_lack
from .steps import Doubt, Steps
from .training_data import store_file

logger = logging.getLogger(__name__)


class PipelineRun(TrainerCallback):
    """State and decisions of one `train()`, as a context manager to be entered around it.

    Entering and leaving change the trainer's list of callbacks.

    Args:
        job: the training job.
        find_units: finds the units of the trainer's model.
        checkpoint: the folder of the checkpoint to resume from; None if training starts from the beginning.
        ignored_keys: keys of the model's outputs that evaluations ignore (`ignore_keys_for_eval`).
    """

    planner: Planner
    steps: Steps

    def __init__(
        self, job: TrainingJob, find_units: FindUnits, checkpoint: Path | None, ignored_keys: list[str] | None
    ) -> None:
        self.preemption = Preemption(job, ignored_keys)
        self.log = RunLog(job, self.arrive)
        self.latest_loader: NumberedLoader | None = None
        """The training loader that was made last; the loop's own may be a user's wrapper around it."""
        self.data: TrainingBatches | None = None
        """The training batches; None until the loop has requested its loader."""
        self.generations: Path | None = None
        """This training's name in the folder of the cache's store; None if nothing is cached."""
        self.cache: AutoCache | None = None
        self.front: FrontCache | None = None
        """The cache of what the user has frozen, without a freeze policy and with one stage."""
        self._users_freezing: UsersFreezing | None = None
        self.why_not_cached: str | None = None
        """Why there is no cache although the arguments allow one."""
        self._freeze_callback: LayerFreezeCallback | None = None
        self._is_begun = False  # whether a step of this `train()` has begun
        self.num_epochs_begun = 0
        self.watchdog: Watchdog | None = None
        self.batches_in_epoch = BatchesInEpoch()
        """What the loop takes for the number of batches in an epoch."""
        self._job, self._find_units, self._checkpoint = job, find_units, checkpoint
        self._cut: CutModel | None = None
        self._entered = ExitStack()

    # ------------------------------------------------------------------------------------ begin and end
    def __enter__(self) -> PipelineRun:
        job = self._job
        with ExitStack() as entered:
            entered.push(self._close)
            entered.enter_context(self.log.recorder.recording(job.trainer, before=[self]))
            entered.enter_context(self.preemption.signal)
            is_accelerated = job.device.type != "cpu"
            limits = job.args.watchdog_timeout, job.args.ddp_timeout
            watchdog = Watchdog(job.mesh.rank, job.mesh.gather_objects, *limits, has_accelerator=is_accelerated)
            self.watchdog = entered.enter_context(watchdog)
            entered.push(lambda kind, *_: self.arrive() if kind is None else None)  # the last callbacks have run
            self._entered = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, traceback)

    def _close(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        newest = self.preemption.last_saved or self._checkpoint
        if isinstance(error, KeyboardInterrupt):  # without a checkpoint nothing can be resumed, and the cache goes
            of_cache = self.cache.abandon(is_resumable=newest is not None) if self.cache is not None else ""
            self.log.interrupted(error, newest, of_cache)
        has_failed = kind is not None and issubclass(kind, Exception)
        note_training(has_failed)
        if self._users_freezing is not None:
            self._users_freezing.forget()
        if kind is None:
            self.log.conclude()
        if self.cache is not None:
            # after a complete run, remove what no other run can use; an interrupted run is resumed with its cache
            has_ended = kind is None or (issubclass(kind, KeyboardInterrupt) and newest is None)
            close = partial(self.cache.close, has_ended=has_ended)
            if has_failed and self._job.device.type != "cpu":
                closing = threading.Thread(target=close, daemon=True)
                closing.start()
                closing.join(SECONDS)  # its writer waits for the device, where a kernel may wait for other processes
            else:
                close()
        if self.front is not None:
            self.front.close(has_failed, keeps_evaluations=kind is None)
        if self.data is not None:
            self.data.close()  # otherwise its workers keep waiting for the next epoch

    @property
    def pipeline(self) -> ElasticPipeline:
        assert self._cut is not None, "place() first"
        return self._cut.pipeline

    @property
    def is_placed(self) -> bool:
        """Whether each process has its part of the model."""
        return self._cut is not None and self._cut.pipeline.is_placed

    def meet(self, doing: str) -> bool:
        """Begin with all processes what all of them must do (`Watchdog.meet`). Returns whether they watch one another.

        Collective over all processes.

        Raises:
            ValueError: another process does something else.
        """
        self.arrive()
        if self.watchdog is None or not self.watchdog.is_watching:
            return False
        self.watchdog.meet(doing)
        return True

    def arrive(self) -> None:
        """Serve calls of the model in callbacks of other processes, before this one waits for them elsewhere.

        Collective over the pipeline.
        """
        if self._cut is not None:
            self.pipeline.arrive()

    # ------------------------------------------------------------------------------------ before the first step
    def optimize(self, make_optimizer: Callable[[], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Place the model and return its optimizer, when the loop requests it. Collective over all processes.

        Args:
            make_optimizer: the stock method, called if the user has passed no optimizer.
        """
        trainer, pipeline = self._job.trainer, self.place()
        if trainer.optimizer is None:
            with pipeline.weights.as_on_one_process():
                optimizer = make_optimizer()
            self._attach(optimizer)
        assert trainer.optimizer is not None
        return trainer.optimizer

    def wrap(self) -> ElasticPipeline:
        """Return what the loop trains, after the optimizer has been created. Collective over all processes.

        Raises:
            ValueError: the user's `create_optimizer` has set no optimizer, or has replaced the one that knows the
                stages.
        """
        optimizer = self._job.trainer.optimizer
        if not self.is_placed:
            if optimizer is None:
                raise ValueError(
                    "The overridden create_optimizer has not set an optimizer. Assign self.optimizer in it, or call"
                    " super().create_optimizer()."
                )
            self.place()  # the user overrides create_optimizer, which has made one over the whole model
        pipeline = self.pipeline
        if optimizer is not None and not pipeline.updates_with(optimizer):
            if pipeline.num_stages > 1:
                raise ValueError(
                    "The overridden create_optimizer has replaced the optimizer that super().create_optimizer() made"
                    " for the pipeline stages. Create your optimizer over the whole model without calling super(), or"
                    " pass it as optimizers=(optimizer, None)."
                )
            self._attach(optimizer)
        if optimizer is not None and self._job.mesh.world_size > 1:
            pipeline.adopt_outside()
            if pipeline.ways.serves_callbacks:  # those that serve must not be ahead of those that call in a step
                step = unwrapped(optimizer).register_step_pre_hook(lambda *_: self.arrive())
                self._entered.callback(step.remove)
        return pipeline

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let a new optimizer update the placed model. Collective over all processes."""
        pipeline, layout = self.pipeline, self.pipeline.current_plan
        self._refuse_coupling(coupling_of(self._job, pipeline.stack, optimizer, layout), layout)
        pipeline.attach_optimizer(optimizer)

    def _refuse_coupling(self, coupling: str | None, layout: Layout) -> None:
        """Refuse an optimizer that cannot be divided among stages or replicas, if the layout does so.

        Raises:
            ValueError: it is refused. Every process raises it.
        """
        if coupling is not None and (layout.pipeline_parallel_size > 1 or layout.shards_optimizer):
            assert self._cut is not None
            self._cut.finish()
            self._job.trainer.optimizer = None
            raise ValueError(coupling)

    def place(self) -> ElasticPipeline:
        """Determine how to split the model and place it. An existing optimizer is attached to the pipeline.

        1. Examine the model and its loss on a few samples.
        2. Find what is frozen, and what may be cached.
        3. Place the model in the first layout, or in that of a resumed job, and continue from its state.

        Collective over all processes.
        """
        job, trainer, data = self._job, self._job.trainer, self.data
        assert data is not None
        # 1
        found = examine(job, data, self._find_units, self.log.sliced)
        self._cut, self.planner, pipeline = found.cut, found.planner, found.cut.pipeline
        coupling = None
        if trainer.optimizer is not None and not pipeline.updates_with(trainer.optimizer):
            coupling = coupling_of(job, pipeline.stack, trainer.optimizer, self.planner.first)
            pipeline.attach_optimizer(trainer.optimizer)
        kept = recall(job)
        self.preemption.owes_evaluation = bool(kept.get("owes_evaluation"))
        # 2
        if job.freeze_callback is None and job.args.uses_pipeline and self.generations is not None:
            self._users_freezing = UsersFreezing.find(job, pipeline, found.cut.unit_costs)
        if job.may_cache and job.freeze_callback is not None:
            assert self.generations is not None
            most = self._users_freezing.count if self._users_freezing is not None else None
            cache = find_cache(job, found, data, self.generations, most)
            self.cache, self.why_not_cached = (None, cache) if isinstance(cache, str) else (cache, None)
        num_frozen = attach_freezing(job, pipeline.freezable, self._users_freezing)
        self._freeze_callback = job.freeze_callback
        if job.may_cache_front:
            self.front = FrontCache(job, data.dataset, store_file(job))
        # 3
        layout, is_resumed = first_layout(self.planner, kept, num_frozen)
        self.log.first_chosen(self.planner, is_resumed)
        refuse_generation_that_does_not_fit(job, self.planner, layout)
        self._refuse_coupling(coupling, layout)
        watches_steps = any(job.mesh.gather_objects(job.watches_steps))
        calls = any(job.mesh.gather_objects(bool(job.users_callbacks) or job.overrides("prediction_step")))
        self.steps = Steps(job, pipeline, found.loss, found.reduction, data, self.cache, self.front, watches_steps)
        pipeline.place(layout, Ways(found.slicing, found.is_driven, calls))
        self.log.begin(self.planner, layout)
        data.reslice(layout.data_parallel_size, pipeline.replica_index)
        if kept.get("order") and trainer.state.epoch % 1:
            data.keep_order(int(trainer.state.epoch), **kept["order"])
        if self.cache is not None and layout.num_frozen_layers:
            if layout.num_cached_layers:
                self.cache.freeze(layout.num_cached_layers, goes_on=True)
            self.log.tell(self.cache.freeze(layout.num_frozen_layers))
        return pipeline

    # ------------------------------------------------------------------------------------ between two steps
    def take(self, batches: Iterator[Any], num_batches: int) -> tuple[list[Any], int | float]:
        """Return the batches of the next optimizer step and the number of items. Collective over all processes.

        This is the one safe point for a transformation: there are no gradients and no batch is being processed.
        """
        step = self._job.trainer.state.global_step
        self.arrive()
        PROGRESS.begin_round(f"is in step {step + 1}")
        PROGRESS.enter("adapt", step)
        with self.log.recorder.doing("adapting"):
            self.adapt()
        PROGRESS.enter("data")
        self._job.ignore_average_tokens()  # a callback may have set it
        taken = self.steps.take(batches, num_batches)
        self.batches_in_epoch.accumulated = self._job.trainer.args.gradient_accumulation_steps
        self.batches_in_epoch.rest = len(taken[0]) % num_batches
        PROGRESS.enter("callbacks")
        return taken

    def step(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Run forward and backward of a batch, and return its loss: `Steps.step`. Collective over all processes."""
        self.arrive()
        PROGRESS.begin_round(f"is in step {self._job.trainer.state.global_step + 1}")
        PROGRESS.enter("step")
        self._follow_flags()
        loss, votes = self.steps.step(inputs, lambda: self.preemption.signal.is_asked)
        self.preemption.is_agreed = votes.stop
        self.log.recorder.count_batch(*self.steps.counted, loss)
        PROGRESS.enter("callbacks")
        return loss

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip gradients by their norm over all stages. Collective over the pipeline.

        A freeze policy that needs gradient norms gets them before clipping.
        """
        callback, accelerator = self._freeze_callback, self._job.trainer.accelerator
        scaler = accelerator.scaler
        scale = scaler.get_scale() if scaler is not None else 1.0
        if callback is not None and callback.wants_gradient_norms:
            assert self.pipeline.freezable is not None
            inside = self.pipeline.freezable.inside
            callback.observe(self.pipeline.running.gradients.squared_norms(inside, scale))
        with phase("update"):
            return self.pipeline.clip_grad_norm(
                max_norm, accelerator.unscale_gradients if scaler is not None else None, scale
            )

    def _follow_flags(self) -> None:
        """Train what the user's code has left trainable; if that were layers that it had frozen, nothing is frozen."""
        users = self._users_freezing
        has_thawed = self.steps.follow_flags(thaws=users is not None)
        if users is None or not (has_thawed or any(map(self.pipeline.weights.is_trainable, users.names))):
            return
        users.thaw()
        self._users_freezing = self._freeze_callback = None
        if self.cache is not None:
            self.cache.disable("layers that were frozen are trained again")

    def adapt(self) -> None:
        """Carry out what the freeze policy and the cache have decided.

        Collective over all processes in steps where one of them makes a decision.
        """
        if self._users_freezing is not None:
            self._follow_flags()  # the user may train layers again, also before any counts as frozen
        callback, cache = self._freeze_callback, self.cache
        if cache is not None:
            self._update(cache)
        proposal = callback.take_proposal() if callback is not None else None
        layout = self.pipeline.current_plan
        if proposal is None and cache is None and not layout.num_cached_layers:
            return
        num_frozen = layout.num_frozen_layers
        if proposal is not None:
            num_frozen = max(num_frozen, agreed_num_frozen(self._job.mesh.gather_objects(proposal)))
        if cache is not None and num_frozen > layout.num_frozen_layers:
            cache.check_weights()  # the next generation will be named after the weights as they are now
        num_cached = cache.num_cached if cache is not None else 0
        if (num_frozen, layout.most_cached(num_cached)) != (layout.num_frozen_layers, layout.num_cached_layers):
            self.change_layout(num_frozen, num_cached)
        if proposal is not None:
            assert callback is not None
            callback.confirm(num_frozen)

    def change_layout(self, num_frozen: int, num_cached: int) -> None:
        """Change to the layout that follows when so many layers are frozen and cached.

        Collective over all processes, between two steps.
        """
        pipeline, data, before = self.pipeline, self.data, self.pipeline.current_plan
        assert data is not None
        layout = self.planner.next(before, num_frozen, num_cached)
        if (
            num_frozen == before.num_frozen_layers
            and layout.pipeline_parallel_size == before.pipeline_parallel_size == 1
        ):
            pipeline.replace_plan(layout)  # nothing moves: the cached units are run or skipped in place
            self.log.cached(layout)
        else:
            change = pipeline.transform(layout)
            data.reslice(pipeline.num_replicas, pipeline.replica_index)
            self.log.transformed(change, pipeline.freezable)
        if self.cache is not None:
            self.log.tell(self.cache.freeze(num_frozen, is_start=self._job.trainer.state.global_step == 0))

    def _update(self, cache: AutoCache) -> None:
        """Pass the observations since the last step to the cache. Collective over all processes."""
        doubts, self.steps.doubts = self.steps.doubts, self.steps.doubts & Doubt.FLAGS
        if Doubt.INPUTS in doubts:
            cache.disable(OTHER_INPUTS)
        assert self.data is not None
        report = cache.follow(
            self.num_epochs_begun,
            self._job.trainer.state,
            may_never_repeat=self.data.may_never_repeat,
            doubts_weights=Doubt.WEIGHTS in doubts,
        )
        if report is not None:
            self.log.cache_epoch(report)

    # ------------------------------------------------------------------------------------ checkpoints
    def memory(self) -> dict[str, Any]:
        """Return what a checkpoint stores at this point, in plain values for JSON. Collective over all processes."""
        memory: dict[str, Any] = {"step": self._job.trainer.state.global_step}
        if not self.is_placed or self.data is None:
            return memory
        return {
            **memory,
            "owes_evaluation": self.preemption.will_owe_evaluation,
            "order": self.data.memory,
            "layout": self.planner.facts_of(self.pipeline.current_plan),
        }

    def prepare_for_best(self) -> None:
        """Prepare for loading the best model, which overwrites the last weights. Collective over all processes."""
        self.arrive()
        PROGRESS.begin_round("loads the best model")
        self.preemption.leave_if_asked()  # the steps that follow may also remove the checkpoint of the last weights
        refuse_best_model_that_some_lack(self._job)
        self.preemption.has_loaded_best = True
        self._check_cached_weights()
        self.pipeline.use_shortcut(None)

    def _check_cached_weights(self) -> None:
        """Check the frozen weights at the end, because a later training may read what the last epoch has stored.

        Collective over all processes.
        """
        if self.cache is not None and self.pipeline.shortcut is not None:
            self.cache.check_weights()

    # ------------------------------------------------------------------------------------ the loop's events
    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps and state.epoch % 1 == 0:  # resumed, with no epoch left
            self.preemption.evaluate_what_is_owed()
        if self.pipeline.is_lazy and self._job.trainer.is_world_process_zero():
            warn_of_unsaved(args)
        self.log.announce(self.cache, self.why_not_cached)
        if self._checkpoint is None and self._users_freezing is None:
            self.log.say_what_freezing_costs(self.pipeline.freezable, self.cache is not None)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.num_epochs_begun += 1
        self.steps.doubts |= Doubt.FLAGS

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self._is_begun:
            self._is_begun = True
            self.log.show_layout()
            self.preemption.evaluate_what_is_owed()  # at this point the random states are those of the checkpoint
        if not self.preemption.is_within_epoch:
            self.log.follow_users_freezing()
        self.preemption.is_within_epoch = True

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        # a callback may have ended the epoch on some processes only
        self.meet("has ended the epoch (control.should_epoch_stop or should_training_stop, or its data)")
        self.preemption.is_within_epoch = False
        if self.front is not None:
            self.log.front_epoch(self.front.epoch_report())
        self._show_weights()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._show_weights()

    on_predict = on_save = on_evaluate

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.arrive()
        PROGRESS.begin_round("is at the end of train()")
        PROGRESS.enter("end")
        self.preemption.leave_if_asked()
        self._check_cached_weights()
        if self.is_placed and self.pipeline.num_stages > 1:
            self.steps.look_for_nan("Training has ended")
        self.log.end(self.cache, self.front.why_not_read if self.front is not None else {})
        if self.front is not None:
            self.front.release()  # before what else has replaced the layers' forward
        if self.cache is not None:
            self.cache.close(has_ended=False)  # removes nothing: others may write until make_whole()
        if self._cut is not None:
            self._cut.finish()

    def _show_weights(self) -> None:
        """Note that other callbacks, which follow, may read or change the weights."""
        if self.is_placed:
            self.steps.doubts |= Doubt.WEIGHTS | Doubt.FLAGS
