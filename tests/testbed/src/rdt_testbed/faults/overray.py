"""The same promises over real Ray and NIXL: actors that are killed or stopped at random moments, links that fail.

A fault here takes seconds, so there are few; the campaign over Unix sockets is the one that covers every phase. Members are
actors as users have them; the coordinator is the one that rdt makes. Only for a cluster of the test's own.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from typing import Any

import torch

from rdt_core import errors
from rdt_core.errors import RdtError, TransportError
from rdt_core.replica import ModuleReplica, ModuleWorker
from rdt_core.sync import WeightSync
from rdt_core.transport.direct import MemoryTransfer
from rdt_core.transport.prepared import NixlTransfer
from rdt_core.transport.rayobjects import RayTransfer

from ..calm import calm_nixl
from . import channel, model
from .checks import Broken

KINDS = ("kill", "ray.kill", "stop", "fail")
_CALM_S = 90.0


class Rank:
    """A source rank as an actor.

    Args:
        rank: of it.
        world_size: number of source ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        calm_nixl()
        torch.set_num_threads(1)
        self.rank, self.world_size = rank, world_size
        self.source = model.Source(rank, world_size)

    def pid(self) -> int:
        return os.getpid()

    def join(self, group: str, options: dict[str, Any], takeover: bool) -> None:
        self.sync = WeightSync.join(
            group, source=self.source, rank=self.rank, world_size=self.world_size, timeout_s=_CALM_S, takeover=takeover,
            bucket_bytes=20_000, **options,
        )  # fmt: skip

    def connect(self, name: str, workers: list[Any]) -> None:
        replica = ModuleReplica(workers, name=name)
        known = name in self.sync._driver.clients
        (self.sync.reconnect if known else self.sync.attach)(replica, timeout_s=_CALM_S)

    def publish(self, version: int, timeout_s: float) -> dict[str, Any]:
        self.source.fill(version)
        began = time.monotonic()
        found: dict[str, Any] = {"error": "", "message": ""}
        try:
            self.sync.publish(version, timeout_s=timeout_s)
        except Exception as error:
            found["error"], found["message"] = channel.describe(error)
        return {**found, "seconds": time.monotonic() - began}


class Worker(ModuleWorker):
    """An engine rank as an actor.

    Args:
        rank: of it.
        world_size: engine ranks of the replica.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        calm_nixl()
        torch.set_num_threads(1)
        super().__init__(lambda: model.Served(rank, world_size), rank, world_size, model.load)
        self._left = 0
        for kind in (MemoryTransfer, NixlTransfer, RayTransfer):
            kind.post = self._failing(kind.post)  # type: ignore[method-assign]

    def pid(self) -> int:
        return os.getpid()

    def fail_at(self, post: int) -> None:
        """The transfer that is posted as number `post` from now on fails; 0: none does."""
        self._left = post

    def _failing(self, stock: Any) -> Any:
        def run(transfer: Any) -> None:
            self._left -= 1
            if self._left == 0:
                raise TransportError("injected")
            stock(transfer)

        return run

    def serving(self) -> dict[str, Any]:
        try:
            return {"version": self.version(), "digest": model.digest(self.state())}
        except RdtError as error:
            return {"version": self.version(), "digest": "", "refusal": str(error)}


class RayCampaign:
    """A group over Ray: one setup, fault after fault.

    Args:
        group: its name.
        kind: of its links.
        mode: of publishing.
        seed: draws the faults.
        timeout_s: deadline of every wait while faults are injected.
    """

    def __init__(self, group: str, kind: str, mode: str, seed: str, timeout_s: float = 4.0) -> None:
        self.group = group
        self.timeout_s = timeout_s
        self.version = 0
        self.checked = 0
        self.said: list[str] = []
        self._options = {"kinds": (kind,), "mode": mode}
        self._rng = random.Random(seed)
        self._sources = [self._source(rank) for rank in range(2)]
        self._workers = {
            name: [self._worker(rank, ranks) for rank in range(ranks)] for name, ranks in (("a", 1), ("b", 2))
        }
        self._committed = {0}
        self._span_s = 0.5

    def start(self) -> None:
        """Joins, attaches, publishes."""
        self._get([one.join.remote(self.group, self._options, False) for one in self._sources])
        for name, workers in self._workers.items():
            self._get([self._sources[0].connect.remote(name, workers)])
        self._healed()
        began = time.monotonic()
        self._healed()
        self._span_s = time.monotonic() - began

    def fault(self) -> str:
        """Injects one fault into a sync, checks, heals and checks again; returns what it was. Raises Broken."""
        kind = self._rng.choice(KINDS)
        members = [
            "source0",
            "source1",
            "coordinator",
            *(f"{name}/{rank}" for name in self._workers for rank in range(len(self._workers[name]))),
        ]
        if kind == "fail":
            members = [name for name in members if "/" in name]
        name = self._rng.choice(members)
        moment = self._rng.uniform(0, 1.3 * self._span_s)
        what = f"{kind} {name} after {moment:.3f} s"
        actor = self._actor(name)
        pid = self._get([actor.__ray_call__.remote(_pid)])[0]
        if kind == "fail":
            self._get([actor.fail_at.remote(self._rng.randint(1, 3))])
        self.version += 1
        asked = [one.publish.remote(self.version, self.timeout_s) for one in self._sources]
        time.sleep(moment)
        dead = False
        if kind == "kill":
            os.kill(pid, signal.SIGKILL)
            dead = True
        elif kind == "ray.kill":
            import ray

            ray.kill(actor)
            dead = True
        elif kind == "stop":
            os.kill(pid, signal.SIGSTOP)
        try:
            self._outcomes(asked, name, what)
        finally:
            if kind == "stop":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        if kind == "fail":
            self._get([actor.fail_at.remote(0)])
        del actor
        self._serving(what)
        self._heal(name if dead else "", what)
        return what

    def end(self) -> None:
        """Ends every actor."""
        import ray

        for actor in (*self._sources, *(one for workers in self._workers.values() for one in workers)):
            ray.kill(actor)

    def _outcomes(self, asked: list[Any], hit: str, what: str) -> None:
        import ray

        # a rank waits for at most: begin (twice, with a new coordinator), pause, begin, pull, finish, fail, abort, commit
        limit_s = 10 * self.timeout_s + 20.0
        ready, late = ray.wait(asked, num_returns=len(asked), timeout=limit_s)
        late = [one for one in late if hit != f"source{asked.index(one)}"]
        if late:
            raise Broken(f"{what}: source ranks {[asked.index(one) for one in late]} wait after {limit_s:.0f} s")
        told: dict[str, str] = {}
        for rank, one in enumerate(asked):
            if one not in ready:
                continue
            try:
                found = ray.get(one)
            except ray.exceptions.RayActorError:
                continue  # the one that was killed
            self.said.append(found["error"])
            if found["error"] and not issubclass(getattr(errors, found["error"], object), RdtError):
                raise Broken(f"{what}: source rank {rank} was told {found['error']}: {found['message']}")
            if not found["error"] or "is committed" in found["message"]:
                self._committed.add(self.version)
            told[f"source{rank}"] = "" if "is committed, but" in found["message"] else found["error"]
        heard = {name: error for name, error in told.items() if name != hit}
        if hit not in ("coordinator", "source0") and "" in heard.values() and any(heard.values()):
            raise Broken(f"{what}: source ranks disagree: {told}")

    def _serving(self, what: str, version: int | None = None) -> None:
        import ray

        for name, workers in self._workers.items():
            for rank, worker in enumerate(workers):
                try:
                    one = ray.get(worker.serving.remote(), timeout=_CALM_S)
                except ray.exceptions.RayActorError:
                    continue
                if version is not None and one["version"] != version:
                    raise Broken(f"{what}: {name}/{rank} serves {one} instead of version {version}")
                if one["version"] is not None:
                    self.checked += 1
                    if one["digest"] != model.expected(rank, len(workers), one["version"]):
                        raise Broken(f"{what}: {name}/{rank} says version {one['version']} and serves other weights")

    def _heal(self, dead: str, what: str) -> None:
        again = []
        if dead.startswith("source"):
            rank = int(dead.removeprefix("source"))
            self._sources[rank] = self._source(rank)
            again.append(self._sources[rank].join.remote(self.group, self._options, True))
        replicas = [dead.partition("/")[0]] if "/" in dead else list(self._workers) if dead == "source0" else []
        for name in replicas:
            workers = self._workers[name]
            if "/" in dead:
                rank = int(dead.rpartition("/")[2])
                workers[rank] = self._worker(rank, len(workers))
            again.append(self._sources[0].connect.remote(name, workers))
        try:
            self._healed(again)
        except (AssertionError, RdtError) as error:
            raise Broken(f"{what}: the group could not be healed: {error}") from error
        self._serving(f"{what}, healed", self.version)

    def _healed(self, before: list[Any] | None = None) -> None:
        self.version += 1
        asked = [one.publish.remote(self.version, _CALM_S) for one in self._sources]
        self._get(before or [])
        wrong = [found for found in self._get(asked) if found["error"]]
        assert not wrong, wrong
        self._committed.add(self.version)

    def _actor(self, name: str) -> Any:
        import ray

        if name == "coordinator":
            return ray.get_actor(f"rdt.{self.group}", "rdt")
        if name.startswith("source"):
            return self._sources[int(name.removeprefix("source"))]
        replica, _, rank = name.partition("/")
        return self._workers[replica][int(rank)]

    @staticmethod
    def _get(asked: list[Any]) -> list[Any]:
        import ray

        return ray.get(asked, timeout=4 * _CALM_S)

    @staticmethod
    def _source(rank: int) -> Any:
        import ray

        return ray.remote(Rank).options(num_cpus=0, enable_tensor_transport=True).remote(rank, 2)

    @staticmethod
    def _worker(rank: int, world_size: int) -> Any:
        import ray

        return ray.remote(Worker).options(num_cpus=0, enable_tensor_transport=True).remote(rank, world_size)


def _pid(_: Any) -> int:
    return os.getpid()
