"""report.json has the fields that are promised, and the table and the picture show every version."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rdt_core.demo import show
from rdt_core.demo.report import CheckpointReport, DemoReport, StepReport, draw
from rdt_core.wire import LinkReport

pytestmark = pytest.mark.unit


def _step(version: int) -> StepReport:
    links = tuple(
        LinkReport(source=rank, reader="engine/0", kind="mapped", bytes=2_000_000_000, seconds=1.0 + rank)
        for rank in range(2)
    )
    return StepReport(
        version=version,
        reward=0.1 * version,
        seconds=2.5,
        phases={"begin": 0.1, "pause": 0.0, "pull": 2.0, "finish": 0.25, "total": 2.5},
        bytes=4_000_000_000,
        mode="live",
        links=links,
        max_abs_logprob_error=1e-6,
    )


def _report() -> DemoReport:
    return DemoReport(
        trainer="fsdp:ranks=2", engine="paper 1", model="tiny", rdt="1.2.3", date="2026-01-02T03:04:05+00:00",
        mode_reason="asked for", checkpoint=CheckpointReport(reward=0.05, max_abs_logprob_error=2e-6),
        steps=(_step(1), _step(2)),
    )  # fmt: skip


def test_the_json_has_exactly_these_fields() -> None:
    data = json.loads(_report().json())
    assert set(data) == {"trainer", "engine", "model", "rdt", "date", "mode_reason", "checkpoint", "steps"}
    assert data["checkpoint"] == {"reward": 0.05, "max_abs_logprob_error": 2e-6}
    assert [set(step) for step in data["steps"]] == [
        {"version", "reward", "seconds", "phases", "bytes", "mode", "links", "max_abs_logprob_error"}
    ] * 2
    assert set(data["steps"][0]["links"][0]) == {"source", "reader", "kind", "bytes", "seconds"}


def test_the_table_has_a_row_for_each_version() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(show.table(_report()))
    text = console.export_text()
    rows = [line for line in text.splitlines() if "│" in line]
    assert [row.split("│")[1].strip() for row in rows] == ["0", "1", "2"]
    assert "pull 2,000" in text
    assert "total" not in text
    assert "2 mapped 2.00 GB/s" in text  # 4 GB in the 2 s of the slower link


def test_links_of_no_bytes_have_no_rate() -> None:
    links = (LinkReport(source=0, reader="engine/0", kind="ray", bytes=0, seconds=0.0),)
    step = StepReport(
        version=1, reward=0, seconds=0, phases={}, bytes=0, mode="live", links=links, max_abs_logprob_error=0
    )  # fmt: skip
    assert show.links(step) == "1 ray"


def test_the_picture_is_written(tmp_path: Path) -> None:
    draw(_report(), tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
