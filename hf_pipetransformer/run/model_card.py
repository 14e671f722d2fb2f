"""A section for the model card: with which layouts, freezes, cache and versions the model was trained.

It is made from the records in `output_dir` (`events_file.py`, `metrics_file.py`), so it also covers the trainings that
were resumed. It names no path and no host, because model cards are published.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import events_file, metrics_file

BEGIN, END = "<!-- hf_pipetransformer -->", "<!-- /hf_pipetransformer -->"
"""Marks around the section in the card."""
CHANGES = ("start", "resume", "transform", "cache")


def add_to_card(output_dir: Path, run: str) -> None:
    """Add the section to the card in `output_dir`, or replace it there. Without a card or records nothing happens.

    Args:
        output_dir: of the training.
        run: name of the `train()` that trained the model (`RunRecorder.run`).
    """
    card = output_dir / "README.md"
    section = section_about(output_dir, run)
    if section is None or not card.is_file():
        return
    before, _, rest = card.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    card.write_text(f"{before.rstrip()}\n\n{BEGIN}\n{section}\n{END}\n{after.lstrip()}", encoding="utf-8")


def section_about(output_dir: Path, run: str) -> str | None:
    """Return the section in Markdown; None if nothing was recorded of this training."""
    events = _of_training(list(_lines(output_dir / events_file.FILE_NAME)), run)
    if not events:
        return None
    runs = {event.get("run") for event in events}
    metrics = [line for line in _lines(output_dir / metrics_file.FILE_NAME) if line.get("run") in runs]
    facts: Mapping[str, Any] = next((event["facts"] for event in reversed(events) if event.get("facts")), {})
    arguments, versions = facts.get("arguments", {}), facts.get("versions", {})
    lines = [
        "## Pipeline, freezing and cache",
        "",
        f"Trained with hf_pipetransformer on {facts.get('world_size', '?')} processes ({facts.get('device', '?')}), in"
        " pipelines of K stages, R of them side by side.",
        "",
        f"- Freezing: {_freezing(arguments)}",
        f"- Cache of the frozen layers' outputs: {_cache(arguments, events, metrics)}",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        "",
        "| from step | epoch | frozen layers | of them cached | K × R | first layer of each stage | micro-batches |",
        "|---:|---:|---:|---:|---:|---|---:|",
    ]
    for event in events:
        lines.append(
            f"| {event['global_step']} | {event['epoch']:.4g} | {event['num_frozen_layers']} of {event['num_layers']}"
            f" | {event['num_cached_layers']} | {event['pipeline_parallel_size']} × {event['data_parallel_size']}"
            f" | {', '.join(map(str, event['stage_bounds'][:-1]))} | {event['num_microbatches']} |"
        )
    return "\n".join(lines)


def _of_training(events: Sequence[dict[str, Any]], run: str) -> list[dict[str, Any]]:
    """The changes of layout from the training's start to the end of `run`, over the resumes in between."""
    events = [event for event in events if event.get("event") in CHANGES]
    last = max((index for index, event in enumerate(events) if event.get("run") == run), default=-1)
    first = max((index for index in range(last + 1) if events[index]["event"] == "start"), default=0)
    found: list[dict[str, Any]] = []
    for event in events[first : last + 1]:
        if event["event"] == "resume":  # what came after the checkpoint was done again
            found = [earlier for earlier in found if earlier["global_step"] < event["global_step"]]
        found.append(event)
    return found


def _freezing(arguments: Mapping[str, Any]) -> str:
    policy = arguments.get("freeze_policy", "none")
    if policy == "none":
        return "no policy among the arguments"
    names = {"schedule": ("freeze_schedule",), "alpha": ("freeze_alpha",), "adaptive": ("freeze_alpha",)}
    named = (*names.get(policy, ()), "freeze_strategy", "freeze_steps", "max_frozen_layers", "elastic")
    values = [f"{name}={arguments[name]}" for name in named if arguments.get(name) is not None]
    return f"policy `{policy}` ({', '.join(values)})"


def _cache(arguments: Mapping[str, Any], events: Sequence[Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    wanted = f"`{arguments.get('activation_cache', 'off')}`"
    if not events[-1]["num_frozen_layers"]:
        return f"{wanted}, but nothing was frozen"
    skipped = [line["values"].get("cache_layers_skipped") for line in metrics if line["kind"] == "log"]
    known = [share for share in skipped if share is not None]
    if known:
        return f"{wanted}; up to {max(known):.0%} of an epoch's forward passes of layers were read from it"
    return f"{wanted}; not used" if arguments.get("activation_cache") != "off" else wanted


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """The records in a file, without lines that a killed training has left incomplete."""
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                yield json.loads(line)
