"""The wheels are complete; each installs and imports alone, in an environment without any framework of either side."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.metadata import Metadata

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PACKAGES = ("rdt-core", "rdt-megatron", "rdt-sglang", "rdt-vllm")
FRAMEWORKS = ("megatron", "sglang", "transformers", "vllm")
VERSION = (ROOT / "VERSION").read_text().strip()

# Imports every module of the package, except those for inside its framework, and asks for every public name, which must
# be there or be refused with an error that names the framework. Prints the frameworks that came in on the way.
IMPORT_ALL = """
import importlib, importlib.metadata, importlib.util, pkgutil, sys
from rdt_core.errors import VersionError
package, framework = sys.argv[1:3]
assert not [name for name in sys.argv[3:] if importlib.util.find_spec(name)], "the environment is not clean"
root = importlib.import_module(package)
assert root.__file__.startswith(sys.prefix), root.__file__
count = 0
for module in pkgutil.walk_packages(root.__path__, package + "."):
    try:
        importlib.import_module(module.name)
        count += 1
    except ModuleNotFoundError as error:
        if not framework or not (error.name or "").startswith(framework):
            raise
for name in getattr(root, "__all__", ()):
    try:
        getattr(root, name)
    except VersionError as error:
        assert framework and framework in str(error) and "pip install" in str(error), error
print(count, [name for name in sys.argv[3:] if name in sys.modules])
"""


#: what would lead a process in an environment of its own to another one's packages
ELSEWHERE = ("PYTHONHOME", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT", "VIRTUAL_ENV")


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ELSEWHERE}


def uv(*arguments: str | Path, cwd: Path = ROOT) -> None:
    """Runs uv outside this environment; its output is part of the error."""
    command = [sys.executable, "-m", "uv", "--no-progress", *map(str, arguments)]
    result = subprocess.run(command, cwd=cwd, env=variables(), capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}\n{result.stderr}"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the documented command makes: source distributions, and the wheels that were built from them."""
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--all-packages", "--out-dir", folder)
    return folder


@pytest.fixture(scope="module")
def constraints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lock's versions, so that a clean environment gets what was tested (and what the cache already holds)."""
    path = tmp_path_factory.mktemp("lock") / "constraints.txt"
    ours = ("--no-emit-workspace", "--no-emit-package", "rdt-testbed")
    uv("export", "--frozen", "--all-packages", *ours, "--no-hashes", "--quiet", "--output-file", path)
    return path


def test_packages_and_nothing_else_are_built(dist: Path) -> None:
    """Whoever lets pip look in that folder, or publishes it, finds nothing there that only tests need."""
    made = {path.name for path in dist.iterdir() if not path.name.startswith(".")}
    assert made == {
        f"{package.replace('-', '_')}-{VERSION}{kind}"
        for package in PACKAGES
        for kind in (".tar.gz", "-py3-none-any.whl")
    }


def wheel_of(dist: Path, package: str) -> Path:
    return dist / f"{package.replace('-', '_')}-{VERSION}-py3-none-any.whl"


def raw_metadata(archive: Path) -> bytes:
    """Returns METADATA of a wheel, or PKG-INFO of a source distribution."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
            return wheel.read(name)
    with tarfile.open(archive) as source:
        name = f"{archive.name.removesuffix('.tar.gz')}/PKG-INFO"
        return source.extractfile(name).read()


def metadata_of(wheel: Path) -> Message:
    return Parser().parsestr(raw_metadata(wheel).decode())


@pytest.mark.parametrize("package", PACKAGES)
def test_metadata(dist: Path, package: str) -> None:
    metadata = metadata_of(wheel_of(dist, package))
    assert (metadata["Name"], metadata["Version"]) == (package, VERSION)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == "<3.14,>=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert len(str(metadata.get_payload())) > 200, "the README is missing from the metadata"
    assert metadata["Summary"]


@pytest.mark.parametrize("package", PACKAGES)
def test_metadata_is_what_an_index_accepts(dist: Path, package: str) -> None:
    wheel = wheel_of(dist, package)
    for archive in (wheel, dist / f"{wheel.name.removesuffix('-py3-none-any.whl')}.tar.gz"):
        metadata = Metadata.from_email(raw_metadata(archive), validate=True)
        links = re.findall(r"\]\((?!https://|#)[^)]*\)", metadata.description or "")
        assert not links, f"{archive.name}: {links} lead nowhere outside this repository"
        assert not [requirement for requirement in metadata.requires_dist or () if requirement.url], (
            "an index refuses URLs"
        )


@pytest.mark.parametrize("package", PACKAGES)
def test_frameworks_are_extras_and_the_core_is_pinned(dist: Path, package: str) -> None:
    requirements = metadata_of(wheel_of(dist, package)).get_all("Requires-Dist")
    always = [requirement for requirement in requirements if "extra ==" not in requirement]
    if package != "rdt-core":
        assert always == [f"rdt-core=={VERSION}"]
        assert len(requirements) > 1, "an adapter names its framework as an extra"
    assert not [requirement for requirement in always if requirement.startswith(FRAMEWORKS)]


@pytest.mark.parametrize("package", PACKAGES)
def test_contents(dist: Path, package: str) -> None:
    module = package.replace("-", "_")
    with zipfile.ZipFile(wheel_of(dist, package)) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {module, f"{module}-{VERSION}.dist-info"}
    assert f"{module}/py.typed" in names
    assert f"{module}-{VERSION}.dist-info/licenses/LICENSE" in names
    source = {
        str(path.relative_to(ROOT / "packages" / package / "src"))
        for path in (ROOT / "packages" / package / "src" / module).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert source <= set(names)
    with tarfile.open(dist / f"{module}-{VERSION}.tar.gz") as archive:
        kept = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "PKG-INFO", "pyproject.toml"} <= kept
    assert {f"src/{name}" for name in source} <= kept


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment."""
    folder = tmp_path_factory.mktemp("clean") / "environment"
    uv("venv", "--python", sys.executable, folder, cwd=folder.parent)
    return folder


def run(environment: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    # bytecode goes away with the environment; without any, each run would compile torch and Ray anew
    env = {**variables(), "PYTHONPYCACHEPREFIX": str(environment / "bytecode")}
    return subprocess.run(
        list(map(str, command)), cwd=environment, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("package", "framework"),
    [("rdt-core", ""), ("rdt-megatron", "megatron"), ("rdt-sglang", "sglang"), ("rdt-vllm", "vllm")],
)
def test_installs_and_imports_alone(
    dist: Path, constraints: Path, environment: Path, package: str, framework: str
) -> None:
    python = environment / "bin" / "python"
    uv(
        *("pip", "install", "--python", python, "--find-links", dist, "--constraint", constraints),
        f"{package}=={VERSION}",
        cwd=environment,
    )
    result = run(environment, python, "-c", IMPORT_ALL, package.replace("-", "_"), framework, *FRAMEWORKS)
    assert result.returncode == 0, result.stderr
    modules, frameworks = result.stdout.split(maxsplit=1)
    assert frameworks.strip() == "[]", "a framework was imported by importing us"
    assert int(modules) > 10 or package in ("rdt-megatron", "rdt-sglang", "rdt-vllm")
    if package == "rdt-core":
        shown = run(environment, environment / "bin" / "rdt", "--help")
        assert shown.returncode == 0, shown.stderr
        assert "demo" in shown.stdout
    else:
        refuses_another_core(environment, package)
        # the next one comes alone as well
        uv("pip", "uninstall", "--python", python, package, cwd=environment)


def refuses_another_core(environment: Path, package: str) -> None:
    """Asks the installed adapter to work with a core that says it is of another release."""
    (metadata,) = environment.glob("lib/python*/site-packages/rdt_core-*.dist-info/METADATA")
    kept = metadata.with_name("KEPT")
    # what the installer linked here is the cache's file
    metadata.rename(kept)
    metadata.write_text(kept.read_text().replace(f"\nVersion: {VERSION}\n", "\nVersion: 9.9.9\n"))
    result = run(environment, environment / "bin" / "python", "-c", f"import {package.replace('-', '_')}")
    kept.replace(metadata)
    assert result.returncode == 1
    assert f"{package} {VERSION} beside rdt-core 9.9.9" in result.stderr
    assert f"pip install 'rdt-core==9.9.9' '{package}==9.9.9'" in result.stderr
