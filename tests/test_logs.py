"""Log lines of the package appear where those of transformers do, once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from hf_pipetransformer.logs import follow_transformers, log_once, tell

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


def test_the_verbosity_of_transformers_holds_for_the_package(lines: list[str]) -> None:
    transformers_logging.set_verbosity_info()
    logger.info("a line with %d number", 1)
    transformers_logging.set_verbosity_error()
    logger.warning("not shown")
    assert lines == ["a line with 1 number"]  # once, although the root logger has a handler too


def test_a_level_of_its_own_comes_first(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    transformers_logging.set_verbosity_error()
    logging.getLogger("hf_pipetransformer").setLevel(logging.INFO)
    logger.info("shown")
    assert lines == ["shown"]


def test_the_console_prints_no_foreign_prefix(lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    transformers_logging.set_verbosity_warning()
    logger.warning("once")
    assert capsys.readouterr().err.splitlines().count("[hf_pipetransformer] once") == 1
    transformers_logging.disable_default_handler()
    try:
        logger.warning("not printed")
    finally:
        transformers_logging.enable_default_handler()
    assert capsys.readouterr().err == "" and lines == ["once", "not printed"]


@pytest.mark.parametrize(
    ("verbosity", "own", "log_level", "rank", "is_told"),
    [
        (logging.WARNING, logging.NOTSET, "passive", 0, True),  # all defaults
        (logging.WARNING, logging.NOTSET, "passive", 1, False),
        (logging.WARNING, logging.NOTSET, "warning", 0, False),
        (logging.INFO, logging.NOTSET, "info", 0, True),
        (logging.ERROR, logging.NOTSET, "passive", 0, False),  # TRANSFORMERS_VERBOSITY=error
        (logging.ERROR, logging.NOTSET, "error", 0, False),
        (logging.WARNING, logging.WARNING, "passive", 0, False),
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


def test_logging_can_be_disabled(lines: list[str]) -> None:
    logging.disable(logging.INFO)
    try:
        tell(logger, SimpleNamespace(process_index=0, log_level="passive"), "a plan")  # type: ignore[arg-type]
    finally:
        logging.disable(logging.NOTSET)
    assert lines == []


@pytest.mark.parametrize(("rank", "shown"), [(0, 1), (1, 0)])
def test_what_all_would_say_the_first_says(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, rank: int, shown: int
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    transformers_logging.set_verbosity_warning()  # `log_level_replica`, by default
    log_once(logger, logging.WARNING, "found by all")
    assert len(lines) == shown
    transformers_logging.set_verbosity_info()
    log_once(logger, logging.WARNING, "found by all")
    assert len(lines) == shown + 1


def test_a_line_that_nobody_reads_any_more_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind `| head`."""

    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    follow_transformers()
    monkeypatch.setattr("sys.stderr", Closed())
    logging.getLogger("hf_pipetransformer").setLevel(logging.INFO)
    logger.info("a line")
