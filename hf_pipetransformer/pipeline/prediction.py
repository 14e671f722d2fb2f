"""Forward passes without gradients over the stages of one pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..model.layer_range import CalledWith
from ..model.left_as_found import left_as_found
from ..model.micro_batch import Batch, naming_long_rows
from ..randomness import generators_kept, seeded
from .messages import Pending, PipelineMessages, wait_for
from .stage import StageModule, as_carry


@torch.no_grad()
def predict(
    stage: StageModule,
    messages: PipelineMessages,
    batches: Sequence[tuple[Batch, CalledWith]],
    head: Callable[[Batch], Any],
) -> Any:
    """Return the last stage's outputs for this process's own batch. Collective over the pipeline.

    Each process brings its own samples, of any shape, and gets its own results back: the batches of the K processes
    are the micro-batches.

    Args:
        stage: this process's stage, one of several.
        messages: sends to and receives from the other stages.
        batches: the batch of each stage's process, in the order of stages, as that process has prepared it, and how
            `head` will call the model on it.
        head: runs the model on a batch on the last stage, and returns nested mappings, lists and tuples of tensors.
    """
    pending: Pending = []
    results: list[Any] = []
    for rows, called in batches:
        values = messages.receive_values(stage.slots_in) if stage.start > 0 else []
        with naming_long_rows(stage.stack.model, rows), stage.stack.runner.calling_with(called):
            if not stage.is_last:
                pending += messages.send_values(stage.slots_out, stage.carry_on(values, rows))
            else:
                with stage.running_to_the_end(values, rows) as inputs:
                    results.append(head(inputs))
    # not earlier: gloo's send waits for its receiver, and until now all stages were busy passing batches on
    if not stage.is_last:
        mine = messages.receive_tree(messages.last)
    else:
        mine = results.pop()
        for owner, result in enumerate(results):
            pending += messages.send_tree(result, owner)
    wait_for(pending)
    return mine


@torch.no_grad()
def outputs_of_frozen(
    stage: StageModule, messages: PipelineMessages, batch: Batch, boundary: int, seed: int
) -> tuple[torch.Tensor, ...] | None:
    """Return the outputs of the first `boundary` units, all frozen, for a few samples in training mode.

    The model is left unchanged. Collective over the pipeline, as the units may be on several of its stages.

    Args:
        stage: this process's stage.
        messages: sends to and receives from the other stages.
        batch: the model's inputs, on the device, the same on all stages.
        boundary: number of units to run.
        seed: seed of the random number generators.

    Returns:
        All tensors that cross the boundary, on the stage that holds the last of these units; None on the others.
    """
    if stage.start >= boundary:
        return None
    values = messages.receive_values(stage.slots_in) if stage.start > 0 else []
    stop = min(stage.stop, boundary)
    model, runner = stage.stack.model, stage.stack.runner
    with left_as_found(model), generators_kept(model), seeded(seed):
        model.train()
        reached = runner.run(stage.start, stop, as_carry(stage.slots_in, values), batch)
    if stop == boundary:
        return tuple(tensor for stack in sorted(reached) for tensor in reached[stack])
    outputs = [reached[slot.stack][slot.position] for slot in stage.slots_out]
    wait_for(messages.send_values(stage.slots_out, outputs))
    return None
