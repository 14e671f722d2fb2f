"""Training arguments: `transformers.TrainingArguments`, and fields for the pipeline, freezing and the cache."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import TrainingArguments

from .argument_conflicts import known_at_once, known_later, refuse, splits_batches, updates_in_backward
from .argument_values import (
    CACHED,
    FREEZE_POLICIES,
    LAYERS,
    LOSS_REDUCTIONS,
    NO_FREEZING,
    IntOrAuto,
    SlicesOrName,
    UnknownFieldError,
    check_cache,
    freezing_for,
    from_json,
    hint_about_cpu,
    int_or_auto,
    module_names,
    token_slices_of,
)
from .errors import show_errors_briefly
from .file_formats import is_number
from .logs import follow_transformers
from .method_order import refuse_wrong_order
from .planning.layout import AUTO, REPLICA_SHARDINGS
from .planning.schedules import SCHEDULES, virtual_stages_of
from .resilience.exit import end_at_exit
from .resilience.stores import use_fresh_store, wait_for_connections

if TYPE_CHECKING:
    from .parts.freezing.policies import FreezePolicy

logger = logging.getLogger(__name__)
follow_transformers()

CACHE_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32}
"""Name -> data type of the stored hidden states; None keeps the data type of the computation."""

MOST_SECONDS = 10**9
"""Upper bound for a timeout, in seconds; PyTorch does not support an infinite one."""

CHOICES: dict[str, Collection[Any]] = {
    "pipeline_schedule": SCHEDULES,  # the table itself: users may add entries later
    "loss_reduction": (*LOSS_REDUCTIONS, None),
    "activation_cache": ("auto", "on", "off"),
    "activation_cache_dtype": tuple(CACHE_DTYPES),
    "elastic": (True, False),
    "eval_frozen_modules": (True, False),
    "replica_sharding": (*REPLICA_SHARDINGS, AUTO),
}
"""Field name -> its valid values, for fields with a fixed set of values."""


@dataclass
class PipeTransformerTrainingArguments(TrainingArguments):
    """
    Arguments of a [`PipeTransformerTrainer`].

    This class includes all arguments of `transformers.TrainingArguments` and the following ones.

    ```python
    args = PipeTransformerTrainingArguments("out", pipeline_parallel_size=4, freeze_policy="alpha")
    trainer = PipeTransformerTrainer(model, args, train_dataset=dataset)
    trainer.train()
    ```

    > Parameters that control the pipeline

    Args:
        pipeline_parallel_size (`int` or `"auto"`, *optional*, defaults to 1):
            Number of pipeline stages K that the model is split into, with one process per stage. It must divide the
            number of processes; the remaining factor, world size / K, is the number of data-parallel pipelines.
            `"auto"` selects the smallest number of stages that fits the devices' memory.
        pipeline_schedule (`str`, *optional*, defaults to `"1f1b"`):
            Order of the micro-batches' forwards and backwards: `"1f1b"`, `"gpipe"`, `"interleaved1f1b"` or `"zbv"`.
            With `"interleaved1f1b"` each process holds several parts of the model: the pipeline fills and empties
            faster, but sends more messages. With `"zbv"` each process holds two parts, in a V shape, and computes the
            weight gradients of linear layers while it would otherwise wait.
        virtual_pipeline_parallel_size (`int`, *optional*):
            Number of parts of the model on each process (virtual stages, V in Megatron-LM). `"interleaved1f1b"` needs
            at least 2, the default; `"zbv"` always uses 2. If too few layers remain uncached, fewer parts are used;
            with one part per process the schedule is `"1f1b"`.
        num_microbatches (`int` or `"auto"`, *optional*, defaults to `"auto"`):
            Number of micro-batches that each pipeline's batch is split into. All micro-batches have the same size, so
            the largest divisor of the number of samples in the batch up to this value is used. `"auto"` uses the
            largest divisor up to twice the number of stages. `"interleaved1f1b"` runs multiples of the number of
            stages, all numbers below twice that number, and a few others.
        pipeline_layers (`list[str]`, *optional*):
            Names of the `nn.ModuleList` or `nn.Sequential` modules that contain the model's layers in order, such as
            `("model.blocks",)`. Set it if the trainer does not find the layers, or finds others than you want to
            split. The same checks run as for layers that the trainer finds.
        loss_reduction (`str`, *optional*):
            How a loss of your own (`compute_loss`, `compute_loss_func`, a model that is not from transformers) adds up
            over the parts of a batch: `"sum"` if it divides by `num_items_in_batch`, `"mean"` if it is a mean over all
            labels except -100 (if it shifts them, set the first of each sample to -100). If unset, the loss runs, with
            several stages, on each pipeline's whole batch, may call the model several times and on any inputs, and is
            averaged over replicas, as under DDP. A declared loss runs on micro-batches: it works with all schedules,
            and replicas return the loss of the whole batch. The losses of transformers' own models need no
            declaration.
        token_slices (`str`, `int` or `list[int]`, *optional*, defaults to `"off"`):
            Whether to split the micro-batches of a causal language model along the sequence dimension as well. This
            keeps a pipeline busy when a batch has only a few long sequences (TeraPipe, ICML 2021). An `int` sets the
            number of equal slices. A list sets the lengths of the slices; the rest of a sequence forms one more slice.
            `"auto"` chooses slices and micro-batches with a dynamic program over the measured times of slices of
            different lengths. Splitting needs several stages; once a single stage is left, sequences stay whole.
        replica_sharding (`str`, *optional*, defaults to `"none"`):
            State that the data-parallel replicas of a stage shard. `"none"`: each replica holds everything.
            `"optimizer"`: each replica holds the optimizer state of its share of the stage's parameters, updates this
            share, and receives the rest from the other replicas after each step (ZeRO-1). The results are the same,
            and a single stage supports it too. `"auto"`: `"none"` if the model fits the devices, otherwise
            `"optimizer"`. To shard weights and gradients as well, use FSDP with `pipeline_parallel_size=1`,
            `fsdp=True` and `fsdp_config={"version": 2}`; it supports freezing, but not the cache.

    > Parameters that control layer freezing

    Args:
        freeze_policy (`str`, *optional*, defaults to `"none"`):
            Policy that sets how many layers, from the bottom up, are frozen at each decision: `"none"`, `"alpha"`,
            `"adaptive"`, `"autofreeze"` or `"schedule"`. To use a policy of your own, pass it to the trainer.
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
            Schedule for `freeze_policy="schedule"`. It maps an epoch (or a step, if `freeze_strategy="steps"`) to a
            number of frozen layers, to a fraction of all layers between 0 and 1 (`{"0": 0.5}` freezes half of them
            from the start), or to `"all"` for as many as can be frozen. Pass it as JSON on the command line.
        max_frozen_layers (`int`, *optional*):
            Upper bound on the number of frozen layers.
        elastic (`bool`, *optional*, defaults to `True`):
            Whether to repack the layers into fewer stages after a freeze, if they fit, and to use the freed devices as
            data-parallel replicas.

    > Parameters that control the cache of frozen layers' outputs

    Args:
        activation_cache (`str`, *optional*, defaults to `"auto"`):
            Whether to store the outputs of frozen layers for each sample and read them in later epochs instead of
            recomputing them: `"auto"` (only if reading is measured to be faster), `"on"` or `"off"`. With a single
            stage it also covers modules that you have frozen yourself. Cached outputs equal computed ones up to
            rounding: two runs with `"auto"` may differ by rounding if their measurements differ, while `"on"` and
            `"off"` repeat bit for bit. If a sample's output depends on the rest of the batch, the model trains without
            the cache, and the log gives the reason.
        activation_cache_dir (`str`, *optional*):
            Directory for the cache, which creates a folder `_hf_pipetransformer_cache` in it and touches no other
            file. Use a local disk; the cache should preferably fit into the page cache. If unset, the cache is
            `_hf_pipetransformer_run_cache` in `output_dir` and is removed when training ends. Entries that later
            evaluations can read are removed with the trainer.
        activation_cache_dtype (`str`, *optional*, defaults to `"auto"`):
            Data type of the stored outputs: `"auto"` (the data type of the computation), `"bf16"` (half the space of
            fp32, at the cost of precision) or `"fp32"`.
        activation_cache_max_gib (`float`, *optional*):
            Maximum size of the cache on each node, in GiB; by default a fifth of the disk's free space. Even with a
            higher limit, the cache never uses more than 80% of the free space. Samples that do not fit are recomputed.
        cached_modules (`list[str]`, *optional*):
            Names of frozen modules with code of your own that the cache may store (`trainer.teacher` if the loss calls
            it). You thereby declare that a module's output for a sample depends only on the sample and the module's
            weights, buffers and attributes. Modules of known libraries need no declaration.
        eval_frozen_modules (`bool`, *optional*, defaults to `False`):
            Whether fully frozen modules run in evaluation mode during training: without dropout, and with the running
            statistics of batch normalisation. The stock `Trainer` runs them in training mode; their outputs are then
            random if they have dropout, and cannot be cached. Layers frozen by a `freeze_policy` always run in
            evaluation mode.

    > Parameters that control the handling of failed processes

    Args:
        watchdog_timeout (`float`, *optional*, defaults to 30):
            Seconds without progress in a training step after which a process counts as hung. All processes then exit
            with a message that names the hung process and where it stopped. The limit is five times the longest step
            if that is longer, ten times `watchdog_timeout` while data is loaded, and `ddp_timeout` in callbacks and
            while files are written. A process that dies is named within seconds. `0` disables the watchdog, for
            example to debug.

    > Defaults that differ from `TrainingArguments`

    - `use_cpu` is set if there is no accelerator.
    - `average_tokens_across_devices` is set to `False`, because the trainer itself counts the items of the global
      batch, for any combination of pipeline and data parallelism.

    With a single stage, the stock `Trainer` runs unchanged and with its own defaults under FSDP, DeepSpeed,
    `torch_compile`, several devices in one process, `auto_find_batch_size`, `bf16_full_eval`, `fp16_full_eval` or
    another setting that distributes or converts the model.
    """

    pipeline_parallel_size: IntOrAuto = field(
        default=1, metadata={"help": "Number of stages, or 'auto': the smallest that fits the devices' memory."}
    )
    pipeline_schedule: str = field(
        default="1f1b",
        metadata={
            "help": "Order of the micro-batches; 'interleaved1f1b' and 'zbv' use several parts per process.",
            "choices": list(SCHEDULES),
        },
    )
    virtual_pipeline_parallel_size: int | None = field(
        default=None, metadata={"help": "With 'interleaved1f1b': virtual stages per process; default 2."}
    )
    num_microbatches: IntOrAuto = field(default="auto", metadata={"help": "Micro-batches per step, or 'auto'."})
    pipeline_layers: list[str] | None = field(
        default=None, metadata={"help": "Modules that contain the model's layers; by default they are found."}
    )
    loss_reduction: str | None = field(
        default=None,
        metadata={
            "help": "How your own loss adds up over parts of a batch; by default it runs on the whole batch.",
            "choices": list(LOSS_REDUCTIONS),
        },
    )
    token_slices: SlicesOrName = field(
        default="off", metadata={"help": "Slices of a sequence: 'off', 'auto', a number, or their lengths as JSON."}
    )
    replica_sharding: str = field(
        default="none",
        metadata={
            "help": "State that a stage's replicas shard: 'none', 'optimizer' (ZeRO-1) or 'auto'.",
            "choices": [*REPLICA_SHARDINGS, AUTO],
        },
    )

    freeze_policy: str = field(
        default="none",
        metadata={
            "help": "Policy that sets how many layers are frozen at each decision, from the bottom up.",
            "choices": list(FREEZE_POLICIES),
        },
    )
    freeze_alpha: float = field(
        default=1 / 3, metadata={"help": "Fraction of the active layers that 'alpha' and 'adaptive' freeze."}
    )
    freeze_strategy: str = field(
        default="epoch",
        metadata={"help": "When to decide: at the start of each 'epoch', or every freeze_steps 'steps'."},
    )
    freeze_steps: float | None = field(
        default=None, metadata={"help": "Optimizer steps between decisions; below 1: a fraction of all steps."}
    )
    freeze_schedule: dict | str | None = field(
        default=None, metadata={"help": "Epoch (or step) -> number or fraction of frozen layers, as JSON."}
    )
    max_frozen_layers: int | None = field(default=None, metadata={"help": "Maximum number of frozen layers."})
    elastic: bool = field(
        default=True, metadata={"help": "Use the devices that freezing frees as data-parallel replicas."}
    )

    activation_cache: str = field(
        default="auto",
        metadata={
            "help": "Store frozen layers' outputs and read them in later epochs.",
            "choices": list(CHOICES["activation_cache"]),
        },
    )
    activation_cache_dir: str | None = field(
        default=None, metadata={"help": "Directory of the cache; by default in output_dir, until training ends."}
    )
    activation_cache_dtype: str = field(
        default="auto", metadata={"help": "Data type of the stored outputs.", "choices": list(CACHE_DTYPES)}
    )
    activation_cache_max_gib: float | None = field(
        default=None, metadata={"help": "Maximum size on each node, in GiB."}
    )
    cached_modules: list[str] | None = field(
        default=None, metadata={"help": "Frozen modules with code of your own that may be cached."}
    )
    eval_frozen_modules: bool = field(
        default=False, metadata={"help": "Run frozen modules in evaluation mode, without dropout."}
    )

    watchdog_timeout: float = field(
        default=30.0, metadata={"help": "Seconds after which a hung process ends the job; 0 disables the watchdog."}
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
        # a dataclass takes its first base's defaults for all fields of that base, including inherited ones
        refuse_wrong_order(cls, PipeTransformerTrainingArguments, TrainingArguments, first=False)

    def __post_init__(self) -> None:
        show_errors_briefly()
        self.drops_last_as_given = self.dataloader_drop_last
        self._check_values()
        self.pipeline_parallel_size = int_or_auto("pipeline_parallel_size", self.pipeline_parallel_size)
        self.num_microbatches = int_or_auto("num_microbatches", self.num_microbatches)
        self.token_slices = token_slices_of(self.token_slices)
        self.pipeline_layers = module_names("pipeline_layers", LAYERS, self.pipeline_layers)
        self.cached_modules = module_names("cached_modules", CACHED, self.cached_modules)
        virtual_stages_of(self.pipeline_schedule, self.virtual_pipeline_parallel_size)  # raises if they do not fit
        if isinstance(self.freeze_schedule, str):
            self.freeze_schedule = from_json("freeze_schedule", self.freeze_schedule)
        if (self.freeze_policy, self.freeze_strategy, self.freeze_steps, self.max_frozen_layers) != NO_FREEZING:
            self.make_freeze_policy()  # raises if a value is out of range
            freezing_for(self.freeze_policy).check_when(
                self.freeze_strategy, self.freeze_steps, self.max_frozen_layers
            )
        refuse(known_at_once(self))
        if self.uses_pipeline:
            self._refuse_single_process()
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
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
        try:
            refuse(known_later(self))
        except ValueError:
            if dist.is_initialized():
                dist.barrier()  # if a process exited now, others would wait for it to connect
            raise

    def _warn_of_unused(self) -> None:
        """Warn about fields without effect. A configuration file may set them for later, so they are not an error."""
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
        """Number of virtual stages per stage."""
        return virtual_stages_of(self.pipeline_schedule, self.virtual_pipeline_parallel_size)

    @property
    def slices_tokens(self) -> bool:
        """Whether sequences are split along their tokens."""
        return self.token_slices != "off"

    def _check_values(self) -> None:
        """Refuse values that a field cannot have."""
        if self.replica_sharding == "full":
            why = "FSDP does the same. Set replica_sharding='none' and FSDP, or replica_sharding='optimizer'"
            if self.pipeline_parallel_size != 1:
                why = (
                    "with several stages it needed more memory than replica_sharding='optimizer'. Set that, or"
                    " pipeline_parallel_size=1 and FSDP"
                )
            raise ValueError(
                f"replica_sharding='full' is no longer supported: {why}. FSDP is fsdp='full_shard' with"
                " fsdp_config={'version': 2}, under which layers can be frozen as well. Checkpoints that were saved"
                " under 'full' resume under 'none' and 'optimizer'."
            )
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or (value == choice and isinstance(value, str)) for choice in choices):
                raise ValueError(
                    f"{name}={value!r} is not supported. Set it to one of {', '.join(map(repr, choices))}."
                )
        check_cache(self.activation_cache_max_gib, self.activation_cache_dir)
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
        return freezing_for(self.freeze_policy).make_policy(
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
        """Whether the stock Trainer runs: with one stage, if another library distributes or compiles the model."""
        return not self.uses_pipeline and bool(
            self.fsdp
            or self.deepspeed
            or self.torch_compile
            or self.n_gpu > 1
            or getattr(self, "parallelism_config", None)
            or self.fp16_full_eval
            or self.bf16_full_eval
            or self.auto_find_batch_size
            or splits_batches(self)
            or self.train_sampling_strategy == "batch_rebalance"
            or (self.enable_jit_checkpoint and self.world_size == 1)
            or updates_in_backward(self)
        )

    def _refuse_single_process(self) -> None:
        """Refuse several stages in one process. Reads the launcher's variables: setting up the device may fail."""
        known = dist.is_available() and dist.is_initialized()
        stages = self.pipeline_parallel_size
        if stages == AUTO or (dist.get_world_size() if known else int(os.environ.get("WORLD_SIZE", 1))) > 1:
            return
        raise ValueError(
            f"pipeline_parallel_size={stages}, but only one process runs: a pipeline needs one process per stage."
            f" Start {stages} with `accelerate launch --num_processes {stages}` or `torchrun --nproc_per_node"
            f" {stages}`.{hint_about_cpu()}"
        )

    def refuse_impossible_layout(self, model: Any) -> None:
        """Refuse a number of stages that does not divide the number of processes. The message has the layers' number.

        Args:
            model: the model to train; None if it is not known yet.

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
            f" {', '.join(map(str, divisors))}{start}."
        )


@contextmanager
def naming_lost_arguments(args: PipeTransformerTrainingArguments) -> Iterator[None]:
    """Explain the error of another library's trainer that converts `args` to its own class without our fields.

    Raises:
        ValueError: that class was called with our fields.
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
