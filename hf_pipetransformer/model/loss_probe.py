"""Probes what a model's loss requires of a pipeline, on a few samples before the model is split.

Users of the Trainer compute losses in any way they like. What a loss requires of a pipeline cannot be seen from its
code, so it is tried, while every process still holds the whole model and all can refuse it at once. The probe runs the
loss as training does: in training mode with dropout off, on samples of all classes, and with slightly changed weights.
With a new head, all samples would have nearly the same loss, and then every weighted mean looks like a plain one.

1. Does the loss keep state (a buffer, a counter, a running mean) from call to call?
2. Is it random beyond dropout? Then the remaining probes run in eval mode, and a probe in training mode checks whether
   the outputs of a sample depend on other samples.
3. Which parameters get no gradient from it?
4. How do losses and gradients of parts add up to those of the whole batch?
5. With several stages: is the loss the same if only the last layer runs, and nothing that other stages hold is there?
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from ..errors import UnsupportedModelError, is_out_of_memory
from ..randomness import global_state_kept, parts_of_function, seed_all
from .batch_statistics import normalised_by_batch
from .dropout import WithoutDropout
from .layer_range import Carry, Unit
from .layer_stack import LayerStack
from .left_as_found import left_as_found, with_parts
from .loss_scaling import (
    LossOutcome,
    LossReduction,
    NumItems,
    Tolerance,
    difference,
    find_loss_reduction,
    items_passed,
    unexamined,
)
from .mapped_weights import FileMappings, is_written
from .micro_batch import Batch, batch_rows
from .nested import tensors_of
from .placeholders import evaluation_mode, placeholder, reachable_leaves, values_of
from .remembered_units import RememberedUnits

ComputeLoss = Callable[[Batch, NumItems, int], torch.Tensor]
"""Computes the loss of a batch, 0-dimensional, for `num_items_in_batch` and a seed."""

MOST_PROBED = 12
"""Maximum number of parameters that are changed and whose gradients are compared: those nearest to the loss."""
PROBED_ELEMENTS = 2**20
"""Maximum number of elements of each of these parameters."""
MOVED_BY = 0.2
"""Size of the change relative to a parameter's spread. A parameter of zeros only is changed by `NEW_SPREAD`."""
NEW_SPREAD = 0.05
FACTORS = (1.0, 0.1, 0.01)
"""Factors on the probed parameters, tried in turn until the loss is not zero: with large logits it may vanish."""
NOTHING = 1e-4
MIXING_SEEDS = 3
HOOK_TOLERANCE = 1e-2
"""Tolerance when hooks are applied to a sum of gradients, relative to their norms, because half precision rounds."""
ONE_STAGE = "Or set pipeline_parallel_size=1."


@dataclass(frozen=True)
class LossProbe:
    """The results of probing a loss.

    Attributes:
        reduction: how losses of parts add up.
        without_gradient: names of the parameters that the loss does not reach.
        is_random: whether training mode draws random numbers besides dropout.
    """

    reduction: LossReduction
    without_gradient: frozenset[str]
    is_random: bool


def probe_loss(
    stack: LayerStack,
    batches: Sequence[Batch],
    compute_loss: ComputeLoss,
    *,
    others: Sequence[Any] = (),
    shifts_labels: bool,
    label_names: Sequence[str] = ("labels",),
    passes_items: bool = True,
    is_cut: bool,
    apart: Sequence[Batch] = (),
    tolerance: Tolerance,
    blocks: int = 1,
    recalls: bool = False,
) -> LossProbe:
    """Probe a loss. Afterwards the model, its weights, random generators and `others` are as before.

    Args:
        stack: the units of the whole model.
        batches: a batch of a few samples, and the same samples with other labels (`label_variants`).
        compute_loss: computes the loss.
        others: further objects whose attributes the loss may change (the trainer).
        shifts_labels: whether the model predicts label i + 1 at position i.
        label_names: names of the inputs that are labels.
        passes_items: whether the Trainer passes `num_items_in_batch`.
        is_cut: whether the model will be split into several stages.
        apart: as in `find_loss_reduction`.
        tolerance: tolerance of the comparisons.
        blocks: number of rows that the collator has made of each sample, perhaps in blocks.
        recalls: whether the units below the last one are computed only once for the same arguments in step 4. Only
            with several stages, as 5 computes them anew and refuses losses for which this would make a difference.

    Raises:
        UnsupportedModelError: with several stages, if the loss or the model keeps state, or the loss needs more of the
            model than its last stage.
    """
    first = batches[0]
    items = items_passed(first, shifts_labels, passes_items)
    study = _Probe(stack, compute_loss, tuple(others), items, recalls and is_cut)
    with left_as_found(stack.model, *others), global_state_kept():
        with study.mode(evaluates=False):
            reached = study.reached(first)
        try:
            for factor in FACTORS:
                with study.moved(reached, factor):
                    found = _probe_moved(
                        study,
                        batches,
                        reached,
                        shifts_labels=shifts_labels,
                        label_names=label_names,
                        passes_items=passes_items,
                        is_cut=is_cut,
                        apart=apart,
                        tolerance=tolerance,
                        blocks=blocks,
                        accepts_nothing=factor != FACTORS[-1],
                    )
                if found is not None:
                    break
            assert found is not None
            return found
        except RuntimeError as error:  # autograd's; the loss itself works: it has just run as it will in training
            if is_out_of_memory(error):
                raise
            why = f"it fails when only a part of its autograd graph is built ({type(error).__name__}: {error})"
            if is_cut:
                raise UnsupportedModelError(
                    stack.model,
                    f"its loss probably computes gradients itself (for example a gradient penalty): {why}.",
                    "Set pipeline_parallel_size=1.",
                ) from error
            return LossProbe(unexamined(shifts_labels, why), study.names - frozenset(reached), False)


def _probe_moved(
    study: _Probe,
    batches: Sequence[Batch],
    reached: Sequence[str],
    *,
    shifts_labels: bool,
    label_names: Sequence[str],
    passes_items: bool,
    is_cut: bool,
    apart: Sequence[Batch],
    tolerance: Tolerance,
    blocks: int,
    accepts_nothing: bool,
) -> LossProbe | None:
    """`probe_loss` with changed weights; None if the loss is almost zero and `accepts_nothing` is set."""
    first = batches[0]
    with study.mode(evaluates=False):
        is_random, keeps_state = study.repeated(first)
        coupled = keeps_state or normalised_by_batch(study.model)
        if accepts_nothing and study.is_nothing(first):
            return None
    if keeps_state is not None and is_cut:
        raise UnsupportedModelError(
            study.model,
            f"{keeps_state}. It would change once per micro-batch instead of once per batch.",
            f"Change it once per step in a callback. {ONE_STAGE}",
        )
    with study.mode(evaluates=is_random), nullcontext() if is_random else study.recalling():
        if is_random:  # layers may have been skipped
            reached = study.reached(first)
        reduction = unexamined(shifts_labels, coupled or "")
        for rows_of_sample in sorted({1, blocks}) if coupled is None else ():
            reduction = find_loss_reduction(
                study.outcome,
                batches,
                shifts_labels=shifts_labels,
                label_names=label_names,
                passes_items=passes_items,
                apart=apart,
                tolerance=tolerance,
                blocks=rows_of_sample,
            )
            if reduction.kind != "whole":
                break
    if reduction.kind != "whole" and (found := _hooks_on_parts(study.model)) is not None:
        reduction = unexamined(shifts_labels, found)
    if reduction.kind != "whole" and is_random and study.mixes_rows(first):
        reduction = unexamined(shifts_labels, "in training mode a sample's outputs depend on the other samples")
    if is_cut:
        if is_random:
            study.check_randomness(first, tolerance)
        for evaluates in (True,) if is_random else (True, False):
            with study.mode(evaluates=evaluates):
                study.check_last_stage(first, tolerance)
    return LossProbe(reduction, study.names - frozenset(reached), is_random)


class _Probe:
    """Calls the loss in a reproducible way."""

    def __init__(
        self,
        stack: LayerStack,
        compute_loss: ComputeLoss,
        others: tuple[Any, ...],
        num_items: NumItems,
        recalls: bool,
    ) -> None:
        self._stack, self._compute_loss, self._others, self._num_items = stack, compute_loss, others, num_items
        # for a split model only parameters of the last stage alone, as it has only a part of shared ones' gradients
        alone = stack.owners[-1] - frozenset[str]().union(*stack.owners[:-1])
        self._may_be_probed = (alone or stack.owners[-1]) & frozenset(stack.table.names)
        self._compares_gradients_of_a_cut = bool(alone)
        self._probed: tuple[str, ...] = ()
        self._evaluates = False
        self._known: list[tuple[Batch, NumItems, bool, LossOutcome]] = []
        last = [unit.module for unit in stack.units[-1:]]
        plain = [unit for unit in stack.units[:-1] if not stack.runner.is_tapped(unit)]
        below = [unit.module for unit in plain if unit.module not in last]
        # without parameters of its own the last unit's are changed and trained, and units below may have them
        self._below = RememberedUnits(below if recalls and alone else [])

    @property
    def model(self) -> nn.Module:
        return self._stack.model

    @property
    def names(self) -> frozenset[str]:
        """Names of all parameters."""
        return frozenset(self._stack.table.names)

    @contextmanager
    def mode(self, evaluates: bool) -> Iterator[None]:
        """Inside, the model is in eval mode, or in training mode without dropout."""
        self._evaluates = evaluates
        with evaluation_mode(self._stack.model), ExitStack() as stack:
            if not evaluates:
                self._stack.model.train()
                stack.enter_context(WithoutDropout())
            yield

    def recalling(self) -> AbstractContextManager[None]:
        """Inside, units below the last one are not computed again for the same arguments, if that was asked for."""
        return self._below.recalling()

    @contextmanager
    def moved(self, reached: Sequence[str], factor: float) -> Iterator[None]:
        """Inside, the probed parameters have slightly changed values, multiplied by a factor.

        Args:
            reached: names of parameters, the nearest to the loss first. The first ones are probed: the head and the
                layers below it. So a probe costs little more than a forward.
        """
        table, before = self._stack.table, {}
        may_be = [name for name in reached if name in self._may_be_probed and table[name].is_floating_point()]
        smallest = sorted(may_be, key=lambda name: table[name].numel())[:1]  # the head may be large itself
        small = [name for name in may_be if table[name].numel() <= PROBED_ELEMENTS]
        self._probed = tuple(small[:MOST_PROBED] or smallest)
        generator = torch.Generator().manual_seed(0)
        for name in self._probed:
            parameter = table[name]
            before[name] = parameter.detach().clone()
            spread = float(parameter.detach().float().std(correction=0)) if parameter.numel() > 1 else 0.0
            mean = float(parameter.detach().float().abs().mean())
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.data.add_(noise * (MOVED_BY * spread or MOVED_BY * mean or NEW_SPREAD)).mul_(factor)
        self._known.clear()
        self._below.forget()
        try:
            yield
        finally:
            self._below.forget()
            for name, value in before.items():
                table[name].data.copy_(value)

    def loss(self, batch: Batch, num_items: NumItems, seed: int = 0) -> torch.Tensor:
        """Compute the loss once and undo the side effects of the call."""
        with left_as_found(self._stack.model, *self._others):
            return self._compute_loss(dict(batch), num_items, seed)

    def outcome(self, batch: Batch, num_items: NumItems) -> LossOutcome:
        """Outcome of the whole model, computed only once for the same batch."""
        for known, items, evaluates, outcome in self._known:
            if known is batch and (items, evaluates) == (num_items, self._evaluates):
                return outcome
        with left_as_found(self._stack.model, *self._others):
            outcome = self._outcome(batch, num_items)
        self._known.append((batch, num_items, self._evaluates, outcome))
        return outcome

    def _outcome(
        self, batch: Batch, num_items: NumItems, place: AbstractContextManager[None] | None = None
    ) -> LossOutcome:
        """Loss and gradient of the probed parameters; side effects of the call remain.

        Args:
            batch: the samples.
            num_items: number of items that the loss is divided by.
            place: where the loss is computed. The backward runs outside of it: a layer that gradient checkpointing
                computes again is no call of the pass.
        """
        table = self._stack.table
        parameters = [table[name] for name in self._probed]
        with self._only_probed_trainable(), torch.enable_grad():
            with place or nullcontext():
                loss = self._compute_loss(dict(batch), num_items, 0)
            gradients: Sequence[torch.Tensor | None] = [None] * len(parameters)
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        flat = [
            (torch.zeros_like(p) if g is None else g.detach()).float().flatten()
            for p, g in zip(parameters, gradients, strict=True)
        ]
        return LossOutcome(float(loss.detach()), torch.cat(flat) if flat else None)

    @contextmanager
    def _only_probed_trainable(self) -> Iterator[None]:
        """Inside, only the probed parameters build a graph, so that nothing below them is kept for a backward."""
        parameters = {name: self._stack.table[name] for name in self._stack.table.names}
        before = {name: parameter.requires_grad for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in self._probed)
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.requires_grad_(before[name])

    def reached(self, batch: Batch) -> tuple[str, ...]:
        """Names of the parameters that a loss reaches, the nearest first. State that was empty may be filled."""
        table = self._stack.table
        with torch.enable_grad(), table.all_trainable():
            leaves = reachable_leaves([self._compute_loss(dict(batch), self._num_items, 0)])
        names = {id(table[name]): name for name in table.names}
        return tuple(names[id(leaf)] for leaf in leaves if id(leaf) in names)

    def repeated(self, batch: Batch) -> tuple[bool, str | None]:
        """Compute the loss again and report what differs.

        Returns:
            Whether training mode draws random numbers besides dropout; and a description of the state that a call
            leaves behind for the next one (None if there is none that matters, or if random numbers hide it).
        """
        model = self._stack.model
        with left_as_found(model, *self._others):
            with torch.no_grad():
                one = float(self._compute_loss(dict(batch), self._num_items, 1))
            before = _state_of(model, *self._others)
            with self.recalling():  # nothing to recall yet
                outcome = self._outcome(batch, self._num_items)
            changed = _changed(before, _state_of(model, *self._others))
            self._known.append((batch, self._num_items, self._evaluates, outcome))  # valid if no state is kept
            again = one
            if one != outcome.value:  # because of another seed, another state, or another kernel
                with torch.no_grad():  # all start from the same state, except state that cannot be restored
                    again, last, other = (float(self.loss(batch, self._num_items, seed)) for seed in (1, 1, 0))
                is_repeatable = again == last or math.isclose(again, last, rel_tol=1e-6)
                if is_repeatable and not (math.isclose(other, again, rel_tol=1e-6) or math.isnan(other + again)):
                    return True, None
        if changed is not None:
            return False, f"each forward pass in training mode changes {changed}"
        exactness = 0.0 if next(model.parameters()).device.type == "cpu" else 1e-6
        if abs(one - again) > exactness * abs(one):
            return False, f"the loss of the same batch is {one:.8g} in one call and {again:.8g} in the next"
        return False, None

    def is_nothing(self, batch: Batch) -> bool:
        """Whether loss and gradient are almost zero, so that all ways of adding up give the same result."""
        outcome = self.outcome(batch, self._num_items)
        return abs(outcome.value) + (0.0 if outcome.gradient is None else float(outcome.gradient.norm())) < NOTHING

    def mixes_rows(self, batch: Batch) -> bool:
        """Whether in training mode a sample's outputs change with another sample's inputs, with the same seed."""
        rows = batch_rows(batch)
        if rows < 2:
            return False
        other = {
            name: torch.cat([value[1:2], value[1:]])
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows
            else value
            for name, value in batch.items()
        }
        with self.mode(evaluates=False), torch.no_grad():
            for seed in range(MIXING_SEEDS):
                pairs = zip(self._outputs(batch, seed), self._outputs(other, seed), strict=False)
                if any(_differ_below_the_first_row(one, two, rows) for one, two in pairs):
                    return True
        return False

    def _outputs(self, batch: Batch, seed: int) -> list[torch.Tensor]:
        """Outputs of the model's first call."""
        found: list[tuple[torch.Tensor, ...]] = []
        hook = self._stack.model.register_forward_hook(lambda _, __, output: found.append(tensors_of(output)))
        try:
            self.loss(batch, self._num_items, seed)
        finally:
            hook.remove()
        return list(found[0]) if found else []

    def check_last_stage(self, batch: Batch, tolerance: Tolerance) -> None:
        """Compare the loss of the whole model with the loss when only the last unit runs and nothing else is there.

        Raises:
            UnsupportedModelError: if the losses differ.
        """
        # the parameters keep their `requires_grad` flags, which a penalty may inspect
        with left_as_found(self._stack.model, *self._others):
            outcomes = [self._value(batch)]
        computes: list[Callable[..., LossOutcome]] = [self._value]
        if self._compares_gradients_of_a_cut and not self._evaluates:
            outcomes.append(self.outcome(batch, self._num_items))
            computes.append(partial(self._outcome, num_items=self._num_items))
        for whole, cut in zip(outcomes, self._under_the_last_unit(batch, computes), strict=True):
            if math.isfinite(whole.value) and difference([(1.0, cut)], whole, tolerance) is not None:
                self._refuse_cut(whole.value, cut.value)

    def _refuse_cut(self, whole: float, cut: float) -> NoReturn:
        raise UnsupportedModelError(
            self._stack.model,
            f"compute_loss returns {cut:.6g} when only the last layer runs, but {whole:.6g} when all layers do:"
            " it changes the inputs before it calls the model, or reads earlier layers' hidden states or parameters.",
            "Change inputs in the data collator, and compute the loss from the model's final outputs and the last"
            " layer's parameters (for a penalty on all parameters use the optimizer's weight_decay), or set"
            " pipeline_parallel_size=1.",
        )

    def _value(self, batch: Batch, seed: int = 0, place: AbstractContextManager[None] | None = None) -> LossOutcome:
        with torch.no_grad(), place or nullcontext():
            return LossOutcome(float(self._compute_loss(dict(batch), self._num_items, seed)))

    def check_randomness(self, batch: Batch, tolerance: Tolerance) -> None:
        """Check that random numbers drawn before the layers, by each stage anew, do not affect the last stage.

        Then compare losses as `check_last_stage` does, with all layers drawing the same numbers each time.

        Raises:
            UnsupportedModelError: if they affect it, or if the losses differ.
        """
        stack, last = self._stack, self._stack.num_units - 1
        carry: Carry = {}

        def note(unit: Unit, output: Any) -> None:
            if unit is not stack.units[last]:
                carry[unit.stack] = tensors_of(output)

        losses = []
        stack.runner.install()
        try:
            with (
                self.mode(evaluates=False),
                left_as_found(stack.model, *self._others),
                # each layer, and the head with the last one, may draw random numbers, but draws the same ones here
                stack.runner.telling_entries(lambda: seed_all(0)),
            ):
                with stack.runner.to_the_end(0, None, note):
                    whole = self._value(batch).value
                for seed in (0, 1):
                    with stack.runner.to_the_end(last, carry):
                        losses.append(self._value(batch, seed).value)
                with self._on_the_last_stage(carry):
                    cut = self._value(batch).value
        finally:
            stack.runner.remove()
        one, other = losses
        if not (math.isclose(one, other, rel_tol=1e-6) or math.isnan(one + other)):
            raise UnsupportedModelError(
                stack.model,
                "in training mode it draws random numbers before its layers (for example for mixup or noise) that the"
                " last layers or the loss use, and each stage would draw different ones.",
                "Draw them in the data collator or in _prepare_inputs, or set pipeline_parallel_size=1.",
            )
        if math.isfinite(whole) and difference([(1.0, LossOutcome(cut))], LossOutcome(whole), tolerance) is not None:
            self._refuse_cut(whole, cut)

    def _under_the_last_unit(self, batch: Batch, computes: Sequence[Callable[..., LossOutcome]]) -> list[LossOutcome]:
        """What the last stage would compute if it had one unit; the parameters of other stages are NaN.

        Args:
            batch: the samples.
            computes: `_value` or `_outcome`, one after the other.
        """
        stack, last = self._stack, self._stack.num_units - 1
        stack.runner.install()
        try:
            with torch.no_grad(), left_as_found(stack.model, *self._others):
                carry = stack.runner.run(0, last, None, batch) if last else {}
            outcomes = []
            for compute in computes:
                # the model may change the values in place
                copies = {of: tuple(tensor.clone() for tensor in tensors) for of, tensors in carry.items()}
                with left_as_found(stack.model, *self._others):
                    outcomes.append(compute(batch, place=self._on_the_last_stage(copies)))
            return outcomes
        finally:
            stack.runner.remove()

    @contextmanager
    def _on_the_last_stage(self, carry: Carry) -> Iterator[None]:
        """Inside, one call of the model runs its last unit, and the values of all other units are missing."""
        stack, table = self._stack, self._stack.table
        last = stack.num_units - 1
        absent = {
            name: placeholder(table[name], float("nan") if table[name].is_floating_point() else 0)
            for name in table.names
            if name not in stack.owners[last]
        }
        with table.replaced(absent), stack.runner.poisoning_skipped(), stack.runner.to_the_end(last, carry):
            yield


def _hooks_on_parts(model: nn.Module) -> str | None:
    """Return why hooks on parameters change parts' gradients differently from their sum; None if they do not."""
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            return "post-accumulate-grad hooks on parameters would run after the gradient of each part of a batch"
        hooks = list((parameter._backward_hooks or {}).values())
        if not hooks or not parameter.is_floating_point():
            continue
        generator = torch.Generator().manual_seed(0)
        one, two = (torch.randn(parameter.shape, generator=generator).to(parameter) * 10 for _ in range(2))
        results = []
        with torch.no_grad(), left_as_found(*itertools.chain.from_iterable(map(_owners_of, hooks))):
            for gradient in (one, two, one + two):
                for hook in hooks:
                    changed = hook(gradient.clone())
                    gradient = gradient if changed is None else changed
                results.append(gradient.float())
        away = float((results[0] + results[1] - results[2]).norm())
        if not away <= HOOK_TOLERANCE * sum(float(result.norm()) for result in results):
            return f"a hook on {name} changes the gradients of parts of a batch differently from their sum"
    return None


def _owners_of(hook: Any) -> list[Any]:
    """The objects that a hook may change, for example a list of norms."""
    if isinstance(hook, MethodType):
        return [hook.__self__]
    return parts_of_function(hook) if isinstance(hook, FunctionType) else [hook]


def _differ_below_the_first_row(one: torch.Tensor, two: torch.Tensor, rows: int) -> bool:
    if not one.dim() or one.shape[0] != rows or one.shape != two.shape or not one.is_floating_point():
        return False
    return not torch.allclose(one[1:].float(), two[1:].float(), rtol=1e-4, atol=1e-5, equal_nan=True)


def _state_of(model: nn.Module, *others: Any) -> dict[str, Any]:
    """Buffers, numbers in attributes of user modules, and the norms of untrained parameters, by name.

    Includes modules that other objects have (a criterion of the trainer). Of transformers' own modules it includes
    only saved buffers, because they also keep tables that are computed from the inputs. Running statistics of batch
    normalisation are left out: each stage keeps those of its layers, and `normalised_by_batch` limits the rest.
    """
    mappings = FileMappings()
    state: dict[str, Any] = {
        f"the parameter {name}{f' (part {part})' if part else ''}": (
            None  # it has the values of its file, which need not be read
            if mappings.place_of(value) is not None and not is_written(value)
            else torch.linalg.vector_norm(value.float())
        )
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad  # such as those of a teacher that follows the model
        for part, value in enumerate(values_of(parameter))
        if value.numel()
    }
    modules = list(model.named_modules())
    for part in with_parts(*others):
        if isinstance(part, nn.Module) and part is not model:
            modules += part.named_modules(prefix=type(part).__name__)
    for prefix, module in modules:
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        is_own = not type(module).__module__.startswith(("transformers.", "torch."))
        for name, buffer in module.named_buffers(recurse=False):
            if is_own or name not in module._non_persistent_buffers_set:
                state[f"the buffer {prefix + '.' if prefix else ''}{name}"] = buffer.detach().clone()
        if not is_own:
            continue
        for name, value in vars(module).items():
            if isinstance(value, (int, float, torch.Tensor)) and name != "training":
                kept = value.detach().clone() if isinstance(value, torch.Tensor) else value
                state[f"{prefix + '.' if prefix else ''}{name}"] = kept
    return state


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    for name in before.keys() & after.keys():
        one, other = before[name], after[name]
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if one.shape != other.shape or not torch.equal(one, other):
                return name
        elif isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor) or one != other:
            return name
    return None


def raise_for_exchanged_inputs(model: nn.Module) -> NoReturn:
    """Report what `probe_loss` could not see: in training, the last stage got other inputs than the other stages.

    Raises:
        UnsupportedModelError: always.
    """
    raise UnsupportedModelError(
        model,
        "compute_loss called the model with different inputs than it received (or a forward pre-hook changed them),"
        " but the layers of the other stages ran on the original inputs.",
        "Change them in the data collator or in _prepare_inputs, or set pipeline_parallel_size=1.",
    )
