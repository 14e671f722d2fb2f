"""What each process has to tell the others at a step: one all-reduce carries it together with the loss."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class StepVotes:
    """Seen on this process; after `agree`, on some process.

    Attributes:
        stop: SIGTERM has come.
        other_inputs: the model was called on other inputs than those that the cache's keys are of.
        other_weights: a callback seems to have changed frozen weights.
        exchanged_inputs: the last stage has called the model on other inputs than the stages before it.
        other_flags: something else than a callback has set `requires_grad`.
        other_loss: the loss is another function than before the first step.
    """

    stop: bool = False
    other_inputs: bool = False
    other_weights: bool = False
    exchanged_inputs: bool = False
    other_flags: bool = False
    other_loss: bool = False

    def agree(self, loss: torch.Tensor) -> tuple[torch.Tensor, StepVotes]:
        """The sum of all processes' losses, and what any of them has seen. Collective over all processes.

        Args:
            loss: of this process, 0-dimensional.
        """
        loss = loss.float()
        together = torch.stack([loss, *(loss.new_full((), float(vote)) for vote in astuple(self))])
        dist.all_reduce(together)
        return together[0], StepVotes(*(together[1:] > 0).tolist())
