#!/usr/bin/env python
"""Are the losses of two versions of the library the same, bit by bit?

    torchrun --nproc_per_node 2 benchmarks/loss_curves.py --output before.json      (with the one version)
    torchrun --nproc_per_node 2 benchmarks/loss_curves.py --output after.json       (with the other)
    python benchmarks/loss_curves.py --compare before.json after.json

A small BERT with dropout, 24 steps each: one stage with replicas, one pipeline of two stages, a pipeline that freezes,
shrinks to one stage and reads frozen layers' outputs from the cache, and token slices of a small Llama. Losses and
gradient norms of each step, and a checksum of all weights, are written as hexadecimal numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

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


def train(options: dict[str, Any]) -> list[str]:
    """Losses, norms and weights of one training, as exact text."""
    import torch
    import transformers
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        LlamaConfig,
        LlamaForCausalLM,
        TrainerCallback,
        set_seed,
    )

    from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

    transformers.logging.set_verbosity_error()
    seen: list[str] = []

    class Note(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.extend(f"{name} {float(logs[name]).hex()}" for name in ("loss", "grad_norm") if name in logs)

    set_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    generator = torch.Generator().manual_seed(1)
    if "token_slices" in options:
        model: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, num_key_value_heads=2, **sizes))
        rows: list[Any] = [{"input_ids": (ids := torch.randint(0, 64, (16,), generator=generator)), "labels": ids}]
        rows += [
            {"input_ids": (ids := torch.randint(0, 64, (16,), generator=generator)), "labels": ids} for _ in range(31)
        ]
    else:
        model = BertForSequenceClassification(BertConfig(num_hidden_layers=4, **sizes))
        rows = [{"input_ids": torch.randint(0, 64, (12,), generator=generator), "labels": k % 2} for k in range(32)]
    defaults: dict[str, Any] = {"num_train_epochs": 6, "gradient_accumulation_steps": 2}
    with tempfile.TemporaryDirectory() as folder:
        args = PipeTransformerTrainingArguments(
            folder,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            **{**defaults, **options},
        )
        PipeTransformerTrainer(model, args, train_dataset=rows, callbacks=[Note()]).train()  # type: ignore[arg-type]
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return [*seen, f"weights {zlib.crc32(weights):08x}"]


def compare(one: Path, other: Path) -> int:
    """Print the first difference of each layout; the number of layouts that differ."""
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (one, other))
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    options = parser.parse_args()
    if options.compare:
        sys.exit(compare(*options.compare))
    curves = {name: train(layout) for name, layout in LAYOUTS.items()}
    if os.environ.get("RANK", "0") == "0":
        options.output.write_text(json.dumps(curves, indent=1), encoding="utf-8")
        import hf_pipetransformer

        print(Path(hf_pipetransformer.__file__).parent, {name: len(lines) for name, lines in curves.items()})


if __name__ == "__main__":
    main()
