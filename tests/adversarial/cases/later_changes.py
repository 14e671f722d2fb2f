"""What frozen modules are called on changes late in a training, between their calls, or where few values show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForSequenceClassification

from ..kit import LABELS, VOCABULARY, WIDTH, At, Each, Inputs, Script, case, classified, pad, pool, samples
from .attack_front import SIZE, Images, OnBert, clip, reads, stack
from .attack_recipes_front import encoder, of
from .late_changes import Later, counted
from .later_teachers import listening


def counted_and_read(trainer: Any) -> dict[str, Any]:
    return {**counted(trainer), **reads(trainer)}


# ---------------------------------------------------------------------------------------------------------
# Writes between the calls of frozen modules
# ---------------------------------------------------------------------------------------------------------


class Apart(Later):
    """The frozen embeddings and layers of a BERT are parts of the user's model, which calls them."""

    def __init__(self, begin: int) -> None:
        super().__init__(begin)
        bert = self.bert
        del self.bert
        self.embeddings, self.layers = bert.embeddings, bert.encoder.layer

    def between(self, x: Tensor, mask: Tensor) -> None:
        """Called once, in the middle of the layers, after a while."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return classified(self.head(pool(self.states(input_ids, attention_mask), attention_mask)), labels)

    def states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        begun, skip = self.has_begun, torch.zeros(())
        x = self.embeddings(input_ids=input_ids)
        mask = (1.0 - attention_mask[:, None, None, :].float()) * -1e9
        for number, layer in enumerate(self.layers):
            if number == 2:
                skip = self.skipped(x)
                if begun:
                    self.between(x, mask)
            x = layer(x, mask)
        return x + skip

    def skipped(self, x: Tensor) -> Tensor:
        return torch.zeros(())


class WritesBetween(Apart):
    def skipped(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True)

    def between(self, x: Tensor, mask: Tensor) -> None:
        x[:, 1:3] = 0


class HidesTokens(Apart):
    def between(self, x: Tensor, mask: Tensor) -> None:
        mask[..., 1:] = -1e9


@case("K1")
def written_between_frozen_parts() -> Script:
    """The lower frozen layers' output, which is also read, is masked in place before the upper ones get it."""
    return of(WritesBetween(begin=10), data=samples(32, 8, 8), observe=counted_and_read)


class WritesUnread(Apart):
    def between(self, x: Tensor, mask: Tensor) -> None:
        x[:, 1:3] = 0


class WritesThroughView(Apart):
    def between(self, x: Tensor, mask: Tensor) -> None:
        x[:, 1:3].zero_()


@case("K1")
def written_between_frozen_layers() -> Script:
    """The states between frozen layers, which nothing else reads, are masked in place from the third epoch on."""
    return of(WritesUnread(begin=10), data=samples(32, 8, 8), observe=counted_and_read)


@case("K1")
def written_through_a_view_between_frozen_layers() -> Script:
    """Likewise, through a view of the states."""
    return of(WritesThroughView(begin=10), data=samples(32, 8, 8), observe=counted_and_read)


class WritesBehind(Apart):
    """Writes into the states below a layer after its call, and then reads the layer's output."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        begun, skip = self.has_begun, torch.zeros(())
        states = [self.embeddings(input_ids=input_ids)]
        mask = (1.0 - attention_mask[:, None, None, :].float()) * -1e9
        for layer in self.layers:
            states.append(layer(states[-1], mask))
        if begun:
            states[1][:, 1:3] = 0
            skip = states[2].mean(1)
        return classified(self.head(pool(states[-1], attention_mask) + skip), labels)


@case("K1")
def written_behind_a_frozen_layer() -> Script:
    """From the third epoch on, states are masked in place after their layer, whose output is then read."""
    return of(WritesBehind(begin=10), data=samples(32, 8, 8))


class ScalesInInference(OnBert):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        with torch.inference_mode():
            x = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            x[:, 1:3] *= 0.1
            x = x * 1.0
        return classified(self.head(pool(x.clone(), attention_mask)), labels)


@case("K1")
def scaled_in_inference_mode() -> Script:
    """In each step, a frozen BERT's output is scaled in place in inference mode, which counts no writes."""
    return of(ScalesInInference(), data=samples(32, 8, 8))


@case("K1")
def mask_written_in_inference_mode() -> Script:
    """A mask that was made in inference mode is written to between frozen layers, from the third epoch on."""

    class InInference(HidesTokens):
        def forward(
            self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
        ) -> dict[str, Tensor]:
            with torch.inference_mode():
                x = self.states(input_ids, attention_mask)
            return classified(self.head(pool(x.clone(), attention_mask)), labels)

    return of(InInference(begin=10), data=samples(32, 8, 8))


@case("K1")
def mask_written_between_frozen_parts() -> Script:
    """Tokens are hidden from the upper ones of frozen layers by a write into the mask, from the third epoch on."""
    return of(HidesTokens(begin=10), data=samples(32, 8, 8), observe=counted_and_read)


# ---------------------------------------------------------------------------------------------------------
# As many features or queries as tokens
# ---------------------------------------------------------------------------------------------------------


def padded_to(width: int) -> Callable[[list[Inputs]], Inputs]:
    def collate(rows: list[Inputs]) -> Inputs:
        batch = pad(rows)
        more = width - batch["input_ids"].shape[1]
        return {n: F.pad(value, (0, more)) if value.dim() == 2 else value for n, value in batch.items()}

    return collate


class Queries(nn.Module):
    """A frozen decoder of torch's, whose queries are frozen, too."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.queries = nn.Parameter(torch.randn(1, number, WIDTH), requires_grad=False)
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2).requires_grad_(False)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        queries = self.queries.expand(len(input_ids), -1, -1)
        x = self.decoder(queries, self.embedding(input_ids), memory_key_padding_mask=attention_mask == 0)
        return classified(self.head(x.mean(1)), labels)


@case("K1")
def queries_beyond_the_tokens() -> Script:
    """The last frozen queries change in the middle of the third epoch; there are as many as tokens in a batch."""

    def change(model: Any, step: int) -> None:
        model.queries[:, 12:] = 3.0

    return of(Queries(14), data=samples(32, 4, 8), collator=padded_to(14), callbacks=[At(change, [10])], observe=reads)


class Scaled(nn.Module):
    """A frozen encoder gets embedded words, each feature times a number of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.scale = torch.ones(WIDTH)
        self.encoder = encoder(batch_first=True).requires_grad_(False)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.encoder(self.embedding(input_ids) * self.scale, src_key_padding_mask=attention_mask == 0)
        return classified(self.head(pool(x, attention_mask)), labels)


@case("K1")
def features_beyond_the_tokens() -> Script:
    """The last features of a frozen encoder's input change in the third epoch; there are as many as tokens."""

    def change(model: Any, step: int) -> None:
        model.scale[12:] = 0.0

    data, collator = samples(32, 4, 8), padded_to(WIDTH)
    return of(Scaled(), data=data, collator=collator, callbacks=[At(change, [10])], observe=reads)


# ---------------------------------------------------------------------------------------------------------
# Parts of a frozen module that is not called itself
# ---------------------------------------------------------------------------------------------------------


class OnClip(nn.Module):
    """A head on features of a frozen CLIP."""

    def __init__(self, features: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.clip, self.features = clip().requires_grad_(False), features
        self.head = nn.Linear(features(self.clip, torch.zeros(1, 3, SIZE, SIZE)).shape[-1], LABELS)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return classified(self.head(self.features(self.clip, pixel_values)), labels)


@case("K1")
def features_by_a_method() -> Script:
    """`clip.get_image_features(...)` of a frozen CLIP."""
    model = OnClip(lambda clip, images: clip.get_image_features(pixel_values=images).pooler_output)
    return of(model, data=Images(), collator=stack, observe=reads)


@case("K1")
def tower_of_a_frozen_clip() -> Script:
    """`clip.vision_model(...)` of a frozen CLIP."""
    model = OnClip(lambda clip, images: clip.vision_model(pixel_values=images).last_hidden_state[:, 0])
    return of(model, data=Images(), collator=stack, observe=reads)


class LayerByLayer(OnBert):
    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.bert.embeddings(input_ids=input_ids)
        for layer in self.bert.encoder.layer:
            x = layer(x, (1.0 - attention_mask[:, None, None, :].float()) * -1e9)
        return classified(self.head(pool(x, attention_mask)), labels)


@case("K1", "R2")
def layers_one_by_one() -> Script:
    """The user's model calls the embeddings and each layer of a frozen BERT."""
    return of(LayerByLayer(), data=samples(32, 8, 8), observe=reads)


# ---------------------------------------------------------------------------------------------------------
# Inputs that are no tensors
# ---------------------------------------------------------------------------------------------------------


class Named(OnBert):
    """Gets the names of the samples as well."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, names: Any = None
    ) -> dict[str, Tensor]:
        return super().forward(input_ids, attention_mask, labels)


@case("K1")
def names_of_samples() -> Script:
    """The batch has the names of its samples, a list of strings; the log says that the frozen module is computed."""

    def collate(rows: list[Inputs]) -> Any:
        return {**pad(rows), "names": [str(row["input_ids"].tolist()) for row in rows]}

    return listening(of(Named(), data=samples(32, 8, 8), collator=collate), "bert is frozen, but computed", "names")


# ---------------------------------------------------------------------------------------------------------
# Modules beside the layers
# ---------------------------------------------------------------------------------------------------------


@case("K1")
def rotary_changes_with_a_policy() -> Script:
    """A policy stores the lower layers of a Llama; a callback rescales its rotary embedding in the fourth epoch."""

    def change(model: Any, step: int) -> None:
        model.model.rotary_emb.inv_freq *= 0.25

    def freeze(callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not hasattr(callback.trainer.args, "freeze_policy") and state.epoch and state.epoch > 0.5:
            model.model.embed_tokens.requires_grad_(False)
            model.model.layers[:2].requires_grad_(False)

    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=VOCABULARY, num_labels=LABELS, pad_token_id=0, initializer_range=0.3)
    product = {"freeze_policy": "schedule", "freeze_schedule": {"1": 2}}
    callbacks = [Each(freeze, "on_epoch_begin"), At(change, [13], "on_step_begin")]
    fields: dict[str, Any] = {"callbacks": callbacks, "product": product, "options": {"num_train_epochs": 5}}
    return Script(model=LlamaForSequenceClassification(config), data=samples(32, 8, 8), **fields)
