"""What it gains to read the outputs of modules that the user has frozen, instead of computing them: an estimate.

    nothing frozen      forward and backward of everything
    computed            what is frozen runs forward only, as in the stock Trainer, and in the first epoch
    read                what is frozen does not run: in the other epochs

FLOPs are counted in one forward of a sample. One stage on each device, as only there any frozen module is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from ..model.dummy_inputs import dummy_batch
from ..model.nested import tensors_of
from .device_table import Device
from .forecast import Job
from .placeholder_model import GhostProducts


def estimate(
    model: PreTrainedModel, names: Sequence[str], tokens: int, job: Job, device: Device
) -> list[dict[str, Any]]:
    """Estimate a step with nothing frozen, and with modules that are frozen and computed, or read.

    Args:
        model: a model of placeholders.
        names: the frozen modules. Their inputs must come from the batch alone.
        tokens: number of tokens of a text sample.
        job: the training.
        device: the kind of its devices.

    Returns:
        For each of the three: "what", "forward_share" (of the forward FLOPs that are frozen), and "step_seconds".

    Raises:
        ValueError: the model has no such module, or one of them contains another.
    """
    modules = {name: _module(model, name) for name in names}
    for name in names:
        inside = next((other for other in names if other.startswith(f"{name}.")), None)
        if inside is not None:
            raise ValueError(f"frozen_module is {name!r} and {inside!r}, which is in it. Leave the second one out.")
    counted = _Counted(model, modules, tokens)
    whole, frozen = counted.whole, counted.frozen
    rows, host = job.batch / job.num_devices, device.host
    speed = device.flops_per_second * device.efficiency
    at_end = device.update_seconds_per_byte + device.reduce_seconds_per_byte(job.num_devices)
    of_frozen = {id(p) for module in modules.values() for p in module.parameters()}
    sizes = {id(p): p.numel() * p.itemsize for p in model.parameters() if p.requires_grad}
    trained = sum(size for number, size in sizes.items() if number not in of_frozen)
    on_node = min(device.devices_per_node, job.num_devices)
    reading = rows * on_node * counted.row_bytes / host.read_bytes_per_second
    passes = 1 + device.backward_forwards
    active = passes * rows * (whole - frozen) / speed
    seconds = {
        "nothing frozen": passes * rows * whole / speed + at_end * sum(sizes.values()),
        "computed": active + rows * frozen / speed + at_end * trained,
        "read": active + reading + at_end * trained,
    }
    return [
        {"what": what, "forward_share": frozen / whole if what != "nothing frozen" else 0.0, "step_seconds": step}
        for what, step in seconds.items()
    ]


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        others = ", ".join(repr(child) for child, module in model.named_modules() if child.count(".") < 2 and child)
        raise ValueError(f"frozen_module is {name!r}, which is no module of the model. It has {others}.") from None


class _Counted:
    """Forward FLOPs of a sample, and bytes of what is read of it.

    A tower that text does not run (a vision tower under a language model) is counted on one sample of its own. Of
    frozen modules that follow one another the last one's output is read.

    Args:
        model: a model of placeholders.
        modules: the frozen modules.
        tokens: number of tokens of a text sample.

    Raises:
        ValueError: a module does not run in a forward of the model.
    """

    def __init__(self, model: PreTrainedModel, modules: Mapping[str, nn.Module], tokens: int) -> None:
        self.frozen = 0.0
        """Of the modules."""
        self._counter = FlopCounterMode(display=False)
        self._began = 0.0
        self._outputs: dict[int, torch.Tensor] = {}  # that are not the input of another frozen module
        self._has_run: list[nn.Module] = []
        handles = []
        for module in modules.values():
            handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            handles.append(module.register_forward_hook(self._after))
        try:
            with torch.no_grad(), GhostProducts(), self._counter:
                model(**dummy_batch(model, 1, tokens=tokens))
                for module in set(modules.values()) - set(self._has_run):
                    if isinstance(module, PreTrainedModel):
                        module(**dummy_batch(module, 1, tokens=tokens))
        finally:
            for handle in handles:
                handle.remove()
        for name, module in modules.items():
            if module not in self._has_run:
                raise ValueError(f"frozen_module is {name!r}, which does not run in a forward pass of the model.")
        self.whole = float(self._counter.get_total_flops())
        self.row_bytes = sum(tensor.nbytes for tensor in self._outputs.values())

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._began = self._counter.get_total_flops()
        for tensor in tensors_of((args, kwargs)):
            self._outputs.pop(id(tensor), None)

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        self._has_run.append(module)
        self.frozen += self._counter.get_total_flops() - self._began
        largest = max(tensors_of(output), key=lambda tensor: tensor.nbytes)
        self._outputs[id(largest)] = largest
