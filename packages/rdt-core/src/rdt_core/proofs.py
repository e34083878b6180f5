"""The digests that each end of a link makes in a sync: a source rank of what it publishes, an engine rank of what landed.

Made once for a connection, from the same requests, and run round by round or chunk by chunk. Nothing here compares: both
hand in their digests, and the coordinator does. On CUDA the work is queued where it is asked for; only `digests` waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from . import wire
from .blocks import Blocks
from .digests import Digester
from .linking import Program
from .naming import Names, describe_blocks
from .verifying import Array, LinkBlocks, choose, landed, link_blocks, packed, unique
from .wire import Verify


class _Proof:
    """Digesters for stretches of one list of blocks, and the digests of those that one sync has chosen."""

    def __init__(self, blocks: Blocks, part: Array, memories: Mapping[int, torch.Tensor], where: str) -> None:
        self.seconds = 0.0
        self._order = {int(number): np.flatnonzero(part == number) for number in np.unique(part)}
        self._digesters = {
            number: Digester(blocks.take(index), memories, where) for number, index in self._order.items()
        }
        self._count = len(blocks)
        self._wanted: Array | None = None
        self._pending: list[tuple[Array, Callable[[], Array]]] = []

    def _start(self, wanted: Array | None) -> None:
        """Begins a sync; `wanted` marks the blocks that it digests, None means all."""
        self.seconds, self._wanted, self._pending = 0.0, wanted, []

    def take(self, number: int) -> None:
        """Digests what was chosen of one round or chunk, whose bytes are in their place now."""
        if number not in self._order:
            return
        began = time.perf_counter()
        index, chosen = self._order[number], None
        if self._wanted is not None:
            chosen = np.flatnonzero(self._wanted[index])
            index = index[chosen]
        if len(index):
            self._pending.append((index, self._digesters[number].queue(chosen)))
        self.seconds += time.perf_counter() - began

    def _collect(self) -> Array:
        began = time.perf_counter()
        values = np.zeros(self._count, np.uint64)
        for index, wait in self._pending:
            values[index] = wait()
        self._pending = []
        self.seconds += time.perf_counter() - began
        return values


class OwnerProof(_Proof):
    """Digests of one source rank. Blocks that several readers read are digested once.

    Args:
        manifest: of the rank.
        regions: its memory by region id, 1-D uint8.
        requests: that it serves.

    Attributes:
        seconds: spent since `start`: what the sync waited for digests.

    Raises:
        TransportError: a request reads outside the regions.
    """

    def __init__(
        self,
        manifest: wire.SourceManifest,
        regions: Mapping[int, torch.Tensor],
        requests: Sequence[wire.ReadRequest],
    ) -> None:
        self._requests = {request.reader: request for request in requests}
        self._links = {reader: link_blocks(request, manifest) for reader, request in self._requests.items()}
        blocks, rounds, places = unique(list(self._links.values()))
        self._places = dict(zip(self._links, places, strict=True))
        self._chosen: dict[str, Array] = {}
        super().__init__(blocks, rounds, regions, f"digests of source rank {manifest.rank}")

    def start(self, verify: Verify, version: int) -> None:
        """Begins a sync: chooses what is digested for each reader."""
        self._chosen = {
            reader: self._places[reader][choose(link, verify, version, self._requests[reader].digest)]
            for reader, link in self._links.items()
        }
        wanted = None
        if verify != "full":
            wanted = np.zeros(self._count, bool)
            for places in self._chosen.values():
                wanted[places] = True
        self._start(wanted)

    def digests(self) -> dict[str, bytes]:
        """The digests by reader, as they travel. After `take` of every round."""
        values = self._collect()
        return {reader: packed(values[places]) for reader, places in self._chosen.items()}


class ReaderProof(_Proof):
    """Digests of one engine rank.

    Args:
        requests: of the reader.
        program: that it executes.
        sources: manifests of the source ranks, by rank.
        memories: of its destinations, by index, then the receive buffer; 1-D uint8.

    Attributes:
        seconds: spent since `start`: what the sync waited for digests.

    Raises:
        TransportError: the program does not move what the requests say.
    """

    def __init__(
        self,
        requests: Sequence[wire.ReadRequest],
        program: Program,
        sources: Mapping[int, wire.SourceManifest],
        memories: Sequence[torch.Tensor],
    ) -> None:
        self._requests = {request.source: request for request in requests}
        self._sources = sources
        self._links = {source: link_blocks(request, sources[source]) for source, request in self._requests.items()}
        self._chosen: dict[int, Array] = {}
        ends = np.cumsum([0, *(len(link) for link in self._links.values())])
        self._first = dict(zip(self._links, ends[:-1].tolist(), strict=True))
        chunks = [
            np.array([one.chunk for one in self._requests[source].transfers], np.int64)[link.transfer]
            for source, link in self._links.items()
        ]
        blocks = Blocks.concatenate([landed(link, program, source) for source, link in self._links.items()])
        self._memory = blocks.memory
        part = np.concatenate([*chunks, np.zeros(0, np.int64)])
        reader = next((request.reader for request in requests), "")
        super().__init__(blocks, part, dict(enumerate(memories)), f"digests of {reader}")

    def start(self, verify: Verify, version: int) -> None:
        """Begins a sync: chooses what is digested of each link."""
        self._chosen = {
            source: choose(link, verify, version, self._requests[source].digest) for source, link in self._links.items()
        }
        wanted = None
        if verify != "full":
            wanted = np.zeros(self._count, bool)
            for source, places in self._chosen.items():
                wanted[self._first[source] + places] = True
        self._start(wanted)

    def digests(self) -> dict[int, bytes]:
        """The digests by source rank, as they travel. After `take` of every chunk."""
        values = self._collect()
        return {source: packed(values[self._first[source] + places]) for source, places in self._chosen.items()}

    def landed(self, in_place: Array) -> dict[int, tuple[bytes, bytes]]:
        """What lies in the destinations now, without a sync, by source rank.

        Args:
            in_place: by index of the destination, whether it holds what once landed there; nothing else is read.

        Returns:
            Digests of every block, and a byte for each that is 1 where the digest is one.
        """
        comparable = in_place[self._memory]
        self._start(comparable)
        for number in self._order:
            self.take(number)
        values = self._collect()
        found = {}
        for source, link in self._links.items():
            mine = slice(self._first[source], self._first[source] + len(link))
            found[source] = packed(values[mine]), comparable[mine].astype(np.uint8).tobytes()
        return found

    def describe(self, differing: Mapping[int, Sequence[int]]) -> str:
        """Returns what the blocks hold that differ, for a message.

        Args:
            differing: by source rank, positions among the digests that were handed in.
        """
        told = []
        for source, positions in sorted(differing.items()):
            link, chosen = self._links[source], self._chosen[source]
            what = describe_link(link, self._sources[source], chosen[np.asarray(positions, np.int64)].tolist())
            told.append(
                f"what it received of source rank {source} is not what that rank holds: {what} ({len(positions)} of "
                f"{len(chosen)} blocks that were compared differ)"
            )
        return "; ".join(told)


def describe_link(link: LinkBlocks, manifest: wire.SourceManifest, positions: Sequence[int]) -> str:
    """Returns what blocks of a link hold: tensors by name and rows."""
    return describe_blocks(Names(manifest), link.blocks, link.round, positions)
