"""Atomic checkpoints: the stock files are written into another folder, which is renamed once they are complete.

    with CheckpointWrite(...) as write:
        Trainer._save_checkpoint        save_model, _save_optimizer_and_scheduler: weights gathered, written
                                        the last collective is over (`is_gathered`): errors can be deferred
    on leaving                          exchange errors, rename, remove older ones, upload

An error on one process, such as a full disk, is raised on all processes.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ..errors import in_one_line, is_users
from ..file_formats import KEPT
from ..model.elsewhere import computing_with_nan
from ..model.method_override import having
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..pipeline.weights import Weights
from ..progress import phase
from .checkpoint_folders import (
    MANIFEST,
    SAVING,
    STATE,
    give_name,
    latest_valid,
    publish,
    refuse_taken,
    remove_incomplete,
    rotate,
    saving_folder,
)
from .job import TrainingJob


class CheckpointWrite:
    """One checkpoint while it is written. Entering and leaving are collective over all processes.

    Args:
        job: the training job.
        folder: the parent folder of the new checkpoint.
        state: this package's state for a resumed job, besides the stock Trainer's, in plain values for JSON.

    Attributes:
        final: the checkpoint's folder.
        output_dir: the stock Trainer writes the checkpoint into this folder; None once it is written.
        is_gathered: whether the last collective for the checkpoint's files is over. Before, an error is raised where
            it occurs; afterwards it is deferred until all processes exchange errors.
        upload: the stock method that uploads a checkpoint, if it must be called once the checkpoint has its name.
    """

    def __init__(self, job: TrainingJob, folder: Path, state: dict[str, Any]) -> None:
        self.final = folder / f"{PREFIX_CHECKPOINT_DIR}-{job.trainer.state.global_step}"
        self.output_dir: Path | None = folder / SAVING
        self.is_gathered = False
        self.upload: Callable[[str], None] | None = None
        self._job, self._folder, self._state = job, folder, state
        self._error: Exception | None = None  # of this process
        self._is_published = False

    @contextmanager
    def keeping_errors(self) -> Iterator[None]:
        """Inside the context, an error is deferred until all processes exchange errors."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error

    def __enter__(self) -> CheckpointWrite:
        with self._job.mesh.failing_together():
            if self._job.args.should_save:
                remove_incomplete(self._folder)
                refuse_taken(self.final)
        with self.keeping_errors():  # after the removal, as the context above was collective
            saving_folder(self._folder).create()
        self._raise_anyones_error()
        self._fill_states()
        # the stock method would wait for all processes, and look for the best checkpoint in the temporary folder
        state = self._job.trainer.state
        self._best_step, state.best_global_step = state.best_global_step, None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._job.trainer.state.best_global_step = self._best_step
        if error is not None:
            # before, the other processes wait in a collective of the saving; errors are exchanged later
            if not (isinstance(error, Exception) and self.is_gathered):
                return False
            self._error = self._error or error
        self.output_dir = None
        self._find_best()
        self._raise_anyones_error()  # all files are written now, including the random states
        is_nodes_own = self._is_nodes_own()
        with phase("publish"), self.keeping_errors():
            if self._job.args.should_save:
                self._publish()
            elif is_nodes_own:
                give_name(self._folder / SAVING / self.final.name, self.final)
                saving_folder(self._folder).destroy()
            if self.upload is not None:
                self.upload(str(self.final))
        self._raise_anyones_error()
        return True

    # ------------------------------------------------------------------------------------ inside
    def _fill_states(self) -> None:
        """Add this package's state to the callbacks' states, and reset theirs.

        The stock method adds to the entries made when training began, and fails for callbacks that were added later.
        """
        trainer = self._job.trainer
        states: Any = trainer.state.stateful_callbacks
        everyone = (*trainer.callback_handler.callbacks, trainer.control)
        names = Counter(type(callback).__name__ for callback in everyone if isinstance(callback, ExportableState))
        states.update({name: [] if count > 1 else {} for name, count in names.items()})
        states[KEPT] = {"args": {}, "attributes": {"memory": self._state}}

    def _find_best(self) -> None:
        """Set `best_model_checkpoint` to a path in the final folder. Collective over all processes.

        All processes use the path that rank 0 sees, because they load the best model together at the end.
        """
        state = self._job.trainer.state
        if state.best_global_step and self._job.args.save_strategy != SaveStrategy.NO:
            best = self._folder / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            if best == self.final or best.is_dir():
                state.best_model_checkpoint = str(best)
        state.best_model_checkpoint = self._job.mesh.gather_objects(state.best_model_checkpoint)[0]

    def _is_nodes_own(self) -> bool:
        """Whether this process must rename its node's own folder: on a local disk, with only the random states in it.

        Collective over all processes: all of them must have checked before anything is renamed.
        """
        written = self._folder / SAVING / self.final.name
        places = [place / file for place in (written, self.final) for file in (STATE, MANIFEST)]
        has_own_folder = (
            not self._job.args.should_save
            and self._job.args.local_process_index == 0
            and written.is_dir()
            and not any(path.exists() for path in places)
        )
        # a shared file system may show files late, but its folder has the same inode on every node
        inodes = self._job.mesh.gather_objects(written.stat().st_ino if written.is_dir() else None)
        return has_own_folder and inodes[self._job.mesh.rank] not in (None, inodes[0])

    def _publish(self) -> None:
        written, state = self._folder / SAVING / self.final.name, self._job.trainer.state
        state.save_to_json(str(written / STATE))
        publish(written, self.final)
        self._is_published = True
        best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None
        rotate(self._folder, self._job.args.save_total_limit, self.final, best)
        remove_incomplete(self._folder)

    def _raise_anyones_error(self) -> None:
        """Raise an error on every process if one of them has failed. Collective over all processes.

        Raises:
            OSError: a process has failed. The message says whether the checkpoint is saved.
        """
        error = self._error
        is_main = self._job.args.should_save
        mine = None if error is None else (in_one_line(error), _remedy(error, self._folder, is_main))
        everyone = self._job.mesh.gather_objects(mine)
        failed = [f"rank {rank}: {theirs[0]}" for rank, theirs in enumerate(everyone) if theirs is not None]
        if not failed:
            return
        remedy = next(theirs[1] for theirs in everyone if theirs is not None)
        before = None
        if self._job.args.process_index == 0:
            remove_incomplete(self._folder)
            before, _ = latest_valid(self._folder)
        before, is_published = self._job.mesh.gather_objects((before, self._is_published))[0]
        outcome = "could not be saved"
        if is_published:
            outcome = "was saved, but older checkpoints could not be removed afterwards, or it could not be uploaded"
        raise OSError(
            f"{self.final.name} {outcome} ({'; '.join(failed)}). "
            + (f"{before.name} is the latest valid checkpoint. " if before is not None else "")
            + f"{remedy} and resume."
        ) from error


def _remedy(error: Exception, folder: Path, is_main: bool) -> str:
    if isinstance(error, FileNotFoundError) or (not is_main and isinstance(error, ValueError)):  # of missing weights
        return (
            "The main process alone makes the checkpoint's folder, and has all weights: let code of yours that writes"
            " the checkpoint (_save, save_model) ask self.args.should_save"
        )
    if isinstance(error, OSError):
        return f"Fix the cause (check the free disk space of {folder})"
    return "Fix the cause"


# ---------------------------------------------------------------------------------------------------------
# The weights in a checkpoint
# ---------------------------------------------------------------------------------------------------------


@contextmanager
def gathered_weights(job: TrainingJob, pipeline: ElasticPipeline, folder: Path) -> Iterator[None]:
    """Inside, rank 0 has all weights and buffers that `Trainer.save_model` writes. Collective over all processes.

    If it has all of the model, it may also call the model (model cards have examples): on the CPU as it is, and on an
    accelerator once its code has moved the model there (sentence-transformers' does). Other processes may not, and do
    not enter a library's `_save`: sentence-transformers' does not ask whether it is on the main process.

    Args:
        job: the training job.
        pipeline: the placed model.
        folder: where it is saved.
    """
    pipeline.synchronise_buffers()
    needed: frozenset[str] | None = None
    if hasattr(job.model, "peft_config"):
        needed = job.mesh.of_first(names_saved(job.trainer, job.model, pipeline.weights))
    runner, is_split = pipeline.stack.runner, pipeline.is_split
    is_served, runner.is_served = runner.is_served, False  # nobody waits for calls
    skips = not job.args.should_save and not is_users(job.trainer._save)
    entered: dict[str, Any] = {"_save": lambda *_, **__: None} if skips else {}
    try:
        with having(job.trainer, **entered), pipeline.weights.gathered(folder if pipeline.is_lazy else None, needed):
            if is_split and job.mesh.rank == 0 and needed is None:
                runner.restrict_to(None)
            yield
    finally:
        runner.is_served = is_served
        if is_split:
            runner.restrict_to(pipeline.current_layout.units_of(pipeline.stage_index))


def names_saved(trainer: Trainer, model: Any, weights: Weights) -> frozenset[str] | None:
    """Return the names of the parameters that `Trainer.save_model` writes here, or more of them. Not collective.

    A checkpoint of adapters then does not send a base model, which may be a thousand times as large, to rank 0.

    Args:
        trainer: the trainer that saves.
        model: its model.
        weights: the model's weights.

    Returns:
        The names; None if all may be written: the model has no adapters, or user code saves it, or the adapters' files
        hold something that is computed from weights, or that user code has given another name.
    """
    from peft import PeftModel, get_peft_model_state_dict

    # methods that user code has not replaced, on a class or on the object
    saving = ((trainer._save, Trainer._save), (getattr(model, "save_pretrained", None), PeftModel.save_pretrained))
    if not all(getattr(bound, "__func__", None) is stock for bound, stock in saving):
        return None
    with weights.listing_placeholders():
        state = model.state_dict()
    with warnings.catch_warnings(), computing_with_nan():  # PEFT asks modules that are saved as a whole for their keys
        warnings.simplefilter("ignore")
        written = {
            id(tensor)
            for adapter in model.peft_config
            for tensor in get_peft_model_state_dict(
                model,
                state_dict=dict(state),
                adapter_name=adapter,
                save_embedding_layers=True,  # which it may add
            ).values()
        }
    names = {alias: name for name, aliases in weights.table.aliases.items() for alias in aliases}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}  # which all processes have
    name_of = {id(tensor): names.get(key) for key, tensor in state.items() if key in names or key in buffers}
    if not name_of.keys() >= written:
        return None
    return frozenset(name for tensor in written if (name := name_of[tensor]) is not None)
