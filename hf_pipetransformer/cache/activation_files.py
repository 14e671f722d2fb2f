"""The files of one generation of cached activations: how entries are located, read and verified.

    <generation>/
      meta.json          format version, number of buckets, facts for people and programs, checksum
      table              buckets of 16 records: key, offset, nbytes, writer, check          (sparse)
      segment-<writer>   entries one after another: magic, nbytes, checksum, key, payload  (append-only)
      used-<training>    empty; its modification time is when this training last needed the generation

    key ──hash──> bucket ──> record of the key ──> offset in segment-<writer> ──> header agrees? checksum? ──> hit

There are no locks and no fsync, and files may be damaged, truncated or deleted at any time. Therefore:

1. Each entry is self-verifying. A hit requires the key, the length, the magic number and the checksum to match,
   whatever led the reader there.
2. Files are read and written at explicit offsets and are never memory-mapped. A full disk or a truncated file then
   results in an error or a short read, not in a SIGBUS, and forked processes share no file position.
3. All files are opened relative to the generation's folder, so they belong together even if the folder is moved away
   and another one takes its name.
4. No symbolic link is followed, and nothing is opened that another user owns or may write to. Otherwise, a user who
   replaces a segment by a link could make a training write to any file of its own user, or read foreign files.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

FORMAT_VERSION = 2
META = "meta.json"
TABLE = "table"
SEGMENT = "segment-"
"""Prefix of a segment's file name; the number of its writer follows."""

KEY_BYTES = 16
RECORDS_PER_BUCKET = 16
MAX_BUCKETS = 2**32
MAX_WRITER = 2**16 - 1
MAX_PAYLOAD_BYTES = 2**32 - 1

_HEADER = struct.Struct("<4sIQ16s")  # magic, nbytes of the payload, its xxh3-64, key
_MAGIC = b"hfpt"
_RECORD = struct.Struct("<16sQIHH")  # key, offset of the entry, nbytes of the payload, writer, check of all these
_CHECKED_BYTES = _RECORD.size - 2
_BUCKET_BYTES = RECORDS_PER_BUCKET * _RECORD.size
_SLOTS = range(0, _BUCKET_BYTES, _RECORD.size)
_MAX_OFFSET = 2**63 - 2**33  # so that the end of an entry still fits into the offsets of system calls
_MAX_BUFFERS = 1024  # IOV_MAX of Linux and macOS

HEADER_BYTES = _HEADER.size

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Meta(NamedTuple):
    """The contents of `meta.json` besides the version."""

    num_buckets: int
    facts: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps({**self._content(), "checksum": self.checksum()})

    def checksum(self) -> str:
        """Checksum of the whole content, because a damaged fact could be the size of a reader's allocation."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self._content(), sort_keys=True).encode())

    def _content(self) -> dict[str, Any]:
        return {"version": FORMAT_VERSION, **self._asdict()}


class Record(NamedTuple):
    """Location of an entry."""

    offset: int
    nbytes: int
    """Size of the payload, without the header."""
    writer: int


class GenerationFiles:
    """The open files of one generation. Not thread-safe.

    Args:
        path: the generation's folder.
        table_flags: how to open the table, as for `os.open`.

    Raises:
        OSError: The folder or the table cannot be opened.
        ValueError: `meta.json` is missing, damaged, or of another version.

    Attributes:
        num_damaged: number of entries that were in the table, but were truncated or had wrong bytes.
    """

    def __init__(self, path: Path, table_flags: int) -> None:
        self.num_damaged = 0
        self._segments: dict[int, int] = {}
        self._closing = ExitStack()
        self._folder = open_private(path, os.O_RDONLY | os.O_DIRECTORY)
        self._closing.callback(os.close, self._folder)
        try:
            self.meta = self._read_meta()
            self._table = self.open_file(TABLE, table_flags)
        except (OSError, ValueError):
            self._closing.close()
            raise

    def open_file(self, name: str, flags: int) -> int:
        """Open a file in the folder; its descriptor is valid until `close`. A file that it creates has mode 0600."""
        descriptor = open_private(name, flags, self._folder)
        self._closing.callback(os.close, descriptor)
        return descriptor

    def close(self) -> None:
        """Close all files. Later calls fail or find nothing."""
        self._closing.close()
        self._folder = self._table = -1  # the old descriptors may soon be reused for other files
        self._segments.clear()

    def are_deleted(self) -> bool:
        """Whether the generation was deleted: open files still work, but other processes cannot see them."""
        try:
            return os.fstat(self._table).st_nlink == 0
        except OSError:  # a network file system has lost the file
            return True

    def find(self, key: bytes) -> Record | None:
        """Return the record of `key`; None if there is no intact one."""
        try:
            bucket = self._read_bucket(key)
        except OSError:
            return None
        for slot in _slots_of(key, bucket):
            if (record := _unpack_record(bucket, slot)) is not None:
                return record
        return None

    def read_into(self, key: bytes, payload: memoryview) -> bool:
        """Read the payload of `key` into a buffer.

        Args:
            key: 16 bytes.
            payload: writable buffer; a payload of another length is not read.

        Returns:
            Whether all bytes were read and the entry's header confirms that they belong to `key`. If not, the bytes
            are undefined.
        """
        record = self.find(key)
        if record is None or record.nbytes != payload.nbytes:
            return False
        header = bytearray(HEADER_BYTES)
        is_whole = False
        with suppress(OSError):
            done = transfer(os.preadv, self._segment(record.writer), [header, payload], record.offset)
            is_whole = done == HEADER_BYTES + payload.nbytes and header == entry_header(key, payload)
        self.num_damaged += not is_whole
        return is_whole

    def prefetch(self, key: bytes) -> None:
        """Ask the kernel to read an entry into the page cache, if the platform supports it."""
        record = self.find(key)
        if record is not None and hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                segment = self._segment(record.writer)
                os.posix_fadvise(segment, record.offset, HEADER_BYTES + record.nbytes, os.POSIX_FADV_WILLNEED)

    def slot_for(self, key: bytes) -> int | None:
        """Offset in the table at which the record of `key` is or may be written; None if its bucket is full.

        Raises:
            OSError: The table cannot be read.
        """
        bucket = self._read_bucket(key)
        own = next(_slots_of(key, bucket), None)
        if own is not None:
            return self._bucket_offset(key) + own
        begin = key[-1] % RECORDS_PER_BUCKET  # so that two concurrent writers seldom choose the same slot
        for slot in (*_SLOTS[begin:], *_SLOTS[:begin]):
            if _unpack_record(bucket, slot) is None:  # empty or damaged
                return self._bucket_offset(key) + slot
        return None

    def insert(self, key: bytes, record: Record) -> bool:
        """Write the record of a complete entry. Returns False if its bucket is full.

        Raises:
            OSError: The table cannot be written.
        """
        slot = self.slot_for(key)
        if slot is None:
            return False
        packed = _pack_record(key, record)
        if os.pwrite(self._table, packed, slot) < len(packed):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), TABLE)
        return True

    def _read_meta(self) -> Meta:
        try:
            with open(open_private(META, os.O_RDONLY, self._folder), encoding="utf-8") as file:
                content = json.load(file)
        except (FileNotFoundError, RecursionError) as error:
            raise ValueError(f"{META} is missing, or was not written by this program.") from error
        match content:
            case {"version": version, "num_buckets": int(num_buckets), "facts": dict(facts), "checksum": checksum} if (
                version == FORMAT_VERSION and 1 <= num_buckets <= MAX_BUCKETS
            ):
                meta = Meta(num_buckets, facts)
                if checksum == meta.checksum():
                    return meta
        raise ValueError(f"{META} is damaged or was written by another version.")

    def _bucket_offset(self, key: bytes) -> int:
        return int.from_bytes(key[:8], "little") % self.meta.num_buckets * _BUCKET_BYTES

    def _read_bucket(self, key: bytes) -> bytes:
        """Read the key's bucket. Where the file is shorter, it is filled with zeros, which are no valid records."""
        return os.pread(self._table, _BUCKET_BYTES, self._bucket_offset(key)).ljust(_BUCKET_BYTES, b"\0")

    def _segment(self, writer: int) -> int:
        if writer not in self._segments:
            self._segments[writer] = self.open_file(f"{SEGMENT}{writer}", os.O_RDONLY)
        return self._segments[writer]


def open_private(path: str | Path, flags: int, folder: int | None = None) -> int:
    """Open a file or folder that only this user may write to. A file that it creates has mode 0600.

    Args:
        path: path of a regular file or, with `O_DIRECTORY`, of a folder.
        flags: as for `os.open`.
        folder: descriptor of the folder that the path is relative to.

    Raises:
        OSError: As `os.open`; or the path is a symbolic link, or is neither a file nor a folder; or another user owns
            it or may write to it.
    """
    # without O_NONBLOCK, opening a named pipe would block until its other end is opened
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode=0o600, dir_fd=folder)
    try:
        refusal = why_not_private(os.fstat(descriptor))
        if refusal is not None:
            raise PermissionError(errno.EPERM, refusal, str(path))
    except OSError:
        os.close(descriptor)
        raise
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


def entry_header(key: bytes, payload: memoryview) -> bytes:
    """The header that precedes a payload and verifies it."""
    return _HEADER.pack(_MAGIC, payload.nbytes, xxhash.xxh3_64_intdigest(payload), key)


def transfer(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    buffers: Sequence[bytes | bytearray | memoryview],
    offset: int,
) -> int:
    """Read all bytes of flat buffers from a file, or write them to it, with `os.preadv` or `os.pwritev`.

    A single call takes a limited number of buffers, transfers at most 2 GiB, and may stop earlier.

    Returns:
        The number of bytes transferred: fewer than the buffers have only if the file ends.

    Raises:
        OSError: As the call; some bytes may have been transferred.
    """
    left = [memoryview(buffer) for buffer in buffers]
    total = 0
    while left:
        moved = call(descriptor, left[:_MAX_BUFFERS], offset + total)
        if moved == 0:
            break
        total += moved
        done = 0
        while done < len(left) and moved >= left[done].nbytes:
            moved -= left[done].nbytes
            done += 1
        left = left[done:]
        if moved:
            left[0] = left[0][moved:]
    return total


def _slots_of(key: bytes, bucket: bytes) -> Iterator[int]:
    """Offsets of the slots that start with the key: none or one, unless two writers have inserted it concurrently."""
    slot = bucket.find(key)
    while slot >= 0:
        if slot % _RECORD.size == 0:
            yield slot
        slot = bucket.find(key, slot + 1)


def _pack_record(key: bytes, record: Record) -> bytes:
    checked = _RECORD.pack(key, *record, 0)[:_CHECKED_BYTES]
    return checked + _check(checked)


def _unpack_record(bucket: bytes, slot: int) -> Record | None:
    """Return the record, or None if its check does not match. The check rejects damaged records and zeros."""
    checked = bucket[slot : slot + _CHECKED_BYTES]
    if _check(checked) != bucket[slot + _CHECKED_BYTES : slot + _RECORD.size]:
        return None
    _, *numbers, _ = _RECORD.unpack_from(bucket, slot)
    record = Record(*numbers)
    return record if record.offset <= _MAX_OFFSET else None


def _check(checked: bytes) -> bytes:
    return xxhash.xxh3_64_digest(checked)[-2:]
