"""Finds the layers of a model before FSDP2 shards it, for a freeze callback."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed.fsdp import FSDPModule

from ...model.frozen_prefix import FreezableLayers
from ...model.layer_stack import LayerStack
from ...model.left_as_found import left_as_found
from ...randomness import global_state_kept
from ...run.job import TrainingJob
from ...run.setup.cutting import SAMPLE_ROWS
from ...run.setup.probing import SampleCollator, examples_of, first_that_runs, found_by_each
from .frozen_prefix import FoundLayers


def find_layers_to_freeze(job: TrainingJob, dataloader: Any) -> None:
    """Tell the trainer's freeze callback the layers of a model that FSDP2 will shard. Collective over all processes.

    Layers are found by running them one at a time, with parameters exchanged for placeholders. A sharded model cannot
    do that; but the parameters that freeze with a layer are known by name, and names do not change.

    In a second training, for which the model is sharded already, the callback has kept the layers of the first one.

    Args:
        job: the training job, which has such a callback.
        dataloader: the loader of the training data; two samples are taken from it.

    Raises:
        UnsupportedModelError: no layers can be found.
    """
    if isinstance(job.model, FSDPModule):
        return
    rows, collate_fn = job.rows_of_loader(dataloader)
    probe = partial(_find_sharded, job, rows[:SAMPLE_ROWS], SampleCollator(job, collate_fn))
    job.freeze_callback.sharded_layers = found_by_each(job.mesh, True, probe)[0]


def _find_sharded(job: TrainingJob, rows: list[Any], collate: SampleCollator) -> FoundLayers:
    sample = collate(rows)
    with global_state_kept(), left_as_found(job.model):
        examples = first_that_runs(job, examples_of(job, sample), sample)
        inputs = examples.of(job.model, sample)
        stack = LayerStack.discover(job.model, inputs, examples.called, is_split=False)
        return FoundLayers(stack.describe(), FreezableLayers.of(stack, inputs))
