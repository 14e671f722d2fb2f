"""Detects changes of the function that frozen layers compute: cached outputs belong to one function.

    generation opened   name(boundary)    digests of weights, buffers and the outputs for a few samples -> its name
    check               what_changed()    compares weights, buffers, and the outputs for the same samples
    each step           looks_same()      compares numbers of writes, one number of each tensor, and settings

A configuration does not show a changed activation function in a user's module, an adapter's scale, a pruning mask or a
hook. The outputs do, if they change for these samples.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from ...model.left_as_found import left_as_found
from ...model.micro_batch import Batch
from ...model.nested import are_close, on_device
from ...pipeline.elastic_pipeline import ElasticPipeline
from ...pipeline.messages import Crossing, PipelineMessages, wait_for
from ...pipeline.stage import as_carry
from ...pipeline.virtual_stages import VirtualStages
from ...randomness import generators_kept, seeded
from .cache.comparing import SAME
from .cache.known_code import modules_called
from .cache.watched_weights import WatchedWeights, digest_of

logger = logging.getLogger(__name__)

MOST_NUMBERS = 2**16
"""Maximum number of values of an output to keep for comparisons, evenly spaced."""
OTHER_WEIGHTS = "the frozen layers' weights or buffers have been changed"
OTHER_SETTINGS = (
    "an attribute, a hook or code of the frozen layers, or of modules around them, has been changed, added or removed"
)
OTHER_OUTPUTS = (
    "the frozen layers return different outputs for the same samples than before, although their weights are the same"
    " (an attribute, a hook, an adapter's scale or the attention implementation has changed, or they draw random"
    " numbers)"
)


class FrozenFunction:
    """The function of a model's first, frozen units. Their outputs are cached.

    Args:
        pipeline: the model.
        rows: a few samples of the dataset, collated, the same on every process.
    """

    def __init__(self, pipeline: ElasticPipeline, rows: Mapping[str, Any]) -> None:
        self._pipeline = pipeline
        self._rows = on_device(rows, pipeline.device)
        self._boundary = 0
        self._digests: dict[str, str] = {}  # weight name -> digest
        self._outputs: list[torch.Tensor] = []  # some values of each output, from opening
        self._num_looks = 0
        self._watched: WatchedWeights | None = None  # this process's part of the function
        self._called: dict[nn.Module, None] = {}  # the modules that were called for these samples

    def forget_weights(self) -> None:
        """Discard the digests of weights: the weights may have changed since."""
        self._digests.clear()

    def name(self, boundary: int) -> str:
        """Return a digest of the function of the first `boundary` units, which stay frozen from now on.

        Collective over all processes.
        """
        self._boundary, self._num_looks = boundary, 0
        pipeline = self._pipeline
        stage, table = pipeline.stage, pipeline.stack.table
        assert stage is not None
        names = pipeline.stack.owned(0, boundary)
        mine = {name: self._digests.get(name) or digest_of(table[name]) for name in stage.names if name in names}
        with modules_called() as self._called:
            outputs = self._run(boundary, seed=0) or ()
        buffers = [digest_of(buffer) for buffer in self._watch().buffers]
        here = (mine, buffers, outputs)
        everyone = pipeline.mesh.gather_objects(here)
        for weights, *_ in everyone:
            self._digests.update(weights)
        # the stages of the first pipeline, in order; the last frozen unit is on one of them
        of_first = [everyone[rank] for rank in pipeline.current_layout.ranks_of_pipeline(0)]
        self._outputs = [output for *_, outputs in of_first for output in outputs]
        of_weights = [f"{name} {self._digests[name]}" for name in sorted(names)]
        content = [str(boundary), *of_weights, *of_first[0][1], *map(digest_of, self._outputs)]
        return xxhash.xxh3_128_hexdigest("\n".join(content).encode())

    def note(self) -> None:
        """Record the weights and buffers on this process under the current plan, and guard them. Not collective."""
        self.release()
        table = self._pipeline.stack.table
        self._watched = self._watch()
        self._watched.guard({id(table[name]): digest for name, digest in self._digests.items()})
        self._watched.look_for_holders()

    def release(self) -> None:
        """Remove the guards from the weights."""
        if self._watched is not None:
            self._watched.release()

    def what_changed(self) -> str | None:
        """Return why the cached outputs no longer match the frozen layers; None if they match.

        Collective over all processes.
        """
        self._num_looks += 1
        weights_hold = self._watched is None or self._watched.what_changed(settings=False) is None
        settings_hold = self._watched is None or self._watched.are_settings_same()
        # a new seed each time: frozen layers must not depend on random numbers
        outputs = self._run(self._boundary, seed=self._num_looks)
        outputs_hold = outputs is None or all(
            are_close(output, noted, SAME, SAME) for output, noted in zip(outputs, self._outputs, strict=True)
        )
        votes = self._pipeline.mesh.gather_objects((weights_hold, outputs_hold, settings_hold))
        for holds, why in zip(zip(*votes, strict=True), (OTHER_WEIGHTS, OTHER_OUTPUTS, OTHER_SETTINGS), strict=True):
            if not all(holds):
                return why
        return None

    def depends_on(self, settings: Mapping[str, Any]) -> bool:
        """Whether additional settings of a call change the outputs for the samples.

        Requires one stage. Collective over all processes.
        """
        outputs: list[torch.Tensor] = []
        try:
            outputs = self._run(self._boundary, seed=0, settings=settings) or []
        except TypeError:  # the settings may need other arguments of the loss
            logger.debug("The frozen layers could not be run with %s.", settings, exc_info=True)
        is_same = len(outputs) == len(self._outputs) and all(
            are_close(one, other, SAME, SAME) for one, other in zip(outputs, self._outputs, strict=True)
        )
        return not all(self._pipeline.mesh.gather_objects(is_same))

    def looks_same(self, values: bool = True) -> bool:
        """Whether a cheap check finds no change of settings and, if asked, of values. Not collective."""
        return self._watched is None or self._watched.what_changed(values=values, modes=False) is None

    def _run(self, boundary: int, seed: int, settings: Mapping[str, Any] | None = None) -> list[torch.Tensor] | None:
        running, rows = self._pipeline.running, {**self._rows, **(settings or {})}
        outputs = outputs_of_frozen(running.stage, running.messages, rows, boundary, seed)
        some = [output.flatten()[:: 1 + output.numel() // MOST_NUMBERS] for output in outputs or ()]
        return None if outputs is None else [numbers.cpu() for numbers in some]

    def _watch(self) -> WatchedWeights:
        """Watch frozen layers, modules with frozen parameters of their own, and those that compute the layers' inputs.

        The latter are all that were called for the samples: around the layers, below and beside them.
        """
        pipeline, stack = self._pipeline, self._pipeline.stack
        assert pipeline.stage is not None and pipeline.freezable is not None
        names = pipeline.freezable.frozen(self._boundary)
        here = [stack.table[name] for name in pipeline.stage.names if name in names]
        frozen = {id(stack.table[name]) for name in names}
        layers = {module for unit in stack.units[: self._boundary] for module in unit.module.modules()}
        holders: list[nn.Module] = [
            module
            for module in stack.model.modules()
            if module in layers
            or module in self._called
            or any(id(p) in frozen for p in module.parameters(recurse=False))
        ]
        return WatchedWeights(holders, here, with_hooks=True)


@torch.no_grad()
def outputs_of_frozen(
    held: VirtualStages, messages: PipelineMessages, batch: Batch, boundary: int, seed: int
) -> tuple[torch.Tensor, ...] | None:
    """Return the outputs of the first `boundary` units, all frozen, for a few samples in training mode.

    The model is left unchanged. Collective over the pipeline, as the units may be on several of its stages.

    Args:
        held: what this process holds.
        messages: sends to and receives from the other stages.
        batch: the model's inputs, on the device, the same on all stages.
        boundary: number of units to run.
        seed: seed of the random number generators.

    Returns:
        The tensors that are read above the boundary, on the stage that holds the last of these units; None on the
        others. Unread tensors are not sent, because their values would depend on the layout.
    """
    model, runner = held.stack.model, held.stack.runner
    for index, stage in zip(messages.virtual_stages, held.stages, strict=True):
        if stage.start >= boundary:
            return None
        values = messages.receive_values(index, stage.slots_in) if stage.start > 0 else []
        stop = min(stage.stop, boundary)
        with left_as_found(model), generators_kept(model), seeded(seed):
            model.train()
            reached = runner.run(stage.start, stop, as_carry(stage.slots_in, values), batch)
        if stop == boundary:
            if boundary == held.stack.num_units:
                return tuple(tensor for stack in sorted(reached) for tensor in reached[stack])
            read = [slot for slot in held.stack.boundaries[boundary] if slot.is_used]
            return tuple(reached[slot.stack][slot.position] for slot in read)
        outputs = [reached[slot.stack][slot.position] for slot in stage.slots_out]
        wait_for(messages.send_values(Crossing(index, stage.slots_out, outputs)))
    return None
