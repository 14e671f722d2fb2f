"""Evaluation and prediction: the stock loops, over a placed pipeline.

evaluation_loop     `in_training`   during training: uses the plan in force and the cache
                    `placed`        otherwise: places the model for this evaluation, and puts it back
  prediction_step   `predict`       runs each process's own samples through the stages, and returns the results to it
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
from .collectives import on_last_stage_only
from .job import TrainingJob
from .training_data import keying_collator


@contextmanager
def placed(pipeline: ElasticPipeline, plan: PipelinePlan) -> Iterator[None]:
    """Place a complete model inside the context, and make it complete again afterwards.

    Collective over all processes.
    """
    pipeline.place(plan, keep_weights_aside=True)
    try:
        yield
    finally:
        pipeline.put_back()


@contextmanager
def in_training(
    job: TrainingJob, pipeline: ElasticPipeline, cache: AutoCache | None, generations: Path | None, dataloader: Any
) -> Iterator[KeysApart]:
    """Inside the context, an evaluation during training can use the activation cache.

    The evaluation's batches get cache keys. The cache is used only if the frozen weights are those it was filled with.

    Args:
        job: the training job.
        pipeline: the placed pipeline.
        cache: the cache of the current training.
        generations: the file that names the cache generations which loaders read ahead.
        dataloader: the loader of the evaluation.

    Yields:
        The loader, which removes the keys from its batches and keeps them in `keys`.
    """
    loader = dataloader if isinstance(dataloader, KeysApart) else KeysApart(dataloader)
    with phase("evaluation"), ExitStack() as stack:
        if cache is not None and generations is not None:
            stack.enter_context(cache.cache.counting_apart())
            base: Any = getattr(dataloader, "base_dataloader", dataloader)
            collate_fn = getattr(base, "collate_fn", None)
            # also before the first freeze, because persistent workers keep the collator that they started with
            if isinstance(base, DataLoader) and not isinstance(collate_fn, KeyingCollator):
                base.collate_fn = keying_collator(job, generations, collate_fn, pipeline.stack.runner.kept_back)
                stack.callback(setattr, base, "collate_fn", collate_fn)
            if pipeline.cache is not None and not cache.weights_hold():
                pipeline.use_cache(None)  # e.g. averaged weights
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
    """Run the stock `prediction_step` over a placed pipeline. Collective over the pipeline.

    Args:
        job: the training or evaluation job.
        pipeline: the placed pipeline.
        keys: cache keys of the latest batch from the evaluation's loader.
        stock: the stock method, as a function of a model and inputs, which may be prepared already.
        inputs: this process's samples.
    """
    keys = keys if pipeline.cache is not None else None
    with phase("prediction"):
        if pipeline.num_stages > 1:

            def head(batch: Batch) -> Prediction:
                with _handing_on_prepared(job.trainer, batch), on_last_stage_only(job.trainer.accelerator):
                    return stock(job.model, batch)

            result: Prediction = pipeline.predict(prepared(job, inputs, keys), head)
            return result
        with naming_long_rows(job.model, inputs):
            if keys is None or not keys.inputs.are(inputs, job.not_in_keys):
                return stock(job.model, inputs)
            assert pipeline.stage is not None
            # `stock` prepares the inputs; here they are only moved to the device
            moved = {**job.to_device(inputs), KEYS_NAME: keys.tensor}
            with pipeline.stage.running_to_the_end([], moved) as batch:
                return stock(job.model, batch)


@contextmanager
def _handing_on_prepared(trainer: Trainer, batch: Batch) -> Iterator[None]:
    """Inside the context, `_prepare_inputs` returns this batch unchanged: the process it came from has prepared it."""
    before, prepare = vars(trainer).get("_prepare_inputs"), trainer._prepare_inputs
    vars(trainer)["_prepare_inputs"] = lambda inputs: inputs if inputs is batch else prepare(inputs)
    try:
        yield
    finally:
        del vars(trainer)["_prepare_inputs"]
        if before is not None:
            vars(trainer)["_prepare_inputs"] = before
