"""The batches of one optimizer step, as the Trainer's loop takes them: all pipelines' slices, counted once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ..cache.content_keys import KEYS_NAME, BatchKeys, KeyedInputs
from ..data.numbered_batches import BatchSlice, GivenBatches, NumberedBatches
from ..model.loss_scaling import LossReduction
from ..model.micro_batch import Batch, tensors_in
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..resilience.watchdog import PROGRESS
from .job import TrainingJob


def prepared(job: TrainingJob, inputs: Mapping[str, Any], keys: BatchKeys | None) -> Batch:
    """What the trainer's `_prepare_inputs` makes of a batch, with its rows' keys if it is still what they are keys of.

    Args:
        job: the training.
        inputs: as they come here; a user's methods may have seen them.
        keys: of the rows; None: they have none, or nobody asks.
    """
    are_same = keys is not None and keys.inputs.are(inputs, job.not_in_keys)
    moved = job.to_device(inputs)
    given = KeyedInputs(moved)
    batch = dict(job.trainer._prepare_inputs(moved))
    if keys is not None:
        are_same = are_same and given.are(batch, job.not_in_keys)
        batch[KEYS_NAME] = keys.tensor if are_same else keys.blank().tensor
    return batch


class GlobalBatch:
    """What is known of the batch of one optimizer step, over all replicas and accumulated batches.

    Attributes:
        num_items: that the loss counts in it.
        num_rows: samples.
        current: this pipeline's slice of the batch that `training_step` runs.
    """

    def __init__(self) -> None:
        self.num_items: int | float = 1
        self.num_rows = 0
        self.current = BatchSlice(0, 0)
        self.waiting: deque[BatchSlice] = deque()
        self._latest_tensors: list[torch.Tensor] = []  # that training_step was called on

    def read(
        self,
        batches: Iterator[Any],
        num_batches: int,
        data: NumberedBatches | GivenBatches,
        reduction: LossReduction,
    ) -> list[Any]:
        """Take the next batches of the loop's iterator, and count what is in this pipeline's slices of them."""
        taken: list[Any] = []
        items: int | float = 0
        for _ in range(num_batches):
            PROGRESS.tick()
            try:
                batch = next(batches)
            except StopIteration:
                break
            taken.append(batch)
            part = data.slice_of(batch) if isinstance(data, GivenBatches) else data.last_slice
            part = replace(part, items=reduction.count(batch) if part.rows else 0)
            self.waiting.append(part)
            self.num_rows += part.global_rows
            items += part.items
        self.num_items = items
        return taken

    def count_over_replicas(self, pipeline: ElasticPipeline, reduction: LossReduction) -> None:
        """Items of all pipelines, each once. Collective over all processes where there are replicas."""
        mine = self.num_items if pipeline.stage_index == 0 else 0
        dtype = torch.float64 if reduction.items == "total" else torch.int64
        total = torch.tensor([mine], dtype=dtype).to(pipeline.device)
        if pipeline.num_replicas > 1:
            dist.all_reduce(total)
        elif pipeline.num_stages > 1:
            total[0] = self.num_items  # the first stage's number comes with the batch
        self.num_items = total.item() or 1

    def begin(self, inputs: Mapping[str, Any], pipeline: ElasticPipeline) -> None:
        """`training_step` is called on a batch that was read: `current` is its slice.

        Raises:
            ValueError: it is called again on a batch that has been trained, or on one that was not read; one stage
                may train a batch again.
        """
        tensors = list(tensors_in(inputs))
        # as for sharpness-aware minimisation, or adversarial weights; one tensor may be in all batches
        latest = {id(tensor) for tensor in self._latest_tensors}
        is_again = bool(tensors) and all(id(tensor) in latest for tensor in tensors)
        if (is_again and pipeline.num_stages > 1) or (not is_again and not self.waiting):
            raise ValueError(
                "training_step was called twice for one batch (for sharpness-aware minimisation, or adversarial"
                " weights?), and each stage of a pipeline sees its own parameters and gradients only. Set"
                " pipeline_parallel_size=1, and pass the same tensors again."
            )
        if not is_again:
            self.current, self._latest_tensors = self.waiting.popleft(), tensors

    def share(self, pipeline: ElasticPipeline, batch: Batch) -> Batch:
        """What the first stage has prepared and counted, on all stages of its pipeline. Collective over the pipeline.

        Each has prepared its own, and what a collator or `_prepare_inputs` draws need not be the same on two.
        """
        part = self.current
        shared = pipeline.share((batch, part.rows, part.global_rows, part.items, self.num_items))
        batch, rows, global_rows, items, self.num_items = shared
        self.current = BatchSlice(rows, global_rows, items=items)
        return batch
