"""Training arguments of a pipeline run: those of `transformers.TrainingArguments` and those of the pipeline."""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames

from .errors import refuse_wrong_order, show_errors_briefly
from .file_formats import is_number
from .freezing.policies import FREEZE_POLICIES, FreezePolicy, check_when, make_policy
from .logs import follow_transformers
from .planning.layout import AUTO, REPLICA_SHARDINGS
from .planning.schedules import ONE_F_ONE_B, SCHEDULES, virtual_stages_of
from .resilience.exit import end_at_exit
from .resilience.stores import use_fresh_store, wait_for_connections

logger = logging.getLogger(__name__)
follow_transformers()

FUSED_BACKWARD_OPTIMIZERS = ("lomo", "adalomo", "layerwise")
"""Optimizers that update parameters during the backward, before the gradients are complete."""

LOSS_REDUCTIONS = ("sum", "mean")
"""How a loss may be declared to add up over the parts of a batch."""


DISTRIBUTED_BY_OTHERS = (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"))
"""Environment variables of Accelerate's launcher, and what distributes the model if one of them is set."""

CACHE_MODES = ("auto", "on", "off")
CACHE_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32}
"""Name -> data type in which hidden states are stored; None keeps the data type in which they are computed."""

MOST_SECONDS = 10**9
"""Upper bound for a timeout, in seconds; PyTorch does not support an infinite one."""


HOW_TO_LAUNCH_ON_CPU = (
    "On CPU, `accelerate launch --cpu` and `distributed_type: MULTI_CPU` start only one process, regardless of"
    " --num_processes; use `distributed_type: MULTI_GPU` with `use_cpu=True`, or torchrun."
)


class UnknownFieldError(TypeError, ValueError):
    """Raised for an argument that is not a field. It names the closest field.

    Args:
        owner: name of the class of the arguments.
        name: the argument.
        known: names of all fields.
    """

    def __init__(self, owner: str, name: str, known: Sequence[str]) -> None:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"Did you mean {close[0]!r}?" if close else "See its documentation for the fields."
        super().__init__(f"{owner} has no field {name!r}. {hint}")


def int_or_auto(name: str, value: int | str) -> int | Literal["auto"]:
    """Return the value of an argument.

    Raises:
        ValueError: it is neither a number of at least 1 nor "auto".
    """
    if value == "auto":
        return "auto"
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if number < 1 or isinstance(value, (bool, float)):
        raise ValueError(f"{name}={value!r} is invalid. Set it to an integer of at least 1, or to 'auto'.")
    return number


def _token_slices(value: Any) -> str | int | list[int]:
    """Parse `token_slices`, given in Python, in YAML or on the command line."""
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
            f"token_slices={given!r} is invalid. Set it to 'off', 'auto', a number of slices (at least 1), or a list"
            " of slice lengths, such as [512, 256, 256]."
        )
    return lengths if isinstance(value, (list, tuple)) else value


def _pipeline_layers(names: Any) -> list[str] | None:
    """Parse `pipeline_layers`."""
    if names is None:
        return None
    is_list = isinstance(names, (list, tuple)) and len(names) > 0
    if not is_list or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ValueError(
            f"pipeline_layers={names!r} is invalid. Set it to a list of different names of modules that contain the"
            " model's layers, such as ['model.blocks'], or leave it out."
        )
    return list(names)


def from_json(name: str, text: str) -> dict[str, Any]:
    """Return the value of an argument that is given as a JSON object.

    Raises:
        ValueError: it is none.
    """
    try:
        value = json.loads(text)
    except ValueError as error:  # also raised for integers with thousands of digits
        raise ValueError(
            f'{name}={text!r} is not valid JSON ({error}). Pass a JSON object such as {{"1": 4, "2": 7}}.'
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f'{name}={text!r} is not a JSON object. Pass one such as {{"1": 4, "2": 7}}.')
    return value


if TYPE_CHECKING:
    IntOrAuto = int | Literal["auto"]
    SlicesOrName = str | int | list[int]
else:

    class IntOrAuto:
        """Parses an int or "auto" for HfArgumentParser, which takes one type per argument and calls it."""

        def __new__(cls, text: str) -> int | str:
            return int_or_auto("value", text)

    class SlicesOrName:
        """Parses "off", "auto", an int or a list for HfArgumentParser."""

        def __new__(cls, text: str) -> str | int | list[int]:
            return _token_slices(text)


@dataclass
class PipeTransformerTrainingArguments(TrainingArguments):
    """
    Arguments of a [`PipeTransformerTrainer`].

    This class includes all arguments of `transformers.TrainingArguments` and the following ones.

    > Parameters that control the pipeline

    Args:
        pipeline_parallel_size (`int` or `"auto"`, *optional*, defaults to 1):
            Number of pipeline stages K that the model is split into, with one process per stage. It must divide the
            number of processes; the remaining factor, world size / K, is the number of data-parallel pipelines.
            `"auto"` selects the smallest number of stages that fits the devices' memory.
        pipeline_schedule (`str`, *optional*, defaults to `"1f1b"`):
            Order in which the forwards and backwards of the micro-batches run: `"1f1b"`, `"gpipe"`,
            `"interleaved1f1b"`, which gives each process several parts of the model and so shortens the time in which
            the pipeline fills and empties, for more messages, or `"zbv"`, which gives each process two parts, laid out
            there and back, and computes gradients of linear layers' weights when the process would otherwise wait.
        virtual_pipeline_parallel_size (`int`, *optional*):
            With `pipeline_schedule="interleaved1f1b"`, the number of parts of the model on each process (virtual
            stages, V in Megatron-LM): at least 2, which is the default, and the only number with `"zbv"`. While the
            model has too few layers that are not cached, there are fewer; with one part per process the schedule is
            `"1f1b"`.
        num_microbatches (`int` or `"auto"`, *optional*, defaults to `"auto"`):
            Number of micro-batches that each pipeline's batch is split into. All micro-batches have the same size, so
            the largest divisor of the number of samples in the batch up to this value is used. `"auto"` uses the
            largest divisor up to twice the number of stages. `"interleaved1f1b"`
            runs multiples of the number of stages, all numbers below twice it, and a few others.
        pipeline_layers (`list[str]`, *optional*):
            Names of the `nn.ModuleList` or `nn.Sequential` modules whose members are the model's layers and run in
            order, such as `("model.blocks",)`, for a model whose layers are not found, or where others should be
            split. Whether the model can be split there is checked as for layers that are found.
        loss_reduction (`str`, *optional*):
            How a loss of your own (`compute_loss`, `compute_loss_func`, a model that is not from transformers) adds up
            over the parts of a batch: `"sum"` if it divides by `num_items_in_batch`, `"mean"` if it is a mean over
            the labels other than -100. Unset, nothing is assumed: with several stages the loss runs on each
            pipeline's whole batch and calls the model as often and on whatever it likes; the replicas' losses are
            averaged, as under DDP. A declared loss runs on micro-batches, so that all schedules can be used, and
            replicas give the loss of the whole batch. The losses of transformers' own models need no declaration.
        token_slices (`str`, `int` or `list[int]`, *optional*, defaults to `"off"`):
            Whether to split the micro-batches of a causal language model along the sequence dimension as well, which
            keeps a pipeline busy when a batch has only a few long sequences (TeraPipe, ICML 2021). An `int` sets
            the number of equal slices. A list sets the lengths of the slices; the rest of a sequence forms one more
            slice. `"auto"` chooses slices and micro-batches with a dynamic program over the measured times of slices
            of different lengths. Sequences are not split while there is only one stage.
        replica_sharding (`str`, *optional*, defaults to `"none"`):
            What the data-parallel replicas of a stage divide among them. `"none"`: each replica holds everything.
            `"optimizer"`: each replica holds the optimizer state of its part of the stage's parameters, updates these,
            and receives the others from the other replicas after each step (ZeRO-1). The results are the same; it also
            works with a single stage. `"auto"`: the less of both with which the model fits the devices. To divide
            weights and gradients as well, use FSDP: `fsdp=True` with `fsdp_config={"version": 2}` and
            `pipeline_parallel_size=1`; layers can be frozen under it, but their outputs are not cached.

    > Parameters that control layer freezing

    Args:
        freeze_policy (`str`, *optional*, defaults to `"none"`):
            Policy that determines how many layers are frozen, from the bottom up, at each decision: `"none"`,
            `"alpha"`, `"adaptive"`, `"autofreeze"` or `"schedule"`. To use a policy of your own, pass it to the
            trainer.
        freeze_alpha (`float`, *optional*, defaults to 1/3):
            Fraction of the active layers, between 0 and 1, that the policies `"alpha"` and `"adaptive"` freeze at each
            decision (for `"adaptive"`, at most).
        freeze_strategy (`str`, *optional*, defaults to `"epoch"`):
            When freezing decisions are made: `"epoch"`, at the start of each epoch but the first, or `"steps"`, every
            `freeze_steps` optimizer steps.
        freeze_steps (`float`, *optional*):
            Number of optimizer steps between two decisions if `freeze_strategy="steps"`. A value below 1 is
            interpreted as a fraction of all training steps.
        freeze_schedule (`dict`, *optional*):
            Schedule for `freeze_policy="schedule"`. It maps an epoch (or a step, if `freeze_strategy="steps"`) to the
            number of layers that are frozen from then on, to a share of all layers between 0 and 1 (`{"0": 0.5}`: half
            of them from the start), or to `"all"` for as many as can be frozen. On the command line it is given as
            JSON.
        max_frozen_layers (`int`, *optional*):
            Upper bound on the number of frozen layers.
        elastic (`bool`, *optional*, defaults to `True`):
            Whether to repack the layers into fewer stages after a freeze, if they fit, and to use the freed devices
            as data-parallel replicas.

    > Parameters that control the cache of frozen layers' outputs

    Args:
        activation_cache (`str`, *optional*, defaults to `"auto"`):
            Whether to store the outputs of frozen layers, and of what else is frozen in a model of one stage, for
            each sample, and to read them in the next epochs instead of computing them again: `"auto"` (only if it is
            measured to be faster), `"on"` or `"off"`. Outputs from the cache equal computed ones up to rounding, so
            with `"auto"` two runs of the same command may differ by rounding if their measurements decide
            differently; `"on"` and `"off"` repeat bit for bit. If the output of a model's frozen layers for a sample
            depends on the rest of the batch, the model is trained without the cache, and the reason is logged.
        activation_cache_dir (`str`, *optional*):
            Directory in which the cache creates its own, `_hf_pipetransformer_cache`; nothing else in it is touched.
            It should be on a local disk, and the cache should preferably fit into the page cache. Without
            it, the cache is `_hf_pipetransformer_run_cache` in `output_dir`, and is removed when training ends.
        activation_cache_dtype (`str`, *optional*, defaults to `"auto"`):
            Data type in which the outputs are stored. `"auto"` keeps the data type in which they are computed.
            `"bf16"` takes half of the space of fp32, at the cost of precision. `"fp32"` stores them in fp32.
        activation_cache_max_gib (`float`, *optional*):
            Maximum size of the cache on each node, in GiB; by default a fifth of the disk's free space. It never
            uses more than 80% of the free space, whatever the limit. Samples that do not fit are recomputed.
        eval_frozen_modules (`bool`, *optional*, defaults to `False`):
            Whether modules all of whose parameters are frozen run in evaluation mode while the model trains: without
            dropout, and with the running statistics of batch normalisation. The stock `Trainer` runs them in training
            mode, where dropout makes their outputs random, so that nothing of them can be stored. Layers that a
            `freeze_policy` has frozen always run in evaluation mode.

    > Parameters that control the handling of failed processes

    Args:
        watchdog_timeout (`float`, *optional*, defaults to 30):
            Number of seconds after which a process that is stopped, or makes no progress in a training step, is
            considered hung. All processes then exit with a message that names the hung process and where it stopped.
            The limit is five times the longest step if that is longer, ten times `watchdog_timeout` while data is
            loaded, and `ddp_timeout` in callbacks and while files are written. A process that dies is named within
            seconds. `0` disables the watchdog, which is useful for debugging.

    > Defaults that differ from `TrainingArguments`

    - `use_cpu` is set if there is no accelerator.
    - `average_tokens_across_devices` is set to `False`, because the trainer itself counts the items of the global
      batch, for any combination of pipeline and data parallelism.

    With a single stage, the stock `Trainer` runs unchanged, with its own defaults, if FSDP, DeepSpeed,
    `torch_compile`, several devices in one process, `auto_find_batch_size`, `bf16_full_eval`, `fp16_full_eval` or
    another setting that distributes or converts the model is used.
    """

    pipeline_parallel_size: IntOrAuto = field(
        default=1,
        metadata={"help": "Number of pipeline stages, or 'auto': the smallest that fits the devices' memory."},
    )
    pipeline_schedule: str = field(
        default="1f1b",
        metadata={
            "help": "Order of the micro-batches: '1f1b', 'gpipe', or with several parts of the model on each process"
            " 'interleaved1f1b' or 'zbv'.",
            "choices": list(SCHEDULES),
        },
    )
    virtual_pipeline_parallel_size: int | None = field(
        default=None,
        metadata={"help": "With 'interleaved1f1b': parts of the model (virtual stages) on each process; unset: 2."},
    )
    num_microbatches: IntOrAuto = field(
        default="auto",
        metadata={"help": "Micro-batches per pipeline and step, or 'auto'."},
    )
    pipeline_layers: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the modules that contain the model's layers, in order; unset: they are found."},
    )
    loss_reduction: str | None = field(
        default=None,
        metadata={
            "help": "How a loss of your own adds up over the parts of a batch: 'sum' or 'mean'; unset: it is computed"
            " on the whole batch.",
            "choices": list(LOSS_REDUCTIONS),
        },
    )
    token_slices: SlicesOrName = field(
        default="off",
        metadata={"help": "Slices along the tokens of a sequence: 'off', 'auto', a number, or lengths as JSON."},
    )
    replica_sharding: str = field(
        default="none",
        metadata={
            "help": "What the replicas of a stage divide: 'none', or the 'optimizer' state (ZeRO-1).",
            "choices": [*REPLICA_SHARDINGS, AUTO],
        },
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
        default=None, metadata={"help": "Epoch (or step) -> number or share of frozen layers, as JSON."}
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
        default=None, metadata={"help": "Where to keep them. By default in output_dir, as long as training lasts."}
    )
    activation_cache_dtype: str = field(
        default="auto", metadata={"help": "How to keep them.", "choices": list(CACHE_DTYPES)}
    )
    activation_cache_max_gib: float | None = field(default=None, metadata={"help": "Size limit on each node."})
    eval_frozen_modules: bool = field(
        default=False, metadata={"help": "Run modules that are frozen in evaluation mode, without dropout."}
    )

    watchdog_timeout: float = field(
        default=30.0, metadata={"help": "Seconds after which a process that hangs ends the job; 0: never."}
    )

    def __new__(cls, *positional: Any, **keywords: Any) -> PipeTransformerTrainingArguments:
        """Refuse a field that does not exist, naming the closest one.

        Raises:
            UnknownFieldError: there is no such field.
        """
        accepted = inspect.signature(cls.__init__).parameters
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values()):
            for name in keywords:
                if name not in accepted:
                    show_errors_briefly()
                    raise UnknownFieldError(cls.__name__, name, list(accepted)[1:])
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # a dataclass takes the defaults of its first base for all fields that this one has, inherited ones too
        refuse_wrong_order(cls, PipeTransformerTrainingArguments, TrainingArguments, first=False)

    def __post_init__(self) -> None:
        show_errors_briefly()
        self._check_cache()
        self._check_watchdog()
        self.pipeline_parallel_size = int_or_auto("pipeline_parallel_size", self.pipeline_parallel_size)
        self.num_microbatches = int_or_auto("num_microbatches", self.num_microbatches)
        self.token_slices = _token_slices(self.token_slices)
        self.pipeline_layers = _pipeline_layers(self.pipeline_layers)
        if self.pipeline_schedule not in tuple(SCHEDULES):  # of any type, also one that cannot be hashed
            raise ValueError(
                f"pipeline_schedule={self.pipeline_schedule!r} is not supported. Set it to one of"
                f" {', '.join(map(repr, SCHEDULES))}."
            )
        self._check_sharding()
        virtual_stages_of(self.pipeline_schedule, self.virtual_pipeline_parallel_size)  # raises if they do not fit
        if not isinstance(self.elastic, bool):
            raise ValueError(f"elastic={self.elastic!r} is invalid. Set it to True or False.")
        if isinstance(self.freeze_schedule, str):
            self.freeze_schedule = from_json("freeze_schedule", self.freeze_schedule)
        self.make_freeze_policy()  # raises if a value is out of range
        check_when(self.freeze_strategy, self.freeze_steps, self.max_frozen_layers)
        self._check_slices()
        self._check_loss_reduction()
        if self.uses_pipeline:
            self._refuse_what_excludes_a_pipeline()
            self._refuse_single_process()
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
            if self.enable_jit_checkpoint:
                raise ValueError(
                    "enable_jit_checkpoint=True is not supported, because each process would save a checkpoint at a"
                    " different step. Unset it: PipeTransformerTrainer already handles SIGTERM by saving a checkpoint"
                    " at the same step on all processes and exiting."
                )
        try:
            self._refuse_sharding_by_others()
            if self.uses_pipeline:
                self._refuse_what_only_now_is_known()
        except ValueError:
            if dist.is_initialized():
                dist.barrier()  # if a process exited now, others would wait for it to connect
            raise

    def _warn_of_unused(self) -> None:
        """Warn about fields without effect. They are no error, as a configuration file may hold them for later."""
        needs = (("freeze_schedule", "freeze_policy", "schedule"), ("freeze_steps", "freeze_strategy", "steps"))
        for name, other, wanted in needs:
            value, found = getattr(self, name), getattr(self, other)
            if value is not None and found != wanted:
                logger.warning(
                    "%s=%r has no effect: it requires %s=%r, but the current value is %r.",
                    name,
                    value,
                    other,
                    wanted,
                    found,
                )

    @property
    def num_virtual_stages(self) -> int:
        """Number of virtual stages per stage that the plans should have."""
        return virtual_stages_of(self.pipeline_schedule, self.virtual_pipeline_parallel_size)

    @property
    def slices_tokens(self) -> bool:
        """Whether sequences are split along their tokens."""
        return self.token_slices != "off"

    def _check_slices(self) -> None:
        if not self.slices_tokens:
            return
        wanted = f"token_slices={self.token_slices!r}"
        if not self.uses_pipeline:
            raise ValueError(
                f"{wanted} requires several stages, but pipeline_parallel_size is 1. Increase pipeline_parallel_size,"
                " or set token_slices='off'."
            )
        if self.pipeline_schedule != ONE_F_ONE_B.name:
            raise ValueError(
                f"{wanted} requires pipeline_schedule='1f1b', but it is {self.pipeline_schedule!r}. Set"
                " pipeline_schedule='1f1b', or token_slices='off'."
            )
        if self.label_smoothing_factor:
            raise ValueError(
                f"{wanted} cannot be combined with label_smoothing_factor={self.label_smoothing_factor}: label"
                " smoothing shifts the labels within each slice, so that every slice would lose one label. Set"
                " label_smoothing_factor=0."
            )
        if self.full_determinism and self.token_slices == "auto":
            raise ValueError(
                f"{wanted} cannot be combined with full_determinism=True, because it chooses the slices from measured"
                " times, which differ between runs. Set token_slices to a number of slices."
            )
        if self.activation_cache == "on":
            raise ValueError(
                f"{wanted} cannot be combined with activation_cache='on', because the cache stores whole samples. Set"
                " activation_cache='off' or token_slices='off'."
            )

    def _check_loss_reduction(self) -> None:
        if self.loss_reduction not in (None, *LOSS_REDUCTIONS):
            raise ValueError(
                f"loss_reduction={self.loss_reduction!r} is not supported. Set it to one of"
                f" {', '.join(map(repr, LOSS_REDUCTIONS))}, or leave it out."
            )

    def _check_sharding(self) -> None:
        """Refuse an unknown `replica_sharding`, and what leaves it without effect."""
        if self.fp16 and not self.max_grad_norm and (self.uses_pipeline or self.replica_sharding != "none"):
            raise ValueError(
                f"fp16=True with max_grad_norm={self.max_grad_norm} cannot be combined with"
                f" pipeline_parallel_size={self.pipeline_parallel_size} and"
                f" replica_sharding={self.replica_sharding!r}: an overflow is noticed when gradients are clipped, and"
                " otherwise only some processes would skip the step. Set max_grad_norm to a large number, such as 1e9."
            )
        allowed = (*REPLICA_SHARDINGS, AUTO)
        if self.replica_sharding == "full":
            remedy = (
                "with several stages, whose weights had to be whole in each step, it needed more memory than"
                " replica_sharding='optimizer'. Set that, or pipeline_parallel_size=1 and FSDP"
                if self.uses_pipeline
                else "FSDP does the same. Set replica_sharding='none' and FSDP, or replica_sharding='optimizer'"
            )
            raise ValueError(
                f"replica_sharding='full' is no longer supported: {remedy}. FSDP is fsdp='full_shard' with"
                " fsdp_config={'version': 2}, under which layers can be frozen as well. Checkpoints that were saved"
                " under 'full' resume under 'none' and 'optimizer'."
            )
        if self.fsdp and self.activation_cache == "on":
            raise ValueError(
                f"activation_cache='on' cannot be combined with fsdp={self.fsdp!r}: all processes gather a layer that"
                " runs, and none may skip it because it finds its own samples in the cache. Set"
                " activation_cache='off', or replica_sharding='optimizer' instead of fsdp."
            )
        if self.replica_sharding not in allowed:
            raise ValueError(
                f"replica_sharding={self.replica_sharding!r} is not supported. Set it to one of"
                f" {', '.join(map(repr, allowed))}."
            )

    def _refuse_sharding_by_others(self) -> None:
        """Refuse `replica_sharding` where the stock Trainer runs, which may distribute the model in another way."""
        if self.replica_sharding == "none":
            return
        for variable, name in DISTRIBUTED_BY_OTHERS:
            if os.environ.get(variable, "false").lower() in ("true", "1"):
                raise ValueError(
                    f"replica_sharding={self.replica_sharding!r} cannot be combined with {name}, which Accelerate's"
                    f" configuration asks for ({variable}). Set replica_sharding='none', or remove it there."
                )
        if self.leaves_model_to_trainer:
            raise ValueError(
                f"replica_sharding={self.replica_sharding!r} cannot be combined with a setting for which the stock"
                " Trainer runs (fsdp, deepspeed, torch_compile, several devices in one process, auto_find_batch_size,"
                " parallelism_config, fp16_full_eval, bf16_full_eval, split_batches, an optim that updates during the"
                " backward). Set replica_sharding='none', or unset it."
            )

    def _check_cache(self) -> None:
        for name, values in (("activation_cache", CACHE_MODES), ("activation_cache_dtype", tuple(CACHE_DTYPES))):
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not supported. Set it to one of"
                    f" {', '.join(map(repr, values))}."
                )
        if not isinstance(self.eval_frozen_modules, bool):
            raise ValueError(f"eval_frozen_modules={self.eval_frozen_modules!r} is invalid. Set it to True or False.")
        limit = self.activation_cache_max_gib
        if limit is not None and not (is_number(limit) and limit > 0):
            raise ValueError(
                f"activation_cache_max_gib={limit!r} is invalid. Set it to a number above 0, or set"
                " activation_cache='off' to disable the cache."
            )
        folder = self.activation_cache_dir
        if not (folder is None or isinstance(folder, (str, Path))) or "\0" in str(folder):
            raise ValueError(f"activation_cache_dir={folder!r} is invalid. Set it to the path of a folder.")

    def _check_watchdog(self) -> None:
        seconds = self.watchdog_timeout
        if not is_number(seconds) or (seconds != 0 and not 1 <= seconds <= MOST_SECONDS):
            raise ValueError(
                f"watchdog_timeout={seconds!r} is invalid. Set it to between 1 and {MOST_SECONDS} seconds, or to 0 to"
                " disable the watchdog."
            )

    def make_freeze_policy(self) -> FreezePolicy:
        """Return the freeze policy that the fields describe.

        Raises:
            ValueError: the name is unknown, or a value is out of range.
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
        """Whether the Trainer moves the model to the device. The pipeline moves each stage's parameters itself."""
        return super().place_model_on_device if self.leaves_model_to_trainer else False

    @property
    def leaves_model_to_trainer(self) -> bool:
        """Whether the stock Trainer runs: with one stage, if something else distributes or compiles the model."""
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
            or (self.enable_jit_checkpoint and self.world_size == 1)
            or any(name in str(self.optim) for name in FUSED_BACKWARD_OPTIMIZERS)
        )

    @property
    def _splits_batches(self) -> bool:
        return isinstance(self.accelerator_config, AcceleratorConfig) and self.accelerator_config.split_batches

    def _refuse_what_excludes_a_pipeline(self) -> None:
        """Refuse settings that are incompatible with several stages and are known before any device is set up."""
        wanted = f"pipeline_parallel_size={self.pipeline_parallel_size}"
        for name, why in (
            ("fsdp", "it shards a whole model; replica_sharding='optimizer' divides the state of replicas"),
            ("deepspeed", "DeepSpeed distributes the model itself"),
            ("torch_compile", "a compiled forward cannot be split between two layers"),
            ("torch_compile_backend", "a compiled forward cannot be split between two layers"),
            ("torch_compile_mode", "a compiled forward cannot be split between two layers"),
            ("parallelism_config", "Accelerate's own parallelism arranges the processes differently"),
            ("fp16_full_eval", "the stages keep the precision they train in; use bf16 or fp16 mixed precision"),
            ("bf16_full_eval", "the stages keep the precision they train in; use bf16 or fp16 mixed precision"),
            ("save_on_each_node", "only the first process collects the weights of all stages"),
            ("auto_find_batch_size", "each stage runs out of memory at its own batch size, and all need the same"),
        ):
            value = getattr(self, name, None)
            if value:
                raise ValueError(
                    f"{name}={value!r} cannot be combined with {wanted}: {why}. Unset {name}, or set"
                    " pipeline_parallel_size=1."
                )
        for variable, name in DISTRIBUTED_BY_OTHERS:
            if os.environ.get(variable, "false").lower() in ("true", "1"):
                raise ValueError(
                    f"{name} is enabled by the launcher ({variable}) and cannot be combined with {wanted}. Launch with"
                    " a configuration that does not enable it (for example one of accelerate_configs/), or set"
                    " pipeline_parallel_size=1."
                )
        optimizer = OptimizerNames(self.optim).value
        if any(name in optimizer for name in FUSED_BACKWARD_OPTIMIZERS):
            raise ValueError(
                f"optim={optimizer!r} cannot be combined with {wanted}: it updates parameters during the backward"
                " pass, before their gradients are complete. Set another optim, such as 'adamw_torch'."
            )
        if "underflow_overflow" in str(self.debug):
            raise ValueError(
                f"debug='underflow_overflow' cannot be combined with {wanted}: during training the parameters of"
                " other stages are placeholders that contain NaN. Set pipeline_parallel_size=1 for debugging."
            )
        if str(self.train_sampling_strategy) == "batch_rebalance":
            raise ValueError(
                f"train_sampling_strategy='batch_rebalance' cannot be combined with {wanted}: it balances the batches"
                " over processes, not over pipelines. Set train_sampling_strategy='group_by_length'."
            )

    def _refuse_what_only_now_is_known(self) -> None:
        """Refuse unsupported devices of this process, and unsupported settings that arrive as JSON."""
        wanted = f"pipeline_parallel_size={self.pipeline_parallel_size}"
        if self.n_gpu > 1:
            raise ValueError(
                f"{wanted} needs one process per device, but this process sees {self.n_gpu} devices and would use"
                f" nn.DataParallel. Start {self.n_gpu} processes with `accelerate launch` or `torchrun`."
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
                f"split_batches=True in accelerator_config cannot be combined with {wanted}: the batch size of a"
                " pipeline is per_device_train_batch_size x number of stages. Unset split_batches and reduce"
                " per_device_train_batch_size instead."
            )

    def _refuse_single_process(self) -> None:
        """Refuse several stages in one process, by the launcher's environment variables: it may fail to be set up."""
        known = dist.is_available() and dist.is_initialized()
        stages = self.pipeline_parallel_size
        if stages == AUTO or (dist.get_world_size() if known else int(os.environ.get("WORLD_SIZE", 1))) > 1:
            return
        raise ValueError(
            f"pipeline_parallel_size={stages}, but only one process runs: a pipeline needs one process per stage."
            f" Start {stages} with `accelerate launch --num_processes {stages}` or `torchrun --nproc_per_node"
            f" {stages}`. {HOW_TO_LAUNCH_ON_CPU}"
        )

    def refuse_impossible_layout(self, model: Any) -> None:
        """Refuse a number of stages that does not divide the number of processes, and say how many layers there are.

        Args:
            model: the model that is to be trained; None if it is not known yet.

        Raises:
            ValueError: K does not divide the number of processes. Every process raises it.
        """
        stages, world_size = self.pipeline_parallel_size, self.world_size
        if isinstance(stages, str) or world_size % stages == 0:
            return
        config = getattr(model, "config", None)
        layers = getattr(config, "num_hidden_layers", None)
        most = layers if isinstance(layers, int) and not getattr(config, "is_encoder_decoder", False) else None
        divisors = [k for k in range(1, world_size + 1) if world_size % k == 0 and (most is None or k <= most)]
        too_many = most is not None and stages > most
        fitting = f" The model has {most} layers, and each stage needs at least one." if too_many else ""
        start = "" if too_many else f", or start a multiple of {stages} processes"
        raise ValueError(
            f"pipeline_parallel_size={stages} does not divide the {world_size} processes.{fitting} Set it to one of"
            f" {', '.join(map(str, divisors))}{start}. ({HOW_TO_LAUNCH_ON_CPU})"
        )


@contextmanager
def naming_lost_arguments(args: PipeTransformerTrainingArguments) -> Iterator[None]:
    """Inside the context, another library's trainer may turn arguments into its own class, which lacks our fields.

    Raises:
        ValueError: its class has been called with our fields.
    """
    try:
        yield
    except TypeError as error:
        ours = {one.name for one in fields(args)} - {one.name for one in fields(TrainingArguments)}
        if "unexpected keyword argument" not in str(error) or not any(f"'{name}'" in str(error) for name in ours):
            raise
        library = str(error).partition(".__init__")[0]
        raise ValueError(
            f"args is a {type(args).__name__}, which the trainer turns into {library}, and {error}. Pass a dataclass"
            f" that derives from both: class Arguments({library}, PipeTransformerTrainingArguments)."
        ) from error
