"""Freezing the bottom layers of a model: which parameters freeze, and how a whole model runs with frozen layers.

    model(**batch)      embeddings   layer 0   layer 1   layer 2   layer 3   head
    frozen, f = 2       `requires_grad` is off           | unchanged

`frozen_units` describes how frozen layers run, in a whole model and in a pipeline.

A parameter that a frozen layer shares with an active layer or with the head (a head tied to the embeddings, ALBERT's
single layer) is frozen for both, because the output of frozen layers must not change any more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..randomness import global_state_kept, torch_states
from .layer_range import Carry, Unit
from .layer_stack import LayerStack, loss_outputs, output_tensors
from .nested import tensors_of
from .placeholders import evaluation_mode, reachable_leaves

MOST_TO_NAME = 5
"""Maximum number of ranges of layers, and of other modules, that a log line names."""


@dataclass(frozen=True)
class FreezableLayers:
    """Which parameters freeze with the units of one model; immutable, and the same on every process.

    Attributes:
        owners: for each unit, the names of the parameters that are trained through it (`UnitNeeds.trained_with`).
        inside: for each unit, the names of its owned parameters in its own module; its gradient norm covers these.
        head: names of the parameters that the loss depends on even if every unit is frozen.
        trainable: names of the parameters that training would change without any freezing: they require a gradient
            and get one.
        units: the name of each unit's module.
        frozen_by_user: number of the lowest units without trained parameters that run alike in training and in
            evaluation mode.
        random_by_user: number of units above these that the user has frozen as well, but that have dropout.
    """

    owners: tuple[frozenset[str], ...]
    inside: tuple[tuple[str, ...], ...]
    head: frozenset[str]
    trainable: frozenset[str]
    units: tuple[str, ...]
    frozen_by_user: int = 0
    random_by_user: int = 0

    @classmethod
    def of(cls, stack: LayerStack, batch: dict[str, Any], evaluates: bool = False) -> FreezableLayers:
        """Derive the layers from a complete model; costs about two forwards of a small batch.

        If the user has frozen the first layer, it costs two more.

        Args:
            stack: the model's units.
            batch: keyword arguments of `model.forward`, with 1 or 2 samples.
            evaluates: whether frozen layers run in evaluation mode anyway.
        """
        names = stack.table.names
        layers = cls(
            stack.needs.trained_with,
            tuple(
                tuple(name for name in names if name in owned and _is_inside(name, unit, stack))
                for unit, owned in zip(_units(stack), stack.needs.trained_with, strict=True)
            ),
            _head_parameters(stack, batch),
            frozenset(name for name in names if stack.table[name].requires_grad) - stack.needs.unreached,
            tuple(unit.name if unit is not None else "" for unit in _units(stack)),
        )
        count = next((f for f in range(layers.max_frozen, 0, -1) if not layers.trainable & layers.frozen(f)), 0)
        alike = min(count, _alike_in_training(stack, batch, evaluates)) if count else 0
        return replace(layers, frozen_by_user=alike, random_by_user=count - alike)

    @property
    def num_layers(self) -> int:
        return len(self.owners)

    @property
    def max_frozen(self) -> int:
        """The maximum number of units that can be frozen with parameters left to train; 0 if none can be."""
        return next((f for f in range(self.num_layers, 0, -1) if self.trainable - self.frozen(f)), 0)

    @property
    def never_frozen(self) -> frozenset[str]:
        """Names of the parameters that are trained even if every unit is frozen: the head's."""
        return self.trainable - self.frozen(self.num_layers)

    def frozen(self, num_frozen: int) -> frozenset[str]:
        """Names of the parameters that freeze with the first `num_frozen` units.

        The embeddings freeze with the first unit, and so does a tied head that uses them: if it was trained, the
        frozen layers' input would change. Parameters that only the head needs never freeze, although the last unit
        owns them.
        """
        head_alone = self.head - frozenset[str]().union(*self.owners[:-1])
        return frozenset[str]().union(*self.owners[:num_frozen]) - head_alone

    @property
    def outside_alone(self) -> frozenset[str]:
        """The parameters that freezing would stop, if all are outside the layers, as a prompt that layers read is."""
        is_trained_inside = not self.trainable.isdisjoint(name for names in self.inside for name in names)
        return frozenset() if is_trained_inside else self.trainable & self.frozen(self.num_layers)

    def described(self, first: int, stop: int) -> list[str]:
        """Names of the units `first` to `stop - 1`, neighbours in a list as one: "encoder.layer.0-3"."""
        return name_ranges(self.units[first:stop])

    def describe_freeze(self, before: int, after: int, stopped: Collection[str]) -> str:
        """Name, for the log, the units that freeze and the parameters outside of them that stop training.

        Args:
            before: number of units that were frozen before.
            after: number of units that are frozen now.
            stopped: names of the parameters that were trained before and no longer are.
        """
        count = f"{after - before} layer{'' if after - before == 1 else 's'}"
        text = f"freezing {count} ({_listed(self.described(before, after))})"
        if not stopped:
            return f"{text}, frozen already: this only lets the cache store outputs"
        outside = frozenset(stopped).difference(*self.inside[:after])
        others = self.trainable.union(*self.inside) - outside
        modules = dict.fromkeys(_widest(name, others) for name in sorted(outside))
        return f"{text} and, outside of the layers, {_listed(list(modules))}" if outside else text


def frozen_modules(model: nn.Module, opened: Collection[str] = (), name: str = "") -> dict[str, nn.Module]:
    """The largest modules with frozen parameters only, by name; without modules that have no parameters.

    Args:
        model: the model, or a part of it.
        opened: names of modules to be replaced by their parts.
        name: name of the part in the model.
    """
    parameters = list(model.parameters())
    if isinstance(model, torch.jit.ScriptModule):  # its forward cannot be replaced
        return {}
    if parameters and not any(parameter.requires_grad for parameter in parameters) and name not in opened:
        return {name: model}
    inside = (frozen_modules(child, opened, f"{name}.{of}".strip(".")) for of, child in model.named_children())
    return {of: module for found in inside for of, module in found.items()}


def has_frozen_layers(model: nn.Module) -> bool:
    """Whether the user has frozen the first module of a list: it may be the model's first layer."""
    lists = (
        module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module)
    )
    firsts = (list(layers[0].parameters()) for layers in lists)
    return any(first and not any(parameter.requires_grad for parameter in first) for first in firsts)


def squared_norms(
    inside: Sequence[Sequence[str]], gradients: Mapping[str, torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Squared 2-norm of each unit's gradient; 0 for a unit without gradients. No synchronisation.

    Args:
        inside: for each unit, the names of its parameters (`FreezableLayers.inside`).
        gradients: the gradients that exist on this process, by parameter name.
        device: device of the result.

    Returns:
        `[L]`, float64.
    """
    squares = torch.zeros(len(inside), dtype=torch.float64, device=device)
    where = [unit for unit, names in enumerate(inside) for name in names if name in gradients]
    if where:
        here = [gradients[name] for names in inside for name in names if name in gradients]
        norms = torch.stack([norm.to(device) for norm in torch._foreach_norm(here)]).double()
        squares.index_add_(0, torch.tensor(where, device=device), norms.square())
    return squares


def _alike_in_training(stack: LayerStack, batch: dict[str, Any], evaluates: bool) -> int:
    """Number of the lowest units that return the same in training and in evaluation mode, without random numbers.

    Args:
        stack: the model's units.
        batch: keyword arguments of `model.forward`.
        evaluates: whether frozen layers run in evaluation mode anyway.
    """
    outputs: list[tuple[nn.Module, list[torch.Tensor]]] = []
    at_start: list[torch.Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        # paths that are rarely dropped may be kept in all passes
        draws = not all(map(torch.equal, at_start, torch_states()))
        outputs.append((module, [] if draws else [tensor.clone() for tensor in tensors_of(output)]))

    passes = []
    with ExitStack() as stack_of_hooks, evaluation_mode(stack.model), torch.no_grad(), global_state_kept():
        for module in {unit.module for unit in stack.units}:
            stack_of_hooks.callback(module.register_forward_hook(note).remove)
        for trains in (False, True, True):  # a dropout may drop only in the second pass
            stack.model.train(trains)
            for module in frozen_modules(stack.model).values() if evaluates else ():
                module.eval()
            at_start[:] = torch_states()
            stack.model(**stack.runner.arguments(batch))
            passes.append(outputs[:])
            outputs.clear()
    count = 0
    for (module, expected), *others in zip(*passes, strict=False):
        for other, found in others:
            same = other is module and len(found) == len(expected) > 0
            if not same or not all(map(torch.equal, found, expected)):
                return count
        count += 1
    return count


def name_ranges(names: Sequence[str]) -> list[str]:
    """Names of modules in their order, neighbours in a list as one: "encoder.layer.0-3"."""
    ranges: list[tuple[str, str, str]] = []  # path, first and last of each range
    for name in dict.fromkeys(names):
        path, _, index = name.rpartition(".")
        follows = bool(ranges) and index.isdigit() and ranges[-1][::2] == (path, str(int(index) - 1))
        ranges.append((*ranges.pop()[:2], index) if follows else (path, index, index))
    return [f"{path}.{first}".lstrip(".") + (f"-{last}" if last != first else "") for path, first, last in ranges]


def _widest(name: str, others: Collection[str]) -> str:
    """The outermost module that has this parameter and none of the others; the parameter itself without one."""
    parts = name.split(".")
    paths = [".".join(parts[:length]) for length in range(1, len(parts))]
    return next((path for path in paths if not any(other.startswith(f"{path}.") for other in others)), name)


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:MOST_TO_NAME], *(["..."] if len(names) > MOST_TO_NAME else [])])


def _units(stack: LayerStack) -> Sequence[Unit | None]:
    return stack.units or (None,) * stack.num_units  # an unsplit model has one unit and no layers


def _is_inside(name: str, unit: Unit | None, stack: LayerStack) -> bool:
    return unit is None or any(alias.startswith(unit.name + ".") for alias in stack.table.aliases[name])


def _head_parameters(stack: LayerStack, batch: dict[str, Any]) -> frozenset[str]:
    """The parameters that the loss depends on when every unit returns a precomputed output without a graph."""
    if not stack.units:
        return frozenset()
    runner, carry = stack.runner, Carry()
    was_installed = runner.installed
    runner.install()
    try:
        with evaluation_mode(stack.model), stack.table.all_trainable():
            with torch.no_grad():
                runner.trace(batch, lambda unit, output: carry.__setitem__(unit.stack, tensors_of(output)))
            with torch.enable_grad(), runner.to_the_end(stack.num_units, carry):
                output = output_tensors(stack.model(**runner.arguments(batch)))
            # T5 also returns its encoder's output, LLaVA its projector's: these do not contribute to training
            reached = {id(leaf) for leaf in reachable_leaves(loss_outputs(output))}
            return frozenset(name for name in stack.table.names if id(stack.table[name]) in reached)
    finally:
        if not was_installed:
            runner.remove()
