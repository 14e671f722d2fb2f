#!/usr/bin/env python
"""How fast activations are stored and read back, beside a bare numpy memmap and LMDB.

    OMP_NUM_THREADS=1 python benchmarks/activation_store.py --output results.json

All stores get the same rows, one store after the other in one process, in rounds, so that whatever else the machine
does hits all of them alike:

    round 1    memmap put, get    ActivationStore put, get    LMDB put, get    ...
    round 2    memmap put, get    ActivationStore put, get    LMDB put, get    ...
    ...

Each round begins with an empty folder and puts all rows, a batch at a time, then gets all of them in random order, to
where a batch is put together, as in training. All of it happens in the page cache: what is compared is the
stores' own work, not the disk's. They do not all do the same work:

    numpy memmap        an array in which each row's place is known in advance: the least that a store can do
    ActivationStore     finds its rows; computes a checksum at each put, and verifies it at each get
    LMDB                finds its rows; does not wait for the disk (`sync=False`), as the others do not
    LMDB, checksum      the same with the checksums of ActivationStore, computed and verified outside of it

What is compared is the ratio of throughputs *within* a round, then the median over the rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

import hf_pipetransformer
from hf_pipetransformer.cache.file_store import FileStore

try:
    import lmdb
except ImportError:
    lmdb = None

BASELINE = "numpy memmap"
OPERATIONS = ("put", "get")
TABLE_WIDTH = 120  # where the output is no terminal

Round = dict[str, dict[str, float]]
"""GB/s of each store and operation."""


class Store(Protocol):
    """What is timed. A row is `[row_bytes]` of uint8."""

    def put(self, keys: list[bytes], rows: list[np.ndarray]) -> None: ...

    def get(self, keys: list[bytes], rows: list[np.ndarray]) -> None:
        """Fill `rows`; fails if one is not there."""

    def close(self) -> None: ...


Maker = Callable[[Path, list[bytes], int], Store]
"""Makes a store in an empty folder, for these keys and rows of so many bytes."""


class Memmap:
    """One array of all rows, mapped into memory."""

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
    """A transaction for each batch; rows are copied straight from the mapping."""

    def __init__(self, folder: Path, keys: list[bytes], row_bytes: int, has_checksums: bool) -> None:
        size = 2 * len(keys) * (row_bytes + 4096)  # a row takes whole pages
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=48, help="of each row")
    parser.add_argument("--hidden_size", type=int, default=384)
    parser.add_argument("--value_bytes", type=int, default=4, help="4: float32, 2: bfloat16")
    parser.add_argument("--batch", type=int, default=32, help="rows that are put or got together")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to make temporary folders; default: the system's")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


def makers() -> dict[str, Maker]:
    """The baseline first: the others are compared with it."""
    variants: dict[str, Maker] = {BASELINE: Memmap, "ActivationStore": Segments}
    if lmdb is not None:
        for name, has_checksums in (("LMDB", False), ("LMDB, checksum", True)):
            variants[name] = partial(Lmdb, has_checksums=has_checksums)
    return variants


def batches(order: np.ndarray, size: int) -> Iterator[list[int]]:
    for begin in range(0, len(order), size):
        yield order[begin : begin + size].tolist()


def throughputs(make: Maker, data: np.ndarray, arguments: argparse.Namespace, seed: int) -> dict[str, float]:
    """GB/s of both operations of an empty store.

    Args:
        data: the rows. `[rows, row_bytes]`
        seed: of the order of reading.
    """
    keys = [hashlib.blake2b(n.to_bytes(8, "little"), digest_size=16).digest() for n in range(len(data))]
    place = np.zeros((arguments.batch, data.shape[1]), np.uint8)  # touched: page faults are not the store's
    random_order = np.random.default_rng(seed).permutation(len(data))
    seconds = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        store = make(Path(folder), keys, data.shape[1])
        begin = time.perf_counter()
        for batch in batches(np.arange(len(data)), arguments.batch):
            store.put([keys[n] for n in batch], [data[n] for n in batch])
        seconds["put"] = time.perf_counter() - begin

        begin = time.perf_counter()
        for batch in batches(random_order, arguments.batch):
            store.get([keys[n] for n in batch], list(place[: len(batch)]))
        seconds["get"] = time.perf_counter() - begin
        assert (place[: len(batch)] == data[batch]).all(), "the store returned something else"
        store.close()
    return {operation: data.nbytes / 1e9 / seconds[operation] for operation in OPERATIONS}


def ratios_to_baseline(rounds: list[Round], name: str, operation: str) -> list[float]:
    return [timings[name][operation] / timings[BASELINE][operation] for timings in rounds]


def print_table(console: Console, names: list[str], rounds: list[Round], title: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("store")
    for operation in OPERATIONS:
        for heading in (f"{operation} GB/s", "lowest - highest", "ratio to memmap"):
            table.add_column(heading, justify="right")
    for name in names:
        cells = []
        for operation in OPERATIONS:
            values = [timings[name][operation] for timings in rounds]
            ratio = statistics.median(ratios_to_baseline(rounds, name, operation))
            cells += [f"{statistics.median(values):.2f}", f"{min(values):.2f} - {max(values):.2f}", f"{ratio:.2f}"]
        table.add_row(name, *cells)
    console.print(table)


def as_json(arguments: argparse.Namespace, names: list[str], rounds: list[Round], load: float) -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "hf_pipetransformer": hf_pipetransformer.__version__,
            **{name: version(name) for name in ("numpy", "xxhash")},
            "lmdb": None if lmdb is None else version("lmdb"),
        },
        "machine": {
            "cores": os.cpu_count(),
            "architecture": platform.machine(),
            "load_average_before": load,
        },
        "rows": arguments.rows,
        "row": {name: getattr(arguments, name) for name in ("tokens", "hidden_size", "value_bytes")},
        "batch": arguments.batch,
        "summary": {
            name: {
                operation: {
                    "GB/s": statistics.median(timings[name][operation] for timings in rounds),
                    "ratio_to_memmap": statistics.median(ratios_to_baseline(rounds, name, operation)),
                    "ratio_to_memmap_per_round": ratios_to_baseline(rounds, name, operation),
                }
                for operation in OPERATIONS
            }
            for name in names
        },
        "rounds": rounds,
    }


def main() -> None:
    """Time all stores and print the table."""
    arguments = parse_arguments()
    load = os.getloadavg()[0]
    console = Console(width=max(TABLE_WIDTH, Console().width))
    if lmdb is None:
        console.print(
            "LMDB is not installed, so it is left out: pip install 'hf_pipetransformer[benchmarks]'", markup=False
        )
    row_bytes = arguments.tokens * arguments.hidden_size * arguments.value_bytes
    data = np.random.default_rng(0).integers(0, 256, (arguments.rows, row_bytes), np.uint8)

    variants = makers()
    rounds: list[Round] = []
    for number in range(arguments.rounds):
        rounds.append({name: throughputs(make, data, arguments, number) for name, make in variants.items()})
        for name, timings in rounds[-1].items():
            console.print(f"round {number + 1}  {name:16s}  put {timings['put']:.2f}  get {timings['get']:.2f} GB/s")
    title = f"{arguments.rows} rows of {row_bytes} bytes in batches of {arguments.batch}, {arguments.rounds} rounds"
    print_table(console, list(variants), rounds, title)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(as_json(arguments, list(variants), rounds, load), indent=2) + "\n")


if __name__ == "__main__":
    main()
