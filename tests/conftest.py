"""What holds for every test: no network, one thread, quiet libraries, a fixed seed, an empty working directory."""

import os

# Before torch and transformers are imported: they read these once. Ranks of distributed tests inherit them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_VERBOSITY="error",
    OMP_NUM_THREADS="1",
    RES_OPTIONS="timeout:1 attempts:1",  # torch's stores look up the names of their peers, and need no answer
    WANDB_DISABLED="true",
)

import json
import random
import socket

import numpy
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed():
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _empty_working_directory(tmp_path, monkeypatch):
    """Whatever a test writes under a relative path ("trainer_output") is gone with its temporary directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def free_port():
    """A port for a launcher that cannot be told to choose one itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def _no_distributed_state():
    """Accelerate keeps its state in class attributes; one test's must not reach the next."""
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def pytest_terminal_summary(terminalreporter):
    """A table of the faults that were put into trainings."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    rows = [
        json.loads(value)
        for report in reports
        for name, value in getattr(report, "user_properties", [])
        if name == "fault" and report.when == "call"
    ]
    if not rows:
        return
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    terminalreporter.section(f"{len(rows)} faults")
    for line in lines:
        terminalreporter.line("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)))
