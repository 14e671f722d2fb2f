"""The arguments of a pipeline run: all of `transformers.TrainingArguments`, and those of the pipeline."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames

from .freezing.policies import FREEZE_POLICIES, FreezePolicy, check_when, make_policy
from .planning.partition import SCHEDULES
from .resilience.exit import end_at_exit
from .resilience.stores import use_fresh_store, wait_for_connections

logger = logging.getLogger(__name__)

FUSED_BACKWARD_OPTIMIZERS = ("lomo", "adalomo", "layerwise")
"""Their step is taken inside the backward, before gradients are complete."""


CACHE_MODES = ("auto", "on", "off")
CACHE_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32}
"""Name -> how states are stored; None: as they are computed."""

MOST_SECONDS = 10**9
"""That a timeout may be; PyTorch cannot wait for ever."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _int_or_auto(name: str, value: int | str) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if number < 1 or isinstance(value, (bool, float)):
        raise ValueError(f"{name}={value!r}: it must be a whole number of at least 1, or 'auto'.")
    return number


def _token_slices(value: Any) -> str | int | list[int]:
    """The field's value, whether it comes from Python, YAML or the command line."""
    given = value
    if isinstance(value, str) and value not in ("off", "auto"):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    lengths = list(value) if isinstance(value, (list, tuple)) else [value]
    is_known = value in ("off", "auto") or (
        bool(lengths) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in lengths)
    )
    if not is_known:
        raise ValueError(
            f"token_slices={given!r}: it must be 'off', 'auto', a number of slices (at least 1), or a list of their"
            " lengths, such as [512, 256, 256]."
        )
    return lengths if isinstance(value, (list, tuple)) else value


def _from_json(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:  # of numbers with thousands of digits, too
        raise ValueError(f'{name}={text!r} is not JSON ({error}): write it as {{"1": 4, "2": 7}}.') from None
    if not isinstance(value, dict):
        raise ValueError(f'{name}={text!r}: it must be a map, such as {{"1": 4, "2": 7}}.')
    return value


if TYPE_CHECKING:
    IntOrAuto = int | Literal["auto"]
    SlicesOrName = str | int | list[int]
else:

    class IntOrAuto:
        """What HfArgumentParser makes an int or "auto" of: it takes one type per argument, and calls it."""

        def __new__(cls, text: str) -> int | str:
            return _int_or_auto("value", text)

    class SlicesOrName:
        """Likewise of "off", "auto", an int or a list."""

        def __new__(cls, text: str) -> str | int | list[int]:
            return _token_slices(text)


@dataclass
class PipeTransformerTrainingArguments(TrainingArguments):
    """Arguments of a [`PipeTransformerTrainer`]: all of `transformers.TrainingArguments` and the following.

    > Parameters that control the pipeline

    Args:
        pipeline_parallel_size (`int` or `"auto"`, *optional*, defaults to 1):
            Number of stages K that the model is cut into, one per process. It must divide the number of processes;
            world size / K pipelines run side by side. `"auto"`: the shortest that fits the devices' memory, or a
            longer one that is predicted to be faster by 15%.
        pipeline_schedule (`str`, *optional*, defaults to `"1f1b"`):
            Order of the micro-batches' forwards and backwards: `"1f1b"` or `"gpipe"`.
        num_microbatches (`int` or `"auto"`, *optional*, defaults to `"auto"`):
            Micro-batches that a pipeline's batch is cut into. All have one size, so the largest divisor of the
            batch's rows up to this number is used. `"auto"`: the fastest of those that are predicted to be fast, tried
            on the first training steps; with `full_determinism` by a fixed rule.
        token_slices (`str`, `int` or `list[int]`, *optional*, defaults to `"off"`):
            Of a causal language model: cut micro-batches along their tokens, too, so that a pipeline has enough to
            do with few long sequences (TeraPipe, ICML 2021). A number of equal slices; their lengths, as a list (what
            remains of a row is one more slice); or `"auto"`: slices and micro-batches by a dynamic program over
            what slices of different lengths are measured to take. While there is one stage nothing is cut.

    > Parameters that control the freezing of layers

    Args:
        freeze_policy (`str`, *optional*, defaults to `"none"`):
            How many layers are frozen, from the bottom up, at each decision: `"none"`, `"alpha"`, `"adaptive"`,
            `"autofreeze"` or `"schedule"`. A policy of your own is an argument of the trainer.
        freeze_alpha (`float`, *optional*, defaults to 1/3):
            Share of the active layers that a decision of `"alpha"` or `"adaptive"` freezes, between 0 and 1.
        freeze_strategy (`str`, *optional*, defaults to `"epoch"`):
            When decisions are made: `"epoch"`, at each epoch's begin but the first, or `"steps"`.
        freeze_steps (`float`, *optional*):
            Optimizer steps between decisions of `freeze_strategy="steps"`; below 1 a share of all steps.
        freeze_schedule (`dict`, *optional*):
            Of `freeze_policy="schedule"`: epoch (or step, for `freeze_strategy="steps"`) -> number of frozen layers.
            As JSON on the command line.
        max_frozen_layers (`int`, *optional*):
            Never freeze more layers than this.
        elastic (`bool`, *optional*, defaults to `True`):
            After a freeze, pack the layers into fewer stages where they fit, and use the freed devices as replicas.

    > Parameters that control the cache of frozen layers' outputs

    Args:
        activation_cache (`str`, *optional*, defaults to `"auto"`):
            Keep what frozen layers give for each sample, and do not compute it again in the next epoch: `"auto"` (if
            it is measured to pay), `"on"` or `"off"`. Models whose frozen layers do not give the same in another
            batch train without, and say why.
        activation_cache_dir (`str`, *optional*):
            Where to keep it, on a local disk; best where the page cache can hold it. Defaults to `activation_cache` in
            `output_dir`, which is removed when training has ended.
        activation_cache_dtype (`str`, *optional*, defaults to `"auto"`):
            `"auto"`: as it is computed. `"bf16"` takes half of the space of fp32, and costs some digits; `"fp32"`.
        activation_cache_max_gib (`float`, *optional*):
            Size limit on each node, and never more than 80% of the disk's free space. What does not fit is computed.

    > Parameters that control what happens when a process fails

    Args:
        watchdog_timeout (`float`, *optional*, defaults to 30):
            Seconds after which a process that is stopped, or gets nowhere in a training step, is given up: all
            processes end, and say which one it was and where. Five times the longest step if that is longer; ten
            times this while data is loaded; in callbacks and where files are written, `ddp_timeout`. One that dies is
            noticed at once. `0`: nobody looks, as while you debug.

    > Defaults that differ from `TrainingArguments`

    - `use_cpu` is set where there is no accelerator.
    - `average_tokens_across_devices` is off: the trainer counts the items of the global batch itself, whatever the
      layout.

    With one stage and FSDP, DeepSpeed, `torch_compile`, several devices in one process, `auto_find_batch_size`,
    `bf16_full_eval`, `fp16_full_eval` or another setting that distributes or converts the model, everything is left
    to the stock Trainer, and these defaults are its own.
    """

    pipeline_parallel_size: IntOrAuto = field(
        default=1,
        metadata={"help": "Number of pipeline stages, or 'auto': the smallest that fits the devices' memory."},
    )
    pipeline_schedule: str = field(
        default="1f1b",
        metadata={"help": "Order of the micro-batches: '1f1b' or 'gpipe'.", "choices": ["1f1b", "gpipe"]},
    )
    num_microbatches: IntOrAuto = field(
        default="auto",
        metadata={"help": "Micro-batches per pipeline and step, or 'auto'."},
    )
    token_slices: SlicesOrName = field(
        default="off",
        metadata={"help": "Slices along the tokens of a sequence: 'off', 'auto', a number, or lengths as JSON."},
    )

    freeze_policy: str = field(
        default="none",
        metadata={
            "help": "How many layers are frozen at each decision, from the bottom up.",
            "choices": list(FREEZE_POLICIES),
        },
    )
    freeze_alpha: float = field(
        default=1 / 3,
        metadata={"help": "Share of the active layers that a decision of 'alpha' or 'adaptive' freezes."},
    )
    freeze_strategy: str = field(
        default="epoch",
        metadata={"help": "When freezing is decided: at each 'epoch', or every freeze_steps 'steps'."},
    )
    freeze_steps: float | None = field(
        default=None, metadata={"help": "Optimizer steps between decisions; below 1 a share of all steps."}
    )
    freeze_schedule: dict | str | None = field(
        default=None, metadata={"help": "Epoch (or step) -> number of frozen layers, as JSON."}
    )
    max_frozen_layers: int | None = field(default=None, metadata={"help": "Never freeze more layers than this."})
    elastic: bool = field(
        default=True, metadata={"help": "Use the devices that freezing leaves free as data-parallel replicas."}
    )

    activation_cache: str = field(
        default="auto",
        metadata={"help": "Keep frozen layers' outputs from epoch to epoch.", "choices": list(CACHE_MODES)},
    )
    activation_cache_dir: str | None = field(
        default=None, metadata={"help": "Where to keep them. Defaults to activation_cache in output_dir."}
    )
    activation_cache_dtype: str = field(
        default="auto", metadata={"help": "How to keep them.", "choices": list(CACHE_DTYPES)}
    )
    activation_cache_max_gib: float | None = field(default=None, metadata={"help": "Size limit on each node."})

    watchdog_timeout: float = field(
        default=30.0, metadata={"help": "Seconds after which a process that hangs ends the job; 0: never."}
    )

    def __post_init__(self) -> None:
        self._check_cache()
        self._check_watchdog()
        self.pipeline_parallel_size = _int_or_auto("pipeline_parallel_size", self.pipeline_parallel_size)
        self.num_microbatches = _int_or_auto("num_microbatches", self.num_microbatches)
        self.token_slices = _token_slices(self.token_slices)
        if self.pipeline_schedule not in SCHEDULES:
            raise ValueError(
                f"pipeline_schedule={self.pipeline_schedule!r}: choose one of {', '.join(map(repr, SCHEDULES))}."
            )
        if not isinstance(self.elastic, bool):
            raise ValueError(f"elastic={self.elastic!r}: it must be True or False.")
        if isinstance(self.freeze_schedule, str):
            self.freeze_schedule = _from_json("freeze_schedule", self.freeze_schedule)
        self.make_freeze_policy()  # refuses what is out of range
        check_when(self.freeze_strategy, self.freeze_steps, self.max_frozen_layers)
        self._check_slices()
        if self.uses_pipeline:
            self._refuse_what_excludes_a_pipeline()
            known = dist.is_available() and dist.is_initialized()
            self._refuse_impossible_layout(dist.get_world_size() if known else int(os.environ.get("WORLD_SIZE", 1)))
        if not torch.accelerator.is_available():
            self.use_cpu = True
        timeout = timedelta(seconds=self.ddp_timeout)
        use_fresh_store(os.environ, timeout)
        end_at_exit()
        try:
            super().__post_init__()
        finally:
            wait_for_connections(timeout)
        if self.process_index == 0:
            self._warn_of_unused()
        if not self.leaves_model_to_trainer:
            self.average_tokens_across_devices = False
            if getattr(self, "enable_jit_checkpoint", False):
                raise ValueError(
                    "enable_jit_checkpoint=True: each process would save at a step of its own. Unset it: on SIGTERM"
                    " all processes save a checkpoint at the same step, and leave, without it."
                )
        if self.uses_pipeline:
            try:
                self._refuse_what_only_now_is_known()
            except ValueError:
                if dist.is_initialized():
                    dist.barrier()  # a process that left now would leave others waiting for it to connect
                raise

    def _warn_of_unused(self) -> None:
        """An error would be too much: a configuration file may hold them for another policy."""
        needs = (("freeze_schedule", "freeze_policy", "schedule"), ("freeze_steps", "freeze_strategy", "steps"))
        for name, other, wanted in needs:
            value, found = getattr(self, name), getattr(self, other)
            if value is not None and found != wanted:
                logger.warning("%s=%r has no effect: set %s=%r, which is %r.", name, value, other, wanted, found)

    @property
    def slices_tokens(self) -> bool:
        """Whether sequences are cut along their tokens."""
        return self.token_slices != "off"

    def _check_slices(self) -> None:
        if not self.slices_tokens:
            return
        wanted = f"token_slices={self.token_slices!r}"
        if not self.uses_pipeline:
            raise ValueError(
                f"{wanted} needs several stages, and pipeline_parallel_size is 1: raise it, or set token_slices='off'."
            )
        if self.pipeline_schedule != "1f1b":
            raise ValueError(
                f"{wanted} needs pipeline_schedule='1f1b', and it is {self.pipeline_schedule!r}: leave it out."
            )
        if self.label_smoothing_factor:
            raise ValueError(
                f"{wanted} cannot be combined with label_smoothing_factor={self.label_smoothing_factor}: smoothing"
                " shifts the labels itself, and each slice would lose one. Set label_smoothing_factor=0."
            )
        if self.full_determinism and self.token_slices == "auto":
            raise ValueError(
                f"{wanted} goes by measured times, which differ between runs, and full_determinism forbids that: give"
                " a number of slices."
            )
        if self.activation_cache == "on":
            raise ValueError(
                f"{wanted} cannot be combined with activation_cache='on': the cache keeps whole rows. Set"
                " activation_cache='off' or token_slices='off'."
            )

    def _check_cache(self) -> None:
        for name, values in (("activation_cache", CACHE_MODES), ("activation_cache_dtype", tuple(CACHE_DTYPES))):
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(map(repr, values))}.")
        limit = self.activation_cache_max_gib
        if limit is not None and not (_is_number(limit) and limit > 0):
            raise ValueError(
                f"activation_cache_max_gib={limit!r}: give a size above 0, or activation_cache='off' for no cache."
            )
        folder = self.activation_cache_dir
        if not (folder is None or isinstance(folder, (str, Path))) or "\0" in str(folder):
            raise ValueError(f"activation_cache_dir={folder!r}: give the path of a folder.")

    def _check_watchdog(self) -> None:
        seconds = self.watchdog_timeout
        if not _is_number(seconds) or (seconds != 0 and not 1 <= seconds <= MOST_SECONDS):
            raise ValueError(
                f"watchdog_timeout={seconds!r}: give at least 1 second (and no more than {MOST_SECONDS}), or 0 if"
                " nobody shall look for processes that hang."
            )

    def make_freeze_policy(self) -> FreezePolicy:
        """The policy that the fields ask for.

        Raises:
            ValueError: an unknown name, or a value out of its range.
        """
        assert not isinstance(self.freeze_schedule, str)
        return make_policy(
            self.freeze_policy,
            alpha=self.freeze_alpha,
            schedule=self.freeze_schedule,
            by="step" if self.freeze_strategy == "steps" else "epoch",
        )

    @property
    def uses_pipeline(self) -> bool:
        """Whether more than one stage may be used."""
        return self.pipeline_parallel_size != 1

    @property
    def place_model_on_device(self) -> bool | None:
        """The pipeline moves each stage's parameters itself."""
        return super().place_model_on_device if self.leaves_model_to_trainer else False

    @property
    def leaves_model_to_trainer(self) -> bool:
        """With one stage: whether something else distributes or compiles the model, so that the stock Trainer runs."""
        return not self.uses_pipeline and bool(
            self.fsdp
            or self.deepspeed
            or self.torch_compile
            or self.n_gpu > 1
            or getattr(self, "parallelism_config", None)
            or self.fp16_full_eval
            or self.bf16_full_eval
            or self.auto_find_batch_size
            or self._splits_batches
            or self.train_sampling_strategy == "batch_rebalance"
            or any(name in str(self.optim) for name in FUSED_BACKWARD_OPTIMIZERS)
        )

    @property
    def _splits_batches(self) -> bool:
        return isinstance(self.accelerator_config, AcceleratorConfig) and self.accelerator_config.split_batches

    def _refuse_what_excludes_a_pipeline(self) -> None:
        """Fields that contradict more than one stage; known before any device is set up."""
        wanted = f"pipeline_parallel_size={self.pipeline_parallel_size}"
        for name, why in (
            ("fsdp", "FSDP shards the parameters that the stages hold"),
            ("deepspeed", "DeepSpeed distributes the model itself"),
            ("torch_compile", "a compiled forward cannot be left between two layers"),
            ("torch_compile_backend", "a compiled forward cannot be left between two layers"),
            ("torch_compile_mode", "a compiled forward cannot be left between two layers"),
            ("parallelism_config", "Accelerate's own parallelism lays out the processes differently"),
            ("fp16_full_eval", "the stages keep the precision they train in; use bf16 or fp16 mixed precision"),
            ("bf16_full_eval", "the stages keep the precision they train in; use bf16 or fp16 mixed precision"),
            ("save_on_each_node", "the first process alone collects the stages' weights"),
            ("auto_find_batch_size", "stages run out of memory one by one, and could not agree on a size"),
        ):
            value = getattr(self, name, None)
            if value:
                raise ValueError(
                    f"{name}={value!r} cannot be combined with {wanted}: {why}. Unset {name}, or set"
                    " pipeline_parallel_size=1."
                )
        for variable, name in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
            if os.environ.get(variable, "false").lower() in ("true", "1"):
                raise ValueError(
                    f"{name} is switched on by the launcher ({variable}) and cannot be combined with {wanted}. Launch"
                    " with a configuration without it (accelerate_configs/ has some), or set pipeline_parallel_size=1."
                )
        optimizer = OptimizerNames(self.optim).value
        if any(name in optimizer for name in FUSED_BACKWARD_OPTIMIZERS):
            raise ValueError(
                f"optim={optimizer!r} cannot be combined with {wanted}: it updates parameters during the backward,"
                " before their gradients are complete. Choose another optim, such as 'adamw_torch'."
            )
        if "underflow_overflow" in str(self.debug):
            raise ValueError(
                f"debug='underflow_overflow' cannot be combined with {wanted}: parameters of other stages are NaN"
                " while it trains. Debug with pipeline_parallel_size=1."
            )
        if str(self.train_sampling_strategy) == "batch_rebalance":
            raise ValueError(
                f"train_sampling_strategy='batch_rebalance' cannot be combined with {wanted}: it lays out the batches"
                " by process, not by pipeline. Choose 'group_by_length'."
            )

    def _refuse_what_only_now_is_known(self) -> None:
        """What is wrong with this process's devices, and with what the command line gives as JSON."""
        wanted = f"pipeline_parallel_size={self.pipeline_parallel_size}"
        if self.n_gpu > 1:
            raise ValueError(
                f"{wanted} needs one process per device, but this process sees {self.n_gpu} devices and would use"
                f" nn.DataParallel: start {self.n_gpu} processes with `accelerate launch` or `torchrun`."
            )
        checkpointing: dict[str, Any] = {
            **(getattr(self, "gradient_checkpointing_kwargs", None) or {}),
            **(getattr(self, "activation_checkpointing_kwargs", None) or {}),
        }
        if checkpointing.get("use_reentrant"):
            raise ValueError(
                f"gradient checkpointing with use_reentrant=True cannot be combined with {wanted}: it hides the"
                " layers' autograd graph from the stages. Set gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        if self._splits_batches:
            raise ValueError(
                f"split_batches=True in accelerator_config cannot be combined with {wanted}: the batch of a pipeline"
                " is per_device_train_batch_size x stages. Unset it and lower per_device_train_batch_size."
            )

    def _refuse_impossible_layout(self, world_size: int) -> None:
        """Judged by the launcher's environment: a process that fails later may leave others waiting for it."""
        stages = self.pipeline_parallel_size
        wanted = f"pipeline_parallel_size={stages}"
        if stages == "auto" or world_size % stages == 0:
            return
        if world_size == 1:
            raise ValueError(
                f"{wanted}, but only one process runs: a pipeline needs one process per stage. Start {stages} with"
                f" `accelerate launch --num_processes {stages}` or `torchrun --nproc_per_node {stages}`. On CPU note"
                " that `accelerate launch --cpu` and `distributed_type: MULTI_CPU` start one process whatever the"
                " number; `distributed_type: MULTI_GPU` with `use_cpu=True` (or torchrun) starts them all."
            )
        divisors = ", ".join(str(k) for k in range(1, world_size + 1) if world_size % k == 0)
        raise ValueError(
            f"{wanted} does not divide the {world_size} processes: choose one of {divisors}, or start a multiple"
            f" of {stages} processes. (On CPU, `accelerate launch --cpu` and `distributed_type: MULTI_CPU` start one"
            " process whatever the number; use `distributed_type: MULTI_GPU` with `use_cpu=True`, or torchrun.)"
        )
