"""Distillation: wrong arguments are refused, and the teacher's logits are read from the second epoch on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("datasets")

import run_distillation


def test_user_errors() -> None:
    for wrong in ({"temperature": 0.0}, {"teacher_weight": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            run_distillation.DistillationArguments(generated_data=8, **wrong)


def test_the_teacher_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """48 sentences in batches of 8: in each epoch a batch is compared, and the first one was not stored in time."""
    caplog.set_level("INFO", "hf_pipetransformer")
    options = (
        f"--generated_data 48 --output_dir {tmp_path} --num_train_epochs 3 --do_train --do_eval --max_eval_samples 16"
        " --use_cpu --report_to none --save_strategy no --per_device_train_batch_size 8 --log_level info"
        " --config_overrides num_hidden_layers=2,hidden_size=32,intermediate_size=64"
    )
    results = run_distillation.main(options.split())
    assert results["train_loss"] > 0 and results["eval_accuracy"] >= 0
    assert "Frozen, and called by the loss: trainer.teacher. The output is stored in this epoch" in caplog.text
    (read,) = re.findall(r"The output of trainer.teacher was read for (\d+) of", caplog.text)
    assert 2 * (48 - 8) - 8 <= int(read) <= 2 * (48 - 8)
