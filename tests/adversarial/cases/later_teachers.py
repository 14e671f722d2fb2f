"""Teachers that are offloaded, write into their inputs, or cannot be read; each has a line in the log or is read."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from user_code.kit import Lines

from ..kit import VOCABULARY, WIDTH, Each, Inputs, Script, bert, case, pool, samples
from .late_teachers import distil, frozen, kd, plainly, read_of, teacher_of_four


def listening(script: Script, *words: str) -> Script:
    """Observes whether a line of the log has all words; the stock Trainer has no lines, and counts as if it did."""
    before, observed, log, handler = script.wire, script.observe, logging.getLogger("hf_pipetransformer"), Lines()

    def wire(trainer: Any) -> None:
        before(trainer)
        log.setLevel(logging.INFO)
        log.addHandler(handler)

    def observe(trainer: Any) -> dict[str, Any]:
        log.removeHandler(handler)
        is_stock = not hasattr(trainer.args, "activation_cache")
        said = is_stock or any(all(word in line for word in words) for line in handler.lines)
        return {**observed(trainer), "said": said}

    script.wire, script.observe = wire, observe
    return script


def even(number: int = 32) -> Any:
    return samples(number, 8, 8)


READ = "called by the loss: trainer.teacher, ", "samples read from the cache"
COMPUTED = "trainer.teacher is", "computed in every epoch"


def offload(trainer: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(trainer.teacher, execution_device=torch.device("cpu"))


@case("K1", "K2", "R2")
def teacher_with_offloaded_weights() -> Script:
    """The teacher's weights are loaded in each call, as `device_map="auto"` does without enough memory."""
    return distil(plainly, data=even(), wire=offload)


@case("K1")
def teacher_with_offloaded_weights_is_named() -> Script:
    """Likewise; a line says why it is computed."""
    return listening(distil(plainly, data=even(), wire=offload), *COMPUTED, "offloaded")


@case("K1", "R2")
def teacher_offloaded_in_the_third_epoch() -> Script:
    """A callback offloads the teacher's weights."""

    def act(callback: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 9:
            offload(callback.trainer)

    at = Each(act)
    return distil(plainly, data=even(), callbacks=[at], wire=lambda trainer: setattr(at, "trainer", trainer))


class Embeds(nn.Module):
    """Writes its output into the dict that it is given, and returns this, as modules of sentence-transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["tokens"] = torch.tanh(self.words(features["input_ids"]))
        features["logits"] = self.linear(pool(features["tokens"], features["attention_mask"]))
        return features


def embedding_teacher() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return frozen(Embeds())


DECLARED = {"cached_modules": ["trainer.teacher"], "activation_cache": "on"}


def extends(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
    features = read_of(inputs)
    with torch.no_grad():
        trainer.teacher(features)
    weights = features["tokens"].mean((1, 2))
    return kd(outputs.logits, features["logits"]) + (weights * outputs.logits.square().mean(1)).mean()


@case("K1", "K2", "R2")
def teacher_that_extends_its_inputs() -> Script:
    """The loss reads what the teacher has written into the dict that it was given."""
    return distil(extends, embedding_teacher, data=even(), product=DECLARED)


@case("K1")
def teacher_that_extends_its_inputs_is_read() -> Script:
    """Likewise; stored outputs are read."""
    return listening(distil(extends, embedding_teacher, data=even(), product=DECLARED), *READ)


@case("K1")
def student_that_hands_its_inputs_on() -> Script:
    """A module with trained weights returns the batch's tensors, on which the teacher is called then."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        features = model.adds(dict(read_of(inputs)))
        with torch.no_grad():
            theirs = trainer.teacher(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return kd(outputs.logits, theirs.logits) + kd(features["logits"], theirs.logits)

    def wire(trainer: Any) -> None:
        trainer.model.adds = Embeds()
        trainer.model.adds.load_state_dict(embedding_teacher().state_dict())

    return listening(distil(further, data=even(), wire=wire), *READ)


class Overwrites(Embeds):
    """Also replaces an entry of the dict."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        super().forward(features)
        features["input_ids"] = features["input_ids"].flip(1)
        return features


@case("K1")
def teacher_that_replaces_an_input() -> Script:
    """The teacher replaces an entry of the dict that it is given, which the loss reads."""

    def teacher() -> Any:
        made = frozen(Overwrites())
        made.load_state_dict(embedding_teacher().state_dict())
        return made

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        features = read_of(inputs)
        with torch.no_grad():
            theirs = trainer.teacher(features)["logits"]
        return kd(model(**read_of(features)).logits, theirs)

    return listening(distil(further, teacher, data=even(), product=DECLARED), *COMPUTED, "writes into")


@case("K1")
def teacher_on_uncertain_samples() -> Script:
    """The teacher is called on the samples in the order of the student's loss: a line says that it is computed."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        order = outputs.logits.softmax(-1).amax(-1).argsort()
        with torch.no_grad():
            theirs = trainer.teacher(**{name: value[order] for name, value in read_of(inputs).items()}).logits
        return kd(outputs.logits[order], theirs)

    return listening(distil(further), *COMPUTED, "trained parameters")


@case("K1")
def teacher_on_shuffled_samples() -> Script:
    """The teacher is called on the samples in a random order: a line says that it is computed."""

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        order = torch.randperm(len(outputs.logits))
        with torch.no_grad():
            theirs = trainer.teacher(**{name: value[order] for name, value in read_of(inputs).items()}).logits
        return kd(outputs.logits[order], theirs)

    return listening(distil(further), *COMPUTED, "random numbers")


@case("K1")
def teacher_with_gradients_that_nobody_asked_for() -> Script:
    """The teacher is not frozen, and its logits are detached: a line says how it would be read."""

    def teacher() -> Any:
        return teacher_of_four().requires_grad_(True)

    def further(trainer: Any, model: Any, outputs: Any, inputs: Inputs) -> Tensor:
        return kd(outputs.logits, trainer.teacher(**read_of(inputs)).logits.detach())

    return listening(distil(further, teacher), *COMPUTED, "requires_grad_(False)")


@case("K1")
def compiled_teacher() -> Script:
    """`torch.compile` of the teacher: a line says that it is computed."""

    def wire(trainer: Any) -> None:
        trainer.teacher = torch.compile(trainer.teacher, backend="eager")

    small = partial(frozen, bert(num_hidden_layers=1))  # compiling it takes time
    return listening(distil(plainly, small, data=even(), wire=wire), *COMPUTED, "compiled")
