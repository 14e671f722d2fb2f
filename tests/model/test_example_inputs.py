from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from hf_pipetransformer.errors import UnsupportedModelError
from hf_pipetransformer.model.example_inputs import example_inputs

TWO_SAMPLES = {"input_ids": torch.ones(2, 16, dtype=torch.long)}
BATCH = {"words": torch.ones(4, 8, dtype=torch.long)}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(9, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embeddings(input_ids)


class OwnBert(BertForSequenceClassification):
    """A user's class. Models of transformers have `dummy_inputs` as a property without a setter."""


def test_a_batch_without_inputs_of_the_model() -> None:
    """The remedy of the message works for a plain module and for a model of transformers."""
    with pytest.raises(UnsupportedModelError, match="give the model's class an attribute dummy_inputs"):
        example_inputs(Tagger(), BATCH, ())
    bert = OwnBert(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    for model in (Tagger(), bert):
        type(model).dummy_inputs = TWO_SAMPLES
        (place,) = example_inputs(model, BATCH, ())
        assert place.are_made
        assert place.of(model, BATCH).keys() == TWO_SAMPLES.keys()
