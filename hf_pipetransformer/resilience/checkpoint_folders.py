"""Atomic checkpoints: a checkpoint is either complete or does not exist.

A checkpoint is written under another name. When all its files are on disk, a manifest with their sizes and checksums
is added, and only then the folder is renamed to its final name:

    output_dir/_saving/checkpoint-40/     being written; never taken for a checkpoint, even if the process is killed
    output_dir/checkpoint-40/             complete, with manifest.json

(Uploads to the Hub skip names that begin with "_".)

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
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

MANIFEST = "manifest.json"
SAVING = "_saving"
REPLACED = "replaced"
STATE = "trainer_state.json"
"""The file that the stock Trainer writes last."""
KEPT = "PipelineState"
"""Entry of the trainer's state that only checkpoints with a manifest have. It holds the step at which it was written,
since the stock Trainer copies the state that it was resumed from into its own checkpoints."""
CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
WEIGHTS = re.compile(r"(pytorch_|adapter_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
SHARD = re.compile(r"-\d+-of-\d+\.")
CHUNK = 2**22


def publish(written: Path, final: Path) -> None:
    """Rename a checkpoint to its final name, once all its files are on disk. An existing one of that name is replaced.

    Args:
        written: folder of the files, inside another folder on the same file system as `final`.
        final: final path of the checkpoint.

    Raises:
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
    replaced = written.parent / REPLACED / final.name
    if final.exists():  # from an earlier training; a folder cannot be replaced in one step
        replaced.parent.mkdir(exist_ok=True)
        final.rename(replaced)
    written.rename(final)  # if this fails, or is never reached, `remove_incomplete` restores the replaced one
    _synchronise(final.parent)


def validate(checkpoint: Path) -> str | None:
    """Describe what is wrong with a checkpoint; None if it is valid.

    A checkpoint without a manifest was written by the stock Trainer, or is a partially deleted one of ours. For those
    of the stock Trainer, only the presence of the file that is written last is checked.
    """
    try:
        content = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        manifest = [(name, size, checksum) for name, (size, checksum) in content.items()]
    except FileNotFoundError:
        return _damage_without_manifest(checkpoint)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    replaced = _replaced_weights(checkpoint, [name for name, *_ in manifest])
    for name, size, checksum in manifest:
        if name in replaced:
            continue
        path = checkpoint / name
        try:
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes instead of {size}"
            if _checksum(path) != checksum:
                return f"{name} is damaged"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def replaced_weights(checkpoint: Path) -> list[str]:
    """Weight files that are missing from a checkpoint because they were sharded or merged into other weight files.

    The manifest has no checksums of the new files; it is only known that they can be read.
    """
    try:
        return sorted(_replaced_weights(checkpoint, json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):
        return []


def _replaced_weights(checkpoint: Path, names: Collection[str]) -> set[str]:
    gone = {name for name in names if WEIGHTS.fullmatch(name) and not (checkpoint / name).exists()}
    if not gone:
        return set()
    new = [path for path in checkpoint.iterdir() if WEIGHTS.fullmatch(path.name) and path.name not in names]
    indices = [path for path in new if path.suffix == ".json"]
    whole = [path for path in new if path.suffix != ".json" and not SHARD.search(path.name)]
    is_there = any(map(_is_readable, whole)) or any(map(_has_all_shards, indices))
    return gone if is_there else set()


def _has_all_shards(index: Path) -> bool:
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(shards) and all(_is_readable(index.parent / shard) for shard in shards)


def _is_readable(weights: Path) -> bool:
    """Whether a weight file is readable and as long as its header states."""
    if weights.suffix != ".safetensors":
        return zipfile.is_zipfile(weights)
    try:
        with safe_open(weights, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def _damage_without_manifest(checkpoint: Path) -> str | None:
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        kept = state.get("stateful_callbacks", {}).get(KEPT, {}).get("attributes", {}).get("memory", {})
        return f"{MANIFEST} is missing" if kept and kept["step"] == state["global_step"] else None
    except FileNotFoundError:
        return f"it has neither {MANIFEST} nor {STATE}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{STATE} cannot be read ({error})"


def latest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint in a folder, and what is wrong with the newer ones."""
    problems: list[str] = []
    for checkpoint in reversed(_checkpoints(folder)):
        damage = validate(checkpoint)
        if damage is None:
            return checkpoint, problems
        problems.append(f"{checkpoint.name}: {damage}")
    return None, problems


def remove_incomplete(folder: Path) -> None:
    """Remove what a killed process left unfinished; a checkpoint that it was about to replace is restored."""
    restore_replaced(folder)
    shutil.rmtree(folder / SAVING, ignore_errors=True)


def restore_replaced(folder: Path) -> None:
    """Restore the name of a checkpoint that a killed process was about to replace."""
    for replaced in (folder / SAVING / REPLACED).glob("*"):
        if not (folder / replaced.name).exists():
            replaced.rename(folder / replaced.name)


def rotate(folder: Path, limit: int | None, newest: Path, best: Path | None) -> None:
    """Remove the oldest checkpoints beyond a limit, but never the newest or the best.

    Checkpoints with higher numbers than the newest (of another training, or damaged) are kept. A checkpoint is moved
    away before it is removed, because a partially deleted one could look like one of the stock Trainer.

    Args:
        limit: `save_total_limit`; None or 0 keeps all checkpoints.
    """
    if not limit or limit < 0:
        return
    names = [checkpoint.name for checkpoint in _checkpoints(folder)]
    names = names[: names.index(newest.name) + 1]
    kept = {newest.name} | ({best.name} if best is not None else set())
    removable = [name for name in names if name not in kept]
    for name in removable[: max(len(names) - max(limit, len(kept)), 0)]:
        (folder / SAVING).mkdir(exist_ok=True)
        (folder / name).rename(folder / SAVING / name)
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
    with path.open("rb") as file:
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
