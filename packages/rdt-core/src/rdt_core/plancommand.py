"""The command line's side of `rdt plan`: its options. What plans is the room `plan`, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from .commandline import command
from .errors import SourceError

EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "rdt plan --model qwen3-8b --trainer fsdp:ranks=8 --engine vllm:tp=2,replicas=4\n\n"
    "rdt plan --model kimi-k2 --trainer megatron:tp=8,pp=8,ep=32,ranks=256 --engine sglang:tp=32,ep=32,replicas=4 "
    "--picture plan.png"
)


def plan(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|PATH",
            help="A known model (any other name lists them), or a checkpoint's config.json or folder.",
        ),
    ],
    trainer: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT",
            help="fsdp:ranks=N, with replicas=M and apart=1 (each expert a parameter of its own) if wanted; or megatron:ranks=N, "
            "with tp, pp, ep, etp, cp, vpp, first, last.",
        ),
    ] = "fsdp:ranks=8",
    engine: Annotated[
        str, typer.Option(metavar="LAYOUT", help="vllm or sglang, with :tp=N,ep=N,pp=N,replicas=N.")
    ] = "vllm:tp=1",
    layers: Annotated[int, typer.Option(help="Keep only so many decoder layers; 0 keeps all.", min=0)] = 0,
    cluster: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads the annotation at run time
        typer.Option(
            metavar="FILE",
            help="The machines, as JSON; default: nodes of 8 GPUs, NVLink 450 GB/s a GPU and direction, 8 NICs of 50 GB/s.",
        ),
    ] = None,
    placement: Annotated[
        str,
        typer.Option(
            help="separate: engines on nodes of their own; beside: on the next GPUs; together: on the trainer's GPUs."
        ),
    ] = "separate",
    mode: Annotated[str, typer.Option(metavar="MODE", help="Publish mode: live, snapshot.")] = "live",
    landing: Annotated[
        str,
        typer.Option(help="in_place: straight into parameters; ring: through receive buffers and a post-load step."),
    ] = "in_place",
    simulate: Annotated[bool, typer.Option("--simulate", help="Execute the plan in a simulation as well.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print the plan as JSON, with every link and NIC, and no progress.")
    ] = False,
    picture: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads the annotation at run time
        typer.Option(metavar="FILE", help="A PNG of bytes by NIC, and of times with their bottlenecks."),
    ] = None,
) -> None:
    """Say what a sync would move, where, and how long it would take. Needs no GPU and starts nothing.

    The model's configuration and the layouts on both sides go through the real planner. Times are predictions for the
    machines described: see docs/plan.md for what they leave out.
    """
    from .plan import read_cluster, read_options
    from .plan.show import plan_command

    # a layout that does not fit the model is found while planning, and is the command line's mistake all the same
    with command("plan", SourceError) as target:
        machines = read_cluster(cluster)
        options = read_options(
            model, trainer, engine, layers=layers, cluster=machines, placement=placement, mode=mode, landing=landing,
            simulate=simulate,
        )  # fmt: skip
        plan_command(target, options, as_json=json, picture=picture)
