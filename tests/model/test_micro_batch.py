"""Batches are cut along their rows, whatever they hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, LlamaConfig, PreTrainedConfig, RobertaConfig

from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.model.micro_batch import (
    batch_rows,
    naming_long_rows,
    slice_rows,
    split_batch,
)


def mixed_batch(rows: int = 4, length: int = 3) -> dict:
    return {
        "return_loss": True,
        "input_ids": torch.arange(rows * length).view(rows, length),
        "labels": torch.arange(rows),
        "texts": [f"row {i}" for i in range(rows)],
        "ids": tuple(range(rows)),
        "scale": torch.tensor(2.0),
        "positions": torch.arange(7),
        "names": ["a", "b"],
        "nothing": None,
    }


def test_what_has_no_rows_goes_into_every_slice():
    batch = mixed_batch()
    part = slice_rows(batch, 1, 3)
    for name in ("return_loss", "scale", "positions", "names", "nothing"):
        assert part[name] is batch[name]
    assert [len(part["texts"]) for part in split_batch(batch, 2)] == [2, 2]
    lists = {"texts": ["a", "b", "c"], "scale": torch.tensor(1.0)}
    assert batch_rows(lists) == 3 and slice_rows(lists, 1, 3)["texts"] == ["b", "c"]


class Model(nn.Module):
    """What is asked about positions."""

    def __init__(self, config: PreTrainedConfig, *tables: nn.Embedding) -> None:
        super().__init__()
        self.config, self.tables = config, nn.ModuleList(tables)


BERT = Model(BertConfig(max_position_embeddings=40), nn.Embedding(90, 2, padding_idx=0), nn.Embedding(40, 2))
ROBERTA = Model(RobertaConfig(max_position_embeddings=42), nn.Embedding(90, 2), nn.Embedding(42, 2, padding_idx=1))
LLAMA = Model(LlamaConfig(max_position_embeddings=40), nn.Embedding(90, 2))
ROWS = {"input_ids": torch.zeros(2, 41, dtype=torch.long)}
DOCUMENTS = {"input_ids": torch.zeros(1, 41, dtype=torch.long), "position_ids": torch.arange(41)[None] % 30}


@pytest.mark.parametrize(("model", "error"), [(BERT, IndexError), (ROBERTA, RuntimeError)])
def test_rows_beyond_the_table_of_positions_are_named(model, error):
    words = (
        r"samples of 41 tokens, but Model supports at most 40 .*max_length=40\). The original error was \w+: no place"
    )
    with pytest.raises(ValueError, match=words), naming_long_rows(model, ROWS):
        raise error("no place")


@pytest.mark.parametrize(
    ("model", "batch", "error"),
    [
        (BERT, {"input_ids": torch.zeros(2, 40)}, IndexError("no place")),
        (BERT, DOCUMENTS, IndexError("no place")),
        (BERT, ROWS, PeerFailedError("no place")),
        (BERT, ROWS, RuntimeError("DefaultCPUAllocator: can't allocate memory")),
        (LLAMA, ROWS, RuntimeError("no place")),
    ],
)
def test_other_errors_are_left_alone(model, batch, error):
    with pytest.raises(type(error)) as raised, naming_long_rows(model, batch):
        raise error
    assert raised.value is error


def test_what_is_inside_of_dicts_and_lists_is_cut_as_well():
    ids = torch.arange(8).view(4, 2)
    batch = {"text": {"input_ids": ids, "more": [torch.arange(4)] * 4, "table": (torch.arange(3),)}}
    assert batch_rows(batch) == 4
    part = slice_rows(batch, 1, 3)
    assert part["text"]["input_ids"].tolist() == [[2, 3], [4, 5]]
    assert [tensor.tolist() for tensor in part["text"]["more"]] == [[1, 2]] * 4
    assert part["text"]["table"][0].tolist() == [0, 1, 2]
