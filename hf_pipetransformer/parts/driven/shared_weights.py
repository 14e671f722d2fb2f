"""Writes of the loss into weights that other stages hold as well, such as tied embeddings or CLIP's `logit_scale`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...model.called_inputs import version_of
from ...pipeline.stage import StageModule
from .module_state import PARAMETERS, Change, Place


class SharedWeights:
    """The weights that the last stage and other stages hold, and their changes.

    Args:
        modules: all modules of the model.
        stage: the last stage.
    """

    def __init__(self, modules: Sequence[nn.Module], stage: StageModule) -> None:
        table = stage.stack.table
        shared = {id(table[name]) for name in {*stage.names} & {*stage.stack.owned(0, stage.start)}}
        self._weights: dict[Place, nn.Parameter] = {}
        for number, module in enumerate(modules):
            for name, weight in module._parameters.items():
                if weight is not None and id(weight) in shared:
                    shared.remove(id(weight))
                    self._weights[number, (PARAMETERS, name)] = weight
        self.note()

    def note(self) -> None:
        """Take the current values as the reference."""
        self._noted = self._now()

    def changes(self) -> list[Change]:
        """Return the weights that were written since the last call."""
        noted, self._noted = self._noted, self._now()
        written = zip(self._weights.items(), noted, self._noted, strict=True)
        return [
            Change(place, torch.Tensor.detach(weight), is_written=True)
            for (place, weight), before, now in written
            if before != now
        ]

    def _now(self) -> list[tuple[int, int, float]]:
        """Number of writes, address and one value of each: torch does not count writes through `.data`."""
        return [(version_of(w), w.data_ptr(), _one_value(w)) for w in self._weights.values()]


def _one_value(weight: torch.Tensor) -> float:
    is_cheap = weight.device.type == "cpu" or weight.numel() == 1  # an accelerator's value has to be waited for
    if not is_cheap or not weight.numel() or not weight.is_floating_point():
        return 0.0
    value: torch.Tensor = torch.Tensor.detach(weight)[tuple(size // 2 for size in weight.shape)]
    return value.nan_to_num().item()
