"""A user's loss over several stages, together with what else a training may use: each equals the stock Trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed import run_ranks
from torch import nn
from training_runs import Outcome, Run, assert_same_training, outcome_of, pipeline_trainer, scale_gradients
from training_runs import _trainer as trainer_of
from transformers import AutoModelForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import load_lazily

ROWS = 8
FROZEN = 2


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


class FreezesByHand(TrainerCallback):
    """Freezes the embeddings and the first layers."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for module in (model.bert.embeddings, *model.bert.encoder.layer[:FROZEN]):
            for parameter in module.parameters():
                parameter.requires_grad_(False)


RUN = Run(trainer=Contrasts, samples=3 * ROWS, accumulation=1, epochs=3)
FREEZING = {"freeze_policy": "schedule", "freeze_schedule": {0: FROZEN}}
CASES: dict[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 3},
    "bf16": {"bf16": True},
    "lazy": {},
    "scaled": {},
    "frozen, cached": {**FREEZING, "activation_cache": "on"},
}


def model_of(case: str, folder: str) -> nn.Module:
    return (load_lazily if case == "lazy" else lambda cls, path: cls.from_pretrained(path))(
        AutoModelForSequenceClassification, folder
    )


def stock(rank: int, world_size: int, folder: str, cases: tuple[str, ...]) -> list[Outcome]:
    outcomes = []
    for case in cases:
        options = {name: value for name, value in CASES[case].items() if not name.startswith(("freeze", "activation"))}
        arguments = TrainingArguments(
            f"{folder}/stock", use_cpu=True, per_device_train_batch_size=ROWS, **{**RUN.common_options(), **options}
        )
        trainer = trainer_of(Trainer, arguments, RUN, model_of("plain", folder))
        if case == "frozen, cached":
            trainer.add_callback(FreezesByHand())
        outcomes.append(outcome_of(trainer))
    return outcomes


def ours(rank: int, world_size: int, folder: str, cases: tuple[str, ...]) -> list[Outcome]:
    outcomes, stages = [], 2
    for case in cases:
        options = dict(CASES[case])
        in_step = replace(RUN, per_device=ROWS // stages, accumulation=options.pop("gradient_accumulation_steps", 1))
        trainer = pipeline_trainer(in_step, stages, f"{folder}/{rank}", model_of(case, folder), **options)
        if case == "scaled":
            scale_gradients(trainer, growth_interval=2)
        if case == "lazy":  # its weights stay on their processes
            train = trainer.train
            trainer.train = lambda t=trainer, train=train, **_: (train(), t.make_model_whole())
        outcomes.append(outcome_of(trainer))
        outcomes[-1].notes["hits"] = [e["cache_hit_rate"] for e in trainer.state.log_history if "cache_hit_rate" in e]
    return outcomes


@pytest.fixture
def folder(tmp_path: Path) -> str:
    RUN.build_model().save_pretrained(tmp_path)
    return str(tmp_path)


def test_each_equals_one_process(folder: str) -> None:
    cases = tuple(CASES)
    expected = stock(0, 1, folder, cases)
    found = run_ranks(ours, 2, folder, cases, timeout=200)
    for number, case in enumerate(cases):
        if case == "bf16":  # rounding of norms grows from step to step
            assert found[0][number].losses[:3] == pytest.approx(expected[number].losses[:3], abs=0.03)
        else:
            assert_same_training([found[0][number]], expected[number], tolerance=1e-4)  # norms of 20 and more
    assert found[0][-1].notes["hits"] == [0.0, 1.0], "the second epoch reads what the first one has stored"
