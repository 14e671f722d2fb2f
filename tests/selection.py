"""Selects the tests of `make test`; `make test-all` runs all of them.

    @pytest.mark.parametrize("model", few(MODELS, "bert", "t5"))  # the others are slow
    @pytest.mark.parametrize("stages", [2, *slow(1, 4)])

If parameters of one test are crossed, `make test` runs the combinations without a slow parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Parameters that only `make test-all` runs; a tuple is one for each of several names."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values
    ]


def few(values: Iterable[Any], *kept: Any) -> list[Any]:
    """All parameters in their order; those that are not kept for `make test` are slow.

    Raises:
        ValueError: A kept one is none of them.
    """
    values = list(values)
    if missing := [value for value in kept if value not in values]:
        raise ValueError(f"{missing} are none of {values}")
    return [parameter for value in values for parameter in ([value] if value in kept else slow(value))]
