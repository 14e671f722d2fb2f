"""The placement: which stage holds which of the model's virtual stages.

    K = 2, V = 2         stage 0    stage 1

    loop                 0   2      1   3      after the last stage comes the first one
    V-shaped             0   3      1   2      at its ends the way turns round: the first stage has the loss as well

Virtual stage i is the stage's part i // K in either placement; with one virtual stage per stage both are the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """How V K virtual stages, in the model's order, are laid out over K stages.

    Attributes:
        num_stages: K.
        num_virtual_stages: virtual stages per stage V.
        is_v_shaped: whether every second part is laid out from the last stage to the first.
    """

    num_stages: int
    num_virtual_stages: int = 1
    is_v_shaped: bool = False

    @property
    def last(self) -> int:
        """Index of the last virtual stage, which computes the loss."""
        return self.num_stages * self.num_virtual_stages - 1

    def stage_of(self, virtual_stage: int) -> int:
        """Return the stage that holds a virtual stage."""
        part, position = divmod(virtual_stage, self.num_stages)
        return self.num_stages - 1 - position if self.is_v_shaped and part % 2 else position

    def held_by(self, stage: int) -> tuple[int, ...]:
        """Return the virtual stages that a stage holds, in the model's order."""
        return tuple(index for index in range(self.last + 1) if self.stage_of(index) == stage)
