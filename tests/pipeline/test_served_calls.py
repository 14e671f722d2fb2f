"""Losses of users that drive a pipeline train as with the stock Trainer in one process.

All of them run in one job, one training after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks, run_ranks_expecting_error
from torch import Tensor, nn
from training_runs import WORLD, Outcome, Run, assert_same_training, outcome_of, pipeline_trainer, reference_trainer

from hf_pipetransformer import PipeTransformerTrainer

Inputs = dict[str, Any]
Loss = Callable[[Any, Any, Inputs], Tensor]

SAMPLES, BATCH = 40, 16
"""Two whole batches and a half."""


# ------------------------------------------------------------------------------------ losses, as users write them
def unlabelled(inputs: Inputs) -> Inputs:
    is_text_to_text = "labels" in inputs and inputs["labels"].dim() == 2
    return inputs if is_text_to_text else {name: value for name, value in inputs.items() if name != "labels"}


def pooled(model: Any, inputs: Inputs) -> Tensor:
    logits: Tensor = model(**unlabelled(inputs)).logits
    return logits if logits.dim() == 2 else logits.mean(1)


def rows(inputs: Inputs, chosen: Any) -> Inputs:
    return {name: value[chosen] for name, value in inputs.items()}


def classes(inputs: Inputs) -> Tensor:
    labels: Tensor = inputs["labels"]
    return labels if labels.dim() == 1 else labels[:, 0].clamp(min=0)


def own(trainer: Any, model: Any, inputs: Inputs) -> Tensor:
    loss: Tensor = model(**inputs).loss
    return loss


def contrastive(trainer: Any, model: Any, inputs: Inputs) -> Tensor:
    z = F.normalize(pooled(model, inputs), dim=-1)
    return F.cross_entropy(z @ z.T / 0.5, (torch.arange(len(z)) + 1) % len(z))


def two_calls(trainer: Any, model: Any, inputs: Inputs) -> Tensor:
    """A loss of two calls, as in R-Drop."""
    one, other = model(**inputs), model(**inputs)
    difference = F.kl_div(one.logits.log_softmax(-1), (1.1 * other.logits).softmax(-1), reduction="batchmean")
    return one.loss + other.loss + difference


def clean_target(trainer: Any, model: Any, inputs: Inputs) -> Tensor:
    model.eval()
    with torch.no_grad():
        target = model(**inputs).logits
    model.train()
    ids = inputs["input_ids"]
    output = model(**{**inputs, "input_ids": ids.masked_fill(ids % 5 == 0, 3)})
    return output.loss + F.mse_loss(output.logits, target)


def hard_samples(trainer: Any, model: Any, inputs: Inputs) -> Tensor:
    losses = F.cross_entropy(pooled(model, inputs).detach(), classes(inputs), reduction="none")
    hard = rows(inputs, losses.topk(3).indices)
    return F.cross_entropy(pooled(model, hard), classes(hard))


def adversarial(trainer: Any, model: Any, inputs: Inputs) -> Tensor:
    table = torch.randn(200, model.config.hidden_size, generator=torch.Generator().manual_seed(5))
    embeddings = table[inputs["input_ids"]].requires_grad_()
    others = {name: value for name, value in inputs.items() if name != "input_ids"}
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embeddings, **others).loss, embeddings)
    loss: Tensor = model(inputs_embeds=embeddings.detach() + 0.01 * gradient.sign(), **others).loss
    return loss


class Again(torch.autograd.Function):
    """Calls the model again in the backward, as GradCache does."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, again: Callable[[Tensor], None]) -> Tensor:
        ctx.again = again
        return z.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            ctx.again(gradient)
        return None, None


def cached_gradients(trainer: Any, model: Any, inputs: Inputs) -> Tensor:
    parts = []
    for start in range(0, len(inputs["labels"]), 4):
        chunk = rows(inputs, slice(start, start + 4))
        with torch.no_grad():
            z = pooled(model, chunk)
        again = lambda gradient, chunk=chunk: (pooled(model, chunk) * gradient).sum().backward()  # noqa: E731
        parts.append(Again.apply(z.requires_grad_(), again))
    z = torch.cat(parts)
    return F.cross_entropy(z @ z.T / 9, torch.arange(len(z)))


def last_hidden_state(trainer: Any, model: Any, inputs: Inputs) -> Tensor:
    output = model(**inputs, output_hidden_states=True)
    loss: Tensor = output.loss + output.hidden_states[-1].pow(2).mean()
    return loss


def backward_of_its_own(trainer: Any, model: Any, inputs: Inputs) -> Tensor:
    loss = own(trainer, model, inputs)
    loss.backward(retain_graph=True)
    return loss * 2


def part_of_the_model(trainer: Any, model: Any, inputs: Inputs) -> Tensor:
    states: Tensor = model.base_model(**unlabelled(inputs)).last_hidden_state
    return states[:, 0].pow(2).mean() + states[0].std()


def stops(trainer: Any, model: Any, inputs: Inputs) -> Tensor:
    trainer.control.should_training_stop = trainer.state.global_step == 1
    return own(trainer, model, inputs)


def of_the_head_alone(trainer: Any, model: Any, inputs: Inputs) -> Tensor:
    """Layers that a loss does not depend on get zeros."""
    model(**inputs)
    bias: Tensor = model.classifier.bias.pow(2).sum()
    return bias + model.classifier.bias.sum()


def reads_what_is_elsewhere(trainer: Any, model: Any, inputs: Inputs) -> Tensor:
    """Weights and hidden states of other stages are refused by name at the line that reads them, and may be caught."""
    output = model(**inputs, output_hidden_states=True)
    if isinstance(trainer, PipeTransformerTrainer):
        weight = model.get_input_embeddings().weight
        with pytest.raises(ValueError, match=r"norm: bert\.embeddings\.word_embeddings\.weight is held by rank 1"):
            weight.norm()
        with pytest.raises(ValueError, match=r"pow: .*layer"):
            output.hidden_states[2].pow(2)
        with pytest.raises(ValueError, match="embeddings"):
            output.hidden_states[0].mean()
    loss: Tensor = output.loss
    return loss


LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (
        contrastive,
        two_calls,
        clean_target,
        hard_samples,
        adversarial,
        cached_gradients,
        last_hidden_state,
        backward_of_its_own,
        part_of_the_model,
        stops,
        of_the_head_alone,
        reads_what_is_elsewhere,
    )
}


def run_of(kind: Any, loss: Loss) -> Run:
    class Own:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
            assert not return_outputs
            return loss(self, model, inputs)

    return Run(kind, samples=SAMPLES, epochs=1, accumulation=1, trainer=Own)


# ------------------------------------------------------------------------------------ in a pipeline and in one process
Case = tuple[str, str, int]
"""Kind of task, name of the loss, accumulated batches."""

CASES: list[Case] = [("text-classification", name, 1) for name in LOSSES]
CASES += [("text-classification", "contrastive", 2), ("causal-lm", "cached_gradients", 1), ("seq2seq", "two_calls", 1)]


@cache
def expected(case: Case) -> Outcome:
    """Trained in the test's own process: in a launcher's process the stock Trainer would wrap the model."""
    kind, name, accumulation = case
    run = replace(run_of(kind, LOSSES[name]), per_device=BATCH // WORLD)
    return outcome_of(reference_trainer(run.with_options(gradient_accumulation_steps=accumulation)))


def in_stages(rank: int, world_size: int, cases: list[Case]) -> dict[Case, Outcome]:
    found = {}
    for kind, name, accumulation in cases:
        run = replace(run_of(kind, LOSSES[name]), per_device=BATCH // world_size, accumulation=accumulation)
        found[kind, name, accumulation] = outcome_of(pipeline_trainer(run, world_size))
    return found


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_equals_one_process() -> None:
    outcomes = run_ranks(in_stages, 2, CASES, timeout=300)
    different = {}
    for case in CASES:
        try:
            assert_same_training([outcome[case] for outcome in outcomes], expected(case))
        except AssertionError as error:
            different[case] = str(error)
    assert not different
    assert expected(("text-classification", "stops", 1)).steps == 2


# ------------------------------------------------------------------------------------ errors
def broken(trainer: Any, model: Any, inputs: Inputs) -> Tensor:
    own(trainer, model, inputs)
    if trainer.state.global_step == 1:
        raise KeyError("of the user")
    return own(trainer, model, inputs)


def failing(rank: int, world_size: int, breaks_a_layer: bool) -> None:
    run = replace(run_of("text-classification", own if breaks_a_layer else broken), per_device=BATCH // world_size)
    trainer = pipeline_trainer(run, world_size)

    def fail(module: nn.Module, args: Any) -> None:
        if rank == 1 and trainer.state.global_step == 1:
            raise ArithmeticError("of a layer")

    if breaks_a_layer:
        trainer.model.bert.encoder.layer[0].register_forward_pre_hook(fail)
    trainer.train()


@pytest.mark.parametrize("breaks_a_layer", [False, True], ids=["loss", "layer"])
def test_an_error_is_named_on_the_other_process(breaks_a_layer: bool) -> None:
    errors = run_ranks_expecting_error(failing, 2, breaks_a_layer, timeout=60)
    mine, theirs = errors  # the loss's process raises an error of a layer elsewhere too: the loss may catch it
    kind, words = (ArithmeticError, "of a layer") if breaks_a_layer else (KeyError, "of the user")
    assert type(mine) is kind and words in str(mine)
    assert type(theirs).__name__ == "PeerFailedError"
    assert f"rank 0 failed in phase 'step' at step 1: {kind.__name__}: " in str(theirs)
    assert ("On rank 1:" in str(mine.__cause__)) is breaks_a_layer
    assert words in str(theirs)
