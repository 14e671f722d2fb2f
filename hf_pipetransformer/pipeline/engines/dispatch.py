"""Which engine runs a layout: the first of `ENGINES` that fits it.

The core does not know the parts that some trainings need. They are entered by name, and imported when a training asks
for them; where one is missing, every other training runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...planning.layout import Layout
from ...registry import PARTS, find_module
from ...registry import SLICES as SLICES_PACKAGE
from ..mesh import ProcessMesh
from ..messages import PipelineMessages
from ..virtual_stages import VirtualStages
from .engine import CallServer, Engine, Execution
from .one_stage import OneStageEngine
from .scheduled import ScheduledEngine


@dataclass(frozen=True)
class EnginePackage:
    """A package that only some trainings need.

    Attributes:
        package: its name.
        asked_by: the setting that needs the package, as the beginning of a sentence.
        remedy: the setting that needs no such package, as the end of a sentence.
    """

    package: str
    asked_by: str
    remedy: str

    def load(self, module: str) -> Any:
        """Import a module of the package.

        Raises:
            ValueError: it cannot be imported.
        """
        found = find_module(f"{self.package}.{module}")
        if found is None:
            raise ValueError(
                f"{self.asked_by} {self.package}.{module}, which is not installed. Install the whole package, or"
                f" {self.remedy}."
            )
        return found

    def load_everywhere(self, module: str, mesh: ProcessMesh) -> Any:
        """Import a module of the package on all processes. Collective over all processes.

        Raises:
            ValueError: some process cannot import it. Every process raises it.
        """
        with mesh.failing_together():
            found = self.load(module)
        return found


DRIVEN = EnginePackage(
    f"{PARTS}.driven",
    "loss_reduction: the loss is not known to add up over micro-batches. So it runs on whole batches and drives the"
    " pipeline, which needs",
    "set loss_reduction='sum' or 'mean' if the losses of a batch's parts add up, or pipeline_parallel_size=1",
)
SLICES = EnginePackage(SLICES_PACKAGE, "token_slices: splitting sequences needs", "set token_slices='off'")


@dataclass(frozen=True)
class Dispatcher:
    """An entry of the list of engines.

    Attributes:
        fits: whether the engine runs such a layout in this way, if none before it does.
        engine: returns its class.
    """

    fits: Callable[[Layout, Execution], bool]
    engine: Callable[[], type[Engine]]


ENGINES = (
    Dispatcher(
        lambda layout, execution: _is_cut(layout) and execution.is_driven, lambda: DRIVEN.load("engine").DrivenEngine
    ),
    Dispatcher(
        lambda layout, execution: _is_cut(layout) and execution.slicing is not None,
        lambda: SLICES.load("engine").SlicesEngine,
    ),
    Dispatcher(lambda layout, _: _is_cut(layout), lambda: ScheduledEngine),
    Dispatcher(lambda *_: True, lambda: OneStageEngine),
)


def engine_for(layout: Layout, execution: Execution) -> type[Engine]:
    """Return the class of the engine that runs such a layout in this way.

    Raises:
        ValueError: it cannot be imported.
    """
    return next(entry for entry in ENGINES if entry.fits(layout, execution)).engine()


def server_for(
    layout: Layout, stage: VirtualStages, messages: PipelineMessages, execution: Execution
) -> CallServer | None:
    """Return a server for calls of the model, for several stages, if the layers of each one follow one another.

    None if calls cannot be served.
    """
    if not _is_cut(layout) or layout.num_virtual_stages > 1:
        return None
    part = find_module(f"{DRIVEN.package}.engine")
    if part is None:
        return None
    most_parts = layout.requested_microbatches or layout.num_microbatches
    server: CallServer = part.StageServer(stage.last, messages, most_parts, execution.serves_callbacks)
    return server


def _is_cut(layout: Layout) -> bool:
    return layout.pipeline_parallel_size > 1
