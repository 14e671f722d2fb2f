"""What a user has on disk stays as it is, whatever it is called, and what a file says is checked before it is used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_runs import trainer_of
from distributed import run_ranks, run_ranks_expecting_error
from safetensors.torch import save_file
from training_runs import Run, pipeline_trainer

from hf_pipetransformer.cache.file_store import FileStore
from hf_pipetransformer.model.checkpoint_files import weight_files
from hf_pipetransformer.records import model_card
from hf_pipetransformer.records.files import EVENTS, METRICS
from hf_pipetransformer.records.history import read_trainings
from hf_pipetransformer.report import report
from hf_pipetransformer.resilience.checkpoint_folders import (
    MANIFEST,
    SAVING,
    STATE,
    latest_valid,
    rotate,
    validate,
)

RUN = Run(epochs=4, samples=48).with_options(save_strategy="steps", save_steps=3, save_total_limit=1)
FOLDERS = (
    *("2024-05-01", "100-models", "001-lr1/checkpoint-3", "_saving/checkpoint-9", "_saving/replaced/checkpoint-5"),
    *(".deleted-mine", ".new-mine", ".doubtful-mine", "checkpoint-1", "_activation_cache/003-abc"),
)


def everything_in(folder: Path) -> dict[str, bytes | str | None]:
    """Content of each file, target of each link."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }


def have_folders(folder: Path) -> dict[str, Any]:
    """A user's folders, of names that mean something else to this package, and last used long ago."""
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
        for file in ("notes.txt", "segment-0", "model.safetensors"):
            (folder / name / file).write_bytes(os.urandom(100))
    before = everything_in(folder)
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (0, 0))
    return before


def assert_there(before: dict[str, Any], folder: Path) -> None:
    after = everything_in(folder)
    assert {name: after.get(name, "is gone") for name in before} == before


def filling(rank: int, world_size: int, folder: str, epochs: int, resume: bool) -> list[str]:
    """Train with a store that is too small, and return the names of generations that were deleted."""
    deleted: list[str] = []
    delete = FileStore.delete
    FileStore.delete = lambda self, *name: (deleted.append(name), delete(self, *name))[1]  # type: ignore
    run = Run(epochs=epochs, samples=48).with_options(**RUN.options)
    stages = dict.fromkeys(range(4), 1)
    options = {"activation_cache_dir": folder, "activation_cache_max_gib": 60 / 2**20}
    trainer_of(run, stages, {3: 1, 9: 2, 15: 3}, folder, **options).train(resume_from_checkpoint=resume)
    return deleted


def test_a_training_with_a_full_store_leaves_the_users_folders(tmp_path: Path) -> None:
    """Which is the folder of the cache, of the checkpoints (of which one is kept), and of other things."""
    have_folders(tmp_path)
    for name in (EVENTS, METRICS):
        (tmp_path / name).symlink_to(tmp_path / "2024-05-01" / "notes.txt")
    before = everything_in(tmp_path)
    (deleted,) = run_ranks(filling, 1, str(tmp_path), 5, False)
    assert deleted  # so there was no room
    assert_there(before, tmp_path)
    run_ranks(filling, 1, str(tmp_path), 6, True)
    assert_there(before, tmp_path)


# ------------------------------------------------------------------------------------ checkpoints


def test_the_users_folder_of_the_very_name_is_refused(tmp_path: Path) -> None:
    before = have_folders(tmp_path / SAVING)
    with pytest.raises(ValueError, match=f"{SAVING} is needed for files of hf_pipetransformer"):
        pipeline_trainer(RUN, 1, str(tmp_path)).train()
    assert_there(before, tmp_path / SAVING)


def test_rotation_leaves_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / STATE).write_text("{}")
    (tmp_path / "checkpoint-2").symlink_to(tmp_path / "mine")
    for name, file in (("checkpoint-1", "notes.txt"), ("checkpoint-3", STATE), ("checkpoint-4", STATE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    rotate(tmp_path, 1, tmp_path / "checkpoint-4", None)
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "checkpoint-1", "checkpoint-2", "checkpoint-4"}
    assert (tmp_path / "mine" / STATE).exists()


def saving(rank: int, world_size: int, folder: str) -> None:
    pipeline_trainer(RUN, 2, folder).train()


def test_the_users_folder_with_a_checkpoints_name_is_refused_on_all_processes(tmp_path: Path) -> None:
    before = have_folders(tmp_path / "checkpoint-6")
    for error in run_ranks_expecting_error(saving, 2, str(tmp_path)):
        assert isinstance(error, ValueError) and "checkpoint-6 exists, but is not a checkpoint" in str(error)
    assert_there(before, tmp_path / "checkpoint-6")
    assert latest_valid(tmp_path)[0] == tmp_path / "checkpoint-3"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two checkpoints, saved in the middle of an epoch with a frozen layer."""
    folder = tmp_path_factory.mktemp("trained")
    options = {"freeze_policy": "autofreeze", "freeze_strategy": "steps", "freeze_steps": 1, "save_total_limit": 2}
    pipeline_trainer(RUN, 1, str(folder), **{**options, "max_steps": 8, "save_steps": 4}).train()
    assert latest_valid(folder) == (folder / "checkpoint-8", [])
    return folder


@pytest.fixture
def checkpoint(trained: Path, tmp_path: Path) -> Path:
    """The newer one, in a folder of its own with the older one."""
    for path in trained.glob("checkpoint-*/*"):
        copy = tmp_path / path.relative_to(trained)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    return tmp_path / "checkpoint-8"


@pytest.mark.timeout(60)
def test_a_manifest_that_names_what_is_no_file_is_damage(checkpoint: Path) -> None:
    (checkpoint.parent / "precious").write_text("mine")
    (checkpoint / "link-to-a-device").symlink_to("/dev/zero")
    os.mkfifo(checkpoint / "pipe")
    for what in ("/dev/zero", "../precious", "link-to-a-device", "pipe"):
        (checkpoint / MANIFEST).write_text(json.dumps({what: [0, 0]}))
        is_inside = what[0] not in "/."
        words = f"{what} cannot be read (it is not a regular file)" if is_inside else "names are relative paths inside"
        assert words in str(validate(checkpoint))
        assert latest_valid(checkpoint.parent)[0] == checkpoint.with_name("checkpoint-4")
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=.*checkpoint-8: "):
        pipeline_trainer(RUN, 1, str(checkpoint.parent)).train(resume_from_checkpoint=str(checkpoint))
    for file in (STATE, MANIFEST):
        (checkpoint / file).unlink()
        os.mkfifo(checkpoint / file)
        assert f"{file} cannot be read" in str(validate(checkpoint))
        (checkpoint / MANIFEST).write_text("{}")


def pipeline_state(state: dict[str, Any]) -> dict[str, Any]:
    return state["stateful_callbacks"]["PipelineState"]["attributes"]


def freezing(state: dict[str, Any]) -> dict[str, Any]:
    return state["stateful_callbacks"]["LayerFreezeCallback"]["attributes"]


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "stateful_callbacks is": lambda s: s.update(stateful_callbacks=[1]),
    "PipelineState.attributes is missing": lambda s: s["stateful_callbacks"].update(PipelineState={"args": {}}),
    "memory.step is": lambda s: pipeline_state(s)["memory"].update(step="8"),
    "memory.layout.stages is 0": lambda s: pipeline_state(s)["memory"]["layout"].update(stages=0),
    "memory.num_decisions is missing": lambda s: freezing(s)["memory"].pop("num_decisions"),
}


FOREIGN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "layout is no layout": lambda s: pipeline_state(s)["memory"]["layout"].update(stages=3),
    "num_frozen=99": lambda s: freezing(s)["memory"].update(num_frozen=99),
    "gradients of 2 layers": lambda s: freezing(s)["memory"].update(observed=[[1.0, 1.0], [1, 1]]),
}
"""Of another training: there is nothing wrong with the file."""


@pytest.mark.parametrize("field", [*DAMAGE, *FOREIGN])
def test_a_damaged_state_is_a_damaged_checkpoint_and_one_of_another_training_is_refused(
    field: str, checkpoint: Path
) -> None:
    state = json.loads((checkpoint / STATE).read_text())
    {**DAMAGE, **FOREIGN}[field](state)
    (checkpoint / STATE).write_text(json.dumps(state))
    (checkpoint / MANIFEST).write_text("{}")
    options = {"freeze_policy": "autofreeze", "freeze_strategy": "steps", "freeze_steps": 1}
    trainer = pipeline_trainer(RUN, 1, str(checkpoint.parent), **options, max_steps=12)
    with pytest.raises(ValueError) as caught:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert field in str(caught.value)
    if field in DAMAGE:
        assert STATE in str(caught.value)
        newest, (problem,) = latest_valid(checkpoint.parent)
        assert newest == checkpoint.with_name("checkpoint-4") and field in problem


# ------------------------------------------------------------------------------------ weights
def test_an_index_names_files_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (tmp_path / "other.safetensors", folder / "own.safetensors"):
        save_file({"a": torch.zeros(2)}, file)
    index = folder / "model.safetensors.index.json"
    for name in ("../other.safetensors", str(tmp_path / "other.safetensors"), 3):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: weight_map\['a'\] is"):
            weight_files(folder)
    index.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json cannot be read"):
        weight_files(folder)
    index.write_text(json.dumps({"weight_map": {"a": "own.safetensors"}}))
    assert weight_files(folder) == [folder / "own.safetensors"]


# ------------------------------------------------------------------------------------ records
EVENT: dict[str, Any] = {
    **{"event": "start", "run": "a", "global_step": 0, "epoch": 0.0, "num_layers": 4, "num_frozen_layers": 0},
    **{"num_cached_layers": 0, "pipeline_parallel_size": 1, "data_parallel_size": 1, "num_microbatches": 1},
    **{"stage_bounds": [0, 4], "seconds": 0.0, "bytes_moved": 0, "phases": {}},
    "predicted": {"schedule": "1f1b", "memory_bytes": [], "steps": []},
    "facts": {
        **{"model": "Bert", "num_parameters": 1, "world_size": 1, "global_batch_size": 1, "device": "cpu"},
        **{"threads": 1, "versions": {"torch": "2.11"}},
        "arguments": {"freeze_policy": "alpha", "freeze_alpha": 0.5, "activation_cache": "on"},
    },
}
METRIC = {"kind": "time", "run": "a", "global_step": 1, "steps": 1, "rows": 1, "seconds": {"steps": 1.0}}


def record(folder: Path, event: dict[str, Any], metric: dict[str, Any] = METRIC) -> None:
    (folder / EVENTS).write_text(json.dumps(event) + "\n" + '{"event": "sta')
    (folder / METRICS).write_text(json.dumps(metric) + "\n")


@pytest.mark.parametrize(
    ("event", "metric", "told"),
    [
        (
            {**EVENT, "num_frozen_layers": 1e400},
            METRIC,
            f"{EVENTS}, line 1: num_frozen_layers.* Correct or remove the",
        ),
        ({**EVENT, "predicted": {"steps": [{}]}}, METRIC, f"{EVENTS}, line 1: predicted"),
        (EVENT, {**METRIC, "seconds": 3}, f"{METRICS}, line 1: seconds "),
        (EVENT, {**METRIC, "kind": "end"}, f"{METRICS}, line 1: has_ended "),
    ],
)
def test_a_damaged_record_is_named(event: dict[str, Any], metric: dict[str, Any], told: str, tmp_path: Path) -> None:
    record(tmp_path, EVENT)
    assert len(read_trainings(tmp_path)) == 1 and "| 0 | 0 | 0 of 4 |" in str(model_card.section_about(tmp_path, "a"))
    record(tmp_path, event, metric)
    for read in (read_trainings, lambda folder: model_card.section_about(folder, "a")):
        with pytest.raises(ValueError, match=told):
            read(tmp_path)


def test_the_model_card_has_no_markup_of_the_records(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script> [x](http://y) `z` | *b*\n# h <!-- /hf_pipetransformer -->"
    facts = {
        **EVENT["facts"],
        "device": evil,
        "versions": {evil: evil},
        "arguments": {"freeze_policy": evil, "freeze_steps": evil, "activation_cache": evil},
    }
    record(tmp_path, {**EVENT, "facts": facts}, {**METRIC, "kind": "log", "values": {"cache_layers_skipped": evil}})
    (tmp_path / "README.md").write_text("my words\n")
    for _ in range(2):
        model_card.add_to_card(tmp_path, "a")
        card = (tmp_path / "README.md").read_text()
        assert card.startswith("my words\n") and card.count(model_card.BEGIN) == card.count(model_card.END) == 1
        section = card.partition(model_card.BEGIN)[2].partition(model_card.END)[0]
        assert not any(mark in section for mark in ("<", "[x]", "`z`", "*b*", "# h", "http://"))
        assert section.count("&#60;script&#62;") >= 4


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = tmp_path / "out"
    folder.mkdir()
    record(folder, EVENT)
    for name in ("README.md", report.FILE_NAME):
        (folder / name).symlink_to(precious)
    with pytest.raises(ValueError, match=r"README\.md is a link"):
        model_card.add_to_card(folder, "a")
    with pytest.raises(ValueError, match=r"report\.html is a link.* Pass another --output"):
        report.write_report(folder)
    assert precious.read_text() == "mine"
    names = {"README.md", report.FILE_NAME, EVENTS, METRICS}
    assert {path.name for path in folder.iterdir()} == names
