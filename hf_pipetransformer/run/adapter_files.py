"""Which weights the files of a PEFT model hold: those of its adapters, and of the base none or few."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.utils import is_peft_available

from ..model.elsewhere import computing_with_nan
from ..pipeline.state import WeightState


def names_saved(trainer: Trainer, model: nn.Module, weights: WeightState) -> frozenset[str] | None:
    """Return the names of the parameters that `Trainer.save_model` writes here, or more of them. Not collective.

    A checkpoint of adapters then does not send a base model, which may be a thousand times as large, to rank 0.

    Args:
        trainer: the trainer that saves.
        model: its model.
        weights: the model's weights.

    Returns:
        The names; None if all may be written: the model has no adapters, or user code saves it, or the adapters' files
        hold something that is computed from weights, or that user code has given another name.
    """
    if not is_peft_available():
        return None
    from peft import PeftModel

    saves_as_usual = _is_method(trainer._save, Trainer._save)
    if not (saves_as_usual and isinstance(model, PeftModel)):
        return None
    if not _is_method(model.save_pretrained, PeftModel.save_pretrained):
        return None
    with weights.listing_placeholders():
        state = model.state_dict()
    parameter_of = {alias: name for name, aliases in weights.table.aliases.items() for alias in aliases}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}  # which all processes have
    key_of = {id(tensor): key for key, tensor in state.items()}
    names: set[str] = set()
    for adapter in model.peft_config:
        for tensor in _written(model, state, adapter):
            key = key_of.get(id(tensor), "")
            if key in parameter_of:
                names.add(parameter_of[key])
            elif key not in buffers:
                return None
    return frozenset(names)


def _written(model: Any, state: Mapping[str, torch.Tensor], adapter: str) -> list[torch.Tensor]:
    """The tensors that PEFT chooses for an adapter's file, with the embeddings, which it may add."""
    from peft import get_peft_model_state_dict

    # PEFT asks modules that are saved as a whole for their keys
    with warnings.catch_warnings(), computing_with_nan():
        warnings.simplefilter("ignore")
        chosen = get_peft_model_state_dict(
            model, state_dict=dict(state), adapter_name=adapter, save_embedding_layers=True
        )
    return list(chosen.values())


def _is_method(bound: Any, function: Any) -> bool:
    """Whether an object has this method, and user code has not replaced it on its class or on itself."""
    return getattr(bound, "__func__", None) is function
