"""Log lines of this package: they appear where those of transformers do, and once for all processes.

    script          set_verbosity_info(), log_level="info", TRANSFORMERS_VERBOSITY=info, add_handler(...)
    transformers    ── handlers, level
    this package       └ hf_pipetransformer ── console, hf_pipetransformer.parts.records.run_log, ...

A script that uses the Trainer configures the logger of transformers, and often no other one. So the package's logger
is a child of it: it has its level (unless it is given one of its own) and its handlers. The console handler takes the
place of the one that transformers prints with, which would put its own name before each line and write into progress
bars. What a training does is told at transformers' default level as well (`log_on_main`).
"""

from __future__ import annotations

import logging
import sys

import torch.distributed as dist
from tqdm.auto import tqdm
from transformers import TrainingArguments
from transformers.utils import logging as transformers_logging

NAME = "hf_pipetransformer"


class _Console(logging.Handler):
    """Prints the package's lines, above progress bars, wherever transformers' own handler would print them."""

    def __init__(self, stock: logging.Handler, parent: logging.Logger) -> None:
        super().__init__()
        self._stock, self._parent = stock, parent
        self.setFormatter(logging.Formatter(f"[{NAME}] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if self._stock not in self._parent.handlers or record.levelno < self._stock.level:
            return
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:  # nobody reads it any more: a line of the log must not end a training
            self.handleError(record)


def _is_not_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] != NAME


def follow_transformers() -> None:
    """Make this package's logger a child of that of transformers. It may be called any number of times."""
    logger = logging.getLogger(NAME)
    parent = logging.getLogger(transformers_logging.get_logger().name)
    if logger.parent is parent:
        return
    logger.parent = parent
    stock = next((handler for handler in parent.handlers if type(handler) is logging.StreamHandler), None)
    if stock is not None:
        stock.addFilter(_is_not_ours)
        logger.addHandler(_Console(stock, parent))


def log_on_main(logger: logging.Logger, args: TrainingArguments, text: object, level: int = logging.INFO) -> None:
    """Log what a training does, on the main process. Level INFO is shown by default.

    It is hidden if the script asks for less than the default: by `log_level`, by the verbosity of transformers, or by
    a level of the package's own logger.

    Args:
        logger: of the module.
        args: the training arguments.
        text: the line.
        level: such as `logging.WARNING`.
    """
    if args.process_index != 0:
        return
    if level != logging.INFO or logger.isEnabledFor(level):
        logger.log(level, "%s", text, stacklevel=2)
        return
    is_default = args.log_level == "passive" and logging.getLogger(NAME).level == logging.NOTSET
    is_disabled = logger.manager.disable >= logging.INFO
    if is_default and not is_disabled and logger.getEffectiveLevel() == logging.WARNING:
        logger.handle(logger.makeRecord(logger.name, level, __file__, 0, text, (), None))


def log_once(logger: logging.Logger, level: int, message: str, *values: object) -> None:
    """Log what all processes have found alike: on the first process; on the others one level lower.

    So `log_level_replica` still shows what the others have to say.

    Args:
        logger: of the module.
        level: on the first process, such as `logging.WARNING`.
        message: as for `logging.Logger.log`.
        values: likewise.
    """
    is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    logger.log(level if is_first else level - 10, message, *values, stacklevel=2)
