"""The user's loss drives the pipeline: the stages below serve each of its calls of the model.

The last stage's process runs the user's code once, as one process would. A call of the model in it becomes an *order*
to the stages below. The call's rows run as micro-batches, and the code after the last layer runs on all rows together:

    K = 3      rank 0  user's code   model(...)            · · F0 F1 F2 head   ... loss.backward()  B2 B1 B0
               rank 1  serves        └ order: forward      · F0 F1 F2          └ order: backward      B2 B1 B0
               rank 2  serves                              F0 F1 F2                                     B2 B1 B0

Autograd runs the backward: one node per micro-batch sends the gradient down as soon as it is known, and the latest
nodes run first. The trainer needs no knowledge of the user's code: it may call the model any number of times, on any
inputs, with or without gradients, and inside of a backward pass.

Orders go from stage to stage, downwards; activations go upwards, each after its shapes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate.utils import recursively_apply

from ...errors import UnsupportedModelError
from ...model.called_inputs import RecordedInputs, named_inputs, version_of
from ...model.dropout import may_drop
from ...model.elsewhere import Hidden, hidden_like
from ...model.layer_range import HIDDEN, HIDDEN_REMEDY, CalledWith, Carry
from ...model.layer_stack import why_whole
from ...model.method_override import MethodOverride, original_method
from ...model.micro_batch import Batch, numbers_of_rows
from ...model.nested import tensors_of
from ...model.refusals import refuse_recorded
from ...model.tags import TAGS
from ...pipeline.messages import FailedBelow, PipelineMessages
from ...pipeline.stage import StageModule
from ...progress import PROGRESS
from ..prefix_cache.cache.settings import ReadOutside
from .left_behind import StateOnLast
from .module_state import Changes
from .orders import (
    POSITIONAL,
    Ask,
    Backward,
    End,
    Forward,
    Own,
    StageCalls,
    autocast_state,
    refuse_objects,
)
from .surroundings import Surroundings

T = TypeVar("T")


class ServedCalls(StageCalls):
    """Runs the user's code on the last stage, and serves the calls of the model in it with the stages below.

    Args:
        stage: as in `StageCalls`.
        messages: as in `StageCalls`.
        most_parts: maximum number of micro-batches of a call.
    """

    def __init__(self, stage: StageModule, messages: PipelineMessages, most_parts: int) -> None:
        super().__init__(stage, messages)
        self._most_parts = most_parts
        self._batch: Batch = {}
        self._given = RecordedInputs({})
        self._unread: Collection[str] = ()
        self._own: dict[int, tuple[int, int]] = {}  # id of a tensor of the batch -> its index and version
        self._state = StateOnLast(stage, self.modules)
        self._outside: ReadOutside | None = None
        self._around = Surroundings()
        self._drops = self._runs_whole = False  # in the current modes: whether dropout is active, and calls stay whole
        self._finds_rows = True  # whether calls are split unevenly; constant in a batch: calls may be repeated
        self._not_of_samples: set[str] = set()  # names of inputs without a row for each sample
        self._number = 0
        self._released: list[tuple[int, int]] = []  # micro-batches with freed graphs
        self._expected = 0  # micro-batches of the current call that the stages below have yet to send
        self._first_call = 0  # number of this batch's first call
        self._below = torch.zeros((), requires_grad=True, device=stage.device)  # the parameters below, for autograd
        self._only: str | None = None  # only this module's calls are served
        self.has_gone_back = False
        """Whether the user's code has run a backward in this batch."""
        self._row_dimensions: dict[int, tuple[int | None, ...]] | None = None
        """Stack -> dimension of the samples in each tensor after the last layer; None until known."""

    def run(self, batch: Batch, code: Callable[[], T], unread: Collection[str] = ()) -> T:
        """Run the user's code. The other stages serve each of its calls of the model (`ServingStage`).

        Args:
            batch: the prepared batch, the same on all stages.
            code: the user's code. It may call the model on any inputs.
            unread: names of inputs that frozen layers do not read. Tags do not depend on them.
        """
        tensors = tensors_of(batch)
        self._own = {id(tensor): (index, version_of(tensor)) for index, tensor in enumerate(tensors)}
        self._batch, self._released = batch, []
        self._finds_rows = self._row_dimensions is None
        self._first_call = self._number + 1
        self.has_gone_back = False
        self._given, self._unread = RecordedInputs(batch), unread
        if self._outside is None or self._outside.changed():
            self._outside = ReadOutside(self.model.modules())
        self._around = Surroundings()
        with self._overriding():
            result = code()
            self._refuse_changes_outside()
            self._around.refuse_others()
            self._order(End(self._state.end()))
        self.wait()
        self._batch, self._own = {}, {}
        self._first_call = self._number + 1  # the stages below have freed their graphs
        return result

    @contextmanager
    def _overriding(self) -> Iterator[None]:
        """Inside the context, serve calls of the model, and of its modules that contain all layers."""

        def serving(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                return self._call(name, forward, args, kwargs)

            # keeps a user's compiled function from compiling the served call
            is_compiling = "torch._dynamo" in sys.modules
            return torch.compiler.disable(call) if is_compiling else call

        with ExitStack() as undone:
            undone.callback(setattr, self.runner, "is_served", self.runner.is_served)
            undone.callback(setattr, self, "is_driving", False)
            self.runner.is_served = self.is_driving = True
            for name, module in self.modules.items():
                override = MethodOverride(module, "forward", serving(name, original_method(module)))
                undone.callback(override.remove)
            self._state.begin()
            undone.callback(self._state.abandon)
            yield

    def _call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.runner.is_running or self._only not in (None, name):  # inside of a served call, or around one
            return forward(*args, **kwargs)
        try:
            return self._serve_call(name, forward, args, kwargs)
        except FailedBelow as failure:
            self._expected, error = 0, failure.error
        except Exception:
            self._drain()
            self._state.call_has_failed()
            raise
        self._state.call_has_failed()
        raise error  # raised outside of the handler, to keep its own cause

    @property
    def runs_alone_outside(self) -> bool:
        """Whether the modules around the innermost one that contains all layers can run on this process alone.

        It has their weights, and no call so far has written anything into modules outside of the layers.
        """
        inside = set(map(id, self.modules[self.innermost].parameters()))
        here = {id(self.stage.stack.table[name]) for name in self.stage.names}
        return not self._state.has_written and all(id(p) in inside | here for p in self.model.parameters())

    @contextmanager
    def serving_innermost(self) -> Iterator[None]:
        """Inside, modules around the innermost one that contains all layers run here, and only its calls are served.

        A call that it does not get, because its output is known, sends no order to the stages below.
        """
        before, self._only = self._only, self.innermost
        try:
            yield
        finally:
            self._only = before

    def _refuse_changes_outside(self) -> None:
        """Raise a `ValueError` if the loss has changed values outside of the model that its code reads."""
        if self._outside is not None and (what := self._outside.changed()):
            raise ValueError(
                f"The loss has changed {what}, which the code of the model's modules reads: a global variable, a"
                " closure, or an attribute of a class. The loss runs on the last pipeline stage only, and the other"
                " stages would compute with the old value. Set an attribute of the model's modules in its place, pass"
                " the value as an argument of the model, change it in a callback, or set pipeline_parallel_size=1."
            )

    def _drain(self) -> None:
        """Receive the remaining messages of a call that has failed here. The user's code may continue."""
        with suppress(FailedBelow):
            while self._expected:
                self._expected -= 1
                self.messages.receive_values(self.index, self.stage.slots_in)
                self._state.hear(self.messages.note)

    def _serve_call(
        self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        inputs = {**{POSITIONAL.format(i): value for i, value in enumerate(args)}, **kwargs}
        refuse_objects(self.model, inputs)
        refuse_recorded(self.model, inputs if name else named_inputs(self.model, args, kwargs))
        self._number += 1
        has_gradients = torch.is_grad_enabled()
        wanted = {i: v for i, v in enumerate(tensors_of(inputs)) if has_gradients and v.requires_grad}
        keys = {} if name else self._tags_of(args, kwargs)
        self._refuse_changes_outside()
        self._around.refuse_others()
        changes = self._state.for_call(name)
        if changes or self._number == self._first_call:
            self._drops = may_drop(self.model)
            self._runs_whole = self._state.may_mix or bool(why_whole(self.stage.stack))
        order = Forward(
            self._number,
            name,
            self._spans(inputs),
            has_gradients,
            tuple(wanted),
            int(torch.randint(2**62, ())) if self._drops else None,
            autocast_state(self.stage.device.type),
            changes,
        )
        self._order(order, recursively_apply(self._by_name, {**inputs, **keys}))
        self._expected = max(1, len(order.spans))
        origin = torch.zeros((), device=self.stage.device)
        if wanted:
            origin = _Inputs.apply(self, order.call, *wanted.values())
        with self._state.running(is_split=bool(order.spans)):
            outputs = self._run_call(order, forward, args, kwargs, {**inputs, **keys}, origin)
        if self._outside is not None and self._outside.changed():  # the model's own code has changed it, on all stages
            self._outside = ReadOutside(self.model.modules())
        return outputs

    def _run_call(
        self,
        order: Forward,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        inputs: Batch,
        origin: torch.Tensor,
    ) -> Any:
        """Run this stage's part of an ordered call. Returns the model's output."""
        if not order.spans:  # one forward, as in one process: the model may count forwards
            values = self._receive(order, 0, origin)
            with self.running(order, 0, forward), self.stage.running_to_the_end(values, inputs):
                self.runner.begin_call()
                self.begin_in_shortcut(args, dict(kwargs))
                return _hiding_the_first(forward(*args, **kwargs))
        ends = [
            self._run_part(order, forward, part, number, origin)
            for number, part in enumerate(self.parts(inputs, order.spans))
        ]
        stack = self.stage.stack
        with (
            self.runner.calling_with(CalledWith()),
            self.runner.to_the_end(stack.num_units, self._joined(ends)),
        ):
            self.runner.begin_call()
            return _hiding_the_first(forward(*args, **kwargs))

    def _run_part(
        self, order: Forward, forward: Callable[..., Any], part: Batch, number: int, origin: torch.Tensor
    ) -> Carry:
        """Run this stage's layers on a micro-batch from below. Returns the outputs of the last layer."""
        values = self._receive(order, number, origin)
        with self.running(order, number, forward):
            inputs, start, carry = self.stage.begin(values, part)
            return self.runner.run(start, self.stage.stop, carry, inputs)

    def _receive(self, order: Forward, number: int, origin: torch.Tensor) -> list[torch.Tensor]:
        """Receive a micro-batch's values from below. Their gradients are sent down in the backward."""
        self._expected -= 1
        values = self.messages.receive_values(self.index, self.stage.slots_in, with_gradients=order.has_gradients)
        self._state.hear(self.messages.note)
        through = [index for index, value in enumerate(values) if value.requires_grad]
        if through:
            hidden = (values[index].detach() for index in through)
            of_graph = _Boundary.apply(self._below, origin, self, order.call, number, *hidden)
            for index, value in zip(through, of_graph, strict=True):
                values[index] = value
        return values

    def _joined(self, ends: Sequence[Carry]) -> Carry:
        """Join the last layer's outputs of all micro-batches along the dimension of the samples.

        Values without such a dimension (a position bias) are taken from the first micro-batch. The first call has
        micro-batches of different sizes, which reveal the dimension.
        """
        if len(ends) == 1:
            return ends[0]
        joined = {}
        if self._row_dimensions is None:
            self._row_dimensions = {
                of: tuple(_row_dimension(values) for values in zip(*(end[of] for end in ends), strict=True))
                for of in ends[0]
            }
            self._refuse_unlike(ends, self._row_dimensions)
        for of, dimensions in self._row_dimensions.items():
            values = zip(*(end[of] for end in ends), strict=True)
            joined[of] = tuple(
                parts[0] if dimension is None else torch.cat(parts, dimension)
                for parts, dimension in zip(values, dimensions, strict=True)
            )
        return joined

    def _refuse_unlike(self, ends: Sequence[Carry], dimensions: Mapping[int, Sequence[int | None]]) -> None:
        """Refuse values without a dimension of the samples that differ between micro-batches."""
        for of, of_stack in dimensions.items():
            for index, dimension in enumerate(of_stack):
                first = ends[0][of][index]
                if dimension is None and not all(torch.equal(first, end[of][index]) for end in ends[1:]):
                    raise UnsupportedModelError(
                        self.model,
                        f"its layers return a value of shape {tuple(first.shape)} that has no entry for each sample"
                        " and differs between micro-batches (a sum over them, perhaps).",
                        "Set num_microbatches=1, or pipeline_parallel_size=1.",
                    )

    def _spans(self, inputs: Batch) -> tuple[tuple[int, int], ...]:
        """Return the rows of each micro-batch of a call; empty if the call is not split.

        A call is split if all tensors have the same number of rows. An input that once had another number (a prompt,
        settings) never counts as samples, even if the numbers happen to be equal later.
        """
        rows_of = {name: numbers_of_rows(value) for name, value in inputs.items()}
        numbers = set[int]().union(*rows_of.values())
        rows = max(numbers, default=1)
        if len(numbers) > 1:
            own = numbers & numbers_of_rows(self._batch) or {rows}
            self._not_of_samples |= {name for name, theirs in rows_of.items() if theirs - own}
            return ()
        if not self._not_of_samples.isdisjoint(name for name, theirs in rows_of.items() if theirs):
            return ()
        count = min(self._most_parts, rows)
        if count < 2 or self._runs_whole:
            return ()
        if self._finds_rows:
            if rows < 3:
                return ()
            count -= count == rows
        sizes = [rows // count + (index < rows % count) for index in range(count)]
        if self._finds_rows and count > 1 and sizes[0] == sizes[-1]:
            sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
        stops = [sum(sizes[: index + 1]) for index in range(count)]
        return tuple(zip([0, *stops], stops, strict=False))

    def _tags_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        """Return the tags of a call on the batch's own inputs. Other inputs have no tags."""
        shortcut = self.stage.shortcut
        called = named_inputs(self.model, args, kwargs)
        if TAGS not in self._batch or shortcut is None or shortcut.is_called_otherwise(called):
            return {}
        return {TAGS: self._batch[TAGS]} if self._given.are(called, self._unread) else {}

    def _by_name(self, tensor: torch.Tensor) -> Any:
        """Replace an unchanged tensor of the batch by its index. Other tensors stay."""
        index, version = self._own.get(id(tensor), (None, None))
        return Own(index) if index is not None and version_of(tensor) == version else tensor

    def _order(self, order: Any, tensors: Any = ()) -> None:
        released, self._released = self._released, []
        self.send((order, released, tensors), self.index - 1)

    def send_backward(self, order: Backward, gradients: Sequence[torch.Tensor]) -> None:
        """Called by autograd: order the backward of a micro-batch."""
        PROGRESS.tick()
        self.has_gone_back = True
        if order.call < self._first_call:
            raise ValueError(
                "backward() reaches a call of the model in an earlier step or in a callback, whose graph the other"
                " pipeline stages no longer have. Detach what is kept from step to step, or set"
                " pipeline_parallel_size=1."
            )
        self._order(order, list(gradients))

    def changes_for_backward(self) -> Changes:
        """Called by autograd: return the changes since the last order. Some stages below may not get this order."""
        return self._state.for_backward()

    def gradients_of_inputs(self, call: int) -> list[torch.Tensor]:
        """Called by autograd: return the gradients of a call's inputs, summed over the stages below."""
        self._order(Ask(call))
        found: list[torch.Tensor] = self.messages.receive_tree(0)
        for stage in range(1, self.index):
            found = [one + other for one, other in zip(found, self.messages.receive_tree(stage), strict=True)]
        return found

    def release(self, call: int, part: int) -> None:
        """Called when the graph of a micro-batch is freed here."""
        self._released.append((call, part))


class _Boundary(torch.autograd.Function):
    """A micro-batch's values from below. Their gradients are sent down as soon as autograd has them.

    `below` stands for the parameters below: autograd reaches it in `backward()`, but not in `grad(_, inputs)`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        below: torch.Tensor,
        origin: torch.Tensor,
        served: ServedCalls,
        call: int,
        part: int,
        *hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.token = _Token(served, call, part)
        return tuple(value.view_as(value) for value in hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ValueError(
                "A gradient of a gradient (create_graph=True) reaches layers of other pipeline stages, which do not"
                " compute it. Set pipeline_parallel_size=1."
            )
        token: _Token = ctx.token
        reaches_parameters = torch._C._will_engine_execute_node(ctx.next_functions[0][0])
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        changes = token.served.changes_for_backward()
        token.served.send_backward(Backward(token.call, token.part, not reaches_parameters, keeps, changes), gradients)
        origin = gradients[0].new_zeros(()) if ctx.needs_input_grad[1] else None
        return None, origin, None, None, None, *[None] * len(gradients)


@dataclass(eq=False)
class _Token:
    """Lives as long as the node of a micro-batch, i.e. as long as a backward is possible."""

    served: ServedCalls
    call: int
    part: int

    def __del__(self) -> None:
        self.served.release(self.call, self.part)


class _Inputs(torch.autograd.Function):
    """Inputs of a call that require a gradient. The stages below return it after all micro-batches' backwards."""

    @staticmethod
    def forward(ctx: Any, served: ServedCalls, call: int, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.served, ctx.call = served, call
        return torch.zeros((), device=inputs[0].device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return None, None, *ctx.served.gradients_of_inputs(ctx.call)


# ---------------------------------------------------------------------------------------------------------
def _row_dimension(values: Sequence[torch.Tensor]) -> int | None:
    """Return the dimension that differs between micro-batches of different sizes; None if none does."""
    different = [
        dimension
        for dimension, sizes in enumerate(zip(*(value.shape for value in values), strict=True))
        if len(set(sizes)) > 1
    ]
    return different[0] if different else None


def _hiding_the_first(output: Any) -> Any:
    """Hide the first hidden state as well, if a model returns all: it is not the output of a layer."""
    for name, states in list(output.items()) if isinstance(output, Mapping) else []:
        if name.endswith("hidden_states") and isinstance(states, tuple) and len(states) > 1:
            first = states[0]
            if isinstance(first, torch.Tensor) and not isinstance(first, Hidden):
                output[name] = (hidden_like(first, HIDDEN.format("the embeddings"), HIDDEN_REMEDY), *states[1:])
    return output
