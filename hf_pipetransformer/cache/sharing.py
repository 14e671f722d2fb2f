"""How the trainings, nodes and loaders' workers that use a store find it, and share it.

activation_cache_dir, or output_dir       the user's
  _hf_pipetransformer_cache/              the store, an `OwnFolder`
  _hf_pipetransformer_cache-host-0/       or one for each node, where there are several
    current-<hash>.json                   the generations that one training reads now: its loaders' workers follow it
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

from ..file_formats import GENERATIONS, checked
from ..own_files import OwnFolder
from .activation_files import FileReader, open_private
from .file_store import FileStore

STORE = "_hf_pipetransformer_cache"
"""Name of a store's folder in the user's, where it is kept."""
RUN_STORE = "_hf_pipetransformer_run_cache"
"""Its name in `output_dir`, if the user gives no folder. It is removed when training has ended, so no store that is
kept may have this name."""


class ReadAhead:
    """In a loader's worker: asks the kernel to read what the step will need. Follows the generations in use.

    Args:
        current: file in the folder of the store that names them.
    """

    def __init__(self, current: Path) -> None:
        self._current = current
        self._stamp: tuple[int, int] | None = None
        self._readers: list[FileReader] = []

    def __call__(self, keys: list[bytes]) -> None:
        if get_worker_info() is None:
            return  # the step comes at once
        with suppress(OSError, ValueError, RecursionError):  # whatever the file says, the step reads for itself
            self._follow()
        for reader in self._readers:
            reader.prefetch(keys)

    def _follow(self) -> None:
        status = os.stat(self._current)
        if self._stamp != (status.st_mtime_ns, status.st_ino):
            store = FileStore(self._current.parent)
            for reader in self._readers:
                reader.close()
            with open(open_private(self._current, os.O_RDONLY), encoding="utf-8") as file:
                generations = checked(json.load(file), GENERATIONS, self._current.name)
            self._readers = [store.reader(*generation) for generation in generations]
            self._stamp = (status.st_mtime_ns, status.st_ino)


def publish(current: Path, generations: Sequence[tuple[int, str]]) -> None:
    """Tell the loaders' workers which generations are read now."""
    OwnFolder(current.parent).write(current.name, json.dumps(generations))


def withdraw(current: Path) -> None:
    """Remove what `publish` has written, at the end of a training."""
    with suppress(OSError):
        OwnFolder(current.parent).remove(current.name)


def current_file(folder: str | os.PathLike[str] | None, output_dir: str, nodes: Sequence[str]) -> Path:
    """Where a training names the generations that it reads: of several in one folder each has a file of its own.

    Args:
        folder: the user's, in which the stores are kept; None for a store of this training in `output_dir`.
        output_dir: of the training.
        nodes: name of each rank's node.
    """
    # each node has a store of its own: nodes may share a file system, but they do not share a page cache
    name = RUN_STORE if folder is None else STORE
    store = f"{name}-{node_name()}" if len(set(nodes)) > 1 else name
    training = xxhash.xxh3_64_hexdigest(os.path.abspath(output_dir).encode())
    return Path(output_dir if folder is None else folder, store, f"current-{training}.json").absolute()


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
