"""Tiny models with the patches of all images in one dimension; a sample has 0 to 3 images of several sizes."""

from __future__ import annotations

from typing import Any

import torch
from frozen_runs import SAMPLES, Build, Columns
from model_zoo import FIRST_WORD, IMAGE, LAST_WORD, VOCABULARY, with_large_weights
from torch import nn

START, END, VIDEO = 61, 62, 63
GRIDS = ((1, 2, 2), (1, 2, 4), (1, 4, 4))
MERGED = 4
"""Patches that become one token."""
PIXELS = 3 * 2 * 2 * 2
WORDS = 5
IMAGES = sum(row % 4 for row in range(SAMPLES))

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
}
VISION: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 16, "hidden_size": 16, "mlp_ratio": 2},
    "Qwen2_5_VL": {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 16, "fullatt_block_indexes": [1]},
    "Qwen3VL": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "out_hidden_size": 16,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
}
"""By the beginning of the class's name."""


def tiny(name: str, depth: int = 2) -> nn.Module:
    """A model of random weights.

    Args:
        name: a key of `VISION`.
        depth: number of layers of its vision tower.
    """
    import transformers

    vision = {"depth": depth, "num_heads": 2, "patch_size": 2, "spatial_merge_size": 2, **VISION[name]}
    vision |= {"window_size": 8} if name == "Qwen2_5_VL" else {}
    text = {**TEXT, "head_dim": 8} if name == "Qwen3VL" else TEXT
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, f"{name}ForConditionalGeneration")(config)
        return with_large_weights(model).train()


def with_images(numbers: list[int]) -> Columns:
    """The columns of samples with these numbers of images."""
    generator = torch.Generator().manual_seed(1)
    columns: dict[str, Any] = {"input_ids": [], "pixel_values": [], "image_grid_thw": []}
    for row, number in enumerate(numbers):
        grids = torch.tensor([GRIDS[(row + image) % len(GRIDS)] for image in range(number)], dtype=torch.long).view(
            -1, 3
        )
        images = [[START, *[IMAGE] * (int(grid.prod()) // MERGED), END] for grid in grids]
        words = torch.randint(FIRST_WORD, LAST_WORD, (WORDS + row % 3,), generator=generator).tolist()
        columns["input_ids"].append(torch.tensor([token for image in images for token in image] + words))
        columns["pixel_values"].append(torch.randn(int(grids.prod(1).sum()), PIXELS, generator=generator))
        columns["image_grid_thw"].append(grids)
    return columns


def vlm(name: str, numbers: tuple[int, ...] = tuple(row % 4 for row in range(SAMPLES)), depth: int = 2) -> Build:
    """A model with a frozen vision tower, and its samples."""

    def build() -> tuple[nn.Module, Columns]:
        model = tiny(name, depth)
        model.get_submodule("model.visual").requires_grad_(False)
        return model, with_images(list(numbers))

    return build


def vlm_with_trained_merger(name: str) -> Build:
    """A model with a frozen vision tower, except for the modules that join its patches."""

    def build() -> tuple[nn.Module, Columns]:
        model, columns = vlm(name)()
        for of, parameter in model.named_parameters():
            if "merger" in of:
                parameter.requires_grad_(True)
        return model, columns

    return build


def collate_images(rows: list[Columns]) -> dict[str, Any]:
    """As the processor does it: texts are padded on the right; a batch without images has no inputs for them."""
    ids = nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.tensor([len(row["input_ids"]) for row in rows])[:, None]).long()
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "labels": ids.masked_fill((mask == 0) | (ids == IMAGE), -100),
    }
    images = {name: torch.cat([row[name] for row in rows]) for name in ("pixel_values", "image_grid_thw")}
    return {**batch, **images} if len(images["image_grid_thw"]) else batch
