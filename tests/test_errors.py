"""The interpreter's output for an error that ends the program."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hf_pipetransformer import PipeTransformerTrainingArguments, errors
from hf_pipetransformer.errors import PeerFailedError


def mistake() -> None:
    PipeTransformerTrainingArguments("x", watchdog_timeout=-1)


def peer() -> None:
    raise PeerFailedError("rank 0 failed")


def own() -> None:
    """A user's function that fails is called by torch's stage and the trainer."""
    names: dict[str, object] = {"__name__": "hf_pipetransformer.run.steps", "fail": fail}
    exec("def step():\n    fail()\nstep()", names)


def fail() -> None:
    raise KeyError("own")


MISTAKE = "ValueError: watchdog_timeout=-1 is invalid. Set it to between 1 and "


@pytest.fixture(autouse=True)
def _python_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(errors, "_shows_briefly", False)
    for variable in ("TRANSFORMERS_VERBOSITY", errors.SHOWS_ALL, errors.ERROR_FILE):
        monkeypatch.delenv(variable, raising=False)
    errors.show_errors_briefly()
    errors.show_errors_briefly()


def show(raising: Callable[[], None]) -> None:
    try:
        raising()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)


@pytest.mark.parametrize(
    ("raising", "rank", "functions", "end"),
    [
        (mistake, 0, ["mistake"], MISTAKE),
        (mistake, 1, None, f"[rank 1] {MISTAKE}"),
        (peer, 1, None, "[rank 1] rank 0 failed"),
        (own, 1, ["show", "own", "fail"], "KeyError: 'own'"),
    ],
)
def test_what_the_interpreter_shows(
    raising: Callable[[], None],
    rank: int,
    functions: list[str] | None,
    end: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A mistake shows the user's line, and one line on other processes; a user's own error all lines except ours."""
    monkeypatch.setenv("RANK", str(rank))
    show(raising)
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1].startswith(end), shown
    files = [line for line in shown if line.startswith("  File ")]
    assert all(f'"{__file__}"' in file for file in files)
    assert [file.rpartition(" in ")[2] for file in files] == (functions or [])
    assert raising is own or len(shown) == 1 + len(files)


@pytest.mark.parametrize(("variable", "value"), [("TRANSFORMERS_VERBOSITY", "debug"), (errors.SHOWS_ALL, "1")])
def test_complete_tracebacks(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    show(mistake)
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown and "training_args.py" in shown


def test_torchruns_summary_ends_with_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 shows it, too, unless torchrun has ended it before; so the others need not."""
    failures = {}
    for rank in range(2):
        path = tmp_path / f"{rank}.json"
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv(errors.ERROR_FILE, str(path))
        monkeypatch.setenv(errors.WORKER, f"{os.getpid()} {path}")
        show(mistake)
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=str(path))
        assert (MISTAKE in capsys.readouterr().err) == (rank == 0)
    assert str(ChildFailedError("train.py", failures)).count(f"traceback : {MISTAKE}") == 2
    path.write_text("of torch's own `record`")
    show(mistake)
    assert path.read_text() == "of torch's own `record`"
    path.unlink()
    monkeypatch.setenv(errors.WORKER, f"{os.getppid()} {path}")  # of a process that a rank has started
    capsys.readouterr()
    show(mistake)
    assert not path.exists() and MISTAKE in capsys.readouterr().err
