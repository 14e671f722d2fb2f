"""How trainings and nodes find the outputs that other ones have stored."""

from __future__ import annotations

import pytest

from hf_pipetransformer.data.node_order import node_shares


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
    assert node_shares(nodes) == shares
