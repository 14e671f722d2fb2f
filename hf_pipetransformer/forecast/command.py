"""The `hf-pipetransformer plan` command: a forecast from a model's name and a few numbers.

configuration -> placeholders -> workload ─┐
device table ──────────────────────────────┴-> forecast -> advice
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..parts.freezing.policies import FreezePolicy, make_policy
from ..pipeline.devices import USABLE_MEMORY
from ..training_args import from_json
from .advice import advise, counted
from .device_table import GIB, Device
from .forecast import Job, Values, forecast
from .frozen_modules import estimate, lora_on_upper_layers
from .placeholder_model import build_placeholder_model, load_config, model_class
from .teacher_cost import estimate_teacher, measure_teacher
from .tuning import Tuning
from .workload import Workload, measure_workload

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
ALWAYS_ASSUMED = (
    "All samples have --seq tokens; padding and evaluation are not counted.",
    "Gradients are reduced after the backward, not during it; sending tensors between stages takes no time; FSDP"
    " transfers weights and gradients while it computes.",
    "Changing the layout and filling the cache take no time (measured: one step, and up to 4%).",
    "Memory includes the tensors that stages receive (`receive_bytes` in JSON), but neither up to 256 MiB of buffers"
    " that schedules keep for batches of other shapes, nor NCCL's buffers for each of its `communicators`.",
    "Memory that the allocator wastes is not counted.",
    "The devices' peak FLOP/s are those of bf16 (V100: fp16).",
    "The model can be cached; the trainer checks this on samples of the data.",
)

OF_TEACHER = (
    "The loss calls the teacher once on each sample and reads its logits (its first output, if it has none). The"
    " teacher is frozen, in evaluation mode, and of a known library.",
    "The teacher runs on the last stage, after the trained model. Memory includes neither its weights nor its"
    " activations.",
)
"""Assumptions about a teacher."""


def answer(
    name: str,
    task: str,
    seq: int | None,
    job: Job,
    device: Device,
    frozen: Sequence[str],
    tuning: Tuning,
    teacher: str | None = None,
) -> tuple[str, dict[str, Any]]:
    """Forecast the training of a model.

    Args:
        name: name of a configuration, as `load_config` takes it.
        task: a key of `placeholder_model.TASKS`, or "auto".
        seq: number of tokens of a sample.
        job: the training.
        device: the kind of the devices.
        frozen: names of modules that the user has frozen.
        tuning: the options for adapters and for saving memory.
        teacher: name of the configuration of a frozen teacher, which the loss calls on the same samples.

    Returns:
        A title, and the forecast as plain values.

    Raises:
        UnsupportedModelError: the model cannot be split into stages.
        ValueError: a value is unknown or out of range, or the training does not fit.
    """
    config = load_config(name)
    model = build_placeholder_model(config, model_class(config, task))
    tuning.adapt(model)
    workload = tuning.lighten(measure_workload(model, seq))
    values = forecast(job, workload, device)
    size = "samples" if workload.tokens is None else f"samples × {workload.tokens} tokens"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    title = (
        f"{type(model).__name__}: {parameters:,} parameters, {counted(len(workload.unit_costs), 'layer')};"
        f" {counted(job.num_devices, 'device')} ({device.name}), {job.batch} {size} a step,"
        f" {counted(job.num_epochs, 'epoch')} of {counted(job.num_samples, 'sample')}"
    )
    if tuning.lora_r is not None:
        values["lora_on_upper_layers"] = lora_on_upper_layers(model, workload, job, device, values["seconds"])
    if teacher is not None:
        values["teacher"] = _about_teacher(teacher, task, seq, workload, job, device, tuning, values["epochs"])
    values |= {"model": type(model).__name__, "advice": advise(values)}
    if seq is not None and workload.tokens is None:
        values["advice"].append("Leave out --seq: samples of this model have the size of its configuration.")
    values["assumed"] = _assumed(model, job, device, values["replica_sharding"], tuning, teacher is not None)
    if frozen:
        values["frozen_modules"] = estimate(model, frozen, workload, job, device)
    return title, values


def _about_teacher(
    name: str,
    task: str,
    seq: int | None,
    workload: Workload,
    job: Job,
    device: Device,
    tuning: Tuning,
    epochs: Sequence[Values],
) -> Values:
    """Return the values of `estimate_teacher` for the teacher of this name, and its size."""
    config = load_config(name)
    teacher = build_placeholder_model(config, model_class(config, task))
    cost = measure_teacher(teacher, seq, tuning.bf16)
    return {
        "model": type(teacher).__name__,
        "parameters": sum(parameter.numel() for parameter in teacher.parameters()),
        "weight_bytes": sum(parameter.nbytes for parameter in teacher.parameters()),
        **estimate_teacher(cost, workload, job, device, epochs),
    }


def policy_of(freezes: bool, alpha: float, freeze_schedule: str | None) -> FreezePolicy:
    """Return the policy for the options `--freeze`, `--alpha` and `--freeze-schedule`.

    Raises:
        ValueError: a number is out of range, or the schedule is no JSON object.
    """
    schedule = None if freeze_schedule is None else from_json("freeze_schedule", freeze_schedule)
    name = "none" if not freezes else "alpha" if schedule is None else "schedule"
    return make_policy(name, alpha=alpha, schedule=schedule)


def _assumed(
    model: PreTrainedModel, job: Job, device: Device, sharding: str, tuning: Tuning, has_teacher: bool
) -> list[str]:
    """Return the assumptions of a forecast, the most important ones first.

    Memory is counted in the precision of the loaded weights.
    """
    gb, steps = 1e9, job.gradient_accumulation_steps
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    names = " and ".join(sorted(PRECISIONS.get(dtype, str(dtype)) for dtype in dtypes))
    of_configuration = (
        ", the dtype of the configuration, in which from_pretrained loads the weights; with dtype='float32' they take"
        " more memory"
    )
    divided = "The replicas of a stage divide the optimizer state, and exchange updated weights after each step."
    accumulated = (
        f"A step runs {steps} batches one after the other (gradient_accumulation_steps={steps},"
        f" per_device_train_batch_size={job.request.rows_per_device}). Gradients are reduced once after them, unless"
        " replicas divide them."
    )
    trained = (
        "All weights are trained: a backward takes as long as two forwards."
        if tuning.lora_r is None
        else f"LoRA adapters of rank {tuning.lora_r} and a new head, if any, are trained: a backward takes as long as"
        " one forward."
    )
    checkpointing = (
        "With gradient checkpointing, each layer runs forward once more; the activations of the layer that does are"
        " not counted."
        if tuning.gradient_checkpointing
        else "Nothing is recomputed in the backward (with --gradient-checkpointing it is)."
    )
    return [
        f"Layers reach {device.efficiency:.0%} of the {device.flops_per_second / 1e12:,.0f} TFLOP/s of {device.name}:"
        " an estimate, which --efficiency changes. No step was measured.",
        f"Weights, gradients, AdamW's moments and activations are in {names}"
        + (of_configuration if dtypes != {torch.float32} else "")
        + ".",
        f"Launching a layer's kernels takes {1e6 * device.seconds_per_unit:.0f} µs in each forward. A training may use"
        f" {USABLE_MEMORY:.0%} of a device's {device.memory_bytes / GIB:,.0f} GiB.",
        f"Bandwidths: {device.link_bytes_per_second / gb:,.0f} GB/s between the {device.devices_per_node} devices of a"
        f" node, {device.network_bytes_per_second / gb:,.0f} GB/s between nodes; each node reads the cache at"
        f" {device.read_bytes_per_second / gb:,.0f} GB/s from memory, at"
        f" {device.disk_bytes_per_second / gb:,.0f} GB/s from disk (estimates).",
        *([divided] if sharding != "none" else []),
        *([accumulated] if steps > 1 else []),
        trained,
        checkpointing,
        "With autocast to bf16, activations of fp32 weights take half, and 16-bit copies of the weights are kept."
        if tuning.bf16
        else "Autocast is not used (with --bf16, activations take less memory, and copies of the weights are kept).",
        *(OF_TEACHER if has_teacher else ()),
        *ALWAYS_ASSUMED,
    ]
