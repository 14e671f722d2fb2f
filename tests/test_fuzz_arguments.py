"""Arguments drawn at random: what makes no sense is refused by name, and all else trains as the stock Trainer does."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from distributed import launch_ranks, run_ranks
from training_data import Kind
from training_runs import Outcome, Run, assert_same_training, freezing_reference, outcome_of, pipeline_trainer
from transformers import TrainingArguments

from hf_pipetransformer import PipeTransformerTrainingArguments, training_args

INF, NAN = math.inf, math.nan
DIGITS = "9" * 5000  # more than Python reads as a number
HUGE = 10**400  # more than a float holds
PACKAGE = Path(training_args.__file__).parent


@dataclasses.dataclass(frozen=True)
class Values:
    """Values that a field may get.

    Attributes:
        sensible: values that are accepted, in some company at least.
        senseless: values that are refused, by the field's name.
        company: other fields, without which nobody looks at this one.
    """

    sensible: tuple[Any, ...]
    senseless: tuple[Any, ...]
    company: dict[str, Any] = dataclasses.field(default_factory=dict)


NO_SIZES = (0, -1, 2.0, 2.5, NAN, INF, -INF, True, None, "", "two", "0", "2.5", "inf", [], [2], {}, -HUGE)
NO_NAMES = ("", "none ", "AUTO", 0, 1, True, None, [], ["auto"], {}, NAN, "[]")

FIELDS: dict[str, Values] = {
    "pipeline_parallel_size": Values((1, "1", 2, "2", "auto"), NO_SIZES),
    "pipeline_schedule": Values(
        ("1f1b", "gpipe", "interleaved1f1b", "zbv"), (*NO_NAMES, "1F1B", "zigzag", "auto", "dualpipev")
    ),
    "virtual_pipeline_parallel_size": Values(
        (2, 3, HUGE, None),
        (*(size for size in NO_SIZES if size is not None), 1),
        {"pipeline_schedule": "interleaved1f1b"},
    ),
    "num_microbatches": Values(("auto", 1, 2, "3", 64, HUGE), NO_SIZES),
    "pipeline_layers": Values(
        (None,), ("", "bert.encoder.layer", 0, 1.5, True, NAN, [], {}, [1], [""], [None], ["a", "a"], {"a": 1})
    ),
    "loss_reduction": Values(("sum", "mean", None), tuple(name for name in NO_NAMES if name is not None)),
    "token_slices": Values(
        ("off", "auto", 1, 2, "3", [4], [8, 8], (5, 9), "[6, 6]", 1000, [1000]),
        ("", "on", 0, -1, "0", 1.5, NAN, INF, True, None, [], [4, 0], [[4]], [NAN], {}, "{}", '"two"', "NaN", DIGITS),
        {"pipeline_parallel_size": "auto"},
    ),
    "replica_sharding": Values(
        ("none", "optimizer", "auto"), (*(n for n in NO_NAMES if n not in ("none", "auto")), "Optimizer", "full")
    ),
    "freeze_policy": Values(
        ("none", "alpha", "adaptive", "autofreeze", "schedule"), (*(n for n in NO_NAMES if n != "none"), "Alpha")
    ),
    "freeze_alpha": Values(
        (1 / 3, 0.01, 0.99, 0.5),
        (0, 1, -0.1, 1.5, NAN, INF, -INF, HUGE, True, None, "", "0.5", [], [0.5], {}),
        {"freeze_policy": "alpha"},
    ),
    "freeze_strategy": Values(("epoch", "steps"), (*NO_NAMES, "step", "no")),
    "freeze_steps": Values(
        (None, 1, 2, 2.0, 0.5, 1000, HUGE),
        (None, 0, -1, 1.5, NAN, INF, -INF, True, "", "2", [], [2], {}),
        {"freeze_policy": "alpha", "freeze_strategy": "steps"},
    ),
    "freeze_schedule": Values(
        (None, {0: 1}, {"1": 1}, {1: 0, 2: 1}, '{"1": 1}', {0.5: 2}, {10**9: 1}),
        (
            *(None, {}, "", "x", "[]", "{}", "1", "null", [], [1], 1, NAN, True, '{"1": NaN}', f'{{"1": {DIGITS}}}'),
            *({-1: 1}, {NAN: 1}, {INF: 1}, {"x": 1}, {None: 1}, {HUGE: 1}, {(1,): 1}),
            *({1: -1}, {1: 1.0}, {1: True}, {1: None}, {1: "1"}, {1: [1]}, {1: 2, 2: 1}),
        ),
        {"freeze_policy": "schedule"},
    ),
    "max_frozen_layers": Values(
        (None, 1, 2, HUGE), (0, -1, 1.0, 2.5, NAN, INF, -INF, True, False, "", "2", "x", [], [2], {})
    ),
    "elastic": Values((True, False), ("", "no", "false", 0, 1, 0.0, NAN, None, [], {})),
    "activation_cache": Values(("auto", "on", "off"), (*(n for n in NO_NAMES), "yes")),
    "activation_cache_dir": Values((None, "kept", "a/b/c", ""), (0, 5, True, 1.5, NAN, [], ["kept"], {}, "a\0b")),
    "activation_cache_dtype": Values(("auto", "bf16", "fp32"), (*NO_NAMES, "fp16", "float32")),
    "activation_cache_max_gib": Values(
        (None, 1, 1e-9, 0.5, INF, HUGE), (0, -1, 0.0, NAN, -INF, True, "", "1", [], [1], {})
    ),
    "cached_modules": Values((None,), (0, "", "bert", [], ["bert", "bert"], [0], {})),
    "eval_frozen_modules": Values((True, False), (None, 0, 1, "", "yes", [], {})),
    "watchdog_timeout": Values(
        (0, 0.0, 30, 20.5, 10**9), (-1, 0.5, NAN, INF, -INF, 1e300, HUGE, True, False, None, "", "30", [], [30], {})
    ),
}

STOCK: dict[str, tuple[Any, ...]] = {
    "per_device_train_batch_size": (1, 2, 5),
    "gradient_accumulation_steps": (1, 2, 3),
    "max_steps": (2, 3),
    "max_grad_norm": (1.0, 0.0, 0.01),
    "label_smoothing_factor": (0.0, 0.1),
    "full_determinism": (False, True),
    "gradient_checkpointing": (False, True),
    "optim": ("adamw_torch", "sgd"),
    "lr_scheduler_type": ("linear", "cosine"),
    "train_sampling_strategy": ("random", "sequential"),
    "dataloader_drop_last": (False, True),
    "average_tokens_across_devices": (True, False),
    "include_num_input_tokens_seen": ("no", "all"),
    "torch_empty_cache_steps": (None, 1),
    "logging_nan_inf_filter": (True, False),
    "eval_strategy": ("no", "steps", "epoch"),
    "eval_on_start": (False, True),
    "eval_accumulation_steps": (None, 1),
    "save_strategy": ("no", "steps", "epoch"),
    "save_only_model": (False, True),
    "remove_unused_columns": (True, False),
    "seed": (42, 7),
}
"""Fields of `TrainingArguments` that take part in the same decisions; all are valid in every combination."""


def own_fields() -> set[str]:
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    return {field.name for field in dataclasses.fields(PipeTransformerTrainingArguments)} - inherited


def is_named(error: BaseException, options: dict[str, Any]) -> bool:
    """Whether the message names one of our fields that was given, or one of the two that may be missing."""
    named = FIELDS.keys() & set(re.findall(r"\w+", str(error)))
    return bool(named & {*options, "freeze_schedule", "freeze_steps"})


def make(**options: Any) -> PipeTransformerTrainingArguments:
    return PipeTransformerTrainingArguments(**{"output_dir": "out", "report_to": [], "use_cpu": True, **options})


def test_every_field_is_drawn() -> None:
    assert own_fields() == set(FIELDS)


@pytest.mark.usefixtures("four_processes")
@pytest.mark.parametrize("name", FIELDS)
def test_each_value_by_itself(name: str) -> None:
    values = FIELDS[name]
    needs: dict[Any, Any] = {"schedule": {"freeze_schedule": {1: 1}}, "steps": {"freeze_steps": 1}}
    for value in values.sensible:
        if value is not None or not values.company:
            make(**{**values.company, **(needs.get(value, {}) if isinstance(value, str) else {}), name: value})
    for value in values.senseless:
        with pytest.raises(ValueError, match=name):
            make(**{**values.company, name: value})


TOLERANCE = 1e-5
"""Of weights; losses and norms of gradients may differ by ten times as much."""
ROUNDED_TOLERANCE = 1e-3
"""Where layers went on from states that the cache had rounded to bf16."""
LEAST_TRAINED = 0.4
"""Share of the cases that must not be refused."""


def drawn(seed: int, processes: int) -> tuple[Run, dict[str, Any]]:
    """A training of two or three steps, or of up to eight where layers may freeze, and our fields.

    Half of them name a number of stages, mostly one that this many processes can run.
    """
    draw = random.Random(seed)
    stock: dict[str, Any] = {"max_steps": 3, "eval_steps": 2, "save_steps": 2, "use_cpu": True}
    stock |= {name: draw.choice(values) for name, values in STOCK.items() if draw.random() < 0.4}
    own = {name: draw.choice(field.sensible) for name, field in FIELDS.items() if draw.random() < 0.3}
    if draw.random() < 0.5:
        own["pipeline_parallel_size"] = draw.choice((processes, "auto"))
    if draw.random() < 0.4:
        own["freeze_policy"] = draw.choice(("alpha", "adaptive", "autofreeze", "schedule"))
        own["freeze_strategy"] = draw.choice(("epoch", "steps"))
        stock["max_steps"] = draw.choice((3, 5, 8))  # what an epoch has put into the cache is read in the next one
    if own.get("freeze_strategy") == "steps":
        own["freeze_steps"] = draw.choice((1, 2.0, 0.5))
    if own.get("freeze_policy") == "schedule":
        own["freeze_schedule"] = draw.choice(FIELDS["freeze_schedule"].sensible[1:])
    if draw.random() < 0.7 and own.get("pipeline_parallel_size") not in (2, "2", "auto"):
        own.pop("token_slices", None)
    if draw.random() < 0.1:
        name = draw.choice(list(FIELDS))
        own |= {**FIELDS[name].company, name: draw.choice(FIELDS[name].senseless)}
    slices = own.get("token_slices", "off") != "off"
    kind: Kind = "causal-lm" if slices or draw.random() < 0.3 else "text-classification"
    rows, accumulation = stock.pop("per_device_train_batch_size", 2), stock.pop("gradient_accumulation_steps", 1)
    if stock.get("dataloader_drop_last"):  # drops whole batches: with accumulation the reference's are larger
        accumulation = 1
    # six samples to evaluate are the same batches in every layout
    return Run(kind, None, draw.randint(3, 14), rows, accumulation, evaluated=6, options=stock), own


def train(rank: int, world_size: int, run: Run, own: dict[str, Any]) -> Outcome:
    own = {"pipeline_parallel_size": 1, **own}
    trainer = pipeline_trainer(run, own.pop("pipeline_parallel_size"), "own", **own)
    outcome = outcome_of(trainer)
    changes = [entry for entry in trainer.state.log_history if "transform_seconds" in entry]
    outcome.notes = {"frozen_after": {entry["step"]: entry["num_frozen_layers"] for entry in changes}}
    return outcome


def verdict_on(run: Run, own: dict[str, Any], processes: int) -> str:
    """ "refused", "trained" or "froze".

    Raises:
        AssertionError: the training hung, failed otherwise or on some ranks only, or learnt something else.
    """
    outcomes = launch_ranks(train, processes, run, own, timeout=60)
    if any(outcome.error is not None for outcome in outcomes):
        for outcome in outcomes:  # alike on all, raised by the package itself, not by a library, and by a field's name
            assert isinstance(outcome.error, ValueError), (
                f"{outcome.error!r} {outcome.error and outcome.error.__cause__}"
            )
            *_, raised_in = re.findall(r'File "(.+)", line \d+', str(outcome.error.__cause__))
            assert Path(raised_in).is_relative_to(PACKAGE) and is_named(outcome.error, own), outcome.error
        assert len({str(outcome.error) for outcome in outcomes}) == 1
        return "refused"
    values: list[Outcome] = [outcome.value for outcome in outcomes]
    frozen_after = values[0].notes["frozen_after"]
    assert all(value.notes["frozen_after"] == frozen_after for value in values)
    # Accelerate wraps also this model in DDP, which fails at frozen parameters if it does not look for them
    alone = run.with_options(ddp_find_unused_parameters=True)
    (expected,) = run_ranks(freezing_reference, 1, alone, frozen_after, processes=processes, timeout=60)
    tolerance = ROUNDED_TOLERANCE if own.get("activation_cache_dtype") == "bf16" else TOLERANCE
    assert_same_training(values, expected, tolerance)
    assert values[0].metrics.keys() >= {"eval_loss"} & expected.metrics.keys()
    for name in {"eval_loss"} & expected.metrics.keys():
        assert values[0].metrics[name] == pytest.approx(expected.metrics[name], abs=tolerance * 10)
    return "froze" if frozen_after else "trained"


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("first", "processes"), [(100, 2), (125, 2), (150, 2), (175, 2), (500, 1)])
def test_many_that_are_accepted_train(first: int, processes: int) -> None:
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for seed in range(first, first + 25):
        run, own = drawn(seed, processes)
        try:
            counts[verdict_on(run, own, processes)] += 1
        except AssertionError as error:
            failures.append(f"seed {seed}, {run}, {own}: {error}")
    assert not failures, "\n\n".join(failures)
    assert counts["trained"] and counts["froze"] and counts["refused"]
    assert counts["trained"] + counts["froze"] >= LEAST_TRAINED * 25
