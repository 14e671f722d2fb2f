"""The batches of one optimizer step, as the Trainer's loop takes them. Each pipeline's slice is counted once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import Trainer

from ..data.numbered_batches import BatchSlice, GivenBatches, NumberedBatches
from ..model.called_inputs import BatchTags, RecordedInputs
from ..model.loss_scaling import LossReduction
from ..model.micro_batch import Batch, batch_rows, with_name
from ..model.nested import tensors_of
from ..model.tags import TAGS
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..progress import PROGRESS
from .job import TrainingJob


def prepared(job: TrainingJob, inputs: Mapping[str, Any], tags: BatchTags | None) -> Batch:
    """Prepare a batch with the trainer's `_prepare_inputs`, and add the tags of its samples.

    If the inputs are no longer the tagged ones, blank tags are added instead.

    Args:
        job: the training job.
        inputs: the current inputs; methods that the user has overridden may have changed them.
        tags: the tags of the samples; None if they have none or none are needed.
    """
    trainer: Any = job.trainer
    if tags is None:
        return dict(with_name(trainer._prepare_inputs(inputs)))
    are_same = tags.inputs.are(inputs, job.not_in_keys)
    moved = job.to_device(inputs)
    given = RecordedInputs(with_name(moved))
    batch = dict(with_name(trainer._prepare_inputs(moved)))
    are_same = are_same and given.are(batch, job.not_in_keys)
    batch[TAGS] = tags.tensor if are_same else tags.blank().tensor
    return batch


class BatchesInEpoch(int):
    """The number of batches in an epoch. The Trainer's loop recognises the last batch by it, and updates after it.

    For a stream the loop has only an upper bound. While a step runs with fewer batches than are accumulated, this
    number therefore also equals the number of the step's last batch. Otherwise the loop would not update, and would
    add the step's gradients to the next step's.

    Attributes:
        accumulated: number of batches in a step (`gradient_accumulation_steps`).
        remainder: number of batches in the current step if it has fewer; otherwise 0.
    """

    accumulated = 1
    remainder = 0

    def __eq__(self, number: object) -> bool:
        is_last = bool(self.remainder) and isinstance(number, int) and number % self.accumulated == self.remainder
        return is_last or super().__eq__(number)

    __hash__ = int.__hash__


class GlobalBatch:
    """The batch of one optimizer step, over all replicas and accumulated batches.

    Attributes:
        num_items: number of items that the loss counts in it.
        num_rows: number of samples.
        current: this pipeline's slice of the batch that `training_step` runs.
        waiting: this pipeline's slices of the batches that were read and not yet run.
        fillers: batches whose samples do not count, because this pipeline's slice is empty.
    """

    def __init__(self) -> None:
        self.num_items: int | float = 1
        self.num_rows = 0
        self.current = BatchSlice(0, 0)
        self.waiting: deque[BatchSlice] = deque()
        self.fillers: list[Any] = []
        self._latest_tensors: tuple[torch.Tensor, ...] = ()  # of the last training_step

    def read(
        self,
        batches: Iterator[Any],
        num_batches: int,
        data: NumberedBatches | GivenBatches,
        reduction: LossReduction,
        takes_others: bool,
    ) -> list[Any]:
        """Take the next batches from the loop's iterator, and count the items in this pipeline's slices of them.

        Args:
            batches: the loop's iterator.
            num_batches: number of batches to take. There may be fewer.
            data: the expected batches of the loop.
            reduction: it counts the loss's items.
            takes_others: whether batches of other loaders are taken, too. The user's loader may combine several.

        Raises:
            ValueError: the loop reads from another loader, and `takes_others` is not set.
        """
        taken: list[Any] = []
        items: int | float = 0
        for _ in range(num_batches):
            PROGRESS.tick()
            before = data.last_slice if isinstance(data, NumberedBatches) else None
            try:
                batch = next(batches)
            except StopIteration:
                break
            taken.append(batch)
            part = data.last_slice if isinstance(data, NumberedBatches) else data.slice_of(batch)
            if part is before and takes_others:
                rows = batch_rows(with_name(batch), default=1)
                part = BatchSlice(rows, rows)
            if part is before:
                raise ValueError(
                    "The training loop reads from a different DataLoader than the one that"
                    " PipeTransformerTrainer.get_train_dataloader created. Return what super().get_train_dataloader()"
                    " returns (or a wrapper around it), or pass train_dataset and data_collator instead of overriding"
                    " it."
                )
            part = replace(part, items=reduction.count(dict(with_name(batch))) if part.rows else 0)
            self.waiting.append(part)
            self.fillers += [] if part.rows else [batch]
            self.num_rows += part.global_rows
            items += part.items
        self.num_items = items
        return taken

    def count_over_replicas(self, pipeline: ElasticPipeline) -> None:
        """Count the items of all pipelines, each once. Collective over all processes if there are replicas."""
        if pipeline.num_replicas > 1:
            mine = self.num_items if pipeline.computes_loss else 0
            self.num_items = pipeline.mesh.sum(mine, torch.int64)
        # with one replica, `share` will replace it on the other stages with the last stage's number
        self.num_items = self.num_items or 1

    def begin(self, inputs: Mapping[str, Any], pipeline: ElasticPipeline) -> None:
        """Set `current` to the slice of the batch in this call of `training_step`.

        Raises:
            ValueError: it is called again on the same batch, or on a batch that was not read. With one stage a batch
                may be trained again.
        """
        tensors = tensors_of(inputs)
        # sharpness-aware minimisation or adversarial weights call it again; a single tensor may be in all batches, so
        # all tensors are compared
        latest = {id(tensor) for tensor in self._latest_tensors}
        is_again = bool(tensors) and all(id(tensor) in latest for tensor in tensors)
        if (is_again and pipeline.num_stages > 1) or (not is_again and not self.waiting):
            raise ValueError(
                "training_step was called twice for one batch (for example for sharpness-aware minimization or"
                " adversarial weight perturbation), but each stage of a pipeline sees only its own parameters and"
                " gradients. Set pipeline_parallel_size=1, and pass the same tensors in both calls."
            )
        if not is_again:
            self.current, self._latest_tensors = self.waiting.popleft(), tensors

    def share(self, pipeline: ElasticPipeline, batch: Batch) -> Batch:
        """Return the last stage's batch and counts on all stages of its pipeline. Collective over the pipeline.

        Each stage has prepared a batch of its own, but a collator or `_prepare_inputs` that draws random numbers may
        give different results on each stage.
        """
        part = self.current
        shared = pipeline.running.messages.share((batch, part.rows, part.global_rows, part.items, self.num_items))
        batch, rows, global_rows, items, self.num_items = shared
        self.current = BatchSlice(rows, global_rows, items=items)
        return batch


@contextmanager
def handing_on_prepared(trainer: Trainer, batch: Batch) -> Iterator[None]:
    """Inside the context, `_prepare_inputs` returns this batch unchanged: the process it came from has prepared it."""
    before, prepare = vars(trainer).get("_prepare_inputs"), trainer._prepare_inputs
    vars(trainer)["_prepare_inputs"] = lambda inputs: inputs if inputs is batch else prepare(inputs)
    try:
        yield
    finally:
        del vars(trainer)["_prepare_inputs"]
        if before is not None:
            vars(trainer)["_prepare_inputs"] = before
