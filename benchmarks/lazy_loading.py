#!/usr/bin/env python
"""What each process has in memory when a Llama-shaped checkpoint is loaded eagerly and lazily, and how long it takes.

    python benchmarks/lazy_loading.py --gigabytes 3 --processes 4 --out results.json

1. A checkpoint with random weights is written file by file, unless the folder has it already.
2. For each way of loading, `torchrun` starts the processes anew, which train a few steps and save the model.
3. The same with a small model of four layers: losses and saved weights must be the same, to the last bit.

It is measured on each process, in MiB, with what imports and process groups take, measured just before loading,
subtracted. The table has the process with most of it, the file all of them:

    own            its parameters (as many bytes as its gradients), gradients and optimizer state
    train, save    the most memory of its own (RssAnon, looked at every 5 ms) until training has ended, while saving
    files          the most pages of files (RssFile, every 5 ms), which processes share and the kernel can take back
    resident       the most of both together (VmHWM)
    over_target    the most memory of its own while training, less 1.2 times "own" and the checkpoint's largest file
    start_s        from the call that loads the model to the first step's end
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments, load_lazily
from hf_pipetransformer.parts.lazy_loading.checkpoint_files import weight_files

import harness
from harness import Figures, Ratio

EAGER, LAZY = "eager", "lazy"
LOOK_S = 0.005
SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "vocab_size": 32_000}
SMALL_SHAPE = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "vocab_size": 1_000}
SMALL_LAYERS = 4
TOKENS = 32
STEPS = 2
MIB = 2**20


# ---------------------------------------------------------------------------------------------------------
# The checkpoint
# ---------------------------------------------------------------------------------------------------------


def config_of(shape: dict[str, int], layers: int, dtype: torch.dtype) -> LlamaConfig:
    heads = shape["num_attention_heads"]
    return LlamaConfig(**shape, num_key_value_heads=heads, num_hidden_layers=layers, dtype=dtype)


def tensors_of(config: LlamaConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}


def layers_for(size: float, dtype: torch.dtype) -> int:
    """Number of layers of a model of about `size` bytes."""
    one, two = (sum(s.numel() for s in tensors_of(config_of(SHAPE, n, dtype)).values()) for n in (1, 2))
    return max(4, round((size / dtype.itemsize - one) / (two - one)) + 1)


def write_checkpoint(folder: Path, config: LlamaConfig) -> None:
    """Write a file for each layer, and one for the rest, unless the folder has a checkpoint."""
    if (folder / "model.safetensors.index.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    groups: dict[str, dict[str, torch.Size]] = {}
    for name, shape in tensors_of(config).items():
        parts = name.split(".")
        groups.setdefault(parts[2] if parts[1] == "layers" else "rest", {})[name] = shape
    file_of: dict[str, str] = {}
    for number, shapes in enumerate(groups.values(), start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors = {}
        for name, shape in shapes.items():
            spread = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
            tensors[name] = spread.to(config.dtype)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(shapes, file))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


class RandomTokens(Dataset):
    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(self._vocabulary, (TOKENS,), generator=generator).tolist()
        return {"input_ids": tokens, "labels": tokens}


# ---------------------------------------------------------------------------------------------------------
# One process
# ---------------------------------------------------------------------------------------------------------


OWN, FILES, RESIDENT, PEAK = "RssAnon", "RssFile", "VmRSS", "VmHWM"


def memory() -> dict[str, int]:
    """Bytes that this process has by `/proc/self/status`: of its own, of files, both, and the most of both so far."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {words[0].removesuffix(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}
    return {field: sizes[field] for field in (OWN, FILES, RESIDENT, PEAK)}


class Peak:
    """The most memory of this process since it was last asked, of its own, of files, and both together."""

    def __init__(self) -> None:
        self._most = memory()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ends.wait(LOOK_S):
            self._most = {field: max(size, self._most[field]) for field, size in memory().items()}

    def take(self) -> tuple[int, int, int]:
        now, before = memory(), self._most
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._most = memory()
        return max(now[OWN], before[OWN]), max(now[FILES], before[FILES]), now[PEAK]

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


class FirstStep(TrainerCallback):
    def __init__(self) -> None:
        self.ended_at = 0.0
        self.gradient_bytes = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        held = [p for p in options["model"].parameters() if not getattr(p, "is_elsewhere", False)]
        gradients = [p.grad for p in held if p.grad is not None]
        self.gradient_bytes = sum(gradient.nbytes for gradient in gradients)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended_at = self.ended_at or time.perf_counter()


def above(what: str, most: tuple[int, int, int], at_rest: tuple[int, int, int]) -> Figures:
    """The most memory while something was done, above what there was before loading, in MiB."""
    names = (what, f"{what}_files", f"{what}_resident")
    return {name: (size - before) / MIB for name, size, before in zip(names, most, at_rest, strict=True)}


def work(how: str, checkpoint: Path, folder: Path, optimizer: str) -> None:
    args = PipeTransformerTrainingArguments(
        str(folder / "run"),
        pipeline_parallel_size=int(dist.get_world_size()) if dist.is_initialized() else "auto",
        num_microbatches=4,
        per_device_train_batch_size=1,
        max_steps=STEPS,
        learning_rate=1e-3,
        optim=optimizer,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    args.pipeline_parallel_size = args.world_size
    set_seed(0)
    peak, first = Peak(), FirstStep()
    peak.take()
    before = memory()
    at_rest = before[OWN], before[FILES], before[RESIDENT]
    began = time.perf_counter()
    if how == LAZY:
        model = load_lazily(AutoModelForCausalLM, checkpoint)
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
    trainer = PipeTransformerTrainer(
        model, args, train_dataset=RandomTokens(model.config.vocab_size), callbacks=[first]
    )
    trainer.train()
    training = peak.take()
    assert trainer.optimizer is not None
    states = [v for s in trainer.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    trainer.save_model(str(folder / "saved"))
    saving = peak.take()
    peak.end()
    result = {
        "own": (2 * first.gradient_bytes + sum(state.nbytes for state in states)) / MIB,
        **above("train", training, at_rest),
        **above("save", saving, at_rest),
        "start_s": first.ended_at - began,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    (folder / f"rank{args.process_index}.json").write_text(json.dumps(result))
    harness.finish()


# ---------------------------------------------------------------------------------------------------------
# All of them
# ---------------------------------------------------------------------------------------------------------
def run(how: str, checkpoint: Path, options: argparse.Namespace, keep: Path) -> list[dict[str, Any]]:
    """Train in processes of their own; what each of them has measured."""
    keep.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"),
        *(__file__, "--worker", how, "--checkpoint", str(checkpoint), "--folder", str(keep)),
        *("--optimizer", options.optimizer),
    ]
    subprocess.run(command, check=True)
    return [json.loads((keep / f"rank{rank}.json").read_text()) for rank in range(options.processes)]


def case(how: str, checkpoint: Path, options: argparse.Namespace, every_rank: dict[str, Any]) -> Figures:
    """For each figure, the largest one of all processes. The figures of all are added to `every_rank`."""
    largest_file = max(file.stat().st_size for file in weight_files(checkpoint)) / MIB
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        ranks = every_rank[how] = run(how, checkpoint, options, Path(folder))
    figures = {name: max(rank[name] for rank in ranks) for name in ranks[0] if name != "losses"}
    over = max(rank["train"] - 1.2 * rank["own"] - largest_file for rank in ranks)
    return {**figures, "over_target": over}


def is_same_training(options: argparse.Namespace, scratch: Path) -> dict[str, bool]:
    """Whether losses and saved weights of a small model are the same in both ways, to the last bit."""
    small = scratch / "small"
    write_checkpoint(small, config_of(SMALL_SHAPE, SMALL_LAYERS, getattr(torch, options.dtype)))
    losses, weights = [], []
    for how in (EAGER, LAZY):
        ranks = run(how, small, options, scratch / how)
        losses.append([rank["losses"] for rank in ranks])
        weights.append({n: t for file in weight_files(scratch / how / "saved") for n, t in load_file(file).items()})
    same = weights[0].keys() == weights[1].keys()
    return {
        "losses": losses[0] == losses[1],
        "weights": same and all(torch.equal(t, weights[1][n]) for n, t in weights[0].items()),
    }


def main() -> None:
    """Measure both ways and print the table; or be one of the processes."""
    parser = harness.parser_of(__doc__, turns=1)
    parser.add_argument("--gigabytes", type=float, default=3.0, help="size of the checkpoint, in 10^9 bytes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--optimizer", default="sgd", help="as TrainingArguments.optim")
    parser.add_argument("--only", choices=(EAGER, LAZY), help="one way of loading, where the other has no memory")
    parser.add_argument("--checkpoint", type=Path, help="where the checkpoint is, or is written; None: temporary")
    parser.add_argument("--worker", choices=(EAGER, LAZY), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.worker, given.checkpoint, given.folder, given.optimizer)
        return
    processes, given.processes = given.processes, 1  # this process starts them itself, for each way anew
    options = harness.start(parser, given)
    options.processes, dtype = processes, getattr(torch, given.dtype)
    every_rank: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="lazy-loading-") as temporary:
        scratch = Path(temporary)
        parity = None if options.only else is_same_training(options, scratch)
        print("the same to the last bit:", parity)
        checkpoint = options.checkpoint or scratch / "checkpoint"
        layers = layers_for(options.gigabytes * 1e9, dtype)
        write_checkpoint(checkpoint, config_of(SHAPE, layers, dtype))
        ways = [options.only] if options.only else [EAGER, LAZY]
        cases = {how: partial(case, how, checkpoint, options, every_rank) for how in ways}
        turns = harness.take_turns(cases, options)
    ratios = [Ratio("memory to eager", "train", EAGER), Ratio("start to eager", "start_s", EAGER)]
    harness.report(options, turns, ratios, layers=layers, parity=parity, every_rank=every_rank)


if __name__ == "__main__":
    main()
