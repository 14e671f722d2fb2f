"""A store that others may write to: nothing of theirs is read, written through, or waited for."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from cached_runs import EPOCH_START, trainer_of
from distributed import run_ranks_expecting_error
from training_runs import Run

from hf_pipetransformer.cache.file_store import FileStore
from hf_pipetransformer.cache.sharing import STORE, publish

KEY = bytes(range(16))


def put(store: FileStore) -> None:
    with_row = store.writer(3, "abc", writer=0, capacity=4)
    with_row.put([KEY], [np.arange(8, dtype=np.uint8)])
    with_row.close()


def find(store: FileStore) -> bool:
    return store.reader(3, "abc").read_into([KEY], [np.empty(8, dtype=np.uint8)])[0]


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    store = FileStore(tmp_path / "store")
    put(store)
    assert find(store)
    return store


@pytest.mark.parametrize("name", ["segment-0", "table", "meta.json", "used-anybody"])
def test_a_symbolic_link_in_the_place_of_a_file_is_not_followed(store: FileStore, name: str) -> None:
    file = store.folder / "003-abc" / name
    elsewhere = store.folder.parent / "elsewhere"
    file.rename(elsewhere)
    before = elsewhere.read_bytes(), elsewhere.stat().st_mtime_ns
    file.symlink_to(elsewhere)
    if name != "used-anybody":
        assert not find(store)
    other_key = KEY[::-1]
    try:
        writer = store.writer(3, "abc", writer=0, capacity=4)
        writer.put([other_key], [np.arange(8, dtype=np.uint8)])
    except OSError:
        pass
    assert (elsewhere.read_bytes(), elsewhere.stat().st_mtime_ns) == before


def test_a_symbolic_link_in_the_place_of_a_generation_is_not_followed(store: FileStore) -> None:
    elsewhere = store.folder.parent / "elsewhere"
    (store.folder / "003-abc").rename(elsewhere)
    (store.folder / "003-abc").symlink_to(elsewhere)
    assert not find(store)
    with pytest.raises(OSError):
        store.writer(3, "abc", writer=0, capacity=4)


@pytest.mark.parametrize("where", [".", "003-abc", "003-abc/segment-0"])
def test_what_others_may_write_to_is_refused(store: FileStore, where: str) -> None:
    (store.folder / where).chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write to it"):
        put(store)
    assert where == "." or not find(store)
    assert (store.why_refused() is not None) == (where == ".")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("where", [".", "003-abc", "003-abc/segment-0"])
def test_what_belongs_to_another_user_is_refused(store: FileStore, where: str) -> None:
    os.chown(store.folder / where, 12345, -1)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        put(store)
    assert where == "." or not find(store)


def test_a_pipe_in_the_place_of_a_segment_is_not_waited_for(store: FileStore) -> None:
    segment = store.folder / "003-abc" / "segment-0"
    segment.unlink()
    os.mkfifo(segment, 0o600)
    assert not find(store)
    with pytest.raises(OSError):
        put(store)


def test_the_current_generations_are_not_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    current = tmp_path / "store" / "current.json"
    publish(current, [])
    current.unlink()
    current.symlink_to(precious)
    publish(current, [(3, "abc")])
    assert precious.read_text() == "mine"
    assert not current.is_symlink()


def trained_in(rank: int, world_size: int, folder: str) -> None:
    stages = dict.fromkeys(range(4), 1)
    trainer_of(Run(samples=16), stages, EPOCH_START, activation_cache_dir=folder).train()


def test_a_store_in_a_folder_that_others_may_write_to_is_the_users_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    put(FileStore(tmp_path / STORE))
    assert find(FileStore(tmp_path / STORE)) and (tmp_path / STORE).stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_store_that_others_may_write_to_is_refused_on_all_processes(tmp_path: Path) -> None:
    put(FileStore(tmp_path / STORE))
    (tmp_path / STORE).chmod(0o777)
    for error in run_ranks_expecting_error(trained_in, 2, str(tmp_path)):
        assert isinstance(error, ValueError)
        assert "activation_cache_dir" in str(error) and "chmod go-w" in str(error)
