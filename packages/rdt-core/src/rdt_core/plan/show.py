"""A plan for people: tables, a picture, and the command line's side of `rdt plan`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import RdtError
from ..report import save_figure, try_path
from .options import PlanOptions
from .report import PlanReport, make_plan_report, to_dict

_WIDTH = 160


def plan_command(target: Any, options: PlanOptions, *, as_json: bool = False, picture: Path | None = None) -> None:
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
    from rich.console import Console

    if picture is not None:
        try_path(picture, "--picture")
    with _progress(options, quiet=as_json) as advance:
        report = make_plan_report(options, advance)
    if picture is not None:
        draw(picture, report)
    if as_json:
        target.write(json.dumps(to_dict(report), allow_nan=False) + "\n")
        return
    console = Console(file=target, width=None if target.isatty() else _WIDTH)
    console.print(summary(report), highlight=False)
    for one in tables(report):
        console.print(one)


@contextmanager
def _progress(options: PlanOptions, *, quiet: bool) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("engine ranks", total=options.engine.ranks * options.engine.replicas)
        yield lambda what: bar.advance(task, 1 if what == "reader" else 0)


def summary(report: PlanReport) -> str:
    """What is planned, in three lines."""
    cluster = report.cluster
    simulated = "" if report.simulated_s is None else f" (simulated: {_s(report.simulated_s)})"
    return (
        f"{report.model}: {report.tensors} tensors, {_gb(report.model_bytes)}; {report.trainer} ({report.source_ranks} source "
        f"ranks) -> {report.engine} ({report.replicas} replicas, {report.engine_ranks} engine ranks), mode {report.mode}, "
        f"landing {report.landing}\n"
        f"{report.nodes} nodes of {cluster['gpus']} GPUs, {report.placement}: NVLink {cluster['nvlink_gbs']:g} GB/s a GPU and "
        f"direction, {cluster['nics']} NICs of {cluster['nic_gbs']:g} GB/s a node\n"
        f"a sync moves {_gb(report.bytes)} over {report.links} links in at most {report.chunks} chunks; predicted "
        f"{_s(report.seconds)}, of which wire and landing {_s(report.wire_s)}{simulated}"
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

    times = table("predicted sync", "phase", "seconds", last="bottleneck")
    for phase in report.phases:
        times.add_row(phase.name, _s(phase.seconds), phase.bottleneck)
    others = table("other designs on the same machines", "design", "seconds", "over this plan", last="bottleneck")
    for peer in report.peers:
        others.add_row(peer.name, _s(peer.seconds), f"{peer.seconds / report.seconds:.1f} x", peer.bottleneck)
    balances = table("balance of bytes", "over", "count", "max", "mean", "max/mean", "floor")
    for one in report.balances:
        floor = f"{one.floor:.3f}" if one.floor > 1 else ""
        balances.add_row(one.what, str(one.count), _gb(one.largest), _gb(one.mean), f"{one.ratio:.3f}", floor)
    balances.caption = "floor: what the trainer's layout leaves to any choice of owners"
    copies = table("copies of a sync", "links", "number", "copies", "reads", "bytes")
    for row in report.copies:
        copies.add_row(f"{row.kind}, {row.form}", str(row.links), str(row.copies), str(row.reads), _gb(row.bytes))
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
        memory.add_row(what, _gb(nbytes))
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


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3f} GB" if nbytes >= 1e7 else f"{nbytes / 1e6:.3f} MB"


def _s(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"
