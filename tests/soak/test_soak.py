"""`rdt soak` over real Ray: short here, to see that it measures and that a leak is noticed; long with RDT_THOROUGH=1."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rdt_core.cli import app
from rdt_core.soak import SoakOptions
from rdt_core.soak.loop import run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

#: measures that noise of a busy machine does not move
COUNTS = {"files", "threads", "segments", "shared", "registrations", "registered", "references"}


def growing(report) -> set[tuple[str, str]]:
    return {(one.process, one.measure) for one in report.growing if one.measure in COUNTS}


def test_a_leak_of_a_worker_is_noticed_and_nothing_else_grows():
    done = []
    options = SoakOptions(syncs=20, reattach_every=8, kinds=("mapped",), leak="files", timeout_s=120).check()
    report = run(options, done.append)
    assert done == list(range(1, 21))
    assert growing(report) == {("engine 0", "files")}
    assert report.links == ("mapped",)
    assert {"source 0", "source 1", "engine 0", "driver", "coordinator", "raylet", "gcs_server"} <= set(report.series)
    assert all(len(values) == 20 for values in report.series["engine 0"].values())


@pytest.mark.thorough
@pytest.mark.parametrize("leak", ["rss", "threads", "shared", "references"])
def test_every_sort_of_leak_is_noticed(leak):
    report = run(SoakOptions(syncs=20, kinds=("mapped",), leak=leak, timeout_s=120).check())
    noticed = {one.measure for one in report.growing if one.process == "engine 0"}
    assert leak in noticed


@pytest.mark.thorough
@pytest.mark.parametrize("rejoin_every", [0, 20])
@pytest.mark.parametrize(("kind", "mode"), [("mapped", "snapshot"), ("prepared", "live"), ("ray", "bucket")])
def test_three_hundred_syncs_are_flat(kind, mode, rejoin_every):
    result = CliRunner().invoke(
        app,
        ["soak", "--syncs", "300", "--kinds", kind, "--mode", mode, "--rejoin-every", str(rejoin_every), "--json"],
    )
    report = json.loads(result.stdout)
    assert [one for one in report["verdicts"] if one["grows"]] == []
    assert result.exit_code == 0
