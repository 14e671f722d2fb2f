"""All renaming and deleting on disk. It happens only in folders with this package's marker.

    activation_cache_dir/                     the user's folder: other files in it are not touched
      _hf_pipetransformer_cache/              an `OwnFolder`: created here, mode 0700
        .hf_pipetransformer                   its marker
        003-<fingerprint>/                    may be renamed and deleted

Before each change the folder is opened without following a link, its marker is read, and the change is made relative
to the open folder. So a user's folder of that name, or a link in its place, is refused and stays unchanged. (Names
begin with "_" because uploads to the Hub skip such names.)

`open_regular` and `replace_file` read and replace files in the user's folders: they do not wait for a named pipe, do
not read a device, and do not write through a link.
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
"""Content of the marker, with its format version first. A truncated marker (the disk was full) counts, too."""
NEW = ".new-"
"""Prefix of files that are being written, before they get their name."""


class NotOursError(OSError, ValueError):
    """Raised if a name that this package needs is taken by a file that it has not created. That file stays."""

    reason = ""


@dataclass(frozen=True)
class OwnFolder:
    """A folder that this package has created. All of its contents may be renamed and deleted.

    All names refer to direct children.

    Args:
        path: the folder, which need not exist yet. The folders above it are the user's.
    """

    path: Path

    def create(self) -> None:
        """Create the folder with its marker, unless it exists. Several processes may call it at the same time.

        Raises:
            NotOursError: `why_foreign` returns a reason.
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
        """Return why the path does not belong to this package; None if it belongs to it or is free."""
        try:
            with self._opened():
                return None
        except NotOursError as error:
            return error.reason
        except OSError:
            return None  # the folder does not exist, or its user will get the error

    def refuse_foreign(self) -> None:
        """Raise an error if the path does not belong to this package.

        Raises:
            NotOursError: `why_foreign` returns a reason.
        """
        with suppress(FileNotFoundError), self._opened():
            pass

    def names(self) -> list[str]:
        """Return the sorted names in the folder without the marker; empty if the folder does not exist.

        Raises:
            NotOursError: `why_foreign` returns a reason.
        """
        try:
            with self._opened() as folder:
                return sorted(set(os.listdir(folder)) - {MARKER})
        except FileNotFoundError:
            return []

    def rename_child(self, old: str, new: str) -> None:
        """Rename a child of the folder.

        Raises:
            OSError: as `os.rename`; or the folder is not this package's.
        """
        with self._opened() as folder:
            os.rename(_child(old), _child(new), src_dir_fd=folder, dst_dir_fd=folder)

    def take(self, path: Path, name: str) -> None:
        """Move a folder into this one. The caller must be allowed to move it, such as a replaced checkpoint.

        Raises:
            OSError: as `rename_child`.
        """
        with self._opened() as folder:
            os.rename(path, _child(name), dst_dir_fd=folder)

    def give(self, name: str, path: Path) -> None:
        """Move a folder out of this one, to a free path.

        Raises:
            OSError: as `rename_child`; or the child is not a folder, or the path is taken.
        """
        with self._opened() as folder:
            if not stat.S_ISDIR(os.lstat(_child(name), dir_fd=folder).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.path / name))
            os.rename(name, path, src_dir_fd=folder)  # renaming a folder replaces at most an empty folder

    def write(self, name: str, text: str) -> None:
        """Write a file atomically. Creates the folder.

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
        """Delete the folder and its contents, as far as that succeeds. No other process may use the folder.

        Raises:
            NotOursError: `why_foreign` returns a reason.
        """
        with suppress(FileNotFoundError), self._opened() as folder:
            for name in set(os.listdir(folder)) - {MARKER}:
                _remove(name, folder)
            with suppress(OSError):
                if os.listdir(folder) == [MARKER]:  # the marker goes last: until then the folder is this package's
                    os.unlink(MARKER, dir_fd=folder)
                os.rmdir(self.path)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the folder. An empty folder counts as this package's: another process may just be creating it."""
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.lexists(self.path):
                raise self._foreign("it is a link or a file") from None
            raise
        try:
            # the marker is always the first file, and the last
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
    """Open a regular file, and return its descriptor. A new file has the default mode of `open`.

    A link is followed for reading only: the Hub's cache consists of links.

    Raises:
        OSError: as `os.open`; or the path is a folder, a named pipe or a device, or, for writing, a link.
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
    """Write a file atomically.

    Raises:
        NotOursError: the path is a link, or not a regular file. It stays.
        OSError: the file cannot be written, or the existing file is read-only.
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
    except BaseException:  # including KeyboardInterrupt
        unlink_created(new)
        raise


def publish(folder: int, name: str, content: bytes, replaces: bool = True) -> None:
    """Write a file with mode 0600 atomically into a folder of this package.

    Args:
        folder: descriptor of the folder.
        name: name of the file.
        content: content of the file.
        replaces: whether to replace an existing file. Otherwise a file of a quicker process stays.

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
            except OSError:  # the file system has no hard links
                pass
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:  # even after a KeyboardInterrupt
        _remove(new, folder)


def unlink_created(path: str | Path) -> None:
    """Delete a file that this process has created under a random name, if it still exists as a file."""
    with suppress(FileNotFoundError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)


def is_inside(name: object) -> bool:
    """Whether a name from a file is a plain relative path inside a folder."""
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
    """Delete a file or a tree (`shutil.rmtree` has a `dir_fd` only since Python 3.11)."""
    with suppress(OSError):
        if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            os.unlink(name, dir_fd=folder)
            return
        for _, folders, files, inside in os.fwalk(name, topdown=False, follow_symlinks=False, dir_fd=folder):
            for child in (*files, *folders):
                with suppress(OSError):  # already gone, or not empty
                    is_folder = stat.S_ISDIR(os.lstat(child, dir_fd=inside).st_mode)
                    (os.rmdir if is_folder else os.unlink)(child, dir_fd=inside)
        os.rmdir(name, dir_fd=folder)
