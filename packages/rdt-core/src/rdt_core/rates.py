"""How fast each link of an engine rank was in a sync, and what becomes of one that is far too slow.

A path that is broken still moves the right bytes, at a thousandth of the speed: UCX reads GPU memory over TCP where it finds
nothing better, and says so in no error. So every link is held to a floor that only such a path falls below. Refuses a link
that stays below it for two large syncs in a row, never for a moment in which a GPU was busy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from . import wire
from .errors import TransportError
from .report import LEAST_BYTES, link_name, rate
from .settings import GET_ZCOPY
from .transport.nodes import same_node
from .transport.waiting import Flight

log = logging.getLogger(__name__)

#: What becomes of slow links: "refuse" fails the sync below a floor that only a broken path reaches, "warn" only names them,
#: a number is the floor in GB/s for every link, on any device.
SlowLinks: TypeAlias = Literal["refuse", "warn"] | float

#: GB/s of a link from GPU to GPU below which it is named, and below which it is refused. Measured: 0.55 over a path that falls
#: back to TCP, 283 and more over NVLink. Across nodes an adapter may be shared by a hundred links and be well.
NAMED_GBPS = 1.0
REFUSED_GBPS = {"device": 1.0, "node": 1.0, "network": 0.1}
#: links of one path that are this many times their floor together are sound, however many of them share it
CRAWL = 10.0
#: syncs in a row below the floor after which a link is refused
IN_A_ROW = 2
#: seconds that the first sync of a connection may take besides its bytes: agents meet, memory is opened
SETUP_S = 10.0
#: seconds that a piece may take besides its bytes, several times what a sound path takes
PIECE_S = {"local": 50e-6, "mapped": 50e-6, "prepared": 50e-6, "ray": 1e-3}


def check_slow_links(value: object) -> SlowLinks:
    """Returns `value` if it says what becomes of slow links; raises TransportError if not."""
    if value == "refuse" or value == "warn":
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise TransportError(
        f'slow_links is {value!r}; expected "refuse", "warn", or the floor of every link in GB/s, above 0'
    )


def path_of(mine: wire.NodeMeta, theirs: wire.NodeMeta) -> str:
    """Returns where the two ends of a link are: on one GPU ("device"), on one "node", or apart ("network")."""
    if not same_node(mine, theirs):
        return "network"
    return "device" if mine.device_uuid and mine.device_uuid == theirs.device_uuid else "node"


@dataclass(slots=True)
class Moved:
    """What one link moved in one sync: bytes, seconds in flight, and the waits of `Flight`."""

    nbytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    alone: float = 0.0


class Meter:
    """Adds up the transfers of one sync, by source rank."""

    def __init__(self) -> None:
        self.links: dict[int, Moved] = {}

    def add(self, flights: Iterable[Flight]) -> int:
        """Adds transfers that have landed; returns their bytes."""
        total = 0
        for flight in flights:
            moved = self.links.setdefault(flight.source, Moved())
            moved.nbytes += flight.transfer.nbytes
            moved.seconds += flight.landed - flight.posted
            moved.waited += flight.waited
            moved.alone += flight.alone
            total += flight.transfer.nbytes
        return total


class LinkRates:
    """The links of one engine rank, over all of its syncs and connections.

    Args:
        reader: name of the engine rank.
        here: where it runs.
        slow_links: what becomes of slow links.
        least_bytes: links that moved less in a sync are not judged by it.
    """

    def __init__(
        self, reader: str, here: wire.NodeMeta, slow_links: SlowLinks = "refuse", *, least_bytes: int = LEAST_BYTES
    ) -> None:
        self._reader = reader
        self._here = here
        self._slow_links = check_slow_links(slow_links)
        self._least_bytes = least_bytes
        self._in_a_row: dict[int, int] = {}

    def links(
        self,
        meter: Meter,
        sources: Mapping[int, wire.SourceManifest],
        kinds: Mapping[int, str],
        pieces: Callable[[int], int],
        *,
        is_first: bool,
    ) -> tuple[wire.LinkReport, ...]:
        """Returns what each link did in a sync whose bytes have landed.

        Args:
            meter: of the sync.
            sources: manifests by source rank.
            kinds: link kind by source rank.
            pieces: of the link from a source rank; asked only where it matters.
            is_first: whether the sync was the first of a connection.

        Raises:
            TransportError: a link was below its floor for the second time in a row.
        """
        reports = []
        refused = []
        paths = {source: path_of(self._here, sources[source].node) for source in meter.links}
        together = {path: _together(meter, paths, path) for path in set(paths.values())}
        for source, moved in sorted(meter.links.items()):
            node = sources[source].node
            path = paths[source]
            named, least = self._floors(path, node)
            report = wire.LinkReport(
                source=source, reader=self._reader, kind=kinds[source], bytes=moved.nbytes, seconds=moved.seconds,
                waited=moved.waited, path=path,
            )  # fmt: skip
            if moved.nbytes >= self._least_bytes:
                # broken links side by side are slow each for itself, and so are sound ones that share a path with those of
                # other readers: named then, never refused
                crawls = path != "network" and together[path] < CRAWL * named
                shown = msgspec.structs.replace(report, waited=moved.alone) if crawls else report
                beside = PIECE_S[report.kind] * pieces(source) if is_below(shown, max(named, least)) else 0.0
                if is_below(report, max(named, least)):
                    if self._judge(report, least, beside, is_first):
                        refused.append((rate(report.bytes, report.waited), least, report))
                else:
                    self._in_a_row.pop(source, None)
                if is_below(shown, named, beside) and not is_first:
                    report = msgspec.structs.replace(shown, floor=named)
                    gbps = rate(report.bytes, report.waited)
                    log.warning("slow link: %s %.2f GB/s, floor %g", link_name(report), gbps, named)
            # what the first one takes says little about the path
            reports.append(msgspec.structs.replace(report, waited=0.0) if is_first else report)
        if refused:
            raise TransportError(self._refusal(refused, sources))
        return tuple(reports)

    def _judge(self, link: wire.LinkReport, floor: float, beside_s: float, is_first: bool) -> bool:
        """Whether a link is refused after this sync."""
        if is_below(link, floor, beside_s + SETUP_S * is_first):
            self._in_a_row[link.source] = self._in_a_row.get(link.source, 0) + 1
            return self._in_a_row[link.source] >= IN_A_ROW
        if not is_below(link, floor, beside_s):  # else it may be the set-up, or not: nothing is known
            self._in_a_row.pop(link.source, None)
        return False

    def _floors(self, path: str, node: wire.NodeMeta) -> tuple[float, float]:
        """GB/s below which a link is named and below which it is refused; 0: never."""
        if not isinstance(self._slow_links, str):
            return self._slow_links, self._slow_links
        if self._here.device != "cuda" or node.device != "cuda":
            return 0.0, 0.0  # a CPU is shared with whatever else runs there
        return NAMED_GBPS, REFUSED_GBPS[path] if self._slow_links == "refuse" else 0.0

    def _refusal(
        self, refused: Sequence[tuple[float, float, wire.LinkReport]], sources: Mapping[int, wire.SourceManifest]
    ) -> str:
        gbps, least, link = min(refused, key=lambda one: one[0])
        node = sources[link.source].node
        others = f" and {len(refused) - 1} more of its links as well" if len(refused) > 1 else ""
        return (
            f"slow link: {link_name(link)} moved {link.bytes} bytes at {gbps:.2f} GB/s, and was below its floor of {least:g} "
            f"GB/s in {self._in_a_row[link.source]} syncs in a row{others}; its source is process {node.pid} on "
            f"{node.hostname}. {_cause(link, self._here, node)}. Measure the path with `rdt doctor`; to go on as slowly as it "
            'is, join with slow_links="warn" or a lower floor in GB/s'
        )


def _together(meter: Meter, paths: Mapping[int, str], path: str) -> float:
    """GB/s of all links of a path, in the time that the reader waited for any of them."""
    here = [moved for source, moved in meter.links.items() if paths[source] == path]
    return rate(sum(moved.nbytes for moved in here), sum(moved.waited for moved in here))


def is_below(link: wire.LinkReport, floor: float, extra_s: float = 0.0) -> bool:
    """Whether the reader waited longer for a link than its bytes take at `floor` GB/s, and `extra_s` seconds beside them."""
    return floor > 0 and link.waited > link.bytes / 1e9 / floor + extra_s


def _cause(link: wire.LinkReport, here: wire.NodeMeta, there: wire.NodeMeta) -> str:
    """The likeliest cause, and what mends it."""
    if here.device != "cuda" or there.device != "cuda":
        return "One end is a CPU: another process may take its time or its memory's bandwidth"
    if link.kind == "mapped":
        return "The two GPUs have no fast path to one another, or other work keeps them busy"
    if link.path == "network":
        return (
            "UCX may fall back to TCP: each process must see the network adapters, and these must be able to register "
            "GPU memory"
        )
    return (
        f"UCX may read GPU memory over TCP: {GET_ZCOPY}=on must be set before either process makes its NIXL agent, and the "
        "memory must not lie in expandable segments"
    )
