"""One `train()` of a pipeline: an object that exists from its beginning to its end.

    STEP         get_batch_samples -> take: adapt, then the batches of a step, counted over the replicas
                 training_step -> step -> Steps.step (steps.py)
    TRANSFORM    adapt: the cache's decision, an agreed freeze -> Planner.next -> ElasticPipeline.transform
    CHECKPOINT   CheckpointWrite calls `memory`

The stock loop drives it, through the trainer's overrides and as a callback.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from ..data.loaders import NumberedLoader
from ..data.numbered_batches import TrainingBatches
from ..errors import ONE_LINE
from ..freezing.callback import LayerFreezeCallback
from ..freezing.policies import agreed_num_frozen
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..pipeline.optimizer_state import unwrapped
from ..pipeline.placed import Ways
from ..planning.layout import Layout
from ..planning.planner import Planner
from ..randomness import generators_kept
from ..resilience.exit import SECONDS, note_training
from ..resilience.watchdog import PROGRESS, Watchdog, phase
from ..token_slices.token_schedule import Slicing
from .batches import BatchesInEpoch
from .cache_control import OTHER_INPUTS, AutoCache
from .cache_setup import check_folder, make_cache
from .checkpointing import exporting_state
from .consistency import check_same_size
from .cutting import CutModel, make_planner, time_model
from .evaluation import FindUnits, refuse_generation_that_does_not_fit
from .front_cache import FrontCache
from .job import COST_SAMPLE_ROWS, TrainingJob
from .lazy_model import warn_of_unsaved
from .loss import TrainersLoss
from .optimizer_probe import coupling_of
from .preemption import Moment, Preemption
from .probing import SampleCollator
from .resuming import recall, refuse_best_model_that_some_lack
from .run_log import RunLog
from .setup import find_reduction, find_windows, is_driven, say_how_loss_adds_up
from .steps import Doubt, Steps
from .training_data import store_file
from .users_freezing import UsersFreezing, attach_freezing

logger = logging.getLogger(__name__)

WRITTEN_TO_PLACEHOLDER = "more than one element of the written-to tensor refers to a single memory location"
"""Part of torch's error for an in-place write to a tensor whose elements all share the memory of one element."""

STEP_EVENTS = (
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_log",
)


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
            entered.enter_context(exporting_state(job.trainer))
            entered.enter_context(self.log.recorder.recording(job.trainer, before=[self]))
            entered.enter_context(self.preemption.signal)
            self.watchdog = entered.enter_context(
                Watchdog(
                    job.mesh.rank,
                    job.mesh.gather_objects,
                    job.args.watchdog_timeout,
                    limit=job.args.ddp_timeout,
                    has_accelerator=job.device.type != "cpu",
                )
            )
            entered.enter_context(self._naming_writes_to_placeholders())
            self._entered = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, traceback)

    def _close(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._tell_of_interruption(error)
        has_failed = kind is not None and issubclass(kind, Exception)
        note_training(has_failed)
        if self._users_freezing is not None:
            self._users_freezing.forget()
        if kind is None:
            self.log.conclude()
        if self.cache is not None:
            # after a complete run, remove what no other run can use; an interrupted run is resumed with its cache
            has_ended = kind is None or (issubclass(kind, KeyboardInterrupt) and self._newest_checkpoint is None)
            close = partial(self.cache.close, has_ended=has_ended)
            if has_failed and self._job.device.type != "cpu":
                closing = threading.Thread(target=close, daemon=True)
                closing.start()
                closing.join(SECONDS)  # its writer waits for the device, where a kernel may wait for other processes
            else:
                close()
        if self.front is not None:
            self.front.close(has_failed)
        if self.data is not None:
            self.data.close()  # otherwise its workers keep waiting for the next epoch

    @property
    def _newest_checkpoint(self) -> Path | None:
        """The checkpoint from which this training would be resumed, if there is one."""
        return self.preemption.last_saved or self._checkpoint

    def _tell_of_interruption(self, interrupt: KeyboardInterrupt) -> None:
        """Say what is left of a training that was interrupted by Ctrl-C.

        Without a checkpoint the training cannot be resumed, and its cache is removed.
        """
        job, newest = self._job, self._newest_checkpoint
        of_cache = self.cache.abandon(is_resumable=newest is not None) if self.cache is not None else ""
        if job.trainer.is_world_process_zero():
            state = job.trainer.state
            resumed = f"Resume from {newest}" if newest is not None else "No checkpoint was saved"
            logger.warning(
                "Interrupted at step %d of %d. %s.%s", state.global_step, state.max_steps, resumed, of_cache
            )
        if job.mesh.world_size > 1:
            setattr(interrupt, ONE_LINE, "")  # a launcher passes the signal to all processes; one line is enough

    @contextmanager
    def _naming_writes_to_placeholders(self) -> Iterator[None]:
        """Inside the context, translate torch's error for a write to a placeholder parameter.

        Raises:
            ValueError: the user's code has written to parameters that other stages hold.
        """
        try:
            yield
            self.arrive()  # the last callbacks have run
        except RuntimeError as error:
            if WRITTEN_TO_PLACEHOLDER not in str(error) or not self.is_placed:
                raise
            raise ValueError(
                "A callback, or your training_step or loss, wrote to parameters of the model or to their gradients,"
                f" but each of the {self.pipeline.num_stages} stages of the pipeline holds only its own. Change"
                f" weights before or after train(), or set pipeline_parallel_size=1. The original error was: {error}"
            ) from error

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

        1. Set up: find the units, probe the loss and the slices, measure times.
        2. Plan: as the arguments ask, or the layout of the job that is resumed.
        3. Cache: probe which outputs may be cached.
        4. Freeze: restore the layers that a resumed job had frozen.
        5. Place the model, and continue from the state of the resumed job.

        Collective over all processes.
        """
        job, trainer, data = self._job, self._job.trainer, self.data
        assert data is not None
        # 1
        if data.is_shared:
            check_same_size(job.mesh, data.dataset)
        rows: list[Any] = []
        collate: SampleCollator | None = None
        if job.is_probed:
            rows, collate = data.sample_rows(COST_SAMPLE_ROWS), SampleCollator(job, data.collate_fn, data.is_shared)
        with generators_kept(trainer, job.model):
            self._cut = self._find_units(rows, collate)
            loss = TrainersLoss(job)
            reduction = find_reduction(loss, self.pipeline.stack, data, collate)
            slicing: Slicing | None = None
            if job.args.slices_tokens:
                assert collate is not None
                windows = find_windows(loss, reduction, self.pipeline.stack, rows, collate)
                slicing = Slicing(job.args.token_slices, windows, self.log.sliced)
            times = time_model(job, self._cut, rows, collate)
        pipeline = self._cut.pipeline
        drives = is_driven(job, reduction)
        # 2
        self.planner = planner = make_planner(
            job.args,
            self._cut.unit_costs,
            job.mesh,
            times,
            is_driven=drives,
            autocasts=job.mixed_precision in ("bf16", "fp16"),
        )
        say_how_loss_adds_up(job, reduction, planner)
        coupling = None
        if trainer.optimizer is not None and not pipeline.updates_with(trainer.optimizer):
            coupling = coupling_of(job, pipeline.stack, trainer.optimizer, planner.first)
            pipeline.attach_optimizer(trainer.optimizer)
        kept = recall(job)
        self.preemption.owes_evaluation = bool(kept.get("owes_evaluation"))
        # 3
        if job.freeze_callback is None and job.args.uses_pipeline and self.generations is not None:
            self._users_freezing = UsersFreezing.find(job, pipeline)
        most = self._users_freezing.count if self._users_freezing is not None else None
        if job.may_cache and job.freeze_callback is not None:
            assert self.generations is not None
            of_cache = job, data, self._cut.unit_costs, self.generations
            self.why_not_cached = self._why_not_for_calls(drives) or check_folder(*of_cache)
            if self.why_not_cached is None:
                with generators_kept(trainer, job.model):
                    self.cache = make_cache(pipeline, times, *of_cache, most)
        # 4
        num_frozen = attach_freezing(job, pipeline.freezable, self._users_freezing)
        # a newly made layout might differ, because the sequence of freezes that led to it is not recorded
        again = planner.again(kept["layout"], num_frozen) if kept.get("layout") is not None else None
        layout = again or planner.first
        if again is None:
            self.log.first_chosen(planner)
        if layout.num_frozen_layers < num_frozen:
            layout = planner.next(layout, num_frozen, layout.num_cached_layers)
        refuse_generation_that_does_not_fit(job, planner, layout)
        # 5
        watches_steps = any(job.mesh.gather_objects(watch_steps(job.users_callbacks)))
        calls = bool(job.users_callbacks) or job.overrides("prediction_step")
        ways = Ways(
            slicing,
            drives,
            serves_callbacks=any(job.mesh.gather_objects(calls)),
            offloads=job.device.type != "cpu" and not watches_steps,  # on the CPU nothing is saved by it
        )
        self._refuse_coupling(coupling, layout)
        if job.may_cache_front:
            self.front = FrontCache(job, data.dataset, store_file(job))
        self._freeze_callback = job.freeze_callback
        self.steps = Steps(job, pipeline, loss, reduction, data, self.cache, self.front, watches_steps)
        pipeline.place(layout, self.steps.loss_of, ways)
        self.log.begin(planner, layout)
        data.reslice(layout.data_parallel_size, pipeline.replica_index)
        if kept.get("order") and trainer.state.epoch % 1:
            data.keep_order(int(trainer.state.epoch), **kept["order"])
        if self.cache is not None and layout.num_frozen_layers:
            if layout.num_cached_layers:
                self.cache.freeze(layout.num_cached_layers, goes_on=True)
            self.log.tell(self.cache.freeze(layout.num_frozen_layers))
        return pipeline

    def _why_not_for_calls(self, is_driven: bool) -> str | None:
        """Why the loss's calls of the model cannot be looked up, or None.

        Raises:
            ValueError: they cannot, with `activation_cache="on"`. Every process raises it.
        """
        if not is_driven or self.pipeline.stack.runner.takes_batch:
            return None
        why = "the loss calls the model on inputs of its own, which are looked up with one stage only"
        if self._job.args.activation_cache == "on":
            raise ValueError(
                f"activation_cache='on': {why}. Set pipeline_parallel_size=1, or activation_cache='auto' to train"
                " without the cache."
            )
        return why

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
        pipeline.offload_cached_layers()

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
        self.preemption.moment = Moment.BEST_LOADED
        self._check_cached_weights()
        self.pipeline.use_cache(None)

    def _check_cached_weights(self) -> None:
        """Check the frozen weights at the end, because a later training may read what the last epoch has stored.

        Collective over all processes.
        """
        if self.cache is not None and self.pipeline.cache is not None:
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
        self.preemption.moment = Moment.WITHIN_EPOCH

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        # a callback may have ended the epoch on some processes only
        self.meet("has ended the epoch (control.should_epoch_stop or should_training_stop, or its data)")
        self.preemption.moment = Moment.BETWEEN_EPOCHS
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
        self.log.end(self.cache)
        if self.front is not None:
            self.front.release()  # before what else has replaced the layers' forward
        if self.cache is not None:
            self.cache.close(has_ended=False)  # removes nothing: others may write until make_whole()
        if self._cut is not None:
            self._cut.finish()

    def _show_weights(self) -> None:
        """Onload the weights before other callbacks, which may read or change them.

        The weights of cached layers may be offloaded from the device.
        """
        if self.is_placed:
            self.pipeline.weights.onload()
            self.steps.doubts |= Doubt.WEIGHTS | Doubt.FLAGS


def watch_steps(callbacks: Sequence[Any]) -> bool:
    """Whether one of the user's callbacks may read weights at each step, as a running average does."""
    stock = {name: getattr(TrainerCallback, name) for name in STEP_EVENTS}
    # looked up on the object, because a method may be set on the instance
    return any(
        getattr(getattr(c, n, None), "__func__", None) is not method for c in callbacks for n, method in stock.items()
    )
