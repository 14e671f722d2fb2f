"""Runs only the layers [start, stop) of a model, through the model's own forward.

There is no forward per model family and no tracing. The model's own Python code runs, but the layers before `start`
return a value that was computed elsewhere, and the forward is left after layer `stop - 1`.

    model(**batch)      embeddings   layer 0   layer 1   layer 2   layer 3   head
    run(1, 3, carry)    computed     skipped   COMPUTED  COMPUTED  -         -
                                     └ returns `carry`          └ forward is left here, its output is returned

If several layers are skipped, the last one of each stack returns `carry`, and the others return values that cannot be
read (`elsewhere`). So with any model code, a range depends only on its carry and the batch.

Every range recomputes the part before the layers (embeddings, masks, rotary tables, position bias) from the batch's
own inputs, so only the layers' outputs have to be sent between devices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from .elsewhere import computing_with_nan, hidden_like
from .frozen_units import FrozenUnits, modules_around
from .method_override import HookOfOriginal, MethodOverride, having, original_method
from .nested import in_new_containers, tensors_of
from .refusals import (
    ended_early,
    generating_with_some_layers,
    missing_layers,
    other_number_of_calls,
    other_order,
    other_plain_values,
    refuse_split_checkpoint,
)
from .taps import Taps
from .units import CalledWith, Carry, ModelLayers, Observer, OutputStructure, TracedLayers, Unit, plain_values

GENERATE = "generate"
"""Method of transformers' models that calls the model once for each token."""

HIDDEN = "the output of {} is not kept: of the layers' outputs, a pipeline has the last one only"
HIDDEN_REMEDY = "Compute the loss from the model's final outputs, or set pipeline_parallel_size=1."


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module can be called; lists of modules cannot."""
    return type(module).forward is not nn.Module.forward


class _RangeDone(BaseException):
    """Raised to leave the model's forward after the last unit of a range.

    It is not an `Exception`, because an `except Exception` in a model's code must not catch it.
    """


@dataclass
class _Pass:
    """One forward of the model that computes only the units [start, stop)."""

    start: int
    stop: int | None  # None: through the head
    carry: Carry
    outputs: dict[int, Any] = field(default_factory=dict)  # stack -> output of its last unit that computed
    calls: list[Unit] | None = None  # filled by `trace`
    structures: list[OutputStructure] = field(default_factory=list)  # of each unit's output, filled by `trace`
    observer: Observer | None = None  # called for each unit that is computed
    may_repeat: bool = False  # the model may be called several times, each time through all units


class LayerRangeRunner:
    """Overrides `forward` on the instances of the layer modules, to run ranges of them.

    Classes, names, attributes and gradient checkpointing do not change; `remove()` restores the layers.

    Args:
        model: the complete model.
        layers: its modules that are run as layers.
        called: how the loss calls the model. Stages below the loss call it in the same way.
    """

    def __init__(self, model: nn.Module, layers: ModelLayers, called: CalledWith | None = None) -> None:
        self.model = model
        self.called = called or CalledWith()
        self._found = layers
        self._taps = Taps(model, layers)
        self.units: tuple[Unit, ...] = ()
        self._structures: tuple[OutputStructure, ...] = ()  # of each unit's output
        self._pass: _Pass | None = None
        self._computable: tuple[int, ...] | None = None  # None: the weights of all units are here
        self._call: Callable[..., Any] | None = None  # None: the model
        self._on_entry: Callable[[], None] | None = None
        self._frozen = FrozenUnits(model)
        self._is_in_training_before_units = False
        self.is_served = False
        """Whether calls of the model outside of a pass are served (`pipeline.served_calls`)."""
        modules: dict[nn.Module, tuple[int, str]] = {}  # a module that occurs several times in a list is one layer
        for stack, names in enumerate(layers.stacks):
            for name in names:
                modules.setdefault(model.get_submodule(name), (stack, name))
        self._layers = [(stack, name, module) for module, (stack, name) in modules.items()]
        self._replaced: list[MethodOverride] = []
        self._refusing: list[MethodOverride] = []  # in place of `generate`, while this process has some units only
        self._hook: RemovableHandle | None = None

    @classmethod
    def of(cls, model: nn.Module, traced: TracedLayers) -> LayerRangeRunner:
        """The runner of a model that another process has traced (`describe`)."""
        runner = cls(model, traced.layers, traced.called)
        runner.units = tuple(Unit(name, model.get_submodule(name), stack) for name, stack in traced.calls)
        runner._structures = traced.structures
        return runner

    def describe(self) -> TracedLayers:
        """The description of the model after `trace`."""
        calls = tuple((unit.name, unit.stack) for unit in self.units)
        return TracedLayers(self._found, self.called, calls, self._structures)

    @property
    def takes_batch(self) -> bool:
        """Whether the loss calls the model on inputs of the batch."""
        return self.called.takes_batch

    # ------------------------------------------------------------------------------------ life cycle
    @property
    def installed(self) -> bool:
        return bool(self._replaced)

    def install(self) -> None:
        if self.installed:
            return
        for stack, name, module in self._layers:
            forward = self._ranged_forward(Unit(name, module, stack), original_method(module))
            self._replaced.append(MethodOverride(module, "forward", forward))
        self._replaced += self._taps.overrides(lambda: self._pass is not None)
        self._hook = self.model.register_forward_pre_hook(
            HookOfOriginal(lambda module, _: self.begin_call() if module is self.model else None)
        )

    def remove(self) -> None:
        """Restore the layers' own `forward`."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for override in self._replaced:
            override.remove()
        self._replaced.clear()

    def restrict_to(self, computable: Sequence[int] | None) -> None:
        """Set the units with weights on this process; None means all units.

        After this, calls of the model outside of this range raise an error, because their weights are not on this
        process. `generate` raises it as well, because it calls the model many times.
        """
        self._computable = None if computable is None else tuple(computable)
        for override in self._refusing:
            override.remove()
        self._refusing = []
        if computable is not None:
            # PEFT's models, and the models inside them, have it as well
            generating = [module for module in self.model.modules() if hasattr(type(module), GENERATE)]
            self._refusing = [MethodOverride(module, GENERATE, self._refuse_to_generate) for module in generating]

    @property
    def is_restricted(self) -> bool:
        """Whether this process may have the weights of some units only."""
        return self._computable is not None

    @property
    def num_frozen(self) -> int:
        return self._frozen.num_frozen

    def freeze(self, num_frozen: int, stays_in_eval: Collection[nn.Module] = ()) -> None:
        """Run the first units, and the part before them, without a graph and in eval mode (`FrozenUnits`) from now on.

        Args:
            num_frozen: number of units, counted from the bottom.
            stays_in_eval: as in `FrozenUnits.freeze`.
        """
        self._frozen.freeze(num_frozen, {unit.module for unit in self.units[num_frozen:]}, stays_in_eval)

    def keep_modes_of_frozen(self, keeps: bool) -> None:
        """Run frozen units in their own modes from now on, or else in eval mode."""
        self._frozen.keeps_modes = keeps

    def begin_plain_call(self) -> None:
        """Announce a call of the whole model outside of any pass. In training mode, frozen units run as in a pass.

        An installed runner calls this method itself.
        """
        if self.model.training:
            self._frozen.begin()
        else:
            self._frozen.forget()

    def calling_with(self, called: CalledWith) -> AbstractContextManager[None]:
        """Inside, keep back the inputs that `called` names: a prediction may keep back others than the loss."""
        return having(self, called=replace(self.called, kept_back=called.kept_back))

    def training_before_units(self) -> AbstractContextManager[None]:
        """Inside, passes of a model in eval mode begin as in a training with frozen units."""
        return having(self, _is_in_training_before_units=True)

    def calling_through(self, call: Callable[..., Any]) -> AbstractContextManager[None]:
        """Inside, `run` calls this function in place of the model: its forward, or a part's forward with all layers.

        The model's hooks are not called then, because the caller's own call of the model has called them.
        """
        return having(self, _call=call)

    def telling_entries(self, on_entry: Callable[[], None]) -> AbstractContextManager[None]:
        """Inside, `on_entry` is called before each unit that is computed in a pass."""
        return having(self, _on_entry=on_entry)

    # ------------------------------------------------------------------------------------ running
    def trace(self, batch: dict[str, Any], observer: Observer | None = None) -> Any:
        """Run the whole model once, record its units in the order of their calls, and return its output.

        Args:
            batch: the model's keyword arguments.
            observer: called with each unit and its output.
        """
        current = _Pass(start=0, stop=None, carry={}, calls=[], observer=observer)
        with self._running(current):
            output = self.model(**self.arguments(batch))
        self.units = tuple(current.calls or ())
        self._structures = tuple(current.structures)
        return output

    def floating_outputs(self, stack: int) -> tuple[bool, ...]:
        """For each tensor in an output of this stack, whether it is floating point (and can have a gradient)."""
        return self._structure_of_last(stack).is_floating

    def _structure_of_last(self, stack: int) -> OutputStructure:
        last = max(index for index, unit in enumerate(self.units) if unit.stack == stack)
        return self._structures[last]

    def run(
        self, start: int, stop: int, carry: Carry | None, batch: dict[str, Any], observer: Observer | None = None
    ) -> Carry:
        """Run units [start, stop) without the head.

        Args:
            start: first unit that is computed.
            stop: first unit that is no longer computed.
            carry: the outputs of the units before `start` (none for `start` = 0).
            batch: the model's keyword arguments.
            observer: called with each unit that is computed and its output.

        Returns:
            The outputs after unit `stop - 1`, for every stack that has run so far.
        """
        assert 0 <= start < stop <= len(self.units)
        current = _Pass(start, stop, carry or {}, observer=observer)
        with self._running(current):
            try:
                if self._call is None:
                    self.model(**self.arguments(batch))
                else:
                    self.begin_call()
                    self._call(**batch)
            except _RangeDone:
                reached = {stack: tensors_of(output) for stack, output in current.outputs.items()}
                return {**current.carry, **reached}
            raise ended_early(self.model, self._frozen.position, len(self.units))

    @contextmanager
    def to_the_end(
        self, start: int, carry: Carry | None, observer: Observer | None = None, may_repeat: bool = False
    ) -> Iterator[None]:
        """Inside, one call `model(**batch)` runs units [start, end) and the head.

        So code that calls the model (a Trainer's `compute_loss`, `prediction_step`) runs the last stage unchanged.

        Args:
            start: first unit that is computed.
            carry: the outputs of the units before `start`.
            observer: called with each unit that is computed and its output.
            may_repeat: whether the model may be called several times or not at all. Further calls run all units,
                without calling the observer.
        """
        current = _Pass(start, None, carry or {}, observer=observer, may_repeat=may_repeat)
        with self._running(current):
            yield
            calls = self._frozen.position
            if calls != len(self.units) and not (may_repeat and not calls):
                raise other_number_of_calls(self.model, calls, len(self.units))

    def arguments(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of a batch that are passed to the model."""
        given = {
            # some models write their results into their input dict
            name: in_new_containers(value) if isinstance(value, Mapping) else value
            for name, value in batch.items()
            if name not in self.called.kept_back
        }
        return given if self.called.nested_in is None else {self.called.nested_in: given}

    def batch_of(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch for which `arguments` returns these inputs of a call of the model."""
        nested = inputs if self.called.nested_in is None else inputs.get(self.called.nested_in)
        return dict(nested) if isinstance(nested, Mapping) else {}

    @property
    def is_running(self) -> bool:
        """Whether a pass is in progress."""
        return self._pass is not None

    def begin_elsewhere(self, start: int, carry: Carry | None, observer: Observer | None) -> None:
        """Change the start and the observer of the current pass, which must not have reached a unit yet.

        Args:
            start: as in `to_the_end`; used only together with `carry`.
            carry: as in `to_the_end`; None keeps the start of the pass.
            observer: as in `to_the_end`.
        """
        assert self._pass is not None and not self._frozen.position, "no pass that begins"
        self._pass.observer = observer
        if carry is not None:
            self._pass.start, self._pass.carry = start, carry

    # ------------------------------------------------------------------------------------ inside
    @contextmanager
    def _running(self, current: _Pass) -> Iterator[None]:
        assert self.installed, "install() first"
        assert self._pass is None, "passes do not nest"
        self._frozen.end()  # a plain call ends only when the next one begins
        self._pass = current
        try:
            with computing_with_nan():
                yield
        finally:
            self._frozen.end()
            self._pass = None

    def begin_call(self) -> None:
        """Run when the model or a part of it is called, not earlier: its caller may read the model's mode first.

        Raises:
            ValueError: the whole model is called outside of a pass, and some of its layers are on other processes.
        """
        current = self._pass
        if current is None:
            if self._computable is not None and not self.is_served:
                raise self._missing_layers(next(u for i, u in enumerate(self.units) if i not in self._computable))
            if self._frozen.num_frozen and self._computable is None:
                self.begin_plain_call()  # e.g. in a backward, by losses that cache gradients
            return
        repeats = current.may_repeat and self._frozen.position == len(self.units)
        if repeats:
            current.start, current.carry, current.observer = 0, {}, None
        if self._frozen.is_called and not repeats:
            return
        imitates = self._is_in_training_before_units and not self.model.training
        self._frozen.begin(modules_around(self.model, {unit.module for unit in self.units}) if imitates else ())

    def _ranged_forward(self, unit: Unit, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            current = self._pass
            if current is None:
                return self._plain_forward(unit, original, *args, **kwargs)
            self.begin_call()  # needed if only a part of the model is called
            index = self._frozen.count()
            if current.calls is not None:
                current.calls.append(unit)
            else:
                self._check_order(index, unit)
            if index < current.start:
                return self._skipped(current, index, unit)
            if self._on_entry is not None:
                self._on_entry()
            output = self._frozen.run(index, original, *args, **kwargs)
            carried = self._taps.with_outputs(unit.name, output)
            current.outputs[unit.stack] = carried
            if current.calls is not None:
                current.structures.append(OutputStructure.of(carried))
            if current.observer is not None:
                current.observer(unit, carried)
            if index + 1 == current.stop:
                self._refuse_other_plain_values(current)
                raise _RangeDone
            return output

        return forward

    def _plain_forward(self, unit: Unit, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A unit's own forward outside of a pass: a plain call, or gradient checkpointing that recomputes a layer."""
        here = self._computable
        # layers that the model does not call are no units, such as those of a teacher that is a submodule of it
        if here is not None and any(u.name == unit.name for i, u in enumerate(self.units) if i not in here):
            refuse_split_checkpoint(self.model, unit)
            raise self._missing_layers(unit)
        if self._frozen.is_called and unit in self.units:
            return self._frozen.run(self._frozen.count(), original, *args, **kwargs)
        return original(*args, **kwargs)

    def _skipped(self, current: _Pass, index: int, unit: Unit) -> Any:
        """The output of a skipped unit: the carry for the last one of its stack, unreadable values for the others."""
        values = current.carry[unit.stack]
        self._frozen.skip(index)
        if any(later.stack == unit.stack for later in self.units[index + 1 : current.start]):
            values = tuple(hidden_like(value, HIDDEN.format(unit.name), HIDDEN_REMEDY) for value in values)
        elif self._found.copies_carry:
            values = tuple(value.clone() for value in values)
        return self._taps.hand_on(unit.name, self._structure(index, unit, len(values)).rebuild(values))

    def _structure(self, index: int, unit: Unit, num_tensors: int) -> OutputStructure:
        """Structure of a unit's own output. Donut's layers also return the size of their image, halved each time."""
        own = self._structures[index]
        return own if len(own.is_floating) == num_tensors else self._structure_of_last(unit.stack)

    def _check_order(self, index: int, unit: Unit) -> None:
        expected = self.units[index].name if index < len(self.units) else "the end of the forward"
        if expected != unit.name:
            raise other_order(self.model, index, unit, expected)

    def _refuse_other_plain_values(self, current: _Pass) -> None:
        """Refuse numbers in layers' outputs that later ranges would replace by those of the probed samples."""
        for stack, output in current.outputs.items():
            index = max(i for i, unit in enumerate(self.units[: current.stop]) if unit.stack == stack)
            probed = self._structure(index, self.units[index], len(tensors_of(output))).plain
            if probed and plain_values(output) != probed:
                raise other_plain_values(self.model, self.units[index], plain_values(output), probed)

    def _refuse_to_generate(self, *_: Any, **__: Any) -> Any:
        assert self._computable is not None
        raise generating_with_some_layers(self.model, self._computable, len(self.units))

    def _missing_layers(self, unit: Unit) -> ValueError:
        assert self._computable is not None
        return missing_layers(self.model, self._computable, len(self.units), unit)
