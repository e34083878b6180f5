"""Metrics of syncs: what is recorded of each outcome, and that a Ray which exports nothing costs one line of the log."""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from rdt_core import metrics
from rdt_core.metrics import METRICS, RayMetrics
from rdt_core.outcomes import SyncOutcome
from rdt_testbed.halves import Group

pytestmark = pytest.mark.unit


class Kept:
    """Keeps what is recorded, and holds it to the tags that the metric was made with."""

    def __init__(self, name: str) -> None:
        self.tags = set(METRICS[name][1])
        self.values: dict[tuple[str, ...], list[float]] = defaultdict(list)

    def keep(self, value: float, tags: dict[str, str]) -> None:
        assert tags.keys() == self.tags
        assert all(isinstance(tag, str) for tag in tags.values())
        self.values[tuple(tags[name] for name in sorted(tags))].append(value)

    observe = inc = set = keep


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kept]:
    made = {name: Kept(name) for name in METRICS}
    monkeypatch.setattr(metrics, "missing", lambda: "")
    monkeypatch.setattr(metrics, "_make", lambda: made)
    return made


def broken() -> None:
    raise OSError("the link is down")


def test_what_is_recorded(kept: dict[str, Kept]) -> None:
    told: list[SyncOutcome] = []
    group = Group(2, 1, names=("a", "b"), mode="live", policy="best_effort", observers=[RayMetrics(), told.append])
    try:
        group.publish(1)
        group.spoil(broken, name="b")
        group.publish(2)
        group.spoil(broken, name="a")
        group.fails(3, policy="require_all")
    finally:
        group.close()

    def last(name: str, *tags: str) -> float:
        return kept[name].values[tags][-1]

    assert kept["rdt_syncs_total"].values == {
        ("test", "live", outcome): [1] for outcome in ("committed", "partial", "failed")
    }
    (error,) = kept["rdt_sync_failures_total"].values
    assert error == (told[2].error_kind, "test", "live")
    seconds = kept["rdt_sync_seconds"].values
    assert seconds["test", "live", "committed", "total"] == [told[0].seconds]
    for phase in ("pull", "commit", "stamp"):
        assert seconds["test", "live", "committed", phase] == [told[0].report.phases[phase]]
    assert seconds["test", "live", "failed", "total"] == [told[2].seconds]
    assert kept["rdt_sync_bytes_total"].values["test", "local", "live"] == [told[0].bytes, told[1].bytes]
    assert last("rdt_sync_gigabytes_per_second", "test", "live") == told[1].gbps
    assert last("rdt_link_gigabytes_per_second", "test", "local", "live") == told[1].kinds["local"]["gbps"]
    replicas = kept["rdt_replicas"].values
    assert replicas["test", "serving"] == [2, 1, list(told[2].replicas.values()).count("serving")]
    assert replicas["test", "torn"] == [0, 1, list(told[2].replicas.values()).count("torn")]
    assert replicas["test", "absent"] == [0, 0, 0]
    assert kept["rdt_version"].values["test",] == [1, 2]
    assert last("rdt_last_sync_timestamp_seconds", "test", "failed") == told[2].time


@pytest.mark.parametrize(("observer", "level"), [(RayMetrics(), "WARNING"), (RayMetrics(asked=False), "INFO")])
def test_off_is_said_once(observer: RayMetrics, level: str, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    asked: list[int] = []

    def missing() -> str:
        asked.append(1)
        return "parts are missing"

    monkeypatch.setattr(metrics, "missing", missing)
    outcome = SyncOutcome(time=0.0, group="policy", version=1, mode="live", outcome="failed", seconds=1.0)
    with caplog.at_level(logging.INFO, "rdt_core.metrics"):
        observer(outcome)
        observer(outcome)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (level, "syncs are not recorded as Ray metrics: parts are missing")
    ]
    assert len(asked) == 1


@pytest.mark.parametrize("name", METRICS)
def test_names_and_units(name: str) -> None:
    kind, tags, description = METRICS[name]
    assert kind in ("Counter", "Gauge", "Histogram")
    assert name.startswith("rdt_")
    assert name.endswith("_total") == (kind == "Counter")
    assert "group" in tags
    assert description.endswith(".")


def test_recording_takes_less_than_a_millisecond() -> None:
    """With Ray's own metrics, in a process that is not connected: they record as they do in one that is."""
    observer: Any = RayMetrics()
    observer._metrics = metrics._make()
    told: list[SyncOutcome] = []
    group = Group(2, 2, names=("a", "b"), observers=[told.append])
    try:
        group.publish(1)
    finally:
        group.close()
    taken = []
    for _ in range(50):
        began = time.perf_counter()
        observer(told[0])
        taken.append(time.perf_counter() - began)
    assert min(taken) < 1e-3


def test_every_metric_is_documented_with_its_kind_and_labels() -> None:
    page = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
    rows = dict(re.findall(r"^\| `(rdt_\w+)` \| (\w+ \| .*?) \| ", page, re.MULTILINE))
    assert rows == {
        name: f"{kind.lower()} | {', '.join(f'`{tag}`' for tag in tags)}" for name, (kind, tags, _) in METRICS.items()
    }
