"""Library classes and torch are patched, copies share attributes, and what is around a frozen module reads padding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from transformers import BertForTokenClassification, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.integrations import sdpa_attention
from transformers.models.bert import modeling_bert

from ..kit import (
    LABELS,
    VOCABULARY,
    WIDTH,
    At,
    Backbone,
    Each,
    FrozenBackbone,
    Inputs,
    Layer,
    LossAndOutputs,
    Script,
    bert_config,
    case,
    classified,
    pool,
    samples,
    with_loss,
)
from .attack_front import again, frozen_bert, ragged, with_rare_words
from .front_weights import MIDDLE, changed
from .late_teachers import distil, frozen, kd, plainly, read_of


def halved(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs) * 0.5


# ---------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------


def remade(weight: Any) -> Any:
    """A new weight, made by the class of the old one, as `set_module_tensor_to_device` of Accelerate does."""
    made = type(weight)(weight * 0.3, requires_grad=False)
    made.data[0] += 1
    return made


@case("K1")
def weight_made_by_its_class() -> Script:
    """A weight is replaced by a new one, which is made by the class of the old one."""

    def change(model: Any, step: int) -> None:
        linear = model.backbone.layers[0].linear
        linear.weight = remade(linear.weight)

    return changed(change)


@case("K1")
def trained_weight_made_by_class_of_frozen_one() -> Script:
    """Tensors made by the class of a frozen weight are written through `.data`, and copied to a trained weight."""

    def change(model: Any, step: int) -> None:
        weight = model.backbone.layers[0].linear.weight
        model.head[0].weight.data[0] = remade(weight)[0].data
        model.head[0].weight.data[1] = weight.detach().as_subclass(type(weight)).data[1]

    return changed(change, steps=(6, 7))


@case("K1")
def weight_of_a_teacher_made_by_its_class() -> Script:
    """A teacher's weight is replaced by a new one, which is made by the class of the old one."""

    def act(callback: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 10:
            head = callback.trainer.teacher.classifier
            head.weight = remade(head.weight)

    return distil(plainly, callbacks=[Each(act)])


class Graph(Backbone):
    """The embeddings are mixed by a matrix of another layout."""

    adjacency: Any

    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        adjacency = self.adjacency
        adjacency = adjacency.dequantize() if adjacency.is_quantized else adjacency
        x = F.embedding(input_ids, adjacency @ self.embedding.weight)
        for layer in self.layers:
            x = layer(x)
        return x


def shift() -> Tensor:
    return torch.eye(VOCABULARY).roll(3, 0)


def on_graph(adjacency: Tensor) -> Script:
    """The matrix is another one from the second epoch on; it is made dense for the comparison at the end."""

    def change(model: Any, step: int) -> None:
        old = model.backbone.adjacency
        old = old.dequantize() if old.is_quantized else old.to_dense()
        model.backbone.adjacency = (old * 0.5).to_sparse()

    def drive(trainer: Any) -> Any:
        result, graph = trainer.train(), trainer.model.backbone
        graph.adjacency = graph.adjacency.to_dense()
        return result

    return changed(change, model=FrozenBackbone(Graph(adjacency)), drive=drive)


@case("K1")
def sparse_buffer() -> Script:
    """A frozen backbone has a sparse buffer, which is replaced."""
    return on_graph(shift().to_sparse())


@case("K1")
def buffer_in_compressed_rows() -> Script:
    """Likewise, in compressed rows."""
    return on_graph(shift().to_sparse_csr())


@case("K1")
def quantised_buffer() -> Script:
    """Likewise, of quantised numbers."""
    return on_graph(torch.quantize_per_tensor(shift(), 0.01, 0, torch.qint8))


class WithOtherWeights(FrozenBackbone):
    """The backbone runs with other weights, if there are some."""

    others: Any = None

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        given = input_ids, attention_mask
        run = self.backbone if self.others is None else lambda *_: functional_call(self.backbone, self.others, given)
        return classified(self.head(pool(run(*given), attention_mask)), labels)


@case("K1", "R2")
def backbone_called_with_other_weights() -> Script:
    """From the second epoch on, the backbone is called with other weights, by `functional_call`."""

    def change(model: Any, step: int) -> None:
        model.others = {name: p.detach() * 0.5 for name, p in model.backbone.named_parameters()}

    return changed(change, model=WithOtherWeights())


# ---------------------------------------------------------------------------------------------------------
# Code of classes, of torch and of transformers
# ---------------------------------------------------------------------------------------------------------


@case("K1")
def call_added_to_a_class() -> Script:
    """The class of the inner layers gets a `__call__`."""
    return changed(lambda model, step: setattr(Layer, "__call__", halved(nn.Module.__call__)))


@case("K1")
def call_added_to_a_class_of_a_library() -> Script:
    """A class of transformers gets a `__call__`."""
    to = modeling_bert.BertSelfOutput
    change = At(lambda model, step: setattr(to, "__call__", halved(nn.Module.__call__)), MIDDLE)
    return Script(model=frozen_bert(initializer_range=0.3), callbacks=[change])


@case("K1")
def lookup_added_to_a_class() -> Script:
    """The class of the inner layers gets a `__getattr__`."""

    def found(self: Any, name: str) -> Any:
        value = nn.Module.__getattr__(self, name)
        return halved(value) if name == "linear" else value

    return changed(lambda model, step: setattr(Layer, "__getattr__", found))


class Embeds(FrozenBackbone):
    """A classifier on frozen modules of torch alone."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return classified(self.head(pool(self.backbone(input_ids), attention_mask)), labels)


@case("K1")
def function_of_torch_is_patched() -> Script:
    """`torch.tanh` is replaced, which a module of torch calls."""
    return changed(lambda model, step: setattr(torch, "tanh", halved(torch.tanh)), model=Embeds())


def llama(kind: type = LlamaForSequenceClassification) -> Any:
    """A trained head on a frozen Llama."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    others = {"pad_token_id": 0, "num_labels": LABELS, "initializer_range": 0.3}
    model = kind(LlamaConfig(num_hidden_layers=3, vocab_size=VOCABULARY, **sizes, **others))
    model.model.requires_grad_(False)
    return model


@case("K1")
def method_of_tensors_is_patched() -> Script:
    """`Tensor.pow` is replaced, which the norms of a frozen Llama call."""
    change = At(lambda model, step: setattr(torch.Tensor, "pow", halved(torch.Tensor.pow)), MIDDLE)
    return Script(model=llama(), callbacks=[change])


@case("K1")
def helper_of_attention_is_patched() -> Script:
    """A function is replaced that the attention function of transformers calls."""
    repeat: Any = sdpa_attention.repeat_kv

    def change(model: Any, step: int) -> None:
        sdpa_attention.repeat_kv = halved(repeat)  # type: ignore[assignment]
        sdpa_attention.use_gqa_in_sdpa = lambda *_: False

    return Script(model=llama(), callbacks=[At(change, MIDDLE)], data=samples(32, 6, 6))


@case("K1")
def patched_function_over_a_folder() -> Script:
    """In the second training over a folder, `F.embedding` is another function for a word that few samples have."""
    embedding = F.embedding

    def patched(words: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return embedding(words, *args, **kwargs) * (1 - 2 * (words == 7)[..., None].float())

    def edit(model: Any) -> Any:
        F.embedding = patched
        return model

    return again(edit, frozen_bert(initializer_range=0.3), data=with_rare_words())


class Tabled(Backbone):
    """A factor for each word, in a large table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = dict.fromkeys(range(70_000), 1.0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        factors = torch.tensor([[self.table[int(word)] for word in row] for row in input_ids])
        return super().forward(input_ids) * factors[..., None]


@case("K1")
def large_table_over_a_folder() -> Script:
    """The second training over a folder has another number in a large table, for a word that few samples have."""

    def edit(model: Any) -> Any:
        model.backbone.table[7] = -1.0
        return model

    return again(edit, FrozenBackbone(Tabled()), {"cached_modules": ["backbone"]}, data=with_rare_words())


# ---------------------------------------------------------------------------------------------------------
# What is around reads padding later
# ---------------------------------------------------------------------------------------------------------


def tagged(change: Callable[[Any, int], Any] | None = None, head: nn.Module | None = None, **fields: Any) -> Script:
    """A trained head on a frozen encoder labels words; `change(model, step)` in the second epoch."""
    model: Any = BertForTokenClassification(bert_config(initializer_range=0.3))
    model.bert.requires_grad_(False)
    model.classifier = head or model.classifier
    callbacks = [] if change is None else [At(change, MIDDLE)]
    return Script(**{"model": model, "data": samples(32, 4, 12, by_word=True), "callbacks": callbacks, **fields})


class Mixing(nn.Linear):
    """Adds the mean over all positions, with those of padding."""

    mixes = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean(1, keepdim=True) if self.mixes else x)


class LaterMixing(Mixing):
    mixes = False


@case("K1")
def head_reads_padding_later() -> Script:
    """A head reads padding once a callback has set its flag."""
    return tagged(lambda model, step: setattr(model.classifier, "mixes", True), LaterMixing(WIDTH, LABELS))


@case("K1")
def head_of_another_class_reads_padding() -> Script:
    """A head of torch gets another class."""
    return tagged(lambda model, step: setattr(model.classifier, "__class__", Mixing))


def of_all_positions(
    trainer: Any, model: Any, inputs: Inputs, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    outputs = model(**inputs)
    loss = outputs.loss + outputs.logits.square().mean()
    return (loss, outputs) if return_outputs else loss


@case("K1")
def compute_loss_set_later_reads_padding() -> Script:
    """A callback sets `trainer.compute_loss`."""

    def act(callback: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 6:
            callback.trainer.compute_loss = partial(of_all_positions, callback.trainer)

    return tagged(callbacks=[Each(act)])


@case("K1")
def loss_function_set_later_reads_padding() -> Script:
    """A callback sets `model.loss_function`."""

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        of_words = F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))
        return of_words + logits.square().mean()

    rows = samples(32, 4, 9)
    rows.rows = [{**row, "labels": row["input_ids"]} for row in rows.rows]
    change = At(lambda model, step: setattr(model, "loss_function", loss), MIDDLE)
    return Script(model=llama(LlamaForCausalLM), data=rows, callbacks=[change])


# ---------------------------------------------------------------------------------------------------------
# Copies that share attributes
# ---------------------------------------------------------------------------------------------------------


class Scaled(Backbone):
    scale = 1.0

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids) * self.scale


class Smaller(Backbone):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids) * 0.3


def copied(model: Any, name: str, value: Any) -> Any:
    """A shallow copy with another attribute or part."""
    twin = copy.copy(model)
    twin._modules = dict(twin._modules)
    setattr(twin, name, value)
    return twin


def beside(twin_of: Callable[[Any], Any], model: nn.Module) -> Script:
    """The loss also calls `twin_of(model)`, which returns a shallow copy."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        with torch.no_grad():
            other = twin_of(trainer.model)(inputs["input_ids"], inputs["attention_mask"])
        other = other["logits"] if isinstance(other, dict) else other
        return outputs["loss"] + other.square().mean() * outputs["logits"].square().mean(), outputs

    return with_loss(loss, model, data=ragged(), options={"num_train_epochs": 3})


@case("K1")
def shallow_copy_of_the_backbone() -> Script:
    """The loss calls a shallow copy of the frozen backbone with another setting."""
    return beside(lambda model: copied(model.backbone, "scale", 0.3), FrozenBackbone(Scaled()))


@case("K1")
def shallow_copy_of_the_model() -> Script:
    """The loss calls a shallow copy of the model without its head."""
    return beside(lambda model: copied(model, "head", nn.Identity()), FrozenBackbone())


@case("K1")
def shallow_copy_of_a_teacher() -> Script:
    """The loss calls a teacher, and a shallow copy of it without its head."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            soft = trainer.teacher(**read_of(inputs)).logits
            features = copied(trainer.teacher, "classifier", nn.Identity())(**read_of(inputs)).logits
        return kd(outputs.logits, soft) + features.square().mean() * outputs.logits.square().mean()

    return distil(further)


@case("K1", "R2")
def backbone_replaced_by_its_shallow_copy() -> Script:
    """A shallow copy of the backbone with another setting replaces it."""

    def change(model: Any, step: int) -> None:
        model.backbone = copied(model.backbone, "scale", 0.3)

    return changed(change, model=FrozenBackbone(Scaled()))


@case("K1")
def backbone_of_another_class_takes_the_attributes() -> Script:
    """A backbone of another class, with the attributes of the old one, replaces it."""

    def change(model: Any, step: int) -> None:
        other = Smaller.__new__(Smaller)
        vars(other).update(vars(model.backbone))
        model.backbone = other

    return changed(change)


# ---------------------------------------------------------------------------------------------------------
# Evaluations, steps and teachers
# ---------------------------------------------------------------------------------------------------------


class Factors(FrozenBackbone):
    """Multiplies the features by a value of the class, by one of the model, and by one that it may lack."""

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.of_model = 1.0

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        factor = self.of_class * self.of_model * getattr(self, "added", 1.0)
        return classified(self.head(factor * pool(self.backbone(input_ids, attention_mask), attention_mask)), labels)


def set_factors(trainer: Any, model: Any) -> None:
    model.of_class = model.of_model = model.added = 1.0 + trainer.state.global_step / 8


class SetsInSteps:
    """Sets attributes of the model that the step is given."""

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        set_factors(self, model)
        return super().training_step(model, *args, **kwargs)  # type: ignore[misc]


class SetsInPredictions:
    """Sets attributes of the model that the prediction is given."""

    def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        set_factors(self, model)
        return super().prediction_step(model, *args, **kwargs)  # type: ignore[misc]


def evaluated(at: Callable[[Any], list[float]], **fields: Any) -> Script:
    """`at(trainer)` returns losses after each epoch."""
    results: list[float] = []

    def act(callback: Any, state: Any, control: Any, **_: Any) -> None:
        results.extend(at(callback.trainer))

    fields = {"model": FrozenBackbone(), "data": ragged(), "observe": lambda _: {"results": list(results)}, **fields}
    keywords = {"eval_dataset": ragged(16, seed=3)}
    return Script(callbacks=[Each(act, "on_epoch_end")], keywords=keywords, **fields)


@case("K1", "R2")
def attributes_set_in_training_step() -> Script:
    """A `training_step` sets attributes of the model that it is given."""
    return Script(trainer=SetsInSteps, model=Factors())


@case("K1", "R2")
def attributes_set_in_prediction_step() -> Script:
    """A `prediction_step` sets attributes of the model that it is given."""
    return evaluated(lambda trainer: [trainer.evaluate()["eval_loss"]], trainer=SetsInPredictions, model=Factors())


@case("K1", "R2")
def backbone_exchanged_for_an_evaluation() -> Script:
    """Between two evaluations, another one is made with another backbone."""
    with torch.random.fork_rng():
        torch.manual_seed(99)
        other = Backbone().requires_grad_(False)

    def at(trainer: Any) -> list[float]:
        mine, losses = trainer.model.backbone, []
        for backbone in (mine, other, mine):
            trainer.model.backbone = backbone
            losses.append(trainer.evaluate()["eval_loss"])
        return losses

    return evaluated(at)


@case("K1")
def gradient_of_a_teacher_s_input_later() -> Script:
    """From the third epoch on, the loss takes the gradient of a declared teacher's output by its input."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        x = inputs["input_ids"].float() / VOCABULARY
        if trainer.state.global_step < 6:
            return kd(outputs.logits, trainer.teacher(x))
        soft = trainer.teacher(x.requires_grad_())
        (gradient,) = torch.autograd.grad(soft.square().sum(), x)
        return kd(outputs.logits, soft.detach()) + gradient.abs().mean() * outputs.logits.square().mean()

    def teacher() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return frozen(nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, LABELS)))

    return distil(further, teacher, data=samples(32, 8, 8))
