"""Advice for the user who launches a training, from its forecast."""

from __future__ import annotations

from ..freezing.schedule_cost import WORTH_FREEZING
from .device_table import GIB
from .forecast import BEST, DDP, FSDP, SWITCHED_OFF, Values, plain_trainings

HARDLY_FASTER = 1.10
"""Other layouts are recommended if this one takes more than this many times as long."""


def advise(values: Values) -> list[str]:
    """Return the advice on what `forecast` has returned; at least one sentence."""
    first, last, cache = values["epochs"][0], values["epochs"][-1], values["cache"]
    freezes, best = last["num_frozen_layers"] > 0, plain_trainings(values)[BEST]
    gain, k = best["speed_up"], best["stages"]
    sentences = _about_memory(values)
    if first["fits"]:
        sentences = [*_about_sharding(values), *sentences, *_about_stages(values)]
    sentences += _about_fsdp(values)
    if freezes and gain is not None and gain < WORTH_FREEZING:
        sentences.append(
            f"Gain below {100 * (WORTH_FREEZING - 1):.0f}% (×{gain:.2f} over the best static layout): do not freeze;"
            f" set freeze_policy='none', pipeline_parallel_size={k}."
        )
    elif gain is not None and gain * HARDLY_FASTER < 1:
        sentences.append(f"pipeline_parallel_size={k} is predicted to be {1 / gain:.2f} times as fast.")
    if freezes and cache["off"] not in (None, SWITCHED_OFF):
        sentences.append(f"Frozen layers are not cached: {cache['off']}.")
    peak, memory = cache["peak_bytes_per_node"], cache["host_memory_bytes"]
    if memory is not None and peak > memory:
        sentences.append(
            f"The cache exceeds a node's memory ({peak / GIB:,.1f} GiB at most, of {memory / GIB:,.1f} GiB): then it"
            " is read from disk."
        )
    return sentences or [
        f"Train it so, K = {first['stages']} at the start: no other layout is predicted to be much faster."
    ]


def _about_sharding(values: Values) -> list[str]:
    """What to set in the training if the sharding was chosen, and what is faster than the shortest pipeline."""
    considered = values["sharding_choice"]
    if considered is None:
        return []
    sentences = [f"Set replica_sharding={values['replica_sharding']!r}: the least sharding that fits."]
    chosen = next(step for step in considered if step["chosen"])
    fastest = min((step for step in considered if step["fits"]), key=lambda step: float(step["step_seconds"]))
    gain = chosen["step_seconds"] / fastest["step_seconds"]
    if gain > HARDLY_FASTER:
        sentences.append(
            f"Without frozen layers, pipeline_parallel_size={fastest['stages']} with"
            f" replica_sharding={fastest['replica_sharding']!r} is predicted to be {gain:.2f} times as fast."
        )
    return sentences


def _about_memory(values: Values) -> list[str]:
    budget, first, ddp = values["memory_budget_bytes"], values["epochs"][0], plain_trainings(values)[DDP]
    if budget is None:
        return []
    sentences, k, has = list[str](), first["stages"], f"a device has {budget / GIB:,.1f} GiB"
    if not ddp["fits"] and k > 1:
        sentences.append(
            f"Plain DDP does not fit: K = 1 needs {ddp['largest_stage_bytes'] / GIB:,.1f} GiB for training, and {has}."
            f" Hence {k} stages at the start."
        )
    if not first["fits"]:
        sentences.append(
            f"It does not fit: with K = {k} the largest stage needs {first['largest_stage_bytes'] / GIB:,.1f} GiB, and"
            f" {has}. Raise pipeline_parallel_size, or lower the batch."
        )
    return sentences


def _about_stages(values: Values) -> list[str]:
    epochs, sharding = values["epochs"], values["replica_sharding"]
    ks = [step["stages"] for step in epochs]
    if max(ks) == 1 and plain_trainings(values)[BEST]["stages"] == 1:
        what = "plain DDP" if sharding == "none" else f"data parallelism with replica_sharding={sharding!r}"
        if epochs[-1]["num_frozen_layers"]:
            what = "freeze + cache only" if any(step["num_cached_layers"] for step in epochs) else "freeze only"
        return [f"K = 1 throughout: {what} (pipeline_parallel_size=1); pipelining adds nothing here."]
    if ks[-1] == ks[0]:
        return []
    when = next(number for number, k in enumerate(ks, 1) if k < ks[0])
    return [f"From epoch {when} on fewer stages do, and the devices that become free are replicas."]


def _about_fsdp(values: Values) -> list[str]:
    """Advice on FSDP, which has no bubble and replicates nothing, but moves all parameters in each step."""
    plain = plain_trainings(values)
    if values["fastest_plain"] != FSDP:
        return []
    gain, of_pipeline = plain[FSDP]["speed_up"], plain[BEST]["speed_up"]
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
