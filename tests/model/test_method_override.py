from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_pipetransformer.model.method_override import MethodOverride, original_method


class Adds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Doubles(Adds):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * x


def negated(original: Any, x: Tensor) -> Tensor:
    return -original(x)


def overridden(module: nn.Module) -> MethodOverride:
    return MethodOverride(module, "forward", partial(negated, original_method(module)))


ONE = torch.ones(())


@pytest.mark.parametrize("depth", [1, 2])
def test_class_that_changes_later(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of the class, or a class, that the user sets under our override is called from then on."""
    module = Adds()
    overrides = [overridden(module) for _ in range(depth)]
    sign = (-1) ** depth
    assert module(ONE) == sign * 2
    module.__class__ = Doubles
    assert module(ONE) == sign * 4
    module.__class__ = Static
    assert module(ONE) == sign * 3
    monkeypatch.setattr(Adds, "forward", lambda self, x: x + 10)
    module.__class__ = Doubles
    assert module(ONE) == sign * 22
    assert overrides[0].replaced(ONE) == 22
    for override in overrides:  # not in the reverse order
        override.remove()
    module.__dict__.pop("forward", None)
    assert module(ONE) == 22


def test_own_method_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Adds()
    module.forward = own = lambda x: x + 5  # type: ignore[assignment, method-assign]
    override = overridden(module)
    monkeypatch.setattr(Adds, "forward", lambda self, x: x + 10)
    assert module(ONE) == -6
    override.remove()
    assert vars(module)["forward"] is own


def test_a_later_replacement_calls_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Adds()
    override = overridden(module)
    kept = module.forward
    module.forward = lambda x: 100 + kept(x)  # type: ignore[assignment, method-assign]
    override.remove()
    assert module(ONE) == 102
    monkeypatch.setattr(Adds, "forward", lambda self, x: x + 10)
    assert module(ONE) == 111


def test_copies_have_their_own_method() -> None:
    module = Adds()
    overridden(module)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied(ONE) == 2
