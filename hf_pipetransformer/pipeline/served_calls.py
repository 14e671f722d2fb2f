"""The user's loss drives the pipeline: each call of the model in it is served by the stages below.

The last stage's process runs the user's code as one process would, once. A call of the model in it is an *order* to
the stages below; the call's rows run as micro-batches, and what lies behind the last layer runs on all rows together:

    K = 3      rank 0  user's code   model(...)            · · F0 F1 F2 head   ... loss.backward()  B2 B1 B0
               rank 1  serves        └ order: forward      · F0 F1 F2          └ order: backward      B2 B1 B0
               rank 2  serves                              F0 F1 F2                                     B2 B1 B0

Autograd runs the backward: one node for each micro-batch sends the gradient down as soon as it is known, and the nodes
made last run first. Nothing has to be known about the user's code: how often it calls the model, on which inputs, with
or without gradients, or inside of a backward pass.

Orders go from stage to stage, downwards; activations go upwards, each after its shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from accelerate.utils import recursively_apply
from torch import nn

from ..cache.content_keys import KEYS_NAME, KeyedInputs, named_inputs, version_of
from ..model.batch_statistics import statistics_set_aside
from ..model.dropout import may_drop
from ..model.elsewhere import Hidden, hidden_like
from ..model.layer_range import HIDDEN, HIDDEN_REMEDY, CalledWith, Carry, MethodOverride, has_own_forward
from ..model.layer_stack import why_whole
from ..model.micro_batch import Batch, batch_rows, slice_rows
from ..model.nested import tensors_of
from ..model.training_check import is_users
from ..randomness import seeded
from ..resilience.watchdog import PROGRESS
from .messages import Crossing, Pending, PipelineMessages, wait_for
from .stage import StageModule

T = TypeVar("T")

POSITIONAL = "positional argument {}"
"""Name of an argument that a call passes by position, in an order."""
SEEDS_APART = 104729
"""Difference between the seeds of neighbouring stages."""


@dataclass(frozen=True)
class _Own:
    """Stands for one of the batch's own tensors, which every stage has."""

    index: int


@dataclass(frozen=True)
class _Modes:
    """What the user's code may have changed in the model's modules, in the order of `model.modules()`.

    Attributes:
        training: the modes.
        adapters: whether PEFT's layers are disabled, and which of their adapters are active.
    """

    training: tuple[bool, ...]
    adapters: tuple[tuple[bool, Any], ...]

    @classmethod
    def of(cls, model: nn.Module) -> _Modes:
        modules = list(model.modules())
        adapters: list[tuple[Any, Any]] = [
            (m._disable_adapters, m._active_adapter) for m in modules if _has_adapters(m)
        ]
        return cls(tuple(module.training for module in modules), tuple(adapters))

    def set(self, model: nn.Module) -> None:
        modules = list(model.modules())
        for module, training in zip(modules, self.training, strict=True):
            module.training = training
        with_adapters = [module for module in modules if _has_adapters(module)]
        for layer, (is_disabled, active) in zip(with_adapters, self.adapters, strict=True):
            layer._disable_adapters, layer._active_adapter = is_disabled, active  # type: ignore[assignment]


def _has_adapters(module: nn.Module) -> bool:
    return hasattr(module, "_disable_adapters") and hasattr(module, "_active_adapter")


@dataclass(frozen=True)
class _Forward:
    """Run a call's micro-batches.

    Attributes:
        call: number of the call.
        module: name of the module that was called; empty for the model.
        spans: first row, and row after the last one, of each micro-batch; empty for a call that is not split.
        has_gradients: whether autograd is on.
        wanted: names of inputs whose gradients the user's code may ask for.
        seed: seed of the random numbers in the layers; None if they draw none.
        autocast: whether autocast is on, and its dtype.
        modes: of the model's modules, if they have changed since the last order.
    """

    call: int
    module: str
    spans: tuple[tuple[int, int], ...]
    has_gradients: bool
    wanted: tuple[str, ...]
    seed: int | None
    autocast: tuple[bool, torch.dtype]
    modes: _Modes | None


@dataclass(frozen=True)
class _Backward:
    """Run the backward of a micro-batch.

    Attributes:
        call: number of the call.
        part: index of the micro-batch.
        only_inputs: whether only the gradients of the call's inputs are asked for (`torch.autograd.grad`).
        keeps_graph: whether another backward may follow (`retain_graph`).
        modes: of the model's modules, if they are not those of the last forward; checkpointed layers run again.
    """

    call: int
    part: int
    only_inputs: bool
    keeps_graph: bool
    modes: _Modes | None


@dataclass(frozen=True)
class _End:
    """The user's code has returned."""


@dataclass
class _Held:
    """The graph of a micro-batch on a stage below: what it received, wanted inputs, and what it has sent."""

    received: list[torch.Tensor]
    wanted: list[torch.Tensor] = field(default_factory=list)
    sent: list[torch.Tensor] = field(default_factory=list)


class ServedCalls:
    """One process's part in the calls that the user's code makes on the last stage.

    Args:
        stage: this process's stage, one of several with contiguous layers.
        messages: sends to and receives from the other stages.
        most_parts: maximum number of micro-batches of a call.
    """

    def __init__(self, stage: StageModule, messages: PipelineMessages, most_parts: int) -> None:
        self._stage, self._messages, self._most_parts = stage, messages, most_parts
        self._model, self._runner = stage.stack.model, stage.stack.runner
        self._index = messages.stage_index
        self._served = _modules_around_all(self._model, [unit.module for unit in stage.stack.units])
        self._copies = any(map(is_users, self._served.values()))
        self._pending: Pending = []
        # on the last stage
        self._batch: Batch = {}
        self._keyed = KeyedInputs({})
        self._unread: Collection[str] = ()
        self._own: dict[int, tuple[int, int]] = {}  # by id of a tensor of the batch: its index and version
        self._modes: _Modes | None = None  # what the stages below know
        self._finds_rows = True  # whether calls are cut unevenly; in all of a batch alike, as one may be made again
        self._number = 0
        self._released: list[tuple[int, int]] = []  # micro-batches whose graph is gone
        self._gone_down: dict[int, list[int]] = {}  # by call: micro-batches whose gradients of inputs come back
        self._below = torch.zeros((), requires_grad=True, device=stage.device)  # the parameters below, for autograd
        # on the stages below
        self._held: dict[tuple[int, int], _Held] = {}

    # ------------------------------------------------------------------------------------ the last stage
    def drive(self, batch: Batch, code: Callable[[], T], unread: Collection[str] = ()) -> T:
        """Run the user's code; inside, each call of the model is served. The other stages `serve` meanwhile.

        Args:
            batch: the batch that all stages have, prepared.
            code: the user's code, which may call the model on anything.
            unread: names of inputs that frozen layers do not read, so that cache keys do not cover them.
        """
        tensors = tensors_of(batch)
        self._own = {id(tensor): (index, version_of(tensor)) for index, tensor in enumerate(tensors)}
        self._batch, self._modes, self._released = batch, None, []
        self._finds_rows = self._stage.stack.row_dimensions is None
        self._keyed, self._unread = KeyedInputs(batch), unread
        with self._overriding():
            result = code()
        self._order(_End())
        wait_for(self._pending)
        self._pending, self._batch, self._own, self._gone_down = [], {}, {}, {}
        return result

    @contextmanager
    def _overriding(self) -> Iterator[None]:
        """Inside, calls of the model, and of modules in it that contain all its layers, are served."""

        def serving(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._call(name, forward, args, kwargs)

        with ExitStack() as undone:
            self._runner.is_served = True
            undone.callback(setattr, self._runner, "is_served", False)
            for name, module in self._served.items():
                override = MethodOverride(module, "forward", serving(name, module.forward))
                undone.callback(override.remove)
            yield

    def _call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._runner.is_running:  # inside of a call that is being served
            return forward(*args, **kwargs)
        inputs = {**{POSITIONAL.format(i): value for i, value in enumerate(args)}, **kwargs}
        self._number += 1
        has_gradients = torch.is_grad_enabled()
        wants = [n for n, v in inputs.items() if has_gradients and isinstance(v, torch.Tensor) and v.requires_grad]
        keys = {} if name else self._keys_of(args, kwargs)
        order = _Forward(
            self._number,
            name,
            self._spans(inputs),
            has_gradients,
            tuple(wants),
            int(torch.randint(2**62, ())) if may_drop(self._model) else None,
            _autocast_state(self._stage.device.type),
            self._changed_modes(),
        )
        self._order(order, recursively_apply(self._by_name, {**inputs, **keys}))
        origin = torch.zeros((), device=self._stage.device)
        if wants:
            origin = _Inputs.apply(self, order.call, tuple(wants), order.spans, *(inputs[name] for name in wants))
        if not order.spans:  # one forward, as in one process: the model may count them
            values = self._receive(order, 0, origin)
            with (
                self._running(order, 0, forward),
                self._runner.hiding_skipped(),
                self._stage.running_to_the_end(values, {**inputs, **keys}),
            ):
                self._runner.begin_call()
                return _hiding_the_first(forward(*args, **kwargs))
        ends = [
            self._run_part(order, forward, part, number, origin)
            for number, part in enumerate(_parts({**inputs, **keys}, order.spans, self._copies))
        ]
        stack = self._stage.stack
        with (
            self._runner.calling_with(CalledWith()),
            self._runner.hiding_skipped(),
            self._runner.to_the_end(stack.num_units, self._joined(ends)),
        ):
            self._runner.begin_call()
            return _hiding_the_first(forward(*args, **kwargs))

    def _run_part(
        self, order: _Forward, forward: Callable[..., Any], part: Batch, number: int, origin: torch.Tensor
    ) -> Carry:
        """Run this stage's layers on a micro-batch that arrives from below; returns what follows the last one."""
        values = self._receive(order, number, origin)
        with self._running(order, number, forward):
            inputs, start, carry = self._stage.begin(values, part)
            return self._runner.run(start, self._stage.stop, carry, inputs)

    def _receive(self, order: _Forward, number: int, origin: torch.Tensor) -> list[torch.Tensor]:
        """Receive a micro-batch's values from below, whose gradients go down again."""
        values = self._messages.receive_values(self._index, self._stage.slots_in, with_gradients=order.has_gradients)
        through = [index for index, value in enumerate(values) if value.requires_grad]
        if through:
            hidden = (values[index].detach() for index in through)
            of_graph = _Boundary.apply(self._below, origin, self, order.call, number, *hidden)
            for index, value in zip(through, of_graph, strict=True):
                values[index] = value
        return values

    def _joined(self, ends: Sequence[Carry]) -> Carry:
        """Join what follows the last layer, of all micro-batches, along the dimension of the samples.

        Values without such a dimension (a position bias) are those of the first micro-batch. Which dimension it is
        shows where micro-batches have different sizes: the first ones that are run have.
        """
        if len(ends) == 1:
            return ends[0]
        stack, joined = self._stage.stack, {}
        if stack.row_dimensions is None:
            stack.row_dimensions = {
                of: tuple(_row_dimension(values) for values in zip(*(end[of] for end in ends), strict=True))
                for of in ends[0]
            }
        for of, dimensions in stack.row_dimensions.items():
            values = zip(*(end[of] for end in ends), strict=True)
            joined[of] = tuple(
                parts[0] if dimension is None else torch.cat(parts, dimension)
                for parts, dimension in zip(values, dimensions, strict=True)
            )
        return joined

    def _spans(self, inputs: Batch) -> tuple[tuple[int, int], ...]:
        """Rows of each micro-batch of a call; empty if it is not split."""
        stack = self._stage.stack
        rows = batch_rows(inputs, default=1)
        count = min(self._most_parts, rows)
        if count < 2 or why_whole(stack):
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

    def _keys_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        """The cache keys of a call of the model on the batch's own inputs; those of other inputs are not known."""
        if KEYS_NAME not in self._batch:
            return {}
        called = named_inputs(self._model, args, kwargs)
        return {KEYS_NAME: self._batch[KEYS_NAME]} if self._keyed.are(called, self._unread) else {}

    def _changed_modes(self) -> _Modes | None:
        modes = _Modes.of(self._model)
        if modes == self._modes:
            return None
        self._modes = modes
        return modes

    def _by_name(self, tensor: torch.Tensor) -> Any:
        """The batch's own tensor by its index, if it is unchanged; every other one as it is."""
        index, version = self._own.get(id(tensor), (None, None))
        return _Own(index) if index is not None and version_of(tensor) == version else tensor

    def _order(self, order: Any, tensors: Any = ()) -> None:
        released, self._released = self._released, []
        self._pending += self._messages.send_tree((order, released, tensors), self._index - 1)

    def send_backward(self, order: _Backward, gradients: Sequence[torch.Tensor]) -> None:
        """Called by autograd: order the backward of a micro-batch."""
        PROGRESS.tick()
        self._gone_down.setdefault(order.call, []).append(order.part)
        self._order(order, list(gradients))

    def modes_of_backward(self) -> _Modes | None:
        """Called by autograd: modes other than the last forward's; not all stages below may get this order."""
        modes = _Modes.of(self._model)
        return None if modes == self._modes else modes

    def gradients_of_inputs(self, call: int, count: int) -> list[list[torch.Tensor] | None]:
        """Called by autograd: receive the gradients of a call's inputs, by micro-batch, for those that went down."""
        received: list[list[torch.Tensor] | None] = [None] * count
        for part in self._gone_down.pop(call, []):
            received[part] = self._messages.receive_tree(0)
        return received

    def release(self, call: int, part: int) -> None:
        """Called when the graph of a micro-batch is freed here."""
        self._released.append((call, part))

    # ------------------------------------------------------------------------------------ the stages below
    def serve(self, batch: Batch) -> None:
        """Do what the last stage orders, until the user's code there has returned.

        Args:
            batch: the batch that all stages have.
        """
        tensors = tensors_of(batch)
        while True:
            order, released, given = self._messages.receive_tree(self._index + 1)
            PROGRESS.tick()
            for key in released:
                self._held.pop(key, None)
            if not isinstance(order, _Backward) and self._index > 0:
                self._pending += self._messages.send_tree((order, released, given), self._index - 1)
            if isinstance(order, _End):
                break
            if isinstance(order, _Forward):
                inputs = recursively_apply(
                    lambda own: tensors[own.index], given, test_type=lambda value: isinstance(value, _Own)
                )
                self._forward(order, inputs)
            else:
                self._backward(order, given)
        wait_for(self._pending)
        self._pending = []
        self._held.clear()

    def _forward(self, order: _Forward, inputs: Batch) -> None:
        if order.modes is not None:
            order.modes.set(self._model)
        module = self._served[order.module]
        is_first = self._index == 0

        for number, part in enumerate(_parts(inputs, order.spans, self._copies)):
            held = _Held([])
            values: list[torch.Tensor] = []
            if not is_first:
                values = self._messages.receive_values(
                    self._index, self._stage.slots_in, with_gradients=order.has_gradients
                )
                held.received = [value for value in values if value.requires_grad]
            else:
                for name in order.wanted:
                    part[name] = part[name].detach().requires_grad_()
                    held.wanted.append(part[name])
            # views, as in `StageModule`: autocast must not take them for weights
            values = [value.view_as(value) if value.requires_grad else value for value in values]
            with self._running(order, number, module.forward), statistics_set_aside(self._stage.counted_elsewhere):
                outputs = self._stage.carry_on(values, part)
            slots = self._stage.slots_out
            outputs = tuple(
                out if slot.is_used and slot.needs_gradient else out.detach()
                for slot, out in zip(slots, outputs, strict=True)
            )
            held.sent = [out for out in outputs if out.requires_grad]
            if held.sent:
                self._held[order.call, number] = held
            self._pending += self._messages.send_values(Crossing(self._index, slots, outputs))

    def _backward(self, order: _Backward, gradients: Sequence[torch.Tensor]) -> None:
        held = self._held[order.call, order.part]
        for leaf in (*held.received, *held.wanted):
            leaf.grad = None
        of_forward = _Modes.of(self._model)
        if order.modes is not None:
            order.modes.set(self._model)
        if order.only_inputs:
            leaves = [*held.received, *held.wanted]
            found = torch.autograd.grad(
                held.sent, leaves, gradients, retain_graph=order.keeps_graph, allow_unused=True
            )
            for leaf, gradient in zip(leaves, found, strict=True):
                leaf.grad = gradient
        else:
            torch.autograd.backward(held.sent, gradients, retain_graph=order.keeps_graph)
        of_forward.set(self._model)
        down = [torch.zeros_like(x) if x.grad is None else x.grad for x in held.received]
        up = [torch.zeros_like(x) if x.grad is None else x.grad for x in held.wanted]
        if not order.keeps_graph:
            del self._held[order.call, order.part]
        if down:
            self._pending += self._messages.send_tree((order, [], down), self._index - 1)
        if up:
            self._pending += self._messages.send_tree(up, self._messages.last)

    # ------------------------------------------------------------------------------------ both
    @contextmanager
    def _running(self, order: _Forward, part: int, forward: Callable[..., Any]) -> Iterator[None]:
        """Inside, the runner runs a micro-batch of a call as the call was made."""
        PROGRESS.tick()
        enabled, dtype = order.autocast
        seed = None if order.seed is None else order.seed + part + SEEDS_APART * self._index
        with (
            torch.set_grad_enabled(order.has_gradients),
            torch.autocast(self._stage.device.type, dtype, enabled=enabled),
            seeded(seed) if seed is not None else nullcontext(),
            self._runner.calling_with(CalledWith()),
            self._runner.calling_through(_with_positional(forward)),
        ):
            yield


class _Boundary(torch.autograd.Function):
    """A micro-batch's values from below. Their gradients go down as soon as autograd has them.

    `below` stands for the parameters below: autograd reaches it in `backward()`, and not in `grad(_, inputs)`.
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
        modes = token.served.modes_of_backward()
        token.served.send_backward(_Backward(token.call, token.part, not reaches_parameters, keeps, modes), gradients)
        origin = gradients[0].new_zeros(()) if ctx.needs_input_grad[1] else None
        return None, origin, None, None, None, *[None] * len(gradients)


@dataclass(eq=False)
class _Token:
    """Lives as long as the node of a micro-batch, i.e. as long as a backward can come."""

    served: ServedCalls
    call: int
    part: int

    def __del__(self) -> None:
        self.served.release(self.call, self.part)


class _Inputs(torch.autograd.Function):
    """Inputs of a call that require a gradient; it comes back from the first stage, when all parts have gone down."""

    @staticmethod
    def forward(
        ctx: Any,
        served: ServedCalls,
        call: int,
        names: tuple[str, ...],
        spans: tuple[tuple[int, int], ...],
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        ctx.served, ctx.call, ctx.spans = served, call, spans
        ctx.shapes = [(value.shape, value.dtype, value.device) for value in inputs]
        return torch.zeros((), device=inputs[0].device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        received = ctx.served.gradients_of_inputs(ctx.call, max(len(ctx.spans), 1))
        gradients = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes]
        for index, of_part in enumerate(received):
            for whole, gradient in zip(gradients, of_part or (), strict=False):
                start, stop = ctx.spans[index] if ctx.spans else (0, len(whole))
                if gradient.shape == whole.shape:  # not split by samples
                    whole += gradient
                else:
                    whole[start:stop] = gradient
        return None, None, None, None, *gradients


# ---------------------------------------------------------------------------------------------------------
def _modules_around_all(model: nn.Module, layers: Sequence[nn.Module]) -> dict[str, nn.Module]:
    """The modules that contain all layers and can be called, by name: what a user's loss may call."""
    inside = set(layers)
    return {
        name: module
        for name, module in model.named_modules()
        if module not in inside and has_own_forward(module) and inside.issubset(module.modules())
    }


def _parts(inputs: Batch, spans: Sequence[tuple[int, int]], copies: bool) -> list[Batch]:
    """The inputs of each micro-batch; copies, if the model may write into them."""
    parts = [slice_rows(inputs, start, stop) for start, stop in spans] or [dict(inputs)]
    return [recursively_apply(lambda tensor: tensor.clone(), part) for part in parts] if copies else parts


def _row_dimension(values: Sequence[torch.Tensor]) -> int | None:
    """The dimension along which the values of micro-batches of different sizes differ; None if none does."""
    different = [
        dimension
        for dimension, sizes in enumerate(zip(*(value.shape for value in values), strict=True))
        if len(set(sizes)) > 1
    ]
    return different[0] if different else None


def _hiding_the_first(output: Any) -> Any:
    """Hide the first of all hidden states as well, if a model returns them: it is not the output of a layer."""
    for name, states in list(output.items()) if isinstance(output, Mapping) else []:
        if name.endswith("hidden_states") and isinstance(states, tuple) and len(states) > 1:
            first = states[0]
            if isinstance(first, torch.Tensor) and not isinstance(first, Hidden):
                output[name] = (hidden_like(first, HIDDEN.format("the embeddings"), HIDDEN_REMEDY), *states[1:])
    return output


def _autocast_state(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _with_positional(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Call `forward` on the inputs of an order, some of which were passed by position."""

    def call(**inputs: Any) -> Any:
        args: list[Any] = []
        while (name := POSITIONAL.format(len(args))) in inputs:
            args.append(inputs.pop(name))
        return forward(*args, **inputs)

    return call
