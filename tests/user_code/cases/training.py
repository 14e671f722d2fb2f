"""Users' callbacks, optimizers and overrides of training steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainerCallback

from ..kit import LABELS, WIDTH, Job, Rows, bert_classifier, built, case, pad, texts


class ChangesGroups(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **keywords: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.02 * state.global_step
            group["lr"] = group["lr"] * (0.5 if state.global_step == 3 else 1.0)


@case("callback", layouts=("K2", "DP2", "K2 freeze"), expect="equal")
def rates_and_decay_changed_by_a_callback() -> Job:
    """`optimizer.param_groups` are changed at each step's begin."""
    return Job(callbacks=[ChangesGroups()])


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
def stochastic_weight_averaging() -> Job:
    """`state_dict()` at each epoch's end, `load_state_dict` of the mean at the end."""
    return Job(callbacks=[SWA()])


@case("optimizer", layouts=("K2", "DP2"), expect="equal")
def optimizer_by_class_and_keywords() -> Job:
    """`optimizer_cls_and_kwargs=(NAdam, {...})`."""
    return Job(keywords={"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 3e-3, "eps": 1e-4})})


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
def sam_sharpness_aware_training_step() -> Job:
    """SAM: calls `training_step` twice, with a norm over all gradients."""
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
def training_step_without_super() -> Job:
    """`training_step` that calls `compute_loss` and `backward` itself."""
    return Job(trainer=OwnStep)


class Strict(nn.Module):
    """The forward accepts only the inputs that it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert_classifier().bert
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0])


class WeightedRows:
    """A mixin: each row has a weight of its own, and the mean is over weights."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        labels, weights = inputs.pop("labels"), inputs.pop("weight")
        logits = model(**inputs)
        loss = (F.cross_entropy(logits, labels, reduction="none") * weights).mean()
        return (loss, {"logits": logits}) if return_outputs else loss


def weighted_texts() -> Rows:
    return texts(weight=lambda generator, *_: generator.uniform(0.2, 3.0))


@case("trainer override", layouts=("one", "DP2", "K2", "K2 acc2"))
def strict_forward_and_popped_sample_weights() -> Job:
    """`forward(input_ids, attention_mask)`; `compute_loss` pops labels and weights."""
    options = {"remove_unused_columns": False}
    return Job(model=built(Strict), data=weighted_texts(), trainer=WeightedRows, options=options)


class ReplacesCollator(TrainerCallback):
    trainer: Any = None

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        base = getattr(train_dataloader, "base_dataloader", train_dataloader)
        if state.epoch and round(state.epoch) == 1:
            base.collate_fn = _cut_to_five


def _cut_to_five(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return pad([{**row, "input_ids": row["input_ids"][:4]} for row in rows])


@case("callback", layouts=("one", "K2", "DP2"))
def collator_replaced_by_a_callback() -> Job:
    """`train_dataloader.base_dataloader.collate_fn = ...` in the second epoch."""
    return Job(callbacks=[ReplacesCollator()])


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


@case("trainer override", layouts=("one", "K2", "DP2"))
def copy_of_the_model_as_a_teacher() -> Job:
    """`copy.deepcopy(model)` at the first call of `compute_loss`."""
    return Job(trainer=Teaches)
