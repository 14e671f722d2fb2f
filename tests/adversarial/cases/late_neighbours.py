"""Scripts of neighbour libraries, over several stages."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback

from ..kit import Each, Script, case, own_loss, plain_loss, samples, with_loss

SAVES: dict[str, Any] = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 3}


def seen(trainer: Any) -> Tensor:
    """The logits of one sample, with dropout off."""
    row, mode = samples()[0], trainer.model.training
    trainer.model.eval()
    try:
        with torch.no_grad():
            return trainer.model(input_ids=row["input_ids"][None])["logits"]
    finally:
        trainer.model.train(mode)


class Card:
    """sentence-transformers' `_save` writes a model card, for which it encodes sentences; errors are warnings."""

    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        with suppress(Exception):
            self.seen = [*getattr(self, "seen", []), seen(self)]


class MainsCard:
    """The same on the main process alone, as a stock `_save` of sentence-transformers on transformers below 5.24."""

    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        if self.args.should_save:
            self.seen = [*getattr(self, "seen", []), seen(self)]


def seen_by_main(trainer: Any) -> dict[str, Tensor]:
    """What the main process has computed while saving, on all processes."""
    found = [getattr(trainer, "seen", None)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(found)
    assert found[0], "nothing was computed"
    return {"seen": torch.stack(found[0])}


def nothing(callback: Any, state: Any, control: Any, **others: Any) -> None:
    """A callback of step events: with one, calls of the model outside of the steps are served."""


def script(card: type) -> Script:
    return with_loss(
        trainer=type("Saving", (own_loss(plain_loss), card), {}),
        callbacks=[Each(nothing)],
        options=SAVES,
        observe=seen_by_main,
    )


@case("K2")
def main_process_runs_model_while_it_saves() -> Script:
    """The main process calls the model in `_save`."""
    return script(MainsCard)


@case("K2")
def all_processes_run_model_while_they_save() -> Script:
    """Every process calls the model in `_save`, and catches errors, as the model card of sentence-transformers 6.2."""
    return script(Card)


@case("K2")
def model_runs_while_saved_in_a_callback() -> Script:
    """`on_step_end` calls `save_model()` on all processes."""

    class Saves(TrainerCallback):
        trainer: Any

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                self.trainer.save_model()

    return with_loss(
        trainer=type("Saving", (own_loss(plain_loss), MainsCard), {}),
        callbacks=[Saves()],
        options={"num_train_epochs": 1},
        observe=seen_by_main,
    )
