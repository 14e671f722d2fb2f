"""The files of one generation of cached activations: how entries are found, read, verified and written.

    <generation>/
      facts               format version and facts about all entries, with their checksum
      segment-<writer>    payloads, one after another                                       (append-only)
      index-<writer>      a record for each of them: key, offset, checksum, nbytes          (append-only)
      used-<training>     empty; its modification time is when this training last needed the generation

    index files ──read once, then what was appended──> sorted records ──> bytes of a segment ──> checksum? ──> hit

Every writer appends to files of its own, so there are no locks, and nothing is fsynced. Files may be damaged,
truncated or deleted at any time. Therefore:

1. A checksum covers an entry's key, its payload and the facts. A damaged record, payload or `facts` leads to a miss.
2. A payload is written before its record: what a killed writer leaves behind is not found.
3. Files are read and written at explicit offsets and are never memory-mapped. A full disk or a truncated file then
   results in an error or a short read, not in a SIGBUS, and forked processes share no file position.
4. Files are opened relative to the generation's folder, so they belong together even if the folder is moved away. No
   symbolic link is followed, and nothing is opened that another user owns or may write to.
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
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from ..own_files import NEW

Row: TypeAlias = npt.NDArray[np.uint8] | memoryview
"""The bytes of one sample's activations, contiguous and not empty."""

FORMAT_VERSION = 3
FACTS, INDEX, SEGMENT, USED = "facts", "index-", "segment-", "used-"
"""Name of a file, and prefixes of others."""

KEY_BYTES = 16
MAX_PAYLOAD_BYTES = 2**32 - 1
RECORD = np.dtype([("key", "<u8"), ("offset", "<i8"), ("check", "<u8"), ("nbytes", "<u4"), ("segment", "<u4")])
"""`key` is the first half of a key; the second half seeds the checksum. `segment` is used in memory only."""

_Record: TypeAlias = tuple[int, int, int, int, int]

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class GenerationFiles:
    """The open files of one generation. Not thread-safe.

    Args:
        path: the generation's folder.
        facts: facts to record if the folder or its facts are missing or damaged, as for JSON; None to change nothing.

    Raises:
        OSError: the folder or its facts cannot be opened.
        ValueError: the facts are missing, damaged, or of another version.

    Attributes:
        facts: the facts about the entries.
        num_damaged: number of entries that were found, but were truncated or had wrong bytes.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        self.num_damaged = 0
        self._runs: list[tuple[npt.NDArray[np.uint64], npt.NDArray[Any]]] = []  # sorted keys, and their records
        self._segments: list[str] = []
        self._opened: dict[str, int] = {}
        self._seen: dict[str, int] = {}  # bytes of each index file that were read
        if facts is not None:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
        with ExitStack() as closing:
            self._folder = open_private(path, os.O_RDONLY | os.O_DIRECTORY)
            closing.callback(os.close, self._folder)
            try:
                self._read_facts(closing)
            except ValueError:
                if facts is None:
                    raise
                self._write_facts(facts)
                self._read_facts(closing)
            self._closing = closing.pop_all()

    def open_file(self, name: str, flags: int) -> int:
        """Open a file in the folder; its descriptor is valid until `close`. A file that it creates has mode 0600."""
        descriptor = open_private(name, flags, self._folder)
        self._closing.callback(os.close, descriptor)
        return descriptor

    def close(self) -> None:
        """Close all files. Later calls fail or find nothing."""
        self._closing.close()
        self._folder = self._facts_file = -1  # the old descriptors may soon be reused for other files
        self._opened.clear()
        self._runs.clear()

    def are_outdated(self) -> bool:
        """Whether the generation was deleted, or has got other facts. Open files still work."""
        try:
            return os.fstat(self._facts_file).st_nlink == 0
        except OSError:  # a network file system has lost the file
            return True

    def read_into(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[bool]:
        """Read payloads into buffers, of which those of misses are undefined: `FileReader.read_into`."""
        found = self._read_known(keys, payloads)
        missing = [place for place, hit in enumerate(found) if not hit]
        if missing and self._read_indices():
            again = self._read_known([keys[place] for place in missing], [payloads[place] for place in missing])
            found = [hit if hit else again.pop(0) for hit in found]
        self.num_damaged += sum(hit is False for hit in found)
        return [hit is True for hit in found]

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Ask the kernel to read entries into the page cache, if the platform supports it."""
        if not hasattr(os, "posix_fadvise"):
            return
        found = self._find(keys)
        if not all(found) and self._read_indices():
            found = self._find(keys)
        for _, offset, _, nbytes, segment in (record for records in found for record in records):
            with suppress(OSError):
                os.posix_fadvise(self._segment(segment), offset, nbytes, os.POSIX_FADV_WILLNEED)

    def record(self, key: bytes, payload: memoryview, offset: int) -> _Record:
        """The record of an entry of this generation."""
        seed = int.from_bytes(key[8:], "little") ^ self._seed
        check = xxhash.xxh3_64_intdigest(payload, seed)
        return int.from_bytes(key[:8], "little"), offset, check, payload.nbytes, 0

    # ------------------------------------------------------------------------------------ entries
    def _read_known(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> list[bool | None]:
        """For each key, whether its payload was read; False if it was damaged, None if there is no record of it."""
        results: list[bool | None] = []
        for key, payload, records in zip(keys, payloads, self._find(keys), strict=True):
            records = [record for record in records if record[3] == payload.nbytes]
            results.append(any(self._read(key, payload, record) for record in records) if records else None)
        return results

    def _read(self, key: bytes, payload: memoryview, record: _Record) -> bool:
        _, offset, check, _, segment = record
        done = 0
        with suppress(OSError):
            while done < payload.nbytes:  # a call transfers at most 2 GiB, and may stop earlier
                got = os.preadv(self._segment(segment), [payload[done:]], offset + done)
                if not got:
                    return False
                done += got
        return done == payload.nbytes and self.record(key, payload, offset)[2] == check

    def _segment(self, number: int) -> int:
        name = self._segments[number]
        if name not in self._opened:
            self._opened[name] = self.open_file(name, os.O_RDONLY)
        return self._opened[name]

    def _find(self, keys: Sequence[bytes]) -> list[list[_Record]]:
        """All records of each key: there may be several, of which some are damaged."""
        found: list[list[_Record]] = [[] for _ in keys]
        wanted = np.frombuffer(b"".join(key[:8] for key in keys), "<u8")
        for sorted_keys, records in self._runs:
            begins = np.searchsorted(sorted_keys, wanted, "left").tolist()
            ends = np.searchsorted(sorted_keys, wanted, "right").tolist()
            for of_key, begin, end in zip(found, begins, ends, strict=True):
                of_key += records[begin:end].tolist()
        return found

    def _read_indices(self) -> bool:
        """Read what was appended to the index files. Returns whether that was anything."""
        grown = []
        with suppress(OSError), os.scandir(self._folder) as files:
            for file in files:
                if file.name.startswith(INDEX):
                    with suppress(OSError):
                        grown.append(self._read_index(file.name, file.stat(follow_symlinks=False).st_size))
        new = [records for records in grown if len(records)]
        # each run is more than twice as long as the next, so there are few, and each record is sorted a few times only
        while new:
            records = np.concatenate(new)
            records = records[np.argsort(records["key"], kind="stable")]
            if not self._runs or len(self._runs[-1][0]) > 2 * len(records):
                self._runs.append((np.ascontiguousarray(records["key"]), records))
                return True
            new = [records, self._runs.pop()[1]]
        return False

    def _read_index(self, name: str, nbytes: int) -> npt.NDArray[Any]:
        seen = self._seen.get(name, 0)
        whole = (nbytes - seen) // RECORD.itemsize * RECORD.itemsize
        if whole <= 0:
            return np.empty(0, RECORD)
        file = open_private(name, os.O_RDONLY, self._folder)
        try:
            raw = os.pread(file, whole, seen)
        finally:
            os.close(file)
        records = np.frombuffer(raw, RECORD, len(raw) // RECORD.itemsize).copy()
        if name not in self._seen:
            self._segments.append(f"{SEGMENT}{name.removeprefix(INDEX)}")
        self._seen[name] = seen + records.nbytes
        records["segment"] = self._segments.index(f"{SEGMENT}{name.removeprefix(INDEX)}")
        return records

    # ------------------------------------------------------------------------------------ facts
    def _read_facts(self, closing: ExitStack) -> None:
        try:
            self._facts_file = open_private(FACTS, os.O_RDONLY, self._folder)
        except FileNotFoundError as error:
            raise ValueError(f"{FACTS} is missing.") from error
        closing.callback(os.close, self._facts_file)
        checksum, _, content = os.pread(self._facts_file, 2**20, 0).partition(b"\n")
        # a damaged fact could be the size of a reader's allocation
        if checksum.decode("latin-1") != xxhash.xxh3_64_hexdigest(content):
            raise ValueError(f"{FACTS} is damaged or was written by another version.")
        read = json.loads(content)
        if read["version"] != FORMAT_VERSION:
            raise ValueError(f"{FACTS} was written by another version.")
        self.facts: dict[str, Any] = read["facts"]
        self._seed = xxhash.xxh3_64_intdigest(content)

    def _write_facts(self, facts: Mapping[str, Any]) -> None:
        """Write the facts in one step. Entries under other facts become misses, and their writers are outdated."""
        content = json.dumps({"version": FORMAT_VERSION, "facts": dict(facts)}, sort_keys=True).encode()
        new = f"{NEW}{uuid.uuid4().hex}"
        file = open_private(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._folder)
        try:
            write_all(file, memoryview(xxhash.xxh3_64_hexdigest(content).encode() + b"\n" + content), 0)
            os.replace(new, FACTS, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(new, dir_fd=self._folder)
            raise
        finally:
            os.close(file)


class FileReader:
    """Looks up samples in one generation, which may be created and deleted at any time. Not thread-safe.

    Whatever cannot be read is a miss. A reader works in forked processes; a pickled copy opens the files again.

    Args:
        path: the generation's folder.

    Attributes:
        num_damaged: number of entries that `read_into` has found damaged.
    """

    def __init__(self, path: Path) -> None:
        self.num_damaged = 0
        self._path = path
        self._files: GenerationFiles | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None}  # descriptors are not valid in another process

    @property
    def facts(self) -> dict[str, Any] | None:
        """Facts about the generation, recorded by the process that created it; None if there is no generation."""
        files = self._current_files()
        return None if files is None else files.facts

    def read_into(self, keys: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        """Read payloads into buffers.

        Args:
            keys: 16 bytes each.
            rows: writable buffers; a payload whose length differs from its buffer's is a miss.

        Returns:
            For each key whether its buffer now holds the payload. If not, the buffer's bytes are undefined.

        Raises:
            ValueError: a key does not have 16 bytes, or the numbers of keys and buffers differ.
        """
        _check_keys(keys, rows)
        files = self._current_files()
        if files is None:
            return [False] * len(keys)
        before = files.num_damaged
        hits = files.read_into(keys, [_flat(row) for row in rows])
        self.num_damaged += files.num_damaged - before
        return hits

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Ask the kernel to read the entries into the page cache, if the platform supports it. Does not block.

        Raises:
            ValueError: a key does not have 16 bytes.
        """
        _check_keys(keys)
        files = self._current_files()
        if files is not None:
            files.prefetch(keys)

    def close(self) -> None:
        """Close the files. The next call opens them again."""
        if self._files is not None:
            self._files.close()
            self._files = None

    def _current_files(self) -> GenerationFiles | None:
        if self._files is not None and self._files.are_outdated():
            self.close()
        if self._files is None:
            with suppress(OSError, ValueError):
                self._files = GenerationFiles(self._path)
        return self._files


class FileWriter:
    """Adds samples to one generation. Created by `FileStore.writer`. Not thread-safe.

    It remains usable after an error, because there may be space again. Its files are created by the first entry.

    Args:
        path: the generation's folder.
        facts: used if the generation is created.
        claim: called with a number of bytes before they are written; raises an error if they must not be.

    Raises:
        OSError: the folder cannot be written to.

    Attributes:
        num_present: number of samples given to `put` that were in the store already.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], claim: Callable[[int], None]) -> None:
        self.num_present = 0
        self._path = path
        self._claim = claim
        self._files = GenerationFiles(path, facts)
        self._outputs: tuple[int, int] | None = None  # segment and index
        self._ends = (0, 0)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the generation, recorded by the process that created it."""
        return self._files.facts

    def __reduce__(self) -> NoReturn:
        raise TypeError("A FileWriter cannot be sent to another process. Send the FileStore instead.")

    def put(self, keys: Sequence[bytes], rows: Sequence[Row]) -> int:
        """Store samples, so that the readers of all processes find them.

        1. Skip what a reader would find already. A damaged entry is not found, so it is stored again.
        2. Write the payloads.
        3. Write their records.

        Args:
            keys: 16 bytes each, uniformly distributed (a hash).
            rows: the payloads.

        Returns:
            The number of entries written.

        Raises:
            StoreFull: the store would exceed its limit. Nothing was written.
            OSError: the disk is full or fails, or the generation has been deleted (`errno.ESTALE`). Nothing remains of
                the entries.
            ValueError: a key does not have 16 bytes, a payload has 4 GiB or more, or the numbers of keys and payloads
                differ.
        """
        _check_keys(keys, rows)
        if self._files.are_outdated() or any(os.fstat(file).st_nlink == 0 for file in self._outputs or ()):
            raise _deleted(self._path)
        payloads = dict(zip(keys, map(_flat, rows), strict=True))
        largest = max((payload.nbytes for payload in payloads.values()), default=0)
        if largest > MAX_PAYLOAD_BYTES:
            raise ValueError(f"A sample has {largest} bytes, but at most {MAX_PAYLOAD_BYTES} are allowed.")
        buffers = [np.empty(payload.nbytes, np.uint8).data for payload in payloads.values()]
        hits = self._files.read_into(list(payloads), buffers)  # (1)
        self.num_present += sum(hits)
        new = [entry for entry, hit in zip(payloads.items(), hits, strict=True) if not hit]
        if new:
            self._claim(sum(payload.nbytes + RECORD.itemsize for _, payload in new))
            self._append(new)
        return len(new)

    def close(self) -> None:
        """Close the files. A later `put` fails."""
        self._files.close()
        self._outputs = None

    def _append(self, entries: Sequence[tuple[bytes, memoryview]]) -> None:
        if self._outputs is None:
            name, new = uuid.uuid4().hex, os.O_WRONLY | os.O_CREAT | os.O_EXCL
            try:
                segment, index = (self._files.open_file(f"{prefix}{name}", new) for prefix in (SEGMENT, INDEX))
            except FileNotFoundError as error:
                raise _deleted(self._path) from error
            self._outputs = segment, index
        segment, index = self._outputs
        end, end_of_index = self._ends
        try:
            records = []
            for key, payload in entries:
                records.append(self._files.record(key, payload, end))
                write_all(segment, payload, end)  # (2)
                end += payload.nbytes
            written = memoryview(np.array(records, RECORD).tobytes())
            write_all(index, written, end_of_index)  # (3)
        except OSError:
            for file, before in zip(self._outputs, self._ends, strict=True):
                with suppress(OSError):  # if space cannot be freed, it is wasted, but no entry is wrong
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
    """Why a file or folder is not trusted, in words; None if only this user, or root, may write to it."""
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return "it is neither a file nor a folder"
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
    if status.st_mode & OTHERS_MAY_WRITE:
        return f"other users may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _check_keys(keys: Sequence[bytes], rows: Sequence[Row] | None = None) -> None:
    for key in keys:
        if len(key) != KEY_BYTES:
            raise ValueError(f"A key has {len(key)} bytes, but keys must have {KEY_BYTES}.")
    if rows is not None and len(rows) != len(keys):
        raise ValueError(f"There are {len(keys)} keys and {len(rows)} samples. Pass one sample for each key.")


def _flat(row: Row) -> memoryview:
    return (row.data if isinstance(row, np.ndarray) else row).cast("B")
