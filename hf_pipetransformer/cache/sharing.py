"""How the trainings, nodes and loaders' workers that use a store find it, and share it.

folder                       of the user, or in output_dir
  host-0/                    one store for each node, where there are several
    current-<hash>.json      the generations that one training reads now: its loaders' workers follow the file
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import xxhash
from torch.utils.data import get_worker_info

from .activation_files import open_private
from .activation_store import ActivationStore, GenerationReader
from .file_store import FileStore


def open_store(folder: Path, user: str = "anybody") -> ActivationStore:
    """Return the store in a folder, which need not exist yet.

    Args:
        folder: of the store.
        user: name of the training for its marks; it becomes part of a file name.
    """
    return FileStore(folder, user=user)


def remove_store(store: ActivationStore, current: Path) -> None:
    """Delete a store that only this training uses.

    Args:
        store: the store.
        current: the file that `current_file` has returned for it.
    """
    store.remove()
    if current.parent.name == node_name():
        with suppress(OSError):  # succeeds on the last node only
            current.parent.parent.rmdir()


class ReadAhead:
    """In a loader's worker: asks the kernel to read what the step will need. Follows the generations in use.

    Args:
        current: file in the folder of the store that names them.
    """

    def __init__(self, current: Path) -> None:
        self._current = current
        self._stamp: tuple[int, int] | None = None
        self._readers: list[GenerationReader] = []

    def __call__(self, keys: list[bytes]) -> None:
        if get_worker_info() is None:
            return  # the step comes at once
        with suppress(OSError, ValueError, TypeError):  # whatever the file says, the step reads for itself
            self._follow()
        for reader in self._readers:
            reader.prefetch(keys)

    def _follow(self) -> None:
        status = os.stat(self._current)
        if self._stamp != (status.st_mtime_ns, status.st_ino):
            store = open_store(self._current.parent)
            for reader in self._readers:
                reader.close()
            with open(open_private(self._current, os.O_RDONLY), encoding="utf-8") as file:
                self._readers = [store.reader(*generation) for generation in json.load(file)]
            self._stamp = (status.st_mtime_ns, status.st_ino)


def publish(current: Path, generations: Sequence[tuple[int, str]]) -> None:
    """Tell the loaders' workers which generations are read now."""
    current.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = current.with_name(f"{current.name}.{os.getpid()}")
    try:
        new.unlink(missing_ok=True)
        with open(open_private(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
            json.dump(generations, file)
        os.replace(new, current)
    finally:
        new.unlink(missing_ok=True)  # of a full disk


def current_file(folder: str | os.PathLike[str], output_dir: str, nodes: Sequence[str]) -> Path:
    """Where a training names the generations that it reads: of several in one folder each has a file of its own.

    Args:
        folder: of the stores.
        output_dir: of the training.
        nodes: name of each rank's node.
    """
    return (
        store_folder(folder, nodes) / f"current-{xxhash.xxh3_64_hexdigest(os.path.abspath(output_dir).encode())}.json"
    )


def store_folder(folder: str | os.PathLike[str], nodes: Sequence[str]) -> Path:
    """Each node has a folder of its own: nodes may share a file system, but they do not share a page cache."""
    return Path(folder, node_name()).absolute() if len(set(nodes)) > 1 else Path(folder).absolute()


def node_shares(nodes: Sequence[str]) -> tuple[int, ...]:
    """Processes on each node, in the order of ranks.

    One share for all where the nodes have different numbers of processes, or where their ranks alternate: the samples
    of a batch are not divided by node then.

    Args:
        nodes: name of each rank's node (`node_name`). Launchers other than `torchrun` may give no number of processes.
    """
    shares = tuple(len(list(ranks)) for _, ranks in groupby(nodes))
    return shares if len(shares) == len(set(nodes)) and len(set(shares)) == 1 else (len(nodes),)


def node_name() -> str:
    """Of this process's node: the host, and the launcher's number of it, as several may be one host in a test."""
    return f"{socket.gethostname()}-{os.environ.get('GROUP_RANK', 0)}"
