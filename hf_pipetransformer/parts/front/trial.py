"""Tries a frozen front on a batch: its output for a sample must depend on neither other samples nor padding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn

from ...model.micro_batch import Batch, batch_rows
from ...model.nested import in_new_tensors
from ..prefix_cache.cache.batch_entries import BatchEntries, Tokens
from ..prefix_cache.cache.comparing import SAME, aligned, relative_difference, rounding_of
from ..prefix_cache.cache.known_code import UsersHooks
from ..prefix_cache.cache.settings import Settings
from .alone import OTHERS
from .divided import Rows, rows_of
from .finding import FoundFront, RecordedCall
from .rows import Divided, is_wide, leaves_of, tokens_of, with_less_columns

MOST_TRIES = 3
"""Maximum number of batches for the trial whether a loss reads padding."""
OF_OTHER_SAMPLES = "its output for a sample depends on the other samples"
"""Why a front is closed after its trial."""
NOT_TRIED = "it cannot be tried, as the forward around it sets adapters, and may change global variables"
"""Why a front is closed without a trial."""
LOUD = 2.0
"""Amplitude of the noise in place of padding, relative to the largest value."""


def halves_of(rows: int) -> tuple[list[int], list[int]]:
    """The two halves of the samples for the trial, each in a different order than in the batch."""
    return list(range(0, rows, 2))[::-1], list(range(1, rows, 2))[::-1]


def mixed(rows: int, samples: int) -> list[int]:
    """The rows of a batch, ordered so that neighbours belong to different samples: all first rows, all second ones.

    Args:
        rows: number of rows; each sample has the same number of them.
        samples: number of samples.
    """
    times = rows // samples
    return [row for part in range(times) for row in range(part, rows, times)]


def settings_around(model: nn.Module, names: Collection[str]) -> Settings:
    """The settings of a model's modules without those of these names, and the modules inside of these."""
    inside = {part for name in names for part in model.get_submodule(name).modules()}
    return Settings([module for module in model.modules() if module not in inside])


class FrontTrial:
    """Results of the trials of a front.

    Args:
        found: the front.
        tried: runs the front on a batch, restores the model, and returns the modules' calls.
        hooks: the user's hooks on the model.
        around: the settings of the model's other modules, which may read padding.
    """

    def __init__(
        self,
        found: FoundFront,
        tried: Callable[[Callable[[Batch], Any], Batch], Mapping[str, RecordedCall]],
        hooks: UsersHooks,
        around: Callable[[], Settings],
    ) -> None:
        self.hooks = hooks
        """The user's hooks on the model, which may read padding."""
        self.cuts_padding = False
        """Whether a sample's key covers its own tokens only, and not its padding."""
        self.keeps_padding = False
        """Whether padding is stored although it is not part of the key. Batches that are not wider can read it."""
        self._padding_holds = False  # padding in outputs does not depend on the columns behind it
        self.awaits_loss = False
        """Whether it is still unknown if the loss reads padding in the outputs (`try_loss` finds out)."""
        self.is_noisy = self.has_made_noise = False
        """Whether the front returns noise in place of padding, and whether it has returned any."""
        self.is_of_one = False
        """Whether the front was tried on a single row, which shows no dependence between rows."""
        self.is_by_sample = False
        """Whether all rows of a sample have one entry, as they depend on each other: frames of a clip, for example."""
        self.arguments: dict[str, Divided] = {}
        """For each module, how its arguments are divided."""
        self.wide: dict[tuple[str, int], tuple[int, ...]] = {}
        """Dimensions of outputs with the width of the batch."""
        self._found, self._num_tries, self._around_now = found, 0, around
        self._around: Settings | None = None  # when the loss was tried
        # on a copy, because the forward may write into its inputs, which the step reads afterwards
        self._tried = lambda forward, batch: tried(forward, in_new_tensors(batch))

    @property
    def may_show_padding(self) -> bool:
        """Whether something may read the padding of outputs that are stored without it."""
        is_stored = self.keeps_padding or not any(map(self.wide.get, self._found.stored))
        return self.awaits_loss or (not is_stored and self.hooks.are_any)

    def is_of_samples(
        self,
        inputs: Batch,
        calls: Mapping[str, RecordedCall],
        forward: Callable[[Batch], Any],
        may_cut: bool = True,
    ) -> bool:
        """Whether the front's outputs for each half of the samples equal those for the batch, up to rounding.

        The trial also decides whether padding can be left out of keys (`cuts_padding`) and of stored outputs, and, if
        samples have several rows, whether each row may have an entry of its own (`is_by_sample`).

        Args:
            inputs: the model's arguments, perhaps with `OTHERS`.
            calls: inputs and outputs of the modules.
            forward: runs the front on a batch.
            may_cut: whether padding need not be stored if the loss does not read it.
        """
        reads, tokens = self._found.reads, self.cuttable(inputs)
        rows, of_samples = rows_of(reads, inputs), Rows(batch_rows(inputs))
        reads |= {OTHERS}
        assert rows is not None, "the front was found by it"
        if not rows.patches and rows.count % of_samples.count == 0 and of_samples.count > 1:
            if rows.count > of_samples.count:
                order = mixed(rows.count, of_samples.count)
                others = self._tried(forward, some_rows(inputs, reads, rows, order))
                self.is_by_sample = not self._hold(calls, others, rows, order)
            rows, reads = of_samples, frozenset(inputs)  # because the rest of the model may run, too
        first, second = halves_of(rows.count)
        self.is_of_one = not second
        if second:
            others = self._tried(forward, some_rows(inputs, reads, rows, second))
            if not self._hold(calls, others, rows, second):
                return False
        if tokens is not None and len(tokens.lengths) == rows.count:
            columns = max(1, tokens.width // 8)
            last = max(tokens.width - 2 * columns - 1, 1) | 1  # odd: CANINE joins neighbouring tokens
            batch = with_less_columns(inputs, tokens.width - last, removes=False)
            cut = Tokens(tuple(slice(0, min(length, last)) for length in tokens.lengths), tokens.width)
            all_padding = tokens.width - max(1, *(cut.lengths[row] for row in first))  # of the longest sample

            def holds_without(fewer: int) -> bool:
                part = some_rows(with_less_columns(batch, fewer, removes=True), reads, rows, first)
                return self._hold(ran, self._tried(forward, part), rows, first, cut, fewer)

            ran = self._tried(forward, batch)
            # windows over neighbouring tokens (MobileBERT, ConvBERT) show at the end of a sample without padding only
            if holds_without(all_padding) and (all_padding == columns or holds_without(columns)):
                self.cuts_padding = True
                if any(self.wide.get(output) for output in self._found.stored):  # else no padding is stored
                    self.awaits_loss = may_cut
                    if not may_cut:
                        self._keep_padding()
                return True
        part = self._tried(forward, some_rows(inputs, reads, rows, first))
        return self._hold(calls, part, rows, first)

    def cuttable(self, inputs: Batch) -> Tokens | None:
        """The samples' own tokens, if the front reads inputs with padding that can be cut."""
        tokens = tokens_of(inputs)
        leaves = [leaf for name in self._found.reads & inputs.keys() for leaf in leaves_of(inputs[name], name)]
        is_any = any(is_wide(name, leaf, tokens) for name, leaf in leaves if isinstance(leaf, torch.Tensor))
        return tokens if is_any and tokens is not None and tokens.width > 1 else None

    def _hold(
        self,
        ran: Mapping[str, RecordedCall],
        half: Mapping[str, RecordedCall],
        rows: Rows,
        chosen: list[int],
        tokens: Tokens | None = None,
        columns: int = 0,
    ) -> bool:
        """Whether outputs are the same for half of the samples, with this many fewer columns of padding."""
        wide: dict[tuple[str, int], tuple[int, ...]] = {}
        padding_holds = tokens is not None
        if not ran.keys() == half.keys() == self._found.needed.keys():
            return False
        pairs = ((n, k, *pair) for n in ran for k, pair in enumerate(zip(ran[n][2], half[n][2], strict=False)))
        for name, position, whole, part in pairs:
            if not isinstance(whole, torch.Tensor) or not isinstance(part, torch.Tensor):
                continue
            if whole.dim() != part.dim():
                return False
            dims = tuple(dim for dim in range(1, whole.dim()) if whole.shape[dim] != part.shape[dim])
            if tokens is not None:
                wide[name, position] = dims
                if any((whole.shape[d], part.shape[d]) != (tokens.width, tokens.width - columns) for d in dims):
                    return False
            if (name, position) in self._found.stored:
                expected = rows.some(whole, chosen)
                if tokens is not None and dims == (1,):
                    difference = relative_difference([part], [expected[:, :-columns]])
                    padding_holds &= difference <= rounding_of(expected)
                    expected, part = (
                        cleared(t, [tokens.lengths[row] for row in chosen]) for t in (expected[:, :-columns], part)
                    )
                if relative_difference([part], [expected]) > rounding_of(expected):
                    return False  # also for outputs with another wide dimension
        self.wide, self._padding_holds = wide, padding_holds
        self._note_arguments(ran, half, rows, chosen, columns)
        return True

    def _keep_padding(self) -> None:
        """Store padding with the samples. If padding depends on the batch's width, it becomes part of the keys."""
        self.keeps_padding = self.cuts_padding = self._padding_holds
        if not self._padding_holds:
            self.wide = {}

    @property
    def leaves_padding_out(self) -> bool:
        """Whether padded samples are read without their padding. While there are hooks, they are computed."""
        is_stored = self.keeps_padding or not any(map(self.wide.get, self._found.stored))
        return not (is_stored or self.awaits_loss or self.hooks.are_any)

    def follow(self, is_other_loss: bool) -> None:
        """Store padding from now on, if the loss or the modules around the front are not those that were tried.

        Args:
            is_other_loss: whether the loss has changed since the training began.
        """
        if not self.leaves_padding_out or self._around is None:
            return
        if is_other_loss or not (self._around.are_same() or self._around.are_same_without_unread()):
            self._keep_padding()

    def try_loss(self, loss_of: Callable[[], torch.Tensor]) -> None:
        """Test whether a stock loss, or the model before it, reads padding in the outputs; if so, padding is stored.

        The rest of the model and the loss run with noise in place of padding.

        Args:
            loss_of: computes the loss of a batch, and restores all state.
        """
        self.awaits_loss = self.has_made_noise = False
        self._num_tries, self._around = self._num_tries + 1, self._around_now()
        losses = []
        try:
            for self.is_noisy in (False, True):
                losses.append(loss_of().detach())
        except Exception:  # the loss may need gradients
            losses.clear()
        finally:
            self.is_noisy = False
        if losses and not self.has_made_noise and self._num_tries < MOST_TRIES:
            self.awaits_loss = True  # the model was called on a batch without padding
        elif not losses or not self.has_made_noise or relative_difference(losses[1:], losses[:1]) > SAME:
            self._keep_padding()

    def with_noise(self, name: str, leaves: Sequence[Any], entries: BatchEntries) -> list[Any]:
        """The leaves of a module's output, with noise as padding."""
        self.has_made_noise |= entries.has_padding
        return [noisy(leaf, entries.lengths) if self.wide.get((name, k)) else leaf for k, leaf in enumerate(leaves)]

    def _note_arguments(
        self,
        whole: Mapping[str, RecordedCall],
        half: Mapping[str, RecordedCall],
        rows: Rows,
        chosen: Sequence[int],
        columns: int,
    ) -> None:
        """Record how arguments are divided: they are smaller for a part of the rows, and with fewer columns."""
        for name in whole.keys() & half.keys():
            pairs = [*zip(whole[name][0], half[name][0], strict=False)]
            known = self.arguments.get(name, Divided())
            if len(chosen) < rows.count:
                of_rows = tuple(
                    rows.divides(one) and one.dim() == other.dim() and len(rows.some(one, chosen)) == len(other)
                    for one, other in pairs
                )
                known = replace(known, rows=of_rows)
            if columns:
                shapes = [(one.shape, other.shape) for one, other in pairs]
                known = replace(known, wide=tuple(shrunk_by(columns, *two) for two in shapes))
            self.arguments[name] = known


def shrunk_by(columns: int, shape: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The dimensions in which a shape has this many entries more than the other one."""
    return tuple(k for k, (size, less) in enumerate(zip(shape, other, strict=False)) if size - less == columns)


def some_rows(inputs: Batch, names: Collection[str], rows: Rows, chosen: list[int]) -> Batch:
    """The batch with some rows of the named inputs."""
    part: Batch = recursively_apply(
        lambda tensor: rows.some(tensor, chosen), {name: inputs[name] for name in inputs.keys() & names}
    )
    return {**inputs, **part}


def _own(tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Mask of the samples' own columns in a tensor `[rows * times, width, ...]`: `[rows * times, width]`."""
    own = torch.arange(tensor.shape[1]) < torch.tensor(lengths)[:, None]
    return own.repeat_interleave(len(tensor) // len(lengths), 0).to(tensor.device)


def cleared(tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return the tensor with zeros as padding."""
    return tensor.detach().masked_fill(~aligned(_own(tensor, lengths), tensor), 0)


def noisy(tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return a floating-point tensor with noise as padding. It has no zeros, because a norm may divide by them."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(0)  # the model draws from the global generator
    noise = torch.empty_like(tensor).normal_(generator=generator) * LOUD * tensor.detach().abs().max()
    return torch.where(aligned(_own(tensor, lengths), tensor), tensor.detach(), noise)
