"""Modules that the user has frozen run once for each sample, and the weights equal the stock Trainer's."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from frozen_runs import (
    BATCH,
    EPOCHS,
    FROZEN,
    READ,
    SAMPLES,
    SIZE,
    Build,
    Columns,
    Trained,
    cut,
    cut_left,
    head_on_bert,
    llava,
    lower_layers,
    noise,
)
from selection import few, slow
from torch import nn
from transformers import TrainerCallback, Wav2Vec2Config, Wav2Vec2ForSequenceClassification

from hf_pipetransformer.parts.front.front import FrozenFront
from hf_pipetransformer.parts.front.limits import CALLS_TO_MISS
from hf_pipetransformer.parts.front.reasons import OTHER_ARGUMENTS


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "hf_pipetransformer")
    return caplog


def rows_read(said: pytest.LogCaptureFixture) -> int:
    """How many samples' outputs were read, as the log says."""
    return sum(int(n) for n in re.findall(r"was read for (\d+) of \d+ samples", said.text))


def assert_equals_stock(folder: Path, build: Build, **options: Any) -> None:
    expected = Trained(folder / "stock", build, is_ours=False, **options)
    Trained(folder / "ours", build, **options).assert_same(expected)


@pytest.mark.parametrize("name", FROZEN)
def test_equals_the_stock_trainer(name: str, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    assert_equals_stock(tmp_path, FROZEN[name])
    assert rows_read(said) == (EPOCHS - 1) * READ
    assert "is stored in this epoch" in said.text
    assert not [path for path in (tmp_path / "ours").iterdir() if "cache" in path.name], "removed at the end"


# ------------------------------------------------------------------------------------------ padding
class ReadsPadding(nn.Module):
    """The head above the frozen part reads the padding, or does not; so do losses outside of the model."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.bert, self.head = how, head_on_bert()[0].bert, nn.Linear(SIZE, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        states = self.bert(input_ids, attention_mask=attention_mask)[0]
        if self.how in ("tokens", "labels"):
            scores = self.head(states)
            kept = torch.where(attention_mask.bool(), labels[:, None], -100) if self.how == "tokens" else labels
            return {"loss": nn.functional.cross_entropy(scores.transpose(1, 2), kept), "logits": scores}
        scores = self.head(states.amax(1))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def reads_padding(how: str) -> Build:
    columns = head_on_bert()[1]
    if how == "labels":  # of padding too
        columns["labels"] = columns["input_ids"] % 2
    return lambda: (ReadsPadding(how), columns)


class LossOutside:
    """A loss that reads the model's logits, also for padding."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs["loss"] + outputs["logits"].mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize(
    ("build", "collator", "mixin", "is_read"),
    [
        (head_on_bert, cut, object, True),
        *slow(
            (reads_padding("tokens"), cut, LossOutside, False),
            (reads_padding("largest"), cut, object, False),
            (reads_padding("labels"), cut, object, False),
            (head_on_bert, cut_left, object, False),
        ),
    ],
)
def test_padding_to_the_longest_of_a_batch(
    build: Build, collator: Any, mixin: type, is_read: bool, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    assert_equals_stock(tmp_path, build, mixin=mixin, collator=collator)
    assert (rows_read(said) == (EPOCHS - 1) * READ) is is_read


MANY, WIDTH = 96, 24


def many_lengths() -> tuple[nn.Module, Columns]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, WIDTH + 1, (MANY,), generator=generator)
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    ids = torch.randint(5, 59, (MANY, WIDTH), generator=generator) * mask
    return ReadsPadding("tokens"), {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}


@pytest.mark.slow
def test_padding_that_a_loss_reads_is_found_in_wider_batches(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third batch on, samples are computed as wide as the widest batch so far."""
    monkeypatch.setattr("frozen_runs.SAMPLES", MANY)
    options: dict[str, Any] = {"mixin": LossOutside, "collator": cut, "cached_modules": ["bert"]}
    expected = Trained(tmp_path / "stock", many_lengths, is_ours=False, mixin=LossOutside, collator=cut)
    Trained(tmp_path / "ours", many_lengths, **options).assert_same(expected)
    found = [int(share) for share in re.findall(r"(\d+)% of the samples found", said.text)]
    assert len(found) == EPOCHS - 1 and min(found) >= 90


# ------------------------------------------------------------------------------------------ callbacks, losses
class Acts(TrainerCallback):
    """Does something to the model at the beginning of an epoch, or of each step."""

    def __init__(self, act: Callable[[nn.Module], None], epoch: int = 1, each_step: bool = False) -> None:
        self._act, self._epoch, self._each_step = act, epoch, each_step

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if round(state.epoch) == self._epoch and not self._each_step:
            self._act(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._each_step:
            self._act(model)


def scale(model: nn.Module) -> None:
    """Scale the weights in a way that PyTorch does not count."""
    model.bert.encoder.layer[0].output.dense.weight.data.mul_(1.1)


def thaw(model: nn.Module) -> None:
    model.bert.encoder.layer[1].requires_grad_(True)


def freeze(model: nn.Module) -> None:
    model.bert.requires_grad_(False)


def not_frozen() -> tuple[nn.Module, Columns]:
    """The backbone's last layer is trained; the layers below it are frozen."""
    model, columns = head_on_bert()
    model.bert.encoder.layer[3].requires_grad_(True)
    return model, columns


CALLBACKS: dict[str, tuple[Build, Callable[[], TrainerCallback], int]] = {
    "weights change": (head_on_bert, lambda: Acts(scale), 0),
    "weights change in each step": (head_on_bert, lambda: Acts(scale, each_step=True), 0),
    "a layer thaws": (head_on_bert, lambda: Acts(thaw, epoch=2), READ),
    "a layer freezes": (not_frozen, lambda: Acts(freeze), READ),
}


@pytest.mark.parametrize("name", few(CALLBACKS, "weights change", "a layer freezes"))
def test_what_callbacks_do(name: str, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    build, act, read = CALLBACKS[name]
    expected = Trained(tmp_path / "stock", build, (act(),), is_ours=False)
    Trained(tmp_path / "ours", build, (act(),)).assert_same(expected)
    assert rows_read(said) == read


class CallsTwice:
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        first = model(**inputs)
        flipped = {name: inputs[name].flip(0) for name in ("input_ids", "attention_mask")}
        again = model(**{**inputs, **flipped}).logits
        return first.loss + (first.logits - again.flip(0).detach()).square().mean() + again.square().mean()


class Adapted(nn.Module):
    """A linear layer with an adapter, which is switched as PEFT's are."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = (nn.Linear(SIZE, SIZE).requires_grad_(False) for _ in range(2))
        self._disable_adapters, self._active_adapter = False, "default"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) if self._disable_adapters else self.base(x) + self.adapter(x)


class UnderAHead(nn.Module):
    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(Adapted(), nn.GELU())
        self.head = nn.Linear(SIZE, 2)
        self.body[0].adapter.requires_grad_(is_trained)

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        scores = self.head(self.body(values))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


class AgainstItself:
    """A loss that compares the model with itself without the adapter, as preference tuning does."""

    has_gradients = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        adapted, is_trained = model.body[0], model.body[0].adapter.weight.requires_grad
        adapted._disable_adapters = True
        adapted.adapter.requires_grad_(False)
        with torch.set_grad_enabled(self.has_gradients):
            reference = model(**inputs)["logits"].detach()
        adapted._disable_adapters = False
        adapted.adapter.requires_grad_(is_trained)
        return outputs["loss"] + (outputs["logits"] - reference).square().mean()


class AgainstItselfWithGradients(AgainstItself):
    has_gradients = True


@pytest.mark.parametrize(
    ("mixin", "is_trained"), [(AgainstItself, False), (AgainstItself, True), (AgainstItselfWithGradients, True)]
)
def test_a_loss_that_turns_adapters_off(
    mixin: type, is_trained: bool, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    """Outputs computed with adapters are never read without them; calls without gradients are watched apart."""
    columns = {"values": noise(SAMPLES, SIZE), "labels": torch.arange(SAMPLES) % 2}
    build: Build = lambda: (UnderAHead(is_trained), columns)  # noqa: E731
    expected = Trained(tmp_path / "stock", build, is_ours=False, mixin=mixin)
    ours = Trained(tmp_path / "ours", build, mixin=mixin, cached_modules=["body"])
    ours.assert_same(expected)
    gives_up = is_trained and mixin is AgainstItselfWithGradients
    assert (rows_read(said) > 0) is not gives_up
    assert said.text.count("parameters begin or cease to be trained") == gives_up


def test_a_loss_that_calls_the_model_twice(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    assert_equals_stock(tmp_path, head_on_bert, mixin=CallsTwice)
    assert rows_read(said) == 4 * SAMPLES - 2 * BATCH


# ------------------------------------------------------------------------------------------ models
class OnValues(nn.Module):
    """Two frozen linear layers and a head; `how` names their use."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.first, self.second = (nn.Linear(SIZE, SIZE).requires_grad_(False) for _ in range(2))
        self.part, self.head = Scales(), nn.Linear(SIZE, 2)

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        scores = self.head(self.features(values))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}

    def features(self, values: torch.Tensor) -> torch.Tensor:
        factor = 1 + self.calls // 4 / 10  # what no tensor shows
        if self.how == "writes into an output":
            hidden = self.first(values)
            hidden += 1
            return hidden + self.second(values * self.head.bias.detach()[0])  # from a trained weight
        if self.how == "looks at other samples":
            return self.first(values - values.mean(0))
        if self.how == "follows the head":  # as a teacher does, where PyTorch does not count it
            self.second.bias.data.mul_(0.9).add_(0.1 * self.head.bias.detach()[0])
            return self.second(self.first(values))
        if self.how == "inside":
            self.part.factor = factor
        return self.part(values, factor) if self.how == "argument" else self.part(values)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.linear = 1.0, nn.Linear(SIZE, SIZE).requires_grad_(False)

    def forward(self, values: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return self.linear(values * by) * self.factor


def on_values(how: str) -> Build:
    return lambda: (OnValues(how), {"values": noise(SAMPLES, SIZE), "labels": torch.arange(SAMPLES) % 2})


UNREADABLE = ("writes into an output", "looks at other samples", "follows the head")
STATEFUL = ("argument", "inside")


@pytest.mark.parametrize("how", few((*UNREADABLE, *STATEFUL), UNREADABLE[0], STATEFUL[0]))
def test_what_inputs_do_not_show(how: str, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    assert_equals_stock(tmp_path, on_values(how))
    assert how not in UNREADABLE or rows_read(said) == 0


class Counts(nn.Module):
    """A frozen part gets a number that it ignores, which is another one in each run of `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.part, self.head = Ignores(), nn.Linear(SIZE, 2)

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        scores = self.head(self.part(values, self.calls))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


class Ignores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE).requires_grad_(False)

    def forward(self, values: torch.Tensor, number: int) -> torch.Tensor:
        return self.linear(values)


def test_calls_that_never_match_end_the_cache(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was computed and compared without end."""
    compared: list[int] = []
    compare = FrozenFront._compare
    monkeypatch.setattr(FrozenFront, "_compare", lambda *args: (compared.append(1), compare(*args))[1])
    columns = {"values": noise(SAMPLES, SIZE), "labels": torch.arange(SAMPLES) % 2}
    build: Build = lambda: (Counts(), columns)  # noqa: E731
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "num_train_epochs": 8}
    expected = Trained(tmp_path / "stock", build, is_ours=False, **options)
    Trained(tmp_path / "ours", build, cached_modules=["part"], **options).assert_same(expected)
    assert said.text.count(f"The output of part is not cached: {OTHER_ARGUMENTS}.") == 1
    assert rows_read(said) == 0
    # in the fourth epoch: with the first call of each epoch, which is always compared
    assert len(compared) == CALLS_TO_MISS + 3


def with_dropout() -> tuple[nn.Module, Columns]:
    model, columns = head_on_bert()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model, columns


@pytest.mark.slow
def test_dropout_in_what_is_frozen(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    """Frozen modules with dropout run as in the stock Trainer, unless `eval_frozen_modules` turns dropout off."""
    assert_equals_stock(tmp_path, with_dropout)
    hints = [record for record in said.records if "eval_frozen_modules=True" in record.getMessage()]
    assert [record.levelname for record in hints] == ["WARNING"], "once, and as a warning"
    share, gain = map(float, re.findall(r"bert takes (\d+)% of a step: .* (\d+\.\d) times as fast", said.text)[0])
    assert gain == pytest.approx(1 / (1 - share / 100), rel=0.2)
    said.clear()
    computed = Trained(tmp_path / "off", with_dropout, eval_frozen_modules=True, activation_cache="off")
    Trained(tmp_path / "on", with_dropout, eval_frozen_modules=True).assert_same(computed)
    assert rows_read(said) == (EPOCHS - 1) * READ


# ------------------------------------------------------------------------------------------ rows
@pytest.mark.slow
def test_rows_of_those_samples_that_find_space(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    expected = Trained(tmp_path / "stock", lower_layers, is_ours=False)
    Trained(tmp_path / "ours", lower_layers, activation_cache_max_gib=4_000 / 2**30).assert_same(expected)
    assert 0 < rows_read(said) < (EPOCHS - 1) * READ and "for a part of the samples" in said.text


def mean_of_all(predicted: Any) -> dict[str, float]:
    """The mean of the predictions, also for padding."""
    first = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    return {"mean": float(first.mean())}


@pytest.mark.parametrize("build", [head_on_bert, *slow(llava)])
def test_evaluations_read_it_too(build: Build, tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    """Three evaluations of two batches of two samples and one of one; the first batch of each is compared."""
    options: dict[str, Any] = {"eval_strategy": "epoch", "per_device_eval_batch_size": 2, "metrics": mean_of_all}
    options |= {"collator": cut} if build is not llava else {}
    expected = Trained(tmp_path / "stock", build, is_ours=False, **options)
    ours = Trained(tmp_path / "ours", build, **options)
    ours.assert_same(expected)
    for name in ("eval_loss", "eval_mean"):
        seen, wanted = ([entry[name] for entry in t.history if name in entry] for t in (ours, expected))
        assert len(seen) == EPOCHS and seen == pytest.approx(wanted, abs=1e-6)
    assert sum(int(n) for n in re.findall(r"was read in evaluations for (\d+) of", said.text)) == 6
    assert rows_read(said) > 0


@pytest.mark.slow
def test_another_training_reads_what_one_has_stored(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    expected = Trained(tmp_path / "stock", head_on_bert, is_ours=False)
    for number in range(2):
        folder = tmp_path / f"ours-{number}"
        Trained(folder, head_on_bert, activation_cache_dir=str(tmp_path / "store")).assert_same(expected)
    in_first = READ - 2 * BATCH  # the first two calls find the front, and measure its gain
    assert rows_read(said) == 2 * (EPOCHS - 1) * READ + in_first
    assert "was stored by another training" in said.text


# ------------------------------------------------------------------------------------------ two processes
def llava_below_the_last() -> tuple[nn.Module, Columns]:
    """As published models are: the last layer yields only the tower's pooled output, and no module reads it."""
    model, columns = llava()
    model.config.vision_feature_layer = -2
    return model, columns


def head_on_wav2vec2(norm: str = "group") -> tuple[nn.Module, Columns]:
    rates = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    model = Wav2Vec2ForSequenceClassification(
        Wav2Vec2Config(
            hidden_size=SIZE,
            intermediate_size=SIZE,
            num_hidden_layers=3,
            num_attention_heads=2,
            conv_dim=(8, 8, 8),
            conv_stride=(5, 2, 2),
            conv_kernel=(10, 3, 3),
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            apply_spec_augment=False,
            layerdrop=0.0,
            feat_extract_norm=norm,
            **dict.fromkeys(rates, 0.0),
        )
    )
    model.freeze_base_model()
    return model, {"input_values": noise(SAMPLES, 400), "labels": torch.arange(SAMPLES) % 2}


def convolutions_with_layer_norm() -> tuple[nn.Module, Columns]:
    """wav2vec2's convolutions with an output that is not contiguous in memory."""
    model, columns = head_on_wav2vec2("layer")
    model.requires_grad_(True)
    model.freeze_feature_encoder()
    return model, columns


def test_outputs_that_are_not_contiguous(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    # the gradient of an attention's key bias is rounding alone, which Adam would make as large as others
    assert_equals_stock(tmp_path, convolutions_with_layer_norm, optim="sgd")
    assert rows_read(said) == (EPOCHS - 1) * READ


STAGED: dict[str, tuple[Build, type | Callable[[], TrainerCallback] | None, int]] = {
    "a vision tower but for its last layer": (llava_below_the_last, None, 3),
    # convolutions and transformer layers are stacks; only the second stack is read above
    "a head on wav2vec2": (head_on_wav2vec2, None, 5),
    "thawed later": (lower_layers, lambda: Acts(thaw, epoch=2), 2),
}
"""A model, a callback and the number of cached layers."""
SMOOTH = {"dataloader_drop_last": True, "optim": "sgd"}
"""As two stages round differently."""


def callbacks_of(name: str) -> tuple[TrainerCallback, ...]:
    make = STAGED[name][1]
    return () if make is None else (make(),)


def in_two_processes(rank: int, world_size: int, folder: str) -> dict[str, tuple[dict[str, torch.Tensor], list[int]]]:
    """Each of `STAGED` in two stages; replicas that compute the frozen modules, and replicas that read them."""
    options: dict[str, Any] = {"per_device_train_batch_size": BATCH // 2}
    found = {}
    for cache in ("off", "on"):
        trained = Trained(Path(folder) / cache, llava, activation_cache=cache, **options)
        found[cache] = trained.weights, []
    options |= {"pipeline_parallel_size": 2, **SMOOTH}
    for name, (build, _, _) in STAGED.items():
        trained = Trained(Path(folder) / name, build, callbacks_of(name), **options)
        found[name] = trained.weights, [e["num_cached_layers"] for e in trained.history if "num_cached_layers" in e]
    return found


@pytest.mark.slow
def test_replicas_and_stages(tmp_path: Path) -> None:
    results = run_ranks(in_two_processes, 2, str(tmp_path), timeout=240)
    expected = {
        name: Trained(tmp_path / "stock", build, callbacks_of(name), is_ours=False, **SMOOTH).weights
        for name, (build, _, _) in STAGED.items()
    }
    for found in results:
        for name, (weights, cached) in found.items():
            wanted = found["off"][0] if name == "on" else expected.get(name, {})
            for of, weight in wanted.items():
                torch.testing.assert_close(weights[of], weight, atol=2e-6, rtol=1e-5, msg=f"{name}: {of}")
            assert name not in STAGED or max(cached, default=0) == STAGED[name][2], name


def with_dropout_in_two_stages(rank: int, world_size: int, folder: str) -> list[str]:
    """The warnings about dropout."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_pipetransformer").addHandler(handler)
    Trained(Path(folder), with_dropout, pipeline_parallel_size=2, per_device_train_batch_size=2)
    return [line for line in said if "eval_frozen_modules=True" in line]


def upper_layers_with_dropout() -> tuple[nn.Module, Columns]:
    model, columns = with_dropout()
    model.bert.embeddings.requires_grad_(True)
    model.bert.encoder.layer[:2].requires_grad_(True)
    return model, columns


def test_nothing_is_promised_for_layers_above_trained_ones(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    assert_equals_stock(tmp_path, upper_layers_with_dropout)
    assert "eval_frozen_modules" not in said.text and "its inputs are computed from trained parameters" in said.text


@pytest.mark.slow
def test_dropout_in_the_lowest_layers_of_a_pipeline(tmp_path: Path) -> None:
    (line,), others = run_ranks(with_dropout_in_two_stages, 2, str(tmp_path))
    assert re.search(r"bert.encoder.layer.0-3 is frozen, .* takes [67]\d% of the FLOPs of a step", line)
    assert others == [], "the main process alone"


class SwapsInputs(nn.Module):
    """Two frozen towers get each other's inputs from some call on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.left, self.right = (
            nn.Sequential(nn.Linear(SIZE, 512), nn.GELU(), nn.Linear(512, SIZE)).requires_grad_(False)
            for _ in range(2)
        )
        self.head = nn.Linear(SIZE, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        if self.calls > 10:  # in the middle of the third epoch
            x, y = y, x
        scores = self.head(self.left(x) - self.right(y))
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def test_a_tower_that_gets_another_input_is_computed(tmp_path: Path) -> None:
    """The keys, which are made of both inputs, cannot tell it."""

    def build() -> tuple[nn.Module, Columns]:
        columns = {"x": noise(SAMPLES, SIZE), "y": noise(SAMPLES, SIZE, seed=2), "labels": torch.arange(SAMPLES) % 2}
        return SwapsInputs(), columns

    assert_equals_stock(tmp_path, build, num_train_epochs=5)
