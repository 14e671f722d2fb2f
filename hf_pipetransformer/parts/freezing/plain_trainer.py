"""Layer freezing in a plain `transformers.Trainer`, from a hook before each forward of the model.

The Trainer itself is not changed. Under DDP the reducer is rebuilt at each freeze. Under FSDP2 a frozen parameter is
neither reduced nor updated; its shard of the optimizer's state stays, because a checkpoint is loaded before layers are
frozen again. Settings that a callback alone cannot support raise a `ValueError`.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Collection
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from transformers import TrainerState, TrainingArguments

from ...errors import UnsupportedModelError
from ...logs import log_on_main, log_once
from ...model.frozen_prefix import FreezableLayers, squared_norms
from ...model.layer_stack import LayerStack
from ...model.micro_batch import slice_rows
from ...randomness import global_state_kept
from .frozen_prefix import FoundLayers, FrozenPrefix

logger = logging.getLogger(__name__)

SAMPLE_ROWS = 2
"""Number of samples of the first batch used to find the model's layers."""


FSDP_NEEDS = (
    "layers must be found before the model is sharded, which PipeTransformerTrainer does, with fsdp=True and"
    " fsdp_config={'version': 2}"
)
"""Why a callback alone cannot freeze layers of a sharded model."""


class Decider(Protocol):
    """Decides how many layers to freeze; implemented by the callback.

    Attributes:
        num_frozen: number of layers to freeze at the next forward.
    """

    num_frozen: int

    def know_layers(self, num_layers: int, max_frozen: int, outside_alone: Collection[str]) -> None:
        """Set the number of layers, once they have been found; raises a `ValueError` if none can be frozen."""
        ...

    def decide(self, state: TrainerState, epoch: float) -> None:
        """Make a decision after `epoch` epochs. Collective over all processes."""
        ...


class PlainTrainer:
    """Freezes the model of a plain Trainer, from a hook before each forward of the model.

    Callbacks receive neither the batch nor the DDP wrapper; both are captured at the first forward.

    Args:
        decider: decides how many layers to freeze.
        model: the Trainer's model, without the DDP wrapper.
        optimizer: the Trainer's optimizer.
        state: the Trainer's state.
        args: the training arguments.
        sharded: the layers of a model that FSDP2 has sharded; None for an unsharded model: its layers are found here.

    Attributes:
        decides_at_first_forward: whether the decider decides as soon as the layers are known.
    """

    def __init__(
        self,
        decider: Decider,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: TrainerState,
        args: TrainingArguments,
        sharded: FoundLayers | None = None,
    ) -> None:
        self._args = args
        self.decides_at_first_forward = state.global_step == 0
        self._decider = decider
        self._model = model
        self._optimizer = optimizer
        self._state = state
        self._stack: LayerStack | None = None
        self._prefix: FrozenPrefix | None = None
        self._sharded = sharded
        self._replicated: DistributedDataParallel | None = None
        self._is_looking = False
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._wrapper_hook: RemovableHandle | None = None
        if dist.is_available() and dist.is_initialized():  # a launcher wraps the model in DDP even for one process
            self._wrapper_hook = register_module_forward_pre_hook(self._note_wrapper)

    def check_that_it_sees_calls(self) -> None:
        """Check, before the first update, that the hook has seen a training forward.

        Raises:
            ValueError: no training forward of the whole model was seen, so no layer would ever be frozen.
        """
        if self._prefix is None:
            name = type(self._model).__name__
            raise ValueError(
                f"LayerFreezeCallback cannot freeze layers, because it needs a forward of {name}, but the first step"
                f" has not called {name} itself. If compute_loss (or training_step) calls a part of the model, such as"
                " model.bert(...), call model(**inputs) instead. Alternatively, use PipeTransformerTrainer, which"
                " supports this, or remove the callback."
            )

    def squared_norms(self) -> torch.Tensor:
        """Squared norm of each unit's current gradients."""
        assert self._stack is not None and self._prefix is not None
        inside, table = self._prefix.layers.inside, self._stack.table
        parameters = {name: table[name] for names in inside for name in names}
        gradients = {
            name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for name, p in parameters.items()
            if p.grad is not None
        }
        return squared_norms(inside, gradients, next(iter(parameters.values())).device)

    def release(self) -> None:
        """Restore the model, its `requires_grad` flags and its DDP wrapper to their state before training."""
        self._hook.remove()
        self._forget_wrapper_hook()
        if self._prefix is not None:
            was_frozen = self._prefix.num_frozen > 0
            self._prefix.remove()
            if was_frozen and self._replicated is not None:
                rebuild_reducer(self._replicated)

    def _note_wrapper(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, DistributedDataParallel) and module.module is self._model:
            self._replicated = module

    def _forget_wrapper_hook(self) -> None:
        if self._wrapper_hook is not None:
            self._wrapper_hook.remove()
            self._wrapper_hook = None

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_looking:
            return
        is_first = self._prefix is None
        if is_first:
            if not model.training:
                return
            self._forget_wrapper_hook()
            self._know_layers({**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs})
        assert self._prefix is not None
        if model.training and self._decider.num_frozen > self._prefix.num_frozen:
            self._freeze(self._decider.num_frozen)
        if is_first:
            self._prefix.begin_forward()

    def _know_layers(self, batch: dict[str, Any]) -> None:
        if self._sharded is None:
            self._stack, layers = self._find_layers(batch)
        else:
            self._stack, layers = LayerStack.of(self._model, self._sharded.stack), self._sharded.freezable
        self._decider.know_layers(layers.num_layers, layers.max_frozen, layers.outside_alone)
        self._prefix = FrozenPrefix(self._stack, layers)
        if self.decides_at_first_forward:
            self._decider.decide(self._state, float(math.ceil(self._state.epoch)))

    def _find_layers(self, batch: dict[str, Any]) -> tuple[LayerStack, FreezableLayers]:
        sample = slice_rows(batch, 0, SAMPLE_ROWS)
        self._is_looking = True
        try:
            with global_state_kept():
                stack = LayerStack.discover(self._model, sample, is_split=False)
                return stack, FreezableLayers.of(stack, sample)
        except UnsupportedModelError as error:
            raise error.with_one_stage() from error.__cause__
        finally:
            self._is_looking = False
            torch.clear_autocast_cache()  # drop weights that autocast cast without a gradient during the probe

    def _freeze(self, num_frozen: int) -> None:
        assert self._prefix is not None
        layers, before = self._prefix.layers, self._prefix.num_frozen
        parameters = self._prefix.freeze(num_frozen)
        if self._sharded is None:
            for parameter in parameters.values():
                self._optimizer.state.pop(parameter, None)
        if self._replicated is not None:
            rebuild_reducer(self._replicated)
        line = (
            f"Step {self._state.global_step}: {layers.describe_freeze(before, num_frozen, parameters)};"
            f" {num_frozen} of {layers.num_layers} layers frozen"
            f" ({sum(p.numel() for p in parameters.values()):,} parameters more)."
        )
        if parameters:
            log_on_main(logger, self._args, line)
        else:
            log_once(logger, logging.WARNING, "%s", line)


def trained_module(model: Any, optimizer: torch.optim.Optimizer) -> nn.Module:
    """Return the module that an optimizer trains: the Trainer's model, or an attribute of it.

    SetFit's Trainer passes its `SetFitModel` to callbacks. It is not a module, but has one as an attribute.

    Raises:
        ValueError: neither the model nor an attribute is such a module.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in (model, *getattr(model, "__dict__", {}).values()):
        if isinstance(module, nn.Module) and any(id(p) in trained for p in module.parameters()):
            return module
    raise ValueError(
        f"LayerFreezeCallback cannot freeze layers of a {type(model).__name__}: neither this object nor one of its"
        " attributes is a torch.nn.Module with parameters that the optimizer trains. Pass the Trainer a module, or"
        " remove the callback."
    )


def rebuild_reducer(module: DistributedDataParallel) -> None:
    """Make a DDP wrapper reduce the parameters that require a gradient now, in place. No communication.

    DDP reads `requires_grad` when it is constructed and when it is unpickled; this function uses the latter. Call it
    on every rank, after a backward and before the end of the next forward.
    """
    hooks = list(module._comm_hooks)
    module.__setstate__(module.__getstate__())
    module._comm_hooks.clear()
    for hook, hook_state in hooks:
        module.register_comm_hook(hook_state, hook)


def gather_proposals(proposal: int | None) -> list[int]:
    """Every rank's proposal. Collective over all processes."""
    assert proposal is not None
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [proposal]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, proposal)
    return everyone


def refuse_setup(args: TrainingArguments, is_sharded: bool) -> None:
    """Refuse settings that prevent a callback from freezing layers.

    Args:
        args: the Trainer's arguments.
        is_sharded: whether the model's layers were found before it was sharded.

    Raises:
        ValueError: a setting is unsupported; the message names the setting, the reason and the fix.
    """
    kind = AcceleratorState().distributed_type
    for is_set, what, why in (
        (kind == DistributedType.FSDP and not is_sharded, "FSDP", FSDP_NEEDS),
        (kind == DistributedType.DEEPSPEED, "DeepSpeed", "its optimizer holds copies of the parameters"),
        (args.n_gpu > 1, f"nn.DataParallel over {args.n_gpu} devices", "start one process per device instead"),
        (args.torch_compile, "torch_compile=True", "a compiled forward does not notice that layers are frozen"),
        (args.ddp_static_graph, "ddp_static_graph=True", "freezing changes the graph"),
    ):
        if is_set:
            raise ValueError(
                f"LayerFreezeCallback cannot be combined with {what}: {why}. Disable it, or remove the callback."
            )
