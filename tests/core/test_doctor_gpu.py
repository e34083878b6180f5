"""`rdt doctor` on a GPU finds both settings that cost a factor of a thousand, and is content once they are mended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from rdt_core.settings import GET_ZCOPY, visible_nvlinks

pytestmark = pytest.mark.gpu

LIMIT_S = 400
TRANSFERS = ("ucx-get-zcopy", "allocator", "transfer")


def doctor(*arguments: str, **variables: str) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("UCX_", "PYTORCH_"))}
    done = subprocess.run(
        [sys.executable, "-m", "rdt_core.cli", "doctor", *arguments], env={**environment, **variables},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return done.returncode, done.stdout


def bad(text: str) -> list[dict[str, Any]]:
    findings = json.loads(text)["findings"]
    return [one for one in findings if one["severity"] in ("slow", "broken") and one["check"] in TRANSFERS]


def measured(text: str, kind: str) -> dict[str, Any]:
    (found,) = [one for one in json.loads(text)["measured"] if one["device"] == "cuda:0" and one["kind"] == kind]
    assert found["error"] == ""
    assert found["correct"]
    return found


@pytest.mark.skipif(visible_nvlinks() != 0, reason="needs a machine without NVLink in sight")
def test_reads_that_go_over_tcp_are_measured_named_and_mended() -> None:
    status, text = doctor("--json")
    assert status == 1
    prepared = measured(text, "prepared")
    assert prepared["nbytes"] / prepared["seconds"] < 10e9
    checks = [one["check"] for one in bad(text)]
    assert checks[0] == "ucx-get-zcopy"
    assert "transfer" in checks
    assert all(one["env"] == {GET_ZCOPY: "on"} for one in bad(text))
    _, lines = doctor("--fix-env")
    assert f"export {GET_ZCOPY}=on\n" in lines


def test_direct_reads_are_well() -> None:
    _, text = doctor("--json", **{GET_ZCOPY: "on"})
    assert bad(text) == []
    for kind in ("mapped", "prepared", "ray"):
        one = measured(text, kind)
        assert one["memory"] == "parameters"
        assert one["gbps"] > 100
        assert one["verdict"] == "ok"
        if one["backend"]:
            assert "cuda_ipc" in one["lane"] or one["lane_unknown"]


def test_expandable_segments_are_found_and_arenas_are_measured_instead() -> None:
    status, text = doctor("--json", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", **{GET_ZCOPY: "on"})
    assert status == 1
    (one,) = bad(text)
    assert (one["check"], one["env"]) == ("allocator", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"})
    assert measured(text, "prepared")["memory"] == "arena"
    assert measured(text, "prepared")["expandable"] is True
