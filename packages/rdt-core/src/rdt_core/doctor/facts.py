"""What `rdt doctor` knows of a node, what it measured, and what it finds: plain data that travels and becomes JSON.

`Facts` is read from the machine by `collect` and judged by `checks`, so that every bad state can be written down in a
test. Nothing here imports Ray, torch or an engine.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import msgspec

from ..wire import Struct

UNLIMITED = -1


class Severity(IntEnum):
    """How bad a finding is; from `SLOW` on the exit status is 1."""

    OK = 0
    NOTE = 1  # nothing is wrong yet: what it limits, and when
    SLOW = 2  # syncs work, many times slower than they could
    BROKEN = 3  # syncs fail, or some kind of link does

    @property
    def word(self) -> str:
        """As it is printed."""
        return self.name.lower()


class Finding(Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        severity: "ok", "note", "slow" or "broken" (`Severity.word`).
        check: short name of the check, for scripts.
        what: that was found.
        why: what it costs, with the factor where one is known; empty where all is well.
        mend: the setting or command that mends it; empty where there is nothing to mend.
        env: environment variables that mend it, as `--fix-env` prints them.
        node: hostname; empty where it is about all nodes.
    """

    severity: str
    check: str
    what: str
    why: str = ""
    mend: str = ""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    node: str = ""

    @property
    def level(self) -> Severity:
        """The severity as a number."""
        return Severity[self.severity.upper()]


def finding(
    severity: Severity, check: str, what: str, why: str = "", mend: str = "", env: dict[str, str] | None = None
) -> Finding:
    """Makes a finding; see its attributes. Without `mend`, the exports of `env` are what mends it."""
    variables = env or {}
    mend = mend or "; ".join(f"export {name}={value}" for name, value in variables.items())
    return Finding(severity=severity.word, check=check, what=what, why=why, mend=mend, env=variables)


class Verbs(Struct, frozen=True):
    """A verbs device of /sys/class/infiniband.

    Attributes:
        name: "mlx5_0".
        driver: of the kernel: "mlx5_core", "efa"; the device's name does not tell.
        state: of its first port: "ACTIVE", "DOWN".
        gbps: rate of its first port in Gbit/s; 0 where it says none.
    """

    name: str
    driver: str
    state: str = ""
    gbps: float = 0.0


class GpuFacts(Struct, frozen=True):
    """A GPU of the machine, whether or not this process may use it.

    Attributes:
        index: as nvidia-smi counts.
        uuid: "GPU-…".
        name: of the model.
        instances: UUIDs of MIG instances.
    """

    index: int
    uuid: str
    name: str = ""
    instances: tuple[str, ...] = ()


class PairFacts(Struct, frozen=True):
    """Two GPUs of the machine.

    Attributes:
        first, second: indices as nvidia-smi counts.
        peer: whether one can read the other's memory; None: unknown.
        nvlink: whether NVLink joins them; None: unknown.
    """

    first: int
    second: int
    peer: bool | None = None
    nvlink: bool | None = None


class Facts(Struct, frozen=True):
    """What one process of a node sees.

    Attributes:
        hostname: of the node.
        node_id: Ray's; empty outside a cluster.
        python: version.
        distributions: version by distribution; absent where it is not installed.
        engine_problems: what each installed adapter says of the engine or trainer beside it: adapter -> text, "" if well.
        torch_cuda: CUDA that torch was built for, "13.0"; empty for a CPU build.
        driver: version of the NVIDIA driver; empty where there is none.
        driver_cuda: newest CUDA that it serves, "13.0".
        nixl_module: that `import nixl` picks, "nixl_cu13"; empty where it does not import.
        nixl_error: why not.
        nixl_plugins: backends that the module brings.
        nixl_folder: where those lie; empty where unknown.
        named_plugins: backends in the folder that NIXL_PLUGIN_DIR names; None where it is not set, or names no folder.
        ucx: version of the library that NIXL brings; empty where unknown.
        ucx_knows: names in UCX_TLS that this library has a transport for, as far as its text tells.
        efa_netdevs: network devices named efa*.
        verbs: verbs devices.
        uverbs: whether /dev/infiniband has devices that a process could open.
        net_devices: names of all network devices.
        environment: the variables that matter (see `collect.VARIABLES`), where set.
        has_ray_token: whether Ray would find an authentication token.
        gpus: of the machine.
        gpus_error: why they could not be listed.
        device_count: GPUs that torch sees in this process.
        nvlinks: see `settings.visible_nvlinks`.
        nvml: whether there are bindings of NVML (`settings.nvml_module`).
        pairs: of GPUs.
        shm_bytes, shm_free: of /dev/shm; 0 where there is none.
        memory_bytes: of the machine, or of its container if less.
        memlock: locked-memory limit in bytes, or `UNLIMITED`.
        can_lock: whether the process may lock memory beyond it (CAP_IPC_LOCK).
        nofile: limit of open files.
        cores: that the process may use.
        load: of the last minute: processes that ran or waited for a core, on average.
        ptrace_scope: kernel.yama.ptrace_scope; -1 where there is none.
        can_ptrace: whether the process has CAP_SYS_PTRACE.
    """

    hostname: str = "localhost"
    node_id: str = ""
    python: str = ""
    distributions: dict[str, str] = msgspec.field(default_factory=dict)
    engine_problems: dict[str, str] = msgspec.field(default_factory=dict)
    torch_cuda: str = ""
    driver: str = ""
    driver_cuda: str = ""
    nixl_module: str = ""
    nixl_error: str = ""
    nixl_plugins: tuple[str, ...] = ()
    nixl_folder: str = ""
    named_plugins: tuple[str, ...] | None = None
    ucx: str = ""
    ucx_knows: tuple[str, ...] = ()
    efa_netdevs: tuple[str, ...] = ()
    verbs: tuple[Verbs, ...] = ()
    uverbs: bool = False
    net_devices: tuple[str, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    has_ray_token: bool = False
    gpus: tuple[GpuFacts, ...] = ()
    gpus_error: str = ""
    device_count: int = 0
    nvlinks: int | None = None
    nvml: bool = True
    pairs: tuple[PairFacts, ...] = ()
    shm_bytes: int = 0
    shm_free: int = 0
    memory_bytes: int = 0
    memlock: int = UNLIMITED
    can_lock: bool = False
    nofile: int = 1 << 20
    cores: int = 1
    load: float = 0.0
    ptrace_scope: int = -1
    can_ptrace: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether other work waits for the cores, so that rates on the CPU are no more than a lower bound."""
        return self.load > 1.5 * self.cores

    @property
    def backend(self) -> str:
        """The NIXL backend that Ray picks here: LIBFABRIC on EFA hosts, UCX elsewhere."""
        efa = bool(self.efa_netdevs) or any(device.driver == "efa" for device in self.verbs)
        return "LIBFABRIC" if efa else "UCX"


class Measured(Struct, frozen=True):
    """One measured transfer between two processes.

    Attributes:
        source, reader: hostnames.
        device: of the source and, where it is another, of the reader: "cpu", "cuda:0", "cuda:0 to cuda:1".
        kind: of the link.
        memory: what was read: "arena" (rdt's own) or "parameters" (torch's allocator).
        nbytes: moved each time.
        seconds: of one move, the median after the first; 0 where there is none.
        first_seconds: of the first move, with its set-up.
        copy_seconds: of one copy of the same bytes inside the reader's device.
        backend: of NIXL; empty for links without.
        lane: how UCX moves the bytes, "zero-copy cma/memory"; empty where it was not obtainable.
        lane_unknown: why not; empty where the lane is known, or the link has none.
        expandable: whether torch's allocator handed out memory that cannot be exported in the source process.
        correct: whether every byte was right.
        error: why there is no measurement.
        cross_node: whether the two ends are on different nodes.
    """

    source: str
    reader: str
    device: str
    kind: str
    memory: str = "arena"
    nbytes: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    copy_seconds: float = 0.0
    backend: str = ""
    lane: str = ""
    lane_unknown: str = ""
    expandable: bool = False
    correct: bool = True
    error: str = ""
    cross_node: bool = False

    @property
    def gbps(self) -> float:
        """GB/s; 0 where nothing was measured."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def floor_gbps(self) -> float:
        """GB/s of one copy of the same bytes."""
        return self.nbytes / self.copy_seconds / 1e9 if self.copy_seconds else 0.0

    @property
    def ratio(self) -> float:
        """How many times longer than one copy of the same bytes; 0 where nothing was measured."""
        return self.seconds / self.copy_seconds if self.seconds and self.copy_seconds else 0.0


class Rated(Struct, frozen=True):
    """What a measured transfer is judged by, as it stands in its row of the JSON report.

    Attributes:
        gbps: GB/s of the move; 0 where nothing was measured.
        copy_gbps: GB/s of one copy of the same bytes; likewise.
        limit_gbps: GB/s below which the transfer is called slow; 0 where it is held to none.
        verdict: "ok", "note" (not measured for want of memory, or slow on a busy CPU), "slow" or "broken".
    """

    gbps: float
    copy_gbps: float
    limit_gbps: float
    verdict: str


class DoctorReport(Struct, frozen=True):
    """What `rdt doctor` found.

    Attributes:
        rdt: release.
        nodes: facts of each node.
        findings: worst first.
        measured: transfers.
        seconds: that it took.
    """

    rdt: str
    nodes: tuple[Facts, ...]
    findings: tuple[Finding, ...]
    measured: tuple[Measured, ...] = ()
    seconds: float = 0.0

    @property
    def worst(self) -> Severity:
        """The severity of the worst finding."""
        return max((one.level for one in self.findings), default=Severity.OK)

    @property
    def exports(self) -> dict[str, str]:
        """Environment variables that mend findings; where two name one variable, the worse finding's counts."""
        found: dict[str, str] = {}
        for one in self.findings:
            for name, value in one.env.items():
                found.setdefault(name, value)
        return found


def number(value: float) -> str:
    """A rate as it is printed: three digits that mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


T = TypeVar("T", bound=Struct)


def on_node(one: T, node: str) -> T:
    """Returns a copy of a finding that says which node it is about."""
    return msgspec.structs.replace(one, node=node)
