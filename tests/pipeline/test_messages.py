"""What is sent from stage to stage arrives as it was."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from distributed import run_ranks
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_pipetransformer.model.layer_stack import CarrySlot
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.pipeline.messages import Crossing, PipelineMessages, wait_for
from hf_pipetransformer.planning.placement import Placement


class Pair(NamedTuple):
    left: torch.Tensor
    right: str


def messages_of(rank: int, world_size: int) -> PipelineMessages:
    dist.init_process_group("gloo")
    groups = ProcessMesh(timedelta(seconds=60)).groups(world_size)
    ranks, placement = range(world_size)[::-1], Placement(world_size)
    stage = placement.position_of(rank)
    return PipelineMessages(ranks, stage, groups.pipeline, groups.pipeline_control, torch.device("cpu"), placement)


def trees(rank: int, world_size: int) -> None:
    messages = messages_of(rank, world_size)
    states = (torch.arange(6).view(2, 3), torch.zeros(0, 4, dtype=torch.bfloat16))
    output = SequenceClassifierOutput(logits=torch.ones(2, 2).t(), hidden_states=states)
    sent = {"output": output, "pair": Pair(torch.tensor(2.5), "right"), "rest": [None, 3, [torch.tensor([True])]]}
    if messages.stage_index == messages.last:
        wait_for(messages.send_tree(sent, 0))
    elif messages.stage_index == 0:
        arrived = messages.receive_tree(messages.last)
        assert type(arrived["output"]) is SequenceClassifierOutput and type(arrived["pair"]) is Pair
        assert arrived["pair"].right == "right" and arrived["rest"][:2] == [None, 3]
        torch.testing.assert_close(arrived["output"].to_tuple(), output.to_tuple(), rtol=0, atol=0)
        torch.testing.assert_close(arrived["pair"].left, sent["pair"].left)
        assert arrived["rest"][2][0].tolist() == [True]


def test_trees_keep_their_types() -> None:
    run_ranks(trees, 3)


def values(rank: int, world_size: int) -> None:
    """Stage k hands its number on; what nobody uses does not travel."""
    messages = messages_of(rank, world_size)
    stage = messages.stage_index
    slots = [CarrySlot(0, 0, True, True), CarrySlot(0, 1, False, False)]
    if stage > 0:
        used, unused = messages.receive_values(stage, slots)
        assert used.tolist() == [stage - 1.0] * 2 and unused.tolist() == [0] * stage
    if stage < messages.last:
        sent = [torch.full((2,), float(stage)), torch.ones(stage + 1, dtype=torch.long)]
        wait_for(messages.send_values(Crossing(stage, slots, sent)))
    assert messages.of_each_stage(rank) == [2, 1, 0]
    assert messages.largest(torch.tensor([rank, -rank])).tolist() == [2, 0]
    assert (messages.previous_rank, messages.next_rank) == ((1, None), (2, 0), (None, 1))[rank]


def test_values_at_the_boundaries() -> None:
    run_ranks(values, 3)
