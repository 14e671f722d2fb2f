"""The cases. Each module enters its own into `kit.CASES`."""

from . import (
    attack_caches,
    attack_front,
    attack_loss,
    attack_recipes_front,
    attack_recipes_loss,
    driven_calls,
    driven_errors,
    driven_models,
    driven_trainer,
    examined,
    front_settings,
    front_weights,
    late_changes,
    processes,
    real_scripts,
    unexamined,
)

__all__ = [
    "attack_caches",
    "attack_front",
    "attack_loss",
    "attack_recipes_front",
    "attack_recipes_loss",
    "driven_calls",
    "driven_errors",
    "driven_models",
    "driven_trainer",
    "examined",
    "front_settings",
    "front_weights",
    "late_changes",
    "processes",
    "real_scripts",
    "unexamined",
]
