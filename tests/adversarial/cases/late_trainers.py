"""The trainer after training: its optimizer. Its `log` that changes values in place. Counts of trained parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_pipetransformer.pipeline import optimizer_state

from ..kit import Each, Inputs, LossAndOutputs, Network, Script, bert, case, classified, own_loss, pad, pool, samples

ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2, "num_train_epochs": 1}

# ---------------------------------------------------------------------------------------------------------
# The optimizer after training
# ---------------------------------------------------------------------------------------------------------


def steps_by_hand(trainer: Any) -> None:
    """Three steps with the trainer's optimizer."""
    data = samples(seed=3)
    for _ in range(3):
        trainer.optimizer.zero_grad()
        trainer.model(**pad([data[row] for row in range(8)]))["loss"].backward()
        trainer.optimizer.step()


def state_of(optimizer: Any) -> list[Any]:
    """The optimizer's state, in numbers."""
    state = optimizer.state_dict()["state"]
    return [(n, float(s["step"]), round(float(s["exp_avg_sq"].sum().sqrt()), 4)) for n, s in sorted(state.items())]


def then(act: Any, **fields: Any) -> Script:
    """Trains, and does something afterwards."""

    def drive(trainer: Any) -> Any:
        trainer.train()
        return act(trainer)

    return Script(**{"model": Network(), "options": ADAM, "drive": drive, **fields})


@case("K2", "K2R2")
def optimizer_by_hand_after() -> Script:
    """Steps by hand with the trainer's optimizer after train()."""
    return then(steps_by_hand)


@case("K2")
def optimizer_by_hand_in_on_train_end() -> Script:
    """Steps by hand in on_train_end."""
    act = Each(lambda callback, *_, **__: steps_by_hand(callback.trainer), "on_train_end")
    return Script(model=Network(), options=ADAM, callbacks=[act])


@case("K3")
def optimizer_state_after() -> Script:
    """The state_dict() of the trainer's optimizer after train()."""
    return then(lambda trainer: state_of(trainer.optimizer), batch=6, options={**ADAM, "max_steps": 4})


@case("R2")
def optimizer_state_after_division() -> Script:
    """Likewise where replicas divide the state."""
    return then(lambda trainer: state_of(trainer.optimizer), product={"replica_sharding": "optimizer"})


def train_by_others(trainer: Any) -> Any:
    """Evaluates, steps by hand, trains again, and lets a second trainer train with the optimizer."""
    trainer.evaluate(samples(16, seed=5))
    steps_by_hand(trainer)
    trainer.train()
    second = type(trainer)(
        model=trainer.model,
        args=trainer.args,
        train_dataset=samples(seed=9),
        data_collator=pad,
        optimizers=(trainer.optimizer, None),
    )
    second.train()
    trainer.train()
    return state_of(trainer.optimizer)


@case("K2")
def optimizer_of_two_trainers() -> Script:
    """The optimizer is used by hand, by a second train(), by a second trainer, and by the first one again."""
    return then(train_by_others)


class LossWithScale:
    """A loss with a parameter of its own, which the trainer's optimizer trains."""

    def create_optimizer(self: Any, *model: Any) -> Any:
        super().create_optimizer(*model)  # type: ignore[misc]
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.optimizer.add_param_group({"params": [self.scale]})
        return self.optimizer


@case("K3")
def optimizer_with_parameter_of_loss() -> Script:
    """The state of a loss's own parameter after train()."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs["loss"] * trainer.scale, outputs

    def act(trainer: Any) -> list[Any]:
        return [*state_of(trainer.optimizer), trainer.scale.item()]

    return then(act, trainer=own_loss(loss, LossWithScale), batch=6)


def without_room(act: Any) -> Script:
    """The processes have no memory for all of the state."""

    def drive(trainer: Any) -> Any:
        optimizer_state.has_room = lambda *_: False  # type: ignore[assignment]
        trainer.train()
        return act(trainer)

    return Script(model=Network(), options=ADAM, drive=drive)


@case("K2", expect="exact", because="no memory for all of it")
def optimizer_without_room() -> Script:
    """Steps by hand where the optimizer stays divided."""
    return without_room(steps_by_hand)


@case("K2")
def optimizer_without_room_trains_again() -> Script:
    """A second train() where the optimizer stays divided."""
    return without_room(lambda trainer: trainer.train().training_loss)


@case("K2", expect="exact", because="it was interrupted")
def optimizer_after_interruption() -> Script:
    """A callback's error ends train(), the script catches it, and reads the optimizer's state."""

    def fail(callback: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            raise KeyError("enough")

    def drive(trainer: Any) -> Any:
        try:
            trainer.train()
        except KeyError:
            return state_of(trainer.optimizer)

    return Script(model=Network(), options=ADAM, callbacks=[Each(fail)], drive=drive)


# ---------------------------------------------------------------------------------------------------------
# log
# ---------------------------------------------------------------------------------------------------------

EVALUATED = {"num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch"}


class LogsPerplexity:
    """Adds a metric to the values, in place, as Trainer.log adds the epoch."""

    def log(self, logs: dict[str, float], *others: Any) -> None:
        if "eval_loss" in logs:
            logs["eval_perplexity"] = math.exp(logs["eval_loss"])
        super().log(logs, *others)  # type: ignore[misc]


class LogsOtherDict:
    """Logs another dict, and changes the caller's afterwards."""

    def log(self, logs: dict[str, float], *others: Any) -> None:
        super().log({"mine": 1.0, **logs}, *others)  # type: ignore[misc]
        logs["behind"] = len(logs)
        logs.pop("eval_runtime", None)


def metrics_of(trainer: Any) -> list[Any]:
    """The names in the results of train() and evaluate(), and the best model."""
    names = [sorted(trainer.train().metrics), sorted(trainer.evaluate())]
    return [*names, trainer.state.best_metric, trainer.state.best_global_step]


def logging_by(log: type, batch: int = 8, **options: Any) -> Script:
    keywords = {"eval_dataset": samples(24, seed=2)}
    options = {**EVALUATED, **options}
    return Script(bert(), samples(24), trainer=log, keywords=keywords, options=options, drive=metrics_of, batch=batch)


@case("K2", "K2R2")
def log_adds_best_metric() -> Script:
    """The best model is chosen by a metric that `log` adds in place."""
    return logging_by(LogsPerplexity, metric_for_best_model="perplexity", load_best_model_at_end=True)


@case("K3", "R2")
def log_leaves_dict_otherwise() -> Script:
    """`log` passes another dict on, and leaves its own with one value more and one fewer."""
    return logging_by(LogsOtherDict, batch=6)


# ---------------------------------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------------------------------


@case("K2", "K3")
def counts_of_the_library() -> Script:
    """Callbacks count trained parameters by functions of transformers."""
    counts: list[int] = []

    def count(callback: Any, *_: Any, model: Any = None, **__: Any) -> None:
        trained = callback.trainer.get_num_trainable_parameters()
        counts.extend([trained, model.num_parameters(only_trainable=True), model.num_parameters()])

    model = bert()
    model.bert.embeddings.requires_grad_(False)
    callbacks = [Each(count, "on_train_begin"), Each(count)]
    return Script(model, options={"max_steps": 3}, callbacks=callbacks, batch=6, observe=lambda _: {"n": counts})


class ReadsFlag(Network):
    """Its head gets detached features while the first layer is frozen."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        if not self.layers[0].linear.weight.requires_grad:
            x = x.detach()
        return classified(self.head(pool(x, attention_mask)), labels)


@case("K2")
def forward_reads_flag() -> Script:
    """A model's forward reads the flag of a parameter on another stage."""
    return Script(model=ReadsFlag(), options={"num_train_epochs": 1})
