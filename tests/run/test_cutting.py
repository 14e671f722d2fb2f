"""What is found out before the first step, and when it is found out anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks
from torch.nn.functional import pad
from training_data import PadCollator
from training_runs import Run, pipeline_trainer

from hf_pipetransformer.run import cutting

RUN = Run("causal-lm", samples=64, per_device=8, accumulation=1).with_options(save_strategy="steps", save_steps=2)


class PadTo32(PadCollator):
    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().__call__(samples)
        filler = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {name: pad(value, (0, 32 - value.shape[1]), value=filler[name]) for name, value in batch.items()}


CHANGES = ("", "", "rows", "length", "checkpointing", "attention")


def resumed(rank: int, world_size: int, folder: str) -> list[bool]:
    """Whether the model's parts were timed: in a training, one that goes on with it, and ones with a change each."""
    timings: list[bool] = []
    time_parts = cutting._time_parts

    def noted(*arguments: Any) -> Any:
        timings[-1] = True
        return time_parts(*arguments)

    cutting._time_parts = noted
    for number, _ in enumerate(CHANGES):
        timings.append(False)
        changed = CHANGES[: number + 1]
        model = RUN.build_model()
        if "attention" in changed:
            model.set_attn_implementation("eager")
        run = replace(RUN, per_device=RUN.per_device // 2) if "rows" in changed else RUN
        run = run.with_options(max_steps=2 + number, save_steps=1, gradient_checkpointing="checkpointing" in changed)
        trainer = pipeline_trainer(run, 2, folder, model)
        if "length" in changed:
            trainer.data_collator = PadTo32("causal-lm")
        trainer.train(resume_from_checkpoint=number > 0)
    return timings


@pytest.mark.slow
def test_times_of_another_job_are_not_taken_over(tmp_path: Path) -> None:
    assert run_ranks(resumed, 2, str(tmp_path)) == [[True, False, True, True, True, True]] * 2
