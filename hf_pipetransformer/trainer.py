"""`transformers.Trainer` over a pipeline: overrides only, never a copy of its loop.

Overridden methods that are private in transformers (`_wrap_model`, `_save_optimizer_and_scheduler`,
`_load_best_model`, `_track_num_input_tokens`; in `saving.py` `_save_checkpoint`, `_get_output_dir`,
`_push_from_checkpoint`, `_load_from_checkpoint`; in `leaving.py` `_maybe_log_save_evaluate`) call the stock ones, but
for `_load_optimizer_and_scheduler` in `saving.py`; `tests/test_private_api.py` fails by name when one of them changes.

    train                 the Trainer's own loop
      get_train_dataloader    numbered batches, of which this pipeline takes its slice
      create_optimizer        the model is cut here: discovered, planned, placed, as an interrupted job had it
      get_batch_samples       the one safe point: a proposed freeze is carried out; counts the global batch's items
      training_step           what callbacks have frozen or unfrozen; ElasticPipeline.step -> compute_loss on the last
                              stage
      clip_grad_norm_         of the accelerator: the norm over all stages
      evaluate, save          the stock methods, over gathered rows and weights
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from .auto_cache import OTHER_INPUTS, AutoCache, ReadAhead, current_file, node_name, node_shares
from .cache.content_keys import KEYS_NAME, KeyedInputs, KeyingCollator, without_keys
from .errors import UnsupportedModelError
from .freezing.callback import LayerFreezeCallback, refuse_reentrant_checkpointing
from .freezing.policies import FreezePolicy, NeverFreeze, agreed_num_frozen
from .leaving import LeavesAtSigterm
from .model.loss_scaling import EXACT, HALF_PRECISION
from .model.loss_study import raise_for_exchanged_inputs
from .model.micro_batch import Batch, batch_rows, naming_long_rows, select_rows, tensors_in
from .pipeline.agreement import check_same_size
from .pipeline.data import (
    BatchSlice,
    GivenBatches,
    KeysApart,
    NumberedBatches,
    NumberedLoader,
    first_samples,
    refuse_empty,
)
from .pipeline.devices import fits
from .pipeline.elastic_pipeline import ElasticPipeline, Slicing, Transformation, unwrapped
from .pipeline.optimizer_probe import probe_coupling
from .planning.plan import PipelinePlan
from .planning.token_slicing import RowSlices
from .preparation import COST_SAMPLE_ROWS, refuse_distributed_model
from .randomness import generators_kept, seeded
from .rechecks import Rechecks, keeper_of_placeholders, loss_has_changed, raise_for_changed_loss
from .report import events
from .report.run_recorder import RunRecorder, facts_of_run
from .resilience.preemption import StopSignal, WorkerStart
from .resilience.progress import LEFT, PROGRESS, phase
from .resilience.watchdog import Watchdog
from .saving import PipelineState
from .training_args import PipeTransformerTrainingArguments

logger = logging.getLogger(__name__)

CACHE_FOLDER = "_activation_cache"
"""In `output_dir`. What begins so is not pushed to the Hub."""
MOST_SHAPES_TO_TELL = 8
"""Shapes of batches for which the log says how they are cut along their tokens; there may be hundreds."""

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
STOCK_PACKAGES = ("transformers", "hf_pipetransformer")


class PipeTransformerTrainer(LeavesAtSigterm):
    """A [`~transformers.Trainer`] that can cut the model into a pipeline of stages, one per process.

    Takes the same arguments as `Trainer`; `args` is a [`PipeTransformerTrainingArguments`]. Losses, gradients,
    weights, the number of steps and the order of the samples are those of one process that trains with the same
    global batch, `per_device_train_batch_size` x number of processes, whatever the layout.

    While `train()` runs, each process holds the parameters, gradients and optimizer state of its own stage only; the
    other parameters of `trainer.model` are placeholders without values. Before and after it, `trainer.model` is whole.

    With a `freeze_policy` layers are frozen from the bottom up while training goes on, and the others are packed into
    fewer stages; the freed processes become replicas (PipeTransformer, ICML 2021).

    Args:
        freeze_policy: a policy of your own in place of `args.freeze_policy`.

    Raises:
        ValueError: arguments that contradict one another or the processes, on all processes at once.
        UnsupportedModelError: the model has no layers that can be cut.
    """

    def __init__(
        self,
        model: Any = None,
        args: PipeTransformerTrainingArguments | None = None,
        *positional: Any,
        freeze_policy: FreezePolicy | None = None,
        **keywords: Any,
    ) -> None:
        if args is None:
            args = PipeTransformerTrainingArguments(output_dir="tmp_trainer")
        if not isinstance(args, PipeTransformerTrainingArguments):
            raise ValueError(
                f"args is a {type(args).__name__}: a PipeTransformerTrainer needs PipeTransformerTrainingArguments,"
                " which take the same fields."
            )
        if args.uses_pipeline:
            refuse_distributed_model(model)
        super().__init__(model, args, *positional, **keywords)
        self._auto_cache: AutoCache | None = None
        self._evaluated: KeysApart | None = None  # the loader of the evaluation that is under way
        self._met_other_inputs = False  # than those that the cache's keys are of, on some process
        self._doubts_weights = False  # frozen ones, which a callback seems to have changed, on some process
        self._watches_steps = False  # a callback of the user's, on some process
        self._may_flags_have_changed = False  # `requires_grad` of parameters: a callback may have set it
        self._shows_weights = False  # a callback may have got them, and so they are not off the device
        self._epoch_begins = False
        self._epochs_begun = 0
        self._shapes_told = 0
        self._rechecks = Rechecks()
        self._latest_tensors: list[torch.Tensor] = []  # that training_step was called on
        policy = freeze_policy if freeze_policy is not None else args.make_freeze_policy()
        if not isinstance(policy, NeverFreeze):
            strategy: Any = args.freeze_strategy
            self.add_callback(LayerFreezeCallback(policy, strategy, args.freeze_steps, args.max_frozen_layers))
        self._stop_signal = StopSignal()
        self._recorder = RunRecorder(args)
        self._call_callbacks = self.callback_handler.call_event
        self.callback_handler.call_event = self._call_event  # type: ignore[method-assign]
        # first, so that loggers which save the model at the end see all of it; and some take numbers out of the logs
        self.callback_handler.callbacks[:0] = [_Hooks(self), self._recorder, PipelineState()]

    # ------------------------------------------------------------------------------------ life cycle
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if not self._is_stock:
            self.accelerator.even_batches = True  # evaluation: all stages take part in every batch
            # the loop asks the accelerator for clipping and for the logged norm alike
            self.accelerator.clip_grad_norm_ = self._clip_grad_norm_over_stages

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **keywords: Any,
    ) -> TrainOutput:
        self.make_model_whole()  # an earlier train() may have been interrupted
        resume_from_checkpoint = self._checkpoint_to_resume(resume_from_checkpoint)
        is_named = isinstance(resume_from_checkpoint, str) and not self._is_stock
        self._resumed_from = Path(str(resume_from_checkpoint)) if is_named else None
        self._recorder.begin(self.is_world_process_zero())
        has_ended = self._is_preempted = self._has_loaded_best = False
        self._owes_evaluation = self._is_within_epoch = False
        self._last_saved = None
        self._ignore_keys_for_eval = ignore_keys_for_eval
        self._shapes_told = 0
        self._rechecks = Rechecks()
        try:
            with nullcontext() if self._is_stock else self._stop_signal, self._watching():
                output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval, **keywords)
            has_ended = True
            return output
        except UnsupportedModelError as error:
            if self.args.uses_pipeline:
                raise
            raise error.with_one_stage() from error.__cause__
        finally:
            self._recorder.end(has_ended, self.state.global_step)
            if self._auto_cache is not None:
                # what another run cannot use goes; a run that was interrupted will go on with it
                self._auto_cache.close(has_ended)
                self._auto_cache = None
            if self._train_batches is not None:
                self._train_batches.close()  # its workers wait for the next epoch
                self._train_batches = None
            self.is_in_train = False  # the stock Trainer leaves it set after an error
            if not self._is_stock:
                self.model_wrapped = self.model  # as after a stock training in one process

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Inside, the death or hang of one process ends all. Collective over all processes."""
        args, before, step = self.args, PROGRESS.phase, PROGRESS.read().step
        watch: Any = nullcontext()
        # a training inside another's callback is watched by that one
        if args.watchdog_timeout and before == LEFT and not self._is_stock and self._processes.world_size > 1:
            rank, gather = self._processes.rank, self._processes.gather_objects
            watch = Watchdog(
                rank,
                args.local_process_index,
                gather,
                args.watchdog_timeout,
                limit=args.ddp_timeout,
                has_accelerator=args.device.type != "cpu",
            )
        try:
            with watch:
                PROGRESS.enter("start", 0)
                yield
        finally:
            PROGRESS.enter(before, step)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if self._is_stock:
            return super()._wrap_model(model, training, dataloader)
        is_placed = self.pipeline is not None and self.pipeline.is_placed
        if not training and not is_placed:
            return super()._wrap_model(model, training, dataloader)
        if not is_placed:
            if self.optimizer is None:
                raise ValueError(
                    "create_optimizer was overridden and has set no optimizer: let it set self.optimizer, or call"
                    " super().create_optimizer()."
                )
            self._cut_model()  # create_optimizer is the user's own, and has made one over the whole model
        assert self.pipeline is not None
        if training and self.optimizer is not None and not self.pipeline.updates_with(self.optimizer):
            if self.pipeline.num_stages > 1:
                raise ValueError(
                    "create_optimizer was overridden and has replaced the optimizer of super().create_optimizer(),"
                    " which knows the stages: make yours over the whole model and do not call super(), or pass it as"
                    " optimizers=(optimizer, None)."
                )
            self.pipeline.adopt(self.optimizer)
        if training and self.optimizer is not None and self._processes.world_size > 1:
            self.pipeline.optimizer_state.refuse_added()
        return self.pipeline

    # ------------------------------------------------------------------------------------ building the pipeline
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self._is_stock:
            return super().create_optimizer(model) if model is not None else super().create_optimizer()
        if not self.is_in_train:  # over the whole model, as many scripts do; train() cuts it, and adopts the optimizer
            return super().create_optimizer()
        pipeline = self._cut_model()
        if self.optimizer is None:
            with pipeline.weights.as_on_one_process():
                optimizer = super().create_optimizer()
            if pipeline.num_stages > 1:
                self._refuse_coupling(self._coupling_of(optimizer, pipeline))
            pipeline.adopt(optimizer)
        assert self.optimizer is not None
        return self.optimizer

    def _cut_model(self) -> ElasticPipeline:
        """Find out how to cut the model, and place it; an optimizer that there is already is adopted.

        Collective over all processes.
        """
        batches = self._train_batches
        assert batches is not None
        check_same_size(self._processes, batches.dataset)
        rows, collate_fn = [], None
        if self._is_examined:
            rows, collate_fn = batches.sample_rows(COST_SAMPLE_ROWS), batches.collate_fn
        with generators_kept(self, self.model):
            pipeline = self._pipeline_for(rows, collate_fn)
            self._study_loss(pipeline.stack)
            if self.args.slices_tokens:
                windows = self._study_slicing(pipeline, rows)
                pipeline.slicing = Slicing(self.args.token_slices, windows, self._tell_slices)
            times = self._measure_times(pipeline, rows)
        coupling = None
        if self.optimizer is not None and not pipeline.updates_with(self.optimizer):
            coupling = self._coupling_of(self.optimizer, pipeline)
            pipeline.adopt(self.optimizer)
        self._layouts = self._make_layouts(pipeline, times)
        kept = self._recall()
        self._num_cached = self._epochs_begun = 0
        self._met_other_inputs = self._doubts_weights = self._exchanges_inputs = False
        with generators_kept(self, self.model):
            self._auto_cache = self._make_auto_cache(pipeline, times) if self._may_cache else None
        callback = self._freeze_callback
        if callback is not None:
            refuse_reentrant_checkpointing(self.args)
            freezable = pipeline.freezable
            assert freezable is not None
            callback.attach(freezable.num_layers, freezable.max_frozen, self.state)
            self._warn_of_shared_layers(freezable)
        num_frozen = callback.num_frozen if callback is not None else 0
        again = self._plan_of_interrupted_job(kept, num_frozen)
        plan = again or self._layouts.first
        if plan.num_frozen_layers < num_frozen:
            plan = self._plan_after_freezing(plan, num_frozen)
        self._watches_steps = any(self._processes.gather_objects(_watch_steps(self.callback_handler.callbacks)))
        pipeline.parks &= not self._watches_steps
        if plan.pipeline_parallel_size > 1:
            self._refuse_coupling(coupling)
        pipeline.place(plan)
        logger.info("%s", plan)
        facts = facts_of_run(self.model, self.args)
        self._record("resume" if self.state.global_step else "start", plan, facts=facts)
        batches.reslice(plan.data_parallel_size, pipeline.replica_index)
        if plan is again:
            settled = kept["layout"]["microbatches"][pipeline.replica_index]
            pipeline.settle_microbatches({(rows, elements): m for rows, elements, m in settled})
        if kept.get("order") and self.state.epoch % 1:
            batches.keep_order(int(self.state.epoch), **kept["order"])
        if self._auto_cache is not None and plan.num_frozen_layers:
            if self._num_cached:
                self._auto_cache.go_on(self._num_cached)
            self._auto_cache.freeze(plan.num_frozen_layers)
        return pipeline

    def _coupling_of(self, optimizer: torch.optim.Optimizer, pipeline: ElasticPipeline) -> str | None:
        """Why stages cannot divide an optimizer, for a message. Collective over all processes."""
        why = None
        if self.args.uses_pipeline:
            stack = pipeline.stack
            units = {id(stack.table[n]): k for k in reversed(range(stack.num_units)) for n in stack.owners[k]}
            why = probe_coupling(unwrapped(optimizer), units)
        found = next((theirs for theirs in self._processes.gather_objects(why) if theirs is not None), None)
        return None if found is None else f"{type(optimizer).__name__}: {found}"

    def _refuse_coupling(self, coupling: str | None) -> None:
        """
        Raises:
            ValueError: on all processes.
        """
        if coupling is not None:
            self.make_model_whole()
            self.optimizer = None
            raise ValueError(
                f"{coupling}, and each stage of a pipeline has its own parameters only. Choose an optimizer that"
                " updates each parameter by its own gradient, or set pipeline_parallel_size=1."
            )

    def _plan_of_interrupted_job(self, kept: dict[str, Any], num_frozen: int) -> PipelinePlan | None:
        """The one in force when the checkpoint was written, if all that decides about it is as it was.

        Made anew it might be another: how it came about, layer by layer, is not to be seen any more.
        """
        layout = kept.get("layout")
        if layout is None or layout["where"] != self._where:
            return None
        plan = self._layouts.again(layout, num_frozen)
        if plan is not None:
            self._num_cached = layout["counted_as_cached"]
        return plan

    def _plan_after_freezing(self, plan: PipelinePlan, num_frozen: int) -> PipelinePlan:
        return self._layouts.next(plan, num_frozen, self._num_cached)

    @contextmanager
    def _evaluating_with_cache(self, dataloader: DataLoader) -> Iterator[KeysApart]:
        """Inside, an evaluation's batches have keys, too; they count if the weights are those that the cache is of.

        Yields the loader with the keys taken out of its batches.
        """
        cache, pipeline, before = self._auto_cache, self.pipeline, self._evaluated
        base: Any = getattr(dataloader, "base_dataloader", dataloader)
        collate_fn = getattr(base, "collate_fn", None)
        loader = self._evaluated = dataloader if isinstance(dataloader, KeysApart) else KeysApart(dataloader)
        with ExitStack() as stack:
            stack.callback(setattr, self, "_evaluated", before)
            if cache is not None:
                stack.enter_context(cache.cache.counting_apart())
                # also before the first layers freeze: workers that last keep the collator that they began with
                if isinstance(base, DataLoader) and not isinstance(collate_fn, KeyingCollator):
                    base.collate_fn = self._keying_collator(collate_fn)
                    stack.callback(setattr, base, "collate_fn", collate_fn)
            if cache is not None and pipeline is not None and pipeline.cache is not None and not cache.weights_hold():
                pipeline.use_cache(None)  # they are averaged ones, for one
                stack.callback(lambda: pipeline.use_cache(cache.cache if cache.is_on else None))
            yield loader

    # ------------------------------------------------------------------------------------ data
    def get_train_dataloader(self) -> DataLoader:
        if self._is_stock:
            return super().get_train_dataloader()
        refuse_empty(self.train_dataset)
        stock = super().get_train_dataloader()
        # taken apart: the stock method has chosen columns, collator and (seedable) sampler
        dataset = stock.dataset
        is_iterable = isinstance(dataset, IterableDataset)
        if is_iterable:
            dataset = _whole_stream(dataset)
        args = self.args
        nodes: list[str] = []  # of each rank
        if self._may_cache:
            nodes = self._processes.gather_objects(node_name())
            # processes share it, even if each was given a temporary output_dir of its own
            output_dir = self._processes.gather_objects(args.output_dir or ".")[0]
            folder = args.activation_cache_dir or os.path.join(output_dir, CACHE_FOLDER)
            self._current_generations = current_file(folder, output_dir, nodes)
        self._train_batches = NumberedBatches(
            dataset,
            None if is_iterable else _sampler_of(stock),
            stock.collate_fn,
            self._train_batch_size * args.world_size,
            drop_last=args.dataloader_drop_last,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            keyed=self._keying_collator if self._may_cache else None,
            node_shares=node_shares(nodes) if self._may_cache else (1,),
            agree=self._same_order,
            # several processes have drawn different numbers, and the order is to be that of any layout
            draws_as_stock=args.world_size == 1,
            num_workers=args.dataloader_num_workers,
            pin_memory=stock.pin_memory,
            worker_init_fn=WorkerStart(stock.worker_init_fn),
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=stock.multiprocessing_context,
        )
        return NumberedLoader(self._train_batches)

    def set_initial_training_values(self, args: Any, dataloader: Any, *positional: Any, **keywords: Any) -> Any:
        """Here the Trainer shows the training loader first, before the model is cut.

        Raises:
            ValueError: it is one of the user's own, and there are several processes or stages, or layers freeze.
        """
        if not self._is_stock and self._train_batches is None:
            if self._processes.world_size > 1 or self.args.uses_pipeline or self._freeze_callback is not None:
                raise ValueError(
                    "The training loader was not made by PipeTransformerTrainer.get_train_dataloader, so it cannot be"
                    " divided among pipelines, nor its samples be found again when layers freeze. Pass train_dataset"
                    " and data_collator (or override _get_train_sampler) instead of overriding get_train_dataloader."
                )
            sample = partial(self._rows_of_loader, dataloader)
            self._train_batches = GivenBatches(getattr(dataloader, "dataset", None), sample)
        return super().set_initial_training_values(args, dataloader, *positional, **keywords)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        loader: Any = super().get_eval_dataloader(eval_dataset)
        self._set_workers_apart(loader)
        # workers that last keep the collator that they began with: whoever iterates is to see no keys
        keeps_keys = not self._is_stock and self._may_cache and self.args.dataloader_persistent_workers
        kept_apart: Any = KeysApart(loader)  # as good as the loader itself
        return kept_apart if keeps_keys else loader

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        loader = super().get_test_dataloader(test_dataset)
        self._set_workers_apart(loader)
        return loader

    def _set_workers_apart(self, loader: Any) -> None:
        base = getattr(loader, "base_dataloader", loader)
        if not self._is_stock and isinstance(base, DataLoader) and not isinstance(base.worker_init_fn, WorkerStart):
            base.worker_init_fn = WorkerStart(base.worker_init_fn)

    def _keying_collator(self, collate_fn: Any) -> KeyingCollator:
        return KeyingCollator(collate_fn, ReadAhead(self._current_generations), self._not_in_keys)

    def _same_order(self, order: list[int]) -> list[int]:
        """Rank 0's order: a sampler may draw what it likes."""
        if self._mesh is None or self._mesh.world_size == 1:
            return order
        return self._mesh.broadcast_tensor(torch.tensor(order, dtype=torch.int64), source=0).tolist()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        if self.state.global_step >= self.state.max_steps:
            # resumed behind the last step, inside an epoch: the stock loop would do another one
            self.control.should_training_stop = True
            self._ask_for_what_is_owed()  # at the epoch's end
            return [], 1
        if self._is_stock:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        assert self._train_batches is not None and self.pipeline is not None
        PROGRESS.enter("adapt", self.state.global_step)
        with self._recorder.doing("adapting"):
            self._adapt()
        PROGRESS.enter("data")
        batches: list[Any] = []
        self._slices.clear()
        self._latest_tensors = []
        items: int | float = 0
        self._num_rows = 0
        for _ in range(num_batches):
            PROGRESS.tick()
            try:
                batch = next(epoch_iterator)
            except StopIteration:
                break
            batches.append(batch)
            given = self._train_batches
            last = given.slice_of(batch) if isinstance(given, GivenBatches) else given.last_slice
            last = replace(last, items=self._reduction.count(batch) if last.rows else 0)
            self._slices.append(last)
            self._num_rows += last.global_rows
            items += last.items
        # every pipeline once; where it is the only one, its first stage's number comes with the batch
        mine = items if self.pipeline.stage_index == 0 else 0
        dtype = torch.float64 if self._reduction.items == "total" else torch.int64
        total = torch.tensor([mine], dtype=dtype).to(self.args.device)
        if self.pipeline.num_replicas > 1:
            dist.all_reduce(total)
        elif self.pipeline.num_stages > 1:
            total[0] = items
        self._num_items = total.item() or 1
        PROGRESS.enter("callbacks")
        return batches, self._num_items

    # ------------------------------------------------------------------------------------ transformation
    def _adapt(self) -> None:
        """The one safe point: no gradient is alive, no batch is under way. Collective where a decision is made."""
        callback, pipeline, cache = self._freeze_callback, self.pipeline, self._auto_cache
        assert pipeline is not None and self._train_batches is not None
        if cache is not None:
            self._look_at_cache(cache)
        plan = pipeline.current_plan
        num_frozen = plan.num_frozen_layers
        proposal = callback.take_proposal() if callback is not None else None
        if proposal is not None:
            num_frozen = max(num_frozen, agreed_num_frozen(pipeline.mesh.gather_objects(proposal)))
        if cache is not None and num_frozen > plan.num_frozen_layers:
            cache.check_weights()  # as they are now they will be the next generation's
        num_cached = cache.num_cached if cache is not None else 0
        if (num_frozen, num_cached) != (plan.num_frozen_layers, self._num_cached):
            self._num_cached = num_cached
            new = self._plan_after_freezing(plan, num_frozen)
            if num_frozen == plan.num_frozen_layers and new.pipeline_parallel_size == plan.pipeline_parallel_size == 1:
                pipeline.plan = new  # the same work at the same place, or none
                self._record("cache", new)
            else:
                change = pipeline.transform(new)
                self._train_batches.reslice(pipeline.num_replicas, pipeline.replica_index)
                self._tell(change)
            if cache is not None:
                cache.freeze(num_frozen)
            pipeline.park_cached_layers()
        if proposal is not None:
            assert callback is not None
            callback.confirm(num_frozen)

    def _look_at_cache(self, cache: AutoCache) -> None:
        if self._met_other_inputs:
            self._met_other_inputs = False
            cache.give_up(OTHER_INPUTS)
        may_have_changed = self._doubts_weights or self._shows_weights
        self._doubts_weights = self._shows_weights = False
        if not self._epoch_begins:
            if may_have_changed:
                cache.check_weights()
            cache.begin_step()
            return
        self._epoch_begins = False
        self._epochs_begun += 1
        done = self.state.epoch or 0.0
        epochs_left = self.state.num_train_epochs - 1 - math.floor(done + 1e-6)
        # a stream may never come to its beginning again: what it gives is put from its second epoch on
        batches = self._train_batches
        repeats = batches is not None and (self._epochs_begun > 1 or not batches.may_never_repeat)
        # a stream without a length has no part of an epoch: there the Trainer counts by its steps
        is_whole = self._epochs_begun > 1 or abs(done - round(done)) < 1e-6
        report = cache.begin_epoch(epochs_left >= 1 and repeats, is_whole)
        if report is not None:
            self.log(events.cache_metrics(report.counts, report.nbytes))

    def _tell(self, change: Transformation) -> None:
        """One line in the log, one record in the run's file, and metrics for whoever logs."""
        self._shapes_told = 0
        assert self.pipeline is not None
        everyone = self.pipeline.mesh.gather_objects((dict(change.seconds), change.bytes_moved))
        phases = {phase: max(seconds[phase] for seconds, _ in everyone) for phase in change.seconds}
        total = max(sum(seconds.values()) for seconds, _ in everyone)
        moved = sum(count for _, count in everyone)
        if self.is_world_process_zero():
            logger.info("%s", events.describe(change, total, moved))
        self._record("transform", change.after, seconds=total, bytes_moved=moved, phases=phases)
        layout = events.layout_of(change.after)
        numbers = {key: value for key, value in layout.items() if isinstance(value, int)}
        self.log({**numbers, "transform_seconds": total, "transform_bytes": moved})

    def _tell_slices(self, parts: Sequence[RowSlices], seconds: float | None) -> None:
        """On the main process alone: a line in the log and a record for each of the first shapes."""
        if not self.is_world_process_zero() or self._shapes_told == MOST_SHAPES_TO_TELL:
            return
        self._shapes_told += 1
        logger.info("%s", events.describe_slices(parts, seconds))
        assert self.pipeline is not None
        events.record(
            self.args.output_dir or ".",
            events.SLICES,
            self.pipeline.current_plan,
            self.state.global_step,
            self.state.epoch or 0.0,
            run=self._recorder.run,
            slices=events.slices_of(parts, seconds),
        )

    def _record(self, event: str, plan: PipelinePlan, **measured: Any) -> None:
        """An event in the run's file, and how the layout before it did. Collective over all processes."""
        self._record_usage()
        if self.is_world_process_zero():
            folder, step, epoch = self.args.output_dir or ".", self.state.global_step, self.state.epoch or 0.0
            events.record(folder, event, plan, step, epoch, run=self._recorder.run, **measured)

    def _record_usage(self) -> None:
        """Collective over all processes."""
        everyone = self._processes.gather_objects(self._recorder.take_usage())
        self._recorder.record_usage(everyone, self.state.global_step)

    def _end_records(self) -> None:
        """What is only known when the last step is done. Collective over all processes."""
        if self._is_stock:
            return
        self._record_usage()
        cache = self._auto_cache
        if cache is not None and cache.reason_off is not None:
            self._recorder.record_cache_off(cache.reason_off, self.state.global_step)
        elif cache is not None:
            report = cache.look_back()
            if report.counts.rows:
                self._recorder.record_log(events.cache_metrics(report.counts, report.nbytes), self.state)

    # ------------------------------------------------------------------------------------ steps
    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        if self._is_stock:
            return super().training_step(model, inputs, num_items_in_batch)
        pipeline = self.pipeline
        assert pipeline is not None
        PROGRESS.enter("step")
        self._follow_flags()
        is_rechecked = pipeline.num_stages > 1 and self._rechecks.is_due(
            self.state.global_step, self.state.epoch or 0.0
        )
        if is_rechecked:
            self._refuse_copied_placeholders(pipeline)
        pipeline.train()
        switch = getattr(self.optimizer, "train", None)  # of schedule-free optimizers
        if callable(switch):
            switch()
        tensors = list(tensors_in(inputs))
        # as for sharpness-aware minimisation, or adversarial weights; one tensor may be in all batches
        latest = {id(tensor) for tensor in self._latest_tensors}
        is_again = bool(tensors) and all(id(tensor) in latest for tensor in tensors)
        if (is_again and pipeline.num_stages > 1) or (not is_again and not self._slices):
            raise ValueError(
                "training_step was called twice for one batch (for sharpness-aware minimisation, or adversarial"
                " weights?), and each stage of a pipeline sees its own parameters and gradients only. Set"
                " pipeline_parallel_size=1, and pass the same tensors again."
            )
        if not is_again:
            self._slice, self._latest_tensors = self._slices.popleft(), tensors
        if self.accelerator.scaler is not None:
            # a scaler is set up by its first use, and the stages without the loss would not use it
            self.accelerator.scaler.scale(torch.zeros((), device=self.args.device))
        # a callback may have changed frozen weights since the last step: then what is in the store is no longer theirs
        doubts_weights = (
            self._watches_steps and self._auto_cache is not None and not self._auto_cache.weights_look_same()
        )
        keys = self._slice.keys if self._slice.rows and pipeline.cache is not None else None
        if keys is not None and doubts_weights:
            keys = without_keys(keys)  # other stages may have no doubt
        batch = self._prepare_keyed(inputs, keys, self._slice.keyed)
        met_other_inputs = keys is not None and batch[KEYS_NAME] is not keys
        if pipeline.num_stages > 1:
            batch = self._share_batch(pipeline, batch)
            met_other_inputs &= self._is_first_stage
            if doubts_weights and KEYS_NAME in batch:
                batch[KEYS_NAME] = without_keys(batch[KEYS_NAME])
        self._items_scale = self._items_scale_of(batch)
        with naming_long_rows(self.model, batch):
            pipeline.prepare(batch)
            self._micro_losses.clear()
            with _as_the_user_raised_it():
                received = pipeline.step(batch, keeps_received=is_rechecked)
        loss_found = self._recheck_loss(pipeline, batch, received) if received else None
        self._recorder.count_rows(self._slice.global_rows, len(self._micro_losses))
        empty_every = self.args.torch_empty_cache_steps
        if empty_every is not None and self.state.global_step % empty_every == 0:
            clear_device_cache()
        # the loss of the global batch, the same on every process
        loss = (
            torch.stack(self._micro_losses).sum() if self._micro_losses else torch.zeros((), device=self.args.device)
        )
        self._is_preempted = self._stop_signal.is_asked
        if pipeline.cache is not None:
            met_other_inputs |= pipeline.cache.met_other_inputs
        if pipeline.mesh.world_size > 1:
            PROGRESS.enter("all-reduce")
            loss = loss.float()
            flags_changed = pipeline.weights.flags_changed
            mine = (
                self._is_preempted,
                met_other_inputs,
                doubts_weights,
                self._exchanges_inputs,
                flags_changed,
                loss_found is not None,
            )
            together = torch.stack([loss, *(loss.new_full((), float(vote)) for vote in mine)])
            dist.all_reduce(together)
            loss = together[0]
            votes = (together[1:] > 0).tolist()
            self._is_preempted, met_other_inputs, doubts_weights, exchanges_inputs, flags_changed, is_other_loss = (
                votes
            )
            if exchanges_inputs:
                raise_for_exchanged_inputs(self.model)
            if is_other_loss:
                found = next(filter(None, pipeline.mesh.gather_objects(loss_found)))
                raise_for_changed_loss(self.model, self.state.global_step + 1, found)
            if flags_changed:
                raise ValueError(
                    "requires_grad of parameters was changed by something else than a callback (in compute_loss,"
                    " training_step or another method): where several processes train one model, all have to know of"
                    " it before the step. Change it in a TrainerCallback, at on_step_begin for one."
                )
        self._met_other_inputs |= met_other_inputs
        self._doubts_weights |= doubts_weights
        PROGRESS.enter("callbacks")
        return loss

    def _recheck_loss(
        self, pipeline: ElasticPipeline, batch: Batch, received: Sequence[Sequence[torch.Tensor]]
    ) -> str | None:
        """On a last stage, after a step: what speaks against adding up the parts' losses. Not collective."""
        if len(received) < 2 or self._loss_is_random or self._reduction.kind == "whole" or not self._slice.rows:
            return None
        items = self._num_items / self._items_scale

        def part_of_loss(model: nn.Module, part: Batch) -> torch.Tensor:
            return self._part_of_loss(model, part, items, self._share_of(part))

        is_exact = self._computes_exactly and self.accelerator.mixed_precision == "no"
        tolerance = EXACT if is_exact else HALF_PRECISION
        return loss_has_changed(pipeline, batch, received, part_of_loss, (self,), tolerance)

    def _refuse_copied_placeholders(self, pipeline: ElasticPipeline) -> None:
        """Collective over all processes.

        Raises:
            ValueError: a callback, or this trainer, keeps copies of parameters that are not here.
        """
        theirs = [callback for callback in self.callback_handler.callbacks if _is_of_user(callback)]
        mine = keeper_of_placeholders([*theirs, self], pipeline.model, list(pipeline.missing_parameters.values()))
        name = next(filter(None, pipeline.mesh.gather_objects(mine)), None)
        if name is not None:
            raise ValueError(
                f"{name} keeps copies of the model's parameters (a running average, for one), and each of"
                f" the {pipeline.num_stages} stages of the pipeline has its own parameters only; the others are NaN"
                " while it trains. Average saved checkpoints instead, or set pipeline_parallel_size=1."
            )

    def _share_batch(self, pipeline: ElasticPipeline, batch: Batch) -> Batch:
        """What the first stage has prepared and counted, on all stages of its pipeline.

        Each has prepared its own, and what a collator or `_prepare_inputs` draws need not be the same on two.
        """
        mine = (batch, self._slice.rows, self._slice.global_rows, self._slice.items, self._num_items)
        batch, rows, global_rows, items, self._num_items = pipeline.share(mine)
        self._slice = BatchSlice(rows, global_rows, items=items)
        return batch

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *positional: Any, **keywords: Any) -> Any:
        if not self._is_stock and self.args.average_tokens_across_devices:
            # set after the arguments were made, which unset it: items are counted over all processes already
            self.args.average_tokens_across_devices = False
            logger.warning("average_tokens_across_devices=True has no effect: a loss is that of the global batch.")
        return super().compute_loss(model, inputs, *positional, **keywords)

    def _follow_flags(self) -> None:
        """Train what the user's callbacks have made trainable since the last step, and not what they have frozen.

        Collective over all processes where a callback may have done so: only the processes that hold a parameter
        can tell.
        """
        pipeline = self.pipeline
        assert pipeline is not None
        has_changed = pipeline.weights.flags_changed
        if pipeline.mesh.world_size > 1:
            may_have_changed = self._watches_steps or self._may_flags_have_changed
            has_changed = may_have_changed and pipeline.mesh.any(has_changed)
        self._may_flags_have_changed = False
        if has_changed:
            pipeline.follow_flags()

    def _prepare_keyed(
        self, inputs: Mapping[str, Any], keys: torch.Tensor | None, keyed: KeyedInputs | None = None
    ) -> Batch:
        """What `_prepare_inputs` makes of a batch, with its rows' keys if it is still what they are keys of.

        Args:
            inputs: as they come here; a user's methods may have seen them.
            keys: of the rows; None: they have none, or nobody asks.
            keyed: the inputs as the collator has returned them, if they may be others by now.
        """
        are_same = keyed is None or keyed.are(inputs, self._not_in_keys)
        moved = super()._prepare_inputs(inputs)  # type: ignore[arg-type]  # the stock one: to the device, no more
        given = KeyedInputs(moved)
        batch = dict(self._prepare_inputs(moved))
        if keys is not None:
            are_same = are_same and given.are(batch, self._not_in_keys)
            batch[KEYS_NAME] = keys if are_same else without_keys(keys)
        return batch

    def _clip_grad_norm_over_stages(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        if norm_type != 2:
            raise ValueError(f"norm_type={norm_type}: gradients are clipped by their 2-norm over all stages.")
        assert self.pipeline is not None
        callback = self._freeze_callback
        if callback is not None and callback.wants_gradient_norms:
            callback.observe(self.pipeline.squared_gradient_norms(self._loss_scale))
        unscale = self.accelerator.unscale_gradients if self.accelerator.scaler is not None else None
        with phase("update"):
            return self.pipeline.clip_grad_norm(max_norm, unscale, self._loss_scale)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        counts = self._is_stock or self.pipeline is None or not self.pipeline.is_placed
        # all stages of a pipeline see the same rows: one of them counts
        return super().floating_point_ops(inputs) if counts or self._is_first_stage else 0

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        if not self._is_stock and not self._is_first_stage:
            inputs = {k: v[:0] for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
        super()._track_num_input_tokens(inputs)

    @property
    def _is_first_stage(self) -> bool:
        return self.pipeline is not None and self.pipeline.stage_index == 0

    # ------------------------------------------------------------------------------------ evaluation
    def evaluation_loop(self, dataloader: DataLoader, *positional: Any, **keywords: Any) -> EvalLoopOutput:
        stock: Any = super().evaluation_loop
        if self._is_stock:
            return stock(dataloader, *positional, **keywords)
        if self.pipeline is not None and self.pipeline.is_placed:
            with phase("evaluation"), self._evaluating_with_cache(dataloader) as loader:
                return stock(loader, *positional, **keywords)
        dataset = getattr(dataloader, "dataset", None)  # a loader of the user's own may be any iterable
        if dataset is not None:
            check_same_size(self._processes, dataset)
        if not self.args.uses_pipeline:
            return stock(KeysApart(dataloader), *positional, **keywords)
        pipeline = self._pipeline_for(*self._rows_of_loader(dataloader))
        pipeline.place(self._make_layouts(pipeline).first, keep_weights_aside=True)
        try:
            # its workers may have begun under the cache
            return stock(KeysApart(dataloader), *positional, **keywords)
        finally:
            pipeline.put_back()

    def _rows_of_loader(self, dataloader: Any) -> tuple[list[Any], Any]:
        """Samples to find the model's units on, and what collates them.

        Raises:
            ValueError: they can only be had by taking them away from the evaluation, or training.
        """
        dataset, collate_fn = getattr(dataloader, "dataset", None), getattr(dataloader, "collate_fn", None)
        with seeded(self.args.seed), generators_kept(dataloader, dataset):
            if dataset is not None and collate_fn is not None:
                if isinstance(dataset, IterableDataset):
                    dataset = _whole_stream(dataset)
                return first_samples(dataset, COST_SAMPLE_ROWS), collate_fn
            batches = iter(dataloader)
            if batches is dataloader:
                raise ValueError(
                    f"The loader ({type(dataloader).__name__}) has no dataset and can be read once only, so there is"
                    " no sample to find the model's layers or loss on: return a DataLoader or a list of batches from"
                    " get_train_dataloader and get_eval_dataloader (or call train() before evaluate())."
                )
            batch = next(batches)
        rows = batch_rows(batch)
        return [row % rows for row in range(COST_SAMPLE_ROWS)], partial(select_rows, batch)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        stock = partial(super().prediction_step, prediction_loss_only=prediction_loss_only, ignore_keys=ignore_keys)
        pipeline = self.pipeline
        if self._is_stock or pipeline is None or not pipeline.is_placed:
            with naming_long_rows(self.model, inputs):
                return stock(model, inputs)
        assert pipeline.stage is not None
        keys = self._evaluated.keys_of(inputs) if self._evaluated is not None and pipeline.cache is not None else None
        with phase("prediction"):
            if pipeline.num_stages > 1:
                move: Any = super()._prepare_inputs  # the stock one: to the device, no more

                def head(batch: Batch) -> Any:
                    with self._handing_on_prepared(batch):
                        return stock(self.model, batch)

                return pipeline.predict(self._prepare_keyed(inputs, keys), move, head)
            with naming_long_rows(self.model, inputs):
                if keys is None:
                    return stock(self.model, inputs)
                # `stock` prepares them: here they only go to the device
                moved = {**super()._prepare_inputs(inputs), KEYS_NAME: keys}
                with pipeline.stage.running_to_the_end([], moved) as batch:
                    return stock(self.model, batch)

    @contextmanager
    def _handing_on_prepared(self, batch: Batch) -> Iterator[None]:
        """Inside, `_prepare_inputs` returns this batch as it is: whose rows they are has prepared them."""
        before, prepare = vars(self).get("_prepare_inputs"), self._prepare_inputs
        vars(self)["_prepare_inputs"] = lambda inputs: inputs if inputs is batch else prepare(inputs)
        try:
            yield
        finally:
            del vars(self)["_prepare_inputs"]
            if before is not None:
                vars(self)["_prepare_inputs"] = before

    # ------------------------------------------------------------------------------------ saving and loading
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, so that `from_pretrained` loads it. Only the main process writes.

        Collective over all processes while training runs (in a callback): the weights are gathered from the stages.
        Before and after it the main process may call it alone, as under the stock Trainer.
        """
        if self.pipeline is None or not self.pipeline.is_placed:
            return super().save_model(output_dir, _internal_call)
        self.pipeline.synchronise_buffers()
        with self.pipeline.weights.gathered(self.pipeline.holders()), self._keeping_errors():
            super().save_model(output_dir, _internal_call)
        self._is_collected = self.args.save_only_model and not self.state.best_global_step  # else a barrier comes

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.pipeline is None or not self.pipeline.is_placed:
            return super()._save_optimizer_and_scheduler(output_dir)
        with self.pipeline.optimizer_state.gathered(self.pipeline.holders()), self._keeping_errors():
            super()._save_optimizer_and_scheduler(output_dir)
        self._is_collected = True

    def _load_best_model(self) -> None:
        if self.pipeline is None or not self.pipeline.is_placed:
            return super()._load_best_model()
        self._leave_if_asked()  # what comes replaces the last weights, and may remove their checkpoint
        self._refuse_best_model_that_some_lack()
        self._has_loaded_best = True
        self._check_cached_weights()
        self.pipeline.use_cache(None)
        best = str(self.state.best_model_checkpoint)
        # loading a sharded checkpoint looks at the model's keys
        with self.pipeline.weights.listing_placeholders(), self._translating_names(best):
            return super()._load_best_model()

    def _check_cached_weights(self) -> None:
        """When training ends: a later one may find what the last epoch has put. Collective over all processes."""
        if self._auto_cache is not None and self.pipeline is not None and self.pipeline.cache is not None:
            self._auto_cache.check_weights()

    def _call_event(self, *positional: Any, **keywords: Any) -> Any:
        """The callback handler's own, with a sentence for what cannot be done with a part of the weights.

        Raises:
            ValueError: a callback has written to parameters that other stages hold.
        """
        try:
            return self._call_callbacks(*positional, **keywords)
        except RuntimeError as error:
            pipeline = self.pipeline
            if WRITTEN_TO_PLACEHOLDER not in str(error) or pipeline is None or not pipeline.is_placed:
                raise
            raise ValueError(
                f"A callback has written to parameters of the model, and each of the {pipeline.num_stages} stages of"
                " the pipeline has its own parameters only: change weights before or after train(), or set"
                f" pipeline_parallel_size=1. It failed with {error}"
            ) from error

    def _show_weights(self) -> None:
        """Before other callbacks that may read or exchange them: cached layers' weights may be off the device."""
        if self.pipeline is not None and self.pipeline.is_placed:
            self.pipeline.weights.unpark()
            self._shows_weights = self._may_flags_have_changed = True

    def make_model_whole(self) -> None:
        """Bring all weights back into `trainer.model` on every process. Collective; done when `train()` ends.

        They go to the device if they fit, else to the CPU.
        """
        if self.pipeline is not None and self.pipeline.is_placed:
            size = sum(p.nbytes for p in self.model.parameters())
            self.pipeline.gather(self.args.device if fits(size, self.args.device) else torch.device("cpu"))


class _Hooks(TrainerCallback):
    def __init__(self, trainer: PipeTransformerTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step >= state.max_steps and state.epoch % 1 == 0:  # resumed, and no epoch is left
            self._trainer._evaluate_what_is_owed()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._epoch_begins = self._trainer._may_flags_have_changed = True

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._trainer._evaluate_what_is_owed()  # here the random states are those of the checkpoint
        self._trainer._is_within_epoch = True

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._trainer._is_within_epoch = False
        self._trainer._show_weights()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._trainer._show_weights()

    def on_predict(self, *_: Any, **__: Any) -> None:
        self._trainer._show_weights()

    def on_save(self, *_: Any, **__: Any) -> None:
        self._trainer._show_weights()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        PROGRESS.enter("end")
        self._trainer._leave_if_asked()
        self._trainer._check_cached_weights()
        self._trainer._end_records()
        if self._trainer._auto_cache is not None:
            self._trainer._auto_cache.close(has_ended=False)  # all have written when the model is whole
        self._trainer.make_model_whole()


def _watch_steps(callbacks: Sequence[Any]) -> bool:
    """Whether a callback of the user's may read weights at each step, as a running average does."""
    theirs = [c for c in callbacks if _is_of_user(c)]
    stock = {name: getattr(TrainerCallback, name) for name in STEP_EVENTS}
    # looked up on the object, which may have a method of its own
    return any(
        getattr(getattr(c, n, None), "__func__", None) is not method for c in theirs for n, method in stock.items()
    )


@contextmanager
def _as_the_user_raised_it() -> Iterator[None]:
    """Inside, an error that torch's schedule has wrapped into another one comes out as it was, if it is a sentence."""
    inner: ValueError | None = None
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error.__cause__, ValueError):
            raise
        inner = error.__cause__
    if inner is not None:
        raise inner


def _is_of_user(callback: Any) -> bool:
    return type(callback).__module__.partition(".")[0] not in STOCK_PACKAGES


def _whole_stream(dataset: Any) -> Any:
    """The user's stream, below the shard that Accelerate may have made of it."""
    return dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset


def _sampler_of(loader: DataLoader) -> Any:
    """The sampler over all samples, below the batch samplers that Accelerate has put around it for its processes."""
    batch_sampler: Any = loader.batch_sampler
    while hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler.sampler
