"""Which adapters of a model compute in a call: an output that depends on trained weights must not be stored."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters, or copies that are trained, into a model."""
    return any(hasattr(module, "_disable_adapters") for module in model.modules())


class TrainedAdapters:
    """The trained parameters of a model, by the modules that turn them on and off.

    The flag `requires_grad` does not matter: a loss may clear it and call the model with its adapters.

    Args:
        model: the model, with the modules of all stages.
        trained: identities of the parameters that are trained, on this or another process.
    """

    def __init__(self, model: nn.Module, trained: Collection[int]) -> None:
        owners: dict[int, Any] = {}  # by parameter: the innermost module that may turn it off
        for module in model.modules():
            if hasattr(module, "_disable_adapters"):
                owners.update(dict.fromkeys(map(id, module.parameters()), module))
        self._has_others = any(id(p) in trained and id(p) not in owners for p in model.parameters())
        self._of_owners: list[tuple[Any, set[str]]] = []  # such a module, and words in the names of its parameters
        for owner in dict.fromkeys(owners.values()):
            named = [name for name, p in owner.named_parameters() if id(p) in trained and owners[id(p)] is owner]
            if named:
                self._of_owners.append((owner, {word for name in named for word in name.split(".")}))

    @property
    def may_compute(self) -> bool:
        """Whether a trained parameter may take part in a call of the model that is made now."""
        return self._has_others or any(
            not owner._disable_adapters and not words.isdisjoint(_active(owner)) for owner, words in self._of_owners
        )


def _active(owner: Any) -> list[str]:
    active = owner._active_adapter
    return [active] if isinstance(active, str) else list(active or ())
