"""The `hf-pipetransformer plan` command: a forecast from a model's name and a few numbers.

configuration -> placeholders -> workload ─┐
device table ──────────────────────────────┴-> forecast -> advice
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..model.dropout import may_drop
from ..parts.freezing.policies import FreezePolicy, make_policy
from ..pipeline.devices import USABLE_MEMORY
from ..training_args import from_json
from .advice import advise
from .device_table import GIB, Device
from .forecast import Job, Values, forecast
from .frozen_modules import estimate
from .placeholder_model import build_placeholder_model, load_config, model_class
from .tuning import Tuning
from .workload import Workload, measure_workload

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
ALWAYS_ASSUMED = (
    "every sample is as long as --seq; padding and evaluation are not counted",
    "gradients are reduced after the backward, not during it; messages between stages take no time; FSDP's transfers"
    " take place while it computes",
    "changing over to another layout and filling the cache cost nothing (measured: a step, and up to 4%)",
    "of tensors between stages, `receive_bytes` for each stage are in the memory figures, but up to 256 MiB of buffers"
    " that schedules for other shapes of batch keep are not; nor is what NCCL takes for its `communicators`",
    "the allocator's waste is not in the memory figures",
    "a table's times are those of bf16 (V100: fp16)",
    "the model may be cached; the trainer finds that out by running samples of the data",
)


def answer(
    name: str,
    task: str,
    seq: int | None,
    job: Job,
    device: Device,
    frozen: Sequence[str],
    tuning: Tuning,
) -> tuple[str, dict[str, Any]]:
    """Forecast the training of a model.

    Args:
        name: name of a configuration, as `load_config` takes it.
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
    model = build_placeholder_model(config, model_class(config, task))
    tuning.adapt(model)
    workload = tuning.lighten(measure_workload(model, seq))
    values = forecast(job, workload, device)
    size = "samples" if workload.tokens is None else f"samples × {workload.tokens} tokens"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    title = (
        f"{type(model).__name__}: {parameters:,} parameters, {len(workload.unit_costs)} layers; {job.num_devices}"
        f" devices, {job.batch} {size} a step, {job.num_epochs} epochs of {job.num_samples:,} samples"
    )
    if tuning.lora_r is not None:
        upper = _on_upper_layers(job, workload, device, values["seconds"])
        values["lora_on_upper_layers"] = upper and {**upper, "has_dropout": may_drop(model.train())}
    values |= {"model": type(model).__name__, "advice": advise(values)}
    if seq is not None and workload.tokens is None:
        values["advice"].append("--seq does not matter for this model: samples have the size of the configuration.")
    values["assumed"] = _assumed(model, job, device, values["replica_sharding"], tuning)
    if frozen:
        values["frozen_modules"] = estimate(model, frozen, workload, job, device)
    return title, values


def _on_upper_layers(job: Job, workload: Workload, device: Device, seconds: float) -> Values | None:
    """Forecast adapters on the upper half of the layers alone, so that the lower half is frozen from the start.

    Returns:
        The number of "layers", the "first_layer" with an adapter, the "seconds" of the training, its "speed_up" over
        adapters on all layers, which take `seconds`, and "cache_bytes_per_node". None if the layers are not
        all of one list, as PEFT's `layers_to_transform` needs, or if their outputs cannot be cached.
    """
    layers = len(workload.unit_costs)
    lists = {unit.name.rpartition(".")[0] for unit in workload.unit_costs}
    if layers < 2 or len(lists) > 1 or not job.caches or not workload.cacheable:
        return None
    first = layers // 2
    found = forecast(replace(job, freeze_policy=make_policy("schedule", schedule={"0": first})), workload, device)
    return {
        "layers": layers,
        "first_layer": first,
        "seconds": found["seconds"],
        "speed_up": seconds / found["seconds"],
        "cache_bytes_per_node": found["cache"]["generation_bytes_per_node"],
    }


def policy_of(freezes: bool, alpha: float, freeze_schedule: str | None) -> FreezePolicy:
    """Return the policy that the options `--freeze`, `--alpha` and `--freeze-schedule` ask for.

    Raises:
        ValueError: a number is out of range, or the schedule is no JSON object.
    """
    schedule = None if freeze_schedule is None else from_json("freeze_schedule", freeze_schedule)
    name = "none" if not freezes else "alpha" if schedule is None else "schedule"
    return make_policy(name, alpha=alpha, schedule=schedule)


def _assumed(model: PreTrainedModel, job: Job, device: Device, sharding: str, tuning: Tuning) -> list[str]:
    """Return what is taken for granted. Memory is counted in the precision in which weights are loaded."""
    gb, steps = 1e9, job.gradient_accumulation_steps
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    names = " and ".join(sorted(PRECISIONS.get(dtype, str(dtype)) for dtype in dtypes))
    of_configuration = (
        ", the dtype of the configuration, in which from_pretrained loads the weights; with dtype='float32' they take"
        " more memory"
    )
    divided = "the replicas of a stage divide the optimizer state, and exchange updated weights after each step"
    accumulated = (
        f"a step is {steps} batches one after the other (gradient_accumulation_steps={steps},"
        f" per_device_train_batch_size={job.request.rows_per_device}), after which gradients are reduced once, unless"
        " replicas divide them"
    )
    trained = (
        "all weights train: a backward takes two forwards"
        if tuning.lora_r is None
        else f"LoRA adapters of rank {tuning.lora_r} are trained, and a new head: a backward takes one forward"
    )
    checkpointing = (
        "with gradient checkpointing each layer runs forward once more, and the activations of the layer that does are"
        " not counted"
        if tuning.gradient_checkpointing
        else "without gradient checkpointing (--gradient-checkpointing)"
    )
    return [
        f"{device.name}: {device.flops_per_second / 1e12:,.0f} TFLOP/s of which layers reach {device.efficiency:.0%}"
        f" (an estimate: --efficiency), {1e6 * device.seconds_per_unit:.0f} µs a layer and forward for its calls,"
        f" {USABLE_MEMORY:.0%} of {device.memory_bytes / GIB:,.0f} GiB",
        f"{device.link_bytes_per_second / gb:,.0f} GB/s between devices, {device.devices_per_node} to a node,"
        f" {device.network_bytes_per_second / gb:,.0f} GB/s out of it; the cache is read at"
        f" {device.read_bytes_per_second / gb:,.0f} GB/s a node from memory, at"
        f" {device.disk_bytes_per_second / gb:,.0f} GB/s from disk (estimates)",
        f"weights, gradients, AdamW's moments and activations in {names}"
        + (of_configuration if dtypes != {torch.float32} else ""),
        *([divided] if sharding != "none" else []),
        *([accumulated] if steps > 1 else []),
        f"{trained}; {checkpointing}",
        "bf16 by autocast: activations of fp32 weights take half, and 16-bit copies of the weights are kept"
        if tuning.bf16
        else "memory without autocast (--bf16), with which activations are smaller and copies of weights are kept",
        *ALWAYS_ASSUMED,
    ]
