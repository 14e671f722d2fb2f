"""The same command and seed give the same training, bit for bit; only the cache's "auto" goes by measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from training_runs import Outcome, Run, outcome_of, pipeline_trainer

# of different lengths, and some twice: what the cache finds must not depend on how fast it was written
RUN = Run(epochs=5, samples=48, accumulation=1).with_options(
    freeze_policy="schedule", freeze_schedule={1: 1, 3: 3}, learning_rate=1e-3
)


class Twice(torch.utils.data.Dataset[Any]):
    """Half of the samples, each of them twice."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index // 2]


def trained(rank: int, world_size: int, folder: str, slower: bool) -> tuple[Outcome, list[Any]]:
    """Trains with defaults. Where it is slower, times that are measured are other ones."""
    if slower and rank == 0:
        torch.nn.functional.gelu = with_pauses(torch.nn.functional.gelu)  # type: ignore[assignment]
    model = RUN.build_model()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    trainer = pipeline_trainer(RUN, 2, folder, model, activation_cache="on")
    trainer.train_dataset = Twice(trainer.train_dataset)
    outcome = outcome_of(trainer)
    keys = ("num_frozen_layers", "pipeline_parallel_size", "num_microbatches", "cache_layers_skipped")
    return outcome, [{k: entry[k] for k in keys if k in entry} for entry in trainer.state.log_history]


def with_pauses(function: Any) -> Any:
    def slow(*positional: Any, **keywords: Any) -> Any:
        for _ in range(2000):
            pass
        return function(*positional, **keywords)

    return slow


@pytest.mark.slow
def test_the_same_command_twice(tmp_path: Path) -> None:
    """Two stages that become one with two replicas; layers freeze and are cached; with dropout."""
    (one, said), *_ = run_ranks(trained, 2, str(tmp_path / "a"), False)
    (two, again), *_ = run_ranks(trained, 2, str(tmp_path / "b"), True)
    assert one.losses == two.losses and one.gradient_norms == two.gradient_norms
    assert all(torch.equal(one.weights[name], two.weights[name]) for name in one.weights)
    assert said == again and max(entry.get("cache_layers_skipped", 0) for entry in said) > 0
    assert {entry["pipeline_parallel_size"] for entry in said if "pipeline_parallel_size" in entry} == {1, 2}
