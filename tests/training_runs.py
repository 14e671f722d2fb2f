"""Training runs for tests: one process with the stock Trainer, and pipelines that must equal it.

Functions here run inside the ranks of `distributed.run_ranks`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from model_zoo import MODELS, without_dropout
from torch import nn
from training_data import ZOO_MODEL, Kind, PadCollator, StreamedData, TrainingData
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments
from hf_pipetransformer.data.numbered_batches import first_samples
from hf_pipetransformer.model.frozen_prefix import FreezableLayers
from hf_pipetransformer.model.layer_stack import LayerStack
from hf_pipetransformer.parts.prefix_cache import part as cache_part
from hf_pipetransformer.parts.prefix_cache.cache_control import AutoCache
from hf_pipetransformer.parts.records.run_log import RunLog
from hf_pipetransformer.planning.layout import Layout
from hf_pipetransformer.planning.planner import Planner
from hf_pipetransformer.run.run import PipelineRun

WORLD = 4


@dataclass(frozen=True)
class Run:
    """Model, data and options of a training; the same for the reference and for every layout.

    With this number of `samples`, the last batch is odd and, on some layouts, smaller than the number of pipelines.
    """

    kind: Kind = "text-classification"
    model: str | None = None  # a name in the zoo; None: the kind's own
    samples: int = 83
    per_device: int = 4
    accumulation: int = 2
    epochs: int = 2
    streamed: bool = False
    evaluated: int = 29  # samples
    trainer: type | None = None  # a mixin with a user's overrides
    options: dict[str, Any] = field(default_factory=dict)  # of the arguments
    keywords: dict[str, Any] = field(default_factory=dict)  # of the Trainer

    def with_options(self, **options: Any) -> Run:
        return replace(self, options={**self.options, **options})

    def build_model(self) -> nn.Module:
        """The model in float32; T5 in float64, as rounding may take an activation over the kink of its ReLU."""
        model = without_dropout(MODELS[self.model or ZOO_MODEL[self.kind]].build())
        return model.double() if self.kind == "seq2seq" else model

    def data(self, samples: int, seed: int = 0) -> Any:
        return (StreamedData if self.streamed else TrainingData)(self.kind, samples, seed)

    def common_options(self) -> dict[str, Any]:
        return {
            "num_train_epochs": self.epochs,
            "learning_rate": 3e-3,
            "weight_decay": 0.05,
            "warmup_steps": 2,
            "max_grad_norm": 1.0,
            "logging_steps": 1,
            "logging_nan_inf_filter": False,
            "per_device_eval_batch_size": 3,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "optim": "adamw_torch",
            # A key's bias shifts all scores of a softmax alike, so its gradient is only rounding. With
            # the default of 1e-8 Adam would make full steps of it, in a direction that no two runs share.
            "adam_epsilon": 1e-4,
            "seed": 42,
            **self.options,
        }


@dataclass
class Outcome:
    """The results of a run as plain values, to be sent to the test's process."""

    losses: list[float]
    gradient_norms: list[float]
    learning_rates: list[float]
    steps: int
    weights: dict[str, torch.Tensor]
    metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


def reference(rank: int, world_size: int, run: Run, folder: str = "reference") -> Outcome:
    """One process, the stock Trainer, one whole batch for each optimizer step."""
    return outcome_of(reference_trainer(run, folder))


def reference_trainer(run: Run, folder: str = "reference", model: nn.Module | None = None) -> Trainer:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=run.per_device * WORLD * run.accumulation,
        **run.common_options(),
    )
    return _trainer(Trainer, arguments, run, model)


def pipeline(
    rank: int, world_size: int, run: Run, stages: int | str, folder: str = "pipeline", **options: Any
) -> Outcome:
    """The same training on `world_size` processes in pipelines of `stages`."""
    return outcome_of(pipeline_trainer(run, stages, folder, **options))


def pipeline_trainer(
    run: Run, stages: int | str, folder: str = "pipeline", model: nn.Module | None = None, **options: Any
) -> PipeTransformerTrainer:
    arguments = PipeTransformerTrainingArguments(
        folder,
        pipeline_parallel_size=stages,
        per_device_train_batch_size=run.per_device,
        gradient_accumulation_steps=run.accumulation,
        **{**run.common_options(), **options},
    )
    return _trainer(PipeTransformerTrainer, arguments, run, model)


def outcome_of(trainer: Trainer, resume_from_checkpoint: str | None = None) -> Outcome:
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Outcome(
        losses=[entry["loss"] for entry in logged],
        gradient_norms=[float(entry["grad_norm"]) for entry in logged],
        learning_rates=[entry["learning_rate"] for entry in logged],
        steps=trainer.state.global_step,
        weights=weights_of(trainer.model),
        metrics={k: v for entry in trainer.state.log_history for k, v in entry.items() if k.startswith("eval_")},
    )


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


# ------------------------------------------------------------------------------------ looking into a training
def while_training(trainer: Trainer, owner: Any, name: str, replacement: Any) -> None:
    """Replace an attribute of a class or module while this trainer's `train()` runs."""
    train = trainer.train

    def patched(*positional: Any, **keywords: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(owner, name, replacement))
            return train(*positional, **keywords)

    trainer.train = patched  # type: ignore[method-assign]


def with_stages(trainer: Trainer, choose: Callable[[Layout, int], int]) -> None:
    """Choose K by (layout, frozen) when another layout follows, in place of the memory rule."""

    def following(self: Planner, layout: Layout, num_frozen: int, num_cached: int) -> Layout:
        return self.in_stages(choose(layout, num_frozen), num_frozen, num_cached)

    while_training(trainer, Planner, "next", following)


def nothing(run: PipelineRun) -> None:
    """An empty action."""


def at_each_step(
    trainer: Trainer,
    before: Callable[[PipelineRun], None] = nothing,
    after: Callable[[PipelineRun], None] = nothing,
) -> None:
    """Inspect the run, or change it, before and after it adapts to a decision."""
    adapt = PipelineRun.adapt

    def adapting(self: PipelineRun) -> None:
        before(self)
        adapt(self)
        after(self)

    while_training(trainer, PipelineRun, "adapt", adapting)


def when_it_ends(trainer: Trainer, look: Callable[[AutoCache | None], None]) -> None:
    """Look at the cache when the last step is done."""
    release = RunLog.release

    def releasing(self: RunLog) -> None:
        assert trainer._pipeline_run is not None  # type: ignore[attr-defined]
        look(cache_of(trainer._pipeline_run))  # type: ignore[attr-defined]
        release(self)

    while_training(trainer, RunLog, "release", releasing)


def cache_of(run: PipelineRun) -> AutoCache | None:
    """The cache of frozen layers' outputs in a run, if there is one."""
    part = run.parts.get("prefix_cache")
    return part.cache if part is not None else None


def with_cache_changed(trainer: Trainer, change: Callable[[AutoCache], None]) -> None:
    """Change the cache when it has been made."""
    make = cache_part.make_cache

    def making(*positional: Any) -> AutoCache:
        cache = make(*positional)
        change(cache)
        return cache

    while_training(trainer, cache_part, "make_cache", making)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    assert a.keys() == b.keys()
    return max((float((a[name].float() - b[name].float()).abs().max()), name) for name in a)


def assert_same_training(outcomes: list[Outcome], expected: Outcome, tolerance: float = 1e-5) -> None:
    """Every process ends with the weights, and has logged the losses, norms and rates, of the reference."""
    for outcome in outcomes:
        assert outcome.steps == expected.steps
        assert outcome.learning_rates == expected.learning_rates
        for values, wanted in (
            (outcome.losses, expected.losses),
            (outcome.gradient_norms, expected.gradient_norms),
        ):
            torch.testing.assert_close(values, wanted, rtol=0, atol=tolerance * 10)
        difference, name = largest_difference(outcome.weights, expected.weights)
        assert difference <= tolerance, f"{name} differs by {difference:.1e}"


def _trainer(cls: type[Trainer], arguments: Any, run: Run, model: nn.Module | None = None) -> Any:
    if run.trainer is not None:
        cls = type(run.trainer.__name__, (run.trainer, cls), {})
    return cls(
        model=run.build_model() if model is None else model,
        args=arguments,
        train_dataset=run.data(run.samples),
        eval_dataset=TrainingData(run.kind, run.evaluated, seed=9),
        data_collator=PadCollator(run.kind),
        **run.keywords,
    )


def with_layerdrop() -> nn.Module:
    """A Bart that skips layers at random."""
    model: Any = MODELS["bart"].build()
    for part in (model.model.encoder, model.model.decoder):
        part.layerdrop = 0.5
    model.config.encoder_layerdrop = model.config.decoder_layerdrop = 0.5
    return model


def scale_gradients(trainer: Trainer, growth_interval: int = 100) -> torch.amp.GradScaler:
    """Give a trainer on the CPU fp16's gradient scaler."""
    scaler = trainer.accelerator.scaler = torch.amp.GradScaler(
        "cpu", init_scale=1024.0, growth_interval=growth_interval
    )

    def unscale() -> None:
        optimizer = trainer.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        scaler.unscale_(optimizer)

    trainer.accelerator.unscale_gradients = unscale
    return scaler


# ------------------------------------------------------------------------------------ stopping, freezing on the way
class StopAfter(TrainerCallback):
    """Ends the training after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self.steps


class MeasureMemory(TrainerCallback):
    """Bytes of the parameters, their gradients and the optimizer's state on this process, at each step."""

    def __init__(self) -> None:
        self.held: list[dict[str, int]] = []
        self.gradients = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        here = [p for p in model.parameters() if not getattr(p, "is_elsewhere", False)]
        self.gradients = sum(p.grad.nbytes for p in here if p.grad is not None)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **_: Any) -> None:
        def size(tensors: Any) -> int:
            return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

        states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
        with torch._C.DisableTorchFunctionSubclass():  # parameters that are elsewhere cannot be read
            parameters = size(model.parameters())
        self.held.append({"parameters": parameters, "gradients": self.gradients, "optimizer": size(states)})


class FreezeAt(TrainerCallback):
    """Freezes the same parameters after the same steps in a reference training."""

    def __init__(self, table: dict[int, int], model: nn.Module, layers: FreezableLayers) -> None:
        self.table, self.model, self.layers = table, model, layers

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in self.table:
            for name in self.layers.frozen(self.table[state.global_step]):
                parameter = self.model.get_parameter(name)
                parameter.requires_grad_(False)
                parameter.grad = None

    on_train_begin = on_step_end


def freezing_reference(
    rank: int, world_size: int, run: Run, table: dict[int, int], model: nn.Module | None = None, processes: int = WORLD
) -> Outcome:
    """One process, the stock Trainer; `table` says after how many steps how many layers are frozen."""
    model = run.build_model() if model is None else model
    batch = dict(PadCollator(run.kind)(first_samples(run.data(2), 2)))
    layers = FreezableLayers.of(LayerStack.discover(model, batch), batch)
    batch_size = run.per_device * processes * run.accumulation
    options = {"use_cpu": True, "per_device_train_batch_size": batch_size, **run.common_options()}
    trainer = _trainer(Trainer, TrainingArguments("reference", **options), run, model)
    trainer.add_callback(FreezeAt(table, model, layers))
    return outcome_of(trainer)


def stages_by_frozen(trainer: PipeTransformerTrainer, table: dict[int, int]) -> None:
    """Choose K by the number of frozen layers, in place of the memory rule."""
    with_stages(trainer, lambda layout, num_frozen: table[num_frozen])
