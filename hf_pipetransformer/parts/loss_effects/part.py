"""Copies the effects of the user's loss and `log` on the trainer from the last stage to the other stages.

step     last stage     compute_loss: self.rate = 0.1 ─┐ votes that the trainer has changed
         other stages   serve the loss                 └ adopt the value, before the step's callbacks
                        np.random.beta()     ─┐ votes that a random generator has moved
         other stages                         └ adopt its state: callbacks on all stages draw the same numbers
         last stage     compute_loss: self.optimizer.state.clear(): refused, as the others have their own state
log      last stages    run the user's method, and all processes log its result (`users_log`)
hooks    inside layers  refused if they keep outputs, which the loss may read (`observers`)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from ...model.micro_batch import Batch
from ...planning.layout import Layout
from ...randomness import global_states, set_global_states
from ...run.parts import LayoutChange, RunPart, StepFacts
from ...run.run import PipelineRun
from ...run.setup.placing import Findings
from ...run.setup.probing import SampleCollator, found_by_each
from .effects import Changes, Snapshot, restore, share
from .marks import Marks, tables_of_optimizer
from .observers import observing_hook
from .users_log import take_over


class LossEffects(RunPart):
    """Compares the trainer before and after each step, if a loss of the user's runs on the last stage.

    Args:
        run: the run of the training.
    """

    num_votes = 3  # that the trainer, the optimizer's state and random generators have changed

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._has_own_loss = False
        self._before: Snapshot | None = None  # of the trainer, in a step over several stages
        self._changes: Changes | None = None  # in this step, on the last stage
        self._drawn: dict[str, list[Any]] | None = None  # states of the generators before the step, on the last stage
        self._state: Marks | None = None  # the optimizer's, before this step
        self._known: dict[str, Any] = {}  # modules that the other stages cannot read any more, by name

    def found(self, found: Findings) -> None:
        self._has_own_loss = not found.loss.is_stock
        if self._has_own_loss:
            self._refuse_observers(found)

    def _refuse_observers(self, found: Findings) -> None:
        """Refuse forward hooks inside of layers that keep outputs. Collective over all processes.

        Raises:
            ValueError: there is one. Every process raises it.
        """
        job, data, stack = self._run.job, self._run.training_batches, found.cut.pipeline.stack
        if not stack.runner.takes_batch:
            return  # the loss's own inputs are not known

        def sample() -> Batch:
            return SampleCollator(job, data.collate_fn, data.is_shared)(data.sample_rows(2))

        hooks = found_by_each(job.mesh, True, lambda: observing_hook(job.trainer, stack, sample))
        if (hook := next(filter(None, hooks), None)) is not None:
            raise ValueError(
                f"pipeline_parallel_size={job.args.pipeline_parallel_size}: the forward hook {hook[0]} on {hook[1]!r},"
                " a module inside of a layer, returns nothing, so it may keep the output for your loss. It runs on the"
                " process of this layer, and the loss on the last stage would miss the value. Return the value in the"
                " model's output, remove the hook, or set pipeline_parallel_size=1."
            )

    def placed(self, layout: Layout) -> None:
        take_over(self._run.job, self._run.pipeline)
        self._restore()

    def layout_changed(self, change: LayoutChange) -> None:
        self._restore()

    def _restore(self) -> None:
        """Restore the trainer's own attributes if the loss runs on this process from now on."""
        pipeline = self._run.pipeline
        self._known.clear()
        if self._has_own_loss and pipeline.num_stages > 1 and pipeline.computes_loss:
            restore(self._run.job.trainer)

    def around_step(self, batch: Batch) -> AbstractContextManager[Any]:
        pipeline, job = self._run.pipeline, self._run.job
        is_needed = self._has_own_loss and pipeline.num_stages > 1
        self._before = Snapshot(job.trainer) if is_needed else None
        has_loss = is_needed and pipeline.computes_loss
        self._state = Marks(tables_of_optimizer(job.trainer.optimizer)) if has_loss else None
        self._drawn = global_states() if has_loss and job.users_callbacks else None
        return nullcontext()

    def vote(self, facts: StepFacts) -> tuple[bool, ...]:
        self._changes, trainer = None, self._run.job.trainer
        if self._before is None or self._state is None:
            return False, False, False
        changes, mine = self._before.changes(trainer), vars(trainer)
        others = {name: mine[name] for name in changes.others if mine[name] is not self._known.get(name)}
        self._changes = replace(changes, others=tuple(others))
        self._known |= {name: value for name, value in others.items() if isinstance(value, nn.Module)}
        has_changed_state = not self._state.are_those_of(tables_of_optimizer(trainer.optimizer))
        has_drawn = self._drawn is not None and self._drawn != global_states()
        return bool(self._changes), has_changed_state, has_drawn

    def heard(self, votes: tuple[bool, ...]) -> None:
        """Adopt the last stage's changes. Collective over all processes if one of them has voted.

        Raises:
            ValueError: the loss has changed the optimizer's state. Every process raises it.
        """
        job, pipeline, (has_changed, has_changed_state, has_drawn) = self._run.job, self._run.pipeline, votes
        if has_changed_state:
            raise ValueError(
                "The loss has changed the state of trainer.optimizer. It runs on the last pipeline stage only, and"
                " each stage has the state of its own parameters. Change it in a callback, for example in on_step_end,"
                " which runs on all processes, or set pipeline_parallel_size=1."
            )
        if has_changed and self._before is not None:
            share(job.trainer, job.mesh, pipeline.replica_index, self._changes, self._before)
        if has_drawn:
            mine = (pipeline.replica_index, global_states()) if pipeline.computes_loss else None
            everyone = filter(None, job.mesh.gather_objects(mine))
            set_global_states(dict(everyone)[pipeline.replica_index])


def make(run: PipelineRun) -> LossEffects:
    """Return the part of a run."""
    return LossEffects(run)
