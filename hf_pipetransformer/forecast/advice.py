"""Advice for the user who launches a training, from its forecast."""

from __future__ import annotations

from collections.abc import Iterator

from ..parts.freezing.schedule_cost import WORTH_FREEZING
from .device_table import GIB
from .forecast import BEST, DDP, FSDP, SWITCHED_OFF, Values, plain_trainings

HARDLY_FASTER = 1.10
"""Another layout is recommended if this one takes more than this many times as long."""


def advise(values: Values) -> list[str]:
    """Return advice on the values of `forecast`: at least one sentence."""
    fits, k = values["epochs"][0]["fits"], values["epochs"][0]["stages"]
    sentences = [
        *(_about_sharding(values) if fits else ()),
        *_about_memory(values),
        *(_about_stages(values) if fits else ()),
        *_about_fsdp(values),
        *_about_gain(values),
        *_about_cache(values),
        *_about_adapters(values),
        *_about_teacher(values),
    ]
    return sentences or [
        f"Train with these settings, pipeline_parallel_size={k}: no other layout is predicted to be much faster."
    ]


def _about_sharding(values: Values) -> Iterator[str]:
    """Advice on the chosen sharding, and on layouts that are faster than the shortest pipeline."""
    considered = values["sharding_choice"]
    if considered is None:
        return
    yield f"Set replica_sharding={values['replica_sharding']!r}: the least sharding that fits."
    (chosen,) = (step for step in considered if step["chosen"])
    fastest = min((step for step in considered if step["fits"]), key=lambda step: float(step["step_seconds"]))
    gain = chosen["step_seconds"] / fastest["step_seconds"]
    if gain > HARDLY_FASTER:
        yield (
            f"Without frozen layers, pipeline_parallel_size={fastest['stages']} with"
            f" replica_sharding={fastest['replica_sharding']!r} is predicted to be {gain:.2f} times as fast."
        )


def _about_memory(values: Values) -> Iterator[str]:
    budget, first, ddp = values["memory_budget_bytes"], values["epochs"][0], plain_trainings(values)[DDP]
    if budget is None:
        return
    k, has = first["stages"], f"a training may use {budget / GIB:,.1f} GiB of a device"
    if not ddp["fits"] and k > 1:
        yield (
            f"Plain DDP does not fit: the whole model needs {ddp['largest_stage_bytes'] / GIB:,.1f} GiB on each"
            f" device, and {has}. Hence {k} stages at the start."
        )
    if not first["fits"]:
        yield (
            f"This training does not fit: with K = {k}, the largest stage needs"
            f" {first['largest_stage_bytes'] / GIB:,.1f} GiB, and {has}. Raise pipeline_parallel_size, or lower the"
            " batch."
        )


def _about_stages(values: Values) -> Iterator[str]:
    epochs, sharding, best = values["epochs"], values["replica_sharding"], plain_trainings(values)[BEST]
    shorter = next((step["epoch"] for step in epochs if step["stages"] < epochs[0]["stages"]), None)
    if shorter is not None:
        yield f"From epoch {shorter} on, fewer stages suffice, and the freed devices become replicas."
    elif epochs[0]["stages"] == best["stages"] == 1:
        what = "which is plain DDP" if epochs[0]["replicas"] > 1 else "which is plain training on one device"
        if sharding != "none":
            what = f"which is data parallelism with replica_sharding={sharding!r}"
        if epochs[-1]["num_frozen_layers"] and best["speed_up"] >= WORTH_FREEZING:
            caches = any(step["num_cached_layers"] for step in epochs)
            what = "with freezing and the cache" if caches else "with freezing but no cache"
        yield f"Use one stage throughout (pipeline_parallel_size=1), {what}: a pipeline gains nothing here."


def _about_fsdp(values: Values) -> Iterator[str]:
    """Advice on FSDP. It has no bubble and no replicated state, but moves all parameters in each step."""
    if values["fastest_plain"] != FSDP:
        yield from _about_overlap(values)
        return
    gain, of_pipeline = (plain_trainings(values)[name]["speed_up"] for name in (FSDP, BEST))
    if not values["epochs"][-1]["num_frozen_layers"]:
        yield f"Use FSDP with plain transformers instead: it is predicted to be {1 / gain:.2f} times as fast."
        return
    if gain < WORTH_FREEZING:
        gained = f"gains only {gain - 1:.0%} over" if gain > 1.005 else "is predicted to be no faster than"
        yield f"Use FSDP with plain transformers instead: freezing {gained} FSDP, which loses no accuracy."
    elif of_pipeline is not None and gain * HARDLY_FASTER < of_pipeline:
        faster = f"{of_pipeline / gain:.2f} times as fast as the best pipeline"
        yield f"Without freezing, FSDP is predicted to be {faster}."
    else:
        return
    yield (
        "FSDP can freeze layers as well, without a cache of their outputs: set pipeline_parallel_size=1, fsdp=True and"
        " fsdp_config={'version': 2}."
    )


def _about_overlap(values: Values) -> Iterator[str]:
    """Advice on FSDP where plain DDP is possible. Its predicted lead comes from the transfers that it overlaps."""
    plain = plain_trainings(values)
    gain = plain[FSDP]["speed_up"] if FSDP in plain and plain[BEST]["stages"] == 1 else None
    if gain is not None and gain * HARDLY_FASTER < 1:
        yield (
            f"Plain FSDP is predicted to be {1 / gain:.2f} times as fast as this training. A prediction counts the"
            " transfers of FSDP during the backward, and those of DDP after it, although DDP overlaps them as well."
            " Measure both with plain transformers: fsdp=True and fsdp_config={'version': 2}, or neither."
        )


def _about_gain(values: Values) -> Iterator[str]:
    best, freezes = plain_trainings(values)[BEST], values["epochs"][-1]["num_frozen_layers"] > 0
    gain, k = best["speed_up"], best["stages"]
    if gain is not None and freezes and gain < WORTH_FREEZING:
        if values["fastest_plain"] != FSDP:  # otherwise `_about_fsdp` advises against freezing
            yield (
                f"Do not freeze: this training is predicted to be {gain:.2f} times as fast as the best static layout,"
                f" and a gain below {WORTH_FREEZING - 1:.0%} is within the error of a prediction. Set"
                f" freeze_policy='none' and pipeline_parallel_size={k}."
            )
    elif gain is not None and gain * HARDLY_FASTER < 1:
        yield f"pipeline_parallel_size={k} is predicted to be {1 / gain:.2f} times as fast as this training."


def _about_cache(values: Values) -> Iterator[str]:
    cache = values["cache"]
    if values["epochs"][-1]["num_frozen_layers"] and cache["off"] not in (None, SWITCHED_OFF):
        yield f"Frozen layers are not cached: {cache['off']}."
    peak, memory = cache["peak_bytes_per_node"], cache["host_memory_bytes"]
    if memory is not None and peak > memory:
        yield (
            f"The cache grows to {peak / GIB:,.1f} GiB on a node and exceeds its memory ({memory / GIB:,.1f} GiB):"
            " then it is read from disk."
        )


def _about_adapters(values: Values) -> Iterator[str]:
    """Advice on adapters on the upper layers only, with the lower layers' outputs read from the cache."""
    upper = values.get("lora_on_upper_layers")
    if upper is None or upper["speed_up"] < HARDLY_FASTER:
        return
    first, layers = upper["layers_to_transform"][0], upper["layers_to_transform"][-1] + 1
    size, milliseconds = f"{upper['cache_bytes_per_node'] / GIB:,.1f} GiB", f"{1e3 * upper['step_seconds']:,.1f} ms"
    yield (
        f"Consider LoRA on the upper {layers - first} of {layers} layers only. From the second epoch on, the outputs"
        f" of the lower {first} layers are then read from the cache ({size} on each node). Predicted:"
        f" {upper['speed_up']:.2f} times as fast as this training, with {milliseconds} a step from then on and"
        f" {duration(upper['seconds'])} in all. Set target_modules={upper['target_modules']} and"
        f" layers_to_transform=list(range({first}, {layers})) in LoraConfig, and freeze_policy='schedule' and"
        f" freeze_schedule={upper['freeze_schedule']} in the training arguments. Accuracy is not predicted."
    )


def _about_teacher(values: Values) -> Iterator[str]:
    """Advice on a frozen teacher that the loss calls."""
    teacher = values.get("teacher")
    if teacher is None:
        return
    if teacher["off"] is not None:
        yield f"The outputs of the teacher are not read: {teacher['off']}."
        return
    yield (
        "Call the teacher in the loss as usual: its outputs are stored in the first epoch and read in later ones."
        f" Predicted: {teacher['speed_up']:.2f} times as fast as computing them in each epoch."
    )
    if teacher["stored_share"] < 1:
        yield (
            f"The outputs of the teacher fit for {teacher['stored_share']:.0%} of the samples. For all, set"
            f" activation_cache_max_gib to {teacher['node_bytes'] / GIB:,.1f} or more."
        )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 step", "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a time in words: "1.5 s", "12.0 min", "2.50 h"."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"
