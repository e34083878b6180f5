"""Links of the Markdown files that leave `docs/`, and of README files that are included in pages.

In the repository they lead to files and folders; on the site to the page that stands for them, or, where none does, they are
plain code. A target that does not exist is a warning, so that a dead link fails the build.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

log = logging.getLogger(__name__)

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<path>(?!\w+:|#|/)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
# what a page stands for, from the root of the repository
PAGES = {
    "README.md": "docs/index.md",
    "examples": "docs/examples.md",
    "examples/README.md": "docs/examples.md",
    "packages/rdt-core": "docs/rdt-core.md",
    "packages/rdt-megatron": "docs/rdt-megatron.md",
    "packages/rdt-sglang": "docs/rdt-sglang.md",
    "packages/rdt-vllm": "docs/rdt-vllm.md",
    "CHANGELOG.md": "docs/changelog.md",
}
# pages that a part of the root's README is included in
SECTIONS = {
    "#two-commands": "docs/quickstart.md",
    "#publish-modes": "docs/how-it-works.md",
    "#link-kinds": "docs/how-it-works.md",
    "#limits": "docs/limits.md",
}


def relinked(text: str, *, file: Path, page: Path, root: Path) -> str:
    """Returns Markdown whose links fit a page of the site.

    Args:
        text: of `file`.
        file: where it is written; its links are relative to this file's folder.
        page: the page that it becomes a part of.
        root: of the repository.
    """

    def replace(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(file.parent / link["path"]))
        if not target.exists():
            log.warning("%s links to %s, which is not there", file.relative_to(root), link["path"])
            return link["text"]
        inside = PAGES.get(str(target.relative_to(root)), str(target.relative_to(root)))
        if target == root / "README.md":
            inside = SECTIONS.get(link["anchor"], inside)
        target = root / inside
        if not target.is_relative_to(root / "docs"):
            return link["text"] if link["text"].startswith("`") else f"`{link['text']}`"
        there = "" if target == page else os.path.relpath(target, page.parent)
        return f"[{link['text']}]({there}{link['anchor'] or ''})"

    return LINK.sub(replace, text)


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    source[0] = relinked(source[0], file=page, page=page, root=Path(app.srcdir).parent)


def _included(app: Sphinx, path: Path, docname: str, source: list[str]) -> None:
    root = Path(app.srcdir).parent
    file = Path(os.path.normpath(root / "docs" / path))
    if file.suffix == ".md":
        source[0] = relinked(source[0], file=file, page=Path(app.env.doc2path(docname)), root=root)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("source-read", _read)
    app.connect("include-read", _included)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
