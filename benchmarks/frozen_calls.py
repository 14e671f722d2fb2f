#!/usr/bin/env python
"""The gain for a loss that calls a frozen module: the stock Trainer beside ours, with two names changed.

    OMP_NUM_THREADS=1 python benchmarks/frozen_calls.py [--out results.json] [names ...]

Students of 2 layers, teachers of 8, a DPO policy and reference of 2 layers each, one process, fp32, three epochs.
CPU milliseconds of a step of each epoch, of the first epoch of a second training that reads the first one's outputs,
the stored bytes of a sample, and the largest difference of a final weight from the stock Trainer's. "Without" is the
stock Trainer with constants in place of the frozen module's outputs. In the cases "runs" no output can be read: they
show the overhead beside the stock Trainer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
)

from hf_pipetransformer import PipeTransformerTrainer

import harness
from harness import Figures, Ratio, StepClock

WIDTH, DEEP, SHALLOW, SAMPLES, BATCH, EPOCHS, WORDS = 256, 8, 2, 256, 8, 3, 4000


def bert(layers: int, dropout: float = 0.0) -> nn.Module:
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config)


def llama(layers: int) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=layers, **sizes))


def llama_with_adapters() -> nn.Module:
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(DEEP), config)


def distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return F.kl_div(F.log_softmax(student, -1), F.softmax(teacher, -1), reduction="batchmean")


class Distills:
    teacher: nn.Module

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs)
        loss = outputs.loss + distance(outputs.logits, wanted.logits)
        return (loss, outputs) if return_outputs else loss


class DistillsStates(Distills):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        with torch.no_grad():
            states = self.teacher(**inputs, output_hidden_states=True).hidden_states
        pairs = zip(outputs.hidden_states[1:], states[DEEP // SHALLOW :: DEEP // SHALLOW], strict=True)
        loss = outputs.loss + sum((mine - theirs).square().mean() for mine, theirs in pairs)
        return (loss, outputs) if return_outputs else loss


class Prefers(Distills):
    """DPO, with chosen and rejected completions in one call."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        inputs = {"input_ids": inputs["input_ids"].flatten(0, 1)}
        mine = self.log_probability(model, inputs)
        has_teacher = hasattr(self, "teacher")
        with torch.no_grad(), nullcontext() if has_teacher else model.disable_adapter():
            theirs = self.log_probability(self.teacher if has_teacher else model, inputs)
        chosen, rejected = (mine - theirs).view(-1, 2).unbind(1)
        loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
        return (loss, {}) if return_outputs else loss

    def log_probability(self, model: Any, inputs: Any) -> torch.Tensor:
        logits = model(**inputs).logits[:, :-1]
        return logits.log_softmax(-1).gather(2, inputs["input_ids"][:, 1:, None])[..., 0].sum(1)


class DistillsOthers(Distills):
    """On inputs that are others in each step."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        step = self.state.global_step  # type: ignore[attr-defined]
        with torch.no_grad():
            wanted = self.teacher(**{**inputs, "input_ids": (inputs["input_ids"] + step) % WORDS})
        loss = outputs.loss + distance(outputs.logits, wanted.logits)
        return (loss, outputs) if return_outputs else loss


class Follows(TrainerCallback):
    """The teacher is a running average of the student."""

    trainer: Any

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        with torch.no_grad():
            for of, parameter in zip(self.trainer.teacher.parameters(), model.parameters(), strict=True):
                of.mul_(0.99).add_(parameter, alpha=0.01)


class Constants:
    """In place of a teacher."""

    def __init__(self, of_model: nn.Module) -> None:
        self._is_language_model = isinstance(of_model.config, LlamaConfig)

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        of_token = torch.zeros(1).expand(*input_ids.shape, WIDTH)
        shape = (*input_ids.shape, WORDS) if self._is_language_model else (len(input_ids), 2)
        return SimpleNamespace(logits=torch.zeros(1).expand(shape), hidden_states=[of_token] * (DEEP + 1))


def frozen(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)


def texts(length: int, *shape: int) -> torch.Tensor:
    return torch.randint(3, WORDS, (SAMPLES, *shape, length), generator=torch.Generator().manual_seed(0))


def classes() -> list[dict[str, Any]]:
    return [{"input_ids": row, "labels": int(row[0]) % 2} for row in texts(32)]


def words() -> list[dict[str, Any]]:
    return [{"input_ids": row, "labels": row} for row in texts(32)]


def pairs() -> list[dict[str, Any]]:
    return [{"input_ids": row} for row in texts(24, 2)]


Case = tuple[type, Callable[[], nn.Module], Callable[[], nn.Module] | None, Callable[[], list[dict[str, Any]]]]
CASES: dict[str, Case] = {
    "classifier": (Distills, lambda: bert(SHALLOW), lambda: frozen(bert(DEEP)), classes),
    "language model": (Distills, lambda: llama(SHALLOW), lambda: frozen(llama(DEEP)), words),
    "hidden states": (DistillsStates, lambda: bert(SHALLOW), lambda: frozen(bert(DEEP)), classes),
    "DPO, reference model": (Prefers, lambda: llama(SHALLOW), lambda: frozen(llama(SHALLOW)), pairs),
    "DPO, adapters off": (Prefers, llama_with_adapters, None, pairs),
    "runs: dropout": (Distills, lambda: bert(SHALLOW), lambda: bert(DEEP, 0.1).requires_grad_(False), classes),
    "runs: running average": (Distills, lambda: bert(SHALLOW), lambda: frozen(bert(SHALLOW)), classes),
    "runs: other inputs": (DistillsOthers, lambda: bert(SHALLOW), lambda: frozen(bert(DEEP)), classes),
}


def train(
    name: str, kind: str, weights: dict[str, dict[str, torch.Tensor]], folder: str, epochs: int = EPOCHS
) -> Figures:
    """Train a new model once.

    Args:
        name: of the case.
        kind: "stock", "without" or "ours".
        weights: kind -> final weights; added to.
        folder: of what ours stores.
        epochs: number of epochs.
    """
    torch.manual_seed(0)
    mixin, student, teacher, rows = CASES[name]
    model, taught_by = student(), None if teacher is None else teacher()
    clock, follows, is_ours = StepClock(), Follows(), kind == "ours"
    with tempfile.TemporaryDirectory() as output_dir:
        trainer: Any = harness.make_trainer(
            model,
            rows(),
            output_dir,
            [clock, *([follows] if "average" in name else [])],
            is_ours,
            trainer_class=type("Calls", (mixin, PipeTransformerTrainer if is_ours else Trainer), {}),
            per_device_train_batch_size=BATCH,
            num_train_epochs=epochs,
            learning_rate=1e-3,
            remove_unused_columns=False,
            **({"activation_cache_dir": folder} if is_ours else {}),
        )
        follows.trainer = trainer
        if kind == "without":
            trainer.teacher = Constants(model)
        elif taught_by is not None:
            trainer.teacher = taught_by
        trainer.train()
    ms = [1e3 * epoch["cpu_seconds"] * BATCH / SAMPLES for epoch in clock.epochs]
    figures = {f"epoch_{number}_ms": value for number, value in enumerate(ms, 1)}
    own = {of: weight.detach().clone() for of, weight in model.named_parameters()}
    if is_ours and epochs == EPOCHS:
        figures["difference"] = max(float((weights["stock"][of] - weight).abs().max()) for of, weight in own.items())
        stored = [file.stat().st_size for file in Path(folder).rglob("*") if file.suffix not in (".json",)]
        figures["bytes_per_sample"] = sum(stored) / SAMPLES
    weights[kind] = own
    return figures


def measure(name: str, kind: str, weights: dict[str, dict[str, torch.Tensor]]) -> Figures:
    """Train; with ours, train once more over the same folder."""
    with tempfile.TemporaryDirectory() as folder:
        figures = train(name, kind, weights, folder)
        if kind == "ours" and not name.startswith("runs"):
            figures["again_1_ms"] = train(name, kind, weights, folder, epochs=1)["epoch_1_ms"]
    return figures


def main() -> None:
    """Measure the cases that are named, by default all, and print the table."""
    parser = harness.parser_of(__doc__, turns=1)
    parser.add_argument("names", nargs="*", metavar="names", help=f"some of {list(CASES)}")
    options = harness.start(parser)
    cases: dict[str, Callable[[], Figures]] = {}
    for name in options.names or CASES:
        weights: dict[str, dict[str, torch.Tensor]] = {}
        for kind in ("stock", "ours") if name.startswith("runs") else ("stock", "without", "ours"):
            cases[f"{name}: {kind}"] = partial(measure, name, kind, weights)

    def beside(kind: str, name: str) -> str | None:
        return name.replace(": ours", f": {kind}") if name.endswith(": ours") else None

    ratios = [Ratio(f"epoch {k}, to stock", f"epoch_{k}_ms", partial(beside, "stock")) for k in range(1, EPOCHS + 1)]
    ratios += [Ratio(f"epoch {k}, to without", f"epoch_{k}_ms", partial(beside, "without")) for k in (2, 3)]
    harness.report(options, harness.take_turns(cases, options), ratios)


if __name__ == "__main__":
    main()
