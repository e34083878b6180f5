"""Measures the peers of a bench, each in the bench's own processes or by the package that supplies it; says why one cannot run.

What runs in the bench's processes gets the same bytes into the same readers as the syncs before it, and is compared the same
way. A peer with a reason is not tried, and its row carries the reason instead of numbers.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import EngineError, TransportError
from . import checkpointengine, plugins
from .collectives import one_gpu_each
from .fleet import Fleet
from .options import BenchOptions
from .results import PeerRow

#: processes that hold more are made anew after a piece that may have left registered memory behind
KEPT_BYTES = 1 << 30
#: of more bytes than these a peer without NIXL agents is not measured among those that others left
FRESH_BYTES = 64 << 20
_AGENTLESS = ("broadcast", "disk")
_OURS = ("broadcast", "disk", "gather", "objects", "checkpoint-engine")


class Peers:
    """The peers of one bench.

    Args:
        options: checked.
        fleet: the processes; started where a peer of `ours` is measured.
        nbytes: of the checkpoint.
        exact: compares the bytes of both sides.
        synced: told after each time that a peer in the bench's processes has moved the bytes.
    """

    def __init__(
        self,
        options: BenchOptions,
        fleet: Fleet,
        nbytes: int,
        exact: Callable[[], bool],
        synced: Callable[[], object],
    ) -> None:
        self._options, self._fleet = options, fleet
        self._bytes, self._exact, self._synced = nbytes, exact, synced
        self._port = 0

    def ours(self, name: str) -> bool:
        """Whether a peer runs in the bench's own processes."""
        return name in _OURS

    def reason(self, name: str) -> str:
        """Why a peer cannot run here or is left out, in one line; empty if it is to be measured."""
        left_out = dict(self._options.left_out).get(name)
        if left_out:
            return f"left out of all: {left_out}"
        if self._options.megatron is not None:
            return "other designs are measured with row shards, which they gather: --trainer fsdp:ranks=N"
        if not self.ours(name):
            return plugins.provider(name, self._options)[1]
        if name == "checkpoint-engine" and (reason := checkpointengine.reason(self._options)):
            return reason
        try:
            self._one_gpu_each(name)
        except TransportError as error:
            return str(error)
        return ""

    def measure(self, row: PeerRow) -> PeerRow | tuple[PeerRow, ...]:
        """Measures a peer that has no reason not to.

        Raises:
            RdtError: it failed.
        """
        one, fleet, name = self._options, self._fleet, row.name
        if not self.ours(name):
            provider, reason = plugins.provider(name, one)
            if provider is None:
                raise EngineError(reason)
            return tuple(provider.measure(one))
        if fleet.agents and name in _AGENTLESS and self._bytes > FRESH_BYTES and one.device == "cpu":
            fleet.end()
            fleet.start()
        fleet.agents = fleet.agents or name not in _AGENTLESS
        fleet.enter(readers=name == "broadcast")
        self._port = _free_port()
        seconds = []
        for _ in range(one.peer_rounds + 1):
            fleet.ask(fleet.sources, "change")
            seconds.append(getattr(self, f"_{name.replace('-', '_')}")())
            self._synced()
        done = msgspec.structs.replace(
            row, bytes=self._bytes, first_s=seconds[0], seconds=tuple(seconds[1:]), exact=self._exact()
        )
        fleet.exit()
        if self._bytes > KEPT_BYTES:
            fleet.end()
        return done

    def _one_gpu_each(self, name: str) -> None:
        sources, readers = self._fleet.placement.sources, self._fleet.placement.readers
        if name == "broadcast":
            one_gpu_each((*sources, *readers), "source ranks and engine ranks")
        elif self._options.ranks > 1:
            one_gpu_each(sources, "source ranks, whose shards must be gathered,")

    def _send(self, name: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        return [source.send.remote(name, given) for source, given in zip(self._fleet.sources, arguments, strict=True)]

    def _wait(self, name: str, arguments: Sequence[dict[str, Any]]) -> float:
        return float(max(self._fleet.wait(self._send(name, arguments), name)))

    def _broadcast(self) -> float:
        calls = self._send("broadcast", [{}] * self._options.ranks)
        calls += [reader.receive_broadcast.remote() for reader in self._fleet.readers]
        return float(max(self._fleet.wait(calls, "broadcast")))

    def _pullers(self) -> list[dict[str, Any]]:
        """Which engine ranks pull from which source rank: in turn, so that all source ranks serve."""
        ranks = self._options.ranks
        return [{"readers": self._fleet.readers[rank::ranks]} for rank in range(ranks)]

    def _gather(self) -> float:
        return self._wait("gather", [given | {"bucket_bytes": self._options.bucket_bytes} for given in self._pullers()])

    def _objects(self) -> float:
        return self._wait("objects", self._pullers())

    def _checkpoint_engine(self) -> float:
        return self._wait("checkpoint-engine", [{"port": self._port, "reader": one} for one in self._fleet.readers])

    def _disk(self) -> float:
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(prefix="rdt-bench-", dir=folder) as made:
            path = str(Path(made) / "model.safetensors")
            written = self._wait("disk", [{"path": path}] * self._options.ranks)
            return float(written + max(self._fleet.ask(self._fleet.readers, "receive_disk", path)))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
