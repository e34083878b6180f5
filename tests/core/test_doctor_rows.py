"""Rows of measured transfers: the lane from UCX's log in both of its forms, the limit, the verdict, and what is said of them."""

from __future__ import annotations

import json

import msgspec
import pytest

from rdt_core.doctor.facts import DoctorReport, Facts, Measured, Severity, Verbs
from rdt_core.doctor.judge import judge, rated
from rdt_core.doctor.lanes import lane_of, lanes
from rdt_core.doctor.measure import environment
from rdt_core.doctor.show import as_json, rates_table

pytestmark = pytest.mark.unit

GIB = 1 << 30
#: as UCX 1.20 (NIXL 1.0) writes it: no header, and the title is a row of two cells
OLD = """
[1.103719] [vm:1:0]   +--------------------------------+---------------------------------------------+----------+
[1.103719] [vm:1:0]   |                       593..inf | multi-frag copy-in                          | tcp/eth0 |
[1.103719] [vm:1:0]   +--------------------------------+---------------------------------------------+----------+
[1.107203] [vm:1:0]   +--------------------------------+--------------------------------------------------------+
[1.107227] [vm:1:0]   | ucp_context_0 self cfg#0       | remote memory read by ucp_get* into host from host     |
[1.107228] [vm:1:0]   +--------------------------------+--------------------------------------------+-----------+
[1.107228] [vm:1:0]   |                         0..inf | copy-out                                   | self/mem  |
[1.107229] [vm:1:0]   +--------------------------------+--------------------------------------------+-----------+
[1.107203] [vm:1:0]   +--------------------------------+--------------------------------------------------------+
[1.107227] [vm:1:0]   | ucp_context_0 intra-node cfg#1 | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/GPU0 |
[1.107228] [vm:1:0]   +--------------------------------+--------------------------------------------+-----------+
[1.107228] [vm:1:0]   |                        0..8184 | software emulation                         | tcp/lo    |
[1.107228] [vm:1:0]          wireup.c:1 UCX  WARN something else
[1.107228] [vm:1:0]   |                      8185..inf | zero-copy                                  | cuda_ipc/cuda |
[1.107229] [vm:1:0]   +--------------------------------+--------------------------------------------+-----------+
"""
#: as UCX 1.22 and later write it
NEW = """
[1.2] [vm:1:0]   +--------+-------------+---------------+
[1.2] [vm:1:0]   | dst intra-node cfg#1                 |
[1.2] [vm:1:0]   | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda |
[1.2] [vm:1:0]   +--------+-------------+---------------+
[1.2] [vm:1:0]   | Range  | Description |    Config     |
[1.2] [vm:1:0]   +--------+-------------+---------------+
[1.2] [vm:1:0]   | 0..inf | zero-copy   | cuda_ipc/cuda |
[1.2] [vm:1:0]   +--------+-------------+---------------+
"""


@pytest.mark.parametrize("log", [OLD, NEW])
def test_the_lane_in_either_form_of_the_table(log: str) -> None:
    assert lanes(log) == ["zero-copy cuda_ipc/cuda"]
    assert lanes(log + log) == ["zero-copy cuda_ipc/cuda"] * 2
    assert lane_of(log) == ("zero-copy cuda_ipc/cuda", "")


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (None, "UCX wrote no log"),
        ("", "UCX's log of 0 lines has no table of reads from another process"),
        (NEW.replace("remote memory read", "active message"), "log of 9 lines has no table"),
        (NEW.replace("cfg#", "#"), "log of 9 lines tells of reads in a form that is not known here"),
    ],
)
def test_why_a_lane_is_unknown(log: str | None, why: str) -> None:
    lane, said = lane_of(log)
    assert lane == ""
    assert why in said


def test_ucx_logs_from_the_start_of_a_measuring_process() -> None:
    variables = environment("cpu", Facts())
    assert variables["UCX_PROTO_INFO"] == "y"
    assert variables["UCX_LOG_FILE"].endswith("%p.log")
    assert environment("cuda:0", Facts(device_count=1)).items() >= variables.items()


# ---------------------------------------------------------------------- judged

NODES = {"n0": Facts(hostname="n0", cores=16)}
NIC = Verbs(name="mlx5_0", driver="mlx5_core", state="ACTIVE", gbps=400.0)
WITH_NIC = {name: Facts(hostname=name, verbs=(NIC,)) for name in ("n0", "n1")}


def moved(kind: str = "prepared", times: float = 1.5, **fields: object) -> Measured:
    common = {"source": "n0", "reader": "n0", "device": "cpu", "nbytes": GIB, "copy_seconds": 0.1, "backend": "UCX"}
    return msgspec.convert({**common, "kind": kind, "seconds": 0.1 * times, **fields}, Measured)


def test_what_is_said_of_the_good_ones_beside_bad_ones() -> None:
    def well(*measured: Measured) -> str:
        (one,) = [each for each in judge(measured, NODES) if each.check == "transfers"]
        return one.what

    assert well(moved(), moved("mapped"), moved("ray")).startswith("3 of 3 measured transfers are exact and within")
    assert well(moved(times=90), moved("mapped"), moved("ray", 90)).startswith("the other measured transfer is exact")
    assert well(moved(times=90), moved("mapped"), moved("ray")).startswith("the other 2 measured transfers are exact")
    far = moved(source="n1", cross_node=True)
    assert well(moved(), moved("mapped"), far).startswith("3 of 3 measured transfers are exact and within")


def test_a_failure_says_once_how_to_learn_more() -> None:
    for error in ("TransportError: no agent; UCX_LOG_LEVEL=debug says more", "DeadlineError: late"):
        (one,) = judge([moved(seconds=0.0, error=error)], NODES)
        assert f"{one.what}{one.mend}".count("UCX_LOG_LEVEL=debug says more") == 1


def test_a_note_that_there_is_no_rdma_stays() -> None:
    (note,) = [one for one in judge([moved(source="n1", cross_node=True)], NODES) if one.level == Severity.NOTE]
    assert "without RDMA" in note.what


@pytest.mark.parametrize(
    ("one", "limit", "verdict"),
    [
        (moved(), GIB / 1.205 / 1e9, "ok"),
        (moved(times=90), GIB / 1.205 / 1e9, "slow"),
        (moved("mapped"), GIB / 0.602 / 1e9, "ok"),
        (moved(lane="software emulation tcp/lo"), GIB / 1.205 / 1e9, "slow"),
        (moved(correct=False), GIB / 1.205 / 1e9, "broken"),
        (moved(seconds=0.0, error="DeadlineError: late"), 0.0, "broken"),
        (moved(seconds=0.0, error="CUDA out of memory"), 0.0, "note"),
        (moved(source="n1", cross_node=True), 0.0, "ok"),
    ],
    ids=str,
)
def test_limit_and_verdict_of_a_row(one: Measured, limit: float, verdict: str) -> None:
    made = rated(one, NODES)
    assert (made.limit_gbps, made.verdict) == (pytest.approx(limit), verdict)
    assert (made.gbps, made.copy_gbps) == (one.gbps, one.floor_gbps)


def test_between_nodes_the_limit_is_a_share_of_the_nic() -> None:
    for seconds, verdict in ((GIB / 40e9, "ok"), (GIB / 1e9, "slow")):
        made = rated(moved(source="n1", cross_node=True, seconds=seconds), WITH_NIC)
        assert (made.limit_gbps, made.verdict) == (pytest.approx(10.0), verdict)


def test_a_slow_row_on_a_busy_cpu_is_a_note() -> None:
    assert rated(moved(times=90), {"n0": Facts(hostname="n0", cores=2, load=9.0)}).verdict == "note"


def test_rows_of_the_json_report() -> None:
    measured = (moved(times=90), moved("mapped"))
    report = DoctorReport(rdt="0.1.0", nodes=tuple(NODES.values()), findings=(), measured=measured)
    rows = json.loads(as_json(report))["measured"]
    assert [(row["kind"], row["verdict"]) for row in rows] == [("prepared", "slow"), ("mapped", "ok")]
    for row, one in zip(rows, measured, strict=True):
        assert row["gbps"] == pytest.approx(one.gbps)
        assert row["copy_gbps"] == pytest.approx(one.floor_gbps)
        assert row["seconds"] == one.seconds
        assert row["limit_gbps"] > 0


def test_the_table_says_why_a_lane_is_unknown() -> None:
    made = rates_table((moved(lane_unknown="UCX wrote no log"),))
    assert list(made.columns[-1].cells) == ["UCX: lane unknown, UCX wrote no log (arena)"]
