"""Who died, stopped or hangs, and where; then all processes end. Four names are all that the rest needs.

- `watching`: inside, the processes of a training watch one another. It yields a `Watchdog`, with which they meet.
- `phase`: what this process is doing, for a while; tests let a process fail where it enters a phase.
- `PROGRESS`: the record of it, which outlives the process.
"""

from .progress import PROGRESS, phase
from .watchdog import Watchdog, watching

__all__ = ["PROGRESS", "Watchdog", "phase", "watching"]
