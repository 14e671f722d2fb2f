"""Damaged files: a hit returns the stored values, all else is a miss, and writing repairs the files."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from stored_rows import FINGERPRINT, hits_of, open_writer, put

from hf_pipetransformer.own_files import MARKER
from hf_pipetransformer.parts.prefix_cache.cache.activation_files import FileReader, FileWriter
from hf_pipetransformer.parts.prefix_cache.cache.file_store import FileStore


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


@pytest.fixture
def reader(store: FileStore) -> Iterator[FileReader]:
    with closing(store.reader(3, FINGERPRINT)) as reader:
        yield reader


@pytest.fixture
def writer(store: FileStore) -> Iterator[FileWriter]:
    with closing(open_writer(store)) as writer:
        yield writer


SEEDS = 100


def damage(folder: Path, rng: random.Random) -> str:
    """Damage one of the files, and return the kind of damage. The marker stays: without it the store is refused."""
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARKER))
    content = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "truncate", "extend", "delete", "swap", "zero", "replace"])
    a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    if kind == "flip" and content:
        for _ in range(rng.choice([1, 30])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "truncate":
        del content[a:]
    elif kind == "extend":
        content += rng.randbytes(rng.randrange(1, 2000))
    elif kind == "swap":
        length = min(rng.choice([8, 16, 32, 200, 512]), b - a, len(content) - b)
        content[a : a + length], content[b : b + length] = content[b : b + length], content[a : a + length]
    elif kind == "zero":
        content[a:b] = bytes(b - a)
    elif kind == "replace":
        content = bytearray(rng.randbytes(len(content)))
    if kind == "delete":
        path.unlink()
    else:
        path.write_bytes(content)
    return f"{kind} {path.relative_to(folder)} {a} {b}"


def test_damaged_files_give_misses_and_are_repaired_by_writing(tmp_path: Path) -> None:
    numbers = {(3, "a"): range(30), (5, "a"): range(20, 50)}
    whole = FileStore(tmp_path / "whole")
    for generation, mine in numbers.items():
        for rank in (0, 1):
            with closing(whole.writer(*generation)) as writer:
                put(writer, mine[rank::2])
    num_hits = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        store = FileStore(tmp_path / str(seed))
        shutil.copytree(whole.folder, store.folder)
        with ExitStack() as stack:
            readers = {g: stack.enter_context(closing(store.reader(*g))) for g in numbers}
            for generation, mine in numbers.items():
                assert hits_of(readers[generation], mine) == list(mine)
            what = [damage(store.folder, rng) for _ in range(rng.choice([1, 1, 4]))]
            for generation, mine in numbers.items():
                hits_of(readers[generation], mine)  # was opened before
                fresh = stack.enter_context(closing(store.reader(*generation)))
                num_hits += len(hits_of(fresh, mine))
                writer = stack.enter_context(closing(store.writer(*generation)))
                put(writer, mine)
                repaired = stack.enter_context(closing(store.reader(*generation)))
                assert hits_of(repaired, mine) == list(mine), (seed, what)
        shutil.rmtree(store.folder)
    assert SEEDS * 60 * 0.5 < num_hits < SEEDS * 60  # the damage was felt, and not everywhere


@pytest.mark.parametrize("space", [150, 450])  # of two payloads of 200 bytes and two records of 32
def test_write_that_fails_half_way(
    store: FileStore, reader: FileReader, writer: FileWriter, space: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(writer, [1])
    size, pwrite = store.nbytes(), os.pwrite

    def until_full(file: int, content: memoryview, offset: int) -> int:
        nonlocal space
        if not space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = pwrite(file, content[:space], offset)
        space -= done
        return done

    monkeypatch.setattr(os, "pwrite", until_full)
    with pytest.raises(OSError, match="No space left"):
        put(writer, [2, 3, 4])
    monkeypatch.undo()
    assert store.nbytes() == size
    assert hits_of(reader, [1, 2, 3, 4]) == [1]
    assert put(writer, [2, 3, 4]) == 3
    assert hits_of(reader, [1, 2, 3, 4]) == [1, 2, 3, 4]
