"""What readers, writers and deletions of the activation store do, in one process and in several."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from stored_rows import FINGERPRINT, Child, get, hits_of, key_of, open_writer, put

from hf_pipetransformer.parts.prefix_cache.cache.activation_files import FileReader, FileWriter
from hf_pipetransformer.parts.prefix_cache.cache.file_store import FileStore


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


@pytest.fixture
def reader(store: FileStore) -> Iterator[FileReader]:
    with closing(store.reader(3, FINGERPRINT)) as reader:
        yield reader


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
def test_what_has_not_been_used_for_longest_is_evicted_first(store: FileStore) -> None:
    names = [(2, "old"), (3, "older"), (4, "marked"), (5, "new")]
    for name in names:
        store.writer(*name).close()
    for age, (num_frozen, fingerprint) in ((20, names[0]), (30, names[1]), (40, names[2])):
        folder = store.folder / f"{num_frozen:03d}-{fingerprint}"
        for path in (*folder.glob("used-*"), folder):
            os.utime(path, (time.time() - age,) * 2)
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


# ------------------------------------------------------------------------------------ several processes
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

    os.pwrite = dies  # type: ignore[assignment]
    for n in range(10, 10_000, 10):
        put(writer, range(n, n + 10), nbytes=20_000)


@pytest.mark.parametrize("moment", ["in the payloads", "in the records"])
def test_killed_writer(store: FileStore, reader: FileReader, moment: str) -> None:
    with Child(write_until_killed, store.folder, moment) as child:
        assert child.wait() == -signal.SIGKILL
    numbers = range(store.nbytes() // 20_000 + 20)
    found = hits_of(reader, numbers, nbytes=20_000)
    assert found == list(range(len(found)))
    assert len(found) == {"in the payloads": 10, "in the records": 15}[moment]
    with closing(open_writer(store)) as writer:
        assert put(writer, numbers, nbytes=20_000) == len(numbers) - len(found)
    assert hits_of(reader, numbers, nbytes=20_000) == list(numbers)


def test_without_a_limit_a_fifth_of_the_free_disk_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path / "store")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000 * 2**20))
    for limit, mebibytes in ((None, 200), (0.5, 512), (10, 800)):
        store.limit(limit)
        assert store.max_bytes == mebibytes * 2**20
    assert store.epoch_in_words(100 * 2**20) == " (100.0 MiB)"
    assert "of the 1,000.0 MiB of an epoch 800.0 MiB may be used" in store.epoch_in_words(1000 * 2**20)
