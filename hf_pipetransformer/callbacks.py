"""Layer freezing as a callback: it watches the training, and proposes how many layers to freeze.

    on_train_begin           decision 0 (a schedule may freeze from the start)
      on_epoch_begin         decision T, freeze_strategy="epoch": at every epoch's begin but the first
        on_pre_optimizer_step  gradient norms, if the policy wants them
        on_step_end          decision T, freeze_strategy="steps": every freeze_steps optimizer steps

In a `PipeTransformerTrainer` the callback only proposes, and the trainer acts. In a plain `transformers.Trainer` it
freezes by itself, at the next forward.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from .errors import UnsupportedModelError
from .freezing import (
    FreezeDecision,
    FreezePolicy,
    FreezeStrategy,
    NeverFreeze,
    agreed_num_frozen,
    check_something_to_freeze,
    check_when,
    make_policy,
    next_num_frozen,
    policy_description,
    steps_between_decisions,
)
from .model.frozen_prefix import FreezableLayers, FrozenPrefix, squared_norms
from .model.layer_stack import LayerStack
from .model.micro_batch import slice_rows
from .resilience.exit import end_at_exit

logger = logging.getLogger(__name__)

SAMPLE_ROWS = 2
"""Rows of the first batch on which the model's layers are found."""
OWN_POLICY = "(not in the checkpoint)"
"""Stands for a user's policy object in a saved callback."""


class LayerFreezeCallback(TrainerCallback, ExportableState):
    """Freezes a model's layers from the bottom up while it trains.

    Add it to any `transformers.Trainer`, also under DDP:

        Trainer(..., callbacks=[LayerFreezeCallback("alpha")])

    Frozen layers and the embeddings run in eval mode (no dropout) and build no graph; their parameters require no
    gradient, have no optimizer state, and take no part in DDP's messages. A parameter that a frozen layer shares with
    an active one or with the head (a head tied to the embeddings) is frozen for both. When training ends, the flags
    `requires_grad` are as they were before it.

    Under DDP the reducer is rebuilt in place at each freeze, as DDP does when it is unpickled; the wrapper stays the
    same object. (`find_unused_parameters=True`, the Trainer's default, would tolerate frozen parameters, but goes on
    sending zeros for them; without it DDP raises "Expected to have finished reduction".)

    In a plain Trainer gradient norms are seen after clipping. At one step clipping scales all layers alike, so that
    the order of the layers is right; where a policy compares over time (autofreeze), set `max_grad_norm=0`, or know
    that it compares clipped gradients.

    What was frozen is part of a checkpoint, and resuming from it goes on with it, whether or not
    `restore_callback_states_from_checkpoint` is set. A new `train()` from step 0 starts with nothing frozen.

    Args:
        policy: a name ("alpha", "adaptive", "autofreeze"), the arguments of `make_policy` as a dict, or a policy.
        freeze_strategy: when decisions are made: "epoch", at each epoch's begin but the first, or "steps".
        freeze_steps: optimizer steps between decisions; below 1 a share of all steps, as for `eval_steps`.
        max_frozen_layers: never freeze more layers than this.

    Attributes:
        num_frozen: layers that are frozen, or will be at the next forward.
        proposal: after a decision and until `take_proposal`, the number of layers to freeze. Set at every decision,
            also when the number does not change, so that all processes see one at the same time.

    Raises:
        ValueError: arguments out of range, now; at the start of training, a Trainer set up in a way that excludes
            freezing (FSDP, DeepSpeed, `torch_compile`, nn.DataParallel, a static DDP graph, reentrant checkpointing);
            before the first update, a loss that calls a part of the model only, and never the model.
        UnsupportedModelError: at the first step, the model has no layers that could be found.
    """

    def __init__(
        self,
        policy: FreezePolicy | Mapping[str, Any] | str = "alpha",
        freeze_strategy: FreezeStrategy = "epoch",
        freeze_steps: float | None = None,
        max_frozen_layers: int | None = None,
    ) -> None:
        check_when(freeze_strategy, freeze_steps, max_frozen_layers)
        self.policy = _as_policy(policy)
        self.freeze_strategy = freeze_strategy
        self.freeze_steps = freeze_steps
        self.max_frozen_layers = max_frozen_layers
        self.num_frozen = 0
        self.proposal: int | None = None
        self._num_decisions = 0
        self._decided_at: int | None = None  # the step before which the last decision was made
        self._observed: tuple[torch.Tensor, torch.Tensor] | None = None  # per unit: sum of squares, steps
        self._num_layers: int | None = None  # known once the model's layers are
        self._max_frozen = 0
        self._is_driven = False  # a PipeTransformerTrainer takes the proposals
        self._begins_within_epoch = False
        self._alone: _PlainTrainer | None = None

    # ------------------------------------------------------------------------------------ for whoever drives it
    def attach(self, num_layers: int, max_frozen: int, state: TrainerState) -> None:
        """Let a trainer that takes `proposal`, observes gradients and freezes drive this callback.

        To be called before `on_train_begin`, once the trainer's state is restored; `num_frozen` is then what a
        checkpoint had frozen. Ends with `on_train_end`.

        Args:
            num_layers: L.
            max_frozen: the most that can be frozen (`FreezableLayers.max_frozen`).
            state: the trainer's.

        Raises:
            ValueError: no layer can be frozen.
        """
        self._is_driven = True
        self._begin(state)
        self._know_layers(num_layers, max_frozen)

    def observe(self, squared: torch.Tensor | Sequence[float]) -> None:
        """Note the squares of each unit's gradient norm at an optimizer step. No synchronisation.

        A unit's value that is not finite (an overflow under fp16) is left out.

        Args:
            squared: `[L]`, not scaled and not clipped, of all units on every process.
        """
        values = torch.as_tensor(squared, dtype=torch.float64).detach()
        finite = values.isfinite()
        summed, steps = self._observed or (torch.zeros_like(values), torch.zeros_like(values))
        self._observed = summed + values.where(finite, 0.0), steps + finite

    @property
    def wants_gradient_norms(self) -> bool:
        """Whether `observe` should be called."""
        return self.policy.needs_gradient_norms

    def take_proposal(self) -> int | None:
        """What was decided since the last call, or None. To be compared over the ranks, then confirmed."""
        proposal, self.proposal = self.proposal, None
        return proposal

    def confirm(self, num_frozen: int) -> None:
        """The trainer has frozen so many units."""
        assert num_frozen >= self.num_frozen, "frozen layers do not thaw"
        self.num_frozen = num_frozen

    # ------------------------------------------------------------------------------------ decisions
    def _begin(self, state: TrainerState) -> None:
        """Start from nothing, or from what the checkpoint says."""
        if isinstance(self.policy, _MissingPolicy):
            raise ValueError(
                "restore_callback_states_from_checkpoint=True makes the LayerFreezeCallback anew from the checkpoint,"
                " which cannot hold your own policy object. Leave it off: this callback restores itself."
            )
        self._begins_within_epoch = state.epoch % 1 != 0
        self.memory = {"num_frozen": 0, "num_decisions": 0, "decided_at": None, "observed": None, "policy": {}}
        if state.global_step == 0:
            return
        saved: Any = state.stateful_callbacks  # from JSON: the states by the callbacks' names
        stored = saved.get(type(self).__name__)
        stored = stored[0] if isinstance(stored, list) else stored
        if stored is None:
            logger.warning("The checkpoint holds no freezing state: training goes on with nothing frozen.")
            saved[type(self).__name__] = self.state()  # the stock Trainer fails at callbacks that are not there
            return
        self.memory = stored["attributes"]["memory"]

    def _know_layers(self, num_layers: int, max_frozen: int) -> None:
        if not isinstance(self.policy, NeverFreeze):
            check_something_to_freeze(max_frozen, num_layers)
        self._num_layers, self._max_frozen = num_layers, max_frozen

    def _refuse_late(self) -> None:
        """
        Raises:
            ValueError: this callback has not seen the training begin.
        """
        if self._alone is None and self._num_layers is None:
            raise ValueError(
                "LayerFreezeCallback was added while the training was going on: add it before train() is called."
            )

    def _decide(self, state: TrainerState, epoch: float) -> None:
        """Ask the policy. Collective over all processes in a plain Trainer."""
        assert self._num_layers is not None
        decision = FreezeDecision(
            self._num_decisions,
            self._num_layers,
            self.num_frozen,
            epoch,
            state.global_step,
            self._observed_norms(),
            self._max_frozen,
        )
        self.proposal = next_num_frozen(self.policy, decision, self.max_frozen_layers)
        self._num_decisions += 1
        self._decided_at = state.global_step
        self._observed = None
        if not self._is_driven:
            self.num_frozen = agreed_num_frozen(_gather(self.take_proposal()))

    def _observed_norms(self) -> tuple[float, ...] | None:
        if self._observed is None:
            return None
        summed, steps = (values.tolist() for values in self._observed)
        if not all(steps[self.num_frozen :]):
            return None  # a unit whose every gradient overflowed
        return tuple(math.sqrt(s / n) if n else 0.0 for s, n in zip(summed, steps, strict=True))

    # ------------------------------------------------------------------------------------ events
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._is_driven:
            _refuse_setup(args)
            end_at_exit()
            self._release()
            self._begin(state)
            self._num_layers = None
            self._alone = _PlainTrainer(self, kwargs["model"], kwargs["optimizer"], state, args.world_size > 1)
        elif state.global_step == 0:
            self._decide(state, 0.0)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # a run that resumes within an epoch begins it a second time
        is_new, self._begins_within_epoch = not self._begins_within_epoch, False
        if self.freeze_strategy != "epoch" or not is_new or state.global_step == 0:
            return
        if self._decided_at == state.global_step:  # by a job whose checkpoint was written anew after it had begun it
            return
        self._refuse_late()
        if self._num_layers is None:  # resumed at an epoch's begin: at the first forward
            assert self._alone is not None
            self._alone.decides_at_first_forward = True
        else:
            # rounded up: without a length the epoch is not whole at its end
            self._decide(state, float(math.ceil(state.epoch)))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._alone is not None:
            self._alone.check_that_it_sees_calls()
            if self.wants_gradient_norms:
                self.observe(self._alone.squared_norms())

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.freeze_strategy != "steps" or state.global_step >= state.max_steps:
            return
        assert self.freeze_steps is not None
        if state.global_step % steps_between_decisions(self.freeze_steps, state.max_steps) == 0:
            self._refuse_late()
            self._decide(state, state.epoch)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._release()
        self._is_driven = False

    def _release(self) -> None:
        if self._alone is not None:
            self._alone.release()
            self._alone = None

    # ------------------------------------------------------------------------------------ checkpoints
    @property
    def memory(self) -> dict[str, Any]:
        """What a checkpoint keeps, in plain values for JSON. Setting it restores."""
        observed = None if self._observed is None else [values.tolist() for values in self._observed]
        return {
            # what is proposed is frozen before the next step, so a resumed run begins with it
            "num_frozen": self.num_frozen if self.proposal is None else self.proposal,
            "num_decisions": self._num_decisions,
            "decided_at": self._decided_at,
            "observed": observed,
            "policy": self.policy.state_dict(),
        }

    @memory.setter
    def memory(self, memory: Mapping[str, Any]) -> None:
        self.proposal = None
        self.num_frozen = int(memory["num_frozen"])
        self._num_decisions = int(memory["num_decisions"])
        self._decided_at = memory.get("decided_at")  # checkpoints of earlier versions have none
        observed = memory["observed"]
        if observed is None:
            self._observed = None
        else:
            summed, steps = (torch.tensor(values, dtype=torch.float64) for values in observed)
            self._observed = summed, steps
        self.policy.load_state_dict(memory["policy"])

    def state(self) -> dict[str, Any]:
        """For the Trainer's checkpoint."""
        return {
            "args": {
                "policy": policy_description(self.policy) or OWN_POLICY,
                "freeze_strategy": self.freeze_strategy,
                "freeze_steps": self.freeze_steps,
                "max_frozen_layers": self.max_frozen_layers,
            },
            "attributes": {"memory": self.memory},
        }


class _PlainTrainer:
    """Freezes the model of a plain Trainer, from a hook before each of its forwards.

    Neither the batch nor the DDP wrapper is given to callbacks; both are seen at the first forward.
    """

    def __init__(
        self,
        callback: LayerFreezeCallback,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: TrainerState,
        is_distributed: bool,
    ) -> None:
        self.decides_at_first_forward = state.global_step == 0
        self._callback = callback
        self._model = model
        self._optimizer = optimizer
        self._state = state
        self._stack: LayerStack | None = None
        self._prefix: FrozenPrefix | None = None
        self._replicated: DistributedDataParallel | None = None
        self._is_looking = False
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._wrapper_hook: RemovableHandle | None = None
        if is_distributed:
            self._wrapper_hook = register_module_forward_pre_hook(self._note_wrapper)

    def check_that_it_sees_calls(self) -> None:
        """Before the first update.

        Raises:
            ValueError: no training forward of the whole model was seen, so nothing would ever be frozen.
        """
        if self._prefix is None:
            name = type(self._model).__name__
            raise ValueError(
                f"LayerFreezeCallback cannot freeze: the first step has not called {name} itself, and a forward of"
                f" {name} is where layers are found and frozen. A compute_loss (or training_step) that calls a part of"
                " the model, such as model.bert(...), has to call model(**inputs); or train with a"
                " PipeTransformerTrainer, which freezes there, too; or remove the callback."
            )

    def squared_norms(self) -> torch.Tensor:
        """Of each unit's gradients, as they are now."""
        assert self._stack is not None and self._prefix is not None
        inside, table = self._prefix.layers.inside, self._stack.table
        parameters = {name: table[name] for names in inside for name in names}
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return squared_norms(inside, gradients, next(iter(parameters.values())).device)

    def release(self) -> None:
        """Leave the model, its flags and its DDP wrapper as they were found."""
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
        if self._prefix is None:
            if not model.training:
                return
            self._forget_wrapper_hook()
            self._find_layers({**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs})
        assert self._prefix is not None
        if model.training and self._callback.num_frozen > self._prefix.num_frozen:
            self._freeze(self._callback.num_frozen)
        self._prefix.begin_forward()

    def _find_layers(self, batch: dict[str, Any]) -> None:
        sample = slice_rows(batch, 0, SAMPLE_ROWS)
        self._is_looking = True
        try:
            with torch.random.fork_rng(devices=[]):
                self._stack = LayerStack.discover(self._model, sample)
                layers = FreezableLayers.of(self._stack, sample)
        except UnsupportedModelError as error:
            raise error.with_one_stage() from error.__cause__
        finally:
            self._is_looking = False
            torch.clear_autocast_cache()  # of weights that were looked at without a gradient
        self._callback._know_layers(layers.num_layers, layers.max_frozen)
        self._prefix = FrozenPrefix(self._stack, layers)
        if self.decides_at_first_forward:
            self._callback._decide(self._state, float(math.ceil(self._state.epoch)))

    def _freeze(self, num_frozen: int) -> None:
        assert self._prefix is not None
        parameters = self._prefix.freeze(num_frozen)
        for parameter in parameters:
            self._optimizer.state.pop(parameter, None)
        if self._replicated is not None:
            rebuild_reducer(self._replicated)
        logger.info(
            "step %d: froze %d of %d layers (%s parameters more).",
            self._state.global_step,
            num_frozen,
            self._prefix.layers.num_layers,
            f"{sum(p.numel() for p in parameters):,}",
        )


def rebuild_reducer(module: DistributedDataParallel) -> None:
    """Let a DDP wrapper reduce those parameters that require a gradient now, in place. No communication.

    DDP looks at `requires_grad` when it is made, and when it is unpickled: the latter is what happens here. To be
    called on every rank, between a backward and the next forward's end.
    """
    hooks = list(module._comm_hooks)
    module.__setstate__(module.__getstate__())
    module._comm_hooks.clear()
    for hook, hook_state in hooks:
        module.register_comm_hook(hook_state, hook)


class _MissingPolicy(FreezePolicy):
    """In a callback that the Trainer made from a checkpoint, in place of the user's policy object."""

    def num_frozen(self, decision: FreezeDecision) -> int:
        raise NotImplementedError


def _as_policy(policy: FreezePolicy | Mapping[str, Any] | str) -> FreezePolicy:
    if policy == OWN_POLICY:
        return _MissingPolicy()
    if isinstance(policy, str):
        return make_policy(policy)
    if isinstance(policy, Mapping):
        return make_policy(**policy)
    if isinstance(policy, FreezePolicy):
        return policy
    raise ValueError(
        f"freeze policy {policy!r} is none: give a name, the arguments of make_policy as a dict, or an object with the"
        " methods of FreezePolicy (derive from it)."
    )


def _gather(proposal: int | None) -> list[int]:
    """Every rank's proposal. Collective over all processes."""
    assert proposal is not None
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [proposal]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, proposal)
    return everyone


def _refuse_setup(args: TrainingArguments) -> None:
    """What a callback alone cannot freeze in.

    Raises:
        ValueError: naming the setting, the reason and the remedy.
    """
    kind = AcceleratorState().distributed_type
    refuse_reentrant_checkpointing(args)
    for is_set, what, why in (
        (kind == DistributedType.FSDP, "FSDP", "it flattens layers into parameters that cannot be frozen in part"),
        (kind == DistributedType.DEEPSPEED, "DeepSpeed", "its optimizer holds copies of the parameters"),
        (args.n_gpu > 1, f"nn.DataParallel over {args.n_gpu} devices", "it copies the model; start one process each"),
        (args.torch_compile, "torch_compile=True", "a compiled forward does not see layers change"),
        (args.ddp_static_graph, "ddp_static_graph=True", "freezing changes the graph"),
    ):
        if is_set:
            raise ValueError(f"LayerFreezeCallback cannot be combined with {what}: {why}. Or remove the callback.")


def refuse_reentrant_checkpointing(args: TrainingArguments) -> None:
    """Under it, a layer whose input needs no gradient gets none: the first one above the frozen layers.

    Raises:
        ValueError: it is asked for.
    """
    options = {
        **(getattr(args, "gradient_checkpointing_kwargs", None) or {}),
        **(getattr(args, "activation_checkpointing_kwargs", None) or {}),
    }
    if options.get("use_reentrant"):
        raise ValueError(
            "LayerFreezeCallback cannot be combined with gradient checkpointing with use_reentrant=True: it needs a"
            " gradient through the frozen layers; set use_reentrant=False. Or freeze nothing."
        )
