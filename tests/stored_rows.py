"""Rows with known contents for the tests of the activation store, and processes that cannot be left behind."""

from __future__ import annotations

import hashlib
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from distributed import patient

from hf_pipetransformer.parts.prefix_cache.cache.activation_files import FileReader, FileWriter
from hf_pipetransformer.parts.prefix_cache.cache.file_store import FileStore

FINGERPRINT = "0f" * 16
SECONDS = 60.0


def key_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def payload_of(number: int, nbytes: int = 200) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, nbytes, dtype=np.uint8)


def open_writer(store: FileStore) -> FileWriter:
    return store.writer(3, FINGERPRINT)


def put(writer: FileWriter, numbers: Sequence[int], nbytes: int = 200) -> int:
    return writer.put([key_of(n) for n in numbers], [payload_of(n, nbytes) for n in numbers])


def get(reader: FileReader, keys: Sequence[bytes], nbytes: Sequence[int]) -> list[bytes | None]:
    """The payload of each key, None for a miss. The row of a hit has been overwritten completely."""
    rows = [np.full(n, 0xAA, np.uint8) for n in nbytes]
    hits = reader.read_into(keys, rows)
    return [row.tobytes() if hit else None for row, hit in zip(rows, hits, strict=True)]


def hits_of(reader: FileReader, numbers: Sequence[int], nbytes: int = 200) -> list[int]:
    """The numbers with payloads in the store. Fails if a payload is wrong."""
    found = get(reader, [key_of(n) for n in numbers], [nbytes] * len(numbers))
    for number, payload in zip(numbers, found, strict=True):
        assert payload in (None, payload_of(number, nbytes).tobytes()), f"the wrong payload for {number}"
    return [number for number, payload in zip(numbers, found, strict=True) if payload is not None]


class Child:
    """A process that runs `function(*arguments)`; it ends with the `with` block at the latest."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, method: str = "fork") -> None:
        context = multiprocessing.get_context(method)
        self._receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_send_result, args=(sender, function, arguments), daemon=True)
        self.process.start()
        sender.close()

    def result(self) -> Any:
        assert self._receiver.poll(patient(SECONDS)), "the child hangs"
        value, error = self._receiver.recv()
        assert error is None, error
        return value

    def wait(self) -> int | None:
        self.process.join(patient(SECONDS))
        return self.process.exitcode

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self._receiver.close()


def _send_result(sender: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        sender.send((function(*arguments), None))
    except BaseException:
        sender.send((None, traceback.format_exc()))
