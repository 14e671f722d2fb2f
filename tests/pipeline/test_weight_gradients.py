"""A backward in two parts leaves the gradients of a whole one, and the weights' part comes later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_pipetransformer.pipeline.weight_gradients import WeightGradients

TOLERANCE = 1e-12


class Tied(nn.Module):
    """Uses one weight in an embedding and two linear layers, another layer twice, and a third one not at all."""

    def __init__(self, is_sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6, sparse=is_sparse)
        self.inside = nn.Linear(6, 6)
        self.back = nn.Linear(11, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.unused = nn.Linear(6, 6)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: torch.Tensor, run: Callable[..., Any] = lambda part, value: part(value)) -> torch.Tensor:
        value = run(lambda x: torch.tanh(self.inside(x)), self.embedding(tokens))
        value = run(lambda x: self.inside(self.back(self.head(x))), value)
        return self.head(value).div_(2).square().mean()  # in place, as some models do


TOKENS = torch.arange(8).view(2, 4) % 11


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.to_dense() if grad is not None else None for name, grad in found.items()}


def whole(loss_of: Callable[[Tied], torch.Tensor], model: Tied | None = None) -> dict[str, torch.Tensor | None]:
    model = Tied() if model is None else model
    loss_of(model).backward()
    return gradients(model)


def in_two_parts(model: Tied, loss_of: Callable[[Tied], torch.Tensor]) -> Callable[[], None]:
    """Run the first part of a backward, and return the second one."""
    parts = WeightGradients(model, list(model.parameters()))
    with parts.split():
        loss = loss_of(model)
        with parts.postponed():
            loss.backward()
        return parts.take()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def checkpointed(reentrant: bool) -> Callable[[Tied], torch.Tensor]:
    return lambda model: model(TOKENS, lambda part, value: checkpoint(part, value, use_reentrant=reentrant))


LOSSES: dict[str, Callable[[Tied], torch.Tensor]] = {
    "tied": lambda model: model(TOKENS),
    "twice": lambda model: model(TOKENS) + model(TOKENS[:1]),
    "checkpointed": checkpointed(False),
    "checkpointed, reentrant": checkpointed(True),
}


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
def test_both_parts_are_a_whole_backward(loss_of: Callable[[Tied], torch.Tensor]) -> None:
    model = Tied()
    finish = in_two_parts(model, loss_of)
    before = gradients(model)
    assert before["back.weight"] is None and before["inside.weight"] is None and before["inside.bias"] is not None
    finish()
    assert_same(gradients(model), whole(loss_of))
    in_two_parts(model, loss_of)()  # of a second micro-batch
    assert_same(gradients(model), {n: g if g is None else 2 * g for n, g in whole(loss_of).items()})


def penalised(model: Tied) -> torch.Tensor:
    """Adds the norm of a gradient that the loss computes itself."""
    loss = model(TOKENS)
    (gradient,) = torch.autograd.grad(loss, model.inside.bias, create_graph=True)
    return loss + gradient.square().sum()


def test_a_loss_may_compute_gradients_itself() -> None:
    model = Tied(is_sparse=False)  # torch has no second gradient of a sparse one
    in_two_parts(model, penalised)()
    assert_same(gradients(model), whole(penalised, Tied(is_sparse=False)))


def test_who_watches_a_gradient_sees_all_of_it() -> None:
    model, seen = Tied(), dict[str, torch.Tensor]()
    model.back.weight.register_hook(lambda gradient: seen.update(back=gradient.clone()))
    model.inside.weight.register_post_accumulate_grad_hook(lambda weight: seen.update(inside=weight.grad.clone()))
    in_two_parts(model, LOSSES["tied"])
    expected = whole(LOSSES["tied"])
    assert_same(seen, {"back": expected["back.weight"], "inside": expected["inside.weight"]})
