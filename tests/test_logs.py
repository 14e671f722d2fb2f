"""Log lines of the package appear where those of transformers do, once."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from hf_pipetransformer.logs import follow_transformers, log_once

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
    assert lines == ["hf_pipetransformer: a line with 1 number"]  # once, although the root logger has a handler too


def test_a_level_of_its_own_comes_first(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    transformers_logging.set_verbosity_error()
    logging.getLogger("hf_pipetransformer").setLevel(logging.INFO)
    logger.info("shown")
    assert lines == ["hf_pipetransformer: shown"]


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
