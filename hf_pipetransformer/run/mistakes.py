"""Mistakes in the arguments, the data or the metric that the stock Trainer reports late, or unclearly.

checked_arguments           in the trainer's constructor
refuse_unknown_metric       before the first step: `metric_for_best_model`, where the metrics' names are known
explaining_unknown_metric   after the first evaluation, in place of a `KeyError`
explaining_missing_labels   in the first `compute_loss`, which a probe calls before the first step if there is one
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import SaveStrategy

from ..errors import in_one_line, lines_of
from ..model.tags import TAGS
from ..training_args import PipeTransformerTrainingArguments
from .job import TrainingJob, refuse_distributed_model
from .lazy_model import refuse_meta

T = TypeVar("T")

SPEEDS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time")
"""Names of metrics that every evaluation may have, besides the loss. The names of metrics of memory contain "mem_"."""
MAKES_METRICS = ("evaluate", "_evaluate", "evaluation_loop", "log", "_determine_best_metric")
"""Methods in which a user's trainer may add metrics of its own."""
METRIC = "metric_for_best_model"
"""Part of the message of the stock Trainer's `KeyError`."""
NO_LOSS = "did not return a loss"
"""Part of the message of the stock Trainer's error."""


def checked_arguments(trainer: type[Trainer], args: Any, model: Any) -> PipeTransformerTrainingArguments:
    """Return the arguments that a trainer is given, after a look at them and at its model.

    sentence-transformers' arguments drop the last, short batch with several processes, as uneven batches may hang in
    DDP. Stages train on the same batch: it is dropped only if the user has asked for it when making the arguments.

    Raises:
        ValueError: they are of another class, which lacks the fields of the pipeline; a pipeline's batch is empty; or
            they do not fit the model.
    """
    if not isinstance(args, PipeTransformerTrainingArguments):
        raise ValueError(
            f"args is a {type(args).__name__}, but {trainer.__name__} requires PipeTransformerTrainingArguments. Pass"
            " an instance of it as args=...; it accepts the same fields. With another library's trainer, pass a"
            " dataclass that derives from its arguments and from PipeTransformerTrainingArguments, in this order."
        )
    if args.uses_pipeline and args.per_device_train_batch_size < 1:
        raise ValueError(
            f"per_device_train_batch_size={args.per_device_train_batch_size}, but a pipeline's batch has"
            " per_device_train_batch_size x number of stages samples. Set it to at least 1."
        )
    is_of_sentences = any(base.__module__.startswith("sentence_transformers.") for base in type(args).__mro__)
    if args.uses_pipeline and is_of_sentences:
        args.dataloader_drop_last = getattr(args, "drops_last_as_given", args.dataloader_drop_last)
    if args.world_size == 1 and not args.leaves_model_to_trainer:
        refuse_meta(model)  # several processes refuse it together, when the model is needed
    if args.uses_pipeline:
        args.refuse_impossible_layout(model)
        refuse_distributed_model(model)
    return args


# ---------------------------------------------------------------------------------------------------------
# The metric that selects the best model
# ---------------------------------------------------------------------------------------------------------


def refuse_unknown_metric(job: TrainingJob) -> None:
    """Refuse a `metric_for_best_model` that no evaluation will have, as far as the names are known.

    Without `compute_metrics` they are known, unless the user's own code may add others.

    Raises:
        ValueError: there is no such metric. Every process raises it.
    """
    trainer, args = job.trainer, job.args
    wanted, data = args.metric_for_best_model, trainer.eval_dataset
    if wanted is None or data is None or args.eval_strategy == "no" or "mem_" in wanted:
        return
    if trainer.compute_metrics is not None or any(map(job.overrides, MAKES_METRICS)) or _is_evaluation_watched(job):
        return
    sets = [f"{name}_" for name in data] if isinstance(data, dict) else [""]
    names = [f"eval_{name}{what}" for name in sets for what in ("loss", *SPEEDS)]
    if f"eval_{wanted.removeprefix('eval_')}" not in names:
        losses = [name for name in names if name.endswith("_loss")]
        raise _unknown_metric(wanted, losses, "Without compute_metrics, an evaluation gives")


@contextmanager
def explaining_unknown_metric(trainer: Trainer) -> Iterator[None]:
    """Inside, where the stock Trainer evaluates, name the metrics if `metric_for_best_model` is none of them.

    The checkpoint of this step is saved before the error, to lose no step. Then this is collective over all
    processes, as the evaluation is.

    Raises:
        ValueError: it is none of them. Every process raises it.
    """
    try:
        yield
    except KeyError as error:
        if METRIC not in str(error):
            raise
        state, control, wanted = trainer.state, trainer.control, str(trainer.args.metric_for_best_model)
        logged = [entry for entry in state.log_history if entry["step"] == state.global_step]
        names = dict.fromkeys(name for entry in logged for name in entry)
        is_due = control.should_save or trainer.args.save_strategy == SaveStrategy.BEST
        if is_due and trainer.hp_search_backend is None:
            model: Any = trainer.model
            trainer._save_checkpoint(model, None)
            trainer.control = trainer.callback_handler.on_save(trainer.args, state, control)
        raise _unknown_metric(wanted, names, "The evaluation gave") from error


def _unknown_metric(wanted: str, names: Iterable[str], which: str) -> ValueError:
    """Return the error for a metric that no evaluation has.

    Args:
        wanted: the value of `metric_for_best_model`.
        names: the metrics that there are.
        which: the beginning of a sentence that lists them.
    """
    known = [name for name in names if name.startswith("eval_") and not name.endswith(SPEEDS)]
    plain = f"eval_{wanted.removeprefix('eval_')}"
    close = difflib.get_close_matches(plain, known, 1) or [name for name in known if name.endswith(plain[4:])]
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ValueError(
        f"metric_for_best_model={wanted!r} is not a metric of the evaluation. {which} {', '.join(known) or 'none'}."
        f"{hint} Set metric_for_best_model to a metric that there is, or pass a compute_metrics that returns"
        f" {plain.removeprefix('eval_')!r}."
    )


def _is_evaluation_watched(job: TrainingJob) -> bool:
    """Whether a callback of the user's receives the metrics. It may add others."""
    stock = TrainerCallback.on_evaluate
    return any(getattr(type(one), "on_evaluate", stock) is not stock for one in job.users_callbacks)


# ---------------------------------------------------------------------------------------------------------
# Labels
# ---------------------------------------------------------------------------------------------------------


def explaining_missing_labels(job: TrainingJob, inputs: Any, compute_loss: Callable[[], T]) -> T:
    """Call the stock `compute_loss`, and say that the batch has no labels if this is why there is no loss.

    Args:
        job: the training job.
        inputs: the batch.
        compute_loss: returns the loss, or the loss and the model's outputs.

    Raises:
        ValueError: the batch lacks the labels that the loss needs.
    """
    trainer, wanted = job.trainer, list(job.trainer.label_names or ())
    if trainer.compute_loss_func is not None or not isinstance(inputs, Mapping):
        return compute_loss()
    missing = [name for name in wanted if inputs.get(name) is None]
    given = [name for name in inputs if name != TAGS]  # the stock method may remove some
    has_none = bool(missing) and missing == wanted and not job.overrides_loss
    try:
        found = compute_loss()
    except (ValueError, TypeError, AttributeError) as error:
        if not _is_of_missing_labels(error, wanted, missing, has_none):
            raise
        raise ValueError(_no_labels(trainer, given, missing, in_one_line(error))) from error
    loss = found[0] if isinstance(found, tuple) else found
    if has_none and isinstance(loss, torch.Tensor) and loss.dim() > 1:
        # a model that returns a tuple: its first element is the loss only if there are labels, otherwise its scores
        raise ValueError(_no_labels(trainer, given, missing, f"the first output has the shape {list(loss.shape)}"))
    return found


def _is_of_missing_labels(error: Exception, wanted: list[str], missing: list[str], has_none: bool) -> bool:
    text = str(error)
    if isinstance(error, ValueError):
        return NO_LOSS in text and (not wanted or bool(missing))
    if "required positional argument" in text:
        return any(f"'{name}'" in text for name in missing)
    # a loss that was computed with labels=None; other values may be None by a mistake in the model
    uses_labels = any(name in line for line in lines_of(error) for name in missing)
    return has_none and "NoneType" in text and uses_labels


def _no_labels(trainer: Trainer, given: list[str], missing: list[str], found: str) -> str:
    """Return the text of the error: the missing labels, the data's columns, and the remedy."""
    model: Any = trainer.model
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(model).__name__
    columns = _columns(trainer.train_dataset)
    has = f"The batch has {_listed(given)}."
    if columns:
        has = f"The training data set has the columns {_listed(columns)}, and a batch has {_listed(given)}."
    if "return_loss" in inspect.signature(type(model).forward).parameters:
        return f"{name} returned no loss. {has} Its forward returns one if the batch contains return_loss=True."
    if not missing:
        return (
            f"{name} returned no loss, and its forward takes no labels. {has} Use a class with a head for your task"
            " (AutoModelFor...), or override compute_loss."
        )
    why = "" if NO_LOSS in found else f" ({found})"
    others = [column for column in columns if column not in given]
    old = others[0] if len(others) == 1 else "..."
    return (
        f"{name} returned no loss{why}, because its batch has no {_listed(missing)}. {has} Rename the column that"
        f" contains the labels: dataset.rename_column({old!r}, {missing[0]!r}). Or pass a data collator that makes"
        " labels, such as DataCollatorForLanguageModeling. Or set label_names if the model's forward has another name"
        " for them."
    )


def _columns(dataset: Any) -> list[str]:
    """Return the columns of a data set, or of its first sample; none of a stream, which must not be read."""
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list):
        return names
    try:
        first = dataset[0]
    except Exception:  # a stream, or a data set that fails
        return []
    return list(first) if isinstance(first, Mapping) else []


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
