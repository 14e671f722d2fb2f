"""Inputs of models that `dummy_batch` does not know, or not all of which it makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from tiny_adjustments import IMAGE_TOKEN
from transformers import PreTrainedModel

from hf_pipetransformer.model.dummy_inputs import dummy_batch

ROWS = 2
Batch = dict[str, Any]


def tiny_batch(model: PreTrainedModel) -> Batch:
    """A batch of two samples: that of `dummy_batch`, or with what else the class needs.

    Raises:
        Exception: whatever the model or `dummy_batch` raises for a class that is not known here.
    """
    name = type(model).__name__
    if name in OWN:
        return OWN[name](model)
    batch: Batch = dict(dummy_batch(model, rows=ROWS))
    for parameter, make in BESIDE.items():
        if parameter in _required(model) and parameter not in batch:
            batch[parameter] = make(model, batch)
    return ADDED[name](model, batch) if name in ADDED else batch


def _required(model: PreTrainedModel) -> set[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD}


def _ids(tokens: int = 8, start: int = 20) -> torch.Tensor:
    return torch.arange(start, start + ROWS * tokens).view(ROWS, tokens)


def _text(tokens: int = 8) -> Batch:
    ids = _ids(tokens)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _image(size: int, channels: int = 3) -> torch.Tensor:
    return torch.zeros(ROWS, channels, size, size)


def _masked_patches(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    config = model.config
    frames = config.num_frames // config.tubelet_size
    patches = frames * (config.image_size // config.patch_size) ** 2
    return (torch.arange(patches) % 2).bool().expand(ROWS, patches)


BESIDE: dict[str, Callable[[PreTrainedModel, Batch], torch.Tensor]] = {
    "bool_masked_pos": _masked_patches,
    "input_ids": lambda model, batch: _ids(),
    "qformer_input_ids": lambda model, batch: _ids(),
}
"""Parameter of forward without a default -> how its value is made."""


def _bbox(model: PreTrainedModel, batch: Batch) -> Batch:
    box = torch.tensor([0.1, 0.1, 0.5, 0.5])
    return {**batch, "bbox": box.expand(ROWS, batch["input_ids"].shape[-1], 4)}


def _picture(model: PreTrainedModel, batch: Batch) -> Batch:
    image = _image(model.config.image_size)
    return {**batch, "pixel_values": image, "pixel_mask": torch.ones(image[:, 0].shape, dtype=torch.long)}


def _no_images(model: PreTrainedModel, batch: Batch) -> Batch:
    return {**batch, "mm_token_type_ids": torch.zeros_like(batch["input_ids"])}


def _three_separators(model: PreTrainedModel, batch: Batch) -> Batch:
    ids = batch["input_ids"].clone()
    ids[ids == model.config.sep_token_id] = 7
    ids[..., [2, 4, 7]] = model.config.sep_token_id
    return {**batch, "input_ids": ids}


def _question(model: PreTrainedModel, batch: Batch) -> Batch:
    ids = batch["input_ids"].clone()
    ids[:, 3] = model.config.question_token_id
    return {**batch, "input_ids": ids}


def _decoder_ids(model: PreTrainedModel, batch: Batch) -> Batch:
    return {**batch, "pixel_values": _image(model.config.vision_config.image_size), "decoder_input_ids": _ids()}


def _visual_features(model: PreTrainedModel, batch: Batch) -> Batch:
    config = model.config
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, 5, config.visual_feat_dim, generator=generator)
    return {
        **batch,
        "visual_feats": features,
        "visual_pos": torch.rand(ROWS, 5, config.visual_pos_dim, generator=generator),
    }


def _noise(model: PreTrainedModel, batch: Batch) -> Batch:
    config = model.config
    patches = (config.image_size // config.patch_size) ** 2
    return {**batch, "noise": torch.rand(ROWS, patches, generator=torch.Generator().manual_seed(0))}


def _queries(model: PreTrainedModel, batch: Batch) -> Batch:
    """An image, with as many tokens in its place as there are queries."""
    config = model.config
    image = _image(config.vision_config.image_size)
    token = getattr(config, "image_token_index", None)
    if token is None:  # a video of one image
        image, token = image[:, None], config.video_token_index
    ids = torch.cat([torch.full((ROWS, config.num_query_tokens), token), _ids()], dim=1)
    return {**batch, "pixel_values": image, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _spectrogram(model: PreTrainedModel, batch: Batch) -> Batch:
    generator = torch.Generator().manual_seed(0)
    batch.pop("decoder_input_ids", None)
    return {**batch, "decoder_input_values": torch.randn(ROWS, 8, model.config.num_mel_bins, generator=generator)}


ADDED: dict[str, Callable[[PreTrainedModel, Batch], Batch]] = {
    "Blip2ForConditionalGeneration": _queries,
    "BlipForQuestionAnswering": _decoder_ids,
    "BrosForTokenClassification": _bbox,
    "InstructBlipForConditionalGeneration": _queries,
    "InstructBlipVideoForConditionalGeneration": _queries,
    "LongformerForMultipleChoice": _three_separators,
    "LongformerForQuestionAnswering": _three_separators,
    "LxmertForPreTraining": _visual_features,
    "LxmertForQuestionAnswering": _visual_features,
    "Molmo2ForConditionalGeneration": _no_images,
    "SpeechT5ForTextToSpeech": _spectrogram,
    "SplinterForPreTraining": _question,
    "UdopForConditionalGeneration": _bbox,
    "ViTMAEForPreTraining": _noise,
    "ViltForQuestionAnswering": _picture,
}
"""Class -> what is added to `dummy_batch`."""


def _pairs_of_images(model: PreTrainedModel) -> Batch:
    return {"pixel_values": torch.zeros(ROWS, 2, 3, 64, 64)}


def _patches(model: PreTrainedModel) -> Batch:
    vision = getattr(model.config, "vision_config", model.config)
    patches = 4
    batch: Batch = {
        "pixel_values": torch.zeros(ROWS, patches, vision.num_channels * vision.patch_size**2),
        "pixel_attention_mask": torch.ones(ROWS, patches, dtype=torch.long),
        "spatial_shapes": torch.tensor([[2, 2]] * ROWS),
    }
    return {**batch, **_text()} if "input_ids" in inspect.signature(model.forward).parameters else batch


def _codebooks(model: PreTrainedModel) -> Batch:
    decoder = getattr(model.config, "decoder", model.config)
    ids = torch.arange(ROWS * decoder.num_codebooks * 8).view(ROWS * decoder.num_codebooks, 8) % decoder.vocab_size
    if decoder is model.config:
        return {"input_ids": ids}
    return {**_text(), "decoder_input_ids": ids}


def _channels(model: PreTrainedModel) -> Batch:
    decoder = model.config.decoder_config
    ids = torch.arange(ROWS * 8 * decoder.num_channels).view(ROWS, 8, decoder.num_channels) % decoder.vocab_size
    return {**_text(), "decoder_input_ids": ids}


def _image_in_text(model: PreTrainedModel) -> Batch:
    queries = model.config.latent_query_num
    ids = torch.cat([torch.full((ROWS, queries), IMAGE_TOKEN), _ids()], dim=1)
    return {
        "pixel_values": _image(model.config.vision_config.image_size),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "image_embeds_position_mask": (ids == IMAGE_TOKEN).long(),
    }


def _documents(model: PreTrainedModel) -> Batch:
    ids = _ids()
    size = model.config.vision_config.image_size
    return {
        **_text(),
        "pixel_values": torch.zeros(ROWS, 1, 3, size, size),
        "image_attention_mask": torch.ones(ROWS, ids.shape[1], 1, dtype=torch.long),
    }


def _lines(model: PreTrainedModel) -> Batch:
    return {"pixel_values": torch.zeros(ROWS, 3, 48, 320)}


def _four_channels(model: PreTrainedModel) -> Batch:
    return {"pixel_values": torch.zeros(ROWS, 4, 64, 64)}


def _large_image(model: PreTrainedModel) -> Batch:
    smallest = min(model.config.scaled_images_ratios)
    return {"pixel_values": _image(int(model.config.patch_size / smallest))}


def _retrieval(model: PreTrainedModel) -> Batch:
    return {**_text(), "pixel_values": _image(model.config.vision_config.image_size)}


def _audio_and_text(model: PreTrainedModel) -> Batch:
    ids = torch.arange(ROWS * 8 * (model.config.num_codebooks + 1)).view(ROWS, 8, -1) % model.config.vocab_size
    return {"input_ids": ids % model.config.codebook_vocab_size}


def _wave(model: PreTrainedModel) -> Batch:
    return {"input_values": torch.zeros(ROWS, 6400), "decoder_input_ids": _ids()}


def _features(model: PreTrainedModel) -> Batch:
    encoder = getattr(model.config, "encoder_config", None) or getattr(model.config, "audio_config", model.config)
    width = encoder.num_mel_bins * (4 if type(model).__name__ == "GraniteSpeech5ForCTC" else 1)  # four frames at once
    batch: Batch = {"input_features": torch.zeros(ROWS, 64, width)}
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        batch["decoder_input_ids"] = _ids()
    return batch


def _series(model: PreTrainedModel) -> Batch:
    config = model.config
    return {"past_values": torch.zeros(ROWS, config.context_length, config.num_input_channels)}


def _one_series(model: PreTrainedModel) -> Batch:
    return {"past_values": torch.zeros(ROWS, model.config.context_length)}


def _perceiver_image(model: PreTrainedModel) -> Batch:
    return {"inputs": _image(model.config.image_size)}


def _perceiver_text(model: PreTrainedModel) -> Batch:
    ids = _ids(model.config.max_position_embeddings) % model.config.vocab_size
    return {"inputs": ids, "attention_mask": torch.ones_like(ids)}


def _flattened_patches(model: PreTrainedModel) -> Batch:
    patches = torch.zeros(ROWS, 4, model.config.vision_config.patch_embed_hidden_size + 2)
    patches[..., 0] = patches[..., 1] = torch.arange(1, 5)  # row and column
    return {"flattened_patches": patches, "attention_mask": torch.ones(ROWS, 4), "decoder_input_ids": _ids()}


def _speech_to_text(model: PreTrainedModel) -> Batch:
    return {"input_values": torch.zeros(ROWS, 1200), "decoder_input_ids": _ids()}


def _clip(model: PreTrainedModel) -> Batch:
    vision = getattr(model.config, "vision_config", model.config)
    size, frames = getattr(vision, "image_size", None) or vision.crop_size, 4
    size = size if isinstance(size, int) else size[0]
    for name in ("num_frames", "frames_per_clip"):
        frames = getattr(vision, name, frames)
    batch: Batch = {"pixel_values_videos": torch.zeros(ROWS, frames, 3, size, size)}
    return {**batch, **_text()} if "input_ids" in inspect.signature(model.forward).parameters else batch


def _with_speech_labels(model: PreTrainedModel) -> Batch:
    config = getattr(model.config, "model_config", model.config)
    generator = torch.Generator().manual_seed(0)
    text = _text()
    tokens = text["input_ids"].shape[1]
    return {
        **text,
        "duration_labels": torch.ones(ROWS, tokens, dtype=torch.long),  # a frame for each token
        "spectrogram_labels": torch.randn(ROWS, tokens, config.num_mel_bins, generator=generator),
        "pitch_labels": torch.randn(ROWS, tokens, 1, generator=generator),
        "energy_labels": torch.randn(ROWS, tokens, 1, generator=generator),
    }


def _pose(model: PreTrainedModel) -> Batch:
    height, width = model.config.backbone_config.image_size
    return {"pixel_values": torch.zeros(ROWS, 3, height, width)}


OWN: dict[str, Callable[[PreTrainedModel], Batch]] = {
    "Blip2ForImageTextRetrieval": _retrieval,
    "CanaryForConditionalGeneration": _features,
    "CohereAsrForConditionalGeneration": _features,
    "DepthProForDepthEstimation": _large_image,
    "DiaForConditionalGeneration": _channels,
    "EfficientLoFTRForKeypointMatching": _pairs_of_images,
    "FastSpeech2ConformerModel": _with_speech_labels,
    "FastSpeech2ConformerWithHifiGan": _with_speech_labels,
    "GraniteSpeech5ForCTC": _features,
    "IdeficsForVisionText2Text": _documents,
    "Kosmos2ForConditionalGeneration": _image_in_text,
    "KyutaiSpeechToTextForConditionalGeneration": _audio_and_text,
    "LasrForCTC": _features,
    "LightGlueForKeypointMatching": _pairs_of_images,
    "LwDetrForObjectDetection": lambda model: {"pixel_values": _image(192)},
    "MoonshineForConditionalGeneration": _wave,
    "Nemotron3DiarizationForAudioFrameClassification": _features,
    "Nemotron3_5AsrForRNNT": _features,
    "NemotronAsrStreamingForRNNT": _features,
    "ParakeetForCTC": _features,
    "ParakeetForRNNT": _features,
    "ParakeetForTDT": _features,
    "PatchTSMixerForRegression": _series,
    "PatchTSMixerForTimeSeriesClassification": _series,
    "PatchTSTForClassification": _series,
    "PatchTSTForRegression": _series,
    "PerceiverForImageClassificationConvProcessing": _perceiver_image,
    "PerceiverForImageClassificationFourier": _perceiver_image,
    "PerceiverForImageClassificationLearned": _perceiver_image,
    "PerceiverForMaskedLM": _perceiver_text,
    "PerceiverForSequenceClassification": _perceiver_text,
    "Pix2StructForConditionalGeneration": _flattened_patches,
    "SpeechEncoderDecoderModel": _speech_to_text,
    "TimesFm2_5ModelForPrediction": _one_series,
    "TimesFmModelForPrediction": _one_series,
    "VJEPA2ForVideoClassification": _clip,
    "VideoPrismClipModel": _clip,
    "VideoPrismForVideoClassification": _clip,
    "VideomtForUniversalSegmentation": _clip,
    "MoonshineStreamingForConditionalGeneration": _wave,
    "MusicgenForCausalLM": _codebooks,
    "MusicgenForConditionalGeneration": _codebooks,
    "MusicgenMelodyForCausalLM": _codebooks,
    "MusicgenMelodyForConditionalGeneration": _codebooks,
    "NemotronH_Omni_Reasoning_V3": lambda model: _text(),
    "PPOCRV5MobileRecForTextRecognition": _lines,
    "PPOCRV5ServerRecForTextRecognition": _lines,
    "PPOCRV6SmallRecForTextRecognition": _lines,
    "PPOCRV6TinyRecForTextRecognition": _lines,
    "Siglip2ForImageClassification": _patches,
    "Siglip2Model": _patches,
    "SuperGlueForKeypointMatching": _pairs_of_images,
    "VitMatteForImageMatting": _four_channels,
    "VitPoseForPoseEstimation": _pose,
}
"""Class -> its whole batch."""
