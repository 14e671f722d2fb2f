"""Process groups of every layout, how long they wait, what the control group carries, and errors on all ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from distributed import run_ranks

from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.pipeline import mesh as mesh_module
from hf_pipetransformer.pipeline.mesh import ProcessMesh

TIMEOUT = timedelta(seconds=77)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


class OwnError(ValueError):
    """An error of a user's, which pickle cannot make again."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def samples(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(3, 5, generator=generator).mul(9).to(dtype) for dtype in DTYPES]
    return [*tensors, torch.tensor(float(rank)), torch.empty(0, 4), tensors[0].t()]


def raised_by(mesh: ProcessMesh, error: Exception) -> tuple[type, str]:
    """What this rank raises where rank 1 does."""
    try:
        with mesh.failing_together():
            if mesh.rank == 1:
                raise error
    except Exception as raised:
        return type(raised), str(raised)
    raise AssertionError("nothing was raised")


def lengths_of(rank: int) -> int:
    return (5, 70_000, 0, 3000)[rank]


def use(rank: int, world_size: int) -> dict[str, Any]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = ProcessMesh(TIMEOUT)
    for stages in (1, 2, 4):
        mesh.groups(stages)
    mesh.subgroup([[0, 3], [1, 2]])
    found = {
        group._get_backend(torch.device("cpu")).options._timeout
        for group in dist.distributed_c10d._world.pg_map
        if group is not dist.group.WORLD
    }
    # rank 1's tensors go to all
    everywhere = [mesh.broadcast_tensor(t.clone(memory_format=torch.contiguous_format), 1) for t in samples(rank)]
    assert all(torch.equal(a, b) for a, b in zip(everywhere, samples(1), strict=True))
    with mock.patch.object(mesh_module, "EVEN", 1):  # as with many processes
        uneven = [len(text) for text in mesh.gather_objects("x" * lengths_of(rank))]
    return {
        "timeouts": found,
        "ranks": mesh.gather_objects(rank),
        "uneven": uneven,
        "first": mesh.of_first("of 0" if rank == 0 else object()),
        "equal": (mesh.are_equal({"a": 1}), mesh.are_equal({"a": rank == 3})),
        "refusal": raised_by(mesh, ValueError("a reason")),
        "failure": raised_by(mesh, KeyError("x")),
        "own": raised_by(mesh, OwnError("labels", "none")),
    }


def test_a_world_of_four() -> None:
    for rank, seen in enumerate(run_ranks(use, 4)):
        assert seen["timeouts"] == {TIMEOUT} and seen["ranks"] == [0, 1, 2, 3]
        assert seen["uneven"] == [lengths_of(r) for r in range(4)], "some are longer than others"
        assert (seen["first"], seen["equal"]) == ("of 0", (True, False))
        assert seen["refusal"] == (ValueError, "a reason"), "an error of the user's is raised by all"
        failed = (KeyError, "'x'") if rank == 1 else (PeerFailedError, "rank 1 failed: KeyError: 'x'")
        assert seen["failure"] == failed
        assert seen["own"] == (OwnError if rank == 1 else ValueError, "labels: none")


def test_one_process_needs_no_group() -> None:
    mesh = ProcessMesh(TIMEOUT)
    groups = mesh.groups(1)
    assert (groups.pipeline, groups.pipeline_control, groups.replicas) == (None, None, None)
    tensor = torch.ones(2)
    assert mesh.broadcast_tensor(tensor, 0) is tensor and mesh.gather_objects(3) == [3]
