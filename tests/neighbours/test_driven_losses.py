"""A user's loss over several stages, together with what else a training may use: each equals the stock Trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks
from training_runs import Outcome, Run, assert_same_training, outcome_of, pipeline_trainer, scale_gradients
from training_runs import _trainer as trainer_of
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from hf_pipetransformer import load_lazily

ROWS = 8


class Contrasts:
    """Calls the model twice; the second call's rows are compared with all of the first one's."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        anchors = F.normalize(model(**inputs).logits, dim=-1)
        others = {
            **inputs,
            "input_ids": inputs["input_ids"].flip(0),
            "attention_mask": inputs["attention_mask"].flip(0),
        }
        scores = anchors @ F.normalize(model(**others).logits.roll(1, -1), dim=-1).T
        return F.cross_entropy(scores / 0.5, torch.arange(len(scores)).flip(0))


RUN = Run(trainer=Contrasts, samples=3 * ROWS, accumulation=1, epochs=3)
CASES: dict[str, dict[str, Any]] = {"bf16": {"bf16": True}, "lazy": {}, "scaled": {}}
"""With accumulated batches, frozen layers and the cache: tests/user_code."""


def stock(folder: str, case: str) -> Outcome:
    options = {**RUN.common_options(), **CASES[case], "use_cpu": True, "per_device_train_batch_size": ROWS}
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    return outcome_of(trainer_of(Trainer, TrainingArguments(f"{folder}/stock", **options), RUN, model))


def ours(rank: int, world_size: int, folder: str) -> list[Outcome]:
    outcomes = []
    for case, options in CASES.items():
        load = load_lazily if case == "lazy" else lambda cls, path: cls.from_pretrained(path)
        model = load(AutoModelForSequenceClassification, folder)
        trainer = pipeline_trainer(replace(RUN, per_device=ROWS // 2), 2, f"{folder}/{rank}", model, **options)
        if case == "scaled":
            scale_gradients(trainer, growth_interval=2)
        if case == "lazy":  # its weights stay on their processes
            train = trainer.train
            trainer.train = lambda t=trainer, train=train, **_: (train(), t.make_model_whole())
        outcomes.append(outcome_of(trainer))
    return outcomes


@pytest.mark.slow
def test_each_equals_one_process(tmp_path: Path) -> None:
    folder = str(tmp_path)
    RUN.build_model().save_pretrained(folder)
    found = run_ranks(ours, 2, folder, timeout=200)[0]
    for outcome, case in zip(found, CASES, strict=True):
        expected = stock(folder, case)
        if case == "bf16":  # rounding of norms grows from step to step
            assert outcome.losses[:3] == pytest.approx(expected.losses[:3], abs=0.03)
        else:
            assert_same_training([outcome], expected, tolerance=1e-4)  # norms of 20 and more
