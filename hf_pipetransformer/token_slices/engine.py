"""The engine that runs the slices of sequences over several stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..model.micro_batch import Batch
from ..pipeline.engines.engine import Engine, Position, StepLoss
from .kv_slices import Windows
from .slice_choice import SliceChooser, TokenSlices
from .slice_timeline import SlicePlan
from .token_schedule import TokenScheduler


@dataclass(frozen=True)
class Slicing:
    """Settings for splitting sequences along their tokens over several stages (`Execution.slicing`).

    Attributes:
        token_slices: the user's setting.
        windows: attention windows of the model's layers, from `probe_slicing`.
        on_plan: called for each new shape of batch.
    """

    token_slices: TokenSlices
    windows: Windows
    on_plan: Callable[[SlicePlan], None]


class SlicesEngine(Engine):
    """Runs slices in the order of `token_schedule`."""

    reduces_at_end = True  # DDP prepares its reducer in the first forward, but that slice's backward comes last

    def __init__(self, position: Position) -> None:
        super().__init__(position)
        layout, slicing, messages = position.layout, position.execution.slicing, position.messages
        assert isinstance(slicing, Slicing)
        books = position.shape_books()
        # for the backward direction
        second_group = position.mesh.second_pipeline_group(layout.pipeline_parallel_size)
        chooser = SliceChooser(
            slicing.token_slices,
            slicing.windows,
            layout.num_microbatches_for,
            messages.of_each_stage,
            slicing.on_plan,
            # the dynamic program also chooses the parts of the batch, unless the user has set their number
            chooses_parts=slicing.token_slices == "auto" and layout.requested_microbatches is None,
        )
        stage = position.stage.first
        self._scheduler = TokenScheduler(stage, messages, second_group, books[0], slicing.windows, chooser)

    @property
    def cut(self) -> int:
        return self._scheduler.cut

    def prepare(self, batch: Batch) -> None:
        self._scheduler.parts_of(batch)

    def step(self, batch: Batch, loss: StepLoss, gradients_synchronise: bool) -> None:
        self._scheduler.step(batch)
