"""Outputs of modules inside layers that travel with the layers' outputs, because code behind the layers reads them.

a unit that runs       its tapped modules run, and their outputs are carried beside its own
a unit that is skipped its tapped modules return what was carried, and their hooks are called
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .method_override import MethodOverride, original_method
from .units import ModelLayers


class Taps:
    """The tapped modules of a model.

    Args:
        model: the complete model.
        layers: its layers, with the names of the tapped modules in each.
    """

    def __init__(self, model: nn.Module, layers: ModelLayers) -> None:
        self._of_layers = {
            layer: tuple(model.get_submodule(name) for name in names) for layer, names in layers.taps.items() if names
        }
        self._outputs: dict[nn.Module, Any] = {}  # of tapped modules of the running unit
        self._handed_on: dict[nn.Module, Any] = {}  # outputs for tapped modules of a skipped unit

    def overrides(self, are_noted: Callable[[], bool]) -> list[MethodOverride]:
        """Intercept the modules' calls.

        Args:
            are_noted: whether outputs are noted now, because a pass runs.
        """

        def tapped(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if module in self._handed_on:
                    return self._handed_on.pop(module)
                output = original(*args, **kwargs)
                if are_noted():
                    self._outputs[module] = output
                return output

            return forward

        modules = {module: None for modules in self._of_layers.values() for module in modules}
        return [MethodOverride(module, "forward", tapped(module, original_method(module))) for module in modules]

    def with_outputs(self, layer: str, output: Any) -> Any:
        """The carried tensors of a layer that has run: its output, and the outputs of its tapped modules."""
        taps = self._of_layers.get(layer)
        return output if taps is None else (output, [self._outputs.pop(module) for module in taps])

    def hand_on(self, layer: str, carried: Any) -> Any:
        """Return the output of a skipped layer, and call the hooks on its tapped modules as if it had run."""
        taps = self._of_layers.get(layer)
        if taps is None:
            return carried
        output, tapped = carried
        for module, value in zip(taps, tapped, strict=True):
            self._handed_on[module] = value
            module()
        return output
