"""The next batch is read while this one is computed, and what is found is the same as without."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_pipetransformer.cache.activation_files import FileReader
from hf_pipetransformer.cache.content_keys import RowKey
from hf_pipetransformer.cache.entry_format import EntryFormat
from hf_pipetransformer.cache.file_store import FileStore
from hf_pipetransformer.cache.reading import Generation, StoreReading
from hf_pipetransformer.cache.side_stream import SideStream

TOKENS, FEATURES, UNITS = 3, 2, 4
LAYOUT = EntryFormat((FEATURES,), True, torch.float32, torch.float32)


def key_of(sample: int) -> RowKey:
    return RowKey(bytes([sample]) * 16, slice(0, TOKENS))


def state_of(sample: int, num_frozen: int) -> torch.Tensor:
    return torch.full((TOKENS, FEATURES), float(sample + 100 * num_frozen))


class Reading(StoreReading):
    """Reads from a store with these samples, and notes what was read in which thread."""

    def __init__(self, folder: Path, samples: dict[int, Sequence[int]], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(SideStream(torch.device("cpu")))
        store = FileStore(folder)
        for num_frozen, kept in samples.items():
            writer = store.writer(num_frozen, "w", LAYOUT.facts())
            rows = [memoryview(state_of(sample, num_frozen).numpy()).cast("B") for sample in kept]
            writer.put([key_of(sample).digest for sample in kept], rows)
            writer.close()
        self.use(Generation(f, "w", store.reader(f, "w")) for f in sorted(samples, reverse=True))
        self.read: list[tuple[str, int]] = []
        read_into = FileReader.read_into

        def noted(reader: FileReader, keys: Sequence[bytes], rows: Any) -> list[bool]:
            self.read.append((threading.current_thread().name, len(keys)))
            return read_into(reader, keys, rows)

        monkeypatch.setattr(FileReader, "read_into", noted)

    def ahead(self, samples: Sequence[int]) -> None:
        self.read_ahead([key_of(sample) for sample in samples], TOKENS, UNITS)

    def assert_found(self, samples: Sequence[int], expected: dict[int, list[int]]) -> None:
        """Of these samples, those at these positions are found behind so many units."""
        found = self.find([key_of(sample) for sample in samples], TOKENS, UNITS)
        assert {f: rows for f, (rows, _) in found.states.items()} == expected
        for f, (rows, states) in found.states.items():
            assert torch.equal(states, torch.stack([state_of(samples[row], f) for row in rows]))


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    reading = Reading(tmp_path, {2: [0, 1, 2, 3, 4], 3: [0, 1, 4]}, monkeypatch)
    yield reading
    reading.close()


def test_what_was_read_ahead_is_not_read_again(reading: Reading) -> None:
    reading.ahead([0, 1, 2, 9])
    reading.assert_found([0, 1, 2, 9], {3: [0, 1], 2: [2]})
    # the newer generation is asked for all four, the older one for the two that are missing; never by this thread
    assert reading.read == [("activation-cache-reader", 4), ("activation-cache-reader", 2)]


def test_a_state_is_given_out_once(reading: Reading) -> None:
    """A model may write into its inputs, and then be called on the same batch again."""
    reading.ahead([0, 1])
    found = reading.find([key_of(0), key_of(1)], TOKENS, UNITS)
    found.states[3][1].zero_()
    reading.assert_found([0, 1], {3: [0, 1]})


def test_the_same_sample_twice_in_a_batch(reading: Reading) -> None:
    reading.ahead([0, 2, 0])
    reading.assert_found([0, 2, 0], {3: [0, 2], 2: [1]})


def test_an_error_of_the_thread_is_raised_where_the_batch_is_needed(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr(EntryFormat, "empty", failing)
    reading.ahead([0])
    with pytest.raises(MemoryError, match="no memory"):
        reading.find([key_of(0)], TOKENS, UNITS)
    monkeypatch.undo()
    reading.assert_found([1], {3: [0]})  # the thread has not ended
