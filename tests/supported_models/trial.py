"""One class of transformers: it is built small, and tried to be cut."""

from __future__ import annotations

import itertools
import math
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from hf_pipetransformer.errors import UnsupportedModelError
from hf_pipetransformer.model.batch_statistics import normalised_by_batch
from hf_pipetransformer.model.dummy_inputs import dummy_batch
from hf_pipetransformer.model.elsewhere import placeholder
from hf_pipetransformer.model.layer_range import Carry
from hf_pipetransformer.model.layer_stack import LayerStack, loss_outputs, output_tensors

from .tiny_models import VARIANTS, Variant, build, tiny_config

RESULTS = ("supported", "refused", "failing", "not tried")
TOLERANCE = 1e-4
"""Relative to the largest value of a tensor: the same kernels on the same values, added in another order."""
SMALLEST_SCALE = 1e-3
"""Relative to the largest value of a step. A gradient that is zero except for rounding, such as an attention's key
bias's, has no scale of its own."""
SEED = 1


@dataclass(frozen=True)
class Candidate:
    """One class of transformers, with the model type of its configuration."""

    name: str
    model_type: str
    task: str


@dataclass
class Finding:
    """What became of one class."""

    name: str
    model_type: str
    task: str
    result: str
    reason: str = ""
    units: int = 0
    stacks: int = 0
    conditions: list[str] = field(default_factory=list)


Running = tuple[PreTrainedModel, dict[str, Any], dict[str, Tensor]]
"""A model, a batch for it, and the tensors after a step of the whole model."""


def examine(candidate: Candidate) -> Finding:
    """Build one class small, and try to cut it."""
    finding = Finding(candidate.name, candidate.model_type, candidate.task, "not tried")
    warnings.simplefilter("ignore")
    hf_logging.set_verbosity_error()
    try:
        model, batch, whole = _running_model(candidate, finding)
    except Exception as error:
        finding.reason = finding.reason or _in_one_line(error)
        return finding
    try:
        if normalised_by_batch(model) is not None:
            finding.conditions.append("num_microbatches=1")
        torch.manual_seed(SEED)
        stack = LayerStack.discover(model, batch)
        finding.units, finding.stacks = stack.num_units, len({unit.stack for unit in stack.units})
        if stack.num_units < 2:
            finding.result, finding.reason = "refused", "it has a single layer at this size"
            return finding
        for cut in sorted({stack.num_units // 2, stack.num_units - 1}):
            difference = difference_of(whole, step_when_cut(stack, cut, batch))
            if difference and not _differs_in_double_precision(stack, cut, batch):
                finding.conditions.append("compared in float64")
            elif difference:
                finding.result, finding.reason = "failing", f"cut at {cut} of {stack.num_units}: {difference}"
                return finding
        finding.result = "supported"
    except UnsupportedModelError as error:
        finding.result, finding.reason = "refused", _in_one_line(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        finding.result = "failing"
        finding.reason = f"{_in_one_line(error)} ({Path(where.filename).name}:{where.lineno})"
    return finding


def _running_model(candidate: Candidate, finding: Finding) -> Running:
    """The first variant with a whole model that runs forwards and backwards, twice with the same results."""
    cls = getattr(transformers, candidate.name)
    errors: list[Exception] = []
    for variant in VARIANTS:
        for large_weights in (True, False):
            try:
                return _try_variant(cls, candidate, variant, large_weights, finding)
            except _NotFinite:
                continue
            except Exception as error:
                if not isinstance(error, MemoryError):
                    errors.append(error)
                break
    if errors:
        raise errors[:2][-1]  # the second variant's; gaps are filled there
    raise MemoryError("no variant of it is small enough, or its values are not finite")


class _NotFinite(Exception):
    pass


def _try_variant(
    cls: type[PreTrainedModel], candidate: Candidate, variant: Variant, large_weights: bool, finding: Finding
) -> Running:
    tiny = tiny_config(candidate.model_type, variant)
    model = build(cls, tiny.config, large_weights=large_weights, check_size=variant.divide_widths_by < 16)
    batch = _with_noise(dict(dummy_batch(model, rows=2)))
    first, second = whole_step(model, batch), whole_step(model, batch)
    if not all(bool(torch.isfinite(t).all()) for t in first.values() if t.is_floating_point()):
        raise _NotFinite(f"{variant}: the whole model's result is not finite")
    difference = difference_of(first, second)
    if difference:
        raise ArithmeticError(f"the whole model gives another result each time ({difference})")
    finding.conditions = tiny.conditions
    return model, batch, first


def _with_noise(batch: dict[str, Any]) -> dict[str, Any]:
    """Random images and sounds in place of black and silent ones: batch normalisation would divide by almost zero.

    Masks of ones stay as they are.
    """
    generator = torch.Generator().manual_seed(SEED)
    return {
        name: torch.randn(value.shape, generator=generator) if value.is_floating_point() and not value.any() else value
        for name, value in batch.items()
    }


def _loss(outputs: dict[str, Tensor]) -> Tensor:
    """A number that every value of the loss or logits has its own weight in."""
    parts = []
    generator = torch.Generator().manual_seed(SEED)
    for tensor in loss_outputs(outputs):
        if tensor.is_floating_point() and tensor.requires_grad and tensor.numel():
            weights = torch.randn(tensor.shape, generator=generator)
            finite = torch.isfinite(tensor)  # masked scores are -inf on purpose
            tensor = tensor if tensor.dtype == torch.float64 else tensor.float()
            parts.append((torch.where(finite, tensor, 0.0) * weights).sum() / tensor.numel() ** 0.5)
    if not parts:
        raise ArithmeticError("nothing in its output depends on its weights")
    return torch.stack(parts).sum()


def _left_behind(model: PreTrainedModel, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The answers and gradients of a step; the model's gradients are then gone."""
    kept = {f"output {i}": t.detach() for i, t in enumerate(loss_outputs(outputs))}
    kept = {name: torch.nan_to_num(t, posinf=0.0, neginf=0.0, nan=float("nan")) for name, t in kept.items()}
    kept |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return kept


def whole_step(model: PreTrainedModel, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Answers and gradients of the uncut model."""
    torch.manual_seed(SEED)
    outputs = output_tensors(model(**batch))
    _loss(outputs).backward()
    return _left_behind(model, outputs)


def cut_step(stack: LayerStack, bounds: Sequence[int], batch: dict[str, Any], absent: float) -> dict[str, Tensor]:
    """Answers and gradients of stages between `bounds`, run one after the other, and their backwards in reverse.

    While one runs, in either direction, the parameters of the others have the value `absent`.
    """
    stages = list(itertools.pairwise(bounds))
    received: list[Carry] = [{}]
    handed_on: list[Carry] = []
    for start, stop in stages[:-1]:
        torch.manual_seed(SEED)
        with _only_parameters_of(stack, start, stop, absent):
            handed_on.append(stack.runner.run(start, stop, received[-1] or None, batch))
        received.append(_as_received(stack, stop, handed_on[-1], absent))
    torch.manual_seed(SEED)
    with _only_parameters_of(stack, *stages[-1], absent):
        with stack.runner.to_the_end(stages[-1][0], received[-1]):
            outputs = output_tensors(stack.model(**batch))
        _loss(outputs).backward()
    for (start, stop), sent, theirs in reversed(list(zip(stages, handed_on, received[1:], strict=False))):
        arrived = [
            (ours, other.grad)
            for index in sent
            for ours, other in zip(sent[index], theirs[index], strict=True)
            if ours.requires_grad and other.grad is not None
        ]
        with _only_parameters_of(stack, start, stop, absent):
            torch.autograd.backward([tensor for tensor, _ in arrived], [gradient for _, gradient in arrived])
    return _left_behind(stack.model, outputs)


def step_when_cut(stack: LayerStack, cut: int, batch: dict[str, Any]) -> dict[str, Tensor]:
    """`cut_step` in two parts. Absent parameters are NaN, or zero, as in a pipeline, if the model looks for NaN."""
    bounds = (0, cut, stack.num_units)
    stack.runner.install()
    try:
        return cut_step(stack, bounds, batch, math.nan)
    except AssertionError:  # I-BERT
        return cut_step(stack, bounds, batch, 0.0)
    finally:
        stack.runner.remove()


@contextmanager
def _only_parameters_of(stack: LayerStack, start: int, stop: int, absent: float) -> Iterator[None]:
    owned = stack.owned(start, stop)
    ghosts = {
        name: placeholder(stack.table[name], absent if stack.table[name].is_floating_point() else 0)
        for name in stack.table.names
        if name not in owned
    }
    with stack.table.replaced(ghosts):
        yield


def _as_received(stack: LayerStack, boundary: int, carry: Carry, absent: float) -> Carry:
    """The carry as another process has it: cut off from the graph, without what nobody reads."""
    received: dict[int, list[Tensor]] = {index: [] for index in carry}
    for slot in stack.boundaries[boundary]:
        sent = carry[slot.stack][slot.position]
        tensor = sent.detach() if slot.is_used else torch.full_like(sent, absent)
        received[slot.stack].append(tensor.requires_grad_(slot.needs_gradient and sent.requires_grad))
    return {index: tuple(tensors) for index, tensors in received.items()}


def difference_of(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = TOLERANCE) -> str:
    """The first tensor that differs between two steps, with the difference; empty if all are equal."""
    zero = torch.zeros(())
    largest = max((float(t.abs().max()) for t in a.values() if t.is_floating_point() and t.numel()), default=0.0)
    for name in [*a, *(name for name in b if name not in a)]:
        first, second = (step.get(name, zero) for step in (a, b))
        if first.shape != second.shape and name in a and name in b:
            return f"{name} has shape {tuple(second.shape)}, not {tuple(first.shape)}"
        if not first.numel():
            continue
        scale = max(float(first.abs().max()), float(second.abs().max()), SMALLEST_SCALE * max(largest, 1.0))
        distance = float((first.double() - second.double()).abs().max())
        if not distance <= tolerance * scale:  # NaN, too
            return f"{name} differs by {distance:.2g}, its largest value is {scale:.2g}"
    return ""


def _differs_in_double_precision(stack: LayerStack, cut: int, batch: dict[str, Any]) -> str:
    """`difference_of` of the steps in float64: rounding, also amplified by a model, stays below the tolerance."""
    model = stack.model.double()
    in_double = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    try:
        return difference_of(whole_step(model, in_double), step_when_cut(stack, cut, in_double))
    finally:
        model.float()


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, (UnsupportedModelError, ArithmeticError, MemoryError)):
        text = f"{type(error).__name__}: {text}"
    return text[:300]
