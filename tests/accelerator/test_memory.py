"""The device memory that a transformation and a checkpoint take, by the allocator of the tests' device."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import fake_device
import fake_groups
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from layouts import layout_of
from model_zoo import MODELS, without_dropout

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.model.nested import on_device
from hf_pipetransformer.pipeline import transfer
from hf_pipetransformer.pipeline.elastic_pipeline import ElasticPipeline
from hf_pipetransformer.pipeline.holders import holders_under
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.planning.costs import measure_costs
from hf_pipetransformer.planning.layout import Layout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CHUNK_BYTES = 2**14
ADAMW_COPIES = 3
"""A parameter and its two moments."""


@dataclass
class Memory:
    """Bytes on the device of one process at a transformation."""

    before: int
    after: int
    peak: int
    largest_flows: int

    @property
    def bound(self) -> int:
        """The bound that the docstring of `pipeline.transfer` names."""
        return max(self.before, self.after) + 2 * CHUNK_BYTES + self.largest_flows


class OnTheDevice:
    """A model on one fake device for each process, without DDP: gloo refuses DDP's reductions for this device."""

    def __init__(self, library: Path, world_size: int) -> None:
        fake_device.register(library)
        dist.init_process_group("gloo")
        fake_groups.register()
        transfer.CHUNK_BYTES = CHUNK_BYTES
        self.world_size = world_size
        device = torch.device("fake:0")
        sample = on_device(MODELS["bert-classification"].batch(2), device)
        self.model = without_dropout(MODELS["bert-classification"].build()).to(device)
        self.stack = LayerStack.discover(self.model, sample)
        self.costs = measure_costs(self.stack, sample)
        mesh = ProcessMesh(timedelta(seconds=60), device)
        unwrapped: Any = lambda stage, *_: stage  # noqa: E731
        self.pipeline = ElasticPipeline(self.stack, mesh, device, unwrapped)

    def plan(self, stages: int) -> Layout:
        options: dict[str, Any] = {"num_microbatches": 2} if stages > 1 else {}
        return layout_of(stages, self.world_size, self.costs, **options)

    def begin(self, stages: int) -> None:
        """Place the model, and let AdamW make its state."""
        self.pipeline.place(self.plan(stages))
        with self.pipeline.weights.as_on_one_process():
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.pipeline.attach_optimizer(optimizer)
        for parameter in self.pipeline.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    def transform(self, stages: int) -> Memory:
        rank, plan = self.pipeline.mesh.rank, self.plan(stages)
        holders = self.pipeline.weights.holders, holders_under(plan, self.stack)
        largest: dict[Any, int] = {}
        for name in self.stack.table.names:
            flow = holders[0][name], holders[1][name]
            if (rank in flow[0]) != (rank in flow[1]):
                largest[flow] = max(largest.get(flow, 0), ADAMW_COPIES * self.stack.table[name].nbytes)
        device: Any = torch.get_device_module("fake")
        before = device.memory_allocated()
        device.reset_peak_memory_stats()
        self.pipeline.transform(plan)
        peak = device.max_memory_allocated()
        return Memory(before, device.memory_allocated(), peak, sum(largest.values()))


def transform(rank: int, world_size: int, library: Path, stages: tuple[int, ...]) -> list[Memory]:
    case = OnTheDevice(library, world_size)
    case.begin(stages[0])
    seen = [case.transform(after) for after in stages[1:]]
    assert not fake_groups.wrong and not fake_device.errors
    return seen


def test_a_transformation_needs_no_more_memory_than_stated(library: Path) -> None:
    """Shrinking and growing, on four processes."""
    for seen in run_ranks(transform, 4, library, (2, 4, 1, 4), timeout=180):
        for memory in seen:
            print(memory, f"bound {memory.bound}")
            assert memory.peak <= memory.bound
