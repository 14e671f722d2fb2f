"""Tags: numbers that a part of a training attaches to the samples of a batch.

    input_ids   [B, T]
    labels      [B]
    tags        [B, 4]   integers, which the core does not interpret

A tensor of tags is split, sent to other stages and moved as the batch's other tensors are. Before the user's code or
the model gets the batch, the tags are taken out of it.
"""

from __future__ import annotations

from typing import Any

import torch

TAGS = "pipetransformer_tags"
"""Name of the tags in a batch: an int64 tensor [B, n]."""
BLANK = -2
"""Number in tags without a meaning."""

NO_TAGS = torch.full((1, 4), BLANK, dtype=torch.int64)
"""Tags for a batch that allow no conclusion from the inputs of the model's calls."""


def blanked(tags: torch.Tensor) -> torch.Tensor:
    """Tags without a meaning, of the same shape on all stages."""
    return torch.full_like(tags, BLANK)


def without_tags(batch: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a batch."""
    return {name: value for name, value in batch.items() if name != TAGS}
