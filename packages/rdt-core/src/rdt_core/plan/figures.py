"""Numbers of a plan in words, for tables and pictures alike."""

from __future__ import annotations

from ..report import size


def bytes_text(nbytes: float) -> str:
    """As all of rdt writes sizes, with separators where a unit has thousands: "8,481.504 GB"."""
    number, unit = size(nbytes).split(" ")
    whole, dot, part = number.partition(".")
    return f"{int(whole):,}{dot}{part} {unit}"


def seconds_text(seconds: float) -> str:
    """As "1.328 s", "12.50 ms" or "0.28 us"."""
    if seconds >= 1:
        return f"{seconds:,.3f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-5 else f"{1e6 * seconds:.2f} us"
