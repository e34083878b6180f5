"""The packages without an engine or a trainer yet import, and say what they will need when they are used."""

from __future__ import annotations

import importlib
import importlib.metadata

import pytest
from packaging.requirements import Requirement

from rdt_core.errors import VersionError

pytestmark = pytest.mark.unit

ROOMS = [
    ("rdt_megatron", "MegatronSource", "megatron-core"),
]


@pytest.mark.parametrize(("package", "name", "framework"), ROOMS)
def test_a_name_to_come_says_found_needed_and_what_to_use(package: str, name: str, framework: str) -> None:
    module = importlib.import_module(package)
    assert name in module.__all__
    with pytest.raises(VersionError) as raised:
        getattr(module, name)
    text = str(raised.value)
    assert text.startswith(f"{package}.{name} is not in this version yet")
    assert f"found: {framework} {importlib.metadata.version(framework)}" in text
    assert "pip install" in text


@pytest.mark.parametrize(("package", "name", "framework"), ROOMS)
def test_a_missing_framework_is_said(package: str, name: str, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(distribution: str) -> str:
        raise importlib.metadata.PackageNotFoundError(distribution)

    module = importlib.import_module(package)
    monkeypatch.setattr(importlib.metadata, "version", nothing)
    with pytest.raises(VersionError, match=f"found: no {framework}"):
        getattr(module, name)


@pytest.mark.parametrize(("package", "name", "framework"), ROOMS)
def test_the_range_is_that_of_the_extra(package: str, name: str, framework: str) -> None:
    requirements = [Requirement(text) for text in importlib.metadata.requires(package.replace("_", "-")) or ()]
    (extra,) = [requirement for requirement in requirements if requirement.name == framework]
    with pytest.raises(VersionError) as raised:
        getattr(importlib.import_module(package), name)
    needed = str(raised.value).split(f"will need {framework}")[1].split()[0]
    assert Requirement(f"{framework}{needed}").specifier == extra.specifier


@pytest.mark.parametrize("package", ["rdt_megatron"])
def test_another_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = importlib.import_module(package).nonsense
