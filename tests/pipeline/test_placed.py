"""What runs a plan goes with the plan; what lives as long as the model stays."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from layouts import layout_of
from model_zoo import MODELS, without_dropout
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.model.micro_batch import Batch, slice_rows
from hf_pipetransformer.pipeline.elastic_pipeline import ElasticPipeline
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.planning.costs import measure_costs
from hf_pipetransformer.planning.layout import Layout

ROWS = 4


def loss_of(model: nn.Module, rows: Batch) -> torch.Tensor:
    return model(**rows).logits.square().mean() * (rows["input_ids"].shape[0] / ROWS)


def in_ddp(stage: nn.Module, group: dist.ProcessGroup, may_be_unused: bool) -> DistributedDataParallel:
    return DistributedDataParallel(stage, process_group=group, init_sync=False, find_unused_parameters=may_be_unused)


class Case:
    """A model, its pipeline on two processes, and its plans of two stages and of one."""

    def __init__(self, name: str = "bert-classification") -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.model = without_dropout(MODELS[name].build())
        sample = MODELS[name].batch(2)
        self.stack = LayerStack.discover(self.model, sample)
        self.costs = measure_costs(self.stack, sample)
        self.batch = MODELS[name].batch(ROWS)
        self.mesh = ProcessMesh(timedelta(seconds=60))
        self.pipeline = ElasticPipeline(self.stack, self.mesh, torch.device("cpu"), in_ddp)

    def plan(self, stages: int) -> Layout:
        options: dict[str, Any] = {"num_microbatches": 2} if stages > 1 else {}
        return layout_of(stages, 2, self.costs, rows_per_device=ROWS, **options)

    def expected(self) -> dict[str, torch.Tensor]:
        """The gradients of the whole model and batch."""
        loss_of(self.model, self.batch).backward()
        gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return gradients

    def step(self) -> dict[str, torch.Tensor]:
        """The gradients of this process's stage."""
        pipeline, rows = self.pipeline, self.batch
        pipeline.train()
        if pipeline.num_replicas > 1:  # each has a half of the rows, and the replicas' gradients are averaged
            rows = slice_rows(rows, 2 * pipeline.replica_index, 2 * pipeline.replica_index + 2)
        pipeline.step(pipeline.running.messages.share(rows))
        assert pipeline.stage is not None
        return {name: gradient * pipeline.num_replicas for name, gradient in pipeline.stage.gradients().items()}


def assert_equal(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def from_plan_to_plan(rank: int, world_size: int) -> None:
    """From two stages to one with replicas and back, while somebody keeps DDP's wrapper; then nothing is left."""
    case = Case()
    pipeline = case.pipeline
    expected = case.expected()
    pipeline.place(case.plan(2), loss_of)
    for stages in (1, 2):
        assert_equal(case.step(), expected)
        pipeline.zero_grad()
        placed = pipeline.placed
        assert placed is not None
        wrapper, parts = placed.wrapped, [placed, placed.messages, placed.gradients]
        old = [weakref.ref(part) for part in (*parts, *([wrapper.reducer] if wrapper is not None else []))]
        del placed, parts
        gc.disable()  # a cycle would keep memory until someone collects it
        pipeline.transform(case.plan(stages))
        assert {part() for part in old} == {None}
        gc.enable()
        del wrapper
    assert dict(pipeline.named_children()) == {"stage": pipeline.stage}
    assert_equal(case.step(), expected)
    pipeline.zero_grad()

    def fail(*_: Any) -> Any:
        raise ValueError("no DDP")

    pipeline._wrap_replicas = fail  # a plan that cannot be built leaves a model that can be made whole
    with pytest.raises(ValueError, match="no DDP"):
        pipeline.transform(case.plan(1))
    assert pipeline.is_placed and pipeline.placed is None
    pipeline.gather(torch.device("cpu"))
    assert pipeline.placed is pipeline.plan is pipeline.stage is None and not list(pipeline.children())
    assert_equal(case.expected(), expected)
    sums_that_stay()


def sums_that_stay() -> None:
    """Shared parameters' gradients are sums over the stages, and go on accumulating when all is built anew."""
    case = Case("llama-tied")
    pipeline, once = case.pipeline, case.expected()
    pipeline.place(case.plan(2), loss_of)
    shared = set(case.stack.shared(pipeline.current_plan.stage_bounds))
    gradients = case.step()
    assert shared & set(gradients)
    assert_equal(gradients, once)
    pipeline.follow_flags()
    assert_equal(case.step(), {name: 2 * gradient for name, gradient in once.items()})
    whole = torch.stack([(2 * gradient).norm() for gradient in once.values()]).norm()
    torch.testing.assert_close(pipeline.clip_grad_norm(float("inf")), whole, rtol=1e-5, atol=0)


def test_nothing_of_a_plan_outlives_it_and_sums_do() -> None:
    run_ranks(from_plan_to_plan, 2)
