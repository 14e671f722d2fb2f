"""How the first units of a model run once they are frozen, both in a pipeline's stage and under a plain Trainer.

    model(**batch)        embeddings   unit 0    unit 1    unit 2    unit 3    head
    num_frozen = 2        eval mode    eval mode, no graph | modes as before, with gradient

User code around units that still train (the model's `forward`, for example) keeps its mode throughout. Units that the
user has frozen may keep theirs (`keeps_modes`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn


class FrozenUnits:
    """Counts the units of one call of the model, and runs the frozen ones in eval mode and without a graph.

        begin      the model is called: the units and the part before them are set to eval mode
        count      a unit is called
        run, skip  the unit computes, or its output is already known; after the last frozen unit, modes are restored
        end        the call of the model is over, wherever it was left; modes are restored

    The users of this class define a call of the model. For a `LayerRangeRunner` every pass is a call, also in eval
    mode, and its frozen units build no graph. In a plain Trainer only a call in training mode counts, so evaluation is
    not affected; the next call ends it.

    Args:
        model: the complete model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.num_frozen = 0
        self.position = 0
        """Index of the unit that is called next."""
        self.is_called = False
        """True between `begin` and `end`."""
        self.keeps_modes = False
        """Whether frozen units keep their modes: the user has frozen them, and may still turn dropout on in them."""
        self._model = model
        self._keeps_training: set[nn.Module] = set()
        self._stays_in_eval: Collection[nn.Module] = ()
        self._switched: list[tuple[nn.Module, bool]] = []  # modules, and their modes after the frozen units

    def freeze(
        self, num_frozen: int, active: Collection[nn.Module], stays_in_eval: Collection[nn.Module] = ()
    ) -> None:
        """Freeze the first `num_frozen` units from the next call of the model on.

        Args:
            num_frozen: number of units; it may be smaller than before while a probe tries how a model would run.
            active: the modules of the other units.
            stays_in_eval: modules that stay in eval mode after the frozen units. A pipeline has none, as its stages
                are in one mode between two passes. In a plain Trainer, callbacks and code that calls frozen layers
                outside of the model's forward must find them in eval mode.
        """
        self.num_frozen = num_frozen
        self._keeps_training = modules_around(self._model, active) if num_frozen else set()
        self._stays_in_eval = stays_in_eval

    def begin(self, trains_before: Collection[nn.Module] = ()) -> None:
        """Begin a call of the model.

        Args:
            trains_before: in a model in eval mode, modules that are in training mode until the frozen units have run.
        """
        self.position, self.is_called = 0, True
        switched: list[nn.Module] = []
        if not self._model.training:
            switched = [module for module in trains_before if not module.training]
        elif self.num_frozen and not self.keeps_modes:
            # all modules, not only frozen units: dropout on the embeddings is often not a separate module
            kept = self._keeps_training
            switched = [module for module in self._model.modules() if module.training and module not in kept]
        stays = self._stays_in_eval
        self._switched = [(module, module.training and module not in stays) for module in switched]
        for module in switched:
            _set_mode(module, not module.training)

    def count(self) -> int:
        """Return the index of the unit that is called now, and advance to the next."""
        self.position += 1
        return self.position - 1

    def run(self, index: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a unit's own forward."""
        if index >= self.num_frozen:
            self._leave()
            return forward(*args, **kwargs)
        with torch.no_grad():
            output = forward(*args, **kwargs)
        if index + 1 == self.num_frozen:
            self._leave()  # the head may be the only part that trains
        return output

    def skip(self, index: int) -> None:
        """Register that a unit does not compute."""
        if index + 1 >= self.num_frozen:
            self._leave()

    def end(self) -> None:
        """End the call of the model, however it was left. Later calls of units are not part of it."""
        self._leave()
        self.forget()

    def forget(self) -> None:
        """End the call without restoring modes, because they have been set anew since the call began."""
        self.position, self.is_called, self._switched = 0, False, []

    def _leave(self) -> None:
        for module, mode in self._switched:
            _set_mode(module, mode)
        self._switched = []


def modules_around(model: nn.Module, layers: Collection[nn.Module]) -> set[nn.Module]:
    """The model, and the modules of user code around these layers.

    User code may read its mode for more than dropout. In the stock Trainer it is in training mode, also with frozen
    layers. In transformers' own modules, the mode only affects dropout and masking of the embeddings, and these are
    frozen with the layers.
    """
    layers = set(layers)
    return {
        module
        for module in model.modules()
        if not type(module).forward.__module__.startswith(("transformers.", "torch."))
        and module not in layers
        and (module is model or not layers.isdisjoint(module.modules()))
    }


def _set_mode(module: nn.Module, training: bool) -> None:
    """Set the mode of one module. It is called thousands of times a step, and `nn.Module`'s own way is slow."""
    if "training" in module.__dict__:
        module.__dict__["training"] = training
    else:
        module.training = training
