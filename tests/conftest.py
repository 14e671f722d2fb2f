"""Settings of every test: no network, one thread, quiet libraries, a fixed seed, an empty working directory."""

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

import gc
import json
import logging
import random
import socket
import statistics
import zlib
from types import SimpleNamespace

import numpy
import pytest
import pytest_timeout
import torch
from distributed import patient, slowness

torch.set_num_threads(1)
gc.disable()  # until all tests are imported: imports leave no garbage


def pytest_addoption(parser):
    parser.addoption(
        "--share",
        metavar="I/N",
        help="of the tests with the marker slow, run share I (counted from 0) of N",
    )


def _in_share(item, share, shares):
    """Whether a test is in a share of the slow tests. Those of one function are spread over the shares."""
    return item.get_closest_marker("slow") is None or zlib.crc32(item.nodeid.encode()) % shares == share


def pytest_collection_modifyitems(config, items):
    """Tests that may take the longest come first: at the end one of them would run alone, beside idle workers."""
    if chosen := config.getoption("share"):
        share, shares = map(int, chosen.split("/"))
        assert 0 <= share < shares, f"--share {chosen}: shares are counted from 0"
        left_out = [item for item in items if not _in_share(item, share, shares)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _in_share(item, share, shares)]
    items.sort(key=lambda item: -max((mark.args[0] for mark in item.iter_markers("timeout")), default=0))


def pytest_timeout_set_timer(item, settings):
    """On a busy machine a test may take longer, as its ranks may (`distributed`)."""
    return pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=patient(settings.timeout)))


def pytest_collection_finish():
    """Exclude the imported modules from garbage collections, which took up to half a second."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _fixed_seed():
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _heard_warnings():
    """`caplog` listens at the root logger, and transformers shows errors only (TRANSFORMERS_VERBOSITY)."""
    import hf_pipetransformer.logs

    hf_pipetransformer.logs.follow_transformers()
    logger, parent = logging.getLogger("hf_pipetransformer"), logging.getLogger("transformers")
    before = logger.level, parent.propagate
    logger.setLevel(logging.WARNING)
    parent.propagate = True
    yield
    logger.setLevel(before[0])
    parent.propagate = before[1]


@pytest.fixture(autouse=True)
def _empty_working_directory(tmp_path, monkeypatch):
    """Files under relative paths ("trainer_output") are removed with the test's temporary directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def free_port():
    """A port for a launcher that cannot be told to choose one itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def four_processes(monkeypatch):
    """Pretend a launcher of four processes, to our arguments only: transformers would wait for the others."""
    from hf_pipetransformer import training_args

    monkeypatch.setattr(training_args, "os", SimpleNamespace(environ={**os.environ, "WORLD_SIZE": "4"}))


@pytest.fixture(autouse=True)
def _no_distributed_state():
    """Accelerate keeps its state in class attributes; one test's must not reach the next."""
    yield
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


# ---------------------------------------------------------------------------------------------------------
# The summary of `make test-faults`, and its bounds for all faults together
# ---------------------------------------------------------------------------------------------------------

FEWEST_KILLS = 20
"""Minimum number of kills for the bounds to apply. A selection of the tests may have fewer."""
MOST_SECONDS_UNTIL_ENDED = 5.0
"""Median, from a kill to the end of the last peer: 3.2 were seen, two of them without a sign of life."""
MOST_SECONDS_UNTIL_ENDED_OF_20 = 10.0
"""The same without the slowest kill of twenty."""
MOST_SECONDS_AFTER_NOTICE = 10.0
"""The worst, from when a process that stands still is to be noticed to the end of the last peer."""
MOST_SECONDS_TO_RECOVER = 15.0
"""Median, from a kill to the first new step, without imports. The aim is 2 s with a core for each process.

Here eight processes share two cores, and 2.5 s were seen; 11 where other programs took most of these cores. What this
bound finds is an attempt that waits for something: a name server, a port, a timeout of 30 or 60 s.
"""


def _faults(config):
    """The tests' records of each fault."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = [report for reports in reporter.stats.values() for report in reports] if reporter is not None else []
    return [
        json.loads(value)
        for report in reports
        for key, value in getattr(report, "user_properties", [])
        if key == "fault" and report.when == "call"
    ]


def _times(config):
    """(what, seconds, bound) of all faults together; the bounds are a quiet machine's, and grow with the load."""
    faults = _faults(config)
    kills = [row for row in faults if row["fault"].startswith("kill")]
    ended = [row["seconds_until_all_ended"] for row in kills if "restarts" not in row]  # a launcher adds its own
    recovered = [row.get("without_imports", row["seconds_to_recover"]) for row in kills]
    told = [row["seconds_until_all_ended"] - row["seconds_to_notice"] for row in faults if "seconds_to_notice" in row]
    times = []
    if len(ended) >= FEWEST_KILLS:
        until_ended, until_step = "from a kill to the end of all", "from a kill to the first new step, without imports"
        most = statistics.quantiles(ended, n=20)[-1]
        times += [
            (f"median {until_ended}", statistics.median(ended), MOST_SECONDS_UNTIL_ENDED),
            (f"95th percentile {until_ended}", most, MOST_SECONDS_UNTIL_ENDED_OF_20),
            (f"median {until_step}", statistics.median(recovered), MOST_SECONDS_TO_RECOVER),
        ]
    if told:
        times.append(("worst from a stop or hang to the end of all, but for", max(told), MOST_SECONDS_AFTER_NOTICE))
    return [(what, seconds, bound * slowness()) for what, seconds, bound in times]


def pytest_sessionfinish(session):
    """The tests of a session may all pass, and yet be too slow together."""
    if any(seconds > bound for _, seconds, bound in _times(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    """The faults that were put into trainings, and what all of them took."""
    for fault in _faults(config):
        terminalreporter.line(json.dumps(fault))
    for what, seconds, bound in _times(config):
        verdict = "" if seconds <= bound else "  TOO SLOW"
        terminalreporter.line(f"{what}: {seconds:.2f} s (at most {bound:g} s){verdict}")
