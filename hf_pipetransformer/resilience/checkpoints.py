"""Checkpoints that are whole or not there.

A checkpoint is written under another name. When all its files are on the disk, a manifest with their sizes and
checksums is added, and only then it gets its own name:

    output_dir/_saving/checkpoint-40/     written, killed at any time: nobody takes it for a checkpoint
    output_dir/checkpoint-40/             whole, with manifest.json

(The hub's uploads leave out names that begin with "_".)

Others remove a checkpoint file by file: the stock Trainer when it keeps the best one only, a user. What is left of it
could look like one of the stock Trainer, which has no manifest. So `trainer_state.json` says whether it had one.
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
"""What the stock Trainer writes last."""
KEPT = "PipelineState"
"""Entry of the trainer's state that only checkpoints with a manifest have; of the step at which it was written, since
the stock Trainer hands on what it was resumed from."""
CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
WEIGHTS = re.compile(r"(pytorch_|adapter_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
SHARD = re.compile(r"-\d+-of-\d+\.")
CHUNK = 2**22


def publish(written: Path, final: Path) -> None:
    """Give a checkpoint its name, once all its files are on the disk. One that had the name before is replaced.

    Args:
        written: a folder in another one, on the same file system as `final`.
        final: its name.

    Raises:
        OSError: the disk is full or refuses.
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
    if final.exists():  # of an earlier training; a folder cannot be replaced in one step
        replaced.parent.mkdir(exist_ok=True)
        final.rename(replaced)
    written.rename(final)  # where this fails, or never comes, `remove_incomplete` puts the old one back
    _synchronise(final.parent)


def validate(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None: nothing.

    One without a manifest comes from the stock Trainer, or is what is left of one. Of the stock Trainer's it is only
    known that the last file is there.
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
                return f"{name} has {path.stat().st_size} bytes of {size}"
            if _checksum(path) != checksum:
                return f"{name} is damaged"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def replaced_weights(checkpoint: Path) -> list[str]:
    """Files with weights that are gone from a checkpoint where others have come: somebody has sharded or merged them.

    The manifest says nothing about the new ones, but that they can be read.
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
    """Whether a file with weights has the length that it says it has."""
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
    """The newest checkpoint in a folder that is not damaged, and what is wrong with those that are newer."""
    problems: list[str] = []
    for checkpoint in reversed(_checkpoints(folder)):
        damage = validate(checkpoint)
        if damage is None:
            return checkpoint, problems
        problems.append(f"{checkpoint.name}: {damage}")
    return None, problems


def remove_incomplete(folder: Path) -> None:
    """Remove what a killed process had not finished; what it was about to replace gets its name back."""
    restore_replaced(folder)
    shutil.rmtree(folder / SAVING, ignore_errors=True)


def restore_replaced(folder: Path) -> None:
    """Give what a killed process was about to replace its name back."""
    for replaced in (folder / SAVING / REPLACED).glob("*"):
        if not (folder / replaced.name).exists():
            replaced.rename(folder / replaced.name)


def rotate(folder: Path, limit: int | None, newest: Path, best: Path | None) -> None:
    """Remove the oldest checkpoints beyond a limit, never the newest or the best.

    Those with higher numbers than the newest, of another training or damaged, are left alone. A checkpoint is moved
    away before it is removed: half of one could look like one of the stock Trainer.

    Args:
        limit: `save_total_limit`; None or 0: keep all.
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
    """By their steps. `checkpoint-40-merged` is the user's own."""
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
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems cannot do it for folders
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)
