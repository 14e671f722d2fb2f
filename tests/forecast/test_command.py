"""The command `plan`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from hf_pipetransformer.cli import app
from hf_pipetransformer.forecast import placeholder_model
from hf_pipetransformer.forecast.device_table import DEVICES, GIB
from hf_pipetransformer.pipeline.devices import USABLE_MEMORY

TRAINING = ("--devices", "4", "--batch", "64", "--seq", "128", "--epochs", "8")
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 50}


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def values(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    AutoConfig.for_model("bert", **TINY, num_hidden_layers=6).save_pretrained(folder)
    return str(folder)


def test_plan_prints_tables() -> None:
    result = run("bert", *TRAINING, "--samples", "6400")
    assert result.exit_code == 0
    out = result.stdout
    assert (
        "BertForSequenceClassification: 109,483,778 parameters, 12 layers; 4 devices, 64 samples × 128 tokens" in out
    )
    assert re.search(r"^1 +0 +0 +1 × 4 +1 +12 ", out, re.MULTILINE)
    assert "8 epochs of 100 steps: " in out
    assert "plain DDP" in out and "static pipeline" in out and "counted FLOPs alone" in out
    assert "Equal cost: plain training for " in out
    assert "\nAdvice\n- K = 1 throughout: " in out
    assert "this training is" in out and re.search(r"^static pipeline .* \d\.\d\d times as fast$", out, re.MULTILINE)
    assert "Assumed" not in out and "--verbose lists what is assumed" in out
    verbose = run("bert", *TRAINING, "--samples", "6400", "--verbose").stdout
    assert "\nAssumed\n- a100-80g: 312 TFLOP/s of which layers reach 45% (an estimate" in verbose
    assert max(map(len, out.split("\nAdvice")[0].splitlines())) < 160


def test_memory_is_counted_in_the_precision_of_the_weights(tmp_path: Path) -> None:
    """As the trainer trains them: it leaves weights in the dtype of the configuration, in which they are loaded."""
    largest = {}
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        config = AutoConfig.for_model("llama", **TINY, num_key_value_heads=2, num_hidden_layers=4, dtype=dtype)
        config.save_pretrained(tmp_path / name)
        loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / name))
        assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
        line = f"weights, gradients, AdamW's moments and activations in {name}"
        assert re.search(rf"^- {line}(,|$)", run(str(tmp_path / name), *TRAINING, "--verbose").stdout, re.MULTILINE)
        stages = values(str(tmp_path / name), *TRAINING, "--no-freeze")["epochs"][0]["stage_bytes"]
        largest[name] = max(stages)
    assert largest["bf16"] < 0.75 * largest["fp32"]


def test_plan_as_json() -> None:
    answer = values("bert", *TRAINING, "--efficiency", "0.3", "--num-microbatches", "4")
    assert set(answer) == {
        "model", "devices", "batch", "gradient_accumulation_steps", "samples", "steps_per_epoch",
        "memory_budget_bytes", "replica_sharding", "sharding_choice", "pipeline_schedule",
        "epochs", "seconds", "compared_with", "fsdp",
        "flop_bound", "fastest_plain", "plain_epochs_of_equal_cost", "cache", "advice", "assumed", "communicators",
    }  # fmt: skip
    assert answer["samples"] == 100_000
    for_stages = {1: 1, 2: 1 + 1 + 1, 4: 1 + 2}  # replicas; pipeline, replicas and one neighbour; pipeline and two
    assert answer["communicators"] == 1 + sum(for_stages[k] for k in {epoch["stages"] for epoch in answer["epochs"]})
    assert [epoch["num_frozen_layers"] for epoch in answer["epochs"]] == [0, 4, 7, 9, 10, 11, 11, 12]
    assert answer["memory_budget_bytes"] == int(DEVICES["a100-80g"].memory_bytes * USABLE_MEMORY)
    assert answer["seconds"] == pytest.approx(sum(epoch["seconds"] for epoch in answer["epochs"]))
    for epoch in answer["epochs"]:
        assert epoch["stages"] * epoch["replicas"] == 4
        assert len(epoch["stage_bytes"]) == len(epoch["receive_bytes"]) == epoch["stages"]
        assert all(r < s for r, s in zip(epoch["receive_bytes"], epoch["stage_bytes"], strict=True))
        assert sum(epoch["shares"].values()) == pytest.approx(1)
    assert set(answer["compared_with"]) == {"best_static_layout", "plain_DDP", "static_pipeline"}


def test_memory_decides_the_stages() -> None:
    """109 million parameters in fp32 with AdamW take 1.63 GiB before any activation."""
    bert = ("bert", "--devices", "4", "--batch", "4", "--seq", "16", "--epochs", "2", "--no-freeze")
    small, large = values(*bert, "--memory-gib", "1.2"), values(*bert, "--memory-gib", "8")
    assert small["epochs"][0]["stages"] > 1
    assert max(small["epochs"][0]["stage_bytes"]) <= small["memory_budget_bytes"] == int(1.2 * GIB * USABLE_MEMORY)
    ddp = small["compared_with"]["plain_DDP"]
    assert (ddp["fits"], ddp["seconds"], ddp["speed_up"]) == (False, None, None)
    assert 1.6 < ddp["largest_stage_bytes"] / GIB < 1.8
    assert "Plain DDP does not fit: K = 1 needs 1.6 GiB" in small["advice"][0]
    assert large["compared_with"]["plain_DDP"]["fits"]


def test_sharding_is_chosen_by_memory() -> None:
    """Weights, gradients and AdamW's moments take 1.63 GiB, 1.02 with three quarters of the moments elsewhere."""
    bert = ("bert", "--devices", "4", "--batch", "4", "--seq", "16", "--epochs", "2", "--no-freeze")
    for gib, sharding in (("8", "none"), ("1.2", "optimizer")):
        auto = values(*bert, "--memory-gib", gib, "--replica-sharding", "auto")
        assert auto["replica_sharding"] == sharding and auto["epochs"][0]["stages"] == 1
        assert f"Set replica_sharding={sharding!r}: the least sharding that fits." in auto["advice"][0]
        (chosen,) = (considered for considered in auto["sharding_choice"] if considered["chosen"])
        given = values(*bert, "--memory-gib", gib, "--replica-sharding", sharding)
        assert given["sharding_choice"] is None
        assert chosen["largest_stage_bytes"] == given["epochs"][0]["stage_bytes"][0] <= auto["memory_budget_bytes"]
        assert chosen["step_seconds"] == given["epochs"][0]["step_seconds"]
    accumulated = (*bert[:4], "8", *bert[5:], "--gradient-accumulation-steps", "2")
    out = run(*accumulated, "--memory-gib", "1.2", "--replica-sharding", "auto", "--verbose").stdout
    assert "(gradient_accumulation_steps=2, per_device_train_batch_size=1)" in out
    assert re.search(r"^sharding +K × R +GiB +step ms$", out, re.MULTILINE)
    assert re.search(r"^optimizer +1 × 4 +1\.\d +[\d.]+ +chosen$", out, re.MULTILINE)
    assert "the replicas of a stage divide the optimizer state, and exchange updated weights" in out
    assert "data parallelism with replica_sharding='optimizer' (pipeline_parallel_size=1)" in out


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_what_saves_memory(name: str, tmp_path: Path) -> None:
    """LoRA trains few of the weights, and checkpointing and bf16 keep fewer bytes for the backward."""
    pytest.importorskip("peft")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 4}
    AutoConfig.for_model(name, vocab_size=100, **sizes).save_pretrained(tmp_path)
    job = (str(tmp_path), "--devices", "2", "--batch", "32", "--seq", "64", "--epochs", "1", "--no-freeze")

    def first_epoch(*options: str) -> tuple[float, float]:
        epoch = values(*job, "--pipeline-parallel-size", "1", *options)["epochs"][0]
        return epoch["largest_stage_bytes"], epoch["step_seconds"]

    options: list[tuple[str, ...]] = [(), ("--lora-r", "4"), ("--gradient-checkpointing",), ("--bf16",)]
    plain, lora, checkpointed, half = (first_epoch(*each) for each in options)
    assert all(better[0] < plain[0] for better in (lora, checkpointed, half))
    assert lora[1] < plain[1] < checkpointed[1]
    said = run(*job, "--lora-r", "4", "--gradient-checkpointing", "--bf16", "--verbose").stdout
    assert "LoRA adapters of rank 4 are trained" in said and "bf16 by autocast" in said
    assert run(*job, "--lora-r", "0").exit_code == 2


def test_what_the_user_has_frozen(tiny: str, tmp_path: Path) -> None:
    """Six of twelve equal layers; everything under a head; a tower that text does not run."""
    alone = (*TRAINING[:1], "1", *TRAINING[2:], "--no-freeze")
    lower = [option for i in range(6) for option in ("--frozen-module", f"bert.encoder.layer.{i}")]
    layer = values("bert", *alone, *lower)["frozen_modules"]
    assert [step["what"] for step in layer] == ["nothing frozen", "computed", "read"]
    assert layer[0]["step_seconds"] > layer[1]["step_seconds"] > layer[2]["step_seconds"]
    assert 0.48 < layer[1]["forward_share"] <= 0.5
    two = values(tiny, *alone, "--frozen-module", "bert.embeddings", "--frozen-module", "bert.encoder")
    assert two["frozen_modules"][2]["forward_share"] > 0.9
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 16, "patch_size": 8, "model_type": "clip_vision_model"}
    text = {**sizes, "vocab_size": 99, "num_key_value_heads": 2, "model_type": "llama"}
    config = AutoConfig.for_model("llava", vision_config=vision, text_config=text, image_token_index=98)
    config.save_pretrained(tmp_path)
    out = run(str(tmp_path), *alone, "--frozen-module", "model.vision_tower").stdout
    assert re.search(r"^your frozen modules +of the forward +step ms +compared with computed$", out, re.MULTILINE)
    assert re.search(r"^computed +\d+\.\d% +[\d.]+ +1\.00 times as fast$", out, re.MULTILINE)


def test_a_schedule_of_ones_own_without_cache_or_compression(tiny: str) -> None:
    arguments = (tiny, *TRAINING, "--freeze-schedule", '{"2": 1, "4": 5}', "--pipeline-parallel-size", "2")
    answer = values(*arguments, "--no-elastic", "--no-cache")
    assert [epoch["num_frozen_layers"] for epoch in answer["epochs"]] == [0, 0, 1, 1, 5, 5, 5, 5]
    assert {epoch["stages"] for epoch in answer["epochs"]} == {2}
    assert {epoch["num_cached_layers"] for epoch in answer["epochs"]} == {0}
    assert answer["cache"]["off"] == "switched off"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--batch", "63"], 2, "batch is 63, but must be a multiple of the 4 devices. Set it to 60 or 64"),
        (
            ["--gradient-accumulation-steps", "3"],
            2,
            "the 4 devices times gradient_accumulation_steps=3. Set it to 60 or",
        ),
        (["--seq", "513"], 2, "seq is 513, but BertForSequenceClassification has 512 positions"),
        (["--device", "abacus"], 2, "device='abacus' is not in the device table, which contains v100-16g"),
        (["--alpha", "1"], 2, "freeze_alpha=1.0"),
        (["--freeze-schedule", "{1: 2}"], 2, "freeze_schedule='{1: 2}' is not valid JSON"),
        (["--freeze-schedule", '{"1": 99}'], 2, "freeze_schedule requests 99 frozen layers"),
        (["--pipeline-parallel-size", "3"], 2, "pipeline_parallel_size is 3, but must divide the world size 4"),
        (["--pipeline-parallel-size", "many"], 2, "pipeline_parallel_size='many' is invalid"),
        (["--memory-gib", "0.001"], 2, "no pipeline fits"),
        (["--efficiency", "45"], 2, "efficiency is 45.0, but must be above 0 and at most 1"),
        (["--task", "cooking"], 2, "--task is 'cooking'"),
        (
            ["--frozen-module", "vision"],
            2,
            "frozen_module is 'vision', which is no module of the model. It has 'bert'",
        ),
        (["--frozen-module", "bert", "--frozen-module", "bert.encoder"], 2, "'bert.encoder', which is in it"),
        (["--replica-sharding", "all"], 2, "replica_sharding is 'all', but must be one of 'none', 'optimizer'"),
        (["--replica-sharding", "auto", "--memory-gib", "0.0001"], 2, "is 'auto', but no pipeline fits"),
    ],
)
def test_errors_are_one_line(arguments: list[str], exit_code: int, message: str, tiny: str) -> None:
    result = run(tiny, *TRAINING, *arguments)
    assert result.exit_code == exit_code
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]


def test_unknown_and_unsupported_models() -> None:
    assert run("wav2vec2", *TRAINING).exit_code == 1
    result = run("bert", *TRAINING, "--task", "ctc")
    assert result.exit_code == 2 and "no ctc model for BertConfig" in result.stderr


def test_images_need_no_number_of_tokens() -> None:
    training = ("vit", "--devices", "2", "--batch", "8", "--epochs", "2", "--samples", "64")
    without = CliRunner().invoke(app, ["plan", *training])
    assert without.exit_code == 0 and "--seq does not matter" not in without.stdout
    given = CliRunner().invoke(app, ["plan", *training, "--seq", "99"])
    assert given.exit_code == 0 and "--seq does not matter for this model" in given.stdout
    text = CliRunner().invoke(app, ["plan", "bert", *training[1:]])
    assert text.exit_code == 2 and "seq is not given" in text.stderr


def test_adapters_on_the_upper_layers_alone(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", num_hidden_layers=8).save_pretrained(tmp_path)
    job = (str(tmp_path), "--devices", "2", "--batch", "16", "--seq", "512", "--lora-r", "8", "--no-freeze")
    several = values(*job, "--epochs", "6")
    upper = several["lora_on_upper_layers"]
    assert (upper["first_layer"], upper["layers"]) == (4, 8)
    assert upper["speed_up"] == pytest.approx(several["seconds"] / upper["seconds"]) and upper["speed_up"] > 1.3
    said = run(*job, "--epochs", "6").stdout
    assert f"predicted to be {upper['speed_up']:.2f} times as fast" in said and "list(range(4, 8))" in said
    assert (
        "eval_frozen_modules" not in said
        and "eval_frozen_modules=True" in run("bert", *job[1:], "--epochs", "6").stdout
    )
    assert values(*job, "--epochs", "6", "--no-cache")["lora_on_upper_layers"] is None
    assert values(*job, "--epochs", "1")["lora_on_upper_layers"]["speed_up"] < upper["speed_up"], "nothing is read"


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for a connection once, and its client, which tries for a minute, does not run."""
    asked: list[tuple[str, int]] = []

    def refuse(address: tuple[str, int], timeout: float) -> None:
        asked.append(address)
        raise OSError("Name or service not known")

    monkeypatch.setattr(placeholder_model, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(placeholder_model, "getproxies", dict)
    monkeypatch.setattr(placeholder_model.socket, "create_connection", refuse)
    result = run("some-org/some-model", *TRAINING)
    assert asked == [("huggingface.co", 443)] and result.exit_code == 2
    assert "has not been downloaded, and https://huggingface.co cannot be reached" in result.stderr
