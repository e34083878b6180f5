"""Memory that other processes read: arenas made to be exported, and parameter storages moved once to shared memory.

On a CPU an arena is an anonymous memory file, which leaves no name behind and goes away with its last user; on CUDA it
is plain device memory, never an expandable segment. Memory is handed out once, in aligned spans, and never moves or
shrinks. Refuses to hand out more than it has and to share what would not fit; nothing here falls back to a copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch

from . import cudadriver
from .errors import TransportError

ALIGNMENT = 256
#: Arenas that are registered for the life of the process, as NIXL's registrations are, and that nobody uses at the moment,
#: by device and size. Whoever connects again wants the same sizes again: without this every time would cost their memory.
_SPARE: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
_RETAINED: set[int] = set()  # addresses of storages that stay
_SHM = "/dev/shm"  # where torch makes the files of shared storages


class Arena:
    """One allocation that can be exported and registered, handed out in aligned spans.

    Attributes:
        tensor: the whole arena, 1-D uint8.
        nbytes: its size.
        used: bytes handed out so far, alignment included.

    Args:
        nbytes: size in bytes; at least 1.
        device: "cpu" or a CUDA device.

    Raises:
        TransportError: the machine has no such memory left; names the bytes wanted.
    """

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        if nbytes <= 0:
            raise TransportError(f"an arena of {nbytes} bytes was asked for; expected at least 1")
        self.nbytes = nbytes
        self.device = torch.device(device)
        self.used = 0
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        spare = _SPARE.get((self.device, nbytes))
        if spare:
            self.tensor = spare.pop().zero_()
        elif self.device.type == "cpu":
            self.tensor = _anonymous(nbytes)
        elif self.device.type == "cuda":
            self.tensor = cudadriver.allocate(nbytes, self.device.index).tensor()
        else:
            raise TransportError(f"no arena can be made on device {self.device}; known: cpu, cuda")

    def span(self, nbytes: int, align: int = ALIGNMENT) -> tuple[int, torch.Tensor]:
        """Hands out the next `nbytes` bytes.

        Args:
            nbytes: size of the span, 0 or more.
            align: alignment of its first byte, a power of two.

        Returns:
            The span's byte offset in the arena and its 1-D uint8 view.

        Raises:
            TransportError: the arena is full; names the sizes.
        """
        start = -(-self.used // align) * align
        if nbytes < 0 or start + nbytes > self.nbytes:
            raise TransportError(
                f"an arena of {self.nbytes} bytes on {self.device} with {self.used} handed out has no room for "
                f"{nbytes} more (aligned to {align}); make the arena larger"
            )
        self.used = start + nbytes
        return start, self.tensor[start : start + nbytes]

    @property
    def free(self) -> int:
        """Bytes not handed out yet."""
        return self.nbytes - self.used


def retain(tensor: torch.Tensor) -> None:
    """Notes that the storage below `tensor` stays for the life of the process, because it is registered."""
    _RETAINED.add(tensor.untyped_storage().data_ptr())


def give_back(arena: torch.Tensor) -> None:
    """Offers the memory of an arena to the next one of its size, if it stays anyway; else it goes away with its last user.

    Args:
        arena: `Arena.tensor`. Nobody writes or reads it from here on; what others were told of it is void.
    """
    if not arena.numel() or arena.untyped_storage().data_ptr() not in _RETAINED:
        return
    spare = _SPARE.setdefault((arena.device, arena.numel()), [])
    if all(one.data_ptr() != arena.data_ptr() for one in spare):
        spare.append(arena)


def _available() -> int:
    """Bytes of memory that this process may still take: what the machine has left, or its container's limit if less."""
    least = psutil.virtual_memory().available
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for folder in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")):
            try:
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue  # another version of control groups, or no limit ("max")
            # pages of files are given back when memory is needed
            least = min(least, most - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0)))
    return max(least, 0)


def _anonymous(nbytes: int) -> torch.Tensor:
    available = _available()
    if nbytes > available:
        # a memory file has no limit of its own: reserving it takes page after page until the kernel ends processes,
        # and not only this one
        raise TransportError(f"no shared memory of {nbytes} bytes can be made: {available} bytes are available")
    fd = os.memfd_create("rdt", os.MFD_CLOEXEC)
    try:
        # reserved now: a memory file that only grows when touched kills the process when the machine runs out
        os.posix_fallocate(fd, 0, nbytes)
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(fd, nbytes)  # type: ignore[attr-defined]
    except (OSError, RuntimeError) as error:
        raise TransportError(f"no shared memory of {nbytes} bytes can be made: {error}") from error
    finally:
        os.close(fd)
    return whole(storage)


def whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """Returns all of `storage` as a 1-D uint8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def share(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Moves a CPU storage to shared memory, in place: every tensor and view over it stays what it was.

    Its address changes once, at the first call; call it before anything remembers the address (registration, a plan).
    Later calls change nothing.

    Returns:
        File descriptor (owned by the storage; not to be closed) and size in bytes.

    Raises:
        TransportError: not CPU memory, an empty storage, memory mapped from somewhere without a descriptor, or too
            little shared memory left.
    """
    nbytes = storage.nbytes()
    if storage.device.type != "cpu":
        raise TransportError(f"only CPU storages are moved to shared memory; found one on {storage.device}")
    if nbytes == 0:
        raise TransportError("a storage of 0 bytes cannot be shared; skip empty shards")
    if not storage.is_shared():
        room = os.statvfs(_SHM) if os.path.isdir(_SHM) else None
        # checked here because running out later, when the pages are touched, kills the process without a word
        if room is not None and room.f_bavail * room.f_frsize < nbytes:
            raise TransportError(
                f"moving {nbytes} bytes to shared memory needs that much room in {_SHM}, which has "
                f"{room.f_bavail * room.f_frsize}; enlarge it (docker: --shm-size) or use mode 'snapshot'"
            )
    try:
        fd, size = storage._share_fd_cpu_()
    except RuntimeError as error:
        raise TransportError(f"a storage of {nbytes} bytes cannot be moved to shared memory: {error}") from error
    if fd < 0:
        raise TransportError(
            f"a storage of {nbytes} bytes is mapped from a file that is closed, and cannot be given to others; "
            "copy the parameters out of the mapped file or use mode 'snapshot'"
        )
    return fd, size


def can_share(storage: torch.UntypedStorage) -> bool:
    """Whether `share` can give a CPU storage to others: not where it is mapped from a file that is closed."""
    return not storage.is_shared() or storage._share_fd_cpu_()[0] >= 0


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Finds the distinct storages below `tensors`, in first-seen order.

    Returns:
        Address of the storage to a 1-D uint8 tensor over all of it. Empty storages and meta tensors are left out.
    """
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if tensor.is_meta:
            continue
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if storage.nbytes() == 0 or (address in found and found[address].numel() >= storage.nbytes()):
            continue
        found[address] = whole(storage)
    return found


#: allocations from which on it takes longer to ask the driver about each than to confirm a count meanwhile
_COUNTED_FROM = 1000


class Allocations:
    """The device allocations below some tensors, remembered so that others at the same addresses are noticed.

    Between two syncs memory may be given back and taken again (offloaded parameters, an emptied cache, a memory saver): a
    parameter can then lie where it lay, in memory that no reader ever mapped. Empty for CPU tensors, whose storages a
    publisher keeps alive, so that nothing else can take their addresses.

    What torch's own allocator took with `cudaMalloc` is given back by that alone, which counts how often: where the count is that
    of before, `ids` does not ask the driver. Anybody may set the count back, so that `confirm` asks, when nobody waits for it.

    Args:
        tensors: whose memory is looked up.
        counted: whether `ids` may go by the count.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, counted: bool = False) -> None:
        self._bases: dict[int, dict[int, None]] = {}  # first addresses, by device
        ranges: list[tuple[int, int]] = []
        for tensor in tensors:
            if tensor.device.type != "cuda" or not tensor.numel():
                continue
            address = tensor.data_ptr()
            if any(base <= address < end for base, end in ranges[-4:]):  # neighbours mostly share one
                continue
            device = tensor.device.index or 0
            base, size = cudadriver.allocation(address, device)
            self._bases.setdefault(device, {})[base] = None
            ranges.append((base, base + size))
        self._counted = {
            device
            for device, bases in self._bases.items()
            if counted and len(bases) >= _COUNTED_FROM and _is_counted(bases, device)
        }
        self._known: dict[int, tuple[int, tuple[int, ...]]] = {}  # count and numbers, by device
        self._unasked: set[int] = set()  # devices of which the latest `ids` went by the count

    def ids(self) -> tuple[int, ...]:
        """One number for each allocation, other numbers once one was given back.

        Raises:
            TransportError: there is no memory any more where one of them was.
        """
        self._unasked.clear()
        return tuple(number for device in self._bases for number in self._ask(device))

    @property
    def is_confirmed(self) -> bool:
        """Whether the driver was asked about all that the latest `ids` returned."""
        return not self._unasked

    def confirm(self) -> bool:
        """Asks the driver whether the latest `ids` were right. If not, the next ones will be.

        Raises:
            TransportError: there is no memory any more where one of them was.
        """
        unasked, self._unasked = self._unasked, set()
        for device in unasked:
            count, numbers = self._known.pop(device)
            if cudadriver.allocation_ids([*self._bases[device]], device) != numbers:
                return False
            self._known[device] = count, numbers
        return True

    def _ask(self, device: int) -> tuple[int, ...]:
        if device not in self._counted:
            return cudadriver.allocation_ids([*self._bases[device]], device)
        count = _given_back(device)  # first: what is given back meanwhile is noticed the next time
        known = self._known.get(device)
        if known is None or known[0] != count:
            known = self._known[device] = count, cudadriver.allocation_ids([*self._bases[device]], device)
        else:
            self._unasked.add(device)
        return known[1]


def _given_back(device: int) -> int:
    """How often torch's allocator gave memory back to the driver."""
    return int(torch.cuda.memory_stats(device)["segment.all.freed"])


def _is_counted(bases: Iterable[int], device: int) -> bool:
    """Whether all of these allocations come from `cudaMalloc` through torch's allocator, which counts what it gives back."""
    try:
        _given_back(device)
        taken = {segment["address"] for segment in torch.cuda.memory_snapshot() if segment["device"] == device}
    except (RuntimeError, KeyError):  # another allocator
        return False
    return all(base in taken and cudadriver.exportable(base, device) for base in bases)


def is_expandable(tensor: torch.Tensor) -> bool:
    """Whether CUDA memory comes from the driver's virtual-memory calls (torch's expandable segments).

    Such memory registers with NIXL without a complaint and is then read at a fraction of the speed, and CUDA IPC cannot
    map it. Always False for CPU tensors and for tensors without elements.
    """
    if tensor.device.type != "cuda" or tensor.untyped_storage().nbytes() == 0:
        return False
    return not cudadriver.exportable(tensor.untyped_storage().data_ptr(), tensor.device.index or 0)


def settle(device: torch.device) -> None:
    """Waits until all work queued on the device is done, so that others read what was written. Nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
