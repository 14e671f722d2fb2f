"""The loss of a batch that is split into parts, and the contribution of each micro-batch to it.

training loop      run/batches.py        `GlobalBatch`: items and samples of an optimizer step, over all replicas
compute_loss       `Loss`                the user's loss on a part of a batch, weighted as `LossReduction` says
last stage         `BatchInFlight`       the micro-batches of one `training_step`, and their losses
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..data.numbered_batches import BatchSlice
from ..model.called_inputs import RecordedInputs, defaults_of, named_inputs
from ..model.elsewhere import keeping_gradients
from ..model.loss_scaling import LossReduction
from ..model.micro_batch import Batch, as_the_user_made_it
from ..model.refusals import refuse_computed_of_hidden
from ..model.tags import without_tags
from ..pipeline.elastic_pipeline import ElasticPipeline
from .collectives import among_last_stages
from .job import TrainingJob
from .loss_source import LossSource, has_own_backward, refuse_own_backward


class Loss:
    """The loss as the trainer computes it, user-defined or not, and its properties.

    It alone calls `compute_loss`.

    Args:
        job: the training job.

    Attributes:
        label_names: names of the inputs that are labels.
        shifts_labels: whether position i predicts label i + 1.
        is_stock: whether it is the loss of a transformers model, which ignores labels of -100.
    """

    def __init__(self, job: TrainingJob) -> None:
        trainer = job.trainer
        self.job, self.model = job, job.model
        self.label_names = tuple(dict.fromkeys(("labels", *(trainer.label_names or ()))))
        self.shifts_labels = bool(getattr(trainer, "_loss_shifts_labels", False))
        self._source = LossSource(job)
        self.is_stock = self._source.is_stock
        self._num_hooks = len(self.model._forward_pre_hooks)
        self.is_told: bool | None = None
        """Whether the loss gets the number of items in this step; None: as in the stock Trainer's loop."""

    def refuse_change(self) -> None:
        """Refuse another loss than the one of transformers that was examined: `LossSource.refuse_change`.

        A loss of the user's own is not examined. Nothing depends on one that is computed on the whole batch.
        """
        if self.job.args.uses_pipeline:
            refuse_own_backward(self.job.trainer.accelerator)
        if self.is_stock and (self.job.args.uses_pipeline or self.job.sums_up):
            self._source.refuse_change()

    @property
    def has_changed(self) -> bool:
        """Whether it is made of other parts than when the training began."""
        return bool(self._source.changed())

    @property
    def may_exchange_inputs(self) -> bool:
        """Whether the model may be called on other inputs than the batch's: by a stock loss only with later hooks."""
        installed = 1  # of the runner, on a placed model
        return not self.is_stock or len(self.model._forward_pre_hooks) > self._num_hooks + installed

    @property
    def is_exact(self) -> bool:
        """Whether the model can be probed in full precision. Flash attention supports half precision only."""
        model = self.job.model
        attention = str(getattr(getattr(model, "config", None), "_attn_implementation", None))
        has_exact_weights = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
        return has_exact_weights and "flash" not in attention and self.job.mixed_precision != "fp8"

    @property
    def scale(self) -> float:
        """The factor by which `Accelerator.backward` multiplies losses: the gradient scaler's, over the steps.

        The number of steps is 1 under a Trainer, unless the user has set it.
        """
        accelerator = self.job.trainer.accelerator
        factor = accelerator.scaler.get_scale() if accelerator.scaler is not None else 1.0
        steps = accelerator.gradient_accumulation_steps
        return factor if steps == 1 else factor / steps

    def passes_items(self, batch: Batch) -> bool:
        """Whether `num_items_in_batch` is passed for such a batch; otherwise None is passed."""
        trainer = self.job.trainer
        if self.is_told is not None:
            return self.is_told
        return "labels" in batch and (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)

    def is_scaled_for_accumulation(self, num_items: Any) -> bool:
        """Whether a loss is of the whole optimizer step. The stock Trainer divides others by the number of parts."""
        trainer = self.job.trainer
        told: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
        if told is not None:
            return told
        return (trainer.model_accepts_loss_kwargs and num_items is not None) or trainer.compute_loss_func is not None

    def of_batch(self, batch: Batch, **items: Any) -> torch.Tensor:
        """Return the loss of a prepared batch, 0-dimensional, for a probe.

        Args:
            batch: the batch.
            items: `num_items_in_batch`, if the loss takes it.
        """
        return self._call(self.job.model, batch, **items).mean()

    def of_whole(
        self, batch: Batch, num_items: int | float, share: float, last_stages: dist.ProcessGroup | None
    ) -> torch.Tensor:
        """Return the contribution of a pipeline's whole slice of a batch; the slices' losses are averaged.

        Accumulated batches count as in the stock Trainer. (It would sum the losses of models that ignore
        `num_items_in_batch`; here the losses of a transformers model are averaged.)

        Args:
            batch: the slice.
            num_items: number of items in the whole batch.
            share: the slice's share of the whole batch.
            last_stages: the last stages of all pipelines, if there are several stages. Their losses are averaged.
        """
        # a loss that divides by the number of items of all replicas is added up, and one that does not is averaged
        items: Any = num_items if share in (0, 1) else num_items * share  # with 0, the result does not count
        asked = items if self.passes_items(batch) else None
        if asked is not None and not self.is_stock:
            asked = torch.tensor(asked)  # a tensor as from the stock Trainer; on the CPU, to save a copy
        loss = self._call(self.model, batch, last_stages, num_items_in_batch=asked)
        if not self.is_stock and not self.is_scaled_for_accumulation(asked):
            loss = loss / self.job.trainer.current_gradient_accumulation_steps
        loss = loss.mean() if loss.dim() else loss  # an operation less, forwards and backwards, in each step
        return loss if share == 1 else loss * share

    def of_part(
        self,
        reduction: LossReduction,
        model: nn.Module,
        batch: Batch,
        num_items: int | float,
        weight: float | None = None,
    ) -> torch.Tensor:
        """Return the contribution of a part of a batch to the whole batch's loss.

        Args:
            reduction: how the losses of parts add up.
            model: the model; a call may run only this process's stage of it.
            batch: the part.
            num_items: number of items in the whole batch.
            weight: the factor of the part's loss; None for the reduction's. With 0 the contribution is 0.
        """
        weight = reduction.weight(batch, num_items) if weight is None else weight
        inputs = dict(batch)
        if weight == 0.0:  # a mean over no item would be NaN, and NaN x 0 is NaN
            inputs |= {
                name: torch.zeros_like(value)
                for name in {*self.label_names, "shift_labels", reduction.key}
                if isinstance(value := inputs.get(name), torch.Tensor)
            }
        asked: Any = num_items if self.passes_items(batch) else None
        return self._call(model, inputs, num_items_in_batch=asked).mean() * weight

    def _call(
        self, model: nn.Module, batch: Batch, last_stages: dist.ProcessGroup | None = None, **items: Any
    ) -> torch.Tensor:
        """Call `compute_loss` on the batch as the user's collator made it, in `TrainingJob.computing_loss`.

        Args:
            model: the model.
            batch: the inputs.
            last_stages: as of `TrainingJob.computing_loss`.
            items: `num_items_in_batch`, if the loss takes it.
        """
        with self.job.computing_loss(last_stages):
            loss = self.job.trainer.compute_loss(model, as_the_user_made_it(batch), **items)
        assert isinstance(loss, torch.Tensor)
        return loss


class BatchInFlight:
    """This pipeline's slice of a global batch while `training_step` runs it.

    Args:
        loss: the trainer's loss.
        pipeline: the placed model.
        reduction: how the losses of parts add up.
        part: numbers of samples and items in the slice, and of samples in the global batch.
        num_items: number of items that the loss counts in the optimizer step's batch, over all replicas.
        num_rows: number of samples of that batch.
        batch: the prepared slice.
    """

    def __init__(
        self,
        loss: Loss,
        pipeline: ElasticPipeline,
        reduction: LossReduction,
        part: BatchSlice,
        num_items: int | float,
        num_rows: int,
        batch: Batch,
    ) -> None:
        self.part = part
        self.num_rows = num_rows
        self.losses: list[torch.Tensor] = []
        """The loss of each micro-batch, on the last stage."""
        self.exchanged_inputs: set[str] = set()
        """Inputs that the last stage has passed to the model with other values than the earlier stages."""
        self._loss = loss
        self._pipeline = pipeline
        self._reduction = reduction
        self._num_items = num_items
        self._batch = batch
        self._weighed: Sequence[Batch] | None = None  # the micro-batches that `_weights` are of
        self._weights: list[tuple[torch.Tensor | None, float]] = []  # each micro-batch's counted input, and its weight

    @property
    def unread(self) -> Collection[str]:
        """Names of inputs that frozen layers do not read."""
        return self._loss.job.not_in_keys | self._pipeline.stack.runner.called.kept_back

    def of_part(self, model: nn.Module, micro_batch: Batch) -> torch.Tensor:
        """Return this micro-batch's contribution to the global batch's loss. Called on the last stage.

        The result is multiplied by the number of replicas, since DDP averages over them, and by `Loss.scale`.
        """
        pipeline = self._pipeline
        assert pipeline.stage is not None
        may_exchange = pipeline.num_stages > 1 and self._loss.may_exchange_inputs
        with self._noting_exchanged_inputs(micro_batch) if may_exchange else nullcontext():
            part = self._of_part(model, micro_batch)
        refuse_computed_of_hidden(part)
        if self.losses and pipeline.stage.continues:
            self.losses[-1] = self.losses[-1] + part.detach()
        else:
            self.losses.append(part.detach())
        pipeline.weights.refreeze()
        factor = pipeline.num_replicas * self._loss.scale
        return part if factor == 1 else part * factor

    def backward(self, part: torch.Tensor) -> None:
        """Run the backward of a value of `of_part`, on a single stage. It calls a `backward` of the user's."""
        accelerator = self._loss.job.trainer.accelerator
        if has_own_backward(accelerator):
            accelerator.backward(part.reshape(()) / self._loss.scale)  # which multiplies by it
        else:
            part.backward()

    def drive(self) -> None:
        """Compute the loss of this pipeline's slice, and its backward, as one process would. Called on the last stage.

        The calls of the model in it are served by all stages. The replicas' losses are averaged, by their samples.
        """
        pipeline, job = self._pipeline, self._loss.job
        among = among_last_stages(job.trainer.accelerator, job.mesh, pipeline.last_stages)
        with among, keeping_gradients(self._has_gradients):
            part = self._of_whole(without_tags(self._batch))
            refuse_computed_of_hidden(part)
            if not self.part.rows:  # samples that do not count; the loss may gather something from all replicas
                return
            self.losses.append(part.detach())
            pipeline.weights.refreeze()
            (part * (pipeline.num_replicas * self._loss.scale)).backward()

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._pipeline.model.parameters())

    def release(self) -> None:
        """Forget the batch, which would otherwise stay on the device until the next one replaces it."""
        self._batch, self._weighed, self._weights = {}, None, []

    def total(self, device: torch.device) -> torch.Tensor:
        """Return the sum of the losses of all micro-batches that this process has computed, 0-dimensional."""
        if len(self.losses) == 1:
            return self.losses[0]
        return torch.stack(self.losses).sum() if self.losses else torch.zeros((), device=device)

    def _of_part(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if self._reduction.kind == "whole" and self.part.rows:
            return self._of_whole(batch)
        items, weight = self._num_items, None if self.part.rows else 0.0
        if self._reduction.kind == "mean" and self.part.rows:
            weight = self._weight(batch)
        return self._loss.of_part(self._reduction, model, batch, items, weight)

    def _of_whole(self, batch: Batch) -> torch.Tensor:
        """Return the contribution of this whole slice. Replicas' losses are averaged, weighted by their samples."""
        share = self.part.rows / (self.num_rows if self._loss.is_stock else self.part.global_rows or 1)
        return self._loss.of_whole(batch, self._num_items, share, self._pipeline.last_stages)

    def _weight(self, batch: Batch) -> float | None:
        """Return a part's share of the items of the global batch; None if it is not one of the micro-batches.

        The first call counts the items of all micro-batches, as reading a number from an accelerator waits for it. The
        global batch was counted as it was collated; `_prepare_inputs` may change a number, for example by turning
        class labels into probabilities.
        """
        stage = self._pipeline.stage
        assert stage is not None
        if self._weighed is not stage.micro_batches:
            self._weighed = stage.micro_batches
            prepared, *of_parts = self._reduction.counts([self._batch, *self._weighed])
            items = self._num_items * (prepared / self.part.items if prepared and self.part.items else 1)
            sources = map(self._reduction.source, self._weighed)
            self._weights = [(source, count / items) for source, count in zip(sources, of_parts, strict=True)]
        source = self._reduction.source(batch)
        return next((weight for known, weight in self._weights if known is source is not None), None)

    @contextmanager
    def _noting_exchanged_inputs(self, inputs: Batch) -> Iterator[None]:
        """Inside the context, record whether the last stage calls the model on other inputs than the earlier stages.

        The earlier stages call the model themselves. They do not see how `compute_loss` changes the inputs, if the
        user has declared that its losses of parts add up (`loss_reduction`).
        """
        pipeline = self._pipeline
        model, ignored = pipeline.model, self._loss.job.not_in_keys
        given = RecordedInputs(pipeline.stack.runner.arguments(without_tags(inputs)))
        defaults = defaults_of(model)

        def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.exchanged_inputs.update(given.exchanged(named_inputs(model, args, kwargs), ignored, defaults))

        hook = model.register_forward_pre_hook(look, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
