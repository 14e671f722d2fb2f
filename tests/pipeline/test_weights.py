"""Weights that differ between the processes, and parameters that are not the model's: as in one process."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from torch import nn
from training_runs import (
    WORLD,
    Outcome,
    Run,
    StopAfter,
    assert_same_training,
    outcome_of,
    pipeline_trainer,
    reference,
    reference_trainer,
)

from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.pipeline.weights import synchronise

RUN = Run("causal-lm", epochs=1)  # embedding and head are one parameter, needed by the first and the last stage
STAGES = 2


def in_stages(run: Run) -> Run:
    return replace(run, per_device=run.per_device * WORLD // STAGES)


def from_other_weights(rank: int, world_size: int) -> Outcome:
    model = RUN.build_model()
    if rank == 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    return outcome_of(pipeline_trainer(in_stages(RUN), STAGES, model=model))


def test_weights_that_differ_become_those_of_rank_0() -> None:
    assert_same_training(run_ranks(from_other_weights, STAGES), run_ranks(reference, 1, RUN)[0])


class WithOwn:
    """A mixin: parameters of the loss, before and behind the model's in a group of the optimizer."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.own = [nn.Parameter(torch.full((3, 2), 0.5)), nn.Parameter(torch.full((2, 2), 0.25))]

    def create_optimizer(self: Any, *_: Any) -> Any:
        parameters = [self.own[0], *self.model.parameters(), self.own[1]]
        self.optimizer = torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss * sum(parameter.exp().mean() for parameter in self.own)
        return (loss, outputs) if return_outputs else loss


WITH_OWN = replace(RUN, trainer=WithOwn, accumulation=1).with_options(save_strategy="steps", save_steps=2)


def in_one_process(rank: int, world_size: int, folder: str, of_stages: str) -> tuple[Outcome, Outcome]:
    """Saved and resumed by the stock Trainer; resumed by it from the stages' checkpoint.

    These parameters begin at their first values again, as no model holds them; the optimizer's state goes on.
    """
    trainer = reference_trainer(WITH_OWN, folder)
    trainer.add_callback(StopAfter(2))
    trainer.train()
    first, then = (outcome_of(reference_trainer(WITH_OWN), f"{of}/checkpoint-2") for of in (folder, of_stages))
    return first, then


def saved_and_resumed(rank: int, world_size: int, folder: str) -> Outcome:
    trainer = pipeline_trainer(in_stages(WITH_OWN), STAGES, folder)
    trainer.add_callback(StopAfter(2))
    trainer.train()
    return outcome_of(pipeline_trainer(in_stages(WITH_OWN), STAGES), f"{folder}/checkpoint-2")


@pytest.mark.slow
def test_the_state_of_a_losss_own_parameters_keeps_its_place(tmp_path: Path) -> None:
    outcomes = run_ranks(saved_and_resumed, STAGES, str(tmp_path / "stages"))
    ((expected, from_stages),) = run_ranks(in_one_process, 1, str(tmp_path / "one"), str(tmp_path / "stages"))
    assert_same_training([*outcomes, from_stages], expected)


def equalised(rank: int, world_size: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """Weights that differ between the processes, and are not in row-major order."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(rank)
    weight = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last).weight
    synchronise({"weight": weight}, ProcessMesh(timedelta(seconds=60)))
    return weight.stride(), weight.detach().clone()


def test_weights_keep_their_strides_when_they_become_those_of_rank_0() -> None:
    """Replicas average gradients in the order of the weights in memory."""
    (strides, values), (others, theirs) = run_ranks(equalised, 2)
    assert strides == others == torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last).stride()
    assert torch.equal(values, theirs)
