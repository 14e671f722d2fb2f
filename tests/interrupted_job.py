"""A training as `torchrun` and `accelerate launch` start it, until somebody presses Ctrl-C.

    torchrun --nproc_per_node 2 tests/interrupted_job.py FOLDER SAVE_STEPS BLOCKED

FOLDER/steps gets a line for each step. With BLOCKED=1 the last process is in a call of C code from step 6 on, which
Python's signal handlers cannot interrupt.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), *(str(folder) for folder in TESTS.iterdir() if folder.is_dir())]
sys.modules.update(dict.fromkeys(["datasets", "pandas", "peft", "PIL", "scipy", "sklearn", "torchvision"]))  # type: ignore[arg-type]

from training_runs import Run, pipeline_trainer  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

BLOCKED_AFTER = 6


class Paced(TrainerCallback):
    def __init__(self, folder: Path, blocks: bool) -> None:
        self.file, self.blocks = (folder / "steps").open("a"), blocks
        self.is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.is_last:
            self.file.write(f"{state.global_step}\n")
            self.file.flush()
            if self.blocks and state.global_step == BLOCKED_AFTER:
                lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
                lock(mutex), lock(mutex)  # forever: it goes on waiting after a signal


def main(folder: str, save_steps: int, blocks: bool) -> None:
    run = Run(samples=64, epochs=200, accumulation=1).with_options(
        freeze_policy="schedule", freeze_schedule={1: 1}, activation_cache="on", log_level="info"
    )
    saving = {"save_strategy": "steps", "save_steps": save_steps} if save_steps else {}
    trainer = pipeline_trainer(run, 2, folder, **saving)
    trainer.add_callback(Paced(Path(folder), blocks))
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")
