"""The cache of frozen layers' outputs as a part of a training with a freeze policy or frozen lowest layers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from ...model.called_inputs import added_settings, named_inputs
from ...model.layer_stack import LayerStack
from ...model.micro_batch import Batch
from ...planning.layout import Layout
from ...randomness import generators_kept
from ...resilience.exit import SECONDS
from ...run.job import TrainingJob
from ...run.lazy_model import sparing_memory
from ...run.parts import Ending, LayoutChange, RunPart, StepFacts, Wish
from ...run.run import PipelineRun
from ...run.setup.placing import Findings
from .cache.content_keys import KeyingCollator
from .cache.file_store import FileStore
from .cache.known_code import FOREIGN, foreign_code, is_declared, users_hook_inside
from .cache.sharing import store_file
from .cache_control import OTHER_INPUTS, AutoCache
from .cache_setup import check_folder, make_cache


class PrefixCache(RunPart):
    """Holds the cache, and passes the run's events to it.

    Args:
        run: the run of the training.

    Attributes:
        cache: the cache; None if frozen layers cannot be cached.
        why_not: why there is no cache.
    """

    num_votes = 2

    def __init__(self, run: PipelineRun) -> None:
        self._run, self._job = run, run.job
        self.cache: AutoCache | None = None
        self.why_not: str | None = None
        self._seen: dict[str, Any] | None = None  # settings that the loss adds to the first batch
        self._has_learnt = False  # whether all processes know these settings
        # votes of any process since the last step
        self._met_other_inputs = self._doubts_function = False

    # ------------------------------------------------------------------------------------ before the first step
    def found(self, found: Findings) -> None:
        if self._job.freeze_callback is None:
            return
        cache = self._make(found)
        self.cache, self.why_not = (None, cache) if isinstance(cache, str) else (cache, None)
        self.calls_per_sample = self.cache.calls_per_sample if self.cache is not None else 1

    def _make(self, found: Findings) -> AutoCache | str:
        """Return the cache, or the reason for having none. Collective over all processes.

        Raises:
            ValueError: caching is impossible, with `activation_cache="on"`. Every process raises it.
        """
        job, run = self._job, self._run
        data, generations = run.training_batches, store_file(job)
        pipeline, costs = found.cut.pipeline, found.cut.unit_costs
        if found.is_driven and not pipeline.stack.runner.takes_batch:
            why = "the loss calls the model on inputs of its own, which are looked up with one stage only"
            if job.args.activation_cache == "on":
                raise ValueError(
                    f"activation_cache='on': {why}. Set pipeline_parallel_size=1, or activation_cache='auto' to train"
                    " without the cache."
                )
            return why
        if job.freeze_callback is None and (why := self._why_not_known(pipeline.stack)):
            return why
        trouble = check_folder(job, data, costs, generations)
        if trouble is not None:
            return trouble
        with generators_kept(job.trainer, job.model), sparing_memory(job.model):
            return make_cache(found, job, data, generations, run.most_frozen)

    def _why_not_known(self, stack: LayerStack) -> str:
        """Return why the user's frozen layers are not stored: their code is unknown. A policy relies on the trial."""
        declared = self._job.args.cached_modules or ()
        for name, module in stack.model.named_modules():
            is_layer = any(module is unit.module for unit in stack.units)
            is_frozen = not any(parameter.requires_grad for parameter in module.parameters())
            if is_layer and is_frozen and not is_declared(name, declared) and (why := foreign_code(module)):
                return FOREIGN.format(f"{name}: {why}", name)
        return ""

    def placed(self, layout: Layout) -> None:
        if self.cache is not None and layout.num_frozen_layers:
            if layout.num_cached_layers:
                self.cache.freeze(layout.num_cached_layers, goes_on=True)
            self._run.publish("sentence", self.cache.freeze(layout.num_frozen_layers))

    def describe(self) -> str | None:
        if self._job.freeze_callback is None:
            return None
        return f"cache: {self.cache.describe() if self.cache is not None else f'off ({self.why_not})'}"

    # ------------------------------------------------------------------------------------ between two steps
    def between_steps(self) -> None:
        other_inputs, doubts = self._met_other_inputs, self._doubts_function
        self._met_other_inputs = self._doubts_function = False
        if self.cache is None:
            return
        if self._seen is not None and not self._has_learnt:  # after the first step, on all processes
            self._has_learnt = True
            everyone = self._job.mesh.gather_objects(self._seen)
            self.cache.cache.settings = everyone[0]  # rank 0 computes the loss in any layout
            if self._run.pipeline.num_stages == 1 and any(theirs != everyone[0] for theirs in everyone):
                self.cache.disable(OTHER_INPUTS)
            self.cache.judge_settings()
        if other_inputs:
            self.cache.disable(OTHER_INPUTS)
        report = self.cache.follow(
            self._run.num_epochs_begun,
            self._job.trainer.state,
            may_never_repeat=self._run.training_batches.may_never_repeat,
            doubts_function=doubts,
        )
        if report is not None:
            self._run.publish("cache_epoch", report)

    def wish(self, wish: Wish) -> Wish:
        if self.cache is None:
            return wish
        if wish.num_frozen > self._run.pipeline.current_layout.num_frozen_layers:
            self.cache.check_weights()  # the next generation will be named after the weights as they are now
        return replace(wish, num_cached=self.cache.num_cached)

    def layout_changed(self, change: LayoutChange) -> None:
        if self.cache is not None:
            self._look_for_hooks(change.after.num_frozen_layers)
            is_start = self._job.trainer.state.global_step == 0
            self._run.publish("sentence", self.cache.freeze(change.after.num_frozen_layers, is_start=is_start))

    def _look_for_hooks(self, num_frozen: int) -> None:
        """Turn the cache off if a frozen layer has a hook, which the loss may have registered. Collective."""
        units = self._run.pipeline.stack.units[:num_frozen]
        mine = next(filter(None, (users_hook_inside(unit.module, or_on_it=True) for unit in units)), None)
        hook = next(filter(None, self._job.mesh.gather_objects(mine)), None)
        if hook is not None and self.cache is not None:
            self.cache.disable(f"a frozen layer has a forward hook ({hook}), which your code may read in each step")

    def thawed(self) -> None:
        if self.cache is not None:
            self.cache.disable("layers that were frozen are trained again")

    # ------------------------------------------------------------------------------------ steps
    @contextmanager
    def around_step(self, batch: Batch) -> Iterator[None]:
        """In the first step, note the settings that the loss adds to the batch."""
        if self.cache is None or self._seen is not None:
            yield
            return
        calls: list[dict[str, Any]] = []
        model = self._job.model

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(added_settings(batch, named_inputs(model, args, kwargs)))

        hook = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
        self._seen = calls[0] if calls else {}

    def vote(self, facts: StepFacts) -> tuple[bool, ...]:
        shortcut = self._run.pipeline.shortcut
        met_others = shortcut is not None and shortcut.met_other_inputs
        met_other_function = self.cache is not None and self.cache.cache.take_met_other_function()
        return facts.loses_tags or met_others, met_other_function

    def heard(self, votes: tuple[bool, ...]) -> None:
        other_inputs, other_function = votes
        self._met_other_inputs |= other_inputs
        self._doubts_function |= other_function

    # ------------------------------------------------------------------------------------ changed weights
    def weights_shown(self) -> None:
        self._doubts_function = True

    def before_best(self) -> None:
        self._check_weights()
        self._run.pipeline.use_shortcut(None)

    def train_ends(self) -> None:
        self._check_weights()

    def _check_weights(self) -> None:
        """Check the frozen weights at the end: a later training may read the last epoch's outputs."""
        if self.cache is not None and self._run.pipeline.shortcut is not None:
            self.cache.check_weights()

    @contextmanager
    def around_evaluation(self, dataloader: Any, prefix: str) -> Iterator[None]:
        """Inside the context, an evaluation reads the cache, if the frozen weights still match it.

        Outputs for padding are not stored. If the model returns some, metrics and predictions are computed without the
        cache, and a loss with it.
        """
        cache, pipeline = self.cache, self._run.pipeline
        with ExitStack() as stack:
            if cache is not None:
                stack.enter_context(cache.cache.counting_evaluation())
                base: Any = getattr(dataloader, "base_dataloader", dataloader)
                # also before the first freeze: persistent workers keep their first collator
                if isinstance(base, DataLoader) and not isinstance(base.collate_fn, KeyingCollator):
                    stack.callback(setattr, base, "collate_fn", base.collate_fn)
                    ignored = self._job.not_in_keys | pipeline.stack.runner.called.kept_back
                    base.collate_fn = KeyingCollator(base.collate_fn, ignored, cache.cache.keeps_padding)
                returns = self._job.trainer.compute_metrics is not None or not prefix.startswith("eval")
                is_exact = not (cache.cache.shows_padding and returns)
                if pipeline.shortcut is not None and not (is_exact and cache.weights_hold()):
                    pipeline.use_shortcut(None)  # e.g. averaged weights
                    stack.callback(lambda: pipeline.use_shortcut(cache.cache if cache.is_on else None))
            yield

    # ------------------------------------------------------------------------------------ the end
    def release(self) -> None:
        if self.cache is not None:
            self.cache.close(has_ended=False)  # removes no files: others may still write

    def abandon(self, is_resumable: bool) -> str:
        return self.cache.abandon(is_resumable) if self.cache is not None else ""

    def close(self, ending: Ending) -> None:
        if self.cache is None:
            return
        # after a complete run, remove generations that no other run can use; an interrupted run resumes with its cache
        is_interrupted = isinstance(ending.error, KeyboardInterrupt)
        has_ended = ending.error is None or (is_interrupted and ending.newest is None)
        close = partial(self.cache.close, has_ended=has_ended)
        if ending.has_failed and self._job.device.type != "cpu":
            closing = threading.Thread(target=close, daemon=True)
            closing.start()
            closing.join(SECONDS)  # the writer may wait for a kernel that waits for other processes
        else:
            close()
        self.cache = None


def make(run: PipelineRun) -> PrefixCache:
    return PrefixCache(run)


@contextmanager
def around_search(job: TrainingJob) -> Iterator[None]:
    """Context for several trainings that share a store. The default store is removed at the end, even on errors.

    An existing store, kept for an interrupted training, stays. Entering is collective over all processes; leaving is
    not, because a single process may have failed.
    """
    current = store_file(job) if job.args.activation_cache_dir is None else None
    is_new = current is not None and not job.mesh.any(current.parent.exists())
    try:
        yield
    finally:
        if current is not None and is_new:
            FileStore(current.parent).remove()
