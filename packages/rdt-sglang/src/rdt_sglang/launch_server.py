"""Runs SGLang's own server in Ray mode in a named Ray cluster and namespace: `python -m rdt_sglang.launch_server -- ARGS`.

SGLang never connects to Ray itself; Ray does so when it is first used. So SGLang's own launcher with `--use-ray` is enough
where `RAY_ADDRESS` is set, and its actors then have an anonymous namespace. This one takes cluster and namespace as options,
so that the actors are found by name as well, and refuses to start where no cluster was named: Ray would start one of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rdt_core.errors import RdtError

from .versions import check_sglang

_EPILOG = """\
Everything behind -- is for SGLang: see `python -m sglang.launch_server --help`. --use-ray is added.

SGLang's own launcher does the same, with its actors in an anonymous namespace (they are still found through the server):
  RAY_ADDRESS=head:6379 python -m sglang.launch_server --model-path MODEL --use-ray
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line, without SGLang's own options."""
    made = argparse.ArgumentParser(
        prog="python -m rdt_sglang.launch_server",
        description="Starts SGLang's HTTP server in Ray mode in a Ray cluster that is running, with scheduler actors that can "
        "receive weights from a trainer.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--ray-address",
        default=os.environ.get("RAY_ADDRESS"),
        metavar="HOST:PORT",
        help="of the cluster's head, or 'auto' for the one on this machine (default: RAY_ADDRESS)",
    )
    made.add_argument(
        "--ray-namespace",
        default="rdt",
        metavar="NAME",
        help="in which the schedulers' actors are named (default: rdt)",
    )
    made.add_argument("sglang", nargs=argparse.REMAINDER, metavar="-- ARGS", help="SGLang's own arguments")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the server until it ends.

    Args:
        arguments: of the command line; default: this process's.

    Returns:
        The exit status.
    """
    options = parser().parse_args(arguments)
    given = [one for index, one in enumerate(options.sglang) if index or one != "--"]
    if not options.ray_address:
        print("no Ray cluster was named: give --ray-address HOST:PORT, or set RAY_ADDRESS", file=sys.stderr)  # noqa: T201
        return 2
    try:
        check_sglang()
    except RdtError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    import ray

    try:
        ray.init(address=options.ray_address, namespace=options.ray_namespace, log_to_driver=True)
    except ConnectionError as error:
        print(f"no Ray cluster at {options.ray_address}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    if "--use-ray" not in given:
        given.append("--use-ray")
    try:
        run_server(prepare_server_args(given))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
