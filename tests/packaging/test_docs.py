"""The documentation says what is so: its blocks fit the code, its messages are in the source, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.main import get_command

import rdt_core.errors
from rdt_core.cli import app
from rdt_testbed.documents import DOCUMENTS, ROOT, Block, anchors, blocks, prose

HERE = Path(__file__).parent
PLAIN = {"", "text", "console"}
BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def label(block: Block) -> str:
    return block.where


@pytest.mark.unit
def test_every_block_says_what_it_is() -> None:
    known = {"python", "bash", "json", "toml", *PLAIN}
    for block in BLOCKS:
        assert block.language in known or re.fullmatch(r"\{[\w-]+\}", block.language), block.where


@pytest.mark.integration
def test_python_blocks_are_type_checked(tmp_path: Path) -> None:
    """One run of mypy over all of them, with its cache of the packages; each block is a module of its own."""
    package = tmp_path / "docblocks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "preamble.py").write_text((HERE / "docs_preamble.py").read_text())
    by_name: dict[str, Block] = {}
    head = "from docblocks.preamble import *\n"
    for number, block in enumerate(of("python")):
        name = f"block{number}"
        by_name[name] = block
        (package / f"{name}.py").write_text(head + block.text)
    assert len(by_name) > 15

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    (tmp_path / "mypy.ini").write_text(_ini(settings))
    options = ["--config-file", "mypy.ini", "--cache-dir", str(ROOT / ".mypy_cache"), "--no-error-summary"]
    paths = os.pathsep.join([str(tmp_path), *(str(ROOT / path) for path in settings["mypy_path"])])
    result = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "docblocks"], cwd=tmp_path, env={**os.environ, "MYPYPATH": paths},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert not result.stderr, result.stderr
    wrong = [_told(line, by_name, head.count("\n")) for line in result.stdout.splitlines()]
    assert not wrong, "\n".join(wrong)


def _told(line: str, by_name: dict[str, Block], before: int) -> str:
    found = re.match(r"docblocks/(block\d+)\.py:(\d+): (.*)", line)
    if not found:
        return line
    block = by_name[found[1]]
    return f"{block.document.relative_to(ROOT)}:{block.line + int(found[2]) - 1 - before}: {found[3]}"


def _ini(settings: dict[str, object]) -> str:
    """The project's settings of mypy, and what a fragment need not have."""

    def section(name: str, entries: dict[str, object]) -> str:
        lines = [f"{key} = {', '.join(value) if isinstance(value, list) else value}" for key, value in entries.items()]
        return "\n".join([f"[{name}]", *lines, ""])

    own = {key: value for key, value in settings.items() if key not in ("files", "mypy_path", "overrides")}
    parts = [section("mypy", own)]
    for override in settings["overrides"]:
        entries = {key: value for key, value in override.items() if key != "module"}
        parts += [section(f"mypy-{module}", entries) for module in override["module"]]
    loose = {"disallow_untyped_defs": False, "disallow_incomplete_defs": False, "disable_error_code": "no-redef"}
    return "\n".join([*parts, section("mypy-docblocks.*", loose)])


EXECUTED = sorted({block.document for block in of("python") if block.executed})


@pytest.mark.unit
@pytest.mark.parametrize("document", EXECUTED, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_that_say_so_run(document: Path) -> None:
    """One after the other, in one namespace for each page."""
    namespace: dict[str, object] = {"__name__": "page"}
    for block in of("python"):
        if block.document == document and block.executed:
            exec(compile("\n" * (block.line - 1) + block.text, str(document), "exec"), namespace)


@pytest.mark.integration
def test_the_site_builds_without_a_warning() -> None:
    result = subprocess.run([ROOT / "ci" / "docs", "-E"], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (ROOT / "docs" / "_build" / "html" / "search.html").is_file()


# --- commands


def commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each command of a shell block."""
    for inner in re.findall(r"\$\(([^()]+)\)", text):
        yield from commands(inner)
    for line in re.sub(r"\\\n", " ", text).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|()"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def check_command(words: list[str], config: pytest.Config) -> None:
    """Fails unless the command and its options exist."""
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
        words = words[1:]
    if words[:1] == ["export"] or not words:
        return
    words = words[: next((at for at, word in enumerate(words) if set(word) <= set("<>")), len(words))]
    program, rest = words[0], words[1:]
    if [program, *rest[:2]] == ["python3", "-m", "uv"] or program == "uv":
        rest = rest[2:] if program == "python3" else rest
        assert rest[0] in {"run", "build", "sync", "lock"}, rest
        if rest[0] == "run":
            check_command(rest[1:], config)
    elif program == "rdt":
        check_rdt(rest)
    elif program == "pytest":
        check_pytest(rest, config)
    elif program.startswith("ci/"):
        script = ROOT / program
        assert os.access(script, os.X_OK), f"{program} is no script"
        for option in options(rest):
            assert option in script.read_text(), f"{program} knows no {option}"
    elif (program == "pip" or rest[:2] == ["-m", "pip"]) and "install" in rest:
        check_packages(rest[rest.index("install") + 1 :])
    elif program in {"python", "python3", "torchrun"}:
        check_program(program, rest)
    elif program == "vllm":
        assert rest[0] == "serve"
        if "--weight-transfer-config" in rest:
            assert json.loads(rest[rest.index("--weight-transfer-config") + 1]) == {"backend": "rdt"}
    else:
        assert program in {"ray", "cat", "cd", "eval", "git", "ulimit"}, f"what is {program}?"


def options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def check_rdt(words: list[str]) -> None:
    root = get_command(app)
    with typer.Context(root, info_name="rdt") as parent:
        if words[0].startswith("-"):
            assert words[0] in {option for parameter in root.get_params(parent) for option in parameter.opts}
            return
        command = root.get_command(parent, words[0])
        assert command is not None, f"rdt has no command {words[0]}"
        command.make_context(words[0], list(words[1:]), parent=parent)


def check_pytest(words: list[str], config: pytest.Config) -> None:
    known, unknown = config._parser.parse_known_and_unknown_args(words)
    assert not unknown, f"pytest knows no {unknown}"
    for path in known.file_or_dir:
        assert (ROOT / path.partition("::")[0]).exists(), path


def check_packages(words: list[str]) -> None:
    for word in words:
        name, _, extra = word.rstrip("]").partition("[")
        if name.startswith("rdt-") and not name.endswith(".whl"):
            about = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
            assert not extra or set(extra.split(",")) <= set(about["optional-dependencies"]), word


def check_program(program: str, words: list[str]) -> None:
    if words[:1] == ["-m"]:
        module = words[1]
        where = importlib.util.find_spec(module.split(".")[0])
        assert where is not None, f"no module {module}"
        if module.startswith("rdt_"):
            source = Path(importlib.util.find_spec(module).origin or "").read_text()
            for option in options(words[2 : words.index("--") if "--" in words else None]):
                assert option in source, f"{module} knows no {option}"
        return
    at = next(at for at, word in enumerate(words) if word.endswith(".py"))
    script = ROOT / words[at]
    text = script.read_text() + (script.parent / "rollouts.py").read_text()
    for option in options(words[at:]):
        assert f'"{option}"' in text, f"{words[at]} knows no {option}"


@pytest.mark.unit
@pytest.mark.parametrize("block", of("bash"), ids=label)
def test_commands_exist_with_their_options(block: Block, pytestconfig: pytest.Config) -> None:
    for words in commands(block.text):
        try:
            check_command(words, pytestconfig)
        except (AssertionError, typer.Exit, SystemExit, pytest.UsageError) as error:
            pytest.fail(f"{block.where}: {' '.join(words)}: {error}")
        except Exception as error:  # a usage error of typer's own click
            pytest.fail(f"{block.where}: {' '.join(words)}: {getattr(error, 'message', error)}")


@pytest.mark.unit
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_the_text_have_the_options_that_it_says(document: Path, pytestconfig: pytest.Config) -> None:
    for inline in re.findall(r"`((?:pytest|ci/\w+) [^`]+)`", prose(document)):
        # a word in capitals stands for something of the reader's
        check_command([re.sub(r"^[A-Z]+$", "1", word) for word in shlex.split(inline)], pytestconfig)
    root = get_command(app)
    with typer.Context(root, info_name="rdt") as parent:
        for inline in re.findall(r"`rdt (\w+)((?: [^`]*)?)`", prose(document)):
            command = root.get_command(parent, inline[0])
            assert command is not None, f"rdt has no command {inline[0]}"
            known = {option for parameter in command.params for option in parameter.opts}
            assert set(options(inline[1].split())) <= known | {"--help"}, f"rdt {inline[0]}{inline[1]}"


@pytest.mark.unit
@pytest.mark.parametrize("block", of("json", "toml"), ids=label)
def test_data_blocks_parse(block: Block) -> None:
    tomllib.loads(block.text) if block.language == "toml" else json.loads(block.text)


# --- links and messages


@pytest.mark.unit
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_their_anchors_exist(document: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", prose(document)):
        there = (document.parent / target).resolve() if target else document
        assert there.exists(), f"{document.relative_to(ROOT)} links to {target}"
        if anchor:
            assert there.suffix == ".md", f"{document.relative_to(ROOT)} links to {target}#{anchor}"
            assert anchor in anchors(there), f"{document.relative_to(ROOT)} links to {target}#{anchor}"


@pytest.mark.unit
def test_every_public_name_has_its_entry() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    elsewhere = set(rdt_core.errors.__dict__)  # on the page of errors, which lists the module
    absent = [
        name
        for name in rdt_core.__all__
        if name not in elsewhere and f":: rdt_core.{name}\n" not in pages.replace("()", "")
    ]
    assert not absent, f"docs/api/rdt_core.md has no entry for {absent}"
    for package in ("rdt_core.testing", "rdt_megatron", "rdt_sglang", "rdt_vllm"):
        assert f".. automodule:: {package}\n   :members:\n   :imported-members:\n" in pages


@pytest.mark.unit
def test_files_that_are_named_exist() -> None:
    for document in DOCUMENTS:
        for file, function in re.findall(
            r"`((?:tests|examples|ci|docs|packages)/[\w./-]*\w)(?:::(\w+))?`", prose(document)
        ):
            assert (ROOT / file).exists(), f"{document.relative_to(ROOT)} names {file}"
            if function:
                assert f"def {function}(" in (ROOT / file).read_text(), (
                    f"{document.relative_to(ROOT)} names {file}::{function}"
                )


@pytest.mark.unit
def test_quoted_messages_are_in_the_source() -> None:
    """The first column of every table of troubleshooting: each part between ellipses, in order, in one text of the packages."""
    spec = importlib.util.spec_from_file_location("sourcetext", ROOT / "docs" / "_ext" / "sourcetext.py")
    assert spec is not None
    assert spec.loader is not None
    sourcetext = sys.modules["sourcetext"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sourcetext)
    texts = "\1".join(sourcetext.strings(ROOT))
    quoted = [
        message
        for row in re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", row)
        if " " in message
    ]
    assert len(quoted) > 40
    absent = []
    for message in quoted:
        parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
        if not re.search("[^\1]{0,80}".join(parts), texts):
            absent.append(message)
    assert not absent, f"no text of the packages has {absent}"
