"""The row below which packing pays: what a measurement makes of it, and where none is made."""

from __future__ import annotations

import pytest
import torch

from rdt_core import memory, wire
from rdt_core.transport import LocalExchange, Region, make_reader_endpoint, make_source_endpoint, node, thresholds
from rdt_core.transport.thresholds import (
    Measured,
    Threshold,
    choose,
    is_far_off,
    is_unknown,
    measure,
    place_of,
    reports,
)

pytestmark = pytest.mark.unit

KB, MB = 1 << 10, 1 << 20
PLACE = ("host", "cuda", "GPU-1")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "_MEASURED", {})


@pytest.mark.parametrize(
    ("direct_us", "packed_us", "gb", "expected"),
    [
        (10.0, 0.46, 1880, 4 * MB),  # cuda_ipc on one H200
        (7.0, 0.46, 1880, 2 * MB),  # NVLink
        (5.0, 0.3, 10, 64 * KB),  # a CPU
        (0.5, 0.46, 1880, 64 * KB),  # a piece costs less than packing it
        (0.0, 0.46, 1880, 64 * KB),
        (500.0, 0.46, 1880, 16 * MB),
    ],
)
def test_what_follows_from_a_measurement(direct_us: float, packed_us: float, gb: float, expected: int) -> None:
    assert Measured(direct_us * 1e-6, packed_us * 1e-6, gb * 1e9).threshold == expected


def test_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("prepared", "cuda", PLACE) == Threshold(4 * MB, "default")
    assert choose("prepared", "cpu", PLACE) == Threshold(64 * KB, "default")
    assert choose("prepared", "cuda", PLACE, 5) == Threshold(5, "set")
    assert is_unknown("prepared", PLACE)
    assert not is_unknown("prepared", PLACE, 5)
    assert not is_unknown("mapped", PLACE)
    monkeypatch.setitem(thresholds._MEASURED, PLACE, Measured(1e-6, 0.2e-6, 2000e9))
    assert choose("prepared", "cuda", PLACE) == Threshold(256 * KB, "measured")
    assert choose("prepared", "cuda", PLACE, 5) == Threshold(5, "set")
    assert choose("mapped", "cuda", PLACE) == Threshold(0, "default")
    assert choose("ray", "cuda", PLACE) == Threshold(8 * MB, "default")
    assert not is_unknown("prepared", PLACE)
    monkeypatch.setitem(thresholds._MEASURED, PLACE, None)
    assert choose("prepared", "cuda", PLACE) == Threshold(4 * MB, "default")
    assert not is_unknown("prepared", PLACE)


def test_when_a_plan_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    used = Threshold(4 * MB, "default")
    assert not is_far_off(used, "prepared", PLACE)
    monkeypatch.setitem(thresholds._MEASURED, PLACE, Measured(7e-6, 0.46e-6, 1880e9))  # 2 MiB
    assert not is_far_off(used, "prepared", PLACE)
    monkeypatch.setitem(thresholds._MEASURED, PLACE, Measured(1e-6, 0.2e-6, 2000e9))  # 256 KiB
    assert is_far_off(used, "prepared", PLACE)
    assert not is_far_off(Threshold(4 * MB, "set"), "prepared", PLACE)
    assert not is_far_off(Threshold(0, "default"), "mapped", PLACE)
    assert not is_far_off(choose("prepared", "cuda", PLACE), "prepared", PLACE)


def link(nbytes: int, scratch: torch.Tensor) -> tuple[object, wire.SourceManifest]:
    exchange = LocalExchange()
    source, reader = make_source_endpoint("local", exchange=exchange), make_reader_endpoint("local", exchange=exchange)
    arena = memory.Arena(nbytes)
    versions = wire.VersionMeta(rdt="0", wire_major=1, wire_minor=0, ray="", nixl="", torch="", python="")
    manifest = wire.SourceManifest(
        group="g", rank=0, world_size=1, versions=versions, node=node(), mode="live", mode_reason="", tensors=(),
        shards=(), regions=(source.export(Region(0, arena.tensor, arena)),), kinds=("local",),
    )  # fmt: skip
    reader.register(scratch)
    reader.connect(manifest, wire.LinkOffer(reader="a/0", incarnation="1", source=0, digest=""), [])
    return reader, manifest


def test_a_link_is_measured_once() -> None:
    scratch = torch.full((thresholds.SCRATCH_BYTES,), 7, dtype=torch.uint8)
    reader, manifest = link(MB, scratch)
    place = place_of(node(), manifest.node)
    assert place == (manifest.node.boot_id, "cpu", "cpu")
    found = measure(reader, manifest, place, scratch)
    assert found is not None
    assert 0 <= found.direct_s < 1e-3
    assert 0 <= found.packed_s < 1e-3
    assert found.copied > 1e7
    reader.close()
    assert measure(reader, manifest, place, scratch) is found  # a closed link could not be measured again
    assert not scratch.any()  # it was the owner's bytes that were read


def test_an_owner_with_little_is_not_measured() -> None:
    scratch = torch.zeros(thresholds.SCRATCH_BYTES, dtype=torch.uint8)
    reader, manifest = link(1000, scratch)
    place = place_of(node(), manifest.node)
    assert measure(reader, manifest, place, scratch) is None
    assert not is_unknown("prepared", place)
    assert choose("prepared", "cpu", place).how == "default"


def test_a_path_that_is_broken_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = torch.zeros(thresholds.SCRATCH_BYTES, dtype=torch.uint8)
    reader, manifest = link(MB, scratch)
    place = place_of(node(), manifest.node)
    monkeypatch.setattr(thresholds, "_read", lambda endpoint, region, scratch, count, nbytes: count * 1e-3)
    assert measure(reader, manifest, place, scratch) is None
    assert choose("prepared", "cpu", place).how == "default"


def test_links_that_are_alike_are_told_as_one() -> None:
    used = {0: Threshold(4 * MB, "default"), 3: Threshold(4 * MB, "default"), 5: Threshold(MB, "measured")}
    told = reports({**used, 7: Threshold(0, "default")}, {0: "prepared", 3: "prepared", 5: "prepared", 7: "mapped"})
    assert [(one.kind, one.bytes, one.how, one.links) for one in told] == [
        ("mapped", 0, "default", 1),
        ("prepared", MB, "measured", 1),
        ("prepared", 4 * MB, "default", 2),
    ]
