"""What the user has frozen is computed once for each sample: the weights are those of the stock Trainer."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from selection import few, slow
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

SIZE, SAMPLES, BATCH, EPOCHS = 16, 14, 4, 3
READ = SAMPLES - BATCH
"""In an epoch: what is stored of the first batch is compared with what is computed."""
IMAGE = 50
"""Token that stands for a part of an image."""


def words(count: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 45, (count, length), generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def padded(count: int) -> dict[str, torch.Tensor]:
    ids = words(count, 10)
    mask = torch.ones_like(ids)
    for row in range(count):
        mask[row, 4 + row % 6 :] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def bert(dropout: float = 0.0, layers: int = 3) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=60,
        hidden_size=SIZE,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=SIZE,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config)


def head_on_bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = bert()
    model.bert.requires_grad_(False)
    return model, {**padded(SAMPLES), "labels": words(SAMPLES, 1)[:, 0] % 2}


def lower_layers() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = bert()
    for module in (model.bert.embeddings, *model.bert.encoder.layer[:2]):
        module.requires_grad_(False)
    return model, {**padded(SAMPLES), "labels": words(SAMPLES, 1)[:, 0] % 2}


def whisper() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = WhisperConfig(
        vocab_size=60,
        d_model=SIZE,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=SIZE,
        decoder_ffn_dim=SIZE,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = WhisperForConditionalGeneration(config)
    model.freeze_encoder()
    return model, {"input_features": noise(SAMPLES, 8, 20), "labels": words(SAMPLES, 6)}


def t5() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = T5Config(
        vocab_size=60,
        d_model=SIZE,
        d_ff=SIZE,
        d_kv=8,
        num_layers=2,
        num_decoder_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    model.encoder.requires_grad_(False)
    return model, {**padded(SAMPLES), "labels": words(SAMPLES, 6)}


def llava(images: int = 1) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    vision = CLIPVisionConfig(
        hidden_size=SIZE,
        intermediate_size=SIZE,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    text = LlamaConfig(
        vocab_size=60,
        hidden_size=SIZE,
        intermediate_size=SIZE,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, image_seq_length=4)
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(False)
    ids = words(SAMPLES, 8 + 4 * images)
    ids[:, 2 : 2 + 4 * images] = IMAGE
    pixels = noise(SAMPLES, images, 3, 16, 16)
    return model, {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": ids.clone(),
        "pixel_values": pixels,  # the collator puts the images of all samples in a row
    }


def captioning() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    seen = ViTConfig(
        hidden_size=SIZE,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=SIZE,
        image_size=16,
        patch_size=8,
    )
    said = GPT2Config(
        vocab_size=60,
        n_embd=SIZE,
        n_layer=1,
        n_head=2,
        add_cross_attention=True,
        is_decoder=True,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(seen, said)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = VisionEncoderDecoderModel(config)
    model.encoder.requires_grad_(False)
    return model, {"pixel_values": noise(SAMPLES, 3, 16, 16), "labels": words(SAMPLES, 6)}


def clip() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    layers = {"hidden_size": SIZE, "intermediate_size": SIZE, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**layers, "vocab_size": 60, "max_position_embeddings": 10, "eos_token_id": 59}
    model = CLIPModel(
        CLIPConfig(text_config=text, vision_config={**layers, "image_size": 16, "patch_size": 8}, projection_dim=8)
    )
    model.vision_model.requires_grad_(False)
    ids = words(SAMPLES, 8)
    ids[:, -1] = 59
    return model, {"input_ids": ids, "pixel_values": noise(SAMPLES, 3, 16, 16)}


def segformer() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        num_attention_heads=[1, 2],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        num_labels=3,
        classifier_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    model = SegformerForSemanticSegmentation(config)
    model.segformer.requires_grad_(False)
    return model, {"pixel_values": noise(SAMPLES, 3, 32, 32), "labels": words(SAMPLES, 32 * 32).view(-1, 32, 32) % 3}


def wav2vec2(freeze: str = "freeze_base_model") -> tuple[nn.Module, dict[str, torch.Tensor]]:
    rates = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "layerdrop")
    config = Wav2Vec2Config(
        hidden_size=SIZE,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=SIZE,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        apply_spec_augment=False,
        final_dropout=0.0,
        **dict.fromkeys(rates, 0.0),
    )
    model = Wav2Vec2ForSequenceClassification(config)
    getattr(model, freeze)()
    return model, {"input_values": noise(SAMPLES, 400), "labels": words(SAMPLES, 1)[:, 0] % 2}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "a head on BERT": head_on_bert,
    "lower layers": lower_layers,
    "Whisper's encoder": whisper,
    "T5's encoder": t5,
    "a vision tower": llava,
    "two images for each sample": lambda: llava(2),
    "the encoder of a captioner": captioning,
    "CLIP's image tower": clip,
    "several outputs": segformer,
    "wav2vec2": wav2vec2,
    "convolutions": lambda: wav2vec2("freeze_feature_encoder"),
}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    batch: dict[str, Any] = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if "pixel_values" in batch and batch["pixel_values"].dim() == 5:
        batch["pixel_values"] = batch["pixel_values"].flatten(0, 1)
    return {**batch, "return_loss": True} if "labels" not in batch else batch


def cut(rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Pads to the longest of the batch, as most collators do."""
    batch = collate(rows)
    longest = int(batch["attention_mask"].sum(1).max())
    return {
        name: value[:, :longest] if value.dim() > 1 and value.shape[1] == 10 else value
        for name, value in batch.items()
    }


def cut_left(rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    batch = cut(rows)
    lengths = batch["attention_mask"].sum(1).tolist()
    for name in ("input_ids", "attention_mask"):
        batch[name] = torch.stack([row.roll(-n) for row, n in zip(batch[name], lengths, strict=True)])
    return batch


class Trained:
    """A training with the stock Trainer, or with ours, and what the log says of its cache."""

    def __init__(
        self,
        folder: Path,
        build: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]],
        callbacks: tuple[TrainerCallback, ...] = (),
        mixin: type = object,
        is_ours: bool = True,
        collator: Callable[[list[dict[str, torch.Tensor]]], dict[str, Any]] = collate,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model, columns = build()
        rows = [{name: column[row] for name, column in columns.items()} for row in range(SAMPLES)]
        given = {
            "output_dir": str(folder),
            "per_device_train_batch_size": BATCH,
            "num_train_epochs": EPOCHS,
            "learning_rate": 1e-2,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "remove_unused_columns": False,
        }
        kind, arguments = (
            (PipeTransformerTrainer, PipeTransformerTrainingArguments) if is_ours else (Trainer, TrainingArguments)
        )
        if is_ours:
            given |= {"activation_cache": "on", "log_level": "info"}
        bases = (kind,) if mixin is object else (mixin, kind)
        trainer = type("Ours", bases, {})(
            self.model,
            arguments(**{**given, **options}),
            train_dataset=rows,
            eval_dataset=rows[:5],
            data_collator=collator,
            callbacks=[*callbacks],
        )
        before = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        trainer.train()
        self.history = trainer.state.log_history
        self.weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        assert any(not torch.equal(before[name], weight) for name, weight in self.weights.items())

    def assert_same(self, other: Trained) -> None:
        for name, weight in other.weights.items():
            torch.testing.assert_close(self.weights[name], weight, atol=1e-6, rtol=1e-5, msg=name)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "hf_pipetransformer")
    return caplog


def rows_read(said: pytest.LogCaptureFixture) -> int:
    """How many samples' outputs were read, as the log says."""
    return sum(int(n) for n in re.findall(r"was read for (\d+) of \d+ samples", said.text))


@pytest.mark.parametrize("name", few(MODELS, "a head on BERT", "lower layers", "a vision tower", "several outputs"))
def test_equals_the_stock_trainer(name: str, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    expected = Trained(tmp_path / "stock", MODELS[name], is_ours=False)
    found = Trained(tmp_path / "ours", MODELS[name])
    found.assert_same(expected)
    assert rows_read(said) == (EPOCHS - 1) * READ * (2 if name.startswith("two") else 1)
    assert "is stored in this epoch" in said.text
    assert not [path for path in (tmp_path / "ours").iterdir() if "cache" in path.name], "removed at the end"


class ReadsPadding(nn.Module):
    """What follows the frozen part reads the padding, or does not; so do losses outside of the model."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.bert, self.head = how, bert().bert.requires_grad_(False), nn.Linear(SIZE, 2)
        self.upper = nn.Linear(SIZE, SIZE, bias=False) if how == "norm" else None

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        states = self.bert(input_ids, attention_mask=attention_mask)[0]
        mask = attention_mask[..., None]
        if self.how == "mean":
            pooled = (states * mask).sum(1) / mask.sum(1)
        elif self.how in ("tokens", "labels"):
            scores = self.head(states)
            kept = torch.where(attention_mask.bool(), labels[:, None], -100) if self.how == "tokens" else labels
            return {"loss": nn.functional.cross_entropy(scores.transpose(1, 2), kept), "logits": scores}
        elif self.how == "norm":
            directions = states / states.pow(2).sum(-1, keepdim=True).sqrt()
            pooled = (self.upper(directions) * mask).sum(1) / mask.sum(1)
        else:
            pooled = states.amax(1) if self.how == "largest" else states.mean(1)
        scores = self.head(pooled)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def reads_padding(how: str) -> Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]:
    columns = head_on_bert()[1]
    if how == "labels":  # of padding too
        columns["labels"] = columns["input_ids"] % 2
    if how == "tokens, rarely padded":
        columns["attention_mask"][:-2] = 1
    return lambda: (ReadsPadding(how.partition(",")[0]), columns)


class LossOutside:
    """A loss that reads what the model returns, in the padding too."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"] + outputs["logits"].mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    ("build", "collator", "mixin", "is_read"),
    [
        (head_on_bert, cut, object, True),
        *slow(
            (lower_layers, cut, object, True),
            (t5, cut, object, True),
            (reads_padding("mean"), cut, object, True),
            (reads_padding("tokens"), cut, object, True),
            (reads_padding("tokens"), cut, LossOutside, None),
            (reads_padding("largest"), cut, object, None),
            (reads_padding("plain"), cut, object, None),
            (reads_padding("labels"), cut, object, None),
            (reads_padding("norm"), cut, object, True),
            (reads_padding("tokens, rarely padded"), cut, LossOutside, None),
            (head_on_bert, cut_left, object, None),
        ),
    ],
)
def test_padding_to_the_longest_of_a_batch(
    build: Any, collator: Any, mixin: type, is_read: bool | None, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    expected = Trained(tmp_path / "stock", build, mixin=mixin, is_ours=False, collator=collator)
    found = Trained(tmp_path / "ours", build, mixin=mixin, collator=collator)
    found.assert_same(expected)
    assert (rows_read(said) == (EPOCHS - 1) * READ) is (is_read is True)


class Acts(TrainerCallback):
    """Does something to the model at the beginning of an epoch, or of each step."""

    def __init__(self, act: Callable[[nn.Module], None], epoch: int = 1, each_step: bool = False) -> None:
        self._act, self._epoch, self._each_step = act, epoch, each_step

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if round(state.epoch) == self._epoch and not self._each_step:
            self._act(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._each_step:
            self._act(model)


@torch.no_grad()
def scale(model: nn.Module) -> None:
    model.bert.encoder.layer[0].output.dense.weight.mul_(1.1)


def scale_uncounted(model: nn.Module) -> None:
    model.bert.encoder.layer[0].output.dense.weight.data.mul_(1.1)


def replace(model: nn.Module) -> None:
    model.bert.embeddings.word_embeddings.weight.data = 2 * model.bert.embeddings.word_embeddings.weight.data


def thaw(model: nn.Module) -> None:
    model.bert.encoder.layer[2].requires_grad_(True)


def freeze(model: nn.Module) -> None:
    model.bert.requires_grad_(False)


def not_frozen() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model, columns = head_on_bert()
    model.bert.encoder.layer[2].requires_grad_(True)
    return model, columns


HOSTILE: dict[str, tuple[Any, Callable[[], TrainerCallback], int]] = {
    "weights change": (head_on_bert, lambda: Acts(scale), 0),
    "weights change uncounted": (head_on_bert, lambda: Acts(scale_uncounted), 0),
    "weights are replaced": (head_on_bert, lambda: Acts(replace), 0),
    "weights change in each step": (head_on_bert, lambda: Acts(scale_uncounted, each_step=True), 0),
    "a layer thaws": (head_on_bert, lambda: Acts(thaw, epoch=2), READ),
    "a layer freezes": (not_frozen, lambda: Acts(freeze), READ),
}


@pytest.mark.parametrize("name", few(HOSTILE, "weights change uncounted", "a layer freezes"))
def test_what_callbacks_do(name: str, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    build, act, read = HOSTILE[name]
    expected = Trained(tmp_path / "stock", build, (act(),), is_ours=False)
    found = Trained(tmp_path / "ours", build, (act(),))
    found.assert_same(expected)
    assert rows_read(said) == read


class CallsTwice:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        first = model(**inputs)
        again = model(
            **{**inputs, "input_ids": inputs["input_ids"].flip(0), "attention_mask": inputs["attention_mask"].flip(0)}
        )
        return (
            first.loss + (first.logits - again.logits.flip(0).detach()).square().mean() + again.logits.square().mean()
        )


class CallsWithout:
    """A call of a part, one without gradients, and one of which a gradient at the inputs is asked."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        with torch.no_grad():
            clean = model(**inputs).logits
        part = model.bert(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
        embedded = model.bert.embeddings.word_embeddings(inputs["input_ids"]).detach().requires_grad_()
        of_embedded = model(inputs_embeds=embedded, attention_mask=inputs["attention_mask"], labels=inputs["labels"])
        (slope,) = torch.autograd.grad(of_embedded.loss, embedded)
        moved = model(inputs_embeds=(embedded + slope).detach(), attention_mask=inputs["attention_mask"])
        return model(**inputs).loss + (moved.logits - clean).square().mean() + 0 * part.mean()


class Noisy:
    """Changes the inputs in each step."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)  # type: ignore[misc]
        ids = inputs["input_ids"].clone()
        ids[:, 1] = torch.randint(3, 45, (len(ids),))
        return {**inputs, "input_ids": ids}


@pytest.mark.parametrize(
    ("mixin", "read"), [(CallsTwice, 4 * SAMPLES - 2 * BATCH), *slow((CallsWithout, None), (Noisy, 0))]
)
def test_what_losses_do(mixin: type, read: int | None, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    expected = Trained(tmp_path / "stock", head_on_bert, mixin=mixin, is_ours=False)
    found = Trained(tmp_path / "ours", head_on_bert, mixin=mixin)
    found.assert_same(expected)
    assert read is None or rows_read(said) == read


class WritesIntoIt(nn.Module):
    """Writes into what a frozen part has returned, and reads a number that a step has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 2)
        self.first.requires_grad_(False)
        self.second.requires_grad_(False)

    def forward(self, values: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        hidden = self.first(values)
        hidden += 1
        other = self.second(values * self.head.bias.detach()[0])  # of what is trained
        logits = self.head(hidden + other)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def writes_into_it() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return WritesIntoIt(), {"values": noise(SAMPLES, SIZE), "labels": words(SAMPLES, 1)[:, 0] % 2}


class DrawsBefore(WritesIntoIt):
    """What a frozen part is given contains noise."""

    def forward(self, values: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return super().forward(values + torch.randn_like(values), labels)


def draws_before() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return DrawsBefore(), writes_into_it()[1]


class LooksAtOthers(WritesIntoIt):
    """What a frozen part is given of a sample depends on the other samples."""

    def forward(self, values: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        logits = self.head(self.first(values - values.mean(0)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def looks_at_others() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return LooksAtOthers(), writes_into_it()[1]


class Trains(WritesIntoIt):
    """An adapter in a hook inside of a frozen part."""

    def __init__(self, by_hook: bool = True) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)).requires_grad_(False)
        if by_hook:
            self.frozen[0].register_forward_hook(lambda module, args, output: output + self.head(output)[:, :1])

    def forward(self, values: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        logits = self.head(self.frozen(values))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Follows(Trains):
    """A teacher that follows the head, where PyTorch does not count it."""

    def __init__(self) -> None:
        super().__init__(by_hook=False)

    def forward(self, values: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        self.frozen[1].bias.data.mul_(0.9).add_(0.1 * self.head.bias.detach()[0])
        return super().forward(values, labels)


class Anneals(Trains):
    """Python state that no tensor shows: of an argument, of an attribute inside, and of what a part returns."""

    def __init__(self, how: str) -> None:
        super().__init__(by_hook=False)
        self.how, self.calls = how, 0
        self.part = Scales()

    def forward(self, values: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        self.calls += 1
        factor = 1 + self.calls // 4 / 10
        if self.how == "inside":
            self.part.factor = factor
        given = values * factor if self.how == "tensor" else values
        scaled, largest = self.part(given, factor) if self.how == "argument" else self.part(given)
        logits = self.head(scaled / (largest if self.how == "returned" else 1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.linear = 1.0, nn.Linear(SIZE, SIZE).requires_grad_(False)

    def forward(self, values: torch.Tensor, by: float = 1.0) -> tuple[torch.Tensor, float]:
        scaled = self.linear(values * by) * self.factor
        return scaled, float(scaled.abs().max())


class ScalesAlone(Scales):
    def forward(self, values: torch.Tensor, by: float = 1.0) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(values, by)[0], None


def anneals(how: str) -> Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]:
    def build() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        model = Anneals(how)
        if how != "returned":
            model.part = ScalesAlone()
        model.frozen.requires_grad_(True)
        return model, writes_into_it()[1]

    return build


@pytest.mark.parametrize("how", ["tensor", *slow("argument", "inside", "returned")])
def test_state_that_no_input_shows(how: str, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    expected = Trained(tmp_path / "stock", anneals(how), is_ours=False)
    Trained(tmp_path / "ours", anneals(how)).assert_same(expected)


def trains() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Trains(), writes_into_it()[1]


def follows() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Follows(), writes_into_it()[1]


@pytest.mark.parametrize("build", [writes_into_it, *slow(draws_before, looks_at_others, follows)])
def test_models_of_which_nothing_may_be_read(build: Any, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    expected = Trained(tmp_path / "stock", build, is_ours=False)
    Trained(tmp_path / "ours", build).assert_same(expected)
    assert rows_read(said) == 0


@pytest.mark.slow
def test_what_is_in_front_of_a_hook_that_trains_is_read(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    expected = Trained(tmp_path / "stock", trains, is_ours=False)
    Trained(tmp_path / "ours", trains).assert_same(expected)
    assert "frozen.0, " in said.text and rows_read(said) > 0


def with_dropout() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    _, columns = head_on_bert()
    torch.manual_seed(1)
    model = bert(dropout=0.1)
    model.bert.requires_grad_(False)
    return model, columns


def test_dropout_in_what_is_frozen_is_the_stock_trainers(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    expected = Trained(tmp_path / "stock", with_dropout, is_ours=False)
    found = Trained(tmp_path / "ours", with_dropout)
    found.assert_same(expected)
    assert "bert is frozen, but computed in each epoch: it draws random numbers" in said.text


def test_dropout_is_left_out_on_demand(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    computed = Trained(tmp_path / "off", with_dropout, eval_frozen_modules=True, activation_cache="off")
    found = Trained(tmp_path / "ours", with_dropout, eval_frozen_modules=True)
    found.assert_same(computed)
    assert rows_read(said) == (EPOCHS - 1) * READ


def test_a_part_of_the_samples_is_stored_if_space_is_short(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    expected = Trained(tmp_path / "stock", lower_layers, is_ours=False)
    found = Trained(tmp_path / "ours", lower_layers, activation_cache_max_gib=6000 / 2**30)
    found.assert_same(expected)
    assert "for a part of the samples" in said.text
    assert 0 < rows_read(said) < (EPOCHS - 1) * READ


@pytest.mark.slow
def test_stored_in_half_of_the_space(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    expected = Trained(tmp_path / "stock", lower_layers, is_ours=False, optim="sgd")
    found = Trained(tmp_path / "ours", lower_layers, activation_cache_dtype="bf16", optim="sgd")
    assert rows_read(said) == (EPOCHS - 1) * READ
    differences = [float((found.weights[n] - weight).abs().max()) for n, weight in expected.weights.items()]
    assert 0 < max(differences) < 1e-3


def idefics_like() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Several images for each sample, which the model puts one behind the other."""
    model, columns = llava()
    return SeveralImages(model), {**columns, "images": noise(SAMPLES, 2, 3, 16, 16)}


class SeveralImages(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.tower, self.head = model.model.vision_tower, nn.Linear(SIZE, 2)

    def forward(self, images: torch.Tensor, labels: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        hidden = self.tower(images.flatten(0, 1))[0].mean(1)
        scores = self.head(hidden.unflatten(0, (len(images), -1)).sum(1))
        return {"loss": nn.functional.cross_entropy(scores, labels[:, 0] % 2), "logits": scores}


def two_inputs() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """As DETR: what is frozen reads an image and its mask."""
    columns = {"pixel_values": noise(SAMPLES, 3, 16, 16), "pixel_mask": words(SAMPLES, 256).view(-1, 16, 16) % 2}
    return TwoInputs(), {**columns, "labels": words(SAMPLES, 1)[:, 0] % 2}


class Positions(nn.Module):
    """What is frozen is called on positions too, of which there are as many as samples in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = Adds(), nn.Linear(SIZE, 2)
        self.register_buffer("positions", noise(BATCH, SIZE))

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(self.frozen(values, self.positions).mean(1))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE).requires_grad_(False)

    def forward(self, values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.linear(values + positions).tanh()


def positions() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Positions(), {"values": noise(SAMPLES, BATCH, SIZE), "labels": words(SAMPLES, 1)[:, 0] % 2}


class TwoTowers(nn.Module):
    """Of one there are twice as many rows as of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(SIZE, SIZE).requires_grad_(False) for _ in range(2))
        self.head = nn.Linear(SIZE, 2)

    def forward(self, values: torch.Tensor, pairs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(self.one(values) + self.two(pairs.flatten(0, 1)).unflatten(0, (-1, 2)).sum(1))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def two_towers() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    columns = {"values": noise(SAMPLES, SIZE), "pairs": noise(SAMPLES, 2, SIZE, seed=3)}
    return TwoTowers(), {**columns, "labels": words(SAMPLES, 1)[:, 0] % 2}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Conv2d(3, SIZE, 4).requires_grad_(False), nn.Linear(SIZE, 2)

    def forward(self, pixel_values: torch.Tensor, pixel_mask: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        scores = self.head(self.backbone(pixel_values * pixel_mask[:, None]).mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "space"),
    [
        (idefics_like, 2**30),
        (idefics_like, 5_000),
        (two_inputs, 2**30),
        (two_inputs, 80_000),
        (positions, 2**30),
        (positions, 2_000),
        (two_towers, 2**30),
    ],
)
def test_rows_of_several_inputs_and_outputs(
    build: Any, space: int, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    expected = Trained(tmp_path / "stock", build, is_ours=False)
    found = Trained(tmp_path / "ours", build, activation_cache_max_gib=space / 2**30)
    found.assert_same(expected)
    read = rows_read(said)
    assert read == (EPOCHS - 1) * READ if space == 2**30 else 0 < read < (EPOCHS - 1) * READ


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"eval_strategy": "epoch"},
        {"max_grad_norm": 0.1, "weight_decay": 0.1, "dataloader_num_workers": 1},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"dataloader_drop_last": True},
        {"num_train_epochs": 1},
    ],
)
def test_options(options: dict[str, Any], tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    accumulates = "gradient_accumulation_steps" in options  # of batches of other sizes, which count otherwise
    off = {"activation_cache": "off"} if accumulates else {}
    expected = Trained(tmp_path / "stock", lower_layers, is_ours=accumulates, **options, **off)
    found = Trained(tmp_path / "ours", lower_layers, **options)
    found.assert_same(expected)
    assert (rows_read(said) > 0) == ("num_train_epochs" not in options)


def two_processes(rank: int, world_size: int, folder: str, cache: str) -> dict[str, torch.Tensor]:
    trained = Trained(Path(folder) / cache, llava, activation_cache=cache, per_device_train_batch_size=BATCH // 2)
    return trained.weights


@pytest.mark.slow
def test_replicas_read_what_each_has_stored(tmp_path: Path) -> None:
    wanted = run_ranks(two_processes, 2, str(tmp_path), "off")[0]
    for found in run_ranks(two_processes, 2, str(tmp_path), "on"):
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=1e-5, msg=name)


SMOOTH = {"dataloader_drop_last": True, "optim": "sgd"}
"""As two stages round differently."""
STAGED: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]], int]] = {
    "lower layers": (lower_layers, 1),  # each of two stages has a layer that is not cached
    "a vision tower": (llava, 2),
    "Whisper's encoder": (whisper, 1),
    "thawed before the first step": (lower_layers, 0),
    "thawed later": (lower_layers, 1),
    "nothing at the bottom": (lambda: with_lora_like(), 0),
    "dropout": (lambda: with_dropout(), 0),
}


def thaw_lower(model: nn.Module) -> None:
    model.bert.encoder.layer[1].requires_grad_(True)


class ThawsFirst(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        thaw_lower(model)


def callbacks_of(name: str) -> tuple[TrainerCallback, ...]:
    """Parameters that are thawed before the first step are in the optimizer only if they were when it was made."""
    return {"thawed before the first step": (ThawsFirst(),), "thawed later": (Acts(thaw_lower, epoch=2),)}.get(
        name, ()
    )


def with_lora_like() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """What is frozen is not at the bottom."""
    model, columns = head_on_bert()
    model.bert.encoder.layer[0].output.dense.requires_grad_(True)
    return model, columns


def two_stages(rank: int, world_size: int, folder: str, name: str) -> tuple[dict[str, torch.Tensor], list[int]]:
    options: dict[str, Any] = {"pipeline_parallel_size": 2, "per_device_train_batch_size": BATCH // 2, **SMOOTH}
    trained = Trained(Path(folder), STAGED[name][0], callbacks_of(name), **options)
    logged = trained.history
    return trained.weights, [entry["num_cached_layers"] for entry in logged if "num_cached_layers" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGED)
def test_two_stages(name: str, tmp_path: Path) -> None:
    build, num_cached = STAGED[name]
    expected = Trained(tmp_path / "stock", build, callbacks_of(name), is_ours=name == "dropout", **SMOOTH)
    for weights, cached in run_ranks(two_stages, 2, str(tmp_path / "ours"), name):
        assert max(cached, default=0) == num_cached
        for of, weight in expected.weights.items():
            if name != "dropout":  # draws other numbers in two stages
                torch.testing.assert_close(weights[of], weight, atol=2e-6, rtol=1e-5, msg=of)


@pytest.mark.slow
def test_another_training_reads_what_one_has_stored(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    expected = Trained(tmp_path / "stock", head_on_bert, is_ours=False)
    for number in range(2):
        folder = tmp_path / f"ours-{number}"
        Trained(folder, head_on_bert, activation_cache_dir=str(tmp_path / "store")).assert_same(expected)
    in_first = READ - 2 * BATCH  # the first calls show what it is, and is worth
    assert rows_read(said) == 2 * (EPOCHS - 1) * READ + in_first
    assert "was stored by another training" in said.text
