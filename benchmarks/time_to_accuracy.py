#!/usr/bin/env python
"""Does freezing with the cache reach an accuracy sooner than plain training that is tuned for the same cost?

    OMP_NUM_THREADS=1 python benchmarks/time_to_accuracy.py --data data --output fronts.jsonl
    python benchmarks/time_to_accuracy.py --output fronts.jsonl --report

The tasks and the recipes are in `time_to_accuracy_tasks.py` and in `RECIPES`, the training is a plain PyTorch loop
over the model of `time_to_accuracy_model.py`, which asks this library's freeze policies.

**Cost** is counted, so that a busy machine does not matter: for each sample of each step, and each layer, 3 units if
the layer trains (a forward, and a backward of twice as much), 2 if it has an adapter (no gradient of its weights), 1
if it is frozen and computed, 0 if its output is read from the cache. Divided by 3 x layers x samples it is in *plain
epochs*. Embeddings, heads and the optimizer are not counted; the CPU seconds written beside the cost have them.

For each task each recipe gets the same budgets. A budget decides the number of epochs, over which the learning rate
falls linearly to 0, and each recipe and budget may choose its own rate: all rates are tried with the first seed, and
the one that is best on the validation set is run with the others. Results are JSON lines; what is in the file is not
run again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hf_pipetransformer.freezing import AlphaPolicy, FreezeDecision, FreezePolicy, NeverFreeze, SchedulePolicy
from hf_pipetransformer.freezing.policies import next_num_frozen

from time_to_accuracy_model import Encoder, Packing
from time_to_accuracy_report import report
from time_to_accuracy_tasks import TASKS, Split, Task, make_task

HEAD = 5.0
"""The head, which starts at random, has a learning rate larger by this factor."""
HEAD_EPOCHS = 10
"""Epochs of the recipe `head-first` in which the head trains alone, over the cached output of the last layer."""
MOST_EPOCHS = 60
"""Where all layers are frozen and cached at last, any number of epochs would be within a budget."""
LORA_RANK, LORA_ALPHA = 8, 16.0


@dataclass(frozen=True)
class Phase:
    """Part of a recipe: one `train()`.

    Attributes:
        epochs: over which the rate falls to 0; may be a fraction.
        policy: which layers freeze, and when.
        head: factor of the head's rate.
    """

    epochs: float
    policy: FreezePolicy
    head: float = HEAD


@dataclass(frozen=True)
class Recipe:
    """How a budget is spent.

    Attributes:
        phases: for a budget in plain epochs, the number of layers, and the number of steps in an epoch.
        uses_adapters: LoRA on all layers.
    """

    phases: Callable[[float, int, int], list[Phase]]
    uses_adapters: bool = False


def _longest(budget: float, layers: int, frozen_at: Callable[[float, float], int]) -> float:
    """The most epochs, in quarters and at most `MOST_EPOCHS`, within a budget.

    Args:
        budget: in plain epochs.
        layers: number of layers.
        frozen_at: `frozen_at(t, epochs)` are the layers that are frozen t epochs after the start. A layer that freezes
            is computed once more for each sample, in the epoch after.
    """

    def cost(epochs: float) -> float:
        total, steps = 0.0, round(20 * epochs)
        for step in range(steps):
            now, before = frozen_at(step / 20, epochs), frozen_at(step / 20 - 1, epochs) if step >= 20 else 0
            total += (3 * (layers - now) + (now - before)) / (3 * layers) / 20
        return total

    epochs = 0.25
    while epochs < MOST_EPOCHS and cost(epochs + 0.25) <= budget + 1e-9:
        epochs += 0.25
    return epochs


def _static(share: float, head: float = HEAD) -> Callable[[float, int, int], list[Phase]]:
    def phases(budget: float, layers: int, steps: int) -> list[Phase]:
        frozen = round(share * layers)
        return [Phase(_longest(budget, layers, lambda t, epochs: frozen), SchedulePolicy({0: frozen}), head)]

    return phases


def _late(budget: float, layers: int, steps: int) -> list[Phase]:
    """A third freezes after half of the training, another after three quarters, the top third never."""
    third = layers // 3

    def frozen_at(t: float, epochs: float) -> int:
        return third * ((t >= epochs / 2) + (t >= 3 * epochs / 4))

    epochs = _longest(budget, layers, frozen_at)
    total = round(epochs * steps)
    return [Phase(epochs, SchedulePolicy({total // 2: third, 3 * total // 4: 2 * third}, by="step"))]


def _alpha(budget: float, layers: int, steps: int) -> list[Phase]:
    """The library's default policy, decided at each epoch."""
    policy = AlphaPolicy(1 / 3)

    def frozen_at(t: float, epochs: float) -> int:
        return _ask(policy, layers, 0, int(t), 0)

    return [Phase(_longest(budget, layers, frozen_at), policy)]


def _head_first(budget: float, layers: int, steps: int) -> list[Phase]:
    """The head alone over the cached output of all layers (a forward of each sample); then plain training."""
    return [
        Phase(HEAD_EPOCHS, SchedulePolicy({0: layers})),
        Phase(budget - 1 / 3, NeverFreeze(), head=1.0),
    ]


def _head_first_late(budget: float, layers: int, steps: int) -> list[Phase]:
    """The head alone over the cached output of all layers, then `late`."""
    head, _ = _head_first(budget, layers, steps)
    (rest,) = _late(budget - 1 / 3, layers, steps)
    return [head, Phase(rest.epochs, rest.policy, head=1.0)]


def _head_first_half(budget: float, layers: int, steps: int) -> list[Phase]:
    """The head alone over the cached output of all layers, then half of the layers frozen over the same cache."""
    head, _ = _head_first(budget, layers, steps)
    (rest,) = _static(1 / 2)(budget - 1 / 3, layers, steps)
    return [head, Phase(rest.epochs, rest.policy, head=1.0)]


def _head_first_fast(budget: float, layers: int, steps: int) -> list[Phase]:
    """`head-first`, and the head's rate stays larger."""
    head, rest = _head_first(budget, layers, steps)
    return [head, Phase(rest.epochs, rest.policy)]


def _upper_first(budget: float, layers: int, steps: int) -> list[Phase]:
    """Half of the budget for the upper third over the cached lower layers; then plain training of all layers."""
    (upper,) = _static(2 / 3)(budget / 2, layers, steps)
    return [upper, Phase(budget / 2, NeverFreeze(), head=1.0)]


def _plain(factor: float, head: float = HEAD) -> Callable[[float, int, int], list[Phase]]:
    return lambda budget, layers, steps: [Phase(factor * budget, NeverFreeze(), head)]


RECIPES = {
    "plain": Recipe(_plain(1.0)),
    "plain-fast-head": Recipe(_plain(1.0, head=25.0)),
    "plain-faster-head": Recipe(_plain(1.0, head=100.0)),
    "lora": Recipe(_plain(1.5), uses_adapters=True),
    "half": Recipe(_static(1 / 2)),
    "half-fast-head": Recipe(_static(1 / 2, head=25.0)),
    "two-thirds": Recipe(_static(2 / 3)),
    "late": Recipe(_late),
    "alpha": Recipe(_alpha),
    "head-first": Recipe(_head_first),
    "head-first-late": Recipe(_head_first_late),
    "head-first-half": Recipe(_head_first_half),
    "head-first-fast": Recipe(_head_first_fast),
    "upper-first": Recipe(_upper_first),
}


def _ask(policy: FreezePolicy, layers: int, frozen: int, epoch: int, step: int) -> int:
    return next_num_frozen(policy, FreezeDecision(epoch, layers, frozen, epoch, step, None, layers))


class Prefix:
    """What frozen layers give for each sample, kept in memory as the library keeps it on disk.

    Args:
        model: the model.
        inputs: of the training samples.
    """

    def __init__(self, model: Encoder, inputs: list[torch.Tensor]) -> None:
        self._model, self._inputs = model, inputs
        self._kept: dict[int, tuple[int, torch.Tensor]] = {}  # input -> layers it is behind, [tokens, H]
        self.computed = 0
        """Number of (input, frozen layer) pairs that were computed."""

    @torch.no_grad()
    def outputs(self, numbers: list[int]) -> torch.Tensor:
        """The frozen layers' output `[T, H]` for these inputs; what is missing is computed and kept."""
        depth, model = self._model.num_frozen, self._model
        behind = {n: self._kept[n][0] if n in self._kept else -1 for n in numbers}
        for start in sorted({found for found in behind.values() if found < depth}):
            some = [n for n in numbers if behind[n] == start]
            packing = Packing.of([len(self._inputs[n]) for n in some])
            if start < 0:
                x = model.embed([self._inputs[n] for n in some], packing)
            else:
                x = torch.cat([self._kept[n][1] for n in some])
            x = model.run(x, packing, max(start, 0), depth)
            self._kept.update({n: (depth, part) for n, part in zip(some, x.split(packing.lengths), strict=True)})
            self.computed += len(some) * (depth - max(start, 0))
        return torch.cat([self._kept[n][1] for n in numbers])


@dataclass
class Result:
    """Cost in plain epochs, CPU seconds of the training, epochs, and the mean loss of the last tenth of the steps."""

    cost: float = 0.0
    cpu_seconds: float = 0.0
    epochs: float = 0.0
    last_loss: float = 0.0


def train(task: Task, model: Encoder, recipe: Recipe, budget: float, rate: float, seed: int) -> Result:
    """Train a model by a recipe."""
    result, layers = Result(), len(model.layers)
    steps_per_epoch = len(task.train) // task.batch
    order = random.Random(seed)
    for phase in recipe.phases(budget, layers, steps_per_epoch):
        began = time.process_time()
        if not recipe.uses_adapters:
            model.requires_grad_(True)
        model.freeze(0)
        prefix = Prefix(model, task.train.inputs)
        head = {id(p) for p in model.head.parameters()}
        body = [p for p in model.parameters() if id(p) not in head and p.requires_grad]
        parts = ((body, 1.0), ([*model.head.parameters()], phase.head))
        groups = [{"params": part, "factor": factor} for part, factor in parts if part]
        optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=0.0, fused=True)
        total = round(phase.epochs * steps_per_epoch)
        active, losses = 0, []
        for step, chosen in enumerate(_batches(task, total, order)):
            frozen = _ask(phase.policy, layers, model.num_frozen, step // steps_per_epoch, step)
            if frozen > model.num_frozen or step == 0:
                model.freeze(frozen)
            model.train()
            loss = _step_loss(task, model, prefix, chosen)
            loss.backward()
            trained = [p for p in model.parameters() if p.grad is not None]
            torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["factor"] * (1 - step / total)
            optimizer.step()
            optimizer.zero_grad()
            active += len(chosen) * (layers - frozen)
            losses.append(float(loss.detach()))
        units = (2 if recipe.uses_adapters else 3) * active + prefix.computed / task.per_sample
        result.cost += units / (3 * layers * len(task.train))
        result.cpu_seconds += time.process_time() - began
        result.epochs += total / steps_per_epoch
        last = losses[-max(len(losses) // 10, 1) :]
        result.last_loss = sum(last) / len(last)
    return result


def _batches(task: Task, total: int, order: random.Random) -> Iterator[list[int]]:
    """The samples of each step; each epoch has an order of its own, and what does not fill a batch is left out."""
    done = 0
    while done < total:
        samples = order.sample(range(len(task.train)), len(task.train))
        for at in range(0, len(samples) - task.batch + 1, task.batch):
            if done == total:
                return
            yield samples[at : at + task.batch]
            done += 1


def _step_loss(task: Task, model: Encoder, prefix: Prefix, chosen: list[int]) -> torch.Tensor:
    inputs = task.train.inputs
    numbers = [task.per_sample * k + j for k in chosen for j in range(task.per_sample)]
    if task.per_sample == 1:
        numbers.sort(key=lambda n: len(inputs[n]))
    lengths = [len(inputs[n]) for n in numbers]
    packing = Packing.of(lengths)
    frozen = model.num_frozen
    x = prefix.outputs(numbers) if frozen else model.embed([inputs[n] for n in numbers], packing)
    outputs = model.head(model.run(x, packing, frozen, len(model.layers)), packing)
    return task.loss(outputs, task.train.labels[[n // task.per_sample for n in numbers[:: task.per_sample]]])


@torch.no_grad()
def right_of(task: Task, model: Encoder, split: Split) -> torch.Tensor:
    """For each sample of a split whether the model is right."""
    model.eval()
    order = sorted(range(len(split.inputs)), key=lambda n: len(split.inputs[n]))
    found: dict[int, torch.Tensor] = {}
    for at in range(0, len(order), 64):
        some = order[at : at + 64]
        found.update(zip(some, model([split.inputs[n] for n in some]), strict=True))
    return task.right(torch.stack([found[n] for n in range(len(order))]), split.labels)


def run(task: Task, recipe_name: str, budget: float, rate: float, seed: int) -> dict[str, Any]:
    """Train and evaluate; returns what is written to the file."""
    torch.manual_seed(seed)
    model, recipe = task.build(), RECIPES[recipe_name]
    if recipe.uses_adapters:
        model.add_adapters(LORA_RANK, LORA_ALPHA)
    result = train(task, model, recipe, budget, rate, seed)
    bits = {}
    for name, split in (("validation", task.validation), ("test", task.test)):
        bits[name] = "".join("01"[int(is_right)] for is_right in right_of(task, model, split))
    return {"recipe": recipe_name, "budget": budget, "rate": rate, "seed": seed, **vars(result), **bits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a file of JSON lines, which is continued")
    parser.add_argument("--report", action="store_true", help="print the fronts in the file, and train nothing")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder with sst2/ and squad/")
    parser.add_argument("--model", type=Path, help="a folder with a BERT's weights and tokenizer")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--budgets", nargs="+", type=float, help="in plain epochs; by default each task's own")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds; the first one chooses the rates")
    options = parser.parse_args()
    done = [json.loads(line) for line in options.output.open()] if options.output.exists() else []
    if options.report:
        report(done)
        return
    torch.set_num_threads(1)
    by_key = {(d["task"], d["recipe"], d["budget"], d["rate"], d["seed"]): d for d in done}
    make = cache(lambda name, seed: make_task(name, seed, options.data, options.model))

    def result(name: str, recipe: str, budget: float, rate: float, seed: int) -> dict[str, Any]:
        key = (name, recipe, budget, rate, seed)
        if key not in by_key:
            by_key[key] = {"task": name, **run(make(name, seed), recipe, budget, rate, seed)}
            with options.output.open("a") as file:
                file.write(json.dumps(by_key[key]) + "\n")
        return by_key[key]

    for name in options.tasks:
        task = make(name, 0)
        points = [(r, float(b)) for r in options.recipes for b in options.budgets or task.budgets]
        best = {}
        for recipe, budget in points:
            if recipe.startswith("head-first") and not [*task.build().head.parameters()]:
                continue
            rates = task.lora_rates if RECIPES[recipe].uses_adapters else task.rates
            tried = {rate: result(name, recipe, budget, rate, 0) for rate in rates}
            best[recipe, budget] = max(rates, key=lambda rate: tried[rate]["validation"].count("1"))
        for seed in range(1, options.seeds):
            for (recipe, budget), rate in best.items():
                result(name, recipe, budget, rate, seed)
    report(list(by_key.values()))


if __name__ == "__main__":
    main()
