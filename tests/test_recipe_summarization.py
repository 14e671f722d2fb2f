"""Summarisation: generated reviews, ROUGE, and the recipe from end to end with generation in two stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks

pytest.importorskip("datasets")

import run_summarization


def arguments(**options: object) -> run_summarization.DataTrainingArguments:
    return run_summarization.DataTrainingArguments(**{"generated_data": 20, **options})


def test_rouge() -> None:
    assert run_summarization.rouge(["the cat sat"], ["The cat sat"]) == {"rouge1": 100, "rouge2": 100, "rougeL": 100}
    scores = run_summarization.rouge(["a b c d", ""], ["d a b e f", "g"])
    # the first: three of four words of five; one of three pairs of four; "a b" in order
    assert scores["rouge1"] == pytest.approx(100 * (2 * 3 / 9) / 2)
    assert scores["rouge2"] == pytest.approx(100 * (2 * 1 / 7) / 2)
    assert scores["rougeL"] == pytest.approx(100 * (2 * 2 / 9) / 2)


def test_own_files_and_user_errors(tmp_path: Path) -> None:
    rows = [{"body": "a b", "title": "a"}, {"body": "", "title": "b"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own: dict[str, Any] = {"generated_data": None, "train_file": str(tmp_path / "a.jsonl")}
    splits = run_summarization.load_pairs(
        arguments(**own, text_column="body", summary_column="title"), 0, str(tmp_path)
    )
    assert splits["train"].to_list() == [{"text": "a b", "summary": "a"}]
    with pytest.raises(ValueError, match="text_column='text': no such column; the columns are body, title"):
        run_summarization.load_pairs(arguments(**own), 0, str(tmp_path))
    with pytest.raises(ValueError, match="got none"):
        run_summarization.DataTrainingArguments()
    with pytest.raises(ValueError, match="max_target_length=1"):
        arguments(max_target_length=1)


def add_generated(trainer: Any, results: dict[str, float]) -> None:
    """Add the texts that the trained model generates."""
    batch = trainer.data_collator([trainer.eval_dataset[index] for index in range(len(trainer.eval_dataset))])
    ids = {name: batch[name] for name in ("input_ids", "attention_mask")}
    tokens = trainer.model.eval().generate(**ids, max_length=trainer.args.generation_max_length, num_beams=2)
    texts = trainer.processing_class.batch_decode(tokens, skip_special_tokens=True)
    labels = batch["labels"].masked_fill(batch["labels"] == -100, trainer.processing_class.pad_token_id)
    wanted = trainer.processing_class.batch_decode(labels, skip_special_tokens=True)
    results["by the whole model"] = run_summarization.rouge(texts, wanted)["rouge1"]


def run(rank: int, world_size: int, folder: str) -> dict[str, float]:
    run_summarization.print_summary = add_generated  # type: ignore[assignment]
    return run_summarization.main(
        "--model_type t5 --config_overrides d_model=32 --generated_data 60 --vocab_size 300"
        f" --max_source_length 48 --max_target_length 12 --max_eval_samples 7 --output_dir {folder}"
        " --do_train --do_eval --per_device_train_batch_size 4 --per_device_eval_batch_size 2 --max_steps 6"
        " --learning_rate 1e-2 --predict_with_generate --generation_num_beams 2 --eval_strategy steps --eval_steps 3"
        f" --save_strategy no --report_to none --pipeline_parallel_size {world_size}".split()
    )


@pytest.mark.slow
def test_from_end_to_end(tmp_path: Path) -> None:
    results, other = run_ranks(run, 2, str(tmp_path))
    assert results["eval_samples"] == 7
    assert results["eval_rouge1"] == other["eval_rouge1"] == pytest.approx(results["by the whole model"], abs=1e-6)
    assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "tokenizer.json").is_file()
