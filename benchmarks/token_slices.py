#!/usr/bin/env python
"""A training step of a causal model with few long sequences: cut along the tokens, and not.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/token_slices.py --output results.json

One stage on each process. For each width and each batch of rows x tokens all variants take turns, step by step, so
that whatever else the machine does hits all of them alike:

    gpipe M, 1f1b M    rows alone are cut, into M micro-batches
    n slices           each row into n equal slices
    auto               parts and slices by the dynamic program, after a profile of the stages

A step is forward and backward of the whole batch, from one barrier to the next; no optimizer. What is compared is the
median over the steps. "auto" is also compared with what its plan predicts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.pipeline.elastic_pipeline import ElasticPipeline
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.planning.costs import measure_costs
from hf_pipetransformer.planning.plan_choice import make_plan
from hf_pipetransformer.run.events_file import describe_slices
from hf_pipetransformer.token_slices.slice_choice import Slicing
from hf_pipetransformer.token_slices.slice_planning import RowSlices
from hf_pipetransformer.token_slices.slicing_probe import probe_slicing

VOCABULARY = 1000
LAYERS = 4
AUTO = "auto"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--widths", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="rows")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


class Variant:
    """One way to cut a batch, with a model and a pipeline of its own."""

    def __init__(
        self, name: str, width: int, batch: dict[str, torch.Tensor], mesh: ProcessMesh, schedule: str, m: int | None
    ) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.parts: tuple[RowSlices, ...] = ()
        self.predicted: float | None = None
        torch.manual_seed(0)
        model = LlamaForCausalLM(_config(width, batch["input_ids"].shape[1]))
        sample = {key: value[:1] for key, value in batch.items()}
        stack = LayerStack.discover(model, sample)
        plan = make_plan(
            measure_costs(stack, sample),
            mesh.world_size,
            mesh.world_size,
            schedule=schedule,
            num_microbatches=m,
            rows_per_device=1,  # each step brings its own number
            memory_budget_bytes=None,
        )
        self.pipeline = ElasticPipeline(stack, mesh, torch.device("cpu"), _no_replicas)
        token_slices: str | int = AUTO if name == AUTO else int(name.split()[0]) if "slices" in name else "off"
        if token_slices != "off":
            windows = probe_slicing(
                stack, sample, lambda part: _loss(model, part, sample), loss_tolerance=1e-3, gradient_tolerance=1e-3
            )
            self.pipeline.slicing = Slicing(token_slices, windows, self._note)
        self.pipeline.place(plan, lambda model, part: _loss(model, part, batch))
        self.pipeline.train()

    def _note(self, parts: tuple[RowSlices, ...], seconds: float | None) -> None:
        self.parts, self.predicted = parts, seconds

    def step(self, batch: dict[str, torch.Tensor], counts: bool) -> None:
        self.pipeline.prepare(batch)
        self.pipeline.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        self.pipeline.step(batch)
        dist.barrier()
        if counts:
            self.seconds.append(time.perf_counter() - began)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


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
    """(name, schedule, M) of the variants for a batch; the first is what the others are compared with."""
    counts = [m for m in (1, 2, 4, 8) if m <= rows and rows % m == 0]
    whole = [(f"{schedule} M = {m}", schedule, m) for m in counts for schedule in ("gpipe", "1f1b")]
    if rows == 1:
        whole = whole[:1]
    return [*whole, ("4 slices", "1f1b", 1), ("8 slices", "1f1b", 1), (AUTO, "1f1b", None)]


def run(width: int, rows: int, options: argparse.Namespace, mesh: ProcessMesh) -> list[Variant]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (rows, options.tokens), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    variants = [Variant(name, width, batch, mesh, schedule, m) for name, schedule, m in names_for(rows)]
    for number in range(options.steps + 1):
        for variant in variants:
            variant.step(batch, counts=number > 0)
    return variants


def print_table(console: Console, width: int, rows: int, tokens: int, variants: Sequence[Variant]) -> None:
    table = Table(title=f"Llama, {LAYERS} layers of {width}; {rows} x {tokens} tokens")
    for column in ("variant", "ms", "speed-up", "predicted ms", "measured / predicted"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for variant in variants:
        predicted = variant.predicted
        table.add_row(
            variant.name,
            f"{1e3 * variant.median:.1f}",
            f"{variants[0].median / variant.median:.2f}",
            "" if predicted is None else f"{1e3 * predicted:.1f}",
            "" if predicted is None else f"{variant.median / predicted:.3f}",
        )
    console.print(table)
    best = min((v for v in variants if "M =" in v.name), key=lambda v: v.median)
    auto = variants[-1]
    console.print(describe_slices(auto.parts, auto.predicted))
    console.print(
        f"auto takes {auto.median / best.median:.3f} times as long as {best.name}, the fastest without slices.\n"
    )


def write(path: Path, results: list[dict[str, Any]], mesh: ProcessMesh) -> None:
    facts = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers")},
        "processes": mesh.world_size,
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    path.write_text(json.dumps({**facts, "results": results}, indent=2))


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = ProcessMesh(timedelta(minutes=5))
    console = Console(width=120)
    results = []
    for width in options.widths:
        for rows in options.batches:
            variants = run(width, rows, options, mesh)
            if mesh.rank == 0:
                print_table(console, width, rows, options.tokens, variants)
                results += [
                    {
                        "width": width,
                        "rows": rows,
                        "tokens": options.tokens,
                        "variant": variant.name,
                        "seconds": variant.seconds,
                        "predicted_seconds": variant.predicted,
                        "parts": [[part.rows, list(part.lengths)] for part in variant.parts],
                    }
                    for variant in variants
                ]
                if options.output:
                    write(options.output, results, mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
