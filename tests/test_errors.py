"""What the interpreter shows of an error that ends the program."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

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


@pytest.mark.parametrize(
    ("raising", "rank", "functions", "end"),
    [
        (mistake, 0, ["mistake"], "ValueError: watchdog_timeout=-1 is invalid. Set it to between 1 and "),
        (peer, 1, None, "[rank 1] rank 0 failed"),
        (own, 1, ["own", "fail"], "KeyError: 'own'"),
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
    """Of a mistake the user's own lines, and one line on other processes; of a user's error all lines but ours."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(errors, "_shows_briefly", False)
    errors.show_errors_briefly()
    errors.show_errors_briefly()
    monkeypatch.setenv("RANK", str(rank))
    try:
        raising()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1].startswith(end) and (functions or len(shown) == 1), shown
    files = [line for line in shown if line.startswith("  File ")]
    assert all(f'"{__file__}"' in file for file in files)
    names = [file.rpartition(" in ")[2] for file in files]
    assert names == (["test_what_the_interpreter_shows", *functions] if functions else [])
