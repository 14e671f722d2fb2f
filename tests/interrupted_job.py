"""A training as `torchrun` and `accelerate launch` start it, until somebody presses Ctrl-C.

    torchrun --nproc_per_node 2 tests/interrupted_job.py FOLDER SAVE_STEPS

FOLDER/steps gets a line for each step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), *(str(folder) for folder in TESTS.iterdir() if folder.is_dir())]
sys.modules.update(dict.fromkeys(["datasets", "pandas", "peft", "PIL", "scipy", "sklearn", "torchvision"]))  # type: ignore[arg-type]

from training_runs import Run, pipeline_trainer  # noqa: E402
from transformers import TrainerCallback  # noqa: E402


class Counts(TrainerCallback):
    def __init__(self, folder: Path) -> None:
        self.file = (folder / "steps").open("a")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if os.environ["RANK"] == "0":
            self.file.write(f"{state.global_step}\n")
            self.file.flush()


def main(folder: str, save_steps: int) -> None:
    run = Run(samples=64, epochs=200, accumulation=1).with_options(
        freeze_policy="schedule", freeze_schedule={1: 1}, activation_cache="on", log_level="info"
    )
    saving = {"save_strategy": "steps", "save_steps": save_steps} if save_steps else {}
    trainer = pipeline_trainer(run, 2, folder, **saving)
    trainer.add_callback(Counts(Path(folder)))
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
