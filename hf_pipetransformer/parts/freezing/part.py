"""Freezing as a part of a training: by a policy's decisions, or by the user, from the lowest layer up."""

from __future__ import annotations

from dataclasses import replace

from ...planning.layout import Layout
from ...run.parts import Ending, RunPart, Wish
from ...run.run import PipelineRun
from ...run.setup.placing import Findings
from .callback import LayerFreezeCallback
from .policies import agreed_num_frozen
from .users_freezing import UsersFreezing, attach_freezing


class Freezing(RunPart):
    """Passes the freeze callback's proposals to the run.

    Args:
        run: the run of the training.
    """

    def __init__(self, run: PipelineRun) -> None:
        self._run, self._job = run, run.job
        self._users: UsersFreezing | None = None
        self._callback: LayerFreezeCallback | None = None
        self._proposal: int | None = None

    @property
    def may_thaw(self) -> bool:  # type: ignore[override]
        return self._users is not None

    def found(self, found: Findings) -> None:
        job, pipeline = self._job, found.cut.pipeline
        if job.freeze_callback is None and self._run.may_cache:
            self._users = UsersFreezing.find(job, pipeline, found.cut.unit_costs)
        pipeline.stack.runner.keep_modes_of_frozen(self._users is not None and not job.args.eval_frozen_modules)
        self.most_frozen = self._users.count if self._users is not None else None
        self.num_frozen = attach_freezing(job, pipeline.freezable, self._users)
        self._callback = job.freeze_callback

    def describe(self) -> str | None:
        callback = self._job.freeze_callback
        return callback.describe(self._job.trainer.state) if callback is not None else None

    # ------------------------------------------------------------------------------------ between two steps
    def between_steps(self) -> None:
        if self._users is not None:
            self._run.follow_flags()  # the user may unfreeze layers at any time

    def flags_followed(self, has_thawed: bool) -> None:
        users, weights = self._users, self._run.pipeline.weights
        if users is None or not (has_thawed or any(map(weights.is_trainable, users.names))):
            return
        users.thaw()
        self._users = self._callback = None
        self._run.thaw()

    def wish(self, wish: Wish) -> Wish:
        self._proposal = self._callback.take_proposal() if self._callback is not None else None
        if self._proposal is None:
            return wish
        agreed = agreed_num_frozen(self._job.mesh.gather_objects(self._proposal))
        return replace(wish, num_frozen=max(wish.num_frozen, agreed))

    def granted(self, layout: Layout) -> None:
        if self._proposal is not None and self._callback is not None:
            self._callback.confirm(layout.num_frozen_layers)

    # ------------------------------------------------------------------------------------ steps
    def before_update(self, scale: float) -> None:
        if self._callback is not None and self._callback.wants_gradient_norms:
            pipeline = self._run.pipeline
            assert pipeline.freezable is not None
            self._callback.observe(pipeline.running.gradients.squared_norms(pipeline.freezable.inside, scale))

    def close(self, ending: Ending) -> None:
        if self._users is not None:
            self._users.forget()


def make(run: PipelineRun) -> Freezing:
    return Freezing(run)
