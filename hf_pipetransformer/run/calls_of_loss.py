"""How the user's `compute_loss` calls the model, seen on a few samples before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..cache.content_keys import KEYS_NAME, KeyedInputs, added_settings, named_inputs
from ..errors import is_out_of_memory
from ..model.left_as_found import left_as_found
from ..model.micro_batch import Batch, as_the_user_made_it, with_name
from ..model.nested import in_new_containers, tensors_of
from ..model.placeholders import evaluation_mode
from ..model.units import CalledWith
from ..randomness import seeded
from .job import TrainingJob


class _FirstCall(BaseException):
    """Raised to leave a loss at its first call of the model. No `except Exception` in a user's loss catches it."""


def calls_of_loss(job: TrainingJob, batch: Batch, only_first: bool = False) -> tuple[list[Batch], KeyedInputs]:
    """Compute the loss of a batch, and return the inputs of each call of the model, and the prepared batch's.

    Inputs are by name, as they were when the model was called. If `compute_loss` fails, the calls before that are
    returned: the same error will show when the model itself is called, or in the first step.

    Args:
        job: the training job.
        batch: the batch.
        only_first: whether to leave the loss at its first call, so that the model does not run.
    """
    trainer, model = job.trainer, job.model
    given, calls = KeyedInputs({}), list[Batch]()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = named_inputs(module, args, kwargs)
        # the model may write into a dict that it is called on
        calls.append({n: in_new_containers(v) if isinstance(v, Mapping) else v for n, v in inputs.items()})
        if only_first:
            raise _FirstCall

    with evaluation_mode(model), torch.no_grad(), left_as_found(model, trainer), seeded(job.args.seed):
        hook = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            inputs = job.on_models_device(dict(with_name(trainer._prepare_inputs(as_the_user_made_it(dict(batch))))))
            given = KeyedInputs(inputs)
            with job.computing_loss():
                trainer.compute_loss(model, as_the_user_made_it(inputs))
        except _FirstCall:
            pass
        except Exception as error:
            if is_out_of_memory(error):
                raise
        finally:
            hook.remove()
    return calls, given


def inputs_of(job: TrainingJob, called: CalledWith, batch: Batch) -> Batch:
    """Return inputs of the model for probes on a batch: the batch's own, or those of the loss's first call."""
    if called.takes_batch:
        return {name: value for name, value in batch.items() if name not in called.kept_back}
    calls, _ = calls_of_loss(job, batch, only_first=True)
    assert calls, "the loss has called the model on another batch"
    return calls[0] if called.nested_in is None else dict(calls[0][called.nested_in])


def how_called(job: TrainingJob, sample: Batch) -> CalledWith:
    """Find out on what `compute_loss` calls the model, from a batch of a few samples."""
    if not job.overrides_loss:
        return job.called_by_stock(sample)
    calls, given = calls_of_loss(job, sample, only_first=True)
    if not calls:
        return CalledWith()
    call = calls[0]
    if call.keys().isdisjoint(sample) and tensors_of(call):
        only = next(iter(call)) if len(call) == 1 else None
        is_nested = only is not None and isinstance(call[only], Mapping)
        return CalledWith(takes_batch=False, nested_in=only if is_nested else None)
    if given.are_exchanged(call, job.not_in_keys):
        return CalledWith()
    return CalledWith(frozenset(sample) - call.keys() - {KEYS_NAME}, added_settings(sample, call))
