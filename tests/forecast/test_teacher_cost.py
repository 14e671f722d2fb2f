"""The predicted cost of a frozen teacher, beside the bytes and FLOPs of a training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from called_runs import SAMPLES, WIDTH, WORDS, Case, Distills, classifier, frozen, language_model, trained
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig
from typer.testing import CliRunner

from hf_pipetransformer.cli import app
from hf_pipetransformer.forecast.advice import HARDLY_FASTER
from hf_pipetransformer.forecast.placeholder_model import build_placeholder_model
from hf_pipetransformer.forecast.teacher_cost import measure_teacher
from hf_pipetransformer.planning.costs import UNKNOWN_TO_TORCH

TRAINING = ("--devices", "2", "--batch", "8", "--seq", "64", "--epochs", "4", "--samples", "1000", "--no-freeze")
SLOW = ("--device", "l4-24g", "--efficiency", "0.0001")
"""A device that computes so slowly that reading takes no time beside it."""


def rows(is_causal: bool) -> list[dict[str, Any]]:
    """Rows of equal length, as a forecast assumes."""
    ids = torch.randint(2, WORDS, (SAMPLES, WIDTH), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row if is_causal else int(row[0]) % 3} for row in ids]


def placeholders(model: Any) -> Any:
    return build_placeholder_model(model.config, type(model))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_sample_takes_the_predicted_bytes(is_causal: bool, tmp_path: Path) -> None:
    """A classifier's logits, or a language model's last hidden state, take the predicted bytes exactly."""
    make = language_model if is_causal else classifier
    teacher: Any = make(4)
    cost = measure_teacher(placeholders(teacher), WIDTH)
    logits = WIDTH * teacher.config.vocab_size if is_causal else 3
    assert cost.output_bytes == 4 * (WIDTH * teacher.config.hidden_size if is_causal else logits)
    assert cost.output_bytes < 4 * logits or not is_causal
    case = Case(Distills, lambda: make(2), lambda: frozen(make(4)), lambda: rows(is_causal))
    result = trained(tmp_path, case, activation_cache_dir=str(tmp_path / "store"), activation_cache="on")
    assert result.num_read > 0
    files = [file for kind in ("segment-*", "index-*") for file in (tmp_path / "store").rglob(kind)]
    assert sum(file.stat().st_size for file in files) == SAMPLES * cost.sample_bytes


@pytest.mark.parametrize("make", [classifier, language_model])
@pytest.mark.parametrize("tokens", [WIDTH, 100])
def test_flops_are_those_of_the_teacher(make: Any, tokens: int) -> None:
    teacher = frozen(make(3))
    cost = measure_teacher(placeholders(teacher), tokens)
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH) as counter:
        teacher(input_ids=torch.ones(1, tokens, dtype=torch.long), attention_mask=torch.ones(1, tokens))
    assert cost.forward_flops == pytest.approx(counter.get_total_flops(), rel=1e-6)
    assert cost.num_layers == 3


def test_a_head_that_is_most_of_the_teacher_is_stored() -> None:
    """The logits are stored if running the head again takes nearly as long as running all."""
    deep, shallow = (measure_teacher(placeholders(language_model(layers)), WIDTH) for layers in (4, 1))
    assert (deep.stored, deep.head) == (("model",), "lm_head") and 0 < deep.head_flops < deep.forward_flops / 2
    assert shallow.head == "" and shallow.stored == ("model", "lm_head")
    assert shallow.output_bytes == 4 * WIDTH * 10 * WORDS


def test_autocast_changes_what_is_stored(tmp_path: Path) -> None:
    """As in a forward under autocast: logits of a linear layer are in 16 bits, normed states in 32."""
    for make in (classifier, language_model):
        teacher: Any = frozen(make(4))
        parts = {"": teacher, "model": getattr(teacher, "model", None)}
        cost = measure_teacher(placeholders(teacher), WIDTH, autocasts=True)
        part: nn.Module = parts[cost.stored[-1]]
        found: list[Any] = []
        part.register_forward_hook(lambda module, args, output, found=found: found.append(output[0]))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            teacher(input_ids=torch.ones(1, WIDTH, dtype=torch.long), attention_mask=torch.ones(1, WIDTH))
        assert cost.output_bytes == found[0].nbytes


# ------------------------------------------------------------------------------------ the command
def plan(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The folders of a student with two layers, and of a teacher with eight."""
    folders = [tmp_path_factory.mktemp(f"layers{layers}") for layers in (2, 8)]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100}
    for folder, layers in zip(folders, (2, 8), strict=True):
        AutoConfig.for_model("bert", num_hidden_layers=layers, **sizes).save_pretrained(folder)
    return str(folders[0]), str(folders[1])


def test_epochs_with_a_teacher(names: tuple[str, str]) -> None:
    student, teacher = names
    found = plan(student, *TRAINING, *SLOW, "--teacher", teacher, "--json")
    taught = found["teacher"]
    # eight layers forward, two layers forward and backward: 8 to 6 but for the classifiers
    assert taught["flops_share"] == pytest.approx(8 / (8 + 6), rel=0.01)
    assert (taught["off"], taught["stored"], taught["head"]) == (None, [""], None)
    assert taught["node_bytes"] == 1000 * taught["sample_bytes"] and taught["stored_share"] == 1
    first, *others = taught["epochs"]
    assert len(others) == 3 and first["read_seconds"] == first["computed_seconds"] > first["student_seconds"]
    for epoch, step in zip(taught["epochs"], found["epochs"], strict=True):
        assert epoch["student_seconds"] == step["seconds"]
        assert epoch["computed_seconds"] == first["computed_seconds"]
    assert all(epoch["student_seconds"] < epoch["read_seconds"] < epoch["computed_seconds"] for epoch in others)
    # reading is nearly free on this device: 14 in the first epoch, 6 in three others
    assert taught["speed_up"] == pytest.approx(4 * 14 / (14 + 3 * 6), rel=0.02)
    assert taught["computed_seconds"] == pytest.approx(sum(epoch["computed_seconds"] for epoch in taught["epochs"]))
    alone = plan(student, *TRAINING, *SLOW, "--json")
    assert "teacher" not in alone and alone["epochs"] == found["epochs"]


def test_a_limit_of_the_cache(names: tuple[str, str]) -> None:
    """Samples that do not fit are computed in each epoch."""
    student, teacher = names
    whole = plan(student, *TRAINING, *SLOW, "--teacher", teacher, "--json")["teacher"]
    half = str(whole["node_bytes"] / 2 / 2**30)
    limited = (student, *TRAINING, *SLOW, "--teacher", teacher, "--activation-cache-max-gib", half)
    taught = plan(*limited, "--json")["teacher"]
    assert taught["stored_share"] == pytest.approx(0.5) and taught["limit_bytes"] == pytest.approx(
        whole["node_bytes"] / 2
    )
    for epoch, of_whole in list(zip(taught["epochs"], whole["epochs"], strict=True))[1:]:
        middle = (of_whole["read_seconds"] + of_whole["computed_seconds"]) / 2
        assert epoch["read_seconds"] == pytest.approx(middle)
    assert "The outputs of the teacher fit for 50% of the samples. For all, set" in plan(*limited)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--no-cache",), "switched off"),
        (("--epochs", "1"), "nothing is read in the first epoch"),
        (("--efficiency", "1", "--device", "h100-80g", "--batch", "8192"), "reading takes"),
    ],
)
def test_when_nothing_is_read(names: tuple[str, str], options: tuple[str, ...], why: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 8, "num_attention_heads": 1, "head_dim": 8, "vocab_size": 2000}
    AutoConfig.for_model("llama", num_hidden_layers=1, **sizes).save_pretrained(tmp_path)
    teacher = str(tmp_path) if why == "reading takes" else names[1]
    arguments = (names[0], *TRAINING, *options, "--teacher", teacher)
    taught = plan(*arguments, "--json")["teacher"]
    assert why in taught["off"] and taught["speed_up"] == 1
    assert all(epoch["read_seconds"] == epoch["computed_seconds"] for epoch in taught["epochs"])
    out = plan(*arguments)
    assert f"- The outputs of the teacher are not read: {why}" in out and "read from epoch 2 on" not in out


def test_the_table_of_a_teacher(names: tuple[str, str]) -> None:
    student, teacher = names
    out = plan(student, *TRAINING, *SLOW, "--teacher", teacher, "--disk-gib", "100")
    assert re.search(r"^Teacher: BertForSequenceClassification, [\d,]+ parameters \(0\.0 GiB\), 57% of the", out, re.M)
    assert re.search(r"^teacher +epoch 1 +epoch 2 +epoch 3 +4 epochs$", out, re.MULTILINE)
    assert re.search(r"^computed in each epoch( +[\d.]+ \w+){4} +-$", out, re.MULTILINE)
    assert re.search(r"^read from epoch 2 on( +[\d.]+ \w+){4} +1\.\d\d× as fast$", out, re.MULTILINE)
    assert "\nStored for each sample: 72 bytes (the output of the teacher).\nOn each node: 0.1 MiB; the cache" in out
    assert "- Call the teacher in the loss as usual: its outputs are stored in the first epoch and read in" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--teacher", "no-such-model"), "unknown model 'no-such-model'"),
        (("--teacher", "{teacher}", "--activation-cache-max-gib", "0"), "activation_cache_max_gib=0.0 is invalid"),
        (("--teacher", "{short}"), "seq is 64, but BertForSequenceClassification has 32 positions"),
    ],
)
def test_errors_name_the_option(names: tuple[str, str], options: Any, message: str, tmp_path: Path) -> None:
    AutoConfig.for_model("bert", max_position_embeddings=32, hidden_size=12).save_pretrained(tmp_path)
    given = [option.format(teacher=names[1], short=tmp_path) for option in options]
    result = CliRunner().invoke(app, ["plan", names[0], *TRAINING, *given])
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""


@pytest.mark.slow
def test_advice_and_ranking_name_the_same_training() -> None:
    """FSDP is first in the table, as its transfers are counted during the backward."""
    out = plan("vit", "--devices", "2", "--batch", "32", "--epochs", "2", "--no-freeze")
    times = plan("vit", "--devices", "2", "--batch", "32", "--epochs", "2", "--no-freeze", "--json")
    gain = times["fsdp"]["speed_up"]
    assert gain * HARDLY_FASTER < 1
    assert f"- Plain FSDP is predicted to be {1 / gain:.2f} times as fast as this training." in out
