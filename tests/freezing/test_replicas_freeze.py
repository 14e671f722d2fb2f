"""`LayerFreezeCallback` under DDP: replicas stay equal, and gradients of frozen layers are not sent."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from distributed import run_ranks
from one_job import run_calls
from test_callback import SCHEDULE, bert, frozen_names, make_trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training_runs import largest_difference, losses_of, weights_of
from transformers import TrainerCallback

from hf_pipetransformer.parts.freezing.callback import LayerFreezeCallback
from hf_pipetransformer.parts.freezing.policies import FreezeDecision, FreezePolicy


def train_replicated(
    rank: int, world_size: int, per_device: int, twice: bool = False, schedule: Any = None, **options: Any
) -> tuple[list[float], dict[str, Tensor], list[int]]:
    reduced: list[int] = []

    class Traffic(TrainerCallback):
        """Elements that DDP reduces at each step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            wrapper = trainer.model_wrapped
            if isinstance(wrapper, DistributedDataParallel):
                buckets = wrapper.reducer._get_zeros_like_grad_buckets()
                reduced.append(sum(bucket.buffer().numel() for bucket in buckets))

    trainer = make_trainer(
        bert(), LayerFreezeCallback(schedule or SCHEDULE), Traffic(), per_device_train_batch_size=per_device, **options
    )
    for _ in range(1 + twice):
        trainer.train()
    return losses_of(trainer), weights_of(trainer.model), reduced


def assert_as_one_process(outcomes: list[Any], accumulation: int) -> None:
    """No reduction error without `find_unused_parameters`, equal replicas, and frozen parameters are not sent."""
    assert largest_difference(outcomes[0][1], outcomes[1][1])[0] == 0
    _, expected, _ = train_replicated(0, 1, 16, gradient_accumulation_steps=accumulation, **OWN_MEAN)
    assert largest_difference(outcomes[0][1], expected)[0] < 1e-5
    sizes = {name: parameter.numel() for name, parameter in bert().named_parameters()}
    active = [sum(n for name, n in sizes.items() if not name.startswith(frozen_names(f))) for f in (1, 3)]
    assert outcomes[0][2] == [sum(sizes.values())] * 3 + [active[0]] * 3 + [active[1]] * 3


OWN_MEAN = {"average_tokens_across_devices": False}
"""It would multiply Bert's mean loss by the number of processes."""
FROM_THE_START = {"name": "schedule", "schedule": {0: 2}}


def test_replicas_train_as_one_process() -> None:
    """Layers also freeze before the first step of each training, as after resuming.

    The wrapper reduces everything until it is seen, in the first forward. After a training it reduces all parameters
    again: the Trainer keeps it for the next one.
    """
    plain = partial(train_replicated, ddp_find_unused_parameters=False)
    unused = partial(train_replicated, ddp_find_unused_parameters=True, **OWN_MEAN)
    calls = {
        "accumulating": (partial(plain, gradient_accumulation_steps=2, **OWN_MEAN), 8),
        "finding unused": (unused, 8),
        "twice": (partial(plain, twice=True, schedule=FROM_THE_START), 8),
        "unequal": (train_with_unequal_policies,),
    }
    found = run_calls(2, calls)
    assert_as_one_process(found["accumulating"], 2)
    assert_as_one_process(found["finding unused"], 1)
    first, second = found["twice"]
    assert largest_difference(first[1], second[1])[0] == 0
    start = weights_of(bert())
    for name, weight in first[1].items():
        assert torch.equal(weight, start[name]) == name.startswith(frozen_names(2)), name
    assert all("(1 on rank 0; 2 on rank 1)" in error for error in found["unequal"])


def test_the_only_process_of_a_launcher_has_a_wrapper_too() -> None:
    """With gradient checkpointing, as TRL's trainers have it by default, DDP does not look for unused parameters."""
    options = {"ddp_find_unused_parameters": False, "gradient_checkpointing": True}
    ((_, _, reduced),) = run_ranks(train_replicated, 1, 16, **options)
    assert reduced[0] > reduced[3] > reduced[-1]


class ByRank(FreezePolicy):
    needs_gradient_norms = False

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def num_frozen(self, decision: FreezeDecision) -> int:
        return min(decision.index, 1) * (1 + self.rank)


def train_with_unequal_policies(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError) as error:
        make_trainer(bert(), LayerFreezeCallback(ByRank(rank))).train()
    return str(error.value)
