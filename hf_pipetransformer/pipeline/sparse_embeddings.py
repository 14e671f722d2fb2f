"""Keeps the gradients of embeddings sparse over the micro-batches of a step.

The gradient of an embedding is a dense tensor of the size of the whole vocabulary, created and added once per
micro-batch, however few tokens that has: for BERT's 30,522 x 384 on one CPU core this takes about 30 ms each, a tenth
of the step. As sparse tensors, the micro-batches' gradients are lists of table rows, which are added up once, at the
end of the step.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

LARGE = 2**20
"""Number of elements from which a dense gradient costs more than a sparse one (T5's position bias has 32 rows)."""


class SparseEmbeddings:
    """The large trainable embeddings of a stage, switched to sparse gradients until `remove`.

    Used for stages on the CPU that DDP does not wrap: DDP refuses sparse gradients of parameters for which it did not
    expect them, and a GPU fills memory so fast that dense gradients do not matter.

    Args:
        model: the user's model.
        weights: the parameters of this process's stage.
    """

    def __init__(self, model: nn.Module, weights: Collection[nn.Parameter]) -> None:
        mine = {id(weight) for weight in weights if weight.requires_grad}
        self._embeddings = [
            module
            for module in model.modules()
            if isinstance(module, nn.Embedding)
            and id(module.weight) in mine
            and module.weight.numel() >= LARGE
            and not (module.sparse or module.scale_grad_by_freq or module.max_norm)
        ]
        for module in self._embeddings:
            module.sparse = True

    def finish_step(self) -> None:
        """Make the gradients dense, as optimizers and clipping expect them."""
        for module in self._embeddings:
            gradient = module.weight.grad
            if gradient is not None and gradient.is_sparse:
                module.weight.grad = gradient.to_dense()

    def remove(self) -> None:
        """Restore the modules' own setting."""
        for module in self._embeddings:
            module.sparse = False
        self._embeddings = []
