"""A group over a real Ray cluster as others see it: `rdt status` of another process, and Ray's metrics, present or not."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from typer.testing import CliRunner

from rdt_core import ModuleReplica, ModuleSource, ModuleWorker, WeightSync
from rdt_core.cli import app
from rdt_core.errors import EngineError, MembershipError
from rdt_core.metrics import missing
from rdt_core.statuscommand import connect, look

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0
PARTS = ("aiohttp_cors", "opencensus", "opentelemetry.exporter.prometheus")


def build() -> torch.nn.Module:
    return torch.nn.Linear(64, 64)


@pytest.fixture(scope="module")
def group(ray_cluster) -> Iterator[WeightSync]:
    """One source rank in this process, one engine rank in another, with the observers that a trainer gets."""
    import ray

    sync = WeightSync.join("seen", source=ModuleSource(build()), rank=0, world_size=1, timeout_s=TIMEOUT_S)
    worker = ray.remote(ModuleWorker).options(num_cpus=0, enable_tensor_transport=True).remote(build)
    sync.attach(ModuleReplica([worker], name="a"))
    yield sync
    sync.leave()
    ray.kill(worker)


def has_parts() -> bool:
    try:
        return all(importlib.util.find_spec(part) for part in PARTS)
    except ModuleNotFoundError:
        return False


def test_a_ray_that_exports_no_metrics_costs_one_line_of_the_log(group: WeightSync, caplog) -> None:
    with caplog.at_level(logging.INFO, "rdt_core"):
        report = group.publish(1)
        # its two steps are one call, whose way there and back is in neither
        assert report.phases["call"] > 0
        group.publish(2)
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("version") for line in lines) == 2
    off = [line for line in lines if "Ray metrics" in line]
    if has_parts():
        assert not off
        assert missing() == ""
    else:
        (line,) = off
        assert line.startswith("syncs are not recorded as Ray metrics: Ray's agent on node ")
        assert "pip install 'rdt-core[metrics]'" in line


def test_a_worker_that_was_killed_is_named_in_a_sentence(ray_cluster) -> None:
    import ray

    workers = [ray.remote(ModuleWorker).options(num_cpus=0).remote(build, rank, 2) for rank in range(2)]
    replica = ModuleReplica(workers, name="mortal")
    replica.health(deadline=time.monotonic() + TIMEOUT_S)
    ray.kill(workers[1])
    try:
        with contextlib.suppress(ray.exceptions.RayActorError):
            while True:  # Ray kills when it gets to it
                ray.get(workers[1].version.remote(), timeout=TIMEOUT_S)
        with pytest.raises(EngineError) as raised:
            replica.health(deadline=time.monotonic() + TIMEOUT_S)
    finally:
        ray.kill(workers[0])
    text = str(raised.value)
    assert text.startswith("engine rank mortal/1 died (called for version): it was killed by `ray.kill` (pid ")
    assert "\n" not in text


def test_another_process_sees_the_group(ray_cluster, group: WeightSync) -> None:
    group.publish(3)
    command = [sys.executable, "-m", "rdt_core.cli", "status", "--group", "seen", "--json"]
    done = subprocess.run(
        command, env={**os.environ, "RAY_ADDRESS": ray_cluster.address}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["groups"]
    assert (found["group"], found["version"], found["last"]["outcome"]) == ("seen", 3, "committed")
    assert found["sources"][0]["pid"] == os.getpid()
    assert found["replicas"][0]["state"] == "serving"
    assert found["replicas"][0]["readers"][0]["pid"] != os.getpid()
    group.publish(4)  # and is not disturbed


def test_what_the_command_prints(group: WeightSync) -> None:
    done = CliRunner().invoke(app, ["status", "--watch"])  # no terminal: one look
    assert done.exit_code == 0, done.output
    assert "group 'seen': version" in done.stdout
    assert "engine rank a/0" in done.stdout
    done = CliRunner().invoke(app, ["status", "--group", "other"])
    assert done.exit_code == 1
    assert "there is no group 'other' in namespace 'rdt'" in done.output
    assert "groups there: 'seen' in namespace 'rdt'" in done.output
    assert look("", "elsewhere", TIMEOUT_S) == []


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_no_cluster_is_said_at_once(address: str) -> None:
    with pytest.raises(MembershipError, match=f"no Ray cluster answers at '{address}'"):
        connect(address)
