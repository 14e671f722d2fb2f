"""The formats of the files that this package reads back, and their only reader.

A file may be truncated, edited or written by another program. So its content is compared with its format before use. A
difference raises a `ValueError` that names the file and the field:

    trainer_state.json: stateful_callbacks.PipelineState.attributes.memory.layout.stages is 0, but must be a whole
    number from 1.

A format looks like the content that it describes:

    {"name": format, "name?": format}   an object with these fields, "?" if optional; other fields are allowed
    {str: format}                       an object with values of this format
    [format]   [format, ...]            a list; a list with at least one value
    (format, format)                    a list of as many values, each with its own format
    Is("a whole number", test)          one value
    Both(format, Is(...))               a value with a format and a further property, or with a format that
                                        a function returns for it
    Maybe(format)                       null, an empty object, or a value with the format
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from .own_files import is_inside, open_regular

KEPT = "PipelineState"
"""Entry among the states of callbacks that only checkpoints with a manifest have. It contains the step of its writing,
because the stock Trainer copies the state that it has resumed from into its own checkpoints."""
CALLBACK_STATES = "trainer_state.json: stateful_callbacks"


# ---------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------


def read_json(path: Path, form: Format) -> Any:
    """Return the content of a file.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: the content is not JSON, or has another format.
    """
    with open(open_regular(path), encoding="utf-8") as file:
        try:
            content = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path.name} is not JSON ({error})") from error
    return checked(content, form, path.name)


def read_records(path: Path, form: Format) -> tuple[list[dict[str, Any]], int]:
    """Return the records in a file with one JSON object per line, and the number of lines that are not JSON.

    Processes that were killed while writing leave such lines. A missing file has no lines.

    Raises:
        ValueError: a line is JSON, but has another format.
    """
    records: list[dict[str, Any]] = []
    broken = 0
    if path.is_file():
        with open(open_regular(path), encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    broken += 1
                    continue
                records.append(checked(record, form, f"{path.name}, line {number}", " Correct or remove the line."))
    return records, broken


def checked(content: Any, form: Format, source: str, remedy: str = "") -> Any:
    """Return a content if it has the given format.

    Args:
        content: content from JSON.
        form: the format.
        source: name of the file, for the message.
        remedy: remedy for the user, for the message.

    Raises:
        ValueError: the content has another format. The message names the file and the field.
    """
    try:
        _check(content, form, "")
    except ValueError as error:
        raise ValueError(f"{source}: {error}{remedy}") from None
    return content


def freezing_in(states: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return the state of the first `LayerFreezeCallback` among the states of callbacks; None if there is none.

    Args:
        states: `stateful_callbacks` of a `trainer_state.json`. Several callbacks of one class form a list.
        name: name of the callback's class.

    Raises:
        ValueError: the state is damaged. The message names the field.
    """
    kept = states.get(name)
    if not kept:
        return None
    form: Format = [_FREEZE_STATE] if isinstance(kept, list) else _FREEZE_STATE
    checked({name: kept}, {name: form}, CALLBACK_STATES)
    memory: dict[str, Any] = (kept[0] if isinstance(kept, list) else kept)["attributes"]["memory"]
    return memory


def run_state_in(states: Any) -> dict[str, Any]:
    """Return this package's state among the states of callbacks; {} if there is none.

    Raises:
        ValueError: this state or the freeze callback's state is damaged. The message names the field.
    """
    if not states or (isinstance(states, Mapping) and KEPT not in states):
        return {}  # other checkpoints may have user callbacks of these names
    kept = checked(states, {KEPT: _PIPELINE_STATE}, CALLBACK_STATES)[KEPT]
    freezing_in(states, "LayerFreezeCallback")
    return (kept["attributes"]["memory"] or {}) if kept else {}


# ---------------------------------------------------------------------------------------------------------
# Formats
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Is:
    """A value with a property, and the property in words."""

    words: str
    test: Callable[[Any], bool]


class Both:
    """A value with several formats, checked in order. A function of the value may return a format."""

    def __init__(self, *forms: Format | Callable[[Any], Format]) -> None:
        self.forms = forms


class Maybe(Both):
    """None, an empty object, or a value with a format."""

    def __init__(self, form: Format) -> None:
        super().__init__(lambda value: ANYTHING if value is None or value == {} else form)


Format: TypeAlias = "Is | Both | dict[Any, Any] | list[Any] | tuple[Any, ...]"


def _check(value: Any, form: Format, name: str) -> None:
    """Compare a value with a format.

    Raises:
        ValueError: the value has another format. The message names the field.
    """
    if isinstance(form, Is):
        if not form.test(value):
            raise ValueError(f"{name or 'the content'} is {repr(value)[:80]}, but must be {form.words}.")
    elif isinstance(form, Both):
        for one in form.forms:
            _check(value, one(value) if callable(one) else one, name)
    elif isinstance(form, dict):
        _check_fields(value, form, name)
    else:
        _check_items(value, form, name)


def _check_fields(value: Any, form: dict[Any, Any], name: str) -> None:
    """Compare the values of an object with their formats."""
    _check(value, OBJECT, name)
    of_all: dict[Any, Any] = dict.fromkeys(value, form[str]) if str in form else form
    for field, of_field in of_all.items():
        key = field if str in form else field.removesuffix("?")
        path = f"{name}[{key!r}]" if str in form else f"{name}.{key}".lstrip(".")
        if key in value:
            _check(value[key], of_field, path)
        elif key == field:
            raise ValueError(f"{path} is missing.")


def _check_items(value: Any, form: list[Any] | tuple[Any, ...], name: str) -> None:
    """Compare the values of a list with their formats."""
    count = len(value) if isinstance(value, (list, tuple)) else -1
    if isinstance(form, tuple):
        _check(value, Is(f"a list of {len(form)} values", lambda _: count == len(form)), name)
    else:
        words = "a list with at least one value" if ... in form else "a list"
        _check(value, Is(words, lambda _: count >= len(form) - 1), name)
    for index, item in enumerate(value):
        _check(item, form[index] if isinstance(form, tuple) else form[0], f"{name}[{index}]")


def _whole(least: int) -> Is:
    return Is(
        f"a whole number from {least}",
        lambda value: is_number(value) and isinstance(value, int) and least <= value < 2**63,
    )


def is_number(value: Any) -> bool:
    """Whether a value is a number, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


ANYTHING = Is("anything", lambda _: True)
OBJECT = Is("an object", lambda value: isinstance(value, Mapping))
TEXT = Is("a text", lambda value: isinstance(value, str))
FLAG = Is("true or false", lambda value: isinstance(value, bool))
NUMBER = Is("a finite number", lambda value: is_number(value) and -1e300 < value < 1e300)
COUNT = _whole(0)
SIZE = _whole(1)
NAME = Is("the relative path of a file inside this folder", is_inside)


# ---------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------

MANIFEST_FORMAT = Both(
    {str: (COUNT, COUNT)},
    Is("an object whose names are relative paths inside this folder", lambda v: all(map(is_inside, v))),
)
"""File -> [size in bytes, checksum]."""

WEIGHT_INDEX = {"weight_map": {str: NAME}}

_FREEZING = {
    "num_frozen": COUNT,
    "num_decisions": COUNT,
    "decided_at?": Maybe(COUNT),
    "observed": Maybe(
        Both(([NUMBER], [NUMBER]), Is("two lists of one length", lambda pair: len(pair[0]) == len(pair[1])))
    ),
    "policy": ANYTHING,
}
_FREEZE_STATE = {"attributes": {"memory": _FREEZING}}
PREVIOUS_NORMS = {"previous?": Maybe([NUMBER])}
"""Format of the state of the policy "autofreeze"."""

_LAYOUT = Both(
    {
        "asked": [ANYTHING],
        "stages": SIZE,
        "units?": SIZE,
        "bounds?": [COUNT, ...],
        "num_frozen": COUNT,
        "counted_as_cached": COUNT,
    },
    Is("an object with units, or with the bounds of earlier versions", lambda it: "units" in it or "bounds" in it),
)
_GENERATORS = {
    "seed?": COUNT,
    "torch?": (TEXT,),
    "python?": (COUNT, [COUNT], Maybe(NUMBER)),
    "numpy?": (TEXT, [COUNT], COUNT, COUNT, NUMBER),
}
_ORDER = Both(
    {"shares": [SIZE, ...], "rows": SIZE, "drawn_from?": Maybe(_GENERATORS)},
    Is("shares whose sum divides the rows", lambda order: order["rows"] % sum(order["shares"]) == 0),
    Is("an object with shares, rows and drawn_from", lambda order: set(order) <= {"shares", "rows", "drawn_from"}),
)
_MEMORY = {"step": COUNT, "owes_evaluation?": FLAG, "order?": Maybe(_ORDER), "layout?": _LAYOUT}
_PIPELINE_STATE = Maybe({"attributes": {"memory": Maybe(_MEMORY)}})
TRAINER_STATE = {"global_step?": COUNT, "stateful_callbacks?": Maybe(OBJECT)}
