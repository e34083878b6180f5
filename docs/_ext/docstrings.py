"""Docstrings as this project writes them: Google-style sections, and names in single backticks as in Markdown."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config
from sphinx.ext.napoleon.docstring import GoogleDocstring

CONFIG = Config(napoleon_use_rtype=False, napoleon_attr_annotations=False)


def _process(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    # `model_type`s: reStructuredText wants a sign that the name ends there
    text = [re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", line) for line in lines]
    # of a property napoleon would take what is before a colon for its type
    kind = "method" if what == "property" else what
    lines[:] = GoogleDocstring(text, CONFIG, app, kind, name, found, options).lines()


def _signature(
    app: Sphinx, what: str, name: str, found: Any, options: Any, text: str | None, returns: str | None
) -> Any:
    # a dataclass shows a default that is made anew as <factory>, which is no Python and cannot be parsed
    return (text.replace("<factory>", "..."), returns) if text else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-process-signature", _signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
