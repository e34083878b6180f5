"""README.md says what is so: its commands, the tests behind its limits, and the version that is written once."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PACKAGES = ("rdt-core", "rdt-megatron", "rdt-sglang", "rdt-vllm")
SETUP = "python3 -m pip install uv && python3 -m uv run"


def test_ci_runs_the_command_for_tests_word_for_word() -> None:
    commands = re.findall(rf"^{re.escape(SETUP)} (.*)$", README, re.MULTILINE)
    assert commands == ["rdt demo", "pytest"]
    assert f"\n{SETUP} pytest\n" in (ROOT / ".ci" / "run").read_text()


def test_every_limit_and_every_promise_has_its_test() -> None:
    promises = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", README + promises)
    assert len(named) >= 50
    for file, function in named:
        assert (ROOT / file).is_file(), file
        if function:
            assert re.search(rf"^(async )?def {function}\(", (ROOT / file).read_text(), re.MULTILINE), (
                f"{file}::{function}"
            )


def test_links_lead_somewhere() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "packages").glob("*/README.md")]
    for document in documents:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_version_is_written_once(package: str) -> None:
    version = (ROOT / "VERSION").read_text().strip()
    folder = ROOT / "packages" / package
    assert importlib.metadata.version(package) == version
    assert not re.search(r'^version\s*=\s*"', (folder / "pyproject.toml").read_text(), re.MULTILINE)
    repeated = re.compile(rf"__version__\s*=|[\"'=]{re.escape(version)}\b")
    sources = [*folder.glob("*.*"), *folder.glob("src/**/*.py")]
    found = [str(path.relative_to(ROOT)) for path in sources if repeated.search(path.read_text())]
    assert not found, f"{found} repeat the version {version}"
