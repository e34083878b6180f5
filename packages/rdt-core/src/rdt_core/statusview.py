"""A running group for people: its members, versions and last sync, as a table.

Made of a `wire.GroupStatus` alone, which the coordinator answers without asking anybody. "Last word" is what the coordinator
last heard of a member; it asks nobody whether they live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .logline import counted, link_name, one_line, rate, size
from .wire import GroupStatus, LastSync, ReplicaStatus

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_STYLES = {
    "serving": "green",
    "joined": "green",
    "updating": "cyan",
    "receiving": "cyan",
    "connecting": "yellow",
    "connected": "yellow",
    "absent": "bold red",
    "torn": "bold red",
}
_REASON = 400
_OUTCOMES = {"committed": "green", "partial": "yellow", "failed": "bold red"}


def view(status: GroupStatus) -> Group:
    """Returns a group's head lines, its table of members, and what is wrong with replicas, a line each."""
    from rich.console import Group
    from rich.text import Text

    lines = (Text(line, style=style) for line, style in head(status))
    return Group(*lines, members(status), *(Text(line, style="bold red") for line in troubles(status)))


def head(status: GroupStatus) -> Iterator[tuple[str, str]]:
    """Yields lines about the group as a whole, each with its style."""
    version = "no version yet" if status.version is None else f"version {status.version}"
    there = f"{len(status.sources)} of {counted(status.world_size, 'source rank')}, {counted(len(status.replicas), 'replica')}"
    yield f"group {status.group!r}: {version}, epoch {status.epoch}, {there}", "bold"
    if status.sync is not None:
        what = f"sync {status.sync} of version {status.sync_version} for {status.sync_s:.1f} s"
        yield f"running: {what}, waits for {status.waits_for}", "cyan"
    if status.last is not None:
        yield last_line(status.last), _OUTCOMES.get(status.last.outcome, "")
    told = () if status.last is None else (status.last.error, *status.last.failed.values())
    if status.last_failure and status.last_failure not in told:
        yield f"latest failure: {one_line(status.last_failure)}", "dim"


def last_line(last: LastSync) -> str:
    """Returns the last sync in one line."""
    when = f"last sync: version {last.version} {last.outcome} {ago(last.ago_s)} ago"
    if last.outcome == "failed":
        return f"{when}, after {last.seconds:.3f} s: {one_line(last.error)}"
    link = last.slowest
    slowest = (
        "no link"
        if link is None
        else f"slowest link {link_name(link)} {rate(link.bytes, link.seconds):.2f} GB/s in {link.seconds:.3f} s"
    )
    left_out = f"; left out {', '.join(map(repr, sorted(last.failed)))}" if last.failed else ""
    return (
        f"{when}: {size(last.bytes)} in {last.seconds:.3f} s ({rate(last.bytes, last.seconds):.2f} GB/s), mode "
        f"{last.mode}, {slowest}{left_out}"
    )


def members(status: GroupStatus) -> Table:
    """Returns a row for each source rank, replica and engine rank, those that are not there among them."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # lines between columns would take a fifth of a terminal of 80
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("member", "state", "process", "what", "since", "last word"):
        justify: Any = "right" if heading in ("since", "last word") else "left"
        # on a narrow terminal these give way, at blanks
        result.add_column(heading, justify=justify, no_wrap=heading not in ("what", "last word"))

    def add(name: str, state: str, *cells: str) -> None:
        result.add_row(Text(name), Text(state, style=_STYLES.get(state, "")), *map(Text, cells))

    for source in status.sources:
        what = f"mode {source.mode}" + (f", {counted(source.rounds, 'round')}" if source.rounds > 1 else "")
        times = ago(source.since_s), ago(source.heard_s)
        add(f"source rank {source.rank}", "joined", f"{source.hostname}:{source.pid}", what, *times)
    for rank in status.missing:
        add(f"source rank {rank}", "absent", "", "has not joined")
    for replica in sorted(status.replicas, key=lambda one: one.name):
        _add_replica(add, replica)
    for name in _gone(status):
        add(f"replica {name}", "absent")
    return result


def troubles(status: GroupStatus) -> Iterator[str]:
    """Yields why replicas are torn, were left out of the last sync, or are gone: a sentence each, too long for a cell."""
    out = {} if status.last is None else status.last.failed
    for replica in sorted(status.replicas, key=lambda one: one.name):
        if replica.torn and status.last is not None and replica.torn == status.last.error:
            yield f"replica {replica.name!r} is torn by this failure; the next complete sync heals it"
        elif replica.torn:
            yield f"replica {replica.name!r} is torn: {one_line(replica.torn, _REASON)}"
        elif replica.name in out:
            yield f"replica {replica.name!r} was left out of the last sync: {one_line(out[replica.name], _REASON)}"
    for name in _gone(status):
        yield f"replica {name!r} was left out of the last sync: {one_line(out[name], _REASON)}"


def _gone(status: GroupStatus) -> list[str]:
    there = {replica.name for replica in status.replicas}
    return [] if status.last is None else sorted(status.last.failed.keys() - there)


def _add_replica(add: Callable[..., None], replica: ReplicaStatus) -> None:
    version = "" if replica.version is None else f"version {replica.version}"
    add(f"replica {replica.name}", replica.state, "", version)
    # nobody is asked whether they live: of a torn replica no rank is called connected
    state = {"updating": "receiving", "torn": "torn"}.get(replica.state, "connected")
    ranks = {int(reader.reader.rpartition("/")[2]): reader for reader in replica.readers}
    for rank in range(replica.world_size):
        reader = ranks.get(rank)
        name = f"  engine rank {replica.name}/{rank}"
        if reader is None:
            add(name, "absent", "", "has not connected")
            continue
        what = f"{reader.engine}, {size(reader.nbytes)} a sync from {counted(reader.requested, 'rank')}"
        if reader.offered < reader.requested:
            what += f", {reader.offered} answered"
        times = ago(reader.since_s), ago(reader.heard_s)
        add(name, state, f"{reader.hostname}:{reader.pid}", what, *times)


def ago(seconds: float) -> str:
    """Returns a time span in the unit that suits it: "0.4 s", "12 s", "5 min", "3 h", "2 d"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, length, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < most:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
