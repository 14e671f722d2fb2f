"""Evaluation and prediction: the stock loops, over a placed pipeline.

evaluation_loop     `in_training`   during training: uses the layout in force and the cache
                    `outside_training`  otherwise: places the model for this evaluation, and puts it back
  prediction_step   `predict`       runs each process's own samples through the stages, and returns the results to it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..data.loaders import LoaderWithoutTags
from ..model.called_inputs import BatchTags
from ..model.micro_batch import Batch, naming_long_rows
from ..model.tags import TAGS
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..pipeline.engines.engine import Execution
from ..progress import phase
from ..registry import require_part
from .batches import handing_on_prepared, prepared
from .collectives import among_last_stages
from .generation import generating, move_whole_to_device
from .job import TrainingJob
from .lazy_model import sparing_memory
from .parts import Parts
from .setup.consistency import check_same_size
from .setup.cutting import FindUnits, make_planner
from .setup.probing import SampleCollator

METHODS = {"Evaluation": "evaluate", "Prediction": "predict"}
"""The description that `evaluation_loop` is given by each of the methods that call it."""


@contextmanager
def outside_training(
    job: TrainingJob,
    find_units: FindUnits,
    kept: Parts | None,
    dataloader: Any,
    generates: bool,
    prefix: str,
) -> Iterator[LoaderWithoutTags]:
    """Inside the context, the complete model is split into stages, if there are several.

    A model that generates stays whole. Collective over all processes.

    Args:
        job: the evaluation job.
        find_units: finds the units of the model.
        kept: the parts of the last training. Some of them keep the cached outputs of its evaluations.
        dataloader: the loader of the evaluation.
        generates: whether the evaluation generates.
        prefix: the prefix of the metrics' names.

    Yields:
        The loader. Its workers may have been started while a cache was in use, and then add tags to the batches.
    """
    dataset = getattr(dataloader, "dataset", None)  # a loader that the user made may be any iterable
    if dataset is not None:
        check_same_size(job.mesh, dataset)
    loader = LoaderWithoutTags(dataloader)
    if not job.args.uses_pipeline or generates:
        if job.args.uses_pipeline:
            move_whole_to_device(job)
        with ExitStack() as stack:
            for part in kept if kept is not None and not generates else ():
                if part.keeps_evaluations_of(job.model):
                    stack.enter_context(part.around_evaluation(loader, prefix))
            yield loader
        return
    rows, collate_fn = job.rows_of_loader(dataloader)
    with sparing_memory(job.model):
        cut = find_units(rows, SampleCollator(job, collate_fn))
    calls = job.mesh.any(job.may_call_model)
    # stages can serve the user's calls of the model only if each process's layers follow one another
    is_driven = job.overrides_loss or (calls and job.args.num_virtual_stages > 1)
    layout = make_planner(job.args, cut.unit_costs, job.mesh, is_driven=is_driven).first
    cut.pipeline.place(layout, Execution(serves_callbacks=calls), keep_weights_aside=True)
    if job.overrides("log"):
        require_part("loss_effects.users_log", "an overridden log").take_over(job, cut.pipeline)
    try:
        with cut.pipeline.running.serving_callbacks():
            yield loader
            cut.pipeline.serve_callbacks()  # other processes may have called the model after the last batch
    finally:
        cut.pipeline.put_back()


@contextmanager
def in_training(
    job: TrainingJob,
    pipeline: ElasticPipeline,
    parts: Parts | None,
    dataloader: Any,
    generates: bool = False,
    prefix: str = "eval",
) -> Iterator[LoaderWithoutTags]:
    """Inside the context, an evaluation during training can use the training's parts, or generate.

    Args:
        job: the training job.
        pipeline: the placed pipeline.
        parts: the parts of the current training; None outside of one.
        dataloader: the loader of the evaluation.
        generates: whether it generates, which excludes the parts.
        prefix: of its metrics.

    Raises:
        ValueError: a checkpoint is being written.

    Yields:
        The loader, which removes the tags from its batches and keeps them in `tags`.
    """
    if pipeline.weights.is_gathered:
        raise ValueError(
            "evaluate() and predict() cannot be called while a checkpoint is written (in _save or save_model), because"
            " the weights of all stages are on the main process then. Call them before or after, for example in a"
            " callback's on_save."
        )
    loader = dataloader if isinstance(dataloader, LoaderWithoutTags) else LoaderWithoutTags(dataloader)
    with phase("evaluation"), ExitStack() as stack:
        if generates:
            stack.enter_context(generating(pipeline))
        for part in parts.having("around_evaluation") if parts is not None and not generates else ():
            stack.enter_context(part.around_evaluation(dataloader, prefix))
        yield loader


Prediction = tuple[Any, Any, Any]
"""Loss, logits and labels, as `Trainer.prediction_step` returns them."""


def predict(
    job: TrainingJob,
    pipeline: ElasticPipeline,
    tags: BatchTags | None,
    stock: Callable[[Any, dict[str, Any]], Prediction],
    inputs: dict[str, Any],
) -> Prediction:
    """Run the stock `prediction_step` over a placed pipeline. Collective over the pipeline.

    Args:
        job: the training or evaluation job.
        pipeline: the placed pipeline.
        tags: tags of the latest batch from the evaluation's loader.
        stock: the stock method, as a function of a model and inputs, which may be prepared already.
        inputs: this process's samples.
    """
    tags = tags if pipeline.shortcut is not None else None
    with phase("prediction"):
        if pipeline.is_split:
            pipeline.serve_callbacks()
            group = pipeline.last_stages if job.overrides_loss else None

            def predict_rows(batch: Batch) -> Prediction:
                among = among_last_stages(job.trainer.accelerator, job.mesh, group)
                with handing_on_prepared(job.trainer, batch), among:
                    return stock(job.model, batch)

            batch = prepared(job, inputs, tags)
            result: Prediction
            if job.overrides_loss and pipeline.running.can_serve:
                result = pipeline.running.predict_served(batch, predict_rows, job.not_in_keys)
            else:
                result = pipeline.running.predict(batch, job.called_on(batch), predict_rows)
            return result
        with naming_long_rows(job.model, inputs), job.counting_alone():
            assert pipeline.stage is not None
            if pipeline.shortcut is not None and not pipeline.stack.runner.takes_batch:
                with pipeline.stage.last.running_to_the_end([], {}):
                    return stock(job.model, inputs)
            if tags is None or not tags.inputs.are(inputs, job.not_in_keys):
                return stock(job.model, inputs)
            # `stock` prepares the inputs; here they are only moved to the device
            moved = {**job.to_device(inputs), TAGS: tags.tensor}
            with pipeline.stage.last.running_to_the_end([], moved) as batch:
                return stock(job.model, batch)
