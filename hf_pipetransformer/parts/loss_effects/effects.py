"""Finds the trainer's attributes that the user's loss changes, because callbacks on other stages may read them.

last stage     self.rate = 0.1          plain values that are assigned: copied to the other stages after the step
last stage     self.parts.append(loss)  all other changes: the other stages get a placeholder that cannot be read
last stage     self.critic is trained   as above: the weights of a module that is not the trained model have changed
"""

from __future__ import annotations

import builtins
import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ...model.elsewhere import Unreadable
from ...pipeline.mesh import ProcessMesh
from .marks import Marks, tables_of_module

MISSING = object()
"""Value for an attribute that an object does not have."""
PLAIN = {bool, int, float, complex, str, bytes, type(None)}
CONTAINERS = {list, tuple, set, frozenset, deque, dict, OrderedDict, Counter, defaultdict}
MOST_LEAVES = 100
"""Maximum number of plain values in a container that is copied to other stages."""
MOST_LOOKED_INTO = 1000
"""Maximum number of members of a container that is searched for changes inside its members."""
MOST_BYTES = 2**20
"""Maximum size of a NumPy array that is compared by its values, in bytes."""
LOG_HISTORY = "log_history"
"""Attribute of the trainer's state that `log` extends. In a loss, `log` concerns the process that calls it."""
REMEDY = (
    "After each step, all stages get the plain values (numbers, strings, short lists of these) that the loss has"
    " assigned: assign such a value in the loss (loss.item(), for a tensor), read it on the main process only, or set"
    " pipeline_parallel_size=1."
)
"""The remedy for a user who reads a changed attribute on another stage."""
SWITCHES = frozenset({"train", "eval", "requires_grad_"})
"""Methods of a module that read no values, and may be called on other stages."""
OF_STOCK = frozenset({"model", "model_wrapped"})
"""Attributes of the trainer that are the trained model."""
OF_THE_LOOP = ("transformers.", "accelerate.", "hf_pipetransformer.")
"""Modules of objects that the training loop replaces on every process, such as the `TrainerControl`."""


class OnLastStage(Unreadable):
    """Placeholder for an attribute of the trainer that the loss has changed on another process.

    Any use except assigning a new value to the name raises an error.

    Args:
        name: the attribute.
        before: its value on this process, which is restored if this process computes the loss.
    """

    def __init__(self, name: str, before: Any) -> None:
        where = "was changed by the loss, which runs on the last pipeline stage only, and this is another stage"
        super().__init__(f"trainer.{name} {where}", REMEDY)
        self.__dict__.update(name=name, before=before)

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        if name in SWITCHES and isinstance(own["before"], nn.Module):
            return getattr(own["before"], name)  # code that runs on all stages may set a critic's mode
        return super().__getattr__(name)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"<trainer.{self.__dict__['name']}: {type(self).__name__}>"


def restore(trainer: Any) -> None:
    """Restore this process's own values, because it computes the loss from now on."""
    for name, value in list(vars(trainer).items()):
        if type(value) is OnLastStage:
            before = vars(value)["before"]
            del vars(trainer)[name]
            if before is not MISSING:
                vars(trainer)[name] = before


@dataclass(frozen=True)
class Changes:
    """The changes that a loss has made to the trainer.

    Attributes:
        values: the new values that can be copied to other stages, by name.
        others: names of changed attributes that cannot be copied.
        removed: names of removed attributes.
        inside: new plain values in the objects that the loop has on every process: see `_settings`.
    """

    values: dict[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    inside: tuple[dict[str, Any], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.values or self.others or self.removed or any(self.inside))

    def adopt(self, trainer: Any, since: Snapshot) -> None:
        """Apply the changes on another stage. Attributes that this process has changed since `since` stay its own.

        Args:
            trainer: this process's trainer.
            since: an earlier snapshot of this trainer.
        """
        mine = vars(trainer)
        changed_here = since.changes(trainer)
        own = {*changed_here.values, *changed_here.others, *changed_here.removed}
        for name in self.removed:
            if name not in own:
                mine.pop(name, None)
        mine.update({name: value for name, value in self.values.items() if name not in own})
        for settings, values in zip(_settings(trainer), self.inside, strict=False):
            for name, value in values.items():
                if isinstance(settings.get(name), torch.Tensor):
                    settings[name].fill_(value)
                else:
                    settings[name] = value
        for name in self.others:
            if name not in own:
                before = mine.get(name, MISSING)
                if type(before) is not OnLastStage:
                    mine[name] = OnLastStage(name, before)


class Snapshot:
    """The attributes of a trainer at one moment.

    Plain values are compared by value, long containers by length, tensors and those of modules by version, other
    objects by identity.

    Args:
        trainer: the trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._values = dict(vars(trainer))  # references, because ids of freed objects are used again
        self._states = {name: _state_of(value, trainer) for name, value in self._values.items()}
        self._inside = [_plain(settings) for settings in _settings(trainer)]

    def changes(self, trainer: Any) -> Changes:
        """The changes since the snapshot."""
        now = vars(trainer)
        changed = [
            name
            for name, value in now.items()
            if value is not self._values.get(name, MISSING) or not _is_in(self._states[name], value, trainer)
        ]
        values = {name: now[name] for name in changed if _num_leaves(now[name]) <= MOST_LEAVES}
        others = tuple(name for name in changed if name not in values and not _is_of_the_loop(name, now[name]))
        removed = tuple(name for name in self._values if name not in now)
        inside = tuple(
            {name: value for name, value in _plain(settings).items() if name not in before or before[name] != value}
            for before, settings in zip(self._inside, _settings(trainer), strict=False)
        )
        return Changes(values, others, removed, inside)


def share(trainer: Any, mesh: ProcessMesh, replica: int, changes: Changes | None, before: Snapshot) -> None:
    """Apply the changes by the last stage of this process's pipeline. Collective over all processes.

    Args:
        trainer: this process's trainer.
        mesh: all processes of the run.
        replica: number of the pipeline.
        changes: the changes by code on the last stage; None on other stages.
        before: on the other stages, the snapshot of the trainer before the step.
    """
    everyone = mesh.gather_objects((replica, changes) if changes is not None else None)
    if changes is None:
        next(theirs[1] for theirs in everyone if theirs is not None and theirs[0] == replica).adopt(trainer, before)


def _settings(trainer: Any) -> list[dict[str, Any]]:
    """Return the attributes of the loop's objects that users may change in a loss.

    The objects are the arguments, the callbacks' state and control, the scheduler, and the optimizer's groups.
    """
    scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)  # inside Accelerate's
    groups = getattr(trainer.optimizer, "param_groups", [])
    objects = (trainer.args, trainer.state, trainer.control, scheduler)
    return [*(vars(one) if one is not None else {} for one in objects), *groups]


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the plain values of settings. A learning rate may also be a tensor."""
    values = {
        name: value.item() if _is_number(value) else value for name, value in settings.items() if name != LOG_HISTORY
    }
    return {name: copy.copy(value) for name, value in values.items() if _num_leaves(value) <= MOST_LEAVES}


def _is_of_the_loop(name: str, value: Any) -> bool:
    """Whether the loop itself replaces or changes an attribute on every process."""
    if isinstance(value, nn.Module):
        return name in OF_STOCK
    return type(value).__module__.startswith(OF_THE_LOOP)


def _is_builtin(factory: Any) -> bool:
    return factory is None or vars(builtins).get(getattr(factory, "__name__", "")) is factory


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu"


def _state_of(value: Any, trainer: Any) -> Any:
    """A value that differs after an object has been changed in place."""
    if isinstance(value, torch.Tensor):
        return value._version
    if isinstance(value, nn.Module):
        return Marks(tables_of_module(value, trainer.model))
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= MOST_BYTES else None
    is_sequence = isinstance(value, (list, tuple, deque)) and len(value) <= MOST_LOOKED_INTO
    if is_sequence and all(type(entry) in PLAIN for entry in value):
        return repr(list(value))
    if isinstance(value, (list, tuple, deque, Mapping, Set)):
        return repr(value) if _num_leaves(value) <= MOST_LEAVES else _lengths(value)
    return None


def _is_in(state: Any, value: Any, trainer: Any) -> bool:
    """Whether an object is still in a state that `_state_of` has returned."""
    if isinstance(state, Marks):
        return state.are_those_of(tables_of_module(value, trainer.model))
    return bool(_state_of(value, trainer) == state)


def _members(container: Any) -> Collection[Any]:
    return container.values() if isinstance(container, Mapping) else container


def _lengths(value: Any) -> Any:
    """The lengths of nested containers, and the ids and versions of tensors in them."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if not isinstance(value, (list, tuple, deque, Mapping, Set)):
        return None
    if len(value) > MOST_LOOKED_INTO:
        return len(value)
    return len(value), *(inside for inside in map(_lengths, _members(value)) if inside is not None)


def _num_leaves(value: Any) -> float:
    """Number of plain values in nested containers; infinite if they hold any other value."""
    if type(value) in PLAIN or isinstance(value, (np.generic, torch.dtype, torch.device)):
        return 1
    if type(value) not in CONTAINERS or len(value) > MOST_LEAVES:
        return float("inf")
    if isinstance(value, defaultdict) and not _is_builtin(value.default_factory):
        return float("inf")  # a function of the user's may not be picklable
    children = [*value, *value.values()] if isinstance(value, dict) else value
    return sum(map(_num_leaves, children))
