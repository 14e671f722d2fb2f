#!/usr/bin/env python
"""The steps of `first_contact.py`; `python first_contact_steps.py REQUEST.json RECORD.json` runs one of them.

A step notes its figures and checks as soon as it has them: what it has noted is kept if it fails or is ended.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from first_contact_ranks import Job, RankEnd, run_job
from first_contact_runs import (
    SIZES,
    WARM_UP,
    IdleShare,
    Losses,
    Memory,
    Observer,
    Precision,
    Setting,
    StepTimes,
    Synchronisations,
    Training,
    device_of,
    lines_of,
    memory_of,
    synchronise,
)
from transformers import Trainer
from transformers.utils import is_torch_bf16_gpu_available

from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.resilience.watchdog import EXIT_CODE
from hf_pipetransformer.run.events_file import FILE_NAME as EVENTS_FILE

BYTES_FOR_LARGE = 14 * 2**30
"""Of the device's memory, for BERT-large's weights, gradients and AdamW's state in float32, and one batch."""
SECONDS_FOR_STACKS = 2.0
"""So long before a step is ended, it writes the stacks of its threads."""
SECONDS_TO_SPARE = 5.0
"""So long before a step is ended, it ends processes that it has started, to keep what they have written."""
LARGEST_DIFFERENCE = 1e-3
"""Between the losses of a pipeline and those of one process, relative, in fp32: they add up in another order."""
GB = 1e9


class Record:
    """Figures and checks of a step, in a file that is whole at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._figures: dict[str, Any] = {}
        self._checks: dict[str, bool] = {}
        self.note()

    def note(self, **figures: Any) -> None:
        """Add figures."""
        self._figures |= figures
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(_for_json({"figures": self._figures, "checks": self._checks})))
        partial.replace(self._path)

    def check(self, **checks: bool) -> None:
        """Add what must be true."""
        self._checks |= checks
        self.note()


def _for_json(value: Any) -> Any:
    """The value with infinities and NaN, which JSON has not, as text."""
    if isinstance(value, dict):
        return {key: _for_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_for_json(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------------------------------------------------
# machine
# ---------------------------------------------------------------------------------------------------------
def machine(setting: Setting, record: Record, deadline: float) -> None:
    """Note the facts of the machine, and how fast its parts are."""
    device = setting.device
    record.note(
        platform=platform.platform(),
        cores=os.cpu_count(),
        host_gib=round(psutil.virtual_memory().total / 2**30, 1),
        load_average=os.getloadavg()[0],
        device=device.type,
        model=asdict(setting.size),
        half_precision=setting.half,
        float32_matmul_precision=torch.get_float32_matmul_precision(),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
    )
    if device.type != "cpu":
        memory = memory_of(device)
        record.note(
            devices=torch.accelerator.device_count(),
            device_gib=round(memory / 2**30, 1) if memory is not None else None,
        )
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        record.note(
            name=torch.cuda.get_device_name(device),
            capability=list(torch.cuda.get_device_capability(device)),
            free_gib=round(free / 2**30, 1),
            cudnn=torch.backends.cudnn.version(),
            nccl=list(torch.cuda.nccl.version()) if dist.is_nccl_available() else None,
            bf16=is_torch_bf16_gpu_available(),
        )
    width = 8 * setting.size.hidden
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        record.note(**{f"matmul_{name}_tflops": _tflops(width, dtype, device)})
    record.note(**_copies(device))
    record.note(**_disk(Path(setting.folder)))
    record.check(the_device_computes=bool(torch.ones(3, device=device).sum().cpu() == 3))


def _tflops(width: int, dtype: torch.dtype, device: torch.device) -> float:
    a = torch.randn(width, width, device=device, dtype=dtype)
    return 2 * width**3 / _seconds_of(lambda: a @ a, device) / 1e12


def _copies(device: torch.device) -> dict[str, float]:
    """GB/s of copies between the host and the device, from pageable and from pinned memory."""
    if device.type == "cpu":
        return {}
    on_device = torch.empty(2**28, dtype=torch.uint8, device=device)
    pageable = torch.empty(2**28, dtype=torch.uint8)
    found = {"to_device_pageable_gb_s": _gb_s(lambda: on_device.copy_(pageable), pageable.nbytes, device)}
    try:
        pinned = pageable.pin_memory()
    except RuntimeError:  # not every accelerator's build of torch has it
        return found
    return {
        **found,
        "to_device_pinned_gb_s": _gb_s(lambda: on_device.copy_(pinned, non_blocking=True), pinned.nbytes, device),
        "from_device_pinned_gb_s": _gb_s(lambda: pinned.copy_(on_device, non_blocking=True), pinned.nbytes, device),
    }


def _gb_s(copy: Callable[[], Any], nbytes: int, device: torch.device) -> float:
    return nbytes / _seconds_of(copy, device) / GB


def _disk(folder: Path) -> dict[str, float]:
    """GB/s of the folder in which the cache lies: written and synchronised, and read from the page cache."""
    content = os.urandom(2**24) * 8
    path = folder / "disk"
    began = time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter()
    path.read_bytes()
    read = time.perf_counter()
    path.unlink()
    return {
        "disk_write_gb_s": len(content) / (written - began) / GB,
        "disk_read_gb_s": len(content) / (read - written) / GB,
    }


def _seconds_of(function: Callable[[], Any], device: torch.device, repetitions: int = 5) -> float:
    """Median seconds of a call, behind one that warms up."""
    times = []
    for _ in range(repetitions + 1):
        synchronise(device)
        began = time.perf_counter()
        function()
        synchronise(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


# ---------------------------------------------------------------------------------------------------------
# One process
# ---------------------------------------------------------------------------------------------------------
KINDS = {"stock": 0, "ours": 1}
"""The stock Trainer, and this library with one stage -> `Training.stages`."""
FP32_STEPS = 6
"""Of trainings whose losses are compared."""
TIMES_THE_NOISE = 10
"""How much more our losses may differ from the stock Trainer's than those of two of its own trainings: 0 if these are
equal."""
NOT_COUNTED = "not counted: torch counts them for CUDA devices only"


def parity(setting: Setting, record: Record, deadline: float) -> None:
    """Compare one stage with the stock Trainer: losses, time of a step, synchronisations."""
    names = ("stock", "stock_again", "ours")
    losses = {name: _losses(setting, Training(int(name == "ours"), max_steps=FP32_STEPS)) for name in names}
    # 0 unless kernels add in another order each time
    noise = _largest_difference(losses["stock_again"], losses["stock"])
    difference = _largest_difference(losses["ours"], losses["stock"])
    record.note(losses=losses, stock_differs_from_itself_by=noise, ours_differs_from_stock_by=difference)
    record.check(losses_are_equal=difference <= TIMES_THE_NOISE * noise < LARGEST_DIFFERENCE)
    step_ms: dict[str, list[float]] = {name: [] for name in KINDS}
    peaks: dict[str, int | None] = {}
    for name in ("stock", "ours", "ours", "stock"):  # a device that grows hot slows down both alike
        times = StepTimes(setting.device, setting.size.steps)
        Training(KINDS[name], setting.half).run(setting, [times])
        step_ms[name] += times.step_ms
        peaks[name] = times.peak_bytes[-1]
        record.note(precision=setting.half, step_ms=step_ms, peak_bytes=peaks)
    record.note(ours_over_stock=statistics.mean(step_ms["ours"]) / statistics.mean(step_ms["stock"]))
    if setting.device.type != "cuda":
        record.note(synchronisations=NOT_COUNTED)
        return
    counts = {}
    for name, stages in KINDS.items():
        counter = Synchronisations(WARM_UP, setting.size.steps - WARM_UP - 1)
        Training(stages, setting.half).run(setting, [counter])
        counts[name] = {"per_step": counter.per_step, "sites": dict(counter.sites.most_common())}
        record.note(synchronisations=counts)
    record.check(no_more_synchronisations_than_stock=counts["ours"]["per_step"] <= counts["stock"]["per_step"])


def _losses(setting: Setting, training: Training) -> list[float]:
    losses = Losses()
    training.run(setting, [losses])
    return losses.values


def _largest_difference(values: Sequence[float], expected: Sequence[float]) -> float:
    """Relative to the expected value; infinite if the numbers of values differ, or one is not a number."""
    if len(values) != len(expected) or not all(map(math.isfinite, (*values, *expected))):
        return math.inf
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(values, expected, strict=True))


def cache(setting: Setting, record: Record, deadline: float) -> None:
    """Freeze a third and two thirds of the layers, and time steps with and without the cache."""
    for frozen in setting.size.frozen:
        _freeze(setting, frozen, record)


def _freeze(setting: Setting, frozen: int, record: Record) -> None:
    """One training that fills the cache and reads it, one without it, and one that decides whether it pays."""
    device, steps = setting.device, setting.size.steps
    measured = steps - WARM_UP - 1
    training = Training(1, setting.half).with_options(freeze_policy="schedule", freeze_schedule={"0": frozen})
    figures: dict[str, Any] = {"frozen_layers": frozen}

    def note(**values: Any) -> None:
        figures.update(values)
        record.note(**{f"f{frozen}": figures})

    # epochs: fill; read, perhaps from a cold disk; read; read under the profiler; read with synchronisations counted
    times, idle = StepTimes(device, steps), IdleShare(device, 3 * steps + WARM_UP, measured)
    counter = Synchronisations(4 * steps + WARM_UP, measured) if device.type == "cuda" else None
    observers = [times, idle] if counter is None else [times, idle, counter]
    outcome = replace(training, epochs=5).with_options(activation_cache="on").run(setting, observers)
    used = outcome.cache["epochs"]
    note(
        fill_ms=times.step_ms[0],
        read_ms=times.step_ms[2],
        fill_peak_bytes=times.peak_bytes[0],
        read_peak_bytes=times.peak_bytes[2],
        read_idle_share=idle.share,
        read_synchronisations=NOT_COUNTED
        if counter is None
        else {"per_step": counter.per_step, "sites": dict(counter.sites.most_common())},
        cache=outcome.cache,
    )
    record.check(**{f"f{frozen}_all_samples_are_read": bool(used) and used[-1]["cache_hit_rate"] == 1.0})
    # epochs: compute; compute under the profiler
    times, idle = StepTimes(device, steps), IdleShare(device, steps + WARM_UP, measured)
    replace(training, epochs=2).with_options(activation_cache="off").run(setting, [times, idle])
    note(
        uncached_ms=times.step_ms[0],
        uncached_peak_bytes=times.peak_bytes[0],
        uncached_idle_share=idle.share,
        uncached_over_read=times.step_ms[0] / figures["read_ms"],
    )
    # epochs: fill; read, or compute
    times = StepTimes(device, steps)
    outcome = replace(training, epochs=2).with_options(activation_cache="auto").run(setting, [times])
    note(auto={"step_ms": times.step_ms, **outcome.cache})
    record.check(
        **{
            f"f{frozen}_auto_has_decided": outcome.cache["cached_layers"] > 0
            or outcome.cache["off_because"] is not None
        }
    )


class Overflow(Observer):
    """Watches fp16's loss scaler in a training one of whose steps overflows.

    Args:
        step: number of the step that overflows.
        adds_scaler: put a scaler into the trainer, which has none of its own on this device.

    Attributes:
        skipped: for each step, whether it has left the head's weights as they were. (A fused optimizer skips a step
            by itself, of which Accelerate does not hear.)
        scales: the scale after each step.
    """

    FACTOR = 1e38
    """The loss is still finite with it, but its gradients are not."""

    def __init__(self, step: int, adds_scaler: bool) -> None:
        self.skipped: list[bool] = []
        self.scales: list[float] = []
        self._step, self._adds_scaler = step, adds_scaler
        self._begun = 0
        self._weights = torch.empty(0)

    def begin(self, trainer: Trainer) -> None:
        compute_loss: Callable[..., Any] = trainer.compute_loss

        def overflowing(*args: Any, **kwargs: Any) -> Any:
            loss = compute_loss(*args, **kwargs)
            return loss * self.FACTOR if self._begun == self._step + 1 else loss

        trainer.compute_loss = overflowing
        if self._adds_scaler:
            scaler = trainer.accelerator.scaler = torch.amp.GradScaler(trainer.args.device.type)
            trainer.accelerator.unscale_gradients = lambda *_: scaler.unscale_(_unwrapped(trainer.optimizer))

    def before_step(self, trainer: Trainer) -> None:
        if self._begun:
            self._look(trainer)
        self._begun += 1
        self._weights = _head_of(trainer).clone()

    def end(self, trainer: Trainer) -> None:
        self._look(trainer)

    def _look(self, trainer: Trainer) -> None:
        self.skipped.append(torch.equal(self._weights, _head_of(trainer)))
        self.scales.append(float(trainer.accelerator.scaler.get_scale()))


def _head_of(trainer: Trainer) -> torch.Tensor:
    """The weights of the classifier, as they are at the moment."""
    return trainer.model.classifier.weight.detach()


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def overflow(setting: Setting, record: Record, deadline: float) -> None:
    """Let the gradients of one step overflow, in the stock Trainer and in this library with one stage."""
    has_fp16 = setting.device.type in ("cuda", "xpu")
    precision: Precision = "fp16" if has_fp16 else "fp32"
    step = 3
    record.note(precision=precision, scaler="fp16's own" if has_fp16 else "put into a training in fp32")
    seen, losses = {}, {}
    for name, stages in KINDS.items():
        seen[name], observed = Overflow(step, not has_fp16), Losses()
        Training(stages, precision).run(setting, [seen[name], observed])
        losses[name] = observed.values
        record.note(losses=losses, **{name: {"skipped": seen[name].skipped, "scales": seen[name].scales}})
    record.check(
        the_step_is_skipped=seen["ours"].skipped[step],
        the_scale_is_halved=seen["ours"].scales[step] * 2 == seen["ours"].scales[step - 1],
        later_steps_train=not all(seen["ours"].skipped[step + 1 :]),
        as_in_stock=seen["ours"].skipped == seen["stock"].skipped and seen["ours"].scales == seen["stock"].scales,
        losses_as_in_stock=_largest_difference(losses["ours"], losses["stock"]) < LARGEST_DIFFERENCE,
    )


# ---------------------------------------------------------------------------------------------------------
# Several processes on one device
# ---------------------------------------------------------------------------------------------------------
ONLY_SEMANTICS = (
    "Several processes share one device, and what they exchange is copied through the host's memory by gloo, as NCCL"
    " refuses this. Results and memory mean something, times do not."
)
PIPELINE = Training(dropout=0.0, max_steps=FP32_STEPS)
"""In fp32 and without dropout, so that its losses can be compared with those of one process."""


def two_stages(setting: Setting, record: Record, deadline: float) -> None:
    """Train in a pipeline of two stages on one device, beside one process with the same batches."""
    record.note(about=ONLY_SEMANTICS)
    losses, memory = Losses(), Memory(setting.device)
    PIPELINE.run(setting, [losses, memory])
    whole = memory.training_bytes
    record.note(losses_of_one_process=losses.values, training_bytes_of_one_process=whole)
    training = replace(PIPELINE, stages=2).with_options(num_microbatches=4)
    ends = _run_pipeline(record, Job(setting, training, str(Path(setting.folder, "two"))), deadline, losses.values)
    if whole is not None:
        record.check(stages_need_less_memory=all(end.report["training_bytes"] < whole for end in ends))


class Saves(Observer):
    """Saves a checkpoint behind one step, and none at the end.

    Args:
        step: number of steps that are done then.
    """

    def __init__(self, step: int) -> None:
        self._steps_left = step

    def after_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            trainer.control.should_save = True


def three_stages(setting: Setting, record: Record, deadline: float) -> None:
    """Let three stages go on from a checkpoint of one process, with the first stage's layers all frozen.

    Such a stage sends activations and gets no gradients, so that it does not take part in all that the others do.
    """
    record.note(about=ONLY_SEMANTICS)
    saved, frozen = FP32_STEPS // 2, setting.size.frozen[1]
    training = replace(PIPELINE, stages=1).with_options(
        freeze_policy="schedule", freeze_schedule={"0": frozen}, activation_cache="off"
    )
    folder, losses = str(Path(setting.folder, "three")), Losses()
    training.trainer(setting, folder, [losses, Saves(saved)]).train()
    expected = losses.values[saved:]
    record.note(losses_of_one_process=expected)
    resumed = replace(training, stages=3).with_options(num_microbatches=4, elastic=False)
    checkpoint = str(Path(folder, f"checkpoint-{saved}"))
    _run_pipeline(record, Job(setting, resumed, folder, checkpoint), deadline, expected)
    layout = next(line for line in reversed(lines_of(Path(folder, EVENTS_FILE))) if line["event"] == "resume")
    record.note(stage_bounds=layout["stage_bounds"], frozen_layers=layout["num_frozen_layers"])
    record.check(
        three_stages_resume=layout["pipeline_parallel_size"] == 3,
        the_first_stage_is_frozen=layout["stage_bounds"][1] <= layout["num_frozen_layers"] == frozen,
    )


def _run_pipeline(record: Record, job: Job, deadline: float, expected: Sequence[float]) -> list[RankEnd]:
    """Run the processes of a pipeline, and compare their losses with those of one process.

    Raises:
        RuntimeError: a process did not end as it should.
    """
    clear_device_cache(garbage_collection=True)  # the processes need the memory that this one has used
    ends = run_job(job, deadline - SECONDS_TO_SPARE - time.monotonic())
    record.note(processes=[_plain(end) for end in ends])
    for rank, end in enumerate(ends):
        end.raise_for_error(rank)
    difference = max(_largest_difference(end.report["losses"], expected) for end in ends)
    record.note(losses=ends[0].report["losses"], differs_from_one_process_by=difference)
    record.check(
        losses_as_of_one_process=difference < LARGEST_DIFFERENCE,
        all_are_on_one_device=len({end.report["device"] for end in ends}) == 1,
    )
    return ends


def _plain(end: RankEnd) -> dict[str, Any]:
    """How a process has ended, without what it trained; its output if it did not end well."""
    values = {"exit_code": end.exit_code, "seconds": round(end.seconds, 2)}
    kept = {
        name: end.report[name] for name in ("setup_bytes", "training_bytes", "error", "message") if name in end.report
    }
    return {**values, **kept, **({} if end.exit_code == 0 or "error" in kept else {"output": end.log})}


def killed_rank(setting: Setting, record: Record, deadline: float) -> None:
    """Kill one of three processes inside a training: the others must end by an error that names it."""
    killed, at_step, timeout = 1, 3, 30.0
    training = replace(PIPELINE, stages=3, epochs=100).with_options(num_microbatches=4, watchdog_timeout=timeout)
    job = Job(setting, training, str(Path(setting.folder, "killed")), kills=(killed, at_step))
    ends = run_job(job, deadline - SECONDS_TO_SPARE - time.monotonic())
    others = [end for rank, end in enumerate(ends) if rank != killed]
    after = [end.seconds - ends[killed].seconds for end in others]
    record.note(
        killed_rank=killed,
        watchdog_timeout=timeout,
        processes=[_plain(end) for end in ends],
        seconds_after_the_kill=[round(seconds, 2) for seconds in after],
    )
    record.check(
        it_was_killed=ends[killed].exit_code == -signal.SIGKILL,
        others_end_by_the_right_error=all(
            end.report.get("error") == PeerFailedError.__name__ or end.exit_code == EXIT_CODE for end in others
        ),
        others_do_not_exit_with_0=all(end.exit_code not in (0, None) for end in others),
        others_name_it=all(f"rank {killed} " in end.log + end.report.get("message", "") for end in others),
        others_end_in_time=max(after) <= timeout,
    )


# ---------------------------------------------------------------------------------------------------------
# epochs
# ---------------------------------------------------------------------------------------------------------
EPOCHS = 3
TIMES_THE_STEPS = 4
"""How much longer an epoch is here than elsewhere, for what (g) examines before its first step to weigh less."""


class EpochTimes(Observer):
    """Seconds of each epoch, with all that happens in it.

    Args:
        device: the device of the training.
        steps: of each epoch.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self._marks: list[float] = []
        self._device, self._steps = device, steps
        self._count = 0

    def before_step(self, trainer: Trainer) -> None:
        if self._count % self._steps == 0:
            self._mark()
        self._count += 1

    def end(self, trainer: Trainer) -> None:
        self._mark()

    def _mark(self) -> None:
        synchronise(self._device)
        self._marks.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self._marks)]


def epochs(setting: Setting, record: Record, deadline: float) -> None:
    """Train three epochs (a) with the stock Trainer, and (g) with freezing, by a third each time, and the cache."""
    freezing = {"freeze_policy": "alpha", "freeze_alpha": 1 / 3, "activation_cache": "auto"}
    ways = {
        "a": Training(0, setting.half, epochs=EPOCHS),
        "g": Training(1, setting.half, epochs=EPOCHS, options=freezing),
    }
    setting = replace(setting, size=replace(setting.size, steps=TIMES_THE_STEPS * setting.size.steps))
    train_seconds, epoch_seconds = {}, {}
    for name, training in ways.items():
        times, losses = EpochTimes(setting.device, setting.size.steps), Losses()
        outcome = training.run(setting, [times, losses])
        train_seconds[name], epoch_seconds[name] = outcome.seconds, times.seconds
        record.check(**{f"{name}_has_finite_losses": all(map(math.isfinite, losses.values))})
        record.note(
            **{name: {"train_seconds": outcome.seconds, "epoch_seconds": times.seconds, "cache": outcome.cache}}
        )
    record.note(
        steps_of_an_epoch=setting.size.steps,
        a_over_g_in_epochs=sum(epoch_seconds["a"]) / sum(epoch_seconds["g"]),
        a_over_g_in_train=train_seconds["a"] / train_seconds["g"],
    )


# ---------------------------------------------------------------------------------------------------------
STEPS: dict[str, Callable[[Setting, Record, float], None]] = {
    step.__name__: step for step in (machine, parity, cache, overflow, two_stages, three_stages, killed_rank, epochs)
}


def setting_of(request: Mapping[str, Any]) -> Setting:
    """What is trained, and where, as asked for on the command line."""
    device = device_of(request["use_cpu"])
    name = request["model_size"]
    if name == "auto":
        memory = memory_of(device) if device.type != "cpu" else 0
        name = "tiny" if device.type == "cpu" else "bert-base" if (memory or 0) < BYTES_FOR_LARGE else "bert-large"
    given = {field: request[field] for field in ("rows", "tokens") if request[field] is not None}
    return Setting(replace(SIZES[name], **given), device.type == "cpu", request["folder"])


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    seconds = request["ends_at"] - time.time()
    deadline = time.monotonic() + seconds
    faulthandler.dump_traceback_later(max(seconds - SECONDS_FOR_STACKS, 1.0))
    STEPS[request["step"]](setting_of(request), Record(Path(sys.argv[2])), deadline)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
