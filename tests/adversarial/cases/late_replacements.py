"""Losses, factors and batch sizes that a script replaces while it trains, and losses that call the trainer.

The loss, its factor, and the batch sampler are replaced by callbacks. A loss evaluates, saves, clips and steps.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.trainer_pt_utils import LabelSmoother
from user_code.kit import Rows

from ..kit import (
    LABELS,
    VOCABULARY,
    WIDTH,
    Each,
    Inputs,
    LossAndOutputs,
    Script,
    bert,
    case,
    own_loss,
    plain_loss,
    samples,
    with_loss,
)

# ---------------------------------------------------------------------------------------------------------
# Another loss from the third step on
# ---------------------------------------------------------------------------------------------------------


def later(change: Callable[[Any], object], model: nn.Module | None = None, **fields: Any) -> Script:
    """A callback changes the trainer after the second step. Two micro-batches in each step."""

    def act(callback: Each, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            change(callback.trainer)

    fields = {"data": samples(48), "product": {"num_microbatches": 2}, "callbacks": [Each(act)], **fields}
    return Script(model=model or bert(), options={"num_train_epochs": 1, "label_names": ["labels"]}, **fields)


def of_batch(logits: Tensor, labels: Tensor, weight: float = 1.0) -> Tensor:
    """A loss that is no mean over samples."""
    return F.cross_entropy(logits, labels) + weight * logits.var(0).sum()


def function_of_batch(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return of_batch(outputs["logits"], labels)


def method_of_batch(
    trainer: Any, model: Any, inputs: Inputs, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    outputs = model(**inputs)
    loss = of_batch(outputs.logits, inputs["labels"])
    return (loss, outputs) if return_outputs else loss


def smooth(trainer: Any) -> None:
    trainer.label_smoother = LabelSmoother(0.3)


def replace_method(trainer: Any) -> None:
    trainer.compute_loss = MethodType(method_of_batch, trainer)


@case("K2", "R2", expect="exact", because="label_smoother")
def label_smoother_from_step_3() -> Script:
    """A callback switches label smoothing on."""
    return later(smooth)


@case("K2", expect="exact", because="label_smoother")
def label_smoother_from_step_3_interleaved() -> Script:
    """A callback switches label smoothing on; virtual stages."""
    return later(smooth, product={"pipeline_schedule": "interleaved1f1b"})


@case("K1")
def label_smoother_from_step_3_alone() -> Script:
    """A callback switches label smoothing on; nothing was found out about the loss of one process."""
    return later(smooth, product={})


@case("K2", "R2", expect="exact", because="label_smoother")
def label_smoother_on_main_process() -> Script:
    """A callback switches label smoothing on, on the main process only."""
    return later(lambda trainer: smooth(trainer) if trainer.is_world_process_zero() else None)


@case("K2", "R2", expect="exact", because="compute_loss_func")
def compute_loss_func_from_step_3() -> Script:
    """A callback sets compute_loss_func."""
    return later(lambda trainer: setattr(trainer, "compute_loss_func", function_of_batch))


@case("K2", "R2", expect="exact", because="compute_loss")
def compute_loss_from_step_3() -> Script:
    """A callback sets compute_loss on the trainer."""
    return later(replace_method)


@case("K1")
def compute_loss_from_step_3_alone() -> Script:
    """A callback sets compute_loss on the trainer; one process."""
    return later(replace_method, product={})


@case("K2", "R2", expect="exact", because="compute_loss")
def compute_loss_of_class_from_step_3() -> Script:
    """A callback sets compute_loss of the trainer's class."""
    return later(lambda trainer: setattr(type(trainer), "compute_loss", method_of_batch), trainer=type("Own", (), {}))


@case("K2", "R2", expect="exact", because="loss_function")
def loss_function_of_model_from_step_3() -> Script:
    """A callback sets the loss_function of a transformers model."""

    def function(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        return of_batch(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1), 5.0)

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": WIDTH, "n_layer": 4, "n_head": 2}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)
    texts = samples(48)
    words = Rows([{**texts[i], "labels": texts[i]["input_ids"].clone()} for i in range(len(texts))])
    return later(
        lambda trainer: setattr(trainer.model, "loss_function", function), GPT2LMHeadModel(config), data=words
    )


@case("K2", "R2")
def label_smoother_between_steps() -> Script:
    """A callback sets a label smoother, and another one removes it before the next step."""
    return later(
        smooth,
        callbacks=[
            Each(lambda callback, state, control, **_: smooth(callback.trainer)),
            Each(
                lambda callback, state, control, **_: setattr(callback.trainer, "label_smoother", None),
                "on_step_begin",
            ),
        ],
    )


@case("K2")
def own_loss_from_step_3() -> Script:
    """A loss of the user's is replaced by another one; it drives the stages either way."""
    return later(replace_method, trainer=own_loss(plain_loss))


@case("K2", "R2")
def compute_loss_func_removed_in_step_3() -> Script:
    """A callback removes compute_loss_func: the loss is the model's own from then on, and still drives the stages."""

    def doubled(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return 2 * F.cross_entropy(outputs["logits"], labels)

    def set_to(function: Any) -> Callable[[Any], None]:
        return lambda trainer: setattr(trainer, "compute_loss_func", function)

    return later(set_to(None), wire=set_to(doubled))


# ---------------------------------------------------------------------------------------------------------
# The loss, which runs on the last stage, calls the trainer
# ---------------------------------------------------------------------------------------------------------


def eval_same(trainer: Any) -> None:
    """As many samples in each batch of an evaluation, over all processes."""
    trainer.args.per_device_eval_batch_size = 8 // trainer.args.world_size


def calling(call: Callable[[Any, Any], object], **fields: Any) -> Script:
    """The loss of the third step makes this call."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        if model.training and trainer.state.global_step == 2:
            call(trainer, model)
        return outputs["loss"], outputs

    return with_loss(loss, keywords={"eval_dataset": samples(16)}, wire=eval_same, **fields)


@case("K2", "K2R2", expect="exact", because="called evaluate()")
def evaluation_in_loss() -> Script:
    """The loss evaluates."""
    return calling(lambda trainer, model: trainer.evaluate())


@case("K2", expect="exact", because="called evaluate()")
def evaluation_in_declared_loss() -> Script:
    """The loss, with a declared reduction, evaluates."""
    product = {"loss_reduction": "mean", "num_microbatches": 2}
    return calling(lambda trainer, model: trainer.evaluate(), product=product)


@case("K2", expect="exact", because="called predict()")
def prediction_in_loss() -> Script:
    """The loss predicts."""
    return calling(lambda trainer, model: trainer.predict(samples(8)))


@case("K2", "K2R2", expect="exact", because="called save_model()")
def saving_in_loss() -> Script:
    """The loss saves the model."""
    return calling(lambda trainer, model: trainer.save_model())


@case("K2", expect="exact", because="saves a checkpoint")
def checkpoint_in_loss() -> Script:
    """The loss saves a checkpoint."""
    return calling(lambda trainer, model: trainer._save_checkpoint(model, None))


@case("K2", "K2R2", expect="exact", because="clip_grad_norm_")
def clipping_in_loss() -> Script:
    """The loss clips gradients by the accelerator."""
    return calling(lambda trainer, model: trainer.accelerator.clip_grad_norm_(model.parameters(), 0.1))


@case("K2", "K2R2", expect="exact", because="optimizer.step()")
def step_in_loss() -> Script:
    """The loss steps the trainer's optimizer between two accumulated batches, before it calls the model."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        trainer.calls = getattr(trainer, "calls", 0) + 1
        if trainer.calls % 4 == 0:
            trainer.optimizer.optimizer.step()
        outputs = model(**inputs)
        return outputs["loss"], outputs

    return with_loss(loss, batch=4, options={"gradient_accumulation_steps": 2})


@case("K2", expect="exact", because="optimizer.step()")
def step_of_inner_optimizer_in_loss() -> Script:
    """The loss steps the optimizer inside Accelerate's; a callback may call the model."""
    callbacks = [Each(lambda callback, state, control, **_: None)]
    return calling(lambda trainer, model: trainer.optimizer.optimizer.step(), callbacks=callbacks)


@case("K2", "K2R2", expect="exact", because="called evaluate()")
def evaluation_in_loss_of_evaluation() -> Script:
    """The loss of an evaluation evaluates again."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        if not model.training and trainer.state.global_step == 2 and not getattr(trainer, "is_inside", False):
            trainer.is_inside = True
            trainer.evaluate()
            trainer.is_inside = False
        return outputs["loss"], outputs

    options = {"eval_strategy": "steps", "eval_steps": 2}
    return with_loss(loss, keywords={"eval_dataset": samples(16)}, wire=eval_same, options=options)


@case("K2")
def critic_steps_in_loss() -> Script:
    """A critic with an optimizer of its own is trained and clipped in the loss; a callback evaluates."""
    torch.manual_seed(3)
    critic = nn.Linear(LABELS, 1)
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        if model.training:
            score = critic(outputs["logits"].detach())
            optimizer.zero_grad()
            (score - inputs["labels"][:, None]).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(critic.parameters(), 0.1)
            optimizer.step()
        return outputs["loss"] + 0.1 * critic(outputs["logits"]).mean(), outputs

    def evaluate(callback: Each, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            callback.trainer.evaluate()

    return with_loss(loss, keywords={"eval_dataset": samples(16)}, wire=eval_same, callbacks=[Each(evaluate)])


# ---------------------------------------------------------------------------------------------------------
# The accelerator divides the loss
# ---------------------------------------------------------------------------------------------------------


def divided(steps: int, event: str = "on_train_begin", **fields: Any) -> Script:
    def act(callback: Each, state: Any, control: Any, **_: Any) -> None:
        callback.trainer.accelerator.gradient_accumulation_steps = steps

    return with_loss(callbacks=[Each(act, event)], **fields)


@case("K1", "K2", "R2", "K2R2")
def accumulation_of_accelerator() -> Script:
    """A callback sets gradient_accumulation_steps of the accelerator, which divides the loss in its backward()."""
    return divided(2)


@case("K1", "K2", "R2")
def accumulation_of_accelerator_with_stock_loss() -> Script:
    """A callback sets gradient_accumulation_steps of the accelerator; the loss is computed on micro-batches."""

    def change(trainer: Any) -> None:
        trainer.accelerator.gradient_accumulation_steps = 3

    return later(change)


@case("K1", "K2", "R2")
def accumulation_changed_after_an_epoch() -> Script:
    """A callback accumulates two batches from the second epoch on, and tells the accelerator."""

    def act(callback: Each, state: Any, control: Any, **_: Any) -> None:
        callback.trainer.args.gradient_accumulation_steps = 2
        callback.trainer.accelerator.gradient_accumulation_steps = 2

    return with_loss(callbacks=[Each(act, "on_epoch_end")], options={"num_train_epochs": 2})


# ---------------------------------------------------------------------------------------------------------
# The batch sampler
# ---------------------------------------------------------------------------------------------------------


def setting(name: str, value: Callable[[Any], object]) -> Script:
    """A callback sets an attribute of the training loader's batch sampler when an epoch begins."""

    def act(callback: Each, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        batch_sampler = train_dataloader.batch_sampler
        while not hasattr(batch_sampler, "batch_size") and hasattr(batch_sampler, "batch_sampler"):
            batch_sampler = batch_sampler.batch_sampler
        setattr(batch_sampler, name, value(getattr(batch_sampler, name)))

    return with_loss(callbacks=[Each(act, "on_epoch_begin")], options={"num_train_epochs": 2})


@case("K1", "K2", "R2", "K2R2", expect="exact", because="per_device_train_batch_size")
def batch_size_of_sampler() -> Script:
    """AdaBatch: each epoch has another batch size."""
    return setting("batch_size", lambda size: max(1, size // 2))


@case("K1", "K2", "R2", expect="exact", because="_get_train_sampler")
def sampler_of_batch_sampler() -> Script:
    """Each epoch has another sampler."""
    return setting("sampler", lambda sampler: torch.utils.data.SequentialSampler(range(24)))
