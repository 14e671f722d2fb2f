"""Adapters (PEFT) in a pipeline: trained as on one process, frozen with their layers, saved as adapters."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from safetensors.torch import load_file
from selection import slow
from torch import nn
from training_data import PadCollator
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
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import LayerFreezeCallback

peft = pytest.importorskip("peft")

WORLD = 2
LORA = {
    "bert": (Run(epochs=3), {"task_type": "SEQ_CLS", "target_modules": ["query", "value"]}),
    "llama": (Run("causal-lm", model="llama", epochs=3), {"task_type": "CAUSAL_LM"}),
    # nothing to train in the first stage
    "upper-layers": (
        Run(epochs=3),
        {"task_type": "SEQ_CLS", "target_modules": ["query", "value"], "layers_to_transform": [3]},
    ),
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


def one_process(rank: int, world_size: int, name: str, table: dict[int, int]) -> Outcome:
    """The stock Trainer; `table` says after how many steps how many layers freeze."""
    return freezing_reference(rank, world_size, LORA[name][0], table, build(name), WORLD)


@cache
def expected(name: str, freezes: bool = False) -> Outcome:
    return run_ranks(one_process, 1, name, FREEZE_AT if freezes else {})[0]


def in_pipeline(rank: int, world_size: int, name: str, folder: str) -> Outcome:
    trainer = pipeline_trainer(LORA[name][0], 2, folder, model=build(name))
    outcome = outcome_of(trainer)
    trainer.save_model()
    return outcome


@pytest.mark.parametrize("name", ["llama", *slow("upper-layers")])
def test_equals_one_process_and_saves_an_adapter_that_peft_loads(name: str, tmp_path: Path) -> None:
    """The adapter's weights and nothing else are in the file; on the base model they are the trained model."""
    outcomes = run_ranks(in_pipeline, WORLD, name, str(tmp_path))
    assert_same_training(outcomes, expected(name))
    outcome = outcomes[0]
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert not list(tmp_path.glob("model*.safetensors"))
    loaded = peft.PeftModel.from_pretrained(LORA[name][0].build_model(), str(tmp_path), is_trainable=True)
    assert largest_difference(weights_of(loaded), outcome.weights)[0] == 0.0
    assert largest_difference(weights_of(build(name)), outcome.weights)[0] > 1e-3


def saved_in_training(rank: int, world_size: int, folder: str) -> tuple[set[str], int]:
    """A checkpoint of two stages: the names in the adapter's file, and the values that were sent for it."""
    run, _ = LORA["llama"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lora = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}  # the whole head is in the file, too
        config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **lora)
        model = peft.get_peft_model(run.build_model(), config).train()
    trainer = pipeline_trainer(run, 2, folder, model=model, save_strategy="steps", save_steps=2)
    sent = 0
    stock, save_model = dist.batch_isend_irecv, trainer.save_model

    def counting(operations: list[dist.P2POp]) -> Any:
        nonlocal sent
        sent += sum(operation.tensor.nbytes // 4 for operation in operations if operation.op is dist.isend)
        return stock(operations)

    def counted(*args: Any, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "batch_isend_irecv", counting)
            save_model(*args, **options)

    trainer.save_model = counted
    trainer.add_callback(StopAfter(2))
    trainer.train()
    file = load_file(f"{folder}/checkpoint-2/adapter_model.safetensors")
    assert all(bool(value.isfinite().all()) for value in file.values())
    return set(file), sent


def test_base_model_stays_where_it_is_when_adapters_are_saved(tmp_path: Path) -> None:
    (names, nothing), (_, sent) = run_ranks(saved_in_training, WORLD, str(tmp_path))
    run, _ = LORA["llama"]
    config = run.build_model().config
    layers, width = config.num_hidden_layers, config.hidden_size
    head = config.vocab_size * width
    expected = layers // 2 * 4 * (width + width)
    assert nothing == 0 and any("lm_head" in key for key in names)
    # PEFT may add the embeddings, so those of the first stage are sent, also where they are not in the file; the head,
    # and a trained copy of it, are on rank 0
    assert sent == expected + head


def adapters_only(rank: int, world_size: int, folder: str) -> None:
    """`state_dict` is replaced on the model, as scripts for older versions of PEFT do; its keys are PEFT's."""
    model = build("llama")
    original = model.state_dict

    def state_dict(*_: Any, **__: Any) -> dict[str, torch.Tensor]:
        return dict(peft.get_peft_model_state_dict(model, original()))

    model.state_dict = state_dict  # type: ignore[method-assign]
    trainer = pipeline_trainer(LORA["llama"][0], 2, folder, model=model, save_strategy="steps", save_steps=2)
    trainer.add_callback(StopAfter(2))
    trainer.train()


def test_a_state_dict_of_the_user_is_saved_with_its_values(tmp_path: Path) -> None:
    run_ranks(adapters_only, WORLD, str(tmp_path))
    file = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    assert len(file) == 16
    assert all(bool(value.isfinite().all()) for value in file.values())


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


def with_best_model(rank: int, world_size: int, folder: str) -> tuple[str, dict[str, torch.Tensor]]:
    trainer = pipeline_trainer(
        LORA["bert"][0],
        2,
        folder,
        model=build("bert"),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the worst, so that it is not the last
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    return trainer.state.best_model_checkpoint, weights_of(trainer.model)


@pytest.mark.slow
def test_best_adapter_is_loaded_at_the_end(tmp_path: Path) -> None:
    for best, weights in run_ranks(with_best_model, WORLD, str(tmp_path)):
        loaded = peft.PeftModel.from_pretrained(LORA["bert"][0].build_model(), best, is_trainable=True)
        assert not best.endswith("checkpoint-8")
        assert largest_difference(weights_of(loaded), weights)[0] == 0.0


# ------------------------------------------------------------------------------------------ freezing
def frozen_on_the_way(rank: int, world_size: int) -> tuple[Outcome, list[str], list[Any]]:
    run, _ = LORA["bert"]
    trainer = pipeline_trainer(
        run,
        2,
        model=build("bert"),
        freeze_policy="schedule",
        freeze_strategy="steps",
        freeze_steps=1,
        freeze_schedule=FREEZE_AT,
        activation_cache="on",
    )
    still_trained: list[str] = []

    class Note(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
            if state.global_step == 7:
                known = {id(p) for group in optimizer.param_groups for p in group["params"]}
                still_trained.extend(n for n, p in model.named_parameters() if id(p) in known and p.requires_grad)

    trainer.add_callback(Note())
    outcome = outcome_of(trainer)
    return outcome, still_trained, trainer.state.log_history


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


PROMPTS = {
    "prompt": peft.PromptTuningConfig,
    "encoded-prompt": partial(peft.PromptEncoderConfig, encoder_hidden_size=8),
}


@pytest.mark.parametrize(("name", "is_plain"), [("prompt", False), ("prompt", True), ("encoded-prompt", False)])
def test_a_prompt_that_would_stop_with_the_first_layer_is_refused_by_name(name: str, is_plain: bool) -> None:
    """Frozen by hand, the base model's layers (which are frozen anyway) leave the prompt and the head to train."""
    run = Run(samples=16, epochs=2)
    model = peft.get_peft_model(run.build_model(), PROMPTS[name](task_type="SEQ_CLS", num_virtual_tokens=4)).train()
    if is_plain:
        callback = LayerFreezeCallback({"name": "schedule", "schedule": {1: 2}})
        arguments = TrainingArguments("plain", use_cpu=True, **run.common_options())
        data = {"train_dataset": run.data(16), "data_collator": PadCollator(run.kind)}
        trainer = Trainer(model, arguments, callbacks=[callback], **data)
    else:
        options = {"freeze_policy": "schedule", "freeze_schedule": {1: 2}}
        trainer = pipeline_trainer(run, 1, model=model, use_cpu=True, **options)
    with pytest.raises(ValueError, match=r"'prompt_encoder\.default\.embedding\.weight'.*freeze_policy='none'"):
        trainer.train()
