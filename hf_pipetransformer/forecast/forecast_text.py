"""A forecast as plain values for JSON, and these as text and tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from ..planning.tables import align
from .advice import GIB, advise, duration
from .forecast import FSDP, Forecast, Job, Step

ALWAYS_ASSUMED = (
    "every sample is as long as --seq; padding and evaluation are not counted",
    "gradients are reduced after the backward, not during it; messages between stages take no time; FSDP's transfers"
    " take place while it computes",
    "changing over to another plan and filling the cache cost nothing (measured: a step, and up to 4%)",
    "of tensors between stages, `receive_bytes` for each stage are in the memory figures, but up to 256 MiB of buffers"
    " that schedules for other shapes of batch keep are not; nor is what NCCL takes for its `communicators`",
    "the allocator's waste is not in the memory figures",
    "a table's times are those of bf16 (V100: fp16)",
    "the model may be cached; the trainer finds that out by running samples of the data",
)

Values = Mapping[str, Any]


# ------------------------------------------------------------------------------------------------ JSON
def as_values(result: Forecast, model: str, assumed: Sequence[str]) -> dict[str, Any]:
    """Return the forecast as plain values for JSON; times in seconds, sizes in bytes.

    Args:
        result: the forecast.
        model: name of the model's class.
        assumed: assumptions of this forecast, in addition to those of every forecast.
    """
    job, host, sharding = result.job, result.device.host, result.sharding_choice
    gain = result.speed_up_over(result.fastest_plain)
    plain = {
        name: {
            **_step_values(step),
            "seconds": result.seconds_of(name),
            "speed_up": result.speed_up_over(name),
        }
        for name, step in result.plain.items()
    }
    if FSDP in plain:
        plain[FSDP]["num_microbatches"] = result.plain[FSDP].num_batches
    parts = job.gradient_accumulation_steps
    return {
        "model": model,
        "devices": job.num_devices,
        "batch": job.batch,
        "gradient_accumulation_steps": parts,
        "samples": job.num_samples,
        "steps_per_epoch": job.steps_per_epoch,
        "memory_budget_bytes": result.device.memory_budget_bytes,
        "replica_sharding": result.first.replica_sharding,
        "sharding_choice": [{**_step_values(step), "chosen": step.layout == result.first} for step in sharding]
        or None,
        "pipeline_schedule": result.first.schedule,
        "epochs": [
            {"epoch": number, **_epoch_values(step), "seconds": step.seconds * job.steps_per_epoch}
            for number, step in enumerate(result.epochs, 1)
        ],
        "seconds": result.seconds,
        "compared_with": {name.replace(" ", "_"): values for name, values in plain.items() if name != FSDP},
        "fsdp": plain.get(FSDP),
        "communicators": num_communicators({step.layout.pipeline_parallel_size for step in result.epochs}, job),
        "flop_bound": result.flop_bound,
        "fastest_plain": result.fastest_plain,
        # how many epochs the fastest training without freezing runs in the time of this training
        "plain_epochs_of_equal_cost": None if gain is None or not result.freezes else len(result.epochs) / gain,
        "cache": {
            "generation_bytes_per_node": result.cache_bytes,
            "peak_bytes_per_node": result.cache_peak_bytes,
            "off": result.cache_off,
            "host_memory_bytes": host.memory_bytes,
            "host_disk_bytes": host.disk_bytes,
        },
        "advice": advise(result),
        "assumed": [*assumed, *ALWAYS_ASSUMED],
    }


def num_communicators(stages: Collection[int], job: Job) -> int:
    """Largest number of NCCL communicators of a process, without those for tied weights and token slices.

    One of all processes; for each K one of the pipeline, one of the replicas, and one of two ranks with each neighbour
    in a schedule. They stay until the process ends, as numbers of stages come back.
    """
    world = job.num_devices
    return (world > 1) + sum((k > 1) + (k < world) + min(k - 1, 2) for k in stages if world > 1)


def _step_values(step: Step) -> dict[str, Any]:
    layout, stage_bytes = step.layout, step.stage_bytes
    return {
        "replica_sharding": layout.replica_sharding,
        "pipeline_schedule": layout.schedule,
        "stages": layout.pipeline_parallel_size,
        "replicas": layout.data_parallel_size,
        "virtual_stages": layout.num_virtual_stages,
        "num_microbatches": layout.num_microbatches,
        "stage_bytes": stage_bytes,
        "largest_stage_bytes": max(stage_bytes),
        "receive_bytes": [step.costs.received_bytes(layout, stage) for stage in range(layout.pipeline_parallel_size)],
        "fits": step.fits,
        "step_seconds": step.seconds,
    }


def _epoch_values(step: Step) -> dict[str, Any]:
    layout = step.layout
    return {
        "num_frozen_layers": layout.num_frozen_layers,
        "num_cached_layers": layout.num_cached_layers,
        "puts": step.puts,
        **_step_values(step),
        "stage_bounds": list(layout.stage_bounds),
        "stage_layers": [list(map(len, layout.ranges_of(stage))) for stage in range(layout.pipeline_parallel_size)],
        "bubble": step.prediction.timeline.bubble,
        "load_seconds": step.load_seconds,
        "samples_per_second": step.samples_per_second,
        "shares": step.shares,
    }


# ------------------------------------------------------------------------------------------------ text
def as_text(values: Values, title: str) -> str:
    """Format what `as_values` returns for a terminal, below a title."""
    epochs = values["epochs"]
    periods = ("num_frozen_layers", "num_cached_layers", "puts", "stages")
    courses = [list(group) for _, group in groupby(epochs, key=lambda epoch: [epoch[name] for name in periods])]
    plain = {name.replace("_", " "): step for name, step in values["compared_with"].items()}
    if values["fsdp"] is not None:
        plain[FSDP] = values["fsdp"]
    bound = ("counted FLOPs alone", "", "", "", "", f"×{values['flop_bound']:.2f}")
    parts = [
        title,
        _table(
            "epoch frozen cached K×R M stages GiB step_ms samples/s spent_on time", map(_period, courses), (0, 5, 9)
        ),
        _table("sharding K×R GiB step_ms -", map(_sharding, values["sharding_choice"] or ()), (0, 1, 4)),
        f"{len(epochs)} epochs of {values['steps_per_epoch']:,} steps: {duration(values['seconds'])}",
        _table(
            "compared_with layout M GiB time speed-up", [*(_plain(*named) for named in plain.items()), bound], (0, 1)
        ),
        _about_frozen(values.get("frozen_modules") or ()),
        _about_rival(values),
        _about_cache(values["cache"]),
        "\n- ".join(("Advice", *values["advice"])),
        "\n- ".join(("Assumed", *values["assumed"])),
    ]
    return "\n\n".join(part for part in parts if part)


def _about_frozen(steps: Sequence[Values]) -> str:
    """What the modules that the user has frozen cost, over the second way: computed, as the stock Trainer does it."""
    rows = [
        (
            step["what"],
            f"{step['forward_share']:.1%}",
            f"{1e3 * step['step_seconds']:,.1f}",
            f"×{steps[1]['step_seconds'] / step['step_seconds']:.2f}",
        )
        for step in steps
    ]
    return _table("your_frozen_modules of_the_forward step_ms speed-up", rows, (0,))


def _table(header: str, rows: Any, left: Sequence[int]) -> str:
    """Return a table, or nothing without rows; of the header's words, "_" is a blank, and "-" is an empty one."""
    names = header.replace("×", " × ").replace(" × ", "\0×\0").split()
    heads = tuple(name.replace("\0", " ").replace("_", " ").strip("-") for name in names)
    lines = list(rows)
    return "\n".join(align([heads, *lines], left=left)) if lines else ""


def _period(period: Sequence[Values]) -> tuple[str, ...]:
    first, last = period[0], period[-1]
    cached = str(first["num_cached_layers"])
    limit, share = max(first["shares"].items(), key=lambda item: item[1])
    return (
        str(first["epoch"]) if first is last else f"{first['epoch']}-{last['epoch']}",
        str(first["num_frozen_layers"]),
        f"{cached} (puts {first['puts']})" if first["puts"] else cached,
        _layout(first),
        str(first["num_microbatches"]),
        "|".join("+".join(map(str, sizes)) for sizes in first["stage_layers"]),
        _gib(first),
        _ms(first),
        f"{first['samples_per_second']:,.0f}",
        f"{limit} {share:.0%}",
        duration(sum(epoch["seconds"] for epoch in period)),
    )


def _sharding(each: Values) -> tuple[str, ...]:
    return each["replica_sharding"], _layout(each), _gib(each), _ms(each) if each["fits"] else "-", _verdict(each)


def _plain(name: str, each: Values) -> tuple[str, ...]:
    layout = f"{each['replicas']} shards" if name == FSDP else _layout(each)
    gain = f"×{each['speed_up']:.2f}" if each["fits"] else "does not fit"
    time = duration(each["seconds"]) if each["fits"] else "-"
    return name, layout, str(each["num_microbatches"]), _gib(each), time, gain


def _verdict(each: Values) -> str:
    return "chosen" if each["chosen"] else "" if each["fits"] else "does not fit"


def _layout(each: Values) -> str:
    return f"{each['stages']} × {each['replicas']}"


def _gib(each: Values) -> str:
    return f"{each['largest_stage_bytes'] / GIB:,.1f}"


def _ms(each: Values) -> str:
    return f"{1e3 * each['step_seconds']:,.1f}"


def _about_rival(values: Values) -> str:
    epochs = values["plain_epochs_of_equal_cost"]
    if epochs is None:
        return ""
    by = "FSDP" if values["fastest_plain"] == FSDP else values["fastest_plain"]
    return (
        f"Equal cost: plain training for {epochs:.1f} epochs ({by}, nothing frozen) takes as long.\n"
        "With a learning rate tuned for so many epochs it may reach more: try it first (docs/when_it_pays.md)."
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
