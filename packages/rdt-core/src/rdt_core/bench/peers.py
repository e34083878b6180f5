"""Other ways to move the same weights into the same readers, for comparison in the same run.

`broadcast` sends each full checkpoint tensor to all engine ranks by NCCL or Gloo; `gather` fills a staging bucket with
full tensors, makes a Ray object of it and lets the engine ranks pull; `objects` makes a Ray object of each tensor; `disk`
goes through a safetensors file on tmpfs; `checkpointengine` has the package of that name. Each ends in the engine's own
`load_weights` with full tensors, and with several source ranks each begins with an all-gather. All but the last imitate the
manner of such designs, not anyone's code.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import wire
from ..errors import TransportError
from ..memory import ALIGNMENT, Arena, settle
from ..transport.prepared import Registry
from . import checkpointengine
from .collectives import Group
from .layouts import EngineModule
from .tensorfile import nbytes, read, write_header, write_tensor

#: checkpoint tensors in flight at once as objects of their own, in bytes
_WINDOW = 512 << 20


class Sharded(Protocol):
    """What a sender reads from: the checkpoint's tensors, and this rank's rows of each with their padding."""

    tensors: tuple[wire.TensorMeta, ...]
    padded: list[torch.Tensor]


def buckets(tensors: Sequence[wire.TensorMeta], limit: int) -> list[list[tuple[int, int]]]:
    """Splits the checkpoint into buckets of whole tensors.

    Args:
        tensors: of the checkpoint.
        limit: bytes of a bucket; a larger tensor has one for itself.

    Returns:
        For each bucket the tensors' indices and their byte offsets in it.
    """
    made: list[list[tuple[int, int]]] = []
    used = limit
    for index, meta in enumerate(tensors):
        size = -(-nbytes(meta) // ALIGNMENT) * ALIGNMENT
        if used + size > limit:
            made.append([])
            used = 0
        made[-1].append((index, used))
        used += size
    return made


def bucket_size(tensors: Sequence[wire.TensorMeta], made: Sequence[Sequence[tuple[int, int]]]) -> int:
    """Bytes that hold any one of these buckets."""
    return max(offset + nbytes(tensors[index]) for bucket in made for index, offset in bucket)


class Sender:
    """A source rank's side of every peer; all source ranks call the same method at the same time.

    Args:
        source: what this rank holds.
        group: joined already.
        rank: of this source rank.
        world_size: source ranks.
        device: of the weights.
        timeout_s: of every wait.
    """

    def __init__(
        self, source: Sharded, group: Group, rank: int, world_size: int, device: torch.device, timeout_s: float
    ) -> None:
        self._source, self._group = source, group
        self._rank, self._world_size = rank, world_size
        self._device, self._timeout_s = device, timeout_s
        self._slots: list[Arena] = []
        self._registry = Registry()
        self._parameters: checkpointengine.Parameters | None = None

    def _full(self, index: int) -> torch.Tensor:
        return self._group.gather(self._source.padded[index], self._source.tensors[index].shape, self._world_size)

    def broadcast(self) -> None:
        """Tensor by tensor, from the first source rank."""
        for index in range(len(self._source.tensors)):
            full = self._full(index)
            if self._rank == 0:
                self._group.broadcast(full)

    def disk(self, path: str) -> None:
        """Rank 0 writes the checkpoint to `path`."""
        if self._rank:
            for index in range(len(self._source.tensors)):
                self._full(index)
            return
        with open(path, "wb") as file:
            write_header(file, self._source.tensors)
            for index in range(len(self._source.tensors)):
                write_tensor(file, self._full(index))

    def gather(self, readers: Sequence[Any], bucket_bytes: int) -> None:
        """Bucket by bucket through two staging buffers; this rank's readers pull one while the next is filled.

        Args:
            readers: handles of the engine ranks that pull from this source rank.
            bucket_bytes: size of a bucket.
        """
        import ray

        tensors = self._source.tensors
        made = buckets(tensors, bucket_bytes)
        if not self._slots:
            self._slots = [Arena(bucket_size(tensors, made), self._device) for _ in range(2)]
            for slot in self._slots:
                self._registry.add(slot.tensor, "a staging bucket")
        pending: list[tuple[Any, list[Any]]] = [(None, []), (None, [])]
        for number, bucket in enumerate(made):
            slot = self._slots[number % 2]
            ray.get(pending[number % 2][1], timeout=self._timeout_s)
            for index, offset in bucket:
                full = self._full(index)
                slot.tensor[offset : offset + nbytes(tensors[index])].copy_(full.view(-1).view(torch.uint8))
            settle(self._device)
            if readers:
                last, offset = bucket[-1]
                view = slot.tensor[: offset + nbytes(tensors[last])]
                ref = ray.put([view], _tensor_transport="nixl")
                pending[number % 2] = (
                    ref,
                    [reader.take_bucket.remote([ref], number, bucket_bytes) for reader in readers],
                )
        ray.get([call for _, calls in pending for call in calls], timeout=self._timeout_s)

    def objects(self, readers: Sequence[Any]) -> None:
        """One object for each tensor, some hundred megabytes of them at a time.

        Args:
            readers: handles of the engine ranks that pull from this source rank.
        """
        import ray

        tensors = self._source.tensors
        for window in buckets(tensors, _WINDOW):
            numbers = [index for index, _ in window]
            fulls = [self._full(index) for index in numbers]
            settle(self._device)
            if readers:
                refs = [ray.put(full, _tensor_transport="nixl") for full in fulls]
                ray.get([reader.take_objects.remote(refs, numbers) for reader in readers], timeout=self._timeout_s)

    def checkpoint_engine(self, port: int, reader: Any) -> None:
        """Every rank hands its share of the full tensors to the package, which brings all of them to every engine rank.

        Args:
            port: of the package's store.
            reader: handle of the engine rank on this rank's GPU.
        """
        if self._parameters is None:
            self._parameters = checkpointengine.Parameters(self._rank, self._world_size, port)
        held: dict[str, torch.Tensor] = {}
        for index, meta in enumerate(self._source.tensors):
            full = self._full(index)
            if index % self._world_size == self._rank:
                held[meta.name] = full
        self._parameters.update(held, reader, self._timeout_s)


class Taker:
    """An engine rank's side of every peer.

    Args:
        module: that the weights are loaded into.
        tensors: of the checkpoint.
        device: of the module.
        timeout_s: of every wait.
    """

    def __init__(
        self, module: EngineModule, tensors: Sequence[wire.TensorMeta], device: torch.device, timeout_s: float
    ) -> None:
        self._module, self._tensors = module, tuple(tensors)
        self._device, self._timeout_s = device, timeout_s
        self._target: Arena | None = None
        self._registry = Registry()
        self._lock = threading.Lock()

    def broadcast(self, group: Group) -> None:
        """Receives each full tensor into a fresh one and loads it."""

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            for meta in self._tensors:
                full = torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device=self._device)
                group.broadcast(full)
                yield meta.name, full

        self._module.load_weights(arriving())

    def disk(self, path: str) -> None:
        """Loads a file."""
        self._module.load_weights(read(Path(path)))

    def bucket(self, refs: Sequence[Any], number: int, bucket_bytes: int) -> None:
        """Pulls a bucket (the one object of `refs`) into this rank's own buffer and loads from there."""
        import ray
        from ray.experimental import set_target_for_ref

        made = buckets(self._tensors, bucket_bytes)
        with self._lock:
            if self._target is None:
                self._target = Arena(bucket_size(self._tensors, made), self._device)
                self._registry.add(self._target.tensor, "a receive bucket")
            last, offset = made[number][-1]
            view = self._target.tensor[: offset + nbytes(self._tensors[last])]
            set_target_for_ref(refs[0], [view])
            (received,) = ray.get(refs[0], timeout=self._timeout_s)
            if received.data_ptr() != view.data_ptr():
                raise TransportError(f"Ray put bucket {number} of {view.numel()} bytes elsewhere than into its target")
            self._module.load_weights(
                (meta.name, view[start : start + nbytes(meta)].view(getattr(torch, meta.dtype)).view(meta.shape))
                for meta, start in ((self._tensors[index], start) for index, start in made[number])
            )
            settle(self._device)

    def objects(self, refs: Sequence[Any], numbers: Sequence[int]) -> None:
        """Pulls one object for each tensor and loads it."""
        import ray

        with self._lock:
            for ref, index in zip(refs, numbers, strict=True):
                self._module.load_weights([(self._tensors[index].name, ray.get(ref, timeout=self._timeout_s))])
            settle(self._device)
