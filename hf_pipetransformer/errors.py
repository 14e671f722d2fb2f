"""Errors with a remedy in the message, and the display of errors that end the program.

user code has failed                 its traceback, on the process that failed
another process has failed           one line: `PeerFailedError`, or a process that failed in the same way
a deliberate `ValueError` of ours    the line of the user's script and the message on rank 0; on the others one line,
                                     or none if torchrun's summary shows the message
"""

from __future__ import annotations

import io
import json
import linecache
import os
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from types import FrameType, MethodType, TracebackType
from typing import Any

import torch

OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")
"""Parts of the messages of torch and its backends about missing memory, mostly in a plain `RuntimeError`."""


ONE_STAGE = "et pipeline_parallel_size=1"
"""Part of a remedy, after "S" or "s"."""
FREEZE_NOTHING = "reeze nothing (freeze_policy='none' and no LayerFreezeCallback)"
"""Replacement of `ONE_STAGE`, after "F" or "f", if there is only one stage: only freezing then needs layers."""


class UnsupportedModelError(ValueError):
    """Raised if the model cannot be run as a pipeline, or some of its layers cannot be frozen.

    The message names the model, the reason and the remedy.

    ```python
    try:
        trainer.train()
    except UnsupportedModelError as error:
        print(error.model_name, error.reason, error.remedy)
    ```
    """

    def __init__(self, model: object, reason: str, remedy: str, wanted: str = "trained as a pipeline") -> None:
        name = model if isinstance(model, str) else type(model).__name__
        super().__init__(f"{name} cannot be {wanted}: {reason} {remedy}")
        self.model_name = name
        self.reason = reason
        self.remedy = remedy
        self.wanted = wanted

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        # errors are sent between processes; the default would call __init__ with the complete message
        return type(self), (self.model_name, self.reason, self.remedy, self.wanted)

    def with_one_stage(self) -> UnsupportedModelError:
        """Return the error for a run that already has one stage. The remedy is then to disable freezing."""
        if ONE_STAGE not in self.remedy:
            return self
        remedy = self.remedy.replace(f"S{ONE_STAGE}", f"F{FREEZE_NOTHING}").replace(
            f"s{ONE_STAGE}", f"f{FREEZE_NOTHING}"
        )
        return UnsupportedModelError(self.model_name, self.reason, remedy, "trained with frozen layers")


class PeerFailedError(RuntimeError):
    """Raised if another process of the job died, failed or hangs.

    The message names the process, its phase and its step. The failure cannot be repaired inside the process: start the
    job again with `resume_from_checkpoint="last"`.
    """


LIBRARIES = ("hf_pipetransformer", "transformers", "accelerate", "torch")
"""Packages with frames that do not help a user to find a mistake in the arguments or the data."""
DRIVERS = (
    "hf_pipetransformer",
    "transformers.trainer",
    "transformers.trainer_callback",
    "torch.distributed.pipelining",
    "torch.nn.modules.module",
    "torch.nn.parallel",
)
"""Modules and packages that only call the failing code: the user's code, the model, or a loader."""
STAGE_FAILED = "failed to run forward"
"""Part of the message of the `RuntimeError` that replaces a model's error in torch's pipeline stages."""
IN_WORKER = "Original Traceback (most recent call last):"
"""Part of the message of an error in a data loader's worker. The last line of the message is the error itself."""
ONE_LINE = "_hf_pipetransformer_one_line"
"""Attribute of an error without traceback, because another process shows it: the line to show instead, or an empty
line if it was logged."""

SHOWS_ALL = "HF_PIPETRANSFORMER_FULL_TRACEBACK"
"""Environment variable that turns off the short display of errors."""
VERBOSE = ("info", "debug")
"""Values of the environment variable `TRANSFORMERS_VERBOSITY` that do the same."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the path of the error file that torchrun reads for its summary."""
WORKER = "_HF_PIPETRANSFORMER_WORKER"
"""Environment variable with the process that torchrun has started, and its error file. Child processes inherit it."""
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the paths of installed packages."""


def is_users(function: Any) -> bool:
    """Whether a function is no code of an installed package. A function in C is the user's, too."""
    while isinstance(function, (partial, MethodType)):
        function = function.func if isinstance(function, partial) else function.__func__
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code is None or not any(place in code.co_filename for place in INSTALLED)


_shows_briefly = False


def users_error(error: BaseException) -> BaseException:
    """Return the original error of the model, the loss or a hook, if torch's pipeline stage has wrapped it."""
    while type(error) is RuntimeError and STAGE_FAILED in str(error) and error.__cause__ is not None:
        error = error.__cause__
    return error


def in_one_line(error: BaseException) -> str:
    """Describe an error by its type and message, without the traceback that a loader's worker adds."""
    error = users_error(error)
    text = str(error).strip()
    if IN_WORKER in text:
        return printable(text.splitlines()[-1])
    return printable(f"{type(error).__name__}: {text}")


def printable(text: str, most: int = 2000) -> str:
    """Return a text as one line without control characters, shortened to `most` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else f"{line[: most - 4]} ..."


def calling_code() -> str:
    """Return the user's code that has called this package, such as " in MyCallback.on_step_end".

    Returns an empty string if the caller is the training loop or a script.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_in(frame, (*LIBRARIES, "contextlib")):
        if frame.f_code.co_name == "_inner_training_loop":
            return ""
        frame = frame.f_back
    if frame.f_code.co_name == "<module>":
        return ""
    # reading a frame's local variables keeps them alive until its function returns
    owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
    return f" in {frame.f_code.co_name if owner is None else f'{type(owner).__name__}.{frame.f_code.co_name}'}"


def show_errors_briefly() -> None:
    """Make the interpreter show errors as this module's docstring describes. It may be called repeatedly.

    It wraps `sys.excepthook`, which the interpreter calls for an error that ends the program.
    """
    global _shows_briefly
    if _shows_briefly:
        return
    _shows_briefly = True
    path = os.environ.get(ERROR_FILE, "")
    if not os.environ.get(WORKER, "").endswith(f" {path}"):  # each worker has its own file
        os.environ[WORKER] = f"{os.getpid()} {path}"
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        try:
            is_told = _report_to_launcher(error)
            is_shown = _shows_all() or not _shorten(error, tb, is_told)
        except Exception:  # an error without writable attributes, or no stderr
            is_shown = True
        if is_shown:
            before(kind, error, error.__traceback__)

    sys.excepthook = show


def _shows_all() -> bool:
    return bool(os.environ.get(SHOWS_ALL)) or os.environ.get("TRANSFORMERS_VERBOSITY", "").lower() in VERBOSE


def _report_to_launcher(error: BaseException) -> bool:
    """Pass an error's message to torchrun for its summary. Returns False without torchrun.

    The file has the format of `ErrorHandler` in `torch.distributed.elastic.multiprocessing.errors`, which writes a
    traceback in place of the message. The file exists already if the user's `main` is decorated with torch's `record`.
    """
    path = os.environ.get(ERROR_FILE)
    is_worker = os.environ.get(WORKER) == f"{os.getpid()} {path}"  # not a child process of a worker
    if not path or not is_worker or not isinstance(error, Exception):
        return False
    text = in_one_line(error)
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    try:
        with open(path, "x", encoding="utf-8") as file:
            json.dump({"message": message}, file)
    except FileExistsError:
        return True
    except OSError:
        return False
    return True


def _shorten(error: BaseException, tb: TracebackType | None, is_told: bool) -> bool:
    """Remove unhelpful lines from an error's tracebacks. Returns True if it has shown the error without traceback.

    Args:
        error: the error that ends the program.
        tb: its traceback.
        is_told: whether torchrun shows the message.
    """
    innermost = _innermost(tb)
    is_ours = innermost is not None and _is_in(innermost.tb_frame, LIBRARIES[:1])
    is_deliberate = is_ours and isinstance(error, ValueError) and _is_raised_at(innermost)
    if is_deliberate and _rank() == "0":
        cause = error.__cause__.__traceback__ if error.__cause__ is not None else None
        sys.stderr.write(f"{_place_in_script(cause) or _place_in_script(tb)}{type(error).__name__}: {error}\n")
        return True
    line = _line_instead_of(error, is_deliberate, is_told)
    if line is not None:
        # torch collects the output of its hook, and adds the rank
        prefix = "" if isinstance(sys.stderr, io.StringIO) else f"[rank {_rank()}] "
        sys.stderr.write(f"{prefix}{line}\n" if line else "")
        return True
    if not is_ours:
        for one in chain_of(error):
            one.__traceback__ = _without_drivers(one.__traceback__)
    return False


def _line_instead_of(error: BaseException, is_deliberate: bool, is_told: bool) -> str | None:
    """Return the line to show instead of a traceback that another process shows; None to show the traceback here."""
    if is_deliberate:
        return "" if is_told else in_one_line(error)
    line: str | None = getattr(error, ONE_LINE, None)
    return str(error) if line is None and isinstance(error, PeerFailedError) else line


def _place_in_script(tb: TracebackType | None) -> str:
    """Return the user's line of code that led to an error, as in a traceback; empty if there is none."""
    place = ""
    while tb is not None:
        code, package = tb.tb_frame.f_code, _module(tb.tb_frame).partition(".")[0]
        is_installed = package in (*LIBRARIES, *sys.stdlib_module_names) or any(
            p in code.co_filename for p in INSTALLED
        )
        if not is_installed:
            place = f'  File "{code.co_filename}", line {tb.tb_lineno}, in {code.co_name}\n'
        tb = tb.tb_next
    return place


def _rank() -> str:
    return os.environ.get("RANK") or "0"


def _is_raised_at(at: TracebackType | None) -> bool:
    """Whether the line raises the error itself: its message is then meant for the user."""
    return at is not None and "raise" in linecache.getline(at.tb_frame.f_code.co_filename, at.tb_lineno)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause (or the error that was being handled), and so on.

    If an error's own cause is raised in its place, the two form a cycle; a repeated error ends the iteration.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _without_drivers(tb: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of `DRIVERS`, except the innermost one."""
    frames = []
    while tb is not None:
        if not _is_in(tb.tb_frame, DRIVERS) or tb.tb_next is None:
            frames.append(tb)
        tb = tb.tb_next
    following: TracebackType | None = None
    for one in reversed(frames):
        following = TracebackType(following, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return following


def _innermost(tb: TracebackType | None) -> TracebackType | None:
    """Return the innermost entry of a traceback."""
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb


def lines_of(error: BaseException) -> list[str]:
    """Return the lines of code that an error has passed through, the innermost one last."""
    return [line.line or "" for line in traceback.extract_tb(error.__traceback__)]


def _is_in(frame: FrameType, names: tuple[str, ...]) -> bool:
    return any(f"{_module(frame)}.".startswith(f"{name}.") for name in names)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host ran out of memory, which does not mean that the model is unsupported."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, PeerFailedError) or not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(words in text for words in OUT_OF_MEMORY)
