"""The documentation names what exists: messages, functions, links, tables that follow from formulas."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from functools import cache
from pathlib import Path

import pytest

import hf_pipetransformer

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "hf_pipetransformer"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "recipes").glob("*.md")])


def text_of(name: str) -> str:
    return (DOCS / name).read_text()


def without_code(page: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE)


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site's generator make it."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words))


@cache
def anchors(page: Path) -> frozenset[str]:
    return frozenset(anchor(h) for h in re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        path, _, fragment = target.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (fragment and file.suffix == ".md" and fragment not in anchors(file)):
            broken.append(target)
    assert not broken


PATHS = {
    path.stem: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.stem != "__init__"
}
"""Of each module the name to import it by."""


def names_in(page: str) -> list[str]:
    modules = "|".join(PATHS)
    return re.findall(rf"`((?:{modules})\.[A-Za-z_.]+)(?:\([^`]*\))?`", page)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_functions_that_are_named_exist(page):
    missing = []
    for name in set(names_in(page.read_text())) - {path.name for path in PACKAGE.rglob("*")}:
        module, *attributes = name.split(".")
        if module in ("trainer", "plan") and page.name != "paper_index.md":
            continue  # objects that the user has
        found = importlib.import_module(PATHS[module])
        for attribute in attributes:
            fields = getattr(found, "__annotations__", {})
            found = getattr(found, attribute, fields.get(attribute))
        if found is None:
            missing.append(name)
    assert not missing


@cache
def texts_in_the_source() -> tuple[str, ...]:
    """All strings of the package except docstrings, with `…` in place of inserted values."""
    texts = []
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if node in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%[\w.]+", "…", node.value))
    return tuple(texts)


def is_in_the_source(fragment: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in fragment.split("…") if part)
    return any(re.search(pattern, text, re.DOTALL) for text in texts_in_the_source())


MESSAGES = re.findall(r"^### `(.*)`$", text_of("troubleshooting.md"), re.MULTILINE)
REFUSED_BY_THE_CACHE = text_of("cache.md").split("| tested | reason |\n|---|---|\n")[1].split("\n\n")[0]
MESSAGES_OF_THE_CACHE = re.findall(r"^\| .* \| `(.*)` \|$", REFUSED_BY_THE_CACHE, re.MULTILINE)
# in the source the field and its value are one placeholder
REMEDY = "Call it on every process, not on the main process alone"
WRITTEN_OUT = {
    f"rank … called …; rank … …. {REMEDY}": REMEDY,
    "… cannot be combined with pipeline_parallel_size=…": "cannot be combined with …",
    "… cannot be trained with frozen layers: …": "trained with frozen layers",
    "checkpoint-… could not be saved": "could not be saved",
    "rank … died in phase …": "rank … (process …) died …",
    "rank … could not be reached for": "… could not be reached for",
}


def test_every_heading_of_troubleshooting_is_a_message():
    assert len(MESSAGES) > 40 and len(MESSAGES_OF_THE_CACHE) == len(REFUSED_BY_THE_CACHE.splitlines()) > 6
    assert len(MESSAGES) == len(re.findall(r"^### ", text_of("troubleshooting.md"), re.MULTILINE))


@pytest.mark.parametrize("message", [*MESSAGES, *MESSAGES_OF_THE_CACHE])
def test_messages_still_occur_in_the_source(message):
    assert is_in_the_source(WRITTEN_OUT.get(message, message.replace("'…'", "…")))


# ------------------------------------------------------------------------------------------ examples in docstrings
def modules_with(text: str) -> list[str]:
    paths = [path.relative_to(ROOT) for path in sorted(PACKAGE.rglob("*.py")) if text in path.read_text()]
    return [".".join(path.with_suffix("").parts) for path in paths]


@pytest.mark.parametrize("name", modules_with(">>> "))
def test_examples_in_docstrings_give_what_they_show(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("name", modules_with("```python"))
def test_code_in_docstrings_passes_arguments_that_exist(name: str) -> None:
    calls = 0
    source = inspect.getsource(importlib.import_module(name))
    for block in re.findall(r"^ *```python\n(.*?)^ *```$", source, re.DOTALL | re.MULTILINE):
        for call in ast.walk(ast.parse(textwrap.dedent(block))):
            callee = getattr(hf_pipetransformer, ast.unparse(call.func), None) if isinstance(call, ast.Call) else None
            if callee is not None:
                calls += 1
                accepted = inspect.signature(callee.__init__ if inspect.isclass(callee) else callee)
                takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.parameters.values())
                given = {keyword.arg for keyword in call.keywords}
                assert takes_any or given <= accepted.parameters.keys(), given - accepted.parameters.keys()
    assert calls or name.endswith(("policies", "errors"))  # these two define a class, and catch an error


# ------------------------------------------------------------------------------------------ dropout in frozen modules
MODEL_TYPES = {
    **{name: name.lower() for name in ("ViT", "CLIP", "SigLIP", "DINOv2", "Whisper", "Llama", "Mistral", "Gemma")},
    **{name: name.lower() for name in ("ModernBERT", "BERT", "RoBERTa", "DistilBERT", "ELECTRA", "BART", "OPT")},
    **{name: name.lower() for name in ("T5", "wav2vec2", "HuBERT", "Swin", "BEiT", "SegFormer")},
    **{"LLaVA's tower": "clip_vision_model", "Qwen": "qwen3", "DeBERTa": "deberta-v2", "GPT-2": "gpt2"},
}


def has_dropout(model_type: str) -> bool:
    """Whether a model's default configuration makes the outputs below its head random in training mode."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type)
    parts = [config, *(getattr(config, part, None) for part in ("vision_config", "text_config"))]
    values = {name: value for part in parts if part is not None for name, value in part.to_dict().items()}
    return any(value for name, value in values.items() if "drop" in name and "classif" not in name)


def test_models_that_are_listed_with_and_without_dropout():
    (row,) = [line for line in text_of("frozen_modules.md").splitlines() if line.startswith("| 3.")]
    without, with_dropout = (cell.partition(":")[0].strip().split(", ") for cell in row.split("|")[2:4])
    assert len(without) > 8 and len(with_dropout) > 8
    assert not [name for name in without if has_dropout(MODEL_TYPES[name])]
    assert all(has_dropout(MODEL_TYPES[name]) for name in with_dropout)
