"""Optimizers that compute one value of all gradients are found, the others pass, and nothing real changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import nn
from training_runs import Run, pipeline_trainer

from hf_pipetransformer.run.optimizer_probe import probe_coupling


class Sgd(torch.optim.Optimizer):
    """Decoupled, and of nobody's package."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["momentum"] = state.get("momentum", torch.zeros_like(p)) * 0.9 + p.grad + _noise(p)
                    p.sub_(group["lr"] * state["momentum"])


def _noise(p: torch.Tensor) -> torch.Tensor:
    """As stochastic rounding draws."""
    return torch.rand_like(p) * 1e-3


class ClipsInside(Sgd):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 50.0)
        super().step()


class ProdigyLike(Sgd):
    """One step size for all, estimated from how far the parameters have come."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        d = self.param_groups[0].setdefault("d", 1e-6)
        numerator, denominator = 0.0, 1e-12
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            state.setdefault("start", p.clone())
            state["s"] = state.get("s", torch.zeros_like(p)) + d * p.grad
            numerator += d * float((p.grad * (state["start"] - p)).sum())
            denominator += float(state["s"].abs().sum())
        self.param_groups[0]["d"] = d = max(d, numerator / denominator)
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(d * p.grad.sign())


class NeedsClosure(Sgd):
    def step(self, closure: Any = None) -> None:
        closure()


MAKERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str | None]] = {
    "sgd": (Sgd, None),
    "adamw": (torch.optim.AdamW, None),
    "clips": (ClipsInside, "gradients of other parameters"),
    "prodigy": (ProdigyLike, "gradients of other parameters"),
    "closure": (NeedsClosure, "updates each parameter independently failed"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_coupling_is_found_without_a_trace(name: str) -> None:
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    make, expected = MAKERS[name]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = make([{"params": decayed}, {"params": others}])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    units = {id(p): number for number, layer in enumerate(model) for p in layer.parameters()}
    before = [p.detach().clone() for p in model.parameters()]
    random_state = torch.get_rng_state()
    found = probe_coupling(optimizer, units)
    assert (found is None) if expected is None else (expected in str(found))
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(random_state, torch.get_rng_state()) and not optimizer.state
    assert all("d" not in group for group in optimizer.param_groups)


def coupled(rank: int, world_size: int) -> list[str]:
    """Given as an optimizer, and as a class."""
    refused = []
    for is_users in (True, False):
        run = Run(samples=16, epochs=1)
        model = run.build_model()
        trainer = pipeline_trainer(run, 2, model=model)
        if is_users:
            trainer.optimizer = ClipsInside(model.parameters())
        else:
            trainer.optimizer_cls_and_kwargs = (ClipsInside, {})
        with pytest.raises(ValueError, match="pipeline_parallel_size=1") as error:
            trainer.train()
        refused.append(str(error.value))
    return refused


def test_coupled_optimizers_are_refused_by_name_on_all_stages() -> None:
    for refused in run_ranks(coupled, 2, timeout=60):
        assert all("ClipsInside" in message for message in refused)
