"""One `train()` of a pipeline: an object that exists from its beginning to its end.

    STEP         get_batch_samples -> take: adapt, then the batches of a step, counted over the replicas
                 training_step -> step -> Steps.step (steps.py)
    TRANSFORM    adapt: the parts' wishes -> Planner.next -> ElasticPipeline.transform
    CHECKPOINT   CheckpointWrite stores `state_dict`

The stock loop drives it, through the trainer's overrides and as a callback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from ..data.loaders import NumberedLoader
from ..data.numbered_batches import TrainingBatches
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..pipeline.engines.engine import Execution
from ..pipeline.optimizer_state import unwrapped
from ..planning.layout import Layout
from ..planning.planner import Planner
from ..progress import PROGRESS, phase
from ..resilience.exit import note_training
from .batches import BatchesInEpoch
from .generation import refuse_generation_that_does_not_fit
from .job import TrainingJob
from .lazy_model import warn_of_unsaved
from .parts import Ending, LayoutChange, Parts, Wish
from .resuming import refuse_best_model_that_some_lack, saved_state
from .setup.cutting import CutModel, FindUnits
from .setup.placing import examine, first_layout
from .steps import Steps

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
        self.job, self.ignored_keys, self.checkpoint = job, ignored_keys, checkpoint
        self.latest_loader: NumberedLoader | None = None
        """The training loader that was made last; the loop's own may be a user's wrapper around it."""
        self.data: TrainingBatches | None = None
        """The training batches; None until the loop has requested its loader."""
        self.may_cache = False
        """Whether frozen layers' outputs may be cached, on every process."""
        self.watches_steps = False
        """Whether a callback, on some process, may read weights at each step."""
        self.is_within_epoch = False
        """Whether a step of the epoch has begun, and the epoch has not ended."""
        self.last_saved: Path | None = None
        """The latest checkpoint of this training."""
        self.num_epochs_begun = 0
        self.batches_in_epoch = BatchesInEpoch()
        """The loop's number of batches in an epoch."""
        self._is_begun = False  # whether a step of this `train()` has begun
        self._find_units = find_units
        self._cut: CutModel | None = None
        self._entered = ExitStack()
        self.parts = Parts(self)

    # ------------------------------------------------------------------------------------ begin and end
    def __enter__(self) -> PipelineRun:
        with ExitStack() as entered:
            entered.push(self._close)
            outer = PROGRESS.phase, PROGRESS.step
            entered.callback(lambda: PROGRESS.enter(*outer) if PROGRESS.phase != outer[0] else None)
            handler = self.job.trainer.callback_handler
            handler.callbacks.insert(0, self)
            entered.callback(lambda: handler.callbacks.remove(self) if self in handler.callbacks else None)
            for part in self.parts.having("around_train"):
                entered.enter_context(part.around_train())
            PROGRESS.enter("start", 0)
            # the last callbacks have run
            entered.push(lambda kind, *_: self.serve_callbacks() if kind is None else None)
            self._entered = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, traceback)

    def _close(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        ending = Ending(error if kind is not None else None, self.last_saved or self.checkpoint)
        if isinstance(error, KeyboardInterrupt):  # without a checkpoint, caches are useless and removed
            left = "".join(part.abandon(ending.newest is not None) for part in self.parts.having("abandon"))
            self.publish("interrupted", (error, ending.newest, left))
        note_training(ending.has_failed)
        for part in self.parts.having("close"):
            part.close(ending)
        if self.data is not None:
            self.data.close()  # otherwise its workers keep waiting for the next epoch
        if self._cut is not None:  # an error has ended the training, or a model loaded lazily stays distributed
            self.pipeline.refuse_incomplete_optimizer()
        # the trainer keeps the parts, which refer to this run, for evaluations and the model card
        self.data = self._cut = None
        vars(self).pop("steps", None)

    def publish(self, topic: str, value: Any) -> None:
        """Publish a value to all parts. The records log the topic "sentence", for example."""
        for part in self.parts.having("told"):
            part.told(topic, value)

    @property
    def training_batches(self) -> TrainingBatches:
        assert self.data is not None, "the loop has not requested its loader"
        return self.data

    @property
    def most_frozen(self) -> int | None:
        """Number of layers that will be frozen at most, if it is known."""
        return next((part.most_frozen for part in self.parts if part.most_frozen is not None), None)

    @property
    def pipeline(self) -> ElasticPipeline:
        assert self._cut is not None, "place() first"
        return self._cut.pipeline

    @property
    def is_placed(self) -> bool:
        """Whether each process has its part of the model."""
        return self._cut is not None and self._cut.pipeline.is_placed

    def meet(self, doing: str) -> bool:
        """Begin an operation of all processes. Returns whether they watch one another.

        Collective over all processes.

        Raises:
            ValueError: another process does something else, or as of `serve_callbacks`.
        """
        self.serve_callbacks(doing)
        met = [part.meet(doing) for part in self.parts.having("meet")]  # no short cut: each call is collective
        return any(met)

    def serve_callbacks(self, doing: str | None = None) -> None:
        """Serve calls of the model in callbacks of other processes, before this one waits for them elsewhere.

        Collective over the pipeline.

        Args:
            doing: what all processes begin, as the predicate of a sentence; None if the loss may do it alone.

        Raises:
            ValueError: the loss begins it, on the last stages only; or the user's code has caught an error of a step.
        """
        if self.is_placed and "steps" in vars(self):
            if doing is not None:
                self.job.mesh.refuse_with_last_stages(doing)
            self.steps.refuse_caught_error()
        if self._cut is not None:
            self.pipeline.serve_callbacks()

    # ------------------------------------------------------------------------------------ before the first step
    def optimize(self, make_optimizer: Callable[[], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Place the model and return its optimizer, when the loop requests it. Collective over all processes.

        Args:
            make_optimizer: the stock method, called if the user has passed no optimizer.
        """
        trainer, pipeline = self.job.trainer, self.place()
        if trainer.optimizer is None:
            with pipeline.weights.as_on_one_process():
                optimizer = make_optimizer()
            self._attach(optimizer, pipeline.current_layout)
        assert trainer.optimizer is not None
        return trainer.optimizer

    def wrap(self) -> ElasticPipeline:
        """Return the pipeline for the loop, after the optimizer has been created. Collective over all processes.

        Raises:
            ValueError: the user's `create_optimizer` has set no optimizer, or has replaced the optimizer that knows
                the stages.
        """
        optimizer = self.job.trainer.optimizer
        self.serve_callbacks()  # an overridden create_optimizer may have called the model
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
            self._attach(optimizer, pipeline.current_layout)
        if optimizer is not None and self.job.mesh.world_size > 1:
            pipeline.adopt_outside()
            # a process that serves must not be ahead of one that calls
            step = unwrapped(optimizer).register_step_pre_hook(
                lambda *_: self.serve_callbacks("called optimizer.step()")
            )
            self._entered.callback(step.remove)
        return pipeline

    def _attach(self, optimizer: torch.optim.Optimizer, layout: Layout) -> None:
        """Let a new optimizer update the model. Collective over all processes.

        Raises:
            ValueError: a part refuses it. Every process raises it.
        """
        assert self._cut is not None
        try:
            for part in self.parts.having("optimizer_found"):
                part.optimizer_found(optimizer, layout)
        except ValueError:
            self._cut.finish()
            self.job.trainer.optimizer = None
            raise
        self._cut.pipeline.attach_optimizer(optimizer)

    def place(self) -> ElasticPipeline:
        """Determine how to split the model and place it. An existing optimizer is attached to the pipeline.

        1. Examine the model and its loss on a few samples.
        2. Give the results to the parts: they return the number of frozen layers, and the layers that may be cached.
        3. Place the model in the first layout, or in a resumed job's layout, and continue from its state.

        Collective over all processes.
        """
        job, trainer, data = self.job, self.job.trainer, self.training_batches
        self.parts.choose()  # a trial of a search has changed the arguments since the parts were made
        # 1
        found = examine(job, data, self._find_units, lambda plan: self.publish("slices", plan))
        self._cut, self.planner, pipeline = found.cut, found.planner, found.cut.pipeline
        kept = saved_state(job)
        self.watches_steps = any(job.mesh.gather_objects(job.watches_steps))
        # 2
        for part in self.parts:
            part.load_state_dict(kept)
        for part in self.parts.having("found"):
            part.found(found)
        num_frozen = max((part.num_frozen for part in self.parts), default=0)
        # 3
        layout, is_resumed = first_layout(self.planner, kept, num_frozen)
        for part in self.parts.having("chosen"):
            part.chosen(is_resumed)
        refuse_generation_that_does_not_fit(job, self.planner, layout)
        if trainer.optimizer is not None and not pipeline.updates_with(trainer.optimizer):
            self._attach(trainer.optimizer, layout)
        calls = job.mesh.any(job.may_call_model)
        self.steps = Steps(job, pipeline, found.loss, found.reduction, data, self.parts, self.watches_steps)
        pipeline.place(layout, Execution(found.slicing, found.is_driven, calls, found.unreached))
        data.reslice(layout.data_parallel_size, pipeline.replica_index)
        if kept.get("order") and trainer.state.epoch % 1:
            data.load_state_dict(int(trainer.state.epoch), kept["order"])
        for part in self.parts.having("placed"):
            part.placed(layout)
        return pipeline

    # ------------------------------------------------------------------------------------ between two steps
    def take(self, batches: Iterator[Any], num_batches: int) -> tuple[list[Any], Any]:
        """Return the batches of the next optimizer step and the number of items. Collective over all processes.

        Only here a transformation is safe: there are no gradients, and no batch is being processed.
        """
        step = self.job.trainer.state.global_step
        self.serve_callbacks()
        PROGRESS.begin_round(f"is in step {step + 1}")
        PROGRESS.enter("adapt", step)
        with ExitStack() as around:
            for part in self.parts.having("around"):
                around.enter_context(part.around("adapting"))
            self.adapt()
        PROGRESS.enter("data")
        self.job.ignore_average_tokens()  # a callback may have set it
        taken = self.steps.take(batches, num_batches)
        self.batches_in_epoch.accumulated = self.job.trainer.args.gradient_accumulation_steps
        self.batches_in_epoch.remainder = len(taken[0]) % num_batches
        PROGRESS.enter("callbacks")
        return taken

    def step(self, inputs: dict[str, Any], num_items: Any = None) -> torch.Tensor:
        """Run forward and backward of a batch, and return its loss: `Steps.step`. Collective over all processes."""
        self.serve_callbacks()
        PROGRESS.begin_round(f"is in step {self.job.trainer.state.global_step + 1}")
        PROGRESS.enter("step")
        self.follow_flags()
        loss = self.steps.step(inputs, num_items)
        PROGRESS.enter("callbacks")
        return loss

    def clip(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the gradients of parameters by their norm over all stages. Collective over the pipeline.

        Parts may look at the gradients before they are clipped.

        Raises:
            ValueError: `norm_type` is not 2, or the loss calls it, on the last stages only.
        """
        if norm_type != 2:
            raise ValueError(
                f"norm_type={norm_type} is not supported: gradients are clipped by their 2-norm over all stages."
                " Use norm_type=2."
            )
        self.serve_callbacks("called accelerator.clip_grad_norm_()")
        accelerator = self.job.trainer.accelerator
        scaler = accelerator.scaler
        scale = scaler.get_scale() if scaler is not None else 1.0
        for part in self.parts.having("before_update"):
            part.before_update(scale)
        with phase("update"):
            given: Any = [parameters] if isinstance(parameters, torch.Tensor) else parameters
            return self.pipeline.clip_grad_norm(
                given, max_norm, accelerator.unscale_gradients if scaler is not None else None, scale
            )

    def follow_flags(self) -> None:
        """Train exactly the parameters that the user's code has left trainable. Collective as `Steps.follow_flags`."""
        has_thawed = self.steps.follow_flags(thaws=any(part.may_thaw for part in self.parts.having("flags_followed")))
        for part in self.parts.having("flags_followed"):
            part.flags_followed(has_thawed)

    def thaw(self) -> None:
        """Tell all parts that no layer counts as frozen any more. Collective over all processes."""
        for part in self.parts.having("thawed"):
            part.thawed()

    def adapt(self) -> None:
        """Carry out the parts' wishes: more frozen layers, and other layers that count as cached.

        Collective over all processes in steps where a part has a wish.
        """
        for part in self.parts.having("between_steps"):
            part.between_steps()
        layout = self.pipeline.current_layout
        wish = Wish(layout.num_frozen_layers, 0)
        for part in self.parts.having("wish"):
            wish = part.wish(wish)
        if (wish.num_frozen, layout.most_cached(wish.num_cached)) != (
            layout.num_frozen_layers,
            layout.num_cached_layers,
        ):
            self.change_layout(wish.num_frozen, wish.num_cached)
        for part in self.parts.having("granted"):
            part.granted(self.pipeline.current_layout)

    def change_layout(self, num_frozen: int, num_cached: int) -> None:
        """Change to the layout that follows when so many layers are frozen and cached.

        Collective over all processes, between two steps.
        """
        pipeline, before, transformation = self.pipeline, self.pipeline.current_layout, None
        layout = self.planner.next(before, num_frozen, num_cached)
        if (
            num_frozen == before.num_frozen_layers
            and layout.pipeline_parallel_size == before.pipeline_parallel_size == 1
        ):
            pipeline.replace_layout(layout)  # no layer moves: the cached units are run or skipped in place
        else:
            transformation = pipeline.transform(layout)
            self.training_batches.reslice(pipeline.num_replicas, pipeline.replica_index)
        for part in self.parts.having("layout_changed"):
            part.layout_changed(LayoutChange(before, layout, transformation))

    # ------------------------------------------------------------------------------------ checkpoints
    def state_dict(self) -> dict[str, Any]:
        """Return the run's state for a checkpoint, in plain values for JSON. Collective over all processes."""
        state: dict[str, Any] = {"step": self.job.trainer.state.global_step}
        if not self.is_placed or self.data is None:
            return state
        for part in self.parts.having("state_dict"):
            state |= part.state_dict()
        layout = self.planner.state_dict(self.pipeline.current_layout)
        return {**state, "order": self.data.state_dict(), "layout": layout}

    def prepare_for_best(self) -> None:
        """Prepare for loading the best model, which overwrites the last weights. Collective over all processes."""
        self.serve_callbacks("loads the best model")
        PROGRESS.begin_round("loads the best model")
        for part in self.parts.having("before_best"):
            part.before_best()
        refuse_best_model_that_some_lack(self.job)

    def evaluate(self, stock: Callable[[], Any]) -> Any:
        """Call the Trainer's method that evaluates in the loop. Collective over all processes.

        The user's code in it (an overridden `evaluate`, `compute_metrics`) may call the model, as callbacks may.
        """
        with self.pipeline.running.serving_callbacks():
            return stock()

    def nothing_left(self) -> None:
        """A resumed training has no step left. Not collective."""
        for part in self.parts.having("nothing_left"):
            part.nothing_left()

    def end_step(self, stock: Callable[[], None]) -> None:
        """Call the Trainer's method that logs, saves and evaluates after a step, or the parts' replacement of it.

        Raises:
            ValueError: a callback lets only some processes log. Logging gathers the loss.
        """
        self.serve_callbacks()
        PROGRESS.begin_round(f"is at the end of step {self.job.trainer.state.global_step}")  # stock gathers the loss
        if self.watches_steps and self.job.mesh.differs(self.job.trainer.control.should_log):
            raise ValueError(
                "control.should_log is set on some processes only: a callback has set it on them, or has called"
                " trainer.log(), which unsets it. Do that on all processes, or call trainer.log() in"
                " compute_loss or on_log."
            )
        PROGRESS.enter("log")
        for part in self.parts.having("wrap_step_end"):
            stock = part.wrap_step_end(stock)
        stock()

    # ------------------------------------------------------------------------------------ the loop's events
    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self.pipeline.is_lazy and self.job.trainer.is_world_process_zero():
            warn_of_unsaved(args)
        for part in self.parts.having("train_begins"):
            part.train_begins()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.num_epochs_begun += 1
        self.steps.may_have_other_flags = True
        for part in self.parts.having("epoch_begins"):
            part.epoch_begins()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        is_first, self._is_begun = not self._is_begun, True
        for part in self.parts.having("step_begins"):
            part.step_begins(is_first)
        self.is_within_epoch = True

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.pipeline.before_update()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        # a callback may have ended the epoch on some processes only
        self.meet("has ended the epoch (control.should_epoch_stop or should_training_stop, or its data)")
        self.is_within_epoch = False
        for part in self.parts.having("epoch_ends"):
            part.epoch_ends()
        self._show_weights()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._show_weights()

    on_predict = on_save = on_evaluate

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.serve_callbacks()
        PROGRESS.begin_round("is at the end of train()")
        PROGRESS.enter("end")
        for part in self.parts.having("train_ends"):
            part.train_ends()
        if self.is_placed and self.pipeline.num_stages > 1:
            self.steps.look_for_nan("Training has ended")
        for part in self.parts.having("release"):
            part.release()
        if self._cut is not None:
            self._cut.finish()

    def _show_weights(self) -> None:
        """Note that other callbacks, which follow, may read or change the weights."""
        if self.is_placed:
            self.steps.may_have_other_flags = True
            for part in self.parts.having("weights_shown"):
                part.weights_shown()


def unwrapped_model(unwrap: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply an accelerator's `unwrap_model`, and remove the pipeline, a wrapper around the user's model like DDP."""
    return unwrap(model.model if isinstance(model, ElasticPipeline) else model, *args, **kwargs)
