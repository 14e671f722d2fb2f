"""Forward passes without gradients over the stages of one pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..model.layer_range import CalledWith
from ..model.micro_batch import Batch, naming_long_rows
from .messages import Crossing, Pending, PipelineMessages, wait_for
from .virtual_stages import VirtualStages


@torch.no_grad()
def predict(
    held: VirtualStages,
    messages: PipelineMessages,
    batches: Sequence[tuple[Batch, CalledWith]],
    head: Callable[[Batch], Any],
) -> Any:
    """Return the last stage's outputs for this process's own batch. Collective over the pipeline.

    Each process brings its own samples, of any shape, and gets its own results back: the batches of the K processes
    are the micro-batches. In step t virtual stage i computes batch t - i, and then passes its outputs on:

        K = 2, V = 2    stage 0   F0 F1 f0 f1
                        stage 1      F0 F1 f0 f1      (F, f: its first and its second virtual stage)

        V-shaped        stage 0   F0 F1       f0 f1
                        stage 1      F0 F1 f0 f1      (where the V turns, F1 and f0 are in one step)

    Args:
        held: this process's virtual stages, if there are several stages.
        messages: sends to and receives from the other stages.
        batches: the batch of each stage's process, in the order of stages, as that process has prepared it, and how
            `head` will call the model on it.
        head: runs the model on a batch on the last stage, and returns nested mappings, lists and tuples of tensors.
    """
    pending: Pending = []
    results: list[Any] = []
    k, indices = messages.num_stages, messages.virtual_stages
    arrived: dict[int, list[torch.Tensor]] = {}  # by virtual stage
    for step in range(messages.placement.last + k):
        outgoing: list[Crossing] = []
        for index, stage in zip(indices, held.stages, strict=True):
            if not 0 <= step - index < k:
                continue
            (rows, called), values = batches[step - index], arrived.pop(index, [])
            with naming_long_rows(stage.stack.model, rows), stage.stack.runner.calling_with(called):
                if not stage.is_last:
                    outgoing.append(Crossing(index, stage.slots_out, stage.carry_on(values, rows)))
                else:
                    with stage.running_to_the_end(values, rows) as inputs:
                        results.append(head(inputs))
        following = [
            (index, stage.slots_in)
            for index, stage in zip(indices, held.stages, strict=True)
            if index > 0 and 0 <= step + 1 - index < k
        ]
        sending, received = messages.exchange(outgoing, [Crossing(index - 1, slots) for index, slots in following])
        arrived.update(zip((index for index, _ in following), received, strict=True))
        pending += sending
    # not earlier: gloo's send waits for its receiver, and until now all stages were busy passing batches on
    mine = messages.scatter(results)
    wait_for(pending)
    return mine
