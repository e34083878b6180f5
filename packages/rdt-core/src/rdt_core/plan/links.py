"""Bytes of every link and of every NIC: what a cluster's people look at before they believe a plan.

Columns for links, because large groups have tens of thousands of them; rows for NICs. Only what moves bytes is a link; a NIC
of a GPU with a rank is told also where nothing passes it, so that idle ones are seen. Nothing is predicted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .readers import Transfers
from .traffic import Traffic

KINDS = ("prepared", "mapped")  # by `Transfers.mapped`


@dataclass(frozen=True, slots=True)
class Links:
    """Every link of a plan, by source rank, then engine rank. All columns have one entry for each link.

    Attributes:
        source_rank: its owner.
        engine_rank: its reader: replica x ranks of a replica + rank there.
        kind: "mapped" or "prepared".
        bytes: that a sync moves over it.
    """

    source_rank: tuple[int, ...] = field(repr=False)
    engine_rank: tuple[int, ...] = field(repr=False)
    kind: tuple[str, ...] = field(repr=False)
    bytes: tuple[int, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.bytes)


@dataclass(frozen=True, slots=True)
class LinkSummary:
    """The links of one kind, or all of them (kind "all").

    Attributes:
        kind: see `Links`.
        links: how many.
        bytes: of all together.
        smallest, median, largest: bytes of a link.
    """

    kind: str
    links: int
    bytes: int
    smallest: int
    median: int
    largest: int


@dataclass(frozen=True, slots=True)
class Nic:
    """A NIC in one direction.

    Attributes:
        node, nic: number of its node, and its own number there.
        side: "out" (owners send through it) or "in" (readers receive through it).
        bytes: that a sync moves through it in this direction.
    """

    node: int
    nic: int
    side: str
    bytes: int

    def __str__(self) -> str:
        return f"NIC {self.nic} of node {self.node}"


def links_of(transfers: Transfers) -> Links:
    """Adds up the transfers of each link."""
    if not len(transfers):
        return Links((), (), (), ())
    readers = int(transfers.reader.max()) + 1
    pairs, first, home = np.unique(
        transfers.source * readers + transfers.reader, return_index=True, return_inverse=True
    )
    nbytes = np.zeros(len(pairs), np.int64)
    np.add.at(nbytes, home.ravel(), transfers.nbytes)
    return Links(
        source_rank=tuple((pairs // readers).tolist()),
        engine_rank=tuple((pairs % readers).tolist()),
        kind=tuple(KINDS[flag] for flag in transfers.mapped[first].tolist()),
        bytes=tuple(nbytes.tolist()),
    )


def summaries(links: Links) -> list[LinkSummary]:
    """One for each kind that there is, and one of all links where there are several kinds."""
    kinds, nbytes = np.array(links.kind), np.array(links.bytes, np.int64)
    found = [_summary(kind, nbytes[kinds == kind]) for kind in reversed(KINDS) if kind in links.kind]
    return found if len(found) == 1 else [*found, _summary("all", nbytes)] if found else []


def _summary(kind: str, nbytes: np.ndarray) -> LinkSummary:
    return LinkSummary(
        kind, len(nbytes), int(nbytes.sum()), int(nbytes.min()), int(np.median(nbytes)), int(nbytes.max())
    )


def nics_of(traffic: Traffic) -> tuple[Nic, ...]:
    """Every NIC of a GPU with a rank, in each direction that its ranks need, by direction, node and number."""
    return tuple(
        sorted(
            (
                Nic(one.node, one.index, one.kind.removeprefix("nic "), int(traffic.nbytes[at]))
                for at, one in enumerate(traffic.resources)
                if one.kind in ("nic out", "nic in")
            ),
            key=lambda nic: (nic.side != "out", nic.node, nic.nic),
        )
    )


def most_loaded(nics: Sequence[Nic], side: str, most: int = 3) -> list[Nic]:
    """The NICs of a side with the most bytes, those first; none that moves nothing."""
    used = [nic for nic in nics if nic.side == side and nic.bytes]
    return sorted(used, key=lambda nic: (-nic.bytes, nic.node, nic.nic))[:most]
