"""The command line's side of `rdt bench`: its options. What measures is the room `bench`, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from .commandline import command
from .demo.options import MODES
from .shapes import MODELS
from .wire import VERIFY

EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "rdt bench\n\n"
    "rdt bench --model qwen3-8b --trainer fsdp:ranks=1 --device cuda --modes live --kinds mapped,prepared --peers all\n\n"
    "rdt bench --model qwen3-8b --trainer fsdp:ranks=2 --engine vllm:tp=2 --device cuda --gpus together --nccl-alive\n\n"
    "rdt bench --model qwen3-30b-a3b --layers 8 --trainer megatron:ranks=4,tp=2,pp=2,ep=2 --engine vllm:tp=2"
)


def bench(
    model: Annotated[str, typer.Option(metavar="NAME", help=f"Whose shapes: {', '.join(MODELS)}.")] = "smollm2-135m",
    layers: Annotated[int, typer.Option(help="Keep only so many decoder layers; 0 keeps all.", min=0)] = 0,
    trainer: Annotated[
        str,
        typer.Option(
            metavar="LAYOUT",
            help="Source ranks: fsdp:ranks=N (rows of every tensor), or megatron:ranks=N, with tp, pp, ep, etp, cp, vpp, first, "
            "last as in 'rdt plan'.",
        ),
    ] = "fsdp:ranks=2",
    engine: Annotated[
        str, typer.Option(metavar="NAME:tp=N,ep=N,pp=N", help="Whose parameter layout the readers have: vllm, sglang.")
    ] = "vllm:tp=1",
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where all weights lie.")] = "cpu",
    gpus: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="separate: trainers on the first half of the GPUs, engine ranks on the others; together: each GPU "
            "holds one of both; shared: all on one GPU; auto: separate where there are two.",
        ),
    ] = "auto",
    modes: Annotated[
        str, typer.Option(metavar="LIST", help="Publish modes, comma-separated: live, snapshot, bucket, auto.")
    ] = "live,snapshot,bucket",
    kinds: Annotated[
        str, typer.Option("--kinds", "--links", metavar="LIST", help="Link kinds: mapped, prepared, ray, auto.")
    ] = "mapped,prepared,ray",
    pack: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="What is packed at its owner: default, direct, packed, or rows below a size."
        ),
    ] = "default",
    verify: Annotated[
        str, typer.Option(metavar="LIST", help="What is compared by digests: off, sample, full.")
    ] = "off",
    peers: Annotated[
        str,
        typer.Option(
            metavar="none|all|LIST",
            help="Other designs beside: broadcast, gather, disk, objects, checkpoint-engine, sharded_rdt.",
        ),
    ] = "none",
    rounds: Annotated[int, typer.Option(help="Syncs after the first, for each combination.", min=1)] = 5,
    peer_rounds: Annotated[int, typer.Option(help="The same for each peer.", min=1)] = 3,
    expandable: Annotated[bool, typer.Option("--expandable", help="Trainers allocate in expandable segments.")] = False,
    nccl_alive: Annotated[
        bool, typer.Option("--nccl-alive", help="The trainers' own collectives run while they publish.")
    ] = False,
    bucket_mb: Annotated[int, typer.Option(help="Size of a bucket, in MiB.", min=1)] = 512,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Deadline of every wait, in seconds.", min=1)] = 120.0,
    limit_s: Annotated[
        float, typer.Option("--limit", help="Nothing new is started after so many seconds; 0: no limit.", min=0)
    ] = 0.0,
    json: Annotated[
        str, typer.Option("--json", metavar="FILE", help="The report as JSON, written after every piece; -: print it.")
    ] = "",
    plot: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads the annotation at run time
        typer.Option(metavar="FILE", help="A picture of the report: PNG, SVG or PDF by its suffix."),
    ] = None,
) -> None:
    """Measure syncs next to one copy of the same bytes and next to other designs, in the same run.

    Synthetic source ranks and engine ranks with a named model's real shapes, through the real planner and links. Bytes
    are compared after every piece; exit status 1 says that some were wrong, or that nothing ran.
    """
    from .bench import options as read
    from .bench.plugins import installed_peers
    from .bench.show import bench_command

    with command("bench") as target:
        wanted_trainer, wanted_engine = read.trainer(trainer), read.engine(engine)
        options = read.BenchOptions(
            model=model,
            layers=layers,
            ranks=wanted_trainer.get("ranks"),
            megatron=read.megatron(wanted_trainer),
            engine=wanted_engine.name,
            tp=wanted_engine.get("tp"),
            ep=wanted_engine.get("ep"),
            pp=wanted_engine.get("pp"),
            device=device,
            gpus=gpus,
            modes=read.names(modes, MODES, "--modes"),
            kinds=read.names(kinds, read.KINDS, "--kinds"),
            packs=tuple(dict.fromkeys(part.strip() for part in pack.split(","))),
            verifies=read.names(verify, VERIFY, "--verify"),
            rounds=rounds,
            peer_rounds=peer_rounds,
            expandable=expandable,
            collectives=nccl_alive,
            bucket_bytes=bucket_mb << 20,
            timeout_s=timeout_s,
            limit_s=limit_s,
        ).with_peers(peers, tuple(installed_peers()))
        raise typer.Exit(bench_command(target, options, json, plot))
