"""A model that is loaded lazily trains as one that is in memory, to the last bit, and nobody ever has all of it."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from file_pages import resident_bytes
from model_zoo import LABELS, MODELS
from one_job import run_each
from safetensors.torch import load_file
from selection import slow
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from training_data import Kind, PadCollator, TrainingData
from training_runs import StopAfter, losses_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    TrainerCallback,
    set_seed,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_pipetransformer import PipeTransformerTrainer, PipeTransformerTrainingArguments, load_lazily
from hf_pipetransformer.model.mapped_weights import FileMappings
from hf_pipetransformer.parts.lazy_loading.checkpoint_files import weight_files
from hf_pipetransformer.run import lazy_model

WORLD = 2
SMALL_SHARDS = "8KB"


def elsewhere(model: nn.Module) -> list[str]:
    return sorted(name for name, p in model.named_parameters() if getattr(p, "is_elsewhere", False))


def bert_without_head(folder: Path) -> None:
    MODELS["bert-classification"].build().bert.save_pretrained(folder)


def tied_gpt2(folder: Path) -> None:
    MODELS["gpt2"].build().save_pretrained(folder, max_shard_size=SMALL_SHARDS)


def tied_llama(folder: Path) -> None:
    MODELS["llama-tied"].build().save_pretrained(folder)


def bf16_llama(folder: Path) -> None:
    MODELS["llama"].build().bfloat16().save_pretrained(folder, max_shard_size=SMALL_SHARDS)


CASES: dict[str, tuple[Callable[[Path], None], Any, dict[str, Any], Kind]] = {
    "bert-new-head": (
        bert_without_head,
        AutoModelForSequenceClassification,
        {"num_labels": LABELS},
        "text-classification",
    ),
    "gpt2-tied-sharded": (tied_gpt2, AutoModelForCausalLM, {}, "causal-lm"),
    "llama-tied": (tied_llama, AutoModelForCausalLM, {}, "causal-lm"),
}


def arguments(folder: Path, **options: Any) -> PipeTransformerTrainingArguments:
    defaults: dict[str, Any] = {
        "pipeline_parallel_size": WORLD,
        "num_microbatches": 2,  # otherwise chosen by measured times
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return PipeTransformerTrainingArguments(str(folder), **{**defaults, **options})


def trainer_of(args: PipeTransformerTrainingArguments, model: nn.Module, kind: Kind) -> PipeTransformerTrainer:
    return PipeTransformerTrainer(
        model,
        args,
        train_dataset=TrainingData(kind, 64),
        eval_dataset=TrainingData(kind, 13, seed=9),
        data_collator=PadCollator(kind),
    )


def prepare(rank: int, args: PipeTransformerTrainingArguments, case: str, folder: Path, lazily: bool) -> Any:
    """The checkpoint has been written; the model of a case with the same seed."""
    _, auto_class, options, kind = CASES[case]
    set_seed(7)
    load = load_lazily if lazily else lambda cls, *a, **o: cls.from_pretrained(*a, **o)
    return trainer_of(args, load(auto_class, folder / "checkpoint", **options), kind)


def train(rank: int, world_size: int, case: str, folder: Path, lazily: bool) -> dict[str, Any]:
    args = arguments(folder / "run")
    trainer = prepare(rank, args, case, folder, lazily)
    if case == "llama-tied":  # with adapters
        import peft

        config = peft.LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM", init_lora_weights=False)
        trainer = trainer_of(args, peft.get_peft_model(trainer.model, config), "causal-lm")
    mapped = FileMappings().places_in(dict(trainer.model.named_parameters()))
    before = trainer.evaluate() if lazily else None
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model(str(folder / ("lazy" if lazily else "eager")))
    return {
        "losses": losses_of(trainer),
        "evaluated": after["eval_loss"],
        "before": before["eval_loss"] if before is not None else None,
        "mapped": len(mapped),
        "missing": elsewhere(trainer.model),
        "mapped_after": sorted(FileMappings().places_in(dict(trainer.model.named_parameters()))),
    }


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("case", ["bert-new-head", *slow("gpt2-tied-sharded", "llama-tied")])
def test_lazy_equals_eager(case: str, tmp_path: Path) -> None:
    CASES[case][0](tmp_path / "checkpoint")
    eager, lazy = run_each(train, WORLD, {"eager": (case, tmp_path, False), "lazy": (case, tmp_path, True)}).values()
    for one, other in zip(lazy, eager, strict=True):
        assert one["losses"] == other["losses"] and one["evaluated"] == other["evaluated"]
        assert one["before"] != one["evaluated"]
        assert one["mapped"] and not one["mapped_after"]
        assert one["missing"] and not other["missing"]  # it stays distributed
    assert set(lazy[0]["missing"]).isdisjoint(lazy[1]["missing"])
    assert_equal(saved_weights(tmp_path / "lazy"), saved_weights(tmp_path / "eager"))
    config = "adapter_config.json" if case == "llama-tied" else "config.json"
    assert (tmp_path / "lazy" / config).read_text() == (tmp_path / "eager" / config).read_text()


def interrupted(rank: int, world_size: int, folder: Path, stop: int, resume: bool, lazily: bool) -> list[float]:
    lazy_model.MAX_SHARD_SIZE = SMALL_SHARDS
    args = arguments(folder / "run", save_strategy="steps", save_steps=2)
    trainer = prepare(rank, args, "llama-tied", folder, lazily)
    trainer.add_callback(StopAfter(stop))
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "saved"))
    return losses_of(trainer)


@pytest.mark.slow
def test_resuming(tmp_path: Path) -> None:
    """Resume from a checkpoint in several files. Weights and optimizer state were collected in a file."""
    for name in ("lazy", "eager"):
        (tmp_path / name).mkdir()
        tied_llama(tmp_path / name / "checkpoint")
    cases = {
        "cut": (tmp_path / "lazy", 2, False, True),
        "lazy": (tmp_path / "lazy", 4, True, True),
        "eager": (tmp_path / "eager", 4, False, False),
    }
    found = run_each(interrupted, WORLD, cases)
    assert len(weight_files(tmp_path / "lazy" / "run" / "checkpoint-2")) > 1
    assert found["lazy"] == found["eager"]
    assert_equal(saved_weights(tmp_path / "lazy" / "saved"), saved_weights(tmp_path / "eager" / "saved"))
    states = [
        torch.load(tmp_path / name / "run" / "checkpoint-4" / "optimizer.pt")["state"] for name in ("lazy", "eager")
    ]
    for number, state in states[1].items():
        for key, value in state.items():
            assert torch.equal(states[0][number][key], value)


class Looks(TrainerCallback):
    """The mapped pages of the checkpoint's files in a process: after any layer's forward, and in the first step."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self.examining: list[int] = []
        self.training: list[int] = []
        self._hook = register_module_forward_hook(self._layer_has_run)

    def _layer_has_run(self, module: nn.Module, *_: Any) -> None:
        if isinstance(module, LlamaDecoderLayer):
            self.examining.append(resident_bytes(self._checkpoint))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._hook.remove()
        self.training.append(resident_bytes(self._checkpoint))


def examined(rank: int, world_size: int, folder: Path) -> tuple[list[int], list[int]]:
    model = load_lazily(AutoModelForCausalLM, folder / "checkpoint")
    looks = Looks(folder / "checkpoint")
    trainer = trainer_of(arguments(folder / "run", max_steps=1), model, "causal-lm")
    trainer.add_callback(looks)
    trainer.train()
    return looks.examining, looks.training


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages a process has written to")
def test_the_examination_before_the_first_step_takes_the_memory_of_a_layer(tmp_path: Path) -> None:
    config = MODELS["llama"].build().config
    config.hidden_size, config.intermediate_size, config.head_dim = 512, 2048, 512 // config.num_attention_heads
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "checkpoint", max_shard_size="20MB")
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    first, second = run_ranks(examined, WORLD, tmp_path)
    assert len(first[0]) > config.num_hidden_layers and 0 < max(first[0]) < layer
    assert not second[0] or max(second[0]) < layer
    assert first[1] == second[1] == [0]  # no file is mapped any more


class LogsOverAll(PipeTransformerTrainer):
    """A trainer with a collective in its loss, as losses over the samples of all processes have."""

    def compute_loss(self, model: nn.Module, inputs: Any, *positional: Any, **keywords: Any) -> Any:
        loss = super().compute_loss(model, inputs, *positional, **keywords)
        torch.distributed.all_reduce(loss.detach().clone())
        return loss


def train_unsplit(rank: int, world_size: int, folder: Path) -> int:
    args = arguments(folder / "run", pipeline_parallel_size=1, max_steps=1)
    model = load_lazily(AutoModelForCausalLM, folder / "checkpoint")
    data = TrainingData("causal-lm", 16)
    LogsOverAll(model, args, train_dataset=data, data_collator=PadCollator("causal-lm")).train()
    return args.world_size


def test_the_loss_of_one_stage_may_contain_collectives(tmp_path: Path) -> None:
    tied_llama(tmp_path / "checkpoint")
    assert run_ranks(train_unsplit, WORLD, tmp_path, timeout=30) == [WORLD] * WORLD


def misused(rank: int, world_size: int, folder: Path) -> list[str]:
    """Names of the parameters that this process does not have at the end. Wrong uses are refused before."""
    trainer = prepare(rank, arguments(folder / "run", max_steps=1), "llama-tied", folder, lazily=True)
    # changed alike on all processes: kept
    trainer.model.model.layers[0].mlp.up_proj.weight.data.zero_()
    trainer.train()
    if rank == world_size - 1:  # which has the first layers
        assert trainer.model.model.layers[0].mlp.up_proj.weight.abs().max() < 0.1
    with pytest.raises(ValueError, match="still distributed"):
        trainer.train()
    trainer.make_model_whole()
    trainer.train()
    missing = elsewhere(trainer.model)
    trainer.args.ddp_timeout = 1
    if rank == 0:
        for name, call in (
            ("save_model", trainer.save_model),
            ("evaluate", trainer.evaluate),
            ("make_model_whole", trainer.make_model_whole),
        ):
            with pytest.raises(ValueError, match=rf"rank 0 called {name}\(\) in misused, but another process"):
                call()
    else:
        time.sleep(5)
    return missing


@pytest.mark.slow
def test_a_distributed_model_is_trained_again_when_it_is_whole_and_not_used_by_one_process(tmp_path: Path) -> None:
    tied_llama(tmp_path / "checkpoint")
    assert all(run_ranks(misused, WORLD, tmp_path))


# ---------------------------------------------------------------------------------------------------------
# Refusals, on all processes
# ---------------------------------------------------------------------------------------------------------


def on_meta_device(checkpoint: Path) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))


def load_on_one(rank: int, folder: Path, load: Callable[[Path], nn.Module]) -> None:
    checkpoint = folder / "checkpoint"
    model = AutoModelForCausalLM.from_pretrained(checkpoint) if rank == 0 else load(checkpoint)
    trainer_of(arguments(folder / "run"), model, "causal-lm").train()


def pass_on(rank: int, folder: Path) -> None:
    trainer = prepare(rank, arguments(folder / "run", max_steps=1), "llama-tied", folder, lazily=True)
    trainer.train()
    trainer_of(trainer.args, trainer.model, "causal-lm").train()


def change_after_loading(rank: int, folder: Path, what: str) -> None:
    trainer = prepare(rank, arguments(folder / "run"), "llama-tied", folder, lazily=True)
    torch.distributed.barrier()
    if what == "truncated" and rank == 1:
        file = folder / "checkpoint" / "model.safetensors"
        os.truncate(file, file.stat().st_size - 2)
    if what == "changed" and rank == 1:
        trainer.model.model.layers[0].mlp.up_proj.weight.data.add_(1)
    torch.distributed.barrier()
    trainer.train()


MISTAKES: dict[str, tuple[Callable[[int, Path], Any], str]] = {
    # first, before the processes are connected
    "lazy on one": (
        lambda rank, folder: load_on_one(rank, folder, partial(load_lazily, AutoModelForCausalLM)),
        "load_lazily was called on process 1, but not on process 0",
    ),
    "on the meta device": (
        lambda rank, folder: load_on_one(rank, folder, on_meta_device),
        r"On process 1, 'model.embed_tokens.weight' .* on the meta device .* load_lazily",
    ),
    "another trainer": (pass_on, "another trainer has left the model distributed"),
    "truncated": (lambda rank, folder: change_after_loading(rank, folder, "truncated"), "is truncated"),
    "changed": (
        lambda rank, folder: change_after_loading(rank, folder, "changed"),
        "changed different weights after loading",
    ),
}


def mistaken(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    found = {}
    for name, (call, _) in MISTAKES.items():
        with pytest.raises(ValueError) as error:
            call(rank, folder / name)
        found[name] = str(error.value)
    return found


@pytest.mark.slow
def test_mistakes_are_refused_on_all_processes(tmp_path: Path) -> None:
    for name in MISTAKES:
        (tmp_path / name).mkdir()
        tied_llama(tmp_path / name / "checkpoint")
    for found in run_ranks(mistaken, WORLD, tmp_path):
        for name, (_, message) in MISTAKES.items():
            assert re.search(message, found[name]), found[name]


# ---------------------------------------------------------------------------------------------------------
# One process
# ---------------------------------------------------------------------------------------------------------


def test_new_weights_are_those_of_from_config(tmp_path: Path) -> None:
    config = MODELS["llama"].build().config
    config.hidden_size = config.intermediate_size = 256  # above the size that is kept in a file
    set_seed(3)
    eager = AutoModelForCausalLM.from_config(config)
    set_seed(3)
    lazy = load_lazily(AutoModelForCausalLM, config, offload_folder=tmp_path)
    assert_equal(dict(lazy.named_parameters()), dict(eager.named_parameters()))
    assert "model.layers.0.mlp.up_proj.weight" in FileMappings().places_in(dict(lazy.named_parameters()))
    assert torch.equal(torch.rand(1), (set_seed(3), AutoModelForCausalLM.from_config(config), torch.rand(1))[-1])


def test_what_cannot_be_loaded_lazily_is_refused(tmp_path: Path) -> None:
    bf16_llama(tmp_path / "llama")
    MODELS["mixtral"].build().save_pretrained(tmp_path / "mixtral")  # experts are stored one by one, and merged
    made = on_meta_device(tmp_path / "llama")
    with pytest.raises(ValueError, match=r"Pass load_lazily\(LlamaForCausalLM, checkpoint\)"):
        PipeTransformerTrainer(made, PipeTransformerTrainingArguments(str(tmp_path / "run"), use_cpu=True))
    for model, name, options, words in (
        (made, "llama", {}, "Pass the class, for example AutoModelForCausalLM"),
        (AutoModelForCausalLM, "llama", {"dtype": torch.float32}, r"bfloat16, but .* float32.*dtype=torch.bfloat16"),
        (AutoModelForCausalLM, "llama", {"device_map": "cpu"}, "does not support device_map"),
        (AutoModelForCausalLM, "mixtral", {}, r"MixtralForCausalLM cannot be loaded lazily .*'model.layers.0.mlp"),
    ):
        with pytest.raises(ValueError, match=words):
            load_lazily(model, tmp_path / name, **options)


def test_a_vector_may_be_in_memory(tmp_path: Path) -> None:
    """transformers pads the bias of a head that is tied to embeddings, which copies it."""
    model = MODELS["bert-masked-lm"].build()
    model.save_pretrained(tmp_path)
    loaded = load_lazily(type(model), tmp_path)
    assert_equal(dict(loaded.named_parameters()), dict(model.named_parameters()))
    assert "cls.predictions.bias" not in FileMappings().places_in(dict(loaded.named_parameters()))
