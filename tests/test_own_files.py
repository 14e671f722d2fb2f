"""`OwnFolder` renames and deletes in marked folders only, and no other code of the package renames or deletes."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hf_pipetransformer
from hf_pipetransformer import own_files
from hf_pipetransformer.own_files import CONTENT, MARKER, NotOursError, OwnFolder, open_regular, replace_file

PACKAGE = Path(hf_pipetransformer.__file__).parent
DESTRUCTIVE = {"rmtree", "rename", "renames", "rmdir", "removedirs", "unlink"}
OF_MODULES = {"move", "remove", "replace"}
"""Of `os` and `shutil`; methods of strings, lists and modules are called so as well."""


def destructive_calls(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):
            names = [alias.name for alias in node.names if alias.name in DESTRUCTIVE | OF_MODULES]
        elif isinstance(node, ast.Attribute):
            is_of_module = isinstance(node.value, ast.Name) and node.value.id in ("os", "shutil")
            names = [node.attr] if node.attr in DESTRUCTIVE | (OF_MODULES if is_of_module else set()) else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "replace":
            names = ["Path.replace"] if len(node.args) == 1 and not node.keywords else []  # a string's has two
        found += [f"{node.lineno}: {name}" for name in names]
    return found


def test_nothing_else_in_the_package_renames_or_deletes() -> None:
    files = {str(path.relative_to(PACKAGE)): destructive_calls(path) for path in PACKAGE.rglob("*.py")}
    assert {name for name, calls in files.items() if calls} == {"own_files.py"}, files


CALLS: dict[str, Callable[[OwnFolder], Any]] = {
    "create": lambda own: own.create(),
    "names": lambda own: own.names(),
    "rename": lambda own: own.rename_child("a", "b"),
    "take": lambda own: own.take(own.path.parent / "outside", "b"),
    "give": lambda own: own.give("a", own.path.parent / "b"),
    "write": lambda own: own.write("a", "text"),
    "remove": lambda own: own.remove("a"),
    "destroy": lambda own: own.destroy(),
}


def as_users(folder: Path, kind: str) -> None:
    """A folder with something in it, or a link, or a file."""
    elsewhere = folder if kind != "link to a marked folder" else folder.parent / "elsewhere"
    if kind == "file":
        folder.write_text("mine")
        return
    (elsewhere / "a").mkdir(parents=True)
    (elsewhere / "a" / "file").write_text("mine")
    if kind == "another marker":
        (elsewhere / MARKER).write_bytes(CONTENT.replace(b"1", b"2", 1))
    elif kind == "marker is a pipe":
        os.mkfifo(elsewhere / MARKER)
    elif kind == "link to a marked folder":
        (elsewhere / MARKER).write_bytes(CONTENT)
    if elsewhere != folder:
        folder.symlink_to(elsewhere)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["folder", "file", "another marker", "marker is a pipe", "link to a marked folder"])
def test_what_the_user_has_made_is_refused_and_stays(kind: str, tmp_path: Path) -> None:
    own = OwnFolder(tmp_path / "own")
    as_users(own.path, kind)
    (tmp_path / "outside").mkdir()

    def everything() -> dict[Path, tuple[int, int]]:
        return {path: (path.lstat().st_ino, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")}

    before = everything()
    for name, call in CALLS.items():
        with pytest.raises(NotOursError, match="is needed for files of hf_pipetransformer") as caught:
            call(own)
        assert isinstance(caught.value, ValueError) and isinstance(caught.value, OSError)
        assert everything() == before, name
        assert str(own.why_foreign()) in str(caught.value)


def test_links_in_a_folder_are_removed_and_not_followed(tmp_path: Path) -> None:
    own, mine = OwnFolder(tmp_path / "users" / "own"), tmp_path / "users" / "mine"
    own.create()
    assert stat.S_IMODE(own.path.stat().st_mode) == 0o700
    (mine / "sub").mkdir(parents=True)
    (mine / "sub" / "file").write_text("mine")
    tree = own.path / "tree"
    (tree / "deep").mkdir(parents=True)
    for link in (own.path / "link", tree / "link", tree / "deep" / "link"):
        link.symlink_to(mine)
        link.with_name("to-file").symlink_to(mine / "sub" / "file")
    os.mkfifo(tree / "pipe")
    own.remove("link", "to-file")
    own.write("to-file", "own")
    own.destroy()
    assert not own.path.exists() and (mine / "sub" / "file").read_text() == "mine"


def test_a_folder_whose_making_was_interrupted_is_taken_over(tmp_path: Path) -> None:
    """Killed before the marker is there, or with a part of it, as on a full disk."""
    own = OwnFolder(tmp_path / "own")
    own.path.mkdir()
    own.create()
    assert (own.path / MARKER).read_bytes() == CONTENT
    (own.path / MARKER).write_bytes(CONTENT[:9])
    own.write("a", "text")
    assert own.names() == ["a"]


# ------------------------------------------------------------------------------------ files in the user's folders
@pytest.mark.timeout(60)
def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "device").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    with open(open_regular(tmp_path / "link")) as file:  # as in the Hub's cache
        assert file.read() == "mine"
    for name in ("device", "pipe", "."):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(tmp_path / name)
    with pytest.raises(OSError):
        open_regular(tmp_path / "link", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_file(path, "one")
    path.chmod(0o604)
    replace_file(path, "two")
    assert path.read_text() == "two" and stat.S_IMODE(path.stat().st_mode) == 0o604

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(own_files.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        replace_file(path, "three")
    monkeypatch.undo()
    assert path.read_text() == "two" and list(tmp_path.iterdir()) == [path]
