"""Trainings that freeze the same weights from the start share a store: the second one reads from its first step."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cached_runs import trainer_of
from distributed import run_ranks
from one_job import run_each
from training_runs import Outcome, Run, assert_same_training, outcome_of, pipeline_trainer, when_it_ends
from transformers import TrainerCallback, hyperparameter_search, integrations
from transformers.trainer_utils import BestRun, HPSearchBackend

from hf_pipetransformer import PipeTransformerTrainer
from hf_pipetransformer.parts.prefix_cache.cache import writing
from hf_pipetransformer.parts.prefix_cache.cache.cache_counts import CacheCounts
from hf_pipetransformer.parts.prefix_cache.cache_control import AutoCache

RUN = Run(epochs=1, samples=48)
FROM_THE_START = {0: 2}


def counted(trainer: PipeTransformerTrainer) -> list[tuple[CacheCounts, int]]:
    """When the last step of each training is done: what this process's cache has counted, and the cached layers."""
    found: list[tuple[CacheCounts, int]] = []

    def look(cache: AutoCache | None) -> None:
        assert trainer.pipeline is not None
        if cache is not None:
            found.append((cache.cache.counts, trainer.pipeline.current_layout.num_cached_layers))

    when_it_ends(trainer, look)
    return found


def sharing(
    rank: int, world_size: int, run: Run, stages: int, folder: str
) -> tuple[Outcome, list[tuple[CacheCounts, int]]]:
    mode = run.options["activation_cache"]
    trainer = trainer_of(run, {0: stages, 2: stages}, FROM_THE_START, folder, activation_cache=mode)
    if "seed" in run.options:  # frozen layers run without dropout, and below the head
        trainer.model.config.update({"hidden_dropout_prob": 0.3, "id2label": {0: "a", 1: "b"}})
    counts = counted(trainer)
    return outcome_of(trainer), counts


def adapted(
    rank: int, world_size: int, run: Run, stages: int, folder: str
) -> tuple[Outcome, list[tuple[CacheCounts, int]]]:
    """LoRA on the upper two of four layers, over the lower two."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=4, lora_dropout=0.0, target_modules=["query", "value"], layers_to_transform=[2, 3]
    )
    torch.manual_seed(run.options.get("seed", 0))  # another trial's adapters
    model = peft.get_peft_model(run.build_model(), config).train()
    writing.PENDING_BATCHES = 1000
    freezing = {"freeze_policy": "schedule", "freeze_schedule": FROM_THE_START}
    trainer = pipeline_trainer(run, stages, folder, model=model, **freezing)
    counts = counted(trainer)
    return outcome_of(trainer), counts


@pytest.mark.slow
@pytest.mark.parametrize("train", [sharing, adapted], ids=["head", "adapters"])
def test_a_second_trial_reads_from_its_first_step(train: Any, tmp_path: Path) -> None:
    """Seed, rate and dropout differ. The first trial stores outputs, although it has a single epoch."""
    shared = {"activation_cache_dir": str(tmp_path / "cache"), "activation_cache": "on"}
    other = RUN.with_options(seed=3, learning_rate=1e-3)
    cases = {
        "first": (RUN.with_options(**shared), 2, str(tmp_path / "a")),
        "second": (other.with_options(**shared), 2, str(tmp_path / "b")),
        "uncached": (other.with_options(activation_cache="off"), 2, str(tmp_path / "c")),
    }
    first, second, uncached = run_each(train, 2, cases).values()
    assert sum(counts.hits for _, [(counts, _)] in first) == 0
    _, [(of_first_stage, cached)] = second[-1]
    assert of_first_stage.rows > 0 and of_first_stage.hits == of_first_stage.rows
    assert sum(counts.stored for _, [(counts, _)] in second) == 0
    assert cached == 2  # they count as cached: the stages are balanced without them
    assert_same_training([outcome for outcome, _ in second], uncached[0][0])


class Trials:
    """A search over given trials. It has the name of a backend with dictionaries as trials."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Any], float, int]] = []

    def ensure_available(self) -> None:
        """It is."""

    def run(self, trainer: Any, n_trials: int, direction: str, trials: list[dict[str, Any]]) -> BestRun:
        for number, trial in enumerate(trials):
            trainer.train(trial=trial)
            assert trainer.args.learning_rate == trial["learning_rate"]
            self.seen.append((trial, trainer.state.log_history[-1]["train_loss"], number))
        return BestRun("0", 0.0, trials[0])


def searching(folder: str, **options: Any) -> tuple[PipeTransformerTrainer, Trials]:
    """A trainer with a search over given trials."""
    search = Trials()
    hyperparameter_search.ALL_HYPERPARAMETER_SEARCH_BACKENDS[HPSearchBackend.WANDB] = lambda: search
    integrations.hp_params = dict  # the stock one knows a dictionary only where its backend is installed
    sys.modules["wandb"] = SimpleNamespace(run=SimpleNamespace(id="0"))  # names the folder of a trial
    made = pipeline_trainer(RUN, 1, folder, **options)
    trainer = PipeTransformerTrainer(
        args=made.args,
        train_dataset=made.train_dataset,
        data_collator=made.data_collator,
        model_init=RUN.build_model,
    )
    return trainer, search


def parts_of_trials(rank: int, world_size: int, folder: str, trials: list[dict[str, Any]]) -> list[set[str]]:
    trainer, _ = searching(folder)
    found: list[set[str]] = []

    class Looks(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            assert trainer._pipeline_run is not None
            names = ("freezing", "prefix_cache", "front")
            found.append({name for name in names if trainer._pipeline_run.parts.get(name) is not None})

    trainer.add_callback(Looks())
    trainer.hyperparameter_search(
        hp_space=lambda trial: trial, n_trials=len(trials), backend="wandb", compute_objective=sum, trials=trials
    )
    return found


def test_a_training_has_the_parts_that_its_trial_asks_for(tmp_path: Path) -> None:
    policy = {"learning_rate": 1e-3, "freeze_policy": "alpha", "activation_cache": "auto"}
    trials = [policy, {**policy, "activation_cache": "off"}, {**policy, "freeze_policy": "none"}]
    (found,) = run_ranks(parts_of_trials, 1, str(tmp_path / "out"), trials)
    assert found == [{"freezing", "prefix_cache"}, {"freezing"}, {"front"}]


def searched(rank: int, world_size: int, folder: str, trials: list[dict[str, Any]]) -> list[tuple[int, int]]:
    writing.PENDING_BATCHES = 1000
    trainer, search = searching(folder, freeze_policy="schedule", freeze_schedule=FROM_THE_START)
    trainer.args.activation_cache = "on"
    counts = counted(trainer)
    trainer.hyperparameter_search(
        hp_space=lambda trial: trial, n_trials=len(trials), backend="wandb", compute_objective=sum, trials=trials
    )
    assert trainer.hp_search_backend is None and len(search.seen) == len(trials)
    return [(count.rows, count.hits) for count, _ in counts]


@pytest.mark.slow
def test_the_trials_of_a_search_share_the_default_store(tmp_path: Path) -> None:
    """The third one freezes other layers, as the trial says, so it computes its samples."""
    trials = [{"learning_rate": 1e-3}, {"learning_rate": 2e-3}, {"learning_rate": 2e-3, "freeze_schedule": {0: 3}}]
    (found,) = run_ranks(searched, 1, str(tmp_path / "out"), trials)
    assert found == [(48, 0), (48, 48), (48, 0)]
    assert not list(tmp_path.glob("out/_hf_pipetransformer_run_cache"))


def searched_in_vain(rank: int, world_size: int, folder: str) -> None:
    with pytest.raises(ValueError, match="layers"):
        searched(rank, world_size, folder, [{"learning_rate": 1e-3}, {"freeze_schedule": {0: 99}}])


@pytest.mark.slow
def test_a_search_that_fails_leaves_no_store(tmp_path: Path) -> None:
    run_ranks(searched_in_vain, 2, str(tmp_path / "out"))
    assert not list(tmp_path.glob("out/_hf_pipetransformer_run_cache"))
