"""A frozen module that the loss calls, for the front that stores its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from .finding import Reading


@dataclass(frozen=True)
class Split:
    """A module whose layers are on several processes, of which this one runs the last and the loss.

    Attributes:
        undivided: name, in the holder, of the module in which these layers are. No part of it is stored by itself.
        elsewhere: identities of the parameters that this process does not have. Their processes watch them.
        digest: returns a digest of the weights and settings there.
    """

    undivided: str
    elsewhere: frozenset[int]
    digest: Callable[[], str]

    def has_inside(self, names: Iterable[str]) -> bool:
        """Whether one of these modules is a part of the undivided one."""
        return any(name.startswith(f"{self.undivided}.") for name in names)


@dataclass(frozen=True)
class CalledByLoss:
    """A frozen module that the loss calls, in whose calls a front is looked for in place of the trained model's.

    Attributes:
        holder: a module that contains it, under the name by which log lines call it.
        opened: names of modules in the holder of which the parts are looked at, and not the module.
        reading: what is read of what the call returns.
        device: where it computes.
        num_entries: number of entries that an epoch stores, if it is known.
        split: if its layers are on several processes, which.
    """

    holder: nn.Module
    opened: frozenset[str]
    reading: Reading
    device: torch.device
    num_entries: int | None
    split: Split | None = None
