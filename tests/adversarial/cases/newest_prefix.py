"""The lowest layers are frozen, by the user over several stages or by a policy, and something around them changes.

Most changes come in the middle of the second epoch, when stored outputs are read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers.models.bert.modeling_bert as bert_code
from torch import Tensor, nn

from ..kit import (
    VOCABULARY,
    At,
    Each,
    Inputs,
    Layer,
    LossAndOutputs,
    Network,
    Script,
    bert,
    case,
    classified,
    own_loss,
    pool,
    samples,
)
from .attack_caches import freeze_lowest
from .attack_front import reads
from .attack_recipes_front import logged

Change = Callable[[Any], object]
"""Changes a model."""

LOWEST = 3
"""Number of frozen layers, of six."""
MIDDLE, LATER = 7, 10
"""Steps in the middle of the second and third epoch: the second is the first one that reads to its end."""
RARE = 20
"""Words from this one on are replaced by `COMMON` where inputs are changed."""
COMMON = 6
SMALLER = 0.5


def lowest_of_bert(**changes: Any) -> Any:
    return freeze_lowest(bert(num_hidden_layers=6, initializer_range=0.3, **changes), LOWEST)


def over_lowest(policy: bool, model: Any = None, **fields: Any) -> Script:
    """Four epochs of four steps. With a policy, it freezes at the start what the user has frozen as well."""
    by_policy = {"freeze_policy": "schedule", "freeze_schedule": {"0": LOWEST}} if policy else {}
    fields["product"] = {**by_policy, **fields.get("product", {})}
    fields["options"] = {"num_train_epochs": 4, **fields.get("options", {})}
    return Script(model=model or lowest_of_bert(), **{"data": samples(48), "batch": 12, **fields})


def enter(make: Callable[[bool], Script], name: str, user: Any = ("K2", "K3"), policy: Any = ("K1",)) -> None:
    """Enter two cases: layers that the user has frozen, and layers that a policy has frozen."""
    what = name.replace("_", " ")
    for by_policy, layouts in ((False, user), (True, policy)):
        of: Any = partial(make, by_policy)
        of.__name__, of.__module__ = f"{name}_with_a_policy" if by_policy else f"{name}_over_lowest_layers", __name__
        of.__doc__ = f"{what}; {'a policy' if by_policy else 'the user'} has frozen the lowest layers."
        if layouts:
            case(*layouts)(of)


def at_middle(change: Change, make: Callable[[], Any] | None = None, **fields: Any) -> Callable[[bool], Script]:
    def script(policy: bool) -> Script:
        at = At(lambda model, step: change(model), (MIDDLE,))
        return over_lowest(policy, make() if make else None, callbacks=[at], observe=logged, **fields)

    return script


def second(model: Any) -> Any:
    return model.bert.encoder.layer[1]


def common(words: Tensor) -> Tensor:
    return torch.where(words > RARE, COMMON, words)


def in_words(given: Any) -> Any:
    return common(given) if isinstance(given, Tensor) and given.dtype == torch.long and given.max() > 1 else given


# ---------------------------------------------------------------------------------------------------------
# Modules around the layers
# ---------------------------------------------------------------------------------------------------------


def positions(model: Any) -> None:
    model.bert.embeddings.position_ids.add_(1)


def positions_through_data(model: Any) -> None:
    model.bert.embeddings.position_ids.data[:, 3:] += 1


def positions_replaced(model: Any) -> None:
    model.bert.embeddings.position_ids = model.bert.embeddings.position_ids + 1


def hook_on_embeddings(model: Any) -> None:
    model.bert.embeddings.register_forward_hook(lambda _, given, made: made * SMALLER)


def hook_before_encoder(model: Any) -> None:
    model.bert.encoder.register_forward_pre_hook(lambda _, given: (given[0] * SMALLER, *given[1:]))


def hook_before_model_around(model: Any) -> None:
    def hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return tuple(map(in_words, given)), {
            name: common(value) if name == "input_ids" else value for name, value in named.items()
        }

    model.bert.register_forward_pre_hook(hook, with_kwargs=True)


def forward_of_embeddings(model: Any) -> None:
    before = model.bert.embeddings.forward
    model.bert.embeddings.forward = lambda *given, **named: before(*given, **named) * SMALLER


def forward_of_encoder(model: Any) -> None:
    before = model.bert.encoder.forward
    model.bert.encoder.forward = lambda x, *given, **named: before(x * SMALLER, *given, **named)


def forward_of_model_around(model: Any) -> None:
    before = model.bert.forward
    model.bert.forward = lambda words, *given, **named: before(common(words), *given, **named)


def forward_of_model(model: Any) -> None:
    before = model.forward
    model.forward = lambda input_ids=None, **named: before(common(input_ids), **named)


for _change in (
    *(positions, positions_through_data, positions_replaced),
    *(hook_on_embeddings, hook_before_encoder, hook_before_model_around),
    *(forward_of_embeddings, forward_of_encoder, forward_of_model_around, forward_of_model),
):
    enter(at_middle(_change), _change.__name__)


def patched(space: Any, name: str, make: Callable[[Any], Any]) -> Callable[[bool], Script]:
    before = getattr(space, name)

    def drive(trainer: Any) -> Any:
        try:
            return trainer.train()
        finally:
            setattr(space, name, before)

    return at_middle(lambda model: setattr(space, name, make(before)), drive=drive)


def smaller_output(before: Any) -> Any:
    return lambda self, *given, **named: before(self, *given, **named) * SMALLER


def smaller_input(before: Any) -> Any:
    return lambda self, x, *given, **named: before(self, x * SMALLER, *given, **named)


def causal(before: Any) -> Any:
    def mask(**named: Any) -> Tensor:
        rows, length = named["inputs_embeds"].shape[:2]
        return torch.ones(rows, 1, length, length, dtype=torch.bool).tril()

    return mask


enter(patched(bert_code.BertEmbeddings, "forward", smaller_output), "forward_of_the_embeddings_class")
enter(patched(bert_code.BertEncoder, "forward", smaller_input), "forward_of_the_encoder_class")
enter(patched(bert_code, "create_bidirectional_mask", causal), "function_of_masks")


@case("K2", "K3")
def dropout_turned_on_in_lowest_layers() -> Script:
    """A callback turns dropout on in a layer that the user has frozen: everything is dropped."""
    return at_middle(lambda model: setattr(second(model).output.dropout, "p", 1.0))(False)


# ---------------------------------------------------------------------------------------------------------
# The user's own model
# ---------------------------------------------------------------------------------------------------------


class Counted(Layer):
    """A callback counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.nested, self.factor, self.steps = 1.0, {"more": {"scale": [1.0]}}, torch.ones(()), 0
        self.limit = 1e9

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x)
        return (made * self.scale * self.nested["more"]["scale"][0] * self.factor).clamp(max=self.limit)


class Around(Network):
    """Its forward reads settings before it calls the layers."""

    shift, factor = 0, 1.0

    def __init__(self) -> None:
        super().__init__(6, Counted)
        self.embedding.requires_grad_(False)
        self.layers[:LOWEST].requires_grad_(False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embedding((input_ids + self.shift) % VOCABULARY) * self.factor
        for layer in self.layers:
            x = layer(x)
        return classified(self.head(pool(x, attention_mask)), labels)


def count(callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
    for layer in model.layers:
        layer.steps += 1


def in_own_model(change: Change, is_counted: bool = False) -> Callable[[bool], Script]:
    def script(policy: bool) -> Script:
        product = {"loss_reduction": "mean", "cached_modules": None if policy else ["layers", "embedding"]}
        when = LATER if is_counted else MIDDLE
        callbacks = [At(lambda model, step: change(model), (when,)), *([Each(count)] if is_counted else [])]
        return over_lowest(
            policy, Around(), callbacks=callbacks, product=product, observe=logged_and_read if is_counted else logged
        )

    return script


enter(in_own_model(lambda model: setattr(model, "shift", 3)), "number_that_the_forward_around_reads")
enter(in_own_model(lambda model: setattr(model, "factor", SMALLER)), "factor_that_the_forward_around_reads")
enter(in_own_model(lambda model: setattr(model.layers[1], "limit", 2.7)), "limit_that_few_samples_reach")
COUNTED: dict[str, Change] = {
    "number_beside_a_counter": lambda model: setattr(model.layers[1], "scale", SMALLER),
    "nested_number_beside_a_counter": lambda model: model.layers[1].nested["more"]["scale"].__setitem__(0, SMALLER),
    "tensor_beside_a_counter": lambda model: setattr(model.layers[1], "factor", torch.tensor(SMALLER)),
}
for _name, _change in COUNTED.items():
    enter(in_own_model(_change, is_counted=True), _name)


def logged_and_read(trainer: Any) -> dict[str, Any]:
    return {**logged(trainer), **reads(trainer)}


@case("K1")
def counter_of_a_callback_with_a_policy() -> Script:
    """Layers have a counter that a callback advances and nobody reads: outputs are read all the same."""
    script = in_own_model(lambda model: None, is_counted=True)(True)
    script.observe = reads
    return script


# ---------------------------------------------------------------------------------------------------------
# Changes outside of callbacks
# ---------------------------------------------------------------------------------------------------------


def halved(model: Any) -> None:
    weight = second(model).intermediate.dense.weight
    if not getattr(weight, "is_elsewhere", False):
        weight.mul_(SMALLER)


def other_epsilon(model: Any) -> None:
    second(model).output.LayerNorm.eps = SMALLER


def in_step(change: Change) -> type:
    class Changes:
        def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            if self.state.global_step == MIDDLE:
                with torch.no_grad():
                    change(self.model)
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]

    return Changes


def in_inputs(change: Change) -> type:
    class Changes:
        def _prepare_inputs(self: Any, inputs: Any) -> Any:
            if self.model.training and self.state.global_step == MIDDLE:
                with torch.no_grad():
                    change(self.model)
            return super()._prepare_inputs(inputs)  # type: ignore[misc]

    return Changes


def in_loss(change: Change) -> type:
    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if trainer.state.global_step == MIDDLE:
            with torch.no_grad():
                change(trainer.model)
        outputs = model(**inputs)
        return outputs["loss"], outputs

    return own_loss(loss)


def changed_in(where: Callable[[Change], type], change: Change) -> Callable[[bool], Script]:
    return lambda policy: over_lowest(policy, trainer=where(change), observe=logged)


enter(changed_in(in_step, halved), "weights_halved_in_training_step")
enter(changed_in(in_step, other_epsilon), "epsilon_set_in_training_step")
enter(changed_in(in_inputs, halved), "weights_halved_with_the_inputs", user=("K2",))
enter(changed_in(in_loss, halved), "weights_halved_in_the_loss", user=())  # on the last of several stages only
enter(changed_in(in_loss, other_epsilon), "epsilon_set_in_the_loss", user=("K2",))


# ---------------------------------------------------------------------------------------------------------
# Outputs of all layers
# ---------------------------------------------------------------------------------------------------------


def of_attentions(model: Any) -> Script:
    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs, output_attentions=True)
        return outputs["loss"] + sum(of.pow(2).mean() for of in outputs.attentions), outputs

    return over_lowest(False, model, trainer=own_loss(loss), observe=logged)


@case("K2", expect="exact", because="output_attentions=True")
def loss_of_attentions() -> Script:
    """The loss asks for the attentions of all layers, of which a stage has its own only."""
    return of_attentions(bert(num_hidden_layers=6, attn_implementation="eager"))


@case("K2", expect="exact", because="output_attentions=True")
def loss_of_attentions_over_lowest_layers() -> Script:
    """Likewise, with frozen lowest layers."""
    return of_attentions(lowest_of_bert(attn_implementation="eager"))
