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
from training_data import PadCollator
from training_runs import Outcome, Run, assert_same_training, at_each_step, outcome_of, pipeline_trainer
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import UnsupportedModelError
from hf_pipetransformer.data.numbered_batches import first_samples
from hf_pipetransformer.model import placeholders
from hf_pipetransformer.model.layer_stack import LayerStack

Base = Literal["stand-in", "torchao"]
WORLD = 2
RUN = Run("causal-lm", model="llama", epochs=4, samples=64, accumulation=1, per_device=8)
FREEZING = {"freeze_policy": "schedule", "freeze_schedule": {1: 2}}


def require_torchao() -> None:
    """Skip the test, in its own process, without the libraries."""
    pytest.importorskip("peft")
    pytest.importorskip("torchao")


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
    """In this process: the stock Trainer's DDP, also that of one process, cannot send torchao's weights."""
    arguments = TrainingArguments(
        "stock", use_cpu=True, per_device_train_batch_size=WORLD * RUN.per_device, **RUN.common_options()
    )
    return outcome_of(
        Trainer(build(base), arguments, PadCollator(RUN.kind), train_dataset=RUN.data(RUN.samples))  # type: ignore[arg-type]
    )


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


def test_equals_one_process(tmp_path: Path) -> None:
    assert_as_one_process(run_ranks(trained, WORLD, "stand-in", 2, str(tmp_path)), "stand-in")


def test_frozen_layers_and_their_cache(tmp_path: Path) -> None:
    """Against one process without the cache."""
    require_torchao()
    (wanted,) = run_ranks(trained, 1, "torchao", 1, str(tmp_path / "one"), activation_cache="off", **FREEZING)
    outcomes = run_ranks(trained, WORLD, "torchao", 2, str(tmp_path), activation_cache="on", **FREEZING)
    assert_same_training(outcomes, wanted)
    assert all(outcome.notes["hits"] > 0 for outcome in outcomes)
    assert wanted.losses != expected("torchao").losses  # freezing makes a difference


def resumed(rank: int, world_size: int, folder: str) -> tuple[Outcome, list[Outcome]]:
    """What was trained in two stages, and what resumes its checkpoint in two and in one."""
    whole, others = trained(rank, world_size, "torchao", 2, folder, save_strategy="steps", save_steps=8), []
    for stages in (2, 1):
        trainer = pipeline_trainer(RUN, stages, folder, build("torchao"))
        others.append(outcome_of(trainer, f"{folder}/checkpoint-8"))
        others[-1].weights = {n: p for n, p in others[-1].weights.items() if type(p) is torch.Tensor}
    return whole, others


@pytest.mark.slow
def test_resumes_from_an_adapter_on_a_quantised_base(tmp_path: Path) -> None:
    require_torchao()
    for whole, others in run_ranks(resumed, WORLD, str(tmp_path)):
        assert_as_one_process([whole], "torchao")
        assert_same_training(others, whole)
    assert (tmp_path / "checkpoint-8" / "adapter_model.safetensors").is_file()


# ------------------------------------------------------------------------------------------ bitsandbytes' kind
class Int8Params(nn.Parameter):
    """A weight whose scales are an attribute."""

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


def with_one_stage(rank: int, world_size: int, folder: str) -> list[float]:
    run = replace(RUN, per_device=WORLD * RUN.per_device)
    trainer = pipeline_trainer(run, 1, folder, with_state(), **FREEZING)
    return outcome_of(trainer).losses


@pytest.mark.slow
def test_weights_with_a_state_of_their_own_can_freeze_with_one_stage(tmp_path: Path) -> None:
    (losses,) = run_ranks(with_one_stage, 1, str(tmp_path))
    (wanted,) = run_ranks(trained, 1, "stand-in", 1, str(tmp_path / "one"), activation_cache="off", **FREEZING)
    assert losses == pytest.approx(wanted.losses, abs=1e-5)


# ------------------------------------------------------------------------------------------ the pieces
def test_values_inside_a_wrapper() -> None:
    require_torchao()
    weight = build("torchao").base_model.model.model.layers[0].self_attn.q_proj.weight  # type: ignore[union-attr]
    assert placeholders.is_wrapper(weight) and not placeholders.can_have_gradient(weight)
    values = placeholders.values_of(weight)
    assert values[0].dtype == torch.int8 and values[0].shape == weight.shape
    assert placeholders.num_bytes(weight) == sum(v.nbytes for v in values) < weight.nbytes
    whole = weight.dequantize()
    again = placeholders.with_values(weight, iter([v.clone() for v in values]))
    placeholders.set_values(weight, [torch.zeros_like(v) for v in values])
    assert type(again) is type(weight) and torch.equal(again.dequantize(), whole)
    assert not weight.dequantize().any()
    placeholders.set_values(weight, values)
    assert torch.equal(weight.dequantize(), whole)


def test_units_that_lack_a_quantised_weight_are_noticed() -> None:
    """While the units are probed, weights that a unit should not need are NaN, also inside a wrapper."""
    require_torchao()
    model = build("torchao")
    stack = LayerStack.discover(model, dict(PadCollator(RUN.kind)(first_samples(RUN.data(2), 2))))
    name = next(n for n in stack.table.names if placeholders.is_wrapper(stack.table[n]))
    assert name in stack.owners[0] and not any(name in owned for owned in stack.owners[1:])
    before = stack.table[name].dequantize()
    with stack.table.replaced({name: placeholders.placeholder(stack.table[name], float("nan"))}):
        assert stack.table[name].dequantize().isnan().all()
    assert torch.equal(stack.table[name].dequantize(), before)
