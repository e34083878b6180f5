"""The command line's side of `rdt soak`: its options. What runs is the room `soak`, imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from .commandline import command
from .demo.options import MODES

EPILOG = "[bold]Examples[/bold]\n\nrdt soak\n\nrdt soak --syncs 300 --kinds prepared --mode snapshot --rejoin-every 25"


def soak(
    syncs: Annotated[int, typer.Option(help="How many, one after the other.", min=1)] = 300,
    rejoin_every: Annotated[
        int, typer.Option(help="All source ranks leave and join again after so many syncs; 0: never.", min=0)
    ] = 0,
    reattach_every: Annotated[
        int, typer.Option(help="The replica is detached and attached again after so many syncs; 0: never.", min=0)
    ] = 0,
    kinds: Annotated[str, typer.Option(metavar="LIST", help="Link kinds: mapped, prepared, ray, auto.")] = "auto",
    mode: Annotated[str, typer.Option(metavar="MODE", help=f"Publish mode: {', '.join(MODES)}.")] = "auto",
    ranks: Annotated[int, typer.Option(help="Source ranks.", min=1)] = 2,
    workers: Annotated[int, typer.Option(help="Engine ranks of the one replica.", min=1)] = 1,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Deadline of every wait, in seconds.", min=1)] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and no progress.")] = False,
) -> None:
    """Sync a small model many times and tell whether anything grows.

    After each sync every process says what it holds: memory, open files, threads, shared memory, NIXL registrations, Ray
    references; and the sync's seconds. Every version is checked. Exit status 1 says that something grows over the second
    half, by a robust slope.
    """
    from .bench import options as read
    from .soak.options import SoakOptions
    from .soak.show import soak_command

    with command("soak") as target:
        options = SoakOptions(
            syncs=syncs, rejoin_every=rejoin_every, reattach_every=reattach_every,
            kinds=read.names(kinds, read.KINDS, "--kinds"), mode=mode, ranks=ranks, workers=workers, timeout_s=timeout_s,
        )  # fmt: skip
        raise typer.Exit(soak_command(target, options, json))
