"""Probes before and during a training do not change the random numbers that the training draws on a device."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import fake_device
import pytest
import torch
from one_job import run_calls
from torch import nn
from training_data import PadCollator
from training_runs import Run, pipeline_trainer
from transformers import Trainer, TrainerCallback, TrainingArguments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

OPTIONS: dict[str, Any] = {"dataloader_pin_memory": False, "logging_strategy": "no"}
RUN = Run(samples=12, epochs=1, accumulation=1)


@cache
def give_a_generator(library: Path) -> torch.Generator:
    """Register the device, with a generator of its own; its kernels draw from the CPU's."""
    generator = torch.Generator()
    fake_device.register(library)
    module: Any = torch.get_device_module("fake")
    module.manual_seed = module.manual_seed_all = generator.manual_seed
    module.get_rng_state = lambda device=None: generator.get_state()
    module.set_rng_state = lambda state, device=None: generator.set_state(state)
    for name in ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # without a launcher
        del os.environ[name]
    return generator


def draw(generator: torch.Generator) -> float:
    return torch.rand(1, generator=generator).item()


class States(TrainerCallback):
    """The states of a device's generator at the beginning of each step."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.seen: list[list[int]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.seen.append(self.generator.get_state().tolist())


def drawing(run: Run, generator: torch.Generator) -> nn.Module:
    """A model that draws from the device in each forward."""
    model = run.build_model()
    model.register_forward_pre_hook(lambda *_: draw(generator) and None)
    return model


def states_of(rank: int, world_size: int, library: Path, kind: str) -> list[list[int]]:
    generator = give_a_generator(library)
    states, model = States(generator), drawing(RUN, generator)
    if kind == "probed":
        freezing = {"freeze_policy": "alpha", "freeze_alpha": 0.5, "activation_cache": "on"}
        trainer: Trainer = pipeline_trainer(RUN, 1, model=model, **OPTIONS, **freezing)
    else:
        options = {**RUN.common_options(), **OPTIONS}
        arguments = TrainingArguments("stock", per_device_train_batch_size=RUN.per_device, **options)
        trainer = Trainer(model, arguments, train_dataset=RUN.data(12), data_collator=PadCollator(RUN.kind))
    trainer.add_callback(states)
    assert trainer.args.device.type == "fake"
    trainer.train()
    return states.seen


def test_probes_draw_nothing_from_the_device(library: Path) -> None:
    calls = {kind: (states_of, library, kind) for kind in ("stock", "probed")}
    found = run_calls(1, calls, env=fake_device.ENVIRONMENT)
    (expected,) = found["stock"]
    assert len(expected) == 3 and expected[0] != expected[1]
    assert found["probed"] == [expected]
