from __future__ import annotations

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
    ("vit", "auto"): {"pixel_values": (2, 3, 224, 224)},
    ("clip", "base"): {"input_ids": (2, 4), "attention_mask": (2, 4), "pixel_values": (2, 3, 224, 224)},
    ("wav2vec2", "auto"): {"input_values": (2, 5200)},
    ("whisper", "auto"): {"input_features": (2, 80, 3000), "decoder_input_ids": (2, 4)},
}
QUICK_SHAPES = [(model_type, task) for model_type, task in SHAPES if model_type != "whisper"]


def placeholder_model(model_type: str, task: str) -> PreTrainedModel:
    layers = dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "n_layer"), 1)
    config = AutoConfig.for_model(model_type)
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


def test_refused() -> None:
    for arguments in ({"rows": 0}, {"tokens": 0}):
        with pytest.raises(ValueError, match="at least 1 of each"):
            dummy_batch(placeholder_model("bert", "auto"), **arguments)
    with pytest.raises(ValueError, match=r"main input is 'past_values'.*Pass your own batch"):
        dummy_batch(placeholder_model("patchtst", "base"))
