"""Changes in modules are found, can be made elsewhere and undone; state of other processes cannot be read."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_pipetransformer.model.elsewhere import NAN, Unreadable, hide, is_computed_of_hidden, placeholder
from hf_pipetransformer.parts.driven.module_state import (
    ABSENT,
    ModuleState,
    as_sent,
    can_be_sent,
    plain_state,
    put_all,
)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.scale, self.kind, self.table = 1.0, "whole", {"a": [1, 2]}
        self.config = SimpleNamespace(scale=1.0, inner=SimpleNamespace(rate=0.1))
        self.act: Any = torch.tanh


def model() -> Any:
    return nn.Sequential(Part(), Part())


Change = Callable[[Any], Any]
SENT: dict[str, Change] = {
    "number": lambda m: setattr(m[0], "scale", 0.5),
    "string": lambda m: setattr(m[1], "kind", "half"),
    "mode": lambda m: m.eval(),
    "entry": lambda m: m[0].table["a"].append(3),
    "object": lambda m: setattr(m[0].config, "scale", 2.0),
    "inner object": lambda m: setattr(m[0].config.inner, "rate", 0.2),
    "new attribute": lambda m: setattr(m[0], "extra", 1),
    "no attribute": lambda m: delattr(m[0], "scale"),
    "buffer": lambda m: m[0].mean.fill_(2),
    "buffer by data": lambda m: m[0].mean.data.fill_(2),
    "new buffer": lambda m: setattr(m[0], "mean", torch.ones(3)),
    "tensor": lambda m: setattr(m[0], "scale", torch.zeros(())),
    "flag": lambda m: m[0].linear.weight.requires_grad_(False),
}
REFUSED: dict[str, Change] = {
    "function": lambda m: setattr(m[0], "act", torch.relu),
    "hook": lambda m: m[0].linear.register_forward_hook(print),
    "backward hook": lambda m: m[0].register_full_backward_hook(print),
    "module": lambda m: setattr(m[0], "linear", nn.Linear(2, 2)),
    "parameter": lambda m: m[0].linear._parameters.update(weight=m[0].linear.weight.detach() * 2 + m[0].linear.bias),
    "trained tensor": lambda m: setattr(m[0], "scale", m[0].linear.bias.sum()),
}


def state_of(one: nn.Module) -> ModuleState:
    return ModuleState(dict(enumerate(one.modules())))


@pytest.mark.parametrize("change", SENT.values(), ids=SENT)
def test_what_can_be_sent_is_set_elsewhere_and_undone(change: Change) -> None:
    here, there = model(), model()
    there.load_state_dict(here.state_dict())
    of_here, of_there = state_of(here), state_of(there)
    assert not of_here.changes()
    change(here)
    assert of_here.changes(keep=True)
    changes = of_here.changes()
    assert changes and all(can_be_sent(found.value) for found in changes)
    assert not of_here.changes()
    undo = put_all(list(there.modules()), pickle.loads(pickle.dumps(as_sent(changes))))
    places = {found.place for found in of_there.changes()}
    assert places == {found.place for found in changes}
    undo()
    is_written = any(found.is_written for found in changes)
    assert {found.place for found in of_there.changes()} == (set() if is_written else places)


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_sent_is_found(change: Change) -> None:
    here = model()
    state = state_of(here)
    change(here)
    assert any(not can_be_sent(found.value) for found in state.changes())


def test_what_is_put_back_has_not_changed() -> None:
    here = model()
    state = state_of(here)
    for value in (0.5, 1.0):
        here[0].scale = value
        here.train(value == 1.0)
    here[0].mean.data.fill_(0)
    handle = here[0].register_forward_hook(print)
    handle.remove()
    here[0].config = SimpleNamespace(scale=1.0, inner=SimpleNamespace(rate=0.1))
    assert not state.changes()


def test_plain_state_of_one_process_is_set_on_another() -> None:
    here, there = model(), model()
    here.eval()
    here[0].scale = 0.25
    undo = put_all(list(there.modules()), plain_state(list(here.modules())))
    assert not there[1].linear.training and there[0].scale == 0.25 and there[0].act is torch.tanh
    undo()
    assert there[1].linear.training and there[0].scale == 1.0


def test_absent_values_are_themselves_elsewhere() -> None:
    assert pickle.loads(pickle.dumps(ABSENT)) is ABSENT


READS: tuple[Callable[[Any], Any], ...] = (
    float,
    bool,
    len,
    list,
    str,
    hash,
    lambda value: value + 1,
    lambda value: 1 - value,
    lambda value: value == 1,
    lambda value: value.item(),
    lambda value: value["a"],
    lambda value: value(),
    lambda value: f"{value:.2f}",
    lambda value: torch.ones(2) * value,
    pickle.dumps,
)


@pytest.mark.parametrize("read", READS)
def test_unreadable_values_fail_where_they_are_read(read: Callable[[Any], Any]) -> None:
    value = Unreadable("size is elsewhere", "Leave it.")
    assert "size is elsewhere" in repr(value)
    with pytest.raises(ValueError, match=r"size is elsewhere\. Leave it\."):
        read(value)


def test_a_number_tells_whether_a_hidden_tensor_was_read_unnoticed() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    weight.data = placeholder(weight.data, NAN)
    hide(weight, "weight is elsewhere", "Leave it.")
    read = torch.Tensor(weight)
    assert is_computed_of_hidden(0.1 * read.pow(2).sum() + 1.3)
    assert not is_computed_of_hidden(torch.zeros(()) / 0) and not is_computed_of_hidden(torch.tensor(float("nan")))
    assert not is_computed_of_hidden(torch.ones(()))
    for use in (weight.as_subclass, weight.set_):
        with pytest.raises(ValueError, match="weight is elsewhere"):
            use(torch.Tensor)  # type: ignore[arg-type]
