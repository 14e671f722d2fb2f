"""A store that others may write to: their files are not read, written through, or waited for."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cached_runs import EPOCH_START, trainer_of
from distributed import run_ranks_expecting_error
from training_runs import Run

from hf_pipetransformer.parts.prefix_cache.cache.file_store import FileStore
from hf_pipetransformer.parts.prefix_cache.cache.sharing import STORE

KEY = bytes(range(16))
GENERATION = 3, "abc"
FILES = ["segment-*", "index-*", "facts", "used-anybody", "../003-abc"]


def put(store: FileStore, key: bytes = KEY) -> None:
    with closing(store.writer(*GENERATION)) as writer:
        writer.put([key], [np.arange(8, dtype=np.uint8)])


def find(store: FileStore) -> bool:
    with closing(store.reader(*GENERATION)) as reader:
        return reader.read_into([KEY], [np.empty(8, dtype=np.uint8)])[0]


def file_of(store: FileStore, pattern: str) -> Path:
    folder = store.folder / "003-abc"
    return {".": store.folder, "../003-abc": folder}.get(pattern) or next(folder.glob(pattern))


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    store = FileStore(tmp_path / "store")
    put(store)
    assert find(store)
    return store


@pytest.mark.parametrize("pattern", FILES)
def test_a_symbolic_link_in_the_place_of_a_file_is_not_followed(store: FileStore, pattern: str) -> None:
    file = file_of(store, pattern)
    elsewhere = store.folder.parent / "elsewhere"
    file.rename(elsewhere)

    def everything() -> list[Any]:
        paths = [elsewhere, *elsewhere.rglob("*")]
        return [(path.name, path.lstat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in paths]

    before = everything()
    file.symlink_to(elsewhere)
    assert find(store) == (pattern == "used-anybody")
    with suppress(OSError):
        put(store, KEY[::-1])
    assert everything() == before


@pytest.mark.parametrize("where", [".", "../003-abc", "facts", "segment-*"])
@pytest.mark.parametrize("whose", ["anybody's", "another user's"])
def test_what_others_may_write_to_is_not_believed(store: FileStore, where: str, whose: str) -> None:
    """A folder is refused, and the outputs in a segment are computed and stored again."""
    path = file_of(store, where)
    if whose == "anybody's":
        path.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        pytest.skip("only root can give a folder away")
    assert where == "." or not find(store)
    assert (store.why_refused() is not None) == (where == ".")
    if where == "segment-*":
        put(store)
        assert find(store)
        return
    with pytest.raises(PermissionError, match=r"other users may write to it|belongs to user 12345"):
        put(store)


def test_a_store_in_a_folder_that_others_may_write_to_is_the_users_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    before = os.umask(0)
    try:
        put(store := FileStore(tmp_path / STORE))
    finally:
        os.umask(before)
    assert find(store)
    for path in (store.folder, *store.folder.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def trained_in(rank: int, world_size: int, folder: str) -> None:
    trainer_of(Run(samples=16), dict.fromkeys(range(4), 1), EPOCH_START, activation_cache_dir=folder).train()


@pytest.mark.slow
def test_a_store_that_others_may_write_to_is_refused_on_all_processes(tmp_path: Path) -> None:
    put(FileStore(tmp_path / STORE))
    (tmp_path / STORE).chmod(0o777)
    for error in run_ranks_expecting_error(trained_in, 2, str(tmp_path)):
        assert isinstance(error, ValueError)
        assert "activation_cache_dir" in str(error) and "chmod go-w" in str(error)
