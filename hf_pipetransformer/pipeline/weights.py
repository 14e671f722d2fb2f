"""Weights that are distributed over stages: their ranks; hold, drop and gather them, save and load them by name.

Files keep the stock formats. Rank 0 writes a checkpoint as a single process would write it; every rank reads it and
takes the parts that it holds. So a checkpoint fits any number of stages and replicas, and the stock Trainer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..model.elsewhere import NAN, Hidden, computing_with_nan, hide, placeholder
from ..model.nested import as_bytes, strided_parts
from ..model.placeholders import ParameterTable, set_values, values_of
from .holders import Holders, source_of_buffers
from .mesh import ProcessMesh
from .transfer import CPU, transfer

Content = tuple[torch.Size, torch.dtype, int]
"""Shape, dtype and checksum of a tensor."""

HELD_ELSEWHERE = (
    "While a pipeline trains, each process has the weights, gradients and optimizer state of its own stage only. Do"
    " this on every process and leave out parameters p for which getattr(p, 'is_elsewhere', False), call"
    " trainer.save_model() on all processes, do it before or after train(), or set pipeline_parallel_size=1."
)


class Weights:
    """The model's parameters. Some are on this process, and the others are placeholders.

    It alone knows and changes which ranks hold a parameter (`holders`) and which parameters are frozen. Parameters
    keep their identity and their hooks, wherever their values are.

    While some parameters are missing, `model.state_dict()` and `model.load_state_dict()` keep working through hooks:
    saving (inside `gathered`) sees every weight on rank 0, and loading takes the parameters that are here and skips
    the others.

    Args:
        table: the model's parameters, with all of their values.
        mesh: all processes of the run.
        device: the device of this process's parameters while the model is distributed.
    """

    def __init__(self, table: ParameterTable, mesh: ProcessMesh, device: torch.device = CPU) -> None:
        self._table = table
        self.mesh = mesh
        self.device = device
        self._everyone: Holders = dict.fromkeys(table.names, tuple(range(mesh.world_size)))
        self._holders: Holders = self._everyone
        self._trainable = {name: table[name].requires_grad for name in table.names}
        self._missing: set[str] = set()
        self._frozen: set[str] = set()
        self._lists_placeholders = False
        self._hooks: list[Any] = []
        self._names: dict[int, str] = {}  # of parameters, by their identity
        self._skipped: dict[int, set[str]] = {}  # keys that a module leaves out while it is being loaded
        self._buffers: dict[str, Content] = {}  # as they were when they were equal on all processes
        self._reading = ExitStack()  # while `model.state_dict()` runs
        self._here: tuple[nn.Parameter, ...] = ()
        self._flags_here: list[bool] = []  # the flags that `hold` has left in `_here`
        # values and gradients of the complete parameters, while an evaluation uses a part of the model
        self._aside: Mapping[str, tuple[Sequence[torch.Tensor], torch.Tensor | None]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Weights:
        """Return self: a copied model (a teacher, for example) has its hooks, which act on the original alone."""
        return self

    @property
    def table(self) -> ParameterTable:
        return self._table

    @property
    def holders(self) -> Holders:
        """The ranks that hold each parameter."""
        return self._holders

    @property
    def held(self) -> list[str]:
        """The names of the parameters that this process holds."""
        return [name for name in self._table.names if self.mesh.rank in self._holders[name]]

    @property
    def is_whole(self) -> bool:
        return not self._missing

    def is_here(self, name: str) -> bool:
        return name not in self._missing

    def is_trainable(self, name: str) -> bool:
        """Whether this parameter is trained on any process: the user wants it to be, and it is not frozen."""
        return self._trainable[name] and name not in self._frozen

    def is_frozen(self, name: str) -> bool:
        """Whether a freeze policy has frozen this parameter permanently."""
        return name in self._frozen

    def freeze(self, names: Collection[str]) -> frozenset[str]:
        """Stop training these parameters, and return the names of the previously trained ones.

        They lose their gradient here, and their optimizer state at `OptimizerState.keep_what_is_here`.
        """
        stopped = frozenset(filter(self.is_trainable, names))
        self._frozen.update(names)
        for name in names:
            if self.is_here(name):
                self._table[name].requires_grad_(False)
                self._table[name].grad = None
        return stopped

    @property
    def flags_changed(self) -> bool:
        """Whether user code has changed `requires_grad` of a parameter that is here. Cheap, and not collective."""
        return [parameter.requires_grad for parameter in self._here] != self._flags_here

    def refreeze(self) -> None:
        """Undo `requires_grad=True` on parameters that a freeze policy has frozen. Not collective.

        PEFT sets it on all parameters of an adapter that it makes active, for one after a loss has used another.
        """
        for name in self._frozen:
            parameter = self._table[name]
            if isinstance(parameter, Hidden):
                parameter.is_trained = False
            elif parameter.requires_grad and self.is_here(name):
                parameter.requires_grad_(False)

    def read_flags(self) -> None:
        """Record which parameters of the complete model the user wants to train. Not collective."""
        assert self.is_whole
        self._trainable = {name: self._table[name].requires_grad for name in self._table.names}

    def follow_flags(self, thaws: bool = False) -> bool:
        """Adopt the `requires_grad` flags that the user's code has set. Collective over all processes.

        The first of the ranks that hold a parameter decides; the flag of a placeholder has no meaning.

        Args:
            thaws: whether frozen parameters may be trained again. If any is, no parameter is frozen any more.

        Returns:
            Whether any frozen parameter requires a gradient again.

        Raises:
            ValueError: if parameters that a freeze policy has frozen require a gradient again.
        """
        flags = self._flags_of_first_holders()
        thawed = [name for name in self._table.names if name in self._frozen and flags[name]]
        if thawed and thaws:
            self._frozen.clear()
        elif thawed:
            raise ValueError(
                f"requires_grad=True was set on {thawed[0]!r} and {len(thawed) - 1} more parameters (probably by a"
                " callback), but the freeze policy has frozen their layers, which must stay frozen. Do not change"
                " these parameters, or set freeze_policy='none'."
            )
        for name in self._table.names:
            if name not in self._frozen:
                self._trainable[name] = flags[name]
                if self.is_here(name):
                    self._table[name].requires_grad_(flags[name])
        return bool(thawed)

    def _flags_of_first_holders(self) -> dict[str, bool]:
        firsts = {name: ranks[0] for name, ranks in self._holders.items()}
        mine = [self._table[name].requires_grad for name, first in firsts.items() if first == self.mesh.rank]
        flags = [iter(theirs) for theirs in self.mesh.gather_objects(mine)]
        return {name: next(flags[first]) for name, first in firsts.items()}

    def values_of(self, name: str) -> dict[int, torch.Tensor]:
        """The tensors with the values of a parameter, numbered."""
        return dict(enumerate(values_of(self._table[name])))

    def put(self, name: str, values: Mapping[int, torch.Tensor]) -> None:
        """Store the values of a parameter that another process has sent, as `values_of` has returned them there."""
        set_values(self._table[name], values.values())
        self._table[name].requires_grad_(self.is_trainable(name))
        self._missing.discard(name)

    def drop(self, name: str) -> None:
        """Free the memory of a parameter, which becomes a placeholder, and cannot be read."""
        parameter = self._table[name]
        parameter.requires_grad_(False)  # user code may have set it, even on a placeholder
        parameter.grad = None
        if self.is_here(name):
            # code that reads a placeholder (a penalty on all weights) must not get a plausible number
            values = values_of(parameter)
            nothing = [NAN if value.is_floating_point() else 0 for value in values]
            set_values(parameter, [placeholder(v, fill, self.device) for v, fill in zip(values, nothing, strict=True)])
            self._missing.add(name)
        about = f"{name} is held by rank {self._holders[name][0]}"
        hide(parameter, about, HELD_ELSEWHERE, self.is_trainable(name))

    def make_contiguous(self) -> None:
        """Lay out this process's parameters in row-major order: replicas average gradients in the order of weights."""
        for name in self.held:
            values = values_of(self._table[name])
            if not all(value.is_contiguous() for value in values):
                set_values(self._table[name], [value.contiguous() for value in values])

    def assign(self, holders: Holders) -> Holders:
        """Assign the parameters to other ranks, and return the previous ranks. `move` brings the values there.

        Not collective.

        Args:
            holders: the ranks that hold each parameter from now on; the values of some may not be there yet.
        """
        before, self._holders = self._holders, holders
        return before

    def hold(self) -> None:
        """Move this process's parameters to its device; free the memory of the others, which become placeholders.

        Not collective.
        """
        names, model = set(self.held), self._table.model
        for name in self._table.names:
            if name in names:
                _move(self._table[name], self.device)
            else:
                self.drop(name)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(self.device)
        if self._missing and not self._buffers:
            self._buffers = contents_of(dict(model.named_buffers()))
        self._here = tuple(self._table[name] for name in self._table.names if name in names)
        self._flags_here = [parameter.requires_grad for parameter in self._here]
        if self._missing and not self._hooks:  # a whole model has none, and can be pickled
            self._names = {id(self._table[name]): name for name in self._table.names}
            for module in model.modules():  # a submodule may be loaded alone, too
                if any(parameter is not None for parameter in module._parameters.values()):
                    self._hooks.append(module.register_load_state_dict_pre_hook(self._skip_missing))
                    self._hooks.append(module.register_load_state_dict_post_hook(self._forgive_missing))
            self._hooks += [
                model.register_state_dict_pre_hook(self._begin_state_dict),
                # torch refuses bound methods here
                model.register_state_dict_post_hook(lambda *args: self._end_state_dict(*args)),
            ]

    def containing_nan(self) -> list[str]:
        """Names of the parameters here that contain NaN. Not collective."""
        here = filter(self.is_here, self._table.names)
        return [
            name
            for name in here
            if any(v.is_floating_point() and v.isnan().any() for v in values_of(self._table[name]))
        ]

    @contextmanager
    def as_on_one_process(self) -> Iterator[None]:
        """Inside, missing and frozen parameters have their original `requires_grad`, as on a single process.

        An optimizer created inside has the same groups as one of a single process. So they fit a checkpoint that was
        saved under any number of stages and replicas, and before anything was frozen.
        """
        disguised = self._missing | self._frozen
        for name in disguised:
            _set_flag(self._table[name], self._trainable[name], self._trainable[name])
        try:
            yield
        finally:
            for name in disguised:
                _set_flag(self._table[name], False, self.is_trainable(name))

    @contextmanager
    def gathered(self, folder: Path | None = None, needed: Collection[str] | None = None) -> Iterator[None]:
        """Inside, on rank 0, the model has every weight: saving reads `state_dict()`, parameters, or calls modules.

        Other processes' weights are on the CPU, or on the device if its parameters cannot hold CPU tensors.
        Collective over all processes.

        Args:
            folder: the folder of a temporary file for the weights, if there may be no memory for them.
            needed: the parameters that will be read, the same on every process; None for all.
        """
        missing = frozenset(self._missing)

        def store(name: str, values: Mapping[int, torch.Tensor]) -> None:
            if name not in missing:
                return
            try:
                self.put(name, values)
            except RuntimeError:  # parameters of some kinds of devices (those of extensions) cannot hold CPU tensors
                self.put(name, {key: value.to(self.device) for key, value in values.items()})

        wanted = {name: (0,) for name in self._table.names if needed is None or name in needed}
        try:
            transfer(self._holders, wanted, self.mesh, CPU, self.values_of, store, folder=folder)
            self._lists_placeholders = True  # of other processes; saving asks for all keys
            yield
        finally:
            self._lists_placeholders = False
            for name in missing - self._missing:
                self.drop(name)

    @property
    def is_gathered(self) -> bool:
        """Whether a checkpoint is written or loaded, so that this process may have other weights than its stage's."""
        return self._lists_placeholders

    @contextmanager
    def listing_placeholders(self) -> Iterator[None]:
        """Inside, `model.state_dict()` may be called for its keys; the values of missing weights are meaningless."""
        self._lists_placeholders = True
        try:
            with computing_with_nan():
                yield
        finally:
            self._lists_placeholders = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, every process has every weight on its device, for computing without gradients.

        This process's parameters stay as they are, and so does the optimizer's state. Afterwards the other parameters
        are placeholders again. Collective over all processes.
        """
        missing, self._missing = self._missing, set()
        try:
            self._receive(self.device)
            yield
        finally:
            for name in missing:
                self.drop(name)

    def gather(self, device: torch.device) -> None:
        """Gather every weight on every process, on `device`. Collective over all processes."""
        for name, flag in self._flags_of_first_holders().items():
            self._trainable[name] = flag or (name in self._frozen and self._trainable[name])
        self._receive(device)
        for name in self._table.names:
            _move(self._table[name], device)
        self._is_whole_again(device)

    def set_aside(self) -> None:
        """Keep the complete weights and their gradients, for `put_back`. Not collective."""
        self._aside = {name: (values_of(self._table[name]), self._table[name].grad) for name in self._table.names}
        for name in self._table.names:
            self._table[name].grad = None

    def put_back(self) -> None:
        """Make the model complete again with the weights that `set_aside` has kept. Not collective."""
        weights, self._aside = self._aside, {}
        for name, (values, grad) in weights.items():
            set_values(self._table[name], values)
            self._table[name].grad = grad
        self._is_whole_again(next(iter(weights.values()))[0][0].device)

    def synchronise_buffers(self, stages: Sequence[int]) -> None:
        """Give every process the buffers of the process that runs their module. Collective over all processes.

        The values of the first replica are used, as under DDP.

        Args:
            stages: the ranks of the first replica in the order of stages.
        """

        buffers = dict(self._table.model.named_buffers())
        contents = contents_of(buffers)

        def sources() -> Callable[[str], int]:
            changed = [name for name, content in contents.items() if content != self._buffers.get(name)]
            return source_of_buffers(self._table, self._holders, stages, self.mesh.gather_objects(changed))

        differed = synchronise(buffers, self.mesh, sources, contents)
        self._buffers = {**contents, **contents_of({name: buffers[name] for name in differed})}

    # ------------------------------------------------------------------------------------ inside
    def _receive(self, device: torch.device) -> None:
        """Fill placeholders with the weights that other processes hold. Collective over all processes."""

        def store(name: str, values: Mapping[int, torch.Tensor]) -> None:
            set_values(self._table[name], values.values())

        transfer(self._holders, self._everyone, self.mesh, device, self.values_of, store)

    def _is_whole_again(self, device: torch.device) -> None:
        for buffer in self._table.model.buffers():
            buffer.data = buffer.data.to(device)
        for name in self._table.names:
            self._table[name].requires_grad_(self._trainable[name])
        self._missing, self._frozen, self._here, self._flags_here = set(), set(), (), []
        self._buffers = {}
        self._holders = self._everyone
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _skip_missing(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Before a module loads its own parameters: leave out those that are not here."""
        own = module._parameters.items()
        keys = {prefix + key for key, parameter in own if self._names.get(id(parameter)) in self._missing}
        for key in keys:
            state_dict.pop(key, None)
        self._skipped[id(module)] = keys

    def _forgive_missing(self, module: nn.Module, incompatible: Any) -> None:
        skipped = self._skipped.pop(id(module), set())
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in skipped]

    def _begin_state_dict(self, module: nn.Module, *_: Any) -> None:
        """Refuse `model.state_dict()`, or let it read placeholders."""
        if module is not self._table.model:
            return
        if self._missing and not self._lists_placeholders:
            raise ValueError(
                f"{type(module).__name__} is split over the pipeline stages during training, and"
                f" {len(self._missing)} of its parameters are not on this process. Call trainer.save_model() on all"
                " processes, or save after train() has returned. (In place of a save_model of your own that does not"
                " call the Trainer's, override _save: it is called while the main process has every weight.)"
            )
        self._reading.close()
        self._reading.enter_context(computing_with_nan())

    def _end_state_dict(self, module: nn.Module, *_: Any) -> None:
        if module is self._table.model:
            self._reading.close()


def contents_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Content]:
    """The shape, dtype and checksum of tensors, by name."""
    return {name: (tensor.shape, tensor.dtype, _checksum(tensor)) for name, tensor in tensors.items()}


def synchronise(
    tensors: Mapping[str, torch.Tensor],
    mesh: ProcessMesh,
    sources: Callable[[], Callable[[str], int]] = lambda: lambda _: 0,
    contents: Mapping[str, Content] | None = None,
) -> list[str]:
    """Give every process the values of one process, as DDP does. Collective over all processes.

    Only tensors that differ between processes are sent (a head that was initialised without a common seed).

    Args:
        tensors: parameters or buffers, by name. A tensor that some process lacks is left unchanged.
        mesh: all processes of the run.
        sources: returns the rank that provides the values, by name; the same on every process. Called on all
            processes, if tensors differ.
        contents: the tensors' `contents_of`, if they are known.

    Returns:
        The names of the tensors that differed.
    """
    mine = contents_of(tensors) if contents is None else dict(contents)
    if mesh.are_equal(mine):
        return []
    source_of = sources()
    of_sources = mesh.gather_objects({name: known for name, known in mine.items() if source_of(name) == mesh.rank})
    wanted = {name: known for theirs in of_sources for name, known in theirs.items()}
    # for each name that differs here, whether this process has it at all
    differing = mesh.gather_objects({name: name in mine for name, known in wanted.items() if mine.get(name) != known})
    before, after = {}, {}
    for name in wanted:
        ranks = tuple(rank for rank, theirs in enumerate(differing) if name in theirs)
        if ranks and all(differing[rank][name] for rank in ranks):
            before[name], after[name] = (source_of(name),), ranks

    def store(name: str, values: Mapping[int, torch.Tensor]) -> None:
        here, arrived = values_of(tensors[name]), list(values.values())
        if any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in zip(here, arrived, strict=True)):
            return set_values(tensors[name], [value.to(tensors[name].device) for value in arrived])
        with torch.no_grad():  # in place: strides (channels_last) and views of the memory stay
            for mine_here, value in zip(here, arrived, strict=True):
                mine_here.copy_(value)

    transfer(before, after, mesh, CPU, lambda name: dict(enumerate(values_of(tensors[name]))), store)
    return list(after)


def _checksum(tensor: torch.Tensor) -> int:
    checksum = 0
    for value in chain.from_iterable(map(strided_parts, values_of(tensor))):
        checksum = zlib.crc32(as_bytes(value.detach().cpu().contiguous()).numpy().data, checksum)
    return checksum


def _set_flag(parameter: nn.Parameter, flag: bool, shown: bool) -> None:
    """Set `requires_grad`, and the value that users' code sees while the parameter is hidden."""
    parameter.requires_grad_(flag)
    if isinstance(parameter, Hidden):
        parameter.is_trained = shown


def _move(parameter: nn.Parameter, device: torch.device) -> None:
    set_values(parameter, [value.to(device) for value in values_of(parameter)])
    if parameter.grad is not None:
        parameter.grad = parameter.grad.to(device)
