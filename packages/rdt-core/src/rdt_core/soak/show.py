"""The command line's side of `rdt soak`: progress, table, JSON, exit status.

Progress is shown on a terminal only; the result is a table of every process and measure, growing ones marked.
"""

from __future__ import annotations

from typing import Any, TextIO

import msgspec

from ..commandline import console, progress
from .loop import SoakReport, run
from .options import SoakOptions

_BYTES = ("rss", "shared", "registered")


def soak_command(target: TextIO, options: SoakOptions, json: bool) -> int:
    """Soaks and prints to `target`.

    Returns:
        Exit status: 1 if something grows, else 0.

    Raises:
        OptionError: an option that cannot work; nothing was started.
        SyncError, DeadlineError: see `loop.run`.
    """
    options = options.check()
    with progress("syncs", options.syncs, quiet=json) as update:
        report = run(options, lambda done: update(completed=done))
    if json:
        target.write(msgspec.json.encode(report).decode() + "\n")
    else:
        out = console(target)
        out.print(table(report))
        out.print(summary(report), highlight=False)
    return 1 if report.growing else 0


def summary(report: SoakReport) -> str:
    """One paragraph: what was done and what grows."""
    done = (
        f"{report.syncs} syncs in {report.seconds:.0f} s, mode {report.mode}, links {', '.join(report.links)}, "
        f"{report.rejoins} times joined again, {report.reattaches} times attached again; every version was served as it was made"
    )
    if not report.growing:
        return f"{done}\nflat: nothing grows over the second half"
    found = "; ".join(f"{one.process} {one.measure} by {_say(one.measure, one.slope)} a sync" for one in report.growing)
    return f"{done}\ngrows: {found}"


def table(report: SoakReport) -> Any:
    """A row for each process and measure."""
    from rich.table import Table

    made = Table("process", "measure", "first", "last", "a sync", "", box=None, header_style="bold")
    for one in report.verdicts:
        cells = [_say(one.measure, value) for value in (one.first, one.last, one.slope)]
        made.add_row(one.process, one.measure, *cells, "[red]grows[/red]" if one.grows else "flat")
    return made


def _say(measure: str, value: float) -> str:
    if measure == "seconds":
        return f"{1000 * value:.2f} ms"
    if measure in _BYTES:
        return f"{value / (1 << 20):.2f} MiB" if abs(value) >= 1 << 20 else f"{value / 1024:.1f} KiB"
    return f"{value:.3g}"
