"""Probing on a few samples before the first step: the collation of samples, the probing process, and its inputs.

A model in memory is probed by every process. A lazily loaded model is probed by process 0 alone, with the threads of
all processes of its host, while the others wait: otherwise K processes would read the same files K times.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ...errors import is_out_of_memory
from ...model.example_inputs import ExampleInputs, example_inputs
from ...model.left_as_found import left_as_found
from ...model.micro_batch import Batch, with_name
from ...model.nested import in_new_tensors
from ...model.placeholders import evaluation_mode
from ...pipeline.mesh import ProcessMesh
from ...randomness import generators_kept, seeded
from ..job import TrainingJob
from ..lazy_model import is_lazy

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
            # copied, because a probe may write into its batch, and a collator may return the samples' own tensors
            return in_new_tensors(self.job.on_models_device(dict(with_name(self.collate_fn(list(rows))))))

    def in_batches(self, rows: Sequence[Any]) -> list[Batch]:
        """Collate these samples into batches of at most as many as are run at once."""
        step = self.job.rows_at_once
        return [self(rows[start : start + step]) for start in range(0, len(rows), step)]

    def padded(self, rows: Sequence[Any]) -> Batch:
        """Return the batch with the longest samples; with short ones every stage would seem to fit into memory."""

        def elements(batch: Batch) -> int:
            tensors = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()]
            return max((value[0].numel() for value in tensors), default=0)

        return max(self.in_batches(rows), key=elements)

    @property
    def is_probed_once(self) -> bool:
        """Whether process 0 alone probes on these samples, for all processes.

        False with one stage: the loss may then contain collectives of all processes.
        """
        return is_lazy(self.job.model) and self.is_shared and self.job.args.uses_pipeline


# ---------------------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------------------


def found_by_each(mesh: ProcessMesh, once: bool, probe: Callable[[], T]) -> list[T]:
    """Call a probe, and return its results. Collective over all processes.

    Args:
        mesh: the processes.
        once: whether only process 0 calls it.
        probe: the function to call. It must not contain collectives, and its result must be picklable.

    Returns:
        The result of each process, beginning with process 0; with `once`, the result of process 0 alone.

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
# Inputs of the model
# ---------------------------------------------------------------------------------------------------------


@contextmanager
def without_autocast() -> Iterator[None]:
    """Inside the context, `torch.autocast` has no effect.

    Accelerate wraps the model's forward in autocast, once for each trainer of the model, and a user may use it in the
    loss. Neither offers a way to switch it off.
    """
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    torch.autocast.__enter__ = lambda self: self  # type: ignore[method-assign]
    torch.autocast.__exit__ = lambda self, *_: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]


def examples_of(job: TrainingJob, batch: Batch) -> list[ExampleInputs]:
    """Where the model's inputs stand in batches like this one, by their names. No code of the user's is called.

    Raises:
        UnsupportedModelError: as `example_inputs`.
    """
    if not job.overrides_loss:
        return [ExampleInputs(job.called_on(batch))]
    return example_inputs(job.model, batch, job.trainer.label_names or ())


def first_that_runs(job: TrainingJob, places: Sequence[ExampleInputs], sample: Batch) -> ExampleInputs:
    """Return the first place at which the model accepts the inputs. A single place is returned without running it.

    Raises:
        Exception: the model's error on the inputs of the first place, if it fails on all places.
    """
    if len(places) == 1:
        return places[0]
    first: Exception | None = None
    with evaluation_mode(job.model), torch.no_grad(), left_as_found(job.model), seeded(job.args.seed):
        for place in places:
            inputs = in_new_tensors(place.of(job.model, sample))
            try:
                job.model(**(inputs if place.called.nested_in is None else {place.called.nested_in: inputs}))
            except Exception as error:  # the model may raise any error
                if is_out_of_memory(error):
                    raise
                first = first or error
            else:
                return place
    assert first is not None
    raise first
