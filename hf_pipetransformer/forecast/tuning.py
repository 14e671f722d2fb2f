"""LoRA, gradient checkpointing and bf16 in `hf-pipetransformer plan`: memory, and the time of a backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from ..planning.costs import UnitCost
from .workload import Workload

FULL_BACKWARD = 2.0
"""Cost of a backward in forwards, if weights and inputs both need gradients."""
ADAPTED_BACKWARD = 1.0
"""Cost of a backward in forwards, if only the inputs and a few small matrices need gradients."""


@dataclass(frozen=True)
class Tuning:
    """The options of `hf-pipetransformer plan` for LoRA, gradient checkpointing and bf16.

    Raises:
        ValueError: the rank is too small.
    """

    lora_r: int | None = None
    gradient_checkpointing: bool = False
    bf16: bool = False

    def __post_init__(self) -> None:
        if self.lora_r is not None and self.lora_r < 1:
            raise ValueError(f"lora_r is {self.lora_r}, but must be at least 1.")

    def adapt(self, model: PreTrainedModel) -> None:
        """Add LoRA adapters to a model, if requested. A new head is trained as well.

        Raises:
            ImportError: PEFT is not installed.
        """
        if self.lora_r is None:
            return
        from peft import LoraConfig, inject_adapter_in_model
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

        known = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model.config.model_type)
        heads = [] if model.get_output_embeddings() is not None else list(model.named_children())
        inject_adapter_in_model(
            LoraConfig(r=self.lora_r, target_modules=list(known) if known else "all-linear"), model
        )
        for name, head in heads:
            if name != model.base_model_prefix:
                head.requires_grad_(True)

    def lighten(self, workload: Workload) -> Workload:
        """Return a workload with the activations and the backward under these options."""
        units = workload.unit_costs
        backward = FULL_BACKWARD if self.lora_r is None else ADAPTED_BACKWARD
        if self.gradient_checkpointing:  # only the input of each unit is kept
            backward += 1.0
            inputs = [units[0].boundary_bytes, *(unit.boundary_bytes for unit in units[:-1])]
            units = tuple(
                replace(unit, activation_bytes=kept + unit.head.activation_bytes)
                for unit, kept in zip(units, inputs, strict=True)
            )
        if self.bf16:
            units = tuple(map(_in_half, units))
        return replace(workload, unit_costs=units, backward_forwards=backward, autocasts=self.bf16)


def _in_half(unit: UnitCost) -> UnitCost:
    """Halve the bytes of fp32 activations. Models with 16-bit weights have 16-bit activations already."""
    if not unit.copies and not unit.untrained_copies_bytes:
        return unit
    head = replace(unit.head, activation_bytes=unit.head.activation_bytes // 2)
    return replace(
        unit, activation_bytes=unit.activation_bytes // 2, boundary_bytes=unit.boundary_bytes // 2, head=head
    )
