"""Atomic checkpoints: a checkpoint is either complete or does not exist.

A checkpoint is written under another name. When all its files are on disk, a manifest with their sizes and checksums
is added, and only then the folder is renamed to its final name:

    output_dir/_hf_pipetransformer_saving/checkpoint-40/   being written; never taken for a checkpoint
    output_dir/checkpoint-40/                              complete, with manifest.json

A replaced or removed checkpoint is moved into the same folder first, which is an `OwnFolder`. Only checkpoints of the
Trainer are moved into it: a folder, not a link, with a file that only the Trainer writes (`is_trainers`).

Other programs delete a checkpoint file by file: the stock Trainer when it keeps only the best one, or a user. A
partially deleted checkpoint could look like one of the stock Trainer, which has no manifest. Therefore
`trainer_state.json` records whether the checkpoint had a manifest.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import zlib
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..file_formats import MANIFEST_FORMAT, TRAINER_STATE, read_json, run_state_in
from ..own_files import NotOursError, OwnFolder, open_regular

MANIFEST = "manifest.json"
SAVING = "_hf_pipetransformer_saving"
REPLACED = "replaced-"
"""Prefix of a checkpoint that another one of its name is replacing."""
STATE = "trainer_state.json"
"""The file that the stock Trainer writes last."""
CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
TRAINERS = (STATE, MANIFEST)
"""Files that mark a checkpoint of the Trainer: each completed one has at least one of them."""
TRAINERS_OWN = re.compile(
    r"(pytorch_|adapter_)?model[-.]|(optimizer|scheduler|scaler|rng_state|training_args|trainer_state|config|adapter_config)"
)
"""Beginnings of the names of files that the Trainer writes into a checkpoint, in this training or an earlier one."""
CHUNK = 2**22


def saving_folder(folder: Path) -> OwnFolder:
    """The folder in an `output_dir` for checkpoints that are being written or removed."""
    return OwnFolder(folder / SAVING)


def is_trainers(checkpoint: Path) -> bool:
    """Whether something named like a checkpoint is one, and no folder of the user's and no link."""
    try:
        if not stat.S_ISDIR(checkpoint.lstat().st_mode):
            return False
        with os.scandir(checkpoint) as entries:
            return any(entry.name in TRAINERS and entry.is_file(follow_symlinks=False) for entry in entries)
    except OSError:
        return False


def refuse_taken(final: Path) -> None:
    """Refuse a checkpoint's name that something else has than a checkpoint of the Trainer, or an empty folder.

    Raises:
        NotOursError: something has.
    """
    is_free = not os.path.lexists(final) or (not final.is_symlink() and final.is_dir() and not any(final.iterdir()))
    if not is_free and not is_trainers(final):
        raise NotOursError(
            f"{final} exists, but is not a checkpoint of the Trainer (a folder with {STATE}), so it is not replaced."
            " Move it away and resume from the checkpoint before it, or choose another output_dir."
        )


def publish(written: Path, final: Path) -> None:
    """Rename a checkpoint to its final name, once all its files are on disk. An existing one of that name is replaced.

    Args:
        written: folder of the files, in the `saving_folder` of the folder that `final` is in.
        final: final path of the checkpoint.

    Raises:
        NotOursError: something else than a checkpoint has the name.
        OSError: the disk is full, or an operation on it fails.
    """
    manifest = {}
    for path in sorted(written.rglob("*")):
        _synchronise(path)
        if path.is_file():
            manifest[str(path.relative_to(written))] = [path.stat().st_size, _checksum(path)]
    with (written / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file)
        file.flush()
        os.fsync(file.fileno())
    _synchronise(written)
    give_name(written, final)
    _synchronise(final.parent)


def give_name(written: Path, final: Path) -> None:
    """Move a folder out of the `saving_folder`; an earlier checkpoint of that name is moved into it.

    Raises:
        NotOursError: something else than a checkpoint has the name.
        OSError: it cannot be moved.
    """
    refuse_taken(final)
    saving = OwnFolder(written.parent)
    if is_trainers(final):  # from an earlier training; a folder cannot be replaced in one step
        _keep_users_files(final, written)
        saving.remove(REPLACED + final.name)
        saving.take(final, REPLACED + final.name)
    saving.give(written.name, final)  # if this fails, or is never reached, `remove_incomplete` restores the other one


def _keep_users_files(final: Path, written: Path) -> None:
    """Copy the user's files from the checkpoint that is about to be replaced. The stock Trainer keeps them, too.

    A file is the user's if neither the manifest nor the new checkpoint has it, and the Trainer does not write it.
    """
    try:
        listed = {PurePosixPath(name).parts[0] for name in read_json(final / MANIFEST, MANIFEST_FORMAT)}
    except (OSError, ValueError):
        listed = set()
    for path in final.iterdir():
        if path.name in listed | {MANIFEST} or TRAINERS_OWN.match(path.name) or os.path.lexists(written / path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, written / path.name, symlinks=True)
        else:
            shutil.copy2(path, written / path.name, follow_symlinks=False)


def validate(checkpoint: Path) -> str | None:
    """Describe the damage of a checkpoint; None if it is valid.

    A checkpoint without a manifest was written by the stock Trainer, or is a partially deleted one of ours. For the
    stock Trainer's checkpoints, only the presence of the last written file is checked.
    """
    try:
        manifest = read_json(checkpoint / MANIFEST, MANIFEST_FORMAT)
    except FileNotFoundError:
        return _damage_without_manifest(checkpoint)
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, (size, checksum) in manifest.items():
        path = checkpoint / name
        try:
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if _checksum(path) != checksum:
                return f"{name} is damaged"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    try:
        with suppress(FileNotFoundError):  # the manifest was changed on purpose
            run_state_in(read_json(checkpoint / STATE, TRAINER_STATE).get("stateful_callbacks"))
    except (OSError, ValueError) as error:
        return f"{STATE} cannot be read ({error})"
    return None


def _damage_without_manifest(checkpoint: Path) -> str | None:
    try:
        state = read_json(checkpoint / STATE, TRAINER_STATE)
    except FileNotFoundError:
        return f"it has neither {MANIFEST} nor {STATE}"
    except (OSError, ValueError) as error:
        return f"{STATE} cannot be read ({error})"
    kept: dict[str, Any] = {}
    with suppress(ValueError):  # a callback of the user's may have the name
        kept = run_state_in(state.get("stateful_callbacks"))
    return f"{MANIFEST} is missing" if kept and kept["step"] == state.get("global_step") else None


def latest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint in a folder, and descriptions of the damage of newer ones."""
    problems: list[str] = []
    for checkpoint in reversed(_checkpoints(folder)):
        damage = validate(checkpoint)
        if damage is None:
            return checkpoint, problems
        problems.append(f"{checkpoint.name}: {damage}")
    return None, problems


def remove_incomplete(folder: Path) -> None:
    """Remove the unfinished checkpoints of a killed process, and restore the checkpoint that it was about to replace.

    Raises:
        NotOursError: the name of the `saving_folder` is taken by something else.
    """
    restore_replaced(folder)
    saving_folder(folder).destroy()


def restore_replaced(folder: Path) -> None:
    """Restore the name of a checkpoint that a killed process was about to replace.

    Raises:
        NotOursError: as `remove_incomplete`.
    """
    saving = saving_folder(folder)
    for name in saving.names():
        final = folder / name.removeprefix(REPLACED)
        if name != final.name and CHECKPOINT.fullmatch(final.name) and not os.path.lexists(final):
            with suppress(NotADirectoryError):  # this package moves only folders there
                saving.give(name, final)


def rotate(folder: Path, limit: int | None, newest: Path, best: Path | None) -> None:
    """Remove the oldest checkpoints beyond a limit, but never the newest or the best.

    Checkpoints with higher numbers than the newest (of another training, or damaged) are kept, and so are links and
    folders that have such a name but are no checkpoints. A checkpoint is moved away before it is removed, because a
    partially deleted one could look like one of the stock Trainer.

    Args:
        limit: `save_total_limit`; None or 0 keeps all checkpoints.
    """
    if not limit or limit < 0:
        return
    names = [checkpoint.name for checkpoint in _checkpoints(folder) if is_trainers(checkpoint)]
    names = names[: names.index(newest.name) + 1]
    kept = {newest.name} | ({best.name} if best is not None else set())
    saving = saving_folder(folder)
    removable = [name for name in names if name not in kept]
    for name in removable[: max(len(names) - max(limit, len(kept)), 0)]:
        saving.create()
        saving.take(folder / name, name)
    remove_incomplete(folder)


def _checkpoints(folder: Path) -> list[Path]:
    """Checkpoints sorted by step. Names such as `checkpoint-40-merged` are the user's own and are ignored."""
    steps = {}
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        match = CHECKPOINT.fullmatch(path.name)
        if match is not None and path.is_dir():
            steps[int(match[1])] = path
    return [steps[step] for step in sorted(steps)]


def _checksum(path: Path) -> int:
    total = 0
    with open(open_regular(path), "rb") as file:
        while chunk := file.read(CHUNK):
            total = zlib.crc32(chunk, total)
    return total


def _synchronise(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems do not support fsync of folders
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)
