"""Link kind `local`: owner and reader in one process, for tests and for a trainer and an engine that share a process.

Both ends are made over one `LocalExchange`; nothing is found by name or through global state. Refuses regions that were
not exported to the same exchange.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from .. import wire
from ..errors import TransportError
from .base import Copies, PreparedTransfer, Region
from .copying import CopyProgram
from .direct import MemoryTransfer


class LocalExchange:
    """What the two ends of `local` links share: exported regions by token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[bytes, torch.Tensor] = {}
        self._count = 0

    def put(self, tensor: torch.Tensor) -> bytes:
        """Adds memory and returns the token that finds it."""
        with self._lock:
            self._count += 1
            token = f"local-{id(self):x}-{self._count}".encode()
            self._regions[token] = tensor
            return token

    def get(self, token: bytes) -> torch.Tensor | None:
        """The memory behind `token`, or None when it was withdrawn or never exported here."""
        with self._lock:
            return self._regions.get(token)

    def remove(self, token: bytes) -> None:
        """Withdraws memory; unknown tokens are ignored."""
        with self._lock:
            self._regions.pop(token, None)


class LocalSource:
    """The owner's half of `local`; see `SourceEndpoint`."""

    kind = "local"

    def __init__(self, exchange: LocalExchange) -> None:
        self._exchange = exchange
        self._tokens: list[bytes] = []

    def export(self, region: Region) -> wire.RegionMeta:
        """See `SourceEndpoint.export`."""
        token = self._exchange.put(region.tensor)
        self._tokens.append(token)
        return region_meta(region, mapped=token)

    def agent(self) -> tuple[str, bytes]:
        """There is no agent."""
        return "", b""

    def offer(self, transfers: tuple[wire.Transfer, ...], regions: dict[int, Region]) -> list[Any]:
        """Nothing travels beside the offer."""
        return []

    def close(self) -> None:
        """Withdraws every region: moves posted afterwards fail."""
        while self._tokens:
            self._exchange.remove(self._tokens.pop())


class LocalReader:
    """The reader's half of `local`; see `ReaderEndpoint`."""

    kind = "local"

    def __init__(self, exchange: LocalExchange) -> None:
        self._exchange = exchange
        self._regions: dict[int, tuple[bytes, torch.Tensor]] = {}
        self._transfers: list[MemoryTransfer] = []
        self._where = "link to an unknown source"

    def register(self, tensor: torch.Tensor) -> None:
        """Any local memory is a possible destination."""

    def connect(self, source: wire.SourceManifest, offer: wire.LinkOffer, refs: list[Any]) -> None:
        """See `ReaderEndpoint.connect`."""
        self._where = f"local link from source rank {source.rank}"
        for meta in (*source.regions, *offer.regions):
            tensor = self._exchange.get(meta.mapped)
            if tensor is None:
                raise TransportError(
                    f"{self._where}: region {meta.id} ({meta.nbytes} bytes) is not in this process's exchange; "
                    "the two ends must be made over one LocalExchange"
                )
            if tensor.numel() != meta.nbytes:
                raise TransportError(
                    f"{self._where}: region {meta.id} has {tensor.numel()} bytes, the manifest says {meta.nbytes}"
                )
            self._regions[meta.id] = (meta.mapped, tensor)

    def prepare(self, index: int, copies: Copies, destinations: list[torch.Tensor]) -> PreparedTransfer:
        """See `ReaderEndpoint.prepare`."""
        regions = {region: tensor for region, (_, tensor) in self._regions.items()}
        tokens = [token for token, _ in self._regions.values()]
        exchange, where = self._exchange, self._where

        def alive() -> str | None:
            gone = [token for token in tokens if exchange.get(token) is None]
            return f"{len(gone)} of its regions were withdrawn" if gone else None

        transfer = MemoryTransfer(CopyProgram(copies, regions, destinations, where), destinations, where, alive)
        self._transfers.append(transfer)
        return transfer

    def close(self) -> None:
        """See `ReaderEndpoint.close`."""
        while self._transfers:
            self._transfers.pop().release()
        self._regions.clear()


def region_meta(region: Region, mapped: bytes = b"") -> wire.RegionMeta:
    """The parts of a region's description that are the same for every kind."""
    return wire.RegionMeta(
        id=region.id,
        nbytes=region.tensor.numel(),
        address=region.tensor.data_ptr(),
        device=region.tensor.device.type,
        device_index=max(region.tensor.get_device(), 0),
        mapped=mapped,
    )
