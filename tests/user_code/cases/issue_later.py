"""Users' code that once gave another finished model, or failed where the stock Trainer works."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import RobertaConfig, RobertaForCausalLM, TrainerCallback

from ..kit import (
    IGNORED,
    LABELS,
    VOCABULARY,
    WIDTH,
    Classifier,
    Job,
    Rows,
    Setting,
    bert_classifier,
    built,
    case,
    large_weights,
    pad,
    sizes,
    tags_of,
    texts,
)


class LabelsInTheLayers(Classifier):
    """As in a model that embeds its label (CVAE, label-conditioned encoders)."""

    def __init__(self) -> None:
        super().__init__()
        self.bert.embeddings.label = nn.Embedding(LABELS + 1, WIDTH)
        self.given: Tensor | None = None
        self.bert.encoder.layer[0].register_forward_pre_hook(self._add_label)

    def _add_label(self, module: Any, args: Any) -> Any:
        if self.given is None:
            return args
        return (args[0] + self.bert.embeddings.label(self.given)[:, None], *args[1:])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.given = labels
        return super().forward(input_ids, attention_mask, labels)


def relabelled(setting: Setting) -> Rows:
    """The labels of a sample change between epochs, as with noisy labels."""
    data = texts()

    def change(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "labels": (row["labels"] + row["input_ids"][-1]) % LABELS}

    return Rows([*data.rows, *map(change, data.rows)])


@case("model with state", layouts=("one cache", "K2", "K2 cache"))
def frozen_layers_that_read_labels(setting: Setting) -> Job:
    """The embeddings add the label's; each text comes with two labels."""
    return Job(model=built(LabelsInTheLayers), data=relabelled(setting), options={"num_train_epochs": 4})


class ShiftsInputs(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_forward_pre_hook(_shift, with_kwargs=True)


def _shift(module: Any, args: Any, kwargs: Any) -> Any:
    kwargs = dict(kwargs)
    if module.training:
        module.calls += 1
        kwargs["input_ids"] = (
            (kwargs["input_ids"] + module.offset) % VOCABULARY if hasattr(module, "offset") else kwargs["input_ids"]
        )
    return args, kwargs


class Offsets(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
        model.offset = state.global_step % 5


@case("callback", layouts=("one cache", "K2", "K2 cache"))
def forward_pre_hook_that_changes_inputs(setting: Setting) -> Job:
    """A user's pre-hook on the model shifts the words, by a number that a callback sets."""
    return Job(model=built(ShiftsInputs), callbacks=[Offsets()], options={"num_train_epochs": 4})


# ---------------------------------------------------------------------------------------------------------
# 4. The finished model is the trained one
# ---------------------------------------------------------------------------------------------------------


class Spectral(Classifier):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        for layer in (self.bert.encoder.layer[0].output, self.bert.encoder.layer[3].output):
            layer.dense = nn.utils.parametrizations.spectral_norm(layer.dense)


@case("model with state", layouts=("K2", "one", "DP2"))
def spectral_norm(setting: Setting) -> Job:
    """Power iterations in each forward of two layers."""
    return Job(model=built(Spectral))


def _hooked() -> Any:
    model = bert_classifier()
    for name, parameter in model.named_parameters():
        if "layer.3" in name or "layer.0" in name:
            parameter.register_hook(_halve)
    return model


def _halve(gradient: Tensor) -> Tensor:
    return gradient * 0.1


@case("model with state", layouts=("K2", "K2 freeze", "DP2", "one"))
def tensor_hooks_on_parameters(setting: Setting) -> Job:
    """Gradients of two layers are scaled by hooks; layers move at a freeze."""
    return Job(model=_hooked(), options={"optim": "sgd", "learning_rate": 0.05})


@case("model with state", layouts=("K2 slices", "K2"))
def roberta_decoder_padded_on_the_left(setting: Setting) -> Job:
    """Positions follow from the words; rows are padded on the left."""

    def collator(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = 9
        ids = torch.tensor([[1] * (longest - len(r["input_ids"])) + r["input_ids"] for r in rows])
        return {"input_ids": ids, "attention_mask": ids.ne(1).long(), "labels": ids.masked_fill(ids.eq(1), IGNORED)}

    config = RobertaConfig(**sizes(), is_decoder=True, pad_token_id=1, bos_token_id=2, eos_token_id=3, use_cache=False)
    rows = [row["input_ids"] for row in texts(28).rows]
    rows = [(row * 3)[:9] if i < 16 else row for i, row in enumerate(rows)]  # the first ones are not padded
    data = Rows([{"input_ids": row} for row in rows])
    return Job(model=large_weights(RobertaForCausalLM(config)), data=data, collator=collator)


# ---------------------------------------------------------------------------------------------------------
# 5. Where the stock Trainer works, so do we
# ---------------------------------------------------------------------------------------------------------


class Strict(nn.Module):
    """Takes what it needs, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert_classifier().bert
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0])


class WeightedRows:
    """A mixin: each row has a weight of its own, and the mean is over weights."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        labels, weights = inputs.pop("labels"), inputs.pop("weight")
        logits = model(**inputs)
        loss = (F.cross_entropy(logits, labels, reduction="none") * weights).mean()
        return (loss, {"logits": logits}) if return_outputs else loss


def weighted_texts() -> Rows:
    return texts(weight=lambda generator, *_: generator.uniform(0.2, 3.0))


@case("trainer override", layouts=("one", "DP2", "K2", "K2 acc2"))
def strict_forward_and_popped_sample_weights(setting: Setting) -> Job:
    """`forward(input_ids, attention_mask)`; `compute_loss` pops labels and weights."""
    options = {"remove_unused_columns": False}
    return Job(model=built(Strict), data=weighted_texts(), trainer=WeightedRows, options=options)


class CRF(nn.Module):
    """A linear chain over the words of a row; tags are indices, without -100."""

    def __init__(self) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(LABELS, LABELS))

    def forward(self, scores: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        """[B]: the negative logarithm of each row's probability."""
        alpha, gold = scores[:, 0], scores[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for position in range(1, scores.shape[1]):
            following = (alpha[:, :, None] + self.transitions).logsumexp(1) + scores[:, position]
            step = self.transitions[tags[:, position - 1], tags[:, position]]
            step = step + scores[:, position].gather(1, tags[:, position : position + 1]).squeeze(1)
            inside = mask[:, position].bool()
            alpha = torch.where(inside[:, None], following, alpha)
            gold = gold + torch.where(inside, step, torch.zeros_like(step))
        return alpha.logsumexp(-1) - gold


class TaggerCRF(nn.Module):
    reduction = "mean"

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert_classifier().bert
        self.head, self.crf = nn.Linear(WIDTH, LABELS), CRF()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.head(self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)
        if labels is None:
            return {"logits": scores}
        losses = self.crf(scores, labels, attention_mask)
        loss = losses.sum() / attention_mask.sum() if self.reduction == "tokens" else losses.mean()
        return {"loss": loss, "logits": scores}


def tag_rows() -> Rows:
    return Rows(
        [{"input_ids": row["input_ids"], "labels": tags_of(None, row["input_ids"], 0)} for row in texts().rows]
    )


def pad_tags_with_zero(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return pad(rows, {"labels": 0})


@case("loss", layouts=("one", "DP2", "K2", "one acc2"))
def crf_that_indexes_by_labels(setting: Setting) -> Job:
    """A CRF, the mean over rows; its labels are never -100."""
    return Job(model=built(TaggerCRF), data=tag_rows(), collator=pad_tags_with_zero)


def stack_one(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows of unequal length cannot be stacked: for batches of one row."""
    return {
        "input_ids": torch.stack([torch.tensor(row["input_ids"]) for row in rows]),
        "attention_mask": torch.stack([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


@case("collator", layouts=("one", "one freeze"))
def stacking_collator_with_batch_size_one(setting: Setting) -> Job:
    """No padding, rows of unequal length, one row in a batch."""
    options = {"per_device_train_batch_size": 1, "max_steps": 6}
    return Job(collator=stack_one, options={}, drive=lambda t: _with_batch_size_one(t, options))


def _with_batch_size_one(trainer: Any, options: dict[str, Any]) -> None:
    for name, value in options.items():
        setattr(trainer.args, name, value)
    trainer._train_batch_size = 1
    trainer.train()


class Nested(Classifier):
    def forward(self, text: dict[str, Tensor], labels: Tensor | None = None) -> dict[str, Tensor]:
        return super().forward(text["input_ids"], text["attention_mask"], labels)


def nested_pad(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = pad(rows)
    return {"text": {k: batch[k] for k in ("input_ids", "attention_mask")}, "labels": batch["labels"]}


@case("collator", layouts=("one", "DP2", "K2", "one acc2"))
def nested_dicts_in_a_batch(setting: Setting) -> Job:
    """`{"text": {...}, "labels": ...}`."""
    return Job(model=built(Nested), collator=nested_pad, options={"remove_unused_columns": False})


class Counts(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.training:
            self.calls += 1
            self.seen += 1
        output = super().forward(input_ids, attention_mask, labels)
        if labels is not None:
            output["loss"] = output["loss"] * (1.0 + 0.1 * self.calls)
        return output


@case("model with state", layouts=("one", "DP2", "one freeze", "K2"))
def call_counter_in_forward(setting: Setting) -> Job:
    """The loss grows with each call; what is examined before training must not count."""
    return Job(model=built(Counts), observe=lambda trainer: {"calls": trainer.model.calls})


class NoLayers(nn.Module):
    """A bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, LABELS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head((self.words(input_ids) * attention_mask[..., None]).sum(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@case("model with state", layouts=("one", "DP2", "K2"))
def model_without_layers(setting: Setting) -> Job:
    """A bag of words: nothing to cut."""
    return Job(model=built(NoLayers))
