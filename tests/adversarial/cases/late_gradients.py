"""Steps in which no gradient comes to the lower layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from user_code.kit import Rows

from ..kit import VOCABULARY, At, Layer, Network, Script, bert, case, pad, samples

ADAM: dict[str, Any] = {
    "num_train_epochs": 1,
    "optim": "adamw_torch",
    "learning_rate": 0.01,
    "adam_epsilon": 1e-4,
    "weight_decay": 0.3,
}


class Detaching(nn.Module):
    """A module that detaches its inputs in some steps, as in linear probing before fine-tuning."""

    detaches = False

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.detach() if self.detaches else x)


class DetachingLayer(Layer):
    """A layer that detaches its outputs in some steps."""

    detaches = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.detach() if self.detaches else x


def detach(model: Any, step: int) -> None:
    for module in model.modules():
        if isinstance(module, Detaching):
            module.detaches = step in (1, 2)


def under_pooler(**product: Any) -> Script:
    """A BERT with a pooler of the user's; batches are split."""
    model = bert()
    model.bert.pooler = Detaching(model.bert.pooler)
    return detaching(model, **product)


def detaching(model: nn.Module, options: dict[str, Any] | None = None, **product: Any) -> Script:
    return Script(
        model=model,
        data=samples(48),
        batch=12,
        options={**ADAM, **(options or {})},
        product={"num_microbatches": 2, **product},
        callbacks=[At(detach, range(4))],
    )


@case("R2", "K2", "K3", "K2R2")
def features_detached_in_some_steps() -> Script:
    """A module of the user's above the layers detaches its inputs in two steps; AdamW decays weights."""
    return under_pooler()


@case("K2")
def features_detached_with_interleaved_stages() -> Script:
    """Each process has two stages that do not follow each other."""
    return under_pooler(pipeline_schedule="interleaved1f1b")


@case("K2")
def features_detached_with_split_backwards() -> Script:
    """Weights' gradients are computed later than those of inputs."""
    return under_pooler(pipeline_schedule="zbv", num_microbatches=4)


@case("K2R2")
def features_detached_with_sharded_states() -> Script:
    """Replicas share the optimizer's states."""
    return under_pooler(replica_sharding="optimizer")


def at_layer(number: int, options: dict[str, Any] | None = None, event: str = "on_step_begin") -> Script:
    """A model of the user's, declared to be a mean, with a layer that detaches."""
    model = Network(4, DetachingLayer)

    def some(model: Any, step: int) -> None:
        layer = model.layers[number]
        layer.detaches = not layer.detaches if event == "on_substep_end" else step in (1, 2)

    script = detaching(model, options, loss_reduction="mean")
    script.callbacks = [At(some, range(4), event)]
    return script


@case("K2", "K3")
def first_layer_detached_in_some_steps() -> Script:
    """The lowest layer detaches its outputs."""
    return at_layer(0)


@case("K2", "K3")
def second_layer_detached_in_some_steps() -> Script:
    """The second of four layers detaches its outputs."""
    return at_layer(1)


@case("K2", "K3", "K2R2")
def third_layer_detached_in_some_steps() -> Script:
    """The third of four layers detaches its outputs."""
    return at_layer(2)


@case("K2", "K3")
def last_layer_detached_in_some_steps() -> Script:
    """The last of four layers detaches its outputs."""
    return at_layer(3)


@case("K2", "K2R2")
def layer_detached_under_accumulation() -> Script:
    """In every second step, one of two accumulated batches has no gradient below the layer."""
    return at_layer(2, {"gradient_accumulation_steps": 2, "num_train_epochs": 2}, "on_substep_end")


@case("K2", "K3", "K2R2")
def features_detached_with_token_slices() -> Script:
    """A causal language model with a norm of the user's, in slices of the tokens."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **sizes))
    model.model.norm = Detaching(model.model.norm)
    rows = samples(48)
    words = [{"input_ids": rows[i]["input_ids"], "labels": rows[i]["input_ids"]} for i in range(len(rows))]
    script = detaching(model, token_slices=2, num_microbatches=1, activation_cache="off")
    script.data, script.collator = Rows(words), pad
    return script
