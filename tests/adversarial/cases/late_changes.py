"""What begins in the middle of a training, and values that are kept where a pipeline does not look for them."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import WeightedRandomSampler

from ..kit import (
    WIDTH,
    Each,
    Inputs,
    Layer,
    LossAndOutputs,
    Network,
    Script,
    case,
    classified,
    own_loss,
    plain_loss,
    pool,
    samples,
    train_and_resume,
    with_loss,
)
from .attack_front import OnBert
from .attack_recipes_front import of

# ---------------------------------------------------------------------------------------------------------
# Frozen modules of a model, with one stage
# ---------------------------------------------------------------------------------------------------------


class Later(OnBert):
    """Counts its calls, and does something else from one of them on."""

    def __init__(self, begin: int) -> None:
        super().__init__()
        self.begin, self.calls = begin, 0

    @property
    def has_begun(self) -> bool:
        self.calls += self.training
        return self.training and self.calls > self.begin


class AsksForStates(Later):
    """Asks for the hidden states in some calls, from the second epoch on."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        asks = self.has_begun and self.calls % 2 == 0
        outputs = self.bert(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=asks)
        hidden = outputs.last_hidden_state
        if outputs.hidden_states is not None:
            hidden = hidden + outputs.hidden_states[1]
        return classified(self.head(pool(hidden, attention_mask)), labels)


class WritesLater(Later):
    """Scales some of the frozen module's output in place after a while."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.has_begun:
            hidden[:, 1:3] *= 0.1
        return classified(self.head(pool(hidden, attention_mask)), labels)


class ShiftsLater(Later):
    """Shifts the positions after a while; a normalisation beside the frozen module counts its batches."""

    def __init__(self, begin: int) -> None:
        super().__init__(begin)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        width = input_ids.shape[1]
        by_word = torch.arange(width).expand_as(input_ids) + int(self.has_begun)
        scale = self.norm(self.head.weight.mean(0) * input_ids.to(torch.float32).mean(1, keepdim=True))
        outputs = self.bert(input_ids=input_ids, attention_mask=attention_mask, position_ids=by_word)
        return classified(self.head(pool(outputs.last_hidden_state, attention_mask) + scale), labels)


def counted(trainer: Any) -> dict[str, Any]:
    norm = getattr(trainer.model, "norm", None)
    batches = [] if norm is None else [norm.running_mean.tolist(), norm.running_var.tolist()]
    return {"calls": trainer.model.calls, "batches": batches}


@case("K1")
def hidden_states_from_the_second_epoch() -> Script:
    """A frozen module is asked for its hidden states in some steps, from the second epoch on."""
    return of(AsksForStates(begin=6), data=samples(32, 8, 8), observe=counted)


@case("K1")
def other_positions_from_the_third_epoch() -> Script:
    """A frozen module gets other positions in the middle of the third epoch; the model counts its forwards."""
    return of(ShiftsLater(begin=10), observe=counted)


class WithReplacement:
    """Draws the samples with replacement, so that some samples of later batches are new."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return WeightedRandomSampler(torch.ones(64), 64, generator=torch.Generator().manual_seed(3))


@case("K1")
def written_in_place_among_missing_samples() -> Script:
    """The frozen module's output is written to in place from the third epoch on, also that of samples just stored."""
    trainer = own_loss(plain_loss, WithReplacement)
    return of(WritesLater(begin=17), data=samples(64, 8, 8), trainer=trainer, observe=counted)


class Compiled(nn.Module):
    """A trained head on a frozen encoder that the user has compiled."""

    def __init__(self) -> None:
        super().__init__()
        inner = OnBert()
        self.bert: Any = torch.compile(inner.bert, backend="eager")
        self.head = inner.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return classified(self.head(pool(hidden, attention_mask)), labels)


@case("K1")
def compiled_frozen_encoder() -> Script:
    """A frozen encoder is wrapped by torch.compile in the user's model."""
    return of(Compiled(), data=samples(32, 8, 8))


# ---------------------------------------------------------------------------------------------------------
# Layers that a policy freezes
# ---------------------------------------------------------------------------------------------------------


def frozen_by_schedule(**fields: Any) -> Script:
    """The schedule freezes two layers after the first epoch; the stock Trainer's user does so by hand."""

    def freeze(callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not hasattr(callback.trainer.args, "freeze_policy") and state.epoch and state.epoch > 0.5:
            model.embedding.requires_grad_(False)
            model.layers[:2].requires_grad_(False)

    product = {"freeze_policy": "schedule", "freeze_schedule": {"1": 2}, "activation_cache": "on"}
    more: dict[str, Any] = {"data": samples(32), "product": product, "options": {"num_train_epochs": 4}}
    return with_loss(callbacks=[Each(freeze, "on_epoch_begin")], **{**more, **fields})


@case("K1")
def hook_on_a_layer_that_freezes() -> Script:
    """The loss reads what a forward hook inside a layer has noted, as hints and activation statistics do."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if not hasattr(trainer, "noted"):
            trainer.noted = {}
            inside = next(part for part in model.layers[0].modules() if isinstance(part, nn.Linear))
            inside.register_forward_hook(lambda module, given, made: trainer.noted.update(mean=made.abs().mean()))
        outputs = model(**inputs)
        return outputs["loss"] * (1 + trainer.noted["mean"]), outputs

    return frozen_by_schedule(loss=loss, model=Network(4))


class Keeping(Layer):
    """Keeps a penalty of its output."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x)
        self.penalty = made.pow(2).mean()
        return made


@case("K1")
def penalties_kept_by_layers_that_freeze() -> Script:
    """Each layer keeps a penalty as an attribute, and the loss adds them."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs["loss"] + sum(layer.penalty for layer in model.layers), outputs

    return frozen_by_schedule(loss=loss, model=Network(4, Keeping))


# ---------------------------------------------------------------------------------------------------------
# Optimizers that keep values elsewhere than in the state of a parameter
# ---------------------------------------------------------------------------------------------------------


class CountsSteps(torch.optim.Optimizer):
    """The count of steps is an entry of the state of its own, as in MADGRAD."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        count = self.state.setdefault("k", torch.tensor([0]))  # type: ignore[call-overload]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    sums = self.state[p].setdefault("sums", torch.zeros_like(p))
                    sums.add_(p.grad, alpha=math.sqrt(int(count) + 1))
                    p.sub_(sums, alpha=group["lr"] / (int(count) + 1))
        count += 1


class Delegating(torch.optim.Optimizer):
    """Passes everything on to another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        for name in ("step", "state_dict", "load_state_dict"):
            for when in ("pre", "post"):
                setattr(self, f"_optimizer_{name}_{when}_hooks", OrderedDict())

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


class TwoInOne(torch.optim.Optimizer):
    """SGD for matrices, and AdamW for the others."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        self.inner: list[torch.optim.Optimizer] = [
            torch.optim.SGD([p for p in params if p.dim() == 2], lr=0.05, momentum=0.9),
            torch.optim.AdamW([p for p in params if p.dim() != 2], lr=0.01, eps=1e-3),
        ]
        super().__init__([group for inner in self.inner for group in inner.param_groups], {})
        self.param_groups = [group for inner in self.inner for group in inner.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for inner in self.inner:
            inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [inner.state_dict() for inner in self.inner]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for inner, state in zip(self.inner, state_dict["inner"], strict=True):
            inner.load_state_dict(state)
        self.param_groups = [group for inner in self.inner for group in inner.param_groups]


class OwnBuffers(torch.optim.SGD):
    """Keeps a momentum in a dictionary of its own."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr=lr)
        self.momenta: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.momenta.setdefault(id(p), torch.zeros_like(p))
                    p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=group["lr"])


def resumed(make: Any) -> Script:
    """A training is resumed in the middle."""

    model = Network()
    keywords = {"optimizers": (make(model.parameters()), None)}
    return with_loss(
        model=model, keywords=keywords, drive=train_and_resume, options={"save_strategy": "steps", "save_steps": 3}
    )


@case("K1", "K2", "R2")
def step_count_in_the_state_resumed() -> Script:
    """MADGRAD's count of steps, which belongs to no parameter, is in the checkpoint."""
    return resumed(CountsSteps)


@case("K1", "K2")
def step_count_in_the_state_while_layers_freeze() -> Script:
    """MADGRAD's count of steps stays when layers freeze."""
    model = Network(4)
    return frozen_by_schedule(model=model, keywords={"optimizers": (CountsSteps(model.parameters()), None)})


@case("K1", "R2")
def delegating_optimizer_resumed() -> Script:
    """An optimizer that passes everything on to another one."""
    return resumed(lambda params: Delegating(torch.optim.AdamW(params, lr=0.01, eps=1e-3)))


@case("K2", expect="exact", because="Delegating")
def delegating_optimizer_over_stages() -> Script:
    """An optimizer that passes everything on to another one: a checkpoint would have one stage's state."""
    return resumed(lambda params: Delegating(torch.optim.AdamW(params, lr=0.01, eps=1e-3)))


@case("K2", expect="exact", because="TwoInOne")
def two_optimizers_in_one() -> Script:
    """An optimizer that holds two others with their own state."""
    return resumed(TwoInOne)


@case("K2")
def own_buffers_without_freezing() -> Script:
    """An optimizer keeps its momentum in an attribute; no layer moves."""
    model = Network()
    return with_loss(model=model, keywords={"optimizers": (OwnBuffers(model.parameters()), None)})


@case("K2", expect="exact", because="momenta")
def own_buffers_while_layers_freeze() -> Script:
    """An optimizer keeps its momentum in an attribute, and layers move to other stages."""
    model = Network(4)
    return frozen_by_schedule(model=model, keywords={"optimizers": (OwnBuffers(model.parameters()), None)})
