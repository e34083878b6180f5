"""Moving bytes over one link: four kinds behind one small interface (see `base`).

`local` stays inside a process, `mapped` copies out of memory of the same node, `prepared` posts NIXL reads that were
made once, `ray` pulls Ray objects. Which kind a link gets is decided once, when it is made; a kind that cannot work
says why and is never replaced by another behind the caller's back. A process that uses `prepared` or `ray` has a NIXL
agent, whose progress thread keeps a core busy from then on: make such endpoints only for links that need them.
"""

from __future__ import annotations

from .. import settings, wire
from ..errors import TransportError
from .base import Copies, PreparedTransfer, ReaderEndpoint, Region, SourceEndpoint
from .copying import CopyProgram
from .mapped import MappedReader, MappedSource, can_map
from .memory_local import LocalExchange, LocalReader, LocalSource
from .nodes import node, same_node
from .prepared import PreparedReader, PreparedSource, unavailable
from .rayobjects import RayReader, RaySource
from .thresholds import DEFAULT as DEFAULT_PACK_THRESHOLD

__all__ = [
    "DEFAULT_PACK_THRESHOLD",
    "Copies",
    "CopyProgram",
    "LocalExchange",
    "PreparedTransfer",
    "ReaderEndpoint",
    "Region",
    "SourceEndpoint",
    "available",
    "can_map",
    "kinds",
    "make_reader_endpoint",
    "make_source_endpoint",
    "node",
    "pack_threshold",
    "same_node",
]

#: every kind, in the order in which a link prefers them
kinds: tuple[str, ...] = ("local", "mapped", "prepared", "ray")


def pack_threshold(kind: str, device: str) -> int:
    """Default bytes of a row below which it is packed.

    Args:
        kind: of the link.
        device: "cpu" or "cuda", where the source's bytes lie.
    """
    _known(kind)
    if (kind, device) not in DEFAULT_PACK_THRESHOLD:
        raise TransportError(f"no link of kind {kind!r} reads from device {device!r}; known: cpu, cuda")
    return DEFAULT_PACK_THRESHOLD[(kind, device)]


def make_source_endpoint(kind: str, *, exchange: LocalExchange | None = None) -> SourceEndpoint:
    """Makes a source rank's half of a link kind.

    Args:
        kind: one of `kinds`.
        exchange: shared by both ends of `local` links, and needed for them.

    Raises:
        TransportError: an unknown kind, or one that cannot work in this process.
    """
    _known(kind)
    if kind == "local":
        return LocalSource(_needed(exchange))
    if kind == "mapped":
        return MappedSource()
    return PreparedSource() if kind == "prepared" else RaySource()


def make_reader_endpoint(kind: str, *, exchange: LocalExchange | None = None) -> ReaderEndpoint:
    """Makes an engine rank's half of a link kind, for one source rank.

    Arguments and errors are those of `make_source_endpoint`.
    """
    _known(kind)
    if kind == "local":
        return LocalReader(_needed(exchange))
    if kind == "mapped":
        return MappedReader()
    return PreparedReader() if kind == "prepared" else RayReader()


def available(kind: str, mine: wire.NodeMeta, theirs: wire.SourceManifest) -> str | None:
    """Why a link of this kind cannot be made between a reader and a source rank; None if it can.

    For `prepared` and `ray` this makes the process's NIXL agent, to be sure: ask for the kinds in order of preference.

    Args:
        kind: one of `kinds`.
        mine: of the reader, which must be this process (`nodes.node`).
        theirs: manifest of the source rank.
    """
    _known(kind)
    if kind not in theirs.kinds:
        return f"source rank {theirs.rank} does not serve kind {kind!r}, only {', '.join(theirs.kinds) or 'nothing'}"
    if kind == "local":
        one = same_node(mine, theirs.node) and mine.pid == theirs.node.pid
        return None if one else f"source rank {theirs.rank} is another process (pid {theirs.node.pid})"
    if kind == "mapped":
        return next((why for region in theirs.regions if (why := can_map(mine, theirs.node, region))), None)
    if kind == "ray" and same_node(mine, theirs.node) and mine.pid == theirs.node.pid:
        return "owner and reader are one process, and Ray would not copy"
    if theirs.node.device == "cuda" and same_node(mine, theirs.node) and (reason := settings.refused_reads()):
        return reason
    return unavailable()


def _known(kind: str) -> None:
    if kind not in kinds:
        raise TransportError(f"unknown link kind {kind!r}; known: {', '.join(kinds)}")


def _needed(exchange: LocalExchange | None) -> LocalExchange:
    if exchange is None:
        raise TransportError("kind 'local' needs the LocalExchange that both ends share")
    return exchange
