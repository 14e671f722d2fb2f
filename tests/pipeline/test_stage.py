"""The shapes that a stage foretells are those it hands on, and only what the loss depends on has a gradient."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest
import torch
from model_zoo import MODELS

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.model.micro_batch import Batch
from hf_pipetransformer.pipeline.stage import CarriedTensor, ShapeBook, StageModule, StageShapes

CPU = torch.device("cpu")
INDEX = torch.zeros(1, dtype=torch.long)


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


class Stages:
    """A model cut at `bounds`, all stages in this process. Messages between them lie in a queue each."""

    def __init__(self, name: str, bounds: tuple[int, ...], frozen_units: int = 0) -> None:
        self.name = name
        model = MODELS[name].build()
        self.stack = LayerStack.discover(model, MODELS[name].batch(2))
        for parameter in self.stack.owned(0, frozen_units) - self.stack.owned(frozen_units, self.stack.num_units):
            self.stack.table[parameter].requires_grad_(False)
        self.stack.runner.install()
        edges = [deque() for _ in bounds]
        self.stages, self.books = [], []
        for k, (start, stop) in enumerate(pairwise(bounds)):
            self.stages.append(StageModule(self.stack, start, stop, loss_of, CPU))
            self.books.append(ShapeBook(self.stages[k], edges[k].popleft, edges[k + 1].append))

    def batch(self, rows: int) -> Batch:
        return MODELS[self.name].batch(rows, seed=3)

    def shapes(self, batch: Batch, rows: int) -> list[StageShapes]:
        return [book.shapes(batch, rows) for book in self.books]

    def run(self, micro_batch: Batch, shapes: list[StageShapes]) -> list[tuple[torch.Tensor, ...]]:
        """What each stage returns, in order, each working on what the one before has handed on."""
        returned, received = [], ()
        for stage, its_shapes in zip(self.stages, shapes, strict=True):
            with stage.holding((micro_batch,), its_shapes):
                output = stage(*received, index=INDEX)
            returned.append(output if isinstance(output, tuple) else (output,))
            received = tuple(t.detach().requires_grad_(t.requires_grad) for t in returned[-1])
        return returned


# T5 carries two stacks and position biases, Swin halves its sequence, a multiple choice is B x choices rows inside
CUTS = [("t5", (0, 2, 4, 6)), ("swin", (0, 1, 2, 3)), ("bert-multiple-choice", (0, 2, 4)), ("deberta-v2", (0, 1, 4))]


@pytest.mark.parametrize(("name", "bounds"), CUTS)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_foretold_shapes_are_those_handed_on(name, bounds, rows):
    """They were learnt from one row and from two of a batch of five."""
    stages = Stages(name, bounds)
    shapes = stages.shapes(stages.batch(5), rows)
    returned = stages.run(stages.batch(rows), shapes)
    for k, stage in enumerate(stages.stages[:-1]):
        used = [c for slot, c in zip(stage.slots_out, shapes[k].outgoing, strict=True) if slot.is_used]
        assert [(tuple(t.shape), t.dtype, t.requires_grad) for t in returned[k]] == [
            (c.shape, c.dtype, c.requires_grad) for c in used
        ]
        assert all(tensor.is_contiguous() for tensor in returned[k])
        assert shapes[k].outgoing == shapes[k + 1].incoming
    assert torch.allclose(returned[-1][0], loss_of(stages.stack.model, stages.batch(rows)), atol=1e-5)
    assert returned[-1][0].shape == (1,)


def test_shapes_are_learnt_once_for_each_shape_of_batch():
    stages = Stages("bert-classification", (0, 2, 4))
    calls = []
    learn = stages.books[0]._learn
    stages.books[0]._learn = lambda batches: calls.extend(batches) or learn(batches)
    first = stages.batch(4)
    longer = {n: torch.cat([t, t[:, :2]], 1) if t.dim() > 1 else t for n, t in first.items()}
    for batch, rows, forwards in [
        (first, 2, 2),
        (first, 1, 2),
        (stages.batch(6), 3, 2),
        (longer, 2, 4),
        (first, 4, 4),
    ]:
        stages.shapes(batch, rows)
        assert len(calls) == forwards


def test_what_was_learnt_from_a_single_row_is_not_used_for_more():
    """The last batch of an epoch may be the first of its length."""
    stages = Stages("bert-classification", (0, 2, 4))
    assert stages.shapes(stages.batch(1), 1)[0].outgoing[0].shape == (1, 7, 16)
    assert stages.shapes(stages.batch(4), 2)[0].outgoing[0].shape == (2, 7, 16)


def test_learning_shapes_draws_no_random_numbers_and_leaves_no_gradients():
    stages = Stages("bert-classification", (0, 2, 4))
    for module in stages.stack.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    before = torch.get_rng_state()
    stages.shapes(stages.batch(4), 2)
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in stages.stack.model.parameters())


def test_nothing_behind_frozen_layers_has_a_gradient():
    stages = Stages("bert-classification", (0, 2, 3, 4), frozen_units=2)
    shapes = stages.shapes(stages.batch(2), 2)
    assert [[c.requires_grad for c in s.outgoing] for s in shapes] == [[False], [True], []]
    returned = stages.run(stages.batch(2), shapes)
    assert [[t.requires_grad for t in tensors] for tensors in returned] == [[False], [True], [True]]
    assert returned[0][0].grad_fn is None


def test_a_slot_that_the_loss_does_not_depend_on_is_handed_on_without_a_graph():
    """The encoder's position bias is not read by T5's decoder; its shape is known all the same."""
    stages = Stages("t5", (0, 3, 6))
    shapes = stages.shapes(stages.batch(2), 2)
    slots = stages.stages[0].slots_out
    assert [slot.is_used for slot in slots] == [True, False]
    assert [c.requires_grad for c in shapes[0].outgoing] == [True, False]
    assert len(stages.run(stages.batch(2), shapes)[0]) == 1


def test_a_shape_that_depends_on_values_is_refused():
    stages = Stages("bert-classification", (0, 2, 4))
    shapes = stages.shapes(stages.batch(2), 2)
    with pytest.raises(
        RuntimeError, match=r"'bert\.encoder\.layer\.1' returned \(1, 7, 16\).*pipeline_parallel_size=1"
    ):
        stages.run(stages.batch(1), shapes)


def test_a_stage_has_the_parameters_of_its_units_and_no_others():
    stages = Stages("llama-tied", (0, 2, 4))
    for stage, (start, stop) in zip(stages.stages, ((0, 2), (2, 4)), strict=True):
        owned = stages.stack.owned(start, stop)
        assert set(stage.names) == owned
        assert {id(p) for p in stage.parameters()} == {id(stages.stack.table[name]) for name in owned}
        assert not list(stage.children()), "the model is referred to, not registered"


def test_buffers_that_are_saved_are_the_stage_s():
    stages = Stages("resnet", (0, 1, 2))
    saved = {name for name, _ in stages.stack.model.named_buffers()}
    assert saved and len(list(stages.stages[0].buffers())) == len(saved)


def test_training_mode_reaches_the_model():
    stage = Stages("bert-classification", (0, 2, 4)).stages[1]
    stage.eval()
    assert not any(module.training for module in stage.stack.model.modules())
    stage.train()
    assert all(module.training for module in stage.stack.model.modules())


def test_stand_ins_for_carried_tensors():
    carried = CarriedTensor((3, 1000), torch.bfloat16, requires_grad=True)
    zeros, meta = carried.zeros(CPU), carried.meta()
    assert (zeros.shape, zeros.dtype, zeros.untyped_storage().nbytes()) == ((3, 1000), torch.bfloat16, 2)
    assert (meta.shape, meta.dtype, meta.requires_grad, meta.is_meta) == ((3, 1000), torch.bfloat16, True, True)
