"""The messages of a training, as NCCL would run them: in one queue for each process, and on one communicator.

gloo delivers a message whenever both ends have asked for it. NCCL runs a process's requests to a communicator in their
order, a batch at once, and has a communicator of two ranks for messages outside of batches. So each message must be
in a batch at both ends or at neither, and no process may wait for a message that is behind another process's queue.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from distributed import run_ranks
from model_zoo import without_dropout
from training_runs import Run, at_each_step, pipeline_trainer

from hf_pipetransformer.pipeline import packed as packing
from hf_pipetransformer.planning.layout import Layout

Message = tuple[int, bool, int]
"""The other rank, whether it is sent there, and the number of bytes."""
Log = list[tuple[bool, list[Message]]]
"""The requests of a process, in order: whether as a batch, and the messages."""

STAGES, LAYERS, STEPS, MICRO_BATCHES = 3, 6, 3, 6
VOTE_BYTES = 8
"""At most, of what torch asks through the pipeline before a new schedule runs."""


def frozen(layers: int, **options: Any) -> dict[str, Any]:
    """Options of a training with this number of frozen layers from the start. The number of stages stays."""
    freezing = {"freeze_policy": "schedule", "freeze_schedule": {"0": layers}, "activation_cache": "off"}
    return {**freezing, "elastic": False, **options}


INTERLEAVED, V_SHAPED = {"pipeline_schedule": "interleaved1f1b"}, {"pipeline_schedule": "zbv"}
WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"pipeline_schedule": "gpipe"},
    "interleaved1f1b": INTERLEAVED,
    "zbv": V_SHAPED,
    "driven": {"is_driven": True},
    "1f1b, 4 frozen": frozen(4),
    "interleaved1f1b, 4 frozen": frozen(4, **INTERLEAVED),
    "zbv, 4 frozen": frozen(4, **V_SHAPED),
    "gpipe, 5 frozen": frozen(5, pipeline_schedule="gpipe"),
    "driven, 5 frozen": frozen(5, is_driven=True),
}
"""Options of the trainings. A frozen layer costs a third of another, so 4 are one stage, and 5 are two."""


@dataclass
class Seen:
    """The messages and figures of one process in a training and in its evaluation.

    Attributes:
        training: its messages in the training.
        evaluation: its messages in the evaluation.
        figures: loss and gradient norm of each step.
        layout: the layout of the last step.
    """

    training: Log
    evaluation: Log
    figures: list[float]
    layout: Layout


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
"""Names of the groups with noted messages."""


def train(rank: int, world_size: int, ways: Sequence[str]) -> dict[str, Seen]:
    """The messages on the pipeline's group, by way."""
    log: Log = []
    noting(log)
    packing.WITH_CONTENT = ""  # as on an accelerator
    found = {}
    for way in ways:
        options = {"num_microbatches": MICRO_BATCHES, **WAYS[way]}
        user_code = OwnLoss if options.pop("is_driven", False) else None
        run = Run(samples=STEPS * STAGES * 4, epochs=1, accumulation=1, per_device=4, trainer=user_code)
        model = run.build_model()
        model.config.num_hidden_layers = LAYERS
        torch.manual_seed(0)
        trainer = pipeline_trainer(run, STAGES, model=without_dropout(type(model)(model.config)), **options)
        groups = trainer._job.mesh.groups(STAGES)
        assert groups.pipeline is not None
        NOTED.add(groups.pipeline.group_name)
        layouts: list[Layout] = []
        at_each_step(trainer, after=lambda of_run, seen=layouts: seen.append(of_run.pipeline.current_layout))  # type: ignore[misc]
        trainer.train()
        training = list(log)
        log.clear()
        trainer.evaluate(trainer.train_dataset)
        steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        figures = [float(entry[name]) for entry in steps for name in ("loss", "grad_norm")]
        found[way] = Seen(training, list(log), figures, layouts[-1])
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
    """For each pair (sender, receiver) of ranks, the messages in the sender's and in the receiver's order."""
    found: dict[tuple[int, int], list[list[tuple[bool, int]]]] = defaultdict(lambda: [[], []])
    for rank, log in enumerate(logs):
        for is_batch, messages in log:
            for peer, is_sent, size in messages:
                found[(rank, peer) if is_sent else (peer, rank)][0 if is_sent else 1].append((is_batch, size))
    return found


def sent_to(ranks: Sequence[dict[str, Seen]], way: str) -> dict[tuple[int, int], float]:
    """How many tensors of the model one stage sends to another in a step, for each micro-batch."""
    counts: Counter[tuple[int, int]] = Counter()
    for rank, found in enumerate(ranks):
        stage_of = found[way].layout.stage_of
        for _, messages in found[way].training:
            for peer, is_sent, size in messages:
                counts[stage_of(rank), stage_of(peer)] += is_sent and size > VOTE_BYTES
    return {stages: count / (STEPS * MICRO_BATCHES) for stages, count in counts.items() if count}


UP, DOWN = {(0, 1): 1, (1, 2): 1}, {(2, 1): 1, (1, 0): 1}
FROZEN: dict[str, tuple[list[int], dict[tuple[int, int], int]]] = {
    "1f1b": ([], UP | DOWN),
    "1f1b, 4 frozen": ([0], {**UP, (2, 1): 1}),
    "gpipe, 5 frozen": ([0, 1], UP),
    # a ring, 0 1 2 0 1 2: the last layers, on stages 1 and 2, train
    "interleaved1f1b, 4 frozen": ([0], {(0, 1): 2, (1, 2): 2, (2, 0): 1, (2, 1): 1}),
    # a V, 0 1 2 2 1 0: the last layers, on stages 1 and 0, train
    "zbv, 4 frozen": ([2], {(0, 1): 2, (1, 2): 1, (2, 1): 1, (1, 0): 1}),
}
"""Stages without trained layers, and the result of `sent_to`: gradients are sent only if needed."""


@pytest.mark.slow
def test_messages_on_nccl() -> None:
    """One start for all ways, as it takes longer than they do."""
    ranks = run_ranks(train, STAGES, list(WAYS), timeout=250)
    for way in WAYS:  # both ends of a message use the same communicator, and no queue blocks
        for logs in ([found[way].training for found in ranks], [found[way].evaluation for found in ranks]):
            assert all(len(log) > 10 for log in logs), way
            for pair, (sent, received) in by_pair(logs).items():
                assert sent == received, (way, pair)
            assert run_out(logs) == [0] * STAGES, way
    for way, (frozen_stages, expected) in FROZEN.items():
        layout = ranks[0][way].layout
        is_frozen = [max(layout.units_of(stage)) < layout.num_frozen_layers for stage in range(STAGES)]
        assert [stage for stage in range(STAGES) if is_frozen[stage]] == frozen_stages, (way, layout)
        assert sent_to(ranks, way) == expected, way
    for end in ("4 frozen", "5 frozen", ""):
        first, *others = [ranks[0][way].figures for way in WAYS if way.endswith(end) and (end or "frozen" not in way)]
        assert len(first) == 2 * STEPS
        for figures in others:  # all ways train alike
            assert figures == pytest.approx(first, abs=1e-5), (end, figures, first)
