"""Trainings on a device that behaves like an accelerator: no mixed devices, no wrong groups, only the noted waits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fake_device
import fake_groups
import pytest
import torch
from distributed import run_ranks
from one_job import run_calls, run_each
from training_data import PadCollator
from training_runs import (
    Outcome,
    Run,
    StopAfter,
    largest_difference,
    outcome_of,
    pipeline,
    pipeline_trainer,
    stages_by_frozen,
)
from transformers import Trainer, TrainerCallback, TrainingArguments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

QUIET = {"dataloader_pin_memory": False, "logging_strategy": "no", "num_microbatches": 4}
"""The device has no pinned memory. Logging reads the loss, in the stock Trainer as here."""
FREEZING = {"freeze_policy": "schedule", "freeze_schedule": {1: 1}}
"""The first layer freezes after the first epoch. Its outputs are stored in the second, and read from the third on."""


@dataclass(frozen=True)
class Way:
    """A way to train, and the counted waits of a steady step on each rank."""

    stages: int
    waits: tuple[Mapping[str, int], ...]
    kind: Any = "text-classification"
    replicas: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> Run:
        return Run(self.kind, samples=48 * self.replicas, epochs=4, accumulation=1)


MASKS = {"item": 1, "wait": 1}
"""Of a model of transformers in each forward: whether an attention mask masks anything, and the mask made of it."""
BATCH = {"to_device": 3}
"""Three inputs, which the stock Trainer moves."""
STOCK = {**MASKS, **BATCH}


def forwards(number: int, **others: int) -> dict[str, int]:
    """The counted waits of a step with this number of forwards, and the `others`."""
    each = {name: number * most for name, most in MASKS.items()} | BATCH
    return {name: each.get(name, 0) + others.get(name, 0) for name in {**each, **others}}


SLICED = {"item": 1, "wait": 2, **BATCH}
"""Of a causal language model in slices of the tokens: only the first slice's mask is looked at."""

WAYS = {
    "plain": Way(1, (STOCK,)),
    "cached": Way(1, (STOCK,), options={**FREEZING, "activation_cache": "on"}),
    "two-stages": Way(2, (forwards(4, from_device=1), forwards(4))),
    "two-stages-cached": Way(
        2,
        (forwards(4, from_device=1), forwards(4)),
        options={**FREEZING, "activation_cache": "on"},
    ),
    "two-stages-zbv": Way(2, (forwards(8, from_device=1), forwards(8)), options={"pipeline_schedule": "zbv"}),
    # the items of the prepared batch are counted, which `_prepare_inputs` may have changed
    "two-replicas-cached": Way(
        1, 2 * (forwards(1, from_device=1),), replicas=2, options={**FREEZING, "activation_cache": "on"}
    ),
    "sliced": Way(2, (SLICED, SLICED), "causal-lm", options={"token_slices": 3, "num_microbatches": 1}),
}


class Counts(TrainerCallback):
    """Counts what each step makes the program wait for, from the end of the step before."""

    def __init__(self) -> None:
        self.of_step: dict[int, dict[str, int]] = {}
        self.sites: dict[int, dict[str, int]] = {}
        self._counting: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._counting is not None:
            context, counted = self._counting
            context.__exit__(None, None, None)
            self.of_step[state.global_step] = {what: n for what, n in counted.items() if what in fake_device.COUNTED}
            self.sites[state.global_step] = {f"{what}: {site}": n for (what, site), n in fake_device.sites.items()}
        context = fake_device.counting()
        self._counting = context, context.__enter__()


Counts.__module__ = "transformers.trainer_callback"  # not a user's, who might look at weights in each step


@dataclass
class Seen:
    outcome: Outcome
    of_step: dict[int, dict[str, int]]
    sites: dict[int, dict[str, int]]
    wrong: dict[str, int]
    calls: list[tuple[str, int]] = field(default_factory=list)

    @property
    def steady(self) -> int:
        """A step in the middle of the last epoch."""
        return max(self.of_step) - 2


def prepare(world_size: int, library: Path) -> None:
    """Before the first of this process's trainings."""
    if fake_device.is_registered():
        return
    fake_device.register(library)
    if world_size > 1:
        fake_groups.register()
    else:
        for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # without a launcher
            del os.environ[name]


def on_the_device(calls: Mapping[str, Any], world_size: int, library: Path) -> dict[str, list[Any]]:
    """The results of each call on each rank. The functions get the library as an argument, too."""
    given = {name: (function, library, *arguments) for name, (function, *arguments) in calls.items()}
    return run_calls(world_size, given, env=fake_device.ENVIRONMENT, timeout=300)


def stock(rank: int, world_size: int, library: Path, run: Run) -> Seen:
    prepare(world_size, library)
    options = {**run.common_options(), "logging_strategy": "no", "dataloader_pin_memory": False}
    arguments = TrainingArguments(
        "stock",
        per_device_train_batch_size=run.per_device,
        gradient_accumulation_steps=run.accumulation,
        **options,
    )
    data, collator = run.data(run.samples), PadCollator(run.kind)
    return seen_by(Trainer(run.build_model(), arguments, train_dataset=data, data_collator=collator))


def seen_by(trainer: Trainer) -> Seen:
    counts = Counts()
    trainer.add_callback(counts)
    assert trainer.args.device.type == "fake"
    num_calls = len(fake_groups.log)
    outcome = outcome_of(trainer)
    assert not fake_device.errors, fake_device.errors  # a probe may have caught one
    return Seen(outcome, counts.of_step, counts.sites, dict(fake_groups.wrong), fake_groups.log[num_calls:])


def train(rank: int, world_size: int, library: Path, way: Way) -> Seen:
    prepare(world_size, library)
    return seen_by(pipeline_trainer(way.run, way.stages, **{**QUIET, **way.options}))


def train_on_the_cpu(rank: int, world_size: int, way: Way) -> Outcome:
    return pipeline(rank, world_size, way.run, way.stages, **{**QUIET, **way.options, "use_cpu": True})


def told(seen: Seen, step: int) -> str:
    sites = "\n".join(f"{n} {site}" for site, n in sorted(seen.sites[step].items()))
    return f"{seen.of_step[step]}\n{sites}"


def assert_waits(name: str, everyone: list[Seen]) -> None:
    way = WAYS[name]
    for rank, (seen, most) in enumerate(zip(everyone, way.waits, strict=True)):
        assert not seen.wrong
        assert seen.of_step[seen.steady] == most, f"{name}, rank {rank}: {told(seen, seen.steady)}"
        if name in ("cached", "two-stages-cached"):
            first = 3 * (seen.outcome.steps // 4) + 1
            begins = seen.of_step[first]
            assert begins["to_device"] <= 16 and begins.get("from_device", 0) <= 5, told(seen, first)


COMPARED = ("cached", "two-stages-cached", "two-stages-zbv", "two-replicas-cached", "sliced")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_steady_step_waits_as_noted(world_size: int, library: Path) -> None:
    """In one process a step waits as often as the stock Trainer's. The ways in `COMPARED` train as on the CPU.

    Weights of cached layers are on the host. When an epoch begins, changes of them are found without waiting for a
    copy of each.
    """
    ways = {name: way for name, way in WAYS.items() if way.stages * way.replicas == world_size}
    calls = {"stock": (stock, WAYS["plain"].run)} if world_size == 1 else {}
    found = on_the_device({**calls, **{name: (train, way) for name, way in ways.items()}}, world_size, library)
    for seen in found.get("stock", ()):
        assert seen.of_step[seen.steady] == STOCK
    for name in ways:
        assert_waits(name, found[name])
    compared = {name: (way,) for name, way in ways.items() if name in COMPARED}
    for name, outcomes in run_each(train_on_the_cpu, world_size, compared).items():
        assert all(largest_difference(s.outcome.weights, outcomes[0].weights)[0] < 1e-5 for s in found[name]), name


def shrinking(rank: int, world_size: int, library: Path | None, run: Run) -> Outcome:
    """A training that goes from two stages to two replicas when a layer freezes; without a library on the CPU."""
    if library is not None:
        prepare(world_size, library)
    trainer = pipeline_trainer(run, 2, use_cpu=library is None, **ELASTIC)
    stages_by_frozen(trainer, {0: 2, 1: 1})
    if library is None:
        return outcome_of(trainer)
    seen = seen_by(trainer)
    seen.outcome.notes["last"] = seen.of_step[seen.steady], told(seen, seen.steady)
    return seen.outcome


ELASTIC = {**QUIET, **FREEZING, "activation_cache": "on"}


def interrupted(rank: int, world_size: int, library: Path, folder: str) -> Seen:
    prepare(world_size, library)
    run = Way(world_size, ()).run
    saving = {"save_strategy": "epoch", "eval_strategy": "epoch", "max_grad_norm": 0.5, **FREEZING}
    trainer = pipeline_trainer(run, world_size, folder, **{**QUIET, **saving})
    trainer.add_callback(StopAfter(2 * 48 // (4 * world_size)))  # two epochs
    trainer.train()
    trainer.evaluate()
    trainer = pipeline_trainer(run, world_size, folder, **{**QUIET, **saving})
    counts = Counts()
    trainer.add_callback(counts)
    outcome = outcome_of(trainer, resume_from_checkpoint=True)  # type: ignore[arg-type]
    assert all(torch.isfinite(torch.tensor(value)) for value in outcome.metrics.values())
    return Seen(outcome, counts.of_step, counts.sites, dict(fake_groups.wrong))


def test_two_processes(library: Path, tmp_path: Path) -> None:
    """Whole trainings with freezing and the cache: a mixed operation is an error."""
    run = WAYS["plain"].run
    kinds = ("causal-lm", "image-classification", "seq2seq")
    calls = {kind: (train, Way(2, (), kind, options={**FREEZING, "activation_cache": "on"})) for kind in kinds}
    others = {
        "shrinking": (shrinking, run),
        "resumed": (interrupted, str(tmp_path)),
    }
    found = on_the_device({**calls, **others}, 2, library)
    for name in kinds:
        for seen in found[name]:
            assert not seen.wrong and seen.outcome.steps == max(seen.of_step), name
    for seen in found["resumed"]:
        assert not seen.wrong and min(seen.of_step) > 2 * 48 // (4 * 2)  # it went on behind the second of four epochs

    expected = run_ranks(shrinking, 2, None, run)[0]
    for outcome in found["shrinking"]:
        assert largest_difference(outcome.weights, expected.weights)[0] < 1e-5
        counts, sites = outcome.notes["last"]
        # as in one process each, except for the number of items in the prepared batch: the pipeline has gone
        assert counts == forwards(1, from_device=1), sites


def frozen_below(rank: int, world_size: int, library: Path, run: Run) -> Seen:
    prepare(world_size, library)
    trainer = pipeline_trainer(run, 3, **QUIET)
    for name, parameter in trainer.model.named_parameters():
        parameter.requires_grad_("layer.0." not in name and "embeddings" not in name)
    return seen_by(trainer)


def test_every_group_is_connected_by_all_its_members_first(library: Path) -> None:
    """A frozen first stage makes fewer calls than the other stages, and NCCL waits in the first call of a group."""
    run = Run(samples=48, epochs=1, accumulation=1)
    for seen in on_the_device({"": (frozen_below, run)}, 3, library)[""]:
        first = {group: name for name, group in reversed(seen.calls)}
        assert len(first) == 2 and set(first.values()) == {"all_reduce"}  # all processes, and the pipeline
