"""The cached activations of a node's trainings, in a folder on its disk.

    folder/
      003-<fingerprint>/    a generation: outputs of the first 3 layers, frozen with these weights, for each sample
      005-<fingerprint>/    the next one, after a freeze

    store.writer(3, fingerprint, facts).put(keys, rows)       one writer in each process that computes
    store.reader(3, fingerprint).read_into(keys, rows)        anywhere, also in a loader's workers

All processes of a node read and write one folder concurrently, without locks. A process that loses a race or finds a
damaged file gets a miss; it never gets wrong bytes (see `activation_files.py`), and a reader never raises an error. A
generation is deleted by a single rename of its folder. Only this user may write to the folder and its contents
(`why_refused`), and no symbolic link is followed. Only files inside the folder, which this package has created
(`OwnFolder`), are renamed or deleted. Files are not synchronized to the disk; a power failure results in misses. The
page cache serves as the in-memory tier. A store handles bytes only: keys and fingerprints are computed elsewhere.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ....own_files import OwnFolder
from ....planning.tables import MIB
from .activation_files import USED, FileReader, FileWriter, open_private, why_not_private

PROBED_BYTES = 4096
"""Size of the file that tests whether the store can be written to."""
USABLE_DISK = 0.8
"""Share of the free disk that the store may fill."""
SHARE_OF_USABLE = 0.25
"""Default limit, as a share of the usable disk."""
MOST_ATTEMPTS = 10
"""Number of attempts to open a generation for writing while other processes delete it."""

_GENERATION = re.compile(r"(\d{3,})-([\w-]+)", re.ASCII)
_DELETED = ".deleted-"


class StoreFull(OSError):
    """Raised if the store has reached its maximum size. Its entries can still be read."""


class FileStore:
    """A folder of generations, shared by the processes of a node, by jobs and by models.

    A generation's name is (number of frozen layers, fingerprint). The fingerprint identifies all dependencies of the
    activations besides the sample; it may contain letters, digits, `-` and `_`. A store keeps no files open and may be
    pickled.

    Args:
        folder: path of the folder; the first writer creates it, with the marker of an `OwnFolder`.
        max_bytes: upper bound on the size of all generations together, of all processes. Concurrent writers may each
            exceed it by one batch. None: only the disk's size bounds it.
        user: name of the training in its marks. It becomes part of a file name.
    """

    def __init__(self, folder: str | os.PathLike[str], *, max_bytes: int | None = None, user: str = "anybody") -> None:
        self.folder = Path(folder)
        self._own = OwnFolder(self.folder)
        self.max_bytes = max_bytes
        self.user = user

    # ------------------------------------------------------------------------------------ the folder
    def why_refused(self) -> str | None:
        """Return why the folder must not be used, in words; None if it may be used, or does not exist yet.

        A folder is refused if this package has not created it, or if other users may write to it: they could replace
        a generation.
        """
        try:
            return self._own.why_foreign() or why_not_private(os.lstat(self.folder))
        except OSError:
            return None  # a writer will raise the error

    def why_unwritable(self) -> str | None:
        """Try to write an unnamed file into the folder or its parent. Return the error in words, or None."""
        if self.why_refused() is not None:
            return None  # `why_refused` has the reason
        try:
            with tempfile.TemporaryFile(dir=self._existing_folder()) as file:
                file.write(bytes(PROBED_BYTES))
                file.flush()
        except OSError as error:
            return str(error)
        return None

    def usable_bytes(self) -> int | None:
        """Bytes of the stored generations plus the usable part of the free disk; None if unknown."""
        try:
            return self.nbytes() + int(shutil.disk_usage(self._existing_folder()).free * USABLE_DISK)
        except OSError:
            return None

    def limit(self, max_gib: float | None) -> None:
        """Limit the store's size to `max_gib`, by default a share of the disk, and to the usable disk, if known."""
        usable = self.usable_bytes()
        most = sys.maxsize if usable is None else usable  # a writer will raise the folder's error
        self.max_bytes = int(SHARE_OF_USABLE * most if max_gib is None else min(max_gib * 2**30, most))

    def epoch_in_words(self, nbytes: int | None, is_bound: bool = False) -> str:
        """Return the size of an epoch's outputs, and the share that fits within the limit, as a clause; "" if unknown.

        Args:
            nbytes: the size in bytes; None if unknown.
            is_bound: whether the size is an upper bound, because samples may be shorter.
        """
        if nbytes is None:
            return ""
        if self.max_bytes is None or nbytes <= self.max_bytes:
            return f" ({'at most ' if is_bound else ''}{nbytes / MIB:,.1f} MiB)"
        return (
            f", for a part of the samples: of the {nbytes / MIB:,.1f} MiB of an epoch {self.max_bytes / MIB:,.1f} MiB"
            " may be used (activation_cache_max_gib, by default a fifth of the free disk)"
        )

    def nbytes(self) -> int:
        """Return the size of all generations. Generations about to be removed still count."""
        files = [
            file
            for name in self._names()
            if _GENERATION.fullmatch(name) or name.startswith(_DELETED)
            for file in _scan(self.folder / name)
        ]
        return sum(status.st_size for file in files if (status := _status(file)) is not None)

    def remove(self) -> None:
        """Delete the store. No other training may use it."""
        with suppress(OSError):
            self._own.destroy()

    # ------------------------------------------------------------------------------------ generations
    def reader(self, num_frozen: int, fingerprint: str) -> FileReader:
        """Return a reader of a generation, which need not exist yet."""
        return FileReader(self._path(num_frozen, fingerprint))

    def writer(self, num_frozen: int, fingerprint: str, facts: Mapping[str, Any] | None = None) -> FileWriter:
        """Open a generation for adding to it, and mark it as used. It is created if it is missing or unreadable.

        Args:
            num_frozen: f, the number of frozen layers.
            fingerprint: fingerprint of the generation.
            facts: facts to record about the generation, as for JSON; used only if the generation is created.

        Raises:
            OSError: the folder cannot be written to.
        """
        path = self._path(num_frozen, fingerprint)
        self._own.create()
        refusal = self.why_refused()
        if refusal is not None:
            raise PermissionError(errno.EPERM, refusal, str(self.folder))
        self._remove_deleted()
        for _ in range(MOST_ATTEMPTS):
            with suppress(FileNotFoundError, ValueError):  # another process has just deleted the new folder
                opened = FileWriter(path, facts or {}, self._claim)
                self.mark_used(num_frozen, fingerprint)
                return opened
        raise OSError(errno.ESTALE, "other processes keep deleting the generation", str(path))

    def generations(self) -> list[tuple[int, str]]:
        """Return the sorted names of all generations, including other trainings'."""
        names = map(_GENERATION.fullmatch, self._names())
        return sorted((int(name[1]), name[2]) for name in names if name is not None)

    def mark_used(self, num_frozen: int, fingerprint: str) -> None:
        """Mark a generation as needed by this training, if it exists."""
        self._mark(num_frozen, fingerprint, None)

    def mark_superseded(self, num_frozen: int, fingerprint: str) -> None:
        """Remove this training's mark: the generation is then evicted first, unless others have marked it."""
        self._mark(num_frozen, fingerprint, (0, 0))

    def evict(self, unused_since: float) -> bool:
        """Delete the least recently used generation of any process. Returns True if space was freed.

        Args:
            unused_since: seconds since the epoch. A generation with a later mark or creation stays, unless its
                training has removed the mark.

        Raises:
            OSError: the folder cannot be written to.
        """
        if self._remove_deleted():
            return True
        used = [(_last_used(self._path(*generation)), generation) for generation in self.generations()]
        last, oldest = min(used, default=(unused_since, (0, "")))
        if last >= unused_since:
            return False
        self.delete(*oldest)
        return True

    def delete(self, num_frozen: int, fingerprint: str) -> None:
        """Delete a generation, if it exists. Its readers then get misses, and its writers an `OSError`.

        Raises:
            OSError: the folder cannot be written to.
        """
        path = self._path(num_frozen, fingerprint)
        with suppress(FileNotFoundError):
            self._own.rename_child(path.name, f"{_DELETED}{uuid.uuid4().hex}")
        self._remove_deleted()

    def leave(self, num_frozen: int, fingerprint: str) -> None:
        """Delete a generation if this training has marked it last, and the store if it is then empty."""
        marks = {mark.name: _status(mark) for mark in _scan(self._path(num_frozen, fingerprint))}
        times = {name: mark.st_mtime_ns for name, mark in marks.items() if mark is not None and name.startswith(USED)}
        if times and times.get(f"{USED}{self.user}") != max(times.values()):
            return
        with suppress(OSError):
            self.delete(num_frozen, fingerprint)
        if not self.generations():
            self.remove()

    # ------------------------------------------------------------------------------------ inside
    def _path(self, num_frozen: int, fingerprint: str) -> Path:
        return self.folder / f"{num_frozen:03d}-{fingerprint}"

    def _existing_folder(self) -> Path:
        folder = self.folder
        while not os.path.lexists(folder):
            folder = folder.parent
        return folder

    def _names(self) -> list[str]:
        try:
            return self._own.names()
        except OSError:  # a user's folder, a file, or no permission
            return []

    def _claim(self, size: int) -> None:
        """Raise an error if `size` more bytes exceed the limit."""
        if self.max_bytes is None or (used := self.nbytes()) + size <= self.max_bytes:
            return
        raise StoreFull(
            errno.ENOSPC,
            f"{used} bytes are stored and max_bytes is {self.max_bytes}, so {size} more bytes do not fit. Raise"
            " activation_cache_max_gib.",
            str(self.folder),
        )

    def _mark(self, num_frozen: int, fingerprint: str, times: tuple[int, int] | None) -> None:
        """Set the times of this training's mark, and of the generation if `times` is given. None: now."""
        with suppress(OSError):
            folder = open_private(self._path(num_frozen, fingerprint), os.O_RDONLY | os.O_DIRECTORY)
            try:
                mark = open_private(f"{USED}{self.user}", os.O_WRONLY | os.O_CREAT, folder)
                os.utime(mark, times)
                os.close(mark)
                if times is not None:
                    os.utime(folder, times)
            finally:
                os.close(folder)

    def _remove_deleted(self) -> bool:
        """Remove deleted generations, also of killed processes. Returns True if there were any."""
        left = [name for name in self._names() if name.startswith(_DELETED)]
        if left:
            self._own.remove(*left)
        return bool(left)


def _last_used(generation: Path) -> float:
    """Return the time, in seconds since the epoch, of a generation's creation or last mark; infinite if it is gone."""
    marks = (mark for mark in _scan(generation) if mark.name.startswith(USED))
    times = [status.st_mtime for path in (generation, *marks) if (status := _status(path)) is not None]
    return max(times, default=float("inf"))


def _scan(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError:  # does not exist, or is a file
        return []


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:  # removed in the meantime
        return None
