"""The cases. Each module enters its own into `kit.CASES`."""

from . import driven_calls, driven_models, front_settings, front_weights

__all__ = ["driven_calls", "driven_models", "front_settings", "front_weights"]
