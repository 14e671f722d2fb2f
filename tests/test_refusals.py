"""What cannot work is refused at once, on all processes, with the field, the numbers and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_ranks, run_ranks_expecting_error
from model_zoo import MODELS, REFUSED
from torch import nn
from training_data import PadCollator, TrainingData
from training_runs import WORLD, Run, outcome_of, pipeline_trainer
from transformers import TrainingArguments

from hf_pipetransformer import PipeTransformerTrainer, UnsupportedModelError

RUN = Run(samples=16, epochs=1)


def build(rank: int, world_size: int, stages: Any, **options: Any) -> None:
    pipeline_trainer(RUN, stages, **options)


def refused(call: Any, world_size: int, *args: Any, kind: type = ValueError, **options: Any) -> str:
    """The message, which must be the same on every process."""
    errors = run_ranks_expecting_error(call, world_size, *args, timeout=60, **options)
    assert {type(error) for error in errors} == {kind}, errors
    assert len({str(error) for error in errors}) == 1
    return str(errors[0])


def test_stages_that_do_not_divide_the_world() -> None:
    message = refused(build, WORLD, 3)
    assert "pipeline_parallel_size=3" in message and "4 processes" in message and "1, 2, 4" in message


def test_one_process_for_several_stages() -> None:
    message = refused(build, 1, 2)
    assert "only one process runs" in message and "MULTI_CPU" in message and "--num_processes 2" in message


def test_more_stages_than_units() -> None:
    message = refused(coupled, WORLD, "convnext", WORLD)
    assert "pipeline_parallel_size is 4" in message and "3 units" in message


@pytest.mark.parametrize("number", [0, -1, "many"])
def test_no_micro_batches(number: Any) -> None:
    assert "num_microbatches" in refused(build, 2, 2, num_microbatches=number)


@pytest.mark.parametrize("size", [0, -2, "half", 1.5])
def test_no_stages(size: Any) -> None:
    assert "pipeline_parallel_size" in refused(build, 2, size)


def test_unknown_schedule() -> None:
    message = refused(build, 2, 2, pipeline_schedule="zigzag")
    assert "zigzag" in message and "1f1b" in message


@pytest.mark.parametrize(
    "options",
    [
        {"fsdp": "shard_grad_op"},
        {"deepspeed": {"zero_optimization": {"stage": 1}}},
        {"torch_compile": True},
        {"auto_find_batch_size": True},
        {"bf16_full_eval": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"train_sampling_strategy": "batch_rebalance"},
        {"optim": "lomo"},
        {"debug": "underflow_overflow"},
        {"accelerator_config": {"split_batches": True}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_excludes_a_pipeline(options: dict[str, Any]) -> None:
    message = refused(build, 2, 2, **options)
    assert "pipeline_parallel_size=2" in message


@pytest.mark.parametrize("stages", [1, 2])
def test_checkpoints_at_a_step_of_each_process(stages: int) -> None:
    """The stock Trainer's own way to leave at SIGTERM."""
    message = refused(build, 2, stages, enable_jit_checkpoint=True)
    assert "enable_jit_checkpoint=True" in message and "Unset it" in message and "SIGTERM" in message


def switched_on_by_the_launcher(rank: int, world_size: int) -> None:
    pipeline_trainer(RUN, 2)


def test_fsdp_from_the_launcher() -> None:
    message = refused(switched_on_by_the_launcher, 2, env={"ACCELERATE_USE_FSDP": "true"})
    assert "FSDP" in message and "pipeline_parallel_size=2" in message


def with_model(rank: int, world_size: int, how: str) -> None:
    model: Any = RUN.build_model()
    if how == "data-parallel":
        model = nn.DataParallel(model)
    elif how == "device-map":
        model.hf_device_map = {"bert": 0, "classifier": 1}
    elif how == "different-models" and rank == 1:
        model.classifier = nn.Linear(16, 3)
    elif how == "different-classes" and rank == 1:
        model = MODELS["roberta"].build()
    outcome_of(pipeline_trainer(RUN, 2, model=model))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("data-parallel", ["DataParallel", "unwrapped model"]),
        ("device-map", ["device map", "2 entries"]),
        ("different-models", ["different models", "process 0", "process 1"]),
        ("different-classes", ["different models", "Roberta"]),
    ],
)
def test_models_that_are_not_one_plain_model(how: str, words: list[str]) -> None:
    message = refused(with_model, 2, how)
    assert all(word in message for word in words), message


def with_data(rank: int, world_size: int, how: str) -> None:
    trainer = pipeline_trainer(RUN, 2)
    if how == "length":
        trainer.train_dataset = TrainingData(RUN.kind, 16 + rank)
    else:
        trainer.train_dataset = TrainingData(RUN.kind, 16, seed=rank)
    trainer.train()


@pytest.mark.parametrize(("how", "words"), [("length", ["16 samples", "17 samples"]), ("content", ["first samples"])])
def test_different_datasets(how: str, words: list[str]) -> None:
    message = refused(with_data, 2, how)
    assert "different datasets" in message and all(word in message for word in words)


def unsupported(rank: int, world_size: int, name: str) -> None:
    refused_model = REFUSED[name]
    batch = refused_model.batch(2)
    rows = [{key: value[i] if torch.is_tensor(value) else value for key, value in batch.items()} for i in range(2)]
    outcome_of(_trainer_on(refused_model.build(), rows * 8, 2))


def coupled(rank: int, world_size: int, name: str, stages: int, **options: Any) -> None:
    batch = MODELS[name].batch(8)
    rows = [{key: value[i] if torch.is_tensor(value) else value for key, value in batch.items()} for i in range(8)]
    outcome_of(_trainer_on(MODELS[name].build(), rows, stages, **options))


def _trainer_on(model: nn.Module, rows: list[dict[str, Any]], stages: int, **options: Any) -> PipeTransformerTrainer:
    from hf_pipetransformer import PipeTransformerTrainingArguments

    arguments = PipeTransformerTrainingArguments(
        "out",
        pipeline_parallel_size=stages,
        max_steps=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **options,
    )
    return PipeTransformerTrainer(model=model, args=arguments, train_dataset=rows, data_collator=stack_rows)


def stack_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: torch.stack([row[key] for row in rows]) if torch.is_tensor(rows[0][key]) else rows[0][key]
        for key in rows[0]
    }


@pytest.mark.parametrize("name", list(REFUSED))
def test_models_that_cannot_be_cut(name: str) -> None:
    message = refused(unsupported, 2, name, kind=UnsupportedModelError)
    assert type(REFUSED[name].build()).__name__ in message and "Set " in message


@pytest.mark.parametrize("name", ["clip", "resnet"])
def test_losses_that_couple_the_rows_are_trained_on_whole_batches(name: str) -> None:
    run_ranks(coupled, 2, name, 2)


def plain_arguments(rank: int, world_size: int) -> None:
    PipeTransformerTrainer(
        model=RUN.build_model(),
        args=TrainingArguments("out", use_cpu=True),
        train_dataset=RUN.data(8),
        data_collator=PadCollator(RUN.kind),
    )


def test_plain_arguments() -> None:
    assert "PipeTransformerTrainingArguments" in refused(plain_arguments, 1)
