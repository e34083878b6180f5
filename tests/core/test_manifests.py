"""The manifests of all source ranks as one message: what several say is in it once, and what comes out is what went in."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from rdt_core import wire
from rdt_core.errors import WireError
from rdt_core.manifests import join, split
from rdt_core.plan.cluster import Cluster, seat
from rdt_core.plan.trainers import make_manifests
from rdt_core.shapes import config_of, tensors_of
from rdt_core.trainers import FsdpLayout, Layout, MegatronLayout
from rdt_testbed.group import source

pytestmark = pytest.mark.unit


def made(layout: Layout, model: str = "tiny-moe") -> list[wire.SourceManifest]:
    seats = seat(Cluster(), layout.ranks, 1, 1, "separate")
    config = config_of(model)
    return make_manifests(layout, tensors_of(config), config, [gpu.meta() for gpu in seats.sources])


LAYOUTS = [
    FsdpLayout(1), FsdpLayout(5), MegatronLayout(8, tp=2, pp=2), MegatronLayout(8, tp=2, pp=2, ep=2), MegatronLayout(16, ep=4),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_comes_out_is_what_went_in(layout: Layout) -> None:
    manifests = made(layout)
    assert split(join(manifests)) == manifests


def test_fields_that_only_some_ranks_have_stay_theirs() -> None:
    manifests = [source(0, 3), source(1, 3, rounds=2, mode="bucket"), source(2, 3, agent=b"a\x00b", ignore=("head",))]
    assert split(join(manifests)) == manifests
    assert split(join([])) == []


def test_replicas_cost_what_they_alone_have() -> None:
    sizes = [len(join(made(MegatronLayout(ranks, tp=2, pp=2, ep=2)))) for ranks in (8, 16, 32)]
    plain = [sum(len(wire.encode(one)) for one in made(MegatronLayout(ranks, tp=2, pp=2, ep=2))) for ranks in (8, 32)]
    assert plain[1] > 3.9 * plain[0]
    assert sizes[2] < 1.5 * sizes[0]
    assert sizes[0] < plain[0] / 4


def test_lists_are_shared_by_those_who_have_the_same() -> None:
    manifests = split(join(made(MegatronLayout(16, tp=2, pp=2))))
    assert manifests[0].shards is manifests[4].shards
    assert manifests[0].shards is not manifests[1].shards


@pytest.mark.parametrize("damage", ["cut", "flipped", "trailing", "no zlib", "empty"])
def test_damage_is_refused(damage: str) -> None:
    data = join([source(0, 1)])
    middle = len(data) // 2
    damaged = {
        "cut": data[:-3],
        "flipped": data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :],
        "trailing": data + b"x",
        "no zlib": b"x" * 40,
        "empty": b"",
    }[damage]
    with pytest.raises(WireError, match="manifests of source ranks"):
        split(damaged)


def test_what_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = join([source(0, 1)])
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", len(zlib.decompress(data)) - 1)
    with pytest.raises(WireError, match="cut on the way, or are too many"):
        split(data)


@pytest.mark.parametrize("change", [{"tensors": 7}, {"shards": 7}, {"tensors": -1}, {"shards": -1}])
def test_lists_that_are_not_there_are_refused(change: dict[str, int]) -> None:
    plain = msgspec.msgpack.decode(zlib.decompress(join([source(0, 1)]))[:-4])
    plain["ranks"][0] |= change
    with pytest.raises(WireError, match="a list or a tensor that is not there"):
        split(zlib.compress(wire.sealed(msgspec.msgpack.encode(plain))))


@pytest.mark.parametrize("places", [b"\x09\x00\x00\x00", b"\xff\xff\xff\xff", b"\x00"])
def test_tensors_that_are_not_there_are_refused(places: bytes) -> None:
    plain = msgspec.msgpack.decode(zlib.decompress(join([source(0, 1)]))[:-4])
    plain["lists"][0] = places
    with pytest.raises(WireError, match="a list or a tensor that is not there"):
        split(zlib.compress(wire.sealed(msgspec.msgpack.encode(plain))))


def test_a_manifest_that_contradicts_itself_is_refused() -> None:
    plain = msgspec.msgpack.decode(zlib.decompress(join(made(FsdpLayout(2))))[:-4])
    plain["lists"] = [places[:4] for places in plain["lists"]]
    with pytest.raises(WireError):
        split(zlib.compress(wire.sealed(msgspec.msgpack.encode(plain))))
