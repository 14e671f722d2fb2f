"""An estimate of the gain from reading the outputs of frozen modules instead of computing them.

Modules that the user has frozen:

    all trained         forward and backward of all modules
    computed            frozen modules run forward only: in the stock Trainer, and in the first epoch
    read                frozen modules do not run: in the other epochs

FLOPs are counted in one forward of a sample. The layout has one stage: only then can any frozen module be read.

LoRA on the upper half of the layers: the lower half is frozen from the start and read from the second epoch on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from ..model.dummy_inputs import dummy_batch
from ..model.nested import tensors_of
from ..parts.freezing.policies import SchedulePolicy
from ..planning.costs import UnitCost
from ..planning.layout import Layout
from ..planning.predictions import CostModel
from .device_table import Device
from .forecast import Job, forecast
from .placeholder_model import GhostProducts
from .workload import Workload

LAYER_OF_PEFT = re.compile(r".*?\.[^.]*\.(\d+)\.")
"""Finds a layer's number in a module's name, as PEFT does for `layers_to_transform`."""


def estimate(
    model: PreTrainedModel, names: Sequence[str], workload: Workload, job: Job, device: Device
) -> list[dict[str, Any]]:
    """Estimate a step without frozen modules, with computed ones, and with ones read from the cache.

    Args:
        model: a model of placeholders. `workload` has its costs.
        names: the frozen modules. Their inputs must come from the batch alone.
        workload: as for a forecast.
        job: as for a forecast.
        device: as for a forecast.

    Returns:
        Three steps, each with "what", "forward_share" (frozen share of the forward FLOPs) and "step_seconds".

    Raises:
        ValueError: the model has no such module, one of them contains another, or one does not run.
    """
    modules = {name: _module(model, name) for name in names}
    for name in names:
        inside = next((other for other in names if other.startswith(f"{name}.")), None)
        if inside is not None:
            raise ValueError(f"frozen_module is {name!r} and {inside!r}, which is in it. Leave the second one out.")
    whole, frozen, row_bytes = _counted(model, modules, workload.tokens or 1)
    of_frozen = {id(p) for module in modules.values() for p in module.parameters()}
    sizes = {id(p): p.nbytes for p in model.parameters() if p.requires_grad}
    units = []
    for name, flops, numbers in (("frozen", frozen, of_frozen), ("others", whole - frozen, sizes.keys() - of_frozen)):
        trained = sum(sizes.get(number, 0) for number in numbers)
        units.append(UnitCost(name=name, forward_flops=flops, parameters={name: trained}, trainable_bytes=trained))
    of_parts, num_devices = replace(workload, unit_costs=tuple(units)), job.num_devices
    costs = CostModel(of_parts.unit_costs, replace(device, seconds_per_unit=0.0).times(of_parts, num_devices))
    reading = job.batch / device.num_nodes(num_devices) * row_bytes / device.read_bytes_per_second
    layout = Layout(1, num_devices, (0, len(units)), rows_per_device=job.batch // num_devices)
    steps = []
    for what, layers, cached in (("nothing frozen", 0, 0), ("computed", 1, 0), ("read", 1, 1)):
        prediction = costs.predict(replace(layout, num_frozen_layers=layers, num_cached_layers=cached))
        seconds = prediction.seconds + cached * reading
        steps.append({"what": what, "forward_share": layers * frozen / whole, "step_seconds": seconds})
    return steps


def lora_on_upper_layers(
    model: PreTrainedModel, workload: Workload, job: Job, device: Device, seconds: float
) -> dict[str, Any] | None:
    """Forecast the training with LoRA adapters on the upper half of the layers only.

    Args:
        model: the model, with adapters on all layers.
        workload: as for the forecast of this training.
        job: as for the forecast of this training.
        device: as for the forecast of this training.
        seconds: time of this training.

    Returns:
        "target_modules" and "layers_to_transform" for PEFT; "freeze_schedule" for the training arguments, which caches
        the lower outputs despite dropout and gradient checkpointing; "step_seconds" of the last epoch, "seconds" of
        the training, and "speed_up" over the given training; "cache_bytes_per_node". None if the outputs would not be
        read, if other parameters below are trained, or if PEFT numbers the layers differently, as in an
        encoder-decoder.
    """
    units, half = workload.unit_costs, len(workload.unit_costs) // 2
    numbers = [match and match[1] for match in (LAYER_OF_PEFT.match(f"{unit.name}.") for unit in units)]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapters = {name for name in trained if "lora_" in name}
    in_units = {name for unit in units for name in unit.parameters if name.startswith(f"{unit.name}.")}
    below = {name for unit in units[:half] for name in unit.parameters}
    if not job.caches or not half or numbers != list(map(str, range(len(units)))):
        return None
    if not adapters <= in_units or below & trained - adapters:
        return None
    upper = forecast(replace(job, freeze_policy=SchedulePolicy({0: half}), max_frozen_layers=None), workload, device)
    last = upper["epochs"][-1]
    if not upper["epochs"][0]["fits"] or last["num_cached_layers"] < half:
        return None
    return {
        "target_modules": sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in adapters}),
        "layers_to_transform": list(range(half, len(units))),
        "freeze_schedule": {"0": half},
        "step_seconds": last["step_seconds"],
        "seconds": upper["seconds"],
        "speed_up": seconds / upper["seconds"],
        "cache_bytes_per_node": upper["cache"]["peak_bytes_per_node"],
    }


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        others = ", ".join(repr(child) for child, module in model.named_modules() if child.count(".") < 2 and child)
        raise ValueError(f"frozen_module is {name!r}, which is no module of the model. It has {others}.") from None


def _counted(model: PreTrainedModel, modules: Mapping[str, nn.Module], tokens: int) -> tuple[float, float, int]:
    """Return the forward FLOPs of a sample, the FLOPs of the frozen modules, and the bytes read for a sample.

    A module that a text sample does not run (the vision tower of a language model) is counted on a sample of its own.
    If frozen modules follow one another, only the last one's output is read.
    """
    outputs = dict[int, torch.Tensor]()  # except inputs of other frozen modules
    has_run = set[nn.Module]()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        has_run.add(module)
        for tensor in tensors_of((args, kwargs)):
            outputs.pop(id(tensor), None)
        largest = max(tensors_of(output), key=lambda tensor: tensor.nbytes)
        outputs[id(largest)] = largest

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in modules.values()]
    try:
        with torch.no_grad(), GhostProducts(), FlopCounterMode(display=False) as counter:
            model(**dummy_batch(model, 1, tokens=tokens))
            for module in set(modules.values()) - has_run:
                if isinstance(module, PreTrainedModel):
                    module(**dummy_batch(module, 1, tokens=tokens))
    finally:
        for handle in handles:
            handle.remove()
    for name, module in modules.items():
        if module not in has_run:
            raise ValueError(f"frozen_module is {name!r}, which does not run in a forward pass of the model.")
    flops = counter.get_flop_counts()
    frozen = sum(sum(flops.get(f"{type(model).__name__}.{name}", {}).values()) for name in modules)
    return counter.get_total_flops(), frozen, sum(tensor.nbytes for tensor in outputs.values())
