"""Evaluations that generate (`predict_with_generate`): every process has the whole model for them.

Generating calls the model once for each token. So during training the weights are gathered for such an evaluation
(`generating`), and otherwise they are there (`move_whole_to_device`). Each process then generates for its own samples,
as under data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..model.placeholders import num_bytes
from ..pipeline.devices import device_budget, fits, is_on
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..planning.layout import Layout
from ..planning.predictions import CostModel
from ..planning.tables import MIB
from .job import TrainingJob
from .lazy_model import is_lazy


@contextmanager
def generating(pipeline: ElasticPipeline) -> Iterator[None]:
    """Inside the context, every process has the whole model of a placed pipeline, and the cache is not used.

    Collective over all processes.
    """
    if pipeline.is_lazy and pipeline.is_split:
        raise _generates_lazily(pipeline.model)
    shortcut = pipeline.shortcut
    pipeline.use_shortcut(None)  # a cached sample is read in one call of the model
    try:
        with pipeline.whole():
            yield
    finally:
        pipeline.use_shortcut(shortcut)


def move_whole_to_device(job: TrainingJob) -> None:
    """Move the complete model to the device, for an evaluation outside of training that generates.

    Collective over all processes.

    Raises:
        ValueError: the model does not fit the device of some process. Every process raises it.
    """
    size = sum(map(num_bytes, job.model.parameters()))
    is_here = is_on(job.model, job.device)
    if job.mesh.any(not is_here and not fits(size, job.device)):
        raise _too_large(job, size, "that are free on a device")
    if not is_here:
        job.model.to(job.device)


def refuse_generation_that_does_not_fit(job: TrainingJob, costs: CostModel, layout: Layout) -> None:
    """Refuse evaluations that generate during training if a device cannot hold the whole model beside its stage.

    The CPU always can, because the model was created there. The memory of a step's activations is counted, too. It
    stands for the keys and values of the tokens generated so far. Collective over all processes.

    Raises:
        ValueError: a device cannot hold it. Every process raises it.
    """
    args = job.args
    # without metrics to compute, the stock evaluate() asks for the loss only
    is_asked = job.generates(prediction_loss_only=True if job.trainer.compute_metrics is None else None)
    if not is_asked or args.eval_strategy == "no" or layout.pipeline_parallel_size == 1:
        return
    if is_lazy(job.model):
        raise _generates_lazily(job.model)
    needed = costs.largest_bytes_with_whole_model(layout, sum(map(num_bytes, job.model.parameters())))
    budget = device_budget(job.device)
    if job.mesh.any(budget is not None and needed > budget):
        raise _too_large(job, needed, "of a device while it also holds the training state of its stage")


def _generates_lazily(model: nn.Module) -> ValueError:
    return ValueError(
        f"predict_with_generate=True: every process generates with the whole {type(model).__name__}, but it was loaded"
        " lazily. Set predict_with_generate=False and generate with another program from the saved model, or load it"
        " with from_pretrained."
    )


def _too_large(job: TrainingJob, needed: int, where: str) -> ValueError:
    return ValueError(
        f"predict_with_generate=True: every process generates with the whole {type(job.model).__name__}, which takes"
        f" {needed / MIB:,.0f} MiB {where}, more than there are. Set predict_with_generate=False and generate with"
        " another program from the saved model, or use devices with more memory."
    )
