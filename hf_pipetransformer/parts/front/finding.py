"""Finds the frozen front of a model: the largest frozen modules that depend on the batch alone.

The finder watches one forward pass function by function; it knows no model families. For each tensor it records the
batch inputs (by name) that the tensor depends on, and whether it depends on trained parameters or random numbers. A
module belongs to the front if all its parameters are frozen, it is called once, and its inputs depend on neither
trained parameters nor random numbers. Its output is needed if code outside the front reads it, or the model returns
it:

    pixel_values -> embeddings -> layer 0 ... layer 7 -> projector (trained) -> ...
                    front         front       front,
                                              needed
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import TreeSpec, tree_flatten
from transformers.cache_utils import Cache

from ...model.called_inputs import NOT_OF_STATES, SELECTING
from ...model.left_as_found import is_iterator
from ...model.method_override import MethodOverride, original_method
from ...model.micro_batch import batch_rows
from ...model.plain_runs import runs_plainly
from ...model.training_check import LIBRARIES
from ...pipeline.devices import synchronise
from ...randomness import other_randomness, torch_states
from ..prefix_cache.cache.guards import unnoticed
from ..prefix_cache.cache.known_code import (
    FOREIGN,
    OF_ALL,
    candidates,
    is_known,
    kept_by,
    users_hook_inside,
    why_not_by_sample,
)
from ..prefix_cache.cache.origins import RANDOM, TRAINED, UNKNOWN, Origins, tensors_in
from ..prefix_cache.cache.values import held_by
from ..prefix_cache.cache.watched_weights import digest_of
from .alone import BatchInputs, FrontAlone, ModuleCall
from .divided import Rows, rows_of
from .entries import dense_order

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
CHEAP = 0.5
"""A module is computed, not stored, if its share of the time is below this fraction of its share of the bytes."""
LEAKS = "something that is computed inside of it is recorded, such as attentions, and read outside"
"""Why a module is not in the front if the model also reads values from inside it."""
DRAWS = "it draws random numbers"
"""Why a module with dropout, for example, is not in the front."""
REENTRANT = "it runs in a gradient checkpoint with use_reentrant=True, through which gradients flow"
"""Why a module is not in the front if its output gets a graph only after the module has returned."""
CHANGES = "it changes its buffers or its inputs"
"""Why a module is not in the front if it leaves more than its output."""
NOTICEABLE = 0.05
"""Minimum share of the forward pass for the log to name a frozen module that is not in the front."""


class Others(NamedTuple):
    """The arguments of a module that are no tensors, in words.

    `plain` has those that its states depend on, without None: in place of a tensor there may be None in another call,
    as for the mask of a batch without padding. `whole` has all of them, also those that select what is returned. `odd`
    is the class of the first one that is no plain value: words do not tell when an object changes.
    """

    whole: str
    plain: str
    odd: str = ""

    @property
    def why_not(self) -> str | None:
        """Why a module with these arguments is not in the front."""
        return f"it is given a {self.odd}" if self.odd else None


RecordedCall = tuple[list[torch.Tensor], Others, list[Any], TreeSpec]
"""The tensors that a module was called on, its other arguments, the leaves of its output, and their containers."""


@dataclass(frozen=True)
class Reading:
    """The outputs that the loss reads from a module that it calls; caches of keys and values are never read.

    Attributes:
        positions: which of the leaves of its output are read.
        trained: identities of parameters that are trained, also if they require no gradient in this call.
    """

    positions: frozenset[int]
    trained: frozenset[int]

    def of(self, output: Any) -> list[torch.Tensor]:
        """The tensors in an output that are read."""
        leaves = enumerate(tree_flatten(output)[0])
        return [leaf for k, leaf in leaves if k in self.positions and isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class FoundFront:
    """The front that one forward pass has shown.

    Attributes:
        needed: names of the modules, in the order of their calls, with the positions of the output leaves that must
            be stored.
        reads: names of the batch inputs that the modules depend on; all have the same number of entries.
        seconds: duration of the modules' calls.
        share: share of these calls in the whole pass.
        sample_bytes: size of the stored outputs of each sample of the batch, in bytes.
        why_not: for other frozen modules that take a noticeable time, why they are not in the front.
        closed: names of those modules with parts that may belong to the front.
        calls: the recorded call of each module; to be discarded after use.
        uncalled: names of frozen modules that were not called, for example because the batch has no images.
        is_of_images: whether an entry belongs to an image, and a sample has any number of images.
        alone: runs the modules without the forward around them; None where this sets adapters before it calls them.
    """

    needed: dict[str, tuple[int, ...]]
    reads: frozenset[str]
    seconds: float
    share: float
    sample_bytes: int
    why_not: Mapping[str, str]
    closed: frozenset[str]
    calls: dict[str, RecordedCall]
    uncalled: frozenset[str] = frozenset()
    is_of_images: bool = False
    alone: FrontAlone | None = None

    @property
    def stored(self) -> list[tuple[str, int]]:
        """The leaves of an entry, by module and position."""
        return [(name, position) for name, leaves in self.needed.items() for position in leaves]

    @property
    def described(self) -> str:
        """Names of the front's modules, in words."""
        names = list(self.needed)
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} modules)"


@dataclass
class _FrozenCall:
    """A call of a frozen module."""

    name: str
    origins: frozenset[str]
    inputs: list[torch.Tensor]
    others: Others
    outputs: list[Any]
    seconds: float
    why_not: str | None
    structure: TreeSpec
    versions: list[int]  # of inputs and outputs, when the module returned
    as_called: ModuleCall
    is_set: bool  # adapters are as they were around the model
    has_graph: bool


def arguments_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], Others]:
    """The tensors among a module's arguments, and the other arguments; without those for the loss only."""
    given = args, {name: value for name, value in kwargs.items() if name not in NOT_OF_STATES}
    leaves, structure = tree_flatten(given)
    others = {k: leaf for k, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)}
    plain = {k: leaf for k, leaf in others.items() if leaf is not None}
    selecting = {name: kwargs[name] for name in sorted(SELECTING & kwargs.keys())}
    odd = next((type(leaf).__name__ for leaf in others.values() if not isinstance(leaf, PLAIN)), "")
    words = Others(f"{others} {selecting} in {structure}", f"{plain} in {structure}", odd)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], words


def versions_of(leaves: Sequence[Any]) -> list[int]:
    """Numbers of writes into tensors; for those of inference mode, which counts none, digests of their values."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [hash(digest_of(leaf)) if leaf.is_inference() else leaf._version for leaf in tensors]


def waits_for_others(model: nn.Module) -> bool:
    """Whether a model's forward may contain collectives: a user's own, or normalisation over all processes."""
    return any(
        isinstance(module, nn.SyncBatchNorm) or not type(module).__module__.startswith(LIBRARIES)
        for module in model.modules()
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` has made a module of it: its code must not be traced with what watches a step."""
    return type(module).__module__.startswith("torch._dynamo")


def _runs_in_parts(model: nn.Module, name: str, origins: Origins) -> bool:
    """Whether parts of a module that was not called have run, as in CLIP's `get_image_features`."""
    paths = itertools.accumulate(name.split("."), "{}.{}".format)
    module, *around = [model, *map(model.get_submodule, paths)][::-1]
    if any(is_compiled(one) or one._compiled_call_impl is not None for one in (module, *around)):
        return False  # compiled calls run elsewhere
    return next(module.children(), None) is not None and any(map(origins.is_read, module.parameters()))


def find_front(
    model: nn.Module,
    inputs: Mapping[str, Any],
    call: Callable[[], Any],
    device: torch.device,
    opened: Collection[str] = (),
    declared: Collection[str] = (),
    reading: Reading | None = None,
) -> tuple[Any, FoundFront]:
    """Watch one forward pass, and return its output and the front, which may be empty.

    Args:
        model: the model, in the modes of training.
        inputs: its arguments, by name.
        call: runs the forward.
        device: device of the model.
        opened: as for `frozen_modules`.
        declared: names of modules with code of the user's own that may be stored.
        reading: the outputs of the call that are read; by default all.
    """
    foreign = candidates(model, opened, declared)
    modules = {name: model.get_submodule(name) for name in foreign}
    origins = Origins(model, inputs)
    trained = frozenset[int]() if reading is None else reading.trained
    for parameter in model.parameters():
        if id(parameter) in trained:
            origins.of(parameter, set()).add(TRAINED)
    calls: list[_FrozenCall] = []
    at_start, thread = other_randomness(), threading.get_ident()
    batch, adapters = BatchInputs(inputs, device), with_adapters(model)
    around = states_of(adapters)

    def watch(
        name: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given, others = arguments_of(args, kwargs)
        as_called, is_set = batch.call_of(module, args, kwargs), states_of(adapters) == around
        of = origins.union(given)
        why = FOREIGN.format(foreign[name], name) if foreign[name] else others.why_not
        if why is None and any(
            map(is_iterator, itertools.chain.from_iterable(vars(part).values() for part in module.modules()))
        ):
            why = "it has an iterator, which returns something else in each call"
        if why is None and (name_of_hook := users_hook_inside(module)) is not None:
            why = f"it has a hook inside ({name_of_hook})"
        why = why or why_not_by_sample(module.modules()) or held_by(module)
        before, versions, kept = torch_states(), [*buffers_of(module), *versions_of(given)], kept_by(module)
        synchronise(device)
        origins.is_paused = False
        began = time.perf_counter()
        with unnoticed():
            output = forward(*args, **kwargs)
        synchronise(device)
        seconds = time.perf_counter() - began
        origins.is_paused = True
        if any(not torch.equal(a, b) for a, b in zip(before, torch_states(), strict=True)):
            why = why or DRAWS
            of.add(RANDOM)
        if other_randomness() != at_start:
            why = why or "random numbers are drawn with Python or NumPy"
        if [*buffers_of(module), *versions_of(given)] != versions:
            why = why or CHANGES
        if kept_by(module) != kept or arguments_of(args, kwargs)[1] != others:
            why = why or "it keeps a tensor that it computes"
        output = origins.returned(output)
        if users_hooks_on(module):
            origins.note_read(tensors_in(output))  # the hooks get the output, and may keep it
        outputs, structure = tree_flatten(output)
        may_hide = (torch.Tensor, type(None), *((Cache,) if reading is not None else ()))
        odd = next((leaf for leaf in outputs if not isinstance(leaf, may_hide)), None)
        if odd is not None:
            why = why or f"it returns a {type(odd).__name__}"
        of |= origins.union(tensors_in(output)) | origins.decided
        versions = versions_of([*given, *outputs])
        of_call = name, frozenset(of), given, others, outputs, seconds, why, structure, versions
        calls.append(_FrozenCall(*of_call, as_called, is_set, torch.is_grad_enabled()))
        return output

    def watched(name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if origins.is_inside or not runs_plainly() or threading.get_ident() != thread:
                return forward(*args, **kwargs)
            origins.is_inside = origins.is_paused = True
            origins.inside_of = name
            try:
                return watch(name, module, forward, args, kwargs)
            finally:
                origins.is_inside = origins.is_paused = False

        return run

    began = time.perf_counter()
    with ExitStack() as stack:
        for name, module in modules.items():
            override = MethodOverride(module, "forward", watched(name, module, original_method(module)))
            stack.callback(override.remove)
        stack.enter_context(origins)
        output = call()
    synchronise(device)
    seconds = time.perf_counter() - began
    origins.note_read(tensors_in(output) if reading is None else reading.of(output))
    for called in calls:
        if called.name in origins.leaking:
            called.why_not = called.why_not or LEAKS
    found = _chosen(calls, origins, inputs, seconds)
    uncalled = frozenset(modules) - {of.name for of in calls}
    by_parts = [name for name in uncalled if reading is None and _runs_in_parts(model, name, origins)]
    closed = frozenset(name for name in (*found.closed, *by_parts) if not foreign[name])
    front = {call.name: call for call in calls if call.name in found.needed}
    alone = None
    if front and all(call.is_set for call in front.values()) and (rows := rows_of(found.reads, inputs)) is not None:
        as_called = {name: call.as_called for name, call in front.items()}
        outputs = {name: call.outputs for name, call in front.items()}
        alone = FrontAlone(as_called, outputs, origins, rows, device)
    return output, replace(found, closed=closed, uncalled=uncalled, alone=alone)


def with_adapters(model: nn.Module) -> list[Any]:
    """The modules of a model with adapters, which can be turned off."""
    return [module for module in model.modules() if hasattr(module, "_disable_adapters")]


def states_of(adapters: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Whether adapters are turned off, and which of them are used."""
    return [(module._disable_adapters, module._active_adapter) for module in adapters]


def users_hooks_on(module: nn.Module) -> list[Any]:
    """The forward hooks of a module that do not belong to a known library; they get the module's output."""
    return [hook for hook in module._forward_hooks.values() if not is_known(hook)]


def users_see_all_calls() -> bool:
    """Whether hooks for all modules, or modes of torch, are the user's. They see what any module computes.

    They may count it, or change it in some calls and not in others.
    """
    of_torch = nn.modules.module
    hooks = *of_torch._global_forward_hooks.values(), *of_torch._global_forward_pre_hooks.values()
    modes = *_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()
    return not all(map(is_known, (*hooks, *modes)))


@contextmanager
def users_hooks_at_rest(model: nn.Module) -> Iterator[None]:
    """Inside, users' hooks on a model's modules do not run, because a trial is not a call of the user's."""
    tables = [table for module in model.modules() for table in (module._forward_hooks, module._forward_pre_hooks)]
    tables += OF_ALL
    before = [(table, dict(table)) for table in tables if not all(map(is_known, table.values()))]
    for table, hooks in before:
        for key in [key for key, hook in hooks.items() if not is_known(hook)]:
            del table[key]
    try:
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)


def buffers_of(module: nn.Module) -> list[int]:
    """The identities of a module's buffers, and the numbers of writes into them."""
    buffers = list(module.buffers())
    return [*map(id, buffers), *versions_of(buffers)]


def _why_not(call: _FrozenCall, num_calls: int, inputs: Mapping[str, Any]) -> str | None:
    """Why a frozen module cannot be part of the front; None if it can."""
    if num_calls > 1:
        return "it is called several times in a forward pass"
    if versions_of([*call.inputs, *call.outputs]) != call.versions:
        return "the model writes into its output"
    if call.origins & {TRAINED, UNKNOWN}:  # before its own dropout, which is not the reason then
        return "its inputs are computed from trained parameters, or by functions that are not known"
    if call.why_not is not None:
        return call.why_not
    if RANDOM in call.origins:
        return "its inputs are computed from random numbers"
    if not call.origins:
        return "it does not depend on the batch"
    if not call.has_graph and any(getattr(leaf, "grad_fn", None) is not None for leaf in call.outputs):
        return REENTRANT
    if rows_of(call.origins, inputs) is None:
        return "the inputs that it is computed from have different numbers of entries"
    return None


def _chosen(calls: Sequence[_FrozenCall], origins: Origins, inputs: Mapping[str, Any], seconds: float) -> FoundFront:
    """Choose the front from the frozen modules that were called."""
    counts = Counter(call.name for call in calls)
    why_not: dict[str, str] = {}
    closed: set[str] = set()
    front: dict[str, _FrozenCall] = {}
    for call in calls:
        if call.why_not is not None and call.seconds > NOTICEABLE * seconds:
            closed.add(call.name)
        why = _why_not(call, counts[call.name], inputs)
        if why is None:
            front[call.name] = call
        elif call.seconds > NOTICEABLE * seconds:
            why_not[call.name] = why
    seconds_by_rows: Counter[Rows] = Counter()  # of images, say, and of samples
    for call in front.values():
        if (of_call := rows_of(call.origins, inputs)) is not None:
            seconds_by_rows[of_call] += int(1e9 * call.seconds)
    rows = max(seconds_by_rows, key=seconds_by_rows.__getitem__, default=Rows(1))
    front = {name: call for name, call in front.items() if rows_of(call.origins, inputs) == rows}
    while True:
        needed = _needed(front, calls, origins)
        odd = next((n for n in front if not all(_is_of_rows(front[n].outputs[k], rows) for k in needed[n])), None)
        if odd is not None:
            call = front.pop(odd)
            if call.seconds > NOTICEABLE * seconds:
                closed.add(odd)
                why_not[odd] = "its output has no entry for each sample, or repeats values in memory"
            continue
        useless = [name for name, call in front.items() if not needed[name] and not _feeds(call, front)]
        dropped = useless or _cheap(front, needed, calls, origins)
        if not dropped:
            break
        for name in dropped:
            del front[name]
    spent = sum(call.seconds for call in front.values())
    return FoundFront(
        needed,
        frozenset().union(*(call.origins for call in front.values())),
        spent,
        spent / max(seconds, 1e-9),
        _nbytes(front, needed) // batch_rows(inputs, 1),
        why_not,
        frozenset(closed),
        {name: (call.inputs, call.others, call.outputs, call.structure) for name, call in front.items()},
        is_of_images=bool(rows.patches),
    )


def _needed(
    front: Mapping[str, _FrozenCall], calls: Sequence[_FrozenCall], origins: Origins
) -> dict[str, tuple[int, ...]]:
    """For each module of the front, positions of the output leaves that code outside the front reads."""
    others = {id(tensor) for call in calls if call.name not in front for tensor in call.inputs}
    return {
        name: tuple(
            position
            for position, (leaf, first) in enumerate(zip(call.outputs, first_positions(call.outputs), strict=True))
            if isinstance(leaf, torch.Tensor) and first == position and (origins.is_read(leaf) or id(leaf) in others)
        )
        for name, call in front.items()
    }


def first_positions(leaves: Sequence[Any]) -> list[int]:
    """For each leaf of an output, the position of the first leaf that is the same tensor, which may be its own."""
    first: dict[int, int] = {}
    are_tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    pairs = enumerate(zip(leaves, are_tensors, strict=True))
    return [first.setdefault(id(leaf), position) if is_tensor else position for position, (leaf, is_tensor) in pairs]


def _feeds(call: _FrozenCall, front: Mapping[str, _FrozenCall]) -> bool:
    outputs = {id(leaf) for leaf in call.outputs}
    return any(id(tensor) in outputs for other in front.values() for tensor in other.inputs)


def _cheap(
    front: Mapping[str, _FrozenCall],
    needed: Mapping[str, tuple[int, ...]],
    calls: Sequence[_FrozenCall],
    origins: Origins,
) -> list[str]:
    """Return the last module that is cheaper to compute than to store, in a list; empty if there is none."""
    seconds, size = sum(call.seconds for call in front.values()), _nbytes(front, needed)
    for name in reversed(list(front)):
        rest = {other: call for other, call in front.items() if other != name}
        less = size - _nbytes(rest, _needed(rest, calls, origins))
        if less > 0 and front[name].seconds / seconds < CHEAP * less / size:
            return [name]
    return []


def _nbytes(front: Mapping[str, _FrozenCall], needed: Mapping[str, tuple[int, ...]]) -> int:
    return sum(front[name].outputs[leaf].nbytes for name, leaves in needed.items() for leaf in leaves)


def _is_of_rows(tensor: torch.Tensor, rows: Rows) -> bool:
    """Whether a tensor can be divided among the rows and stored as it is."""
    return dense_order(tensor) is not None and tensor.numel() > 0 and rows.has(tensor)
