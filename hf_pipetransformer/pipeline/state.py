"""Weights and optimizer state that are spread over stages: drop, gather, save and load them by name.

Files keep the stock formats. A checkpoint is written by rank 0 as one process would write it, and read by every rank,
which takes what it holds; so it fits any number of stages and replicas, and the stock Trainer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..model.placeholders import ParameterTable, placeholder
from .mesh import ProcessMesh, as_bytes

Holders = Mapping[str, tuple[int, ...]]
"""Parameter name -> the ranks that hold it, ascending. The same on every process."""


@dataclass(frozen=True)
class Move:
    """One parameter, with its optimizer state, from a rank that holds it to one that will."""

    name: str
    source: int
    destination: int


def moves_between(before: Holders, after: Holders) -> tuple[Move, ...]:
    """What has to travel so that `after` holds. Pure: the same on every process.

    The ranks that hold a parameter take turns in sending it.
    """
    return tuple(
        Move(name, before[name][turn % len(before[name])], destination)
        for name, ranks in after.items()
        for turn, destination in enumerate(rank for rank in ranks if rank not in before[name])
    )


@dataclass(frozen=True)
class WholeParameter:
    """What is kept of a parameter of the whole model while an evaluation uses a part of it."""

    data: torch.Tensor
    grad: torch.Tensor | None


class WeightState:
    """The model's parameters, of which some are here and the others are placeholders.

    Parameters keep their identity, and so do their hooks, wherever their values are.

    While a part is missing, `model.state_dict()` and `model.load_state_dict()` keep working through hooks: saving
    (inside `gathered`) sees every weight on rank 0, loading takes what is here and skips the rest.
    """

    def __init__(self, table: ParameterTable, mesh: ProcessMesh) -> None:
        self._table = table
        self._mesh = mesh
        self._trainable = {name: table[name].requires_grad for name in table.names}
        self._missing: frozenset[str] = frozenset()
        self._frozen: set[str] = set()
        self._offloaded: dict[str, torch.Tensor] = {}
        self._offload_hooks: list[Any] = []
        self._gathered: dict[str, torch.Tensor] | None = None
        self._lists_placeholders = False
        self._hooks: list[Any] = []
        self._here: tuple[nn.Parameter, ...] = ()
        self._flags_here: list[bool] = []  # `requires_grad` of these, as we know it

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightState:
        """A copy of the model, as a teacher for one, has the model's hooks, which act on the model alone."""
        return self

    @property
    def is_whole(self) -> bool:
        return not self._missing

    def is_here(self, name: str) -> bool:
        return name not in self._missing

    def is_trainable(self, name: str) -> bool:
        """Whether this parameter is trained, here or elsewhere: the user wants it, and it is not frozen."""
        return self._trainable[name] and name not in self._frozen

    def is_frozen(self, name: str) -> bool:
        """Whether a freeze policy has frozen it, for good."""
        return name in self._frozen

    def freeze(self, names: Collection[str]) -> None:
        """From now on these are not trained: no gradient, and no optimizer state once the optimizer is told."""
        self._frozen.update(names)
        for name in names:
            if self.is_here(name):
                self._table[name].requires_grad_(False)
                self._table[name].grad = None

    @property
    def flags_changed(self) -> bool:
        """Whether the user's code has set `requires_grad` of a parameter that is here. Cheap, and not collective."""
        return [parameter.requires_grad for parameter in self._here] != self._flags_here

    def read_flags(self) -> None:
        """Note which parameters of the whole model the user wants to be trained. Not collective."""
        assert self.is_whole
        self._trainable = {name: self._table[name].requires_grad for name in self._table.names}

    def follow_flags(self, holders: Holders) -> None:
        """Take over what the user's code has set `requires_grad` to. Collective over all processes.

        The first of the ranks that hold a parameter decides: a placeholder's flag says nothing.

        Raises:
            ValueError: parameters that a freeze policy has frozen require a gradient again.
        """
        flags = self._flags_of_first_holders(holders)
        thawed = [name for name in self._table.names if name in self._frozen and flags[name]]
        if thawed:
            raise ValueError(
                f"{thawed[0]!r} and {len(thawed) - 1} more parameters have been given requires_grad=True (by a"
                " callback?), and the freeze policy has frozen their layers, which stay frozen. Leave them out there,"
                " or train without freeze_policy."
            )
        for name in self._table.names:
            if name not in self._frozen:
                self._trainable[name] = flags[name]
                if self.is_here(name):
                    self._table[name].requires_grad_(flags[name])

    def _flags_of_first_holders(self, holders: Holders) -> dict[str, bool]:
        mine = {name: self._table[name].requires_grad for name, r in holders.items() if r[0] == self._mesh.rank}
        return {name: flag for theirs in self._mesh.gather_objects(mine) for name, flag in theirs.items()}

    def put(self, name: str, value: torch.Tensor) -> nn.Parameter:
        """The values of a parameter that have come from another process."""
        parameter = self._table[name]
        parameter.data = value
        parameter.requires_grad_(self.is_trainable(name))
        self._missing -= {name}
        return parameter

    def keep_only(self, names: Collection[str], device: torch.device) -> None:
        """Move these parameters to `device`; free the memory of the others, which become placeholders."""
        self.onload()
        model = self._table.model
        for name in self._table.names:
            parameter = self._table[name]
            if name in names:
                _move(parameter, device)
                continue
            parameter.requires_grad_(False)  # a user's code may have set it
            parameter.grad = None
            if self.is_here(name):
                # whoever reads it (a penalty on all weights) is to get no number that looks like one
                nothing = float("nan") if parameter.is_floating_point() else 0
                parameter.data = placeholder(parameter, nothing, device)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(device)
        self._missing = frozenset(self._table.names) - frozenset(names)
        self._here = tuple(self._table[name] for name in self._table.names if name in names)
        self._flags_here = [parameter.requires_grad for parameter in self._here]
        if not self._hooks:
            self._hooks = [
                model.register_load_state_dict_pre_hook(self._skip_missing),
                model.register_load_state_dict_post_hook(self._forgive_missing),
                # torch refuses bound methods here
                model.register_state_dict_post_hook(lambda *args: self._put_gathered(*args)),
            ]

    def offload(self, names: Collection[str], needs_them: Callable[[], bool]) -> None:
        """Send frozen weights that nothing computes with at present to the CPU; the device keeps placeholders.

        They come back when their modules are saved, or run where `needs_them` says so.
        """
        for name in set(names) - self._offloaded.keys():
            parameter = self._table[name]
            self._offloaded[name] = parameter.data.cpu()
            parameter.data = placeholder(parameter)

            def bring_back_if_needed(*_: Any) -> None:
                if needs_them():
                    self.onload()

            for alias in self._table.aliases[name]:
                module = self._table.model.get_submodule(alias.rpartition(".")[0])
                self._offload_hooks.append(module.register_state_dict_pre_hook(lambda *_: self.onload()))
                self._offload_hooks.append(module.register_forward_pre_hook(bring_back_if_needed))

    def onload(self) -> None:
        """Bring back what is offloaded."""
        for name, value in self._offloaded.items():
            self._table[name].data = value.to(self._table[name].device)
        self._offloaded.clear()
        for hook in self._offload_hooks:
            hook.remove()
        self._offload_hooks.clear()

    @contextmanager
    def as_on_one_process(self) -> Iterator[None]:
        """Inside, what is missing or frozen looks as trainable as it was given: an optimizer's groups are the same.

        So they fit a checkpoint that was saved under any layout, and before anything was frozen.
        """
        disguised = self._missing | self._frozen
        for name in disguised:
            self._table[name].requires_grad_(self._trainable[name])
        try:
            yield
        finally:
            for name in disguised:
                self._table[name].requires_grad_(False)

    @contextmanager
    def gathered(self, holders: Holders) -> Iterator[None]:
        """Inside, on rank 0, `model.state_dict()` holds every weight, those from elsewhere on the CPU.

        Collective over all processes.
        """
        self.onload()
        self._gathered = self._gather(holders)
        try:
            yield
        finally:
            self._gathered = None

    @contextmanager
    def listing_placeholders(self) -> Iterator[None]:
        """Inside, `model.state_dict()` may be asked for its keys; the values of missing weights mean nothing."""
        self._lists_placeholders = True
        try:
            yield
        finally:
            self._lists_placeholders = False

    def restore(self, holders: Holders, device: torch.device) -> None:
        """Bring every weight back to every process, on `device`. Collective over all processes."""
        self.onload()
        for name, flag in self._flags_of_first_holders(holders).items():
            self._trainable[name] = flag or (name in self._frozen and self._trainable[name])
        for name, ranks in holders.items():
            mine = self._table[name]
            if len(ranks) < self._mesh.world_size:
                value = torch.empty(mine.shape, dtype=mine.dtype)
                if self._mesh.rank == ranks[0]:
                    value.copy_(mine.detach())
                self._mesh.broadcast_tensor(value, ranks[0])
                if not self.is_here(name):
                    mine.data = value.to(device)
                    continue
            _move(mine, device)
        self._is_whole_again(device)

    def set_aside(self) -> dict[str, WholeParameter]:
        """The complete weights, for `put_back`. Not collective."""
        kept = {}
        for name in self._table.names:
            parameter = self._table[name]
            kept[name] = WholeParameter(parameter.data, parameter.grad)
            parameter.grad = None
        return kept

    def put_back(self, weights: Mapping[str, WholeParameter]) -> None:
        """Make the model whole with the complete weights that it had before `keep_only`. Not collective."""
        for name, kept in weights.items():
            self._table[name].data = kept.data
            self._table[name].grad = kept.grad
        self._is_whole_again(next(iter(weights.values())).data.device)

    # ------------------------------------------------------------------------------------ inside
    def _is_whole_again(self, device: torch.device) -> None:
        for buffer in self._table.model.buffers():
            buffer.data = buffer.data.to(device)
        for name in self._table.names:
            self._table[name].requires_grad_(self._trainable[name])
        self._missing, self._frozen, self._here, self._flags_here = frozenset(), set(), (), []
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _gather(self, holders: Holders) -> dict[str, torch.Tensor]:
        """On rank 0 the weights that it misses, from the ranks that hold them."""
        gathered: dict[str, torch.Tensor] = {}
        for source in sorted({ranks[0] for ranks in holders.values()} - {0}):
            names = [name for name in self._table.names if holders[name][0] == source]
            if self._mesh.rank == source:
                self._mesh.send_to([self._table[name] for name in names], destination=0)
            elif self._mesh.rank == 0:
                received = self._mesh.receive_from([self._table[name] for name in names], source)
                gathered.update(zip(names, received, strict=True))
        return gathered

    def _missing_keys(self) -> set[str]:
        return {alias for name in self._missing for alias in self._table.aliases[name]}

    def _skip_missing(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        if module is not self._table.model:
            return
        self.onload()  # what is loaded is copied into them
        for key in self._missing_keys():
            state_dict.pop(prefix + key, None)

    def _forgive_missing(self, module: nn.Module, incompatible: Any) -> None:
        if module is not self._table.model:
            return
        missing = self._missing_keys()
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in missing]

    def _put_gathered(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        if module is not self._table.model:
            return
        if self._gathered is None and self._missing and not self._lists_placeholders:
            raise ValueError(
                f"{type(module).__name__} is spread over a pipeline while it trains, and {len(self._missing)} of its"
                " parameters are not here. Call trainer.save_model() on all processes, or save after train()"
                " has returned."
            )
        for name, tensor in (self._gathered or {}).items():
            for alias in self._table.aliases[name]:
                state_dict[prefix + alias] = tensor


class OptimizerState:
    """An optimizer that was made for the whole model, and updates only the parameters that are here.

    The optimizer object, its groups (learning rate, weight decay) and with them the scheduler stay; only the lists of
    parameters change. Its `state_dict` is that of one process: complete inside `gathered`, cut on loading.

    Args:
        optimizer: made by `torch.optim` rules over the parameters of the table.
        table: the model's parameters, in the state in which the optimizer was made.
        weights: tells which of them are here.
        mesh: the processes.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, table: ParameterTable, weights: WeightState, mesh: ProcessMesh
    ) -> None:
        self.optimizer = optimizer
        self._table = table
        self._weights = weights
        self._mesh = mesh
        self._name_of = {id(table[name]): name for name in table.names}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [tuple(p.shape) for p in parameters if id(p) not in self._name_of]
        if foreign:
            raise ValueError(
                f"{len(foreign)} of the optimizer's {len(parameters)} parameters are not the model's (one has shape"
                f" {foreign[0]}): make the optimizer from the parameters of the model that the trainer is given."
            )
        self._known_groups: list[list[str]] = []
        self._gathered: dict[str, Any] | None = None
        # of a stage that trains nothing
        self._idle_parameter = nn.Parameter(torch.zeros(1, device=next(iter(parameters)).device))
        self._hooks = [
            optimizer.register_state_dict_post_hook(lambda _, state_dict: self._gathered),
            optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: self._keep_mine(state_dict)),
        ]
        self.keep_what_is_here()

    @property
    def _group_names(self) -> list[list[str]]:
        """The model's parameters in each group; groups that a callback has added come at the end."""
        for group in self.optimizer.param_groups[len(self._known_groups) :]:
            self._known_groups.append([self._name_of[id(p)] for p in group["params"] if id(p) in self._name_of])
        return self._known_groups

    def release(self) -> None:
        """Give the optimizer back as it came: over the whole model; its state stays where it is. Not collective."""
        for hook in self._hooks:
            hook.remove()
        for group, names in zip(self.optimizer.param_groups, self._group_names, strict=True):
            group["params"] = [self._table[name] for name in names]
        self.optimizer.state.pop(self._idle_parameter, None)

    def holders(self) -> Holders:
        """The ranks that have a state of each parameter, of those that have one. Collective over all processes."""
        everyone = self._mesh.gather_objects(
            [name for names in self._group_names for name in names if self.state_of(name)]
        )
        names = dict.fromkeys(name for theirs in everyone for name in theirs)
        having = [frozenset(theirs) for theirs in everyone]
        return {name: tuple(rank for rank, has in enumerate(having) if name in has) for name in names}

    def keep_what_is_here(self) -> None:
        """Take out what is not held by this process (any more) or frozen for good: parameters and their state.

        What the user has frozen for the time being stays, with its state, and has no gradient.
        """
        for group, names in zip(self.optimizer.param_groups, self._group_names, strict=True):
            theirs = [p for p in group["params"] if id(p) not in self._name_of and p is not self._idle_parameter]
            group["params"] = [*(self._table[name] for name in names if self._updates(name)), *theirs]
        if self._is_idle:
            self.optimizer.param_groups[0]["params"].append(self._idle_parameter)
        kept = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for parameter in [p for p in self.optimizer.state if id(p) not in kept]:
            del self.optimizer.state[parameter]

    def refuse_added(self) -> None:
        """
        Raises:
            ValueError: the optimizer has been given parameters that are not the model's since it was adopted.
        """
        known = {id(p) for p in self._table.model.parameters()} | {id(self._idle_parameter)}
        added = [p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in known]
        if added:
            raise ValueError(
                f"{len(added)} parameters of the optimizer are not the model's (one has shape"
                f" {tuple(added[0].shape)}): where several processes train one model, nobody would add up their"
                " gradients. Register them in the model, or train in one process."
            )

    @property
    def _is_idle(self) -> bool:
        """Whether nothing that is here is trained (a stage of frozen layers)."""
        return not any(
            self._updates(name) and self._table[name].requires_grad for names in self._group_names for name in names
        )

    def stand_in(self, value: float) -> None:
        """Where nothing is trained, give a gradient to a parameter of no one, so that a gradient scaler finds one.

        Args:
            value: 0, or infinite where the other stages' gradients are.
        """
        if self._is_idle:
            self._idle_parameter.grad = torch.full_like(self._idle_parameter, value)

    @contextmanager
    def gathered(self, holders: Holders) -> Iterator[None]:
        """Inside, `optimizer.state_dict()` on rank 0 is that of one process that holds the whole model.

        Collective over all processes.
        """
        state = self._gather(holders)
        if self._mesh.rank == 0:
            position = {name: i for i, name in enumerate(n for names in self._group_names for n in names)}
            groups = [
                {**{k: v for k, v in group.items() if k != "params"}, "params": [position[name] for name in names]}
                for group, names in zip(self.optimizer.param_groups, self._group_names, strict=True)
            ]
            self._gathered = {
                "state": {position[name]: state[name] for name in position if name in state},
                "param_groups": groups,
            }
        try:
            yield
        finally:
            self._gathered = None

    def state_of(self, name: str) -> dict[str, Any]:
        """The optimizer's state for one parameter, empty before its first step."""
        return dict(self.optimizer.state.get(self._table[name], {}))

    def put(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        """State that has come with a parameter from another process."""
        if state:
            self.optimizer.state[parameter] = state

    # ------------------------------------------------------------------------------------ inside
    def _updates(self, name: str) -> bool:
        return self._weights.is_here(name) and not self._weights.is_frozen(name)

    def _gather(self, holders: Holders) -> dict[str, dict[str, Any]]:
        """On rank 0: parameter name -> its optimizer state, on the CPU."""
        names = [name for names in self._group_names for name in names]
        mine = {n: s for n in names if holders[n][0] == self._mesh.rank and (s := self.state_of(n))}
        layouts = self._mesh.gather_objects(
            {n: {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in s.items()} for n, s in mine.items()}
        )
        gathered = {n: {k: _on_cpu(v) for k, v in s.items()} for n, s in mine.items()}
        for source in range(1, self._mesh.world_size):
            slots = [
                (n, k, v) for n, s in layouts[source].items() for k, v in s.items() if isinstance(v, torch.Tensor)
            ]
            if self._mesh.rank == source:
                self._mesh.send_to([mine[n][k] for n, k, _ in slots], destination=0)
            elif self._mesh.rank == 0:
                gathered.update({n: dict(s) for n, s in layouts[source].items()})
                for (n, k, _), tensor in zip(
                    slots, self._mesh.receive_from([v for *_, v in slots], source), strict=True
                ):
                    gathered[n][k] = tensor
        return gathered

    def _keep_mine(self, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Of a whole model's state dict the part of this process, renumbered; None leaves any other as it is."""
        saved = [list(group["params"]) for group in state_dict["param_groups"]]
        if [len(numbers) for numbers in saved] != [len(names) for names in self._group_names]:
            return None
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        position = 0
        for group, numbers, names in zip(state_dict["param_groups"], saved, self._group_names, strict=True):
            here = []
            for number, name in zip(numbers, names, strict=True):
                if self._updates(name):
                    if number in state_dict["state"]:
                        values = state_dict["state"][number]
                        # copied: a file that is mapped may be damaged or gone later
                        state[position] = {k: _own(v) for k, v in values.items()}
                    here.append(position)
                    position += 1
            if not groups and self._is_idle:
                here.append(position)
                position += 1
            groups.append({**group, "params": here})
        return {"state": state, "param_groups": groups}


def exchange(
    moves: Sequence[Move],
    table: ParameterTable,
    weights: WeightState,
    optimizer: OptimizerState | None,
    mesh: ProcessMesh,
    device: torch.device,
) -> int:
    """Carry out `moves`: parameters with their optimizer state. Collective over all processes.

    1. Every process tells what it will send: a state's tensors and plain values differ by optimizer.
    2. For each pair of processes one flat buffer, all at once.
    3. The receivers put the parts in place.

    Returns:
        Bytes that this process received.
    """
    outgoing: dict[int, _Parcel] = {}
    for move in moves:
        if move.source == mesh.rank:
            state = optimizer.state_of(move.name) if optimizer is not None and not weights.is_frozen(move.name) else {}
            values = {key: _Scalar.of(value) for key, value in state.items()}
            outgoing.setdefault(move.destination, {})[move.name] = {WEIGHT: table[move.name].detach(), **values}
    announced = mesh.gather_objects({to: _as_meta(parcel) for to, parcel in outgoing.items()})  # 1
    incoming = {source: told[mesh.rank] for source, told in enumerate(announced) if mesh.rank in told}
    sent = {
        to: torch.cat([as_bytes(t.to(device).contiguous()) for t in _tensors_in(parcel)])
        for to, parcel in outgoing.items()
    }
    received = {
        source: torch.empty(sum(t.nbytes for t in _tensors_in(parcel)), dtype=torch.uint8, device=device)
        for source, parcel in incoming.items()
    }
    operations = [dist.P2POp(dist.isend, buffer, to) for to, buffer in sorted(sent.items())]
    operations += [dist.P2POp(dist.irecv, buffer, source) for source, buffer in sorted(received.items())]
    for work in dist.batch_isend_irecv(operations) if operations else []:  # 2
        work.wait()
    for source, parcel in incoming.items():  # 3
        parts = iter(received[source].split([t.nbytes for t in _tensors_in(parcel)]))
        for name, announced_values in parcel.items():
            arrived = {
                key: next(parts).clone().view(v.dtype).view(v.shape) if isinstance(v, torch.Tensor) else v.on(device)
                for key, v in announced_values.items()
            }
            parameter = weights.put(name, arrived.pop(WEIGHT))
            if optimizer is not None:
                optimizer.put(parameter, arrived)
    return sum(buffer.nbytes for buffer in received.values())


WEIGHT = ""
"""Key of the parameter itself beside its optimizer state."""


@dataclass(frozen=True)
class _Scalar:
    """What is too small for the buffer and travels with the announcement: AdamW's step, on the CPU or the device."""

    value: Any
    is_on_device: bool

    @classmethod
    def of(cls, value: Any) -> Any:
        """A large tensor as it is, anything else wrapped."""
        if isinstance(value, torch.Tensor):
            return value if value.dim() > 0 else cls(value.cpu(), value.device.type != "cpu")
        return cls(value, False)

    def on(self, device: torch.device) -> Any:
        return self.value.to(device) if self.is_on_device else self.value


_Parcel = dict[str, dict[str, Any]]
"""Parameter name -> key -> tensor or `_Scalar`."""


def _tensors_in(parcel: _Parcel) -> list[torch.Tensor]:
    return [v for values in parcel.values() for v in values.values() if isinstance(v, torch.Tensor)]


def _as_meta(parcel: _Parcel) -> _Parcel:
    """The same with the tensors' shapes in place of their values."""
    return {
        name: {key: v.to("meta") if isinstance(v, torch.Tensor) else v for key, v in values.items()}
        for name, values in parcel.items()
    }


def synchronise_weights(table: ParameterTable, mesh: ProcessMesh) -> list[str]:
    """Give every process rank 0's weights, as DDP does. Collective over all processes.

    Only the weights that differ somewhere travel (a head that was initialised without a common seed).

    Returns:
        The names of those that differed.
    """
    if mesh.world_size == 1:
        return []
    mine = {name: _checksum(table[name]) for name in table.names}
    everyone = mesh.gather_objects(mine)
    different = [name for name in table.names if any(other[name] != everyone[0][name] for other in everyone)]
    for name in different:
        value = table[name].detach().cpu().clone(memory_format=torch.contiguous_format)
        mesh.broadcast_tensor(value, source=0)
        table[name].data.copy_(value)
    return different


def synchronise_buffers(model: nn.Module, mesh: ProcessMesh, source_of: Callable[[str], int]) -> list[str]:
    """Give every process the buffers of one, saved with the model or not. Collective over all processes.

    Only those that differ somewhere travel.

    Args:
        model: the whole model, on every process; a buffer that some process lacks is left alone.
        mesh: the processes.
        source_of: the rank whose value counts, by the buffer's name; the same on every process.

    Returns:
        The names of those that differed.
    """
    if mesh.world_size == 1:
        return []
    here = dict(model.named_buffers())
    mine = {name: (tuple(buffer.shape), buffer.dtype, _checksum(buffer)) for name, buffer in here.items()}
    everyone = mesh.gather_objects(mine)
    different = [
        name for name, first in everyone[0].items() if any(other.get(name, first) != first for other in everyone)
    ]
    different = [name for name in different if all(name in other for other in everyone)]
    for name in different:
        source = source_of(name)
        shape, dtype, _ = everyone[source][name]
        value = torch.empty(shape, dtype=dtype)
        if mesh.rank == source:
            value.copy_(here[name].detach())
        mesh.broadcast_tensor(value, source)
        if mesh.rank != source:
            here[name].data = value.to(here[name].device)
    return different


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(as_bytes(tensor.detach().cpu().contiguous()).numpy().data)


def _move(parameter: nn.Parameter, device: torch.device) -> None:
    parameter.data = parameter.data.to(device)
    if parameter.grad is not None:
        parameter.grad = parameter.grad.to(device)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
