"""Which SGLang is accepted, and that the package says so before anything else fails."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from rdt_core.errors import VersionError
from rdt_sglang import versions

pytestmark = pytest.mark.unit


def test_the_installed_release_is_one_that_was_tested():
    assert versions.check_sglang() == importlib.metadata.version("sglang")


@pytest.mark.parametrize("found", ["0.5.23", "0.5.23.post1", "0.5.23+cpu"])
def test_supported(found):
    assert versions.check_sglang(found) == found


@pytest.mark.parametrize("found", ["0.5.22", "0.5.24", "0.6.0", "0.0.0.dev0", "main-3f2a"])
def test_others_are_refused_with_what_was_found_and_the_command(found):
    with pytest.raises(VersionError) as raised:
        versions.check_sglang(found)
    assert str(raised.value) == f"found SGLang {found}; needed: SGLang 0.5.23. pip install 'sglang<0.5.24,>=0.5.23'"


def test_a_missing_one_is_said(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="not installed"):
        versions.check_sglang()


def test_the_extra_declares_the_same_range():
    requirements = [Requirement(text) for text in importlib.metadata.requires("rdt-sglang") or ()]
    (extra,) = [requirement for requirement in requirements if requirement.name == "sglang"]
    assert extra.specifier == versions.REQUIREMENT
    assert all(extra.specifier.contains(one) for one in versions.SUPPORTED)


def test_importing_the_package_needs_no_sglang():
    code = (
        "import sys; sys.modules['sglang'] = None\n"
        "import rdt_sglang, rdt_sglang.plugin, rdt_sglang.versions\n"
        "assert set(rdt_sglang.__all__) == set(dir(rdt_sglang))\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules\n"
        "try: rdt_sglang.SglangLanding\n"
        "except rdt_sglang.MissingSglangError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "pip install" in done.stdout


def test_another_name_is_an_attribute_error():
    import rdt_sglang

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = rdt_sglang.nonsense
