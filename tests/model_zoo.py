"""Tiny instances of many transformers architectures, all deterministic in training mode.

`MODELS` maps a name to a `ZooModel` that the library must run at every cut.

    model = MODELS["bert-classification"].build()
    loss = model(**MODELS["bert-classification"].batch(rows=3)).loss

Every model has 3 to 6 layers of width 16 and reads a vocabulary of 64 tokens. No weights are downloaded.
Rows of a text batch have unequal lengths and are padded on the right: 7, 5, 3, 6, 4 tokens and again.
"""

import dataclasses
from collections.abc import Callable

import torch
import transformers as hf
from torch import Tensor, nn

Batch = dict[str, Tensor | bool]
BatchMaker = Callable[[int, torch.Generator], Batch]

VOCABULARY = 64
PAD, BOS, EOS, IMAGE = 0, 1, 2, 60
FIRST_WORD, LAST_WORD = 5, 59  # ordinary tokens: none of the special ones above
SEQUENCE = 7
LABELS = 2

# Names, or parts of names, of the probabilities that modules and configs hold.
RANDOM_FIELDS = ("drop", "jitter", "mask_time_prob", "mask_feature_prob")


@dataclasses.dataclass(frozen=True)
class ZooModel:
    """A recipe for one tiny model and for batches that it can read.

    Args:
        name: Key of the model in `MODELS`.
        make_model: Builds the model from the current random state.
        make_batch: Builds a batch of the given number of rows from the given generator.
    """

    name: str
    make_model: Callable[[], hf.PreTrainedModel]
    make_batch: BatchMaker

    def build(self, seed: int = 0) -> hf.PreTrainedModel:
        """Returns a new model in training mode; equal seeds give equal weights. Keeps the global random state."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return without_dropout(with_large_weights(self.make_model())).train()

    def batch(self, rows: int = 3, seed: int = 1) -> Batch:
        """Returns the keyword arguments of one forward with a loss."""
        return self.make_batch(rows, torch.Generator().manual_seed(seed))


def with_large_weights(model: nn.Module) -> nn.Module:
    """Draws new weights, in place, so large that every layer matters.

    With the usual standard deviation of 0.02, a layer of width 16 moves the loss by less than a test's tolerance, and
    leaving it out would not be noticed.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def without_dropout(model: nn.Module) -> nn.Module:
    """Sets everything random in training mode to zero, in place: two forwards in training mode are then equal.

    Covers `nn.Dropout`, probabilities that modules copied from their config (attention and activation dropout,
    layerdrop, stochastic depth, router jitter) and SpecAugment's masks, which only the config knows.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        _zero_probabilities(module)
        config = getattr(module, "config", None)
        for part in (config, *_sub_configs(config)):
            _zero_probabilities(part)
    return model


def _zero_probabilities(holder: object) -> None:
    for name, value in list(vars(holder).items()) if holder is not None else ():
        if isinstance(value, float) and any(word in name for word in RANDOM_FIELDS):
            setattr(holder, name, 0.0)


def _sub_configs(config: hf.PretrainedConfig | None) -> list[hf.PretrainedConfig]:
    return [part for part in vars(config).values() if isinstance(part, hf.PretrainedConfig)] if config else []


# ---------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------


def _text(rows: int, generator: torch.Generator, length: int = SEQUENCE) -> Batch:
    input_ids = torch.randint(FIRST_WORD, LAST_WORD, (rows, length), generator=generator)
    lengths = torch.tensor([length - (2 * row) % 5 for row in range(rows)])
    attention_mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": input_ids.masked_fill(attention_mask == 0, PAD), "attention_mask": attention_mask}


def _class_labels(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, LABELS, (rows,), generator=generator)


def text_classification(rows: int, generator: torch.Generator) -> Batch:
    return {**_text(rows, generator), "labels": _class_labels(rows, generator)}


def token_labels(rows: int, generator: torch.Generator) -> Batch:
    """A label for every real token: language modelling, token classification, text to text."""
    batch = _text(rows, generator)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def question_answering(rows: int, generator: torch.Generator) -> Batch:
    starts = torch.randint(0, 2, (rows,), generator=generator)
    return {**_text(rows, generator), "start_positions": starts, "end_positions": starts + 1}


def multiple_choice(rows: int, generator: torch.Generator, choices: int = 3) -> Batch:
    batch = _text(rows * choices, generator)
    batch = {name: tensor.view(rows, choices, SEQUENCE) for name, tensor in batch.items()}
    return {**batch, "labels": torch.randint(0, choices, (rows,), generator=generator)}


def pretraining(rows: int, generator: torch.Generator) -> Batch:
    return {**token_labels(rows, generator), "next_sentence_label": _class_labels(rows, generator)}


def image_classification(rows: int, generator: torch.Generator) -> Batch:
    pixel_values = torch.randn(rows, 3, 16, 16, generator=generator)
    return {"pixel_values": pixel_values, "labels": _class_labels(rows, generator)}


def image_segmentation(rows: int, generator: torch.Generator) -> Batch:
    pixel_values = torch.randn(rows, 3, 16, 16, generator=generator)
    return {"pixel_values": pixel_values, "labels": torch.randint(0, 2, (rows, 16, 16), generator=generator)}


def wave_classification(rows: int, generator: torch.Generator, samples: int = 400) -> Batch:
    lengths = torch.tensor([samples - 100 * (row % 3) for row in range(rows)])
    attention_mask = (torch.arange(samples) < lengths[:, None]).long()
    input_values = torch.randn(rows, samples, generator=generator) * attention_mask
    labels = _class_labels(rows, generator)
    return {"input_values": input_values, "attention_mask": attention_mask, "labels": labels}


def speech_to_text(rows: int, generator: torch.Generator) -> Batch:
    input_features = torch.randn(rows, 8, 40, generator=generator)
    return {"input_features": input_features, "labels": token_labels(rows, generator)["labels"]}


def image_and_text(rows: int, generator: torch.Generator) -> Batch:
    """Four image tokens after the first word, and no loss on them."""
    batch = _text(rows, generator)
    images = torch.full((rows, 4), IMAGE)
    ones = torch.ones_like(images)
    input_ids = torch.cat([batch["input_ids"][:, :1], images, batch["input_ids"][:, 1:]], dim=1)
    attention_mask = torch.cat([ones, batch["attention_mask"]], dim=1)
    labels = input_ids.masked_fill((attention_mask == 0) | (input_ids == IMAGE), -100)
    pixel_values = torch.randn(rows, 3, 8, 8, generator=generator)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "pixel_values": pixel_values, "labels": labels}


def image_text_pairs(rows: int, generator: torch.Generator) -> Batch:
    pixel_values = torch.randn(rows, 3, 16, 16, generator=generator)
    return {**_text(rows, generator), "pixel_values": pixel_values, "return_loss": True}


# ---------------------------------------------------------------------------------------------------------
# Sizes that many configs share
# ---------------------------------------------------------------------------------------------------------

WIDTH = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
ENCODER = {
    **WIDTH,
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
    "max_position_embeddings": 40,
    "pad_token_id": PAD,
}
DECODER = {**ENCODER, "num_key_value_heads": 1, "bos_token_id": BOS, "eos_token_id": EOS}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "decoder_start_token_id": EOS,
    "forced_eos_token_id": None,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 4,
    "n_head": 2,
    "n_positions": 40,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "decoder_start_token_id": PAD,
}
VISION = {**WIDTH, "num_hidden_layers": 4, "image_size": 16, "patch_size": 4}
SHORT_TEXT = {**ENCODER, "num_hidden_layers": 3, "bos_token_id": BOS, "eos_token_id": EOS, "projection_dim": 8}
SHORT_VISION = {**VISION, "num_hidden_layers": 3, "projection_dim": 8}
WAVE = {
    **WIDTH,
    "num_hidden_layers": 4,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
}
DEBERTA_V2 = {
    **{**ENCODER, "relative_attention": True, "pos_att_type": "c2p|p2c"},
    **{"norm_rel_ebd": "layer_norm", "position_buckets": 8, "share_att_key": True},
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _without(sizes: dict, *names: str) -> dict:
    return {name: value for name, value in sizes.items() if name not in names}


# ---------------------------------------------------------------------------------------------------------
# The models
# ---------------------------------------------------------------------------------------------------------

MODELS: dict[str, ZooModel] = {}


def _maker(model_class: str, sizes: dict) -> Callable[[], hf.PreTrainedModel]:
    """Looks the class up when it is needed: importing every architecture takes seconds."""

    def make() -> hf.PreTrainedModel:
        cls = getattr(hf, model_class)
        return cls(cls.config_class(**sizes))

    return make


def _add(name: str, model_class: str, make_batch: BatchMaker, **sizes) -> None:
    MODELS[name] = ZooModel(name, _maker(model_class, sizes), make_batch)


def _encoder(name: str, model_class: str, make_batch: BatchMaker = text_classification, **sizes) -> None:
    _add(name, model_class, make_batch, **(sizes or ENCODER))


def _decoder(name: str, model_class: str, make_batch: BatchMaker = token_labels, **sizes) -> None:
    _add(name, model_class, make_batch, **(sizes or DECODER))


# Encoders: every head on BERT, then one head on every architecture.
_encoder("bert-classification", "BertForSequenceClassification")
_encoder("bert-question-answering", "BertForQuestionAnswering", question_answering)
_encoder("bert-masked-lm", "BertForMaskedLM", token_labels)
_encoder("bert-multiple-choice", "BertForMultipleChoice", multiple_choice)
_encoder("bert-pretraining", "BertForPreTraining", pretraining)
_encoder("bert-tokens", "BertForTokenClassification", token_labels, **ENCODER, num_labels=VOCABULARY)
_encoder("roberta", "RobertaForSequenceClassification")
_encoder("albert", "AlbertForSequenceClassification", **ENCODER, embedding_size=8)
_encoder("electra", "ElectraForSequenceClassification", **ENCODER, embedding_size=8)
_encoder("deberta-v2", "DebertaV2ForSequenceClassification", **DEBERTA_V2)
_encoder(
    "modernbert",
    "ModernBertForSequenceClassification",
    **ENCODER,
    bos_token_id=BOS,
    eos_token_id=EOS,
    cls_token_id=BOS,
    sep_token_id=EOS,
    local_attention=4,
    global_attn_every_n_layers=2,
)
_encoder(
    "xlnet",
    "XLNetForSequenceClassification",
    vocab_size=VOCABULARY,
    d_model=16,
    n_layer=4,
    n_head=2,
    d_inner=24,
    pad_token_id=PAD,
)

# Decoders
_decoder("gpt2", "GPT2LMHeadModel", **GPT2)
_decoder("gpt2-classification", "GPT2ForSequenceClassification", text_classification, **GPT2)
_decoder("llama", "LlamaForCausalLM")
_decoder("llama-tied", "LlamaForCausalLM", **DECODER, tie_word_embeddings=True)
_decoder("llama-classification", "LlamaForSequenceClassification", text_classification)
_decoder("mistral", "MistralForCausalLM", **DECODER, sliding_window=4)
_decoder("gemma2", "Gemma2ForCausalLM", **DECODER, head_dim=8, sliding_window=4)
_decoder("mixtral", "MixtralForCausalLM", **DECODER, **EXPERTS)
_decoder(
    "mixtral-router-loss",
    "MixtralForCausalLM",
    **DECODER,
    **EXPERTS,
    output_router_logits=True,
    router_aux_loss_coef=0.5,  # large enough to be visible
)
_decoder("mamba", "MambaForCausalLM", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=4)

# Encoder-decoders
_add("t5", "T5ForConditionalGeneration", token_labels, **T5)
_add(
    "bart",
    "BartForConditionalGeneration",
    token_labels,
    **ENCODER_DECODER,
    max_position_embeddings=40,
)

# Vision
_add("vit", "ViTForImageClassification", image_classification, **VISION)
_add(
    "swin",
    "SwinForImageClassification",
    image_classification,
    image_size=16,
    patch_size=2,
    embed_dim=8,
    depths=[2, 2, 2],
    num_heads=[1, 2, 2],
    window_size=2,
)
_add(
    "convnext",
    "ConvNextForImageClassification",
    image_classification,
    num_stages=3,
    hidden_sizes=[8, 8, 16],
    depths=[1, 2, 1],
    patch_size=2,
)
_add(
    "resnet",
    "ResNetForImageClassification",
    image_classification,
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[2, 2],
    layer_type="basic",
)

# Audio
_add(
    "wav2vec2",
    "Wav2Vec2ForSequenceClassification",
    wave_classification,
    **WAVE,
)
_add(
    "whisper",
    "WhisperForConditionalGeneration",
    speech_to_text,
    **_without(ENCODER_DECODER, "forced_eos_token_id"),
    num_mel_bins=8,
    max_source_positions=20,
    max_target_positions=40,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)

# Models with layers that are not a single list, or that read more than the previous layer's output
_add(
    "funnel",  # lists of lists
    "FunnelForSequenceClassification",
    text_classification,
    vocab_size=VOCABULARY,
    block_sizes=[2, 2],
    num_decoder_layers=1,
    d_model=16,
    n_head=2,
    d_head=8,
    d_inner=24,
)
_add(
    "xlm",  # a list of all attention modules, one of all feed-forward modules; outputs are changed in place
    "XLMForSequenceClassification",
    text_classification,
    vocab_size=VOCABULARY,
    emb_dim=16,
    n_layers=2,
    n_heads=2,
    max_position_embeddings=40,
)
_add(
    "wav2vec2-weighted-layers",  # the head reads what every layer returned
    "Wav2Vec2ForSequenceClassification",
    wave_classification,
    **WAVE,
    layerdrop=0.0,
    mask_time_prob=0.0,
    use_weighted_layer_sum=True,
)
_add(
    "segformer",  # the head reads every stage, each of another shape, and has a batch normalisation
    "SegformerForSemanticSegmentation",
    image_segmentation,
    num_encoder_blocks=2,
    depths=[1, 1],
    sr_ratios=[2, 1],
    hidden_sizes=[8, 16],
    patch_sizes=[3, 3],
    strides=[2, 2],
    num_attention_heads=[1, 2],
    mlp_ratios=[2, 2],
    decoder_hidden_size=8,
)

# Multimodal
_add(
    "llava",
    "LlavaForConditionalGeneration",
    image_and_text,
    vision_config={**SHORT_VISION, "model_type": "clip_vision_model", "image_size": 8},
    text_config={**DECODER, "model_type": "llama"},
    image_token_index=IMAGE,
    image_seq_length=4,
    vision_feature_layer=-1,
)
_add(
    "clip",
    "CLIPModel",
    image_text_pairs,
    text_config=SHORT_TEXT,
    vision_config=SHORT_VISION,
    projection_dim=8,
)
