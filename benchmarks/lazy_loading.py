#!/usr/bin/env python
"""What each process has in memory when a Llama-shaped checkpoint is loaded eagerly and lazily, and how long it takes.

    python benchmarks/lazy_loading.py --gigabytes 3 --processes 4 --output results.json

1. A checkpoint with random weights is written file by file, unless the folder has it already.
2. For each way of loading, `torchrun` starts the processes anew, which train a few steps and save the model.
3. The same with a small model of four layers: losses and saved weights must be the same, to the last bit.

It is measured on each process, with what imports and process groups take, measured just before loading, subtracted.
The small model's figures are in the results as well: they show what training takes apart from weights (modules that
are imported later, buffers of the process groups).

    anonymous   the most memory of its own (RssAnon, looked at every 5 ms)
    resident    the most memory including pages of files, which processes share and the kernel can take back (VmHWM)
    own         its parameters (as many bytes as its gradients), gradients and optimizer state
    start       from the call that loads the model to the first step's end
    read        how long reading the files of the own weights takes (a copy of the tensors, right after the training)

separately until training has ended and while the model is saved.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments, load_lazily
from hf_pipetransformer.model.checkpoint_files import check_file, weight_files

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
    """A file for each layer, and one for the rest. Does nothing if the folder has a checkpoint."""
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


def memory(field: str) -> int:
    """Bytes that this process has by `/proc/self/status`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not tell {field}")


class Peak:
    """The most memory of this process since it was last asked, anonymous and resident."""

    def __init__(self) -> None:
        self._anonymous = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ends.wait(LOOK_S):
            self._anonymous = max(self._anonymous, memory("RssAnon"))

    def take(self) -> tuple[int, int]:
        found = max(self._anonymous, memory("RssAnon")), memory("VmHWM")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        self._anonymous = 0
        return found

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


class FirstStep(TrainerCallback):
    def __init__(self) -> None:
        self.ended_at = 0.0
        self.gradient_bytes = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        gradients = [p.grad for p in options["model"].parameters() if p.grad is not None]
        self.gradient_bytes = sum(gradient.nbytes for gradient in gradients)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended_at = self.ended_at or time.perf_counter()


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
    anonymous, resident = memory("RssAnon"), memory("VmRSS")
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
    pipeline = trainer.pipeline
    assert pipeline is not None and trainer.optimizer is not None
    plan = pipeline.plan
    names = [
        name
        for name in pipeline.stack.table.names
        if plan is None or name not in pipeline.missing_parameters  # None: the model is whole again
    ]
    held = sum(pipeline.stack.table[name].nbytes for name in names)
    states = [v for s in trainer.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    trainer.save_model(str(folder / "saved"))
    saving = peak.take()
    peak.end()
    result = {
        "how": how,
        "rank": args.process_index,
        "before_bytes": {"anonymous": anonymous, "resident": resident},
        "train_peak_bytes": {"anonymous": training[0] - anonymous, "resident": training[1] - resident},
        "save_peak_bytes": {"anonymous": saving[0] - anonymous, "resident": saving[1] - resident},
        "gradient_bytes": first.gradient_bytes,
        "state_bytes": sum(state.nbytes for state in states),
        "held_at_the_end_bytes": held,
        "start_s": first.ended_at - began,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    if how == LAZY:
        result["read_s"] = seconds_to_read(checkpoint, names)
    (folder / f"rank{args.process_index}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def seconds_to_read(checkpoint: Path, names: list[str]) -> float:
    began = time.perf_counter()
    for file in weight_files(checkpoint):
        if any(name in names for name in check_file(file)):
            for name, tensor in load_file(file).items():
                if name in names:
                    tensor.clone()
    return time.perf_counter() - began


# ---------------------------------------------------------------------------------------------------------
# All of them
# ---------------------------------------------------------------------------------------------------------


def run(how: str, checkpoint: Path, processes: int, optimizer: str, keep: Path) -> list[dict[str, Any]]:
    keep.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"),
        *(__file__, "--worker", how, "--checkpoint", str(checkpoint), "--folder", str(keep), "--optimizer", optimizer),
    ]
    subprocess.run(command, check=True)
    return [json.loads((keep / f"rank{rank}.json").read_text()) for rank in range(processes)]


def same_weights(one: Path, other: Path) -> bool:
    weights = [{n: t for file in weight_files(f) for n, t in load_file(file).items()} for f in (one, other)]
    return weights[0].keys() == weights[1].keys() and all(torch.equal(t, weights[1][n]) for n, t in weights[0].items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.0, help="size of the checkpoint, in 10^9 bytes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--optimizer", default="sgd", help="as TrainingArguments.optim")
    parser.add_argument("--only", choices=(EAGER, LAZY), help="one way of loading, where the other has no memory")
    parser.add_argument("--checkpoint", type=Path, help="where the checkpoint is, or is written; None: temporary")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", choices=(EAGER, LAZY), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.checkpoint, options.folder, options.optimizer)
        return
    dtype = getattr(torch, options.dtype)
    layers = layers_for(options.gigabytes * 1e9, dtype)
    results: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors")},
        "platform": platform.platform(),
        "layers": layers,
        "processes": options.processes,
        "dtype": options.dtype,
        "optimizer": options.optimizer,
    }
    ways = [options.only] if options.only else [EAGER, LAZY]
    with tempfile.TemporaryDirectory(prefix="lazy-loading-") as temporary:
        scratch = Path(temporary)
        small = scratch / "small"
        write_checkpoint(small, config_of(SMALL_SHAPE, SMALL_LAYERS, dtype))
        parity = {how: run(how, small, options.processes, options.optimizer, scratch / f"small-{how}") for how in ways}
        results["small_model"] = parity
        if len(ways) == 2:
            results["parity"] = {
                "losses": all(a["losses"] == b["losses"] for a, b in zip(*parity.values(), strict=True)),
                "weights": same_weights(*(scratch / f"small-{how}" / "saved" for how in ways)),
            }
        checkpoint = options.checkpoint or scratch / "checkpoint"
        write_checkpoint(checkpoint, config_of(SHAPE, layers, dtype))
        files = weight_files(checkpoint)
        results["checkpoint_bytes"] = sum(file.stat().st_size for file in files)
        results["largest_file_bytes"] = max(file.stat().st_size for file in files)
        for how in ways:
            with tempfile.TemporaryDirectory(prefix="run-", dir=scratch) as one:
                results[how] = run(how, checkpoint, options.processes, options.optimizer, Path(one))
    for how in ways:
        for rank in (*results["small_model"][how], *results[how]):
            own = 2 * rank["gradient_bytes"] + rank["state_bytes"]
            numbers = (*rank["train_peak_bytes"].values(), *rank["save_peak_bytes"].values(), own)
            print(how, rank["rank"], *(f"{number / MIB:8,.0f}" for number in numbers), f"{rank['start_s']:6.1f} s")
    print(results.get("parity"))
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
