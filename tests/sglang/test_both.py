"""One trainer, two engines of two kinds and two tensor-parallel sizes, at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdt_testbed.programs import SGLANG_ENVIRONMENT, run

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent


def test_one_trainer_feeds_vllm_and_sglang_at_the_same_time(warm_sglang):
    found = run(HERE / "both_program.py", timeout_s=590, environment=SGLANG_ENVIRONMENT, fork=warm_sglang)
    assert [name.split()[0] for name in found["names"]] == ["vllm", "sglang"]
    alone, *together = found["syncs"]
    assert alone["readers"] == ["vllm/0"]
    assert [(entry["engine"], entry["version"]) for entry in together] == [
        (engine, version) for version in (1, 2, 3) for engine in ("vllm", "sglang")
    ]
    for entry in found["syncs"]:
        assert entry["said"] == entry["version"], entry
        assert entry["stamped"] == [str(entry["version"])], entry
        assert entry["error"] < 1e-4, entry
    for entry in together:
        late = entry["version"] == 1
        assert entry["readers"] == ["sglang/0", "sglang/1", *([] if late else ["vllm/0"])]
    for one, other in zip(together[::2], together[1::2], strict=True):
        assert one["tokens"] == other["tokens"]
    assert together[0]["tokens"] != together[4]["tokens"]
    assert found["serving"] == [300, 300]
    assert found["newcomer"] is None
    assert found["imported"] == [False, False]
