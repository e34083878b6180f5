"""Tables that are read from the code while the site is built, so that they cannot be out of date.

`{arguments} rdt_core.WeightSync.join` lists a call's arguments with defaults and meaning, `{fields}` those of a struct,
`{variables}` the environment variables, `{messages}` every error message, `{commands}` the options of `rdt`. An argument
without a meaning, and a variable that is described but not in the code (or the other way round), fail the build.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import sourcetext
import variables
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
log = logging.getLogger(__name__)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join(map(line, [head, ["---"] * len(head), *rows]))


def find(dotted: str) -> Any:
    """Returns the object of a dotted name."""
    names = dotted.split(".")
    for count in range(len(names), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(names[:count]))
        except ModuleNotFoundError:
            continue
        for name in names[count:]:
            found = getattr(found, name)
        return found
    raise ExtensionError(f"nothing is named {dotted}")


def described(docstring: str, section: str = "Args") -> dict[str, str]:
    """Returns what a Google-style section says of each name."""
    body = re.search(rf"^{section}:\n((?:[ \t]+.*\n|\n)*)", inspect.cleandoc(docstring) + "\n", re.MULTILINE)
    told: dict[str, str] = {}
    for line in (body[1] if body else "").splitlines():
        if entry := re.match(r"    (\w+): (.*)", line):
            name = entry[1]
            told[name] = entry[2]
        elif line.strip():
            told[name] += " " + line.strip()
    return told


def arguments(dotted: str) -> str:
    """Returns the arguments of a call; `see `OTHER`` in a docstring is followed."""
    call = find(dotted)
    told = described(inspect.getdoc(call) or "")
    rows = []
    for name, parameter in inspect.signature(call).parameters.items():
        if name in ("self", "cls"):
            continue
        meaning = told.get(name, "")
        if other := re.match(r"see `(\w+)`[.;]?", meaning):
            there = described(inspect.getdoc(getattr(importlib.import_module(call.__module__), other[1], None)) or "")
            rest = meaning[other.end() :]
            meaning = there[name].removesuffix("." if rest.startswith(",") else "") + rest if name in there else meaning
        if not meaning:
            log.warning("%s: no meaning of its argument %s is in its docstring", dotted, name)
        required = parameter.default is inspect.Parameter.empty
        star = {inspect.Parameter.VAR_KEYWORD: "**", inspect.Parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
        default = "" if star else "required" if required else f"`{_shown(parameter.default, call)}`"
        rows.append((f"`{star}{name}`", default, meaning.strip()))
    return table(("argument", "default", "meaning"), rows)


def _shown(value: Any, call: Any) -> str:
    if type(value).__name__ == "DefaultValue":  # autodoc puts the name of a constant in its place where it was first
        value = eval(value.name, vars(importlib.import_module(call.__module__)))  # noqa: S307 - written in our own source
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20 and not value % (1 << 20):
        return f"{value >> 20} << 20"
    return repr(value).replace("'", '"')


def fields(dotted: str, more: str = "") -> str:
    """Returns the fields of a struct or dataclass, with the comments behind them, or its docstring's `Attributes`.

    Args:
        dotted: the class.
        more: `name: meaning` lines for fields that say nothing themselves.
    """
    kind = find(dotted)
    told = {**described(inspect.getdoc(kind) or "", "Attributes"), **described(inspect.getdoc(kind) or "", "Args")}
    told |= sourcetext.field_comments(kind)
    told |= dict(line.split(": ", 1) for line in more.splitlines() if line.strip())
    rows = []
    for name in kind.__annotations__:
        if not told.get(name):
            log.warning("%s: nothing says what its field %s is; write a comment behind it", dotted, name)
        default = sourcetext.field_default(kind, name)
        rows.append((f"`{name}`", "required" if default is None else f"`{default}`", told.get(name, "")))
    return table(("field", "default", "meaning"), rows)


def environment(which: str) -> str:
    """Returns the environment variables of one kind: "read" by rdt, "set" for actors, or "demo"."""
    found = sourcetext.environment_variables(ROOT)
    known = {name: entry for entries in variables.VARIABLES.values() for name, entry in entries.items()}
    for name in sorted(set(found) - variables.NOT_VARIABLES ^ set(known)):
        log.warning(
            "docs/_ext/variables.py and the code differ in %s: say there what it is for, or that it is no environment variable",
            name,
        )
    rows = [
        (f"`{name}`", meaning, ", ".join(f"`{where}`" for where in sorted(found.get(name, ()))))
        for name, meaning in variables.VARIABLES[which].items()
    ]
    return table(("variable", "meaning", "in"), rows)


def messages(package: str) -> str:
    """Returns every message of the errors that a package raises, by the class of the error."""
    by_class: dict[str, list[tuple[str, str]]] = {}
    for message in sourcetext.messages(ROOT):
        if message.package == package:
            by_class.setdefault(message.error, []).append((message.shown, message.room))
    parts = []
    for error in sorted(by_class):
        rows = sorted({(f"{text}", f"`{room}`") for text, room in by_class[error]}, key=lambda row: (row[1], row[0]))
        parts += [f"**{error}**", table(("message", "room"), rows)]
    return "\n\n".join(parts)


def commands() -> str:
    """Returns the page of the command `rdt`, as typer writes it."""
    from typer import Context
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from rdt_core.cli import app

    command = get_command(app)
    text = get_docs_for_click(obj=command, ctx=Context(command, info_name="rdt"), name="rdt")
    text = re.sub(r"\[/?bold\]", "**", text)
    # the examples below a command, one paragraph each
    text = re.sub(r"^(rdt [^\n]+(?:\n\nrdt [^\n]+)*)$", lambda some: _console(some[1]), text, flags=re.MULTILINE)
    return text.partition("\n")[2]  # the page has a title of its own


def _console(lines: str) -> str:
    return "```bash\n" + re.sub(r"\n\n", "\n", lines) + "\n```"


def _directive(write: Callable[..., str]) -> type[SphinxDirective]:
    class Generated(SphinxDirective):
        optional_arguments = 1
        has_content = True

        def run(self) -> list[nodes.Node]:
            for file in [*(ROOT / "packages").glob("*/src/**/*.py"), *Path(__file__).parent.glob("*.py")]:
                self.env.note_dependency(str(file))
            more = ["\n".join(self.content)] if self.content else []
            return self.parse_text_to_nodes(write(*self.arguments, *more), allow_section_headings=True)

    return Generated


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    for name, write in (
        ("arguments", arguments), ("fields", fields), ("variables", environment), ("messages", messages), ("commands", commands),
    ):  # fmt: skip
        app.add_directive(name, _directive(write))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
