"""Finds the sequential layers of any model, and the parameters that each of them needs.

The search is the same for all model families. Its result is verified before use: `LayerStack.discover` runs the model
one unit at a time, with NaN in all parameters and values that the unit should not need, and compares the result with
the unsplit model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..errors import UnsupportedModelError, is_out_of_memory
from ..randomness import global_state_kept
from .batch_statistics import normalised_by_batch, running_statistics_kept
from .dropout import WithoutDropout
from .elsewhere import placeholder
from .layer_range import LayerRangeRunner
from .left_as_found import left_as_found
from .nested import is_continuous, tensors_of
from .placeholders import ParameterTable, evaluation_mode, reachable_leaves
from .refusals import (
    LAYERDROP,
    USE_ONE_STAGE,
    configs_of,
    has_router_loss,
    refuse_by_configuration,
    refuse_changed_weights,
    refuse_own_backward,
    refusing_what_fails,
    users_functions,
)
from .stacks import find_stacks, tapped_modules
from .units import CalledWith, Carry, ModelLayers, TracedLayers, Unit, with_unreached


@dataclass(frozen=True)
class CarrySlot:
    """One tensor of the carry at a boundary between units."""

    stack: int
    position: int  # among the tensors in the stack's output
    is_used: bool  # False: no later unit reads its values, only its shape is needed
    needs_gradient: bool  # the loss depends on it through autograd


@dataclass(frozen=True)
class UnitNeeds:
    """What each unit of a model needs.

    Attributes:
        owners: for each unit, the names of the parameters it needs. The first unit also needs the parameters before
            the layers, the last unit the head's. A parameter needed by several units (a tied head, ALBERT's layers) is
            *shared*.
        boundaries: `boundaries[k]` describes the carry between units k - 1 and k; empty for k = 0.
        unreached: names of parameters that no gradient reached with the probed batch; a unit owns them nevertheless.
        only_returned: names that the last unit needs only for an output outside the loss (T5 returns its encoder's
            output): if the unit runs alone, they get no gradient.
        trained_with: as `owners`, without the parameters that a unit owns only because it may read them without a
            gradient.
    """

    owners: tuple[frozenset[str], ...]
    boundaries: tuple[tuple[CarrySlot, ...], ...]
    unreached: frozenset[str]
    only_returned: frozenset[str]
    trained_with: tuple[frozenset[str], ...]


@dataclass(frozen=True)
class StackDescription:
    """A `LayerStack` without its model, as it was discovered; it can be sent to another process."""

    traced: TracedLayers
    needs: UnitNeeds
    whole_because: str


@dataclass(frozen=True, eq=False)
class LayerStack:
    """The units of one model, between which it can be split into pipeline stages. It does not change.

    Attributes:
        runner: runs ranges of the units.
        table: the model's parameters by name.
        needs: what each unit needs.
        whole_because: why the model cannot run on a part of a batch (flat image patches have no entry for each
            sample), or runs differently on it (it counts its calls); empty if it can.
    """

    runner: LayerRangeRunner
    table: ParameterTable
    needs: UnitNeeds
    whole_because: str = ""

    @property
    def model(self) -> nn.Module:
        """The model, which must be complete when its units are discovered."""
        return self.runner.model

    @property
    def units(self) -> tuple[Unit, ...]:
        """One entry per layer call, in execution order."""
        return self.runner.units

    @property
    def owners(self) -> tuple[frozenset[str], ...]:
        """As in `UnitNeeds`."""
        return self.needs.owners

    @property
    def boundaries(self) -> tuple[tuple[CarrySlot, ...], ...]:
        """As in `UnitNeeds`."""
        return self.needs.boundaries

    @property
    def is_random(self) -> bool:
        """Whether training skips layers at random."""
        return any(getattr(part, field, 0.0) for part in configs_of(self.model) for field in LAYERDROP)

    @property
    def num_units(self) -> int:
        return len(self.owners)

    def owned(self, start: int, stop: int) -> frozenset[str]:
        """Names of the parameters that a stage with the units [start, stop) needs."""
        return frozenset().union(*self.owners[start:stop])

    def shared(self, bounds: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The parameters that several stages need, and these stages, for a split at `bounds` (0, ..., num_units)."""
        stages: dict[str, tuple[int, ...]] = {}
        for stage, (start, stop) in enumerate(pairwise(bounds)):
            for name in self.owned(start, stop):
                stages[name] = (*stages.get(name, ()), stage)
        return {name: stages[name] for name in self.table.names if len(stages.get(name, ())) > 1}

    # ------------------------------------------------------------------------------------ discovery
    @classmethod
    def discover(
        cls,
        model: nn.Module,
        batch: dict[str, Any],
        called: CalledWith | None = None,
        named: Sequence[str] | None = None,
        is_split: bool = True,
    ) -> LayerStack:
        """Find the units of a complete model by running it on a small batch.

        Costs about three forwards and one autograd graph of the batch (no backward). Afterwards the model's weights,
        modes and `requires_grad` flags are as before, and its layers run unchanged outside of the runner.

        1. Find the stacks of layers, and the order of their calls in a forward.
        2. Run one unit at a time, in eval mode and in training mode without dropout; the leaves of its autograd graph
           are the parameters and carried values it needs.
        3. Run again with everything else set to NaN: the result must equal the unsplit model's.

        If that fails, each layer becomes a stack of its own: the carry then holds the outputs of all layers, not only
        of the last one, and step 2 shows which outputs a later layer or the head reads (DPT's head reads four). As the
        last resort, skipped layers return copies, because some models change the outputs of layers in place.

        Args:
            model: the complete model, on one device.
            batch: keyword arguments of `model.forward` with 1 or 2 samples, for which it returns a loss or logits.
            called: how the loss calls the model.
            named: names of the modules that contain the layers (`pipeline_layers`); None to find them.
            is_split: whether the model may be split. Otherwise it is not run in training mode, in which it may change.

        Raises:
            ValueError: if a module in `named` does not exist or contains no layers.
            UnsupportedModelError: if the model has no sequential layers, or they depend on one another in a way that
                prevents a split.
            Exception: any error that the unsplit model raises on the batch.
        """
        refuse_by_configuration(model)
        with evaluation_mode(model):
            versions = _versions(model)
            called = called or CalledWith()
            arguments = batch if called.nested_in is None else {called.nested_in: batch}
            stacks = tuple(map(tuple, find_stacks(model, arguments, named)))
            alone = tuple((name,) for names in stacks for name in names)
            taps = tapped_modules(model, stacks, arguments) if has_router_loss(model) else {}
            refusals: list[UnsupportedModelError] = []
            tried = [ModelLayers(alone, taps=taps), ModelLayers(alone, copies_carry=True, taps=taps)]
            for layers in [*tried] if taps else [ModelLayers(stacks), *tried]:
                runner = LayerRangeRunner(model, layers, CalledWith(nested_in=called.nested_in))
                try:
                    stack = cls._discover_with(runner, batch, versions if is_split else None)
                except UnsupportedModelError as error:
                    refusals.append(error)
                else:
                    refuse_changed_weights(model, versions)
                    found = stack.describe()
                    return cls.of(model, replace(found, traced=replace(found.traced, called=called)))
        raise refusals[0]

    @classmethod
    def _discover_with(
        cls, runner: LayerRangeRunner, batch: dict[str, Any], versions: dict[str, int] | None
    ) -> LayerStack:
        """`discover` with the layers of this runner, in eval mode.

        Args:
            runner: runs the layers.
            batch: as for `discover`.
            versions: counters of in-place changes of the parameters. Those of the forward in training mode are added:
                `check_training` says what it changes. None: without this forward.
        """
        model = runner.model
        runner.install()
        try:
            whole = output_tensors(runner.trace(batch, partial(refuse_own_backward, model)))  # 1
            if not runner.units:
                raise UnsupportedModelError(model, "its forward calls none of its layers.", USE_ONE_STAGE)
            table = ParameterTable(model)
            with refusing_what_fails(model), NotingHooks() as hooks:
                reached, used, only_returned, _ = _reached_by_each_unit(runner, table, batch)  # 2
            why = REGISTERS_HOOKS if hooks.found else ""
            unreached = frozenset(table.names) - frozenset().union(*reached)  # in eval mode: perhaps not in each step
            failure = None
            if versions is not None:
                before = _versions(model)
                try:
                    reached_in_training, used_in_training, functions = _reached_in_training(runner, table, batch)
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    failure = error  # `check_training` says why
                else:
                    reached = [one | other for one, other in zip(reached, reached_in_training, strict=True)]
                    used = [one | other for one, other in zip(used, used_in_training, strict=True)]
                    why = why or (OWN_FUNCTION.format(functions[0]) if functions else "")
                if (after := _versions(model)) != before:  # a teacher that is an average, for example
                    versions.update({name: versions[name] + after[name] - before[name] for name in versions})
                    with refusing_what_fails(model):
                        whole = output_tensors(runner.trace(batch))
            nowhere = frozenset(table.names) - frozenset().union(*reached)
            # A value or parameter can be read without a gradient (under no_grad, by an index), and autograd then does
            # not show which unit needs it: if the minimal candidate fails, all units get it. At last all units get all
            # parameters outside of the layers (RT-DETR chooses its decoder's inputs by the scores of a head).
            owners = [with_unreached(reached, runner.units, nowhere, everywhere) for everywhere in (False, True)]
            outside = _outside(table, runner.units)
            owners.append(tuple(names | outside for names in owners[-1]))
            with refusing_what_fails(model):
                needs = UnitNeeds(owners[0], _boundaries(runner, used), unreached, only_returned, owners[0])
                stack = cls(runner, table, needs, why)
                if stack._equals_uncut(whole, batch):  # 3
                    return stack
                if failure is not None:
                    raise failure
                for names in owners:
                    needs = replace(needs, owners=names, boundaries=_boundaries(runner, used, all_used=True))
                    stack = cls(runner, table, needs, why)
                    if stack._equals_uncut(whole, batch):
                        return stack
        finally:
            runner.remove()
        with torch.no_grad():
            again = output_tensors(model(**runner.arguments(batch)))
        if again.keys() != whole.keys() or not all(_are_equal(again[key], whole[key]) for key in whole):
            raise UnsupportedModelError(model, CHANGES_ITSELF, USE_ONE_STAGE)
        raise UnsupportedModelError(
            model,
            "when its layers are run one at a time, the result differs from that of the whole model (it may read"
            " values of earlier layers that are not their outputs).",
            USE_ONE_STAGE,
        )

    @classmethod
    def uncut(cls, model: nn.Module, called: CalledWith | None = None) -> LayerStack:
        """The whole model as one unit. Works for any model, also without layers; the model is not called.

        Args:
            model: the model.
            called: how the loss calls it.
        """
        table = ParameterTable(model)
        everything = (frozenset(table.names),)
        needs = UnitNeeds(everything, ((),), frozenset(), frozenset(), everything)
        return cls(LayerRangeRunner(model, ModelLayers(()), called), table, needs)

    @classmethod
    def of(cls, model: nn.Module, found: StackDescription) -> LayerStack:
        """The units of a model that another process has discovered (`describe`). The model is not called."""
        return cls(LayerRangeRunner.of(model, found.traced), ParameterTable(model), found.needs, found.whole_because)

    def describe(self) -> StackDescription:
        """The discovered units, for other processes with the same model."""
        return StackDescription(self.runner.describe(), self.needs, self.whole_because)

    @contextmanager
    def without_others(self, unit: int) -> Iterator[None]:
        """Inside, the parameters that a unit does not need are NaN, as if they were on other processes."""
        absent = {name: self.table[name] for name in self.table.names if name not in self.owners[unit]}
        nan = {name: placeholder(p, float("nan") if p.is_floating_point() else 0) for name, p in absent.items()}
        with self.table.replaced(nan):
            yield

    def _equals_uncut(self, whole: dict[str, torch.Tensor], batch: dict[str, Any]) -> bool:
        carry: Carry = {}
        with torch.no_grad():
            for k in range(self.num_units):
                for slot in self.boundaries[k]:
                    if not slot.is_used:
                        tensors = list(carry[slot.stack])
                        tensors[slot.position] = torch.full_like(tensors[slot.position], float("nan"))
                        carry[slot.stack] = tuple(tensors)
                with self.without_others(k):
                    if k + 1 < self.num_units:
                        carry = self.runner.run(k, k + 1, carry, batch)
                    else:
                        with self.runner.to_the_end(k, carry):
                            parts = output_tensors(self.model(**self.runner.arguments(batch)))
        return parts.keys() == whole.keys() and all(_are_equal(parts[key], whole[key]) for key in whole)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors are equal up to rounding, value by value: a large value does not widen the others' tolerance."""
    if one.shape != other.shape:
        return False
    if one.is_complex() and other.is_complex():
        return _are_equal(torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj()))
    if not one.is_floating_point():
        return torch.equal(one, other)
    tolerance = 3e-2 if one.dtype in (torch.float16, torch.bfloat16) else 1e-4
    return torch.allclose(one.float(), other.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def output_tensors(output: Any) -> dict[str, torch.Tensor]:
    """The loss, logits and other tensors at the top level of a model's output."""
    if isinstance(output, dict):
        return {key: value for key, value in output.items() if isinstance(value, torch.Tensor)}
    return {str(index): value for index, value in enumerate(tensors_of(output))}


def loss_outputs(outputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The outputs that a loss can be computed from: the loss and logits of any name; without these, all outputs."""
    return [value for key, value in outputs.items() if key == "loss" or "logits" in key] or list(outputs.values())


def why_whole(stack: LayerStack) -> str:
    """Return why parts of a batch may give other results than the whole; empty if no reason is known.

    It reads modules and the stack's description, and does not call the model.
    """
    if stack.whole_because:
        return stack.whole_because
    return hooked(stack.model) or normalised_by_batch(stack.model) or ""


def hooked(model: nn.Module, counts: Callable[..., bool] = lambda *hooks: any(hooks)) -> str:
    """Return which hook on a parameter or a module would see the gradients of parts of a batch; empty without one.

    Args:
        model: the model.
        counts: whether there is a hook that counts in the given tables.
    """
    with torch._C.DisableTorchFunctionSubclass():  # each step looks, and most parameters may be hidden
        hooks = [(each, each._backward_hooks, each._post_accumulate_grad_hooks) for each in model.parameters()]
    for parameter, *tables in hooks:
        if counts(*tables):
            name = next(name for name, one in model.named_parameters() if one is parameter)
            return f"a hook on the parameter {name} would see the gradients of parts of a batch"
    for module in model.modules():
        if counts(module._backward_hooks, module._backward_pre_hooks):
            name = next(name for name, one in model.named_modules() if one is module)
            return f"a backward hook on {name or 'the model'} would see the gradients of parts of a batch"
    return ""


CHANGES_ITSELF = (
    "its forward returns something else when it is called again on the same batch (it counts its calls, steps a"
    " schedule, or writes into its inputs)."
)
OWN_FUNCTION = "the backward of the autograd function {} in its layers may count calls"
"""As of functions that add the gradient of an auxiliary loss, a mean over the samples of each call."""
REGISTERS_HOOKS = "its forward registers hooks, which would see the gradients of parts of a batch"


class NotingHooks(TorchFunctionMode):
    """Notes whether a forward registers hooks on what it computes; they would see gradients of parts of a batch.

    Inside, a hook on a tensor that requires no gradient is not registered, and no error is raised: in a training the
    tensor may require one.
    """

    found = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.register_hook:
            self.found = True
            if not args[0].requires_grad:
                return RemovableHandle(OrderedDict())
        return func(*args, **(kwargs or {}))


def _reached_by_each_unit(
    runner: LayerRangeRunner, table: ParameterTable, batch: dict[str, Any]
) -> tuple[list[set[str]], list[set[tuple[int, int]]], frozenset[str], list[str]]:
    """For each unit, run alone: names of the parameters and (stack, position) of the carried tensors it needs.

    The third value holds the names that the last unit needs only for outputs that are neither loss nor logits, the
    fourth one names autograd functions of the user's in the other units.
    """
    functions: list[str] = []
    owners: list[set[str]] = []
    used: list[set[tuple[int, int]]] = []
    with table.all_trainable(), torch.enable_grad():
        name_of = {id(table[name]): name for name in table.names}
        carry: Carry = {}
        last = len(runner.units) - 1
        for k, unit in enumerate(runner.units):
            carry = {stack: tuple(_leaf(tensor) for tensor in tensors) for stack, tensors in carry.items()}
            slot_of = {id(t): (s, i) for s, tensors in carry.items() for i, t in enumerate(tensors)}
            if k < last:
                carry = runner.run(k, k + 1, carry, batch)
                roots: Sequence[torch.Tensor] = carry[unit.stack]
                functions += users_functions(roots)
            else:
                with runner.to_the_end(k, carry):
                    outputs = output_tensors(runner.model(**runner.arguments(batch)))
                roots = tuple(outputs.values())
                trained = {id(leaf) for leaf in reachable_leaves(loss_outputs(outputs))}
            leaves = reachable_leaves(roots)
            owners.append({name_of[id(leaf)] for leaf in leaves if id(leaf) in name_of})
            used.append({slot_of[id(leaf)] for leaf in leaves if id(leaf) in slot_of})
    only_returned = owners[-1] - {name for number, name in name_of.items() if number in trained}
    return owners, used, frozenset(only_returned), functions


def _versions(model: nn.Module) -> dict[str, int]:
    """Autograd's counter of in-place changes of each parameter."""
    return {name: parameter._version for name, parameter in model.named_parameters()}


def _reached_in_training(
    runner: LayerRangeRunner, table: ParameterTable, batch: dict[str, Any]
) -> tuple[list[set[str]], list[set[tuple[int, int]]], list[str]]:
    """As `_reached_by_each_unit`, in training mode: it may add an auxiliary loss, or mask words by a trained vector.

    In eval mode, wav2vec 2.0 chooses its codes without a gradient.
    """
    with left_as_found(runner.model), _training_without_dropout(runner.model), NotingHooks():
        reached, used, _, functions = _reached_by_each_unit(runner, table, batch)
    return reached, used, functions


@contextmanager
def _training_without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, a model in eval mode is in training mode, but draws no dropout and keeps its running statistics."""
    with evaluation_mode(model), WithoutDropout(), global_state_kept():
        model.train()
        with running_statistics_kept(model):
            yield


def _outside(table: ParameterTable, units: Sequence[Unit]) -> frozenset[str]:
    """Names of the parameters that are in no unit's module."""
    return frozenset(name for name in table.names if not any(name.startswith(unit.name + ".") for unit in units))


def _boundaries(
    runner: LayerRangeRunner, used: Sequence[set[tuple[int, int]]], all_used: bool = False
) -> tuple[tuple[CarrySlot, ...], ...]:
    """Derive the values that must cross each boundary from the values that each unit reads; with `all_used`, all."""
    num_units = len(runner.units)
    boundaries: list[tuple[CarrySlot, ...]] = [()] * num_units
    needed_later: set[tuple[int, int]] = set()
    for k in range(num_units - 1, 0, -1):
        replaced_here = runner.units[k].stack
        needed_later = {slot for slot in needed_later if slot[0] != replaced_here} | used[k]
        boundaries[k] = tuple(
            CarrySlot(
                stack,
                position,
                is_used=all_used or not floating or (stack, position) in needed_later,
                needs_gradient=(stack, position) in needed_later,
            )
            for stack in sorted({unit.stack for unit in runner.units[:k]})
            for position, floating in enumerate(runner.floating_outputs(stack))
        )
    return tuple(boundaries)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(is_continuous(tensor))
