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

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate.utils import recursively_apply
from torch import nn

from ..cache.content_keys import KEYS_NAME, KeyedInputs, named_inputs, version_of
from ..errors import UnsupportedModelError
from ..model.batch_statistics import statistics_set_aside
from ..model.dropout import may_drop
from ..model.elsewhere import Hidden, hidden_like
from ..model.layer_range import HIDDEN, HIDDEN_REMEDY, CalledWith, Carry, has_own_forward
from ..model.layer_stack import why_whole
from ..model.method_override import MethodOverride
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
class Modes:
    """What the user's code may have changed in the model's modules, in the order of `model.modules()`.

    Attributes:
        training: the modes.
        adapters: whether PEFT's layers are disabled, and which of their adapters are active.
    """

    training: tuple[bool, ...]
    adapters: tuple[tuple[bool, Any], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Modes:
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
        wanted: which of the inputs' tensors, by their order, the user's code may ask a gradient of.
        seed: seed of the random numbers in the layers; None if they draw none.
        autocast: whether autocast is on, and its dtype.
        modes: of the model's modules, if they have changed since the last order.
    """

    call: int
    module: str
    spans: tuple[tuple[int, int], ...]
    has_gradients: bool
    wanted: tuple[int, ...]
    seed: int | None
    autocast: tuple[bool, torch.dtype]
    modes: Modes | None


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
    modes: Modes | None


@dataclass(frozen=True)
class _Ask:
    """Send the gradients of the inputs of a call."""

    call: int


@dataclass(frozen=True)
class _End:
    """The user's code has returned."""


@dataclass
class _Held:
    """The graph of a micro-batch on a stage below: what it received, and what it has sent."""

    received: list[torch.Tensor]
    sent: Sequence[torch.Tensor] = ()


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
        self.modules = _modules_around_all(self._model, [unit.module for unit in stage.stack.units])
        """The modules whose calls are served, by name."""
        self.is_driving = False
        """Whether the user's code runs here, and its calls are served."""
        self._copies = any(map(is_users, self.modules.values()))
        self._pending: Pending = []
        # on the last stage
        self._batch: Batch = {}
        self._keyed = KeyedInputs({})
        self._unread: Collection[str] = ()
        self._own: dict[int, tuple[int, int]] = {}  # by id of a tensor of the batch: its index and version
        self._modes: Modes | None = None  # what the stages below know
        self._drops = self._runs_whole = False  # in these modes: whether dropout is active, and calls are not divided
        self._finds_rows = True  # whether calls are cut unevenly; in all of a batch alike, as one may be made again
        self._number = 0
        self._released: list[tuple[int, int]] = []  # micro-batches whose graph is gone
        self._has_failed = False  # a call has, and others would receive what belongs to it
        self._first_call = 0  # of this batch
        self._below = torch.zeros((), requires_grad=True, device=stage.device)  # the parameters below, for autograd
        # on the stages below
        self._held: dict[tuple[int, int], _Held] = {}
        self._leaves: dict[int, list[torch.Tensor]] = {}  # by call: inputs whose gradients may be asked for

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
        self._has_failed, self._first_call = False, self._number + 1
        self._keyed, self._unread = KeyedInputs(batch), unread
        with self._overriding():
            result = code()
        self._order(_End())
        wait_for(self._pending)
        self._pending, self._batch, self._own = [], {}, {}
        self._first_call = self._number + 1  # the stages below have no graphs any more
        return result

    @contextmanager
    def _overriding(self) -> Iterator[None]:
        """Inside, calls of the model, and of modules in it that contain all its layers, are served."""

        def serving(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._call(name, forward, args, kwargs)

        with ExitStack() as undone:
            undone.callback(setattr, self._runner, "is_served", self._runner.is_served)
            undone.callback(setattr, self, "is_driving", False)
            self._runner.is_served = self.is_driving = True
            for name, module in self.modules.items():
                override = MethodOverride(module, "forward", serving(name, module.forward))
                undone.callback(override.remove)
            yield

    def _call(self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._runner.is_running:  # inside of a call that is being served
            return forward(*args, **kwargs)
        if self._has_failed:
            raise ValueError(
                "A call of the model has failed in this step, so the pipeline's stages cannot serve another one. Let"
                " the error end the step, or set pipeline_parallel_size=1."
            )
        self._has_failed = True
        output = self._serve_call(name, forward, args, kwargs)
        self._has_failed = False
        return output

    def _serve_call(
        self, name: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        inputs = {**{POSITIONAL.format(i): value for i, value in enumerate(args)}, **kwargs}
        self._number += 1
        has_gradients = torch.is_grad_enabled()
        wanted = {i: v for i, v in enumerate(tensors_of(inputs)) if has_gradients and v.requires_grad}
        keys = {} if name else self._keys_of(args, kwargs)
        modes = self._changed_modes()
        if modes is not None:
            self._drops, self._runs_whole = may_drop(self._model), bool(why_whole(self._stage.stack))
        order = _Forward(
            self._number,
            name,
            self._spans(inputs),
            has_gradients,
            tuple(wanted),
            int(torch.randint(2**62, ())) if self._drops else None,
            _autocast_state(self._stage.device.type),
            modes,
        )
        self._order(order, recursively_apply(self._by_name, {**inputs, **keys}))
        origin = torch.zeros((), device=self._stage.device)
        if wanted:
            origin = _Inputs.apply(self, order.call, *wanted.values())
        if not order.spans:  # one forward, as in one process: the model may count them
            values = self._receive(order, 0, origin)
            with (
                self._running(order, 0, forward),
                self._stage.running_to_the_end(values, {**inputs, **keys}),
            ):
                self._runner.begin_call()
                self._tell_cache(args, dict(kwargs))
                return _hiding_the_first(forward(*args, **kwargs))
        ends = [
            self._run_part(order, forward, part, number, origin)
            for number, part in enumerate(_parts({**inputs, **keys}, order.spans, self._copies))
        ]
        stack = self._stage.stack
        with (
            self._runner.calling_with(CalledWith()),
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
            self._refuse_unlike(ends, stack.row_dimensions)
        for of, dimensions in stack.row_dimensions.items():
            values = zip(*(end[of] for end in ends), strict=True)
            joined[of] = tuple(
                parts[0] if dimension is None else torch.cat(parts, dimension)
                for parts, dimension in zip(values, dimensions, strict=True)
            )
        return joined

    def _refuse_unlike(self, ends: Sequence[Carry], dimensions: Mapping[int, Sequence[int | None]]) -> None:
        """Refuse values without a dimension of the samples that are not the same in all micro-batches."""
        for of, of_stack in dimensions.items():
            for index, dimension in enumerate(of_stack):
                first = ends[0][of][index]
                if dimension is None and not all(torch.equal(first, end[of][index]) for end in ends[1:]):
                    raise UnsupportedModelError(
                        self._model,
                        f"its layers return a value of shape {tuple(first.shape)} that has no entry for each sample"
                        " and differs between micro-batches (a sum over them, perhaps).",
                        "Set num_microbatches=1, or pipeline_parallel_size=1.",
                    )

    def _spans(self, inputs: Batch) -> tuple[tuple[int, int], ...]:
        """Rows of each micro-batch of a call; empty if it is not split."""
        rows = batch_rows(inputs, default=1)
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

    def _keys_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        """The cache keys of a call of the model on the batch's own inputs; those of other inputs are not known."""
        cache = self._stage.cache
        called = named_inputs(self._model, args, kwargs)
        if KEYS_NAME not in self._batch or cache is None or cache.is_called_otherwise(called):
            return {}
        return {KEYS_NAME: self._batch[KEYS_NAME]} if self._keyed.are(called, self._unread) else {}

    def _changed_modes(self) -> Modes | None:
        modes = Modes.of(self._model)
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
        self._forget_what_has_arrived()
        self._pending += self._messages.send_tree((order, released, tensors), self._index - 1)

    def _forget_what_has_arrived(self) -> None:
        """A gradient cache makes hundreds of calls: what they have sent must not stay until the step is over."""
        self._pending = [(work, kept) for work, kept in self._pending if not work.is_completed()]

    def send_backward(self, order: _Backward, gradients: Sequence[torch.Tensor]) -> None:
        """Called by autograd: order the backward of a micro-batch."""
        PROGRESS.tick()
        if order.call < self._first_call:
            raise ValueError(
                "backward() reaches a call of the model in an earlier step or in a callback, whose graph the other"
                " pipeline stages no longer have. Detach what is kept from step to step, or set"
                " pipeline_parallel_size=1."
            )
        self._order(order, list(gradients))

    def modes_of_backward(self) -> Modes | None:
        """Called by autograd: modes other than the last forward's; not all stages below may get this order."""
        modes = Modes.of(self._model)
        return None if modes == self._modes else modes

    def gradients_of_inputs(self, call: int) -> list[torch.Tensor]:
        """Called by autograd: the gradients of a call's inputs, summed over the stages below."""
        self._order(_Ask(call))
        found: list[torch.Tensor] = self._messages.receive_tree(0)
        for stage in range(1, self._index):
            found = [one + other for one, other in zip(found, self._messages.receive_tree(stage), strict=True)]
        return found

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
        modes = Modes.of(self._model)  # what the user's code changes ends with it here
        while True:
            order, released, given = self._messages.receive_tree(self._index + 1)
            PROGRESS.tick()
            for key in released:
                self._held.pop(key, None)
            if not isinstance(order, _Backward) and self._index > 0:
                self._pending += self._messages.send_tree((order, released, given), self._index - 1)
            if isinstance(order, _End):
                break
            self._forget_what_has_arrived()
            if isinstance(order, _Ask):
                self._answer(order)
            elif isinstance(order, _Forward):
                inputs = recursively_apply(
                    lambda own: tensors[own.index], given, test_type=lambda value: isinstance(value, _Own)
                )
                self._forward(order, inputs)
            else:
                self._backward(order, given)
        wait_for(self._pending)
        self._pending = []
        self._held.clear()
        self._leaves.clear()
        modes.set(self._model)

    def _answer(self, order: _Ask) -> None:
        """Send the gradients that the inputs of a call have got here."""
        leaves = self._leaves[order.call]
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        self._pending += self._messages.send_tree(gradients, self._messages.last)

    def _forward(self, order: _Forward, inputs: Batch) -> None:
        if order.modes is not None:
            order.modes.set(self._model)
        module = self.modules[order.module]
        if order.wanted:
            position = itertools.count()
            leaves: list[torch.Tensor] = []

            def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
                if next(position) not in order.wanted:
                    return tensor
                leaves.append(tensor.detach().requires_grad_())
                return leaves[-1]

            inputs = recursively_apply(leaf_of, inputs)
            self._leaves[order.call] = leaves
        for number, part in enumerate(_parts(inputs, order.spans, self._copies)):
            held = _Held([])
            values: list[torch.Tensor] = []
            if self._index > 0:
                values = self._messages.receive_values(
                    self._index, self._stage.slots_in, with_gradients=order.has_gradients
                )
                held.received = [value for value in values if value.requires_grad]
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
        for leaf in held.received:
            leaf.grad = None
        of_forward = Modes.of(self._model)
        if order.modes is not None:
            order.modes.set(self._model)
        if order.only_inputs:
            leaves = [*held.received, *self._leaves.get(order.call, ())]
            found = torch.autograd.grad(
                held.sent, leaves, gradients, retain_graph=order.keeps_graph, allow_unused=True
            )
            for leaf, gradient in zip(leaves, found, strict=True):
                if gradient is not None:
                    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        else:
            torch.autograd.backward(held.sent, gradients, retain_graph=order.keeps_graph)
        of_forward.set(self._model)
        down = [torch.zeros_like(x) if x.grad is None else x.grad for x in held.received]
        if not order.keeps_graph:
            del self._held[order.call, order.part]
        if down:
            self._pending += self._messages.send_tree((order, [], down), self._index - 1)

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
            self._runner.calling_through(self._with_positional(forward)),
        ):
            yield

    def _with_positional(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Call `forward` on the inputs of an order, some of which were passed by position."""

        def call(**inputs: Any) -> Any:
            args: list[Any] = []
            while (name := POSITIONAL.format(len(args))) in inputs:
                args.append(inputs.pop(name))
            self._tell_cache(tuple(args), inputs)
            return forward(*args, **inputs)

        return call

    def _tell_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stage.cache is not None:
            self._stage.cache.begin_call(args, kwargs)


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
    """Inputs of a call that require a gradient; it comes back from the stages below, when all parts have gone down."""

    @staticmethod
    def forward(ctx: Any, served: ServedCalls, call: int, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.served, ctx.call = served, call
        return torch.zeros((), device=inputs[0].device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return None, None, *ctx.served.gradients_of_inputs(ctx.call)


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
