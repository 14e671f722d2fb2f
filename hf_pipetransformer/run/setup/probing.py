"""What is found out on a few samples before the first step: how samples are collated, who probes, on which inputs.

A model in memory is probed by every process. A lazily loaded one, of which K processes would read the same files K
times, is probed by process 0 alone, with the threads of all processes of its host, while the others wait.
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
from ...model.nested import in_new_containers
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
            return self.job.on_models_device(dict(with_name(self.collate_fn(list(rows)))))

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
# Inputs of the model
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


def examples_of(job: TrainingJob, batch: Batch) -> list[ExampleInputs]:
    """Where the model's inputs stand in such batches as this one, by their names. It calls nothing of the user's.

    Raises:
        UnsupportedModelError: as `example_inputs`.
    """
    if not job.overrides_loss:
        return [ExampleInputs(job.called_on(batch))]
    return example_inputs(job.model, batch, job.trainer.label_names or ())


def first_that_runs(job: TrainingJob, places: Sequence[ExampleInputs], sample: Batch) -> ExampleInputs:
    """Return the first place of the model's inputs on which it runs; if there is one only, without running it.

    Raises:
        Exception: the model's on the inputs of the first place, if it runs on none.
    """
    if len(places) == 1:
        return places[0]
    first: Exception | None = None
    with evaluation_mode(job.model), torch.no_grad(), left_as_found(job.model), seeded(job.args.seed):
        for place in places:
            inputs = in_new_containers(place.of(job.model, sample))
            try:
                job.model(**(inputs if place.called.nested_in is None else {place.called.nested_in: inputs}))
            except Exception as error:  # whatever the model raises
                if is_out_of_memory(error):
                    raise
                first = first or error
            else:
                return place
    assert first is not None
    raise first
