"""A bench's report as tables for people, with what the columns mean below them, and the result in a sentence.

Columns that would say the same in every row, or next to nothing, are left out; the JSON has all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..logline import BESIDE
from ..report import counted, size
from .results import BenchReport, Cell, PeerRow, beside, fastest, no_ratio, p50, p95, ratio

_ERROR = 400
#: phases that take less everywhere are left out, in seconds
_LEAST_S = 5e-5
#: what happens in each phase
_PHASES = {
    "begin": "every source rank begins",
    "pause": "the engine pauses",
    "engine_begin": "and gets ready",
    "pull": "engine ranks wait, read and land",
    "finish": "post-load steps end",
    "call": "the way to the engine and back, where it takes these steps in one call",
    "commit": "the coordinator's commit",
    "stamp": "engines are stamped and go on",
    "rest": "what is in no phase",
    "write": "its arena or its buckets are filled, and packed",
    "verify": "digests",
    "wait": "for source ranks",
    "transfer": "bytes are read",
    "land": "copies out of receive buffers",
    "prepare": "links are made",
}
_WORDS = """\
first: the first sync, which also connects. copy: one copy of a reader's bytes inside its device. span: one mapped copy of the
same bytes from each owner, as a single span. NIXL: one raw NIXL transfer of the same from each owner, without Ray or a plan.
ratio: p50 over the {floor}, which is the limit. exact: after the last sync every 16-bit word of every reader was the
trainer's.""".replace("\n", " ")
_OVERHEAD = """\
overhead: what a sync took beyond the moving of its bytes, which is the slowest reader's transfer and landing, and the filling of
arenas or buckets that it waited for""".replace("\n", " ")


def tables(report: BenchReport) -> list[Any]:
    """The cells, their phases, and the peers next to the fastest cell."""
    made = [_cells(report)] if report.cells else []
    if any(cell.phases for cell in report.cells):
        made += _phases(report)
    if report.peers:
        made.append(_peers(report))
    return [_told(one) for one in made]


def _told(table: Any) -> Any:
    """Puts title and words above and below a table, as wide as the terminal and not as the table."""
    from rich.console import Group
    from rich.text import Text

    title, said = table.title, table.caption
    table.title = table.caption = None
    # texts, because names and errors are no markup
    return Group(Text(title, style="bold"), table, Text(said))


def verdict(report: BenchReport) -> str:
    """The result in a few lines: the fastest sync, what it is next to its floor, and whether bytes were right."""
    best = fastest(report)
    said = []
    if best is not None:
        floor = "one copy of a reader's bytes" if best.floor == "copy" else "one mapped copy of a reader's bytes"
        beside = f", {ratio(best):.2f} times {floor} ({_ms(best.floor_s)} ms)" if math.isfinite(ratio(best)) else ""
        said.append(
            f"fastest: mode {best.used_mode} over {'/'.join(best.used_kinds)} links, {_ms(p50(best.seconds))} ms for "
            f"{size(best.bytes)} ({_rate(best)} GB/s){beside}"
        )
    wrong = [row for row in report.rows if not row.exact and not row.error and not getattr(row, "reason", "")]
    failed = sum(bool(row.error) for row in report.rows)
    if wrong:
        said.append(f"WRONG BYTES in {len(wrong)} of {len(report.rows)} rows: their numbers mean nothing")
    elif not report.failed:
        said.append("bytes: compared after every piece that ran, all equal")
    if failed:
        said.append(f"failed: {failed} of {len(report.rows)} rows, each with its error")
    return "\n".join(said)


def _cells(report: BenchReport) -> Any:
    where = report.device_name
    if report.placement[0]:
        sources, readers = (", ".join(map(str, gpus)) for gpus in report.placement)
        where = f"{where}, {report.gpus}: source ranks on GPU {sources}, engine ranks on GPU {readers}"
    shape = f"{report.model}{f' cut to {report.layers} layers' if report.layers else ''}"
    made = _table(
        f"{shape}: {report.tensors} tensors, {size(report.bytes)}; {report.trainer} -> {report.engine} on {where}; "
        f"{counted(report.rounds, 'sync')} each after the first; milliseconds",
    )
    left = _which(report.cells)
    # all cells of a run have the same
    floor = next((cell.floor for cell in report.cells if not cell.error), "copy")
    _columns(made, left, ("first", "p50", "p95", "GB/s", "copy", "span", "NIXL", "ratio", "exact"))
    for cell in report.cells:
        if cell.error:
            made.add_row(*_head(cell, left), "failed")
            continue
        floors = (cell.floors.copy, cell.floors.span, cell.floors.nixl)
        made.add_row(
            *_head(cell, left),
            *_times(cell),
            _rate(cell),
            *(_ms(value) if value else "" for value in floors),
            f"{ratio(cell):.2f}" if math.isfinite(ratio(cell)) else "-",
            "yes" if cell.exact else "NO",
        )
    said = [_WORDS.format(floor=floor)]
    # of all rows that have none the one with the longest floor
    short = max((cell for cell in report.cells if no_ratio(cell)), key=lambda cell: cell.floor_s, default=None)
    said += [no_ratio(short)] if short is not None else []
    said += [f"{_named(cell, left, 'failed')}: {_short(cell.error)}" for cell in report.cells if cell.error]
    if any(cell.expandable for cell in report.cells):
        said.append("source ranks allocate in expandable segments")
    if any(cell.collectives for cell in report.cells):
        said.append("all-reduces of the source ranks run while they publish")
    made.caption = "\n".join(said)
    return made


def _phases(report: BenchReport) -> list[Any]:
    """What source rank 0 does one after the other, and then what runs meanwhile."""
    done = [cell for cell in report.cells if not cell.error]
    left = _which(done)
    trainer = _lasting((cell.phases_p95 for cell in done), (cell.phases for cell in done))
    reader = _lasting((cell.reader_phases_p95 for cell in done), (cell.reader_phases for cell in done))
    steps, beside = [name for name in trainer if name not in BESIDE], [name for name in trainer if name in BESIDE]
    first = _table("where the time goes, in milliseconds: source rank 0, one after the other")
    second = _table("meanwhile: source rank 0 for its readers (t:), and the slowest reader (r:)")
    ranks = any(len(cell.received) > 1 for cell in done)
    _columns(first, (*left, ""), [name.replace("_", "\n") for name in steps])
    # nine phases are as wide as a terminal of 80
    first.padding = 0
    names = (*(f"t:\n{name}" for name in beside), *(f"r:\n{name}" for name in reader))
    _columns(second, (*left, ""), (*names, "over-\nhead", *(("slowest\nrank",) if ranks else ())))
    for cell in done:
        for which, ours, theirs in (
            ("p50", cell.phases, cell.reader_phases),
            ("p95", cell.phases_p95, cell.reader_phases_p95),
        ):
            is_first = which == "p50"
            head = (*(_head(cell, left) if is_first else [""] * len(left)), which)
            first.add_row(*head, *_row(ours, steps), end_section=not is_first)
            second.add_row(
                *head,
                *_row(ours, beside),
                *_row(theirs, reader),
                _ms(cell.overhead_s, 1) if is_first else "",
                *((str(cell.slowest) if is_first else "",) if ranks else ()),
                end_section=not is_first,
            )
    moved = dict.fromkeys(
        f"each source rank sends {_span(cell.sent)}, each engine rank receives {_span(cell.received)}" for cell in done
    )
    notes = [_named(cell, left, note) for cell in done for note in cell.notes]
    first.caption = f"{_meaning(steps)}. Left out: what takes less than {1e3 * _LEAST_S:.2f} ms everywhere."
    second.caption = "\n".join([f"{_meaning((*beside, *reader))}.", _OVERHEAD, *moved, *notes])
    return [first, second]


def _row(phases: dict[str, float], names: Sequence[str]) -> list[str]:
    return [_ms(phases[name], 1) if name in phases else "" for name in names]


def _meaning(names: Sequence[str]) -> str:
    return "; ".join(f"{name}: {_PHASES[name]}" for name in dict.fromkeys(names) if name in _PHASES)


def _peers(report: BenchReport) -> Any:
    best = fastest(report)
    short = best is not None and bool(no_ratio(best))
    made = _table(
        "other ways, same bytes, in milliseconds: into the same readers, or into the real engine named (rdt beside them there)"
    )
    done = [row for row in report.peers if row.seconds]
    words = {row.label: "; ".join(filter(None, (row.what, _parts(row), *row.notes))) for row in done}
    made.add_column("way", overflow="fold")
    _columns(made, (), ("first", "p50", "p95", "GB/s", "times rdt", "exact"))
    if any(words.values()):
        # what was measured is a sentence
        made.add_column("what", overflow="fold")
    if best is not None:
        made.add_row(f"rdt: {best.used_mode}, {'/'.join(best.used_kinds)}", *_times(best), _rate(best), "", "yes")
    for row in done:
        against = beside(report, row)
        made.add_row(
            row.label,
            *_times(row),
            _rate(row),
            f"{p50(row.seconds) / against[1]:.1f} x" if against is not None else "",
            "yes" if row.exact else "NO",
            *([words[row.label]] if any(words.values()) else []),
        )
    said = [
        f"times rdt is left out: {no_ratio(best).removeprefix('no ratio: ')}"
        if best is not None and short
        else "times rdt: p50 over that of the fastest sync of rdt in this run, the first row"
    ]
    there = {against[0]: None for row in done if row.inside and (against := beside(report, row)) is not None}
    if there:
        said[0] += f"; in a real engine over that of {' and '.join(there)} there"
    said += [f"{row.label} cannot run here: {row.reason}" for row in report.peers if row.reason]
    said += [f"{row.label} failed: {_short(row.error)}" for row in report.peers if row.error]
    made.caption = "\n".join(said)
    return made


def _parts(row: PeerRow) -> str:
    return ", ".join(f"{name} {_ms(seconds)}" for name, seconds in row.phases.items() if name != "total")


def _table(title: str) -> Any:
    from rich import box
    from rich.table import Table

    # lines between columns would take a third of a terminal of 80
    return Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))


def _columns(made: Any, left: Sequence[str], right: Sequence[str]) -> None:
    for name in left:
        made.add_column(name, no_wrap=True)
    for name in right:
        made.add_column(name, justify="right", overflow="fold")


def _which(cells: Sequence[Cell]) -> tuple[str, ...]:
    """What tells cells apart: mode and links, packing and digests where they were asked for."""
    pack = any(cell.pack != "default" for cell in cells)
    verify = any(cell.verify != "off" for cell in cells)
    return ("mode", "links", *(("pack",) if pack else ()), *(("verify",) if verify else ()))


def _head(cell: Cell, left: Sequence[str]) -> list[str]:
    mode, kinds = cell.used_mode or cell.mode, "/".join(cell.used_kinds) or cell.kind
    said = {
        "mode": mode if mode == cell.mode else f"{cell.mode}: {mode}",
        "links": kinds if kinds == cell.kind else f"{cell.kind}: {kinds}",
        "pack": cell.pack,
        "verify": cell.verify,
    }
    return [said[name] for name in left]


def _named(cell: Cell, left: Sequence[str], what: str) -> str:
    return f"{', '.join(_head(cell, left))}: {what}"


def _lasting(high: Any, middle: Any) -> list[str]:
    """Names of phases that take long enough somewhere to be shown, in the order of a sync."""
    longest: dict[str, float] = {}
    for phases in (*high, *middle):
        for name, seconds in phases.items():
            longest[name] = max(longest.get(name, 0.0), seconds)
    order = {name: place for place, name in enumerate(_PHASES)}
    shown = [name for name, seconds in longest.items() if name != "total" and seconds >= _LEAST_S]
    return sorted(shown, key=lambda name: order.get(name, len(order)))


def _span(sizes: Sequence[int]) -> str:
    low, high = min(sizes, default=0), max(sizes, default=0)
    return size(low) if size(low) == size(high) else f"{size(low)} to {size(high)}"


def _times(row: Cell | PeerRow) -> tuple[str, str, str]:
    return _ms(row.first_s), _ms(p50(row.seconds)), _ms(p95(row.seconds))


def _rate(row: Cell | PeerRow) -> str:
    rate = row.bytes / 1e9 / p50(row.seconds)
    return f"{rate:.1f}" if rate >= 1 else f"{rate:.2g}"


def _short(error: str) -> str:
    # the report has all of it
    return error if len(error) <= _ERROR else f"{error[:_ERROR]}…"


def _ms(seconds: float, most: int = 3) -> str:
    # three digits say all that a median of a few syncs knows
    digits = 0 if seconds >= 0.1 else 1 if seconds >= 1e-4 or not seconds else most
    return f"{1e3 * seconds:.{digits}f}"
