"""Checkpoints that are written atomically: the stock files, under another name until all of them are there.

    with CheckpointWrite(...) as write:        GATHERING
        Trainer._save_checkpoint                 save_model, _save_optimizer_and_scheduler: weights gathered, written
                                               GATHERED    the last collective is over: an error can wait
    on leaving                                 PUBLISHING  errors agreed upon, name given, older ones removed, uploaded
                                               PUBLISHED

An error on one process, a full disk for one, is an error of all of them.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ..resilience.checkpoints import MANIFEST, SAVING, STATE, latest_valid, publish, remove_incomplete, rotate
from ..resilience.watchdog import phase
from .job import TrainingJob


class PipelineState(TrainerCallback, ExportableState):
    """In a checkpoint's `trainer_state.json`: what a job that resumes needs besides the stock Trainer's state.

    A callback, so that the stock Trainer writes it; its name there is `checkpoints.KEPT`.
    """

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """For the Trainer's checkpoint."""
        return {"args": {}, "attributes": {"memory": self.memory}}


class WritePhase(IntEnum):
    """How far a checkpoint has come."""

    GATHERING = 0
    """Collectives are under way: an error must be raised where it happens."""
    GATHERED = 1
    """They are over: an error waits until all processes can hear of it."""
    PUBLISHING = 2
    """All files are there, under another name."""
    PUBLISHED = 3
    """It has its name."""


class CheckpointWrite:
    """One checkpoint while it is written. Entering and leaving are collective over all processes.

    Args:
        job: the training.
        folder: that gets the checkpoint.
        memory: what it keeps besides the stock Trainer's state, in plain values for JSON; collective.
        add_files: writes more files into a folder, on rank 0.
    """

    def __init__(
        self,
        job: TrainingJob,
        folder: Path,
        memory: Callable[[], dict[str, Any]],
        add_files: Callable[[Path], None],
    ) -> None:
        self.phase = WritePhase.GATHERING
        self.final = folder / f"{PREFIX_CHECKPOINT_DIR}-{job.trainer.state.global_step}"
        self._job, self._folder = job, folder
        self._memory, self._add_files = memory, add_files
        self._error: Exception | None = None  # of this process
        self._uploads = False

    @property
    def output_dir(self) -> Path | None:
        """Where the stock Trainer is to write it; None once it is written."""
        return self._folder / SAVING if self.phase < WritePhase.PUBLISHING else None

    def gathered(self) -> None:
        """The last collective of this checkpoint's files is over."""
        self.phase = max(self.phase, WritePhase.GATHERED)

    def upload_later(self) -> None:
        """Once it has its name: an upload goes on in the background."""
        self._uploads = True

    @contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """Inside, an error waits until all processes can hear of it."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def __enter__(self) -> CheckpointWrite:
        if self._job.args.should_save:
            remove_incomplete(self._folder)
        memory = self._memory()  # behind it nobody writes into what is removed
        callbacks = self._job.trainer.callback_handler.callbacks
        # looked up each time: resuming may replace callback objects
        next(c for c in callbacks if isinstance(c, PipelineState)).memory = memory
        self._expect_callbacks()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is not None:
            # elsewhere the others wait in a collective, and not where all errors are told
            if not isinstance(error, Exception) or self.phase is WritePhase.GATHERING:
                return False
            self._error = self._error or error
        self.phase = WritePhase.PUBLISHING
        self._find_best()
        self._raise_anyones_error()  # all files are there: those of the random states, too
        is_nodes_own = self._is_nodes_own()
        with phase("publish"), self.keeping_errors():
            self._publish(is_nodes_own)
        self._raise_anyones_error()
        return True

    # ------------------------------------------------------------------------------------ inside
    def _expect_callbacks(self) -> None:
        """The stock method adds to what was there when the training began, and fails at callbacks that came later."""
        trainer = self._job.trainer
        states: Any = trainer.state.stateful_callbacks
        everyone = (*trainer.callback_handler.callbacks, trainer.control)
        exported = [c for c in everyone if isinstance(c, ExportableState)]
        for name, count in Counter(type(callback).__name__ for callback in exported).items():
            states[name] = [] if count > 1 else {}

    def _find_best(self) -> None:
        """As the stock method does, which looked for the best one beside this one's present place.

        Collective over all processes: they load it together in the end, so what rank 0 sees counts.
        """
        state = self._job.trainer.state
        if state.best_global_step and self._job.args.save_strategy != SaveStrategy.NO:
            best = self._folder / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            if best == self.final or best.is_dir():
                state.best_model_checkpoint = str(best)
        state.best_model_checkpoint = self._job.mesh.gather_objects(state.best_model_checkpoint)[0]

    def _is_nodes_own(self) -> bool:
        """Whether this process gives a name to what its node has on a disk of its own: the random states, no more.

        Collective over all processes: all have looked before anything is renamed.
        """
        written = self._folder / SAVING / self.final.name
        places = [place / file for place in (written, self.final) for file in (STATE, MANIFEST)]
        is_apart = (
            not self._job.args.should_save
            and self._job.args.local_process_index == 0
            and written.is_dir()
            and not any(path.exists() for path in places)
        )
        # a shared file system may show files late, but in the same folder
        inodes = self._job.mesh.gather_objects(_inode(written))
        return is_apart and inodes[self._job.mesh.rank] not in (None, inodes[0])

    def _publish(self, is_nodes_own: bool) -> None:
        written, state = self._folder / SAVING / self.final.name, self._job.trainer.state
        if self._job.args.should_save:
            state.save_to_json(str(written / STATE))
            self._add_files(written)
            publish(written, self.final)
            self.phase = WritePhase.PUBLISHED
            best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None
            rotate(self._folder, self._job.args.save_total_limit, self.final, best)
            remove_incomplete(self._folder)
        elif is_nodes_own:
            shutil.rmtree(self.final, ignore_errors=True)
            written.rename(self.final)
        if self._uploads:
            Trainer._push_from_checkpoint(self._job.trainer, str(self.final))

    def _raise_anyones_error(self) -> None:
        """Collective over all processes."""
        mine = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
        everyone = self._job.mesh.gather_objects(mine)
        failed = [f"rank {rank}: {why}" for rank, why in enumerate(everyone) if why is not None]
        if not failed:
            return
        before = None
        if self._job.args.process_index == 0:
            remove_incomplete(self._folder)
            before, _ = latest_valid(self._folder)
        before, reached = self._job.mesh.gather_objects((before, self.phase))[0]
        if reached is WritePhase.PUBLISHED:
            raise OSError(
                f"{self.final.name} is saved, but then older checkpoints could not be removed, or it could not be"
                f" uploaded ({'; '.join(failed)}). See to it, and resume."
            ) from self._error
        raise OSError(
            f"{self.final.name} could not be saved ({'; '.join(failed)}). "
            + (f"{before.name} is the newest whole checkpoint. " if before is not None else "")
            + f"See to it (is there room in {self._folder}?), and resume."
        ) from self._error


def _inode(path: Path) -> int | None:
    with suppress(OSError):
        return path.stat().st_ino
    return None
