"""Caches the outputs of modules that the user has frozen and that depend on the batch alone.

The first epoch stores them, later epochs read them. This is for models that run in one stage without a freeze policy.
When a step calls the model:

    1st call                          finds the front, and tries it on half of the samples
    2nd call                          measures the front's share of the time, decides whether to store it, and logs it
    other calls of the first epoch    store the front's outputs
    calls of later epochs             read them, unless reading takes longer than computing

Evaluations do the same with a front of their own.
"""

from __future__ import annotations

import math
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerState

from ...model.method_override import MethodOverride, having, original_method
from ...model.micro_batch import Batch
from ...run.loss import Loss
from ..prefix_cache.cache.file_store import FileStore
from ..prefix_cache.cache_control import EpochReport
from .finding import DRAWS
from .front_calls import FrontCalls


class FrontCache:
    """Watches the calls of the model in a training's steps and evaluations, from its creation until `close`.

    Evaluations have a store of their own: their modules are in another mode, and samples keep their padding, which
    metrics may read.

    Args:
        loss: the trainer's loss.
        dataset: the training data.
        generations: a file in the store's folder.
    """

    def __init__(self, loss: Loss, dataset: Any, generations: Path) -> None:
        job = loss.job
        self.model = job.model
        self._job = job
        self._store = FileStore(generations.parent, user=generations.stem)
        # this store may outlive the training, and another training in the same folder
        token: str = job.mesh.gather_objects(uuid.uuid4().hex)[0]
        self._store_of_evaluations = FileStore(generations.parent, user=f"{generations.stem}-{token}")
        self._in_steps = FrontCalls(loss, self._store, dataset)
        self._in_evaluations = FrontCalls(loss, self._store_of_evaluations)
        self._num_evaluations: dict[str, int] = {}  # for each data set, by the prefix of its metrics
        self._now: FrontCalls | None = None
        self._override: MethodOverride | None = None
        self._is_kept = False  # for evaluations after the training
        self._remove_kept: Callable[[], object] | None = None
        self._watch()

    def _watch(self) -> None:
        """Intercept the calls of the model."""
        self._override = MethodOverride(self.model, "forward", partial(self._forward, original_method(self.model)))

    def _unwatch(self) -> None:
        """Restore the model's own forward."""
        if self._override is not None:
            self._override.remove()
            self._override = None

    def release(self) -> None:
        """Restore the model's own forward after the last step."""
        self._in_steps.end_hint(is_given=True)
        self._in_steps.drop()
        self._in_evaluations.pause()
        self._in_evaluations.say_what_was_read()
        self._unwatch()

    def close(self, has_failed: bool, keeps_evaluations: bool = False) -> None:
        """Restore the model's own forward, and remove the outputs that no other training can read.

        Args:
            has_failed: whether the training has failed, and may be resumed.
            keeps_evaluations: whether evaluations after the training read the outputs that its evaluations have
                stored. These are kept until `forget`, or as long as the trainer lives.
        """
        self.release()
        kept = self._in_evaluations.generation if keeps_evaluations else None
        self._is_kept = kept is not None
        if kept is None:
            self._in_evaluations.drop()
        if has_failed or self._job.shares_store or not self._job.trainer.is_local_process_zero():
            return
        if kept is None:
            self._store.remove()  # a process that still reads computes missing samples
            return
        for generation in self._store.generations():
            if generation != kept:
                self._store.delete(*generation)
        self._store_of_evaluations.mark_used(*kept)  # the last training that has marked it removes it
        self._remove_kept = weakref.finalize(self._job.trainer, self._store_of_evaluations.leave, *kept)

    def keeps_evaluations_of(self, model: nn.Module) -> bool:
        """Whether evaluations of a model after the training can read the outputs stored by its evaluations."""
        return self._is_kept and model is self.model

    def forget(self) -> None:
        """Remove the outputs that were kept for evaluations after the training."""
        self._in_evaluations.drop()
        self._is_kept = False
        if self._remove_kept is not None:
            self._remove_kept()
            self._remove_kept = None

    @property
    def why_not_read(self) -> dict[str, str]:
        """Frozen modules that are computed in every epoch, and why; without modules inside another of them."""
        reasons = dict(self._in_steps.why_not_read)
        if not self._job.args.eval_frozen_modules:
            hint = ". Set eval_frozen_modules=True to run it without dropout and to read its output"
            reasons = {name: why + hint * (why == DRAWS) for name, why in reasons.items()}
        return {name: why for name, why in reasons.items() if not any(name.startswith(f"{of}.") for of in reasons)}

    def epoch_report(self) -> EpochReport | None:
        """The use of the front in the epoch's steps; None without a lookup. Collective over all processes."""
        everyone = self._job.mesh.gather_objects(self._in_steps.take_counts())
        counts = reduce(add, (counts for counts, _ in everyone))
        if not counts.rows:
            return None
        skipped = sum(skipped for _, skipped in everyone) / counts.rows
        return EpochReport(counts, self._store.nbytes(), None, False, skipped)

    @contextmanager
    def step(self, state: TrainerState, batch: Batch) -> Iterator[None]:
        """Inside, in a step, the model's calls are intercepted.

        Args:
            state: the trainer's state.
            batch: the batch of the loss.
        """
        epoch = math.floor((state.epoch or 0.0) + 1e-6)
        if epoch != self._in_steps.epoch:
            self._in_steps.begin_epoch(epoch, (state.epoch or 0.0) - epoch)
        self._in_steps.writes = epoch + 1 < state.num_train_epochs or self._job.shares_store
        self._in_steps.begin_step()
        with self._looking_at(self._in_steps):
            self._in_steps.try_loss(batch)
            yield

    @contextmanager
    def evaluation(self, state: TrainerState, prefix: str) -> Iterator[None]:
        """Inside, in an evaluation that does not generate, the model's calls are intercepted.

        Args:
            state: the trainer's state.
            prefix: prefix of the metrics, which identifies the data set.
        """
        calls = self._in_evaluations
        if self._now is calls:  # an evaluation inside another one
            yield
            return
        is_over = self._override is None  # the training
        if is_over:
            self._watch()
        number = self._num_evaluations[prefix] = self._num_evaluations.get(prefix, 0) + 1
        calls.begin_epoch(number, 0.0)
        is_last = is_over or (state.epoch or 0.0) >= state.num_train_epochs
        calls.writes = not is_last or self._job.shares_store
        self._in_steps.pause()
        calls.resume()
        try:
            with self._looking_at(calls):
                yield
        finally:
            calls.pause()
            self._in_steps.allow_rewritten()
            self._in_steps.resume()
            if is_over:
                self._unwatch()
                calls.say_what_was_read(if_any=True)

    @contextmanager
    def _looking_at(self, calls: FrontCalls) -> Iterator[None]:
        before, self._now = self._now, calls
        try:
            yield
        finally:
            self._now = before

    def aside(self) -> AbstractContextManager[None]:
        """Inside, the model's calls are not looked at: those without adapters are another model's."""
        return having(self, _now=None)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        now = self._now
        if now is None or self.model.training is not (now is self._in_steps):
            return forward(*args, **kwargs)
        self._now = None  # the model may call itself
        try:
            return now.run(forward, args, kwargs)
        finally:
            self._now = now
