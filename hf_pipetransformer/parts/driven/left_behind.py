"""The state of other stages' modules for the loss: values that their layers write, and changes by the loss.

One process would have one set of modules. Here each stage runs its own modules, and the last one also runs the loss:

    loss sets a setting          sent with the next order to all stages, and with the last order of the step
    loss writes a weight         the same, if other stages hold the weight, too (tied embeddings)
    loss changes another value   refused by name: code, hooks and parts of modules cannot be sent
    layers below write a tensor  reported with their outputs; reading it in the loss is an error
    layers below write a number  the same, unless they ran on the whole batch: then the number is sent
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn

from ...model.elsewhere import Unreadable, hidden_like
from ...model.layer_stack import LayerStack
from ...pipeline.stage import StageModule
from ..prefix_cache.cache.settings import names_read_by
from .module_state import (
    ABSENT,
    BUFFERS,
    FLAG,
    HOOKS,
    PARAMETERS,
    PARTS,
    REBUILT,
    TABLES,
    Change,
    Changes,
    ModuleState,
    Place,
    as_sent,
    can_be_sent,
    is_plain,
    own_forward,
    put,
    put_all,
    value_at,
)
from .shared_weights import SharedWeights

logger = logging.getLogger(__name__)

BELOW = "{} is written by layers of another pipeline stage, and its value is not on this process"
IN_PART = "{} is written by layers that have run on micro-batches, and its value is that of the last one"
REMEDY = (
    "Let the layers return what the loss needs, so that it reaches the model's output, or set"
    " pipeline_parallel_size=1."
)
REMEDY_IN_PART = "Set num_microbatches=1, or pipeline_parallel_size=1."
IN_ONE_PIECE = (
    "%s has been set since the training began, and code of yours in the model reads it. With this value, samples may"
    " depend on one another: the model runs on the whole batch from now on, and stages wait for one another. If they"
    " never do, pass the value to the model as an argument."
)

_in_one_piece = WeakSet[nn.Module]()
"""Models whose calls are not split any more, because a value that users' code reads was set."""


@dataclass(frozen=True)
class _Shape:
    """Stands for a tensor on a stage below."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Other:
    """Stands for a value of another kind on a stage below."""


Note = dict[Place, Any]
"""Place -> value written by layers. `_Shape` and `_Other` stand for values that are not sent."""


class _Groups:
    """The modules of a model by number, grouped by the stages that run them.

    Args:
        stack: the model's units.
        start: the first unit of the last stage.
    """

    def __init__(self, stack: LayerStack, start: int) -> None:
        self.modules = list(stack.model.modules())
        self.names = [name for name, _ in stack.model.named_modules()]
        numbers = {module: number for number, module in enumerate(self.modules)}
        self.of_units = [{numbers[m] for m in unit.module.modules()} for unit in stack.units]
        """Modules of each unit."""
        self.below = set().union(*self.of_units[:start])
        """Modules in units of earlier stages."""
        self.layers = set().union(*self.of_units[start:]) - self.below
        """Modules in units of the last stage only."""
        self.outside = set(numbers.values()) - self.below - self.layers
        """Modules outside of units."""
        theirs = stack.owned(0, start)
        name_of = {id(stack.table[name]): name for name in stack.table.names}
        head = set()
        for number in self.outside:
            names = {name_of[id(p)] for p in self.modules[number].parameters() if id(p) in name_of}
            if names and names.isdisjoint(theirs):
                head |= {numbers[module] for module in self.modules[number].modules()}
        self.own = self.layers | (head & self.outside)
        """Modules that only the last stage runs."""

    def chosen(self, numbers: Iterable[int]) -> dict[int, nn.Module]:
        return {number: self.modules[number] for number in sorted(numbers)}

    def name(self, place: Place) -> str:
        number, path = place
        shown = [name for name in path if name not in TABLES]
        return ".".join(filter(None, (self.names[number], *map(str, shown))))


class StateBelow:
    """The state of a stage below the last one. It reports values that its layers write.

    Args:
        stage: the stage.
    """

    def __init__(self, stage: StageModule) -> None:
        groups = _Groups(stage.stack, stage.start)
        self._modules = groups.modules
        watched = groups.outside.union(*groups.of_units[stage.start : stage.stop])
        self._state = ModuleState(groups.chosen(watched))
        self._reported: Note = {}
        self._unsent: Note = {}  # values from failed calls

    def begin(self) -> None:
        """Begin a batch."""
        self._state.note()

    def put(self, changes: Changes) -> Callable[[], None]:
        """Apply the changes of the loss. Returns a function that undoes them."""
        if not changes:
            return lambda: None
        undo = put_all(self._modules, changes)
        for (path, _), (numbers, _) in changes.items():
            for number in numbers:
                self._reported.pop((number, path), None)
        self._state.note()
        return undo

    def keep(self, from_below: Note | None) -> None:
        """Keep the values that layers below have written for the next call: this call fails here."""
        self._unsent.update(from_below or {})

    def note(self) -> None:
        """Note the current state, which was not written by layers."""
        self._state.note()

    def after_call(self, from_below: Note | None, is_split: bool) -> Note | None:
        """Return the unreported values that layers here and below have written, after a call."""
        note = {**self._unsent, **(from_below or {})}
        self._unsent = {}
        for change in self._state.changes():
            if change.place[1][0] in TABLES - {BUFFERS}:
                continue
            left = _described(change.value, is_split)
            if not _is_whole(left) and self._reported.get(change.place) == left:
                continue
            self._reported[change.place] = note[change.place] = left
        return note or None


class StateOnLast:
    """The state of the last stage, where the loss runs.

    Args:
        stage: the stage.
        served: the modules with served calls, by name.
    """

    def __init__(self, stage: StageModule, served: Mapping[str, nn.Module]) -> None:
        self._groups = groups = _Groups(stage.stack, stage.start)
        self._modules, self._device = groups.modules, stage.device
        numbers = {module: number for number, module in enumerate(self._modules)}
        self._served = {numbers[module]: name for name, module in served.items()}
        self._below = ModuleState(groups.chosen(groups.below))
        self._around = ModuleState(groups.chosen(groups.outside - groups.own))
        self._own = ModuleState(groups.chosen(groups.own))
        self._shared = SharedWeights(self._modules, stage)
        self._model, self._read = stage.stack.model, names_read_by(self._modules)
        self._pending: list[Change] = []  # changes that were not sent yet
        self._left: dict[Place, tuple[Any, str, str]] = {}  # values that layers wrote: description, text, remedy
        self._hidden: dict[Place, tuple[Any, Any]] = {}  # in this batch: placeholder, and the value
        self._heard: Note = {}  # values reported in this call
        self._code: dict[int, Any] = {}  # code of the served modules at the start of the batch
        self._refusal = ""  # error of this batch, which the loss may have caught
        self._is_other = True  # whether the layers may write other values than in the last call
        self._had_gradients: bool | None = None
        self.has_written = False
        """Whether a call has written into modules outside of the layers on this process."""

    # ------------------------------------------------------------------------------------ a batch
    def begin(self) -> None:
        """Begin a batch: hide values that layers have written in earlier batches.

        Changes since the last batch may exist on this process only, so they are sent.
        """
        self._pending = [
            change
            for state in (self._below, self._around, self._own)
            for change in state.changes()
            if change.place[1][-1] != FLAG and _is_setting(change.value)
        ]
        self._code = {number: _code_of(self._modules[number]) for number in self._served}
        self._refusal = ""
        self._look_for_mixing(self._pending)
        for place in self._left:
            self._hide(place)
        self._note()
        self._shared.note()

    @property
    def may_mix(self) -> bool:
        """Whether a call must not be split, because samples may depend on one another."""
        return self._model in _in_one_piece

    def _look_for_mixing(self, changes: Iterable[Change]) -> None:
        """Run calls in one piece from now on if a value was set that code of the user's reads.

        The examination before the training has seen the layers with the earlier value only: with others, they may mix
        samples, as manifold mixup does.
        """
        for change in changes if self._read and not self.may_mix else ():
            number, path = change.place
            is_of_head = number in self._groups.own - self._groups.layers  # which runs on all rows together
            if path[0] not in TABLES and path[-1] in self._read and not is_of_head:
                _in_one_piece.add(self._model)
                logger.warning(IN_ONE_PIECE, self._groups.name(change.place))
                return

    def end(self) -> Changes:
        """End the batch. Returns the loss's changes since its last call, which persist.

        Raises:
            ValueError: the loss has changed a value that cannot be sent.
        """
        changes = self._changes_of_loss(None)
        for place in list(self._hidden):
            self._show(place)
        self._take_own()
        self._note()
        changes += self._pending
        self._pending = []
        return as_sent(changes)

    def abandon(self) -> None:
        """Abort a failed batch: restore the hidden values."""
        for place in list(self._hidden):
            self._show(place)

    # ------------------------------------------------------------------------------------ a call
    def for_call(self, name: str) -> Changes:
        """Return the loss's changes since the last order.

        Args:
            name: name of the called module.

        Raises:
            ValueError: the loss has changed a value that cannot be sent.
        """
        changes = self._changes_of_loss(name)
        self._look_for_mixing(changes)
        self._is_other = self._is_other or bool(changes)
        return as_sent(changes)

    def for_backward(self) -> Changes:
        """Return the changes since the last order: checkpointed layers run again with the current state."""
        changes = [c for state in (self._below, self._around) for c in state.changes(keep=True)]
        return as_sent(change for change in changes if can_be_sent(change.value))

    @contextmanager
    def running(self, is_split: bool) -> Iterator[None]:
        """Inside the context, a call runs here: the modules of this stage have their own values.

        Args:
            is_split: whether the call runs in micro-batches.
        """
        self._is_other |= self._had_gradients is not torch.is_grad_enabled()
        self._had_gradients = torch.is_grad_enabled()
        looks = is_split and self._is_other
        hidden = [place for place in self._hidden if place[0] not in self._groups.below]
        if looks or hidden:
            self._take_own()
        shown = [place for place in hidden if self._show(place)]
        if hidden:
            self._note()
        self._heard, heard = {}, {}
        try:
            yield
            written = {change.place for change in self._around.changes()}
            self.has_written |= bool(written)
            heard, self._heard = self._heard, {}
            for place, left in heard.items():
                self._take(place, left, place in written)
            for change in self._own.changes() if looks else ():
                if change.place[0] in self._groups.layers and change.place[1][0] not in TABLES - {BUFFERS}:
                    self._left[change.place] = _described(change.value, True), IN_PART, REMEDY_IN_PART
                    shown.append(change.place)
            self._is_other = False
        finally:
            for place in dict.fromkeys(shown):
                self._hide(place)
            if shown or heard or self._heard:
                self._note()
            else:
                self._below.note()  # the model's own forward may set values on layers below: not a change of the loss

    def call_has_failed(self) -> None:
        """Handle a failed call. The loss may continue, so the values that layers below have written are taken now."""
        for place, left in self._heard.items():
            self._take(place, left, False)
        self._heard = {}
        self._note()

    def hear(self, note: Note | None) -> None:
        """Receive the values that the stages below have written in the running call."""
        self._heard.update(note or {})

    # ------------------------------------------------------------------------------------ inside
    def _changes_of_loss(self, called: str | None) -> list[Change]:
        if self._refusal:
            raise ValueError(self._refusal)
        changes, self._pending = self._pending, []
        for change in (*self._below.changes(), *self._around.changes()):
            if change.place[0] in self._served and (change.place[1][0] in HOOKS or change.place[1] == ("forward",)):
                continue  # see `_refuse_code`
            if not can_be_sent(change.value):
                self._refuse(change)
            self._left.pop(change.place, None)
            self._hidden.pop(change.place, None)
            changes.append(change)
        self._refuse_code(called)
        return changes + self._shared.changes()

    def _refuse_code(self, called: str | None) -> None:
        """Refuse changed hooks or `forward` of modules that contain all layers, unless the module is called.

        The called module's own hooks run around the call, on this process only.
        """
        for number, name in self._served.items():
            is_inside = name.startswith(f"{called}.") if called else name != ""
            if is_inside and _code_of(self._modules[number]) != self._code[number]:
                self._refuse(Change((number, (HOOKS[0],)), None))

    def _refuse(self, change: Change) -> NoReturn:
        number, path = change.place
        of = f"module {self._groups.names[number]!r}" if self._groups.names[number] else "the model"
        what = {
            **dict.fromkeys(HOOKS, f"a hook of {of}"),
            PARTS: f"the module {self._groups.name(change.place)}",
            PARAMETERS: f"the parameter {self._groups.name(change.place)} (torch.func.functional_call replaces it)",
        }.get(path[0], self._groups.name(change.place))
        self._refusal = (
            f"The loss has changed {what}, which layers of other pipeline stages may use, on this process alone."
            " Numbers, strings and tensors without a gradient are sent to them, and nothing else. Change it before"
            " train() or, on all processes, in a callback, or set pipeline_parallel_size=1."
        )
        raise ValueError(self._refusal)

    def _take(self, place: Place, left: Any, is_written_here: bool) -> None:
        """Take a value that a stage below has written to its copy of a module."""
        if is_written_here:
            value = value_at(self._modules, place)
            is_known = not isinstance(value, torch.Tensor) or not bool(torch.isnan(value).any())
            if is_known:
                return
        if _is_whole(left):
            self._left.pop(place, None)
            put(self._modules, place, left)
            return
        self._left[place] = left, BELOW, REMEDY
        self._hide(place)

    def _hide(self, place: Place) -> None:
        left, about, remedy = self._left[place]
        value = value_at(self._modules, place)
        stand_in = self._stand_in(left, about.format(self._groups.name(place)), remedy)
        put(self._modules, place, stand_in)
        if place not in self._hidden:
            self._hidden[place] = stand_in, value
        else:
            standing, before = self._hidden[place]
            self._hidden[place] = stand_in, before if value is standing else value

    def _show(self, place: Place) -> bool:
        """Restore a hidden value. Returns False if the loss has replaced it."""
        stand_in, value = self._hidden.pop(place)
        if value_at(self._modules, place) is not stand_in:
            del self._left[place]
            return False
        put(self._modules, place, value)
        return True

    def _stand_in(self, left: Any, about: str, remedy: str) -> Any:
        if isinstance(left, _Shape):
            like = torch.zeros((), dtype=left.dtype, device=self._device).expand(left.shape)
            return hidden_like(like, about, remedy)
        if isinstance(left, dict):
            return type(left)((key, self._stand_in(entry, about, remedy)) for key, entry in left.items())
        if type(left) in REBUILT:
            return type(left)(self._stand_in(entry, about, remedy) for entry in left)
        return Unreadable(about, remedy) if isinstance(left, _Other) else left

    def _take_own(self) -> None:
        """Send changed settings of this stage's modules with the next order."""
        changes = self._own.changes()
        self._pending += [c for c in changes if c.place not in self._left and _is_setting(c.value)]

    def _note(self) -> None:
        for state in (self._below, self._around, self._own):
            state.note()


def _code_of(module: nn.Module) -> list[Any]:
    """Return the hooks and `forward` of a module."""
    return [
        own_forward(vars(module).get("forward")),
        *(hook for table in HOOKS for hook in vars(module)[table].values()),
    ]


def _described(value: Any, is_split: bool) -> Any:
    """Return a description of a value that layers have written.

    Args:
        value: the value.
        is_split: whether the layers ran on micro-batches. Then even numbers differ from one process's.
    """
    if isinstance(value, torch.Tensor):
        return _Shape(tuple(value.shape), value.dtype)
    if is_plain(value):
        return _Other() if is_split and value is not None and value is not ABSENT else value
    if isinstance(value, dict) and type(value) in REBUILT:
        return type(value)((key, _described(entry, is_split)) for key, entry in value.items())
    if type(value) in REBUILT and not isinstance(value, (set, frozenset)):
        return type(value)(_described(entry, is_split) for entry in value)
    return value if can_be_sent(value) and not is_split else _Other()


def _is_whole(left: Any) -> bool:
    """Whether a description contains the complete value."""
    if isinstance(left, (_Shape, _Other)):
        return False
    if type(left) not in REBUILT:
        return True
    return all(map(_is_whole, left.values() if isinstance(left, dict) else left))


def _is_setting(value: Any) -> bool:
    return can_be_sent(value) and not _has_tensor(value)


def _has_tensor(value: Any) -> bool:
    if type(value) in REBUILT:
        return any(map(_has_tensor, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)
