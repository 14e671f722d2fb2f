"""Errors whose messages tell the user what to do."""

from __future__ import annotations

import torch

OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")
"""Parts of the messages with which torch and the libraries below it report it, mostly in a plain `RuntimeError`."""


ONE_STAGE = "et pipeline_parallel_size=1"
"""Part of a remedy, after "S" or "s"."""
FREEZE_NOTHING = "reeze nothing (freeze_policy='none' and no LayerFreezeCallback)"
"""Its replacement, after "F" or "f", if there is only one stage: layers are then needed only for freezing."""


class UnsupportedModelError(ValueError):
    """Raised if the model cannot be run as a pipeline, or some of its layers cannot be frozen.

    The message names the model, the reason, and what can be done about it.
    """

    def __init__(self, model: object, reason: str, remedy: str, wanted: str = "trained as a pipeline") -> None:
        name = model if isinstance(model, str) else type(model).__name__
        super().__init__(f"{name} cannot be {wanted}: {reason} {remedy}")
        self.model_name = name
        self.reason = reason
        self.remedy = remedy
        self.wanted = wanted

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        # the default would call __init__ with the complete message; errors are sent between processes
        return type(self), (self.model_name, self.reason, self.remedy, self.wanted)

    def with_one_stage(self) -> UnsupportedModelError:
        """The error for a run with one stage: that is no remedy then, and freezing layers is what failed."""
        if ONE_STAGE not in self.remedy:
            return self
        remedy = self.remedy.replace(f"S{ONE_STAGE}", f"F{FREEZE_NOTHING}").replace(
            f"s{ONE_STAGE}", f"f{FREEZE_NOTHING}"
        )
        return UnsupportedModelError(self.model_name, self.reason, remedy, "trained with frozen layers")


class PeerFailedError(RuntimeError):
    """Raised if another process of the job died, failed or hangs.

    The message names the process, its phase and its step. The failure cannot be repaired inside the process: start the
    job again with `resume_from_checkpoint="last"`.
    """


def refuse_wrong_order(cls: type, ours: type, stock: type, first: bool) -> None:
    """Refuse a class that combines one of ours with another library's in the order that loses one's behaviour.

    Args:
        cls: the combined class.
        ours: our class, a subclass of `stock`.
        stock: transformers' class, from which the other library's is derived, too.
        first: whether ours must come before the other library's, instead of after it.

    Raises:
        ValueError: the order is the other one.
    """
    order = cls.__mro__
    place = order.index(ours)
    before, after = order[1:place], order[place + 1 : order.index(stock)]
    misplaced = [other for other in (before if first else after) if issubclass(other, stock)]
    misplaced = [other for other in misplaced if not issubclass(other, ours)]
    if not misplaced:
        return
    other = misplaced[0].__name__
    wanted = [ours.__name__, other] if first else [other, ours.__name__]
    lost = f"methods of {other} would never call ours" if first else f"the defaults of {other} would be lost"
    raise ValueError(
        f"class {cls.__name__} derives from {ours.__name__} and {other} in an order in which {lost}."
        f" Write class {cls.__name__}({', '.join(wanted)})."
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory, which does not mean that the model is unsupported."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, PeerFailedError) or not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(words in text for words in OUT_OF_MEMORY)
