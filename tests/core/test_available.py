"""Which link kinds a reader may take: a process whose NIXL would read GPU memory over TCP does not get those that do."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rdt_core import settings, transport, wire

pytestmark = pytest.mark.unit

REASON = "no NVLink is visible"


@dataclass
class Place:
    """Where an owner is, as `available` sees it."""

    device: str = "cuda"
    boot_id: str = "here"
    pid: int = 1


def reason(kind: str, owner: Place, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> str | None:
    refused = settings.refused_reads
    monkeypatch.setattr(settings, "_nvlinks", lambda: 0)
    monkeypatch.setattr(settings, "refused_reads", lambda: refused(environment))
    monkeypatch.setattr(transport, "unavailable", lambda: None)
    mine = wire.NodeMeta(node_id="", boot_id="here", hostname="a", pid=2, device="cuda", device_uuid="GPU-1")
    there = wire.NodeMeta(node_id="", boot_id=owner.boot_id, hostname="a", pid=owner.pid, device=owner.device)
    versions = wire.VersionMeta(rdt="0", wire_major=1, wire_minor=0, ray="", nixl="", torch="", python="")
    manifest = wire.SourceManifest(
        group="g", rank=0, world_size=1, versions=versions, node=there, mode="live", mode_reason="", tensors=(),
        shards=(), regions=(), kinds=transport.kinds,
    )  # fmt: skip
    return transport.available(kind, mine, manifest)


@pytest.mark.parametrize("kind", ["prepared", "ray"])
def test_reads_over_tcp_are_not_taken(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = reason(kind, Place(), monkeypatch, {})
    assert found is not None
    assert REASON in found
    assert f"start the process with {settings.GET_ZCOPY}=on" in found


@pytest.mark.parametrize("kind", ["mapped", "prepared", "ray"])
def test_what_is_not_concerned(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        (Place(device="cpu"), {}),
        (Place(boot_id="elsewhere"), {}),
        (Place(), {settings.GET_ZCOPY: "on"}),
        (Place(), {settings.GET_ZCOPY: "off"}),  # somebody decided; the floor of slow links is left
    ]
    for owner, environment in cases:
        with monkeypatch.context() as patch:
            assert reason(kind, owner, patch, environment) is None
