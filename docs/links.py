"""For the site: what is written for other readers becomes links.

Links out of docs/ lead to files of the repository, where the pages are read, too. In the site a module is on the page
under api/ that names it; other files are no part of it, and their names stay as text.

Docstrings have Hugging Face's way of writing: [`Class`] for a link, and *optional* beside a type.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^]]*)\]\((\.\./[^)\s]*)\)")
_API = Path(__file__).parent / "api"
_PLACE_OF = {
    module: f"api/{page.name}#{identifier}"
    for page in sorted(_API.glob("*.md"))
    for identifier, module in re.findall(
        r"^::: ((hf_pipetransformer(?:\.[a-z_]+)+)[\w.]*)$", page.read_text(), re.MULTILINE
    )
}
"""Module -> where the site documents it, or its one public class."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with each page before it is rendered."""
    here = posixpath.dirname(page.file.src_uri)

    def inside(match: re.Match[str]) -> str:
        text, target = match[1], posixpath.normpath(posixpath.join("docs", here, match[2]))
        if target.startswith("docs/"):
            return match[0]
        module = ".".join(Path(target).with_suffix("").parts)
        if module in _PLACE_OF:
            return f"[{text}]({posixpath.relpath(_PLACE_OF[module], here or '.')})"
        return text

    return _LINK.sub(inside, markdown)


_NAME = re.compile(r"\[<code>~?(?:\w+\.)*(\w+)</code>\]")
_TYPE = re.compile(r"\(<code>([^<]*`[^<]*)</code>(?:, default:\s*<code>[^<]*</code>)?\s*\)")


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with each page when it is rendered."""

    def link(match: re.Match[str]) -> str:
        anchor = re.search(rf'id="([\w.]+\.{match[1]})"', content)
        name = f"<code>{match[1]}</code>"
        return f'<a href="#{anchor[1]}">{name}</a>' if anchor else name

    def as_text(match: re.Match[str]) -> str:
        text = re.sub(r"\*(\w+)\*", r"<em>\1</em>", html.unescape(match[1]).replace('`"', '"').replace('"`', '"'))
        return "(" + re.sub(r"`([^`]*)`", r"<code>\1</code>", text) + ")"

    return _TYPE.sub(as_text, _NAME.sub(link, content))
