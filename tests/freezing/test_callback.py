"""`LayerFreezeCallback` in a plain Trainer: what freezes, what goes on as before, DDP, resuming."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_zoo import MODELS
from torch import Tensor, nn
from training_data import PadCollator, TrainingData
from training_runs import largest_difference, losses_of, weights_of
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer.parts.freezing.callback import LayerFreezeCallback
from hf_pipetransformer.parts.freezing.policies import FreezeDecision, FreezePolicy

STEPS_PER_EPOCH = 3
SCHEDULE = {"name": "schedule", "schedule": {1: 1, 2: 3}}
"""Bert has 4 layers: one frozen in the second epoch, three in the third."""


def bert(dropout: float = 0.0) -> nn.Module:
    model = MODELS["bert-classification"].build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return model


def make_trainer(
    model: nn.Module,
    *callbacks: TrainerCallback,
    folder: str = "out",
    kind: str = "text-classification",
    **options: Any,
) -> Trainer:
    """Three epochs of three steps; on two processes each takes half of a step's rows."""
    options = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
        "weight_decay": 0.05,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "optim": "adamw_torch",
        "adam_epsilon": 1e-4,
        "use_cpu": True,
        "seed": 42,
        **options,
    }
    samples = STEPS_PER_EPOCH * options["per_device_train_batch_size"] * options.get("gradient_accumulation_steps", 1)
    arguments = TrainingArguments(folder, **options)
    return Trainer(
        model,
        arguments,
        train_dataset=TrainingData(kind, samples * arguments.world_size),
        data_collator=PadCollator(kind),
        callbacks=list(callbacks),
    )


class Recorder(TrainerCallback):
    """Calls `look(model, optimizer)` at the end of every step and keeps the results, by global step."""

    def __init__(self, look: Callable[..., Any]) -> None:
        self.look = look
        self.seen: dict[int, Any] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen[state.global_step] = self.look(kwargs["model"], kwargs["optimizer"])


class FreezeByHand(TrainerCallback):
    """A user's own freezing of a BERT: at the begin of epoch e, `{e: layers}`."""

    def __init__(self, layers: dict[int, int]) -> None:
        self.layers = layers

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        count = self.layers.get(round(state.epoch))
        if count:
            bert = kwargs["model"].bert
            for module in (bert.embeddings, *bert.encoder.layer[:count]):
                module.requires_grad_(False)


def frozen_names(count: int) -> tuple[str, ...]:
    return ("bert.embeddings.", *(f"bert.encoder.layer.{index}." for index in range(count)))


# ------------------------------------------------------------------------------------ one process
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}])
def test_freezes_as_by_hand(options: dict[str, Any]) -> None:
    """Frozen weights stand still, without gradients or state; the rest trains as by hand. A training begins anew."""

    def look(model: Any, optimizer: Any) -> dict[str, Any]:
        return {
            "weights": weights_of(model),
            "in train mode": [layer.training for layer in model.bert.encoder.layer],
            "trainable": {name for name, p in model.named_parameters() if p.requires_grad},
            "with state": {name for name, p in model.named_parameters() if p in optimizer.state},
        }

    recorder = Recorder(look)
    trainer = make_trainer(bert(), LayerFreezeCallback(SCHEDULE), recorder, **options)
    by_hand = make_trainer(bert(), FreezeByHand({1: 1, 2: 3}), **options)
    by_hand.train()
    for is_second in (False, True):
        trainer.train()
        if not is_second:
            assert losses_of(trainer) == pytest.approx(losses_of(by_hand), abs=1e-6 if options else 0)
            difference, _ = largest_difference(weights_of(trainer.model), weights_of(by_hand.model))
            assert difference <= (1e-6 if options else 0)
        names = {name for name, _ in trainer.model.named_parameters()}
        for step, count in ((3, 0), (4, 1), (6, 1), (7, 3), (9, 3)):
            seen, since = recorder.seen[step], recorder.seen[3 if count < 3 else 6]
            active = {name for name in names if count == 0 or not name.startswith(frozen_names(count))}
            assert seen["in train mode"] == [False] * count + [True] * (4 - count)
            assert seen["trainable"] == seen["with state"] == active
            assert all(torch.equal(seen["weights"][name], since["weights"][name]) for name in names - active)
        assert all(p.requires_grad for p in trainer.model.parameters())  # as before the training


# ------------------------------------------------------------------------------------ decisions
class Asked(FreezePolicy):
    """Notes the decisions that it gets, and freezes one layer at each but the first."""

    def __init__(self) -> None:
        self.decisions: list[FreezeDecision] = []

    def num_frozen(self, decision: FreezeDecision) -> int:
        self.decisions.append(decision)
        return decision.index


@pytest.mark.parametrize(("strategy", "asked_at"), [("epoch", [0, 3, 6]), ("steps", [0, 2, 4, 6, 8])])
def test_decisions(strategy: str, asked_at: list[int]) -> None:
    """Gradient norms are root mean squares over the steps since the last one; there are none before the first."""

    class Norms(TrainerCallback):
        """The same from outside, after the step's backward."""

        def __init__(self) -> None:
            self.steps: list[list[float]] = []

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gradients = [
                [p.grad.flatten() for p in layer.parameters() if p.grad is not None]
                for layer in kwargs["model"].bert.encoder.layer
            ]
            self.steps.append([float(torch.cat(of_layer).norm()) if of_layer else 0.0 for of_layer in gradients])

    policy, seen = Asked(), Norms()
    callback = LayerFreezeCallback(policy, strategy, 2 if strategy == "steps" else None, max_frozen_layers=3)
    make_trainer(bert(), callback, seen).train()
    assert [d.global_step for d in policy.decisions] == asked_at
    assert [d.num_frozen for d in policy.decisions] == [0, 0, 1, 2, 3][: len(asked_at)]
    assert policy.decisions[0].gradient_norms is None
    for d, first in zip(policy.decisions[1:], asked_at, strict=False):
        expected = (
            torch.tensor(seen.steps[first : d.global_step], dtype=torch.float64).square().mean(0).sqrt().tolist()
        )
        assert d.gradient_norms == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------------------------------------------ refusals
class AddsLate(TrainerCallback):
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.add_callback(LayerFreezeCallback(SCHEDULE))


class CallsAPart(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        return nn.functional.cross_entropy(model.classifier(model.bert(**inputs).pooler_output), labels)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_what_cannot_freeze_is_refused() -> None:
    """Before the first update where it is known by then."""
    nothing_trains = bert()
    for name, parameter in nothing_trains.named_parameters():
        parameter.requires_grad_(name.startswith("bert.encoder.layer.0."))
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    adds, calls_a_part = AddsLate(), make_trainer(bert(), LayerFreezeCallback(SCHEDULE, "steps", 1))
    adds.trainer = make_trainer(bert(), adds)
    calls_a_part.__class__ = CallsAPart
    before = weights_of(calls_a_part.model)
    for trainer, words in (
        (make_trainer(nothing_trains, LayerFreezeCallback("alpha")), "leave nothing to train"),
        (
            make_trainer(bert(), LayerFreezeCallback("alpha"), ddp_static_graph=True),
            "combined with .*ddp_static_graph",
        ),
        (make_trainer(bert(), LayerFreezeCallback("alpha"), **reentrant), "cannot be combined with .*use_reentrant"),
        (make_trainer(Flat(), LayerFreezeCallback("alpha")), "no sequential stack of layers.*freeze nothing"),
        (calls_a_part, "has not called BertForSequenceClassification itself.*remove the callback"),
        (adds.trainer, "added while training was running"),
    ):
        with pytest.raises(ValueError, match=words):
            trainer.train()
    assert largest_difference(weights_of(calls_a_part.model), before)[0] == 0


def test_arguments_are_refused() -> None:
    for arguments, words in (
        (("beta",), "freeze_policy='beta'"),
        ((12,), "12 is not a freeze policy"),
        (("alpha", "sometimes"), "freeze_strategy='sometimes'"),
        (({"name": "alpha", "alpha": float("nan")},), "freeze_alpha=nan"),
        (({"name": "autofreeze", "percentile": 101},), "percentile=101"),
        (("alpha", "steps"), "freeze_steps"),
        (("alpha", "epoch", None, 0), "max_frozen_layers=0"),
    ):
        with pytest.raises(ValueError, match=words):
            LayerFreezeCallback(*arguments)


def test_a_policys_state_must_be_plain() -> None:
    class KeepsTensor(FreezePolicy):
        def state_dict(self) -> dict[str, Any]:
            return {"largest": torch.ones(2)}

    with pytest.raises(ValueError, match=r"KeepsTensor.state_dict .*tolist"):
        _ = LayerFreezeCallback(KeepsTensor()).memory


# ------------------------------------------------------------------------------------ resuming
@pytest.mark.parametrize(("saved_at", "restored_by"), [(3, "callback"), (7, "trainer")])
def test_resume_goes_on_with_what_is_frozen(saved_at: int, restored_by: str) -> None:
    """Resumed at an epoch's end, before its decision, and within an epoch, after it."""
    options = {
        "save_strategy": "steps",
        "save_steps": 1,
        "restore_callback_states_from_checkpoint": restored_by == "trainer",
    }
    policy = {"name": "adaptive", "alpha": 0.4}
    whole = make_trainer(bert(), callback := LayerFreezeCallback(policy), **options)
    whole.train()
    assert callback.num_frozen > 0

    recorder = Recorder(lambda model, _: sum(not layer.training for layer in model.bert.encoder.layer))
    resumed = make_trainer(bert(), LayerFreezeCallback(policy), recorder, **options)
    resumed.train(resume_from_checkpoint=f"out/checkpoint-{saved_at}")
    (restored,) = (c for c in resumed.callback_handler.callbacks if isinstance(c, LayerFreezeCallback))
    assert restored.num_frozen == callback.num_frozen == recorder.seen[9]
    assert restored.state() == callback.state()
    assert losses_of(resumed) == losses_of(whole)
    assert largest_difference(weights_of(resumed.model), weights_of(whole.model))[0] == 0


def test_own_policies_survive_but_not_by_the_trainer() -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    make_trainer(bert(), LayerFreezeCallback(Asked()), **options).train()
    policy = Asked()
    callback = LayerFreezeCallback(policy)
    make_trainer(bert(), callback).train(resume_from_checkpoint="out/checkpoint-4")
    assert [d.index for d in policy.decisions] == [2] and callback.num_frozen == 2
    with pytest.raises(ValueError, match="restore_callback_states_from_checkpoint"):
        again = make_trainer(bert(), LayerFreezeCallback(Asked()), restore_callback_states_from_checkpoint=True)
        again.train(resume_from_checkpoint="out/checkpoint-4")
