"""User code on the last stages alone: its collectives; classes in the wrong order."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from distributed import run_ranks
from one_job import run_calls
from test_elastic_pipeline import stages_by_frozen
from training_runs import WORLD, Run, assert_same_training, outcome_of, pipeline_trainer, reference
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.pipeline import mesh
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.run.collectives import among_last_stages

RUN = Run(samples=40, epochs=1, accumulation=1, per_device=4)
STAGES = 2


class GathersMetrics:
    """Gathers a metric over the replicas in each call of `compute_loss`, and logs it, as TRL's trainers do."""

    def compute_loss(self: Any, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
        inputs["use_cache"] = False  # a BERT accepts and ignores it
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)  # type: ignore[misc]
        count = torch.tensor(len(outputs.logits), device=outputs.logits.device)
        number = self.accelerator.gather_for_metrics(count).sum()
        padded = self.accelerator.pad_across_processes(outputs.logits)
        assert len(self.accelerator.gather(padded)) == self.args.world_size * len(padded)
        assert int(number) == int(self.accelerator.reduce(count, reduction="sum"))
        self.rows = [*getattr(self, "rows", []), int(number)]
        return (loss, outputs) if return_outputs else loss

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if getattr(self, "rows", None):
            logs["rows_seen"] = float(sum(self.rows))
            self.rows = []
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def gathering(rank: int, world_size: int) -> Any:
    run = replace(RUN, per_device=16 // world_size, trainer=GathersMetrics)
    trainer = pipeline_trainer(run, STAGES)
    outcome = outcome_of(trainer)
    return outcome, [entry.get("rows_seen") for entry in trainer.state.log_history if "learning_rate" in entry]


class AveragesMargins:
    """Collects a number of each sample in `compute_loss`, and logs the mean, as an own trainer on one process does."""

    def compute_loss(self: Any, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)  # type: ignore[misc]
        margins = (outputs.logits[:, 1] - outputs.logits[:, 0]).tolist()
        self.margins, self.num_seen = [*getattr(self, "margins", []), *margins], getattr(self, "num_seen", 0)
        self.num_seen += len(margins)
        return (loss, outputs) if return_outputs else loss

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if getattr(self, "margins", None):
            logs["margin"] = sum(self.margins) / len(self.margins)
            self.margins = []
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


COLLECTED = Run(samples=32, accumulation=1, trainer=AveragesMargins)
"""Two steps of 16 samples in each of two epochs."""
DECLARED = {"loss_reduction": "mean"}
FREEZING = {"freeze_policy": "schedule", "freeze_schedule": {1: 1}, "activation_cache": "off"}


def collecting(rank: int, world_size: int, ways: dict[str, dict[str, Any]]) -> dict[str, tuple[list[Any], int]]:
    """For each way: the mean margins that this process logs in the steps, and its number of samples with a margin."""
    found = {}
    for name, options in ways.items():
        run = replace(COLLECTED, per_device=16 // world_size)
        trainer = pipeline_trainer(run, world_size, name, **options)
        stages_by_frozen(trainer, {0: world_size, 1: 1})
        trainer.train()
        steps = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
        found[name] = [entry.get("margin") for entry in steps], getattr(trainer, "num_seen", 0)
    return found


def assert_gathered(results: list[Any]) -> None:
    """Expect the gathered metrics of one process."""
    assert_same_training([outcome for outcome, _ in results], reference(0, 1, RUN))
    assert results[0][1] == [16, 16, 8]


@pytest.mark.slow
def test_what_compute_loss_collects_is_on_rank_0() -> None:
    """Holds in every schedule, and for rank 0's samples when two stages have become two replicas."""
    schedules = {name: {"pipeline_schedule": name, **DECLARED} for name in ("1f1b", "zbv")}
    schedules["driven"] = {}
    alone = collecting(0, 1, {"plain": {"use_cpu": True}, "elastic": {**FREEZING, "use_cpu": True}})
    ways = {**schedules, "elastic": {**FREEZING, **DECLARED}}
    found = run_calls(2, {"collecting": (collecting, ways), "gathering": (gathering,)})
    assert_gathered(found["gathering"])
    first, second = found["collecting"]
    assert alone["plain"][1] == alone["elastic"][1] == 2 * COLLECTED.samples
    for name in schedules:
        assert first[name] == (pytest.approx(alone["plain"][0], abs=1e-5), 2 * COLLECTED.samples), name
    (logged, num_seen), expected = first["elastic"], alone["elastic"][0]
    assert num_seen == 32 + 16, "the second epoch's other half is on the other replica"
    assert logged[:2] == pytest.approx(expected[:2], abs=1e-5)
    both = [sum(margins) / 2 for margins in zip(logged[2:], second["elastic"][0][2:], strict=True)]
    assert both == pytest.approx(expected[2:], abs=1e-5)


def test_two_replicas_of_two_stages() -> None:
    """The loss gathers metrics; the second replica's last batch is smaller."""
    assert_gathered(run_ranks(gathering, WORLD))


def counts_around_an_error(rank: int, world_size: int) -> list[tuple[int, ...]]:
    """Counts, before, inside and after code among the last stages that fails."""
    accelerator, mesh = Accelerator(cpu=True), ProcessMesh(timedelta(seconds=60))

    def counts() -> tuple[int, ...]:
        of_states = accelerator.num_processes, PartialState().num_processes, PartialState().process_index
        return *of_states, dist.get_world_size(), dist.get_rank()

    found = [counts()]
    group = mesh.subgroup([(0, 2)])
    if rank in (0, 2):
        with suppress(KeyError), among_last_stages(accelerator, mesh, group):
            found.append(counts())
            with among_last_stages(accelerator, mesh, None):
                found.append(counts())
                raise KeyError
    return [*found, counts()]


def test_counts_are_restored() -> None:
    for rank, found in enumerate(run_ranks(counts_around_an_error, 3)):
        inside = [(2, 2, rank // 2, 2, rank // 2), (1, 1, 0, 1, 0)] if rank != 1 else []
        assert found == [(3, 3, rank, 3, rank), *inside, (3, 3, rank, 3, rank)]


# ------------------------------------------------------------------------------------------ classes in the wrong order
@dataclass
class OtherArguments(TrainingArguments):
    learning_rate: float = field(default=0.25)


class ConvertsArguments(Trainer):
    def __init__(self, model: Any, args: Any, **keywords: Any) -> None:
        super().__init__(model, OtherArguments(**args.to_dict()), **keywords)


def test_classes_in_the_wrong_order_are_refused() -> None:
    ours = PipeTransformerTrainer, PipeTransformerTrainingArguments
    for bases, words in (
        ((ConvertsArguments, ours[0]), r"class Mixed\(PipeTransformerTrainer, ConvertsArguments\)"),
        ((ours[1], OtherArguments), r"class Mixed\(OtherArguments, PipeTransformerTrainingArguments\)"),
    ):
        with pytest.raises(ValueError, match=words):
            type("Mixed", bases, {})
    arguments = dataclass(type("Mixed", (OtherArguments, ours[1]), {}))
    assert arguments(output_dir="x", use_cpu=True).learning_rate == 0.25  # type: ignore[call-arg]
    mixed = type("Mixed", (ours[0], ConvertsArguments), {})
    with pytest.raises(ValueError, match=r"class Arguments\(OtherArguments, PipeTransformerTrainingArguments\)"):
        mixed(torch.nn.Linear(1, 1), ours[1](output_dir="x", use_cpu=True))


SENT = (None, b"", 0, 232, 233, 234, 100_000)
"""Objects that all processes send alike; a number stands for as many bytes on rank 1, and one elsewhere."""


def exchanged(rank: int, world_size: int) -> list[list[Any]]:
    dist.init_process_group("gloo")
    processes = ProcessMesh(timedelta(seconds=30))
    found = [processes.gather_objects(sent_by(rank, what)) for what in SENT]
    with mock.patch.object(mesh, "EVEN", 1):  # else only more than four processes broadcast
        return [*found, *(processes.gather_objects(sent_by(rank, what)) for what in SENT)]


def sent_by(rank: int, what: Any) -> Any:
    return bytes(what if rank == 1 else 1) if isinstance(what, int) else what


def test_objects_of_any_length_are_exchanged() -> None:
    wanted = [[sent_by(rank, what) for rank in range(3)] for what in (*SENT, *SENT)]
    assert run_ranks(exchanged, 3) == [wanted] * 3
