"""A forecast, given as plain values, as text and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from ..planning.tables import align
from .advice import duration
from .device_table import GIB
from .forecast import FSDP, Values, plain_trainings

ESTIMATED = "These are estimates from data sheets; nothing was measured. --verbose lists what is assumed."
FASTER = "this training is"
"""Heading of the column that compares this training with another one."""


def as_text(values: Values, title: str, is_verbose: bool = False) -> str:
    """Format what `command.answer` returns for a terminal, below a title.

    Args:
        values: what `command.answer` returns.
        title: the first line.
        is_verbose: whether to list all assumptions.
    """
    epochs, frozen = values["epochs"], values.get("frozen_modules", ())
    periods = ("num_frozen_layers", "num_cached_layers", "puts", "stages")
    courses = [list(group) for _, group in groupby(epochs, key=lambda epoch: [epoch[name] for name in periods])]
    bound = ("counted FLOPs alone", "", "", "", "", _times(values["flop_bound"]))
    parts = [
        title,
        _table(
            "epoch|frozen|cached|K × R|M|stages|GiB|step ms|samples/s|spent on|time", map(_period, courses), (0, 5, 9)
        ),
        _table("sharding|K × R|GiB|step ms|", map(_sharding, values["sharding_choice"] or ()), (0, 1, 4)),
        f"{len(epochs)} epochs of {values['steps_per_epoch']:,} steps: {duration(values['seconds'])}",
        _table(
            f"nothing frozen|layout|M|GiB|time|{FASTER}",
            [*(_plain(*named) for named in plain_trainings(values).items()), bound],
            (0, 1),
        ),
        # compared with the second way: computed, as the stock Trainer does it
        _table(
            "your frozen modules|of the forward|step ms|compared with computed",
            (_frozen(step, frozen[1]) for step in frozen),
        ),
        _about_rival(values),
        _about_cache(values["cache"]),
        "\n- ".join(("Advice", *values["advice"])),
        "\n- ".join(("Assumed", *values["assumed"])) if is_verbose else ESTIMATED,
    ]
    return "\n\n".join(part for part in parts if part)


def _table(header: str, rows: Iterable[tuple[str, ...]], left: Sequence[int] = (0,)) -> str:
    """Return a table, or nothing without rows."""
    lines = list(rows)
    return "\n".join(align([header.split("|"), *lines], left=left)) if lines else ""


def _period(period: Sequence[Values]) -> tuple[str, ...]:
    """Return the row of consecutive epochs that are alike."""
    first, last = period[0], period[-1]
    limit, share = max(first["shares"].items(), key=lambda item: item[1])
    return (
        str(first["epoch"]) if first is last else f"{first['epoch']}-{last['epoch']}",
        str(first["num_frozen_layers"]),
        f"{first['num_cached_layers']} (puts {first['puts']})" if first["puts"] else str(first["num_cached_layers"]),
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
    ends = (duration(step["seconds"]), _times(step["speed_up"])) if step["fits"] else ("-", "does not fit")
    return name, layout, str(step["num_microbatches"]), _gib(step), *ends


def _frozen(step: Values, computed: Values) -> tuple[str, ...]:
    gain = computed["step_seconds"] / step["step_seconds"]
    return step["what"], f"{step['forward_share']:.1%}", _ms(step), _times(gain)


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times as fast"


def _layout(step: Values) -> str:
    return f"{step['stages']} × {step['replicas']}"


def _gib(step: Values) -> str:
    return f"{step['largest_stage_bytes'] / GIB:,.1f}"


def _ms(step: Values) -> str:
    return f"{1e3 * step['step_seconds']:,.1f}"


def _about_rival(values: Values) -> str:
    epochs = values["plain_epochs_of_equal_cost"]
    if epochs is None:
        return ""
    by = "FSDP" if values["fastest_plain"] == FSDP else values["fastest_plain"]
    return (
        f"Equal cost: plain training for {epochs:.1f} epochs ({by}, nothing frozen) takes as long.\n"
        "With a learning rate tuned for that many epochs it may be more accurate: try it first (docs/when_it_pays.md)."
    )


def _about_cache(cache: Values) -> str:
    if not cache["generation_bytes_per_node"]:
        return ""
    memory, disk = (
        "unknown" if size is None else f"{size / GIB:,.1f} GiB"
        for size in (cache["host_memory_bytes"], cache["host_disk_bytes"])
    )
    return (
        f"Cache on each node: {cache['generation_bytes_per_node'] / GIB:,.2f} GiB a generation, at most"
        f" {cache['peak_bytes_per_node'] / GIB:,.2f} GiB at once; page cache {memory}, disk {disk}"
    )
