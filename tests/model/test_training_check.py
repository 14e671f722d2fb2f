"""What a stage computes in training mode is checked before the model is split."""

from __future__ import annotations

from model_zoo import ENCODER, MODELS
from transformers import BertConfig, BertForSequenceClassification

from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.model.training_check import check_training


def test_dropout_does_not_count_as_a_difference() -> None:
    dropping = BertForSequenceClassification(BertConfig(**ENCODER, hidden_dropout_prob=0.5, num_labels=3))
    batch = MODELS["bert-classification"].batch(2)
    assert check_training(LayerStack.discover(dropping, batch), batch) == ""
