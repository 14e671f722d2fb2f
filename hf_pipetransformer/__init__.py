"""Pipeline-parallel training of Hugging Face models through the Trainer."""

from .errors import UnsupportedModelError
from .freezing.callback import LayerFreezeCallback
from .freezing.policies import FreezeDecision, FreezePolicy
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
]
