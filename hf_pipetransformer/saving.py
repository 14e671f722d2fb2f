"""A Trainer whose checkpoints are whole or not there, and which resumes from the newest whole one.

_save_checkpoint      the stock method, into a folder of another name; then all agree, and rank 0 gives the name
  save_model, _save_optimizer_and_scheduler
                      a full disk is an error of all processes, after the last collective
train(True)           rank 0 chooses the newest whole checkpoint, and all take it
create_optimizer      all recall what it keeps besides the stock Trainer's state (`PipelineState`)
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy, SaveStrategy, get_last_checkpoint
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from .layouts import Layouts
from .preparation import PipelinePreparation
from .resilience.checkpoints import (
    KEPT,
    MANIFEST,
    SAVING,
    STATE,
    damage_of,
    forget_unfinished,
    give_back,
    newest_whole,
    publish,
    replaced_weights,
    rotate,
)
from .resilience.progress import phase

logger = logging.getLogger(__name__)

LAST = "last"
"""In place of a checkpoint to resume from: the newest whole one, if there is one."""


WEIGHT_FILES = (
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    ADAPTER_WEIGHTS_NAME,
)
"""One of which the stock Trainer loads as the best model."""


class PipelineState(TrainerCallback, ExportableState):
    """In a checkpoint's `trainer_state.json`: what a job that goes on needs besides the stock Trainer's state.

    A callback, so that the stock Trainer writes it; its name there is `checkpoints.KEPT`.
    """

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """For the Trainer's checkpoint."""
        return {"args": {}, "attributes": {"memory": self.memory}}


class WholeCheckpoints(PipelinePreparation):
    """The part of [`PipeTransformerTrainer`] that writes, chooses and loads checkpoints."""

    _layouts: Layouts
    _num_cached = 0  # that the plan was made for
    _owes_evaluation = False  # one is due after the step that has been done, and was left out
    _is_within_epoch = False  # a step of it has been begun, and its end has not come
    _is_checkpointing = False
    _saving: Path | None = None  # where checkpoints go until they are whole
    _save_error: Exception | None = None
    _to_push: str | None = None
    _is_collected = False  # all collectives of the checkpoint that is being written are over
    _is_published = False  # it has its name
    _last_saved: Path | None = None

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
        settled = self._processes.gather_objects(self._settled_microbatches())  # nobody writes into what is removed
        self._to_push, self._saving, self._is_collected, self._is_published = None, folder / SAVING, False, False
        self._pipeline_state.memory = self._memory(settled)
        self._expect_callbacks()
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
            and not any((place / file).exists() for place in (written, folder / name) for file in (STATE, MANIFEST))
        )
        # all have looked before it is renamed. A shared file system may show files late, but in the same folder
        inodes = self._processes.gather_objects(_inode(written))
        is_nodes_own = is_nodes_own and inodes[self._processes.rank] not in (None, inodes[0])
        with phase("publish"), self._keeping_errors():
            if should_save:
                self.state.save_to_json(str(written / STATE))
                self._write_times(written)
                publish(written, folder / name)
                self._is_published = True
                best = self.state.best_model_checkpoint
                rotate(folder, self.args.save_total_limit, folder / name, Path(best) if best else None)
                forget_unfinished(folder)
            elif is_nodes_own:
                shutil.rmtree(folder / name, ignore_errors=True)
                written.rename(folder / name)
            if self._to_push is not None:
                super()._push_from_checkpoint(str(folder / name))
        self._raise_anyones_error(folder, name)
        self._last_saved = folder / name

    def _expect_callbacks(self) -> None:
        """The stock method adds to what was there when the training began, and fails at callbacks that came later."""
        states: Any = self.state.stateful_callbacks
        exported = [c for c in (*self.callback_handler.callbacks, self.control) if isinstance(c, ExportableState)]
        for name, count in Counter(type(callback).__name__ for callback in exported).items():
            states[name] = [] if count > 1 else {}

    def _find_best(self, folder: Path, name: str) -> None:
        """As the stock method does, which looked for the best one beside this one's present place.

        Collective over all processes: they load it together in the end, so what rank 0 sees counts.
        """
        if self.state.best_global_step and self.args.save_strategy != SaveStrategy.NO:
            best = f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best == name or (folder / best).is_dir():
                self.state.best_model_checkpoint = str(folder / best)
        self.state.best_model_checkpoint = self._processes.gather_objects(self.state.best_model_checkpoint)[0]

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
        before, is_published = self._processes.gather_objects((before, self._is_published))[0]
        if is_published:
            raise OSError(
                f"{name} is saved, but then older checkpoints could not be removed, or it could not be uploaded"
                f" ({'; '.join(failed)}). See to it, and resume."
            ) from error
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
                f" beginning. (If you have changed its files yourself, let {MANIFEST} contain {{}} and nothing else.)"
            )
        if problems and self.args.process_index == 0:
            logger.warning("Resuming from %s: newer checkpoints are damaged (%s).", chosen, "; ".join(problems))
        replaced = replaced_weights(Path(chosen)) if chosen is not None and self.args.process_index == 0 else []
        if replaced:
            logger.warning(
                "Resuming from %s, whose weights somebody has written anew (%s is gone): they can be read, but no"
                " checksum tells whether they are those of its optimizer.",
                chosen,
                ", ".join(replaced),
            )
        if chosen is not None and self.args.process_index == 0 and not _is_complete(Path(chosen)):
            logger.warning(
                "%s has the model only (save_only_model): optimizer, learning rates and random numbers begin anew.",
                chosen,
            )
        if chosen is None and wanted == LAST:
            return None
        return wanted if chosen is None else chosen  # the stock Trainer says that there is none

    # ------------------------------------------------------------------------------------ loading
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with self._translating_names(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    @contextmanager
    def _translating_names(self, checkpoint: str) -> Iterator[None]:
        """Inside, weights that `save_pretrained` has written under a model's published names come under its own.

        `from_pretrained` knows both (those of ViT's layers, for one). The stock Trainer loads what has the right name
        and leaves the rest of the model as it is, with a warning (transformers 5.23).
        """
        model: Any = self.model if isinstance(self.model, PreTrainedModel) else None
        if self._is_stock or model is None:
            yield
            return
        load, translated = model.load_state_dict, None

        def load_translated(state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
            nonlocal translated
            own = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
            if not own.issuperset(state_dict) and not own.issubset(state_dict):
                translated = translated or type(model).from_pretrained(checkpoint).state_dict()
                state_dict = translated
            return load(state_dict, *args, **options)

        model.load_state_dict = load_translated
        try:
            yield
        finally:
            del model.load_state_dict

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As the stock method does, which would put the whole model's state on every device at once."""
        if checkpoint is None or self.pipeline is None or not self.pipeline.is_placed:
            return super()._load_optimizer_and_scheduler(checkpoint)
        optimizer, scheduler = (os.path.join(checkpoint, name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME))
        if os.path.isfile(optimizer) and os.path.isfile(scheduler):
            assert self.optimizer is not None and self.lr_scheduler is not None
            # not read but mapped: what is here is copied out of it
            state = torch.load(optimizer, map_location="cpu", mmap=True, weights_only=True)
            self.optimizer.load_state_dict(state)
            self.lr_scheduler.load_state_dict(torch.load(scheduler, map_location="cpu", weights_only=True))

    def _refuse_best_model_that_some_lack(self) -> None:
        """Their stages would keep the last weights. Collective over all processes.

        Raises:
            ValueError: output_dir is not shared.
        """
        best = str(self.state.best_model_checkpoint)
        have = self._processes.gather_objects(any(os.path.isfile(os.path.join(best, name)) for name in WEIGHT_FILES))
        if any(have) and not all(have):
            lacking = [rank for rank, has in enumerate(have) if not has]
            raise ValueError(
                f"load_best_model_at_end: processes {lacking} do not see the weights in {best}, which process"
                f" {have.index(True)} has: output_dir must be on a file system that all nodes share. The training is"
                " over, and its checkpoints are there; load the best one by from_pretrained."
            )

    # ------------------------------------------------------------------------------------ what it keeps
    @property
    def _pipeline_state(self) -> PipelineState:
        """Looked up anew each time: resuming may replace callback objects."""
        return next(c for c in self.callback_handler.callbacks if isinstance(c, PipelineState))

    def _settled_microbatches(self) -> list[tuple[int, int, int]]:
        """Of this process's pipeline: rows, elements of a row, M."""
        pipeline = self.pipeline
        if pipeline is None or not pipeline.is_placed:
            return []
        return [(rows, elements, m) for (rows, elements), m in pipeline.settled_microbatches.items()]

    def _memory(self, settled: Sequence[list[tuple[int, int, int]]]) -> dict[str, Any]:
        """For the checkpoint of this step.

        Args:
            settled: every process's `_settled_microbatches`.
        """
        memory: dict[str, Any] = {"step": self.state.global_step}
        pipeline, batches = self.pipeline, self._train_batches
        if pipeline is None or not pipeline.is_placed or batches is None:
            return memory
        plan = pipeline.current_plan
        comes_at_the_end = (
            self.args.eval_strategy == IntervalStrategy.EPOCH
            and self._is_epochs_last_step
            and self.args.eval_delay <= (self.state.epoch or 0.0)
        )
        return {
            **memory,
            "owes_evaluation": self._owes_evaluation or comes_at_the_end,
            "order": batches.memory,
            "layout": {
                "where": self._where,
                **self._layouts.facts_of(plan),
                "counted_as_cached": self._num_cached,
                "microbatches": [settled[rank] for rank in plan.ranks_of_stage(0)],
            },
        }

    @property
    def _is_epochs_last_step(self) -> bool:
        """Whether the step that has been done was the last of its epoch, whose end has not come."""
        return self._is_within_epoch and self.state.epoch % 1 == 0

    @property
    def _where(self) -> dict[str, Any]:
        """On what times were measured, which decide about the plan."""
        return self._timed[2] if self._timed is not None else {}

    def _recall(self) -> dict[str, Any]:
        """What the checkpoint keeps that the training goes on with, if any. Collective over all processes.

        The stock Trainer, too, hands it on, with steps that it does not know of.
        """
        states: Any = self.state.stateful_callbacks
        memory = states.get(KEPT, {}).get("attributes", {}).get("memory", {})
        mine = memory if memory.get("step") == self.state.global_step else {}
        # a process that does not see the best checkpoint has forgotten it, and all load it together
        everyone = self._processes.gather_objects((mine, self.state.best_model_checkpoint))
        kept, self.state.best_model_checkpoint = everyone[0]
        self._owes_evaluation = bool(kept.get("owes_evaluation"))
        return kept


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
    if not path.is_dir():
        give_back(path.parent)  # it was about to be replaced
    damage = damage_of(path) if path.is_dir() else None  # the stock Trainer says that it is not there
    return (str(wanted), []) if damage is None else (None, [f"{path.name}: {damage}"])


def _is_complete(checkpoint: Path) -> bool:
    """Whether it has more than the model. The stock Trainer takes both files or none."""
    return all((checkpoint / file).is_file() for file in (OPTIMIZER_NAME, SCHEDULER_NAME))


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
