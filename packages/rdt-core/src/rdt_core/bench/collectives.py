"""Process groups of a bench: of the trainers, and from the first trainer to all engine ranks; NCCL on GPUs, Gloo on a CPU.

Also the trainers' own collectives that run while a sync runs, to show that neither waits for the other. The number of
collectives is fixed and the same on every rank, so that none is left without its partners. Refuses nothing itself: NCCL
refuses two ranks on one GPU, which `one_gpu_each` tells before anything is started.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import DeadlineError, SyncError, TransportError

_DURING = 16
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}


def one_gpu_each(gpus: Sequence[int], what: str) -> None:
    """Raises TransportError where two of these ranks share a GPU; `gpus` is empty on a CPU."""
    if len(set(gpus)) < len(gpus):
        raise TransportError(
            f"NCCL takes one rank a GPU, and {what} lie on GPUs {list(gpus)}; Gloo would be no comparison"
        )


class Group:
    """Membership in the process groups of a bench.

    Attributes:
        trainers: ranks below it; NCCL or Gloo.
        push: of the first trainer and all engine ranks; None where there are no engine ranks.
        rank, world_size: in all of it.
        timeout_s: of every collective.
    """

    def __init__(self, trainers: Any, push: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self.trainers, self.push = trainers, push
        self.rank, self.world_size = rank, world_size
        self.timeout_s = timeout_s

    def gather(self, padded: torch.Tensor, shape: Sequence[int], count: int) -> torch.Tensor:
        """All ranks' shards as one full tensor, by an all-gather of the trainers.

        Args:
            padded: this rank's rows, padded to the same number on every rank, contiguous.
            shape: of the full tensor.
            count: trainers.
        """
        if count == 1:
            return padded
        import torch.distributed as dist

        out = torch.empty((padded.shape[0] * count, *padded.shape[1:]), dtype=padded.dtype, device=padded.device)
        dist.all_gather_into_tensor(_bytes(out), _bytes(padded), group=self.trainers)
        return out.narrow(0, 0, shape[0])

    def broadcast(self, tensor: torch.Tensor) -> None:
        """From the first trainer to all engine ranks, in place. `tensor` is contiguous."""
        import torch.distributed as dist

        dist.broadcast(_bytes(tensor), src=0, group=self.push)

    def close(self) -> None:
        """Leaves all groups. Idempotent."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # bytes, because Gloo does not know every dtype
    return tensor.view(-1).view(torch.uint8)


def make_group(
    rendezvous: str, rank: int, world_size: int, trainers: int, device: torch.device, timeout_s: float
) -> Group:
    """Joins the process group of all ranks and those below it; a collective.

    Args:
        rendezvous: a file that does not exist yet, in a folder that all ranks see.
        rank: trainers first, then engine ranks.
        world_size: trainers and engine ranks.
        trainers: how many of them are trainers.
        device: of this rank.
        timeout_s: of every collective.
    """
    import torch.distributed as dist

    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    inner = dist.new_group(list(range(trainers)))
    push = dist.new_group([0, *range(trainers, world_size)]) if world_size > trainers else None
    return Group(inner, push, rank, world_size, timeout_s)


class Background:
    """All-reduces of the trainers around and during a publish: one is queued before it, a thread runs more of them.

    Args:
        group: joined already.
        device: of this rank.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._size = _ELEMENTS.get(device.type, 1 << 18)
        self._before: tuple[torch.Tensor, Any] | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def _tensor(self) -> torch.Tensor:
        return torch.full((self._size,), float(self._group.rank + 1), device=self._device)

    def _reduce(self) -> tuple[torch.Tensor, Any]:
        import torch.distributed as dist

        tensor = self._tensor()
        return tensor, dist.all_reduce(tensor, group=self._group.trainers, async_op=True)

    def _check(self, tensor: torch.Tensor, work: Any) -> None:
        import torch.distributed as dist

        work.wait()
        count = dist.get_world_size(self._group.trainers)
        want = count * (count + 1) / 2
        if not bool((tensor == want).all()):
            raise SyncError(f"an all-reduce of rank {self._group.rank} beside a sync gave {tensor[0]}, expected {want}")

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                with torch.cuda.stream(torch.cuda.Stream(self._device)):
                    for _ in range(_DURING):
                        self._check(*self._reduce())
            else:
                for _ in range(_DURING):
                    self._check(*self._reduce())
        except BaseException as error:
            self._failure = error

    def begin(self) -> None:
        """Queues one collective and lets others run from now on."""
        self._before = self._reduce()
        self._failure = None
        self._thread = threading.Thread(target=self._run, name="rdt-bench-collectives", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Waits for all that were begun and checks what they gave.

        Raises:
            DeadlineError: they did not end.
            SyncError: a wrong result.
        """
        if self._before is None or self._thread is None:
            return
        self._thread.join(self._group.timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(
                f"collectives of rank {self._group.rank} beside a sync had not ended after {self._group.timeout_s:.0f} s"
            )
        if self._failure is not None:
            raise SyncError(f"collectives of rank {self._group.rank} beside a sync failed: {self._failure}")
        self._check(*self._before)
