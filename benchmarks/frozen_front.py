"""The gain for a model with a frozen part: the stock Trainer beside ours, with two names changed.

    OMP_NUM_THREADS=1 python benchmarks/frozen_front.py [--out results.json] [--overhead] [names ...]

Tiny models with a frozen part that takes most of a step (8 layers, 256 wide), one process, fp32. For each: the largest
difference of a final weight from the stock Trainer's, and the CPU milliseconds of a step of the first epoch and of
the later ones: of the stock Trainer, of ours, and of the part that trains alone (frozen modules return the same each
time).

--overhead: cases without a gain; the fastest epoch, as a busy machine only makes epochs longer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
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
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from hf_pipetransformer.model.frozen_prefix import frozen_modules

import harness
from harness import Figures, Ratio, StepClock

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


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    batch: dict[str, Any] = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return batch if "labels" in batch else {**batch, "return_loss": True}


def keep_first_output(module: nn.Module) -> None:
    """Have a module return its first output in all calls, unless its inputs come from a trained module.

    wav2vec2's output requires gradients even if the whole module is frozen: the model sets the flag in training mode.
    """
    forward, kept = module.forward, []

    def run(*args: Any, **kwargs: Any) -> Any:
        if kept:
            return tree_map(lambda leaf: leaf, kept[0])  # models write into containers
        output = forward(*args, **kwargs)
        if not any(leaf.requires_grad for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)):
            kept.append(tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output))
        return output

    module.forward = run  # type: ignore[method-assign]


def train(
    build: Callable[[], Built], kind: str, weights: dict[str, dict[str, torch.Tensor]], **options: Any
) -> Figures:
    """Train a new model.

    Args:
        build: returns model and data.
        kind: "stock", "ours", or "alone" with the stock Trainer, of the part that trains.
        weights: kind -> final weights; added to.
        **options: further training arguments.
    """
    torch.manual_seed(0)
    model, columns = build()
    for module in frozen_modules(model).values() if kind == "alone" else ():
        keep_first_output(module)
    rows: Any = [{name: column[row] for name, column in columns.items()} for row in range(SAMPLES)]
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        harness.make_trainer(
            model,
            rows,
            folder,
            [clock],
            is_ours=kind == "ours",
            keywords={"data_collator": collate},
            per_device_train_batch_size=BATCH,
            num_train_epochs=EPOCHS,
            learning_rate=1e-3,
            remove_unused_columns=False,
            **options,
        ).train()
    first, *later = [1e3 * epoch["cpu_seconds"] * BATCH / SAMPLES for epoch in clock.epochs]
    figures = {"first_ms": first, "later_ms": sum(later) / len(later), "fastest_ms": min(later)}
    weights[kind] = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    if kind == "ours" and "stock" in weights:
        figures["difference"] = max(
            float((weights["stock"][name] - w).abs().max()) for name, w in weights["ours"].items()
        )
    return figures


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


def main() -> None:
    """Measure the models that are named, by default all, and print the table."""
    parser = harness.parser_of(__doc__, turns=1)
    parser.add_argument("names", nargs="*", metavar="names", help=f"some of {list(MODELS)}")
    parser.add_argument("--overhead", action="store_true", help="measure what it costs where nothing is gained")
    options = harness.start(parser)
    models = OVERHEAD if options.overhead else {name: (build, {}) for name, build in MODELS.items()}
    cases: dict[str, Callable[[], Figures]] = {}
    for name in options.names or models:
        build, more = models[name]
        weights: dict[str, dict[str, torch.Tensor]] = {}
        for kind in ("stock", "ours") if options.overhead else ("stock", "ours", "alone"):
            cases[f"{name}: {kind}"] = partial(train, build, kind, weights, **(more if kind == "ours" else {}))

    def beside(kind: str) -> Callable[[str], str | None]:
        return lambda name: name.replace(": ours", f": {kind}") if name.endswith(": ours") else None

    ratios = [
        Ratio("first, to stock", "first_ms", beside("stock")),
        Ratio("later, stock / ours", "later_ms", beside("stock"), is_speed_up=True),
        Ratio("later, to what trains", "later_ms", beside("alone")),
    ]
    if options.overhead:
        ratios = [Ratio("fastest, to stock", "fastest_ms", beside("stock"))]
    harness.report(options, harness.take_turns(cases, options), ratios)


if __name__ == "__main__":
    main()
