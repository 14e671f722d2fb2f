"""One process's way to the store, on a whole model without a Trainer."""

from __future__ import annotations

import copy
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import MODELS
from training_data import Kind, PadCollator, TrainingData

from hf_pipetransformer.cache import writing
from hf_pipetransformer.cache.activation_cache import ActivationCache
from hf_pipetransformer.cache.activation_files import FileWriter
from hf_pipetransformer.cache.content_keys import KeyingCollator, RowKey, pop_keys
from hf_pipetransformer.cache.file_store import FileStore
from hf_pipetransformer.model.layer_stack import CarrySlot, LayerStack
from hf_pipetransformer.model.nested import tensors_of

KIND: Kind = "text-classification"
CPU = torch.device("cpu")
SLOTS = {f: CarrySlot(0, 0, True, True) for f in range(1, 5)}


class Setup:
    """A BERT of four layers, its cache, and what is run."""

    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        self.data = TrainingData(KIND, 12)
        self.collate = PadCollator(KIND)
        model = MODELS["bert-classification"].build().eval()
        self.stack = LayerStack.discover(model, self.batch(range(2)))
        self.stack.runner.install()
        self.stack.runner.trace(self.batch(range(2)))
        self.store = FileStore(folder, max_bytes=max_bytes)
        self.cache = ActivationCache(self.stack, SLOTS, self.store, None, CPU)
        self.cache.write(True)
        self.calls: list[tuple[int, int, int]] = []
        run = self.stack.runner.run

        def counted(start: int, stop: int, carry: Any, batch: Any, observer: Any = None) -> Any:
            self.calls.append((start, stop, len(batch["input_ids"])))
            return run(start, stop, carry, batch, observer)

        self.stack.runner.run = counted  # type: ignore[method-assign]

    def batch(self, rows: Any) -> dict[str, Any]:
        return self.collate([self.data[row] for row in rows])

    def keys(self, batch: dict[str, Any]) -> list[RowKey]:
        keys = pop_keys(KeyingCollator(lambda samples: dict(batch))([]))
        assert keys is not None
        return keys

    def go(self, rows: Any, stop: int = 4, flushes: bool = True) -> tuple[int, torch.Tensor]:
        """Look up, and run from there to `stop`. Returns where it began and the state behind `stop`."""
        batch = self.batch(rows)
        keys = self.keys(batch)
        with torch.no_grad():
            start, carry = self.cache._look_up(batch, keys, stop)
            if start < stop:
                observer = self.cache.observer(batch, keys, start, stop)
                carry = self.stack.runner.run(start, stop, carry, batch, observer)
        if flushes:
            self.cache.flush()
        assert carry is not None
        return start, carry[0][0]

    def expected(self, rows: Any, stop: int = 4) -> torch.Tensor:
        states: list[torch.Tensor] = []
        with torch.no_grad():
            self.stack.runner.trace(self.batch(rows), lambda unit, output: states.append(tensors_of(output)[0]))
        return states[stop - 1]

    def assert_right(self, rows: Any, state: torch.Tensor) -> None:
        valid = self.batch(rows)["attention_mask"].bool()
        torch.testing.assert_close(state[valid], self.expected(rows)[valid], rtol=0, atol=1e-5)


def test_rows_are_brought_to_one_place(tmp_path: Path) -> None:
    """As drawn: a and d are found behind 3 layers, b behind 2, c not at all."""
    a, b, c, d = range(4)
    setup = Setup(tmp_path)
    setup.cache.advance(2, "weights")
    setup.go([b])
    setup.cache.advance(3, "weights")
    setup.go([a, d])
    setup.calls.clear()
    start, state = setup.go([a, b, c, d])
    assert start == 3
    assert setup.calls == [(2, 3, 1), (0, 3, 1), (3, 4, 4)]
    setup.assert_right([a, b, c, d], state)
    setup.calls.clear()
    start, state = setup.go([d, c, b, a])  # b and c have been put
    assert setup.calls == [(3, 4, 4)]
    setup.assert_right([d, c, b, a], state)
    counts = setup.cache.take_counts()
    assert (counts.rows, counts.hits, counts.older_hits) == (11, 6, 1)
    assert (counts.stored, counts.older_stored) == (4, 1)


def test_a_sample_that_comes_twice_is_computed_twice_in_the_epoch_that_fills(tmp_path: Path) -> None:
    """Whether it had been written in time would differ from run to run, and so would the last bits of its state."""
    setup = Setup(tmp_path)
    setup.cache.advance(2, "weights", is_new=True)
    assert [setup.go(range(3))[0] for _ in range(2)] == [0, 0]
    setup.cache.read_all()  # the next epoch
    assert setup.go(range(3))[0] == 2
    assert setup.cache.take_counts().layers_skipped == 3 * 2


def test_a_slow_disk_is_waited_for_but_not_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SECONDS_TO_WAIT", 0.5)
    monkeypatch.setattr(writing, "SHARE_TO_WAIT", 0.0)
    monkeypatch.setattr(writing, "PENDING_BATCHES", 2)  # other tests have more, for good
    put, slow = FileWriter.put, threading.Event()

    def stuck(self: FileWriter, *arguments: Any) -> int:
        slow.wait()
        return put(self, *arguments)

    monkeypatch.setattr(FileWriter, "put", stuck)
    setup = Setup(tmp_path)
    setup.cache.advance(2, "weights")
    for row in range(writing.PENDING_BATCHES):
        setup.go([row], flushes=False)
    began = time.monotonic()
    for row in range(4):  # the first of which is waited for
        setup.go([row], flushes=False)
    assert 0.4 < time.monotonic() - began < 2
    slow.set()
    setup.cache.flush()
    counts = setup.cache.take_counts()
    assert (counts.stored, counts.dropped) == (2, 4)


def test_facts_that_are_damaged_are_no_layout(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    for facts in ({}, {"features": "x"}, {"features": [16], "has_mask": True, "stored_dtype": "nn"}):
        setup.store.writer(2, "other", facts).close()
        setup.cache.advance(2, "other")
        assert setup.go(range(2))[0] == 0
        setup.store.delete(2, "other")


def called(setup: Setup, rows: Any, call: Any) -> tuple[Any, bool, int]:
    """As the last stage does, around a user's call of the model; what it returns, and what was met, and put."""
    batch = setup.batch(rows)
    keys, runner = setup.keys(batch), setup.stack.runner
    before = setup.cache.counts.stored
    assert setup.cache.begin(batch, keys, 0, None, 4) == (0, None)
    with torch.no_grad(), runner.to_the_end(0, None):
        output = call(setup.stack.model, batch)
    setup.cache.flush()
    return output, setup.cache.met_other_inputs, setup.cache.counts.stored - before


def test_what_was_found_is_used_if_the_model_is_called_on_those_inputs(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.cache.advance(2, "weights")
    model, computed = setup.stack.model, list[Any]()
    setup.stack.units[0].module.register_forward_hook(lambda *_: computed.append(setup.stack.runner.start_of_pass))

    def by_place(model: Any, batch: dict[str, Any]) -> Any:
        rest = {name: value for name, value in batch.items() if name != "input_ids"}
        return model(batch["input_ids"], **rest, return_dict=True)

    for call, stored in ((by_place, 4), (lambda model, batch: model(**batch), 0)):
        output, met, put = called(setup, range(4), call)
        assert not met and put == stored
        torch.testing.assert_close(output.logits, model(**setup.batch(range(4))).logits)
    assert computed == [0, 0, 2, 0]  # start of each pass; between them are the plain calls


def test_nothing_is_used_or_put_if_a_part_of_the_model_is_called_on_other_inputs(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.cache.advance(2, "weights")

    def call(model: Any, batch: dict[str, Any]) -> Any:
        part = {name: value for name, value in batch.items() if name != "labels"}
        return model.bert(**{**part, "input_ids": part["input_ids"].roll(1, 0)}).last_hidden_state

    with torch.no_grad():
        expected = call(setup.stack.model, setup.batch(range(4)))
    assert called(setup, range(4), call)[2] == 0
    setup.go(range(4))  # now they are there
    torch.testing.assert_close(called(setup, range(4), call)[0], expected)
    called(setup, range(4), lambda model, batch: model(**batch))  # a call of a part is known when the next one begins
    assert setup.cache.met_other_inputs


def test_a_copy_of_the_model_is_not_the_model(tmp_path: Path) -> None:
    """A callback copies it, for a running average, and a loss may call the copy beside it."""
    setup = Setup(tmp_path)
    setup.cache.advance(2, "weights")
    setup.go(range(4))
    teacher = copy.deepcopy(setup.stack.model)

    def call(model: Any, batch: dict[str, Any]) -> Any:
        teacher(**{**batch, "input_ids": batch["input_ids"].roll(1, 0)})
        return model(**batch)

    _, met, _ = called(setup, range(4), call)
    assert not met


def test_what_earlier_trainings_left_makes_room(tmp_path: Path) -> None:
    """What has been used since this training began stays, and then the store is full."""
    earlier = Setup(tmp_path, max_bytes=8000)
    for name in ("first", "second"):
        earlier.cache.advance(2, name)
        earlier.go(range(3))
    earlier.cache.close()
    names = earlier.store.generations()
    for name in names:
        folder = tmp_path / f"{name[0]:03d}-{name[1]}"
        for path in (*folder.glob("used-*"), folder):
            os.utime(path, (0, 0))
    setup = Setup(tmp_path, max_bytes=earlier.store.nbytes())
    setup.cache.advance(2, "weights")
    setup.go(range(3))
    assert setup.go(range(3))[0] == 2 and setup.cache.why_full is None
    setup.go(range(3, 12))
    assert setup.store.generations() == [(2, "weights")]
    assert "max_bytes" in str(setup.cache.why_full)


def test_a_generation_that_is_always_gone_stops_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that tells of live files that they have been deleted."""

    def put(*_: Any) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(FileWriter, "put", put)
    setup = Setup(tmp_path)
    setup.cache.advance(2, "weights")
    setup.go(range(3))
    assert os.strerror(errno.ESTALE) in str(setup.cache.why_full) and not setup.cache.is_full


@pytest.mark.parametrize(("code", "makes_way"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_only_want_of_room_makes_something_give_way(tmp_path: Path, code: int, makes_way: bool) -> None:
    setup = Setup(tmp_path)
    setup.cache.advance(2, "weights")
    setup.cache.stop_writing(OSError(code, os.strerror(code)))
    assert setup.cache.is_full == makes_way and os.strerror(code) in str(setup.cache.why_full)
