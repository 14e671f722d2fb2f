"""If inputs, frozen weights or the model's function change, the cache goes off before it returns wrong outputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_runs import hit_rates, trainer_of
from distributed import run_ranks, run_ranks_expecting_error
from one_job import run_each
from selection import slow
from torch import nn
from training_data import Kind, TrainingData
from training_runs import (
    WORLD,
    Outcome,
    Run,
    StopAfter,
    assert_same_training,
    largest_difference,
    outcome_of,
    when_it_ends,
)
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.parts.prefix_cache.cache.sharing import STORE
from hf_pipetransformer.parts.prefix_cache.frozen_function import OTHER_WEIGHTS

RUN = Run(samples=24, epochs=4, accumulation=1)
"""Three steps an epoch, on two processes."""
AT_EPOCH = {3: 1}
"""The first layer freezes before the fourth step; epoch 3 is the first that reads."""


# ------------------------------------------------------------------------------------ augmentation
class NoisyImages(TrainingData):
    """Other pixels at each access, drawn from the generators that the loader has seeded."""

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
    run = Run("image-classification", epochs=5, trainer=WithNoise).with_options(**options)
    return ended(trainer_of(run, {0: 2, 1: 2, 2: 1}, {3: 1}, activation_cache=mode))


def ended(trainer: PipeTransformerTrainer) -> tuple[Outcome, list[dict[str, Any]], str | None]:
    """The outcome of a training, the cache's metrics, and the reason why the cache was off in the end."""
    reasons: list[str | None] = []
    when_it_ends(trainer, lambda cache: reasons.append(cache and cache.reason_off))
    outcome = outcome_of(trainer)
    return outcome, [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry], reasons[-1]


@pytest.mark.slow
def test_augmented_images_miss_and_the_cache_goes_off() -> None:
    """An evaluation's images are the same each time: that they are found must not hide it."""
    evaluates = {"eval_strategy": "epoch"}
    cases: dict[str, tuple[str, dict[str, Any]]] = {"on": ("on", evaluates), "off": ("off", {})}
    found = run_each(augmented, WORLD, cases)
    for outcome, _, reason in found["on"]:
        assert_same_training([outcome], found["off"][0][0])
        assert "0 were found" in str(reason)
    assert [e["cache_hit_rate"] for e in found["on"][0][1]] == [0, 0]  # filled, then read in vain


# ------------------------------------------------------------------------------------ inputs that the trainer changes
def flipped(inputs: dict[str, Any]) -> dict[str, Any]:
    return {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}


class MirroredNowAndThen:
    """A Trainer's mixin: the loss is computed on other inputs than the collator's.

    In training alone: the examination builds no graph, and does not see the other inputs.
    """

    calls = 0

    def compute_loss(self, model: Any, inputs: dict[str, Any], *positional: Any, **keywords: Any) -> Any:
        self.calls += torch.is_grad_enabled()
        inputs = flipped(inputs) if self.calls % 5 == 4 else inputs
        return super().compute_loss(model, inputs, *positional, **keywords)  # type: ignore[misc]


class CallsAPart:
    """With text: from some step on, the loss also calls a part of the model on other inputs."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *positional: Any, **keywords: Any) -> Any:
        loss = super().compute_loss(model, inputs, *positional, **keywords)  # type: ignore[misc]
        if self.state.global_step < 7 or not torch.is_grad_enabled():  # type: ignore[attr-defined]
            return loss
        part = {name: inputs[name].roll(1, 0) for name in ("input_ids", "attention_mask")}
        return loss + model.bert(**part).pooler_output.square().mean()


class PreparedInTraining:
    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)  # type: ignore[misc]
        if self.model.training:  # type: ignore[attr-defined]
            inputs["pixel_values"].neg_()  # in place
        return inputs


# ------------------------------------------------------------------------------------ what callbacks change
class Scaled(nn.Module):
    """A user's module: an adapter's scale, which no configuration knows, and a mask."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scaling = {"default": 1.0}
        self.register_buffer("mask", torch.tensor([0.5, 1.0]))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) * (self.scaling["default"] * self.mask[0])


Change = Callable[[nn.Module], None]
"""Of the user's model."""


class Changes(TrainerCallback):
    """Changes the model once: in the middle of epoch 3, or at its end. The cache is read in this epoch."""

    def __init__(self, event: str, change: Change, step: int = 7) -> None:
        self._change, self._step, self._is_done = change, step, False
        setattr(self, event, self._on_event)

    def _on_event(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if state.global_step >= self._step and not self._is_done:
            self._is_done = True
            self._change(model)


def layer_of(model: nn.Module) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith(("layer.0", "layers.0")))


def negate(model: nn.Module) -> None:
    """Negate the weights: their norms stay."""
    for parameter in layer_of(model).parameters():
        if not getattr(parameter, "is_elsewhere", False):
            parameter.data = -parameter.data


def another_scale(model: nn.Module) -> None:
    layer_of(model).intermediate.scaling["default"] = 3.0


def another_activation(model: nn.Module) -> None:
    layer_of(model).intermediate.inner.intermediate_act_fn = nn.ReLU()


def another_mask(model: nn.Module) -> None:
    layer_of(model).intermediate.mask = torch.tensor([1.0, 0.5])


class Hook(TrainerCallback):
    """Registers a pre-hook on the model that changes token ids, from a certain step on."""

    def __init__(self, first_step: int) -> None:
        self._first_step = first_step

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        def change(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if state.global_step < self._first_step:
                return None
            return args, {**kwargs, "input_ids": kwargs["input_ids"].clamp(max=20 + state.global_step)}

        model.register_forward_pre_hook(change, with_kwargs=True)


@dataclass(frozen=True)
class Doubt:
    """A training that changes something, its stages, and the reason why the cache is off in the end."""

    reason: str
    stages: int = 1
    kind: Kind = "text-classification"
    mixin: type | None = None
    callback: Callable[[], TrainerCallback] | None = None
    table: dict[int, int] = field(default_factory=lambda: AT_EPOCH)

    def trainer(self, mode: str) -> PipeTransformerTrainer:
        run = replace(RUN, kind=self.kind, trainer=self.mixin)
        microbatches: Any = 2 if self.stages > 1 else "auto"
        stages = dict.fromkeys(range(3), self.stages)
        trainer = trainer_of(run, stages, self.table, mode, activation_cache=mode, num_microbatches=microbatches)
        if self.kind == "text-classification":
            layer = layer_of(trainer.model)
            layer.intermediate = Scaled(layer.intermediate)
        if self.callback is not None:
            trainer.add_callback(self.callback())
        return trainer


OF_INPUTS = partial(Doubt, "changes the inputs before the model receives them", kind="image-classification")
OF_FUNCTION = partial(Doubt, "different outputs")
DOUBTS = {
    "inputs now and then": OF_INPUTS(mixin=MirroredNowAndThen),
    "inputs in place": OF_INPUTS(mixin=PreparedInTraining, stages=2),
    "inputs of a part": Doubt("", mixin=CallsAPart, kind="text-classification"),  # computed; the cache goes on
    "weights": Doubt(OTHER_WEIGHTS, callback=partial(Changes, "on_step_end", negate)),
    # the second stage cannot see these; not text, as its batches differ in shape, and stages then exchange messages
    "weights of the first stage": Doubt(
        OTHER_WEIGHTS, 2, "image-classification", callback=partial(Changes, "on_step_end", negate)
    ),
    # in one epoch: at its end they would pass for the first weights
    "weights before more layers freeze": Doubt(
        OTHER_WEIGHTS, callback=partial(Changes, "on_step_end", negate, 4), table={3: 1, 5: 2}
    ),
    "a buffer": Doubt("buffers have been changed", 2, callback=partial(Changes, "on_step_end", another_mask)),
    "a scale": OF_FUNCTION(callback=partial(Changes, "on_epoch_end", another_scale)),
    # it reads the trainer's state, which changes in each step
    "a pre-hook when the cache is read": Doubt("a hook or code", callback=partial(Hook, 7)),
}


def without_and_with(rank: int, world_size: int, name: str) -> tuple[Outcome, Outcome, str | None]:
    """Why the cache was off in the end, too."""
    without = outcome_of(DOUBTS[name].trainer("off"))
    with_cache, _, reason = ended(DOUBTS[name].trainer("on"))
    return without, with_cache, reason


IN_SHORT = ["weights", "a buffer"]


@pytest.mark.parametrize("names", [IN_SHORT, *slow([name for name in DOUBTS if name not in IN_SHORT])])
@pytest.mark.slow
def test_the_cache_goes_off_before_anything_wrong_is_read(names: list[str]) -> None:
    for name, results in run_each(without_and_with, 2, {name: (name,) for name in names}, timeout=240).items():
        for without, with_cache, reason in results:
            assert_same_training([with_cache], without)
            assert DOUBTS[name].reason in str(reason), name


def refused(rank: int, world_size: int) -> None:
    Doubt("", 2, callback=partial(Hook, 7)).trainer("on").train()


def test_in_a_pipeline_other_inputs_are_refused() -> None:
    """The loss of a transformers model is computed on micro-batches, which the other stages take from the batch."""
    for error in run_ranks_expecting_error(refused, 2):
        assert isinstance(error, ValueError)
        assert "on other inputs than the batch's" in str(error) and "forward pre-hook" in str(error)


# ------------------------------------------------------------------------------------ weights that are put back
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
    """Evaluate with half of the weights, and put them back."""
    callback = Averaged()
    trainer = trainer_of(Run(epochs=5), {0: 1, 1: 1}, {3: 1}, activation_cache=mode)
    trainer.add_callback(callback)
    callback.trainer = trainer
    outcome = outcome_of(trainer)
    return outcome, callback.losses, [e for e in trainer.state.log_history if "cache_hit_rate" in e]


@pytest.mark.slow
def test_other_weights_are_not_evaluated_from_the_cache() -> None:
    with_cache, without = run_each(averaging, 2, {"on": ("on",), "off": ("off",)}).values()
    torch.testing.assert_close(with_cache[0][1], without[0][1], rtol=0, atol=1e-5)
    assert_same_training([outcome for outcome, *_ in with_cache], without[0][0])
    assert hit_rates(with_cache[0][2])[-1] == (1, 0)  # and the training goes on from it


# ------------------------------------------------------------------------------------ a shared folder
def sharing(rank: int, world_size: int, store: str | None, change: Change | None) -> tuple[Outcome, float]:
    """Two epochs of a model with its first frozen weights, and the share of samples found in the first cached one."""
    shared = {} if store is None else {"activation_cache_dir": store}
    mode = "off" if store is None else "on"
    trainer = trainer_of(replace(RUN, epochs=2), {0: 1, 1: 1}, {1: 1}, activation_cache=mode, **shared)
    layer = layer_of(trainer.model)
    layer.intermediate = Scaled(layer.intermediate)
    if change is not None:
        change(trainer.model)
    outcome, epochs, _ = ended(trainer)
    return outcome, hit_rates(epochs)[0][0] if epochs else 0.0


def all_sharing(rank: int, world_size: int, store: str) -> list[tuple[Outcome, float]]:
    """A run that fills the folder, one that finds it full, and one that must not find its outputs, as without it."""
    runs = ((store, None), (store, None), (store, another_activation), (None, another_activation))
    return [sharing(rank, world_size, *run) for run in runs]


@pytest.mark.slow
def test_another_function_finds_nothing_in_a_shared_folder(tmp_path: Path) -> None:
    """Although no configuration knows of it."""
    first, again, changed, uncached = run_ranks(all_sharing, 2, str(tmp_path / "store"))[0]
    assert [found for _, found in (again, changed)] == [1, 0]
    assert_same_training([again[0]], first[0])
    assert_same_training([changed[0]], uncached[0])
    assert largest_difference(changed[0].weights, first[0].weights)[0] > 1e-4


def stopped(rank: int, world_size: int, store: str) -> None:
    """A training that stops in the epoch that stores, after a change of the weights."""
    trainer = Doubt("", callback=partial(Changes, "on_step_end", negate, 4)).trainer("on")
    trainer.args.activation_cache_dir = store
    trainer.add_callback(StopAfter(5))
    trainer.train()


@pytest.mark.slow
def test_states_of_other_weights_do_not_stay_in_a_shared_folder(tmp_path: Path) -> None:
    """These outputs were put under the name of the earlier weights, which another training may have."""
    run_ranks(stopped, 2, str(tmp_path / "cache"))
    assert (tmp_path / "cache" / STORE).exists()
    assert list((tmp_path / "cache" / STORE).glob("0*-*")) == []
