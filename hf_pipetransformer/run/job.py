"""Properties of a training job that the modules of this package read: arguments, model, callbacks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import IterableDatasetShard
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

from ..argument_values import checkpoints_reentrantly
from ..data.numbered_batches import first_samples
from ..model.called_inputs import LABELS_AND_DECODER
from ..model.example_inputs import names_taken
from ..model.frozen_prefix import has_frozen_layers
from ..model.layer_range import CalledWith
from ..model.left_as_found import left_as_found
from ..model.micro_batch import Batch, batch_rows, select_rows
from ..model.nested import on_device
from ..model.tags import TAGS
from ..pipeline.mesh import ProcessMesh
from ..randomness import generators_kept, seeded
from ..training_args import PipeTransformerTrainingArguments
from .collectives import among_last_stages, counting, counts_processes

logger = logging.getLogger(__name__)

COST_SAMPLE_ROWS = 16
"""Maximum number of samples that are drawn; the longest of them sets the length for measuring the units' costs."""
STOCK_PACKAGES = ("transformers", "hf_pipetransformer")
STEP_EVENTS = tuple(
    f"on_{event}" for event in ["step_begin", "pre_optimizer_step", "optimizer_step", "substep_end", "step_end", "log"]
)
"""Events of each step in which a callback may read weights."""


class TrainingJob:
    """A trainer with its processes. Every property but `mesh` is read off the trainer at the time of access.

    Args:
        trainer: the user's trainer. Only the attributes of every `transformers.Trainer` are used.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._mesh: ProcessMesh | None = None

    @property
    def mesh(self) -> ProcessMesh:
        """The groups of all processes. Collective over all processes the first time.

        Code that one process may run alone (making a loader, for example) must not read this property.
        """
        if self._mesh is None:
            self._mesh = ProcessMesh(timedelta(seconds=self.args.ddp_timeout), self.device)
        return self._mesh

    @property
    def is_connected(self) -> bool:
        """Whether `mesh` has been asked for."""
        return self._mesh is not None

    @property
    def args(self) -> PipeTransformerTrainingArguments:
        args = self.trainer.args
        assert isinstance(args, PipeTransformerTrainingArguments)
        return args

    def ignore_average_tokens(self) -> None:
        """Unset an argument that is always unset, if the user has set it after the arguments were created."""
        if self.args.average_tokens_across_devices:
            self.args.average_tokens_across_devices = False  # items are counted over all processes already
            logger.warning(
                "average_tokens_across_devices=True has no effect: the loss is always computed over the global batch."
            )

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        model: Any = self.trainer.model
        return model

    @property
    def device(self) -> torch.device:
        return self.args.device

    @property
    def mixed_precision(self) -> str:
        return str(self.trainer.accelerator.mixed_precision)

    @property
    def overrides_loss(self) -> bool:
        """Whether the user, or another library, computes the loss in a `compute_loss` of their own."""
        return self.overrides("compute_loss")

    def overrides(self, method: str) -> bool:
        """Whether the user or another library overrides a method of the Trainer."""
        owners = (cls.__module__ for cls in type(self.trainer).__mro__ if method in vars(cls))
        # our own overrides do not count
        owner = next(name for name in owners if not name.startswith("hf_pipetransformer."))
        return not owner.startswith("transformers.") or method in vars(self.trainer)

    def called_on(self, batch: Batch) -> CalledWith:
        """How the stages call the model on a batch: as the stock `compute_loss`, or on the inputs that forward names.

        An overridden `compute_loss` may keep the other inputs for itself.
        """
        if self.overrides_loss:
            return CalledWith(frozenset(batch) - names_taken(self.model, batch) - {TAGS})
        takes_labels = self.trainer.label_smoother is not None or self.trainer.compute_loss_func is not None
        return CalledWith(frozenset({"labels"} & batch.keys()) if takes_labels else frozenset())

    @property
    def freeze_callback(self) -> Any:
        """The freeze callback; None if there is none. It is looked up each time, because resuming replaces callbacks.

        A freeze callback has a true attribute `freezes_layers`.
        """
        callbacks = self.trainer.callback_handler.callbacks
        return next((c for c in callbacks if getattr(c, "freezes_layers", None) is True), None)

    @property
    def users_callbacks(self) -> list[Any]:
        """Callbacks that belong neither to transformers nor to this package."""
        callbacks = self.trainer.callback_handler.callbacks
        return [c for c in callbacks if type(c).__module__.partition(".")[0] not in STOCK_PACKAGES]

    @property
    def may_call_model(self) -> bool:
        """Whether the user's code may call the model outside of the steps: in callbacks, or in `prediction_step`."""
        return bool(self.users_callbacks) or self.overrides("prediction_step")

    @property
    def watches_steps(self) -> bool:
        """Whether one of the user's callbacks may read weights at each step, as a running average does."""
        # looked up on the object, because a method may be set on the instance
        return any(
            getattr(getattr(callback, event, None), "__func__", None) is not getattr(TrainerCallback, event)
            for callback in self.users_callbacks
            for event in STEP_EVENTS
        )

    @property
    def may_cache(self) -> bool:
        """Whether the arguments allow frozen layers' outputs to be cached."""
        # the cache is not deterministic: the writer's speed decides which outputs are stored in time for the next
        # epoch, and cached states differ from computed ones by rounding
        freezes = self.freeze_callback is not None or self.may_follow_freezing
        return self._wants_cache and freezes and not self.args.slices_tokens

    @property
    def may_cache_front(self) -> bool:
        """Whether modules that the user has frozen may be computed once: with one stage, without a freeze policy."""
        is_whole = not self.args.uses_pipeline and not self.args.torch_compile
        return self._wants_cache and self.freeze_callback is None and is_whole

    @property
    def may_follow_freezing(self) -> bool:
        """Whether layers that the user has frozen count as frozen from the first step on: with several stages."""
        return self.follows_freezing and has_frozen_layers(self.model)

    @property
    def follows_freezing(self) -> bool:
        """Whether the arguments allow it; the same on every process."""
        args = self.args
        is_plain = args.uses_pipeline and not args.slices_tokens and args.replica_sharding == "none"
        is_plain &= not checkpoints_reentrantly(args)
        return self._wants_cache and self.freeze_callback is None and is_plain

    @property
    def may_cache_prefix(self) -> bool:
        """Whether outputs of the lowest layers may be cached: a policy freezes them, or the user has frozen them."""
        is_asked = self.follows_freezing and self.args.activation_cache == "on"
        return self.may_cache or is_asked

    @property
    def _wants_cache(self) -> bool:
        args = self.args
        return args.activation_cache == "on" or (args.activation_cache == "auto" and not args.full_determinism)

    @property
    def shares_store(self) -> bool:
        """Whether other trainings may read the stored outputs: in a folder of the user's, or in a search."""
        return self.args.activation_cache_dir is not None or self.trainer.hp_search_backend is not None

    @property
    def why_not_cached(self) -> str | None:
        """Which argument excludes the cache of frozen layers' outputs; None if they allow one."""
        if self.may_cache:
            return None
        if self.args.slices_tokens:
            return "it stores whole samples, and token_slices splits them"
        return "activation_cache='off'" if self.args.activation_cache == "off" else "full_determinism=True"

    @property
    def not_in_keys(self) -> frozenset[str]:
        """Inputs that frozen layers do not read, judged by their names. The cache's probe verifies it."""
        return LABELS_AND_DECODER | frozenset(self.trainer.label_names or ())

    @property
    def sums_up(self) -> bool:
        """Whether a step computes several losses, apart from the micro-batches of a pipeline."""
        return self.mesh.world_size > 1 or self.args.gradient_accumulation_steps > 1

    @property
    def is_probed(self) -> bool:
        """Whether the model is probed on samples before the first step.

        It is not if one process trains the model without stages, freezing or gradient accumulation.
        """
        return self.sums_up or self.args.uses_pipeline or self.freeze_callback is not None

    @property
    def takes_any_loader(self) -> bool:
        """Whether the loop may read batches with samples that this package does not know.

        It may if one process trains the whole model, and no layers are frozen.
        """
        return self.mesh.world_size == 1 and not self.args.uses_pipeline and self.freeze_callback is None

    @property
    def rows_at_once(self) -> int:
        """Maximum number of samples to collate and run together in a probe; no more than in a training batch."""
        stages = self.args.pipeline_parallel_size
        batch = self.args.per_device_train_batch_size * (stages if isinstance(stages, int) else 1)
        return min(COST_SAMPLE_ROWS, batch)

    def generates(self, prediction_loss_only: bool | None) -> bool:
        """Whether an evaluation needs the whole model on each process.

        It does if it generates, as `Seq2SeqTrainer` decides it, and with several stages if it runs an evaluator of
        sentence-transformers, which calls the model with other numbers of batches on each process.

        Args:
            prediction_loss_only: the argument of `evaluation_loop`; None stands for the field of the arguments.
        """
        is_of_sentences = any(k.__module__.startswith("sentence_transformers.") for k in type(self.trainer).__mro__)
        if self.args.uses_pipeline and is_of_sentences and getattr(self.trainer, "evaluator", None) is not None:
            return True
        only_loss = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        return bool(getattr(self.args, "predict_with_generate", False)) and not only_loss  # a Seq2Seq field

    def to_device(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Apply the stock `_prepare_inputs` to a batch, and not the user's override of it."""
        prepared: dict[str, Any] = Trainer._prepare_inputs(self.trainer, inputs)  # type: ignore[arg-type]
        return prepared

    def on_models_device(self, inputs: Batch) -> Batch:
        """Move prepared inputs to where the whole model is, for a probe. It may be on the CPU because it is large."""
        return on_device(inputs, next((parameter.device for parameter in self.model.parameters()), self.device))

    @property
    def counts_alone(self) -> bool:
        """Whether the loss counts processes, and is a stock one: it is computed as on one process."""
        is_own = self.overrides_loss or self.trainer.compute_loss_func is not None
        return not is_own and counts_processes(self.model)

    def counting_alone(self) -> AbstractContextManager[None]:
        """Inside, a stock loss that counts processes finds one."""
        is_needed = self.mesh.world_size > 1 and self.counts_alone
        return counting(self.trainer.accelerator) if is_needed else nullcontext()

    @contextmanager
    def computing_loss(self, last_stages: dist.ProcessGroup | None) -> Iterator[None]:
        """The context for a call of the user's `compute_loss`: the trainer's, among the processes that compute it.

        Args:
            last_stages: the processes that compute the loss, one of each pipeline; None for this one alone.
        """
        around: AbstractContextManager[None]
        if self.args.uses_pipeline:
            group = None if self.counts_alone else last_stages
            around = among_last_stages(self.trainer.accelerator, self.mesh, group)
        else:
            around = self.counting_alone()
        with self.trainer.compute_loss_context_manager(), around:
            yield

    def rows_of_loader(self, dataloader: Any) -> tuple[list[Any], Any]:
        """Return samples of a loader, for finding the model's units, and the function that collates them.

        A dataset that keeps its position in an attribute gives the samples again.

        Raises:
            ValueError: the loader can be read only once, so the samples would be missing from evaluation or training.
        """
        dataset, collate_fn = getattr(dataloader, "dataset", None), getattr(dataloader, "collate_fn", None)
        read = dataloader if dataset is None else whole_stream(dataset)
        with seeded(self.args.seed), generators_kept(dataloader, dataset), left_as_found(read):
            if dataset is not None and collate_fn is not None:
                refuse_used_up(read)
                return first_samples(read, COST_SAMPLE_ROWS), collate_fn
            batches = iter(dataloader)
            if batches is dataloader:
                raise ValueError(
                    f"The data loader ({type(dataloader).__name__}) has no dataset and can be iterated only once, so"
                    " no sample can be read from it to probe the model's layers and loss. Return a DataLoader or a"
                    " list of batches from get_train_dataloader and get_eval_dataloader (or call train() before"
                    " evaluate())."
                )
            batch = next(batches)
        rows = batch_rows(batch)
        return [row % rows for row in range(COST_SAMPLE_ROWS)], partial(select_rows, batch)


def refuse_used_up(dataset: Any) -> None:
    """Refuse a stream whose samples cannot be put back after they were read. Call it within `left_as_found`.

    Raises:
        ValueError: each `iter()` returns the same generator (or other iterator), and no attribute of the stream is it.
    """
    if isinstance(dataset, IterableDataset):
        iterator = iter(dataset)
        if not hasattr(iterator, "__dict__") and iter(dataset) is iterator:
            raise ValueError(
                f"The dataset ({type(dataset).__name__}) returns the same {type(iterator).__name__} from each iter(),"
                f" so the {COST_SAMPLE_ROWS} samples that are read to probe the model's layers and loss would be"
                " missing later. Make a new iterator in __iter__, or keep this one in an attribute of the dataset."
            )


def whole_stream(dataset: Any) -> Any:
    """Return the user's stream, unwrapped if Accelerate has made a shard of it."""
    return dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset


def refuse_distributed_model(model: Any) -> None:
    """Refuse a model that is already distributed.

    Raises:
        ValueError: the model is wrapped in DataParallel or DDP, or was loaded with a device map or as the stages of
            transformers' own pipeline, which is for inference.
    """
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(
            f"model is wrapped in {type(model).__name__}, but the trainer distributes the model itself. Pass the"
            " unwrapped model (model.module)."
        )
    device_map = getattr(model, "hf_device_map", None)
    if device_map:
        raise ValueError(
            f"model is distributed by a device map ({len(device_map)} entries), but the trainer distributes the model"
            " itself. Load it without device_map."
        )
    stages = getattr(getattr(getattr(model, "config", None), "distributed_config", None), "pp_size", None) or 1
    if stages > 1:
        raise ValueError(
            f"model was loaded with DistributedConfig(pp_size={stages}): this process has one stage of it, whose"
            " forward returns no loss. Load the whole model without distributed_config, and set"
            f" pipeline_parallel_size={stages}."
        )
