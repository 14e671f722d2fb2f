"""Users' code whose effect is easily missed by whoever looks at a few rows before the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
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
