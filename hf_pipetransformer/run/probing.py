"""What is found out on a few samples before the first step: how samples are collated, who probes, what the loss calls.

A model in memory is probed by every process. A lazily loaded one, of which K processes would read the same files K
times, is probed by process 0 alone, with the threads of all processes of its host, while the others wait.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import is_out_of_memory
from ..model.called_inputs import RecordedInputs, added_settings, named_inputs
from ..model.left_as_found import left_as_found
from ..model.micro_batch import Batch, as_the_user_made_it, with_name
from ..model.nested import in_new_containers, tensors_of
from ..model.placeholders import evaluation_mode
from ..model.tags import TAGS
from ..model.units import CalledWith
from ..pipeline.mesh import ProcessMesh
from ..randomness import generators_kept, seeded
from .job import TrainingJob
from .lazy_model import is_lazy
from .loss import Loss

T = TypeVar("T")


# ---------------------------------------------------------------------------------------------------------
# Samples
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleCollator:
    """The user's collator for probes. Calls leave random generators, including the collator's own, unchanged.

    Attributes:
        job: the training job.
        collate_fn: the user's collator.
        is_shared: whether all processes have the same samples.
    """

    job: TrainingJob
    collate_fn: Callable[[list[Any]], Any]
    is_shared: bool = True

    def __call__(self, rows: Sequence[Any]) -> Batch:
        """Collate these samples into a batch, on the model's device."""
        with generators_kept(self.collate_fn), seeded(self.job.args.seed):
            return self.job.on_models_device(dict(with_name(self.collate_fn(list(rows)))))

    def apart(self, rows: Sequence[Any]) -> list[Batch]:
        """Collate these samples into batches of at most as many as are run at once."""
        step = self.job.rows_at_once
        return [self(rows[start : start + step]) for start in range(0, len(rows), step)]

    def padded(self, rows: Sequence[Any]) -> Batch:
        """Return the batch with the longest samples; with short ones every stage would seem to fit into memory."""

        def elements(batch: Batch) -> int:
            tensors = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()]
            return max((value[0].numel() for value in tensors), default=0)

        return max(self.apart(rows), key=elements)

    @property
    def is_probed_once(self) -> bool:
        """Whether process 0 finds out for all processes what is probed on these samples.

        Not with one stage: the loss may then contain collectives of all processes.
        """
        return is_lazy(self.job.model) and self.is_shared and self.job.args.uses_pipeline


# ---------------------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------------------


def found_by_each(mesh: ProcessMesh, once: bool, probe: Callable[[], T]) -> list[T]:
    """Call a function that finds something out, and return what was found. Collective over all processes.

    Args:
        mesh: the processes.
        once: whether only process 0 calls it.
        probe: what is called; it must not contain collectives, and its result must be picklable.

    Returns:
        What each process has found, beginning with process 0; what process 0 has found alone with `once`.

    Raises:
        Exception: as `ProcessMesh.failing_together`.
    """
    told = b""
    with mesh.failing_together():
        if mesh.rank == 0 or not once:
            with _threads_of_host(mesh) if once else nullcontext():
                told = pickle.dumps(probe())
    return [pickle.loads(theirs) for theirs in mesh.gather_objects(told)[: 1 if once else None]]


@contextmanager
def _threads_of_host(mesh: ProcessMesh) -> Iterator[None]:
    """Inside, this process computes with the threads of all processes of its host, but no more than it has cores."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = before * int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world_size))
    torch.set_num_threads(max(before, min(wanted, cores)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------------------------------------
# Calls of the loss
# ---------------------------------------------------------------------------------------------------------


@contextmanager
def without_autocast() -> Iterator[None]:
    """Inside, `torch.autocast` does nothing.

    Accelerate has wrapped the model's forward in it, once for each trainer that the model has had, and a user may use
    it in the loss; neither offers a way to switch it off.
    """
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    torch.autocast.__enter__ = lambda self: self  # type: ignore[method-assign]
    torch.autocast.__exit__ = lambda self, *_: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]


class _FirstCall(BaseException):
    """Raised to leave a loss at its first call of the model. No `except Exception` in a user's loss catches it."""


def calls_of_loss(job: TrainingJob, batch: Batch, only_first: bool = False) -> tuple[list[Batch], RecordedInputs]:
    """Compute the loss of a batch, and return the inputs of each call of the model, and the prepared batch's.

    Inputs are by name, as they were when the model was called. If `compute_loss` fails, the calls before that are
    returned: the same error will show when the model itself is called, or in the first step.

    Args:
        job: the training job.
        batch: the batch.
        only_first: whether to leave the loss at its first call, so that the model does not run.
    """
    trainer, model = job.trainer, job.model
    given, calls = RecordedInputs({}), list[Batch]()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = named_inputs(module, args, kwargs)
        # the model may write into a dict that it is called on
        calls.append({n: in_new_containers(v) if isinstance(v, Mapping) else v for n, v in inputs.items()})
        if only_first:
            raise _FirstCall

    with evaluation_mode(model), torch.no_grad(), left_as_found(model, trainer), seeded(job.args.seed):
        hook = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            inputs = job.on_models_device(dict(with_name(trainer._prepare_inputs(as_the_user_made_it(dict(batch))))))
            given = RecordedInputs(inputs)
            Loss(job).of_batch(inputs)
        except _FirstCall:
            pass
        except Exception as error:
            if is_out_of_memory(error):
                raise
        finally:
            hook.remove()
    return calls, given


def inputs_of(job: TrainingJob, called: CalledWith, batch: Batch) -> Batch:
    """Return inputs of the model for probes on a batch: the batch's own, or those of the loss's first call."""
    if called.takes_batch:
        return {name: value for name, value in batch.items() if name not in called.kept_back}
    calls, _ = calls_of_loss(job, batch, only_first=True)
    assert calls, "the loss has called the model on another batch"
    return calls[0] if called.nested_in is None else dict(calls[0][called.nested_in])


def how_called(job: TrainingJob, sample: Batch) -> CalledWith:
    """Find out on what `compute_loss` calls the model, from a batch of a few samples."""
    if not job.overrides_loss:
        return job.called_by_stock(sample)
    calls, given = calls_of_loss(job, sample, only_first=True)
    if not calls:
        return CalledWith()
    call = calls[0]
    if call.keys().isdisjoint(sample) and tensors_of(call):
        only = next(iter(call)) if len(call) == 1 else None
        is_nested = only is not None and isinstance(call[only], Mapping)
        return CalledWith(takes_batch=False, nested_in=only if is_nested else None)
    if given.are_exchanged(call, job.not_in_keys):
        return CalledWith()
    return CalledWith(frozenset(sample) - call.keys() - {TAGS}, added_settings(sample, call))
