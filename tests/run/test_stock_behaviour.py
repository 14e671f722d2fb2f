"""In one process, without stages and frozen layers, a script does what it does with the stock Trainer.

Each scenario is a script in which the two classes are left open. It runs with the stock classes and with ours, and
what it returns must be equal: logs, weights, events, names of files, errors. Where it is not, the documentation says
so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from distributed import run_ranks
from model_zoo import MODELS
from stock_scripts import (
    SAVES,
    STOCK_FIELDS,
    Classes,
    Line,
    Points,
    PointsThatEnd,
    PointStream,
    Scenario,
    error_of,
    names_of,
    outcome,
    rounded,
    run,
    scenario,
    scenarios_of,
)
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    HfArgumentParser,
    TrainerCallback,
    default_data_collator,
)
from transformers.trainer_callback import ExportableState

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

DIFFERENCES = Path(__file__).parents[2] / "recipes" / "drop_in.md"


# ------------------------------------------------------------------------------------------ arguments


@scenario
def arguments_as_plain_values(given: Classes) -> Any:
    args = given.args(lr_scheduler_kwargs='{"factor": 0.5}', accelerator_config={"split_batches": False})
    again = given.arguments(**{name: value for name, value in args.to_dict().items() if name in STOCK_FIELDS})
    differs = ("output_dir", "average_tokens_across_devices")
    shown = {n: v for n, v in json.loads(args.to_json_string()).items() if n in STOCK_FIELDS and n not in differs}
    return shown, again.to_dict() == args.to_dict(), sorted(STOCK_FIELDS & set(args.to_sanitized_dict()))


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


class Remembers(TrainerCallback, ExportableState):
    def __init__(self, value: str = "default") -> None:
        self.value = value

    def state(self) -> dict[str, Any]:
        return {"args": {"value": self.value}, "attributes": {}}


class Controls(TrainerCallback):
    """Asks for everything in the second step, and for the end in the fourth."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            control.should_evaluate = control.should_save = control.should_log = True
        control.should_training_stop = state.global_step == 4


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


@scenario
def callbacks_that_control(given: Classes) -> Any:
    return outcome(given.make(callbacks=[Controls()])), given.checkpoints


@scenario
def callbacks_with_a_state(given: Classes) -> Any:
    steps = {"eval_steps": 2, "save_steps": 2, "eval_strategy": "steps", "save_strategy": "steps", "max_steps": 2}
    options = {**steps, "load_best_model_at_end": True, "restore_callback_states_from_checkpoint": True}
    given.make(callbacks=[EarlyStoppingCallback(5, 0.2), Remembers("one"), Remembers("two")], **options).train()
    trainer = given.make(callbacks=[EarlyStoppingCallback(), Remembers(), Remembers(), Records()], **options)
    trainer.train(resume_from_checkpoint=str(given.folder / "checkpoint-2"))
    callbacks = trainer.callback_handler.callbacks
    stopping = next(one for one in callbacks if isinstance(one, EarlyStoppingCallback))
    return stopping.early_stopping_patience, [one.value for one in callbacks if isinstance(one, Remembers)]


@scenario
def callback_that_evaluates(given: Classes) -> Any:
    found = []

    class Evaluates(TrainerCallback):
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            found.append([rounded(trainer.evaluate()), trainer.predict(Points(5)).predictions.shape])

    trainer = given.make(callbacks=[Evaluates()], num_train_epochs=2)
    return outcome(trainer), found


# ------------------------------------------------------------------------------------------ data
@scenario
def sizes_of_loaders(given: Classes) -> Any:
    found = []
    for drop_last in (False, True):
        options = {
            "per_device_train_batch_size": 5,
            "per_device_eval_batch_size": 4,
            "dataloader_drop_last": drop_last,
        }
        trainer = given.make(**options)
        train, evaluation = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
        found.append([len(train), train.total_batch_size, trainer.num_examples(train), len(evaluation)])
        found.append([len(trainer.get_eval_dataloader(Points(7))), len(trainer.get_test_dataloader(Points(7)))])
    return found


@scenario
def loader_that_is_read_by_hand(given: Classes) -> Any:
    loader = given.make().get_train_dataloader()
    passes = [[rounded(batch["x"]) for batch in loader] for _ in range(3)]
    loader.set_epoch(0)
    next(iter(loader))
    return passes, [rounded(batch["x"]) for batch in loader]


class Chain:
    """Several loaders, without anything that a `DataLoader` has."""

    def __init__(self, *loaders: Any) -> None:
        self.loaders = loaders

    def __len__(self) -> int:
        return sum(map(len, self.loaders))

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders:
            yield from loader


class ChainsItsLoaders:
    def get_train_dataloader(self) -> Any:
        return Chain(super().get_train_dataloader(), super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return Chain(super().get_eval_dataloader(eval_dataset), super().get_eval_dataloader(eval_dataset))  # type: ignore[misc]


class GivesAGenerator:
    def get_train_dataloader(self) -> Any:
        return (batch for batch in super().get_train_dataloader())  # type: ignore[misc]


@scenario
def loaders_in_one(given: Classes) -> Any:
    trainer = given.make(mixin=ChainsItsLoaders)
    return outcome(trainer), rounded(trainer.evaluate()["eval_loss"])


@scenario
def loader_that_can_be_read_once(given: Classes) -> Any:
    return outcome(given.make(mixin=GivesAGenerator, max_steps=2))


@scenario
def streams(given: Classes) -> Any:
    trainer = given.make(train_dataset=PointStream(), eval_dataset=PointStream(11), max_steps=5)
    evaluated = rounded(trainer.evaluate())
    refused = error_of(lambda: given.make(train_dataset=PointStream()))
    return outcome(trainer), evaluated, trainer.predict(PointStream(9)).predictions.shape, refused


@scenario
def data_that_is_missing(given: Classes) -> Any:
    trainer = given.trainer(Line(), given.args())
    return [error_of(call) for call in (trainer.train, trainer.get_eval_dataloader, trainer.evaluate)]


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


@scenario
def batches_without_tensors(given: Classes) -> Any:
    class ReadsTexts(Line):
        def forward(self, texts: list[str]) -> Any:  # type: ignore[override]
            return {"loss": self.slope * sum(map(len, texts)) / len(texts)}

    texts = ["x" * length for length in range(12)]
    options = {"train_dataset": texts, "remove_unused_columns": False}
    return outcome(given.make(ReadsTexts(1.0), data_collator=lambda rows: {"texts": rows}, **options))


@scenario
def batches_with_other_values(given: Classes) -> Any:
    def collate(rows: list[Any]) -> Any:
        return {**default_data_collator(rows), "nothing": None, "texts": ["a"] * len(rows), "number": 3}

    class Weighs(Line):
        def forward(self, x: Any, labels: Any = None, texts: Any = (), number: int = 0, **_: Any) -> Any:
            loss, y = super().forward(x, labels)
            return {"loss": loss * len(texts) * number, "y": y}

    trainer = given.make(Weighs(), data_collator=collate)
    return outcome(trainer), rounded(trainer.evaluate())


@scenario
def labels_in_a_dict_and_none(given: Classes) -> Any:
    class ReadsDict(Line):
        def forward(self, x: Any, labels: Any = None, **_: Any) -> Any:
            loss, y = super().forward(x, torch.zeros_like(x) if labels is None else labels["y"])
            return {"loss": loss, "y": y}

    def nested(rows: list[Any]) -> Any:
        batch = default_data_collator(rows)
        return {"x": batch["x"], "labels": {"y": batch["labels"]}}

    def without(rows: list[Any]) -> Any:
        return {"x": default_data_collator(rows)["x"]}

    trainers = [given.make(ReadsDict(), data_collator=collate) for collate in (nested, without)]
    return [[outcome(trainer), rounded(trainer.evaluate())] for trainer in trainers]


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


def test_batches_without_names_or_tensors_are_refused_with_stages() -> None:
    for found in run_ranks(without_names, 2):
        for is_tuple, told in found.items():
            assert told.startswith("ValueError") and REFUSED[is_tuple] in told and "pipeline_parallel_size=1" in told


class ReadsPairs:
    """Batches are dicts, or tuples of tokens and labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        tokens, labels = (inputs["input_ids"], inputs["labels"]) if isinstance(inputs, dict) else inputs
        outputs = model(input_ids=tokens, labels=labels)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def test_layers_freeze_also_where_batches_are_tuples(tmp_path: Path) -> None:
    rows = [{"input_ids": [6, 7, 8 + index % 5], "labels": index % 2} for index in range(16)]
    names = ("input_ids", "labels")
    found = []
    for collate in (default_data_collator, lambda some: tuple(default_data_collator(some)[name] for name in names)):
        given = Classes(PipeTransformerTrainer, PipeTransformerTrainingArguments, tmp_path)
        freezing = {"freeze_policy": "schedule", "freeze_schedule": {1: 1}, "activation_cache": "off"}
        options = {"mixin": ReadsPairs, "train_dataset": rows, "data_collator": collate, **freezing}
        found.append(outcome(given.make(MODELS["bert-classification"].build(), **options))[:2])
    logs, weights = zip(*found, strict=True)
    losses = [[entry["loss"] for entry in log if "loss" in entry] for log in logs]
    assert losses[0] == losses[1] and weights[0] == weights[1]


@pytest.mark.parametrize("script", scenarios_of(__name__), ids=lambda script: script.__name__)
def test_a_script_does_the_same_with_our_classes(script: Scenario, tmp_path: Path) -> None:
    expected, found = (run(script, tmp_path, is_ours) for is_ours in (False, True))
    assert found == expected


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
