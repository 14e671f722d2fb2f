"""Classes that get another forward while modules are intercepted, and other ways to call and share a teacher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..kit import (
    VOCABULARY,
    Backbone,
    Each,
    FrozenBackbone,
    Inputs,
    Layer,
    LossAndOutputs,
    Network,
    Script,
    bert,
    case,
    own_loss,
    samples,
    with_loss,
)

PAST = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"
"""Name of the keys and values in transformers' models."""


def frozen(module: nn.Module) -> Any:
    return module.eval().requires_grad_(False)


def read_of(inputs: Any) -> dict[str, Tensor]:
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def kd(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


def teacher_of_four(seed: int = 3, **changes: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return frozen(bert(num_hidden_layers=4, initializer_range=0.3, **changes))


def student(**changes: Any) -> Any:
    return bert(**{"num_hidden_layers": 2, "initializer_range": 0.2, **changes})


def distil(further: Any, teacher: Any = teacher_of_four, **fields: Any) -> Script:
    """`further(trainer, model, outputs, inputs)` is added to the student's own loss."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs["loss"] + further(trainer, model, outputs, inputs), outputs

    before = fields.pop("wire", lambda trainer: None)

    def wire(trainer: Any) -> None:
        if teacher is not None:
            trainer.teacher = teacher()
        before(trainer)

    fields = {"model": None, "data": samples(32, 4, 9), **fields}
    model = fields.pop("model") or student()
    fields["options"] = {"num_train_epochs": 4, "learning_rate": 0.02, **fields.get("options", {})}
    fields["product"] = {"log_level": "info", **fields.get("product", {})}
    return with_loss(loss, model, wire=wire, **fields)


def plainly(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return kd(outputs.logits, trainer.teacher(**read_of(inputs)).logits)


def llama(layers: int) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=VOCABULARY, initializer_range=0.2, **sizes)
    return LlamaForCausalLM(config)


def llama_teacher() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return frozen(llama(3))


def words(number: int = 32) -> Any:
    rows = samples(number, 8, 8)
    return type(rows)([{**rows[i], "labels": rows[i]["input_ids"]} for i in range(number)])


def of_words(further: Any, **fields: Any) -> Script:
    return distil(further, **{"teacher": llama_teacher, "model": llama(2), "data": words(), **fields})


@case("K1", "R2")
def prefix_of_keys_and_values() -> Script:
    """The teacher reads the prompt first, and the rest with the keys and values that it has returned."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            first = trainer.teacher(inputs["input_ids"][:, :4], use_cache=True)
            rest = trainer.teacher(inputs["input_ids"][:, 4:], **{PAST: first[PAST]})
        return kd(outputs.logits[:, 4:], rest.logits)

    return of_words(further)


@case("K1")
def keys_and_values_of_the_teacher_for_the_student() -> Script:
    """The student reads and extends the teacher's keys and values of the prompt."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            first = trainer.teacher(inputs["input_ids"][:, :4], use_cache=True)
        past = first[PAST]
        rest = model(inputs["input_ids"][:, 4:], **{PAST: past})
        past.crop(-2)
        return rest.logits.square().mean() + past.get_seq_length() * 0.01 * outputs.logits.square().mean()

    def like_the_student() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return frozen(llama(2))

    return of_words(further, teacher=like_the_student)


@case("K1", "R2", "K2")
def teacher_in_the_model() -> Script:
    """The teacher is a part of the student's module, which its forward does not call."""
    model = student()
    model.teacher = teacher_of_four()

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            return kd(outputs.logits, trainer.model.teacher(**read_of(inputs)).logits)

    return distil(further, None, model=model)


@case("K2")
def layers_of_a_teacher_in_the_model() -> Script:
    """The loss calls layers of a teacher inside of the model on values that are trained."""
    model = student()
    model.teacher = teacher_of_four()

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        given = outputs.logits.new_ones(2, 3, trainer.model.config.hidden_size)
        layers = trainer.model.teacher.bert.encoder.layer
        hidden = layers[3](layers[1](given * outputs.logits.mean()))
        return (hidden[0] if isinstance(hidden, tuple) else hidden).square().mean()

    return distil(further, None, model=model)


def class_changes(change: Any, further: Any = plainly, at: int = 9) -> Script:
    class Teacher(BertForSequenceClassification):
        pass

    class Doubled(Teacher):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            outputs.logits = -2 * outputs.logits
            return outputs

    def make() -> Any:
        teacher = teacher_of_four()
        teacher.__class__ = Teacher
        return teacher

    def act(callback: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == at:
            change(callback.trainer, Teacher, Doubled)

    return distil(further, make, callbacks=[Each(act)])


def on_what_is_trained(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
    """The teacher is called on the batch, and on trained embeddings."""
    given = trainer.model.bert.embeddings.word_embeddings(inputs["input_ids"])
    theirs = trainer.teacher(inputs_embeds=given, attention_mask=inputs["attention_mask"]).logits
    return plainly(trainer, model, outputs, inputs) + 0.1 * theirs.square().mean()


def swap_class(trainer: Any, teacher: Any, doubled: Any) -> None:
    trainer.teacher.__class__ = doubled


def patch_class(trainer: Any, teacher: Any, doubled: Any) -> None:
    original = teacher.__mro__[1].forward

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, inputs_embeds: Any = None) -> Any:
        outputs = original(self, input_ids, attention_mask, inputs_embeds=inputs_embeds)
        outputs.logits = -2 * outputs.logits
        return outputs

    teacher.forward = forward


@case("K1")
def class_of_the_teacher_is_swapped() -> Script:
    """The teacher gets another class in the third epoch."""
    return class_changes(swap_class)


@case("K1")
def class_of_the_teacher_is_patched() -> Script:
    """The class of the teacher gets another forward in the third epoch."""
    return class_changes(patch_class)


@case("K1")
def class_is_swapped_with_gradients() -> Script:
    """Likewise; the teacher is also called on trained values."""
    return class_changes(swap_class, on_what_is_trained)


@case("K1")
def class_is_patched_with_gradients() -> Script:
    """Likewise; the teacher is also called on trained values."""
    return class_changes(patch_class, on_what_is_trained)


def model_patched(swaps: bool) -> Script:
    """The class of the trained model gets another forward, or the model another class, in the third epoch."""

    class Users(FrozenBackbone):
        pass

    class Doubled(Users):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            return {**outputs, "loss": 2 * outputs["loss"]}

    def change(callback: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 9:
            if swaps:
                callback.trainer.model.__class__ = Doubled
            else:
                original = FrozenBackbone.forward

                def forward(self: Any, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
                    outputs = original(self, input_ids, attention_mask, labels)
                    return {**outputs, "loss": 2 * outputs["loss"]} if labels is not None else outputs

                Users.forward = forward  # type: ignore[method-assign]

    options = {"num_train_epochs": 4}
    return Script(model=Users(), data=samples(32, 8, 8), callbacks=[Each(change)], options=options)


@case("K1", "R2")
def class_of_the_model_is_swapped() -> Script:
    """The trained model gets another class in the third epoch; its backbone is frozen."""
    return model_patched(True)


@case("K1")
def class_of_the_model_is_patched() -> Script:
    """The class of the trained model gets another forward in the third epoch; its backbone is frozen."""
    return model_patched(False)


@case("K2")
def class_of_a_trained_model_in_stages_is_patched() -> Script:
    """The class of a model without frozen parts gets another forward in the third epoch."""

    class Users(Network):
        pass

    def change(callback: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 9:
            original = Network.forward

            def forward(self: Any, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
                outputs = original(self, input_ids, attention_mask, labels)
                return {**outputs, "loss": 2 * outputs["loss"]} if labels is not None else outputs

            Users.forward = forward  # type: ignore[method-assign]

    return Script(model=Users(), data=samples(32, 8, 8), callbacks=[Each(change)], options={"num_train_epochs": 4})


@case("K1")
def model_patched_to_call_its_backbone_on_other_words() -> Script:
    """From the third epoch on, the forward of the model's class calls the frozen backbone on the reversed words."""

    class Users(FrozenBackbone):
        pass

    def change(callback: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 9:
            original = FrozenBackbone.forward

            def forward(self: Any, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
                return original(self, input_ids.flip(1)[:, :5], attention_mask[:, :5], labels)

            Users.forward = forward  # type: ignore[method-assign]

    options = {"num_train_epochs": 4}
    return Script(model=Users(), data=samples(32, 8, 8), callbacks=[Each(change)], options=options)


def layers_patched(model_of: Callable[[type[Layer]], Any]) -> Script:
    """The class of the model's layers gets another forward in the third epoch."""

    class Users(Layer):
        pass

    def change(callback: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 9:
            Users.forward = lambda self, x: -Layer.forward(self, x)  # type: ignore[method-assign]

    model, options = model_of(Users), {"num_train_epochs": 4}
    return Script(model=model, data=samples(32, 8, 8), callbacks=[Each(change)], options=options)


@case("K2")
def class_of_the_layers_is_patched() -> Script:
    """The layers are in two stages."""
    return layers_patched(lambda users: Network(layer=users))


@case("K1")
def class_of_a_part_of_the_backbone_is_patched() -> Script:
    """The layers are frozen."""
    return layers_patched(lambda users: FrozenBackbone(Backbone(layer=users)))


@case("K1", "K2")
def class_of_the_model_is_patched_when_training_begins() -> Script:
    """The class of the trained model gets another forward in `on_train_begin`."""

    class Users(FrozenBackbone):
        pass

    def change(callback: Any, state: Any, control: Any, **_: Any) -> None:
        original = FrozenBackbone.forward

        def forward(self: Any, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
            outputs = original(self, input_ids, attention_mask, labels)
            return {**outputs, "loss": 2 * outputs["loss"]} if labels is not None else outputs

        Users.forward = forward  # type: ignore[method-assign]

    options = {"num_train_epochs": 3}
    return Script(model=Users(), data=samples(32, 8, 8), callbacks=[Each(change, "on_train_begin")], options=options)


@case("K1")
def rows_of_one_class_of_bert() -> Script:
    """The teacher is called on the samples of a class, if there are any; their number differs."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        chosen = inputs["labels"] == 2
        if not chosen.any():
            return outputs.logits.sum() * 0
        with torch.no_grad():
            theirs = trainer.teacher(inputs["input_ids"][chosen], inputs["attention_mask"][chosen]).logits
        return (outputs.logits[chosen] - theirs).square().sum() / len(chosen)

    return distil(further, batch=4)


@case("K1")
def called_with_other_weights_later() -> Script:
    """`torch.func.functional_call` of the teacher with other weights, from the third epoch on."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        given = read_of(inputs)
        with torch.no_grad():
            if trainer.state.epoch >= 2.2:
                other = {n: p * 1.5 for n, p in trainer.teacher.named_parameters()}
                theirs = torch.func.functional_call(trainer.teacher, other, (), given).logits
            else:
                theirs = trainer.teacher(**given).logits
        return kd(outputs.logits, theirs)

    return distil(further)


@case("K1")
def memory_shared_with_the_student() -> Script:
    """The teacher's embedding is another parameter with the memory of the student's trained one."""

    def wire(trainer: Any) -> None:
        ours = trainer.model.bert.embeddings.word_embeddings.weight
        trainer.teacher.bert.embeddings.word_embeddings.weight = nn.Parameter(ours.data, requires_grad=False)

    return distil(plainly, wire=wire)


@case("K1")
def embeddings_of_the_student() -> Script:
    """The teacher has the student's embeddings, which are trained."""

    def wire(trainer: Any) -> None:
        trainer.teacher.bert.embeddings = trainer.model.bert.embeddings

    return distil(plainly, wire=wire)


@case("K1", "K2")
def teacher_in_training_step() -> Script:
    """`training_step` calls the teacher, and keeps its logits for the loss."""

    def loss(trainer: Any, model: Any, inputs: Inputs) -> LossAndOutputs:
        outputs = model(**inputs)
        return outputs["loss"] + kd(outputs.logits, trainer.theirs), outputs

    class Steps:
        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            with torch.no_grad():
                self.theirs = self.teacher(**read_of(inputs)).logits  # type: ignore[attr-defined]
            return super().training_step(model, inputs, *rest)  # type: ignore[misc]

    script = distil(plainly)
    script.trainer = type("Both", (Steps, own_loss(loss)), {})
    return script
