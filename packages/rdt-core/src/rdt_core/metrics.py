"""Metrics of syncs for Prometheus, through Ray: histograms, gauges and counters that Ray's agent on the node exports.

`RayMetrics` is an observer of `outcomes`. It records in the process that publishes, source rank 0, in microseconds. Ray
exports metrics only where its optional parts are installed (`rdt-core[metrics]` brings them); where they are not, nothing is
recorded and one line of the log says so: a warning, if metrics were asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from .outcomes import SyncOutcome

log = logging.getLogger(__name__)

#: states of `rdt_replicas` that are told in every sync, also where no replica is in them
STATES = ("serving", "torn", "absent")
#: upper bounds of the buckets of `rdt_sync_seconds`
SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0,
)  # fmt: skip
#: name, kind, tags and description of every metric; Ray puts `ray_` before the name
METRICS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "rdt_sync_seconds": (
        "Histogram",
        ("group", "mode", "outcome", "phase"),
        "Seconds of a sync by phase; phase total is the whole call of publish, of a sync that failed too.",
    ),
    "rdt_syncs_total": ("Counter", ("group", "mode", "outcome"), "Syncs by outcome: committed, partial or failed."),
    "rdt_sync_failures_total": ("Counter", ("group", "mode", "error"), "Syncs that failed, by class of the error."),
    "rdt_sync_bytes_total": ("Counter", ("group", "mode", "kind"), "Bytes that were moved, by kind of the links."),
    "rdt_sync_gigabytes_per_second": ("Gauge", ("group", "mode"), "GB/s of the last sync, all links together."),
    "rdt_link_gigabytes_per_second": (
        "Gauge",
        ("group", "mode", "kind"),
        "GB/s of all links of a kind in the last sync, over the time of the slowest of them.",
    ),
    "rdt_slow_links": ("Gauge", ("group", "mode"), "Links of the last sync that were called slow."),
    "rdt_replicas": ("Gauge", ("group", "state"), "Replicas by state after the last sync."),
    "rdt_version": ("Gauge", ("group",), "Version that was committed last."),
    "rdt_last_sync_timestamp_seconds": ("Gauge", ("group", "outcome"), "Unix time of the last sync of each outcome."),
}


class RayMetrics:
    """Records every sync as Ray metrics. Off, with one line of the log, where Ray exports none on this node.

    Args:
        asked: whether somebody asked for metrics: that line is a warning then.
    """

    def __init__(self, *, asked: bool = True) -> None:
        self._level = logging.WARNING if asked else logging.INFO
        self._metrics: dict[str, Any] | None = None
        self._is_off = False
        self._states: set[str] = set(STATES)

    def __repr__(self) -> str:
        return "RayMetrics()"

    def __call__(self, outcome: SyncOutcome) -> None:
        """Records one sync."""
        if self._metrics is None and not self._is_off:
            reason = missing()
            if reason:
                log.log(self._level, "syncs are not recorded as Ray metrics: %s", reason)
                self._is_off = True
            else:
                self._metrics = _make()
        if self._metrics is not None:
            self._record(self._metrics, outcome)

    def _record(self, metrics: Mapping[str, Any], outcome: SyncOutcome) -> None:
        group = {"group": outcome.group}
        place = {**group, "mode": outcome.mode}
        phases = outcome.report.phases if outcome.report is not None else {}
        for phase, seconds in {**phases, "total": outcome.seconds}.items():
            metrics["rdt_sync_seconds"].observe(seconds, tags={**place, "outcome": outcome.outcome, "phase": phase})
        metrics["rdt_syncs_total"].inc(1, tags={**place, "outcome": outcome.outcome})
        metrics["rdt_last_sync_timestamp_seconds"].set(outcome.time, tags={**group, "outcome": outcome.outcome})
        if outcome.replicas:
            self._states.update(outcome.replicas.values())
            for state in self._states:
                count = sum(one == state for one in outcome.replicas.values())
                metrics["rdt_replicas"].set(count, tags={**group, "state": state})
        if outcome.report is None:
            metrics["rdt_sync_failures_total"].inc(1, tags={**place, "error": outcome.error_kind})
            return
        metrics["rdt_version"].set(outcome.version, tags=group)
        metrics["rdt_slow_links"].set(len(outcome.slow), tags=place)
        metrics["rdt_sync_gigabytes_per_second"].set(outcome.gbps or 0.0, tags=place)
        for kind, total in outcome.kinds.items():
            if total["bytes"]:
                metrics["rdt_sync_bytes_total"].inc(total["bytes"], tags={**place, "kind": kind})
            metrics["rdt_link_gigabytes_per_second"].set(total["gbps"] or 0.0, tags={**place, "kind": kind})


def missing() -> str:
    """Returns why Ray exports no metrics of this process, and the way out; empty if it does."""
    import ray

    if not ray.is_initialized():
        return "this process is not connected to Ray"
    mine = ray.get_runtime_context().get_node_id()
    node = next((one for one in ray.nodes() if one["NodeID"] == mine), None)
    if node is None or node.get("MetricsExportPort", 0) <= 0:
        where = "this node" if node is None else f"node {node['NodeManagerAddress']}"
        return (
            f"Ray's agent on {where} exports none, since parts of Ray are missing there; `pip install 'rdt-core[metrics]'` on "
            f"every node (it adds `ray[default]=={ray.__version__}`) and start Ray again"
        )
    return ""


def _make() -> dict[str, Any]:
    from ray.util import metrics

    made: dict[str, Any] = {}
    for name, (kind, tags, description) in METRICS.items():
        more = {"boundaries": list(SECONDS)} if kind == "Histogram" else {}
        made[name] = getattr(metrics, kind)(name, description=description, tag_keys=tags, **more)
    return made
