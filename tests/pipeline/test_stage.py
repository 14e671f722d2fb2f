"""A stage learns the shapes that it hands on once for each shape of batch, and leaves no trace by that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_zoo import MODELS

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.model.micro_batch import Batch
from hf_pipetransformer.pipeline.stage import ShapeBook, StageModule

ZOO_MODEL = MODELS["bert-classification"]


class FirstStage:
    """Of two, in this process."""

    def __init__(self) -> None:
        self.model = ZOO_MODEL.build()
        stack = LayerStack.discover(self.model, ZOO_MODEL.batch(2))
        stack.runner.install()
        self.sent: list[Any] = []
        self.stage = StageModule(stack, 0, 2, lambda model, batch: model(**batch).loss, torch.device("cpu"))
        self.book = ShapeBook(self.stage, self.sent.pop, self.sent.append)


def test_shapes_are_learnt_once_and_without_a_trace() -> None:
    first, forwards = FirstStage(), 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    first.model.bert.embeddings.register_forward_pre_hook(count)
    for module in first.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    batch = ZOO_MODEL.batch(4)
    longer: Batch = {n: torch.cat([t, t[:, :2]], 1) if t.dim() > 1 else t for n, t in batch.items()}
    before = torch.get_rng_state()
    for given, rows, expected in [(batch, 2, 2), (batch, 1, 2), (ZOO_MODEL.batch(6), 3, 2), (longer, 2, 4)]:
        (carried,) = first.book.shapes(given, rows).outgoing
        assert carried.shape == (rows, given["input_ids"].shape[1], 16)
        assert forwards == expected
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in first.model.parameters())


def test_a_shape_that_depends_on_values_is_refused() -> None:
    first = FirstStage()
    shapes = first.book.shapes(ZOO_MODEL.batch(2), 2)
    words = r"'bert\.encoder\.layer\.1' returned \(1, 7, 16\).*pipeline_parallel_size=1"
    with first.stage.holding((ZOO_MODEL.batch(1),), shapes), pytest.raises(RuntimeError, match=words):
        first.stage(index=torch.zeros(1, dtype=torch.long))
