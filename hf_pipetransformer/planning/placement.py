"""The placement: the process that runs each stage of a pipeline, and the virtual stages of each stage.

    K = 2, V = 2         stage 0    stage 1

    loop                 0   2      1   3      after the last stage comes the first one
    V-shaped             0   3      1   2      the order turns round at the ends: the first stage also has the loss

In both placements, virtual stage i is its stage's part i // K. With one virtual stage per stage they are equal.

The pipeline's first process computes the loss: rank 0, which logs and saves, has the results of user code:

    K = 4                process 0   1   2   3

    loop                 stage   3   2   1   0
    V-shaped             stage   0   1   2   3
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """The assignment of V K virtual stages, in the model's order, to K stages.

    Attributes:
        num_stages: K.
        num_virtual_stages: virtual stages per stage V.
        is_v_shaped: whether every second part runs from the last stage to the first.
    """

    num_stages: int
    num_virtual_stages: int = 1
    is_v_shaped: bool = False

    @property
    def last(self) -> int:
        """Index of the last virtual stage, which computes the loss."""
        return self.num_stages * self.num_virtual_stages - 1

    @property
    def loss_stage(self) -> int:
        """Index of the stage that computes the loss."""
        return self.stage_of(self.last)

    def stage_of(self, virtual_stage: int) -> int:
        """Return the stage that holds a virtual stage."""
        part, position = divmod(virtual_stage, self.num_stages)
        return self.num_stages - 1 - position if self.is_v_shaped and part % 2 else position

    def position_of(self, stage: int) -> int:
        """Return the pipeline position of the process that runs a stage. It is its own inverse."""
        return stage if self.loss_stage == 0 else self.num_stages - 1 - stage

    def held_by(self, stage: int) -> tuple[int, ...]:
        """Return the virtual stages that a stage holds, in the model's order."""
        return tuple(index for index in range(self.last + 1) if self.stage_of(index) == stage)
