"""What readers, writers and deletions of the activation store do, in one process and in several."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from stored_rows import (
    FINGERPRINT,
    SECONDS,
    Child,
    folder_of,
    get,
    hits_of,
    key_of,
    open_writer,
    payload_of,
    put,
)

from hf_pipetransformer.cache.activation_files import HEADER_BYTES, RECORDS_PER_BUCKET
from hf_pipetransformer.cache.activation_store import StoreFull
from hf_pipetransformer.cache.file_store import FileReader, FileStore, FileWriter
from hf_pipetransformer.own_files import MARKER


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


def test_round_trip(store: FileStore, reader: FileReader) -> None:
    lengths = [1, 7, 4096, 73_728]
    keys = [key_of(n) for n in range(4)]
    rows = [payload_of(n, nbytes) for n, nbytes in enumerate(lengths)]
    with closing(open_writer(store)) as writer:
        assert writer.put(keys[:2], rows[:2]) == 2
        assert writer.put(keys[2:], [rows[2].reshape(64, 64), memoryview(rows[3])]) == 2
        assert writer.num_entries == 4
        assert writer.nbytes == store.nbytes() == sum(lengths) + 4 * HEADER_BYTES
    assert get(reader, keys, lengths) == [row.tobytes() for row in rows]
    assert get(reader, keys[::-1], lengths[::-1]) == [row.tobytes() for row in rows[::-1]]
    square = np.zeros((64, 64), np.uint8)
    assert reader.read_into(keys[2:3], [square]) == [True]
    assert square.tobytes() == rows[2].tobytes()


def test_what_was_not_put_is_a_miss(store: FileStore, writer: FileWriter) -> None:
    put(writer, [1])
    with closing(store.reader(3, FINGERPRINT)) as reader:
        assert hits_of(reader, [1, 2]) == [1]
        assert hits_of(reader, [1], nbytes=199) == hits_of(reader, [1], nbytes=201) == []
    for num_frozen, fingerprint in ((3, "another-model"), (4, FINGERPRINT)):
        with closing(store.reader(num_frozen, fingerprint)) as other:
            assert hits_of(other, [1]) == []


def test_a_reader_may_be_there_before_the_generation(store: FileStore, reader: FileReader) -> None:
    assert hits_of(reader, [1]) == []
    assert reader.facts is None
    with closing(open_writer(store)) as writer:
        put(writer, [1])
    assert hits_of(reader, [1]) == [1]


def test_what_is_there_is_not_written_again(store: FileStore, writer: FileWriter) -> None:
    assert put(writer, [1, 2, 1]) == 2
    nbytes = store.nbytes()
    with closing(open_writer(store, writer=1)) as other:
        assert put(other, [2, 1]) == 0
        assert store.nbytes() == nbytes
        assert other.num_present == 2
        assert put(other, [2, 3]) == 1
        assert other.num_entries == 1 and other.num_present == 3


def test_what_a_killed_process_was_making_is_removed_later(store: FileStore) -> None:
    put(open_writer(store), [1])
    new, old = store.folder / ".new-fresh", store.folder / ".doubtful-old"
    for folder in (new, old):
        folder.mkdir()
        (folder / "segment-0").write_bytes(b"left behind")
    os.utime(old, (0, 0))
    store.delete(9, "none")
    assert new.is_dir() and not old.exists()


def test_a_superseded_generation_is_evicted_first_unless_somebody_uses_it(store: FileStore) -> None:
    now = time.time()
    for number in (3, 4):
        store.writer(number, FINGERPRINT, writer=0, capacity=4).close()
        store.mark_superseded(number, FINGERPRINT)
    store.mark_used(4, FINGERPRINT)  # by another training
    assert store.evict(now - 60)
    assert store.generations() == [(4, FINGERPRINT)]
    assert not store.evict(now - 60)


def test_what_another_training_marks_is_not_evicted_when_one_needs_it_no_more(tmp_path: Path) -> None:
    """Though the other one marks seldom, and has done so before."""
    now = time.time()
    ours, theirs = (FileStore(tmp_path / "store", user=user) for user in ("ours", "theirs"))
    for store in (theirs, ours):
        store.writer(3, FINGERPRINT, writer=0, capacity=4).close()
    ours.mark_superseded(3, FINGERPRINT)
    assert not ours.evict(now - 60)
    theirs.mark_superseded(3, FINGERPRINT)
    assert ours.evict(now - 60)


def test_marks_of_a_training_that_is_long_over_keep_nothing(store: FileStore) -> None:
    store.writer(3, FINGERPRINT, writer=0, capacity=4).close()
    folder = store.folder / f"003-{FINGERPRINT}"
    for path in (*folder.glob("used-*"), folder):
        os.utime(path, (SECONDS, SECONDS))
    assert store.evict(time.time() - 60)


def test_a_full_table_turns_rows_away_and_keeps_what_it_has(store: FileStore, reader: FileReader) -> None:
    with closing(open_writer(store, capacity=1)) as writer:
        room = RECORDS_PER_BUCKET
        assert put(writer, range(room - 1)) == room - 1
        assert put(writer, range(room - 1, 40)) == 1  # both looked as if they fitted
        nbytes = store.nbytes()
        assert put(writer, range(40)) == 0
        assert store.nbytes() == nbytes
    assert hits_of(reader, range(40)) == list(range(room))


def test_modes(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = FileStore(tmp_path / "a" / "store")
        with closing(open_writer(store)) as writer:
            put(writer, [1])
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [store.folder, *store.folder.rglob("*")]}
    files = (MARKER, "meta.json", "table", "segment-0", "used-anybody")
    assert modes == {"store": 0o700, f"003-{FINGERPRINT}": 0o700, **dict.fromkeys(files, 0o600)}


def test_the_first_writer_decides_about_a_generation(store: FileStore, reader: FileReader) -> None:
    with (
        closing(store.writer(3, FINGERPRINT, writer=0, capacity=1000, facts={"dtype": "float32"})) as first,
        closing(store.writer(3, FINGERPRINT, writer=1, capacity=1, facts={"dtype": "bfloat16"})) as second,
    ):
        assert put(second, range(100)) == 100  # in a table for 1000 rows
        assert put(first, range(100)) == 0
    assert reader.facts == {"dtype": "float32"}


def test_generations(store: FileStore) -> None:
    assert store.generations() == []
    assert store.nbytes() == 0
    open_writer(store).close()
    store.delete(3, FINGERPRINT)
    (store.folder / "notes.txt").write_text("somebody's")
    (store.folder / "010-not a generation").mkdir()
    for num_frozen, fingerprint in ((1000, "a"), (3, "b_-B"), (3, "a"), (0, "a")):
        with closing(store.writer(num_frozen, fingerprint, writer=0, capacity=1)) as writer:
            put(writer, [num_frozen])
    assert store.generations() == [(0, "a"), (3, "a"), (3, "b_-B"), (1000, "a")]
    assert store.nbytes() == 4 * (200 + HEADER_BYTES)
    store.delete(3, "a")
    store.delete(3, "a")
    assert store.generations() == [(0, "a"), (3, "b_-B"), (1000, "a")]
    assert store.nbytes() == 3 * (200 + HEADER_BYTES)
    names = {path.name for path in store.folder.iterdir()}
    assert names == {MARKER, "notes.txt", "010-not a generation", "000-a", "003-b_-B", "1000-a"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda store: store.reader(-1, "a"), "num_frozen is -1"),
        (lambda store: store.reader(1, "../a"), "fingerprint is '../a'"),
        (lambda store: store.delete(1, ""), "fingerprint is ''"),
        (lambda store: store.writer(1, "a", writer=-1, capacity=1), "writer is -1"),
        (lambda store: store.writer(1, "a", writer=2**16, capacity=1), "writer is 65536"),
        (lambda store: store.writer(1, "a", writer=0, capacity=0), "capacity is 0"),
        (lambda store: store.reader(1, "a").prefetch([b"short"]), "5 bytes"),
        (lambda store: store.reader(1, "a").read_into([bytes(16)], []), "1 keys and 0 samples"),
        (lambda store: store.writer(1, "a", writer=0, capacity=1).put([bytes(17)], [np.zeros(1)]), "17 bytes"),
        (lambda store: FileStore("a", max_bytes=-1), "max_bytes is -1"),
    ],
)
def test_mistakes_are_told(store: FileStore, call: Callable[[FileStore], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        call(store)


def test_a_row_may_be_too_large(writer: FileWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_pipetransformer.cache.file_store.MAX_PAYLOAD_BYTES", 199)
    with pytest.raises(ValueError, match="200 bytes, but at most 199"):
        put(writer, [1])


def open_files(store: FileStore) -> list[str]:
    descriptors = Path("/proc/self/fd").iterdir()
    targets = [os.readlink(path) for path in descriptors if path.is_symlink()]
    return sorted(target for target in targets if target.startswith(str(store.folder)))


def test_descriptors_are_closed(store: FileStore) -> None:
    folder = str(folder_of(store))
    with closing(open_writer(store)) as writer, closing(store.reader(3, FINGERPRINT)) as reader:
        put(writer, [1])
        assert hits_of(reader, [1]) == [1]
        assert put(writer, [1]) == 0
        files = [folder, f"{folder}/segment-0", f"{folder}/table"]
        assert open_files(store) == sorted([*files, *files, f"{folder}/segment-0"])  # one to write to
    assert open_files(store) == []
    (folder_of(store) / "meta.json").write_text("{")
    with closing(store.reader(3, FINGERPRINT)) as reader:
        assert hits_of(reader, [1]) == []
        assert open_files(store) == []


def test_a_closed_writer_writes_nowhere(store: FileStore, tmp_path: Path) -> None:
    writer = open_writer(store)
    put(writer, [1])
    writer.close()
    with ExitStack() as stack:
        for n in range(10):  # files that get the descriptors of the closed ones
            stack.enter_context(open(tmp_path / str(n), "w+b"))
        with pytest.raises(OSError):
            put(writer, [2])
        assert all((tmp_path / str(n)).stat().st_size == 0 for n in range(10))


def test_only_readers_and_stores_may_be_pickled(store: FileStore, writer: FileWriter) -> None:
    put(writer, [1])
    with closing(store.reader(3, FINGERPRINT)) as reader:
        assert hits_of(reader, [1]) == [1]
        copy = pickle.loads(pickle.dumps(reader))
    with closing(copy):
        assert hits_of(copy, [1]) == [1]
    assert pickle.loads(pickle.dumps(store)).generations() == [(3, FINGERPRINT)]
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        pickle.dumps(writer)


def test_prefetch(store: FileStore, reader: FileReader, writer: FileWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *what: asked.append(what))
    put(writer, [1, 2])
    reader.prefetch([key_of(2), key_of(3), key_of(1)])
    size = 200 + HEADER_BYTES
    assert asked == [(size, size, os.POSIX_FADV_WILLNEED), (0, size, os.POSIX_FADV_WILLNEED)]
    monkeypatch.delattr(os, "posix_fadvise")
    reader.prefetch([key_of(1)])
    assert len(asked) == 2


KEYS = [bytes(16), b"\xff" * 16, *map(key_of, range(10))]


class StoreMachine(RuleBasedStateMachine):
    """Puts, gets, new processes and deletions in any order, against dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.store = FileStore(self.folder)
        self.contents: dict[tuple[int, str], dict[bytes, bytes]] = {g: {} for g in ((1, "a"), (2, "a"), (1, "b"))}
        self.readers = {g: self.store.reader(*g) for g in self.contents}
        self.writers: dict[tuple[tuple[int, str], int], FileWriter] = {}
        self.outdated: set[tuple[tuple[int, str], int]] = set()

    generations = st.sampled_from([(1, "a"), (2, "a"), (1, "b")])

    @rule(
        generation=generations,
        number=st.integers(0, 2),
        rows=st.lists(st.tuples(st.sampled_from(KEYS), st.binary(min_size=1, max_size=9)), max_size=5),
    )
    def put(self, generation: tuple[int, str], number: int, rows: list[tuple[bytes, bytes]]) -> None:
        name = (generation, number)
        if name not in self.writers:
            self.writers[name] = self.store.writer(*generation, writer=number, capacity=20)
        keys, payloads = [key for key, _ in rows], [memoryview(payload) for _, payload in rows]
        if name in self.outdated:
            with closing(self.writers.pop(name)) as writer, pytest.raises(OSError, match="deleted"):
                writer.put(keys, payloads)
            self.outdated.remove(name)
            return
        known = self.contents[generation]
        new: dict[bytes, bytes] = {}
        for key, payload in rows:
            if key not in new and len(known.get(key, b"")) != len(payload):
                new[key] = payload
        assert self.writers[name].put(keys, payloads) == len(new)
        known.update(new)

    @rule(generation=generations, number=st.integers(0, 2))
    def end_writer(self, generation: tuple[int, str], number: int) -> None:
        if (writer := self.writers.pop((generation, number), None)) is not None:
            writer.close()
            self.outdated.discard((generation, number))

    @rule(generation=generations, again=st.booleans())
    def new_reader(self, generation: tuple[int, str], again: bool) -> None:
        old = self.readers[generation]
        self.readers[generation] = pickle.loads(pickle.dumps(old)) if again else self.store.reader(*generation)
        old.close()

    @rule(generation=generations)
    def delete(self, generation: tuple[int, str]) -> None:
        self.store.delete(*generation)
        self.contents[generation].clear()
        self.outdated.update(name for name in self.writers if name[0] == generation)

    @invariant()
    def readers_hit_what_was_put(self) -> None:
        for generation, known in self.contents.items():
            lengths = [len(known.get(key, b"?")) for key in KEYS]
            assert get(self.readers[generation], KEYS, lengths) == [known.get(key) for key in KEYS]

    def teardown(self) -> None:
        for opened in (*self.readers.values(), *self.writers.values()):
            opened.close()
        shutil.rmtree(self.folder)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)


def test_deletion_under_readers_and_writers(store: FileStore, reader: FileReader, writer: FileWriter) -> None:
    put(writer, [1])
    assert hits_of(reader, [1]) == [1]
    store.delete(3, FINGERPRINT)
    assert hits_of(reader, [1]) == []
    reader.prefetch([key_of(1)])
    for number in (1, 2):  # also what it could still read itself
        with pytest.raises(OSError, match="deleted") as error:
            put(writer, [number])
        assert error.value.errno == errno.ESTALE
    with closing(open_writer(store, capacity=1000)) as other:
        assert put(other, [1, 2]) == 2
    assert hits_of(reader, [1, 2]) == [1, 2]
    with pytest.raises(OSError, match="deleted"):
        put(writer, [1])


def test_a_writer_notices_that_its_segment_is_gone(store: FileStore, writer: FileWriter) -> None:
    put(writer, [1])
    (folder_of(store) / "segment-0").unlink()
    with pytest.raises(OSError, match="deleted"):
        put(writer, [2])


def test_a_reader_gets_misses_when_everything_is_gone(
    store: FileStore, reader: FileReader, writer: FileWriter
) -> None:
    put(writer, [1])
    assert hits_of(reader, [1]) == [1]
    shutil.rmtree(store.folder)
    assert hits_of(reader, [1]) == []


def test_what_a_killed_process_had_not_finished_deleting(store: FileStore, writer: FileWriter) -> None:
    put(writer, [1])
    size = store.nbytes()
    folder_of(store).rename(store.folder / ".deleted-0")
    assert store.nbytes() == size  # it takes up space
    assert store.generations() == []
    store.writer(5, "a", writer=0, capacity=1).close()
    assert store.nbytes() == 0
    assert {path.name for path in store.folder.iterdir()} == {MARKER, "005-a"}


def test_a_sound_generation_is_not_discarded(store: FileStore, reader: FileReader, writer: FileWriter) -> None:
    put(writer, [1])
    store._discard_damaged(folder_of(store))  # found it damaged, but another process has been quicker
    assert put(writer, [2]) == 1
    assert hits_of(reader, [1, 2]) == [1, 2]
    assert {path.name for path in store.folder.iterdir()} == {MARKER, folder_of(store).name}


def test_size_limit(tmp_path: Path) -> None:
    entry = 200 + HEADER_BYTES
    store = FileStore(tmp_path / "store", max_bytes=10 * entry)
    with (
        closing(store.writer(1, "a", writer=0, capacity=64)) as first,
        closing(store.writer(2, "a", writer=0, capacity=64)) as second,
        closing(store.writer(2, "a", writer=1, capacity=64)) as third,
        closing(store.reader(2, "a")) as reader,
    ):
        assert put(first, range(4)) == 4
        assert put(second, range(4)) == 4
        with pytest.raises(StoreFull, match=f"max_bytes is {10 * entry}"):
            put(third, [4, 5, 6])
        assert put(third, [2, 3, 4, 5]) == 2  # two are there
        assert store.nbytes() == 10 * entry
        with pytest.raises(StoreFull):
            put(second, [6])
        assert store.nbytes() == 10 * entry
        assert put(second, range(6)) == 0
        assert hits_of(reader, range(8)) == list(range(6))
        store.delete(1, "a")
        assert put(second, [6]) == 1
        assert hits_of(reader, range(8)) == list(range(7))
    assert pickle.loads(pickle.dumps(StoreFull(28, "full", "folder"))).args == (28, "full")


def use_as_nobody(folder: Path) -> tuple[list[int], list[str]]:
    os.chdir(folder)  # whoever may enter the folders above
    if os.geteuid() == 0:  # root may write everywhere
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    store = FileStore("store")
    errors = []
    for num_frozen in (3, 4):
        try:
            store.writer(num_frozen, FINGERPRINT, writer=0, capacity=1)
        except OSError as error:
            errors.append(errno.errorcode[error.errno or 0])
    try:
        store.delete(3, FINGERPRINT)
    except OSError as error:
        errors.append(errno.errorcode[error.errno or 0])
    with closing(store.reader(3, FINGERPRINT)) as reader:
        return hits_of(reader, [1, 2]), errors


def test_a_large_table_counts_in_the_limit(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", max_bytes=4 * 2**20)
    writer = store.writer(1, "f", writer=0, capacity=2**18)
    written = 0
    with pytest.raises(StoreFull):
        for batch in range(64):  # 64 x 64 entries of 16 bytes, in as many pages of the table
            keys = [xxhash.xxh3_128_digest(b"%d %d" % (batch, number)) for number in range(64)]
            written += writer.put(keys, [np.zeros(16, dtype=np.uint8) for _ in keys])
    assert 256 < written < 64 * 64
    writer.close()


def test_read_only_folder(store: FileStore) -> None:
    with closing(open_writer(store)) as writer:
        put(writer, [1])
    paths = [store.folder.parent, store.folder, *store.folder.rglob("*")]
    for path in paths:
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        with Child(use_as_nobody, store.folder.parent) as child:
            assert child.result() == ([1], ["EACCES", "EACCES", "EACCES"])
    finally:
        for path in paths:
            path.chmod(0o700)


def read_all(reader: FileReader, numbers: Sequence[int]) -> list[int]:
    return hits_of(reader, numbers)


@pytest.mark.slow
def test_readers_that_were_opened_before_processes_were_started(
    store: FileStore, reader: FileReader, writer: FileWriter
) -> None:
    put(writer, range(20))
    assert hits_of(reader, range(30)) == list(range(20))
    with Child(read_all, reader, range(30), method="spawn") as spawned, Child(read_all, reader, range(30)) as forked:
        assert hits_of(reader, range(30)) == list(range(20))
        assert forked.result() == list(range(20))
        assert spawned.result() == list(range(20))


def write_until_killed(folder: Path, moment: str) -> None:
    store = FileStore(folder)
    writer = open_writer(store, capacity=10_000)
    put(writer, range(10), nbytes=20_000)
    pwritev = os.pwritev

    def half_of_it(descriptor: int, buffers: list[memoryview], offset: int) -> None:
        everything = b"".join(buffers)
        pwritev(descriptor, [everything[: len(everything) // 2]], offset)
        os.kill(os.getpid(), signal.SIGKILL)

    def nothing(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "in the entries":
        os.pwritev = half_of_it  # type: ignore[assignment]
    elif moment == "before the records":
        os.pwrite = nothing  # type: ignore[assignment]
    for n in range(10, 10_000, 10):
        put(writer, range(n, n + 10), nbytes=20_000)


@pytest.mark.parametrize("moment", ["in the entries", "before the records", "any", "any"])
def test_killed_writer(store: FileStore, reader: FileReader, moment: str) -> None:
    with Child(write_until_killed, store.folder, moment) as child:
        if moment == "any":
            deadline = time.monotonic() + SECONDS
            while store.nbytes() < 1_000_000 and time.monotonic() < deadline:
                time.sleep(random.uniform(0, 0.003))
            child.process.kill()
        assert child.wait() == -signal.SIGKILL
    size = store.nbytes()
    numbers = range(size // 20_000 + 20)
    found = hits_of(reader, numbers, nbytes=20_000)
    assert found[:10] == list(range(10))
    assert found == list(range(len(found)))
    if moment != "any":
        assert len(found) == 10
        assert size == 20 * (20_000 + HEADER_BYTES)  # half of it is garbage, or nobody's
    with closing(open_writer(store)) as writer:
        assert put(writer, numbers, nbytes=20_000) == len(numbers) - len(found)
    assert hits_of(reader, numbers, nbytes=20_000) == list(numbers)


def write_everything(folder: Path, rank: int, seed: int, barrier: Any) -> int:
    order = list(range(300))
    random.Random(seed).shuffle(order)
    with closing(open_writer(FileStore(folder), writer=rank, capacity=300)) as writer:
        barrier.wait(SECONDS)
        for start in range(0, 300, 5):
            put(writer, order[start : start + 5])
        return writer.num_entries


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2, 3), (0, 0)], ids=["two", "four", "of two jobs"])
def test_writers_at_the_same_time(store: FileStore, reader: FileReader, ranks: tuple[int, ...]) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(len(ranks))
    with ExitStack() as stack:
        writers = [
            stack.enter_context(Child(write_everything, store.folder, rank, seed, barrier))
            for seed, rank in enumerate(ranks)
        ]
        while any(child.process.is_alive() for child in writers):
            hits_of(reader, range(300))
        written = sum(child.result() for child in writers)
    found = hits_of(reader, range(300))
    assert len(found) > 270  # a few may be lost
    assert written >= 300
    with closing(open_writer(store)) as writer:
        assert put(writer, range(300)) == 300 - len(found)
    assert hits_of(reader, range(300)) == list(range(300))


def open_and_put(folder: Path, rank: int, barrier: Any) -> None:
    barrier.wait(SECONDS)
    with closing(open_writer(FileStore(folder), writer=rank, capacity=1000 * (1 + rank))) as writer:
        barrier.wait(SECONDS)
        with suppress(OSError):  # who opened what another then replaced, is told so
            put(writer, [rank])
            return
    with closing(open_writer(FileStore(folder), writer=rank)) as writer:
        put(writer, [rank])


@pytest.mark.parametrize("before", ["nothing", "another version"])
def test_writers_that_make_a_generation_at_the_same_time(tmp_path: Path, before: str) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(4)
    for attempt in range(10):
        store = FileStore(tmp_path / str(attempt))
        if before == "another version":
            open_writer(store).close()
            (folder_of(store) / "meta.json").write_text(json.dumps({"version": 0}))
        with ExitStack() as stack:
            children = [stack.enter_context(Child(open_and_put, store.folder, rank, barrier)) for rank in range(4)]
            for child in children:
                child.result()
        with closing(store.reader(3, FINGERPRINT)) as reader:
            assert hits_of(reader, range(5)) == [0, 1, 2, 3]


def write_and_delete(folder: Path, rank: int) -> int:
    store = FileStore(folder)
    written = 0
    for _ in range(100):
        with closing(open_writer(store, writer=rank, capacity=300)) as writer:
            try:
                written += put(writer, range(10))
            except OSError as error:
                assert error.errno == errno.ESTALE
        store.delete(3, FINGERPRINT)
    return written


def test_reading_while_others_write_and_delete(store: FileStore, reader: FileReader) -> None:
    hits = 0
    with Child(write_and_delete, store.folder, 0) as first, Child(write_and_delete, store.folder, 1) as second:
        while first.process.is_alive() or second.process.is_alive():
            hits += len(hits_of(reader, range(10)))
        assert first.result() + second.result() > 500
    assert hits > 0
    assert hits_of(reader, range(10)) == []
    assert [path.name for path in store.folder.iterdir()] == [MARKER]


def test_what_has_not_been_used_for_longest_is_evicted_first(store: FileStore) -> None:
    names = [(2, "old"), (3, "older"), (4, "marked"), (5, "new")]
    for name in names:
        store.writer(*name, writer=0, capacity=8).close()
    for age, name in ((20, names[0]), (30, names[1]), (40, names[2])):
        folder = store.folder / f"{name[0]:03d}-{name[1]}"
        for path in (*folder.glob("used-*"), folder):
            os.utime(path, (SECONDS, time.time() - age))
    store.mark_used(*names[2])
    store.mark_used(9, "nowhere")
    began = time.time() - 10
    assert store.evict(began) and store.generations() == [names[0], *names[2:]]
    assert store.evict(began) and store.generations() == names[2:]
    assert not store.evict(began) and store.generations() == names[2:]


def test_probing_creates_nothing(tmp_path: Path) -> None:
    """All processes probe a folder that is not there yet."""
    assert FileStore(tmp_path / "new" / "store").why_unwritable() is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "Not a directory" in str(FileStore(tmp_path / "file" / "store").why_unwritable())
