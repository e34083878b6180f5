"""A running group for people: its members, versions and last sync, as a table.

Made of a `wire.GroupStatus` alone, which the coordinator answers without asking anybody. "Last word" is what the coordinator
last heard of a member; it asks nobody whether they live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

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
_OUTCOMES = {"committed": "green", "partial": "yellow", "failed": "bold red"}


def view(status: GroupStatus) -> Group:
    """Returns a group's head lines and its table of members."""
    from rich.console import Group
    from rich.text import Text

    return Group(*(Text(line, style=style) for line, style in head(status)), members(status))


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
    from rich.table import Table
    from rich.text import Text

    result = Table()
    for heading in ("member", "state", "version", "host", "pid", "what", "since", "last word"):
        result.add_column(heading, justify="right" if heading in ("version", "pid", "since", "last word") else "left")

    def add(name: str, state: str, *cells: str) -> None:
        result.add_row(Text(name), Text(state, style=_STYLES.get(state, "")), *map(Text, cells))

    for source in status.sources:
        what = f"mode {source.mode}" + (f", {counted(source.rounds, 'round')}" if source.rounds > 1 else "")
        times = ago(source.since_s), ago(source.heard_s)
        add(f"source rank {source.rank}", "joined", "", source.hostname, str(source.pid), what, *times)
    for rank in status.missing:
        add(f"source rank {rank}", "absent", "", "", "", "has not joined", "", "")
    out = {} if status.last is None else {name: one_line(why) for name, why in status.last.failed.items()}
    for replica in sorted(status.replicas, key=lambda one: one.name):
        result.add_section()
        why = out.pop(replica.name, "")
        _add_replica(add, replica, one_line(replica.torn) or why)
    for name, why in sorted(out.items()):
        result.add_section()
        add(f"replica {name}", "absent", "", "", "", why, "", "")
    return result


def _add_replica(add: Callable[..., None], replica: ReplicaStatus, why: str) -> None:
    version = "" if replica.version is None else str(replica.version)
    add(f"replica {replica.name}", replica.state, version, "", "", why, "", "")
    ranks = {int(reader.reader.rpartition("/")[2]): reader for reader in replica.readers}
    for rank in range(replica.world_size):
        reader = ranks.get(rank)
        name = f"  engine rank {replica.name}/{rank}"
        if reader is None:
            add(name, "absent", "", "", "", "has not connected", "", "")
            continue
        state = "receiving" if replica.state == "updating" else "connected"
        what = f"{reader.engine}, {size(reader.nbytes)} a sync from {counted(reader.requested, 'rank')}"
        if reader.offered < reader.requested:
            what += f", {reader.offered} of them have answered"
        times = ago(reader.since_s), ago(reader.heard_s)
        add(name, state, "", reader.hostname, str(reader.pid), what, *times)


def ago(seconds: float) -> str:
    """Returns a time span in the unit that suits it: "0.4 s", "12 s", "5 min", "3 h", "2 d"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, length, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < most:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
