"""Does a series grow? A robust slope over its second half, against what may be noise.

The slope is Theil's and Sen's: the median of the slopes between all pairs, which neither outliers nor a few steps move. It
counts only where most pairs rise (Kendall's test) and where the growth is worth a word (see `LIMITS`). Numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import msgspec
import numpy as np

#: Growth over the second half that is worth a word, by measure: an absolute amount and a share of the median; both must be
#: exceeded. In a process of 340 MiB a leak of 23 KiB a sync shows in 300 syncs; one of a descriptor, a thread or a
#: registration a sync in the fewest.
LIMITS: dict[str, tuple[float, float]] = {
    "rss": (2 << 20, 0.01),
    "files": (1.5, 0.0),
    "threads": (1.5, 0.0),
    "segments": (1.5, 0.0),
    "shared": (64 << 10, 0.0),
    "registrations": (1.5, 0.0),
    "registered": (64 << 10, 0.0),
    "references": (1.5, 0.0),
    "seconds": (0.002, 0.25),
}
#: how many standard deviations more pairs must rise than fall
SIGNIFICANT = 3.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one measure of one process.

    Attributes:
        process: whose.
        measure: name, as in `LIMITS`.
        first: median of the first fifth.
        last: median of the last fifth.
        slope: growth a sync over the second half.
        grows: whether that is a leak by `LIMITS`.
    """

    process: str
    measure: str
    first: float
    last: float
    slope: float
    grows: bool


def judge(process: str, measure: str, values: Sequence[float]) -> Verdict:
    """Judges one series, a value for each sync.

    Args:
        process: whose series it is.
        measure: a name out of `LIMITS`.
        values: at least 4.
    """
    series = np.asarray(values, np.float64)
    half = series[len(series) // 2 :]
    slope, rises = trend(half)
    absolute, share = LIMITS[measure]
    growth = slope * (len(half) - 1)
    fifth = max(len(series) // 5, 1)
    return Verdict(
        process=process,
        measure=measure,
        first=float(np.median(series[:fifth])),
        last=float(np.median(series[-fifth:])),
        slope=slope,
        grows=growth > absolute and growth > share * float(np.median(half)) and rises >= SIGNIFICANT,
    )


def trend(values: np.ndarray) -> tuple[float, float]:
    """Slope by Theil and Sen, and by how many standard deviations more pairs rise than fall (Kendall, ties counted)."""
    count = len(values)
    if count < 2:
        return 0.0, 0.0
    low, high = np.triu_indices(count, 1)
    rise = values[high] - values[low]
    _, ties = np.unique(values, return_counts=True)
    variance = (count * (count - 1) * (2 * count + 5) - int((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    score = float(np.sign(rise).sum())
    return float(np.median(rise / (high - low))), score / sqrt(variance) if variance else 0.0
