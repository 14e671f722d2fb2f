"""Micro-batch schedules: `torch.distributed.pipelining`, extended for the Trainer.

1F1B, K = 4 stages, M = 4 micro-batches (F forward, B backward)

stage 0   F0 F1 F2 F3          B0    B1    B2    B3
stage 1      F0 F1 F2       B0 F3 B1    B2    B3
stage 2         F0 F1    B0 F2 B1 F3 B2    B3
stage 3            F0 B0 F1 B1 F2 B2 F3 B3

Interleaved 1F1B and ZBV, where a process has several of the pipeline's stages, are drawn in `planning.schedules`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)
from torch.torch_version import TorchVersion

from ..errors import UnsupportedModelError
from ..model.micro_batch import Batch, batch_rows, split_batch
from ..planning.schedules import schedule_of_step
from .messages import PipelineMessages
from .older_torch import OlderPipelineStage
from .shape_book import ShapeBook
from .stage import StageShapes
from .virtual_stages import VirtualStages
from .weight_gradients import WeightGradients

KEPT_SCHEDULES = 4
"""Number of schedules that are kept, the latest ones: each owns receive buffers for its micro-batches."""
KEPT_BYTES = 2**28
"""Bytes of the receive buffers of all kept schedules but the latest."""


def _is_no_table(record: logging.LogRecord) -> bool:
    """Leave out the whole schedule, dozens of lines, which torch logs when a step fails; the error is raised, too."""
    return record.levelno != logging.ERROR or record.funcName != "_step_microbatches"


logging.getLogger(PipelineScheduleMulti.__module__).addFilter(_is_no_table)

_Stage = PipelineStage if TorchVersion(torch.__version__) >= "2.13" else OlderPipelineStage


class _ScheduledStage(_Stage):  # type: ignore[valid-type, misc]
    """torch's stage, extended by gradient accumulation, by stages without backward and by backwards in two parts."""

    gradients_synchronise = True
    computes_gradients = True
    weight_gradients: WeightGradients | None = None
    """Postpones the weights' gradients; None if a backward has one part."""
    passes_gradients = False
    """Whether a gradient of this step has reached the stage below. Where none does, torch sends zeros."""

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.computes_gradients:  # all stages up to this one are frozen: none of them needs a gradient
            self.fwd_cache.pop(bwd_chunk_id)
            self.bwd_cache[bwd_chunk_id] = (None,) * len(self.args_recv_info[bwd_chunk_id])
            return
        later = None if full_backward else self.weight_gradients
        with later.postponed() if later is not None else nullcontext():
            # DDP reduces on a schedule's last micro-batch; under accumulation only if this is the last schedule
            try:
                super().backward_one_chunk(
                    bwd_chunk_id, loss, full_backward, last_backward and self.gradients_synchronise
                )
            except RuntimeError as error:
                if isinstance(error.__cause__, UnsupportedModelError):  # of a layer that gradient checkpointing calls
                    raise error.__cause__ from None
                raise
        self.passes_gradients |= any(gradient is not None for gradient in self.bwd_cache[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self.computes_gradients:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


_Built = tuple[list[_ScheduledStage], PipelineScheduleSingle | PipelineScheduleMulti]


class PipelineScheduler:
    """Runs batches through this process's virtual stages and builds a torch schedule for each new shape.

    torch fixes all shapes when a stage first runs: a longer batch would abort, and a shorter one would silently be
    read into the larger buffer. Building stage and schedule anew costs under 2% of a step.

    Args:
        held: this process's virtual stages.
        submodules: the modules of these stages, wrapped in DDP if DDP averages over the replicas.
        messages: the position of the process among the K > 1 stages of its pipeline.
        shape_books: the shapes at the boundaries of each virtual stage.
        schedule: name of the schedule.
    """

    def __init__(
        self,
        held: VirtualStages,
        submodules: Sequence[nn.Module],
        messages: PipelineMessages,
        shape_books: Sequence[ShapeBook],
        schedule: str,
    ) -> None:
        self._held = held
        self._submodules = tuple(submodules)
        self._stage_index, self._placement, self._group = messages.stage_index, messages.placement, messages.group
        self._shape_books = tuple(shape_books)
        self._name = schedule
        self._built: OrderedDict[Any, _Built] = OrderedDict()
        self.cut = 0
        """First unit of this process's last stage that had a gradient to pass down in the last step, and did not."""
        splits = schedule_of_step(
            schedule, messages.num_stages, messages.num_stages, messages.placement.num_virtual_stages
        ).splits_backward
        self._weight_gradients = WeightGradients(held.stack.model, list(held.parameters())) if splits else None

    def step(self, batch: Batch, num_microbatches: int, gradients_synchronise: bool) -> None:
        """Run forward and backward of all micro-batches. Collective over the pipeline.

        Args:
            batch: the pipeline's whole batch, the same on all its stages.
            num_microbatches: M, a divisor of the batch's number of samples.
            gradients_synchronise: whether DDP reduces gradients over the replicas at the end.
        """
        rows, held = batch_rows(batch) // num_microbatches, self._held
        shapes = tuple(book.shapes(batch, rows) for book in self._shape_books)
        stages, schedule = self._for(shapes, num_microbatches)
        for stage in stages:
            stage.gradients_synchronise, stage.passes_gradients = gradients_synchronise, False
        index = torch.arange(num_microbatches)  # the argument that torch splits into micro-batches
        target = index if held.has_last_unit else None
        micro_batches = split_batch(batch, num_microbatches)
        with ExitStack() as holding:
            if self._weight_gradients is not None:
                holding.enter_context(self._weight_gradients.split())
            for module, of_module in zip(held.stages, shapes, strict=True):
                holding.enter_context(module.holding(micro_batches, of_module))
            schedule.step(index=index, target=target, return_outputs=False)
        expected = [any(c.requires_grad for c in of_stage.incoming) for of_stage in shapes]
        outcomes = zip(held.stages, stages, expected, strict=True)
        self.cut = max((m.start for m, stage, wanted in outcomes if wanted and not stage.passes_gradients), default=0)

    def _for(self, shapes: tuple[StageShapes, ...], num_microbatches: int) -> _Built:
        key = (shapes, num_microbatches)
        if key in self._built:
            self._built.move_to_end(key)
            return self._built[key]
        placement = self._placement
        run_as = schedule_of_step(self._name, placement.num_stages, num_microbatches, placement.num_virtual_stages)
        stages = [self._stage(part, of_part) for part, of_part in enumerate(shapes)]
        name = run_as.torch_name
        torch_class = get_schedule_class(name) if isinstance(name, str) else name
        schedule = torch_class(
            stages if run_as.is_interleaved else stages[0], num_microbatches, loss_fn=_first_output, scale_grads=False
        )
        # torch takes the process's rank in the group for the index of its stage
        schedule.rank = self._stage_index
        for stage in stages:
            stage.stage_index_to_group_rank = {
                index: placement.position_of(placement.stage_of(index)) for index in range(placement.last + 1)
            }
        self._built[key] = (stages, schedule)
        while len(self._built) > KEPT_SCHEDULES or self._older_bytes > KEPT_BYTES:
            self._built.popitem(last=False)
        return stages, schedule

    @property
    def _older_bytes(self) -> int:
        """Bytes of the receive buffers of all kept schedules but the latest."""
        return sum(m * sum(of_part.num_bytes for of_part in shapes) for shapes, m in list(self._built)[:-1])

    def _stage(self, part: int, shapes: StageShapes) -> _ScheduledStage:
        """Return torch's stage for one of this process's virtual stages."""
        module = self._held.stages[part]
        incoming = [c for slot, c in zip(module.slots_in, shapes.incoming, strict=True) if slot.is_used]
        outgoing = [c for slot, c in zip(module.slots_out, shapes.outgoing, strict=True) if slot.is_used]
        loss = torch.empty(1, device="meta", requires_grad=True)
        stage = _ScheduledStage(
            self._submodules[part],
            self._placement.held_by(self._stage_index)[part],
            self._placement.last + 1,
            module.device,
            input_args=tuple(carried.meta() for carried in incoming),
            output_args=(loss,) if module.is_last else tuple(carried.meta() for carried in outgoing),
            group=self._group,
            dw_builder=self._weight_gradients.take if self._weight_gradients is not None else None,
        )
        stage.weight_gradients = self._weight_gradients
        stage.requires_grad_in = tuple(carried.requires_grad for carried in incoming)
        stage.requires_grad_out = tuple(carried.requires_grad for carried in outgoing)
        stage.computes_gradients = module.is_last or any(carried.requires_grad for carried in outgoing)
        return stage


def _first_output(output: torch.Tensor | Sequence[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """Return the loss, which the last stage has computed already."""
    return output if isinstance(output, torch.Tensor) else output[0]
