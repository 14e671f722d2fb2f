"""What a training does when SIGTERM has come: save, leave, and evaluate in the job that resumes.

training_step               all processes hear, with the loss, that one has been asked to stop
_maybe_log_save_evaluate    at the step's end: a checkpoint, and the process leaves with its own exit code
on_step_begin, in the next job
                            the evaluation for which there was no time
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, SaveStrategy

from ..resilience.preemption import EXIT_CODE, StopSignal
from ..resilience.watchdog import PROGRESS
from .job import TrainingJob

logger = logging.getLogger(__name__)


class Moment(Enum):
    """Where a training is."""

    BETWEEN_EPOCHS = "between epochs"
    WITHIN_EPOCH = "within an epoch"
    """A step of it has been begun, and its end has not come."""
    BEST_LOADED = "best loaded"
    """It is over, and the weights are those of an earlier step."""


class Preemption:
    """Lets all processes of one `train()` leave together, at the same step.

    Args:
        job: the training.
        ignored_keys: of the model's outputs, in evaluations (`ignore_keys_for_eval`).

    Attributes:
        signal: whether this process has been asked to stop.
        is_agreed: all processes know that one has been.
        moment: where the training is.
        owes_evaluation: one is due after the step that has been done, and was left out.
        last_saved: the latest checkpoint of this training.
    """

    def __init__(self, job: TrainingJob, ignored_keys: list[str] | None) -> None:
        self.signal = StopSignal()
        self.is_agreed = False
        self.moment = Moment.BETWEEN_EPOCHS
        self.owes_evaluation = False
        self.last_saved: Path | None = None
        self._job = job
        self._ignored_keys = ignored_keys

    # ------------------------------------------------------------------------------------ leaving
    def log_save_evaluate(self, stock: Callable[[], None]) -> None:
        """The stock `_maybe_log_save_evaluate`, or what comes in its place when this training must end."""
        PROGRESS.enter("log")
        control = self._job.trainer.control
        if not self.is_agreed:
            return stock()
        stops = control.should_training_stop or control.should_epoch_stop
        # an epoch's end comes at once, and callbacks see it
        waits = self._is_epochs_last_step or (self.moment is Moment.WITHIN_EPOCH and stops)
        self.owes_evaluation |= control.should_evaluate  # not before saving
        control.should_evaluate, control.should_save = False, not waits
        with _saving_all(self._job.args):
            stock()
        if not waits:
            self._leave()

    def leave_if_asked(self) -> None:
        """SIGTERM behind the last step: as at a step's end. Collective over all processes."""
        if self.is_agreed:
            return
        trainer = self._job.trainer
        name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        is_saved = self.last_saved is not None and self.last_saved.name == name and self.last_saved.is_dir()
        everyone = self._job.mesh.gather_objects((self.signal.is_asked, is_saved))
        self.is_agreed = any(is_asked for is_asked, _ in everyone)
        if not self.is_agreed:
            return
        _, is_saved = everyone[0]
        if not is_saved and self.moment is not Moment.BEST_LOADED:  # they belong to an earlier step's optimizer
            with _saving_all(self._job.args):
                trainer._save_checkpoint(self._job.model, None)
        self._leave()

    def _leave(self) -> NoReturn:
        # at once: what the loop does in the end might remove the checkpoint again
        trainer = self._job.trainer
        trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        if trainer.is_world_process_zero() and self.last_saved is not None:
            logger.warning(
                "SIGTERM: checkpoint-%s is saved, from which resume_from_checkpoint=True goes on. Exit code %d.",
                self.last_saved.name.rpartition("-")[2],
                EXIT_CODE,
            )
        raise SystemExit(EXIT_CODE)

    # ------------------------------------------------------------------------------------ the evaluation that is owed
    def evaluate_what_is_owed(self) -> None:
        """The evaluation for which SIGTERM, or another end, left no time. Collective over all processes.

        The checkpoint is written once more with its result, by which it may be the best.
        """
        if self.ask_for_what_is_owed():
            trainer = self._job.trainer
            loss: Any = trainer._tr_loss
            with _saving_all(self._job.args):  # as the checkpoint that it replaces
                trainer._maybe_log_save_evaluate(
                    loss, None, self._job.model, None, trainer.state.epoch, self._ignored_keys, 0.0
                )
            trainer.control.should_evaluate = trainer.control.should_save = False

    def ask_for_what_is_owed(self) -> bool:
        """Let the loop evaluate, and save, when it looks next; whether it is to."""
        trainer = self._job.trainer
        is_owed = self.owes_evaluation and trainer.eval_dataset is not None  # this job may have none any more
        self.owes_evaluation = False
        if is_owed:
            trainer.control.should_evaluate = True
            trainer.control.should_save = trainer.args.save_strategy != SaveStrategy.NO
        return is_owed

    @property
    def will_owe_evaluation(self) -> bool:
        """Whether a job that resumes from a checkpoint of this moment has an evaluation to make up for."""
        args, state = self._job.args, self._job.trainer.state
        comes_at_the_end = (
            args.eval_strategy == IntervalStrategy.EPOCH
            and self._is_epochs_last_step
            and args.eval_delay <= (state.epoch or 0.0)
        )
        return self.owes_evaluation or comes_at_the_end

    @property
    def _is_epochs_last_step(self) -> bool:
        """Whether the step that has been done was the last of its epoch, whose end has not come."""
        return self.moment is Moment.WITHIN_EPOCH and self._job.trainer.state.epoch % 1 == 0


@contextmanager
def _saving_all(args: TrainingArguments) -> Iterator[None]:
    """Inside, a checkpoint is one to resume from, also where otherwise the model is enough."""
    before = args.save_only_model
    args.save_only_model = False
    try:
        yield
    finally:
        args.save_only_model = before
