"""Causal language modelling: texts, blocks, the tokenizer that is made on the spot, and the recipe from end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks

pytest.importorskip("datasets")

from datasets import Dataset, DatasetDict

import run_clm


def arguments(**options: object) -> run_clm.DataTrainingArguments:
    return run_clm.DataTrainingArguments(**{"generated_data": 50, "block_size": 16, **options})


def test_own_files_and_user_errors(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one line\n\n   \nanother\n" * 20, encoding="utf-8")
    splits = run_clm.load_texts(arguments(generated_data=None, train_file=str(tmp_path / "a.txt")), 0, str(tmp_path))
    assert {name: len(split) for name, split in splits.items()} == {"train": 38, "validation": 2}
    assert set(splits["train"]["text"]) == {"one line", "another"}
    with pytest.raises(ValueError, match="got none"):
        run_clm.DataTrainingArguments()
    with pytest.raises(ValueError, match="block_size=1"):
        arguments(block_size=1)
    rows = Dataset.from_dict({"body": ["a", "", None], "n": [1, 2, 3]})
    with pytest.raises(ValueError, match="text_column='n': no such column of text; the columns are body, n"):
        run_clm.only_texts(rows, "n")
    few = DatasetDict(train=Dataset.from_dict({"text": ["a b"]}))
    tokenizer = run_clm.train_tokenizer(few["train"], 300, 16)
    with pytest.raises(ValueError, match="fewer tokens than one block of block_size=16"):
        run_clm.tokenize(few, tokenizer, arguments())


# ------------------------------------------------------------------------------------------ from end to end
def add_perplexity(trainer: Any, results: dict[str, float]) -> None:
    """Add the perplexity of the trained model, computed without padding."""
    losses: list[torch.Tensor] = []
    for row in trainer.eval_dataset:
        ids = torch.tensor(row["input_ids"])
        with torch.no_grad():
            logits = trainer.model(input_ids=ids[None]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none"))
    results["perplexity row by row"] = math.exp(torch.cat(losses).mean())


def run(rank: int, world_size: int, folder: str, *more: str) -> dict[str, float]:
    run_clm.print_summary = add_perplexity  # type: ignore[assignment]
    overrides = "num_hidden_layers=2,hidden_size=16,intermediate_size=32"
    return run_clm.main(
        f"--model_type llama --config_overrides {overrides} --generated_data 60 --vocab_size 300 --block_size 16"
        f" --max_eval_samples 32 --output_dir {folder} --do_train --do_eval --pipeline_parallel_size {world_size}"
        " --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --max_steps 3 --report_to none".split()
        + list(more)
    )


@pytest.mark.slow
def test_packed_blocks_from_end_to_end_whole_and_in_slices(tmp_path: Path) -> None:
    """Batches and blocks are all full, so the perplexity follows from the mean loss."""
    results: dict[str, dict[str, float]] = {}
    for token_slices in ("off", "3"):
        folder = tmp_path / token_slices
        more = ("--token_slices", token_slices, "--learning_rate", "1e-2")
        results[token_slices], _ = run_ranks(run, 2, str(folder), *more)
        assert (folder / "tokenizer.json").is_file() and (folder / "model.safetensors").is_file()
    whole, sliced = results["off"], results["3"]
    assert whole["eval_perplexity"] == pytest.approx(math.exp(whole["eval_loss"]), rel=1e-4)
    for name in ("train_loss", "eval_loss"):
        assert sliced[name] == pytest.approx(whole[name], abs=1e-4)
    assert cuts_of(tmp_path / "off") == []
    (cut,) = cuts_of(tmp_path / "3")
    assert cut["tokens"] == 16 and all(lengths == [6, 5, 5] for _, lengths in cut["parts"])


def cuts_of(folder: Path) -> list[dict[str, Any]]:
    """How batches were cut along their tokens, as recorded."""
    events = [json.loads(line) for line in (folder / "pipeline_events.jsonl").read_text().splitlines()]
    return [event["slices"] for event in events if event["event"] == "slices"]


@pytest.mark.slow
def test_padded_lines_with_adapters_from_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    results, _ = run_ranks(run, 2, str(tmp_path), "--line_by_line", "--lora_rank", "2")
    assert results["eval_samples"] == 32
    assert results["eval_perplexity"] == pytest.approx(results["perplexity row by row"], rel=1e-4)
    assert (tmp_path / "adapter_model.safetensors").is_file()
