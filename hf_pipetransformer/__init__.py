"""Pipeline-parallel training of Hugging Face models through the Trainer.

Names are imported when they are first used: the command line needs neither torch nor transformers to print its help.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import UnsupportedModelError
    from .parts.freezing.callback import LayerFreezeCallback
    from .parts.freezing.policies import FreezeDecision, FreezePolicy
    from .parts.lazy_loading.loading import load_lazily
    from .seq2seq import PipeTransformerSeq2SeqTrainer, PipeTransformerSeq2SeqTrainingArguments
    from .trainer import PipeTransformerTrainer
    from .training_args import PipeTransformerTrainingArguments

__version__ = "0.1.0.dev0"

__all__ = [
    "FreezeDecision",
    "FreezePolicy",
    "LayerFreezeCallback",
    "PipeTransformerSeq2SeqTrainer",
    "PipeTransformerSeq2SeqTrainingArguments",
    "PipeTransformerTrainer",
    "PipeTransformerTrainingArguments",
    "UnsupportedModelError",
    "__version__",
    "load_lazily",
]

_MODULE_OF = {
    "FreezeDecision": "parts.freezing.policies",
    "FreezePolicy": "parts.freezing.policies",
    "LayerFreezeCallback": "parts.freezing.callback",
    "PipeTransformerSeq2SeqTrainer": "seq2seq",
    "PipeTransformerSeq2SeqTrainingArguments": "seq2seq",
    "PipeTransformerTrainer": "trainer",
    "PipeTransformerTrainingArguments": "training_args",
    "UnsupportedModelError": "errors",
    "load_lazily": "parts.lazy_loading.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
