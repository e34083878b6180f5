"""Slow links: which are named, which are refused and when, and which never are."""

from __future__ import annotations

import msgspec
import pytest

from rdt_core import rates, wire
from rdt_core.errors import TransportError
from rdt_core.rates import LinkRates, Meter, Moved, check_slow_links

pytestmark = pytest.mark.unit

GB = 1_000_000_000


def node(host: str, gpu: str = "gpu-0") -> wire.NodeMeta:
    device = "cuda" if gpu else "cpu"
    return wire.NodeMeta(node_id="", boot_id=host, hostname=host, pid=7, device=device, device_uuid=gpu)


def manifest(rank: int, where: wire.NodeMeta) -> wire.SourceManifest:
    versions = wire.VersionMeta(rdt="0", wire_major=1, wire_minor=0, ray="", nixl="", torch="", python="")
    return wire.SourceManifest(
        group="g", rank=rank, world_size=9, versions=versions, node=where, mode="live", mode_reason="", tensors=(),
        shards=(), regions=(), kinds=("prepared",),
    )  # fmt: skip


HERE = node("a")
OWNERS = {"device": HERE, "node": node("a", "gpu-1"), "network": node("b", "gpu-2")}


def judged(
    links: LinkRates,
    waited: dict[int, float],
    where: str | wire.NodeMeta = "node",
    *,
    kind: str = "prepared",
    nbytes: int = GB,
    pieces: int = 1,
    is_first: bool = False,
) -> tuple[wire.LinkReport, ...]:
    """One sync in which the reader waited so many seconds for each link."""
    owner = OWNERS[where] if isinstance(where, str) else where
    meter = Meter()
    meter.links = {source: Moved(nbytes, max(seconds, 0.001), seconds, seconds) for source, seconds in waited.items()}
    sources = {source: manifest(source, owner) for source in waited}
    return links.links(meter, sources, dict.fromkeys(waited, kind), lambda source: pieces, is_first=is_first)


@pytest.mark.parametrize("path", OWNERS)
def test_paths(path: str) -> None:
    (link,) = judged(LinkRates("a/0", HERE), {3: 0.01}, path)
    assert (link.path, link.floor, link.waited) == (path, 0.0, 0.01)
    assert rates.path_of(node("a", ""), node("a", "")) == "node"


@pytest.mark.parametrize("path", ["device", "node"])
@pytest.mark.parametrize("kind", ["mapped", "prepared", "ray"])
def test_a_broken_path_is_named_and_then_refused(path: str, kind: str) -> None:
    links = LinkRates("a/0", HERE)
    fast, slow = judged(links, {1: 0.01, 3: 1.82}, path, kind=kind)  # 0.55 GB/s
    assert (fast.floor, slow.floor) == (0.0, 1.0)
    with pytest.raises(TransportError) as caught:
        judged(links, {1: 0.01, 3: 1.82}, path, kind=kind)
    text = str(caught.value)
    assert f"slow link: 3 -> a/0 ({kind}) moved {GB} bytes at 0.55 GB/s" in text
    assert "floor of 1 GB/s in 2 syncs in a row" in text
    assert "process 7 on a" in text
    assert ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY" in text) == (kind != "mapped")
    assert "rdt doctor" in text


def test_a_moment_is_forgiven() -> None:
    links = LinkRates("a/0", HERE)
    for _ in range(3):
        assert judged(links, {3: 9.0})[0].floor == 1.0
        assert judged(links, {3: 0.9})[0].floor == 0.0
        assert judged(links, {3: 9.0})[0].floor == 1.0
        assert judged(links, {3: 3.0}, pieces=100_000)[0].floor == 0.0  # 20 us a piece


def test_refused_until_it_is_fast_again() -> None:
    links = LinkRates("a/0", HERE)
    judged(links, {3: 9.0})
    for _ in range(2):
        with pytest.raises(TransportError, match="below its floor"):
            judged(links, {3: 9.0})
        judged(links, {3: 9.0}, is_first=True)  # the connection that a retry makes: it may be the set-up
    judged(links, {3: 0.1})
    judged(links, {3: 9.0})


def test_the_first_sync_pays_set_up() -> None:
    links = LinkRates("a/0", HERE)
    (link,) = judged(links, {3: 8.0}, is_first=True)
    assert (link.floor, link.waited, link.seconds) == (0.0, 0.0, 8.0)
    judged(links, {3: 8.0})  # the first that counts
    links = LinkRates("a/0", HERE)
    judged(links, {3: 29.8}, nbytes=16 * GB, is_first=True)  # longer than any set-up
    with pytest.raises(TransportError, match="in 2 syncs in a row"):
        judged(links, {3: 29.8}, nbytes=16 * GB)


def test_what_is_never_refused() -> None:
    cases = [
        ({"waited": {3: 9.0}, "nbytes": 63 << 20}, HERE),  # small
        ({"waited": {3: 1.9}, "where": "network"}, HERE),  # an adapter that many links share
        ({"waited": {3: 9.0}, "where": node("a", "")}, HERE),  # bytes on a CPU
        ({"waited": {3: 9.0}}, node("a", "")),  # a reader on a CPU
        ({"waited": {3: 3.0}, "pieces": 100_000}, HERE),  # 30 us a piece
        ({"waited": {3: 3.0}, "pieces": 2_500, "kind": "ray"}, HERE),
    ]
    for case, here in cases:
        links = LinkRates("a/0", here)
        for _ in range(4):
            judged(links, **case)


def test_across_nodes_it_is_named_long_before_it_is_refused() -> None:
    links = LinkRates("a/0", HERE)
    for _ in range(3):
        assert judged(links, {3: 2.0}, "network")[0].floor == 1.0
    judged(links, {3: 11.0}, "network")
    with pytest.raises(TransportError, match=r"0\.09 GB/s, and was below its floor of 0\.1 GB/s.*network adapters"):
        judged(links, {3: 11.0}, "network")


def test_warn_only_names() -> None:
    links = LinkRates("a/0", HERE, "warn")
    for _ in range(4):
        assert judged(links, {3: 9.0})[0].floor == 1.0


@pytest.mark.parametrize("where", [*OWNERS, node("a", "")])
def test_a_number_is_the_floor_of_every_link(where: str | wire.NodeMeta) -> None:
    links = LinkRates("a/0", HERE, 5.0)
    assert [link.floor for link in judged(links, {1: 0.1, 3: 0.3}, where)] == [0.0, 5.0]
    with pytest.raises(TransportError, match="below its floor of 5 GB/s"):
        judged(links, {1: 0.1, 3: 0.3}, where)


def test_all_slow_links_are_counted() -> None:
    links = LinkRates("a/0", HERE)
    judged(links, {1: 3.0, 2: 4.0, 3: 2.0})
    with pytest.raises(TransportError, match=r"slow link: 2 -> a/0 .* and 2 more of its links as well"):
        judged(links, {1: 3.0, 2: 4.0, 3: 2.0})


@pytest.mark.parametrize("value", ["refuse", "warn", 5, 0.25])
def test_settings(value: object) -> None:
    assert check_slow_links(value) == value
    assert msgspec.convert(msgspec.to_builtins(check_slow_links(value)), str | float) == value


@pytest.mark.parametrize("value", ["ignore", "", 0, -1.0, float("inf"), float("nan"), None, True])
def test_settings_that_mean_nothing(value: object) -> None:
    with pytest.raises(TransportError, match="slow_links is"):
        check_slow_links(value)


def side_by_side(links: LinkRates, count: int, each_s: float) -> tuple[wire.LinkReport, ...]:
    """One sync with so many links at once, of which the reader waited `each_s` for all of them."""
    meter = Meter()
    meter.links = {source: Moved(GB, each_s, each_s / count, each_s) for source in range(count)}
    sources = {source: manifest(source, OWNERS["node"]) for source in range(count)}
    kinds = dict.fromkeys(range(count), "prepared")
    return links.links(meter, sources, kinds, lambda source: 1, is_first=False)


@pytest.mark.parametrize("count", [2, 8])
def test_broken_links_side_by_side_are_named_one_by_one_and_not_refused(count: int) -> None:
    links = LinkRates("a/0", HERE)
    for _ in range(3):  # sound links that share a path with other readers' look the same
        told = side_by_side(links, count, GB / 1e9 / 0.55)
        assert {(link.floor, round(link.bytes / 1e9 / link.waited, 2)) for link in told} == {(1.0, 0.55)}


def test_many_sound_links_may_share_a_path() -> None:
    links = LinkRates("a/0", HERE)
    for _ in range(3):  # 256 links of 0.5 GB/s each over a path of 128
        assert {link.floor for link in side_by_side(links, 256, GB / 1e9 / 0.5)} == {0.0}
