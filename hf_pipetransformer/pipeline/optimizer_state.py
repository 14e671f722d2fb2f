"""Optimizer state that is distributed over stages, and over their replicas if these divide it: gather, save and load.

model's parameters          embedding   w   b
replica 0 updates           embedding
replica 1 updates                       w   b     after each step each replica gets the other's updated parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from ..model.placeholders import ParameterTable
from ..progress import phase
from .devices import has_room
from .devices import synchronise as wait_for
from .holders import Holders
from .mesh import ProcessMesh
from .reductions import exchange_updates, reduce_gradients
from .transfer import CPU, transfer
from .weights import Weights, synchronise

Member = str | nn.Parameter
"""A parameter in an optimizer's group: the model's by its name, any other one itself."""

_INCOMPLETE: WeakKeyDictionary[torch.optim.Optimizer, list[RemovableHandle]] = WeakKeyDictionary()
"""Optimizers that no run uses and that have a part of their state, with the hooks that refuse their use."""


class OptimizerState:
    """An optimizer that was created for the whole model and updates only the parameters that are here.

    The optimizer object and its groups stay, and with them the scheduler. The groups list all parameters, as in a
    single process. In `optimizer.step()` alone, inside of the user's own hooks on it, they list the parameters that
    this process updates. Its `state_dict` has the state of these; it is complete inside `gathered`, and loading it
    keeps this process's part.

    A run attaches the optimizer, and `release` ends that. From then on the optimizer is a plain one: it is complete
    (`gather`), or its use is an error, as its step would update one stage.

    Replicas of a stage may divide its parameters (`assign`). Then each process updates its own, and after each step
    every replica gets the parameters that the others have updated.

    It may also update parameters outside of the model, such as a loss's own. They stay in their groups, at their
    places among the model's, and get their gradients where the loss is computed.

    Args:
        optimizer: created by the rules of `torch.optim` from the parameters of the table.
        table: the model's parameters, as they were when the optimizer was created.
        weights: knows the parameters that are here.
        mesh: all processes of the run.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, table: ParameterTable, weights: Weights, mesh: ProcessMesh
    ) -> None:
        self.optimizer = optimizer
        self._table = table
        self._weights = weights
        self._mesh = mesh
        self._name_of = {id(table[name]): name for name in table.names}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not parameters:
            raise ValueError(
                f"The {type(optimizer).__name__} has no parameters to update: no parameter of the"
                f" {type(table.model).__name__} requires a gradient. Set requires_grad=True on those that are to be"
                " trained; train() has nothing to do otherwise."
            )
        self.outside = [p for p in parameters if id(p) not in self._name_of]
        """Parameters outside of the model that the optimizer updates: those of a loss, for example."""
        if len(self.outside) == len(parameters):
            raise ValueError(
                f"The optimizer's {len(parameters)} parameters do not belong to the model (one has shape"
                f" {tuple(parameters[0].shape)}). Create the optimizer from the parameters of the model that is passed"
                " to the trainer."
            )
        self._lists: list[list[nn.Parameter]] | None = None
        """The groups' lists while the groups have shorter ones."""
        self._steps_inside = 0  # a step may call the step of its base class, and the hooks run there as well
        self._elsewhere: set[int] = set()  # ids of the model's parameters that this process does not update
        self._shows_idle = False  # whether it updates none
        self._updaters: Holders = {}  # a parameter that is missing is updated wherever it is
        self._exchange: RemovableHandle | None = None  # after each step, once replicas have divided the parameters
        self._sharing: tuple[dist.ProcessGroup, Sequence[int]] | None = None  # while they do
        self._gathered: dict[str, Any] | None = None
        self._is_gathering = self._is_prepared = False
        # stands in for the parameters of a stage without trainable parameters
        self._idle_parameter = nn.Parameter(torch.zeros(1, device=next(iter(parameters)).device))
        self._begins = optimizer.register_step_pre_hook(lambda *_: self._begin_step())
        self._ends = optimizer.register_step_post_hook(lambda *_: self._end_step())
        self._hooks = [
            self._begins,
            self._ends,
            optimizer.register_state_dict_pre_hook(lambda _: self._refuse_part()),
            optimizer.register_state_dict_post_hook(lambda _, state_dict: self._gathered),
            optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: self._keep_mine(state_dict)),
        ]
        self.keep_what_is_here()
        self._is_complete &= not _allow_use(optimizer)

    @property
    def _group_members(self) -> list[list[Member]]:
        """The parameters of each group, in the order of the user's lists."""
        lists = self._lists or [group["params"] for group in self.optimizer.param_groups]
        return [[self._name_of.get(id(parameter), parameter) for parameter in parameters] for parameters in lists]

    @property
    def _group_names(self) -> list[list[str]]:
        """The names of the model's parameters in each group."""
        return [[member for member in members if isinstance(member, str)] for members in self._group_members]

    def release(self) -> None:
        """Remove the hooks. The state stays on the processes where it is, as another pipeline may attach it.

        Not collective.
        """
        self.share_updates(None, ())
        self._show_all()
        for hook in self._hooks:
            hook.remove()
        self.optimizer.state.pop(self._idle_parameter, None)
        self.refuse_use()

    def refuse_use(self) -> None:
        """Let steps and `state_dict()` fail until the next run, if this process lacks a part of the state."""
        if not self._is_complete and self.optimizer not in _INCOMPLETE:
            _INCOMPLETE[self.optimizer] = [
                self.optimizer.register_step_pre_hook(_refuse_use),
                self.optimizer.register_state_dict_pre_hook(_refuse_use),
            ]

    def _refuse_part(self) -> None:
        """Let users' `state_dict()` in training fail if this process lacks a part of the state."""
        is_in_training = self._is_prepared and self.optimizer not in _INCOMPLETE
        if is_in_training and not self._is_complete and not self._is_gathering:
            raise ValueError(
                f"{type(self.optimizer).__name__}.state_dict(): in training, each process has the optimizer state of"
                " its own stage (or replica) only. Let the trainer save it: set control.should_save = True in a"
                " callback, and read optimizer.pt; or call state_dict() after train()."
            )

    # ------------------------------------------------------------------------------------ the groups' lists
    def put_hooks_in_order(self) -> None:
        """Let the groups list all parameters in the step hooks that the user has registered, whenever that was."""
        self._show_all()  # a step that has failed may have left them shorter
        before: Any = self.optimizer._optimizer_step_pre_hooks
        behind: Any = self.optimizer._optimizer_step_post_hooks
        before.move_to_end(self._begins.id)
        behind.move_to_end(self._ends.id, last=False)

    def _begin_step(self) -> None:
        self._steps_inside += 1
        self._is_prepared = True
        if self._lists is None and (self._elsewhere or self._shows_idle):
            self._show(lambda parameter: id(parameter) not in self._elsewhere, self._shows_idle)

    def _end_step(self) -> None:
        self._steps_inside -= 1
        if not self._steps_inside:
            self._show_all()

    def _show(self, is_shown: Callable[[nn.Parameter], bool], with_idle: bool) -> None:
        """Shorten the lists of the groups, until `_show_all`."""
        groups = self.optimizer.param_groups
        self._lists = [group["params"] for group in groups]
        for group, parameters in zip(groups, self._lists, strict=True):
            group["params"] = list(filter(is_shown, parameters))
        if with_idle:
            groups[0]["params"].append(self._idle_parameter)

    def _show_all(self) -> None:
        self._steps_inside = 0  # a step that has failed does not end
        lists, self._lists = self._lists, None
        for group, parameters in zip(self.optimizer.param_groups, lists or (), strict=False):
            group["params"] = parameters

    # ------------------------------------------------------------------------------------ who updates what
    @property
    def names(self) -> list[str]:
        """The names of the model's parameters that are updated on some process, in the order of the groups."""
        return [name for names in self._group_names for name in names if not self._weights.is_frozen(name)]

    def holders(self) -> Holders:
        """The ranks that have optimizer state of each parameter that has any. Collective over all processes."""
        grouped = {name for names in self._group_names for name in names}
        mine = bytes(name in grouped and bool(self.state_of(name)) for name in self._table.names)
        having = zip(self._table.names, *self._mesh.gather_objects(mine), strict=True)
        found = {name: tuple(rank for rank, has in enumerate(flags) if has) for name, *flags in having}
        return {name: ranks for name, ranks in found.items() if ranks}

    def assign(self, updaters: Holders) -> None:
        """Update from now on the parameters that are given to this process. Not collective.

        Args:
            updaters: the ranks that update each of `names`, and have its state.
        """
        self._updaters = updaters
        self.keep_what_is_here()

    def share_updates(self, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
        """After each step, give the updated parameters to every replica of the stage here. Not collective.

        Args:
            group: the replicas of the stage; None if they do not divide its parameters.
            ranks: their ranks.
        """
        self._sharing = (group, ranks) if group is not None else None
        if self._sharing is not None and self._exchange is None:  # it stays before hooks that the user adds later
            self._exchange = self.optimizer.register_step_post_hook(lambda *_: self._exchange_updates())

    def _exchange_updates(self) -> None:
        if self._sharing is None:
            return
        group, ranks = self._sharing
        here = [name for name in self.names if self._weights.is_here(name) and self._table[name].requires_grad]
        rows = [[self._table[name] for name in here if rank in self._updaters.get(name, ())] for rank in ranks]
        with phase("update"):
            exchange_updates(rows, group)

    def keep_what_is_here(self) -> None:
        """Remove the state of parameters that this process does not update or that are permanently frozen.

        Parameters that the user has frozen temporarily keep their state, and so do entries that belong to no parameter
        (`_of_no_parameter`).
        """
        self._show_all()
        self._elsewhere = {id(self._table[name]) for name in self._table.names if not self._updates(name)}
        self._shows_idle = self._has_idle_parameter
        self._is_complete = all(map(self._updates, self.names))  # whether this process has all of the state
        listed = {id(p) for group in self.optimizer.param_groups for p in group["params"]} | {id(self._idle_parameter)}
        own = [p for p in self.optimizer.state if isinstance(p, torch.Tensor)]
        for parameter in [p for p in own if id(p) in self._elsewhere or id(p) not in listed]:
            del self.optimizer.state[parameter]

    def _parameter(self, member: Member) -> nn.Parameter:
        return self._table[member] if isinstance(member, str) else member

    def _updates(self, member: Member) -> bool:
        """Whether this process updates a parameter; those outside of the model are here and never frozen."""
        if not isinstance(member, str):
            return True
        is_mine = self._mesh.rank in self._updaters.get(member, (self._mesh.rank,))
        return is_mine and self._weights.is_here(member) and not self._weights.is_frozen(member)

    # ------------------------------------------------------------------------------------ gradients
    def over_whole_gradients(self, act: Callable[[], None]) -> None:
        """Call a function on the gradients of the whole stage, for example a gradient scaler's.

        It may read or change the gradients in the groups. Every replica has the same gradients of the whole stage, so
        all of them get the same result.
        """
        away = {id(self._table[name]) for name in self._table.names if not self._weights.is_here(name)}
        self._show(lambda parameter: id(parameter) not in away, self._is_idle)
        try:
            act()
        finally:
            self._show_all()

    @property
    def _is_idle(self) -> bool:
        """Whether none of the parameters here is trained (a stage of frozen layers)."""
        return not any(self._weights.is_here(name) and self._table[name].requires_grad for name in self.names)

    @property
    def _has_idle_parameter(self) -> bool:
        # some optimizers refuse to have none
        return self._is_idle or not any(map(self._updates, self.names))

    def stand_in(self, value: float) -> None:
        """If no parameter is updated here, give an unused one a gradient, because a gradient scaler needs one.

        Args:
            value: 0, or infinity if the other stages' gradients are infinite.
        """
        if self._has_idle_parameter:
            self._idle_parameter.grad = torch.full_like(self._idle_parameter, value)

    # ------------------------------------------------------------------------------------ outside of the model
    def adopt_added(self) -> bool:
        """Count parameters that were added to the optimizer's groups since it was created as outside of the model.

        They may be in the model by now: then the model had another head when the optimizer was created.

        Returns:
            Whether there were any.
        """
        known = {*self._name_of, *map(id, (*self.outside, self._idle_parameter))}
        added = [p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in known]
        self.outside += added
        return bool(added)

    def share_outside(self) -> None:
        """Set the parameters outside of the model to rank 0's. Collective over all processes.

        Raises:
            ValueError: the processes have different ones.
        """
        shapes = [tuple(p.shape) for p in self.outside]
        everyone = self._mesh.gather_objects(shapes)
        if any(theirs != everyone[0] for theirs in everyone):
            raise ValueError(
                f"The optimizer's parameters that do not belong to the model have other shapes on some processes:"
                f" {everyone}. Create the same loss on all of them."
            )
        synchronise({str(number): parameter for number, parameter in enumerate(self.outside)}, self._mesh)

    def average_outside(self, group: dist.ProcessGroup | None) -> None:
        """Average the gradients of parameters outside of the model. Collective over `group`.

        Args:
            group: the processes that compute the loss; None if this process computes none, or is the only one.
        """
        if group is not None:
            reduce_gradients((), group, 1 / group.size(), self.outside)

    # ------------------------------------------------------------------------------------ states
    def state_of(self, name: str) -> dict[str, Any]:
        """The optimizer's state here for one parameter; empty before its first step."""
        return dict(self.optimizer.state.get(self._table[name], {}))

    def put_state(self, name: str, state: dict[str, Any]) -> None:
        """Store the state of a parameter that another process has sent."""
        if state:
            self.optimizer.state[self._table[name]] = state

    def drop(self, name: str) -> None:
        """Free the optimizer state here of a parameter."""
        self.optimizer.state.pop(self._table[name], None)

    def gather(self, device: torch.device) -> None:
        """Give every process the state of all parameters, if it fits beside them. Collective over all processes.

        It leaves as much memory free as it takes, for an evaluation. If tensors of other classes (quantised states)
        would have to be sent, all of the state stays where it is.

        Args:
            device: the device of all parameters.
        """
        members = dict(enumerate(member for members in self._group_members for member in members))
        states = {number: self.optimizer.state.get(self._parameter(member)) for number, member in members.items()}
        sizes = {number: _num_bytes(state) for number, state in states.items() if state}
        everyone = self._mesh.gather_objects(sizes)
        known = {number: size for theirs in everyone for number, size in theirs.items()}
        before = {number: tuple(rank for rank, theirs in enumerate(everyone) if number in theirs) for number in known}
        can_be_sent = all(size is not None or len(before[number]) == len(everyone) for number, size in known.items())
        lacking = sum(size or 0 for number, size in known.items() if number not in sizes)
        if self._mesh.any(not can_be_sent or not has_room(2 * lacking, device, len(everyone))):
            return

        def read(number: int) -> dict[str, Any]:
            return dict(states[number] or {})

        def store(number: int, state: dict[str, Any]) -> None:
            self.optimizer.state[self._parameter(members[number])] = state

        transfer(before, dict.fromkeys(before, tuple(range(len(everyone)))), self._mesh, device, read, store)
        self._is_complete = True
        _allow_use(self.optimizer)  # after a training that was interrupted

    @contextmanager
    def gathered(self, folder: Path | None = None) -> Iterator[None]:
        """Inside, `optimizer.state_dict()` on rank 0 is complete, as on a single process that holds the whole model.

        Collective over all processes.

        Args:
            folder: as in `Weights.gathered`.
        """
        before = self.holders()
        arrived: dict[Member, dict[str, Any]] = {}
        wanted = dict.fromkeys(before, (0,))
        transfer(before, wanted, self._mesh, CPU, self.state_of, arrived.__setitem__, folder=folder)
        if self._mesh.rank == 0:
            states = [  # of each parameter, in the order of their numbers
                arrived.get(member) or self._state_on_cpu(member)
                for members in self._group_members
                for member in members
            ]
            wait_for(self._idle_parameter.device)
            groups: list[dict[str, Any]] = []
            first = 0
            for group, members in zip(self.optimizer.param_groups, self._group_members, strict=True):
                groups.append({**group, "params": list(range(first, first + len(members)))})
                first += len(members)
            numbered = {number: values for number, values in enumerate(states) if values}
            self._gathered = {
                "state": {**numbered, **_of_no_parameter(self.optimizer.state)},
                "param_groups": groups,
            }
        was_refused = _allow_use(self.optimizer)  # after a training that was interrupted
        self._is_gathering = True
        try:
            yield
        finally:
            self._gathered, self._is_gathering = None, False
            if was_refused:
                self.refuse_use()

    def _state_on_cpu(self, member: Member) -> dict[str, Any]:
        state = self.optimizer.state.get(self._parameter(member), {})
        return {
            key: v.detach().to(CPU, non_blocking=True) if isinstance(v, torch.Tensor) else v
            for key, v in state.items()
        }

    def _keep_mine(self, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """This process's part of a whole model's state dict; None leaves any other state dict as it is."""
        self._is_prepared = True  # Accelerate reads and loads the state before the first step
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        if [len(numbers) for numbers in saved] != [len(members) for members in self._group_members]:
            return None
        numbered = zip(
            (n for numbers in saved for n in numbers), (m for of in self._group_members for m in of), strict=True
        )
        others = {number for number, member in numbered if not self._updates(member)}
        # copied, because a memory-mapped file may be damaged or deleted later
        state = {key: _own(values) for key, values in state_dict["state"].items() if key not in others}
        return {**state_dict, "state": state}


def _num_bytes(state: Mapping[str, Any]) -> int | None:
    """The size of a parameter's state; None if it has tensors that other processes cannot be given."""
    tensors = [value for value in tree_leaves(dict(state)) if isinstance(value, torch.Tensor)]
    return sum(t.nbytes for t in tensors) if all(type(t) in (torch.Tensor, nn.Parameter) for t in tensors) else None


def _allow_use(optimizer: torch.optim.Optimizer) -> bool:
    """Remove the hooks that refuse an optimizer's use. Returns whether there were any."""
    refusing = _INCOMPLETE.pop(optimizer, [])
    for hook in refusing:
        hook.remove()
    return bool(refusing)


def _refuse_use(optimizer: torch.optim.Optimizer, *_: Any) -> NoReturn:
    raise ValueError(
        f"{type(optimizer).__name__}: train() has ended, and each process has the optimizer state of its own stage (or"
        " replica) only: it was interrupted, or there is no memory for all of it. A step would update one stage. Call"
        " train() again, or load the optimizer.pt of a checkpoint into a new optimizer."
    )


def _own(value: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.clone, value)


def _of_no_parameter(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The entries of an optimizer's `state` that belong to no parameter, such as MADGRAD's count of steps.

    All processes have the same ones (`parts/optimizer_check` refuses those computed from gradients).
    """
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
