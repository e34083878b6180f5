"""What a person sees of a run: what is happening now, a line for each version, and a table at the end.

`Show` writes to the console it is given. `Silence` has the same methods and shows nothing: it is what `--json` uses,
so that standard output holds the report alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..logline import size
from .report import DemoReport, StepReport


class Display(Protocol):
    """What `loop` tells whoever watches."""

    def activity(self, text: str) -> contextlib.AbstractContextManager[None]:
        """Something slow goes on inside the context."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line of its own."""
        ...

    def step(self, step: StepReport) -> None:
        """A version is served and checked."""
        ...


class Silence:
    """Shows nothing."""

    @contextlib.contextmanager
    def activity(self, text: str) -> Iterator[None]:
        """See `Display.activity`."""
        yield

    def note(self, text: str) -> None:
        """See `Display.note`."""

    def step(self, step: StepReport) -> None:
        """See `Display.step`."""


class Show:
    """Shows progress on a console while inside its context.

    Args:
        console: where to write.
        steps: number of versions that the run will publish.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("versions"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task("starting", total=steps)

    def __enter__(self) -> Show:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    @contextlib.contextmanager
    def activity(self, text: str) -> Iterator[None]:
        """See `Display.activity`. A console that cannot redraw gets a line at the start of it instead."""
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(f"[dim]{time.strftime('%H:%M:%S')} {text}[/dim]", highlight=False)
        yield

    def note(self, text: str) -> None:
        """See `Display.note`."""
        self._console.print(text, highlight=False)

    def step(self, step: StepReport) -> None:
        """See `Display.step`."""
        self._progress.advance(self._task)
        self._console.print(
            f"version {step.version}: reward {step.reward:.3f}, sync {step.seconds * 1000:,.0f} ms, "
            f"{size(step.bytes)}, {links(step)}, logprob error {step.max_abs_logprob_error:.1e}",
            highlight=False,
        )


def table(report: DemoReport) -> Table:
    """Returns the table of a whole run, a row for each version; version 0 is the checkpoint before training."""
    result = Table(title="versions served", title_justify="left")
    for column in ("version", "reward", "sync ms"):
        result.add_column(column, justify="right")
    result.add_column("by phase, ms")
    result.add_column("bytes", justify="right")
    result.add_column("mode")
    result.add_column("links")
    result.add_column("max logprob error", justify="right")
    first = report.checkpoint
    result.add_row(
        "0", f"{first.reward:.3f}", "", "from the checkpoint", "", "", "", f"{first.max_abs_logprob_error:.1e}"
    )
    for step in report.steps:
        result.add_row(
            str(step.version),
            f"{step.reward:.3f}",
            f"{step.seconds * 1000:,.0f}",
            phases(step),
            size(step.bytes),
            step.mode,
            links(step),
            f"{step.max_abs_logprob_error:.1e}",
        )
    return result


def phases(step: StepReport) -> str:
    """Returns a sync's phases in milliseconds, but for those below one and the total, which has its own column."""
    shown = {name.replace("_", " "): 1000 * seconds for name, seconds in step.phases.items() if name != "total"}
    return ", ".join(f"{name} {number:,.0f}" for name, number in shown.items() if number >= 1)


def links(step: StepReport) -> str:
    """Returns the links of a sync by kind, with the rate of each kind over the time its slowest link took."""
    parts = []
    for kind in dict.fromkeys(link.kind for link in step.links):
        mine = [link for link in step.links if link.kind == kind]
        seconds = max(link.seconds for link in mine)
        rate = f" {sum(link.bytes for link in mine) / seconds / 1e9:.2f} GB/s" if seconds > 0 else ""
        parts.append(f"{len(mine)} {kind}{rate}")
    return ", ".join(parts) or "none"
