"""Optimizers that compute one value of all gradients are refused with several stages, and others train."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import nn
from training_runs import Run, pipeline_trainer


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
    """Random numbers as stochastic rounding draws them."""
    return torch.rand_like(p) * 1e-3


class ClipsInside(Sgd):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 50.0)
        super().step()


class KeyedByNumbers(Sgd):
    """As PEFT's LoRA-FA, whose state has the parameters' names as keys."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            self.state[f"number {number}"] = {"last": p.clone()}


class Counts(Sgd):
    """As MADGRAD, which counts its steps in a tensor of `state`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["k"] = torch.tensor([int(self.state.get("k", 0)) + 1])


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], str | None]] = {
    "decoupled": (Sgd, None),
    "counts": (Counts, None),
    "clips": (ClipsInside, "gradients of other parameters"),
    "keyed": (KeyedByNumbers, "under other keys than the parameters ('number 0')"),
}


def train(rank: int, world_size: int) -> dict[tuple[str, bool], str | None]:
    """Pass each optimizer as an object and as a class; return the reasons of the refusals."""
    refused: dict[tuple[str, bool], str | None] = {}
    for name, is_users in itertools.product(OPTIMIZERS, (True, False)):
        kind, _ = OPTIMIZERS[name]
        run = Run(samples=16, epochs=1)
        model = run.build_model()
        trainer = pipeline_trainer(run, 2, model=model)
        if is_users:
            trainer.optimizer = kind(model.parameters())
        else:
            trainer.optimizer_cls_and_kwargs = (kind, {})
        try:
            trainer.train()
            refused[name, is_users] = None
        except ValueError as error:
            refused[name, is_users] = str(error)
    return refused


@pytest.mark.slow
def test_coupled_optimizers_are_refused_by_name_on_all_stages() -> None:
    first, second = run_ranks(train, 2, timeout=60)
    assert first == second
    for (name, _), message in first.items():
        kind, words = OPTIMIZERS[name]
        if words is None:
            assert message is None
        else:
            assert message and all(part in message for part in (kind.__name__, words, "pipeline_parallel_size=1"))
