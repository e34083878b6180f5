"""Many pieces in few launches: copies by raw address, out of this device's memory or out of another's mapped into it.

`GatherProgram` is one Triton kernel over a table in the reader's memory, made once from spans and run as often as wanted
on the current stream. It refuses, before anything is copied, memory that the reader's device cannot reach; it never
looks at what lies there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .. import cudadriver
from ..errors import TransportError

#: bytes that one instance of the kernel copies, where there is enough to do for all multiprocessors
BLOCK_BYTES = 64 << 10
_LEAST_BLOCK_BYTES = 16 << 10
#: blocks wanted before blocks get larger: a few for each multiprocessor of the largest devices
_WANTED_BLOCKS = 1024
_WIDTHS = (16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Spans:
    """2-D byte copies by address, as int64 columns of one length.

    Row j of span i: `row_bytes[i]` bytes from `source[i] + j * source_pitch[i]` to
    `destination[i] + j * destination_pitch[i]`, for j below `rows[i]`.
    """

    source: np.ndarray
    destination: np.ndarray
    source_pitch: np.ndarray
    destination_pitch: np.ndarray
    rows: np.ndarray
    row_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes copied by all spans together."""
        return int((self.rows * self.row_bytes).sum())


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the kernel: spans of one width and shape, cut into blocks.

    Attributes:
        width: bytes (16, 8, 4, 2 or 1) that all addresses, lengths and pitches are multiples of.
        flat: the spans are single rows, cut anywhere; otherwise blocks hold whole rows.
        table: int64 [spans, 8]: source, destination, source pitch, destination pitch, rows, bytes of a row, number of
            the span's first block, rows of a block (0 if flat).
        owners: int32 [blocks]: the span that each block belongs to.
    """

    width: int
    flat: bool
    table: np.ndarray
    owners: np.ndarray


def block_bytes(nbytes: int) -> int:
    """Bytes of a block for a program of `nbytes`: as large as leaves every multiprocessor with work, a power of two."""
    block = BLOCK_BYTES
    while block > _LEAST_BLOCK_BYTES and nbytes // block < _WANTED_BLOCKS:
        block //= 2
    return block


def split(spans: Spans, block: int) -> list[Launch]:
    """Cuts spans into blocks of at most `block` bytes (a positive multiple of 16), grouped by launch.

    Spans without bytes vanish; rows longer than a block become spans of their own.
    """
    columns = np.stack(
        [spans.source, spans.destination, spans.source_pitch, spans.destination_pitch, spans.rows, spans.row_bytes], 1
    ).astype(np.int64)
    columns = columns[(columns[:, 4] > 0) & (columns[:, 5] > 0)]
    columns = _expand(columns, (columns[:, 4] == 1) | (columns[:, 5] > block))
    flat = columns[:, 4] == 1
    # pitches say nothing where there is one row
    columns[flat, 2:4] = 0
    common = columns[:, 0] | columns[:, 1] | columns[:, 2] | columns[:, 3] | columns[:, 5]
    # the lowest set bit, 16 at most
    width = np.minimum(common & -common, _WIDTHS[0])
    launches = []
    for one in _WIDTHS:
        for shape in (True, False):
            mine = columns[(width == one) & (flat == shape)]
            if not len(mine):
                continue
            if shape:
                height = np.zeros(len(mine), dtype=np.int64)
                blocks = -(-mine[:, 5] // block)
            else:
                height = block // mine[:, 5]
                blocks = -(-mine[:, 4] // height)
            first = np.cumsum(blocks) - blocks
            table = np.ascontiguousarray(np.concatenate([mine, first[:, None], height[:, None]], axis=1))
            owners = np.repeat(np.arange(len(mine), dtype=np.int32), blocks)
            launches.append(Launch(one, shape, table, owners))
    return launches


def _expand(columns: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Replaces the chosen spans (columns in the order of `Spans`) by one span for each of their rows."""
    count = np.where(chosen, columns[:, 4], 1)
    place = np.repeat(np.arange(len(columns)), count)
    row = np.arange(len(place), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    result = columns[place]
    result[:, 0] += row * result[:, 2]
    result[:, 1] += row * result[:, 3]
    result[chosen[place], 4] = 1
    return result


def far_instances(device: torch.device) -> int:
    """Instances of the kernel that keep a link to another GPU full, and leave the rest of `device` to other kernels.

    With one to two for each multiprocessor the link runs at its full rate, and copies inside the device beside it nearly at
    theirs; a kernel with all its instances makes whatever is queued behind it wait.
    """
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def unavailable() -> str | None:
    """Why `GatherProgram` cannot work with what is installed here; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; it comes with torch's CUDA builds (pip install triton)"
    return None


class _Program:
    """What the programs share: the device, what must stay alive, and the check that a kernel can reach the memory."""

    def __init__(self, device: torch.device, sources: Sequence[torch.Tensor], keep: Sequence[torch.Tensor], where: str):
        if device.type != "cuda" or device.index is None:
            raise TransportError(f"{where}: expected a CUDA device with an index, found {device}")
        self._device = device
        self._keep = (*sources, *keep)
        self._used: set[int] = set()
        for tensor in sources:
            if tensor.numel():
                _reach(device.index, tensor, where)

    def _hold(self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> None:
        """Keeps torch from handing the memory out again while work queued on `stream` may still read it."""
        if stream.cuda_stream not in self._used:
            self._used.add(stream.cuda_stream)
            for tensor in tensors:
                tensor.record_stream(stream)


def _reach(device: int, tensor: torch.Tensor, where: str) -> None:
    if tensor.device.type != "cuda":
        raise TransportError(
            f"{where}: {tensor.numel()} bytes lie on {tensor.device}, expected memory of a CUDA device"
        )
    owner = tensor.get_device()
    if owner != device:
        cudadriver.enable_peer_access(device, owner)
    if not cudadriver.reachable(tensor.data_ptr(), device):
        raise TransportError(
            f"{where}: kernels of CUDA device {device} cannot read {tensor.numel()} bytes at {tensor.data_ptr():#x} of "
            f"device {owner}; let the link use another kind (prepared), or place both on devices with peer access"
        )


class GatherProgram(_Program):
    """Copies with one kernel for each width and shape of span: a single launch for aligned single rows.

    Args:
        spans: by address. Sources and destinations must not overlap, nor destinations one another.
        device: that copies; the destinations are its memory.
        sources: tensors that hold every source address; kept alive.
        keep: whatever else must live as long, the destinations.
        where: names the copies in errors.
        block: bytes of a block, a positive multiple of 16; default: by the bytes of all spans.
        words, warps: of one kernel instance; for measurements.
        instances: of the kernel that run at most; 0: one for each block.

    Raises:
        TransportError: Triton is missing or cannot compile, or the device cannot reach a source.
    """

    def __init__(
        self,
        spans: Spans,
        device: torch.device,
        sources: Sequence[torch.Tensor],
        keep: Sequence[torch.Tensor],
        where: str = "gathered copies",
        *,
        block: int | None = None,
        words: int | None = None,
        warps: int | None = None,
        instances: int = 0,
    ) -> None:
        super().__init__(device, sources, keep, where)
        self.nbytes = spans.nbytes
        self._block = block_bytes(self.nbytes) if block is None else block
        self._launches: list[tuple[torch.Tensor, torch.Tensor, int, bool]] = []
        reason = unavailable()
        if reason is not None:
            raise TransportError(f"{where}: {reason}")
        from . import gatherkernel

        self._launch = gatherkernel.launch
        self._shape = {
            "words": words or gatherkernel.WORDS,
            "warps": warps or gatherkernel.WARPS,
            "instances": instances,
        }
        with torch.cuda.device(device):
            for launch in split(spans, self._block):
                table = torch.from_numpy(launch.table).to(device)
                owners = torch.from_numpy(launch.owners).to(device)
                self._launches.append((table, owners, launch.width, launch.flat))
                self._prime(launch.width, launch.flat, where)

    def _prime(self, width: int, flat: bool, where: str) -> None:
        """Compiles and loads the kernel now, by a launch whose one span has no bytes: no sync pays for it."""
        empty = torch.tensor([[0, 0, 0, 0, 0, 0 if flat else width, 0, 1]], dtype=torch.int64, device=self._device)
        owners = torch.zeros(1, dtype=torch.int32, device=self._device)
        try:
            self._launch(empty, owners, self._block, width, flat, **self._shape)
            torch.cuda.current_stream(self._device).synchronize()
        except Exception as error:  # Triton raises what its compiler, the C compiler or the driver raise
            raise TransportError(
                f"{where}: the copy kernel for {width}-byte words does not compile or start: {error}; Triton needs a C "
                "compiler (gcc) and a writable TRITON_CACHE_DIR"
            ) from error

    def run(self) -> None:
        """Queues all copies on the current stream of the device."""
        with torch.cuda.device(self._device):
            self._hold(
                [x for table, owners, *_ in self._launches for x in (table, owners)], torch.cuda.current_stream()
            )
            for table, owners, width, flat in self._launches:
                self._launch(table, owners, self._block, width, flat, **self._shape)
