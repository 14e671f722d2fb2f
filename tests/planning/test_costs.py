"""The counted costs equal costs counted by hand."""

from __future__ import annotations

import torch
from model_zoo import MODELS
from torch import nn

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.planning.costs import UNKNOWN_TO_TORCH, Cost, UnitCost, measure_costs

ROWS, WIDTH, INNER, CLASSES = 2, 4, 6, 3
FLOAT, HALF = 4, 2  # bytes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(hidden))


class Toy(nn.Module):
    """[B, W] -> linear -> 3 blocks -> linear -> [B, C]; matrix products only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.stem(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return {"logits": self.head(hidden)}


def costs_of(model: nn.Module, batch: dict) -> tuple[UnitCost, ...]:
    return measure_costs(LayerStack.discover(model, batch), batch)


def toy_costs(model: nn.Module | None = None, rows: int = ROWS) -> tuple[UnitCost, ...]:
    return costs_of(model or Toy(), {"hidden": torch.randn(rows, WIDTH)})


def test_what_can_be_counted_by_hand() -> None:
    """A product of [1, n] and [n, m] takes n x m multiplications and additions. A linear layer keeps its input.

    The first block's input is the stem's output. Costs are for one row.
    """
    first, middle, last = toy_costs()
    block = 2 * (WIDTH * INNER + INNER * WIDTH)
    stem, head = 2 * WIDTH * WIDTH, 2 * WIDTH * CLASSES
    assert [unit.forward_flops for unit in (first, middle, last)] == [stem + block, block, block + head]
    sizes = {"up.weight": WIDTH * INNER, "down.weight": WIDTH * INNER, "down.bias": WIDTH}
    assert middle.parameters == {f"blocks.1.{name}": FLOAT * size for name, size in sizes.items()}
    assert first.parameters.keys() >= {"stem.weight", "stem.bias"} and last.parameters.keys() >= {"head.weight"}
    assert middle.trainable_bytes == sum(middle.parameters.values())
    assert middle.activation_bytes == FLOAT * (WIDTH + INNER)
    assert last.activation_bytes == FLOAT * (WIDTH + INNER + WIDTH)
    assert [unit.boundary_bytes for unit in (first, middle, last)] == [FLOAT * WIDTH, FLOAT * WIDTH, 0]
    assert toy_costs(rows=1) == toy_costs(rows=5)


def test_copies_that_autocast_would_keep() -> None:
    """Copies of the matrices that the backward reads. The stem is first, so its input needs no gradient."""
    model = Toy()
    model.blocks[1].requires_grad_(False)
    first, frozen, _ = toy_costs(model)
    block = {f"{name}.weight": HALF * WIDTH * INNER for name in ("up", "down")}
    assert first.copies == {f"blocks.0.{name}": size for name, size in block.items()}
    assert (frozen.copies, frozen.untrained_copies_bytes) == ({}, sum(block.values()))


def test_the_head_goes_on_when_the_last_unit_is_frozen():
    model, batch = Toy(), {"hidden": torch.randn(ROWS, WIDTH)}
    *others, last = measure_costs(LayerStack.discover(model, batch), batch, {"head.weight", "head.bias"})
    copies = {"head.weight": HALF * WIDTH * CLASSES}
    assert last.head == Cost(2 * WIDTH * CLASSES, FLOAT * WIDTH, FLOAT * (WIDTH + 1) * CLASSES, copies)
    assert {unit.head for unit in others} == {Cost()}


def test_the_units_sum_up_to_the_model():
    model, batch = MODELS["bert-classification"].build(), MODELS["bert-classification"].batch(2)
    units = costs_of(model, batch)
    names = [name for unit in units for name in unit.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert sum(sum(unit.parameters.values()) for unit in units) == sum(p.nbytes for p in model.parameters())
    with torch.utils.flop_counter.FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH) as counter:
        model(**batch)
    assert 2 * sum(unit.forward_flops for unit in units) == counter.get_total_flops()


def test_grouped_experts_count_as_eager_ones():
    """transformers computes experts by a product that torch's counter does not know; routing makes shares differ."""
    totals = []
    for implementation in ("eager", "grouped_mm"):
        model = MODELS["mixtral"].build()
        model.config._experts_implementation = implementation
        batch = MODELS["mixtral"].batch(2)
        costs = measure_costs(LayerStack.discover(model, batch), batch)
        totals.append(sum(cost.forward_flops for cost in costs))
    assert totals[0] == totals[1]


def test_a_shared_parameter_counts_with_each_unit_that_needs_it() -> None:
    units = costs_of(MODELS["llama-tied"].build(), MODELS["llama-tied"].batch(2))
    assert ["model.embed_tokens.weight" in unit.parameters for unit in units] == [True, False, False, True]


def test_sparse_tensors_may_be_kept_for_the_backward():
    """As a sparse adapter (SHiRA) keeps them: their indices and values have no storage of their own."""

    class Sparse(Block):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden = super().forward(hidden)
            return hidden + (self.down.bias.to_sparse() * hidden.new_full((), 2.0)).to_dense()

    model = Toy()
    model.blocks[1] = Sparse()
    factor = FLOAT // ROWS
    assert toy_costs(model)[1].activation_bytes == toy_costs()[1].activation_bytes + factor
