"""What of an error reaches the others in a line, and what the interpreter shows of one that ends the program."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from hf_pipetransformer import PipeTransformerTrainingArguments, errors
from hf_pipetransformer.errors import (
    PeerFailedError,
    calling_code,
    chain_of,
    in_one_line,
    users_error,
)
from hf_pipetransformer.resilience.progress import doing_when


def wrapped(error: Exception, text: str = "\n [Stage 1] failed to run forward:\n args: ()") -> RuntimeError:
    """As torch's pipeline stage does."""
    try:
        raise RuntimeError(text) from error
    except RuntimeError as outer:
        return outer


def test_what_torchs_stage_wraps_is_the_users() -> None:
    own = KeyError("weights")
    assert users_error(wrapped(wrapped(own))) is own
    other = wrapped(own, "a message of the user's")
    assert users_error(other) is other
    assert in_one_line(wrapped(own)) == "KeyError: 'weights'"


def test_an_error_that_is_the_cause_of_its_context_ends_the_search() -> None:
    """Who raises an error's own cause in its place makes a ring of the two."""
    inner, outer = ValueError("inner"), RuntimeError("outer")
    outer.__cause__, inner.__context__ = inner, outer
    assert list(chain_of(inner)) == [inner, outer]
    doing_when(inner)


class Callback:
    def on_step_end(self) -> str:
        return calling_code()


def test_the_users_code_is_named() -> None:
    assert Callback().on_step_end() == " in Callback.on_step_end"
    assert calling_code() == " in test_the_users_code_is_named"


def mistake() -> None:
    PipeTransformerTrainingArguments("x", watchdog_timeout=-1)


def peer() -> None:
    raise PeerFailedError("rank 0 failed")


def own() -> None:
    raise_through_ours()


def raise_through_ours() -> None:
    """A user's function that fails is called by torch's stage and the trainer."""
    names = {"__name__": "hf_pipetransformer.run.steps", "fail": fail}
    exec("def step():\n    fail()\n", names)
    names["step"]()


def fail() -> None:
    raise KeyError("own")


MISTAKE = "ValueError: watchdog_timeout=-1 is invalid. Set it to between 1 and "


@pytest.mark.parametrize(
    ("raising", "rank", "functions", "end"),
    [
        (mistake, 0, ["mistake"], MISTAKE),
        (mistake, 1, None, f"[rank 1] {MISTAKE}"),
        (peer, 1, None, "[rank 1] rank 0 failed"),
        (own, 1, ["own", "raise_through_ours", "fail"], "KeyError: 'own'"),
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
    assert shown[-1].startswith(end), shown
    files = [line for line in shown if line.startswith("  File ")]
    if functions is None:
        assert len(shown) == 1
    else:
        assert all(f'"{__file__}"' in file for file in files)
        assert [file.rpartition(" in ")[2] for file in files] == ["test_what_the_interpreter_shows", *functions]


def test_an_error_that_another_process_shows_is_not_shown_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(errors, "_shows_briefly", False)
    errors.show_errors_briefly()
    error = KeyError("own")
    setattr(error, errors.ONE_LINE, "")
    sys.excepthook(KeyError, error, None)
    assert capsys.readouterr().err == ""
