"""A frozen module that the loss calls, for the front that stores its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from .finding import Reading


@dataclass(frozen=True)
class Split:
    """A module with layers on several processes. This process runs the last layers and the loss.

    Attributes:
        undivided: name, in the holder, of the module that has these layers. No part of it is stored by itself.
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
    """A frozen module that the loss calls. A front is looked for in its calls, not in the trained model's.

    Attributes:
        holder: a module that contains it, under the name by which log lines call it.
        opened: names of modules in the holder. Their parts are looked at, not the modules themselves.
        reading: the outputs of the call that are read.
        device: where it computes.
        num_entries: number of entries that an epoch stores, if it is known.
        split: the split of its layers over several processes, if there is one.
    """

    holder: nn.Module
    opened: frozenset[str]
    reading: Reading
    device: torch.device
    num_entries: int | None
    split: Split | None = None
