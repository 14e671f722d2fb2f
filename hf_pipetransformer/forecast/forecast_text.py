"""A forecast, given as plain values, as text and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ..planning.tables import MIB, align
from .advice import counted, duration
from .device_table import GIB
from .forecast import FSDP, Values, plain_trainings

MAIN_ASSUMPTIONS = 2
"""Number of assumptions that are always printed: a forecast misleads readers who do not know them."""
EPOCHS_WITH_TEACHER = 3
"""Number of epochs with columns of their own in the table of a teacher."""
LEGEND = "K × R: pipeline stages × their replicas; M: micro-batches; GiB: memory of the fullest device."
LEGEND_OF_FREEZING = (
    "frozen, cached: numbers of layers; (stores n): the outputs of n frozen layers are stored for the next epochs."
)
FROZEN_MODULES = {
    "nothing frozen": "trained, not frozen",
    "computed": "frozen, computed",
    "read": "frozen, read from the cache",
}
"""Step of `frozen_modules.estimate` -> its name in the table."""


def as_text(values: Values, title: str, verbose: bool = False) -> str:
    """Format the values of `command.answer` for a terminal, below a title. `verbose` lists all assumptions."""
    epochs, frozen = values["epochs"], values.get("frozen_modules", ())
    periods = ("num_frozen_layers", "num_cached_layers", "puts", "stages")
    courses = [list(group) for _, group in groupby(epochs, key=lambda epoch: [epoch[name] for name in periods])]
    course = _table(
        "epoch|frozen|cached|K × R|M|layers of each stage|GiB|step ms|samples/s|mostly spent on|time",
        map(_period, courses),
        (0, 5, 9),
    )
    parts = [
        title,
        "\n".join((course, LEGEND, *([LEGEND_OF_FREEZING] if epochs[-1]["num_frozen_layers"] else []))),
        _table("replica_sharding|K × R|GiB|step ms|", map(_sharding, values["sharding_choice"] or ()), (0, 1, 4)),
        f"This training: {counted(len(epochs), 'epoch')} of {counted(values['steps_per_epoch'], 'step')},"
        f" {duration(values['seconds'])}",
        _table(
            "without freezing|layout|M|GiB|time|this training is",
            (_plain(*named) for named in plain_trainings(values).items()),
            (0, 1, 5),
        )
        + _about_flops(values["flop_bound"]),
        _table(
            "your frozen modules|share of the forward|step ms|compared with computing them",
            (_frozen(step, frozen[1]) for step in frozen),
            (0, 3),
        ),
        _about_teacher(values["teacher"]) if "teacher" in values else "",
        _about_rival(values),
        _about_cache(values["cache"]),
        "\n- ".join(("Advice", *values["advice"])),
        "\n- ".join(
            ("Assumed", *values["assumed"])
            if verbose
            else ("Assumed (--verbose lists all assumptions)", *values["assumed"][:MAIN_ASSUMPTIONS])
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def as_fast(gain: float) -> str:
    """Return the speed of a training in words, from another training's time over its own: "0.93× as fast (slower)"."""
    text = f"{gain:.2f}"
    return "equally fast" if text == "1.00" else f"{text}× as fast{' (slower)' if gain < 1 else ''}"


def _table(header: str, rows: Iterable[tuple[str, ...]], left: Sequence[int] = (0,)) -> str:
    """Return a table, or an empty string without rows."""
    lines = list(rows)
    return "\n".join(align([header.split("|"), *lines], left=left)) if lines else ""


def _period(period: Sequence[Values]) -> tuple[str, ...]:
    """Return the row for consecutive epochs with equal steps."""
    first, last = period[0], period[-1]
    limit, share = max(first["shares"].items(), key=lambda item: item[1])
    return (
        str(first["epoch"]) if first is last else f"{first['epoch']}-{last['epoch']}",
        str(first["num_frozen_layers"]),
        f"{first['num_cached_layers']} (stores {first['puts']})" if first["puts"] else str(first["num_cached_layers"]),
        _layout(first),
        str(first["num_microbatches"]),
        "|".join("+".join(map(str, sizes)) for sizes in first["stage_layers"]),
        _gib(first),
        _ms(first),
        f"{first['samples_per_second']:,.0f}",
        f"{limit} {share:.0%}",
        duration(sum(epoch["seconds"] for epoch in period)),
    )


def _sharding(step: Values) -> tuple[str, ...]:
    verdict = "chosen" if step["chosen"] else "" if step["fits"] else "does not fit"
    return step["replica_sharding"], _layout(step), _gib(step), _ms(step) if step["fits"] else "-", verdict


def _plain(name: str, step: Values) -> tuple[str, ...]:
    layout = f"{step['replicas']} shards" if name == FSDP else _layout(step)
    ends = (duration(step["seconds"]), as_fast(step["speed_up"])) if step["fits"] else ("does not fit", "-")
    return name, layout, str(step["num_microbatches"]), _gib(step), *ends


def _frozen(step: Values, computed: Values) -> tuple[str, ...]:
    gain = "-" if step is computed else as_fast(computed["step_seconds"] / step["step_seconds"])
    return FROZEN_MODULES[step["what"]], f"{step['forward_share']:.1%}", _ms(step), gain


def _about_teacher(teacher: Values) -> str:
    """Return the lines on a teacher: the epochs that compute it or read its outputs, and the stored outputs."""
    epochs = teacher["epochs"]
    shown = epochs[:EPOCHS_WITH_TEACHER]
    header = ["teacher", *(f"epoch {step['epoch']}" for step in shown), counted(len(epochs), "epoch"), ""]
    rows = [("computed in each epoch", "computed_seconds", "-")]
    if teacher["off"] is None:
        rows.append(("read from epoch 2 on", "read_seconds", as_fast(teacher["speed_up"])))
    lines = [
        (name, *(duration(step[key]) for step in shown), duration(teacher[key]), gain) for name, key, gain in rows
    ]
    above = (
        f"Teacher: {teacher['model']}, {teacher['parameters']:,} parameters"
        f" ({teacher['weight_bytes'] / GIB:,.1f} GiB), {teacher['flops_share']:.0%} of the FLOPs of a step."
    )
    return "\n".join((above, _table("|".join(header), lines, (0, len(header) - 1)), *_stored_of(teacher)))


def _stored_of(teacher: Values) -> Iterator[str]:
    """Yield the line on the stored outputs of each sample; no line if outputs are not read."""
    if teacher["off"] is not None:
        return
    names = [name or "the teacher" for name in teacher["stored"]]
    what = f"the output of {names[-1]}"
    if teacher["head"] is not None:
        what += f", on which {teacher['head']} runs again"
    limit = teacher["limit_bytes"]
    share = teacher["stored_share"]
    part = "all" if share == 1 else f"{share:.0%} of the"
    room = (
        "the limit of the cache is not known (--activation-cache-max-gib, --disk-gib)"
        if limit is None
        else f"the cache may take {limit / GIB:,.1f} GiB, enough for {part} samples"
    )
    yield f"Stored for each sample: {teacher['sample_bytes']:,} bytes ({what})."
    size = teacher["node_bytes"]
    on_node = f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"
    yield f"On each node: {on_node}; {room}."


def _layout(step: Values) -> str:
    return f"{step['stages']} × {step['replicas']}"


def _gib(step: Values) -> str:
    return f"{step['largest_stage_bytes'] / GIB:,.1f}"


def _ms(step: Values) -> str:
    return f"{1e3 * step['step_seconds']:,.1f}"


def _about_flops(bound: float) -> str:
    """Return the line on FLOPs below the comparison; empty if the training saves none."""
    gain = as_fast(bound)
    return (
        "" if gain == "equally fast" else f"\nCounting FLOPs alone, this training would be {gain} as without freezing."
    )


def _about_rival(values: Values) -> str:
    epochs = values["plain_epochs_of_equal_cost"]
    if epochs is None:
        return ""
    by = "FSDP" if values["fastest_plain"] == FSDP else values["fastest_plain"]
    return (
        f"In the same time, {epochs:.1f} epochs can be trained without freezing ({by}). With a learning rate tuned\n"
        "for so many epochs, that may be more accurate: try it first (docs/when_it_pays.md)."
    )


def _about_cache(cache: Values) -> str:
    if not cache["generation_bytes_per_node"]:
        return ""
    largest, peak, memory, disk = (
        None if cache[name] is None else f"{cache[name] / GIB:,.1f} GiB"
        for name in ("generation_bytes_per_node", "peak_bytes_per_node", "host_memory_bytes", "host_disk_bytes")
    )
    both = "" if peak == largest else f", and {peak} while the next outputs are stored beside them"
    in_memory = f"A node's memory has {memory} for it" if memory else "A node's memory is not known"
    on_disk = f"its disk has {disk} for it" if disk else "its free disk is not known (--disk-gib)"
    return f"Cache on each node: up to {largest}{both}.\n{in_memory}; {on_disk}."
