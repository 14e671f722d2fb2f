"""A forecast as text, tables and plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from ..freezing.schedule_cost import WORTH_FREEZING
from ..planning.plan import PipelinePlan, align
from ..planning.plan_choice import WORTH_A_LONGER_PIPELINE, fits, largest_stage_bytes
from ..token_slices.slice_planning import MINIMAL_GAIN, RowSlices
from ..token_slices.slice_timeline import LEAST_GAIN_OF_CUTS
from .forecast import Epoch, Forecast, StaticRun, forecast_seconds, plain_step_seconds, plan_at_start
from .fsdp import FsdpRun

GIB = 2**30

HARDLY_FASTER = 1.10
"""Fewer devices are recommended if the training takes at most this many times as long on them."""
START_SECONDS = 60.0
"""Cost of starting on many devices, in seconds; if they save less than this, fewer are recommended."""
MOST_LENGTHS = 8
"""Maximum number of slice lengths that are written out."""
FULL_PIPELINE = 0.2
"""Fraction of forward and backward that devices may wait in a pipeline that is considered full."""

ALWAYS_ASSUMED = (
    "every sample is as long as --seq; padding and evaluation are not counted",
    "gradients are reduced after the backward, not during it; messages between stages take no time; FSDP's transfers"
    " take place while it computes",
    "changing over to another plan and filling the cache cost nothing (measured: a step, and up to 4%)",
    "the allocator's waste is not in the memory figures; they are those without autocast (bf16=True), with which"
    " activations are smaller, and 16-bit copies of the weights are kept",
    "all weights train, without gradient checkpointing; a table's times are those of bf16 (V100: fp16)",
)
MAY_BE_CACHED = "the model may be cached; the trainer finds that out by running samples of the data"
"""Assumed if sequences are not split."""


def advise(result: Forecast) -> list[str]:
    """Advice for the user who launches the training, from the forecast; at least one sentence."""
    job, gain = result.job, result.speed_up_over(result.best_static)
    freezes = result.epochs[-1].num_frozen > 0
    sentences = [*_about_sharding(result), *_about_pipelining(result), *_about_fsdp(result)]
    if freezes and gain is not None and gain < WORTH_FREEZING:
        sentences.append(
            f"Gain below {100 * (WORTH_FREEZING - 1):.0f}% (×{gain:.2f} over the best static layout): do not freeze;"
            f" set freeze_policy='none', pipeline_parallel_size={result.best_static.plan.pipeline_parallel_size}."
        )
    if freezes and job.caches and result.cache_off:
        sentences.append(f"Frozen layers are not cached: {result.cache_off}.")
    host = result.machine.host
    if host.memory_bytes is not None and result.cache_peak_bytes > host.memory_bytes:
        sentences.append(
            f"The cache exceeds a node's memory ({result.cache_peak_bytes / GIB:,.1f} GiB at most, of"
            f" {host.memory_bytes / GIB:,.1f} GiB): then it is read from disk."
        )
    sentences += [*_about_slices(result), *_about_fewer_devices(result)]
    k = result.first.pipeline_parallel_size
    return sentences or [f"Train it so, K = {k} at the start: no other layout is predicted to be much faster."]


def _about_fsdp(result: Forecast) -> list[str]:
    """Advice on FSDP, which has no bubble and replicates nothing, but moves all parameters in each step."""
    fsdp = result.fsdp
    if fsdp is None or result.fastest_plain is not fsdp:
        return []
    gain = fsdp.seconds / result.seconds
    freezing = (
        "FSDP can freeze layers as well, without a cache of their outputs: set pipeline_parallel_size=1, fsdp=True and"
        " fsdp_config={'version': 2}."
    )
    if gain < WORTH_FREEZING:
        return [
            f"Use FSDP with plain transformers instead: this training is predicted to be only ×{gain:.2f} as fast, and"
            " FSDP freezes nothing.",
            freezing,
        ]
    if fsdp.seconds * HARDLY_FASTER < result.best_static.seconds:
        return [
            "Without freezing, FSDP is predicted to be"
            f" {result.best_static.seconds / fsdp.seconds:.2f} times as fast as the best pipeline.",
            freezing,
        ]
    return []


def _about_sharding(result: Forecast) -> list[str]:
    """The sharding to set in the training, if it was chosen."""
    job, choice, plan = result.job, result.sharding_choice, result.first
    if choice is None or not fits(plan):
        return []
    k, sharding = plan.pipeline_parallel_size, plan.replica_sharding
    settings = f"Set replica_sharding={sharding!r}"
    least = f"the least sharding with which {k} stage{'' if k == 1 else 's'} fit{'s' if k == 1 else ''}"
    if job.pipeline_parallel_size != "auto":
        return [f"{settings}: {least}."]
    with_auto = plan_at_start(replace(job, replica_sharding=sharding), result.workload, result.machine)
    # "auto" where it finds this K: then K falls as in the forecast, by the memory of a device
    size = "'auto'" if with_auto.pipeline_parallel_size == k else str(k)
    return [
        f"{settings}, pipeline_parallel_size={size} (K = {k} at the start): {least}, and the shortest pipeline that is"
        f" predicted to take at most {WORTH_A_LONGER_PIPELINE:.0%} longer than the fastest."
    ]


def _about_pipelining(result: Forecast) -> list[str]:
    job, ks = result.job, [epoch.plan.pipeline_parallel_size for epoch in result.epochs]
    budget, needed = result.machine.memory_budget_bytes, largest_stage_bytes(result.first)
    sentences = []
    fits = budget is None or needed <= budget
    if max(ks) == 1 and fits and result.best_static.plan.pipeline_parallel_size == 1:
        frozen = result.epochs[-1].num_frozen > 0
        caches = any(epoch.num_cached for epoch in result.epochs)
        sharding = result.first.replica_sharding
        static = "plain DDP" if sharding == "none" else f"data parallelism with replica_sharding={sharding!r}"
        what = ("freeze + cache only" if caches else "freeze only") if frozen else static
        sentences.append(f"K = 1 throughout: {what} (pipeline_parallel_size=1); pipelining adds nothing here.")
    elif not result.ddp.fits and ks[0] > 1:
        assert budget is not None
        sentences.append(
            f"Plain DDP does not fit: K = 1 needs {(budget + result.ddp.missing_bytes) / GIB:,.1f} GiB for training,"
            f" and a device has {budget / GIB:,.1f} GiB. Hence {ks[0]} stages at the start."
        )
    if not fits:
        assert budget is not None
        sentences.append(
            f"It does not fit: with K = {ks[0]} the largest stage needs {needed / GIB:,.1f} GiB, and a device has"
            f" {budget / GIB:,.1f} GiB. Raise pipeline_parallel_size, or lower the batch."
        )
    elif job.pipeline_parallel_size != "auto":
        auto = forecast_seconds(replace(job, pipeline_parallel_size="auto"), result.workload, result.machine)
        if auto * HARDLY_FASTER < result.seconds:
            sentences.append(
                f"K = {ks[0]} was asked for; pipeline_parallel_size='auto' is predicted to be"
                f" {result.seconds / auto:.2f} times as fast."
            )
    if ks[-1] < ks[0]:
        when = next(epoch.number for epoch in result.epochs if epoch.plan.pipeline_parallel_size < ks[0])
        sentences.append(f"From epoch {when} on fewer stages do, and the devices that become free are replicas.")
    return sentences


def _about_slices(result: Forecast) -> list[str]:
    """Advice on whether splitting sequences is worth it in the whole training."""
    job = result.job
    if job.token_slices == "off":
        return []
    off = forecast_seconds(replace(job, token_slices="off"), result.workload, result.machine)
    sentences = []
    if off * (1 + MINIMAL_GAIN) < result.seconds:
        sentences.append(
            f"Set token_slices='off': frozen layers are then cached, which is predicted to be"
            f" {result.seconds / off:.2f} times as fast."
        )
    elif not any(epoch.sliced for epoch in result.epochs):
        sentences.append("Set token_slices='off': too little is gained by cutting sequences here.")
    return sentences


def _about_fewer_devices(result: Forecast) -> list[str]:
    """Advice on whether fewer devices, with the same global batch, would be sufficient."""
    job, budget = result.job, result.machine.memory_budget_bytes
    if budget is not None and largest_stage_bytes(result.first) > budget:
        return []
    for n in (n for n in range(1, job.num_devices) if job.num_devices % n == 0):
        if isinstance(job.pipeline_parallel_size, int) and n % job.pipeline_parallel_size:
            continue
        fewer = replace(job, num_devices=n)
        try:
            first = plan_at_start(fewer, result.workload, result.machine)
            seconds = forecast_seconds(fewer, result.workload, result.machine)
        except ValueError:  # it does not fit on so few devices
            continue
        if budget is not None and largest_stage_bytes(first) > budget:
            continue
        if seconds <= result.seconds * HARDLY_FASTER or seconds - result.seconds < START_SECONDS:
            return [
                f"Too short for so many devices: use {n}, which take {_duration(seconds)} where {job.num_devices} take"
                f" {_duration(result.seconds)}."
            ]
    return []


# ------------------------------------------------------------------------------------------------ tables
def as_text(result: Forecast, title: str, assumed: Sequence[str]) -> str:
    """Format the forecast for a terminal.

    Args:
        title: the model and the training.
        assumed: assumptions of this forecast, in addition to those of every forecast.
    """
    epochs = [
        ("epoch", "frozen", "cached", "K × R", "M", "stages", "GiB", "step ms", "samples/s", "spent on", "time"),
        *(_period_row(period) for period in result.periods),
    ]
    statics: list[tuple[str, ...]] = [("compared with", "layout", "M", "GiB", "time", "speed-up")]
    for name, static in _statics(result):
        gain = result.speed_up_over(static)
        statics.append(
            (
                name,
                _layout(static.plan.pipeline_parallel_size, static.plan.data_parallel_size),
                str(static.num_microbatches),
                f"{static.largest_bytes / GIB:,.1f}",
                _duration(static.seconds) if static.fits else "-",
                "does not fit" if gain is None else f"×{gain:.2f}",
            )
        )
    if result.fsdp is not None:
        statics.append(_fsdp_row(result, result.fsdp))
    statics.append(("counted FLOPs alone", "", "", "", "", f"×{result.flop_bound:.2f}"))
    parts = [
        title,
        "\n".join(align(epochs, left=(0, 5, 9))),
        _about_choice(result),
        _about_schedules(result),
        _about_cuts(result),
        f"{len(result.epochs)} epochs of {result.job.steps_per_epoch:,} steps: {_duration(result.seconds)}",
        "\n".join(align(statics, left=(0, 1))),
        _about_rival(result),
        _about_cache(result),
        "Advice\n" + "\n".join(f"- {sentence}" for sentence in advise(result)),
        "Assumed\n" + "\n".join(f"- {sentence}" for sentence in _all_assumed(result, assumed)),
    ]
    return "\n\n".join(part for part in parts if part)


def _fsdp_row(result: Forecast, fsdp: FsdpRun) -> tuple[str, ...]:
    gain = result.speed_up_over(fsdp)
    return (
        "plain FSDP",
        f"{fsdp.num_devices} shards",
        str(fsdp.num_microbatches),
        f"{fsdp.largest_bytes / GIB:,.1f}",
        _duration(fsdp.seconds) if fsdp.fits else "-",
        "does not fit" if gain is None else f"×{gain:.2f}",
    )


def _about_choice(result: Forecast) -> str:
    """The plans that the sharding was chosen from, one for each number of stages; empty if the sharding was given."""
    choice = result.sharding_choice
    if choice is None:
        return ""
    rows: list[tuple[str, ...]] = [("sharding", "K × R", "GiB", "step ms", "")]
    for plan in choice.considered:
        is_possible, seconds = fits(plan), plain_step_seconds(result.job, plan)
        rows.append(
            (
                plan.replica_sharding,
                _layout(plan.pipeline_parallel_size, plan.data_parallel_size),
                f"{largest_stage_bytes(plan) / GIB:,.1f}",
                f"{1e3 * seconds:,.1f}" if is_possible else "-",
                "chosen" if plan is choice.plan else "" if is_possible else "does not fit",
            )
        )
    return "\n".join(align(rows, left=(0, 1, 4)))


def _about_schedules(result: Forecast) -> str:
    """The plans that the first schedule was chosen from; empty if it was given."""
    choice = result.schedule_choice
    if choice is None:
        return ""
    by = "times" if choice.chosen.plan.goes_by_times else "FLOPs"
    rows: list[tuple[str, ...]] = [("schedule", "V", "M", "GiB", "step ms", f"by {by}", "weighed", "")]
    for each in choice.considered:
        plan = each.plan
        rows.append(
            (
                plan.schedule,
                str(plan.num_virtual_stages),
                str(plan.num_microbatches_for(plan.rows_per_pipeline)),
                f"{largest_stage_bytes(plan) / GIB:,.1f}",
                f"{1e3 * plain_step_seconds(result.job, plan):,.1f}",
                f"{each.step:.2f}",
                f"{each.weighed:.2f}",
                "chosen" if each is choice.chosen else "" if each.fits else "does not fit",
            )
        )
    return "\n".join(align(rows, left=(0, 7)))


def _period_row(period: Sequence[Epoch]) -> tuple[str, ...]:
    first, plan = period[0], period[0].plan
    cached = str(plan.num_cached_layers)
    return (
        _epochs(period),
        str(first.num_frozen),
        f"{cached} (puts {first.puts})" if first.puts else cached,
        _layout(plan.pipeline_parallel_size, plan.data_parallel_size),
        str(first.num_microbatches),
        "|".join(_sizes(plan, stage) for stage in range(plan.pipeline_parallel_size)),
        f"{max(first.stage_bytes) / GIB:,.1f}",
        f"{1e3 * first.step_seconds:,.1f}",
        f"{first.samples_per_second:,.0f}",
        f"{first.limit} {100 * first.shares[first.limit]:.0f}%",
        _duration(sum(epoch.seconds for epoch in period)),
    )


def _sizes(plan: PipelinePlan, stage: int) -> str:
    """Return the numbers of layers of a stage's virtual stages: "3", or "3+3" if it has two."""
    return "+".join(str(len(units)) for units in plan.ranges_of(stage))


def _statics(result: Forecast) -> list[tuple[str, StaticRun]]:
    named = [("best static layout", result.best_static), ("plain DDP", result.ddp)]
    if result.static_pipeline is not None:
        named.append(("static pipeline", result.static_pipeline))
    return named


def rival_epochs(result: Forecast) -> float | None:
    """Return how many epochs the fastest training without freezing runs in the time of this training.

    None if nothing is frozen, or if nothing else fits.
    """
    gain = result.speed_up_over(result.fastest_plain)
    return None if gain is None or not result.epochs[-1].num_frozen else len(result.epochs) / gain


def _about_rival(result: Forecast) -> str:
    epochs = rival_epochs(result)
    if epochs is None:
        return ""
    by = "FSDP" if isinstance(result.fastest_plain, FsdpRun) else "best static layout"
    return (
        f"Equal cost: plain training for {epochs:.1f} epochs ({by}, nothing frozen) takes as long.\n"
        "With a learning rate tuned for so many epochs it may reach more: try it first (docs/when_it_pays.md)."
    )


def _about_cuts(result: Forecast) -> str:
    """Describe how batches are split along their tokens, and the speed-up; empty if this was not requested."""
    if result.job.token_slices == "off":
        return ""
    lines = ["Token slices (the activation cache is off: it keeps whole samples)"]
    for period in result.periods:
        first = period[0]
        lines.append(f"- epoch{'' if len(period) == 1 else 's'} {_epochs(period)}: {_cut_of(first)}")
    return "\n".join(lines)


def _cut_of(epoch: Epoch) -> str:
    if epoch.plan.pipeline_parallel_size == 1:
        return "one stage, nothing to cut"
    if epoch.sliced is None:
        m, waiting = epoch.num_microbatches, epoch.bubble
        reason = (
            f"{m} micro-batches fill the pipeline"
            if waiting <= FULL_PIPELINE
            else f"with {m} micro-batches devices wait {waiting:.0%} of the time, and slices would not save"
            f" {LEAST_GAIN_OF_CUTS:.0%}"
        )
        return f"token slices gain too little here: {reason}"
    gain = epoch.uncut_step_seconds / epoch.step_seconds
    return (
        f"{describe_parts(epoch.sliced.parts)}; ×{gain:.2f} over {epoch.prediction.num_microbatches} micro-batches"
        f" ({1e3 * epoch.uncut_step_seconds:,.1f} ms a step)"
    )


def describe_parts(parts: Sequence[RowSlices]) -> str:
    """Samples of the parts and tokens of their slices: "2 parts of 4 samples in 3 slices (512 + 2×256 tokens)"."""
    words = []
    for (rows, lengths), count in Counter((part.rows, part.lengths) for part in parts).items():
        slices = "one slice" if len(lengths) == 1 else f"{len(lengths)} slices ({_run_together(lengths)} tokens)"
        words.append(f"{count} part{'' if count == 1 else 's'} of {rows} sample{'' if rows == 1 else 's'} in {slices}")
    return ", ".join(words)


def _run_together(lengths: Sequence[int]) -> str:
    """Combine consecutive equal lengths; if there are too many different ones, give the longest and the shortest."""
    runs = [(length, len(list(equal))) for length, equal in groupby(lengths)]
    if len(runs) > MOST_LENGTHS:
        return f"{max(lengths)} to {min(lengths)}"
    return " + ".join(str(length) if count == 1 else f"{count}×{length}" for length, count in runs)


def _all_assumed(result: Forecast, assumed: Sequence[str]) -> list[str]:
    may_be_cached = [MAY_BE_CACHED] if result.job.token_slices == "off" else []
    return [*assumed, *ALWAYS_ASSUMED, *may_be_cached]


def _epochs(period: Sequence[Epoch]) -> str:
    first, last = period[0].number, period[-1].number
    return str(first) if first == last else f"{first}-{last}"


def _about_cache(result: Forecast) -> str:
    if not result.cache_bytes:
        return ""
    host = result.machine.host

    def of(size: float | None) -> str:
        return "unknown" if size is None else f"{size / GIB:,.1f} GiB"

    return (
        f"Cache on each node: {result.cache_bytes / GIB:,.2f} GiB a generation, at most"
        f" {result.cache_peak_bytes / GIB:,.2f} GiB at once; page cache {of(host.memory_bytes)}, disk"
        f" {of(host.disk_bytes)}"
    )


def _layout(k: int, r: int) -> str:
    return f"{k} × {r}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


# ------------------------------------------------------------------------------------------------ JSON
def as_values(result: Forecast, model: str, profile: str, assumed: Sequence[str]) -> dict[str, Any]:
    """The forecast as plain values for JSON; times in seconds, sizes in bytes."""
    job, budget = result.job, result.machine.memory_budget_bytes
    return {
        "model": model,
        "profile": profile,
        "devices": job.num_devices,
        "batch": job.batch,
        "gradient_accumulation_steps": job.gradient_accumulation_steps,
        "samples": job.num_samples,
        "steps_per_epoch": job.steps_per_epoch,
        "memory_budget_bytes": budget,
        "token_slices": job.token_slices,
        "replica_sharding": result.first.replica_sharding,
        "sharding_choice": _choice_values(result),
        "pipeline_schedule": result.first.schedule,
        "schedule_choice": _schedule_values(result),
        "epochs": [_epoch_values(epoch) for epoch in result.epochs],
        "seconds": result.seconds,
        "compared_with": {
            name.replace(" ", "_"): {
                "stages": static.plan.pipeline_parallel_size,
                "replicas": static.plan.data_parallel_size,
                "num_microbatches": static.num_microbatches,
                "largest_stage_bytes": static.largest_bytes,
                "fits": static.fits,
                "seconds": static.seconds if static.fits else None,
                "speed_up": result.speed_up_over(static),
            }
            for name, static in _statics(result)
        },
        "fsdp": None if result.fsdp is None else _fsdp_values(result, result.fsdp),
        "flop_bound": result.flop_bound,
        "plain_epochs_of_equal_cost": rival_epochs(result),
        "cache": {
            "generation_bytes_per_node": result.cache_bytes,
            "peak_bytes_per_node": result.cache_peak_bytes,
            "off": result.cache_off,
        },
        "advice": advise(result),
        "assumed": _all_assumed(result, assumed),
    }


def _choice_values(result: Forecast) -> list[dict[str, Any]] | None:
    choice = result.sharding_choice
    if choice is None:
        return None
    return [
        {
            "replica_sharding": plan.replica_sharding,
            "stages": plan.pipeline_parallel_size,
            "replicas": plan.data_parallel_size,
            "largest_stage_bytes": largest_stage_bytes(plan),
            "fits": fits(plan),
            "step_seconds": plain_step_seconds(result.job, plan),
            "chosen": plan is choice.plan,
        }
        for plan in choice.considered
    ]


def _schedule_values(result: Forecast) -> list[dict[str, Any]] | None:
    choice = result.schedule_choice
    if choice is None:
        return None
    return [
        {
            "pipeline_schedule": each.plan.schedule,
            "virtual_stages": each.plan.num_virtual_stages,
            "num_microbatches": each.plan.num_microbatches_for(each.plan.rows_per_pipeline),
            "largest_stage_bytes": largest_stage_bytes(each.plan),
            "fits": each.fits,
            "step_seconds": plain_step_seconds(result.job, each.plan),
            "relative_step": each.step,
            "weighed_step": each.weighed,
            "chosen": each is choice.chosen,
        }
        for each in choice.considered
    ]


def _fsdp_values(result: Forecast, fsdp: FsdpRun) -> dict[str, Any]:
    return {
        "num_microbatches": fsdp.num_microbatches,
        "device_bytes": fsdp.largest_bytes,
        "fits": fsdp.fits,
        "step_seconds": fsdp.step_seconds,
        "seconds": fsdp.seconds if fsdp.fits else None,
        "speed_up": result.speed_up_over(fsdp),
    }


def _epoch_values(epoch: Epoch) -> dict[str, Any]:
    plan = epoch.plan
    sliced = epoch.sliced
    return {
        "epoch": epoch.number,
        "num_frozen_layers": epoch.num_frozen,
        "num_cached_layers": plan.num_cached_layers,
        "puts": epoch.puts,
        "stages": plan.pipeline_parallel_size,
        "replicas": plan.data_parallel_size,
        "virtual_stages": plan.num_virtual_stages,
        "stage_bounds": list(plan.stage_bounds),
        "num_microbatches": epoch.num_microbatches,
        "slices": None if sliced is None else [[part.rows, list(part.lengths)] for part in sliced.parts],
        "stage_bytes": epoch.stage_bytes,
        "step_seconds": epoch.step_seconds,
        "uncut_step_seconds": epoch.uncut_step_seconds,
        "bubble": epoch.bubble,
        "load_seconds": epoch.load_seconds,
        "samples_per_second": epoch.samples_per_second,
        "shares": epoch.shares,
        "seconds": epoch.seconds,
    }
