"""Membership: who may join, what the group refuses, and when plans become stale."""

from __future__ import annotations

import pytest

from rdt_core import wire
from rdt_core.errors import CoverageError, MembershipError, VersionError, WireError
from rdt_core.members import Members
from rdt_testbed.group import GROUP, NODE, TENSORS, VERSIONS, engine, request, source, token

pytestmark = pytest.mark.unit


def members(world_size: int = 2, joined: int | None = None) -> Members:
    group = Members(GROUP, world_size)
    for rank in range(world_size if joined is None else joined):
        group.join(wire.encode(source(rank, world_size)), token(rank))
    return group


def join(group: Members, rank: int, /, by: str | None = None, **changes: object) -> int | None:
    return group.join(wire.encode(source(rank, group.world_size, **changes)), token(rank) if by is None else by)


def changed(**fields: object) -> tuple[wire.TensorMeta, ...]:
    second = {"name": "model.norm.weight", "shape": (4,), "dtype": "bfloat16"} | fields
    return TENSORS[0], wire.TensorMeta(**second)


def test_two_joins_under_one_rank_name_both_processes() -> None:
    group = members(2)
    other = wire.NodeMeta(node_id="n1", boot_id="b1", hostname="host-b", pid=22)
    with pytest.raises(MembershipError, match=r"two joins under one rank.*process 11 on host-a.*process 22 on host-b"):
        join(group, 1, by="stranger", node=other)
    assert group.sources[1].token == token(1)


def test_another_world_size_group_or_wire_format_is_refused() -> None:
    group = Members(GROUP, 2)
    with pytest.raises(MembershipError, match=r"world of 3.*opened for 2"):
        group.join(wire.encode(source(0, 3)), token(0))
    with pytest.raises(MembershipError, match=r"belongs to group 'other'.*'policy'"):
        join(group, 0, group="other")
    newer = wire.VersionMeta(
        rdt="9.0", wire_major=wire.WIRE_MAJOR + 1, wire_minor=0, ray="", nixl="", torch="", python=""
    )
    with pytest.raises(
        VersionError, match=rf"wire format {wire.WIRE_MAJOR + 1}\.0 \(rdt 9\.0\).*needs {wire.WIRE_MAJOR}"
    ):
        join(group, 0, versions=newer)
    with pytest.raises(VersionError, match="engine rank a/0"):
        group.connect(wire.encode(engine("a", 0, 1, versions=newer)), None)
    with pytest.raises(MembershipError, match="engine rank a/0 belongs to group 'other'"):
        group.connect(wire.encode(engine("a", 0, 1, group="other")), None)
    assert not group.sources
    assert not group.replicas


def test_a_newer_minor_version_is_let_in() -> None:
    group = Members(GROUP, 1)
    minor = wire.VersionMeta(
        **{name: getattr(VERSIONS, name) for name in VERSIONS.__struct_fields__} | {"wire_minor": 99}
    )
    assert join(group, 0, versions=minor) is None
    assert group.joined.is_open


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        (changed(dtype="float32"), r"'model.norm.weight' \[4\] float32 and source rank 0 .* bfloat16"),
        (changed(shape=(5,)), r"'model.norm.weight' \[5\] bfloat16 and source rank 0 'model.norm.weight' \[4\]"),
    ],
)
def test_ranks_that_contradict_one_another_about_a_tensor_are_refused(
    tensors: tuple[wire.TensorMeta, ...], expected: str
) -> None:
    group = members(2, joined=1)
    with pytest.raises(CoverageError, match=expected):
        join(group, 1, tensors=tensors)
    assert 1 not in group.sources
    assert join(group, 1) is None


def test_ranks_declare_what_they_know() -> None:
    group = members(2, joined=1)
    more = wire.TensorMeta(name="model.other", shape=(2,), dtype="int8")
    assert join(group, 1, tensors=(more, TENSORS[1])) is None
    assert group.joined.is_open


def test_what_a_rank_declared_counts_until_it_leaves_or_declares_anew() -> None:
    group = members(2, joined=1)
    other = changed(shape=(5,))
    join(group, 1, tensors=TENSORS[1:])
    with pytest.raises(CoverageError, match="source rank 1"):
        join(group, 0, tensors=other)
    with pytest.raises(CoverageError, match="source rank 0"):  # what rank 0 declared before still counts
        join(group, 1, tensors=other)
    group.leave(1, token(1))
    assert join(group, 0, tensors=other) == 0
    with pytest.raises(CoverageError, match="source rank 0"):
        join(group, 1, tensors=TENSORS[1:])


def test_a_lone_rank_may_declare_another_model() -> None:
    group = members(1)
    assert join(group, 0, tensors=TENSORS[:1]) == 0
    group.leave(0, token(0))
    assert join(group, 0) == 0


def test_only_a_manifest_that_takes_anothers_place_advances_the_epoch() -> None:
    group = members(2)
    assert group.epoch == 0
    assert join(group, 0) is None
    assert group.epoch == 0
    assert join(group, 0, mode="snapshot") == 0
    assert group.epoch == 1
    assert group.leave(1, token(1))
    assert group.joined.missing == (1,)
    assert join(group, 1, by="the next process") == 1
    assert group.epoch == 2
    assert group.joined.is_open


def test_leaving_needs_the_token_and_membership_is_optional() -> None:
    group = members(2, joined=1)
    with pytest.raises(MembershipError, match="joined by process 11 on host-a, not by the caller"):
        group.leave(0, "stranger")
    assert group.leave(1, token(1)) is False
    assert group.leave(0, token(0)) is True
    with pytest.raises(MembershipError, match="source rank 0 is not a member"):
        group.check_token(0, token(0))


def test_a_plan_against_older_manifests_is_refused() -> None:
    group = members(2)
    join(group, 1, mode="snapshot")
    with pytest.raises(MembershipError, match=r"a/0 planned against epoch 0 .* at epoch 1"):
        group.connect(wire.encode(engine("a", 0, 1)), 0)
    group.connect(wire.encode(engine("a", 0, 1)), 1)
    assert group.replicas["a"].is_connected


def test_a_replica_has_one_world_size() -> None:
    group = members(2)
    group.connect(wire.encode(engine("a", 0, 2)), None)
    with pytest.raises(MembershipError, match=r"a/1 connects with a world of 4.*'a' .* has 2; detach"):
        group.connect(wire.encode(engine("a", 1, 4)), None)
    group.connect(wire.encode(engine("b", 0, 1)), None)
    assert not group.replicas["a"].is_connected
    assert group.replicas["b"].is_connected


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ((request("a/1", "first", 0),), "sent a request of 'a/1'"),
        ((request("a/0", "second", 0),), "incarnation 'second'"),
        ((request("a/0", "first", 2),), "outside the world of 2"),
        ((request("a/0", "first", -1),), "outside the world of 2"),
        ((request("a/0", "first", 1), request("a/0", "first", 1)), "source rank 1, which is repeated"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(requests: tuple[wire.ReadRequest, ...], expected: str) -> None:
    group = members(2)
    with pytest.raises(WireError, match=expected):
        group.connect(wire.encode(engine("a", 0, 1, requests=requests)), None)
    assert "a" not in group.replicas


def test_connecting_again_is_idempotent_and_another_incarnation_takes_the_place() -> None:
    group = members(2)
    message = wire.encode(engine("a", 0, 1))
    assert group.connect(message, None) is None
    first = group.replicas["a"].readers[0]
    first.offers[0] = b"", []
    assert group.connect(message, None) is None
    assert group.replicas["a"].readers[0] is first
    group.replicas["a"].version = 3
    assert group.connect(wire.encode(engine("a", 0, 1, incarnation="second")), None) is first
    second = group.replicas["a"].readers[0]
    assert not second.offers
    assert group.replicas["a"].version is None
    assert group.find("a/0", "first") is None
    assert group.find("a/0", "second") == (group.replicas["a"], second)


def test_the_same_plan_connects_afresh_after_the_epoch_advanced() -> None:
    group = members(2)
    message = wire.encode(engine("a", 0, 1))
    group.connect(message, None)
    first = group.replicas["a"].readers[0]
    join(group, 0, mode="snapshot")
    assert group.connect(message, None) is first
    assert group.replicas["a"].readers[0].epoch == 1


def test_names_with_slashes_find_their_replica() -> None:
    group = members(2)
    group.connect(wire.encode(engine("http://host:8000/v1", 0, 1)), None)
    assert group.find("http://host:8000/v1/0", "first") is not None
    assert group.find("http://host:8000/v1", "first") is None
    assert group.find("nobody", "first") is None


def test_states_of_a_replica() -> None:
    group = members(2)
    group.connect(wire.encode(engine("a", 0, 2)), None)
    replica = group.replicas["a"]
    assert replica.status(False).state == "connecting"
    group.connect(wire.encode(engine("a", 1, 2)), None)
    assert replica.status(False).state == "connected"
    assert replica.status(True).state == "updating"
    replica.version = 7
    assert replica.status(False).state == "serving"
    replica.torn = "half-way"
    assert replica.status(False).state == "torn"
    assert replica.status(True).state == "updating"
    found = replica.status(False).readers[0]
    assert (found.reader, found.pid, found.hostname) == ("a/0", NODE.pid, NODE.hostname)
    assert (found.requested, found.offered) == (2, 0)


def test_impossible_messages_are_refused() -> None:
    group = Members(GROUP, 2)
    with pytest.raises(WireError, match="does not decode"):
        group.join(wire.sealed(b"\x00"), token(0))
    whole = wire.encode(source(0, 2))
    for at in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        with pytest.raises(WireError, match="damaged or cut"):
            group.join(bytes(damaged), token(0))
    with pytest.raises(WireError, match="damaged or cut"):
        group.join(whole[:-1], token(0))
    with pytest.raises(WireError, match="outside its world"):
        group.connect(wire.encode(engine("a", 3, 2)), None)
