"""The `hf-pipetransformer plan` command: a forecast from a model's name and a few numbers.

configuration -> placeholders -> workload ─┐
device table, or this machine ───────┴-> machine -> forecast
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import psutil
import torch
from transformers import PreTrainedModel

from ..cache.file_store import USABLE_DISK
from ..freezing.policies import FreezePolicy, make_policy
from ..pipeline.devices import USABLE_MEMORY, memory_budget
from ..planning.layout import Layout
from .device_table import GIB, CacheHost, device_named
from .forecast import Job, Machine, forecast
from .forecast_text import as_values
from .frozen_modules import estimate
from .local_profile import ROWS_TO_TIME, Subject, accelerator_type, profile_here
from .placeholder_model import build_placeholder_model, load_config, model_class
from .tuning import Tuning
from .workload import Workload, measure_workload

PROFILES = ("analytic", "cpu", accelerator_type())
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DEFAULT_DEVICE = "a100-80g"
PLAIN = Tuning()


@dataclass(frozen=True)
class MachineOptions:
    """The options of `hf-pipetransformer plan` about the machine; see there.

    Raises:
        ValueError: a value is unknown or out of range, or two of them contradict each other.
    """

    profile: str = "analytic"
    device: str | None = None
    efficiency: float | None = None
    memory_gib: float | None = None
    disk_gib: float | None = None

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise ValueError(f"profile is {self.profile!r}, but must be one of {', '.join(PROFILES)}.")
        for name in ("device", "efficiency"):  # these apply to the device table only
            value = getattr(self, name)
            if value is not None and self.profile != "analytic":
                raise ValueError(
                    f"{name} is {value!r}, but profile={self.profile!r} times the model on this machine. Remove one of"
                    " the two options."
                )
        for name, most in (("efficiency", 1.0), ("memory_gib", None), ("disk_gib", None)):
            value = getattr(self, name)
            if value is not None and not (value > 0 and (most is None or value <= most)):
                at_most = f" and at most {most:g}" if most else ""
                raise ValueError(f"{name} is {value}, but must be above 0{at_most}.")

    def with_disk(self, host: CacheHost) -> CacheHost:
        """Return the host with the disk that is asked for."""
        return host if self.disk_gib is None else replace(host, disk_bytes=self.disk_gib * GIB * USABLE_DISK)


def answer(
    name: str,
    task: str,
    seq: int | None,
    job: Job,
    options: MachineOptions,
    frozen: Sequence[str] = (),
    tuning: Tuning = PLAIN,
) -> tuple[str, dict[str, Any]]:
    """Forecast the training of a model.

    Args:
        name: name of a configuration (`placeholder_model.load_config`).
        task: a key of `placeholder_model.TASKS`, or "auto".
        seq: number of tokens of a sample.
        job: the training.
        options: the machine.
        frozen: names of modules that the user has frozen.
        tuning: whether adapters are trained, and what saves memory.

    Returns:
        A title, and the forecast as plain values.

    Raises:
        UnsupportedModelError: the model cannot be split into stages.
        ValueError: a value is unknown or out of range, or the training does not fit.
    """
    config = load_config(name)
    cls = model_class(config, task)
    model = build_placeholder_model(config, cls)
    if tuning != PLAIN and options.profile != "analytic":
        raise ValueError(
            f"profile is {options.profile!r}, which times full training in fp32. Remove --lora-r,"
            " --gradient-checkpointing and --bf16, or set profile='analytic'."
        )
    tuning.adapt(model)
    workload = tuning.lighten(measure_workload(model, seq))
    if options.profile == "analytic":
        machine, assumed = _from_table(options, job, workload, tuning)
    else:
        rows = min(job.rows_per_device, ROWS_TO_TIME)
        machine, assumed = _measured_here(options, job, Subject(config, cls, options.profile, rows, workload))
    if not workload.tokens_matter and seq is not None:
        assumed = ["samples have the size of the configuration; --seq does not matter for this model", *assumed]
    result = forecast(job, workload, machine)
    assumed += [_assumed_of_precision(model), *_assumed_of_sharding(result.first), *_assumed_of_accumulation(job)]
    assumed += tuning.assumed
    size = f"samples × {workload.tokens} tokens" if workload.tokens_matter else "samples"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    title = (
        f"{type(model).__name__}: {parameters:,} parameters, {len(workload.unit_costs)} layers; {job.num_devices}"
        f" devices, {job.batch} {size} a step, {job.num_epochs} epochs of {job.num_samples:,} samples"
    )
    values = as_values(result, type(model).__name__, options.profile, assumed)
    if frozen and options.profile != "analytic":
        raise ValueError(f"frozen_module is estimated from the device table, but profile is {options.profile!r}.")
    if frozen:
        values["frozen_modules"] = estimate(model, frozen, workload.tokens, job, machine)
    return title, values


def policy_of(freezes: bool, alpha: float, freeze_schedule: str | None) -> FreezePolicy:
    """Return the policy that the options `--freeze`, `--alpha` and `--freeze-schedule` ask for.

    Raises:
        ValueError: a number is out of range, or the schedule is no JSON object.
    """
    schedule: Any = None
    if freeze_schedule is not None:
        example = 'Pass a JSON object such as {"1": 4, "2": 7}.'
        try:
            schedule = json.loads(freeze_schedule)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"freeze_schedule is {freeze_schedule!r}, which is not valid JSON ({error}). {example}"
            ) from None
        if not isinstance(schedule, dict):
            raise ValueError(f"freeze_schedule is {freeze_schedule!r}, which is not a JSON object. {example}")
    name = "none" if not freezes else "alpha" if schedule is None else "schedule"
    return make_policy(name, alpha=alpha, schedule=schedule)


def number_or_auto(name: str, text: str) -> int | Literal["auto"]:
    """Return the value of an option.

    Raises:
        ValueError: it is neither a number of at least 1 nor "auto".
    """
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name} is {text!r}, but must be an integer of at least 1, or 'auto'.")
    return int(text)


def _from_table(options: MachineOptions, job: Job, workload: Workload, tuning: Tuning) -> tuple[Machine, list[str]]:
    device = device_named(options.device or DEFAULT_DEVICE)
    device = replace(
        device,
        efficiency=options.efficiency or device.efficiency,
        memory_bytes=device.memory_bytes if options.memory_gib is None else options.memory_gib * GIB,
        host=options.with_disk(device.host),
        backward_forwards=tuning.backward_forwards,
    )
    times, budget = device.times(workload.unit_costs, job.num_devices), int(device.memory_bytes * USABLE_MEMORY)
    return Machine(times, budget, device.devices_per_node, device.host, device, tuning.bf16), [
        f"{device.name}: {device.flops_per_second / 1e12:,.0f} TFLOP/s of which layers reach {device.efficiency:.0%}"
        f" (an estimate: --efficiency), {1e6 * device.seconds_per_unit:.0f} µs a layer and forward for its calls,"
        f" {USABLE_MEMORY:.0%} of {device.memory_bytes / GIB:,.0f} GiB",
        f"{device.link_bytes_per_second / 1e9:,.0f} GB/s between devices, {device.devices_per_node} to a node,"
        f" {device.network_bytes_per_second / 1e9:,.0f} GB/s out of it; the cache is read at"
        f" {device.host.read_bytes_per_second / 1e9:,.0f} GB/s a node from memory, at"
        f" {device.host.disk_bytes_per_second / 1e9:,.0f} GB/s from disk (estimates)",
    ]


def _measured_here(options: MachineOptions, job: Job, subject: Subject) -> tuple[Machine, list[str]]:
    profile = profile_here(subject, job.num_devices)
    budget = memory_budget(torch.device(subject.device_type), profile.processes)
    if options.memory_gib is not None:
        budget = int(options.memory_gib * GIB * USABLE_MEMORY)
    speed, disk = profile.read_bytes_per_second, shutil.disk_usage(os.getcwd()).free * USABLE_DISK
    host = options.with_disk(CacheHost(speed, speed, float(psutil.virtual_memory().available), disk))
    assumed = [
        f"times measured here, {profile.processes} processes at once, on {subject.rows} samples with random weights"
    ]
    if profile.processes < job.num_devices:
        assumed.append(
            f"only {profile.processes} of {job.num_devices} processes run here: all are taken to be as fast, on nodes"
            f" of {profile.processes}, and their gradients' reduction to be as fast as "
            + ("here" if profile.processes > 1 else "nothing: there is no other device to measure it with")
        )
    return Machine(profile.times, budget, profile.processes, host), assumed


def _assumed_of_precision(model: PreTrainedModel) -> str:
    """In which precision the memory is counted: that of the configuration, in which weights are loaded and trained."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    names = " and ".join(sorted(PRECISIONS.get(dtype, str(dtype)) for dtype in dtypes))
    counted = f"weights, gradients, AdamW's moments and activations in {names}"
    if dtypes == {torch.float32}:
        return counted
    return (
        f"{counted}, the dtype of the configuration, in which from_pretrained loads the weights; with"
        " dtype='float32' they take more memory"
    )


def _assumed_of_sharding(plan: Layout) -> list[str]:
    """When replicas that divide something exchange it, in the plan that the training begins with."""
    if plan.replica_sharding == "none":
        return []
    return ["the replicas of a stage divide the optimizer state, and exchange updated weights after each step"]


def _assumed_of_accumulation(job: Job) -> list[str]:
    if job.gradient_accumulation_steps == 1:
        return []
    return [
        f"a step is {job.gradient_accumulation_steps} batches one after the other"
        f" (gradient_accumulation_steps={job.gradient_accumulation_steps},"
        f" per_device_train_batch_size={job.rows_per_device}), after which gradients are reduced once, unless replicas"
        " divide them"
    ]
