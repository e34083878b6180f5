"""The command line's side of `rdt bench`: cluster, progress, tables, file, exit status.

The report goes to a file after every piece and the table is printed even when the run is interrupted. Progress is shown
on a terminal only.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from ..commandline import progress
from ..report import try_path, write_json
from .measure import run
from .options import BenchOptions
from .plot import check_plot, draw
from .results import BenchReport, to_dict
from .tables import tables, verdict

log = logging.getLogger(__name__)

_WIDTH = 200


def bench_command(target: Any, options: BenchOptions, json_file: str = "", plot: Path | None = None) -> int:
    """Starts Ray, measures, prints to `target`.

    Args:
        target: where the tables go, or the JSON.
        options: what to measure.
        json_file: where the report goes as JSON too; "-" prints it to `target` instead of tables; empty: nowhere.
        plot: where a picture of it goes; None draws none.

    Returns:
        Exit status: 1 if bytes were not exact or nothing ran, else 0.

    Raises:
        OptionError: an option that cannot work; nothing was started.
    """
    import ray
    import torch

    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    options = options.check(gpus)
    check_plot(plot)
    for option, path in (("--json", json_file if json_file != "-" else ""), ("--plot", plot)):
        if path:
            try_path(path, option)
    latest: list[BenchReport] = []
    try:
        with progress("starting Ray", syncs_of(options)) as advance:

            def observe(report: BenchReport, doing: str) -> None:
                latest[:] = [report]
                if json_file not in ("", "-"):
                    write_json(json_file, to_dict(report))
                advance(description=doing or "done")

            ray.init(
                address="local", num_cpus=8, object_store_memory=256 << 20, include_dashboard=False, namespace="rdt",
                log_to_driver=False,
            )  # fmt: skip
            try:
                run(options, gpus=gpus, observe=observe, synced=lambda syncs: advance(completed=syncs))
            finally:
                ray.shutdown()
    except BaseException:
        try:
            _show(target, latest, json_file, plot)
        except Exception as second:
            # what stopped the bench is what its user has to read
            log.warning("what was measured before cannot be shown: %s", second)
        raise
    _show(target, latest, json_file, plot)
    return 0 if latest[0].exact and not latest[0].failed else 1


def syncs_of(options: BenchOptions) -> int:
    """Returns how often all that is to be measured moves the weights."""
    cells = math.prod(map(len, (options.modes, options.kinds, options.packs, options.verifies)))
    return cells * (options.rounds + 1) + len(options.peers) * (options.peer_rounds + 1)


def _show(target: Any, latest: list[BenchReport], json_file: str, plot: Path | None) -> None:
    from rich.console import Console

    for report in latest:
        if json_file == "-":
            target.write(json.dumps(to_dict(report), allow_nan=False) + "\n")
        else:
            # a file has no width: a table that is wrapped for a terminal of 80 columns is hard to read in a log
            console = Console(file=target, width=None if target.isatty() else _WIDTH)
            for one in tables(report):
                console.print(one)
                console.print()
            # no markup: names of models and errors are not ours
            console.print(verdict(report), markup=False, highlight=False)
        if plot is not None:
            draw(report, plot)
