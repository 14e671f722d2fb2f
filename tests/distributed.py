"""Runs a function on several processes ("ranks") that form one gloo world on the CPU.

    def add(rank, world_size, number):  # at the top level of a test module: ranks import it by name
        torch.distributed.init_process_group("gloo")
        total = torch.tensor(rank * number)
        torch.distributed.all_reduce(total)
        return total.item()

    assert run_ranks(add, 4, 10) == [60, 60, 60, 60]

1. Importing torch, transformers and the library takes seconds, so one *fork server* per test session imports them
   once, and each rank is a fork of it (about 50 ms). The first call starts the server.
2. The environment is torchrun's: RANK, WORLD_SIZE, MASTER_ADDR, ... The test's process hosts the store on a port that
   the system chooses. So concurrent test sessions do not interfere, and the store outlives the ranks. No process group
   is created: Accelerate, or the function, creates it.
3. A rank sends back its return value or its error (tensors included, by value). The test's process prints the rank's
   output, and pytest shows it if the test fails.
4. Ranks that hang dump the stacks of their threads, and are then killed together with their data loader workers. Ranks
   do not outlive the test's process, even if it is killed. Timeouts are seconds of a quiet machine: while other
   programs use the cores, time counts less (`slowness`).
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import gc
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed

import hf_pipetransformer.parts
import hf_pipetransformer.token_slices

_PACKAGES = (hf_pipetransformer.parts, hf_pipetransformer.token_slices)  # a rank imports what it uses of them
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "pytest",
        "torch.distributed.pipelining",
        "accelerate",
        "transformers.trainer",
        "transformers.models.bert.modeling_bert",
        "transformers.models.llama.modeling_llama",
        "hf_pipetransformer.trainer",
        *(one.name for of in _PACKAGES for one in pkgutil.walk_packages(of.__path__, f"{of.__name__}.")),
        "training_runs",
        "adversarial.runner",
    ]
)

STACK_REQUEST = signal.SIGUSR1  # a rank answers with the stacks of all its threads
LAST_WORDS_SECONDS = 0.5  # how long ranks that are to be killed may write their stacks
EXIT_SECONDS = 15.0  # how long a rank may take to end after it returned
TICK_SECONDS = 1.0  # after so long the load is looked at again
MOST_SLOWNESS = 30.0  # a test that hangs does end
YOUNG_OBJECTS = 20_000  # between collections; with Python's 700 they take a tenth of a short training's time

# Errors of a rank after another rank has failed: consequences, not causes.
CONSEQUENCES = (
    "closed by peer",
    "reset by peer",
    "connection refused",
    "broken pipe",
    "remote error",
    "this is rank ",
)


class RankTimeoutError(TimeoutError):
    """A rank was still running when its time was over, and was killed."""


class RankDiedError(RuntimeError):
    """A rank ended without returning or raising: killed by a signal, or by `os._exit`."""

    def __init__(self, rank: int, exitcode: int | None) -> None:
        super().__init__(f"rank {rank} ended with exit code {exitcode} before it returned")
        self.rank = rank
        self.exitcode = exitcode

    def __reduce__(self) -> tuple[type, tuple[int, int | None]]:
        return type(self), (self.rank, self.exitcode)


class RemoteError(Exception):
    """Stands for an exception of a rank that cannot be pickled."""


class RemoteTraceback(Exception):
    """The traceback of a rank's exception, as text; the cause of the exception that is raised again."""

    def __str__(self) -> str:
        return "\n" + self.args[0]


@dataclasses.dataclass
class RankOutcome:
    """How one rank ended.

    Attributes:
        rank: Number of the rank.
        value: Return value of the function.
        error: The raised error, or a `RankTimeoutError` or `RankDiedError`; None if the function returned.
        exitcode: Exit code of the process; minus the signal's number if a signal killed it.
        finished_s: Seconds after the start of all ranks.
        log: Standard output and error of the rank, and its stacks if it hung.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    exitcode: int | None = None
    finished_s: float = 0.0
    log: str = ""


def run_ranks(fn: Callable, world_size: int, *args: Any, **options: Any) -> list:
    """Returns `fn(rank, world_size, *args, **kwargs)` of every rank, in the order of ranks.

    It takes the arguments of `launch_ranks`.

    Raises:
        BaseException: The error of the first failing rank, of the same type, with its traceback as the cause. Errors
            about a lost peer come last, and so do ranks that waited for the failed rank.
        RankTimeoutError: A rank did not end in time.
        RankDiedError: A rank was killed.
    """
    outcomes = launch_ranks(fn, world_size, *args, seconds_after_error=5, **options)
    failures = sorted((o for o in outcomes if o.error is not None), key=lambda o: (_weight(o.error), o.finished_s))
    if failures:
        raise failures[0].error
    return [outcome.value for outcome in outcomes]


def run_ranks_expecting_error(fn: Callable, world_size: int, *args: Any, **options: Any) -> list[BaseException]:
    """Returns the error of every rank; takes the arguments of `launch_ranks`.

    Raises:
        AssertionError: A rank returned, hung or died instead of raising.
    """
    outcomes = launch_ranks(fn, world_size, *args, **options)
    for outcome in outcomes:
        if outcome.error is None:
            raise AssertionError(f"rank {outcome.rank} raised nothing and returned {outcome.value!r}")
        if isinstance(outcome.error, RankTimeoutError | RankDiedError):
            raise AssertionError(f"rank {outcome.rank} raised nothing") from outcome.error
    return [outcome.error for outcome in outcomes]


def launch_ranks(
    fn: Callable,
    world_size: int,
    *args: Any,
    timeout: float = 120,
    seconds_after_error: float | None = None,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[RankOutcome]:
    """Runs `fn` like `run_ranks`, and returns how each rank ended instead of raising.

    Args:
        fn: A function at the top level of an importable module.
        world_size: Number of processes.
        *args: Further arguments for `fn`, picklable.
        timeout: Seconds of a quiet machine until all ranks are killed and the call fails.
        seconds_after_error: Once a rank has failed, how long the others may go on; None: until the timeout.
        env: Additions to the environment of every rank.
        **kwargs: Keyword arguments for `fn`, picklable.
    """
    call = pickle.dumps((fn, args, kwargs))
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [_Rank(rank, Path(folder) / f"rank{rank}.log") for rank in range(world_size)]
        try:
            for rank in ranks:
                rank.start(call, _environment(rank.number, world_size, store.port, env or {}))
            _wait(ranks, timeout, seconds_after_error)
        finally:
            for rank in ranks:
                rank.kill()
        for rank in ranks:
            rank.outcome.log = rank.read_log()
            if rank.outcome.log:
                print(f"--- output of rank {rank.number} ---\n{rank.outcome.log}")
    return [rank.outcome for rank in ranks]


def slowness() -> float:
    """Current slowdown against a quiet machine: number of runnable processes for each core."""
    return min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), MOST_SLOWNESS)


def patient(seconds: float) -> float:
    """A timeout for a process that is not a rank, for twice the current load."""
    return 2 * seconds * slowness()


# ---------------------------------------------------------------------------------------------------------
# In the test's process
# ---------------------------------------------------------------------------------------------------------


def _start_server() -> None:
    """Start the fork server, with this folder among the paths that it imports from. Ranks get another environment."""
    with mock.patch.dict(os.environ):
        paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        multiprocessing.forkserver.ensure_running()


class _Rank:
    """One rank, seen from the test's process."""

    def __init__(self, number: int, log: Path) -> None:
        self.number = number
        self.log = log
        self.outcome = RankOutcome(number)
        self.answered = False
        self.process: multiprocessing.process.BaseProcess | None = None

    def start(self, call: bytes, environment: dict[str, str]) -> None:
        self.connection, rank_end = _context.Pipe(duplex=False)
        # not daemonic: a data loader's workers are children of the rank
        process = _context.Process(target=_rank_main, args=(rank_end, call, environment, str(self.log)))
        _start_server()
        process.start()
        self.process = process
        rank_end.close()
        self.started = time.monotonic()

    def read_answer(self) -> None:
        if self.answered or not self.connection.poll():
            return
        try:
            self.outcome.value, self.outcome.error = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            return  # it died: noted when the process has ended
        self.answered = True
        self.outcome.finished_s = time.monotonic() - self.started

    def note_end(self) -> None:
        self.process.join()
        self.outcome.exitcode = self.process.exitcode
        self.read_answer()
        if not self.answered:
            self.fail(RankDiedError(self.number, self.process.exitcode))

    def fail(self, error: BaseException) -> None:
        self.outcome.value, self.outcome.error = None, error
        self.outcome.finished_s = time.monotonic() - self.started

    def request_stacks(self) -> None:
        if self.log.exists():  # then it has installed its answer
            os.kill(self.process.pid, STACK_REQUEST)

    def read_log(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def kill(self) -> None:
        """Kills the process and its children, and discards it."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()  # it has not made its group yet, or has ended
        self.process.join()
        self.outcome.exitcode = self.process.exitcode
        self.process.close()
        self.connection.close()
        self.process = None


def _wait(ranks: list[_Rank], timeout: float, seconds_after_error: float | None) -> None:
    """Waits until all ranks have ended; at the timeout, records the stacks of the running ranks."""
    seconds_left, reason = timeout, f"after {timeout:g} s"

    def hurry(seconds: float, new_reason: str) -> None:
        nonlocal seconds_left, reason
        if seconds < seconds_left:
            seconds_left, reason = seconds, new_reason

    running = list(ranks)
    failed: _Rank | None = None
    while running and seconds_left > 0:
        began = time.monotonic()
        # Ends are awaited too, not only answers: a dead rank's workers may keep its connection open.
        handles: list[Any] = [rank.process.sentinel for rank in running]
        handles += [rank.connection for rank in running if not rank.answered]
        ready = multiprocessing.connection.wait(handles, min(seconds_left, TICK_SECONDS))
        seconds_left -= (time.monotonic() - began) / slowness()
        for rank in [r for r in running if r.process.sentinel in ready or r.connection in ready]:
            rank.read_answer()
            if rank.process.sentinel in ready:
                rank.note_end()
                running.remove(rank)
            elif not rank.answered:  # its connection is closed, and its process about to end
                rank.process.join(LAST_WORDS_SECONDS)
            failed = failed or (rank if rank.outcome.error is not None else None)
        if failed and seconds_after_error is not None:
            hurry(seconds_after_error, f"{seconds_after_error:g} s after rank {failed.number} had failed")
            seconds_after_error = None  # counted from the first failure only
        if all(rank.answered for rank in running):
            hurry(EXIT_SECONDS, f"{EXIT_SECONDS:g} s after its function had ended")

    for rank in running:
        rank.request_stacks()
    if running:
        time.sleep(LAST_WORDS_SECONDS * slowness())
    for rank in running:
        if rank.outcome.error is None:
            rank.fail(RankTimeoutError(f"rank {rank.number} was still running {reason}\n{rank.read_log()[-4000:]}"))


def _environment(rank: int, world_size: int, port: int, additions: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is in the test's process
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **additions,
    }


def _weight(error: BaseException) -> int:
    """Orders failures: causes, then lost connections, then ranks that waited in vain."""
    if isinstance(error, RankTimeoutError):
        return 2
    return int(any(words in str(error).lower() for words in CONSEQUENCES))


# ---------------------------------------------------------------------------------------------------------
# In a rank
# ---------------------------------------------------------------------------------------------------------


def _rank_main(
    connection: multiprocessing.connection.Connection, call: bytes, environment: dict[str, str], log: str
) -> None:
    _die_with_the_test_process()
    multiprocessing.set_start_method(None, force=True)  # a data loader's workers start as they would anywhere else
    gc.freeze()  # the imported modules: no collection shall walk through them, nor copy their memory
    gc.set_threshold(YOUNG_OBJECTS)
    os.setpgid(0, 0)  # what this rank starts can be killed with it
    multiprocessing.current_process().name = "MainProcess"  # as a launcher's ranks: a seeded collator asks for it
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    # transformers, which the package's logger follows, shows errors only (conftest)
    logging.getLogger("hf_pipetransformer").setLevel(logging.WARNING)
    with open(log, "w", buffering=1) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        faulthandler.enable(stream)
        faulthandler.register(STACK_REQUEST, file=stream, all_threads=True)
        try:
            fn, args, kwargs = pickle.loads(call)
            warnings.filterwarnings(
                "error", category=FutureWarning, module="hf_pipetransformer"
            )  # as in pyproject.toml
            warnings.filterwarnings("error", message=".*past_key_values", category=FutureWarning)
            value = fn(int(environment["RANK"]), int(environment["WORLD_SIZE"]), *args, **kwargs)
            answer = pickle.dumps((value, None))
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        except BaseException as error:
            answer = pickle.dumps((None, _Portable(error)))
        connection.send_bytes(answer)
        sys.stdout.flush()
        sys.stderr.flush()
        faulthandler.unregister(STACK_REQUEST)
        signal.signal(STACK_REQUEST, signal.SIG_IGN)


class _Portable:
    """Pickles an exception, or a stand-in if it cannot travel, with its traceback as the cause."""

    def __init__(self, error: BaseException) -> None:
        self.text = f"on rank {os.environ['RANK']}:\n" + "".join(traceback.format_exception(error))
        try:
            self.error = pickle.loads(pickle.dumps(error))
        except Exception:
            self.error = RemoteError(f"{type(error).__qualname__}: {error}")

    def __reduce__(self) -> tuple:
        return _with_cause, (self.error, self.text)


def _with_cause(error: BaseException, text: str) -> BaseException:
    error.__cause__ = RemoteTraceback(text)
    return error


def _die_with_the_test_process() -> None:
    """Has the kernel kill this rank, even if it is stopped or stuck, when the test's process is gone.

    The fork server ends when no process holds the write end of its pipe. Ranks inherit the write end and close it, so
    only the test's process keeps the server alive. They request SIGKILL at the death of their parent, the server.
    """
    server = multiprocessing.forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    server._forkserver_address = None
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
