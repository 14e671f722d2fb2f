"""Layer freezing as a callback: it follows the training and proposes how many layers to freeze.

    on_train_begin           decision 0 (a schedule may freeze from the start)
      on_epoch_begin         decision T, freeze_strategy="epoch": at the start of every epoch but the first
        on_pre_optimizer_step  gradient norms, if the policy needs them
        on_step_end          decision T, freeze_strategy="steps": every freeze_steps optimizer steps

In a `PipeTransformerTrainer` the callback only proposes, and the trainer freezes. In a plain `transformers.Trainer`
the callback itself freezes the layers, at the next forward (`plain_trainer`).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from ...argument_values import checkpoints_reentrantly
from ...file_formats import freezing_in
from ...logs import follow_transformers, log_once
from ...resilience.exit import end_at_exit
from .frozen_prefix import FoundLayers
from .plain_trainer import PlainTrainer, gather_proposals, refuse_setup, trained_module
from .policies import (
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

logger = logging.getLogger(__name__)
follow_transformers()

MOST_DECISIONS = 1000
"""Maximum number of future decisions that `describe` computes."""
MOST_TO_NAME = 5
"""Maximum number of freezes that `describe` lists."""
NOTHING = "nothing freezes"
OWN_POLICY = "(not in the checkpoint)"
"""Placeholder for a user's own policy object in a saved callback."""


class LayerFreezeCallback(TrainerCallback, ExportableState):
    """Freezes a model's layers from the bottom up while it trains.

    Add it to any `transformers.Trainer`, including one that runs under DDP:

    ```python
    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[LayerFreezeCallback("alpha")])
    trainer.train()
    ```

    Frozen layers and the embeddings run in eval mode (no dropout) and build no autograd graph. Their parameters do
    not require a gradient, have no optimizer state, and take no part in DDP's all-reduce. A parameter that a frozen
    layer shares with an active layer or with the head (a head tied to the embeddings) is frozen for both. The log
    names the layers, and the parameters outside of the layers that stop training with them. When training ends, the
    `requires_grad` flags are restored to their values before training.

    Under DDP the reducer is rebuilt in place at each freeze, as DDP does when it is unpickled; the wrapper stays the
    same object. (`find_unused_parameters=True`, the Trainer's default, would tolerate frozen parameters, but would
    still communicate zeros for them; without it DDP raises "Expected to have finished reduction".)

    In a plain Trainer the callback sees gradient norms after clipping. At one step clipping scales all layers alike,
    so the order of the layers is correct. A policy that compares norms over time (autofreeze) compares clipped
    gradients, unless you set `max_grad_norm=0`.

    The frozen state is part of every checkpoint and is restored on resume, whether or not
    `restore_callback_states_from_checkpoint` is set. A new `train()` from step 0 starts without frozen layers.

    Args:
        policy: a name ("alpha", "adaptive", "autofreeze"), the arguments of `make_policy` as a dict, or a policy.
        freeze_strategy: when decisions are made: "epoch", at the start of each epoch but the first, or "steps".
        freeze_steps: optimizer steps between decisions; a value below 1 is a fraction of all steps, as for
            `eval_steps`.
        max_frozen_layers: upper bound on the number of frozen layers.

    Attributes:
        num_frozen: number of layers that are frozen, or will be at the next forward.
        proposal: after a decision and until `take_proposal`, the number of layers to freeze. It is set at every
            decision, even if the number does not change: all processes must see a proposal at the same time.
        sharded_layers: the model's layers, if a `PipeTransformerTrainer` has found them before FSDP2 shards the model.

    Raises:
        ValueError: immediately, if an argument is out of range; at the start of training, if the Trainer is set up in
            a way that excludes freezing (DeepSpeed, `torch_compile`, nn.DataParallel, a static DDP graph, reentrant
            checkpointing, and FSDP unless a `PipeTransformerTrainer` uses version 2 of it); at the first step, if no
            parameter inside of a layer is trained and freezing would stop a prompt or prefix; before the first
            update, if the loss calls only a part of the model and never the model itself.
        UnsupportedModelError: at the first step, if no layers can be found in the model.
    """

    freezes_layers = True
    """Marks the callback that a `PipeTransformerTrainer` drives."""

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
        self._decided_at: int | None = None  # global step at which the last decision was made
        self._observed: tuple[torch.Tensor, torch.Tensor] | None = None  # per unit: sum of squares, steps
        self._num_layers: int | None = None  # None until the model's layers have been found
        self._max_frozen = 0
        self._only_proposes = False  # True if a PipeTransformerTrainer takes the proposals
        self._begins_within_epoch = False
        self._standalone: PlainTrainer | None = None
        self.sharded_layers: FoundLayers | None = None

    # ------------------------------------------------------------------------------------ interface for the trainer
    def attach(
        self, num_layers: int, max_frozen: int, state: TrainerState, outside_alone: Collection[str] = ()
    ) -> None:
        """Let a trainer drive this callback. The trainer calls `observe`, takes `proposal` and freezes the layers.

        Call it before `on_train_begin`, once the trainer's state is restored; `num_frozen` then holds the number that
        was frozen in the checkpoint. It stays in effect until `on_train_end`.

        Args:
            num_layers: L.
            max_frozen: the largest number of layers that can be frozen (`FreezableLayers.max_frozen`).
            state: the trainer's state.
            outside_alone: as in `know_layers`.

        Raises:
            ValueError: no layer can be frozen.
        """
        self._only_proposes = True
        self._begin(state)
        self.know_layers(num_layers, max_frozen, outside_alone)

    def know_layers(self, num_layers: int, max_frozen: int, outside_alone: Collection[str]) -> None:
        """Set the number of layers, once the model's layers have been found.

        Args:
            num_layers: L.
            max_frozen: the largest number of layers that can be frozen (`FreezableLayers.max_frozen`).
            outside_alone: parameters that freezing would stop, if none is inside a layer
                (`FreezableLayers.outside_alone`).

        Raises:
            ValueError: no layer can be frozen, or the checkpoint's state belongs to another model.
        """
        if not isinstance(self.policy, NeverFreeze):
            check_something_to_freeze(max_frozen, num_layers, outside_alone)
        observed = num_layers if self._observed is None else len(self._observed[0])
        if self.num_frozen > max_frozen or observed != num_layers:
            raise ValueError(
                f"trainer_state.json: stateful_callbacks.{type(self).__name__} has num_frozen={self.num_frozen} and"
                f" gradients of {observed} layers, but of the model's {num_layers} layers {max_frozen} can be frozen."
                " Resume with the model that was saved, or train from the beginning."
            )
        self._num_layers, self._max_frozen = num_layers, max_frozen

    def observe(self, squared: torch.Tensor | Sequence[float]) -> None:
        """Record the squared gradient norm of each unit at an optimizer step, without synchronization.

        A value that is not finite (an overflow under fp16) is skipped for that unit.

        Args:
            squared: `[L]`, unscaled and unclipped, of all units on every process.
        """
        values = torch.as_tensor(squared, dtype=torch.float64).detach()
        finite = values.isfinite()
        summed, steps = self._observed or (torch.zeros_like(values), torch.zeros_like(values))
        summed, steps = summed.to(values.device), steps.to(values.device)  # tensors from a checkpoint are on the CPU
        self._observed = summed + values.where(finite, 0.0), steps + finite

    @property
    def wants_gradient_norms(self) -> bool:
        """Whether the trainer should call `observe`."""
        return self.policy.needs_gradient_norms

    def decide(self, state: TrainerState, epoch: float) -> None:
        """Ask the policy for a decision. Collective over all processes in a plain Trainer.

        Args:
            state: the trainer's state.
            epoch: number of epochs done, a whole number at the start of an epoch.
        """
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
        if not self._only_proposes:
            self.num_frozen = agreed_num_frozen(gather_proposals(self.take_proposal()))

    def take_proposal(self) -> int | None:
        """Return and clear the proposal, or None if there is none. Ranks compare their proposals before `confirm`."""
        proposal, self.proposal = self.proposal, None
        return proposal

    def confirm(self, num_frozen: int) -> None:
        """Record that the trainer has frozen `num_frozen` units."""
        assert num_frozen >= self.num_frozen, "frozen layers do not thaw"
        self.num_frozen = num_frozen

    def describe(self, state: TrainerState) -> str:
        """Describe when which number of layers will freeze. Call it after `know_layers`.

        Args:
            state: the trainer's state; its numbers of steps and epochs must be set.
        """
        assert self._num_layers is not None
        now = f"{self.num_frozen} of {self._num_layers} layers are frozen; " if self.num_frozen else ""
        by_steps = self.freeze_strategy == "steps"
        known = policy_description(self.policy)
        if known is None or self.policy.needs_gradient_norms:
            return now + self._describe_decisions(state, repr(known["name"]) if known else type(self.policy).__name__)
        moments = self._moments(state)
        frozen, found = self.num_frozen, []
        for index, (epoch, step) in enumerate(islice(moments, MOST_DECISIONS), self._num_decisions):
            decision = FreezeDecision(index, self._num_layers, frozen, epoch, step, None, self._max_frozen)
            more = next_num_frozen(self.policy, decision, self.max_frozen_layers)
            if more > frozen:
                when = f"after step {step}" if by_steps else f"after epoch {epoch:g}"
                what = f"{more} in all" if frozen else "1 layer" if more == 1 else f"{more} layers"
                found.append(f"{what} {when if step else 'at once'}")
            frozen = more
        if not found:
            return f"{now}nothing more freezes" if now else NOTHING
        return f"{now}freezing " + ", ".join([*found[:MOST_TO_NAME], *(["..."] if len(found) > MOST_TO_NAME else [])])

    def _describe_decisions(self, state: TrainerState, name: str) -> str:
        """Describe when a policy decides, if its answers are not known in advance."""
        every = "after each epoch"
        if self.freeze_strategy == "steps":
            assert self.freeze_steps is not None
            every = f"every {steps_between_decisions(self.freeze_steps, state.max_steps)} steps"
        most = min(self._max_frozen, self.max_frozen_layers or self._max_frozen)
        return f"{name} decides {every} how many layers freeze, at most {most}"

    def freezes_nothing(self, state: TrainerState) -> bool:
        """Whether this training certainly freezes no layer. Call it after `know_layers`.

        Args:
            state: the trainer's state.
        """
        return self.describe(state) == NOTHING

    def _moments(self, state: TrainerState) -> Iterator[tuple[float, int]]:
        """Yield the remaining decisions: (epochs done, steps done).

        For a dataset without a length the Trainer sets the number of epochs to the largest integer.
        """
        per_epoch = state.max_steps / max(state.num_train_epochs, 1)
        if state.global_step == 0:
            yield 0.0, 0
        if self.freeze_strategy == "steps":
            assert self.freeze_steps is not None
            every = steps_between_decisions(self.freeze_steps, state.max_steps)
            first = (state.global_step // every + 1) * every
            yield from ((step / per_epoch, step) for step in range(first, state.max_steps, every))
            return
        first_epoch = max(math.ceil((state.epoch or 0.0) - 1e-6), 1)
        if self._decided_at == state.global_step and state.global_step:
            first_epoch += 1
        yield from ((float(e), round(e * per_epoch)) for e in range(first_epoch, state.num_train_epochs))

    # ------------------------------------------------------------------------------------ decisions
    def _begin(self, state: TrainerState) -> None:
        """Start without frozen layers, or from the state in the checkpoint."""
        self._begins_within_epoch = state.epoch % 1 != 0
        self.memory = {"num_frozen": 0, "num_decisions": 0, "decided_at": None, "observed": None, "policy": {}}
        if state.global_step == 0:
            return
        saved: Any = state.stateful_callbacks  # from JSON: callback name -> its state
        kept = freezing_in(saved, type(self).__name__)
        if kept is None:
            log_once(
                logger,
                logging.WARNING,
                "The checkpoint contains no freezing state, so training continues with nothing frozen.",
            )
            saved[type(self).__name__] = self.state()  # the stock Trainer raises for a callback without a state
            return
        self.memory = kept

    def _refuse_late(self) -> None:
        """Refuse a callback that was added during training.

        Raises:
            ValueError: this callback has not seen the start of training.
        """
        if self._standalone is None and self._num_layers is None:
            raise ValueError(
                "LayerFreezeCallback was added while training was running. Add it before calling train()."
            )

    def _observed_norms(self) -> tuple[float, ...] | None:
        if self._observed is None:
            return None
        summed, steps = (values.tolist() for values in self._observed)
        if not all(steps[self.num_frozen :]):
            return None  # every gradient of some unit overflowed
        return tuple(math.sqrt(s / n) if n else 0.0 for s, n in zip(summed, steps, strict=True))

    # ------------------------------------------------------------------------------------ events
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._only_proposes:
            refuse_reentrant_checkpointing(args)
            refuse_setup(args, self.sharded_layers is not None)
            end_at_exit()
            self._release()
            self._begin(state)
            self._num_layers = None
            optimizer = kwargs["optimizer"]
            module = trained_module(kwargs["model"], optimizer)
            self._standalone = PlainTrainer(self, module, optimizer, state, args, self.sharded_layers)
        elif state.global_step == 0:
            self.decide(state, 0.0)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # a run resumed within an epoch gets a second on_epoch_begin for it
        is_new, self._begins_within_epoch = not self._begins_within_epoch, False
        if self.freeze_strategy != "epoch" or not is_new or state.global_step == 0:
            return
        if self._decided_at == state.global_step:  # an earlier job decided before it saved
            return
        self._refuse_late()
        if self._num_layers is None:  # resumed at the start of an epoch: decide at the first forward
            assert self._standalone is not None
            self._standalone.decides_at_first_forward = True
        else:
            # rounded up: if the dataloader has no length, the epoch is not a whole number at its end
            self.decide(state, float(math.ceil(state.epoch)))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._standalone is not None:
            self._standalone.check_that_it_sees_calls()
            if self.wants_gradient_norms:
                self.observe(self._standalone.squared_norms())

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.freeze_strategy != "steps" or state.global_step >= state.max_steps:
            return
        assert self.freeze_steps is not None
        if state.global_step % steps_between_decisions(self.freeze_steps, state.max_steps) == 0:
            self._refuse_late()
            self.decide(state, state.epoch)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._standalone is not None and not self.num_frozen and not isinstance(self.policy, NeverFreeze):
            log_once(logger, logging.WARNING, "LayerFreezeCallback has frozen no layer in this training.")
        self._release()
        self._only_proposes = False

    def _release(self) -> None:
        if self._standalone is not None:
            self._standalone.release()
            self._standalone = None

    # ------------------------------------------------------------------------------------ checkpoints
    @property
    def memory(self) -> dict[str, Any]:
        """The state that a checkpoint stores, in plain values for JSON. Setting it restores that state."""
        observed = None if self._observed is None else [values.tolist() for values in self._observed]
        return {
            # the proposed number is frozen before the next step, so a resumed run starts with it
            "num_frozen": self.num_frozen if self.proposal is None else self.proposal,
            "num_decisions": self._num_decisions,
            "decided_at": self._decided_at,
            "observed": observed,
            "policy": self._policy_state(),
        }

    @memory.setter
    def memory(self, memory: Mapping[str, Any]) -> None:
        self.proposal = None
        self.num_frozen = int(memory["num_frozen"])
        self._num_decisions = int(memory["num_decisions"])
        self._decided_at = memory.get("decided_at")  # absent in checkpoints of earlier versions
        observed = memory["observed"]
        if observed is None:
            self._observed = None
        else:
            summed, steps = (torch.tensor(values, dtype=torch.float64) for values in observed)
            self._observed = summed, steps
        self.policy.load_state_dict(memory["policy"])

    def _policy_state(self) -> dict[str, Any]:
        state = self.policy.state_dict()
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{type(self.policy).__name__}.state_dict returned a value that JSON cannot store ({error}). Let it"
                " return numbers, strings, lists and dicts; of a tensor, its tolist()."
            ) from error
        return state

    def state(self) -> dict[str, Any]:
        """State for the Trainer's checkpoint."""
        return {
            "args": {
                "policy": policy_description(self.policy) or OWN_POLICY,
                "freeze_strategy": self.freeze_strategy,
                "freeze_steps": self.freeze_steps,
                "max_frozen_layers": self.max_frozen_layers,
            },
            "attributes": {"memory": self.memory},
        }


def _as_policy(policy: FreezePolicy | Mapping[str, Any] | str) -> FreezePolicy:
    if policy == OWN_POLICY:
        raise ValueError(
            "restore_callback_states_from_checkpoint=True recreates the LayerFreezeCallback from the checkpoint, which"
            " cannot contain your own policy object. Unset it: LayerFreezeCallback restores its own state."
        )
    if isinstance(policy, str):
        return make_policy(policy)
    if isinstance(policy, Mapping):
        return make_policy(**policy)
    if isinstance(policy, FreezePolicy):
        return policy
    raise ValueError(
        f"{policy!r} is not a freeze policy. Pass a policy name, the arguments of make_policy as a dict, or an"
        " object whose class is derived from FreezePolicy or has all of its members."
    )


def refuse_reentrant_checkpointing(args: TrainingArguments) -> None:
    """Refuse reentrant checkpointing: a layer then gets no gradient if its input does not require one.

    This would affect the first layer above the frozen ones.

    Raises:
        ValueError: `use_reentrant=True` is set.
    """
    if checkpoints_reentrantly(args):
        raise ValueError(
            "LayerFreezeCallback cannot be combined with gradient checkpointing with use_reentrant=True, which needs a"
            " gradient through the frozen layers. Set use_reentrant=False, or do not freeze layers."
        )
