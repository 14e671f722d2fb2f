"""Frozen layers of a whole model that a plain `transformers.Trainer` trains."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...model.frozen_prefix import FreezableLayers
from ...model.layer_stack import LayerStack, StackDescription


@dataclass(frozen=True)
class FoundLayers:
    """The layers of a model, found before FSDP2 has sharded it.

    Attributes:
        stack: the layers.
        freezable: which parameters freeze with them.
    """

    stack: StackDescription
    freezable: FreezableLayers


class FrozenPrefix:
    """Freezes the bottom units of a complete model that is not split into stages.

    The model's runner overrides `forward` on the instances of the layer modules: frozen units run in eval mode and
    build no graph, in any mode that the Trainer sets before a step. Evaluation is not affected.

    Args:
        stack: the model's units.
        layers: which parameters freeze with the units.
    """

    def __init__(self, stack: LayerStack, layers: FreezableLayers) -> None:
        self.layers = layers
        self._stack = stack
        self._stays_in_eval: set[nn.Module] = set()
        self._required_gradient: list[nn.Parameter] = []  # the parameters that did so before they were frozen here
        stack.runner.install()

    @property
    def num_frozen(self) -> int:
        return self._stack.runner.num_frozen

    def freeze(self, num_frozen: int) -> dict[str, nn.Parameter]:
        """Freeze the first `num_frozen` units, at least as many as before.

        Returns:
            The parameters that no longer require a gradient, by name. Their gradients are deleted; the caller must
            drop their optimizer state and rebuild the reduction of gradients.
        """
        assert num_frozen >= self.num_frozen, "frozen layers do not thaw"
        table = self._stack.table
        names = self.layers.frozen(num_frozen)
        parameters = {name: table[name] for name in table.names if name in names and table[name].requires_grad}
        for parameter in parameters.values():
            parameter.requires_grad_(False)
            parameter.grad = None
        self._required_gradient += parameters.values()
        self._stays_in_eval = self._modules_of_prefix_alone(num_frozen, names)
        self._stack.runner.freeze(num_frozen, self._stays_in_eval)
        for module in self._stays_in_eval:
            module.training = False
        return parameters

    def begin_forward(self) -> None:
        """Prepare for a forward of the model that was called before this object was made. Later ones need no call."""
        self._stack.runner.begin_plain_call()

    def remove(self) -> None:
        """Restore the model's own forward, its modes and its `requires_grad` flags."""
        self._stack.runner.remove()
        self._stack.runner.freeze(0)
        for parameter in self._required_gradient:
            parameter.requires_grad_(True)
        for module in self._stays_in_eval:
            module.training = self._stack.model.training
        self._required_gradient, self._stays_in_eval = [], set()

    def _modules_of_prefix_alone(self, num_frozen: int, frozen: frozenset[str]) -> set[nn.Module]:
        """Frozen layers, and fully frozen modules (embeddings) without active layers inside."""
        units = self._stack.units
        active = {module for unit in units[num_frozen:] for module in unit.module.modules()}
        layers = {unit.module for unit in units[:num_frozen]}
        frozen_parameters = {id(self._stack.table[name]) for name in frozen}
        roots = []
        for module in self._stack.model.modules():
            parameters = [id(parameter) for parameter in module.parameters()]
            is_frozen = module in layers or (parameters and frozen_parameters.issuperset(parameters))
            if is_frozen and active.isdisjoint(module.modules()):
                roots.append(module)
        return {module for root in roots for module in root.modules()}
