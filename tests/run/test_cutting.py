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


def resumed(rank: int, world_size: int, folder: str, change: str) -> list[bool]:
    """Whether the model's parts were timed: in a training, in one that goes on with it, in one with a change."""
    timings: list[bool] = []
    time_parts = cutting._time_parts

    def noted(*arguments: Any) -> Any:
        timings[-1] = True
        return time_parts(*arguments)

    cutting._time_parts = noted
    for steps, is_changed in ((2, False), (3, False), (4, True)):
        timings.append(False)
        options: dict[str, Any] = {"max_steps": steps}
        if is_changed and change == "checkpointing":
            options["gradient_checkpointing"] = True
        model = RUN.build_model()
        if is_changed and change == "attention":
            model.set_attn_implementation("eager")
        run = replace(RUN, per_device=RUN.per_device // 2) if is_changed and change == "rows" else RUN
        trainer = pipeline_trainer(run.with_options(**options), 2, folder, model)
        if is_changed and change == "length":
            trainer.data_collator = PadTo32("causal-lm")
        trainer.train(resume_from_checkpoint=steps > 2)
    return timings


@pytest.mark.slow
@pytest.mark.parametrize("change", ("rows", "length", "checkpointing", "attention"))
def test_times_of_another_job_are_not_taken_over(change: str, tmp_path: Path) -> None:
    assert run_ranks(resumed, 2, str(tmp_path), change) == [[True, False, True]] * 2
