"""What is cached belongs to the function that the model is now, not to its description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_runs import hit_rates, trainer_of
from distributed import run_ranks
from selection import few
from torch import nn
from training_data import PadCollator
from training_runs import Run, largest_difference, outcome_of, with_cache_changed
from transformers import TrainerCallback

from hf_pipetransformer import PipeTransformerTrainer

RUN = Run(samples=24, epochs=4, accumulation=1)
"""Three steps an epoch."""
AT_EPOCH = {3: 1}
"""The first layer freezes before the fourth step; epoch 3 is the first that reads."""
AT_ONCE = {1: 1}
"""After the one step of the warm-up that changes no weight: two functions have the same frozen weights."""


class Scaled(nn.Module):
    """A user's module: an adapter's scale, which no configuration knows, and a mask."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scaling = {"default": 1.0}
        self.register_buffer("mask", torch.tensor([0.5, 1.0]))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) * (self.scaling["default"] * self.mask[0])


@dataclass(frozen=True)
class Result:
    weights: dict[str, torch.Tensor]
    rates: list[tuple[float, float]]
    reason: str | None


Change = Callable[[nn.Module], None]
"""Of the user's model."""


class Changes(TrainerCallback):
    """Changes the model in the middle of epoch 3, in which the cache is read, or at its end."""

    def __init__(self, event: str, change: Change) -> None:
        self._change, self._is_done = change, False
        setattr(self, event, self._on_event)

    def _on_event(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if state.global_step >= 7 and not self._is_done:
            self._is_done = True
            self._change(model)


def layer_of(model: nn.Module) -> Any:
    return model.get_submodule("bert.encoder.layer.0")


def train(
    stages: int,
    cache: str,
    folder: Path | None = None,
    prepare: Change | None = None,
    callback: Any = None,
    table: dict[int, int] = AT_EPOCH,
    epochs: int = RUN.epochs,
) -> Result:
    trainer: PipeTransformerTrainer = trainer_of(
        replace(RUN, epochs=epochs),
        dict.fromkeys(range(4), stages),
        table,
        f"run-{cache}-{folder.name if folder is not None else None}",
        activation_cache=cache,
        num_microbatches=2 if stages > 1 else "auto",
        logging_steps=100,
        **({"activation_cache_dir": str(folder)} if cache == "on" and folder is not None else {}),
    )
    layer = layer_of(trainer.model)
    layer.intermediate = Scaled(layer.intermediate)
    if prepare is not None:
        prepare(trainer.model)
    if callback is not None:
        trainer.add_callback(callback())
    reasons = reasons_off(trainer)
    outcome = outcome_of(trainer)
    epochs = [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry]
    return Result(outcome.weights, hit_rates(epochs), reasons[0] if reasons else None)


def reasons_off(trainer: PipeTransformerTrainer) -> list[str | None]:
    """Why the cache was off when the training closed it; filled by `train()`."""
    reasons: list[str | None] = []

    def note(made: Any) -> None:
        close = made.close
        made.close = lambda *a, **k: (reasons.append(made.reason_off), close(*a, **k))[1]

    with_cache_changed(trainer, note)
    return reasons


def difference(one: Result, other: Result) -> float:
    return largest_difference(one.weights, other.weights)[0]


# ------------------------------------------------------------------------------------ between two runs
def another_scale(model: nn.Module) -> None:
    layer_of(model).intermediate.scaling["default"] = 3.0


def another_activation(model: nn.Module) -> None:
    layer_of(model).intermediate.inner.intermediate_act_fn = nn.ReLU()


def another_mask(model: nn.Module) -> None:
    layer_of(model).intermediate.mask = torch.tensor([1.0, 0.5])


BETWEEN_RUNS = [another_scale, another_activation, another_mask]


def shared_folder(rank: int, world_size: int, stages: int, folder: Path) -> list[tuple[Result, Result]]:
    """A run that fills the folder, one that finds it full, and others that are to find nothing there."""
    run = partial(train, stages, table=AT_ONCE, epochs=2)
    results = [(run("on", folder), run("on", folder))]
    results += [(run("on", folder, change), run("off", None, change)) for change in BETWEEN_RUNS]
    return results


@pytest.mark.parametrize("stages", [1, 2], ids=["replicas", "pipeline"])
@pytest.mark.slow
def test_another_function_finds_nothing_in_a_shared_folder(stages: int, tmp_path: Path) -> None:
    (first, again), *others = run_ranks(shared_folder, 2, stages, tmp_path / "store")[0]
    assert again.rates[0][0] == 1
    assert difference(first, again) < 1e-5
    for change, (cached, uncached) in zip(BETWEEN_RUNS, others, strict=True):
        assert cached.rates[0][0] == 0, change.__name__
        assert difference(cached, uncached) < 1e-5, change.__name__
        assert difference(cached, first) > 1e-4, change.__name__


# ------------------------------------------------------------------------------------ in a training
def a_hook(model: nn.Module) -> None:
    layer_of(model).output.register_forward_hook(lambda module, args, output: 2 * output)


IN_TRAINING = [
    (2, "on_step_begin", another_activation),
    (2, "on_step_end", another_mask),
    (1, "on_step_begin", a_hook),
    (1, "on_epoch_end", another_scale),
]


def changed_in_training(rank: int, world_size: int, stages: int, event: str, change: Change) -> tuple[Result, Result]:
    callback = partial(Changes, event, change)
    return train(stages, "on", callback=callback), train(stages, "off", callback=callback)


@pytest.mark.parametrize(("stages", "event", "change"), few(IN_TRAINING, IN_TRAINING[1]))
def test_a_callback_that_changes_the_function_turns_the_cache_off(stages: int, event: str, change: Change) -> None:
    cached, uncached = run_ranks(changed_in_training, 2, stages, event, change)[0]
    assert cached.reason is not None
    assert ("buffers have been changed" if change is another_mask else "different outputs") in cached.reason
    assert difference(cached, uncached) < 1e-5


# ------------------------------------------------------------------------------------ inputs that a hook changes
class Hook(TrainerCallback):
    """Registers a pre-hook on the model that changes token ids, from a certain step on."""

    def __init__(self, first_step: int) -> None:
        self._first_step, self._state = first_step, None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        def change(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if state.global_step < self._first_step:
                return None
            return args, {**kwargs, "input_ids": kwargs["input_ids"].clamp(max=20 + state.global_step)}

        model.register_forward_pre_hook(change, with_kwargs=True)


FIRST_STEPS = [0, 7]
"""Before anything is cached; in an epoch that reads."""


def hooked(rank: int, world_size: int, stages: int) -> list[tuple[Result, Result]]:
    return [
        (train(stages, "on", callback=partial(Hook, step)), train(stages, "off", callback=partial(Hook, step)))
        for step in FIRST_STEPS
    ]


@pytest.mark.slow
def test_a_hook_on_the_model_that_changes_inputs_turns_the_cache_off() -> None:
    for cached, uncached in run_ranks(hooked, 2, 1)[0]:
        assert cached.reason is not None and "a forward pre-hook changes the inputs" in cached.reason
        assert difference(cached, uncached) < 1e-5


def refused(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError) as refusal:
        train(2, "on", callback=partial(Hook, 7))
    return str(refusal.value)


def test_in_a_pipeline_it_is_refused() -> None:
    """The loss of a transformers model is computed on micro-batches, which the other stages take from the batch."""
    for message in run_ranks(refused, 2):
        assert "on other inputs than the batch's" in message and "forward pre-hook" in message


# ------------------------------------------------------------------------------------ rows that cannot be put together
class TakesTwo(PadCollator):
    """As that of a training with batches of two: it cannot put more rows together."""

    def __call__(self, rows: list[Any]) -> Any:
        if len(rows) > 2:
            raise ValueError("at most two rows")
        return super().__call__(rows)


def collated_by_two(rank: int, world_size: int) -> str | None:
    run = Run(samples=8, epochs=2, per_device=2, accumulation=1)
    trainer = trainer_of(run, {0: 1, 1: 1}, {1: 1}, logging_steps=100)
    trainer.data_collator = TakesTwo(run.kind)
    reasons = reasons_off(trainer)
    trainer.train()
    return reasons[0]


def test_a_collator_that_cannot_put_the_rows_together_is_a_reason_and_no_error() -> None:
    assert "at most two rows" in str(run_ranks(collated_by_two, 1)[0])
