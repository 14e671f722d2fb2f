"""What a process that ends does about its process groups."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from distributed import run_ranks

from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.resilience import exit as process_exit

HELD: list[SimpleNamespace] = []


def ends_its_groups(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    dist.init_process_group("gloo")
    mesh = ProcessMesh(timedelta(seconds=60))
    mesh.gather_objects(rank)
    holder = SimpleNamespace(mesh=mesh, group=mesh.groups(2).pipeline)  # as a trainer that the script holds
    HELD.append(holder)
    return process_exit.end(), dist.is_initialized(), holder.group is None and mesh.control is None


def test_groups_are_destroyed_and_let_go_of() -> None:
    assert run_ranks(ends_its_groups, 2) == [(True, False, True)] * 2


def ends_beside_a_stuck_peer(rank: int, world_size: int) -> float:
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    dist.barrier()
    if rank == 1:
        time.sleep(5)
        return 0.0
    work = dist.all_reduce(torch.ones(1), async_op=True)  # the other one never comes
    began = time.monotonic()
    process_exit.end(seconds=1)
    del work
    return time.monotonic() - began


def test_the_end_is_bounded_where_a_peer_is_stuck() -> None:
    assert run_ranks(ends_beside_a_stuck_peer, 2)[0] < 4
