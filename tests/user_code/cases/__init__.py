"""Users' code. Each module enters its cases into `kit.CASES`."""

from . import data, issue, issue_later, loss, loss_state, model, training, unseen

__all__ = ["data", "issue", "issue_later", "loss", "loss_state", "model", "training", "unseen"]
