"""The few calls of the CUDA driver that rdt needs and torch does not offer: plain allocations, CUDA IPC by handle,
and peer access.

Torch's own allocator may hand out expandable segments, which NIXL reads at a five-hundredth of the speed and which no
other process can map; memory from here is always plain `cuMemAlloc`. The library is loaded on first use, so that a
machine without a GPU never touches it. Refuses, as TransportError, whatever the driver refuses, with the driver's name
for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import torch

from .errors import TransportError

HANDLE_BYTES = 64
_LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
_ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(f"the CUDA driver library libcuda.so.1 does not load: {error}") from error


def _call(name: str, *arguments: Any, accept: tuple[int, ...] = ()) -> None:
    driver = _driver()
    code = getattr(driver, name)(*arguments)
    if code and code not in accept:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        label = text.value.decode() if text.value else str(code)
        raise TransportError(f"the CUDA driver refused {name}: {label}")


def _enter(device: int) -> Any:
    """Makes the primary context of `device` current in this thread: the driver calls act on the current context."""
    torch.cuda.init()
    guard = torch.cuda.device(device)
    guard.__enter__()
    torch.cuda.current_stream(device).query()
    return guard


class Memory:
    """A stretch of device memory that torch did not allocate, readable by torch through `tensor()`.

    Attributes:
        address: device pointer.
        nbytes: size.
        device: device index in this process.
    """

    def __init__(self, address: int, nbytes: int, device: int, base: int, release: str) -> None:
        self.address = address
        self.nbytes = nbytes
        self.device = device
        self._base = base
        self._release = release

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def tensor(self) -> torch.Tensor:
        """Returns the memory as a 1-D uint8 tensor, which keeps it alive."""
        with torch.cuda.device(self.device):
            tensor = torch.as_tensor(self)
        if tensor.data_ptr() != self.address:
            raise TransportError(
                f"torch copied {self.nbytes} bytes of device memory instead of viewing them: "
                f"found address {tensor.data_ptr():#x}, expected {self.address:#x}"
            )
        return tensor

    def __del__(self) -> None:
        try:
            _call(self._release, ctypes.c_uint64(self._base))
        except Exception:  # the context may be gone when the interpreter ends; then the memory is too
            return


def allocate(nbytes: int, device: int) -> Memory:
    """Allocates plain device memory that can be exported and registered.

    Raises:
        TransportError: the driver has no `nbytes` left on `device`.
    """
    guard = _enter(device)
    try:
        address = ctypes.c_uint64()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return Memory(address.value, nbytes, device, address.value, "cuMemFree_v2")
    finally:
        guard.__exit__(None, None, None)


@lru_cache(maxsize=1)
def _pointer_attribute() -> Any:
    """`cuPointerGetAttribute` of plain integers, which ctypes converts by itself."""
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    return prototype(("cuPointerGetAttribute", _driver()))


def allocation(address: int, device: int) -> tuple[int, int]:
    """Returns first address and size of the allocation that holds `address`. Raises TransportError where nothing is mapped."""
    guard = _enter(device)
    try:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value
    finally:
        guard.__exit__(None, None, None)


def allocation_ids(addresses: Sequence[int], device: int) -> tuple[int, ...]:
    """Returns for each address a number that no two allocations of this process share, even at one address in turn.

    About a microsecond each: this runs in every sync.

    Raises:
        TransportError: nothing is mapped at one of them.
    """
    guard = _enter(device)
    try:
        ask = _pointer_attribute()
        numbers = (ctypes.c_ulonglong * len(addresses))()
        first = ctypes.addressof(numbers)
        places = range(first, first + ctypes.sizeof(numbers), ctypes.sizeof(ctypes.c_ulonglong))
        for code, address in zip(map(ask, places, repeat(_BUFFER_ID), addresses), addresses, strict=True):
            if code:
                number = ctypes.c_ulonglong()
                _call("cuPointerGetAttribute", ctypes.byref(number), _BUFFER_ID, ctypes.c_uint64(address))
        return tuple(numbers)
    finally:
        guard.__exit__(None, None, None)


def exportable(address: int, device: int) -> bool:
    """Whether CUDA IPC (and so NIXL's fast path) can serve the allocation that holds `address`."""
    guard = _enter(device)
    try:
        capable = ctypes.c_int()
        _call("cuPointerGetAttribute", ctypes.byref(capable), _LEGACY_IPC_CAPABLE, ctypes.c_uint64(address))
        return bool(capable.value)
    finally:
        guard.__exit__(None, None, None)


def export(address: int, device: int) -> tuple[bytes, int]:
    """Returns the IPC handle of the allocation that holds `address`, and the offset of `address` inside it.

    Raises:
        TransportError: the memory cannot be exported.
    """
    guard = _enter(device)
    try:
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)), address - base.value
    finally:
        guard.__exit__(None, None, None)


def open_exported(handle: bytes, offset: int, nbytes: int, device: int) -> Memory:
    """Maps another process's allocation into this one.

    The driver counts how often a process opened one handle, so that several regions of one allocation may be opened and
    closed on their own.

    Args:
        handle: from `export` in another process; the exporting process itself is refused by the driver.
        offset: first byte, inside the allocation.
        nbytes: bytes from there.
        device: index, in this process, of the device whose kernels and copies use the memory: it need not be the one that
            holds it, and this process need not see that one. Torch takes the memory for one of `device`'s own.
    """
    if len(handle) != HANDLE_BYTES:
        raise TransportError(f"a CUDA IPC handle has {HANDLE_BYTES} bytes, found {len(handle)}")
    guard = _enter(device)
    try:
        raw = _IpcHandle.from_buffer_copy(handle)
        base, start, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), raw, ctypes.c_uint(_LAZY_PEER_ACCESS))
        memory = Memory(base.value + offset, nbytes, device, base.value, "cuIpcCloseMemHandle")
        _call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), base)
        if offset < 0 or offset + nbytes > size.value:
            raise TransportError(
                f"the mapped allocation has {size.value} bytes; the region needs bytes {offset} to {offset + nbytes}"
            )
        return memory
    finally:
        guard.__exit__(None, None, None)


def enable_peer_access(device: int, peer: int) -> None:
    """Lets kernels of `device` read and write all memory that this process holds or mapped on `peer`. Idempotent.

    Raises:
        TransportError: the two devices have no peer access.
    """
    guard = _enter(peer)
    context = ctypes.c_void_p()
    try:
        _call("cuCtxGetCurrent", ctypes.byref(context))
    finally:
        guard.__exit__(None, None, None)
    guard = _enter(device)
    try:
        _call("cuCtxEnablePeerAccess", context, ctypes.c_uint(0), accept=(_ALREADY_ENABLED,))
    finally:
        guard.__exit__(None, None, None)


def reachable(address: int, device: int) -> bool:
    """Whether kernels of `device` can use `address` as it is: asked of the driver, nothing is read."""
    guard = _enter(device)
    try:
        pointer = ctypes.c_uint64()
        _call("cuPointerGetAttribute", ctypes.byref(pointer), _DEVICE_POINTER, ctypes.c_uint64(address))
        return pointer.value == address
    except TransportError:  # the driver's way to say that there is no such pointer
        return False
    finally:
        guard.__exit__(None, None, None)
