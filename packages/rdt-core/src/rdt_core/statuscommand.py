"""The command line's side of `rdt status`: finds the groups of a cluster and shows how they are doing.

This process only connects to the Ray cluster. It asks each coordinator for what it knows, a call that waits for nobody and
that no sync waits for. It refuses to guess: without a cluster or without the group that was named it says what there is.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Annotated, Any, TextIO

import typer

from .commandline import command, console
from .control import RayControl
from .errors import CoordinatorLostError, MembershipError, RdtError
from .logline import one_line
from .rayauth import way_out
from .rendezvous import DEFAULT_NAMESPACE, PREFIX, probe
from .wire import GroupStatus

EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "rdt status\n\n"
    "rdt status --address 10.0.0.7:6379 --group policy --watch\n\n"
    "rdt status --json | jq '.groups[0].last'"
)

_WIDTH = 180


def status(
    address: Annotated[
        str, typer.Option(help="Of the Ray cluster; default: RAY_ADDRESS, or the cluster of this machine.")
    ] = "",
    group: Annotated[str, typer.Option(metavar="NAME", help="Only this group; default: all.")] = "",
    namespace: Annotated[str, typer.Option(help="Ray namespace of the groups.")] = DEFAULT_NAMESPACE,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    interval_s: Annotated[float, typer.Option("--interval", help="Seconds between two looks.", min=0.1)] = 1.0,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Deadline of every answer, in seconds.", min=0.1)
    ] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print one look as JSON.")] = False,
) -> None:
    """Show the running groups of a cluster: members, versions, the last sync, torn replicas.

    Asks only the coordinators, and disturbs no sync. Without a terminal --watch prints one look. Exit status 1 says that
    there is no cluster, no such group, or that a coordinator does not answer.
    """
    with command("status") as target:
        connect(address)
        if watch and not json and target.isatty():
            _watch(target, group, namespace, interval_s, timeout_s)
        else:
            _once(target, look(group, namespace, timeout_s), json)


def connect(address: str) -> None:
    """Connects to the cluster at `address`, at RAY_ADDRESS, or of this machine.

    Raises:
        MembershipError: there is none.
    """
    import ray

    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        probe(where)
        ray.init(
            address=where, namespace=DEFAULT_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR,
            ignore_reinit_error=True,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise MembershipError(
            f"no Ray cluster answers at {where!r} ({one_line(str(error))}); start this on a node of the cluster, and name its "
            f"address with --address or RAY_ADDRESS{way_out(error)}"
        ) from error


def look(group: str, namespace: str, timeout_s: float) -> list[GroupStatus]:
    """Returns how the groups of the cluster are, by name.

    Args:
        group: only this one; empty: all of the namespace.
        namespace: of Ray.
        timeout_s: for each answer.

    Raises:
        MembershipError: no such group; names those that there are.
        DeadlineError: a coordinator does not answer.
        CoordinatorLostError: one died.
    """
    import ray

    found = sorted(
        (actor["name"].removeprefix(PREFIX), actor["namespace"])
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith(PREFIX)
    )
    names = [name for name, where in found if where == namespace and group in ("", name)]
    if group and not names:
        others = ", ".join(f"{name!r} in namespace {where!r}" for name, where in found)
        raise MembershipError(
            f"there is no group {group!r} in namespace {namespace!r} of the cluster at "
            f"{ray.get_runtime_context().gcs_address}; groups there: {others or 'none'}"
        )
    return [_ask(name, namespace, timeout_s) for name in names]


def _ask(name: str, namespace: str, timeout_s: float) -> GroupStatus:
    import ray

    try:
        handle = ray.get_actor(f"{PREFIX}{name}", namespace)
    except ValueError as error:
        raise CoordinatorLostError(f"the coordinator of group {name!r} has just ended") from error
    return RayControl(name, handle).status(timeout_s)


def _empty() -> str:
    import ray

    return f"there is no group in the cluster at {ray.get_runtime_context().gcs_address}"


def _once(target: TextIO, groups: list[GroupStatus], json: bool) -> None:
    if json:
        import msgspec

        target.write(msgspec.json.encode({"groups": groups}).decode() + "\n")
    else:
        from .statusview import view

        out = console(target, _WIDTH)
        for one in groups:
            out.print(view(one))
        if not groups:
            out.print(_empty())
    target.flush()


def _watch(target: TextIO, group: str, namespace: str, interval_s: float, timeout_s: float) -> None:
    """Shows the groups until this process is interrupted; what cannot be found for now is said in their place."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from .statusview import view

    pause = threading.Event()
    with Live(console=Console(file=target), auto_refresh=False) as live:
        while True:
            try:
                groups = look(group, namespace, timeout_s)
                shown: Any = Group(*map(view, groups)) if groups else Text(_empty())
            except RdtError as error:
                shown = Text(f"{type(error).__name__}: {error}", style="bold red")
            live.update(shown, refresh=True)
            pause.wait(interval_s)
