"""Reports: rates, the slowest link, floors, and what is written for people and machines."""

from __future__ import annotations

import io
import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from rdt_core import report, wire
from rdt_core.errors import RdtError
from rdt_core.notation import OptionError
from rdt_core.wire import LinkReport, PackReport, ReaderReport, SyncReport

pytestmark = pytest.mark.unit


def sync(version: int = 7, links: tuple[LinkReport, ...] | None = None) -> SyncReport:
    if links is None:
        links = (
            LinkReport(source=0, reader="a/0", kind="mapped", bytes=4_000_000_000, seconds=0.5),
            LinkReport(source=1, reader="a/0", kind="prepared", bytes=1_000_000_000, seconds=2.0),
            LinkReport(source=2, reader="a/0", kind="prepared", bytes=1_000_000_000, seconds=0.1),
        )
    reader = ReaderReport(
        reader="a/0", incarnation="i", version=version, bytes=6_000_000_000, expected_bytes=6_000_000_000, digest="d",
        phases={"transfer": 2.0}, links=links,
    )  # fmt: skip
    return SyncReport(
        group="policy", version=version, seconds=3.0, phases={"pause": 0.25, "pull": 2.5}, bytes=6_000_000_000,
        mode="live", mode_reason="same dtype", readers=(reader,), replicas=("a",),
    )  # fmt: skip


def test_rate() -> None:
    assert report.rate(2_000_000_000, 0.5) == 4.0
    assert report.rate(0, 0.0) == 0.0
    assert report.rate(1, 0.0) == math.inf


def test_slowest_is_the_link_that_took_longest() -> None:
    assert report.slowest(sync()).source == 1
    assert report.slowest(sync(links=())) is None


def test_by_kind() -> None:
    kinds = report.by_kind(sync())
    assert {kind: (total.bytes, total.seconds) for kind, total in kinds.items()} == {
        "mapped": (4_000_000_000, 0.5),
        "prepared": (2_000_000_000, 2.0),
    }


def slow(floor: float = 0.0, waited: float = 2.0, nbytes: int = 1_000_000_000) -> tuple[LinkReport, ...]:
    fast = LinkReport(
        source=0, reader="a/0", kind="prepared", bytes=4_000_000_000, seconds=0.5, waited=0.1, path="node"
    )
    other = LinkReport(
        source=3, reader="a/0", kind="prepared", bytes=nbytes, seconds=2.0, waited=waited, path="node", floor=floor
    )
    return fast, other


def test_slow_links() -> None:
    assert report.slow_links(sync()) == []
    # a tenth of the best
    assert report.slow_links(sync(links=slow())) == ["3 -> a/0 (prepared) 0.5 GB/s, floor 0.8"]
    # below the floor of its reader
    assert report.slow_links(sync(links=slow(floor=5.0))) == ["3 -> a/0 (prepared) 0.5 GB/s, floor 5"]
    assert report.slow_links(sync(links=slow(floor=5.0)[1:])) == ["3 -> a/0 (prepared) 0.5 GB/s, floor 5"]
    # alone, small, on another path, or in flight while the reader did other things
    assert report.slow_links(sync(links=slow()[1:])) == []
    assert report.slow_links(sync(links=slow(nbytes=1 << 20))) == []
    assert report.slow_links(sync(links=slow(waited=0.5))) == []
    fast, other = slow()
    assert report.slow_links(sync(links=(fast, msgspec.structs.replace(other, path="network")))) == []


def test_slow_links_are_told() -> None:
    one = sync(links=slow(floor=5.0))
    assert report.log_line(one).endswith(", slow: 3 -> a/0 (prepared) 0.5 GB/s, floor 5")
    assert report.to_dict(one)["slow"] == report.slow_links(one)
    many = sync(links=slow(floor=5.0) + slow(floor=5.0)[1:] * 4)
    assert report.log_line(many).endswith("; and 2 more")
    out = io.StringIO()
    Console(file=out, width=200).print(report.table([sync(7), one]))
    assert "3 -> a/0 (prepared) 0.5 GB/s, floor 5" in out.getvalue()
    assert len(report.table([sync(7)]).columns) + 1 == len(report.table([one]).columns)


def test_packing() -> None:
    told = sync()
    assert report.packing(told) == []
    choices = [("prepared", 65536, "default", 2), ("prepared", 2 << 20, "measured", 1), ("mapped", 0, "default", 3)]
    packs = tuple(PackReport(kind=kind, bytes=nbytes, how=how, links=links) for kind, nbytes, how, links in choices)
    reader = msgspec.structs.replace(told.readers[0], packing=packs)
    told = msgspec.structs.replace(told, readers=(reader, reader))
    assert report.packing(told) == [
        "rows below 64 KiB on 4 prepared links (default)", "rows below 2048 KiB on 2 prepared links (measured)",
    ]  # fmt: skip
    assert report.to_dict(told)["packed"] == report.packing(told)
    out = io.StringIO()
    Console(file=out, width=200).print(report.sync_table(told))
    assert "packed: rows below 64 KiB on 4 prepared links (default)" in out.getvalue()


def test_log_line() -> None:
    line = report.log_line(sync())
    assert line == (
        "version 7 of 'policy': 6.000 GB to 1 engine rank in 3.000 s (2.00 GB/s), mode live, pause 250, pull 2500 ms, "
        "slowest link 1 -> a/0 (prepared) 0.50 GB/s in 2.000 s"
    )
    assert report.log_line(sync(links=())).endswith("no link")
    assert "\n" not in report.log_line(msgspec.structs.replace(sync(), failed={"b": "it\nis on fire"}))
    assert report.log_line(msgspec.structs.replace(sync(), failed={"b": "it\nis on fire"})).endswith(
        ", left out 'b': it is on fire"
    )


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (82_540, "82.5 kB"), (999_940, "999.9 kB"), (999_950, "1.0 MB"),
        (538_060_000, "538.1 MB"), (999_960_000, "1.000 GB"), (16_381_470_720, "16.381 GB"), (2.053e12, "2053.000 GB"),
        (-5e6, "-5.0 MB"), (1.5, "2 B"),
    ],
)  # fmt: skip
def test_size(nbytes: float, said: str) -> None:
    assert report.size(nbytes) == said


def test_a_report_prints_itself_as_one_line() -> None:
    told = sync()
    assert str(told) == f"{told}" == report.log_line(told)
    assert repr([told]) == f"[<SyncReport: {report.log_line(told)}>]"
    # neither sent nor stored otherwise
    assert wire.decode(wire.encode(told), SyncReport) == told
    assert json.loads(wire.to_json(told))["readers"][0]["reader"] == "a/0"
    small = msgspec.structs.replace(told, bytes=82_500, readers=told.readers * 2)
    assert str(small).startswith("version 7 of 'policy': 82.5 kB to 2 engine ranks in 3.000 s")


def test_one_line() -> None:
    assert report.one_line("a\n\tb  c") == "a b c"
    assert report.one_line("x" * 300, 10) == "x" * 9 + "…"


def test_the_table_of_one_sync() -> None:
    slow = [LinkReport(source=n, reader="a/0", kind="mapped", bytes=10**6, seconds=0.001 * n) for n in range(1, 12)]
    told = sync(links=tuple(slow))
    quick = [
        msgspec.structs.replace(told.readers[0], reader=f"b/{n}", phases={"transfer": 0.1}, links=()) for n in range(9)
    ]
    told = msgspec.structs.replace(told, readers=(*told.readers, *quick), failed={"c": "it\nis on fire"})
    out = io.StringIO()
    Console(file=out, width=200).print(report.sync_table(told))
    text = out.getvalue()
    for part in (
        "version 7 of 'policy', mode live (same dtype)",
        "pause",
        "250.0",
        "11 mapped links",
        "11 -> a/0 (mapped)",
    ):
        assert part in text
    assert "not shown: 2 engine ranks and 3 links that were faster" in text
    assert " 3 -> a/0 (mapped)" not in text
    assert "left out: c: it is on fire" in text


def test_what_takes_no_time_has_no_row_and_what_runs_beside_is_called_so() -> None:
    phases = {
        "begin": 0.002,
        "write": 0.0091,
        "pause": 4e-5,
        "pull": 0.0104,
        "commit": 0.0013,
        "stamp": 0.0005,
        "rest": 0.0003,
    }
    told = msgspec.structs.replace(sync(), seconds=0.0145, phases={**phases, "total": 0.0145})
    assert ", begin 2.0, pull 10, commit 1.3, stamp 0.5, rest 0.3, beside write 9.1 ms, slowest" in report.log_line(
        told
    )
    out = io.StringIO()
    Console(file=out, width=200).print(report.sync_table(told))
    rows = [
        [cell.strip() for cell in line.split("│")[2:4]] for line in out.getvalue().splitlines() if line.startswith("│")
    ]
    assert rows[:7] == [
        ["", "14.5"], ["begin", "2.0"], ["pull", "10.4"], ["commit", "1.3"], ["stamp", "0.5"], ["rest", "0.3"],
        ["write, beside", "9.1"],
    ]  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=200).print(report.table([told]))
    assert "pause" not in out.getvalue()


def test_a_title_is_as_wide_as_the_terminal() -> None:
    told = msgspec.structs.replace(
        sync(), mode_reason="every parameter holds the wire dtype and is contiguous, which is enough"
    )
    out = io.StringIO()
    Console(file=out, width=140).print(report.sync_table(told))
    assert out.getvalue().splitlines()[0] == (
        "version 7 of 'policy', mode live (every parameter holds the wire dtype and is contiguous, which is enough)"
    )


def test_to_dict_is_json() -> None:
    untimed = LinkReport(source=0, reader="a/0", kind="mapped", bytes=5, seconds=0.0)
    for one in (sync(), sync(links=(untimed,)), sync(links=())):
        json.dumps(report.to_dict(one), allow_nan=False)
    value = report.to_dict(sync())
    assert (value["version"], value["phases"], value["gbps"]) == (7, {"pause": 0.25, "pull": 2.5}, 2.0)
    assert value["links"][1] == {
        "source": 1, "reader": "a/0", "kind": "prepared", "bytes": 1_000_000_000, "seconds": 2.0, "gbps": 0.5,
    }  # fmt: skip
    assert value["kinds"]["mapped"]["gbps"] == 8.0
    assert value["slowest"]["source"] == 1


def test_table_has_a_row_for_each_sync() -> None:
    out = io.StringIO()
    result = report.table([sync(7), sync(8)])
    Console(file=out, width=200).print(result)
    assert result.row_count == 2
    for part in (
        "version",
        "pause ms",
        "pull ms",
        "250.0",
        "3000.0",
        "6.000 GB",
        "mapped 8.00 GB/s, prepared 1.00 GB/s",
    ):
        assert part in out.getvalue()


def test_write_json(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.json"
    report.write_json(path, {"steps": [sync()]})
    assert json.loads(path.read_text())["steps"][0]["readers"][0]["reader"] == "a/0"
    with pytest.raises(ValueError, match="JSON compliant"):
        report.write_json(path, {"reward": math.nan})
    assert json.loads(path.read_text())["steps"]
    assert os.listdir(path.parent) == ["report.json"]


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out" / "report.png"
    report.plot(path, [{"version": i, "reward": i * 0.5, "seconds": 1.0} for i in range(3)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5_000


def test_plot_without_matplotlib_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('no such thing')")
    code = "from rdt_core.report import plot; plot('x.png', [])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "RdtError: drawing needs matplotlib" in done.stderr
    assert "rdt-core[demo]" in done.stderr
    assert not (tmp_path / "x.png").exists()


def test_a_file_is_written_whole_and_a_pipe_or_a_link_stays_what_it_is(tmp_path: Path) -> None:
    real, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    report.write_json(link, {"a": 1})
    assert link.is_symlink()
    assert json.loads(real.read_text()) == {"a": 1}
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        report.write_json(pipe, [2])
        assert json.loads(os.read(reader, 100)) == [2]
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    for wrong in (tmp_path, real / "below", tmp_path / ("n" * 300)):
        with pytest.raises(RdtError, match="cannot be written"):
            report.write_json(wrong, [3])
    assert {one.name for one in tmp_path.iterdir()} == {"real.json", "link.json", "pipe"}


def test_a_path_is_tried_without_touching_what_is_there(tmp_path: Path) -> None:
    real, pipe = tmp_path / "real.json", tmp_path / "pipe"
    real.write_text("old")
    os.mkfifo(pipe)
    for right in (real, pipe, tmp_path / "deep" / "new.json"):
        report.try_path(right, "--json")
    assert real.read_text() == "old"
    for wrong in (tmp_path, real / "below", tmp_path / ("n" * 300)):
        with pytest.raises(OptionError, match=f"--json {wrong} cannot be written: "):
            report.try_path(wrong, "--json")
    assert [one.name for one in tmp_path.rglob("*") if one.name not in ("real.json", "pipe")] == ["deep"]


def test_a_picture_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(RdtError, match=f"{tmp_path} cannot be written: Is a directory"):
        report.plot(tmp_path, [{"version": 1, "reward": 0.5, "seconds": 1.0}])
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*"))
