#!/usr/bin/env python
"""How fast activations are stored and read back, beside a bare numpy memmap and LMDB.

    OMP_NUM_THREADS=1 python benchmarks/activation_store.py --out results.json

Each run begins with an empty folder and puts all samples, a batch at a time, then gets all of them in random order,
into a batch, as in training. All of it happens in the page cache: the stores' own work is compared, not the disk's.
They do not all do the same work:

    memmap              an array with a known place for each sample: the least that a store can do
    FileStore           finds its samples; computes a checksum at each put, and verifies it at each get
    LMDB                finds its samples; does not wait for the disk (`sync=False`), as the others do not
    LMDB, checksums     the same with FileStore's checksums, computed and verified outside of it
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from hf_pipetransformer.parts.prefix_cache.cache.file_store import FileStore

import harness
from harness import Figures, Ratio

try:
    import lmdb
except ImportError:
    lmdb = None

BASELINE = "memmap"


class Store(Protocol):
    """A store to time. A sample is `[row_bytes]` of uint8."""

    def put(self, keys: list[bytes], rows: list[np.ndarray]) -> None: ...

    def get(self, keys: list[bytes], rows: list[np.ndarray]) -> None:
        """Fill `rows`; fails if one is not there."""

    def close(self) -> None: ...


class Memmap:
    """One array of all samples, mapped into memory."""

    def __init__(self, folder: Path, keys: list[bytes], row_bytes: int) -> None:
        self._places = {key: place for place, key in enumerate(keys)}
        self._array = np.memmap(folder / "array", np.uint8, "w+", shape=(len(keys), row_bytes))

    def put(self, keys: list[bytes], rows: list[np.ndarray]) -> None:
        for key, row in zip(keys, rows, strict=True):
            self._array[self._places[key]] = row

    def get(self, keys: list[bytes], rows: list[np.ndarray]) -> None:
        for key, row in zip(keys, rows, strict=True):
            row[:] = self._array[self._places[key]]

    def close(self) -> None:
        del self._array


class Segments:
    """This library's store."""

    def __init__(self, folder: Path, keys: list[bytes], row_bytes: int) -> None:
        store = FileStore(folder, max_bytes=2 * len(keys) * row_bytes)
        self._writer = store.writer(1, "benchmark")
        self._reader = store.reader(1, "benchmark")

    def put(self, keys: list[bytes], rows: list[np.ndarray]) -> None:
        assert self._writer.put(keys, rows) == len(keys)

    def get(self, keys: list[bytes], rows: list[np.ndarray]) -> None:
        assert all(self._reader.read_into(keys, rows))

    def close(self) -> None:
        self._writer.close()
        self._reader.close()


class Lmdb:
    """A transaction for each batch; samples are copied straight from the mapping."""

    def __init__(self, folder: Path, keys: list[bytes], row_bytes: int, has_checksums: bool) -> None:
        size = 2 * len(keys) * (row_bytes + 4096)  # a sample takes whole pages
        self._environment = lmdb.open(str(folder), map_size=size, sync=False, metasync=False)
        self._has_checksums = has_checksums
        self._checksums: dict[bytes, int] = {}

    def put(self, keys: list[bytes], rows: list[np.ndarray]) -> None:
        if self._has_checksums:
            self._checksums.update((key, xxhash.xxh3_64_intdigest(row)) for key, row in zip(keys, rows, strict=True))
        with self._environment.begin(write=True) as transaction:
            for key, row in zip(keys, rows, strict=True):
                transaction.put(key, row)

    def get(self, keys: list[bytes], rows: list[np.ndarray]) -> None:
        with self._environment.begin(buffers=True) as transaction:
            for key, row in zip(keys, rows, strict=True):
                row[:] = np.frombuffer(transaction.get(key), np.uint8)
                if self._has_checksums:
                    assert xxhash.xxh3_64_intdigest(row) == self._checksums[key]

    def close(self) -> None:
        self._environment.close()


def throughput(
    make: Callable[[Path, list[bytes], int], Store],
    data: np.ndarray,
    options: argparse.Namespace,
    seeds: itertools.count[int],
) -> Figures:
    """GB/s of an empty store.

    Args:
        make: makes a store in an empty folder, for these keys and samples of so many bytes.
        data: the samples. `[rows, row_bytes]`
        options: of the command line.
        seeds: of the order of reading.
    """
    keys = [hashlib.blake2b(n.to_bytes(8, "little"), digest_size=16).digest() for n in range(len(data))]
    place = np.zeros((options.batch, data.shape[1]), np.uint8)  # touched: page faults are not the store's
    in_order = list(range(len(data)))
    random_order = np.random.default_rng(next(seeds)).permutation(len(data)).tolist()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store = make(Path(folder), keys, data.shape[1])
        began = time.perf_counter()
        for first in range(0, len(data), options.batch):
            batch = in_order[first : first + options.batch]
            store.put([keys[n] for n in batch], [data[n] for n in batch])
        put = time.perf_counter() - began
        began = time.perf_counter()
        for first in range(0, len(data), options.batch):
            batch = random_order[first : first + options.batch]
            store.get([keys[n] for n in batch], list(place[: len(batch)]))
        get = time.perf_counter() - began
        assert (place[: len(batch)] == data[batch]).all(), "the store returned something else"
        store.close()
    return {"put_gb_s": data.nbytes / 1e9 / put, "get_gb_s": data.nbytes / 1e9 / get}


def main() -> None:
    """Time all stores and print the table."""
    parser = harness.parser_of(__doc__, turns=7)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=48, help="of each sample")
    parser.add_argument("--hidden_size", type=int, default=384)
    parser.add_argument("--value_bytes", type=int, default=4, help="4: float32, 2: bfloat16")
    parser.add_argument("--batch", type=int, default=32, help="samples that are put or got together")
    parser.add_argument("--folder", type=Path, help="where to make temporary folders; default: the system's")
    options = harness.start(parser)
    makers: dict[str, Callable[[Path, list[bytes], int], Store]] = {BASELINE: Memmap, "FileStore": Segments}
    if lmdb is None:
        print("LMDB is not installed, so it is left out: pip install 'hf_pipetransformer[benchmarks]'")
    else:
        makers |= {"LMDB": partial(Lmdb, has_checksums=False), "LMDB, checksums": partial(Lmdb, has_checksums=True)}
    row_bytes = options.tokens * options.hidden_size * options.value_bytes
    data = np.random.default_rng(0).integers(0, 256, (options.rows, row_bytes), np.uint8)
    cases = {name: partial(throughput, make, data, options, itertools.count()) for name, make in makers.items()}
    ratios = [Ratio(f"{what} to memmap", f"{what}_gb_s", BASELINE) for what in ("put", "get")]
    harness.report(options, harness.take_turns(cases, options), ratios)


if __name__ == "__main__":
    main()
