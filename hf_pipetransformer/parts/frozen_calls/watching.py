"""Watches one of the user's own steps: the frozen modules that the loss calls, their inputs, and the outputs it reads.

    loss(batch)     batch -> model (trained) -----------------> kl_div(student's logits, teacher's logits)
                          -> teacher, outermost and frozen --->
                             called on the batch alone          reads logits, not past_key_values

The sources of each tensor are noted (`Origins`), function by function, while the step happens. No module or loss runs
an additional time.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_flatten
from transformers.cache_utils import Cache

from ...model.plain_runs import runs_plainly
from ...randomness import torch_states
from ..prefix_cache.cache.origins import RANDOM, TRAINED, UNKNOWN, Origins, tensors_in
from .forms import arguments_by_name, form_of

DEAR = 2.0
"""A module's last weights are run again if they return more than this many times the bytes that they are given."""
DEEPEST = 6
"""Levels of objects in a cache of keys and values: an encoder-decoder's contains two."""
WHY_NOT_OF_BATCH = {
    TRAINED: "its inputs are computed with trained parameters",
    RANDOM: "its inputs are computed with random numbers",
    UNKNOWN: "its inputs are computed by functions that are not known, such as a tokenizer's",
}
"""Why a call is computed whose inputs may be different in each epoch, by their origins."""
OWN = f"{__package__.partition('.')[0]}."
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


@dataclass
class SeenCall:
    """An outermost call of a frozen module in the watched step.

    Attributes:
        module: the module; inside of DDP, the one that is wrapped.
        form: of the call; None if the arguments cannot be looked at.
        why_not: why its output cannot be stored, for example because its arguments are not computed from the batch
            alone; empty if it can.
        positions: which of the leaves of its output are read, known at the end of the step.
        dear: the last module inside with weights that returns much more than it is given, such as a head over a
            vocabulary; None if there is none.
        rows: number of entries of the first tensor that it was called on.
        within: the outermost module with code of the user's that has called it; None if the loss has.
        extends_given: whether it has written its output into the dict that it was given, and returned this dict.
    """

    module: nn.Module
    form: str | None
    why_not: str
    dear: nn.Module | None
    rows: int
    outputs: list[Any]
    positions: frozenset[int] = frozenset()
    reads_cache: bool = False
    within: nn.Module | None = None
    extends_given: bool = False

    @property
    def why_computed(self) -> str:
        """Why this call cannot be read in later epochs; empty if it can."""
        if self.why_not:
            return self.why_not
        if self.reads_cache:
            return "keys and values of earlier calls are read, as in generate()"
        return "" if self.form is not None else "its arguments are not tensors and plain values alone"


@dataclass(frozen=True)
class _Kind:
    """The role of a module in a watched step.

    Attributes:
        is_transparent: whether it is looked into: it has no weights, the trained model is inside of it, or it has code
            of the user's that is not declared.
        is_trained: whether a weight of it is trained.
        is_foreign: whether it is transparent for its code.
    """

    is_transparent: bool
    is_trained: bool
    is_foreign: bool


@dataclass
class _Open:
    """A call that has begun."""

    module: nn.Module
    args: tuple[Any, ...] = ()  # in their containers as they were
    states: list[torch.Tensor] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)  # of tensors in the arguments, by identity
    dear: nn.Module | None = None


class LossWatch:
    """Watches the computation inside, in a step.

    Args:
        model: the trained model.
        inputs: the batch.
        trained: identities of the parameters that are trained.
        why_not_root: why the output of a module is not stored that is called now; empty if it may be stored, None if
            it is a part of the training.
        why_foreign: describes the code of the user's in a module, if it is not declared; empty if there is none. Such
            a module is looked into, as the loss is: it may not run more often than under the stock Trainer.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        trained: Collection[int],
        why_not_root: Callable[[nn.Module], str | None],
        why_foreign: Callable[[nn.Module], str],
    ) -> None:
        self.calls: list[SeenCall] = []
        """The calls of frozen modules, in their order, after the end."""
        self._model, self._trained, self._why_not_root = model, trained, why_not_root
        self._why_foreign = why_foreign
        self._foreign: list[nn.Module] = []  # modules with code of the user's that run
        self._passed: list[Cache] = []  # caches of keys and values that calls were given
        self._origins = Origins(model, inputs)
        self._stack: list[_Open] = []  # of calls that have begun, from the outermost one
        self._kinds: dict[int, _Kind] = {}
        self._entered = ExitStack()
        self._thread = threading.get_ident()  # the hooks run on all threads

    def __enter__(self) -> LossWatch:
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._begins).remove)
            stack.callback(register_module_forward_hook(self._ended, with_kwargs=True, always_call=True).remove)
            stack.enter_context(self._origins)
            self._entered = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)
        for call in self.calls:
            leaves = list(enumerate(call.outputs))
            of = [k for k, leaf in leaves if isinstance(leaf, torch.Tensor) and self._origins.is_read(leaf)]
            call.positions = frozenset(of)
            caches = [leaf for leaf in call.outputs if isinstance(leaf, Cache)]
            passed = any(cache is given for cache in caches for given in self._passed)
            call.reads_cache = passed or any(map(self._origins.is_read, _tensors_of(caches)))
            call.outputs = []
        self._passed = []

    def _kind_of(self, module: nn.Module) -> _Kind:
        if id(module) not in self._kinds:
            is_around = module is not self._model and any(part is self._model for part in module.modules())
            is_around |= type(module).__module__.startswith(OWN)  # a step runs in a module of this package
            is_plain = next(module.parameters(), None) is None
            is_trained = any(id(parameter) in self._trained for parameter in module.parameters())
            is_transparent = is_around or is_plain or isinstance(module, WRAPPERS)
            is_foreign = not is_transparent and not is_trained and bool(self._why_foreign(module))
            self._kinds[id(module)] = _Kind(is_transparent or is_foreign, is_trained, is_foreign)
        return self._kinds[id(module)]

    def _is_seen(self) -> bool:
        """Whether calls are looked at now: not on other threads, nor while something transforms or records them."""
        return runs_plainly() and threading.get_ident() == self._thread

    def _begins(self, module: nn.Module, args: Any) -> None:
        if not self._is_seen():
            return
        if self._stack:
            self._stack.append(_Open(module))
        elif self._kind_of(module).is_foreign:
            self._foreign.append(module)
            for tensor in (*module.parameters(), *module.buffers()):
                self._origins.of(tensor, set())
        elif not self._kind_of(module).is_transparent:
            self._stack.append(_Open(module, _as_it_is(args), torch_states(), _versions_of(args)))
            self._origins.is_paused = True

    def _ended(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        """A call has ended; after an error in it torch passes no keyword arguments to the hook."""
        if not self._is_seen():
            return
        kwargs, output = rest if len(rest) == 2 else ({}, None)
        while self._stack and self._stack[-1].module is not module:  # an error has ended calls inside of it
            self._stack.pop()
        if not self._stack:
            while module in self._foreign:
                self._foreign.pop()
            return
        call = self._stack.pop()
        if self._stack:
            if next(module.children(), None) is None and next(module.parameters(), None) is not None:
                given, made = (sum(t.nbytes for t in tensors_in(of)) for of in ((args, kwargs), output))
                self._stack[0].dear = module if made > DEAR * given > 0 else None
            return
        self._origins.is_paused = False
        self._note(call, args, kwargs, output)

    def _note(self, call: _Open, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note the output of the outermost call of a module with weights."""
        module, given = call.module, tensors_in((call.args, kwargs))
        caches = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Cache)]
        self._passed += caches
        given += _tensors_of(caches)  # a call may read and extend the keys and values of an earlier one
        self._origins.note_read(given)
        is_trained = self._kind_of(module).is_trained
        why_not = self._why_not_root(module) if not is_trained or module is self._model else None
        is_root = not why_not and why_not is not None
        of_inputs = self._origins.union(given)
        of = of_inputs if is_root and module is not self._model else {TRAINED}
        if why_not is not None and (is_root or not self._foreign):
            if not why_not and (not of_inputs or of_inputs & WHY_NOT_OF_BATCH.keys()):
                known = (why for origin, why in WHY_NOT_OF_BATCH.items() if origin in of_inputs)
                why_not = next(known, "its inputs do not come from the batch")
            extends = is_extended(args, output)
            if not why_not and not _is_as_it_was(call.args, args, extends):
                why_not = "it writes into containers that it is given"
            outputs = tree_flatten(output)[0]
            rows = next((len(tensor) for tensor in given if tensor.dim()), 0)
            # a traced module does not even tell its arguments
            form = form_of(module, arguments_by_name(module, call.args, kwargs)) if is_root else None
            within = next(iter(self._foreign), None)
            seen = SeenCall(module, form, why_not, call.dear, rows, outputs, within=within, extends_given=extends)
            self.calls.append(seen)
        if not all(map(torch.equal, call.states, torch_states())):
            of = of | {RANDOM}
        # tensors that it was given and has not changed
        handed_on = dict(call.versions.items() & _versions_of(args).items())
        for tensor in tensors_in(output):
            if id(tensor) not in handed_on:
                self._origins.of(tensor, set()).update(of)


def is_extended(args: tuple[Any, ...], output: Any) -> bool:
    """Whether a call has returned the dict that it was given, as the modules of sentence-transformers do."""
    return bool(args) and type(args[0]) is dict and output is args[0]


def _versions_of(args: tuple[Any, ...]) -> dict[int, int]:
    """Numbers of writes into the tensors in arguments, by their identity."""
    return {id(tensor): tensor._version for tensor in tensors_in(args) if not tensor.is_inference()}


def _as_it_is(value: Any) -> Any:
    """The same values in new containers, which a call does not write into."""
    if type(value) is dict:
        return {name: _as_it_is(entry) for name, entry in value.items()}
    return type(value)(map(_as_it_is, value)) if type(value) in (list, tuple) else value


def _is_as_it_was(before: tuple[Any, ...], now: tuple[Any, ...], may_extend: bool) -> bool:
    """Whether a call has not written into the containers of its arguments, but for new entries of the first one."""
    if may_extend:
        now = ({name: now[0][name] for name in before[0] if name in now[0]}, *now[1:])
    (old, of_old), (new, of_new) = tree_flatten(before), tree_flatten(now)
    return of_old == of_new and all(map(operator.is_, old, new))


@contextmanager
def noting_calls(note: Callable[[nn.Module], object], is_candidate: Callable[[nn.Module], bool]) -> Iterator[None]:
    """Inside, pass candidates that are called to `note`. This costs less than `LossWatch`, and records no tensors."""
    seen: set[int] = set()

    def begins(module: nn.Module, args: Any) -> None:
        if runs_plainly() and id(module) not in seen:
            seen.add(id(module))
            if is_candidate(module):
                note(module)

    handle = register_module_forward_pre_hook(begins)
    try:
        yield
    finally:
        handle.remove()


def _tensors_of(caches: Collection[Any]) -> list[torch.Tensor]:
    """The tensors in caches of keys and values, as attributes of their layers."""
    level, found = list(caches), list[torch.Tensor]()
    for _ in range(DEEPEST):
        found += [value for value in level if isinstance(value, torch.Tensor)]
        others = [value for value in level if not isinstance(value, torch.Tensor)]
        level = [entry for value in others for entry in _entries(value)]
    return found


def _entries(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    return list(getattr(value, "__dict__", {}).values())
