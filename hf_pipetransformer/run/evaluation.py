"""Evaluation and prediction: the stock loops, over a pipeline that is placed.

evaluation_loop     `in_training`   the plan in force, and the cache
                    `placed`        otherwise: for this evaluation, and put back
  prediction_step   `predict`       each process's own rows run through the stages, and come back to it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer

from ..cache.content_keys import KEYS_NAME, BatchKeys, KeyingCollator
from ..data.numbered_batches import KeysApart
from ..model.micro_batch import Batch, naming_long_rows
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..planning.plan import PipelinePlan
from ..resilience.watchdog import phase
from .batches import prepared
from .cache_control import AutoCache
from .job import TrainingJob
from .training_data import keying_collator


@contextmanager
def placed(pipeline: ElasticPipeline, plan: PipelinePlan) -> Iterator[None]:
    """Inside, a whole model runs by a plan; afterwards it is whole again. Collective over all processes."""
    pipeline.place(plan, keep_weights_aside=True)
    try:
        yield
    finally:
        pipeline.put_back()


@contextmanager
def in_training(
    job: TrainingJob, pipeline: ElasticPipeline, cache: AutoCache | None, generations: Path | None, dataloader: Any
) -> Iterator[KeysApart]:
    """Inside, an evaluation's batches have keys, too; they count if the weights are those that the cache is of.

    Args:
        job: the training.
        pipeline: placed.
        cache: of the training that is under way.
        generations: what its loaders read ahead of.
        dataloader: of the evaluation.

    Yields:
        The loader with the keys taken out of its batches.
    """
    loader = dataloader if isinstance(dataloader, KeysApart) else KeysApart(dataloader)
    with phase("evaluation"), ExitStack() as stack:
        if cache is not None and generations is not None:
            stack.enter_context(cache.cache.counting_apart())
            base: Any = getattr(dataloader, "base_dataloader", dataloader)
            collate_fn = getattr(base, "collate_fn", None)
            # also before the first layers freeze: workers that last keep the collator that they began with
            if isinstance(base, DataLoader) and not isinstance(collate_fn, KeyingCollator):
                base.collate_fn = keying_collator(job, generations, collate_fn)
                stack.callback(setattr, base, "collate_fn", collate_fn)
            if pipeline.cache is not None and not cache.weights_hold():
                pipeline.use_cache(None)  # they are averaged ones, for one
                stack.callback(lambda: pipeline.use_cache(cache.cache if cache.is_on else None))
        yield loader


Prediction = tuple[Any, Any, Any]
"""Loss, logits and labels, as `Trainer.prediction_step` returns them."""


def predict(
    job: TrainingJob,
    pipeline: ElasticPipeline,
    keys: BatchKeys | None,
    stock: Callable[[Any, dict[str, Any]], Prediction],
    inputs: dict[str, Any],
) -> Prediction:
    """The stock `prediction_step` over a pipeline that is placed. Collective over the pipeline.

    Args:
        job: the training, or evaluation.
        pipeline: placed.
        keys: of the latest batch of the evaluation's loader.
        stock: the stock method, of a model and prepared or unprepared inputs.
        inputs: this process's rows.
    """
    keys = keys if pipeline.cache is not None else None
    with phase("prediction"):
        if pipeline.num_stages > 1:

            def head(batch: Batch) -> Prediction:
                with _handing_on_prepared(job.trainer, batch):
                    return stock(job.model, batch)

            result: Prediction = pipeline.predict(prepared(job, inputs, keys), job.to_device, head)
            return result
        with naming_long_rows(job.model, inputs):
            if keys is None or not keys.inputs.are(inputs, job.not_in_keys):
                return stock(job.model, inputs)
            assert pipeline.stage is not None
            # `stock` prepares them: here they only go to the device
            moved = {**job.to_device(inputs), KEYS_NAME: keys.tensor}
            with pipeline.stage.running_to_the_end([], moved) as batch:
                return stock(job.model, batch)


@contextmanager
def _handing_on_prepared(trainer: Trainer, batch: Batch) -> Iterator[None]:
    """Inside, `_prepare_inputs` returns this batch as it is: whose rows they are has prepared them."""
    before, prepare = vars(trainer).get("_prepare_inputs"), trainer._prepare_inputs
    vars(trainer)["_prepare_inputs"] = lambda inputs: inputs if inputs is batch else prepare(inputs)
    try:
        yield
    finally:
        del vars(trainer)["_prepare_inputs"]
        if before is not None:
            vars(trainer)["_prepare_inputs"] = before
