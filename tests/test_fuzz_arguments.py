"""Arguments drawn at random: what makes no sense is refused by name, and all else trains as the stock Trainer does."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed import RankOutcome, launch_ranks, run_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from training_data import Kind, PadCollator, TrainingData
from training_runs import Outcome, Run, largest_difference, outcome_of
from transformers import Trainer, TrainingArguments

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments, training_args
from hf_pipetransformer.callbacks import LayerFreezeCallback

INF, NAN = math.inf, math.nan
DIGITS = "9" * 5000  # more than Python reads as a number
HUGE = 10**400  # more than a float holds


@dataclasses.dataclass(frozen=True)
class Values:
    """What a field may be given.

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
    "pipeline_parallel_size": Values((1, "1", 2, "2", "auto"), (*NO_SIZES, 7, HUGE)),
    "pipeline_schedule": Values(("1f1b", "gpipe"), (*NO_NAMES, "1F1B", "zigzag")),
    "num_microbatches": Values(("auto", 1, 2, "3", 64, HUGE), NO_SIZES),
    "token_slices": Values(
        ("off", "auto", 1, 2, "3", [4], [8, 8], (5, 9), "[6, 6]", 1000, [1000]),
        ("", "on", 0, -1, "0", 1.5, NAN, INF, True, None, [], [4, 0], [[4]], [NAN], {}, "{}", '"two"', "NaN", DIGITS),
        {"pipeline_parallel_size": "auto"},
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


def make(**options: Any) -> PipeTransformerTrainingArguments:
    return PipeTransformerTrainingArguments(**{"output_dir": "out", "report_to": [], "use_cpu": True, **options})


@pytest.fixture
def four_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a launcher had started four, which only our arguments see."""
    environment = {**training_args.os.environ, "WORLD_SIZE": "4"}
    monkeypatch.setattr(training_args, "os", SimpleNamespace(environ=environment))


# ---------------------------------------------------------------------------------------------------------
# The arguments alone
# ---------------------------------------------------------------------------------------------------------


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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
"""What a configuration file may hold."""


@st.composite
def combinations(draw: st.DrawFn) -> dict[str, Any]:
    """Sensible values of any fields, and of up to two of them whatever a configuration file may hold, or its text."""

    def some(names: list[str]) -> list[str]:
        return draw(st.lists(st.sampled_from(names), unique=True, max_size=6))

    options = {name: draw(st.sampled_from(STOCK[name])) for name in some(list(STOCK))}
    options |= {name: draw(st.sampled_from(FIELDS[name].sensible)) for name in some(list(FIELDS))}
    for name in draw(st.lists(st.sampled_from(list(FIELDS)), max_size=2)):
        anything = st.sampled_from(FIELDS[name].senseless) | JSON | JSON.map(json.dumps)
        options |= {**FIELDS[name].company, name: draw(anything)}
    return options


@pytest.mark.usefixtures("four_processes")
def test_combinations_are_accepted_or_refused_by_name(record_property: Callable[[str, object], None]) -> None:
    """Accepted ones survive the way to a file and back."""
    counts: Counter[str] = Counter()

    @settings(
        max_examples=800, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(combinations())
    def check(options: dict[str, Any]) -> None:
        counts["examples"] += 1
        try:
            arguments = make(**options)
        except ValueError as error:
            counts["refused"] += 1
            named = {name for name in FIELDS if name in str(error)}
            assert named & {*options, "freeze_schedule", "freeze_steps"}, (options, error)  # two may be missing
            return
        counts["accepted"] += 1
        again = make(**json.loads(arguments.to_json_string()))
        assert again.to_json_string() == arguments.to_json_string()

    check()
    _report(counts, record_property)
    assert min(counts["refused"], counts["accepted"]) > counts["examples"] / 10


# ---------------------------------------------------------------------------------------------------------
# Trainings
# ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A training of two or three steps.

    Attributes:
        kind: of the data, and of the model that reads it.
        samples: in the training set; the last batch of an epoch is seldom full.
        stock: fields of `TrainingArguments`.
        own: fields of `PipeTransformerTrainingArguments`.
    """

    kind: Kind
    samples: int
    stock: dict[str, Any]
    own: dict[str, Any]


def case_of(seed: int) -> Case:
    draw = random.Random(seed)
    chosen = lambda fields, share: [name for name in fields if draw.random() < share]  # noqa: E731
    stock = {name: draw.choice(STOCK[name]) for name in chosen(STOCK, 0.4)}
    own = {name: draw.choice(FIELDS[name].sensible) for name in chosen(FIELDS, 0.3)}
    if draw.random() < 0.5:
        own["pipeline_parallel_size"] = draw.choice((2, "auto"))
    if draw.random() < 0.4:
        own["freeze_policy"] = draw.choice(("alpha", "adaptive", "autofreeze", "schedule"))
        own["freeze_strategy"] = draw.choice(("epoch", "steps"))
    if own.get("freeze_strategy") == "steps":
        own["freeze_steps"] = draw.choice((1, 2.0, 0.5))
    if own.get("freeze_policy") == "schedule":
        own["freeze_schedule"] = draw.choice(FIELDS["freeze_schedule"].sensible[1:])
    if draw.random() < 0.7 and own.get("pipeline_parallel_size") not in (2, "2", "auto"):
        own.pop("token_slices", None)
    if draw.random() < 0.1:
        name = draw.choice(list(FIELDS))
        own |= {**FIELDS[name].company, name: draw.choice(FIELDS[name].senseless)}
    if stock.get("dataloader_drop_last"):  # of batches, whose sizes then differ from the reference's
        stock.pop("gradient_accumulation_steps", None)
    slices = own.get("token_slices", "off") != "off"
    kind: Kind = "causal-lm" if slices or draw.random() < 0.3 else "text-classification"
    return Case(kind, draw.randint(3, 14), stock, own)


def train(rank: int, world_size: int, case: Case, processes: int, is_stock: bool) -> Outcome:
    """Run the case; with the stock Trainer as one process with the global batch of `processes`."""
    stock = {
        **{"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 3},
        **{
            "eval_steps": 2,
            "save_steps": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "per_device_eval_batch_size": 3,
        },
        **{"report_to": [], "disable_tqdm": True, "use_cpu": True, "learning_rate": 3e-3, "adam_epsilon": 1e-4},
        **case.stock,
    }
    if is_stock:
        stock["per_device_train_batch_size"] *= processes * stock.pop("gradient_accumulation_steps")
        arguments, cls = TrainingArguments("stock", **stock), Trainer
    else:
        arguments, cls = PipeTransformerTrainingArguments("own", **stock, **case.own), PipeTransformerTrainer
    trainer = cls(
        model=Run(case.kind).build_model(),
        args=arguments,
        train_dataset=TrainingData(case.kind, case.samples),
        eval_dataset=TrainingData(case.kind, 6, seed=9),
        data_collator=PadCollator(case.kind),
    )
    outcome = outcome_of(trainer)
    freezing = [c for c in trainer.callback_handler.callbacks if isinstance(c, LayerFreezeCallback)]
    outcome.notes["frozen"] = freezing[0].num_frozen if freezing else 0
    return outcome


@cache
def _reference(text: str, processes: int) -> Outcome:
    kind, samples, stock = json.loads(text)
    return run_ranks(train, 1, Case(kind, samples, stock, {}), processes, True, timeout=60)[0]


def reference(case: Case, processes: int) -> Outcome:
    return _reference(json.dumps([case.kind, case.samples, case.stock], sort_keys=True), processes)


def verdict_on(case: Case, processes: int) -> str:
    """ "refused", "trained" or "froze".

    Raises:
        AssertionError: the training hung, failed otherwise or on some ranks only, or learnt something else.
    """
    outcomes = launch_ranks(train, processes, case, processes, False, timeout=60)
    if any(outcome.error is not None for outcome in outcomes):
        assert all(isinstance(outcome.error, ValueError) for outcome in outcomes), _told(case, processes, outcomes)
        assert len({str(outcome.error) for outcome in outcomes}) == 1, _told(case, processes, outcomes)
        return "refused"
    values: list[Outcome] = [outcome.value for outcome in outcomes]
    for value in values:
        assert largest_difference(value.weights, values[0].weights)[0] == 0.0, case
        assert value.losses and torch.tensor(value.losses).isfinite().all(), case
        assert all(weight.isfinite().all() for weight in value.weights.values()), case
    if values[0].notes["frozen"]:
        return "froze"
    expected = reference(case, processes)
    difference, name = largest_difference(values[0].weights, expected.weights)
    assert difference <= 1e-5, f"{name} differs by {difference:.1e}: {case} on {processes}"
    assert values[0].steps == expected.steps, case
    torch.testing.assert_close(values[0].losses, expected.losses, rtol=0, atol=1e-4)
    assert ("eval_loss" in values[0].metrics) is ("eval_loss" in expected.metrics), case
    if "eval_loss" in expected.metrics:
        found, wanted = values[0].metrics["eval_loss"], expected.metrics["eval_loss"]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    return "trained"


def _told(case: Case, processes: int, outcomes: list[RankOutcome]) -> str:
    errors = "\n".join(f"rank {o.rank}: {o.error!r} {o.error.__cause__ if o.error else ''}" for o in outcomes)
    return f"{case} on {processes}:\n{errors}"


def _report(counts: Counter[str], record_property: Callable[[str, object], None]) -> None:
    text = json.dumps(counts)
    record_property("fuzz", text)
    print(text)


def check_cases(seeds: range, processes: int, record_property: Callable[[str, object], None]) -> None:
    counts: Counter[str] = Counter({"examples": len(seeds)})
    failures: list[str] = []
    for seed in seeds:
        try:
            counts[verdict_on(case_of(seed), processes)] += 1
        except AssertionError as error:
            failures.append(f"seed {seed}: {error}")
    _report(counts, record_property)
    assert not failures, "\n\n".join(failures)
    assert counts["trained"] and counts["froze"] and counts["refused"]


@pytest.mark.parametrize(("processes", "seeds"), [(1, range(103, 110)), (2, range(100, 106))], ids=["1", "2"])
def test_what_is_accepted_trains(processes: int, seeds: range, record_property: Callable[[str, object], None]) -> None:
    check_cases(seeds, processes, record_property)


@pytest.mark.faults
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(100, 250, 25))
def test_many_that_are_accepted_train(first: int, record_property: Callable[[str, object], None]) -> None:
    check_cases(range(first, first + 25), 2, record_property)


@pytest.mark.faults
@pytest.mark.timeout(1200)
def test_many_that_are_accepted_train_on_one_process(record_property: Callable[[str, object], None]) -> None:
    check_cases(range(300, 340), 1, record_property)
