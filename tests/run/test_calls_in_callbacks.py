"""The model called in a callback, on some processes only, while it is split: the others serve the call."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks_expecting_error
from one_job import run_each
from training_data import PadCollator, TrainingData
from training_runs import WORLD, Run, assert_same_training, outcome_of, pipeline_trainer
from transformers import TrainerCallback

EVENTS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_substep_end",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_prediction_step",
    "on_save",
    "on_epoch_end",
    "on_train_end",
)
RUN = Run(samples=64, accumulation=2, epochs=2).with_options(eval_strategy="epoch", use_cpu=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "1F1B": {},
    "frozen": {"freeze_policy": "schedule", "freeze_schedule": {1: 1}},
    "driven": {},
}


class Calls(TrainerCallback):
    """Calls the model on the processes in `callers`, at each event, as often as they are named."""

    def __init__(self, rank: int, callers: tuple[int, ...], events: tuple[str, ...] = EVENTS) -> None:
        self.found: dict[tuple[str, int], list[torch.Tensor]] = {}  # by event and step
        self._number = callers.count(rank)
        self._rows = PadCollator(RUN.kind)([TrainingData(RUN.kind, 5, seed=7)[row] for row in range(5)])
        for event in events:
            setattr(self, event, partial(self._call, event))

    def _call(self, event: str, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        key = event, state.global_step
        if key in self.found or not self._number:
            return
        self.found[key] = []
        was_training = model.training
        for _ in range(self._number):
            model.eval()
            with torch.no_grad():
                output = model(**self._rows)
                pooled = model.bert(input_ids=self._rows["input_ids"], return_dict=False)[1]
            model.train(was_training)
            self.found[key].append(torch.cat([output.logits.flatten(), output.loss[None], pooled.flatten()]))


class OwnLoss:
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def train(rank: int, world_size: int, folder: str, layout: str, callers: tuple[int, ...]) -> Any:
    run = replace(RUN, trainer=OwnLoss if layout == "driven" else None).with_options(**LAYOUTS[layout])
    run = replace(run, per_device=run.per_device * WORLD // world_size)
    trainer = pipeline_trainer(run, world_size, f"{folder}/{layout}-{world_size}", save_strategy="epoch")
    callback = Calls(rank, callers)
    trainer.add_callback(callback)
    return outcome_of(trainer), callback.found


CALLERS = {"1F1B": (0,), "frozen": (0, 1, 1), "driven": (1,)}


@pytest.mark.slow
def test_a_call_equals_one_process(tmp_path: Path) -> None:
    """A call on rank 0, on the last rank, and on all ranks, on each another number of times."""
    cases = {layout: (str(tmp_path), layout, CALLERS[layout]) for layout in LAYOUTS}
    everything = run_each(train, 2, cases, timeout=180)
    for layout, callers in CALLERS.items():
        expected, outputs = train(0, 1, str(tmp_path), layout, (0,))
        found = everything[layout]
        assert_same_training([outcome for outcome, _ in found], expected)
        for rank, (_, theirs) in enumerate(found):
            number = callers.count(rank)
            assert not number or theirs.keys() >= outputs.keys()
            for key in theirs.keys() & outputs.keys():  # layouts are logged as well
                assert len(theirs[key]) == number
                for output in theirs[key]:
                    torch.testing.assert_close(output, outputs[key][0], atol=1e-5, rtol=1e-4)


class Backward(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            model(**PadCollator(RUN.kind)([TrainingData(RUN.kind, 1)[0]])).loss.backward()


def backward(rank: int, world_size: int, folder: str) -> None:
    trainer = pipeline_trainer(Run(samples=16, per_device=2, accumulation=1, epochs=1), 2, folder)
    trainer.add_callback(Backward())
    trainer.train()


@pytest.mark.slow
def test_a_backward_is_refused(tmp_path: Path) -> None:
    error = run_ranks_expecting_error(backward, 2, str(tmp_path))[0]
    assert type(error) is ValueError and "in an earlier step or in a callback" in str(error)
