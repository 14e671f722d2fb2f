"""The messages of a training, as NCCL would run them: in one queue for each process, and on one communicator.

gloo delivers a message whenever both ends have asked for it. NCCL runs what a process asks of a communicator in this
order, a batch at once, and has a communicator of two ranks for messages that are in no batch. So each message must be
in a batch at both ends or at neither, and no process may wait for one that is behind another process's queue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from distributed import run_ranks
from training_runs import Run, pipeline_trainer

Message = tuple[int, bool, int]
"""The other rank, whether it is sent there, and the number of bytes."""
Log = list[tuple[bool, list[Message]]]
"""What a process has asked for, in order: whether as a batch, and the messages."""

STAGES = 3
WAYS: dict[str, dict[str, Any]] = {
    "interleaved1f1b": {"pipeline_schedule": "interleaved1f1b"},
    "driven": {"trainer": True},
}


class OwnLoss:
    """A loss of the user's, which drives the pipeline."""

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss * 1.0, outputs) if return_outputs else outputs.loss * 1.0


def noting(log: Log) -> None:
    """Note all messages of tensors on groups for them, for the rest of this process's life."""
    real = {name: getattr(c10d, name) for name in ("send", "recv", "isend", "irecv", "batch_isend_irecv")}
    inside: list[int] = []

    def is_noted(group: Any) -> bool:
        return not inside and group is not None and group.group_name in NOTED

    def single(name: str) -> Any:
        def function(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            peer = next((v for k, v in kwargs.items() if k in ("dst", "src", "group_dst", "group_src")), None)
            if is_noted(group):
                log.append((False, [(peer if peer is not None else args[0], "send" in name, tensor.nbytes)]))
            return real[name](tensor, *args, group=group, **kwargs)

        return function

    def batch(operations: list[dist.P2POp]) -> list[dist.Work]:
        if is_noted(operations[0].group):
            messages = [(op.peer, op.op is c10d.isend, op.tensor.nbytes) for op in operations]
            log.append((True, messages))
        inside.append(1)
        try:
            return real["batch_isend_irecv"](operations)
        finally:
            inside.pop()

    for name in real:
        replacement = batch if name == "batch_isend_irecv" else single(name)
        setattr(c10d, name, replacement)
        setattr(dist, name, replacement)


NOTED: set[str] = set()
"""Names of the groups whose messages are noted."""


def train(rank: int, world_size: int, ways: Sequence[str]) -> dict[str, Log]:
    """The messages on the pipeline's group, by way."""
    log: Log = []
    noting(log)
    found = {}
    for way in ways:
        options = dict(WAYS[way])
        run = Run(
            samples=36, epochs=1, accumulation=1, per_device=4, trainer=OwnLoss if options.pop("trainer", 0) else None
        )
        config = run.build_model().config
        config.num_hidden_layers = 6
        model = type(run.build_model())(config)
        trainer = pipeline_trainer(run, STAGES, model=model, num_microbatches=6, **options)
        groups = trainer._job.mesh.groups(STAGES)
        assert groups.pipeline is not None
        NOTED.add(groups.pipeline.group_name)
        trainer.train()
        trainer.evaluate(trainer.train_dataset)
        found[way] = list(log)
        log.clear()
    return found


def run_out(logs: Sequence[Log]) -> list[int]:
    """Run the queues of all processes; return how many entries of each are left where no process can go on."""
    queues = [list(log) for log in logs]
    left = [list(queue[0][1]) if queue else [] for queue in queues]  # of the first entry of each
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            for message in list(left[rank]):
                peer, is_sent, size = message
                theirs = (rank, not is_sent, size)
                if theirs in left[peer] and queues[peer][0][0] == queue[0][0]:
                    left[rank].remove(message)
                    left[peer].remove(theirs)
                    moved = True
        for rank, queue in enumerate(queues):
            if queue and not left[rank]:
                queue.pop(0)
                left[rank] = list(queue[0][1]) if queue else []
                moved = True
    return [len(queue) for queue in queues]


def by_pair(logs: Sequence[Log]) -> dict[tuple[int, int], list[list[tuple[bool, int]]]]:
    """For each pair of ranks, what the first one sends to the second, as each of both has asked for it."""
    found: dict[tuple[int, int], list[list[tuple[bool, int]]]] = defaultdict(lambda: [[], []])
    for rank, log in enumerate(logs):
        for is_batch, messages in log:
            for peer, is_sent, size in messages:
                found[(rank, peer) if is_sent else (peer, rank)][0 if is_sent else 1].append((is_batch, size))
    return found


def test_both_ends_of_a_message_use_the_same_communicator_and_no_queue_blocks() -> None:
    ranks = run_ranks(train, STAGES, list(WAYS), timeout=250)
    for way in WAYS:
        logs = [found[way] for found in ranks]
        assert all(len(log) > 20 for log in logs), way
        for pair, (sent, received) in by_pair(logs).items():
            assert sent == received, (way, pair)
        assert run_out(logs) == [0] * STAGES, way
