"""Whole plans: what they count, how well they are balanced, and how well times agree with a simulation of every transfer."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rdt_core.cli import app
from rdt_core.demo.options import OptionError
from rdt_core.errors import SourceError
from rdt_core.plan import Cluster, PlanReport, make_plan_report, read_options, to_dict
from rdt_core.plan.cluster import seat
from rdt_core.plan.peers import compare
from rdt_core.plan.picture import draw, sides
from rdt_core.plan.predict import landing_seconds, wire_seconds
from rdt_core.plan.readers import Transfers
from rdt_core.plan.show import summary, tables
from rdt_core.plan.simulate import simulate
from rdt_core.plan.traffic import measure

pytestmark = pytest.mark.unit


def plan(model: str, trainer: str, engine: str, **options: Any) -> PlanReport:
    return make_plan_report(read_options(model, trainer, engine, simulate=True, **options))


def busiest_reader(report: PlanReport) -> int:
    return max(nic.bytes for nic in report.nics if nic.side == "in")


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


TOGETHER = {"placement": "together", "landing": "ring"}
#: trainer to engine, in both landings: dense and with experts, row shards and pipelines, many chunks and few
CASES: list[tuple[str, int, str, str, dict[str, Any]]] = [
    ("qwen3-8b", 6, "fsdp:ranks=16", "vllm:tp=4,replicas=4", {}),
    ("qwen3-8b", 6, "fsdp:ranks=16", "vllm:tp=4,replicas=4", {"landing": "ring"}),
    ("qwen3-8b", 6, "fsdp:ranks=32,replicas=4", "vllm:tp=1,replicas=24", {}),
    ("qwen3-8b", 8, "megatron:tp=4,pp=2,ranks=64", "vllm:tp=4,replicas=8", {"landing": "ring"}),
    ("qwen3-8b", 6, "fsdp:ranks=32", "vllm:tp=4,replicas=6", {"placement": "together"}),
    ("qwen3-30b-a3b", 4, "megatron:tp=2,pp=4,ep=4,ranks=32", "sglang:tp=4,ep=4,replicas=4", {}),
    ("qwen3-30b-a3b", 8, "megatron:tp=2,pp=4,ep=4,ranks=32", "sglang:tp=4,ep=4,replicas=4", {"landing": "ring"}),
    ("glm-4.5-air", 4, "megatron:tp=4,pp=2,ep=8,ranks=32", "vllm:tp=8,ep=8,replicas=2", TOGETHER),
]


@pytest.mark.parametrize(("model", "layers", "trainer", "engine", "options"), CASES)
def test_the_prediction_agrees_with_a_simulation_of_every_transfer(
    model: str, layers: int, trainer: str, engine: str, options: dict[str, Any]
) -> None:
    report = plan(model, trainer, engine, layers=layers, **options)
    assert report.wire_s == pytest.approx(report.simulated_s, rel=0.03)


def test_a_large_transfer_does_not_wait_for_the_small_ones_of_its_chunk() -> None:
    """Reader 0 has an owner for itself, but for crumbs that it takes of the owner whom all others want."""
    rows = [(0, chunk, source, nbytes) for chunk in range(6) for source, nbytes in ((0, 4 * 10**9), (1, 10**6))]
    rows += [(reader, chunk, 1, 10**9) for reader in (1, 2, 3) for chunk in range(6)]
    reader, chunk, source, nbytes = map(np.array, zip(*rows, strict=True))
    none, one = np.zeros_like(reader), np.ones_like(reader)
    transfers = Transfers(reader, chunk, source, none, nbytes, one, none, none, none)
    cluster = Cluster()
    ways = measure(transfers, cluster, seat(cluster, 2, 1, 4, "separate"))
    land = landing_seconds(transfers, cluster, ring=True)
    seconds, bottleneck = wire_seconds(transfers, ways, land)
    assert seconds == pytest.approx(simulate(reader, chunk, nbytes, ways, land).seconds, rel=1e-3)
    assert bottleneck == "into NIC 0 of node 1, busy 99% of it"
    # and readers that want one owner one after the other are slower than any single NIC
    alone = np.flatnonzero(reader > 0)
    fewer = Transfers(*(getattr(transfers, name)[alone] for name in Transfers.__slots__))
    ways = measure(fewer, Cluster(nic_gbs=1.0, copy_gbs=1.0), seat(cluster, 2, 1, 4, "separate"))
    land = landing_seconds(fewer, Cluster(copy_gbs=0.4), ring=True)
    assert wire_seconds(fewer, ways, land)[1].endswith("of it; then chunks wait for one another")


def test_a_pipeline_is_read_at_nearly_full_rate_whatever_the_landing() -> None:
    """Readers begin at different layers, so that not all of them wait for one stage at a time."""
    report = plan("qwen3-8b", "megatron:tp=2,pp=8,ranks=64", "sglang:tp=4,replicas=4", layers=32, landing="ring")
    assert report.simulated_s is not None
    busiest = busiest_reader(report) / 50e9
    assert report.chunks >= 10
    assert report.simulated_s < 1.35 * busiest  # twice as long where all walk through the model together


def check_balance(report: PlanReport, longest: float = 1.1) -> None:
    found = rows(report)
    assert found["NICs of readers"].ratio <= 1.05
    # layers with their experts lie on one stage each: what is left to the choice of owners is balanced
    assert found["NICs of owners"].ratio <= 1.05 * found["NICs of owners"].floor
    assert report.simulated_s is not None
    assert report.wire_s == pytest.approx(report.simulated_s, rel=0.05)
    # and there is little more to gain: the busiest NIC works nearly all the time, or, where chunks wait, most of it
    assert report.simulated_s <= longest * busiest_reader(report) / 50e9


def test_experts_of_a_pipeline_are_read_evenly() -> None:
    check_balance(plan("qwen3-30b-a3b", "megatron:tp=2,pp=4,ep=16,ranks=64", "sglang:tp=16,ep=16", layers=10))


def test_every_link_and_nic_has_its_bytes() -> None:
    cluster = Cluster(gpus=4, nics=2)
    report = plan("tiny-moe", "fsdp:ranks=6", "sglang:tp=2,ep=2,replicas=3", placement="beside", cluster=cluster)
    found, links = json.loads(json.dumps(to_dict(report))), report.links
    assert found["links"] == {
        "source_rank": [*links.source_rank], "engine_rank": [*links.engine_rank], "kind": [*links.kind], "bytes": [*links.bytes],
    }  # fmt: skip
    pairs = [*zip(links.source_rank, links.engine_rank, strict=True)]
    assert pairs == sorted({*pairs})
    assert (max(links.source_rank), max(links.engine_rank), sum(links.bytes)) == (5, 5, report.bytes)
    # two ranks of the trainer share a node of four GPUs with the first two engine ranks
    same = [(source, reader) for source, reader in pairs if source // 4 == (6 + reader) // 4]
    assert [pair for pair, kind in zip(pairs, links.kind, strict=True) if kind == "mapped"] == same
    # what crosses nodes crosses a NIC at either end, and these are counted by name
    through = {(nic["node"], nic["nic"], nic["side"]): nic["bytes"] for nic in found["nics"]}
    wanted = dict.fromkeys(through, 0)
    for (source, reader), nbytes in zip(pairs, links.bytes, strict=True):
        for rank, side in ((source, "out"), (6 + reader, "in")):
            wanted[rank // 4, rank % 4 // 2, side] += 0 if (source, reader) in same else nbytes
    assert through == wanted
    assert sum(wanted.values()) > 0
    assert list(through) == sorted(through, key=lambda nic: (nic[2] == "in", nic))
    mapped, prepared, everything = found["links_by_kind"]
    assert (mapped["kind"], prepared["kind"], everything["kind"]) == ("mapped", "prepared", "all")
    assert (mapped["links"], everything["links"], everything["bytes"]) == (len(same), len(links), report.bytes)
    assert mapped["smallest"] <= mapped["median"] <= mapped["largest"] == max(
        nbytes for pair, nbytes in zip(pairs, links.bytes, strict=True) if pair in same
    )  # fmt: skip


def shown(report: PlanReport) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, width=160)
    for table in tables(report):
        console.print(table)
    return text.getvalue().splitlines()


def test_tables_add_up_and_have_no_padding_and_separators() -> None:
    report = plan("qwen3-8b", "fsdp:ranks=8", "vllm:tp=2,replicas=4")
    lines = shown(report)
    assert [line for line in lines if line != line.rstrip()] == []
    assert not any(re.search(r"\d{4}", line) for line in lines), "a number of four digits has a separator"
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    direct, packed = (next(row for row in cells if row[0] == f"prepared, {form}") for form in ("direct", "packed"))
    total = next(row for row in cells if row[0] == "all" and len(row) == len(direct))
    both = int(direct[1]) + int(packed[1]) - len(report.links)
    assert both > 0
    assert f"{both} links with direct and packed copies: in both rows, once under all" in lines
    assert total[1] == f"{len(report.links)}"
    number = [[int(row[at].replace(",", "")) for at in (2, 3)] for row in (direct, packed, total)]
    assert [sum(column) for column in zip(*number[:2], strict=True)] == number[2]
    assert ["readers', in", "NIC 0 of node 1", "8.191 GB", "1.000"] in cells
    assert ["prepared", "64", "65.528 GB", "302.1 MB", "1.024 GB", "1.746 GB"] in cells


@pytest.mark.thorough
@pytest.mark.parametrize("landing", ["in_place", "ring"])
def test_kimi_is_balanced_and_predicted(landing: str) -> None:
    report = plan("kimi-k2", "megatron:tp=8,pp=8,ep=32,ranks=256", "sglang:tp=32,ep=32,replicas=4", landing=landing)
    check_balance(report, 1.1 if landing == "in_place" else 1.3)
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
        (("gpt-9", "fsdp:ranks=2", "vllm:tp=1"), "--model: no shapes are known for model 'gpt-9'"),
        (("nofile/config.json", "fsdp:ranks=2", "vllm:tp=1"), "--model: nofile/config.json does not exist"),
        (("nofile.json", "fsdp:ranks=2", "vllm:tp=1"), "--model: nofile.json does not exist"),
        (("a" * 5000, "fsdp:ranks=2", "vllm:tp=1"), "no shapes are known"),
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
    with pytest.raises(OptionError, match="--layers: tiny has 2 layers; 3 cannot be kept"):
        read_options("tiny", "fsdp:ranks=2", "vllm:tp=1", layers=3)


def test_an_engine_that_does_not_divide_the_model_is_refused() -> None:
    with pytest.raises(SourceError, match=r"3 engine ranks do not divide the 64 of"):
        plan("tiny", "fsdp:ranks=2", "vllm:tp=3")


def test_other_designs_are_said_to_be_slower_or_faster() -> None:
    told = plan("tiny", "fsdp:ranks=2", "vllm:tp=1")
    one = told.peers[0]
    for seconds, said in ((2.0, "2.0 x slower"), (0.25, "4.0 x faster"), (1.02, "as fast")):
        peers = (replace(one, seconds=seconds * told.seconds),)
        assert any(said in line for line in shown(replace(told, peers=peers)))


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


@pytest.mark.parametrize(
    ("options", "nics"),
    [({"placement": "together"}, 0), ({"cluster": Cluster(gpus=1, nics=1)}, 24)],
    ids=["ranks", "nics"],
)
def test_a_picture_shows_ranks_where_no_nic_is_passed_and_many_nics(
    tmp_path: Path, options: dict[str, Any], nics: int
) -> None:
    report = plan("tiny", "fsdp:ranks=8", "vllm:tp=1,replicas=16", **options) if nics else plan(
        "tiny", "fsdp:ranks=8", "vllm:tp=2", **options
    )  # fmt: skip
    assert sum(nic.bytes > 0 for nic in report.nics) == nics
    draw(tmp_path / "plan.png", report)
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    panels = sides(report)
    names = ("NICs", "node.NIC") if nics else ("ranks, all inside nodes", "source rank")
    assert names[0] in panels[0][0]
    assert panels[0][1] == names[1]
    assert [sum(nbytes for _, _, nbytes in rows) for _, _, rows in panels] == [report.bytes] * 2
