"""The search for modules that a loss may call runs no code of the containers that it looks into."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_pipetransformer.parts.frozen_calls.names import _modules_in


class _Lazy(dict[str, Any]):
    def items(self) -> Any:
        raise AssertionError("asked for its values")


class _LazyList(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("asked for its values")


def test_containers_of_a_class_of_their_own_are_not_asked() -> None:
    module = nn.Linear(1, 1)
    assert list(_modules_in(_Lazy(teacher=module, other=1), "x")) == [("x.teacher", module)]
    assert list(_modules_in(_LazyList([1, module]), "x")) == [("x.1", module)]
    assert list(_modules_in((module,), "x")) == [("x.0", module)]
