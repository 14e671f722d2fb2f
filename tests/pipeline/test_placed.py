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
from model_zoo import MODELS, without_dropout
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.model.micro_batch import Batch, slice_rows
from hf_pipetransformer.pipeline import sparse_embeddings
from hf_pipetransformer.pipeline.elastic_pipeline import ElasticPipeline
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.planning.costs import measure_costs
from hf_pipetransformer.planning.plan import PipelinePlan
from hf_pipetransformer.planning.plan_choice import make_plan

ROWS = 4


def loss_of(model: nn.Module, rows: Batch) -> torch.Tensor:
    return model(**rows).logits.square().mean() * (rows["input_ids"].shape[0] / ROWS)


def in_ddp(stage: nn.Module, group: dist.ProcessGroup, may_be_unused: bool) -> DistributedDataParallel:
    return DistributedDataParallel(stage, process_group=group, init_sync=False, find_unused_parameters=may_be_unused)


class Case:
    """A model, its pipeline on two processes, and its plans of two stages and of one."""

    def __init__(self, name: str = "bert-classification") -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        self.model = without_dropout(MODELS[name].build())
        sample = MODELS[name].batch(2)
        self.stack = LayerStack.discover(self.model, sample)
        self.costs = measure_costs(self.stack, sample)
        self.batch = MODELS[name].batch(ROWS)
        self.mesh = ProcessMesh(timedelta(seconds=60))
        self.pipeline = ElasticPipeline(self.stack, self.mesh, torch.device("cpu"), in_ddp)

    def plan(self, stages: int) -> PipelinePlan:
        options: dict[str, Any] = {"num_microbatches": 2} if stages > 1 else {}
        return make_plan(self.costs, 2, stages, rows_per_device=ROWS, memory_budget_bytes=None, **options)

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
        pipeline.step(pipeline.share(rows))
        assert pipeline.stage is not None
        return {name: gradient * pipeline.num_replicas for name, gradient in pipeline.stage.gradients().items()}


def assert_equal(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert gradients
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def from_plan_to_plan(rank: int, world_size: int) -> None:
    sparse_embeddings.LARGE = 1
    case = Case()
    pipeline, embeddings = case.pipeline, [m for m in case.model.modules() if isinstance(m, nn.Embedding)]
    expected = case.expected()
    pipeline.place(case.plan(2), loss_of)
    assert dict(pipeline.named_children()) == {"stage": pipeline.stage}
    assert any(module.sparse for module in embeddings) == (pipeline.stage_index == 0)
    assert_equal(case.step(), expected)
    pipeline.zero_grad()
    before = pipeline.placed
    old = [weakref.ref(part) for part in (before, before.messages, before.gradients)]
    del before
    gc.disable()  # a cycle would keep memory until someone collects it
    pipeline.transform(case.plan(1))
    assert [part() for part in old] == [None] * 3
    gc.enable()
    assert dict(pipeline.named_children()) == {"stage": pipeline.stage}
    assert not any(module.sparse for module in embeddings)
    assert_equal(case.step(), expected)
    pipeline.zero_grad()
    pipeline.gather(torch.device("cpu"))
    assert pipeline.placed is pipeline.plan is pipeline.stage is None and not list(pipeline.children())
    assert_equal(case.expected(), expected)


def test_nothing_of_a_plan_outlives_it() -> None:
    run_ranks(from_plan_to_plan, 2)


def buckets_of_replicas(rank: int, world_size: int) -> None:
    """From one stage with replicas to another plan, and at the end; somebody has kept DDP's wrapper."""
    case = Case()
    pipeline = case.pipeline
    pipeline.place(case.plan(1), loss_of)
    for leave in (lambda: pipeline.transform(case.plan(2)), lambda: pipeline.gather(torch.device("cpu"))):
        case.step()
        pipeline.zero_grad()
        assert pipeline.placed is not None and pipeline.placed.wrapped is not None
        wrapper, reducer = pipeline.placed.wrapped, weakref.ref(pipeline.placed.wrapped.reducer)
        gc.disable()
        leave()
        assert reducer() is None
        gc.enable()
        del wrapper
        if pipeline.is_placed:
            pipeline.transform(case.plan(1))


def test_the_buckets_of_ddp_go_with_the_plan() -> None:
    run_ranks(buckets_of_replicas, 2)


def sums_that_stay(rank: int, world_size: int) -> None:
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


def test_sums_over_stages_count_once_when_flags_change_between_two_passes() -> None:
    run_ranks(sums_that_stay, 2)


def evaluation(rank: int, world_size: int) -> None:
    """Placed without a loss: predictions there are, and a step is refused; a later training brings its loss."""
    case = Case()
    pipeline, expected = case.pipeline, case.expected()
    with torch.no_grad():
        logits = case.model.eval()(**case.batch).logits
    pipeline.place(case.plan(2), keep_weights_aside=True)
    pipeline.eval()
    with torch.no_grad():
        torch.testing.assert_close(pipeline(**case.batch).logits, logits)
    pipeline.put_back()
    pipeline.place(case.plan(2), loss_of)
    assert_equal(case.step(), expected)


def test_an_evaluation_needs_no_loss() -> None:
    run_ranks(evaluation, 2)


def failing_build(rank: int, world_size: int) -> None:
    case = Case()
    pipeline, expected = case.pipeline, case.expected()

    def fail(*_: Any) -> Any:
        raise ValueError("no DDP")

    pipeline._wrap_replicas = fail
    pipeline.place(case.plan(2), loss_of)
    with pytest.raises(ValueError, match="no DDP"):
        pipeline.transform(case.plan(1))
    assert pipeline.is_placed and pipeline.placed is None
    pipeline.gather(torch.device("cpu"))
    assert_equal(case.expected(), expected)


def test_the_model_can_be_made_whole_after_a_plan_that_could_not_be_built() -> None:
    run_ranks(failing_build, 2)
