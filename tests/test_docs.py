"""The documentation names what exists: messages, functions, links, tables that follow from formulas."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_pipetransformer.freezing.policies import AlphaPolicy, FreezeDecision

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "hf_pipetransformer"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "recipes").glob("*.md")])
SHARES = {"1/5": 1 / 5, "1/4": 1 / 4, "1/3": 1 / 3, "2/5": 2 / 5, "1/2": 1 / 2}


def text_of(name: str) -> str:
    return (DOCS / name).read_text()


def without_code(page: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE)


def anchor(heading: str) -> str:
    """As GitHub and the site's generator make it."""
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


class _NavLoader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose functions by name mean nothing here."""


_NavLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages_in(nav: Any) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    values = nav.values() if isinstance(nav, dict) else nav
    return [page for value in values for page in pages_in(value)]


def test_each_page_is_in_the_navigation_once():
    """That there is a page for each entry is what `mkdocs build --strict` checks."""
    listed = pages_in(yaml.load((ROOT / "mkdocs.yml").read_text(), _NavLoader)["nav"])
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert not pages - set(listed)
    assert len(listed) == len(set(listed))


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
    """All strings of the package but docstrings, with `…` in place of what is put in."""
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
    assert len(MESSAGES) > 40
    assert len(MESSAGES) == len(re.findall(r"^### ", text_of("troubleshooting.md"), re.MULTILINE))


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_still_occur_in_the_source(message):
    assert is_in_the_source(WRITTEN_OUT.get(message, message))


def test_what_the_cache_page_says_is_refused_is_in_the_source():
    table = text_of("cache.md").split("| tried | refused as |\n|---|---|\n")[1].split("\n\n")[0]
    rows = re.findall(r"^\| .* \| `(.*)` \|$", table, re.MULTILINE)
    assert len(rows) == len(table.splitlines()) > 6
    assert not [row for row in rows if not is_in_the_source(row.replace("'…'", "…"))]


def frozen(share: float, num_layers: int, epoch: int) -> int:
    decision = FreezeDecision(epoch - 1, num_layers, 0, epoch - 1.0, epoch - 1, None, num_layers)
    return AlphaPolicy(share).num_frozen(decision)


def bound(share: float, num_layers: int, epochs: int, cached: bool) -> float:
    """Of the speed-up: a layer costs 3 where it trains, 1 where it is frozen, 0 where it was frozen before."""
    cost = 0
    for epoch in range(1, epochs + 1):
        f = frozen(share, num_layers, epoch)
        before = frozen(share, num_layers, epoch - 1) if cached and epoch > 1 else 0
        cost += 3 * (num_layers - f) + (f - before)
    return 3 * num_layers * epochs / cost


@pytest.mark.parametrize("num_layers", [6, 12, 24])
def test_frozen_layers_of_each_epoch(num_layers):
    page = text_of("choosing_alpha.md")
    table = page.split(f"| L = {num_layers}, epoch |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| α = (\S+) \| (.*) \|$", table, re.MULTILINE)
    assert [share for share, _ in rows] == list(SHARES)
    for share, numbers in rows:
        expected = [frozen(SHARES[share], num_layers, epoch) for epoch in range(1, 11)]
        assert [int(number) for number in numbers.split("|")] == expected


def test_bounds_of_the_speed_up():
    rows = re.findall(r"^\| (\d+), (\S+) \| (.*) \|$", text_of("choosing_alpha.md"), re.MULTILINE)
    assert len(rows) == 10
    for epochs, share, cells in rows:
        expected = [
            " / ".join(f"{bound(SHARES[share], L, int(epochs), cached):.2f}" for cached in (False, True))
            for L in (6, 12, 24)
        ]
        assert [cell.strip() for cell in cells.split("|")] == expected
