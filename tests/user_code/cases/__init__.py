"""Users' code. Each module enters its cases into `kit.CASES`."""

from . import data, loss, model, training

__all__ = ["data", "loss", "model", "training"]
