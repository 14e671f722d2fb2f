"""constraints-oldest.txt, which `make test-oldest` installs: the lower bounds of pyproject.toml, and no others."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTED = ("recipes", "report", "test")
"""The extras that tests need."""


def bounds() -> dict[str, Version]:
    """Of each dependency the oldest version that is admitted."""
    lines = [*PROJECT["dependencies"], *(line for extra in TESTED for line in PROJECT["optional-dependencies"][extra])]
    found = {}
    for requirement in map(Requirement, lines):
        if canonicalize_name(requirement.name) != canonicalize_name(PROJECT["name"]):
            (found[canonicalize_name(requirement.name)],) = [
                Version(part.version) for part in requirement.specifier if part.operator == ">="
            ]
    return found


def test_the_constraints_are_the_lower_bounds() -> None:
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {canonicalize_name(name): Version(version) for name, version in pins.items()} == bounds()


def test_the_readme_says_what_is_needed() -> None:
    (said,) = re.findall(r"^Requires (.*)\. Without", (ROOT / "README.md").read_text(), re.MULTILINE)
    for name in ("torch", "transformers", "accelerate"):
        assert f"{name} ≥ {bounds()[name]}" in said
    assert f"Python ≥ {PROJECT['requires-python'].removeprefix('>=')}" in said
