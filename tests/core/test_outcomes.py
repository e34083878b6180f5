"""Outcomes: observers are told of every sync, committed, partial or failed, and none of them can break one."""

from __future__ import annotations

import json
import logging
import resource
from pathlib import Path

import pytest

from rdt_core.errors import RdtError
from rdt_core.logline import SEQUENCE
from rdt_core.outcomes import JsonLines, SyncOutcome, Watch, print_table, read_outcomes
from rdt_testbed.halves import Group
from rdt_testbed.reports import are_alike

pytestmark = pytest.mark.unit


@pytest.fixture
def made():
    groups: list[Group] = []

    def make(*args, **options) -> Group:
        groups.append(Group(*args, **options))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def broken() -> None:
    raise OSError("the link\nis down")


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_phases_add_up_to_what_the_caller_waited_for(made, names: tuple[str, ...]) -> None:
    told: list[SyncOutcome] = []
    group = made(2, 1, names=names, observers=[told.append])
    first, second = group.publish(1)
    assert {"begin", "pull", "commit", "stamp", "rest", "total"} <= first.phases.keys()
    assert first.seconds == first.phases["total"]
    parts = sum(seconds for name, seconds in first.phases.items() if name in (*SEQUENCE, "rest"))
    assert parts == pytest.approx(first.seconds)
    # what is told after the stamp, and the making of the outcome
    assert first.seconds <= told[0].seconds < first.seconds + 0.05
    spans = {span.name: span.seconds for span in told[0].timeline.spans if not span.track}
    assert first.phases["commit"] == pytest.approx(spans["commit"])
    assert first.phases["stamp"] == pytest.approx(spans["stamp"])
    # source rank 1 has its report from the commit
    assert {"commit", "stamp"}.isdisjoint(second.phases)
    assert second.seconds < first.seconds


@pytest.mark.parametrize("mode", ["live", "snapshot", "bucket"])
def test_a_sync_that_is_committed(made, mode: str) -> None:
    told: list[SyncOutcome] = []
    group = made(2, 2, names=("a", "b"), mode=mode, observers=[told.append])
    reports = group.publish(1)
    (one,) = told  # of two source ranks
    assert (one.version, one.group, one.mode, one.outcome, one.error) == (1, "test", mode, "committed", "")
    assert one.replicas == {"a": "serving", "b": "serving"}
    assert one.bytes == reports[0].bytes
    assert one.kinds["local"]["bytes"] == reports[0].bytes
    assert one.slowest.kind == "local"
    assert one.report.without_timelines() == reports[0]
    assert are_alike(reports)
    phases = {span.name for span in one.timeline.spans if not span.track}
    assert phases == {"begin", "commit", "stamp"}
    assert {span.name for span in one.timeline.spans if span.track == "b"} == {
        "pause",
        "engine_begin",
        "pull",
        "finish",
        "call",
    }
    assert all(span.start >= 0 and span.start + span.seconds <= one.seconds for span in one.timeline.spans)
    readers = {reader.reader: reader.timeline for reader in one.report.readers}
    assert readers.keys() == {"a/0", "a/1", "b/0", "b/1"}
    for reader in one.report.readers:
        moved = [span for span in reader.timeline.spans if span.track]
        assert {span.track for span in moved} == {f"source {link.source}" for link in reader.links}
        assert sum(span.bytes for span in moved) == reader.bytes
        assert {"wait", "transfer"} <= {span.name for span in reader.timeline.spans if not span.track}
    (other,) = one.report.timelines
    assert other.member == "source rank 1"
    if mode != "live":
        assert "write" in {span.name for span in other.spans if span.track == "source"}


def test_a_replica_that_is_left_out(made) -> None:
    told: list[SyncOutcome] = []
    group = made(2, 1, names=("a", "b"), policy="best_effort", observers=[told.append])
    group.publish(1)
    group.spoil(broken, name="b")
    group.publish(2)
    assert [one.outcome for one in told] == ["committed", "partial"]
    assert told[-1].replicas == {"a": "serving", "b": "torn"}
    assert "the link" in told[-1].report.failed["b"]


def test_a_sync_that_fails(made, caplog) -> None:
    told: list[SyncOutcome] = []
    group = made(2, 1, names=("a", "b"), observers=[told.append])
    group.publish(1)
    group.spoil(broken, name="b")
    with caplog.at_level(logging.WARNING, "rdt_core.outcomes"):
        errors = group.fails(2)
    one = told[-1]
    assert (one.outcome, one.version, one.error, one.error_kind) == ("failed", 2, str(errors[0]), "SyncError")
    assert one.report is None
    assert one.replicas["b"] == "torn"
    assert {span.name for span in one.timeline.spans if not span.track} == {"begin"}
    # how long the replica took to fail, in a call that takes all steps
    assert [span.name for span in one.timeline.spans if span.track == "b"] == ["receive"]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "rdt_core.outcomes"]
    assert line.startswith("version 2 of 'test' failed after")
    assert "\n" not in line


def test_an_observer_that_fails_is_said_once_and_the_others_are_told(made, caplog) -> None:
    told: list[int] = []

    def bad(outcome: SyncOutcome) -> None:
        raise ValueError("no such dashboard")

    group = made(2, 1, observers=[bad, lambda one: told.append(one.version)])
    with caplog.at_level(logging.WARNING, "rdt_core.outcomes"):
        for version in (1, 2, 3):
            group.publish(version)
            group.serves(version)
    assert told == [1, 2, 3]
    assert sum("no such dashboard" in record.getMessage() for record in caplog.records) == 1


def test_lines_are_read_again(made, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "syncs.jsonl"
    told: list[SyncOutcome] = []
    group = made(2, 2, observers=[JsonLines(path), told.append])
    group.publish(1)
    group.publish(2)
    group.spoil(broken)
    group.fails(3)
    assert read_outcomes(path) == told
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["committed", "committed", "failed"]
    assert lines[0]["report"]["readers"][0]["links"]
    assert lines[0]["report"]["phases"]["pull"] > 0


def test_a_full_disk_costs_a_warning_and_no_sync(made, tmp_path: Path, caplog) -> None:
    path = tmp_path / "syncs.jsonl"
    path.symlink_to("/dev/full")
    group = made(2, 1, observers=[JsonLines(path)])
    with caplog.at_level(logging.WARNING, "rdt_core.outcomes"):
        group.publish(1)
        group.publish(2)
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1
        assert "No space left on device" in said[0]
        path.unlink()
        group.publish(3)
    assert [one.version for one in read_outcomes(path)] == [3]
    group.serves(3)


def test_a_line_that_was_cut_is_left_out_and_one_that_is_none_is_refused(made, tmp_path: Path, caplog) -> None:
    path = tmp_path / "syncs.jsonl"
    group = made(1, 1, observers=[JsonLines(path)])
    group.publish(1)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:100])
    with caplog.at_level(logging.WARNING, "rdt_core.outcomes"):
        assert [one.version for one in read_outcomes(path)] == [1]
    assert "1 of its lines are not whole and are left out: line 2" in caplog.text
    path.write_bytes(b'{"reward": 1}\n' + whole)
    with pytest.raises(RdtError, match=r"line 1 of .* is no outcome of a sync .*expected a file that JsonLines wrote"):
        read_outcomes(path)
    path.write_bytes(b"first words\nsecond words\n")
    with pytest.raises(RdtError, match=r"none of 2 lines of .* is an outcome of a sync"):
        read_outcomes(path)
    with pytest.raises(RdtError, match=r"cannot be read from .*missing"):
        read_outcomes(tmp_path / "missing")


def outcome(version: int) -> SyncOutcome:
    return SyncOutcome(time=1e9, group="policy", version=version, mode="live", outcome="failed", seconds=1.0)


def test_a_disk_that_is_full_in_the_middle_of_a_line_costs_that_line(tmp_path: Path, caplog) -> None:
    path = tmp_path / "syncs.jsonl"
    write = JsonLines(path)
    write(outcome(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, limits[1]))
    try:
        with caplog.at_level(logging.WARNING, "rdt_core.outcomes"):
            write(outcome(2))
            write(outcome(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(caplog.records) == 1
    assert "File too large" in caplog.text
    assert path.read_bytes().count(b"\n") == 1
    for version in (4, 5):
        write(outcome(version))
    assert [one.version for one in read_outcomes(path)] == [1, 4, 5]
    assert "1 of its lines are not whole and are left out: line 2" in caplog.text


def test_a_trainer_that_was_killed_in_a_line_begins_the_next_one_on_its_own(tmp_path: Path) -> None:
    path = tmp_path / "syncs.jsonl"
    JsonLines(path)(outcome(1))
    path.write_bytes(path.read_bytes()[:-20])
    JsonLines(path)(outcome(2))
    JsonLines(path)(outcome(3))
    assert [one.version for one in read_outcomes(path)] == [2, 3]
    assert len(path.read_bytes().splitlines()) == 3


def test_what_an_outcome_is_made_of_breaks_no_sync(made, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    told: list[SyncOutcome] = []
    group = made(2, 1, observers=[told.append])

    def wrong(*args: object) -> None:
        raise ZeroDivisionError("of a rate")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "rdt_core.outcomes"):
        patch.setattr("rdt_core.outcomes.slow_links", wrong)
        group.publish(1)
        group.serves(1)
    assert not told
    assert "cannot be told to observers: ZeroDivisionError('of a rate')" in caplog.text
    group.publish(2)
    assert [one.version for one in told] == [2]


def test_states_that_cannot_be_computed_hide_no_error() -> None:
    told: list[SyncOutcome] = []

    def states() -> dict[str, str]:
        raise KeyError("a")

    with pytest.raises(RdtError, match="boom"), Watch([told.append], "policy").sync(3, "live", states):
        raise RdtError("boom")
    assert (told[0].error, told[0].replicas) == ("boom", {})


def test_the_table_of_a_sync(made, capsys) -> None:
    group = made(2, 1, names=("a", "b"), policy="best_effort", observers=[print_table])
    group.publish(1)
    text = capsys.readouterr().err
    for part in ("version 1 of 'test'", "commit", "stamp", "a/0", "b/0", "4 local links", "0 -> a/0 (local)"):
        assert part in text
    # an engine of this process has nothing to pause
    assert "pause" not in text
    group.spoil(broken, name="b")
    group.publish(2)
    assert "left out: b: " in capsys.readouterr().err


def test_a_table_of_a_failure(made, capsys) -> None:
    group = made(1, 1, observers=[print_table])
    group.publish(1)
    group.spoil(broken)
    group.fails(2)
    assert "version 2 of 'test' failed: " in capsys.readouterr().err


def test_a_coordinator_that_does_not_answer_leaves_the_states_out() -> None:
    told: list[SyncOutcome] = []

    def states() -> dict[str, str]:
        raise RdtError("gone")

    watch = Watch([told.append], "policy")
    with pytest.raises(RdtError, match="boom"), watch.sync(3, "live", states):
        raise RdtError("boom")
    assert told[0].replicas == {}


def test_nobody_is_told_or_logged_on_other_ranks(caplog) -> None:
    with pytest.raises(RdtError, match="boom"), Watch(None, "policy").sync(3, "live", dict):
        raise RdtError("boom")
    assert not caplog.records
