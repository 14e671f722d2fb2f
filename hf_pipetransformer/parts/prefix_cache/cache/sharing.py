"""The paths of the stores that trainings and nodes use or share.

activation_cache_dir, or output_dir       the user's folder
  _hf_pipetransformer_cache/              the store, an `OwnFolder`
  _hf_pipetransformer_cache-host-0/       or one for each of several nodes
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from ....data.node_order import node_name
from ....run.job import TrainingJob

STORE = "_hf_pipetransformer_cache"
"""Name of a permanent store's folder, in the user's `activation_cache_dir`."""
RUN_STORE = "_hf_pipetransformer_run_cache"
"""Name of a store's folder in `output_dir`, without `activation_cache_dir`. It is removed when training ends, so a
permanent store must not have this name."""


def current_file(folder: str | os.PathLike[str] | None, output_dir: str, nodes: Sequence[str]) -> Path:
    """Return a training's path in its store: the store's folder, and a last part that is unique to the training.

    Args:
        folder: the user's folder for stores; None for a store of this training in `output_dir`.
        output_dir: the training's `output_dir`.
        nodes: name of each rank's node.
    """
    # each node has its own store: nodes may share a file system, but not a page cache
    name = RUN_STORE if folder is None else STORE
    store = f"{name}-{node_name()}" if len(set(nodes)) > 1 else name
    training = xxhash.xxh3_64_hexdigest(os.path.abspath(output_dir).encode())
    return Path(output_dir if folder is None else folder, store, f"training-{training}").absolute()


def store_file(job: TrainingJob) -> Path:
    """Return this training's path in the folder of the store. Collective over all processes."""
    nodes = job.mesh.gather_objects(node_name())
    # all processes use the same path, even if each has a temporary output_dir of its own
    output_dir = job.mesh.gather_objects(job.args.output_dir or ".")[0]
    return current_file(job.args.activation_cache_dir, output_dir, nodes)
