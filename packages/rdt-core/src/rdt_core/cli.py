"""The command `rdt`: its commands by name. Options and body of each are in its own room.

Standard output carries results, standard error everything else. Exit status: 0 when all went well, 1 when the run
failed, 2 when the command line cannot work (nothing was started then), 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from . import benchcommand, plancommand, soakcommand, statuscommand, tracecommand, verifycommand
from .demo import command as democommand
from .distributions import version_lines
from .doctor import command as doctorcommand

app = typer.Typer(
    help="Moves a model's weights from the ranks that train it to the ranks that serve it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo("\n".join(version_lines()))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show what is installed, and end.")
    ] = False,
) -> None:
    """Moves a model's weights from the ranks that train it to the ranks that serve it."""
    # Under `uv run` Ray would build a fresh environment for every worker; all of them live on this machine and can use
    # the one that this process runs in. Ray reads it when it is imported, which is later.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")


# in the order in which `rdt --help` lists them
app.command(epilog=democommand.EPILOG)(democommand.demo)
app.command(epilog=benchcommand.EPILOG)(benchcommand.bench)
app.command(epilog=verifycommand.EPILOG)(verifycommand.verify)
app.command(epilog=soakcommand.EPILOG)(soakcommand.soak)
app.command(epilog=plancommand.EPILOG)(plancommand.plan)
app.command(epilog=doctorcommand.EPILOG)(doctorcommand.doctor)
app.command(epilog=statuscommand.EPILOG)(statuscommand.status)
app.command(epilog=tracecommand.EPILOG)(tracecommand.trace)


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
