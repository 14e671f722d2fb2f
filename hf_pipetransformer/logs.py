"""Log lines of this package: they appear where those of transformers do, and once for all processes.

    script          set_verbosity_info(), log_level="info", TRANSFORMERS_VERBOSITY=info, add_handler(...)
    transformers    ── handlers, level
    this package       └ hf_pipetransformer ── hf_pipetransformer.run.run_log, ...

A script that uses the Trainer configures the logger of transformers, and often no other one. So the package's logger
is a child of it: it has its level (unless it is given one of its own) and its handlers. What transformers prints once
is printed once here, too, whatever `logging.basicConfig` has set up.
"""

from __future__ import annotations

import logging

import torch.distributed as dist
from transformers.utils import logging as transformers_logging

NAME = "hf_pipetransformer"


class _Named(logging.Handler):
    """Prepends the package's name, because the default format of transformers begins each line with its own name."""

    def emit(self, record: logging.LogRecord) -> None:
        record.msg = f"{NAME}: {record.msg}"


def follow_transformers() -> None:
    """Make this package's logger a child of that of transformers. It may be called any number of times."""
    logger = logging.getLogger(NAME)
    parent = logging.getLogger(transformers_logging.get_logger().name)
    if logger.parent is parent:
        return
    logger.parent = parent
    logger.addHandler(_Named())


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
