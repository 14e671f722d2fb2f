"""The parts that the loss of a training is made of: the trainer's functions and settings, and the model's function."""

from __future__ import annotations

from types import MethodType
from typing import Any

from transformers.loss.loss_utils import LOSS_MAPPING

from .job import TrainingJob


class LossSource:
    """The parts of a loss when the training begins, and their comparison with those of a later step.

    Before the first step it is found out how the losses of a batch's parts add up. This holds for these parts only.

    Args:
        job: the training job.

    Attributes:
        is_stock: whether they are of transformers: its model with its own loss, and the stock `compute_loss`.
    """

    def __init__(self, job: TrainingJob) -> None:
        self._trainer: Any = job.trainer
        model: Any = job.model
        self._model: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._parts = self._now()
        self.is_stock = (
            type(self._model).__module__.startswith("transformers.")
            and not self._model._forward_pre_hooks
            and not self._model._forward_hooks
            and self._parts["model.loss_function"] is None
            and self._parts["compute_loss_func"] is None
            and getattr(self._parts["LOSS_MAPPING"], "__module__", "transformers.").startswith("transformers.")
            and not job.overrides_loss
        )

    def _now(self) -> dict[str, Any]:
        """The parts by their names in messages."""
        trainer, model = self._trainer, self._model
        own = vars(trainer).get("compute_loss")
        return {
            "compute_loss": type(trainer).compute_loss if own is None else own,
            "compute_loss_func": trainer.compute_loss_func,
            "label_smoother": trainer.label_smoother,
            "model.loss_function": getattr(model, "_loss_function", None),  # as the user has set it
            "model.loss_type": getattr(model, "loss_type", None),
            "LOSS_MAPPING": LOSS_MAPPING.get(getattr(model, "loss_type", None) or "ForCausalLM"),
        }

    def changed(self) -> str:
        """Return the name of a part that is another one now; empty if there is none. Takes a few microseconds."""
        for name, part in self._now().items():
            before = self._parts[name]
            # each access of a method makes another object
            is_same = part is before or (isinstance(part, (MethodType, str)) and part == before)
            if not is_same:
                return name
        return ""

    def refuse_change(self) -> None:
        """Refuse a step whose loss is made of other parts.

        Raises:
            ValueError: a part is another one.
        """
        if name := self.changed():
            raise ValueError(
                f"{name} was set after training had begun, but the way in which the losses of a batch's parts add"
                " up (over micro-batches, replicas or accumulated batches) was determined for the earlier loss."
                " Set it before train(); or override compute_loss, and choose between the losses there."
            )


def has_own_backward(accelerator: Any) -> bool:
    """Whether the accelerator's `backward` is not the method of Accelerate. Takes a microsecond."""
    backward = accelerator.backward
    code = getattr(getattr(backward, "__func__", backward), "__globals__", {})  # `functools.wraps` copies the names
    return not str(code.get("__name__", "")).startswith("accelerate.")


def refuse_own_backward(accelerator: Any) -> None:
    """Refuse a `backward` of the user's on the accelerator, which the steps of several stages do not call.

    Raises:
        ValueError: it is not the method of Accelerate.
    """
    if has_own_backward(accelerator):
        raise ValueError(
            "accelerator.backward was replaced, but with several stages the backward pass runs stage by stage, and"
            " does not call it. Change the loss in compute_loss (a factor, another term), or gradients in a callback's"
            " on_pre_optimizer_step; or set pipeline_parallel_size=1."
        )
