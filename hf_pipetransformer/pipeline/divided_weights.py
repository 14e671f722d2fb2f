"""The weights of a stage, which its replicas divide among them (ZeRO-3, as in FSDP).

At rest each replica has its part of the stage's parameters, and the parameters themselves are placeholders. They are
together

    several stages   during a step, as micro-batches would ask for each layer again and again; afterwards each replica
                     keeps its part of the gradients
    one stage        a layer's while it runs, forward and backward (K = 1; one column a layer)

                     forward    gather 0   gather 1   gather 2   -          the next layer's arrives meanwhile
                                           free 0     free 1                 the last layer's stay for the backward
                     backward              -          gather 1   gather 0
                                           reduce 2   reduce 1   reduce 0    to the replica whose part it is

What autograd would keep of a layer's weights until the backward is gathered again when the backward asks for it
(`torch.autograd.graph.saved_tensors_hooks`); what it would keep of autocast's copies of them is then copied again
(`autocast_copies`). For a layer that is computed again in the backward (gradient checkpointing) they are gathered when
the gradient of its output is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_reduce, reduce  # by name, as in `updated_shards`

from ..model.elsewhere import hide, show
from ..model.nested import tensors_of
from ..model.placeholders import is_wrapper, placeholder
from ..resilience.watchdog import phase
from .autocast_copies import AutocastCopies, Saved, View
from .shards import Span
from .state import WeightState
from .updated_shards import Arriving, Row, UpdatedShards, in_messages

DIVIDED = (
    "Read or change weights before or after train(), call trainer.save_model() or trainer.evaluate() on all processes,"
    " or set replica_sharding='optimizer'"
)


class Layer(NamedTuple):
    """A layer whose weights are gathered when it runs."""

    module: nn.Module
    names: tuple[str, ...]


@dataclass(eq=False)
class _Bundle:
    """Parameters that are gathered together.

    Attributes:
        names: their names.
        rows: the part that each replica has of them.
        shards: brings them together.
        trained: those of them that get a gradient in every step.
        rarely_reached: those that get one only if some replica's samples reach them.
        is_here: whether their values are here, or arriving.
        arriving: what is to be waited for before they are used.
        has_gradients: those of `trained` whose gradients the backward that runs has completed.
    """

    names: tuple[str, ...]
    rows: tuple[Row, ...]
    shards: UpdatedShards
    trained: tuple[str, ...]
    rarely_reached: tuple[str, ...]
    is_here: bool = False
    arriving: Arriving | None = None
    has_gradients: set[str] = field(default_factory=set)

    @property
    def all_trained(self) -> tuple[str, ...]:
        return (*self.trained, *self.rarely_reached)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Bundle:
        return self


@dataclass
class _Reducing:
    """A sum of gradients that is under way to the replica `owner`, in the order of `names`."""

    work: dist.Work
    total: torch.Tensor
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = field(default=())


class DividedWeights:
    """The part that one replica has of a stage's parameters, and the gradients of it.

    Args:
        weights: the model's weights; those of the stage must be here.
        rows: the parameters that each replica has a part of, with the elements, in the order of the group's ranks.
        parts: the parts of this process, by name: the optimizer's own parameters, or plain tensors for what is not
            trained. They get memory of their own.
        layers: the layers whose weights are gathered apart from the others, in the order in which they run; none
            gathers all weights of the stage for a step.
        rarely_reached: parameters that get a gradient only if samples of some replica reach them.
        group: the replicas of the stage.
        gradients_group: the same processes in another group, if there are layers: gradients are sent while weights
            arrive, and not on every process in the same order.
        control: the same processes in a gloo group, if there are layers.
        device: where the weights are computed with.
    """

    def __init__(
        self,
        weights: WeightState,
        rows: Sequence[Row],
        parts: Mapping[str, torch.Tensor],
        layers: Sequence[Layer],
        rarely_reached: frozenset[str],
        group: dist.ProcessGroup,
        gradients_group: dist.ProcessGroup | None,
        control: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        assert gradients_group is not None or not layers
        self.parts = parts
        self._weights, self._table, self._device = weights, weights.table, device
        self._group, self._gradients_group, self._control = group, gradients_group, control
        self._rank = group.rank()
        self._spans: dict[str, Span] = dict(rows[self._rank])
        names = list(dict.fromkeys(name for row in rows for name, _ in row))
        in_layers = {name for layer in layers for name in layer.names}
        of_bundles = [tuple(name for name in names if name not in in_layers), *(layer.names for layer in layers)]
        self._bundles = [self._bundle(of_bundle, rows, rarely_reached) for of_bundle in of_bundles]
        self._bundle_of = {name: bundle for bundle in self._bundles for name in bundle.names}
        self._nothing = {
            name: placeholder(self._table[name], _nothing_like(self._table[name]), device) for name in names
        }
        self._singles = [n for n in self._nothing.values() if n.numel() == 1 and n.is_floating_point()]
        self._depth = 0
        self._is_running = self._in_backward = False
        self._name_at: dict[int, str] = {}  # where the values are that autograd need not keep
        self._copies = AutocastCopies(device.type)
        self._latest = 0  # the layer that has run last in the forward
        self._lowest = 0  # the lowest layer that the backward has come to
        self._num_waiting = 0  # bundles whose gradients have not been sent in the backward that runs
        self._missing: set[str] = set()  # parameters without a gradient here in the backward that runs
        self._had_gradient: set[str] = set()  # whose parts have had one before it
        self._shown: set[str] = set()  # whose gradients some replica has; at rest they are placeholders as well
        self._under_way: list[_Reducing] = []
        self._hooks: list[Any] = []
        for layer, bundle in zip(layers, self._bundles[1:], strict=True):
            self._hooks += [
                layer.module.register_forward_pre_hook(partial(self._before_layer, bundle), prepend=True),
                layer.module.register_forward_hook(partial(self._after_layer, bundle)),
                *(
                    self._table[name].register_post_accumulate_grad_hook(partial(self._gradient_is_here, bundle, name))
                    for name in bundle.trained
                ),
            ]
        for part in parts.values():
            part.data = part.data.clone()
        for bundle in self._bundles:
            bundle.is_here = True  # as a whole, until now
        self._release_all()

    def _bundle(self, names: Sequence[str], rows: Sequence[Row], rarely_reached: frozenset[str]) -> _Bundle:
        inside = frozenset(names)
        of_replicas = tuple(tuple((name, span) for name, span in row if name in inside) for row in rows)
        trained = [name for name in names if self._table[name].requires_grad]
        return _Bundle(
            tuple(names),
            of_replicas,
            UpdatedShards(self._table, of_replicas, self._group),
            tuple(name for name in trained if name not in rarely_reached),
            tuple(name for name in trained if name in rarely_reached),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DividedWeights:
        """What the hooks of a copied module refer to: they do nothing, as no step runs the copy."""
        inert: DividedWeights = object.__new__(type(self))
        inert._is_running = False
        return inert

    @property
    def runs_by_layer(self) -> bool:
        """Whether the weights of a layer are gathered when it runs."""
        return len(self._bundles) > 1

    @property
    def is_together(self) -> bool:
        """Whether all of the stage's parameters have their values."""
        return self._depth > 0

    # ------------------------------------------------------------------------------------ all of them
    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, all parameters of the stage have their values, which code inside may change.

        Collective over the stage's replicas.
        """
        self.gather()
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._release_all()

    def gather(self) -> None:
        """Give all parameters of the stage their values. Collective over the stage's replicas."""
        assert not self._is_running
        if not self._depth:
            self._refuse_writes()
            self._hide_gradients()
            for bundle in self._bundles:
                self._bring(bundle)
        self._depth += 1
        self._note_resting()

    def refuse_writes_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Before each step of the optimizer, check that nobody has written to placeholders. Not collective."""
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._refuse_writes()))

    def close(self) -> None:
        """Remove what has been registered on the model's modules and parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def keep_gradients(self) -> None:
        """Keep this replica's part of the gradients, which are complete, and free the others. Not collective."""
        for bundle in self._bundles:
            for name in bundle.all_trained:
                gradient = self._table[name].grad
                if gradient is not None:
                    self._shown.add(name)
                if gradient is not None and name in self._spans:
                    start, stop = self._spans[name]
                    self._add(name, _dense(gradient).reshape(-1)[start:stop].clone())
                self._table[name].grad = None

    def forget_gradients(self) -> None:
        """Free the gradients of the parts here. Not collective."""
        for part in self.parts.values():
            part.grad = None
        self._hide_gradients()
        self._shown = set()

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        """Add to the gradient of the part here of a parameter."""
        part = self.parts[name]
        gradient = gradient.view(part.shape)
        part.grad = gradient if part.grad is None else part.grad.add_(gradient)

    # ------------------------------------------------------------------------------------ layer by layer
    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, a forward inside `saving` and then a backward (`begin_backward`) may run, which leaves the gradients
        of the parts here. Collective over the stage's replicas, which run the same layers in the same order.
        """
        if self.is_together:
            raise RuntimeError("a step cannot begin while the weights are together")
        self._refuse_writes()
        self._hide_gradients()
        self._is_running, self._in_backward = True, False
        self._num_waiting = self._lowest = len(self._bundles)
        self._latest = 0
        self._missing = set()
        self._had_gradient = {name for name, part in self.parts.items() if part.grad is not None}
        for bundle in self._bundles:
            bundle.has_gradients = set()
        try:
            self._bring(self._bundles[0])
            yield
            while self._num_waiting:
                self._reduce_next()
            self._finish_reductions()
            self._refuse_late_gradients()
            self._drop_what_nobody_reached()
        except BaseException:
            for bundle in self._bundles:
                bundle.arriving = None  # other replicas may not send any more
            raise
        finally:
            self._is_running = self._in_backward = False
            self._under_way = []
            self._copies.end_forward()
            self._release_all()

    def saving(self) -> AbstractContextManager[Any]:
        """Inside, autograd keeps no values of layers' weights."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def begin_backward(self) -> None:
        """From now on, layers are run through backwards. Collective over the stage's replicas."""
        if self._latest != len(self._bundles) - 1:
            raise _ran_differently(f"only {self._latest} of {len(self._bundles) - 1} layers ran")
        self._in_backward = True
        if len(self._bundles) > 2:
            self._begin_to_bring(self._bundles[-2])

    def _before_layer(self, bundle: _Bundle, *_: Any) -> None:
        if not self._is_running:
            return
        if self._in_backward:  # gradient checkpointing runs the layer once more
            self._turn_back_to(bundle)
            return
        index, layers = self._bundles.index(bundle), len(self._bundles) - 1
        if index != self._latest % layers + 1:  # a loss may call the model several times
            raise _ran_differently(f"layer {index} of {layers} ran after layer {self._latest}")
        self._latest = index
        self._bring(bundle)
        following = index + 1
        if following < len(self._bundles):
            self._begin_to_bring(self._bundles[following])
        self._copies.enter_layer()

    def _after_layer(self, bundle: _Bundle, _: nn.Module, __: Any, output: Any) -> None:
        if not self._is_running or self._in_backward:
            return
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, bundle))
        self._copies.leave_layer({name: self._table[name] for name in bundle.names})
        if bundle is not self._bundles[-1]:
            self._release(bundle)

    def _before_backward(self, bundle: _Bundle, _: torch.Tensor) -> None:
        """Gather the weights of a layer that gradient checkpointing will run again, maybe without its hooks."""
        # a tensor that all layers return (T5's position bias) comes when the lowest of them is reached
        if self._is_running and self._bundles.index(bundle) < self._lowest:
            self._turn_back_to(bundle)

    def _turn_back_to(self, bundle: _Bundle) -> None:
        """The backward has come to a layer."""
        index = self._bundles.index(bundle)
        if not index:
            return
        if not self._in_backward:
            raise _ran_differently("the loss computes gradients itself")
        if index < self._lowest:
            self._lowest = index
            self._reduce_what_is_complete()
        if bundle.is_here and bundle.arriving is None:
            return
        self._bring(bundle)
        for later in self._bundles[index + 1 :]:
            self._release(later)
        if index > 1:
            self._begin_to_bring(self._bundles[index - 1])

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | View | Saved:
        if tensor.layout is not torch.strided or is_wrapper(tensor):
            return tensor
        place = tensor.untyped_storage().data_ptr()
        name = self._name_at.get(place)
        if name is None or tensor.dtype != self._table[name].dtype:
            return self._copies.save(tensor)
        with torch._C.DisableTorchFunctionSubclass():  # it may be hidden again
            has_moved = self._table[name].untyped_storage().data_ptr() != place
        if has_moved:  # a forward has put other values there
            return tensor
        return View.of(name, tensor)

    def _unpack(self, saved: torch.Tensor | View | Saved) -> torch.Tensor:
        content = saved.content if isinstance(saved, Saved) else saved
        if isinstance(content, torch.Tensor):
            return content
        self._turn_back_to(self._bundle_of[content.name])
        return self._copies.again(content, self._table[content.name])

    # ------------------------------------------------------------------------------------ values
    def _bring(self, bundle: _Bundle) -> None:
        """Give parameters their values. Collective over the stage's replicas if they are neither here nor arriving."""
        self._begin_to_bring(bundle)
        if bundle.arriving is not None:
            with phase("weights"):
                bundle.arriving.finish()
            bundle.arriving = None

    @torch.no_grad()
    def _begin_to_bring(self, bundle: _Bundle) -> None:
        if bundle.is_here:
            return
        for name in bundle.names:
            parameter = self._table[name]
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
            if name in self._spans:
                start, stop = self._spans[name]
                value.view(-1)[start:stop] = self.parts[name].detach().view(-1)
            show(parameter)
            parameter.data = value
            if bundle is not self._bundles[0]:
                self._name_at[value.untyped_storage().data_ptr()] = name
        bundle.is_here, bundle.arriving = True, bundle.shards.begin()

    @torch.no_grad()
    def _release(self, bundle: _Bundle) -> None:
        """Free the values. A forward may have changed them (a bound on its weights): each replica keeps its part."""
        if not bundle.is_here:
            return
        if bundle.arriving is not None:
            bundle.arriving.finish()
        for name in bundle.names:
            parameter = self._table[name]
            if name in self._spans:
                start, stop = self._spans[name]
                self.parts[name].detach().view(-1).copy_(parameter.detach().reshape(-1)[start:stop])
            self._name_at.pop(parameter.untyped_storage().data_ptr(), None)
            parameter.data = self._nothing[name]
            hide(parameter, f"{name} is divided among the replicas of its stage (replica_sharding='full')", DIVIDED)
        self._copies.forget(bundle.names)
        bundle.is_here, bundle.arriving = False, None

    def _release_all(self) -> None:
        for bundle in self._bundles:
            self._release(bundle)
        self._note_resting()

    def _note_resting(self) -> None:
        self._weights.resting = frozenset() if self.is_together else frozenset(self._bundle_of)
        for name in self._shown & self._weights.resting:
            self._table[name].grad = self._nothing[name]
        self._versions = self._versions_here()

    def _hide_gradients(self) -> None:
        for name in self._shown:
            self._table[name].grad = None

    def _versions_here(self) -> int:
        return sum(self._table[name]._version for name in self._bundle_of)

    def _refuse_writes(self) -> None:
        """Refuse what user code has written to placeholders, which would be lost.

        Raises:
            ValueError: it has written to one of them, or to its gradient.
        """
        if self.is_together:
            return
        is_other = any(self._table[name].data_ptr() != nothing.data_ptr() for name, nothing in self._nothing.items())
        is_other |= any(not bool(single.isinf()) for single in self._singles)
        if is_other or self._versions_here() != self._versions:
            raise ValueError(
                "A callback wrote to parameters of the model, but with replica_sharding='full' these are placeholders"
                " between the steps. Change weights before or after train(), or set replica_sharding='optimizer'."
            )
        gradients = {name: self._table[name].grad for name in self._shown}
        if any(g is None or g.data_ptr() != self._nothing[name].data_ptr() for name, g in gradients.items()):
            raise ValueError(
                "A callback or your training_step changed gradients of the model's parameters, but with"
                " replica_sharding='full' these are placeholders. Change those of the parameters in"
                " optimizer.param_groups, clear all with the zero_grad() of the model that training_step gets, or set"
                " replica_sharding='optimizer'."
            )

    # ------------------------------------------------------------------------------------ gradients
    def _gradient_is_here(self, bundle: _Bundle, name: str, _: torch.Tensor) -> None:
        if not self._is_running:
            return
        bundle.has_gradients.add(name)
        self._reduce_what_is_complete()

    def _reduce_what_is_complete(self) -> None:
        """Send what is complete, in the same order on all replicas: from the last layer to the first.

        What is outside of layers is sent at the end.
        """
        while self._num_waiting > 1 and self._has_all_gradients(self._num_waiting - 1):
            self._reduce_next()

    def _has_all_gradients(self, index: int) -> bool:
        if index > self._lowest:  # the backward has come to a lower layer: no more of them will come
            return True
        bundle = self._bundles[index]
        return not bundle.rarely_reached and len(bundle.has_gradients) == len(bundle.trained)

    @torch.no_grad()
    def _reduce_next(self) -> None:
        """Begin to send the next bundle's gradients to the replicas whose parts they are of; wait for those before."""
        self._num_waiting -= 1
        bundle = self._bundles[self._num_waiting]
        self._finish_reductions()
        names = bundle.all_trained
        self._missing.update(name for name in names if self._table[name].grad is None)
        gradients: dict[str, torch.Tensor] = {}
        for name in names:
            parameter = self._table[name]
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(self._nothing[name])
            gradients[name] = _dense(gradient).reshape(-1)
        for replica, row in enumerate(bundle.rows):
            of_dtypes: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
            for name, (start, stop) in row:
                if name in names and stop > start:
                    gradient = gradients[name][start:stop]
                    of_dtypes.setdefault(gradient.dtype, []).append((name, gradient))
            for pieces in of_dtypes.values():
                for indices in in_messages([gradient.nbytes for _, gradient in pieces]):
                    self._reduce([pieces[index] for index in indices], replica)
        for name in names:
            self._table[name].grad = None

    def _reduce(self, message: Sequence[tuple[str, torch.Tensor]], replica: int) -> None:
        """Begin to average some gradients, on the replica whose parts they are of. They may be overwritten."""
        pieces = [gradient for _, gradient in message]
        total = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        work = reduce(total.div_(self._group.size()), group=self._gradients_group, group_dst=replica, async_op=True)
        assert work is not None
        reducing = _Reducing(work, total)
        if replica == self._rank:
            reducing.names = tuple(name for name, _ in message)
            reducing.sizes = tuple(piece.numel() for piece in pieces)
        self._under_way.append(reducing)

    def _finish_reductions(self) -> None:
        for reducing in self._under_way:
            reducing.work.wait()
            if len(reducing.names) == 1:
                self._add(reducing.names[0], reducing.total.clone())  # without the rest of the whole gradient
            elif reducing.names:
                for name, gradient in zip(reducing.names, reducing.total.split(reducing.sizes), strict=True):
                    self._add(name, gradient)
        self._under_way = []

    def _refuse_late_gradients(self) -> None:
        """Refuse a backward that has computed gradients after they were sent, which would be lost.

        Raises:
            ValueError: some parameter has such a gradient.
        """
        for bundle in self._bundles:
            for name in bundle.all_trained:
                if self._table[name].grad is not None:
                    raise _ran_differently(f"{name} got a gradient after that of its layer was complete")

    def _drop_what_nobody_reached(self) -> None:
        """Parameters that no replica's samples have reached (an expert's) have no gradient, as on one process."""
        names = [name for bundle in self._bundles for name in bundle.all_trained]
        has = torch.tensor([float(name not in self._missing) for name in names])
        all_reduce(has, group=self._control)
        for name, count in zip(names, has.tolist(), strict=True):
            if count:
                self._shown.add(name)
            if not count and name in self.parts and name not in self._had_gradient:
                self.parts[name].grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the parts here, by the parameters' names in the model."""
        return {name: part.grad for name, part in self.parts.items() if part.grad is not None}

    @property
    def group(self) -> dist.ProcessGroup:
        """The replicas of the stage."""
        return self._group


def _nothing_like(parameter: torch.Tensor) -> float:
    """What a placeholder contains, so that nobody reads a plausible number."""
    if not parameter.is_floating_point():
        return 0.0
    # a single element can be written to, and bounding it (`logit_scale.data.clamp_`) would leave NaN as it is
    return math.nan if parameter.numel() > 1 else math.inf


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _ran_differently(what: str) -> ValueError:
    return ValueError(
        "With replica_sharding='full' all replicas gather the layers' weights in the same order, once forward and"
        f" once backward for each batch, but {what}. Set replica_sharding='optimizer'."
    )
