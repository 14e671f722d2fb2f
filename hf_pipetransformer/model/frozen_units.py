"""How the first units of a model run once they are frozen, whoever runs them: a pipeline's stage, or a plain Trainer.

    model(**batch)        embeddings   unit 0    unit 1    unit 2    unit 3    head
    num_frozen = 2        eval mode    eval mode, no graph | modes as before, with gradient

Code of the user's own around units that still train (the model's `forward`, for one) keeps its mode throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn


class FrozenUnits:
    """Counts the units of one call of the model, and runs the frozen ones in eval mode and without a graph.

        begin      the model is called: what precedes the units, and they themselves, go to eval mode
        count      a unit is called
        run, skip  it computes, or what it gives is known already; behind the last frozen one modes are as before
        end        likewise, wherever the call was left

    What is a call of the model is for those to say who know. A pass of a `LayerRangeRunner` is one in eval mode, too:
    its frozen units build no graph. In a plain Trainer only a call in training mode is one, so evaluation is not
    touched, and the next call ends it.

    Args:
        model: the complete model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.num_frozen = 0
        self.position = 0
        """The unit that is called next."""
        self.is_called = False
        """Between `begin` and `end`."""
        self._model = model
        self._keeps_training: set[nn.Module] = set()
        self._stays_in_eval: Collection[nn.Module] = ()
        self._switched: list[tuple[nn.Module, bool]] = []  # with their modes behind the frozen units

    def freeze(
        self, num_frozen: int, active: Collection[nn.Module], stays_in_eval: Collection[nn.Module] = ()
    ) -> None:
        """From the next call on the first `num_frozen` units are frozen.

        Args:
            num_frozen: may also be fewer than before, where it is tried how a model would run.
            active: the modules of the other units.
            stays_in_eval: modules that are in eval mode behind the frozen units, too. A pipeline has none, as its
                stages are in one mode between two passes; in a plain Trainer what the user's callbacks see of frozen
                layers, and what calls them outside of the model's forward, shall find them frozen.
        """
        self.num_frozen = num_frozen
        self._keeps_training = modules_around(self._model, active) if num_frozen else set()
        self._stays_in_eval = stays_in_eval

    def begin(self, trains_before: Collection[nn.Module] = ()) -> None:
        """The model is called.

        Args:
            trains_before: in a model in eval mode, what is in training mode until the frozen units are through.
        """
        self.position, self.is_called = 0, True
        switched: list[nn.Module] = []
        if not self._model.training:
            switched = [module for module in trains_before if not module.training]
        elif self.num_frozen:
            # all modules, not only those of frozen units: dropout on the embeddings often is no module of its own
            kept = self._keeps_training
            switched = [module for module in self._model.modules() if module.training and module not in kept]
        stays = self._stays_in_eval
        self._switched = [(module, module.training and module not in stays) for module in switched]
        for module in switched:
            _set_mode(module, not module.training)

    def count(self) -> int:
        """The number of the unit that is called now."""
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
            self._leave()  # the head may be all that trains
        return output

    def skip(self, index: int) -> None:
        """A unit does not compute."""
        if index + 1 >= self.num_frozen:
            self._leave()

    def end(self) -> None:
        """The call of the model is over, however it ended. What is called now is no part of one."""
        self._leave()
        self.forget()

    def forget(self) -> None:
        """Likewise, but where modes have been set anew since the call."""
        self.position, self.is_called, self._switched = 0, False, []

    def _leave(self) -> None:
        for module, mode in self._switched:
            _set_mode(module, mode)
        self._switched = []


def modules_around(model: nn.Module, layers: Collection[nn.Module]) -> set[nn.Module]:
    """The model and what else in it calls these layers, where that is code of the user's own.

    Such code may ask at its beginning whether it trains, for more than dropout: in the stock Trainer it does, whatever
    layers are frozen. In transformers' own modules, all that the mode decides before the layers is dropout and masking
    of the embeddings, which are frozen with the layers.
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
    """Thousands of times a step; nn.Module's own way is slow, and what is scripted has no other."""
    if "training" in module.__dict__:
        module.__dict__["training"] = training
    else:
        module.training = training
