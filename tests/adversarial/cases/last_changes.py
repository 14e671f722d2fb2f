"""Outputs that follow a batch's longest sample, inputs written without notice, collators set before a resume."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Phi3Config,
    Phi3ForSequenceClassification,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.bert import modeling_bert

from ..kit import (
    LABELS,
    VOCABULARY,
    WIDTH,
    At,
    Backbone,
    Each,
    FrozenBackbone,
    Inputs,
    LossAndOutputs,
    Network,
    Script,
    bert,
    bert_config,
    case,
    classified,
    own_loss,
    pool,
    samples,
    train_and_resume,
)
from .attack_caches import freeze_lowest
from .attack_front import ragged, reads, sequence_pairs
from .attack_recipes_front import of
from .late_changes import frozen_by_schedule

ORIGINAL = 6
"""Number of tokens for which the rotary embeddings were made."""
POLICY: dict[str, Any] = {
    "freeze_policy": "schedule",
    "freeze_schedule": {"1": 2},
    "activation_cache": "auto",
}


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_labels": LABELS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,
}


def llama(kind: str) -> Any:
    """A Llama, or a Phi-3, whose frequencies follow the longest sample."""
    torch.manual_seed(0)
    if kind == "dynamic":
        rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 100.0}
        return LlamaForSequenceClassification(
            LlamaConfig(**{**SIZES, "max_position_embeddings": ORIGINAL}, rope_parameters=rope)
        )
    factors = {"short_factor": [1.0] * (WIDTH // 4), "long_factor": [5.0] * (WIDTH // 4)}
    rope = {"rope_type": kind, "rope_theta": 100.0, "original_max_position_embeddings": ORIGINAL, **factors}
    return Phi3ForSequenceClassification(Phi3Config(**SIZES, rope_parameters=rope))


def longer_later(model: Any, **fields: Any) -> Script:
    """Texts of up to six words; in the third epoch, all batches but the first have a longer one."""
    rows = samples(32, 4, 6)
    long = samples(32, 12, 12)

    class Data(torch.utils.data.Dataset[Any]):
        epoch = 0

        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, k: int) -> Any:
            return long[k] if self.epoch > 1 and k in (12, 20, 27) else rows[k]

    data = Data()

    def begin(each: Any, state: Any, control: Any, **_: Any) -> None:
        data.epoch = round(state.epoch or 0)

    fields["options"] = {"train_sampling_strategy": "sequential", **fields.get("options", {})}
    return of(model, data=data, callbacks=[Each(begin, "on_epoch_begin")], **fields)


def lowest(model: Any) -> Any:
    model.model.embed_tokens.requires_grad_(False)
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    return model


def backbone(model: Any) -> Any:
    model.model.requires_grad_(False)
    return model


@case("K1")
def dynamic_rotary_embeddings_of_a_frozen_model() -> Script:
    """Texts that change the frequencies of a frozen Llama first come in the third epoch."""
    return longer_later(backbone(llama("dynamic")))


@case("K1")
def long_rotary_embeddings_of_a_frozen_model() -> Script:
    """Texts that change the frequencies of a frozen Phi-3 first come in the third epoch."""
    return longer_later(backbone(llama("longrope")))


@case("K1", "K2")
def dynamic_rotary_embeddings_over_lowest_layers() -> Script:
    """The lowest layers of a Llama are frozen; longer texts come in the third epoch."""
    return longer_later(lowest(llama("dynamic")))


@case("K1", "K2")
def long_rotary_embeddings_over_lowest_layers() -> Script:
    """The lowest layers of a Phi-3 are frozen; longer texts come in the third epoch."""
    return longer_later(lowest(llama("longrope")))


@case("K1", "K2")
def long_rotary_embeddings_with_a_policy() -> Script:
    """A policy freezes the lowest layers of a Phi-3; longer texts come in the third epoch."""

    def freeze(callback: Each, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not hasattr(callback.trainer.args, "freeze_policy") and state.epoch and state.epoch > 0.5:
            lowest(model)

    script = longer_later(llama("longrope"), product=POLICY, options={"num_train_epochs": 4})
    script.callbacks.append(Each(freeze, "on_epoch_begin"))
    return script


class Writes(FrozenBackbone):
    """Writes into its inputs in a way that PyTorch does not count, from the tenth call on."""

    calls = 0
    by_numpy = False

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if self.training:
            self.calls += 1
        if self.calls > 9:
            if self.by_numpy:
                input_ids.numpy()[:, 0] = 7
            else:
                input_ids.data[:, 0] = 7
        hidden = self.backbone(input_ids, attention_mask).last_hidden_state
        return classified(self.head(pool(hidden, attention_mask)), labels)


@case("K1", "R2")
def inputs_written_as_data() -> Script:
    """A model of the user's writes into `input_ids.data` from the third epoch on; its BERT is frozen."""
    return of(Writes(bert(initializer_range=0.3).bert), data=samples(32))


@case("K1", "R2")
def inputs_written_by_numpy() -> Script:
    """A model of the user's writes into `input_ids.numpy()` from the third epoch on; its BERT is frozen."""
    model = Writes(bert(initializer_range=0.3).bert)
    model.by_numpy = True
    return of(model, data=samples(32))


@case("K1")
def inputs_written_by_a_hook() -> Script:
    """A hook on a frozen BERT writes into `input_ids.data`, from the middle of the third epoch on."""
    model = bert(initializer_range=0.3)
    model.bert.requires_grad_(False)
    count = [0]

    def write(module: nn.Module, args: Any, kwargs: Any) -> None:
        count[0] += 1
        if count[0] > 9:
            (args[0] if args else kwargs["input_ids"]).data[:, 0] = 7

    model.bert.register_forward_pre_hook(write, with_kwargs=True)
    return of(model, data=samples(32))


@case("K1", "K2")
def collator_set_before_a_resume_in_an_epoch() -> Script:
    """A callback wraps the loader's collator as training begins, and training resumes in an epoch."""

    def act(callback: Any, state: Any, control: Any, **others: Any) -> None:
        loader = getattr(others["train_dataloader"], "base_dataloader", others["train_dataloader"])
        before = loader.collate_fn

        def wrapped(rows: list[dict[str, Any]]) -> Any:
            batch = before(rows)
            batch["input_ids"] = batch["input_ids"].clone()
            batch["input_ids"][:, 0] = 7
            return batch

        loader.collate_fn = wrapped

    model = bert(initializer_range=0.3)
    model.bert.embeddings.requires_grad_(False)
    options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2}
    data, callbacks = samples(32, 8, 8), [Each(act, "on_train_begin")]
    return of(model, data=data, callbacks=callbacks, drive=train_and_resume, options=options)


@case("R2", "K1")
def experts_of_their_own_with_replicas() -> Script:
    """Some experts get no tokens on some replicas."""
    config = SwitchTransformersConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        num_experts=8,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        decoder_start_token_id=0,
        router_aux_loss_coef=0.0,
        router_z_loss_coef=0.0,
    )
    return of(SwitchTransformersForConditionalGeneration(config), data=ragged(), collator=sequence_pairs)


class Hides(Network):
    """Hides words in its forward, from some epoch on."""

    hides = 0.0

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        if self.training and self.hides:
            input_ids = input_ids.masked_fill(input_ids % 3 == 0, 1)
        return super().forward(input_ids, attention_mask, labels)


def hides_later(**fields: Any) -> Script:
    def change(model: Any, step: int) -> None:
        model.hides = 0.5

    model = Hides(4)
    model.embedding.requires_grad_(False)
    model.layers[:2].requires_grad_(False)
    return of(model, data=samples(32), callbacks=[At(change, [10])], **fields)


@case("K1", "K2")
def forward_around_layers_that_hides_words_later() -> Script:
    """A model of the user's hides words from the middle of the third epoch on; its lowest layers are frozen."""
    return hides_later()


class Counts(Hides):
    calls = 0

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        if self.training:
            self.calls += 1
        if self.calls > 9:
            input_ids = input_ids.masked_fill(input_ids % 3 == 0, 1)
        return Network.forward(self, input_ids, attention_mask, labels)


@case("K1")
def forward_around_layers_that_counts_calls() -> Script:
    """A model of the user's hides words from its tenth call on; its lowest layers are frozen."""
    model = Counts(4)
    model.embedding.requires_grad_(False)
    model.layers[:2].requires_grad_(False)
    return of(model, data=samples(32))


@case("K1", "K2")
def forward_around_layers_that_a_loss_changes() -> Script:
    """The loss sets an attribute in the third epoch by which the model hides words; its lowest layers are frozen."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        getattr(model, "module", model).hides = 0.5 if trainer.state.global_step >= 10 else 0.0
        outputs = model(**inputs)
        return outputs["loss"], outputs

    model = Hides(4)
    model.embedding.requires_grad_(False)
    model.layers[:2].requires_grad_(False)
    return of(model, data=samples(32), trainer=own_loss(loss))


@case("K1", "K2")
def forward_around_layers_with_a_schedule() -> Script:
    """A callback sets an attribute that nothing reads in each step, and the words are hidden in the third epoch."""

    def change(model: Any, step: int) -> None:
        model.progress = step / 12
        model.hides = 0.5 if step >= 10 else 0.0

    model = Hides(4)
    model.embedding.requires_grad_(False)
    model.layers[:2].requires_grad_(False)
    return of(model, data=samples(32), callbacks=[At(change, range(12))])


@case("K1")
def forward_around_layers_with_a_policy() -> Script:
    """A policy freezes the lowest layers of a model of the user's that hides words from the third epoch on."""

    def change(model: Any, step: int) -> None:
        model.hides = 0.5

    script = frozen_by_schedule(model=Hides(4))
    script.callbacks.append(At(change, [14]))
    return script


class Imports(nn.Module):
    """Imports what it computes with when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Backbone(4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        from .. import kit

        return self.inner(input_ids, attention_mask) * kit.FIRST_WORD


@case("K1", "R2")
def package_imported_by_its_relative_name() -> Script:
    """A declared module imports a package by a relative name, and a callback changes a value in it."""

    def change(model: Any, step: int) -> None:
        vars(sys.modules[Script.__module__])["FIRST_WORD"] = 2

    product = {"cached_modules": ["backbone"]}
    return of(FrozenBackbone(Imports()), data=samples(32), callbacks=[At(change, [10])], product=product)


class ReadsPadding(nn.CrossEntropyLoss):
    """Reads all positions: those without a label as the first class."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target.clamp(min=0))


@case("K1")
def loss_of_a_library_replaced_later_reads_padding() -> Script:
    """A callback replaces the loss of transformers' BERT by one that reads padding, in the third epoch."""

    def change(model: Any, step: int) -> None:
        modeling_bert.CrossEntropyLoss = ReadsPadding

    model = BertForTokenClassification(bert_config(initializer_range=0.3))
    model.bert.requires_grad_(False)
    return of(model, data=samples(32, 4, 12, by_word=True), callbacks=[At(change, [10])])


@case("K1")
def table_of_losses_replaced_later_reads_padding() -> Script:
    """A callback replaces a loss in transformers' table by one that reads padding, in the third epoch."""

    def reads_padding(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten())

    def change(model: Any, step: int) -> None:
        LOSS_MAPPING["ForCausalLM"] = reads_padding

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.model.requires_grad_(False)
    rows = [{**row, "labels": row["input_ids"]} for row in samples(32, 4, 12)]
    return of(model, data=rows, callbacks=[At(change, [10])])


# ---------------------------------------------------------------------------------------------------------
# What is read all the same
# ---------------------------------------------------------------------------------------------------------


def evaluated(model: Any, trainer: Any) -> None:
    """The stock Trainer's user keeps the frozen layers in evaluation mode."""
    if not hasattr(trainer.args, "eval_frozen_modules"):
        for module in (model.bert.embeddings, *model.bert.encoder.layer[:3]):
            module.eval()
            module.train = lambda mode=True, module=module: module


@case("K1", "K2")
def lowest_layers_with_dropout_in_evaluation_mode() -> Script:
    """The lowest layers of a BERT with dropout are frozen, and run in evaluation mode: their outputs are read."""
    model = freeze_lowest(bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1))
    for layer in model.bert.encoder.layer[3:]:
        for part in layer.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
    model.dropout.p = 0.0
    for layer in model.bert.encoder.layer[3:]:
        layer.attention.self.attention_dropout = 0.0
    product = {"eval_frozen_modules": True}
    wire = lambda trainer: evaluated(trainer.model, trainer)  # noqa: E731
    return of(model, data=samples(32, 8, 8), product=product, wire=wire, observe=reads)


class Keeps(Network):
    """Keeps what it has computed."""

    last: Any = None

    def __init__(self) -> None:
        super().__init__(4)
        self.calls = 0

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        made = super().forward(input_ids, attention_mask, labels)
        self.last = made["logits"].detach()
        return made


@case("K1")
def outputs_kept_around_layers_with_a_policy() -> Script:
    """A model of the user's keeps its outputs, which nobody reads, and a callback counts: outputs are read."""

    def count(model: Any, step: int) -> None:
        model.calls += 1

    script = frozen_by_schedule(model=Keeps(), observe=reads)
    script.callbacks.append(At(count, range(16)))
    return script


@case("K2", expect="crash", because="output_attentions=True was set")
def attentions_of_an_evaluation() -> Script:
    """The evaluation asks for attentions of all layers."""

    class Asks:
        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                out = model(**inputs, output_attentions=True)
            return out.loss.detach(), torch.stack([a.mean((1, 2, 3)) for a in out.attentions], 1), inputs["labels"]

    model = bert(attn_implementation="eager")

    def drive(trainer: Any) -> Any:
        trainer.train()
        return trainer.evaluate()

    keywords = {"eval_dataset": samples(8, 8, 8)}
    return of(model, data=samples(32, 8, 8), trainer=Asks, keywords=keywords, drive=drive)


@case("K1", "K2")
def collator_restored_by_a_callback() -> Script:
    """A callback wraps the loader's collator for the second epoch, and puts it back."""
    before: list[Any] = []

    def wrap(callback: Any, state: Any, control: Any, **others: Any) -> None:
        loader = getattr(others["train_dataloader"], "base_dataloader", others["train_dataloader"])
        if round(state.epoch) == 1:
            earlier = loader.collate_fn
            before.append(earlier)

            def wrapped(rows: list[dict[str, Any]]) -> Any:
                batch = earlier(rows)
                batch["input_ids"] = batch["input_ids"].roll(1, 1)
                return batch

            loader.collate_fn = wrapped
        elif round(state.epoch) == 2:
            loader.collate_fn = before[0]

    return of(bert(initializer_range=0.3), data=samples(32, 8, 8), callbacks=[Each(wrap, "on_epoch_end")])


@case("K1", "R2")
def attribute_set_and_deleted_in_training_step() -> Script:
    """`training_step` sets an attribute on the model that it is given, and deletes it."""

    class Sets:
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            model.flag = 1
            made = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
            del model.flag
            return made

    return of(bert(), data=samples(32, 8, 8), trainer=Sets)
