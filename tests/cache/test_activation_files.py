"""Whatever has happened to the files: a hit is what was put, anything else is a miss, and writing repairs it."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash
from selection import few
from stored_rows import (
    FINGERPRINT,
    Child,
    folder_of,
    get,
    hits_of,
    key_of,
    open_writer,
    put,
)

from hf_pipetransformer.cache.activation_files import (
    FORMAT_VERSION,
    HEADER_BYTES,
    GenerationFiles,
    Meta,
    Record,
    transfer,
)
from hf_pipetransformer.cache.activation_store import StoreFull
from hf_pipetransformer.cache.file_store import FileReader, FileStore, FileWriter
from hf_pipetransformer.own_files import MARKER, OwnFolder


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


@pytest.mark.parametrize("most", [1, 3, 5, 100])
def test_transfer_goes_on_after_a_partial_call(most: int) -> None:
    written = bytearray(11)

    def write(_: int, buffers: list[memoryview], offset: int) -> int:
        part = b"".join(buffers)[:most]
        written[offset : offset + len(part)] = part
        return len(part)

    assert transfer(write, 0, [b"abc", b"defg", b"hi"], 2) == 9
    assert bytes(written) == b"\0\0abcdefghi"


def test_transfer_stops_where_the_file_ends() -> None:
    answers = iter([4, 0])
    assert transfer(lambda *_: next(answers), 0, [bytearray(3), bytearray(3)], 0) == 4


def test_a_batch_larger_than_one_system_call_takes(store: FileStore, reader: FileReader) -> None:
    count = os.sysconf("SC_IOV_MAX")  # of buffers; each entry has two
    with closing(open_writer(store, capacity=count)) as writer:
        assert put(writer, range(count), nbytes=10) == count
    assert hits_of(reader, range(count), nbytes=10) == list(range(count))


def test_a_damaged_entry_is_stored_again(store: FileStore, reader: FileReader, writer: FileWriter) -> None:
    put(writer, [1, 2])
    with open(folder_of(store) / "segment-0", "r+b") as segment:
        segment.seek(HEADER_BYTES + 100)
        segment.write(b"\0\1\2\3\4\5\6\7")
    assert hits_of(reader, [1, 2]) == [2]
    assert put(writer, [1, 2]) == 1
    assert hits_of(reader, [1, 2]) == [1, 2]


def test_a_new_run_appends_behind_what_it_finds(store: FileStore, reader: FileReader) -> None:
    for numbers, tail in (([1, 2], b"garbage"), ([3], b""), ([4], b"")):
        with closing(open_writer(store)) as writer:
            assert put(writer, numbers) == len(numbers)
        with open(folder_of(store) / "segment-0", "ab") as segment:
            segment.write(tail)
    assert hits_of(reader, [1, 2, 3, 4]) == [1, 2, 3, 4]
    os.truncate(folder_of(store) / "segment-0", 300)  # within the second entry
    with closing(open_writer(store)) as writer:
        assert put(writer, [5]) == 1
    assert hits_of(reader, [1, 2, 3, 4, 5]) == [1, 5]


def damage(folder: Path, rng: random.Random) -> str:
    """Do something bad to one of the files but the marker, without which the store is refused; return what it was."""
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
        length = min(rng.choice([8, 16, 32, 232, 512]), b - a, len(content) - b)
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


@pytest.mark.parametrize("seeds", few([range(first, first + 50) for first in (0, 50, 100, 150)], range(50)))
def test_damaged_files_give_misses_and_are_repaired_by_writing(seeds: range, tmp_path: Path) -> None:
    numbers = {(3, "a"): range(30), (5, "a"): range(20, 50)}
    whole = FileStore(tmp_path / "whole")
    for generation, mine in numbers.items():
        for rank in (0, 1):
            with closing(whole.writer(*generation, writer=rank, capacity=40)) as writer:
                put(writer, mine[rank::2])
    num_hits = 0
    for seed in seeds:
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
                fresh.prefetch([key_of(n) for n in mine])
                num_hits += len(hits_of(fresh, mine))
                writer = stack.enter_context(closing(store.writer(*generation, writer=0, capacity=40)))
                put(writer, mine)
                repaired = stack.enter_context(closing(store.reader(*generation)))
                assert hits_of(repaired, mine) == list(mine), (seed, what)
        shutil.rmtree(store.folder)
    assert len(seeds) * 60 * 0.5 < num_hits < len(seeds) * 60  # the damage was felt, and not everywhere


@pytest.mark.parametrize(
    "record",
    [
        Record(2**64 - 1, 200, 0),
        Record(2**63 - 1, 200, 0),
        Record(2**62, 200, 0),
        Record(0, 2**32 - 1, 0),
        Record(0, 200, 65535),
        Record(1, 200, 0),
        Record(200 + HEADER_BYTES, 200, 0),  # of another key
    ],
)
def test_a_record_that_leads_nowhere_is_a_miss(
    store: FileStore, reader: FileReader, writer: FileWriter, record: Record
) -> None:
    put(writer, [1, 2])
    files = GenerationFiles(folder_of(store), os.O_RDWR)
    with closing(files):
        assert files.insert(key_of(1), record)  # with a valid check
    assert hits_of(reader, [1, 2]) == [2]
    assert get(reader, [key_of(1)], [100]) == [None]
    reader.prefetch([key_of(1)])
    assert put(writer, [1]) == 1
    assert hits_of(reader, [1, 2]) == [1, 2]


def _meta(**changes: Any) -> str:
    """With a checksum that agrees."""
    content = {"version": FORMAT_VERSION, "num_buckets": 4, "facts": {}} | changes
    checksum = xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
    return json.dumps({**content, "checksum": checksum})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[" * 100_000,
        "[1, 2]",
        "\udcff",
        _meta(version=FORMAT_VERSION + 1),
        _meta(num_buckets=0),
        _meta(num_buckets=2**40),
        _meta(num_buckets="4"),
        _meta(facts=None),
        Meta(4, {"features": [384]}).to_json().replace("384", "385"),
        None,
    ],
)
def test_a_generation_without_sound_meta_is_absent_until_it_is_written_anew(
    store: FileStore, reader: FileReader, content: str | None
) -> None:
    with closing(open_writer(store)) as writer:
        put(writer, [1])
    meta = folder_of(store) / "meta.json"
    if content is None:
        meta.unlink()
    else:
        meta.write_bytes(content.encode(errors="surrogateescape"))
    assert hits_of(reader, [1]) == []
    assert reader.facts is None
    reader.prefetch([key_of(1)])
    with closing(store.writer(3, FINGERPRINT, writer=0, capacity=64, facts={"made": "anew"})) as writer:
        assert store.nbytes() == 0
        assert put(writer, [1, 2]) == 2
    assert hits_of(reader, [1, 2]) == [1, 2]
    assert reader.facts == {"made": "anew"}
    assert OwnFolder(store.folder).names() == [folder_of(store).name]


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    OwnFolder(tmp_path / "store").create()
    store = FileStore(tmp_path / "store")
    folder_of(store).write_text("somebody's")
    with pytest.raises(NotADirectoryError):
        open_writer(store)
    with closing(store.reader(3, FINGERPRINT)) as reader:
        assert hits_of(reader, [1]) == []
    assert folder_of(store).read_text() == "somebody's"
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        open_writer(FileStore(tmp_path / "file"))


def check_what_a_full_disk_leaves(store: FileStore, writer: FileWriter) -> int:
    """Put batches of four, each twice the size of the last, until there is no space; return how many were stored."""
    with closing(store.reader(3, FINGERPRINT)) as reader:
        stored: list[int] = []
        lengths = [1000 << n for n in range(20)]
        for batch, nbytes in enumerate(lengths):
            mine = [n + 4 * batch for n in range(4)]
            before = store.nbytes()
            try:
                put(writer, mine, nbytes)
            except OSError as error:
                assert error.errno in (errno.ENOSPC, errno.EFBIG)
                assert not isinstance(error, StoreFull)
                assert store.nbytes() == before  # taken back
                assert hits_of(reader, mine, nbytes) == []
                break
            stored += mine
        else:
            pytest.fail("the disk was never full")
        assert put(writer, [1000], 500) == 1  # so much there still is
        assert hits_of(reader, [1000], 500) == [1000]
        for n in stored:
            assert hits_of(reader, [n], lengths[n // 4]) == [n]
        return len(stored)


def limited_file_size(folder: Path) -> int:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    store = FileStore(folder)
    with closing(open_writer(store)) as writer:
        return check_what_a_full_disk_leaves(store, writer)


def test_limited_file_size(tmp_path: Path) -> None:
    with Child(limited_file_size, tmp_path) as child:
        assert child.result() >= 4


def test_write_that_fails_half_way(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev
    space = 1 << 20

    def until_full(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal space
        if space == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = b"".join(buffers)[:space]
        space -= pwritev(descriptor, [part], offset)
        return len(part)

    monkeypatch.setattr(os, "pwritev", until_full)
    with closing(open_writer(store)) as writer, closing(store.reader(3, FINGERPRINT)) as reader:
        assert put(writer, [0, 1], 300_000) == 2
        size = store.nbytes()
        with pytest.raises(OSError, match="No space left"):
            put(writer, [2, 3], 300_000)
        assert space == 0  # one of them was written completely
        assert store.nbytes() == size
        assert hits_of(reader, range(4), 300_000) == [0, 1]
        space = 1 << 20
        assert put(writer, [2, 3], 300_000) == 2
        assert hits_of(reader, range(4), 300_000) == [0, 1, 2, 3]


def test_a_table_that_cannot_be_written(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(open_writer(store)) as writer, closing(store.reader(3, FINGERPRINT)) as reader:
        put(writer, [1])
        pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:20], offset))
        with pytest.raises(OSError, match="No space left"):
            put(writer, [2, 3])
        monkeypatch.undo()
        assert hits_of(reader, [1, 2, 3]) == [1]
        assert put(writer, [2, 3]) == 2
        assert hits_of(reader, [1, 2, 3]) == [1, 2, 3]


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk"):
        store = FileStore(tmp_path / "disk" / "store")
        with closing(open_writer(store)) as writer:
            assert check_what_a_full_disk_leaves(store, writer) >= 4
