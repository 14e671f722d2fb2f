"""The gradients of one stage, reduced over the processes that contribute to them.

shared parameters   summed over the stages that hold them
replicas            averaged after the step, if DDP does not average them
norm                of the whole model, over all stages
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ..model.frozen_prefix import squared_norms
from ..planning.layout import Layout
from .mesh import ProcessMesh
from .optimizer_state import OptimizerState
from .reductions import reduce_gradients
from .virtual_stages import VirtualStages


@dataclass(frozen=True)
class ReducedParameters:
    """Trainable parameters, and the group of processes that reduces their gradients.

    Attributes:
        names: names of parameters that get a gradient in nearly every step.
        group: the processes: of the stages that hold them in this pipeline, or of this stage in all replicas.
        rarely_reached: names of parameters that get a gradient only if the samples of some replica reach them.
    """

    names: tuple[str, ...]
    group: dist.ProcessGroup
    rarely_reached: tuple[str, ...] = ()


class StageGradients:
    """Reduces and clips a stage's gradients between the backward pass and the optimizer step.

    Args:
        stage: this process's stage.
        group: the pipeline's processes; None if there is one stage.
        shared: parameters that this stage and others hold, in the same order on all of these stages.
        replicated: the parameters with gradients to average here; None if DDP averages them, or if there is one
            replica.
    """

    def __init__(
        self,
        stage: VirtualStages,
        group: dist.ProcessGroup | None,
        shared: Sequence[ReducedParameters],
        replicated: ReducedParameters | None,
    ) -> None:
        self._stage = stage
        self._table = stage.stack.table
        self._group = group
        self._shared = tuple(shared)
        self._counted: tuple[tuple[str, ...], torch.Tensor] | None = None  # copies of the parameters of a step
        self._replicated = replicated
        self._accumulated: frozenset[str] = frozenset()  # parameters with a gradient before the step
        self.shared_are_summed = False
        """Whether the last step has left the sums over the stages in shared parameters' gradients."""

    # ------------------------------------------------------------------------------------ over stages and replicas
    def complete(self) -> None:
        """Average gradients over the replicas, if DDP does not, and sum shared ones over the stages after the step.

        Collective over the processes that hold the parameters.
        """
        if self._replicated is not None:
            replicated = self._replicated
            self._reduce(replicated, 1 / replicated.group.size())
        for shared in self._shared:
            self._reduce(shared)
        self.shared_are_summed = bool(self._shared)

    def begin(self) -> None:
        """Prepare a step.

        If gradients accumulate on their sums over the stages, keep the sums on one stage: each counts once.
        """
        self._accumulated = frozenset(self._stage.gradients()) if self._group is not None else frozenset()
        if not self.shared_are_summed:
            return
        for shared in self._shared:
            if dist.get_rank(shared.group) > 0:
                for name in shared.names:
                    self._table[name].grad = None
        self.shared_are_summed = False

    def drop_below(self, unit: int) -> None:
        """Leave the parameters of the units below one without the gradients of this step, which are all zero.

        The optimizer skips a parameter without a gradient; one with zeros it would move (weight decay, momentum).
        Gradients that earlier batches have accumulated stay.

        Args:
            unit: index of the unit. No gradient has come to the outputs of the unit before it.
        """
        above = self._stage.stack.owned(unit, self._stage.stack.num_units)
        for name in self._stage.names:
            if name not in above and name not in self._accumulated:
                self._table[name].grad = None

    def _reduce(self, reduced: ReducedParameters, factor: float = 1.0) -> None:
        regularly, rarely = ([self._table[n] for n in names] for names in (reduced.names, reduced.rarely_reached))
        reduce_gradients(regularly, reduced.group, factor, rarely)

    # ------------------------------------------------------------------------------------ norms
    def clip(
        self,
        parameters: Iterable[nn.Parameter],
        max_norm: float,
        unscale: Callable[[], None] | None = None,
        loss_scale: float = 1.0,
        optimizer: OptimizerState | None = None,
    ) -> torch.Tensor:
        """Clip the gradients of parameters by their norm over all stages. Shared parameters count once.

        Collective over the pipeline. Under a gradient scaler, if a gradient is not finite on some stage, gradients
        become infinite on every stage, and every stage skips the step. The scaler also inspects parameters of the
        optimizer outside of the model.

        Args:
            parameters: the whole model's, this stage's, or the parameters of some modules, the same on all stages.
            max_norm: bound on the norm; infinity only computes the norm.
            unscale: the gradient scaler's function that divides the gradients in the optimizer by the loss scale and
                looks for infinite ones.
            loss_scale: the loss scale of the gradient scaler.
            optimizer: the optimizer that the scaler inspects; None if there is none.

        Returns:
            The norm before clipping, 0-dimensional, the same on every process.
        """
        parameters = list(parameters)
        if unscale is not None and optimizer is not None:
            unscale = partial(optimizer.over_whole_gradients, unscale)
        if self._group is None:
            if unscale is not None:
                unscale()
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        gradients, chosen = self._stage.gradients(), {id(parameter) for parameter in parameters}
        names = {name for name in gradients if id(self._table[name]) in chosen}
        outside = [p for p in optimizer.outside if p.grad is not None] if optimizer is not None else []
        chosen_outside = [p for p in outside if id(p) in chosen]
        square, of_chosen = self._squares_over_stages(
            gradients, names, outside if unscale is not None else (), chosen_outside
        )
        if unscale is not None:
            if gradients and not torch.isfinite(square):
                first = next(iter(gradients.values()))
                first[(0,) * first.dim()] = float("inf")
            if not gradients and optimizer is not None:
                optimizer.stand_in(0.0 if torch.isfinite(square) else float("inf"))
            unscale()
        norm = (of_chosen.sqrt() / loss_scale).float()
        # also for an infinite bound: if the norm is infinite, too, all gradients become NaN, as on one process
        clipped = [*(self._table[name] for name in names), *chosen_outside]
        nn.utils.clip_grads_with_norm_(clipped, max_norm, norm)
        return norm

    def _squares_over_stages(
        self,
        gradients: dict[str, torch.Tensor],
        chosen: Collection[str],
        inspected: Sequence[nn.Parameter],
        chosen_outside: Sequence[nn.Parameter],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared norms of the whole gradient, and of the chosen parameters' and those outside of the model.

        They are still scaled, in float64, as scaled values may be large, and not finite where one of the inspected
        gradients is not.
        """
        squares = torch.zeros(2, dtype=torch.float64, device=self._stage.device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(list(gradients.values()))).double()
            each = norms.square() / self._copies_of(tuple(gradients))
            squares += each.sum()
            if len(chosen) < len(gradients):
                counts = [float(name in chosen) for name in gradients]
                squares[1] = (each * torch.tensor(counts, device=each.device)).sum()
        for parameter in inspected:
            assert parameter.grad is not None
            squares += 0 * parameter.grad.sum()
        for parameter in chosen_outside:
            assert parameter.grad is not None
            squares[1] += parameter.grad.norm().double().square()
        dist.all_reduce(squares, group=self._group)
        return squares[0], squares[1]

    def _copies_of(self, names: tuple[str, ...]) -> torch.Tensor:
        """The number of stages that hold each of these parameters. The tensor is copied to the device once."""
        if self._counted is None or self._counted[0] != names:
            copies_of = {name: shared.group.size() for shared in self._shared for name in shared.names}
            copies = torch.tensor([copies_of.get(name, 1) for name in names], device=self._stage.device)
            self._counted = names, copies
        return self._counted[1]

    def squared_norms(self, inside: Sequence[Sequence[str]], loss_scale: float = 1.0) -> torch.Tensor:
        """Squared 2-norm of each unit's gradient, before clipping, the same on every process.

        Collective over the pipeline.

        Args:
            inside: for each unit the names of its parameters (`FreezableLayers.inside`).
            loss_scale: the loss scale of the gradient scaler, if gradients are still scaled.

        Returns:
            `[L]`, float64, on the device, to save a synchronisation; 0 for units without a gradient.
        """
        # a shared parameter is counted in the unit it belongs to
        mine = [names if unit in self._stage.units else () for unit, names in enumerate(inside)]
        squares = squared_norms(mine, self._stage.gradients(), self._stage.device)
        if self._group is not None:
            dist.all_reduce(squares, group=self._group)
        return squares / loss_scale**2


def trainable_parameters(
    layout: Layout, stage: VirtualStages, may_reach_nothing: bool, unreached: frozenset[str]
) -> tuple[list[str], frozenset[str]]:
    """Return the trainable parameters of a stage, and the model's parameters that may end a step without a gradient.

    Args:
        layout: the layout in force.
        stage: this process's virtual stages under this layout.
        may_reach_nothing: whether any parameter may end a step without a gradient.
        unreached: names of the parameters that may, as determined by setup.
    """
    stack = stage.stack
    trainable = [name for name in stage.names if stack.table[name].requires_grad]
    unreached |= stack.needs.unreached
    if stage.has_last_unit:
        unreached |= stack.needs.only_returned
    # a random model's step may skip other layers each time; such a model is never cut
    if may_reach_nothing or (layout.pipeline_parallel_size == 1 and stack.is_random):
        unreached |= frozenset(trainable)
    return trainable, unreached


def shared_parameters(
    layout: Layout, stage: VirtualStages, is_trainable: Callable[[str], bool], mesh: ProcessMesh
) -> list[ReducedParameters]:
    """Group the trainable parameters that this stage and others hold by these. Collective over all processes."""
    by_stages: dict[tuple[int, ...], list[str]] = {}
    for name, virtual_stages in stage.stack.shared(layout.stage_bounds).items():
        stages = tuple(sorted({layout.placement.stage_of(index) for index in virtual_stages}))
        if is_trainable(name) and len(stages) > 1:
            by_stages.setdefault(stages, []).append(name)
    pipelines = [layout.ranks_of_pipeline(replica) for replica in range(layout.data_parallel_size)]
    groups = {s: mesh.subgroup([[ranks[stage] for stage in s] for ranks in pipelines]) for s in by_stages}
    return [ReducedParameters(tuple(by_stages[s]), group) for s, group in groups.items() if group is not None]
