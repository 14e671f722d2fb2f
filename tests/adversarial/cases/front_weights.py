"""A frozen backbone's stored outputs are read, and the user changes its weights during the training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..kit import At, Backbone, FrozenBackbone, Layer, Script, case

MIDDLE = (6,)
"""A step of the second epoch, which has four."""


def changed(change: Any, steps: Any = MIDDLE, model: nn.Module | None = None, **fields: Any) -> Script:
    """A frozen backbone that `change(model, step)` changes before some steps."""
    return Script(model=model or FrozenBackbone(), callbacks=[At(change, steps)], **fields)


def keep_large(parameter: nn.Parameter) -> None:
    """Set the smaller half of the weights to 0 by assigning to `.data`, but for one in the middle."""
    old = parameter.data.clone()
    keep = old.abs() > old.abs().median()
    keep[tuple(size // 2 for size in old.shape)] = True
    parameter.data = old * keep


@case("K1")
def nothing_changes() -> Script:
    """A frozen backbone, as it is."""
    return Script(model=FrozenBackbone())


@case("K1")
def data_row() -> Script:
    """Rows of the embedding are changed through `.data`, as special tokens are reset."""

    def change(model: Any, step: int) -> None:
        model.backbone.embedding.weight.data[5:12] += 1.0

    return changed(change)


@case("K1")
def data_row_at_start_of_epoch() -> Script:
    """Rows of the embedding are changed through `.data` in the first step of the second epoch."""

    def change(model: Any, step: int) -> None:
        model.backbone.embedding.weight.data[5:12] += 1.0

    return changed(change, steps=(4,))


@case("K1")
def data_assigned_mask() -> Script:
    """Pruning by magnitude: `.data` is assigned."""

    def change(model: Any, step: int) -> None:
        for parameter in model.backbone.parameters():
            keep_large(parameter)

    return changed(change)


@case("K1")
def data_pruned_row() -> Script:
    """Half of the neurons of one layer are pruned through `.data`."""

    def change(model: Any, step: int) -> None:
        linear = model.backbone.layers[2].linear
        linear.weight.data[:8] = 0
        linear.bias.data[:8] = 0

    return changed(change)


@case("K1")
def numpy_write() -> Script:
    """A weight is written through its NumPy array."""

    def change(model: Any, step: int) -> None:
        model.backbone.layers[0].linear.weight.detach().numpy()[0, :] = 0.5

    return changed(change)


@case("K1")
def moving_average_through_data() -> Script:
    """A layer follows the trained head through `.data` in each step."""

    def change(model: Any, step: int) -> None:
        model.backbone.layers[5].linear.weight.data.mul_(0.9).add_(model.head[0].weight.data, alpha=0.1)

    return changed(change, steps=range(1, 12))


@case("K1")
def in_place() -> Script:
    """A weight is changed by an in-place operation."""

    def change(model: Any, step: int) -> None:
        model.backbone.layers[0].linear.weight[0].add_(1.0)

    return changed(change)


@case("K1")
def tensor_set() -> Script:
    """A weight gets another storage by `Tensor.set_`."""

    def change(model: Any, step: int) -> None:
        weight = model.backbone.layers[0].linear.weight
        new = weight.detach().clone()
        new[0] += 1
        weight.set_(new)

    return changed(change)


@case("K1")
def load_state_dict() -> Script:
    """Larger weights are loaded."""

    def change(model: Any, step: int) -> None:
        model.backbone.load_state_dict({name: value * 1.1 for name, value in model.backbone.state_dict().items()})

    return changed(change)


@case("K1")
def load_state_dict_assign() -> Script:
    """Other weights are loaded with `assign=True`."""

    def change(model: Any, step: int) -> None:
        weights = {name: value.clone() for name, value in model.backbone.state_dict().items()}
        weights["embedding.weight"][5:12] += 1
        model.backbone.load_state_dict(weights, assign=True)
        model.backbone.requires_grad_(False)

    return changed(change)


@case("K1")
def parameter_replaced() -> Script:
    """A parameter is replaced by a new one."""

    def change(model: Any, step: int) -> None:
        linear = model.backbone.layers[0].linear
        linear.weight = nn.Parameter(linear.weight + 1, requires_grad=False)

    return changed(change)


@case("K1")
def layer_replaced() -> Script:
    """A layer is replaced by a new one."""

    def change(model: Any, step: int) -> None:
        torch.manual_seed(3)
        model.backbone.layers[1] = Layer().requires_grad_(False)

    return changed(change)


@case("K1")
def backbone_replaced() -> Script:
    """The whole backbone is replaced by a new one."""

    def change(model: Any, step: int) -> None:
        torch.manual_seed(3)
        model.backbone = Backbone().requires_grad_(False)

    return changed(change)


def thawing(change: Any, steps: Any, **fields: Any) -> Script:
    """The optimizer has all parameters from the start, frozen ones too."""
    model = FrozenBackbone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    keywords = {"optimizers": (optimizer, None)}
    return changed(change, steps, model, options={"num_train_epochs": 4}, keywords=keywords, **fields)


@case("K1")
def last_layer_thawed() -> Script:
    """The backbone's last layer is trained from the middle of the second epoch on."""

    def change(model: Any, step: int) -> None:
        model.backbone.layers[5].requires_grad_(True)

    return thawing(change, MIDDLE)


@case("K1")
def thawed_and_frozen_again() -> Script:
    """The backbone is trained for two steps."""

    def change(model: Any, step: int) -> None:
        model.backbone.requires_grad_(step == 4)

    return thawing(change, (4, 6))


@case("K1")
def frozen_in_the_middle() -> Script:
    """The backbone is frozen in the second epoch."""

    def change(model: Any, step: int) -> None:
        model.backbone.requires_grad_(False)

    model = FrozenBackbone()
    model.backbone.requires_grad_(True)
    return changed(change, (5,), model, options={"num_train_epochs": 4})


@case("K1")
def biases_are_trained() -> Script:
    """All weights but the head's are frozen; biases are not."""
    model = FrozenBackbone()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name or "head" in name)
    return Script(model=model)


@case("K1")
def frozen_weights_decay() -> Script:
    """The optimizer gets frozen parameters with gradients of zero, and decays them."""

    def change(model: Any, step: int) -> None:
        for parameter in model.backbone.parameters():
            parameter.grad = torch.zeros_like(parameter)

    model = FrozenBackbone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    callbacks = [At(change, range(12), "on_pre_optimizer_step")]
    return Script(model=model, callbacks=callbacks, keywords={"optimizers": (optimizer, None)})


# ---------------------------------------------------------------------------------------------------------
# Other ways to a weight's memory
# ---------------------------------------------------------------------------------------------------------

ROWS = slice(5, 12)
"""Words of the embedding that some samples have."""


@case("K1")
def dlpack_write() -> Script:
    """Rows are written through DLPack."""

    def change(model: Any, step: int) -> None:
        torch.from_dlpack(model.backbone.embedding.weight.detach())[ROWS] += 1.0

    return changed(change)


@case("K1")
def storage_write() -> Script:
    """One number is written into the storage."""

    def change(model: Any, step: int) -> None:
        weight = model.backbone.layers[1].linear.weight
        memory = torch.tensor([], dtype=weight.dtype).set_(weight.untyped_storage(), 0, (weight.numel(),))
        memory[: weight.numel() // 4] = 0.5

    return changed(change)


@case("K1")
def data_of_a_view() -> Script:
    """Rows are written through the `.data` of a view."""

    def change(model: Any, step: int) -> None:
        model.backbone.embedding.weight[ROWS].data += 1.0

    return changed(change)


@case("K1")
def data_swapped() -> Script:
    """Two layers exchange their weights through `.data`."""

    def change(model: Any, step: int) -> None:
        one, other = (model.backbone.layers[k].linear.weight for k in (1, 2))
        one.data, other.data = other.data, one.data

    return changed(change)


@case("K1")
def data_read_in_each_step() -> Script:
    """Weights are only read through `.data`, in each step."""
    total = [0.0]

    def change(model: Any, step: int) -> None:
        total[0] += sum(float(parameter.data.sum()) for parameter in model.backbone.parameters())

    return changed(change, steps=range(12))


@case("K1")
def state_dict_edited() -> Script:
    """Rows are written through the tensors of a state dict."""

    def change(model: Any, step: int) -> None:
        model.state_dict()["backbone.embedding.weight"][ROWS] += 1.0

    return changed(change)


@case("K1")
def state_dict_edited_by_numpy() -> Script:
    """Rows are written through the NumPy arrays of a state dict."""

    def change(model: Any, step: int) -> None:
        model.state_dict()["backbone.embedding.weight"].numpy()[ROWS] += 1.0

    return changed(change)


@case("K1")
def copied_in_place_by_another_model() -> Script:
    """Weights are copied from another model through `.data.copy_`."""
    torch.manual_seed(8)
    other = Backbone()

    def change(model: Any, step: int) -> None:
        for mine, theirs in zip(model.backbone.parameters(), other.parameters(), strict=True):
            mine.data.copy_(theirs.data)

    return changed(change)
