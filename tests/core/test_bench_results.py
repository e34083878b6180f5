"""Numbers, tables and files of the bench."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from rdt_core.bench import BenchReport, Cell, Floors, PeerRow, p50, p95, plot, ratio, show, tensorfile, to_dict
from rdt_core.bench.measure import label
from rdt_core.bench.options import BenchOptions
from rdt_core.bench.peers import bucket_size, buckets
from rdt_core.bench.tables import tables, verdict
from rdt_core.errors import RdtError
from rdt_core.notation import OptionError
from rdt_core.shapes import checkpoint_tensors

pytestmark = pytest.mark.unit

CELL = Cell(
    mode="live", kind="mapped", used_mode="live", used_kinds=("mapped",), bytes=2_000_000_000, first_s=1.0,
    seconds=(0.1, 0.2, 0.3), moving=(0.095, 0.18, 0.29), phases_p95={"begin": 0.02, "total": 0.3}, slowest=3,
    reader_phases_p95={"transfer": 0.15}, floors=Floors(copy=0.05, span=0.1), floor="span", phases={"begin": 0.01, "total": 0.2},
    reader_phases={"transfer": 0.1}, sent=(2_000_000_000,), received=(2_000_000_000,), exact=True, notes=("floor nixl: no",),
)  # fmt: skip
REPORT = BenchReport(
    model="tiny", layers=0, tensors=21, bytes=279_168, trainer="fsdp:ranks=1", engine="vllm:tp=1", device="cuda",
    device_name="a GPU", gpus="separate", placement=((0,), (1,)), rounds=3,
    cells=(CELL, Cell(mode="live", kind="ray", error="TransportError: no way")),
    peers=(
        PeerRow(name="broadcast", bytes=1, first_s=1, seconds=(0.5,), exact=True, what="send", phases={"start": 0.004}),
        PeerRow(name="disk", error="full"),
        PeerRow(name="checkpoint-engine", reason="no CUDA"),
    ),
)  # fmt: skip


def test_percentiles_and_ratio() -> None:
    assert p50([3, 1, 2]) == 2
    assert p95([0.0, 1.0]) == pytest.approx(0.95)
    assert p95([4.0]) == 4.0
    assert math.isnan(p50([]))
    assert math.isnan(p95([]))
    assert ratio(CELL) == pytest.approx(2.0)
    assert math.isnan(ratio(Cell(mode="live", kind="ray")))
    assert CELL.overhead_s == pytest.approx(0.01)
    assert math.isnan(Cell(mode="live", kind="ray").overhead_s)


def test_errors_are_neither_exact_nor_wrong() -> None:
    assert REPORT.exact
    assert not REPORT.failed
    wrong = Cell(mode="live", kind="ray", seconds=(1.0,))
    assert not BenchReport(**{**_fields(), "cells": (CELL, wrong)}).exact
    assert BenchReport(**{**_fields(), "cells": REPORT.cells[1:], "peers": REPORT.peers[1:]}).failed


def _fields() -> dict:
    return {name: getattr(REPORT, name) for name in REPORT.__struct_fields__}


def test_json_carries_what_follows_and_no_nan() -> None:
    plain = json.loads(json.dumps(to_dict(REPORT), allow_nan=False))
    assert plain["cells"][0]["p50"] == 0.2
    assert plain["cells"][0]["gbps"] == pytest.approx(10.0)
    assert plain["cells"][0]["ratio"] == pytest.approx(2.0)
    assert plain["cells"][0]["overhead"] == pytest.approx(0.01)
    assert plain["cells"][1]["p50"] is None
    assert plain["cells"][1]["overhead"] is None
    assert plain["peers"][0]["p95"] == 0.5


def shown(report: BenchReport, width: int = 200) -> str:
    from rich.console import Console

    out = io.StringIO()
    for one in tables(report):
        Console(file=out, width=width).print(one)
    return out.getvalue() + verdict(report)


def test_tables_show_errors_beside_the_rest() -> None:
    text = shown(REPORT)
    for words in (
        "live, ray: failed: TransportError: no way", "2.00", "p50 over the span", "disk failed: full", "2.5 x",
        "engine ranks on GPU 1", "floor nixl: no", "yes", "10.0", "20.0", "150", "no CUDA", "send; start 4.0", "279.2 kB",
        "each source rank sends 2.000 GB, each engine rank receives 2.000 GB", "all equal", "failed: 2 of 5 rows",
        "fastest: mode live over mapped links, 200 ms for 2.000 GB (10.0 GB/s), 2.00 times one mapped copy",
    ):  # fmt: skip
        assert words in " ".join(text.split()), words
    assert "pack" not in text.split("first:")[0], "what is the same in every row has no column"
    spoiled = msgspec.structs.replace(REPORT, cells=(msgspec.structs.replace(CELL, exact=False),))
    assert "WRONG BYTES in 1 of 4 rows" in shown(spoiled)
    assert "all equal" not in shown(spoiled)
    assert all(len(line) <= 80 for line in shown(REPORT, 80).splitlines()[:-3])


def test_where_the_time_goes_has_every_phase_and_what_is_in_none() -> None:
    phases = {"begin": 0.01, "pull": 0.1, "call": 0.002, "commit": 0.003, "stamp": 0.004, "rest": 0.001, "total": 0.2}
    text = shown(
        msgspec.structs.replace(REPORT, cells=(msgspec.structs.replace(CELL, phases=phases, phases_p95=phases),))
    )
    words = " ".join(text.split())
    head = next(line for line in text.splitlines() if "commit" in line)
    for name in ("begin", "pull", "call", "commit", "stamp", "rest"):
        assert name in head
    assert "commit: the coordinator's" in words
    assert "rest: what is in no phase" in words


def test_what_ran_in_an_engine_is_held_against_rdt_s_mapped_row_there() -> None:
    def row(name: str, seconds: float, inside: str = "vLLM 1", exact: bool = True) -> PeerRow:
        return PeerRow(name=name, inside=inside, bytes=1, first_s=1, seconds=(seconds,), exact=exact)

    rows = (
        row("sharded_rdt", 0.9),
        row("rdt, live, mapped", 0.3),
        row("rdt, live, prepared", 0.45),
        row("disk", 2.0, ""),
    )
    text = shown(msgspec.structs.replace(REPORT, peers=rows))
    for name, factor in (("sharded_rdt", "3.0 x"), ("rdt, live, prepared", "1.5 x"), ("disk", "10.0 x")):
        assert factor in next(line for line in text.splitlines() if line.strip().startswith(name))
    assert "1.0 x" not in text
    assert "rdt, live, mapped" in " ".join(text.split()).split("times rdt: ")[1]
    without = shown(msgspec.structs.replace(REPORT, peers=(rows[0], msgspec.structs.replace(rows[1], exact=False))))
    assert "3.0 x" not in without


def test_the_bar_counts_syncs_and_says_only_what_was_asked_for() -> None:
    options = BenchOptions(
        model="tiny", modes=("live",), kinds=("mapped", "ray"), rounds=4, peer_rounds=2, peers=("disk",)
    )
    assert show.syncs_of(options) == 2 * 5 + 3
    assert label(Cell(mode="live", kind="mapped")) == "mode live, links mapped"
    assert (
        label(Cell(mode="live", kind="ray", pack="direct", verify="full"))
        == "mode live, links ray, direct, verify full"
    )


def test_one_sync_is_one() -> None:
    assert "1 sync each after the first" in shown(msgspec.structs.replace(REPORT, rounds=1))


def test_a_floor_too_short_to_be_a_yardstick_gives_a_reason_instead_of_a_ratio() -> None:
    short = msgspec.structs.replace(CELL, floors=Floors(copy=2e-6, span=9e-4))
    assert math.isnan(ratio(short))
    assert ratio(msgspec.structs.replace(CELL, floors=Floors(span=1e-3))) == pytest.approx(200)
    report = msgspec.structs.replace(REPORT, cells=(short,))
    text = " ".join(shown(report).split())
    assert "no ratio: the span of these bytes takes 0.900 ms; below 1 ms it would tell about control messages" in text
    assert "whatever the bytes (10.0 ms here)" in text
    assert "times rdt is left out: the span of these bytes" in text
    assert "2.5 x" not in text
    assert "times one" not in text
    plain = to_dict(report)["cells"][0]
    assert plain["ratio"] is None
    assert plain["no_ratio"].startswith("no ratio: the span")
    assert to_dict(REPORT)["cells"][0]["no_ratio"] == ""


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_has_every_combination_and_peer_that_ran(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / "made" / f"bench.{suffix}"
    plot.draw(REPORT, file)
    if suffix == "svg":
        # glyphs are drawn as paths; the text stands beside each as a comment
        text = file.read_text()
        for words in (
            "live, mapped",
            "rdt: live, mapped",
            "broadcast",
            "transfer",
            "floor: one copy inside the reader",
            "tiny, 279.2 kB",
        ):
            assert f"<!-- {words}" in text, words
        assert "checkpoint-engine" not in text
    else:
        assert file.read_bytes().startswith(b"\x89PNG")


def test_parts_of_a_bar_add_up_to_its_median() -> None:
    assert sum(plot.parts(CELL).values()) == pytest.approx(0.2)
    assert plot.parts(CELL)["transfer"] == pytest.approx(0.1)


def test_a_picture_that_cannot_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plot.check_plot(None)
    plot.check_plot(Path("bench.svg"))
    with pytest.raises(OptionError, match=r"--plot bench\.jpg: the suffix says the format; known: png, svg, pdf"):
        plot.check_plot(Path("bench.jpg"))
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="pip install matplotlib"):
        plot.check_plot(Path("bench.png"))


def test_there_is_no_picture_of_nothing_and_one_of_peers_alone(tmp_path: Path, caplog) -> None:
    file = tmp_path / "bench.png"
    nothing = msgspec.structs.replace(REPORT, cells=REPORT.cells[1:], peers=REPORT.peers[1:])
    for report in (nothing, msgspec.structs.replace(nothing, cells=(), peers=())):
        plot.draw(report, file)
        assert not file.exists()
    assert caplog.text.count("nothing was measured: no picture") == 2
    plot.draw(msgspec.structs.replace(REPORT, cells=()), file)
    assert file.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RdtError, match=r"bench\.png/x\.png cannot be written: Not a directory"):
        plot.draw(REPORT, file / "x.png")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """The command without Ray and without measuring: what it makes of a report, and of an error after it."""
    begun: list[str] = []

    def run(options: object, *, gpus: int, observe: Callable[[BenchReport, str], None], **more: object) -> None:
        begun.append("run")
        observe(REPORT, "")
        raise RdtError("the first error")

    monkeypatch.setattr("ray.init", lambda **settings: begun.append("ray"))
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr(show, "run", run)

    def command(json_file: str = "", picture: Path | None = None) -> str:
        out = io.StringIO()
        show.bench_command(out, BenchOptions(model="tiny"), json_file, picture)
        return out.getvalue()

    command.begun = begun
    return command


def test_paths_that_cannot_be_written_are_refused_before_anything_is_measured(command, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OptionError, match=r"--json .*file/x\.json cannot be written: "):
        command(json_file=str(file / "x.json"))
    with pytest.raises(OptionError, match=r"--plot .*file/x\.png cannot be written: "):
        command(picture=file / "x.png")
    assert not command.begun


def test_an_error_of_the_picture_hides_none_of_the_bench(command, tmp_path: Path, monkeypatch, caplog) -> None:
    def draw(report: BenchReport, path: Path) -> None:
        raise TypeError("the second error")

    monkeypatch.setattr(show, "draw", draw)
    with pytest.raises(RdtError, match="the first error"):
        command(json_file=str(tmp_path / "bench.json"), picture=tmp_path / "bench.png")
    assert "the second error" in caplog.text
    assert json.loads((tmp_path / "bench.json").read_text())["model"] == "tiny"


def test_buckets_hold_every_tensor_once_and_split_none() -> None:
    tensors = checkpoint_tensors("tiny-mla")
    made = buckets(tensors, 20_000)
    assert [index for bucket in made for index, _ in bucket] == list(range(len(tensors)))
    assert len(made) > 5
    largest = max(map(tensorfile.nbytes, tensors))
    assert bucket_size(tensors, made) == max(largest, bucket_size(tensors, made))
    for bucket in made:
        end = 0
        for index, offset in bucket:
            assert offset >= end
            end = offset + tensorfile.nbytes(tensors[index])
        assert end <= 20_000 or len(bucket) == 1


def test_tensor_files_are_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = checkpoint_tensors("tiny-mla")
    weights = {meta.name: torch.randn(meta.shape).to(getattr(torch, meta.dtype)) for meta in tensors}
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        tensorfile.write_header(file, tensors)
        for value in weights.values():
            tensorfile.write_tensor(file, value)
    theirs = load_file(path)
    ours = dict(tensorfile.read(path))
    assert theirs.keys() == ours.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(theirs[name], value)
        assert torch.equal(ours[name], value)
