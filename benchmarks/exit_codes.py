#!/usr/bin/env python
"""Do short multi-process trainings end with exit code 0, on a machine that is busy with something else?

    python benchmarks/exit_codes.py --trainings 60 --output results.json

A process that ends without destroying its groups may abort ("terminate called without an active exception", code -6)
after a whole training, and a launcher then starts it again. Each training here is a job of `torchrun` with two
processes, of K = 1 and K = 2 in turn, which ends as a user's script does: by its last line. Beside them loops keep all
cores busy. At last one job has a process killed in its second step: all others must end by an error, soon.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
WATCHDOG_S = 20.0


def train(stages: int, kills: bool) -> None:
    """One process of a job: a whole script, so that nothing but its end differs from a user's."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, set_seed

    from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

    class Dies(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1 and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)

    set_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32
    )
    rows = [{"input_ids": torch.randint(0, 64, (12,)), "labels": k % 2} for k in range(32)]
    args = PipeTransformerTrainingArguments(
        tempfile.mkdtemp(),
        pipeline_parallel_size=stages,
        max_steps=3,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        watchdog_timeout=WATCHDOG_S,
    )
    model = BertForSequenceClassification(config)
    PipeTransformerTrainer(model, args, train_dataset=rows, callbacks=[Dies()] if kills else None).train()


def job(stages: int, port: int, kills: bool = False) -> tuple[list[str], float]:
    """Each process's end, as torchrun saw it, and the seconds until all had ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    command += [str(HERE), "--stages", str(stages), *(["--kills"] if kills else [])]
    began = time.monotonic()
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    seconds = time.monotonic() - began
    if run.returncode == 0:
        return ["0"], seconds
    codes = re.findall(r"exitcode\s*: (-?\d+)", run.stderr)
    return codes or [f"torchrun {run.returncode}: {run.stderr[-500:]}"], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", type=int, default=60)
    parser.add_argument("--load", type=int, default=os.cpu_count(), help="loops beside them")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--stages", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kills", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stages is not None:
        return train(options.stages, options.kills)
    os.environ["OMP_NUM_THREADS"] = "1"
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.load or 0)]
    ends: Counter[str] = Counter()
    try:
        port = 20000 + os.getpid() % 10000
        for number in range(options.trainings):
            codes, seconds = job(1 + number % 2, port + number)
            ends[", ".join(codes)] += 1
            print(f"{number + 1:3}  K = {1 + number % 2}  {', '.join(codes)}  {seconds:.1f} s", flush=True)
        killed, seconds = job(2, port + options.trainings, kills=True)
        print(f"killed: {', '.join(killed)}  {seconds:.1f} s")
    finally:
        for process in load:
            process.kill()
    results = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
        "load": options.load,
        "ends": dict(ends),
        "killed": {"ends": killed, "seconds": seconds},
    }
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(dict(ends))


if __name__ == "__main__":
    main()
