"""Which layers are frozen, and when: the policies, the callback that asks them, and freezing in a plain Trainer."""

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
