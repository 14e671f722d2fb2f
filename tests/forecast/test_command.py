"""The command `plan`: its output, and the refused arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from typer.testing import CliRunner

from hf_pipetransformer.cli import app
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
        "BertForSequenceClassification: 109,483,778 parameters, 12 layers; 4 devices (a100-80g), 64 samples × 128"
        in out
    )
    assert re.search(r"^1 +0 +0 +1 × 4 +1 +12 ", out, re.MULTILINE)
    assert "This training: 8 epochs of 100 steps, " in out
    assert re.search(r"^Counting FLOPs alone, this training would be \d\.\d\d× as fast as without", out, re.MULTILINE)
    assert re.search(r"^In the same time, \d\.\d epochs can be trained without freezing", out, re.MULTILINE)
    assert "\nAdvice\n- Use one stage throughout (pipeline_parallel_size=1), " in out
    assert max(map(len, out.split("\nAdvice")[0].splitlines())) < 160


@pytest.mark.slow
def test_the_comparison_says_which_training_is_faster(tiny: str) -> None:
    """Most devices of a pipeline of four stages wait: plain DDP is faster here."""
    arguments = (tiny, *TRAINING, "--no-freeze", "--pipeline-parallel-size", "4")
    plain = values(*arguments)["compared_with"]
    assert plain["plain_DDP"]["seconds"] < plain["static_pipeline"]["seconds"]
    assert plain["plain_DDP"]["speed_up"] < 1
    out = run(*arguments).stdout
    assert re.search(r"^without freezing +layout +M +GiB +time +this training is$", out, re.MULTILINE)
    slower = rf"{plain['plain_DDP']['speed_up']:.2f}× as fast \(slower\)"
    assert re.search(rf"^plain DDP +1 × 4 .* {slower}$", out, re.MULTILINE)
    assert re.search(r"^static pipeline +4 × 1 .* equally fast$", out, re.MULTILINE)
    frozen = run(tiny, *TRAINING, "--freeze-schedule", '{"1": 3}').stdout
    assert re.search(r"^plain DDP +1 × 4 .* 1\.\d\d× as fast$", frozen, re.MULTILINE)
    tight = run("bert", "--devices", "4", "--batch", "4", "--seq", "16", "--epochs", "2", "--memory-gib", "1.2").stdout
    assert re.search(r"^plain DDP +1 × 4 .* does not fit +-$", tight, re.MULTILINE)


@pytest.mark.slow
def test_only_the_main_assumptions_without_verbose(tiny: str) -> None:
    assumed = values(tiny, *TRAINING)["assumed"]
    assert len(assumed) > 10 and "an estimate" in assumed[0] and "fp32" in assumed[1]
    brief, full = (run(tiny, *TRAINING, *options).stdout for options in ((), ("--verbose",)))
    assert brief.endswith("\n- ".join(("\nAssumed (--verbose lists all assumptions)", *assumed[:2])) + "\n")
    assert full.endswith("\n- ".join(("\nAssumed", *assumed)) + "\n")
    assert brief.partition("\nAssumed")[0] == full.partition("\nAssumed")[0]


@pytest.mark.slow
def test_memory_is_counted_in_the_precision_of_the_weights(tmp_path: Path) -> None:
    """As in a training: weights are loaded in the dtype of the configuration, and stay in it."""
    largest = {}
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        config = AutoConfig.for_model("llama", **TINY, num_key_value_heads=2, num_hidden_layers=4, dtype=dtype)
        config.save_pretrained(tmp_path / name)
        loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / name))
        assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
        line = f"Weights, gradients, AdamW's moments and activations are in {name}"
        assert re.search(rf"^- {line}(,|\.$)", run(str(tmp_path / name), *TRAINING).stdout, re.MULTILINE)
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


@pytest.mark.slow
def test_memory_decides_the_stages() -> None:
    """109 million parameters in fp32 with AdamW take 1.63 GiB before any activation."""
    bert = ("bert", "--devices", "4", "--batch", "4", "--seq", "16", "--epochs", "2", "--no-freeze")
    small, large = values(*bert, "--memory-gib", "1.2"), values(*bert, "--memory-gib", "8")
    assert small["epochs"][0]["stages"] > 1
    assert max(small["epochs"][0]["stage_bytes"]) <= small["memory_budget_bytes"] == int(1.2 * GIB * USABLE_MEMORY)
    ddp = small["compared_with"]["plain_DDP"]
    assert (ddp["fits"], ddp["seconds"], ddp["speed_up"]) == (False, None, None)
    assert 1.6 < ddp["largest_stage_bytes"] / GIB < 1.8
    assert "Plain DDP does not fit: the whole model needs 1.6 GiB on each device" in small["advice"][0]
    assert large["compared_with"]["plain_DDP"]["fits"]


@pytest.mark.slow
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
    assert re.search(r"^replica_sharding +K × R +GiB +step ms$", out, re.MULTILINE)
    assert re.search(r"^optimizer +1 × 4 +1\.\d +[\d.]+ +chosen$", out, re.MULTILINE)
    assert "The replicas of a stage divide the optimizer state, and exchange updated weights" in out
    assert "(pipeline_parallel_size=1), which is data parallelism with replica_sharding='optimizer'" in out


@pytest.mark.slow
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
    assert "LoRA adapters of rank 4 and a new head, if any, are trained" in said and "autocast to bf16" in said
    assert run(*job, "--lora-r", "0").exit_code == 2


ADAPTED = ("--lora-r", "2", "--device", "l4-24g", "--efficiency", "0.0001", "--no-freeze")
"""On a device that computes so slowly that reading takes no time beside it."""


def test_lora_on_the_upper_layers_is_advised_where_it_pays(tiny: str) -> None:
    """What PEFT makes of the advice: adapters on the layers that are said, above layers that are frozen."""
    peft = pytest.importorskip("peft")
    answer = values(tiny, *TRAINING, *ADAPTED)
    upper = answer["lora_on_upper_layers"]
    assert (upper["layers_to_transform"], upper["freeze_schedule"]) == ([3, 4, 5], {"0": 3})
    # of a layer, a forward and a backward of one forward: 12 with all six, 9 in the first epoch of eight, then 6
    assert upper["speed_up"] == pytest.approx(8 * 12 / (9 + 7 * 6), rel=0.02)
    assert upper["seconds"] == pytest.approx(answer["seconds"] / upper["speed_up"])
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(tiny))
    options = {name: upper[name] for name in ("target_modules", "layers_to_transform")}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="SEQ_CLS", **options))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    layers = {int(found[1]) for name in trained if (found := re.search(r"layer\.(\d+)\.", name))}
    assert layers == {3, 4, 5} and not any("embeddings" in name for name in trained)
    (said,) = (sentence for sentence in answer["advice"] if "LoRA" in sentence)
    assert said.startswith(
        "Consider LoRA on the upper 3 of 6 layers only. From the second epoch on, the outputs of the"
    )
    assert f"Predicted: {upper['speed_up']:.2f} times as fast as this training" in said
    assert "target_modules=['query', 'value'] and layers_to_transform=list(range(3, 6)) in LoraConfig" in said
    assert "freeze_policy='schedule' and freeze_schedule={'0': 3}" in said
    assert said.endswith("Accuracy is not predicted.")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (*ADAPTED, "--no-cache"),
        (*ADAPTED, "--epochs", "1"),  # the first epoch reads no outputs
        (*ADAPTED, "--disk-gib", "0.001"),
        ("--lora-r", "2", "--no-freeze"),  # a layer of 32 numbers is computed as fast as it is read
        (*ADAPTED, "--task", "base"),  # all of it is the new head
        (*ADAPTED[:-1], "--freeze-schedule", '{"0": 3}'),  # is this training
    ],
)
def test_lora_on_the_upper_layers_is_not_advised(options: tuple[str, ...], tiny: str) -> None:
    pytest.importorskip("peft")
    answer = values(tiny, *TRAINING, *options)
    assert "lora_on_upper_layers" in answer
    assert not any("LoRA" in sentence for sentence in answer["advice"])


@pytest.mark.slow
def test_lora_in_an_encoder_decoder_is_numbered_otherwise(tmp_path: Path) -> None:
    """PEFT gives layer 1 of the encoder and layer 1 of the decoder one number."""
    pytest.importorskip("peft")
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 2, "decoder_layers": 2}
    AutoConfig.for_model("bart", vocab_size=99, **sizes).save_pretrained(tmp_path)
    assert values(str(tmp_path), *TRAINING, *ADAPTED)["lora_on_upper_layers"] is None


@pytest.mark.slow
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
    header = "your frozen modules +share of the forward +step ms +compared with computing them"
    assert re.search(rf"^{header}$", out, re.MULTILINE)
    assert re.search(r"^trained, not frozen +0\.0% +[\d.]+ +0\.\d\d× as fast \(slower\)$", out, re.MULTILINE)
    assert re.search(r"^frozen, computed +\d+\.\d% +[\d.]+ +-$", out, re.MULTILINE)


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
        (["--replica-sharding", "all"], 2, "is 'all', but must be one of 'none', 'optimizer', 'auto'"),
        (["--pipeline-schedule", "dual"], 2, "pipeline_schedule is 'dual', but must be one of '1f1b', 'gpipe'"),
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


@pytest.mark.slow
def test_images_need_no_number_of_tokens() -> None:
    training = ("vit", "--devices", "2", "--batch", "8", "--epochs", "2", "--samples", "64")
    without = CliRunner().invoke(app, ["plan", *training])
    assert without.exit_code == 0 and "--seq" not in without.stdout.replace("--seq tokens", "")
    given = CliRunner().invoke(app, ["plan", *training, "--seq", "99"])
    assert given.exit_code == 0 and "Leave out --seq: samples of this model have the size" in given.stdout
    text = CliRunner().invoke(app, ["plan", "bert", *training[1:]])
    assert text.exit_code == 2 and "seq is not given" in text.stderr
