"""In one process, without stages and frozen layers, a script behaves as with the stock Trainer.

Each scenario is a script that takes the two classes as arguments. It runs with the stock classes and with ours, and
its results must be equal: logs, weights, events, names of files, errors. The documentation lists the differences.
"""

from __future__ import annotations

import json
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from distributed import run_ranks
from stock_scripts import (
    SAVES,
    SCENARIOS,
    STOCK_FIELDS,
    Classes,
    Line,
    LineConfig,
    NoisyLine,
    Points,
    PointsThatEnd,
    PointStream,
    PretrainedLine,
    Scenario,
    error_of,
    names_of,
    outcome,
    rounded,
    run,
    scenario,
)
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    TrainerCallback,
)

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.run.checkpoint_folders import MANIFEST

DIFFERENCES = Path(__file__).parents[2] / "recipes" / "drop_in.md"


# ------------------------------------------------------------------------------------------ arguments
@scenario
def arguments_on_a_command_line(given: Classes) -> Any:
    model_arguments = make_dataclass("ModelArguments", [("name", str, field(default="line"))])
    parser = HfArgumentParser((model_arguments, given.arguments))
    words = ["--name", "a", "--output_dir", "out", "--use_cpu", "--bf16", "--warmup_steps", "0.5"]
    words += ["--lr_scheduler_kwargs", '{"a": 1}', "--label_names", "one", "two", "--report_to", "none"]
    model, args = parser.parse_args_into_dataclasses(words)
    _, from_dict = parser.parse_dict({"output_dir": "out", "use_cpu": True, "learning_rate": 1.0})
    named = (model.name, args.bf16, args.warmup_steps, args.lr_scheduler_kwargs, args.label_names)
    return named, from_dict.learning_rate, set(vars(args)) >= STOCK_FIELDS


# ------------------------------------------------------------------------------------------ callbacks
class Records(TrainerCallback):
    """The names of all events."""

    def __init__(self) -> None:
        self.events: list[str] = []


for _event in [name for name in vars(TrainerCallback) if name.startswith("on_")]:
    setattr(Records, _event, lambda self, *_, _event=_event, **__: self.events.append(_event))


@scenario
def events_in_their_order(given: Classes) -> Any:
    found = []
    for options in (
        {"logging_steps": 3},
        {"save_strategy": "steps", "save_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2},
        {"eval_strategy": "epoch", "eval_on_start": True},
    ):
        records = Records()
        trainer = given.make(callbacks=[records], num_train_epochs=2, **options)
        trainer.train()
        trainer.predict(Points(5))
        found.append(records.events)
    return found


# ------------------------------------------------------------------------------------------ data
@scenario
def streams(given: Classes) -> Any:
    trainer = given.make(train_dataset=PointStream(), eval_dataset=PointStream(11), max_steps=5)
    evaluated = rounded(trainer.evaluate())
    refused = error_of(lambda: given.make(train_dataset=PointStream()))
    return outcome(trainer), evaluated, trainer.predict(PointStream(9)).predictions.shape, refused


@scenario
def columns_that_the_model_does_not_read(given: Classes) -> Any:
    datasets = pytest.importorskip("datasets")
    points = Points()
    columns = {"x": points.x, "labels": points.y["labels"], "note": ["text"] * len(points)}
    data = datasets.Dataset.from_dict(columns)

    class Strict(Line):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            return super().forward(x, labels)

    trainer = given.make(Strict(), train_dataset=data, eval_dataset=data)
    loaders = (trainer.get_train_dataloader(), trainer.get_eval_dataloader())
    nothing = datasets.Dataset.from_dict({"other": [1.0, 2.0]})
    refused = error_of(given.make(Strict(), train_dataset=nothing).train)
    return outcome(trainer), [sorted(next(iter(loader))) for loader in loaders], refused


@scenario
def batches_that_are_tuples(given: Classes) -> Any:
    class Unpacks:
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(*inputs)
            return (outputs[0], outputs) if return_outputs else outputs[0]

    pairs = [(point["x"], point["labels"]) for point in Points()]  # type: ignore[attr-defined]
    options = {"train_dataset": pairs, "remove_unused_columns": False, "mixin": Unpacks}

    def collate(rows: list[Any]) -> Any:
        return tuple(torch.tensor(numpy.array(column)) for column in zip(*rows, strict=True))

    accumulations = (1, 2)
    return [
        outcome(given.make(data_collator=collate, gradient_accumulation_steps=n, **options)) for n in accumulations
    ]


# ------------------------------------------------------------------------------------------ training
@scenario
def seeds_and_models_made_by_a_function(given: Classes) -> Any:
    found = []
    for make in (lambda: Line(), lambda trial: Line(1.0)):
        trainer = given.make(model_init=make)
        found += [outcome(trainer), outcome(trainer)]
        trainer.args.seed = 314
        found.append(outcome(trainer))
    return found, error_of(lambda: given.make(model_init=lambda one, two: Line()))


@scenario
def trainings_one_after_another(given: Classes) -> Any:
    trainer = given.make()
    first, second = outcome(trainer), outcome(trainer)
    return first, second, trainer.model_wrapped is trainer.model, trainer.is_in_train, rounded(trainer.evaluate())


# ------------------------------------------------------------------------------------------ evaluation
def accuracy(evaluated: Any) -> dict[str, float]:
    predictions = evaluated.predictions[0] if isinstance(evaluated.predictions, tuple) else evaluated.predictions
    return {"near": float((numpy.abs(predictions - evaluated.label_ids) < 1).mean())}


@scenario
def evaluations(given: Classes) -> Any:
    options: list[dict[str, Any]] = [
        {},
        {"eval_accumulation_steps": 1},
        {"prediction_loss_only": True},
        {"eval_use_gather_object": True},
        {"bf16_full_eval": True},
        {"preprocess_logits_for_metrics": lambda logits, labels: logits + 1},
        {"eval_dataset": {"one": Points(5), "two": Points(9)}},
        {"include_for_metrics": ["loss"]},
    ]
    return [rounded(given.make(Line(1.5), compute_metrics=accuracy, **one).evaluate()) for one in options]


@scenario
def predictions(given: Classes) -> Any:
    class Twice(Line):
        def forward(self, x: Any, labels: Any = None, **_: Any) -> Any:
            loss, y = super().forward(x, labels)
            return loss, y, 2 * y

    names = ("labels", "more")
    trainer = given.make(Twice(1.5), label_names=list(names))
    several = trainer.predict(Points(11, labels=names))
    ragged = [
        {"x": numpy.ones(1 + index // 8, "f4"), "labels": numpy.ones(1 + index // 8, "f4")} for index in range(20)
    ]
    padded = given.make(eval_accumulation_steps=1).predict(ragged)
    parts = (several.predictions, several.label_ids, several.metrics, padded.predictions, padded.label_ids)
    return [rounded(part) for part in parts]


# ------------------------------------------------------------------------------------------ optimizers
@scenario
def optimizers_of_the_users_own(given: Classes) -> Any:
    found = []
    for has_scheduler in (False, True):
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) if has_scheduler else None
        trainer = given.make(model, optimizers=(optimizer, scheduler))
        found.append([outcome(trainer), trainer.lr_scheduler is scheduler])
    by_class = (torch.optim.SGD, {"lr": 0.05})
    found.append(outcome(given.make(optimizer_cls_and_kwargs=by_class)))
    return found, error_of(lambda: given.make(optimizer_cls_and_kwargs=by_class, optimizers=(optimizer, None)))


@scenario
def schedules_optimizers_and_lengths(given: Classes) -> Any:
    options: list[dict[str, Any]] = [
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 3.0, "lr_end": 1e-3}, "warmup_steps": 2},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.02}, "warmup_steps": 0.25},
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "eval_strategy": "epoch",
            "lr_scheduler_kwargs": {"patience": 0},
        },
        {"optim": "adafactor", "max_grad_norm": 0.1, "num_train_epochs": 1.5},
        {"optim": "sgd", "max_grad_norm": 0.0, "num_train_epochs": 1, "dataloader_drop_last": True},
        {"optim": "adagrad", "max_steps": 7, "gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 50},
    ]
    return [outcome(given.make(**one)) for one in options]


# ------------------------------------------------------------------------------------------ checkpoints
@scenario
def files_of_a_checkpoint(given: Classes) -> Any:
    found = []
    for model, options in ((PretrainedLine(LineConfig()), {}), (Line(), {}), (Line(), {"save_only_model": True})):
        folder = given.folder / str(len(found))
        given.make(model, output_dir=str(folder), max_steps=2, **SAVES, **options).train()
        files = {path.name for path in (folder / "checkpoint-2").iterdir()}
        state = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())
        found.append([sorted(files - {MANIFEST}), sorted(state)])
    return found


@scenario
def resuming(given: Classes) -> Any:
    found = []
    for make in (lambda: PretrainedLine(LineConfig()), NoisyLine):
        for options in ({}, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3}):
            once = given.make(make(), **SAVES, **options)
            found.append(outcome(once))
            again = given.make(make(), **SAVES, **options)
            found.append(outcome(again, resume_from_checkpoint=str(given.folder / "checkpoint-4")))
            assert found[-1][1] == found[-2][1]
    return found


@scenario
def checkpoints_that_are_kept(given: Classes) -> Any:
    steps = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 8}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    found = []
    alone = {**steps, "metric_for_best_model": "loss", "save_strategy": "best", "save_total_limit": None}
    for options in ({}, {**steps, **best}, alone):
        trainer = given.make(**{"save_total_limit": 1, **SAVES, **options})
        found.append([outcome(trainer), Path(trainer.state.best_model_checkpoint or "none").name, given.checkpoints])
    return found


@pytest.mark.parametrize("script", SCENARIOS, ids=lambda script: script.__name__)
def test_a_script_does_the_same_with_our_classes(script: Scenario, tmp_path: Path) -> None:
    expected, found = (run(script, tmp_path, is_ours) for is_ours in (False, True))
    assert found == expected


# ------------------------------------------------------------------------------------------ with stages
REFUSED = {True: "returns a tuple", False: "no tensor with a batch dimension"}


def without_names(rank: int, world_size: int) -> dict[bool, str]:
    given = Classes(PipeTransformerTrainer, PipeTransformerTrainingArguments, Path("out"))
    options = {"pipeline_parallel_size": world_size, "remove_unused_columns": False}
    found = {}
    for is_tuple in REFUSED:

        def collate(rows: list[Any], is_tuple: bool = is_tuple) -> Any:
            return tuple(rows) if is_tuple else {"texts": rows}

        trainer = given.make(train_dataset=["a", "b", "c", "d"], data_collator=collate, **options)
        found[is_tuple] = error_of(trainer.train)
    return found


@pytest.mark.slow
def test_batches_without_names_or_tensors_are_refused_with_stages() -> None:
    for found in run_ranks(without_names, 2):
        for is_tuple, told in found.items():
            assert told.startswith("ValueError") and REFUSED[is_tuple] in told and "pipeline_parallel_size=1" in told


# ------------------------------------------------------------------------------------------ documented differences
def differences() -> str:
    text = DIFFERENCES.read_text()
    return text[text.index("## What differs in one process") :]


def test_files_beside_the_stock_trainers_are_documented(tmp_path: Path) -> None:
    def files(given: Classes) -> set[str]:
        given.make(max_steps=2, **SAVES).train()
        return {path.name for path in given.folder.rglob("*")}

    expected, found = (run(files, tmp_path, is_ours) for is_ours in (False, True))
    assert found > expected
    assert all(f"`{name}`" in differences() for name in found - expected)


def test_callbacks_beside_the_users_are_documented(tmp_path: Path) -> None:
    seen: dict[str, list[str]] = {}

    class Looks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen["inside"] = names_of(trainer.callback_handler.callbacks)

    trainer = Classes(PipeTransformerTrainer, PipeTransformerTrainingArguments, tmp_path).make(callbacks=[Looks()])
    before = names_of(trainer.callback_handler.callbacks)
    trainer.train()
    seen["behind"] = names_of(trainer.callback_handler.callbacks)
    for names in seen.values():
        assert names[-len(before) :] == before  # ours come first
    ours = {name for names in seen.values() for name in names[: -len(before)]}
    assert ours and all(f"`{name}`" in differences() for name in ours)


def test_a_stream_that_runs_dry_ends_the_training(tmp_path: Path) -> None:
    def dry(given: Classes) -> Any:
        trainer = given.make(train_dataset=PointsThatEnd(20), per_device_train_batch_size=4, max_steps=9)
        return error_of(trainer.train), trainer.state.global_step

    (stock, _), ours = (run(dry, tmp_path, is_ours) for is_ours in (False, True))
    assert "ValueError: Batch does not contain any data" in stock
    assert ours == ("none", 5)


def test_a_mean_over_samples_is_that_of_the_accumulated_batch(tmp_path: Path) -> None:
    """The stock Trainer adds the micro-steps' means, because the model's signature has `**kwargs`."""

    def first_loss(given: Classes) -> float:
        model = BertForSequenceClassification(
            BertConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
        )
        rows = [{"input_ids": [1, 2, index % 3], "labels": index % 2} for index in range(16)]
        trainer = given.make(model.eval(), train_dataset=rows, gradient_accumulation_steps=2, max_steps=1)
        trainer.train()
        return trainer.state.log_history[0]["loss"]

    stock, ours = (run(first_loss, tmp_path, is_ours) for is_ours in (False, True))
    assert stock == pytest.approx(2 * ours, rel=0.05)
