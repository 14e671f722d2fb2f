"""What it costs that a loss drives the pipeline, beside the same loss by parts and beside DDP.

    torchrun --nproc_per_node 2 benchmarks/driven_loss.py [--out benchmarks/results/driven_loss.json]

Two processes, a BERT of MiniLM's size, M = 4. In turn, several times: by parts (GPipe, 1F1B), driven with one call of
the model, driven with two calls (R-Drop), and DDP. Seconds are those of a step, the median of each training; ratios
are of one turn, and their median is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, set_seed

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

ROWS, TOKENS, STEPS, WARM_UP = 32, 64, 12, 3
CONFIG = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class Rows(torch.utils.data.Dataset):
    """Random tokens with classes."""

    def __len__(self) -> int:
        return ROWS * STEPS

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(1, 30000, (TOKENS,), generator=generator), "labels": index % 2}


class Own(PipeTransformerTrainer):
    """A loss of the user's with one call of the model."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        return F.cross_entropy(model(**inputs).logits, labels)


class Twice(PipeTransformerTrainer):
    """R-Drop: two calls."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        one, two = model(**inputs).logits, model(**inputs).logits
        loss = F.cross_entropy(one, labels) + F.cross_entropy(two, labels)
        return loss + F.kl_div(one.log_softmax(-1), two.softmax(-1), reduction="batchmean")


class Clock(TrainerCallback):
    """Takes the time at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        steps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        return statistics.median(steps[WARM_UP:])


WAYS: dict[str, tuple[type, dict[str, Any]]] = {
    "GPipe by parts": (Own, {"pipeline_schedule": "gpipe", "loss_reduction": "mean"}),
    "1F1B by parts": (Own, {"loss_reduction": "mean"}),
    "driven, one call": (Own, {}),
    "driven, two calls": (Twice, {}),
    "DDP": (Own, {"pipeline_parallel_size": 1}),
}


def seconds_of(way: str, folder: str) -> float:
    trainer_class, options = WAYS[way]
    set_seed(0)
    clock = Clock()
    arguments = PipeTransformerTrainingArguments(
        output_dir=folder,
        **{
            "pipeline_parallel_size": 2,
            "num_microbatches": 4,
            "per_device_train_batch_size": ROWS // 2,
            "num_train_epochs": 1,
            "report_to": [],
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        },
    )
    model = BertForSequenceClassification(BertConfig(**CONFIG))
    trainer_class(model=model, args=arguments, train_dataset=Rows(), callbacks=[clock]).train()
    return clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = f"/tmp/driven-loss-{os.environ.get('MASTER_PORT', '0')}"
    turns = [{way: seconds_of(way, folder) for way in WAYS} for _ in range(args.turns)]
    if os.environ.get("RANK", "0") != "0":
        return
    base = "GPipe by parts"
    found = {
        way: {
            "seconds": statistics.median(turn[way] for turn in turns),
            f"times {base}": statistics.median(turn[way] / turn[base] for turn in turns),
        }
        for way in WAYS
    }
    twice = statistics.median(turn["driven, two calls"] / (2 * turn["driven, one call"]) for turn in turns)
    result = {"ways": found, "two calls / twice one": twice, "turns": turns, "torch": torch.__version__}
    print(json.dumps(result, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
