"""One contract for every link kind, between the kinds of processes that the product runs in.

The owner and the reader are Ray actors or the plain driver process; offers and object references travel through a third
actor, as they do in a sync group. Byte equality is judged here by numpy, never by the code under test.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import ray
import torch

from rdt_core import memory, transport, wire
from rdt_core.errors import DeadlineError, RdtError, TransportError
from rdt_core.transport import Copies, LocalExchange, Region

pytestmark = pytest.mark.integration

ARENA_BYTES = 4 << 20
SHARED_BYTES = 300_007  # odd, so that nothing is aligned by luck
DESTINATION_BYTES = (5 << 20, 65_539)
CROSSING = ("mapped", "prepared", "ray")
PATIENCE_S = 30.0


def copies(*rows: tuple[int, int, int, int, int, int, int, int]) -> Copies:
    """Copies from tuples in the order of the columns of `Copies`."""
    return Copies(*np.array(rows, dtype=np.int64).reshape(-1, 8).T.copy())


def _many(count: int, size: int) -> Copies:
    order = np.random.default_rng(3).permutation(count)
    gap = np.arange(count, dtype=np.int64) * (size + 3)
    zero, one = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.int64)
    return Copies(zero, gap[order], zero, zero, gap + 5, zero, one, one * size)


CASES: dict[str, Copies] = {
    # region, offset, pitch, destination, offset, pitch, rows, row bytes
    "contiguous": copies((0, 0, 0, 0, 4096, 0, 1, ARENA_BYTES)),
    "strided": copies(
        (0, 64, 4096, 0, 128, 1024, 700, 512),  # gather: wide pitch to narrow pitch
        (0, 1, 333, 0, 1_000_003, 777, 300, 101),  # nothing aligned
        (0, 8, 512, 1, 0, 512, 100, 512),  # rows that touch on both sides
    ),
    "tiny": copies((0, 17, 0, 1, 65_538, 0, 1, 1), (7, SHARED_BYTES - 3, 0, 1, 1, 0, 1, 3), (0, 16, 0, 1, 8, 0, 1, 8)),
    "neighbours": copies(*((0, 100 * i, 0, 0, 50 + 100 * i, 0, 1, 100) for i in range(64))),
    "regions": copies((7, 0, 0, 0, 1, 0, 1, SHARED_BYTES), (0, 5, 0, 1, 0, 0, 1, 65_539)),
    "many": _many(4096, 61),
    "nothing": copies(),
}


def expected(case: Copies, regions: dict[int, np.ndarray], fill: int) -> list[np.ndarray]:
    """What the destinations hold after `case`, byte by byte."""
    result = [np.full(size, fill, dtype=np.uint8) for size in DESTINATION_BYTES]
    for i in range(len(case)):
        for row in range(int(case.rows[i])):
            source = int(case.source_offset[i] + row * case.source_pitch[i])
            target = int(case.destination_offset[i] + row * case.destination_pitch[i])
            size = int(case.row_bytes[i])
            piece = regions[int(case.source_region[i])][source : source + size]
            result[int(case.destination[i])][target : target + size] = piece
    return result


def contents(region: int, seed: int) -> np.ndarray:
    """The bytes that a region holds for `seed`."""
    size = ARENA_BYTES if region == 0 else SHARED_BYTES
    return np.random.default_rng([region, seed]).integers(0, 256, size, dtype=np.uint8)


def transfer_of(case: Copies) -> wire.Transfer:
    """The message in which a reader asks for `case`."""
    columns = (case.source_region, case.source_offset, case.source_pitch, case.rows, case.row_bytes)
    return wire.Transfer(
        chunk=0,
        round=0,
        count=len(case),
        columns=b"".join(column.astype("<i8").tobytes() for column in columns),
        nbytes=case.nbytes,
    )


VERSIONS = wire.VersionMeta(rdt="0", wire_major=1, wire_minor=0, ray="", nixl="", torch="", python="")


class Owner:
    """A source rank with two regions: an arena, and a parameter moved to shared memory."""

    def __init__(self, exchange: LocalExchange | None = None, tls: str = "") -> None:
        if tls:
            os.environ["UCX_TLS"] = tls  # before this process's agent is made
        self.arena = memory.Arena(ARENA_BYTES)
        self.parameter = torch.zeros(SHARED_BYTES, dtype=torch.uint8)
        memory.share(self.parameter.untyped_storage())
        self.regions = {0: Region(0, self.arena.tensor, self.arena), 7: Region(7, self.parameter)}
        self.exchange = exchange
        self.endpoints: dict[str, Any] = {}

    def manifest(self, kind: str) -> bytes:
        endpoint = self.endpoints[kind] = transport.make_source_endpoint(kind, exchange=self.exchange)
        regions = tuple(endpoint.export(region) for region in self.regions.values())
        name, agent = endpoint.agent()
        return wire.encode(
            wire.SourceManifest(
                group="g", rank=0, world_size=1, versions=VERSIONS, node=transport.node(), mode="live", mode_reason="",
                tensors=(), shards=(), regions=regions, kinds=(kind,), agent=agent, agent_name=name,
            )
        )  # fmt: skip

    def offer(self, kind: str, mailbox: Any, key: str, names: list[str]) -> None:
        refs = self.endpoints[kind].offer(tuple(transfer_of(CASES[name]) for name in names), self.regions)
        offer = wire.LinkOffer(
            reader="r/0", incarnation="1", source=0, digest="", refs=len(refs),
            agent=self.endpoints[kind].agent()[1],
        )  # fmt: skip
        if mailbox is None:
            self.local_offer = (wire.encode(offer), refs)
        else:
            ray.get(mailbox.put.remote(key, wire.encode(offer), refs))

    def fill(self, seed: int) -> None:
        for region in self.regions.values():
            region.tensor.numpy()[:] = contents(region.id, seed)

    def untouched(self, seed: int) -> bool:
        return all(np.array_equal(r.tensor.numpy(), contents(r.id, seed)) for r in self.regions.values())

    def pid(self) -> int:
        return os.getpid()

    def close(self, kind: str) -> None:
        self.endpoints[kind].close()
        self.endpoints[kind].close()


class Reader:
    """An engine rank with two destinations."""

    def __init__(self, exchange: LocalExchange | None = None, tls: str = "") -> None:
        if tls:
            os.environ["UCX_TLS"] = tls
        self.exchange = exchange
        self.targets = [torch.zeros(size, dtype=torch.uint8) for size in DESTINATION_BYTES]
        self.endpoints: dict[str, Any] = {}
        self.transfers: dict[tuple[str, str], Any] = {}

    def connect(self, kind: str, manifest: bytes, offer: bytes, refs: list[Any]) -> str | None:
        source = wire.decode(manifest, wire.SourceManifest)
        reason = transport.available(kind, transport.node(), source)
        if reason is not None:
            return reason
        endpoint = self.endpoints[kind] = transport.make_reader_endpoint(kind, exchange=self.exchange)
        for target in self.targets:
            endpoint.register(target)
        endpoint.connect(source, wire.decode(offer, wire.LinkOffer), refs)
        return None

    def connect_from(self, kind: str, manifest: bytes, mailbox: Any, key: str) -> str | None:
        offer, refs = ray.get(mailbox.get.remote(key))
        return self.connect(kind, manifest, offer, refs)

    def prepare(self, kind: str, index: int, name: str) -> int:
        transfer = self.endpoints[kind].prepare(index, CASES[name], self.targets)
        self.transfers[kind, name] = transfer
        return int(transfer.nbytes)

    def move(self, kind: str, name: str, fill: int) -> list[np.ndarray]:
        for target in self.targets:
            target.fill_(fill)
        transfer = self.transfers[kind, name]
        transfer.post()
        transfer.wait(time.monotonic() + PATIENCE_S)
        return [target.numpy().copy() for target in self.targets]

    def attempt(self, kind: str, name: str, patience_s: float) -> tuple[str, str, float]:
        """Class and text of the error of one move, and the seconds it took."""
        started = time.monotonic()
        try:
            self.transfers[kind, name].post()
            self.transfers[kind, name].wait(started + patience_s)
        except RdtError as error:
            return type(error).__name__, str(error), time.monotonic() - started
        return "", "", time.monotonic() - started

    def refused(self, kind: str, index: int, case: Copies) -> str:
        """The text of the error that `prepare` raises."""
        with pytest.raises(TransportError) as caught:
            self.endpoints[kind].prepare(index, case, self.targets)
        return str(caught.value)

    def misuse(self, kind: str, index: int, name: str) -> list[str]:
        """Errors of a wait without a post, two posts, and a post after release; and release twice."""
        transfer = self.endpoints[kind].prepare(index, CASES[name], self.targets)
        texts = []
        with pytest.raises(TransportError) as caught:
            transfer.wait(time.monotonic() + PATIENCE_S)
        texts.append(str(caught.value))
        transfer.post()
        with pytest.raises(TransportError) as caught:
            transfer.post()
        texts.append(str(caught.value))
        transfer.wait(time.monotonic() + PATIENCE_S)
        transfer.release()
        transfer.release()
        with pytest.raises(TransportError) as caught:
            transfer.post()
        texts.append(str(caught.value))
        return texts

    def close(self, kind: str) -> None:
        self.endpoints[kind].close()
        self.endpoints[kind].close()


class Mailbox:
    """Carries offers and references as a coordinator does: an actor that knows nothing of tensors."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[bytes, list[Any]]] = {}

    def put(self, key: str, offer: bytes, refs: list[Any]) -> None:
        self.kept[key] = (offer, refs)

    def get(self, key: str) -> tuple[bytes, list[Any]]:
        return self.kept[key]


@dataclass
class Here:
    """Calls an object of this process the way `There` calls an actor."""

    target: Any

    def __call__(self, method: str, *arguments: Any) -> Any:
        return getattr(self.target, method)(*arguments)


@dataclass
class There:
    """Calls an actor and waits."""

    target: Any

    def __call__(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self.target, method).remote(*arguments), timeout=90)


@pytest.fixture(scope="module")
def cluster(ray_cluster: Any) -> Any:
    # workers cannot import this file
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return ray.remote(num_cpus=0)(Mailbox).remote()


def actor(kind: type, **arguments: Any) -> There:
    return There(ray.remote(num_cpus=0, enable_tensor_transport=True)(kind).remote(**arguments))


# first in the file: each process that has a NIXL agent keeps a core busy, so they are made and ended here, then others
@pytest.mark.parametrize("tls", ["", "tcp,self"], ids=["default", "tcp"])
def test_owner_that_stops_or_dies_is_noticed_in_time(cluster: Any, tls: str) -> None:
    """Over sockets a stopped owner answers nothing (DeadlineError); a dead one is an error for every kind."""
    owner, reader = actor(Owner, tls=tls), actor(Reader, tls=tls)
    kinds = CROSSING if not tls else ("prepared", "ray")
    owner("fill", 1)
    for kind in kinds:
        manifest = owner("manifest", kind)
        owner("offer", kind, cluster, f"victim-{kind}-{tls}", list(CASES))
        assert reader("connect_from", kind, manifest, cluster, f"victim-{kind}-{tls}") is None
        for name in ("contiguous", "strided"):
            reader("prepare", kind, list(CASES).index(name), name)
        assert reader("move", kind, "contiguous", 0)[0][4096] == contents(0, 1)[0]
    pid = owner("pid")
    for kind in kinds if tls else ():
        os.kill(pid, signal.SIGSTOP)
        try:
            error, text, seconds = reader("attempt", kind, "strided", 2.0)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert error == DeadlineError.__name__, (kind, error, text)
        assert "source rank 0" in text
        assert seconds < 5
    ray.kill(owner.target)
    gone = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < gone:
        time.sleep(0.05)
    for kind in kinds:
        error, text, seconds = reader("attempt", kind, "contiguous", 10.0)
        assert error in (TransportError.__name__, DeadlineError.__name__), (kind, error, text)
        assert "source rank 0" in text
        assert str(CASES["contiguous"].nbytes) in text
        assert seconds < 12
    ray.kill(reader.target)


@pytest.fixture(scope="module")
def sides(cluster: Any) -> Iterator[dict[str, There | Here]]:
    owner, reader = actor(Owner), actor(Reader)
    yield {
        "owner actor": owner,
        "reader actor": reader,
        "owner driver": Here(Owner()),
        "reader driver": Here(Reader()),
    }
    ray.kill(owner.target)
    ray.kill(reader.target)


@dataclass
class Link:
    """One connected pair."""

    kind: str
    owner: There | Here
    reader: There | Here

    def index(self, name: str) -> int:
        return list(CASES).index(name)


PAIRS = [("local", "here", "here")] + [
    (kind, owner, reader)
    for kind in CROSSING
    for owner, reader in (("actor", "actor"), ("actor", "driver"), ("driver", "actor"))
]


@pytest.fixture(scope="module", params=PAIRS, ids=["-".join(pair) for pair in PAIRS])
def link(request: pytest.FixtureRequest, cluster: Any, sides: dict[str, There | Here]) -> Any:
    kind, owner_place, reader_place = request.param
    if kind == "local":
        exchange = LocalExchange()
        owner, reader = Here(Owner(exchange)), Here(Reader(exchange))
        manifest = owner("manifest", kind)
        owner("offer", kind, None, "", list(CASES))
        assert reader("connect", kind, manifest, *owner.target.local_offer) is None
    else:
        owner, reader = sides[f"owner {owner_place}"], sides[f"reader {reader_place}"]
        manifest = owner("manifest", kind)
        key = "-".join(request.param)
        owner("offer", kind, cluster, key, list(CASES))
        assert reader("connect_from", kind, manifest, cluster, key) is None
    made = Link(kind, owner, reader)
    yield made
    reader("close", kind)
    owner("close", kind)


@pytest.mark.parametrize("name", list(CASES))
def test_bytes_land_and_are_fresh_each_time(link: Link, name: str) -> None:
    assert link.reader("prepare", link.kind, link.index(name), name) == CASES[name].nbytes
    for seed in (1, 2, 2):
        link.owner("fill", seed)
        fill = 200 + seed
        landed = link.reader("move", link.kind, name, fill)
        wanted = expected(CASES[name], {region: contents(region, seed) for region in (0, 7)}, fill)
        for found, want in zip(landed, wanted, strict=True):
            assert np.array_equal(found, want)
        assert link.owner("untouched", seed)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (copies((0, 1, 0, 0, 0, 0, 1, ARENA_BYTES)), f"region of {ARENA_BYTES} bytes"),
        (copies((0, 0, 1 << 40, 0, 0, 64, 2, 64)), f"region of {ARENA_BYTES} bytes"),
        (copies((0, 0, 1 << 62, 0, 0, 64, 5, 64)), f"region of {ARENA_BYTES} bytes"),
        (copies((0, -1, 0, 0, 0, 0, 1, 8)), "region of"),
        (copies((3, 0, 0, 0, 0, 0, 1, 8)), "reads a region that is not among"),
        (copies((0, 0, 0, 1, 65_536, 0, 1, 4)), "destination of 65539 bytes"),
        (copies((0, 0, 0, 2, 0, 0, 1, 4)), "destination that is not one of 2"),
        (copies((0, 0, 64, 0, 0, 32, 4, 64)), "rows that overlap"),
        (copies((0, 0, 0, 0, 0, 0, 1, 0)), "has no bytes"),
    ],
)  # fmt: skip
def test_copy_out_of_bounds_is_refused(link: Link, case: Copies, text: str) -> None:
    assert text in link.reader("refused", link.kind, 0, case)


def test_misuse_is_refused_and_release_is_idempotent(link: Link) -> None:
    waited, twice, released = link.reader("misuse", link.kind, link.index("tiny"), "tiny")
    assert "was not posted" in waited
    assert "posted twice" in twice
    assert "after its release" in released


def test_kind_that_is_not_served_says_so(link: Link) -> None:
    source = wire.decode(link.owner("manifest", link.kind), wire.SourceManifest)
    for kind in transport.kinds:
        if kind != link.kind:
            reason = transport.available(kind, transport.node(), source)
            assert reason is not None
            assert repr(kind) in reason
