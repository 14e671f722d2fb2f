"""Process groups of a K stages x R replicas layout, and small collectives over all processes.

world of 8, K = 4, R = 2        stage 3   2   1   0     of most schedules (`planning.placement`)
                    replica 0   rank  0   1   2   3     a row is a pipeline
                    replica 1   rank  4   5   6   7     a column holds the same stage
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import PeerFailedError, in_one_line
from ..model.nested import as_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")

EVEN = 4
"""Bytes that `gather_objects` may move at once, as a multiple of those of all objects."""
HEAD = 248
"""Bytes of an object that its first exchange takes along, after eight for the length: most objects are no longer."""


@dataclass(frozen=True)
class PipelineGroups:
    """The groups of this process for one number of stages. A group of a single member is None."""

    pipeline: dist.ProcessGroup | None
    pipeline_control: dist.ProcessGroup | None
    """The same processes as `pipeline`, in a gloo group on the CPU."""
    replicas: dist.ProcessGroup | None


class ProcessMesh:
    """The groups for every number of stages requested so far, and a control group for decisions.

    The control group (gloo, all processes, on the CPU) never changes. Steps use it for numbers and votes, not for
    tensors. All groups are created with `timeout`. A group created without one would wait for 30 minutes, in spite of
    the user's setting.

    Works without an initialised process group, as a world of one process.

    On an accelerator every group does one small collective when it is created. Otherwise NCCL creates a communicator
    in a group's first operation and waits there for all members; with a frozen first stage this may be one of torch's
    batched point-to-point calls, which only some members make.

    Args:
        timeout: bound on every collective of the groups created here (`TrainingArguments.ddp_timeout`).
        device: the accelerator with the tensors that the groups exchange; None for the CPU. Groups made for gloo
            exchange tensors on the CPU.
    """

    def __init__(self, timeout: timedelta, device: torch.device | None = None) -> None:
        self.timeout = timeout
        self._device = device if device is not None and device.type != "cpu" else None
        is_distributed = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size() if is_distributed else 1
        self.rank = dist.get_rank() if is_distributed else 0
        # Kept until the process ends, although a transformation leaves some of them: the same numbers of stages come
        # back (an evaluation, another training), creating a group is collective and takes NCCL up to seconds, and
        # there are few of them, as K divides the number of processes.
        self._layouts: dict[int, PipelineGroups] = {}
        self._is_with_last_stages = False
        self.num_communicators = 0
        """Number of the accelerator's communicators that this process has here. They live until it ends."""
        self._subgroups: dict[tuple[tuple[tuple[int, ...], ...], str | None, int], dist.ProcessGroup | None] = {}
        self.control = dist.new_group(backend="gloo", timeout=timeout) if self.world_size > 1 else None
        self.alone: Any = None
        """A group of this process alone; None if there is only one process."""
        if self.world_size > 1:
            # on all processes at once: since torch 2.14, a group that only some create gives later ones other names
            self.alone = dist.new_group([self.rank], timeout, "gloo", use_local_synchronization=True)
            self._connect(dist.group.WORLD)

    def groups(self, num_stages: int) -> PipelineGroups:
        """Groups for K = `num_stages`. Collective over all processes the first time a K is requested."""
        if num_stages not in self._layouts:
            rows = self._pipelines(num_stages)
            self._layouts[num_stages] = PipelineGroups(
                self.subgroup(rows), self.subgroup(rows, backend="gloo"), self.subgroup(self._replicas(num_stages))
            )
        return self._layouts[num_stages]

    def second_pipeline_group(self, num_stages: int) -> dist.ProcessGroup | None:
        """Another group of the same processes as `groups(num_stages).pipeline`. Collective like `groups`."""
        return self.subgroup(self._pipelines(num_stages), number=1)

    def _replicas(self, num_stages: int) -> list[range]:
        return [range(stage, self.world_size, num_stages) for stage in range(num_stages)]

    def _pipelines(self, num_stages: int) -> list[range]:
        return [range(first, first + num_stages) for first in range(0, self.world_size, num_stages)]

    def subgroup(
        self, partition: Iterable[Iterable[int]], backend: str | None = None, number: int = 0
    ) -> dist.ProcessGroup | None:
        """Return this process's group among several disjoint sets of ranks; None if it is in no set or alone in one.

        Collective over all processes the first time a partition is requested.

        Args:
            partition: the sets of ranks.
            backend: None uses the backend of the default process group.
            number: index of the group, if the same sets of ranks need several groups.
        """
        sets = tuple(tuple(sorted(ranks)) for ranks in partition)
        key = (sets, backend, number)
        if key not in self._subgroups:
            mine = None
            for ranks in sets:
                if len(ranks) > 1:
                    group = dist.new_group(list(ranks), timeout=self.timeout, backend=backend)
                    mine = group if self.rank in ranks else mine
            self._subgroups[key] = mine
            if mine is not None and backend is None:
                self._connect(mine)
        return self._subgroups[key]

    def _connect(self, group: dist.ProcessGroup | None) -> None:
        if self._device is not None:
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
            self.num_communicators += 1
            logger.debug(
                "%d communicators, the latest of %d ranks", self.num_communicators, dist.get_world_size(group)
            )

    # ------------------------------------------------------------------------------------ code of the last stages
    @contextmanager
    def with_last_stages(self) -> Iterator[None]:
        """Inside the context, code runs that only the last stages run, so no operation of all processes may begin."""
        before, self._is_with_last_stages = self._is_with_last_stages, True
        try:
            yield
        finally:
            self._is_with_last_stages = before

    def refuse_with_last_stages(self, doing: str) -> None:
        """Refuse an operation of all processes in code that only the last stages run. They would wait forever.

        Args:
            doing: the operation, as the predicate of a sentence.

        Raises:
            ValueError: such code runs.
        """
        if self._is_with_last_stages:
            raise ValueError(
                f"This process {doing}, which needs all processes, but the loss (or an overridden log) runs on the"
                " last stage only. Do it in a callback, or let the Trainer do it: set control.should_evaluate or"
                " control.should_save. The loss's own modules may have an optimizer of their own, and"
                " torch.nn.utils.clip_grad_norm_."
            )

    # ------------------------------------------------------------------------------------ over the control group
    def gather_objects(self, mine: T) -> list[T]:
        """Return the small objects of all processes, on every process. Collective over all processes.

        Objects of up to `HEAD` bytes take one exchange. In a second one, all are as long as the longest; where a few
        are much longer, these are broadcast.
        """
        if self.control is None:
            return [mine]
        content = pickle.dumps(mine)
        head = len(content).to_bytes(8, "little") + content[:HEAD]
        heads = self._gather_bytes(head, 8 + HEAD)
        sizes = [int.from_bytes(head[:8], "little") for head in heads]
        contents = [head[8:] for head in heads]
        if max(sizes) > HEAD:
            contents = self._gather_contents(content, sizes)
        return [pickle.loads(one[:size]) for one, size in zip(contents, sizes, strict=True)]

    def _gather_contents(self, mine: bytes, sizes: list[int]) -> list[bytes]:
        total = self.world_size * max(sizes)
        short = max(sizes) if total < EVEN * sum(sizes) else sorted(sizes)[self.world_size // 2]
        contents = self._gather_bytes(mine[:short], short)
        for rank, size in enumerate(sizes):
            if size > short:
                one = torch.frombuffer(bytearray(mine if rank == self.rank else size), dtype=torch.uint8)
                dist.broadcast(one, src=rank, group=self.control)
                contents[rank] = one.numpy().tobytes()
        return contents

    def _gather_bytes(self, mine: bytes, length: int) -> list[bytes]:
        """The bytes of all processes, filled up to `length`. Collective over all processes."""
        everyone = [torch.empty(length, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(
            everyone, torch.frombuffer(bytearray(mine.ljust(length, b"\0")), dtype=torch.uint8), group=self.control
        )
        return [one.numpy().tobytes() for one in everyone]

    def of_first(self, mine: T) -> T:
        """Return rank 0's object on every process; the others' are not sent. Collective over all processes."""
        first: Any = self.gather_objects(mine if self.rank == 0 else None)[0]
        return first

    def are_equal(self, mine: Any) -> bool:
        """Whether all processes have the same value, by a digest of its `repr`. Collective over all processes."""
        digests = self.gather_objects(hashlib.blake2b(repr(mine).encode(), digest_size=16).digest())
        return len(set(digests)) == 1

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raise an error that occurs inside on one process on all processes. Collective over all processes.

        The code inside must not contain collectives.

        Raises:
            Exception: the process's own error, or if it has none, the first error of another process (as a
                `PeerFailedError` if it is no `ValueError`).
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        told = failure
        if failure is not None and not isinstance(failure, ValueError):
            told = PeerFailedError(f"rank {self.rank} failed: {in_one_line(failure)}")
        elif failure is not None and not can_be_sent(failure):  # an error class of the user's
            told = ValueError(str(failure))
        everyone = self.gather_objects(told)
        first = next(filter(None, (failure, *everyone)), None)
        if first is not None:
            raise first

    def expect_all(self, call: str, seconds: float) -> None:
        """Wait for all processes to make this call. Collective over all processes.

        Args:
            call: the name of the call, then a space and its place in the code. The places may differ.
            seconds: the time that the processes have.

        Raises:
            ValueError: some process has called something else, or has ended, or its time is over.
        """
        if self.control is None:
            return
        self.refuse_with_last_stages(f"called {call}")
        remedy = "Call it on every process, not on the main process alone"
        try:
            dist.monitored_barrier(self.control, timedelta(seconds=seconds))
            everyone = self.gather_objects(call)
        except RuntimeError as error:
            raise ValueError(
                f"rank {self.rank} called {call}, but another process has ended, or did not call it within"
                f" {seconds:g} s. {remedy}."
            ) from error
        for rank, theirs in enumerate(everyone):
            if theirs.partition(" ")[0] != call.partition(" ")[0]:
                raise ValueError(f"rank {self.rank} called {call}; rank {rank} called {theirs}. {remedy}.")

    def any(self, mine: bool) -> bool:
        """Whether `mine` is True on any process; much cheaper than objects. Collective over all processes."""
        if self.control is None:
            return mine
        flag = torch.tensor([int(mine)])
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.control)
        return bool(flag)

    def differs(self, mine: bool) -> bool:
        """Whether `mine` is True on some processes only. Collective over all processes."""
        return 0 < self.sum(int(mine), torch.long) < self.world_size

    def sum(self, mine: int | float, dtype: torch.dtype) -> int | float:
        """The sum of all processes' numbers, without waiting for a device. Collective over all processes."""
        total = torch.tensor(mine, dtype=dtype)
        if self.control is not None:
            dist.all_reduce(total, group=self.control)
        return total.item()

    def agree(self, loss: torch.Tensor, votes: Sequence[bool]) -> tuple[torch.Tensor, list[bool]]:
        """Return the sum of all processes' losses, and for each vote whether any process has given it.

        On the CPU both are one all-reduce. On an accelerator the votes take the control group, because reading them
        from the device would wait for the whole step. Collective over all processes.

        Args:
            loss: the loss of this process, 0-dimensional.
            votes: the votes of this process, as many on every process.
        """
        counts = torch.tensor([float(vote) for vote in votes])
        if loss.device.type == "cpu":
            together = torch.cat([loss.float()[None], counts])
            dist.all_reduce(together)
            loss, counts = together[0], together[1:]
        else:
            loss = loss.float()
            dist.all_reduce(loss)
            dist.all_reduce(counts, group=self.control)
        return loss, (counts > 0).tolist()

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Broadcast the CPU tensor of rank `source`, of any dtype, in place. Collective over all processes."""
        if self.control is not None:
            dist.broadcast(as_bytes(tensor), src=source, group=self.control)
        return tensor


def can_be_sent(value: object) -> bool:
    """Whether another process can be given a copy of a value."""
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:  # a user's class may raise any error
        return False
    return True
