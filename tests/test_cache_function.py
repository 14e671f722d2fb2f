"""What is cached belongs to the function that the model is now, not to its description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from test_auto_cache import hit_rates, trainer_of
from torch import nn
from training_runs import Outcome, Run, largest_difference, outcome_of
from transformers import TrainerCallback

RUN = Run(samples=24, epochs=6, accumulation=1)


class Scaled(nn.Module):
    """A user's module: an attribute that no configuration knows, and a buffer."""

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner = inner
        self.factor = factor
        self.register_buffer("mask", torch.tensor([0.5, 1.0]))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) * self.factor * self.mask[0]


class ChangesMask(TrainerCallback):
    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if round(state.epoch or 0) == 4:
            with torch.no_grad():
                model.bert.encoder.layer[0].intermediate.mask.copy_(torch.tensor([1.0, 0.5]))


def trained(
    rank: int, world_size: int, stages: int, folder: str, factor: float, cache: str = "on", changes: bool = False
) -> tuple[Outcome, list[dict[str, Any]], str | None]:
    trainer = trainer_of(
        RUN,
        dict.fromkeys(range(4), stages),
        {3: 1},
        f"run-{factor}-{cache}-{folder.rpartition('/')[2]}",
        activation_cache=cache,
        num_microbatches=2 if stages > 1 else "auto",
        **({"activation_cache_dir": folder} if cache == "on" else {}),
    )
    layer = trainer.model.bert.encoder.layer[0]
    layer.intermediate = Scaled(layer.intermediate, factor)
    if changes:
        trainer.add_callback(ChangesMask())
    reasons: list[str | None] = []
    make = trainer._make_auto_cache

    def kept(*args: Any) -> Any:
        made = make(*args)
        close = made.close
        made.close = lambda *a, **k: (reasons.append(made.reason_off), close(*a, **k))[1]
        return made

    trainer._make_auto_cache = kept
    outcome = outcome_of(trainer)
    epochs = [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry]
    return outcome, epochs, reasons[0] if reasons else None


@pytest.mark.parametrize("stages", [1, 2])
def test_another_attribute_of_a_users_module_finds_nothing(stages: int, tmp_path: Path) -> None:
    run_ranks(trained, 2, stages, str(tmp_path / "store"), 1.0)
    (same, again, _), _ = run_ranks(trained, 2, stages, str(tmp_path / "store"), 1.0)
    assert hit_rates(again)[0][0] == 1
    (other, epochs, _), _ = run_ranks(trained, 2, stages, str(tmp_path / "store"), 2.0)
    (expected, _, _), _ = run_ranks(trained, 2, stages, str(tmp_path / "store"), 2.0, "off")
    assert hit_rates(epochs)[0][0] == 0
    assert largest_difference(other.weights, expected.weights)[0] < 1e-5
    assert largest_difference(other.weights, same.weights)[0] > 1e-4


@pytest.mark.parametrize("stages", [1, 2])
def test_a_buffer_that_a_callback_changes_turns_the_cache_off(stages: int, tmp_path: Path) -> None:
    (outcome, _, reason), _ = run_ranks(trained, 2, stages, str(tmp_path / "store"), 1.0, changes=True)
    (expected, _, _), _ = run_ranks(trained, 2, stages, str(tmp_path / "store"), 1.0, "off", changes=True)
    assert reason is not None and "buffers have been changed" in reason
    assert largest_difference(outcome.weights, expected.weights)[0] < 1e-5
