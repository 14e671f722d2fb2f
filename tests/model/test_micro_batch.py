"""Rows that are longer than the model's table of positions are named; other errors are not taken for that."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from transformers import BertConfig, LlamaConfig, PreTrainedConfig, RobertaConfig

from hf_pipetransformer.errors import PeerFailedError
from hf_pipetransformer.model.micro_batch import Batch, naming_long_rows


class Model(nn.Module):
    """A model with tables of positions."""

    def __init__(self, config: PreTrainedConfig, *tables: nn.Embedding) -> None:
        super().__init__()
        self.config, self.tables = config, nn.ModuleList(tables)


BERT = Model(BertConfig(max_position_embeddings=40), nn.Embedding(90, 2, padding_idx=0), nn.Embedding(40, 2))
ROBERTA = Model(RobertaConfig(max_position_embeddings=42), nn.Embedding(90, 2), nn.Embedding(42, 2, padding_idx=1))
LLAMA = Model(LlamaConfig(max_position_embeddings=40), nn.Embedding(90, 2))
ROWS = {"input_ids": torch.zeros(2, 41, dtype=torch.long)}
DOCUMENTS = {"input_ids": torch.zeros(1, 41, dtype=torch.long), "position_ids": torch.arange(41)[None] % 30}


@pytest.mark.parametrize(
    ("model", "batch", "error", "is_named"),
    [
        (BERT, ROWS, IndexError("no place"), True),
        (ROBERTA, ROWS, RuntimeError("no place"), True),
        (BERT, {"input_ids": torch.zeros(2, 40)}, IndexError("no place"), False),
        (BERT, DOCUMENTS, IndexError("no place"), False),
        (BERT, ROWS, PeerFailedError("no place"), False),
        (BERT, ROWS, RuntimeError("DefaultCPUAllocator: can't allocate memory"), False),
        (LLAMA, ROWS, RuntimeError("no place"), False),
    ],
)
def test_rows_beyond_the_table_of_positions(model: Model, batch: Batch, error: Exception, is_named: bool) -> None:
    with pytest.raises(ValueError if is_named else type(error)) as raised, naming_long_rows(model, batch):
        raise error
    words = (
        r"samples of 41 tokens, but Model supports at most 40 .*max_length=40\). The original error was \w+: no place"
    )
    assert re.search(words, str(raised.value)) if is_named else raised.value is error
