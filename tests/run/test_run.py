"""Objects that live for one `train()`, and a trainer before, between and after its trainings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_job import run_calls
from training_runs import Outcome, Run, assert_same_training, outcome_of, pipeline_trainer, reference

from hf_pipetransformer.parts.records.files import METRICS
from hf_pipetransformer.parts.records.recorder import RunRecorder
from hf_pipetransformer.run.checkpoint_folders import MANIFEST, validate

RUN = Run(samples=40, epochs=1, per_device=4, accumulation=1)
ON_TWO = replace(RUN, per_device=8)


def asked_by_one(rank: int, world_size: int) -> Outcome:
    trainer = pipeline_trainer(ON_TWO, world_size)
    if rank == 0:  # alone, as scripts do that look at a batch or count steps
        assert next(iter(trainer.get_eval_dataloader()))["input_ids"].dim() == 2
        assert len(trainer.get_train_dataloader()) > 0
        next(iter(trainer.get_train_dataloader()))
    return outcome_of(trainer)


class AsksTwice:
    """Calls the stock method twice, and returns the loader of the second call."""

    def get_train_dataloader(self) -> Any:
        super().get_train_dataloader()  # type: ignore[misc]
        return super().get_train_dataloader()  # type: ignore[misc]


class MadeBefore:
    """Returns in `train()` the loader that was made before it."""

    loader: Any = None

    def get_train_dataloader(self) -> Any:
        if self.loader is None:
            self.loader = super().get_train_dataloader()  # type: ignore[misc]
        return self.loader


def with_own_loader(rank: int, world_size: int, mixin: type) -> Outcome:
    trainer = pipeline_trainer(replace(ON_TWO, trainer=mixin), world_size)
    if mixin is MadeBefore:
        trainer.get_train_dataloader()
    return outcome_of(trainer)


@pytest.mark.slow
def test_the_loop_may_read_another_loader_than_the_first_one() -> None:
    """A single process may have asked for the other loader."""
    calls = {mixin.__name__: (with_own_loader, mixin) for mixin in (AsksTwice, MadeBefore)}
    found = run_calls(2, {"alone": (asked_by_one,), **calls})
    assert_same_training([outcome for outcomes in found.values() for outcome in outcomes], reference(0, 1, RUN))


class ReturnsItsOwn:
    """Asks for the stock loader, and returns one of its own."""

    def get_train_dataloader(self) -> Any:
        super().get_train_dataloader()  # type: ignore[misc]
        return torch.utils.data.DataLoader(self.train_dataset, 8, collate_fn=self.data_collator)  # type: ignore[attr-defined]


def test_a_loader_that_does_not_read_our_batches_does_in_one_process_unless_layers_freeze(tmp_path: Path) -> None:
    run = replace(RUN, trainer=ReturnsItsOwn, per_device=8).with_options(remove_unused_columns=False)
    trainer = pipeline_trainer(run, 1, str(tmp_path), use_cpu=True)
    assert_same_training([outcome_of(trainer)], reference(0, 1, run))
    with pytest.raises(ValueError, match="reads from a different DataLoader"):
        pipeline_trainer(run, 1, str(tmp_path), use_cpu=True, freeze_policy="alpha").train()


def test_what_a_training_leaves_to_the_user(tmp_path: Path) -> None:
    """Handler and callbacks are as before; later log entries are recorded; a save by hand is atomic."""
    trainer = pipeline_trainer(RUN.with_options(max_steps=1), 1, str(tmp_path), use_cpu=True)
    handler: Any = trainer.callback_handler
    calls: list[str] = []
    call = handler.call_event

    def counting(event: str, *positional: Any, **keywords: Any) -> Any:
        calls.append(event)
        return call(event, *positional, **keywords)

    handler.call_event = counting
    before = list(handler.callbacks)
    trainer.train()
    assert handler.call_event is counting and "on_step_begin" in calls
    assert [c for c in handler.callbacks if not isinstance(c, RunRecorder)] == before
    trainer.log({"rouge": 0.5})
    assert '"rouge": 0.5' in (tmp_path / METRICS).read_text().splitlines()[-1]
    for _ in range(2):  # also where there is one of this step
        trainer._save_checkpoint(trainer.model, None)
        assert (tmp_path / "checkpoint-1" / MANIFEST).is_file() and validate(tmp_path / "checkpoint-1") is None
    trainer.train()
    assert sum(isinstance(c, RunRecorder) for c in handler.callbacks) == 1
