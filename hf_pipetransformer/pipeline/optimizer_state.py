"""Optimizer state that is distributed over stages, and over their replicas if these divide it: gather, save and load.

model's parameters          embedding             w         b
groups of replica 0         embedding[:n]                         a part, and after each step
groups of replica 1         embedding[n:]         w         b     each replica gets what the other has updated
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..model.placeholders import ParameterTable
from ..resilience.watchdog import phase
from .chunks import on_cpu
from .mesh import ProcessMesh
from .shards import Shards, Span, segments_of
from .state import Holders, WeightState, spill_file
from .updated_shards import UpdatedShards

Member = str | nn.Parameter
"""A parameter in an optimizer's group: the model's by its name, any other one itself."""


class OptimizerState:
    """An optimizer that was created for the whole model and updates only the parameters that are here.

    The optimizer object and its groups (learning rate, weight decay) stay, and with them the scheduler; only the
    groups' lists of parameters change. Its `state_dict` is that of a single process: it is complete inside `gathered`,
    and loading it keeps this process's part.

    Replicas of a stage may divide its parameters (`assign`). Then the groups hold those that this process updates,
    and in the place of a parameter that is cut, its elements as a parameter of one dimension (a *part*); after each
    step every replica gets what the others have updated.

    It may also update parameters outside of the model, such as a loss's own. They stay in their groups, at their
    places among the model's, and get their gradients where the loss is computed.

    Args:
        optimizer: created by the rules of `torch.optim` from the parameters of the table.
        table: the model's parameters, in the state in which the optimizer was created.
        weights: says which of the parameters are here.
        mesh: all processes of the run.
        is_elementwise: whether the optimizer updates each element by its own gradient alone, with state that has the
            parameter's shape, so that it may be given a part of a parameter.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        table: ParameterTable,
        weights: WeightState,
        mesh: ProcessMesh,
        is_elementwise: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.is_elementwise = is_elementwise
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
        self._members: list[list[Member]] = []
        self._shards: Shards = {}  # a parameter that is missing is updated as a whole wherever it is
        self._parts: dict[str, tuple[Span, nn.Parameter]] = {}  # of the parameters that this process updates in part
        self._seen: dict[str, int] = {}  # where the gradients are that the parts have been shown for this step
        self._updated: UpdatedShards | None = None
        self._gathered: dict[str, Any] | None = None
        # stands in for the parameters of a stage that trains nothing
        self._idle_parameter = nn.Parameter(torch.zeros(1, device=next(iter(parameters)).device))
        self._hooks = [
            optimizer.register_state_dict_post_hook(lambda _, state_dict: self._gathered),
            optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: self._keep_mine(state_dict)),
            optimizer.register_step_pre_hook(lambda *_: self._show_changed_gradients()),
            optimizer.register_step_post_hook(lambda *_: self._share_updates()),
        ]
        self.keep_what_is_here()

    @property
    def _group_members(self) -> list[list[Member]]:
        """The parameters of each group of the optimizer for the whole model, in the order of the user's lists.

        Includes groups that a callback has appended, and parameters outside of the model that it has added to a group.
        """
        groups = self.optimizer.param_groups
        own = {id(self._idle_parameter), *(id(part) for _, part in self._parts.values())}
        self._members += [[] for _ in groups[len(self._members) :]]
        for group, members in zip(groups, self._members, strict=True):
            is_new = not members
            known = {id(member) for member in members} | own
            for parameter in group["params"]:
                name = self._name_of.get(id(parameter))
                if name is None and id(parameter) not in known:
                    members.append(parameter)
                elif name is not None and is_new:
                    members.append(name)
        return self._members

    @property
    def _group_names(self) -> list[list[str]]:
        """The names of the model's parameters in each group."""
        return [[member for member in members if isinstance(member, str)] for members in self._group_members]

    def release(self) -> None:
        """Restore the optimizer's parameter lists over the whole model and remove the hooks. Not collective.

        The state stays on the processes where it is, except that of parts, which is dropped: parameters are still cut
        only if their model stays distributed after its training and is given up (`shards.joined` otherwise).
        """
        for hook in self._hooks:
            hook.remove()
        for _, part in self._parts.values():
            self.optimizer.state.pop(part, None)
        self._parts = {}
        for group, members in zip(self.optimizer.param_groups, self._group_members, strict=True):
            group["params"] = [self._parameter(member) for member in members]
        self.optimizer.state.pop(self._idle_parameter, None)

    def holders(self) -> Holders:
        """The ranks that have optimizer state of each parameter that has any. Collective over all processes."""
        everyone = self._mesh.gather_objects(
            [name for names in self._group_names for name in names if self.state_of(name)]
        )
        names = dict.fromkeys(name for theirs in everyone for name in theirs)
        having = [frozenset(theirs) for theirs in everyone]
        return {name: tuple(rank for rank, has in enumerate(having) if name in has) for name in names}

    @property
    def names(self) -> list[str]:
        """The names of the model's parameters that are updated on some process, in the order of the groups."""
        return [name for names in self._group_names for name in names if not self._weights.is_frozen(name)]

    def shards(self, holders: Holders) -> Shards:
        """Who has which part of the state, for all `names`.

        Args:
            holders: the ranks that hold each parameter, which update it if it is not divided.
        """
        whole = {name: dict.fromkeys(holders[name], (0, self._table[name].numel())) for name in self.names}
        return {name: self._shards.get(name, spans) for name, spans in whole.items()}

    def assign(self, shards: Shards, states: Mapping[str, dict[str, Any]]) -> None:
        """Update from now on the elements that `shards` gives to this process. Not collective.

        Args:
            shards: who has which part of the state, for all `names`.
            states: the new state of those parameters of which this process gets other elements than before.
        """
        for group, members in zip(self.optimizer.param_groups, self._group_members, strict=True):
            # `keep_what_is_here` puts in those of the model
            group["params"] = [member for member in members if not isinstance(member, str)]
        keys = {name: self._key(name) for name in shards}
        self._shards, before = shards, self._parts
        self._parts = {}
        for name in shards:
            span = self._span(name)
            if span is None or span == (0, self._table[name].numel()):
                continue
            known, part = before.get(name, (None, None))
            if known != span or part is None:
                part = nn.Parameter(self._values_of_part(name, span).data)  # with a version of its own
            self._parts[name] = span, part
        for name, state in states.items():
            self._set_state(name, state)
        for name, key in keys.items():  # the same elements, but a part now, or no longer
            if name not in states and key is not self._key(name) and key in self.optimizer.state:
                self._set_state(name, self.optimizer.state.pop(key))
        self.keep_what_is_here()

    def share_updates(self, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
        """After each step, give every replica of the stage here what the others have updated. Not collective.

        Args:
            group: the replicas of the stage; None if none of its parameters is divided.
            ranks: their ranks.
        """
        self._updated = None
        if group is not None:
            names = [name for name in self.names if self._weights.is_here(name) and self._table[name].requires_grad]
            spans = [(name, self._shards[name]) for name in names]
            rows = [[(name, of_ranks[rank]) for name, of_ranks in spans if rank in of_ranks] for rank in ranks]
            self._updated = UpdatedShards(self._table, rows, group)

    def keep_what_is_here(self) -> None:
        """Remove parameters, and their state, that this process does not update or that are permanently frozen.

        Parameters that the user has frozen temporarily stay, with their state and without a gradient.
        """
        for name, (span, part) in self._parts.items():
            part.data = self._values_of_part(name, span)  # because the values may be in another place now
        for group, members in zip(self.optimizer.param_groups, self._group_members, strict=True):
            group["params"] = [self._parameter(member) for member in members if self._updates(member)]
        if self._has_idle_parameter:
            self.optimizer.param_groups[0]["params"].append(self._idle_parameter)
        kept = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for parameter in [p for p in self.optimizer.state if id(p) not in kept]:
            del self.optimizer.state[parameter]

    def over_whole_gradients(self, act: Callable[[], None]) -> None:
        """Call a function that reads or changes the gradients in the groups (a scaler's) on those of the whole stage.

        So all replicas find the same: each of them has the same gradients of the whole stage.
        """
        groups = self.optimizer.param_groups
        lists = [group["params"] for group in groups]
        for group, members in zip(groups, self._group_members, strict=True):
            here = [member for member in members if not isinstance(member, str) or self._weights.is_here(member)]
            group["params"] = [self._table[member] if isinstance(member, str) else member for member in here]
        if self._is_idle:
            groups[0]["params"].append(self._idle_parameter)
        try:
            act()
        finally:
            for group, parameters in zip(groups, lists, strict=True):
                group["params"] = parameters

    def adopt_added(self) -> None:
        """Count parameters that were added to the optimizer's groups since it was created as outside of the model."""
        known = {id(p) for p in (*self._table.model.parameters(), *self.outside, self._idle_parameter)}
        known |= {id(part) for _, part in self._parts.values()}
        self.outside += [p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in known]

    @property
    def _is_idle(self) -> bool:
        """Whether none of the parameters here is trained (a stage of frozen layers)."""
        return not any(self._weights.is_here(name) and self._table[name].requires_grad for name in self.names)

    @property
    def _has_idle_parameter(self) -> bool:
        # some optimizers refuse to have none
        return self._is_idle or not any(map(self._updates, self.names))

    def stand_in(self, value: float) -> None:
        """If nothing is updated here, give an unused parameter a gradient, so that a gradient scaler finds one.

        Args:
            value: 0, or infinity if the other stages' gradients are infinite.
        """
        if self._has_idle_parameter:
            self._idle_parameter.grad = torch.full_like(self._idle_parameter, value)

    @contextmanager
    def gathered(self, holders: Holders, spill: Path | None = None) -> Iterator[None]:
        """Inside, `optimizer.state_dict()` on rank 0 is that of a single process that holds the whole model.

        Collective over all processes.

        Args:
            holders: who holds what.
            spill: as in `WeightState.gathered`. The state of parameters that replicas divide among them, at most one
                between two neighbours, is put together in memory.
        """
        state = self._gather(holders, spill)
        if self._mesh.rank == 0:
            groups: list[dict[str, Any]] = []
            states: list[dict[str, Any]] = []  # of each parameter, in the order of their numbers
            for group, members in zip(self.optimizer.param_groups, self._group_members, strict=True):
                first = len(states)
                for member in members:
                    states.append(state.get(member, {}) if isinstance(member, str) else self._copied_state(member))
                groups.append({**group, "params": list(range(first, len(states)))})
            self._gathered = {
                "state": {number: values for number, values in enumerate(states) if values},
                "param_groups": groups,
            }
        try:
            yield
        finally:
            self._gathered = None

    def state_of(self, name: str) -> dict[str, Any]:
        """The optimizer's state here for one parameter, or the part of it; empty before its first step."""
        return dict(self.optimizer.state.get(self._key(name), {}))

    def part_of_state(self, name: str, span: Span) -> dict[str, Any]:
        """The state of some of the elements that this process has, for which `put_part` fills in what arrives.

        Keys of values with one entry for each element begin with `ELEMENTS`; these are flat.
        """
        shape, state = self._key(name).shape, self.state_of(name)
        own = self._span(name)
        if own is None or span == own == (0, self._table[name].numel()):
            return state
        inside = slice(span[0] - own[0], span[1] - own[0])
        return {
            f"{ELEMENTS}{key}" if _has_shape(value, shape) else key: (
                value.reshape(-1)[inside] if _has_shape(value, shape) else value
            )
            for key, value in state.items()
        }

    def drop(self, name: str) -> None:
        """Free the optimizer state here of a parameter."""
        self.optimizer.state.pop(self._key(name), None)

    # ------------------------------------------------------------------------------------ inside
    def _parameter(self, member: Member) -> nn.Parameter:
        return self._key(member) if isinstance(member, str) else member

    def _copied_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The optimizer's state for a parameter, with its tensors on the CPU."""
        state = self.optimizer.state.get(parameter, {})
        return {k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}

    def _updates(self, member: Member) -> bool:
        """Whether this process updates a parameter; those outside of the model are here and never frozen."""
        if not isinstance(member, str):
            return True
        is_divided_elsewhere = member in self._shards and self._mesh.rank not in self._shards[member]
        return self._weights.is_here(member) and not self._weights.is_frozen(member) and not is_divided_elsewhere

    def _span(self, name: str) -> Span | None:
        """The elements that this process updates; None if it updates none."""
        whole = {self._mesh.rank: (0, self._table[name].numel())}
        return self._shards.get(name, whole).get(self._mesh.rank)

    def _key(self, name: str) -> nn.Parameter:
        """What stands in the optimizer's groups and state for a parameter: itself, or the part of it."""
        return self._parts[name][1] if name in self._parts else self._table[name]

    def _values_of_part(self, name: str, span: Span) -> torch.Tensor:
        """A view of a parameter's elements."""
        return self._flat(name)[slice(*span)]

    def _flat(self, name: str) -> torch.Tensor:
        """The values of a parameter, flattened; no copy."""
        parameter = self._table[name]
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
        return parameter.detach().view(-1)

    def _set_state(self, name: str, state: dict[str, Any]) -> None:
        if state:
            self.optimizer.state[self._key(name)] = state

    def show_gradients(self) -> None:
        """Let the parts see values and gradients of their parameters, wherever these are now. Not collective.

        Called when the gradients are complete, for code between clipping and the step that changes those in the
        groups. They are views, so what is changed in place on either side reaches the step.
        """
        self._seen = {}
        self._show_changed_gradients()

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
        for parameter in self.outside:
            parameter.data.copy_(self._mesh.broadcast_tensor(parameter.detach().cpu().contiguous(), source=0))

    def average_outside(self, group: dist.ProcessGroup) -> None:
        """Average the gradients of parameters outside of the model. Collective over those that compute the loss."""
        for parameter in self.outside:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            together = torch.cat([gradient.flatten(), gradient.new_full((1,), parameter.grad is not None)])
            dist.all_reduce(together, group=group)
            if together[-1]:  # where no process has a gradient, the optimizer must not see one
                parameter.grad = together[:-1].view_as(parameter) / group.size()

    def forget_gradients(self) -> None:
        """Free the gradients of the parts, where the model's parameters lose theirs. Not collective."""
        for _, part in self._parts.values():
            part.grad = None

    def _show_changed_gradients(self) -> None:
        """Before the step, the same for gradients that have been set since then; one that a part was given stays."""
        for name, (span, part) in self._parts.items():
            gradient = self._table[name].grad
            part.data = self._flat(name)[slice(*span)]
            place = None if gradient is None or gradient.is_sparse else gradient.data_ptr()
            if place is not None and self._seen.get(name) == place:
                continue
            if gradient is not None:
                gradient = (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)[slice(*span)]
            part.grad = gradient
            if place is not None:
                self._seen[name] = place

    def _share_updates(self) -> None:
        self._seen = {}
        self.forget_gradients()
        if self._updated is not None:
            with phase("update"):
                self._updated.gather()

    def _gather(self, holders: Holders, spill: Path | None) -> dict[str, dict[str, Any]]:
        """On rank 0: parameter name -> its optimizer state, on the CPU."""
        first = {(n, s.span): s.holders[0][0] for n, spans in self.shards(holders).items() for s in segments_of(spans)}
        mine = {
            segment: state
            for segment, rank in first.items()
            if rank == self._mesh.rank and (state := self.part_of_state(*segment))
        }
        layouts = self._mesh.gather_objects({segment: _on_meta(state) for segment, state in mine.items()})
        gathered: dict[str, dict[str, Any]] = {}
        own = [(s, k) for s, vs in mine.items() for k, v in vs.items() if isinstance(v, torch.Tensor)]
        if self._mesh.rank == 0:
            arrived = {s: dict(vs) for s, vs in mine.items()}
            for (s, k), tensor in zip(own, on_cpu([mine[s][k] for s, k in own]), strict=True):
                arrived[s][k] = tensor
            self._put_together(arrived, gathered)
        slots_of = [
            [(s, k, v) for s, vs in theirs.items() for k, v in vs.items() if isinstance(v, torch.Tensor)]
            for theirs in layouts
        ]
        file = spill_file(spill, [v for slots in slots_of[1:] for *_, v in slots], self._mesh)
        number = 0
        for source, slots in enumerate(slots_of[1:], start=1):
            if self._mesh.rank == source:
                self._mesh.send_to([mine[s][k] for s, k, _ in slots], destination=0)
            elif self._mesh.rank == 0:
                arrived = {s: dict(vs) for s, vs in layouts[source].items()}
                like = [v for *_, v in slots]
                if file is not None:
                    numbers = range(number, number + len(like))
                    self._mesh.receive_into(map(file.open, numbers), like, source)
                    number, tensors = numbers.stop, list(map(file.open, numbers))
                else:
                    tensors = self._mesh.receive_from(like, source)
                for (s, k, _), tensor in zip(slots, tensors, strict=True):
                    arrived[s][k] = tensor
                self._put_together(arrived, gathered)
        return gathered

    def _put_together(
        self, arrived: Mapping[tuple[str, Span], Mapping[str, Any]], whole: dict[str, dict[str, Any]]
    ) -> None:
        """Fill the states of whole parameters with those of some of their elements (`part_of_state`)."""
        for (name, span), values in arrived.items():
            parameter = self._table[name]
            put_part(whole.setdefault(name, {}), values, parameter.shape, (0, parameter.numel()), span)

    def _keep_mine(self, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """This process's part of a whole model's state dict, renumbered; None leaves any other state dict as it is."""
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        if [len(numbers) for numbers in saved] != [len(members) for members in self._group_members]:
            return None
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        position = 0
        for group, numbers, members in zip(state_dict["param_groups"], saved, self._group_members, strict=True):
            here = []
            for number, member in zip(numbers, members, strict=True):
                if self._updates(member):
                    if number in state_dict["state"]:
                        values = self._part_of_saved(member, state_dict["state"][number])
                        # copied, because a memory-mapped file may be damaged or deleted later
                        state[position] = {k: _own(v) for k, v in values.items()}
                    here.append(position)
                    position += 1
            if not groups and self._has_idle_parameter:
                here.append(position)
                position += 1
            groups.append({**group, "params": here})
        return {"state": state, "param_groups": groups}

    def _part_of_saved(self, member: Member, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """What this process has of a parameter's saved state."""
        if not isinstance(member, str) or member not in self._parts:
            return values
        (span, part), shape = self._parts[member], self._table[member].shape
        return {
            key: v.reshape(-1)[slice(*span)].view(part.shape) if _has_shape(v, shape) else v
            for key, v in values.items()
        }


ELEMENTS = "elements "
"""How the keys of a state's values begin that have one entry for each element of a part of a parameter."""


def put_part(state: dict[str, Any], values: Mapping[str, Any], shape: torch.Size, span: Span, part: Span) -> None:
    """Fill the state of elements `span` of a parameter with that of `part` of them (`OptimizerState.part_of_state`).

    Args:
        state: the state, which is filled; empty at first.
        values: the state of the part.
        shape: the shape that the state of the elements has: the parameter's, or flat.
        span: the elements whose state is filled.
        part: the elements whose state has arrived.
    """
    for key, value in values.items():
        if not key.startswith(ELEMENTS):
            state[key] = value
            continue
        name = key.removeprefix(ELEMENTS)
        if name not in state:
            state[name] = torch.zeros(shape, dtype=value.dtype, device=value.device)
        state[name].view(-1)[part[0] - span[0] : part[1] - span[0]] = value


def _on_meta(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: v.to("meta") if isinstance(v, torch.Tensor) else v for key, v in state.items()}


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shape


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
