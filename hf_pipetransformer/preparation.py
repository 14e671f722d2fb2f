"""What a `PipeTransformerTrainer` finds out before its first step: what the model is made of, and what its parts cost.

On a few rows of the data, with the user's own collator and loss:

_pipeline_for         the units that the model can be cut into; weights alike on all processes
_study_loss           how the loss of a batch is made of those of its parts
_study_slicing        whether the model can be cut along its tokens
_measure_times        seconds of each unit, where they decide something
_make_layouts         the plans that follow from all of that
_make_auto_cache      what may be cached
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from .auto_cache import AutoCache
from .cache.cache_probe import probe_boundaries, varied_samples
from .cache.content_keys import NOT_IN_KEYS, KeyedInputs, named_inputs
from .errors import UnsupportedModelError, is_out_of_memory
from .freezing.callback import LayerFreezeCallback
from .layouts import MOST_ROWS_TO_TIME, Layouts, time_parts
from .model.frozen_prefix import FreezableLayers
from .model.ghosts import evaluation_mode
from .model.kv_slices import SliceCache, Windows
from .model.layer_stack import LayerStack, refuse_batch_statistics
from .model.left_as_found import left_as_found
from .model.loss_scaling import (
    EXACT,
    HALF_PRECISION,
    IGNORED,
    LossReduction,
    label_variants,
    unexamined,
)
from .model.loss_study import raise_for_exchanged_inputs, study_loss
from .model.micro_batch import Batch, batch_rows, naming_long_rows, on_device, slice_rows
from .model.slicing_study import study_slicing, telling_rows, without_autocast
from .model.token_slices import sequence_length
from .pipeline.agreement import check_same_everywhere
from .pipeline.data import BatchSlice, GivenBatches, NumberedBatches
from .pipeline.devices import fits, name_of_device
from .pipeline.elastic_pipeline import ElasticPipeline
from .pipeline.mesh import ProcessMesh
from .pipeline.stage import StageModule
from .pipeline.state import synchronise_buffers, synchronise_weights
from .planning.costs import UnitCost, cost_of_whole, measure_costs
from .planning.plan import PipelinePlan
from .planning.unit_times import ModelTimes
from .randomness import generators_kept, seeded
from .training_args import CACHE_DTYPES, PipeTransformerTrainingArguments

logger = logging.getLogger(__name__)

TIMES = "part_times.json"
"""In a checkpoint: what the model's parts took when the training began."""
SAMPLE_ROWS = 2
"""Rows on which the model's units are found."""
LOSS_SAMPLE_ROWS = 4
"""Rows on which the loss's reduction is found, at most."""
ROWS_APART = 1
"""Short rows, and as many long ones, that tell whether a loss depends on padding."""
COST_SAMPLE_ROWS = 16
"""Rows among which the longest one says how long the rows are on which the units' costs are counted, at most."""
SAMPLES_TO_CHOOSE_FROM = 32
"""Samples among which those of different classes are chosen for the loss."""
SAMPLES_TO_PROBE = 32
"""Samples among which those are chosen on which it is tried whether frozen layers can be cached."""
UNKNOWN_SIZE = 2**20
"""Samples that are expected of a stream."""


class PipelinePreparation(Trainer):
    """The part of [`PipeTransformerTrainer`] that takes the model apart, and weighs the losses of a batch's parts."""

    args: PipeTransformerTrainingArguments
    model: nn.Module
    pipeline: ElasticPipeline | None = None

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        super().__init__(*positional, **keywords)
        self._mesh: ProcessMesh | None = None
        self._train_batches: NumberedBatches | GivenBatches | None = None
        self._current_generations = Path()  # the file that names what is read from the cache
        self._timed: tuple[ElasticPipeline, ModelTimes | None, dict[str, Any]] | None = None  # and on what
        self._unit_costs: tuple[UnitCost, ...] = ()
        self._resumed_from: Path | None = None
        self._reduction = LossReduction("mean", "rows")
        self._loss_is_random = False
        self._num_items: int | float = 1
        self._items_scale = 1.0  # items of a batch as collated, over those in what _prepare_inputs made of it
        self._num_rows = 1  # of the batch of an optimizer step, over all replicas
        self._slices: deque[BatchSlice] = deque()
        self._slice = BatchSlice(0, 0)
        self._micro_losses: list[torch.Tensor] = []
        self._exchanges_inputs = False  # compute_loss, for the last stage alone

    @property
    def _is_stock(self) -> bool:
        """One stage, and something else distributes the model: everything is left to `transformers.Trainer`."""
        return self.args.leaves_model_to_trainer or self.is_fsdp_enabled or self.is_deepspeed_enabled

    @property
    def _processes(self) -> ProcessMesh:
        """Made when first asked for, by all processes."""
        if self._mesh is None:
            self._mesh = ProcessMesh(timedelta(seconds=self.args.ddp_timeout))
        return self._mesh

    @property
    def _freeze_callback(self) -> LayerFreezeCallback | None:
        """Looked up anew each time: resuming replaces callback objects."""
        return next((c for c in self.callback_handler.callbacks if isinstance(c, LayerFreezeCallback)), None)

    @property
    def _may_cache(self) -> bool:
        # what is found in time for the next epoch depends on the writer's speed, and states differ by rounding
        wanted = self.args.activation_cache == "on" or (
            self.args.activation_cache == "auto" and not self.args.full_determinism
        )
        return wanted and self._freeze_callback is not None and not self.args.slices_tokens

    @property
    def _not_in_keys(self) -> frozenset[str]:
        """Inputs that frozen layers do not read, as far as names tell; the cache's examination tries it."""
        return NOT_IN_KEYS | frozenset(self.label_names or ())

    @property
    def _has_exact_weights(self) -> bool:
        return all(p.dtype in (torch.float32, torch.float64) for p in self.model.parameters())

    # ------------------------------------------------------------------------------------ the model
    def _pipeline_for(self, rows: list[Any], collate_fn: Any) -> ElasticPipeline:
        """The pipeline of the current model, found on a few rows of data the first time."""
        pipeline = self.pipeline
        if (
            pipeline is None
            or pipeline.model is not self.model
            # made for an evaluation, or an earlier training, before a freeze callback was added or stages asked for
            or (pipeline.freezable is None and self._freeze_callback is not None)
            or (not pipeline.stack.units and self.args.uses_pipeline)
        ):
            if pipeline is not None:
                pipeline.release_optimizer()  # which may go on with the new one
            pipeline = self.pipeline = self._build_pipeline(rows, collate_fn)
        return pipeline

    def _build_pipeline(self, rows: list[Any], collate_fn: Any) -> ElasticPipeline:
        mesh = self._processes
        if self.args.uses_pipeline:
            refuse_distributed_model(self.model)  # model_init may have made it
        if fits(sum(p.nbytes for p in self.model.parameters()), self.args.device):
            self.model.to(self.args.device)  # some kernels run there only
        is_examined = self.args.uses_pipeline or self._freeze_callback is not None
        sample: Batch = {}
        if is_examined or mesh.world_size > 1:
            few = rows[: min(SAMPLE_ROWS, self._rows_at_once)]
            sample = self._collate(few, collate_fn)

            def draw() -> Batch:
                with seeded(self.args.seed):  # what it draws from the global generators is the same everywhere
                    return dict(collate_fn(few))

            with generators_kept(collate_fn):
                check_same_everywhere(mesh, self.model, sample, draw, few)
        stack, freezable = LayerStack.uncut(self.model), None
        if is_examined:
            with mesh.failing_together(), torch.random.fork_rng(devices=[]):
                stack, freezable = self._find_units(sample, self._padded_sample(rows, collate_fn))
        else:
            self._unit_costs = (cost_of_whole(stack),)
        different = synchronise_weights(stack.table, mesh) + synchronise_buffers(self.model, mesh, lambda _: 0)
        if different:
            logger.warning(
                "%d parameters and buffers differed between the processes and were set to those of process 0, as DDP"
                " does (%s%s)."
                " Call set_seed() before the model is made to avoid this.",
                len(different),
                ", ".join(different[:3]),
                ", ..." if len(different) > 3 else "",
            )
        # patches the forward for mixed precision, as it would for DDP, and nothing else
        self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
        return ElasticPipeline(
            stack, self._loss_of_micro_batch, mesh, self.args.device, self._wrap_replicas, freezable
        )

    def _find_units(self, sample: Batch, padded: Batch) -> tuple[LayerStack, FreezableLayers | None]:
        """What can be cut, and frozen; and what its parts cost."""
        kept_back = self._names_kept_back(sample)
        inputs, padded = (
            {name: value for name, value in batch.items() if name not in kept_back} for batch in (sample, padded)
        )
        freezable = None
        with naming_long_rows(self.model, padded), left_as_found(self.model):
            stack = LayerStack.discover(self.model, inputs)
            stack.runner.kept_back = kept_back
            if self.args.uses_pipeline:
                refuse_batch_statistics(self.model)
            if self._freeze_callback is not None:
                freezable = FreezableLayers.of(stack, inputs)
            self._unit_costs = self._costs_of_units(stack, padded, freezable.never_frozen if freezable else ())
        return stack, freezable

    def _collate(self, rows: list[Any], collate_fn: Any) -> Batch:
        with generators_kept(collate_fn):
            return self._collate_by_seed(rows, collate_fn)

    def _collate_by_seed(self, rows: list[Any], collate_fn: Any) -> Batch:
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        with seeded(self.args.seed):
            batch = dict(collate_fn(rows))
        return on_device(batch, device)

    def _names_kept_back(self, sample: Batch) -> frozenset[str]:
        """Inputs that compute_loss keeps from the model: sample weights that it takes out, labels of its own."""
        calls: list[Mapping[str, Any]] = []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(dict(named_inputs(module, args, kwargs)))

        model = self.model
        given = KeyedInputs({})
        hook = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            with evaluation_mode(model), torch.no_grad(), left_as_found(model, self), seeded(self.args.seed):
                inputs = dict(self._prepare_inputs(dict(sample)))
                given = KeyedInputs(inputs)
                with self.compute_loss_context_manager():
                    self.compute_loss(model, inputs)
        except Exception as error:  # whatever is wrong shows where the model itself is called
            if is_out_of_memory(error):
                raise
        finally:
            hook.remove()
        if not calls:
            return frozenset()
        if given.are_exchanged(calls[0], self._not_in_keys):
            if self.args.uses_pipeline:
                raise_for_exchanged_inputs(model)
            return frozenset()
        return frozenset(sample) - calls[0].keys()

    def _padded_sample(self, rows: list[Any], collate_fn: Any) -> Batch:
        """Rows padded as in a batch with the longest: short ones would make every stage seem to fit."""
        return max(self._collate_apart(rows, collate_fn), key=_elements_of_a_row)

    def _costs_of_units(self, stack: LayerStack, padded: Batch, never_frozen: Collection[str]) -> tuple[UnitCost, ...]:
        """
        Raises:
            UnsupportedModelError: batches cannot be cut by rows.
        """
        try:
            return measure_costs(stack, slice_rows(padded, 0, SAMPLE_ROWS), never_frozen)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            costs = measure_costs(stack, padded, never_frozen)  # fails likewise where that is not the reason
            if not self.args.uses_pipeline:
                return costs
            raise UnsupportedModelError(
                self.model,
                f"it takes a whole batch, but not the first {SAMPLE_ROWS} rows of each of its inputs"
                f" ({type(error).__name__}: {error}), so batches cannot be cut into micro-batches.",
                "Let the data collator return one entry for each row in all inputs (documents as a second dimension,"
                " padded), or set pipeline_parallel_size=1.",
            ) from error

    def _collate_apart(self, rows: list[Any], collate_fn: Any) -> list[Batch]:
        """Batches of these rows, none larger than those of the training."""
        step = self._rows_at_once
        return [self._collate(rows[start : start + step], collate_fn) for start in range(0, len(rows), step)]

    def _wrap_replicas(
        self, stage: StageModule, group: dist.ProcessGroup, may_be_unused: bool
    ) -> DistributedDataParallel:
        """DDP over the replicas of a stage, by Accelerate's handler and the `ddp_*` arguments."""
        handler = self.accelerator.ddp_handler
        options: dict[str, Any] = handler.to_kwargs() if handler is not None else {}
        if self.args.ddp_find_unused_parameters is None:
            # the Trainer looks for unused parameters in every step; here the loss of the sample has told
            options["find_unused_parameters"] = may_be_unused
        options["gradient_as_bucket_view"] = True  # saves a copy of all gradients
        module = DistributedDataParallel(stage, process_group=group, init_sync=False, **options)
        if handler is not None:
            handler.register_comm_hook(module)
        return module

    def _warn_of_shared_layers(self, freezable: FreezableLayers) -> None:
        with_the_first = [k for k, names in enumerate(freezable.inside) if freezable.frozen(1) & set(names)]
        if len(with_the_first) > 1:
            logger.warning(
                "Layers %s of %s share parameters with its first layer and freeze with it.",
                ", ".join(map(str, with_the_first[1:])),
                type(self.model).__name__,
            )

    def _study_slicing(self, pipeline: ElasticPipeline, rows: list[Any]) -> Windows:
        """Try whether the model can be cut along its tokens, before it is cut by layers."""
        if self._reduction.kind not in ("sum", "mean"):
            raise UnsupportedModelError(
                self.model,
                "its loss is not just a sum or mean over rows or tokens, so slices would change it.",
                "Set token_slices='off'.",
            )
        assert self._train_batches is not None
        collate_fn = self._train_batches.collate_fn
        batches = self._collate_apart(rows, collate_fn)
        # a collator may also have packed them into fewer
        were_packed = sum(map(batch_rows, batches)) != len(rows)
        few = rows[:SAMPLE_ROWS] if were_packed else [rows[i] for i in telling_rows(batches)]
        few = few[: self._rows_at_once]
        plain = self._collate(few, collate_fn)
        *_, sample = label_variants(plain, ("labels",), (), may_ignore=True)
        num_items = max(self._reduction.count(sample), 1)
        is_exact = self._computes_exactly  # what is wrong with a small gradient is less than half precision rounds
        windows: Windows | None = None
        failure: Exception | None = None
        try:
            with without_autocast() if is_exact else nullcontext():
                windows = study_slicing(
                    pipeline.stack,
                    sample,
                    lambda part: self._part_of_loss(self.model, part, num_items),
                    loss_tolerance=1e-3 if is_exact else 1e-2,
                    gradient_tolerance=1e-3 if is_exact else 1e-1,
                )
        except Exception as error:  # one process may be short of memory: the others are to hear of it
            failure = error
        mine = windows if failure is None else f"{type(failure).__name__}: {failure}"
        everyone = self._processes.gather_objects(mine)
        if failure is not None and not isinstance(failure, (RuntimeError, MemoryError)):
            raise failure
        for rank, why in enumerate(everyone):
            if isinstance(why, str):
                raise UnsupportedModelError(
                    self.model,
                    f"the check of slices failed on process {rank} ({why}). It takes memory for the gradients of the"
                    f" whole model and for {batch_rows(sample)} rows of {sequence_length(sample)} tokens.",
                    "Shorten the rows, or set token_slices='off'.",
                ) from failure
        found = [theirs for theirs in everyone if isinstance(theirs, Windows)]
        # rounding may tell processes apart, and a stage that refuses packed rows alone would keep the others waiting
        return replace(
            found[0],
            separates_documents=all(theirs.separates_documents for theirs in found),
            allows_left_padding=all(theirs.allows_left_padding for theirs in found),
        )

    # ------------------------------------------------------------------------------------ the loss
    @property
    def _rows_at_once(self) -> int:
        """Rows that the collator and the model are given together: no more than in a batch of the training."""
        stages = self.args.pipeline_parallel_size
        batch = self.args.per_device_train_batch_size * (stages if isinstance(stages, int) else 1)
        return min(COST_SAMPLE_ROWS, batch)

    @property
    def _adds_nothing_up(self) -> bool:
        """Whether a step is one loss, but for stages' micro-batches."""
        return self._processes.world_size == 1 and self.args.gradient_accumulation_steps == 1

    @property
    def _is_examined(self) -> bool:
        """Whether samples are looked at before the first step: not where one process trains the plain model."""
        return not self._adds_nothing_up or self.args.uses_pipeline or self._freeze_callback is not None

    def _study_loss(self, stack: LayerStack) -> None:
        """Try the loss, the user's own included, on a few rows of the whole model."""
        shifts_labels = getattr(self, "_loss_shifts_labels", False)
        if self._adds_nothing_up and not self.args.uses_pipeline:
            self._reduction = unexamined(shifts_labels)  # nothing is added up
            return
        sample = self._sample_for_loss()
        names = self._names_of_labels
        config = getattr(self.model, "config", None)
        num_labels = getattr(config, "num_labels", 0)
        labels = sample.get("labels")
        are_classes = (
            isinstance(labels, torch.Tensor)
            and not labels.is_floating_point()
            and labels.numel() > 0
            and int(labels.min()) >= 0
            and int(labels.max()) < num_labels
        )
        variants = label_variants(
            sample,
            names,
            range(num_labels) if are_classes else (),
            # a loss of the user's may use labels as indices, and an index of -100 ends a GPU's context
            may_ignore=self._is_stock_loss or self.args.device.type == "cpu" or self._has_ignored(sample),
            model_inputs=[name for name in sample if name not in stack.runner.kept_back],
        )

        def compute_loss(batch: Batch, num_items: Any, seed: int) -> torch.Tensor:
            with seeded(self.args.seed + seed), self.compute_loss_context_manager():
                loss = self.compute_loss(self.model, batch, num_items_in_batch=num_items)
            assert isinstance(loss, torch.Tensor)
            return loss.mean()

        exactly = without_autocast() if self._computes_exactly else nullcontext()
        with self._processes.failing_together(), exactly, naming_long_rows(self.model, sample):
            mine = study_loss(
                stack,
                variants,
                compute_loss,
                others=(self,),
                shifts_labels=shifts_labels,
                label_names=names,
                passes_items=self._passes_items(sample),
                is_cut=self.args.uses_pipeline,
                apart=self._collated_apart(),
                tolerance=EXACT if self._computes_exactly else HALF_PRECISION,
            )
        # rounding may tell processes apart, and so may what a collator draws
        found = self._processes.gather_objects(mine)
        self._reduction, self._loss_is_random = found[0].reduction, found[0].is_random
        stack.unreached |= frozenset[str]().union(*(theirs.without_gradient for theirs in found))
        if self._reduction.kind != "whole" and self._reduction.reason:
            logger.warning("The loss of %s: %s.", type(self.model).__name__, self._reduction.reason)

    def _has_ignored(self, batch: Batch) -> bool:
        labels = (batch.get(name) for name in self._names_of_labels)
        return any(isinstance(values, torch.Tensor) and bool(values.eq(IGNORED).any()) for values in labels)

    def _sample_for_loss(self) -> Batch:
        """Rows of different classes, prepared as for a step; as many as a batch of the training has, and at most
        `LOSS_SAMPLE_ROWS`."""
        batches = self._train_batches
        assert batches is not None
        samples = batches.spread_rows(SAMPLES_TO_CHOOSE_FROM)
        rows = min(LOSS_SAMPLE_ROWS, self._rows_at_once, len(samples))
        chosen = _of_different_classes(samples, self._names_of_labels)
        try:
            batch = self._collate(chosen[: max(rows, 2)], batches.collate_fn)
        except Exception:
            if rows > 1:
                raise
            batch = self._collate(chosen[:1], batches.collate_fn)  # rows of different lengths, one in a batch
        with left_as_found(self), seeded(self.args.seed):
            return dict(self._prepare_inputs(batch))

    def _collated_apart(self) -> tuple[Batch, ...]:
        """A batch, and its short and its long rows collated by themselves, as replicas do; prepared as for a step.

        Nothing where they tell nothing: all rows have one length, or the collator draws, packs or sorts.
        """
        batches = self._train_batches
        assert batches is not None
        samples = batches.spread_rows(SAMPLES_TO_CHOOSE_FROM)
        half = min(ROWS_APART, self._rows_at_once // 2)
        if not half or len(samples) < 2 * half:
            return ()
        try:
            with generators_kept(batches.collate_fn):
                alone = [self._collate_by_seed([sample], batches.collate_fn) for sample in samples]
            order = sorted(range(len(samples)), key=lambda index: _elements_of_a_row(alone[index]))
            short, long = ([samples[index] for index in some] for some in (order[:half], order[-half:]))
            found = [self._collate(rows, batches.collate_fn) for rows in ([*short, *long], short, long)]
        except Exception as error:  # a collator that takes rows of one length only
            if is_out_of_memory(error):
                raise
            return ()
        if not _is_padded(found[1], slice_rows(found[0], 0, half)):
            return ()
        with left_as_found(self), seeded(self.args.seed):
            return tuple(dict(self._prepare_inputs(batch)) for batch in found)

    @property
    def _names_of_labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("labels", *(self.label_names or ()))))

    @property
    def _is_stock_loss(self) -> bool:
        """Whether the loss is a transformers model's own, which knows labels that do not count."""
        model: Any = self.model
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        is_overridden = not type(self).compute_loss.__module__.startswith("transformers.")
        is_stock_model = type(model).__module__.startswith("transformers.")
        return is_stock_model and not is_overridden and self.compute_loss_func is None

    @property
    def _computes_exactly(self) -> bool:
        """Whether the model can be tried in full precision; flash attention knows nothing but half precision."""
        attention = str(getattr(getattr(self.model, "config", None), "_attn_implementation", None))
        return self._has_exact_weights and "flash" not in attention and self.accelerator.mixed_precision != "fp8"

    def _passes_items(self, batch: Batch) -> bool:
        """Whether the stock Trainer passes `num_items_in_batch` for such a batch: else a loss gets None from it."""
        return "labels" in batch and (self.model_accepts_loss_kwargs or self.compute_loss_func is not None)

    def _loss_of_micro_batch(self, model: nn.Module, micro_batch: Batch) -> torch.Tensor:
        """On the last stage: this micro-batch's part of the global batch's loss, scaled for DDP and the scaler."""
        assert self.pipeline is not None
        with self._noting_exchanged_inputs(model, micro_batch):
            items = self._num_items if self._items_scale == 1.0 else self._num_items / self._items_scale
            part = self._part_of_loss(model, micro_batch, items, self._share_of(micro_batch))
        cache = micro_batch.get("past_key_values")
        if self._micro_losses and isinstance(cache, SliceCache) and cache.get_seq_length():
            self._micro_losses[-1] = self._micro_losses[-1] + part.detach()  # later tokens of the same rows
        else:
            self._micro_losses.append(part.detach())
        return part * (self.pipeline.num_replicas * self._loss_scale)

    @contextmanager
    def _noting_exchanged_inputs(self, model: nn.Module, inputs: Batch) -> Iterator[None]:
        """Inside, it is noted if the last stage calls the model on other inputs than the stages before it.

        They call it themselves, and see nothing of what a `compute_loss` makes of them: `_study_loss` has seen what it
        does each time, but not what it does in training only, or now and then.
        """
        assert self.pipeline is not None
        if self.pipeline.num_stages == 1:
            yield
            return
        given = KeyedInputs(inputs)

        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._exchanges_inputs |= given.are_exchanged(named_inputs(model, args, kwargs), self._not_in_keys)

        hook = model.register_forward_pre_hook(look, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _items_scale_of(self, batch: Batch) -> float:
        """Items are counted before `_prepare_inputs`, which may make probabilities of class labels."""
        if self._reduction.kind != "mean" or not self._slice.rows or not self._slice.items:
            return 1.0
        count = self._reduction.count(batch)
        return 1.0 if count == self._slice.items or not count else self._slice.items / count

    def _share_of(self, micro_batch: Batch) -> float:
        """Share of this micro-batch in the rows of an optimizer step's batch; 0 where its row does not count."""
        assert self.pipeline is not None and self.pipeline.stage is not None
        if not self._slice.rows or self._reduction.kind in ("sum", "mean", "plain_sum"):
            return float(bool(self._slice.rows))
        here = sum(batch_rows(part) for part in self.pipeline.stage.micro_batches)  # a collator may pack samples
        return batch_rows(micro_batch) / here * (self._slice.rows / self._num_rows)

    def _part_of_loss(
        self, model: nn.Module, batch: Batch, num_items: int | float, share: float = 1.0
    ) -> torch.Tensor:
        """What a part of a batch of `num_items` adds to the whole batch's loss; `share` as in `LossReduction.part`."""
        asked: Any
        asked, weight = self._reduction.part(batch, num_items, share) if share else (num_items, 0.0)
        inputs = dict(batch)
        if weight == 0.0:  # a mean over no item would be NaN, and NaN x 0 is NaN
            inputs |= {
                name: torch.zeros_like(value)
                if name != self._reduction.key or not value.is_floating_point()
                else torch.ones_like(value)
                for name in {*self._names_of_labels, "shift_labels", self._reduction.key}
                if isinstance(value := inputs.get(name), torch.Tensor)
            }
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=asked if self._passes_items(batch) else None)
        assert isinstance(loss, torch.Tensor)
        return loss.mean() * weight

    @property
    def _loss_scale(self) -> float:
        scaler = self.accelerator.scaler
        return scaler.get_scale() if scaler is not None else 1.0

    # ------------------------------------------------------------------------------------ times, plans, cache
    def _measure_times(self, pipeline: ElasticPipeline, rows: list[Any]) -> ModelTimes | None:
        """Of the model's parts, where they decide something: K, M, whether the cache pays.

        They may decide otherwise in another run, which `full_determinism` forbids. A training that is resumed where it
        was interrupted keeps the times that it began with, and so its plans.
        """
        if self.args.full_determinism or not (self.args.uses_pipeline or self._may_cache):
            return None
        assert self._train_batches is not None
        if self._timed is None or self._timed[0] is not pipeline:  # once, so that a second train() has the same plan
            few = rows[: min(self.args.per_device_train_batch_size, MOST_ROWS_TO_TIME)]
            batch = self._collate(few, self._train_batches.collate_fn)
            # the first process's: hosts may differ, and all are to come to the same plan
            measured = self._processes.gather_objects(self._what_is_measured(batch))[0]
            times = self._processes.gather_objects(self._read_times(measured))[0]
            if times is None:
                with self.compute_loss_context_manager():
                    times = time_parts(pipeline, batch, self.args.device)
            self._timed = (pipeline, times, measured)
        return self._timed[1]

    def _write_times(self, checkpoint: Path) -> None:
        _, times, measured = self._timed or (None, None, {})
        if times is not None:
            content = {"measured": measured, "times": asdict(times)}
            (checkpoint / TIMES).write_text(json.dumps(content), encoding="utf-8")

    def _read_times(self, measured: dict[str, Any]) -> ModelTimes | None:
        """Those of the checkpoint that is resumed from; None if it has none of such a machine and job."""
        if self._resumed_from is None:
            return None
        try:
            content = json.loads((self._resumed_from / TIMES).read_text(encoding="utf-8"))
            times = ModelTimes.of_plain(content["times"])
            is_of_this = content["measured"] == measured and len(times.units) == len(self._unit_costs)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return times if is_of_this else None

    def _what_is_measured(self, batch: Batch) -> dict[str, Any]:
        """All that times depend on, in JSON's values: with any of it changed they are measured again."""
        args, model = self.args, self.model
        return {
            "device": name_of_device(args.device),
            "processes": args.world_size,
            "threads": torch.get_num_threads(),
            "inputs": {name: list(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)},
            "trainable_bytes": [unit.trainable_bytes for unit in self._unit_costs],
            "checkpointing": sum(bool(getattr(module, "gradient_checkpointing", False)) for module in model.modules()),
            "attention": str(getattr(getattr(model, "config", None), "_attn_implementation", None)),
            "precision": self.accelerator.mixed_precision,
            "torch": torch.__version__,
        }

    def _make_layouts(self, pipeline: ElasticPipeline, times: ModelTimes | None = None) -> Layouts:
        is_whole = self._reduction.kind == "whole"
        may_replicate = not self.args.uses_pipeline or (not is_whole and not self._reduction.depends_on_padding)
        layouts = Layouts(self.args, self._unit_costs, times, pipeline.mesh, may_replicate=may_replicate)
        if is_whole and self._train_batches is not None:
            self._refuse_coupled_rows(layouts.first)
        elif self._reduction.depends_on_padding:
            self._refuse_other_padding(layouts.first)
        return layouts

    def _refuse_other_padding(self, plan: PipelinePlan) -> None:
        """
        Raises:
            UnsupportedModelError: several pipelines would pad rows to other lengths, and the loss depends on them.
        """
        is_accumulated = self.args.gradient_accumulation_steps > 1
        if plan.data_parallel_size == 1 and not is_accumulated:
            logger.info(
                "The loss of %s depends on the length to which rows are padded: processes of frozen layers will not"
                " become replicas, which would pad their rows to other lengths. Pad all rows to one length to allow"
                " it.",
                type(self.model).__name__,
            )
        elif not self.args.uses_pipeline or plan.data_parallel_size == 1:
            logger.warning(
                "The loss of %s depends on the length to which rows are padded: as under plain DDP, or with gradient"
                " accumulation, each process and micro-batch pads its own rows, and the result is not that of one"
                " process with the whole batch. Pad all rows to one length to avoid this.",
                type(self.model).__name__,
            )
        else:
            raise UnsupportedModelError(
                self.model,
                "its loss depends on the length to which rows are padded (does it count padding? is there an"
                f" attention_mask?), and {plan.data_parallel_size} replicas would pad their rows to other lengths.",
                "Pad all rows to one length, or set pipeline_parallel_size to the number of processes or to 1.",
            )

    def _refuse_coupled_rows(self, plan: PipelinePlan) -> None:
        is_one_batch = plan.data_parallel_size == 1 and self.args.gradient_accumulation_steps == 1
        if is_one_batch and (plan.num_microbatches == 1 or not self.args.uses_pipeline):
            return
        if not self.args.uses_pipeline:
            logger.warning(
                "The loss of %s is not a sum or mean over the rows of a batch: as under plain DDP, or with gradient"
                " accumulation, each of %d parts of a batch has a loss of its own rows (%s).",
                type(self.model).__name__,
                plan.world_size * self.args.gradient_accumulation_steps,
                self._reduction.reason,
            )
            return
        raise UnsupportedModelError(
            self.model,
            "its loss is not a sum or mean over the rows of a batch (a contrastive or class-weighted loss, or inputs"
            " that cannot be cut by rows), so micro-batches and replicas would change it:"
            f" {self._reduction.reason or 'its parts do not add up'}.",
            "Return a sum over the items divided by num_items_in_batch, or set num_microbatches=1,"
            f" gradient_accumulation_steps=1 and pipeline_parallel_size={plan.world_size} (one pipeline), or"
            " pipeline_parallel_size=1.",
        )

    def _make_auto_cache(self, pipeline: ElasticPipeline, times: ModelTimes | None) -> AutoCache:
        """The cache; it finds out itself whether the model allows it."""
        args, batches = self.args, self._train_batches
        assert batches is not None and pipeline.freezable is not None

        def collate(samples: list[Any]) -> Batch:
            return self._collate(samples, batches.collate_fn)

        def loss_of(batch: Batch) -> torch.Tensor:
            with seeded(args.seed):  # what the user's methods make of the inputs may be random
                loss = self.compute_loss(self.model, dict(self._prepare_inputs(dict(batch))))
            assert isinstance(loss, torch.Tensor)
            return loss.mean()

        samples = varied_samples(batches.spread_rows(SAMPLES_TO_PROBE), collate)
        with self.compute_loss_context_manager():
            verdicts = probe_boundaries(
                pipeline.stack, pipeline.freezable, samples, collate, ignored=self._not_in_keys, loss_of=loss_of
            )
        seconds = [unit.forward.per_row for unit in times.units] if times is not None else None
        return AutoCache.make(
            pipeline,
            verdicts,
            current=self._current_generations,
            is_shared=args.activation_cache_dir is not None,
            max_gib=args.activation_cache_max_gib,
            storage_dtype=CACHE_DTYPES[args.activation_cache_dtype],
            capacity=sum(len(data) if isinstance(data, Sized) else UNKNOWN_SIZE for data in self._datasets),
            is_forced=args.activation_cache == "on",
            seconds_per_row=seconds,
            precision=self.accelerator.mixed_precision,
            # a collator that cannot take them together has been refused above
            rows=collate(samples) if any(verdict.slot is not None for verdict in verdicts) else {},
            ignored=self._not_in_keys,
        )

    @property
    def _datasets(self) -> list[Any]:
        evaluated = self.eval_dataset
        everything = [self.train_dataset, *(evaluated.values() if isinstance(evaluated, dict) else [evaluated])]
        return [dataset for dataset in everything if dataset is not None]


def _elements_of_a_row(batch: Mapping[str, Any]) -> int:
    return max(
        (value[0].numel() for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()), default=0
    )


def _is_padded(one: Batch, other: Batch) -> bool:
    """Whether the second batch is the first one with more padding."""
    is_longer = False
    if one.keys() != other.keys():
        return False
    for name, value in one.items():
        longer = other[name]
        if not isinstance(value, torch.Tensor) or not isinstance(longer, torch.Tensor) or value.dim() != longer.dim():
            continue
        if any(a > b for a, b in zip(value.shape, longer.shape, strict=True)):
            return False
        is_longer |= value.shape != longer.shape
        if not torch.equal(value, longer[tuple(slice(size) for size in value.shape)]):
            return False
    return is_longer


def _of_different_classes(samples: list[Any], names: Sequence[str]) -> list[Any]:
    """The samples in an order in which the first ones have as many different labels as possible."""
    seen: dict[Any, int] = {}

    def turn(sample: Any) -> int:
        label = None
        if isinstance(sample, Mapping):
            values = (sample.get(name) for name in (*names, "label", "label_ids"))
            label = next((float(value) for value in values if isinstance(value, (int, float))), None)
        seen[label] = seen.get(label, -1) + 1
        return seen[label]

    turns = [turn(sample) for sample in samples]
    return [samples[index] for index in sorted(range(len(samples)), key=turns.__getitem__)]


def refuse_distributed_model(model: Any) -> None:
    """
    Raises:
        ValueError: something else has distributed the model already.
    """
    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        raise ValueError(
            f"model is wrapped in {type(model).__name__}: pass the plain model (model.module), the trainer distributes"
            " it."
        )
    device_map = getattr(model, "hf_device_map", None)
    if device_map:
        raise ValueError(
            f"model is spread by a device map ({len(device_map)} entries): load it without device_map, the pipeline's"
            " stages take their part."
        )
