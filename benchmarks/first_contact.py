#!/usr/bin/env python
"""The first run on a new GPU: is what the CPU's tests show true there as well, and how fast is it?

    python benchmarks/first_contact.py --output first_contact.json

It takes one device and at most eight minutes, and needs no launcher, no data set and no hub: BERT-large with random
weights trains on random tokens. The steps, in their order:

    machine          versions, the device, speed of matrix products, of copies and of the disk
    parity           the stock Trainer, and this library with one stage: losses in fp32 must be equal; time of a step
                     in bf16; how often a step waits for the device
    cache            a third and two thirds of the layers frozen: time of a step that fills the cache, reads it, or
                     computes the frozen layers; idle share of the device; peak memory; what "auto" decides
    overflow         fp16's loss scaler, where the gradients of one step overflow
    two_stages       K = 2, both stages on the one device, over gloo: results and memory (its times mean nothing)
    three_stages     K = 3 goes on from a checkpoint whose frozen layers fill the first stage (likewise)
    killed_rank      one process of K = 3 is killed: the others must end by themselves and name it
    epochs           three epochs of (a) the stock Trainer and (g) this library with freezing and the cache

Each step runs in a process of its own, which may take its share of the time that is left. The results are written
after each step; a step that fails does not stop the next ones. On a machine without an accelerator, or with --use_cpu,
a tiny model trains on the CPU in about two minutes: a test of this script, whose times say nothing.

In the results a step has one of these for "status", and the exit code is 0 if all are "passed":

    passed           it has come to its end, and all its checks hold
    failed           a check does not hold
    error            it has raised an error or has died: "error" is the end of what it wrote
    timed out        its time was over; the figures that it had by then are there
    skipped          no time was left for it
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

STEPS = {
    "machine": 5,
    "parity": 20,
    "cache": 25,
    "overflow": 7,
    "two_stages": 10,
    "three_stages": 12,
    "killed_rank": 8,
    "epochs": 13,
}
"""Name of each step -> its weight when the time that is left is shared out."""
MODEL_SIZES = ("auto", "bert-large", "bert-base", "tiny")
PACKAGES = ("torch", "transformers", "accelerate", "numpy", "hf_pipetransformer")
WORKER = Path(__file__).with_name("first_contact_steps.py")
LEAST_SECONDS = 5.0
"""A step for which less is left is not started: imports take as long."""
LOG_TAIL = 3000
"""Characters of a failed step's output that are kept."""
SECONDS_PER_MINUTE = 60


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("first_contact.json"), help="JSON file for the results")
    parser.add_argument(
        "--steps", nargs="+", metavar="STEP", choices=list(STEPS), default=list(STEPS), help="default: all"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for all steps together; default: 8")
    parser.add_argument(
        "--model_size",
        choices=MODEL_SIZES,
        default="auto",
        help="auto: bert-large, bert-base on a device with less than 14 GiB, tiny on the CPU",
    )
    parser.add_argument("--rows", type=int, help="samples of a global batch, a multiple of 12; default: by model size")
    parser.add_argument("--tokens", type=int, help="tokens of a sample; default: by model size")
    parser.add_argument("--use_cpu", action="store_true", help="train on the CPU although there is an accelerator")
    parser.add_argument(
        "--folder", type=Path, help="for checkpoints and the cache; default: the system's temporary one"
    )
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes} must be above 0")
    if options.rows is not None and (options.rows < 1 or options.rows % 12):
        parser.error(
            f"--rows {options.rows} must be a multiple of 12, for two and three stages with four micro-batches"
        )
    if options.tokens is not None and options.tokens < 1:
        parser.error(f"--tokens {options.tokens} must be at least 1")
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder {options.folder} is no folder")
    return options


def seconds_for(step: str, later: Sequence[str], seconds_left: float) -> float:
    """The share of a step in the time that is left for it and the later ones."""
    return seconds_left * STEPS[step] / (STEPS[step] + sum(STEPS[name] for name in later))


def supervise(
    command: Sequence[str], record: Path, limit_seconds: float, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Run a step in a process group of its own, and end the group when the step ends, or its time does.

    Args:
        command: starts the step.
        record: file in which the step notes its "figures" and "checks".
        limit_seconds: after which it is ended.
        environ: environment of the step.

    Returns:
        What the results say of the step.
    """
    log = record.with_suffix(".log")
    began = time.monotonic()
    exit_code: int | None = None
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=dict(environ), start_new_session=True
        )
        try:
            exit_code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # nobody of the group is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    noted: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {"figures": {}, "checks": {}}
    if exit_code is None:
        status = "timed out"
    elif exit_code != 0:
        status = "error"
    else:
        status = "passed" if all(noted["checks"].values()) else "failed"
    result = {
        "status": status,
        "seconds": round(time.monotonic() - began, 2),
        "limit_seconds": round(limit_seconds, 2),
        **noted,
    }
    if status in ("error", "timed out"):
        result["exit_code"] = exit_code
        result["error"] = log.read_text(errors="replace")[-LOG_TAIL:]
    return result


def run_step(name: str, options: argparse.Namespace, limit_seconds: float) -> dict[str, Any]:
    """Run one step, with a temporary folder of its own."""
    with tempfile.TemporaryDirectory(
        prefix="first-contact-", dir=options.folder, ignore_cleanup_errors=True
    ) as folder:
        wanted = {key: getattr(options, key) for key in ("model_size", "rows", "tokens", "use_cpu")}
        request, record = Path(folder, "request.json"), Path(folder, "record.json")
        request.write_text(
            json.dumps({"step": name, "folder": folder, "ends_at": time.time() + limit_seconds, **wanted})
        )
        return supervise(
            [sys.executable, str(WORKER), str(request), str(record)], record, limit_seconds, environment()
        )


def environment() -> dict[str, str]:
    """That of a step: one device, even where there are more, and nothing of a launcher."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {name: value for name, value in os.environ.items() if name not in launcher}
    environ["CUDA_VISIBLE_DEVICES"] = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    environ["HF_HUB_OFFLINE"] = "1"
    return environ


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """What all steps have in common."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {package: version_of(package) for package in PACKAGES},
        "commit": commit(),
        "options": {
            **{key: value for key, value in vars(options).items() if key not in ("output", "folder")},
        },
    }


def version_of(package: str) -> str | None:
    """The installed version; None if a package runs from its sources."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of the sources; None if they are not in a repository."""
    command = ["git", "-C", str(WORKER.parent), "describe", "--always", "--dirty"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps one after the other; the results are in the file after each of them."""
    options = parse_arguments(arguments)
    began = time.monotonic()
    results: dict[str, Any] = {**facts(options), "seconds": 0.0, "steps": {}}
    chosen = [name for name in STEPS if name in options.steps]
    for number, name in enumerate(chosen):
        left = options.minutes * SECONDS_PER_MINUTE - (time.monotonic() - began)
        limit = seconds_for(name, chosen[number + 1 :], left)
        if limit < LEAST_SECONDS:
            result = {"status": "skipped", "error": f"{left:.0f} s were left for this step and those behind it"}
        else:
            result = run_step(name, options, limit)
        results["steps"][name] = result
        results["seconds"] = round(time.monotonic() - began, 2)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
        broken = [check for check, holds in result.get("checks", {}).items() if not holds]
        print(f"{name:13} {result['status']:9} {result.get('seconds', 0):6.1f} s  {', '.join(broken)}", flush=True)
    print(f"{options.output}: {results['seconds']:.0f} s")
    return int(any(result["status"] != "passed" for result in results["steps"].values()))


if __name__ == "__main__":
    sys.exit(main())
