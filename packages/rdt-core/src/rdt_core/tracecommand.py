"""The command line's side of `rdt trace`: from the lines that `JsonLines` wrote to a file that Perfetto opens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .commandline import command
from .logline import counted

EPILOG = "[bold]Examples[/bold]\n\nrdt trace syncs.jsonl trace.json\n\nrdt trace syncs.jsonl trace.json --last 3"


def trace(
    reports: Annotated[Path, typer.Argument(metavar="REPORTS", help="A file that the observer JsonLines wrote.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, JSON.")],
    last: Annotated[int, typer.Option(help="Only so many syncs, the latest; 0: all.", min=0)] = 0,
    group: Annotated[str, typer.Option(metavar="NAME", help="Only syncs of this group.")] = "",
) -> None:
    """Draw syncs for https://ui.perfetto.dev: a row for each rank, and one for each link.

    Open the file there; nothing is sent anywhere. Times are of each host's own clock; what was done about different ones
    is said in the file.
    """
    from .outcomes import read_outcomes
    from .perfetto import write_trace

    with command("trace") as target:
        outcomes = [one for one in read_outcomes(reports) if group in ("", one.group)]
        events = write_trace(out, outcomes[-last:])
        said = f"{counted(len(outcomes[-last:]), 'sync')}, {counted(events, 'event')}"
        target.write(f"{said}: {out}; open it in https://ui.perfetto.dev\n")
