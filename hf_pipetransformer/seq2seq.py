"""Trainer and arguments for sequence-to-sequence models: `transformers.Seq2SeqTrainer` over a pipeline.

The order of the bases matters: `PipeTransformerTrainer` calls the next class in line, here `Seq2SeqTrainer`. For the
arguments, the library's own class comes first. `run/evaluation.py` implements generation over the pipeline. It also
serves a user's own combination of the two classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from .trainer import PipeTransformerTrainer
from .training_args import PipeTransformerTrainingArguments


@dataclass
class PipeTransformerSeq2SeqTrainingArguments(Seq2SeqTrainingArguments, PipeTransformerTrainingArguments):
    """
    Arguments of a [`PipeTransformerSeq2SeqTrainer`].

    This class includes all arguments of [`PipeTransformerTrainingArguments`] and of
    `transformers.Seq2SeqTrainingArguments`: `predict_with_generate`, `generation_max_length`, `generation_num_beams`,
    `generation_config` and `sortish_sampler`.

    ```python
    args = PipeTransformerSeq2SeqTrainingArguments("out", pipeline_parallel_size=2, predict_with_generate=True)
    ```
    """


class PipeTransformerSeq2SeqTrainer(PipeTransformerTrainer, Seq2SeqTrainer):  # type: ignore[misc]
    """A [`~transformers.Seq2SeqTrainer`] that can split the model into a pipeline of stages, one per process.

    It takes the same arguments as `Seq2SeqTrainer`, and `freeze_policy`; `args` is a
    [`PipeTransformerSeq2SeqTrainingArguments`]. With `predict_with_generate=True`, an evaluation during training
    gathers the weights of all stages on every process. Each process generates for its share of the samples with the
    whole model. Training then continues with the same stages.

    ```python
    trainer = PipeTransformerSeq2SeqTrainer(
        model, args, train_dataset=dataset, eval_dataset=eval_dataset, data_collator=DataCollatorForSeq2Seq(tokenizer)
    )
    trainer.train()
    ```

    Raises:
        ValueError: arguments contradict one another or do not fit the number of processes. Every process raises it.
        UnsupportedModelError: the model has no layers at which it can be split.
    """

    args: PipeTransformerSeq2SeqTrainingArguments

    def __init__(
        self,
        model: Any = None,
        args: PipeTransformerSeq2SeqTrainingArguments | None = None,
        *positional: Any,
        **keywords: Any,
    ) -> None:
        if args is None:
            args = PipeTransformerSeq2SeqTrainingArguments(output_dir="tmp_trainer")
        if not isinstance(args, PipeTransformerSeq2SeqTrainingArguments):
            raise ValueError(
                f"args is a {type(args).__name__}, but PipeTransformerSeq2SeqTrainer requires"
                " PipeTransformerSeq2SeqTrainingArguments. Pass an instance of it; it accepts the same fields."
            )
        super().__init__(model, args, *positional, **keywords)

    def evaluation_loop(self, dataloader: DataLoader, *positional: Any, **keywords: Any) -> EvalLoopOutput:
        if not self._is_stock and not self._returns_several_sequences:
            # `Seq2SeqTrainer` keeps the samples that pad the last batches of several processes; one process has none
            self.gather_function = self.accelerator.gather_for_metrics
        return super().evaluation_loop(dataloader, *positional, **keywords)

    @property
    def _returns_several_sequences(self) -> bool:
        """Whether `generate` returns several sequences per sample. All of them must be kept."""
        configured = getattr(getattr(self.model, "generation_config", None), "num_return_sequences", None)
        asked = getattr(self, "_gen_kwargs", {}).get("num_return_sequences")
        return (asked or configured or 1) > 1
