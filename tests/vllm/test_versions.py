from __future__ import annotations

import subprocess
import sys

import pytest

import rdt_vllm
from rdt_core.errors import VersionError
from rdt_vllm.versions import MissingVllmError, check_vllm, find_vllm

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("found", ["0.32.0", "0.32.7", "0.32.1rc2", "0.32.0+cpu", "0.32.1.dev5+gabc"])
def test_tested_releases_are_taken(found):
    assert check_vllm(found) == found


@pytest.mark.parametrize("found", ["0.31.9", "0.33.0", "0.33.0rc1", "1.0.0", "0.4.0", "0.0.0", "0.1.dev1"])
def test_other_releases_say_what_was_found_what_is_needed_and_the_command(found):
    with pytest.raises(VersionError) as caught:
        check_vllm(found)
    assert f"found vLLM {found}" in str(caught.value)
    assert ">= 0.32, < 0.33" in str(caught.value)
    assert "pip install 'vllm>=0.32,<0.33'" in str(caught.value)


def test_a_missing_vllm_is_an_import_error_with_the_command(monkeypatch):
    monkeypatch.setattr("rdt_vllm.versions.find_vllm", lambda: None)
    with pytest.raises(ImportError, match=r"not installed.*pip install 'vllm"):
        check_vllm()
    with pytest.raises(MissingVllmError):
        rdt_vllm.VllmLanding  # noqa: B018


def test_the_installed_vllm_is_found_without_importing_it():
    code = "import sys, rdt_vllm.versions as v; v.find_vllm(); assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert find_vllm() is not None


def test_the_package_imports_neither_vllm_nor_its_engine_side():
    code = (
        "import sys, rdt_vllm; rdt_vllm.VllmHttpEngine; rdt_vllm.VllmRayEngine; rdt_vllm.launch; "
        "assert not {'vllm', 'rdt_vllm.engine', 'rdt_vllm.landing'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_public_surface_is_what_all_says():
    assert sorted(rdt_vllm.__all__) == list(rdt_vllm.__all__)
    assert set(rdt_vllm._HOMES) == set(rdt_vllm.__all__)
    with pytest.raises(AttributeError, match="VllmThing"):
        rdt_vllm.VllmThing  # noqa: B018
