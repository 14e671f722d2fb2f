"""Atomic checkpoints: the stock files are written into another folder, which is renamed once they are complete.

    with CheckpointWrite(...) as write:        GATHERING
        Trainer._save_checkpoint                 save_model, _save_optimizer_and_scheduler: weights gathered, written
                                               GATHERED    the last collective is over: errors can be deferred
    on leaving                                 PUBLISHING  exchange errors, rename, remove older ones, upload
                                               PUBLISHED

An error on one process, such as a full disk, is raised on all processes.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy
from transformers.utils import is_peft_available

from ..model.elsewhere import computing_with_nan
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..pipeline.state import WeightState
from ..resilience.checkpoint_folders import (
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
from ..resilience.watchdog import phase
from .job import TrainingJob


class PipelineState(TrainerCallback, ExportableState):
    """State in a checkpoint's `trainer_state.json` that a resumed job needs besides the stock Trainer's state.

    It is a callback so that the stock Trainer saves it, under the name `file_formats.KEPT`.

    Attributes:
        memory: the state, in plain values for JSON.
        on_export: called when the stock Trainer asks for the state to save it; its last collective is over then.
    """

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}
        self.on_export: Callable[[], None] | None = None

    def state(self) -> dict[str, Any]:
        """State for the Trainer's checkpoint."""
        if self.on_export is not None:
            self.on_export()
        return {"args": {}, "attributes": {"memory": self.memory}}


@contextmanager
def exporting_state(trainer: Trainer) -> Iterator[None]:
    """Inside the context, a `PipelineState` is among the trainer's callbacks. It may be nested.

    Outside of it, the list of callbacks is the user's.
    """
    handler = trainer.callback_handler
    if any(isinstance(callback, PipelineState) for callback in handler.callbacks):
        yield
        return
    handler.callbacks.insert(0, PipelineState())
    try:
        yield
    finally:  # by its type: resuming may replace the object
        handler.callbacks[:] = [c for c in handler.callbacks if not isinstance(c, PipelineState)]


class WritePhase(IntEnum):
    """Progress in writing a checkpoint."""

    GATHERING = 0
    """Collectives are running, so an error is raised where it occurs."""
    GATHERED = 1
    """All collectives are over; an error is deferred until all processes exchange errors."""
    PUBLISHING = 2
    """All files are complete, in a temporary folder."""
    PUBLISHED = 3
    """The checkpoint has its final name."""


class CheckpointWrite:
    """One checkpoint while it is written. Entering and leaving are collective over all processes.

    Inside `exporting_state` only.

    Args:
        job: the training job.
        folder: the folder in which the checkpoint is created.
        memory: returns the state to store besides the stock Trainer's, in plain values for JSON. Collective over all
            processes.
        upload: the stock method that uploads a checkpoint, called with its folder.
    """

    def __init__(
        self,
        job: TrainingJob,
        folder: Path,
        memory: Callable[[], dict[str, Any]],
        upload: Callable[[str], None],
    ) -> None:
        self.phase = WritePhase.GATHERING
        self.final = folder / f"{PREFIX_CHECKPOINT_DIR}-{job.trainer.state.global_step}"
        self._job, self._folder = job, folder
        self._memory, self._upload = memory, upload
        self._error: Exception | None = None  # of this process
        self._uploads = False

    @property
    def output_dir(self) -> Path | None:
        """The folder in which the stock Trainer writes the checkpoint; None once it is written."""
        return self._folder / SAVING if self.phase < WritePhase.PUBLISHING else None

    def gathered(self) -> None:
        """Record that the last collective for this checkpoint's files is over."""
        self.phase = max(self.phase, WritePhase.GATHERED)

    def upload_later(self) -> None:
        """Request an upload, to be started in the background once the checkpoint has its final name."""
        self._uploads = True

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
        memory = self._memory()
        self._state.memory, self._state.on_export = memory, self.gathered
        self._expect_callbacks()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is not None:
            # during GATHERING the other processes wait in another collective than the one that exchanges errors
            if not isinstance(error, Exception) or self.phase is WritePhase.GATHERING:
                return False
            self._error = self._error or error
        self.phase, self._state.on_export = WritePhase.PUBLISHING, None
        self._find_best()
        self._raise_anyones_error()  # all files are written now, including the random states
        is_nodes_own = self._is_nodes_own()
        with phase("publish"), self.keeping_errors():
            self._publish(is_nodes_own)
        self._raise_anyones_error()
        return True

    # ------------------------------------------------------------------------------------ inside
    @property
    def _state(self) -> PipelineState:
        # looked up each time: resuming may replace callback objects
        callbacks = self._job.trainer.callback_handler.callbacks
        return next(callback for callback in callbacks if isinstance(callback, PipelineState))

    def _expect_callbacks(self) -> None:
        """Reset the entries of all stateful callbacks.

        The stock method adds to the entries made when training began, and fails for callbacks that were added later.
        """
        trainer = self._job.trainer
        states: Any = trainer.state.stateful_callbacks
        everyone = (*trainer.callback_handler.callbacks, trainer.control)
        exported = [c for c in everyone if isinstance(c, ExportableState)]
        for name, count in Counter(type(callback).__name__ for callback in exported).items():
            states[name] = [] if count > 1 else {}

    def _find_best(self) -> None:
        """Set `best_model_checkpoint` to a path in the final folder; the stock method looked in the temporary one.

        Collective over all processes. All processes use the path that rank 0 sees, because they load the best model
        together at the end.
        """
        state = self._job.trainer.state
        if state.best_global_step and self._job.args.save_strategy != SaveStrategy.NO:
            best = self._folder / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            if best == self.final or best.is_dir():
                state.best_model_checkpoint = str(best)
        state.best_model_checkpoint = self._job.mesh.gather_objects(state.best_model_checkpoint)[0]

    def _is_nodes_own(self) -> bool:
        """Whether this process must rename its node's own folder: on a local disk, with only the random states in it.

        Collective over all processes, so that all of them have checked before anything is renamed.
        """
        written = self._folder / SAVING / self.final.name
        places = [place / file for place in (written, self.final) for file in (STATE, MANIFEST)]
        is_apart = (
            not self._job.args.should_save
            and self._job.args.local_process_index == 0
            and written.is_dir()
            and not any(path.exists() for path in places)
        )
        # a shared file system may show files late, but its folder has the same inode on every node
        inodes = self._job.mesh.gather_objects(_inode(written))
        return is_apart and inodes[self._job.mesh.rank] not in (None, inodes[0])

    def _publish(self, is_nodes_own: bool) -> None:
        written, state = self._folder / SAVING / self.final.name, self._job.trainer.state
        if self._job.args.should_save:
            state.save_to_json(str(written / STATE))
            publish(written, self.final)
            self.phase = WritePhase.PUBLISHED
            best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None
            rotate(self._folder, self._job.args.save_total_limit, self.final, best)
            remove_incomplete(self._folder)
        elif is_nodes_own:
            give_name(written, self.final)
            saving_folder(self._folder).destroy()
        if self._uploads:
            self._upload(str(self.final))

    def _raise_anyones_error(self) -> None:
        """Raise an error on every process if one of them has failed. Collective over all processes.

        Raises:
            OSError: a process has failed. The message says whether the checkpoint is saved.
        """
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
                f"{self.final.name} was saved, but older checkpoints could not be removed afterwards, or it could"
                f" not be uploaded ({'; '.join(failed)}). Fix the cause and resume from it."
            ) from self._error
        raise OSError(
            f"{self.final.name} could not be saved ({'; '.join(failed)}). "
            + (f"{before.name} is the latest valid checkpoint. " if before is not None else "")
            + f"Fix the cause (check the free disk space of {self._folder}) and resume."
        ) from self._error


def _inode(path: Path) -> int | None:
    with suppress(OSError):
        return path.stat().st_ino
    return None


# ---------------------------------------------------------------------------------------------------------
# The weights in a checkpoint
# ---------------------------------------------------------------------------------------------------------


@contextmanager
def gathered_weights(job: TrainingJob, pipeline: ElasticPipeline, folder: Path) -> Iterator[None]:
    """Inside, rank 0 has all weights and buffers that `Trainer.save_model` writes. Collective over all processes.

    Args:
        job: the training job.
        pipeline: the placed model.
        folder: where it is saved.
    """
    pipeline.synchronise_buffers()
    needed: frozenset[str] | None = None
    reading: AbstractContextManager[Any] = nullcontext()
    if hasattr(job.model, "peft_config"):
        mine = names_saved(job.trainer, job.model, pipeline.weights) if is_peft_available() else None
        needed = job.mesh.of_first(mine)
        # PEFT's own way of saving asks modules for their keys; others must not read what is not here
        reading = computing_with_nan()
    with pipeline.weights.gathered(folder if pipeline.is_lazy else None, needed), reading:
        yield


def names_saved(trainer: Trainer, model: nn.Module, weights: WeightState) -> frozenset[str] | None:
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
    from peft import PeftModel

    saves_as_usual = _is_method(trainer._save, Trainer._save)
    if not (saves_as_usual and isinstance(model, PeftModel)):
        return None
    if not _is_method(model.save_pretrained, PeftModel.save_pretrained):
        return None
    with weights.listing_placeholders():
        state = model.state_dict()
    parameter_of = {alias: name for name, aliases in weights.table.aliases.items() for alias in aliases}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}  # which all processes have
    key_of = {id(tensor): key for key, tensor in state.items()}
    names: set[str] = set()
    for adapter in model.peft_config:
        for tensor in _written(model, state, adapter):
            key = key_of.get(id(tensor), "")
            if key in parameter_of:
                names.add(parameter_of[key])
            elif key not in buffers:
                return None
    return frozenset(names)


def _written(model: Any, state: Mapping[str, torch.Tensor], adapter: str) -> list[torch.Tensor]:
    """The tensors that PEFT chooses for an adapter's file, with the embeddings, which it may add."""
    from peft import get_peft_model_state_dict

    # PEFT asks modules that are saved as a whole for their keys
    with warnings.catch_warnings(), computing_with_nan():
        warnings.simplefilter("ignore")
        chosen = get_peft_model_state_dict(
            model, state_dict=dict(state), adapter_name=adapter, save_embedding_layers=True
        )
    return list(chosen.values())


def _is_method(bound: Any, function: Any) -> bool:
    """Whether an object has this method, and user code has not replaced it on its class or on itself."""
    return getattr(bound, "__func__", None) is function
