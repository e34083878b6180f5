"""The prepared transfer of the kinds that copy with this process's own loads and stores (`local`, `mapped`).

On a CPU `post` moves the bytes before it returns. On CUDA it queues the copies on a stream of its own, ordered after
the work already queued on the current stream, so that a receiver can scatter one chunk while the next one is copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..errors import DeadlineError, TransportError
from .base import Copies, Turn
from .copying import CopyProgram

_SPIN_S = 300e-6
_POLL_S = 50e-6


class MemoryTransfer:
    """One move by direct copies; see `PreparedTransfer`.

    Args:
        program: the copies.
        destinations: kept alive with the transfer.
        where: names the link in errors.
        gone: says why the owner's memory can no longer be relied on, or None.
        stream: CUDA stream of the copies; None where all memory is on a CPU.
        far: whether they read another GPU's memory.
    """

    def __init__(
        self,
        program: CopyProgram,
        destinations: list[torch.Tensor],
        where: str,
        gone: Callable[[], str | None],
        stream: torch.cuda.Stream | None = None,
        far: bool = False,
    ) -> None:
        self.nbytes = program.nbytes
        self.turn = Turn.BLOCKING if stream is None else Turn.FAR_KERNEL if far else Turn.KERNEL
        self._program: CopyProgram | None = program
        self._where = where
        self._gone = gone
        self._stream = stream
        self._done: torch.cuda.Event | None = None
        self._posted = False
        if stream is not None:
            for tensor in destinations:
                if tensor.device.type == "cuda":
                    # should the transfer be dropped with copies in flight, torch must not hand the memory out again
                    tensor.record_stream(stream)

    def post(self) -> None:
        """See `PreparedTransfer.post`."""
        if self._program is None:
            raise TransportError(f"{self._where}: a transfer of {self.nbytes} bytes was posted after its release")
        if self._posted:
            raise TransportError(f"{self._where}: a transfer of {self.nbytes} bytes was posted twice without a wait")
        self._check()
        self._posted = True
        if self._stream is None:
            self._program.run()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._program.run()
            self._done = torch.cuda.Event()
            self._done.record(self._stream)

    def poll(self) -> bool:
        """See `PreparedTransfer.poll`."""
        return self._done is None or self._done.query()

    def wait(self, deadline: float) -> None:
        """See `PreparedTransfer.wait`."""
        if not self._posted:
            raise TransportError(f"{self._where}: a transfer of {self.nbytes} bytes is waited for, but was not posted")
        if self._done is not None and self._stream is not None:
            started = time.monotonic()
            while not self._done.query():
                now = time.monotonic()
                if now >= deadline:
                    raise DeadlineError(
                        f"{self._where}: {self.nbytes} bytes had not landed after {now - started:.1f} s"
                    )
                if now - started > _SPIN_S:
                    time.sleep(_POLL_S)
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)
        self._posted = False
        self._check()

    def _check(self) -> None:
        reason = self._gone()
        if reason is not None:
            raise TransportError(f"{self._where}: {self.nbytes} bytes cannot be read: {reason}")

    def release(self) -> None:
        """See `PreparedTransfer.release`."""
        self._program = None


def stream_for(
    copies: Copies, regions: dict[int, torch.Tensor], destinations: list[torch.Tensor]
) -> torch.cuda.Stream | None:
    """The stream for these copies: on the destinations' CUDA device, else on the sources', else none."""
    tensors = [destinations[index] for index in set(copies.destination.tolist()) if 0 <= index < len(destinations)]
    tensors += [regions[region] for region in set(copies.source_region.tolist()) if region in regions]
    for tensor in tensors:
        if tensor.device.type == "cuda":
            return torch.cuda.Stream(tensor.device)
    return None
