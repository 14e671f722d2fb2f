"""The device over the CPU's memory, which a C++ compiler builds once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import fake_device
import pytest


@pytest.fixture(scope="session")
def library() -> Path:
    if fake_device.compiler() is None:
        pytest.skip("there is no C++ compiler")
    return fake_device.build()
