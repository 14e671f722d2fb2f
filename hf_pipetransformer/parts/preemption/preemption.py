"""Preemption: on SIGTERM, training saves a checkpoint and exits; the job that resumes runs a skipped evaluation.

training_step               reduces the stop request over all processes, together with the loss
_maybe_log_save_evaluate    at the end of the step: saves a checkpoint, and exits with `EXIT_CODE`
on_step_begin, in the next job
                            runs the evaluation that was skipped
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, SaveStrategy

from ...run.parts import RunPart, StepFacts
from ...run.run import PipelineRun
from .stop_signal import EXIT_CODE, StopSignal

logger = logging.getLogger(__name__)


class Preemption(RunPart):
    """Stops all processes of one `train()` at the same step.

    Args:
        run: the run of the training.

    Attributes:
        signal: records whether this process has received SIGTERM.
        is_agreed: whether all processes know that one of them has received it.
        has_loaded_best: whether training is over and the best checkpoint's weights are loaded.
        owes_evaluation: whether an evaluation was due after the last step and was skipped.
    """

    num_votes = 1

    def __init__(self, run: PipelineRun) -> None:
        self.signal = StopSignal()
        self.is_agreed = self.has_loaded_best = self.owes_evaluation = False
        self._run, self._job = run, run.job

    # ------------------------------------------------------------------------------------ as a part
    def around_train(self) -> AbstractContextManager[Any]:
        return self.signal

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        self.owes_evaluation = bool(kept.get("owes_evaluation"))

    def state_dict(self) -> dict[str, Any]:
        return {"owes_evaluation": self.will_owe_evaluation}

    def vote(self, facts: StepFacts) -> tuple[bool, ...]:
        return (self.signal.is_asked,)

    def heard(self, votes: tuple[bool, ...]) -> None:
        (self.is_agreed,) = votes

    def wrap_step_end(self, stock: Callable[[], None]) -> Callable[[], None]:
        return partial(self.stop_after, stock) if self.is_agreed else stock

    def train_begins(self) -> None:
        state = self._job.trainer.state
        if state.global_step >= state.max_steps and state.epoch % 1 == 0:  # resumed after the last epoch
            self.evaluate_what_is_owed()

    def step_begins(self, is_first: bool) -> None:
        if is_first:
            self.evaluate_what_is_owed()  # the random states equal the checkpoint's at this point

    def nothing_left(self) -> None:
        self.ask_for_what_is_owed()  # at the epoch's end

    def before_best(self) -> None:
        self.leave_if_asked()  # later steps may remove the checkpoint of the last weights
        self.has_loaded_best = True

    def train_ends(self) -> None:
        self.leave_if_asked()

    # ------------------------------------------------------------------------------------ leaving
    def stop_after(self, stock: Callable[[], None]) -> None:
        """After a stop request, call the stock `_maybe_log_save_evaluate` to save a checkpoint, and exit.

        At the last step of an epoch, or if the loop ends here anyway, saving and exiting wait for the epoch's end.
        """
        control = self._job.trainer.control
        stops = control.should_training_stop or control.should_epoch_stop
        # the epoch ends right after this call, and callbacks must see its end
        waits = self._is_epochs_last_step or (self._run.is_within_epoch and stops)
        self.owes_evaluation |= control.should_evaluate  # there is no time to evaluate before saving
        control.should_evaluate, control.should_save = False, not waits
        with _saving_all(self._job.args):
            stock()
        if not waits:
            self._leave()

    def leave_if_asked(self) -> None:
        """Save and exit if SIGTERM was received after the last step. Collective over all processes."""
        if self.is_agreed:
            return
        trainer = self._job.trainer
        name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        is_saved = (
            self._run.last_saved is not None and self._run.last_saved.name == name and self._run.last_saved.is_dir()
        )
        everyone = self._job.mesh.gather_objects((self.signal.is_asked, is_saved))
        self.is_agreed = any(is_asked for is_asked, _ in everyone)
        if not self.is_agreed:
            return
        _, is_saved = everyone[0]
        if not (is_saved or self.has_loaded_best):
            with _saving_all(self._job.args):
                trainer._save_checkpoint(self._job.model, None)
        self._leave()

    def _leave(self) -> NoReturn:
        # exit immediately: the end of the loop might remove the checkpoint
        trainer = self._job.trainer
        trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        if trainer.is_world_process_zero() and self._run.last_saved is not None:
            logger.warning(
                "Received SIGTERM and saved checkpoint-%s. Resume with resume_from_checkpoint=True. Exit code %d.",
                self._run.last_saved.name.rpartition("-")[2],
                EXIT_CODE,
            )
        raise SystemExit(EXIT_CODE)

    # ------------------------------------------------------------------------------------ the skipped evaluation
    def evaluate_what_is_owed(self) -> None:
        """Run the evaluation that was skipped because of SIGTERM or another stop. Collective over all processes.

        The checkpoint is then written again with the result, and may become the best one.
        """
        if self.ask_for_what_is_owed():
            trainer = self._job.trainer
            loss: Any = trainer._tr_loss
            with _saving_all(self._job.args):  # as for the checkpoint that this one replaces
                trainer._maybe_log_save_evaluate(
                    loss, None, self._job.model, None, trainer.state.epoch, self._run.ignored_keys, 0.0
                )
            trainer.control.should_evaluate = trainer.control.should_save = False

    def ask_for_what_is_owed(self) -> bool:
        """Request a skipped evaluation, and a save, from the loop. Returns True if an evaluation was skipped."""
        trainer = self._job.trainer
        is_owed = self.owes_evaluation and trainer.eval_dataset is not None  # this job may have no eval_dataset
        self.owes_evaluation = False
        if is_owed:
            trainer.control.should_evaluate = True
            trainer.control.should_save = trainer.args.save_strategy != SaveStrategy.NO
        return is_owed

    @property
    def will_owe_evaluation(self) -> bool:
        """Whether a job that resumes from a checkpoint written now has to run a skipped evaluation."""
        args, state = self._job.args, self._job.trainer.state
        comes_at_the_end = (
            args.eval_strategy == IntervalStrategy.EPOCH
            and self._is_epochs_last_step
            and args.eval_delay <= (state.epoch or 0.0)
        )
        return self.owes_evaluation or comes_at_the_end

    @property
    def _is_epochs_last_step(self) -> bool:
        """Whether the last step was the last one of its epoch, and the epoch's end has not been handled yet."""
        return self._run.is_within_epoch and self._job.trainer.state.epoch % 1 == 0


@contextmanager
def _saving_all(args: TrainingArguments) -> Iterator[None]:
    """Inside the context, checkpoints include everything needed to resume, even with `save_only_model`."""
    before = args.save_only_model
    args.save_only_model = False
    try:
        yield
    finally:
        args.save_only_model = before
