"""A loss of the user's over several stages, beside callbacks, clipping, accumulation, evaluations and schedules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kit import (
    VOCABULARY,
    Each,
    Inputs,
    LossAndOutputs,
    Network,
    Script,
    case,
    own_loss,
    pad,
    plain_loss,
    samples,
    with_loss,
)

# ---------------------------------------------------------------------------------------------------------
# State that the loss leaves on the trainer
# ---------------------------------------------------------------------------------------------------------


def counting(act: Any, **fields: Any) -> Script:
    """The loss counts its runs in `trainer.runs`; `act(runs, state, control, **others)` is called after each step."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        trainer.runs = getattr(trainer, "runs", 0) + 1
        return outputs["loss"], outputs

    def read(callback: Each, state: Any, control: Any, **others: Any) -> None:
        act(getattr(callback.trainer, "runs", 0), state, control, **others)

    return with_loss(loss, callbacks=[Each(read)], **fields)


@case("K2", expect="exact", because="runs")
def callback_sets_rate() -> Script:
    """A callback lowers the learning rate by the loss's counter."""

    def act(runs: int, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + runs)

    return counting(act)


@case("K2", expect="exact", because="runs")
def callback_freezes() -> Script:
    """A callback freezes a layer by the loss's counter."""

    def act(runs: int, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if runs == 3:
            model.layers[0].requires_grad_(False)

    return counting(act)


@case("K2", expect="exact", because="should_training_stop")
def callback_stops() -> Script:
    """A callback ends the training by the loss's counter."""

    def act(runs: int, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= runs >= 3

    return counting(act)


@case("K2", expect="exact", because="evaluate()")
def callback_evaluates() -> Script:
    """A callback asks for an evaluation by the loss's counter."""

    def act(runs: int, state: Any, control: Any, **_: Any) -> None:
        control.should_evaluate |= runs == 3

    return counting(act, keywords={"eval_dataset": samples(8)})


@case("K2", expect="exact", because="should_save")
def callback_saves() -> Script:
    """A callback asks for a checkpoint by the loss's counter."""

    def act(runs: int, state: Any, control: Any, **_: Any) -> None:
        control.should_save |= runs == 3

    return counting(act)


class Curriculum:
    """A collator with a difficulty."""

    difficulty = 1

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = pad(rows)
        batch["input_ids"] = (batch["input_ids"] * self.difficulty) % VOCABULARY
        return batch


@case("K2")
def collator_reads_difficulty() -> Script:
    """The loss sets a difficulty that the collator reads."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        trainer.data_collator.difficulty = 1 + trainer.state.global_step % 3
        return outputs["loss"], outputs

    return with_loss(loss, collator=Curriculum())


def leaving(change: Any, act: Any, **fields: Any) -> Script:
    """`change(trainer, loss)` in each loss; `act(trainer, optimizer)` after each step, on every process."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        change(trainer, outputs["loss"].detach())
        return outputs["loss"], outputs

    def read(callback: Each, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        act(callback.trainer, optimizer)

    return with_loss(loss, callbacks=[Each(read)], **fields)


def set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@case("K2", "K2R2")
def rate_by_step_of_the_loss() -> Script:
    """The loss binds a rate, a list and a dictionary anew; a callback takes the learning rate from them."""

    def change(trainer: Any, loss: Tensor) -> None:
        trainer.rate = 0.05 / (1 + trainer.state.global_step)
        trainer.rates = [*getattr(trainer, "rates", []), trainer.rate]
        trainer.of_steps = {"last": trainer.rate, "name": ("a", None)}

    def act(trainer: Any, optimizer: Any) -> None:
        set_rate(optimizer, (trainer.rate + sum(trainer.rates) + trainer.of_steps["last"]) / 3)

    return leaving(change, act)


@case("K2")
def rate_that_preparing_resets() -> Script:
    """`_prepare_inputs`, which all stages call, binds a rate, and then the loss another: the callback takes that."""

    class Resets:
        def _prepare_inputs(self, inputs: Any) -> Any:
            self.rate = 0.2
            return super()._prepare_inputs(inputs)  # type: ignore[misc]

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        trainer.rate = 0.05 / (1 + trainer.state.global_step)
        return outputs["loss"], outputs

    def read(callback: Each, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        set_rate(optimizer, callback.trainer.rate)

    return with_loss(trainer=own_loss(loss, Resets), callbacks=[Each(read)])


@case("K2")
def rate_by_the_last_loss() -> Script:
    """The loss keeps its value as a number; a callback takes the learning rate from it."""
    return leaving(
        lambda trainer, loss: setattr(trainer, "latest", loss.item()),
        lambda trainer, optimizer: set_rate(optimizer, 0.05 * trainer.latest),
    )


@case("K2", "K2R2")
def rate_by_the_state() -> Script:
    """The loss leaves a number on `self.state`, where callbacks find it without the trainer."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        trainer.state.rate = 0.05 / (1 + trainer.state.global_step)
        return outputs["loss"], outputs

    def read(callback: Each, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        set_rate(optimizer, state.rate)

    return with_loss(loss, callbacks=[Each(read)])


@case("K2")
def rate_by_micro_batches() -> Script:
    """A loss that is declared to be a mean counts the samples that it has seen, in every micro-batch."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        trainer.seen = getattr(trainer, "seen", 0) + len(inputs["labels"])
        return outputs["loss"], outputs

    def read(callback: Each, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        set_rate(optimizer, 0.05 / callback.trainer.seen)

    return with_loss(loss, callbacks=[Each(read)], product={"loss_reduction": "mean"})


@case("K2", expect="exact", because="latest")
def rate_by_a_tensor() -> Script:
    """The loss keeps a running average in a tensor; a callback takes the learning rate from it."""

    def change(trainer: Any, loss: Tensor) -> None:
        trainer.latest = 0.9 * getattr(trainer, "latest", torch.ones(())) + 0.1 * loss

    return leaving(change, lambda trainer, optimizer: set_rate(optimizer, 0.05 * float(trainer.latest)))


@case("K2", expect="exact", because="latest")
def rate_by_a_tensor_in_place() -> Script:
    """The loss keeps a running average in place, in a tensor that all processes have made."""

    def change(trainer: Any, loss: Tensor) -> None:
        trainer.latest.mul_(0.9).add_(0.1 * loss)

    def wire(trainer: Any) -> None:
        trainer.latest = torch.ones(())

    return leaving(change, lambda trainer, optimizer: set_rate(optimizer, 0.05 * float(trainer.latest)), wire=wire)


@case("K2", expect="exact", because="parts")
def rate_by_a_list_of_tensors() -> Script:
    """The loss appends its value to a list; a callback takes the mean."""

    class Collects:
        parts: Any = ()

    def change(trainer: Any, loss: Tensor) -> None:
        trainer.parts = trainer.parts or []
        trainer.parts.append(loss)

    def act(trainer: Any, optimizer: Any) -> None:
        set_rate(optimizer, 0.05 * float(sum(trainer.parts)) / max(1, len(trainer.parts)))

    script = leaving(change, act)
    script.trainer = type("Both", (script.trainer, Collects), {})
    return script


@case("K2")
def list_in_place() -> Script:
    """The loss appends numbers to a list that every process has made; a callback takes the mean and empties it."""

    def wire(trainer: Any) -> None:
        trainer.parts = []

    def act(trainer: Any, optimizer: Any) -> None:
        set_rate(optimizer, 0.05 * sum(trainer.parts) / len(trainer.parts))
        trainer.parts.clear()

    return leaving(lambda trainer, loss: trainer.parts.append(loss.item()), act, wire=wire)


@case("K2", expect="exact", because="parts")
def long_list_in_place() -> Script:
    """The loss appends to a list with more than a hundred numbers."""

    def wire(trainer: Any) -> None:
        trainer.parts = [1.0] * 200

    def act(trainer: Any, optimizer: Any) -> None:
        set_rate(optimizer, 0.05 * sum(trainer.parts) / len(trainer.parts))

    return leaving(lambda trainer, loss: trainer.parts.append(loss.item()), act, wire=wire)


@case("K2")
def main_process_reads() -> Script:
    """The loss keeps tensors; a callback of the main process reads them."""
    seen: list[float] = []

    def act(trainer: Any, optimizer: Any) -> None:
        if trainer.is_world_process_zero():
            seen.append(float(trainer.latest))

    change = lambda trainer, loss: setattr(trainer, "latest", loss)  # noqa: E731
    return leaving(change, act, observe=lambda _: {"seen": list(seen)})


@case("K2")
def logs_in_the_loss_and_counts() -> Script:
    """The loss calls `log`, which the Trainer keeps in its own objects, and deletes an attribute."""

    def change(trainer: Any, loss: Tensor) -> None:
        if trainer.state.global_step == 2:
            trainer.log({"inner": loss.item()})
            del trainer.doubled
        elif trainer.state.global_step < 2:
            trainer.doubled = 2.0

    def act(trainer: Any, optimizer: Any) -> None:
        set_rate(optimizer, 0.05 * getattr(trainer, "doubled", 1.0))

    return leaving(change, act, options={"logging_steps": 5})


# ---------------------------------------------------------------------------------------------------------
# Gradients in the user's hands
# ---------------------------------------------------------------------------------------------------------


def before_the_step(act: Any) -> Each:
    """Calls `act(trainer, model, optimizer)` before each step of the optimizer."""

    def run(callback: Each, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        act(callback.trainer, model, optimizer)

    return Each(run, "on_pre_optimizer_step")


def clip_all(trainer: Any, model: Any, optimizer: Any) -> None:
    """Clip the norm of all gradients."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@case("K2", expect="exact", because="clip")
def clips_all_parameters() -> Script:
    """`clip_grad_norm_` of all parameters; a loss of the user's."""
    return with_loss(callbacks=[before_the_step(clip_all)])


@case("K2", "R2", expect="exact", because="clip")
def clips_all_parameters_with_stock_loss() -> Script:
    """`clip_grad_norm_` of all parameters; the model's own loss."""
    return with_loss(trainer=None, callbacks=[before_the_step(clip_all)])


@case("K2")
def clips_each_part() -> Script:
    """`clip_grad_norm_` of each layer."""

    def clip(trainer: Any, model: Any, optimizer: Any) -> None:
        for part in (*model.layers, model.head, model.embedding):
            torch.nn.utils.clip_grad_norm_(part.parameters(), 0.05)

    return with_loss(callbacks=[before_the_step(clip)])


@case("K2", expect="exact", because="clip")
def clips_in_training_step() -> Script:
    """`clip_grad_norm_` in an override of `training_step`."""

    class Clips:
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            whole = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
            torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
            return loss

    return with_loss(trainer=own_loss(plain_loss, Clips))


@case("K2", expect="exact", because="clip")
def clips_groups_of_the_optimizer() -> Script:
    """`clip_grad_norm_` of each group of the optimizer."""

    def clip(trainer: Any, model: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.05)

    return with_loss(callbacks=[before_the_step(clip)])


@case("K2")
def clips_by_accelerator() -> Script:
    """`accelerator.clip_grad_norm_` in a callback."""

    def clip(trainer: Any, model: Any, optimizer: Any) -> None:
        trainer.accelerator.clip_grad_norm_(model.parameters(), 0.1)

    return with_loss(callbacks=[before_the_step(clip)])


@case("K2", expect="exact", because="grad")
def reads_total_norm() -> Script:
    """A callback computes `get_total_norm` of all gradients, and does not use it."""

    def read(trainer: Any, model: Any, optimizer: Any) -> None:
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])

    return with_loss(callbacks=[before_the_step(read)])


@case("K2", expect="exact", because="norm")
def normalises_gradients() -> Script:
    """All gradients are divided by their norm, by `torch._foreach_norm`."""

    def normalise(trainer: Any, model: Any, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_div_(gradients, torch.stack(torch._foreach_norm(gradients)).norm())

    return with_loss(callbacks=[before_the_step(normalise)])


@case("K2", "K2R2")
def clips_values() -> Script:
    """`clip_grad_value_` of all gradients, by torch and by the accelerator."""

    def clip(trainer: Any, model: Any, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        trainer.accelerator.clip_grad_value_(model.parameters(), 0.01)

    return with_loss(callbacks=[before_the_step(clip)])


@case("K2", "K2R2")
def clips_parts_by_accelerator() -> Script:
    """`accelerator.clip_grad_norm_` of the head, of two layers on different stages, and of each group."""
    norms: list[float] = []

    def clip(trainer: Any, model: Any, optimizer: Any) -> None:
        parts = [model.head, torch.nn.ModuleList([model.layers[0], model.layers[-1]])]
        lists = [part.parameters() for part in parts] + [group["params"] for group in optimizer.param_groups]
        norms.extend(trainer.accelerator.clip_grad_norm_(some, 0.05).item() for some in lists)

    return with_loss(callbacks=[before_the_step(clip)], observe=lambda _: {"norms": list(norms)})


@case("K2")
def rate_by_norm() -> Script:
    """The learning rate follows the norm of all gradients, measured by the accelerator."""

    def act(trainer: Any, model: Any, optimizer: Any) -> None:
        norm = float(trainer.accelerator.clip_grad_norm_(model.parameters(), float("inf")))
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + norm)

    return with_loss(callbacks=[before_the_step(act)])


@case("K2", "K2R2")
def rates_by_members() -> Script:
    """The rate of each group is set by the parameters that it lists."""

    def act(trainer: Any, model: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            has_embedding = any(p is model.embedding.weight for p in group["params"])
            group["lr"] = 0.01 * sum(p.numel() for p in group["params"]) ** 0.1 * (2 if has_embedding else 1)

    return with_loss(callbacks=[before_the_step(act)], options={"weight_decay": 0.1})


@case("K2", "K2R2")
def takes_out_of_the_groups() -> Script:
    """From the third step on, the optimizer lists the head in another group, and no longer the embedding."""

    def act(trainer: Any, model: Any, optimizer: Any) -> None:
        if trainer.state.global_step == 2:
            apart = {id(model.embedding.weight), *map(id, model.head.parameters())}
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in apart]
            optimizer.param_groups[-1]["params"] += model.head.parameters()

    options = {"optim": "adamw_torch", "learning_rate": 0.01, "adam_epsilon": 1e-3}
    return with_loss(callbacks=[before_the_step(act)], options=options)


def hooked(register: str, event: str) -> Script:
    """A hook on the optimizer's step that clips the gradients of each group."""

    def clip(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.05)

    def begin(callback: Each, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if state.global_step == 0:
            getattr(getattr(optimizer, "optimizer", optimizer), register)(clip)

    return with_loss(callbacks=[Each(begin, event)])


@case("K2", expect="exact", because="clip")
def clips_in_a_hook_before_the_step() -> Script:
    """A hook before the optimizer's step clips each group."""
    return hooked("register_step_pre_hook", "on_train_begin")


@case("K2", expect="exact", because="clip")
def clips_in_a_hook_behind_the_step() -> Script:
    """A hook behind it."""
    return hooked("register_step_post_hook", "on_step_begin")


@case("K2", expect="exact", because="grad")
def clamps_each_gradient() -> Script:
    """Each gradient is clamped in place."""

    def clamp(trainer: Any, model: Any, optimizer: Any) -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.01)

    return with_loss(callbacks=[before_the_step(clamp)])


@case("K2", expect="exact", because="clip")
def reads_the_norm_of_a_part() -> Script:
    """The rate follows the norm of one layer, which `clip_grad_norm_` returns."""

    def act(trainer: Any, model: Any, optimizer: Any) -> None:
        norm = float(torch.nn.utils.clip_grad_norm_(model.layers[0].parameters(), 0.05))
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + norm)

    return with_loss(callbacks=[before_the_step(act)])


# ---------------------------------------------------------------------------------------------------------
# Accumulation, evaluation, schedules
# ---------------------------------------------------------------------------------------------------------


@case("K2")
def two_micro_steps() -> Script:
    """Two accumulated micro-steps, in an epoch that ends with a smaller batch."""
    accumulated = {"gradient_accumulation_steps": 2, "num_train_epochs": 2}
    return with_loss(batch=4, data=samples(44), options=accumulated)


@case("K2")
def four_micro_steps() -> Script:
    """Four accumulated micro-steps."""
    return with_loss(batch=2, data=samples(44), options={"gradient_accumulation_steps": 4})


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


@case("K2")
def evaluations() -> Script:
    """An evaluation after every other step."""
    return with_loss(options=EVALUATED, keywords={"eval_dataset": samples(16, seed=4)})


@case("K2")
def evaluations_with_micro_steps() -> Script:
    """An evaluation after every other step, with two accumulated micro-steps."""
    options = {**EVALUATED, "gradient_accumulation_steps": 2}
    return with_loss(batch=4, options=options, keywords={"eval_dataset": samples(16, seed=4)})


@case("K2")
def interleaved() -> Script:
    """Interleaved 1F1B: two parts of the model on each process."""
    return with_loss(model=Network(4), product={"pipeline_schedule": "interleaved1f1b"})


@case("K2")
def zbv() -> Script:
    """ZBV: two parts of the model on each process, and backwards in two parts."""
    return with_loss(model=Network(4), product={"pipeline_schedule": "zbv"})
