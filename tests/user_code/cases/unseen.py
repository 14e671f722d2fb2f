"""Users' code whose effect is easily missed by whoever looks at a few rows before the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainerCallback

from ..kit import LAYERS, Classifier, Job, Setting, bert_classifier, case, large_weights


class PenalisesWhatIsTrained:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 0.01 * sum(p.pow(2).sum() for p in model.parameters() if p.requires_grad)
        return (loss, outputs) if return_outputs else loss


@case("loss", layouts=("K2", "K2 acc2", "DP2", "one acc2"))
def l2_of_trainable_parameters(setting: Setting) -> Job:
    """`sum(p.pow(2).sum() for p in model.parameters() if p.requires_grad)`."""
    return Job(trainer=PenalisesWhatIsTrained)


def _counting_loss() -> type:
    calls = 0

    class Counts:
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
            nonlocal calls
            calls += torch.is_grad_enabled()
            outputs = model(**inputs)
            loss = outputs.loss * (1 + calls / 100)
            return (loss, outputs) if return_outputs else loss

    return Counts


@case("loss", layouts=("K2",), expect="equal")
def counter_in_a_closure(setting: Setting) -> Job:
    """A weight grows with each call, in a variable that no object holds."""
    return Job(trainer=_counting_loss())


class NoisyWithDeepSupervision(Classifier):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = self.bert(input_ids, attention_mask=attention_mask, output_hidden_states=True)
        last = outputs.hidden_states[-1]
        if self.training:
            last = last + 0.1 * torch.randn_like(last)
        found = {"logits": self.head(last[:, 0])}
        if labels is not None:
            found["loss"] = F.cross_entropy(found["logits"], labels)
            if self.training:
                found["loss"] = found["loss"] + 0.1 * outputs.hidden_states[1].pow(2).mean()
        return found


@case("model with state", layouts=("K2",), expect="refused", because="reads what other layers return or leave behind")
def noise_and_deep_supervision_in_training(setting: Setting) -> Job:
    """Random in training, where it also reads an early layer's output."""
    return Job(model=large_weights(NoisyWithDeepSupervision()))


class ConstantInput:
    """One tensor object in each batch, beside the padded rows."""

    def __init__(self) -> None:
        self.positions = torch.arange(16)

    def __call__(self, rows: Any) -> dict[str, Tensor]:
        words = nn.utils.rnn.pad_sequence([torch.as_tensor(row["input_ids"]) for row in rows], batch_first=True)
        return {
            "input_ids": words,
            "attention_mask": (words != 0).long(),
            "positions": self.positions,
            "labels": torch.tensor([row["labels"] for row in rows]),
        }


class TakesPositions:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        inputs = dict(inputs)
        positions = inputs.pop("positions")
        length = inputs["input_ids"].shape[1]
        outputs = model(**inputs, position_ids=positions[:length][None])
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@case("collator", layouts=("one", "one acc2", "DP2 acc2"))
def one_tensor_in_all_batches(setting: Setting) -> Job:
    """The collator returns the same `positions` object each time."""
    return Job(collator=ConstantInput(), trainer=TakesPositions, options={"remove_unused_columns": False})


class Unfreezes(TrainerCallback):
    """A layer more is trained after each step, with a learning rate of its own."""

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step > LAYERS:
            return
        layer = keywords["model"].bert.encoder.layer[-state.global_step]
        layer.requires_grad_(True)
        keywords["optimizer"].add_param_group({"params": list(layer.parameters()), "lr": 0.01})


class FixedRate:
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """`LambdaLR` takes no groups that come later."""
        self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, 1.0)  # type: ignore[attr-defined]
        return self.lr_scheduler


def _only_the_head() -> Any:
    model = bert_classifier()
    model.bert.requires_grad_(False)
    return model


@case("callback", layouts=("one", "K2", "DP2"))
def gradual_unfreezing_by_added_groups(setting: Setting) -> Job:
    """`optimizer.add_param_group` with the model's own layers, from the head down."""
    return Job(
        model=_only_the_head(),
        callbacks=[Unfreezes()],
        trainer=FixedRate,
        options={"optim": "sgd", "learning_rate": 0.05},
    )


class PenalisesSlopes:
    """As it is written in tutorials: nothing is asked of the mode."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        embedded = outputs.hidden_states[0]
        slope = torch.autograd.grad(outputs.loss, embedded, create_graph=True)[0]
        loss = outputs.loss + 0.1 * slope.pow(2).sum(-1).sum()
        return (loss, outputs) if return_outputs else loss


@case("loss", layouts=("one", "one acc2", "DP2", "K2"))
def penalty_on_the_slope_at_the_embeddings(setting: Setting) -> Job:
    """`torch.autograd.grad(..., create_graph=True)` inside `compute_loss`."""
    return Job(model=bert_classifier(attn_implementation="eager"), trainer=PenalisesSlopes)


def _clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.001, 0.001)


@case("model with state", layouts=("K2", "one acc2", "DP2"))
def clamping_hook_on_the_embeddings(setting: Setting) -> Job:
    """`register_hook` with a clamp, below all layers."""
    model = bert_classifier()
    model.get_parameter("bert.embeddings.word_embeddings.weight").register_hook(_clamp)
    return Job(model=model, options={"optim": "sgd", "learning_rate": 0.05})
