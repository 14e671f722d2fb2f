"""A hidden tensor has its metadata, keeps its identity, and cannot be read."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_pipetransformer.model.elsewhere import (
    HiddenParameter,
    computing_with_nan,
    hidden_like,
    hide,
    placeholder,
)

ABOUT, REMEDY = "weight is held by rank 1", "Set pipeline_parallel_size=1."
SHAPE = (3, 4)


def hidden_parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(SHAPE))
    parameter.data = placeholder(parameter.data, float("nan"))
    hide(parameter, ABOUT, REMEDY)
    return parameter


def module_with_hidden() -> nn.Linear:
    module = nn.Linear(4, 3)
    module.weight = hidden_parameter()
    return module


def saved(value: Any) -> Any:
    return torch.save(value, io.BytesIO())


READS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda p: p + 1,
    "pow": lambda p: p**2,
    "foreach": lambda p: torch._foreach_norm([p]),
    "cat": lambda p: torch.cat([torch.ones(SHAPE), p]),
    "out": lambda p: torch.no_grad()(torch.add)(torch.ones(SHAPE), p, out=torch.empty(SHAPE)),
    "equal": lambda p: torch.equal(p, torch.ones(SHAPE)),
    "item": lambda p: p[0, 0].item(),
    "iterate": lambda p: list(p),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "to": lambda p: p.to(torch.float16),
    "asarray": lambda p: np.asarray(p),
    "dlpack": lambda p: torch.utils.dlpack.from_dlpack(p),
    "storage": lambda p: p.untyped_storage(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": saved,
    "write": lambda p: p.data.fill_(1),
    "copy from it": lambda p: torch.zeros(SHAPE).copy_(p),
    "set": lambda p: setattr(p, "data", torch.ones(SHAPE)),
    "linear": lambda p: nn.functional.linear(torch.ones(2, 4), p),
}


@pytest.mark.parametrize("make", [hidden_parameter, lambda: hidden_like(torch.ones(SHAPE), ABOUT, REMEDY)])
def test_every_way_to_read_it_fails_at_the_users_line(make: Callable[[], Tensor]) -> None:
    silent = {}
    for name, read in READS.items():
        try:
            silent[name] = read(make())
        except ValueError as error:
            assert f"{ABOUT}. {REMEDY}" in str(error), name
    assert not silent


def test_gradients_are_refused() -> None:
    module = module_with_hidden()
    with pytest.raises(ValueError, match=f"grad: the gradient of {ABOUT}.*max_grad_norm.*clip_grad_norm_"):
        print(module.weight.grad)
    hide(module.weight, ABOUT, REMEDY, is_trained=False)
    assert module.weight.grad is None
    with pytest.raises(ValueError, match=f"grad: {ABOUT}"):
        print(hidden_like(torch.ones(SHAPE), ABOUT, REMEDY).grad)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_gradients_are_clipped_where_that_is_exact(foreach: bool | None) -> None:
    module = module_with_hidden()
    module.bias.grad = torch.tensor([1.0, 2.0, 2.0])
    clip = partial(nn.utils.clip_grad_norm_, max_norm=1.0, foreach=foreach)
    with pytest.raises(ValueError, match=f"the gradient of {ABOUT}"):
        clip(module.parameters())
    assert module.bias.grad.tolist() == [1, 2, 2]
    with pytest.raises(ValueError, match=f"the gradient of {ABOUT}"):
        clip(module.parameters(), error_if_nonfinite=True)
    norm = clip([module.weight])  # all of it is elsewhere, where the same is done
    for read in (float, bool, torch.Tensor.tolist, lambda value: module.bias.grad.mul_(value), pickle.dumps):
        with pytest.raises(ValueError, match=f"the gradient of {ABOUT}"):
            read(norm)
    nn.utils.clip_grad_value_(module.parameters(), 1.5, foreach)
    assert module.bias.grad.tolist() == [1, 1.5, 1.5]
    assert float(clip([module.bias])) == pytest.approx(5.5**0.5)
    assert float(module.bias.grad.norm()) == pytest.approx(1)


def test_modules_and_optimizers_go_over_it() -> None:
    """What an optimizer or a callback does with all parameters skips those without a gradient."""
    module = module_with_hidden()
    weight = module.weight
    weight.register_hook(lambda gradient: gradient)
    weight.register_post_accumulate_grad_hook(lambda parameter: None)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    before = module.bias.detach().clone()
    module.bias.grad = torch.ones(3)
    optimizer.step()
    optimizer.zero_grad()
    module.zero_grad()
    module.train().requires_grad_(False).requires_grad_(True)
    assert sum(p.numel() for p in module.parameters()) == 15 and dict(module.named_parameters())["weight"] is weight
    assert not torch.equal(module.bias, before) and len(optimizer.state_dict()["state"]) == 1
    assert isinstance(weight, HiddenParameter) and weight.is_elsewhere
    with computing_with_nan():  # inside of the model's own forward
        assert bool(module(torch.ones(2, 4)).isnan().all())
    with pytest.raises(ValueError, match=ABOUT):
        module(torch.ones(2, 4))
