"""What the files look like that this package reads again, and the one way to read them.

A file may have been cut off, edited or made by somebody else. So a content is compared with its format before it is
used; a difference is a `ValueError` that names the file and the field:

    trainer_state.json: stateful_callbacks.PipelineState.attributes.memory.layout.stages is 0, but must be a whole
    number from 1.

A format is a function that takes a value and the field's name, and raises that error. Fields that a format does not
name may have any value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from .own_files import is_inside, open_regular

Format: TypeAlias = Callable[[Any, str], None]

KEPT = "PipelineState"
"""Entry of the trainer's state that only checkpoints with a manifest have. It holds the step at which it was written,
since the stock Trainer copies the state that it was resumed from into its own checkpoints."""


# ---------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------


def read_json(path: Path, form: Format) -> Any:
    """Return the content of a file.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is not JSON, or of another format.
    """
    with open(open_regular(path), encoding="utf-8") as file:
        try:
            content = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path.name} is not JSON ({error})") from error
    return checked(content, form, path.name)


def read_records(path: Path, form: Format) -> tuple[list[dict[str, Any]], int]:
    """Return the records in a file of one JSON object a line, and how many lines are no JSON.

    Those are of processes that were killed while they wrote. A missing file has no lines.

    Raises:
        ValueError: a line is JSON, but of another format.
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
    """Return a content, if it has a format.

    Args:
        content: from JSON.
        form: the format.
        source: the file.
        remedy: for the user.

    Raises:
        ValueError: it has another one. The message names the file and the field.
    """
    try:
        form(content, "")
    except ValueError as error:
        raise ValueError(f"{source}: {error}{remedy}") from None
    return content


# ---------------------------------------------------------------------------------------------------------
# Parts of formats
# ---------------------------------------------------------------------------------------------------------


def _value(words: str, is_one: Callable[[Any], bool]) -> Format:
    def check(value: Any, name: str) -> None:
        if not is_one(value):
            raise ValueError(f"{name or 'the content'} is {repr(value)[:80]}, but must be {words}.")

    return check


def _whole(least: int) -> Format:
    return _value(
        f"a whole number from {least}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63,
    )


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -1e300 < value < 1e300 and math.isfinite(value)


def fields(forms: Mapping[str, Format]) -> Format:
    """An object with these fields. The name of one that may be missing ends in "?"."""

    def check(value: Any, name: str) -> None:
        MAPPING(value, name)
        for field, form in forms.items():
            key = field.removesuffix("?")
            if key in value:
                form(value[key], f"{name}.{key}" if name else key)
            elif key == field:
                raise ValueError(f"{f'{name}.{key}' if name else key} is missing.")

    return check


def each(form: Format, least: int = 0) -> Format:
    """A list of so many values at least with this format."""

    def check(value: Any, name: str) -> None:
        is_list = isinstance(value, (list, tuple)) and len(value) >= least
        _value(f"a list of {least} or more values" if least else "a list", lambda _: is_list)(value, name)
        for index, item in enumerate(value):
            form(item, f"{name}[{index}]")

    return check


def values(form: Format) -> Format:
    """An object, each of whose values has this format."""

    def check(value: Any, name: str) -> None:
        MAPPING(value, name)
        for key, item in value.items():
            form(item, f"{name}[{key!r}]")

    return check


def row(*forms: Format) -> Format:
    """A list of values with these formats."""

    def check(value: Any, name: str) -> None:
        is_row = isinstance(value, (list, tuple)) and len(value) == len(forms)
        _value(f"a list of {len(forms)} values", lambda _: is_row)(value, name)
        for index, (item, form) in enumerate(zip(value, forms, strict=True)):
            form(item, f"{name}[{index}]")

    return check


def maybe(form: Format) -> Format:
    """None, or a value with a format."""
    return lambda value, name: None if value is None else form(value, name)


def unless_empty(form: Format) -> Format:
    """An empty object, or a value with a format."""
    return lambda value, name: None if value == {} else form(value, name)


def one_or_many(form: Format) -> Format:
    """A value with a format, or a list of such values."""
    return lambda value, name: (each(form, least=1) if isinstance(value, list) else form)(value, name)


def both(*forms: Format) -> Format:
    """A value with several formats."""

    def check(value: Any, name: str) -> None:
        for form in forms:
            form(value, name)

    return check


ANYTHING: Format = _value("anything", lambda _: True)
MAPPING: Format = _value("an object", lambda value: isinstance(value, Mapping))
TEXT: Format = _value("a text", lambda value: isinstance(value, str))
FLAG: Format = _value("true or false", lambda value: isinstance(value, bool))
NUMBER: Format = _value("a finite number", _is_number)
COUNT: Format = _whole(0)
SIZE: Format = _whole(1)
NAME: Format = _value("the relative path of a file inside this folder", is_inside)


# ---------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------

MANIFEST_FORMAT = both(
    values(row(COUNT, COUNT)),
    _value("an object whose names are relative paths inside this folder", lambda v: all(map(is_inside, v))),
)
"""File -> [size in bytes, checksum]."""

WEIGHT_INDEX = fields({"weight_map": values(NAME)})

_FREEZING = fields(
    {
        "num_frozen": COUNT,
        "num_decisions": COUNT,
        "decided_at?": maybe(COUNT),
        "observed": maybe(
            both(row(each(NUMBER), each(NUMBER)), _value("two lists of one length", lambda v: len(v[0]) == len(v[1])))
        ),
        "policy": ANYTHING,
    }
)
FREEZE_STATE = one_or_many(fields({"attributes": fields({"memory": _FREEZING})}))
"""`LayerFreezeCallback` in `trainer_state.json`."""
PREVIOUS_NORMS = fields({"previous?": maybe(each(NUMBER))})
"""What the policy "autofreeze" keeps."""

_LAYOUT = fields(
    {
        "where": MAPPING,
        "asked": each(ANYTHING),
        "stages": SIZE,
        "bounds": each(COUNT, least=2),
        "num_frozen": COUNT,
        "num_cached": COUNT,
        "counted_as_cached": COUNT,
        "schedule?": TEXT,
        "virtual_stages?": SIZE,
    }
)
_GENERATORS = fields(
    {
        "seed?": COUNT,
        "torch?": row(TEXT),
        "python?": row(COUNT, each(COUNT), maybe(NUMBER)),
        "numpy?": row(TEXT, each(COUNT), COUNT, COUNT, NUMBER),
    }
)
_ORDER = both(
    fields({"shares": each(SIZE, least=1), "rows": SIZE, "drawn_from?": maybe(_GENERATORS)}),
    _value("shares whose sum divides the rows", lambda v: v["rows"] % sum(v["shares"]) == 0),
    _value("an object with shares, rows and drawn_from", lambda v: set(v) <= {"shares", "rows", "drawn_from"}),
)


_MEMORY = fields({"step": COUNT, "owes_evaluation?": FLAG, "order?": unless_empty(_ORDER), "layout?": _LAYOUT})
_KEPT = fields({"attributes": fields({"memory": unless_empty(_MEMORY)})})
CALLBACK_STATES = fields({f"{KEPT}?": unless_empty(_KEPT), "LayerFreezeCallback?": unless_empty(FREEZE_STATE)})
"""In a checkpoint with `KEPT`: in others, callbacks of the user's may have these names."""
TRAINER_STATE = fields({"global_step?": COUNT, "stateful_callbacks?": maybe(MAPPING)})
LOG_HISTORY = fields({"log_history?": each(fields({"step?": COUNT}))})

_SECONDS = fields({"fixed": NUMBER, "per_row": NUMBER})
_PART = fields({"forward": _SECONDS, "backward": _SECONDS})
UNIT_TIMES = fields(
    {
        "measured": MAPPING,
        "times": fields(
            {
                "prologue": _PART,
                "units": each(_PART),
                "head": _PART,
                "update_seconds_per_byte?": NUMBER,
                "reduce_seconds_per_byte?": NUMBER,
            }
        ),
    }
)


# ---------------------------------------------------------------------------------------------------------
# Records of a training
# ---------------------------------------------------------------------------------------------------------

FACTS = fields(
    {
        "model?": TEXT,
        "name_or_path?": maybe(TEXT),
        "num_parameters": COUNT,
        "world_size": SIZE,
        "global_batch_size": COUNT,
        "device": TEXT,
        "device_type?": TEXT,
        "backend?": maybe(TEXT),
        "threads": COUNT,
        "versions": MAPPING,
        "arguments": MAPPING,
    }
)
_STEP = both(
    fields(
        {
            "num_microbatches": SIZE,
            "forward": each(NUMBER, least=1),
            "backward": each(NUMBER, least=1),
            "end": NUMBER,
            "seconds": NUMBER,
        }
    ),
    _value("a step with as many times forward as backward", lambda v: len(v["forward"]) == len(v["backward"])),
)
_SLICES = fields(
    {
        "rows": SIZE,
        "tokens": SIZE,
        "parts": each(row(SIZE, each(SIZE, least=1)), least=1),
        "predicted_seconds": maybe(NUMBER),
        "latencies?": each(row(*[row(*[NUMBER] * 5)] * 2)),
    }
)
EVENT = both(
    fields(
        {
            "event": TEXT,
            "run?": maybe(TEXT),
            "global_step": COUNT,
            "epoch": NUMBER,
            "num_layers": COUNT,
            "num_frozen_layers": COUNT,
            "num_cached_layers?": COUNT,
            "pipeline_parallel_size": SIZE,
            "data_parallel_size": SIZE,
            "num_microbatches": SIZE,
            "stage_bounds": each(COUNT, least=2),
            "seconds": NUMBER,
            "bytes_moved": NUMBER,
            "phases?": values(NUMBER),
            "predicted?": fields({"schedule?": TEXT, "memory_bytes?": each(NUMBER), "steps?": each(_STEP)}),
            "slices?": _SLICES,
            "facts?": unless_empty(FACTS),
        }
    ),
    _value(
        "an event with times of whole stages",
        lambda event: all(
            len(step["forward"]) % event["pipeline_parallel_size"] == 0
            for step in event.get("predicted", {}).get("steps", ())
        ),
    ),
    _value('an event with its slices, which "slices" has', lambda e: e["event"] != "slices" or "slices" in e),
)
"""A line of `pipeline_events.jsonl`."""

_OF_KIND = {
    "log": fields({"values": MAPPING}),
    "time": fields({"steps": COUNT, "rows": COUNT, "seconds": values(NUMBER)}),
    "usage": fields(
        {
            "resident_bytes": each(COUNT, least=1),
            "device_peak_bytes?": each(COUNT),
            "num_microbatches?": maybe(SIZE),
        }
    ),
    "cache_off": fields({"reason": TEXT}),
    "end": fields({"has_ended": FLAG}),
}
METRIC = both(
    fields({"kind": TEXT, "run": TEXT, "global_step": COUNT}),
    lambda line, name: _OF_KIND.get(line["kind"], MAPPING)(line, name),
)
"""A line of `pipeline_metrics.jsonl`."""
