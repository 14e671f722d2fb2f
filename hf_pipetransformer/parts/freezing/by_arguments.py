"""Creates the freeze callback from a trainer's arguments."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from .callback import LayerFreezeCallback
from .policies import FreezePolicy, NeverFreeze


class FreezingByArguments:
    """Adds a `LayerFreezeCallback` to a trainer, and replaces it when a hyperparameter search changes the arguments.

    Args:
        policy: a policy object to use in place of `args.freeze_policy`.
    """

    def __init__(self, policy: FreezePolicy | None) -> None:
        self._policy = policy
        self._callback: LayerFreezeCallback | None = None

    def add_to(self, trainer: Trainer) -> None:
        """Replace the callback of an earlier call. Adds no callback if the policy is `NeverFreeze`."""
        if self._callback is not None:
            trainer.remove_callback(self._callback)
            self._callback = None
        args: Any = trainer.args
        policy = self._policy if self._policy is not None else args.make_freeze_policy()
        if not isinstance(policy, NeverFreeze):
            self._callback = LayerFreezeCallback(
                policy, args.freeze_strategy, args.freeze_steps, args.max_frozen_layers
            )
            trainer.add_callback(self._callback)
