"""A section for the model card: the training's layouts, freezes, cache and library versions.

It is made from the records in `output_dir` (`records/history.py`), so it also covers the interrupted calls of a
resumed training. It names no path and no host, because model cards are published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...own_files import replace_file
from .files import frozen_in_words
from .history import Training, read_trainings

BEGIN, END = "<!-- hf_pipetransformer -->", "<!-- /hf_pipetransformer -->"
"""Marks around the section in the card."""


def add_to_card(output_dir: Path, run: str) -> None:
    """Add the section to the card in `output_dir`, or replace it. Does not write without a card or records.

    Args:
        output_dir: the training's `output_dir`.
        run: name of the `train()` that trained the model (`RunRecorder.run`).

    Raises:
        NotOursError: the card is a link. The link stays.
        OSError: the card cannot be written.
        ValueError: a line of the records is damaged.
    """
    card = output_dir / "README.md"
    section = section_about(output_dir, run) if card.is_file() else None
    if section is None:
        return
    before, _, rest = card.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    replace_file(card, f"{before.rstrip()}\n\n{BEGIN}\n{section}\n{END}\n{after.lstrip()}")


def section_about(output_dir: Path, run: str) -> str | None:
    """Return the section in Markdown; None if there is no record of this training.

    Raises:
        ValueError: a line of the records is damaged.
    """
    trainings = read_trainings(output_dir, run)
    if not trainings or not trainings[-1].layouts:
        return None
    training, facts = trainings[-1], trainings[-1].facts
    arguments, versions = facts.get("arguments", {}), facts.get("versions", {})
    device = _text(facts.get("device", "?"))
    lines = [
        "## Pipeline, freezing and cache",
        "",
        f"Trained with hf_pipetransformer on {facts.get('world_size', '?')} processes ({device}), in"
        " pipelines of K stages, R of them side by side.",
        "",
        f"- Freezing: {_freezing(arguments, training)}",
        f"- Cache of the frozen layers' outputs: {_cache(arguments, training)}",
        f"- Versions: {_text(', '.join(f'{name} {version}' for name, version in versions.items()))}",
        "",
        "| from step | epoch | frozen | cached layers | K × R | first layer of each stage | micro-batches |",
        "|---:|---:|---:|---:|---:|---|---:|",
    ]
    for layout in training.layouts:
        lines.append(
            f"| {layout.first_step} | {layout.event['epoch']:.4g} | {_text(layout.frozen)}"
            f" | {layout.num_cached} | {layout.shape} | {', '.join(map(str, layout.event['stage_bounds'][:-1]))}"
            f" | {layout.event['num_microbatches']} |"
        )
    return "\n".join(lines)


def _freezing(arguments: Mapping[str, Any], training: Training) -> str:
    policy, modules = arguments.get("freeze_policy", "none"), training.layouts[-1].frozen_modules
    if policy == "none":
        by_user = f"; {_text(frozen_in_words(modules))} frozen beforehand" if modules is not None else ""
        return f"no policy among the arguments{by_user}"
    names = {"schedule": ("freeze_schedule",), "alpha": ("freeze_alpha",), "adaptive": ("freeze_alpha",)}
    named = (*names.get(str(policy), ()), "freeze_strategy", "freeze_steps", "max_frozen_layers", "elastic")
    values = [f"{name}={_text(arguments[name])}" for name in named if arguments.get(name) is not None]
    return f"policy {_code(policy)} ({', '.join(values)})"


def _cache(arguments: Mapping[str, Any], training: Training) -> str:
    wanted = _code(arguments.get("activation_cache", "off"))
    if not training.layouts[-1].num_frozen and not any(layout.frozen_modules for layout in training.layouts):
        return f"{wanted}, but nothing was frozen"
    skipped = training.curve("cache_layers_skipped")[1]
    if skipped:
        return f"{wanted}; up to {max(skipped):.0%} of an epoch's forward passes of layers were read from it"
    return f"{wanted}; not used" if arguments.get("activation_cache") != "off" else wanted


def _text(value: Any) -> str:
    """Return a recorded value as plain text in Markdown, with markup escaped."""
    return re.sub(r"[^\w .,:;=+%()'\"{}-]", lambda found: f"&#{ord(found[0])};", " ".join(str(value).split()))


def _code(value: Any) -> str:
    """Return a recorded name as code in Markdown."""
    return f"`{value}`" if re.fullmatch(r"[\w-]+", str(value)) else _text(value)
