"""Where trainings and nodes find the store that they use or share.

activation_cache_dir, or output_dir       the user's
  _hf_pipetransformer_cache/              the store, an `OwnFolder`
  _hf_pipetransformer_cache-host-0/       or one for each node, where there are several
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from ....data.node_order import node_name
from ....run.job import TrainingJob

STORE = "_hf_pipetransformer_cache"
"""Name of a store's folder in the user's, where it is kept."""
RUN_STORE = "_hf_pipetransformer_run_cache"
"""Its name in `output_dir`, if the user gives no folder. It is removed when training has ended, so no store that is
kept may have this name."""


def current_file(folder: str | os.PathLike[str] | None, output_dir: str, nodes: Sequence[str]) -> Path:
    """A training's name in its store: the folder is that of the store, and the last part is the training's alone.

    Args:
        folder: the user's, in which the stores are kept; None for a store of this training in `output_dir`.
        output_dir: of the training.
        nodes: name of each rank's node.
    """
    # each node has a store of its own: nodes may share a file system, but they do not share a page cache
    name = RUN_STORE if folder is None else STORE
    store = f"{name}-{node_name()}" if len(set(nodes)) > 1 else name
    training = xxhash.xxh3_64_hexdigest(os.path.abspath(output_dir).encode())
    return Path(output_dir if folder is None else folder, store, f"training-{training}").absolute()


def store_file(job: TrainingJob) -> Path:
    """Return this training's name in the folder of the store. Collective over all processes."""
    nodes = job.mesh.gather_objects(node_name())
    # all processes use the same file, even if each was given a temporary output_dir of its own
    output_dir = job.mesh.gather_objects(job.args.output_dir or ".")[0]
    return current_file(job.args.activation_cache_dir, output_dir, nodes)
