"""A training as `torchrun` and `accelerate launch` start it, with a fault in the first attempt.

    torchrun --nproc_per_node 4 --max_restarts 1 tests/fault_job.py FOLDER KIND RANK PHASE STEP

Each attempt adds a line to FOLDER/attempts.jsonl; the last one leaves FOLDER/final.pt.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, get_args

STARTED_AT = time.time()  # the system rounds a process's start time to a second
TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), *(str(folder) for folder in TESTS.iterdir() if folder.is_dir())]
# Each process of a job imports, twice. That takes a fifth less without collections, and a quarter less without the
# optional packages that transformers imports and no job here uses.
gc.disable()
sys.modules.update(dict.fromkeys(["datasets", "pandas", "peft", "PIL", "scipy", "sklearn", "torchvision"]))

import torch  # noqa: E402
from faults import Fault, Kind, train  # noqa: E402

gc.enable()
IMPORTED_AT = time.time()


def main(folder: str, kind: Any, culprit: str, phase: str, step: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert kind in get_args(Kind)
    has_happened = (Path(folder) / "fault").exists()
    torch.set_num_threads(1)
    fault = None if has_happened else Fault(kind, int(culprit), phase, int(step))
    if rank == 0:
        note = {
            "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            "started_at": STARTED_AT,
            "imported_at": IMPORTED_AT,
        }
        with (Path(folder) / "attempts.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")
    report = train(rank, world_size, folder, fault)
    if rank == 0:
        torch.save(report, Path(folder) / "final.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
