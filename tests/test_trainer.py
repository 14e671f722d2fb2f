"""What the Trainer offers around training: evaluation, prediction, saving, resuming, callbacks, memory."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_runs import trainer_of
from distributed import run_ranks
from model_zoo import MODELS
from safetensors.torch import load_file
from selection import few, slow
from test_store_troubles import train_some as train_some_cached
from training_data import PadCollator, TrainingData
from training_runs import (
    WORLD,
    Outcome,
    Run,
    assert_same_training,
    largest_difference,
    outcome_of,
    pipeline,
    pipeline_trainer,
    reference,
    weights_of,
    with_plans,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.pipeline.mesh import ProcessMesh
from hf_pipetransformer.planning.costs import UnitCost
from hf_pipetransformer.planning.plan import PipelinePlan
from hf_pipetransformer.planning.plan_choice import make_plan
from hf_pipetransformer.run.planner import Planner

LAYOUTS = [4, 2, 1]


# ------------------------------------------------------------------------------------------ evaluation and prediction
def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean()), "rows": len(logits)}


def predict(rank: int, world_size: int, run: Run, stages: int) -> dict[str, Any]:
    trainer = pipeline_trainer(run, stages)
    data = TrainingData(run.kind, 29, seed=9)
    before = trainer.predict(data)
    trainer.train()
    after = trainer.predict(data)
    return {"before": before.predictions, "labels": before.label_ids, "after": after.predictions}


def predict_plainly(rank: int, world_size: int, run: Run) -> dict[str, Any]:
    arguments = TrainingArguments("plain", use_cpu=True, per_device_train_batch_size=32, **run.common_options())
    trainer = Trainer(
        model=run.build_model(),
        args=arguments,
        train_dataset=run.data(run.samples),
        data_collator=PadCollator(run.kind),
        **run.keywords,
    )
    data = TrainingData(run.kind, 29, seed=9)
    before = trainer.predict(data)
    trainer.train()
    return {"before": before.predictions, "labels": before.label_ids, "after": trainer.predict(data).predictions}


@pytest.mark.parametrize("kind", few(("text-classification", "causal-lm", "seq2seq"), "seq2seq"))
@pytest.mark.parametrize("stages", few(LAYOUTS, 2))
def test_predictions_are_those_of_one_process(kind: Any, stages: int) -> None:
    """Before training (nothing was placed yet) and after; 29 rows over 4 processes in batches of 3, of any length."""
    run = Run(kind)
    plain = run_ranks(predict_plainly, 1, run)[0]
    for outcome in run_ranks(predict, WORLD, run, stages):
        for when in ("before", "after"):
            assert_same_predictions(outcome[when], plain[when])
        assert_same_predictions(outcome["labels"], plain["labels"])


def assert_same_predictions(ours: Any, plain: Any) -> None:
    for mine, wanted in zip(_as_tuple(ours), _as_tuple(plain), strict=True):
        assert len(mine) == len(wanted) == 29
        if mine.ndim == 1:
            assert (mine == wanted).all()
            continue
        # both pad to the longest row they have met, with -100
        length = min(mine.shape[1], wanted.shape[1])
        real = wanted[:, :length] != -100
        assert abs(mine[:, :length] - wanted[:, :length])[real].max() <= 1e-4


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def evaluate_with_metrics(rank: int, world_size: int, run: Run, stages: int) -> dict[str, float]:
    return pipeline_trainer(run, stages).evaluate()


@pytest.mark.parametrize("stages", few(LAYOUTS, 2))
def test_metrics_see_every_row_once(stages: int) -> None:
    run = Run(keywords={"compute_metrics": accuracy})
    outcomes = run_ranks(evaluate_with_metrics, WORLD, run, stages)
    assert all(outcome["eval_rows"] == 29 for outcome in outcomes)
    assert len({(outcome["eval_accuracy"], outcome["eval_loss"]) for outcome in outcomes}) == 1


# ------------------------------------------------------------------------------------------ saving
def train_and_save(rank: int, world_size: int, run: Run, stages: int, folder: str) -> dict[str, torch.Tensor]:
    trainer = pipeline_trainer(run, stages, folder, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model(f"{folder}/final")
    return weights_of(trainer.model)


@pytest.mark.parametrize("stages", few(LAYOUTS, 2))
@pytest.mark.parametrize("kind", [*slow("text-classification"), "causal-lm"])
def test_saved_models_load_bit_for_bit(kind: Any, stages: int, tmp_path: Path) -> None:
    """The last checkpoint was written while the model was spread, `final` after; both are the trained weights."""
    run = Run(kind)
    auto = AutoModelForSequenceClassification if kind == "text-classification" else AutoModelForCausalLM
    everyone = run_ranks(train_and_save, WORLD, run, stages, str(tmp_path))
    for folder in ("final", "checkpoint-6"):
        loaded, report = auto.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        assert largest_difference(weights_of(loaded), everyone[0])[0] == 0
    assert all(largest_difference(weights, everyone[0])[0] == 0 for weights in everyone)
    if kind == "causal-lm":
        assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert {path.name for path in (tmp_path / "checkpoint-6").iterdir()} >= {
        "model.safetensors",
        "config.json",
        "optimizer.pt",
        "scheduler.pt",
        "trainer_state.json",
    }


# ------------------------------------------------------------------------------------------ resuming
def train_some(rank: int, world_size: int, run: Run, stages: int, folder: str) -> None:
    trainer = pipeline_trainer(run, stages, folder, save_strategy="steps", save_steps=2)
    trainer.add_callback(StopAfter(4))
    trainer.train()


class StopAfter(TrainerCallback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.steps


def resume(rank: int, world_size: int, run: Run, stages: int, folder: str) -> Outcome:
    return outcome_of(pipeline_trainer(run, stages, folder), resume_from_checkpoint=f"{folder}/checkpoint-4")


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 2), (2, 4), (2, 1), (1, 4)])
@pytest.mark.parametrize("kind", ["text-classification", "causal-lm"])
def test_resumes_in_another_layout(kind: Any, before: int, after: int, tmp_path: Path) -> None:
    """Interrupted in the second epoch, between two batches; AdamW's state, schedule and data go on."""
    run = Run(kind)
    undisturbed = run_ranks(reference, 1, run)[0]
    run_ranks(train_some, WORLD, run, before, str(tmp_path))
    outcomes = run_ranks(resume, WORLD, run, after, str(tmp_path))
    assert_same_training(outcomes, undisturbed)


@pytest.mark.slow
def test_resumes_where_weights_are_saved_under_other_names(tmp_path: Path) -> None:
    """ViT's published names are others than its own: the stock Trainer would leave the layers as they are."""
    run = Run("image-classification")
    undisturbed = run_ranks(reference, 1, run)[0]
    run_ranks(train_some, WORLD, run, 4, str(tmp_path))
    assert any("encoder" in name for name in load_file(tmp_path / "checkpoint-4" / "model.safetensors"))
    assert_same_training(run_ranks(resume, WORLD, run, 2, str(tmp_path)), undisturbed)


def resume_plainly(rank: int, world_size: int, run: Run, folder: str) -> Outcome:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=run.per_device * WORLD * run.accumulation,
        **run.common_options(),
    )
    trainer = Trainer(
        model=run.build_model(),
        args=arguments,
        train_dataset=run.data(run.samples),
        data_collator=PadCollator(run.kind),
    )
    return outcome_of(trainer, resume_from_checkpoint=f"{folder}/checkpoint-4")


def test_the_stock_trainer_resumes_our_checkpoint(tmp_path: Path) -> None:
    """Written by 2 stages x 2 replicas, read by one process."""
    run = Run()
    undisturbed = run_ranks(reference, 1, run)[0]
    run_ranks(train_some, WORLD, run, 2, str(tmp_path))
    assert_same_training(run_ranks(resume_plainly, 1, run, str(tmp_path)), undisturbed)


def train_twice_with_dropout(
    rank: int, world_size: int, run: Run, stages: int, folder: str
) -> tuple[Outcome, Outcome]:
    def model() -> Any:
        built = MODELS["bert-classification"].build()
        for module in built.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        return built

    whole = outcome_of(pipeline_trainer(run, stages, f"{folder}/whole", model=model()))
    trainer = pipeline_trainer(run, stages, folder, model=model(), save_strategy="steps", save_steps=2)
    trainer.add_callback(StopAfter(4))
    trainer.train()
    trainer = pipeline_trainer(run, stages, folder, model=model())
    return whole, outcome_of(trainer, resume_from_checkpoint=f"{folder}/checkpoint-4")


def test_resuming_in_the_same_layout_is_bit_exact_with_dropout(tmp_path: Path) -> None:
    run = Run().with_options(num_microbatches=4)  # chosen by time it might be another, with other random numbers
    for whole, resumed in run_ranks(train_twice_with_dropout, WORLD, run, 2, str(tmp_path)):
        assert largest_difference(whole.weights, resumed.weights)[0] == 0


def with_a_plan_that_has_come_about(run: Run, folder: str, **options: Any) -> PipeTransformerTrainer:
    """Of four stages that became two when the first layer froze; with two layers at once it would have stayed."""
    model = run.build_model()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    trainer = pipeline_trainer(
        run,
        4,
        folder,
        model=model,
        freeze_policy="schedule",
        freeze_strategy="steps",
        freeze_steps=1,
        freeze_schedule={1: 1, 2: 2},
        activation_cache="off",
        **options,
    )

    def plan_after_freezing(plan: PipelinePlan, num_frozen: int, num_cached: int) -> PipelinePlan:
        return make_plan(
            plan.unit_costs,
            plan.world_size,
            4 if (plan.num_frozen_layers, num_frozen) == (0, 2) else 2,
            rows_per_device=run.per_device,
            memory_budget_bytes=None,
            num_frozen_layers=num_frozen,
        )

    with_plans(trainer, plan_after_freezing)
    return trainer


def resume_the_plan(rank: int, world_size: int, run: Run, folder: str) -> tuple[Outcome, Outcome, int]:
    if rank:
        torch.get_num_threads = lambda: 7  # hosts may differ: it is the first process that decides
    whole = outcome_of(with_a_plan_that_has_come_about(run, folder, save_strategy="steps", save_steps=4))
    trainer = with_a_plan_that_has_come_about(run, folder)

    class Note(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.stages = trainer.pipeline.num_stages  # type: ignore[union-attr]

    trainer.add_callback(note := Note())
    resumed = outcome_of(trainer, resume_from_checkpoint=f"{folder}/checkpoint-4")
    return whole, resumed, note.stages


@pytest.mark.slow
def test_resuming_goes_on_with_the_plan(tmp_path: Path) -> None:
    """It depends on how it came about, and with dropout the weights on it."""
    run = Run("question-answering", samples=96)
    for whole, resumed, stages in run_ranks(resume_the_plan, WORLD, run, str(tmp_path)):
        assert stages == 2
        assert largest_difference(whole.weights, resumed.weights)[0] == 0


def test_another_plan_is_made_where_another_is_asked_for(tmp_path: Path) -> None:
    units = [UnitCost(f"layer.{k}", 1.0, 0, 0, {f"layer.{k}": 4}, 4) for k in range(8)]

    def layouts(**options: Any) -> Planner:
        arguments = PipeTransformerTrainingArguments(str(tmp_path), **{"pipeline_parallel_size": 1, **options})
        return Planner(arguments, units, None, ProcessMesh(timedelta(seconds=60)))

    made = layouts()
    plan = replace(made.first, num_frozen_layers=3, num_cached_layers=2)
    facts = json.loads(json.dumps(made.facts_of(plan)))
    assert made.again(facts, most_frozen=3) == plan
    assert made.again(facts, most_frozen=2) is None  # a user who freezes no more
    assert made.again({**facts, "bounds": [0, 7]}, most_frozen=3) is None  # another model
    assert layouts(per_device_train_batch_size=3).again(facts, most_frozen=3) is None
    assert layouts(elastic=False).again(facts, most_frozen=3) is None
    small = layouts()
    small._budget, small.first = 1, replace(small.first, num_frozen_layers=7)
    assert small.again(facts, most_frozen=3) is None  # devices with less memory


def test_a_resumed_training_keeps_the_schedule_that_was_chosen(tmp_path: Path) -> None:
    """Also where another one would be chosen now, because devices have less memory or layers take another time."""
    units = [UnitCost(f"layer.{k}", 1.0, 0, 0, {f"layer.{k}": 4}, 4) for k in range(8)]
    arguments = PipeTransformerTrainingArguments(
        str(tmp_path), pipeline_schedule="auto", per_device_train_batch_size=2, num_microbatches=2
    )
    arguments.pipeline_parallel_size = 2  # afterwards: there is one process here
    mesh = ProcessMesh(timedelta(seconds=60))
    mesh.world_size = 2
    made = Planner(arguments, units, None, mesh)
    facts = json.loads(json.dumps(made.facts_of(made.first)))
    heavy = [*units[:7], replace(units[7], forward_flops=30.0)]
    now = Planner(arguments, heavy, None, mesh)
    assert (made.first.schedule, now.first.schedule) == ("interleaved1f1b", "1f1b")
    again = now.again(facts, most_frozen=0)
    assert again is not None and (again.schedule, again.stage_bounds) == ("interleaved1f1b", made.first.stage_bounds)


def test_token_slices_are_planned_in_the_order_of_1f1b(tmp_path: Path) -> None:
    units = [UnitCost(f"layer.{k}", 1.0, 0, 0, {f"layer.{k}": 4}, 4) for k in range(8)]
    options: dict[str, Any] = {"pipeline_parallel_size": "auto", "num_microbatches": 2, "token_slices": 2}
    arguments = PipeTransformerTrainingArguments(str(tmp_path), pipeline_schedule="auto", **options)
    arguments.pipeline_parallel_size = 2  # afterwards: there is one process here
    mesh = ProcessMesh(timedelta(seconds=60))
    mesh.world_size = 2
    planner = Planner(arguments, units, None, mesh)
    assert planner.first.schedule == "1f1b" and planner.schedule_choice is None


def cached_at_the_first_step(
    rank: int, world_size: int, run: Run, folder: str, stages: dict[int, int], table: dict[int, int]
) -> list[int]:
    trainer = trainer_of(run, stages, table, folder)
    counted: list[int] = []

    class Note(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            counted.append(trainer.pipeline.current_plan.num_cached_layers)  # type: ignore[union-attr]

    trainer.add_callback(Note())
    trainer.train(resume_from_checkpoint="last")
    return counted


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.slow
def test_resuming_goes_on_with_cached_layers_where_the_store_is_there(is_there: bool, tmp_path: Path) -> None:
    """They count as cached since step 6, the third epoch's begin."""
    stages, table, cache = {0: 2, 1: 2}, {3: 1}, tmp_path / "cache"
    run = Run(epochs=5).with_options(activation_cache_dir=str(cache))
    run_ranks(train_some_cached, WORLD, run, str(tmp_path / "run"), stages, table, 7)
    if not is_there:
        shutil.rmtree(cache)
    counted = run_ranks(cached_at_the_first_step, WORLD, run, str(tmp_path / "run"), stages, table)[0]
    assert counted == ([1] * 8 if is_there else [0, 0, 0, 0, 0, 1, 1, 1])


# ------------------------------------------------------------------------------------------ best model, early stopping
def train_for_the_best(rank: int, world_size: int, run: Run, stages: int, folder: str) -> dict[str, Any]:
    trainer = pipeline_trainer(
        run,
        stages,
        folder,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that an early checkpoint is the best, and has to be loaded
        learning_rate=1e-2,
        warmup_steps=0,
    )
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    return {
        "best": trainer.state.best_model_checkpoint,
        "steps": trainer.state.global_step,
        "weights": weights_of(trainer.model),
        "eval_loss": trainer.evaluate()["eval_loss"],
        "best_metric": trainer.state.best_metric,
    }


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        *slow(("text-classification", 4)),
        ("text-classification", 2),
        *slow(("text-classification", 1), ("image-classification", 2)),
    ],
)
def test_best_model_is_loaded_and_early_stopping_stops(kind: Any, stages: int, tmp_path: Path) -> None:
    outcomes = run_ranks(train_for_the_best, WORLD, Run(kind), stages, str(tmp_path))
    is_text = kind == "text-classification"
    auto = AutoModelForSequenceClassification if is_text else AutoModelForImageClassification
    best = auto.from_pretrained(outcomes[0]["best"])
    for outcome in outcomes:
        assert outcome["steps"] < 6
        assert largest_difference(outcome["weights"], weights_of(best))[0] == 0
        assert outcome["eval_loss"] == pytest.approx(outcome["best_metric"], abs=1e-6)


# ------------------------------------------------------------------------------------------ memory
def held_bytes(rank: int, world_size: int, stages: int) -> dict[str, int]:
    seen: dict[str, int] = {}

    class Measure(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
            def size(tensors: Any) -> int:
                return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

            with torch._C.DisableTorchFunctionSubclass():  # those that are elsewhere cannot be read
                seen["parameters"] = size(model.parameters())
            seen["optimizer"] = size(
                v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()
            )

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            here = [p for p in model.parameters() if not getattr(p, "is_elsewhere", False)]
            seen["gradients"] = sum(p.grad.nbytes for p in here if p.grad is not None)

    trainer = pipeline_trainer(Run("causal-lm", model="llama"), stages)
    trainer.add_callback(Measure())
    trainer.train()
    seen["whole"] = sum(p.nbytes for p in trainer.model.parameters())
    return seen


def test_a_process_holds_its_stage_only() -> None:
    """Parameters, gradients and optimizer state over the stages add up to one model, and no stage holds much more."""
    everyone = run_ranks(held_bytes, WORLD, WORLD)
    whole = everyone[0]["whole"]
    ghosts = 4 * 100  # an element for each parameter that is elsewhere
    assert whole <= sum(rank["parameters"] for rank in everyone) <= whole + WORLD * ghosts
    assert sum(rank["gradients"] for rank in everyone) == whole
    assert sum(rank["optimizer"] for rank in everyone) == 2 * whole
    assert max(rank["parameters"] for rank in everyone) < 0.5 * whole


# ------------------------------------------------------------------------------------------ around the Trainer
def train_after_setting_up(rank: int, world_size: int, how: str, stages: int) -> Outcome:
    run = Run()
    if how == "own-optimizer":
        model = run.build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        run = Run(keywords={"optimizers": (optimizer, None)})
        return outcome_of(pipeline_trainer(run, stages, model=model))
    if how == "train-twice":
        trainer = pipeline_trainer(Run(epochs=1).with_options(lr_scheduler_type="constant", warmup_steps=0), stages)
        trainer.train()
        return outcome_of(trainer)
    if how == "frozen-below":
        model = run.build_model()
        _freeze_below(model)
        return outcome_of(pipeline_trainer(run, stages, model=model))
    if how == "different-heads":
        model = run.build_model()
        torch.manual_seed(rank)
        torch.nn.init.normal_(model.classifier.weight, std=float(rank))  # rank 0's is zero, and counts
        return outcome_of(pipeline_trainer(run, stages, model=model))
    raise AssertionError(how)


def _freeze_below(model: Any) -> None:
    """Embeddings and the first two layers: on 4 processes the first stage has nothing to train."""
    for part in (model.bert.embeddings, *model.bert.encoder.layer[:2]):
        part.requires_grad_(False)


def reference_after_setting_up(rank: int, world_size: int, how: str) -> Outcome:
    run = Run()
    model = run.build_model()
    options = run.common_options()
    keywords: dict[str, Any] = {}
    if how == "own-optimizer":
        keywords["optimizers"] = (torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), None)
    if how == "train-twice":
        options = Run(epochs=1).with_options(lr_scheduler_type="constant", warmup_steps=0).common_options()
    if how == "frozen-below":
        _freeze_below(model)
    if how == "different-heads":
        torch.nn.init.zeros_(model.classifier.weight)
    arguments = TrainingArguments("plain", use_cpu=True, per_device_train_batch_size=32, **options)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=run.data(run.samples),
        data_collator=PadCollator(run.kind),
        **keywords,
    )
    if how == "train-twice":
        trainer.train()
    return outcome_of(trainer)


@pytest.mark.parametrize("stages", few(LAYOUTS, 2))
@pytest.mark.parametrize(
    "how", few(("own-optimizer", "train-twice", "frozen-below", "different-heads"), "own-optimizer", "frozen-below")
)
def test_equals_one_process_after(how: str, stages: int) -> None:
    expected = run_ranks(reference_after_setting_up, 1, how)[0]
    assert_same_training(run_ranks(train_after_setting_up, WORLD, how, stages), expected)


def train_alone(rank: int, world_size: int, run: Run) -> Outcome:
    return outcome_of(pipeline_trainer(run, 1))


def test_one_process_without_a_launcher() -> None:
    run = Run(per_device=32, accumulation=1)
    expected = run_ranks(reference, 1, Run(per_device=8, accumulation=1))[0]
    assert_same_training(run_ranks(train_alone, 1, run), expected)


def bar_and_log(rank: int, world_size: int, folder: str) -> None:
    pipeline_trainer(Run(), 2, folder, disable_tqdm=False, report_to=["tensorboard"]).train()


def test_one_progress_bar_and_one_log_per_job(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("tensorboard")
    run_ranks(bar_and_log, WORLD, str(tmp_path), env={"TENSORBOARD_LOGGING_DIR": str(tmp_path / "logs")})
    output = capsys.readouterr().out
    ranks_with_bars = [part[0] for part in output.split("--- output of rank ")[1:] if "6/6" in part]
    assert ranks_with_bars == ["0"]
    assert len(list(Path(tmp_path).rglob("events.out.tfevents*"))) == 1


def bf16(rank: int, world_size: int, stages: int) -> Outcome:
    return pipeline(rank, world_size, Run("causal-lm").with_options(bf16=True), stages)


@pytest.mark.parametrize("stages", few(LAYOUTS, 2))
def test_bf16_autocast_follows_one_process(stages: int) -> None:
    """The same autocast as under the stock Trainer; what remains is the rounding of other batch shapes."""
    expected = run_ranks(reference, 1, Run("causal-lm").with_options(bf16=True))[0]
    for outcome in run_ranks(bf16, WORLD, stages):
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=0, atol=5e-3)


def grouped(rank: int, world_size: int, stages: int) -> list[list[int]]:
    """Lengths of the samples of each global batch, as the pipelines get them."""
    run = Run(samples=200, epochs=1, accumulation=1).with_options(train_sampling_strategy="group_by_length")
    lengths: list[list[int]] = []

    trainer = pipeline_trainer(run, stages)
    step = trainer.training_step

    def noting(model: Any, inputs: Any, *rest: Any) -> Any:
        lengths.append(inputs["attention_mask"].sum(1).tolist())
        return step(model, inputs, *rest)

    trainer.training_step = noting
    trainer.train()
    return lengths


@pytest.mark.slow
def test_group_by_length_gives_every_layout_the_same_batches() -> None:
    by_layout = []
    for stages in LAYOUTS:
        everyone = run_ranks(grouped, WORLD, stages)
        pipelines = everyone[::stages]
        by_layout.append([sorted(chain.from_iterable(parts)) for parts in zip(*pipelines, strict=True)])
    assert by_layout[0] == by_layout[1] == by_layout[2]
    full = [batch for batch in by_layout[0] if len(batch) == 16]
    spread = sum(max(batch) - min(batch) for batch in full) / len(full)
    assert spread < 10  # of 5 to 24 tokens; a random order gives about 17


def save_while_spread(rank: int, world_size: int) -> list[str]:
    messages: list[str] = []

    class Misuse(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            for call in (lambda: model.save_pretrained("half"), lambda: model.generate(**batch)):
                try:
                    call()
                except ValueError as error:
                    messages.append(str(error))
            control.should_training_stop = True

    run = Run("causal-lm")
    batch = {"input_ids": torch.tensor([run.data(2)[0]["input_ids"]])}
    trainer = pipeline_trainer(run, 4)
    trainer.add_callback(Misuse())
    trainer.train()
    return messages


def test_a_spread_model_is_never_saved_by_mistake_and_does_not_generate() -> None:
    for messages in run_ranks(save_while_spread, WORLD):
        assert len(messages) == 2
        assert "trainer.save_model()" in messages[0]
        assert "predict_with_generate" in messages[1]


def trainer_state(rank: int, world_size: int, folder: str) -> Any:
    train_and_save(rank, world_size, Run(), 2, folder)
    return None


@pytest.mark.slow
def test_floating_point_operations_count_every_row_once(tmp_path: Path) -> None:
    """As many as one process counts for the same padded rows: within the difference of padding."""
    run_ranks(trainer_state, WORLD, str(tmp_path))
    ours = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())["total_flos"]
    run_ranks(reference_state, 1, str(tmp_path / "plain"))
    plain = json.loads((tmp_path / "plain" / "checkpoint-6" / "trainer_state.json").read_text())["total_flos"]
    assert 0.8 * plain < ours <= plain


def reference_state(rank: int, world_size: int, folder: str) -> None:
    reference(rank, world_size, Run().with_options(save_strategy="steps", save_steps=6), folder)
