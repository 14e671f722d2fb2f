"""A small encoder in plain PyTorch, fast on one CPU core, whose bottom layers may be frozen and read from memory.

Samples are packed: the linear layers see no padding, and attention alone pads groups of samples of similar length to
the longest of them, which is the same mathematics as padding the batch. Matrix products of text models are of bfloat16
(fp32 in, fp32 out, fp32 weights and optimizer). Frozen layers run without dropout and without a graph, as in the
library.

    T   tokens of all samples of a batch together
    H   hidden size
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROWS_IN_GROUP = 8
"""Number of samples, sorted by length, that attention pads to one length; all samples where they have one length."""
DROPPED = 26
"""Of 256: dropout's probability, 0.1016, drawn from random bytes, which is four times as fast as `F.dropout`."""


@dataclass(frozen=True)
class Group:
    """Samples of a batch that attention pads to the longest of them.

    Attributes:
        rows, length: shape of the padded batch.
        places: `[tokens]`, positions of the samples' tokens in the flattened padded batch.
        mask: `[rows, 1, 1, length]`, 0 for tokens and a large negative number for padding.
    """

    rows: int
    length: int
    places: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Packing:
    """Where the samples of a packed batch are.

    Attributes:
        lengths: of each sample.
        groups: the samples in order, in groups.
        positions: `[T]`, position of each token in its sample.
        starts: `[samples]`, where each sample's first token is.
    """

    lengths: list[int]
    groups: list[Group]
    positions: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Packing:
        """Describe a batch of samples of these lengths, which should be sorted."""
        groups, positions = [], []
        size = ROWS_IN_GROUP if min(lengths) < max(lengths) else len(lengths)
        for at in range(0, len(lengths), size):
            part = torch.as_tensor(lengths[at : at + size])
            rows, length = len(part), int(part.max())
            keep = torch.arange(length)[None] < part[:, None]
            places = keep.flatten().nonzero()[:, 0]
            positions.append(places % length)
            mask = torch.zeros(rows, 1, 1, length).masked_fill(~keep[:, None, None], -1e9)
            groups.append(Group(rows, length, places, mask))
        ends = torch.as_tensor(list(lengths)).cumsum(0)
        return cls(list(lengths), groups, torch.cat(positions), torch.cat([ends.new_zeros(1), ends[:-1]]))


class _Bfloat16Product(torch.autograd.Function):
    """`F.linear` with products of bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x16, weight16 = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(x16, weight16)
        return F.linear(x16, weight16).float().add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        x16, weight16 = ctx.saved_tensors
        gradient16 = gradient.bfloat16()
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            (gradient16 @ weight16).float() if of_x else None,
            (gradient16.t() @ x16).float() if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def dropout(x: torch.Tensor) -> torch.Tensor:
    """Zero random elements, and scale the others up."""
    count = x.numel()
    drawn = torch.empty((count + 7) // 8, dtype=torch.int64).random_(-(2**63), None).view(torch.uint8)[:count]
    return x * (drawn >= DROPPED).float().mul_(256 / (256 - DROPPED)).view(x.shape)


class LoraLinear(nn.Module):
    """Adapters of a linear layer: adds `x down up`, `up` zero at first."""

    def __init__(self, inputs: int, outputs: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(inputs, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.up = nn.Parameter(torch.zeros(rank, outputs))
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.down) @ self.up * self.scale


class Linear(nn.Module):
    """A linear layer, perhaps with an adapter."""

    def __init__(self, inputs: int, outputs: int, is_bfloat16: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * 0.02)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.is_bfloat16 = is_bfloat16
        self.adapter: LoraLinear | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = _Bfloat16Product.apply if self.is_bfloat16 else F.linear
        y = product(x, self.weight, self.bias)
        return y if self.adapter is None else y + self.adapter(x)


class Layer(nn.Module):
    """A transformer layer over packed samples `[T, H]`, with the norms behind (BERT) or before (ViT) its two parts."""

    def __init__(self, hidden: int, inner: int, heads: int, norms_first: bool, drops: bool, is_bfloat16: bool) -> None:
        super().__init__()
        self.heads, self.norms_first, self.drops = heads, norms_first, drops
        self.qkv = Linear(hidden, 3 * hidden, is_bfloat16)
        self.out = Linear(hidden, hidden, is_bfloat16)
        self.norm1 = nn.LayerNorm(hidden, eps=1e-12)
        self.up = Linear(hidden, inner, is_bfloat16)
        self.down = Linear(inner, hidden, is_bfloat16)
        self.norm2 = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        if self.norms_first:
            x = x + self._dropped(self._attention(self.norm1(x), packing))
            return x + self._dropped(self._inner(self.norm2(x)))
        x = self.norm1(x + self._dropped(self._attention(x, packing)))
        return self.norm2(x + self._dropped(self._inner(x)))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x) if self.drops and self.training else x

    def _attention(self, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        hidden = x.shape[1]
        size, found = hidden // self.heads, []
        parts = self.qkv(x).split([len(group.places) for group in packing.groups])
        for group, part in zip(packing.groups, parts, strict=True):
            padded = x.new_zeros(group.rows * group.length, 3 * hidden).index_copy(0, group.places, part)
            q, k, v = padded.view(group.rows, group.length, 3, self.heads, size).permute(2, 0, 3, 1, 4).unbind(0)
            weights = self._dropped(torch.softmax(q @ k.transpose(-1, -2) * size**-0.5 + group.mask, -1))
            mixed = (weights @ v).transpose(1, 2).reshape(group.rows * group.length, hidden)
            found.append(mixed.index_select(0, group.places))
        return self.out(torch.cat(found))


class Encoder(nn.Module):
    """Embeddings, layers and a head. The embeddings freeze with the first layer, as in the library.

    Args:
        embed: makes `[T, H]` of the inputs of some samples, and their packing.
        layers: the layers.
        head: makes outputs of `[T, H]` and the packing.
    """

    def __init__(self, embed: nn.Module, layers: Sequence[Layer], head: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers, self.head = embed, nn.ModuleList(layers), head
        self.num_frozen = 0

    def freeze(self, num_frozen: int) -> None:
        """Freeze the embeddings and the first layers, which are then evaluated and get no gradients."""
        self.num_frozen = num_frozen
        for part in [self.embed, *self.layers][: num_frozen + 1 if num_frozen else 0]:
            for parameter in part.parameters():
                parameter.requires_grad_(False)
                parameter.grad = None
        self.train(self.training)

    def train(self, mode: bool = True) -> Encoder:
        super().train(mode)
        for part in [self.embed, *self.layers][: self.num_frozen + 1 if self.num_frozen else 0]:
            part.eval()
        return self

    def run(self, x: torch.Tensor, packing: Packing, start: int, stop: int) -> torch.Tensor:
        """Run the layers [start, stop)."""
        for layer in list(self.layers)[start:stop]:
            x = layer(x, packing)
        return x

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        packing = Packing.of([len(one) for one in inputs])
        return self.head(self.run(self.embed(inputs, packing), packing, 0, len(self.layers)), packing)

    def add_adapters(self, rank: int, alpha: float) -> None:
        """LoRA: all but the head stops training, and the layers' query, key and value get adapters."""
        for part in (self.embed, self.layers):
            part.requires_grad_(False)
        for layer in self.layers:
            hidden = layer.qkv.weight.shape[1]
            layer.qkv.adapter = LoraLinear(hidden, 3 * hidden, rank, alpha)


class TokenEmbedding(nn.Module):
    """BERT's embeddings. Only the vectors of tokens that occur in the training data are parameters.

    The others would get no gradient, and without weight decay would never change.

    Args:
        weights: of a BERT, by name.
        occurring: sorted numbers of the tokens in the training data.
    """

    words: torch.Tensor
    place_of: torch.Tensor

    def __init__(self, weights: dict[str, torch.Tensor], occurring: torch.Tensor) -> None:
        super().__init__()
        words = weights["embeddings.word_embeddings.weight"].float()
        self.register_buffer("words", words)
        place_of = torch.full((len(words),), -1)
        place_of[occurring] = torch.arange(len(occurring))
        self.register_buffer("place_of", place_of)
        self.occurring = nn.Parameter(words[occurring].clone())
        self.positions = nn.Parameter(weights["embeddings.position_embeddings.weight"].float().clone())
        self.kind = nn.Parameter(weights["embeddings.token_type_embeddings.weight"][0].float().clone())
        self.norm = nn.LayerNorm(words.shape[1], eps=1e-12)
        self.norm.load_state_dict({n: weights[f"embeddings.LayerNorm.{n}"].float() for n in ("weight", "bias")})

    def forward(self, inputs: Sequence[torch.Tensor], packing: Packing) -> torch.Tensor:
        tokens = torch.cat(list(inputs))
        places = self.place_of[tokens]
        x = F.embedding(places.clamp(min=0), self.occurring)
        if (places < 0).any():
            x = torch.where((places >= 0)[:, None], x, self.words[tokens])
        x = self.norm(x + self.positions[packing.positions] + self.kind)
        return dropout(x) if self.training else x


class PatchEmbedding(nn.Module):
    """A vision transformer's embeddings of patches `[patches, pixels]`, with a first token for the class."""

    def __init__(self, pixels: int, patches: int, hidden: int) -> None:
        super().__init__()
        self.project = nn.Linear(pixels, hidden)
        self.first = nn.Parameter(torch.randn(hidden) * 0.02)
        self.positions = nn.Parameter(torch.randn(patches + 1, hidden) * 0.02)

    def forward(self, inputs: Sequence[torch.Tensor], packing: Packing) -> torch.Tensor:
        x = torch.stack(list(inputs))  # [samples, patches + 1, pixels], the first one zeros
        x = torch.cat([self.first.expand(len(x), 1, -1), self.project(x[:, 1:])], 1) + self.positions
        return x.flatten(0, 1)


class ClassHead(nn.Module):
    """Classes from a sample's first token: BERT's pooler where its weights are given, else a norm; a projection."""

    def __init__(self, hidden: int, classes: int, pooler: dict[str, torch.Tensor] | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden) if pooler is None else None
        self.pooler = nn.Linear(hidden, hidden) if pooler is not None else None
        if self.pooler is not None and pooler is not None:
            self.pooler.load_state_dict(pooler)
        self.classes = nn.Linear(hidden, classes)
        nn.init.normal_(self.classes.weight, std=0.02)
        nn.init.zeros_(self.classes.bias)

    def forward(self, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        x = x[packing.starts]
        if self.norm is not None:
            return self.classes(self.norm(x))
        assert self.pooler is not None
        x = torch.tanh(self.pooler(x))
        return self.classes(F.dropout(x, 0.1, self.training))


class MeanHead(nn.Module):
    """A sentence's vector of length 1: the mean over its tokens. It has no parameters."""

    def forward(self, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        means = torch.stack([part.mean(0) for part in x.split(packing.lengths)])
        return F.normalize(means, dim=-1)


class SpanHead(nn.Module):
    """Logits of where a span starts and ends: `[2, length]` for each sample, -1e9 where it has no tokens.

    Args:
        hidden: H.
        length: tokens of the longest sample there may be.
    """

    def __init__(self, hidden: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.ends = nn.Linear(hidden, 2)
        nn.init.normal_(self.ends.weight, std=0.02)
        nn.init.zeros_(self.ends.bias)

    def forward(self, x: torch.Tensor, packing: Packing) -> torch.Tensor:
        parts = self.ends(x).split(packing.lengths)
        return torch.stack([F.pad(part.t(), (0, self.length - len(part)), value=-1e9) for part in parts])


def bert_layers(weights: dict[str, torch.Tensor], heads: int) -> list[Layer]:
    """The layers of a BERT with these weights."""
    layers = []
    for number in range(1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))):
        of = {n[len(f"encoder.layer.{number}.") :]: v.float() for n, v in weights.items() if f".layer.{number}." in n}
        inner, hidden = of["intermediate.dense.weight"].shape
        layer = Layer(hidden, inner, heads, norms_first=False, drops=True, is_bfloat16=True)
        state = {}
        for kind in ("weight", "bias"):
            names = [f"attention.self.{part}.{kind}" for part in ("query", "key", "value")]
            state[f"qkv.{kind}"] = torch.cat([of[name] for name in names])
            state[f"out.{kind}"] = of[f"attention.output.dense.{kind}"]
            state[f"norm1.{kind}"] = of[f"attention.output.LayerNorm.{kind}"]
            state[f"up.{kind}"] = of[f"intermediate.dense.{kind}"]
            state[f"down.{kind}"] = of[f"output.dense.{kind}"]
            state[f"norm2.{kind}"] = of[f"output.LayerNorm.{kind}"]
        layer.load_state_dict(state)
        layers.append(layer)
    return layers
