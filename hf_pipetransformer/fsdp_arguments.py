"""The Trainer's `fsdp` arguments where a pipeline runs: the replicas of a stage divide its weights.

FSDP itself cannot wrap a model whose stages move. `fsdp=True` with several stages, or with a freeze policy, means
`replica_sharding="full"`; what that has no word for is refused by name.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FULL = ("full_shard", "auto_wrap", "true", "1")
"""The words of `fsdp` that ask for what `replica_sharding="full"` does; each layer is wrapped by itself."""
OTHER_WORDS = {
    "shard_grad_op": "keeps all weights on each replica, as replica_sharding='optimizer' does",
    "hybrid_shard": "divides over a part of the replicas",
    "hybrid_shard_zero2": "divides over a part of the replicas",
    "offload": "computes with weights on the CPU",
}
OTHER_SETTINGS = {
    "cpu_offload": "weights cannot be kept on the CPU",
    "activation_checkpointing": "set gradient_checkpointing=True instead",
    "xla": "XLA devices are not supported",
}
"""Keys of `fsdp_config` that are refused if they are set; those on how modules are wrapped have no effect."""
SAME_SETTINGS = {
    "reshard_after_forward": ("true", "1", "full_shard"),
    "sharding_strategy": ("full_shard", "1"),
    "state_dict_type": ("full_state_dict",),
}
"""Keys of `fsdp_config`, with the values that say what happens anyway; others are refused."""


def asks_for_full_sharding(fsdp: Any, config: Any, wanted: str) -> bool:
    """Whether the Trainer's arguments ask for FSDP.

    Args:
        fsdp: value of `fsdp`.
        config: value of `fsdp_config`.
        wanted: the argument that excludes FSDP itself, with its value.

    Raises:
        ValueError: they ask for something that `replica_sharding="full"` does not do.
    """
    if not fsdp:
        return False
    words = [str(getattr(word, "value", word)).lower() for word in (fsdp if isinstance(fsdp, list) else [fsdp])]
    for word in (part for joined in words for part in joined.split()):
        if word not in FULL:
            raise ValueError(
                f"fsdp={fsdp!r} cannot be combined with {wanted}: with several stages or a freeze policy, fsdp means"
                f" replica_sharding='full', and {word!r} {OTHER_WORDS.get(word, 'is unknown')}. Set fsdp=True, or"
                " unset it."
            )
    settings = config or {}
    if isinstance(settings, (str, Path)):
        try:
            settings = json.loads(Path(settings).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"fsdp_config={config!r} is not the path of a JSON file: {error}") from error
    settings = {str(name).removeprefix("fsdp_"): value for name, value in settings.items()}
    for name, same in SAME_SETTINGS.items():
        if str(settings.get(name, same[0])).lower() not in same:
            raise ValueError(
                f"fsdp_config={{{name!r}: {settings[name]!r}}} cannot be combined with {wanted}: there fsdp means"
                f" replica_sharding='full', which does as {name}={same[0]!r} says. Remove it from fsdp_config."
            )
    for name, why in OTHER_SETTINGS.items():
        if str(settings.get(name, "")).lower() in ("true", "1"):
            raise ValueError(
                f"fsdp_config={{{name!r}: {settings[name]!r}}} cannot be combined with {wanted}: {why}. Remove it from"
                " fsdp_config."
            )
    return True
