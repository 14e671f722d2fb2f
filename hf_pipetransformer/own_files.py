"""The one place that renames and deletes on disk. It does so in folders that carry this package's marker only.

    activation_cache_dir/                     the user's: nothing in it is looked at but
      _hf_pipetransformer_cache/              an `OwnFolder`: created here, mode 0700
        .hf_pipetransformer                   its marker
        003-<fingerprint>/                    may be renamed and deleted

Before each change the folder is opened without following a link, its marker is read, and the change is made relative
to the open folder. So a folder of the user's that has such a name, or a link in its place, is refused and stays as it
is. (Names begin with "_" because uploads to the Hub skip those.)

Files of the user's folders are read and replaced by `open_regular` and `replace_file`: they do not wait for a named
pipe, do not read a device, and do not write through a link.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MARKER = ".hf_pipetransformer"
CONTENT = b"hf_pipetransformer 1\nThis folder belongs to hf_pipetransformer, which deletes what is in it.\n"
"""Of the marker: its format version first. A marker that is cut off (the disk was full) is one, too."""
NEW = ".new-"
"""Prefix of what is being written, before it gets its name."""


class NotOursError(OSError, ValueError):
    """Raised if a name that this package needs is taken by something that it has not created, which stays."""

    reason = ""


@dataclass(frozen=True)
class OwnFolder:
    """A folder in which everything may be renamed and deleted, because this package has created it.

    All names are those of direct children.

    Args:
        path: the folder, which need not exist yet. The folders above it are the user's.
    """

    path: Path

    def create(self) -> None:
        """Create the folder with its marker, unless it exists. Several processes may do so at the same time.

        Raises:
            NotOursError: `why_foreign`.
            OSError: the folder cannot be created.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        with self._opened() as folder, suppress(FileExistsError):
            marker = os.open(MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            try:
                os.write(marker, CONTENT)
            finally:
                os.close(marker)

    def why_foreign(self) -> str | None:
        """Why the path is taken by something that this package has not created; None if it is not."""
        try:
            with self._opened():
                return None
        except NotOursError as error:
            return error.reason
        except OSError:
            return None  # it does not exist, or whoever uses it will get the error

    def refuse_foreign(self) -> None:
        """Raise an error where `why_foreign` has a reason.

        Raises:
            NotOursError: it has.
        """
        with suppress(FileNotFoundError), self._opened():
            pass

    def names(self) -> list[str]:
        """What is in the folder besides the marker, sorted; empty if the folder does not exist.

        Raises:
            NotOursError: `why_foreign`.
        """
        try:
            with self._opened() as folder:
                return sorted(set(os.listdir(folder)) - {MARKER})
        except FileNotFoundError:
            return []

    def rename_child(self, old: str, new: str) -> None:
        """Rename something in the folder.

        Raises:
            OSError: as `os.rename`; or the folder is not this package's.
        """
        with self._opened() as folder:
            os.rename(_child(old), _child(new), src_dir_fd=folder, dst_dir_fd=folder)

    def take(self, path: Path, name: str) -> None:
        """Move a folder into this one. The caller knows that it may: a checkpoint that is replaced, for one.

        Raises:
            OSError: as `rename_child`.
        """
        with self._opened() as folder:
            os.rename(path, _child(name), dst_dir_fd=folder)

    def give(self, name: str, path: Path) -> None:
        """Move a folder out of this one, to a path that is free.

        Raises:
            OSError: as `rename_child`; or it is no folder, or the path is taken.
        """
        with self._opened() as folder:
            if not stat.S_ISDIR(os.lstat(_child(name), dir_fd=folder).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path / name))
            os.rename(name, path, src_dir_fd=folder)  # of a folder: it replaces nothing but an empty folder

    def write(self, name: str, text: str) -> None:
        """Write a file, which has its old content or the new one at any time. Creates the folder.

        Raises:
            OSError: it cannot be written.
        """
        self.create()
        with self._opened() as folder:
            publish(folder, _child(name), text.encode())

    def remove(self, *names: str) -> None:
        """Delete folders and files, as far as that succeeds. No link is followed."""
        with suppress(FileNotFoundError), self._opened() as folder:
            for name in names:
                _remove(_child(name), folder)

    def destroy(self) -> None:
        """Delete the folder and all that is in it, as far as that succeeds. The folder must have no other user.

        Raises:
            NotOursError: `why_foreign`.
        """
        with suppress(FileNotFoundError), self._opened() as folder:
            for name in set(os.listdir(folder)) - {MARKER}:
                _remove(name, folder)
            with suppress(OSError):
                if os.listdir(folder) == [MARKER]:  # the marker goes last: what is left belongs to this package still
                    os.unlink(MARKER, dir_fd=folder)
                os.rmdir(self.path)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The open folder. An empty one counts as this package's: another process may just be creating it."""
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.lexists(self.path):
                raise self._foreign("it is a link or a file") from None
            raise
        try:
            # the marker is always the first to be there, and the last
            if os.listdir(folder) and not _has_marker(folder) and os.listdir(folder):
                raise self._foreign(f"hf_pipetransformer has not created it (there is no valid {MARKER} in it)")
            yield folder
        finally:
            os.close(folder)

    def _foreign(self, reason: str) -> NotOursError:
        error = NotOursError(
            f"{self.path} is needed for files of hf_pipetransformer, but {reason}. Nothing in it was touched. Move it"
            " away, or choose another folder."
        )
        error.reason = reason
        return error


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, and return its descriptor. A new one has the mode that `open` gives it.

    A link is followed for reading only: the Hub's cache consists of links.

    Raises:
        OSError: as `os.open`; or it is a folder, a named pipe or a device, or a link that would be written through.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    # without O_NONBLOCK, opening a named pipe would block until its other end is opened
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | (os.O_NOFOLLOW if writes else 0), 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def replace_file(path: Path, text: str) -> None:
    """Write a file, which has its old content or the new one at any time.

    Raises:
        NotOursError: there is a link, or something else than a file, which stays.
        OSError: it cannot be written, or the file that is there is read-only.
    """
    new = path.with_name(f"{NEW}{uuid.uuid4().hex}")
    descriptor = open_regular(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            with suppress(FileNotFoundError):
                before = os.lstat(path)
                if not stat.S_ISREG(before.st_mode):
                    raise NotOursError(f"{path} is a link, or no file, so it is not replaced. Move it away.")
                if not before.st_mode & 0o222:
                    raise PermissionError(errno.EACCES, "it is read-only", str(path))
                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            file.write(text)
        os.replace(new, path)
    except BaseException:  # KeyboardInterrupt, for one
        unlink_created(new)
        raise


def publish(folder: int, name: str, content: bytes, replaces: bool = True) -> None:
    """Write a file with mode 0600 into a folder of this package's; it has its old content or the new one at any time.

    Args:
        folder: descriptor of the folder.
        name: of the file.
        content: what it contains.
        replaces: whether it replaces another one. If not, and another process is quicker, that one's file stays.

    Raises:
        OSError: it cannot be written.
    """
    new = f"{NEW}{uuid.uuid4().hex}"
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        with open(descriptor, "wb") as file:
            file.write(content)
        if not replaces:
            try:
                os.link(new, name, src_dir_fd=folder, dst_dir_fd=folder)
                return
            except FileExistsError:
                return
            except OSError:  # a file system without hard links
                pass
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:  # also after a KeyboardInterrupt
        _remove(new, folder)


def unlink_created(path: str | Path) -> None:
    """Delete a file that this process has created under a random name, if it is there and is a file still."""
    with suppress(FileNotFoundError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)


def is_inside(name: object) -> bool:
    """Whether a name that was read from a file is the plain relative path of something inside a folder."""
    if not isinstance(name, str) or "\0" in name:
        return False
    path = PurePosixPath(name)
    return name not in ("", ".") and not path.is_absolute() and ".." not in path.parts and str(path) == name


def _child(name: str) -> str:
    assert is_inside(name) and "/" not in name and name != MARKER, name
    return name


def _has_marker(folder: int) -> bool:
    try:
        marker = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return False
    try:
        is_file = stat.S_ISREG(os.fstat(marker).st_mode)
        return is_file and CONTENT.startswith(os.read(marker, len(CONTENT) + 1))
    finally:
        os.close(marker)


def _remove(name: str, folder: int) -> None:
    """Delete a file or a tree (`shutil.rmtree` takes a `dir_fd` from Python 3.11 on only)."""
    with suppress(OSError):
        if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            os.unlink(name, dir_fd=folder)
            return
        for _, folders, files, inside in os.fwalk(name, topdown=False, follow_symlinks=False, dir_fd=folder):
            for child in (*files, *folders):
                with suppress(OSError):  # gone in the meantime, or not empty
                    is_folder = stat.S_ISDIR(os.lstat(child, dir_fd=inside).st_mode)
                    (os.rmdir if is_folder else os.unlink)(child, dir_fd=inside)
        os.rmdir(name, dir_fd=folder)
