"""The costs of a frozen teacher in each epoch, and the gain of reading its outputs from the cache.

    epoch 1         the teacher runs on each sample, and its output is stored
    later epochs    the output is read; the teacher does not run

    classifier          stored: its logits
    language model      stored: the last hidden state [L, H], as the logits [L, V] are larger; the head runs again

FLOPs and bytes are counted in forwards of placeholders, as for the trained model. The loss reads the teacher's logits,
or its first output if it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..model.frozen_prefix import frozen_modules
from ..model.nested import tensors_of
from ..parts.front.finding import CHEAP
from ..parts.front.rows import DIGEST_BYTES
from ..parts.frozen_calls.watching import DEAR
from ..parts.prefix_cache.cache.activation_files import RECORD
from ..planning.costs import UNKNOWN_TO_TORCH
from .device_table import Device
from .forecast import SWITCHED_OFF, Job, Values
from .placeholder_model import GhostProducts
from .workload import Workload, at_length, samples_to_measure

ONE_EPOCH = "nothing is read in the first epoch"
"""Reason for not reading in a training of one epoch."""


@dataclass(frozen=True)
class TeacherCost:
    """The costs of a teacher's forward for a sample.

    Attributes:
        num_layers: number of calls of layers.
        forward_flops: FLOPs.
        stored: names of the modules with stored outputs; "" is the teacher itself.
        output_bytes: size of the stored outputs.
        head: name of the head that is run again when the outputs are read; "" if none is.
        head_flops: its FLOPs.
    """

    num_layers: int
    forward_flops: float
    stored: tuple[str, ...]
    output_bytes: int
    head: str = ""
    head_flops: float = 0.0

    @property
    def sample_bytes(self) -> int:
        """Bytes in the store's files: the outputs, a digest of each module's arguments, and the record of an entry."""
        return self.output_bytes + DIGEST_BYTES * len(self.stored) + RECORD.itemsize


@dataclass(frozen=True)
class _Counted:
    """Findings of one forward of a sample: FLOPs, and bytes of the logits and of the head's input."""

    flops: float
    head_flops: float
    output_bytes: float
    head_given_bytes: float


def measure_teacher(model: PreTrainedModel, tokens: int | None, autocasts: bool = False) -> TeacherCost:
    """Measure the costs of a teacher for a sample with this many tokens.

    Args:
        model: a model of placeholders, or with weights.
        tokens: number of tokens of a text sample; not needed for audio and images.
        autocasts: whether it runs under autocast to bf16.

    Raises:
        ValueError: the samples are longer than the model's positions, or `tokens` is needed but None.
    """
    model.eval().requires_grad_(False)
    length, samples = samples_to_measure(model, tokens)
    forwards = [_Forward(model, sample, autocasts) for sample in samples]
    counted = _Counted(*(at_length(length, values) for values in zip(*(f.counted() for f in forwards), strict=True)))
    first, layers, flops = forwards[0], forwards[0].num_layers, counted.flops
    before = tuple(name for name in first.names if name != first.head)
    less = 1 - counted.head_given_bytes / counted.output_bytes
    if first.head and before and counted.head_flops < CHEAP * less * flops:
        return TeacherCost(layers, flops, before, round(counted.head_given_bytes), first.head, counted.head_flops)
    return TeacherCost(layers, flops, tuple(first.names), round(counted.output_bytes))


class _Forward:
    """One forward of a teacher: the last module with weights that returns much, and the modules in front of it."""

    def __init__(self, model: PreTrainedModel, sample: dict[str, Any], autocasts: bool) -> None:
        self.num_layers = 0
        self.head = ""
        self._given = self._made = 0
        called: list[str] = []
        names = {module: name for name, module in model.named_modules()}

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.num_layers += isinstance(module, GradientCheckpointingLayer)
            called.append(names[module])
            if next(module.children(), None) is None and next(module.parameters(), None) is not None:
                given, made = (sum(t.nbytes for t in tensors_of(of)) for of in ((args, kwargs), output))
                self.head = names[module] if made > DEAR * given > 0 else ""
                self._given, self._made = given, made

        handles = [module.register_forward_hook(note, with_kwargs=True) for module in names]
        counter = FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH)
        try:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocasts), GhostProducts(), counter:
                output = model(**sample)
        finally:
            for handle in handles:
                handle.remove()
        around = self.head.split(".")[:-1]
        opened = {".".join(around[:count]) for count in range(len(around) + 1)} if self.head else set[str]()
        self.names = [name for name in frozen_modules(model, opened) if name in called]
        """The largest modules, all of them frozen, that contain neither the head nor one another; and the head."""
        of_modules = counter.get_flop_counts()
        self._flops = counter.get_total_flops()
        self._head_flops = sum(of_modules.get(f"{type(model).__name__}.{self.head}", {}).values()) if self.head else 0
        logits = getattr(output, "logits", None)
        self._output = (logits if isinstance(logits, torch.Tensor) else tensors_of(output)[0]).nbytes

    def counted(self) -> tuple[float, ...]:
        return self._flops, self._head_flops, self._output, self._given


def estimate_teacher(
    cost: TeacherCost, workload: Workload, job: Job, device: Device, epochs: Sequence[Values]
) -> Values:
    """Predict the epochs with a teacher that is computed in each of them, and with a teacher's outputs that are read.

    Args:
        cost: the costs of the teacher.
        workload: as for the forecast of the trained model.
        job: as for the forecast of the trained model.
        device: as for the forecast of the trained model.
        epochs: the epochs of that forecast.

    Returns:
        "forward_flops" of a sample, and "flops_share" of a step without frozen layers in the trained model;
        "stored", names of the modules with stored outputs, and "head", the name of the module that is run again;
        "output_bytes" and "sample_bytes" of a sample, without and with the store's own; "node_bytes" of an epoch;
        "limit_bytes", None if unknown, and "stored_share", the share of the samples that fit; "off", why no output is
        read, or None; "epochs", each with the "student_seconds", the "computed_seconds" of student and teacher, and
        the "read_seconds" of both if outputs are read; "computed_seconds", "read_seconds" and "speed_up" of all.
    """
    nodes, limit = device.num_nodes(job.num_devices), device.host_disk_bytes
    node_bytes = cost.sample_bytes * job.num_samples / nodes
    share = 1.0 if limit is None else min(1.0, limit / node_bytes)
    live = share * node_bytes
    in_memory = device.host_memory_bytes is None or live <= device.host_memory_bytes
    speed = device.read_bytes_per_second if in_memory else device.disk_bytes_per_second
    flops_per_second = device.flops_per_second * device.efficiency
    reading = job.batch / nodes * cost.sample_bytes / speed
    found, off = list[Values](), None if job.caches else SWITCHED_OFF
    for step in epochs:
        rows = job.batch / step["replicas"]  # the loss runs on the last stage of each pipeline
        launching = job.gradient_accumulation_steps * cost.num_layers * device.seconds_per_unit
        computing = launching + rows * cost.forward_flops / flops_per_second
        head = rows * cost.head_flops / flops_per_second
        if off is None and reading > computing - head:
            off = f"reading takes {1e3 * reading:.3g} ms of a step, and computing {1e3 * (computing - head):.3g} ms"
        again = share * (reading + head) + (1 - share) * computing
        found.append(
            {
                "epoch": step["epoch"],
                "student_seconds": step["seconds"],
                "computed_seconds": step["seconds"] + job.steps_per_epoch * computing,
                "read_seconds": step["seconds"] + job.steps_per_epoch * again,
            }
        )
    if off is None and len(found) == 1:
        off = ONE_EPOCH
    for step in found if off is not None else found[:1]:
        step["read_seconds"] = step["computed_seconds"]
    computed, read = (sum(step[name] for step in found) for name in ("computed_seconds", "read_seconds"))
    student = sum(unit.forward_flops for unit in workload.unit_costs) * (1 + workload.backward_forwards)
    return {
        "forward_flops": cost.forward_flops,
        "flops_share": cost.forward_flops / (cost.forward_flops + student),
        "stored": list(cost.stored),
        "head": cost.head or None,
        "output_bytes": cost.output_bytes,
        "sample_bytes": cost.sample_bytes,
        "node_bytes": node_bytes,
        "limit_bytes": limit,
        "stored_share": share,
        "off": off,
        "epochs": found,
        "computed_seconds": computed,
        "read_seconds": read,
        "speed_up": computed / read,
    }
