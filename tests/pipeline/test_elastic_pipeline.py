"""Freezing and changing the layout in the middle of training: as one process with the same freeze points."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks, run_ranks_expecting_error
from selection import few, slow
from training_data import PadCollator
from training_runs import WORLD, Outcome, Run, assert_same_training, outcome_of, pipeline_trainer, with_plans
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import FreezeDecision, FreezePolicy, PipeTransformerTrainer
from hf_pipetransformer.data.numbered_batches import first_samples
from hf_pipetransformer.model.frozen_prefix import FreezableLayers
from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.planning.plan import PipelinePlan
from hf_pipetransformer.planning.plan_choice import make_plan

RUNS = {
    "bert": Run(epochs=3),
    "llama-tied": Run("causal-lm", epochs=3),
    "vit": Run("image-classification", epochs=3),
    "t5": Run("seq2seq", epochs=3),
    "bert-adafactor": Run("causal-lm", model="llama", epochs=3).with_options(optim="adafactor"),
    "bert-sgd": Run(epochs=3).with_options(optim="sgd", optim_args="momentum=0.9", learning_rate=0.05),
}
MID_EPOCH = {2: 1, 5: 2}
"""Steps done -> frozen layers. An epoch has three steps."""
EPOCH_START = {3: 1, 6: 2}
SHRINK = {0: 4, 1: 2, 2: 1}
"""Frozen layers -> stages."""
GROW = {0: 1, 1: 2, 2: 4}


class FreezeAt(TrainerCallback):
    """The reference: the same parameters stop training after the same steps."""

    def __init__(self, table: dict[int, int], model: torch.nn.Module, layers: FreezableLayers) -> None:
        self.table, self.model, self.layers = table, model, layers

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in self.table:
            for name in self.layers.frozen(self.table[state.global_step]):
                parameter = self.model.get_parameter(name)
                parameter.requires_grad_(False)
                parameter.grad = None


def reference(rank: int, world_size: int, run: Run, table: dict[int, int]) -> Outcome:
    model = run.build_model()
    batch = dict(PadCollator(run.kind)(first_samples(run.data(2), 2)))
    layers = FreezableLayers.of(LayerStack.discover(model, batch), batch)
    arguments = TrainingArguments(
        "reference",
        use_cpu=True,
        per_device_train_batch_size=run.per_device * WORLD * run.accumulation,
        **run.common_options(),
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=run.data(run.samples),
        data_collator=PadCollator(run.kind),
        callbacks=[FreezeAt(table, model, layers)],
    )
    return outcome_of(trainer)


@cache
def expected(name: str, mid_epoch: bool) -> Outcome:
    return run_ranks(reference, 1, RUNS[name], MID_EPOCH if mid_epoch else EPOCH_START)[0]


def stages_by_frozen(trainer: PipeTransformerTrainer, table: dict[int, int]) -> None:
    """Choose K by the number of frozen layers, in place of the memory rule."""

    def plan_after_freezing(plan: PipelinePlan, num_frozen: int, num_cached: int) -> PipelinePlan:
        return make_plan(
            plan.unit_costs,
            plan.world_size,
            table[num_frozen],
            schedule=plan.schedule,
            rows_per_device=4,
            memory_budget_bytes=None,
            num_frozen_layers=num_frozen,
            num_cached_layers=num_cached,
            replica_sharding=plan.replica_sharding,
            virtual_pipeline_parallel_size=plan.virtual_pipeline_parallel_size,
        )

    with_plans(trainer, plan_after_freezing)


def elastic(
    rank: int,
    world_size: int,
    run: Run,
    schedule: dict[int, int],
    stages: dict[int, int],
    folder: str = "elastic",
    **options: Any,
) -> tuple[Outcome, list[list[int]], list[dict[str, Any]]]:
    trainer = pipeline_trainer(
        run,
        stages[0],
        folder,
        freeze_policy="schedule",
        freeze_strategy="steps",
        freeze_steps=1,
        freeze_schedule=schedule,
        activation_cache="off",  # whether it pays, and changes the plan, depends on the machine's load
        **options,
    )
    stages_by_frozen(trainer, stages)
    seen: list[list[int]] = []
    step = trainer.training_step

    def noting(model: Any, inputs: Any, *rest: Any) -> Any:
        first = next(iter(inputs.values()))
        run = trainer._pipeline_run
        assert run is not None
        counts = run.steps.batch.waiting[0].rows > 0 and run.pipeline.stage_index == 0
        seen.append([hash(tuple(row.flatten().tolist())) for row in first] if counts else [])
        return step(model, inputs, *rest)

    trainer.training_step = noting  # type: ignore[method-assign]
    outcome = outcome_of(trainer)
    changes = [entry for entry in trainer.state.log_history if "transform_seconds" in entry]
    return outcome, seen, changes


CHANGES = {"shrink": SHRINK, "grow": GROW}
MOMENTS = ("epoch-start", "mid-epoch")
BERT = [("bert", moment, change) for moment in MOMENTS for change in CHANGES]
OTHERS = [(name, *case) for name in RUNS for case in zip(MOMENTS, ("grow", "shrink"), strict=True) if name != "bert"]


@pytest.mark.parametrize(("name", "moment", "change"), [*few(BERT, ("bert", "mid-epoch", "shrink")), *slow(*OTHERS)])
def test_elastic_training_equals_one_process(name: str, moment: str, change: str) -> None:
    """(4,1) -> (2,2) -> (1,4) and back up, with decay groups, warm-up, clipping and accumulation."""
    stages, mid_epoch = CHANGES[change], moment == "mid-epoch"
    schedule = MID_EPOCH if mid_epoch else EPOCH_START
    results = run_ranks(elastic, WORLD, RUNS[name], schedule, stages)
    assert_same_training([outcome for outcome, *_ in results], expected(name, mid_epoch))
    for _, _, changes in results:
        assert [c["num_frozen_layers"] for c in changes] == [1, 2]
        assert [c["pipeline_parallel_size"] for c in changes] == [stages[1], stages[2]]


@pytest.mark.slow
def test_every_sample_of_an_epoch_exactly_once() -> None:
    """Whatever is re-sliced when: in the middle of the first and of the second epoch."""
    run = Run("image-classification", epochs=2, accumulation=1)  # six batches an epoch; images have no padding
    results = run_ranks(elastic, WORLD, run, {2: 1, 8: 2}, SHRINK)
    steps = [[row for _, seen, _ in results for row in seen[k]] for k in range(12)]
    for epoch in (steps[:6], steps[6:]):
        counts = Counter(row for step in epoch for row in step)
        assert len(counts) == run.samples and set(counts.values()) == {1}
        assert [len(step) for step in epoch] == [16, 16, 16, 16, 16, 3]


def memory_by_stage(rank: int, world_size: int) -> list[int]:
    held: list[int] = []

    class Measure(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
            tensors = list(model.parameters()) + [
                v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()
            ]
            with torch._C.DisableTorchFunctionSubclass():  # those that are elsewhere cannot be read
                storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            held.append(sum(storages.values()))

    trainer = pipeline_trainer(
        Run("causal-lm", model="llama", epochs=3),
        4,
        freeze_policy="schedule",
        freeze_strategy="steps",
        freeze_steps=1,
        freeze_schedule={2: 1, 4: 2, 6: 3},
        elastic=False,
    )
    trainer.add_callback(Measure())
    trainer.train()
    return held


@pytest.mark.slow
def test_memory_falls_with_each_freeze() -> None:
    everyone = run_ranks(memory_by_stage, WORLD)
    totals = [sum(step) for step in zip(*everyone, strict=True)]
    assert totals[0] > totals[2] > totals[4] > totals[6]


# ------------------------------------------------------------------------------------------ the record
def recorded(rank: int, world_size: int, folder: str) -> None:
    elastic(rank, world_size, RUNS["bert"], MID_EPOCH, SHRINK, folder)


def test_events_are_recorded(tmp_path: Path) -> None:
    run_ranks(recorded, WORLD, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "pipeline_events.jsonl").read_text().splitlines()]
    assert [(e["event"], e["global_step"], e["num_frozen_layers"]) for e in lines] == [
        ("start", 0, 0),
        ("transform", 2, 1),
        ("transform", 5, 2),
    ]
    assert [(e["pipeline_parallel_size"], e["data_parallel_size"]) for e in lines] == [(4, 1), (2, 2), (1, 4)]
    assert all(e["bytes_moved"] > 0 and e["seconds"] > 0 for e in lines[1:])
    assert lines[1]["stage_bounds"][-1] == lines[1]["num_layers"]


# ------------------------------------------------------------------------------------------ resuming
class StopAfter(TrainerCallback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.steps


def train_some(rank: int, world_size: int, run: Run, folder: str) -> None:
    trainer = _scheduled(run, folder, save_strategy="steps", save_steps=2)
    trainer.add_callback(StopAfter(4))
    trainer.train()


def resume(rank: int, world_size: int, run: Run, folder: str) -> Outcome:
    return outcome_of(_scheduled(run, folder), resume_from_checkpoint=f"{folder}/checkpoint-4")


def _scheduled(run: Run, folder: str, **options: Any) -> PipeTransformerTrainer:
    trainer = pipeline_trainer(
        run,
        4,
        folder,
        freeze_policy="schedule",
        freeze_strategy="steps",
        freeze_steps=1,
        freeze_schedule=MID_EPOCH,
        **options,
    )
    stages_by_frozen(trainer, SHRINK)
    return trainer


def test_resumes_with_what_was_frozen(tmp_path: Path) -> None:
    """Saved with one layer frozen on 2 x 2; goes on there, and freezes the second layer at its step."""
    run_ranks(train_some, WORLD, RUNS["bert"], str(tmp_path))
    outcomes = run_ranks(resume, WORLD, RUNS["bert"], str(tmp_path))
    assert_same_training(outcomes, expected("bert", True))


# ------------------------------------------------------------------------------------------ policies
class ByRank(FreezePolicy):
    """What must not be: every rank decides for itself."""

    needs_gradient_norms = False

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def num_frozen(self, decision: FreezeDecision) -> int:
        return min(self.rank, decision.index)


def disagree(rank: int, world_size: int) -> None:
    pipeline_trainer(Run(epochs=2, keywords={"freeze_policy": ByRank(rank)}), 2).train()


def test_ranks_that_disagree_are_refused() -> None:
    errors = run_ranks_expecting_error(disagree, WORLD, timeout=60)
    assert {type(error) for error in errors} == {ValueError}
    assert "different numbers of frozen layers" in str(errors[0])


def frozen_by(rank: int, world_size: int, policy: str, stages: int) -> list[int]:
    trainer = pipeline_trainer(Run(epochs=4), stages, freeze_policy=policy)
    trainer.train()
    return [e["num_frozen_layers"] for e in trainer.state.log_history if "transform_seconds" in e]


@pytest.mark.parametrize("policy", ["alpha", "adaptive", "autofreeze"])
@pytest.mark.slow
def test_policies_decide_alike_in_every_layout(policy: str) -> None:
    """Gradient norms are those of the whole model whatever holds its layers."""
    answers = {tuple(answer) for stages in (4, 2, 1) for answer in run_ranks(frozen_by, WORLD, policy, stages)}
    assert len(answers) == 1
    assert policy != "alpha" or answers == {(2, 3)}  # of 4 layers ceil(4/3), ceil(20/9), ceil(76/27) = 2, 3, 3
