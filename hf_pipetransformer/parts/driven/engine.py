"""The engine of a loss that drives the pipeline, and the server of a stage for calls of the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from ...model.micro_batch import Batch
from ...pipeline.engines.engine import Engine, StepLoss
from ...pipeline.messages import PipelineMessages
from ...pipeline.stage import StageModule
from .callback_calls import CallbackCalls
from .served_calls import ServedCalls
from .serving import ServingStage

T = TypeVar("T")


class StageServer:
    """Serves calls of the model in steps, in evaluations and in callbacks (`CallServer`).

    Args:
        stage: this process's stage, one of several with contiguous layers.
        messages: sends to and receives from the other stages.
        most_parts: maximum number of micro-batches of a call.
        serves_callbacks: whether to serve calls outside of the steps as well.
    """

    def __init__(
        self, stage: StageModule, messages: PipelineMessages, most_parts: int, serves_callbacks: bool
    ) -> None:
        self._served: ServedCalls | ServingStage
        if stage.is_last:
            self._served = ServedCalls(stage, messages, most_parts)
        else:
            self._served = ServingStage(stage, messages)
        self._callback_calls = CallbackCalls(self._served) if serves_callbacks else None
        self.around: Callable[[ServedCalls | ServingStage], AbstractContextManager[Any]] = lambda _: nullcontext()
        """Entered around a batch: on the last stage around the user's code, where calls of the model are served."""

    def serve(self, batch: Batch, code: Callable[[], T], unread: Collection[str] = ()) -> T | None:
        served = self._served
        if isinstance(served, ServingStage):
            with self.around(served):
                served.run(batch, code, unread)
            return None

        def within() -> T:
            with self.around(served):
                return code()

        return served.run(batch, within, unread)

    def serve_callbacks(self) -> None:
        if self._callback_calls is not None:
            self._callback_calls.serve_callbacks()

    @contextmanager
    def serving_callbacks(self) -> Iterator[None]:
        assert self._callback_calls is None
        self._callback_calls = CallbackCalls(self._served)
        try:
            yield
            self.serve_callbacks()
        finally:
            self.close()
            self._callback_calls = None

    def close(self) -> None:
        if self._callback_calls is not None:
            self._callback_calls.close()


class DrivenEngine(Engine):
    """Runs the loss and its backward. All stages serve the loss's calls of the model. There is no schedule."""

    reduces_at_end = True  # DDP expects one gradient per parameter, but a loss may call the model several times
    may_reach_nothing = True  # the loss may call the model on any inputs, or never

    def step(self, batch: Batch, loss: StepLoss, gradients_synchronise: bool) -> None:
        server = self.position.server()
        assert server is not None
        server.serve(batch, loss.drive, loss.unread)
