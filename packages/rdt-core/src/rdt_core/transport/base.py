"""What every link kind implements: the owner's half, the reader's half, and the move that is posted each sync.

Set-up (exporting memory, connecting, preparing a transfer) may be slow and happens once; `PreparedTransfer.post` and
`wait` are what a sync pays. The same contract test runs on all kinds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from .. import wire


@dataclass(frozen=True, slots=True)
class Copies:
    """2-D byte copies as columns, all int64 arrays of one length.

    Copy i moves `rows[i]` rows of `row_bytes[i]` bytes: row j from `source_offset[i] + j * source_pitch[i]` of source
    region `source_region[i]` to `destination_offset[i] + j * destination_pitch[i]` of destination
    `destination[i]` (an index into the tensors handed to `ReaderEndpoint.prepare`).
    """

    source_region: np.ndarray
    source_offset: np.ndarray
    source_pitch: np.ndarray
    destination: np.ndarray
    destination_offset: np.ndarray
    destination_pitch: np.ndarray
    rows: np.ndarray
    row_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes moved by all copies together."""
        return int((self.rows * self.row_bytes).sum())


@dataclass(slots=True)
class Region:
    """A stretch of this process's memory that can be read by others (see `wire.RegionMeta`)."""

    id: int
    tensor: torch.Tensor  # 1-D uint8 over the whole stretch, contiguous
    keep: Any = field(default=None, repr=False)  # what must stay alive with it


@runtime_checkable
class SourceEndpoint(Protocol):
    """A source rank's half of one link kind."""

    kind: str

    def export(self, region: Region) -> wire.RegionMeta:
        """Makes `region` readable and says how. Called once for a region; never during a sync.

        Raises:
            TransportError: the memory cannot be served by this kind (expandable segments, not shareable, …).
        """
        ...

    def agent(self) -> tuple[str, bytes]:
        """Name and metadata of the agent that owns the regions, for kinds that have one; else `("", b"")`."""
        ...

    def offer(self, transfers: tuple[wire.Transfer, ...], regions: dict[int, Region]) -> list[Any]:
        """Things that must travel beside the offer by Ray's own means: an ObjectRef, or nothing."""
        ...

    def close(self) -> None:
        """Releases what this end holds. Idempotent."""
        ...


class Turn(IntEnum):
    """When a transfer is posted among those that are posted together, so that all of them move at once."""

    FAR_KERNEL = 0  # a kernel that reads another GPU's memory: it takes little of this one, if it gets there first
    KERNEL = 1  # a kernel that reads this GPU's own memory: it takes all that is left
    AGENT = 2  # moved by an agent, which posting keeps busy for a while
    BLOCKING = 3  # moved by the time that posting returns
    WAITED = 4  # moved while it is waited for


@runtime_checkable
class PreparedTransfer(Protocol):
    """One move of bytes, made once and posted each sync."""

    nbytes: int
    turn: Turn

    def post(self) -> None:
        """Starts the move. At most one is in flight for each prepared transfer."""
        ...

    def poll(self) -> bool:
        """Whether every byte of a posted move has landed; never waits. With `Turn.WAITED` nothing lands before `wait`.

        `wait` is still called before the bytes are used.

        Raises:
            TransportError: the move failed.
        """
        ...

    def wait(self, deadline: float) -> None:
        """Returns when every byte has landed and may be used by work queued afterwards on the current stream.

        Args:
            deadline: `time.monotonic()` value.

        Raises:
            DeadlineError: not done by then. The destination's contents are undefined afterwards.
            TransportError: the move failed.
        """
        ...

    def release(self) -> None:
        """Gives back what was prepared. Idempotent; the reader tells the owner before it goes away."""
        ...


@runtime_checkable
class ReaderEndpoint(Protocol):
    """An engine rank's half of one link kind, for one source rank."""

    kind: str

    def register(self, tensor: torch.Tensor) -> None:
        """Makes local memory a possible destination (NIXL registers its storage). Once per tensor, before `prepare`."""
        ...

    def connect(self, source: wire.SourceManifest, offer: wire.LinkOffer, refs: list[Any]) -> None:
        """Learns the owner's regions (its manifest's and the offer's). May be called again with a newer offer."""
        ...

    def prepare(self, index: int, copies: Copies, destinations: list[torch.Tensor]) -> PreparedTransfer:
        """Makes the transfer `index` of this link's request.

        Args:
            index: position in the request's `transfers` (Ray objects: which ref).
            copies: reads from the owner's regions into `destinations`.
            destinations: 1-D uint8 tensors over whole storages or buffers; kept alive by the result.

        Raises:
            TransportError: a copy leaves its region or destination, or the kind cannot do it.
        """
        ...

    def close(self) -> None:
        """Releases every transfer and mapping. Idempotent."""
        ...
