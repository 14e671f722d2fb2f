"""The Trainer around training: evaluation, prediction, saving, resuming, callbacks, memory."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from safetensors.torch import load_file
from training_data import TrainingData
from training_runs import (
    WORLD,
    MeasureMemory,
    Outcome,
    Run,
    StopAfter,
    assert_same_training,
    at_each_step,
    largest_difference,
    outcome_of,
    pipeline_trainer,
    reference,
    reference_trainer,
    weights_of,
    with_stages,
)
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    TrainerCallback,
)

from hf_pipetransformer import PipeTransformerTrainer


# ------------------------------------------------------------------------------------------ evaluation and prediction
def counts(prediction: Any) -> dict[str, float]:
    return {"rows": len(prediction.label_ids), "tokens": int((prediction.label_ids != -100).sum())}


def predicted(rank: int, world_size: int) -> dict[str, Any]:
    """Predictions before training (no stage was placed yet) and after; 29 rows in batches of 3, of any length."""
    run = Run("seq2seq", keywords={"compute_metrics": counts})
    trainer: Any = reference_trainer(run) if world_size == 1 else pipeline_trainer(run, 2)
    data = TrainingData(run.kind, 29, seed=9)
    before = trainer.predict(data)
    trainer.train()
    after = trainer.predict(data)
    found = {"before": before.predictions[0], "labels": before.label_ids, "after": after.predictions[0]}
    counted = [after.metrics[f"test_{name}"] for name in ("rows", "tokens")]
    return {**found, "counts": counted, "loss": after.metrics["test_loss"]}


@pytest.mark.slow
def test_predictions_are_those_of_one_process_and_metrics_see_every_row_once() -> None:
    (plain,) = run_ranks(predicted, 1)
    everyone = run_ranks(predicted, WORLD)
    assert len({found["loss"] for found in everyone}) == 1, "a mean over batches, which are others on one process"
    for found in everyone:
        assert found["counts"] == plain["counts"] and found["counts"][0] == 29
        for what in ("before", "after", "labels"):
            # both pad to the longest row they have met, with -100
            length = min(found[what].shape[1], plain[what].shape[1])
            mine, wanted = found[what][:, :length], plain[what][:, :length]
            assert abs(mine - wanted)[wanted != -100].max() <= 1e-4


def bf16(rank: int, world_size: int) -> list[list[float]]:
    run = Run("causal-lm").with_options(bf16=True)
    layouts = (4, 2, 1) if world_size > 1 else (None,)
    return [outcome_of(pipeline_trainer(run, k) if k else reference_trainer(run)).losses for k in layouts]


@pytest.mark.slow
def test_bf16_autocast_follows_one_process() -> None:
    """The same autocast as under the stock Trainer; what remains is the rounding of other batch shapes."""
    ((expected,),) = run_ranks(bf16, 1)
    for losses in chain.from_iterable(run_ranks(bf16, WORLD)):
        torch.testing.assert_close(losses, expected, rtol=0, atol=5e-3)


# ------------------------------------------------------------------------------------------ saving
class Misuse(TrainerCallback):
    """Calls of the model that need all of it."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        with pytest.raises(ValueError, match=r"trainer\.save_model\(\)"):
            model.save_pretrained("half")
        with pytest.raises(ValueError, match="predict_with_generate"):
            model.generate(input_ids=torch.tensor([[5, 6, 7]]))


def train_and_save(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    run = Run("causal-lm").with_options(save_strategy="steps", save_steps=2)
    trainer = pipeline_trainer(run, 2, folder, disable_tqdm=False, report_to=["tensorboard"])
    trainer.add_callback(Misuse())
    trainer.train()
    trainer.save_model(f"{folder}/final")
    return weights_of(trainer.model)


@pytest.mark.slow
def test_what_a_job_leaves_behind_is_that_of_one_process(tmp_path: Path, capsys: Any) -> None:
    """The last checkpoint was written while the model was spread, `final` after; both are the trained weights.

    Another one is read by the stock Trainer, on one process.
    """
    pytest.importorskip("tensorboard")
    everyone = run_ranks(train_and_save, WORLD, str(tmp_path), env={"TENSORBOARD_LOGGING_DIR": str(tmp_path / "logs")})
    output = capsys.readouterr().out
    assert [part[0] for part in output.split("--- output of rank ")[1:] if "6/6" in part] == ["0"], "one progress bar"
    assert len(list(tmp_path.rglob("events.out.tfevents*"))) == 1
    for folder in ("final", "checkpoint-6"):
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        assert largest_difference(weights_of(loaded), everyone[0])[0] == 0
    assert all(largest_difference(weights, everyone[0])[0] == 0 for weights in everyone)
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    files = {"model.safetensors", "config.json", "optimizer.pt", "scheduler.pt", "trainer_state.json"}
    assert {path.name for path in (tmp_path / "checkpoint-6").iterdir()} >= files
    undisturbed = run_ranks(reference, 1, Run("causal-lm"))[0]
    assert_same_training(run_ranks(resume_plainly, 1, Run("causal-lm"), str(tmp_path)), undisturbed)


# ------------------------------------------------------------------------------------------ resuming
def interrupt_and_resume(rank: int, world_size: int, run: Run, folder: str) -> Outcome:
    trainer = pipeline_trainer(run, 4, folder, save_strategy="steps", save_steps=2)
    trainer.add_callback(StopAfter(4))
    trainer.train()
    return outcome_of(pipeline_trainer(run, 2, folder), resume_from_checkpoint=f"{folder}/checkpoint-4")


@pytest.mark.slow
def test_resumes_in_another_layout(tmp_path: Path) -> None:
    """Interrupted in the second epoch, between two batches; the optimizer's state, schedule and data go on.

    ViT's published names are others than its own: the stock Trainer would leave the layers as they are.
    """
    run = Run("image-classification")
    undisturbed = run_ranks(reference, 1, run)[0]
    assert_same_training(run_ranks(interrupt_and_resume, WORLD, run, str(tmp_path)), undisturbed)
    assert any("encoder" in name for name in load_file(tmp_path / "checkpoint-4" / "model.safetensors"))


def resume_plainly(rank: int, world_size: int, run: Run, folder: str) -> Outcome:
    return outcome_of(reference_trainer(run, folder), resume_from_checkpoint=f"{folder}/checkpoint-4")


def with_dropout(run: Run) -> torch.nn.Module:
    model = run.build_model()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return model


def with_a_plan_that_has_come_about(run: Run, folder: str, **options: Any) -> PipeTransformerTrainer:
    """A plan of four stages that become two when the first layer freezes. With two layers at once they would stay."""
    freezing = {"freeze_policy": "schedule", "freeze_strategy": "steps", "freeze_steps": 1}
    options |= {**freezing, "freeze_schedule": {1: 1, 2: 2}, "activation_cache": "off"}
    trainer = pipeline_trainer(run, 4, folder, model=with_dropout(run), **options)
    with_stages(trainer, lambda layout, num_frozen: 4 if (layout.num_frozen_layers, num_frozen) == (0, 2) else 2)
    return trainer


def resume_the_plan(rank: int, world_size: int, run: Run, folder: str) -> tuple[Outcome, Outcome]:
    if rank:
        torch.get_num_threads = lambda: 7  # hosts may differ: it is the first process that decides
    whole = outcome_of(with_a_plan_that_has_come_about(run, folder, save_strategy="steps", save_steps=4))
    trainer = with_a_plan_that_has_come_about(run, folder)
    stages: set[int] = set()
    at_each_step(trainer, after=lambda run: stages.add(run.pipeline.num_stages))
    resumed = outcome_of(trainer, resume_from_checkpoint=f"{folder}/checkpoint-4")
    assert stages == {2}
    return whole, resumed


@pytest.mark.slow
def test_resuming_is_bit_exact_with_dropout_and_goes_on_with_the_plan(tmp_path: Path) -> None:
    """The plan depends on its history, and with dropout the weights depend on the plan."""
    run = Run("question-answering", samples=96)
    for whole, resumed in run_ranks(resume_the_plan, WORLD, run, str(tmp_path)):
        assert largest_difference(whole.weights, resumed.weights)[0] == 0


# ------------------------------------------------------------------------------------------ best model, early stopping
def train_for_the_best(rank: int, world_size: int, run: Run, stages: int, folder: str) -> dict[str, Any]:
    each_step: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    # an early checkpoint must be the best one: it has to be loaded
    best = {"metric_for_best_model": "eval_loss", "greater_is_better": True, "learning_rate": 1e-2, "warmup_steps": 0}
    trainer = pipeline_trainer(run, stages, folder, load_best_model_at_end=True, **each_step, **best)
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    return {
        "best": trainer.state.best_model_checkpoint,
        "steps": trainer.state.global_step,
        "weights": weights_of(trainer.model),
        "eval_loss": trainer.evaluate()["eval_loss"],
        "best_metric": trainer.state.best_metric,
    }


@pytest.mark.slow
def test_best_model_is_loaded_and_early_stopping_stops(tmp_path: Path) -> None:
    outcomes = run_ranks(train_for_the_best, WORLD, Run(), 2, str(tmp_path))
    best = AutoModelForSequenceClassification.from_pretrained(outcomes[0]["best"])
    for outcome in outcomes:
        assert outcome["steps"] < 6
        assert largest_difference(outcome["weights"], weights_of(best))[0] == 0
        assert outcome["eval_loss"] == pytest.approx(outcome["best_metric"], abs=1e-6)


# ------------------------------------------------------------------------------------------ memory
def held_bytes(rank: int, world_size: int) -> dict[str, int]:
    trainer = pipeline_trainer(Run("causal-lm", model="llama"), world_size)
    trainer.add_callback(measure := MeasureMemory())
    trainer.train()
    return {**measure.held[-1], "whole": sum(p.nbytes for p in trainer.model.parameters())}


def test_a_process_holds_its_stage_only() -> None:
    """Parameters, gradients and optimizer state over the stages add up to one model, and no stage holds much more."""
    everyone = run_ranks(held_bytes, WORLD)
    whole = everyone[0]["whole"]
    placeholders = 4 * 100  # an element for each parameter that is elsewhere
    assert whole <= sum(rank["parameters"] for rank in everyone) <= whole + WORLD * placeholders
    assert sum(rank["gradients"] for rank in everyone) == whole
    assert sum(rank["optimizer"] for rank in everyone) == 2 * whole
    assert max(rank["parameters"] for rank in everyone) < 0.5 * whole


# ------------------------------------------------------------------------------------------ around the Trainer
def different_on_each_rank(rank: int, world_size: int) -> Outcome:
    """The upper layers and the head are trained; the first of four stages has no trained parameter."""
    model = Run().build_model()
    for part in (model.bert.embeddings, *model.bert.encoder.layer[:2]):
        part.requires_grad_(False)
    torch.manual_seed(rank)
    torch.nn.init.normal_(model.classifier.weight, std=float(rank))  # rank 0's is zero, and counts
    trainer = pipeline_trainer(Run(), 4, model=model) if world_size > 1 else reference_trainer(Run(), model=model)
    return outcome_of(trainer)


@pytest.mark.slow
def test_equals_one_process_where_models_differ_and_a_stage_is_frozen() -> None:
    (expected,) = run_ranks(different_on_each_rank, 1)
    assert_same_training(run_ranks(different_on_each_rank, WORLD), expected)


# ------------------------------------------------------------------------------------------ the same again
def trained_with_defaults(rank: int, world_size: int, folder: str, slower: bool) -> tuple[Outcome, list[Any]]:
    """Where it is slower, times that are measured are other ones."""
    gelu = torch.nn.functional.gelu
    if slower and rank == 0:
        torch.nn.functional.gelu = lambda *inputs, **options: (sum(range(2000)), gelu(*inputs, **options))[1]  # type: ignore
    run = Run(epochs=5, samples=48, accumulation=1).with_options(
        freeze_policy="schedule", freeze_schedule={1: 1, 3: 3}, learning_rate=1e-3
    )
    trainer = pipeline_trainer(run, 2, folder, with_dropout(run), activation_cache="on")
    # of different lengths, and each twice: the hits must not depend on how fast the cache was written
    trainer.train_dataset = [trainer.train_dataset[index // 2] for index in range(48)]
    outcome = outcome_of(trainer)
    keys = ("num_frozen_layers", "pipeline_parallel_size", "num_microbatches", "cache_layers_skipped")
    return outcome, [{k: entry[k] for k in keys if k in entry} for entry in trainer.state.log_history]


@pytest.mark.slow
def test_the_same_command_twice_gives_the_same_bit_for_bit(tmp_path: Path) -> None:
    """Two stages that become one with two replicas; layers freeze and are cached; with dropout.

    Only the cache's "auto" goes by measured times.
    """
    (one, said), *_ = run_ranks(trained_with_defaults, 2, str(tmp_path / "a"), False)
    (two, again), *_ = run_ranks(trained_with_defaults, 2, str(tmp_path / "b"), True)
    assert one.losses == two.losses and one.gradient_norms == two.gradient_norms
    assert all(torch.equal(one.weights[name], two.weights[name]) for name in one.weights)
    assert said == again and max(entry.get("cache_layers_skipped", 0) for entry in said) > 0
    assert {entry["pipeline_parallel_size"] for entry in said if "pipeline_parallel_size" in entry} == {1, 2}
