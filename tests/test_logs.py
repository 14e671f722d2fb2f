"""Log lines of the package appear once, in the same places as transformers' lines."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from transformers.utils import logging as transformers_logging

from hf_pipetransformer.logs import follow_transformers, log_on_main

logger = logging.getLogger("hf_pipetransformer.some.module")


class Closed:
    def write(self, text: str) -> None:
        raise BrokenPipeError


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """The package's logger without a level of its own, in a script that has not touched transformers' logger."""
    follow_transformers()
    own = logging.getLogger("hf_pipetransformer")
    monkeypatch.setattr(own, "level", logging.NOTSET)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", False)
    verbosity = transformers_logging.get_verbosity()
    yield own
    transformers_logging.set_verbosity(verbosity)


def test_the_verbosity_of_transformers_holds_unless_there_is_a_level_of_its_own(
    own: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers_logging.set_verbosity_info()
    logger.info("a line with %d number", 1)
    transformers_logging.set_verbosity_error()
    logger.warning("not shown")
    own.setLevel(logging.INFO)
    logger.info("shown")
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["[hf_pipetransformer] a line with 1 number", "[hf_pipetransformer] shown"]
    monkeypatch.setattr("sys.stderr", Closed())
    logger.info("a line that nobody reads any more, as behind `| head`, ends nothing")


def test_what_a_training_does_is_told_by_default(own: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    for verbosity, level, log_level, rank, is_told in (
        (logging.WARNING, logging.NOTSET, "passive", 0, True),  # all defaults
        (logging.WARNING, logging.NOTSET, "passive", 1, False),
        (logging.WARNING, logging.NOTSET, "warning", 0, False),
        (logging.ERROR, logging.NOTSET, "passive", 0, False),  # TRANSFORMERS_VERBOSITY=error
        (logging.ERROR, logging.INFO, "passive", 0, True),
    ):
        transformers_logging.set_verbosity(verbosity)
        own.setLevel(level)
        log_on_main(logger, SimpleNamespace(process_index=rank, log_level=log_level), "a plan")  # type: ignore[arg-type]
        assert capsys.readouterr().err == "[hf_pipetransformer] a plan\n" * is_told
