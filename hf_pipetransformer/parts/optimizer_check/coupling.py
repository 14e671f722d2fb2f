"""Probe whether an optimizer updates each parameter by that parameter's own gradient only, as stages require.

Prodigy, D-Adaptation, SAM and optimizers that clip by the norm over all parameters compute one value from all
gradients, and each stage of a pipeline would compute a different one. An optimizer does not say which kind it is, so
copies of it are stepped on tiny parameters; the real optimizer does not change.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...model.layer_stack import LayerStack
from ...pipeline.optimizer_state import unwrapped
from ...planning.layout import Layout
from ...randomness import seeded
from ...run.job import TrainingJob

INDEPENDENT = ("torch.optim.", "transformers.optimization", "bitsandbytes.")
"""Modules whose optimizers are known to update each parameter by its own gradient; they are not probed."""
INDEPENDENT_IF_UNTRIED = (
    "galore_torch.",
    "apollo_torch.",
    "schedulefree.",
    "torchao.",
    "grokadamw.",
    "q_galore_torch.",
)
"""Modules of other choices of `TrainingArguments.optim` that are accepted if they cannot be probed on the CPU."""
GRADIENT_SCALES = (1.0, 100.0, 0.01, 1e4, 1.0)
"""Scale of the gradients in each step, chosen so that a bound on their norm is reached."""


def coupling_of(job: TrainingJob, stack: LayerStack, optimizer: torch.optim.Optimizer, layout: Layout) -> str | None:
    """Return why an optimizer cannot be divided among stages or replicas, and the remedy, or None.

    Collective over all processes.

    Args:
        job: the training job.
        stack: the model's units.
        optimizer: the optimizer, with or without Accelerate's wrapper.
        layout: the first layout.
    """
    optimizer, sharding, why = unwrapped(optimizer), layout.replica_sharding, None
    if sharding != "none":
        if callable(getattr(optimizer, "eval", None)):  # a schedule-free optimizer
            why = "it changes all weights before and after each evaluation (its eval method)"
        units = {id(stack.table[name]): number for number, name in enumerate(stack.table.names)}
    else:
        units = {id(stack.table[n]): k for k in reversed(range(stack.num_units)) for n in stack.owners[k]}
    if why is None and (job.args.uses_pipeline or sharding != "none"):
        freezes = job.freeze_callback is not None or not all(p.requires_grad for p in job.model.parameters())
        why = probe_coupling(optimizer, units, freezes)
    found = next((theirs for theirs in job.mesh.gather_objects(why) if theirs is not None), None)
    if found is None:
        return None
    if sharding != "none":
        return (
            f"{type(optimizer).__name__}: {found}, but with replica_sharding={sharding!r} each replica updates only"
            " its own part of the parameters. Use an optimizer that updates each parameter from its own gradient"
            " alone, with all of its values in `state`, such as optim='adamw_torch', or set replica_sharding='none'."
        )
    return (
        f"{type(optimizer).__name__}: {found}, but each stage of a pipeline holds only its own parameters. Use an"
        " optimizer that updates each parameter from its own gradient alone, with all of its values in `state`, or set"
        " pipeline_parallel_size=1."
    )


def probe_coupling(optimizer: torch.optim.Optimizer, unit_of: Mapping[int, int], freezes: bool = False) -> str | None:
    """Return why an optimizer over the whole model cannot be divided among stages; None if it can. Not collective.

    Args:
        optimizer: the optimizer over the real parameters, which are not changed.
        unit_of: id of a parameter -> the first unit that owns it. The parameters of one unit stay together.
        freezes: whether layers freeze, and others move to other stages.
    """
    module = f"{type(optimizer).__module__}."
    if module.startswith(INDEPENDENT) and not isinstance(optimizer, torch.optim.LBFGS):
        return None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    units = sorted({unit_of.get(id(p), 0) for p in parameters})
    half_of = [units.index(unit_of.get(id(p), 0)) % 2 for p in parameters]
    try:
        with seeded(0):
            if len(units) > 1 and any(_depends_on(optimizer, half_of, half) for half in (0, 1)):
                return "its update of a parameter depends on the gradients of other parameters"
            return _kept_outside(optimizer, freezes)
    except Exception as error:
        if len(units) > 1 and not module.startswith(INDEPENDENT_IF_UNTRIED):
            return f"checking whether it updates each parameter independently failed ({type(error).__name__}: {error})"
    return None


def _depends_on(optimizer: torch.optim.Optimizer, half_of: list[int], half: int) -> bool:
    """Whether parameters or state of the other half change if only the gradients of this half do."""
    first, second = (_Twin(optimizer) for _ in range(2))
    factors = [torch.tensor(3.0 if its_half == half else 1.0) for its_half in half_of]
    _step_together(first, second, factors)
    others = [index for index, its_half in enumerate(half_of) if its_half != half]
    return not all(_equal(first.values_of(index), second.values_of(index)) for index in others)


def _kept_outside(optimizer: torch.optim.Optimizer, freezes: bool) -> str | None:
    """Return why values would be missing in checkpoints or on other stages; None if all are in the state."""
    inner = next((other for other in _optimizers_in(optimizer) if other.state is not optimizer.state), None)
    if inner is not None:
        return f"its state is in another optimizer ({type(inner).__name__}), and would be missing in checkpoints"
    twin = _Twin(optimizer)
    _step_together(twin, twin, [torch.tensor(1.0)] * len(twin.parameters))
    if (key := twin.key_with_values()) is not None:
        return f"it keeps values of the parameters in `state` under other keys than the parameters ({key})"
    if freezes and (name := twin.attribute_with_values()) is not None:
        return f"it keeps values of the parameters in its attribute {name!r}, which do not move with layers"
    has_run: list[bool] = []
    twin.optimizer.register_state_dict_post_hook(lambda *_: has_run.append(True))
    twin.optimizer.state_dict()
    if not has_run:
        return "its state_dict() does not call torch.optim.Optimizer's, and checkpoints would lack other stages' state"
    return None


def _step_together(first: _Twin, second: _Twin, factors: Sequence[torch.Tensor]) -> None:
    """Step two twins. The second twin's gradients are the first twin's times a factor for each parameter."""
    for step, scale in enumerate(GRADIENT_SCALES):
        for index, (a, b) in enumerate(zip(first.parameters, second.parameters, strict=True)):
            gradient = torch.rand(a.shape, generator=torch.Generator().manual_seed(index), dtype=a.dtype)
            a.grad = gradient * scale
            b.grad = a.grad * factors[index].to(a.dtype)
        for twin in (first, second):
            torch.manual_seed(step)
            twin.optimizer.step()


class _Twin:
    """A copy of an optimizer in its initial state, without hooks, over tiny parameters on the CPU.

    Optimizers inside it (`base_optimizer`) are copied in the same way. `copy.deepcopy` alone does not suffice, because
    an optimizer's `__getstate__` drops attributes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        real = [p for group in optimizer.param_groups for p in group["params"]]
        self.parameters = [_tiny(p, index) for index, p in enumerate(real)]
        memo: dict[int, Any] = {id(p): tiny for p, tiny in zip(real, self.parameters, strict=True)}
        originals = _optimizers_in(optimizer)
        for original in originals:
            memo[id(original)] = object.__new__(type(original))
            memo[id(original.state)] = defaultdict(dict)
        for original in originals:
            twin = memo[id(original)]
            for name, value in original.__dict__.items():
                if name.startswith("_optimizer_") and name.endswith("_hooks"):
                    twin.__dict__[name] = OrderedDict()
                elif name != "step":  # a learning rate scheduler wraps the real one's `step`
                    twin.__dict__[name] = copy.deepcopy(value, memo)
        self.optimizer = memo[id(optimizer)]
        switch = getattr(self.optimizer, "train", None)  # schedule-free optimizers have one
        if callable(switch):
            switch()

    def values_of(self, index: int) -> list[Any]:
        """Return the values of a parameter and of its optimizer state."""
        parameter = self.parameters[index]
        state = self.optimizer.state
        of_none = [state[key] for key in state if not isinstance(key, torch.Tensor)]
        return [parameter.detach(), *state.get(parameter, {}).values(), *of_none]

    def key_with_values(self) -> str | None:
        """A key of the state that is no parameter, with tensors in the shapes of parameters; None without one."""
        shapes = {parameter.shape for parameter in self.parameters if parameter.numel() > 1}
        others = {key: values for key, values in self.optimizer.state.items() if not isinstance(key, torch.Tensor)}
        for key, values in others.items():
            tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
            if any(tensor.is_floating_point() and tensor.shape in shapes for tensor in tensors):
                return repr(key)
        return None

    def attribute_with_values(self) -> str | None:
        """Name of an attribute with a container of tensors that have the shapes of parameters; None without one."""
        shapes, own = {parameter.shape for parameter in self.parameters}, set(map(id, self.parameters))
        for name, value in vars(self.optimizer).items():
            if name in ("state", "param_groups", "defaults") or isinstance(value, torch.optim.Optimizer):
                continue
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and id(leaf) not in own]
            if any(tensor.dim() and tensor.shape in shapes for tensor in tensors):
                return name
        return None


def _optimizers_in(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    found, todo = [optimizer], [optimizer]
    while todo:
        for value in todo.pop().__dict__.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(inner, torch.optim.Optimizer) and all(inner is not other for other in found):
                    found.append(inner)
                    todo.append(inner)
    return found


def _tiny(parameter: torch.Tensor, seed: int) -> nn.Parameter:
    shape = tuple(min(size, 3) for size in parameter.shape)
    dtype = parameter.dtype if parameter.dtype == torch.float64 else torch.float32  # half precision hides differences
    return nn.Parameter(torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 0.01)


def _equal(a: list[Any], b: list[Any]) -> bool:
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            if x.shape != y.shape or not torch.equal(x.nan_to_num(), y.nan_to_num()):
                return False
        elif isinstance(x, (int, float, str)) and x != y:
            return False
    return True
