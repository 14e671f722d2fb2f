"""A guarded tensor notes each access to its memory, and memory that something else holds is known."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hf_pipetransformer.parts.prefix_cache.cache.guards import accesses, guard, unguard
from hf_pipetransformer.parts.prefix_cache.cache.watched_weights import WatchedWeights

OTHER = torch.zeros(4, 6)
ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    (),
    *((number,) for number in (0, 1, 2, -1)),
    *itertools.product((0, 1, 2), (0, 1)),
    *((0, 0, 1), (0, 1, 1), ((1, 0),), ((4, 6),), ([2, 2],), ([1, 3], 0), ((24,),), (4, 6), (0, (2, 2)), (1, [2, 4])),
    *((OTHER,), (torch.Tensor,), (torch.int32,), ((4, 6), (6, 1)), (torch.float32,), (torch.device("cpu"),)),
    (..., None),
)


def results(tensor: torch.Tensor, name: str) -> Iterator[Any]:
    """The results of a method for the `ARGUMENTS` that it accepts, or the value of a property."""
    member = getattr(torch.Tensor, name)
    if not callable(member):
        yield getattr(tensor, name)
        return
    for arguments in ARGUMENTS:
        try:
            yield getattr(tensor, name)(*arguments)
        except Exception:
            continue


def shares_memory(result: Any, tensor: torch.Tensor) -> bool:
    if isinstance(result, (list, tuple)):
        return any(shares_memory(one, tensor) for one in result)
    if not isinstance(result, torch.Tensor) or result is tensor or not result.numel():
        return False
    return torch.Tensor.untyped_storage(result).data_ptr() == torch.Tensor.untyped_storage(tensor).data_ptr()


def members() -> list[str]:
    """Names of the methods and properties of tensors that do not write themselves."""
    names = [name for name in dir(torch.Tensor) if not name.startswith("_") and not name.endswith("_")]
    return [*names, "__getitem__", "__iter__"]


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor])
def test_every_method_that_returns_a_view_is_noted(kind: type) -> None:
    """A list of all methods of this torch: a new one fails here. Functions of `torch` are not noted."""
    unnoted = []
    for name in members():
        tensor = nn.Parameter(torch.rand(4, 6), requires_grad=False) if kind is nn.Parameter else torch.rand(4, 6)
        guard([tensor])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for result in results(tensor, name):
                    kept = list(result) if name == "__iter__" else result
                    if shares_memory(kept, tensor) and not accesses([tensor])[0]:
                        unnoted.append(name)
                        break
            except Exception:  # a property that this tensor does not have
                continue
    assert not unnoted


def test_a_view_that_is_kept_is_compared_before_each_use() -> None:
    """Whether it was taken before or after the snapshot, and only as long as it is alive."""
    layer = nn.Linear(6, 4).requires_grad_(False)
    before = layer.weight.data
    watched, other = WatchedWeights.of([layer]), WatchedWeights.of([layer])
    watched.guard()
    other.guard()
    watched.look_for_holders()
    assert watched.what_changed() is None
    row = before[0].clone()
    before[0] += 1
    assert watched.what_changed() is not None
    before[0] = row
    del before
    assert watched.what_changed() is None
    after = layer.bias.detach().numpy()
    assert watched.what_changed() is None
    number = float(after[0])
    after[0] += 1
    assert watched.what_changed() is not None
    after[0] = number
    del after
    assert watched.what_changed() is None
    watched.look_for_holders()
    comparisons = watched._compared[0]
    assert watched.what_changed() is None
    assert watched._compared[0] == comparisons, "nothing holds the memory any more"
    watched.release()
    other.release()
    assert type(layer.weight) is nn.Parameter


def test_a_parameter_that_is_swapped_is_noticed() -> None:
    layer = nn.Linear(6, 4).requires_grad_(False)
    watched = WatchedWeights.of([layer])
    watched.guard()
    other = nn.Parameter(layer.weight.clone(), requires_grad=False)
    with torch.no_grad():
        other[0] += 1
    torch.utils.swap_tensors(layer.weight, other)
    assert watched.what_changed() is not None
    unguard([layer.bias])
