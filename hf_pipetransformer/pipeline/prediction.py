"""Forward passes without gradients over the stages of one pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..model.layer_range import CalledWith
from ..model.left_as_found import left_as_found
from ..model.micro_batch import Batch, naming_long_rows
from ..randomness import generators_kept, seeded
from .messages import Crossing, Pending, PipelineMessages, wait_for
from .stage import as_carry
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
    are the micro-batches. In step t virtual stage i computes batch t - i, and then passes on what it has computed:

        K = 2, V = 2    stage 0   F0 F1 f0 f1
                        stage 1      F0 F1 f0 f1      (F, f: its first and its second virtual stage)

        V-shaped        stage 0   F0 F1       f0 f1
                        stage 1      F0 F1 f0 f1      (where the V turns, F1 and f0 are in one step)

    Args:
        held: what this process holds of several stages.
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


@torch.no_grad()
def outputs_of_frozen(
    held: VirtualStages, messages: PipelineMessages, batch: Batch, boundary: int, seed: int
) -> tuple[torch.Tensor, ...] | None:
    """Return the outputs of the first `boundary` units, all frozen, for a few samples in training mode.

    The model is left unchanged. Collective over the pipeline, as the units may be on several of its stages.

    Args:
        held: what this process holds.
        messages: sends to and receives from the other stages.
        batch: the model's inputs, on the device, the same on all stages.
        boundary: number of units to run.
        seed: seed of the random number generators.

    Returns:
        The tensors that are read above the boundary, on the stage that holds the last of these units; None on the
        others. What is not read is not sent either: which layout runs would decide about its values.
    """
    model, runner = held.stack.model, held.stack.runner
    for index, stage in zip(messages.virtual_stages, held.stages, strict=True):
        if stage.start >= boundary:
            return None
        values = messages.receive_values(index, stage.slots_in) if stage.start > 0 else []
        stop = min(stage.stop, boundary)
        with left_as_found(model), generators_kept(model), seeded(seed):
            model.train()
            reached = runner.run(stage.start, stop, as_carry(stage.slots_in, values), batch)
        if stop == boundary:
            if boundary == held.stack.num_units:
                return tuple(tensor for stack in sorted(reached) for tensor in reached[stack])
            read = [slot for slot in held.stack.boundaries[boundary] if slot.is_used]
            return tuple(reached[slot.stack][slot.position] for slot in read)
        outputs = [reached[slot.stack][slot.position] for slot in stage.slots_out]
        wait_for(messages.send_values(Crossing(index, stage.slots_out, outputs)))
    return None
