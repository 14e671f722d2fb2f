"""For the site: links out of docs/, which lead to files of the repository, lead to the page that documents them.

The pages are read in the repository, too, where a path to the module is the right link. In the site a module is on the
page under api/ that names it; other files are no part of it, and their names stay as text.
"""

from __future__ import annotations

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
