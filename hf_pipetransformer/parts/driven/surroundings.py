"""What a loss puts around its calls of the model: it applies to the layers of the last stage only, so it is refused.

with MyMode():            # a torch function or dispatch mode of the user's
    outputs = model(...)  # the stages below would run without it
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules import module as of_modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..prefix_cache.cache.known_code import is_known


class Surroundings:
    """The hooks of all modules, modes of torch and hooks of saved tensors that are in effect as the loss begins.

    Those of known libraries do not count: `save_on_cpu` changes no value.
    """

    def __init__(self) -> None:
        self._noted = _in_effect()

    def refuse_others(self) -> None:
        """Raise a `ValueError` if others are in effect now."""
        now = _in_effect()
        for what, noted in self._noted.items():
            if len(now[what]) != len(noted) or any(a is not b for a, b in zip(now[what], noted, strict=True)):
                raise ValueError(
                    f"The loss has entered or left {what}. They apply to the layers of the last"
                    " pipeline stage, where the loss runs, not to those of other stages. Set them on all processes,"
                    " around super().training_step() or in a callback, or set pipeline_parallel_size=1."
                )


def _in_effect() -> dict[str, list[Any]]:
    hooks = (
        of_modules._global_forward_hooks,
        of_modules._global_forward_pre_hooks,
        of_modules._global_backward_hooks,
        of_modules._global_backward_pre_hooks,
    )
    saved = torch._C._autograd._top_saved_tensors_default_hooks(True) or ()
    found = {
        "hooks of all modules": [hook for table in hooks for hook in table.values()],
        "modes of torch": [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()],
        "hooks of saved tensors (torch.autograd.graph.saved_tensors_hooks)": list(saved),
    }
    return {what: [one for one in entries if not is_known(one)] for what, entries in found.items()}
