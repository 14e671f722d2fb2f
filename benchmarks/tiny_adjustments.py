"""What the rules of `tiny_models` do not find out about a configuration, by model type.

Each function gets a part of a configuration that has been made small, and changes it so that the model can be built
and run: a field that the default leaves open, or a size that belongs to others under a name that no rule knows.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import transformers as hf
from transformers import PreTrainedConfig

TEXT_TOKENS = 8
"""Tokens of a sample."""
IMAGE_TOKEN = 5


def whole_heads(config: PreTrainedConfig) -> None:
    """Fewer attention heads where a width that was divided is no multiple of them any more."""
    for width_name, heads_name in (("hidden_size", "num_attention_heads"), ("d_model", "num_attention_heads")):
        fields = vars(config)
        width, heads = fields.get(width_name), fields.get(heads_name)
        if type(width) is int and type(heads) is int and heads and width % heads and fields.get("head_dim") is None:
            setattr(config, heads_name, gcd(width, heads))


def without_timm(config: PreTrainedConfig) -> bool:
    """Put a ResNet or Swin of transformers in the place of a backbone of the timm library.

    Returns:
        Whether there was such a backbone.
    """
    backbone = getattr(config, "backbone_config", None)
    if type(backbone).__name__ != "TimmBackboneConfig":
        return False
    stages = [index for index in backbone.out_indices if index > 0]
    if "swin" in str(backbone.backbone):
        config.backbone_config = hf.SwinConfig(
            image_size=64, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[2, 2, 2, 2], window_size=2, out_indices=stages
        )
        return True
    config.backbone_config = hf.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64, 128],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_indices=stages,
    )
    return True


def set_fields(**values: Any) -> Callable[[PreTrainedConfig], None]:
    def adjust(config: PreTrainedConfig) -> None:
        for name, value in values.items():
            setattr(config, name, value)

    return adjust


def _intraclass_block(config: PreTrainedConfig) -> None:
    sizes = {"long": 7, "mid": 5, "short": 3}
    blocks: dict[str, list[Any]] = {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]}
    for name, size in sizes.items():
        half = size // 2
        blocks[f"vertical_long_to_small_conv_{name}ratio"] = [[size, 1], [1, 1], [half, 0]]
        blocks[f"horizontal_small_to_long_conv_{name}ratio"] = [[1, size], [1, 1], [0, half]]
        blocks[f"symmetric_conv_long_{name}ratio"] = [[size, size], [1, 1], [half, half]]
    config.intraclass_block_config = blocks
    config.kernel_list = config.kernel_list or [3, 2, 2]
    config.scale_factor_list = config.scale_factor_list or [1, 2, 4, 8]


def _sapiens_head(config: PreTrainedConfig) -> None:
    head = hf.Sapiens2HeadConfig(
        upsample_out_channels=[16, 16],
        conv_out_channels=[16],
        scale_conv_out_channels=[8],
        scale_final_hidden_sizes=[8, 8],
    )
    head._init_scale_final_input_size(image_size=config.image_size, patch_size=config.patch_size)
    config.head_config = head


def _rope_of_each_kind(config: PreTrainedConfig) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    config.rope_parameters = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in kinds}


def _reformer(config: PreTrainedConfig) -> None:
    config.axial_pos_shape = (2, TEXT_TOKENS // 2)
    config.attn_layers = ["local"] * len(config.attn_layers)  # hashes are drawn at random
    config.num_hidden_layers = len(config.attn_layers)


def _codec(config: PreTrainedConfig) -> None:
    config.upsample_groups = config.hidden_size


def _vocabulary_of_images(config: PreTrainedConfig) -> None:
    config.vocabulary_map = {"<image>": IMAGE_TOKEN, "<|extra_200|>": IMAGE_TOKEN + 1}


def _sam(config: PreTrainedConfig) -> None:
    vision, prompt = config.vision_config, config.prompt_encoder_config
    prompt.image_size, prompt.patch_size = vision.image_size, vision.patch_size
    prompt.image_embedding_size = vision.image_size // vision.patch_size
    vision.output_channels = prompt.hidden_size
    vision.num_pos_feats = prompt.hidden_size // 2


def _moonshine(config: PreTrainedConfig) -> None:
    config.num_key_value_heads = config.num_attention_heads


def _first_stages(config: PreTrainedConfig) -> None:
    config.out_indices = list(range(min(4, config.num_hidden_layers)))


def _matting(config: PreTrainedConfig) -> None:
    config.fusion_hidden_sizes = list(config.fusion_hidden_sizes)
    config.hidden_size = config.backbone_config.hidden_size
    config.backbone_config.num_channels = 4  # an image, and which of its pixels are known


def _first_features(config: PreTrainedConfig) -> None:
    config.backbone_config.out_indices = [1, 2, 3, 4]
    config.num_queries = 4


def _pyramid(config: PreTrainedConfig) -> None:
    config.backbone_channel_list = list(reversed(config.backbone_config.embed_dim_per_stage))


def _vision_tokens(config: PreTrainedConfig) -> None:
    config.vision_start_token_id, config.vision_end_token_id, config.audio_start_token_id = 10, 11, 12


ADJUSTMENTS: dict[str, Callable[[Any], None]] = {
    "beit": _first_stages,
    "blip-2": set_fields(image_token_index=IMAGE_TOKEN),
    "chameleon": _vocabulary_of_images,
    "cohere_compass_text": _rope_of_each_kind,
    "dbrx": lambda config: set_fields(rope_theta=1e4, clip_qkv=8.0)(config.attn_config),
    "deepseek_ocr2_text": lambda config: setattr(config, "mlp_layer_types", ["dense"] * config.num_hidden_layers),
    "efficientnet": set_fields(hidden_dim=2560),  # the width of its last convolution is no field
    "emu3": _vocabulary_of_images,
    "granite4_vision": set_fields(deepstack_layer_map=[], spatial_layers=[], downsample_rate="1/2"),
    "hiera": set_fields(decoder_hidden_size=16, decoder_depth=2, decoder_num_heads=2),
    "hifigan": set_fields(model_in_dim=80),  # the number of mel bins, which is no width
    "instructblip": set_fields(image_token_index=IMAGE_TOKEN),
    "instructblipvideo": set_fields(video_token_index=IMAGE_TOKEN),
    "longformer": lambda config: setattr(config, "attention_window", [4] * config.num_hidden_layers),
    "mimi": _codec,
    "mistral_large4_text": lambda config: setattr(config, "kv_source_layers", list(range(config.num_hidden_layers))),
    "moonshine_streaming": _moonshine,
    "pp_doclayout_v2": lambda config: setattr(config, "class_thresholds", [0.5] * config.num_labels),
    "pp_ocrv5_server_det": _intraclass_block,
    "pp_ocrv6_medium_det": _intraclass_block,
    "qwen3_omni_moe_talker_text": set_fields(shared_expert_intermediate_size=32),
    "qwen2_5_omni_thinker": _vision_tokens,
    "qwen3_omni_moe_thinker": _vision_tokens,
    "qwen4_exp_text": set_fields(
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=64, indexer_budget=8, indexer_compress_ratio=2
    ),
    "reformer": _reformer,
    "rf_detr": _first_features,
    "sam": _sam,
    "sam2_hiera_det_model": set_fields(global_attention_blocks=[]),
    "sam2_vision_model": _pyramid,
    "sam_hq": _sam,
    "sapiens2": _sapiens_head,
    "shieldgemma2": set_fields(yes_token_index=8, no_token_index=9),
    "step3p5": set_fields(sliding_window=4),
    "vitmatte": _matting,
    "vjepa2": set_fields(crop_size=32, frames_per_clip=4),
    "wav2vec2-bert": set_fields(vocab_size=32),
}
"""Model type of a configuration or of a part of one -> what is changed in it."""

ADJUSTMENTS_FOR_CLASS: dict[str, Callable[[Any], None]] = {
    "Blip2ForImageTextRetrieval": lambda config: setattr(config.qformer_config, "use_qformer_text_input", True),
    "ReformerModelWithLMHead": set_fields(is_decoder=True),
}
"""Name of a class -> what is changed in its configuration."""
