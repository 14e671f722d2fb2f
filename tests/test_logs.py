"""Log lines of the package appear where those of transformers do, once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from transformers.utils import logging as transformers_logging

from hf_pipetransformer.logs import follow_transformers, tell

logger = logging.getLogger("hf_pipetransformer.some.module")


class Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a script prints that has called `logging.basicConfig` and uses transformers' own handler."""
    follow_transformers()
    monkeypatch.setattr(logging.getLogger("hf_pipetransformer"), "level", logging.NOTSET)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_propagation()
    handler = Lines([])
    transformers_logging.add_handler(handler)
    logging.getLogger().addHandler(handler)
    yield handler.lines
    logging.getLogger().removeHandler(handler)
    transformers_logging.remove_handler(handler)
    transformers_logging.set_verbosity(verbosity)


def test_the_verbosity_of_transformers_holds_unless_there_is_a_level_of_its_own(
    lines: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers_logging.set_verbosity_info()
    logger.info("a line with %d number", 1)
    transformers_logging.set_verbosity_error()
    logger.warning("not shown")
    assert lines == ["a line with 1 number"]  # once, although the root logger has a handler too
    assert capsys.readouterr().err.splitlines().count("[hf_pipetransformer] a line with 1 number") == 1
    logging.getLogger("hf_pipetransformer").setLevel(logging.INFO)
    logger.info("shown")
    assert lines[1:] == ["shown"]

    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Closed())
    logger.info("a line that nobody reads any more, as behind `| head`, ends nothing")


@pytest.mark.parametrize(
    ("verbosity", "own", "log_level", "rank", "is_told"),
    [
        (logging.WARNING, logging.NOTSET, "passive", 0, True),  # all defaults
        (logging.WARNING, logging.NOTSET, "passive", 1, False),
        (logging.WARNING, logging.NOTSET, "warning", 0, False),
        (logging.ERROR, logging.NOTSET, "passive", 0, False),  # TRANSFORMERS_VERBOSITY=error
        (logging.ERROR, logging.INFO, "passive", 0, True),
    ],
)
def test_what_a_training_does_is_told_by_default(
    lines: list[str], verbosity: int, own: int, log_level: str, rank: int, is_told: bool
) -> None:
    transformers_logging.set_verbosity(verbosity)
    logging.getLogger("hf_pipetransformer").setLevel(own)
    tell(logger, SimpleNamespace(process_index=rank, log_level=log_level), "a plan")  # type: ignore[arg-type]
    assert lines == ["a plan"] * is_told
