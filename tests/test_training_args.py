"""The arguments: sources and refusals. `test_fuzz_arguments.py` has the values of single fields."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from training_runs import Run, pipeline_trainer
from transformers import HfArgumentParser

from hf_pipetransformer import PipeTransformerTrainingArguments

FIELDS = {field.name for field in dataclasses.fields(PipeTransformerTrainingArguments)}
CHECKPOINTING_OPTIONS = ["gradient_checkpointing_kwargs"]
if "activation_checkpointing_kwargs" in FIELDS:  # its new name, which transformers 5.17 does not know
    CHECKPOINTING_OPTIONS.append("activation_checkpointing_kwargs")


def make(tmp_path: Path, **fields: Any) -> PipeTransformerTrainingArguments:
    return PipeTransformerTrainingArguments(output_dir=str(tmp_path), report_to="none", **fields)


def pipeline_fields(args: PipeTransformerTrainingArguments) -> tuple[Any, ...]:
    return args.pipeline_parallel_size, args.pipeline_schedule, args.num_microbatches, args.token_slices


@pytest.mark.usefixtures("four_processes")
@pytest.mark.parametrize("slices", ["4", "[8, 8]"])
def test_the_command_line_yaml_and_python_mean_the_same(slices: str, tmp_path: Path) -> None:
    """The arguments can also be written to a dictionary and read again."""
    values = {"pipeline_parallel_size": "2", "pipeline_schedule": "1f1b", "num_microbatches": "8"}
    values["token_slices"] = slices
    parser = HfArgumentParser(PipeTransformerTrainingArguments)
    words = [word for name, value in values.items() for word in (f"--{name}", value)]
    (typed,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path), "--report_to", "none", *words])
    file = tmp_path / "run.yaml"
    lines = [f"{name}: {value}\n" for name, value in values.items()]
    file.write_text(f"output_dir: {tmp_path}\nreport_to: none\n" + "".join(lines))
    (read,) = parser.parse_yaml_file(str(file))
    made = make(tmp_path, **values)
    for args in (typed, read, made, PipeTransformerTrainingArguments(**made.to_dict())):
        assert pipeline_fields(args) == (2, "1f1b", 8, 4 if slices == "4" else [8, 8])


@pytest.mark.usefixtures("four_processes")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_kwargs` is deprecated")
@pytest.mark.parametrize("option", CHECKPOINTING_OPTIONS)
def test_json_on_the_command_line(option: str, tmp_path: Path) -> None:
    """The value is still a string when the first checks run."""
    words = ["--output_dir", str(tmp_path), "--pipeline_parallel_size", "2", f"--{option}"]
    parser = HfArgumentParser(PipeTransformerTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses([*words, '{"use_reentrant": false}'])
    assert getattr(args, option) == {"use_reentrant": False}
    with pytest.raises(ValueError, match="use_reentrant=True cannot be combined"):
        parser.parse_args_into_dataclasses([*words, '{"use_reentrant": true}'])


SLICED = {"pipeline_parallel_size": "auto", "token_slices": "auto"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"pipeline_schedule": "interleaved1f1b", "virtual_pipeline_parallel_size": 1}, "must be at least 2.*'1f1b'"),
    ({"virtual_pipeline_parallel_size": 2}, "pipeline_schedule='1f1b'.*must be 1.*'interleaved1f1b'"),
    ({"pipeline_schedule": "zbv", "virtual_pipeline_parallel_size": 3}, "must be 2.*'interleaved1f1b'"),
    ({"pipeline_parallel_size": 2, "optim": "apollo_adamw_layerwise"}, "cannot be combined.*adamw_torch"),
    ({**SLICED, "pipeline_parallel_size": 1}, "several stages"),
    ({**SLICED, "pipeline_schedule": "gpipe"}, "requires pipeline_schedule"),
    ({**SLICED, "label_smoothing_factor": 0.1}, "label_smoothing_factor=0"),
    ({**SLICED, "activation_cache": "on"}, "whole samples"),
    ({**SLICED, "full_determinism": True}, "measured times"),
    ({"replica_sharding": "full"}, r"replica_sharding.*FSDP is fsdp='full_shard' with fsdp_config={'version': 2}"),
    ({"replica_sharding": "full", "pipeline_parallel_size": 2}, "more memory than replica_sharding='optimizer'"),
    ({"replica_sharding": "optimizer", "auto_find_batch_size": True}, "replica_sharding.*stock Trainer"),
    ({"freeze_polcy": "alpha"}, r"no field 'freeze_polcy'\. Did you mean 'freeze_policy'\?"),
]


@pytest.mark.usefixtures("four_processes")
@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_combinations_that_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **options)


@pytest.mark.usefixtures("four_processes")
def test_layouts_and_launchers_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = make(tmp_path, pipeline_parallel_size=3)
    monkeypatch.setattr(PipeTransformerTrainingArguments, "world_size", property(lambda self: 4))
    model = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=2))
    told = r"=3 does not divide the 4 processes. The model has 2 layers.*Set it to one of 1, 2\.$"
    with pytest.raises(ValueError, match=told):
        args.refuse_impossible_layout(model)
    monkeypatch.setattr(PipeTransformerTrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(ValueError, match=r"one process per device.*Start 2 processes"):
        make(tmp_path, pipeline_parallel_size=2)
    for variable in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "true")
            with pytest.raises(ValueError, match=f"{variable}.*cannot be combined with pipeline_parallel_size=2"):
                make(tmp_path, pipeline_parallel_size=2)


def test_a_checkpoint_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    def train(checkpoint: str) -> None:
        run = Run(samples=16, epochs=1)
        pipeline_trainer(run, 1, use_cpu=True, resume_from_checkpoint=checkpoint).train()

    with pytest.raises(ValueError, match=r"resume_from_checkpoint=.*checkpoint-7' does not exist"):
        train(str(tmp_path / "checkpoint-7"))
    for known in ("last", str(tmp_path)):
        train(known)


def test_fields_without_effect_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, freeze_policy="schedule", freeze_schedule={"2": 4})
    assert "has no effect" not in caplog.text
    make(tmp_path, freeze_policy="alpha", freeze_schedule={"2": 4}, freeze_steps=100)
    assert "requires freeze_policy='schedule', but the current value is 'alpha'" in caplog.text
    assert "requires freeze_strategy='steps'" in caplog.text


@pytest.mark.parametrize("optim", ["lomo", "galore_adamw_layerwise"])
def test_an_optimizer_that_updates_in_the_backward_is_the_stock_trainers(optim: str, tmp_path: Path) -> None:
    assert make(tmp_path, optim=optim).leaves_model_to_trainer
    assert not make(tmp_path, optim="adamw_torch").leaves_model_to_trainer
