"""Values that one stage sends to others arrive as they are, whatever their size."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from distributed import run_ranks

from hf_pipetransformer.pipeline.messages import FIRST_ROOM, PipelineMessages
from hf_pipetransformer.pipeline.packed import ALIGNMENT, packed, unpacked
from hf_pipetransformer.planning.placement import Placement

STAGES = 2
CPU = torch.device("cpu")


def values() -> list[Any]:
    """Contents around the size of a first message, and kinds of tensors."""
    around = [FIRST_ROOM + more for more in range(-3 * ALIGNMENT, 2 * ALIGNMENT, ALIGNMENT // 2)]
    tensors = [torch.tensor(3), torch.zeros(0), torch.ones(3, dtype=torch.bool), torch.ones(5).bfloat16()]
    tensors.append(torch.arange(9000))
    return [None, {}, *(bytes(size) for size in around), *tensors, {"of": tensors, "at": torch.arange(6).view(2, 3).T}]


def exchange(rank: int, world_size: int) -> list[tuple[Any, Any]]:
    """What this process has got by `share` and, on the second stage, by `send_tree`."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    messages = PipelineMessages(range(STAGES), rank, dist.group.WORLD, dist.group.WORLD, CPU, Placement(STAGES))
    shared = [messages.share(value if rank == 0 else None, 0) for value in values()]
    pending = [messages.send_tree(value, 1) for value in values()] if rank == 0 else []
    sent = [messages.receive_tree(0) if rank == 1 else value for value in values()]
    for one in pending:
        for work, _ in one:
            work.wait()
    return list(zip(shared, sent, strict=True))


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert one == other


def test_values_arrive_whatever_their_size() -> None:
    torch.manual_seed(0)
    expected = values()
    sizes = {packed(value, CPU).content.numel() for value in expected}
    assert min(sizes) < FIRST_ROOM < max(sizes) and FIRST_ROOM in sizes
    for ranks in run_ranks(exchange, STAGES):
        for value, (shared, sent) in zip(expected, ranks, strict=True):
            assert_equal(value, shared)
            assert_equal(value, sent)


def test_two_empty_tensors_stay_two() -> None:
    one, other = unpacked(packed([torch.zeros(0), torch.zeros(0)], CPU))
    assert one is not other
