"""Scratch."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from transformers import BertForTokenClassification, LlamaConfig, LlamaForSequenceClassification

from ..kit import (
    LABELS, VOCABULARY, WIDTH, At, Backbone, Each, FrozenBackbone, Inputs, Layer, Script, bert, bert_config, case,
    classified, own_loss, pad, pool, samples, with_loss,
)
from .attack_front import again, frozen_bert, ragged, reads, with_rare_words
from .front_weights import MIDDLE, changed
from .late_teachers import distil, frozen, kd, plainly, read_of, student, teacher_of_four

import os
DEBUG = os.environ.get("DEBUG")
DECLARED = {"cached_modules": ["backbone"]}


# ------------------------------------------------------------------ weights
@case("K1")
def w_swap_tensors() -> Script:
    """torch.utils.swap_tensors."""

    def change(model: Any, step: int) -> None:
        linear = model.backbone.layers[0].linear
        other = nn.Parameter(linear.weight.detach().clone() * 0.3, requires_grad=False)
        torch.utils.swap_tensors(linear.weight, other)

    return changed(change)


class Functional(FrozenBackbone):
    other: Any = None

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.other is None:
            hidden = self.backbone(input_ids, attention_mask)
        else:
            hidden = functional_call(self.backbone, self.other, (input_ids, attention_mask))
        return classified(self.head(pool(hidden, attention_mask)), labels)


@case("K1", "R2")
def w_functional_call() -> Script:
    """Backbone is called with other weights by functional_call from step 6."""

    def change(model: Any, step: int) -> None:
        model.other = {n: p.detach() * 0.5 for n, p in model.backbone.named_parameters()}

    return changed(change, model=Functional())


@case("K1")
def w_type_of_weight() -> Script:
    """A weight is made anew by its own type."""

    def change(model: Any, step: int) -> None:
        linear = model.backbone.layers[0].linear
        w = linear.weight
        linear.weight = type(w)(w * 0.3, requires_grad=False)
        linear.weight.data[0] += 1

    return changed(change)


@case("K1")
def w_type_of_weight_kept() -> Script:
    """A weight's type is used for another tensor (not in module)."""

    def change(model: Any, step: int) -> None:
        w = model.backbone.layers[0].linear.weight
        mine = type(w)(w.detach() * 0.3, requires_grad=False)
        mine.data.mul_(2)
        view = mine[0]
        model.head[0].weight.data[0] = view.data
        other = w.detach().as_subclass(type(w))
        model.head[0].weight.data[1] = other.data[1]

    return changed(change, steps=(6, 7))


class Complex(Backbone):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs", torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) * 0.3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = super().forward(input_ids)
        z = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * self.freqs
        return torch.view_as_real(z).flatten(-2)


@case("K1")
def w_complex_buffer() -> Script:
    """A complex buffer written through view_as_real."""

    def change(model: Any, step: int) -> None:
        torch.view_as_real(model.backbone.freqs)[1] *= 0.2

    return changed(change, model=FrozenBackbone(Complex()))


@case("K1")
def w_complex_buffer_data() -> Script:
    """A complex buffer written through .real."""

    def change(model: Any, step: int) -> None:
        model.backbone.freqs.data.real[1] *= 0.2

    return changed(change, model=FrozenBackbone(Complex()))


class Graph(Backbone):
    def __init__(self) -> None:
        super().__init__()
        index = torch.stack([torch.arange(VOCABULARY), (torch.arange(VOCABULARY) * 3) % VOCABULARY])
        self.register_buffer("adjacency", torch.sparse_coo_tensor(index, torch.ones(VOCABULARY), check_invariants=False).coalesce())

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        table = torch.sparse.mm(self.adjacency, self.embedding.weight)
        x = F.embedding(input_ids, table)
        for layer in self.layers:
            x = layer(x)
        return x


@case("K1")
def w_sparse_buffer() -> Script:
    """A sparse buffer's values are changed."""

    def change(model: Any, step: int) -> None:
        model.backbone.adjacency.values()[3:20] *= 0.2

    return changed(change, model=FrozenBackbone(Graph()))


@case("K1")
def w_sparse_csr() -> Script:
    """CSR."""
    model = FrozenBackbone(Graph())
    model.backbone.adjacency = model.backbone.adjacency.to_sparse_csr()

    def change(model: Any, step: int) -> None:
        model.backbone.adjacency.values()[3:20] *= 0.2

    return changed(change, model=model)


class Quant(Backbone):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.quantize_per_tensor(torch.randn(VOCABULARY, WIDTH), 0.05, 0, torch.qint8))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids) + self.table.dequantize()[input_ids]


@case("K1")
def w_quantized_buffer() -> Script:
    """quantised buffer."""

    def change(model: Any, step: int) -> None:
        model.backbone.table.copy_(torch.zeros(VOCABULARY, WIDTH))

    return changed(change, model=FrozenBackbone(Quant()))


@case("K1")
def w_quantized_buffer_nothing() -> Script:
    """quantised buffer."""
    return changed(lambda m, s: None, model=FrozenBackbone(Quant()))


@case("K1")
def w_cast_and_back() -> Script:
    """bf16 and back"""

    def change(model: Any, step: int) -> None:
        model.backbone.to(torch.float8_e4m3fn).to(torch.float32)

    return changed(change)


@case("K1")
def w_double() -> Script:
    """backbone in double."""

    class Double(FrozenBackbone):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
            hidden = self.backbone(input_ids, attention_mask).float() * 1.0
            return classified(self.head(pool(hidden, attention_mask)), labels)

    def change(model: Any, step: int) -> None:
        model.backbone.to(torch.bfloat16)

    return changed(change, model=Double())


class Tied(Backbone):
    tied: Any = None

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = super().forward(input_ids)
        return x if self.tied is None else x @ self.tied


@case("K1")
def w_memory_of_trained() -> Script:
    """A frozen module has the memory of a trained weight as an attribute."""
    model = FrozenBackbone(Tied())
    model.backbone.tied = model.head[0].weight.data
    return Script(model=model)


@case("K1")
def w_memory_of_trained_buffer() -> Script:
    """A frozen module has the memory of a trained weight as a buffer."""
    model = FrozenBackbone(Tied())
    del model.backbone.__class__.__annotations__
    model.backbone.register_buffer("tied2", model.head[0].weight.detach())
    model.backbone.tied = model.backbone.tied2
    return Script(model=model)


class Lazy(Backbone):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LazyLinear(WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.last(super().forward(input_ids))


@case("K1")
def w_lazy() -> Script:
    """Lazy."""
    return Script(model=FrozenBackbone(Lazy()))


@case("K1")
def w_deleted_attr() -> Script:
    """A parameter becomes a plain tensor, written later through numpy."""

    def change(model: Any, step: int) -> None:
        linear = model.backbone.layers[0].linear
        if step == 2:
            w = linear.weight.detach().clone()
            del linear.weight
            linear.weight = w
        else:
            linear.weight.numpy()[0] += 0.7

    return changed(change, steps=(2, 6))


# ------------------------------------------------------------------ settings
def restoring(script: Script, owner: Any, name: str) -> Script:
    return script


@case("K1")
def s_call_added_to_class() -> Script:
    """__call__ added to the class of inner layers."""

    def change(model: Any, step: int) -> None:
        Layer.__call__ = lambda self, *a, **k: nn.Module.__call__(self, *a, **k) * 0.5

    return changed(change)


@case("K1")
def s_getattr_added() -> Script:
    """__getattr__ of a class."""

    def change(model: Any, step: int) -> None:
        def get(self: Any, name: str) -> Any:
            found = nn.Module.__getattr__(self, name)
            return (lambda x: found(x) * 0.5) if name == "linear" else found

        Layer.__getattr__ = get

    return changed(change)


class WithTanh(Backbone):
    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Tanh())


@case("K1")
def s_torch_tanh_patched() -> Script:
    """torch.tanh is replaced."""
    true = torch.tanh

    def change(model: Any, step: int) -> None:
        torch.tanh = lambda x: true(x) * 0.5

    model = FrozenBackbone()
    model.backbone = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)

    class Net(FrozenBackbone):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
            return classified(self.head(pool(self.backbone(input_ids), attention_mask)), labels)

    model.__class__ = Net
    return changed(change, model=model)


@case("K1")
def s_tensor_method_patched() -> Script:
    """Tensor.__matmul__ is replaced."""
    true = torch.Tensor.pow

    def change(model: Any, step: int) -> None:
        torch.Tensor.pow = lambda x, *a, **k: true(x, *a, **k) * 0.5

    config = LlamaConfig(
        num_hidden_layers=3, vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_attention_heads=2,
        pad_token_id=0, num_labels=LABELS, initializer_range=0.3,
    )
    model = LlamaForSequenceClassification(config)
    model.model.requires_grad_(False)
    return Script(model=model, callbacks=[At(change, MIDDLE)])


def small_llama(**changes: Any) -> Any:
    config = LlamaConfig(**{
        **dict(num_hidden_layers=3, vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, num_labels=LABELS, initializer_range=0.3), **changes}
    )
    model = LlamaForSequenceClassification(config)
    model.model.requires_grad_(False)
    return model


@case("K1")
def s_helper_of_attention_patched() -> Script:
    """A helper of the attention function."""
    from transformers.integrations import sdpa_attention

    true = sdpa_attention.repeat_kv

    def change(model: Any, step: int) -> None:
        sdpa_attention.repeat_kv = lambda x, n: true(x, n) * 0.5
        sdpa_attention.use_gqa_in_sdpa = lambda *a: False

    return Script(model=small_llama(), callbacks=[At(change, MIDDLE)], data=samples(32, 6, 6))


@case("K1")
def s_helper_of_eager_patched() -> Script:
    """A helper of eager attention."""
    from transformers.models.llama import modeling_llama

    true = modeling_llama.repeat_kv

    def change(model: Any, step: int) -> None:
        modeling_llama.repeat_kv = lambda x, n: true(x, n) * 0.5

    return Script(model=small_llama(attn_implementation="eager"), callbacks=[At(change, MIDDLE)], data=samples(32, 6, 6))


@case("K1")
def s_class_attribute_of_library() -> Script:
    """ class attribute of a library's class"""
    from transformers.models.bert import modeling_bert

    def change(model: Any, step: int) -> None:
        modeling_bert.BertSelfOutput.__call__ = lambda self, *a, **k: nn.Module.__call__(self, *a, **k) * 0.5

    return Script(model=frozen_bert(initializer_range=0.3), callbacks=[At(change, MIDDLE)])


class Scales(FrozenBackbone):
    scale = 1.0

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.scale != 1.0:
            input_ids = (input_ids * 3) % VOCABULARY
        return classified(self.head(pool(self.backbone(input_ids, attention_mask), attention_mask)), labels)


@case("K1")
def s_outer_flag() -> Script:
    """outer flag"""
    return changed(lambda m, s: setattr(m, "scale", 0.5), model=Scales())


# ------------------------------------------------------------------ padding
def frozen_tagger(**changes: Any) -> Any:
    model = BertForTokenClassification(bert_config(initializer_range=0.3, **changes))
    model.bert.requires_grad_(False)
    return model


class LabelPad:
    value = -100

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        batch = pad(rows)
        batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, self.value)
        return batch


def tagged(number: int = 32) -> Any:
    return samples(number, 4, 12, by_word=True)


@case("K1", "R2")
def p_labels_of_padding_later() -> Script:
    """labels of padding count from the third epoch on"""
    collator = LabelPad()

    def act(callback: Any, state: Any, control: Any, **_: Any) -> None:
        if state.epoch == 2:
            collator.value = 0

    return Script(model=frozen_tagger(), data=tagged(), collator=collator, callbacks=[Each(act, "on_epoch_end")], options={"num_train_epochs": 5})


@case("K1")
def p_labels_of_padding_in_rare_batches() -> Script:
    """labels of padding count in rare batches"""

    def collate(rows: list[dict[str, Any]]) -> Any:
        batch = pad(rows)
        is_rare = (batch["input_ids"] == 9).any()
        batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, 0 if is_rare else -100)
        return batch

    return Script(model=frozen_tagger(), data=tagged(64), collator=collate, options={"num_train_epochs": 4})


@case("K1")
def p_labels_of_padding_by_sample() -> Script:
    """some samples labels for padding"""

    def collate(rows: list[dict[str, Any]]) -> Any:
        batch = pad(rows)
        rare = (batch["input_ids"] == 9).any(1, keepdim=True)
        batch["labels"] = batch["labels"].masked_fill((batch["labels"] == -100) & rare, 0)
        return batch

    return Script(model=frozen_tagger(), data=tagged(64), collator=collate, options={"num_train_epochs": 4})


def all_positions(trainer: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    outputs = model(**inputs)
    loss = outputs.loss + outputs.logits.square().mean()
    return (loss, outputs) if return_outputs else loss


@case("K1")
def p_compute_loss_replaced() -> Script:
    """compute_loss replaced on the trainer"""

    def act(callback: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 6:
            callback.trainer.compute_loss = partial(all_positions, callback.trainer)

    return Script(model=frozen_tagger(), data=tagged(), callbacks=[Each(act)])


COUNTS: list[int] = []


def counting_loss(logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Tensor:
    COUNTS.append(1)
    return F.cross_entropy(logits.reshape(-1, LABELS), labels.reshape(-1)) + 0.1 * logits.square().mean() * len(COUNTS)


def ignoring_loss(logits: Any, labels: Any, *args: Any, **kwargs: Any) -> Tensor:
    COUNTS.append(1)
    return F.cross_entropy(logits.reshape(-1, LABELS), labels.reshape(-1)) * len(COUNTS)


def counted(trainer: Any) -> dict[str, Any]:
    return {"counts": len(COUNTS)}


@case("K1")
def p_loss_function_of_model_later() -> Script:
    """model.loss_function is set later"""

    def change(model: Any, step: int) -> None:
        model.loss_function = counting_loss

    return Script(model=frozen_tagger(), data=tagged(), callbacks=[At(change, MIDDLE)], observe=counted)


class OwnLossOfModel(BertForTokenClassification):
    pass


@case("K1")
def p_loss_function_of_llama() -> Script:
    """model.loss_function set at start, which counts."""
    from transformers import LlamaForCausalLM

    config = small_llama().config
    model = LlamaForCausalLM(config)
    model.model.requires_grad_(False)
    model.loss_function = lambda logits, labels, vocab_size, **k: (
        COUNTS.append(1) or F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)) * (1 + 0.1 * len(COUNTS))
    )
    rows = samples(32, 4, 9)
    rows.rows = [{**r, "labels": r["input_ids"]} for r in rows.rows]
    return Script(model=model, data=rows, observe=counted)


@case("K1")
def p_loss_function_of_llama_later() -> Script:
    """model.loss_function set later; reads padding"""
    from transformers import LlamaForCausalLM

    config = small_llama().config
    model = LlamaForCausalLM(config)
    model.model.requires_grad_(False)

    def change(model: Any, step: int) -> None:
        model.loss_function = lambda logits, labels, vocab_size, **k: (
            F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)) + 0.1 * logits.square().mean()
        )

    rows = samples(32, 4, 9)
    rows.rows = [{**r, "labels": r["input_ids"]} for r in rows.rows]
    return Script(model=model, data=rows, callbacks=[At(change, MIDDLE)])


class CountingHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        COUNTS.append(1)
        return super().forward(x) * (1 + 0.01 * len(COUNTS))


@case("K1")
def p_counting_head() -> Script:
    """A trained head counts globally"""
    model = frozen_tagger()
    model.classifier = CountingHead(WIDTH, LABELS)
    return Script(model=model, data=tagged(), observe=counted)


class HeadWithQueue(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + next(self.noise)


@case("K1")
def p_head_with_iterator() -> Script:
    """A trained head reads an iterator"""
    model = frozen_tagger()
    model.classifier = HeadWithQueue(WIDTH, LABELS)
    model.classifier.noise = iter([0.1 * k for k in range(1000)])
    return Script(model=model, data=tagged())


@case("K1")
def p_head_reads_padding_later() -> Script:
    """A trained head of the library model reads padding by a flag"""

    class Head(nn.Linear):
        mixes = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + x.mean(1, keepdim=True) if self.mixes else x)

    model = frozen_tagger()
    model.classifier = Head(WIDTH, LABELS)
    return Script(model=model, data=tagged(), callbacks=[At(lambda m, s: setattr(m.classifier, "mixes", True), MIDDLE)])


@case("K1")
def p_head_replaced_reads_padding() -> Script:
    """head replaced by one that mixes"""

    class Mixing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + x.mean(1, keepdim=True))

    def change(model: Any, step: int) -> None:
        model.classifier.__class__ = Mixing

    return Script(model=frozen_tagger(), data=tagged(), callbacks=[At(change, MIDDLE)])


# ------------------------------------------------------------------ recorders
@case("K1")
def r_hidden_states_by_config() -> Script:
    """config.output_hidden_states"""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> Any:
        out = model(**inputs)
        extra = out.hidden_states[-2].square().mean() * out.logits.mean() if out.hidden_states is not None else 0
        return out.loss + extra, out

    def change(model: Any, step: int) -> None:
        model.config.output_hidden_states = True

    return with_loss(loss, frozen_bert(initializer_range=0.3), data=ragged(), callbacks=[At(change, MIDDLE)], options={"num_train_epochs": 3})


class Two(Backbone):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        x = self.layers[0](self.embedding(input_ids))
        first = x
        for layer in self.layers[1:]:
            x = layer(x)
        return x, first


def with_two(read: Any, epochs: int = 2) -> Script:
    class Net(FrozenBackbone):
        step = 0

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
            x, first = self.backbone(input_ids, attention_mask)
            if self.step >= 6:
                x = x * read(first)
            return classified(self.head(pool(x, attention_mask)), labels)

    return changed(lambda m, s: setattr(m, "step", s), range(20), Net(Two()), data=ragged())


@case("K1")
def r_read_by_numpy() -> Script:
    """numpy"""
    return with_two(lambda t: float(t.detach().numpy().std()))


@case("K1")
def r_read_by_save() -> Script:
    """torch.save"""

    def read(t: Tensor) -> Any:
        file = io.BytesIO()
        torch.save({"t": t}, file)
        file.seek(0)
        return torch.load(file)["t"].std()

    return with_two(read)


@case("K1")
def r_read_by_deepcopy() -> Script:
    """deepcopy"""
    return with_two(lambda t: copy.deepcopy(t).std())


@case("K1")
def r_read_by_format() -> Script:
    """str"""
    return with_two(lambda t: 1 + (len(repr(t)) % 7) / 10 + t.tolist()[0][0][0])


@case("K1")
def r_read_by_try() -> Script:
    """try"""

    def read(t: Tensor) -> Any:
        try:
            return t.data.std()
        except Exception:
            return 1.0

    return with_two(read)


@case("K1")
def r_read_by_asarray() -> Script:
    """asarray"""
    return with_two(lambda t: float(np.asarray(t).std()) + float(memoryview(t.numpy())[0, 0, 0]))


@case("K1")
def r_read_by_storage() -> Script:
    """storage"""
    return with_two(lambda t: 1.0 + float(torch.tensor(t.untyped_storage().tolist()[:40]).float().mean()) / 256)


@case("K1")
def r_read_by_dlpack() -> Script:
    """dlpack"""
    return with_two(lambda t: torch.from_dlpack(t).std())


# ------------------------------------------------------------------ copies
@case("K1")
def c_shallow_copy() -> Script:
    """copy.copy of the backbone with another attribute"""

    class Sc(Backbone):
        scale = 1.0

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(input_ids) * self.scale

    def loss(trainer: Any, model: Any, inputs: Inputs) -> Any:
        out = model(**inputs)
        twin = copy.copy(model.backbone)
        twin.scale = 0.3
        with torch.no_grad():
            x = twin(inputs["input_ids"], inputs["attention_mask"])
        return out["loss"] + x.square().mean() * out["logits"].square().mean(), out

    return with_loss(loss, FrozenBackbone(Sc()), data=ragged(), options={"num_train_epochs": 3})


@case("K1")
def c_shallow_copy_replaces() -> Script:
    """copy.copy of the backbone replaces the backbone"""

    class Sc2(Backbone):
        scale = 1.0

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(input_ids) * self.scale

    def change(model: Any, step: int) -> None:
        twin = copy.copy(model.backbone)
        twin.scale = 0.3
        model.backbone = twin

    return changed(change, model=FrozenBackbone(Sc2()))


@case("K1")
def c_dict_taken_over() -> Script:
    """new object with the old one's __dict__"""

    class Other(Backbone):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(input_ids) * 0.3

    def change(model: Any, step: int) -> None:
        new = Other.__new__(Other)
        new.__dict__.update(model.backbone.__dict__)
        model.backbone = new

    return changed(change)


@case("K1")
def c_model_shallow_copied() -> Script:
    """copy.copy of the whole model with another backbone is evaluated in the loss"""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> Any:
        out = model(**inputs)
        twin = copy.copy(trainer.model)
        twin._modules = dict(twin._modules)
        twin._modules["head"] = nn.Identity()
        with torch.no_grad():
            x = twin(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])["logits"]
        return out["loss"] + x.square().mean() * out["logits"].square().mean(), out

    return with_loss(loss, FrozenBackbone(), data=ragged(), options={"num_train_epochs": 3})


# ------------------------------------------------------------------ another run
def rare(**fields: Any) -> dict[str, Any]:
    return {"data": with_rare_words(), **fields}


@case("K1")
def o_functional_patched() -> Script:
    """F.embedding patched for rare words"""
    true = F.embedding

    def edit(model: Any) -> Any:
        def emb(i, *a, **k):
            out = true(i, *a, **k) * (1 - 2 * (i == 7)[..., None].float())
            if DEBUG: print("RUN emb", int((i==7).sum()), float(out.square().mul(torch.arange(16)).sum()), float(a[0].sum()), flush=True)
            return out
        F.embedding = emb
        if DEBUG:
            model.backbone.register_forward_hook(lambda m, i, o: print("RUN", [round(v,3) for v in o.square().mul(torch.arange(16)).sum((1,2)).tolist()], (i[0]==7).sum(1).tolist(), float(o.square().mul(torch.arange(16)).sum()), int((i[0]==7).sum()), float(model.head[0].weight.sum()), float(model.head[2].weight.abs().sum()), flush=True))
        return model

    return again(edit, FrozenBackbone(), DECLARED, **rare())


@case("K1")
def o_functional_patched_in_library() -> Script:
    """F.embedding patched for rare words; bert"""
    true = F.embedding

    def edit(model: Any) -> Any:
        F.embedding = lambda i, *a, **k: true(i, *a, **k) * (1 - 2 * (i == 7)[..., None].float())
        return model

    return again(edit, frozen_bert(initializer_range=0.3), **rare())


class Gated(Backbone):
    def __init__(self, gates: Any) -> None:
        super().__init__()
        self.gates = gates

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids)
        for k, layer in enumerate(self.layers):
            x = layer(x)
            if k < 2:
                x = x * self.gates[k](input_ids)[..., None]
        return x


def silencing(word: int) -> Any:
    return lambda ids: (ids != word).float()


@case("K1")
def o_closures_exchanged() -> Script:
    """closures exchanged"""

    def edit(model: Any) -> Any:
        model.backbone.gates = model.backbone.gates[::-1]
        return model

    return again(edit, FrozenBackbone(Gated([silencing(7), silencing(63)])), DECLARED, **rare())


class One:
    word = 7

    def __call__(self, ids: Tensor) -> Tensor:
        return (ids != self.word).float()


class Another(One):
    word = 63

    def __call__(self, ids: Tensor) -> Tensor:
        return (ids != self.word).float()


@case("K1")
def o_class_attributes_exchanged() -> Script:
    """class attributes exchanged"""

    def edit(model: Any) -> Any:
        One.word, Another.word = 63, 7
        return model

    return again(edit, FrozenBackbone(Gated([One(), Another()])), DECLARED, **rare())


class Table(Backbone):
    def __init__(self) -> None:
        super().__init__()
        self.table = np.ones((VOCABULARY, 20000), np.float32)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids) * torch.from_numpy(self.table[input_ids.numpy(), 5])[..., None]


@case("K1")
def o_large_array() -> Script:
    """another large array"""

    def edit(model: Any) -> Any:
        model.backbone.table[7] = -1
        return model

    return again(edit, FrozenBackbone(Table()), DECLARED, **rare())


@case("K1")
def o_large_dict() -> Script:
    """another large dict"""

    class Dict(Backbone):
        def __init__(self) -> None:
            super().__init__()
            self.table = {k: 1.0 for k in range(70000)}

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            gate = torch.tensor([[self.table[int(w)] for w in row] for row in input_ids])
            return super().forward(input_ids) * gate[..., None]

    def edit(model: Any) -> Any:
        model.backbone.table[7] = -1.0
        return model

    return again(edit, FrozenBackbone(Dict()), DECLARED, **rare())


# ------------------------------------------------------------------ evaluations
def evaluated(at: Any, **fields: Any) -> Script:
    """at(trainer, state) at each epoch's end"""
    results: list[Any] = []

    def act(callback: Any, state: Any, control: Any, **_: Any) -> None:
        results.extend(at(callback.trainer, state) or [])

    def observe(trainer: Any) -> dict[str, Any]:
        return {"results": list(results)}

    fields = {"model": FrozenBackbone(), "data": ragged(), **fields}
    return Script(callbacks=[Each(act, "on_epoch_end")], keywords={"eval_dataset": ragged(16, seed=3)}, observe=observe, **fields)


def other_backbone() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(99)
        return Backbone().requires_grad_(False)


@case("K1", "R2")
def e_backbone_exchanged_for_evaluation() -> Script:
    """model.backbone = ema for evaluation only"""
    other = other_backbone()

    def at(trainer: Any, state: Any) -> Any:
        one = trainer.evaluate()["eval_loss"]
        mine = trainer.model.backbone
        trainer.model.backbone = other
        two = trainer.evaluate()["eval_loss"]
        trainer.model.backbone = mine
        three = trainer.evaluate()["eval_loss"]
        return [one, two, three]

    return evaluated(at)


@case("K1")
def e_backbone_exchanged_from_evaluation() -> Script:
    """model.backbone = other, evaluate, stays"""
    other = other_backbone()

    def at(trainer: Any, state: Any) -> Any:
        if state.epoch == 2:
            trainer.model.backbone = other
        return [trainer.evaluate()["eval_loss"]]

    return evaluated(at, options={"num_train_epochs": 4})


@case("K1")
def e_layer_exchanged_for_evaluation() -> Script:
    """inner part exchanged"""
    other = other_backbone()

    def at(trainer: Any, state: Any) -> Any:
        one = trainer.evaluate()["eval_loss"]
        mine = trainer.model.backbone.layers[2]
        trainer.model.backbone.layers[2] = other.layers[2]
        two = trainer.evaluate()["eval_loss"]
        trainer.model.backbone.layers[2] = mine
        return [one, two, trainer.evaluate()["eval_loss"]]

    return evaluated(at)


@case("K1")
def e_exchanged_in_evaluation() -> Script:
    """backbone exchanged within evaluate (by prediction_step), stays"""
    other = other_backbone()

    class Mixin:
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            out = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
            if self.state.epoch == 2:
                model.backbone = other
            return out

    def at(trainer: Any, state: Any) -> Any:
        return [trainer.evaluate()["eval_loss"]]

    return evaluated(at, trainer=Mixin, options={"num_train_epochs": 4})


@case("K1")
def e_predict_after_other_dtype() -> Script:
    """predict after bf16"""

    def drive(trainer: Any) -> Any:
        trainer.train()
        one = trainer.predict(trainer.eval_dataset).predictions
        trainer.model.backbone = other_backbone()
        two = trainer.predict(trainer.eval_dataset).predictions
        return [one, two]

    script = evaluated(lambda trainer, state: [trainer.evaluate()["eval_loss"]])
    script.drive = drive
    return script


@case("K1")
def e_trainer_model_exchanged() -> Script:
    """trainer.model = a copy with changed weights; evaluate"""

    def at(trainer: Any, state: Any) -> Any:
        one = trainer.evaluate()["eval_loss"]
        mine = trainer.model
        twin = copy.deepcopy(mine)
        with torch.no_grad():
            for p in twin.backbone.parameters():
                p *= 0.5
        trainer.model = trainer.model_wrapped = twin
        two = trainer.evaluate()["eval_loss"]
        trainer.model = trainer.model_wrapped = mine
        return [one, two, trainer.evaluate()["eval_loss"]]

    return evaluated(at)


@case("K1")
def e_collator_of_evaluation_later() -> Script:
    """eval collator pads more in later evals; metrics read logits"""

    def at(trainer: Any, state: Any) -> Any:
        rows = trainer.eval_dataset
        found = [trainer.evaluate()["eval_loss"]]
        found.append(float(np.abs(trainer.predict(rows).predictions).mean()))
        trainer.args.per_device_eval_batch_size += 1
        return found

    return evaluated(at, model=frozen_tagger(), data=tagged(), options={"num_train_epochs": 4})


# ------------------------------------------------------------------ teachers
def acting(act: Any, further: Any = plainly, step: int = 10, **fields: Any) -> Script:
    def run(callback: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            act(callback.trainer.teacher)

    return distil(further, callbacks=[Each(run)], **fields)


@case("K1", "K2", "R2")
def t_class_replaced() -> Script:
    """class of the teacher"""

    def act(teacher: Any) -> None:
        class Scaled(type(teacher)):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                out = super().forward(*args, **kwargs)
                out.logits = out.logits * 0.2
                return out

        teacher.__class__ = Scaled

    return acting(act)


@case("K1")
def t_type_of_weight() -> Script:
    """type(weight)(...)"""

    def act(teacher: Any) -> None:
        w = teacher.classifier.weight
        teacher.classifier.weight = type(w)(w * 0.3, requires_grad=False)
        teacher.classifier.weight.data[0] += 1

    return acting(act)


@case("K1")
def t_swap_tensors() -> Script:
    """swap"""

    def act(teacher: Any) -> None:
        w = teacher.classifier.weight
        torch.utils.swap_tensors(w, nn.Parameter(w.detach() * 0.2, requires_grad=False))

    return acting(act)


class ByEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, LABELS))

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)


@case("K1")
def t_gradient_of_inputs_later() -> Script:
    """gradients of inputs of the teacher from the second epoch"""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        x = inputs["input_ids"].float() / VOCABULARY
        if trainer.state.global_step < 6:
            out = trainer.teacher(x)
            return kd(outputs.logits, out)
        x.requires_grad_()
        out = trainer.teacher(x)
        grad, = torch.autograd.grad(out.square().sum(), x)
        return kd(outputs.logits, out.detach()) + grad.abs().mean() * outputs.logits.square().mean()

    def teacher() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            return frozen(ByEmbeddings())

    product = {"cached_modules": ["trainer.teacher"], "activation_cache": "on"}
    return distil(further, teacher, data=samples(32, 8, 8), product=product)


@case("K1")
def t_outputs_written_later() -> Script:
    """teacher's outputs are written in place from the second epoch"""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            out = trainer.teacher(**read_of(inputs)).logits
            if trainer.state.global_step > 5:
                out.div_(2.0)
                out.numpy()[:, 0] *= 0.5
        return kd(outputs.logits, out)

    return distil(further)


@case("K1")
def t_hook_later() -> Script:
    """a user's recorder on the teacher's layer"""
    kept: list[Tensor] = []

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        handle = None
        if trainer.state.global_step > 5:
            handle = trainer.teacher.bert.encoder.layer[1].register_forward_hook(lambda m, i, o: kept.append(o[0] if isinstance(o, tuple) else o))
        with torch.no_grad():
            out = trainer.teacher(**read_of(inputs)).logits
        extra = 0
        if handle is not None:
            handle.remove()
            extra = kept.pop().square().mean() * outputs.logits.square().mean()
        return kd(outputs.logits, out) + extra

    return distil(further)


@case("K1")
def t_global_hook_later() -> Script:
    """a global recorder"""
    kept: list[Any] = []

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        handle = None
        if trainer.state.global_step > 5:
            handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: kept.append(type(m).__name__))
        with torch.no_grad():
            out = trainer.teacher(**read_of(inputs)).logits
        extra = 0
        if handle is not None:
            handle.remove()
            extra = len(kept) * outputs.logits.square().mean() * 0.01
            kept.clear()
        return kd(outputs.logits, out) + extra

    return distil(further)


@case("K1", "K2")
def t_changed_in_evaluation() -> Script:
    """the teacher differs in evaluations"""

    def act(callback: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = callback.trainer
        mine = trainer.teacher.classifier
        trainer.evaluate()
        trainer.teacher.classifier = nn.Linear(WIDTH, LABELS).requires_grad_(False)
        nn.init.constant_(trainer.teacher.classifier.weight, 0.1)
        nn.init.constant_(trainer.teacher.classifier.bias, 0.0)
        trainer.evaluate()
        trainer.teacher.classifier = mine

    return distil(plainly, callbacks=[Each(act, "on_epoch_end")], keywords={"eval_dataset": samples(16, 4, 9, seed=2)})


@case("K1")
def t_replaced_for_evaluation() -> Script:
    """the teacher is replaced in evaluations"""

    def act(callback: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = callback.trainer
        mine = trainer.teacher
        trainer.evaluate()
        trainer.teacher = teacher_of_four(seed=8)
        trainer.evaluate()
        trainer.teacher = mine

    return distil(plainly, callbacks=[Each(act, "on_epoch_end")], keywords={"eval_dataset": samples(16, 4, 9, seed=2)})


@case("K1")
def t_shallow_copy() -> Script:
    """a shallow copy of the teacher with another head"""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        twin = copy.copy(trainer.teacher)
        twin._modules = dict(twin._modules)
        twin._modules["classifier"] = nn.Identity()
        with torch.no_grad():
            out = trainer.teacher(**read_of(inputs)).logits
            other = twin(**read_of(inputs)).logits
        return kd(outputs.logits, out) + other.square().mean() * outputs.logits.square().mean()

    return distil(further)


@case("K1")
def t_functional_call() -> Script:
    """the teacher with other weights by functional_call"""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            if trainer.state.global_step < 5:
                out = trainer.teacher(**read_of(inputs)).logits
            else:
                weights = {n: p * 0.5 for n, p in trainer.teacher.named_parameters()}
                out = functional_call(trainer.teacher, weights, (), read_of(inputs)).logits
        return kd(outputs.logits, out)

    return distil(further)


# ------------------------------------------------------------------ inputs
@case("K1")
def i_expanded() -> Script:
    """expanded inputs"""

    def collate(rows: Any) -> Any:
        batch = pad(rows)
        batch["attention_mask"] = torch.ones(1, batch["input_ids"].shape[1], dtype=torch.long).expand(batch["input_ids"].shape)
        return batch

    return Script(model=FrozenBackbone(), collator=collate)


class MyTensor(torch.Tensor):
    pass


@case("K1")
def i_subclass() -> Script:
    """inputs of a subclass"""

    def collate(rows: Any) -> Any:
        batch = pad(rows)
        batch["input_ids"] = batch["input_ids"].as_subclass(MyTensor)
        return batch

    return Script(model=FrozenBackbone(), collator=collate)


@case("K1")
def i_requires_grad_on_output() -> Script:
    """h.requires_grad_() and gradient penalty"""

    class Net(FrozenBackbone):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Any:
            h = self.backbone(input_ids, attention_mask)
            h.requires_grad_()
            out = classified(self.head(pool(h, attention_mask)), labels)
            if labels is not None:
                g, = torch.autograd.grad(out["loss"], h, create_graph=True)
                out["loss"] = out["loss"] + g.square().sum()
            return out

    return Script(model=Net())
