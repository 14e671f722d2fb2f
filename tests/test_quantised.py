"""Adapters on quantised weights: in stages, with frozen layers and their cache, they train as in one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from distributed import run_ranks, run_ranks_expecting_error
from quantised import Int8Linear, stand_in_model, torchao_model
from torch import nn
from training_runs import (
    Outcome,
    Run,
    assert_same_training,
    at_each_step,
    outcome_of,
    pipeline_trainer,
    reference_trainer,
)

from hf_pipetransformer import UnsupportedModelError
from hf_pipetransformer.model import placeholders

Base = Literal["stand-in", "torchao"]
WORLD = 2
RUN = Run("causal-lm", model="llama", epochs=4, samples=64, accumulation=1, per_device=8)
FREEZING = {"freeze_policy": "schedule", "freeze_schedule": {1: 2}}


def build(base: Base) -> nn.Module:
    """The same on every rank."""
    model = RUN.build_model()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if base == "stand-in":
            return stand_in_model(model)
        return torchao_model(model, task_type="CAUSAL_LM", init_lora_weights=False)


@cache
def expected(base: Base) -> Outcome:
    """In this process: the stock Trainer's DDP cannot send torchao's weights, not even in one process."""
    return outcome_of(reference_trainer(replace(RUN, per_device=4), model=build(base)))


def bytes_of(model: nn.Module) -> int:
    """What its weights take in memory; a placeholder takes one element."""
    return sum(v.untyped_storage().nbytes() for p in model.parameters() for v in placeholders.values_of(p))


def trained(rank: int, world_size: int, base: Base, stages: int, folder: str, **options: Any) -> Outcome:
    run = replace(RUN, per_device=WORLD * RUN.per_device // world_size)
    trainer = pipeline_trainer(run, stages, folder, build(base), **options)
    whole = bytes_of(trainer.model)
    shares: list[float] = []
    at_each_step(trainer, after=lambda run: shares.append(bytes_of(trainer.model) / whole))
    outcome = outcome_of(trainer)
    assert bytes_of(trainer.model) == whole
    hits = sum(entry.get("cache_hit_rate", 0.0) for entry in trainer.state.log_history)
    outcome.notes = {"hits": hits, "shares": shares}
    outcome.weights = {n: p for n, p in outcome.weights.items() if type(p) is torch.Tensor}  # the others rest
    trainer.save_model()
    return outcome


def assert_as_one_process(outcomes: list[Outcome], base: Base) -> None:
    wanted = expected(base)
    trained_ones = {name: weight for name, weight in wanted.weights.items() if name in outcomes[0].weights}
    assert len(trained_ones) > 20
    assert_same_training(outcomes, replace(wanted, weights=trained_ones))
    assert all(max(outcome.notes["shares"]) < 0.8 for outcome in outcomes)


@pytest.mark.slow
def test_equals_one_process(tmp_path: Path) -> None:
    assert_as_one_process(run_ranks(trained, WORLD, "stand-in", 2, str(tmp_path)), "stand-in")


def test_frozen_layers_and_their_cache(tmp_path: Path) -> None:
    """Against one process without the cache."""
    pytest.importorskip("peft")
    pytest.importorskip("torchao")
    (wanted,) = run_ranks(trained, 1, "torchao", 1, str(tmp_path / "one"), activation_cache="off", **FREEZING)
    outcomes = run_ranks(trained, WORLD, "torchao", 2, str(tmp_path), activation_cache="on", **FREEZING)
    assert_same_training(outcomes, wanted)
    assert all(outcome.notes["hits"] > 0 for outcome in outcomes)
    assert wanted.losses != expected("torchao").losses  # freezing makes a difference


# ------------------------------------------------------------------------------------------ bitsandbytes' kind
class Int8Params(nn.Parameter):
    """A weight with its scales in an attribute."""

    scale: torch.Tensor


def with_state() -> nn.Module:
    model = build("stand-in")
    module: Any = next(m for m in model.modules() if isinstance(m, Int8Linear))
    weight = Int8Params(module.weight.data, requires_grad=False)
    weight.scale = module.scale
    module.weight = weight
    return model


def refused(rank: int, world_size: int, folder: str) -> None:
    trainer = pipeline_trainer(RUN, 2, folder, with_state())
    at_each_step(trainer, before=lambda run: pytest.fail("a step has begun"))
    trainer.train()


def test_weights_with_a_state_of_their_own_are_refused_with_several_stages(tmp_path: Path) -> None:
    for error in run_ranks_expecting_error(refused, WORLD, str(tmp_path)):
        assert isinstance(error, UnsupportedModelError)
        assert "is a Int8Params: its weights are quantized" in str(error)
