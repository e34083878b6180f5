"""The command line's options of `rdt doctor`, registered by `cli`.

Refuses options that cannot work with exit status 2 before anything is started.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ..commandline import command
from ..notation import OptionError

EPILOG = (
    "[bold]Examples[/bold]\n\n"
    "rdt doctor\n\n"
    'eval "$(rdt doctor --fix-env)"\n\n'
    "rdt doctor --cluster --address auto --json > doctor.json"
)


def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="All nodes of a Ray cluster, and links between them.")
    ] = False,
    address: Annotated[str, typer.Option(help="Of that cluster; default: RAY_ADDRESS, or this machine's.")] = "",
    measure: Annotated[bool, typer.Option(help="Measure transfers between fresh processes.")] = True,
    size: Annotated[
        str, typer.Option(metavar="SIZE", help="Of a measured transfer; default: 256MiB on a CPU, 1GiB on a GPU.")
    ] = "",
    model_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Of the model's weights, for checks of memory; default: 16.4GB.")
    ] = "",
    timeout_s: Annotated[float, typer.Option("--timeout", help="Deadline of a transfer, in seconds.", min=1)] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, and no progress.")] = False,
    fix_env: Annotated[
        bool, typer.Option("--fix-env", help="Print `export NAME=VALUE` lines that mend findings, and nothing else.")
    ] = False,
) -> None:
    """Examine this node, or a cluster: what is wrong, what it costs, and the setting that mends it.

    Versions, NIXL's backend, RDMA devices, GPUs and masks, UCX's and the allocator's settings, limits; and a measured
    transfer between two processes for each device and kind of link, beside one copy of the same bytes. Nothing is
    changed. Exit status 1 says that something is slow or broken.
    """
    from .options import read_options
    from .results import only_results

    with command("doctor") as target:
        if json and fix_env:
            raise OptionError("--json and --fix-env both print to standard output; choose one")
        options = read_options(
            cluster=cluster, address=address, measure=measure, size=size, model_size=model_size, timeout_s=timeout_s
        )
        with only_results(target) as out:
            from .show import doctor_command  # brings torch along

            raise typer.Exit(doctor_command(out, options, json=json, fix_env=fix_env))
