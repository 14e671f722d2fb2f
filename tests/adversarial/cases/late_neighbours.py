"""Scripts of neighbour libraries, over several stages."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from transformers import TrainerCallback

from ..kit import Each, Script, case, own_loss, plain_loss, samples, with_loss

SAVES: dict[str, Any] = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 3}


class Card:
    """sentence-transformers' `_save` writes a model card, for which it encodes sentences; errors are warnings."""

    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        row = samples()[0]
        with torch.no_grad(), suppress(Exception):
            self.model(input_ids=row["input_ids"][None])


class MainsCard:
    """The same on the main process alone, as a stock `_save` of sentence-transformers on transformers below 5.24."""

    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)  # type: ignore[misc]
        row = samples()[0]
        if self.args.should_save:
            with torch.no_grad():
                self.model(input_ids=row["input_ids"][None])


def nothing(callback: Any, state: Any, control: Any, **others: Any) -> None:
    """A callback of step events: with one, calls of the model outside of the steps are served."""


def script(card: type) -> Script:
    return with_loss(
        trainer=type("Saving", (own_loss(plain_loss), card), {}), callbacks=[Each(nothing)], options=SAVES
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
    )
