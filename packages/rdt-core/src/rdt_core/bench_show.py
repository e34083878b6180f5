"""The command line's side of `rdt bench`: options, cluster, table."""

from __future__ import annotations

from typing import Any

from . import wire
from .bench import BenchReport, run
from .demo.options import OptionError
from .publisher import MODES
from .receiver import DEFAULT_KINDS
from .shapes import MODELS


def bench_command(
    target: Any, *, model: str, trainer: str, device: str, modes: str, links: str, rounds: int, json: bool
) -> None:
    """Checks the options, starts Ray, measures, prints to `target`.

    Raises:
        OptionError: an option that cannot work; nothing was started.
    """
    import ray
    import torch

    wanted_modes = _listed(modes, MODES[1:], "--modes")
    wanted_kinds = _listed(links, DEFAULT_KINDS, "--links")
    if model not in MODELS:
        raise OptionError(f"--model {model!r} is unknown; known: {', '.join(MODELS)}")
    name, _, ranks = trainer.partition(":ranks=")
    if name != "fsdp" or not (ranks or "2").isdigit() or int(ranks or "2") < 1:
        raise OptionError(f"--trainer {trainer!r} is not understood; write fsdp:ranks=2")
    if device not in ("cpu", "cuda"):
        raise OptionError(f"--device {device!r} is unknown; known: cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda needs a GPU, and torch sees none here")

    from rich.console import Console

    status = Console(stderr=True).status("starting Ray")
    env = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
    ray.init(
        num_cpus=8, include_dashboard=False, namespace="rdt", log_to_driver=False,
        runtime_env={"env_vars": env if device == "cuda" else {}},
    )  # fmt: skip
    try:
        with status:
            report = run(
                model, ranks=int(ranks or "2"), device=device, modes=wanted_modes, kinds=wanted_kinds, rounds=rounds,
                progress=status.update,
            )  # fmt: skip
    finally:
        ray.shutdown()
    if json:
        target.write(wire.to_json(report) + "\n")
    else:
        Console(file=target).print(table(report))


def _listed(text: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    unknown = [part for part in parts if part not in known]
    if unknown or not parts:
        raise OptionError(f"{option} {text!r}: unknown {', '.join(unknown) or 'empty list'}; known: {', '.join(known)}")
    return parts


def table(report: BenchReport) -> Any:
    """A table with one row for each combination."""
    from rich.table import Table

    nbytes = max((cell.bytes for cell in report.cells), default=0)
    made = Table(
        title=f"{report.model}, {report.ranks} source ranks -> 1 reader on {report.device}, {nbytes / 1e6:.1f} MB a sync, "
        f"{report.rounds} syncs each"
    )
    for column in (
        "mode",
        "links",
        "first ms",
        "p50 ms",
        "max ms",
        "copy ms",
        "ratio",
        "write ms",
        "transfer ms",
        "exact",
    ):
        made.add_column(column, justify="left" if column in ("mode", "links") else "right")
    for cell in report.cells:
        if cell.error:
            made.add_row(cell.mode, cell.kind, cell.error)
            continue
        made.add_row(
            cell.mode,
            cell.kind,
            *(f"{1e3 * value:.1f}" for value in (cell.first_s, cell.p50, max(cell.seconds), cell.copy_s)),
            f"{cell.ratio:.2f}",
            f"{1e3 * cell.phases.get('write', 0.0):.1f}",
            f"{1e3 * cell.reader_phases.get('transfer', 0.0):.1f}",
            "yes" if cell.exact else "NO",
        )
    return made
