"""What is gained where something is frozen already: the stock Trainer beside ours, with two names changed.

    OMP_NUM_THREADS=1 python benchmarks/frozen_front.py [--out results.json] [--overhead] [names ...]

Tiny models whose frozen part computes most of a step (8 layers, 256 wide), one process, fp32. For each: the largest
difference of a final weight, and the CPU seconds of the first epoch and of the later ones, in one run: of the stock
Trainer, of ours, and of the part that trains alone (frozen modules return the same each time).

--overhead: CPU seconds of a step, ours over stock, where there is nothing to gain, in several turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
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
from hf_pipetransformer.model.frozen_prefix import frozen_modules

WIDTH, LAYERS, SAMPLES, BATCH, EPOCHS = 256, 8, 256, 8, 3
IMAGE = {"image_size": 32, "patch_size": 8}
DEEP: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}
Built = tuple[nn.Module, dict[str, torch.Tensor]]


def words(length: int) -> torch.Tensor:
    return torch.randint(3, 100, (SAMPLES, length), generator=torch.Generator().manual_seed(0))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(1))


def bert(num_frozen: int) -> Built:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=120, **DEEP, **rates))
    for module in (model.bert.embeddings, *model.bert.encoder.layer[:num_frozen]):
        module.requires_grad_(False)
    if num_frozen == LAYERS:
        model.bert.requires_grad_(False)
    return model, {"input_ids": words(16), "labels": words(1)[:, 0] % 2}


def whisper() -> Built:
    sizes = {"d_model": WIDTH, "encoder_layers": LAYERS, "decoder_layers": 2, "num_mel_bins": 20}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    inner = {"encoder_ffn_dim": 4 * WIDTH, "decoder_ffn_dim": 4 * WIDTH}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": 50, "max_target_positions": 32}
    model = WhisperForConditionalGeneration(WhisperConfig(vocab_size=120, **sizes, **heads, **inner, **ids, **lengths))
    model.freeze_encoder()
    return model, {"input_features": noise(20, 100), "labels": words(8)}


def t5() -> Built:
    sizes = {"d_model": WIDTH, "d_ff": 4 * WIDTH, "d_kv": 64, "num_layers": LAYERS, "num_heads": 4}
    config = T5Config(vocab_size=120, num_decoder_layers=2, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    model = T5ForConditionalGeneration(config)
    model.encoder.requires_grad_(False)
    return model, {"input_ids": words(16), "labels": words(8)}


def llava() -> Built:
    text = LlamaConfig(
        vocab_size=130,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    vision = CLIPVisionConfig(**DEEP, **IMAGE)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=110, image_seq_length=16)
    )
    model.model.vision_tower.requires_grad_(False)
    ids = words(24)
    ids[:, 2:18] = 110
    return model, {"input_ids": ids, "labels": ids.clone(), "pixel_values": noise(3, 32, 32)}


def captioning() -> Built:
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    says = GPT2Config(vocab_size=120, n_embd=WIDTH, n_layer=2, n_head=4, add_cross_attention=True, **rates, **ids)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**DEEP, **IMAGE), says)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = VisionEncoderDecoderModel(config)
    model.encoder.requires_grad_(False)
    return model, {"pixel_values": noise(3, 32, 32), "labels": words(8)}


def clip() -> Built:
    text = {**DEEP, "num_hidden_layers": 2, "vocab_size": 120, "max_position_embeddings": 20, "eos_token_id": 119}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config={**DEEP, **IMAGE}, projection_dim=32))
    model.vision_model.requires_grad_(False)
    ids = words(10)
    ids[:, -1] = 119
    return model, {"input_ids": ids, "pixel_values": noise(3, 32, 32)}


def segformer() -> Built:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0}
    config = SegformerConfig(
        hidden_sizes=[32, 64, 128, 256],
        num_attention_heads=[1, 2, 4, 8],
        decoder_hidden_size=32,
        num_labels=5,
        classifier_dropout_prob=0.0,
        **rates,
    )
    model = SegformerForSemanticSegmentation(config)
    model.segformer.requires_grad_(False)
    return model, {"pixel_values": noise(3, 64, 64), "labels": words(64 * 64).view(-1, 64, 64) % 5}


def wav2vec2() -> Built:
    rates = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "layerdrop")
    config = Wav2Vec2Config(
        conv_dim=(64, 64, 64),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
        final_dropout=0.0,
        **DEEP,
        **dict.fromkeys(rates, 0.0),
    )
    model = Wav2Vec2ForSequenceClassification(config)
    model.freeze_base_model()
    return model, {"input_values": noise(1600), "labels": words(1)[:, 0] % 2}


MODELS: dict[str, Callable[[], Built]] = {
    "BERT, all layers": lambda: bert(LAYERS),
    "BERT, lower half": lambda: bert(LAYERS // 2),
    "Whisper, freeze_encoder()": whisper,
    "T5, encoder": t5,
    "Llava, vision tower": llava,
    "ViT + GPT-2, encoder": captioning,
    "CLIP, image tower": clip,
    "Segformer, encoder": segformer,
    "wav2vec2, freeze_base_model()": wav2vec2,
}


class Clock(TrainerCallback):
    """CPU seconds of each epoch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.process_time())

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.seconds[-1] = time.process_time() - self.seconds[-1]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    batch: dict[str, Any] = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return batch if "labels" in batch else {**batch, "return_loss": True}


def keep_first_output(module: nn.Module) -> None:
    """Have a module return what it has returned the first time, unless it comes from something that is trained."""
    forward, kept = module.forward, []

    def run(*args: Any, **kwargs: Any) -> Any:
        if kept:
            return tree_map(lambda leaf: leaf, kept[0])  # models write into containers
        output = forward(*args, **kwargs)
        if not any(leaf.requires_grad for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)):
            kept.append(tree_map(lambda leaf: leaf, output))
        return output

    module.forward = run  # type: ignore[method-assign]


def train(
    build: Callable[[], Built], is_ours: bool, computes_frozen: bool = True, **options: Any
) -> tuple[dict[str, torch.Tensor], list[float]]:
    torch.manual_seed(0)
    model, columns = build()
    for module in frozen_modules(model).values() if not computes_frozen else ():
        keep_first_output(module)
    rows: Any = [{name: column[row] for name, column in columns.items()} for row in range(SAMPLES)]
    kinds: Any = (
        (PipeTransformerTrainer, PipeTransformerTrainingArguments) if is_ours else (Trainer, TrainingArguments)
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = kinds[1](
            folder,
            per_device_train_batch_size=BATCH,
            num_train_epochs=EPOCHS,
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            remove_unused_columns=False,
            **options,
        )
        kinds[0](model, arguments, train_dataset=rows, data_collator=collate, callbacks=[clock]).train()
    return {name: weight.detach() for name, weight in model.named_parameters()}, clock.seconds


def compare(build: Callable[[], Built]) -> dict[str, float]:
    weights, stock = train(build, is_ours=False)
    found, ours = train(build, is_ours=True)
    _, alone = train(build, is_ours=False, computes_frozen=False)
    return {
        "largest difference of a weight": max(float((found[n] - weight).abs().max()) for n, weight in weights.items()),
        "first epoch, ours / stock": ours[0] / stock[0],
        "later epochs, stock / ours": sum(stock[1:]) / sum(ours[1:]),
        "later epochs, ours / the part that trains": sum(ours[1:]) / sum(alone[1:]),
        "milliseconds of a later epoch, stock": 1e3 * sum(stock[1:]) / (EPOCHS - 1),
        "milliseconds of a later epoch, ours": 1e3 * sum(ours[1:]) / (EPOCHS - 1),
    }


def small(width: int, layers: int, num_frozen: int) -> Callable[[], Built]:
    def build() -> Built:
        config = BertConfig(
            vocab_size=100,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
        )
        model = BertForSequenceClassification(config)
        for layer in model.bert.encoder.layer[:num_frozen]:
            layer.requires_grad_(False)
        return model, {"input_ids": words(24), "labels": words(1)[:, 0] % 2}

    return build


OVERHEAD: dict[str, tuple[Callable[[], Built], dict[str, Any]]] = {
    "10 ms, nothing frozen": (small(64, 2, 0), {}),
    "10 ms, half frozen, activation_cache='off'": (small(64, 2, 1), {"activation_cache": "off"}),
    "60 ms, nothing frozen": (small(192, 4, 0), {}),
    "60 ms, half frozen, activation_cache='off'": (small(192, 4, 2), {"activation_cache": "off"}),
}
TURNS = 8


def overhead(build: Callable[[], Built], options: dict[str, Any]) -> dict[str, float]:
    """By the fastest epoch of each, as a busy machine only makes epochs longer."""
    stock, ours = [], []
    for _ in range(TURNS):
        stock += train(build, is_ours=False)[1][1:]
        ours += train(build, is_ours=True, **options)[1][1:]
    return {
        "milliseconds of a step, stock": 1e3 * min(stock) / (SAMPLES // BATCH),
        "CPU seconds of a step, ours / stock": min(ours) / min(stock),
        "the same, medians of all epochs": statistics.median(ours) / statistics.median(stock),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="names", help=f"some of {list(MODELS)}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--overhead", action="store_true", help="measure what it costs where nothing is gained")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name in args.names or (OVERHEAD if args.overhead else MODELS):
        results[name] = overhead(*OVERHEAD[name]) if args.overhead else compare(MODELS[name])
        print(name, json.dumps(results[name]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({"models": results, "torch": torch.__version__}, indent=2))


if __name__ == "__main__":
    main()
