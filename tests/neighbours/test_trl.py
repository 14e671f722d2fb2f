"""TRL's trainers with our two classes put in: the losses of the stock trainer on one process."""

from __future__ import annotations

import logging
import math
import os
import random
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

pytestmark = [
    pytest.mark.slow,  # importing TRL takes seconds in every process
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed"),
]

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
WORDS = 60
SAMPLES, ROWS = 24, 8
FREEZING = {"freeze_policy": "schedule", "freeze_schedule": {1: 2}, "num_train_epochs": 4}
KINDS = {
    "sft": ("SFTTrainer", "SFTConfig"),
    "reward": ("RewardTrainer", "RewardConfig"),
    "dpo": ("DPOTrainer", "DPOConfig"),
    "kto": ("KTOTrainer", "KTOConfig"),
    "lora": ("DPOTrainer", "DPOConfig"),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_data(kind: str) -> Any:
    from datasets import Dataset

    draw = random.Random(0)

    def text(shortest: int, longest: int) -> str:
        return "".join(f" w{draw.randrange(WORDS)}" for _ in range(draw.randrange(shortest, longest)))

    def texts(shortest: int, longest: int) -> list[str]:
        return [text(shortest, longest) for _ in range(SAMPLES)]

    if kind == "sft":
        return Dataset.from_dict({"text": texts(4, 12)})
    if kind == "kto":
        labels = [i % 2 == 0 for i in range(SAMPLES)]
        return Dataset.from_dict({"prompt": texts(3, 5), "completion": texts(3, 7), "label": labels})
    return Dataset.from_dict({"prompt": texts(3, 5), "chosen": texts(3, 7), "rejected": texts(3, 7)})


def make_model(kind: str, folder: str) -> Any:
    """A reward model, or the policy in a folder, from where TRL loads the reference model."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, pad_token_id=0, eos_token_id=1, num_labels=1, **sizes)
    torch.manual_seed(0)
    if kind == "reward":
        return LlamaForSequenceClassification(config)
    if not os.path.isdir(folder):
        LlamaForCausalLM(config).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    if kind != "lora":
        return model
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def trainer_of(kind: str, world_size: int, ours: bool, policy: str, **options: Any) -> Any:
    import trl

    stock, stock_arguments = (getattr(trl, name) for name in KINDS[kind])
    trainer_class, arguments_class = stock, stock_arguments
    if ours:
        trainer_class = type("Mixed", (PipeTransformerTrainer, stock), {})
        arguments_class = dataclass(type("Arguments", (stock_arguments, PipeTransformerTrainingArguments), {}))
    arguments = arguments_class(
        **{
            "output_dir": str(Path(policy).parent / f"out-{kind}-{world_size}"),
            "per_device_train_batch_size": ROWS // world_size,
            "num_train_epochs": 2,
            "learning_rate": 1e-3,
            "adam_epsilon": 1e-3,  # a gradient that is zero but for rounding must not become a step
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            **options,
        }
    )
    return trainer_class(
        model=make_model(kind, policy),
        args=arguments,
        train_dataset=make_data(kind),
        processing_class=make_tokenizer(),
    )


def logs_of(
    rank: int, world_size: int, policy: str, runs: list[tuple[str, bool, dict[str, Any]]]
) -> list[list[dict[str, Any]]]:
    """The logs of several trainings, one after the other."""
    histories = []
    for kind, ours, options in runs:
        trainer = trainer_of(kind, world_size, ours, policy, **options)
        trainer.train()
        histories.append(trainer.state.log_history)
    return histories


def losses(history: list[dict[str, Any]]) -> list[float]:
    return [entry["loss"] for entry in history if "loss" in entry]


def test_losses_are_those_of_the_stock_trainer(tmp_path: Path) -> None:
    """With adapters ("lora"), the policy's checkpointed layers run again after the reference has turned them off."""
    policy = str(tmp_path / "policy")
    make_model("sft", policy)
    runs: list[Any] = [(kind, is_ours, {}) for is_ours in (False, True) for kind in KINDS]
    # to one length: a loss may read the padding of logits, so it is stored
    freezing = {**FREEZING, "pad_to_multiple_of": 32}
    runs += [(k, True, {**freezing, "activation_cache": c}) for k in ("sft", "reward", "dpo") for c in ("on", "off")]
    histories = logs_of(0, 1, policy, runs)
    stock = dict(zip(KINDS, histories, strict=False))
    for kind, history in zip(KINDS, histories[len(KINDS) :], strict=False):
        assert losses(history) == losses(stock[kind])
    frozen = histories[2 * len(KINDS) :]
    for cached, computed in zip(frozen[::2], frozen[1::2], strict=True):
        torch.testing.assert_close(losses(cached), losses(computed), rtol=0, atol=1e-5)
        assert max(entry.get("cache_hit_rate", 0.0) for entry in cached) == 1.0

    # KTO pairs completions for its KL term within `per_device_train_batch_size` rows, so it differs in two processes
    kinds = ("sft", "reward", "dpo", "lora")
    staged: list[Any] = [(k, True, {"pipeline_parallel_size": 2, "num_microbatches": 2}) for k in kinds]
    for kind, history in zip(kinds, run_ranks(logs_of, 2, policy, staged, timeout=250)[0], strict=True):
        torch.testing.assert_close(losses(history), losses(stock[kind]), rtol=0, atol=5e-5)
        expected, found = ([e for e in logs if "loss" in e] for logs in (stock[kind], history))
        for key in {key for entry in expected for key in entry if "rewards/" in key or "logps/" in key}:
            values = [[entry[key] for entry in entries] for entries in (found, expected)]
            torch.testing.assert_close(*values, rtol=0, atol=1e-4, msg=key)


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("dpo", "trainer.ref_model.model"),
        ("kto", "trainer.ref_model.model"),
        ("lora", "trainer.model.base_model.model.model"),  # TRL makes an adapter that is the reference
    ],
)
def test_the_reference_is_read(kind: str, module: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hf_pipetransformer")
    policy, epochs = str(tmp_path / "policy"), {"num_train_epochs": 3}
    make_model("sft", policy)
    stock, ours = logs_of(0, 1, policy, [(kind, False, epochs), (kind, True, {**epochs, "log_level": "info"})])
    assert losses(ours) == losses(stock)
    assert f"Frozen, and called by the loss: {module}. The output" in caplog.text
    (read,) = re.findall(rf"The output of {module} was read for (\d+) of", caplog.text)
    assert int(read) >= ROWS


def test_the_model_is_its_reference_in_stages(tmp_path: Path) -> None:
    """TRL's adapter `ref` on the base model: the last stage looks its outputs up."""
    policy, epochs = str(tmp_path / "policy"), {"num_train_epochs": 3}
    make_model("sft", policy)
    (stock,) = logs_of(0, 1, policy, [("lora", False, epochs)])
    staged = {**epochs, "pipeline_parallel_size": 2, "num_microbatches": 2}
    for ours, read in run_ranks(reading_logs_of, 2, policy, staged, timeout=250):
        torch.testing.assert_close(losses(ours), losses(stock), rtol=0, atol=5e-5)
        assert read is None or ROWS <= read <= 4 * SAMPLES


def reading_logs_of(rank: int, world_size: int, policy: str, options: dict[str, Any]) -> tuple[Any, int | None]:
    """The log of a training with adapters, and on the last stage the number of rows that were read."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hf_pipetransformer")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    (history,) = logs_of(rank, world_size, policy, [("lora", True, {**options, "log_level": "info"})])
    print("\n".join(lines))
    read = re.findall(r"output of trainer\.model\.base_model\.model\.model was read for (\d+) of", "\n".join(lines))
    return history, int(read[0]) if rank == 0 else None


def recipes(rank: int, world_size: int, folder: str) -> list[dict[str, float]]:
    import run_trl

    config = str(RECIPES / "configs" / "dpo_demo.yaml")
    few = ["--generated_data", "24", "--num_train_epochs", "1", "--per_device_train_batch_size", "4"]
    methods = ("sft", "reward", "dpo")
    return [run_trl.main([config, "--method", m, "--output_dir", f"{folder}/{m}", *few]) for m in methods]


def test_the_recipe(tmp_path: Path) -> None:
    for results in run_ranks(recipes, 2, str(tmp_path), timeout=250)[0]:
        assert results["eval_num_tokens"] > 0 and math.isfinite(results["eval_loss"])
