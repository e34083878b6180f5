"""What the site and its tests read from the source of the packages without running it: error messages, variables, fields."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

#: stands for what a message fills in
HOLE = "\0"
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
# rooms of commands that set or look at what a process of their own wants
_TOOLS = ("bench", "demo", "doctor", "plan", "soak", "testing")


@dataclass(frozen=True)
class Message:
    """One error message of the source."""

    package: str
    room: str
    error: str
    text: str  # with HOLE for each value that is filled in

    @property
    def shown(self) -> str:
        """As Markdown: what is filled in is an ellipsis."""
        text = re.sub(rf"\s*{HOLE}(\s*{HOLE})*\s*", lambda gap: gap[0].replace(HOLE, "…"), self.text)
        return re.sub(r"([\\`*_<>\[\]{}#|$])", r"\\\1", re.sub(r"\s+", " ", re.sub("…+", "…", text)).strip())


@cache
def _sources(root: Path) -> list[tuple[str, str, list[ast.AST]]]:
    """Package, room and every node of each file."""
    found = []
    for file in sorted((root / "packages").glob("*/src/*/**/*.py")):
        parts = file.relative_to(root / "packages").parts
        room = ".".join(parts[3:]).removesuffix(".py").removesuffix(".__init__")
        found.append((parts[0], room, list(ast.walk(ast.parse(file.read_text())))))
    return found


def _text(node: ast.expr) -> str:
    """A string expression with HOLE for what is not constant."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        # a choice between constants is worth showing: the first of them
        return _text(node.value.body) if isinstance(node.value, ast.IfExp) else HOLE
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return _text(node.body)
    return HOLE


def messages(root: Path, tools: bool = False) -> list[Message]:
    """Returns the message of every error that is raised with a text of its own.

    Args:
        root: of the repository.
        tools: also those of the commands' own rooms, which are about their options.
    """
    found = []
    for package, room, nodes in _sources(root):
        if not tools and room.split(".")[0] in (*_TOOLS, "cli"):
            continue
        for node in nodes:
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or not node.exc.args:
                continue
            error = ast.unparse(node.exc.func).rpartition(".")[2]
            text = _text(node.exc.args[0])
            if error.endswith("Error") and len(text.replace(HOLE, "").strip()) >= 12 and not hasattr(builtins, error):
                found.append(Message(package, room, error, text))
    return found


def strings(root: Path) -> list[str]:
    """Returns every text of the packages, with HOLE for what is filled in."""
    found = []
    for _, _, nodes in _sources(root):
        found += [
            _text(node)
            for node in nodes
            if isinstance(node, ast.JoinedStr | ast.BinOp)
            or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        ]
    return found


def environment_variables(root: Path) -> dict[str, set[str]]:
    """Returns the names in the code that look like environment variables, and the rooms that they are in.

    The rooms of the demo, the benchmark and other tools set what their own processes want, and are left out.
    """
    found: dict[str, set[str]] = {}
    for package, room, nodes in _sources(root):
        if room.split(".")[0] in _TOOLS:
            continue
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _VARIABLE.fullmatch(node.value):
                found.setdefault(node.value, set()).add(f"{package.replace('-', '_')}.{room}")
    return found


def _class_source(kind: type[Any]) -> tuple[list[str], ast.ClassDef]:
    text = textwrap.dedent(inspect.getsource(kind))
    body = ast.parse(text).body[0]
    assert isinstance(body, ast.ClassDef)
    return text.splitlines(), body


def field_comments(kind: type[Any]) -> dict[str, str]:
    """Returns the comment behind each field of a class, or above it."""
    lines, body = _class_source(kind)
    comments = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            line = lines[(node.end_lineno or node.lineno) - 1]
            behind = re.search(r"#:? (.*)$", line[node.end_col_offset :])
            if comment := behind or re.match(r"\s*#:? (.*)$", lines[node.lineno - 2]):
                comments[node.target.id] = comment[1]
    return comments


def field_default(kind: type[Any], name: str) -> str | None:
    """Returns the default of a field as it is written, or None where it has none."""
    for node in _class_source(kind)[1].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return None if node.value is None else ast.unparse(node.value).replace("'", '"')
    return None
