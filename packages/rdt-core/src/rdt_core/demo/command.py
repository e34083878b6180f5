"""The command line's side of `rdt demo`: its options, what is shown while it runs, and the table at the end.

With `--json` standard output holds the report alone. Cheap to import: what trains and what serves is imported when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional, TextIO

import typer

from ..commandline import command, console
from .options import DTYPES, LINKS, MODES, DemoOptions

EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "rdt demo\n\n"
    "rdt demo --steps 2 --out /tmp/first\n\n"
    "rdt demo --dtype bfloat16 --mode snapshot --link prepared\n\n"
    "rdt demo --model path/to/checkpoint --engine vllm:tp=2 --json > report.json"
)


def demo(
    steps: Annotated[int, typer.Option(help="Optimiser steps; a version is published after each.", min=1)] = 10,
    engine: Annotated[str, typer.Option(metavar="NAME[:tp=N]", help="Inference engine.")] = "vllm",
    trainer: Annotated[str, typer.Option(metavar="NAME[:ranks=N]", help="Trainer.")] = "fsdp:ranks=2",
    mode: Annotated[str, typer.Option(metavar="MODE", help=f"Publish mode: {', '.join(MODES)}.")] = "auto",
    link: Annotated[str, typer.Option(metavar="KIND", help=f"Kind of every link: {', '.join(LINKS)}.")] = "auto",
    dtype: Annotated[
        str,
        typer.Option(metavar="DTYPE", help=f"Of wire and engine: {', '.join(DTYPES)}. Training is in float32."),
    ] = "float32",
    model: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads the annotation at run time
        typer.Option(metavar="DIR", help="Checkpoint directory with tokenizer; default: SmolLM2-135M-Instruct."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where report.json and report.png go.")] = Path("out"),
    seed: Annotated[int, typer.Option(help="Of sampling and training.", min=0)] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and no progress.")] = False,
) -> None:
    """Train a small model while a stock engine serves every version of it.

    FSDP2 ranks learn by policy gradient from samples of an unmodified inference engine, on a CPU, without a hub.
    After each optimiser step the ranks publish and the engine serves the new version. Each version is checked: the
    engine's own stamp, and its log-probabilities against the trainer's. Takes about 5 minutes on 2 cores.
    """
    options = DemoOptions(
        steps=steps, engine=engine, trainer=trainer, mode=mode, link=link, dtype=dtype, model=model, out=out, seed=seed
    )
    with command("demo") as target:
        options.check()
        if json:
            _print_json(target, options)
        else:
            _print_table(target, options)


def _print_json(target: TextIO, options: DemoOptions) -> None:
    from .loop import run

    target.write(run(options).json().decode())
    target.flush()


def _print_table(target: TextIO, options: DemoOptions) -> None:
    from .loop import run
    from .show import Show, table

    out = console(target)
    with Show(out, options.steps) as show:
        report = run(options, show)
    steps, first = report.steps, report.checkpoint
    out.print(table(report))
    out.print(
        f"mode {steps[-1].mode}: {report.mode_reason}\n"
        f"reward {first.reward:.3f} -> {steps[-1].reward:.3f} over {options.steps} versions; "
        f"every version served was the version trained\n"
        f"{options.out / 'report.json'}, {options.out / 'report.png'}",
        highlight=False,
    )
