"""Judgements about GPUs, masks, UCX's settings and torch's allocator: pure functions of `Facts`.

The two worst mistakes of all are here: reads of device memory that UCX emulates over TCP, and memory in expandable
segments, which registers without a complaint and is then read at a thousandth of the rate.
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import settings
from ..errors import PlacementError
from ..gpus import MASK, ORDER, PCI_ORDER, Gpu, visible
from .facts import Facts, Finding, Severity, finding
from .ucxnames import TLS, excludes, listed, transports, unknown

_DEVICES = "UCX_NET_DEVICES"
_LOST = {
    "cma": "reads of another process's CPU memory are emulated, some 10 times slower",
    "cuda_ipc": "reads of another process's GPU memory go through the host, a hundred times slower and more",
    "cuda_copy": "UCX does not recognise GPU memory: transfers of it fail or crash",
    "rc": "RDMA devices are left unused and bytes between nodes go over TCP, 10 to 100 times slower",
}
_WORDY = ("debug", "trace", "req", "data", "async", "func", "poll")
_FACTOR = settings.DIRECT_GBPS / settings.EMULATED_GBPS


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """Which GPUs there are, and whether torch sees them."""
    if facts.gpus_error:
        yield finding(
            Severity.BROKEN, "gpus", facts.gpus_error, "no rank can be given a GPU",
            "nvidia-smi must work in the container (docker: --gpus all); else restart the driver",
        )  # fmt: skip
    elif not facts.gpus:
        yield finding(Severity.OK, "gpus", "no GPU: weights lie in CPU memory")
    for gpu in facts.gpus:
        mig = f", MIG: {', '.join(gpu.instances)}" if gpu.instances else ""
        yield finding(Severity.OK, "gpus", f"GPU {gpu.index}: {gpu.name}, {gpu.uuid}{mig}")
    if facts.gpus and not facts.nvml:
        yield finding(
            Severity.NOTE, "gpus", "no bindings of NVML are installed: NVLink and peer access are not known",
            "the measured rates still tell", "pip install nvidia-ml-py",
        )  # fmt: skip


def check_mask(facts: Facts) -> Iterator[Finding]:
    """What this process sees of them: devices that a mask hides without a word."""
    if not facts.gpus:
        return
    mask = facts.environment.get(MASK)
    present = tuple(Gpu(one.index, one.uuid, one.name, one.instances) for one in facts.gpus)
    try:
        seen = visible(mask, present, device_order=facts.environment.get(ORDER))
    except PlacementError as error:
        models = len({gpu.name for gpu in present}) > 1
        yield finding(
            Severity.BROKEN, "gpu-mask", str(error), "ranks get other GPUs than were meant, or none",
            "" if models else f"unset {MASK}, or name each GPU once", {ORDER: PCI_ORDER} if models else None,
        )  # fmt: skip
        return
    if len(seen) != facts.device_count:
        yield finding(
            Severity.BROKEN, "gpu-mask",
            f"{MASK}={'(not set)' if mask is None else mask} shows {len(seen)} GPUs, but torch sees {facts.device_count}",
            "CUDA does not start for all of them",
            "python -c 'import torch; torch.cuda.init()' says why; a driver that is older than torch's CUDA is the usual cause",
        )  # fmt: skip
    elif mask is not None:
        shown = ", ".join(str(one.index) for one in seen) or "none"
        yield finding(Severity.OK, "gpu-mask", f"{MASK}={mask} shows GPUs {shown}")


def check_pairs(facts: Facts) -> Iterator[Finding]:
    """Peer access and NVLink between the GPUs."""
    apart = [f"{one.first} and {one.second}" for one in facts.pairs if one.peer is False]
    if apart:
        yield finding(
            Severity.SLOW, "peer-access", f"no peer access between GPUs {', '.join(apart)}",
            "mapped links between them do not work and NIXL goes through the host: some 20 GB/s where NVLink moves 290 to 390",
            "disable ACS and IOMMU for PCIe peer traffic, or place trainer and engine on GPUs that reach each other",
        )  # fmt: skip
    unlinked = [one for one in facts.pairs if one.peer and one.nvlink is False]
    if unlinked:
        yield finding(
            Severity.NOTE, "nvlink", f"{len(unlinked)} of {len(facts.pairs)} pairs of GPUs have peer access without NVLink",
            "PCIe moves some 25 to 50 GB/s, NVLink 290 to 390",
        )  # fmt: skip
    elif facts.pairs and not apart:
        kind = "NVLink" if all(one.nvlink for one in facts.pairs) else "unknown"
        yield finding(Severity.OK, "peer-access", f"{len(facts.pairs)} pairs of GPUs reach each other ({kind})")


def check_ucx(facts: Facts) -> Iterator[Finding]:
    """UCX's variables: what they exclude, and whether reads of device memory are direct."""
    if facts.backend != "UCX":
        return
    found = [*_transports(facts), *_exclusions(facts)]
    yield from found
    if facts.gpus:
        yield _zero_copy(facts)
    elif not found:
        yield finding(Severity.OK, "ucx", "UCX's variables exclude nothing that is needed")


def _exclusions(facts: Facts) -> Iterator[Finding]:
    value = facts.environment.get(_DEVICES)
    if value and not set(listed(value)) & {"all", *_device_names(facts)}:
        yield finding(
            Severity.BROKEN, "ucx-devices", f"{_DEVICES}={value} names no device of this node",
            f"UCX finds no way to another node; here are {', '.join(_device_names(facts)) or 'none'}", env={_DEVICES: "all"},
        )  # fmt: skip
    level = facts.environment.get("UCX_LOG_LEVEL", "").lower()
    if level in _WORDY:
        yield finding(
            Severity.SLOW, "ucx-log", f"UCX_LOG_LEVEL={level}", "UCX writes lines for every operation, in the middle of syncs",
            env={"UCX_LOG_LEVEL": "warn"},
        )  # fmt: skip


def _zero_copy(facts: Facts) -> Finding:
    reason = settings.slow_reads(facts.environment, facts.nvlinks)
    value = facts.environment.get(settings.GET_ZCOPY, "")
    links = "an unknown number of" if facts.nvlinks is None else facts.nvlinks
    if reason is None:
        shown = f"{settings.GET_ZCOPY}={value}" if value else f"{settings.GET_ZCOPY} is not set"
        unsure = facts.nvlinks is None and not settings.is_on(value)
        return finding(
            Severity.NOTE if unsure else Severity.OK, "ucx-get-zcopy", f"{shown}, {links} NVLinks visible",
            "if none is, NIXL reads device memory at a thousandth of the rate" if unsure else "",
            env={settings.GET_ZCOPY: "on"} if unsure else None,
        )  # fmt: skip
    what = f"{settings.GET_ZCOPY}={value}" if value else f"{settings.GET_ZCOPY} is not set"
    return finding(
        Severity.SLOW, "ucx-get-zcopy", f"{what}, and no NVLink is visible",
        f"NIXL reads another process's device memory over TCP, at {settings.EMULATED_GBPS:g} GB/s instead of "
        f"{settings.DIRECT_GBPS:,.0f}: {_FACTOR:,.0f} times slower (rdt sets it for the actors that it makes)",
        env={settings.GET_ZCOPY: "on"},
    )  # fmt: skip


def _transports(facts: Facts) -> Iterator[Finding]:
    value = facts.environment.get(TLS)
    if not value:
        return
    strange = unknown(value, facts.ucx_knows)
    if strange:
        yield _strange(facts, value, strange)
    needed = ["cma"]
    needed += ["cuda_copy", "cuda_ipc"] if facts.gpus else []
    needed += ["rc"] if any(one.state == "ACTIVE" for one in facts.verbs) else []
    missing = [name for name in needed if excludes(value, name)]
    for name in missing:
        severity = Severity.BROKEN if name == "cuda_copy" else Severity.SLOW
        yield finding(
            severity, "ucx-transports", f"{TLS}={value} leaves out {name}", _LOST[name],
            f"unset {TLS}, or export {TLS}=all", {TLS: "all"},
        )  # fmt: skip
    if not missing and not strange:
        yield finding(Severity.OK, "ucx-transports", f"{TLS}={value} has what is needed here")


def _strange(facts: Facts, value: str, strange: dict[str, str]) -> Finding:
    """Names that UCX does not have: a slip of the pen, mostly."""
    names = " or ".join(f"{name!r}" + (f" (like {near!r})" if near else "") for name, near in strange.items())
    what = f"{TLS}={value}: UCX{f' {facts.ucx}' if facts.ucx else ''} has no transport or group {names}"
    mend = f"correct the name, unset {TLS}, or export {TLS}=all"
    if value.startswith("^"):
        why = "UCX leaves out nothing for such a name, and does not say so"
    elif len(strange) < len(set(transports(value))):
        why = "UCX goes on with the other names alone, after a warning"
    else:
        why = "UCX finds no transport that it may use, and NIXL's agent does not start"
        return finding(Severity.BROKEN, "ucx-transports", what, why, mend, {TLS: "all"})
    return finding(Severity.NOTE, "ucx-transports", what, why, mend)


def check_allocator(facts: Facts) -> Iterator[Finding]:
    """Whether torch's CUDA allocator hands out memory that other processes can read."""
    mended = settings.expandable(facts.environment)
    if not mended:
        if facts.gpus:
            yield finding(Severity.OK, "allocator", "torch allocates CUDA memory that can be exported")
        return
    yield finding(
        Severity.SLOW if facts.gpus else Severity.NOTE, "allocator",
        ", ".join(f"{name}={facts.environment[name]}" for name in mended),
        f"parameters in such memory cannot be mapped, and NIXL would read them at {settings.EMULATED_GBPS:g} GB/s instead of "
        f"{settings.DIRECT_GBPS:,.0f} ({_FACTOR:,.0f} times slower): rdt refuses mode live there, and snapshot pays for a copy "
        "of the weights in memory and time. Only the trainer's processes need the mend",
        env=mended,
    )  # fmt: skip


def _device_names(facts: Facts) -> list[str]:
    """Names that UCX_NET_DEVICES may hold here: network devices, and verbs devices with their first port."""
    return [*facts.net_devices, *(f"{one.name}:1" for one in facts.verbs), *(one.name for one in facts.verbs)]
