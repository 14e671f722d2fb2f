"""An `ActivationStore` in files on a node's disk.

    folder/
      003-<fingerprint>/    a generation: outputs of the first 3 layers, frozen with these weights, for each sample
      005-<fingerprint>/    the next one, after a freeze

All processes of a node read and write one folder concurrently, without locks. A process that loses a race or finds a
damaged file gets a miss; it never gets wrong bytes (see `activation_files.py`), and a reader never raises an error. To
achieve this,

1. a payload is written before its record, so that a killed writer leaves only bytes that no record refers to;
2. a generation is created and deleted by a single rename of its folder: the process that creates it first determines
   the contents of `meta.json`, and no process sees a partially created one;
3. only this user may write to the folder and its contents (`why_refused`), and no symbolic link is followed;
4. what is renamed or deleted is in the folder, which this package has created (`OwnFolder`).

Nothing is synchronized to the disk; a power failure results in misses. The page cache serves as the in-memory tier.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ..own_files import NEW, OwnFolder
from .activation_files import (
    HEADER_BYTES,
    KEY_BYTES,
    MAX_BUCKETS,
    MAX_PAYLOAD_BYTES,
    MAX_WRITER,
    META,
    RECORDS_PER_BUCKET,
    SEGMENT,
    TABLE,
    GenerationFiles,
    Meta,
    Record,
    entry_header,
    open_private,
    transfer,
    why_not_private,
)
from .activation_store import Row, StoreFull

PROBED_BYTES = 4096
"""Size of the file that shows whether the store can be written to."""
SMALL_TABLE = 2**20
"""Size in bytes up to which a table does not count in the limit."""
BLOCK_BYTES = 512
"""Unit of `st_blocks`."""
USABLE_DISK = 0.8
"""Share of the free disk that the store may fill, where no limit is given."""

RECORDS_PER_ROW = 4
"""Size of the table per sample. At this load a bucket holds 4 records on average; 1 in a million needs over 16."""

SECONDS_UNTIL_LEFT = 3600.0
"""Creating or re-checking a generation takes an instant, so a temporary folder older than this was left behind."""

_GENERATION = re.compile(r"(\d{3,})-([\w-]+)", re.ASCII)
_DOUBTFUL, _DELETED = ".doubtful-", ".deleted-"
_USED = "used-"  # prefix of an empty file for each user; its modification time is when the user last needed it


class FileReader:
    """A `GenerationReader`, which works in forked processes; a pickled copy opens the files again. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.num_damaged = 0
        self._path = path
        self._files: GenerationFiles | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None}  # descriptors are not valid in another process

    @property
    def facts(self) -> dict[str, Any] | None:
        files = self._current_files()
        return None if files is None else files.meta.facts

    def read_into(self, keys: Sequence[bytes], rows: Sequence[Row]) -> list[bool]:
        """Read payloads into buffers: `GenerationReader.read_into`.

        Raises:
            ValueError: A key does not have 16 bytes, or the numbers of keys and buffers differ.
        """
        _check_keys(keys, rows)
        files = self._current_files()
        if files is None:
            return [False] * len(keys)
        before = files.num_damaged
        hits = [files.read_into(key, _flat(row)) for key, row in zip(keys, rows, strict=True)]
        self.num_damaged += files.num_damaged - before
        return hits

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Ask the kernel to read the entries into the page cache, if the platform supports it. Does not block.

        Raises:
            ValueError: A key does not have 16 bytes.
        """
        _check_keys(keys)
        files = self._current_files()
        if files is not None:
            for key in keys:
                files.prefetch(key)

    def close(self) -> None:
        """Close the files. The next call opens them again."""
        if self._files is not None:
            self._files.close()
            self._files = None

    def _current_files(self) -> GenerationFiles | None:
        if self._files is not None and self._files.are_deleted():
            self.close()
        if self._files is None:
            with suppress(OSError, ValueError):
                self._files = GenerationFiles(self._path, os.O_RDONLY)
        return self._files


class FileWriter:
    """A `GenerationWriter`, which appends to a segment. Created by `FileStore.writer`. Not thread-safe.

    Attributes:
        num_entries: number of entries that this object has written.
        nbytes: number of bytes that this object has appended, including the entries' headers.
    """

    def __init__(self, path: Path, writer: int, max_bytes: int | None) -> None:
        self.num_entries = 0
        self.num_present = 0
        self.nbytes = 0
        self._path = path
        self._writer = writer
        self._max_bytes = max_bytes
        self._files = GenerationFiles(path, os.O_RDWR | os.O_CREAT)
        try:
            self._segment = self._files.open_file(f"{SEGMENT}{writer}", os.O_WRONLY | os.O_CREAT)
        except OSError:
            self._files.close()
            raise

    @property
    def facts(self) -> dict[str, Any]:
        return self._files.meta.facts

    def __reduce__(self) -> NoReturn:
        raise TypeError("A FileWriter cannot be sent to another process. Send the FileStore instead.")

    def put(self, keys: Sequence[bytes], rows: Sequence[Row]) -> int:
        """Store samples, so that the readers of all processes find them.

        1. Skip what a reader would find already, and what the table has no room for (it remains a miss). A damaged
           entry is not found, so it is stored again.
        2. Claim space at the end of the segment, because a process of another job may append to the same segment.
        3. Write all entries.
        4. Write their records.

        Args:
            keys: 16 bytes each, uniformly distributed (a hash).
            rows: the payloads.

        Returns:
            The number of entries written.

        Raises:
            StoreFull: All generations together would exceed `max_bytes`. Nothing was written.
            OSError: The disk is full or fails, or the generation has been deleted. Incomplete entries are rolled back.
            ValueError: A key does not have 16 bytes, a payload has 4 GiB or more, or the numbers of keys and payloads
                differ.
        """
        _check_keys(keys, rows)
        if self._files.are_deleted() or os.fstat(self._segment).st_nlink == 0:
            raise OSError(errno.ESTALE, "the generation has been deleted", str(self._path))
        payloads: dict[bytes, memoryview] = {}
        for key, row in zip(keys, rows, strict=True):  # (1)
            payload = _flat(row)
            if payload.nbytes > MAX_PAYLOAD_BYTES:
                raise ValueError(f"A sample has {payload.nbytes} bytes, but at most {MAX_PAYLOAD_BYTES} are allowed.")
            if key in payloads:
                continue
            if self._is_hit(key, payload.nbytes):
                self.num_present += 1
            elif self._files.slot_for(key) is not None:
                payloads[key] = payload
        if not payloads:
            return 0

        size = sum(HEADER_BYTES + payload.nbytes for payload in payloads.values())
        start = self._claim(size)  # (2)
        try:
            buffers = [part for key, payload in payloads.items() for part in (entry_header(key, payload), payload)]
            if transfer(os.pwritev, self._segment, buffers, start) < size:  # (3)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            self._give_back(start, size)
            raise
        self.nbytes += size

        before = self.num_entries
        offset = start
        for key, payload in payloads.items():  # (4)
            self.num_entries += self._files.insert(key, Record(offset, payload.nbytes, self._writer))
            offset += HEADER_BYTES + payload.nbytes
        return self.num_entries - before

    def close(self) -> None:
        """Close the files. A later `put` fails."""
        self._files.close()
        self._segment = -1  # the old descriptor may soon be reused for another file

    def _is_hit(self, key: bytes, nbytes: int) -> bool:
        record = self._files.find(key)
        if record is None or record.nbytes != nbytes:
            return False
        return self._files.read_into(key, memoryview(bytearray(nbytes)))

    def _claim(self, size: int) -> int:
        """Extend the segment by `size` zero bytes; return the offset at which they start."""
        if self._max_bytes is not None:
            used = _segments_nbytes(OwnFolder(self._path.parent))
            if used + size > self._max_bytes:
                raise StoreFull(
                    errno.ENOSPC,
                    f"{used} bytes are stored and max_bytes is {self._max_bytes}, so {size} more bytes do not fit."
                    " Raise activation_cache_max_gib.",
                    str(self._path.parent),
                )
        start = os.fstat(self._segment).st_size
        os.ftruncate(self._segment, start + size)
        return start

    def _give_back(self, start: int, size: int) -> None:
        with suppress(OSError):  # if the space cannot be freed, it is wasted, but no entry is wrong
            if os.fstat(self._segment).st_size == start + size:  # no other process has appended since
                os.ftruncate(self._segment, start)


class FileStore:
    """A folder of generations, shared by the processes of a node, by jobs, and by models.

    It keeps no files open and may be pickled.

    Args:
        folder: path of the folder; the first writer creates it, with the marker of an `OwnFolder`.
        max_bytes: upper bound on the size of the segments of all generations together, whichever process wrote them.
            Writers that append at the same time may each exceed it by one batch. None: no bound but the disk's size.
        user: name of the training for its marks; it becomes part of a file name.

    Raises:
        ValueError: `max_bytes` is negative.
    """

    def __init__(self, folder: str | os.PathLike[str], *, max_bytes: int | None = None, user: str = "anybody") -> None:
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(
                f"max_bytes is {max_bytes}. Set it to the maximum size of the store in bytes, or to None for no limit."
            )
        self.folder = Path(folder)
        self._own = OwnFolder(self.folder)
        self.max_bytes = max_bytes
        self.user = user

    def why_refused(self) -> str | None:
        """Why the folder is neither read nor written, in words; None if it may be used, or does not exist yet.

        The user may have made it, and other users who may write to it could replace a generation by anything.
        """
        try:
            return self._own.why_foreign() or why_not_private(os.lstat(self.folder))
        except OSError:
            return None  # a writer will get the error

    def why_unwritable(self) -> str | None:
        """Write a file without a name into the folder, or where it would be created; why that fails, or None."""
        if self.why_refused() is not None:
            return None  # nothing is written, and the reason is another one
        folder = self.folder
        while not os.path.lexists(folder):
            folder = folder.parent
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(PROBED_BYTES))
                file.flush()
        except OSError as error:
            return str(error)
        return None

    def usable_bytes(self) -> int | None:
        """What is stored, and most of what the disk has free; None if that cannot be found out."""
        try:
            folder = self.folder
            while not folder.exists():
                folder = folder.parent
            return self.nbytes() + int(shutil.disk_usage(folder).free * USABLE_DISK)
        except OSError:
            return None

    def limit(self, max_gib: float | None) -> None:
        """Bound its size: as given, and not more than the disk has, where that can be found out."""
        usable = self.usable_bytes()
        most = sys.maxsize if usable is None else usable  # who writes will be told what is wrong with the folder
        self.max_bytes = most if max_gib is None else int(min(max_gib * 2**30, most))

    def reader(self, num_frozen: int, fingerprint: str) -> FileReader:
        """Return a reader of a generation, whether or not the generation exists yet.

        Raises:
            ValueError: The number or the fingerprint is invalid.
        """
        return FileReader(self._path(num_frozen, fingerprint))

    def writer(
        self,
        num_frozen: int,
        fingerprint: str,
        *,
        writer: int,
        capacity: int,
        facts: Mapping[str, Any] | None = None,
    ) -> FileWriter:
        """Open a generation for appending: `ActivationStore.writer`. The table has room for four times `capacity`.

        Raises:
            OSError: The folder cannot be written to.
            ValueError: The number of layers or the fingerprint is invalid, or `writer` is not between 0 and 65535, or
                `capacity` is not between 1 and 2^33.
        """
        path = self._path(num_frozen, fingerprint)
        if not 0 <= writer <= MAX_WRITER:
            raise ValueError(f"writer is {writer}, but must be between 0 and {MAX_WRITER}.")
        num_buckets = -(-capacity * RECORDS_PER_ROW // RECORDS_PER_BUCKET)
        if not 1 <= num_buckets <= MAX_BUCKETS:
            raise ValueError(f"capacity is {capacity}. Set it to the expected number of samples, from 1 to 2^33.")
        self._own.create()
        refusal = self.why_refused()
        if refusal is not None:
            raise PermissionError(errno.EPERM, refusal, str(self.folder))
        self._remove_deleted()
        for _ in range(10):  # other processes may create and delete it at the same time
            try:
                opened = FileWriter(path, writer, self.max_bytes)
                self.mark_used(num_frozen, fingerprint)
                return opened
            except FileNotFoundError:
                self._create(path, Meta(num_buckets, dict(facts or {})))
            except ValueError:
                self._discard_damaged(path)
        raise OSError(errno.ESTALE, "other processes keep deleting the generation", str(path))

    def delete(self, num_frozen: int, fingerprint: str) -> None:
        """Delete a generation: `ActivationStore.delete`.

        Raises:
            OSError: The folder cannot be written to.
            ValueError: The number of layers or the fingerprint is invalid.
        """
        path = self._path(num_frozen, fingerprint)
        with suppress(FileNotFoundError):
            self._own.rename_child(path.name, _unique(_DELETED))
        self._remove_deleted()

    def mark_superseded(self, num_frozen: int, fingerprint: str) -> None:
        self._mark(num_frozen, fingerprint, (0, 0))

    def mark_used(self, num_frozen: int, fingerprint: str) -> None:
        self._mark(num_frozen, fingerprint, None)

    def _mark(self, num_frozen: int, fingerprint: str, times: tuple[int, int] | None) -> None:
        """Set the times of this training's mark, and of the generation if they are given; None: now."""
        with suppress(OSError):
            folder = open_private(self._path(num_frozen, fingerprint), os.O_RDONLY | os.O_DIRECTORY)
            try:
                mark = open_private(f"{_USED}{self.user}", os.O_WRONLY | os.O_CREAT, folder)
                os.utime(mark, times)
                os.close(mark)
                if times is not None:
                    os.utime(folder, times)
            finally:
                os.close(folder)

    def evict(self, unused_since: float) -> bool:
        """Delete the least recently used generation, whichever process created it: `ActivationStore.evict`."""
        if any(name.startswith(_DELETED) for name in _names(self._own)):
            self._remove_deleted()
            return True
        used: list[tuple[float, int, str]] = []
        for number, fingerprint in self.generations():
            with suppress(OSError):  # deleted in the meantime
                used.append((_last_used(self._path(number, fingerprint)), number, fingerprint))
        if not used or min(used)[0] >= unused_since:
            return False
        self.delete(*min(used)[1:])
        return True

    def generations(self) -> list[tuple[int, str]]:
        names = map(_GENERATION.fullmatch, _names(self._own))
        return sorted((int(name[1]), name[2]) for name in names if name is not None)

    def nbytes(self) -> int:
        """Size of the segments of all generations, and of tables that are larger than `SMALL_TABLE`."""
        return _segments_nbytes(self._own)

    def remove(self) -> None:
        """Delete the folder."""
        with suppress(OSError):
            self._own.destroy()

    def _path(self, num_frozen: int, fingerprint: str) -> Path:
        name = f"{num_frozen:03d}-{fingerprint}"
        if _GENERATION.fullmatch(name) is None:
            raise ValueError(
                f"num_frozen is {num_frozen} and fingerprint is {fingerprint!r}, but num_frozen must not be negative,"
                " and fingerprint may contain only letters, digits, '-' and '_'."
            )
        return self.folder / name

    def _create(self, path: Path, meta: Meta) -> None:
        """Create a generation. If another process creates it first, all processes use that one."""
        new = self.folder / _unique(NEW)
        try:
            new.mkdir(mode=0o700)
            for name, content in ((META, meta.to_json()), (TABLE, "")):
                with open(new / name, "x", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
                    file.write(content)
            self._own.rename_child(new.name, path.name)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            self._own.remove(new.name)

    def _discard_damaged(self, path: Path) -> None:
        """Delete a generation that cannot be read. All processes of a job may find it unreadable at the same time.

        Another process may already have created a new one in its place. Therefore the folder is first moved to a
        unique name, which no other process deletes or replaces, then checked again, and moved back if it is valid.
        Processes that have it open are not affected.
        """
        doubtful = _unique(_DOUBTFUL)
        with suppress(FileNotFoundError):
            self._own.rename_child(path.name, doubtful)
            try:
                GenerationFiles(self.folder / doubtful, os.O_RDONLY).close()
                self._own.rename_child(doubtful, path.name)
            except (OSError, ValueError):
                self._own.rename_child(doubtful, _unique(_DELETED))
        self._remove_deleted()

    def _remove_deleted(self) -> None:
        """Remove deleted generations, and temporary folders of processes that were killed."""
        left = [
            name
            for name in _names(self._own)
            if name.startswith(_DELETED)
            or (name.startswith((NEW, _DOUBTFUL)) and _age(self.folder / name) > SECONDS_UNTIL_LEFT)
        ]
        self._own.remove(*left)


def _unique(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def _check_keys(keys: Sequence[bytes], rows: Sequence[Row] | None = None) -> None:
    for key in keys:
        if len(key) != KEY_BYTES:
            raise ValueError(f"A key has {len(key)} bytes, but keys must have {KEY_BYTES}.")
    if rows is not None and len(rows) != len(keys):
        raise ValueError(f"There are {len(keys)} keys and {len(rows)} samples. Pass one sample for each key.")


def _flat(row: Row) -> memoryview:
    return (row.data if isinstance(row, np.ndarray) else row).cast("B")


def _names(own: OwnFolder) -> list[str]:
    try:
        return own.names()
    except OSError:  # a folder of the user's, a file, or without permission
        return []


def _segments_nbytes(own: OwnFolder) -> int:
    """Size of all segments, including those about to be removed, which still take up space; and of large tables.

    Of a table it is what the disk holds: it is sparse.
    """
    total = 0
    for name in _names(own):
        if _GENERATION.fullmatch(name) or name.startswith((_DOUBTFUL, _DELETED)):
            for file in _scan(own.path / name):
                with suppress(OSError):  # removed in the meantime
                    if file.name.startswith(SEGMENT):
                        total += file.stat(follow_symlinks=False).st_size
                    elif file.name == TABLE:
                        held = file.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
                        total += held if held > SMALL_TABLE else 0
    return total


def _last_used(generation: Path) -> float:
    """Seconds since the epoch at which a generation was created, or last marked as needed."""
    marks = [entry.stat().st_mtime for entry in _scan(generation) if entry.name.startswith(_USED)]
    return max([generation.stat().st_mtime, *marks])


def _age(folder: Path) -> float:
    """Seconds since a folder was modified; 0 if it no longer exists."""
    try:
        return time.time() - folder.lstat().st_mtime
    except OSError:
        return 0.0


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:  # does not exist, or is a file
        return []
