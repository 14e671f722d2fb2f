"""Finds parts by name, so that the core imports no part and a training loads only the parts that it needs."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

PARTS = f"{__package__}.parts"


def find_part(name: str) -> ModuleType | None:
    """Return a module of a part, for example "front.part"; None if it is not installed."""
    try:
        return import_module(f"{PARTS}.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(PARTS):
            raise  # something that the part itself needs
        return None


def require_part(name: str, asked_by: str) -> ModuleType:
    """Return a module of a part that the user has asked for.

    Args:
        name: as for `find_part`.
        asked_by: the argument that asks for it, as the user has set it.

    Raises:
        ValueError: it is not installed.
    """
    module = find_part(name)
    if module is None:
        raise ValueError(
            f"{asked_by} requires {PARTS}.{name.partition('.')[0]}, which is not installed. Reinstall"
            f" {__package__}, or leave the argument out."
        )
    return module
