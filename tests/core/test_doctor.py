"""`rdt doctor` judges facts: every bad state is written down here and found, with what it costs and what mends it."""

from __future__ import annotations

import io
import json
import shlex
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from rdt_core.cli import app
from rdt_core.demo.options import OptionError
from rdt_core.doctor.checks import compare, examine
from rdt_core.doctor.facts import (
    DoctorReport,
    Facts,
    Finding,
    GpuFacts,
    Measured,
    PairFacts,
    Severity,
    Verbs,
    finding,
    on_node,
)
from rdt_core.doctor.judge import judge
from rdt_core.doctor.lanes import lanes
from rdt_core.doctor.measure import cross_rounds, environment, node_steps
from rdt_core.doctor.options import Sizes, read_options, read_size
from rdt_core.doctor.show import exports, print_report, summary
from rdt_core.doctor.ucxnames import excludes
from rdt_core.wire import to_json

pytestmark = pytest.mark.unit

GIB = 1 << 30
ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
GPUS = tuple(GpuFacts(index=index, uuid=f"GPU-0000000{index}-1", name="NVIDIA H200") for index in range(2))
NIC = Verbs(name="mlx5_0", driver="mlx5_core", state="ACTIVE", gbps=400.0)

#: a node without a GPU on which nothing is wrong
CPU = Facts(
    hostname="n0",
    python="3.11.7",
    distributions={"rdt-core": "0.1.0", "ray": "2.60.0", "nixl": "1.5.1", "nixl-cu13": "1.5.1", "torch": "2.13.0"},
    torch_cuda="13.0",
    nixl_module="nixl_cu13",
    nixl_plugins=("LIBFABRIC", "UCX"),
    ucx="1.23.0",
    verbs=(NIC,),
    uverbs=True,
    net_devices=("eth0", "lo"),
    shm_bytes=64 * GIB,
    shm_free=60 * GIB,
    memory_bytes=128 * GIB,
    nofile=65536,
    cores=16,
)
#: and one with two GPUs
H200 = msgspec.structs.replace(
    CPU, driver="580.95", driver_cuda="13.0", gpus=GPUS, device_count=2, nvlinks=18,
    pairs=(PairFacts(first=0, second=1, peer=True, nvlink=True),),
)  # fmt: skip


def changed(facts: Facts, **fields: Any) -> Facts:
    return msgspec.structs.replace(facts, **fields)


def bad(findings: list[Finding]) -> dict[str, Finding]:
    """Whatever is not well, by check."""
    return {one.check: one for one in findings if one.level > Severity.OK}


@pytest.mark.parametrize("facts", [CPU, H200, changed(H200, nvlinks=0, environment={ZCOPY: "on"})])
def test_a_node_on_which_all_is_well(facts: Facts) -> None:
    found = examine(facts)
    assert bad(found) == {}
    assert {one.node for one in found} == {"n0"}
    assert {"versions", "nixl", "rdma", "gpus", "locked-memory", "cores", "shared-memory"} <= {
        one.check for one in found
    }


VERBS_OFF = Verbs(name="mlx5_1", driver="mlx5_core", state="DOWN", gbps=100.0)
STATES: list[tuple[Facts, dict[str, Any], str, str, str]] = [
    (CPU, {"distributions": {**CPU.distributions, "ray": "2.55.0"}}, "versions", "broken", "ray 2.55.0"),
    (CPU, {"distributions": {**CPU.distributions, "nixl": ""}}, "versions", "broken", "no nixl, nixl-cu13 1.5.1"),
    (CPU, {"distributions": {**CPU.distributions, "rdt-vllm": "0.2.0"}}, "versions", "broken", "rdt-vllm 0.2.0"),
    (CPU, {"engine_problems": {"rdt-vllm": "found vLLM 0.31; needed: vLLM >= 0.32. pip install 'vllm'"}}, "versions",
     "broken", "rdt-vllm: found vLLM 0.31"),
    (H200, {"driver_cuda": "12.4"}, "driver", "broken", "torch was built for CUDA 13.0"),
    (H200, {"torch_cuda": ""}, "driver", "broken", "CPU build"),
    (CPU, {"nixl_module": "", "nixl_error": "no libcudart"}, "nixl", "broken", "no libcudart"),
    (CPU, {"efa_netdevs": ("efa0",), "nixl_plugins": ("UCX",)}, "nixl", "broken", "without its plugin LIBFABRIC"),
    (CPU, {"efa_netdevs": ("efa0",)}, "efa", "note", "GPUDirect"),
    (CPU, {"verbs": ()}, "rdma", "note", "no verbs device"),
    (CPU, {"uverbs": False}, "rdma", "slow", "/dev/infiniband"),
    (CPU, {"verbs": (VERBS_OFF,)}, "rdma", "slow", "not active: mlx5_1"),
    (CPU, {"verbs": (NIC, VERBS_OFF)}, "rdma", "note", "not active: mlx5_1"),
    (CPU, {"memlock": 8 << 20}, "locked-memory", "broken", "8 MiB"),
    (CPU, {"nofile": 1000}, "open-files", "broken", "1000"),
    (CPU, {"nofile": 2048}, "open-files", "note", "2048"),
    (CPU, {"nofile": 20000}, "open-files", "note", "20000"),
    (H200, {"nofile": 2048}, "open-files", "note", "2048"),
    (CPU, {"cores": 2}, "cores", "note", "2 cores"),
    (H200, {"cores": 4}, "cores", "slow", "4 cores"),
    (CPU, {"has_ray_token": True}, "ray-token", "note", "RAY_AUTH_MODE is not set"),
    (CPU, {"environment": {"RAY_AUTH_MODE": "token"}}, "ray-token", "note", "there is no token"),
    (CPU, {"ptrace_scope": 1}, "cma", "slow", "ptrace_scope is 1"),
    (CPU, {"shm_bytes": 64 << 20, "shm_free": 64 << 20}, "shared-memory", "broken", "64 MiB"),
    (CPU, {"shm_free": 10 * GIB}, "shared-memory", "note", "does not fit"),
    (H200, {"gpus": (), "gpus_error": "the driver does not answer"}, "gpus", "broken", "does not answer"),
    (H200, {"nvml": False, "nvlinks": None, "environment": {ZCOPY: "on"}}, "gpus", "note", "NVML"),
    (H200, {"environment": {"CUDA_VISIBLE_DEVICES": "0,0"}}, "gpu-mask", "broken", "twice"),
    (H200, {"environment": {"CUDA_VISIBLE_DEVICES": "0"}}, "gpu-mask", "broken", "shows 1 GPUs, but torch sees 2"),
    (H200, {"device_count": 0}, "gpu-mask", "broken", "torch sees 0"),
    (H200, {"pairs": (PairFacts(first=0, second=1, peer=False),)}, "peer-access", "slow", "GPUs 0 and 1"),
    (H200, {"pairs": (PairFacts(first=0, second=1, peer=True, nvlink=False),)}, "nvlink", "note", "1 of 1"),
    (H200, {"nvlinks": 0}, "ucx-get-zcopy", "slow", "is not set, and no NVLink is visible"),
    (H200, {"nvlinks": 0, "environment": {ZCOPY: "auto"}}, "ucx-get-zcopy", "slow", "=auto"),
    (H200, {"nvlinks": 0, "environment": {ZCOPY: "n"}}, "ucx-get-zcopy", "slow", "=n"),
    (H200, {"nvlinks": None}, "ucx-get-zcopy", "note", "unknown number"),
    (CPU, {"environment": {"UCX_TLS": "tcp"}}, "ucx-transports", "slow", "leaves out"),
    (H200, {"environment": {"UCX_TLS": "rc,sm,cuda_ipc"}}, "ucx-transports", "broken", "leaves out cuda_copy"),
    (CPU, {"environment": {"UCX_NET_DEVICES": "mlx5_7:1"}}, "ucx-devices", "broken", "mlx5_7:1 names no device"),
    (CPU, {"environment": {"UCX_LOG_LEVEL": "debug"}}, "ucx-log", "slow", "debug"),
    (H200, {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}, "allocator", "slow", "True"),
    (H200, {"environment": {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}}, "allocator", "slow", "cudaMallocAsync"),
    (CPU, {"environment": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}, "allocator", "note", "True"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "fields", "check", "severity", "said"), STATES, ids=lambda one: str(one)[:60])
def test_a_bad_state_is_found(facts: Facts, fields: dict[str, Any], check: str, severity: str, said: str) -> None:
    found = bad(examine(changed(facts, **fields)))
    assert check in found, found
    one = found[check]
    assert (one.severity, one.node) == (severity, "n0")
    assert said in one.what
    assert one.why
    assert one.mend or check in ("nvlink",)


@pytest.mark.parametrize(
    ("facts", "fields"),
    [
        (CPU, {"memlock": 8 << 20, "can_lock": True}),
        (CPU, {"ptrace_scope": 1, "can_ptrace": True}),
        (CPU, {"environment": {"UCX_TLS": "all"}}),
        (CPU, {"environment": {"UCX_TLS": "^ud"}}),
        (CPU, {"environment": {"UCX_NET_DEVICES": "mlx5_0:1"}}),
        (H200, {"environment": {"UCX_TLS": "rc,sm,cuda"}}),
        (H200, {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}}),
        (H200, {"environment": {"CUDA_VISIBLE_DEVICES": "1"}, "device_count": 1}),
        (H200, {"shm_free": 10 * GIB}),
        (H200, {"nofile": 20000}),
        (CPU, {"has_ray_token": True, "environment": {"RAY_AUTH_MODE": "token"}}),
        (CPU, {"has_ray_token": True, "environment": {"RAY_AUTH_MODE": "disabled"}}),
    ],
)
def test_what_looks_bad_and_is_not(facts: Facts, fields: dict[str, Any]) -> None:
    assert bad(examine(changed(facts, **fields))) == {}


def test_the_backend_is_told_by_the_driver_and_not_by_the_name() -> None:
    assert changed(CPU, verbs=(Verbs(name="rdmap0s6", driver="efa"),)).backend == "LIBFABRIC"
    assert changed(CPU, verbs=(Verbs(name="efa0", driver="mlx5_core"),)).backend == "UCX"


def test_the_factor_and_the_export_of_emulated_reads() -> None:
    one = bad(examine(changed(H200, nvlinks=0)))["ucx-get-zcopy"]
    assert "2,255 times slower" in one.why
    assert one.env == {ZCOPY: "on"}
    assert one.mend == f"export {ZCOPY}=on"


def test_an_allocator_keeps_its_other_settings() -> None:
    conf = "max_split_size_mb:512, expandable_segments:True"
    one = bad(examine(changed(H200, environment={"PYTORCH_CUDA_ALLOC_CONF": conf})))["allocator"]
    assert one.env == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:False"}


def test_the_wheel_that_is_missing_beside_nixl_is_named() -> None:
    failed = changed(CPU, nixl_module="", nixl_error="detected CUDA 13")
    assert bad(examine(failed))["nixl"].mend.startswith("pip install --force-reinstall 'nixl")
    lacking = {name: version for name, version in CPU.distributions.items() if name != "nixl-cu13"}
    assert bad(examine(changed(failed, distributions=lacking)))["nixl"].mend == "pip install 'nixl-cu13==1.5.1'"


@pytest.mark.parametrize(
    ("value", "transport", "out"),
    [
        ("all", "cma", False), ("tcp", "cma", True), ("sm,tcp", "cma", False), ("^cma", "cma", True), ("^tcp", "cma", False),
        ("tcp,cuda", "cuda_ipc", False), ("tcp,cuda_copy", "cuda_ipc", True), ("^cuda_ipc", "cuda_ipc", True),
        ("^cuda_ipc", "cuda_copy", False), ("rc_x,sm", "rc", False), ("tcp,sm", "rc", True), ("^rc", "rc", False),
        ("^ib", "rc", True),
    ],
)  # fmt: skip
def test_what_a_list_of_transports_leaves_out(value: str, transport: str, out: bool) -> None:
    assert excludes(value, transport) is out


# ---------------------------------------------------------------------- clusters


def test_nodes_that_differ() -> None:
    other = changed(CPU, hostname="n1", distributions={**CPU.distributions, "ray": "2.100.0", "rdt-core": "0.2.0"})
    found = {one.what.split()[0]: one for one in compare([CPU, other])}
    assert {name: one.severity for name, one in found.items()} == {"ray": "broken", "rdt-core": "broken"}
    assert found["ray"].what == "ray differs between nodes: 2.100.0 on n1, 2.60.0 on n0"
    assert found["ray"].mend == "on every node: pip install 'ray==2.100.0'"
    mixed = compare([CPU, changed(CPU, hostname="n1", efa_netdevs=("efa0",))])
    assert [one.check for one in mixed] == ["same-backend"]
    assert [one.severity for one in compare([CPU, changed(CPU, hostname="n1")])] == ["ok"]
    assert compare([CPU]) == []


def test_every_pair_of_nodes_once_and_no_node_twice_in_a_round() -> None:
    nodes = [changed(CPU, hostname=f"n{index}") for index in range(8)]
    rounds = cross_rounds(nodes)
    pairs = [frozenset((step.source, step.reader)) for steps in rounds for step in steps]
    assert len(pairs) == len(set(pairs)) == 28
    for steps in rounds:
        ends = [end for step in steps for end in (step.source, step.reader)]
        assert len(ends) == len(set(ends))
    ring = [step for steps in cross_rounds(nodes * 2) for step in steps]
    assert sorted((step.source, step.reader) for step in ring) == [(index, (index + 1) % 16) for index in range(16)]
    assert cross_rounds([CPU]) == []
    assert cross_rounds([CPU, H200])[0][0].device == "cpu to cuda:0"


def test_what_is_measured_on_a_node() -> None:
    assert [(step.device, step.kind) for step in node_steps(CPU)] == [
        ("cpu", kind) for kind in ("mapped", "prepared", "ray")
    ]
    steps = [(step.device, step.kind) for step in node_steps(H200)]
    assert ("cuda:0", "ray") in steps
    assert ("cuda:1", "ray") not in steps
    assert ("cuda:0 to cuda:1", "mapped") in steps
    eight = node_steps(changed(H200, device_count=8))
    assert len({step.device for step in eight if " to " in step.device}) == 8  # a ring


@pytest.mark.parametrize(("mask", "own"), [("", "1,0"), ("3,5", "5,3"), ("GPU-a,GPU-b", "GPU-b,GPU-a")])
def test_a_process_sees_its_own_gpu_first(mask: str, own: str) -> None:
    facts = changed(H200, environment={"CUDA_VISIBLE_DEVICES": mask} if mask else {})
    assert environment("cuda:1", facts)["CUDA_VISIBLE_DEVICES"] == own
    assert "CUDA_VISIBLE_DEVICES" not in environment("cpu", facts)


# ---------------------------------------------------------------------- measured transfers


def moved(kind: str = "prepared", device: str = "cuda:0", *, times: float = 1.5, **fields: Any) -> Measured:
    fields = {"source": "n0", "reader": "n0", "nbytes": GIB, "copy_seconds": 0.001, **fields}
    return Measured(kind=kind, device=device, seconds=0.001 * times, **fields)


def judged(one: Measured, facts: Facts = H200) -> Finding:
    (found,) = [each for each in judge([one], {"n0": facts, "n1": facts}) if each.level > Severity.OK]
    return found


def test_transfers_that_are_well() -> None:
    found = judge(
        [moved(), moved("mapped"), moved("ray", times=3), moved(device="cuda:0 to cuda:1", times=6.5)], {"n0": H200}
    )
    assert [one.severity for one in found] == ["ok"]
    assert "4 of 4" in found[0].what


def test_reads_over_tcp_are_named_with_their_lane_factor_and_export() -> None:
    one = judged(moved(times=3400, lane="software emulation tcp/lo"), changed(H200, nvlinks=0))
    assert (one.severity, one.env) == ("slow", {ZCOPY: "on"})
    assert "3,400 times longer" in one.what
    assert "software emulation tcp/lo" in one.what


def test_emulation_is_slow_however_fast_it_looks() -> None:
    one = judged(
        moved(device="cpu", times=2, lane="software emulation tcp/lo"), changed(CPU, environment={"UCX_TLS": "tcp"})
    )
    assert (one.severity, one.env) == ("slow", {"UCX_TLS": "all"})
    assert "SYS_PTRACE" in judged(moved(device="cpu", times=2, lane="software emulation tcp/lo"), CPU).mend


def test_latency_is_not_taken_for_a_rate() -> None:
    assert [one.severity for one in judge([moved("ray", times=60)], {"n0": H200})] == ["ok"]
    assert judged(moved("ray", times=90)).severity == "slow"


def test_a_rate_on_a_busy_cpu_proves_nothing() -> None:
    slow = moved(device="cpu", times=40)
    assert judged(slow, CPU).severity == "slow"
    busy = changed(CPU, load=40.0)
    assert {one.check: one.severity for one in judge([slow], {"n0": busy})} == {"transfer": "note", "load": "note"}
    emulated = judge([moved(device="cpu", times=40, lane="software emulation tcp/lo")], {"n0": busy})
    assert emulated[0].severity == "slow"


@pytest.mark.parametrize(
    ("nvlink", "times", "slow"), [(True, 20, False), (True, 40, True), (False, 75, False), (False, 3400, True)]
)
def test_between_gpus_the_limit_depends_on_nvlink(nvlink: bool, times: float, slow: bool) -> None:
    facts = changed(H200, pairs=(PairFacts(first=0, second=1, peer=True, nvlink=nvlink),))
    found = judge([moved(device="cuda:0 to cuda:1", times=times)], {"n0": facts})
    assert any(one.severity == "slow" for one in found) is slow


def test_wrong_bytes_and_failures_are_broken_and_full_gpus_are_not() -> None:
    assert "bytes that arrived" in judged(moved(correct=False)).what
    assert judged(moved(error="DeadlineError: no answer within 60 s")).severity == "broken"
    assert judged(moved(error="TransportError: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY")).severity == "note"


def test_links_between_nodes_are_held_to_the_nic() -> None:
    def far(seconds: float, lane: str = "") -> Measured:
        return msgspec.structs.replace(moved(cross_node=True, lane=lane), source="n1", seconds=seconds)

    assert [one.severity for one in judge([far(GIB / 40e9)], {"n0": H200, "n1": H200})] == ["ok"]
    assert "over NICs of 50 GB/s" in judged(far(GIB / 1e9)).what
    assert "go over TCP" in judged(far(GIB / 40e9, lane="zero-copy tcp/eth0")).why
    assert judged(far(GIB / 1e9), changed(H200, verbs=())).severity == "note"


def test_expandable_segments_are_said_once() -> None:
    seen = [moved("mapped", expandable=True), moved(expandable=True)]
    (one,) = [each for each in judge(seen, {"n0": H200}) if each.level > Severity.OK]
    assert (one.check, one.severity) == ("allocator", "slow")
    set_so = changed(H200, environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert [each.severity for each in judge(seen, {"n0": set_so})] == ["ok"]  # the variable was found


LOG = """
[1.2] [vm:1890 :0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1890 :0]   | c self cfg#0                                             |
[1.2] [vm:1890 :0]   | remote memory read by ucp_get* into host memory from host |
[1.2] [vm:1890 :0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1890 :0]   | Range  | Description |              Config               |
[1.2] [vm:1890 :0]   +--------+-------------+-----------------------------------+
[1.2] [vm:1890 :0]   | 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |
[1.2] [vm:1890 :0]   +--------+-------------+-----------------------------------+
[1.3] [vm:1890 :0]   +-----------+--------------------+------------+
[1.3] [vm:1890 :0]   | c intra-node cfg#1                           |
[1.3] [vm:1890 :0]   | remote memory read by ucp_get*(multi) into cuda from cuda |
[1.3] [vm:1890 :0]   +-----------+--------------------+------------+
[1.3] [vm:1890 :0]   |   Range   |    Description     |   Config   |
[1.3] [vm:1890 :0]   +-----------+--------------------+------------+
[1.3] [vm:1890 :0]   |   0..8184 | short              | tcp/lo     |
[1.3] [vm:1890 :0]   | 8185..inf | software emulation | tcp/lo     |
[1.3] [vm:1890 :0]   +-----------+--------------------+------------+
[1.4] [vm:1890 :0]   +--------+-------------+------------+
[1.4] [vm:1890 :0]   | c intra-node cfg#1                |
[1.4] [vm:1890 :0]   | active message by ucp_am_send*    |
[1.4] [vm:1890 :0]   +--------+-------------+------------+
"""


def test_the_lane_of_large_reads_from_others() -> None:
    assert lanes(LOG) == ["software emulation tcp/lo"]
    assert lanes("") == lanes("UCX INFO nothing of the kind") == []


# ---------------------------------------------------------------------- options and output


@pytest.mark.parametrize(
    ("text", "nbytes"), [("256MiB", 256 << 20), ("16.4GB", 16_400_000_000), ("1g", 10**9), ("7", 7), ("2 KiB", 2048)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert read_size(text, "--size") == nbytes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"size": "much"}, "is no size"),
        ({"size": "10KB"}, "latency"),
        ({"model_size": "8B parameters"}, "--model-size"),
        ({"address": "head:6379"}, "--cluster"),
    ],
)
def test_options_that_cannot_work(words: dict[str, str], said: str) -> None:
    given: dict[str, Any] = {
        "cluster": False,
        "address": "",
        "measure": True,
        "size": "",
        "model_size": "",
        "timeout_s": 9.0,
    }
    with pytest.raises(OptionError, match=said):
        read_options(**{**given, **words})
    assert read_options(**given).sizes == Sizes(cpu=256 << 20, cuda=1 << 30)


@pytest.mark.parametrize(
    "words",
    [
        ["--size", "much"],
        ["--json", "--fix-env"],
        ["--address", "head:6379"],
        ["--cluster", "--address", "127.0.0.1:1"],
    ],
)
def test_words_that_cannot_work_start_nothing(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["doctor", *words])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("rdt doctor: ")


def report(*findings: Finding, nodes: int = 1, measured: tuple[Measured, ...] = ()) -> DoctorReport:
    facts = tuple(changed(CPU, hostname=f"n{index}") for index in range(nodes))
    return DoctorReport(rdt="0.1.0", nodes=facts, findings=findings, measured=measured)


def test_exports_are_lines_for_a_shell_and_the_worse_finding_wins() -> None:
    worse = finding(Severity.BROKEN, "a", "x", "y", env={"A": "b c", "B": "1"})
    better = finding(Severity.SLOW, "b", "x", "y", env={"B": "2"})
    text = exports(report(worse, better))
    assert [shlex.split(line) for line in text.splitlines()] == [["export", "A=b c"], ["export", "B=1"]]
    assert exports(report(finding(Severity.OK, "c", "z"))) == ""


def test_a_report_is_plain_text_without_a_terminal_and_says_equal_things_of_many_nodes_once() -> None:
    slow = finding(Severity.SLOW, "a", "x is slow", "it is [bold]100[/bold] times slower", "do y")
    findings = [on_node(slow, f"n{number}") for number in range(12)]
    target = io.StringIO()
    print_report(target, report(*findings, nodes=13, measured=(moved(), moved("mapped", error="no [way]"))))
    text = target.getvalue()
    assert "\x1b" not in text
    assert text.count("x is slow") == 1
    assert "n0 and 11 more" in text
    assert "it is [bold]100[/bold] times slower" in text
    assert "no [way]" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_summary_says_what_to_do() -> None:
    slow = finding(Severity.SLOW, "a", "x", "y", env={"UCX_TLS": "all"})
    assert 'eval "$(rdt doctor --fix-env)" sets UCX_TLS' in summary(report(slow)).plain
    assert "Nothing is slow or broken" in summary(report(finding(Severity.NOTE, "a", "x"))).plain


def test_the_report_as_json() -> None:
    read = json.loads(to_json(report(finding(Severity.NOTE, "a", "x", "y"), measured=(moved(),))))
    assert read["findings"][0]["severity"] == "note"
    assert read["measured"][0]["seconds"] == 0.0015
    assert read["nodes"][0]["distributions"]["ray"] == "2.60.0"
