"""Conflicts of training arguments: one table of settings, conflicting settings, reasons and remedies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames

from .planning.schedules import ONE_F_ONE_B

Arguments = Any
"""A `PipeTransformerTrainingArguments`, which is built on this module."""

FUSED_BACKWARD_OPTIMIZERS = ("lomo", "adalomo", "layerwise")
"""Optimizers that update parameters during the backward, before the gradients are complete."""

DISTRIBUTED_BY_OTHERS = (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"))
"""Environment variables of Accelerate's launcher, and the library that distributes the model if one is set."""

COMPILED = "a compiled forward cannot be split between two layers"
PRECISION = "the stages keep the precision they train in; use bf16 or fp16 mixed precision"
NOT_WITH_A_PIPELINE = {
    "fsdp": "it shards a whole model; replica_sharding='optimizer' divides the state of replicas",
    "deepspeed": "DeepSpeed distributes the model itself",
    "torch_compile": COMPILED,
    "torch_compile_backend": COMPILED,
    "torch_compile_mode": COMPILED,
    "parallelism_config": "Accelerate's own parallelism arranges the processes differently",
    "fp16_full_eval": PRECISION,
    "bf16_full_eval": PRECISION,
    "save_on_each_node": "only the first process collects the weights of all stages",
    "auto_find_batch_size": "each stage runs out of memory at its own batch size, and all need the same",
}
"""Field that excludes several stages if it is set -> reason."""


class Conflict(NamedTuple):
    """Two settings that exclude each other.

    Attributes:
        is_there: whether both settings are set.
        what: a setting, with its value.
        beside: the setting beside it, with its value.
        why: the reason.
        remedy: the settings to use instead, as a sentence without a full stop.
    """

    is_there: bool
    what: str
    beside: str
    why: str
    remedy: str


def refuse(conflicts: Iterator[Conflict]) -> None:
    """Refuse the first existing conflict.

    Raises:
        ValueError: there is a conflict.
    """
    for is_there, what, beside, why, remedy in conflicts:
        if is_there:
            raise ValueError(f"{what} cannot be combined with {beside}: {why}. {remedy}.")


def known_at_once(args: Arguments) -> Iterator[Conflict]:
    """Yield the conflicts that are known before a device is set up."""
    stages, sharding = _said(args, "pipeline_parallel_size"), _said(args, "replica_sharding")
    slices, cache, is_cut = _said(args, "token_slices"), _said(args, "activation_cache"), args.uses_pipeline
    shards, splits, must_cache = args.replica_sharding != "none", args.slices_tokens, args.activation_cache == "on"
    for name, why in NOT_WITH_A_PIPELINE.items():
        is_set = is_cut and bool(getattr(args, name, None))
        yield Conflict(is_set, _said(args, name), stages, why, f"Unset {name}, or set pipeline_parallel_size=1")
    for variable, name in DISTRIBUTED_BY_OTHERS:
        yield Conflict(
            os.environ.get(variable, "false").lower() in ("true", "1") and (is_cut or shards),
            f"{name}, which the launcher enables ({variable}),",
            stages if is_cut else sharding,
            "it distributes the model itself",
            "Launch with a configuration that does not enable it (for example one of accelerate_configs/), or set"
            " pipeline_parallel_size=1 and replica_sharding='none'",
        )
    yield Conflict(
        is_cut and updates_in_backward(args),
        f"optim={OptimizerNames(args.optim).value!r}",
        stages,
        "it updates parameters during the backward pass, before their gradients are complete",
        "Set another optim, such as 'adamw_torch'",
    )
    yield Conflict(
        is_cut and "underflow_overflow" in str(args.debug),
        "debug='underflow_overflow'",
        stages,
        "during training the parameters of other stages are placeholders that contain NaN",
        "Set pipeline_parallel_size=1 for debugging",
    )
    yield Conflict(
        is_cut and str(args.train_sampling_strategy) == "batch_rebalance",
        "train_sampling_strategy='batch_rebalance'",
        stages,
        "it balances the batches over processes, not over pipelines",
        "Set train_sampling_strategy='group_by_length'",
    )
    yield Conflict(
        args.fp16 and not args.max_grad_norm and (is_cut or shards),
        f"fp16=True with {_said(args, 'max_grad_norm')}",
        f"{stages} and {sharding}",
        "an overflow is noticed when gradients are clipped, and otherwise only some processes would skip the step",
        "Set max_grad_norm to a large number, such as 1e9",
    )
    yield Conflict(
        bool(args.fsdp) and must_cache,
        cache,
        _said(args, "fsdp"),
        "all processes gather a layer that runs, and none may skip it because it finds its own samples in the cache",
        "Set activation_cache='off', or replica_sharding='optimizer' instead of fsdp",
    )
    off = "or set token_slices='off'"
    yield Conflict(
        splits and not is_cut, slices, stages, "it needs several stages", f"Increase pipeline_parallel_size, {off}"
    )
    yield Conflict(
        splits and args.pipeline_schedule != ONE_F_ONE_B.name,
        slices,
        _said(args, "pipeline_schedule"),
        "it requires pipeline_schedule='1f1b'",
        f"Set that, {off}",
    )
    yield Conflict(
        splits and bool(args.label_smoothing_factor),
        slices,
        _said(args, "label_smoothing_factor"),
        "label smoothing shifts the labels within each slice, so that every slice would lose one label",
        "Set label_smoothing_factor=0",
    )
    yield Conflict(
        args.full_determinism and args.token_slices == "auto",
        slices,
        "full_determinism=True",
        "it chooses the slices from measured times, which differ between runs",
        "Set token_slices to a number of slices",
    )
    yield Conflict(
        splits and must_cache, slices, cache, "the cache stores whole samples", f"Set activation_cache='off', {off}"
    )


def known_later(args: Arguments) -> Iterator[Conflict]:
    """Yield the conflicts that are known once the stock arguments have set up devices and parsed JSON."""
    stages, is_cut = _said(args, "pipeline_parallel_size"), args.uses_pipeline
    yield Conflict(
        bool(args.enable_jit_checkpoint) and not args.leaves_model_to_trainer,
        "enable_jit_checkpoint=True",
        f"{type(args).__name__}",
        "each process would save a checkpoint at a different step, and PipeTransformerTrainer already handles SIGTERM"
        " by saving a checkpoint at the same step on all processes and exiting",
        "Unset it",
    )
    yield Conflict(
        args.replica_sharding != "none" and args.leaves_model_to_trainer,
        _said(args, "replica_sharding"),
        "a setting for which the stock Trainer runs",
        "fsdp, deepspeed, torch_compile, several devices in one process, auto_find_batch_size, parallelism_config,"
        " fp16_full_eval, bf16_full_eval, split_batches and an optim that updates during the backward may distribute"
        " the model in another way",
        "Set replica_sharding='none', or unset it",
    )
    yield Conflict(
        is_cut and args.n_gpu > 1,
        f"nn.DataParallel over the {args.n_gpu} devices that this process sees",
        stages,
        "a pipeline needs one process per device",
        f"Start {args.n_gpu} processes with `accelerate launch` or `torchrun`",
    )
    checkpointing: dict[str, Any] = {
        **(getattr(args, "gradient_checkpointing_kwargs", None) or {}),
        **(getattr(args, "activation_checkpointing_kwargs", None) or {}),
    }
    yield Conflict(
        is_cut and bool(checkpointing.get("use_reentrant")),
        "gradient checkpointing with use_reentrant=True",
        stages,
        "it hides the layers' autograd graph from the stages",
        "Set gradient_checkpointing_kwargs={'use_reentrant': False}",
    )
    yield Conflict(
        is_cut and splits_batches(args),
        "split_batches=True in accelerator_config",
        stages,
        "the batch size of a pipeline is per_device_train_batch_size x number of stages",
        "Unset split_batches and reduce per_device_train_batch_size instead",
    )


def updates_in_backward(args: Arguments) -> bool:
    """Whether the optimizer updates parameters during the backward."""
    return any(name in OptimizerNames(args.optim).value for name in FUSED_BACKWARD_OPTIMIZERS)


def splits_batches(args: Arguments) -> bool:
    """Whether Accelerate divides each batch of the loader among the processes."""
    return isinstance(args.accelerator_config, AcceleratorConfig) and args.accelerator_config.split_batches


def _said(args: Arguments, name: str) -> str:
    return f"{name}={getattr(args, name, None)!r}"
