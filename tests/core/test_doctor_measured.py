"""`rdt doctor` as people run it: real processes, real NIXL, a wrong setting that makes them slow, and the mend that works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

LIMIT_S = 300


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.run(
        [sys.executable, "-m", "rdt_core.cli", "doctor", *arguments], env={**environment, **variables},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def read(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The measured transfers by kind, and the findings about them that are slow or broken."""
    report = json.loads(done.stdout)
    bad = [one for one in report["findings"] if one["severity"] in ("slow", "broken")]
    return {one["kind"]: one for one in report["measured"]}, bad


def test_a_list_of_transports_without_cma_is_found_by_its_lane() -> None:
    # UCX logs into standard output here, which must not reach the report
    done = doctor("--size", "32MiB", "--json", UCX_TLS="tcp", UCX_LOG_LEVEL="debug")
    assert done.returncode == 1, done.stderr
    measured, bad = read(done)
    assert {kind: (one["error"], one["correct"]) for kind, one in measured.items()} == dict.fromkeys(
        ("mapped", "prepared", "ray"), ("", True)
    )
    assert measured["prepared"]["backend"] == "UCX"
    assert measured["prepared"]["lane"].startswith("software emulation tcp")
    assert measured["mapped"]["lane"] == ""
    assert all(one["seconds"] > 0 and one["copy_seconds"] > 0 for one in measured.values())
    slow = [one for one in bad if one["env"] == {"UCX_TLS": "all"}]
    assert [one["check"] for one in slow] == ["ucx-transports", "transfer", "transfer"]
    assert measured["prepared"]["verdict"] == measured["ray"]["verdict"] == "slow"
    assert all(one["limit_gbps"] > 0 for one in measured.values())
    assert all(one["gbps"] == one["nbytes"] / one["seconds"] / 1e9 for one in measured.values())


@pytest.mark.thorough
def test_the_mend_works() -> None:
    fixed = doctor("--size", "32MiB", "--fix-env", UCX_TLS="tcp")
    assert (fixed.stdout, fixed.returncode) == ("export UCX_TLS=all\n", 1)
    done = doctor("--size", "32MiB", "--json", UCX_TLS="all")
    measured, bad = read(done)
    assert measured["prepared"]["lane"] == "zero-copy cma/memory"
    assert [one for one in bad if one["check"].startswith(("ucx", "transfer"))] == []
    assert done.returncode == (1 if bad else 0)


HEAD = """
import sys
from ray.cluster_utils import Cluster
args = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=args)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["", "tokens", "token"])
def test_a_cluster_that_asks_for_a_token_is_named_at_once(mode: str, tmp_path: Path) -> None:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2, "HOME": str(tmp_path)}
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD],
        env={**os.environ, **token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert head.stdout is not None
        address = next(line.strip() for line in head.stdout if line.startswith("127.") or line.strip()[-1:].isdigit())
        sent = {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": "f" * 32} if mode else {"RAY_AUTH_TOKEN": ""}
        began = time.monotonic()
        done = doctor("--cluster", "--no-measure", "--address", address, HOME=str(tmp_path), **sent)
        seconds = time.monotonic() - began
    finally:
        head.communicate(timeout=LIMIT_S)
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("rdt doctor: ")]
    assert (done.returncode, done.stdout) == (2, "")
    assert said.startswith(f"rdt doctor: the Ray cluster at '{address}' ")
    assert ("does not take this process's token" if mode == "token" else "asks for a token") in said
    assert seconds < 15  # Ray itself tries for 20 s


@pytest.mark.thorough
def test_a_cluster_is_examined_node_by_node_and_between_nodes() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False},
    )
    try:
        cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
        done = doctor("--cluster", "--address", cluster.address, "--size", "32MiB", "--json")
    finally:
        cluster.shutdown()
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    names = [one["hostname"] for one in report["nodes"]]
    assert len(set(names)) == 2  # two raylets of one machine
    assert [one["error"] for one in report["measured"]] == [""] * 7
    (far,) = [one for one in report["measured"] if one["cross_node"]]
    assert [far["source"], far["reader"]] == names
    assert far["correct"]
