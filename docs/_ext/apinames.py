"""The public name of what a signature mentions.

A class is documented under the name by which it is imported (`rdt_core.WeightSync`), while annotations and base classes are
resolved to where it is defined (`rdt_core.sync.WeightSync`), or to a name alone. Both lead to the one entry here. A class of
a room that the site does not describe stays a name without a link; one that does not exist is an error of the build.
"""

from __future__ import annotations

import importlib
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

PACKAGES = ("rdt_core", "rdt_megatron", "rdt_sglang", "rdt_vllm")


def _resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement) -> Any:
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].lstrip(".")
    name = target.rpartition(".")[2]
    python = env.domains["py"]
    package = target.split(".")[0]
    wanted = (package,) if package in PACKAGES else PACKAGES if "." not in target else ()
    for entry in python.objects:  # type: ignore[attr-defined]
        if entry.rpartition(".")[2] == name and entry.split(".")[0] in wanted and entry != target:
            return python.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], entry, node, content)
    if package in PACKAGES and _exists(target):
        return content
    return None


def _exists(dotted: str) -> bool:
    module, _, name = dotted.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
