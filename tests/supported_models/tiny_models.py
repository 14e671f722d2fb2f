"""Small instances of any transformers architecture, made from its default configuration by rules over field names.

Sizes in a configuration hang together: heads × head_dim = hidden_size, and a projector is as wide as the text model
it feeds. Dividing *every* width by one number keeps all such products, sums and equalities; the number of heads
stays. Layers, experts, vocabulary and images are cut by rules of their own. Where a family has a relation that these
rules break, the next variant changes less:

    width / 16, 4 layers   ->   width / 16, all layers   ->   width / 8, ...   ->   as it is

No list of families is kept here but `COMPOSED`: configurations that cannot be made without parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
import transformers as hf
from accelerate import init_empty_weights
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

LAYERS = 4
VOCABULARY = 1024
EXPERTS = 16
LARGEST = 150_000_000
"""Parameters of the largest model that is built: beyond it a variant is not tried."""

_LAYER_COUNT = re.compile(r"(^|_)(n_)?layers?$|num_blocks$|^depth$|_depth$|num_hidden_groups$")
_STAGE_DEPTHS = re.compile(r"depths?$|blocks_per_stage$|num_block_repeats$|block_sizes$|stage_num_blocks$")
_EXPERT_COUNT = re.compile(r"num_(local_)?experts$|n_routed_experts$|moe_num_experts$")
_PER_TOKEN = re.compile(r"experts_per_tok(en)?$|^moe_k$|moe_topk$")
_WIDTH = re.compile(
    r"hidden|intermediate|embed|model|ffn|feed_?forward|mlp|proj|inner|latent|bottleneck|width|units|channels|rank"
    r"|dim|size|features|n_embd|d_head|^d_[a-z]+$"
)
_NO_WIDTH = re.compile(
    r"vocab|image|img|patch|kernel|window|block|chunk|crop|pool|position|num_channels|codebook_size|context|max_|min_"
    r"|length|batch|heads$|layers?$|stride|grid|tubelet|factor|frame|sampling|mel|resolution|buckets|roi|cache|group"
    r"|mask_size|theta|index|num_labels|_id$|^num_"
)
_TOKEN = re.compile(r"token_ids?$|token_index$|(^|_)(pad|bos|eos|mask|unk|image|video|audio)_(id|idx|index)$")
_RANDOM = re.compile(r"drop|jitter|mask_time_prob|mask_feature_prob|noise_std")
_DROPPED_LAYERS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
_RETURNED_FROM_ALL = ("output_router_logits", "output_hidden_states", "output_attentions")


@dataclass(frozen=True)
class Variant:
    """How much smaller than the default configuration."""

    divide_widths_by: int
    cut_layers: bool
    small_images: bool
    fill_gaps: bool = True

    def __str__(self) -> str:
        parts = [f"width / {self.divide_widths_by}"] if self.divide_widths_by > 1 else []
        parts += [f"{LAYERS} layers"] if self.cut_layers else []
        parts += ["small images"] if self.small_images else []
        return ", ".join(parts) or "default sizes"


VARIANTS = (
    Variant(16, True, True, fill_gaps=False),
    Variant(16, True, True),
    Variant(16, True, False),
    Variant(16, False, False),
    Variant(8, True, True),
    Variant(8, False, False),
    Variant(4, True, True),
    Variant(4, False, False),
    Variant(1, True, True),
    Variant(1, True, False),
    Variant(1, False, False),
)
"""In the order of the trials."""


@dataclass
class TinyConfig:
    """A configuration made small, and the settings that were switched off because the library refuses them."""

    config: PreTrainedConfig
    conditions: list[str] = field(default_factory=list)


def tiny_config(model_type: str, variant: Variant) -> TinyConfig:
    """The default configuration of a model type, made small, without anything random.

    Args:
        model_type: The model type.
        variant: How small.

    Raises:
        Exception: the family's configuration cannot be made without arguments; the type is its own.
    """
    config = COMPOSED[model_type]() if model_type in COMPOSED else CONFIG_MAPPING[model_type]()
    tiny = TinyConfig(config)
    tokens: dict[int, int] = {}
    if sum(_without_timm(part) for part in _parts(config)):
        tiny.conditions.append("with a backbone of transformers in place of timm's")
    for part in _parts(config):
        _switch_off(part, tiny.conditions)
        _shrink(part, variant, tokens)
        if variant.fill_gaps:
            _fill_gaps(part)
        if getattr(part, "vocab_size", None) and getattr(part, "pad_token_id", 0) is None:
            part.pad_token_id = 0  # classifiers on decoders need one to find the last token
        _whole_heads(part)
    return tiny


def build(
    cls: type[PreTrainedModel], config: PreTrainedConfig, *, large_weights: bool = True, check_size: bool = True
) -> PreTrainedModel:
    """A model with random weights, the same at every call.

    Args:
        cls: The class of the model.
        config: Its configuration.
        large_weights: Draw weights so large that every layer matters. With the usual standard deviation of 0.02 a
            narrow layer moves the result by less than rounding, and leaving it out would not be noticed.
        check_size: Count the parameters first, without memory for them. It takes as long as the building.

    Raises:
        MemoryError: if it would have more than `LARGEST` parameters.
    """
    config = _for_class(config, cls)
    if check_size:
        with init_empty_weights():
            number = sum(parameter.numel() for parameter in cls(config).parameters())
        if number > LARGEST:
            raise MemoryError(f"{number:,} parameters are more than {LARGEST:,}")
    torch.manual_seed(0)
    model = cls(config)
    if large_weights:
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.is_floating_point() or not parameter.numel():
                    continue
                if parameter.ndim > 1:
                    parameter.normal_(std=parameter[0].numel() ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model.float().train()


def _for_class(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> PreTrainedConfig:
    """The part of a configuration that the class is made from, such as the text model's."""
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    return next((part for part in _parts(config) if isinstance(part, wanted)), config)


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _switch_off(config: PreTrainedConfig, conditions: list[str]) -> None:
    """Set the probability of everything random to zero; note the settings that the library refuses by name."""
    for name, value in list(vars(config).items()):
        asked_for = name in _DROPPED_LAYERS or name in _RETURNED_FROM_ALL
        if asked_for and value:
            off = False if name in _RETURNED_FROM_ALL else 0.0
            setattr(config, name, off)
            condition = f"{name}={off}"
            if condition not in conditions:
                conditions.append(condition)
        elif isinstance(value, float) and _RANDOM.search(name):
            setattr(config, name, 0.0)


def _shrink(config: PreTrainedConfig, variant: Variant, tokens: dict[int, int]) -> None:
    fields = vars(config)
    cut = variant.cut_layers
    num_layers = {v for n, v in fields.items() if type(v) is int and _LAYER_COUNT.search(n) and v > LAYERS}
    for name, value in list(fields.items()):
        if name.startswith("_") and name != "_out_indices":
            continue
        new = _smaller(name, value, variant)
        if new is None and cut and isinstance(value, (list, tuple)) and len(value) in num_layers and value:
            new = type(value)(_with_every_kind(list(value)))
        if new is None and _TOKEN.search(name):
            new = _token(value, tokens)
        if new is not None and new != value:
            setattr(config, name, new)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and isinstance(rope.get("mrope_section"), list):
        rope["mrope_section"] = _sections(rope["mrope_section"], variant.divide_widths_by)
    if variant.small_images:
        _shrink_image(config)


def _fill_gaps(config: PreTrainedConfig) -> None:
    """Set values that the model needs and the default configuration lacks. Caches of keys and values are off."""
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    usual = {
        "vocab_size": 64,
        "mask_token_id": 4,
        "num_key_value_heads": heads,
        "head_dim": width // heads if type(width) is int and type(heads) is int and heads else None,
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "num_experts": 8,
        "n_shared_experts": 1,
        "attn_layer_indices": [1, 3],
        "default_language": next(iter(getattr(config, "languages", None) or ()), None),
        "layer_types": ["full_attention"] * layers if type(layers) is int else None,
    }
    for name, value in usual.items():
        if name in vars(config) and getattr(config, name) is None and value is not None:
            setattr(config, name, value)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    config._experts_implementation = "eager"  # the grouped kernel wants larger matrices
    rope, head_dim = getattr(config, "rope_parameters", None), _head_dim(config) or usual["head_dim"]
    if isinstance(rope, dict) and "rope_theta" in rope and "mrope_section" not in rope and type(head_dim) is int:
        frequencies = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        third = frequencies // 3
        rope["mrope_section"] = [frequencies - 2 * third, third, third]  # the models' own default is for large heads


def _head_dim(config: PreTrainedConfig) -> Any:
    try:
        return getattr(config, "head_dim", None)
    except Exception:  # layers have different ones, and the configuration refuses to say which
        return None


def _whole_heads(config: PreTrainedConfig) -> None:
    """Fewer attention heads where a width that was divided is no multiple of them any more."""
    for width_name, heads_name in (("hidden_size", "num_attention_heads"), ("d_model", "num_attention_heads")):
        fields = vars(config)
        width, heads = fields.get(width_name), fields.get(heads_name)
        if type(width) is int and type(heads) is int and heads and width % heads and fields.get("head_dim") is None:
            setattr(config, heads_name, gcd(width, heads))


def _without_timm(config: PreTrainedConfig) -> bool:
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


def _smaller(name: str, value: Any, variant: Variant) -> Any:
    """The value of one field made small, or None where it is no size."""
    by = variant.divide_widths_by
    if type(value) is int:
        if _LAYER_COUNT.search(name):
            return min(value, LAYERS) if variant.cut_layers else None
        if "vocab" in name and value > VOCABULARY:
            return VOCABULARY
        if _EXPERT_COUNT.search(name):
            return min(value, EXPERTS)
        if _PER_TOKEN.search(name):
            return min(value, EXPERTS // 2)
        if name == "first_k_dense_replace" and variant.cut_layers:
            return min(value, 1)
        if by > 1 and value >= 32 and value % by == 0 and _is_width(name):
            return value // by
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        if _STAGE_DEPTHS.search(name):
            return type(value)(min(item, 2) for item in value) if variant.cut_layers else None
        if by > 1 and _is_width(name) and all(item < 32 or item % by == 0 for item in value):
            return type(value)(item // by if item >= 32 else item for item in value)
    return None


def _is_width(name: str) -> bool:
    return bool(_WIDTH.search(name)) and not _NO_WIDTH.search(name)


def _with_every_kind(items: list[Any]) -> list[Any]:
    """The first entries of a list with one for each layer; where they leave a kind out, it takes the last place."""
    chosen = items[:LAYERS]
    try:
        missing = [kind for kind in dict.fromkeys(items) if kind not in chosen]
    except TypeError:  # lists of lists
        return chosen
    for place, kind in zip(range(LAYERS - 1, 0, -1), missing, strict=False):
        chosen[place] = kind
    return chosen


def _token(value: Any, tokens: dict[int, int]) -> Any:
    """Token ids beyond the vocabulary move to its end, equal ones to the same place."""
    if isinstance(value, (list, tuple)):
        return type(value)(_token(item, tokens) for item in value)
    if type(value) is not int or value < VOCABULARY - 100:
        return value
    return tokens.setdefault(value, VOCABULARY - 1 - len(tokens))


def _sections(sections: list[int], by: int) -> list[int]:
    """The share of each axis in the rotary frequencies; their sum is half a head."""
    smaller = [max(1, item // by) for item in sections]
    smaller[0] = max(1, sum(sections) // by - sum(smaller[1:]))
    return smaller


def _shrink_image(config: PreTrainedConfig) -> None:
    """Two patches in each direction; 64 pixels where stages halve the image again and again."""
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if size is None:
        return
    staged = any(_STAGE_DEPTHS.search(name) and isinstance(v, (list, tuple)) for name, v in vars(config).items())
    if staged or type(patch) is not int:
        new = 64
    else:
        new = 2 * patch
    if type(size) is int and size > new:
        config.image_size = new
    elif isinstance(size, (list, tuple)) and all(type(item) is int and item > new for item in size):
        config.image_size = type(size)(new for _ in size)


def _text_decoder() -> PreTrainedConfig:
    return hf.BertConfig(is_decoder=True, add_cross_attention=True)


COMPOSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "encoder-decoder": lambda: _started(
        hf.EncoderDecoderConfig.from_encoder_decoder_configs(hf.BertConfig(), _text_decoder())
    ),
    "vision-encoder-decoder": lambda: _started(
        hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(hf.ViTConfig(), _text_decoder())
    ),
    "speech-encoder-decoder": lambda: _started(
        hf.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(hf.Wav2Vec2Config(), _text_decoder())
    ),
    "vision-text-dual-encoder": lambda: hf.VisionTextDualEncoderConfig.from_vision_text_configs(
        hf.ViTConfig(), hf.BertConfig()
    ),
}
"""Model types with a configuration that cannot be made without parts."""


def _started(config: PreTrainedConfig) -> PreTrainedConfig:
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config
