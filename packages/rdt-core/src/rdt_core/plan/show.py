"""A plan for people: tables, a picture, and the command line's side of `rdt plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from ..commandline import console, progress
from ..errors import RdtError
from ..report import counted, save_figure, size, try_path
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
    simulated = "" if report.simulated_s is None else f" (simulated: {_s(report.simulated_s)})"
    return (
        f"{report.model}: {counted(report.tensors, 'tensor')}, {size(report.model_bytes)}; {report.trainer} "
        f"({counted(report.source_ranks, 'source rank')}) -> {report.engine} ({counted(report.replicas, 'replica')}, "
        f"{counted(report.engine_ranks, 'engine rank')}), mode {report.mode}, landing {report.landing}\n"
        f"{counted(report.nodes, 'node')} of {counted(cluster['gpus'], 'GPU')}, {report.placement}: NVLink "
        f"{cluster['nvlink_gbs']:g} GB/s a GPU and direction, {counted(cluster['nics'], 'NIC')} of {cluster['nic_gbs']:g} GB/s a "
        f"node\n"
        f"a sync moves {size(report.bytes)} over {counted(report.links, 'link')} in at most {counted(report.chunks, 'chunk')}; "
        f"predicted {_s(report.seconds)}, of which wire and landing {_s(report.wire_s)}{simulated}"
    )


def tables(report: PlanReport) -> list[Any]:
    """Phases, other designs, balance, copies and memory."""
    from rich.table import Table

    def table(title: str, left: str, *right: str, last: str = "") -> Any:
        made = Table(title=title, title_justify="left")
        made.add_column(left)
        for name in right:
            made.add_column(name, justify="right")
        if last:
            made.add_column(last)
        return made

    times = table("predicted sync", "phase", "time", last="bottleneck")
    for phase in report.phases:
        times.add_row(phase.name, _s(phase.seconds), phase.bottleneck)
    others = table(
        "other designs on the same machines, predicted", "design", "time", "than this plan", last="bottleneck"
    )
    for peer in report.peers:
        others.add_row(peer.name, _s(peer.seconds), _beside(peer.seconds, report.seconds), peer.bottleneck)
    balances = table("balance of bytes", "over", "count", "max", "mean", "max/mean", "floor")
    for one in report.balances:
        floor = f"{one.floor:.3f}" if one.floor > 1 else ""
        balances.add_row(one.what, str(one.count), size(one.largest), size(one.mean), f"{one.ratio:.3f}", floor)
    balances.caption = "floor: what the trainer's layout leaves to any choice of owners"
    copies = table("copies of a sync", "links", "number", "copies", "reads", "bytes")
    for row in report.copies:
        copies.add_row(f"{row.kind}, {row.form}", str(row.links), str(row.copies), str(row.reads), size(row.bytes))
    memory = table("memory of a rank, at most; messages when the group is made", "what", "bytes")
    kept, said = report.memory, report.control
    for what, nbytes in (
        ("source rank: registered", kept.source_registered),
        ("source rank: of it the snapshot's arena", kept.source_arena),
        ("source rank: pack arenas", kept.source_pack),
        ("engine rank: parameters written in place", kept.reader_registered),
        ("engine rank: receive buffer", kept.reader_buffer),
        ("manifests of source ranks, all", said.manifests),
        ("manifests as engine ranks read them, all", said.read),
        ("requests of engine ranks, all", said.requests),
    ):
        memory.add_row(what, size(nbytes))
    return [times, others, balances, copies, memory]


def draw(path: Path, report: PlanReport) -> None:
    """Draws bytes by NIC, and this plan's phases beside other designs, into a PNG.

    Raises:
        RdtError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RdtError("drawing needs matplotlib, which is not installed; pip install 'rdt-core[demo]'") from error
    # figure and canvas without pyplot: no global state, no window system
    figure = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1)
    upper.bar(range(len(report.nic_out)), [n / 1e9 for n in report.nic_out], width=1.0, label="out of owners")
    shift = len(report.nic_out)
    upper.bar(
        range(shift, shift + len(report.nic_in)), [n / 1e9 for n in report.nic_in], width=1.0, label="into readers"
    )
    upper.set_xlabel("NIC")
    upper.set_ylabel("GB a sync")
    upper.set_title(f"{report.model}: {report.trainer} -> {report.engine}")
    upper.legend()
    start = 0.0
    for phase in report.phases:
        lower.barh("this plan", phase.seconds, left=start, label=phase.name)
        start += phase.seconds
    for peer in report.peers:
        lower.barh(peer.name, peer.seconds, color="lightgrey")
    lower.set_xlabel("seconds a sync, predicted")
    lower.invert_yaxis()
    lower.legend(fontsize="small")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    save_figure(path, figure)


def _beside(seconds: float, plan_s: float) -> str:
    """How much slower or faster than the plan something else is, in words: a bare factor can be read either way."""
    factor = max(seconds, plan_s) / min(seconds, plan_s)
    if factor < _ALIKE:
        return "as fast"
    return f"{factor:.1f} x {'slower' if seconds > plan_s else 'faster'}"


def _s(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"
