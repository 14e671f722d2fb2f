"""Measures this machine: times the parts of a model with random weights, in as many processes as will train it.

All processes measure at the same time, as they would run in a training, because they share caches and memory.

    processes    build the model    reduce    time the parts    read from the store    the slowest counts
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from transformers import PreTrainedConfig, PreTrainedModel

from ..cache.file_store import FileStore
from ..model.dummy_inputs import dummy_batch
from ..model.layer_stack import LayerStack, loss_outputs, output_tensors
from ..pipeline.devices import free_and_total
from ..pipeline.mesh import ProcessMesh
from ..planning.unit_times import ModelTimes, measure_times, slowest
from .device_table import GIB
from .workload import Workload

TIMEOUT = timedelta(minutes=10)
MEMORY_FOR_WEIGHTS = 0.5
"""Fraction of the free memory that the processes' copies of the weights may use; gradients and activations of a unit
need memory in addition."""
ROWS_TO_TIME = 8
"""Number of samples that are timed, as in the trainer."""
READ_REPETITIONS = 5


@dataclass(frozen=True)
class LocalProfile:
    """The measurements.

    Attributes:
        times: times of the slowest process.
        read_bytes_per_second: bandwidth of reading from the store through the page cache, of all processes together.
        processes: number of processes that measured.
    """

    times: ModelTimes
    read_bytes_per_second: float
    processes: int


@dataclass(frozen=True)
class Subject:
    """What is timed.

    Attributes:
        config: configuration of the model.
        model_class: a class or Auto class of transformers.
        device_type: "cpu", or `accelerator_type()`.
        rows: number of samples with which the parts are timed.
        workload: the model's costs, of which the sizes of samples are taken.
    """

    config: PreTrainedConfig
    model_class: Any
    device_type: str
    rows: int
    workload: Workload


def accelerator_type() -> str:
    """The type of this machine's accelerator; "cuda" if torch is built for none."""
    kind = torch.accelerator.current_accelerator()
    return kind.type if kind is not None else "cuda"


def profile_here(subject: Subject, num_devices: int) -> LocalProfile:
    """Time a model's parts on this machine.

    Args:
        subject: what is timed.
        num_devices: number of processes of the training; no more are started than there are cores, or devices.

    Raises:
        ValueError: there is no such device, or the processes' weights do not fit into this machine's memory.
    """
    kind = subject.device_type
    if kind != "cpu" and not torch.accelerator.is_available():
        raise ValueError(
            f"profile is {kind!r}, but no {kind.upper()} device is available. Set profile='analytic' and device."
        )
    here = os.cpu_count() or 1 if kind == "cpu" else torch.accelerator.device_count()
    processes = min(num_devices, here)
    _refuse_too_large(subject.workload.weight_bytes, kind, processes)
    with tempfile.TemporaryDirectory() as folder:
        threads = int(os.environ.get("OMP_NUM_THREADS", max((os.cpu_count() or 1) // processes, 1)))
        multiprocessing.spawn(_measure, (processes, Path(folder), threads, subject), nprocs=processes)
        times, speed = torch.load(Path(folder, "profile"), weights_only=False)  # our own processes have written it
    return LocalProfile(times, speed, processes)


def _refuse_too_large(weight_bytes: int, device_type: str, processes: int) -> None:
    """Refuse a model whose weights do not fit into memory: a device's, or this machine's with a copy a process."""
    memory = free_and_total(torch.device(device_type)) if device_type != "cpu" else None
    copies, free = (1, memory[0]) if memory is not None else (processes, psutil.virtual_memory().available)
    if copies * weight_bytes > free * MEMORY_FOR_WEIGHTS:
        raise ValueError(
            f"profile={device_type!r} needs {copies} × {weight_bytes / GIB:,.1f} GiB for the model's weights, but"
            f" this machine has {free / GIB:,.1f} GiB free, of which at most {MEMORY_FOR_WEIGHTS:.0%} may be used"
            " for weights. Set profile='analytic', or use fewer devices."
        )


def _labelled_batch(model: PreTrainedModel, rows: int, tokens: int) -> dict[str, Any]:
    """A batch with labels, if the model's output shows which ones fit, so that the loss is timed as well."""
    batch: dict[str, Any] = dummy_batch(model, rows, tokens=tokens)
    with torch.no_grad():
        logits = getattr(model(**batch), "logits", None)
    if not isinstance(logits, torch.Tensor):
        return batch
    ids = batch.get("decoder_input_ids", batch.get("input_ids"))
    if logits.dim() == 2:
        labels = torch.zeros(rows, dtype=torch.long, device=logits.device)
    elif ids is not None and logits.shape[:-1] == ids.shape:
        labels = ids % logits.shape[-1]
    else:
        return batch
    try:
        with torch.no_grad():
            has_loss = bool(loss_outputs(output_tensors(model(**batch, labels=labels))))
    except (TypeError, ValueError, RuntimeError):
        return batch  # the model expects other labels; the head is timed without a loss
    return {**batch, "labels": labels} if has_loss else batch


def _measure(rank: int, processes: int, folder: Path, threads: int, subject: Subject) -> None:
    """Measure in one process. Collective over all of them."""
    torch.set_num_threads(threads)
    device = torch.device("cpu") if subject.device_type == "cpu" else torch.device(subject.device_type, rank)
    backend = "cpu:gloo"
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
        backend += f",{device.type}:{dist.get_default_backend_for_device(device)}"
    if processes > 1:
        dist.init_process_group(
            backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=processes, timeout=TIMEOUT
        )
    try:
        torch.manual_seed(0)
        build = getattr(subject.model_class, "from_config", None) or subject.model_class._from_config
        model: PreTrainedModel = build(subject.config).to(device).train()
        tokens = subject.workload.tokens
        batch = _labelled_batch(model, subject.rows, tokens)
        stack = LayerStack.discover(model, dummy_batch(model, 2, tokens=min(tokens, 8)))
        mesh = ProcessMesh(TIMEOUT, device)
        per_byte = mesh.seconds_per_reduced_byte(device)
        mesh.gather_objects(None)  # so that all start at the same time
        times = slowest(mesh.gather_objects(measure_times(stack, batch, per_byte)))
        row_bytes = max(unit.boundary_bytes for unit in subject.workload.unit_costs) or 1
        speeds = mesh.gather_objects(_read_speed(folder / f"store-{rank}", row_bytes, subject.rows))
        if rank == 0:
            torch.save((times, min(speeds) * processes), folder / "profile")
        mesh.gather_objects(None)  # so that no process exits before all have answered
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _read_speed(folder: Path, row_bytes: int, rows: int) -> float:
    """Bandwidth, in bytes per second, of reading a batch that is in the page cache."""
    store = FileStore(folder)
    keys = [number.to_bytes(16, "little") for number in range(rows)]
    writer = store.writer(1, "profile")
    writer.put(keys, [memoryview(bytearray(row_bytes)) for _ in keys])
    writer.close()
    reader = store.reader(1, "profile")
    seconds = []
    for _ in range(READ_REPETITIONS):
        began = time.perf_counter()
        states = torch.empty(rows, row_bytes, dtype=torch.uint8)
        hits = reader.read_into(keys, [memoryview(row.numpy()) for row in states])
        seconds.append(time.perf_counter() - began)
        assert all(hits)
    reader.close()
    return rows * row_bytes / median(seconds)
