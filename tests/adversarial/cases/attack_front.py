"""Frozen parts of models, as people's scripts have them. Their outputs are stored and read."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, WeightedRandomSampler
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertForMultipleChoice,
    BertForTokenClassification,
    BertModel,
    CLIPConfig,
    CLIPModel,
    ConvNextBackbone,
    ConvNextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

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
    bert_config,
    case,
    classified,
    own_loss,
    pad,
    pool,
    samples,
)

SIZE = 16
"""Height and width of images."""


def reads(trainer: Any) -> dict[str, Any]:
    """Whether stored outputs were read; the stock Trainer has none, and counts as if it did."""
    if not hasattr(trainer.args, "activation_cache"):
        return {"read": True}
    file = Path(trainer.args.output_dir, "pipeline_metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {"read": any(line.get("values", {}).get("cache_layers_skipped") for line in lines)}


def ragged(number: int = 32, **fields: Any) -> Any:
    return samples(number, shortest=4, longest=14, **fields)


def frozen_bert(**changes: Any) -> Any:
    """A classifier with a frozen encoder of transformers, without dropout."""
    model = bert(**changes)
    model.bert.requires_grad_(False)
    return model


class OnBert(nn.Module):
    """A user's classifier on a frozen BERT."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.bert: Any = BertModel(bert_config(**changes), add_pooling_layer=False).requires_grad_(False)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return classified(self.head(pool(hidden, attention_mask)), labels)


class Images(Dataset):
    """Random images with a label, or with words."""

    def __init__(self, number: int = 32, words: bool = False, size: int = SIZE, seed: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows: list[Inputs] = []
        for row in samples(number, 6, 6):
            image = torch.rand(3, size, size, generator=generator)
            text = {"input_ids": row["input_ids"], "attention_mask": row["attention_mask"]}
            self.rows.append({"pixel_values": image, **(text if words else {}), "labels": row["labels"]})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Inputs:
        return dict(self.rows[index])


def stack(rows: list[Inputs]) -> Inputs:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def vit_config(**changes: Any) -> ViTConfig:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    plain = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTConfig(**{**sizes, **plain, "image_size": SIZE, "patch_size": 4, **changes})


def sequence_pairs(rows: list[Inputs]) -> Inputs:
    """Words as inputs, and the same backwards as labels, padded with -100."""
    return pad([{**row, "labels": row["input_ids"].flip(0)} for row in rows])


# ---------------------------------------------------------------------------------------------------------
# Encoders and decoders
# ---------------------------------------------------------------------------------------------------------


def t5() -> T5ForConditionalGeneration:
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


@case("K1", "R2")
def t5_encoder_frozen() -> Script:
    """`model.get_encoder().requires_grad_(False)`, which freezes the embeddings of the decoder as well."""
    model = t5()
    model.get_encoder().requires_grad_(False)
    return Script(model=model, data=ragged(), collator=sequence_pairs, observe=reads)


@case("K1")
def bart_encoder_frozen_smoothed() -> Script:
    """BART with a frozen encoder, and label smoothing."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": WIDTH, "max_position_embeddings": 32}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_ffn_dim": 32, f"{side}_attention_heads": 2}
    model = BartForConditionalGeneration(BartConfig(**sizes, dropout=0.0))
    model.model.encoder.requires_grad_(False)
    options = {"label_smoothing_factor": 0.1, "num_train_epochs": 4}
    return Script(model=model, data=ragged(), collator=sequence_pairs, options=options)


@case("K1", "R2")
def whisper_encoder_frozen() -> Script:
    """`model.freeze_encoder()` of Whisper, on spectrograms of one length."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": WIDTH, "num_mel_bins": 8, "max_source_positions": 20}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_ffn_dim": 32, f"{side}_attention_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **special, dropout=0.0, suppress_tokens=None))
    model.freeze_encoder()

    def collate(rows: list[Inputs]) -> Inputs:
        batch = sequence_pairs(rows)
        features = [
            torch.randn(8, 40, generator=torch.Generator().manual_seed(int(r["input_ids"].sum()))) for r in rows
        ]
        return {"input_features": torch.stack(features), "labels": batch["labels"]}

    return Script(model=model, data=ragged(), collator=collate, observe=reads)


@case("K1")
def captioner_with_frozen_vit() -> Script:
    """A VisionEncoderDecoderModel with a frozen encoder."""
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32}
    decoder = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(vit_config(), decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = VisionEncoderDecoderModel(config=config)
    model.encoder.requires_grad_(False)

    def collate(rows: list[Inputs]) -> Inputs:
        batch = stack(rows)
        return {"pixel_values": batch["pixel_values"], "labels": batch["input_ids"]}

    return Script(model=model, data=Images(words=True), collator=collate, observe=reads)


def clip() -> CLIPModel:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "eos_token_id": 2}
    vision = {**sizes, "image_size": SIZE, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def with_return_loss(rows: list[Inputs]) -> dict[str, Any]:
    batch: dict[str, Any] = stack(rows)
    batch.pop("labels")
    return {**batch, "return_loss": True}


@case("K1")
def clip_with_locked_image_tower() -> Script:
    """LiT: the image tower of CLIP is locked, the text tower and projections are trained."""
    model = clip()
    model.vision_model.requires_grad_(False)
    return Script(model=model, data=Images(words=True), collator=with_return_loss, observe=reads)


@case("K1")
def clip_with_both_towers_locked() -> Script:
    """Only the projections of CLIP and its temperature are trained."""
    model = clip()
    model.vision_model.requires_grad_(False)
    model.text_model.requires_grad_(False)
    return Script(model=model, data=Images(words=True), collator=with_return_loss, observe=reads)


class Fusion(nn.Module):
    """The features of a frozen ViT (from the layer before the last) and of a frozen BERT are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = ViTModel(vit_config(), add_pooling_layer=False).requires_grad_(False)
        self.text = BertModel(bert_config(), add_pooling_layer=False).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, LABELS))

    def forward(
        self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        image = self.vision(pixel_values, output_hidden_states=True).hidden_states[-2][:, 1:].mean(1)
        text = self.text(input_ids, attention_mask).last_hidden_state[:, 0]
        return classified(self.head(torch.cat([image, text], -1)), labels)


@case("K1", "R2")
def vision_and_text_features() -> Script:
    """Two frozen towers in a user's model; one returns its hidden states."""
    return Script(model=Fusion(), data=Images(words=True), collator=stack, observe=reads)


@case("K1")
def speech_features_frozen() -> Script:
    """`freeze_feature_encoder()` of wav2vec 2.0, on waves of several lengths, with SpecAugment."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
    small = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8}
    masked = {"mask_time_prob": 0.2, "mask_time_length": 2, "mask_time_min_masks": 1, "layerdrop": 0.0}
    config = Wav2Vec2Config(**sizes, **convolutions, **small, **masked, num_labels=LABELS, feat_extract_norm="layer")
    model = Wav2Vec2ForSequenceClassification(config)
    model.freeze_feature_encoder()

    def collate(rows: list[Inputs]) -> Inputs:
        lengths = [160 + 16 * len(row["input_ids"]) for row in rows]
        waves = torch.zeros(len(rows), max(lengths))
        mask = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            waves[n, :length] = torch.sin(torch.arange(length) * row["input_ids"][0] / 9)
            mask[n, :length] = 1
        return {"input_values": waves, "attention_mask": mask, "labels": torch.stack([r["labels"] for r in rows])}

    return Script(model=model, data=ragged(), collator=collate)


@case("K1")
def feature_maps_of_a_backbone() -> Script:
    """A frozen ConvNext backbone that returns several feature maps, which the head edits in place."""

    class Segmenter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = ConvNextConfig(
                hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, out_features=["stage1", "stage2"]
            )
            self.encoder = ConvNextBackbone(config).requires_grad_(False)
            self.act = nn.ReLU(inplace=True)
            self.one, self.two = nn.Conv2d(8, LABELS, 1), nn.Conv2d(16, LABELS, 1)

        def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            low, high = self.encoder(pixel_values).feature_maps
            logits = self.one(self.act(low)).mean((2, 3)) + self.two(self.act(high)).mean((2, 3))
            return classified(logits, labels)

    return Script(model=Segmenter(), data=Images(), collator=stack)


@case("K1")
def images_of_several_sizes() -> Script:
    """A frozen ViT with interpolated positions; the size of the images changes from batch to batch."""

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = ViTModel(vit_config(), add_pooling_layer=False).requires_grad_(False)
            self.head = nn.Linear(WIDTH, LABELS)

        def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            hidden = self.vit(pixel_values, interpolate_pos_encoding=True).last_hidden_state
            return classified(self.head(hidden[:, 0]), labels)

    def collate(rows: list[Inputs]) -> Inputs:
        batch = stack(rows)
        size = (12, 16, 24)[int(batch["labels"][0]) % 3]
        batch["pixel_values"] = F.interpolate(batch["pixel_values"], size=(size, size))
        return batch

    return Script(model=Sized(), data=Images(), collator=collate, options={"num_train_epochs": 6})


# ---------------------------------------------------------------------------------------------------------
# Batch normalisation, quantised weights, small parts
# ---------------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """A network as timm's: convolutions, batch normalisation, pooling."""

    def __init__(self, stays_in_evaluation: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.block = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.stays_in_evaluation = stays_in_evaluation

    def train(self, mode: bool = True) -> Convolutions:
        return super().train(mode and not self.stays_in_evaluation)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.stem(x)).mean((2, 3))


class ImageClassifier(nn.Module):
    """A head on a frozen backbone."""

    def __init__(self, backbone: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.backbone = backbone.requires_grad_(False)
        self.head = nn.Linear(width, LABELS)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return classified(self.head(self.backbone(pixel_values)), labels)


DECLARED: dict[str, Any] = {"cached_modules": ["backbone"]}


def of_images(model: nn.Module, **fields: Any) -> Script:
    return Script(**{"model": model, "data": Images(), "collator": stack, "product": DECLARED, **fields})


@case("K1")
def batch_norm_follows_the_batches() -> Script:
    """The weights are frozen, but the running statistics are not."""
    return of_images(ImageClassifier(Convolutions()))


@case("K1", "R2")
def batch_norm_in_evaluation() -> Script:
    """An overridden `train()` keeps batch normalisation in evaluation mode."""
    return of_images(ImageClassifier(Convolutions(stays_in_evaluation=True)), observe=reads)


@case("K1")
def batch_norm_recalibrated() -> Script:
    """The running statistics are estimated anew after the second epoch, by a pass over the data in training mode."""
    data = Images()

    def recalibrate(each: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.epoch != 2:
            return
        backbone = model.backbone
        backbone.stays_in_evaluation = False
        backbone.train()
        with torch.no_grad():
            for start in range(0, 32, 8):
                backbone(stack([data[k] for k in range(start, start + 8)])["pixel_values"])
        backbone.stays_in_evaluation = True
        backbone.eval()

    model = ImageClassifier(Convolutions(stays_in_evaluation=True))
    callbacks = [Each(recalibrate, "on_epoch_end")]
    return of_images(model, data=data, callbacks=callbacks, options={"num_train_epochs": 4})


class EightBits(nn.Module):
    """A linear layer with eight-bit weights in a buffer, and a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return F.linear(x, weight.to(x.dtype) * self.scale, self.bias)


@case("K1")
def eight_bit_layers() -> Script:
    """The layers of a frozen backbone are replaced by ones with eight-bit weights, before the training."""
    model = FrozenBackbone()
    for layer in model.backbone.layers:
        layer.linear = EightBits(layer.linear)
    return Script(model=model, observe=reads)


@case("K1")
def eight_bit_layers_rescaled() -> Script:
    """The scale of one such layer changes in the second epoch."""
    script = eight_bit_layers()
    script.observe = lambda trainer: {}
    script.callbacks = [At(lambda model, step: model.backbone.layers[2].linear.scale.mul_(1.5), (6,))]
    return script


@case("K1")
def dynamic_quantisation() -> Script:
    """`torch.ao.quantization.quantize_dynamic` on the frozen backbone."""
    model = OnBert()
    torch.ao.quantization.quantize_dynamic(model.bert, {nn.Linear}, dtype=torch.qint8, inplace=True)
    return Script(model=model)


@case("K1")
def backbone_in_half_precision() -> Script:
    """The frozen BERT is in bfloat16, the head in fp32."""

    class Half(OnBert):
        def forward(
            self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
        ) -> dict[str, Tensor]:
            hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state.float()
            return classified(self.head(pool(hidden, attention_mask)), labels)

    model = Half()
    model.bert.to(torch.bfloat16)
    return Script(model=model, observe=reads)


@case("K1")
def bf16_autocast() -> Script:
    """`bf16=True`, with evaluations."""
    options = {"bf16": True, "eval_strategy": "epoch"}
    return Script(model=frozen_bert(), options=options, keywords={"eval_dataset": samples(8, seed=9)}, observe=reads)


@case("K1")
def lstm_over_frozen_lstm() -> Script:
    """A frozen LSTM on packed sequences below a trained one."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
            self.lower = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True).requires_grad_(False)
            self.upper = nn.LSTM(2 * WIDTH, WIDTH, batch_first=True)
            self.head = nn.Linear(WIDTH, LABELS)

        def forward(
            self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
        ) -> dict[str, Tensor]:
            lengths = attention_mask.sum(1).cpu()
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embedding(input_ids), lengths, batch_first=True, enforce_sorted=False
            )
            hidden, _ = self.lower(packed)
            _, (last, _) = self.upper(hidden)
            return classified(self.head(last[-1]), labels)

    return Script(model=Two(), data=ragged())


# ---------------------------------------------------------------------------------------------------------
# PEFT
# ---------------------------------------------------------------------------------------------------------


def lora(**changes: Any) -> Any:
    """LoRA on the two upper layers of a BERT."""
    settings = {"r": 2, "target_modules": ["query", "value"], "task_type": "SEQ_CLS", "layers_to_transform": [2, 3]}
    return get_peft_model(bert(), LoraConfig(**{**settings, **changes}))


@case("K1", "R2")
def lora_on_upper_layers() -> Script:
    """The lower layers, which have no adapter, are read."""
    return Script(model=lora(), data=ragged(), observe=reads)


@case("K1")
def lora_on_upper_layers_with_dropout() -> Script:
    """Dropout in the adapters: the lower layers, which have no adapter, are read."""
    return Script(model=lora(lora_dropout=0.2), data=ragged(), observe=reads)


@case("K1")
def lora_merged_in_evaluation() -> Script:
    """The adapters are merged for each evaluation, and taken out again."""

    class Merges:
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            self.model.merge_adapter()  # type: ignore[attr-defined]
            try:
                return super().evaluate(*args, **kwargs)  # type: ignore[misc]
            finally:
                self.model.unmerge_adapter()  # type: ignore[attr-defined]

    return Script(
        model=lora(),
        trainer=Merges,
        options={"eval_strategy": "epoch"},
        keywords={"eval_dataset": samples(8, seed=9)},
        observe=reads,
    )


@case("K1")
def reference_by_disabled_adapters() -> Script:
    """As in DPO: a second call of the model, without adapters and gradients."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        with torch.no_grad(), model.disable_adapter():
            reference = model(**inputs).logits
        outputs = model(**inputs)
        return outputs.loss + 0.1 * (outputs.logits - reference).pow(2).mean(), outputs

    return Script(model=lora(), trainer=own_loss(loss), data=ragged())


# ---------------------------------------------------------------------------------------------------------
# Uses of the frozen part's outputs
# ---------------------------------------------------------------------------------------------------------


@case("K1")
def loss_of_all_positions() -> Script:
    """A loss of the user's over the logits of all positions, with padding, which differs from batch to batch."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs.loss + 0.1 * outputs.logits.pow(2).mean(), outputs

    model = BertForTokenClassification(bert_config())
    model.bert.requires_grad_(False)
    options = {"num_train_epochs": 5}
    return Script(model=model, data=ragged(by_word=True), trainer=own_loss(loss), options=options, observe=reads)


def norm_of_all(output: Any) -> dict[str, float]:
    """A metric that reads padding."""
    return {"norm": float((output.predictions**2).sum() ** 0.5), "shape": float(output.predictions.shape[1])}


@case("K1")
def metric_reads_padding() -> Script:
    """A metric over the logits of all positions; evaluations have batches of other widths than before."""
    model = BertForTokenClassification(bert_config())
    model.bert.requires_grad_(False)
    sizes = iter([4, 3, 5, 2])

    def drive(trainer: Any) -> list[float]:
        trainer.train()
        norms = [entry["eval_norm"] for entry in trainer.state.log_history if "eval_norm" in entry]
        for size in sizes:
            trainer.args.per_device_eval_batch_size = size
            norms.append(trainer.evaluate()["eval_norm"])
        return norms

    keywords = {"eval_dataset": ragged(16, seed=9, by_word=True), "compute_metrics": norm_of_all}
    options = {"eval_strategy": "epoch"}
    return Script(model=model, data=ragged(by_word=True), keywords=keywords, options=options, drive=drive)


class Teacher(nn.Module):
    """A small student imitates a frozen teacher's hidden states and attentions, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = BertModel(bert_config(attn_implementation="eager"), add_pooling_layer=False)
        self.teacher.requires_grad_(False)
        self.student = BertModel(bert_config(num_hidden_layers=2, attn_implementation="eager"))
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        recorded = {"output_hidden_states": True, "output_attentions": True}
        mine = self.student(input_ids, attention_mask, **recorded)
        with torch.no_grad():
            others = self.teacher(input_ids, attention_mask, **recorded)
        outputs = classified(self.head(mine.pooler_output), labels)
        for k in range(2):
            outputs["loss"] = outputs["loss"] + F.mse_loss(mine.hidden_states[k], others.hidden_states[2 * k])
            outputs["loss"] = outputs["loss"] + F.mse_loss(mine.attentions[k], others.attentions[2 * k + 1])
        return outputs


@case("K1")
def teacher_with_attentions() -> Script:
    """Distillation of hidden states and attentions; the loss includes padding."""
    return Script(model=Teacher(), data=ragged(), options={"num_train_epochs": 4})


@case("K1")
def hidden_states_in_some_steps() -> Script:
    """Every third step asks the model for hidden states, and has a term of them."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs, output_hidden_states=trainer.state.global_step % 3 == 2)
        value = outputs.loss
        if outputs.hidden_states is not None:
            value = value * (1 + outputs.hidden_states[1].detach().abs().mean())
        return value, outputs

    return Script(model=frozen_bert(), data=ragged(), trainer=own_loss(loss), options={"num_train_epochs": 4})


@case("K1")
def features_recorded_by_hooks() -> Script:
    """Hooks on two layers of a frozen BERT record features, which the loss reads."""
    features: dict[str, Tensor] = {}
    model = frozen_bert()
    for number in (1, 3):

        def record(module: nn.Module, inputs: Any, output: Any, number: int = number) -> None:
            features[f"layer {number}"] = output[0] if isinstance(output, tuple) else output

        model.bert.encoder.layer[number].register_forward_hook(record)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        factor = 1 + sum(feature.detach().abs().mean() for feature in features.values())
        return outputs.loss * factor, outputs

    return Script(model=model, data=ragged(), trainer=own_loss(loss), observe=reads)


@case("K1")
def features_recorded_from_third_epoch() -> Script:
    """Hooks that record features of a frozen BERT for the loss are registered when the third epoch begins."""
    features: list[float] = []

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        features.append(float(output.abs().mean()))

    def begin(each: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 8:
            model.backbone.layers[1].linear.register_forward_hook(record)

    callbacks = [Each(begin, "on_epoch_begin")]
    return Script(model=FrozenBackbone(), callbacks=callbacks, observe=lambda trainer: {"features": list(features)})


@case("K1")
def output_kept_between_steps() -> Script:
    """The loss keeps the outputs of the last steps (a memory bank), and a callback edits the bank in place."""
    bank: list[Tensor] = []

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        features = model.backbone(inputs["input_ids"]).mean(1)
        logits = model.head(features)
        value = F.cross_entropy(logits, inputs["labels"])
        if len(bank) > 2:
            value = value + 0.1 * (model.head(torch.cat(bank[-3:])) ** 2).mean()
        bank.append(features)
        return value, {"logits": logits}

    callbacks = [Each(lambda *_, **others: bank[-1].mul_(0.9))]
    return Script(model=FrozenBackbone(), trainer=own_loss(loss), callbacks=callbacks)


@case("K1")
def head_edits_features_in_place() -> Script:
    """The head begins with an in-place activation on the features."""
    backbone = Convolutions(stays_in_evaluation=True)
    model = ImageClassifier(backbone)
    model.head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(16, LABELS))  # type: ignore[assignment]
    return of_images(model)


@case("K1")
def siamese_pairs() -> Script:
    """The loss calls the model on each side of a pair of sentences, as sentence-transformers do."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        words = inputs["input_ids"]
        shifted = {**inputs, "input_ids": torch.where(words > 0, 5 + (words + 3) % (VOCABULARY - 5), words)}
        one, other = (F.normalize(model(**side)["logits"], dim=-1) for side in (inputs, shifted))
        scores = one @ other.T * 5
        return F.cross_entropy(scores, torch.arange(len(scores))), {"logits": scores}

    return Script(model=OnBert(), data=ragged(), trainer=own_loss(loss), observe=reads)


@case("K1")
def dropout_in_the_head() -> Script:
    """A frozen BERT without dropout; the head averages the logits of several dropouts."""

    class Several(OnBert):
        def forward(
            self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
        ) -> dict[str, Tensor]:
            hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, 0]
            logits = torch.stack([self.head(F.dropout(hidden, 0.5, self.training)) for _ in range(5)]).mean(0)
            return classified(logits, labels)

    return Script(model=Several(), data=ragged(), observe=reads)


@case("K1")
def dropout_off_by_train_override() -> Script:
    """A BERT with dropout that stays in evaluation mode, as `train()` of the user's model says."""

    class Stays(OnBert):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.bert.eval()
            return self

    return Script(model=Stays(hidden_dropout_prob=0.1), data=ragged(), observe=reads)


@case("K1")
def dropout_in_frozen_layers() -> Script:
    """A frozen BERT with dropout in training mode."""
    return Script(model=frozen_bert(hidden_dropout_prob=0.2), data=ragged())


# ---------------------------------------------------------------------------------------------------------
# Trainings in phases
# ---------------------------------------------------------------------------------------------------------


@case("K1")
def frozen_part_unfrozen_by_epochs() -> Script:
    """ULMFiT: after every two epochs one more layer is trained, from the top."""

    def thaw(each: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for layer in model.bert.encoder.layer[4 - round(state.epoch or 0) // 2 :]:
            layer.requires_grad_(True)

    model = frozen_bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    callbacks = [Each(thaw, "on_epoch_begin")]
    options = {"num_train_epochs": 6}
    keywords = {"optimizers": (optimizer, None)}
    return Script(model=model, data=ragged(), callbacks=callbacks, options=options, keywords=keywords, observe=reads)


@case("K1")
def probe_then_tune() -> Script:
    """LP-FT: the head is trained, then everything, by a second trainer on the same model."""

    def drive(trainer: Any) -> list[float]:
        trainer.train()
        trainer.model.requires_grad_(True)
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.train()
        trainer.model.bert.requires_grad_(False)
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.train()
        return [trainer.evaluate()["eval_loss"]]

    keywords = {"eval_dataset": ragged(8, seed=9)}
    options = {"eval_strategy": "epoch"}
    return Script(model=frozen_bert(), data=ragged(), keywords=keywords, options=options, drive=drive)


def edited_between(change: Callable[[Any], None], **fields: Any) -> Script:
    """Trains, evaluates, changes the model, and evaluates, predicts and trains again."""

    def drive(trainer: Any) -> list[Any]:
        trainer.train()
        losses = [trainer.evaluate()["eval_loss"]]
        with torch.no_grad():
            change(trainer.model)
        losses += [trainer.evaluate()["eval_loss"], torch.tensor(trainer.predict(trainer.eval_dataset).predictions)]
        trainer.train()
        return [*losses, trainer.evaluate()["eval_loss"]]

    keywords = {"eval_dataset": samples(8, seed=9)}
    return Script(keywords=keywords, options={"eval_strategy": "epoch", "num_train_epochs": 2}, drive=drive, **fields)


@case("K1")
def weights_edited_between_trainings() -> Script:
    """Rows of the embedding change through `.data` between `train()` and `evaluate()`."""

    def change(model: Any) -> None:
        model.bert.embeddings.word_embeddings.weight.data[5:30] += 0.5

    return edited_between(change, model=frozen_bert())


@case("K1")
def setting_edited_between_trainings() -> Script:
    """The activation function of a layer changes between `train()` and `evaluate()`."""

    def change(model: Any) -> None:
        model.bert.encoder.layer[1].intermediate.intermediate_act_fn = nn.ReLU()

    return edited_between(change, model=frozen_bert())


@case("K1")
def backbone_replaced_between_trainings() -> Script:
    """The frozen BERT is replaced by another one between two trainings."""

    def change(model: Any) -> None:
        torch.manual_seed(11)
        model.bert = BertModel(bert_config()).requires_grad_(False)

    return edited_between(change, model=frozen_bert())


@case("K1", "R2")
def best_checkpoint_at_the_end() -> Script:
    """The best checkpoint is loaded at the end, then the model is evaluated, and predicts."""

    def drive(trainer: Any) -> list[Any]:
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        return [loss, torch.tensor(trainer.predict(trainer.eval_dataset).predictions), trainer.state.best_global_step]

    options = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
    keywords = {"eval_dataset": samples(8, seed=9)}
    return Script(
        model=frozen_bert(), options={**options, "learning_rate": 0.5}, keywords=keywords, drive=drive, observe=reads
    )


@case("K1")
def averaged_weights_in_evaluation() -> Script:
    """All weights are replaced by their running averages for each evaluation, and put back."""

    class Averages:
        averages: dict[str, Tensor] | None = None

        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            model: Any = self.model  # type: ignore[attr-defined]
            now = {name: value.clone() for name, value in model.state_dict().items()}
            before = self.averages or now
            self.averages = {n: v.lerp(before[n], 0.5) if v.is_floating_point() else v for n, v in now.items()}
            model.load_state_dict(self.averages)
            try:
                return super().evaluate(*args, **kwargs)  # type: ignore[misc]
            finally:
                model.load_state_dict(now)

    keywords = {"eval_dataset": samples(8, seed=9)}
    options = {"eval_strategy": "epoch", "num_train_epochs": 4}
    return Script(model=FrozenBackbone(), trainer=Averages, options=options, keywords=keywords, observe=reads)


@case("K1")
def copy_as_moving_average() -> Script:
    """As timm's ModelEma: a deep copy of the model follows it in each step, and is evaluated at the end."""
    held: dict[str, Any] = {}

    def begin(each: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 5:
            held["copy"] = copy.deepcopy(model).eval()

    def follow(each: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if "copy" in held:
            with torch.no_grad():
                for mine, theirs in zip(held["copy"].state_dict().values(), model.state_dict().values(), strict=True):
                    mine.copy_(mine * 0.9 + theirs * 0.1)

    def observe(trainer: Any) -> dict[str, Any]:
        batch = pad([samples(8, seed=9)[k] for k in range(8)])
        return {"average": held["copy"](**batch)["logits"].detach(), **reads(trainer)}

    callbacks = [Each(begin, "on_step_begin"), Each(follow)]
    return Script(model=FrozenBackbone(), callbacks=callbacks, observe=observe)


@case("K1")
def saved_whole_in_each_epoch() -> Script:
    """`torch.save(model)` in the middle of each epoch; the loaded copy computes the same."""
    outputs: list[Tensor] = []

    def save(each: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % 3 == 2:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False).eval()
            with torch.no_grad():
                outputs.append(loaded(**pad([samples(8, seed=9)[k] for k in range(8)]))["logits"])

    callbacks = [Each(save)]
    observe: Any = lambda trainer: {"outputs": list(outputs), **reads(trainer)}  # noqa: E731
    return Script(model=OnBert(), callbacks=callbacks, observe=observe)


@case("K1")
def mean_teacher() -> Script:
    """A frozen copy in the model follows the student at the end of each epoch, by `torch._foreach_lerp_`."""

    class MeanTeacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = BertModel(bert_config(), add_pooling_layer=False)
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
            self.head = nn.Linear(WIDTH, LABELS)

        def forward(
            self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
        ) -> dict[str, Tensor]:
            mine = self.student(input_ids, attention_mask).last_hidden_state
            others = self.teacher(input_ids, attention_mask).last_hidden_state
            outputs = classified(self.head(mine[:, 0]), labels)
            if labels is not None:
                outputs["loss"] = outputs["loss"] + F.mse_loss(mine, others)
            return outputs

    def follow(each: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(list(model.teacher.parameters()), list(model.student.parameters()), 0.3)

    callbacks = [Each(follow, "on_epoch_end")]
    return Script(model=MeanTeacher(), data=ragged(), callbacks=callbacks, options={"num_train_epochs": 4})


# ---------------------------------------------------------------------------------------------------------
# Several trainings over one folder
# ---------------------------------------------------------------------------------------------------------


def again(
    change: Callable[[Any], Any], model: nn.Module, product: dict[str, Any] | None = None, **fields: Any
) -> Script:
    """Trains; then another trainer trains what `change` returns of an equal model, over the same folder."""
    first = copy.deepcopy(model)
    folder = tempfile.mkdtemp(prefix=f"again-{os.getpid()}-")

    def drive(trainer: Any) -> list[Any]:
        trainer.train()
        keywords = {"data_collator": trainer.data_collator, "eval_dataset": trainer.eval_dataset}
        other = type(trainer)(
            model=change(first),
            args=trainer.args,
            train_dataset=fields.get("second", trainer.train_dataset),
            **keywords,
        )
        other.train()
        losses = [entry["loss"] for entry in other.state.log_history if "loss" in entry]
        return [*losses, *(p.detach().clone() for p in other.model.parameters())]

    rest = {name: value for name, value in fields.items() if name != "second"}
    product = {"activation_cache_dir": folder, **(product or {})}
    return Script(model=model, product=product, drive=drive, **rest)


@case("K1")
def folds_share_a_folder() -> Script:
    """A second fold of the data, with a new head, reads the outputs that the first one has stored."""

    def new_head(model: Any) -> Any:
        torch.manual_seed(21)
        model.classifier = nn.Linear(WIDTH, LABELS)
        return model

    rows = ragged(48)
    one, other = (torch.utils.data.Subset(rows, range(*ends)) for ends in ((0, 32), (16, 48)))
    return again(new_head, frozen_bert(), data=one, second=other, observe=reads)


@case("K1")
def edited_weight_over_a_folder() -> Script:
    """The second training has one other number in a weight."""

    def edit(model: Any) -> Any:
        model.bert.encoder.layer[0].attention.self.query.weight.data[3, 5] += 3.0
        return model

    return again(edit, frozen_bert())


class Scaled(Backbone):
    """A backbone with a setting."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids) * self.scale


@case("K1")
def edited_setting_over_a_folder() -> Script:
    """The second training has another number as an attribute of the backbone."""

    def edit(model: Any) -> Any:
        model.backbone.scale = 0.4
        return model

    return again(edit, FrozenBackbone(Scaled()), {"cached_modules": ["backbone"]})


@case("K1")
def edited_activation_over_a_folder() -> Script:
    """The second training has another activation function, which no configuration tells of."""

    def edit(model: Any) -> Any:
        for layer in model.bert.encoder.layer:
            layer.intermediate.intermediate_act_fn = nn.ReLU()
        return model

    return again(edit, frozen_bert())


@case("K1")
def edited_epsilon_over_a_folder() -> Script:
    """The second training has another epsilon in the last layer."""

    def edit(model: Any) -> Any:
        model.bert.encoder.layer[3].output.LayerNorm.eps = 0.5
        return model

    return again(edit, frozen_bert())


class Silent(Backbone):
    """A backbone that ignores some words."""

    words: tuple[int, ...] = (6,)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        is_silent = torch.isin(input_ids, torch.tensor(self.words))
        return super().forward(input_ids) * ~is_silent[..., None]


def with_rare_words() -> Any:
    """Words that few samples have."""
    rows = samples(64, 4, 4)
    for k in range(64):
        rows.rows[k]["input_ids"] = rows.rows[k]["input_ids"].clamp(min=8)
        if k in (30, 55):
            rows.rows[k]["input_ids"][1] = 7
    return rows


@case("K1")
def edited_for_few_samples_over_a_folder() -> Script:
    """The second training leaves out one more word, which few samples have."""

    def edit(model: Any) -> Any:
        model.backbone.words = (6, 7)
        return model

    return again(edit, FrozenBackbone(Silent()), {"cached_modules": ["backbone"]}, data=with_rare_words())


@case("K1")
def code_edited_for_few_samples_over_a_folder() -> Script:
    """The second training leaves out one more word, by a method that is replaced on the backbone."""

    def edit(model: Any) -> Any:
        backbone, class_forward = model.backbone, Backbone.forward

        def forward(input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            is_silent = torch.isin(input_ids, torch.tensor((6, 7)))
            return class_forward(backbone, input_ids) * ~is_silent[..., None]

        backbone.forward = forward
        return model

    return again(edit, FrozenBackbone(Silent()), {"cached_modules": ["backbone"]}, data=with_rare_words())


@case("K1")
def edited_code_over_a_folder() -> Script:
    """The second training has a class of the same name with other code, as after an edit in a notebook."""

    def edited() -> type:
        class Scaled(Backbone):
            def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
                return super().forward(input_ids) * 0.4

        Scaled.__qualname__ = "Scaled"
        return Scaled

    def edit(model: Any) -> Any:
        model.backbone.__class__ = edited()
        return model

    return again(edit, FrozenBackbone(Scaled()), {"cached_modules": ["backbone"]})


# ---------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------


@case("K1")
def augmented_half_of_the_time() -> Script:
    """Images are flipped with probability one half, and moved now and then, by a generator of the data set."""

    class Augmented(Images):
        generator = random.Random(3)

        def __getitem__(self, index: int) -> Inputs:
            row = super().__getitem__(index)
            if self.generator.random() < 0.5:
                row["pixel_values"] = row["pixel_values"].flip(-1)
            if self.generator.random() < 0.1:
                row["pixel_values"] = torch.roll(row["pixel_values"], 2, -1)
            return row

    model = ImageClassifier(Convolutions(stays_in_evaluation=True))
    return of_images(model, data=Augmented(), options={"num_train_epochs": 5}, observe=reads)


@case("K1")
def mixup_in_the_loss() -> Script:
    """Two images are mixed in the loss, in half of the steps."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        images, labels = inputs["pixel_values"], inputs["labels"]
        weight = float(torch.rand(())) if trainer.state.global_step % 2 else 1.0
        order = torch.randperm(len(images)) if weight < 1 else torch.arange(len(images))
        logits = model(pixel_values=weight * images + (1 - weight) * images[order])["logits"]
        value = weight * F.cross_entropy(logits, labels) + (1 - weight) * F.cross_entropy(logits, labels[order])
        return value, {"logits": logits}

    model = ImageClassifier(Convolutions(stays_in_evaluation=True))
    return of_images(model, trainer=own_loss(loss), options={"num_train_epochs": 4})


@case("K1")
def masked_language_model() -> Script:
    """Words are masked at random in each epoch; the lower layers of a GPT-2 are frozen."""
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 3, "n_head": 2, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=1, eos_token_id=2))
    for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0], model.transformer.h[1]):
        part.requires_grad_(False)

    generator = torch.Generator().manual_seed(4)

    def collate(rows: list[Inputs]) -> Inputs:
        batch = sequence_pairs(rows)
        is_masked = torch.rand(batch["input_ids"].shape, generator=generator) < 0.15
        return {**batch, "input_ids": batch["input_ids"].masked_fill(is_masked, 4)}

    return Script(model=model, data=ragged(), collator=collate)


@case("K1")
def samples_drawn_with_replacement() -> Script:
    """A weighted sampler: samples occur several times in a batch, and some first in a later epoch."""

    class Weighted:
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            weights = [8.0 if k % 7 == 0 else 1.0 for k in range(32)]
            return WeightedRandomSampler(weights, 32, generator=torch.Generator().manual_seed(3))

    options = {"num_train_epochs": 5}
    return Script(model=frozen_bert(), data=ragged(), trainer=Weighted, options=options, observe=reads)


class Stream(IterableDataset):
    """Samples in another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Inputs]:
        rows = [ragged()[k] for k in range(32)]
        random.Random(self.epoch).shuffle(rows)
        yield from rows


@case("K1")
def streamed() -> Script:
    """An iterable data set, with `max_steps`."""
    return Script(model=frozen_bert(), data=Stream(), options={"max_steps": 14}, observe=reads)


@case("K1")
def accumulated_with_workers() -> Script:
    """Accumulation over three ragged micro-batches, loader's workers, and a last batch that is not full."""
    options = {
        "gradient_accumulation_steps": 3,
        "dataloader_num_workers": 2,
        "dataloader_persistent_workers": True,
        "num_train_epochs": 4,
    }
    return Script(model=OnBert(), data=ragged(29), batch=4, options=options, observe=reads)


@case("K1")
def checkpointing_of_gradients() -> Script:
    """Gradient checkpointing on a BERT with frozen lower layers."""
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    for layer in model.bert.encoder.layer[:2]:
        layer.requires_grad_(False)
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    return Script(model=model, data=ragged(), options=options, observe=reads)


@case("K1")
def choices_of_several_lengths() -> Script:
    """Multiple choice: [samples, choices, words], padded to the longest of the batch."""
    model = BertForMultipleChoice(bert_config())
    model.bert.requires_grad_(False)

    def collate(rows: list[Inputs]) -> Inputs:
        choices = [
            {
                "input_ids": row["input_ids"].roll(k)[: len(row["input_ids"]) - k],
                "attention_mask": row["attention_mask"][k:],
            }
            for row in rows
            for k in range(3)
        ]
        batch = {name: value.view(len(rows), 3, -1) for name, value in pad(choices).items()}
        return {**batch, "labels": torch.stack([row["labels"] for row in rows])}

    return Script(model=model, data=ragged(), collator=collate, options={"num_train_epochs": 4})


@case("K1")
def padded_on_the_left_now_and_then() -> Script:
    """Batches are padded on the left if their first label is 0, and to a multiple of four."""

    def collate(rows: list[Inputs]) -> Inputs:
        batch = pad(rows)
        more = -batch["input_ids"].shape[1] % 4
        for name in ("input_ids", "attention_mask"):
            batch[name] = F.pad(batch[name], (0, more))
            if batch["labels"][0] == 0:
                batch[name] = torch.stack(
                    [
                        row.roll(int((mask == 0).sum()))
                        for row, mask in zip(batch[name], batch["attention_mask"], strict=True)
                    ]
                    if name == "input_ids"
                    else [row.flip(0) for row in batch[name]]
                )
        return batch

    return Script(model=frozen_bert(), data=ragged(), collator=collate, options={"num_train_epochs": 5})


@case("K1")
def training_data_evaluated() -> Script:
    """After each epoch a callback evaluates the training data under another prefix."""

    class EvaluatesAll(TrainerCallback):
        trainer: Any

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.trainer.evaluate(self.trainer.train_dataset, metric_key_prefix="train")

    def observe(trainer: Any) -> dict[str, Any]:
        history = trainer.state.log_history
        return {"losses": [entry["train_loss"] for entry in history if "train_loss" in entry], **reads(trainer)}

    return Script(model=frozen_bert(), data=ragged(), callbacks=[EvaluatesAll()], observe=observe)


@case("K1")
def model_made_anew() -> Script:
    """`model_init` makes the model anew for each of two trainings."""

    def drive(trainer: Any) -> list[float]:
        trainer.train()
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    return Script(model=None, keywords={"model_init": lambda: frozen_bert()}, drive=drive, observe=reads)


@case("K1")
def monte_carlo_dropout() -> Script:
    """Predictions with dropout: `prediction_step` puts the model's dropout into training mode, and averages."""

    class MonteCarlo:
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            model.eval()
            for part in model.modules():
                if isinstance(part, nn.Dropout):
                    part.train()
            with torch.no_grad():
                outputs = [model(**inputs) for _ in range(3)]
            logits = torch.stack([output.logits for output in outputs]).mean(0)
            return outputs[0].loss, logits, inputs["labels"]

    model = bert(hidden_dropout_prob=0.2)
    model.bert.requires_grad_(False)
    model.bert.encoder.eval()
    options = {"eval_strategy": "epoch"}
    keywords = {"eval_dataset": samples(8, seed=9)}
    return Script(model=model, trainer=MonteCarlo, options=options, keywords=keywords)


@case("K1")
def curriculum_as_an_argument() -> Script:
    """The model gives its frozen backbone a number that changes after some steps."""

    class Curriculum(FrozenBackbone):
        steps = 0

        def forward(
            self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
        ) -> dict[str, Tensor]:
            self.steps += self.training
            hidden = self.backbone(input_ids, attention_mask, depth=2 if self.steps < 7 else 6)
            return classified(self.head(pool(hidden, attention_mask)), labels)

    class ByDepth(Backbone):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, depth: int = 6) -> Tensor:
            x = self.embedding(input_ids)
            for layer in self.layers[:depth]:
                x = layer(x)
            return x

    return Script(model=Curriculum(ByDepth()), options={"num_train_epochs": 4})


@case("K1")
def prediction_step_calls_the_backbone() -> Script:
    """`prediction_step` takes features of the model's backbone, and classifies them."""

    class OfFeatures:
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                features = model.backbone(inputs["input_ids"]).mean(1)
                logits = model.head(features)
            return F.cross_entropy(logits, inputs["labels"]), logits, inputs["labels"]

    options = {"eval_strategy": "epoch"}
    keywords = {"eval_dataset": samples(8, seed=9)}
    return Script(model=FrozenBackbone(), trainer=OfFeatures, options=options, keywords=keywords, observe=reads)
