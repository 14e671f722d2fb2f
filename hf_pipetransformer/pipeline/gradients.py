"""The gradients of one stage, reduced over the processes that contribute to them.

shared parameters   summed over the stages that hold them
replicas            averaged after the step, if DDP does not average them
norm                of the whole model, over all stages
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..model.frozen_prefix import squared_norms
from .chunks import BUCKET_BYTES
from .virtual_stages import VirtualStages


@dataclass(frozen=True)
class SharedParameters:
    """Trainable parameters that the same set of two or more stages holds.

    Attributes:
        names: names of the parameters.
        copies: number of stages that hold them.
        group: these stages' processes in this pipeline; None on the other stages.
    """

    names: tuple[str, ...]
    copies: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class ReplicatedParameters:
    """Trainable parameters of a stage whose gradients DDP does not average.

    Attributes:
        names: parameters that get a gradient in each step.
        rarely_reached: parameters that get a gradient only if the samples of some replica reach them.
        group: the processes that hold this stage in all replicas.
    """

    names: tuple[str, ...]
    rarely_reached: tuple[str, ...]
    group: dist.ProcessGroup


class StageGradients:
    """Reduces and clips a stage's gradients between the backward pass and the optimizer step.

    Args:
        stage: this process's stage.
        group: the pipeline's processes; None if there is one stage.
        shared: parameters that several stages hold, the same sets in the same order on every process.
        replicated: the parameters whose gradients are averaged here; None if DDP averages them, or if there is one
            replica.
    """

    def __init__(
        self,
        stage: VirtualStages,
        group: dist.ProcessGroup | None,
        shared: Sequence[SharedParameters],
        replicated: ReplicatedParameters | None,
    ) -> None:
        self._stage = stage
        self._table = stage.stack.table
        self._group = group
        self._shared = tuple(shared)
        self._counted: tuple[tuple[str, ...], torch.Tensor] | None = None  # copies of the parameters of a step
        self._replicated = replicated
        self.shared_are_summed = False
        """Whether the last step has left the sums over the stages in shared parameters' gradients."""

    # ------------------------------------------------------------------------------------ over stages and replicas
    def sum_over_stages(self) -> None:
        """Sum shared parameters' gradients, in one message per set of stages. Collective over the stages of a set."""
        for shared in self._shared:
            if shared.group is not None:
                self._sum(shared.names, shared.group)
        self.shared_are_summed = bool(self._shared)

    def keep_sums_once(self) -> None:
        """If gradients accumulate on their sums over the stages, keep them on one stage, so that they count once."""
        if not self.shared_are_summed:
            return
        for shared in self._shared:
            if shared.group is not None and dist.get_rank(shared.group) > 0:
                for name in shared.names:
                    self._table[name].grad = None
        self.shared_are_summed = False

    def average_over_replicas(self) -> None:
        """Average gradients after the step if DDP cannot, because the first forward's backward comes last.

        Collective over the stage's replicas.
        """
        replicated = self._replicated
        if replicated is None:
            return
        for names in self._buckets([*replicated.names, *self._reached_somewhere(replicated)]):
            self._sum(names, replicated.group, 1 / replicated.group.size())

    def _reached_somewhere(self, replicated: ReplicatedParameters) -> list[str]:
        """Those of the rarely reached parameters (an expert's) that some replica's samples have reached."""
        if not replicated.rarely_reached:
            return []
        has = [self._table[name].grad is not None for name in replicated.rarely_reached]
        counts = torch.tensor(has, dtype=torch.float32, device=self._stage.device)
        dist.all_reduce(counts, group=replicated.group)
        return [name for name, count in zip(replicated.rarely_reached, counts.tolist(), strict=True) if count]

    def _buckets(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Split the parameters into lists of one dtype with about `BUCKET_BYTES` each."""
        bucket: list[str] = []
        size = 0
        for name in names:
            parameter = self._table[name]
            if bucket and (size > BUCKET_BYTES or parameter.dtype != self._table[bucket[0]].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append(name)
            size += parameter.nbytes
        if bucket:
            yield bucket

    def _sum(self, names: Sequence[str], group: dist.ProcessGroup, factor: float = 1.0) -> None:
        """All-reduce the gradients of some parameters in one message."""
        parameters = [self._table[name] for name in names]
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters])
        dist.all_reduce(flat, group=group)
        if factor != 1.0:
            flat *= factor
        for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = total.view_as(parameter)

    # ------------------------------------------------------------------------------------ norms
    def clip(
        self,
        max_norm: float,
        unscale: Callable[[], None] | None = None,
        loss_scale: float = 1.0,
        stand_in: Callable[[float], None] | None = None,
        outside: Sequence[nn.Parameter] = (),
    ) -> torch.Tensor:
        """Clip gradients by the norm of the whole model's gradient, in which shared parameters are counted once.

        Collective over the pipeline. Under a gradient scaler, a gradient that is not finite on any stage becomes
        infinite on every stage, so that the step is skipped everywhere.

        Args:
            max_norm: bound on the norm; infinity only computes the norm.
            unscale: the gradient scaler's function that divides the gradients here by the loss scale and looks for
                infinite ones.
            loss_scale: the loss scale of the gradient scaler.
            stand_in: on a stage without gradients, gives the scaler a gradient to inspect (`OptimizerState.stand_in`).
            outside: parameters of the optimizer outside of the model. As in the stock Trainer, the norm does not count
                them; the scaler inspects them.

        Returns:
            The norm before clipping, 0-dimensional, the same on every process.
        """
        parameters = list(self._stage.parameters())
        if self._group is None:
            if unscale is not None:
                unscale()
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        gradients = self._stage.gradients()
        scaled = [] if unscale is None else [p.grad for p in outside if p.grad is not None]
        square = self._square_over_stages(gradients, scaled)
        if unscale is not None:
            if gradients and not torch.isfinite(square):
                first = next(iter(gradients.values()))
                first[(0,) * first.dim()] = float("inf")
            if not gradients and stand_in is not None:
                stand_in(0.0 if torch.isfinite(square) else float("inf"))
            unscale()
        norm = (square.sqrt() / loss_scale).float()
        # also for an infinite bound: if the norm is infinite, too, all gradients become NaN, as on one process
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def _square_over_stages(self, gradients: dict[str, torch.Tensor], others: Sequence[torch.Tensor]) -> torch.Tensor:
        """Squared norm of the whole gradient while it is scaled; in float64, as scaled values may be large.

        It is not finite where one of the `others` is not, which do not count otherwise.
        """
        square = torch.zeros((), dtype=torch.float64, device=self._stage.device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(list(gradients.values()))).double()
            square = (norms.square() / self._copies_of(tuple(gradients))).sum()
        for gradient in others:
            square += 0 * gradient.sum()
        dist.all_reduce(square, group=self._group)
        return square

    def _copies_of(self, names: tuple[str, ...]) -> torch.Tensor:
        """On how many stages each of these parameters is; on the device, to which it is copied once."""
        if self._counted is None or self._counted[0] != names:
            copies_of = {name: shared.copies for shared in self._shared for name in shared.names}
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
            `[L]`, float64, on the device, so that nobody waits for it; 0 for units without a gradient.
        """
        # a shared parameter is counted in the unit it belongs to
        mine = [names if unit in self._stage.units else () for unit, names in enumerate(inside)]
        squares = squared_norms(mine, self._stage.gradients(), self._stage.device)
        if self._group is not None:
            dist.all_reduce(squares, group=self._group)
        return squares / loss_scale**2
