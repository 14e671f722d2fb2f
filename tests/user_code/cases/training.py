"""Users' callbacks, optimizers and overrides of training steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..kit import Job, Setting, bert_classifier, case, pad, texts

# ---------------------------------------------------------------------------------------------------------
# Callbacks
# ---------------------------------------------------------------------------------------------------------


class ChangesGroups(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **keywords: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.02 * state.global_step
            group["lr"] = group["lr"] * (0.5 if state.global_step == 3 else 1.0)


@case("callback", layouts=("K2", "DP2", "K2 freeze"), expect="equal")
def rates_and_decay_changed_by_a_callback(setting: Setting) -> Job:
    """`optimizer.param_groups` are changed at each step's begin."""
    return Job(callbacks=[ChangesGroups()])


class ClipsWeights(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.4, 0.4)


@case("callback", layouts=("K2", "DP2", "K2 freeze fixed"))
def weights_clipped_after_each_step(setting: Setting) -> Job:
    """WGAN: `parameter.clamp_` for all parameters."""
    return Job(callbacks=[ClipsWeights()], options={"num_train_epochs": 2})


class SWA(TrainerCallback):
    def __init__(self) -> None:
        self.kept: list[dict[str, Tensor]] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        self.kept.append({name: value.clone() for name, value in model.state_dict().items()})

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        mean = {
            name: torch.stack([kept[name].float() for kept in self.kept]).mean(0).to(value.dtype)
            for name, value in self.kept[0].items()
        }
        model.load_state_dict(mean)


@case("callback", layouts=("K2", "DP2"))
def stochastic_weight_averaging(setting: Setting) -> Job:
    """`state_dict()` at each epoch's end, `load_state_dict` of the mean at the end."""
    return Job(callbacks=[SWA()])


class ChangesArguments(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step == 3:
            args.max_grad_norm = 0.1


@case("callback", layouts=("K2", "DP2"), expect="equal")
def arguments_changed_in_training(setting: Setting) -> Job:
    """`args.max_grad_norm = 0.1` after three steps."""
    return Job(callbacks=[ChangesArguments()], options={"optim": "sgd", "learning_rate": 0.05})


class ReplacesCollator(TrainerCallback):
    trainer: Any = None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        base = getattr(train_dataloader, "base_dataloader", train_dataloader)
        if state.epoch and round(state.epoch) == 1:
            base.collate_fn = _cut_to_five


def _cut_to_five(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return pad([{**row, "input_ids": row["input_ids"][:4]} for row in rows])


@case("callback", layouts=("one", "K2", "DP2"))
def collator_replaced_by_a_callback(setting: Setting) -> Job:
    """`train_dataloader.base_dataloader.collate_fn = ...` in the second epoch."""
    return Job(callbacks=[ReplacesCollator()])


class AddsDecay(TrainerCallback):
    """Gradients are changed by hand, each by its own parameter."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=0.05)


@case("callback", layouts=("K2", "DP2", "K2 freeze"), expect="equal")
def gradients_changed_by_a_callback(setting: Setting) -> Job:
    """`parameter.grad.add_(parameter)` in `on_pre_optimizer_step`."""
    return Job(callbacks=[AddsDecay()], options={"optim": "sgd", "learning_rate": 0.05})


# ---------------------------------------------------------------------------------------------------------
# Optimizers and schedulers
# ---------------------------------------------------------------------------------------------------------


def _by_layers(model: Any) -> list[dict[str, Any]]:
    depth = {"embeddings": 0.5, "layer.0": 0.6, "layer.1": 0.7, "layer.2": 0.8, "layer.3": 0.9}
    return [
        {"params": [p], "lr": 0.05 * next((v for k, v in depth.items() if k in name), 1.0)}
        for name, p in model.named_parameters()
    ]


@case("optimizer", layouts=("K2", "DP2", "K2 freeze"), expect="equal")
def rates_that_decay_with_depth(setting: Setting) -> Job:
    """A parameter group for each parameter, passed as `optimizers=`."""
    model = bert_classifier()
    return Job(model=model, keywords={"optimizers": (torch.optim.SGD(_by_layers(model), momentum=0.9), None)})


@case("optimizer", layouts=("K2", "DP2"), expect="equal")
def optimizer_of_the_head_alone(setting: Setting) -> Job:
    """`SGD(model.classifier.parameters())`; all else has gradients, too."""
    model = bert_classifier()
    return Job(model=model, keywords={"optimizers": (torch.optim.SGD(model.classifier.parameters(), lr=0.1), None)})


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.steps = base, 0
        self.slow: dict[Tensor, Tensor] = {}
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.slow.setdefault(p, p.detach().clone())
        self.base.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    p.copy_(self.slow[p].lerp_(p, 0.5))


@case("optimizer", layouts=("one", "K2", "DP2"))
def lookahead_around_another_optimizer(setting: Setting) -> Job:
    """State outside of `optimizer.state`."""
    model = bert_classifier()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.05))
    return Job(model=model, keywords={"optimizers": (optimizer, None)})


@case("optimizer", layouts=("K2", "DP2"), expect="equal")
def one_cycle_that_moves_the_momentum(setting: Setting) -> Job:
    """`OneCycleLR` with a user's SGD."""
    model = bert_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    return Job(model=model, keywords={"optimizers": (optimizer, scheduler)})


@case("optimizer", layouts=("K2", "DP2"), expect="equal")
def reduce_lr_on_plateau(setting: Setting) -> Job:
    """`lr_scheduler_type="reduce_lr_on_plateau"`, by what evaluations find."""
    options = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
        "metric_for_best_model": "loss",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "learning_rate": 2e-2,
    }
    return Job(evaluated=texts(12, seed=9), options=options)


@case("optimizer", layouts=("K2", "DP2"), expect="equal")
def adafactor_by_class_and_keywords(setting: Setting) -> Job:
    """`optimizer_cls_and_kwargs=(NAdam, {...})`."""
    return Job(keywords={"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 3e-3, "eps": 1e-4})})


def _pre_hook(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.clamp_(-0.05, 0.05)


@case("optimizer", layouts=("K2", "DP2"), expect="equal")
def step_pre_hook(setting: Setting) -> Job:
    """`optimizer.register_step_pre_hook` clamps gradients."""
    model = bert_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer.register_step_pre_hook(_pre_hook)
    return Job(model=model, keywords={"optimizers": (optimizer, None)})


# ---------------------------------------------------------------------------------------------------------
# Overrides of steps
# ---------------------------------------------------------------------------------------------------------


class SAM:
    """Two gradients in each step: the second where the first leads to."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        loss = super().training_step(model, dict(inputs), num_items_in_batch)  # type: ignore[misc]
        own = [p for p in model.parameters() if p.grad is not None]
        norm = torch.stack([p.grad.pow(2).sum() for p in own]).sum().sqrt()
        moved = [0.05 * p.grad / norm for p in own]
        with torch.no_grad():
            for p, e in zip(own, moved, strict=True):
                p.add_(e)
        model.zero_grad()
        super().training_step(model, dict(inputs), num_items_in_batch)  # type: ignore[misc]
        with torch.no_grad():
            for p, e in zip(own, moved, strict=True):
                p.sub_(e)
        return loss


@case("trainer override", layouts=("one", "K2", "DP2"))
def sharpness_aware_training_step(setting: Setting) -> Job:
    """SAM: `training_step` twice, with a norm over all gradients."""
    return Job(trainer=SAM, options={"optim": "sgd", "learning_rate": 0.05})


class OwnStep:
    """What people copy from the Trainer's source."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        loss = self.compute_loss(model, inputs)  # type: ignore[attr-defined]
        self.accelerator.backward(loss)  # type: ignore[attr-defined]
        return loss.detach()


@case("trainer override", layouts=("one", "K2", "DP2"))
def training_step_without_super(setting: Setting) -> Job:
    """`training_step` that calls `compute_loss` and `backward` itself."""
    return Job(trainer=OwnStep)


class LogsInside:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        outputs = model(**inputs)
        self.log({"main": float(outputs.loss.detach())})  # type: ignore[attr-defined]
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@case("trainer override", layouts=("one", "K2", "DP2"), expect="equal")
def log_inside_compute_loss(setting: Setting) -> Job:
    """`self.log({...})` for each loss."""
    return Job(trainer=LogsInside)


class OwnScheduler:
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        optimizer = optimizer if optimizer is not None else self.optimizer  # type: ignore[attr-defined]
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return self.lr_scheduler


@case("trainer override", layouts=("K2", "DP2", "K2 freeze"), expect="equal")
def create_scheduler_overridden(setting: Setting) -> Job:
    """A `LambdaLR` of the user's."""
    return Job(trainer=OwnScheduler)


def _twice(trainer: Any) -> None:
    trainer.train()
    first = list(trainer.state.log_history)
    trainer.train()
    trainer.state.log_history = first + trainer.state.log_history


@case("trainer override", layouts=("K2", "DP2", "one", "K2 freeze"))
def train_twice(setting: Setting) -> Job:
    """`trainer.train()` two times, the second from where the first has ended."""
    return Job(drive=_twice)


class Teaches:
    """The model's own copy is a moving target."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        plain = getattr(model, "module", model)
        if not hasattr(self, "copied"):
            self.copied: nn.Module = copy.deepcopy(plain).eval()
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.copied(**inputs).logits
        loss = outputs.loss + (outputs.logits - wanted).pow(2).mean()
        return (loss, outputs) if return_outputs else loss


@case("trainer override", layouts=("one", "K2", "DP2", "one freeze", "DP2 cache"))
def copy_of_the_model_as_a_teacher(setting: Setting) -> Job:
    """`copy.deepcopy(model)` at the first call of `compute_loss`."""
    return Job(trainer=Teaches)
