"""`SGLangServer`: ranks in given bundles over two nodes, requests in flight over syncs, a crash, and a new start."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdt_testbed.programs import SGLANG_ENVIRONMENT, run

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent


def test_a_server_serves_syncs_crashes_and_starts_again():
    # no forks: what a scheduler's death does to the others and what it leaves behind are among the questions
    found = run(HERE / "server_program.py", timeout_s=590, environment=SGLANG_ENVIRONMENT)
    assert all(name.startswith("sglang 0.5.") for name in found["names"])
    assert found["before"] is None
    *before, last = found["syncs"]
    for entry in found["syncs"]:
        assert entry["said"] == entry["version"], entry
        assert entry["stamped"] == [str(entry["version"])], entry
        assert entry["error"] < 1e-4, entry
    assert [entry["readers"] for entry in before] == [2, 2, 2]
    assert last["readers"] == 1

    # every token is delivered; after "retract" even the earlier tokens' keys and values are those of the new weights
    for mode in ("retract", "in_place"):
        flight = found[mode]
        assert flight["tokens"] == 160, flight
        assert flight["finish"] == "length"
        assert 0 < flight["switch"] < 160
        assert flight["said"]
    assert found["retract"]["error"] < 1e-3
    assert found["in_place"]["error"] > 1e-2
    assert found["imported"] == [False, False]

    refused, half = found["faults"]["refused"], found["faults"]["half_way"]
    for error in refused["errors"]:
        assert "failed in begin" in error, error
        assert "end it with end_weight_update first" in error, error
    # no byte moved: it is stamped as before, and whole
    assert refused["said"] == refused["before"] is not None
    assert [(one["torn"], one["phase"]) for one in refused["status"]] == [(None, "idle")] * 2
    assert all("the trainer ran into something" in error for error in half["errors"])
    assert half["before"] == refused["said"]
    assert half["said"] is None
    assert half["stamp"] == f"receiving {half['version']}"
    assert [(one["version"], one["phase"]) for one in half["status"]] == [(None, "torn")] * 2
    assert "refuses to generate" in found["faults"]["generates"], found["faults"]["generates"]

    for error in found["killed"]:
        assert "SyncError" in error or "EngineError" in error, error
        assert "failed in pull" in error, error
        assert "scheduler 1 of 2 died" in error, error
    assert found["killed_after_s"] < 60
    assert "is dead: scheduler 1 of 2 died" in found["waiting"]
    assert found["alive"] is False
    assert "is dead: scheduler 1 of 2 died" in found["reason"]
    assert found["files"]
    assert found["left_by_crash"] == []
    assert found["before_again"] is None
    assert found["left"] == []
