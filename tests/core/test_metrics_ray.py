"""Metrics of syncs where people read them: in the Prometheus endpoint of Ray's agent, with a real Ray that has its parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdt_core.metrics import METRICS, SECONDS
from rdt_testbed import programs
from rdt_testbed.overlay import overlay

pytestmark = [pytest.mark.integration, pytest.mark.thorough]


def test_a_real_ray_exports_every_metric(tmp_path: Path) -> None:
    # all other tests are quicker without these parts: each node's agent takes seconds longer to start with them
    parts = overlay("ray[default]", tmp_path / "parts")
    result = programs.run(
        Path(__file__).parent / "metrics_program.py", timeout_s=400, environment={"PYTHONPATH": str(parts)}
    )
    found = result["metrics"]

    def value(name: str, **tags: str) -> float:
        (one,) = [value for labels, value in found[name] if tags.items() <= labels.items()]
        return one

    assert value("rdt_syncs_total", outcome="committed") == 2
    assert value("rdt_syncs_total", outcome="failed") == 1
    assert value("rdt_sync_failures_total", group="policy") == 1
    assert value("rdt_version", group="policy") == 2
    assert value("rdt_sync_bytes_total", kind="mapped", mode="live") == 2 * 4 * (64 * 64 + 64)
    assert value("rdt_sync_gigabytes_per_second") > 0
    assert value("rdt_link_gigabytes_per_second", kind="mapped") > 0
    assert value("rdt_slow_links") == 0
    assert sum(number for _, number in found["rdt_replicas"]) == 1
    assert value("rdt_last_sync_timestamp_seconds", outcome="failed") > value(
        "rdt_last_sync_timestamp_seconds", outcome="committed"
    )
    for phase in ("begin", "pause", "pull", "finish", "total"):
        assert value("rdt_sync_seconds_count", phase=phase, outcome="committed") == 2
    assert value("rdt_sync_seconds_count", phase="total", outcome="failed") == 1
    bounds = {labels["le"] for labels, _ in found["rdt_sync_seconds_bucket"]}
    assert {float(bound) for bound in bounds} == {*SECONDS, float("inf")}
    for name, (_, tags, _) in METRICS.items():
        labels = found.get(name, found.get(f"{name}_count"))[0][0]
        assert labels.keys() == set(tags)
    assert result["best_ms"] < 1
