"""What source ranks are told alike of a sync."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rdt_core.wire import SyncReport


def timeless(report: SyncReport) -> SyncReport:
    """A report without time: what comes after the commit source rank 0 alone knows."""
    return msgspec.structs.replace(report, seconds=0.0, phases={})


def are_alike(reports: Sequence[SyncReport]) -> bool:
    """Whether source ranks, in their order, were told the same but for time: none sooner than rank 0, the others all the same."""
    first, *others = reports
    times = [(one.seconds, one.phases) for one in others]
    return (
        all(timeless(one) == timeless(first) for one in others)
        and all(one == times[0] for one in times)
        and all(first.seconds >= seconds for seconds, _ in times)
    )
