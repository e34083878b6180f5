"""Whole plans: what they count, how well they are balanced, and how well times agree with a simulation of every transfer."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rdt_core.cli import app
from rdt_core.demo.options import OptionError
from rdt_core.errors import SourceError
from rdt_core.plan import Cluster, PlanReport, make_plan_report, predict, read_options, to_dict
from rdt_core.plan.cluster import seat
from rdt_core.plan.peers import compare
from rdt_core.plan.show import summary, tables

pytestmark = pytest.mark.unit


def plan(model: str, trainer: str, engine: str, **options: Any) -> PlanReport:
    return make_plan_report(read_options(model, trainer, engine, simulate=True, **options))


def rows(report: PlanReport) -> dict[str, Any]:
    return {one.what: one for one in report.balances}


@pytest.mark.parametrize("landing", ["in_place", "ring"])
@pytest.mark.parametrize("placement", ["separate", "together"])
@pytest.mark.parametrize(
    ("model", "trainer", "engine"),
    [
        ("tiny", "fsdp:ranks=8,replicas=2", "vllm:tp=2,replicas=2"),
        ("tiny-moe", "fsdp:ranks=8", "sglang:tp=4,ep=4,replicas=2"),
        ("tiny-mla", "megatron:ranks=12,tp=2,pp=3,ep=2", "sglang:tp=2,pp=2,ep=2"),
    ],
)
def test_every_byte_is_counted_on_both_sides_and_by_kind(
    model: str, trainer: str, engine: str, placement: str, landing: str
) -> None:
    report = plan(model, trainer, engine, placement=placement, landing=landing)
    found = rows(report)
    assert report.bytes == found["source ranks"].total == found["engine ranks"].total
    assert report.bytes == sum(row.bytes for row in report.copies)
    links = {"NICs of owners", "NVLink out", "copies inside GPUs"}
    assert report.bytes == sum(one.total for what, one in found.items() if what in links)
    assert {row.kind for row in report.copies} == (
        {"prepared"} if placement == "separate" else {row.kind for row in report.copies}
    )
    assert report.memory.reader_registered == (0 if landing == "ring" else found["engine ranks"].largest)
    packed = any(row.form == "packed" for row in report.copies)
    assert (report.memory.reader_buffer > 0) == (packed or landing == "ring")
    assert (report.memory.source_pack > 0) == packed
    json.dumps(to_dict(report), allow_nan=False)


def test_a_snapshot_has_an_arena_and_a_phase_of_its_own() -> None:
    live, copied = (plan("tiny", "fsdp:ranks=2", "vllm:tp=1", mode=mode) for mode in ("live", "snapshot"))
    assert (live.memory.source_arena, copied.memory.source_arena) == (0, copied.memory.source_registered)
    assert next(phase.name for phase in copied.phases if phase not in live.phases) == "snapshot"


#: and by how much the prediction may differ from the simulation where engine ranks are taken together
CASES = [
    ("qwen3-8b", 6, "fsdp:ranks=16", "vllm:tp=4,replicas=4", {}, 0.02),
    ("qwen3-8b", 6, "fsdp:ranks=16", "vllm:tp=4,replicas=4", {"landing": "ring"}, 0.02),
    ("qwen3-8b", 6, "fsdp:ranks=32,replicas=4", "vllm:tp=1,replicas=24", {}, 0.02),
    # many small chunks of engine ranks that do not walk together: the weak side of the cohorts
    ("qwen3-8b", 8, "megatron:tp=4,pp=2,ranks=64", "vllm:tp=4,replicas=8", {"landing": "ring"}, 0.35),
    ("qwen3-30b-a3b", 4, "megatron:tp=2,pp=4,ep=4,ranks=32", "sglang:tp=4,ep=4,replicas=4", {}, 0.10),
    ("qwen3-8b", 6, "fsdp:ranks=32", "vllm:tp=4,replicas=6", {"placement": "together"}, 0.05),
]


@pytest.mark.parametrize(("model", "layers", "trainer", "engine", "options", "error"), CASES)
def test_the_prediction_agrees_with_a_simulation_of_every_transfer(
    model: str,
    layers: int,
    trainer: str,
    engine: str,
    options: dict[str, Any],
    error: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = plan(model, trainer, engine, layers=layers, **options)
    assert report.wire_s == pytest.approx(report.simulated_s, rel=1e-6)
    monkeypatch.setattr(predict, "TRANSFERS", 0)
    lumped = make_plan_report(read_options(model, trainer, engine, layers=layers, **options))
    assert lumped.wire_s == pytest.approx(report.simulated_s, rel=error)


def test_a_pipeline_is_read_at_nearly_full_rate_whatever_the_landing() -> None:
    """Readers begin at different layers, so that not all of them wait for one stage at a time."""
    report = plan("qwen3-8b", "megatron:tp=2,pp=8,ranks=64", "sglang:tp=4,replicas=4", layers=32, landing="ring")
    assert report.simulated_s is not None
    busiest = max(report.nic_in) / 50e9
    assert report.chunks >= 10
    assert report.simulated_s < 1.35 * busiest  # twice as long where all walk through the model together


def check_balance(report: PlanReport) -> None:
    found = rows(report)
    assert found["NICs of readers"].ratio <= 1.05
    # layers with their experts lie on one stage each: what is left to the choice of owners is balanced
    assert found["NICs of owners"].ratio <= 1.05 * found["NICs of owners"].floor
    assert report.simulated_s is not None
    assert report.wire_s == pytest.approx(report.simulated_s, rel=0.05)
    # and there is little more to gain: the busiest NIC works nearly all the time
    assert report.simulated_s <= 1.1 * max(report.nic_in) / 50e9


def test_experts_of_a_pipeline_are_read_evenly() -> None:
    check_balance(plan("qwen3-30b-a3b", "megatron:tp=2,pp=4,ep=16,ranks=64", "sglang:tp=16,ep=16", layers=10))


@pytest.mark.thorough
def test_kimi_is_balanced_and_predicted() -> None:
    report = plan("kimi-k2", "megatron:tp=8,pp=8,ep=32,ranks=256", "sglang:tp=32,ep=32,replicas=4")
    check_balance(report)
    assert (report.source_ranks, report.engine_ranks, report.tensors) == (256, 128, 69_975)
    assert rows(report)["NICs of owners"].floor < 1.07
    assert all(peer.seconds > 5 * report.wire_s for peer in report.peers)


def test_more_nics_and_faster_ones_make_it_faster() -> None:
    base, wide = (
        plan("qwen3-8b", "fsdp:ranks=8", "vllm:tp=4", layers=2, cluster=Cluster(nics=nics, nic_gbs=rate)).wire_s
        for nics, rate in ((4, 25.0), (8, 50.0))
    )
    assert base / wide == pytest.approx(4, rel=0.05)


def test_other_designs_are_as_slow_as_their_formulas_say() -> None:
    cluster = Cluster()
    broadcast, gather = compare(800 * 10**9, 1000, 1, cluster, seat(cluster, 16, 1, 16, "separate"))
    assert broadcast.seconds == pytest.approx(800 / (2 * 370) * 2 + 0.1, rel=0.3)  # every GPU takes every byte
    assert gather.seconds == pytest.approx(800 / 50 + 0.1)
    assert gather.bottleneck == "every engine rank pulls every tensor"
    small, _ = compare(10**6, 10_000, 1, cluster, seat(cluster, 16, 1, 16, "separate"))
    assert small.bottleneck == "the cost of every single tensor"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("gpt-9", "fsdp:ranks=2", "vllm:tp=1"), "no shapes are known for model 'gpt-9'"),
        (("tiny", "zero:ranks=2", "vllm:tp=1"), "there is no 'zero'; available: fsdp, megatron"),
        (("tiny", "fsdp:ranks=2,pp=2", "vllm:tp=1"), "unknown setting 'pp'; known: ranks, replicas, apart"),
        (("tiny", "megatron:ranks=6,tp=4", "vllm:tp=1"), "6 source ranks are no multiple of tp x pp = 4"),
        (("tiny-moe", "fsdp:ranks=2", "vllm:tp=4,ep=3"), "ep=3 does not divide tp=4"),
        (("tiny", "fsdp:ranks=2", "vllm:tp=2,ep=2"), "tiny has none"),
        (("tiny", "fsdp:ranks=2", "vllm:tp=1,pp=3"), "tiny has 2 layers"),
        (("tiny", "fsdp:ranks=2", "vllm:tp=64"), "tp=64: tiny has 4 attention heads"),
        (("tiny", "fsdp:ranks=2", "vllm:tp=99999999999999999999"), "tp has 20 digits; no size has more than 9"),
        (("tiny", f"fsdp:ranks={'9' * 5000}", "vllm"), "ranks has 5000 digits"),
        (("tiny", "fsdp:ranks=100001", "vllm:tp=1"), "these are 100001 ranks; a plan has at most 100000"),
        (("tiny", "megatron:ranks=999999999,pp=999999999", "vllm:tp=1"), "these are 999999999 ranks"),
        (("tiny", "fsdp:ranks=2", "vllm:tp=2,replicas=50001"), "these are 100002 ranks"),
    ],
)
def test_what_cannot_work_is_refused(arguments: tuple[str, str, str], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        read_options(*arguments)
    with pytest.raises(OptionError, match="--placement 'far' is unknown; known: separate, together, beside"):
        read_options("tiny", "fsdp:ranks=2", "vllm:tp=1", placement="far")
    with pytest.raises(OptionError, match="tiny has 2 layers; 3 cannot be kept"):
        read_options("tiny", "fsdp:ranks=2", "vllm:tp=1", layers=3)


def test_an_engine_that_does_not_divide_the_model_is_refused() -> None:
    with pytest.raises(SourceError, match=r"3 engine ranks do not divide the 64 of"):
        plan("tiny", "fsdp:ranks=2", "vllm:tp=3")


def test_other_designs_are_said_to_be_slower_or_faster() -> None:
    told = plan("tiny", "fsdp:ranks=2", "vllm:tp=1")
    one = told.peers[0]
    for seconds, said in ((2.0, "2.0 x slower"), (0.25, "4.0 x faster"), (1.02, "as fast")):
        peers = (replace(one, seconds=seconds * told.seconds),)
        shown = io.StringIO()
        console = Console(file=shown, width=160)
        for table in tables(replace(told, peers=peers)):
            console.print(table)
        assert said in shown.getvalue()


def test_the_summary_counts_and_sizes() -> None:
    text = summary(plan("tiny", "fsdp:ranks=2", "vllm:tp=1"))
    assert "(2 source ranks) -> vllm:tp=1 (1 replica, 1 engine rank), mode" in text
    assert re.search(r"tiny: \d+ tensors, \d+\.\d [kM]B; ", text)
    assert "2 replicas, 2 engine ranks" in summary(plan("tiny", "fsdp:ranks=2", "vllm:tp=1,replicas=2"))


def test_the_command_prints_tables_json_and_a_picture(tmp_path: Path) -> None:
    runner = CliRunner()
    base = ["plan", "--model", "tiny-mla", "--trainer", "megatron:ranks=4,tp=2,ep=2", "--engine", "sglang:tp=2,ep=2"]
    picture = tmp_path / "deep" / "plan.png"
    told = runner.invoke(app, [*base, "--simulate", "--picture", str(picture)])
    assert told.exit_code == 0, told.output
    for text in ("tiny-mla: 67 tensors", "(simulated:", "predicted sync", "balance of bytes", "broadcast, then load"):
        assert text in told.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"
    machine = tmp_path / "cluster.json"
    machine.write_text('{"nic_gbs": 1.0}')
    answer = json.loads(runner.invoke(app, [*base, "--json", "--cluster", str(machine)]).stdout)
    assert answer["cluster"]["nic_gbs"] == 1.0
    assert answer["simulated_s"] is None
    assert {row["what"] for row in answer["balances"]} >= {"source ranks", "NICs of readers"}
    for place in (tmp_path, machine / "plan.png"):
        refused = runner.invoke(app, [*base, "--picture", str(place)])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert f"rdt plan: --picture {place} cannot be written: " in refused.stderr
    wrong = runner.invoke(app, [*base[:-1], "sglang:tp=3"])
    assert wrong.exit_code == 2
    assert "3 engine ranks do not divide" in wrong.stderr
