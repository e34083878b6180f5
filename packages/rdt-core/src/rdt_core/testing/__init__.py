"""Checks that a source, a landing or an engine client of one's own runs to prove itself.

`check_source`, `check_landing` and `check_engine_client` are plain functions that raise `ConformanceError`; `SourceSuite` and
`LandingSuite` are the same as classes to subclass under pytest. They need no Ray, no GPU and no engine but the one that is
checked: source ranks, coordinator, planner and receivers run in one process.
"""

from ..errors import ConformanceError
from .clients import check_engine_client, check_form, check_late
from .landings import LandingCase, check_landed, check_landing, check_missing, check_trace
from .local import LocalGroup, TensorSource
from .sources import (
    Holdings,
    check_coverage,
    check_passes,
    check_replicas,
    check_shards,
    check_source,
    check_syncs,
    holdings,
)
from .suites import LandingSuite, SourceSuite

__all__ = [
    "ConformanceError",
    "Holdings",
    "LandingCase",
    "LandingSuite",
    "LocalGroup",
    "SourceSuite",
    "TensorSource",
    "check_coverage",
    "check_engine_client",
    "check_form",
    "check_landed",
    "check_landing",
    "check_late",
    "check_missing",
    "check_passes",
    "check_replicas",
    "check_shards",
    "check_source",
    "check_syncs",
    "check_trace",
    "holdings",
]
