#!/usr/bin/env python
"""The gain of slicing GPT-3 along the tokens on V100s, by a latency model, beside the figures of TeraPipe's paper.

    python benchmarks/token_slicing_table.py --out results.json

No model is trained: a formula gives a stage's time for a slice, the planner of this library cuts the batch by it, and
both steps, with and without slices, are predicted. The question is if the planner slices in the same settings as the
paper, with about the same gain. Settings and seconds: Li et al., TeraPipe, ICML 2021, tables 1 and 2
(arXiv 2102.07988); sequences of 2,048 tokens, Megatron's tensor parallelism ("op") inside of a node.

All settings have the same constants (`V100`): data sheets, figure 3 of the paper and round estimates. Assumptions:

    products      6 FLOPs for each weight and token, at the highest speed in figure 3 of the paper
    few tokens    take as long as tokens that fill the device once: tiles of 128 x 128 for each multiprocessor. For one
                  layer of 1B these are 256 tokens, as in figure 3; fewer in wider layers, more with a share of one
    attention     not fused: the scores go through memory again and again
    calls         a fixed time for each layer
    "op"          4 all-reduces for each layer over NVLink
    messages      each stage hands one copy to another node, and waits for it, forward and backward; also where its
                  neighbour is in the same node. They count with the tokens, so messages of few tokens count too much
    gradients     all-reduced between nodes at the end, with and without slices, where there are replicas
    without       GPipe with micro-batches of whole rows, as many rows as are fastest. For settings 3, 5 and 10 the
                  authors' own code counts micro-batches of 1 row
    left out      embeddings, the loss, the optimizer, and whether the activations fit
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from rich.table import Table

from hf_pipetransformer.token_slices.slice_planning import (
    RowSlices,
    SliceLatency,
    part_sizes,
    plan_slices,
    step_seconds,
)

import harness

LENGTH = 2048
HEAD_SIZE = 128
VALUE_BYTES = 2
MEAN_WIDTH = 2.5
"""Columns of a layer's products over its hidden size, weighed by their FLOPs: (3 * 3 + 1 * 1 + 4 * 4 + 4 * 1) / 12."""
SCORE_PASSES = 18
"""Reads and writes of the scores, forward and backward: product, scale, mask, softmax, dropout, product."""
CONTEXT_PASSES = 5
"""Over the earlier keys and values: appended to, and their gradients summed."""


@dataclass(frozen=True)
class Device:
    """A GPU in its node; bytes are for one direction.

    Attributes:
        flops_per_second: of half-precision products at best.
        efficiency: share of it that large products reach.
        multiprocessors: each computes one tile at a time.
        layer_seconds: fixed time of one layer's calls, forward and backward.
    """

    flops_per_second: float
    efficiency: float
    multiprocessors: int
    memory_bytes_per_second: float
    layer_seconds: float
    node_gpus: int
    nvlink_bytes_per_second: float
    all_reduce_seconds: float
    network_bytes_per_second: float
    message_seconds: float


V100 = Device(
    flops_per_second=112e12,
    efficiency=0.55,  # figure 3: from 256 to 1,024 tokens a forward grows by about 1.25 ms
    multiprocessors=80,
    memory_bytes_per_second=900e9,
    layer_seconds=2e-3,  # figure 3: about 1.45 ms forward, 0.42 of them for 256 tokens; as long again backward
    node_gpus=8,
    nvlink_bytes_per_second=120e9,  # of all-reduces over 8 GPUs
    all_reduce_seconds=30e-6,
    network_bytes_per_second=25e9 / 8,  # p3.16xlarge: 25 Gb/s a node
    message_seconds=50e-6,
)
TILE = 128 * 128


@dataclass(frozen=True)
class Setting:
    """One row of the paper's tables.

    Attributes:
        batch: rows of all replicas together.
        op: GPUs that share each layer.
        without, with_slices: the paper's seconds of a step.
    """

    number: int
    model: str
    layers: int
    hidden: int
    gpus: int
    batch: int
    replicas: int
    stages: int
    op: int
    without: float
    with_slices: float

    @property
    def rows(self) -> int:
        return self.batch // self.replicas

    @property
    def layers_per_stage(self) -> int:
        return self.layers // self.stages


SETTINGS = (
    Setting(1, "1B", 24, 2048, 192, 128, 8, 24, 1, 1.517, 1.254),
    Setting(2, "1B", 24, 2048, 192, 72, 2, 12, 8, 1.018, 1.018),
    Setting(3, "1B", 24, 2048, 192, 72, 1, 24, 8, 0.913, 0.913),
    Setting(4, "13B", 40, 5120, 320, 32, 2, 20, 8, 2.637, 1.891),
    Setting(5, "13B", 40, 5120, 320, 32, 1, 40, 8, 1.863, 1.328),
    Setting(6, "44B", 96, 6144, 384, 8, 4, 96, 1, 13.319, 7.103),
    Setting(7, "44B", 96, 6144, 384, 8, 2, 24, 8, 4.311, 2.771),
    Setting(8, "44B", 96, 6144, 384, 8, 1, 48, 8, 2.662, 1.111),
    Setting(9, "175B", 96, 12288, 384, 2, 1, 96, 4, 9.990, 1.481),
    Setting(10, "175B", 96, 12288, 384, 2, 1, 48, 8, 5.822, 1.160),
)


def stage_latency(setting: Setting, device: Device) -> SliceLatency:
    """Forward and backward of a slice on one stage, its messages included."""
    hidden, op = setting.hidden, setting.op
    weights, width = 12 * hidden**2 / op, hidden / op
    speed = device.flops_per_second * device.efficiency
    token_bytes = hidden * VALUE_BYTES
    reduced = 4 * 2 * (op - 1) / op * token_bytes / device.nvlink_bytes_per_second
    scores_bytes = SCORE_PASSES * width / HEAD_SIZE * VALUE_BYTES
    layers = setting.layers_per_stage
    return SliceLatency(
        fixed=layers * (device.layer_seconds + (4 * device.all_reduce_seconds if op > 1 else 0.0))
        + 2 * device.message_seconds,
        per_token=layers * (6 * weights / speed + reduced) + 2 * token_bytes / device.network_bytes_per_second,
        per_pair=layers * (12 * width / speed + scores_bytes / device.memory_bytes_per_second),
        per_context=layers * CONTEXT_PASSES * 2 * width * VALUE_BYTES / device.memory_bytes_per_second,
        flat_tokens=math.ceil(device.multiprocessors * TILE / (MEAN_WIDTH * width)),
    )


def all_reduce_seconds(setting: Setting, device: Device) -> float:
    """Of the gradients in half precision: a node's GPUs share its network."""
    gradient_bytes = 12 * setting.hidden**2 / setting.op * setting.layers_per_stage * VALUE_BYTES
    share = 2 * (setting.replicas - 1) / setting.replicas
    return share * gradient_bytes * device.node_gpus / device.network_bytes_per_second


def gpipe(stages: list[SliceLatency], rows: int) -> tuple[RowSlices, ...]:
    """The fastest micro-batches of whole rows, all of one size."""
    plans = [(RowSlices(size, (LENGTH,)),) * (rows // size) for size in part_sizes(rows, 1, len(stages))]
    return min(plans, key=lambda parts: step_seconds(stages, parts))


def described(plan: tuple[RowSlices, ...]) -> str:
    """For example `16 x 1 row: 512 512 1024`; runs of equal slices are counted."""
    kinds = []
    for part, same in groupby(plan):
        runs = [(length, len(list(run))) for length, run in groupby(part.lengths)]
        lengths = " ".join(str(length) if count == 1 else f"{length}*{count}" for length, count in runs)
        kinds.append(f"{len(list(same))} x {part.rows} row{'s' * (part.rows > 1)}: {lengths}")
    return "; ".join(kinds)


def predict(setting: Setting, granularity: int) -> dict[str, Any]:
    """Both steps of a setting, by the model."""
    latency = stage_latency(setting, V100)
    stages = [latency] * setting.stages
    whole = gpipe(stages, setting.rows)
    began = time.process_time()
    parts = plan_slices(stages, setting.rows, LENGTH, part_sizes(setting.rows, 1, setting.stages), granularity)
    planning_seconds = time.process_time() - began
    reduce = all_reduce_seconds(setting, V100)
    without, with_slices = step_seconds(stages, whole) + reduce, step_seconds(stages, parts) + reduce
    return {
        "setting": asdict(setting),
        "latency": asdict(latency),
        "all_reduce_seconds": reduce,
        "without": without,
        "with_slices": with_slices,
        "speed_up": without / with_slices,
        "paper_speed_up": setting.without / setting.with_slices,
        "micro_batches": described(whole),
        "slices": described(parts),
        "num_slices": sum(len(part.lengths) for part in parts),
        "planning_seconds": planning_seconds,
    }


def main() -> None:
    """Predict all settings and print the table."""
    parser = harness.parser_of(__doc__, turns=1)
    parser.add_argument("--granularity", type=int, default=16, help="slices are multiples of so many tokens")
    options = harness.start(parser)
    rows = [predict(setting, options.granularity) for setting in SETTINGS]
    table = Table(title="Seconds of a step without and with slices of tokens: TeraPipe's settings")
    columns = (
        "",
        "GPT-3",
        "data x pipe x op",
        "rows",
        "paper",
        "model",
        "paper gains",
        "model gains",
        "flat",
        "slices",
    )
    for column in (*columns, "plan ms"):
        table.add_column(column, justify="right")
    for setting, row in zip(SETTINGS, rows, strict=True):
        table.add_row(
            f"({setting.number})",
            setting.model,
            f"{setting.replicas} x {setting.stages} x {setting.op}",
            str(setting.rows),
            f"{setting.without:.2f} > {setting.with_slices:.2f}",
            f"{row['without']:.2f} > {row['with_slices']:.2f}",
            f"{row['paper_speed_up']:.2f}",
            f"{row['speed_up']:.2f}",
            str(row["latency"]["flat_tokens"]),
            str(row["num_slices"]),
            f"{1e3 * row['planning_seconds']:.0f}",
        )
    console = harness.console()
    console.print(table)
    console.print("rows: of a replica; flat: fewer tokens than these take as long; slices: of all rows;")
    console.print("plan ms: CPU time of the planner that finds them. In full:")
    for row in rows:
        console.print(f"({row['setting']['number']})  without  {row['micro_batches']}", highlight=False)
        console.print(f"     with     {row['slices']}", highlight=False)
    harness.write(options, device=asdict(V100), settings=rows)


if __name__ == "__main__":
    main()
