"""How the processes of a restarted job find one another."""

from __future__ import annotations

from datetime import timedelta

import pytest

from hf_pipetransformer.resilience.stores import use_fresh_store

LAUNCHED = {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def test_a_port_of_zero_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"MASTER_PORT=0.*--standalone"):
        use_fresh_store({**LAUNCHED, "RANK": "0", "MASTER_PORT": "0"}, timedelta(seconds=1))
