"""Judgements about measured transfers: pure functions of what was measured and of the node's facts.

A rate alone says little on a machine that others use as well: a link is called slow by how much longer it took than one copy
of the same bytes in the same process, with a wide margin, or because UCX says that it emulates the operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from .. import settings
from .facts import Facts, Finding, Measured, Rated, Severity, finding, number, on_node
from .lanes import EMULATED
from .ucxnames import TLS, excludes

#: How many times longer than a copy a link may take. Healthy ones, measured: mapped 1 to 2, prepared 1.5 to 4, Ray objects
#: 2 to 6 on one device; between two H200 4.8 (mapped) and 6.5 (prepared). The mistakes that this is for cost 30 and more on
#: a CPU and 2,000 on a GPU.
LIMITS = {"mapped": 6.0, "prepared": 12.0, "ray": 24.0}
#: the same between two GPUs, with NVLink and without
LIMITS_FAR = {True: 25.0, False: 300.0}
#: seconds that a move may take besides, whatever its size: calls, wake-ups, and for Ray objects Ray's own bookkeeping
LATENCY_S = {"mapped": 0.002, "prepared": 0.005, "ray": 0.05}
#: share of a NIC's rate below which a link between nodes is slow
NIC_SHARE = 0.2
_CPU = "cpu"
_MORE = "UCX_LOG_LEVEL=debug says more"
_PTRACE = (
    "let processes read one another (docker: --cap-add SYS_PTRACE; sysctl kernel.yama.ptrace_scope=0), or mapped links"
)


def judge(measured: Iterable[Measured], nodes: Mapping[str, Facts]) -> list[Finding]:
    """Judges measured transfers.

    Args:
        measured: transfers.
        nodes: facts by hostname.

    Returns:
        A finding for each transfer that is wrong, slow or failed, and one that says that the others are well.
    """
    results = list(measured)
    found, good = [], []
    for one in results:
        wrong = list(_one(one, nodes))
        found += [on_node(each, one.reader) for each in wrong]
        found += [on_node(each, one.reader) for each in _without_rdma(one, nodes)]
        if not wrong:
            good.append(one)
    if good:
        found.append(finding(Severity.OK, "transfers", _well(good, len(results))))
    found += _expandable(results, nodes)
    for node in (nodes[name] for name in sorted({one.reader for one in results} & nodes.keys()) if nodes[name].is_busy):
        what = f"a load of {node.load:.0f} on {node.cores} cores: other work waits for them, and rates are lower bounds"
        found.append(on_node(finding(Severity.NOTE, "load", what, mend="run again on a quiet machine"), node.hostname))
    return found


def rated(one: Measured, nodes: Mapping[str, Facts]) -> Rated:
    """A measured transfer's rate, the rate below which it is called slow, and the verdict.

    Args:
        one: the transfer.
        nodes: facts by hostname.
    """
    least = 0.0
    if one.seconds and one.cross_node:
        least = NIC_SHARE * _nic(one, nodes)
    elif one.seconds:
        least = one.nbytes / _limit_s(one, nodes.get(one.reader, Facts())) / 1e9
    verdict = max((each.level for each in _one(one, nodes)), default=Severity.OK).word
    return Rated(gbps=one.gbps, copy_gbps=one.floor_gbps, limit_gbps=least, verdict=verdict)


def _well(good: list[Measured], count: int) -> str:
    """What is said of the transfers of which there is nothing bad to say, `count` being all."""
    worst = max(good, key=lambda one: one.ratio)
    rate = f"{worst.device} by {worst.kind}, {number(worst.gbps)} GB/s where one copy makes {number(worst.floor_gbps)}"
    if len(good) == count:
        return f"{count} of {count} measured transfers are exact and within their limits; the slowest for its bytes: {rate}"
    if len(good) == 1:
        return f"the other measured transfer is exact and within its limit: {rate}"
    return (
        f"the other {len(good)} measured transfers are exact and within their limits; the slowest for its bytes: {rate}"
    )


def _one(one: Measured, nodes: Mapping[str, Facts]) -> Iterator[Finding]:
    where = _where(one)
    facts = nodes.get(one.reader, Facts())
    if one.error:
        full = "out of memory" in one.error.lower() or "OUT_OF_MEMORY" in one.error
        yield finding(
            Severity.NOTE if full else Severity.BROKEN, "transfer", f"{where}: {one.error}",
            "not measured: the device has no memory left" if full else "links of this kind do not work between such processes",
            "a smaller --size, or run while the GPUs are free" if full else _look(one.error),
        )  # fmt: skip
        return
    if not one.correct:
        yield finding(
            Severity.BROKEN, "transfer", f"{where}: the bytes that arrived are not those that were sent",
            "weights would be wrong without a word", "do not use this kind of link here; verify='full' finds it in syncs",
        )  # fmt: skip
    emulated = EMULATED in one.lane
    if one.cross_node:
        yield from _far(one, where, nodes)
    elif emulated or one.seconds > _limit_s(one, facts):
        mend, env = _cause(one, facts)
        lane = f"; UCX: {one.lane}" if one.lane else ""
        floor = f"one copy makes {number(one.floor_gbps)}"
        # on a CPU that others use a rate proves nothing, but what UCX says does
        excused = facts.is_busy and one.device == _CPU and not emulated
        yield finding(
            Severity.NOTE if excused else Severity.SLOW, "transfer",
            f"{where}: {number(one.gbps)} GB/s where {floor} ({one.ratio:,.0f} times longer){lane}",
            f"a sync over such links takes {_seconds(one)} for each GB" + (" and keeps cores busy" if emulated else ""),
            mend, env,
        )  # fmt: skip


def limit(one: Measured, facts: Facts) -> float:
    """How many times longer than one copy a transfer on one node may take."""
    if " to " not in one.device:
        return LIMITS[one.kind]
    linked = all(pair.nvlink for pair in facts.pairs) if facts.pairs else False
    return LIMITS_FAR[linked]


def _look(error: str) -> str:
    return "see the other findings" + ("" if _MORE in error else f"; {_MORE}")


def _limit_s(one: Measured, facts: Facts) -> float:
    """Seconds above which a transfer on one node is slow."""
    return limit(one, facts) * one.copy_seconds + LATENCY_S[one.kind]


def _where(one: Measured) -> str:
    return f"{one.device} by {one.kind}" + (f" from {one.source}" if one.cross_node else "")


def _nic(one: Measured, nodes: Mapping[str, Facts]) -> float:
    """GB/s of the slower end's fastest NIC; 0 where an end has none."""
    ends = [nodes.get(name, Facts()) for name in (one.reader, one.source)]
    return min(max((v.gbps for v in node.verbs if v.state == "ACTIVE"), default=0.0) for node in ends) / 8


def _far(one: Measured, where: str, nodes: Mapping[str, Facts]) -> Iterator[Finding]:
    nic = _nic(one, nodes)
    over_tcp = "tcp" in one.lane
    if nic and (over_tcp or one.gbps < NIC_SHARE * nic):
        lane = f"; UCX: {one.lane}" if one.lane else ""
        yield finding(
            Severity.SLOW, "transfer", f"{where}: {number(one.gbps)} GB/s over NICs of {nic:.0f} GB/s{lane}",
            f"{nic / one.gbps:.0f} times slower than the wire" + (": the bytes go over TCP" if over_tcp else ""),
            "UCX_TLS and UCX_NET_DEVICES must not leave the NICs out; GPUDirect (nvidia-peermem) must be loaded for GPU memory; "
            "UCX_PROTO_INFO=y has UCX say which lanes it takes",
        )  # fmt: skip


def _without_rdma(one: Measured, nodes: Mapping[str, Facts]) -> Iterator[Finding]:
    """Between nodes without RDMA there is nothing to hold a rate to."""
    if one.cross_node and not one.error and not _nic(one, nodes):
        yield finding(
            Severity.NOTE, "transfer", f"{_where(one)}: {number(one.gbps)} GB/s without RDMA",
            "an RDMA NIC of 400 Gbit/s moves up to 50 GB/s",
        )  # fmt: skip


def _cause(one: Measured, facts: Facts) -> tuple[str, dict[str, str]]:
    """The likeliest mend of a slow transfer on one node."""
    environment = facts.environment
    cpu, agent = one.device == _CPU, one.kind != "mapped"
    if not cpu and agent and settings.slow_reads(environment, facts.nvlinks or 0):
        return "", {settings.GET_ZCOPY: "on"}
    tls = environment.get(TLS, "")
    if agent and tls and excludes(tls, "cma" if cpu else "cuda_ipc"):
        return f"unset {TLS}, or export {TLS}=all", {TLS: "all"}
    if agent and cpu and EMULATED in one.lane:
        return _PTRACE, {}
    return (
        "other work may hold the cores or the device: run again on a quiet machine; UCX_LOG_LEVEL=debug says more",
        {},
    )


def _expandable(results: list[Measured], nodes: Mapping[str, Facts]) -> Iterator[Finding]:
    """Torch's allocator handed out memory that cannot be exported: seen in the process, whatever the variables say."""
    for node in sorted({one.source for one in results if one.expandable}):
        if settings.expandable(nodes[node].environment if node in nodes else {}):
            continue  # said already
        made = finding(
            Severity.SLOW, "allocator", "torch's CUDA allocator hands out expandable segments in the processes measured here",
            "rdt refuses mode live for such parameters; modes snapshot and bucket read rdt's own arenas, as measured here",
            env=dict.fromkeys(settings.ALLOCATORS, "expandable_segments:False"),
        )  # fmt: skip
        yield on_node(made, node)


def _seconds(one: Measured) -> str:
    each = one.seconds / one.nbytes * 1e9
    return f"{each:.2f} s" if each >= 0.01 else f"{1000 * each:.2f} ms"
