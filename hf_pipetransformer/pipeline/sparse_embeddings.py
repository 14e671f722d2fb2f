"""Collect the gradients of embeddings sparsely over the micro-batches of a step.

The gradient of an embedding is a dense tensor of the whole vocabulary, made and added once per micro-batch however few
tokens that has: for BERT's 30,522 x 384 on one CPU core about 30 ms each, a tenth of the step. As sparse tensors the
micro-batches' gradients are lists of rows, and are added up once, at the end of the step.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

LARGE = 2**20
"""Elements from which on a table's dense gradient costs more than a list of rows: T5's position bias has 32 rows."""


class SparseEmbeddings:
    """The large trainable embeddings of a stage, switched to sparse gradients while it is in force.

    For stages on the CPU that DDP does not wrap: it does not take sparse gradients of parameters that it did not
    expect them of, and a GPU fills memory too fast for it to matter.

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
        """Give the modules their own setting back."""
        for module in self._embeddings:
            module.sparse = False
        self._embeddings = []
