"""The state of a model's modules besides the values of its weights, and its changes.

State consists of the entries of `vars(module)`, with containers and configurations by value; hooks, parts and
parameters by identity; buffers by the number of writes; and `requires_grad` of parameters. Comparing it takes 1 to 2
microseconds for each module, where calling the module takes ten or more: unchanged values are the same objects, and
only differing values are compared in detail.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, chain
from numbers import Number
from operator import attrgetter, getitem, is_
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from ...model.called_inputs import version_of
from ...model.elsewhere import Hidden
from ...model.method_override import MethodOverride

BUFFERS, PARAMETERS, PARTS = "_buffers", "_parameters", "_modules"
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TABLES = frozenset({BUFFERS, PARAMETERS, PARTS, *HOOKS})
OF_CHECKPOINTING = frozenset({"_gradient_checkpointing_func", "_require_grads_hook", "_require_grads_hooks"})
"""Attributes that transformers sets when checkpointing is toggled (by TRL's losses). They do not affect results."""
REQUIRES_GRAD = "make_inputs_require_grads"
"""Name of the hook that transformers sets for the same purpose."""
OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | OF_CHECKPOINTING
FLAG, FORWARD = "requires_grad", "forward"

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), range, slice})
PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
REBUILT = frozenset({*CONTAINERS, OrderedDict})
"""Types of containers that can be rebuilt with other entries."""
MAX_DEPTH = 4
MAX_ENTRIES = 2_000
"""Containers with more entries, or deeper nesting, hold data and are compared by identity."""

Path = tuple[str, ...]
"""Path from a module to a value: an attribute name, then attribute names of objects; or a table and a name."""
Place = tuple[int, Path]
"""The number of a module in `model.modules()`, and the path of a value in it."""


class Absence(Enum):
    """Stands for the value of an attribute that does not exist."""

    ABSENT = "absent"


ABSENT = Absence.ABSENT


@dataclass(frozen=True, eq=False)
class Change:
    """A value that has changed.

    Attributes:
        place: place of the value.
        value: the new value.
        is_written: whether it is a buffer or a weight that was written in place.
    """

    place: Place
    value: Any
    is_written: bool = False


Changes = dict[tuple[Path, bool], tuple[list[int], list[Any]]]
"""Changes in the form to send: (path, whether a buffer was written) -> numbers of modules, and values."""


def as_sent(changes: Iterable[Change]) -> Changes:
    sent: Changes = {}
    for change in changes:
        numbers, values = sent.setdefault((change.place[1], change.is_written), ([], []))
        numbers.append(change.place[0])
        values.append(change.value)
    return sent


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string or the like: it is the same on another process."""
    return type(value) in PLAIN or isinstance(value, (Number, Enum, *PLAIN_OF_TORCH))


def own_forward(value: Any) -> Any:
    """Return a module's attribute `forward` without the overrides of this package; None for its class's forward."""
    while isinstance(value, MethodOverride):
        value = value.earlier
    return None if value is ABSENT else value


def kind_of(tensor: Any) -> Any:
    """Return a tensor's class; a guarded one stands for a plain one."""
    return getattr(tensor, "plain_class", type(tensor))


def can_be_sent(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a value is plain, a tensor without a gradient, or a container of such values."""
    if isinstance(value, torch.Tensor):
        return kind_of(value) is torch.Tensor and not value.requires_grad
    if type(value) not in REBUILT or not depth or len(value) > MAX_ENTRIES:
        return is_plain(value)
    entries = chain(value, value.values()) if isinstance(value, dict) else value
    return all(can_be_sent(entry, depth - 1) for entry in entries)


# ---------------------------------------------------------------------------------------------------------
# Values that can be compared with later ones
# ---------------------------------------------------------------------------------------------------------
class _Same:
    """Compares by identity. A tensor differs after a write."""

    def __init__(self, value: Any) -> None:
        self.value, self.version = value, version_of(value) if isinstance(value, torch.Tensor) else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value and other.version == self.version

    __hash__ = None  # type: ignore[assignment]


class _Object(NamedTuple):
    """An object's attributes, by value."""

    kind: type
    attributes: dict[str, Any]


def comparable(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return a form of a value that equals the form at a later time if the value has not changed."""
    if is_plain(value):
        return value
    if depth and isinstance(value, CONTAINERS) and len(value) <= MAX_ENTRIES:
        if isinstance(value, dict):
            return type(value), [*value], [comparable(entry, depth - 1) for entry in value.values()]
        if isinstance(value, (set, frozenset)):
            return value.copy()
        return type(value), [comparable(entry, depth - 1) for entry in value]
    if depth and _has_settings(value):
        return _Object(type(value), {name: comparable(v, depth - 1) for name, v in vars(value).items()})
    return _Same(value)


def _has_settings(value: Any) -> bool:
    """Whether a value is an object with attributes, but neither code nor a tensor."""
    kind = type(value)
    if isinstance(value, (nn.Module, torch.Tensor, ModuleType)) or callable(value):
        return False
    if kind.__module__.partition(".")[0] in ("logging", "threading", "torch"):
        return False
    attributes = getattr(value, "__dict__", None)  # may be empty: its values are in the class, until one is set
    return attributes is not None and len(attributes) < MAX_ENTRIES


def _differences(number: int, path: Path, before: Any, after: Any, value: Any) -> Iterator[Change]:
    """Yield the changes between two comparable forms. `after` is the form of `value`."""
    if before is after or (type(before) is type(after) and before == after):
        return
    if isinstance(before, _Object) and isinstance(after, _Object) and before.kind is after.kind:
        for name in {**before.attributes, **after.attributes}:
            values = (of.get(name, ABSENT) for of in (before.attributes, after.attributes, vars(value)))
            yield from _differences(number, (*path, name), *values)
        return
    yield Change((number, path), value)


# ---------------------------------------------------------------------------------------------------------
# All modules at once
# ---------------------------------------------------------------------------------------------------------
class _Reading(NamedTuple):
    counts: list[Any]  # number of attributes by module, and of entries by table
    values: list[Any]  # values of attributes
    entries: list[Any]  # entries of the tables
    versions: list[int]  # versions of the buffers
    numbers: list[Any]  # address and one value of each CPU buffer: torch does not count writes to `.data`
    flags: list[bool]  # flags of the parameters
    inside: list[Any]  # comparable forms of mutable attributes

    def is_same(self, other: _Reading) -> bool:
        return (
            self.counts == other.counts
            and self.versions == other.versions
            and self.numbers == other.numbers
            and self.flags == other.flags
            and all(map(is_, self.values, other.values))
            and all(map(is_, self.entries, other.entries))
            and self.inside == other.inside
        )


_flag, _trained = attrgetter(FLAG), attrgetter("is_trained")


class ModuleState:
    """The state of modules, without their submodules.

    Args:
        modules: the modules, by their number in `model.modules()`.
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self._modules = dict(modules)
        self._build()
        self._noted = self._read()

    def note(self) -> None:
        """Take the current state as the reference."""
        self.changes()

    def changes(self, keep: bool = False) -> list[Change]:
        """Return the changes since the last call.

        Args:
            keep: whether to keep the earlier state as the reference.
        """
        now, noted = self._read(), self._noted
        if now.is_same(noted):
            return []
        found = list(self._differences(noted, now))
        if keep:
            return found
        has_moved = now.numbers[0] != noted.numbers[0]
        has_other_parts = has_moved or now.counts != noted.counts or not all(map(is_, now.entries, noted.entries))
        if (
            has_other_parts
            or any(_is_mutable(c.value) for c in found if type(c.value) not in PLAIN)
            or self._lost(noted, now)
        ):
            self._build()
            self._noted = self._read()
        else:
            self._noted = now
        return found

    def _lost(self, noted: _Reading, now: _Reading) -> bool:
        """Whether a container or an object is no longer the value of its attribute."""
        return any(noted.values[index] is not now.values[index] for index in self._mutable)

    def _build(self) -> None:
        """List the values to compare."""
        self._owners = [vars(module) for module in self._modules.values()]
        self._of: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._numbers: list[int] = []  # module numbers of these attributes
        self._tables: list[dict[Any, Any]] = []
        self._of_tables: list[tuple[int, str, list[Any]]] = []  # module, name and keys
        self._empty: list[dict[Any, Any]] = []
        self._on_cpu: list[tuple[Place, torch.Tensor]] = []
        self._middles: dict[torch.dtype, list[torch.Tensor]] = {}
        self._buffer_tables: list[dict[Any, Any]] = []
        self._parameters: tuple[dict[Place, Any], ...] = ({}, {})  # parameters here, and hidden ones
        mutable: dict[int, int] = {}  # id of a value -> first attribute with it
        seen: set[int] = set()
        for (number, module), owner in zip(self._modules.items(), self._owners, strict=True):
            for name, value in owner.items():
                if name not in OF_TORCH:
                    if type(value) not in PLAIN and _is_mutable(value):
                        mutable.setdefault(id(value), len(self._of))
                    self._of.append(owner)
                    self._names.append(name)
                    self._numbers.append(number)
                elif name in TABLES and value:
                    self._tables.append(value)
                    self._of_tables.append((number, name, [*value]))
                elif name in TABLES:
                    self._empty.append(value)
            if owner[BUFFERS]:
                self._buffer_tables.append(owner[BUFFERS])
                self._look_into(number, owner[BUFFERS])
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    place = number, (PARAMETERS, name, FLAG)
                    self._parameters[isinstance(parameter, Hidden)][place] = parameter
        self._mutable = list(mutable.values())

    def _look_into(self, number: int, buffers: dict[str, Any]) -> None:
        """Prepare to compare one value of each CPU buffer."""
        for name, buffer in buffers.items():
            if kind_of(buffer) is not torch.Tensor or buffer.device.type != "cpu" or buffer.layout != torch.strided:
                continue
            if buffer.numel() and not buffer.is_complex() and not buffer.is_quantized:
                self._on_cpu.append(((number, (BUFFERS, name)), buffer))
                middle = torch.Tensor.detach(buffer)[tuple(size // 2 for size in buffer.shape)].view(1)
                self._middles.setdefault(buffer.dtype, []).append(middle)

    def _read(self) -> _Reading:
        try:
            values = list(map(getitem, self._of, self._names))
        except KeyError:
            values = [of.get(name, ABSENT) for of, name in zip(self._of, self._names, strict=True)]
        buffers = chain.from_iterable(map(dict.values, self._buffer_tables))
        return _Reading(
            [*map(len, self._owners), *map(len, self._tables), any(self._empty)],
            values,
            list(chain.from_iterable(map(dict.values, self._tables))),
            [0 if buffer is None else version_of(buffer) for buffer in buffers],
            [[b.data_ptr() for _, b in self._on_cpu], *map(_values, self._middles.values())],
            [*map(_flag, self._parameters[0].values()), *map(_trained, self._parameters[1].values())],
            [comparable(values[index]) for index in self._mutable],
        )

    def _differences(self, noted: _Reading, now: _Reading) -> Iterator[Change]:
        inside = dict(zip(self._mutable, noted.inside, strict=True))
        for index, (before, after) in enumerate(zip(noted.values, now.values, strict=True)):
            is_override = self._names[index] == FORWARD and own_forward(before) is own_forward(after)
            if is_override or (before is after and index not in inside):
                continue
            number, path = self._numbers[index], (self._names[index],)
            if type(after) in PLAIN and type(before) is type(after):
                if before != after:
                    yield Change((number, path), after)
                continue
            earlier = inside[index] if index in inside else comparable(before)
            yield from _differences(number, path, earlier, comparable(after), after)
        known = len(self._owners)
        if now.counts != noted.counts:
            yield from self._added()
        lengths = noted.counts[known:-1]
        for stop, length, (number, table, keys), entries in zip(
            accumulate(lengths), lengths, self._of_tables, self._tables, strict=True
        ):
            before = noted.entries[stop - length : stop]
            if not (len(entries) == length and all(map(is_, entries.values(), before))):
                earlier = dict(zip(keys, before, strict=True))
                for key in {**earlier, **entries}:
                    pair = earlier.get(key, ABSENT), entries.get(key, ABSENT)
                    if pair[0] is not pair[1] and not any(map(_is_of_checkpointing, pair)):
                        yield Change((number, (table, key)), entries.get(key, ABSENT))
        written: dict[Place, Change] = {}
        if now.versions != noted.versions:
            written |= {change.place: change for change in self._written(noted, now)}
        if now.numbers != noted.numbers:
            written |= {change.place: change for change in self._written_unnoticed(noted, now)}
        yield from written.values()
        for place, flag, flag_now in zip(chain(*self._parameters), noted.flags, now.flags, strict=True):
            if flag != flag_now:
                yield Change(place, flag_now)

    def _added(self) -> Iterator[Change]:
        """Yield new attributes, and new entries of tables."""
        known: dict[int, set[str]] = {}
        for number, name in zip(self._numbers, self._names, strict=True):
            known.setdefault(number, set()).add(name)
        for number, owner in zip(self._modules, self._owners, strict=True):
            for name in owner.keys() - OF_TORCH - known.get(number, set()):
                if name != FORWARD or own_forward(owner[name]) is not None:
                    yield Change((number, (name,)), owner[name])
        empty = {id(table) for table in self._empty if table}
        for number, owner in zip(self._modules, self._owners, strict=True) if empty else ():
            for name in TABLES:
                if id(owner[name]) in empty:
                    entries = ((k, v) for k, v in owner[name].items() if not _is_of_checkpointing(v))
                    yield from (Change((number, (name, key)), value) for key, value in entries)

    def _written(self, noted: _Reading, now: _Reading) -> Iterator[Change]:
        """Yield buffers that were written in place."""
        keys = [(number, key) for number, table, names in self._of_tables if table == BUFFERS for key in names]
        if len(keys) != len(noted.versions) or len(keys) != len(now.versions):
            return  # added or removed buffers are changes of their own
        earlier = {id(entry) for entry in noted.entries}
        for (number, key), before, after in zip(keys, noted.versions, now.versions, strict=True):
            buffer = self._modules[number]._buffers.get(key)
            if before != after and id(buffer) in earlier:
                yield Change((number, (BUFFERS, key)), buffer, is_written=True)

    def _written_unnoticed(self, noted: _Reading, now: _Reading) -> Iterator[Change]:
        """Yield CPU buffers with another address or another value, even if torch has not counted a write."""
        of_types = zip(noted.numbers[1:], now.numbers[1:], strict=True)
        have_changed = {
            dtype: iter([before != after for before, after in zip(*values, strict=True)])
            for dtype, values in zip(self._middles, of_types, strict=True)
        }
        addresses = zip(noted.numbers[0], now.numbers[0], strict=True)
        for (place, buffer), (before, after) in zip(self._on_cpu, addresses, strict=True):
            if next(have_changed[buffer.dtype]) or before != after:
                yield Change(place, buffer, is_written=True)


def _is_of_checkpointing(hook: Any) -> bool:
    return getattr(hook, "__name__", "") == REQUIRES_GRAD


def _values(middles: list[torch.Tensor]) -> list[float]:
    numbers = torch.cat(middles)
    values: list[float] = (numbers.nan_to_num() if numbers.is_floating_point() else numbers).tolist()
    return values


def _is_mutable(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return any(map(_is_mutable, value))
    return isinstance(value, (torch.Tensor, *CONTAINERS)) or _has_settings(value)


# ---------------------------------------------------------------------------------------------------------
# Changing it
# ---------------------------------------------------------------------------------------------------------
def value_at(modules: list[nn.Module], place: Place) -> Any:
    """Return the value at a place; `ABSENT` if there is none."""
    owner, name = _owner_of(modules, place)
    return owner.get(name, ABSENT) if owner is not None else ABSENT


def put(modules: list[nn.Module], place: Place, value: Any, is_written: bool = False) -> Callable[[], None]:
    """Set a value, and return a function that undoes it.

    Args:
        modules: all modules of the model.
        place: place of the value.
        value: the value; `ABSENT` removes the attribute.
        is_written: whether to write a buffer or a weight in place.
    """
    number, path = place
    if path[-1] == FLAG and path[0] == PARAMETERS:
        return _put_flag(modules[number]._parameters[path[1]], value)
    owner, name = _owner_of(modules, place)
    before = owner.get(name, ABSENT) if owner is not None else ABSENT
    if owner is None or (is_written and isinstance(before, Hidden)):  # a weight of other stages
        return lambda: None
    if before is value or (is_plain(value) and type(before) is type(value) and before == value):
        return lambda: None
    if is_written and isinstance(before, torch.Tensor) and before.shape == value.shape:
        with torch.no_grad():
            before.copy_(value)
        return lambda: None
    if value is ABSENT:
        owner.pop(name, None)
    else:
        owner[name] = value

    def restore() -> None:
        if owner.get(name, ABSENT) is value:  # otherwise other code has set it since
            _restore(owner, name, before)

    return restore


def put_all(modules: list[nn.Module], changes: Changes) -> Callable[[], None]:
    """Set values from another process, and return a function that undoes it."""
    undo = [
        put(modules, (number, path), value, is_written)
        for (path, is_written), (numbers, values) in changes.items()
        for number, value in zip(numbers, values, strict=True)
    ]

    def undo_all() -> None:
        for restore in reversed(undo):
            restore()

    return undo_all


def plain_state(modules: list[nn.Module]) -> Changes:
    """Return all plain attributes of modules, and containers of plain values, in the form to send."""
    return as_sent(
        Change((number, (name,)), value)
        for number, module in enumerate(modules)
        for name, value in vars(module).items()
        if name not in OF_TORCH and not isinstance(value, torch.Tensor) and can_be_sent(value)
    )


def _owner_of(modules: list[nn.Module], place: Place) -> tuple[dict[str, Any] | None, str]:
    """Return the dictionary that contains the value at a place, and its key; None if an object is missing."""
    number, path = place
    owner = vars(modules[number])
    for name in path[:-1]:
        value = owner.get(name)
        inner = value if name in TABLES else getattr(value, "__dict__", None)
        if inner is None:
            return None, path[-1]
        owner = inner
    return owner, path[-1]


def _put_flag(parameter: Any, value: bool) -> Callable[[], None]:
    if isinstance(parameter, Hidden):
        before, parameter.is_trained = parameter.is_trained, value
        return lambda: setattr(parameter, "is_trained", before)
    before = parameter.requires_grad
    parameter.requires_grad_(value)
    return lambda: parameter.requires_grad_(before)


def _restore(owner: dict[str, Any], name: str, before: Any) -> None:
    if before is ABSENT:
        owner.pop(name, None)
    else:
        owner[name] = before
