"""Ray Train starts the processes of a recipe: python launchers/ray_train.py, from the root of the repository.

One Ray worker is one process of the training, with one GPU. Ray sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT, and makes the process group before the training begins.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUM_WORKERS = 8
ARGUMENTS = [
    str(ROOT / "recipes" / "configs" / "sst2.yaml"),
    *("--output_dir", "/shared/sst2", "--activation_cache_dir", "/tmp/activations"),
    *("--resume_from_checkpoint", "last"),
]


def train(config: dict[str, list[str]]) -> None:
    """Run the recipe in this worker."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "recipes"))
    from run_glue import main

    main(config["arguments"])


if __name__ == "__main__":
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        train,
        train_loop_config={"arguments": ARGUMENTS},
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS, use_gpu=True),
    ).fit()
