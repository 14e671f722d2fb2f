"""Losses that call frozen modules in ways that are hard to read from a cache: as the stock Trainer, or not read.

The effects that a user can see are compared as well: how often hooks ran, and their arguments.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from called_runs import Case, Distills, Result, classifier, frozen, kd, language_model, texts, trained
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback
from transformers.cache_utils import Cache

ROUNDING = 2e-6
SECOND = 6
"""A step in the middle of the second epoch, which has four."""


def read_of(inputs: Any) -> dict[str, torch.Tensor]:
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


class Loss(Distills):
    """The student's own loss, and a further one (`further`)."""

    effects: list[Any]
    """Effects that a user sees besides losses and weights."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + self.further(outputs, inputs)
        return (loss, outputs) if return_outputs else loss

    def further(self, outputs: Any, inputs: Any) -> Any:
        return kd(outputs.logits, self.taught(inputs).logits)


# ------------------------------------------------------------------------------------------ where it is called
class OnThreads(Loss):
    """Two threads compute a half of the batch each, while the loss computes all of it."""

    def further(self, outputs: Any, inputs: Any) -> Any:
        given = read_of(inputs)
        halves = [{name: tensor[of::2] for name, tensor in given.items()} for of in (0, 1)]
        with ThreadPoolExecutor(2) as threads:
            parts = [threads.submit(lambda half=half: self.taught(half).logits) for half in halves]
            whole = self.taught(given).logits
            logits = torch.stack([part.result() for part in parts], 1).flatten(0, 1)
        return kd(outputs.logits, logits) + kd(outputs.logits, whole)


class PartAlone(Loss):
    """The loss calls the teacher, and a part of it."""

    def further(self, outputs: Any, inputs: Any) -> Any:
        given = read_of(inputs)
        with torch.no_grad():
            states = self.teacher.bert(**given).last_hidden_state
        mean = (states * given["attention_mask"][..., None]).mean()
        return kd(outputs.logits, self.taught(given).logits) + (outputs.logits.mean() - mean).square()


class PartOfModel(Loss):
    """The loss calls a frozen part of the trained model, which the model calls as well."""

    def further(self, outputs: Any, inputs: Any) -> Any:
        given = read_of(inputs)
        with torch.no_grad():
            states = self.model.bert(**given).last_hidden_state  # type: ignore[attr-defined]
        return (outputs.logits.mean() - (states * given["attention_mask"][..., None]).mean()).square()


def half_frozen() -> nn.Module:
    model: Any = classifier(4).eval()
    model.bert.requires_grad_(False)
    return model


# ------------------------------------------------------------------------------------------ who sees the calls
class Scaled(TorchFunctionMode):
    """Changes what linear layers return."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.factor if func is F.linear else result


class UnderFunctionMode(Loss):
    """Calls the teacher under a mode of the user's from the middle of the second epoch on."""

    def taught(self, inputs: Any) -> Any:
        with Scaled(1.1) if self.state.global_step >= SECOND else nullcontext():  # type: ignore[attr-defined]
            return super().taught(inputs)


class Counting(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self, effects: list[Any]) -> None:
        super().__init__()
        self.effects = effects

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.default:
            self.effects.append(str(func))
        return func(*args, **(kwargs or {}))


class UnderDispatchMode(Loss):
    def taught(self, inputs: Any) -> Any:
        with Counting(self.effects):
            return super().taught(inputs)


@pytest.fixture
def handles() -> Iterator[list[Any]]:
    """Handles of hooks, which are removed at the end."""
    found: list[Any] = []
    yield found
    for handle in found:
        handle.remove()


# ------------------------------------------------------------------------------------------ the outputs
class SameTensor(Loss):
    """The last hidden state is also the last of the hidden states; a write into one is a write into both."""

    def further(self, outputs: Any, inputs: Any) -> Any:
        given = read_of(inputs)
        with torch.no_grad():
            theirs = self.teacher(**given, output_hidden_states=True)
        theirs.last_hidden_state.mul_(0.5)
        mask = given["attention_mask"][..., None]
        self.effects.append(theirs.last_hidden_state is theirs.hidden_states[-1])
        return (outputs.logits.mean() - (theirs.hidden_states[-1] * mask).mean()).square()


class KindOfCache(Loss):
    """Asks for the class of an output that it does not read."""

    def further(self, outputs: Any, inputs: Any) -> Any:
        theirs = self.taught(inputs)
        self.effects.append(isinstance(theirs.past_key_values, Cache))
        counts = (inputs["labels"] != -100)[..., None]
        divergence = F.kl_div(outputs.logits.log_softmax(-1), theirs.logits.softmax(-1), reduction="none")
        return (divergence * counts).sum() / counts.sum()


def encoder() -> nn.Module:
    model: Any = classifier(4)
    return frozen(model.bert)


def small(mixin: type, **fields: Any) -> Case:
    return Case(mixin, lambda: classifier(2), lambda: frozen(classifier(4)), **fields)


READ = {
    "on threads": small(OnThreads),
    "a part alone": small(PartAlone),
    "the same tensor": Case(SameTensor, lambda: classifier(2), encoder),
    "kind of a cache": Case(
        KindOfCache,
        lambda: language_model(2),
        lambda: frozen(language_model(4)),
        lambda: texts(is_causal=True),
    ),
}
OTHERS = {
    "a part of the model": Case(PartOfModel, half_frozen, None),
    "under a function mode": small(UnderFunctionMode),
    "under a dispatch mode": small(UnderDispatchMode),
}


def both(case: Case, folder: Path, prepare: Callable[[Any], object] = lambda trainer: None) -> tuple[Result, Result]:
    """Train with the stock Trainer and with ours; the results, with equal effects."""
    results, effects = [], []
    for is_ours in (False, True):

        def begin(trainer: Any) -> None:
            trainer.effects = list[Any]()
            effects.append(trainer.effects)
            prepare(trainer)

        results.append(trained(folder / str(is_ours), dataclasses.replace(case, prepare=begin), is_ours=is_ours))
    print(results[1].text)
    assert effects[0] == effects[1]
    return results[0], results[1]


@pytest.mark.parametrize("name", [*READ, *OTHERS])
def test_equals_the_stock_trainer(name: str, tmp_path: Path) -> None:
    expected, ours = both({**READ, **OTHERS}[name], tmp_path)
    assert ours.difference(expected) <= ROUNDING
    assert ours.num_read > 0 or name in OTHERS


@pytest.mark.parametrize("kind", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_hooks_for_all_modules_see_all_calls(kind: str, tmp_path: Path, handles: list[Any]) -> None:
    def register(trainer: Any) -> None:
        parts, effects = list(trainer.teacher.modules()), trainer.effects

        def note(module: nn.Module, *_: Any) -> None:
            if any(part is module for part in parts):
                effects.append(type(module).__name__)

        handles.append(getattr(nn.modules.module, kind)(note))

    expected, ours = both(small(Loss), tmp_path, register)
    assert ours.difference(expected) == 0.0 and ours.num_read == 0


class Renews(TrainerCallback):
    """The teacher is a copy of the student as it was when the epoch began."""

    trainer: Any

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.teacher = frozen(copy.deepcopy(self.trainer.model))
        self.trainer.copies.append(weakref.ref(self.trainer.teacher))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        gc.collect()
        self.trainer.effects.append(sum(one() is not None for one in self.trainer.copies))


@pytest.mark.slow
def test_copies_that_are_made_anew_are_freed(tmp_path: Path) -> None:
    """Modules that were called are not held once they are replaced."""

    def prepare(trainer: Any) -> None:
        trainer.copies = []
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, Renews):
                callback.trainer = trainer

    expected, ours = both(Case(Loss, lambda: classifier(2), None, callback=Renews), tmp_path, prepare)
    assert ours.difference(expected) == 0.0
