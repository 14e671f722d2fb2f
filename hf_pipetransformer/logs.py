"""Log lines of this package: they appear with transformers' lines, and once for all processes.

    script          set_verbosity_info(), log_level="info", TRANSFORMERS_VERBOSITY=info, add_handler(...)
    transformers    ── handlers, level
    this package       └ hf_pipetransformer ── console, hf_pipetransformer.parts.records.run_log, ...

A script that uses the Trainer configures the logger of transformers, and often no other logger. So the package's
logger is a child of transformers' logger and inherits its level (unless it has its own) and its handlers. The console
handler replaces transformers' own, which would put its name before each line and write into progress bars.
`log_on_main` logs the events of a training at transformers' default level, too.
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
    """Prints the package's lines above progress bars, if transformers' own handler would print them."""

    def __init__(self, stock: logging.Handler, parent: logging.Logger) -> None:
        super().__init__()
        self._stock, self._parent = stock, parent
        self.setFormatter(logging.Formatter(f"[{NAME}] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if self._stock not in self._parent.handlers or record.levelno < self._stock.level:
            return
        try:
            tqdm.write(self.format(record), file=sys.stderr)
        except Exception:  # stderr may be closed: a line of the log must not end a training
            self.handleError(record)


def _is_not_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] != NAME


def follow_transformers() -> None:
    """Make this package's logger a child of transformers' logger. It may be called repeatedly."""
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
    """Log an event of a training, on the main process. Level INFO is shown by default.

    The line is hidden if the script reduces the default: by `log_level`, by the verbosity of transformers, or by a
    level of the package's own logger.

    Args:
        logger: the module's logger.
        args: the training arguments.
        text: the line.
        level: level of the line, such as `logging.WARNING`.
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
    """Log an event that all processes share: on the first process; on the others one level lower.

    `log_level_replica` can still show the other processes' lines.

    Args:
        logger: the module's logger.
        level: level on the first process, such as `logging.WARNING`.
        message: as for `logging.Logger.log`.
        values: arguments of the message.
    """
    is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    logger.log(level if is_first else level - 10, message, *values, stacklevel=2)
