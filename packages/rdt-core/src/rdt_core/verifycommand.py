"""The command line's side of `rdt verify`: a checkpoint on disk against engines that are running.

The checkpoint joins a group of its own as the only source rank, the engines are attached, both sides digest, and all leave.
Nothing is moved or written. An engine that a trainer feeds is connected to it again by the trainer's next publish.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .engines import EngineClient
from .errors import EngineError
from .report import check_summary, check_table
from .sources.checkpoint import CheckpointSource
from .sync import WeightSync
from .wire import CheckReport, to_json

_WIDTH = 160
#: where the client of each engine is
_CLIENTS: dict[str, tuple[str, str, dict[str, bool]]] = {
    "vllm": (
        "rdt_vllm.clients",
        "VllmHttpEngine",
        {"end_open_syncs": False},
    ),  # a comparison must not tear a running sync
    "sglang": ("rdt_sglang.clients", "SglangHttpEngine", {}),
}


def client_of(engine: str, url: str, headers: dict[str, str]) -> EngineClient:
    """Returns the client of a server. Raises EngineError where its adapter is not installed."""
    module, name, options = _CLIENTS[engine]
    try:
        made: EngineClient = getattr(importlib.import_module(module), name)(url, headers=headers, **options)
    except ImportError as error:
        raise EngineError(f"engine {engine!r} needs its adapter: pip install rdt-{engine} ({error})") from error
    return made


def verify_checkpoint(
    folder: Path,
    clients: Sequence[EngineClient],
    *,
    dtype: str,
    address: str | None,
    timeout_s: float,
    quiet: bool = True,
) -> CheckReport:
    """Compares engines with a checkpoint.

    Args:
        folder: of the checkpoint.
        clients: of the engines, all in the Ray cluster.
        dtype: in which floating-point tensors are compared; empty: as they are stored.
        address: of the Ray cluster; None: RAY_ADDRESS.
        timeout_s: deadline of each wait.
        quiet: show no progress, nor where standard error is no terminal.

    Raises:
        RdtError: the checkpoint cannot be read, or an engine cannot be reached.
    """
    kind = getattr(torch, dtype) if dtype else None
    with _progress(len(clients) + 2, quiet) as doing:
        doing("reading the checkpoint")
        names = [meta.name for meta in CheckpointSource(folder).metadata()]
        source = CheckpointSource(folder, dtype=kind, ignored=names)
        sync = WeightSync.join(
            f"verify-{uuid.uuid4().hex[:8]}", source=source, rank=0, world_size=1, mode="bucket", address=address,
            timeout_s=timeout_s, observers=(),
        )  # fmt: skip
        try:
            for client in clients:
                doing(f"connecting {client.name}")
                sync.attach(client)
            doing("comparing")
            return sync.verify()
        finally:
            for client in clients:
                sync.detach(client)
            sync.leave()


@contextmanager
def _progress(steps: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows what is being done, on a terminal only. Yields what is called with the next step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=steps)
        done = itertools.count()
        yield lambda step: bar.update(task, description=step, completed=next(done))


def verify_command(target: Any, report: CheckReport, *, json: bool, all_rows: bool) -> int:
    """Prints a report to `target`. Returns the exit status: 1 if anything differs or nothing was compared, else 0."""
    if json:
        target.write(to_json(report) + "\n")
    else:
        from rich.console import Console

        out = Console(file=target, width=None if target.isatty() else _WIDTH)
        out.print(check_table(report, all_rows=all_rows))
        out.print(check_summary(report), highlight=False)
    target.flush()
    if not report.bytes:
        sys.stderr.write(
            "nothing was compared: no tensor lies in an engine as it travels. Give the engine's dtype with --dtype, or compare "
            "during a sync (verify='full'), before the engine's load changes its form\n"
        )
        return 1
    return 0 if report.is_equal else 1
