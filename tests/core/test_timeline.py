"""Timelines: what is recorded, what is made one, and what is kept of too much."""

from __future__ import annotations

import os
import time

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from rdt_core import wire
from rdt_core.timeline import MAX_SPANS, Piece, Recorder, bounded, joined, link_track

pytestmark = pytest.mark.unit


def span(name: str, start: float, seconds: float, nbytes: int = 0) -> Piece:
    return start, start + seconds, name, nbytes


def test_what_is_recorded_travels() -> None:
    before = time.time()
    recorder = Recorder()
    at = recorder.began
    recorder.add("wait", at, at + 1.0)
    recorder.add("move", at + 1.0, at + 2.0, link=3, nbytes=10)
    recorder.add("pull", at + 0.5, at + 3.0, track="a")
    line = recorder.timeline("engine rank a/0")
    assert wire.decode(wire.encode(line), wire.Timeline) == line
    assert (line.member, line.pid) == ("engine rank a/0", os.getpid())
    assert before <= line.began <= time.time()
    assert {one.track: (one.name, one.bytes) for one in line.spans} == {
        "": ("wait", 0), link_track(3): ("move", 10), "a": ("pull", 0),
    }  # fmt: skip
    assert [round(one.start, 6) for one in line.spans] == [0.0, 1.0, 0.5]


def test_a_span_without_an_end_ends_now() -> None:
    recorder = Recorder()
    recorder.add("write", recorder.began)
    assert 0 <= recorder.timeline("driver").spans[0].seconds < 60


def test_spans_of_one_name_that_touch_or_overlap_are_one() -> None:
    spans = [span("move", 0.0, 1.0, 5), span("move", 0.5, 1.0, 6), span("move", 1.5, 0.5, 7), span("move", 3.0, 1.0, 8)]
    assert joined(spans) == [span("move", 0.0, 2.0, 18), span("move", 3.0, 1.0, 8)]
    phases = [span("transfer", 0.0, 1.0), span("land", 1.0, 1.0), span("transfer", 2.0, 1.0)]
    assert joined(reversed(phases)) == phases


def test_of_one_name_pauses_go_and_of_several_the_longest_stay() -> None:
    moves = [span("move", float(number), 0.5, 1) for number in range(10_000)]
    kept = bounded(moves)
    assert len(kept) <= MAX_SPANS
    assert sum(nbytes for _, _, _, nbytes in kept) == 10_000
    assert kept[0][0] == 0.0
    phases = [span(("transfer", "land")[number % 2], float(number), 0.1 + number % 7) for number in range(1000)]
    kept = bounded(phases)
    assert len(kept) == MAX_SPANS
    assert min(round(end - start, 6) for start, end, _, _ in kept) == 6.1
    assert kept == sorted(kept)


@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.floats(0, 100), st.floats(0, 10), st.integers(0, 9)),
        min_size=1,
        max_size=300,
    )
)
def test_joining_keeps_bytes_and_the_time_that_is_covered(drawn: list[tuple[str, float, float, int]]) -> None:
    spans = [span(*one) for one in drawn]
    made = joined(spans)
    assert sum(one[3] for one in made) == sum(one[3] for one in spans)
    assert made[0][0] == min(one[0] for one in spans)
    for start, end, name, _ in spans:
        assert any(own[2] == name and own[0] <= start and own[1] >= end for own in made)
    assert len(bounded(made)) <= MAX_SPANS


def test_a_report_without_timelines_is_what_older_ranks_send() -> None:
    report = wire.ReaderReport(
        reader="a/0", incarnation="i", version=1, bytes=1, expected_bytes=1, digest="d", phases={}, links=()
    )
    fields = msgspec.to_builtins(report)
    del fields["timeline"]
    assert msgspec.convert(fields, wire.ReaderReport) == report
