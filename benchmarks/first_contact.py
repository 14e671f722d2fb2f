#!/usr/bin/env python
"""The first run on a new GPU: do the results of the CPU's tests hold there as well, and how fast is it?

    python benchmarks/first_contact.py --out first_contact.json
    python benchmarks/first_contact.py --use_cpu --steps parity cache     # some of the steps; a tiny model on the CPU

It needs one device and at most eight minutes, no launcher, no data set and no hub: BERT-large with random weights
(BERT-base on less than 14 GiB) trains on random tokens.

    machine       versions, the device, speed of matrix products
    parity        the stock Trainer, and this library with one stage: losses in fp32 must be equal; time of a step in
                  bf16; how often a step waits for the device, and where
    front         a frozen encoder below a classifier that trains, beside the stock Trainer: the same losses, and the
                  time of a step in the epoch that fills the store and in those that read it
    cache         a third and two thirds of the layers frozen: time and peak memory of a step that fills the cache,
                  reads it, or computes the frozen layers; what "auto" decides
    overflow      fp16's loss scaler, where the gradients of one step overflow
    two_stages    K = 2, without frozen layers, with the whole first stage frozen, and with a loss of the user's, which
                  drives the pipeline: losses as of one process, and less memory for each stage. On one device over
                  gloo, by copies in the host's memory, as NCCL refuses two processes on one device: its times are
                  then useless
    epochs        three epochs of the stock Trainer, and of this library with freezing and the cache

Each step runs in a process of its own, within its share of the time that is left; a step that fails does not stop the
next ones. The exit code is 0 if all have passed. On a CPU a tiny model trains: a test of this script without times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer
from transformers import BertConfig, BertForSequenceClassification, Trainer, set_seed

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.parts.records.files import METRICS

import harness
from harness import RandomRows

FIELDS = ("layers", "hidden", "heads", "vocabulary", "rows", "tokens", "steps")
SIZES = {
    "bert-large": dict(zip(FIELDS, (24, 1024, 16, 30522, 48, 128, 12), strict=True)),
    "bert-base": dict(zip(FIELDS, (12, 768, 12, 30522, 48, 128, 12), strict=True)),
    "tiny": dict(zip(FIELDS, (6, 32, 2, 512, 12, 16, 8), strict=True)),
}
BYTES_FOR_LARGE = 14 * 2**30
WARM_UP = 3  # first steps of each epoch that are not measured
LEAST_SECONDS = 5.0  # a step for which less is left is not started: imports take as long
SECONDS_TO_END = 10.0  # for a launcher and its ranks, when the time of a step is over
LARGEST_DIFFERENCE = 1e-3  # between the losses of a pipeline and of one process, relative, in fp32
SYNCHRONISING = "called a synchronizing CUDA operation"  # what torch says of each
HOST_COPIES = Path(__file__).parents[1] / "tests" / "accelerator"
WHOSE = ("stock", "ours")
Found = dict[str, Any]


# A training and its measurements
def device_of(options: argparse.Namespace) -> torch.device:
    is_cpu = options.use_cpu or not torch.accelerator.is_available()
    return torch.device("cpu") if is_cpu else torch.device(str(torch.accelerator.current_accelerator()), 0)


def size_of(options: argparse.Namespace) -> dict[str, int]:
    device = device_of(options)
    if options.model_size or device.type == "cpu":
        return SIZES[options.model_size or "tiny"]
    memory = getattr(torch.get_device_module(device).get_device_properties(device), "total_memory", 0)
    return SIZES["bert-base" if memory < BYTES_FOR_LARGE else "bert-large"]


def make_model(size: dict[str, int], dropout: float) -> BertForSequenceClassification:
    set_seed(0)
    sizes = {"hidden_size": size["hidden"], "num_hidden_layers": size["layers"], "num_attention_heads": size["heads"]}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(
        BertConfig(vocab_size=size["vocabulary"], intermediate_size=4 * size["hidden"], **sizes, **rates)
    )


class Watched:
    """Measures around `training_step`, without a callback, which could be one that reads weights."""

    steps_of_epoch = 0
    counts_waits = False

    def begin(self) -> None:
        self.count, self.losses, self.epoch_ms, self.peaks = 0, [], [], []  # type: ignore[var-annotated]
        self.sites: Counter[str] = Counter()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        step, device = self.count % self.steps_of_epoch, self.args.device  # type: ignore[attr-defined]
        if step in (WARM_UP, self.steps_of_epoch - 1):
            synchronise(device)
            if step == WARM_UP:
                self.began = time.perf_counter()
                reset_peak(device)
                self._listen(True)
            else:
                self._listen(False)
                seconds = time.perf_counter() - self.began
                self.epoch_ms.append(1e3 * seconds / (step - WARM_UP))
                self.peaks.append(peak_bytes(device))
        self.count += 1
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.losses.append(loss.detach().clone())
        return loss

    def _listen(self, begins: bool) -> None:
        """Have torch warn of each call for which the program waits for the device, and count them."""
        if not self.counts_waits:
            return
        if begins:
            self._caught = warnings.catch_warnings(record=True)
            self._warnings = self._caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        else:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)
            self.sites.update(f"{w.filename}:{w.lineno}" for w in self._warnings if SYNCHRONISING in str(w.message))


def synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def reset_peak(device: torch.device) -> None:
    getattr(torch.get_device_module(device), "reset_peak_memory_stats", lambda _: None)(device)


def peak_bytes(device: torch.device) -> int | None:
    return getattr(torch.get_device_module(device), "max_memory_allocated", lambda _: None)(device)


def train(
    options: argparse.Namespace,
    ours: bool,
    precision: str = "fp32",
    epochs: int = 1,
    dropout: float = 0.1,
    processes: int = 1,
    frozen: bool = False,
    watched: Found | None = None,
    **arguments: Any,
) -> Found:
    """Train once, by this library or the stock Trainer, and return the figures. Collective over all processes.

    Args:
        options: of the command line.
        ours: whether this library trains.
        precision: fp32, bf16 or fp16.
        epochs: number of epochs.
        dropout: rate of it in all layers.
        processes: that share the global batch.
        frozen: whether all below the classifier is frozen.
        watched: attributes of `Watched`.
        **arguments: further training arguments.
    """
    size = size_of(options)
    base: type[Trainer] = PipeTransformerTrainer if ours else Trainer
    attributes = {"steps_of_epoch": size["steps"], **(watched or {})}
    model = make_model(size, dropout)
    if frozen:
        model.bert.requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = harness.make_trainer(
            model,
            RandomRows(size["rows"] * size["steps"], size["tokens"], size["vocabulary"]),
            folder,
            [],
            is_ours=ours,
            trainer_class=type(base.__name__, (Watched, base), attributes),
            per_device_train_batch_size=size["rows"] // processes,
            num_train_epochs=epochs,
            use_cpu=device_of(options).type == "cpu",
            **{precision: True} if precision != "fp32" else {},
            **arguments,
        )
        trainer.begin()
        began = time.perf_counter()
        trainer.train()
        synchronise(trainer.args.device)
        metrics = Path(folder, METRICS)
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    values = [line.get("values") or {} for line in lines]
    return {
        "losses": [float(loss) for loss in trainer.losses],
        "epoch_ms": trainer.epoch_ms,
        "peak_bytes": trainer.peaks,
        "waits_per_step": sum(trainer.sites.values()) / max(1, len(trainer.epoch_ms) * (size["steps"] - WARM_UP - 1)),
        "waits": dict(trainer.sites.most_common(20)),
        "scale": trainer.accelerator.scaler.get_scale() if trainer.accelerator.scaler else None,
        "hit_rates": [v["cache_hit_rate"] for v in values if "cache_hit_rate" in v],
        "cache_off": next((line["reason"] for line in lines if line.get("kind") == "cache_off"), None),
        "seconds": time.perf_counter() - began,
    }


def difference(values: list[float], expected: list[float]) -> float:
    """The largest, relative; infinite if one is not a number."""
    if len(values) != len(expected) or not all(map(math.isfinite, (*values, *expected))):
        return math.inf
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(values, expected, strict=True))


# The steps: each returns figures and checks
def half(options: argparse.Namespace) -> str:
    kind = device_of(options).type
    return "bf16" if kind == "cpu" or torch.cuda.is_bf16_supported() else "fp16" if kind == "cuda" else "fp32"


def machine(options: argparse.Namespace) -> tuple[Found, dict[str, bool]]:
    device, size = device_of(options), size_of(options)
    figures: Found = {"device": str(device), "model": size, "cores": os.cpu_count(), "cuda": torch.version.cuda}
    if device.type == "cuda":
        figures |= {"name": torch.cuda.get_device_name(device), "devices": torch.cuda.device_count()}
    width = 8 * size["hidden"]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a = torch.randn(width, width, device=device, dtype=dtype)
        figures[f"{str(dtype)[6:]}_tflops"] = 2 * width**3 / Timer("a @ a", globals={"a": a}).timeit(5).mean / 1e12
    return figures, {"the_device_computes": bool(torch.ones(3, device=device).sum().cpu() == 3)}


def parity(options: argparse.Namespace) -> tuple[Found, dict[str, bool]]:
    stock, again, ours = (train(options, kind, max_steps=6)["losses"] for kind in (False, False, True))
    noise = difference(again, stock)  # 0 unless kernels add in another order each time
    figures: Found = {"stock_differs_from_itself_by": noise, "ours_differs_from_stock_by": difference(ours, stock)}
    checks = {"losses_are_equal": figures["ours_differs_from_stock_by"] <= 10 * noise < LARGEST_DIFFERENCE}
    runs = [train(options, kind, half(options)) for kind in (False, True, True, False)]
    figures["step_ms"] = {
        "stock": [runs[k]["epoch_ms"] for k in (0, 3)],
        "ours": [runs[k]["epoch_ms"] for k in (1, 2)],
    }
    figures["peak_bytes"] = {"stock": runs[0]["peak_bytes"], "ours": runs[1]["peak_bytes"]}
    if device_of(options).type == "cuda":
        counted = [train(options, kind, half(options), watched={"counts_waits": True}) for kind in (False, True)]
        figures["waits"] = dict(zip(("stock", "ours"), (run["waits"] for run in counted), strict=True))
        checks["no_more_waits_than_stock"] = counted[1]["waits_per_step"] <= counted[0]["waits_per_step"]
    return figures, checks


def front(options: argparse.Namespace) -> tuple[Found, dict[str, bool]]:
    runs = [
        train(options, ours, epochs=3, dropout=0.0, frozen=True, **({"activation_cache": "on"} if ours else {}))
        for ours in (False, True)
    ]
    figures = {name: {k: run[k] for k in ("epoch_ms", "hit_rates")} for name, run in zip(WHOSE, runs, strict=True)}
    figures["ours_differs_from_stock_by"] = difference(runs[1]["losses"], runs[0]["losses"])
    checks = {"losses_as_of_stock": figures["ours_differs_from_stock_by"] < LARGEST_DIFFERENCE}
    return figures, {**checks, "all_samples_are_read": runs[1]["hit_rates"][-1:] == [1.0]}


def cache(options: argparse.Namespace) -> tuple[Found, dict[str, bool]]:
    figures, checks = Found(), dict[str, bool]()
    layers = size_of(options)["layers"]
    for frozen in (layers // 3, 2 * layers // 3):
        freezing = {"freeze_policy": "schedule", "freeze_schedule": {"0": frozen}}
        on, off, auto = (
            train(options, True, half(options), epochs=3, activation_cache=mode, **freezing)
            for mode in ("on", "off", "auto")
        )
        kept = ("epoch_ms", "peak_bytes", "hit_rates", "cache_off")
        figures[f"f{frozen}"] = {
            name: {key: run[key] for key in kept} for name, run in (("on", on), ("off", off), ("auto", auto))
        }
        checks[f"f{frozen}_all_samples_are_read"] = on["hit_rates"][-1:] == [1.0]
        checks[f"f{frozen}_auto_has_decided"] = bool(auto["hit_rates"]) or auto["cache_off"] is not None
    return figures, checks


def overflowing(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A `compute_loss` with a finite fourth value that has infinite gradients."""
    loss = super(Watched, self).compute_loss(*args, **kwargs)  # type: ignore[misc]
    return loss * 1e38 if self.count == 4 else loss


def overflow(options: argparse.Namespace) -> tuple[Found, dict[str, bool]]:
    if device_of(options).type != "cuda":
        return {"about": "fp16 has a loss scaler on accelerators only"}, {}
    runs = [train(options, kind, "fp16", watched={"compute_loss": overflowing}) for kind in (False, True)]
    figures = {"stock": runs[0]["scale"], "ours": runs[1]["scale"], "losses": [run["losses"] for run in runs]}
    later = difference(runs[1]["losses"][4:], runs[0]["losses"][4:])  # the loss of the step itself may be infinite
    return figures, {"scale_as_in_stock": runs[0]["scale"] == runs[1]["scale"], "losses": later < LARGEST_DIFFERENCE}


def of_the_user(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    """`compute_loss` of a user's: cross entropy in float32, from two calls of the model with half of the samples."""
    labels = inputs.pop("labels")
    calls = [model(**{name: value[half::2] for name, value in inputs.items()}).logits.float() for half in (0, 1)]
    loss = sum(nn.functional.cross_entropy(logits, labels[half::2]) for half, logits in enumerate(calls)) / 2
    return (loss, {"logits": torch.cat(calls)}) if return_outputs else loss


def two_stages(options: argparse.Namespace) -> tuple[Found, dict[str, bool]]:
    frozen = {"freeze_policy": "schedule", "freeze_schedule": {"0": size_of(options)["layers"] // 2}}
    figures, checks = Found(), dict[str, bool]()
    ways: dict[str, Found] = {"trained": {}, "first stage frozen": {**frozen, "activation_cache": "off"}, "driven": {}}
    for name, freezing in ways.items():
        own = {"watched": {"compute_loss": of_the_user}} if name == "driven" else {}
        one = train(options, True, dropout=0.0, **freezing, **own)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
            given = [
                *sys.argv[1:],
                "--rank_of",
                json.dumps({"folder": folder, "arguments": freezing, "driven": bool(own)}),
            ]
            subprocess.run([*command, *given], check=True)
            ranks = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(2)]
        largest = max(difference(rank["losses"], one["losses"]) for rank in ranks)
        figures[name] = {"differs_from_one_process_by": largest, "peak_bytes": [r["peak_bytes"] for r in ranks]}
        checks[f"{name}_losses_as_of_one_process"] = largest < LARGEST_DIFFERENCE
        if one["peak_bytes"][0] and name == "trained":
            checks["stages_need_less_memory"] = all(r["peak_bytes"][0] < one["peak_bytes"][0] for r in ranks)
    return figures, checks


def as_rank(options: argparse.Namespace, asked: Found) -> None:
    """Train as one of two stages. Collective over both."""
    arguments: Found = {"pipeline_parallel_size": 2, "num_microbatches": 4, "elastic": False, **asked["arguments"]}
    if device_of(options).type != "cpu" and torch.accelerator.device_count() < 2:
        sys.path.append(str(HOST_COPIES))
        from host_copies import use_host_copies

        use_host_copies()
        arguments["ddp_backend"] = "gloo"
    watched = {"compute_loss": of_the_user} if asked["driven"] else None
    found = train(options, True, dropout=0.0, processes=2, watched=watched, **arguments)
    Path(asked["folder"], f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


def epochs(options: argparse.Namespace) -> tuple[Found, dict[str, bool]]:
    freezing = {"freeze_policy": "alpha", "freeze_alpha": 1 / 3}
    stock, ours = train(options, False, half(options), 3), train(options, True, half(options), 3, **freezing)
    figures = {
        "stock_s": stock["seconds"],
        "ours_s": ours["seconds"],
        "epoch_ms": [stock["epoch_ms"], ours["epoch_ms"]],
    }
    return figures, {"losses_are_finite": all(map(math.isfinite, ours["losses"]))}


STEPS = {machine: 5, parity: 18, front: 7, cache: 26, overflow: 7, two_stages: 25, epochs: 12}
"""Each step, and its weight when the time that is left is shared out."""
NAMES = {step.__name__: step for step in STEPS}


# The supervisor
def supervise(command: list[str], record: Path, limit_seconds: float, environment: dict[str, str]) -> Found:
    """Run a step in a process group of its own, and end the group when the step or its time ends.

    A launcher's ranks are in groups of their own: the launcher ends them at its own end.
    """
    log, began, exit_code = record.with_suffix(".log"), time.monotonic(), None
    with log.open("wb") as stream:
        streams: Any = {"stdout": stream, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command, env=environment, **streams)
        try:
            exit_code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # nobody of the group is left
                os.killpg(process.pid, signal.SIGTERM)
                until = time.monotonic() + SECONDS_TO_END
                with suppress(subprocess.TimeoutExpired):
                    process.wait(SECONDS_TO_END)
                while time.monotonic() < until:
                    os.killpg(process.pid, 0)
                    time.sleep(0.1)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found: Found = json.loads(record.read_text()) if record.exists() else {"figures": {}, "checks": {}}
    status = "timed out" if exit_code is None else "error" if exit_code else "passed"
    if status == "passed" and not all(found["checks"].values()):
        status = "failed"
    ended = {"error": log.read_text(errors="replace")[-3000:]} if status in ("error", "timed out") else {}
    return {"status": status, "seconds": round(time.monotonic() - began, 1), **found, **ended}


def run_all(options: argparse.Namespace) -> int:
    """Run the steps one after the other; the results are in the file after each of them."""
    began, results = time.monotonic(), {}
    chosen = [name for name in NAMES if name in options.steps]
    for number, name in enumerate(chosen):
        left = 60 * options.minutes - (time.monotonic() - began)
        weights = [STEPS[NAMES[one]] for one in chosen[number:]]
        limit = left * weights[0] / sum(weights)
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        if name != two_stages.__name__:  # one device, even where there are more
            environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        if limit < LEAST_SECONDS:
            results[name] = {"status": "skipped", "error": f"{left:.0f} s were left for it and those behind it"}
        else:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                record = Path(folder, "record.json")
                command = [sys.executable, __file__, *sys.argv[1:], "--step", name, "--record", str(record)]
                results[name] = supervise(command, record, limit, environment)
        harness.write(options, steps=results, seconds=time.monotonic() - began)
        broken = [check for check, holds in results[name].get("checks", {}).items() if not holds]
        print(f"{name:11} {results[name]['status']:9} {results[name].get('seconds', 0):6.1f} s  {broken or ''}")
    return int(any(result["status"] != "passed" for result in results.values()))


def main() -> int:
    """Run all steps, or be one of them, or one of a step's processes."""
    parser = harness.parser_of(__doc__, turns=1)
    parser.set_defaults(out=Path("first_contact.json"))
    parser.add_argument("--steps", nargs="+", metavar="STEP", choices=NAMES, default=list(NAMES))
    parser.add_argument("--minutes", type=float, default=8.0, help="for all steps together; default: 8")
    parser.add_argument("--model_size", choices=SIZES, help="default: by the device's memory")
    parser.add_argument("--use_cpu", action="store_true", help="train on the CPU although there is an accelerator")
    parser.add_argument("--step", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank_of", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.rank_of or options.step):
        return run_all(options)
    if options.rank_of:
        as_rank(options, options.rank_of)
    else:
        figures, checks = NAMES[options.step](options)
        options.record.write_text(json.dumps({"figures": figures, "checks": checks}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
