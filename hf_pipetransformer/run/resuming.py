"""Resuming: which checkpoint is chosen, and how its files are read.

train(True)           rank 0 chooses the newest valid checkpoint for all processes
_load_from_checkpoint, _load_best_model, _load_optimizer_and_scheduler
                      each process loads the part that it holds
create_optimizer      all processes restore the state besides the stock Trainer's (`PipelineState`)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, Trainer
from transformers.trainer import FSDP_MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    ADAPTER_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from ..file_formats import run_state_in
from ..training_args import PipeTransformerTrainingArguments
from .checkpoint_folders import (
    MANIFEST,
    latest_valid,
    remove_incomplete,
    restore_replaced,
    saving_folder,
    validate,
)
from .job import TrainingJob

logger = logging.getLogger(__name__)

LAST = "last"
"""Value of `resume_from_checkpoint` for the newest valid checkpoint, or none if there is none."""

WEIGHT_FILES = (
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    ADAPTER_WEIGHTS_NAME,
)
"""The stock Trainer loads the best model from one of these files."""


# ---------------------------------------------------------------------------------------------------------
# Choosing
# ---------------------------------------------------------------------------------------------------------


def stock_checkpoint_to_resume(
    output_dir: str | None, wanted: str | bool | None, is_sharded: bool
) -> str | bool | None:
    """Return the checkpoint to resume from when the stock Trainer does everything; it does not support "last".

    Args:
        output_dir: the folder of the checkpoints.
        wanted: as for `checkpoint_to_resume`.
        is_sharded: whether FSDP shards the model.

    Raises:
        ValueError: the checkpoint does not exist; or FSDP shall resume from one that was saved without FSDP.
    """
    folder = output_dir or "."
    newest = get_last_checkpoint(folder) if wanted in (LAST, True) and Path(folder).is_dir() else None
    found = wanted if isinstance(wanted, str) and wanted != LAST else newest
    if found is not None and not Path(found).is_dir():
        raise _missing(found, Path(folder))
    if is_sharded and found is not None and not any(Path(found).glob(f"{FSDP_MODEL_NAME}*")):
        raise ValueError(
            f"{found} was saved without FSDP, and FSDP resumes only from its own files ({FSDP_MODEL_NAME}*). Resume"
            " with replica_sharding='optimizer' or 'none' instead of fsdp, or begin a new training with its model."
        )
    return newest if wanted == LAST else wanted


def checkpoint_to_resume(job: TrainingJob, wanted: str | bool | None) -> str | bool | None:
    """Return the checkpoint for `train` to resume, the same on all processes. Collective over all processes.

    Args:
        job: the training job.
        wanted: the folder of a checkpoint; or True for the newest valid one; or "last" for the newest valid one if
            there is one, and otherwise a start from the beginning. With "last" the same command can restart a job.

    Raises:
        ValueError: the named checkpoint does not exist or is damaged, or all checkpoints are; the checkpoint in the
            arguments does not exist; there is none for True; or something else has the name of the folder for
            unfinished checkpoints.
    """
    choice = None
    with job.mesh.failing_together():
        folder = Path(job.args.output_dir or ".")
        saving_folder(folder).refuse_foreign()
        if job.args.process_index == 0:
            if wanted:
                choice = wanted, _choose(folder, wanted)
            _refuse_missing(job.args)  # checkpoints that were about to be replaced are restored
    # other nodes may have another disk, or see new files late
    wanted, chosen = job.mesh.gather_objects(choice)[0] or (None, None)
    if wanted is True and chosen is None:
        raise ValueError(
            f"resume_from_checkpoint=True, but output_dir={job.args.output_dir!r} contains no checkpoint. Leave it"
            " out, or pass 'last', which begins a new training if there is no checkpoint."
        )
    return chosen


def _refuse_missing(args: PipeTransformerTrainingArguments) -> None:
    """Refuse arguments with a checkpoint that does not exist, which the stock Trainer leaves to the script."""
    wanted = args.resume_from_checkpoint
    is_path = isinstance(wanted, str) and wanted.lower() not in ("", LAST, "true", "yes", "false", "no")
    if is_path and not Path(str(wanted)).exists():
        raise _missing(
            str(wanted), Path(args.output_dir or "."), " to trainer.train(resume_from_checkpoint=...) as well"
        )


def _missing(wanted: str, folder: Path, where: str = "") -> ValueError:
    """Return the error for a checkpoint that does not exist.

    Args:
        wanted: the path.
        folder: the folder of the checkpoints.
        where: the place where the remedy must be passed.
    """
    newest = _newest_in(folder)
    if newest is None:
        return ValueError(
            f"resume_from_checkpoint={wanted!r} does not exist, and {folder} contains no valid checkpoint. Pass the"
            f" folder of a checkpoint{where}, or leave it out to begin a new training."
        )
    return ValueError(
        f"resume_from_checkpoint={wanted!r} does not exist. The newest valid checkpoint in {folder} is {newest.name}."
        f" Pass {str(newest)!r}{where}, or 'last' for the newest one in output_dir."
    )


def _newest_in(folder: Path) -> Path | None:
    """The newest valid checkpoint, for an error message."""
    try:
        return latest_valid(folder)[0] if folder.is_dir() else None
    except OSError:
        return None


def _choose(folder: Path, wanted: str | Literal[True]) -> str | None:
    """Choose a checkpoint on one process; None if there is none.

    Raises:
        ValueError: the named checkpoint does not exist or is damaged, or all are, or the folder cannot be read.
    """
    path: Path | None = None
    problems: list[str] = []
    try:
        if wanted is True or wanted == LAST:
            if folder.is_dir():
                remove_incomplete(folder)  # it may also restore a checkpoint that was about to be replaced
                path, problems = latest_valid(folder)
        else:
            path = Path(wanted)
            if not path.is_dir():
                restore_replaced(path.parent)  # the job may have ended while it was being replaced
            if not path.is_dir():
                raise _missing(wanted, folder)
            damage = validate(path)
            path, problems = (path, []) if damage is None else (None, [f"{path.name}: {damage}"])
    except OSError as error:
        path, problems = None, [str(error)]
    if path is None and problems:
        newest = None if wanted is True or wanted == LAST else _newest_in(folder)
        hint = "" if newest is None else f" The newest valid checkpoint in {folder} is {newest.name}."
        raise ValueError(
            f"resume_from_checkpoint={wanted!r} cannot be used: {'; '.join(problems)}. Pass another checkpoint, or"
            f" train from the beginning.{hint} (If you changed its files on purpose, replace the content of {MANIFEST}"
            " with {} to skip this check.)"
        )
    if problems:
        logger.warning("Resuming from %s: newer checkpoints are damaged (%s).", path, "; ".join(problems))
    # the stock Trainer loads both files or neither
    if path is not None and not all((path / file).is_file() for file in (OPTIMIZER_NAME, SCHEDULER_NAME)):
        logger.warning(
            "%s contains only the model (save_only_model), so the optimizer, the learning rate scheduler and the"
            " random number generators start from scratch.",
            path,
        )
    if path is None:
        return None
    return str(path if wanted is True or wanted == LAST else wanted)


# ---------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------


def saved_state(job: TrainingJob) -> dict[str, Any]:
    """Return the `PipelineState` of the checkpoint that is resumed, or {}. Collective over all processes.

    A state that belongs to another step is ignored: the stock Trainer copies it, unchanged, into later checkpoints.

    Raises:
        ValueError: the state is damaged. Every process raises it.
    """
    state = job.trainer.state
    with job.mesh.failing_together():
        memory = run_state_in(state.stateful_callbacks)
    mine = memory if memory.get("step") == state.global_step else {}
    # a process that does not see the best checkpoint has cleared its path, but all processes load it together
    everyone = job.mesh.gather_objects((mine, state.best_model_checkpoint))
    kept, state.best_model_checkpoint = everyone[0]
    return kept


@contextmanager
def translating_names(model: Any, checkpoint: str) -> Iterator[None]:
    """Inside the context, translate weight names of `save_pretrained` to the model's own names when loading.

    `save_pretrained` writes weights under their published names, which differ for some models (the layers of ViT, for
    one). `from_pretrained` accepts both. The stock Trainer only loads weights with matching names, leaves the others
    unchanged, and warns (transformers 5.23).
    """
    if not isinstance(model, PreTrainedModel):
        yield
        return
    loading: Any = model
    load, translated = loading.load_state_dict, None

    def load_translated(state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        nonlocal translated
        own = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
        if not own.issuperset(state_dict) and not own.issubset(state_dict):
            translated = translated or type(model).from_pretrained(checkpoint).state_dict()
            state_dict = translated
        return load(state_dict, *args, **options)

    loading.load_state_dict = load_translated
    try:
        yield
    finally:
        del loading.load_state_dict


def load_optimizer_and_scheduler(trainer: Trainer, checkpoint: str) -> None:
    """Load optimizer and scheduler as the stock method does, but without the whole state on every device."""
    optimizer, scheduler = (os.path.join(checkpoint, name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME))
    if os.path.isfile(optimizer) and os.path.isfile(scheduler):
        assert trainer.optimizer is not None and trainer.lr_scheduler is not None
        # memory-mapped, so only the parts that this process holds are read and copied
        state = torch.load(optimizer, map_location="cpu", mmap=True, weights_only=True)
        trainer.optimizer.load_state_dict(state)
        trainer.lr_scheduler.load_state_dict(torch.load(scheduler, map_location="cpu", weights_only=True))


def refuse_best_model_that_some_lack(job: TrainingJob) -> None:
    """Refuse to load the best model if some processes do not see it. Collective over all processes.

    The stages of these processes would keep the last weights.

    Raises:
        ValueError: output_dir is not shared by all nodes.
    """
    best = str(job.trainer.state.best_model_checkpoint)
    have = job.mesh.gather_objects(any(os.path.isfile(os.path.join(best, name)) for name in WEIGHT_FILES))
    if any(have) and not all(have):
        lacking = [rank for rank, has in enumerate(have) if not has]
        raise ValueError(
            f"load_best_model_at_end=True failed: processes {lacking} cannot see the weights in {best}, but process"
            f" {have.index(True)} can. Put output_dir on a file system that all nodes share. Training has finished and"
            " its checkpoints are saved; load the best one with from_pretrained."
        )
