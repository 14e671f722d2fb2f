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
    WANDB_DISABLED="true",
)

import random

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


@pytest.fixture(autouse=True)
def _no_distributed_state():
    """Accelerate keeps its state in class attributes; one test's must not reach the next."""
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
