"""What `rdt doctor` prints: findings worst first, a table of rates, one line of summary; JSON; or exports for a shell.

Colours and progress on a terminal only. Results go to the target, progress to standard error.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..wire import to_json
from .facts import DoctorReport, Finding, Measured, Severity, number
from .judge import rated
from .options import DoctorOptions
from .run import run

_WIDTH = 150
_MOST_ROWS = 64
_STYLES = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.SLOW: "yellow", Severity.BROKEN: "bold red"}


class Show:
    """Progress of a run on a terminal; see `run.Watch`."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def begin(self, steps: int) -> None:
        """See `Watch`."""
        self._bar.update(self._task, total=steps, completed=0, description="measuring")

    def done(self, what: str) -> None:
        """See `Watch`."""
        self._bar.update(self._task, advance=1, description=f"measured {what}")

    def now(self, what: str) -> None:
        """See `Watch`."""
        self._bar.update(self._task, description=what)


def doctor_command(target: Any, options: DoctorOptions, *, json: bool, fix_env: bool) -> int:
    """Examines and prints to `target`.

    Returns:
        Exit status: 1 if something is slow or broken, else 0.
    """
    with _progress(json) as show:
        report = run(options, show)
    if json:
        target.write(as_json(report) + "\n")
    elif fix_env:
        target.write(exports(report))
    else:
        print_report(target, report)
    target.flush()
    return 1 if report.worst >= Severity.SLOW else 0


def as_json(report: DoctorReport) -> str:
    """Returns a report as JSON, with what each measured transfer is judged by in its row (`Rated`)."""
    nodes = {facts.hostname: facts for facts in report.nodes}
    rows = [
        {**msgspec.to_builtins(one), **msgspec.to_builtins(rated(one, nodes))} for one in report.measured
    ]  # fmt: skip
    return to_json({**msgspec.to_builtins(report), "measured": rows})


def print_report(target: Any, report: DoctorReport) -> None:
    """Prints a report: in colours to a terminal, else as plain text of a fixed width."""
    terminal = target.isatty()
    # tables are padded with spaces, which nobody wants in a file
    text = io.StringIO()
    out = Console(file=target if terminal else text, width=None if terminal else _WIDTH, highlight=False)
    out.print(findings_table(report))
    if report.measured:
        out.print()
        out.print(rates_table(report.measured))
    out.print()
    out.print(summary(report))
    target.write("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))


@contextmanager
def _progress(quiet: bool) -> Iterator[Show]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        yield Show(bar)


def exports(report: DoctorReport) -> str:
    """Lines for a shell: `eval "$(rdt doctor --fix-env)"`."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in report.exports.items())


def findings_table(report: DoctorReport) -> Table:
    """A row for each finding, worst first; why it matters and what mends it below what was found.

    Of several nodes the same is said once.
    """
    many = len(report.nodes) > 1
    same: dict[tuple[str, ...], list[Finding]] = {}
    for one in report.findings:
        same.setdefault((one.severity, one.check, one.what, one.why, one.mend), []).append(one)
    made = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(2 if many else 1):
        made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for found in same.values():
        one, names = found[0], [each.node for each in found]
        word = Text(one.severity, style=_STYLES[one.level])
        made.add_row(*([word, Text(_where(names, len(report.nodes)), style="dim")] if many else [word]), _cell(one))
    return made


def _where(names: Sequence[str], count: int) -> str:
    if names == [""] or len(names) == count:
        return f"all {count}"
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _cell(one: Finding) -> Group:
    lines = Table.grid(padding=(0, 1, 0, 0))
    if one.why:
        lines.add_row("  why:", Text(one.why, style="dim"))
    if one.mend:
        lines.add_row("  mend:", Text(one.mend, style="bold"))
    return Group(Text(one.what), lines) if lines.rows else Group(Text(one.what))


def rates_table(measured: tuple[Measured, ...]) -> Table:
    """A row for each measured transfer."""
    across = any(one.cross_node for one in measured)
    nodes = len({one.reader for one in measured} | {one.source for one in measured}) > 1
    made = Table(box=None, header_style="bold", pad_edge=False)
    for name in (*(["from", "to"] if nodes and across else ["node"] if nodes else []), "device", "link"):
        made.add_column(name)
    for name in ("size", "first", "then", "GB/s", "one copy GB/s", "times"):
        made.add_column(name, justify="right")
    made.add_column("lane", overflow="fold")
    shown = sorted(measured, key=lambda one: -one.ratio)[:_MOST_ROWS] if len(measured) > _MOST_ROWS else measured
    if len(shown) < len(measured):
        made.caption = f"the {len(shown)} of {len(measured)} that took longest for their bytes; --json has all"
    for one in shown:
        where = [one.source, one.reader] if nodes and across else [one.reader] if nodes else []
        if one.error:
            made.add_row(*where, one.device, one.kind, *["-"] * 6, Text(one.error, style="red"))
            continue
        made.add_row(
            *where, one.device, one.kind, f"{one.nbytes / (1 << 20):.0f} MiB", _time(one.first_seconds), _time(one.seconds),
            number(one.gbps), number(one.floor_gbps), f"{one.ratio:,.1f}", _lane(one),
        )  # fmt: skip
    return made


def _lane(one: Measured) -> str:
    if not one.backend:
        return f"mapped memory ({one.memory})"
    lane = one.lane or f"lane unknown, {one.lane_unknown}"
    return f"{one.backend}: {lane} ({one.memory})"


def summary(report: DoctorReport) -> Text:
    """One line: how many of each severity, and what to do next."""
    counts = {level: sum(1 for one in report.findings if one.level == level) for level in Severity}
    said = ", ".join(f"{count} {level.word}" for level, count in reversed(counts.items()) if count)
    text = Text(f"rdt {report.rdt}: {len(report.nodes)} node{'s' * (len(report.nodes) != 1)}, {said}")
    text.append(f", {report.seconds:.0f} s. ")
    if report.worst < Severity.SLOW:
        text.append("Nothing is slow or broken.", style="green")
    elif report.exports:
        names = ", ".join(report.exports)
        text.append(
            f'eval "$(rdt doctor --fix-env)" sets {names}; do so before Ray starts, and on every node.', style="yellow"
        )
    else:
        text.append("See what mends it above.", style="yellow")
    return text


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"
