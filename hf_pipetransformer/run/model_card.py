"""A section for the model card: with which layouts, freezes, cache and versions the model was trained.

It is made from the records in `output_dir` (`events_file.py`, `metrics_file.py`), so it also covers the trainings that
were resumed. It names no path and no host, because model cards are published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..file_formats import EVENT, METRIC, read_records
from ..own_files import replace_file
from . import events_file, metrics_file

BEGIN, END = "<!-- hf_pipetransformer -->", "<!-- /hf_pipetransformer -->"
"""Marks around the section in the card."""
CHANGES = ("start", "resume", "transform", "cache")


def add_to_card(output_dir: Path, run: str) -> None:
    """Add the section to the card in `output_dir`, or replace it there. Without a card or records nothing happens.

    Args:
        output_dir: of the training.
        run: name of the `train()` that trained the model (`RunRecorder.run`).

    Raises:
        NotOursError: the card is a link, which stays.
        OSError: it cannot be written.
        ValueError: a line of the records is damaged.
    """
    card = output_dir / "README.md"
    section = section_about(output_dir, run)
    if section is None or not card.is_file():
        return
    before, _, rest = card.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    replace_file(card, f"{before.rstrip()}\n\n{BEGIN}\n{section}\n{END}\n{after.lstrip()}")


def section_about(output_dir: Path, run: str) -> str | None:
    """Return the section in Markdown; None if nothing was recorded of this training.

    Raises:
        ValueError: a line of the records is damaged.
    """
    events = _of_training(read_records(output_dir / events_file.FILE_NAME, EVENT)[0], run)
    if not events:
        return None
    runs = {event.get("run") for event in events}
    metrics = [line for line in read_records(output_dir / metrics_file.FILE_NAME, METRIC)[0] if line["run"] in runs]
    facts: Mapping[str, Any] = next((event["facts"] for event in reversed(events) if event.get("facts")), {})
    arguments, versions = facts.get("arguments", {}), facts.get("versions", {})
    device = _text(facts.get("device", "?"))
    lines = [
        "## Pipeline, freezing and cache",
        "",
        f"Trained with hf_pipetransformer on {facts.get('world_size', '?')} processes ({device}), in"
        " pipelines of K stages, R of them side by side.",
        "",
        f"- Freezing: {_freezing(arguments)}",
        f"- Cache of the frozen layers' outputs: {_cache(arguments, events, metrics)}",
        f"- Versions: {_text(', '.join(f'{name} {version}' for name, version in versions.items()))}",
        "",
        "| from step | epoch | frozen layers | of them cached | K × R | first layer of each stage | micro-batches |",
        "|---:|---:|---:|---:|---:|---|---:|",
    ]
    for event in events:
        cached = event.get("num_cached_layers", 0)
        lines.append(
            f"| {event['global_step']} | {event['epoch']:.4g} | {event['num_frozen_layers']} of {event['num_layers']}"
            f" | {cached} | {event['pipeline_parallel_size']} × {event['data_parallel_size']}"
            f" | {', '.join(map(str, event['stage_bounds'][:-1]))} | {event['num_microbatches']} |"
        )
    return "\n".join(lines)


def _of_training(events: Sequence[dict[str, Any]], run: str) -> list[dict[str, Any]]:
    """The changes of layout from the training's start to the end of `run`, over the resumes in between."""
    events = [event for event in events if event["event"] in CHANGES]
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
    named = (*names.get(str(policy), ()), "freeze_strategy", "freeze_steps", "max_frozen_layers", "elastic")
    values = [f"{name}={_text(arguments[name])}" for name in named if arguments.get(name) is not None]
    return f"policy {_code(policy)} ({', '.join(values)})"


def _cache(arguments: Mapping[str, Any], events: Sequence[Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    wanted = _code(arguments.get("activation_cache", "off"))
    if not events[-1]["num_frozen_layers"]:
        return f"{wanted}, but nothing was frozen"
    skipped = [line["values"].get("cache_layers_skipped") for line in metrics if line["kind"] == "log"]
    known = [share for share in skipped if isinstance(share, (int, float))]
    if known:
        return f"{wanted}; up to {max(known):.0%} of an epoch's forward passes of layers were read from it"
    return f"{wanted}; not used" if arguments.get("activation_cache") != "off" else wanted


def _text(value: Any) -> str:
    """A recorded value as text in Markdown, in which nothing of it is markup."""
    return re.sub(r"[^\w .,:;=+%()'\"{}-]", lambda found: f"&#{ord(found[0])};", " ".join(str(value).split()))


def _code(value: Any) -> str:
    """A recorded name as code in Markdown."""
    return f"`{value}`" if re.fullmatch(r"[\w-]+", str(value)) else _text(value)
