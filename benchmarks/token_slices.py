#!/usr/bin/env python
"""A training step of a causal model with few long sequences: cut along the tokens, and not.

    python benchmarks/token_slices.py --processes 2 --out results.json

One stage on each process. For each width and each batch of rows x tokens all variants take turns, step by step:

    gpipe M, 1f1b M    rows alone are cut, into M micro-batches
    n slices           each row into n equal slices
    auto               parts and slices by the dynamic program, after a profile of the stages

A step is forward and backward of the whole batch, from one barrier to the next; no optimizer. "auto" is also compared
with what its plan predicts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.parts.records.sentences import describe_slices
from hf_pipetransformer.pipeline.elastic_pipeline import ElasticPipeline
from hf_pipetransformer.pipeline.engines.engine import Execution
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.planning.costs import measure_costs
from hf_pipetransformer.planning.planner import Planner, Request
from hf_pipetransformer.token_slices.engine import Slicing
from hf_pipetransformer.token_slices.slice_timeline import SlicePlan
from hf_pipetransformer.token_slices.slicing_probe import probe_slicing

import harness
from harness import Figures, Ratio

VOCABULARY = 1000
LAYERS = 4
AUTO = "auto"


class Variant:
    """One way to cut a batch, with a model and a pipeline of its own."""

    def __init__(
        self, name: str, width: int, batch: dict[str, torch.Tensor], mesh: ProcessMesh, schedule: str, m: int | None
    ) -> None:
        self.plan = SlicePlan(())
        torch.manual_seed(0)
        model = LlamaForCausalLM(_config(width, batch["input_ids"].shape[1]))
        sample = {key: value[:1] for key, value in batch.items()}
        stack = LayerStack.discover(model, sample)
        # each step brings its own number of samples
        request = Request(mesh.world_size, schedule=schedule, num_microbatches="auto" if m is None else m)
        costs = measure_costs(stack, sample)
        layout = Planner(unit_costs=costs, world_size=mesh.world_size, request=request).first
        self.pipeline = ElasticPipeline(stack, mesh, torch.device("cpu"), _no_replicas)
        token_slices: str | int = AUTO if name == AUTO else int(name.split()[0]) if "slices" in name else "off"
        slicing: Slicing | None = None
        if token_slices != "off":
            windows = probe_slicing(
                stack, sample, lambda part: _loss(model, part, sample), loss_tolerance=1e-3, gradient_tolerance=1e-3
            )
            slicing = Slicing(token_slices, windows, self._note)
        self.pipeline.place(layout, Execution(slicing))
        self.pipeline.train()

    def _note(self, plan: SlicePlan) -> None:
        self.plan = plan

    def step(self, batch: dict[str, torch.Tensor]) -> Figures:
        """Run forward and backward of a batch. Collective over all processes."""
        loss = _StepLoss(batch)
        self.pipeline.running.prepare(batch, loss)
        self.pipeline.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        self.pipeline.step(batch, loss)
        dist.barrier()
        seconds = time.perf_counter() - began
        predicted = {} if self.plan.seconds is None else {"predicted_ms": 1e3 * self.plan.seconds}
        return {"step_ms": 1e3 * seconds, **predicted}


class _StepLoss:
    """The loss of a batch."""

    unread = ()

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self._batch = batch

    def of_part(self, model: Any, part: dict[str, Any]) -> torch.Tensor:
        return _loss(model, part, self._batch)

    def drive(self) -> None:
        raise NotImplementedError


def _config(width: int, tokens: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=tokens,
        use_cache=False,
    )


def _loss(model: Any, part: dict[str, Any], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    count = batch["labels"].shape[0] * (batch["labels"].shape[1] - 1)
    return model(**part, num_items_in_batch=count).loss


def _no_replicas(*_: Any) -> Any:
    raise RuntimeError("one pipeline has no replicas")


def names_for(rows: int) -> list[tuple[str, str, int | None]]:
    """(name, schedule, M) of the variants for a batch; the others are compared with the first one."""
    counts = [m for m in (1, 2, 4, 8) if m <= rows and rows % m == 0]
    whole = [(f"{schedule} M = {m}", schedule, m) for m in counts for schedule in ("gpipe", "1f1b")]
    if rows == 1:
        whole = whole[:1]
    return [*whole, ("4 slices", "1f1b", 1), ("8 slices", "1f1b", 1), (AUTO, "1f1b", None)]


def main() -> None:
    """Time all variants and print the table. Every process must call this."""
    parser = harness.parser_of(__doc__, turns=9, processes=2)
    parser.add_argument("--widths", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="rows")
    options = harness.start(parser)
    options.max_others = float("inf")  # a step is too short to tell
    mesh = ProcessMesh(timedelta(minutes=5))
    cases: dict[str, Callable[[], Figures]] = {}
    autos: dict[str, Variant] = {}
    for width in options.widths:
        for rows in options.batches:
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(0, VOCABULARY, (rows, options.tokens), generator=generator)
            batch = {"input_ids": ids, "labels": ids}
            for name, schedule, m in names_for(rows):
                variant = Variant(name, width, batch, mesh, schedule, m)
                variant.step(batch)  # warms up
                cases[f"{width} wide, {rows} rows: {name}"] = partial(variant.step, batch)
                if name == AUTO:
                    autos[f"{width} wide, {rows} rows"] = variant
    turns = harness.take_turns(cases, options)
    for name, variant in autos.items():
        harness.console().print(f"{name}: {describe_slices(variant.plan)}")
    ratio = Ratio("speed-up", "step_ms", lambda name: name.partition(": ")[0] + ": gpipe M = 1", is_speed_up=True)
    parts = {name: [[part.rows, list(part.lengths)] for part in variant.plan.parts] for name, variant in autos.items()}
    harness.report(options, turns, [ratio], parts=parts)


if __name__ == "__main__":
    main()
