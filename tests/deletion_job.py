"""Trains with parts that cannot be imported, in processes that this one forks: `deletion_job.py FOLDER PART...`.

Prints one line of JSON: for each part (or "all") the results of trainings in one process and in two stages, and the
response to the argument that requests the part. No module of the package is imported before the forks.
"""

from __future__ import annotations

import importlib.abc
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, BertConfig, Trainer  # noqa: F401  (for the forks)

PACKAGE = "hf_pipetransformer"
PARTS = (
    "driven",
    "freezing",
    "front",
    "frozen_calls",
    "lazy_loading",
    "loss_effects",
    "optimizer_check",
    "preemption",
    "prefix_cache",
    "records",
    "watchdog",
)
ALL = (*(f"parts.{name}" for name in PARTS), "token_slices", "forecast", "report")

ASKS: dict[str, dict[str, Any]] = {
    "parts.driven": {"pipeline_parallel_size": 2},  # with a loss of the user's
    "parts.freezing": {"freeze_policy": "alpha"},
    "parts.front": {"activation_cache": "on"},
    "parts.loss_effects": {"pipeline_parallel_size": 2, "loss_reduction": "mean"},  # with a loss of the user's
    "parts.prefix_cache": {"activation_cache": "on"},
    "parts.watchdog": {"pipeline_parallel_size": 2, "watchdog_timeout": 20.0},
    "token_slices": {"pipeline_parallel_size": 2, "token_slices": 2},
}
"""The arguments that ask for a part; `load_lazily` asks for lazy loading.

None asks for preemption, the records and the check of the optimizer.
"""


class Without(importlib.abc.MetaPathFinder):
    """Finds no module of some folders of the package."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        self.names = tuple(f"{PACKAGE}.{folder}" for folder in folders)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if any(name == one or name.startswith(f"{one}.") for one in self.names):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def train(folder: str, options: dict[str, Any], own_loss: bool = False) -> float | str:
    """The sum of the weights after a training, or the message of the error that has refused it."""
    from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

    class OwnLoss(PipeTransformerTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            loss = nn.functional.cross_entropy(model(input_ids=inputs["input_ids"]).logits, inputs["labels"])
            return (loss, {}) if return_outputs else loss

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = AutoModelForSequenceClassification.from_config(config)
    rows = torch.randint(64, (32, 8))
    data = [{"input_ids": row, "labels": int(row[0] > 32)} for row in rows]
    kind = OwnLoss if own_loss else PipeTransformerTrainer
    world = int(os.environ.get("WORLD_SIZE", 1))
    try:
        args = PipeTransformerTrainingArguments(
            folder,
            num_train_epochs=2,
            per_device_train_batch_size=8 // world,
            eval_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            learning_rate=1e-3,
            **options,
        )
        trainer = kind(model, args, train_dataset=data, eval_dataset=data[:8])
        trainer.train()
    except ValueError as error:
        return f"ValueError: {error}"
    return float(sum(parameter.detach().double().abs().sum() for parameter in model.parameters()))


def loaded(folder: str, options: dict[str, Any]) -> list[str]:
    """The modules of parts that a training has loaded."""
    train(folder, options)
    inside = f"{PACKAGE}.parts."
    return sorted(name.removeprefix(inside) for name in sys.modules if name.startswith(inside))


def forked(world: int, work: Callable[[], Any]) -> list[Any]:
    """The return values of forked processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, children = [], []
    for rank in range(world):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            if world > 1:
                given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
                os.environ |= {name: str(value) for name, value in given.items()}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            try:
                result = work()
            except BaseException as error:
                result = f"{type(error).__name__}: {error}"
            with os.fdopen(write, "w") as file:
                file.write(json.dumps(result))
            os._exit(0)
        os.close(write)
        pipes.append(read)
        children.append(pid)
    results = []
    for read, pid in zip(pipes, children, strict=True):
        with os.fdopen(read) as file:
            results.append(json.loads(file.read() or "null"))
        os.waitpid(pid, 0)
    return results


def without(folders: tuple[str, ...], work: Callable[[], Any]) -> Callable[[], Any]:
    def blocked() -> Any:
        assert not any(name.partition(".")[0] == PACKAGE for name in sys.modules)
        sys.meta_path.insert(0, Without(folders))
        return work()

    return blocked


def main(folder: str, parts: list[str]) -> None:
    results: dict[str, Any] = {}
    for name in parts:
        folders = ALL if name == "all" else () if name == "none" else (name,)

        def place(what: str, name: str = name) -> str:
            return str(Path(folder, f"{name}-{what}"))

        one = forked(1, without(folders, lambda: train(place("one"), {})))
        two = forked(2, without(folders, lambda: train(place("two"), {"pipeline_parallel_size": 2})))
        result = {"one": one, "two": two, "asked": []}
        options = ASKS.get(name)
        if options is not None:
            world, own = options.get("pipeline_parallel_size", 1), name in ("parts.driven", "parts.loss_effects")
            result["asked"] = forked(world, without(folders, lambda: train(place("asked"), options, own)))  # noqa: B023
        if name == "none":
            stages = {"pipeline_parallel_size": 2}
            result["loaded"] = forked(2, without((), lambda: loaded(place("loaded"), stages)))  # noqa: B023
        results[name] = result
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
