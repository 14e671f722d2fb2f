"""Gradients without a parameter, and objects of the trainer that the loss changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..kit import (
    LABELS,
    Each,
    Inputs,
    LossAndOutputs,
    Script,
    bert,
    case,
    classified,
    own_loss,
    plain_loss,
    pool,
    samples,
    with_loss,
)
from .attack_front import OnBert
from .attack_recipes_front import of

REENTRANT = {"use_reentrant": True}

# ---------------------------------------------------------------------------------------------------------
# Reentrant gradient checkpoints: a trained layer gets a gradient only if its input requires one
# ---------------------------------------------------------------------------------------------------------


def half_frozen(model: Any = None, **fields: Any) -> Script:
    """A BERT whose embeddings and lower layers are frozen."""
    model = model or bert()
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[:2].requires_grad_(False)
    return of(model, data=samples(32, 8, 8), **fields)


@case("K1")
def reentrant_checkpoints_above_frozen_layers() -> Script:
    """The embeddings' output is made to require a gradient, which upper layers need in reentrant checkpoints."""
    return half_frozen(options={"gradient_checkpointing": True, "gradient_checkpointing_kwargs": REENTRANT})


@case("K1")
def reentrant_checkpoints_by_hand() -> Script:
    """The script itself turns reentrant checkpoints on."""
    model = bert()
    model.gradient_checkpointing_enable(REENTRANT)
    return half_frozen(model)


@case("K1")
def reentrant_checkpoints_above_adapters() -> Script:
    """Adapters of upper layers alone are trained, in reentrant checkpoints."""
    chosen: dict[str, Any] = {"target_modules": ["query", "value"], "layers_to_transform": [2, 3]}
    model = get_peft_model(bert(), LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False, **chosen))
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": REENTRANT}
    return of(model, data=samples(32, 8, 8), options=options)


@case("K1")
def reentrant_checkpoints_from_the_third_epoch() -> Script:
    """A callback turns reentrant checkpoints on while outputs of frozen layers are read."""

    def turn_on(callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 8:
            model.gradient_checkpointing_enable(REENTRANT)

    return half_frozen(callbacks=[Each(turn_on, "on_step_begin")])


class Checkpointed(OnBert):
    """Runs the frozen BERT in a reentrant checkpoint of its own, and a trained layer in another one."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.layer, self.writes = nn.Linear(self.head.in_features, self.head.in_features), writes
        self.bert.enable_input_require_grads()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedded(input_ids, attention_mask)
        if self.writes:
            x = x.mul_(1.5)
        x = checkpoint(lambda x: torch.tanh(self.layer(x)), x, use_reentrant=True)
        return classified(self.head(pool(x, attention_mask)), labels)

    def embedded(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


class Inside(Checkpointed):
    def embedded(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        anything = torch.ones(1, requires_grad=True)
        run: Any = super().embedded
        return checkpoint(lambda _: run(input_ids, attention_mask), anything, use_reentrant=True)


@case("K1")
def reentrant_checkpoint_of_a_layer_above() -> Script:
    """A trained layer of the user's runs in a reentrant checkpoint above a frozen BERT."""
    return of(Checkpointed(), data=samples(32, 8, 8))


@case("K1")
def reentrant_checkpoint_around_the_frozen_module() -> Script:
    """The frozen module itself runs in a reentrant checkpoint: its output gets a graph after it has returned."""
    return of(Inside(), data=samples(32, 8, 8))


@case("K1")
def written_output_that_requires_a_gradient() -> Script:
    """The model writes into a copy of the output, which requires a gradient, in place."""
    return of(Checkpointed(writes=True), data=samples(32, 8, 8))


# ---------------------------------------------------------------------------------------------------------
# What the loss changes: modules of the trainer, and the optimizer's state
# ---------------------------------------------------------------------------------------------------------

NAMES_IT = "trainer.critic was changed by the loss"


def attach(trainer: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        trainer.critic = nn.Linear(LABELS, 1)
    trainer.critics_optimizer = torch.optim.SGD(trainer.critic.parameters(), 0.1)


def adversarial(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
    """The critic is trained on the logits, and the model against the critic."""
    outputs = model(**inputs)
    if model.training:
        trainer.critics_optimizer.zero_grad()
        trainer.critic(outputs["logits"].detach()).tanh().mean().sub(1).square().backward()
        trainer.critics_optimizer.step()
    trainer.critic.requires_grad_(False)
    loss = outputs["loss"] + trainer.critic(outputs["logits"]).tanh().mean()
    trainer.critic.requires_grad_(True)
    return loss, outputs


class Judges:
    """Evaluates with the critic, on every process."""

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            scores: Any = self.critic(model(**inputs)["logits"])  # type: ignore[attr-defined]
        return scores.mean(), scores, inputs["labels"]


def with_critic(**fields: Any) -> Script:
    evaluated = {"keywords": {"eval_dataset": samples(16)}, "options": {"eval_strategy": "steps", "eval_steps": 3}}
    return with_loss(adversarial, wire=attach, **{**evaluated, **fields})


@case("K2")
def critic_of_the_loss_alone() -> Script:
    """The loss trains a module of the trainer, which only the loss reads, also in evaluations."""
    return with_critic()


@case("K2", expect="exact", because=NAMES_IT)
def critic_that_judges_in_evaluations() -> Script:
    """The loss trains a module of the trainer that prediction_step reads on every process."""
    return with_critic(trainer=own_loss(adversarial, Judges))


@case("K2", expect="exact", because="trainer.teacher was changed by the loss")
def average_of_the_loss() -> Script:
    """The loss moves a teacher of transformers, as an average does; a callback reads it."""

    def attach(trainer: Any) -> None:
        trainer.teacher = bert(num_hidden_layers=1).requires_grad_(False)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        with torch.no_grad():
            trainer.teacher.classifier.weight.mul_(0.5)
        return plain_loss(trainer, model, inputs)

    def slow_down(callback: Each, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        norm = float(callback.trainer.teacher.classifier.weight.norm())
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + norm)

    return with_loss(loss, wire=attach, callbacks=[Each(slow_down)])


@case("K2", expect="exact", because=NAMES_IT)
def critic_read_in_a_callback() -> Script:
    """The loss trains a module of the trainer, by which a callback chooses the rate."""

    def choose(callback: Each, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + float(callback.trainer.critic.weight.norm()))

    return with_critic(callbacks=[Each(choose)])


@case("K2")
def critic_trained_twice() -> Script:
    """The loss trains a module of the trainer, in two trainings and in the evaluation between them."""

    def drive(trainer: Any) -> Any:
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        trainer.train()
        return loss

    return with_critic(drive=drive)


def optimizer_in_loss(change: Callable[[Any], None]) -> Script:
    """The loss changes the optimizer's state in the third step."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if model.training and trainer.state.global_step == 2:
            change(trainer.optimizer.state)
        return plain_loss(trainer, model, inputs)

    return with_loss(loss, options={"optim": "adamw_torch", "adam_epsilon": 1e-4})


STATE = "has changed the state of trainer.optimizer"


@case("K2", "K2R2", expect="exact", because=STATE)
def optimizer_state_emptied_by_the_loss() -> Script:
    """The loss empties the optimizer's state."""
    return optimizer_in_loss(lambda state: state.clear())


@case("K2", expect="exact", because=STATE)
def optimizer_state_written_by_the_loss() -> Script:
    """The loss halves the averages in the optimizer's state."""

    def halve(state: Any) -> None:
        for of_parameter in state.values():
            of_parameter["exp_avg"].mul_(0.5)

    return optimizer_in_loss(halve)


# ---------------------------------------------------------------------------------------------------------
# Uses of a value that only the last stage has
# ---------------------------------------------------------------------------------------------------------


def kept_and_used(use: Callable[[Any], object]) -> Script:
    """The loss keeps a tensor on the trainer, and a callback uses it on all stages."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        trainer.kept = outputs["logits"].detach()
        return outputs["loss"], outputs

    def act(callback: Each, state: Any, control: Any, **_: Any) -> None:
        use(callback.trainer.kept)

    return with_loss(loss, callbacks=[Each(act)])


KEPT = "trainer.kept was changed by the loss"


@case("K2", expect="exact", because=KEPT)
def kept_tensor_in_a_function_of_torch() -> Script:
    """A callback gives a tensor that the loss has kept to a function of torch."""
    return kept_and_used(lambda kept: torch.stack([kept, kept]))


@case("K2", expect="exact", because=KEPT)
def kept_tensor_in_other_operators() -> Script:
    """A callback uses a tensor that the loss has kept with an operator that is seldom used."""
    return kept_and_used(lambda kept: +kept)
