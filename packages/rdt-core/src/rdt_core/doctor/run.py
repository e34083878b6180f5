"""The examination itself: collect, judge, measure, judge again, on this node or on all nodes of a Ray cluster.

This node is measured in a small Ray cluster of its own, which ends with the run. In somebody's cluster one light actor a node
collects, and the measuring processes go to the nodes by their ids; nothing is left there. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import msgspec

from ..demo.options import OptionError
from ..distributions import rdt_version
from ..errors import RdtError
from ..localcluster import cluster as local_cluster
from ..rayauth import MODE, way_out
from ..rendezvous import probe
from .checks import compare, examine
from .collect import collect
from .facts import DoctorReport, Facts, Finding, Measured, Severity, finding, on_node
from .judge import judge
from .measure import START_S, Bench, Step, cross_rounds, node_steps
from .options import DoctorOptions
from .probe import Collector

_AT_ONCE = 16
_ASK_S = 5.0


class Watch(Protocol):
    """Told how far a run is."""

    def begin(self, steps: int) -> None:
        """So many transfers will be measured."""

    def done(self, what: str) -> None:
        """One of them was."""

    def now(self, what: str) -> None:
        """Something that takes a while begins."""


class Quiet:
    """A watch that shows nothing."""

    def begin(self, steps: int) -> None:
        """See `Watch`."""

    def done(self, what: str) -> None:
        """See `Watch`."""

    def now(self, what: str) -> None:
        """See `Watch`."""


def run(options: DoctorOptions, watch: Watch | None = None) -> DoctorReport:
    """Examines this node, or a cluster.

    Args:
        options: what and how.
        watch: told of progress.

    Raises:
        OptionError: there is no Ray cluster where one was asked for.
        RdtError: this process is connected to a Ray cluster already, which is not the one to examine.
    """
    watch = watch or Quiet()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if options.cluster:
            stack.enter_context(_connected(options, watch))
        watch.now("reading facts")
        nodes, found = _nodes(options.timeout_s) if options.cluster else ([collect()], [])
        found += compare(nodes)
        for facts in nodes:
            found += examine(facts, options.model_bytes)
        measured: list[Measured] = []
        if options.measure and any(facts.nixl_module for facts in nodes):
            failed = None if options.cluster else _start(stack, watch)
            if failed is None:
                measured = _measure(nodes, options, watch)
                found += judge(measured, {facts.hostname: facts for facts in nodes})
            else:
                found.append(on_node(failed, nodes[0].hostname))
    return DoctorReport(
        rdt=rdt_version(), nodes=tuple(nodes), findings=tuple(sorted(found, key=lambda one: -one.level)),
        measured=tuple(measured), seconds=time.monotonic() - began,
    )  # fmt: skip


def _start(stack: contextlib.ExitStack, watch: Watch) -> Finding | None:
    """Starts a small Ray cluster here, which ends with `stack`; a finding if it does not start."""
    import ray

    if ray.is_initialized():
        raise RdtError(
            "this process is connected to a Ray cluster already, and one node is measured in a small cluster of its own; "
            "examine that cluster (cluster=True), or measure nothing (measure=False)"
        )
    watch.now("starting Ray")
    try:
        stack.enter_context(local_cluster(cpus=1))
    except Exception as error:  # Ray raises plain ones
        return finding(
            Severity.BROKEN, "ray", f"Ray does not start on this node: {error}",
            "no trainer or engine could start here either; nothing was measured",
            "`ray start --head` and the logs in /tmp/ray/session_latest/logs say more; a node without a free core is one cause",
        )  # fmt: skip
    return None


@contextlib.contextmanager
def _connected(options: DoctorOptions, watch: Watch) -> Iterator[None]:
    import ray

    if ray.is_initialized():
        yield
        return
    watch.now("connecting to the Ray cluster")
    address = options.address or os.environ.get("RAY_ADDRESS") or "auto"
    where = "on this machine" if address == "auto" else f"at {address!r}"
    try:
        probe(address)
        if _asks_for_token(address):
            raise OptionError(f"the Ray cluster {where} {_token_way_out()}")
        ray.init(address=address, namespace="rdt-doctor", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        if way_out(error):
            raise OptionError(f"the Ray cluster {where} {_token_way_out()}") from error
        raise OptionError(
            f"no Ray cluster answers {where}: {error}; start one (ray start --head), or "
            "leave out --cluster to examine this node"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _asks_for_token(address: str) -> bool:
    """Whether the cluster refuses this process for its token. Ray says so at once here; `ray.init` tries for 20 s first."""
    import ray

    try:
        from ray._private.services import canonicalize_bootstrap_address
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        refused: type[Exception] = ray.exceptions.AuthenticationError
        found = canonicalize_bootstrap_address(address)
    except Exception:  # nothing of this is public: `ray.init` decides then
        return False
    if not found:
        return False
    try:
        GcsClient(address=found).internal_kv_get(b"rdt-doctor", None, timeout=_ASK_S)
    except refused:
        return True
    except Exception:  # nor is what it raises where something else is wrong, or listens there
        return False
    return False


def _token_way_out() -> str:
    """What a cluster that asks for a token refuses, and the way out."""
    sent = os.environ.get(MODE, "").lower() == "token"
    token = "the token of the cluster's head (`ray get-auth-token` there) in ~/.ray/auth_token or RAY_AUTH_TOKEN"
    if sent:
        return f"does not take this process's token: put {token}"
    found = os.environ.get(MODE)
    return (
        f"asks for a token, and this process sends none ({MODE} is {repr(found) if found else 'not set'}): run it again with "
        f"{MODE}=token, and {token}"
    )


def _nodes(timeout_s: float) -> tuple[list[Facts], list[Finding]]:
    """The facts of every node that answers, by one actor a node, and a finding for each that does not."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = [node for node in ray.nodes() if node["Alive"]]
    actors, refs = [], []
    for node in alive:
        actor = ray.remote(Collector).options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
        )
        actors.append(actor.remote())
        refs.append(actors[-1].facts.remote())
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=START_S + timeout_s)
    answered = set(ready)
    facts: list[Facts] = []
    failed: list[Finding] = []
    for node, ref in zip(alive, refs, strict=True):
        name = node["NodeManagerHostname"]
        if ref not in answered:
            failed.append(on_node(_silent(f"no answer within {START_S + timeout_s:g} s"), name))
            continue
        try:
            facts.append(ray.get(ref))
        except ray.exceptions.RayError as error:
            lines = str(getattr(error, "cause", None) or error).strip().splitlines()
            failed.append(on_node(_silent(lines[-1] if lines else type(error).__name__), name))
    for actor in actors:
        ray.kill(actor)
    return _named_apart(facts), failed


def _silent(why: str) -> Finding:
    return finding(
        Severity.BROKEN, "node", f"this node cannot be examined: {why}", "no member of a group could run there",
        "install rdt-core there, in the environment that Ray's workers use; `ray status` tells whether the node is well",
    )  # fmt: skip


def _named_apart(nodes: Sequence[Facts]) -> list[Facts]:
    """Nodes with one hostname (containers, several raylets of a machine) get a part of their id behind it."""
    often = Counter(facts.hostname for facts in nodes)
    return [
        facts
        if often[facts.hostname] == 1
        else msgspec.structs.replace(facts, hostname=f"{facts.hostname}/{facts.node_id[:6]}")
        for facts in nodes
    ]


def _measure(nodes: Sequence[Facts], options: DoctorOptions, watch: Watch) -> list[Measured]:
    """Measures each node by itself, nodes side by side, then pairs of nodes, disjoint pairs side by side."""
    inside = [node_steps(facts, index) for index, facts in enumerate(nodes)]
    rounds = cross_rounds(nodes)
    watch.begin(sum(map(len, inside)) + sum(map(len, rounds)))
    stop = threading.Event()

    def part(steps: Sequence[Step]) -> list[Measured]:
        bench = Bench(nodes, options.sizes, options.timeout_s)
        try:
            return bench.run(steps, watch.done, stop)
        finally:
            bench.close()

    if len(nodes) == 1:
        return part(inside[0])
    results: list[Measured] = []
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="rdt-doctor") as pool:
        try:
            for group in [inside, *([[step] for step in steps] for steps in rounds)]:
                results += [one for measured in pool.map(part, group) for one in measured]
        finally:
            stop.set()  # an interrupted run ends with the transfers that are under way
    return results
