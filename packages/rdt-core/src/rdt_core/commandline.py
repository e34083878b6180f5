"""What all commands of `rdt` do alike: where their results go, what they show meanwhile, and how they end.

`command` is the one place that knows the exit statuses: 0 when all went well, 1 when the run failed, 2 when the command line
cannot work (nothing was started then), 130 after Ctrl-C, 143 after SIGTERM. An error of rdt's is a sentence, never a
traceback; any other error is a bug and keeps its own.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

import typer

from .errors import RdtError
from .notation import OptionError
from .signals import terminable

if TYPE_CHECKING:
    from rich.console import Console

FAILED, MISUSED = 1, 2
#: columns where the output is no terminal
WIDTH = 160


@contextlib.contextmanager
def command(name: str, *misuse: type[RdtError]) -> Iterator[TextIO]:
    """Runs the body of `rdt NAME`.

    Yields standard output, for results. Whatever else is printed inside goes to standard error: libraries print as they
    please. SIGTERM unwinds the body as Ctrl-C does.

    Args:
        name: of the command.
        misuse: errors besides `OptionError` which say that the command line cannot work.

    Raises:
        typer.Exit: the body raised it, or an `RdtError`, whose message is on standard error then.
    """
    target = sys.stdout
    misused: tuple[type[RdtError], ...] = (OptionError, *misuse)
    with contextlib.redirect_stdout(sys.stderr), terminable():
        try:
            yield target
        except misused as error:
            typer.echo(f"rdt {name}: {error}", err=True)
            raise typer.Exit(MISUSED) from error
        except RdtError as error:
            typer.echo(f"rdt {name} failed: {type(error).__name__}: {error}", err=True)
            raise typer.Exit(FAILED) from error


def console(target: TextIO, width: int = WIDTH) -> Console:
    """Returns a console for results.

    Args:
        target: where it prints.
        width: where that is no terminal. A file has none: a table that is wrapped for 80 columns is hard to read in a log.
    """
    from rich.console import Console

    return Console(file=target, width=None if target.isatty() else width)


@contextlib.contextmanager
def progress(what: str, total: float | None, *, quiet: bool = False) -> Iterator[Callable[..., Any]]:
    """Shows a bar on standard error while inside, on a terminal only.

    Yields what moves it: called with `advance=`, `completed=` or `description=`, as `rich.progress.Progress.update`.

    Args:
        what: is being done, at first.
        total: steps; None where that is not known.
        quiet: show nothing on a terminal either.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=quiet or not errors.is_terminal) as bar:
        yield functools.partial(bar.update, bar.add_task(what, total=total))
