"""The files of one generation of cached activations: finding, reading, verifying and writing entries.

    <generation>/
      facts               format version and facts about all entries, with their checksum
      segment-<writer>    payloads, one after another                                       (append-only)
      index-<writer>      a record for each of them: key, offset, checksum, nbytes          (append-only)
      used-<training>     empty; its modification time is this training's latest use of the generation

    index files ──read once, then the appended part──> sorted records ──> bytes of a segment ──> checksum? ──> hit

Every writer appends to files of its own, without locks and without fsync. Files may be damaged, truncated or deleted
at any time. Therefore:

1. A checksum covers an entry's key, its payload and the facts. A damaged record, payload or `facts` leads to a miss.
2. A payload is written before its record: readers do not find the remains of a killed writer.
3. Files are read and written at explicit offsets and are never memory-mapped. A full disk or a truncated file then
   results in an error or a short read, not in a SIGBUS, and forked processes share no file position.
4. Files are opened relative to the generation's folder, so they belong together even if the folder is moved away. No
   symbolic link is followed, and no file is opened that another user owns or may write to.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from ....own_files import publish

Row: TypeAlias = npt.NDArray[np.uint8] | memoryview
"""The bytes of one sample's activations, contiguous and not empty."""

FORMAT_VERSION = 3
FACTS, INDEX, SEGMENT, USED = "facts", "index-", "segment-", "used-"
"""Name of the facts file, and prefixes of the other files."""

RECORD = np.dtype([("key", "<u8"), ("offset", "<i8"), ("nbytes", "<u8"), ("check", "<u8")])
"""`key` is the first half of a key; the second half seeds the checksum."""

_Record: TypeAlias = tuple[int, int, int, int]

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class _Run(NamedTuple):
    """Records sorted by their keys. The keys are a separate array, for fast search."""

    keys: npt.NDArray[np.uint64]
    records: npt.NDArray[Any]


class FileReader:
    """Looks up samples in one generation, which may be created and deleted at any time. Not thread-safe.

    Unreadable entries are misses. A reader works in forked processes; a pickled copy opens the files again.

    Args:
        path: the generation's folder.

    Attributes:
        num_damaged: number of found entries that were truncated or had wrong bytes.
    """

    def __init__(self, path: Path) -> None:
        self.num_damaged = 0
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._closing = ExitStack()
        self._folder = self._facts_file = -1
        self._facts: dict[str, Any] | None = None
        self._seed = 0  # seed of checksums
        self._runs: list[_Run] = []
        self._seen: dict[str, int] = {}  # writer -> bytes read from its index
        self._segments: dict[int, int] = {}  # writer's place in `_seen` -> open file

    def __reduce__(self) -> tuple[Any, ...]:
        return FileReader, (self._path,)  # descriptors are invalid in another process

    @property
    def facts(self) -> dict[str, Any] | None:
        """Facts about the generation, recorded by the process that created it; None if there is no generation."""
        return self._facts if self._is_open() else None

    def read_into(self, keys: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        """Read payloads into buffers.

        Args:
            keys: 16 bytes each.
            rows: writable buffers. A payload of another length than its buffer is a miss.

        Returns:
            For each key, whether its buffer now holds the payload. Otherwise the buffer's bytes are undefined.
        """
        return self.look_up(keys, [_flat(row) for row in rows]) if self._is_open() else [False] * len(keys)

    def sizes(self, keys: Sequence[bytes]) -> list[int]:
        """Return the length in bytes of the longest payload of each key; 0 if there is none."""
        if not self._is_open():
            return [0] * len(keys)
        found = self._find(keys)
        if not all(found) and self._read_indices():
            found = self._find(keys)
        return [max((nbytes for _, _, nbytes, _ in records), default=0) for records in found]

    def look_up(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[bool]:
        """Read payloads as `read_into` does, from the open generation, even if it was deleted meanwhile."""
        found = self._read_known(keys, payloads)
        missing = [place for place, hit in enumerate(found) if not hit]
        if missing and self._read_indices():
            again = self._read_known([keys[place] for place in missing], [payloads[place] for place in missing])
            found = [hit if hit else again.pop(0) for hit in found]
        self.num_damaged += sum(hit is False for hit in found)
        return [hit is True for hit in found]

    def close(self) -> None:
        """Close the files. The next call opens them again."""
        self._closing.close()
        self._forget()

    # ------------------------------------------------------------------------------------ for a writer
    def open(self, facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Open the files, and return the facts about the generation.

        Args:
            facts: facts to record if the folder or its facts are missing or damaged, as for JSON; None never writes.

        Raises:
            OSError: the folder or its facts cannot be opened.
            ValueError: the facts are damaged, or have another version.
        """
        if facts is not None:
            with suppress(FileExistsError):
                self._path.mkdir(mode=0o700)
        try:
            self._folder = open_private(self._path, os.O_RDONLY | os.O_DIRECTORY)
            self._closing.callback(os.close, self._folder)
            try:
                self._facts = self._read_facts()
            except (FileNotFoundError, ValueError) as error:
                if facts is None:
                    raise
                self._write_facts(facts, is_first=isinstance(error, FileNotFoundError))
                self._facts = self._read_facts()
            return self._facts
        except (OSError, ValueError):
            self.close()
            raise

    def open_file(self, name: str, flags: int) -> int:
        """Open a file in the folder; its descriptor is valid until `close`. A file that it creates has mode 0600."""
        descriptor = open_private(name, flags, self._folder)
        self._closing.callback(os.close, descriptor)
        return descriptor

    def is_outdated(self) -> bool:
        """Whether the generation was deleted, or its facts were replaced. Open files still work."""
        try:
            return os.fstat(self._facts_file).st_nlink == 0
        except OSError:  # closed, or lost by a network file system
            return True

    def record(self, key: bytes, payload: memoryview, offset: int) -> _Record:
        """Return the record of an entry of this generation."""
        check = xxhash.xxh3_64_intdigest(payload, int.from_bytes(key[8:], "little") ^ self._seed)
        return int.from_bytes(key[:8], "little"), offset, payload.nbytes, check

    # ------------------------------------------------------------------------------------ inside
    def _is_open(self) -> bool:
        if self._facts is not None and self.is_outdated():
            self.close()
        if self._facts is None:
            with suppress(OSError, ValueError):
                self.open()
        return self._facts is not None

    def _read_known(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[bool | None]:
        """Return for each key: True if its payload was read, False if it was damaged, None if it has no record."""
        found = [
            [record for record in records if record[2] == payload.nbytes]
            for records, payload in zip(self._find(keys), payloads, strict=True)
        ]
        if hasattr(os, "posix_fadvise"):  # announced reads make a disk faster
            for writer, offset, nbytes, _ in (record for records in found for record in records):
                with suppress(OSError):
                    os.posix_fadvise(self._segment(writer), offset, nbytes, os.POSIX_FADV_WILLNEED)
        return [
            any(self._read(key, payload, record) for record in records) if records else None
            for key, payload, records in zip(keys, payloads, found, strict=True)
        ]

    def _read(self, key: bytes, payload: memoryview, record: _Record) -> bool:
        writer, offset, _, check = record
        done = 0
        with suppress(OSError):
            while done < payload.nbytes:  # a call transfers at most 2 GiB, and may stop earlier
                got = os.preadv(self._segment(writer), [payload[done:]], offset + done)
                if not got:
                    return False
                done += got
        return done == payload.nbytes and self.record(key, payload, offset)[3] == check

    def _segment(self, writer: int) -> int:
        if writer not in self._segments:
            self._segments[writer] = self.open_file(f"{SEGMENT}{list(self._seen)[writer]}", os.O_RDONLY)
        return self._segments[writer]

    def _find(self, keys: Sequence[bytes]) -> list[list[_Record]]:
        """Return all records of each key, with the writer's number. There may be several, some of them damaged."""
        found: list[list[_Record]] = [[] for _ in keys]
        wanted = np.frombuffer(b"".join(key[:8] for key in keys), "<u8")
        for run in self._runs:
            begins = np.searchsorted(run.keys, wanted, "left").tolist()
            ends = np.searchsorted(run.keys, wanted, "right").tolist()
            for of_key, begin, end in zip(found, begins, ends, strict=True):
                of_key += run.records[begin:end].tolist()
        return found

    def _read_indices(self) -> bool:
        """Read new records from the index files. Returns True if there were any."""
        new: list[_Run] = []
        with suppress(OSError), os.scandir(self._folder) as files:
            for file in files:
                if file.name.startswith(INDEX):
                    with suppress(OSError):
                        new.append(self._read_index(file.name, file.stat(follow_symlinks=False).st_size))
        if not any(len(run.keys) for run in new):
            return False
        # each run is more than twice as long as the next: there are few runs, and few sorts of each record
        merged = _merged(new)
        while self._runs and len(self._runs[-1].keys) <= 2 * len(merged.keys):
            merged = _merged([merged, self._runs.pop()])
        self._runs.append(merged)
        return True

    def _read_index(self, name: str, nbytes: int) -> _Run:
        writer = name.removeprefix(INDEX)
        seen = self._seen.setdefault(writer, 0)
        raw = b""
        if nbytes - seen >= RECORD.itemsize:
            file = open_private(name, os.O_RDONLY, self._folder)
            try:
                raw = os.pread(file, nbytes - seen, seen)
            finally:
                os.close(file)
        records = np.frombuffer(raw, RECORD, len(raw) // RECORD.itemsize).copy()
        self._seen[writer] += records.nbytes
        keys = records["key"].copy()
        records["key"] = list(self._seen).index(writer)  # the writer's number: the keys are stored separately
        return _Run(keys, records)

    def _read_facts(self) -> dict[str, Any]:
        self._facts_file = self.open_file(FACTS, os.O_RDONLY)
        checksum, _, content = os.pread(self._facts_file, 2**20, 0).partition(b"\n")
        # a damaged fact could become the size of a reader's allocation
        if checksum.decode("latin-1") != xxhash.xxh3_64_hexdigest(content):
            raise ValueError(f"{FACTS} is damaged or was written by another version.")
        read = json.loads(content)
        if read["version"] != FORMAT_VERSION:
            raise ValueError(f"{FACTS} was written by another version.")
        self._seed = xxhash.xxh3_64_intdigest(content)
        return dict(read["facts"])

    def _write_facts(self, facts: Mapping[str, Any], is_first: bool) -> None:
        """Write the facts atomically. Replacing facts turns all entries into misses and outdates their writers.

        Args:
            facts: the facts.
            is_first: whether there are no facts yet. If another process is quicker, its facts stay.
        """
        content = json.dumps({"version": FORMAT_VERSION, "facts": dict(facts)}, sort_keys=True).encode()
        checksum = xxhash.xxh3_64_hexdigest(content).encode()
        publish(self._folder, FACTS, checksum + b"\n" + content, replaces=not is_first)


class FileWriter:
    """Adds samples to one generation. Created by `FileStore.writer`. Not thread-safe.

    It remains usable after an error, because there may be space again. The first entry creates its files.

    Args:
        path: the generation's folder.
        facts: facts to record if the generation is created.
        claim: called with a number of bytes before a write. It raises an error to forbid the write.

    Raises:
        OSError: the folder cannot be written to.

    Attributes:
        facts: facts about the generation, recorded by the process that created it.
        num_present: number of samples passed to `put` that were already in the store.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], claim: Callable[[int], None]) -> None:
        self.num_present = 0
        self._path = path
        self._claim = claim
        self._reader = FileReader(path)
        self.facts = self._reader.open(facts)
        self._outputs: tuple[int, int] | None = None  # descriptors of segment and index
        self._ends = (0, 0)

    def put(self, keys: Sequence[bytes], rows: Sequence[Row]) -> int:
        """Store samples. Readers in all processes then find them.

        1. Skip entries that a reader finds. A damaged entry is not found, so it is stored again.
        2. Write the payloads.
        3. Write their records.

        Args:
            keys: 16 bytes each, uniformly distributed (a hash).
            rows: the payloads.

        Returns:
            The number of entries written.

        Raises:
            StoreFull: the store would exceed its limit. No bytes were written.
            OSError: the disk is full or fails, or the generation has been deleted (`errno.ESTALE`). None of the
                entries is stored.
        """
        if self._reader.is_outdated() or any(os.fstat(file).st_nlink == 0 for file in self._outputs or ()):
            raise _deleted(self._path)
        payloads = dict(zip(keys, map(_flat, rows), strict=True))
        buffers = [np.empty(payload.nbytes, np.uint8).data for payload in payloads.values()]
        hits = self._reader.look_up(list(payloads), buffers)  # (1)
        self.num_present += sum(hits)
        new = [entry for entry, hit in zip(payloads.items(), hits, strict=True) if not hit]
        if new:
            self._claim(sum(payload.nbytes + RECORD.itemsize for _, payload in new))
            self._append(new)
        return len(new)

    def close(self) -> None:
        """Close the files. A later `put` fails."""
        self._reader.close()
        self._outputs = None

    def _append(self, entries: Sequence[tuple[bytes, memoryview]]) -> None:
        if self._outputs is None:
            name, new = uuid.uuid4().hex, os.O_WRONLY | os.O_CREAT | os.O_EXCL
            try:
                segment, index = (self._reader.open_file(f"{prefix}{name}", new) for prefix in (SEGMENT, INDEX))
            except FileNotFoundError as error:
                raise _deleted(self._path) from error
            self._outputs = segment, index
        segment, index = self._outputs
        end, end_of_index = self._ends
        try:
            records = []
            for key, payload in entries:
                records.append(self._reader.record(key, payload, end))
                write_all(segment, payload, end)  # (2)
                end += payload.nbytes
            written = memoryview(np.array(records, RECORD).tobytes())
            write_all(index, written, end_of_index)  # (3)
        except OSError:
            for file, before in zip(self._outputs, self._ends, strict=True):
                with suppress(OSError):  # failure only wastes space: no entry is wrong
                    os.ftruncate(file, before)
            raise
        self._ends = end, end_of_index + written.nbytes


def _deleted(path: Path) -> OSError:
    return OSError(errno.ESTALE, "the generation has been deleted", str(path))


def write_all(file: int, content: memoryview, offset: int) -> None:
    """Write all bytes to a file.

    Raises:
        OSError: as `os.pwrite`; some bytes may have been written.
    """
    while content.nbytes:  # a call transfers at most 2 GiB, and may stop earlier
        done = os.pwrite(file, content, offset)
        if not done:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        content, offset = content[done:], offset + done


def open_private(path: str | Path, flags: int, folder: int | None = None) -> int:
    """Open a file or folder that only this user may write to. A file that it creates has mode 0600.

    Args:
        path: path of a regular file or, with `O_DIRECTORY`, of a folder.
        flags: as for `os.open`.
        folder: descriptor of the folder that the path is relative to.

    Raises:
        OSError: as `os.open`; or the path is a symbolic link, or is neither a file nor a folder; or another user owns
            it or may write to it.
    """
    # without O_NONBLOCK, opening a named pipe would block until its other end is opened
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode=0o600, dir_fd=folder)
    refusal = why_not_private(os.fstat(descriptor))
    if refusal is not None:
        os.close(descriptor)
        raise PermissionError(errno.EPERM, refusal, str(path))
    return descriptor


def why_not_private(status: os.stat_result) -> str | None:
    """Return why a file or folder is not trusted, in words; None if only this user or root may write to it."""
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return "it is neither a file nor a folder"
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
    if status.st_mode & OTHERS_MAY_WRITE:
        return f"other users may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _merged(runs: Sequence[_Run]) -> _Run:
    keys, records = (np.concatenate(parts) for parts in zip(*runs, strict=True))
    order = np.argsort(keys, kind="stable")
    return _Run(keys[order], records[order])


def _flat(row: Row) -> memoryview:
    return (row.data if isinstance(row, np.ndarray) else row).cast("B")
