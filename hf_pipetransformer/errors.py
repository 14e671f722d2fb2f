"""What goes wrong in words that a user can act on."""

from __future__ import annotations

import torch

OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")
"""What torch and the libraries below it say then, most of them in a plain `RuntimeError`."""


ONE_STAGE = "et pipeline_parallel_size=1"
"""In a remedy, behind "S" or "s"."""
FREEZE_NOTHING = "reeze nothing (freeze_policy='none' and no LayerFreezeCallback)"
"""The same where there is one stage already, behind "F" or "f": layers are looked for only because they freeze."""


class UnsupportedModelError(ValueError):
    """The model cannot be run as a pipeline, or some of its layers cannot be frozen.

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
        # the default would call __init__ with the finished message; errors travel between processes
        return type(self), (self.model_name, self.reason, self.remedy, self.wanted)

    def with_one_stage(self) -> UnsupportedModelError:
        """The same where there is one stage already: then that is no remedy, and frozen layers are the reason."""
        if ONE_STAGE not in self.remedy:
            return self
        remedy = self.remedy.replace(f"S{ONE_STAGE}", f"F{FREEZE_NOTHING}").replace(
            f"s{ONE_STAGE}", f"f{FREEZE_NOTHING}"
        )
        return UnsupportedModelError(self.model_name, self.reason, remedy, "trained with frozen layers")


class PeerFailedError(RuntimeError):
    """Another process of the job died, failed or hangs; the message says which one, in which phase, at which step.

    Nothing can be repaired inside the process. Start the job again with `resume_from_checkpoint="last"`.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this process had too little memory on a device or the host, which says nothing against the model."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, PeerFailedError) or not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(words in text for words in OUT_OF_MEMORY)
