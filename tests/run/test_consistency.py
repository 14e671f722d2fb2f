"""What differs between the processes is named on all of them, before the first step."""

from __future__ import annotations

import re
from datetime import timedelta

import numpy as np
import torch
from distributed import run_ranks
from model_zoo import MODELS
from training_data import PadCollator, TrainingData

from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.run.consistency import check_same_everywhere, check_same_size

ODD_ONE = 2  # the rank that is given something else

DIFFERENCES = {
    "weights": None,  # may differ
    "architecture": "different models: process 0 has BertForSeq.* process 2 has AlbertForSeq",
    "frozen layer": r"different models: process 0 has .*([\d,]+) parameters, \1 trainable.* process 2 has",
    "precision": "different models",
    "dataset length": "different datasets: process 0 has 32 samples, process 2 has 31 samples",
    "dataset content": "different datasets: process 0 has first samples .*content",
    "columns": r"different datasets: process 0 has first samples \['attention_mask', 'input_ids', 'labels'\]",
    "drawn: nothing": None,  # what a collator draws from a generator of its own is no difference
    "drawn: labels": None,  # the stages use what the last one has collated
    "drawn: rows": "different datasets",
}


def check(mesh: ProcessMesh, rank: int, difference: str) -> None:
    is_odd = rank == ODD_ONE
    model = MODELS["albert" if is_odd and difference == "architecture" else "bert-classification"].build(seed=rank)
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


def check_drawn(mesh: ProcessMesh, rank: int, difference: str) -> None:
    data = TrainingData("text-classification", 32)
    generator = np.random.default_rng()

    def draw() -> dict[str, torch.Tensor]:
        batch = PadCollator("text-classification")([data[0], data[1]])
        if generator.random() < 0.5:  # seldom, for some rows
            batch["input_ids"] = batch["input_ids"].roll(1, 0)
        labels = batch["labels"] + rank * ("labels" in difference)
        return {**batch, "noise": torch.from_numpy(generator.random(2)), "labels": labels}

    rows = [{"id": number + rank * ("rows" in difference), "words": np.arange(3)} for number in range(2)]
    check_same_everywhere(mesh, MODELS["bert-classification"].build(), draw(), rows)


def check_all(rank: int, world_size: int) -> dict[str, str | None]:
    torch.distributed.init_process_group("gloo")
    mesh = ProcessMesh(timedelta(seconds=60))
    found: dict[str, str | None] = dict.fromkeys(DIFFERENCES)
    for difference in DIFFERENCES:
        try:
            (check_drawn if difference.startswith("drawn") else check)(mesh, rank, difference)
        except ValueError as error:
            found[difference] = str(error)
    return found


def test_every_process_raises_the_same_where_something_differs() -> None:
    first, *others = run_ranks(check_all, 3)
    for difference, message in DIFFERENCES.items():
        assert (first[difference] is None) == (message is None), difference
        assert message is None or re.search(message, str(first[difference])), first[difference]
        assert all(theirs[difference] == first[difference] for theirs in others)
