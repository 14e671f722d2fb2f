"""Creates a small batch that any model accepts, from its configuration alone.

Finding the units of a model and measuring their costs needs one forward, but no data: the shapes matter, the
values do not. The inputs of a model depend on its `main_input_name`:

    input_ids            [B, T]                 text; with attention_mask
    input_ids            [B, choices, T]        multiple choice
    pixel_values         [B, C, H, W]           images
    pixel_values         [B, frames, C, H, W]   video; also as pixel_values_videos
    input_values         [B, samples]           raw audio, of the length that the convolutions need
    input_values         [B, frames, mels]      audio spectrogram transformers
    input_features       [B, mels, frames]      Whisper
    input_features       [B, frames, features]  other audio features
    decoder_input_ids    [B, T]                 in addition, for encoder-decoders
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES

DEFAULT_IMAGE_SIZE = 224  # for configurations that do not specify it (ResNet)
NUM_CHOICES = 2
AUDIO_FRAMES = 16  # more than SpecAugment's default mask of 10 frames


def dummy_batch(model: PreTrainedModel, rows: int = 2, *, tokens: int = 8) -> dict[str, torch.Tensor]:
    """Create a batch without labels on the model's device.

    The values are the same at every call and on every rank.

    Args:
        model: The model; its parameters' values are not used.
        rows: Number of samples in the batch, B.
        tokens: Number of tokens of each text sample, T. Images and audio have the size set in the configuration.

    Returns:
        The keyword arguments of the model's forward.

    Raises:
        ValueError: If a number is below 1, or the type of the model's input is unknown.
    """
    if rows < 1 or tokens < 1:
        raise ValueError(f"rows is {rows} and tokens {tokens}, but a batch needs at least 1 of each.")
    accepted = inspect.signature(model.forward).parameters
    config, main = model.config, model.main_input_name
    batch: dict[str, torch.Tensor] = {}
    if main == "input_ids":
        batch.update(_text(model, rows, tokens))
        if "pixel_values" in accepted and _is_two_towers(config):
            batch["pixel_values"] = _pixels(config, rows)
    elif main in ("pixel_values", "pixel_values_videos"):
        batch[main] = _pixels(config, rows)
        if _is_two_towers(config) and "input_ids" in accepted:
            batch.update(_text(model, rows, tokens))
    elif main == "input_values":
        batch[main] = _audio_values(config, rows)
    elif main == "input_features":
        batch[main] = _audio_features(config, rows)
    else:
        batch.update(_own_dummy_inputs(model, rows))
    if config.is_encoder_decoder and "decoder_input_ids" in accepted:
        batch.setdefault("decoder_input_ids", _token_ids(config, rows, tokens, start=_decoder_start(config)))
    parameter = next(model.parameters())
    return {
        name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else value.dtype)
        for name, value in batch.items()
    }


def _text(model: PreTrainedModel, rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return token ids and a mask without padding."""
    ids = _token_ids(model.config, rows, tokens)
    if type(model).__name__ in MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values():
        ids = ids[:, None].expand(rows, NUM_CHOICES, tokens).contiguous()
    batch = {"input_ids": ids}
    if "attention_mask" in inspect.signature(model.forward).parameters:
        batch["attention_mask"] = torch.ones_like(ids)
    return batch


def _token_ids(config: PreTrainedConfig, rows: int, tokens: int, start: int | None = None) -> torch.Tensor:
    """Return ordinary tokens and the end token, because BART and T5 classify by its state. `[B, T]`"""
    text = config.get_text_config()
    vocabulary = int(_first(text, ("vocab_size", "n_vocab", "src_vocab_size"), 1000))
    special = _special_tokens(text) | _special_tokens(config)
    # Ordinary tokens, without special ones. With a tiny vocabulary they are repeated.
    ordinary = [token for token in range(vocabulary) if token not in special][: rows * tokens] or [0]
    ids = torch.tensor([ordinary[i % len(ordinary)] for i in range(rows * tokens)]).view(rows, tokens)
    if start is not None:
        ids[:, 0] = start
        return ids
    end = getattr(text, "eos_token_id", None)
    end = end[0] if isinstance(end, (list, tuple)) and end else end
    if isinstance(end, int) and 0 <= end < vocabulary and end != getattr(text, "pad_token_id", None):
        ids[:, -1] = end
    return ids


def _special_tokens(config: PreTrainedConfig) -> set[int]:
    found = [v for name, v in config.to_dict().items() if name.endswith(("token_id", "token_index"))]
    tokens = (token for value in found for token in (value if isinstance(value, (list, tuple)) else (value,)))
    return {token for token in tokens if isinstance(token, int)}


def _decoder_start(config: PreTrainedConfig) -> int:
    """Return the token that a decoder's input begins with."""
    for source in (config, config.get_text_config(decoder=True)):
        for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
            value = getattr(source, name, None)
            if isinstance(value, int) and value >= 0:
                return value
    return 0


def _is_two_towers(config: PreTrainedConfig) -> bool:
    """Whether text and image are both needed, as inputs of separate encoders (CLIP; not LLaVA)."""
    parts = [getattr(config, name, None) for name in ("text_config", "vision_config")]
    in_text = any(
        getattr(config, name, None) is not None for name in ("image_token_id", "image_token_index", "media_token_id")
    )
    return all(isinstance(part, PreTrainedConfig) for part in parts) and not in_text


def _pixels(config: PreTrainedConfig, rows: int) -> torch.Tensor:
    """Return black images, or videos if the configuration has a number of frames."""
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    size = _first(vision, ("image_size", "input_size", "img_size", "crop_size"), DEFAULT_IMAGE_SIZE)
    height, width = _pair(size)
    channels = int(_first(vision, ("num_channels", "in_channels", "in_chans"), 3))
    frames = _first(vision, ("num_frames", "frames_per_clip"), None)
    leading = (rows,) if frames is None else (rows, int(frames))
    return torch.zeros(*leading, channels, height, width)


def _audio_values(config: PreTrainedConfig, rows: int) -> torch.Tensor:
    """Return a wave that the convolutions turn into some frames, or a spectrogram."""
    kernels, strides = getattr(config, "conv_kernel", None), getattr(config, "conv_stride", None)
    if isinstance(kernels, (list, tuple)) and isinstance(strides, (list, tuple)):
        length = max(AUDIO_FRAMES, int(getattr(config, "mask_time_length", 0) or 0) + 2)
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            length = (length - 1) * stride + kernel
        return torch.linspace(-1, 1, length).expand(rows, length).contiguous()
    mels = _first(config, ("num_mel_bins",), None)
    if mels is None:
        raise ValueError(
            f"No dummy batch can be made for {type(config).__name__}: its configuration has neither conv_kernel and "
            f"conv_stride nor num_mel_bins for its audio input. Pass your own batch."
        )
    return torch.zeros(rows, int(_first(config, ("max_length",), 1024)), int(mels))


def _audio_features(config: PreTrainedConfig, rows: int) -> torch.Tensor:
    """Return audio features. Whisper accepts only one length; for other models they are short."""
    positions = getattr(config, "max_source_positions", None)
    per_frame = _first(config, ("input_feat_per_channel", "feature_projection_input_dim", "input_dim"), None)
    if per_frame is not None:  # Speech2Text, Wav2Vec2-BERT
        return torch.zeros(rows, 4 * AUDIO_FRAMES, int(per_frame))
    mels = _first(config, ("num_mel_bins",), None)
    if mels is None:
        raise ValueError(
            f"No dummy batch can be made for {type(config).__name__}: the width of its input_features is unknown. "
            f"Pass your own batch."
        )
    if positions is None:
        return torch.zeros(rows, 4 * AUDIO_FRAMES, int(mels))
    return torch.zeros(rows, int(mels), 2 * int(positions))  # Whisper: a convolution of stride 2 comes first


def _own_dummy_inputs(model: PreTrainedModel, rows: int) -> dict[str, torch.Tensor]:
    """Return the model's own `dummy_inputs`, truncated or repeated to the number of samples."""
    own: dict[str, Any] = model.dummy_inputs if type(model).dummy_inputs is not PreTrainedModel.dummy_inputs else {}
    if model.main_input_name not in own:
        raise ValueError(
            f"No dummy batch can be made for {type(model).__name__}: its main input is {model.main_input_name!r}, and "
            f"it has no dummy_inputs of its own. Pass your own batch."
        )
    return {
        name: value[torch.arange(rows) % value.shape[0]]
        for name, value in own.items()
        if isinstance(value, torch.Tensor)
    }


def _first(config: PreTrainedConfig, names: Sequence[str], default: Any) -> Any:
    """Return the first of the attributes that is set."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def _pair(size: Any) -> tuple[int, int]:
    """Return height and width from an int, a pair, or a dict as image processors use it."""
    if isinstance(size, dict):
        return int(size["height"]), int(size["width"])
    if isinstance(size, (list, tuple)):
        return int(size[-2] if len(size) > 1 else size[0]), int(size[-1])
    return int(size), int(size)
