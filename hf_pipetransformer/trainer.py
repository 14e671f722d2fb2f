"""`transformers.Trainer` over a pipeline. It overrides methods of the Trainer and never copies its loop.

    train                     enters one `PipelineRun` around the Trainer's own loop
      get_train_dataloader    numbered batches; this pipeline takes its slice of each
      create_optimizer        splits the model into stages: PipelineRun.place
      get_batch_samples       carries out a proposed freeze; counts the items (`LastOverrides`)
      training_step           PipelineRun.step -> Steps.step -> ElasticPipeline.step -> compute_loss on the last stage
      clip_grad_norm_         the accelerator's method is replaced: the norm over all stages
      evaluate                the stock methods, over gathered samples
      save                    `CheckpointWrite`, around the stock method, over gathered weights

Overrides of private methods of transformers call the stock methods, except `_load_optimizer_and_scheduler`, which
replaces it. When transformers changes one of these methods, `tests/test_private_api.py` fails and names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from .data.loaders import LoaderWithoutTags, NumberedLoader
from .errors import UnsupportedModelError, calling_code
from .method_order import LastInLine, refuse_wrong_order
from .model.method_override import having
from .model.micro_batch import naming_long_rows
from .pipeline.elastic_pipeline import ElasticPipeline
from .progress import phase
from .registry import find_part, require_part
from .run import evaluation, mistakes, training_data
from .run.batches import BatchesInEpoch
from .run.checkpointing import CheckpointWrite, gathered_weights
from .run.job import TrainingJob
from .run.lazy_model import is_lazy, loading, saving_shards
from .run.parts import Parts
from .run.resuming import (
    checkpoint_to_resume,
    load_optimizer_and_scheduler,
    stock_checkpoint_to_resume,
    translating_names,
)
from .run.run import PipelineRun, unwrapped_model
from .run.setup.cutting import CutModel, find_units
from .run.setup.probing import SampleCollator
from .training_args import PipeTransformerTrainingArguments, naming_lost_arguments

if TYPE_CHECKING:
    from .parts.freezing.by_arguments import FreezingByArguments
    from .parts.freezing.policies import FreezePolicy

logger = logging.getLogger(__name__)


class LastOverrides(Trainer, metaclass=LastInLine):
    """Overrides that run behind those of another library's trainer, whose method may call `super()`'s."""

    is_last_in_line = True
    _pipeline_run: PipelineRun | None = None

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        run = self._pipeline_run
        if self.state.global_step >= self.state.max_steps:
            # resumed after the last step, inside an epoch: the stock loop would run another step
            self.control.should_training_stop = True
            if run is not None:
                run.nothing_left()
            return [], 1
        if run is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        return run.take(epoch_iterator, num_batches)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        if self._pipeline_run is None:
            return super().training_step(model, inputs, num_items_in_batch)
        return self._pipeline_run.step(inputs, num_items_in_batch)

    def _evaluate(self, *positional: Any, **keywords: Any) -> Any:
        evaluate: Any = partial(super()._evaluate, *positional, **keywords)
        return evaluate() if self._pipeline_run is None else self._pipeline_run.evaluate(evaluate)


class PipeTransformerTrainer(LastOverrides):
    """A [`~transformers.Trainer`] that can split the model into a pipeline of stages, one per process.

    It takes the same arguments as `Trainer`; `args` is a [`PipeTransformerTrainingArguments`]. For every layout of
    stages and replicas, losses, gradients, weights, the number of steps and the order of the samples are the same as
    on one process with the same global batch, `per_device_train_batch_size` x number of processes. (A sampler that
    draws from the global random generators has another order on several processes than on one.)

    ```python
    args = PipeTransformerTrainingArguments("out", pipeline_parallel_size=2, freeze_policy="alpha")
    PipeTransformerTrainer(model, args, train_dataset=dataset).train()  # torchrun --nproc_per_node 2 train.py
    ```

    During `train()`, each process holds parameters, gradients and optimizer state of its own stage only. The other
    parameters of `trainer.model` are placeholders. Before and after, it is complete, except with `load_lazily`.

    With a `freeze_policy`, layers are frozen from the bottom up during training, and the remaining layers are
    repacked into fewer stages; the freed processes become data-parallel replicas (PipeTransformer, ICML 2021).

    Args:
        freeze_policy: a policy object to use instead of `args.freeze_policy`.

    Raises:
        ValueError: arguments contradict one another or do not fit the number of processes. Every process raises it.
        UnsupportedModelError: the model has no layers at which it can be split.
    """

    args: PipeTransformerTrainingArguments
    model: nn.Module
    _job: TrainingJob
    _cut_model: CutModel | None = None
    _checkpoint_write: CheckpointWrite | None = None
    _evaluated_loader: LoaderWithoutTags | None = None
    _freezing: FreezingByArguments | None = None
    _loader_of_loop: Any = None
    _last_parts: Parts | None = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        refuse_wrong_order(cls, PipeTransformerTrainer, Trainer, first=True)

    def __init__(
        self,
        model: Any = None,
        args: PipeTransformerTrainingArguments | None = None,
        *positional: Any,
        freeze_policy: FreezePolicy | None = None,
        **keywords: Any,
    ) -> None:
        if args is None and super().__init__.__func__ is Trainer.__init__:  # type: ignore[attr-defined]
            args = PipeTransformerTrainingArguments(output_dir="tmp_trainer")
        args = mistakes.checked_arguments(type(self), args, model)
        self._job = TrainingJob(self)
        # by name: a trainer of another library may have other arguments in between
        make = super().__init__
        with naming_lost_arguments(args):
            make(model, args, *positional, **keywords) if positional else make(model=model, args=args, **keywords)
        self._freeze_policy = freeze_policy
        self._add_freeze_callback()

    @property
    def pipeline(self) -> ElasticPipeline | None:
        """The object that runs the model, or None until the model's units have been found.

        It is placed on the processes while the model trains or is evaluated.
        """
        return self._cut_model.pipeline if self._cut_model is not None else None

    @property
    def _is_stock(self) -> bool:
        """Whether `transformers.Trainer` does everything: one stage, and something else distributes the model."""
        return self.args.leaves_model_to_trainer or self.is_fsdp_enabled or self.is_deepspeed_enabled

    @property
    def _placed(self) -> ElasticPipeline | None:
        """The pipeline while it is placed, i.e. while each process holds its stage; otherwise None."""
        return self.pipeline if self.pipeline is not None and self.pipeline.is_placed else None

    def _find_units(self, rows: Sequence[Any], collate: SampleCollator | None) -> CutModel:
        """Return the units of the current model, which are found on a few samples of the data the first time."""
        job, cut = self._job, self._cut_model
        if cut is not None and cut.pipeline.model is job.model:
            cut.refuse_second_training()
        if cut is None or not cut.serves(job):
            cut = self._cut_model = find_units(job, rows, collate)
        return cut

    def _add_freeze_callback(self) -> None:
        """Add the callback of the freeze policy, or a new one if the arguments have changed."""
        args, given = self.args, self._freeze_policy
        if self._freezing is None and (given is not None or args.freeze_policy != "none"):
            asked_by = f"freeze_policy={args.freeze_policy!r}" if given is None else "freeze_policy"
            self._freezing = require_part("freezing.by_arguments", asked_by).FreezingByArguments(given)
        if self._freezing is not None:
            self._freezing.add_to(self)

    def _counts(self, inputs: Any) -> bool:
        """Whether this process counts a batch's samples. Only a pipeline's last stage does: all stages see them."""
        run, stage = self._pipeline_run, self._placed.stage if self._placed is not None else None
        is_filler = run is not None and stage is not None and any(inputs is batch for batch in run.steps.batch.fillers)
        return stage is None or (stage.has_last_unit and not is_filler)

    # ------------------------------------------------------------------------------------ life cycle
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._pipeline_run is not None:  # a trial of a hyperparameter search has set other arguments
            self._add_freeze_callback()
        if not self._is_stock:
            if self.args.world_size > 1:
                self.accelerator.even_batches = True  # evaluation: all stages take part in every batch
            # the loop calls the accelerator both to clip and to get the norm that it logs
            self.accelerator.clip_grad_norm_ = self._clip_grad_norm_over_stages
            self.accelerator.unwrap_model = partial(unwrapped_model, self.accelerator.unwrap_model)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **keywords: Any,
    ) -> TrainOutput:
        if self._cut_model is not None and not self._cut_model.stays_distributed:
            self.make_model_whole()  # an earlier train() may have been interrupted
        train: Any = partial(super().train, trial=trial, ignore_keys_for_eval=ignore_keys_for_eval, **keywords)
        try:
            mistakes.refuse_unknown_metric(self._job)
            if self._is_stock:
                recorder = find_part("records.recorder")
                with recorder.RunRecorder(self.args).recording(self) if recorder is not None else nullcontext():
                    folder = self.args.output_dir
                    return train(stock_checkpoint_to_resume(folder, resume_from_checkpoint, self.is_fsdp_enabled))
            self._job.ignore_average_tokens()
            checkpoint = checkpoint_to_resume(self._job, resume_from_checkpoint)
            resumed = Path(checkpoint) if isinstance(checkpoint, str) else None
            for part in self._last_parts or ():
                part.forget()
            self._last_parts = None
            begun = PipelineRun(self._job, self._find_units, resumed, ignore_keys_for_eval)
            with begun as self._pipeline_run, having(self, floating_point_ops=self._once(self.floating_point_ops)):
                return train(checkpoint)
        except UnsupportedModelError as error:
            if self.args.uses_pipeline:
                raise
            raise error.with_one_stage() from error.__cause__
        finally:
            run, self._pipeline_run = self._pipeline_run, None
            self._last_parts = run.parts if run is not None else self._last_parts
            self.is_in_train = False  # the stock Trainer leaves it set after an error
            if not self._is_stock:
                self.model_wrapped = self.model  # as the stock Trainer leaves it after training in one process

    def hyperparameter_search(self, *positional: Any, **keywords: Any) -> Any:
        """Search as `Trainer.hyperparameter_search` does; the trials share the store of frozen layers' outputs.

        A trial that freezes layers before its first step, with the same weights as an earlier trial, reads the stored
        outputs of that trial from its first step on. The default folder is removed when the search has ended.
        """
        cache = None if self._is_stock else find_part("prefix_cache.part")
        shared = cache.around_search(self._job) if cache is not None else nullcontext()
        try:
            with shared:
                return super().hyperparameter_search(*positional, **keywords)
        finally:
            self.hp_search_backend = None  # the stock Trainer leaves it set after an error

    def make_model_whole(self) -> None:
        """Gather all weights into `trainer.model` on every process. Collective over all processes.

        `train()` does this when it ends, unless the model was loaded by `load_lazily`. The weights go to the device if
        they fit, otherwise to the CPU.

        Raises:
            ValueError: the model is distributed, and not all processes call this.
        """
        if self._placed is not None:
            self._expect_all("make_model_whole")
        if self._cut_model is not None:
            self._cut_model.make_whole()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        stock = partial(super().create_optimizer, *([model] if model is not None and self._is_stock else []))
        # many scripts call this before train(), over the whole model; train() attaches the optimizer to the stages
        return stock() if self._pipeline_run is None else self._pipeline_run.optimize(stock)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        run = self._pipeline_run
        if run is not None and training:
            return run.wrap()
        is_sharded = training and self.is_fsdp_enabled and self.accelerator.is_fsdp2  # on accelerators alone
        if is_sharded and self._job.freeze_callback is not None:
            require_part("freezing.sharded_model", "freezing").find_layers_to_freeze(self._job, self._loader_of_loop)
        return self._placed or super()._wrap_model(model, training, dataloader)

    # ------------------------------------------------------------------------------------ data
    def get_train_dataloader(self) -> DataLoader:
        make_stock = super().get_train_dataloader
        if self._is_stock:
            return make_stock()
        run = self._pipeline_run
        is_of_user = run is not None and run.data is not None  # the loop has its loader
        keeps_nodes = not is_of_user and training_data.may_cache(self._job, is_training=run is not None)
        loader = training_data.training_loader(self._job, make_stock, keeps_nodes, is_of_user)
        if run is not None and not is_of_user:
            run.latest_loader = loader if isinstance(loader, NumberedLoader) else None
        return loader

    def set_initial_training_values(self, args: Any, dataloader: Any, *positional: Any, **keywords: Any) -> Any:
        """Register the training loader. The Trainer passes it here first, before the model is split.

        Raises:
            ValueError: the user made the loader, and there are several stages, or the processes' lengths differ.
        """
        self._loader_of_loop = dataloader
        run = self._pipeline_run
        if run is not None:
            run.data = training_data.batches_of_loop(self._job, dataloader, run.latest_loader)
            run.may_cache = training_data.may_cache(self._job)
        *numbers, in_epoch, max_steps = super().set_initial_training_values(args, dataloader, *positional, **keywords)
        if run is not None and in_epoch is not None:
            in_epoch = run.batches_in_epoch = BatchesInEpoch(in_epoch)
        return *numbers, in_epoch, max_steps

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        loader = super().get_eval_dataloader(eval_dataset)
        return loader if self._is_stock else training_data.evaluation_loader(self._job, loader)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        loader = super().get_test_dataloader(test_dataset)
        if not self._is_stock:
            training_data.shield_workers_from_sigterm(loader)
        return loader

    # ------------------------------------------------------------------------------------ steps
    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *positional: Any, **keywords: Any) -> Any:
        stock = partial(super().compute_loss, model, inputs, *positional, **keywords)
        return mistakes.explaining_missing_labels(self._job, inputs, stock)

    def _clip_grad_norm_over_stages(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        assert self._pipeline_run is not None
        return self._pipeline_run.clip(parameters, max_norm, norm_type)

    def _maybe_log_save_evaluate(self, *positional: Any, **keywords: Any) -> None:
        stock: Any = partial(super()._maybe_log_save_evaluate, *positional, **keywords)
        stock = mistakes.explaining_unknown_metric(self)(stock)
        stock() if self._pipeline_run is None else self._pipeline_run.end_step(stock)

    def store_flos(self) -> None:
        if self._pipeline_run is not None:
            self._pipeline_run.serve_callbacks()  # the stock method sums over all processes
        super().store_flos()

    def _once(self, flops_of: Callable[[Any], float]) -> Callable[[Any], float]:
        return lambda inputs: flops_of(inputs) if self._counts(inputs) else 0

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        if not self._counts(inputs):
            inputs = {k: v[:0] for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
        super()._track_num_input_tokens(inputs)

    # ------------------------------------------------------------------------------------ evaluation
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        *positional: Any,
        **keywords: Any,
    ) -> EvalLoopOutput:
        evaluate: Any = super().evaluation_loop
        if self._is_stock:
            return evaluate(dataloader, description, prediction_loss_only, *positional, **keywords)
        self._job.ignore_average_tokens()
        self._expect_all(evaluation.METHODS.get(description, "evaluation_loop"))
        run, kept, generates = self._pipeline_run, self._last_parts, self._job.generates(prediction_loss_only)
        parts, prefix = run.parts if run is not None else None, str(keywords.get("metric_key_prefix", "eval"))
        if self._placed is not None:
            around = evaluation.in_training(self._job, self._placed, parts, dataloader, generates, prefix)
        else:
            around = evaluation.outside_training(self._job, self._find_units, kept, dataloader, generates, prefix)
        with around as loader, having(self, _evaluated_loader=loader):
            return evaluate(loader, description, prediction_loss_only, *positional, **keywords)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **keywords: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        keywords |= {"prediction_loss_only": prediction_loss_only, "ignore_keys": ignore_keys}
        stock: Any = partial(super().prediction_step, **keywords)
        if self._placed is None:
            with naming_long_rows(self.model, inputs), self._job.counting_alone():
                return stock(model, inputs)
        tags = self._evaluated_loader.tags if self._evaluated_loader is not None else None
        return evaluation.predict(self._job, self._placed, tags, stock, inputs)

    # ------------------------------------------------------------------------------------ saving
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`. Only the main process writes.

        Collective over all processes during training (when a callback calls it), and after the training of a model
        loaded by `load_lazily`. Otherwise the main process may call it alone, as with the stock Trainer.

        Raises:
            ValueError: the model is distributed, and not all processes call this.
        """
        pipeline = self._placed
        if pipeline is None:
            return super().save_model(output_dir, _internal_call)
        self._expect_all("save_model")
        gathered = gathered_weights(self._job, pipeline, Path(output_dir or self.args.output_dir or "."))
        with gathered, self._keeping_errors(), saving_shards(self.model, pipeline.is_lazy):
            super().save_model(output_dir, _internal_call)
        if self._checkpoint_write is not None and self.args.save_only_model:
            self._checkpoint_write.is_gathered = True

    def _expect_all(self, method: str) -> None:
        """Refuse a method of a distributed model that only some processes call. Collective over all processes.

        During training this takes no longer than a process needs to begin something else. Otherwise the others have
        `ddp_timeout`, as in each collective: the main process may upload a checkpoint meanwhile.

        Raises:
            ValueError: another process does something else.
        """
        call = f"{method}(){calling_code()}"
        if self._pipeline_run is None or not self._pipeline_run.meet(f"called {call}"):
            self._job.mesh.expect_all(call, self.args.ddp_timeout)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        pipeline = self._placed
        if pipeline is None:
            return super()._save_optimizer_and_scheduler(output_dir)
        with pipeline.optimizer_state.gathered(Path(output_dir) if pipeline.is_lazy else None), self._keeping_errors():
            super()._save_optimizer_and_scheduler(output_dir)
        if self._checkpoint_write is not None:
            self._checkpoint_write.is_gathered = True

    def _keeping_errors(self) -> AbstractContextManager[None]:
        """In a checkpoint, an error inside is deferred until all processes exchange errors."""
        return self._checkpoint_write.keeping_errors() if self._checkpoint_write is not None else nullcontext()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Collective over all processes."""
        if self._is_stock:
            return super()._save_checkpoint(model, trial)
        run = self._pipeline_run
        if run is not None:
            run.meet("saves a checkpoint (control.should_save)")  # a callback may have set it on some processes only
        write = CheckpointWrite(
            self._job,
            Path(self._get_output_dir(trial)),
            state=run.state_dict() if run is not None else {"step": self.state.global_step},
        )
        self._checkpoint_write = write
        try:
            with phase("save"), write:
                super()._save_checkpoint(model, trial)
        finally:
            self._checkpoint_write = None
        if run is not None:
            run.last_saved = write.final

    def _get_output_dir(self, trial: Any) -> str:
        staging = self._checkpoint_write.output_dir if self._checkpoint_write is not None else None
        return str(staging) if staging is not None else super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._checkpoint_write is not None:
            self._checkpoint_write.upload = super()._push_from_checkpoint
        else:
            super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, *positional: Any, **keywords: Any) -> None:
        """Write the stock model card, and add how the model was trained: layouts, freezes, cache and versions."""
        super().create_model_card(*positional, **keywords)
        run = self._pipeline_run
        parts = run.parts if run is not None else self._last_parts
        for part in parts if parts is not None and self.is_world_process_zero() else ():
            part.add_to_card(Path(self.args.output_dir or "."))

    # ------------------------------------------------------------------------------------ loading
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._is_stock and is_lazy(self.model) and isinstance(self.model, PreTrainedModel):
            if self._cut_model is not None and self._cut_model.serves(self._job):
                self._cut_model.refuse_second_training()
            return loading().map_from(self.model, resume_from_checkpoint, self._job.mesh)
        with nullcontext() if self._is_stock else translating_names(self.model, resume_from_checkpoint):
            # sentence-transformers' method has no second argument
            super()._load_from_checkpoint(resume_from_checkpoint, *([] if model is None else [model]))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._placed is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        load_optimizer_and_scheduler(self, checkpoint)

    def _load_best_model(self) -> None:
        pipeline, run = self._placed, self._pipeline_run
        if pipeline is None:
            return super()._load_best_model()
        if run is not None:
            run.prepare_for_best()
        best = str(self.state.best_model_checkpoint)
        # loading a sharded checkpoint compares its keys with the model's
        with pipeline.weights.listing_placeholders(), translating_names(self.model, best):
            return super()._load_best_model()
