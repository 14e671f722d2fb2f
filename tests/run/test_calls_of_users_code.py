"""How often a user's code runs, from `train()` to its end: as often as under the stock Trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from selection import few
from training_data import PadCollator
from training_runs import Run
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

SAMPLES, BATCH, EPOCHS = 32, 8, 2
COUNTED = ("compute_loss", "training_step", "_prepare_inputs", "log")
LAYOUTS = {"K1": (1, 1), "K2": (2, 2), "R2": (2, 1)}
"""Numbers of processes and of stages."""
BEFORE = "before the first step"


def counting(name: str, calls: Counter[str], has_begun: Callable[[], bool]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # what only prepares a probe is the exception that is documented
        calls[name if has_begun() or name != "_prepare_inputs" else BEFORE] += 1
        return getattr(super(self.counted, self), name)(*args, **kwargs)

    return method


class Events(TrainerCallback):
    """Counts each event."""

    def __init__(self, calls: Counter[str]) -> None:
        self.has_begun = False
        for name in dir(TrainerCallback):
            if name.startswith("on_"):
                setattr(self, name, self._counting(name, calls))

    def _counting(self, name: str, calls: Counter[str]) -> Callable[..., None]:
        def event(args: Any, state: Any, control: Any, **others: Any) -> None:
            calls[name] += 1
            self.has_begun |= name == "on_step_begin"

        return event


def counts(rank: int, world: int, stages: int, way: str, folder: str, is_stock: bool = False) -> dict[str, int]:
    """How often each ran on this process."""
    calls: Counter[str] = Counter()
    events = Events(calls)
    run = Run(samples=SAMPLES)
    model = run.build_model()
    options: dict[str, Any] = {**run.common_options(), "num_train_epochs": EPOCHS, "use_cpu": True}
    options["per_device_train_batch_size"] = BATCH // world
    if way == "frozen":
        model.bert.requires_grad_(False)  # type: ignore[union-attr]
    if not is_stock:
        options |= {"pipeline_parallel_size": stages, "activation_cache": "on"}
        if way == "policy":
            options |= {"freeze_policy": "schedule", "freeze_schedule": {1: 1}, "elastic": False}
    base, arguments = (
        (Trainer, TrainingArguments) if is_stock else (PipeTransformerTrainer, PipeTransformerTrainingArguments)
    )
    names = [name for name in COUNTED if way != "stock loss" or name != "compute_loss"]
    methods = {name: counting(name, calls, lambda: events.has_begun) for name in names}
    keywords: dict[str, Any] = {}
    if way == "loss func":
        del methods["compute_loss"]

        def compute_loss_func(outputs: Any, labels: Any, **_: Any) -> torch.Tensor:
            calls["compute_loss_func"] += 1
            return torch.nn.functional.cross_entropy(outputs["logits"], labels)

        keywords["compute_loss_func"] = compute_loss_func
    counted: Any = type("Counted", (base,), methods)
    counted.counted = counted
    trainer = counted(
        model=model,
        args=arguments(f"{folder}/{rank}", **options),
        train_dataset=run.data(SAMPLES),
        data_collator=PadCollator(run.kind),
        callbacks=[events],
        **keywords,
    )
    calls.clear()  # of `on_init_end`
    trainer.train()
    return dict(calls)


WAYS = ("plain", "stock loss", "loss func", "policy", "frozen")
ALL = [(way, layout) for way in WAYS for layout in LAYOUTS]


@pytest.mark.parametrize(("way", "layout"), few(ALL, ("plain", "K1"), ("plain", "K2")))
def test_as_often_as_under_the_stock_trainer(way: str, layout: str, tmp_path: Path) -> None:
    world, stages = LAYOUTS[layout]
    (expected,) = run_ranks(counts, 1, 1, way, str(tmp_path / "stock"), is_stock=True)
    assert expected["training_step"] == EPOCHS * SAMPLES // BATCH
    for rank, found in enumerate(run_ranks(counts, world, stages, way, str(tmp_path), timeout=120)):
        is_examined = stages > 1 or way in ("policy", "stock loss")
        assert bool(found.pop(BEFORE, 0)) <= is_examined
        if stages > 1 and rank:  # the loss and the user's `log` run on the last stage, which rank 0 has
            there = {
                name: count for name, count in expected.items() if name == "log" or name.startswith("compute_loss")
            }
            assert not any(found.get(name) for name in there)
            found |= there
        if stages > 1 or way == "policy":  # the layout's and the cache's metrics reach callbacks as well
            assert found["on_log"] > expected["on_log"]
            found["on_log"] = expected["on_log"]
        assert found == expected, rank
