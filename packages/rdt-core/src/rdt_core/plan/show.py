"""A plan for people: tables, and the command line's side of `rdt plan`. The picture is drawn in `picture`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..commandline import console, progress
from ..report import counted, try_path
from .figures import bytes_text, seconds_text
from .links import most_loaded, summaries
from .options import PlanOptions
from .report import PlanReport, make_plan_report, to_dict

#: predictions closer than this factor are not told apart
_ALIKE = 1.05


def plan_command(target: TextIO, options: PlanOptions, *, as_json: bool = False, picture: Path | None = None) -> None:
    """Plans and prints to `target`.

    Args:
        target: where tables or JSON go.
        options: checked.
        as_json: JSON instead of tables, and no progress.
        picture: a PNG to write; None writes none.

    Raises:
        OptionError: the picture cannot be written there; nothing was planned.
        RdtError: the layouts do not fit, or matplotlib is missing for the picture.
    """
    if picture is not None:
        try_path(picture, "--picture")
    with progress("engine ranks", options.engine.ranks * options.engine.replicas, quiet=as_json) as update:
        report = make_plan_report(options, lambda done: update(advance=1 if done == "reader" else 0))
    if picture is not None:
        from .picture import draw

        draw(picture, report)
    if as_json:
        target.write(json.dumps(to_dict(report), allow_nan=False) + "\n")
        return
    out = console(target)
    out.print(summary(report), highlight=False)
    for one in tables(report):
        out.print(one)


def summary(report: PlanReport) -> str:
    """What is planned, in three lines."""
    cluster = report.cluster
    simulated = "" if report.simulated_s is None else f" (simulated: {seconds_text(report.simulated_s)})"
    return (
        f"{report.model}: {counted(report.tensors, 'tensor')}, {bytes_text(report.model_bytes)}; {report.trainer} "
        f"({counted(report.source_ranks, 'source rank')}) -> {report.engine} ({counted(report.replicas, 'replica')}, "
        f"{counted(report.engine_ranks, 'engine rank')}), mode {report.mode}, landing {report.landing}\n"
        f"{counted(report.nodes, 'node')} of {counted(cluster['gpus'], 'GPU')}, {report.placement}: NVLink "
        f"{cluster['nvlink_gbs']:g} GB/s a GPU and direction, {counted(cluster['nics'], 'NIC')} of {cluster['nic_gbs']:g} GB/s a "
        f"node\n"
        f"a sync moves {bytes_text(report.bytes)} over {counted(len(report.links), 'link')} in at most "
        f"{counted(report.chunks, 'chunk')}; predicted {seconds_text(report.seconds)}, of which wire and landing "
        f"{seconds_text(report.wire_s)}{simulated}"
    )


def tables(report: PlanReport) -> list[Any]:
    """Phases, other designs, balance, the most loaded NICs, links, copies, memory and messages."""
    return [
        _phases(report), _peers(report), _balances(report), *_nics(report), _links(report), _copies(report),
        *_memory(report),
    ]  # fmt: skip


def _table(title: str, left: str, *right: str, last: str = "", rows: Iterable[Sequence[str]], note: str = "") -> Any:
    """A table under its title, which is no wider than its words, and over a note."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    made = Table()
    made.add_column(left)
    for name in right:
        made.add_column(name, justify="right")
    if last:
        made.add_column(last)
    for row in rows:
        made.add_row(*row)
    return Group(Text(f"\n{title}", style="bold"), made, *([Text(note, style="dim")] if note else []))


def _phases(report: PlanReport) -> Any:
    rows = [(phase.name, seconds_text(phase.seconds), phase.bottleneck) for phase in report.phases]
    rows.append(("all", seconds_text(report.seconds), ""))
    return _table("predicted sync", "phase", "time", last="bottleneck", rows=rows)


def _peers(report: PlanReport) -> Any:
    return _table(
        "other designs on the same machines, predicted", "design", "time", "than this plan", last="bottleneck",
        rows=[
            (peer.name, seconds_text(peer.seconds), _beside(peer.seconds, report.seconds), peer.bottleneck)
            for peer in report.peers
        ],
    )  # fmt: skip


def _balances(report: PlanReport) -> Any:
    is_bound = any(one.floor > 1 for one in report.balances)
    note = "floor: what the trainer's layout leaves to any choice of owners" if is_bound else ""
    return _table(
        "balance of bytes", "over", "count", "all", "max", "mean", "max/mean", "floor",
        rows=[
            (
                one.what, f"{one.count:,}", bytes_text(one.total), bytes_text(one.largest), bytes_text(one.mean),
                f"{one.ratio:.3f}", f"{one.floor:.3f}" if one.floor > 1 else "",
            )
            for one in report.balances
        ],
        note=note,
    )  # fmt: skip


def _nics(report: PlanReport) -> list[Any]:
    rows = []
    for side, name in (("out", "owners', out"), ("in", "readers', in")):
        mine = [nic.bytes for nic in report.nics if nic.side == side]
        for nic in most_loaded(report.nics, side):
            rows.append((name, str(nic), bytes_text(nic.bytes), f"{nic.bytes * len(mine) / sum(mine):.3f}"))
    if not rows:
        return []
    note = "every NIC: --json, under nics"
    return [_table("most loaded NICs", "side", "NIC", "bytes", "of the mean", rows=rows, note=note)]


def _links(report: PlanReport) -> Any:
    rows = [
        (one.kind, f"{one.links:,}", *map(bytes_text, (one.bytes, one.smallest, one.median, one.largest)))
        for one in summaries(report.links)
    ]
    note = "every link: --json, under links"
    return _table("bytes of a link", "links", "number", "all", "smallest", "median", "largest", rows=rows, note=note)


def _copies(report: PlanReport) -> Any:
    rows = [
        (f"{row.kind}, {row.form}", f"{row.links:,}", f"{row.copies:,}", f"{row.reads:,}", bytes_text(row.bytes))
        for row in report.copies
    ]
    copies, reads = sum(row.copies for row in report.copies), sum(row.reads for row in report.copies)
    if len(rows) > 1:
        rows.append(("all", f"{len(report.links):,}", f"{copies:,}", f"{reads:,}", bytes_text(report.bytes)))
    both = sum(row.links for row in report.copies) - len(report.links)
    note = f"{counted(both, 'link')} with direct and packed copies: in both rows, once under all" if both else ""
    return _table("copies of a sync", "on links", "number", "copies", "reads", "bytes", rows=rows, note=note)


def _memory(report: PlanReport) -> list[Any]:
    kept, said = report.memory, report.control
    memory = (
        ("source rank: registered", kept.source_registered),
        ("source rank: of it the snapshot's arena", kept.source_arena),
        ("source rank: pack arenas", kept.source_pack),
        ("engine rank: parameters written in place", kept.reader_registered),
        ("engine rank: receive buffer", kept.reader_buffer),
    )
    messages = (
        ("manifests of source ranks", said.manifests),
        ("manifests as engine ranks read them, each of them all", said.read),
        ("requests of engine ranks", said.requests),
    )
    return [
        _table(title, "what", "bytes", rows=[(what, bytes_text(nbytes)) for what, nbytes in rows])
        for title, rows in (
            ("memory of a rank, at most", memory),
            ("messages when the group is made, all members together", messages),
        )
    ]


def _beside(seconds: float, plan_s: float) -> str:
    """How much slower or faster than the plan something else is, in words: a bare factor can be read either way."""
    factor = max(seconds, plan_s) / min(seconds, plan_s)
    if factor < _ALIKE:
        return "as fast"
    return f"{factor:.1f} x {'slower' if seconds > plan_s else 'faster'}"
