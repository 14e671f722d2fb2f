"""What differs between the processes is named on all of them, before the first step."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch
from distributed import run_ranks, run_ranks_expecting_error
from model_zoo import MODELS
from training_data import PadCollator, TrainingData

from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.run.consistency import check_same_everywhere, check_same_size

ODD_ONE = 2  # the rank that is given something else


def check(rank, world_size, difference=None):
    torch.distributed.init_process_group("gloo")
    mesh = ProcessMesh(timedelta(seconds=60))
    is_odd = rank == ODD_ONE
    name = "albert" if is_odd and difference == "architecture" else "bert-classification"
    model = MODELS[name].build(seed=rank)  # weights may differ
    if is_odd and difference == "frozen layer":
        model.bert.encoder.layer[0].requires_grad_(False)
    if is_odd and difference == "precision":
        model.bfloat16()
    size = 31 if is_odd and difference == "dataset length" else 32
    data = TrainingData("text-classification", size, seed=is_odd and difference == "dataset content")
    sample = PadCollator("text-classification")([data[0], data[1]])
    if is_odd and difference == "columns":
        del sample["attention_mask"]
    check_same_size(mesh, data)
    check_same_everywhere(mesh, model, sample)


def test_other_weights_are_no_difference():
    run_ranks(check, 3)


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("architecture", "different models: process 0 has BertForSeq.* process 2 has AlbertForSeq"),
        ("frozen layer", r"different models: process 0 has .*([\d,]+) parameters, \1 trainable.* process 2 has"),
        ("precision", "different models"),
        ("dataset length", "different datasets: process 0 has 32 samples, process 2 has 31 samples"),
        ("dataset content", "different datasets: process 0 has first samples .*content"),
        ("columns", r"different datasets: process 0 has first samples \['attention_mask', 'input_ids', 'labels'\]"),
    ],
)
def test_every_process_raises_the_same(difference, message):
    errors = run_ranks_expecting_error(check, 3, difference)
    assert [type(error) for error in errors] == [ValueError] * 3
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(ValueError, match=message):
        raise errors[0]


def check_drawn(rank, world_size, name):
    torch.distributed.init_process_group("gloo")
    mesh = ProcessMesh(timedelta(seconds=60))
    model = MODELS["bert-classification"].build(seed=0)
    data = TrainingData("text-classification", 32)
    generator = np.random.default_rng()

    def draw():
        batch = PadCollator("text-classification")([data[0], data[1]])
        if generator.random() < 0.5:  # seldom, for some rows
            batch["input_ids"] = batch["input_ids"].roll(1, 0)
        return {
            **batch,
            "noise": torch.from_numpy(generator.random(2)),
            "labels": batch["labels"] + rank * (name == "labels"),
        }

    rows = [{"id": number + rank * (name == "rows"), "words": np.arange(3)} for number in range(2)]
    check_same_everywhere(mesh, model, draw(), draw, rows)


def test_what_a_collator_draws_from_a_generator_of_its_own_is_no_difference():
    run_ranks(check_drawn, 3, "nothing")


@pytest.mark.parametrize("name", ["labels", "rows"])
def test_other_data_are_a_difference_although_the_collator_draws(name):
    for error in run_ranks_expecting_error(check_drawn, 3, name):
        assert isinstance(error, ValueError) and "different datasets" in str(error)
