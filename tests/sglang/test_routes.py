"""Stock SGLang servers behind a URL: with scheduler actors, with plain processes, and started by rdt's launcher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rdt_testbed.programs import SGLANG_ENVIRONMENT, run
from rdt_testbed.warm import Warm

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent


def http(fork: Warm | None, trainers: Warm | None = None, **settings: Any) -> dict[str, Any]:
    if trainers:
        settings["python"] = trainers.python
    return run(HERE / "http_program.py", json.dumps(settings), timeout_s=590, environment=SGLANG_ENVIRONMENT, fork=fork)


def assert_exact(found: dict[str, Any], ranks: int) -> None:
    assert found["before"] is None
    for entry in found["syncs"]:
        assert entry["said"] == entry["version"], entry
        assert entry["stamped"] == [str(entry["version"])], entry
        assert entry["readers"] == ranks
        assert entry["error"] < 1e-4, entry
    for mode in ("retract", "in_place"):
        flight = found[mode]
        assert flight["tokens"] == 160, flight
        assert 0 < flight["switch"] < 160
        assert flight["versions"][1] == str(flight["published"])
    assert found["retract"]["error"] < 1e-3
    assert found["in_place"]["error"] > 1e-2
    assert found["unchanged"]
    right, wrong = found["verified"]
    assert right["status"] == 0, right["told"]
    assert set(right["states"].values()) == {"equal"}
    assert wrong["status"] == 1, wrong["told"]
    assert list(wrong["states"].values()).count("differs") > 10
    errors = found["errors"]
    assert "no sync is running" in errors["pull"]
    assert errors["abort"] == "nothing"
    assert "no answer" in errors["gone"]
    assert all("the trainer ran into something" in error for error in found["torn"])
    assert "status 503" in found["torn_request"]  # nobody has resumed anything since the sync failed
    assert "this replica refuses to generate" in found["torn_request"]
    assert found["torn_version"] is None
    refused = found["refused"]
    assert "status 401" in refused["key"]
    assert "status 401" in refused["actors_key"]
    for what, told in {
        "call": "no call 'shutdown'", "arguments": "version is a str", "body": "call, arguments and timeout_s",
        "timeout": "timeout_s must be", "large": "larger than",
    }.items():  # fmt: skip
        assert told in refused[what], refused[what]
    assert "acknowledged no pause" in refused["begin"]


def test_stock_server_with_scheduler_actors(warm_sglang, warm_vllm):
    found = http(warm_sglang, trainers=warm_vllm, ray=True, tp=1)
    assert_exact(found, 1)
    assert [actor["state"] for actor in found["actors"]["actors"]] == ["ALIVE"]
    assert found["errors"]["found"] == "nothing"
    assert "sglang_scheduler_node" in found["errors"]["namespace"]
    assert "'elsewhere'" in found["errors"]["namespace"]
    # who only knows the URL needs nothing of SGLang
    assert found["imported"][1] is False


def test_stock_server_with_plain_processes(warm_sglang, warm_vllm):
    found = http(warm_sglang, trainers=warm_vllm, ray=False, tp=2)
    assert_exact(found, 2)
    assert found["actors"]["mode"] == "processes"
    assert len(found["actors"]["pids"]) == 2
    assert "has plain scheduler processes" in found["errors"]["found"]
    assert found["imported"] == [False, False]


def test_server_of_rdts_launcher(warm_sglang):
    found = http(warm_sglang, ray=True, tp=1, launcher=True)
    assert found["engines"] == 1
    assert found["handles"] == 1
    assert found["by_name"] == "nothing"
    assert "0 engines fit in namespace 'elsewhere'" in found["elsewhere"]
    assert "in 'engines'" in found["elsewhere"]
