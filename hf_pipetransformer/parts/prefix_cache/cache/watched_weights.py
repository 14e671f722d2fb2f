"""Notices when frozen modules no longer match their stored outputs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn

from ....model.placeholders import is_wrapper, values_of
from .batch_entries import bytes_of
from .guards import accesses, are_lent, guard, unguard, unnoticed
from .settings import Settings
from .values import are_identical, is_plain

OFTEN, MOST_OF_TIME = 10, 0.03
"""Number of full comparisons of values, and the share of time that they may take after this number."""


class WatchedWeights:
    """A snapshot of the weights, buffers, modes and settings of frozen modules.

    PyTorch counts writes into a tensor, but not writes through its memory (`.data`, NumPy). A guarded tensor notes
    accesses to its memory, and all of its values are compared before the next use, and before each one as long as
    something else holds its memory, which may have got it earlier. One number of each tensor is always compared.

    Args:
        modules: the modules. Their submodules are not included.
        parameters: the parameters to watch.
        with_hooks: as for `Settings`.
    """

    def __init__(
        self, modules: Sequence[nn.Module], parameters: Sequence[torch.Tensor], with_hooks: bool = False
    ) -> None:
        self._compared = 0, 0.0, 0.0  # full comparisons: number, time of the first, total seconds
        self._access = ""  # the access before the latest full comparison
        self._modules = list(dict.fromkeys(modules))
        self._parameters = list(dict.fromkeys(parameters))
        self._settings = Settings(self._modules, with_hooks)
        while read := self._settings.modules_read:  # by users' code in the modules, which are not around them
            weights = [weight for module in read for weight in module.parameters(recurse=False)]
            here = [weight for weight in weights if not getattr(weight, "is_elsewhere", False)]
            self._modules += read
            self._parameters = list(dict.fromkeys([*self._parameters, *here]))
            self._settings = Settings(self._modules, with_hooks)
        self._owners = [vars(module) for module in self._modules]
        held = [buffer for buffer in self._held_buffers() if buffer is not None]
        # a module with other tensors is not cached: `held_by`
        self.buffers = list(dict.fromkeys(b for b in (*held, *self._settings.tensors) if is_plain(b) and b.numel()))
        """The buffers of the modules, and tensors that are plain attributes."""
        self._tensors = [*self._parameters, *self.buffers]
        self._counting = [p for p in self._parameters if not p.is_inference()]  # parameters with counted writes
        self._held, self._wrappers = ([t for t in self._tensors if is_wrapper(t) is kind] for kind in (False, True))
        self._where: list[int] = []  # addresses of the tensors of `_middles`
        self._middles: list[list[torch.Tensor]] = []
        self._digests: dict[int, str] = {}  # id of a guarded tensor -> digest of all values
        self._is_guarding = self._is_released = False
        self._accesses: list[int] = []  # number of accesses to each tensor's memory
        self._is_lent: list[bool] = []  # whether something else holds a tensor's memory, or may hold it
        self._may_be_lent = False  # whether holders are to be looked for
        self._checksums: dict[int, tuple[int, str]] = {}  # id of a buffer -> number of writes, digest
        self._noted_modes = self._modes()
        self._noted_buffers, self._noted_values = self._held_buffers(), self._values()

    @classmethod
    def of(cls, roots: Sequence[nn.Module]) -> WatchedWeights:
        """Watch whole modules."""
        return cls([m for root in roots for m in root.modules()], [p for root in roots for p in root.parameters()])

    def guard(self, known: Mapping[int, str] | None = None) -> None:
        """Note accesses to the tensors' memory from now on, until `release`.

        Args:
            known: digests of some of the tensors, by identity.
        """
        known = known or {}
        with unnoticed():
            self._digests = {id(tensor): known.get(id(tensor)) or digest_of(tensor) for tensor in self._tensors}
        guard(self._tensors)
        self._is_guarding, self._is_released = True, False
        self._count_views(1)
        self._accesses, self._is_lent = accesses(self._tensors), [False] * len(self._tensors)
        self._may_be_lent = True

    def look_for_holders(self) -> None:
        """Find tensors with memory that others hold. No graph of autograd may be alive: it holds weights, too."""
        if self._may_be_lent and self._is_guarding:
            with unnoticed():
                self._is_lent = are_lent(self._tensors)
            self._may_be_lent = any(self._is_lent)

    def release(self) -> None:
        """Remove the guards from the tensors."""
        if self._is_guarding:
            self._count_views(-1)
            unguard(self._tensors)
        self._digests, self._is_guarding, self._is_released = {}, False, True
        self._where, self._middles = [], []

    def digest(self) -> str:
        """Return a digest of all values and of the modes."""
        content = xxhash.xxh3_128(repr(self._modes()).encode())
        with unnoticed():
            for tensor in self._tensors:
                content.update((self._digests.get(id(tensor)) or digest_of(tensor)).encode())
        return content.hexdigest()

    def described(self) -> str:
        """Return the modules' settings in words that are the same in every process."""
        return self._settings.described()

    def what_changed(self, settings: bool = True, values: bool = True, modes: bool = True) -> str | None:
        """Return the change since this snapshot in words; None if there is none.

        Args:
            settings: whether attributes, code, hooks and modes count.
            values: whether the values of weights and buffers count.
            modes: whether modes count, if settings do.
        """
        if settings and not self._settings.are_same():
            return "an attribute, a hook, code or a part of its modules has been changed, added or removed"
        if settings and modes and self._modes() != self._noted_modes:
            return "its modules have been set to another mode (train() or eval())"
        if not values:
            return None
        if self._is_released:
            return "its weights are no longer watched"
        with unnoticed():
            are_same = self._values() == self._noted_values and self._are_given_out_same()
        if not are_same or not are_identical(self._held_buffers(), self._noted_buffers):
            return "its weights or buffers have been changed, or are trained again"
        return None

    def are_settings_same(self) -> bool:
        """Whether settings are unchanged, apart from modes and attributes that no code reads."""
        return self._settings.are_same() or self._settings.are_same_without_unread()

    def why_too_slow(self) -> str | None:
        """Return why watching takes too long, or None. Each access to memory costs a comparison of all values."""
        number, first, seconds = self._compared
        if number < OFTEN or seconds < MOST_OF_TIME * (time.perf_counter() - first):
            return None
        share = f"{seconds / (time.perf_counter() - first):.0%} of the time"
        how = f"accessed again and again (.{self._access})" if self._access else "held by a view or an array as well"
        return f"its weights are {how}, and comparing them takes {share}"

    def take_rewritten(self, digest: str) -> bool:
        """Accept rewritten values as the noted ones, if all are equal. Returns True if they are.

        Args:
            digest: `digest()` of the noted values.
        """
        are_held = are_identical(self._held_buffers(), self._noted_buffers)
        self._digests, noted_digests = {}, self._digests
        try:
            if not are_held or self.what_changed(values=False) is not None or self.digest() != digest:
                return False
        finally:
            self._digests = noted_digests
        self._accesses, self._may_be_lent = accesses(self._tensors), True
        with unnoticed():
            noted, self._noted_values = self._noted_values, self._values()
        return bool(self._noted_values[0] == noted[0])  # False if parameters are trained again

    def _are_given_out_same(self) -> bool:
        """Whether tensors with accessed memory still have their noted values."""
        now = accesses(self._tensors)
        if not self._digests or (now == self._accesses and not any(self._is_lent)):
            return True
        of_each = zip(self._tensors, now, self._accesses, self._is_lent, strict=True)
        touched = [tensor for tensor, one, other, is_lent in of_each if one != other or is_lent]
        began, (number, first, seconds) = time.perf_counter(), self._compared
        are_same = all(digest_of(tensor) == self._digests.get(id(tensor)) for tensor in touched)
        self._compared = number + 1, first or began, seconds + time.perf_counter() - began
        self._access = next((str(access) for t in touched if (access := getattr(t, "access", ""))), "")
        if are_same:  # accessed tensors may be held until holders are looked for
            changed = [one != other for one, other in zip(now, self._accesses, strict=True)]
            self._is_lent = [one or other for one, other in zip(self._is_lent, changed, strict=True)]
            self._accesses, self._may_be_lent = now, True
        return are_same

    def _count_views(self, number: int) -> None:
        """Add to the number of known views of each guarded tensor's memory: there is one of its middle."""
        with unnoticed():
            for tensor in self._tensors:
                if _has_middle(tensor) and hasattr(tensor, "num_views"):
                    tensor.num_views += number

    def _modes(self) -> list[bool]:
        return [module.training for module in self._modules]

    def _held_buffers(self) -> list[Any]:
        return [buffer for of in self._owners for buffer in of["_buffers"].values()]

    def _values(self) -> tuple[list[Any], ...]:
        """Return the weights' flags and numbers of writes, digests of the buffers, and one number of each tensor."""
        where = [torch.Tensor.data_ptr(tensor) for tensor in self._held]  # works for guarded tensors, too
        where += [values_of(tensor)[0].data_ptr() for tensor in self._wrappers]
        if where != self._where:  # weights may have moved to other memory
            with unnoticed():
                self._where, self._middles = where, self._views_of_middles()
        numbers = [torch.cat(views) for views in self._middles]
        return (
            [p.requires_grad for p in self._parameters],
            [p._version for p in self._counting],
            [self._checksum(buffer) for buffer in self.buffers],
            [(n.nan_to_num() if n.is_floating_point() else n).tolist() for n in numbers],  # NaN is not equal to itself
        )

    def _checksum(self, buffer: torch.Tensor) -> str:
        """Return a digest of a buffer, recomputed only after a write: DDP writes the same values in each step."""
        version, checksum = self._checksums.get(id(buffer), (-2, ""))
        if version != _version(buffer):
            version, checksum = _version(buffer), digest_of(buffer)
            self._checksums[id(buffer)] = version, checksum
        return checksum

    def _views_of_middles(self) -> list[list[torch.Tensor]]:
        by_type: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in self._tensors:
            for value in values_of(tensor)[:1] if _has_middle(tensor) else ():
                pairs = zip(value.shape, value.stride(), strict=True)
                offset = value.storage_offset() + sum(size // 2 * stride for size, stride in pairs)
                view = value.new_empty(0).set_(
                    value.untyped_storage(), offset, (1,), (1,)
                )  # has no other view as base
                by_type.setdefault((value.dtype, value.device), []).append(view)
        return list(by_type.values())


def _has_middle(tensor: torch.Tensor) -> bool:
    return any(v.numel() and not v.is_complex() and v.layout is torch.strided for v in values_of(tensor)[:1])


def digest_of(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's dtype, shape and all bits."""
    content = xxhash.xxh3_128(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    for value in values_of(tensor):
        content.update(bytes_of(value))
    return content.hexdigest()


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
