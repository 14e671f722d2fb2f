"""The arguments: from where they come, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_runs import Run, pipeline_trainer
from transformers import HfArgumentParser

from hf_pipetransformer import PipeTransformerTrainingArguments, training_args

FIELDS = {field.name for field in dataclasses.fields(PipeTransformerTrainingArguments)}
CHECKPOINTING_OPTIONS = ["gradient_checkpointing_kwargs"]
if "activation_checkpointing_kwargs" in FIELDS:  # its new name, which transformers 5.17 does not know
    CHECKPOINTING_OPTIONS.append("activation_checkpointing_kwargs")


def make(tmp_path, **fields: Any) -> PipeTransformerTrainingArguments:
    return PipeTransformerTrainingArguments(output_dir=str(tmp_path), report_to="none", **fields)


def pipeline_fields(args: PipeTransformerTrainingArguments) -> tuple:
    return args.pipeline_parallel_size, args.pipeline_schedule, args.num_microbatches


@pytest.fixture
def four_processes(monkeypatch):
    """As if a launcher had started four. Only our arguments shall see it: transformers would wait for the others."""
    monkeypatch.setattr(training_args, "os", SimpleNamespace(environ={**os.environ, "WORLD_SIZE": "4"}))


def test_defaults(tmp_path):
    args = make(tmp_path)
    assert pipeline_fields(args) == (1, "1f1b", "auto")
    assert not args.uses_pipeline
    assert args.use_cpu is not torch.accelerator.is_available()
    assert args.average_tokens_across_devices is False


@pytest.mark.usefixtures("four_processes")
class TestSources:
    EXPECTED = (2, "gpipe", 8)

    def test_command_line(self, tmp_path):
        words = f"--output_dir {tmp_path} --pipeline_parallel_size 2 --pipeline_schedule gpipe --num_microbatches 8"
        (args,) = HfArgumentParser(PipeTransformerTrainingArguments).parse_args_into_dataclasses(words.split())
        assert pipeline_fields(args) == self.EXPECTED

    @pytest.mark.parametrize("size", ["2", "'2'"])
    def test_yaml(self, tmp_path, size):
        file = tmp_path / "run.yaml"
        file.write_text(
            f"output_dir: {tmp_path}\npipeline_parallel_size: {size}\npipeline_schedule: gpipe\nnum_microbatches: 8\n"
        )
        (args,) = HfArgumentParser(PipeTransformerTrainingArguments).parse_yaml_file(str(file))
        assert pipeline_fields(args) == self.EXPECTED

    def test_there_and_back(self, tmp_path):
        args = make(tmp_path, pipeline_parallel_size="auto", num_microbatches=4)
        again = PipeTransformerTrainingArguments(**args.to_dict())
        assert pipeline_fields(again) == pipeline_fields(args) == ("auto", "1f1b", 4) and args.uses_pipeline
        assert again.to_dict() == args.to_dict()
        assert json.loads(args.to_json_string())["pipeline_parallel_size"] == "auto"
        assert args.to_sanitized_dict()["num_microbatches"] == 4

    @pytest.mark.filterwarnings("ignore:`gradient_checkpointing_kwargs` is deprecated")
    @pytest.mark.parametrize("option", CHECKPOINTING_OPTIONS)
    def test_json_on_the_command_line(self, tmp_path, option):
        """The value is still a string when the first checks run."""
        words = ["--output_dir", str(tmp_path), "--pipeline_parallel_size", "2", f"--{option}"]
        parser = HfArgumentParser(PipeTransformerTrainingArguments)
        (args,) = parser.parse_args_into_dataclasses([*words, '{"use_reentrant": false}'])
        assert getattr(args, option) == {"use_reentrant": False}
        with pytest.raises(ValueError, match="use_reentrant=True cannot be combined"):
            parser.parse_args_into_dataclasses([*words, '{"use_reentrant": true}'])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_schedule": "interleaved1f1b", "virtual_pipeline_parallel_size": 1}, "must be at least 2.*'1f1b'"),
        ({"virtual_pipeline_parallel_size": 2}, "pipeline_schedule='1f1b'.*must be 1.*'interleaved1f1b'"),
        ({"pipeline_schedule": "zbv", "virtual_pipeline_parallel_size": 3}, "must be 2.*'interleaved1f1b'"),
        ({"pipeline_schedule": "zbv", "virtual_pipeline_parallel_size": 1}, "must be 2.*'1f1b'"),
        ({"pipeline_schedule": "dualpipev"}, "pipeline_schedule='dualpipev' is not supported"),
    ],
)
def test_virtual_stages_belong_to_an_interleaved_schedule(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **options)


@pytest.mark.usefixtures("four_processes")
def test_an_optimizer_that_steps_inside_the_backward(tmp_path):
    with pytest.raises(ValueError, match=r"optim='apollo_adamw_layerwise' cannot be combined.*adamw_torch"):
        make(tmp_path, pipeline_parallel_size=2, optim="apollo_adamw_layerwise")


@pytest.mark.usefixtures("four_processes")
@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_what_the_launcher_switches_on(tmp_path, variable, monkeypatch):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ValueError, match=f"{variable}.*cannot be combined with pipeline_parallel_size=2"):
        make(tmp_path, pipeline_parallel_size=2)


@pytest.mark.usefixtures("four_processes")
def test_more_than_one_device_in_a_process(tmp_path, monkeypatch):
    monkeypatch.setattr(PipeTransformerTrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(ValueError, match=r"one process per device.*Start 2 processes"):
        make(tmp_path, pipeline_parallel_size=2)


@pytest.mark.usefixtures("four_processes")
def test_stages_that_do_not_divide_the_processes(tmp_path, monkeypatch):
    args = make(tmp_path, pipeline_parallel_size=3)
    monkeypatch.setattr(PipeTransformerTrainingArguments, "world_size", property(lambda self: 4))
    with pytest.raises(ValueError, match=r"=3 does not divide the 4 processes. Set it to one of 1, 2, 4.*MULTI"):
        args.refuse_impossible_layout(None)
    model = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=2))
    told = r"does not divide the 4 processes. The model has 2 layers.*Set it to one of 1, 2\. \(On CPU"
    with pytest.raises(ValueError, match=told):
        args.refuse_impossible_layout(model)


def test_a_field_that_does_not_exist_names_the_closest(tmp_path):
    with pytest.raises(ValueError, match=r"no field 'freeze_polcy'\. Did you mean 'freeze_policy'\?"):
        make(tmp_path, freeze_polcy="alpha")
    with pytest.raises(TypeError, match=r"no field 'learning_rat'\. Did you mean 'learning_rate'\?"):
        make(tmp_path, learning_rat=1.0)


def test_a_checkpoint_that_does_not_exist_is_refused(tmp_path):
    def train(checkpoint):
        run = Run(samples=16, epochs=1)
        pipeline_trainer(run, 1, use_cpu=True, resume_from_checkpoint=checkpoint).train()

    with pytest.raises(ValueError, match=r"resume_from_checkpoint=.*checkpoint-7' does not exist"):
        train(str(tmp_path / "checkpoint-7"))
    for known in ("last", str(tmp_path)):
        train(known)


@pytest.mark.parametrize("name", ["fp16_full_eval", "bf16_full_eval", "auto_find_batch_size", "torch_compile"])
def test_with_one_stage_everything_else_is_left_to_the_stock_trainer(tmp_path, name):
    assert not make(tmp_path).leaves_model_to_trainer
    assert make(tmp_path).place_model_on_device is False
    assert make(tmp_path, **{name: True}).leaves_model_to_trainer


@pytest.mark.parametrize(
    ("given", "value"),
    [("off", "off"), ("auto", "auto"), (4, 4), ("4", 4), ([8, 8], [8, 8]), ((8, 8), [8, 8]), ("[8, 8]", [8, 8])],
    ids=repr,
)
def test_token_slices_from_python_yaml_and_the_command_line(given: Any, value: Any) -> None:
    arguments = PipeTransformerTrainingArguments("out", pipeline_parallel_size="auto", token_slices=given)
    assert arguments.token_slices == value
    (parsed,) = HfArgumentParser(PipeTransformerTrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", "out", "--pipeline_parallel_size", "auto", "--token_slices", str(value)]
    )
    assert parsed.token_slices == value


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"pipeline_parallel_size": 1}, "several stages"),
        ({"pipeline_schedule": "gpipe"}, "requires pipeline_schedule"),
        ({"pipeline_schedule": "interleaved1f1b"}, "requires pipeline_schedule"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0"),
        ({"activation_cache": "on"}, "whole samples"),
        ({"full_determinism": True}, "measured times"),
    ],
    ids=lambda value: str(value),
)
def test_what_excludes_token_slices_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        PipeTransformerTrainingArguments(
            "out", **{"pipeline_parallel_size": "auto", "token_slices": "auto", **options}
        )


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (
            {"freeze_policy": "alpha", "freeze_schedule": {"2": 4}},
            "requires freeze_policy='schedule', but the current value is 'alpha'",
        ),
        (
            {"freeze_policy": "alpha", "freeze_steps": 100},
            "requires freeze_strategy='steps'",
        ),
        ({"freeze_policy": "schedule", "freeze_schedule": {"2": 4}}, None),
    ],
)
def test_fields_without_effect_are_told(
    options: dict, remedy: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    PipeTransformerTrainingArguments(str(tmp_path), **options)
    assert ("has no effect" in caplog.text) is (remedy is not None)
    assert remedy is None or remedy in caplog.text
