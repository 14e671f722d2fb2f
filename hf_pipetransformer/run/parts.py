"""Parts: capabilities that a training has, and that the core does not know.

A part is a `RunPart` that `make(run)` of its module `parts/<name>/part.py` returns. All methods are optional. The
parts follow from the arguments, so every process has the same ones, in the order of `parts/entries.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..model.micro_batch import Batch
from ..pipeline.moves import Transformation
from ..planning.layout import Layout
from ..registry import find_part, not_installed

if TYPE_CHECKING:
    from .run import PipelineRun
    from .setup.placing import Findings


@dataclass(frozen=True)
class Wish:
    """Numbers of layers that the parts want to have frozen and cached."""

    num_frozen: int
    num_cached: int


@dataclass(frozen=True)
class LayoutChange:
    """A change of the layout between two steps.

    Attributes:
        before: the layout until now.
        after: the layout from now on.
        transformation: the cost of the change; None if no layer has moved.
    """

    before: Layout
    after: Layout
    transformation: Transformation | None


@dataclass(frozen=True)
class StepFacts:
    """The core's observations in a step on this process.

    Attributes:
        loses_tags: whether the batch's inputs have changed since they were tagged.
        rows: number of samples of the batch, over all pipelines.
        num_parts: number of micro-batch losses that this process has computed.
    """

    loses_tags: bool
    rows: int
    num_parts: int


@dataclass(frozen=True)
class Ending:
    """The end of a training.

    Attributes:
        error: the error that has ended it; None if it is complete.
        newest: the newest checkpoint to resume from, if there is one.
    """

    error: BaseException | None
    newest: Path | None

    @property
    def has_failed(self) -> bool:
        return isinstance(self.error, Exception)


class RunPart:
    """One part of one `train()`. Methods are collective over all processes unless they say otherwise."""

    num_frozen = 0
    """Number of layers that are frozen from the first step on; known after `found`."""
    most_frozen: int | None = None
    """Number of layers that will be frozen at most, if it is known; after `found`."""
    may_thaw = False
    """Whether frozen layers may be trained again."""
    num_votes = 0
    """Number of votes that the part has in each step."""
    calls_per_sample = 1
    """Number of inputs for each sample in the loss's calls of the model."""

    # ------------------------------------------------------------------------------------ before the first step
    def around_train(self) -> AbstractContextManager[Any]:
        """Entered when `train()` begins. Parts are left in reverse order."""
        return nullcontext()

    def found(self, found: Findings) -> None:
        """The model has been examined, and is complete on every process."""

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        """Restore what `state_dict` has returned; {} in a new training. Not collective."""

    def chosen(self, is_resumed: bool) -> None:
        """The first layout has been chosen."""

    def optimizer_found(self, optimizer: torch.optim.Optimizer, layout: Layout) -> None:
        """An optimizer is about to update the model under this layout. A `ValueError` refuses it."""

    def placed(self, layout: Layout) -> None:
        """The model is placed in its first layout."""

    # ------------------------------------------------------------------------------------ events of the loop
    def train_begins(self) -> None:
        """The loop begins."""

    def epoch_begins(self) -> None:
        """Not collective."""

    def step_begins(self, is_first: bool) -> None:
        """An optimizer step begins, the first one of this training or another."""

    def epoch_ends(self) -> None:
        """An epoch has ended on all processes."""

    def weights_shown(self) -> None:
        """Callbacks follow that may read or change weights. Not collective."""

    def before_best(self) -> None:
        """The best model's weights are about to replace the last ones."""

    def nothing_left(self) -> None:
        """A resumed training has no step left. Not collective."""

    def train_ends(self) -> None:
        """The last step is done."""

    def release(self) -> None:
        """The model is about to be gathered: undo the part's changes to it."""

    def wrap_step_end(self, stock: Callable[[], None]) -> Callable[[], None]:
        """Return a replacement of the Trainer's method that logs, saves and evaluates after a step."""
        return stock

    # ------------------------------------------------------------------------------------ between two steps
    def between_steps(self) -> None:
        """No batch is being processed, and there are no gradients."""

    def wish(self, wish: Wish) -> Wish:
        """Return the part's wish, given the values in force and the earlier parts' wishes."""
        return wish

    def granted(self, layout: Layout) -> None:
        """The wishes are carried out: this layout is in force."""

    def layout_changed(self, change: LayoutChange) -> None:
        """The layout has changed."""

    def flags_followed(self, has_thawed: bool) -> None:
        """The parameters' `requires_grad` has been followed. `has_thawed`: layers that were frozen are trained."""

    def thawed(self) -> None:
        """From now on, no layer counts as frozen."""

    # ------------------------------------------------------------------------------------ steps
    def around_step(self, batch: Batch) -> AbstractContextManager[Any]:
        """Entered around forward and backward of a batch. Not collective."""
        return nullcontext()

    def vote(self, facts: StepFacts) -> tuple[bool, ...]:
        """Return `num_votes` votes, which are reduced together with the loss. Not collective."""
        return ()

    def heard(self, votes: tuple[bool, ...]) -> None:
        """Which votes any process has given, the same on every process: a part may communicate if there are some."""

    def stepped(self, facts: StepFacts, loss: torch.Tensor) -> None:
        """A step is done; the loss is the global batch's. Not collective."""

    def before_update(self, scale: float) -> None:
        """The gradients of an optimizer step are complete, and not yet clipped.

        Args:
            scale: the gradient scaler's factor, by which the gradients are too large; 1 without a scaler.
        """

    # ------------------------------------------------------------------------------------ evaluations, checkpoints
    def around_evaluation(self, dataloader: Any, prefix: str) -> AbstractContextManager[Any]:
        """Entered around an evaluation that does not generate. `prefix`: of its metrics."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the part's state for a checkpoint, in plain values for JSON."""
        return {}

    # ------------------------------------------------------------------------------------ messages
    def told(self, topic: str, value: Any) -> None:
        """Another part, or the core, has published something (`PipelineRun.publish`)."""

    def describe(self) -> str | None:
        """Return the part's clause in the log line at the start of training; None for none."""
        return None

    def around(self, activity: str) -> AbstractContextManager[Any]:
        """Entered while the run does something that is no step. Not collective."""
        return nullcontext()

    def meet(self, doing: str) -> bool:
        """Wait for all processes to begin the same. Returns whether the part can."""
        return False

    # ------------------------------------------------------------------------------------ the end
    def abandon(self, is_resumable: bool) -> str:
        """Ctrl-C has ended the training. Returns a sentence about the part's remaining files. Not collective."""
        return ""

    def close(self, ending: Ending) -> None:
        """The training is over. Not collective, because an error may be of one process alone."""

    def keeps_evaluations_of(self, model: nn.Module) -> bool:
        """Whether `around_evaluation` may be entered after the training."""
        return False

    def forget(self) -> None:
        """Another training begins: remove the data kept after this one. Not collective."""

    def add_to_card(self, folder: Path) -> None:
        """Describe the training in the model card in a folder. Called on the main process."""


class Parts:
    """The parts of one `train()`.

    Args:
        run: the run. Only its job exists yet.

    Raises:
        ValueError: a part that the user has asked for is not installed.
    """

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._by_name: dict[str, RunPart] = {}
        self._having: dict[str, Sequence[RunPart]] = {}
        self.choose()

    def choose(self) -> None:
        """Make the parts that the arguments ask for, and keep existing ones. Collective over all processes.

        Raises:
            ValueError: a part that the user has asked for is not installed, or a part is not installed everywhere.
                Every process raises it.
        """
        entries, before = find_part("entries"), self._by_name
        known = entries.ENTRIES if entries is not None else []
        # of a model that is frozen on one process only: set-up refuses it, and says so
        everyone = self._run.job.mesh.gather_objects([entry.name for entry in known if entry.is_wanted(self._run.job)])
        wanted = set().union(*everyone)
        self._by_name, self._having = {}, {}
        missing: ValueError | None = None
        for entry in known:
            if entry.name not in wanted:
                continue
            part, asked_by = before.get(entry.name) or self._made(entry), entry.asked_by(self._run.job)
            if part is not None:
                self._by_name[entry.name] = part
            elif asked_by is not None and missing is None:
                missing = not_installed(entry.name, asked_by)
        installed = self._run.job.mesh.gather_objects((list(self._by_name), str(missing or "")))
        found, errors = zip(*installed, strict=True)
        if any(errors):
            raise missing or ValueError(next(filter(None, errors)))
        other = next((rank for rank, names in enumerate(found) if names != found[0]), None)
        if other is not None:  # they would reduce other votes
            raise ValueError(
                f"Process 0 has the parts {', '.join(found[0])} of {__package__.partition('.')[0]} installed, and"
                f" process {other} has {', '.join(found[other])}. Install the same version on all nodes."
            )

    def _made(self, entry: Any) -> RunPart | None:
        if entry.make is not None:
            return entry.make(self._run)
        module = find_part(f"{entry.name}.part")
        return module.make(self._run) if module is not None else None

    def __iter__(self) -> Iterator[RunPart]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Any:
        """Return the part with a name; None if the training does not have it."""
        return self._by_name.get(name)

    def having(self, method: str) -> Sequence[RunPart]:
        """Return the parts that override a method. A step then costs no time for the others."""
        if method not in self._having:
            own = getattr(RunPart, method)
            self._having[method] = [part for part in self if getattr(type(part), method) is not own]
        return self._having[method]
