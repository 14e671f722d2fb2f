"""Who belongs to whose group, how long groups wait, and what the control group carries."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.pipeline.chunks import as_bytes
from hf_pipetransformer.pipeline.mesh import ProcessMesh

TIMEOUT = timedelta(seconds=77)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)

# K -> for each rank of four: its pipeline, its replicas (None: alone)
GROUPS = {
    1: [(None, [0, 1, 2, 3])] * 4,
    2: [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])],
    4: [([0, 1, 2, 3], None)] * 4,
}


def make_mesh() -> ProcessMesh:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return ProcessMesh(TIMEOUT)


def members(group):
    return None if group is None else dist.get_process_group_ranks(group)


def describe_groups(rank, world_size):
    mesh = make_mesh()
    described = {}
    for stages in (1, 2, 4):
        groups = mesh.groups(stages)
        assert mesh.groups(stages) is groups, "made once"
        assert members(groups.pipeline) == members(groups.pipeline_control)
        described[stages] = (members(groups.pipeline), members(groups.replicas))
    shared = mesh.subgroup([[0, 3], [1], [2]])
    return described, members(mesh.control), members(shared)


def timeouts(rank, world_size):
    """Of all groups but the default one, as each one's backend has it."""
    mesh = make_mesh()
    for stages in (1, 2, 4):
        mesh.groups(stages)
    mesh.subgroup([[0, 3], [1, 2]])
    return [
        group._get_backend(torch.device("cpu")).options._timeout
        for group in dist.distributed_c10d._world.pg_map
        if group is not dist.group.WORLD
    ]


def samples(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randn(3, 5, generator=generator).mul(9).to(dtype) for dtype in DTYPES]
    return [*tensors, torch.tensor(float(rank)), torch.empty(0, 4), tensors[0].t()]


def exchange(rank, world_size):
    """Rank 1's tensors go to all, then rank r's to rank r + 1."""
    mesh = make_mesh()
    everywhere = [mesh.broadcast_tensor(t.clone(memory_format=torch.contiguous_format), 1) for t in samples(rank)]
    assert all(torch.equal(a, b) for a, b in zip(everywhere, samples(1), strict=True))
    if rank > 0:
        like = [t.to("meta") for t in samples(rank - 1)]
        received = mesh.receive_from(like, rank - 1)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(received, samples(rank - 1), strict=True))
    if rank < world_size - 1:
        mesh.send_to([t.requires_grad_(t.is_floating_point()) for t in samples(rank)], rank + 1)
    return mesh.gather_objects({"rank": rank})


def test_groups_of_every_layout():
    for rank, (groups, control, shared) in enumerate(run_ranks(describe_groups, 4)):
        assert groups == {stages: GROUPS[stages][rank] for stages in GROUPS}
        assert control == [0, 1, 2, 3]
        assert shared == ([0, 3] if rank in (0, 3) else None)


def test_every_group_has_the_given_timeout():
    for found in run_ranks(timeouts, 4):
        assert len(found) >= 5
        assert set(found) == {TIMEOUT}


def test_tensors_of_every_dtype_travel():
    everyone = run_ranks(exchange, 3)
    assert everyone == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_one_process_needs_no_group():
    mesh = ProcessMesh(TIMEOUT)
    assert (mesh.world_size, mesh.rank, mesh.control) == (1, 0, None)
    groups = mesh.groups(1)
    assert (groups.pipeline, groups.pipeline_control, groups.replicas) == (None, None, None)
    tensor = torch.ones(2)
    assert mesh.broadcast_tensor(tensor, 0) is tensor
    assert mesh.gather_objects(3) == [3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_a_view(dtype):
    tensor = torch.zeros(2, 3, dtype=dtype)
    as_bytes(tensor).fill_(1)
    assert tensor.bool().all()
    assert as_bytes(torch.tensor(1, dtype=dtype)).numel() == dtype.itemsize


def fails_on_one(rank, world_size, error):
    mesh = make_mesh()
    try:
        with mesh.failing_together():
            if rank == 1:
                raise error
    except (ValueError, KeyError, RuntimeError) as raised:
        return type(raised), str(raised)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("a reason"), [(ValueError, "a reason")] * 3),
        (KeyError("x"), [(PeerFailedError, "rank 1 failed: KeyError: 'x'"), (KeyError, "'x'")]),
    ],
)
def test_an_error_of_one_is_raised_by_all(error, expected):
    assert run_ranks(fails_on_one, 3, error)[:2] == expected[:2]


class OwnError(ValueError):
    """An error of a user's, which pickle cannot make again."""

    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")


def fails_with_own_error(rank, world_size):
    mesh = make_mesh()
    try:
        with mesh.failing_together():
            if rank == 1:
                raise OwnError("labels", "none")
    except ValueError as raised:
        return type(raised).__name__, str(raised)


def test_an_error_that_cannot_be_sent_is_raised_by_its_message():
    assert run_ranks(fails_with_own_error, 2) == [("ValueError", "labels: none"), ("OwnError", "labels: none")]
