"""A thread for the cache's files, beside the training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundThread:
    """Runs functions one after another in a thread that ends with the process.

    It is not an executor: at exit the interpreter would wait for a read or a copy that never ends.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, function: Callable[[], T]) -> Future[T]:
        """Run a function after all earlier ones. The future raises its error."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._queue.put((future, function))
        return future

    def flush(self) -> None:
        """Wait until all functions have run."""
        if self._thread is not None:
            self.run(lambda: None).result()

    def close(self) -> None:
        """Run all pending functions, and end the thread. The next `run` starts a new thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            future, function = task
            try:
                future.set_result(function())
            except BaseException as error:  # `Future.result` raises it
                future.set_exception(error)
            del task, future, function  # the latest result must not live until the next task
