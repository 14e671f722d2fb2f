"""Losses, steps, optimizers and callbacks over several stages, as scripts for TRL, PEFT and timm write them."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM

from ..kit import (
    LABELS,
    VOCABULARY,
    WIDTH,
    Backbone,
    Each,
    Inputs,
    LossAndOutputs,
    Network,
    Script,
    bert,
    case,
    classified,
    own_loss,
    pad,
    plain_loss,
    pool,
    samples,
    train_and_resume,
)
from ..kit import (
    with_loss as with_loss_of_eight,
)

BATCH = 12
"""Samples of a step: two, three or four processes divide them."""
ADAMW: dict[str, Any] = {
    "optim": "adamw_torch",
    "learning_rate": 5e-3,
    "adam_epsilon": 1e-3,
    "weight_decay": 0.05,
    "lr_scheduler_type": "linear",
}


def with_loss(loss: Any = plain_loss, model: Any = None, **fields: Any) -> Script:
    """Six steps of a classifier with the user's loss."""
    return with_loss_of_eight(loss, model, **{"batch": BATCH, "data": samples(6 * BATCH), **fields})


def llama(**changes: Any) -> LlamaForCausalLM:
    """A tiny Llama."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": 2}
    options = {"vocab_size": VOCABULARY, "pad_token_id": 0, "max_position_embeddings": 64, **sizes, **changes}
    return LlamaForCausalLM(LlamaConfig(**options))


def elsewhere(parameter: Any) -> bool:
    return getattr(parameter, "is_elsewhere", False)


# ---------------------------------------------------------------------------------------------------------
# Distillation
# ---------------------------------------------------------------------------------------------------------


def distilled(temperature: float, loss: Any = None, **fields: Any) -> Script:
    """A student and a larger teacher that the trainer holds."""

    def wire(trainer: Any) -> None:
        torch.manual_seed(3)
        trainer.teacher = Network(5).eval().requires_grad_(False)

    def stock(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        with torch.no_grad():
            taught = trainer.teacher(**inputs)["logits"]
        soft = F.kl_div(
            F.log_softmax(outputs["logits"] / temperature, -1),
            F.softmax(taught / temperature, -1),
            reduction="batchmean",
        )
        return 0.5 * outputs["loss"] + 0.5 * temperature**2 * soft, outputs

    return with_loss(loss or stock, wire=wire, **fields)


@case("K2", "K3", "R2", "K2R2")
def teacher_of_the_trainer() -> Script:
    """Knowledge distillation from `self.teacher`."""
    return distilled(2.0, options={"eval_strategy": "epoch"}, keywords={"eval_dataset": samples(16, seed=4)})


def taught(trainer: Any, inputs: Inputs, logits: Tensor) -> Tensor:
    """The divergence from the trainer's teacher."""
    with torch.no_grad():
        wanted = trainer.teacher(**inputs)["logits"]
    return F.kl_div(F.log_softmax(logits, -1), F.softmax(wanted, -1), reduction="batchmean")


@case("K2", expect="exact", because="requires_grad")
def frozen_for_one_call_with_a_teacher() -> Script:
    """The first layer is frozen for one call, and trained by the next, in a step that calls a frozen teacher."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        model.layers[0].requires_grad_(False)
        outputs = model(**inputs)
        model.layers[0].requires_grad_(True)
        return taught(trainer, inputs, outputs["logits"]) + 0.5 * model(**inputs)["loss"], outputs

    return distilled(1.0, loss)


@case("K1", "K2", expect="exact", because="compile")
def compiled_model_with_a_teacher() -> Script:
    """The model is called through `torch.compile` as one graph, in a step that calls a frozen teacher."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if not hasattr(trainer, "compiled"):
            trainer.compiled = torch.compile(model, backend="eager", fullgraph=trainer.is_whole)
        outputs = trainer.compiled(**inputs)
        return outputs["loss"] + taught(trainer, inputs, outputs["logits"]), outputs

    script = distilled(1.0, loss)
    wire = script.wire

    def with_graph(trainer: Any) -> None:
        wire(trainer)
        trainer.is_whole = getattr(trainer.args, "pipeline_parallel_size", 1) == 1

    script.wire = with_graph
    return script


class WithHidden(Network):
    """Returns the outputs of all layers."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Any]:
        x = self.embedding(input_ids)
        hidden = [x]
        for layer in self.layers:
            x = layer(x)
            hidden.append(x)
        return {**classified(self.head(pool(x, attention_mask)), labels), "hidden": tuple(hidden)}


@case("K2", "K3", expect="exact")
def teacher_of_the_layers() -> Script:
    """TinyBERT: the outputs of all layers follow the teacher's."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        with torch.no_grad():
            taught = trainer.teacher(**inputs)
        terms = [F.mse_loss(a, b) for a, b in zip(outputs["hidden"], taught["hidden"], strict=True)]
        return outputs["loss"] + torch.stack(terms).sum(), outputs

    def wire(trainer: Any) -> None:
        torch.manual_seed(3)
        trainer.teacher = WithHidden().eval().requires_grad_(False)

    return with_loss(loss, WithHidden(), wire=wire)


@case("K2", "K3", "K2R2")
def last_hidden_state() -> Script:
    """The loss reads the last of the hidden states (`output_hidden_states=True`)."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs, output_hidden_states=True)
        return outputs.loss + outputs.hidden_states[-1][:, 0].pow(2).mean(), outputs

    return with_loss(loss, bert())


@case("K2", expect="exact", because="the last one only")
def mean_of_hidden_states() -> Script:
    """The mean of the last four hidden states."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs, output_hidden_states=True)
        return outputs.loss + torch.stack(outputs.hidden_states[-4:]).mean(0).pow(2).mean(), outputs

    return with_loss(loss, bert())


# ---------------------------------------------------------------------------------------------------------
# Preferences
# ---------------------------------------------------------------------------------------------------------


def pairs(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Make a chosen and a rejected answer from each row."""
    batch = pad(rows)
    words = batch["input_ids"]
    prompt = words.shape[1] // 2
    rejected = torch.cat([words[:, :prompt], (words[:, prompt:] * 7 + 3) % (VOCABULARY - 5) + 5], 1)
    return {"chosen_input_ids": words, "rejected_input_ids": rejected, "attention_mask": batch["attention_mask"]}


def log_probabilities(model: Any, words: Tensor, mask: Tensor) -> Tensor:
    """[B]: of the second half of the words."""
    logits = model(input_ids=words, attention_mask=mask, use_cache=False).logits[:, :-1]
    each = logits.log_softmax(-1).gather(-1, words[:, 1:, None])[..., 0] * mask[:, 1:]
    return each[:, words.shape[1] // 2 - 1 :].sum(1)


class Preferences:
    """A DPO trainer with TRL's metrics."""

    beta = 0.3

    def wired(self) -> None:
        torch.manual_seed(5)
        self.ref_model = llama().eval()
        self._stored_metrics: Any = defaultdict(lambda: defaultdict(list))

    def concatenated(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        words = torch.cat([batch["chosen_input_ids"], batch["rejected_input_ids"]])
        each = log_probabilities(model, words, batch["attention_mask"].repeat(2, 1))
        half = len(batch["chosen_input_ids"])
        return each[:half], each[half:]

    def reference(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return self.concatenated(self.ref_model, batch)

    def get_batch_loss_metrics(self, model: Any, batch: Any, train_eval: str) -> Tensor:
        chosen, rejected = self.concatenated(model, batch)
        ref_chosen, ref_rejected = self.reference(model, batch)
        rewards = self.beta * torch.stack([chosen - ref_chosen, rejected - ref_rejected])
        loss = -F.logsigmoid(rewards[0] - rewards[1]).mean()
        gathered = self.accelerator.gather_for_metrics((rewards[0] - rewards[1]).detach())  # type: ignore[attr-defined]
        if train_eval == "train":
            self._stored_metrics[train_eval]["rewards/accuracies"].append((gathered > 0).float().mean().item())
            self._stored_metrics[train_eval]["rewards/margins"].append(gathered.mean().item())
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        with contextlib.nullcontext():
            loss = self.get_batch_loss_metrics(model, inputs, "train")
        return (loss, {}) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        with torch.no_grad():
            loss = self.get_batch_loss_metrics(model, inputs, "eval")
        return loss.detach(), None, None

    def log(self, logs: dict[str, float], *args: Any, **keywords: Any) -> None:
        kind = "train" if "loss" in logs else "eval"
        for key, values in self._stored_metrics[kind].items():
            logs[f"{kind}/{key}"] = torch.tensor(values).mean().item()
        self._stored_metrics.pop(kind, None)
        super().log(logs, *args, **keywords)  # type: ignore[misc]


def logged(*names: str) -> Any:
    """Observes the values logged under these names."""
    return lambda trainer: {n: [float(e[n]) for e in trainer.state.log_history if n in e] for n in names}


def preferences(trainer: type = Preferences, model: Any = None, **fields: Any) -> Script:
    options = {**ADAMW, "num_train_epochs": 1, "eval_strategy": "steps", "eval_steps": 3, **fields.pop("options", {})}
    return Script(
        model=model or llama(),
        data=samples(72, 12, 12),
        batch=fields.pop("batch", BATCH),
        collator=pairs,
        trainer=trainer,
        wire=lambda t: t.wired(),
        options=options,
        keywords={"eval_dataset": samples(16, 12, 12, seed=4)},
        observe=logged("train/rewards/margins", "train/rewards/accuracies"),
        **fields,
    )


@case("K2", "K3", "R2", "K2R2", slack=3.0)
def dpo_with_metrics() -> Script:
    """DPO with a reference model, metrics that `log` averages, and a `prediction_step` of its own."""
    return preferences()


class WithoutReference(Preferences):
    """The reference is the model without its adapters."""

    def reference(self, model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        inner = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
        with torch.no_grad(), inner.disable_adapter():
            return self.concatenated(self.model, batch)  # type: ignore[attr-defined]


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False))


@case("K2", "K3", "K2R2", slack=3.0)
def dpo_without_adapters() -> Script:
    """DPO with `disable_adapter`; the loss calls the reference as `self.model`."""
    return preferences(WithoutReference, adapted(llama()))


@case("K2", slack=3.0)
def dpo_with_checkpointing() -> Script:
    """DPO with `disable_adapter`, gradient checkpointing and accumulation; the reference is `self.model`."""
    options = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "gradient_accumulation_steps": 2,
    }
    return preferences(WithoutReference, adapted(llama()), batch=4, options=options)


class Kahneman(Preferences):
    """KTO: the divergence is estimated on mismatched pairs, under `no_grad`."""

    def get_batch_loss_metrics(self, model: Any, batch: Any, train_eval: str) -> Tensor:
        words, mask = batch["chosen_input_ids"], batch["attention_mask"]
        mismatched = torch.cat([words[:, :6], words.roll(1, 0)[:, 6:]], 1)
        with torch.no_grad():
            divergence = log_probabilities(model, mismatched, mask) - log_probabilities(
                self.ref_model, mismatched, mask
            )
            divergence = divergence.mean().clamp(min=0)
        good = torch.arange(len(words)) % 2 == 0
        chosen = log_probabilities(model, words[good], mask[good])
        rejected = log_probabilities(model, batch["rejected_input_ids"][~good], mask[~good])
        with torch.no_grad():
            ref_chosen = log_probabilities(self.ref_model, words[good], mask[good])
            ref_rejected = log_probabilities(self.ref_model, batch["rejected_input_ids"][~good], mask[~good])
        losses = torch.cat(
            [
                1 - torch.sigmoid(self.beta * (chosen - ref_chosen - divergence)),
                1 - torch.sigmoid(self.beta * (divergence - rejected + ref_rejected)),
            ]
        )
        if train_eval == "train":
            self._stored_metrics[train_eval]["rewards/margins"].append(float(divergence))
        return losses.mean()


@case("K2", "K3", slack=3.0)
def kto_with_mismatched_pairs() -> Script:
    """KTO: three calls of the model, on eight and on four samples."""
    return preferences(Kahneman)


class Relative(Preferences):
    """GRPO: `_prepare_inputs` calls the model, and every batch is used twice."""

    _step = 0
    _buffered: Any = None

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)  # type: ignore[misc]
        if not self.model.training:  # type: ignore[attr-defined]
            return inputs
        if self._step % 2 == 0:
            with torch.no_grad():
                old = log_probabilities(self.model, inputs["chosen_input_ids"], inputs["attention_mask"])  # type: ignore[attr-defined]
            # over a small spread, as in GRPO, rounding errors of the two ways would be compared
            self._buffered = {**inputs, "old": old, "advantages": (old - old.mean()) / (old.std() + 0.1)}
        self._step += 1
        return self._buffered

    def get_batch_loss_metrics(self, model: Any, batch: Any, train_eval: str) -> Tensor:
        new = log_probabilities(model, batch["chosen_input_ids"], batch["attention_mask"])
        if "old" not in batch:
            return new.mean()
        ratio = (new - batch["old"]).exp()
        return -torch.min(ratio * batch["advantages"], ratio.clamp(0.8, 1.2) * batch["advantages"]).mean()


@case("K2", expect="exact", slack=3.0)
def grpo_prepares_with_the_model() -> Script:
    """GRPO: `_prepare_inputs` calls the model in every other step."""
    return preferences(Relative, options={"eval_strategy": "no"})


# ---------------------------------------------------------------------------------------------------------
# Losses that hold the model, or parameters
# ---------------------------------------------------------------------------------------------------------


class RankingLoss(nn.Module):
    """A loss of sentence-transformers: it holds the model, and a scale that is trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.tensor(3.0))

    def forward(self, features: list[Inputs], labels: Tensor) -> Tensor:
        anchors, positives = (F.normalize(self.model(**one)["logits"], dim=-1) for one in features)
        return F.cross_entropy(self.scale * anchors @ positives.T, torch.arange(len(anchors)))


class SentencePairs:
    """Losses over a list of features, as sentence-transformers has them."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        features = [
            {k.removeprefix(p): v for k, v in inputs.items() if k.startswith(p)} for p in ("anchor_", "positive_")
        ]
        loss = self.loss(features, inputs["labels"])  # type: ignore[attr-defined]
        return (loss, {}) if return_outputs else loss

    def create_optimizer(self, *args: Any) -> Any:
        optimizer = super().create_optimizer(*args)  # type: ignore[misc]
        if not any(p is self.loss.scale for g in optimizer.param_groups for p in g["params"]):  # type: ignore[attr-defined]
            optimizer.add_param_group({"params": [self.loss.scale], "lr": 0.1, "weight_decay": 0.0})  # type: ignore[attr-defined]
        return optimizer


def sentence_pairs(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = pad(rows)
    words, mask = batch["input_ids"], batch["attention_mask"]
    return {
        "anchor_input_ids": words,
        "anchor_attention_mask": mask,
        "positive_input_ids": (words + 3) % VOCABULARY,
        "positive_attention_mask": mask,
        "labels": batch["labels"],
    }


@case("K2", "K3")
def loss_module_with_a_scale() -> Script:
    """sentence-transformers: a loss module that holds the model and a parameter, which the optimizer gets later."""

    def wire(trainer: Any) -> None:
        trainer.loss = RankingLoss(trainer.model)

    return Script(
        model=Network(),
        data=samples(72),
        batch=BATCH,
        collator=sentence_pairs,
        trainer=SentencePairs,
        wire=wire,
        options={**ADAMW, "num_train_epochs": 1},
        observe=lambda trainer: {"scale": float(trainer.loss.scale)},
    )


class Uncertain(Network):
    """The weights of two tasks are parameters that only the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.log_vars = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.second = nn.Linear(WIDTH, 1)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        pooled = pool(Backbone.forward(self, input_ids), attention_mask)
        return {"logits": self.head(pooled), "value": self.second(pooled)[:, 0]}


def uncertain_loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
    outputs = model(**inputs)
    inner = trainer.accelerator.unwrap_model(model)
    terms = torch.stack(
        [
            F.cross_entropy(outputs["logits"], inputs["labels"]),
            F.mse_loss(outputs["value"], inputs["input_ids"].float().mean(1) / VOCABULARY),
        ]
    )
    return ((-inner.log_vars).exp() * terms + inner.log_vars).sum(), outputs


@case("K2", "K3", "K2R2")
def weights_of_tasks_in_the_model() -> Script:
    """Kendall's weights of two tasks, parameters of the model that its forward does not read."""
    return with_loss(uncertain_loss, Uncertain(), options=ADAMW)


class Angular(Network):
    """Returns features; the loss reads the weight of the classes."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.classes = nn.Parameter(torch.randn(LABELS, WIDTH))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return pool(Backbone.forward(self, input_ids), attention_mask)


@case("K2", "K3", "K2R2")
def arcface() -> Script:
    """ArcFace: the loss multiplies normalised features by normalised weights of the model."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        labels = inputs.pop("labels")
        features = model(**inputs)
        inner = model.module if hasattr(model, "module") else model
        cosine = F.linear(F.normalize(features), F.normalize(inner.classes)).clamp(-0.999, 0.999)
        margin = 0.2 * F.one_hot(labels, LABELS)
        return F.cross_entropy(8 * torch.cos(torch.acos(cosine) + margin), labels), {"logits": cosine}

    return with_loss(
        loss,
        Angular(),
        keywords={"eval_dataset": samples(16, seed=4)},
        options={"eval_strategy": "epoch", "label_names": ["labels"]},
    )


@case("K2", "K3")
def centers_in_a_buffer() -> Script:
    """Center loss: a buffer of the model follows the features in the loss."""
    model: Any = Angular()
    model.register_buffer("centers", torch.zeros(LABELS, WIDTH))

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        labels = inputs["labels"]
        features = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        inner = trainer.accelerator.unwrap_model(model)
        away = features - inner.centers[labels]
        with torch.no_grad():
            inner.centers.index_add_(0, labels, away, alpha=0.05)
        logits = F.linear(features, inner.classes)
        return F.cross_entropy(logits, labels) + 0.1 * away.pow(2).sum(1).mean(), {"logits": logits}

    return with_loss(loss, model)


class Reversal(torch.autograd.Function):
    """Multiplies the gradient by a negative factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.factor * gradients[0], None


@case("K2", "K3", "K2R2")
def reversed_gradient_by_progress() -> Script:
    """DANN: a discriminator behind a gradient reversal; its factor follows from `state.max_steps`."""
    model: Any = Angular()
    model.domain = nn.Linear(WIDTH, 2)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        progress = trainer.state.global_step / trainer.state.max_steps
        features = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        inner = trainer.accelerator.unwrap_model(model)
        logits = F.linear(features, inner.classes)
        domain = inner.domain(Reversal.apply(features, progress))
        return F.cross_entropy(logits, inputs["labels"]) + F.cross_entropy(domain, inputs["input_ids"][:, 0] % 2), {}

    return with_loss(loss, model)


# ---------------------------------------------------------------------------------------------------------
# Inputs and calls
# ---------------------------------------------------------------------------------------------------------


@case("K2", "K3", expect="exact")
def mixed_embeddings() -> Script:
    """Mixup of embeddings, which the loss looks up itself and passes as `inputs_embeds`."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        x = model.get_input_embeddings()(inputs["input_ids"])
        mixed = 0.7 * x + 0.3 * x.flip(0)
        outputs = model(inputs_embeds=mixed, attention_mask=inputs["attention_mask"])
        labels = inputs["labels"]
        value = 0.7 * F.cross_entropy(outputs.logits, labels) + 0.3 * F.cross_entropy(outputs.logits, labels.flip(0))
        return value, outputs

    return with_loss(loss, bert())


@case("K2", "K3", "K2R2")
def parts_called_by_hand() -> Script:
    """`model.bert` under `no_grad` up to the third step, and then the head by hand."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        inner = trainer.accelerator.unwrap_model(model)
        labels = inputs["labels"]
        given = {name: value for name, value in inputs.items() if name != "labels"}
        with torch.set_grad_enabled(trainer.state.global_step >= 3 and model.training):
            body = inner.bert(**given)
        logits = inner.classifier(inner.dropout(body.pooler_output))
        return F.cross_entropy(logits, labels), {"logits": logits}

    return with_loss(loss, bert(), product={"num_microbatches": 2})


@case("K2", slack=100.0)
def half_precision_for_one_call() -> Script:
    """`torch.autocast` around the model's call only."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(**inputs)
        return F.cross_entropy(outputs["logits"].float(), inputs["labels"]), outputs

    return with_loss(loss)


@case("K2", "K3")
def losses_of_samples_by_vmap() -> Script:
    """Each sample's loss by `vmap`, weighed by the norm of its gradient to the logits, and a compiled function."""
    penalty = torch.compile(lambda x: x.pow(2).mean(), backend="eager")

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        each = torch.func.vmap(F.cross_entropy)(outputs["logits"], inputs["labels"])
        norms = torch.func.vmap(torch.func.grad(F.cross_entropy))(outputs["logits"].detach(), inputs["labels"]).norm(
            dim=1
        )
        return (each * norms / norms.sum()).sum() + 0.1 * penalty(outputs["logits"]), outputs

    return with_loss(loss)


@case("K2", "K3", expect="exact")
def gradients_of_tasks() -> Script:
    """PCGrad: the gradients of two losses to all parameters, by `autograd.grad`."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        first, second = outputs["loss"], outputs["logits"].pow(2).mean()
        parameters = [p for p in model.parameters() if p.requires_grad]
        a = torch.autograd.grad(first, parameters, retain_graph=True, allow_unused=True)
        b = torch.autograd.grad(second, parameters, retain_graph=True, allow_unused=True)
        dot = sum((x * y).sum() for x, y in zip(a, b, strict=True) if x is not None and y is not None)
        return first + (second if float(dot) > 0 else 0 * second), outputs

    return with_loss(loss)


class TwoHeads(Network):
    """The batch says which head is called."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.heads = nn.ModuleDict({"even": nn.Linear(WIDTH, LABELS), "odd": nn.Linear(WIDTH, LABELS)})

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, task: str = "even", labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        return classified(self.heads[task](pool(Backbone.forward(self, input_ids), attention_mask)), labels)


@case("K2", "K3")
def task_of_the_batch() -> Script:
    """Multi-task training: a word in the batch chooses the head, and the other head has no gradient."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = dict(pad(rows))
        return {**batch, "task": "odd" if int(batch["labels"].sum()) % 2 else "even"}

    return with_loss(model=TwoHeads(), collator=collate, options=ADAMW)


@case("K2", "K3")
def words_in_one_row() -> Script:
    """Packed samples: one row with `position_ids`, as `DataCollatorWithFlattening` returns."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        words = torch.cat([row["input_ids"] for row in rows])[None]
        places = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None]
        labels = words.clone()
        labels[places == 0] = -100
        return {"input_ids": words, "position_ids": places, "labels": labels}

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        labels = inputs.pop("labels")
        outputs = model(**inputs, use_cache=False)
        return F.cross_entropy(outputs.logits[0, :-1], labels[0, 1:]), outputs

    return with_loss(loss, llama(), collator=collate, data=samples(36, 3, 7), batch=6)


# ---------------------------------------------------------------------------------------------------------
# Changes by the loss to the trainer's loop
# ---------------------------------------------------------------------------------------------------------


@case("K2", "K3", expect="exact")
def rate_set_in_the_loss() -> Script:
    """The loss sets the learning rate of all groups."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        if model.training:
            for group in trainer.optimizer.param_groups:
                group["lr"] = 0.05 / (1 + float(outputs["loss"]))
        return outputs["loss"], outputs

    return with_loss(loss)


@case("K2", "K3", "K2R2", expect="exact")
def stops_in_the_loss() -> Script:
    """The loss sets `self.control.should_training_stop`."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        if model.training and trainer.state.global_step == 3:
            trainer.control.should_training_stop = True
        return outputs["loss"], outputs

    return with_loss(loss)


@case("K2", expect="exact")
def clears_gradients_in_the_loss() -> Script:
    """The loss calls `model.zero_grad()`, under accumulation."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        model.zero_grad()
        return plain_loss(trainer, model, inputs)

    return with_loss(loss, batch=4, options={"gradient_accumulation_steps": 2})


class Skips:
    """Skips batches that fail, as for lack of memory."""

    runs = 0
    early = True

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        try:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            self.model.zero_grad()  # type: ignore[attr-defined]
            return torch.tensor(0.0)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.runs += 1
        if self.early and self.runs == 3:
            raise RuntimeError("out of memory")
        outputs = model(**inputs)
        if not self.early and self.runs == 3:
            raise RuntimeError("out of memory")
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


@case("K2", "K3", expect="exact")
def batches_skipped_before_the_call() -> Script:
    """`training_step` catches an error of the loss, before the model is called, and skips the batch."""
    return with_loss(trainer=Skips)


@case("K2", "K3", expect="exact")
def batches_skipped_after_the_call() -> Script:
    """`training_step` catches an error of the loss, after the model has been called, and skips the batch."""
    return with_loss(trainer=type("Late", (Skips,), {"early": False}))


class Masks:
    """`training_step` masks words before the step, and measures."""

    losses: Any = ()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        generator = torch.Generator().manual_seed(self.state.global_step)  # type: ignore[attr-defined]
        hidden = torch.rand(inputs["input_ids"].shape, generator=generator) < 0.3
        inputs["input_ids"] = inputs["input_ids"].masked_fill(hidden, 1)
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        self.losses = [*self.losses, float(loss)]
        return loss


@case("K2", "K3")
def words_masked_in_training_step() -> Script:
    """`training_step` masks words before `super().training_step()`, and keeps the loss that it returns."""
    return with_loss(trainer=own_loss(plain_loss, Masks), observe=lambda t: {"losses": list(t.losses)})


class CountsAll:
    """Counts the runs of the methods that users override."""

    def _count(self, name: str) -> None:
        counts = vars(self).setdefault("counts", defaultdict(int))
        counts[name] += 1

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self._count("loss in training" if model.training else "loss in evaluation")
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def training_step(self, *args: Any, **keywords: Any) -> Any:
        self._count("training_step")
        return super().training_step(*args, **keywords)  # type: ignore[misc]

    def prediction_step(self, *args: Any, **keywords: Any) -> Any:
        self._count("prediction_step")
        return super().prediction_step(*args, **keywords)  # type: ignore[misc]

    def evaluate(self, *args: Any, **keywords: Any) -> Any:
        self._count("evaluate")
        return super().evaluate(*args, **keywords)  # type: ignore[misc]

    def create_optimizer(self, *args: Any, **keywords: Any) -> Any:
        self._count("create_optimizer")
        return super().create_optimizer(*args, **keywords)  # type: ignore[misc]

    def create_scheduler(self, *args: Any, **keywords: Any) -> Any:
        self._count("create_scheduler")
        return super().create_scheduler(*args, **keywords)  # type: ignore[misc]


@case("K2")
def runs_of_users_code() -> Script:
    """How often each override and each callback runs, with accumulation and evaluations."""
    events = ("on_step_begin", "on_substep_end", "on_step_end", "on_epoch_end", "on_evaluate", "on_optimizer_step")

    def note(event: str) -> Each:
        return Each(lambda callback, *_, **__: callback.trainer._count(event), event)

    evaluated = ("prediction_step", "loss in evaluation")
    options = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "eval_strategy": "epoch"}
    keywords = {
        "eval_dataset": samples(16, seed=4),
        "compute_metrics": lambda p: {"mean": float(p.predictions.mean())},
    }
    return with_loss(
        trainer=CountsAll,
        batch=4,
        data=samples(44),
        callbacks=[note(event) for event in events],
        options=options,
        keywords=keywords,
        # two processes evaluate twice as many samples at a time
        observe=lambda trainer: {"counts": {n: c for n, c in trainer.counts.items() if n not in evaluated}},
    )


@case("K2", expect="exact", because="clear")
def gradients_of_an_attack_cleared() -> Script:
    """VAT: the loss calls `backward()` for a direction, clears the gradients, and calls the model again."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if model.training:
            model(**inputs)["logits"].pow(2).mean().backward()
            model.zero_grad()
        return plain_loss(trainer, model, inputs)

    return with_loss(loss)


@case("K2", "K3")
def clears_nothing_in_the_loss() -> Script:
    """The loss calls `zero_grad()` of the model and the optimizer before there are any gradients."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        if model.training:
            model.zero_grad()
            trainer.optimizer.zero_grad()
        return plain_loss(trainer, model, inputs)

    return with_loss(loss)


@case("K2", "K2R2")
def containers_on_the_trainer() -> Script:
    """The loss keeps a `Counter`, a `deque` and a `defaultdict`, by which a callback sets the rate."""
    kept = {"counter": Counter(), "recent": deque(maxlen=3), "sums": defaultdict(float)}

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        value, outputs = plain_loss(trainer, model, inputs)
        trainer.counter.update(steps=1)
        trainer.recent.append(trainer.state.global_step)
        trainer.sums["steps"] += 0.5
        return value, outputs

    def act(callback: Each, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        trainer = callback.trainer
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (trainer.counter["steps"] + sum(trainer.recent) + trainer.sums["steps"])

    def wire(trainer: Any) -> None:
        vars(trainer).update(kept)

    return with_loss(loss, wire=wire, callbacks=[Each(act)])


# ---------------------------------------------------------------------------------------------------------
# Optimizers
# ---------------------------------------------------------------------------------------------------------


class LayerwiseRates:
    """The groups of `super().create_optimizer()` are replaced by one for each layer, with decaying rates."""

    def create_optimizer(self, *args: Any) -> Any:
        optimizer = super().create_optimizer(*args)  # type: ignore[misc]
        groups = optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        names = {id(p): n for n, p in self.model.named_parameters()}  # type: ignore[attr-defined]
        first = {k: v for k, v in groups[0].items() if k != "params"}
        by_depth: dict[int, list[Any]] = {}
        for p in parameters:
            depth = next((int(part) for part in names[id(p)].split(".") if part.isdigit()), -1)
            by_depth.setdefault(9 if "head" in names[id(p)] else depth, []).append(p)
        groups[:] = [{**first, "params": ps, "lr": 5e-3 * 0.8 ** (4 - d)} for d, ps in sorted(by_depth.items())]
        return optimizer


@case("K2", "K3", "K2R2")
def rates_by_layers() -> Script:
    """Layer-wise decay of the rate, in groups that replace the ones of `super().create_optimizer()`."""
    return with_loss(trainer=own_loss(plain_loss, LayerwiseRates), options=ADAMW)


class Lookahead(torch.optim.Optimizer):
    """Slow weights behind another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.inner, self.k, self.alpha, self.count = inner, k, alpha, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow: dict[Any, Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p not in self.slow:
                    self.slow[p] = p.detach().clone()
        result = self.inner.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        if p in self.slow:
                            self.slow[p].add_(p - self.slow[p], alpha=self.alpha)
                            p.copy_(self.slow[p])
        return result


@case("K2", "K3", expect="exact")
def lookahead() -> Script:
    """A Lookahead of the user's around AdamW, as its public implementations are."""
    model = Network()
    return with_loss(
        model=model, keywords={"optimizers": (Lookahead(torch.optim.SGD(model.parameters(), 0.05)), None)}
    )


@case("K2", "K2R2")
def optimizer_state_cleared_by_cycles() -> Script:
    """Warm restarts: a callback clears the optimizer's state, and sets the rate anew."""

    def act(callback: Each, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if state.global_step == 3:
            optimizer.state.clear()

    return with_loss(callbacks=[Each(act, "on_step_begin")], options=ADAMW)


@case("K2", "K3", "K2R2")
def adaptive_clipping_of_what_is_here() -> Script:
    """timm's adaptive gradient clipping, which leaves out parameters that are elsewhere, as docs say."""

    def act(callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for p in model.parameters():
            if elsewhere(p) or p.grad is None:
                continue
            most = 0.01 * p.detach().norm().clamp(min=1e-3)
            p.grad.mul_((most / p.grad.norm().clamp(min=1e-6)).clamp(max=1.0))

    return with_loss(callbacks=[Each(act, "on_pre_optimizer_step")])


class AverageHere:
    """An EMA of the parameters that are here; they replace the weights at the end."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}

    def follow(self, callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for name, p in model.named_parameters():
            if not elsewhere(p):
                mean = self.mean.setdefault(name, p.detach().clone())
                mean.lerp_(p.detach(), 0.3)

    def put(self, callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step < state.max_steps:
            return
        for name, p in model.named_parameters():
            if not elsewhere(p):
                p.data.copy_(self.mean[name])


@case("K2", "K3", "K2R2")
def average_of_what_is_here() -> Script:
    """An EMA callback that leaves out parameters that are elsewhere, and replaces the weights after the last step."""
    average = AverageHere()
    return with_loss(callbacks=[Each(average.follow), Each(average.put)])


@case("K2", "K3", "K2R2")
def weights_clamped_after_steps() -> Script:
    """WGAN's clamping in `on_step_end`, of parameters that are here, by assignment to `.data`."""

    def act(callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for p in model.parameters():
            if not elsewhere(p):
                p.data = p.data.clamp(-0.3, 0.3)

    return with_loss(callbacks=[Each(act)], options={"optim": "adamw_torch", "adam_epsilon": 1e-3})


@case("K2", "K3", "K2R2")
def gradual_unfreezing() -> Script:
    """ULMFiT: all but the head is frozen in `on_train_begin`, and a layer is trained from each epoch on."""

    def freeze(callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.requires_grad_(False)
        model.head.requires_grad_(True)

    def thaw(callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.layers[-1 - int(state.epoch)].requires_grad_(True)

    callbacks = [Each(freeze, "on_train_begin"), Each(thaw, "on_epoch_begin")]
    return with_loss(data=samples(24), callbacks=callbacks, options={**ADAMW, "num_train_epochs": 3})


# ---------------------------------------------------------------------------------------------------------
# Callbacks, evaluations, checkpoints
# ---------------------------------------------------------------------------------------------------------


@case("K2", "K3", "R2", "K2R2")
def evaluates_two_sets_in_a_callback() -> Script:
    """A callback evaluates the training set at each epoch's end, and ends the training by the metric."""

    def act(callback: Each, state: Any, control: Any, **_: Any) -> None:
        metrics = callback.trainer.evaluate(callback.trainer.train_dataset, metric_key_prefix="train")
        control.should_training_stop |= metrics["train_loss"] < 1.0

    options = {"num_train_epochs": 3, "eval_strategy": "epoch"}
    return with_loss(
        callbacks=[Each(act, "on_epoch_end")],
        data=samples(24),
        options=options,
        keywords={"eval_dataset": samples(8, seed=4)},
        observe=logged("train_loss"),
    )


@case("K2", "K2R2")
def stops_early_and_loads_the_best() -> Script:
    """Early stopping by a metric of the user's loss; the best checkpoint is loaded, and evaluated."""

    def drive(trainer: Any) -> Any:
        trainer.train()
        return {name: value for name, value in trainer.evaluate().items() if name in ("eval_loss", "eval_right")}

    options = {
        "num_train_epochs": 6,
        "learning_rate": 0.5,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "right",
        "greater_is_better": True,
    }
    keywords = {
        "eval_dataset": samples(16, seed=4),
        "compute_metrics": lambda p: {"right": float((p.predictions.argmax(-1) == p.label_ids).mean())},
    }
    return with_loss(
        drive=drive,
        data=samples(24),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        options=options,
        keywords=keywords,
        observe=logged("eval_right"),
    )


@case("K2", "K3", "K2R2")
def resumed_with_groups() -> Script:
    """A training with layer-wise rates and a momentum of the loss is resumed in the middle."""

    options = {**ADAMW, "save_strategy": "steps", "save_steps": 3}
    return with_loss(trainer=own_loss(plain_loss, LayerwiseRates), drive=train_and_resume, options=options)


@case("K2", "K2R2")
def finds_a_rate_first() -> Script:
    """A learning-rate finder raises the rate in each step; then the weights are put back, and the best one trains."""

    def drive(trainer: Any) -> None:
        before = copy.deepcopy(trainer.model.state_dict())
        rates: list[float] = []

        def raised(callback: Each, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * 4.0**state.global_step
            rates.append(optimizer.param_groups[0]["lr"])

        finder = Each(raised, "on_step_begin")
        trainer.add_callback(finder)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.remove_callback(finder)
        trainer.model.load_state_dict(before)
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.args.learning_rate = rates[losses.index(min(losses))]
        trainer.train()

    return with_loss(drive=drive)


@case("K2", "K3")
def snapshots_averaged() -> Script:
    """Snapshots that `save_model` writes in each epoch are read and averaged after the training."""

    def save(callback: Each, state: Any, control: Any, **_: Any) -> None:
        callback.trainer.save_model(str(Path(callback.trainer.args.output_dir) / f"cycle-{state.epoch:.0f}"))

    def drive(trainer: Any) -> None:
        trainer.train()
        folders = sorted(Path(trainer.args.output_dir).glob("cycle-*"))
        saved = [load_file(folder / "model.safetensors") for folder in folders]
        trainer.model.load_state_dict({k: sum(one[k] for one in saved) / len(saved) for k in saved[0]})

    options = {"num_train_epochs": 3}
    return with_loss(data=samples(24), drive=drive, callbacks=[Each(save, "on_epoch_end")], options=options)


class SampledByLoss:
    """Samples with a large loss come first in the next epoch."""

    def wired(self) -> None:
        self.losses = [0.0] * len(self.train_dataset)  # type: ignore[attr-defined]

    def _get_train_sampler(self, *_: Any) -> Any:
        trainer: Any = self

        class Hardest(torch.utils.data.Sampler):
            def __iter__(self) -> Any:
                return iter(sorted(range(len(trainer.losses)), key=lambda i: (-round(trainer.losses[i], 3), i)))

            def __len__(self) -> int:
                return len(trainer.losses)

        return Hardest()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        index = inputs.pop("index")
        outputs = model(**inputs)
        each = F.cross_entropy(outputs["logits"], inputs["labels"], reduction="none")
        for place, value in zip(index.tolist(), each.tolist(), strict=True):
            self.losses[place] = value
        return (each.mean(), outputs) if return_outputs else each.mean()


@case("K2", "K3", expect="exact", because="losses")
def sampler_follows_losses() -> Script:
    """A sampler orders the next epoch by the values that the loss has kept for each sample."""
    data = samples(24)
    for index, row in enumerate(data.rows):
        row["index"] = torch.tensor(index)
    options = {"num_train_epochs": 3}
    return with_loss(trainer=SampledByLoss, data=data, wire=lambda t: t.wired(), options=options)


@case("K2", "K3")
def memory_by_index() -> Script:
    """Early-learning regularisation: a tensor of the trainer keeps a target for each sample."""
    data = samples(24)
    for index, row in enumerate(data.rows):
        row["index"] = torch.tensor(index)

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        index = inputs.pop("index")
        outputs = model(**inputs)
        chances = outputs["logits"].softmax(1)
        trainer.targets[index] = 0.7 * trainer.targets[index] + 0.3 * chances.detach()
        return outputs["loss"] + (1 - (trainer.targets[index] * chances).sum(1)).log().mean(), outputs

    def wire(trainer: Any) -> None:
        trainer.targets = torch.zeros(24, LABELS)

    options = {"num_train_epochs": 3}
    return with_loss(loss, data=data, wire=wire, options=options)


class Focal:
    """A callable with a counter, as `compute_loss_func`."""

    runs = 0

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        self.runs += 1
        each = F.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        focal = (1 - (-each).exp()) ** 2 * each
        return focal.sum() / num_items_in_batch


@case("K2", "R2", "K2R2")
def loss_func_with_a_counter() -> Script:
    """A focal loss over words as `compute_loss_func`, divided by `num_items_in_batch`, with accumulation."""
    focal = Focal()

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return pad([{**row, "labels": row["input_ids"]} for row in rows])

    return Script(
        model=llama(),
        data=samples(40, 4, 10),
        collator=collate,
        options={**ADAMW, "num_train_epochs": 1, "gradient_accumulation_steps": 2},
        keywords={"compute_loss_func": focal},
        observe=lambda trainer: {"runs": focal.runs},
    )


@case("K2", "K3", "K2R2")
def smoothed_by_the_trainer() -> Script:
    """A `compute_loss` that calls `self.label_smoother`, and pops the labels."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        labels = inputs.pop("labels")
        outputs = model(**inputs, use_cache=False)
        return trainer.label_smoother(outputs, labels, shift_labels=True), outputs

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return pad([{**row, "labels": row["input_ids"]} for row in rows])

    options = {**ADAMW, "label_smoothing_factor": 0.1}
    return with_loss(loss, llama(), collator=collate, options=options)


@case("K2", "K3", "K2R2")
def curriculum_of_a_callback() -> Script:
    """A callback sets the weight of a term on the trainer, and a temperature on the model and its configuration."""

    class Tempered(Network):
        temperature = 1.0

        def forward(self, *args: Any, **keywords: Any) -> dict[str, Tensor]:
            labels = keywords.pop("labels", None)
            return classified(super().forward(*args, **keywords)["logits"] / self.temperature, labels)

    def act(callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        callback.trainer.alpha = 0.1 * state.epoch
        model.temperature = 1.0 + state.epoch

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs["loss"] + trainer.alpha * outputs["logits"].pow(2).mean(), outputs

    options = {"num_train_epochs": 3}
    return with_loss(loss, Tempered(), data=samples(24), callbacks=[Each(act, "on_epoch_begin")], options=options)


@case("K2", "K3")
def rate_by_plateau() -> Script:
    """`reduce_lr_on_plateau` by evaluations of the user's loss, with several sets."""
    options = {
        "num_train_epochs": 4,
        "learning_rate": 0.6,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0},
        "eval_strategy": "epoch",
        "metric_for_best_model": "eval_loss",
    }
    return with_loss(data=samples(24), options=options, keywords={"eval_dataset": samples(8, seed=4)})


@case("K2", "K2R2")
def evaluate_adds_metrics() -> Script:
    """`evaluate` adds a metric and logs it, and metrics get inputs and losses."""

    class Adds:
        def evaluate(self, *args: Any, **keywords: Any) -> Any:
            metrics = super().evaluate(*args, **keywords)  # type: ignore[misc]
            metrics["eval_doubled"] = 2 * metrics["eval_shortest"]
            self.log({"eval_doubled": metrics["eval_doubled"]})  # type: ignore[attr-defined]
            return metrics

    def measure(prediction: Any) -> dict[str, float]:
        return {"shortest": float(prediction.losses.mean()) + float(prediction.inputs.mean())}

    options = {"eval_strategy": "epoch", "include_for_metrics": ["loss", "inputs"]}
    return with_loss(
        trainer=own_loss(plain_loss, Adds),
        options=options,
        keywords={"eval_dataset": samples(16, seed=4), "compute_metrics": measure},
        observe=logged("eval_doubled", "eval_shortest"),
    )


@case("K2", expect="exact")
def rate_set_in_training_step() -> Script:
    """`training_step` sets the rate by the loss that `super()` has returned."""

    class Sets:
        def training_step(self, *args: Any, **keywords: Any) -> Any:
            loss = super().training_step(*args, **keywords)  # type: ignore[misc]
            for group in self.optimizer.param_groups:  # type: ignore[attr-defined]
                group["lr"] = 0.05 / (1 + float(loss))
            return loss

    return with_loss(trainer=own_loss(plain_loss, Sets))


@case("K2", "K3", expect="exact")
def scheduler_stepped_in_the_loss() -> Script:
    """The loss steps the scheduler a second time."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        if model.training and trainer.state.global_step == 2:
            trainer.lr_scheduler.step()
        return outputs["loss"], outputs

    return with_loss(loss, options={"lr_scheduler_type": "linear"})


@case("K2", "K3", expect="exact")
def norm_set_in_the_loss() -> Script:
    """The loss sets `self.args.max_grad_norm`."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        if model.training:
            trainer.args.max_grad_norm = 0.02 * (1 + trainer.state.global_step)
        return outputs["loss"], outputs

    return with_loss(loss)
