"""`hf-pipetransformer inspect`: a model's units, its shared parameters, and how it would be split into stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from os.path import commonpath
from typing import Any, Literal

from transformers import PreTrainedModel

from ..model.batch_statistics import normalised_by_batch
from ..model.dummy_inputs import dummy_batch
from ..planning.planner import Planner, Request
from ..planning.tables import MIB, align
from .workload import measure_workload

DEFAULT_TOKENS = 8
SINGLE_MICRO_BATCH = (
    "{}. With several stages, the batch of a pipeline is not divided, so that the stages work one after the other;"
    " replicas and accumulated batches have statistics of their own, as under plain DDP."
)
"""Note about a model with samples that depend on one another, with the reason."""


def inspect(model: PreTrainedModel, tokens: int, stages: Sequence[int]) -> tuple[dict[str, Any], str]:
    """Return the report of `inspect` on a model, as plain values for JSON and as text.

    Args:
        model: the model, of placeholders or with weights.
        tokens: number of tokens of a text sample.
        stages: numbers of stages to propose; numbers above the number of units are omitted.

    Raises:
        UnsupportedModelError: the model cannot be split into stages.
        ValueError: the sample is longer than the model's positions.
    """
    units = measure_workload(model, tokens).unit_costs
    number_of = {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}
    needed_by: dict[str, list[int]] = {}
    for index, unit in enumerate(units):
        for name in unit.parameters:
            needed_by.setdefault(name, []).append(index)
    coupled = normalised_by_batch(model.train())
    m: Literal["auto", 1] = "auto" if coupled is None else 1
    planners = [
        Planner(unit_costs=units, world_size=k, request=Request(k, num_microbatches=m))
        for k in dict.fromkeys(stages)
        if k <= len(units)
    ]
    report = {
        "model": type(model).__name__,
        "sample": {name: list(value.shape[1:]) for name, value in dummy_batch(model, 1, tokens=tokens).items()},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "units": [
            {
                "name": unit.name,
                "parameters": sum(number_of[name] for name in unit.parameters),
                "bytes": sum(unit.parameters.values()),
                "forward_flops_per_sample": unit.forward_flops,
                "activation_bytes_per_sample": unit.activation_bytes,
                "boundary_bytes_per_sample": unit.boundary_bytes,
            }
            for unit in units
        ],
        "shared_parameters": {name: where for name, where in needed_by.items() if len(where) > 1},
        # training then does not split a pipeline's batch
        "single_micro_batch": coupled,
        "stages": {
            str(planner.world_size): [
                {
                    "first_unit": start,
                    "last_unit": stop - 1,
                    "parameter_bytes": planner.parameter_bytes_of(planner.first, stage),
                    "forward_flops_per_sample": sum(unit.forward_flops for unit in units[start:stop]),
                }
                for stage, (start, stop) in enumerate(pairwise(planner.first.stage_bounds))
            ]
            for planner in planners
        },
    }
    return report, _as_text(report, planners)


def _as_text(report: Mapping[str, Any], planners: Iterable[Planner]) -> str:
    """Return the report as tables. Consecutive units of equal costs, or parameters of the same units, share a row."""
    units, shared = report["units"], report["shared_parameters"]

    def costs(index: int) -> tuple[str, ...]:
        unit = units[index]
        return (
            f"{unit['parameters']:,}",
            f"{unit['bytes'] / MIB:,.1f}",
            f"{unit['forward_flops_per_sample'] / 1e6:,.2f}",
            f"{unit['boundary_bytes_per_sample'] / 1024:,.1f}",
        )

    rows: list[tuple[str, ...]] = [("unit", "name", "parameters", "MiB", "MFLOPs/sample", "boundary KiB/sample")]
    for shown, group in groupby(range(len(units)), key=costs):
        alike = list(group)
        first, last = units[alike[0]]["name"], units[alike[-1]]["name"]
        name = first if first == last else f"{first} ... {last.rpartition('.')[2]}"  # ALBERT: one module
        rows.append((_ranges(alike), name, *shown))
    shares = [("shared parameters", "needed by units")]
    for where, group_of in groupby(shared, key=lambda name: shared[name]):
        names = list(group_of)
        common = commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
        several = f"{len(names)} parameters" + (f" in {common}" if common else "")
        shares.append((names[0] if len(names) == 1 else several, _ranges(where)))
    sample = ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in report["sample"].items())
    coupled = report["single_micro_batch"]
    parts = [
        f"{report['model']}: {report['parameters']:,} parameters, {report['bytes'] / MIB:,.1f} MiB, "
        f"{len(units)} units; one sample: {sample}",
        "\n".join(align(rows, left=(1,))),
        "\n".join(align(shares, left=(0, 1))) if shared else "no shared parameters",
        *([] if coupled is None else [SINGLE_MICRO_BATCH.format(coupled)]),
        *(planner.describe(planner.first) for planner in planners),
    ]
    return "\n\n".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers with consecutive ones combined: 0-3, 7."""
    runs = [
        [number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
