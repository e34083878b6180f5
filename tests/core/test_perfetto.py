"""The file for Perfetto: the rules of Chrome's trace format, what is in it, and clocks of other hosts."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from rdt_core import wire
from rdt_core.cli import app
from rdt_core.errors import RdtError
from rdt_core.outcomes import JsonLines, SyncOutcome
from rdt_core.perfetto import make_trace, write_trace
from rdt_testbed.halves import Group

pytestmark = pytest.mark.unit

EPOCH = 1_796_000_000.0


@pytest.fixture(scope="module")
def outcomes() -> list[SyncOutcome]:
    """Of a group of two source ranks and two replicas: two syncs, one that leaves a replica out, one that fails."""

    def broken() -> None:
        raise OSError("the link is down")

    told: list[SyncOutcome] = []
    group = Group(2, 2, names=("a", "b"), mode="bucket", policy="best_effort", observers=[told.append])
    try:
        group.publish(1)
        group.publish(2, verify="full")
        group.spoil(broken, name="b")
        group.publish(3)
        group.spoil(broken, name="a")
        group.fails(4, policy="require_all")
    finally:
        group.close()
    return told


def check(trace: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Holds a trace to the format's rules; returns the spans of each track, by names of process and track."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(value, str) for value in trace["otherData"].values())
    names: dict[tuple[str, int, int], str] = {}
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert {"ph", "pid", "tid", "name", "args"} <= event.keys()
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            if event["name"].endswith("_name"):
                key = event["name"], event["pid"], event["tid"]
                assert key not in names
                names[key] = event["args"]["name"]
        else:
            assert event["ph"] == "X"
            assert math.isfinite(event["ts"])
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append(event)
    for (pid, tid), events in tracks.items():
        assert ("process_name", pid, 0) in names
        assert ("thread_name", pid, tid) in names
        open_until: list[float] = []
        for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            # spans of one track may lie in one another, and must not overlap otherwise
            assert not open_until or end <= open_until[-1] + 1e-3, (names["thread_name", pid, tid], event)
            open_until.append(end)
    return {
        (names["process_name", pid, 0].partition(",")[0], names["thread_name", pid, tid]): events
        for (pid, tid), events in tracks.items()
    }


def test_every_rank_has_a_process_and_every_link_a_track(outcomes: list[SyncOutcome]) -> None:
    trace = make_trace(outcomes)
    tracks = check(json.loads(json.dumps(trace, allow_nan=False)))
    readers = [f"engine rank {name}/{rank}" for name in "ab" for rank in (0, 1)]
    links = [(reader, f"source {rank} (local)") for reader in readers for rank in (0, 1)]
    driver = "driver of test"
    assert tracks.keys() >= {
        (driver, "sync"), (driver, "phases"), (driver, "a"), (driver, "b"), ("source rank 0", "source"),
        ("source rank 1", "source"),
        *((reader, "phases") for reader in readers), *links,
    }  # fmt: skip
    syncs = tracks[driver, "sync"]
    assert [one["name"] for one in syncs] == [f"version {number}" for number in (1, 2, 3, 4)]
    assert [one["args"]["outcome"] for one in syncs] == ["committed", "committed", "partial", "failed"]
    assert "the link is down" in syncs[2]["args"]["left out"]["b"]
    assert "the link is down" in syncs[3]["args"]["error"]
    first = outcomes[0].report
    moved = {
        (reader, track): sum(one["args"]["bytes"] for one in tracks[reader, track] if one["args"]["version"] == 1)
        for reader, track in links
    }
    assert moved == {
        (f"engine rank {link.reader}", f"source {link.source} (local)"): link.bytes for link in first.links
    }
    assert {one["cat"] for one in tracks[links[0]]} == {"link"}
    assert tracks[links[0]][0]["args"]["kind"] == "local"
    assert "verify" in {one["name"] for one in tracks["source rank 1", "source"]}
    assert trace["otherData"]["clocks"].startswith("all times are of one clock, ")


def test_the_time_that_a_trace_shows_is_that_of_the_sync(outcomes: list[SyncOutcome]) -> None:
    tracks = check(make_trace(outcomes))
    whole = {one["name"]: one for one in tracks["driver of test", "sync"]}
    for (_, track), events in tracks.items():
        for event in events:
            if track == "sync":
                continue
            sync = whole[f"version {event['args']['version']}"]
            assert sync["ts"] - 1e-3 <= event["ts"]
            assert event["ts"] + event["dur"] <= sync["ts"] + sync["dur"] + 1e-3


@pytest.mark.parametrize("mode", ["live", "bucket"])
def test_every_source_rank_shows_how_long_it_holds_still(mode: str) -> None:
    told: list[SyncOutcome] = []
    group = Group(3, 1, mode=mode, observers=[told.append])
    try:
        group.publish(1)
        group.publish(2)
    finally:
        group.close()
    # the second time one rank's timeline came too late
    report = told[1].report
    told[1] = msgspec.structs.replace(told[1], report=msgspec.structs.replace(report, timelines=report.timelines[:1]))
    tracks = check(make_trace(told))
    whole = {one["name"]: one for one in tracks["driver of test", "sync"]}
    commits = {one["args"]["version"]: one for one in tracks["driver of test", "phases"] if one["name"] == "commit"}
    for rank in range(3):
        holds = [one for one in tracks[f"source rank {rank}", "phases"] if one["name"] == "holds still"]
        assert [one["args"]["version"] for one in holds] == [1, 2]
        for one in holds:
            version = one["args"]["version"]
            sync, commit = whole[f"version {version}"], commits[version]
            last = sync if rank == 0 else commit
            assert one["ts"] + one["dur"] == pytest.approx(last["ts"] + last["dur"], abs=1.0)
            links = [link for link in told[version - 1].report.links if link.source == rank]
            assert one["args"]["bytes"] == sum(link.bytes for link in links)
    assert len({who for who, _ in tracks if who.startswith("source rank 2")}) == 1


def test_a_source_rank_that_began_before_the_driver_is_drawn_before_it() -> None:
    one = across(0.0)
    early = line("source rank 1", "near", -2.0, ("begin", 0.0, 2.05, ""))
    one = msgspec.structs.replace(one, report=msgspec.structs.replace(one.report, timelines=(early,)))
    tracks = check(make_trace([one]))
    assert tracks["source rank 1", "phases"][0]["ts"] == pytest.approx(0.0, abs=1)
    assert tracks["driver of policy", "sync"][0]["ts"] == pytest.approx(2e6, abs=1)


def line(member: str, host: str, began: float, *spans: tuple[str, float, float, str]) -> wire.Timeline:
    made = tuple(wire.Span(name=name, start=at, seconds=s, track=track) for name, at, s, track in spans)
    return wire.Timeline(member=member, host=host, pid=1, began=EPOCH + began, spans=made)


def across(ahead_s: float, seconds: float = 0.5) -> SyncOutcome:
    """A sync whose one engine rank pulls for some time on a host whose clock is ahead; the driver waits from 0.1 to 0.9 s."""
    reader = wire.ReaderReport(
        reader="a/0", incarnation="i", version=1, bytes=0, expected_bytes=0, digest="d", phases={}, links=(),
        timeline=line("engine rank a/0", "far", 0.2 + ahead_s, ("wait", 0.0, 0.1, ""), ("transfer", 0.1, seconds - 0.1, "")),
    )  # fmt: skip
    report = wire.SyncReport(
        group="policy", version=1, seconds=1.0, phases={}, bytes=0, mode="live", mode_reason="", readers=(reader,),
        replicas=("a",),
    )  # fmt: skip
    driver = line("driver", "near", 0.0, ("begin", 0.0, 0.1, ""), ("pull", 0.1, 0.8, "a"))
    return SyncOutcome(
        time=EPOCH + 1.0, group="policy", version=1, mode="live", outcome="committed", seconds=1.0, report=report,
        timeline=driver,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ahead_s", "shift_ms"),
    [(0.0, None), (0.15, None), (0.5, -300.0), (100.0, -99_800.0), (-0.1, None), (-0.4, 300.0)],
)
def test_another_host_s_clock_is_shifted_by_the_least_that_fits(ahead_s: float, shift_ms: float | None) -> None:
    trace = make_trace([across(ahead_s)])
    tracks = check(trace)
    first, last = tracks["engine rank a/0", "phases"]
    assert first["ts"] >= 0.1e6 - 1
    assert last["ts"] + last["dur"] <= 0.9e6 + 1
    clocks = trace["otherData"]["clocks"]
    assert "(far, near)" in clocks
    assert clocks.endswith("none had to be" if shift_ms is None else f"far by {shift_ms:+.3f} ms")


def test_a_pull_that_is_longer_than_the_call_lies_around_its_middle() -> None:
    first, last = check(make_trace([across(5.0, seconds=1.0)]))["engine rank a/0", "phases"]
    assert first["ts"] == pytest.approx(0.0, abs=1)
    assert last["ts"] + last["dur"] == pytest.approx(1e6, abs=1)


def test_what_cannot_be_drawn_is_said(outcomes: list[SyncOutcome], tmp_path: Path) -> None:
    for none in ([], [msgspec.structs.replace(outcomes[0], timeline=None)]):
        with pytest.raises(RdtError, match="there is no sync to draw"):
            write_trace(tmp_path / "trace.json", none)
    assert not list(tmp_path.iterdir())


def test_the_command(outcomes: list[SyncOutcome], tmp_path: Path) -> None:
    reports, out = tmp_path / "syncs.jsonl", tmp_path / "deep" / "trace.json"
    write = JsonLines(reports)
    for outcome in outcomes:
        write(outcome)
    done = CliRunner().invoke(app, ["trace", str(reports), str(out), "--last", "2"])
    assert done.exit_code == 0, done.output
    assert "2 syncs, " in done.output
    assert "1 sync, " in CliRunner().invoke(app, ["trace", str(reports), str(out), "--last", "1"]).output
    CliRunner().invoke(app, ["trace", str(reports), str(out), "--last", "2"])
    tracks = check(json.loads(out.read_text()))
    assert [one["name"] for one in tracks["driver of test", "sync"]] == ["version 3", "version 4"]
    done = CliRunner().invoke(app, ["trace", str(reports), str(out), "--group", "other"])
    assert done.exit_code == 1
    assert "there is no sync to draw" in done.output
    done = CliRunner().invoke(app, ["trace", str(tmp_path / "none"), str(out)])
    assert done.exit_code == 1
    assert "rdt trace failed: RdtError: reports of syncs cannot be read" in done.output
