"""A loss of the user's over several stages: number, inputs and form of its calls of the model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from ..kit import (
    LABELS,
    WIDTH,
    Inputs,
    LossAndOutputs,
    Network,
    Script,
    bert,
    case,
    classified,
    pad,
    pool,
    samples,
    with_loss,
)


@case("K2")
def one_call() -> Script:
    """The model is called once, as the stock `compute_loss` calls it."""
    return with_loss()


def calls_by_step(batch: int) -> Script:
    """Another number of calls in each step, on fewer and fewer samples and words; in some steps none."""

    def wire(trainer: Any) -> None:
        trainer.weight = nn.Parameter(torch.ones(()))

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        calls = (1, 0, 5, 2, 0, 3)[trainer.state.global_step % 6]
        total, outputs = trainer.weight * 0.5 if not calls else 0.0, {"logits": torch.zeros(batch, LABELS)}
        for less in range(calls):
            words = {name: inputs[name][: 8 - less, : 8 - less] for name in ("input_ids", "attention_mask")}
            with torch.set_grad_enabled(less != 1):
                outputs = model(**words, labels=inputs["labels"][: 8 - less])
            total = total + outputs["loss"] / (less + 1)
        return total, outputs

    return with_loss(loss, wire=wire, batch=batch)


@case("K2")
def many_calls_or_none() -> Script:
    """From no call of the model to five in a step."""
    return calls_by_step(8)


@case("K3")
def many_calls_or_none_on_three_stages() -> Script:
    """From no call of the model to five in a step, on three stages."""
    return calls_by_step(6)


@case("K2")
def calls_on_one_sample_and_on_none() -> Script:
    """A call on a single sample, and one on an empty batch."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        one = model(**{name: value[:1] for name, value in inputs.items()})
        none = model(input_ids=inputs["input_ids"][:0])
        return outputs["loss"] + one["loss"] + none["logits"].sum(), outputs

    return with_loss(loss)


@case("K2R2")
def one_call_on_two_replicas() -> Script:
    """The model is called once; two replicas of two stages."""
    return with_loss()


@case("K2R2")
def replicas_call_differently() -> Script:
    """The two replicas call the model another number of times."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        if int(inputs["labels"].sum()) % 2:
            second = model(**{name: value[:2] for name, value in inputs.items()})
            return outputs["loss"] + 0.0 * second["loss"], outputs
        return outputs["loss"], outputs

    return with_loss(loss)


# ---------------------------------------------------------------------------------------------------------
# Gradients inside the loss
# ---------------------------------------------------------------------------------------------------------


class Shifted(Network):
    """A classifier that adds a prompt [H] to all embeddings."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        prompt: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        if prompt is not None:
            x = x + prompt
        for layer in self.layers:
            x = layer(x)
        return classified(self.head(pool(x)), labels)


@case("K2")
def gradient_of_an_own_input() -> Script:
    """The second call is on a prompt that has been moved along its gradient."""

    def wire(trainer: Any) -> None:
        trainer.prompt = nn.Parameter(torch.zeros(WIDTH))

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(prompt=trainer.prompt, **inputs)
        (gradient,) = torch.autograd.grad(outputs["loss"], trainer.prompt, retain_graph=True)
        second = model(prompt=trainer.prompt + 5 * gradient.detach(), **inputs)
        return outputs["loss"] + second["loss"], outputs

    return with_loss(loss, Shifted(), wire=wire)


@case("K2")
def backward_inside_the_loss() -> Script:
    """The loss runs a backward pass of its own."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        (0.5 * outputs["loss"]).backward(retain_graph=True)
        return outputs["loss"], outputs

    return with_loss(loss)


@case("K2")
def backward_for_some_parameters() -> Script:
    """A backward pass inside the loss, for the head's parameters alone."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        outputs["loss"].backward(inputs=list(model.head.parameters()), retain_graph=True)
        return outputs["loss"], outputs

    return with_loss(loss)


@case("K2")
def gradient_of_the_head() -> Script:
    """The loss is weighted by the norm of the head's gradient."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        (gradient,) = torch.autograd.grad(outputs["loss"], model.head.weight, retain_graph=True)
        return outputs["loss"] * (1 + gradient.norm().detach()), outputs

    return with_loss(loss)


@case("K2")
def loss_of_the_last_step() -> Script:
    """The loss adds the last step's loss."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        value = outputs["loss"] + 0.1 * getattr(trainer, "previous", torch.zeros(()))
        trainer.previous = outputs["loss"].detach()
        return value, outputs

    return with_loss(loss)


# ---------------------------------------------------------------------------------------------------------
# Ways of calling
# ---------------------------------------------------------------------------------------------------------


@case("K2", expect="exact", because="compile")
def compiled_call() -> Script:
    """The call is in a function that torch compiles."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if not hasattr(trainer, "compiled"):
            trainer.compiled = torch.compile(lambda given: model(**given)["loss"] * 2, backend="eager")
        return trainer.compiled(dict(inputs)), {"logits": torch.zeros(8, LABELS)}

    return with_loss(loss)


@case("K2")
def call_in_a_thread() -> Script:
    """The model is called in another thread."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        with ThreadPoolExecutor(1) as executor:
            outputs = executor.submit(lambda: model(**inputs)).result()
        return outputs["loss"], outputs

    return with_loss(loss)


@case("K2", expect="exact", because="functional_call")
def functional_call_of_the_head() -> Script:
    """`torch.func.functional_call` with another weight of the head."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        weights = {"head.weight": model.head.weight * 1.5}
        outputs = torch.func.functional_call(model, weights, (), dict(inputs))
        return outputs["loss"], outputs

    return with_loss(loss)


@case("K2", expect="exact", because="functional_call")
def functional_call_of_the_first_layer() -> Script:
    """`torch.func.functional_call` with another weight of the first layer."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        weights = {"layers.0.linear.weight": torch.eye(WIDTH)}
        outputs = torch.func.functional_call(model, weights, (), dict(inputs))
        return outputs["loss"], outputs

    return with_loss(loss)


@case("K2")
def call_in_inference_mode() -> Script:
    """The first of two calls is in inference mode."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        with torch.inference_mode():
            target = model(**inputs)
        outputs = model(**inputs)
        distance = (outputs["logits"] - target["logits"].clone() * 0.5).pow(2).mean()
        return outputs["loss"] + distance, outputs

    return with_loss(loss)


@case("K2")
def compiled_model() -> Script:
    """The model is called through `torch.compile`, twice."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if not hasattr(trainer, "compiled"):
            trainer.compiled = torch.compile(model, backend="eager")
        outputs = trainer.compiled(**inputs)
        return outputs["loss"] + 0.5 * trainer.compiled(**inputs)["loss"], outputs

    return with_loss(loss)


@case("K2")
def functional_call_with_the_same_weights() -> Script:
    """`torch.func.functional_call` with the model's own parameters."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = torch.func.functional_call(model, dict(model.named_parameters()), (), dict(inputs))
        return outputs["loss"], outputs

    return with_loss(loss)


@case("K2", expect="exact", because="held by rank")
def functional_call_with_detached_weights() -> Script:
    """`torch.func.functional_call` with all parameters detached, for a target without gradients."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        detached = {name: parameter.detach() for name, parameter in model.named_parameters()}
        target = torch.func.functional_call(model, detached, (), dict(inputs))
        outputs = model(**inputs)
        return outputs["loss"] + (outputs["logits"] - 0.5 * target["logits"]).pow(2).mean(), outputs

    return with_loss(loss)


@case("K2", expect="exact", because="functional_call")
def functional_call_under_a_part_of_the_model() -> Script:
    """`torch.func.functional_call` of the model with another weight of its embeddings."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        weights = {"embedding.weight": torch.eye(64, WIDTH)}
        outputs = torch.func.functional_call(model, weights, (), dict(inputs))
        return outputs["loss"] + model(**inputs)["loss"], outputs

    return with_loss(loss)


def with_penalty(penalty: Any) -> Script:
    """The loss adds `penalty(weight)` of the first layer's weight, which another stage has."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs["loss"] + 0.1 * penalty(model.layers[0].linear.weight), outputs

    return with_loss(loss)


def squares(weight: Tensor) -> Tensor:
    return weight.pow(2).sum()


def squares_of_plain_tensor(weight: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return squares(weight)


def squares_of_copy(weight: Tensor) -> Tensor:
    copy = torch.zeros(0)
    with torch.no_grad():
        copy.set_(weight)  # type: ignore[call-overload]
    return squares(copy)


@case("K2", expect="exact", because="pipeline_parallel_size")
def penalty_without_torch_function() -> Script:
    """A penalty is computed while torch's overrides are disabled."""
    return with_penalty(squares_of_plain_tensor)


@case("K2", expect="exact", because="pipeline_parallel_size")
def penalty_of_a_plain_tensor() -> Script:
    """A penalty on `as_subclass(torch.Tensor)`."""
    return with_penalty(lambda weight: squares(weight.as_subclass(torch.Tensor)))


@case("K2", expect="exact", because="pipeline_parallel_size")
def penalty_of_a_new_tensor() -> Script:
    """A penalty on `torch.Tensor(weight)`."""
    return with_penalty(lambda weight: squares(torch.Tensor(weight)))


@case("K2", expect="exact", because="pipeline_parallel_size")
def penalty_of_the_same_memory() -> Script:
    """A penalty on a tensor that has been set to the memory of the weight."""
    return with_penalty(squares_of_copy)


@case("K2", expect="exact", because="pipeline_parallel_size")
def penalty_by_vmap() -> Script:
    """A penalty by rows, by `torch.func.vmap`."""
    return with_penalty(lambda weight: torch.func.vmap(squares)(weight).sum())


@case("K2", expect="exact", because="pipeline_parallel_size")
def gradient_of_a_penalty() -> Script:
    """The norm of a penalty's gradient, by `torch.func.grad`."""
    return with_penalty(lambda weight: torch.func.grad(squares)(weight).norm())


@case("K2", expect="exact", because="pipeline_parallel_size")
def penalty_by_vjp() -> Script:
    """A penalty by `torch.func.vjp`."""
    return with_penalty(lambda weight: torch.func.vjp(squares, weight)[0])


@case("K2")
def penalty_of_the_head() -> Script:
    """A penalty on the head's weight, which is on the stage of the loss, by rows and by `torch.func.vmap`."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs["loss"] + 0.1 * torch.func.vmap(squares)(model.head.weight).sum(), outputs

    return with_loss(loss)


BF16 = 100.0
"""How much larger differences may be: a number in bfloat16 has eight bits."""


@case("K2", slack=BF16)
def bf16() -> Script:
    """The training's autocast is on for the call."""
    return with_loss(options={"bf16": True})


@case("K2", slack=BF16)
def autocast_off_for_one_call() -> Script:
    """The loss switches autocast off for one of two calls."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        with torch.autocast("cpu", enabled=False):
            outputs = model(**inputs)
        return outputs["loss"] + model(**inputs)["loss"], outputs

    return with_loss(loss, options={"bf16": True})


@case("K2")
def gradient_checkpointing() -> Script:
    """Two calls of a model with gradient checkpointing."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs, second = model(**inputs), model(**inputs)
        distance = (second.logits - outputs.logits.detach() * 0.5).pow(2).mean()
        return outputs.loss + distance, outputs

    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    return with_loss(loss, bert(), options=checkpointing)


# ---------------------------------------------------------------------------------------------------------
# Samples of a call
# ---------------------------------------------------------------------------------------------------------


class Prompted(Network):
    """A classifier that puts a prompt [P, H] before the words, and scales its features by the mean of a vector."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        prompt: Tensor | None = None,
        scale: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        if prompt is not None:
            x = torch.cat([prompt[None].expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        features = pool(x) if scale is None else pool(x) * scale.mean()
        return classified(self.head(features), labels)


def random_prompt(length: int) -> Tensor:
    """[P, H]"""
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(3))


def with_prompt(call: Any, length: int = 4) -> Script:
    """`call(model, prompt, inputs)` calls the model with a prompt that the trainer has."""

    def wire(trainer: Any) -> None:
        trainer.prompt = random_prompt(length)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = call(model, trainer.prompt, inputs)
        return outputs["loss"], outputs

    return with_loss(loss, Prompted(), wire=wire)


@case("K2")
def prompt_first() -> Script:
    """A prompt of as many rows as samples of a process is the first keyword."""
    return with_prompt(lambda model, prompt, inputs: model(prompt=prompt, **inputs))


@case("K2")
def prompt_of_two_first() -> Script:
    """A prompt of two rows is the first keyword."""
    return with_prompt(lambda model, prompt, inputs: model(prompt=prompt, **inputs), length=2)


@case("K2")
def prompt_last() -> Script:
    """The prompt is the last keyword."""
    return with_prompt(lambda model, prompt, inputs: model(**inputs, prompt=prompt))


@case("K2")
def vector_of_settings_first() -> Script:
    """A vector of settings is the first keyword."""
    settings = torch.tensor([0.5, 1.0, 1.5, 4.0])
    return with_prompt(lambda model, prompt, inputs: model(scale=settings, **inputs))


@case("K2")
def trained_prompt_first() -> Script:
    """The prompt is trained by an optimizer of the loss's own."""

    def wire(trainer: Any) -> None:
        trainer.prompt = nn.Parameter(random_prompt(4))
        trainer.prompt_optimizer = torch.optim.SGD([trainer.prompt], lr=0.5)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if trainer.state.global_step:
            trainer.prompt_optimizer.step()
            trainer.prompt_optimizer.zero_grad()
        outputs = model(prompt=trainer.prompt, **inputs)
        return outputs["loss"], outputs

    return with_loss(loss, Prompted(), wire=wire)


def in_the_batch(is_first: bool, is_driven: bool, **column: Tensor) -> Script:
    """The collator adds a tensor that has no row for each sample."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {**column, **pad(rows)} if is_first else {**pad(rows), **column}

    if is_driven:
        return with_loss(model=Prompted(), collator=collate)
    return Script(model=Prompted(), data=samples(48), collator=collate, options={"num_train_epochs": 1})


PROMPT = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


@case("K2")
def batch_prompt_first() -> Script:
    """A prompt is the first entry of the batch; the model's own loss."""
    return in_the_batch(True, False, prompt=PROMPT)


@case("K2")
def batch_prompt_last() -> Script:
    """A prompt is the last entry of the batch; the model's own loss."""
    return in_the_batch(False, False, prompt=PROMPT)


@case("K2")
def batch_prompt_first_with_own_loss() -> Script:
    """A prompt is the first entry of the batch; a loss of the user's."""
    return in_the_batch(True, True, prompt=PROMPT)


@case("K2")
def batch_settings_first_with_own_loss() -> Script:
    """A vector of settings is the first entry of the batch; a loss of the user's."""
    return in_the_batch(True, True, scale=torch.linspace(0.5, 2, 3))
