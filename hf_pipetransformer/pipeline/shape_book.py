"""The shapes of the tensors between stages, which each stage learns from short forwards of its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..model.batch_statistics import running_statistics_kept
from ..model.micro_batch import Batch, batch_rows, numbers_of_rows, shape_signature, slice_rows
from ..randomness import global_state_kept
from .stage import BoundaryShapes, CarriedTensor, StageModule, StageShapes


class ShapeBook:
    """The shapes at a stage's boundaries for every shape of batch seen so far.

    The size of a boundary tensor is an affine function of the micro-batch's number of samples. So each new shape of
    batch costs one forward of one sample and one of two samples, for any size of the batch. A batch that cannot be
    split (`LayerStack.whole_because`) is a single micro-batch, and costs one forward of all its samples.

    Args:
        stage: this process's stage.
        from_previous: receives the shapes that `to_next` has sent on the previous stage.
        to_next: sends the shapes of this stage's outputs, for each number of samples, to the next stage.
    """

    def __init__(
        self,
        stage: StageModule,
        from_previous: Callable[[], Sequence[BoundaryShapes]],
        to_next: Callable[[Sequence[BoundaryShapes]], None],
    ) -> None:
        self._stage = stage
        self._from_previous = from_previous
        self._to_next = to_next
        self._by_rows: dict[tuple[Any, ...], tuple[StageShapes, StageShapes]] = {}

    def shapes(self, batch: Batch, rows: int) -> StageShapes:
        """Shapes for micro-batches of `rows` samples of `batch`. Collective over the pipeline for a new shape."""
        most = batch_rows(batch)
        counts = (1, 2) if most > 1 else (1,)  # a single sample does not show how the sizes grow with more samples
        if self._stage.stack.whole_because or len(numbers_of_rows(batch)) > 1:
            assert rows == most
            counts = (most,)
        key = (shape_signature(batch), counts)
        if key not in self._by_rows:
            learned = self._learn([slice_rows(batch, 0, count) for count in counts])
            self._by_rows[key] = (learned[0], learned[-1])
        one, two = self._by_rows[key]
        return StageShapes(_at(rows, one.incoming, two.incoming), _at(rows, one.outgoing, two.outgoing))

    def _learn(self, batches: Sequence[Batch]) -> list[StageShapes]:
        """Return the shapes for each of the batches. The stages exchange the shapes of all batches at once."""
        incoming: Sequence[BoundaryShapes] = [()] * len(batches)
        if self._stage.start > 0:
            incoming = [tuple(shapes) for shapes in self._from_previous()]
        with global_state_kept(), running_statistics_kept(self._stage.stack.model):
            outgoing = [self._stage.infer_shapes(*known) for known in zip(incoming, batches, strict=True)]
        if not self._stage.is_last:
            self._to_next(outgoing)
        return [StageShapes(*both) for both in zip(incoming, outgoing, strict=True)]


def _at(rows: int, one: Sequence[CarriedTensor], two: Sequence[CarriedTensor]) -> tuple[CarriedTensor, ...]:
    return tuple(
        replace(a, shape=tuple(x + (y - x) * (rows - 1) for x, y in zip(a.shape, b.shape, strict=True)))
        for a, b in zip(one, two, strict=True)
    )
