"""Link kind `ray`: Ray objects over Ray Direct Transport, through Ray's public API alone.

For each transfer the owner makes one object of views of its memory, once; every pull brings what the memory holds then,
straight into the reader's targets. The slowest kind for many pieces (Ray pays for each tensor in an object), and the
one that asks least of Ray's insides. Refuses owner and reader in one process: there Ray hands out the owner's own
tensors.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from .. import wire
from ..errors import DeadlineError, TransportError
from . import ranges, tables
from .base import Copies, PreparedTransfer, Region, Turn
from .prepared import NixlSource, Registry, ray_agent

_FETCH_S = 60.0  # for a few hundred bytes


class RaySource(NixlSource):
    """The owner's half of `ray`; see `SourceEndpoint`."""

    kind = "ray"

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []

    def offer(self, transfers: tuple[wire.Transfer, ...], regions: dict[int, Region]) -> list[Any]:
        """Makes one object of each transfer: its rows, in order, each a contiguous view of the region.

        Returns:
            One reference to a plain object that holds the references to those. It must reach the reader inside a list, as
            an argument or result of actor calls. Whoever hands it on never looks inside: reading a reference to tensors
            makes Ray import torch, which takes a process that has not done so long.

        Raises:
            TransportError: a read leaves its region, or Ray refuses.
        """
        self._serve()
        import ray

        refs = []
        for number, transfer in enumerate(transfers):
            views = _views(transfer, regions, f"ray link, transfer {number}")
            try:
                ref = ray.put(views, _tensor_transport="nixl")
            except Exception as error:
                raise TransportError(
                    f"ray link: {transfer.nbytes} bytes in {len(views)} tensors cannot be made an object: {error}"
                ) from error
            refs.append(ref)
        self._kept.append(refs)
        return [ray.put(refs)]

    def close(self) -> None:
        """Drops the objects; the registrations stay (see `NixlSource.close`)."""
        self._kept.clear()


def _views(transfer: wire.Transfer, regions: dict[int, Region], where: str) -> list[torch.Tensor]:
    # destinations stand in for the reader's: only the owner's side is checked here
    copies = tables.reads(transfer)
    ranges.check(
        copies,
        {key: value.tensor.numel() for key, value in regions.items()},
        [int((copies.rows * copies.row_bytes).max(initial=0))],
        where,
    )
    expanded = ranges.rows(copies)
    tensors = {key: value.tensor for key, value in regions.items()}
    return [
        tensors[key][start : start + size]
        for key, start, size in zip(expanded[0].tolist(), expanded[1].tolist(), expanded[4].tolist(), strict=True)
    ]


class RayReader:
    """The reader's half of `ray`; see `ReaderEndpoint`."""

    kind = "ray"

    def __init__(self) -> None:
        ray_agent()
        self._registry = Registry()
        self._regions: dict[int, wire.RegionMeta] = {}
        self._refs: list[Any] = []
        self._transfers: list[RayTransfer] = []
        self._where = "link to an unknown source"

    def register(self, tensor: torch.Tensor) -> None:
        """See `ReaderEndpoint.register`."""
        self._registry.add(tensor, "a destination")

    def connect(self, source: wire.SourceManifest, offer: wire.LinkOffer, refs: list[Any]) -> None:
        """See `ReaderEndpoint.connect`. `refs` is what `RaySource.offer` returned."""
        self._where = f"ray link from source rank {source.rank} (pid {source.node.pid} on {source.node.hostname})"
        if len(refs) != offer.refs or len(refs) != 1:
            raise TransportError(
                f"{self._where}: {len(refs)} references came with an offer of {offer.refs}, expected one"
            )
        import ray

        try:
            inside = ray.get(refs[0], timeout=_FETCH_S)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(f"{self._where}: its object references did not arrive within {_FETCH_S:g} s") from error
        except ray.exceptions.RayError as error:
            raise TransportError(
                f"{self._where}: its object references are gone, its process may have ended"
            ) from error
        self._regions = {meta.id: meta for meta in (*source.regions, *offer.regions)}
        self._refs = list(inside)

    def prepare(self, index: int, copies: Copies, destinations: list[torch.Tensor]) -> PreparedTransfer:
        """See `ReaderEndpoint.prepare`. `copies` are the reads of transfer `index`, in its order: one target a row."""
        ranges.check(
            copies,
            {region: meta.nbytes for region, meta in self._regions.items()},
            [tensor.numel() for tensor in destinations],
            self._where,
        )
        if not 0 <= index < len(self._refs):
            raise TransportError(f"{self._where}: transfer {index} has no object; the offer has {len(self._refs)}")
        _, _, destination, target, nbytes = ranges.rows(copies)
        used = set(destination.tolist())
        for i in sorted(used):
            if not self._registry.covers(destinations[i]):
                raise TransportError(
                    f"{self._where}: a destination of {destinations[i].numel()} bytes on {destinations[i].device} was "
                    "not registered"
                )
        if len({destinations[i].device.type for i in used}) > 1:
            raise TransportError(f"{self._where}: an object cannot land on CPU and CUDA at once; use kind 'prepared'")
        targets = [
            destinations[i][start : start + size]
            for i, start, size in zip(destination.tolist(), target.tolist(), nbytes.tolist(), strict=True)
        ]
        transfer = RayTransfer(self._refs[index], targets, copies.nbytes, self._where)
        self._transfers.append(transfer)
        return transfer

    def close(self) -> None:
        """See `ReaderEndpoint.close`."""
        while self._transfers:
            self._transfers.pop().release()
        self._refs = []


class RayTransfer:
    """One move by a Ray object; see `PreparedTransfer`.

    Ray starts a pull only inside `ray.get`, so the bytes move inside `wait`; moves over several links do not overlap.
    """

    def __init__(self, ref: Any, targets: list[torch.Tensor], nbytes: int, where: str) -> None:
        self.nbytes = nbytes
        self.turn = Turn.WAITED
        self._ref = ref
        self._targets = targets  # Ray holds targets weakly: these references keep them
        self._addresses = list(map(torch.Tensor.data_ptr, targets))
        self._devices = {tensor.device for tensor in targets if tensor.device.type == "cuda"}
        self._where = where
        self._posted = False

    def post(self) -> None:
        """See `PreparedTransfer.post`."""
        if self._ref is None:
            raise TransportError(f"{self._where}: a transfer of {self.nbytes} bytes was posted after its release")
        if self._posted:
            raise TransportError(f"{self._where}: a transfer of {self.nbytes} bytes was posted twice without a wait")
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._posted = True

    def poll(self) -> bool:
        """See `PreparedTransfer.poll`."""
        return not self._posted

    def wait(self, deadline: float) -> None:
        """See `PreparedTransfer.wait`."""
        if not self._posted:
            raise TransportError(f"{self._where}: a transfer of {self.nbytes} bytes is waited for, but was not posted")
        self._posted = False
        if not self._targets:
            return
        import ray
        from ray.experimental import set_target_for_ref

        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineError(f"{self._where}: the deadline passed before the pull of {self.nbytes} bytes began")
        started = time.monotonic()
        try:
            set_target_for_ref(self._ref, self._targets)
            received = ray.get(self._ref, timeout=remaining)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(
                f"{self._where}: {self.nbytes} bytes had not landed after {time.monotonic() - started:.1f} s"
            ) from error
        except Exception as error:
            raise TransportError(
                f"{self._where}: pulling {self.nbytes} bytes in {len(self._targets)} tensors failed: {error}; the "
                "source process may have ended, or its memory is no longer what it declared"
            ) from error
        if list(map(torch.Tensor.data_ptr, received)) != self._addresses:
            raise TransportError(
                f"{self._where}: Ray put {self.nbytes} bytes elsewhere than into the {len(self._targets)} targets; "
                "owner and reader in one process need kind 'local'"
            )

    def release(self) -> None:
        """See `PreparedTransfer.release`."""
        self._ref = None
        self._targets = []
