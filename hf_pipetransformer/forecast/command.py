"""The `hf-pipetransformer plan` command: a forecast from a model's name and a few numbers.

configuration -> placeholders -> workload ─┐
device table ────────────────────────┴-> machine -> forecast
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ..cache.file_store import USABLE_DISK
from ..freezing.policies import FreezePolicy, make_policy
from ..pipeline.devices import USABLE_MEMORY
from ..planning.layout import Layout
from .device_table import GIB, Device, device_named
from .forecast import Job, forecast
from .forecast_text import as_values
from .frozen_modules import estimate
from .placeholder_model import build_placeholder_model, load_config, model_class
from .tuning import Tuning
from .workload import measure_workload

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PLAIN = Tuning()


def answer(
    name: str,
    task: str,
    seq: int | None,
    job: Job,
    device: Device,
    frozen: Sequence[str] = (),
    tuning: Tuning = PLAIN,
) -> tuple[str, dict[str, Any]]:
    """Forecast the training of a model.

    Args:
        name: name of a configuration (`placeholder_model.load_config`).
        task: a key of `placeholder_model.TASKS`, or "auto".
        seq: number of tokens of a sample.
        job: the training.
        device: the kind of its devices.
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
    tuning.adapt(model)
    workload = tuning.lighten(measure_workload(model, seq))
    assumed = _assumed_of(device)
    device = replace(device, backward_forwards=tuning.backward_forwards, autocasts=tuning.bf16)
    if not workload.tokens_matter and seq is not None:
        assumed = ["samples have the size of the configuration; --seq does not matter for this model", *assumed]
    result = forecast(job, workload, device)
    assumed += [_assumed_of_precision(model), *_assumed_of_sharding(result.first), *_assumed_of_accumulation(job)]
    assumed += tuning.assumed
    size = f"samples × {workload.tokens} tokens" if workload.tokens_matter else "samples"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    title = (
        f"{type(model).__name__}: {parameters:,} parameters, {len(workload.unit_costs)} layers; {job.num_devices}"
        f" devices, {job.batch} {size} a step, {job.num_epochs} epochs of {job.num_samples:,} samples"
    )
    values = as_values(result, type(model).__name__, assumed)
    if frozen:
        values["frozen_modules"] = estimate(model, frozen, workload.tokens, job, device)
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


def device_for(
    name: str, efficiency: float | None = None, memory_gib: float | None = None, disk_gib: float | None = None
) -> Device:
    """Return a device of the table, with what the options of `hf-pipetransformer plan` change; see there.

    Raises:
        ValueError: there is no such device, or a value is out of range.
    """
    for option, value in (("efficiency", efficiency), ("memory_gib", memory_gib), ("disk_gib", disk_gib)):
        most = 1.0 if option == "efficiency" else None
        if value is not None and not (value > 0 and (most is None or value <= most)):
            at_most = f" and at most {most:g}" if most else ""
            raise ValueError(f"{option} is {value}, but must be above 0{at_most}.")
    device = device_named(name)
    return replace(
        device,
        efficiency=efficiency or device.efficiency,
        memory_bytes=device.memory_bytes if memory_gib is None else memory_gib * GIB,
        host=device.host if disk_gib is None else replace(device.host, disk_bytes=disk_gib * GIB * USABLE_DISK),
    )


def _assumed_of(device: Device) -> list[str]:
    return [
        f"{device.name}: {device.flops_per_second / 1e12:,.0f} TFLOP/s of which layers reach {device.efficiency:.0%}"
        f" (an estimate: --efficiency), {1e6 * device.seconds_per_unit:.0f} µs a layer and forward for its calls,"
        f" {USABLE_MEMORY:.0%} of {device.memory_bytes / GIB:,.0f} GiB",
        f"{device.link_bytes_per_second / 1e9:,.0f} GB/s between devices, {device.devices_per_node} to a node,"
        f" {device.network_bytes_per_second / 1e9:,.0f} GB/s out of it; the cache is read at"
        f" {device.host.read_bytes_per_second / 1e9:,.0f} GB/s a node from memory, at"
        f" {device.host.disk_bytes_per_second / 1e9:,.0f} GB/s from disk (estimates)",
    ]


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
