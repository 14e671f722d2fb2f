"""Recipes of fine-tuning over several stages: what users do to gradients, weights and settings around a loss."""

from __future__ import annotations

import contextvars
import logging
import types
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from transformers import BertForTokenClassification, TrainingArguments

from ..kit import (
    LABELS,
    VOCABULARY,
    WIDTH,
    At,
    Each,
    Inputs,
    Layer,
    LossAndOutputs,
    Network,
    Script,
    bert,
    bert_config,
    case,
    classified,
    own_loss,
    plain_loss,
    pool,
    samples,
    with_loss,
)
from .attack_recipes_front import logged

ADAMW: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 5e-3, "adam_epsilon": 1e-3, "weight_decay": 0.05}


LATER = "a forward that mixes samples only after the first step is not noticed"


def stock(model: Any = None, **fields: Any) -> Script:
    """Six steps of a BERT with its own loss, whose log is compared."""
    fields["options"] = {"num_train_epochs": 1, "max_grad_norm": 0.5, **fields.get("options", {})}
    return Script(model=model or bert(), **{"data": samples(48), "observe": logged, **fields})


def driven(loss: Any = plain_loss, model: Any = None, **fields: Any) -> Script:
    """Six steps with a loss of the user's, whose log is compared."""
    fields["options"] = {"max_grad_norm": 0.5, **fields.get("options", {})}
    return with_loss(loss, model, **{"observe": logged, **fields})


def before_step(change: Callable[[Any, int], None], **fields: Any) -> Script:
    """`change(model, step)` before each step of the optimizer."""
    return stock(callbacks=[At(change, range(99), "on_pre_optimizer_step")], **fields)


def here(model: Any) -> list[tuple[str, Any]]:
    return [(n, p) for n, p in model.named_parameters() if not getattr(p, "is_elsewhere", False)]


# ---------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------


@case("K2", "R2", expect="exact")
def noise_on_all_gradients() -> Script:
    """Noise on all gradients, from a generator that one seed begins in each step."""

    def change(model: Any, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn(parameter.grad.shape, generator=generator), alpha=1e-3)

    return before_step(change)


@case("K2", "R2")
def gradients_centralised() -> Script:
    """Gradient centralisation of what is here, in a hook before the step of every optimizer."""

    def change(model: Any, step: int) -> None:
        for _, parameter in here(model):
            if parameter.grad is not None and parameter.dim() > 1:
                parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))

    return before_step(change)


@case("K2", "K2R2")
def grokfast() -> Script:
    """A running mean of the gradients is added to them."""
    means: dict[str, Tensor] = {}

    def change(model: Any, step: int) -> None:
        for name, parameter in here(model):
            if parameter.grad is not None:
                means[name] = 0.9 * means.get(name, parameter.grad.clone()) + 0.1 * parameter.grad
                parameter.grad.add_(means[name], alpha=2.0)

    return before_step(change, options=ADAMW)


@case("K2", "R2", expect="exact")
def skipped_if_not_finite() -> Script:
    """The step is skipped if any gradient is not finite; the head's is not, once."""
    model = bert()

    def change(changed: Any, step: int) -> None:
        if step == 2 and not getattr(changed.classifier.weight, "is_elsewhere", False):
            changed.classifier.weight.grad.fill_(float("nan"))
        grads = [p.grad for p in changed.parameters() if p.grad is not None]
        if not all(bool(torch.isfinite(g).all()) for g in grads):
            changed.zero_grad()

    return before_step(change, model=model, options={"max_grad_norm": 0.0})


@case("K2")
def hooks_clamp_gradients() -> Script:
    """Tensor hooks on all parameters clamp gradients, from the start."""
    model = bert()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return stock(model)


@case("K2", expect="exact", because="begun to divide its batches")
def hooks_clamp_gradients_later() -> Script:
    """Tensor hooks that clamp gradients are registered in the third step."""

    def change(model: Any, step: int) -> None:
        for _, parameter in here(model):
            parameter.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))

    return stock(callbacks=[At(change, [2])])


@case("K2", expect="exact", because="begun to divide its batches")
def hooks_on_accumulated_gradients_later() -> Script:
    """`register_post_accumulate_grad_hook` in the third step, with a sign."""

    def sign(parameter: Any) -> None:
        parameter.grad = parameter.grad.sign() * 1e-3

    def change(model: Any, step: int) -> None:
        for _, parameter in here(model):
            parameter.register_post_accumulate_grad_hook(sign)

    return stock(callbacks=[At(change, [2])])


@case("K2")
def gradient_of_a_layer_normalised() -> Script:
    """A backward hook on a layer divides the gradient by its norm over the whole batch."""
    model = bert()
    model.bert.encoder.layer[2].register_full_backward_hook(
        lambda module, given, grads: tuple(None if g is None else g / (g.norm() + 1e-6) * 1e-2 for g in given)
    )
    return stock(model)


@case("K2", expect="exact", because="begun to divide its batches")
def gradient_of_a_layer_normalised_later() -> Script:
    """Likewise, from the third step on."""

    def hook(module: Any, given: Any, grads: Any) -> Any:
        return tuple(None if g is None else g / (g.norm() + 1e-6) * 1e-2 for g in given)

    def change(model: Any, step: int) -> None:
        model.bert.encoder.layer[2].register_full_backward_hook(hook)

    return stock(callbacks=[At(change, [2])])


@case("K2", expect="exact", because="begun to divide its batches")
def gradient_normalised_from_the_begin_of_training() -> Script:
    """Likewise, from `on_train_begin`."""

    def change(model: Any, step: int) -> None:
        model.bert.encoder.layer[2].output.dense.weight.register_hook(lambda grad: grad / (grad.norm() + 1e-6) * 1e-2)

    return stock(callbacks=[At(change, [0], "on_train_begin")])


@case("K2", expect="exact", because="position_embeddings.weight is held by")
def embedding_pruned_by_a_callback() -> Script:
    """A module with a single parameter is pruned in the second step; the new parameter has another name."""

    def change(model: Any, step: int) -> None:
        prune.random_unstructured(model.bert.embeddings.position_embeddings, "weight", 0.5)

    return stock(callbacks=[At(change, [1])])


@case("K2", expect="exact", because="the module head")
def head_replaced_by_the_loss() -> Script:
    """The loss, on the last stage, gives the model another head after its call."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        found, outputs = plain_loss(trainer, model, inputs)
        if trainer.state.global_step == 2:
            model.head = nn.Linear(WIDTH, LABELS)
        return found, outputs

    return driven(loss)


class Squeezes(Layer):
    """A layer that fails on a single sample."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + 0 * x.squeeze(0)[:, :1].unsqueeze(1).expand(len(x), 1, 1, WIDTH).squeeze(1)


@case("K2", expect="exact")
def layers_that_fail_on_one_sample() -> Script:
    """Layers that run on whole batches only."""
    return driven(model=Network(layer=Squeezes))


def centred(module: Any, given: Any, output: Any) -> Any:
    """The mean over the batch is taken from what a layer returns."""
    return output - 0.5 * output.mean(0, keepdim=True)


@case("K2")
def layer_centred_over_the_batch() -> Script:
    """A forward hook on a layer, from the start."""
    model = bert()
    model.bert.encoder.layer[1].register_forward_hook(centred)
    return stock(model)


@case("K2", expect="exact", fails=LATER)
def layer_centred_over_the_batch_later() -> Script:
    """Likewise, from the third step on."""

    def change(model: Any, step: int) -> None:
        model.bert.encoder.layer[1].register_forward_hook(centred)

    return stock(callbacks=[At(change, [2])])


@case("K2")
def layers_centred_over_the_batch_under_a_loss() -> Script:
    """Layers of the user's that take the mean over the batch from what they return."""

    class Centred(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return centred(self, x, super().forward(x))  # type: ignore[no-any-return]

    return driven(model=Network(layer=Centred))


class Normalised(Layer):
    """A layer whose forward has the gradient divided by its norm over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad / (grad.norm() + 1e-6) * 1e-2)
        return x


@case("K2")
def gradient_normalised_in_the_forward() -> Script:
    """Layers register a tensor hook that divides the gradient by its norm over the batch."""
    return driven(model=Network(layer=Normalised))


@case("K2")
def gradient_normalised_in_the_forward_of_a_declared_mean() -> Script:
    """Likewise, with a loss that is declared to be a mean."""
    return driven(model=Network(layer=Normalised), product={"loss_reduction": "mean"})


def normalised(x: Tensor) -> Tensor:
    """Registers a hook that divides the gradient by its norm."""
    x.register_hook(lambda grad: grad / (grad.norm() + 1e-6) * 1e-2)
    return x


class NormalisedInTraining(Layer):
    """Likewise, in training mode only and by a function."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return normalised(x) if self.training else x


@case("K2")
def gradient_normalised_in_training_mode() -> Script:
    """Likewise, in training mode only, whether or not the tensor requires a gradient."""
    return driven(model=Network(layer=NormalisedInTraining))


@case("K2")
def gradient_normalised_in_training_mode_under_the_stock_loss() -> Script:
    """Likewise, under the loss of the model."""
    return stock(Network(layer=NormalisedInTraining))


def by_hooked_norms(name: str, steps: range) -> Script:
    """Hooks collect the gradients' norms, by which a callback sets a number in the optimizer's groups."""
    model, norms = bert(), []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: norms.append(float(grad.norm())))

    def end(each: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        total = sum(norm**2 for norm in norms) ** 0.5
        norms.clear()
        for group in optimizer.param_groups if state.global_step in steps else ():
            group[name] = 0.05 / (1 + total)

    return stock(model, callbacks=[Each(end, "on_pre_optimizer_step")])


@case("K2", expect="exact", because="optimizer.param_groups")
def rate_by_hooked_norms() -> Script:
    """In each step, the rate. One process sets the same number, from the norm over all layers."""
    return by_hooked_norms("lr", range(99))


@case("K2", expect="exact", because="optimizer.param_groups")
def decay_by_hooked_norms_in_the_last_step() -> Script:
    """The weight decay, when no step follows that would notice it."""
    return by_hooked_norms("weight_decay", range(5, 99))


@case("K2", expect="exact")
def rate_by_the_norm_over_all_layers() -> Script:
    """A callback sets the rate from the norm that `accelerator.clip_grad_norm_` returns, on all processes the same."""
    script = stock(options={"max_grad_norm": 0.0})

    def end(each: Any, state: Any, control: Any, optimizer: Any = None, model: Any = None, **_: Any) -> None:
        norm = float(each.trainer.accelerator.clip_grad_norm_(model.parameters(), 1e9))
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + norm)

    script.callbacks.append(Each(end, "on_pre_optimizer_step"))
    return script


@case("K2", expect="exact")
def clipped_after_each_micro_step() -> Script:
    """`on_substep_end` clips what is accumulated by value, under accumulation."""

    def change(model: Any, step: int) -> None:
        torch.nn.utils.clip_grad_value_([p for _, p in here(model)], 1e-3)

    callbacks = [At(change, range(99), "on_substep_end")]
    return driven(callbacks=callbacks, options={"gradient_accumulation_steps": 2})


@case("K2")
def weights_perturbed_for_a_step() -> Script:
    """LookSAM by callbacks: weights move along the last gradient for a step, and back before the update."""
    kept: dict[str, Tensor] = {}

    def perturb(model: Any, step: int) -> None:
        for name, parameter in here(model):
            if name in kept:
                parameter.add_(kept[name])

    def restore(model: Any, step: int) -> None:
        for name, parameter in here(model):
            if name in kept:
                parameter.sub_(kept[name])
            if parameter.grad is not None:
                kept[name] = 0.05 * parameter.grad / (parameter.grad.norm() + 1e-6)

    callbacks = [At(perturb, range(99)), At(restore, range(99), "on_pre_optimizer_step")]
    return driven(callbacks=callbacks)


@case("K2", expect="exact")
def adversarial_step_on_embeddings() -> Script:
    """FGM as its widespread implementation: the embedding moves along its gradient, and a second backward pass."""

    class Attacked:
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, dict(inputs), num_items_in_batch)  # type: ignore[misc]
            kept = {}
            for name, parameter in model.named_parameters():
                if "embedding" in name and parameter.grad is not None:
                    kept[name] = parameter.data.clone()
                    parameter.data.add_(0.1 * parameter.grad / parameter.grad.norm())
            super().training_step(model, dict(inputs), num_items_in_batch)  # type: ignore[misc]
            for name, parameter in model.named_parameters():
                if name in kept:
                    parameter.data = kept[name]
            return loss

    return with_loss(trainer=own_loss(plain_loss, Attacked))


# ---------------------------------------------------------------------------------------------------------
# Weights of lower layers
# ---------------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[Any], Any]] = {
    "vector_norm": lambda p: torch.linalg.vector_norm(p),
    "einsum": lambda p: torch.einsum("ij,ij->", p, p),
    "cat": lambda p: torch.cat([p.reshape(-1), p.reshape(-1)]).sum(),
    "vector": lambda p: nn.utils.parameters_to_vector([p]).sum(),
    "index": lambda p: p[0, 0],
    "iterate": lambda p: next(iter(p)).sum(),
    "item": lambda p: p.mean().item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: numpy.asarray(p.detach()).sum(),
    "foreach": lambda p: torch._foreach_norm([p]),
    "mse": lambda p: F.mse_loss(p, torch.zeros(p.shape)),
    "dist": lambda p: torch.dist(p, torch.zeros(p.shape)),
    "matmul": lambda p: (p @ p.T).sum(),
    "linear": lambda p: F.linear(torch.ones(1, p.shape[1]), p).sum(),
    "embedding": lambda p: F.embedding(torch.tensor([0]), p).sum(),
    "clone": lambda p: p.detach().clone(),
    "copy": lambda p: torch.empty(p.shape).copy_(p.detach()),
    "stack": lambda p: torch.stack([p, p]).sum(),
    "svd": lambda p: torch.linalg.svdvals(p),
    "compare": lambda p: bool((p == p).all()),
    "new": lambda p: p.new_tensor(1.0) + p.sum(),
    "double": lambda p: p.double().sum(),
    "to": lambda p: p.to(torch.float64).sum(),
    "abs": lambda p: abs(p).sum(),
    "max": lambda p: p.max(),
    "where": lambda p: torch.where(p > 0, p, -p).sum(),
    "out": lambda p: torch.add(p.detach(), 1, out=torch.empty(p.shape)),
    "set": lambda p: torch.nn.init.zeros_(p),
    "cov": lambda p: torch.cov(p),
    "grad": lambda p: p.grad.norm(),
    "format": lambda p: f"{p.mean():.3f}",
    "memory": lambda p: torch.frombuffer(p.detach().numpy(), dtype=torch.float32).sum(),
}


def tried(parameter: Any) -> list[str]:
    """The ways of reading a parameter that raise no `ValueError`."""
    silent = []
    for name, read in READS.items():
        try:
            read(parameter)
        except ValueError:
            continue
        except Exception as error:
            silent.append(f"{name}: {type(error).__name__}")
            continue
        silent.append(name)
    return silent


@case("K2", expect="equal")
def reads_of_a_lower_weight() -> Script:
    """Many ways of reading a weight of the lowest stage in the loss: each is an error where it is not."""
    found: list[str] = []

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        weight = model.layers[0].linear.weight
        if getattr(weight, "is_elsewhere", False):
            found.extend(tried(weight))
        return plain_loss(trainer, model, inputs)

    return with_loss(loss, observe=lambda trainer: {"silent": list(found)})


@case("K2", expect="exact")
def starting_point() -> Script:
    """L2-SP: the distance of all weights from where they have begun, which the user has copied before."""
    model = Network()
    begun = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        penalty = sum(F.mse_loss(p, begun[n], reduction="sum") for n, p in model.named_parameters())
        return outputs["loss"] + 0.1 * penalty, outputs

    return with_loss(loss, model)


class Penalised(Network):
    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> dict[str, Tensor]:
        outputs = super().forward(input_ids, attention_mask, labels)
        if labels is not None:
            outputs["loss"] = outputs["loss"] + 0.1 * sum(layer.linear.weight.abs().mean() for layer in self.layers)
        return outputs


@case("K2", "R2")
def penalty_in_the_models_forward() -> Script:
    """The model's own forward adds an L1 penalty of all layers to the loss."""
    return driven(model=Penalised())


@case("K2", expect="exact")
def orthogonal_layers_by_a_callback() -> Script:
    """A penalty's gradient is added to that of each weight in a callback, without `is_elsewhere`."""

    def change(model: Any, step: int) -> None:
        for layer in model.layers:
            weight = layer.linear.weight
            weight.grad += 0.01 * (weight @ weight.T - torch.eye(WIDTH)) @ weight

    return driven(callbacks=[At(change, range(99), "on_pre_optimizer_step")])


@case("K2", expect="exact")
def lower_layer_called_by_hand() -> Script:
    """The loss calls the lowest layer itself, on embeddings of its own."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        x = torch.ones(1, 2, WIDTH)
        return outputs["loss"] + 0.1 * model.layers[0](x).pow(2).mean(), outputs

    return with_loss(loss)


@case("K2", expect="exact")
def words_by_the_embedding() -> Script:
    """An auxiliary loss predicts words with the weight of the embedding."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        scores = outputs["logits"] @ model.head.weight @ model.embedding.weight.T
        return outputs["loss"] + 0.1 * F.cross_entropy(scores, inputs["input_ids"][:, 0]), outputs

    return with_loss(loss)


@case("K2")
def doubled_batch() -> Script:
    """SimCSE: the model is called on the batch twice over, and the halves are contrasted."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        words = torch.cat([inputs["input_ids"], inputs["input_ids"].flip(1)])
        logits = model(words, torch.cat([inputs["attention_mask"]] * 2))["logits"]
        one, other = F.normalize(logits, dim=-1).chunk(2)
        value = F.cross_entropy(one @ other.T * 5, torch.arange(len(one)))
        return value, {"loss": value, "logits": one}

    return driven(loss)


# ---------------------------------------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------------------------------------

SCALE = 1.0
TEMPERATURE: contextvars.ContextVar[float] = contextvars.ContextVar("temperature", default=1.0)
SETTINGS = types.SimpleNamespace(scale=1.0)
TRAINING = types.SimpleNamespace()
LOGGER = logging.getLogger(__name__)


class ReadsGlobal(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALE


class ReadsContext(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * TEMPERATURE.get()


class ReadsNamespace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SETTINGS.scale


class ReadsClass(Layer):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class ReadsTable(Layer):
    """Reads a setting of a kind that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = numpy.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(sum(self.table))


def setting(layer: type[nn.Module], change: Callable[[Any, Any, float], None], **fields: Any) -> Script:
    """`change(trainer, model, number)` before the loss calls the model."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        change(trainer, model, 0.5 + 0.25 * (trainer.state.global_step % 3))
        return plain_loss(trainer, model, inputs)

    return driven(loss, Network(layer=layer), **fields)


def set_global(trainer: Any, model: Any, number: float) -> None:
    global SCALE
    SCALE = number


@case("K2", expect="exact", because="the code of the model's modules reads")
def global_set_by_the_loss() -> Script:
    """The loss sets a global variable of the script that layers read."""
    return setting(ReadsGlobal, set_global)


@case("K2", expect="exact", because="the code of the model's modules reads")
def global_set_after_the_call() -> Script:
    """The loss sets the variable from its value, for the next step."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        found, outputs = plain_loss(trainer, model, inputs)
        set_global(trainer, model, 1 / (1 + float(found)))
        return found, outputs

    return driven(loss, Network(layer=ReadsGlobal))


class Logs(Layer):
    """Logs, and reads what Accelerate says of the processes."""

    def forward(self, x: Tensor) -> Tensor:
        LOGGER.debug("a layer runs")
        scale = 1.0 if TRAINING.args.world_size else 0.0
        return super().forward(x) * scale


@case("K2")
def loggers_and_arguments_read_by_layers() -> Script:
    """Layers use a logger and the script's arguments; the loss logs and makes another logger."""
    TRAINING.args = TrainingArguments("unused", use_cpu=True)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        LOGGER.info("a step runs")
        logging.getLogger(f"{__name__}.{trainer.state.global_step}").debug("made by the loss")
        return plain_loss(trainer, model, inputs)

    return driven(loss, Network(layer=Logs))


@case("K2", expect="exact", because="the code of the model's modules reads")
def context_set_by_the_loss() -> Script:
    """The loss sets a context variable that layers read."""
    return setting(ReadsContext, lambda trainer, model, number: TEMPERATURE.set(number) and None)


@case("K2", expect="exact", because="the code of the model's modules reads")
def namespace_set_by_the_loss() -> Script:
    """The loss sets a number on an object of the script that layers read."""
    return setting(ReadsNamespace, lambda trainer, model, number: setattr(SETTINGS, "scale", number))


@case("K2", expect="exact", because="the code of the model's modules reads")
def class_set_by_the_loss() -> Script:
    """The loss sets a number on the layers' class."""
    return setting(ReadsClass, lambda trainer, model, number: setattr(ReadsClass, "scale", number))


@case("K2")
def tuple_set_by_the_loss() -> Script:
    """The loss gives each layer another tuple."""

    def change(trainer: Any, model: Any, number: float) -> None:
        for layer in model.layers:
            layer.table = (number, 1.0)

    return setting(ReadsTable, change)


@case("K2")
def set_set_by_the_loss() -> Script:
    """The loss gives each layer another set of numbers."""

    def change(trainer: Any, model: Any, number: float) -> None:
        for layer in model.layers:
            layer.table = {number, 1.5}

    return setting(ReadsTable, change)


@case("K2")
def global_set_in_a_callback() -> Script:
    """A callback of every process sets the global variable."""

    def change(model: Any, step: int) -> None:
        set_global(None, model, 0.5 + step)

    return driven(model=Network(layer=ReadsGlobal), callbacks=[At(change, range(99))])


@case("K2", expect="exact")
def dtype_set_by_the_loss() -> Script:
    """The loss calls the model under another default dtype, by which layers make a factor."""

    class Makes(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(torch.tensor(1 / 3))

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        torch.set_default_dtype(torch.float16)
        try:
            return plain_loss(trainer, model, inputs)
        finally:
            torch.set_default_dtype(torch.float32)

    return driven(loss, Network(layer=Makes))


@case("K2")
def layers_seeded_by_the_loss() -> Script:
    """The loss seeds torch's generator before each call, and layers have dropout."""

    class Drops(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.0, self.training)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        torch.manual_seed(trainer.state.global_step)
        outputs = model(**inputs)
        return outputs["loss"] * torch.rand(()), outputs

    return driven(loss, Network(layer=Drops))


@case("K2")
def mixup_by_numpy() -> Script:
    """Mixup of logits' targets by `numpy.random.beta` and `torch.randperm`, from generators of the script's."""
    draws, order = numpy.random.default_rng(3), torch.Generator().manual_seed(3)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        share, others = draws.beta(2, 2), torch.randperm(len(inputs["labels"]), generator=order)
        value = share * outputs["loss"]
        value = value + (1 - share) * F.cross_entropy(outputs["logits"], inputs["labels"][others])
        return value, outputs

    return driven(loss)


@case("K2")
def mixup_by_global_generators() -> Script:
    """Likewise, from the global generators of NumPy and torch."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        share, others = numpy.random.beta(2, 2), torch.randperm(len(inputs["labels"]))
        value = share * outputs["loss"]
        value = value + (1 - share) * F.cross_entropy(outputs["logits"], inputs["labels"][others])
        return value, outputs

    return driven(loss)


# ---------------------------------------------------------------------------------------------------------
# What the loss returns, and by how much it counts
# ---------------------------------------------------------------------------------------------------------


@case("K2", "R2")
def loss_in_double_precision() -> Script:
    """The loss is in float64."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs["loss"].double(), outputs

    return driven(loss, options=ADAMW)


@case("K2", "R2")
def loss_of_nothing_in_some_steps() -> Script:
    """In every third step, the loss is zero times the logits; AdamW moves on."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        is_used = trainer.state.global_step % 3 != 1
        return outputs["loss"] if is_used else outputs["logits"].sum() * 0, outputs

    return driven(loss, options=ADAMW)


@case("K2", "R2")
def not_finite_in_one_step() -> Script:
    """The loss is NaN in one step, which the log filters, and gradients are NaN; the user clears them."""

    class Skips:
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            if not torch.isfinite(loss):
                model.zero_grad()
            return loss

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs["loss"] * (float("nan") if trainer.state.global_step == 2 else 1.0), outputs

    options = {"logging_nan_inf_filter": True, "logging_steps": 2, "max_grad_norm": 0.0}
    return with_loss(trainer=own_loss(loss, Skips), options=options, observe=logged)


@case("K1", "K2", "K2R2", "R2", expect="exact", because="num_items_in_batch")
def counts_weights_of_samples() -> Script:
    """`get_batch_samples` returns the sum of weights, by which the loss divides; with accumulation."""

    class Weighs:
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            batches, _ = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
            return batches, sum(1.0 + b["labels"].sum() for b in batches)

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(**inputs)
            value = F.cross_entropy(outputs["logits"], inputs["labels"], reduction="sum")
            value = value / (num_items_in_batch if num_items_in_batch is not None else 8)
            return (value, outputs) if return_outputs else value

    return with_loss(trainer=Weighs, options={"gradient_accumulation_steps": 2}, observe=logged)


class PassesNoNumber:
    """A `training_step` as many projects have it: it does not know the third argument."""

    def training_step(self, model: Any, inputs: Any, *_: Any) -> Any:
        return super().training_step(model, inputs)  # type: ignore[misc]


RAGGED: dict[str, Any] = {"shortest": 2, "longest": 12, "by_word": True}


@case("K1", "K2")
def no_number_of_items_passed_on() -> Script:
    """Labels of words, with accumulation: without the number, each batch counts as much as another."""
    model, options = BertForTokenClassification(bert_config()), {"gradient_accumulation_steps": 2}
    return stock(model, data=samples(48, **RAGGED), options=options, trainer=PassesNoNumber)


class Sums:
    """A loss of the user's that divides by the number of items if there is one."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        value = F.cross_entropy(outputs.logits.flatten(0, 1), inputs["labels"].flatten(), reduction="sum")
        value = value / (100 if num_items_in_batch is None else num_items_in_batch)
        return (value, outputs) if return_outputs else value


def summed(*bases: type) -> Script:
    model, options = BertForTokenClassification(bert_config()), {"gradient_accumulation_steps": 2}
    trainer = type("Summing", bases, {})
    return stock(model, data=samples(48, **RAGGED), options=options, trainer=trainer)


@case("K1", "K2")
def no_number_passed_on_to_an_own_loss() -> Script:
    """Likewise, with a loss of the user's that divides by the number if there is one."""
    return summed(PassesNoNumber, Sums)


@case("K1", "K2")
def number_of_items_of_every_second_batch() -> Script:
    """Only the first of two accumulated batches gets a number of the user's."""

    class Weighs(Sums):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            self.turn = 1 - getattr(self, "turn", 0)
            number = 7.5 if self.turn else num_items_in_batch
            return super().training_step(model, inputs, number)  # type: ignore[misc]

    return summed(Weighs)


@case("K2", "R2")
def reads_what_accelerate_says() -> Script:
    """The loss doubles where gradients are synchronised, and reads the number of micro-steps."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        factor = 2.0 if trainer.accelerator.sync_gradients else 1.0
        return outputs["loss"] * factor / trainer.current_gradient_accumulation_steps, outputs

    return driven(loss, options={"gradient_accumulation_steps": 2})


@case("K2")
def rate_read_by_the_loss() -> Script:
    """The loss is weighed by the rate, the scheduler's, the epoch and the progress."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        rate = trainer.optimizer.param_groups[0]["lr"] + trainer.lr_scheduler.get_last_lr()[0]
        progress = trainer.state.global_step / trainer.state.max_steps + (trainer.state.epoch or 0)
        return outputs["loss"] * (1 + 10 * rate + progress), outputs

    return driven(loss, options={**ADAMW, "lr_scheduler_type": "cosine", "warmup_steps": 2})


@case("K2", "K2R2")
def seen_tokens_and_rare_logs() -> Script:
    """Tokens that were seen are counted, and the mean of three steps is logged."""

    def observe(trainer: Any) -> dict[str, Any]:
        return {**logged(trainer), "seen": int(trainer.state.num_input_tokens_seen)}

    options = {"include_num_input_tokens_seen": "non_padding", "logging_steps": 3, "logging_first_step": True}
    return stock(data=samples(48, 4, 12), options=options, observe=observe)


# ---------------------------------------------------------------------------------------------------------
# Optimizers, schedules, evaluations
# ---------------------------------------------------------------------------------------------------------


@case("K2", "K2R2")
def one_cycle_with_momentum() -> Script:
    """`OneCycleLR`, which cycles AdamW's betas as well, given as `optimizers`."""
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=7)
    return stock(model, keywords={"optimizers": (optimizer, scheduler)})


@case("K2")
def groups_added_by_steps() -> Script:
    """The optimizer has the head alone; a callback adds a group with a lower layer from the third step on."""
    model = Network()
    model.embedding.requires_grad_(False)
    model.layers.requires_grad_(False)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)

    def begin(each: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        if state.global_step in (2, 4):
            layer = model.layers[2 - state.global_step // 4]
            layer.requires_grad_(True)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.02})

    keywords = {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))}
    return driven(model=model, callbacks=[Each(begin, "on_step_begin")], keywords=keywords)


@case("K2", "K2R2")
def frozen_for_some_steps() -> Script:
    """A layer is frozen for two steps and trained again; AdamW keeps its state, which does not move meanwhile."""

    def change(model: Any, step: int) -> None:
        model.bert.encoder.layer[1].requires_grad_(step == 4)

    return stock(callbacks=[At(change, [2, 4])], options=ADAMW)


@case("K2", expect="exact")
def optimizer_that_normalises_all() -> Script:
    """An optimizer of the user's that divides by the norm of all gradients."""

    class Normalising(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.stack([g.norm() for g in grads]).norm()
            for grad in grads:
                grad.div_(norm)
            return super().step(closure)

    model = bert()
    return stock(model, keywords={"optimizers": (Normalising(model.parameters(), lr=0.05), None)})


@case("K2", "R2")
def schedule_patched() -> Script:
    """`optimizer.step` is wrapped in a callback, to count steps and skip the fourth."""
    counts: list[int] = []

    def begin(each: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        step = optimizer.step

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            counts.append(len(counts))
            return None if len(counts) == 4 else step(*args, **kwargs)

        optimizer.step = wrapped

    callbacks = [Each(begin, "on_train_begin")]
    return stock(callbacks=callbacks, observe=lambda trainer: {**logged(trainer), "counts": list(counts)})


@case("K2", "R2", "K2R2")
def metrics_by_batches() -> Script:
    """`batch_eval_metrics`, with metrics of the logits, and logits that are made smaller first."""
    kept: list[Any] = []

    def metrics(given: Any, compute_result: bool = False) -> dict[str, float]:
        kept.append(float(torch.as_tensor(given.predictions).sum()))
        if not compute_result:
            return {}
        total = sum(kept)
        kept.clear()
        return {"total": total}

    keywords = {
        "eval_dataset": samples(24, seed=4),
        "compute_metrics": metrics,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.softmax(-1)[:, :1] * labels[:, None],
    }
    options = {"batch_eval_metrics": True, "eval_strategy": "steps", "eval_steps": 2}

    def observe(trainer: Any) -> dict[str, Any]:
        return {"totals": [e["eval_total"] for e in trainer.state.log_history if "eval_total" in e]}

    return stock(keywords=keywords, options=options, observe=observe)


@case("K2", "K2R2")
def evaluated_at_the_start() -> Script:
    """`eval_on_start`, a delay, and the best checkpoint by a metric of inputs and losses."""
    keywords = {
        "eval_dataset": samples(16, seed=4),
        "compute_metrics": lambda given: {"mean": float(given.inputs.mean() + given.losses.mean())},
    }
    options = {
        **{"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2},
        **{"save_strategy": "steps", "load_best_model_at_end": True, "metric_for_best_model": "mean"},
        **{"include_for_metrics": ["inputs", "loss"], "greater_is_better": True},
    }

    def observe(trainer: Any) -> dict[str, Any]:
        return {"best": (trainer.state.best_metric, trainer.state.best_global_step)}

    return stock(keywords=keywords, options=options, observe=observe)


@case("K2", "R2")
def stopped_in_mid_epoch_and_resumed() -> Script:
    """A callback stops in the middle of the second epoch and saves; the training is resumed with another rate."""
    runs: list[int] = []

    def end(each: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 8 and not runs:
            control.should_training_stop = control.should_save = True

    def drive(trainer: Any) -> Any:
        trainer.train()
        runs.append(1)
        folder = f"{trainer.args.output_dir}/checkpoint-8"
        return [trainer.train(resume_from_checkpoint=folder).global_step]

    options = {
        **ADAMW,
        "num_train_epochs": 3,
        "lr_scheduler_type": "linear",
        "save_strategy": "steps",
        "save_steps": 50,
    }
    return stock(callbacks=[Each(end)], options=options, drive=drive)


# ---------------------------------------------------------------------------------------------------------
# Parametrised models
# ---------------------------------------------------------------------------------------------------------


def of_layers(change: Callable[[nn.Module], Any]) -> Network:
    model = Network()
    for layer in model.layers:
        change(layer.linear)  # type: ignore[arg-type]
    return model


@case("K2", "R2")
def weight_norms() -> Script:
    """All layers have a weight norm, by torch's parametrisations."""
    return driven(model=of_layers(lambda linear: parametrizations.weight_norm(linear)), options=ADAMW)


@case("K2")
def weight_norms_by_hooks() -> Script:
    """Likewise, by the older function, whose hook sets the weight before each forward."""
    return driven(model=of_layers(lambda linear: torch.nn.utils.weight_norm(linear)))


@case("K2")
def orthogonal_weights() -> Script:
    """All layers have orthogonal weights, by a parametrisation."""
    return driven(model=of_layers(lambda linear: parametrizations.orthogonal(linear)))


@case("K2")
def parametrisations_cached() -> Script:
    """The loss calls the model twice within `parametrize.cached()`."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        with nn.utils.parametrize.cached():
            outputs = model(**inputs)
            again = model(**{**inputs, "input_ids": inputs["input_ids"].flip(0)})
        return outputs["loss"] + again["logits"].pow(2).mean(), outputs

    return driven(loss, of_layers(lambda linear: parametrizations.weight_norm(linear)))


class Counted(Layer):
    """Batch normalisation over [B * S, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return self.batch_norm(y.flatten(0, 1)).view_as(y)


@case("K2")
def batch_norm_in_each_layer() -> Script:
    """Layers with batch normalisation, and two calls of the model in the loss."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        half = model(inputs["input_ids"][::2], inputs["attention_mask"][::2])
        return outputs["loss"] + half["logits"].pow(2).mean(), outputs

    return driven(loss, Network(layer=Counted))


@case("K2", expect="exact")
def iterator_in_a_layer() -> Script:
    """Each layer takes a factor from an iterator of its own."""

    class Takes(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.factors = (1 + k / 10 for k in range(10**6))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * next(self.factors)

    return driven(model=Network(layer=Takes), product={"num_microbatches": 1})


class Heads(Network):
    """Two heads, each for some labels."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, LABELS)
        self.table = nn.Embedding(VOCABULARY, LABELS)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        x = pool(x, attention_mask)
        logits = torch.where((input_ids[:, :1] % 2 == 0), self.head(x), self.other(x)) + self.table(input_ids[:, 0])
        return classified(logits, labels)


@case("K2", "K2R2")
def heads_by_sample() -> Script:
    """Each sample has one of two heads, and a row of a table that the first word chooses."""
    return driven(model=Heads(), options=ADAMW)
