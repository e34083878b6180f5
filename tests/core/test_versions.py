"""Floors, mixed states and peers: what is found, what is needed, and the command that mends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rdt_core.distributions import installed, rdt_version
from rdt_core.errors import VersionError
from rdt_core.versions import check_dtypes, check_local, check_peer, current, problems
from rdt_core.wire import WIRE_MAJOR, TensorMeta

pytestmark = pytest.mark.unit

GOOD = {"ray": "2.60.0", "nixl": "1.5.1", "nixl-cu12": "1.5.1", "torch": "2.13.0+cu130", "rdt-vllm": "0.1.0"}


def found(need_nixl: bool = True, **changes: str) -> list[str]:
    return problems(GOOD | {name.replace("_", "-"): version for name, version in changes.items()}, need_nixl, "0.1.0")


def test_good() -> None:
    assert found() == []


@pytest.mark.parametrize(
    "version", ["2.56", "2.56.0", "2.56.0rc1", "2.100.1", "3.0.0.dev0", "2.57.0.dev20261101+g1a2b3c"]
)
def test_ray_new_enough(version: str) -> None:
    assert found(ray=version) == []


@pytest.mark.parametrize("version", ["2.6", "2.6.0", "2.55.9", "2.55.1.post1", "1.13", "2.6.0.dev0"])
def test_ray_too_old(version: str) -> None:
    assert found(ray=version) == [f"found: ray {version}; needed: ray>=2.56; to mend: pip install 'ray>=2.56'"]


def test_ray_that_is_no_version() -> None:
    assert "found: ray nightly;" in found(ray="nightly")[0]


def test_ray_missing() -> None:
    assert found(ray="") == ["found: ray is not installed; needed: ray>=2.56; to mend: pip install 'ray>=2.56'"]


@pytest.mark.parametrize(("version", "good"), [("1.0.0", True), ("1.99", True), ("0.9.0", False), ("2.0", False)])
def test_nixl_range(version: str, good: bool) -> None:
    wrong = found(nixl=version, nixl_cu12="")
    assert (wrong == []) is good
    # a NIXL out of range is refused wherever it is there: Ray would import it
    assert found(need_nixl=False, nixl=version, nixl_cu12="") == wrong


def test_nixl_missing_matters_only_where_it_is_needed() -> None:
    (wrong,) = found(nixl="", nixl_cu12="")
    assert wrong.startswith("found: nixl is not installed;")
    assert "pip install 'nixl" in wrong
    assert found(need_nixl=False, nixl="", nixl_cu12="") == []


def test_backend_without_the_module_ray_imports() -> None:
    (wrong,) = found(nixl="")
    assert "no nixl, nixl-cu12 1.5.1" in wrong
    assert "no module `nixl`" in wrong
    assert "pip install 'nixl>=1.0,<2'" in wrong


def test_backend_of_another_version() -> None:
    (wrong,) = found(nixl_cu12="1.4.0")
    assert "nixl 1.5.1 beside nixl-cu12 1.4.0" in wrong
    assert "'nixl-cu12==1.5.1'" in wrong


def test_adapter_of_another_version() -> None:
    (wrong,) = found(rdt_vllm="0.2.0")
    assert "rdt-vllm 0.2.0 beside rdt-core 0.1.0" in wrong


def test_this_installation() -> None:
    mine = check_local(need_nixl=True)
    assert mine == current()
    assert mine.wire_major == WIRE_MAJOR
    assert mine.rdt == rdt_version() == installed("rdt-core")


def in_a_process(tmp_path: Path, distributions: dict[str, str], code: str) -> str:
    """Runs code where these distributions seem to be installed, in these versions. Returns what it printed."""
    for name, version in distributions.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr


CHECK = "from rdt_core.versions import check_local; check_local(need_nixl=True)"


def test_an_old_ray_and_a_mixed_rdt_are_refused_together(tmp_path: Path) -> None:
    text = in_a_process(tmp_path, {"ray": "2.6.0", "rdt-vllm": "9.9"}, CHECK)
    assert "rdt_core.errors.VersionError: this process cannot take part in a sync" in text
    assert "found: ray 2.6.0; needed: ray>=2.56; to mend: pip install 'ray>=2.56'" in text
    assert f"rdt-vllm 9.9 beside rdt-core {rdt_version()}" in text


def test_a_nixl_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("raise OSError('libucs.so.0: cannot open shared object file')")
    text = in_a_process(tmp_path, {}, CHECK)
    assert "`import nixl._api` fails: libucs.so.0" in text
    assert "VersionError" in text


def test_peers() -> None:
    mine = current()
    check_peer(mine, mine, "source rank 3")
    check_peer(mine, msgspec.structs.replace(mine, nixl="", wire_minor=99, rdt="0.9"), "source rank 3")


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"wire_major": WIRE_MAJOR + 1, "rdt": "7.0"}, [f"wire format {WIRE_MAJOR + 1}.", "rdt 7.0", "rdt-core=="]),
        ({"ray": "2.6.1"}, ["ray 2.6.1", "ray>=2.56", "there: pip install 'ray>=2.56'"]),
        ({"ray": ""}, ["ray (none)"]),
        ({"nixl": "2.1"}, ["nixl 2.1"]),
        ({"torch": "2.6.0"}, ["torch 2.6.0", "torch>=2.7"]),
    ],
)
def test_peer_refused(change: dict, texts: list[str]) -> None:
    mine = current()
    with pytest.raises(VersionError) as caught:
        check_peer(mine, msgspec.structs.replace(mine, **change), "source rank 3")
    for text in ("source rank 3", "found:", "needed:", "to mend:", *texts):
        assert text in str(caught.value)


def test_dtypes() -> None:
    check_dtypes([TensorMeta(name="a", shape=(1,), dtype="bfloat16")], "source rank 0")
    with pytest.raises(VersionError, match=r"source rank 0 publishes 'a' as float6.*torch"):
        check_dtypes([TensorMeta(name=name, shape=(1,), dtype="float6") for name in "ab"], "source rank 0")
