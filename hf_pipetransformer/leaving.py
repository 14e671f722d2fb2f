"""What a training does when SIGTERM has come: save, leave, and evaluate in the job that goes on.

training_step               all processes hear, with the loss, that one has been asked to stop
_maybe_log_save_evaluate    at the step's end: a checkpoint, and the process leaves with its own exit code
on_step_begin, in the next job
                            the evaluation for which there was no time
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from .resilience.preemption import EXIT_CODE, StopSignal
from .resilience.progress import PROGRESS
from .saving import WholeCheckpoints

logger = logging.getLogger(__name__)


class LeavesAtSigterm(WholeCheckpoints):
    """The part of [`PipeTransformerTrainer`] that lets all processes leave together, at the same step."""

    _stop_signal: StopSignal
    _is_preempted = False  # on all processes, or on none
    _has_loaded_best = False
    _ignore_keys_for_eval: list[str] | None = None

    def _maybe_log_save_evaluate(
        self, tr_loss: torch.Tensor, grad_norm: Any, model: nn.Module, trial: Any, *positional: Any, **keywords: Any
    ) -> None:
        PROGRESS.enter("log")
        control = self.control
        if not self._is_preempted:
            return super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *positional, **keywords)
        stops = control.should_training_stop or control.should_epoch_stop
        # an epoch's end comes at once, and callbacks see it
        waits = self._is_epochs_last_step or (self._is_within_epoch and stops)
        self._owes_evaluation |= control.should_evaluate  # not before saving
        control.should_evaluate, control.should_save = False, not waits
        with self._saving_all():
            super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *positional, **keywords)
        if not waits:
            self._leave()

    @contextmanager
    def _saving_all(self) -> Iterator[None]:
        """Inside, a checkpoint is one to go on from, also where otherwise the model is enough."""
        args, before = self.args, self.args.save_only_model
        args.save_only_model = False
        try:
            yield
        finally:
            args.save_only_model = before

    def _leave(self) -> NoReturn:
        # at once: what the loop does in the end might remove the checkpoint again
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        if self.is_world_process_zero() and self._last_saved is not None:
            logger.warning(
                "SIGTERM: checkpoint-%s is saved, from which resume_from_checkpoint=True goes on. Exit code %d.",
                self._last_saved.name.rpartition("-")[2],
                EXIT_CODE,
            )
        raise SystemExit(EXIT_CODE)

    def _leave_if_asked(self) -> None:
        """SIGTERM behind the last step: as at a step's end. Collective over all processes."""
        if self._is_stock or self._is_preempted:
            return
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        is_saved = self._last_saved is not None and self._last_saved.name == name and self._last_saved.is_dir()
        everyone = self._processes.gather_objects((self._stop_signal.is_asked, is_saved))
        self._is_preempted = any(is_asked for is_asked, _ in everyone)
        if not self._is_preempted:
            return
        _, is_saved = everyone[0]
        if not is_saved and not self._has_loaded_best:  # the best weights belong to an earlier step's optimizer
            with self._saving_all():
                self._save_checkpoint(self.model, None)
        self._leave()

    def _evaluate_what_is_owed(self) -> None:
        """The evaluation for which SIGTERM, or another end, left no time. Collective over all processes.

        The checkpoint is written once more with its result, by which it may be the best.
        """
        if self._ask_for_what_is_owed():
            epoch, ignored = self.state.epoch, self._ignore_keys_for_eval
            with self._saving_all():  # as the checkpoint that it replaces
                self._maybe_log_save_evaluate(self._tr_loss, None, self.model, None, epoch, ignored, 0.0)
            self.control.should_evaluate = self.control.should_save = False

    def _ask_for_what_is_owed(self) -> bool:
        is_owed = self._owes_evaluation and self.eval_dataset is not None  # this job may have none any more
        self._owes_evaluation = False
        if is_owed:
            self.control.should_evaluate = True
            self.control.should_save = self.args.save_strategy != SaveStrategy.NO
        return is_owed
