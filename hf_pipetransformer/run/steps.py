"""The training steps of a run: the same sequence in each `training_step`, for every layout.

take     takes the batches of an optimizer step, and counts them over the replicas
step     1 batch    2 forward and backward    3 votes
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import Trainer

from ..data.numbered_batches import TrainingBatches
from ..errors import in_one_line
from ..model.frozen_prefix import frozen_modules
from ..model.loss_scaling import LossReduction
from ..model.micro_batch import Batch, batch_rows, naming_long_rows
from ..model.refusals import raise_for_exchanged_inputs
from ..model.tags import NO_TAGS, TAGS
from ..pipeline.elastic_pipeline import ElasticPipeline
from ..progress import PROGRESS
from .batches import GlobalBatch, prepared
from .collectives import with_collectives_of
from .job import TrainingJob
from .loss import BatchInFlight, Loss
from .parts import Parts, StepFacts
from .training_data import refuse_different_numbers

logger = logging.getLogger(__name__)

OF_CONTROL = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
"""Requests to the Trainer's loop that a loss may make."""

VOTES = ("exchanged_inputs", "other_flags", "is_cut", *OF_CONTROL)
"""The votes of each process in a step, before the parts' votes.

exchanged_inputs: the last stage has called the model on other inputs than the earlier stages.
other_flags: other code than a callback has set `requires_grad`.
is_cut: no gradient has come to the lower stages, in place of which they have zeros.
others: as in `TrainerControl`. The loss may have set the flag, on the last stage only.
"""


class Steps:
    """Runs the steps of one `train()`, once the model is placed.

    Args:
        job: the training job.
        pipeline: the model.
        loss: the trainer's loss.
        reduction: how the losses of parts add up.
        data: the training batches.
        parts: the parts of the training.
        watches_steps: whether one of the user's callbacks, on some process, may read weights at each step.

    Attributes:
        batch: the batch of the current optimizer step.
        may_have_other_flags: whether a callback may have set `requires_grad` since the run last looked.
    """

    def __init__(
        self,
        job: TrainingJob,
        pipeline: ElasticPipeline,
        loss: Loss,
        reduction: LossReduction,
        data: TrainingBatches,
        parts: Parts,
        watches_steps: bool,
    ) -> None:
        self.batch = GlobalBatch()
        self.may_have_other_flags = False
        self._job, self._trainer, self._model = job, job.trainer, job.model
        self._args, self._mesh = job.args, job.mesh
        self._pipeline, self._loss, self._reduction = pipeline, loss, reduction
        self._data, self._parts, self._watches_steps = data, parts, watches_steps
        self._takes_others = job.takes_any_loader
        # a stock loss calls no collective
        self._has_own_loss = job.args.uses_pipeline and not loss.is_stock
        self._has_looked_for_nan = False
        self._counted: int | float = 1  # items of the batch that was taken last
        self._averages = False  # whether the loss is a mean over this batch, and accumulated ones are averaged
        self._error: Exception | None = None  # that has left the last step

    def take(self, batches: Iterator[Any], num_batches: int) -> tuple[list[Any], Any]:
        """Return the batches of the next optimizer step and the number of items. Collective over all processes."""
        self.batch = GlobalBatch()
        taken = self.batch.read(batches, num_batches, self._data, self._reduction, self._takes_others)
        if not self._data.is_shared and self._mesh.world_size > 1:
            refuse_different_numbers(self._job, len(taken), f" at step {self._trainer.state.global_step + 1}")
        self.batch.count_over_replicas(self._pipeline)
        self._counted = self.batch.num_items
        counted = [batch for batch in taken if all(batch is not filler for filler in self.batch.fillers)]
        if counted and self._job.overrides("_get_num_items_in_batch"):
            theirs: Any = self._trainer._get_num_items_in_batch(counted, self._args.device)
            usual: Any = Trainer._get_num_items_in_batch(self._trainer, counted, self._args.device)
            if theirs is not usual and (theirs is None or usual is None or float(theirs) != float(usual)):
                return taken, theirs
        return taken, self.batch.num_items

    def _use_number(self, num_items: float | None) -> None:
        """Let the loss divide by the number of items that the user's code has passed to `training_step`.

        If it has passed none, the loss is a mean over this batch, and accumulated ones are averaged.
        """
        self.batch.num_items, self._loss.is_told = self._counted, None
        self._averages = num_items is None
        if num_items is None:
            self._loss.is_told = None if self._loss.is_stock or self._reduction.kind != "whole" else False
        elif num_items == float(self._counted):
            return
        elif self._pipeline.num_replicas > 1:
            raise ValueError(
                f"num_items_in_batch={num_items:g} was passed to training_step, but the trainer has counted"
                f" {self._counted:g} items over {self._pipeline.num_replicas} replicas (get_batch_samples,"
                " _get_num_items_in_batch or training_step is overridden). It is not known whether your number is one"
                " replica's or all replicas'. Pass on the trainer's number and weigh items in compute_loss, or use a"
                " single pipeline."
            )
        elif self._reduction.kind != "mean":  # such a loss is not told the number
            self.batch.num_items, self._loss.is_told = num_items, True

    def step(self, inputs: dict[str, Any], num_items: Any = None) -> torch.Tensor:
        """Run forward and backward of this pipeline's slice of a batch. Collective over all processes.

        1. Prepare the batch, with the tags of its samples; all stages use the batch of the last stage.
        2. Run the pipeline's step; the last stage computes the loss.
        3. Reduce the loss and the votes over all processes.

        Args:
            inputs: the argument of `training_step`.
            num_items: likewise, the number of items that the loss divides by; None for a mean over this batch.

        Returns:
            The loss of the global batch, the same on every process.

        Raises:
            ValueError: with several replicas, another number of items than `take` has counted.
        """
        self._use_number(None if num_items is None else float(num_items))
        try:
            return self._step(inputs)
        except Exception as error:
            self._error = error
            raise

    def refuse_caught_error(self) -> None:
        """Refuse to go on after a step that an error has ended, because the other processes are still in it.

        Raises:
            ValueError: the user's code has caught such an error.
        """
        if self._error is not None and self._mesh.world_size > 1:
            raise ValueError(
                f"An error of a training step was caught, for example in training_step: {in_one_line(self._error)}."
                " The other processes are still in this step, so that one process cannot skip a batch. Catch the error"
                " in compute_loss and return a loss that is zero (outputs.logits.sum() * 0), let the data collator"
                " leave such samples out, or set pipeline_parallel_size=1 and use one process."
            ) from self._error

    def _step(self, inputs: dict[str, Any]) -> torch.Tensor:
        pipeline, state = self._pipeline, self._trainer.state
        self._loss.refuse_change()
        self._switch_to_training()
        # 1
        self.batch.begin(inputs, pipeline)
        if self._averages:
            parts = self._trainer.current_gradient_accumulation_steps * pipeline.num_replicas
            self.batch.num_items = (self.batch.current.items or 1) * parts
        batch, loses_tags = self._prepare(inputs)
        # 2
        current = BatchInFlight(
            self._loss, pipeline, self._reduction, self.batch.current, self.batch.num_items, self.batch.num_rows, batch
        )
        with ExitStack() as around:
            around.enter_context(naming_long_rows(self._model, batch))
            for part in self._parts.having("around_step"):
                around.enter_context(part.around_step(batch))
            pipeline.running.prepare(batch, current)
            current.losses.clear()  # of the profile that may have been run
            if self._has_own_loss:  # in the backward as well, which does not run inside of the loss
                around.enter_context(with_collectives_of(self._trainer.accelerator, None))
            pipeline.step(batch, current)
        current.release()
        empty_every = self._args.torch_empty_cache_steps
        if empty_every is not None and state.global_step % empty_every == 0:
            clear_device_cache()
        # 3
        facts = StepFacts(loses_tags, current.part.global_rows, len(current.losses))
        loss = self._agree(current, facts)
        # on an accelerator, asking would wait for the whole step
        may_look = pipeline.num_stages > 1 and loss.device.type == "cpu" and not self._has_looked_for_nan
        if may_look and not bool(torch.isfinite(loss)):
            self._has_looked_for_nan = True
            self.look_for_nan(f"The loss of step {state.global_step + 1} is {float(loss)}")
        for part in self._parts.having("stepped"):
            part.stepped(facts, loss)
        return loss

    def look_for_nan(self, occasion: str) -> None:
        """Warn of weights that contain NaN: they are gathered, and may be saved. Collective over all processes.

        Args:
            occasion: the reason for looking, as a clause.
        """
        everyone = self._mesh.gather_objects(self._pipeline.weights.containing_nan())
        found = {rank: names for rank, names in enumerate(everyone) if names}
        if self._mesh.rank == 0 and found:
            logger.warning(
                "%s, and there are weights that contain NaN: %s.",
                occasion,
                "; ".join(f"on rank {rank} {len(names)}, {names[0]!r} first" for rank, names in found.items()),
            )

    def _switch_to_training(self) -> None:
        self._pipeline.train()
        if self._args.eval_frozen_modules:
            for module in frozen_modules(self._model).values():
                module.eval()
        switch = getattr(self._trainer.optimizer, "train", None)  # schedule-free optimizers have one
        if callable(switch):
            switch()
        scaler = self._trainer.accelerator.scaler
        if scaler is not None:
            # the scaler is initialized by its first use, and stages that do not compute the loss would not use it
            scaler.scale(torch.zeros((), device=self._pipeline.device))

    def _prepare(self, inputs: dict[str, Any]) -> tuple[Batch, bool]:
        """Prepare the batch for the model, on all stages. Collective over the pipeline.

        Returns:
            The batch, and whether its inputs have changed since they were tagged.
        """
        pipeline, part = self._pipeline, self.batch.current
        looks_up = pipeline.shortcut is not None and pipeline.stack.runner.takes_batch
        tags = part.tags if looks_up and part.rows else None
        batch = prepared(self._job, inputs, tags)
        if pipeline.shortcut is not None and tags is None and not part.rows:
            batch[TAGS] = NO_TAGS.expand(batch_rows(batch, default=1) if looks_up else 1, -1)
        loses_tags = tags is not None and batch[TAGS] is not tags.tensor
        if pipeline.num_stages > 1:
            batch = self.batch.share(pipeline, batch)
            loses_tags = loses_tags and pipeline.computes_loss
        if looks_up:
            following = self.batch.waiting[0] if self.batch.waiting else self._data.next_slice
            pipeline.running.read_ahead(following.tags if following is not None else None)
        return batch, loses_tags

    def _agree(self, current: BatchInFlight, facts: StepFacts) -> torch.Tensor:
        """Reduce the loss and the votes over all processes. Collective over all processes if there are several.

        Raises:
            ValueError: a process reports `exchanged_inputs` or `other_flags`.
        """
        pipeline, control, voting = self._pipeline, self._trainer.control, self._parts.having("vote")
        votes = [bool(current.exchanged_inputs), pipeline.weights.flags_changed, pipeline.running.engine.cut > 0]
        votes += [getattr(control, name) and pipeline.num_stages > 1 for name in OF_CONTROL]
        for part in voting:
            mine = part.vote(facts)
            assert len(mine) == part.num_votes, type(part)
            votes += mine
        loss = current.total(pipeline.device)
        if self._mesh.world_size > 1:
            PROGRESS.enter("all-reduce")
            loss, votes = self._mesh.agree(loss, votes)
            exchanged_inputs, other_flags, is_cut = votes[:3]
            if exchanged_inputs:
                everyone = self._mesh.gather_objects(current.exchanged_inputs)
                raise_for_exchanged_inputs(self._model, set().union(*everyone))
            if other_flags:
                raise ValueError(
                    "requires_grad of parameters was changed outside a callback (for example in compute_loss or"
                    " training_step). With several processes, all of them must know of the change before the step."
                    " Change it in a TrainerCallback, for example in on_step_begin."
                )
            if is_cut and self._trainer.accelerator.scaler is None:  # the scaler inspects gradients on all processes
                pipeline.running.drop_zeros()
        for name, is_asked in zip(OF_CONTROL, votes[3:], strict=False):
            if is_asked:
                setattr(control, name, True)
        first = len(VOTES)
        for part in voting:
            part.heard(tuple(votes[first : first + part.num_votes]))
            first += part.num_votes
        return loss

    def follow_flags(self, thaws: bool) -> bool:
        """Train exactly the parameters that the user's callbacks have left trainable since the last step.

        Collective over all processes if a callback may have changed a flag, because only the processes that hold a
        parameter can detect it.

        Args:
            thaws: whether frozen layers may be trained again, because no policy has frozen them.

        Returns:
            Whether they are.
        """
        pipeline = self._pipeline
        has_changed = pipeline.weights.flags_changed
        if self._mesh.world_size > 1:
            may_have_changed = self._watches_steps or self.may_have_other_flags
            has_changed = may_have_changed and self._mesh.any(has_changed)
        self.may_have_other_flags = False
        return has_changed and pipeline.follow_flags(thaws)
