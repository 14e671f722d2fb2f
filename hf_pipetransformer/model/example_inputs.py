"""Finds the inputs of a model for probes on a few samples, by their names in a batch. It never calls the loss.

forward(input_ids, attention_mask)     {"input_ids": ..., "attention_mask": ..., "weight": ...}
                                       the entries that the forward names; the loss keeps "weight" for itself
the same                               {"anchor_input_ids": ..., "positive_input_ids": ...}
                                       the first group of entries that end in such names
the same                               {"chosen_input_ids": ..., "attention_mask": ...}
                                       the entries that it names; if it does not run on these, the group beside them
the same                               {"chosen": {"input_ids": ...}, "rejected": {...}}, or lists of dicts
                                       the first of them
forward(features, **settings)          any of the above, as one dict
any                                    {"text": [...]}
                                       the model's own `dummy_inputs`, or made from its configuration
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from .called_inputs import LABELS_AND_DECODER
from .dummy_inputs import dummy_batch
from .micro_batch import Batch
from .nested import on_device, tensors_of
from .units import CalledWith

LABELS = LABELS_AND_DECODER - {"decoder_input_ids", "decoder_attention_mask"}
DUMMY_ROWS = 2
MOST_NAMES = 6
"""Maximum number of inputs that an error names."""
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class ExampleInputs:
    """The places of a model call's inputs in a batch.

    Attributes:
        called: how the model is called on them.
        paths: for each input, the keys that lead to it. None: all entries of the batch except those kept back.
        are_made: whether the inputs are made, because the batch has none.
        num_calls: number of groups of inputs; each is probably one call of the model.
    """

    called: CalledWith
    paths: Mapping[str, Path] | None = None
    are_made: bool = False
    num_calls: int = 1

    def of(self, model: nn.Module, batch: Mapping[str, Any]) -> Batch:
        """The inputs in a batch, which may lack some; without the outer dict that some models expect."""
        if self.are_made:
            made = made_inputs(model, DUMMY_ROWS)
            assert made is not None
            return made
        if self.paths is None:
            return {name: value for name, value in batch.items() if name not in self.called.kept_back}
        found = {name: _at(batch, path) for name, path in self.paths.items()}
        return {name: value for name, value in found.items() if value is not None}

    def described(self) -> str:
        """A text that is the same if the same entries of batches are taken."""
        called = self.called
        where = sorted(self.paths.items()) if self.paths is not None else self.are_made
        return f"{called.takes_batch} {called.nested_in} {sorted(called.kept_back)} {where}"


def example_inputs(model: nn.Module, batch: Mapping[str, Any], labels: Collection[str]) -> list[ExampleInputs]:
    """Return the candidate places of a model's inputs in a batch, by name. Use the first one that the model runs on.

    Args:
        model: the model; it is not called.
        batch: the batch.
        labels: names of labels, which a loss may keep for itself.

    Raises:
        UnsupportedModelError: no place is found, and inputs cannot be made.
    """
    found = [place for place in _places(model, batch, {*labels, *LABELS}) if _has_all(model, place)]
    if not found:
        lacking = [name for name in _needed(model) if name not in batch]
        needed = ", ".join(lacking or sorted(_names_of_inputs(model) or ())[:MOST_NAMES])
        raise UnsupportedModelError(
            model,
            f"its forward takes {needed}, and the batch has none of these, but only {', '.join(sorted(batch))}.",
            "Let the data collator return them by these names, or give the model's class an attribute dummy_inputs: a"
            " dict of its inputs for two samples. With pipeline_parallel_size=1 and without freezing the model is not"
            " examined.",
        )
    return found


def _places(model: nn.Module, batch: Mapping[str, Any], labels: Set[str]) -> Iterator[ExampleInputs]:
    names, outer = _names_of_inputs(model), _named_parameters(model)
    everything = frozenset(batch)
    taken = everything if names is None else everything & names
    is_direct = bool(tensors_of({name: batch[name] for name in taken - labels}))
    if is_direct:
        # without labels, too: the model's own loss may not accept them
        for some in dict.fromkeys((taken, taken - labels)):
            place = _called_on(model, {name: (name,) for name in batch if name in some}, outer)
            yield replace(place, called=replace(place.called, kept_back=everything - some))
    if names is not None:
        # if entries have the names as well, the groups may share them: a mask of several sequences
        shared = {name: (name,) for name in batch if is_direct and name in taken - labels}
        others = {name: value for name, value in batch.items() if name not in names}
        groups = [*_by_prefix(others, names - labels), *_inside(others, names - labels)]
        if groups:
            place = _called_on(model, {**shared, **groups[0]}, outer)
            yield replace(place, called=replace(place.called, takes_batch=False), num_calls=len(groups))
    if _own_dummy_inputs(model) is not None or not is_direct:
        made = made_inputs(model, DUMMY_ROWS)
        if made is not None:
            place = _called_on(model, {name: (name,) for name in made}, outer)
            yield replace(place, called=replace(place.called, takes_batch=False), paths=None, are_made=True)


def _has_all(model: nn.Module, place: ExampleInputs) -> bool:
    """Whether there is a value for each parameter without a default."""
    if place.called.nested_in is not None:
        return True
    given = place.of(model, {}) if place.are_made else place.paths
    return given is not None and given.keys() >= set(_needed(model))


def _called_on(model: nn.Module, paths: Mapping[str, Path], outer: Set[str]) -> ExampleInputs:
    """The place with these paths. If the forward requires one argument and names no input, it gets one dict."""
    needed = _needed(model)
    if len(needed) != 1 or not outer.isdisjoint(paths):
        return ExampleInputs(CalledWith(), paths)
    return ExampleInputs(CalledWith(takes_batch=False, nested_in=needed[0]), paths)


def _by_prefix(batch: Mapping[str, Any], names: Collection[str]) -> list[dict[str, Path]]:
    """The groups of entries such as "anchor_input_ids" and "anchor_attention_mask"."""
    groups: dict[str, dict[str, Path]] = {}
    for entry, value in batch.items():
        # the longest name: "input_ids", and not "ids"
        name = max((n for n in names if entry.endswith(f"_{n}")), key=len, default=None)
        if name is not None and isinstance(value, torch.Tensor):
            groups.setdefault(entry.removesuffix(name), {})[name] = (entry,)
    return list(groups.values())


def _inside(value: Any, names: Collection[str], path: Path = ()) -> Iterator[dict[str, Path]]:
    """The groups in dicts and lists inside a batch."""
    if not isinstance(value, (Mapping, list, tuple)):
        return
    if path and isinstance(value, Mapping):
        group = {name: (*path, name) for name in value if name in names}
        if tensors_of({name: value[name] for name in group}):
            yield group
            return
    for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _inside(entry, names, (*path, key))


def _at(value: Any, path: Path) -> Any:
    for key in path:
        if isinstance(value, Mapping):
            value = value.get(key)
        else:
            value = value[int(key)] if isinstance(value, Sequence) and len(value) > int(key) else None
    return value


# ---------------------------------------------------------------------------------------------------------
# The arguments of a forward
# ---------------------------------------------------------------------------------------------------------


def names_taken(model: nn.Module, batch: Mapping[str, Any]) -> frozenset[str]:
    """The entries of a batch that a model's forward takes, by their names."""
    names = _names_of_inputs(model)
    return frozenset(batch) if names is None else frozenset(batch) & names


def _parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(type(module).forward).parameters.values())[1:]  # without `self`


def _named(parameters: Iterable[inspect.Parameter]) -> frozenset[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in named)


def _named_parameters(module: nn.Module) -> frozenset[str]:
    return _named(_parameters_of(module))


def _needed(module: nn.Module) -> list[str]:
    """Names of the parameters without a default."""
    named = _named_parameters(module)
    return [p.name for p in _parameters_of(module) if p.name in named and p.default is inspect.Parameter.empty]


def _names_of_inputs(module: nn.Module) -> frozenset[str] | None:
    """The names that a forward takes; with `**kwargs`, also the names of the code that it passes them on to.

    That code is the same method of its base classes, and the part with most of the weights, as in wrappers. None if
    that part takes any name.
    """
    names = _named_parameters(module)
    keywords = [p for p in _parameters_of(module) if p.kind is inspect.Parameter.VAR_KEYWORD]
    if not keywords:
        return names
    bases: tuple[Any, ...] = type(module).__mro__[1:]
    for base in bases:  # a method with `*args, **kwargs` around a base class's method
        if "forward" in vars(base) and base.__module__.partition(".")[0] != "torch":
            names |= _named(inspect.signature(base.forward).parameters.values()) - {"self"}
    for named in typing.get_args(keywords[0].annotation):  # Unpack[TransformersKwargs]
        names |= frozenset(getattr(named, "__annotations__", ()))
    if isinstance(module, PreTrainedModel) and _named_parameters(module):
        return names
    sizes = {child: sum(p.numel() for p in child.parameters()) for child in module.children()}
    part = max(sizes, key=sizes.__getitem__, default=None)
    if part is None or 2 * sizes[part] < sum(sizes.values()) or isinstance(part, (nn.ModuleList, nn.ModuleDict)):
        return names or None
    inner = _names_of_inputs(part)
    return None if inner is None and not names else names | (inner or frozenset())


# ---------------------------------------------------------------------------------------------------------
# Inputs that are made
# ---------------------------------------------------------------------------------------------------------


def made_inputs(model: nn.Module, rows: int, tokens: int = 8) -> Batch | None:
    """The model's `dummy_inputs`, or inputs made from the configuration of the transformers model in it.

    Args:
        model: the model.
        rows: number of samples.
        tokens: number of tokens of each sample; `dummy_inputs` have their own.

    Returns:
        The inputs; None if they cannot be made either.
    """
    own = _own_dummy_inputs(model)
    if own is not None:
        device = next(model.parameters()).device
        return {name: on_device(value[torch.arange(rows) % len(value)], device) for name, value in own.items()}
    inner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if inner is None:
        return None
    try:
        return dict(dummy_batch(inner, rows, tokens=tokens))
    except ValueError:  # its main input is of an unknown kind
        return None


def _own_dummy_inputs(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """The `dummy_inputs` of a user's model class; None for transformers' classes, which all have the same inputs."""
    of_class = getattr(type(model), "dummy_inputs", None)
    if type(model).__module__.startswith("transformers.") or of_class is PreTrainedModel.dummy_inputs:
        return None
    own: Any = getattr(model, "dummy_inputs", None)
    return {n: v for n, v in own.items() if isinstance(v, torch.Tensor)} if isinstance(own, Mapping) else None
