"""The command line's side of `rdt verify`: a checkpoint on disk against engines that are running.

The checkpoint joins a group of its own as the only source rank, the engines are attached, both sides digest, and all leave.
Nothing is moved or written. An engine that a trainer feeds is connected to it again by the trainer's next publish. Cheap to
import: torch and what joins come when it runs.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional, TextIO

import typer

from .commandline import command, console, progress
from .demo.options import DTYPES
from .errors import EngineError
from .notation import OptionError
from .report import check_summary, check_table
from .wire import CheckReport, to_json

if TYPE_CHECKING:
    from .engines import EngineClient

EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "rdt verify --checkpoint path/to/checkpoint --vllm http://node7:8000\n\n"
    "rdt verify --checkpoint path/to/step --sglang http://node7:30000 --dtype bfloat16 --all"
)
#: where the client of each engine is
_CLIENTS: dict[str, tuple[str, str, dict[str, bool]]] = {
    "vllm": (
        "rdt_vllm.clients",
        "VllmHttpEngine",
        {"end_open_syncs": False},
    ),  # a comparison must not tear a running sync
    "sglang": ("rdt_sglang.clients", "SglangHttpEngine", {}),
}


def verify(
    checkpoint: Annotated[Path, typer.Option(metavar="FOLDER", help="Of safetensors files.")],
    vllm: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads the annotation at run time
        typer.Option(metavar="URL", help="Of a vLLM server; may be given several times."),
    ] = None,
    sglang: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="URL", help="Of an SGLang server; may be given several times."),
    ] = None,
    address: Annotated[
        str, typer.Option(help="Of the Ray cluster that the servers are in; default: RAY_ADDRESS.")
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(metavar="DTYPE", help=f"That the engine serves in, where another is stored: {', '.join(DTYPES)}."),
    ] = "",
    token: Annotated[str, typer.Option(help="Sent as `Authorization: Bearer TOKEN`.", envvar="RDT_TOKEN")] = "",
    every: Annotated[bool, typer.Option("--all", help="Show equal tensors too.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Deadline of every wait, in seconds.", min=1)] = 300.0,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compare running engines with a checkpoint, by digests on both sides. Nothing is moved or written.

    Engines go on generating. What an engine casts, repacks or quantises when it loads cannot be compared, and is listed.
    An engine that a trainer feeds leaves that group for this; the trainer's next publish connects it again. Exit status 1
    says that something differs, that nothing could be compared, or that the comparison failed.
    """
    with command("verify") as target:
        wanted = [("vllm", url) for url in vllm or ()] + [("sglang", url) for url in sglang or ()]
        if not wanted:
            raise OptionError("name at least one server, with --vllm or --sglang")
        if dtype and dtype not in DTYPES:
            raise OptionError(f"--dtype {dtype!r} is unknown; --dtype is one of {', '.join(DTYPES)}")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        clients = [client_of(engine, url, headers) for engine, url in wanted]
        report = verify_checkpoint(
            checkpoint, clients, dtype=dtype, address=address or None, timeout_s=timeout_s, quiet=json
        )
        raise typer.Exit(verify_command(target, report, json=json, all_rows=every))


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
    import torch

    from .sources.checkpoint import CheckpointSource
    from .sync import WeightSync

    kind = getattr(torch, dtype) if dtype else None
    done = itertools.count()
    with progress("", len(clients) + 2, quiet=quiet) as update:

        def doing(step: str) -> None:
            update(description=step, completed=next(done))

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


def verify_command(target: TextIO, report: CheckReport, *, json: bool, all_rows: bool) -> int:
    """Prints a report to `target`. Returns the exit status: 1 if anything differs or nothing was compared, else 0."""
    if json:
        target.write(to_json(report) + "\n")
    else:
        out = console(target)
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
