"""A training that freezes layers and caches what they give; `test_core.py` runs it where no extra is installed.

    accelerate launch --config_file accelerate_configs/cpu_2.yaml tests/core_job.py 2 FOLDER

There is a stage for each process. FOLDER/outcome.pt is what it leaves behind, with the cache's hit rates.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), *(str(folder) for folder in TESTS.iterdir() if folder.is_dir())]

import torch  # noqa: E402
from cached_runs import trainer_of  # noqa: E402
from training_runs import WORLD, Run, outcome_of  # noqa: E402

RUN = Run(samples=64, epochs=4, accumulation=1)
TABLE = {4: 1, 8: 2}
"""Steps done -> frozen layers. An epoch has four steps."""


def main(stages: int, folder: str) -> None:
    torch.set_num_threads(1)
    run = replace(RUN, per_device=RUN.per_device * WORLD // stages)
    trainer = trainer_of(run, dict.fromkeys([0, *TABLE.values()], stages), TABLE, folder)
    outcome = outcome_of(trainer)
    outcome.notes = {"cache": [entry for entry in trainer.state.log_history if "cache_hit_rate" in entry]}
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(outcome, Path(folder) / "outcome.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
