"""What goes wrong in words that a user can act on."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """The model cannot be run as a pipeline.

    The message names the model, the reason, and what can be done about it.
    """

    def __init__(self, model: object, reason: str, remedy: str) -> None:
        name = model if isinstance(model, str) else type(model).__name__
        super().__init__(f"{name} cannot be trained as a pipeline: {reason} {remedy}")
        self.model_name = name
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        # the default would call __init__ with the finished message; errors travel between processes
        return type(self), (self.model_name, self.reason, self.remedy)


class PeerFailedError(RuntimeError):
    """Another process of the job died, failed or hangs; the message says which one, in which phase, at which step.

    Nothing can be repaired inside the process. Start the job again with `resume_from_checkpoint="last"`.
    """
