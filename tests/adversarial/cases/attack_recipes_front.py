"""Frozen parts of models, by recipes of fine-tuning: what is around them, and what is done to them, changes."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from ..kit import (
    LABELS,
    VOCABULARY,
    WIDTH,
    At,
    Backbone,
    Each,
    FrozenBackbone,
    Inputs,
    LossAndOutputs,
    Script,
    bert,
    case,
    classified,
    own_loss,
    pad,
    pool,
    samples,
)
from .attack_front import OnBert, frozen_bert, ragged, stack

EPOCHS: dict[str, Any] = {"num_train_epochs": 4}


def logged(trainer: Any) -> dict[str, Any]:
    """All numbers that both trainings log: norms of gradients, rates, metrics."""
    ours = ("runtime", "per_second", "train_loss", "total_flos", "cache", "pipeline", "step_time")
    log = [{k: v for k, v in e.items() if not any(word in k for word in ours)} for e in trainer.state.log_history]
    return {"log": [e for e in log if "loss" in e or "eval_loss" in e]}


def of(model: nn.Module, **fields: Any) -> Script:
    """A training of several epochs, whose log is compared."""
    fields["options"] = {**EPOCHS, "max_grad_norm": 0.5, **fields.get("options", {})}
    return Script(model=model, **{"data": ragged(), "observe": logged, **fields})


def from_epoch(number: int, change: Callable[[Any], None], model: Any = None, **fields: Any) -> Script:
    """`change(model)`, without gradients, when an epoch of four steps begins."""
    at = At(lambda changed, step: change(changed), [4 * number], "on_epoch_begin")
    return of(model or frozen_bert(), callbacks=[at], **fields)


class OnModule(nn.Module):
    """A trained head on a frozen module that gets embedded words, [B, S, H] or as it likes."""

    def __init__(self, module: nn.Module, call: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.module, self.call = nn.Embedding(VOCABULARY, WIDTH), module, call
        self.embedding.requires_grad_(False)
        self.module.requires_grad_(False)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.call(self.module, self.embedding(input_ids), input_ids)
        return classified(self.head(pool(x) if x.dim() == 3 else x), labels)


def encoder(**fields: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, **fields)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# ---------------------------------------------------------------------------------------------------------
# Modules whose outputs are not by sample
# ---------------------------------------------------------------------------------------------------------


@case("K1")
def attends_across_the_batch() -> Script:
    """A frozen `nn.TransformerEncoder` without `batch_first`, which gets the batch first."""
    return of(OnModule(encoder(), lambda module, x, words: module(x)), data=samples())


@case("K1")
def attends_across_a_square_batch() -> Script:
    """Likewise, with as many samples as words."""
    return of(OnModule(encoder(), lambda module, x, words: module(x)), data=samples(shortest=8, longest=8))


@case("K1")
def recurrent_across_the_batch() -> Script:
    """A frozen GRU without `batch_first`, which gets the batch first."""
    return of(OnModule(nn.GRU(WIDTH, WIDTH), lambda module, x, words: module(x)[0]), data=samples())


@case("K1")
def batch_second() -> Script:
    """A frozen `nn.TransformerEncoder` that gets the batch second, as it wants."""
    return of(OnModule(encoder(), lambda module, x, words: module(x.transpose(0, 1)).transpose(0, 1)), data=samples())


@case("K1")
def bags_by_offsets() -> Script:
    """A frozen `nn.EmbeddingBag` with one row of all words, and offsets."""

    def call(module: Any, x: Tensor, words: Tensor) -> Tensor:
        flat = words.flatten()
        bagged: Tensor = module(flat, torch.arange(0, len(flat), words.shape[1]))
        return bagged

    return of(OnModule(nn.EmbeddingBag(VOCABULARY, WIDTH), call), data=samples())


@case("K1")
def centred_over_the_batch() -> Script:
    """A frozen layer gets embeddings from which the mean over the batch is taken."""
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return of(OnModule(layer, lambda module, x, words: module(x - x.mean(0, keepdim=True))), data=samples())


@case("K1")
def softmax_over_the_batch() -> Script:
    """A frozen sequence of torch's modules ends with a softmax over the first dimension."""
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softmax(dim=0))
    return of(OnModule(layer, lambda module, x, words: module(x)), data=samples())


@case("K1")
def batch_norm_without_statistics() -> Script:
    """Batch normalisation with `track_running_stats=False`, also in evaluation mode."""
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(8, track_running_stats=False)).eval()
    model = OnModule(layer, lambda module, x, words: module.eval()(x))
    return of(model, data=samples())


@case("K1")
def renormalised_embeddings() -> Script:
    """A frozen embedding with `max_norm`, which the lookup renormalises in place."""
    table = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)
    return of(OnModule(table, lambda module, x, words: module(words)), data=samples(96), options={"max_steps": 30})


@case("K1")
def pooled_at_random() -> Script:
    """Fractional pooling, which draws random regions also in evaluation mode."""
    layer = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.FractionalMaxPool2d(2, output_size=(4, WIDTH))).eval()
    return of(OnModule(layer, lambda module, x, words: module.eval()(x)), data=samples())


@case("K1")
def randomised_activation() -> Script:
    """A frozen sequence with `nn.RReLU`, which is random in training mode."""
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU())
    return of(OnModule(layer, lambda module, x, words: module(x)), data=samples(), **evaluated())


def evaluated() -> dict[str, Any]:
    return {"options": {"eval_strategy": "epoch"}, "keywords": {"eval_dataset": ragged(12, seed=4)}}


# ---------------------------------------------------------------------------------------------------------
# Masks and shapes
# ---------------------------------------------------------------------------------------------------------


class WithoutMask(OnBert):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return classified(self.head(self.bert(input_ids=input_ids).last_hidden_state[:, 0]), labels)


@case("K1")
def padding_without_a_mask() -> Script:
    """A frozen BERT that gets no mask, so that its output depends on the width of the batch."""
    return of(WithoutMask(), **evaluated())


@case("K1")
def padding_mask_of_torch() -> Script:
    """A frozen `nn.TransformerEncoder` with `src_key_padding_mask`, which is true at padding."""

    class Masked(OnModule):
        def forward(
            self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
        ) -> dict[str, Tensor]:
            x = self.module(self.embedding(input_ids), src_key_padding_mask=input_ids == 0)
            return classified(self.head(pool(x, attention_mask)), labels)

    return of(Masked(encoder(batch_first=True), lambda module, x, words: x), **evaluated())


@case("K1")
def mask_with_holes() -> Script:
    """Words in the middle are masked in the second and fourth epoch; the words themselves stay."""

    class Holes(Dataset):
        reads = 0

        def __init__(self) -> None:
            self.rows: Any = ragged()

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> dict[str, Any]:
            row = dict(self.rows[index])
            mask = row["attention_mask"].clone()
            mask[1] = int(self.epoch % 2 == 0)
            return {**row, "attention_mask": mask}

        epoch = 0

    data = Holes()

    def begin(each: Any, state: Any, control: Any, **_: Any) -> None:
        data.epoch = round(state.epoch or 0)

    return of(frozen_bert(), data=data, callbacks=[Each(begin, "on_epoch_begin")])


@case("K1")
def types_of_words_by_epoch() -> Script:
    """`token_type_ids` change with the epoch; the words stay."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        types = torch.full_like(inputs["input_ids"], int(trainer.state.epoch or 0) % 2)
        outputs = model(**inputs, token_type_ids=types)
        return outputs.loss, outputs

    return of(frozen_bert(), trainer=own_loss(loss))


@case("K1")
def positions_by_epoch() -> Script:
    """`position_ids` of the batch begin elsewhere in each epoch."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        words = inputs["input_ids"]
        begin = int(trainer.state.epoch or 0)
        outputs = model(**inputs, position_ids=torch.arange(begin, begin + words.shape[1]).expand_as(words))
        return outputs.loss, outputs

    return of(frozen_bert(), trainer=own_loss(loss))


def gpt2_config() -> GPT2Config:
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 3, "n_head": 2, "n_positions": 128}
    plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2Config(**sizes, **plain, pad_token_id=0, num_labels=LABELS)


def lower_gpt2(kind: Any = GPT2LMHeadModel) -> Any:
    """A GPT-2 whose embeddings and two lower layers are frozen."""
    model = kind(gpt2_config())
    for part in (model.transformer.wte, model.transformer.wpe, *model.transformer.h[:2]):
        part.requires_grad_(False)
    return model


def flat(rows: list[Inputs]) -> Inputs:
    """One row of all words, with positions that begin anew, as `DataCollatorWithFlattening`."""
    words = torch.cat([row["input_ids"] for row in rows])
    labels = torch.cat([torch.cat([torch.tensor([-100]), row["input_ids"][1:]]) for row in rows])
    positions = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])
    return {"input_ids": words[None], "labels": labels[None], "position_ids": positions[None]}


@case("K1")
def packed_without_padding() -> Script:
    """A GPT-2 with frozen lower layers on one row of packed samples."""
    return of(lower_gpt2(), collator=flat)


@case("K1")
def last_word_classified() -> Script:
    """A GPT-2 that classifies by the last word that is not padding; the lower layers are frozen."""
    return of(lower_gpt2(GPT2ForSequenceClassification), **evaluated())


class Grid(nn.Module):
    """A frozen convolution over a grid, whose width it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Sequential(nn.Conv2d(1, WIDTH, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.convolution.requires_grad_(False)
        self.head = nn.Linear(4 * WIDTH, LABELS)

    def forward(self, grid: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return classified(self.head(self.convolution(grid).flatten(1)), labels)


class Grids(Dataset):
    """The same 64 numbers of each sample as a grid whose shape, kind or order depends on the epoch."""

    def __init__(self, change: Callable[[Tensor, int], Tensor]) -> None:
        generator = torch.Generator().manual_seed(2)
        self.numbers = [torch.rand(1, 8, 8, generator=generator) for _ in range(32)]
        self.change, self.epoch = change, 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Inputs:
        return {"grid": self.change(self.numbers[index], self.epoch), "labels": torch.tensor(index % LABELS)}


def of_grids(change: Callable[[Tensor, int], Tensor], **fields: Any) -> Script:
    data = Grids(change)

    def begin(each: Any, state: Any, control: Any, **_: Any) -> None:
        data.epoch = round(state.epoch or 0)

    return of(Grid(), data=data, collator=stack, callbacks=[Each(begin, "on_epoch_begin")], **fields)


@case("K1")
def same_bytes_in_another_shape() -> Script:
    """The same numbers as a grid of 8 x 8, then of 4 x 16, then of 8 x 8."""
    return of_grids(lambda x, epoch: x.reshape(1, 4, 16) if epoch % 2 else x)


@case("K1")
def same_numbers_transposed() -> Script:
    """A transposed view of the same memory in every second epoch."""
    return of_grids(lambda x, epoch: x.transpose(1, 2) if epoch % 2 else x)


@case("K1")
def hardly_other_numbers() -> Script:
    """Noise of a millionth is added to images, another one in each epoch."""
    return of_grids(lambda x, epoch: x + 1e-6 * epoch)


@case("K1")
def images_augmented_by_numpy() -> Script:
    """Random flips and erasing by a NumPy generator of the data set's."""
    generator = numpy.random.default_rng(9)

    def change(x: Tensor, epoch: int) -> Tensor:
        x = x.flip(2) if generator.random() < 0.5 else x
        return x * (1.0 if generator.random() < 0.5 else 0.5)

    return of_grids(change)


@case("K1")
def transform_of_a_dataset() -> Script:
    """`datasets.Dataset.set_transform` with random words that are dropped; another transform from epoch three on."""
    import datasets

    rows = [{k: v.tolist() for k, v in row.items()} for row in samples().rows]
    data = datasets.Dataset.from_list(rows)

    generator = torch.Generator().manual_seed(9)

    def transform(batch: dict[str, Any], rate: float = 0.2) -> dict[str, Any]:
        words = [torch.tensor(w) for w in batch["input_ids"]]
        words = [torch.where(torch.rand(len(w), generator=generator) < rate, torch.full_like(w, 3), w) for w in words]
        masks = [torch.tensor(m) for m in batch["attention_mask"]]
        return {"input_ids": words, "attention_mask": masks, "labels": [torch.tensor(v) for v in batch["labels"]]}

    data.set_transform(transform)

    def begin(each: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 8:
            each.trainer.train_dataset.set_transform(lambda batch: transform(batch, 0.0))

    return of(frozen_bert(), data=data, callbacks=[Each(begin, "on_epoch_begin")])


class Shorter:
    """A collator that cuts samples, to a length that a callback sets."""

    longest = 4

    def __call__(self, rows: list[Inputs]) -> Inputs:
        cut = [{k: v[: self.longest] if v.dim() else v for k, v in row.items()} for row in rows]
        return pad(cut)


@case("K1")
def longer_samples_by_epoch() -> Script:
    """A curriculum: a collator cuts samples to four words, then to eight, and later to twelve."""
    collator = Shorter()

    def begin(each: Any, state: Any, control: Any, **_: Any) -> None:
        collator.longest = 4 + 4 * (state.global_step // 4)

    return of(frozen_bert(), collator=collator, callbacks=[Each(begin, "on_epoch_begin")])


@case("K1")
def evaluated_with_another_collator() -> Script:
    """`get_eval_dataloader` pads evaluations to a multiple of 16, and cuts them."""

    class Other:
        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            trainer: Any = self
            kept, trainer.data_collator = (
                trainer.data_collator,
                lambda rows: pad([{k: v[:6] if v.dim() else v for k, v in r.items()} for r in rows]),
            )
            try:
                return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
            finally:
                trainer.data_collator = kept

    return of(frozen_bert(), trainer=Other, **evaluated())


@case("K1")
def grouped_by_length() -> Script:
    """Samples of equal lengths in a batch, with shuffling."""
    return of(frozen_bert(), options={"train_sampling_strategy": "group_by_length"})


@case("K1")
def numbers_of_a_file() -> Script:
    """Samples are in a file that a callback rewrites when the third epoch begins."""
    path = Path(tempfile.mkdtemp()) / "numbers"
    table = numpy.memmap(path, numpy.float32, "w+", shape=(32, 64))
    table[:] = numpy.random.default_rng(1).random((32, 64))

    class Filed(Grids):
        def __getitem__(self, index: int) -> Inputs:
            grid = torch.tensor(numpy.memmap(path, numpy.float32, "r", shape=(32, 64))[index]).reshape(1, 8, 8)
            return {"grid": grid, "labels": torch.tensor(index % LABELS)}

    def begin(each: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 8:
            table[:, :10] = 0

    data = Filed(lambda x, epoch: x)
    return of(Grid(), data=data, collator=stack, callbacks=[Each(begin, "on_epoch_begin")])


@case("K1")
def labels_corrected_by_epoch() -> Script:
    """A callback gives some samples of the data set other labels when the third epoch begins."""
    data = ragged()

    def begin(each: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 8:
            for row in each.trainer.train_dataset.rows[:9]:
                row["labels"] = (row["labels"] + 1) % LABELS

    return of(frozen_bert(), data=data, callbacks=[Each(begin, "on_epoch_begin")])


# ---------------------------------------------------------------------------------------------------------
# Frozen parts that are not by themselves
# ---------------------------------------------------------------------------------------------------------


@case("K1")
def frozen_view_of_a_trained_weight() -> Script:
    """A frozen embedding lies in the memory of a trained table, of which it is the first rows."""

    class Views(FrozenBackbone):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(self.backbone.embedding.weight.detach().clone())
            self.backbone.embedding.weight = nn.Parameter(self.table.data[:], requires_grad=False)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> dict[str, Tensor]:
            outputs = super().forward(input_ids, attention_mask, labels)
            extra = pool(self.table[input_ids], attention_mask).pow(2).mean()
            return {**outputs, "loss": outputs["loss"] + extra} if labels is not None else outputs

    return of(Views())


@case("K1")
def frozen_copy_behind_a_list() -> Script:
    """A frozen backbone reads the trained head's weight, which it keeps in a list."""

    class Reads(Backbone):
        others: list[Any] = []  # noqa: RUF012

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            scale = self.others[0].weight.detach().abs().mean() if self.others else 1.0
            return super().forward(input_ids) * scale

    model = FrozenBackbone(Reads())
    model.backbone.others = [model.head[0]]
    return of(model)


@case("K1")
def steering_vector_in_a_hook() -> Script:
    """A hook on a frozen layer adds a trained vector of the model's."""
    model = frozen_bert()
    model.steering = nn.Parameter(torch.zeros(WIDTH))
    layer = model.bert.encoder.layer[1]

    def steer(module: nn.Module, inputs: Any, output: Any) -> Any:
        return (output[0] + model.steering, *output[1:]) if isinstance(output, tuple) else output + model.steering

    layer.register_forward_hook(steer)
    return of(model)


@case("K1")
def steered_by_the_head_without_gradients() -> Script:
    """A hook on a frozen layer adds the trained head's bias, without a gradient."""
    model = frozen_bert()

    def steer(module: nn.Module, inputs: Any, output: Any) -> Any:
        shift = model.classifier.bias.detach().sum()
        return (output[0] + shift, *output[1:]) if isinstance(output, tuple) else output + shift

    model.bert.encoder.layer[1].register_forward_hook(steer)
    return of(model)


@case("K1")
def mix_of_hidden_states() -> Script:
    """ELMo: trained weights mix the hidden states of all layers of a frozen BERT, as its configuration says."""

    class Mixed(OnBert):
        def __init__(self) -> None:
            super().__init__(output_hidden_states=True)
            self.mix = nn.Parameter(torch.zeros(5))

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> dict[str, Tensor]:
            states = self.bert(input_ids=input_ids, attention_mask=attention_mask).hidden_states
            weights = self.mix.softmax(0)
            hidden = sum(w * s for w, s in zip(weights, states, strict=True))
            return classified(self.head(pool(hidden, attention_mask)), labels)  # type: ignore[arg-type]

    return of(Mixed(), **evaluated())


@case("K1")
def frozen_part_called_on_trained_outputs() -> Script:
    """A frozen projection is called on embedded words, and then on what a trained layer makes of them."""

    class Twice(OnBert):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.middle = nn.Linear(WIDTH, WIDTH)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> dict[str, Tensor]:
            hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            hidden = self.projection(torch.tanh(self.middle(self.projection(hidden))))
            return classified(self.head(pool(hidden, attention_mask)), labels)

    return of(Twice())


@case("K1")
def frozen_part_in_inference_mode() -> Script:
    """The forward calls the frozen BERT in inference mode, and a trained part on a copy."""

    class Inference(OnBert):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> dict[str, Tensor]:
            with torch.inference_mode():
                hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return classified(self.head(pool(hidden.clone(), attention_mask)), labels)

    return of(Inference(), **evaluated())


@case("K1")
def frozen_part_called_in_a_loop() -> Script:
    """The frozen BERT is called on its own output, as often as a counter of epochs says."""

    class Loop(OnBert):
        times = 1

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> dict[str, Tensor]:
            hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            for _ in range(self.times):
                hidden = self.bert(inputs_embeds=hidden, attention_mask=attention_mask).last_hidden_state
            return classified(self.head(pool(hidden, attention_mask)), labels)

    def more(model: Any, step: int) -> None:
        model.times = 1 + step // 8

    return of(Loop(), callbacks=[At(more, range(0, 32, 4), "on_epoch_begin")])


def drawn(draw: Callable[[Any, Tensor], Tensor], **attributes: Any) -> Script:
    """A declared backbone that adds noise by a source of its own."""

    class Noisy(Backbone):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return draw(self, super().forward(input_ids))

    backbone = Noisy()
    for name, value in attributes.items():
        setattr(backbone, name, value)
    return of(FrozenBackbone(backbone), data=samples())


@case("K1")
def noise_of_a_numpy_generator() -> Script:
    """A declared frozen backbone scales its output by a NumPy generator of its own."""
    return drawn(lambda module, x: x * module.generator.random(), generator=numpy.random.default_rng(3))


@case("K1")
def noise_of_a_python_generator() -> Script:
    """Likewise, by a `random.Random`."""
    return drawn(lambda module, x: x * module.generator.random(), generator=random.Random(3))


@case("K1")
def noise_of_a_torch_generator() -> Script:
    """Likewise, by a `torch.Generator`."""
    generator = torch.Generator().manual_seed(3)
    return drawn(lambda module, x: x + torch.randn(x.shape, generator=module.generator), generator=generator)


@case("K1")
def scale_of_an_iterator() -> Script:
    """Likewise, by the next number of an iterator."""
    return drawn(lambda module, x: x / (1 + next(module.numbers)), numbers=itertools.count())


# ---------------------------------------------------------------------------------------------------------
# What is done to frozen parts
# ---------------------------------------------------------------------------------------------------------


SAVED: dict[str, Any] = {"save_strategy": "epoch", "optim": "adamw_torch", "learning_rate": 0.01}


@case("K1", "R2")
def pruned_by_torch() -> Script:
    """`prune.l1_unstructured` on a frozen layer when the third epoch begins."""

    def change(model: Any) -> None:
        prune.l1_unstructured(model.bert.encoder.layer[0].output.dense, "weight", 0.5)
        model.bert.requires_grad_(False)

    return from_epoch(2, change, options=SAVED)


@case("K1")
def pruned_further_by_torch() -> Script:
    """Likewise, a part from the start, and more when the third epoch begins."""
    model = frozen_bert()
    prune.random_unstructured(model.bert.encoder.layer[0].output.dense, "weight", 0.2)
    return from_epoch(2, lambda m: prune.l1_unstructured(m.bert.encoder.layer[0].output.dense, "weight", 0.5), model)


@case("K1")
def weight_norm_of_a_frozen_layer() -> Script:
    """A frozen layer has a weight norm, whose length a callback changes."""
    model = frozen_bert()
    parametrizations.weight_norm(model.bert.encoder.layer[0].output.dense)
    model.bert.requires_grad_(False)

    def longer(changed: Any) -> None:
        changed.bert.encoder.layer[0].output.dense.parametrizations.weight.original0.mul_(1.5)

    return from_epoch(2, longer, model)


@case("K1")
def weight_norm_by_hooks() -> Script:
    """Likewise, by `torch.nn.utils.weight_norm`, whose hook sets the weight in each forward."""
    model = frozen_bert()
    torch.nn.utils.weight_norm(model.bert.encoder.layer[0].output.dense)
    model.bert.requires_grad_(False)
    return from_epoch(2, lambda m: m.bert.encoder.layer[0].output.dense.weight_g.mul_(1.5), model)


@case("K1")
def spectral_norm_of_a_frozen_layer() -> Script:
    """A frozen layer has a spectral norm, whose power iteration runs in training mode."""
    model = frozen_bert()
    parametrizations.spectral_norm(model.bert.encoder.layer[0].output.dense)
    model.bert.requires_grad_(False)
    return of(model, **evaluated())


@case("K1", "R2")
def layers_cut_off() -> Script:
    """The encoder keeps its first two layers from the third epoch on."""

    def cut(model: Any) -> None:
        model.bert.encoder.layer = model.bert.encoder.layer[:2]

    return from_epoch(2, cut, options=SAVED)


@case("K1")
def layers_in_another_order() -> Script:
    """Two frozen layers change places when the third epoch begins."""

    def swap(model: Any) -> None:
        layers = model.bert.encoder.layer
        layers[0], layers[2] = layers[2], layers[0]

    return from_epoch(2, swap)


@case("K1")
def vocabulary_resized() -> Script:
    """`resize_token_embeddings` in the middle of the training; the new rows are frozen."""

    def resize(model: Any) -> None:
        model.resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
        model.bert.requires_grad_(False)
        model.get_input_embeddings().weight[:8] += 1

    return from_epoch(2, resize)


@case("K1")
def vector_to_parameters() -> Script:
    """All weights of the frozen part are set from one vector, as Evolution Strategies do."""

    def set_all(model: Any) -> None:
        vector = torch.nn.utils.parameters_to_vector(model.bert.parameters())
        torch.nn.utils.vector_to_parameters(vector * 0.9, model.bert.parameters())

    return from_epoch(2, set_all)


@case("K1")
def dropout_rate_by_epoch() -> Script:
    """A callback sets the rate of a frozen layer's dropout above zero in the third epoch."""

    def raise_rate(model: Any) -> None:
        model.bert.encoder.layer[0].output.dropout.p = 0.3

    return from_epoch(2, raise_rate)


@case("K1")
def precision_by_epoch() -> Script:
    """The frozen BERT is cast to float64 and back to float32 through bfloat16 when the third epoch begins."""
    return from_epoch(2, lambda model: model.bert.to(torch.bfloat16).to(torch.float32))


@case("K1")
def norms_thawed() -> Script:
    """The normalisations within the frozen BERT are trained from the third epoch on."""
    model = frozen_bert()

    def thaw(changed: Any) -> None:
        for name, parameter in changed.named_parameters():
            if "LayerNorm" in name:
                parameter.requires_grad_(True)

    keywords = {"optimizers": (torch.optim.SGD(model.parameters(), lr=0.05), None)}
    return from_epoch(2, thaw, model, keywords=keywords)


@case("K1", "R2")
def new_head_in_the_middle() -> Script:
    """The head is replaced by another one, which the optimizer gets as a group."""

    def begin(each: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        if state.global_step == 8:
            torch.manual_seed(4)
            model.classifier = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, LABELS))
            optimizer.add_param_group({"params": list(model.classifier.parameters()), "lr": 0.03})
            scheduler = each.trainer.lr_scheduler
            scheduler.base_lrs.append(0.03)
            scheduler.lr_lambdas.append(lambda step: 1.0)

    options = {"save_strategy": "epoch"}
    return of(frozen_bert(), callbacks=[Each(begin, "on_epoch_begin")], options=options)


@case("K1")
def compiled_frozen_part() -> Script:
    """`model.bert.compile(backend="eager")` before the training."""
    model = frozen_bert()
    model.bert.compile(backend="eager")
    return of(model, data=samples())


@case("K1")
def graph_of_the_frozen_part() -> Script:
    """The frozen backbone is a `torch.fx.GraphModule` whose code changes in the third epoch."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return torch.relu(self.linear(self.embedding(input_ids)))

    def change(model: Any) -> None:
        for node in model.backbone.graph.nodes:
            if node.target is torch.relu:
                node.target = torch.sigmoid
        model.backbone.recompile()

    return from_epoch(2, change, FrozenBackbone(torch.fx.symbolic_trace(Inner())))


# ---------------------------------------------------------------------------------------------------------
# Adapters
# ---------------------------------------------------------------------------------------------------------


def two_adapters() -> Any:
    """A BERT with two frozen adapters on its lower layers, one of which is used, and a trained head."""
    kinds = {"target_modules": ["query", "value"], "layers_to_transform": [0, 1], "layers_pattern": "layer"}
    torch.manual_seed(6)
    model = get_peft_model(bert(), LoraConfig(r=2, init_lora_weights=False, **kinds), adapter_name="one")
    model.add_adapter("other", LoraConfig(r=2, init_lora_weights=False, **kinds))
    model.requires_grad_(False)
    model.base_model.model.classifier.requires_grad_(True)
    return model


def use(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.set_adapter(name)
        model.requires_grad_(False)
        model.base_model.model.classifier.requires_grad_(True)

    return change


@case("K1")
def adapter_by_epoch() -> Script:
    """Another frozen adapter is used from the third epoch on."""
    return from_epoch(2, use("other"), two_adapters())


@case("K1")
def adapters_switched_in_each_step() -> Script:
    """The two frozen adapters take turns in the steps."""

    def change(model: Any, step: int) -> None:
        use("other" if step % 3 == 1 else "one")(model)

    return of(two_adapters(), callbacks=[At(change, range(16))])


@case("K1")
def adapters_off_by_epoch() -> Script:
    """The adapters are disabled from the third epoch on."""

    def off(model: Any) -> None:
        model.base_model.disable_adapter_layers()
        use_head = model.base_model.model.classifier
        use_head.requires_grad_(True)

    return from_epoch(2, off, two_adapters())


@case("K1")
def adapters_merged_by_epoch() -> Script:
    """The frozen adapters are merged when the third epoch begins, and stay so."""
    return from_epoch(2, lambda model: model.merge_adapter(), two_adapters())


@case("K1")
def weighted_adapter_by_epoch() -> Script:
    """A combination of both adapters is made and used from the third epoch on."""

    def combine(model: Any) -> None:
        model.add_weighted_adapter(["one", "other"], [0.3, 0.7], "both", combination_type="linear")
        use("both")(model)

    return from_epoch(2, combine, two_adapters())


# ---------------------------------------------------------------------------------------------------------
# In the middle of an epoch
# ---------------------------------------------------------------------------------------------------------


@case("K1")
def generates_in_the_middle() -> Script:
    """A callback generates with beams from a GPT-2 with frozen lower layers, after every third step."""
    words: list[Any] = []

    def end(each: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % 3 == 0:
            model.eval()
            prompt = torch.tensor([[5, 6, 7], [8, 9, 10]])
            made = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), num_beams=2, max_new_tokens=4, do_sample=False
            )
            words.append(made.tolist())
            model.train()

    collator = lambda rows: pad([{**row, "labels": row["input_ids"]} for row in rows])  # noqa: E731
    callbacks = [Each(end)]
    return of(lower_gpt2(), collator=collator, callbacks=callbacks, observe=lambda t: {**logged(t), "words": words})


@case("K1")
def predicts_in_the_middle() -> Script:
    """A callback predicts the training data, cut to fewer words, in the middle of each epoch."""
    means: list[float] = []

    def end(each: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % 4 == 2:
            short = [{k: v[:5] if v.dim() else v for k, v in row.items()} for row in each.trainer.train_dataset.rows]
            means.append(float(numpy.abs(each.trainer.predict(short).predictions).mean()))

    return of(frozen_bert(), callbacks=[Each(end)], observe=lambda trainer: {**logged(trainer), "means": means})


@case("K1")
def resumed_in_the_middle() -> Script:
    """A training over a frozen BERT is resumed from the middle of its second epoch."""

    def drive(trainer: Any) -> Any:
        trainer.train()
        folder = f"{trainer.args.output_dir}/checkpoint-6"
        return [trainer.train(resume_from_checkpoint=folder).global_step]

    options = {"save_strategy": "steps", "save_steps": 6, "optim": "adamw_torch"}
    return of(frozen_bert(), options=options, drive=drive)


# ---------------------------------------------------------------------------------------------------------
# Teachers
# ---------------------------------------------------------------------------------------------------------


def taught(
    call: Callable[[Any, Any, Inputs], Tensor], teachers: int = 1, dropout: float = 0.0, **fields: Any
) -> Script:
    """A trained BERT with frozen teachers in the trainer; `call(trainer, model, inputs)` returns their logits."""

    def wire(trainer: Any) -> None:
        torch.manual_seed(8)
        trainer.teachers = [bert(hidden_dropout_prob=dropout).requires_grad_(False) for _ in range(teachers)]
        for teacher in trainer.teachers:
            teacher.train(bool(dropout))
        trainer.teacher = trainer.teachers[0]

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = call(trainer, model, {k: v for k, v in inputs.items() if k != "labels"})
        return outputs.loss + F.mse_loss(outputs.logits, wanted) * 10, outputs

    return of(bert(), trainer=own_loss(loss), wire=wire, **fields)


@case("K1", "K2")
def teachers_take_turns() -> Script:
    """Two frozen teachers take turns in the steps."""
    return taught(lambda trainer, model, x: trainer.teachers[trainer.state.global_step % 2](**x).logits, teachers=2)


@case("K1", "K2")
def teacher_in_training_mode() -> Script:
    """The teacher's weights are frozen, and its dropout rate is set to zero after the first epoch."""

    def call(trainer: Any, model: Any, x: Inputs) -> Tensor:
        for module in trainer.teacher.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0 if trainer.state.global_step % 8 < 4 else 1.0
        logits: Tensor = trainer.teacher(**x).logits
        return logits

    return taught(call, dropout=0.1)


@case("K1", "K2")
def teacher_sees_fewer_words() -> Script:
    """The teacher gets the first words of each sample, more of them in each epoch."""

    def call(trainer: Any, model: Any, x: Inputs) -> Tensor:
        n = 4 + 3 * int(trainer.state.epoch or 0)
        logits: Tensor = trainer.teacher(**{k: v[:, :n] for k, v in x.items()}).logits
        return logits

    return taught(call)


@case("K1", "K2")
def teacher_sees_the_students_words() -> Script:
    """The teacher gets words of which some are replaced at random, by a generator of the trainer's."""

    def call(trainer: Any, model: Any, x: Inputs) -> Tensor:
        if not hasattr(trainer, "own"):
            trainer.own = torch.Generator().manual_seed(1)
        words = x["input_ids"]
        drop = torch.rand(words.shape, generator=trainer.own) < 0.1
        logits: Tensor = trainer.teacher(**{**x, "input_ids": torch.where(drop & (words > 0), 3, words)}).logits
        return logits

    return taught(call)


@case("K1", "R2")
def teacher_replaced_by_the_student() -> Script:
    """Born-again networks: the teacher gets the student's weights after the second epoch."""

    def call(trainer: Any, model: Any, x: Inputs) -> Tensor:
        if trainer.state.global_step == 8:
            trainer.teacher.load_state_dict(trainer.model.state_dict())
        logits: Tensor = trainer.teacher(**x).logits
        return logits

    return taught(call)


@case("K1")
def teacher_with_its_own_scale() -> Script:
    """The teacher's logits are divided by a temperature that is an attribute of the teacher's, set in the loss."""

    def call(trainer: Any, model: Any, x: Inputs) -> Tensor:
        trainer.teacher.classifier.weight.data.copy_(model.classifier.weight.data)
        logits: Tensor = trainer.teacher(**x).logits
        return logits

    return taught(call)


@case("K1")
def two_models_share_a_frozen_encoder() -> Script:
    """Two frozen classifiers of the trainer share one encoder, and differ by heads of which one is trained."""

    def wire(trainer: Any) -> None:
        torch.manual_seed(8)
        trainer.side = nn.Linear(WIDTH, LABELS).requires_grad_(False)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        words = {k: v for k, v in inputs.items() if k != "labels"}
        with torch.no_grad():
            wanted = trainer.side(model.bert(**words).pooler_output)
            trainer.side.weight.lerp_(model.classifier.weight, 0.1)
        return outputs.loss + F.mse_loss(outputs.logits, wanted), outputs

    return of(frozen_bert(), trainer=own_loss(loss), wire=wire)
