"""The script behind docs/supported_models.md finds what it should, on a few architectures of each outcome."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, BertForSequenceClassification

from hf_pipetransformer.model.dummy_inputs import dummy_batch
from hf_pipetransformer.model.layer_stack import LayerStack

import supported_models as script
import tiny_models

SMALLEST = tiny_models.VARIANTS[0]


def candidate(name: str) -> script.Candidate:
    return next(c for c in script.candidates() if c.name == name)


# ---------------------------------------------------------------------------------------------------------
# Small configurations
# ---------------------------------------------------------------------------------------------------------


def test_sizes_that_hang_together_still_do():
    config = tiny_models.tiny_config("llava", SMALLEST).config
    text, default = config.text_config, CONFIG_MAPPING["llava"]().text_config
    assert text.hidden_size * 16 == default.hidden_size
    assert text.num_attention_heads * text.head_dim == text.hidden_size
    assert text.num_hidden_layers == config.vision_config.num_hidden_layers == tiny_models.LAYERS
    assert config.image_token_index < text.vocab_size == tiny_models.VOCABULARY
    assert config.vision_config.image_size == 2 * config.vision_config.patch_size


def test_the_first_layers_have_one_of_each_kind():
    kinds = tiny_models.tiny_config("qwen3_next", SMALLEST).config.layer_types
    assert len(kinds) == tiny_models.LAYERS
    assert set(kinds) == {"linear_attention", "full_attention"}


def test_what_is_random_is_switched_off_and_what_is_asked_for_is_noted():
    tiny = tiny_models.tiny_config("wav2vec2", SMALLEST)
    assert tiny.conditions == ["layerdrop=0.0"]
    assert tiny.config.layerdrop == tiny.config.hidden_dropout == tiny.config.mask_time_prob == 0.0


def test_every_class_is_a_candidate_once_under_its_own_type():
    found = script.candidates()
    assert len({c.name for c in found}) == len(found) > 800
    assert candidate("LlamaForCausalLM").model_type == "llama"


# ---------------------------------------------------------------------------------------------------------
# Outcomes
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stacks"),
    [("BertForSequenceClassification", 1), ("T5ForConditionalGeneration", 2), ("ViTForImageClassification", 1)],
)
def test_supported(name, stacks):
    finding = script.examine(candidate(name))
    assert (finding.result, finding.reason, finding.stacks) == ("supported", "", stacks)
    assert finding.units == stacks * tiny_models.LAYERS


@pytest.mark.parametrize("name", ["ResNetForImageClassification", "SegformerForSemanticSegmentation"])
def test_batch_normalisation_is_a_condition(name):
    finding = script.examine(candidate(name))
    assert (finding.result, finding.conditions) == ("supported", ["num_microbatches=1"])


def test_a_difference_that_float64_does_not_have_is_rounding(monkeypatch):
    differs = script._differs
    monkeypatch.setattr(
        script, "_differs", lambda a, b: differs(a, b) or ("" if _is_double(a) else "a float32 step differs")
    )
    monkeypatch.setattr(script, "_running_model", running_model_without_comparison)
    finding = script.examine(candidate("BertForSequenceClassification"))
    assert (finding.result, finding.conditions) == ("supported", ["compared in float64"] * 2)


def _is_double(step):
    return any(tensor.dtype == torch.float64 for tensor in step.values())


def running_model_without_comparison(candidate, finding):
    model = tiny_models.build(BertForSequenceClassification, tiny_models.tiny_config("bert", SMALLEST).config)
    batch = dict(dummy_batch(model))
    return model, batch, script.whole_step(model, batch)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("ReformerForMaskedLM", "autograd function"), ("RwkvForCausalLM", "its own weights")],
)
def test_refused(name, reason):
    finding = script.examine(candidate(name))
    assert finding.result == "refused" and reason in finding.reason


def test_a_model_that_cannot_be_run_is_not_tried():
    finding = script.examine(script.Candidate("ReformerForMaskedLM", "bert", "masked language modelling"))
    assert finding.result == "not tried" and finding.reason


def test_a_cut_that_gives_something_else_is_failing(monkeypatch):
    """The comparison can fail: here one weight is another one while the model is cut."""
    cut_step = script.cut_step

    def with_another_weight(stack, cut, batch, absent):
        with torch.no_grad():
            stack.model.classifier.weight[0, 0] += 0.1
        return cut_step(stack, cut, batch, absent)

    monkeypatch.setattr(script, "cut_step", with_another_weight)
    finding = script.examine(candidate("BertForSequenceClassification"))
    assert finding.result == "failing" and "output 0 differs by" in finding.reason


def test_a_gradient_that_is_missing_is_a_difference():
    model = tiny_models.build(BertForSequenceClassification, tiny_models.tiny_config("bert", SMALLEST).config)
    batch = dict(dummy_batch(model))
    whole = script.whole_step(model, batch)
    parts = script.step_when_cut(LayerStack.discover(model, batch), 2, batch)
    assert script._differs(whole, parts) == ""
    del parts["gradient of bert.embeddings.word_embeddings.weight"]
    assert "word_embeddings" in script._differs(whole, parts)


# ---------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------


def finding(name: str, result: str, reason: str = "") -> script.Finding:
    return script.Finding(name, "bert", "masked language modelling", result, reason)


def test_results_that_are_there_are_not_made_again(tmp_path, monkeypatch):
    asked: list[str] = []

    def examine(family, timeout_s, memory_gib):
        asked.extend(c.name for c in family)
        return iter([finding(c.name, "supported") for c in family])

    monkeypatch.setattr(script, "examine_in_process", examine)
    results = tmp_path / "results.jsonl"
    lines = [finding("BertForMaskedLM", "refused"), finding("BertForPreTraining", "supported")]
    results.write_text("".join(json.dumps(asdict(line)) + "\n" for line in lines))
    chosen = [c for c in script.candidates() if c.model_type == "bert"]
    script.run(chosen, results, 1.0, 1.0, retry=False)
    assert asked == [c.name for c in chosen if c.name not in ("BertForMaskedLM", "BertForPreTraining")]
    asked.clear()
    script.run(chosen, results, 1.0, 1.0, retry=True)
    assert asked == ["BertForMaskedLM"]
    assert {f.result for f in script.read_results(results).values()} == {"supported"}


def test_a_class_that_takes_too_long_does_not_stop_the_next(monkeypatch):
    def examine(candidate):
        while candidate.name == "slow":
            pass
        return finding(candidate.name, "supported")

    monkeypatch.setattr(script, "examine", examine)
    family = [script.Candidate(name, "bert", "") for name in ("first", "slow", "last")]
    found = list(script.examine_in_process(family, timeout_s=1.0, memory_gib=64))
    assert [(f.name, f.result) for f in found] == [
        ("first", "supported"),
        ("slow", "not tried"),
        ("last", "supported"),
    ]
    assert found[1].reason == "no result after 1 s"


def test_the_table_counts_and_shortens(tmp_path):
    reason = "BertForX cannot be trained as a pipeline: it <is> so. Set pipeline_parallel_size=1."
    script.write_table([finding("A", "supported"), finding("B", "refused", reason)], tmp_path / "table.md")
    page = (tmp_path / "table.md").read_text()
    assert "| masked language modelling | 1 | 1 |  |  |" in page
    assert "| **all 2** | **1** | **1** | **0** | **0** |" in page
    assert "| it \\<is\\> so. | B |" in page
    assert "| bert | A |" in page


def test_a_page_is_brought_up_to_date_by_some_results(tmp_path, monkeypatch):
    page, results = tmp_path / "table.md", tmp_path / "results.jsonl"
    before = [finding("BertForMaskedLM", "refused", "it <is> so"), finding("RobertaForMaskedLM", "supported")]
    before[1].conditions = ["layerdrop=0.0", "num_microbatches=1"]
    script.write_table(before, page)
    kept = script.read_table(page.read_text())
    assert {name: (f.result, f.reason, f.conditions) for name, f in kept.items()} == {
        "BertForMaskedLM": ("refused", "it <is> so", []),
        "RobertaForMaskedLM": ("supported", "", before[1].conditions),
    }
    results.write_text(json.dumps(asdict(finding("BertForMaskedLM", "supported"))) + "\n")
    arguments = ["BertForMaskedLM", "--results", str(results), "--table", str(page), "--table_only", "--update"]
    monkeypatch.setattr("sys.argv", ["supported_models.py", *arguments])
    script.main()
    assert {f.result for f in script.read_table(page.read_text()).values()} == {"supported"}
    assert "The results of 1 classes were kept from 20" in page.read_text()


def test_mappings_that_transformers_does_not_have_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(script.TASKS, "telepathy", "MODEL_FOR_TELEPATHY")
    assert "MODEL_FOR_TELEPATHY" in script.unknown_mappings()
    arguments = ["BertForMaskedLM", "--results", str(tmp_path / "results.jsonl"), "--table_only"]
    monkeypatch.setattr("sys.argv", ["supported_models.py", *arguments])
    script.main()
    assert "MODEL_FOR_TELEPATHY" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------
# The pages in this repository
# ---------------------------------------------------------------------------------------------------------

ROOT = Path(script.__file__).parent.parent
PAGE = ROOT / "docs" / "supported_models.md"


def test_the_readme_has_the_numbers_of_the_page(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    script.write_readme(PAGE, readme)
    assert readme.read_text() == (ROOT / "README.md").read_text()


def test_the_readme_part_has_the_totals(tmp_path):
    findings = [
        finding("M", "supported"),
        finding("N", "supported"),
        script.Finding("A", "bert", "time series", "failing", "x"),
        script.Finding("B", "bert", "text to text", "refused"),
    ]
    script.write_table(findings, tmp_path / "table.md")
    part = " ".join(script.readme_part((tmp_path / "table.md").read_text()).split())
    assert part.startswith(f"Of 4 classes in {len(script.TASKS)} of the ")
    assert "**2** give the same" in part and "1 are refused" in part and "1 fail, and 0 could not be tried" in part


def test_the_page_says_which_mappings_are_left_out():
    page = PAGE.read_text()
    if f"transformers {version('transformers')}" not in page.partition("tried by")[0]:
        pytest.skip("the page was made with another version of transformers")
    left_out = script.left_out()
    assert f"Every class in {len(script.TASKS)} of the {len(script.TASKS) + len(left_out)} mappings" in page
    assert re.findall(r"`(MODEL\w*_MAPPING)`", page.partition("## Left out")[2]) == left_out
