"""Distillation on real data: the stock Trainer beside ours, with two class names changed.

    OMP_NUM_THREADS=1 python -m benchmarks.studies.distillation --model "$MODEL" --data data/sst2 --seeds 0 1 2

SST-2. The teacher is MiniLM-L6, trained on the labels for four epochs by the stock Trainer. The student has the first
two layers of the untrained MiniLM, and its dropout. Batches are padded to their longest sentence. Four ways:

stock         `Trainer`, which runs the teacher in each step
without       `Trainer`, with zeros in place of the teacher's logits: no reading can be faster
ours          the two class names changed
ours, again   the same training over the `activation_cache_dir` that the first one has filled

One process, fp32. "difference" is the largest one of a final weight from the stock Trainer's.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, Trainer, set_seed

from benchmarks import harness
from benchmarks.harness import Figures, Ratio, StepClock
from benchmarks.studies.tasks import Task, sst2
from hf_pipetransformer import PipeTransformerTrainer

WAYS = ("stock", "without", "ours", "ours, again")
LAYERS, TEACHER_EPOCHS, BATCH, TEMPERATURE, TEACHER_WEIGHT = 2, 4, 16, 2.0, 0.5


class Distills:
    """The loss of `recipes/run_distillation.py`."""

    teacher: nn.Module
    has_teacher = True

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits if self.has_teacher else torch.zeros_like(outputs.logits)
        mine, theirs = F.log_softmax(outputs.logits / TEMPERATURE, -1), F.softmax(wanted / TEMPERATURE, -1)
        of_teacher = F.kl_div(mine, theirs, reduction="batchmean") * TEMPERATURE**2
        loss = (1 - TEACHER_WEIGHT) * outputs.loss + TEACHER_WEIGHT * of_teacher
        return (loss, outputs) if return_outputs else loss


class Pupil:
    """One seed: its teacher, the final weights of the stock Trainer, and a folder for stored outputs.

    Args:
        options: of the command line.
        task: the data.
        seed: of the teacher, of the student's head and of the order.
    """

    def __init__(self, options: argparse.Namespace, task: Task, seed: int) -> None:
        self._options, self._task, self._seed = options, task, seed
        self._folder = tempfile.TemporaryDirectory()
        self._teacher: nn.Module | None = None
        self._stock: dict[str, torch.Tensor] = {}

    def _model(self, **changes: Any) -> nn.Module:
        model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
            self._options.model, num_labels=2, **changes
        )
        return model

    def fit(self, way: str) -> Figures:
        """Train the student, and the teacher before the first one. Evaluate."""
        task, seed, clock = self._task, self._seed, StepClock()
        keywords: dict[str, Any] = {
            "eval_dataset": task.validation,
            "data_collator": task.collate,
            "compute_metrics": task.compute_metrics,
        }
        common: dict[str, Any] = {"per_device_train_batch_size": BATCH, "learning_rate": 3e-4, "seed": seed}
        if self._teacher is None:
            set_seed(seed)
            teacher = self._model()
            with tempfile.TemporaryDirectory() as folder:
                options = {**common, "learning_rate": 1e-4, "num_train_epochs": TEACHER_EPOCHS}
                harness.make_trainer(teacher, task.train, folder, [], False, keywords=keywords, **options).train()
            self._teacher = teacher.eval().requires_grad_(False)
        is_ours = way.startswith("ours")
        if way == "ours":
            self._folder = tempfile.TemporaryDirectory()
        stored = {"activation_cache_dir": self._folder.name} if is_ours else {}
        set_seed(seed)
        model = self._model(num_hidden_layers=LAYERS)
        with tempfile.TemporaryDirectory() as folder:
            trainer: Any = harness.make_trainer(
                model,
                task.train,
                folder,
                [clock],
                is_ours,
                trainer_class=type("Trains", (Distills, PipeTransformerTrainer if is_ours else Trainer), {}),
                keywords=keywords,
                num_train_epochs=self._options.epochs,
                **common,
                **stored,
            )
            trainer.teacher, trainer.has_teacher = self._teacher, way != "without"
            trainer.train()
            accuracy = trainer.evaluate()["eval_accuracy"]
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        self._stock = self._stock or weights
        seconds = [epoch["cpu_seconds"] for epoch in clock.epochs]
        return {
            **{f"epoch_{number}_cpu_s": value for number, value in enumerate(seconds, 1)},
            "all_cpu_s": sum(seconds),
            "accuracy": accuracy,
            "difference": max(float((weights[name] - weight).abs().max()) for name, weight in self._stock.items()),
        }


def main() -> None:
    """Train all ways and print the table."""
    parser = harness.parser_of(__doc__, turns=1)
    parser.add_argument("--model", required=True, help="a folder with MiniLM's weights and tokenizer")
    parser.add_argument("--data", type=Path, default=Path("data/sst2"))
    parser.add_argument("--samples", type=int, default=4096, help="training samples")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = harness.start(parser)
    task = sst2(options.model, options.data, options.samples, seed=0)
    pupils = {seed: Pupil(options, task, seed) for seed in options.seeds}
    cases = {f"seed {seed}: {way}": partial(pupil.fit, way) for seed, pupil in pupils.items() for way in WAYS}

    def stock_of(name: str) -> str:
        return f"{name.partition(':')[0]}: stock"

    def without(name: str) -> str:
        return f"{name.partition(':')[0]}: without"

    ratios = [Ratio(f"epoch {k}, to stock", f"epoch_{k}_cpu_s", stock_of) for k in range(1, options.epochs + 1)]
    ratios += [Ratio(f"epoch {k}, to without", f"epoch_{k}_cpu_s", without) for k in range(2, options.epochs + 1)]
    ratios.append(Ratio("all, stock / it", "all_cpu_s", stock_of, is_speed_up=True))
    harness.report(options, harness.take_turns(cases, options), ratios)


if __name__ == "__main__":
    main()
