"""One version everywhere: the command that changes it, adapters of another release, and `rdt --version`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rdt_core import distributions
from rdt_core.distributions import check_release, installed, rdt_version, version_lines
from rdt_core.errors import VersionError

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.1.0] - 2026-11-30\n\n- All.\n"


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    found = {**os.environ, **env}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=found, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("distribution", distributions.SIBLINGS)
def test_an_adapter_of_another_release_is_refused_at_import(distribution: str, tmp_path: Path) -> None:
    metadata = tmp_path / f"{distribution.replace('-', '_')}-9.9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {distribution}\nVersion: 9.9.9\n")
    module = distribution.replace("-", "_")
    done = run(sys.executable, "-c", f"import {module}", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    mend = f"pip install 'rdt-core=={rdt_version()}' '{distribution}=={rdt_version()}'"
    assert f"found: {distribution} 9.9.9 beside rdt-core {rdt_version()}" in done.stderr
    assert done.stderr.rstrip().endswith(f"needed: one version of all rdt packages; to mend: {mend}")


def test_what_is_not_installed_or_vendored_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    check_release("rdt-vllm")
    versions = {"rdt-core": "1.0.0", "rdt-vllm": "2.0.0"}
    monkeypatch.setattr(distributions, "installed", lambda name: versions.get(name, ""))
    check_release("rdt-sglang")
    with pytest.raises(VersionError, match=r"rdt-vllm 2\.0\.0 beside rdt-core 1\.0\.0"):
        check_release("rdt-vllm")
    monkeypatch.setattr(distributions, "VENDORED", "0.5.0")
    check_release("rdt-vllm")
    assert rdt_version() == "0.5.0"
    assert version_lines()[0] == "rdt 0.5.0 (vendored)"
    assert "rdt-vllm 2.0.0" not in version_lines()


def test_the_command_shows_versions() -> None:
    done = run(sys.executable, "-X", "importtime", "-m", "rdt_core.cli", "--version", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:4] == [f"rdt {rdt_version()}", *(f"{name} {installed(name)}" for name in ("ray", "nixl", "torch"))]
    assert f"rdt-vllm {rdt_version()}" in lines
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "rdt_core.distributions" in imported
    assert not imported & {"torch", "ray", "nixl", "numpy"}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small project with our command, a changelog and a lock, committed."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "version", folder / "ci")
    (folder / "VERSION").write_text("0.1.0\n")
    (folder / "CHANGELOG.md").write_text(CHANGELOG)
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "toy"\nversion = "0"\nrequires-python = ">=3.11"\n[tool.uv]\npackage = false\n'
    )
    assert run(sys.executable, "-m", "uv", "lock", "--offline", cwd=folder).returncode == 0
    commit(folder)
    return folder


@pytest.fixture
def toy(template: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return shutil.copytree(template, tmp_path / "toy")


def commit(folder: Path) -> None:
    for arguments in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "all")):
        names = ("-c", "user.name=toy", "-c", "user.email=toy@localhost")
        done = run("git", *names, *arguments, cwd=folder)
        assert done.returncode == 0, done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "version"), [(("0.2.0",), "0.2.0"), (("0.2.0rc1",), "0.2.0rc1"), (("--bump", "minor"), "0.2.0")]
)
def test_another_version(toy: Path, arguments: tuple[str, ...], version: str) -> None:
    done = run(sys.executable, "ci/version", *arguments, cwd=toy, UV_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert (toy / "VERSION").read_text() == f"{version}\n"
    heading, _, rest = (toy / "CHANGELOG.md").read_text().partition(f"\n## [{version}] - 20")
    assert heading == "# Changelog\n\n## [Unreleased]\n"
    assert rest.partition("\n")[2] == CHANGELOG.partition("## [Unreleased]\n")[2]


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("0.1.0",), "0.1.0 is not later than the present version, 0.1.0"),
        (("0.0.9",), "not later"),
        (("0.1.0rc1",), "not later"),
        (("v0.2",), "'v0.2' is no version of the form X.Y.Z"),
        (("0.2.0.dev1",), "no version of the form"),
        (("00.2.0",), "no version of the form"),
    ],
)
def test_a_bad_version_changes_nothing(toy: Path, arguments: tuple[str, ...], wrong: str) -> None:
    before = contents(toy)
    done = run(sys.executable, "ci/version", *arguments, cwd=toy)
    assert done.returncode == 1
    assert wrong in done.stderr
    assert contents(toy) == before


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("CHANGELOG.md", "# Changelog\n", "has no line `## [Unreleased]`"),
        ("CHANGELOG.md", "# Changelog\n\n## [Unreleased]\n\n## [0.1.0]\n\n- All.\n", "lists nothing below"),
        ("CHANGELOG.md", CHANGELOG + "\n## [0.2.0] - 2026-12-01\n", "has a part for 0.2.0 already"),
        ("pyproject.toml", "broken", "`uv lock` failed, and everything is as it was"),
    ],
)
def test_a_state_that_cannot_be_released_is_left_as_it_is(toy: Path, file: str, text: str, wrong: str) -> None:
    (toy / file).write_text(text)
    commit(toy)
    before = contents(toy)
    done = run(sys.executable, "ci/version", "0.2.0", cwd=toy, UV_OFFLINE="1")
    assert done.returncode == 1
    assert wrong in done.stderr
    assert contents(toy) == before


def test_uncommitted_changes_are_named(toy: Path) -> None:
    (toy / "half.py").write_text("")
    done = run(sys.executable, "ci/version", "--bump", "patch", cwd=toy)
    assert done.returncode == 1
    assert "uncommitted changes; commit or stash them first:\n?? half.py" in done.stderr


def test_the_changelog_has_a_part_for_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "\n## [Unreleased]\n" in changelog
    assert f"\n## [{(ROOT / 'VERSION').read_text().strip()}] - 20" in changelog
