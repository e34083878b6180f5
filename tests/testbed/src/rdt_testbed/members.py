"""Members of a sync group that follow the protocol and move no bytes: what a coordinator sees of a real group.

`Trainer` is a source rank, `Reader` an engine rank of a replica of one. Both work in a thread, an actor or a program of
their own, over any control.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rdt_core import wire
from rdt_core.control import Control
from rdt_core.rendezvous import ensure_ray, open_coordinator

from .group import GROUP, engine, offer, report, source, token

WAIT_S = 60.0


class Trainer:
    """A source rank.

    Args:
        control: of the group.
        rank: source rank.
        world_size: number of source ranks.
    """

    def __init__(self, control: Control, rank: int, world_size: int) -> None:
        self.control = control
        self.rank = rank
        control.join(source(rank, world_size), token(rank))

    def publish(self, version: int, replicas: Sequence[str], drive: Callable[[int], object] | None) -> wire.SyncReport:
        """Takes part in one sync. `drive` makes the engine ranks pull the version; only rank 0 has one."""
        control, rank = self.control, self.rank
        sync, requests, _ = control.begin(rank, token(rank), version, replicas if drive else None, WAIT_S)
        with ThreadPoolExecutor(1) as pool:
            driven = pool.submit(drive, version) if drive else None
            control.offer(rank, sync, [offer(one) for one in requests])
            control.published(rank, sync, 0, 0, WAIT_S)
            if driven is None:
                return control.outcome(sync, rank, WAIT_S)
            driven.result(WAIT_S)
        return control.commit(sync, rank, 0.5, {"pull": 0.25}, timeout_s=WAIT_S)


class Reader:
    """The only engine rank of a replica.

    Args:
        control: of the group.
        replica: the replica's name.
    """

    def __init__(self, control: Control, replica: str) -> None:
        self.control = control
        self.name = f"{replica}/0"
        epoch, manifests = control.sources(WAIT_S)
        control.connect(engine(replica, 0, 1, sources=len(manifests)), epoch)

    def pull(self, version: int) -> list[int]:
        """Takes part in the running sync. Returns the source ranks that offered."""
        sync, _ = self.control.enter(self.name, "first", version, WAIT_S)()
        offers, _ = self.control.offers(self.name, "first", WAIT_S)
        self.control.done(report(self.name, version), sync)()
        return [one.source for one in offers]


def main(address: str, namespace: str, rank: int, world_size: int, versions: int) -> None:
    """A trainer's program: a driver of a Ray job of its own, in a namespace of its own."""
    ensure_ray(address, namespace="elsewhere")
    create = rank == 0
    control = open_coordinator(GROUP, namespace=namespace, world_size=world_size, create=create, timeout_s=WAIT_S)
    trainer = Trainer(control, rank, world_size)
    print("joined", flush=True)
    for version in range(1, versions + 1):
        print(trainer.publish(version, (), None).version, flush=True)
    if create:
        time.sleep(WAIT_S)
