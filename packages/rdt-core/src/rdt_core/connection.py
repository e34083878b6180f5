"""What an engine rank made at one connect and executes in every sync: links, memory, and the steps of its program.

Everything here is made once: transfers as soon as the owners have answered, copies and replays with them. A new epoch of
the source ranks makes a new connection. It refuses an offer for other bytes than those that were asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import wire
from .errors import CoverageError, TransportError
from .geometry import replay
from .landing import Destination, Landing
from .linking import Chunk, Program
from .memory import Arena, give_back
from .planning import Plan, Staged
from .proofs import ReaderProof
from .transport.base import PreparedTransfer, ReaderEndpoint
from .transport.copying import CopyProgram
from .transport.thresholds import Threshold, is_far_off, is_unknown, measure, place_of


@dataclass(slots=True)
class Step:
    """One chunk with everything made that its execution needs.

    Attributes:
        number: of the chunk in the program.
        chunk: of the program.
        transfers: source rank and transfer, to be posted together, in this order.
        scatter: copies packed pieces out of the receive buffer; None where nothing is packed.
        replays: view ops that could not be expressed as copies.
        memory: of the destinations that `chunk.opens` makes exist, by key.
        ends_round: whether the next chunk belongs to another round.
    """

    number: int
    chunk: Chunk
    transfers: list[tuple[int, PreparedTransfer]]
    scatter: CopyProgram | None
    replays: list[Callable[[], None]]
    memory: dict[str, torch.Tensor]
    ends_round: bool


@dataclass(slots=True)
class Connection:
    """One connect of an engine rank.

    Attributes:
        epoch: of the source ranks that it planned against.
        manifest: what it declared.
        sources: the source ranks' manifests.
        plan: its copies.
        program: how they travel.
        destinations: what the landing said about each, by key.
        endpoints: its end of each link, by source rank.
        tensors: the memory of each destination of the plan, then the receive buffer; see `memory_of`.
        thresholds: how each link packs, by source rank.
        here: where this engine rank runs.
        scratch: registered memory that links are measured with; None where all are known.
        steps: the program made ready; None until `prepare`.
    """

    epoch: int
    manifest: wire.EngineManifest
    sources: dict[int, wire.SourceManifest]
    plan: Plan
    program: Program
    destinations: Mapping[str, Destination]
    endpoints: dict[int, ReaderEndpoint]
    tensors: list[torch.Tensor]
    thresholds: dict[int, Threshold]
    here: wire.NodeMeta
    scratch: torch.Tensor | None = None
    steps: list[Step] | None = None
    _proof: ReaderProof | None = None

    def proof(self) -> ReaderProof:
        """What digests the bytes that land; made at the first sync that is verified."""
        if self._proof is None:
            self._proof = ReaderProof(self.manifest.requests, self.program, self.sources, self.tensors)
        return self._proof

    def landed(self) -> dict[int, tuple[bytes, bytes]]:
        """Digests of what lies in the engine's own memory now, by source rank; see `ReaderProof.landed`."""
        keys = [*self.plan.destinations, ""]
        in_place = np.array([key in self.destinations and self.destinations[key].in_place for key in keys], bool)
        return self.proof().landed(in_place)

    @property
    def kinds(self) -> dict[int, str]:
        """Link kind by source rank."""
        return {source: endpoint.kind for source, endpoint in self.endpoints.items()}

    def pieces(self, source: int) -> int:
        """How many rows the link from a source rank moves one by one in a sync."""
        links = (link for chunk in self.program.chunks for link in chunk.links if link.source == source)
        return sum(int(link.copies.rows.sum()) for link in links)

    @property
    def is_outdated(self) -> bool:
        """Whether links were measured since the plan was made, and it would be another one now."""
        return any(
            is_far_off(used, self.endpoints[source].kind, place_of(self.here, self.sources[source].node))
            for source, used in self.thresholds.items()
        )

    @property
    def rounds(self) -> int:
        """Rounds of a sync."""
        return max((manifest.rounds for manifest in self.sources.values()), default=1)

    @property
    def is_readable_at_once(self) -> bool:
        """Whether links are made to parameters that lie readable from the moment on that every source rank has begun a sync."""
        return (
            bool(self.steps)
            and self.rounds == 1
            and all(
                self.sources[request.source].mode == "live" and not request.pack_bytes
                for request in self.manifest.requests
            )
        )

    def prepare(self, offers: Sequence[wire.LinkOffer], refs: Sequence[list[Any]]) -> list[Step]:
        """Makes every transfer, once the owners have answered the requests.

        Args:
            offers: one for each request.
            refs: what travelled beside each.

        Raises:
            CoverageError: an owner serves other bytes than were asked for.
            TransportError: a link cannot be made.
        """
        for offer, its_refs in zip(offers, refs, strict=True):
            request = next(r for r in self.manifest.requests if r.source == offer.source)
            if offer.digest != request.digest:
                raise CoverageError(
                    f"{self.manifest.reader} and source rank {offer.source} disagree about what their link moves "
                    f"(digests {request.digest[:12]} and {offer.digest[:12]}); both ends must run the same rdt version"
                )
            self.endpoints[offer.source].connect(self.sources[offer.source], offer, its_refs)
        if self.scratch is not None:
            for source, endpoint in self.endpoints.items():
                place = place_of(self.here, self.sources[source].node)
                if is_unknown(endpoint.kind, place):
                    measure(endpoint, self.sources[source], place, self.scratch)
        chunks = self.program.chunks
        steps = []
        for number, chunk in enumerate(chunks):
            transfers = [
                (link.source, self.endpoints[link.source].prepare(link.index, link.copies, self.tensors))
                for link in chunk.links
            ]
            transfers.sort(key=lambda pair: pair[1].turn)
            scatter = CopyProgram(chunk.scatter, {0: self.tensors[-1]}, self.tensors) if len(chunk.scatter) else None
            replays = [_replayer(self.plan.staged[index], self.tensors) for index in chunk.replays]
            last = number + 1 == len(chunks) or chunks[number + 1].round != chunk.round
            steps.append(Step(number, chunk, transfers, scatter, replays, self._opened(chunk), last))
        self.steps = steps
        return steps

    def close(self) -> None:
        """Releases every link. Idempotent."""
        for step in self.steps or ():
            for _, transfer in step.transfers:
                transfer.release()
        for endpoint in self.endpoints.values():
            endpoint.close()
        if self.scratch is not None:
            give_back(self.scratch)
        give_back(self.tensors[-1])  # no transfer is left that could land there

    def _opened(self, chunk: Chunk) -> dict[str, torch.Tensor]:
        return {
            key: self.tensors[index]
            for index, key in enumerate(self.plan.destinations)
            if key in self.destinations
            and self.destinations[key].module in chunk.opens
            and not self.destinations[key].in_place
        }


def memory_of(
    plan: Plan,
    program: Program,
    destinations: Mapping[str, Destination],
    landing: Landing,
    device: torch.device,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Finds or allocates the memory that bytes land in.

    Returns:
        The memory of each destination of the plan, then the receive buffer, each 1-D uint8 and empty where nothing lands;
        and what of it transfers write into, each once.
    """
    buffer = Arena(program.receive_bytes, device).tensor if program.receive_bytes else None
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    tensors = []
    for index, key in enumerate(plan.destinations):
        place = int(program.places[index])
        if key in destinations and destinations[key].in_place:
            tensors.append(landing.storage(key))
        elif place < 0 or buffer is None:
            tensors.append(empty)
        else:
            tensors.append(buffer[place : place + int(plan.destination_nbytes[index])])
    tensors.append(buffer if buffer is not None else empty)
    return tensors, list(_written(program, tensors))


def _written(program: Program, tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
    for index, place in enumerate(program.places.tolist()):
        if place < 0 and tensors[index].numel():
            yield tensors[index]
    if tensors[-1].numel():
        yield tensors[-1]


def _replayer(staged: Staged, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    box = typed_view(tensors[staged.destination], staged.dtype, 0, staged.box_shape, None)
    target = typed_view(
        tensors[staged.target],
        staged.target_dtype,
        staged.target_offset,
        staged.target_shape,
        staged.target_strides,
    )

    def run() -> None:
        value = replay(box.permute(staged.axes).reshape(staged.shape), staged.rest)
        target.copy_(value.reshape(target.shape))

    return run


def typed_view(
    memory: torch.Tensor, dtype: str, offset: int, shape: Sequence[int], strides: Sequence[int] | None
) -> torch.Tensor:
    """Returns a strided view of raw memory.

    Args:
        memory: 1-D uint8 tensor.
        dtype: name of the view's dtype.
        offset: of the first element from the start of `memory`, in elements.
        shape: of the view.
        strides: in elements; None for contiguous.
    """
    kind: torch.dtype = getattr(torch, dtype)
    if strides is None:
        strides = torch.empty(tuple(shape), device="meta").stride()
    start, rest = divmod(int(memory.storage_offset()), kind.itemsize)
    if rest:
        raise TransportError(f"memory at byte {memory.storage_offset()} is not aligned for {dtype}")
    return torch.empty(0, dtype=kind, device=memory.device).set_(
        memory.untyped_storage(), start + offset, tuple(shape), tuple(strides)
    )
