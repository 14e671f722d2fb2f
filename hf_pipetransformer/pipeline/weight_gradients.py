"""The backward of linear layers in two parts: the inputs' gradients at once, the weights' gradients later.

    y = x W^T      backward   dx = dy W      at once: the stage before waits for it
                   weights    dW = dy^T x    when the stage would otherwise wait

torch's own split (`stage_backward_input`) goes through the graph of a stage twice: it keeps the graph, computes
checkpointed layers again each time, and cannot have reentrant checkpoints. Where several layers use one weight, it
frees tensors that are still needed. Here each use of a weight is an entry of a list, with the tensors dy and x, and
the graph is freed as in a whole backward. Only `nn.Linear` is split; all other parameters (norms, biases, embeddings,
convolutions) get their gradients at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ..model.method_override import MethodOverride


class _Product(NamedTuple):
    """The factors of a weight's gradient, gradient^T values."""

    weight: nn.Parameter
    gradient: torch.Tensor
    """Of the outputs, `[rows, outputs]`."""
    values: torch.Tensor
    """The inputs, `[rows, inputs]`."""


class WeightGradients:
    """Postpones the gradients of a process's linear layers.

    Args:
        model: the model.
        parameters: the parameters that this process trains; layers without one of them are left alone.
    """

    def __init__(self, model: nn.Module, parameters: Collection[nn.Parameter]) -> None:
        mine = {id(parameter) for parameter in parameters if parameter.requires_grad}
        self._layers = [
            module for module in model.modules() if type(module) is nn.Linear and id(module.weight) in mine
        ]
        self._waiting: deque[_Product] = deque()
        self._postpones = False

    @contextmanager
    def split(self) -> Iterator[None]:
        """Inside, the layers' forwards record the tensors for a `postponed` backward."""
        with ExitStack() as overrides:
            for layer in self._layers:
                if "forward" not in vars(layer):  # keep an override of other code: ours would hide it
                    override = MethodOverride(layer, "forward", partial(self._forward, layer))
                    overrides.callback(override.remove)
            try:
                yield
            finally:
                self._waiting.clear()

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Inside, a backward leaves out the gradients of the layers' weights."""
        self._postpones = True
        try:
            yield
        finally:
            self._postpones = False

    def take(self) -> Callable[[], None]:
        """Return a function that adds the gradients left out since the last call to the weights' gradients."""
        taken, self._waiting = self._waiting, deque()
        return partial(_add_up, taken)

    def _forward(self, layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        weight = layer.weight
        bias: torch.Tensor | None = layer.bias
        is_plain = type(weight) is nn.Parameter and weight.requires_grad and torch.is_grad_enabled()
        # hooks on the weight's gradient must run when autograd has computed it
        if not is_plain or weight._backward_hooks or weight._post_accumulate_grad_hooks:
            return nn.Linear.forward(layer, input)
        device = input.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        rows = input.reshape(-1, input.shape[-1])  # the result must be no view: a user may change it in place
        values, used, used_bias = (_cast(value, dtype) for value in (rows, weight, bias))
        output: torch.Tensor = _SplitLinear.apply(values, used, used_bias, weight, self)
        return output.view(*input.shape[:-1], output.shape[-1])

    def _postpone(self, product: _Product) -> bool:
        if self._postpones:
            self._waiting.append(product)
        return self._postpones


class _SplitLinear(torch.autograd.Function):
    """A linear layer that may postpone its weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        used: torch.Tensor,
        bias: torch.Tensor | None,
        weight: nn.Parameter,
        owner: WeightGradients,
    ) -> torch.Tensor:
        """Apply the layer.

        Args:
            ctx: autograd's.
            values: the inputs, `[rows, inputs]`.
            used: the weight, cast to the dtype of the computation, `[outputs, inputs]`.
            bias: the bias; None if there is none.
            weight: the parameter, which gets a postponed gradient.
            owner: postpones it.
        """
        ctx.save_for_backward(values, used)
        ctx.weight, ctx.owner = weight, owner
        return F.linear(values, used, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, used = ctx.saved_tensors
        of_values, of_weight, of_bias, *_ = ctx.needs_input_grad
        of_weight = of_weight and not ctx.owner._postpone(_Product(ctx.weight, gradient, values))
        return (
            gradient @ used if of_values else None,
            gradient.t() @ values if of_weight else None,
            gradient.sum(0) if of_bias else None,
            None,
            None,
        )


def _cast(value: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    """Return an operand as autocast hands it to a linear layer."""
    return value if value is None or dtype is None or value.dtype == torch.float64 else value.to(dtype)


@torch.no_grad()
def _add_up(products: deque[_Product]) -> None:
    """Add products to the weights' gradients, and let go of each of them."""
    while products:
        weight, gradient, values = products.popleft()
        total = weight.grad
        if total is not None and not total.is_sparse and total.dtype == gradient.dtype:
            total.addmm_(gradient.t(), values)
            continue
        added = (gradient.t() @ values).to(weight.dtype)
        if total is None:
            weight.grad = added
        elif total.is_sparse:  # of an embedding with the same weight
            weight.grad = added.add_(total)
        else:
            total.add_(added)
