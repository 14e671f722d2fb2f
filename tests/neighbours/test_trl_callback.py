"""`LayerFreezeCallback` alone in TRL's stock trainers, under a launcher: they train with gradient checkpointing."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from distributed import run_ranks
from test_trl import losses, make_model, trainer_of
from transformers import TrainerCallback

from hf_pipetransformer import LayerFreezeCallback

pytestmark = [
    pytest.mark.slow,  # importing TRL takes seconds in every process
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed"),
]

KINDS = ("sft", "dpo", "reward")
FROZEN = 2


class FreezesByHand(TrainerCallback):
    """Freezes the embeddings and the first layers at the start of the second epoch."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 0:
            return
        for module in (model.model.embed_tokens, *model.model.layers[:FROZEN]):
            for parameter in module.parameters():
                parameter.requires_grad_(False)
                parameter.grad = None


def train_both(rank: int, world_size: int, policy: str) -> dict[tuple[str, bool], list[float]]:
    """The losses of each kind of trainer, frozen by hand and by the callback."""
    found = {}
    for kind in KINDS:
        for by_hand in (True, False):
            # DDP refuses what is frozen by hand, if it does not look for unused parameters
            options = {"ddp_find_unused_parameters": True, "gradient_checkpointing": False} if by_hand else {}
            trainer = trainer_of(kind, world_size, False, policy, **options)
            frozen = LayerFreezeCallback({"name": "schedule", "schedule": {1: FROZEN}})
            trainer.add_callback(FreezesByHand() if by_hand else frozen)
            assert trainer.args.gradient_checkpointing != by_hand
            trainer.train()
            found[kind, by_hand] = losses(trainer.state.log_history)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_freeze_under_a_launcher(world_size: int, tmp_path: Any) -> None:
    policy = str(tmp_path / "policy")
    make_model("sft", policy)
    for found in run_ranks(train_both, world_size, policy, timeout=250):
        for kind in KINDS:
            assert found[kind, False] == pytest.approx(found[kind, True], abs=1e-4), kind
