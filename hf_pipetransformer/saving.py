"""A Trainer whose checkpoints are whole or not there, and which resumes from the newest whole one.

_save_checkpoint      the stock method, into a folder of another name; then all agree, and rank 0 gives the name
  save_model, _save_optimizer_and_scheduler
                      a full disk is an error of all processes, after the last collective
train(True)           rank 0 chooses the newest whole checkpoint, and all take it
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, get_last_checkpoint

from .preparation import PipelinePreparation
from .resilience.checkpoints import (
    MANIFEST,
    SAVING,
    STATE,
    damage_of,
    forget_unfinished,
    newest_whole,
    publish,
    rotate,
)
from .resilience.progress import phase

logger = logging.getLogger(__name__)

LAST = "last"
"""In place of a checkpoint to resume from: the newest whole one, if there is one."""


class WholeCheckpoints(PipelinePreparation):
    """The part of [`PipeTransformerTrainer`] that writes and chooses checkpoints."""

    _is_checkpointing = False
    _saving: Path | None = None  # where checkpoints go until they are whole
    _save_error: Exception | None = None
    _to_push: str | None = None
    _is_collected = False  # all collectives of the checkpoint that is being written are over

    # ------------------------------------------------------------------------------------ writing
    def _get_output_dir(self, trial: Any) -> str:
        return str(self._saving) if self._saving is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Collective over all processes."""
        if self._is_stock:
            return super()._save_checkpoint(model, trial)
        self._is_checkpointing = True
        try:
            with phase("save"):
                self._save_whole(model, trial)
        finally:
            self._is_checkpointing, self._saving, self._save_error = False, None, None

    def _save_whole(self, model: nn.Module, trial: Any) -> None:
        folder = Path(super()._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        written, should_save = folder / SAVING / name, self.args.should_save
        if should_save:
            forget_unfinished(folder)
        self._processes.gather_objects(None)  # nobody writes into what is removed
        self._to_push, self._saving, self._is_collected = None, folder / SAVING, False
        try:
            super()._save_checkpoint(model, trial)
        except Exception as error:
            if not self._is_collected:  # the others wait in a collective, and not where all errors are told
                raise
            self._save_error = self._save_error or error
        self._saving = None
        self._find_best(folder, name)
        self._raise_anyones_error(folder, name)  # all files are there: those of the random states, too
        # a node with a disk of its own has only those, and nobody else gives them their name
        is_nodes_own = (
            not should_save
            and self.args.local_process_index == 0
            and written.is_dir()
            and not (written / STATE).exists()
        )
        self._processes.gather_objects(None)  # all have looked before it is renamed
        with phase("publish"), self._keeping_errors():
            if should_save:
                self.state.save_to_json(str(written / STATE))
                self._write_times(written)
                publish(written, folder / name)
                best = self.state.best_model_checkpoint
                rotate(folder, self.args.save_total_limit, folder / name, Path(best) if best else None)
                forget_unfinished(folder)
            elif is_nodes_own:
                shutil.rmtree(folder / name, ignore_errors=True)
                written.rename(folder / name)
            if self._to_push is not None:
                super()._push_from_checkpoint(str(folder / name))
        self._raise_anyones_error(folder, name)

    def _find_best(self, folder: Path, name: str) -> None:
        """As the stock method does, which looked for the best one beside this one's present place."""
        if not self.state.best_global_step or self.args.save_strategy == SaveStrategy.NO:
            return
        best = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if best == name or (folder / best).is_dir():
            self.state.best_model_checkpoint = str(folder / best)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._is_checkpointing:
            self._to_push = checkpoint_folder  # when it has its name: an upload goes on in the background
        else:
            super()._push_from_checkpoint(checkpoint_folder)

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        """Inside, while a checkpoint is written, an error waits until all processes can hear of it."""
        try:
            yield
        except Exception as error:
            if not self._is_checkpointing:
                raise
            self._save_error = self._save_error or error

    def _raise_anyones_error(self, folder: Path, name: str) -> None:
        """Collective over all processes."""
        error = self._save_error
        mine = None if error is None else f"{type(error).__name__}: {error}"
        failed = [f"rank {r}: {why}" for r, why in enumerate(self._processes.gather_objects(mine)) if why is not None]
        if not failed:
            return
        before = None
        if self.args.process_index == 0:
            forget_unfinished(folder)
            before, _ = newest_whole(folder)
        before = self._processes.gather_objects(before)[0]
        raise OSError(
            f"{name} could not be saved ({'; '.join(failed)}). "
            + (f"{before.name} is the newest whole checkpoint. " if before is not None else "")
            + f"See to it (is there room in {folder}?), and resume."
        ) from error

    # ------------------------------------------------------------------------------------ choosing
    def _checkpoint_to_resume(self, wanted: str | bool | None) -> str | bool | None:
        """The checkpoint that `train` is to go on with, the same on all processes. Collective over all processes.

        Args:
            wanted: its folder; True: the newest one that is whole; "last": likewise, or none if there is none, so
                that a job can be started again by the same command.

        Raises:
            ValueError: the one that was named is damaged, or all are.
        """
        if self._is_stock:
            folder = self.args.output_dir or "."
            if wanted == LAST:
                return get_last_checkpoint(folder) if Path(folder).is_dir() else None
            return wanted
        mine = None
        if self.args.process_index == 0 and wanted:
            mine = (wanted, *_choose(Path(self.args.output_dir or "."), wanted))
        choice = self._processes.gather_objects(mine)[0]  # the others may see another disk, or see it late
        if choice is None:
            return None
        wanted, chosen, problems = choice
        if chosen is None and problems:
            raise ValueError(
                f"resume_from_checkpoint={wanted!r}: {'; '.join(problems)}. Name another checkpoint, or train from the"
                f" beginning. (If you have changed its files yourself, remove {MANIFEST} from it.)"
            )
        if problems and self.args.process_index == 0:
            logger.warning("Resuming from %s: newer checkpoints are damaged (%s).", chosen, "; ".join(problems))
        if chosen is None and wanted == LAST:
            return None
        return wanted if chosen is None else chosen  # the stock Trainer says that there is none


def _choose(folder: Path, wanted: str | bool) -> tuple[str | None, list[str]]:
    """On one process: whatever goes wrong is for all of them to hear."""
    try:
        return _look_for(folder, wanted)
    except OSError as error:
        return None, [str(error)]


def _look_for(folder: Path, wanted: str | bool) -> tuple[str | None, list[str]]:
    if wanted is True or wanted == LAST:
        if not folder.is_dir():
            return None, []
        forget_unfinished(folder)  # which may give one its name back
        newest, problems = newest_whole(folder)
        return (None if newest is None else str(newest)), problems
    path = Path(str(wanted))
    damage = damage_of(path) if path.is_dir() else None  # the stock Trainer says that it is not there
    return (str(wanted), []) if damage is None else (None, [f"{path.name}: {damage}"])
