"""The freeze callback of a run: the policy's, or a schedule for layers that the user has frozen."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...file_formats import freezing_in
from ...logs import log_on_main, log_once
from ...model.frozen_prefix import FreezableLayers
from ...pipeline.elastic_pipeline import ElasticPipeline
from ...planning.costs import UnitCost
from ...run.job import TrainingJob
from ..dropout_hint import give_hint
from .callback import LayerFreezeCallback, refuse_reentrant_checkpointing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UsersFreezing:
    """The lowest layers, if the user has frozen them. They are treated like a schedule that freezes at step 0.

    Attributes:
        job: the training job.
        count: number of these layers.
        names: names of their frozen parameters.
    """

    job: TrainingJob
    count: int
    names: frozenset[str]

    @classmethod
    def find(cls, job: TrainingJob, pipeline: ElasticPipeline, unit_costs: Sequence[UnitCost]) -> UsersFreezing | None:
        """Find these layers, and add the schedule's callback. Collective over all processes.

        Args:
            job: the training job.
            pipeline: the pipeline, not yet placed.
            unit_costs: costs of the model's units.

        Returns:
            The layers; None if there are none, or if the job may not follow the user's freezing.
        """
        freezable = pipeline.freezable
        mine = freezable.frozen_by_user if freezable is not None and job.may_follow_freezing else 0
        count: int = min(job.mesh.gather_objects(mine))
        if freezable is not None and job.may_follow_freezing and freezable.random_by_user:
            _hint_at_dropout(job, freezable, unit_costs)
        if not count:
            return None
        assert freezable is not None
        frozen = [name for name in freezable.frozen(count) if not pipeline.stack.table[name].requires_grad]
        names = frozenset.intersection(*map(frozenset, job.mesh.gather_objects(frozen)))
        job.trainer.add_callback(LayerFreezeCallback({"name": "schedule", "schedule": {0: count}}))
        return cls(job, count, names)

    def thaw(self) -> None:
        """Forget the layers, also in checkpoints: they are trained again."""
        log_on_main(
            logger, self.job.args, "Layers that were frozen are trained again: nothing counts as frozen any more."
        )
        states: Any = self.job.trainer.state.stateful_callbacks
        states.pop(LayerFreezeCallback.__name__, None)
        self.forget()

    def forget(self) -> None:
        """Remove the callback."""
        callback = self.job.freeze_callback
        if callback is not None:
            self.job.trainer.remove_callback(callback)


def _hint_at_dropout(job: TrainingJob, freezable: FreezableLayers, unit_costs: Sequence[UnitCost]) -> None:
    """Log a hint on dropout in layers that the user has frozen. A backward counts as two forwards."""
    first, last = freezable.frozen_by_user, freezable.frozen_by_user + freezable.random_by_user
    flops = [unit.forward_flops for unit in unit_costs]
    read = sum(flops[first : min(last, len(flops) - 1)])  # the last layer's output cannot be cached
    share = read / (sum(flops[:last]) + 3 * sum(flops[last:]) or 1.0)
    give_hint(job, freezable.described(first, last), share, of="the FLOPs of a step")


def attach_freezing(job: TrainingJob, freezable: FreezableLayers | None, users: UsersFreezing | None) -> int:
    """Pass the model's layers to the freeze callback. Returns the number of layers that a resumed job had frozen."""
    callback = job.freeze_callback
    if callback is None:
        return 0
    refuse_reentrant_checkpointing(job.args)
    assert freezable is not None
    state = job.trainer.state
    if users is not None:  # the user's flags decide, not the checkpoint
        states: Any = state.stateful_callbacks or {}  # from JSON: callback name -> its state
        memory = freezing_in(states, type(callback).__name__)
        if memory is not None:
            memory["num_frozen"] = min(memory["num_frozen"], users.count)
    callback.attach(freezable.num_layers, freezable.max_frozen, state, freezable.outside_alone)
    with_the_first = [k for k, names in enumerate(freezable.inside) if freezable.frozen(1) & set(names)]
    if len(with_the_first) > 1:
        log_once(
            logger,
            logging.WARNING,
            "Layers %s of %s share parameters with its first layer and are frozen together with it.",
            ", ".join(map(str, with_the_first[1:])),
            type(job.model).__name__,
        )
    return callback.num_frozen
