"""One `train()` of a pipeline: an object that is made when it begins, and is gone when it ends.

    STEP         get_batch_samples -> take: adapt, then the batches of a step, counted over the replicas
                 training_step -> Steps.step (steps.py)
    TRANSFORM    adapt: the cache's decision, a proposed freeze, agreed -> Planner.next -> ElasticPipeline.transform
    CHECKPOINT   CheckpointWrite asks for `memory`

The stock loop drives it: through the trainer's overrides, and as a callback.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from ..freezing.callback import refuse_reentrant_checkpointing
from ..freezing.policies import agreed_num_frozen
from ..model.frozen_prefix import FreezableLayers
from ..pipeline.elastic_pipeline import ElasticPipeline, unwrapped
from ..planning.plan import PipelinePlan
from ..randomness import generators_kept
from ..resilience.watchdog import PROGRESS, watching
from ..token_slices.token_schedule import Slicing
from .agreement import check_same_size
from .cache_control import OTHER_INPUTS, AutoCache
from .cache_setup import make_cache
from .cutting import CutModel, time_model
from .job import COST_SAMPLE_ROWS, TrainingJob
from .loss import TrainersLoss
from .optimizer_probe import probe_coupling
from .planner import Planner
from .preemption import Moment, Preemption
from .recording import RunLog
from .resuming import recall, refuse_best_model_that_some_lack
from .samples import SampleCollator
from .setup import Setup, TrainingData, check_loss_allows, find_reduction, find_windows, may_replicate
from .steps import Doubt, Steps

logger = logging.getLogger(__name__)

WRITTEN_TO_PLACEHOLDER = "more than one element of the written-to tensor refers to a single memory location"
"""What torch says to a write to all elements of a tensor that has the memory of one."""

STEP_EVENTS = (
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_log",
)

FindUnits = Callable[[Sequence[Any], SampleCollator | None], CutModel]
"""Finds what the trainer's model is made of, or returns what was found before. Collective over all processes."""


class PipelineRun(TrainerCallback):
    """What lives for one `train()`. To be entered around it; entering and leaving touch the trainer's callbacks.

    Args:
        job: the training.
        find_units: of the trainer's model.
        checkpoint: the folder that is resumed from; None: it begins.
        ignored_keys: of the model's outputs, in evaluations (`ignore_keys_for_eval`).
    """

    def __init__(
        self, job: TrainingJob, find_units: FindUnits, checkpoint: Path | None, ignored_keys: list[str] | None
    ) -> None:
        self.preemption = Preemption(job, ignored_keys)
        self.log = RunLog(job)
        self.data: TrainingData | None = None
        """The training's batches, once the loop has asked for its loader."""
        self.generations: Path | None = None
        """The file that names what is read from the cache, for the workers of all loaders."""
        self.cache: AutoCache | None = None
        self.num_epochs_begun = 0
        self._job, self._find_units, self._checkpoint = job, find_units, checkpoint
        self._loss = TrainersLoss(job)
        self._setup: Setup | None = None
        self._planner: Planner | None = None
        self._cut: CutModel | None = None
        self._steps: Steps | None = None
        self._entered = ExitStack()

    # ------------------------------------------------------------------------------------ begin and end
    def __enter__(self) -> PipelineRun:
        job = self._job
        with ExitStack() as entered:
            entered.push(self._close)
            entered.enter_context(self.log.recording(before=[self]))
            entered.enter_context(self._naming_writes_to_placeholders())
            entered.enter_context(self.preemption.signal)
            entered.enter_context(
                watching(
                    job.mesh.rank,
                    job.mesh.world_size,
                    job.args.local_process_index,
                    job.mesh.gather_objects,
                    job.args.watchdog_timeout,
                    limit=job.args.ddp_timeout,
                    has_accelerator=job.device.type != "cpu",
                )
            )
            self._entered = entered.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, traceback)

    def _close(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self.cache is not None:
            # what another run cannot use goes; a run that was interrupted will be resumed with it
            self.cache.close(has_ended=kind is None)
        if self.data is not None:
            self.data.close()  # its workers wait for the next epoch

    @contextmanager
    def _naming_writes_to_placeholders(self) -> Iterator[None]:
        """Inside, there is a sentence for what callbacks cannot do with a part of the weights.

        Raises:
            ValueError: a callback has written to parameters that other stages hold.
        """
        handler: Any = self._job.trainer.callback_handler
        call = handler.call_event

        def call_event(*positional: Any, **keywords: Any) -> Any:
            try:
                return call(*positional, **keywords)
            except RuntimeError as error:
                if WRITTEN_TO_PLACEHOLDER not in str(error) or self._cut is None or not self.pipeline.is_placed:
                    raise
                raise ValueError(
                    f"A callback has written to parameters of the model, and each of the {self.pipeline.num_stages}"
                    " stages of the pipeline has its own parameters only: change weights before or after train(), or"
                    f" set pipeline_parallel_size=1. It failed with {error}"
                ) from error

        handler.call_event = call_event
        try:
            yield
        finally:
            del handler.call_event

    @property
    def pipeline(self) -> ElasticPipeline:
        assert self._cut is not None, "place() first"
        return self._cut.pipeline

    @property
    def setup(self) -> Setup:
        """What was found out before the first step."""
        assert self._setup is not None, "place() first"
        return self._setup

    @property
    def steps(self) -> Steps:
        """Runs the steps."""
        assert self._steps is not None, "place() first"
        return self._steps

    @property
    def planner(self) -> Planner:
        assert self._planner is not None, "place() first"
        return self._planner

    # ------------------------------------------------------------------------------------ before the first step
    def optimize(self, make_optimizer: Callable[[], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """The loop asks for the optimizer, and so the model is cut. Collective over all processes.

        Args:
            make_optimizer: the stock method, for where the user has given none.
        """
        trainer, pipeline = self._job.trainer, self.place()
        if trainer.optimizer is None:
            with pipeline.weights.as_on_one_process():
                optimizer = make_optimizer()
            if pipeline.num_stages > 1:
                self._refuse_coupling(self._coupling_of(optimizer))
            pipeline.attach_optimizer(optimizer)
        assert trainer.optimizer is not None
        return trainer.optimizer

    def wrap(self) -> ElasticPipeline:
        """The loop asks for what it trains; the optimizer is there. Collective over all processes.

        Raises:
            ValueError: the user's own `create_optimizer` has made none, or one in place of ours.
        """
        optimizer = self._job.trainer.optimizer
        if self._cut is None or not self.pipeline.is_placed:
            if optimizer is None:
                raise ValueError(
                    "create_optimizer was overridden and has set no optimizer: let it set self.optimizer, or call"
                    " super().create_optimizer()."
                )
            self.place()  # create_optimizer is the user's own, and has made one over the whole model
        pipeline = self.pipeline
        if optimizer is not None and not pipeline.updates_with(optimizer):
            if pipeline.num_stages > 1:
                raise ValueError(
                    "create_optimizer was overridden and has replaced the optimizer of super().create_optimizer(),"
                    " which knows the stages: make yours over the whole model and do not call super(), or pass it as"
                    " optimizers=(optimizer, None)."
                )
            pipeline.attach_optimizer(optimizer)
        if optimizer is not None and self._job.mesh.world_size > 1:
            pipeline.optimizer_state.refuse_added()
        return pipeline

    def place(self) -> ElasticPipeline:
        """Find out how to cut the model, and place it; an optimizer that there is already is adopted.

        1. Set up: units, loss, slices, times.
        2. Plan: what the arguments ask for, or the plan of the job that is resumed.
        3. Cache: what may be cached.
        4. Freeze: what a resumed job had frozen.
        5. Place, and go on where the resumed job was.

        Collective over all processes.
        """
        job, trainer, data = self._job, self._job.trainer, self.data
        assert data is not None
        # 1
        check_same_size(job.mesh, data.dataset)
        rows: list[Any] = []
        collate: SampleCollator | None = None
        if job.is_probed:
            rows, collate = data.sample_rows(COST_SAMPLE_ROWS), job.collator(data.collate_fn)
        with generators_kept(trainer, job.model):
            self._cut = self._find_units(rows, collate)
            self._setup = setup = self._set_up(self._cut, rows, collate)
        pipeline = self._cut.pipeline
        coupling = None
        if trainer.optimizer is not None and not pipeline.updates_with(trainer.optimizer):
            coupling = self._coupling_of(trainer.optimizer)
            pipeline.attach_optimizer(trainer.optimizer)
        # 2
        self._planner = planner = Planner(
            job.args,
            self._cut.unit_costs,
            setup.times,
            job.mesh,
            may_replicate=may_replicate(job, setup.reduction),
        )
        check_loss_allows(job, setup.reduction, planner.first)
        kept = recall(job)
        self.preemption.owes_evaluation = bool(kept.get("owes_evaluation"))
        # 3
        if job.may_cache:
            assert self.generations is not None
            with generators_kept(trainer, job.model):
                self.cache = make_cache(job, pipeline, data, setup.times, self.generations)
        # 4
        num_frozen = self._attach_freezing(pipeline.freezable)
        again = self._plan_of_interrupted_job(kept, num_frozen)
        plan = again or planner.first
        if plan.num_frozen_layers < num_frozen:
            plan = planner.next(plan, num_frozen, planner.num_cached)
        # 5
        watches_steps = any(job.mesh.gather_objects(watch_steps(job.users_callbacks)))
        pipeline.offloads = job.device.type != "cpu" and not watches_steps
        if plan.pipeline_parallel_size > 1:
            self._refuse_coupling(coupling)
        self._steps = Steps(job, pipeline, setup, data, self.cache, self.preemption, self.log.recorder, watches_steps)
        pipeline.place(plan, self._steps.loss_of)
        logger.info("%s", plan)
        self.log.begin(plan)
        data.reslice(plan.data_parallel_size, pipeline.replica_index)
        if plan is again:
            settled = kept["layout"]["microbatches"][pipeline.replica_index]
            pipeline.settle_microbatches({(rows, elements): m for rows, elements, m in settled})
        if kept.get("order") and trainer.state.epoch % 1:
            data.keep_order(int(trainer.state.epoch), **kept["order"])
        if self.cache is not None and plan.num_frozen_layers:
            if planner.num_cached:
                self.cache.resume(planner.num_cached)
            self.cache.freeze(plan.num_frozen_layers)
        return pipeline

    def _set_up(self, cut: CutModel, rows: Sequence[Any], collate: SampleCollator | None) -> Setup:
        job, pipeline, data = self._job, cut.pipeline, self.data
        assert data is not None
        reduction, is_random = find_reduction(self._loss, pipeline.stack, data, collate)
        windows, pipeline.slicing = None, None
        if job.args.slices_tokens:
            assert collate is not None
            windows = find_windows(self._loss, reduction, pipeline.stack, rows, collate)
            pipeline.slicing = Slicing(job.args.token_slices, windows, self.log.sliced)
        times = time_model(job, cut, rows, collate, self._checkpoint)
        return Setup(reduction, is_random, times, windows)

    def _coupling_of(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Why stages cannot divide an optimizer, for a message. Collective over all processes."""
        why = None
        if self._job.args.uses_pipeline:
            stack = self.pipeline.stack
            units = {id(stack.table[n]): k for k in reversed(range(stack.num_units)) for n in stack.owners[k]}
            why = probe_coupling(unwrapped(optimizer), units)
        found = next((theirs for theirs in self._job.mesh.gather_objects(why) if theirs is not None), None)
        return None if found is None else f"{type(optimizer).__name__}: {found}"

    def _refuse_coupling(self, coupling: str | None) -> None:
        """
        Raises:
            ValueError: on all processes.
        """
        if coupling is None:
            return
        assert self._cut is not None
        self._cut.make_whole()
        self._job.trainer.optimizer = None
        raise ValueError(
            f"{coupling}, and each stage of a pipeline has its own parameters only. Choose an optimizer that"
            " updates each parameter by its own gradient, or set pipeline_parallel_size=1."
        )

    def _attach_freezing(self, freezable: FreezableLayers | None) -> int:
        """Let the freeze callback know the model's layers; how many of them a resumed job had frozen."""
        callback = self._job.freeze_callback
        if callback is None:
            return 0
        refuse_reentrant_checkpointing(self._job.args)
        assert freezable is not None
        callback.attach(freezable.num_layers, freezable.max_frozen, self._job.trainer.state)
        with_the_first = [k for k, names in enumerate(freezable.inside) if freezable.frozen(1) & set(names)]
        if len(with_the_first) > 1:
            logger.warning(
                "Layers %s of %s share parameters with its first layer and freeze with it.",
                ", ".join(map(str, with_the_first[1:])),
                type(self._job.model).__name__,
            )
        return callback.num_frozen

    def _plan_of_interrupted_job(self, kept: dict[str, Any], num_frozen: int) -> PipelinePlan | None:
        """The one in force when the checkpoint was written, if all that decides about it is as it was.

        Made anew it might be another: how it came about, layer by layer, is not to be seen any more.
        """
        layout = kept.get("layout")
        if layout is None or layout["where"] != self._measured_on:
            return None
        return self.planner.again(layout, num_frozen)

    # ------------------------------------------------------------------------------------ between two steps
    def take(self, batches: Iterator[Any], num_batches: int) -> tuple[list[Any], int | float]:
        """The batches of the next optimizer step, and the items in it. Collective over all processes.

        This is the one safe point: no gradient is alive, no batch is under way.
        """
        PROGRESS.enter("adapt", self._job.trainer.state.global_step)
        with self.log.recorder.doing("adapting"):
            self.adapt()
        PROGRESS.enter("data")
        taken = self.steps.take(batches, num_batches)
        PROGRESS.enter("callbacks")
        return taken

    def adapt(self) -> None:
        """Carry out what the freeze policy and the cache have decided. Collective where a decision is made."""
        callback, pipeline, cache = self._job.freeze_callback, self.pipeline, self.cache
        if cache is not None:
            self._update(cache)
        plan = pipeline.current_plan
        num_frozen = plan.num_frozen_layers
        proposal = callback.take_proposal() if callback is not None else None
        if proposal is not None:
            num_frozen = max(num_frozen, agreed_num_frozen(pipeline.mesh.gather_objects(proposal)))
        if cache is not None and num_frozen > plan.num_frozen_layers:
            cache.check_weights()  # as they are now they will be the next generation's
        num_cached = cache.num_cached if cache is not None else 0
        if (num_frozen, num_cached) != (plan.num_frozen_layers, self.planner.num_cached):
            self._transform(plan, num_frozen, num_cached)
            if cache is not None:
                cache.freeze(num_frozen)
            pipeline.offload_cached_layers()
        if proposal is not None:
            assert callback is not None
            callback.confirm(num_frozen)

    def _transform(self, plan: PipelinePlan, num_frozen: int, num_cached: int) -> None:
        pipeline, data = self.pipeline, self.data
        assert data is not None
        new = self.planner.next(plan, num_frozen, num_cached)
        if num_frozen == plan.num_frozen_layers and new.pipeline_parallel_size == plan.pipeline_parallel_size == 1:
            pipeline.replace_plan(new)  # the same work at the same place, or none
            self.log.record("cache", new)
            return
        change = pipeline.transform(new)
        data.reslice(pipeline.num_replicas, pipeline.replica_index)
        self.log.transformed(change)

    def _update(self, cache: AutoCache) -> None:
        """Tell the cache what has been seen since the last step. Collective over all processes."""
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
        """What a checkpoint of this moment keeps, in plain values for JSON. Collective over all processes."""
        memory: dict[str, Any] = {"step": self._job.trainer.state.global_step}
        pipeline = self._cut.pipeline if self._cut is not None and self._cut.pipeline.is_placed else None
        mine = [(*shape, m) for shape, m in pipeline.settled_microbatches.items()] if pipeline is not None else []
        settled = self._job.mesh.gather_objects(mine)
        if pipeline is None or self.data is None:
            return memory
        plan = pipeline.current_plan
        return {
            **memory,
            "owes_evaluation": self.preemption.will_owe_evaluation,
            "order": self.data.memory,
            "layout": {
                "where": self._measured_on,
                **self.planner.facts_of(plan),
                "counted_as_cached": self.planner.num_cached,
                "microbatches": [settled[rank] for rank in plan.ranks_of_stage(0)],
            },
        }

    def add_files(self, checkpoint: Path) -> None:
        """Write what a checkpoint has besides the stock Trainer's files, on rank 0."""
        if self._cut is not None and self._cut.timing is not None:
            self._cut.timing.write(checkpoint)

    @property
    def _measured_on(self) -> dict[str, Any]:
        """On what times were measured, which decide about the plan."""
        timing = self._cut.timing if self._cut is not None else None
        return dict(timing.measured_on) if timing is not None else {}

    def prepare_for_best(self) -> None:
        """The best model is about to be loaded: the last weights are gone after it. Collective over all processes."""
        self.preemption.leave_if_asked()  # what comes may also remove their checkpoint
        refuse_best_model_that_some_lack(self._job)
        self.preemption.moment = Moment.BEST_LOADED
        self._check_cached_weights()
        self.pipeline.use_cache(None)

    def _check_cached_weights(self) -> None:
        """When training ends: a later one may find what the last epoch has put. Collective over all processes."""
        if self.cache is not None and self.pipeline.cache is not None:
            self.cache.check_weights()

    # ------------------------------------------------------------------------------------ the loop's events
    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps and state.epoch % 1 == 0:  # resumed, and no epoch is left
            self.preemption.evaluate_what_is_owed()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.num_epochs_begun += 1
        self.steps.doubts |= Doubt.FLAGS

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.preemption.evaluate_what_is_owed()  # here the random states are those of the checkpoint
        self.preemption.moment = Moment.WITHIN_EPOCH

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.preemption.moment = Moment.BETWEEN_EPOCHS
        self._show_weights()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._show_weights()

    def on_predict(self, *_: Any, **__: Any) -> None:
        self._show_weights()

    def on_save(self, *_: Any, **__: Any) -> None:
        self._show_weights()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        PROGRESS.enter("end")
        self.preemption.leave_if_asked()
        self._check_cached_weights()
        self.log.end(self.cache)
        if self.cache is not None:
            self.cache.close(has_ended=False)  # all have written when the model is whole
        if self._cut is not None:
            self._cut.make_whole()

    def _show_weights(self) -> None:
        """Before other callbacks that may read or exchange them: cached layers' weights may be off the device."""
        if self._steps is not None and self.pipeline.is_placed:
            self.pipeline.weights.onload()
            self._steps.doubts |= Doubt.WEIGHTS | Doubt.FLAGS


def watch_steps(callbacks: Sequence[Any]) -> bool:
    """Whether one of a user's callbacks may read weights at each step, as a running average does."""
    stock = {name: getattr(TrainerCallback, name) for name in STEP_EVENTS}
    # looked up on the object, which may have a method of its own
    return any(
        getattr(getattr(c, n, None), "__func__", None) is not method for c in callbacks for n, method in stock.items()
    )
