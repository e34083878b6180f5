"""Which GPU a name means: indices, UUIDs and MIG instances, as nvidia-smi, Ray and `CUDA_VISIBLE_DEVICES` write them.

The mapping between the index inside a process, the index on the machine and the UUID is pure; the machine's own list comes
from NVML where `nvidia-ml-py` is installed, else from `nvidia-smi -L`. A mask from which CUDA would silently drop devices
is refused, with what CUDA would make of it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import PlacementError

MASK = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
PCI_ORDER = "PCI_BUS_ID"

_GPU_LINE = re.compile(r"GPU (\d+): (.*) \(UUID: (GPU-[0-9a-fA-F-]+)\)")
_MIG_LINE = re.compile(r"\s+MIG \S.*Device\s+(\d+): \(UUID: (MIG-\S+)\)")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine.

    Attributes:
        index: as nvidia-smi counts, in the order of the PCI bus.
        uuid: "GPU-…".
        name: of the model, "NVIDIA H200".
        instances: UUIDs of its MIG instances in order; empty where MIG is off.
    """

    index: int
    uuid: str
    name: str = ""
    instances: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Device:
    """What one entry of a mask means: a GPU or one of its MIG instances.

    Attributes:
        index: of the GPU on this machine.
        uuid: "GPU-…", or "MIG-…" for an instance.
    """

    index: int
    uuid: str

    @property
    def bare_uuid(self) -> str:
        """The UUID without its prefix, as torch and `NodeMeta.device_uuid` write it."""
        return self.uuid.partition("-")[2]


def parse_list(text: str) -> tuple[Gpu, ...]:
    """Reads what `nvidia-smi -L` prints.

    Raises:
        PlacementError: a line that is neither a GPU nor a MIG instance; names it.
    """
    gpus: list[Gpu] = []
    for line in text.splitlines():
        if match := _GPU_LINE.fullmatch(line.rstrip()):
            gpus.append(Gpu(int(match[1]), match[3], match[2]))
        elif (match := _MIG_LINE.fullmatch(line.rstrip())) and gpus:
            last = gpus[-1]
            gpus[-1] = Gpu(last.index, last.uuid, last.name, (*last.instances, match[2]))
        elif line.strip() and line.strip() != "No devices found.":
            raise PlacementError(f"nvidia-smi -L printed a line that names no GPU: {line!r}")
    return tuple(gpus)


def read_nvml(nvml: Any) -> tuple[Gpu, ...]:
    """Asks NVML for this machine's GPUs.

    Args:
        nvml: the module `pynvml`, initialised.
    """
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        try:
            mig = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
        except nvml.NVMLError:  # a GPU that has no MIG
            mig = False
        instances = []
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if mig else 0):
            try:
                instances.append(
                    _text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
                )
            except nvml.NVMLError:  # slots are counted whether or not an instance was made in them
                continue
        gpus.append(
            Gpu(index, _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)), tuple(instances))
        )
    return tuple(gpus)


def inventory(timeout_s: float = 20.0) -> tuple[Gpu, ...]:
    """Lists this machine's GPUs, whatever the environment of this process hides. Makes no CUDA context.

    Args:
        timeout_s: deadline of `nvidia-smi`, in seconds.

    Returns:
        In the order of the PCI bus; empty where the machine has no NVIDIA driver.

    Raises:
        PlacementError: there is a driver and it does not answer.
    """
    try:
        import pynvml as nvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return _from_smi(timeout_s)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return ()
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_DRIVER_NOT_LOADED:
            return ()
        raise PlacementError(f"the NVIDIA driver of this machine does not answer NVML: {error}") from error
    try:
        return read_nvml(nvml)
    except nvml.NVMLError as error:
        raise PlacementError(f"NVML does not list this machine's GPUs: {error}") from error
    finally:
        nvml.nvmlShutdown()


def find(name: str, gpus: Sequence[Gpu]) -> Device:
    """The GPU or MIG instance that one name means.

    Args:
        name: an index ("3"), a UUID or a prefix of one GPU's UUID ("GPU-5b8e"), or a MIG instance ("MIG-…").
        gpus: of the machine that the name is from.

    Raises:
        PlacementError: no GPU, more than one, or a whole GPU that is cut into MIG instances; lists what there is.
    """
    if name.startswith("MIG-"):
        found = [Device(gpu.index, uuid) for gpu in gpus for uuid in gpu.instances if uuid == name]
    elif name.startswith("GPU-"):
        found = [Device(gpu.index, gpu.uuid) for gpu in gpus if gpu.uuid.lower().startswith(name.lower())]
    elif name.isascii() and name.isdecimal():
        found = [Device(gpu.index, gpu.uuid) for gpu in gpus if gpu.index == int(name)]
    else:
        raise PlacementError(
            f"{name!r} names no GPU; expected an index, a UUID that starts with GPU-, or a MIG instance"
        )
    if len(found) != 1:
        what = "no GPU of this machine" if not found else f"{len(found)} GPUs of this machine"
        raise PlacementError(f"{name!r} means {what}, which has {_listed(gpus)}")
    cut = [gpu for gpu in gpus if gpu.uuid == found[0].uuid and gpu.instances]
    if cut:
        raise PlacementError(
            f"{name!r} is cut into the MIG instances {', '.join(cut[0].instances)}: name the instance that is meant"
        )
    return found[0]


def visible(mask: str | None, gpus: Sequence[Gpu], *, device_order: str | None = None) -> tuple[Device, ...]:
    """What a process with this mask sees: device i of the process is entry i of the answer.

    Args:
        mask: its `CUDA_VISIBLE_DEVICES`; None where the variable is not set.
        gpus: of its machine.
        device_order: its `CUDA_DEVICE_ORDER`. Unless it is "PCI_BUS_ID", CUDA counts the fastest GPU first, so that
            indices mean something else where models differ.

    Raises:
        PlacementError: CUDA would hide devices without a word (duplicates, an unknown entry before others, two kinds of
            entries, a second MIG instance), or the entries mean other GPUs than nvidia-smi's.
    """
    if mask is None:
        _check_order(gpus, device_order)
        return tuple(find(str(gpu.index), gpus) for gpu in gpus)
    entries = mask.split(",")
    if entries[0].strip() in ("", "NoDevFiles"):
        entries[0] = "-1"
    seen: list[Device] = []
    kinds = set()
    for position, entry in enumerate(entries):
        if entry.strip() in ("", "-1"):
            # CUDA stops reading here, which is how a process is given no device on purpose
            _check_nothing_follows(mask, entries[position + 1 :])
            break
        by_index = not entry.startswith(("GPU-", "MIG-"))
        kinds.add("index" if by_index else entry[:3])
        if len(kinds) > 1:
            raise PlacementError(
                f"{MASK}={mask!r} mixes indices, GPU and MIG names; CUDA stops at the first other kind"
            )
        if by_index:
            _check_order(gpus, device_order)
        try:
            device = find(entry.strip() if by_index else entry, gpus)
        except PlacementError as error:
            raise PlacementError(f"{MASK}={mask!r}: {error}; CUDA stops there and hides all that follow") from None
        if device in seen:
            raise PlacementError(f"{MASK}={mask!r} names GPU {device.index} twice; CUDA then shows no device at all")
        seen.append(device)
    if kinds == {"MIG"} and len(seen) > 1:
        raise PlacementError(f"{MASK}={mask!r} names {len(seen)} MIG instances; CUDA shows a process only the first")
    return tuple(seen)


def local_index(name: str, mask: str | None, gpus: Sequence[Gpu], *, device_order: str | None = None) -> int:
    """The index, in a process with this mask, of the GPU that `name` means on the machine.

    Args:
        name: see `find`; what Ray's `get_accelerator_ids` says is such a name.
        mask: see `visible`.
        gpus: of the machine.
        device_order: see `visible`.

    Raises:
        PlacementError: the process does not see that GPU; or see `find` and `visible`.
    """
    device, devices = find(name, gpus), visible(mask, gpus, device_order=device_order)
    if device not in devices:
        raise PlacementError(
            f"GPU {name} ({device.uuid}) is hidden from this process by {MASK}={mask!r}, which shows "
            f"{[one.index for one in devices]}"
        )
    return devices.index(device)


def _from_smi(timeout_s: float) -> tuple[Gpu, ...]:
    try:
        result = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return ()
    except subprocess.TimeoutExpired as error:
        raise PlacementError(f"nvidia-smi -L did not answer within {timeout_s:g} s") from error
    if result.returncode:
        raise PlacementError(
            f"nvidia-smi -L failed with {result.returncode}: {(result.stdout + result.stderr).strip()}"
        )
    return parse_list(result.stdout)


def _check_order(gpus: Sequence[Gpu], device_order: str | None) -> None:
    models = sorted({gpu.name for gpu in gpus})
    if len(models) > 1 and device_order != PCI_ORDER:
        raise PlacementError(
            f"this machine has GPUs of different models ({', '.join(models)}), which CUDA counts fastest first while "
            f"nvidia-smi and Ray count them by the PCI bus; set {ORDER}={PCI_ORDER} in the process's environment"
        )


def _check_nothing_follows(mask: str, entries: Sequence[str]) -> None:
    if any(entry.strip() not in ("", "-1") for entry in entries):
        raise PlacementError(f"{MASK}={mask!r}: CUDA stops at the entry that names no device and hides all that follow")


def _listed(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.index}: {gpu.uuid}" for gpu in gpus) or "none"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
