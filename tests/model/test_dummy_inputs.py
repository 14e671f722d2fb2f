from __future__ import annotations

from typing import Any

import pytest
import torch
from selection import few
from transformers import AutoConfig, PreTrainedModel

from hf_pipetransformer.forecast.placeholder_model import build_placeholder_model, model_class
from hf_pipetransformer.model.dummy_inputs import dummy_batch

# model type, task -> shape of each input for 2 rows of 4 tokens
SHAPES: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {
    ("bert", "auto"): {"input_ids": (2, 4), "attention_mask": (2, 4)},
    ("bert", "multiple-choice"): {"input_ids": (2, 2, 4), "attention_mask": (2, 2, 4)},
    ("t5", "auto"): {"input_ids": (2, 4), "attention_mask": (2, 4), "decoder_input_ids": (2, 4)},
    ("t5", "token-classification"): {"input_ids": (2, 4), "attention_mask": (2, 4)},
    ("bart", "sequence-classification"): {
        "input_ids": (2, 4),
        "attention_mask": (2, 4),
        "decoder_input_ids": (2, 4),
    },
    ("vit", "auto"): {"pixel_values": (2, 3, 224, 224)},
    ("videomae", "auto"): {"pixel_values": (2, 16, 3, 224, 224)},
    ("clip", "base"): {"input_ids": (2, 4), "attention_mask": (2, 4), "pixel_values": (2, 3, 224, 224)},
    ("wav2vec2", "auto"): {"input_values": (2, 5200)},
    ("audio-spectrogram-transformer", "auto"): {"input_values": (2, 1024, 128)},
    ("whisper", "auto"): {"input_features": (2, 80, 3000), "decoder_input_ids": (2, 4)},
    ("speech_to_text", "auto"): {"input_features": (2, 64, 80), "decoder_input_ids": (2, 4)},
}
_LARGE_INPUTS = ("videomae", "whisper", "audio-spectrogram-transformer")
QUICK_SHAPES = [(model_type, task) for model_type, task in SHAPES if model_type not in _LARGE_INPUTS]


def placeholder_model(model_type: str, task: str, **changes: Any) -> PreTrainedModel:
    layers = dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "n_layer"), 1)
    config = AutoConfig.for_model(model_type, **changes)
    for name, value in layers.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, value)
    return build_placeholder_model(config, model_class(config, task)).eval()


@pytest.mark.parametrize(("model_type", "task"), few(SHAPES, *QUICK_SHAPES))
def test_model_accepts_its_batch(model_type: str, task: str) -> None:
    model = placeholder_model(model_type, task)
    batch = dummy_batch(model, rows=2, tokens=4)
    assert {name: tuple(value.shape) for name, value in batch.items()} == SHAPES[model_type, task]
    with torch.no_grad():
        output = model(**batch)
    assert all(value.shape[0] == 2 for name, value in output.items() if name in ("logits", "last_hidden_state"))


def test_videos_under_a_name_of_their_own() -> None:
    model = placeholder_model("vjepa2", "video-classification", frames_per_clip=4, crop_size=32)
    batch = dummy_batch(model)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {"pixel_values_videos": (2, 4, 3, 32, 32)}
    with torch.no_grad():
        assert model(**batch).logits.shape[0] == 2


def test_tokens_are_ordinary_but_for_the_last() -> None:
    model = placeholder_model("bart", "auto")  # 0, 1, 2, 3 have special meanings
    ids = dummy_batch(model, rows=2, tokens=4)["input_ids"]
    assert ids[:, -1].tolist() == [model.config.eos_token_id] * 2
    assert ids[:, :-1].min() > 2
    assert ids.max() < model.config.vocab_size


@pytest.mark.parametrize("size", [[32, 48], (32, 48)])
def test_images_need_not_be_square(size: Any) -> None:
    model = placeholder_model("vit", "auto", image_size=32)
    model.config.image_size = size
    model.config.num_channels = 1
    assert dummy_batch(model)["pixel_values"].shape == (2, 1, 32, 48)


@pytest.mark.parametrize("arguments", [{"rows": 0}, {"tokens": 0}])
def test_refuses_an_empty_batch(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 of each"):
        dummy_batch(placeholder_model("bert", "auto"), **arguments)


def test_refuses_an_unknown_kind_of_input() -> None:
    with pytest.raises(ValueError, match=r"main input is 'past_values'.*Pass your own batch"):
        dummy_batch(placeholder_model("patchtst", "base"))
