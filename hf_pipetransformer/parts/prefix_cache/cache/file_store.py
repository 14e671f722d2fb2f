"""The cached activations of a node's trainings, in a folder on its disk.

    folder/
      003-<fingerprint>/    a generation: outputs of the first 3 layers, frozen with these weights, for each sample
      005-<fingerprint>/    the next one, after a freeze

    store.writer(3, fingerprint, facts).put(keys, rows)       one writer in each process that computes
    store.reader(3, fingerprint).read_into(keys, rows)        anywhere, also in a loader's workers

All processes of a node read and write one folder concurrently, without locks. A process that loses a race or finds a
damaged file gets a miss; it never gets wrong bytes (see `activation_files.py`), and a reader never raises an error. A
generation is deleted by a single rename of its folder. Only this user may write to the folder and its contents
(`why_refused`), no symbolic link is followed, and what is renamed or deleted is in the folder, which this package has
created (`OwnFolder`). Nothing is synchronized to the disk; a power failure results in misses. The page cache serves as
the in-memory tier. A store handles bytes only: keys and fingerprints are computed elsewhere.
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
"""Size of the file that shows whether the store can be written to."""
USABLE_DISK = 0.8
"""Share of the free disk that the store may fill."""
SHARE_OF_USABLE = 0.25
"""Of what it may fill, where no limit is given."""
MOST_ATTEMPTS = 10
"""Number of times that a generation is opened for writing, while other processes delete it."""

_GENERATION = re.compile(r"(\d{3,})-([\w-]+)", re.ASCII)
_DELETED = ".deleted-"


class StoreFull(OSError):
    """Raised if the store has reached its maximum size. Its entries can still be read."""


class FileStore:
    """A folder of generations, shared by the processes of a node, by jobs, and by models.

    A generation's name is (number of frozen layers, fingerprint). The fingerprint identifies everything that the
    activations depend on besides the sample; it may contain letters, digits, `-` and `_`. A store keeps no files open
    and may be pickled.

    Args:
        folder: path of the folder; the first writer creates it, with the marker of an `OwnFolder`.
        max_bytes: upper bound on the size of all generations together, whichever process wrote them. Writers that
            append at the same time may each exceed it by one batch. None: no bound but the disk's size.
        user: name of the training for its marks; it becomes part of a file name.
    """

    def __init__(self, folder: str | os.PathLike[str], *, max_bytes: int | None = None, user: str = "anybody") -> None:
        self.folder = Path(folder)
        self._own = OwnFolder(self.folder)
        self.max_bytes = max_bytes
        self.user = user

    # ------------------------------------------------------------------------------------ the folder
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
        try:
            with tempfile.TemporaryFile(dir=self._existing_folder()) as file:
                file.write(bytes(PROBED_BYTES))
                file.flush()
        except OSError as error:
            return str(error)
        return None

    def usable_bytes(self) -> int | None:
        """What is stored, and most of what the disk has free; None if that cannot be found out."""
        try:
            return self.nbytes() + int(shutil.disk_usage(self._existing_folder()).free * USABLE_DISK)
        except OSError:
            return None

    def limit(self, max_gib: float | None) -> None:
        """Bound its size: as given, or a part of the disk, and not more than there is, if that can be found out."""
        usable = self.usable_bytes()
        most = sys.maxsize if usable is None else usable  # who writes will be told what is wrong with the folder
        self.max_bytes = int(SHARE_OF_USABLE * most if max_gib is None else min(max_gib * 2**30, most))

    def epoch_in_words(self, nbytes: int | None, is_bound: bool = False) -> str:
        """The size of an epoch's outputs, and what of it fits within the limit, as a clause; "" if it is not known.

        Args:
            nbytes: the size.
            is_bound: whether shorter samples make it less.
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
        """Size of all generations, including those about to be removed, which still take up space."""
        files = [
            file
            for name in self._names()
            if _GENERATION.fullmatch(name) or name.startswith(_DELETED)
            for file in _scan(self.folder / name)
        ]
        return sum(status.st_size for file in files if (status := _status(file)) is not None)

    def remove(self) -> None:
        """Delete everything, of a store that no other training uses."""
        with suppress(OSError):
            self._own.destroy()

    # ------------------------------------------------------------------------------------ generations
    def reader(self, num_frozen: int, fingerprint: str) -> FileReader:
        """Return a reader of a generation, whether or not the generation exists yet."""
        return FileReader(self._path(num_frozen, fingerprint))

    def writer(self, num_frozen: int, fingerprint: str, facts: Mapping[str, Any] | None = None) -> FileWriter:
        """Open a generation for adding to it, and mark it as used. It is created if it is missing or unreadable.

        Args:
            num_frozen: f, the number of frozen layers.
            fingerprint: of the generation.
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
            with suppress(FileNotFoundError, ValueError):  # another process has deleted what was just created
                opened = FileWriter(path, facts or {}, self._claim)
                self.mark_used(num_frozen, fingerprint)
                return opened
        raise OSError(errno.ESTALE, "other processes keep deleting the generation", str(path))

    def generations(self) -> list[tuple[int, str]]:
        """The names of all generations, including those of other trainings, sorted."""
        names = map(_GENERATION.fullmatch, self._names())
        return sorted((int(name[1]), name[2]) for name in names if name is not None)

    def mark_used(self, num_frozen: int, fingerprint: str) -> None:
        """Mark a generation as needed by this training. One that is missing is ignored."""
        self._mark(num_frozen, fingerprint, None)

    def mark_superseded(self, num_frozen: int, fingerprint: str) -> None:
        """Remove this training's mark: the generation is then evicted first, unless others have marked it."""
        self._mark(num_frozen, fingerprint, (0, 0))

    def evict(self, unused_since: float) -> bool:
        """Delete the least recently used generation, whichever process created it. Returns whether space was freed.

        Args:
            unused_since: seconds since the epoch. A generation that was marked or created later is not deleted, unless
                its training has removed the mark.

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
        """Delete a generation that this training was the last to mark, and the store if nothing else is in it."""
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
        except OSError:  # a folder of the user's, a file, or without permission
            return []

    def _claim(self, size: int) -> None:
        """Raise an error if that many more bytes must not be stored."""
        if self.max_bytes is None or (used := self.nbytes()) + size <= self.max_bytes:
            return
        raise StoreFull(
            errno.ENOSPC,
            f"{used} bytes are stored and max_bytes is {self.max_bytes}, so {size} more bytes do not fit. Raise"
            " activation_cache_max_gib.",
            str(self.folder),
        )

    def _mark(self, num_frozen: int, fingerprint: str, times: tuple[int, int] | None) -> None:
        """Set the times of this training's mark, and of the generation if they are given; None: now."""
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
        """Remove deleted generations, also those of processes that were killed. Returns whether there were any."""
        left = [name for name in self._names() if name.startswith(_DELETED)]
        if left:
            self._own.remove(*left)
        return bool(left)


def _last_used(generation: Path) -> float:
    """Seconds since the epoch at which a generation was created or last marked as needed; infinite if it is gone."""
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
