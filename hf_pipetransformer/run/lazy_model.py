"""A lazily loaded model: its weights stay in the checkpoint until each process knows the layers of its stage.

model = load_lazily(AutoModelForCausalLM, "checkpoint")    `parts/lazy_loading`: weights are mapped from the files
PipeTransformerTrainer(model, ...)
train()    units, loss, cache     probed on the mapped model, module by module given back
           place                  each process copies the weights of its stage into memory, and forgets the others
           save                   rank 0 collects the stages' weights in a file, and writes shard by shard from it
           end                    the model stays distributed
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..model.elsewhere import Hidden
from ..model.mapped_weights import giving_back
from ..pipeline.mesh import ProcessMesh
from ..registry import require_part

logger = logging.getLogger(__name__)

MARK = "_weights_stay_in_checkpoint"
"""Attribute of a model that `load_lazily` has loaded."""
MAX_SHARD_SIZE = "2GB"
"""Size of the files of a saved lazy model. The writing process has no more of their pages in its memory."""


def is_lazy(model: Any) -> bool:
    """Whether a model, or the model inside it (with adapters, for one), was loaded by `load_lazily`."""
    return isinstance(model, nn.Module) and any(getattr(module, MARK, False) for module in model.modules())


def loading() -> Any:
    """Return the part that has loaded a lazily loaded model, and reads its files.

    Raises:
        ValueError: it is not installed.
    """
    return require_part("lazy_loading.loading", "load_lazily")


def refuse_meta(model: Any) -> None:
    """Refuse a model without weights, on the meta device.

    Raises:
        ValueError: a parameter is on the meta device.
    """
    refusal = _why_without_values(model)
    if refusal is not None:
        raise ValueError(refusal)


def _why_without_values(model: Any) -> str | None:
    """Why a model lacks values, and the remedy; None if it has them all."""
    for name, parameter in model.named_parameters() if isinstance(model, nn.Module) else ():
        if parameter.is_meta:
            return (
                f"{name!r} of the {type(model).__name__} is on the meta device and has no values. Pass"
                f" load_lazily({type(model).__name__}, checkpoint) with the checkpoint that they are to be read from."
            )
        if isinstance(parameter, Hidden):
            return (
                f"{name!r} of the {type(model).__name__} has no values, because another trainer has left the model"
                " distributed over the processes. Call that trainer's make_model_whole() on all processes first, or"
                " load what its save_model() writes."
            )
    return None


def agree_on_laziness(model: nn.Module, mesh: ProcessMesh) -> bool:
    """Return whether the model was loaded lazily. Collective over all processes.

    Raises:
        ValueError: by some processes only, or it has no values on some of them. Every process raises it.
    """
    everyone = mesh.gather_objects((is_lazy(model), _why_without_values(model)))
    for rank, (_, refusal) in enumerate(everyone):
        if refusal is not None:
            raise ValueError(f"On process {rank}, {refusal}" if mesh.world_size > 1 else refusal)
    are_lazy = [lazy for lazy, _ in everyone]
    if len(set(are_lazy)) > 1:
        raise ValueError(
            f"load_lazily was called on process {are_lazy.index(True)}, but not on process {are_lazy.index(False)}."
            " Load the model in the same way on all processes."
        )
    return are_lazy[0]


def warn_of_unsaved(args: Any) -> None:
    """Warn if the arguments save no checkpoint at the end of training: the model stays distributed after it."""
    strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
    if strategy in ("no", "best"):
        logger.warning(
            "The model was loaded lazily and stays distributed after train(), and with save_strategy=%r its last"
            " weights are not saved. Call trainer.save_model() on all processes after train(), or they are lost when"
            " the processes end.",
            strategy,
        )


def sparing_memory(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, a model that was loaded lazily gives its weights back after each use. No effect on other models."""
    return giving_back(model) if is_lazy(model) else nullcontext()


@contextmanager
def saving_shards(model: Any, lazy: bool) -> Iterator[None]:
    """Inside, `save_pretrained` of a lazily loaded model writes files of `MAX_SHARD_SIZE`. No effect on others.

    Should safetensors let no other thread run meanwhile, the process that writes has the pages of one file in memory
    at a time. The stock size is 50 GB.
    """
    if not (lazy and isinstance(model, PreTrainedModel)):
        yield
        return
    stock: Any = model.save_pretrained
    saving: Any = model
    saving.save_pretrained = partial(stock, max_shard_size=MAX_SHARD_SIZE)
    try:
        yield
    finally:
        del saving.save_pretrained
