"""The `hf-pipetransformer plan` command: a forecast from a model's name and a few numbers.

configuration -> placeholders -> workload ─┐
device table, or this machine ───────┴-> machine -> forecast
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from ..cache.file_store import USABLE_DISK
from ..freezing.policies import make_policy
from ..pipeline.devices import USABLE_MEMORY, memory_budget
from ..planning.plan import PLAN_BY, REPLICA_SHARDINGS, PipelinePlan
from ..planning.schedules import AUTO_SCHEDULE, ONE_F_ONE_B, schedule_names, virtual_stages_of
from ..planning.sharding_choice import AUTO
from ..token_slices.kv_slices import attention_windows
from . import inspection
from .device_table import GIB, CacheHost, device_named
from .forecast import Forecast, Job, Machine, forecast
from .local_profile import accelerator_type, profile_here, refuse_too_large
from .workload import Workload, measure_pair_shares, measure_workload

PROFILES = ("analytic", "cpu", accelerator_type())
TOKEN_SLICES = ("off", "auto")
FLAT_TOKENS = {"cpu": 16, accelerator_type(): 256}
"""For devices of which only whole samples are timed: slices of fewer tokens than this are assumed to take as long."""
ROWS_TO_TIME = 8
"""Number of samples that are timed, as in the trainer."""
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DEFAULT_SAMPLES = 100_000
DEFAULT_DEVICE = "a100-80g"


@dataclass(frozen=True)
class Request:
    """The arguments of `hf-pipetransformer plan`; see its options."""

    devices: int
    batch: int
    epochs: int
    seq: int | None = None
    samples: int | None = None
    profile: str = "analytic"
    device: str | None = None
    efficiency: float | None = None
    memory_gib: float | None = None
    disk_gib: float | None = None
    alpha: float = 1 / 3
    freeze_schedule: str | None = None
    freezes: bool = True
    max_frozen_layers: int | None = None
    pipeline_parallel_size: str = "auto"
    pipeline_schedule: str = "1f1b"
    virtual_pipeline_parallel_size: int | None = None
    num_microbatches: str = "auto"
    caches: bool = True
    is_elastic: bool = True
    token_slices: str = "off"
    plan_by: str = "counts"
    replica_sharding: str = "none"
    gradient_accumulation_steps: int = 1

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise ValueError(f"profile is {self.profile!r}, but must be one of {', '.join(PROFILES)}.")
        if self.plan_by not in PLAN_BY:
            raise ValueError(f"plan_by is {self.plan_by!r}, but must be one of {', '.join(PLAN_BY)}.")
        shardings = (*REPLICA_SHARDINGS, AUTO)
        if self.replica_sharding not in shardings:
            raise ValueError(
                f"replica_sharding is {self.replica_sharding!r}, but must be one of {', '.join(shardings)}."
            )
        if self.token_slices not in TOKEN_SLICES:
            raise ValueError(
                f"token_slices is {self.token_slices!r}, but must be one of {', '.join(TOKEN_SLICES)}. Slices of given"
                " lengths cannot be forecast."
            )
        if self.token_slices != "off" and self.pipeline_parallel_size == "1":
            raise ValueError(
                "token_slices is 'auto', which requires several stages, but pipeline_parallel_size is 1. Increase"
                " pipeline_parallel_size, or set token_slices='off'."
            )
        if self.pipeline_schedule not in schedule_names():
            raise ValueError(
                f"pipeline_schedule is {self.pipeline_schedule!r}, but must be one of {', '.join(schedule_names())}."
            )
        if self.token_slices != "off" and self.pipeline_schedule not in (ONE_F_ONE_B.name, AUTO_SCHEDULE):
            raise ValueError(
                f"token_slices is 'auto', which requires pipeline_schedule='1f1b', but it is"
                f" {self.pipeline_schedule!r}. Set token_slices='off'."
            )
        for name in ("device", "efficiency"):  # these apply to the device table only
            value = getattr(self, name)
            if value is not None and self.profile != "analytic":
                raise ValueError(
                    f"{name} is {value!r}, but profile={self.profile!r} times the model on this machine. Remove one of"
                    " the two options."
                )
        if self.seq is not None and self.seq < 1:
            raise ValueError(f"seq is {self.seq}, but must be at least 1.")
        for name, most in (("efficiency", 1.0), ("memory_gib", None), ("disk_gib", None)):
            value = getattr(self, name)
            if value is not None and not (value > 0 and (most is None or value <= most)):
                raise ValueError(
                    f"{name} is {value}, but must be above 0" + (f" and at most {most:g}." if most else ".")
                )

    def job(self) -> Job:
        """Return the training that is to be forecast.

        Raises:
            ValueError: a number or name is invalid.
        """
        schedule = None if self.freeze_schedule is None else _schedule(self.freeze_schedule)
        name = "none" if not self.freezes else "alpha" if schedule is None else "schedule"
        return Job(
            num_devices=self.devices,
            batch=self.batch,
            num_epochs=self.epochs,
            num_samples=DEFAULT_SAMPLES if self.samples is None else self.samples,
            freeze_policy=make_policy(name, alpha=self.alpha, schedule=schedule),
            max_frozen_layers=self.max_frozen_layers,
            pipeline_parallel_size=_number_or_auto("pipeline_parallel_size", self.pipeline_parallel_size),
            is_elastic=self.is_elastic,
            caches=self.caches,
            schedule=self.pipeline_schedule if self.token_slices == "off" else ONE_F_ONE_B.name,
            num_microbatches=_number_or_auto("num_microbatches", self.num_microbatches),
            token_slices="off" if self.token_slices == "off" else "auto",
            plan_by=self.plan_by,
            replica_sharding=self.replica_sharding,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            virtual_pipeline_parallel_size=virtual_stages_of(
                self.pipeline_schedule, self.virtual_pipeline_parallel_size
            ),
        )


@dataclass(frozen=True)
class Answer:
    """A forecast with the model's name, a title and the assumptions that were made."""

    forecast: Forecast
    model: str
    title: str
    assumed: tuple[str, ...]


def answer(name: str, task: str, request: Request) -> Answer:
    """Forecast the training of a model.

    Args:
        name: name of a configuration (`inspection.load_config`).
        task: a key of `inspection.TASKS`, or "auto".
        request: the training.

    Raises:
        UnsupportedModelError: the model cannot be split into stages.
        ValueError: a value is unknown or out of range, or the training does not fit.
    """
    job = request.job()
    config = inspection.load_config(name)
    cls = inspection.model_class(config, task)
    model = inspection.build_placeholder_model(config, cls)
    if job.token_slices != "off":
        _refuse_slices_of_others(model)
    workload = measure_workload(model, request.seq)
    if job.token_slices != "off":
        workload = replace(workload, pair_shares=measure_pair_shares(model, workload.tokens))
    machine, assumed = _machine(request, job, workload, config, cls)
    assumed = (*assumed, _assumed_of_precision(model))
    if job.token_slices != "off":
        assumed = (*assumed, *_assumed_of_slices(machine))
    if request.samples is None:
        assumed = (f"{DEFAULT_SAMPLES:,} samples, as --samples is not given", *assumed)
    if not workload.tokens_matter and request.seq is not None:
        assumed = ("samples have the size of the configuration; --seq does not matter for this model", *assumed)
    result = forecast(job, workload, machine)
    assumed = (*assumed, *_assumed_of_sharding(result.first), *_assumed_of_accumulation(job))
    size = f"samples × {workload.tokens} tokens" if workload.tokens_matter else "samples"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    title = (
        f"{type(model).__name__}: {parameters:,} parameters, {len(workload.unit_costs)} layers; {job.num_devices}"
        f" devices, {job.batch} {size} a step, {job.num_epochs} epochs of"
        f" {job.num_samples:,} samples"
    )
    return Answer(result, type(model).__name__, title, assumed)


def _refuse_slices_of_others(model: PreTrainedModel) -> None:
    """Refuse to split sequences in which tokens depend on later ones.

    Raises:
        UnsupportedModelError: layers keep another state than keys and values.
        ValueError: the model is not a causal language model.
    """
    config = model.config
    causal, masked = AutoModelForCausalLM._model_mapping, AutoModelForMaskedLM._model_mapping
    expected: Any = causal.get(type(config), ())
    # BERT-like models attend to later tokens with any head, unless they are configured as decoders
    is_encoder = type(config) in masked and not getattr(config, "is_decoder", False)
    if is_encoder or not isinstance(model, expected):
        raise ValueError(
            f"token_slices is 'auto', which requires a causal language model, but {type(model).__name__} is not one."
            " Set token_slices='off', or pass a decoder with the task causal-lm."
        )
    attention_windows(model)


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


def _assumed_of_sharding(plan: PipelinePlan) -> tuple[str, ...]:
    """When replicas that divide something exchange it, in the plan that the training begins with."""
    if plan.replica_sharding == "none":
        return ()
    return ("the replicas of a stage divide the optimizer state, and exchange updated weights after each step",)


def _assumed_of_accumulation(job: Job) -> tuple[str, ...]:
    if job.gradient_accumulation_steps == 1:
        return ()
    return (
        f"a step is {job.gradient_accumulation_steps} batches one after the other"
        f" (gradient_accumulation_steps={job.gradient_accumulation_steps},"
        f" per_device_train_batch_size={job.rows_per_device}), after which gradients are reduced once, unless replicas"
        " divide them",
    )


def _assumed_of_slices(machine: Machine) -> tuple[str, ...]:
    return (
        "token slices: the activation cache is off, because it keeps whole samples; stages are chosen as without"
        " slices",
        f"a slice is computed as efficiently as a whole sample down to {machine.flat_tokens} tokens (an estimate); its"
        " fixed cost is that of a micro-batch",
        "a sample's time is divided by FLOPs into what grows with its tokens and with pairs of them; earlier keys and"
        " values are read at no cost, and slices keep no more for the backward than whole samples do",
        "the model may be cut along its tokens; the trainer finds that out by running samples of the data, and"
        " measures what slices take",
    )


def _machine(
    request: Request, job: Job, workload: Workload, config: Any, cls: type
) -> tuple[Machine, tuple[str, ...]]:
    if request.profile == "analytic":
        return _from_table(request, job, workload)
    return _measured_here(request, job, workload, config, cls)


def _from_table(request: Request, job: Job, workload: Workload) -> tuple[Machine, tuple[str, ...]]:
    device = device_named(request.device or DEFAULT_DEVICE)
    if request.efficiency is not None:
        device = replace(device, efficiency=request.efficiency)
    if request.memory_gib is not None:
        device = replace(device, memory_bytes=request.memory_gib * GIB)
    device = replace(device, host=_with_disk(device.host, request))
    machine = Machine(
        device.times(workload.unit_costs, job.num_devices),
        int(device.memory_bytes * USABLE_MEMORY),
        device.devices_per_node,
        device.host,
        device,
        device.flat_tokens,
    )
    return machine, (
        f"{device.name}: {device.flops_per_second / 1e12:,.0f} TFLOP/s of which layers reach {device.efficiency:.0%}"
        f" (an estimate: --efficiency), {1e6 * device.seconds_per_unit:.0f} µs a layer and forward for its calls,"
        f" {USABLE_MEMORY:.0%} of {device.memory_bytes / GIB:,.0f} GiB",
        f"{device.link_bytes_per_second / 1e9:,.0f} GB/s between devices, {device.devices_per_node} to a node,"
        f" {device.network_bytes_per_second / 1e9:,.0f} GB/s out of it; the cache is read at"
        f" {device.host.read_bytes_per_second / 1e9:,.0f} GB/s a node from memory, at"
        f" {device.host.disk_bytes_per_second / 1e9:,.0f} GB/s from disk (estimates)",
    )


def _measured_here(
    request: Request, job: Job, workload: Workload, config: Any, cls: type
) -> tuple[Machine, tuple[str, ...]]:
    kind = request.profile
    refuse_too_large(workload.weight_bytes, kind, job.num_devices)
    rows = min(job.rows_per_device, ROWS_TO_TIME)
    row_bytes = max(unit.boundary_bytes for unit in workload.unit_costs) or 1
    profile = profile_here(config, cls, kind, job.num_devices, rows, workload.tokens, row_bytes)
    if request.memory_gib is not None:
        budget: int | None = int(request.memory_gib * GIB * USABLE_MEMORY)
    else:
        budget = memory_budget(torch.device(kind), profile.processes)
    host = CacheHost(
        profile.read_bytes_per_second,
        profile.read_bytes_per_second,
        float(psutil.virtual_memory().available),
        shutil.disk_usage(os.getcwd()).free * USABLE_DISK,
    )
    machine = Machine(profile.times, budget, profile.processes, _with_disk(host, request), None, FLAT_TOKENS[kind])
    assumed = [
        f"times measured here, {profile.processes} processes at once, on {rows} samples with random weights",
    ]
    if profile.processes < job.num_devices:
        assumed.append(
            f"only {profile.processes} of {job.num_devices} processes run here: all are taken to be as fast, on nodes"
            f" of {profile.processes}, and their gradients' reduction to be as fast as "
            + ("here" if profile.processes > 1 else "nothing: there is no other device to measure it with")
        )
    return machine, tuple(assumed)


def _with_disk(host: CacheHost, request: Request) -> CacheHost:
    return host if request.disk_gib is None else replace(host, disk_bytes=request.disk_gib * GIB * USABLE_DISK)


def _schedule(text: str) -> Mapping[str, Any]:
    try:
        schedule = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"freeze_schedule is {text!r}, which is not valid JSON ({error}). Pass a JSON object such as"
            ' {"1": 4, "2": 7}.'
        ) from None
    if not isinstance(schedule, dict):
        raise ValueError(f'freeze_schedule is {text!r}, but must be a JSON object such as {{"1": 4, "2": 7}}.')
    return schedule


def _number_or_auto(name: str, text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name} is {text!r}, but must be an integer of at least 1, or 'auto'.")
    return int(text)
