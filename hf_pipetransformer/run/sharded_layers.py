"""Finds the layers of a model that FSDP is about to shard, so that they can be frozen while it trains.

    train()    layers are found, on process 0     FSDP2 shards the model     each step gathers a layer where it runs

Layers are found by running them one at a time, with parameters exchanged for placeholders. A sharded model cannot do
that; but which parameters freeze with which layer is known by name, and names stay what they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed.fsdp import FSDPModule

from ..freezing.plain_trainer import FoundLayers
from ..model.frozen_prefix import FreezableLayers
from ..model.layer_stack import LayerStack
from ..model.left_as_found import left_as_found
from ..randomness import global_state_kept
from .calls_of_loss import how_called, inputs_of
from .cutting import SAMPLE_ROWS
from .job import TrainingJob
from .probed_once import found_by_each
from .samples import SampleCollator


def find_layers_to_freeze(job: TrainingJob, dataloader: Any) -> None:
    """Tell the trainer's freeze callback the layers of a model that FSDP2 will shard. Collective over all processes.

    Nothing is done without such a callback. In a second training, for which the model is sharded already, the callback
    has kept what it was told in the first.

    Args:
        job: the training job.
        dataloader: the loader of the training data, of which two samples are taken.

    Raises:
        UnsupportedModelError: no layers can be found.
    """
    callback = job.freeze_callback
    if callback is None or isinstance(job.model, FSDPModule):
        return
    rows, collate_fn = job.rows_of_loader(dataloader)
    probe = partial(_find, job, rows[:SAMPLE_ROWS], job.collator(collate_fn))
    callback.sharded_layers = found_by_each(job.mesh, True, probe)[0]


def _find(job: TrainingJob, rows: list[Any], collate: SampleCollator) -> FoundLayers:
    sample = collate(rows)
    with global_state_kept(), left_as_found(job.model):
        called = how_called(job, sample)
        inputs = inputs_of(job, called, sample)
        stack = LayerStack.discover(job.model, inputs, called)
        return FoundLayers(stack.describe(), FreezableLayers.of(stack, inputs))
