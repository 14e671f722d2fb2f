"""Checks whether the output of frozen layers may be cached for each sample and reused in other batches.

It may only if a sample's real tokens have the same hidden state whatever other samples are in the batch and however
far it is padded, and if nothing above the cached layers reads the padding, which is not stored. There is no list of
model families for this: the checks run the model on a few real samples, for all boundaries between layers at once.

    1  what is read above           one tensor of [samples, tokens, ...]
    2  parameters below             all of them frozen
                                    compared with the states of samples a, b, c, d in one batch (a is the shortest):
    3  a b c d  again, in training  no random numbers, nothing that counts calls or asks whether the model trains
    4  a b c d  other labels        what is left out of a sample's key does not change its state
    5  a b c d  other padded ids    neither does this
    6  b d b d                      nor do neighbours
       a c a c, a b, b c            nor the padded length
       a, b, c, d                   nor is it another one without padding
    7  a b c d  noise as padding,   no unit reads it, nor the head, nor the loss
                after each unit
    8  a b c d  the Trainer's loss  the same from the states above: it reads nothing below, and changes no input

Each batch takes one forward for all boundaries. `varied_samples` selects samples of different lengths. If all have the
same length, every second sample is shortened, since later samples of the dataset may be shorter.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..errors import is_out_of_memory
from ..model.frozen_prefix import FreezableLayers
from ..model.layer_range import Carry, Unit
from ..model.layer_stack import CarrySlot, LayerStack, loss_outputs, output_tensors
from ..model.left_as_found import left_as_found
from ..model.micro_batch import Batch
from ..model.nested import on_device, tensors_of
from ..model.placeholders import evaluation_mode, reachable_leaves
from ..randomness import global_state_kept
from .content_keys import MASK, NOT_IN_KEYS, TOKEN_INPUTS, by_sequences, content_keys, sequences_per_sample, spans_of

SAME = 1e-6
"""Relative to the largest value. If the same kernels run on the same shapes, the results must be identical."""

TOLERANCES: Mapping[torch.dtype, float] = {torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Relative to the largest value, in other batches: other shapes run other kernels, with another order of summation."""

FLOAT32_TOLERANCE = 1e-5

IGNORED_LABEL = -100
"""The label that cross entropy ignores."""

Collator = Callable[[list[Any]], Any]
LossOf = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class CacheVerdict:
    """Whether the output of the first `num_frozen` units may be cached for each sample.

    Attributes:
        num_frozen: number of units.
        reason: why it may not be cached; None if it may.
        slot: the tensor to cache, if it may be cached.
        errors: for each check the largest difference found, relative to the largest value: "repeat" (3 above),
            "ignored" (4), "padded ids" (5), "neighbours", "padded length" and "alone" (6), "padding" and "loss" (7),
            "loss from above" (8).
            A check that had nothing to compare (no padding, no labels), or that was not reached, is missing.
        padded_left: whether the sample had padding on the left. If not, such samples have not been checked.
    """

    num_frozen: int
    reason: str | None
    slot: CarrySlot | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    padded_left: bool = False

    @property
    def reads_padding(self) -> bool:
        """Whether it is refused because something reads the padding, or what layers make of it."""
        return max(self.errors.get("loss", 0.0), self.errors.get("padding", 0.0)) > SAME


def probe_boundaries(
    stack: LayerStack,
    freezable: FreezableLayers,
    samples: Sequence[Any],
    collate: Collator,
    *,
    ignored: Collection[str] = NOT_IN_KEYS,
    loss_of: LossOf | None = None,
    keeps_padding: bool = False,
    unread: Collection[str] = (),
) -> tuple[CacheVerdict, ...]:
    """Check every number of frozen units on a complete model, and leave the model as it was.

    It takes about ten forwards of four samples, whatever the number of units, and the memory of their states. One
    forward of a single sample builds an autograd graph. Call it under the same autocast as the training. Not
    collective: a difference close to its tolerance may be judged differently by another process.

    Args:
        stack: the units of the complete model.
        freezable: which parameters are frozen for each number of units.
        samples: about four samples of the dataset, of different lengths if it has them.
        collate: the user's collator.
        ignored: names of inputs that are not part of a sample's key (`content_keys`).
        loss_of: the loss of a batch as the Trainer computes it, if it is not the model's own.
        keeps_padding: whether samples are stored with their padding. Then it may be read, but a sample must have the
            same padding in each batch.
        unread: names of further inputs that are not part of a key, as is known of the units that will be cached.

    Returns:
        A verdict for each number of frozen units from 1 to all of them.
    """
    probe = _Probe(stack, samples, collate, ignored, keeps_padding, unread)
    if not stack.units:
        probe.refuse_all("the model has no layers that can be run one at a time")
    else:
        with _evaluating(stack):
            try:
                probe.run(freezable, loss_of)
            except _Refusal as refusal:
                probe.refuse_all(str(refusal))
            except Exception as error:  # models and collators may raise anything; training continues without a cache
                what = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                probe.refuse_all(f"the model or the data collator fails on a part of the sample ({what})")
    return tuple(
        CacheVerdict(f, probe.reasons.get(f), probe.open.get(f), probe.errors.get(f, {}), probe.padded_left)
        for f in range(1, stack.num_units + 1)
    )


def varied_samples(samples: Sequence[Any], collate: Collator, count: int = 4) -> list[Any]:
    """Select the shortest sample, the longest, and some in between, by their number of tokens."""
    lengths = []
    try:
        for sample in samples:
            spans = spans_of(collate([copy.copy(sample)])) or [slice(None)]
            lengths.append(max(map(_num_tokens, spans)))
    except Exception:  # the collator does not accept a single sample; the probe will report it
        return list(samples[:count])
    order = sorted(range(len(samples)), key=lengths.__getitem__)
    count = min(count, len(samples))
    return [samples[order[i * (len(samples) - 1) // max(count - 1, 1)]] for i in range(count)]


@dataclass(frozen=True)
class _Rows:
    """A batch of some of the samples, on the model's device."""

    batch: Batch
    indices: Sequence[int]  # for each row (each sequence) its index in a batch of all samples
    spans: Sequence[slice]
    sequences: int = 1  # of each sample, one after the other
    keeps_padding: bool = False

    @property
    def mask(self) -> torch.Tensor | None:
        """[rows, T], true at real tokens; None if there is no attention mask, or if padding counts as well."""
        mask = None if self.keeps_padding else self.batch.get("attention_mask")
        return None if mask is None else mask.reshape(-1, mask.shape[-1]).bool()

    def fits(self, state: torch.Tensor) -> bool:
        """Whether a tensor has the shape [B, T, ...]. Without a mask any T is accepted."""
        if self.mask is None:
            return state.dim() > 1 and state.shape[0] == len(self.indices)
        return state.shape[:2] == self.mask.shape


class _Refusal(Exception):
    """A reason that rules out every boundary."""


class _Probe:
    """Runs the checks and collects their results for each boundary (the number of units below it).

    Attributes:
        open: boundaries that no check has refused so far -> the only tensor that crosses them.
        reasons: boundary -> why it was refused.
        errors: boundary -> the measured differences, by the name of the check.
        padded_left: whether some samples had padding on the left.
    """

    def __init__(
        self,
        stack: LayerStack,
        samples: Sequence[Any],
        collate: Collator,
        ignored: Collection[str],
        keeps_padding: bool,
        unread: Collection[str] = (),
    ) -> None:
        self.open: dict[int, CarrySlot] = {}
        self.reasons: dict[int, str] = {}
        self.errors: dict[int, dict[str, float]] = {}
        self._stack = stack
        self._samples = samples
        self._collate = collate
        self._ignored = ignored
        self._keeps_padding = keeps_padding or MASK in unread
        self._not_in_keys = {*ignored, *unread}
        self._device = next(stack.model.parameters()).device
        self.padded_left = False
        self._shortens = False
        self._keys: dict[int, bytes] = {}  # sample -> key
        self._states: dict[int, list[torch.Tensor]] = {}  # boundary -> state of each sample, real tokens only

    def refuse(self, boundary: int, reason: str) -> None:
        self.open.pop(boundary, None)
        self.reasons.setdefault(boundary, reason)

    def refuse_all(self, reason: str) -> None:
        for boundary in range(1, self._stack.num_units + 1):
            self.refuse(boundary, reason)

    def run(self, freezable: FreezableLayers, loss_of: LossOf | None) -> None:
        """Run all checks; each skips the boundaries that an earlier one has refused."""
        sample = self._rows(range(len(self._samples)))
        if sample.mask is not None and bool(sample.mask.all()):
            self._shortens = True
            self._keys.clear()
            sample = self._rows(range(len(self._samples)))
        self.padded_left = any(bool(span.start) for span in sample.spans)
        order = sorted(range(len(self._samples)), key=lambda i: _num_tokens(sample.spans[i * sample.sequences]))
        shortest = self._rows(order[:1])
        self._choose_tensors(shortest)  # 1
        with left_as_found(self._stack.model):  # one context for both forwards, so that a counter of calls shows up
            output, carry = self._record(sample)
            self._compare_in_training(sample)  # 3
        self._check_parameters(freezable, shortest)  # 2
        self._check_ignored(sample)  # 4
        others = _with_other_padding(sample)  # 5
        self._compare("padded ids", others, "the ids of padding tokens change the hidden state of real tokens", SAME)
        for group in _groups(order):  # 6
            rows = self._rows(group)
            if len(group) == 1:
                self._compare("alone", rows, "a sample alone has a different hidden state than in a batch")
            elif _width(rows) == _width(sample):
                self._compare("neighbours", rows, "a sample's hidden state depends on the other samples in the batch")
            else:
                self._compare("padded length", rows, "a sample's hidden state depends on the padded length")
        self._check_padding(sample, output, loss_of)  # 7
        if loss_of is not None and self.open:  # 8
            with left_as_found(self._stack.model), self._stack.runner.to_the_end(0, None, may_repeat=True):
                whole = loss_of(dict(sample.batch))
            error = relative_difference([self._above_all_units(carry, sample, loss_of)], [whole])
            self._judge_all(
                "loss from above",
                error,
                "the loss differs when the layers' outputs come from the cache (it reads lower layers' outputs, or"
                " changes the inputs before the model receives them)",
            )

    # ------------------------------------------------------------------------------------ the checks
    def _choose_tensors(self, rows: _Rows) -> None:
        """Check 1: exactly one tensor may be read above each boundary."""
        boundaries = [*self._stack.boundaries[1:], self._read_by_the_head(rows)]
        for boundary, slots in enumerate(boundaries, start=1):
            read = [slot for slot in slots if slot.is_used]
            if len(read) != 1:
                self.refuse(
                    boundary, f"{len(read)} tensors are read above the frozen layers, but only one can be cached"
                )
            elif not self._stack.runner.floating_outputs(read[0].stack)[read[0].position]:
                self.refuse(boundary, "an integer tensor is read above the frozen layers")
            elif self._stack.may_read_unseen:
                self.refuse(boundary, "layers may read parameters that are still trained where no gradient shows it")
            else:
                self.open[boundary] = read[0]

    def _read_by_the_head(self, rows: _Rows) -> list[CarrySlot]:
        """The tensors that cross the boundary above all units, which `LayerStack.boundaries` does not include."""
        _, carry = self._forward(rows, lambda boundary, state: None)
        leaves = {
            stack: tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors)
            for stack, tensors in carry.items()
        }
        with torch.enable_grad():
            output = self._above_all_units(
                leaves, rows, lambda batch: self._stack.model(**self._stack.runner.arguments(batch))
            )
            reached = {id(leaf) for leaf in reachable_leaves(loss_outputs(output_tensors(output)))}
        return [
            CarrySlot(stack, position, id(leaf) in reached or not leaf.requires_grad, id(leaf) in reached)
            for stack, tensors in leaves.items()
            for position, leaf in enumerate(tensors)
        ]

    def _record(self, sample: _Rows) -> tuple[Any, Carry]:
        """Record the states that all others are compared with. Returns the same as `_forward`."""

        def visit(boundary: int, state: torch.Tensor) -> None:
            if sample.fits(state):  # cloned, because a layer may write into its input
                self._states[boundary] = [state[row, span].clone() for row, span in enumerate(sample.spans)]
            else:
                expected = f"[{len(sample.indices)} samples, {_width(sample) or 'some'} tokens, ...]"
                self.refuse(boundary, f"the hidden state has shape {list(state.shape)}, not {expected}")

        return self._forward(sample, visit, restores=False)

    def _check_parameters(self, freezable: FreezableLayers, rows: _Rows) -> None:
        """Check 2: no parameter that a state depends on may still be trained once its layers are frozen."""
        if not self.open:
            return
        table = self._stack.table

        def visit(boundary: int, state: torch.Tensor) -> None:
            leaves = {id(leaf) for leaf in reachable_leaves([state])}
            still_trained = freezable.trainable - freezable.frozen(boundary)
            moving = [name for name in table.names if name in still_trained and id(table[name]) in leaves]
            if moving:
                self.refuse(boundary, f"the hidden state depends on {moving[0]!r}, which is not frozen with it")

        with torch.enable_grad(), table.all_trainable():
            self._forward(rows, visit)

    def _compare(
        self, check: str, rows: _Rows | None, reason: str, tolerance: float | None = None, restores: bool = True
    ) -> None:
        """Compare the states of samples in another batch with the recorded ones.

        Args:
            check: name of the check.
            rows: the other batch; None if there is nothing to compare.
            reason: the reason for refusing a boundary if they differ.
            tolerance: largest accepted difference; None: what rounding explains.
            restores: as in `_forward`.
        """
        if not self.open or rows is None:
            return

        def visit(boundary: int, state: torch.Tensor) -> None:
            error = self._error(boundary, state, rows)
            self._judge(boundary, check, error, rounding_of(state) if tolerance is None else tolerance, reason)

        self._forward(rows, visit, restores)

    def _compare_in_training(self, sample: _Rows) -> None:
        """Check 3: repeat the batch as in a training step: model in training mode, all layers frozen in eval mode."""
        runner = self._stack.runner
        num_frozen = runner.num_frozen
        runner.freeze(self._stack.num_units)
        self._stack.model.train()
        try:
            reason = "random numbers, a call counter or training mode change the hidden state of frozen layers"
            self._compare("repeat", sample, reason, SAME, restores=False)
        finally:
            self._stack.model.eval()
            runner.freeze(num_frozen)

    def _check_ignored(self, sample: _Rows) -> None:
        """Check 4: inputs that are not part of the key (labels, a decoder's inputs) must not change a sample's state.

        Their values are exchanged between the samples. If all values are the same, they are replaced by another one,
        which the model may not accept; then the next one is tried, and at last the input is left out.
        """
        reason = "labels or a decoder's inputs change the hidden state"
        self._compare("ignored", _with_exchanged_values(sample, self._ignored), reason, SAME)
        for name in _constants_of(sample, self._ignored):
            values = [*_other_values(sample.batch[name], self._stack.model), None]
            if not any(self._can_compare(sample, name, value, reason) for value in values):
                self.refuse_all(
                    f"all probed samples have the same {name!r}, and the model does not run with any other value of"
                    " it, so it cannot be checked whether frozen layers read it"
                )

    def _can_compare(self, sample: _Rows, name: str, value: torch.Tensor | None, reason: str) -> bool:
        """Compare with another value of an input, or (None) without the input; False if the model cannot run then."""
        batch = {n: v for n, v in sample.batch.items() if n != name}
        if value is not None:
            batch[name] = value
        try:
            self._compare("ignored", replace(sample, batch=batch), reason, SAME)
        except _Refusal:  # other layers were run
            if value is not None:
                raise
            return False
        except Exception as error:  # models may raise anything for a label that they do not know
            if is_out_of_memory(error):
                raise
            return False
        return True

    def _check_padding(self, sample: _Rows, expected: Any, loss_of: LossOf | None) -> None:
        """Check 7: put noise and zeros in place of the padding after each unit; no unit, head or loss may read it.

        If a unit below a boundary reads padding, its states are wrong in other batches; if one above reads it, it
        would miss the padding, which is not stored. Therefore a single unit that reads it rules out all boundaries.
        """
        mask = sample.mask
        if not self.open or mask is None or bool(mask.all()):
            return
        generator = torch.Generator(mask.device).manual_seed(0)  # so that all processes reach the same verdict
        moved: dict[int, float] = {}

        def visit(boundary: int, state: torch.Tensor) -> None:
            moved[boundary] = self._error(boundary, state, sample)
            state.copy_(_with_noise(state, mask, generator))  # in place, because the next unit reads this tensor

        output, carry = self._forward(sample, visit)
        first = next((boundary for boundary, error in moved.items() if not error <= SAME), None)
        where = "" if first is None else f" in layer {self._stack.units[first - 1].name!r}"
        self._judge_all("padding", max(moved.values()), f"padding reaches real tokens{where}")
        pairs = zip(_results(output, mask, loss_of is None), _results(expected, mask, loss_of is None), strict=True)
        errors = [relative_difference([actual], [result]) for actual, result in pairs]
        if loss_of is not None and self.open:
            other_noise = dict(carry)
            for slot in set(self.open.values()):
                tensors = list(carry[slot.stack])
                tensors[slot.position] = _with_noise(tensors[slot.position], mask, generator)
                other_noise[slot.stack] = tuple(tensors)
            losses = [[self._above_all_units(values, sample, loss_of)] for values in (carry, other_noise)]
            errors.append(relative_difference(*losses))
        self._judge_all("loss", max(errors), "the loss depends on the hidden state of padding")

    # ------------------------------------------------------------------------------------ running and judging
    def _rows(self, indices: Sequence[int]) -> _Rows:
        """Collate some of the samples. A collator may make several rows of each, in blocks (`micro_batch`).

        Raises:
            _Refusal: they have no keys, or their keys differ from those in another batch.
        """
        # copied, because some collators remove the labels from the samples
        batch = dict(self._collate([copy.copy(self._samples[i]) for i in indices]))
        if self._shortens:
            pad_id = getattr(getattr(self._stack.model, "config", None), "pad_token_id", None)
            batch = _shortened(batch, [row for row, i in enumerate(indices) if i % 2], max(pad_id or 0, 0))
        spans, keys = spans_of(batch, self._not_in_keys), content_keys(batch, self._not_in_keys, self._keeps_padding)
        if spans is None:
            raise _Refusal("the attention mask is not [samples, tokens] of 0 and 1 with padding only at the ends")
        if keys is None:
            raise _Refusal("the batch contains inputs other than tensors and plain values")
        if len(keys) % len(indices):
            raise _Refusal(f"the data collator makes {len(keys)} rows of {len(indices)} samples")
        if self._keeps_padding:
            spans = [slice(None)] * len(spans)
        count = sequences_per_sample(batch)
        if count > 1:
            indices = [i * count + number for i in indices for number in range(count)]
        else:
            blocks = range(len(keys) // len(indices))
            indices = [block * len(self._samples) + i for block in blocks for i in indices]
        if any(self._keys.setdefault(i, key) != key for i, key in zip(indices, keys, strict=True)):
            raise _Refusal(
                "a sample has different inputs in another batch, so its cached state would not be found again"
                " (possible reasons: random masking or augmentation, padding without an attention mask, images beside"
                " text)"
            )
        moved = on_device(batch, self._device)
        return _Rows(moved, tuple(indices), spans, count, self._keeps_padding)

    def _forward(
        self, rows: _Rows, visit: Callable[[int, torch.Tensor], None], restores: bool = True
    ) -> tuple[Any, Carry]:
        """Run the whole model and call `visit` with the tensor that crosses each open boundary.

        Args:
            rows: the batch.
            visit: called with the boundary and the tensor.
            restores: whether to restore the model's state afterwards, so that the next forward is not affected:
                BigBird permanently turns its sparse attention off when it meets a short batch.

        Returns:
            The model's output, and the last output of each stack's units.
        """
        carry: Carry = {}
        num_done = itertools.count(1)

        def observer(unit: Unit, output: Any) -> None:
            carry[unit.stack] = tensors_of(output)
            boundary = next(num_done)
            slot = self.open.get(boundary)
            if slot is not None:
                visit(boundary, carry[slot.stack][slot.position])

        with left_as_found(self._stack.model) if restores else nullcontext():
            output = self._stack.runner.trace(rows.batch, observer)
        if self._stack.runner.units != self._stack.units:
            raise _Refusal("which layers run depends on the input")
        return output, carry

    def _above_all_units(self, carry: Carry, rows: _Rows, call: Callable[[Batch], Any]) -> Any:
        """Return the result of `call` while the units return the outputs in `carry` instead of running."""
        runner = self._stack.runner
        with left_as_found(self._stack.model), runner.to_the_end(self._stack.num_units, carry, may_repeat=True):
            return call(dict(rows.batch))

    def _error(self, boundary: int, state: torch.Tensor, rows: _Rows) -> float:
        """Difference of the real tokens' states from the recorded ones, relative to the largest value."""
        if not rows.fits(state):
            return math.inf
        expected = [self._states[boundary][i] for i in rows.indices]
        return relative_difference([state[row, span] for row, span in enumerate(rows.spans)], expected)

    def _judge(self, boundary: int, check: str, error: float, tolerance: float, reason: str) -> None:
        measured = self.errors.setdefault(boundary, {})
        measured[check] = max(measured.get(check, 0.0), error)
        if error > tolerance:
            self.refuse(boundary, f"{reason} ({error:.0e})")

    def _judge_all(self, check: str, error: float, reason: str) -> None:
        for boundary in list(self.open):
            self._judge(boundary, check, error, SAME, reason)


# ------------------------------------------------------------------------------------ batches
def _groups(order: Sequence[int]) -> list[tuple[int, ...]]:
    """Groups of samples that form one batch each, given all samples from the shortest to the longest: a b c d.

    b d b d: padded as far as the recorded batch, other neighbours; a c a c, a b, b c: padded less; each one alone.
    """
    every = tuple(order)
    groups = [every[1::2] * 2, every[::2] * 2, every[:2], every[1:3], *((i,) for i in every)]
    return [group for group in dict.fromkeys(groups) if group]


def _shortened(batch: Batch, rows: Sequence[int], pad_id: int) -> Batch:
    """Turn the last third of some samples into padding, as if these samples were shorter.

    A batch of such samples only becomes narrower, unless other inputs may refer to positions in it.
    """
    mask = batch["attention_mask"].clone()
    tokens = mask.shape[-1]
    mask[rows, ..., tokens - tokens // 3 :] = 0
    padding = mask == 0
    others: Batch = {"attention_mask": mask}
    is_known = True
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.shape[: mask.dim()] != mask.shape or name == "attention_mask":
            continue
        if name in TOKEN_INPUTS:
            others[name] = value.masked_fill(_aligned(padding, value), pad_id if name == "input_ids" else 0)
        elif name in NOT_IN_KEYS and value.shape == mask.shape and not value.is_floating_point():
            others[name] = value.masked_fill(padding, IGNORED_LABEL)
        else:
            is_known = False
    width = int(mask.reshape(-1, tokens).any(0).sum()) if is_known else tokens
    return {**batch, **{name: value.narrow(mask.dim() - 1, 0, width) for name, value in others.items()}}


def _with_exchanged_values(rows: _Rows, names: Collection[str]) -> _Rows | None:
    """Exchange the values of some inputs between samples and positions; None if that changes nothing."""
    others = {name: _rolled(value) for name, value in rows.batch.items() if name in names and _has_values(value)}
    return _changed(rows, others)


def _constants_of(rows: _Rows, names: Collection[str]) -> list[str]:
    """Names of those inputs that an exchange between samples and positions does not change."""
    return [
        name
        for name, value in rows.batch.items()
        if name in names and _has_values(value) and torch.equal(_rolled(value), value)
    ]


def _has_values(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 0


def _rolled(value: torch.Tensor) -> torch.Tensor:
    return value.roll((1,) * value.dim(), tuple(range(value.dim())))


def _other_values(value: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    """Other possible values of an input whose values are all the same.

    On an accelerator a class index that is out of range ends the program, so there only 0 is tried, or 1 if the
    model's configuration says that there is such a class.
    """
    if value.dtype == torch.bool:
        return [~value]
    if value.is_floating_point() or value.is_complex():
        return [value * 0.5 + 0.25]  # a fraction remains between 0 and 1
    number = int(value.flatten()[0])
    if number > 0:
        return [torch.zeros_like(value), value - 1]
    has_more = getattr(getattr(model, "config", None), "num_labels", 0) > 1
    other = 1 if number == 0 else 0
    return [torch.full_like(value, other)] if other == 0 or has_more or value.device.type == "cpu" else []


def _with_other_padding(rows: _Rows) -> _Rows | None:
    """Replace all padding by the sample's first token; None if there is no padding."""
    if rows.mask is None:
        return None
    number = torch.arange(len(rows.indices), device=rows.mask.device)
    first = torch.tensor([span.start for span in rows.spans], device=rows.mask.device)
    others = {}
    for name, value in by_sequences(rows.batch).items():
        if name in TOKEN_INPUTS and name != "attention_mask" and value.shape[:2] == rows.mask.shape:
            replaced = torch.where(_aligned(rows.mask, value), value, value[number, first].unsqueeze(1))
            others[name] = replaced.view_as(rows.batch[name])
    return _changed(rows, others)


def _changed(rows: _Rows, others: Batch) -> _Rows | None:
    if all(torch.equal(value, rows.batch[name]) for name, value in others.items()):
        return None
    return replace(rows, batch={**rows.batch, **others})


def _width(rows: _Rows) -> int | None:
    return None if rows.mask is None else int(rows.mask.shape[1])


def _num_tokens(span: slice) -> int:
    return 0 if span.stop is None else span.stop - span.start


# ------------------------------------------------------------------------------------ numbers
def _with_noise(state: torch.Tensor, mask: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Put noise as large as the state in half of the padding, and zeros in the other half."""
    real = _aligned(mask, state)
    noise = torch.empty_like(state).normal_(generator=generator) * state[mask].abs().max()
    half = torch.empty_like(real, dtype=state.dtype).bernoulli_(0.5, generator=generator)
    return torch.where(real, state, noise * half)


def _aligned(mask: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """View [B, T] or [B, C, T] as [B, T, 1, ...], with as many dimensions as the tensor."""
    return mask.view(*mask.shape, *[1] * (tensor.dim() - mask.dim()))


def _results(output: Any, mask: torch.Tensor, with_loss: bool) -> list[torch.Tensor]:
    """The outputs that a loss reads, at real tokens, and the model's own loss if requested or if there is no other."""
    tensors = output_tensors(output)
    loss = tensors.pop("loss", None)
    of_tokens = [tensor[mask] if tensor.shape[:2] == mask.shape else tensor for tensor in loss_outputs(tensors)]
    return [loss, *of_tokens] if loss is not None and (with_loss or not of_tokens) else of_tokens


def relative_difference(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Largest difference, relative to the largest expected value; infinite if shapes differ or a value is NaN."""
    if any(a.shape != b.shape for a, b in zip(actual, expected, strict=True)):
        return math.inf
    differences = [(a.float() - b.float()).abs().max() for a, b in zip(actual, expected, strict=True)]
    largest = torch.stack([b.float().abs().max() for b in expected]).max().clamp(min=1e-30)
    error = float(torch.stack(differences).max() / largest)
    return math.inf if math.isnan(error) else error


def rounding_of(state: torch.Tensor) -> float:
    """The difference that rounding explains if other kernels run, for the dtype of the state or of its computation."""
    device = state.device.type
    dtypes = [state.dtype]
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    if device == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtypes.append(torch.float16)  # which has as many mantissa bits
    return max(TOLERANCES.get(dtype, FLOAT32_TOLERANCE) for dtype in dtypes)


# ------------------------------------------------------------------------------------ restoring the model
@contextmanager
def _evaluating(stack: LayerStack) -> Iterator[None]:
    """Context manager that installs the runner, sets evaluation mode and disables gradients; all is restored on exit.

    The user's own code before the layers stays in training mode, because it is trained beside frozen layers. The state
    of the random number generators is restored, too.
    """
    runner, model = stack.runner, stack.model
    was_installed, units = runner.installed, runner.units
    runner.install()
    try:
        with evaluation_mode(model), runner.training_before_units(), torch.no_grad(), global_state_kept():
            yield
    finally:
        runner.units = units
        if not was_installed:
            runner.remove()
