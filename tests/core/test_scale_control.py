"""The control plane with many members: real messages of real plans against the real coordinator, calls and bytes counted.

Members are threads; what they declare comes from the planner for layouts that grow by data parallelism and replicas. What the
bytes of each call grow with is a table, `GROWTH`: for each member at most linear in the ranks, without an exception, and in all
nearly linear as well, but for what source ranks are told of all links. Times are printed, never asserted. `pytest -s` shows it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from rdt_core import wire
from rdt_core.control import Control, LocalControl, RayControl
from rdt_core.coordinator import Coordinator
from rdt_core.manifests import split
from rdt_core.plan.cluster import Cluster, seat
from rdt_core.plan.readers import EngineLayout, plan_readers
from rdt_core.plan.trainers import GROUP, make_manifests
from rdt_core.rendezvous import open_coordinator
from rdt_core.routing import Routing
from rdt_core.shapes import Config, tensors_of
from rdt_core.synccalls import MAX_TOLD_LINKS
from rdt_core.trainers import MegatronLayout

CONFIG = Config(8, 64, 128, 8, 8, 16, 512, experts=16, expert_intermediate=32)
TIMEOUT_S = 120.0
Counts = dict[str, list[int]]  # method -> calls, bytes to the coordinator, bytes back

#: what the bytes of one call grow with: "nothing", the "links" of a member, a little the "sources", or "all links" of the group
GROWTH = {
    "join": "nothing", "sources": "sources", "connect": "links", "replica_ready": "links", "begin": "links",
    "offer": "links", "offers": "links", "published": "nothing", "enter": "nothing", "done": "links",
    "outcome": "all links", "commit": "all links",
}  # fmt: skip
#: and at most these bytes for each rank of the group, whatever its size: the line that no call may cross
MOST_A_RANK = 3500
#: bytes of all manifests together: what these ranks have in common, and what each adds
COMMON, A_SOURCE = 6000, 30
#: bytes of a report without the accounts of engine ranks
SHORT = 1000


def size(value: Any) -> int:
    """Bytes of a message's contents; numbers count as eight."""
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, dict):
        return sum(size(key) + size(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return sum(map(size, value))
    return 8


class Tally:
    """What goes through the coordinator, by method."""

    def __init__(self) -> None:
        self.counts: Counts = defaultdict(lambda: [0, 0, 0])
        self._lock = threading.Lock()

    def watch(self, method: str, args: tuple[Any, ...], answer: Callable[[float], Any]) -> Callable[[float], Any]:
        with self._lock:
            self.counts[method][0] += 1
            self.counts[method][1] += size(args)

        def wait(limit_s: float) -> Any:
            result = answer(limit_s)
            with self._lock:
                self.counts[method][2] += size(result)
            return result

        return wait

    def take(self) -> Counts:
        """What was counted since the last call."""
        with self._lock:
            found, self.counts = dict(self.counts), defaultdict(lambda: [0, 0, 0])
        return found


class LocalCounted(LocalControl):
    tally = Tally()

    def _post(self, method: str, args: tuple[Any, ...]) -> Callable[[float], Any]:
        return self.tally.watch(method, args, super()._post(method, args))


class RayCounted(RayControl):
    tally = Tally()

    def _post(self, method: str, args: tuple[Any, ...]) -> Callable[[float], Any]:
        return self.tally.watch(method, args, super()._post(method, args))


class World:
    """The members of a group, ready to join: their messages are made before the clock starts."""

    def __init__(self, sources: int, replicas: int) -> None:
        trainer, engine = MegatronLayout(sources, tp=2, pp=4, ep=8), EngineLayout("sglang", 8, 8, replicas=replicas)
        seats = seat(Cluster(), sources, replicas, 8, "separate")
        tensors = tensors_of(CONFIG)
        self.manifests = make_manifests(trainer, tensors, CONFIG, [gpu.meta() for gpu in seats.sources])
        self.engines: list[wire.EngineManifest] = []
        plan_readers(Routing(self.manifests), engine, CONFIG, seats.sources, seats.readers, each=self.engines.append)
        self.replicas = [f"replica-{number}" for number in range(replicas)]
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, Counts] = {}

    def run(self, control: Control, tally: Tally, syncs: int) -> None:
        """Joins, connects and syncs so often; the last sync is the one that is kept as "later sync"."""
        everybody: Sequence[Any] = [*self.manifests, *self.engines]
        with ThreadPoolExecutor(len(everybody)) as pool:
            with self._phase("join", tally):
                self._all(pool, lambda one: control.join(one, f"token-{one.rank}"), self.manifests)
            with self._phase("connect", tally):
                self._all(pool, lambda one: self._connect(control, one), self.engines)
                for name in self.replicas:
                    assert len(control.replica_ready(name, TIMEOUT_S)) == 8
            for version in range(1, syncs + 1):
                began, landed = threading.Event(), threading.Barrier(len(self.engines) + 1)

                def take_part(
                    one: Any, version: int = version, began: threading.Event = began, landed: Any = landed
                ) -> None:
                    if isinstance(one, wire.SourceManifest):
                        self._publish(control, one.rank, version, began, landed)
                    else:
                        self._pull(control, one, version, began, landed)

                with self._phase("first sync" if version == 1 else "later sync", tally):
                    self._all(pool, take_part, everybody)

    def _all(self, pool: ThreadPoolExecutor, member: Callable[[Any], None], members: Sequence[Any]) -> None:
        for future in [pool.submit(member, one) for one in members]:
            future.result(TIMEOUT_S)

    @contextmanager
    def _phase(self, name: str, tally: Tally) -> Iterator[None]:
        tally.take()
        began = time.perf_counter()
        yield
        self.seconds[name], self.counts[name] = time.perf_counter() - began, tally.take()

    def _connect(self, control: Control, engine: wire.EngineManifest) -> None:
        # what a reader makes of the manifests is the planner's business: one decodes them, to see that they came whole
        epoch, joined = control._post("sources", (TIMEOUT_S,))(TIMEOUT_S)
        if engine.reader == "replica-0/0":
            assert split(joined) == self.manifests
        control.connect(engine, epoch)

    def _publish(self, control: Control, rank: int, version: int, began: threading.Event, landed: Any) -> None:
        names = self.replicas if rank == 0 else None
        sync, requests, _ = control.begin(rank, f"token-{rank}", version, names, TIMEOUT_S)
        assert bool(requests) == (version == 1)
        if rank == 0:
            began.set()
        if requests:
            offers = [
                wire.LinkOffer(reader=one.reader, incarnation=one.incarnation, source=rank, digest=one.digest)
                for one in requests
            ]
            control.offer(rank, sync, offers)
        control.published(rank, sync, 0, None, TIMEOUT_S)
        if rank == 0:
            landed.wait(TIMEOUT_S)
            report = control.commit(sync, 0, 0.1, {"begin": 0.1}, timeout_s=TIMEOUT_S)
            assert (report.version, len(report.readers)) == (version, len(self.engines))
        else:
            data = control._post("outcome", (sync, rank, TIMEOUT_S))(TIMEOUT_S)
            assert rank > 1 or wire.decode(data, wire.SyncReport).version == version

    def _pull(self, control: Control, engine: wire.EngineManifest, version: int, began: Any, landed: Any) -> None:
        assert began.wait(TIMEOUT_S)
        sync, _ = control.enter(engine.reader, engine.incarnation, version, TIMEOUT_S)()
        if version == 1:
            assert len(control.offers(engine.reader, engine.incarnation, TIMEOUT_S)[0]) == len(engine.requests)
        links = tuple(
            wire.LinkReport(
                source=one.source, reader=engine.reader, kind=one.kind, seconds=0.1,
                bytes=sum(transfer.nbytes for transfer in one.transfers),
            )
            for one in engine.requests
        )  # fmt: skip
        account = wire.ReaderReport(
            reader=engine.reader, incarnation=engine.incarnation, version=version, bytes=engine.nbytes,
            expected_bytes=engine.nbytes, digest=engine.digest, phases={"transfer": 0.1}, links=links,
        )  # fmt: skip
        assert control.done(account, sync)() == {}
        landed.wait(TIMEOUT_S)

    @property
    def members(self) -> int:
        return len(self.manifests) + len(self.engines)

    @property
    def links(self) -> int:
        return sum(len(engine.requests) for engine in self.engines)

    def of(self, phase: str, method: str) -> int:
        """Bytes of all calls of a method, both ways."""
        return sum(self.counts[phase][method][1:])

    def a_call(self, phase: str, method: str) -> float:
        """Bytes of one call of a method: no member makes it twice in a phase."""
        return self.of(phase, method) / self.counts[phase][method][0]

    def calls(self, phase: str) -> int:
        return sum(one[0] for one in self.counts[phase].values())

    def bytes(self, phase: str, *without: str) -> int:
        return sum(one[1] + one[2] for method, one in self.counts[phase].items() if method not in without)

    def show(self, where: str) -> None:
        print(
            f"\n{len(self.manifests)} source ranks, {len(self.engines)} engine ranks, {self.links:,} links, coordinator {where}"
        )
        for phase, counts in self.counts.items():
            print(
                f"  {phase}: {self.seconds[phase]:.2f} s, {self.calls(phase):,} calls, {self.bytes(phase) / 1e6:.2f} MB"
            )
            for name, one in counts.items():
                each, total = self.a_call(phase, name), self.of(phase, name)
                print(
                    f"    {name:14} {one[0]:5,} x {each / 1e3:8.2f} kB = {total / 1e6:7.2f} MB; a call: {GROWTH[name]}"
                )


def local(sources: int, replicas: int) -> World:
    world = World(sources, replicas)
    control = LocalCounted(Coordinator(GROUP, sources, 600.0))
    try:
        world.run(control, control.tally, syncs=2)
    finally:
        control.close()
    world.show("in a thread")
    return world


def check_growth(worlds: list[World]) -> None:
    for world in worlds:
        sources, readers = len(world.manifests), len(world.engines)
        assert world.calls("join") == sources
        assert world.calls("connect") == 2 * readers + len(world.replicas)
        assert world.calls("first sync") == 4 * sources + 3 * readers  # offers are asked for once
        assert world.calls("later sync") == 3 * sources + 2 * readers
        # what each engine rank reads of all source ranks: what they have in common, and little more for each of them
        assert world.a_call("connect", "sources") <= COMMON + A_SOURCE * sources
        # what each source rank is told after a sync, once there are too many links to tell
        assert world.links <= MAX_TOLD_LINKS or world.a_call("later sync", "outcome") <= SHORT
        for phase in world.counts:
            for method in world.counts[phase]:
                assert world.a_call(phase, method) <= MOST_A_RANK * world.members, (phase, method)
    for small, large in pairwise(worlds):
        grown = large.members / small.members
        # a reader has more links where boxes have more owners, until each of its boxes has another owner
        links = large.links / small.links
        assert links <= 1.5 * grown
        assert large.bytes("join") <= 1.05 * grown * small.bytes("join")
        factor = {"nothing": 1.0, "links": links / grown, "sources": grown, "all links": links}
        for phase in large.counts:
            for method in large.counts[phase]:
                each = large.a_call(phase, method) / small.a_call(phase, method)
                assert each <= 1.1 * factor[GROWTH[method]], (phase, method, each)
        # in all, everything grows with the links, but for what each source rank is told of them while they are few
        for phase, shared in (("connect", ()), ("first sync", ("outcome",)), ("later sync", ("outcome",))):
            assert large.bytes(phase, *shared) <= 1.1 * links * small.bytes(phase, *shared)


@pytest.mark.unit
def test_calls_and_bytes_grow_with_the_members() -> None:
    check_growth([local(32, 2), local(64, 4)])


@pytest.mark.unit
@pytest.mark.thorough
def test_a_hundred_readers_of_hundreds_of_sources() -> None:
    check_growth([local(64, 4), local(128, 8), local(256, 16)])


@pytest.mark.integration
@pytest.mark.thorough
def test_the_same_through_a_ray_actor(ray_cluster: Any) -> None:
    world = World(256, 16)
    opened = open_coordinator(GROUP, world_size=256, create=True, timeout_s=60.0)
    control = RayCounted(GROUP, opened._handle, call_timeout_s=TIMEOUT_S)
    try:
        world.run(control, control.tally, syncs=6)
    finally:
        control.close()
        opened.close()
    world.show("a Ray actor")
    check_growth([world])
