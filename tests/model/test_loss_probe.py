"""What is asked of a loss before, and while, a model is cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from distributed import run_ranks, run_ranks_expecting_error
from selection import slow
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_runs import Outcome, Run, assert_same_training, pipeline, reference
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_pipetransformer import UnsupportedModelError
from hf_pipetransformer.model.loss_probe import _hooks_on_parts


class InTraining:
    """A Trainer's mixin that changes the inputs where the study, before the first step, does not see it."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *positional: Any, **keywords: Any) -> Any:
        if self.state.global_step:  # type: ignore[attr-defined]
            inputs = self.change(dict(inputs))
        return super().compute_loss(model, inputs, *positional, **keywords)  # type: ignore[misc]

    def change(self, inputs: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class Mixed(InTraining):
    def change(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "pixel_values": (inputs["pixel_values"] + inputs["pixel_values"].flip(0)) / 2}


class MixedInPlace(InTraining):
    def change(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs["pixel_values"].mul_(0.5)
        return inputs


class Harmless(InTraining):
    """Other labels are the last stage's own, and another type of numbers is none."""

    def change(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "labels": inputs["labels"].flip(0), "pixel_values": inputs["pixel_values"].double().float()}


@pytest.mark.parametrize("mixin", [Mixed, *slow(MixedInPlace)])
def test_a_loss_that_changes_the_inputs_in_training_alone_is_refused_by_all(mixin: type) -> None:
    run = Run("image-classification", trainer=mixin)
    errors = run_ranks_expecting_error(pipeline, 4, run, 2, timeout=60)
    assert {type(error) for error in errors} == {UnsupportedModelError}
    (message,) = {str(error) for error in errors}
    assert "compute_loss called the model with different inputs" in message and "data collator" in message


@pytest.mark.slow
def test_what_is_the_last_stages_own_may_change() -> None:
    run = Run("image-classification", accumulation=1, trainer=Harmless).with_options(num_microbatches=1)
    results = run_ranks(pipeline, 2, run, 2)
    (expected,) = run_ranks(
        pipeline, 1, Run("image-classification", per_device=8, accumulation=1, trainer=Harmless), 1
    )
    assert_same_training(results, expected)


def checkpointing_calls(rank: int, world_size: int, run: Run) -> Outcome:
    """A layer's call is computed again, not its forward alone: in transformers 5.17, and in other libraries."""

    def call(self: nn.Module, *inputs: Any, **options: Any) -> Any:
        return checkpoint(partial(nn.Module.__call__, self, **options), *inputs, use_reentrant=False)

    LlamaDecoderLayer.__call__ = call  # type: ignore[method-assign]
    return pipeline(rank, world_size, run, 2)


def test_layers_that_are_called_again_in_the_backward_are_no_further_call_of_the_model() -> None:
    run = Run("causal-lm", samples=24, epochs=1, accumulation=1)
    (expected,) = run_ranks(reference, 1, run)
    assert_same_training(run_ranks(checkpointing_calls, 4, run), expected)


def test_hooks_that_are_not_linear_are_found_and_left_as_they_were() -> None:
    layer, norms = nn.Linear(3, 3), []
    layer.weight.register_hook(lambda gradient: norms.append(gradient.norm()))
    layer.weight.register_hook(lambda gradient: gradient * 0.5)
    assert _hooks_on_parts(layer) is None and not norms
    layer.bias.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
    assert "hook on bias" in str(_hooks_on_parts(layer))
