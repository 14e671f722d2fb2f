"""Advice for the user who launches a training, from its forecast."""

from __future__ import annotations

from collections.abc import Iterator

from ..parts.freezing.schedule_cost import WORTH_FREEZING
from .device_table import GIB
from .forecast import BEST, DDP, FSDP, SWITCHED_OFF, Values, plain_trainings

HARDLY_FASTER = 1.10
"""Other layouts are recommended if this one takes more than this many times as long."""


def advise(values: Values) -> list[str]:
    """Return the advice on what `forecast` has returned; at least one sentence."""
    fits, k = values["epochs"][0]["fits"], values["epochs"][0]["stages"]
    sentences = [
        *(_about_sharding(values) if fits else ()),
        *_about_memory(values),
        *(_about_stages(values) if fits else ()),
        *_about_fsdp(values),
        *_about_gain(values),
        *_about_cache(values),
        *_about_lora(values),
    ]
    return sentences or [f"Train it so, K = {k} at the start: no other layout is predicted to be much faster."]


def _about_sharding(values: Values) -> Iterator[str]:
    """What to set in the training if the sharding was chosen, and what is faster than the shortest pipeline."""
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
    k, has = first["stages"], f"a device has {budget / GIB:,.1f} GiB"
    if not ddp["fits"] and k > 1:
        yield (
            f"Plain DDP does not fit: K = 1 needs {ddp['largest_stage_bytes'] / GIB:,.1f} GiB for training, and {has}."
            f" Hence {k} stages at the start."
        )
    if not first["fits"]:
        yield (
            f"It does not fit: with K = {k} the largest stage needs {first['largest_stage_bytes'] / GIB:,.1f} GiB, and"
            f" {has}. Raise pipeline_parallel_size, or lower the batch."
        )


def _about_stages(values: Values) -> Iterator[str]:
    epochs, sharding = values["epochs"], values["replica_sharding"]
    shorter = next((step["epoch"] for step in epochs if step["stages"] < epochs[0]["stages"]), None)
    if shorter is not None:
        yield f"From epoch {shorter} on fewer stages do, and the devices that become free are replicas."
    elif epochs[0]["stages"] == plain_trainings(values)[BEST]["stages"] == 1:
        what = "plain DDP" if sharding == "none" else f"data parallelism with replica_sharding={sharding!r}"
        if epochs[-1]["num_frozen_layers"]:
            what = "freeze + cache only" if any(step["num_cached_layers"] for step in epochs) else "freeze only"
        yield f"K = 1 throughout: {what} (pipeline_parallel_size=1); pipelining adds nothing here."


def _about_fsdp(values: Values) -> Iterator[str]:
    """Advice on FSDP, which has no bubble and replicates nothing, but moves all parameters in each step."""
    if values["fastest_plain"] != FSDP:
        return
    gain, of_pipeline = (plain_trainings(values)[name]["speed_up"] for name in (FSDP, BEST))
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


def _about_gain(values: Values) -> Iterator[str]:
    best, freezes = plain_trainings(values)[BEST], values["epochs"][-1]["num_frozen_layers"] > 0
    gain, k = best["speed_up"], best["stages"]
    if gain is not None and freezes and gain < WORTH_FREEZING:
        yield (
            f"Gain below {100 * (WORTH_FREEZING - 1):.0f}% (×{gain:.2f} over the best static layout): do not freeze;"
            f" set freeze_policy='none', pipeline_parallel_size={k}."
        )
    elif gain is not None and gain * HARDLY_FASTER < 1:
        yield f"pipeline_parallel_size={k} is predicted to be {1 / gain:.2f} times as fast."


def _about_cache(values: Values) -> Iterator[str]:
    cache = values["cache"]
    if values["epochs"][-1]["num_frozen_layers"] and cache["off"] not in (None, SWITCHED_OFF):
        yield f"Frozen layers are not cached: {cache['off']}."
    peak, memory = cache["peak_bytes_per_node"], cache["host_memory_bytes"]
    if memory is not None and peak > memory:
        yield (
            f"The cache exceeds a node's memory ({peak / GIB:,.1f} GiB at most, of {memory / GIB:,.1f} GiB): then it"
            " is read from disk."
        )


def _about_lora(values: Values) -> Iterator[str]:
    """Advise adapters on the upper layers only, where that is predicted to be faster."""
    upper = values.get("lora_on_upper_layers")
    if upper is not None and upper["speed_up"] >= HARDLY_FASTER:
        first, layers, size = upper["first_layer"], upper["layers"], upper["cache_bytes_per_node"] / GIB
        yield (
            f"LoRA on the upper {layers - first} of {layers} layers alone is predicted to be"
            f" {upper['speed_up']:.2f} times as fast ({duration(upper['seconds'])}): the lower layers' outputs are"
            f" read from the cache, {size:,.1f} GiB on each node, from the second epoch on. Set"
            f" layers_to_transform=list(range({first}, {layers})) in PEFT's LoraConfig, and freeze_policy='none'"
            f"{' with eval_frozen_modules=True, as the model has dropout' if upper['has_dropout'] else ''}."
            " Its accuracy is not predicted."
        )


def duration(seconds: float) -> str:
    """Return a time in words: "1.5 s", "12.0 min", "2.50 h"."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"
