"""Calls of the model outside of the steps, on some processes of a pipeline only, such as in a callback on rank 0.

A call waits until the other processes reach the next common operation (a step, an evaluation, a save), and serve it:

    rank 0   callback: model(...) ........ runs ......... goes on ......... step 6
    rank 1   callback ...... comes to step 6: serves .... no more calls ... step 6

The last stage runs the model, as in a step (`ServedCalls`); calls of other processes send their inputs there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...model.method_override import MethodOverride, original_method
from ...progress import phase
from .module_state import Changes, plain_state, put_all
from .served_calls import ServedCalls
from .serving import ServingStage


@dataclass(frozen=True)
class _CallRequest:
    """A call that a process requests.

    Attributes:
        module: name of the called module; empty for the model.
        args: positional arguments of the call.
        kwargs: named arguments of the call.
        has_gradients: whether autograd is on.
        state: plain attributes of the model's modules.
    """

    module: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_gradients: bool
    state: Changes


class CallbackCalls:
    """One process's part in the calls of a split model outside of the steps. Calls work until `close`.

    Args:
        served: serves the calls.
    """

    def __init__(self, served: ServedCalls | ServingStage) -> None:
        self._messages, self._served = served.messages, served
        self._has_failed = False
        self._modules, self._runner = list(served.model.modules()), served.runner
        self._runner.is_served = True
        self._overrides = [
            MethodOverride(module, "forward", partial(self._forward, name, original_method(module)))
            for name, module in served.modules.items()
        ]

    def close(self) -> None:
        """Restore the modules' own `forward`."""
        self._runner.is_served = False
        for override in self._overrides:
            override.remove()

    def serve_callbacks(self) -> None:
        """Serve the calls of other processes, until there are none. Collective over the pipeline."""
        while self._is_asked(by_me=False):
            self._serve_all(None)

    def _forward(self, module: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_own = self._served.is_driving or self._runner.is_running or not self._runner.is_restricted
        if is_own or not self._runner.is_served:  # it is not served while a checkpoint is written
            return forward(*args, **kwargs)
        self._is_asked(by_me=True)
        return self._serve_all(_CallRequest(module, args, kwargs, torch.is_grad_enabled(), plain_state(self._modules)))

    def _is_asked(self, by_me: bool) -> bool:
        """Whether a process requests a call; much cheaper than a call. Collective over the pipeline.

        Raises:
            ValueError: an earlier call has failed, and the user's code has caught the error.
        """
        if self._has_failed:
            raise ValueError(
                "A call of the model in a callback has failed, and the other pipeline stages wait in it. Let the error"
                " end the training, or set pipeline_parallel_size=1."
            )
        return bool(self._messages.largest(torch.tensor([int(by_me)])))

    def _serve_all(self, mine: _CallRequest | None) -> Any:
        """Run the requested calls one after the other. Returns the result of this process's call."""
        results: list[Any] = []
        self._has_failed = True
        with phase("call in a callback"):
            for call in self._messages.of_each_stage(mine):
                if call is None:
                    results.append(None)
                else:
                    if mine is not None and len(results) == self._messages.stage_index:
                        call = mine  # the original call: tensors that require a gradient were not sent
                    undo = put_all(self._modules, call.state)
                    try:
                        results.append(self._served.run({}, partial(self._run, call)))
                    finally:
                        undo()
            mine_back = self._messages.scatter(results)
        self._has_failed = False
        return mine_back

    def _run(self, call: _CallRequest) -> Any:
        """Run a call on the last stage. Runs `forward` only: hooks run on the calling process."""
        with torch.set_grad_enabled(call.has_gradients):
            return self._served.modules[call.module].forward(*call.args, **call.kwargs)
