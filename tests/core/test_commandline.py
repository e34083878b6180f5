"""How every command of `rdt` ends: exit status, what is on standard output and what on standard error."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rdt_core import commandline
from rdt_core.cli import app
from rdt_core.errors import SourceError, SyncError
from rdt_core.notation import OptionError

pytestmark = pytest.mark.unit

#: a command that waits to be ended; what it prints says that it waits
PROGRAM = """
import threading, typer
from rdt_core.commandline import command

def wait():
    with command("wait") as target:
        try:
            print("waiting", flush=True)
            threading.Event().wait(60)
        finally:
            target.write("ended what it started")

typer.run(wait)
"""


def run(error: BaseException | None) -> tuple[int, str, str]:
    """Runs a command that fails so. Returns its exit status, standard output and standard error."""
    toy = typer.Typer(pretty_exceptions_enable=False)

    @toy.command()
    def toy_command() -> None:
        with commandline.command("toy", SourceError) as target:
            target.write("a result\n")
            print("a library's chatter")
            if error is not None:
                raise error

    done = CliRunner().invoke(toy, [])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (None, 0, ""),
        (typer.Exit(1), 1, ""),
        (SyncError("the link is down"), 1, "rdt toy failed: SyncError: the link is down\n"),
        (OptionError("--steps 0: at least 1"), 2, "rdt toy: --steps 0: at least 1\n"),
        (SourceError("5 layers do not divide"), 2, "rdt toy: 5 layers do not divide\n"),  # named as misuse above
    ],
)
def test_ends(error: BaseException | None, status: int, told: str) -> None:
    found, out, errors = run(error)
    assert (found, out) == (status, "a result\n")
    assert errors == f"a library's chatter\n{told}"


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError("a bug"))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_unwinds(number: signal.Signals, status: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == "waiting\n"
            process.send_signal(number)
            out, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, out) == (status, "ended what it started"), errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("one", app.registered_commands, ids=lambda one: one.callback.__name__)
def test_every_command_ends_this_way(one: typer.models.CommandInfo) -> None:
    assert one.callback is not None
    source = inspect.getsource(one.callback)
    assert f'with command("{one.callback.__name__}"' in source
    # nothing else in it decides how it ends, and no module of a command prints errors by itself
    assert "except " not in source
    assert "err=True" not in inspect.getsource(sys.modules[one.callback.__module__])
    assert one.epilog


def test_a_file_is_wide_and_progress_is_for_terminals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "log").open("w") as file:
        assert commandline.console(file).width == commandline.WIDTH
        assert commandline.console(file, 200).width == 200
    with commandline.progress("syncs", 2) as update:
        update(advance=1, description="more")
    shown = capsys.readouterr()
    assert (shown.out, shown.err.strip()) == ("", "")
