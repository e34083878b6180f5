"""The command `rdt`.

Standard output carries results, standard error everything else. Exit status: 0 when all went well, 1 when the run
failed, 2 when the command line cannot work (nothing was started then), 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from .demo.options import DTYPES, LINKS, MODES, DemoOptions, OptionError
from .distributions import version_lines
from .doctor.command import EPILOG as DOCTOR_EPILOG
from .doctor.command import doctor
from .errors import RdtError, SourceError
from .signals import terminable
from .statuscommand import EPILOG as STATUS_EPILOG
from .statuscommand import status
from .tracecommand import EPILOG as TRACE_EPILOG
from .tracecommand import trace
from .wire import VERIFY

LOG_WIDTH = 160

app = typer.Typer(
    help="Moves a model's weights from the ranks that train it to the ranks that serve it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

_DEMO_EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "rdt demo\n\n"
    "rdt demo --steps 2 --out /tmp/first\n\n"
    "rdt demo --dtype bfloat16 --mode snapshot --link prepared\n\n"
    "rdt demo --model path/to/checkpoint --engine vllm:tp=2 --json > report.json"
)

_BENCH_EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "rdt bench\n\n"
    "rdt bench --model qwen3-8b --trainer fsdp:ranks=1 --device cuda --modes live --kinds mapped,prepared --peers all\n\n"
    "rdt bench --model qwen3-8b --trainer fsdp:ranks=2 --engine vllm:tp=2 --device cuda --gpus together --nccl-alive"
)

_VERIFY_EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "rdt verify --checkpoint path/to/checkpoint --vllm http://node7:8000\n\n"
    "rdt verify --checkpoint path/to/step --sglang http://node7:30000 --dtype bfloat16 --all"
)

_SOAK_EPILOG = (
    "[bold]Examples[/bold]\n\nrdt soak\n\nrdt soak --syncs 300 --kinds prepared --mode snapshot --rejoin-every 25"
)


_PLAN_EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "rdt plan --model qwen3-8b --trainer fsdp:ranks=8 --engine vllm:tp=2,replicas=4\n\n"
    "rdt plan --model kimi-k2 --trainer megatron:tp=8,pp=8,ep=32,ranks=256 --engine sglang:tp=32,ep=32,replicas=4 "
    "--picture plan.png"
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo("\n".join(version_lines()))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show what is installed, and end.")
    ] = False,
) -> None:
    """Moves a model's weights from the ranks that train it to the ranks that serve it."""
    # Under `uv run` Ray would build a fresh environment for every worker; all of them live on this machine and can use
    # the one that this process runs in. Ray reads it when it is imported, which is later.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")


@app.command(epilog=_DEMO_EPILOG)
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
    try:
        options.check()
    except OptionError as error:
        typer.echo(f"rdt demo: {error}", err=True)
        raise typer.Exit(2) from error
    # kept from here on: libraries print to standard output as they please
    target = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), terminable():
        try:
            if json:
                _demo_json(options, target)
            else:
                _demo_show(options, target)
        except RdtError as error:
            typer.echo(f"rdt demo failed: {type(error).__name__}: {error}", err=True)
            raise typer.Exit(1) from error


@app.command(epilog=_BENCH_EPILOG)
def bench(
    model: Annotated[str, typer.Option(metavar="NAME", help="Whose shapes.")] = "smollm2-135m",
    layers: Annotated[int, typer.Option(help="Keep only so many decoder layers; 0 keeps all.", min=0)] = 0,
    trainer: Annotated[str, typer.Option(metavar="fsdp:ranks=N", help="Source ranks.")] = "fsdp:ranks=2",
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

    target = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), terminable():
        try:
            wanted_engine = read.engine(engine)
            options = read.BenchOptions(
                model=model,
                layers=layers,
                ranks=read.trainer(trainer).get("ranks"),
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
            status = bench_command(target, options, json, plot)
        except OptionError as error:
            typer.echo(f"rdt bench: {error}", err=True)
            raise typer.Exit(2) from error
        except RdtError as error:
            typer.echo(f"rdt bench failed: {type(error).__name__}: {error}", err=True)
            raise typer.Exit(1) from error
    raise typer.Exit(status)


@app.command(epilog=_VERIFY_EPILOG)
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
    from .verifycommand import client_of, verify_checkpoint, verify_command

    target = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), terminable():
        wanted = [("vllm", url) for url in vllm or ()] + [("sglang", url) for url in sglang or ()]
        if not wanted or (dtype and dtype not in DTYPES):
            what = "name at least one server" if not wanted else f"--dtype is one of {', '.join(DTYPES)}"
            typer.echo(f"rdt verify: {what}", err=True)
            raise typer.Exit(2)
        try:
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            clients = [client_of(engine, url, headers) for engine, url in wanted]
            report = verify_checkpoint(
                checkpoint, clients, dtype=dtype, address=address or None, timeout_s=timeout_s, quiet=json
            )
            status = verify_command(target, report, json=json, all_rows=every)
        except RdtError as error:
            typer.echo(f"rdt verify failed: {type(error).__name__}: {error}", err=True)
            raise typer.Exit(1) from error
    raise typer.Exit(status)


@app.command(epilog=_SOAK_EPILOG)
def soak(
    syncs: Annotated[int, typer.Option(help="How many, one after the other.", min=1)] = 300,
    rejoin_every: Annotated[
        int, typer.Option(help="All source ranks leave and join again after so many syncs; 0: never.", min=0)
    ] = 0,
    reattach_every: Annotated[
        int, typer.Option(help="The replica is detached and attached again after so many syncs; 0: never.", min=0)
    ] = 0,
    kinds: Annotated[str, typer.Option(metavar="LIST", help="Link kinds: mapped, prepared, ray, auto.")] = "auto",
    mode: Annotated[str, typer.Option(metavar="MODE", help=f"Publish mode: {', '.join(MODES)}.")] = "auto",
    ranks: Annotated[int, typer.Option(help="Source ranks.", min=1)] = 2,
    workers: Annotated[int, typer.Option(help="Engine ranks of the one replica.", min=1)] = 1,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Deadline of every wait, in seconds.", min=1)] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and no progress.")] = False,
) -> None:
    """Sync a small model many times and tell whether anything grows.

    After each sync every process says what it holds: memory, open files, threads, shared memory, NIXL registrations, Ray
    references; and the sync's seconds. Every version is checked. Exit status 1 says that something grows over the second
    half, by a robust slope.
    """
    from .bench import options as read
    from .soak.options import SoakOptions
    from .soak.show import soak_command

    target = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), terminable():
        try:
            options = SoakOptions(
                syncs=syncs, rejoin_every=rejoin_every, reattach_every=reattach_every,
                kinds=read.names(kinds, read.KINDS, "--kinds"), mode=mode, ranks=ranks, workers=workers, timeout_s=timeout_s,
            )  # fmt: skip
            status = soak_command(target, options, json)
        except OptionError as error:
            typer.echo(f"rdt soak: {error}", err=True)
            raise typer.Exit(2) from error
        except RdtError as error:
            typer.echo(f"rdt soak failed: {type(error).__name__}: {error}", err=True)
            raise typer.Exit(1) from error
    raise typer.Exit(status)


@app.command(epilog=_PLAN_EPILOG)
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
            "with tp, pp, ep, etp, vpp, first, last.",
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
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, and no progress.")] = False,
    picture: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads the annotation at run time
        typer.Option(metavar="FILE", help="A PNG of bytes by NIC, and of times."),
    ] = None,
) -> None:
    """Say what a sync would move, where, and how long it would take. Needs no GPU and starts nothing.

    The model's configuration and the layouts on both sides go through the real planner. Times are predictions for the
    machines described: see docs/plan.md for what they leave out.
    """
    from .plan import read_cluster, read_options
    from .plan.show import plan_command

    target = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), terminable():
        try:
            machines = read_cluster(cluster)
            options = read_options(
                model, trainer, engine, layers=layers, cluster=machines, placement=placement, mode=mode, landing=landing,
                simulate=simulate,
            )  # fmt: skip
            plan_command(target, options, as_json=json, picture=picture)
        except (OptionError, SourceError) as error:
            typer.echo(f"rdt plan: {error}", err=True)
            raise typer.Exit(2) from error
        except RdtError as error:
            typer.echo(f"rdt plan failed: {type(error).__name__}: {error}", err=True)
            raise typer.Exit(1) from error


app.command(epilog=DOCTOR_EPILOG)(doctor)
app.command(epilog=STATUS_EPILOG)(status)
app.command(epilog=TRACE_EPILOG)(trace)


def _demo_json(options: DemoOptions, target: Any) -> None:
    from .demo.loop import run

    outcome = run(options)
    target.write(outcome.report.json().decode())
    target.flush()


def _demo_show(options: DemoOptions, target: Any) -> None:
    from rich.console import Console

    from .demo.loop import run
    from .demo.show import Show, table

    # a file has no width: a table that is wrapped for a terminal of 80 columns is hard to read in a log
    console = Console(file=target, width=None if target.isatty() else LOG_WIDTH)
    with Show(console, options.steps) as show:
        outcome = run(options, show)
    console.print(table(outcome.report.steps, outcome.first_reward, outcome.first_error))
    console.print(
        f"mode {outcome.report.steps[-1].mode}: {outcome.mode_reason}\n"
        f"reward {outcome.first_reward:.3f} -> {outcome.report.steps[-1].reward:.3f} over {options.steps} versions; "
        f"every version served was the version trained\n"
        f"{options.out / 'report.json'}, {options.out / 'report.png'}",
        highlight=False,
    )


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
