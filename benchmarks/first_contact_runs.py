"""The trainings of `first_contact.py`: models, data, Trainers, and what is measured while they train.

A training is observed from an override of `training_step`, not from a callback: a callback with an event for each step
makes the library keep weights on the device that it would otherwise offload, and look at them in each step.
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils.memory import clear_device_cache
from pipeline_step import RandomRows
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import is_torch_bf16_gpu_available

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.run.events_file import FILE_NAME as EVENTS_FILE
from hf_pipetransformer.run.metrics_file import FILE_NAME as METRICS_FILE

Precision = Literal["fp32", "bf16", "fp16"]

WARM_UP = 3
"""First steps of each epoch that are not measured: kernels are chosen, memory is taken from the system."""
SYNCHRONISING = "called a synchronizing CUDA operation"
"""What torch says of each call for which the program waits for the device."""
SECONDS_TO_MS = 1e3


# ---------------------------------------------------------------------------------------------------------
# What is trained, and where
# ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Size:
    """A model of BERT's architecture, and batches for it.

    Attributes:
        rows: samples of a global batch; a multiple of 12, for two and three stages with four micro-batches.
        tokens: of each sample.
        steps: of an epoch.
    """

    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocabulary: int
    rows: int
    tokens: int
    steps: int

    @property
    def frozen(self) -> tuple[int, int]:
        """A third and two thirds of the layers: 8 and 16 of BERT-large's 24."""
        return self.layers // 3, 2 * self.layers // 3

    def config(self, dropout: float) -> BertConfig:
        return BertConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.intermediate,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=2,
        )


SIZES = {
    "bert-large": Size(24, 1024, 16, 4096, 30522, rows=48, tokens=128, steps=12),
    "bert-base": Size(12, 768, 12, 3072, 30522, rows=48, tokens=128, steps=12),
    "tiny": Size(6, 32, 2, 64, 512, rows=12, tokens=16, steps=8),
}
DROPOUT = 0.1
"""BERT's own. Pipelines draw other random numbers than one process, so they are compared without."""


def device_of(use_cpu: bool) -> torch.device:
    """The accelerator, if there is one and it is wanted."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if use_cpu or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, 0)


def memory_of(device: torch.device) -> int | None:
    """Bytes of the device's memory; None where torch does not tell."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return getattr(properties(device), "total_memory", None) if properties is not None else None


@dataclass(frozen=True)
class Setting:
    """What all trainings of a run have in common.

    Attributes:
        size: of model and batches.
        use_cpu: train on the CPU although there may be an accelerator.
        folder: for checkpoints and the cache.
    """

    size: Size
    use_cpu: bool
    folder: str

    @property
    def device(self) -> torch.device:
        return device_of(self.use_cpu)

    @property
    def half(self) -> Precision:
        """The precision in which one trains on this device: bf16, else fp16 where there is a scaler for it."""
        if self.device.type == "cpu" or is_torch_bf16_gpu_available():
            return "bf16"
        return "fp16" if self.device.type == "cuda" else "fp32"


@cache
def _template(config: str) -> nn.Module:
    set_seed(0)
    return BertForSequenceClassification(BertConfig.from_dict(json.loads(config)))


def make_model(size: Size, dropout: float = DROPOUT) -> nn.Module:
    """A new model with random weights on the CPU, the same in every call and on every process.

    They are drawn once, which takes seconds for a large model, and copied.
    """
    return copy.deepcopy(_template(json.dumps(size.config(dropout).to_dict(), default=str)))


# ---------------------------------------------------------------------------------------------------------
# Observing a training
# ---------------------------------------------------------------------------------------------------------
class Observer:
    """Is called around a training and each of its steps."""

    def begin(self, trainer: Trainer) -> None:
        """Called before the training."""

    def end(self, trainer: Trainer) -> None:
        """Called after the training."""

    def before_step(self, trainer: Trainer) -> None:
        """Called before the step's forward."""

    def after_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        """Called after the step's backward, before the optimizer's step."""


class Losses(Observer):
    """Keeps the loss of each step on the device, without waiting for it."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []

    def after_step(self, trainer: Trainer, loss: torch.Tensor) -> None:
        self._losses.append(loss.detach().clone())

    @property
    def values(self) -> list[float]:
        return [float(loss) for loss in self._losses]


class Memory(Observer):
    """Measures the most memory that is allocated on the device before the first step, and from there on.

    Args:
        device: the device of the training.

    Attributes:
        setup_bytes: while the model is examined and placed; None where torch does not tell.
        training_bytes: in the steps; likewise.
    """

    def __init__(self, device: torch.device) -> None:
        self.setup_bytes: int | None = None
        self.training_bytes: int | None = None
        self._device = device
        self._has_begun = False

    def begin(self, trainer: Trainer) -> None:
        reset_peak_bytes(self._device)

    def before_step(self, trainer: Trainer) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.setup_bytes = peak_bytes(self._device)
            reset_peak_bytes(self._device)

    def end(self, trainer: Trainer) -> None:
        self.training_bytes = peak_bytes(self._device)


class StepTimes(Observer):
    """Times the steps of each epoch behind its warm-up. It waits for the device at the beginning and end only.

    Args:
        device: the device of the training.
        steps: of each epoch.

    Attributes:
        step_ms: for each epoch, milliseconds of a step, from loading to the optimizer.
        peak_bytes: for each epoch, the most memory allocated on the device; None where torch does not tell.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        if steps < WARM_UP + 2:
            raise ValueError(
                f"An epoch has {steps} steps, but {WARM_UP} warm up, and one must follow the measured ones."
            )
        self.step_ms: list[float] = []
        self.peak_bytes: list[int | None] = []
        self._device, self._steps = device, steps
        self._count = 0
        self._began = 0.0

    def before_step(self, trainer: Trainer) -> None:
        step, last = self._count % self._steps, self._steps - 1
        self._count += 1
        if step == 0:
            reset_peak_bytes(self._device)
        elif step == WARM_UP:
            synchronise(self._device)
            self._began = time.perf_counter()
        elif step == last:
            synchronise(self._device)
            self.step_ms.append(SECONDS_TO_MS * (time.perf_counter() - self._began) / (last - WARM_UP))
            self.peak_bytes.append(peak_bytes(self._device))


class Synchronisations(Observer):
    """Counts for what a step makes the program wait for a CUDA device (`torch.cuda.set_sync_debug_mode`).

    torch counts copies, values read on the CPU and results whose size only the values tell; communication is not
    covered.

    Args:
        first: number of the first step that counts.
        steps: number of steps that count.

    Attributes:
        sites: file and line -> number of calls, over all steps.
    """

    def __init__(self, first: int, steps: int) -> None:
        self.sites: Counter[str] = Counter()
        self._first, self._last = first, first + steps
        self._steps = steps
        self._count = 0
        self._recording: Any = None

    @property
    def per_step(self) -> float:
        return sum(self.sites.values()) / self._steps

    def before_step(self, trainer: Trainer) -> None:
        if self._count == self._first:
            context = warnings.catch_warnings(record=True)
            self._recording = context, context.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        elif self._count == self._last:
            torch.cuda.set_sync_debug_mode("default")
            context, caught = self._recording
            context.__exit__(None, None, None)
            for warning in caught:
                if SYNCHRONISING in str(warning.message):
                    self.sites["/".join(Path(warning.filename).parts[-2:]) + f":{warning.lineno}"] += 1
        self._count += 1


class IdleShare(Observer):
    """Measures for how much of the time the device computes nothing and copies nothing, by torch's profiler.

    Args:
        device: the device of the training.
        first: number of the first step that is measured.
        steps: number of steps that are measured.

    Attributes:
        share: between 0 and 1; None on the CPU, and where the profiler has seen nothing of the device.
    """

    def __init__(self, device: torch.device, first: int, steps: int) -> None:
        self.share: float | None = None
        self._device = device
        self._first, self._last = first, first + steps
        self._count = 0
        self._profile: profile | None = None
        self._began = 0.0

    def before_step(self, trainer: Trainer) -> None:
        if self._count == self._first:
            kinds = supported_activities() - {ProfilerActivity.CPU}
            if kinds and self._device.type != "cpu":
                self._profile = profile(activities=kinds)
                self._profile.start()
            synchronise(self._device)
            self._began = time.perf_counter()
        elif self._count == self._last and self._profile is not None:
            synchronise(self._device)
            microseconds = 1e6 * (time.perf_counter() - self._began)
            self._profile.stop()
            spans = [
                (event.time_range.start, event.time_range.end)
                for event in self._profile.events()
                if event.device_type != DeviceType.CPU and not getattr(event, "is_user_annotation", False)
            ]
            if spans:
                self.share = 1 - length_of_union(spans) / microseconds
        self._count += 1


def length_of_union(spans: Iterable[tuple[float, float]]) -> float:
    """The length that the spans (start, end) cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def synchronise(device: torch.device) -> None:
    """Wait for all that the device was given to do."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def peak_bytes(device: torch.device) -> int | None:
    """The most memory allocated on the device; None where torch does not tell."""
    function = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return int(function(device)) if function is not None else None


def reset_peak_bytes(device: torch.device) -> None:
    """Begin anew to look for the most memory allocated on the device."""
    function = getattr(torch.get_device_module(device), "reset_peak_memory_stats", None)
    if function is not None:
        function(device)


# ---------------------------------------------------------------------------------------------------------
# Trainers
# ---------------------------------------------------------------------------------------------------------
def observed(trainer_class: type[Trainer], observers: Sequence[Observer]) -> type[Trainer]:
    """The class, with its trainings observed."""

    class Observed(trainer_class):  # type: ignore[valid-type, misc]
        def train(self, *args: Any, **kwargs: Any) -> Any:
            for observer in observers:
                observer.begin(self)
            result = super().train(*args, **kwargs)
            for observer in observers:
                observer.end(self)
            return result

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            for observer in observers:
                observer.before_step(self)
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            for observer in observers:
                observer.after_step(self, loss)
            return loss

    Observed.__name__ = trainer_class.__name__
    return Observed


@dataclass(frozen=True)
class Training:
    """One training, but for what observes it.

    Attributes:
        stages: number of pipeline stages K; 0: the stock Trainer.
        precision: of the forward and backward; the weights are in float32.
        dropout: probability of it in all layers.
        max_steps: steps to train; -1: all epochs.
        epochs: of `Size.steps` steps each.
        options: further arguments of the class of training arguments that fits.
    """

    stages: int = 0
    precision: Precision = "fp32"
    dropout: float = DROPOUT
    epochs: int = 1
    max_steps: int = -1
    options: dict[str, Any] = field(default_factory=dict)

    def with_options(self, **options: Any) -> Training:
        return replace(self, options={**self.options, **options})

    def trainer(
        self, setting: Setting, folder: str, observers: Sequence[Observer] = (), num_processes: int = 1
    ) -> Trainer:
        """A new Trainer with a new model. Collective over all processes, if there are several.

        Args:
            setting: device, size of model and batches.
            folder: `output_dir`.
            observers: are called around each training step.
            num_processes: among which a global batch is divided.
        """
        options: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": setting.size.rows // num_processes,
            "num_train_epochs": self.epochs,
            "max_steps": self.max_steps,
            "bf16": self.precision == "bf16",
            "fp16": self.precision == "fp16",
            "use_cpu": setting.device.type == "cpu",
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            **self.options,
        }
        trainer_class: type[Trainer] = Trainer
        arguments: TrainingArguments
        if self.stages:
            trainer_class = PipeTransformerTrainer
            arguments = PipeTransformerTrainingArguments(pipeline_parallel_size=self.stages, **options)
        else:
            arguments = TrainingArguments(**options)
        trainer = observed(trainer_class, observers)(
            model=make_model(setting.size, self.dropout),
            args=arguments,
            train_dataset=RandomRows(
                setting.size.rows * setting.size.steps, setting.size.tokens, setting.size.vocabulary
            ),
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def run(self, setting: Setting, observers: Sequence[Observer] = ()) -> Outcome:
        """Train once in this process, in a folder of its own."""
        clear_device_cache(garbage_collection=True)  # an earlier Trainer is a circle of references
        with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
            trainer = self.trainer(setting, folder, observers)
            began = time.perf_counter()
            trainer.train()
            synchronise(setting.device)
            return Outcome(time.perf_counter() - began, cache_record(Path(folder)))


@dataclass(frozen=True)
class Outcome:
    """What a training leaves behind.

    Attributes:
        seconds: of the whole `train()`.
        cache: what it has recorded of the cache (`cache_record`).
    """

    seconds: float
    cache: dict[str, Any]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The records in a file, in their order; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cache_record(folder: Path) -> dict[str, Any]:
    """What a training of the library has recorded of its cache.

    Returns:
        A dict with "cached_layers", those that counted as cached in the end; "off_because", None while the cache is in
        use; and "epochs", the metrics of each epoch in which it was in use.
    """
    events, metrics = lines_of(folder / EVENTS_FILE), lines_of(folder / METRICS_FILE)
    return {
        "cached_layers": events[-1]["num_cached_layers"] if events else 0,
        "off_because": next((line["reason"] for line in reversed(metrics) if line["kind"] == "cache_off"), None),
        "epochs": [
            {name: value for name, value in line["values"].items() if name.startswith("cache_")}
            for line in metrics
            if line["kind"] == "log" and "cache_hit_rate" in line["values"]
        ],
    }
