"""A frozen module that the loss calls: which of its calls are read from the cache, and by which front.

    teacher(input_ids, attention_mask)         1st call of a step, computed from the batch: a front of its own
    teacher(mixed, attention_mask)             2nd call, computed from trained weights: it runs
    teacher(input_ids, output_attentions=True) other arguments: another front

A front is kept for each mode and each form of the arguments, and another one for its calls in evaluations. The keys of
its entries are digests of the call's inputs, so a call with other inputs never reads the stored outputs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ...model.elsewhere import on_this_thread
from ...model.method_override import MethodOverride, having, original_method
from ...model.nested import in_new_containers
from ...model.plain_runs import runs_plainly
from ..front.called_by_loss import CalledByLoss, Split
from ..front.finding import Reading
from ..front.front_calls import FrontCalls
from .forms import arguments_by_name, form_of
from .watching import SeenCall

_state = threading.local()

MOST_FORMS = 8
"""Number of forms of the arguments for which a front is looked for; a module that is called in more is computed."""


class _Holder(nn.Module):
    """Contains a module under a name of several parts."""

    config: Any = None


def holding(name: str, module: nn.Module) -> tuple[nn.Module, frozenset[str]]:
    """Return a module that contains another one as a part of this name, and the names of the parts around it."""
    *outer, last = name.split(".")
    holder = inner = _Holder()
    holder.config = getattr(module, "config", None)
    for part in outer:
        child = _Holder()
        inner.add_module(part, child)
        inner = child
    inner.add_module(last, module)
    return holder, frozenset(".".join(outer[:count]) for count in range(len(outer) + 1))


@contextmanager
def counted_as_frozen(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Inside, where gradients are off, `parameters` require no gradient."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def inside_a_call() -> AbstractContextManager[None]:
    """Inside, on this thread, modules run as they are: they are called by another module, and not by the loss."""
    return on_this_thread(_state, "is_inside", True)


class Surrounding:
    """A module that contains one which the loss calls. In its own calls, the inner one is not looked at.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._override = MethodOverride(module, "forward", partial(self._forward, original_method(module)))

    def close(self) -> None:
        """Let the module run as it is."""
        self._override.remove()

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with inside_a_call():
            return forward(*args, **kwargs)


class FrozenRoot:
    """A module that the loss calls, until `close`. Calls by other modules or on other threads are not looked at.

    Args:
        name: for log lines.
        module: the module.
        trained: identities of the parameters that are trained.
        make_calls: makes what looks at the calls of one form, in steps (True) or in evaluations.
        aside: entered around its calls; others look at calls of the trained model.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        trained: frozenset[int],
        make_calls: Callable[[CalledByLoss, bool], FrontCalls],
        aside: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.name, self.module = name, module
        self.fronts: dict[str, FrontCalls] = {}
        """The fronts for its calls in steps, by form."""
        self.evaluated: dict[str, FrontCalls] = {}
        """The fronts for its calls in evaluations, by form."""
        self.has_unknown = False
        """Whether a call had inputs with unknown sources since this was set to False."""
        self.was_called = True
        """Whether it was called, by the loss, since this was set to False."""
        self._trained, self._make_calls, self._aside = trained, make_calls, aside
        self._parameters = [parameter for parameter in module.parameters() if id(parameter) not in trained]
        self._is_of_batch: dict[str, dict[int, bool]] = {}  # by form and number of the call in a step
        self._num_calls: Counter[str] = Counter()
        self._called: dict[str, CalledByLoss] = {}  # by form
        self._extends = set[str]()  # forms of calls that return the dict that they were given, with new entries
        self._in_evaluation: Callable[[FrontCalls], None] | None = None  # begins one for new fronts
        self._thread: int | None = None  # of the step or evaluation, inside of one
        self._override: MethodOverride | None = None
        self.open()

    def open(self) -> None:
        """Intercept the module's calls until `close`."""
        self._override = MethodOverride(self.module, "forward", partial(self._forward, original_method(self.module)))

    def close(self) -> None:
        """Let the module run as it is."""
        if self._override is not None:
            self._override.remove()
            self._override = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, in a step, its calls are looked at."""
        self._num_calls.clear()
        for calls in self.fronts.values():
            calls.begin_step()
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    @contextmanager
    def evaluation(self, begin: Callable[[FrontCalls], None]) -> Iterator[None]:
        """Inside, in an evaluation, its calls are looked at whose forms are known from the steps.

        Such a call may be of other samples than the steps' calls: what is read depends on its inputs alone.

        Args:
            begin: begins the evaluation for the calls of one form.
        """
        if self._in_evaluation is not None:  # inside another one
            yield
            return
        try:
            for calls in self.fronts.values():
                calls.pause()
            for calls in self.evaluated.values():
                begin(calls)
                calls.resume()
            with having(self, _thread=threading.get_ident(), _in_evaluation=begin):
                yield
        finally:
            for calls in self.evaluated.values():
                calls.pause()
            for calls in self.fronts.values():
                calls.allow_rewritten()
                calls.resume()

    def learn(self, seen: list[SeenCall], num_samples: int | None, batch_rows: int) -> None:
        """Take over which calls are computed from the batch alone.

        Args:
            seen: the calls of a step, in their order.
            num_samples: number of samples in an epoch, if it is known.
            batch_rows: number of samples in the step's batch.
        """
        numbers: Counter[str] = Counter()
        for call in seen:
            form = call.form
            if form is None or (form not in self._is_of_batch and len(self._is_of_batch) >= MOST_FORMS):
                continue
            of_form = self._is_of_batch.setdefault(form, {})
            of_form[numbers[form]] = not call.why_computed
            numbers[form] += 1
            if call.extends_given:
                self._extends.add(form)
            if of_form[numbers[form] - 1] and form not in self.fronts:
                positions = [one.positions for one in seen]  # also those that other forms of the arguments read
                reading = Reading(frozenset().union(*positions), self._trained)
                entries = None if num_samples is None else num_samples * max(call.rows, 1) // max(batch_rows, 1)
                holder, around = holding(self.name, self.module)
                opened = around | self._around(call.dear)
                called = CalledByLoss(holder, opened, reading, self._device, entries, self._split)
                self._called[form], self.fronts[form] = called, self._make_calls(called, True)

    @property
    def _split(self) -> Split | None:
        """Which of its layers are on other processes; None if the module is whole."""
        return None

    @property
    def _device(self) -> torch.device:
        return next(parameter.device for parameter in self.module.parameters())

    def _around(self, part: nn.Module | None) -> set[str]:
        """The names, in the holder, of the modules that contain a part of this one."""
        inside = next((name for name, module in self.module.named_modules() if module is part), "")
        if part is None or not inside:
            return set()
        names = inside.split(".")[:-1]
        return {".".join([self.name, *names[:count]]) for count in range(len(names) + 1)}

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_outermost = self._thread == threading.get_ident() and not getattr(_state, "is_inside", None)
        if not is_outermost or not runs_plainly():
            return forward(*args, **kwargs)
        if not isinstance(vars(self.module).get("forward"), MethodOverride):
            return forward(*args, **kwargs)  # of the user's, who has replaced it and calls it
        with inside_a_call():
            return self._outermost(forward, args, kwargs)

    def _outermost(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call by the loss."""
        self.was_called = True
        if self._needs_gradients():
            return forward(*args, **kwargs)
        inputs = arguments_by_name(self.module, args, kwargs)
        form = form_of(self.module, inputs)
        if inputs is None or form is None:
            return forward(*args, **kwargs)
        calls = self._calls_in_evaluation(form) if self._in_evaluation is not None else self._calls_in_step(form)
        with self._aside():
            if calls is None or not self._may_look_up():
                return forward(*args, **kwargs)
            with counted_as_frozen(self._parameters):
                output = self._look_up(calls, inputs)
        given = next(iter(inputs.values()), None)
        if form not in self._extends or type(given) is not dict or type(output) is not dict or output is given:
            return output
        given.update((name, entry) for name, entry in output.items() if name not in given)
        return given

    def _calls_in_step(self, form: str) -> FrontCalls | None:
        """What looks at the next call of a form in this step; None if it is not computed from the batch."""
        number = self._num_calls[form]
        self._num_calls[form] += 1
        if form not in self._is_of_batch or number not in self._is_of_batch[form]:
            self.has_unknown |= len(self._is_of_batch) < MOST_FORMS
        return self.fronts.get(form) if self._is_of_batch.get(form, {}).get(number) else None

    def _calls_in_evaluation(self, form: str) -> FrontCalls | None:
        """What looks at calls of a form in evaluations, if it is known from the steps."""
        if form not in self.evaluated and form in self._called:
            assert self._in_evaluation is not None
            self.evaluated[form] = self._make_calls(self._called[form], False)
            self._in_evaluation(self.evaluated[form])
        return self.evaluated.get(form)

    def _may_look_up(self) -> bool:
        """Whether stored outputs may be read now, and others stored."""
        return True

    def _look_up(self, calls: FrontCalls, inputs: Mapping[str, Any]) -> Any:
        """Run a call, with stored outputs if there are some."""
        return calls.run(self._run, (), in_new_containers(dict(inputs)))

    def _run(self, **inputs: Any) -> Any:
        return self.module.forward(**inputs)  # looked up, as a front may be over it

    def _needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(p.requires_grad for p in self.module.parameters())
