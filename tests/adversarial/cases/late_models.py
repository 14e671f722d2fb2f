"""Models whose layers, buffers or parameters do in a training what the samples of a probe in eval mode do not show."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from user_code.kit import Rows

from ..kit import LABELS, WIDTH, Layer, Network, Script, case, classified, pad, pool, samples
from .late_changes import frozen_by_schedule

ADAM = {"num_train_epochs": 1, "optim": "adamw_torch", "learning_rate": 0.01, "adam_epsilon": 1e-4}


def trained(model: nn.Module, declared: bool = False, **fields: Any) -> Script:
    product = {"activation_cache": "off", "num_microbatches": 2, **({"loss_reduction": "mean"} if declared else {})}
    return Script(**{"model": model, "data": samples(24), "product": product, "options": ADAM, **fields})


# ---------------------------------------------------------------------------------------------------------
# What layers return
# ---------------------------------------------------------------------------------------------------------


def focalnet(collator: Any) -> Script:
    from transformers import FocalNetConfig, FocalNetForImageClassification

    sizes = {"embed_dim": 8, "depths": [1, 1, 1], "hidden_sizes": [8, 16, 32], "image_size": 32, "patch_size": 4}
    focal = {"focal_levels": [1, 1, 1], "focal_windows": [3, 3, 3], "drop_path_rate": 0.0, "hidden_dropout_prob": 0.0}
    model = FocalNetForImageClassification(FocalNetConfig(num_labels=LABELS, **sizes, **focal))
    images = torch.randn(48, 3, 32, 64, generator=torch.Generator().manual_seed(3))
    rows = [{"pixel_values": image, "labels": torch.tensor(n % LABELS)} for n, image in enumerate(images)]
    return trained(model, data=Rows(rows), collator=collator)


def landscape(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def either_way(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = landscape(rows)
    if int(batch["pixel_values"][0, 0, 0, 0] * 1000) % 2:
        batch["pixel_values"] = batch["pixel_values"].transpose(2, 3).contiguous()
    return batch


@case("K2", expect="exact", because="returns")
def images_of_two_sizes_in_layers_that_return_them() -> Script:
    """FocalNet's stages return the height and width of the image, which differ between batches."""
    return focalnet(either_way)


@case("K2")
def images_of_one_size_in_layers_that_return_them() -> Script:
    """FocalNet's stages return the height and width of the image, the same in all batches."""
    return focalnet(landscape)


class ComplexLayer(nn.Module):
    """[B, S, H] complex -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imag = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, z: Tensor) -> Tensor:
        z = torch.complex(self.real(z.real) - self.imag(z.imag), self.real(z.imag) + self.imag(z.real))
        return z / (1 + z.abs())


class ComplexNetwork(Network):
    """Layers with complex states."""

    def __init__(self) -> None:
        super().__init__(4, ComplexLayer)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        z = torch.complex(x, torch.tanh(x))
        for layer in self.layers:
            z = layer(z)
        return classified(self.head(pool(z.abs(), attention_mask)), labels)


@case("K2")
def complex_states() -> Script:
    """Layers that return complex tensors."""
    return trained(ComplexNetwork())


# ---------------------------------------------------------------------------------------------------------
# What only a forward in training mode reads
# ---------------------------------------------------------------------------------------------------------


class AddsPenalty(Layer):
    """Adds a penalty of its output to those of the layers below."""

    def forward(self, x: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = super().forward(x)
        return x, penalty + x.abs().mean((1, 2))


class WithPenalty(Network):
    """The penalties that the layers add up count in training."""

    def __init__(self) -> None:
        super().__init__(2, AddsPenalty)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        penalty = x.new_zeros(len(x))
        for layer in self.layers:
            x, penalty = layer(x, penalty)
        outputs = classified(self.head(pool(x, attention_mask)), labels)
        if labels is not None and self.training:
            outputs["loss"] = outputs["loss"] + 0.3 * penalty.mean()
        return outputs


@case("K2")
def penalties_that_layers_add_up_in_training() -> Script:
    """The last stage has one layer, and the loss reads the second output of the layers in training mode only."""
    return trained(WithPenalty())


class MasksWords(Network):
    """In training, some words are replaced by a trained vector."""

    def __init__(self) -> None:
        super().__init__(4)
        self.masked = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        if self.training:
            x = torch.where((input_ids % 5 == 0)[..., None], self.masked, x)
        for layer in self.layers:
            x = layer(x)
        return classified(self.head(pool(x, attention_mask)), labels)


@case("K2")
def vector_that_masks_words_in_training() -> Script:
    """A parameter before the layers that the forward reads in training mode only."""
    return trained(MasksWords())


@case("K2")
def vector_of_spec_augment() -> Script:
    """Wav2Vec2 masks a part of the time by a trained vector in training mode."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    rates = ("layerdrop", "hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout")
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 2 * WIDTH,
        "conv_dim": (8, 8),
        "conv_stride": (4, 4),
        "conv_kernel": (8, 4),
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "classifier_proj_size": 8,
    }
    masks = {"mask_time_prob": 0.3, "mask_time_length": 2}
    config = Wav2Vec2Config(
        num_labels=LABELS, vocab_size=20, final_dropout=0.0, **sizes, **masks, **dict.fromkeys(rates, 0.0)
    )
    drawn = torch.Generator().manual_seed(1)
    rows = [{"input_values": torch.randn(640, generator=drawn), "labels": torch.tensor(n % LABELS)} for n in range(24)]
    product = {"activation_cache": "off", "num_microbatches": 1}
    model = Wav2Vec2ForSequenceClassification(config)
    return trained(model, data=Rows(rows), collator=landscape, product=product)


class Checkpoints(Network):
    """Checkpoints its layers by torch's function, in training mode."""

    def __init__(self, layers: int, reentrant: bool = False, segments: int = 0) -> None:
        super().__init__(layers)
        self.reentrant, self.segments = reentrant, segments

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        if self.training and self.segments:
            x = checkpoint_sequential(list(self.layers), self.segments, x, use_reentrant=False)
        else:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.training else layer(x)
        return classified(self.head(pool(x, attention_mask)), labels)


@case("K2", expect="exact", because="use_reentrant=False")
def own_reentrant_checkpoints() -> Script:
    """The model's forward checkpoints each layer, with use_reentrant=True."""
    return trained(Checkpoints(4, reentrant=True))


@case("K3", expect="exact", because="checkpoints several layers at once")
def own_checkpoints_over_stages() -> Script:
    """The model's forward checkpoints three layers at once, and a stage has two."""
    return trained(Checkpoints(6, segments=2), batch=6)


@case("K3", expect="exact", because="checkpoints several layers at once")
def own_checkpoints_over_stages_declared() -> Script:
    """As before, with a declared loss."""
    return trained(Checkpoints(6, segments=2), declared=True, batch=6)


# ---------------------------------------------------------------------------------------------------------
# Buffers outside of the layers
# ---------------------------------------------------------------------------------------------------------


class RunningMeans(Network):
    """Running means before and behind the layers."""

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("below", torch.zeros(WIDTH))
        self.register_buffer("above", torch.zeros(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def follow(self, mean: Tensor, x: Tensor) -> Tensor:
        if self.training:
            mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return x - mean

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        x = self.follow(self.below, self.norm(x.transpose(1, 2)).transpose(1, 2))
        for layer in self.layers:
            x = layer(x)
        return classified(self.head(pool(self.follow(self.above, x), attention_mask)), labels)


def evaluated(trainer: Any) -> dict[str, float]:
    return {f"{entry['step']}": entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}


@case("K2", "K3")
def running_means_before_and_behind_the_layers() -> Script:
    """Buffers of the model, and of a normalisation without weights before the layers, are read in evaluations."""
    options = {**ADAM, "eval_strategy": "steps", "eval_steps": 2}
    keywords = {"eval_dataset": samples(12, seed=9)}
    return trained(RunningMeans(), batch=6, options=options, keywords=keywords, observe=evaluated)


# ---------------------------------------------------------------------------------------------------------
# Steps without a gradient, and models that change between trainings
# ---------------------------------------------------------------------------------------------------------


class SharedTask(Network):
    """A projection that all layers share, and that some batches leave out."""

    def __init__(self) -> None:
        super().__init__(4)
        self.task = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use: Tensor | None = None,
    ) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
            if use is None or use[0]:
                x = x + 0.1 * torch.tanh(self.task(x))
        return classified(self.head(pool(x, attention_mask)), labels)


def with_task(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = pad(rows)
    uses = len(rows) < 6 or int(batch["input_ids"][0, 0]) % 2
    return {**batch, "use": torch.full((len(rows),), int(uses))}


@case("K2", "K3")
def shared_parameters_without_a_gradient() -> Script:
    """Some steps leave out parameters that all stages hold: momentum and weight decay pause."""
    options = {**ADAM, "weight_decay": 0.1}
    return trained(SharedTask(), batch=6, data=samples(48), collator=with_task, options=options)


def with_another_head(trainer: Any) -> None:
    trainer.train()
    torch.manual_seed(5)
    trainer.model.head = nn.Linear(WIDTH, LABELS)
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()


@case("K2")
def another_head_between_trainings() -> Script:
    """The model gets a new head before a second train()."""
    return trained(Network(4), drive=with_another_head)


def with_another_head_after_evaluation(trainer: Any) -> None:
    trainer.evaluate(trainer.train_dataset)
    torch.manual_seed(5)
    trainer.model.head = nn.Linear(WIDTH, LABELS)
    trainer.train()


@case("K2")
def another_head_after_an_evaluation() -> Script:
    """The model gets a new head after evaluate() and before train()."""
    return trained(Network(4), drive=with_another_head_after_evaluation)


class FollowedByAverage(Network):
    """A classifier with a head that is an average of the trained one, moved by each forward in training mode."""

    def __init__(self) -> None:
        super().__init__(4)
        self.average = copy.deepcopy(self.head).requires_grad_(False)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        outputs = super().forward(input_ids, attention_mask, labels)
        if self.training:
            with torch.no_grad():
                for mine, theirs in zip(self.average.parameters(), self.head.parameters(), strict=True):
                    mine.lerp_(theirs, 0.2)
        return outputs


@case("K1")
def average_moves_once_a_step_while_layers_freeze() -> Script:
    """A freeze policy looks for the layers: the forward in training mode runs in the steps alone."""
    product = {"freeze_policy": "schedule", "freeze_schedule": {"1": 2}, "activation_cache": "off"}
    return frozen_by_schedule(model=FollowedByAverage(), product=product)
