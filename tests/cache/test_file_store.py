"""What readers, writers and deletions of the activation store do, in one process and in several."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from stored_rows import FINGERPRINT, SECONDS, Child, folder_of, get, hits_of, key_of, open_writer, payload_of, put

from hf_pipetransformer.cache.activation_files import FileReader, FileWriter
from hf_pipetransformer.cache.file_store import FileStore, StoreFull
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


def set_last_used(store: FileStore, num_frozen: int, fingerprint: str, seconds: float) -> None:
    folder = store.folder / f"{num_frozen:03d}-{fingerprint}"
    for path in (*folder.glob("used-*"), folder):
        os.utime(path, (seconds, seconds))


# ------------------------------------------------------------------------------------ one process
def test_round_trip(store: FileStore, reader: FileReader, writer: FileWriter) -> None:
    lengths = [1, 7, 4096, 73_728]
    keys = [key_of(n) for n in range(4)]
    rows = [payload_of(n, nbytes) for n, nbytes in enumerate(lengths)]
    assert writer.put(keys[:2], rows[:2]) == 2
    assert writer.put(keys[2:], [rows[2].reshape(64, 64), memoryview(rows[3])]) == 2
    assert get(reader, keys[::-1], lengths[::-1]) == [row.tobytes() for row in rows[::-1]]
    square = np.zeros((64, 64), np.uint8)
    assert reader.read_into(keys[2:3], [square]) == [True]
    assert square.tobytes() == rows[2].tobytes()


def test_what_was_not_put_is_a_miss(store: FileStore, writer: FileWriter, reader: FileReader) -> None:
    assert hits_of(reader, [1]) == []  # there before anything was put
    put(writer, [1])
    assert hits_of(reader, [1, 2]) == [1]
    assert hits_of(reader, [1], nbytes=199) == hits_of(reader, [1], nbytes=201) == []
    other_half = key_of(1)[:8] + key_of(2)[8:]
    assert get(reader, [other_half], [200]) == [None]
    for num_frozen, fingerprint in ((3, "another-model"), (4, FINGERPRINT)):
        with closing(store.reader(num_frozen, fingerprint)) as other:
            assert hits_of(other, [1]) == [] and other.facts is None


def test_modes(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = FileStore(tmp_path / "a" / "store")
        with closing(open_writer(store)) as writer:
            put(writer, [1])
    finally:
        os.umask(before)
    paths = [store.folder, *store.folder.rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}


def test_the_first_writer_decides_about_a_generation(store: FileStore, reader: FileReader) -> None:
    with (
        closing(store.writer(3, FINGERPRINT, {"dtype": "float32"})) as first,
        closing(store.writer(3, FINGERPRINT, {"dtype": "bfloat16"})) as second,
    ):
        assert first.facts == second.facts == reader.facts == {"dtype": "float32"}
        assert put(second, range(100)) == 100
        assert put(first, range(100)) == 0


def test_generations(store: FileStore) -> None:
    assert store.generations() == [] and store.nbytes() == 0
    open_writer(store).close()
    store.delete(3, FINGERPRINT)
    (store.folder / "notes.txt").write_text("somebody's")
    (store.folder / "010-not a generation").mkdir()
    for num_frozen, fingerprint in ((1000, "a"), (3, "b_-B"), (3, "a"), (0, "a")):
        with closing(store.writer(num_frozen, fingerprint)) as writer:
            put(writer, [num_frozen])
    assert store.generations() == [(0, "a"), (3, "a"), (3, "b_-B"), (1000, "a")]
    nbytes = store.nbytes()
    assert nbytes > 4 * 200
    store.delete(3, "a")
    store.delete(3, "a")
    assert store.generations() == [(0, "a"), (3, "b_-B"), (1000, "a")]
    assert store.nbytes() == nbytes * 3 / 4
    names = {path.name for path in store.folder.iterdir()}
    assert names == {MARKER, "notes.txt", "010-not a generation", "000-a", "003-b_-B", "1000-a"}


def open_files(store: FileStore) -> list[str]:
    targets = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [target for target in targets if target.startswith(str(store.folder))]


def test_descriptors_are_closed(store: FileStore, tmp_path: Path) -> None:
    writer = open_writer(store)
    with closing(store.reader(3, FINGERPRINT)) as reader:
        put(writer, [1])
        assert hits_of(reader, [1]) == [1] and open_files(store)
    writer.close()
    assert open_files(store) == []
    with ExitStack() as stack:
        for n in range(10):  # files that get the descriptors of the closed ones
            stack.enter_context(open(tmp_path / str(n), "w+b"))
        with pytest.raises(OSError):
            put(writer, [2])
        assert all((tmp_path / str(n)).stat().st_size == 0 for n in range(10))
    (folder_of(store) / "facts").write_text("{")
    with closing(store.reader(3, FINGERPRINT)) as reader:
        assert hits_of(reader, [1]) == [] and open_files(store) == []


def test_a_batch_is_asked_for_before_it_is_read(
    reader: FileReader, writer: FileWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int, int]] = []
    put(writer, [1, 2])
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *what: asked.append(what))
    assert hits_of(reader, [2, 3, 1]) == [2, 1]
    assert asked == [(200, 200, os.POSIX_FADV_WILLNEED), (0, 200, os.POSIX_FADV_WILLNEED)]
    monkeypatch.delattr(os, "posix_fadvise")
    assert hits_of(reader, [1]) == [1]


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
        rows=st.dictionaries(st.sampled_from(KEYS), st.binary(min_size=1, max_size=9), max_size=5),
    )
    def put(self, generation: tuple[int, str], number: int, rows: dict[bytes, bytes]) -> None:
        name = (generation, number)
        if name not in self.writers:
            self.writers[name] = self.store.writer(*generation)
        known = self.contents[generation]
        # a key always stands for the same bytes
        rows = {key: known.get(key, payload) for key, payload in rows.items()}
        payloads = [memoryview(payload) for payload in rows.values()]
        if name in self.outdated:
            with closing(self.writers.pop(name)) as writer, pytest.raises(OSError, match="deleted"):
                writer.put(list(rows), payloads)
            self.outdated.remove(name)
            return
        assert self.writers[name].put(list(rows), payloads) == len(rows.keys() - known.keys())
        known.update(rows)

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
TestStoreMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True)


# ------------------------------------------------------------------------------------ limits, eviction, deletion
def test_size_limit(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", max_bytes=11 * 20_000)
    with (
        closing(store.writer(1, "a")) as first,
        closing(store.writer(2, "a")) as second,
        closing(store.writer(2, "a")) as third,
        closing(store.reader(2, "a")) as reader,
    ):
        assert put(first, range(4), 20_000) == put(second, range(4), 20_000) == 4
        with pytest.raises(StoreFull, match="max_bytes is 220000"):
            put(third, [4, 5, 6], 20_000)
        assert put(third, [2, 3, 4, 5], 20_000) == 2  # two are there
        with pytest.raises(StoreFull):
            put(second, [6], 20_000)
        assert 10 * 20_000 < store.nbytes() <= 220_000
        assert put(second, range(6), 20_000) == 0
        assert hits_of(reader, range(8), 20_000) == list(range(6))
        store.delete(1, "a")
        assert put(second, [6], 20_000) == 1
    assert pickle.loads(pickle.dumps(StoreFull(28, "full", "folder"))).args == (28, "full")


def test_what_has_not_been_used_for_longest_is_evicted_first(store: FileStore) -> None:
    names = [(2, "old"), (3, "older"), (4, "marked"), (5, "new")]
    for name in names:
        store.writer(*name).close()
    for age, name in ((20, names[0]), (30, names[1]), (40, names[2])):
        set_last_used(store, *name, time.time() - age)
    store.mark_used(*names[2])
    store.mark_used(9, "nowhere")
    began = time.time() - 10
    assert store.evict(began) and store.generations() == [names[0], *names[2:]]
    assert store.evict(began) and store.generations() == names[2:]
    assert not store.evict(began) and store.generations() == names[2:]
    store.mark_superseded(*names[3])
    assert store.evict(began) and store.generations() == [names[2]]


def test_what_another_training_has_marked_is_not_evicted(tmp_path: Path) -> None:
    now = time.time()
    ours, theirs = (FileStore(tmp_path / "store", user=user) for user in ("ours", "theirs"))
    for store in (theirs, ours):
        store.writer(3, FINGERPRINT).close()
    ours.mark_superseded(3, FINGERPRINT)
    assert not ours.evict(now - 60)
    theirs.mark_superseded(3, FINGERPRINT)
    assert ours.evict(now - 60)


def test_what_a_killed_process_had_not_finished_deleting(store: FileStore, writer: FileWriter) -> None:
    put(writer, [1])
    size = store.nbytes()
    folder_of(store).rename(store.folder / ".deleted-0")
    assert store.nbytes() == size  # it takes up space
    assert store.generations() == []
    store.writer(5, "a").close()
    assert {path.name for path in store.folder.iterdir()} == {MARKER, "005-a"}


def test_probing_creates_nothing(tmp_path: Path) -> None:
    """All processes probe a folder that is not there yet."""
    assert FileStore(tmp_path / "new" / "store").why_unwritable() is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "Not a directory" in str(FileStore(tmp_path / "file" / "store").why_unwritable())


# ------------------------------------------------------------------------------------ several processes
def use_as_nobody(folder: Path) -> tuple[list[int], list[str]]:
    os.chdir(folder)  # whoever may enter the folders above
    if os.geteuid() == 0:  # root may write everywhere
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    store = FileStore("store")
    errors = []
    for call in (
        lambda: store.writer(3, FINGERPRINT).put([bytes(16)], [np.ones(1)]),
        lambda: store.delete(3, FINGERPRINT),
    ):
        try:
            call()
        except OSError as error:
            errors.append(errno.errorcode[error.errno or 0])
    with closing(store.reader(3, FINGERPRINT)) as reader:
        return hits_of(reader, [1, 2]), errors


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
            assert child.result() == ([1], ["EACCES", "EACCES"])
    finally:
        for path in paths:
            path.chmod(0o700)


def write_until_killed(folder: Path, moment: str) -> None:
    writer = open_writer(FileStore(folder))
    put(writer, range(10), nbytes=20_000)
    pwrite, num_calls = os.pwrite, 0

    def dies(file: int, content: memoryview, offset: int) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == (5 if moment == "in the payloads" else 11):
            pwrite(file, content[: len(content) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(file, content, offset)

    if moment != "any":
        os.pwrite = dies  # type: ignore[assignment]
    for n in range(10, 10_000, 10):
        put(writer, range(n, n + 10), nbytes=20_000)


@pytest.mark.parametrize("moment", ["in the payloads", "in the records", "any"])
def test_killed_writer(store: FileStore, reader: FileReader, moment: str) -> None:
    with Child(write_until_killed, store.folder, moment) as child:
        if moment == "any":
            deadline = time.monotonic() + SECONDS
            while store.nbytes() < 1_000_000 and time.monotonic() < deadline:
                time.sleep(random.uniform(0, 0.003))
            child.process.kill()
        assert child.wait() == -signal.SIGKILL
    numbers = range(store.nbytes() // 20_000 + 20)
    found = hits_of(reader, numbers, nbytes=20_000)
    assert found == list(range(len(found)))
    assert len(found) == {"in the payloads": 10, "in the records": 15}.get(moment, max(len(found), 10))
    with closing(open_writer(store)) as writer:
        assert put(writer, numbers, nbytes=20_000) == len(numbers) - len(found)
    assert hits_of(reader, numbers, nbytes=20_000) == list(numbers)


def write_everything(folder: Path, seed: int, barrier: Any) -> int:
    order = list(range(300))
    random.Random(seed).shuffle(order)
    with closing(open_writer(FileStore(folder))) as writer:
        barrier.wait(SECONDS)
        return sum(put(writer, order[start : start + 5]) for start in range(0, 300, 5))


def test_writers_at_the_same_time(store: FileStore, reader: FileReader) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(4)
    with ExitStack() as stack:
        writers = [stack.enter_context(Child(write_everything, store.folder, seed, barrier)) for seed in range(4)]
        while any(child.process.is_alive() for child in writers):
            hits_of(reader, range(300))
        assert sum(child.result() for child in writers) >= 300
    assert hits_of(reader, range(300)) == list(range(300))


def open_and_put(folder: Path, rank: int, barrier: Any, attempts: int) -> None:
    for _ in range(attempts):
        barrier.wait(SECONDS)
        with closing(FileStore(folder).writer(3, FINGERPRINT, {"made by": rank})) as writer:
            barrier.wait(SECONDS)
            with suppress(*[OSError] * (attempts - 1)):  # who opened what another then replaced, is told so
                put(writer, [rank])


@pytest.mark.parametrize(("before", "attempts"), [("nothing", 1), ("another version", 2)])
def test_writers_that_make_a_generation_at_the_same_time(tmp_path: Path, before: str, attempts: int) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(4)
    for number in range(5):
        store = FileStore(tmp_path / str(number))
        if before == "another version":
            open_writer(store).close()
            (folder_of(store) / "facts").write_text("{}")
        with ExitStack() as stack:
            processes = [Child(open_and_put, store.folder, rank, barrier, attempts) for rank in range(4)]
            for child in map(stack.enter_context, processes):
                child.result()
        with closing(store.reader(3, FINGERPRINT)) as reader:
            assert hits_of(reader, range(5)) == [0, 1, 2, 3]


def write_and_delete(folder: Path) -> int:
    store = FileStore(folder)
    written = 0
    for _ in range(100):
        with closing(open_writer(store)) as writer:
            try:
                written += put(writer, range(10))
            except OSError as error:
                assert error.errno == errno.ESTALE
        store.delete(3, FINGERPRINT)
    return written


def test_reading_while_others_write_and_delete(store: FileStore, reader: FileReader) -> None:
    hits = 0
    with Child(write_and_delete, store.folder) as first, Child(write_and_delete, store.folder) as second:
        while first.process.is_alive() or second.process.is_alive():
            hits += len(hits_of(reader, range(10)))
        assert first.result() + second.result() > 500
    assert hits > 0
    assert hits_of(reader, range(10)) == []
    assert [path.name for path in store.folder.iterdir()] == [MARKER]


def test_without_a_limit_a_fifth_of_the_free_disk_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path / "store")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000 * 2**20))
    for limit, mebibytes in ((None, 200), (0.5, 512), (10, 800)):
        store.limit(limit)
        assert store.max_bytes == mebibytes * 2**20
    assert store.epoch_in_words(100 * 2**20) == " (100.0 MiB)"
    assert "of the 1,000.0 MiB of an epoch 800.0 MiB may be used" in store.epoch_in_words(1000 * 2**20)
