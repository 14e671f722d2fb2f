"""Finds the lists of layers in a model: by transformers' class of layers, or by the inputs of their calls.

The search is the same for all model families.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress, pairwise
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UnsupportedModelError
from .method_override import MethodOverride, original_method
from .nested import in_new_tensors, is_continuous, tensors_of
from .placeholders import ParameterTable, reachable_leaves

MOST_NAMES = 8
"""Maximum number of modules that an error message lists."""


def find_stacks(model: nn.Module, batch: dict[str, Any], named: Sequence[str] | None = None) -> list[list[str]]:
    """Names of the layer modules of each stack, in the modules with the given names if there are any.

    A stack is an outermost `nn.ModuleList` with only `GradientCheckpointingLayer` as members. In a model without such
    a list, it is a list with members that are called on the previous member's output. In a model without these lists,
    each member of a list is a stack of its own, if each depends on the previous one.

    Raises:
        ValueError: if a module in `named` does not exist or contains no layers.
        UnsupportedModelError: if the model has no stack.
    """
    if named is not None:
        return [_members_of(model, name) for name in named]
    lists = _outermost_module_lists(model)
    stacks = [names for names in lists if _are_layers([model.get_submodule(name) for name in names])]
    stacks = stacks or _lists_in_order(model, lists, batch)
    if not stacks:
        raise UnsupportedModelError(
            model,
            "no sequential stack of layers was found in it (an nn.ModuleList in which each layer depends on the"
            " previous one).",
            "Name the modules that contain its layers (PipeTransformerTrainingArguments.pipeline_layers), or set"
            " pipeline_parallel_size=1.",
        )
    return stacks


def _members_of(model: nn.Module, name: str) -> list[str]:
    """Names of the members of a module that the user has named in `pipeline_layers`.

    Raises:
        ValueError: if there is no such module, or it is no non-empty list of modules.
    """
    modules = dict(model.named_modules())
    if isinstance(modules.get(name), (nn.ModuleList, nn.Sequential)) and len(modules[name]):
        return [f"{name}.{child}" for child, _ in modules[name].named_children()]
    found = f"is a {type(modules[name]).__name__}" if name in modules else "does not exist"
    lists = [repr(n) for n, module in modules.items() if isinstance(module, (nn.ModuleList, nn.Sequential)) and n]
    raise ValueError(
        f"pipeline_layers: {name!r} {found} in the {type(model).__name__}, but must be an nn.ModuleList or"
        f" nn.Sequential with layers in it. It has {', '.join(lists[:MOST_NAMES]) or 'none: put its layers into one'}."
    )


def _outermost_module_lists(module: nn.Module, prefix: str = "") -> list[list[str]]:
    """Names of the members of each `nn.ModuleList` that is not nested in another one.

    A list of plain modules (`encoder.blocks`, each with its own list of layers) is replaced by the lists of
    `GradientCheckpointingLayer` inside it, and lists of lists by one list.
    """
    found: list[list[str]] = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        members = list(child) if isinstance(child, nn.ModuleList) else []
        if members and all(isinstance(member, nn.ModuleList) for member in members):
            found.append([name for names in _outermost_module_lists(child, path + ".") for name in names])
        elif members and (_are_layers(members) or not any(map(_holds_layers, members))):
            found.append([f"{path}.{index}" for index in range(len(members))])
        else:
            found.extend(_outermost_module_lists(child, path + "."))
    return found


def _are_layers(members: Sequence[nn.Module]) -> bool:
    return all(isinstance(member, GradientCheckpointingLayer) for member in members)


def _holds_layers(module: nn.Module) -> bool:
    return any(isinstance(part, GradientCheckpointingLayer) for part in module.modules())


@dataclass(frozen=True)
class _ListCall:
    """A call of a member of a list.

    Attributes:
        inputs: the ids of the tensors that it was called on.
        outputs: the returned tensors; kept, because ids of freed tensors are used again.
        behind: the numbers of the earlier calls that its outputs depend on, possibly through other modules.
    """

    inputs: frozenset[int]
    outputs: tuple[torch.Tensor, ...]
    behind: frozenset[int]


def _lists_in_order(model: nn.Module, lists: Sequence[list[str]], batch: dict[str, Any]) -> list[list[str]]:
    """The lists with members that are called one after the other.

    XLM, for example, has a list of all attention modules, one of all feed-forward modules, and two of norms: each
    depends on the previous one of its list through others. Members that do not depend on one another (several heads)
    are no layers.

    Returns:
        The lists with each call on the previous call's output. If there are none: the lists with each call dependent
        on the previous one, each member as a stack of its own.
    """
    calls: list[_ListCall] = []
    numbers: dict[nn.Module, list[int]] = {}
    call_of: dict[torch.Tensor, int] = {}  # a leaf of the graph -> the number of the call that has returned it

    def noted(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        before = {call_of[leaf] for leaf in reachable_leaves(tensors_of(output)) if leaf in call_of}
        leaves = recursively_apply(lambda t: t.detach().requires_grad_(is_continuous(t)), output)
        call_of.update((leaf, len(calls)) for leaf in tensors_of(leaves))
        numbers[layer].append(len(calls))
        returned = recursively_apply(torch.clone, leaves)  # because a leaf cannot be changed in place
        inputs = frozenset(map(id, tensors_of((args, kwargs))))
        behind = frozenset(before).union(*(calls[number].behind for number in before))
        calls.append(_ListCall(inputs, tensors_of(returned), behind))
        return returned

    with ExitStack() as undone, torch.enable_grad(), ParameterTable(model).all_trainable():
        # a layer may be in a list several times
        for layer in dict.fromkeys(model.get_submodule(name) for names in lists for name in names):
            numbers[layer] = []
            # no hooks, because some models call layer.forward()
            undone.callback(MethodOverride(layer, "forward", partial(noted, layer, original_method(layer))).remove)
        model(**in_new_tensors(batch))
    calls_of = [[numbers[layer] for layer in dict.fromkeys(map(model.get_submodule, names))] for names in lists]
    chained = list(compress(lists, (_are_chained(calls, of) for of in calls_of)))
    dependent = compress(lists, (_depend_in_order(calls, of) for of in calls_of))
    return chained or [[name] for name in chain.from_iterable(dependent)]


def _are_chained(calls: Sequence[_ListCall], numbers: Sequence[Sequence[int]]) -> bool:
    """Whether each call of a list's members is on the previous call's output.

    Args:
        calls: all calls.
        numbers: for each member, the numbers of its calls.
    """
    pairs = list(pairwise(sorted(chain.from_iterable(numbers))))
    return bool(pairs) and all(any(id(t) in calls[b].inputs for t in calls[a].outputs) for a, b in pairs)


def _depend_in_order(calls: Sequence[_ListCall], numbers: Sequence[Sequence[int]]) -> bool:
    """Whether each call depends on the previous member's call."""
    pairs = list(pairwise(chain.from_iterable(numbers)))
    return bool(pairs) and all(a in calls[b].behind for a, b in pairs)


def tapped_modules(
    model: nn.Module, stacks: Sequence[Sequence[str]], batch: dict[str, Any]
) -> dict[str, tuple[str, ...]]:
    """For each layer, its inner modules with output tensors that the model returns, but the layer does not.

    transformers collects these tensors by hooks on the modules (routers of experts). The hooks are not called if the
    layer does not run.
    """
    returned_by: dict[int, list[str]] = {}
    kept: list[Any] = []  # because ids of freed objects are used again

    def note(name: str, _: nn.Module, __: Any, output: Any) -> None:
        kept.append(output)
        for tensor in tensors_of(output):
            returned_by.setdefault(id(tensor), []).append(name)

    layers = [name for names in stacks for name in names]
    with ExitStack() as hooks, torch.no_grad():
        for layer in layers:
            for name, module in model.get_submodule(layer).named_modules(prefix=layer):
                hooks.callback(module.register_forward_hook(partial(note, name)).remove)
        output = model(**in_new_tensors(batch))
    found = {name for tensor in tensors_of(output) for name in returned_by.get(id(tensor), ())}
    return {
        layer: tuple(
            name
            for name, module in model.get_submodule(layer).named_modules(prefix=layer)
            if name != layer and name in found and module._forward_hooks
        )
        for layer in layers
    }
