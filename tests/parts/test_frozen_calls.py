"""Frozen modules that the loss calls are computed once for each sample; weights equal the stock Trainer's."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from called_runs import (
    BATCH,
    CHANGE_AT,
    EPOCHS,
    SAMPLES,
    STEPS,
    Case,
    ChangesBase,
    Closure,
    Contrasts,
    Distills,
    DistillsStates,
    Follows,
    FollowsItself,
    GoesBackFirst,
    OnDrawn,
    OnOneOfTwoInputs,
    OnOther,
    OnSampled,
    Pair,
    Prefers,
    PrefersWithoutAdapters,
    ReadsMoreLater,
    Result,
    SetsWithoutAdapters,
    captions,
    classifier,
    even_pairs,
    frozen,
    language_model,
    pairs,
    texts,
    trained,
    with_adapters,
    with_another_base,
    with_images,
)
from distributed import run_ranks
from selection import few
from torch import nn

from hf_pipetransformer.parts.driven.orders import Forward, StageCalls
from hf_pipetransformer.parts.driven.served_calls import ServedCalls
from hf_pipetransformer.parts.front.front_calls import FrontCalls
from hf_pipetransformer.parts.frozen_calls.watching import LossWatch
from hf_pipetransformer.parts.records.history import read_trainings
from hf_pipetransformer.report.words import verdict

ROUNDING = 2e-6
"""Where a sample is in a batch of another width than when it was computed."""


def causal() -> list[dict[str, object]]:
    return texts(is_causal=True)


CASES = {
    "a classifier": Case(Distills, lambda: classifier(2), lambda: frozen(classifier(4))),
    "a language model": Case(Distills, lambda: language_model(2), lambda: frozen(language_model(4)), causal),
    "hidden states": Case(DistillsStates, lambda: classifier(2), lambda: frozen(classifier(4))),
    "a reference model": Case(Prefers, lambda: language_model(2), lambda: frozen(language_model(2)), pairs),
    "without adapters": Case(PrefersWithoutAdapters, with_adapters, None, pairs),
    "weights that require gradients": Case(Distills, lambda: classifier(2), lambda: classifier(4).eval()),
}
NAMES = {
    "a language model": "trainer.teacher.model",
    "a reference model": "trainer.teacher.model",
    "without adapters": "trainer.model.base_model.model.model",
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_stock_trainer(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected = trained(tmp_path / "stock", case, is_ours=False)
    ours = trained(tmp_path / "ours", case)
    print(ours.text)
    assert ours.difference(expected) <= ROUNDING
    assert f"Frozen, and called by the loss: {NAMES.get(name, 'trainer.teacher')}. The output" in ours.text
    times = 2 if case.rows is pairs else 1
    assert times * SAMPLES // 2 <= ours.num_read <= times * (EPOCHS - 1) * (SAMPLES - BATCH)
    assert not [path for path in (tmp_path / "ours").iterdir() if "cache" in path.name], "removed at the end"
    assert "samples read from the cache." in ours.text
    assert "that the loss calls were read for 0%, " in " ".join(verdict(read_trainings(tmp_path / "ours")[-1]))


# ------------------------------------------------------------------------------------------ how it is called
def in_closure(trainer: Any) -> None:
    teacher = frozen(classifier(4))
    trainer.find_teacher = lambda: teacher


def follow(trainer: Any) -> None:
    callback = next(one for one in trainer.callback_handler.callbacks if isinstance(one, Follows))
    callback.teacher = trainer.teacher


def wrapped(trainer: Any) -> None:
    """Wrap a forward as `Accelerator.prepare_model` does under mixed precision."""
    forward = trainer.teacher.forward
    trainer.teacher.forward = MethodType(convert_outputs_to_fp32(forward.__func__), trainer.teacher)


def small(mixin: type, **options: Any) -> Case:
    return Case(mixin, lambda: classifier(2), lambda: frozen(classifier(4)), **options)


OTHERS = {
    "in a closure": (Case(Closure, lambda: classifier(2), None, prepare=in_closure), "loss.teacher"),
    "wrapped by accelerate": (small(Distills, prepare=wrapped), "trainer.teacher"),
    "a locked tower": (Case(Contrasts, Pair, None, captions, collator=with_images), "image"),
    "on one of two inputs": (small(OnOneOfTwoInputs), "trainer.teacher"),
    "in training mode": (
        Case(Distills, lambda: classifier(2), lambda: classifier(4).requires_grad_(False)),
        "trainer.teacher",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_ways_of_calling(name: str, tmp_path: Path) -> None:
    case, module = OTHERS[name]
    expected = trained(tmp_path / "stock", case, is_ours=False)
    ours = trained(tmp_path / "ours", case)
    print(ours.text)
    assert ours.difference(expected) <= ROUNDING
    assert f"Frozen, and called by the loss: {module}" in ours.text
    assert SAMPLES // 2 <= ours.num_read <= (EPOCHS - 1) * (SAMPLES - BATCH)


NEVER = {
    "inputs of each step": (small(OnOther), "none of the samples was found"),
    "masked at random": (small(OnDrawn), ""),
    "of what is trained": (small(OnSampled), ""),
    "a running average": (
        Case(Distills, lambda: classifier(2), lambda: frozen(classifier(2)), callback=Follows, prepare=follow),
        "weights or buffers have been changed",
    ),
    "dropout": (
        Case(Distills, lambda: classifier(2), lambda: classifier(4, dropout=0.1).requires_grad_(False)),
        "draws random numbers",
    ),
}


@pytest.mark.parametrize("name", NEVER)
def test_never_read(name: str, tmp_path: Path) -> None:
    case, why = NEVER[name]
    expected = trained(tmp_path / "stock", case, is_ours=False)
    ours = trained(tmp_path / "ours", case)
    print(ours.text)
    assert ours.difference(expected) == 0.0
    assert why in ours.text and not re.search(r"called by the loss: [^ ]*(encoder|classifier)", ours.text)
    assert ours.num_read == 0 or name == "dropout"  # embeddings before it are read if that is faster here and now
    assert bool(why) or "called by the loss" not in ours.text


def test_what_is_read_later_is_computed(tmp_path: Path) -> None:
    """The log says from when on the teacher is computed."""
    ours, stock = (trained(tmp_path / str(is_ours), small(ReadsMoreLater), is_ours) for is_ours in (True, False))
    assert ours.difference(stock) <= ROUNDING
    assert "The output of trainer.teacher is not cached: something reads more of it than before" in ours.text


def test_another_training_reads_in_its_first_epoch(tmp_path: Path) -> None:
    """The first step finds the calls, the second one measures their gain, the third one reads."""
    case, options = CASES["a language model"], {"activation_cache_dir": str(tmp_path / "store")}
    expected = trained(tmp_path / "stock", case, is_ours=False, num_train_epochs=2)
    trained(tmp_path / "first", case, **options)
    again = trained(tmp_path / "second", case, num_train_epochs=2, **options)
    print(again.text)
    assert again.difference(expected) <= ROUNDING
    assert "was stored by another training" in again.text and again.num_read > SAMPLES - 2 * BATCH


# ------------------------------------------------------------------------------------------ two processes
def in_two_processes(rank: int, world_size: int, folder: str, name: str, options: dict[str, Any]) -> Result:
    return trained(Path(folder) / "two", CASES[name], **options)


TWO: list[tuple[str, dict[str, Any]]] = [
    ("a classifier", {"pipeline_parallel_size": 2}),
    ("a language model", {"pipeline_parallel_size": 2}),
    ("a reference model", {"pipeline_parallel_size": 2}),
    ("a classifier", {}),
    ("without adapters", {}),
]


@pytest.mark.parametrize(("name", "options"), few(TWO, TWO[0]))
def test_two_processes(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """With two stages, the process that computes the loss reads; with two replicas, each reads its samples."""
    options = {**options, "per_device_train_batch_size": BATCH // 2}
    results = run_ranks(in_two_processes, 2, str(tmp_path), name, options, timeout=200)
    expected = trained(tmp_path / "stock", CASES[name], is_ours=False)
    for result in results:
        print(result.text)
        assert result.losses == pytest.approx(expected.losses, abs=1e-5)
        for of, weight in expected.weights.items():
            torch.testing.assert_close(result.weights[of], weight, atol=5e-6, rtol=1e-5, msg=of)
    assert max(result.num_read for result in results) > 0


# ------------------------------------------------------------------------------------------ several stages
def changed(way: str) -> Case:
    return Case(PrefersWithoutAdapters, with_adapters, None, even_pairs, callback=partial(ChangesBase, way))


SPLIT = {
    "without adapters": Case(PrefersWithoutAdapters, with_adapters, None, even_pairs),
    "padded": CASES["without adapters"],
    "a setting of the lowest layer": Case(SetsWithoutAdapters, with_adapters, None, even_pairs),
    "another base": Case(PrefersWithoutAdapters, with_another_base, None, even_pairs),
    "itself": Case(FollowsItself, partial(with_adapters, layers_to_transform=[0]), None, even_pairs),
    "a backward before": Case(GoesBackFirst, with_adapters, None, even_pairs),
    "dropout": Case(PrefersWithoutAdapters, partial(with_adapters, 0.1), None, pairs),
    **{f"weights: {way}": changed(way) for way in ("in place", "data", "loaded", "numpy", "flag")},
}


@dataclass
class Split:
    """The result of a training in stages, and the number of calls that this process has ordered in each step."""

    result: Result
    num_calls: list[int]


def in_stages(rank: int, world_size: int, folder: str, name: str, options: dict[str, Any]) -> Split:
    num_calls: list[int] = []
    run, send = ServedCalls.run, StageCalls.send

    def counting_run(served: Any, *args: Any, **kwargs: Any) -> Any:
        num_calls.append(0)
        return run(served, *args, **kwargs)

    def counting_send(served: Any, tree: Any, stage: int) -> None:
        if isinstance(served, ServedCalls) and isinstance(tree[0], Forward):
            num_calls[-1] += 1
        send(served, tree, stage)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServedCalls, "run", counting_run)
        patch.setattr(StageCalls, "send", counting_send)
        result = trained(Path(folder) / "stages", SPLIT[name], **options)
    return Split(result, num_calls)


def assert_equal_to_stock(splits: list[Split], name: str, folder: Path, batch: int = BATCH, **options: Any) -> None:
    options["per_device_train_batch_size"] = batch
    expected = trained(folder / "stock", SPLIT[name], is_ours=False, **options)
    for split in splits:
        print(split.result.text, split.num_calls)
        assert split.result.losses == pytest.approx(expected.losses, abs=1e-5)
        for of, weight in expected.weights.items():
            torch.testing.assert_close(split.result.weights[of], weight, atol=5e-6, rtol=1e-5, msg=of)


LAYOUTS = [(2, 1), pytest.param(3, 1, marks=pytest.mark.slow), (2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "replicas"), LAYOUTS)
def test_without_adapters_in_stages(stages: int, replicas: int, tmp_path: Path) -> None:
    """If all samples of a step are stored, one of the two calls is ordered."""
    rows = BATCH // (stages * replicas)
    batch = rows * stages * replicas
    steps = math.ceil(SAMPLES / batch)
    options = {"pipeline_parallel_size": stages, "per_device_train_batch_size": rows}
    splits = run_ranks(in_stages, stages * replicas, str(tmp_path), "without adapters", options, timeout=300)
    assert_equal_to_stock(splits, "without adapters", tmp_path, batch)
    last = splits[0]
    assert "Frozen, and called by the loss: trainer.model.base_model.model.model. The output" in last.result.text
    assert 2 * SAMPLES // 2 <= last.result.num_read <= 2 * (EPOCHS - 1) * (SAMPLES - batch)
    assert len(last.num_calls) == EPOCHS * steps and last.num_calls[0] == 2
    assert 1 in last.num_calls[steps:], "only the call with adapters was ordered"
    assert not [path for path in (tmp_path / "stages").iterdir() if "cache" in path.name], "removed at the end"


CHANGES = {
    "weights: in place": "weights or buffers have been changed",
    "weights: data": "weights or buffers have been changed",
    "weights: loaded": "weights or buffers have been changed",
    "weights: numpy": "weights or buffers have been changed",
    "a setting of the lowest layer": "an attribute, a hook, code",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_on_another_stage_ends_reading(name: str, tmp_path: Path) -> None:
    options = {"pipeline_parallel_size": 2, "per_device_train_batch_size": BATCH // 2}
    splits = run_ranks(in_stages, 2, str(tmp_path), name, options, timeout=200)
    assert_equal_to_stock(splits, name, tmp_path)
    text, num_calls = splits[0].result.text, splits[0].num_calls
    assert f"trainer.model.base_model.model.model is not cached: {CHANGES[name]}" in re.sub(r"its ", "", text)
    assert 1 in num_calls[2 * STEPS : CHANGE_AT], "it was read before"
    assert min(num_calls[CHANGE_AT:]) >= 2, "and is not read any more"


@pytest.mark.slow
def test_another_base_below_is_another_reference(tmp_path: Path) -> None:
    """The name of the stored outputs has a digest of the weights of all stages."""
    options = {"pipeline_parallel_size": 2, "per_device_train_batch_size": BATCH // 2, "num_train_epochs": 2}
    options |= {"activation_cache_dir": str(tmp_path / "store")}
    runs = [
        run_ranks(in_stages, 2, str(tmp_path / str(number)), name, options, timeout=200)
        for number, name in enumerate(["without adapters", "without adapters", "another base"])
    ]
    for name, splits in zip(["without adapters", "another base"], runs[1:], strict=True):
        assert_equal_to_stock(splits, name, tmp_path / name, num_train_epochs=2)
    assert "was stored by another training" in runs[1][0].result.text
    assert runs[1][0].result.num_read > runs[0][0].result.num_read, "also what the first training has stored"
    assert "was stored by another training" not in runs[2][0].result.text
    assert runs[2][0].result.num_read == runs[0][0].result.num_read


@pytest.mark.slow
def test_a_call_with_trained_adapters_is_not_read_in_stages(tmp_path: Path) -> None:
    """All adapters are on the stage below; the last stage does not see them."""
    options = {"pipeline_parallel_size": 2, "per_device_train_batch_size": BATCH // 2}
    splits = run_ranks(in_stages, 2, str(tmp_path), "itself", options, timeout=200)
    assert_equal_to_stock(splits, "itself", tmp_path)
    assert splits[0].num_calls == [2] * EPOCHS * STEPS


def test_one_stage_that_was_chosen_computes_the_calls(tmp_path: Path) -> None:
    """The loss could drive a pipeline, but the layout has none."""
    options = {"pipeline_parallel_size": "auto", "per_device_train_batch_size": BATCH // 2}
    splits = run_ranks(in_stages, 2, str(tmp_path), "without adapters", options, timeout=200)
    assert_equal_to_stock(splits, "without adapters", tmp_path)
    assert splits[0].result.num_read == 0


def failing_alone(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> Split:
    """From the second epoch on, a call that is looked up fails, after outputs were stored."""
    run = FrontCalls.run

    def failing_run(calls: FrontCalls, *args: Any, **kwargs: Any) -> Any:
        if calls.epoch >= 1:
            raise KeyError("what the last stage lacks")
        return run(calls, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrontCalls, "run", failing_run)
        return in_stages(rank, world_size, folder, "without adapters", options)


@pytest.mark.slow
def test_the_error_of_a_call_that_fails_on_the_last_stage_alone_is_named(tmp_path: Path) -> None:
    options = {"pipeline_parallel_size": 2, "per_device_train_batch_size": BATCH // 2}
    splits = run_ranks(failing_alone, 2, str(tmp_path), options, timeout=200)
    assert_equal_to_stock(splits, "without adapters", tmp_path)
    why = "the code around the layers failed on the last stage alone (KeyError: 'what the last stage lacks')."
    assert splits[0].result.text.count(why) == 1
    assert splits[0].num_calls[STEPS:] == [2] * (EPOCHS - 1) * STEPS and splits[0].result.num_read == 0


@pytest.mark.slow
def test_no_call_after_a_backward_in_the_loss_is_read(tmp_path: Path) -> None:
    """Hooks of gradients on other stages may have written into weights."""
    options = {"pipeline_parallel_size": 2, "per_device_train_batch_size": BATCH // 2}
    splits = run_ranks(in_stages, 2, str(tmp_path), "a backward before", options, timeout=200)
    assert_equal_to_stock(splits, "a backward before", tmp_path)
    assert set(splits[0].num_calls) == {3} and splits[0].result.num_read == 0


@pytest.mark.slow
def test_a_call_that_may_draw_random_numbers_is_not_read_in_stages(tmp_path: Path) -> None:
    options = {"pipeline_parallel_size": 2, "per_device_train_batch_size": BATCH // 2}
    on = run_ranks(in_stages, 2, str(tmp_path / "on"), "dropout", options, timeout=200)
    off = run_ranks(in_stages, 2, str(tmp_path / "off"), "dropout", options | {"activation_cache": "off"}, timeout=200)
    print(on[0].result.text)
    assert on[0].result.difference(off[0].result) == 0.0
    assert on[0].num_calls == off[0].num_calls == [2] * EPOCHS * STEPS


# ------------------------------------------------------------------------------------------ names and code
class Own(nn.Module):
    """A teacher with code of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier(2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask)


@pytest.mark.parametrize("declared", [None, ["trainer.teacher"]])
def test_code_of_ones_own_is_declared(declared: list[str] | None, tmp_path: Path) -> None:
    """In a module that is not declared, the modules of known libraries are read."""
    case = Case(Distills, lambda: classifier(2), lambda: frozen(Own()))
    expected = trained(tmp_path / "stock", case, is_ours=False)
    ours = trained(tmp_path / "ours", case, cached_modules=declared)
    assert ours.difference(expected) <= ROUNDING
    name = "trainer.teacher" if declared else "trainer.teacher.inner"
    assert f"Frozen, and called by the loss: {name}. The output" in ours.text and ours.num_read > 0


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'trainer\.teecher', but there is no module .* such as 'trainer\.teacher'"):
        trained(tmp_path, CASES["a classifier"], cached_modules=["trainer.teecher"])


class Held:
    """An object of the user's that is no module."""

    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher


def hold(trainer: Any) -> None:
    """The teacher is found by no name: the trainer has a method that returns it."""
    holder, trainer.teacher = Held(trainer.teacher), None
    trainer.find_teacher = lambda: holder.teacher


def test_a_teacher_that_no_name_leads_to(tmp_path: Path) -> None:
    case = Case(Closure, lambda: classifier(2), lambda: frozen(classifier(4)), prepare=hold)
    expected = trained(tmp_path / "stock", case, is_ours=False)
    ours = trained(tmp_path / "ours", case)
    assert ours.difference(expected) <= ROUNDING
    assert ours.num_read >= SAMPLES // 2


class Alone:
    """A loss of the user's that calls the trained model only."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (2 * outputs.loss, outputs) if return_outputs else 2 * outputs.loss


@pytest.mark.parametrize("has_teacher", [False, True])
def test_no_step_is_watched_if_nothing_is_frozen(
    has_teacher: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = []
    enter = LossWatch.__enter__
    monkeypatch.setattr(LossWatch, "__enter__", lambda watch: (watched.append(watch), enter(watch))[1])
    case = Case(Alone, lambda: classifier(2), None)
    if has_teacher:
        case = Case(Distills, lambda: classifier(2), lambda: frozen(classifier(4)))
    trained(tmp_path, case)
    assert bool(watched) is has_teacher
