"""Models with quantised linear layers and adapters on them, as in fine-tuning with QLoRA.

model = stand_in_model("llama")     int8 parameters and scales, in a module of its own
model = torchao_model("llama")      torchao's tensors: int8 inside, float32 for all readers
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, one scale for each row, as bitsandbytes and others keep them.

    Args:
        linear: the layer that it replaces.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        scale = weight.abs().amax(dim=1) / 127
        self.weight = nn.Parameter((weight / scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to(inputs.dtype) * self.scale[:, None].to(inputs.dtype)
        return nn.functional.linear(inputs, weight, self.bias)


class Adapted(nn.Module):
    """LoRA on any layer: PEFT takes the layers that it knows only."""

    def __init__(self, layer: Int8Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


def stand_in_model(model: nn.Module) -> nn.Module:
    """Replace the linear layers inside a model's layers, in place, and train the adapters only."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and ".layers." in name:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Adapted(Int8Linear(module)))
    return model.train()


def torchao_model(model: nn.Module, **lora: Any) -> nn.Module:
    """Quantise a model's linear layers with torchao, in place, and put PEFT's adapters on it."""
    import peft
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, **lora)).train()
