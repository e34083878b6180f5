"""What the tests of the documentation read from Markdown: code blocks, links, headings, inline commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[4]  # of the repository
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "packages").glob("*/README.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
]
_FENCE = re.compile(r"^ *(```+|:::+)\s*(\{?[\w-]*\}?)(.*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    document: Path
    line: int  # of its first line of text, from 1
    language: str  # "{name}" for a directive
    text: str
    argument: str = ""  # of a directive
    executed: bool = False  # has the comment `<!-- executed -->` above it

    @property
    def where(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> Iterator[Block]:
    """Yields the fenced blocks of a document."""
    fence, language, argument, start, lines, before, executed = "", "", "", 0, list[str](), "", False
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if not fence:
            if opening := _FENCE.match(line):
                fence, language, argument, start, lines = opening[1], opening[2], opening[3].strip(), number + 1, []
                executed = before.strip() == "<!-- executed -->"
            before = line
        elif line.strip() == fence:
            yield Block(document, start, language, "\n".join(lines) + "\n", argument, executed)
            fence = ""
        else:
            lines.append(line)
    assert not fence, f"{document}: a block that starts at line {start} does not end"


def prose(document: Path) -> str:
    """Returns a document's text without its fenced blocks."""
    text = document.read_text()
    for block in blocks(document):
        text = text.replace(block.text, "", 1)
    return text


def anchors(document: Path) -> set[str]:
    """Returns the anchors of a document's headings, as GitHub and MyST make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,4} (.+)$", prose(document), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(f"{slug}-1" if slug in found else slug)
    for block in blocks(document):
        if block.language == "{include}":
            found |= anchors(document.parent / block.argument)
    return found
