"""Adapters (PEFT) in a pipeline: trained as on one process, frozen with their layers, saved as adapters."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import nn
from training_runs import (
    Outcome,
    Run,
    StopAfter,
    assert_same_training,
    freezing_reference,
    largest_difference,
    outcome_of,
    pipeline_trainer,
    weights_of,
)
from transformers import TrainerCallback

peft = pytest.importorskip("peft")

WORLD = 2
LORA = {
    "bert": (Run(epochs=3), {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}),
    "llama": (Run("causal-lm", model="llama", epochs=3), {"task_type": "CAUSAL_LM"}),
    # the first stage has no trained parameter
    "upper-layers": (Run(epochs=3), {"task_type": "SEQ_CLS", "target_modules": ["query"], "layers_to_transform": [3]}),
}
FREEZE_AT = {3: 1, 6: 2}  # steps done -> frozen layers


def build(name: str) -> nn.Module:
    """The same on every rank: adapters draw their weights, too, and both of their matrices."""
    run, options = LORA[name]
    base = run.build_model()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, init_lora_weights=False, **options)
        return peft.get_peft_model(base, config).train()


def one_process(rank: int, world_size: int, name: str, freezes: bool) -> Outcome:
    table = FREEZE_AT if freezes else {}
    return freezing_reference(rank, world_size, LORA[name][0], table, build(name), WORLD)


@cache
def expected(name: str, freezes: bool = False) -> Outcome:
    return run_ranks(one_process, 1, name, freezes)[0]


def in_pipeline(rank: int, world_size: int, name: str, folder: str) -> Outcome:
    trainer = pipeline_trainer(LORA[name][0], 2, folder, model=build(name))
    outcome = outcome_of(trainer)
    trainer.save_model()
    return outcome


def test_equals_one_process_and_saves_an_adapter_that_peft_loads(tmp_path: Path) -> None:
    """The file has only the adapter's weights; on the base model they give the trained model."""
    name = "llama"
    outcomes = run_ranks(in_pipeline, WORLD, name, str(tmp_path))
    assert_same_training(outcomes, expected(name))
    outcome = outcomes[0]
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert not list(tmp_path.glob("model*.safetensors"))
    loaded = peft.PeftModel.from_pretrained(LORA[name][0].build_model(), str(tmp_path), is_trainable=True)
    assert largest_difference(weights_of(loaded), outcome.weights)[0] == 0.0
    assert largest_difference(weights_of(build(name)), outcome.weights)[0] > 1e-3


def interrupted(rank: int, world_size: int, name: str, folder: str) -> list[Outcome]:
    """Stopped in two stages, and resumed in one and in two."""
    run, options = LORA[name][0], {"save_strategy": "steps", "save_steps": 2}
    trainer = pipeline_trainer(run, 2, folder, model=build(name), **options)
    trainer.add_callback(StopAfter(2))
    trainer.train()
    checkpoint = f"{folder}/checkpoint-2"
    return [outcome_of(pipeline_trainer(run, stages, folder, model=build(name)), checkpoint) for stages in (1, 2)]


@pytest.mark.slow
def test_resumes_from_an_adapter_checkpoint_in_another_layout(tmp_path: Path) -> None:
    for outcomes in run_ranks(interrupted, WORLD, "llama", str(tmp_path)):
        assert_same_training(outcomes, expected("llama"))
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").is_file()


def best_of_upper_layers(rank: int, world_size: int, folder: str) -> tuple[Outcome, Any]:
    """The worst model is loaded, as the best one may be the last."""
    each: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = pipeline_trainer(LORA["upper-layers"][0], 2, folder, model=build("upper-layers"), **each, **best)
    return outcome_of(trainer), trainer.state.best_model_checkpoint


@pytest.mark.slow
def test_the_best_adapter_is_loaded_at_the_end(tmp_path: Path) -> None:
    for outcome, best in run_ranks(best_of_upper_layers, WORLD, str(tmp_path)):
        assert outcome.losses == pytest.approx(expected("upper-layers").losses, abs=1e-4)
        base = LORA["upper-layers"][0].build_model()
        loaded = peft.PeftModel.from_pretrained(base, best, is_trainable=True)
        assert not best.endswith("checkpoint-8")
        assert largest_difference(weights_of(loaded), outcome.weights)[0] == 0.0


# ------------------------------------------------------------------------------------------ freezing
def frozen_on_the_way(rank: int, world_size: int) -> tuple[Outcome, list[str], list[Any]]:
    run = LORA["bert"][0].with_options(freeze_policy="schedule", freeze_strategy="steps", freeze_steps=1)
    trainer = pipeline_trainer(run, 2, model=build("bert"), freeze_schedule=FREEZE_AT, activation_cache="on")
    still_trained: list[str] = []

    class Note(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
            if state.global_step == 7:
                known = {id(p) for group in optimizer.param_groups for p in group["params"]}
                still_trained.extend(n for n, p in model.named_parameters() if id(p) in known and p.requires_grad)

    trainer.add_callback(Note())
    outcome = outcome_of(trainer)
    return outcome, still_trained, trainer.state.log_history


@pytest.mark.slow
def test_adapters_freeze_with_their_layers() -> None:
    """One layer after three steps, a second one after six; the pipeline shrinks, the weights are as expected."""
    results = run_ranks(frozen_on_the_way, WORLD)
    assert_same_training([outcome for outcome, *_ in results], expected("bert", freezes=True))
    trained = {parameter for _, names, _ in results for parameter in names}
    adapters = {layer for layer in range(4) for p in trained if f".{layer}." in p and "lora_" in p}
    assert adapters == {2, 3}
    for _, _, log in results:
        frozen = [entry["num_frozen_layers"] for entry in log if "transform_seconds" in entry]
        assert list(dict.fromkeys(frozen)) == [1, 2]  # with cached layers the measured times may ask for other stages
        assert sum(entry.get("cache_hit_rate", 0) + entry.get("cache_older_hit_rate", 0) for entry in log) > 0


def test_a_prompt_that_would_stop_with_the_first_layer_is_refused_by_name() -> None:
    """Frozen by hand, the base model's layers (which are frozen anyway) leave the prompt and the head to train."""
    run = Run(samples=16, epochs=2)
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)
    model = peft.get_peft_model(run.build_model(), config).train()
    options = {"freeze_policy": "schedule", "freeze_schedule": {1: 2}}
    trainer = pipeline_trainer(run, 1, model=model, use_cpu=True, **options)
    with pytest.raises(ValueError, match=r"'prompt_encoder\.default\.embedding\.weight'.*freeze_policy='none'"):
        trainer.train()
