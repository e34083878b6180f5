"""Whole syncs into stock vLLM: FSDP2 trainers, every executor, publish mode and link kind, and what happens on faults.

Parameters are compared byte for byte with vLLM's own loader; what the engine computes, with transformers. Every run asks
about calls out of order of one rank and of two below the Ray executor, and about deaths of two ranks below vLLM's own;
RDT_THOROUGH=1 asks the others too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rdt_testbed.programs import VLLM_ENVIRONMENT, run
from rdt_testbed.warm import Warm

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
MATRIX = [
    {"options": {"mode": mode, "kinds": [kind], "bucket_bytes": 65536}}
    for mode in ("live", "snapshot", "bucket")
    for kind in ("mapped", "prepared", "ray")
]
DIAGONAL = [MATRIX[0], MATRIX[4], MATRIX[8]]
TP2 = {"tensor_parallel_size": 2}
KEEP = {"cache": "keep", "options": {"verify": "full"}}
#: of each long run: model, engine arguments, groups one after the other
LONG_RUNS = {
    "tp1": ("llama-tied", {}, [MATRIX[0], KEEP, *MATRIX[1:]]),
    "tp2": ("qwen3", TP2, [DIAGONAL[0], KEEP, *DIAGONAL[1:]]),
}


def sync(fork: Warm | None, **settings: Any) -> dict[str, Any]:
    return run(HERE / "sync_program.py", json.dumps(settings), timeout_s=580, environment=VLLM_ENVIRONMENT, fork=fork)


def assert_exact(found: dict[str, Any], groups: list[dict[str, Any]] | None = None, tolerance: float = 1e-4) -> None:
    count = len(groups or [{}])
    assert found["unchanged"] is True
    assert found["equals_loader"] == [True] * count
    for entry in found["syncs"]:
        assert entry["said"] == entry["version"], entry
        if "stamped" in entry:
            assert entry["stamped"] == [str(entry["version"])], entry
            assert entry["max_abs_logprob_error"] < tolerance, entry
            if entry["cache"] == "reset":
                assert entry["long_prompt_error"] < tolerance, entry
        if groups and entry["group"] <= count:
            options = groups[entry["group"] - 1].get("options", {})
            assert entry["mode"] == options.get("mode", entry["mode"])
            assert entry["kinds"] == options.get("kinds", entry["kinds"])
            assert entry["verify"] == options.get("verify", "off")
            assert ("verify" in entry["phases"]) == ("verify" in options)


@pytest.fixture(scope="module", params=["tp1", "tp2"])
def found(request: pytest.FixtureRequest, warm_vllm: Warm | None) -> dict[str, Any]:
    """One engine start for all that can be asked of one engine: every group of it, then calls out of order."""
    kind, engine, groups = LONG_RUNS[request.param]
    failures = request.param == "tp1" or bool(os.environ.get("RDT_THOROUGH"))
    found = sync(
        warm_vllm, kind=kind, engine=engine, groups=groups, in_flight=True, failures=failures, conformance=failures
    )
    return {**found, "groups": groups}


def test_every_group_is_exact(found):
    assert_exact(found, found["groups"])
    pairs = {(entry["mode"], *entry["kinds"]) for entry in found["syncs"]}
    assert pairs >= {
        (group["options"]["mode"], *group["options"]["kinds"]) for group in found["groups"] if "cache" not in group
    }


def test_the_client_keeps_its_protocol(found):
    assert "conforms" in found or found["groups"] is not LONG_RUNS["tp1"][2]


def test_digests_agree_with_vllms_own_checksums(found):
    equal, trained, loaded = found["verified"]["found"]
    # vLLM repacks linear layers on a CPU; its own checksums do not see those either
    assert set(equal.values()) <= {"equal", "not comparable", "not taken"}
    compared = {name for name, state in equal.items() if state == "equal"}
    assert any("input_layernorm" in name for name in compared)
    assert compared == {name for name, state in trained.items() if state == "differs"}
    assert compared == {name for name, state in loaded.items() if state == "differs"}
    same = {name.rpartition(":")[2] for name in found["verified"]["same"]}
    assert same
    assert not same & compared
    assert not found["verified"]["written"]


@pytest.mark.thorough  # every run has two ranks of it in the matrix, and one in test_landing
@pytest.mark.parametrize("engine", [{}, TP2], ids=["tp1", "tp2"])
def test_mixture_of_experts(warm_vllm, engine):
    found = sync(warm_vllm, kind="qwen3-moe", groups=DIAGONAL, engine=engine)
    assert_exact(found, DIAGONAL)


def test_expert_parallel_ranks_hold_what_their_loader_gives(warm_vllm):
    # vLLM's CPU kernel cannot run it, so nothing is generated
    found = sync(warm_vllm, kind="qwen3-moe", generate=False, engine={**TP2, "enable_expert_parallel": True})
    assert_exact(found)
    assert any("w13_weight" in name for name in found["names"])


def test_float32_trainers_feed_a_bfloat16_engine(warm_vllm):
    groups = [
        {"options": {"dtype": "bfloat16", "mode": "snapshot"}},  # cast by the trainer
        {"options": {"dtype": "bfloat16", "mode": "bucket", "bucket_bytes": 4096}},  # less than the largest tensor
        {"options": {"mode": "live"}},  # cast by the engine
    ]
    found = sync(warm_vllm, kind="llama-tied", changes={"vocab_size": 250}, dtype="bfloat16", groups=groups)
    assert_exact(found, groups, tolerance=0.1)
    sizes = {entry["group"]: entry["bytes"] for entry in found["syncs"]}
    assert sizes[1] == sizes[2] == sizes[3] // 2


def test_workers_of_a_ray_executor(warm_vllm):
    engine = {**TP2, "distributed_executor_backend": "ray"}
    found = sync(warm_vllm, kind="qwen3", gpus=2, engine=engine, failures=True)
    assert_exact(found)
    assert_recovered(found)


def test_prefix_caches_follow_the_policy(found):
    kept = [entry for entry in found["syncs"] if entry["cache"] == "keep"]
    # the long prompt's first block was cached under other weights, and is used: that is what keeping means
    assert kept
    assert all(entry["long_prompt_error"] > 0.01 for entry in kept)


def test_a_request_in_flight_gets_every_token(found):
    flight = found["in_flight"]
    assert flight["tokens"] == 100, flight
    assert flight["finish"] == "length"
    assert len(flight["versions"]) == 2


@pytest.mark.parametrize("found", ["tp1", pytest.param("tp2", marks=pytest.mark.thorough)], indirect=True)
def test_calls_out_of_order_are_refused_and_forgotten(found):
    assert_recovered(found)


@pytest.mark.parametrize("size", [pytest.param("tp1", marks=pytest.mark.thorough), "tp2"])
def test_a_dead_trainer_and_a_dead_worker(size):
    kind, engine, _ = LONG_RUNS[size]
    # no forks: what a process's death does to its parent and children is the question
    found = sync(None, kind=kind, engine=engine, faults=True)
    assert_exact(found)
    # a trainer's process ended in the middle of a sync: everybody hears of it in time, no version is stamped
    assert "SyncError" in found["errors"]["trainer_died"]
    assert "source rank 1" in found["errors"]["trainer_died"]
    assert found["trainer_died_after_s"] < 45
    assert found["half_written"]
    before, after = found["version_after_death"]
    assert after is None, "half of the next version has been written"
    assert found["paused_after_death"]
    # the last entry of `syncs` is the sync of another group that healed it, checked by `assert_exact`
    assert found["syncs"][-1]["version"] == before + 2

    assert found["victim"].startswith("VLLM::Worker_TP1" if size == "tp2" else "VLLM::Worker")
    for error in found["errors"]["worker_died"]:
        assert "SyncError" in error or "EngineError" in error, error
    assert found["worker_died_after_s"] < 90


def assert_recovered(found: dict[str, Any]) -> None:
    """After each wrong order of calls a whole sync was exact again (`assert_exact`), and the wrong call said why."""
    errors = found["errors"]
    assert (errors["ahead_sent"], errors["ahead_taken_back"]) == ("True", "True")
    assert found["ahead"]["max_abs_logprob_error"] < 1e-4
    assert found["ahead"]["stamped"] == [str(found["ahead"]["version"])]
    assert "no sync is running" in errors["pull"]
    assert "nothing was committed" in errors["finish"]
    assert "backend rdt takes version" in errors["bad_update"]
    for quiet in (
        "pull_abort",
        "finish_abort",
        "all_abort",
        "lost_ahead",
        "lost_open",
        "lost_pull",
        "lost_finish",
        "bad_abort",
    ):
        assert errors[quiet] == "nothing", quiet
    assert found["version_after_finish"] < 900


def test_a_server_outside_the_cluster_over_http(warm_vllm):
    found = run(HERE / "http_program.py", timeout_s=500, environment=VLLM_ENVIRONMENT, fork=warm_vllm)
    assert found["version_before"] is None
    assert [entry["said"] for entry in found["syncs"]] == [1, 2]
    assert found["differ"]
    assert found["equals_loader"]
    right, wrong = found["verified"]
    assert right["status"] == 0, right["told"]
    assert wrong["status"] == 1, wrong["told"]
    # vLLM repacks linear layers on a CPU
    norms = {name for name in right["states"] if "norm" in name}
    assert {right["states"][name] for name in norms} == {"equal"}
    assert {wrong["states"][name] for name in norms} == {"differs"}
    assert found["after_verify"] == [2, True]
    assert found["last"] == 3
    errors = found["errors"]
    assert "no sync is running" in errors["pull"]
    assert errors["abort"] == errors["connect"] == "nothing"
    assert "rdt.nobody" in errors["no_group"]
    assert "no answer" in errors["gone"]
