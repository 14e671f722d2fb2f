"""Finds parts by name. The core imports no part, and a training loads only the parts that it needs."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

PARTS = f"{__package__}.parts"
SLICES = f"{__package__}.token_slices"


def find_part(name: str) -> ModuleType | None:
    """Return a module of a part, for example "front.part"; None if it is not installed."""
    return find_module(f"{PARTS}.{name}")


def find_module(name: str) -> ModuleType | None:
    """Return a module of a part or of the token slices, by its full name; None if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith((PARTS, SLICES)):
            raise  # a package that the part itself needs
        return None


def is_installed(*names: str) -> bool:
    """Whether modules of parts could be imported. It does not import them."""
    try:
        return all(find_spec(f"{PARTS}.{name}") is not None for name in names)
    except ModuleNotFoundError:
        return False


def require_part(name: str, asked_by: str) -> ModuleType:
    """Return a module of a part that the user has asked for.

    Args:
        name: as for `find_part`.
        asked_by: the argument that asks for the part, as the user has set it.

    Raises:
        ValueError: the part is not installed.
    """
    module = find_part(name)
    if module is None:
        raise not_installed(name, asked_by)
    return module


def not_installed(name: str, asked_by: str) -> ValueError:
    """Return the error of `require_part`."""
    return ValueError(
        f"{asked_by} requires {PARTS}.{name.partition('.')[0]}, which is not installed. Reinstall {__package__}, or"
        " leave the argument out."
    )
