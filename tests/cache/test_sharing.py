"""How trainings, nodes and workers find what others have stored."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hf_pipetransformer.cache import sharing
from hf_pipetransformer.cache.activation_files import FileReader
from hf_pipetransformer.own_files import MARKER


def test_a_disk_that_is_full_keeps_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace_nothing(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", replace_nothing)
    with suppress(OSError):
        sharing.publish(tmp_path / "current-a.json", [(2, "b")])
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]


def test_workers_read_ahead_in_the_generations_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(sharing, "get_worker_info", lambda: "a worker")
    monkeypatch.setattr(FileReader, "prefetch", lambda self, keys: asked.append(self._path.name))
    current = tmp_path / "store" / "current-a.json"
    ahead = sharing.ReadAhead(current)
    ahead([bytes(16)])  # before there is anything
    assert asked == []
    sharing.publish(current, [(2, "b"), (1, "a")])
    ahead([bytes(16)])
    sharing.publish(current, [(3, "c")])
    ahead([bytes(16)])
    assert asked == ["002-b", "001-a", "003-c"]
    for damaged in ("", "[3]", "{}"):
        current.write_text(damaged)
        ahead([bytes(16)])  # the step reads for itself
    monkeypatch.setattr(sharing, "get_worker_info", lambda: None)
    sharing.publish(current, [(4, "d")])
    ahead([bytes(16)])
    assert "004-d" not in asked


@pytest.mark.parametrize(
    ("nodes", "shares"),
    [
        (["a-0"] * 4, (4,)),
        (["a-0", "a-0", "b-0", "b-0"], (2, 2)),
        (["a-0", "b-0", "a-0", "b-0"], (4,)),  # their ranks alternate
        (["a-0", "a-0", "a-0", "b-0"], (4,)),
    ],
)
def test_nodes_are_told_by_their_names(
    nodes: list[str], shares: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # as launchers give it, or leave it, that start one process each
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert sharing.node_shares(nodes) == shares
