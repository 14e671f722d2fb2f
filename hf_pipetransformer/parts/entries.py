"""Lists the parts that a training may have, in calling order.

    part            requested by                       does
    freezing        freeze_policy, frozen layers       requests that more layers be frozen
    records         always                             log lines, metrics, the record for the report
    preemption      always                             saves and exits on SIGTERM
    prefix_cache    activation_cache, frozen layers    requests that frozen layers count as cached
    front           activation_cache, with one stage   reads the outputs of frozen modules
    loss_effects    several stages                     copies the loss's changes of the trainer to all stages
    frozen_calls    activation_cache, with an own loss reads the outputs of frozen modules that the loss calls
    optimizer_check several stages, or sharding        refuses an optimizer, hooks and rates that stages cannot share
    watchdog        watchdog_timeout                   ends the job when a process dies or hangs

A new part is a folder `parts/<name>` with a module `part.py`, and a line in `ENTRIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..run.job import TrainingJob
from ..run.loss_source import LossSource

if TYPE_CHECKING:
    from ..run.parts import RunPart
    from ..run.run import PipelineRun


@dataclass(frozen=True)
class Entry:
    """A part that a training may have.

    Attributes:
        name: name of its folder in `parts/`.
        is_wanted: whether a training has the part.
        asked_by: the argument that requests it; None if the training has it by default.
        make: creates the part for a run, or returns None if a module that it needs is not installed. The default is
            `make` of `parts/<name>/part.py`, which is imported then.
    """

    name: str
    is_wanted: Callable[[TrainingJob], bool] = lambda job: True
    asked_by: Callable[[TrainingJob], str | None] = lambda job: None
    make: Callable[[PipelineRun], RunPart | None] | None = None


def _cache_is_on(job: TrainingJob) -> str | None:
    return "activation_cache='on'" if job.args.activation_cache == "on" else None


def _policy(job: TrainingJob) -> str | None:
    name, callback = job.args.freeze_policy, job.freeze_callback
    if callback is None:
        return None
    return f"freeze_policy={name!r}" if name != "none" else type(callback).__name__


def _own_code(job: TrainingJob) -> str | None:
    own = [f"an overridden {method}" for method in ("compute_loss", "log") if job.overrides(method)]
    own += ["compute_loss_func"] if job.trainer.compute_loss_func is not None else []
    return f"{own[0]} with pipeline_parallel_size={job.args.pipeline_parallel_size}" if own else None


def _timeout(job: TrainingJob) -> str | None:
    seconds, default = job.args.watchdog_timeout, type(job.args).__dataclass_fields__["watchdog_timeout"].default
    return f"watchdog_timeout={seconds}" if seconds != default else None


def _may_call_frozen(job: TrainingJob) -> bool:
    args = job.args
    is_wanted = args.activation_cache == "on" or (args.activation_cache == "auto" and not args.full_determinism)
    calls = bool(args.cached_modules) or not LossSource(job).is_stock  # a loss of transformers calls no other module
    return is_wanted and calls and not args.torch_compile


ENTRIES = [
    Entry("freezing", lambda job: job.freeze_callback is not None or job.follows_freezing, _policy),
    Entry("records"),
    Entry("preemption"),
    Entry("prefix_cache", lambda job: job.may_cache_prefix, _cache_is_on),
    Entry("front", lambda job: job.may_cache_front, _cache_is_on),
    Entry("loss_effects", lambda job: job.args.uses_pipeline, _own_code),
    Entry("frozen_calls", _may_call_frozen),
    Entry("optimizer_check", lambda job: job.args.uses_pipeline or job.args.replica_sharding != "none"),
    Entry("watchdog", lambda job: job.mesh.world_size > 1 and job.args.watchdog_timeout > 0, _timeout),
]
"""All parts, in calling order."""
