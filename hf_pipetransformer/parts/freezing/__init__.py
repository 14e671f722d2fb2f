"""Layer freezing: the freeze policies, the callback that applies them, and freezing in a plain Trainer."""

from .policies import (
    AdaptivePolicy,
    AlphaPolicy,
    AutoFreezePolicy,
    FreezeDecision,
    FreezePolicy,
    NeverFreeze,
    SchedulePolicy,
    make_policy,
)

__all__ = [
    "AdaptivePolicy",
    "AlphaPolicy",
    "AutoFreezePolicy",
    "FreezeDecision",
    "FreezePolicy",
    "NeverFreeze",
    "SchedulePolicy",
    "make_policy",
]
