"""Parsing and checking of training arguments, given in Python, in YAML, as JSON or on the command line."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from .file_formats import is_number
from .registry import require_part

STARTED_BY_ACCELERATE = "ACCELERATE_USE_CPU"
"""Environment variable of `accelerate launch` in a single process: whether the process uses the CPU."""
LOSS_REDUCTIONS = ("sum", "mean")
"""Declarations of how a loss adds up over the parts of a batch."""
FREEZE_POLICIES = ("none", "alpha", "adaptive", "autofreeze", "schedule")
"""Names of freeze policies (`parts/freezing/policies.py`)."""
NO_FREEZING = "none", "epoch", None, None
"""Policy, strategy, steps and maximum of arguments without freezing."""


class UnknownFieldError(TypeError, ValueError):
    """Raised for an argument that is not a field. It names the closest field.

    Args:
        owner: name of the class of the arguments.
        name: the argument.
        known: names of all fields.
    """

    def __init__(self, owner: str, name: str, known: Sequence[str]) -> None:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"Did you mean {close[0]!r}?" if close else "See its documentation for the fields."
        super().__init__(f"{owner} has no field {name!r}. {hint}")


def freezing_for(policy: str) -> Any:
    """Return the module of freeze policies.

    Raises:
        ValueError: `policy` requires the module, but it is missing.
    """
    return require_part("freezing.policies", f"freeze_policy={policy!r}")


def hint_about_cpu() -> str:
    """Return a hint for a single process that `accelerate launch` has started on the CPU; "" for others."""
    started = os.environ.get(STARTED_BY_ACCELERATE)
    if started is None or (started != "True" and torch.accelerator.is_available()):
        return ""
    return (
        " On a CPU, plain `accelerate launch`, `accelerate launch --cpu` and `distributed_type: MULTI_CPU` start one"
        " process, regardless of --num_processes. Use torchrun, or a config file with `distributed_type: MULTI_GPU`."
    )


def int_or_auto(name: str, value: int | str) -> int | Literal["auto"]:
    """Return the value of an argument.

    Raises:
        ValueError: the value is neither a number of at least 1 nor "auto".
    """
    if value == "auto":
        return "auto"
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = 0
    if number < 1 or isinstance(value, (bool, float)):
        raise ValueError(f"{name}={value!r} is invalid. Set it to an integer of at least 1, or to 'auto'.")
    return number


def token_slices_of(value: Any) -> str | int | list[int]:
    """Parse `token_slices`, given in Python, in YAML or on the command line."""
    given = value
    if isinstance(value, str) and value not in ("off", "auto"):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    lengths = list(value) if isinstance(value, (list, tuple)) else [value]
    is_known = value in ("off", "auto") or (
        bool(lengths) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in lengths)
    )
    if not is_known:
        raise ValueError(
            f"token_slices={given!r} is invalid. Set it to 'off', 'auto', a number of slices (at least 1), or a list"
            " of slice lengths, such as [512, 256, 256]."
        )
    return lengths if isinstance(value, (list, tuple)) else value


LAYERS = "modules that contain the model's layers, such as ['model.blocks']"
CACHED = "frozen modules whose outputs may be stored, such as ['image_encoder']"


def module_names(argument: str, which: str, names: Any) -> list[str] | None:
    """Return the names of modules that an argument contains; None if it is not set.

    Args:
        argument: name of the argument.
        which: description of the modules, with an example.
        names: value of the argument.

    Raises:
        ValueError: the value is not a list of different names.
    """
    if names is None:
        return None
    is_list = isinstance(names, (list, tuple)) and len(names) > 0
    if not is_list or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ValueError(
            f"{argument}={names!r} is invalid. Set it to a list of different names of {which}, or leave it out."
        )
    return list(names)


def check_cache(max_gib: Any, folder: Any) -> None:
    """Check `activation_cache_max_gib` and `activation_cache_dir`.

    Raises:
        ValueError: the size is not a number above 0, or the folder is not a path.
    """
    if max_gib is not None and not (is_number(max_gib) and max_gib > 0):
        raise ValueError(
            f"activation_cache_max_gib={max_gib!r} is invalid. Set it to a number above 0, or set"
            " activation_cache='off' to disable the cache."
        )
    if not (folder is None or isinstance(folder, (str, Path))) or "\0" in str(folder):
        raise ValueError(f"activation_cache_dir={folder!r} is invalid. Set it to the path of a folder.")


def from_json(name: str, text: str) -> dict[str, Any]:
    """Return the value of an argument that is given as a JSON object.

    Raises:
        ValueError: the value is not a JSON object.
    """
    try:
        value = json.loads(text)
    except ValueError as error:  # also raised for integers with thousands of digits
        raise ValueError(
            f'{name}={text!r} is not valid JSON ({error}). Pass a JSON object such as {{"1": 4, "2": 7}}.'
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f'{name}={text!r} is not a JSON object. Pass one such as {{"1": 4, "2": 7}}.')
    return value


if TYPE_CHECKING:
    IntOrAuto = int | Literal["auto"]
    SlicesOrName = str | int | list[int]
else:

    class IntOrAuto:
        """Parses an int or "auto" for HfArgumentParser, which takes one type per argument and calls it."""

        def __new__(cls, text: str) -> int | str:
            return int_or_auto("value", text)

    class SlicesOrName:
        """Parses "off", "auto", an int or a list for HfArgumentParser."""

        def __new__(cls, text: str) -> str | int | list[int]:
            return token_slices_of(text)


def checkpoints_reentrantly(args: Any) -> bool:
    """Whether gradient checkpointing is reentrant, which needs a gradient through the frozen layers."""
    options = {
        **(getattr(args, "gradient_checkpointing_kwargs", None) or {}),
        **(getattr(args, "activation_checkpointing_kwargs", None) or {}),
    }
    return bool(options.get("use_reentrant"))
