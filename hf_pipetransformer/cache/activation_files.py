"""The files of one generation of cached activations, and how they are found, read and trusted.

    <generation>/
      meta.json          format version, number of buckets, facts for people and programs, checksum
      table              buckets of 16 records: key, offset, nbytes, writer, check          (sparse)
      segment-<writer>   entries one after another: magic, nbytes, checksum, key, payload  (append-only)
      used-<training>    empty: when it was touched, this training had need of the generation

    key ──hash──> bucket ──> record of the key ──> offset in segment-<writer> ──> header agrees? checksum? ──> hit

Nothing here is locked or synchronised to the disk, and files may be damaged, cut short or deleted at any time. So:

1. An entry vouches for itself. A hit needs its key, length, magic number and checksum, whatever led the reader there.
2. Files are read and written at explicit offsets and never mapped into memory: a full disk, or a file that was cut
   short, is an error or a short read, not a SIGBUS, and processes that were forked share no file position.
3. All files are opened relative to the generation's folder: they belong together even where the folder is moved away
   and another one takes its name.
4. No symbolic link is followed, and nothing is opened that another user owns or may write to: who can put a link in
   the place of a segment could else make a training write to any of its user's files, or read foreign ones.
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
"""What a segment's name begins with; its writer's number follows."""

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
_MAX_OFFSET = 2**63 - 2**33  # leaves the system calls a number for the entry's end
_MAX_BUFFERS = 1024  # IOV_MAX of Linux and macOS

HEADER_BYTES = _HEADER.size

OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Meta(NamedTuple):
    """What `meta.json` says besides the version."""

    num_buckets: int
    facts: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps({**self._content(), "checksum": self.checksum()})

    def checksum(self) -> str:
        """Of all that is said: a number of the facts may be the size of what a reader allocates."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self._content(), sort_keys=True).encode())

    def _content(self) -> dict[str, Any]:
        return {"version": FORMAT_VERSION, **self._asdict()}


class Record(NamedTuple):
    """Where an entry is."""

    offset: int
    nbytes: int
    """Of the payload, without the header."""
    writer: int


class GenerationFiles:
    """The open files of one generation. One thread at a time.

    Args:
        path: the folder.
        table_flags: how to open the table, as for `os.open`.

    Raises:
        OSError: The folder or the table cannot be opened.
        ValueError: `meta.json` is missing, damaged, or of another version.

    Attributes:
        num_damaged: entries that the table had, and that could not be read whole or had other bytes.
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
        """Descriptor of a file in the folder, until `close`. A file made by it has mode 0600."""
        descriptor = open_private(name, flags, self._folder)
        self._closing.callback(os.close, descriptor)
        return descriptor

    def close(self) -> None:
        """Close all files. What is called later fails or finds nothing."""
        self._closing.close()
        self._folder = self._table = -1  # the old numbers may soon be other files'
        self._segments.clear()

    def are_deleted(self) -> bool:
        """Whether the generation has been deleted: what is open still works, but other processes cannot see it."""
        try:
            return os.fstat(self._table).st_nlink == 0
        except OSError:  # a network file system has lost it
            return True

    def find(self, key: bytes) -> Record | None:
        """The record of `key`; None where there is none that is intact."""
        try:
            bucket = self._read_bucket(key)
        except OSError:
            return None
        for slot in _slots_of(key, bucket):
            if (record := _unpack_record(bucket, slot)) is not None:
                return record
        return None

    def read_into(self, key: bytes, payload: memoryview) -> bool:
        """Read the payload of `key` to its place.

        Args:
            key: 16 bytes.
            payload: where to, writable; a payload of another length is not read.

        Returns:
            Whether all bytes arrived and the entry says that they are those of `key`. If not, the bytes are undefined.
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
        """Ask the kernel to read an entry into the page cache, where the platform has a call for it."""
        record = self.find(key)
        if record is not None and hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                segment = self._segment(record.writer)
                os.posix_fadvise(segment, record.offset, HEADER_BYTES + record.nbytes, os.POSIX_FADV_WILLNEED)

    def slot_for(self, key: bytes) -> int | None:
        """Where in the table the record of `key` is or may be written; None where its bucket is full.

        Raises:
            OSError: The table cannot be read.
        """
        bucket = self._read_bucket(key)
        own = next(_slots_of(key, bucket), None)
        if own is not None:
            return self._bucket_offset(key) + own
        begin = key[-1] % RECORDS_PER_BUCKET  # two writers that race for a bucket seldom take the same slot
        for slot in (*_SLOTS[begin:], *_SLOTS[:begin]):
            if _unpack_record(bucket, slot) is None:  # empty or damaged
                return self._bucket_offset(key) + slot
        return None

    def insert(self, key: bytes, record: Record) -> bool:
        """Write the record of an entry that is complete. False if its bucket is full.

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
            raise ValueError(f"{META} is missing, or was never this program's.") from error
        match content:
            case {"version": version, "num_buckets": int(num_buckets), "facts": dict(facts), "checksum": checksum} if (
                version == FORMAT_VERSION and 1 <= num_buckets <= MAX_BUCKETS
            ):
                meta = Meta(num_buckets, facts)
                if checksum == meta.checksum():
                    return meta
        raise ValueError(f"{META} is damaged or of another version.")

    def _bucket_offset(self, key: bytes) -> int:
        return int.from_bytes(key[:8], "little") % self.meta.num_buckets * _BUCKET_BYTES

    def _read_bucket(self, key: bytes) -> bytes:
        """The key's bucket; zeros, which are no records, where the file has not grown so far."""
        return os.pread(self._table, _BUCKET_BYTES, self._bucket_offset(key)).ljust(_BUCKET_BYTES, b"\0")

    def _segment(self, writer: int) -> int:
        if writer not in self._segments:
            self._segments[writer] = self.open_file(f"{SEGMENT}{writer}", os.O_RDONLY)
        return self._segments[writer]


def open_private(path: str | Path, flags: int, folder: int | None = None) -> int:
    """Open a file or folder that is this user's alone to write. A file made by it has mode 0600.

    Args:
        path: of a regular file or, with `O_DIRECTORY`, a folder.
        flags: as for `os.open`.
        folder: descriptor of the folder that the path is relative to.

    Raises:
        OSError: As `os.open`; the path is a symbolic link, or something else than a file or folder; another user owns
            it or may write to it.
    """
    # without O_NONBLOCK the opening of a named pipe would wait for its other end
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
    """Why a file or folder is not to be trusted, in words; None: it is this user's, or root's, alone to write."""
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return "it is neither a file nor a folder"
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, and this process runs as user {os.geteuid()}"
    if status.st_mode & OTHERS_MAY_WRITE:
        return f"other users may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def entry_header(key: bytes, payload: memoryview) -> bytes:
    """What stands before a payload and vouches for it."""
    return _HEADER.pack(_MAGIC, payload.nbytes, xxhash.xxh3_64_intdigest(payload), key)


def transfer(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    buffers: Sequence[bytes | bytearray | memoryview],
    offset: int,
) -> int:
    """Move all bytes of flat buffers from or to a file, by `os.preadv` or `os.pwritev`.

    One call takes a limited number of buffers, moves at most 2 GiB, and may stop before that.

    Returns:
        The bytes moved: fewer than the buffers' only where the file ends.

    Raises:
        OSError: As the call; some bytes may have been moved.
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
    """The slots that begin with the key: none or one, unless two writers have raced for it."""
    slot = bucket.find(key)
    while slot >= 0:
        if slot % _RECORD.size == 0:
            yield slot
        slot = bucket.find(key, slot + 1)


def _pack_record(key: bytes, record: Record) -> bytes:
    checked = _RECORD.pack(key, *record, 0)[:_CHECKED_BYTES]
    return checked + _check(checked)


def _unpack_record(bucket: bytes, slot: int) -> Record | None:
    """The record, or None: its check keeps a reader from following damaged numbers, and zeros have another one."""
    checked = bucket[slot : slot + _CHECKED_BYTES]
    if _check(checked) != bucket[slot + _CHECKED_BYTES : slot + _RECORD.size]:
        return None
    _, *numbers, _ = _RECORD.unpack_from(bucket, slot)
    record = Record(*numbers)
    return record if record.offset <= _MAX_OFFSET else None


def _check(checked: bytes) -> bytes:
    return xxhash.xxh3_64_digest(checked)[-2:]
