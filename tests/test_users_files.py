"""A user's files stay as they are, with any name, and the contents of a file are checked before they are used."""

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

from hf_pipetransformer.parts.lazy_loading.checkpoint_files import weight_files
from hf_pipetransformer.parts.prefix_cache.cache.file_store import FileStore
from hf_pipetransformer.parts.records import model_card
from hf_pipetransformer.parts.records.files import EVENTS, METRICS
from hf_pipetransformer.parts.records.history import read_trainings
from hf_pipetransformer.report import report
from hf_pipetransformer.run.checkpoint_folders import MANIFEST, SAVING, STATE, latest_valid

RUN = Run(epochs=4, samples=48).with_options(save_strategy="steps", save_steps=3, save_total_limit=1)
FOLDERS = (
    *("2024-05-01", "100-models", "001-lr1/checkpoint-3", "_saving/checkpoint-9", "_saving/replaced/checkpoint-5"),
    *(".deleted-mine", ".new-mine", ".doubtful-mine", "checkpoint-1", "_activation_cache/003-abc"),
)


def everything_in(folder: Path) -> dict[str, bytes | str | None]:
    """Content of each file, target of each link."""
    found: dict[str, bytes | str | None] = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found[str(path.relative_to(folder))] = os.readlink(path) if path.is_symlink() else content
    return found


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


@pytest.mark.slow
def test_a_training_with_a_full_store_leaves_the_users_folders(tmp_path: Path) -> None:
    """The cache, the checkpoints (one is kept) and the user's files are in the same folder."""
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


def saving(rank: int, world_size: int, folder: str) -> None:
    pipeline_trainer(RUN, 2, folder).train()


@pytest.mark.slow
def test_the_users_folder_with_a_checkpoints_name_is_refused_on_all_processes(tmp_path: Path) -> None:
    before = have_folders(tmp_path / "checkpoint-6")
    for error in run_ranks_expecting_error(saving, 2, str(tmp_path)):
        assert isinstance(error, ValueError) and "checkpoint-6 exists, but is not a checkpoint" in str(error)
    assert_there(before, tmp_path / "checkpoint-6")
    assert latest_valid(tmp_path)[0] == tmp_path / "checkpoint-3"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints, saved in the middle of an epoch with a frozen layer."""
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


def memory(state: dict[str, Any], name: str = "PipelineState") -> dict[str, Any]:
    return state["stateful_callbacks"][name]["attributes"]["memory"]


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "stateful_callbacks is": lambda s: s.update(stateful_callbacks=[1]),
    "PipelineState.attributes is missing": lambda s: s["stateful_callbacks"].update(PipelineState={"args": {}}),
    "memory.layout.stages is 0": lambda s: memory(s)["layout"].update(stages=0),
    "memory.num_decisions is missing": lambda s: memory(s, "LayerFreezeCallback").pop("num_decisions"),
}


FOREIGN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "layout is no layout": lambda s: memory(s)["layout"].update(stages=3),
    "gradients of 2 layers": lambda s: memory(s, "LayerFreezeCallback").update(observed=[[1.0, 1.0], [1, 1]]),
}
"""Changes to a file that make it another training's: the file itself is valid."""


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
def record(trained: Path, folder: Path, file: str = EVENTS, kind: str = "", **damage: Any) -> str:
    """Copy a training's record, with something else in the first line of a kind. Returns the name of the training."""
    for name in (EVENTS, METRICS):
        (folder / name).write_text((trained / name).read_text())
    lines = [json.loads(line) for line in (trained / file).read_text().splitlines()]
    number = next(i for i, line in enumerate(lines) if kind in ("", line.get("kind"), line.get("event")))
    lines[number] = {**lines[number], **damage}
    (folder / file).write_text("\n".join(map(json.dumps, lines)))
    return lines[0]["run"]


@pytest.mark.parametrize(
    ("file", "kind", "field", "value"),
    [
        *((EVENTS, "start", "num_frozen_layers", 1e400), (EVENTS, "start", "predicted", {"steps": [{}]})),
        *((METRICS, "time", "seconds", 3), (METRICS, "end", "has_ended", None)),
    ],
)
def test_a_damaged_record_is_named(
    file: str, kind: str, field: str, value: Any, trained: Path, tmp_path: Path
) -> None:
    run = record(trained, tmp_path)
    assert len(read_trainings(tmp_path)) == 1 and "of 4 layers |" in str(model_card.section_about(tmp_path, run))
    record(trained, tmp_path, file, kind, **{field: value})
    for read in (read_trainings, lambda folder: model_card.section_about(folder, run)):
        with pytest.raises(ValueError, match=rf"{file}, line \d+: {field}.* Correct or remove the line"):
            read(tmp_path)


def test_the_model_card_has_no_markup_of_the_records(trained: Path, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script> [x](http://y) `z` | *b*\n# h <!-- /hf_pipetransformer -->"
    record(trained, tmp_path)
    facts = json.loads((tmp_path / EVENTS).read_text().splitlines()[0])["facts"]
    arguments = {**facts["arguments"], "freeze_policy": evil, "freeze_steps": evil, "activation_cache": evil}
    facts |= {"device": evil, "versions": {evil: evil}, "arguments": arguments}
    run = record(trained, tmp_path, EVENTS, "start", facts=facts)
    (tmp_path / "README.md").write_text("my words\n")
    for _ in range(2):
        model_card.add_to_card(tmp_path, run)
        card = (tmp_path / "README.md").read_text()
        assert card.startswith("my words\n") and card.count(model_card.BEGIN) == card.count(model_card.END) == 1
        section = card.partition(model_card.BEGIN)[2].partition(model_card.END)[0]
        assert not any(mark in section for mark in ("<", "[x]", "`z`", "*b*", "# h", "http://"))
        assert section.count("&#60;script&#62;") >= 3


def test_nothing_is_written_through_a_link(trained: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = tmp_path / "out"
    folder.mkdir()
    run = record(trained, folder)
    for name in ("README.md", report.FILE_NAME):
        (folder / name).symlink_to(precious)
    with pytest.raises(ValueError, match=r"README\.md is a link"):
        model_card.add_to_card(folder, run)
    with pytest.raises(ValueError, match=r"report\.html is a link.* Pass another --output"):
        report.write_report(folder)
    assert precious.read_text() == "mine"
    names = {"README.md", report.FILE_NAME, EVENTS, METRICS}
    assert {path.name for path in folder.iterdir()} == names
