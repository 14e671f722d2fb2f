#!/usr/bin/env python
"""Are the losses of two versions of the library the same, bit by bit?

    python benchmarks/loss_curves.py --processes 2 --out before.json      (with the first version)
    python benchmarks/loss_curves.py --processes 2 --out after.json       (with the second version)
    python benchmarks/loss_curves.py --compare before.json after.json

A small BERT with dropout, 24 steps each: one stage with replicas, one pipeline of two stages, a pipeline that freezes,
shrinks to one stage and reads frozen layers' outputs from the cache, and token slices of a small Llama. Losses and
gradient norms of each step, and a checksum of all weights, are written as hexadecimal numbers.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, TrainerCallback

import hf_pipetransformer

import harness

LAYOUTS: dict[str, dict[str, Any]] = {
    "K = 1": {"pipeline_parallel_size": 1},
    "K = 2": {"pipeline_parallel_size": 2, "num_microbatches": 4},
    "elastic with cache": {
        "pipeline_parallel_size": 2,
        "num_microbatches": 4,
        "freeze_policy": "schedule",
        "freeze_schedule": {"1": 2, "3": 3},
        "activation_cache": "on",
        "num_train_epochs": 6,
    },
    "token slices": {"pipeline_parallel_size": 2, "token_slices": 2, "num_microbatches": 2},
}


class Note(TrainerCallback):
    """Notes the logged values as exact text."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen += [f"{name} {float(logs[name]).hex()}" for name in ("loss", "grad_norm") if name in logs]


def train(options: dict[str, Any]) -> list[str]:
    """Losses, norms and weights of one training, as exact text. Collective over all processes."""
    torch.manual_seed(0)
    note, sizes = Note(), {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    generator = torch.Generator().manual_seed(1)
    if "token_slices" in options:
        model: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, num_key_value_heads=2, **sizes))
        ids = torch.randint(0, 64, (32, 16), generator=generator)
        rows = [{"input_ids": row, "labels": row} for row in ids]
    else:
        model = BertForSequenceClassification(BertConfig(num_hidden_layers=4, **sizes))
        rows = [{"input_ids": torch.randint(0, 64, (12,), generator=generator), "labels": k % 2} for k in range(32)]
    defaults: dict[str, Any] = {"num_train_epochs": 6, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    defaults |= {"per_device_train_batch_size": 4, "logging_strategy": "steps", "logging_steps": 1}
    with tempfile.TemporaryDirectory() as folder:
        harness.make_trainer(model, rows, folder, [note], is_ours=True, **{**defaults, **options}).train()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return [*note.seen, f"weights {zlib.crc32(weights):08x}"]


def compare(one: Path, other: Path) -> int:
    """Print the first difference of each layout; the number of layouts that differ."""
    before, after = (json.loads(path.read_text(encoding="utf-8"))["curves"] for path in (one, other))
    different = 0
    for layout, lines in before.items():
        theirs = after.get(layout, [])
        first = next((k for k, pair in enumerate(zip(lines, theirs, strict=False)) if pair[0] != pair[1]), None)
        if first is None and len(lines) == len(theirs):
            print(f"{layout}: identical, {len(lines)} numbers, {lines[-1]}")
            continue
        different += 1
        where = min(len(lines), len(theirs)) - 1 if first is None else first
        print(
            f"{layout}: different from number {where} on: {lines[where]} and {theirs[where] if theirs else 'nothing'}"
        )
    return different


def main() -> None:
    """Train all layouts and write their numbers, or compare two files. Every process must call this."""
    parser = harness.parser_of(__doc__, turns=1, processes=2)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    if "--compare" in sys.argv:  # in this process alone
        sys.exit(compare(*parser.parse_args().compare))
    options = harness.start(parser)
    curves = {name: train(layout) for name, layout in LAYOUTS.items()}
    where = Path(hf_pipetransformer.__file__).parent
    harness.console().print(str(where), {name: len(lines) for name, lines in curves.items()})
    harness.write(options, curves=curves)
    harness.finish()


if __name__ == "__main__":
    main()
