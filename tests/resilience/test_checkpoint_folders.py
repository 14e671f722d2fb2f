"""Checkpoints are written as a whole or not at all, and damaged ones are recognised."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path

import pytest

from hf_pipetransformer import own_files
from hf_pipetransformer.file_formats import KEPT
from hf_pipetransformer.run import checkpoint_folders
from hf_pipetransformer.run.checkpoint_folders import (
    MANIFEST,
    SAVING,
    STATE,
    latest_valid,
    publish,
    remove_incomplete,
    rotate,
    saving_folder,
    validate,
)


def write(folder: Path, step: int) -> Path:
    """A published checkpoint with files in two levels."""
    saving_folder(folder).create()
    written = folder / SAVING / f"checkpoint-{step}"
    (written / "adapter").mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.pt", STATE, "adapter/weights.bin"):
        (written / name).write_bytes(random.Random(f"{step}{name}").randbytes(5000))
    (written / STATE).write_text(json.dumps({"global_step": step}).ljust(5000))
    publish(written, folder / f"checkpoint-{step}")
    return folder / f"checkpoint-{step}"


def test_what_is_published_is_whole(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 4)
    assert validate(checkpoint) is None
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    assert set(manifest) == {"model.safetensors", "optimizer.pt", STATE, "adapter/weights.bin"}
    assert manifest[STATE][0] == 5000


@pytest.mark.parametrize("seed", range(6))
def test_any_flipped_byte_or_shorter_file_is_found(tmp_path: Path, seed: int) -> None:
    checkpoint, rng = write(tmp_path, 4), random.Random(seed)
    path = rng.choice([p for p in sorted(checkpoint.rglob("*")) if p.is_file() and p.name != MANIFEST])
    content = bytearray(path.read_bytes())
    if seed % 2:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    else:
        del content[rng.randrange(len(content)) :]
    path.write_bytes(content)
    assert path.name in str(validate(checkpoint))


def test_missing_files_and_broken_manifests_are_found(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 4)
    (checkpoint / "optimizer.pt").unlink()
    assert "optimizer.pt" in str(validate(checkpoint))
    for text in ("{", "[]", '{"a": 1}', "3"):
        (checkpoint / MANIFEST).write_text(text)
        assert "cannot be read" in str(validate(checkpoint))


def test_the_newest_whole_one_is_chosen_by_number(tmp_path: Path) -> None:
    for step in (8, 40, 120):
        write(tmp_path, step)
    assert latest_valid(tmp_path) == (tmp_path / "checkpoint-120", [])
    (tmp_path / "checkpoint-120" / "optimizer.pt").write_bytes(b"")
    chosen, problems = latest_valid(tmp_path)
    assert chosen == tmp_path / "checkpoint-40"
    assert problems == ["checkpoint-120: optimizer.pt has 0 bytes instead of 5000"]


def test_a_folder_of_another_name_is_the_users_own(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        write(tmp_path, step)
    (tmp_path / "checkpoint-12-merged").mkdir()
    assert latest_valid(tmp_path) == (tmp_path / "checkpoint-12", [])
    rotate(tmp_path, 2, tmp_path / "checkpoint-12", None)
    left = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert left == {"checkpoint-8", "checkpoint-12", "checkpoint-12-merged"}


def test_one_of_the_stock_trainer_counts_once_its_last_file_is_there(tmp_path: Path) -> None:
    stock = tmp_path / "checkpoint-4"
    stock.mkdir()
    (stock / "model.safetensors").write_bytes(b"weights")
    assert latest_valid(tmp_path)[0] is None
    (stock / STATE).write_text("{}")
    assert latest_valid(tmp_path)[0] == stock


@pytest.mark.parametrize(("saved_at", "is_half"), [(8, True), (4, False)])
def test_a_half_that_had_a_manifest_is_none_of_the_stock_trainer(saved_at: int, is_half: bool, tmp_path: Path) -> None:
    """The stock Trainer copies the state that it was resumed from, with the step of that checkpoint."""
    checkpoint = tmp_path / "checkpoint-8"
    checkpoint.mkdir()
    kept = {KEPT: {"args": {}, "attributes": {"memory": {"step": saved_at}}}}
    (checkpoint / STATE).write_text(json.dumps({"global_step": 8, "stateful_callbacks": kept}))
    assert validate(checkpoint) == (f"{MANIFEST} is missing" if is_half else None)
    (checkpoint / MANIFEST).write_text("{}")  # a user's who has changed files
    assert validate(checkpoint) is None
    (checkpoint / MANIFEST).unlink()
    (checkpoint / STATE).write_text('{"global_step": 8, "sta')
    assert f"{STATE} cannot be read" in str(validate(checkpoint))


def test_the_names_in_all_folders_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronised: list[str] = []
    monkeypatch.setattr(checkpoint_folders, "_synchronise", lambda path: synchronised.append(path.name))
    write(tmp_path, 4)
    assert "adapter" in synchronised and synchronised.index("adapter") < synchronised.index("checkpoint-4")


@pytest.mark.parametrize("replaces", [False, True])
def test_what_was_not_finished_is_no_checkpoint(
    replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before any of its steps, the folder has the old checkpoint or the new one, whole, and never neither."""
    calls = dies_at = 0

    class Killed(BaseException):
        pass

    def counting(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == dies_at:
                raise Killed
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counting(checkpoint_folders, "_synchronise")
    counting(checkpoint_folders, "_checksum")
    for name in ("rename", "unlink", "rmdir"):
        counting(own_files.os, name)
    new = 1 if replaces else 2
    for number in range(1, 32):
        folder = tmp_path / str(number)
        dies_at, calls = 0, 0
        before = write(folder, 1).stat().st_ino
        dies_at, calls = number, 0
        with suppress(Killed):
            write(folder, new)
            remove_incomplete(folder)
        was_killed, dies_at = calls == number, 0
        remove_incomplete(folder)
        chosen, problems = latest_valid(folder)
        assert chosen is not None and not problems and not (folder / SAVING).exists()
        if not was_killed:
            assert chosen.name == f"checkpoint-{new}" and chosen.stat().st_ino != before
            break
    assert number > 8


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    """A damaged checkpoint with a higher number is not the newest."""
    for step in (20, 40, 60, 80, 120):
        write(tmp_path, step)
    (tmp_path / "checkpoint-120" / "optimizer.pt").write_bytes(b"")
    newest = write(tmp_path, 100)
    rotate(tmp_path, 2, newest, Path("elsewhere/checkpoint-40"))
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-40", "checkpoint-100", "checkpoint-120"}
    assert latest_valid(tmp_path)[0] == newest
    rotate(tmp_path, 1, newest, None)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-100", "checkpoint-120"}
    rotate(tmp_path, None, newest, None)


def test_what_the_user_has_put_into_a_replaced_checkpoint_stays(tmp_path: Path) -> None:
    """The user's files stay, as with the stock Trainer: it overwrites file by file."""
    final = tmp_path / "checkpoint-4"
    for number in range(2):
        saving_folder(tmp_path).create()
        written = tmp_path / SAVING / final.name
        written.mkdir()
        for name in (STATE, "optimizer.pt", *([] if number else ["rng_state_1.pth", "listed.bin"])):
            (written / name).write_text(str(number) if name != STATE else "{}")
        publish(written, final)
        if number == 0:
            (final / "notes.txt").write_text("mine")
            (final / "plots").mkdir()
            (final / "plots" / "loss.png").write_bytes(b"mine")
            (final / "link").symlink_to("/dev/zero")
    assert (final / "notes.txt").read_text() == "mine" and (final / "plots" / "loss.png").read_bytes() == b"mine"
    assert (final / "link").is_symlink() and (final / "optimizer.pt").read_text() == "1"
    assert not (final / "rng_state_1.pth").exists() and not (final / "listed.bin").exists()
    assert validate(final) is None
