"""Advice for the user who launches a training, from its forecast."""

from __future__ import annotations

from ..freezing.schedule_cost import WORTH_FREEZING
from .device_table import GIB
from .forecast import BEST, DDP, FSDP, Forecast

HARDLY_FASTER = 1.10
"""Other layouts are recommended if this one takes more than this many times as long."""


def advise(result: Forecast) -> list[str]:
    """Return the advice; at least one sentence."""
    job, gain, host = result.job, result.speed_up_over(BEST), result.device.host
    sentences = [*_about_sharding(result), *_about_memory(result), *_about_stages(result), *_about_fsdp(result)]
    if result.freezes and gain is not None and gain < WORTH_FREEZING:
        k = result.plain[BEST].layout.pipeline_parallel_size
        sentences.append(
            f"Gain below {100 * (WORTH_FREEZING - 1):.0f}% (×{gain:.2f} over the best static layout): do not freeze;"
            f" set freeze_policy='none', pipeline_parallel_size={k}."
        )
    elif gain is not None and gain * HARDLY_FASTER < 1:
        k = result.plain[BEST].layout.pipeline_parallel_size
        sentences.append(f"pipeline_parallel_size={k} is predicted to be {1 / gain:.2f} times as fast.")
    if result.freezes and job.caches and result.cache_off:
        sentences.append(f"Frozen layers are not cached: {result.cache_off}.")
    if host.memory_bytes is not None and result.cache_peak_bytes > host.memory_bytes:
        sentences.append(
            f"The cache exceeds a node's memory ({result.cache_peak_bytes / GIB:,.1f} GiB at most, of"
            f" {host.memory_bytes / GIB:,.1f} GiB): then it is read from disk."
        )
    k = result.first.pipeline_parallel_size
    return sentences or [f"Train it so, K = {k} at the start: no other layout is predicted to be much faster."]


def _about_sharding(result: Forecast) -> list[str]:
    """What to set in the training if the sharding was chosen, and what is faster than the shortest pipeline."""
    considered = result.sharding_choice
    if not considered or not result.epochs[0].fits:
        return []
    sentences = [f"Set replica_sharding={result.first.replica_sharding!r}: the least sharding that fits."]
    fastest = min((step for step in considered if step.fits), key=lambda step: step.seconds)
    gain = result.step_in(result.first).seconds / fastest.seconds
    if gain > HARDLY_FASTER:
        k, sharding = fastest.layout.pipeline_parallel_size, fastest.layout.replica_sharding
        sentences.append(
            f"Without frozen layers, pipeline_parallel_size={k} with replica_sharding={sharding!r} is predicted to be"
            f" {gain:.2f} times as fast."
        )
    return sentences


def _about_memory(result: Forecast) -> list[str]:
    budget, first, ddp = result.device.memory_budget_bytes, result.first, result.plain[DDP]
    if budget is None:
        return []
    sentences, k = list[str](), first.pipeline_parallel_size
    has = f"a device has {budget / GIB:,.1f} GiB"
    if not ddp.fits and k > 1:
        sentences.append(
            f"Plain DDP does not fit: K = 1 needs {max(ddp.stage_bytes) / GIB:,.1f} GiB for training, and {has}. Hence"
            f" {k} stages at the start."
        )
    if not result.epochs[0].fits:
        sentences.append(
            f"It does not fit: with K = {k} the largest stage needs"
            f" {max(result.epochs[0].stage_bytes) / GIB:,.1f} GiB, and {has}. Raise"
            " pipeline_parallel_size, or lower the batch."
        )
    return sentences


def _about_stages(result: Forecast) -> list[str]:
    if not result.epochs[0].fits:
        return []
    ks = [step.layout.pipeline_parallel_size for step in result.epochs]
    if max(ks) == 1 and result.plain[BEST].layout.pipeline_parallel_size == 1:
        caches, sharding = any(step.layout.num_cached_layers for step in result.epochs), result.first.replica_sharding
        static = "plain DDP" if sharding == "none" else f"data parallelism with replica_sharding={sharding!r}"
        what = ("freeze + cache only" if caches else "freeze only") if result.freezes else static
        return [f"K = 1 throughout: {what} (pipeline_parallel_size=1); pipelining adds nothing here."]
    if ks[-1] == ks[0]:
        return []
    when = next(number for number, k in enumerate(ks, 1) if k < ks[0])
    return [f"From epoch {when} on fewer stages do, and the devices that become free are replicas."]


def _about_fsdp(result: Forecast) -> list[str]:
    """Advice on FSDP, which has no bubble and replicates nothing, but moves all parameters in each step."""
    gain, of_pipeline = (result.speed_up_over(name) for name in (result.fastest_plain, BEST))
    if result.fastest_plain != FSDP or gain is None:
        return []
    freezing = (
        "FSDP can freeze layers as well, without a cache of their outputs: set pipeline_parallel_size=1, fsdp=True and"
        " fsdp_config={'version': 2}."
    )
    if gain < WORTH_FREEZING:
        gained = f"gains only {gain - 1:.0%} over" if gain > 1.005 else "is predicted to be no faster than"
        return [
            f"Use FSDP with plain transformers instead: freezing {gained} FSDP, which loses no accuracy.",
            freezing,
        ]
    if of_pipeline is not None and gain * HARDLY_FASTER < of_pipeline:
        faster = f"{of_pipeline / gain:.2f} times as fast as the best pipeline"
        return [f"Without freezing, FSDP is predicted to be {faster}.", freezing]
    return []


def duration(seconds: float) -> str:
    """Return a time in words: "1.5 s", "12.0 min", "2.50 h"."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"
