"""The waits in a step of an evaluation over several stages, on a device that behaves like an accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import fake_device
import fake_groups
import pytest
import test_seq2seq
from distributed import run_ranks
from test_accelerator import on_the_device, prepare
from training_runs import Run, pipeline_trainer

from hf_pipetransformer.pipeline.mesh import ProcessMesh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STAGES = 2


def evaluate(rank: int, world_size: int, library: Path) -> tuple[list[dict[str, int]], list[dict[str, int]], int, Any]:
    """The counts of each step and their sites, how often objects were gathered in a step, and the loss."""
    prepare(world_size, library)
    options = {"dataloader_pin_memory": False, "eval_use_gather_object": False}
    trainer = pipeline_trainer(Run(samples=8), STAGES, **options)
    step, counts, sites, gathered = trainer.prediction_step, [], [], 0
    gather = ProcessMesh.gather_objects

    def counting_gather(*positional: Any, **keywords: Any) -> Any:
        nonlocal gathered
        gathered += 1
        return gather(*positional, **keywords)

    def counting_step(*positional: Any, **keywords: Any) -> Any:
        with mock.patch.object(ProcessMesh, "gather_objects", counting_gather), fake_device.counting() as counted:
            result = step(*positional, **keywords)
        counts.append(dict(counted))
        sites.append({f"{what}: {site}": n for (what, site), n in fake_device.sites.items()})
        return result

    trainer.prediction_step = counting_step  # type: ignore[method-assign]
    metrics = trainer.evaluate()
    assert not fake_groups.wrong and not fake_device.errors
    return counts, sites, gathered, metrics["eval_loss"]


def on_the_cpu(rank: int, world_size: int) -> tuple[float]:
    return (pipeline_trainer(Run(samples=8), STAGES, use_cpu=True).evaluate()["eval_loss"],)


def generate(rank: int, world_size: int, library: Path) -> test_seq2seq.Outcome:
    prepare(world_size, library)
    options = {"use_cpu": False, "dataloader_pin_memory": False, "eval_use_gather_object": False}
    outcome = test_seq2seq.trained(rank, world_size, "t5", STAGES, "generating", generation_num_beams=3, **options)
    assert not fake_groups.wrong and not fake_device.errors
    return outcome


def test_batches_travel_and_weights_are_gathered_to_generate_from_device_to_device(library: Path) -> None:
    """The loader has moved each batch to the device of its own process."""
    found = on_the_device({"evaluated": (evaluate,), "generated": (generate,)}, STAGES, library)
    (expected,) = {loss for (loss,) in run_ranks(on_the_cpu, STAGES)}
    for counts, sites, gathered, loss in found["evaluated"]:
        assert gathered == 0, "objects, pickled, over gloo"
        for counted, where in zip(counts, sites, strict=True):
            assert not {"to_device", "from_device"} & set(counted), where
        assert loss == pytest.approx(expected, abs=1e-6)
    test_seq2seq.assert_same(found["generated"], test_seq2seq.expected("t5", 3))
