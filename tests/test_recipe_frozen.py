"""The recipe for what is frozen already: each kind is found, stored and read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from selection import slow

pytest.importorskip("datasets")

import run_frozen

SAMPLES, ROWS, EPOCHS = 24, 8, 3


@pytest.mark.parametrize("kind", ["head", *slow("speech", "image-text", "captioning")])
def test_what_is_frozen_is_read(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hf_pipetransformer")
    options = {
        "kind": kind,
        "generated_data": SAMPLES,
        "output_dir": tmp_path,
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": ROWS,
        "eval_frozen_modules": True,
        "activation_cache": "on",
        "report_to": "none",
        "save_strategy": "no",
        "log_level": "info",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    results = run_frozen.main([*arguments, "--do_train", "--use_cpu"])
    assert results["train_loss"] > 0
    read = re.search(r"was read for (\d+) of", caplog.text)
    assert read is not None and int(read[1]) == (EPOCHS - 1) * (SAMPLES - ROWS)  # a batch of each epoch is compared
