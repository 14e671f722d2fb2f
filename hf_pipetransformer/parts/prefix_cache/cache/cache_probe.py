"""Probes whether the output of frozen layers may be cached for each sample and reused in other batches.

Two conditions must hold. The hidden states of a sample's real tokens must not depend on the other samples in the
batch, nor on the amount of padding. And no code above the cached layers may read the padding, which is not stored.
There is no list of model families: one trial on a few real samples tests this, for all boundaries between layers at
once.

    1  a b c d     track the sources of each state. Its parameters must be frozen, its inputs make up a sample's
                   key, and the layers above must read a single tensor of [samples, tokens, ...]
    2  a b c d     as in a step, with noise as padding: no layer draws, counts calls or reads the padding
    3  d b, a b, a a sample's state is the same in other batches, with other padding, and alone
    4  a b c d     its loss is the same if computed from the states: it reads no padding and no lower states

`varied_samples` selects samples of different lengths. If all have the same length, every second sample is shortened,
since later samples of the dataset may be shorter.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ....model.called_inputs import LABELS_AND_DECODER
from ....model.frozen_prefix import FreezableLayers
from ....model.layer_range import Carry, Unit
from ....model.layer_stack import CarrySlot, LayerStack, loss_outputs, output_tensors
from ....model.left_as_found import left_as_found
from ....model.micro_batch import Batch
from ....model.nested import is_continuous, on_device, tensors_of
from ....model.placeholders import evaluation_mode, reachable_leaves
from ....model.zero_weights import zeros_filled
from ....randomness import global_state_kept
from .comparing import SAME, relative_difference, rounding_of, with_noise
from .content_keys import MASK, TOKEN_INPUTS, entries_of, sequences_per_sample
from .known_code import foreign_code, kept_by, modules_called, users_hook_inside, why_not_by_sample
from .origins import UNKNOWN, Origins
from .probe_batches import Collator, Rows, shortened, with_other_padding
from .values import held_by

REPEATED = "padding, random numbers, a call counter or training mode change the hidden state of frozen layers"
ELSEWHERE = "a sample's hidden state depends on the padded length, or on the other samples in the batch"
ABOVE = (
    "the loss differs when the layers' outputs come from the cache (it reads padding or lower layers' outputs, or"
    " changes the inputs before the model receives them)"
)

RETURNED = (
    "what the model returns depends on the padding, or on lower layers' outputs, and a loss of your own may read it"
    " (if it is the padding: have the data collator pad all samples to one length)"
)

LossOf = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class CacheVerdict:
    """The verdict on caching the output of the first `num_frozen` units for each sample.

    Attributes:
        num_frozen: number of units.
        reason: why it must not be cached; None if it may be cached.
        slot: the tensor to cache, if it may be cached.
        padded_left: whether the probed samples had padding on the left. If not, such samples were not checked.
    """

    num_frozen: int
    reason: str | None
    slot: CarrySlot | None = None
    padded_left: bool = False


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
        verdicts: one verdict for each number of frozen units, from 1 to all.
        unread: names of inputs that no cacheable state depends on. Keys leave them out.
        shows_padding: whether the model's outputs, apart from the loss, depend on padding that is not stored.
    """

    verdicts: tuple[CacheVerdict, ...]
    unread: frozenset[str]
    shows_padding: bool = False


def probe_boundaries(
    stack: LayerStack,
    freezable: FreezableLayers,
    samples: Sequence[Any],
    collate: Collator,
    *,
    ignored: Collection[str] = LABELS_AND_DECODER,
    loss_of: LossOf | None = None,
    is_read_whole: bool = False,
    keeps_padding: bool = False,
    most: int | None = None,
) -> Trial:
    """Try every number of frozen units on a complete model, and leave the model as it was.

    It takes about four forwards of four samples, for any number of units, and the memory of their states. Call it
    under the same autocast as the training. Not collective: processes may judge a difference close to its tolerance
    differently.

    Args:
        stack: the units of the complete model.
        freezable: the frozen parameters for each number of units.
        samples: about four samples of the dataset, of different lengths if it has them.
        collate: the user's collator.
        ignored: names of inputs that are never part of a sample's key (`entries_of`).
        loss_of: the loss of a batch as the Trainer computes it; None to compare the model's own loss, if it has one.
        is_read_whole: whether code may read all of the model's outputs, including the padding.
        keeps_padding: whether samples are stored with their padding. Code may then read it, but a sample must have the
            same padding in each batch.
        most: the largest number of units that will be frozen, if known.
    """
    probe = _Probe(stack, samples, collate, ignored, keeps_padding, most or stack.num_units)
    probe.is_read_whole = is_read_whole
    if not stack.units:
        probe.refuse_all("the model has no layers that can be run one at a time")
    else:
        with _evaluating(stack):
            try:
                probe.run(freezable, loss_of)
            except _Refusal as refusal:
                probe.refuse_all(str(refusal))
            except Exception as error:  # models and collators may raise any error; training continues without a cache
                what = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                probe.refuse_all(f"the model or the data collator fails on a part of the sample ({what})")
    numbers = range(1, stack.num_units + 1)
    verdicts = (CacheVerdict(f, probe.reasons.get(f), probe.open.get(f), probe.padded_left) for f in numbers)
    return Trial(tuple(verdicts), probe.unread, probe.shows_padding)


class _Refusal(Exception):
    """A reason that rules out every boundary."""


class _Probe:
    """Runs the trial and collects its results for each boundary (the number of units below it).

    Attributes:
        open: boundary that has not been refused so far -> the only tensor that crosses it.
        reasons: boundary -> why it was refused.
        padded_left: whether some samples had padding on the left.
        unread: as in `Trial`.
        shows_padding: as in `Trial`.
    """

    shows_padding = False

    def __init__(
        self,
        stack: LayerStack,
        samples: Sequence[Any],
        collate: Collator,
        ignored: Collection[str],
        keeps_padding: bool,
        most: int,
    ) -> None:
        self.open: dict[int, CarrySlot] = {}
        self.reasons: dict[int, str] = {}
        self.padded_left = False
        self.is_read_whole = False
        self.unread: frozenset[str] = frozenset()
        self._stack, self._samples, self._collate = stack, samples, collate
        self._ignored, self._keeps_padding, self._most = ignored, keeps_padding, most
        self._device = next(stack.model.parameters()).device
        self._shortens = False
        self._keys: dict[int, bytes] = {}  # sample -> key
        self._observed: dict[int, str] = {}  # boundary -> why users' code may see the calls of the layer below it
        self._states: dict[int, list[torch.Tensor]] = {}  # boundary -> state of each sample, real tokens only

    def refuse(self, boundary: int, reason: str) -> None:
        self.open.pop(boundary, None)
        self.reasons.setdefault(boundary, reason)

    def refuse_all(self, reason: str) -> None:
        for boundary in range(1, self._stack.num_units + 1):
            self.refuse(boundary, reason)

    def run(self, freezable: FreezableLayers, loss_of: LossOf | None) -> None:
        """Run the trial. Each part skips boundaries that an earlier part has refused."""
        self._watch(freezable)  # 1
        everyone = range(len(self._samples))
        sample = self._rows(everyone)
        if sample.mask is not None and bool(sample.mask.all()):
            self._shortens = True
            self._keys.clear()
            sample = self._rows(everyone)
        self.padded_left = any(bool(span.start) for span in sample.entries.spans)
        with left_as_found(self._stack.model):  # one context for both forwards: reveals a counter of calls
            output, carry = self._forward(sample.batch, self._crossing(partial(self._record, sample)))
            with_noise = self._repeat(sample)  # 2
        order = sorted(everyone, key=lambda i: sample.entries.lengths[i * sample.sequences])
        for group in dict.fromkeys(((*order[-1:], *order[1:2]), tuple(order[:2]), tuple(order[:1]))):  # 3
            if group and self.open:
                with left_as_found(self._stack.model):
                    self._compare_in(self._rows(group))
        if self.open:
            self._check_above(sample, output, (carry, with_noise), loss_of)  # 4
        self._refuse_observed()

    # ------------------------------------------------------------------------------------ the parts of the trial
    def _watch(self, freezable: FreezableLayers) -> None:
        """Part 1: find the tensors that cross each boundary, and the sources of their values."""
        table, rows = self._stack.table, self._unkeyed([0])
        read: dict[int, frozenset[str]] = {}
        decided: dict[int, frozenset[str]] = {}  # boundary -> inputs with values that the code has read
        by_longest: dict[int, str | None] = {}  # boundary -> why its state may follow the longest sample
        seen: Origins | None = None
        for _ in range(2):  # an object that is first seen in one pass and recurs in the next is a constant
            origins = Origins(self._stack.model, rows, {name: table[name] for name in table.names})
            if seen is not None:
                origins.take_constants(seen)
            done = itertools.count(1)
            before = iter([kept_by(unit.module) for unit in self._stack.units])

            def note(
                unit: Unit,
                output: Any,
                origins: Origins = origins,
                done: Iterator[int] = done,
                before: Iterator[Any] = before,
            ) -> None:
                boundary = next(done)
                if kept_by(unit.module) != next(before) and foreign_code(unit.module):
                    self._observed[boundary] = f"{unit.name} sets an attribute of its own in its forward"
                decided[boundary], by_longest[boundary] = frozenset(origins.decided), why_not_by_sample(called)
                read[boundary] = frozenset(origins.union(tensors_of(output)) | origins.decided)

            with left_as_found(self._stack.model), modules_called() as called, origins:
                _, carry = self._forward(rows, note)
            if not any(UNKNOWN in names for names in read.values()):
                break
            seen = origins
        boundaries = [*self._stack.boundaries[1:], self._read_by_the_head(rows, carry)]
        for boundary, slots in enumerate(boundaries, start=1):
            names, crossing = read[boundary], [slot for slot in slots if slot.is_used]
            moving = sorted(names & (freezable.trainable - freezable.frozen(boundary)))
            if len(crossing) != 1:
                self.refuse(
                    boundary, f"{len(crossing)} tensors are read above the frozen layers, but only one can be cached"
                )
            elif not self._stack.runner.floating_outputs(crossing[0].stack)[crossing[0].position]:
                self.refuse(boundary, "an integer tensor is read above the frozen layers")
            elif moving:
                self.refuse(boundary, f"the hidden state depends on {moving[0]!r}, which is not frozen with it")
            elif names & set(self._ignored):
                self.refuse(boundary, "labels or a decoder's inputs change the hidden state")
            elif (why_not := by_longest[boundary]) is not None:  # the probed samples may all be short
                self.refuse(boundary, why_not)
            elif UNKNOWN in names:
                self.refuse(boundary, "the hidden state is computed with values that do not come from PyTorch")
            else:
                self.open[boundary] = crossing[0]
        self.open = {boundary: slot for boundary, slot in self.open.items() if boundary <= self._most}
        used = frozenset[str]().union(*(read[boundary] for boundary in self.open))
        if any(decided[boundary] - {MASK} for boundary in self.open):
            used |= rows.keys()  # with other values, another branch of the code may read more
        tells_padding = {MASK} if used & TOKEN_INPUTS else set()
        self.unread = frozenset(rows) - used - tells_padding
        self._keeps_padding |= MASK in self.unread

    def _refuse_observed(self) -> None:
        """Refuse the boundaries above a layer with calls that users' code may see: they would not occur."""
        unknown: tuple[int, str] | None = None
        for boundary, unit in enumerate(self._stack.units, start=1):
            if (hook := users_hook_inside(unit.module, or_on_it=True)) is not None:
                self._observed[boundary] = f"{unit.name} has a forward hook ({hook})"
            if (held := held_by(unit.module)) is not None:
                unknown = unknown or (boundary, f"{unit.name}: {held}")
        for boundary in list(self.open):
            if unknown is not None and unknown[0] <= boundary:
                self.refuse(boundary, unknown[1])
                continue
            lowest = min((number for number in self._observed if number <= boundary), default=0)
            if lowest:
                self.refuse(boundary, f"{self._observed[lowest]}, which your code may read in each step")

    def _read_by_the_head(self, rows: Batch, carry: Carry) -> list[CarrySlot]:
        """Return the tensors that cross the boundary above all units: `LayerStack.boundaries` lacks it."""
        leaves = {
            stack: tuple(tensor.detach().requires_grad_(is_continuous(tensor)) for tensor in tensors)
            for stack, tensors in carry.items()
        }
        with torch.enable_grad():
            output = self._above(leaves, rows, self._call)
            reached = {id(leaf) for leaf in reachable_leaves(loss_outputs(output_tensors(output)))}
        return [
            CarrySlot(stack, position, id(leaf) in reached or not leaf.requires_grad, id(leaf) in reached)
            for stack, tensors in leaves.items()
            for position, leaf in enumerate(tensors)
        ]

    def _record(self, sample: Rows, boundary: int, state: torch.Tensor) -> None:
        """Record the reference states."""
        if sample.fits(state):  # cloned: a layer may write into its input
            self._states[boundary] = [state[row, span].clone() for row, span in enumerate(sample.entries.spans)]
        else:
            tokens = "some" if sample.mask is None else sample.mask.shape[1]
            expected = f"[{len(sample.indices)} samples, {tokens} tokens, ...]"
            self.refuse(boundary, f"the hidden state has shape {list(state.shape)}, not {expected}")

    def _repeat(self, sample: Rows) -> Carry:
        """Part 2: repeat the batch as in a step: the model in training mode, with all layers frozen in eval mode.

        The padding gets other token ids, and noise and zeros after each unit. A single unit that reads it rules out
        all boundaries: at boundaries below the unit, the padding would be missing, because it is not stored; at
        boundaries above it, states would be wrong in other batches.
        """
        runner, mask, num_frozen = self._stack.runner, sample.mask, self._stack.runner.num_frozen
        generator = torch.Generator(self._device).manual_seed(0)  # all processes reach the same verdict
        errors = [0.0]

        def disturb(boundary: int, state: torch.Tensor) -> None:
            errors.append(self._error(boundary, state, sample))
            if mask is not None and not mask.all() and sample.fits(state):
                state.copy_(with_noise(state, mask, generator))  # in place: the next unit reads this tensor

        runner.freeze(self._stack.num_units)
        self._stack.model.train()
        try:
            _, carry = self._forward(with_other_padding(sample), self._crossing(disturb))
        finally:
            self._stack.model.eval()
            runner.freeze(num_frozen)
        self._judge_all(max(errors), REPEATED)
        return carry

    def _compare_in(self, rows: Rows) -> None:
        """Part 3: compare the states of some samples in a batch of their own."""

        def judge(boundary: int, state: torch.Tensor) -> None:
            error = self._error(boundary, state, rows)
            if error > rounding_of(state):
                self.refuse(boundary, f"{ELSEWHERE} ({error:.0e})")

        self._forward(rows.batch, self._crossing(judge))

    def _check_above(self, sample: Rows, expected: Any, carries: Sequence[Carry], loss_of: LossOf | None) -> None:
        """Part 4: compare outputs and losses from the last layer's output, with and without noise as padding."""
        outputs = expected, self._above(carries[-1], sample.batch, self._call)
        whole = [list(output_tensors(output).values()) for output in outputs]
        read = whole if self.is_read_whole else [_results(o, sample.mask, loss_of is None) for o in outputs]
        errors = [relative_difference([actual], [result]) for result, actual in zip(*read, strict=True)]
        self.shows_padding = any(relative_difference([a], [b]) > SAME for b, a in zip(*whole, strict=True))
        if loss_of is not None:
            with left_as_found(self._stack.model), self._stack.runner.to_the_end(0, None, may_repeat=True):
                loss = loss_of(dict(sample.batch))
            errors += [relative_difference([self._above(c, sample.batch, loss_of)], [loss]) for c in carries]
        self._judge_all(max(errors, default=0.0), RETURNED if self.is_read_whole else ABOVE)

    # ------------------------------------------------------------------------------------ running and judging
    def _unkeyed(self, indices: Sequence[int]) -> Batch:
        # copied: some collators remove the labels from the samples
        return on_device(dict(self._collate([copy.copy(self._samples[i]) for i in indices])), self._device)

    def _rows(self, indices: Sequence[int]) -> Rows:
        """Collate some of the samples. A collator may make several rows of each, in blocks (`micro_batch`).

        Raises:
            _Refusal: the samples have no keys, or other keys than in another batch.
        """
        batch = self._unkeyed(indices)
        if self._shortens:
            pad_id = getattr(getattr(self._stack.model, "config", None), "pad_token_id", None)
            batch = shortened(batch, [row for row, i in enumerate(indices) if i % 2], max(pad_id or 0, 0))
        not_in_keys = {*self._ignored, *self.unread}
        entries = entries_of(batch, not_in_keys, self._keeps_padding)
        if entries is None:
            raise _Refusal(
                "the attention mask is not [samples, tokens] of 0 and 1 with padding only at the ends, or there are"
                " inputs other than tensors and plain values"
            )
        if len(entries.spans) % len(indices):
            raise _Refusal(f"the data collator makes {len(entries.spans)} rows of {len(indices)} samples")
        count = sequences_per_sample(batch)
        if count > 1:
            indices = [i * count + number for i in indices for number in range(count)]
        else:
            blocks = range(len(entries.spans) // len(indices))
            indices = [block * len(self._samples) + i for block in blocks for i in indices]
        if any(self._keys.setdefault(i, key) != key for i, key in zip(indices, entries.digests, strict=True)):
            raise _Refusal(
                "a sample has different inputs in another batch, so its cached state would not be found again"
                " (possible reasons: random masking or augmentation, padding without an attention mask, images beside"
                " text)"
            )
        return Rows(batch, tuple(indices), entries, count, self._keeps_padding)

    def _crossing(self, visit: Callable[[int, torch.Tensor], None]) -> Callable[[Unit, Any], None]:
        """Return an observer that calls `visit` with each open boundary and its tensor."""
        num_done = itertools.count(1)

        def observer(unit: Unit, output: Any) -> None:
            boundary = next(num_done)
            slot = self.open.get(boundary)
            if slot is not None and slot.stack == unit.stack:
                visit(boundary, tensors_of(output)[slot.position])

        return observer

    def _forward(self, batch: Batch, observer: Callable[[Unit, Any], None]) -> tuple[Any, Carry]:
        """Run the whole model. Returns its output, and the last output of each stack's units.

        Call it within `left_as_found`: BigBird permanently turns its sparse attention off after a short batch.
        """
        carry: Carry = {}

        def observe(unit: Unit, output: Any) -> None:
            carry[unit.stack] = tensors_of(output)
            observer(unit, output)

        output = self._stack.runner.trace(batch, observe)
        if self._stack.runner.units != self._stack.units:
            raise _Refusal("which layers run depends on the input")
        return output, carry

    def _call(self, batch: Batch) -> Any:
        return self._stack.model(**self._stack.runner.arguments(batch))

    def _above(self, carry: Carry, batch: Batch, call: Callable[[Batch], Any]) -> Any:
        """Return the result of `call` while the units return the outputs in `carry` instead of running."""
        runner = self._stack.runner
        with left_as_found(self._stack.model), runner.to_the_end(self._stack.num_units, carry, may_repeat=True):
            return call(dict(batch))

    def _error(self, boundary: int, state: torch.Tensor, rows: Rows) -> float:
        """Return the difference of the real tokens' states from the reference, relative to the largest value."""
        if not rows.fits(state):
            return math.inf
        expected = [self._states[boundary][i] for i in rows.indices]
        return relative_difference([state[row, span] for row, span in enumerate(rows.entries.spans)], expected)

    def _judge_all(self, error: float, reason: str) -> None:
        if error > SAME:
            self.refuse_all(f"{reason} ({error:.0e})")


def _results(output: Any, mask: torch.Tensor | None, with_loss: bool) -> list[torch.Tensor]:
    """Return the outputs for a loss, at real tokens, and the model's own loss if requested or if there are none."""
    tensors = output_tensors(output)
    loss = tensors.pop("loss", None)
    of_tokens = [
        tensor[mask] if mask is not None and tensor.shape[:2] == mask.shape else tensor
        for tensor in loss_outputs(tensors)
    ]
    return [loss, *of_tokens] if loss is not None and (with_loss or not of_tokens) else of_tokens


# ------------------------------------------------------------------------------------ restoring the model
@contextmanager
def _evaluating(stack: LayerStack) -> Iterator[None]:
    """Context manager that installs the runner, sets evaluation mode and disables gradients. Exit restores all state.

    The user's own code before the layers stays in training mode, because it still trains beside frozen layers. The
    state of the random number generators is restored, too.
    """
    runner, model = stack.runner, stack.model
    was_installed, units = runner.installed, runner.units
    runner.install()
    try:
        with (
            evaluation_mode(model),
            runner.training_before_units(),
            torch.no_grad(),
            global_state_kept(),
            zeros_filled(model),
        ):
            yield
    finally:
        runner.units = units
        if not was_installed:
            runner.remove()
