"""What is tried before training leaves no trace."""

from __future__ import annotations

import torch
from torch import nn

from hf_pipetransformer.model.left_as_found import left_as_found


class Counting(nn.Module):
    """Counts its calls, and keeps statistics, in all the ways that users do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("late", None)
        self.calls, self.seen, self.sums = 0, [], {"total": 0.0}
        self.plain = torch.zeros(2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(float(inputs.sum()))
        self.sums["total"] += 1.0
        self.mean.lerp_(inputs.mean(0), 0.5)
        self.plain.data += 1
        self.late = inputs.detach().clone()
        self.added = True
        return self.linear(inputs)


def test_counters_buffers_and_lists_are_as_before() -> None:
    model = Counting()
    seen, mean = model.seen, model.mean
    with left_as_found(model):
        model(torch.ones(3, 2))
    assert (model.calls, model.sums, model.late) == (0, {"total": 0.0}, None) and not hasattr(model, "added")
    assert model.seen is seen and not seen and model.mean is mean
    assert not model.mean.any() and not model.plain.any()
