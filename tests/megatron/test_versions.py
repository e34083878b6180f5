"""Which Megatron-Core works, and what one is told otherwise."""

from __future__ import annotations

import importlib.metadata

import pytest
from packaging.requirements import Requirement

from rdt_core.errors import VersionError
from rdt_megatron import check_megatron
from rdt_megatron.versions import REQUIREMENT

pytestmark = pytest.mark.unit


def test_the_installed_release_works() -> None:
    assert check_megatron() == importlib.metadata.version("megatron-core")


@pytest.mark.parametrize("found", ["0.16.0", "0.17.1rc0", "0.19.2"])
def test_releases_that_work(found: str) -> None:
    assert check_megatron(found) == found


@pytest.mark.parametrize("found", ["0.15.3", "0.20.0", "unknown"])
def test_releases_that_were_not_tested_are_refused(found: str) -> None:
    with pytest.raises(VersionError, match=rf"found megatron-core {found}; needed: .*pip install") as raised:
        check_megatron(found)
    assert isinstance(raised.value, ImportError)


def test_none_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing)
    monkeypatch.delitem(__import__("sys").modules, "megatron.core", raising=False)
    with pytest.raises(VersionError, match="Megatron-Core is not installed"):
        check_megatron()


def test_the_extra_asks_for_the_same_releases() -> None:
    asked = [Requirement(text) for text in importlib.metadata.requires("rdt-megatron") or ()]
    assert [one.specifier for one in asked if one.name == "megatron-core"] == [REQUIREMENT]
