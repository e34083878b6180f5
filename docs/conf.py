"""How Sphinx builds the site; `ci/docs` runs it. Every warning is an error there, and every reference must lead somewhere."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.ext.autodoc.mock import mock

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "rdt"
copyright = "the authors of rdt, Apache-2.0"
version = release = (HERE.parent / "VERSION").read_text().strip()

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "outside",  # links of a Markdown file to what is not a page
    "generated",  # tables read from the code
    "docstrings",
    "apinames",  # the public name of what a signature mentions
]
exclude_patterns = ["_build", "_ext"]
nitpicky = True
# Types of other projects, whose pages are not at hand while this site is built.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|ray|msgspec|typer|vllm|sglang|megatron|transformers)(\..*)?"),
    ("py:class", r"VllmConfig"),  # of vLLM, in an annotation that is a text
    ("py:.*", r"(collections|typing|pathlib|os|contextlib|dataclasses|abc|types|argparse|concurrent)\..*"),
    (
        "py:.*",
        r"Any|None|True|False|bool|bytes|dict|float|int|list|object|set|str|tuple|type|Exception|ABC|Protocol|optional",
    ),
]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

default_role = "code"  # a name in single backticks, as the docstrings have them
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
# What runs inside an engine is described without importing the engine, which takes longer than all the rest. For the whole run,
# since the adapters import late: not only while autodoc asks for a module.
_engines = mock(["megatron", "nixl", "sglang", "transformers", "vllm", "zmq"])
_engines.__enter__()

html_theme = "furo"
html_title = f"rdt {version}"
html_static_path: list[str] = []
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
