"""The examples of CONTRIBUTING.md: a freeze policy, a schedule, the layers of a model, a part, each by one object."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import nn
from training_data import PadCollator
from training_runs import WORLD, Outcome, Run, assert_same_training, outcome_of, pipeline_trainer, reference
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import FreezePolicy, PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.parts.entries import ENTRIES
from hf_pipetransformer.parts.freezing.policies import FreezeDecision
from hf_pipetransformer.planning.schedules import SCHEDULES, Schedule, Work

PAGE = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
POLICY, SCHEDULE, LAYERS, PART = re.findall(r"^```python\n(.*?)(?:^args = .*?)?^```", PAGE, re.DOTALL | re.MULTILINE)


def example(code: str, **names: Any) -> dict[str, Any]:
    """What an example defines.

    Args:
        code: the example.
        names: that it uses, beside the package's and torch's.
    """
    known = (FreezePolicy, FreezeDecision, PipeTransformerTrainer, PipeTransformerTrainingArguments, Schedule, Work)
    space: dict[str, Any] = {"torch": torch, "nn": nn, "SCHEDULES": SCHEDULES, "__name__": __name__}
    space |= {**{one.__name__: one for one in known}, **names}
    exec(compile(code, "CONTRIBUTING.md", "exec"), space)
    return space


def test_a_freeze_policy(tmp_path: Path) -> None:
    run = Run(samples=16)
    options: dict[str, Any] = {"max_steps": 4, "freeze_strategy": "steps", "freeze_steps": 1, "report_to": []}
    args = PipeTransformerTrainingArguments(str(tmp_path), use_cpu=True, **options)
    trainer = example(POLICY, model=run.build_model(), args=args, dataset=run.data(16))["trainer"]
    trainer.data_collator = PadCollator(run.kind)
    trainer.train()
    logged = [entry["num_frozen_layers"] for entry in trainer.state.log_history if "num_frozen_layers" in entry]
    assert logged == [0, 2]  # of four layers


# ---------------------------------------------------------------------------------------------------------
# A schedule
# ---------------------------------------------------------------------------------------------------------


def train_breadth_first(rank: int, world_size: int, run: Run) -> Outcome:
    example(SCHEDULE)
    return outcome_of(
        pipeline_trainer(run, 2, pipeline_schedule="looped_bfs", virtual_pipeline_parallel_size=2, num_microbatches=4)
    )


@pytest.mark.slow
def test_a_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(samples=33, epochs=1)
    outcomes = run_ranks(train_breadth_first, 2, replace(run, per_device=run.per_device * WORLD // 2))
    assert_same_training(outcomes, run_ranks(reference, 1, run)[0])


# ---------------------------------------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------------------------------------


def train_classifier(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The weights after a few steps; on one process by the stock Trainer."""
    torch.manual_seed(0)
    space = example(LAYERS)
    model = space["Classifier"]()
    generator = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(8, generator=generator), "labels": k % 2} for k in range(32)]
    options: dict[str, Any] = {"max_steps": 4, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    options |= {"per_device_train_batch_size": 8 // world_size, "use_cpu": True, "learning_rate": 1e-2}
    if world_size == 1:
        trainer = Trainer(model, TrainingArguments("out", **options), train_dataset=data)  # type: ignore[arg-type]
    else:
        options |= {"pipeline_parallel_size": 2, "pipeline_layers": None}
        arguments = PipeTransformerTrainingArguments("out", **options)
        with pytest.raises(ValueError, match=r"no sequential stack of layers.*pipeline_layers"):
            PipeTransformerTrainer(model, arguments, train_dataset=data).train()  # type: ignore[arg-type]
        options["pipeline_layers"] = ("body.blocks",)
        trainer = PipeTransformerTrainer(
            model,
            PipeTransformerTrainingArguments("out", **options),
            train_dataset=data,  # type: ignore[arg-type]
        )
    trainer.train()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_layers_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = run_ranks(train_classifier, 1)[0]
    for weights in run_ranks(train_classifier, 2):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------
# A part
# ---------------------------------------------------------------------------------------------------------


def train_with_stage_norms(rank: int, world_size: int, run: Run) -> tuple[list[list[float]], list[float], list[str]]:
    """The norms of the stages in each step, the norms of the whole gradient, and the sentences about the largest."""
    sentences: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: sentences.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hf_pipetransformer")
    entries, level = list(ENTRIES), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        example(PART)
        assert len(ENTRIES) == len(entries) + 1
        trainer = pipeline_trainer(run, world_size)
        trainer.train()
    finally:
        ENTRIES[:] = entries
        logger.removeHandler(handler)
        logger.setLevel(level)
    names = [f"grad_norm_stage_{stage}" for stage in range(world_size)]
    history = trainer.state.log_history  # the parts log before an update, the Trainer after it
    of_stages = [[entry[name] for name in names] for entry in history if names[0] in entry]
    of_whole = [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry]
    return of_stages, of_whole, [line for line in sentences if line.startswith("The largest norm of a stage's")]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_part(num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run(samples=33, epochs=1, accumulation=1, options={"max_grad_norm": 1e6})  # no gradient is clipped
    run = replace(run, per_device=run.per_device * WORLD // num_stages)
    outcomes = run_ranks(train_with_stage_norms, num_stages, run)
    assert "stage_norms" not in {entry.name for entry in ENTRIES}
    for of_stages, of_whole, _ in outcomes:
        assert len(of_stages) == len(of_whole) == 3
        for norms, norm in zip(of_stages, of_whole, strict=True):
            assert len(norms) == num_stages and all(norms)
            assert sum(one**2 for one in norms) == pytest.approx(norm**2, rel=1e-5)
    largest = max(max(norms) for norms in outcomes[0][0])
    assert [len(lines) for *_, lines in outcomes] == [1] + [0] * (num_stages - 1)  # the main process logs
    assert f" was {largest:.3g} (grad_norm_stage_" in outcomes[0][2][0]
