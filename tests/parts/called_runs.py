"""Losses that call frozen modules, and trainings with them under the stock Trainer and under ours."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments

SAMPLES, BATCH, EPOCHS = 16, 4, 3
STEPS = SAMPLES // BATCH
WORDS, WIDTH, SIZE = 60, 12, 16
CHANGE_AT = 2 * STEPS + 2
"""Number of steps after which something changes: in the third epoch, where all samples are stored."""

Rows = list[dict[str, Any]]


def classifier(layers: int, dropout: float = 0.0) -> nn.Module:
    config = BertConfig(
        hidden_size=SIZE,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * SIZE,
        vocab_size=WORDS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
    )
    return AutoModelForSequenceClassification.from_config(config)


def language_model(layers: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": SIZE, "intermediate_size": 2 * SIZE, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=10 * WORDS, **sizes))


def texts(is_causal: bool = False) -> Rows:
    """Samples of different lengths; the padding of labels does not count."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, WIDTH + 1, (SAMPLES,), generator=draw).tolist()
    ids = [torch.randint(2, WORDS, (length,), generator=draw) for length in lengths]
    return [{"input_ids": row, "labels": row if is_causal else int(row[0]) % 3} for row in ids]


def pairs() -> Rows:
    return [{"chosen": row["input_ids"], "rejected": row["input_ids"].flip(0)[:-1]} for row in texts()]


def even_pairs() -> Rows:
    """Samples of one length: each one is found in any batch."""
    draw = torch.Generator().manual_seed(4)
    names = ("chosen", "rejected")
    return [{name: torch.randint(2, WORDS, (WIDTH,), generator=draw) for name in names} for _ in range(SAMPLES)]


def padded(rows: list[torch.Tensor], value: int = 0) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def collate(rows: Rows) -> dict[str, Any]:
    """Pads to the longest sample of the batch; of pairs, the rejected samples follow the chosen ones."""
    if "chosen" in rows[0]:
        ids = [row[name] for name in ("chosen", "rejected") for row in rows]
        return {"input_ids": padded(ids), "attention_mask": padded([torch.ones_like(row) for row in ids])}
    ids = [row["input_ids"] for row in rows]
    batch = {"input_ids": padded(ids), "attention_mask": padded([torch.ones_like(row) for row in ids])}
    labels = [row["labels"] for row in rows]
    batch["labels"] = padded(labels, -100) if torch.is_tensor(labels[0]) else torch.tensor(labels)
    return batch


def kd(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return F.kl_div(F.log_softmax(student, -1), F.softmax(teacher, -1), reduction="batchmean")


class Distills:
    """The teacher is an attribute of the trainer."""

    teacher: nn.Module

    def taught(self, inputs: Any) -> Any:
        with torch.no_grad():
            return self.teacher(**inputs)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + kd(outputs.logits, self.taught(inputs).logits)
        return (loss, outputs) if return_outputs else loss


class DistillsStates(Distills):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs, output_hidden_states=True)
        with torch.no_grad():
            states = self.teacher(**inputs, output_hidden_states=True).hidden_states
        mask = inputs["attention_mask"][..., None]
        loss = outputs.loss
        for mine, theirs in ((outputs.hidden_states[1], states[2]), (outputs.hidden_states[2], states[4])):
            loss = loss + ((mine - theirs).square() * mask).sum() / mask.sum()
        return (loss, outputs) if return_outputs else loss


class Closure:
    """A frozen module in a closure, and one that is called by its position."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        teacher = self.find_teacher()
        with torch.inference_mode():
            theirs = teacher(inputs["input_ids"], inputs["attention_mask"])[0]
        loss = outputs.loss + kd(outputs.logits, theirs.clone())
        return (loss, outputs) if return_outputs else loss


class OnOneOfTwoInputs(Distills):
    """Perceptual losses: one module is called on the target and on trained values, with gradients and without."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        given = model.bert.embeddings.word_embeddings(inputs["input_ids"])
        target = self.teacher(**inputs).logits
        detached = self.teacher(inputs_embeds=given.detach(), attention_mask=inputs["attention_mask"]).logits
        predicted = self.teacher(inputs_embeds=given, attention_mask=inputs["attention_mask"]).logits
        loss = outputs.loss + kd(predicted, target) + kd(outputs.logits, detached)
        return (loss, outputs) if return_outputs else loss


class OnOther(Distills):
    """The teacher is called on something that is not the same in each epoch."""

    def taught(self, inputs: Any) -> Any:
        with torch.no_grad():
            return self.teacher(**{**inputs, "input_ids": self.changed(inputs["input_ids"])})

    def changed(self, ids: torch.Tensor) -> torch.Tensor:
        return ids * (self.state.global_step + 2) % WORDS  # type: ignore[attr-defined]


class OnDrawn(OnOther):
    def changed(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.where(torch.rand(ids.shape) < 0.9, torch.zeros_like(ids))


class OnSampled(OnOther):
    """The teacher is called on tokens that the student's weights choose."""

    def changed(self, ids: torch.Tensor) -> torch.Tensor:
        scores = self.model.bert.embeddings.word_embeddings.weight.detach()[ids].mean(-1)  # type: ignore[attr-defined]
        return torch.where(scores > 0, ids, 1)


class ReadsMoreLater(Distills):
    """From the second epoch on, the loss reads another output of the teacher as well."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs, theirs = model(**inputs), self.taught(inputs)
        loss = outputs.loss + kd(outputs.logits, theirs.logits)
        loss = loss + (theirs.loss if self.state.epoch >= 1.5 else 0.0)  # type: ignore[attr-defined]
        return (loss, outputs) if return_outputs else loss


class Follows(TrainerCallback):
    """The teacher follows the student, as a running average does."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.model = model

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for of, parameter in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            of.data.mul_(0.9).add_(parameter.data, alpha=0.1)

    teacher: nn.Module


class Pair(nn.Module):
    """CLIP with a locked image tower; the loss calls the towers."""

    def __init__(self) -> None:
        super().__init__()
        self.text = classifier(1)
        self.image = frozen(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 64), nn.Linear(64, 8))
        )
        self.project = nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.text(input_ids=input_ids, attention_mask=attention_mask).logits


class Contrasts:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        images = F.normalize(model.project(model.image(inputs["pixel_values"])), dim=-1)
        texts_ = F.normalize(model(inputs["input_ids"], inputs["attention_mask"]), dim=-1)
        scores = 5 * images @ texts_.T
        targets = torch.arange(len(scores))
        loss = (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2
        return (loss, {"scores": scores}) if return_outputs else loss


def captions() -> Rows:
    draw = torch.Generator().manual_seed(5)
    return [
        {"input_ids": row["input_ids"], "labels": 0, "pixel_values": torch.randn(3, 8, 8, generator=draw)}
        for row in texts()
    ]


def with_images(rows: Rows) -> dict[str, Any]:
    batch = collate(rows)
    del batch["labels"]
    return {**batch, "pixel_values": torch.stack([row["pixel_values"] for row in rows])}


def log_probability(logits: torch.Tensor, inputs: Any) -> torch.Tensor:
    of_tokens = logits[:, :-1].log_softmax(-1).gather(2, inputs["input_ids"][:, 1:, None])[..., 0]
    return (of_tokens * inputs["attention_mask"][:, 1:]).sum(1)


class Prefers(Distills):
    """DPO: a reference model, or the model itself without its adapters."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        mine = log_probability(outputs.logits, inputs)
        with torch.no_grad(), self.reference(model) as reference:
            theirs = log_probability(reference(**inputs).logits, inputs)
        chosen, rejected = (mine - theirs).chunk(2)
        loss = -F.logsigmoid(0.5 * (chosen - rejected)).mean()
        return (loss, outputs) if return_outputs else loss

    @contextmanager
    def reference(self, model: nn.Module) -> Any:
        yield self.teacher


class PrefersWithoutAdapters(Prefers):
    @contextmanager
    def reference(self, model: Any) -> Any:
        with model.disable_adapter():
            yield model


class SetsWithoutAdapters(PrefersWithoutAdapters):
    """From a step on, the loss has changed a number that the lowest layer computes with."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        if self.state.global_step == CHANGE_AT:  # type: ignore[attr-defined]
            lowest_layer(model).self_attn.scaling = 1.5
        return super().compute_loss(model, inputs, return_outputs)


class FollowsItself(PrefersWithoutAdapters):
    """The reference is the trained model itself; the loss clears its flags."""

    @contextmanager
    def reference(self, model: Any) -> Any:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        yield model
        for parameter in trained:
            parameter.requires_grad_(True)


class GoesBackFirst(PrefersWithoutAdapters):
    """The loss runs a backward before it calls the reference."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        (0.1 * model(**inputs).logits.square().mean()).backward()
        return super().compute_loss(model, inputs, return_outputs)


class ChangesBase(TrainerCallback):
    """Changes a base weight of the lowest layer between two steps, on the process that has it."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        weight = lowest_layer(model).mlp.up_proj.weight
        if state.global_step != CHANGE_AT or getattr(weight, "is_elsewhere", False):
            return
        if self.way == "in place":
            with torch.no_grad():
                weight.mul_(1.5)
        elif self.way == "data":
            weight.data[0, 0] += 1.0
        elif self.way == "flag":
            weight.requires_grad_(True)
        elif self.way == "loaded":
            module = lowest_layer(model).mlp.up_proj
            module.load_state_dict({name: 1.5 * value for name, value in module.state_dict().items()})
        else:
            weight.numpy(force=True)[1] *= 2.0


class Result:
    """Losses and final weights of a training, and the log lines about its cache."""

    def __init__(self, trainer: Trainer, lines: list[str]) -> None:
        self.lines = lines
        kinds = ("loss", "eval_loss")
        self.losses = [entry[kind] for entry in trainer.state.log_history for kind in kinds if kind in entry]
        model: Any = trainer.model
        self.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def num_read(self) -> int:
        """Number of rows that were read for modules called by the loss, according to the log.

        Rows of the model's own frozen layers do not count: they are read only if that is faster here and now.
        """
        return sum(int(n) for n in re.findall(r"called by the loss: [^ ]+, (\d+) of \d+ samples read", self.text))

    def difference(self, other: Result) -> float:
        """The largest difference of a loss or a weight."""
        of_losses = [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]
        of_weights = [float((self.weights[n] - w).abs().max()) for n, w in other.weights.items()]
        return max(*of_losses, *of_weights)


@dataclass
class Case:
    """A training with a loss that calls frozen modules.

    Attributes:
        mixin: the user's overrides of the trainer, stock or ours.
        student: makes the model.
        teacher: makes the trainer's attribute `teacher`; None if there is none.
        rows: makes the data set.
        callback: makes a callback.
        prepare: does something to the trainer before it trains.
        eval_rows: makes the data of evaluations; None if there are none.
    """

    mixin: type
    student: Callable[[], nn.Module]
    teacher: Callable[[], nn.Module] | None
    rows: Callable[[], Rows] = texts
    callback: Callable[[], TrainerCallback] | None = None
    prepare: Callable[[Any], object] = lambda trainer: None
    collator: Callable[[Rows], dict[str, Any]] = collate
    options: dict[str, Any] = field(default_factory=dict)
    eval_rows: Callable[[], Rows] | None = None


def frozen(module: nn.Module) -> nn.Module:
    return module.eval().requires_grad_(False)


def trained(folder: Path | str, case: Case, is_ours: bool = True, **options: Any) -> Result:
    torch.manual_seed(0)
    student, teacher = case.student(), None if case.teacher is None else case.teacher()
    kind: tuple[Any, Any] = (Trainer, TrainingArguments)
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": EPOCHS,
        "learning_rate": 1e-3,
        "adam_epsilon": 1e-3,  # a gradient that is zero but for rounding must not become a step
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "remove_unused_columns": False,
        **case.options,
    }
    if is_ours:
        kind = PipeTransformerTrainer, PipeTransformerTrainingArguments
        given["log_level"] = "info"
    trainer = type("Ours", (case.mixin, kind[0]), {})(
        student,
        kind[1](**{**given, **options}),
        train_dataset=case.rows(),
        eval_dataset=None if case.eval_rows is None else case.eval_rows(),
        data_collator=case.collator,
        callbacks=[case.callback()] if case.callback is not None else [],
    )
    if teacher is not None:
        trainer.teacher = teacher
    case.prepare(trainer)
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hf_pipetransformer")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        trainer.train()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return Result(trainer, lines)


def with_adapters(dropout: float = 0.0, **given: Any) -> nn.Module:
    import peft

    options = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "lora_dropout": dropout, **given}
    return peft.get_peft_model(language_model(3), peft.LoraConfig(r=2, **options))


def with_another_base() -> nn.Module:
    model = with_adapters()
    with torch.no_grad():
        lowest_layer(model).mlp.up_proj.weight[1] += 1.0
    return model


def lowest_layer(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("layers.0"))


def copied(model: nn.Module) -> nn.Module:
    return frozen(copy.deepcopy(model))
