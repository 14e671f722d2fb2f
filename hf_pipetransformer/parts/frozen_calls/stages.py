"""The trained model as a frozen module that the loss calls, without its adapters, if its layers are on several stages.

The last stage runs the loss, and looks up its calls. The stages below tell it in each step, before the loss runs,
whether their weights are those that the stored outputs were computed with:

    stage below   watches its weights ── message: digest, or the change ───────┐   serves calls, if there are some
    last stage    waits for the messages of all stages ────────────────────────┘   loss: model(...)
                                                                                     all rows stored: no order
                                                                                     else: served, and stored

Inside of the step only the loss runs code of the user's, on the last stage. It has no weights of the other stages.
Its changes of modules are seen on the last stage, which has the modules of all stages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import xxhash
from torch import nn

from ...model.method_override import MethodOverride, having, original_method
from ...pipeline.messages import Pending, PipelineMessages, wait_for
from ...pipeline.stage import StageModule
from ...randomness import other_randomness, set_torch_states, torch_states
from ...run.run import PipelineRun
from ..front.called_by_loss import Split
from ..front.finding import DRAWS
from ..front.front_calls import FrontCalls
from ..prefix_cache.cache.origins import as_one_function
from ..prefix_cache.cache.watched_weights import WatchedWeights
from .adapters import TrainedAdapters
from .roots import FrozenRoot
from .watching import SeenCall

logger = logging.getLogger(__name__)

ALONE = "the code around the layers failed on the last stage alone ({}: {})"
"""Why no output is stored if the modules around the layers need more than this process has; its error."""


class CallsOfStage(Protocol):
    """One stage's part in the calls of a batch (`parts.driven.orders.StageCalls`)."""

    stage: StageModule
    messages: PipelineMessages
    modules: dict[str, nn.Module]
    innermost: str


class CallsOfLast(CallsOfStage, Protocol):
    """The same on the last stage (`parts.driven.served_calls.ServedCalls`)."""

    has_gone_back: bool

    @property
    def runs_alone_outside(self) -> bool: ...

    def serving_innermost(self) -> AbstractContextManager[None]: ...


class SplitRoot(FrozenRoot):
    """The trained model on the last stage, which has the last layers. For arguments, see `FrozenRoot`.

    Its calls are intercepted `within` the served ones only.
    """

    _calls: CallsOfLast | None = None
    _is_sure = False  # the stages below have told that their weights are unchanged
    _digests: tuple[str, ...] = ()
    _adapters: TrainedAdapters | None = None
    why_over: str | None = None
    """Why storing and reading have stopped."""

    def open(self) -> None:
        if self._calls is not None:
            super().open()

    def learn(self, seen: list[SeenCall], num_samples: int | None, batch_rows: int) -> None:
        if self._calls is not None:  # else the layout has one stage: its calls are computed
            super().learn(seen, num_samples, batch_rows)

    @property
    def is_used(self) -> bool:
        """Whether outputs are stored, or may be."""
        return self.why_over is None and not all(calls.is_over for calls in self.fronts.values())

    def end(self, why: str) -> None:
        """Stop storing and reading; entries may be wrong, and are deleted."""
        self.why_over = why
        for calls in self.fronts.values():
            calls.end(why)

    def forget(self) -> None:
        """Forget all calls: the layers are on other processes now. Their outputs stay valid, but are stored anew."""
        for calls in self.fronts.values():
            calls.drop(deletes=True)
        self.fronts.clear()
        self._is_of_batch.clear()
        self._calls = None

    @contextmanager
    def within(self, calls: CallsOfLast, digests: tuple[str, ...] | None) -> Iterator[None]:
        """Inside, on the last stage, calls that are served are looked up first.

        Args:
            calls: serves them.
            digests: of the weights of the stages below; None if it is not known whether these have changed.
        """
        self._calls, self._is_sure = calls, digests is not None
        self._digests = digests or ()
        module = calls.modules[calls.innermost]
        innermost = MethodOverride(module, "forward", as_one_function(original_method(module)))
        self.open()
        for front in self.fronts.values():
            front.resume()
        try:
            yield
        finally:
            self._is_sure = False
            for front in self.fronts.values():
                front.pause()
            self.close()
            innermost.remove()

    @property
    def _split(self) -> Split | None:
        assert self._calls is not None, "a call was seen"
        stage = self._calls.stage
        here = {id(stage.stack.table[name]) for name in stage.names}
        elsewhere = frozenset(id(parameter) for parameter in self.module.parameters()) - here
        return Split(f"{self.name}.{self._calls.innermost}".rstrip("."), elsewhere, lambda: " ".join(self._digests))

    def _may_look_up(self) -> bool:
        """Whether stored outputs may be read now, and others stored.

        A backward in the loss may have run code on other stages that writes into weights. What other stages compute
        with is not seen here, so adapters that are trained must be off.
        """
        calls = self._calls
        if calls is None or not self._is_sure or self.why_over is not None or calls.has_gone_back:
            return False
        self._adapters = self._adapters or TrainedAdapters(self.module, self._trained)
        return calls.runs_alone_outside and not self._adapters.may_compute

    def _look_up(self, calls: FrontCalls, inputs: Mapping[str, Any]) -> Any:
        assert self._calls is not None
        states = torch_states()
        try:
            with self._calls.serving_innermost():
                return super()._look_up(calls, inputs)
        except Exception as error:  # as served the call may succeed, or fail with the error that the user should see
            logger.debug("A call could not be looked up.", exc_info=True)
            lines = str(error).strip().splitlines() or ["no text"]
            why = ALONE.format(type(error).__name__, lines[0].rstrip("."))
        set_torch_states(states)
        self.end(why)
        return self._run(**inputs)


class Stages:
    """The messages of this pipeline's stages to the last one about their weights.

    Args:
        run: the run.
        root: the trained model; on the last stage its calls are looked up.
        trained: identities of the parameters that are trained.
    """

    def __init__(self, run: PipelineRun, root: SplitRoot, trained: frozenset[int]) -> None:
        self._run, self._root, self._trained = run, root, trained
        self._is_telling = False  # the same on all processes
        self._watched: WatchedWeights | None = None
        self._digest = ""
        self._draws = False
        self._pending: Pending = []

    def step(self) -> AbstractContextManager[Any]:
        """Entered around a step. Inside, the stages below tell the last one about their weights."""
        server: Any = self._run.pipeline.running.engine.position.server()
        return nullcontext() if server is None else having(server, around=self._around)

    def vote(self) -> bool:
        """Whether this process needs to be told about weights in the next step."""
        return self._run.pipeline.computes_loss and self._root.is_used

    def heard(self, is_any_used: bool) -> None:
        """Whether any process does: the same on all processes."""
        if self._is_telling and not is_any_used:
            self.release()
        self._is_telling = is_any_used

    def layout_changed(self) -> None:
        """Other weights are on this process now. On all processes."""
        self.release()
        self._is_telling = False
        self._root.forget()

    def release(self) -> None:
        """Watch no weights any more."""
        if self._watched is not None:
            self._watched.release()
            self._watched = None

    @contextmanager
    def _around(self, calls: CallsOfStage) -> Iterator[None]:
        if not calls.stage.is_last:
            with self._telling(calls) if self._is_telling else nullcontext():
                yield
            return
        digests: tuple[str, ...] | None = None
        if self._is_telling:
            told = [calls.messages.receive_tree(stage) for stage in range(calls.messages.last)]
            digests = tuple(digest for digest, _ in told)
            why = next((why for _, why in told if why is not None), None)
            if why is not None and self._root.why_over is None:
                self._root.end(why)
        last: Any = calls
        with self._root.within(last, digests):
            yield

    @contextmanager
    def _telling(self, calls: CallsOfStage) -> Iterator[None]:
        """On a stage below: tell whether weights have changed, and note whether calls without gradients draw."""
        module = calls.modules[calls.innermost]
        why = DRAWS if self._draws else self._what_changed(calls.stage, module)
        wait_for(self._pending)
        self._pending = calls.messages.send_tree((self._digest, why), calls.messages.last)
        override = MethodOverride(module, "forward", partial(self._noting_draws, original_method(module)))
        try:
            yield
        finally:
            override.remove()

    def _what_changed(self, stage: StageModule, module: nn.Module) -> str | None:
        """Name the change on this stage since outputs are stored. The first time, begin to watch."""
        if self._watched is not None:
            self._watched.look_for_holders()
            return self._watched.what_changed() or self._watched.why_too_slow()
        here = [stage.stack.table[name] for name in stage.names]
        parameters = [parameter for parameter in here if id(parameter) not in self._trained]
        self._watched = WatchedWeights(list(module.modules()), parameters)
        self._watched.guard()
        self._watched.look_for_holders()
        described = f"{self._watched.digest()} {self._watched.described()}"
        self._digest = xxhash.xxh3_128_hexdigest(described.encode())
        return None

    def _noting_draws(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return forward(*args, **kwargs)
        states, others = torch_states(), other_randomness()
        try:
            return forward(*args, **kwargs)
        finally:
            self._draws |= others != other_randomness() or not all(map(torch.equal, states, torch_states()))
