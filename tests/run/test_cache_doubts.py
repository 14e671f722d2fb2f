"""The cache goes off, and nothing wrong is read, where inputs or frozen weights change."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_runs import cached, hit_rates, trainer_of
from distributed import run_ranks
from selection import slow
from test_elastic_pipeline import StopAfter
from training_data import Kind, TrainingData
from training_runs import (
    WORLD,
    Outcome,
    Run,
    assert_same_training,
    at_each_step,
    outcome_of,
    when_it_ends,
)
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.cache.sharing import STORE
from hf_pipetransformer.run.frozen_function import OTHER_WEIGHTS, digest_of
from hf_pipetransformer.run.run import PipelineRun, watch_steps


class NoisyImages(TrainingData):
    """Other pixels each time they are read, drawn from what the loader has seeded."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        noise = random.random() + float(torch.rand(()))
        return {**sample, "pixel_values": (torch.tensor(sample["pixel_values"]) + noise).tolist()}


class WithNoise:
    """A Trainer's mixin."""

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        keywords["train_dataset"] = NoisyImages("image-classification", 83)
        super().__init__(*positional, **keywords)


def augmented(
    rank: int, world_size: int, mode: str, options: dict[str, Any]
) -> tuple[Outcome, list[dict[str, Any]], str | None]:
    reasons: list[str | None] = []

    class Watching(WithNoise):
        def get_batch_samples(self, *positional: Any) -> Any:
            batches = super().get_batch_samples(*positional)  # type: ignore[misc]
            cache = self._pipeline_run.cache  # type: ignore[attr-defined]
            reasons.append(cache and cache.reason_off)
            return batches

    run = Run("image-classification", epochs=5, trainer=Watching).with_options(**options)
    outcome, epochs = cached(rank, world_size, run, {0: 2, 1: 2, 2: 1}, {3: 1}, activation_cache=mode)
    return outcome, epochs, reasons[-1]


@pytest.mark.slow
def test_augmented_images_miss_and_the_cache_goes_off() -> None:
    """An evaluation's images are the same each time: that they are found must not hide it."""
    with_cache, without = (run_ranks(augmented, WORLD, mode, {"eval_strategy": "epoch"}) for mode in ("on", "off"))
    assert_same_training([outcome for outcome, *_ in with_cache], without[0][0])
    assert [e["cache_hit_rate"] for e in with_cache[0][1]] == [0, 0]  # filled, then read in vain
    assert all("0 were found" in str(reason) for *_, reason in with_cache)


class Mirrored:
    """A Trainer's mixin whose loss is of other inputs than the collator gave."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *positional: Any, **keywords: Any) -> Any:
        inputs = {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}
        return super().compute_loss(model, inputs, *positional, **keywords)  # type: ignore[misc]


class Prepared:
    """Likewise."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)  # type: ignore[misc]
        return {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}


class MirroredNowAndThen:
    """Likewise, in training alone: the examination, which builds no graph, sees nothing of it."""

    calls = 0

    def compute_loss(self, model: Any, inputs: dict[str, Any], *positional: Any, **keywords: Any) -> Any:
        self.calls += torch.is_grad_enabled()
        if self.calls % 5 == 4:
            inputs = {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}
        return super().compute_loss(model, inputs, *positional, **keywords)  # type: ignore[misc]


class PreparedInTraining:
    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)  # type: ignore[misc]
        if self.model.training:  # type: ignore[attr-defined]
            inputs["pixel_values"].neg_()  # in place
        return inputs


class Stepped:
    def training_step(self, model: Any, inputs: dict[str, Any], *positional: Any, **keywords: Any) -> Any:
        inputs = {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}
        return super().training_step(model, inputs, *positional, **keywords)  # type: ignore[misc]


def with_and_without(rank: int, world_size: int, run: Run, num_stages: int) -> tuple[Outcome, Outcome, str | None]:
    """Why the cache was off in the end, too."""
    reasons: list[str | None] = []
    outcomes = []
    for mode in ("off", "on"):
        trainer = trainer_of(run, {0: num_stages, 1: num_stages}, {3: 1}, mode, activation_cache=mode)
        at_each_step(trainer, after=lambda run: reasons.append(run.cache and run.cache.reason_off))
        outcomes.append(outcome_of(trainer))
    return outcomes[0], outcomes[1], reasons[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixin", "num_stages"),
    [(Mirrored, 1), (Prepared, 1), (MirroredNowAndThen, 1), (PreparedInTraining, 2), (Stepped, 2)],
)
def test_inputs_that_the_trainer_changes_are_not_cached_under_the_collators_keys(mixin: type, num_stages: int) -> None:
    run = Run("image-classification", epochs=4, trainer=mixin)
    for without, with_cache, reason in run_ranks(with_and_without, 2, run, num_stages):
        assert_same_training([with_cache], without)
        assert "changes the inputs before the model receives them" in str(reason)


class Averaged(TrainerCallback):
    """Evaluates with other weights, as an exponential average does, and puts the trained ones back."""

    def __init__(self) -> None:
        self.trainer: PipeTransformerTrainer | None = None
        self.losses: list[float] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        assert self.trainer is not None
        for factor in (0.5, 2.0):
            for parameter in model.parameters():
                parameter.data.mul_(factor)
            if factor == 0.5:
                self.losses.append(self.trainer.evaluate()["eval_loss"])


def averaging(rank: int, world_size: int, mode: str) -> tuple[Outcome, list[float], list[dict[str, Any]]]:
    """As on a GPU: weights of cached layers leave the device."""
    callback = Averaged()
    run = Run(epochs=5)
    trainer = trainer_of(run, {0: 1, 1: 1}, {3: 1}, activation_cache=mode)
    trainer.add_callback(callback)
    at_each_step(trainer, before=lambda run: setattr(run.pipeline, "offloads", True))
    callback.trainer = trainer
    outcome = outcome_of(trainer)
    return outcome, callback.losses, [e for e in trainer.state.log_history if "cache_hit_rate" in e]


@pytest.mark.slow
def test_other_weights_are_not_evaluated_from_the_cache() -> None:
    with_cache, without = (run_ranks(averaging, 2, mode) for mode in ("on", "off"))
    torch.testing.assert_close(with_cache[0][1], without[0][1], rtol=0, atol=1e-5)
    assert_same_training([outcome for outcome, *_ in with_cache], without[0][0])
    assert hit_rates(with_cache[0][2])[-1] == (1, 0)  # and the training goes on from it


class RunningAverage(TrainerCallback):
    def on_step_end(self, *_: Any, **__: Any) -> None:
        pass


def test_weights_stay_where_a_callback_reads_them_in_each_step() -> None:
    assert watch_steps([RunningAverage()])
    assert not watch_steps([Averaged()])


def scaler(step: int, event: str = "on_step_end", factor: float = 1.5) -> TrainerCallback:
    """Puts other weights into the first layer, once, behind a step."""

    def scale(_: Any, args: Any, state: Any, control: Any, model: Any, **__: Any) -> None:
        if state.global_step == step:
            for name, parameter in model.named_parameters():
                is_first = "layer.0." in name or "layers.0." in name
                if is_first and not getattr(parameter, "is_elsewhere", False):
                    parameter.data = parameter.data * factor

    callback: TrainerCallback = type("Scaler", (TrainerCallback,), {event: scale})()
    return callback


def scaled(
    rank: int,
    world_size: int,
    run: Run,
    table: dict[int, int],
    step: int | None,
    mode: str,
    stops_after: int | None = None,
    event: str = "on_step_end",
    factor: float = 1.5,
    num_stages: int = 1,
) -> tuple[Outcome, str | None]:
    trainer = trainer_of(run, dict.fromkeys(range(3), num_stages), table, activation_cache=mode)
    if step is not None:
        trainer.add_callback(scaler(step, event, factor))
    if stops_after is not None:
        trainer.add_callback(StopAfter(stops_after))
    reasons: list[str | None] = []
    when_it_ends(trainer, lambda cache: reasons.append(cache and cache.reason_off))
    return outcome_of(trainer), reasons[-1]


@pytest.mark.slow
def test_states_of_other_weights_do_not_stay_in_a_shared_folder(tmp_path: Path) -> None:
    """They were put under the name of the earlier weights, which another training may have."""
    run = Run(epochs=4, per_device=4 * WORLD).with_options(activation_cache_dir=str(tmp_path / "cache"))
    ((_, reason),) = run_ranks(scaled, 1, run, {3: 1}, 4, "on", stops_after=5)
    assert reason == OTHER_WEIGHTS
    assert list((tmp_path / "cache" / STORE).glob("0*-*")) == []
    whole = Run(epochs=4, per_device=4 * WORLD)
    shared = whole.with_options(activation_cache_dir=str(tmp_path / "cache"))
    ((outcome, reason),) = run_ranks(scaled, 1, shared, {3: 1}, None, "on")
    ((expected, _),) = run_ranks(scaled, 1, whole, {3: 1}, None, "off")
    assert reason is None
    assert_same_training([outcome], expected)


@pytest.mark.parametrize(
    ("world", "num_stages", "event", "factor"),
    [
        (1, 1, "on_step_end", 1.5),
        *slow((2, 1, "on_step_end", -1.0)),  # of the same norms
        *slow((2, 1, "on_evaluate", 1.5)),
        *slow((2, 2, "on_step_end", 1.5)),  # which the second stage cannot see
    ],
)
def test_weights_that_change_while_they_are_read_are_noticed_at_once(
    world: int, num_stages: int, event: str, factor: float
) -> None:
    """The third epoch reads; the first of its steps, the seventh of all, is followed by other weights."""
    # images are of one shape: of text each batch has another one, and then stages tell one another anyway
    kind: Kind = "image-classification" if num_stages > 1 else "text-classification"
    run = Run(kind, epochs=4, per_device=4 * WORLD // world)
    if event == "on_evaluate":
        run = run.with_options(eval_strategy="steps", eval_steps=7)
    changed = run_ranks(scaled, world, run, {3: 1}, 7, "on", event=event, factor=factor, num_stages=num_stages)
    without = run_ranks(scaled, world, run, {3: 1}, 7, "off", event=event, factor=factor, num_stages=num_stages)
    assert_same_training([outcome for outcome, _ in changed], without[0][0])
    assert {reason for _, reason in changed} == {OTHER_WEIGHTS}


@pytest.mark.slow
def test_weights_that_changed_before_more_layers_freeze_are_noticed() -> None:
    """In one epoch: at its end they would be taken for what they were all the time."""
    run, table = Run(epochs=4, per_device=4 * WORLD), {3: 1, 5: 2}
    ((outcome, reason),) = run_ranks(scaled, 1, run, table, 4, "on")
    ((expected, _),) = run_ranks(scaled, 1, run, table, 4, "off")
    assert_same_training([outcome], expected)
    assert reason == OTHER_WEIGHTS


def changed_while_off(rank: int, world_size: int) -> list[dict[str, bool]]:
    """Are the store's names of the weights those of the weights?"""
    trainer = trainer_of(Run(epochs=6, per_device=4 * WORLD), {0: 1, 1: 1, 2: 1}, {3: 1, 12: 2})
    trainer.add_callback(scaler(10))
    found: list[dict[str, bool]] = []

    def turn_off(run: PipelineRun) -> None:
        assert run.cache is not None
        if trainer.state.global_step == 9:
            run.cache._turn_off("loading takes long", may_pay_later=True)

    def look(run: PipelineRun) -> None:
        assert run.cache is not None
        run.pipeline.weights.onload()
        table = run.pipeline.stack.table
        digests = run.cache._function._digests
        found.append({name: digest == digest_of(table[name]) for name, digest in digests.items()})

    at_each_step(trainer, turn_off, look)
    trainer.train()
    return found


@pytest.mark.slow
def test_weights_that_changed_while_it_was_off_get_another_name() -> None:
    (found,) = run_ranks(changed_while_off, 1)
    assert found[9] and not all(found[11].values())  # changed, and nobody has looked yet
    assert found[-1] and all(found[-1].values())
