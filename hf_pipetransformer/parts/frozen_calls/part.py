"""Frozen modules that the loss calls as a part of a training: found in the user's steps, then stored and read."""

from __future__ import annotations

import difflib
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import nn

from ...logs import log_on_main
from ...model.micro_batch import Batch, batch_rows
from ...model.tags import without_tags
from ...registry import is_installed
from ...run.loss import Loss
from ...run.parts import Ending, LayoutChange, RunPart, StepFacts
from ...run.run import PipelineRun
from ...run.setup.placing import Findings
from ..front.called_by_loss import CalledByLoss
from ..front.finding import is_compiled
from ..front.front_calls import FrontCalls
from ..prefix_cache.cache.cache_counts import CacheCounts
from ..prefix_cache.cache.file_store import FileStore
from ..prefix_cache.cache.known_code import FOREIGN, foreign_code, is_declared
from ..prefix_cache.cache.sharing import store_file
from .adapters import has_adapters
from .forms import why_not_storable
from .names import OF_LOSS, OF_TRAINER, containers_of, name_of, named_roots, reachable
from .roots import FrozenRoot, Surrounding
from .stages import SplitRoot, Stages
from .watching import LossWatch, SeenCall, noting_calls

logger = logging.getLogger(__name__)

MOST_PARTS = 4
"""The outputs inside a module with undeclared code of the user's are stored if it has at most so many parts."""
MOST_LINES = 4
"""Number of modules for which a line says why they are computed."""
MOST_WATCHED = 12
"""Number of steps that are watched because of calls that are not known, besides the first step of each epoch."""


class FrozenCalls(RunPart):
    """Holds the frozen modules that a loss of the user's calls. A loss of transformers calls none.

    Args:
        run: the run of the training.
    """

    def __init__(self, run: PipelineRun) -> None:
        self._run, self._job = run, run.job
        self._loss: Loss | None = None
        self._store: FileStore | None = None
        self._roots: dict[int, FrozenRoot] = {}  # by the identity of the module
        self._surrounding: dict[int, Surrounding] = {}
        self._named: set[int] = set()  # identities of the modules with a name in users' code
        self._trained: frozenset[int] = frozenset()
        self._of_model: frozenset[int] = frozenset()
        self._epoch, self._begun = -1, 0.0
        self._num_watched, self._must_watch = 0, False
        self._num_evaluations: Counter[str] = Counter()  # for each data set, by the prefix of its metrics
        self._stages: Stages | None = None  # if the trained model's layers are on several
        self._foreign: dict[nn.Module, str] = {}  # why modules are looked into
        self._not_stored: dict[str, tuple[str, str]] = {}  # what computed modules are, and why they are, by name
        self._logged: set[str] = set()  # their names, on the main process

    def found(self, found: Findings) -> None:
        self._loss = found.loss

    def train_begins(self) -> None:
        assert self._loss is not None
        self._refuse_unknown_names()
        if self._loss.is_stock or any(map(is_compiled, self._job.model.modules())):
            return
        file = store_file(self._job)
        self._store = FileStore(file.parent, user=file.stem)
        self._store.limit(self._job.args.activation_cache_max_gib)
        self._trained = self._trained_now()
        if self._job.freeze_callback is not None or not has_adapters(self._job.model):
            return
        if not self._job.args.uses_pipeline:
            self._add(self._job.model)
        elif self._run.pipeline.running.engine.position.execution.is_driven:
            model, trained = self._job.model, self._trained_anywhere()
            name = name_of(model, self._job.trainer)
            root = SplitRoot(name, model, trained, self._make_calls, nullcontext)
            self._roots[id(model)], self._stages, self.num_votes = root, Stages(self._run, root, trained), 1
            self._named.add(id(model))

    def _refuse_unknown_names(self) -> None:
        """Refuse `cached_modules` outside of the model that are not there. All processes have the same trainer.

        Raises:
            ValueError: there is no module of this name.
        """
        names: list[str] | None = None
        for name in self._job.args.cached_modules or ():
            is_of_model = any(name == part for part, _ in self._job.model.named_modules())
            if is_of_model or name.partition(".")[0] not in (OF_TRAINER, OF_LOSS):
                continue
            if names is None:
                roots = named_roots(self._job.trainer)
                names = [f"{of}.{part}".rstrip(".") for of, root in roots.items() for part, _ in root.named_modules()]
            if name not in names:
                close = difflib.get_close_matches(name, names, 3) or names[:3]
                such = f", such as {', '.join(map(repr, close))}" if close else "; none was found"
                raise ValueError(
                    f"cached_modules contains {name!r}, but there is no module of this name. Names of modules that the"
                    f" loss calls begin with 'trainer.' (attributes of the trainer) or 'loss.' (variables){such}."
                )

    def _trained_now(self) -> frozenset[int]:
        """Identities of the parameters that are trained."""
        optimizer = self._job.trainer.optimizer
        groups = optimizer.param_groups if optimizer is not None else []
        of_optimizer = [id(parameter) for group in groups for parameter in group["params"] if parameter.requires_grad]
        return frozenset([*of_optimizer, *(id(p) for p in self._job.model.parameters() if p.requires_grad)])

    def _trained_anywhere(self) -> frozenset[int]:
        """Identities of the parameters that some process trains. Collective over all processes."""
        table, mesh = self._run.pipeline.stack.table, self._job.mesh
        everyone = mesh.gather_objects([name for name in table.names if id(table[name]) in self._trained])
        return self._trained.union(id(table[name]) for names in everyone for name in names)

    # ------------------------------------------------------------------------------------ steps
    @contextmanager
    def around_step(self, batch: Batch) -> Iterator[None]:
        if self._store is None:
            yield
            return
        is_first = self._follow_epoch()
        computes = self._run.pipeline.computes_loss
        may_watch = is_first or self._num_watched < MOST_WATCHED
        must_watch = computes and may_watch and (self._must_watch or (is_first and self._knows_frozen()))
        self._num_watched += must_watch and not is_first
        called: list[nn.Module] = []
        with ExitStack() as around:
            if computes and is_first and not must_watch:
                around.enter_context(noting_calls(called.append, self._is_frozen_elsewhere))
            for root in self._roots.values():
                around.enter_context(root.step())
            if self._stages is not None:
                around.enter_context(self._stages.step())
            watch = self._watch(batch) if must_watch else None
            if watch is not None:
                around.enter_context(watch)
            yield
        if watch is not None:
            self._learn(watch, batch)
        self._foreign = {}  # which must not keep modules alive
        has_unknown = any(root.has_unknown for root in self._roots.values())
        self._must_watch = bool(called) or (watch is None and has_unknown)
        for root in self._roots.values():
            root.has_unknown = False

    @contextmanager
    def around_evaluation(self, dataloader: Any, prefix: str) -> Iterator[None]:
        state = self._job.trainer.state
        number = self._num_evaluations[prefix] = self._num_evaluations[prefix] + 1
        is_last = (state.epoch or 0.0) >= state.num_train_epochs

        def begin(calls: FrontCalls) -> None:
            calls.begin_epoch(number, 0.0)
            calls.writes = not is_last or self._job.shares_store

        with ExitStack() as around:
            for root in self._roots.values():
                if not isinstance(root, SplitRoot):  # the stages vote in steps only
                    around.enter_context(root.evaluation(begin))
            yield

    def vote(self, facts: StepFacts) -> tuple[bool, ...]:
        return (self._stages is not None and self._stages.vote(),) * self.num_votes

    def heard(self, votes: tuple[bool, ...]) -> None:
        if self._stages is not None and votes:
            self._stages.heard(votes[0])

    def layout_changed(self, change: LayoutChange) -> None:
        if self._stages is not None:
            self._stages.layout_changed()
            self._must_watch = self._run.pipeline.computes_loss

    def _follow_epoch(self) -> bool:
        """Begin an epoch if the step is its first. Returns whether it is."""
        state = self._job.trainer.state
        now = state.epoch or 0.0
        epoch = math.floor(now + 1e-6)
        is_first = epoch != self._epoch
        self._epoch, self._begun = epoch, now - epoch
        for calls in self._calls():
            calls.writes = epoch + 1 < state.num_train_epochs or self._job.shares_store
            if is_first:
                calls.begin_epoch(epoch, self._begun)
            calls.end_if_useless()
        if is_first:
            self._forget_replaced()
        return is_first

    def _forget_replaced(self) -> None:
        """Drop modules that have lost their name, such as a copy of the model that is made in each epoch.

        Modules that never had a name are dropped if they were not called in the last epoch.
        """
        if not self._roots and not self._surrounding:
            return
        held = reachable(self._job.trainer)
        for of, root in list(self._roots.items()):
            was_called, root.was_called = root.was_called, False
            is_held = root.module in held if of in self._named else was_called
            if not is_held:
                self._end(self._roots.pop(of), self._may_delete())
        for of, container in list(self._surrounding.items()):
            if container.module not in held:
                self._surrounding.pop(of).close()
        self._named &= self._roots.keys()

    def _knows_frozen(self) -> bool:
        """Whether there is a module that a loss may call and that is not trained.

        Without one, no step is watched. Modules that are not found by name are noted when they are called.
        """
        self._trained, trainer = self._trained_now(), self._job.trainer
        self._of_model = frozenset(map(id, self._job.model.parameters()))
        of_model_is_frozen = not self._job.args.uses_pipeline and bool(self._of_model - self._trained)
        if self._roots or of_model_is_frozen:
            return True
        return any(
            self._is_frozen_elsewhere(part) for root in named_roots(trainer).values() for part in root.modules()
        )

    def _is_frozen_elsewhere(self, module: nn.Module) -> bool:
        """Whether a module has weights, and no weight is trained or belongs to the trained model."""
        parameters = [id(parameter) for parameter in module.parameters()]
        return bool(parameters) and self._trained.isdisjoint(parameters) and self._of_model.isdisjoint(parameters)

    def _calls(self) -> list[FrontCalls]:
        return [calls for root in self._roots.values() for calls in root.fronts.values()]

    def _watch(self, batch: Batch) -> LossWatch:
        self._trained = self._trained_now()
        self._foreign = {}  # code may have been replaced; and modules are not held
        model, inputs = self._job.model, without_tags(batch)
        return LossWatch(model, inputs, self._trained, self._why_not_root, self._why_foreign)

    def _why_foreign(self, module: nn.Module) -> str:
        """Describe the user's code in a module; empty if there is none, or if it is declared."""
        if module not in self._foreign:
            why = foreign_code(module, hooks_count=False)
            declared = self._job.args.cached_modules or ()
            self._foreign[module] = "" if why and is_declared(name_of(module, self._job.trainer), declared) else why
        return self._foreign[module]

    def _why_not_root(self, module: nn.Module) -> str | None:
        """Why the output of a module is not stored that is called now; empty if it may be stored.

        None for the trained model itself, and for parts of it that may be on other processes.
        """
        model = self._job.model
        if module is model:
            return "" if id(model) in self._roots and not torch.is_grad_enabled() else None
        if self._job.args.uses_pipeline and any(part is module for part in model.modules()):
            return None
        return why_not_storable(module)

    def _learn(self, watch: LossWatch, batch: Batch) -> None:
        dataset = self._run.training_batches.dataset
        num_samples = len(dataset) if isinstance(dataset, Sized) else None
        by_module: dict[int, list[Any]] = {}
        for call in watch.calls:
            if call.within is None or self._may_be_part(call, watch.calls):
                by_module.setdefault(id(call.module), []).append(call)
        for of, calls in by_module.items():
            why = next((call.why_computed for call in calls if call.why_computed), "")
            if of not in self._roots and not all(call.why_computed for call in calls):
                self._add(calls[0].module)
            if of in self._roots:
                self._roots[of].learn(calls, num_samples, batch_rows(batch))
            elif self._is_worth_a_line(calls[0].module):
                self._say_why_not(calls[0].module, why)

    def _is_worth_a_line(self, module: nn.Module) -> bool:
        """Whether a line says why a module is computed: not for the single layers of the trained model."""
        is_of_model = any(id(parameter) in self._of_model for parameter in module.parameters())
        return not is_of_model or next(module.children(), None) is not None

    def _say_why_not(self, module: nn.Module, why: str) -> None:
        """Say once why a module that the loss calls is computed in every epoch. A few are named."""
        name = name_of(module, self._job.trainer)
        if name in self._not_stored:
            return
        requires = any(parameter.requires_grad for parameter in module.parameters())
        self._not_stored[name] = "called by the loss" if requires else "frozen", why
        if self._job.args.process_index == 0:
            self._log_computed(self._not_stored)

    def _log_computed(self, modules: Mapping[str, tuple[str, str]]) -> None:
        """Log a line for each computed module that has none yet. Only a few in a training."""
        new = [name for name in modules if name not in self._logged]
        for name in new[: MOST_LINES - len(self._logged)]:
            self._logged.add(name)
            role, why = modules[name]
            log_on_main(logger, self._job.args, f"{name} is {role}, but computed in every epoch: {why}.")

    def _may_be_part(self, call: SeenCall, calls: Sequence[SeenCall]) -> bool:
        """Whether the output of a module may be stored that undeclared code of the user's has called.

        It may if the module has parts, and if there are few such modules in that code. Otherwise a line says once that
        all is computed.
        """
        assert call.within is not None
        within = [one.module for one in calls if one.within is call.within]
        parts = {module for module in within if next(module.children(), None) is not None}
        if 0 < len(parts) <= MOST_PARTS:
            return call.module in parts
        name = name_of(call.within, self._job.trainer)
        self._say_why_not(call.within, FOREIGN.format(self._why_foreign(call.within), name))
        return False

    def _add(self, module: nn.Module) -> None:
        front = self._run.parts.get("front")
        is_model = module is self._job.model and front is not None
        aside = front.aside if is_model else nullcontext
        name = name_of(module, self._job.trainer)
        self._not_stored.pop(name, None)
        if module in reachable(self._job.trainer):
            self._named.add(id(module))
        for container in containers_of(module, self._job.trainer):
            model = self._job.model
            is_loss = container is not model and any(part is model for part in container.modules())
            if is_loss or (self._why_foreign(container) and container is not model):
                continue  # it is looked into
            if id(container) not in self._surrounding | self._roots:  # a root does the same in its calls
                self._surrounding[id(container)] = Surrounding(container)
        self._roots[id(module)] = FrozenRoot(name, module, self._trained, self._make_calls, aside)

    def _make_calls(self, called: CalledByLoss, in_steps: bool) -> FrontCalls:
        assert self._loss is not None and self._store is not None
        if not in_steps:
            return FrontCalls(self._loss, self._store, called=replace(called, num_entries=None))
        calls = FrontCalls(self._loss, self._store, self._run.training_batches.dataset, called)
        state = self._job.trainer.state
        calls.writes = self._epoch + 1 < state.num_train_epochs or self._job.shares_store
        calls.begin_epoch(self._epoch, self._begun)
        return calls

    # ------------------------------------------------------------------------------------ epochs, the end
    def epoch_ends(self) -> None:
        """Publish how many samples were read, by module. Collective over all processes if the loss is not stock."""
        if self._store is None:
            return
        mine = {root.name: [calls.take_counts()[0] for calls in root.fronts.values()] for root in self._roots.values()}
        total: dict[str, CacheCounts] = {}
        for of_process, computed in self._job.mesh.gather_objects((mine, self._not_stored)):
            self._log_computed(computed)  # of the stage that computes the loss, on the main process
            for name, counts in of_process.items():
                total[name] = reduce(add, counts, total.get(name, CacheCounts()))
        if any(counts.rows for counts in total.values()):
            self._run.publish("calls_epoch", total)

    def train_ends(self) -> None:
        reasons = {name: why for name, (_, why) in self._not_stored.items()}
        reasons |= {name: why for calls in self._calls() for name, why in calls.why_not_read.items()}
        self._run.publish("not_read", reasons)
        self._drop(deletes=True)  # before the front, over which calls without adapters are looked at

    def close(self, ending: Ending) -> None:
        self._drop(deletes=not ending.has_failed)

    def _drop(self, deletes: bool) -> None:
        """Let the modules run as they are, and delete what no other training can read."""
        store, self._store = self._store, None
        if store is None:
            return
        deletes &= self._may_delete()
        for root in self._roots.values():
            self._end(root, deletes)
        for surrounding in self._surrounding.values():
            surrounding.close()
        if self._stages is not None:
            self._stages.release()
        self._roots, self._surrounding, self._stages = {}, {}, None
        if deletes and not store.generations():
            store.remove()

    def _may_delete(self) -> bool:
        """Whether this process may delete the stored outputs: no other training can read them."""
        return not self._job.shares_store and bool(self._job.trainer.is_local_process_zero())

    def _end(self, root: FrozenRoot, deletes: bool) -> None:
        for calls in (*root.fronts.values(), *root.evaluated.values()):
            calls.end_hint(is_given=True)
            calls.drop(deletes)  # a process that still reads computes the deleted outputs
        root.close()


def make(run: PipelineRun) -> FrozenCalls | None:
    """Return the part; None if a part that it needs is not installed."""
    return FrozenCalls(run) if is_installed("front.front_calls", "prefix_cache.cache.sharing") else None
