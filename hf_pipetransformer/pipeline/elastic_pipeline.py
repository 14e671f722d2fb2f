"""The permanent handle: a model as a pipeline of K stages x R replicas.

The Trainer's loop knows an `ElasticPipeline` as its `model`. What is inside can be built anew (another plan, whole
again); the object, the optimizer and the user's model stay the same objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from ..cache.activation_cache import ActivationCache
from ..cache.content_keys import KEYS_NAME, named_inputs
from ..model.frozen_prefix import FreezableLayers, squared_norms
from ..model.layer_range import tensors_of
from ..model.layer_stack import LayerStack
from ..model.left_as_found import left_as_found
from ..model.micro_batch import Batch, naming_long_rows, on_device, split_batch
from ..model.token_slices import Windows
from ..planning.plan import PipelinePlan
from ..randomness import generators_kept, seeded
from ..resilience.progress import PROGRESS, phase
from .mesh import ProcessMesh
from .microbatch_trials import MicrobatchTrials
from .schedule import PipelineScheduler
from .shared_batch import BatchChannel
from .slice_choice import OnPlan, SliceChooser, TokenSlices
from .sparse_embeddings import SparseEmbeddings
from .stage import FIRST, CarriedTensor, LossFunction, ShapeBook, StageModule, as_carry
from .state import Holders, OptimizerState, WeightState, WholeParameter, exchange, moves_between, synchronise_buffers
from .token_schedule import Neighbours, TokenScheduler

WORTH_A_TRIAL = 0.15
"""Numbers of micro-batches that are predicted to take longer than the best by more than this share are not tried."""

BUCKET_BYTES = 25 * 2**20
"""Of gradients in one message, as DDP's; where it is not DDP that sends them."""

WrapReplicas = Callable[[StageModule, dist.ProcessGroup, bool], DistributedDataParallel]
"""Wraps a stage in DDP over a group; the flag says whether some of its parameters may stay without a gradient."""


@dataclass(frozen=True)
class Slicing:
    """How sequences are cut along their tokens where there are several stages.

    Attributes:
        token_slices: as the user asked.
        windows: of the model's layers, from `study_slicing`.
        on_plan: told how each new shape of batch is cut, and what that is predicted to take.
    """

    token_slices: TokenSlices
    windows: Windows
    on_plan: OnPlan


@dataclass(frozen=True)
class Transformation:
    """What going over to another plan took, on one process.

    Attributes:
        before: the plan that was in force.
        after: the plan that is.
        seconds: by phase: freeze, move, drop, build.
        bytes_moved: received by this process.
    """

    before: PipelinePlan
    after: PipelinePlan
    seconds: Mapping[str, float]
    bytes_moved: int


class ElasticPipeline(nn.Module):
    """One process's part in running a model by a plan.

    Its only child is the current stage: `parameters()`, `zero_grad()`, `train()` and `no_sync()` act on it.

    Args:
        stack: the units of the model, which is complete on every process.
        loss_of: computes a micro-batch's part of the loss, on the last stage.
        mesh: the processes.
        device: of this process.
        wrap_replicas: makes the DDP wrapper.
        freezable: what freezing means for the model; None: it is never frozen.
    """

    stack: LayerStack
    stage: StageModule | None
    _replicated: DistributedDataParallel | None

    def __init__(
        self,
        stack: LayerStack,
        loss_of: LossFunction,
        mesh: ProcessMesh,
        device: torch.device,
        wrap_replicas: WrapReplicas,
        freezable: FreezableLayers | None = None,
    ) -> None:
        super().__init__()
        self.__dict__["stack"] = stack  # not registered: the stage registers what is here
        self.__dict__["_replicated"] = None
        self.stage: StageModule | None = None
        self.plan: PipelinePlan | None = None
        self.mesh = mesh
        self.device = device
        self.weights = WeightState(stack.table, mesh)
        self._loss_of = loss_of
        self._wrap_replicas = wrap_replicas
        self.freezable = freezable
        self.slicing: Slicing | None = None
        """Cut sequences along their tokens as well, from the next plan on."""
        self.cache: ActivationCache | None = None
        self.parks = device.type != "cpu"
        """Whether cached layers' weights leave the device; on the CPU they would gain nothing."""
        self._optimizer: OptimizerState | None = None
        self._scheduler: PipelineScheduler | None = None
        self._trials: MicrobatchTrials | None = None
        self._channel: BatchChannel | None = None
        self._token_scheduler: TokenScheduler | None = None
        self._sparse_embeddings: SparseEmbeddings | None = None
        self._gradients_synchronise = True
        self._set_aside: dict[str, WholeParameter] | None = None
        self._group: dist.ProcessGroup | None = None  # of this pipeline
        self._control: dist.ProcessGroup | None = None  # the same processes, on the CPU
        self._shared_groups: list[tuple[list[str], dist.ProcessGroup | None]] = []
        self._shared_are_summed = False  # over the stages: their gradients, as the last step left them
        self._replicated_names: list[str] = []  # with gradients to be averaged over replicas, where DDP does not
        self._rarely_reached: list[str] = []  # of these, where a replica has one
        self._copies: dict[str, int] = {}  # shared parameter -> stages that hold it

    # ------------------------------------------------------------------------------------ layout
    @property
    def model(self) -> nn.Module:
        """The user's model. While a plan is in force, the parameters of other stages are placeholders."""
        return self.stack.model

    @property
    def is_placed(self) -> bool:
        return self.plan is not None

    @property
    def current_plan(self) -> PipelinePlan:
        assert self.plan is not None, "place() first"
        return self.plan

    @property
    def num_stages(self) -> int:
        return self.current_plan.pipeline_parallel_size

    @property
    def num_replicas(self) -> int:
        return self.current_plan.data_parallel_size

    @property
    def stage_index(self) -> int:
        return self.current_plan.stage_of(self.mesh.rank)

    @property
    def replica_index(self) -> int:
        return self.current_plan.replica_of(self.mesh.rank)

    def place(self, plan: PipelinePlan, keep_weights_aside: bool = False) -> None:
        """Take the role that `plan` has for this process. Collective over all processes.

        Args:
            plan: the same on every process.
            keep_weights_aside: keep the complete weights where they are, for `put_back`; for an evaluation, which
                does not change them.
        """
        assert not self.is_placed, "the model must be whole"
        self.weights.read_flags()
        if keep_weights_aside:
            self._set_aside = self.weights.set_aside()
        elif self._optimizer is not None:
            self._bring_optimizer_state(self._optimizer, holders_under(plan, self.stack))
        self._freeze(plan)
        self.plan = plan
        self.weights.keep_only(self._names_of(plan), self.device)
        self.stack.runner.install()
        self._build(plan, takes_optimizer=not keep_weights_aside)

    def _bring_optimizer_state(self, optimizer: OptimizerState, holders: Holders) -> None:
        """What an earlier training has left where its last plan had the parameters. Collective over all processes."""
        before = optimizer.holders()
        moves = moves_between(before, {name: holders[name] for name in before})
        exchange(moves, self.stack.table, self.weights, optimizer, self.mesh, self.device)

    def transform(self, plan: PipelinePlan) -> Transformation:
        """Go over to another plan, between two optimizer steps. Collective over all processes.

        1. Freeze: the newly frozen parameters lose gradient and optimizer state.
        2. Move: parameters and their optimizer state go to the ranks that hold them under the new plan.
        3. Drop: what this process holds no more becomes a placeholder.
        4. Build: stage, groups, DDP and schedule. The optimizer and its groups stay, with other parameters in them.

        The Trainer's loop, the learning rate schedule and the gradient scaler notice nothing.

        Args:
            plan: the same on every process; it may have fewer or more stages. Frozen units stay frozen.

        Returns:
            What it took, on this process.
        """
        before = self.current_plan
        self.weights.unpark()
        self.weights.follow_flags(self.holders())
        self.synchronise_buffers()
        assert plan.num_frozen_layers >= before.num_frozen_layers, "frozen layers do not thaw"
        seconds: dict[str, float] = {}
        with _timed_phase("freeze", seconds):
            self._freeze(plan)
            if self._optimizer is not None:
                self._optimizer.keep_what_is_here()
            self._unbuild()
        with _timed_phase("move", seconds):
            moves = moves_between(self.holders(), holders_under(plan, self.stack))
            moved = exchange(moves, self.stack.table, self.weights, self._optimizer, self.mesh, self.device)
        self.plan = plan
        with _timed_phase("drop", seconds):
            self.weights.keep_only(self._names_of(plan), self.device)
        with _timed_phase("build", seconds):
            self._build(plan, takes_optimizer=True)
        PROGRESS.forget_pace()
        return Transformation(before, plan, seconds, moved)

    def follow_flags(self) -> None:
        """Train what the user's code has set `requires_grad` for, and nothing else. Collective over all processes.

        Between two passes; the plan stays in force.

        Raises:
            ValueError: parameters that a freeze policy has frozen require a gradient again.
        """
        plan = self.current_plan
        self.weights.unpark()
        self.weights.follow_flags(self.holders())
        self._unbuild()
        self.weights.keep_only(self._names_of(plan), self.device)
        self._build(plan, takes_optimizer=True)
        PROGRESS.forget_pace()

    def _freeze(self, plan: PipelinePlan) -> None:
        if plan.num_frozen_layers:
            assert self.freezable is not None
            self.weights.freeze(self.freezable.frozen(plan.num_frozen_layers))

    def _names_of(self, plan: PipelinePlan) -> frozenset[str]:
        """The parameters that this process holds under a plan."""
        stage = plan.stage_of(self.mesh.rank)
        return self.stack.owned(*plan.stage_bounds[stage : stage + 2])

    def _build(self, plan: PipelinePlan, takes_optimizer: bool) -> None:
        """This process's stage of a plan whose parameters are here. Collective over all processes."""
        start, stop = plan.stage_bounds[self.stage_index : self.stage_index + 2]
        self.stage = StageModule(self.stack, start, stop, self._loss_of, self.device)
        self.stage.cache = self.cache
        self.stack.runner.restrict_to(range(start, stop) if self.num_stages > 1 else None)
        self.stack.runner.freeze(plan.num_frozen_layers)
        if self._optimizer is not None and takes_optimizer:
            self._optimizer.keep_what_is_here()
        self._connect(self.stage, plan)
        self.train(self.training)
        self.park_cached_layers()

    def _unbuild(self) -> None:
        self.stage, self._scheduler, self._trials, self._token_scheduler = None, None, None, None
        self._channel = None
        if self._sparse_embeddings is not None:
            self._sparse_embeddings.remove()
            self._sparse_embeddings = None
        self.__dict__["_replicated"] = None

    def _connect(self, stage: StageModule, plan: PipelinePlan) -> None:
        """Groups, the DDP wrapper over replicas, and the schedule. Collective over all processes."""
        groups = self.mesh.layout(self.num_stages)
        self._group, self._control = groups.pipeline, groups.pipeline_control
        shared = self._shared_by_owners()
        self._copies = {name: len(stages) for stages, names in shared.items() for name in names}
        self._shared_groups = [
            (
                names,
                self.mesh.subgroup([[plan.ranks_of_pipeline(r)[s] for s in stages] for r in range(self.num_replicas)]),
            )
            for stages, names in shared.items()
        ]
        trainable = [name for name in stage.names if self.stack.table[name].requires_grad]
        module: nn.Module = stage
        without_gradient = self.stack.unreached | (self.stack.only_returned if stage.is_last else frozenset())
        slices_tokens = self.slicing is not None and groups.pipeline is not None
        if slices_tokens:
            self._replicated_names = [name for name in trainable if name not in without_gradient]
            self._rarely_reached = [name for name in trainable if name in without_gradient]
        elif groups.replicas is not None and trainable:
            may_be_unused = not without_gradient.isdisjoint(trainable)
            module = self._wrap_replicas(stage, groups.replicas, may_be_unused)
            self.__dict__["_replicated"] = module  # not registered: its child is the stage
        if groups.pipeline is not None:
            first = plan.ranks_of_pipeline(self.replica_index)[0]
            self._channel = BatchChannel(first, groups.pipeline_control, groups.pipeline, self.device)
            if module is stage and self.device.type == "cpu":
                self._sparse_embeddings = SparseEmbeddings(self.model, list(stage.parameters()))
            shape_book = ShapeBook(stage, self._receive_shapes, self._send_shapes)
            if slices_tokens:
                self._token_scheduler = self._make_token_scheduler(stage, plan, shape_book)
                return
            self._scheduler = PipelineScheduler(
                stage, module, self.stage_index, self.num_stages, groups.pipeline, shape_book, plan.schedule
            )
            self._trials = MicrobatchTrials(
                partial(plan.promising_microbatches, within=WORTH_A_TRIAL), self._slowest_stage, self._synchronise
            )

    @property
    def settled_microbatches(self) -> dict[tuple[int, int], int]:
        """Of this pipeline under the plan in force, where M was tried: (rows, elements of a row) -> M."""
        return self._trials.settled if self._trials is not None else {}

    def settle_microbatches(self, settled: Mapping[tuple[int, int], int]) -> None:
        """Go on with what an earlier job has settled under this plan."""
        if self._trials is not None:
            self._trials.settle(settled)

    def _make_token_scheduler(self, stage: StageModule, plan: PipelinePlan, shape_book: ShapeBook) -> TokenScheduler:
        """Collective over all processes."""
        slicing, index = self.slicing, self.stage_index
        assert slicing is not None
        ranks = plan.ranks_of_pipeline(self.replica_index)
        # the dynamic program chooses parts of rows as well, unless the user has
        is_free = slicing.token_slices == "auto" and plan.num_microbatches is None
        chooser = SliceChooser(
            slicing.token_slices,
            slicing.windows,
            plan.num_microbatches_for,
            self._of_each_stage,
            slicing.on_plan,
            chooses_parts=is_free,
        )
        neighbours = Neighbours(
            ranks[index - 1] if index > 0 else None,
            ranks[index + 1] if index + 1 < len(ranks) else None,
            self._group,
            self.mesh.second_pipeline_group(self.num_stages),
        )
        neighbours.connect(self.device)
        return TokenScheduler(stage, index, self.num_stages, neighbours, shape_book, slicing.windows, chooser)

    def _of_each_stage(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.num_stages
        dist.all_gather_object(everyone, mine, group=self._control)
        return everyone

    def _slowest_stage(self, seconds: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self._control)
        return seconds

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def put_back(self) -> None:
        """After an evaluation: the complete weights that `place` has set aside. No communication."""
        assert self._set_aside is not None
        weights, self._set_aside = self._set_aside, None
        self._leave_plan()
        self.weights.put_back(weights)

    def gather(self, device: torch.device) -> None:
        """Make the model whole again on every process. Collective over all processes.

        Args:
            device: where the weights go.
        """
        self.synchronise_buffers()
        holders = self.holders()
        self._leave_plan()
        self.weights.restore(holders, device)

    def holders(self) -> Holders:
        """The ranks that hold each parameter under the plan in force."""
        return holders_under(self.current_plan, self.stack)

    def synchronise_buffers(self) -> None:
        """Give every process the buffers of the process that runs their module. Collective over all processes.

        The first replica's count, as under DDP. All processes have all buffers, but a callback may compute them from
        weights (a pruning mask), and of these a process has its own.
        """
        holders = self.holders()

        def source_of(buffer: str) -> int:
            module = buffer.rpartition(".")[0]
            while module:
                for name, ranks in holders.items():
                    if any(alias.startswith(module + ".") for alias in self.stack.table.aliases[name]):
                        return ranks[0]
                module = module.rpartition(".")[0]
            return 0

        synchronise_buffers(self.model, self.mesh, source_of)

    def _leave_plan(self) -> None:
        self.weights.unpark()
        self.cache = None  # the weights may change from here on
        self.stack.runner.restrict_to(None)
        self.stack.runner.remove()
        self._unbuild()
        self.plan = None

    def _shared_by_owners(self) -> dict[tuple[int, ...], list[str]]:
        """Trainable parameters of several stages, by the stages that hold them."""
        by_stages: dict[tuple[int, ...], list[str]] = {}
        for name, stages in self.stack.shared(self.current_plan.stage_bounds).items():
            if self.weights.is_trainable(name):
                by_stages.setdefault(stages, []).append(name)
        return by_stages

    def use_cache(self, cache: ActivationCache | None) -> None:
        """From now on take frozen layers' outputs from a cache, or no longer."""
        self.cache = cache
        if self.stage is not None:
            self.stage.cache = cache

    def park_cached_layers(self) -> None:
        """Free the device of the weights that only cached layers need.

        The first forward that runs a cached layer, whoever asks for it, brings them back.
        """
        plan, stage = self.current_plan, self.stage
        if not self.parks or stage is None or stage.start or not plan.num_cached_layers:
            return
        assert self.freezable is not None
        needed = self.stack.owned(plan.num_cached_layers, stage.stop)
        if stage.is_last:
            needed |= self.freezable.head
        runs_cached_layers = lambda: self.stack.runner.start_of_pass < plan.num_cached_layers  # noqa: E731
        self.weights.park(self.freezable.frozen(plan.num_cached_layers) - needed, runs_cached_layers)

    # ------------------------------------------------------------------------------------ the module's face
    def train(self, mode: bool = True) -> ElasticPipeline:
        super().train(mode)  # of the stage, which sets the model's
        if self.stage is None:
            self.model.train(mode)
        return self

    def forward(self, *positional: Any, **batch: Any) -> Any:
        """The model's own, where a `training_step` or `prediction_step` of the user's calls what it was given.

        Without gradients each stage of a pipeline gets the outputs for its own batch (`predict`); this is collective
        over the pipeline.

        Raises:
            ValueError: where gradients are computed one stage of several has no output; nor would DDP see it.
        """
        is_trained = torch.is_grad_enabled() and self.training
        if self.is_placed and self.num_stages > 1:
            if not is_trained:
                inputs = dict(named_inputs(self.model, positional, batch))
                to_device = partial(on_device, device=self.device)
                return self.predict(inputs, to_device, lambda rows: self.model(**rows))
            raise ValueError(
                "The model is spread over several stages: in training one alone has no output. Call"
                " super().training_step() in a training_step of your own and put your loss into compute_loss; or set"
                " pipeline_parallel_size=1."
            )
        if self._replicated is not None and is_trained:
            raise ValueError(
                f"The gradients of {self.num_replicas} replicas are averaged where the Trainer's own training_step"
                " runs: call super().training_step() and put your loss into compute_loss, or train in one process."
            )
        if not self.is_placed or not self.stack.runner.num_frozen:
            return self.model(*positional, **batch)
        with self.stack.runner.to_the_end(0, None):
            return self.model(*positional, **batch)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are accumulated and not yet reduced over the replicas."""
        self._gradients_synchronise = False
        try:
            yield
        finally:
            self._gradients_synchronise = True

    # ------------------------------------------------------------------------------------ training
    def share(self, mine: Any) -> Any:
        """The first stage's value on all stages: the batch that all train on. Collective over the pipeline."""
        return mine if self._channel is None else self._channel.share(mine)

    def prepare(self, batch: Batch) -> None:
        """Settle how a batch of a new shape is cut, which may run parts of it. Collective over the pipeline."""
        if self._token_scheduler is not None:
            self._token_scheduler.parts_of(batch)

    def step(self, batch: Batch, keeps_received: bool = False) -> list[Sequence[torch.Tensor]]:
        """Forward and backward of this pipeline's slice of a batch. Collective over all processes.

        Gradients are complete afterwards, unless inside `no_sync`: summed over micro-batches, and over the stages
        for shared parameters; averaged over replicas, as DDP does.

        Args:
            batch: keyword arguments of the model, on the device; the same on all stages of a pipeline.
            keeps_received: ask for what is returned.

        Returns:
            For each micro-batch what the last stage has received, if that was asked for and this is the last of
            several stages that run whole rows; else nothing.
        """
        stage = self.stage
        assert stage is not None
        stage.received = {} if keeps_received else None
        if self._shared_are_summed:
            self._keep_sums_once()
        if self._token_scheduler is not None:
            self._token_scheduler.step(batch)
            if self._sparse_embeddings is not None:
                self._sparse_embeddings.finish_step()
            if self._gradients_synchronise:
                self._average_over_replicas()
        elif self._scheduler is None:
            self._step_alone(stage, batch)
        else:
            assert self._trials is not None
            with self._trials.number_for(batch) as count:
                self._scheduler.step(batch, count, self._gradients_synchronise)
            if self._sparse_embeddings is not None:
                self._sparse_embeddings.finish_step()
        if self._gradients_synchronise:
            self._reduce_shared_gradients()
        received, stage.received = stage.received or {}, None
        return [received[index] for index in sorted(received)] if self._scheduler is not None else []

    def losses_of_parts_and_whole(
        self, batch: Batch, received: Sequence[Sequence[torch.Tensor]], part_of_loss: LossFunction
    ) -> list[torch.Tensor]:
        """On the last stage, of a batch that has just run: each micro-batch's loss, and the whole batch's. Not
        collective.

        Args:
            batch: the batch.
            received: what `step` has returned for it.
            part_of_loss: what rows of the batch add to the loss.
        """
        stage = self.stage
        assert stage is not None and stage.is_last and self._scheduler is not None
        inputs = {name: value for name, value in batch.items() if name != KEYS_NAME}
        together = [inputs], [self._scheduler.joined(batch, received)]
        losses = []
        try:
            for batches, values in ((split_batch(inputs, len(received)), received), together):
                stage.micro_batches = batches
                for rows, arrived in zip(batches, values, strict=True):
                    with stage.running_to_the_end(arrived, rows) as mine:
                        losses.append(part_of_loss(self.model, mine))
        finally:
            stage.micro_batches = ()
        return losses

    @property
    def missing_parameters(self) -> dict[str, nn.Parameter]:
        """Those that other stages hold, by name."""
        table = self.stack.table
        return {name: table[name] for name in table.names if not self.weights.is_here(name)}

    def _step_alone(self, stage: StageModule, batch: Batch) -> None:
        """K = 1: no schedule; it costs what the stock Trainer costs."""
        stage.micro_batches = (batch,)
        if self._replicated is None:
            stage(index=FIRST).backward()
        else:
            with nullcontext() if self._gradients_synchronise else self._replicated.no_sync():
                self._replicated(index=FIRST).backward()
        stage.micro_batches = ()

    def _reduce_shared_gradients(self) -> None:
        """Sum the gradients of shared parameters over the stages that hold them, in one message per set of owners."""
        for names, group in self._shared_groups:
            if group is None:
                continue
            self._sum_gradients(names, group)
        self._shared_are_summed = bool(self._shared_groups)

    def _keep_sums_once(self) -> None:
        """Where gradients go on accumulating on their sums over the stages, one stage keeps them: they count once."""
        for names, group in self._shared_groups:
            if group is not None and dist.get_rank(group) > 0:
                for name in names:
                    self.stack.table[name].grad = None
        self._shared_are_summed = False

    def _average_over_replicas(self) -> None:
        """What DDP does, after the step: it cannot, where the first forward's backward comes last."""
        group = self.mesh.layout(self.num_stages).replicas
        if group is None:
            return
        for names in self._buckets([*self._replicated_names, *self._reached_somewhere(group)]):
            self._sum_gradients(names, group, 1 / self.num_replicas)

    def _reached_somewhere(self, group: dist.ProcessGroup) -> list[str]:
        """Of the parameters that the first rows did not reach those that a replica's rows have: an expert's."""
        if not self._rarely_reached:
            return []
        has = [self.stack.table[name].grad is not None for name in self._rarely_reached]
        counts = torch.tensor(has, dtype=torch.float32, device=self.device)
        dist.all_reduce(counts, group=group)
        return [name for name, count in zip(self._rarely_reached, counts.tolist(), strict=True) if count]

    def _buckets(self, names: Sequence[str]) -> Iterator[list[str]]:
        """Parameters of one type that together have about `BUCKET_BYTES`."""
        bucket: list[str] = []
        size = 0
        for name in names:
            parameter = self.stack.table[name]
            if bucket and (size > BUCKET_BYTES or parameter.dtype != self.stack.table[bucket[0]].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append(name)
            size += parameter.nbytes
        if bucket:
            yield bucket

    def _sum_gradients(self, names: Sequence[str], group: dist.ProcessGroup, factor: float = 1.0) -> None:
        """All-reduce the gradients of some parameters in one message."""
        parameters = [self.stack.table[name] for name in names]
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters])
        dist.all_reduce(flat, group=group)
        if factor != 1.0:
            flat *= factor
        for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = total.view_as(parameter)

    def clip_grad_norm(
        self, max_norm: float, unscale: Callable[[], None] | None = None, loss_scale: float = 1.0
    ) -> torch.Tensor:
        """Clip by the norm of the whole model's gradient, shared parameters counted once.

        Collective over the pipeline. Under a gradient scaler, a gradient that is not finite on any stage becomes
        infinite on every stage, so that the step is skipped everywhere.

        Args:
            max_norm: bound on the norm; infinite: only compute it.
            unscale: of the gradient scaler: divides the gradients here by the loss scale, and looks for infinite ones.
            loss_scale: of the gradient scaler.

        Returns:
            The norm before clipping, 0-dimensional, the same on every process.
        """
        assert self.stage is not None
        if self.num_stages == 1:
            if unscale is not None:
                unscale()
            return nn.utils.clip_grad_norm_(list(self.stage.parameters()), max_norm)
        gradients = self.stage.gradients()
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(list(gradients.values()))).double()
            copies = torch.tensor([self._copies.get(n, 1) for n in gradients], device=self.device)
            square = (norms.square() / copies).sum()
        dist.all_reduce(square, group=self.mesh.layout(self.num_stages).pipeline)
        if unscale is not None:
            if gradients and not torch.isfinite(square):
                first = next(iter(gradients.values()))
                first[(0,) * first.dim()] = float("inf")
            if not gradients and self._optimizer is not None:
                self._optimizer.stand_in(0.0 if torch.isfinite(square) else float("inf"))
            unscale()
        norm = (square.sqrt() / loss_scale).float()
        if gradients:  # even if the bound is infinite: where the norm is, too, all becomes NaN, as on one process
            torch._foreach_mul_(list(gradients.values()), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def squared_gradient_norms(self, loss_scale: float = 1.0) -> torch.Tensor:
        """For each unit the square of its gradient's 2-norm, before clipping, the same on every process.

        Collective over the pipeline.

        Args:
            loss_scale: of the gradient scaler, if gradients are still scaled.

        Returns:
            `[L]`, float64, on the CPU; 0 for units without gradient.
        """
        assert self.freezable is not None and self.stage is not None
        gradients = self.stage.gradients()
        here = range(self.stage.start, self.stage.stop)  # a parameter that stages share counts in its own unit's
        inside = [names if unit in here else () for unit, names in enumerate(self.freezable.inside)]
        squares = squared_norms(inside, gradients, self.device)
        if self._group is not None:
            dist.all_reduce(squares, group=self._group)
        return (squares / loss_scale**2).cpu()

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer over the whole model's parameters update those that are here, now and after `place`."""
        self._optimizer = OptimizerState(unwrapped(optimizer), self.stack.table, self.weights, self.mesh)

    def release_optimizer(self) -> None:
        """Give back the optimizer that was adopted, for another pipeline of the model to adopt. Not collective."""
        if self._optimizer is not None:
            self._optimizer.release()
            self._optimizer = None

    def updates_with(self, optimizer: Any) -> bool:
        """Whether this optimizer is the one that was adopted last, with or without Accelerate's wrapper."""
        return self._optimizer is not None and self._optimizer.optimizer is unwrapped(optimizer)

    @property
    def optimizer_state(self) -> OptimizerState:
        assert self._optimizer is not None, "adopt() an optimizer first"
        return self._optimizer

    # ------------------------------------------------------------------------------------ evaluation
    @torch.no_grad()
    def predict(self, batch: Batch, prepare: Callable[[Batch], Batch], head: Callable[[Batch], Any]) -> Any:
        """What the last stage makes of this process's own batch. Collective over the pipeline.

        Each process brings its own rows, of any shape, and gets its own results back: the K processes' batches are the
        micro-batches.

        Args:
            batch: this process's rows as they were prepared here, on the CPU or the device.
            prepare: moves a prepared batch to the device.
            head: runs the model on a batch on the last stage, and returns tensors in any nesting.
        """
        stage = self.stage
        assert stage is not None
        last = self.num_stages - 1
        pending: list[tuple[dist.Work, torch.Tensor]] = []
        results: list[Any] = []
        for rows in map(prepare, self._gather_in_pipeline(batch)):
            values = self._receive_values(stage) if self.stage_index > 0 else []
            with naming_long_rows(self.model, rows):
                if self.stage_index < last:
                    pending += self._send_values(stage, stage.carry_on(values, rows))
                else:
                    with stage.running_to_the_end(values, rows) as inputs:
                        results.append(head(inputs))
        # only now: gloo's send waits for its receiver, and before this all were busy handing on
        if self.stage_index < last:
            mine = self._receive_tree(last)
        else:
            mine = results.pop()
            for owner, result in enumerate(results):
                pending += self._send_tree(result, owner)
        for work, _ in pending:
            work.wait()
        return mine

    @torch.no_grad()
    def outputs_of_frozen(self, batch: Batch, boundary: int, seed: int) -> tuple[torch.Tensor, ...] | None:
        """What the first `boundary` units, all frozen, make of a few rows in training. The model stays as it was.

        Collective over the pipeline: the units may be spread over its stages.

        Args:
            batch: the model's inputs, on the device, the same on all stages.
            boundary: number of units.
            seed: of random numbers.

        Returns:
            All tensors that cross the boundary, on the stage of the last of these units; None on the others.
        """
        stage = self.stage
        assert stage is not None
        if stage.start >= boundary:
            return None
        self.weights.unpark()
        values = self._receive_values(stage) if self.stage_index > 0 else []
        stop = min(stage.stop, boundary)
        with left_as_found(self.model), generators_kept(self.model), seeded(seed):
            self.model.train()
            reached = self.stack.runner.run(stage.start, stop, as_carry(stage.slots_in, values), batch)
        if stop == boundary:
            return tuple(tensor for stack in sorted(reached) for tensor in reached[stack])
        outputs = [reached[slot.stack][slot.position] for slot in stage.slots_out]
        for work, _ in self._send_values(stage, outputs):
            work.wait()
        return None

    # ------------------------------------------------------------------------------------ messages inside a pipeline
    def _rank_of(self, stage: int) -> int:
        return self.current_plan.ranks_of_pipeline(self.replica_index)[stage]

    def _gather_in_pipeline(self, batch: Batch) -> list[Batch]:
        on_cpu = pytree.tree_map(lambda v: v.cpu() if isinstance(v, torch.Tensor) else v, dict(batch))
        return self._of_each_stage(on_cpu)

    def _send_object(self, value: Any, stage: int) -> None:
        dist.send_object_list([value], dst=self._rank_of(stage), group=self._control)

    def _receive_object(self, stage: int) -> Any:
        box = [None]
        dist.recv_object_list(box, src=self._rank_of(stage), group=self._control)
        return box[0]

    def _send_tensor(self, tensor: torch.Tensor, stage: int) -> tuple[dist.Work, torch.Tensor]:
        tensor = tensor.detach().to(self.device).contiguous()
        work = dist.isend(tensor, self._rank_of(stage), group=self._group)
        assert work is not None
        return work, tensor  # the tensor must live until the work is done

    def _receive_tensor(self, carried: CarriedTensor, stage: int) -> torch.Tensor:
        tensor = torch.empty(carried.shape, dtype=carried.dtype, device=self.device)
        dist.recv(tensor, self._rank_of(stage), group=self._group)
        return tensor

    def _send_shapes(self, shapes: Sequence[CarriedTensor]) -> None:
        self._send_object(tuple(shapes), self.stage_index + 1)

    def _receive_shapes(self) -> Sequence[CarriedTensor]:
        return self._receive_object(self.stage_index - 1)

    def _send_values(self, stage: StageModule, values: Sequence[torch.Tensor]) -> list[tuple[dist.Work, torch.Tensor]]:
        self._send_shapes([_describe(value) for value in values])
        return [
            self._send_tensor(value, self.stage_index + 1)
            for slot, value in zip(stage.slots_out, values, strict=True)
            if slot.is_used
        ]

    def _receive_values(self, stage: StageModule) -> list[torch.Tensor]:
        return [
            self._receive_tensor(carried, self.stage_index - 1) if slot.is_used else carried.zeros(self.device)
            for slot, carried in zip(stage.slots_in, self._receive_shapes(), strict=True)
        ]

    def _send_tree(self, tree: Any, stage: int) -> list[tuple[dist.Work, torch.Tensor]]:
        self._send_object(pytree.tree_map(lambda v: _describe(v) if isinstance(v, torch.Tensor) else v, tree), stage)
        return [self._send_tensor(tensor, stage) for tensor in tensors_of(tree)]

    def _receive_tree(self, stage: int) -> Any:
        return pytree.tree_map(
            lambda v: self._receive_tensor(v, stage) if isinstance(v, CarriedTensor) else v,
            self._receive_object(stage),
        )


@contextmanager
def _timed_phase(name: str, seconds: dict[str, float]) -> Iterator[None]:
    """A phase of a transformation."""
    began = time.perf_counter()
    with phase(name):
        yield
    seconds[name] = time.perf_counter() - began


def holders_under(plan: PipelinePlan, stack: LayerStack) -> Holders:
    """The ranks that hold each parameter under a plan."""
    ranks: dict[str, list[int]] = {name: [] for name in stack.table.names}
    for stage in range(plan.pipeline_parallel_size):
        for name in stack.owned(*plan.stage_bounds[stage : stage + 2]):
            ranks[name].extend(plan.ranks_of_stage(stage))
    return {name: tuple(sorted(held)) for name, held in ranks.items()}


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside Accelerate's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _describe(tensor: torch.Tensor) -> CarriedTensor:
    return CarriedTensor(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
