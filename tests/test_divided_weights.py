"""`replica_sharding="full"`: a layer's weights are there while it runs; otherwise nobody reads a plausible number."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from distributed import run_ranks, run_ranks_expecting_error
from selection import few, slow
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import (
    WORLD,
    Outcome,
    Run,
    assert_same_training,
    outcome_of,
    pipeline_trainer,
    reference,
    reference_trainer,
)
from transformers import Trainer, TrainerCallback

from hf_pipetransformer.pipeline import elastic_pipeline
from hf_pipetransformer.pipeline.autocast_copies import AutocastCopies
from hf_pipetransformer.planning.full_sharding import divide
from hf_pipetransformer.run import planner

RUNS = {
    "checkpointing": Run().with_options(gradient_checkpointing=True),
    "mixtral": Run("causal-lm", model="mixtral"),  # experts that some replicas' samples do not reach
    "albert": Run(model="albert"),  # one module is all layers
    "biases-only": Run(),
    "batches-of-one-length": Run(accumulation=1).with_options(dataloader_num_workers=1),
}


def prepared(name: str, trainer: Trainer) -> Trainer:
    if name == "biases-only":  # most weights have no gradient, and are divided nevertheless
        for parameter in trainer.model.named_parameters():
            parameter[1].requires_grad_("bias" in parameter[0] or "classifier" in parameter[0])
    return trainer


def divided(rank: int, world_size: int, name: str, stages: int) -> Outcome:
    return outcome_of(prepared(name, pipeline_trainer(RUNS[name], stages, replica_sharding="full")))


def on_one_process(rank: int, world_size: int, name: str) -> Outcome:
    return outcome_of(prepared(name, reference_trainer(RUNS[name])))


@cache
def expected(name: str) -> Outcome:
    return run_ranks(on_one_process, 1, name)[0]


@pytest.mark.parametrize(
    ("name", "stages"), few([(name, k) for name in RUNS for k in (1, 2)], ("checkpointing", 1), ("mixtral", 1))
)
def test_equals_one_process(name: str, stages: int) -> None:
    assert_same_training(run_ranks(divided, WORLD, name, stages), expected(name))


def on_small_devices(rank: int, world_size: int) -> tuple[Outcome, str]:
    """A device has room for a part of what a process would hold with nothing divided."""
    size = sum(p.nbytes for p in Run().build_model().parameters())
    with mock.patch.object(planner, "memory_budget", lambda *_: 3 * size):
        trainer = pipeline_trainer(Run(), 1, replica_sharding="auto")
        chosen: list[str] = []

        class Look(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                chosen.append(trainer.pipeline.current_plan.replica_sharding)

        trainer.add_callback(Look())
        outcome = outcome_of(trainer)
    return outcome, chosen[-1]


def test_auto_chooses_what_fits() -> None:
    wanted = run_ranks(reference, 1, Run())[0]
    for outcome, chosen in run_ranks(on_small_devices, WORLD):
        assert chosen != "none"
        assert_same_training([outcome], wanted)


# ------------------------------------------------------------------------------------------ what is where
def layers_at_once(rank: int, world_size: int, checkpoints: bool) -> list[int]:
    """How many layers' weights are here whenever a layer has run, forward or backward, or runs again."""
    run = Run(epochs=1).with_options(gradient_checkpointing=checkpoints)
    trainer = pipeline_trainer(run, 1, replica_sharding="full")
    layers = list(trainer.model.bert.encoder.layer)
    seen: list[int] = []

    def look(*_: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # what is not here cannot be read
            here = sum(all(p.is_contiguous() for p in layer.parameters()) for layer in layers)  # a placeholder is not
            gradients = sum(any(p.grad is not None for p in layer.parameters()) for layer in layers)
        seen.append(max(here, gradients))

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            for layer in layers:
                layer.register_forward_hook(look)
                layer.register_full_backward_hook(look)

    trainer.add_callback(Watch())
    trainer.train()
    return seen


@pytest.mark.parametrize("checkpoints", [False, True])
def test_at_most_two_layers_are_here(checkpoints: bool) -> None:
    """The one that runs, and the one that comes next. There are four."""
    for seen in run_ranks(layers_at_once, 2, checkpoints):
        assert len(seen) >= 2 * 4 and max(seen) <= 2


class Evaluated(TrainerCallback):
    """Counts the weights that a callback can read between the steps."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.seen.append(sum(not getattr(p, "is_elsewhere", False) for p in model.parameters()))


def evaluates(rank: int, world_size: int, stages: int, folder: str) -> tuple[Outcome, bool]:
    run = Run().with_options(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    run = run.with_options(load_best_model_at_end=True)
    keywords = {"eval_dataset": run.data(21, 1)}
    if not stages:
        trainer: Trainer = reference_trainer(run, folder)
    else:
        trainer = pipeline_trainer(run, stages, folder, replica_sharding="full")
    trainer.eval_dataset = keywords["eval_dataset"]
    watch = Evaluated()
    trainer.add_callback(watch)
    outcome = outcome_of(trainer)
    return outcome, not any(watch.seen)


@pytest.mark.parametrize("stages", few([1, 2], 1))
def test_evaluates_saves_and_loads_the_best(stages: int, tmp_path: Path) -> None:
    [(wanted, _)] = run_ranks(evaluates, 1, 0, str(tmp_path / "one"))
    for outcome, saw_nothing in run_ranks(evaluates, WORLD, stages, str(tmp_path / "several")):
        assert_same_training([outcome], wanted)
        assert outcome.metrics["eval_loss"] == pytest.approx(wanted.metrics["eval_loss"], abs=1e-5)
        assert saw_nothing


class NoLayers(nn.Module):
    """Nothing in it is called one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings, self.head = nn.Embedding(1000, 8), nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        logits = self.head((self.embeddings(input_ids) * attention_mask[..., None]).sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def without_layers(rank: int, world_size: int, sharding: str) -> Outcome:
    return outcome_of(pipeline_trainer(Run(), 1, model=NoLayers(), replica_sharding=sharding))


@pytest.mark.slow
def test_a_model_without_layers_gathers_all_weights() -> None:
    assert_same_training(run_ranks(without_layers, WORLD, "full"), run_ranks(without_layers, WORLD, "none")[0])


# ------------------------------------------------------------------------------------------ what the planner knows
class DrawsNumbers:
    """Its loss is random; its layers are not."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        loss = super().compute_loss(model, inputs, **keywords)  # type: ignore[misc]
        return loss * (1 + 0.1 * torch.rand(()))


class CallsTwice:
    """Calls the model twice on the same batch, as R-Drop does."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        once, again = (super(CallsTwice, self).compute_loss(model, inputs, **keywords) for _ in range(2))  # type: ignore[misc]
        return once + 0.5 * again


KNOWN = {
    "bert": (Run(epochs=1), True),
    "llama-tied": (Run("causal-lm", epochs=1), True),
    "albert": (Run(model="albert", epochs=1), False),
    "draws-numbers": (Run(epochs=1, trainer=DrawsNumbers), True),
    "calls-twice": (Run(epochs=1, trainer=CallsTwice), False),
}


def planned_and_held(rank: int, world_size: int, name: str) -> tuple[list[int], list[int], bool, str]:
    """The bytes of the layers that the plan and the replicas gather by themselves; what the plan says, and the log."""
    trainer = pipeline_trainer(KNOWN[name][0], 1, replica_sharding="full", max_steps=1)
    planned: list[int] = []
    held: list[int] = []
    by_layer = False

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            nonlocal by_layer
            plan, placed, table = trainer.pipeline.current_plan, trainer.pipeline.placed, trainer.pipeline.stack.table
            by_layer = plan.gathers_by_layer
            costs = divide(plan.unit_costs, 0)
            planned.extend(part.parameter_bytes for part in costs.layers if by_layer)
            held.extend(sum(table[name].nbytes for name in layer.names) for layer in placed.divided._bundles[1:])

    trainer.add_callback(Look())
    with mock.patch.object(elastic_pipeline.logger, "log") as log:
        trainer.train()
    return planned, held, by_layer, " ".join(str(call.args[1] % call.args[2:]) for call in log.call_args_list)


@pytest.mark.parametrize("name", few(list(KNOWN), "bert", "calls-twice"))
def test_the_plan_knows_what_is_gathered(name: str) -> None:
    for planned, held, by_layer, logged in run_ranks(planned_and_held, 2, name):
        assert planned == held and bool(held) == by_layer == KNOWN[name][1]
        assert ("needs more memory than 'optimizer'" in logged) != by_layer, logged
        assert "than was planned" not in logged


def auto_with(rank: int, world_size: int, trainer: type | None) -> str:
    """What is chosen where nothing else fits than layers that are gathered one by one."""
    run = Run(epochs=1, trainer=trainer)
    size = sum(p.nbytes for p in run.build_model().parameters())
    with mock.patch.object(planner, "memory_budget", lambda *_: size // 2):
        training = pipeline_trainer(run, 1, replica_sharding="auto", max_steps=1)
        chosen: list[str] = []

        class Look(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                chosen.append(training.pipeline.current_plan.replica_sharding)

        training.add_callback(Look())
        training.train()
    return chosen[-1]


@pytest.mark.parametrize(("trainer", "sharding"), [(None, "full"), (DrawsNumbers, "full"), (CallsTwice, "optimizer")])
def test_auto_knows_it_too(trainer: type | None, sharding: str) -> None:
    assert run_ranks(auto_with, WORLD, trainer) == [sharding] * WORLD


def calling_twice(rank: int, world_size: int, stages: int) -> Outcome:
    run = Run(trainer=CallsTwice, accumulation=1)  # the stock Trainer adds up accumulated losses of this kind
    return outcome_of(pipeline_trainer(run, stages, replica_sharding="full") if stages else reference_trainer(run))


@pytest.mark.slow
def test_a_loss_that_calls_the_model_twice_equals_one_process() -> None:
    assert_same_training(run_ranks(calling_twice, WORLD, 1), run_ranks(calling_twice, 1, 0)[0])


# ------------------------------------------------------------------------------------------ autocast
class Copies(TorchDispatchMode):
    """Counts the bytes of 16-bit copies of weights that are still held."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self._shapes = shapes
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16 and result.shape in self._shapes:
            self._made.append((StorageWeakRef(result.untyped_storage()), result.nbytes))
        return result

    @property
    def held_bytes(self) -> int:
        return sum(size for storage, size in self._made if not storage.expired())


def under_bf16(
    rank: int, world_size: int, sharding: str, checkpoints: bool, lets_go: bool
) -> tuple[Outcome, list[int], list[int]]:
    """Bytes of copies whenever a layer has run, forward or backward, and of the copies of each layer."""
    run = Run().with_options(bf16=True, use_cpu=True, gradient_checkpointing=checkpoints, max_steps=3, max_grad_norm=0)
    trainer = pipeline_trainer(run, 1, replica_sharding=sharding)
    layers = list(trainer.model.bert.encoder.layer)
    matrices = [[p for p in layer.parameters() if p.dim() > 1] for layer in layers]
    copies = Copies({p.shape for of_layer in matrices for p in of_layer})
    held: list[int] = []
    step = trainer.training_step

    def training_step(*positional: Any, **keywords: Any) -> Any:
        with copies:
            return step(*positional, **keywords)

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            for layer in layers:
                layer.register_forward_hook(lambda *_: held.append(copies.held_bytes))
                layer.register_full_backward_hook(lambda *_: held.append(copies.held_bytes))

    trainer.training_step = training_step
    trainer.add_callback(Watch())
    with nullcontext() if lets_go else mock.patch.object(AutocastCopies, "enter_layer", lambda _: None):
        outcome = outcome_of(trainer)
    return outcome, held, [sum(2 * p.numel() for p in of_layer) for of_layer in matrices]


@pytest.mark.parametrize("checkpoints", [False, *slow(True)])
def test_autocast_keeps_copies_of_one_layer(checkpoints: bool) -> None:
    """Results are the same to the last bit as with the copies of all layers, which a plain training keeps."""
    everyone = run_ranks(under_bf16, 2, "full", checkpoints, True)
    [(wanted, as_before, _), *_] = run_ranks(under_bf16, 2, "full", checkpoints, False)
    [(plain, plainly, _), *_] = run_ranks(under_bf16, 2, "none", checkpoints, True)
    for outcome, held, layers in everyone:
        assert max(held) <= 2 * max(layers)
        assert max(plainly) >= sum(layers) and max(as_before) >= sum(layers)
        assert outcome.losses == wanted.losses == plain.losses
        assert all(torch.equal(outcome.weights[name], weight) for name, weight in wanted.weights.items())


# ------------------------------------------------------------------------------------------ hostile models and losses
class Experts(nn.Module):
    """A layer that sends each sample to one of four experts, by its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        normed, outputs = self.norm(hidden), torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            if bool((chosen == number).any()):
                outputs = outputs + expert(normed) * (chosen == number)[:, None, None]
        return hidden + outputs


class OfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings, self.head = nn.Embedding(1000, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden, chosen = self.embeddings(input_ids) * attention_mask[..., None], input_ids[:, 1] % 4
        for layer in self.layers:
            hidden = layer(hidden, chosen)
        logits = self.head((hidden * attention_mask[..., None]).sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def of_experts(rank: int, world_size: int, sharding: str) -> Outcome:
    run = Run(per_device=1, accumulation=1)  # in most steps a replica reaches one expert
    return outcome_of(pipeline_trainer(run, 1, model=OfExperts(), replica_sharding=sharding))


@pytest.mark.slow
def test_experts_that_some_replicas_do_not_reach() -> None:
    assert_same_training(run_ranks(of_experts, WORLD, "full"), run_ranks(of_experts, WORLD, "optimizer")[0])


def with_own_optimizer(rank: int, world_size: int, sharding: str) -> Outcome:
    trainer = pipeline_trainer(Run(), 1, replica_sharding=sharding)
    trainer.optimizer = torch.optim.SGD(trainer.model.classifier.parameters(), lr=0.1)
    return outcome_of(trainer)


@pytest.mark.slow
def test_gradients_of_what_no_optimizer_updates_are_cleared() -> None:
    wanted = run_ranks(with_own_optimizer, WORLD, "none")[0]
    assert_same_training(run_ranks(with_own_optimizer, WORLD, "full"), wanted)


class Bounded(nn.Module):
    """A layer that keeps its weights within the bounds in which they begin, whenever it trains."""

    def __init__(self, reads_former: bool) -> None:
        super().__init__()
        self.reads_former, self.dense = reads_former, nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        former = self.dense.weight.data
        if self.training:
            self.dense.weight.data = former.clamp(-0.354, 0.354)
            self.dense.bias.data.clamp_(-0.354, 0.354)
        outputs = self.dense(hidden)
        return hidden + torch.tanh(outputs + hidden @ former if self.reads_former else outputs)


class OfBounded(NoLayers):
    def __init__(self, reads_former: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Bounded(reads_former) for _ in range(3))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        hidden = self.embeddings(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head((hidden * attention_mask[..., None]).sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def of_bounded(rank: int, world_size: int, sharding: str, stages: int) -> Outcome:
    model = OfBounded(reads_former=stages == 1)  # of several micro-batches only the first would
    run = Run(epochs=4)  # in the first steps the loss is checked, with all weights in place
    return outcome_of(pipeline_trainer(run, stages, model=model, replica_sharding=sharding))


@pytest.mark.parametrize("stages", few([1, 2], 1))
def test_a_forward_may_write_to_its_weights(stages: int) -> None:
    wanted = run_ranks(of_bounded, WORLD, "none", stages)[0]
    assert_same_training(run_ranks(of_bounded, WORLD, "full", stages), wanted)


class Penalty:
    """Reads weights outside of their layers."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        loss = super().compute_loss(model, inputs, **keywords)  # type: ignore[misc]
        return loss + 1e-3 * sum(p.square().sum() for p in model.parameters())


class GradientsItself:
    """Computes gradients inside of the loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        loss = super().compute_loss(model, inputs, **keywords)  # type: ignore[misc]
        if self.state.global_step > 0:  # type: ignore[attr-defined]
            torch.autograd.grad(loss, [self.model.bert.encoder.layer[0].output.dense.bias], retain_graph=True)  # type: ignore[attr-defined]
        return loss


def with_loss(rank: int, world_size: int, of: type) -> None:
    pipeline_trainer(Run(trainer=of), 1, replica_sharding="full").train()


@pytest.mark.parametrize("of", few([Penalty, GradientsItself], Penalty))
def test_a_loss_that_reads_or_computes_beside_the_layers_is_refused(of: type) -> None:
    errors = run_ranks_expecting_error(with_loss, 2, of)
    assert any(type(error) is ValueError and "replica_sharding='optimizer'" in str(error) for error in errors), errors


# ------------------------------------------------------------------------------------------ what is refused
class Reads(TrainerCallback):
    """Uses the weights between two steps, in one of several ways."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.average: nn.Module | None = None

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        if self.how == "state_dict":
            model.state_dict()
        elif self.how == "forward":
            model.eval()
            with torch.no_grad():
                model(input_ids=torch.ones(1, 4, dtype=torch.long))
        elif self.how == "assigns":
            parameter = next(iter(model.parameters()))
            parameter.data = torch.zeros_like(parameter)
        elif self.how == "writes":
            with torch.no_grad():
                next(iter(model.parameters())).zero_()
        else:
            self.average = copy.deepcopy(model)


def reading(rank: int, world_size: int, how: str) -> None:
    trainer = pipeline_trainer(Run(), 1, replica_sharding="full")

    class OfUsersModel(Reads):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            super().on_step_end(model=trainer.pipeline if how == "forward" else trainer.model)

    trainer.add_callback(OfUsersModel(how))
    trainer.train()


@pytest.mark.parametrize(
    "how", few(["state_dict", "forward", "writes", "assigns", "averages"], "state_dict", "averages")
)
def test_what_reads_divided_weights_is_refused(how: str) -> None:
    for error in run_ranks_expecting_error(reading, 2, how):
        assert type(error) is ValueError and "replica_sharding" in str(error), error


class Scaled(NoLayers):
    """A temperature, of which CLIP and others bound the values after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        outputs = super().forward(input_ids, attention_mask, labels)
        return {**outputs, "loss": outputs["loss"] * self.scale}


class Bounds(TrainerCallback):
    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        model.scale.data.clamp_(max=0.5)


class RemovesGradients(TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        assert all(bool(p.grad.isnan().all()) for p in model.parameters() if p.numel() > 1), "nobody reads a number"
        model.embeddings.weight.grad = None


class Adversarial:
    """Moves the embeddings along their gradient before a second backward (FGM)."""

    def training_step(self, model: Any, inputs: Any, *positional: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(model, inputs, *positional)  # type: ignore[misc]
        weight = self.model.embeddings.weight  # type: ignore[attr-defined]
        weight.data.add_(weight.grad)
        return loss


def moving_weights(rank: int, world_size: int) -> None:
    pipeline_trainer(Run(trainer=Adversarial), 1, model=NoLayers(), replica_sharding="full").train()


def test_a_training_step_that_writes_to_weights_is_refused() -> None:
    for error in run_ranks_expecting_error(moving_weights, 2):
        assert type(error) is ValueError and "replica_sharding='optimizer'" in str(error), error


def writing(rank: int, world_size: int, of: type[TrainerCallback], clips: bool) -> None:
    trainer = pipeline_trainer(Run(), 1, model=Scaled(), replica_sharding="full", max_grad_norm=float(clips))
    trainer.add_callback(of())
    trainer.train()


@pytest.mark.parametrize(
    ("of", "clips"),
    few([(Bounds, True), (RemovesGradients, True), (RemovesGradients, False)], (RemovesGradients, True)),
)
def test_what_writes_to_placeholders_is_refused(of: type[TrainerCallback], clips: bool) -> None:
    for error in run_ranks_expecting_error(writing, 2, of, clips):
        assert type(error) is ValueError and "replica_sharding='optimizer'" in str(error), error
