"""Frozen parts of models of transformers, some of which compute a sample in another way beside other samples."""

from __future__ import annotations

from typing import Any

import torch
from peft import IA3Config, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BlipConfig,
    BlipForConditionalGeneration,
    DetrConfig,
    DetrForObjectDetection,
    GPT2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    NllbMoeConfig,
    ResNetConfig,
    SamConfig,
    SamModel,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SiglipConfig,
    SiglipModel,
    SpeechEncoderDecoderConfig,
    SpeechEncoderDecoderModel,
    Wav2Vec2Config,
)
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeEncoder

from ..kit import (
    BATCH,
    LABELS,
    VOCABULARY,
    WIDTH,
    Each,
    Inputs,
    LossAndOutputs,
    Rows,
    Script,
    bert,
    case,
    classified,
    own_loss,
    pad,
    pool,
    samples,
)
from .attack_front import SIZE, Images, ragged, sequence_pairs, stack, with_return_loss
from .attack_recipes_front import of

SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
VISION = {**SIZES, "image_size": SIZE, "patch_size": 4}

# ---------------------------------------------------------------------------------------------------------
# Images and speech
# ---------------------------------------------------------------------------------------------------------


@case("K1", "R2")
def blip_with_a_frozen_image_tower() -> Script:
    """BLIP writes captions; its image tower is frozen."""
    text = {**SIZES, "vocab_size": VOCABULARY, "encoder_hidden_size": WIDTH, "max_position_embeddings": 32}
    special = {"bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 3, "pad_token_id": 0}
    model = BlipForConditionalGeneration(BlipConfig(text_config={**text, **special}, vision_config=VISION))
    model.vision_model.requires_grad_(False)

    def collate(rows: list[Inputs]) -> Inputs:
        batch = stack(rows)
        return {**batch, "labels": batch["input_ids"]}

    return of(model, data=Images(words=True), collator=collate)


@case("K1")
def siglip_with_a_frozen_image_tower() -> Script:
    """SigLIP with a frozen image tower, whose pooling attends by a learnt probe."""
    text = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 16}
    model = SiglipModel(SiglipConfig(text_config=text, vision_config=VISION))
    model.vision_model.requires_grad_(False)
    return of(model, data=Images(words=True), collator=with_return_loss)


def sam() -> SamModel:
    vision = {**VISION, "output_channels": WIDTH, "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 8}
    decoder = {"hidden_size": WIDTH, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
    prompts = {"hidden_size": WIDTH, "image_size": SIZE, "patch_size": 4, "mask_input_channels": 4}
    config = SamConfig(vision_config=vision, mask_decoder_config=decoder, prompt_encoder_config=prompts)
    return SamModel(config)


@case("K1", "R2")
def sam_with_a_frozen_encoder() -> Script:
    """SAM's mask decoder is trained; each epoch has other points."""
    model = sam()
    model.vision_encoder.requires_grad_(False)
    model.prompt_encoder.requires_grad_(False)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        points = (inputs["points"] + int(trainer.state.epoch or 0)) % SIZE
        outputs = model(pixel_values=inputs["pixel_values"], input_points=points, multimask_output=False)
        masks = outputs.pred_masks[:, 0, 0]
        wanted = F.interpolate(inputs["pixel_values"].mean(1, keepdim=True), masks.shape[-2:])[:, 0]
        return F.mse_loss(masks, wanted), {"logits": masks}

    def collate(rows: list[Inputs]) -> Inputs:
        batch = stack(rows)
        points = torch.arange(2.0).view(1, 1, 1, 2) + batch["labels"].view(-1, 1, 1, 1)
        return {"pixel_values": batch["pixel_values"], "points": points}

    return of(model, data=Images(), collator=collate, trainer=own_loss(loss))


@case("K1")
def segformer_with_a_frozen_encoder() -> Script:
    """Segformer with a frozen encoder, whose feature maps a head joins."""
    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=WIDTH,
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
        num_labels=LABELS,
    )
    model = SegformerForSemanticSegmentation(config)
    model.segformer.requires_grad_(False)
    model.decode_head.batch_norm.eval()

    def collate(rows: list[Inputs]) -> Inputs:
        batch = stack(rows)
        size = batch["pixel_values"].shape[-1] // 2
        return {"pixel_values": batch["pixel_values"], "labels": batch["labels"].view(-1, 1, 1).expand(-1, size, size)}

    return of(model, data=Images(), collator=collate)


def detr() -> DetrForObjectDetection:
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    sizes: dict[str, Any] = {"d_model": WIDTH, "num_queries": 4, "num_labels": LABELS}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_ffn_dim": 32, f"{side}_attention_heads": 2}
    return DetrForObjectDetection(DetrConfig(backbone_config=backbone, dropout=0.0, **sizes))


@case("K1")
def detr_with_a_frozen_backbone() -> Script:
    """`freeze_backbone()` of DETR; images have other sizes and are padded, with a mask."""
    model = detr()
    model.model.freeze_backbone()

    def collate(rows: list[Inputs]) -> dict[str, Any]:
        sizes = [16 if int(row["labels"]) else 24 for row in rows]
        images = [F.interpolate(r["pixel_values"][None], (s, s))[0] for r, s in zip(rows, sizes, strict=True)]
        most = max(sizes)
        mask = torch.stack([F.pad(torch.ones(s, s), (0, most - s, 0, most - s)) for s in sizes])
        padded = torch.stack([F.pad(i, (0, most - i.shape[-1], 0, most - i.shape[-1])) for i in images])
        labels = [{"class_labels": r["labels"][None], "boxes": torch.tensor([[0.5, 0.5, 0.3, 0.4]])} for r in rows]
        return {"pixel_values": padded, "pixel_mask": mask.long(), "labels": labels}

    return of(model, data=Images(), collator=collate)


@case("K1", "K2", "R2")
def speech_to_text_with_a_frozen_encoder() -> Script:
    """A SpeechEncoderDecoderModel with `freeze_feature_encoder()` and a frozen encoder; waves of several lengths."""
    convolutions = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_feat_extract_layers": 2}
    small = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "activation_dropout": 0.0}
    encoder = Wav2Vec2Config(**SIZES, **convolutions, **small, **plain, layerdrop=0.0, mask_time_prob=0.0)
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32}
    decoder = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2)
    config = SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = SpeechEncoderDecoderModel(config=config)
    model.freeze_feature_encoder()
    model.encoder.requires_grad_(False)

    def collate(rows: list[Inputs]) -> Inputs:
        lengths = [160 + 16 * len(row["input_ids"]) for row in rows]
        waves = torch.zeros(len(rows), max(lengths))
        mask = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for n, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            waves[n, :length] = torch.sin(torch.arange(length) * row["input_ids"][0] / 9)
            mask[n, :length] = 1
        return {"input_values": waves, "attention_mask": mask, "labels": sequence_pairs(rows)["labels"]}

    return of(model, data=ragged(), collator=collate)


def llava() -> LlavaForConditionalGeneration:
    text = LlamaConfig(**SIZES, vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=64)
    vision = {"model_type": "clip_vision_model", **VISION}
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=VOCABULARY - 1,
        vision_feature_layer=-1,
        image_seq_length=16,
    )
    return LlavaForConditionalGeneration(config)


@case("K1", "R2")
def batches_without_images() -> Script:
    """LLaVA with a frozen image tower; every second batch has no images, so that it reaches no trained projector."""
    model = llava()
    model.model.vision_tower.requires_grad_(False)
    data = Images(words=True)
    for number, row in enumerate(data.rows):
        row["labels"] = torch.tensor(number // BATCH % 2)  # for the collator: the loss is of the words

    def collate(rows: list[Inputs]) -> Inputs:
        batch = stack(rows)
        words = batch["input_ids"].clamp(max=VOCABULARY - 2)
        if batch["labels"].any():
            return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}
        words = torch.cat([torch.full((len(words), 16), VOCABULARY - 1), words], 1)
        inputs = {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}
        return {**inputs, "pixel_values": batch["pixel_values"]}

    return of(model, data=data, collator=collate, options={"train_sampling_strategy": "sequential"})


# ---------------------------------------------------------------------------------------------------------
# Adapters of other kinds
# ---------------------------------------------------------------------------------------------------------


@case("K1", "K2", "R2")
def ia3_on_upper_layers() -> Script:
    """IA3 on the two upper layers of a BERT."""
    upper = r".*layer\.[23]\..*(key|value)"
    config = IA3Config(task_type="SEQ_CLS", target_modules=upper, feedforward_modules=[])
    return of(get_peft_model(bert(initializer_range=0.3), config))


@case("K1", "R2")
def prompt_tuning_on_a_frozen_encoder() -> Script:
    """Prompt tuning; the words' embeddings are frozen."""
    config = PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)
    return of(get_peft_model(bert(initializer_range=0.3), config), options={"save_strategy": "no"})


# ---------------------------------------------------------------------------------------------------------
# A sample's output depends on the batch, in some batches only
# ---------------------------------------------------------------------------------------------------------


def rotary(kind: str) -> LlamaForSequenceClassification:
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0}
    if kind == "longrope":
        each = WIDTH // 4
        parameters |= {
            "short_factor": [1.0] * each,
            "long_factor": [4.0] * each,
            "original_max_position_embeddings": 10,
        }
    config = LlamaConfig(
        **SIZES,
        vocab_size=VOCABULARY,
        num_key_value_heads=2,
        max_position_embeddings=40 if kind == "longrope" else 10,
        rope_parameters=parameters,
        initializer_range=0.3,
        pad_token_id=0,
        num_labels=LABELS,
    )
    return LlamaForSequenceClassification(config)


def with_long_ones(epochs: float) -> tuple[Any, Each]:
    """A collator that cuts all samples to ten words, but for long ones after some epochs; and its callback."""
    done = [0.0]

    def act(callback: Any, state: Any, control: Any, **_: Any) -> None:
        done[0] = state.epoch

    def collate(rows: list[Inputs]) -> Inputs:
        if done[0] >= epochs:
            return pad(rows)
        return pad([{n: v[:8] if v.dim() else v for n, v in row.items()} for row in rows])

    return collate, Each(act, "on_step_end")


def few_long() -> Rows:
    """Texts of eight words; two have twenty."""
    rows = list(samples(32, 8, 8))
    long = list(samples(2, 20, 20, seed=3))
    rows[9], rows[22] = long
    return Rows(rows)


def longer(model: Any, epochs: float = 1.2, **fields: Any) -> Script:
    collate, callback = with_long_ones(epochs)
    return of(model, data=few_long(), collator=collate, callbacks=[callback], **fields)


@case("K1")
def longer_texts_change_the_positions_of_all() -> Script:
    """A frozen Llama, whose rotary embedding has other factors for all samples beside a long one (longrope)."""
    model = rotary("longrope")
    model.model.requires_grad_(False)
    return longer(model)


@case("K1")
def longer_texts_over_lowest_layers() -> Script:
    """The embeddings and the first layer of a Llama with longrope are frozen."""
    model = rotary("longrope")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return longer(model)


class OnExperts(nn.Module):
    """A head on a frozen encoder whose experts take a number of tokens of a batch at most."""

    def __init__(self) -> None:
        super().__init__()
        config = NllbMoeConfig(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            encoder_layers=2,
            encoder_ffn_dim=32,
            encoder_attention_heads=2,
            encoder_sparse_step=2,
            num_experts=2,
            expert_capacity=40,
            dropout=0.0,
            attention_dropout=0.0,
            moe_token_dropout=0.0,
            encoder_layerdrop=0.0,
            init_std=0.5,
            pad_token_id=0,
            max_position_embeddings=64,
        )
        self.encoder = NllbMoeEncoder(config).requires_grad_(False)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return classified(self.head(pool(hidden, attention_mask)), labels)


class FirstShort:
    """The first batch of each epoch has the shortest samples; the others are shuffled."""

    def _get_train_sampler(self: Any, *_: Any) -> Any:
        return Orders(len(self.train_dataset))


class Orders:
    def __init__(self, number: int) -> None:
        self.number, self.epoch = number, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from range(8)
        yield from (8 + torch.randperm(self.number - 8, generator=generator)).tolist()


@case("K1")
def experts_that_are_full() -> Script:
    """A frozen NLLB-MoE drops tokens if an expert is full, which the first batch of an epoch does not show."""
    rows = Rows([*samples(8, 4, 4), *samples(24, 8, 12, seed=2)])
    return of(OnExperts(), data=rows, trainer=FirstShort)
