"""The coordinator on a jumping clock: barriers, deadlines, failures, accounts, and random interleavings of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from rdt_core import wire
from rdt_core.coordinator import Coordinator
from rdt_core.errors import CoverageError, DeadlineError, MembershipError, RdtError, SyncError, WireError
from rdt_core.manifests import split
from rdt_core.synccalls import MAX_TOLD_LINKS
from rdt_testbed.clock import run
from rdt_testbed.group import GROUP, NBYTES, TENSORS, engine, offer, report, source, token

pytestmark = pytest.mark.unit

WAIT_S = 60.0
STALL_S = 600.0


class Group:
    """A coordinator with its source ranks joined and its replicas connected, and shorter names for its calls."""

    def __init__(self, coordinator: Coordinator, world_size: int, readers: tuple[str, ...]) -> None:
        self.coordinator = coordinator
        self.world_size = world_size
        self.readers = readers

    @classmethod
    async def make(cls, world_size: int = 2, rounds: int = 1, **replicas: int) -> Group:
        coordinator = Coordinator(GROUP, world_size, STALL_S)
        for rank in range(world_size):
            await coordinator.join(wire.encode(source(rank, world_size, rounds=rounds)), token(rank))
        for name, size in replicas.items():
            for rank in range(size):
                await coordinator.connect(wire.encode(engine(name, rank, size, sources=world_size)))
        readers = tuple(f"{name}/{rank}" for name, size in replicas.items() for rank in range(size))
        return cls(coordinator, world_size, readers)

    def begin_one(
        self,
        rank: int,
        version: int,
        replicas: list[str] | None = None,
        timeout_s: float = WAIT_S,
        readable: int = 0,
        policy: str = "require_all",
    ) -> Awaitable[tuple[int, list[bytes], list[tuple[str, str]]]]:
        return asyncio.create_task(
            self.coordinator.begin(rank, token(rank), version, replicas, readable, policy, timeout_s)
        )

    async def begin(self, version: int, replicas: list[str] | None = None, policy: str = "require_all") -> int:
        found = await asyncio.gather(
            *(self.begin_one(rank, version, replicas, policy=policy) for rank in range(self.world_size))
        )
        assert len({sync for sync, *_ in found}) == 1
        return found[0][0]

    async def fails(self, version: int, replicas: list[str] | None = None) -> list[RdtError]:
        """Begins on every rank and returns the errors, which all ranks must get."""
        tasks = [self.begin_one(rank, version, replicas) for rank in range(self.world_size)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, RdtError) for one in found), found
        return found

    async def publish(self, sync: int, round: int = 0) -> None:
        for rank in range(self.world_size):
            await self.coordinator.published(rank, sync, round, None, 0)

    async def account(self, sync: int, version: int) -> None:
        for reader in self.readers:
            await self.coordinator.done(wire.encode(report(reader, version)), sync)

    async def commit(self, version: int) -> int:
        """Runs a whole sync."""
        sync = await self.begin(version)
        await self.account(sync, version)
        await self.coordinator.commit(sync, 0, 1.0, {})
        return sync

    async def status(self) -> wire.GroupStatus:
        return wire.decode(await self.coordinator.status(), wire.GroupStatus)

    async def states(self) -> dict[str, str]:
        return {one.name: one.state for one in (await self.status()).replicas}


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs an async test on the jumping clock."""

    def wrapped() -> None:
        run(test())

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


async def settle() -> None:
    """Lets every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


# --- joining and connecting


@virtual
async def test_sources_returns_manifests_by_rank_once_all_have_joined() -> None:
    coordinator = Coordinator(GROUP, 3, STALL_S)
    waiting = asyncio.create_task(coordinator.sources(WAIT_S))
    for rank in (2, 0, 1):
        await settle()
        assert not waiting.done()
        await coordinator.join(wire.encode(source(rank, 3)), token(rank))
    epoch, manifests = await waiting
    assert epoch == 0
    assert split(manifests) == [source(rank, 3) for rank in range(3)]
    assert (await coordinator.sources(WAIT_S))[1] is manifests, "joined once"


@virtual
async def test_a_deadline_names_the_source_ranks_that_did_not_join() -> None:
    coordinator = Coordinator(GROUP, 3, STALL_S)
    await coordinator.join(wire.encode(source(1, 3)), token(1))
    with pytest.raises(
        DeadlineError, match=r"for all 3 source ranks to join \(every rank .* counts all of them.*\); no"
    ):
        await coordinator.sources(WAIT_S)
    with pytest.raises(DeadlineError, match=r"source rank 0, source rank 2$"):
        await coordinator.sources(0)


@virtual
async def test_replica_ready_returns_its_ranks_in_order_and_a_deadline_names_the_missing() -> None:
    group = await Group.make(2)
    waiting = asyncio.create_task(group.coordinator.replica_ready("a", WAIT_S))
    await group.coordinator.connect(wire.encode(engine("a", 1, 2)))
    with pytest.raises(DeadlineError, match=r"replica 'a' to connect; no answer from engine rank a/0$"):
        await group.coordinator.replica_ready("a", 1)
    await group.coordinator.connect(wire.encode(engine("a", 0, 2)))
    assert [wire.decode(one, wire.EngineManifest).rank for one in await waiting] == [0, 1]
    with pytest.raises(DeadlineError, match="no answer from engine rank b/0"):
        await group.coordinator.replica_ready("b", 1)
    assert set(await group.states()) == {"a"}


@virtual
async def test_a_detached_replica_wakes_who_waits_for_it_and_may_come_back_in_another_size() -> None:
    group = await Group.make(2)
    await group.coordinator.connect(wire.encode(engine("a", 0, 2)))
    ready = asyncio.create_task(group.coordinator.replica_ready("a", WAIT_S))
    offers = asyncio.create_task(group.coordinator.offers("a/0", "first", WAIT_S))
    await settle()
    await group.coordinator.detach("a")
    with pytest.raises(MembershipError, match="'a' was detached"):
        await ready
    with pytest.raises(MembershipError, match="engine rank a/0 disconnected"):
        await offers
    await group.coordinator.connect(wire.encode(engine("a", 0, 1, incarnation="second")))
    assert await group.states() == {"a": "connected"}
    await group.coordinator.detach("nobody")


@virtual
async def test_disconnecting_is_for_one_incarnation() -> None:
    group = await Group.make(2, a=1)
    await group.coordinator.disconnect("a/0", "another")
    await group.coordinator.disconnect("b/0", "first")
    assert await group.states() == {"a": "connected"}
    await group.coordinator.disconnect("a/0", "first")
    assert await group.states() == {}
    with pytest.raises(MembershipError, match="a/0 is not connected"):
        await group.coordinator.offers("a/0", "first", WAIT_S)


@virtual
async def test_a_replica_that_lost_a_rank_is_not_connected() -> None:
    group = await Group.make(2, a=2)
    await group.coordinator.disconnect("a/1", "first")
    assert await group.states() == {"a": "connecting"}
    with pytest.raises(DeadlineError, match=r"no answer from engine rank a/1$"):
        await group.coordinator.replica_ready("a", 1)
    errors = await group.fails(1, ["a"])
    assert "engine rank a/1 not" in str(errors[0])
    await group.coordinator.connect(wire.encode(engine("a", 1, 2, incarnation="second")))
    assert len(await group.coordinator.replica_ready("a", 0)) == 2


# --- begin


@virtual
async def test_begin_returns_one_sync_to_all_when_the_last_rank_has_begun() -> None:
    group = await Group.make(3, a=1)
    tasks = [group.begin_one(rank, 1) for rank in (2, 0)]
    await settle()
    assert not any(task.done() for task in tasks)
    assert await group.coordinator.current() == (None, None)
    sync, requests, _ = await group.begin_one(1, 1)
    assert [one for one, *_ in await asyncio.gather(*tasks)] == [sync, sync]
    assert [wire.decode(one, wire.ReadRequest).source for one in requests] == [1]
    assert await group.coordinator.current() == (None, sync)


@virtual
async def test_versions_that_differ_fail_on_every_rank_with_both_named() -> None:
    group = await Group.make(3)
    first, second = group.begin_one(0, 5), group.begin_one(1, 5)
    await settle()
    third = group.begin_one(2, 6)
    found = await asyncio.gather(first, second, third, return_exceptions=True)
    assert {str(one) for one in found} == {
        "version 5: source rank 2 failed in begin: it publishes version 6, but source rank 0 publishes version 5"
    }
    assert {type(one) for one in found} == {SyncError}
    assert await group.begin(6) == 1


@virtual
async def test_versions_never_go_back_and_may_be_published_again() -> None:
    group = await Group.make(2, a=1)
    await group.commit(5)
    errors = await asyncio.gather(group.begin_one(0, 4), return_exceptions=True)
    assert "version 4: source rank 0 failed in begin: version 5 is committed" in str(errors[0])
    waiting = group.begin_one(1, 6)
    await settle()
    with pytest.raises(SyncError, match="versions never go back"):
        await group.begin_one(0, 4)
    with pytest.raises(SyncError, match="version 4: source rank 0 failed in begin"):
        await waiting
    await group.commit(5)
    assert (await group.coordinator.current())[0] == 5


@virtual
async def test_a_deadline_in_begin_is_the_same_for_everybody_and_the_barrier_starts_afresh() -> None:
    group = await Group.make(3)
    patient, hasty = group.begin_one(0, 1, timeout_s=60), group.begin_one(2, 1, timeout_s=10)
    found = await asyncio.gather(patient, hasty, return_exceptions=True)
    expected = (
        "version 1: source rank 2 failed in begin: waited 10 s for every source rank to begin version 1; no answer "
        "from source rank 1"
    )
    assert [(type(one), str(one)) for one in found] == [(SyncError, expected), (DeadlineError, expected)]
    assert asyncio.get_running_loop().time() == pytest.approx(10)
    assert (await group.status()).last_failure == expected
    assert await group.begin(1) == 1


@virtual
async def test_beginning_needs_membership_and_the_own_token() -> None:
    group = await Group.make(2)
    with pytest.raises(MembershipError, match="not by the caller"):
        await group.coordinator.begin(0, token(1), 1, None, 0, "require_all", WAIT_S)
    with pytest.raises(MembershipError, match="source rank 7 is not a member"):
        await group.coordinator.begin(7, token(7), 1, None, 0, "require_all", WAIT_S)


@virtual
async def test_beginning_twice_counts_once() -> None:
    group = await Group.make(2)
    twice = [group.begin_one(0, 1), group.begin_one(0, 1)]
    await settle()
    assert not any(task.done() for task in twice)
    sync, *_ = await group.begin_one(1, 1)
    assert [one for one, *_ in await asyncio.gather(*twice)] == [sync, sync]


@virtual
async def test_beginning_while_a_sync_runs_fails_that_sync_and_starts_the_next() -> None:
    group = await Group.make(2, a=1)
    sync = await group.begin(1)
    waiting = asyncio.create_task(group.coordinator.published(0, sync, 0, 0, WAIT_S))
    await settle()
    ahead = group.begin_one(1, 2)
    with pytest.raises(SyncError, match="version 1: source rank 1 failed in begin: it began version 2 while version 1"):
        await waiting
    assert not ahead.done()
    assert (await group.begin_one(0, 2))[0] == (await ahead)[0] == sync + 1


@virtual
async def test_rank_0_says_which_replicas_take_part() -> None:
    group = await Group.make(2, a=1, b=1)
    zero, one = group.begin_one(0, 1, ["b", "b"]), group.begin_one(1, 1, ["a"])
    (sync, requests, _), _ = await asyncio.gather(zero, one)
    assert [wire.decode(request, wire.ReadRequest).reader for request in requests] == ["b/0"]
    with pytest.raises(SyncError, match="a/0 takes no part in sync 1 of version 1"):
        await group.coordinator.await_round("a/0", sync, 0, WAIT_S)
    with pytest.raises(SyncError, match="takes no part"):
        await group.coordinator.enter("a/0", "first", 1, WAIT_S)
    with pytest.raises(SyncError, match="takes no part"):
        await group.coordinator.done(wire.encode(report("a/0", 1)), sync)
    await group.coordinator.done(wire.encode(report("b/0", 1)), sync)
    await group.coordinator.commit(sync, 0, 1.0, {})
    assert await group.states() == {"a": "connected", "b": "serving"}


@virtual
async def test_a_replica_that_is_not_connected_fails_begin_on_every_rank_without_a_sync() -> None:
    group = await Group.make(2, a=1)
    await group.coordinator.connect(wire.encode(engine("b", 1, 2)))
    for name, expected in (
        ("c", "replica 'c' is not connected to group 'policy'; connected replicas: a"),
        ("b", "replica 'b' is not connected to group 'policy', engine rank b/0 not; connected replicas: a"),
    ):
        errors = await group.fails(1, ["a", name])
        assert [(type(one), str(one)) for one in errors] == [(MembershipError, f"version 1: {expected}")] * 2
    assert await group.coordinator.current() == (None, None)
    sync = await group.begin(1)
    assert list(group.coordinator._syncs.latest.readers) == ["a/0"], "half-connected replicas take no part by default"
    assert sync == 1


@virtual
async def test_plans_of_an_older_epoch_fail_begin_until_the_replica_connects_again() -> None:
    group = await Group.make(2, a=1)
    await group.commit(1)
    waiting = group.begin_one(0, 2)
    await settle()
    await group.coordinator.join(wire.encode(source(1, 2, mode="snapshot")), token(1))
    await settle()
    assert not waiting.done(), "joining again before the barrier is no failure"
    found = await asyncio.gather(waiting, group.begin_one(1, 2), return_exceptions=True)
    assert [type(one) for one in found] == [MembershipError] * 2
    assert "a/0 planned against epoch 0 of the source ranks, which are at epoch 1" in str(found[0])
    assert str(found[0]) == str(found[1])
    await group.coordinator.connect(wire.encode(engine("a", 0, 1, incarnation="second")), 1)
    assert await group.begin(2) == 2


@virtual
async def test_a_group_without_replicas_publishes_to_nobody() -> None:
    group = await Group.make(2)
    sync = await group.begin(1, [])
    committed = await group.coordinator.commit(sync, 0, 1.0, {})
    # the other rank is slower, and everything it still does is in order
    await group.coordinator.published(1, sync, 0, 0, 0)
    assert await group.coordinator.outcome(sync, 1, 0) == committed


# --- offers


@virtual
async def test_requests_are_handed_out_until_they_are_offered_and_offers_reach_the_reader_in_order() -> None:
    group = await Group.make(2, a=1)
    sync = await group.begin(1)
    reading = asyncio.create_task(group.coordinator.offers("a/0", "first", WAIT_S))
    asked = group.coordinator._syncs.latest.readers["a/0"].manifest.requests
    await group.coordinator.offer(1, sync, [wire.encode(offer(asked[1], refs=2))], [["ref 1", "ref 2"]])
    await settle()
    assert not reading.done()
    await group.coordinator.fail(sync, "somebody", "something", "stop")
    with pytest.raises(SyncError, match="stop"):
        await reading
    with pytest.raises(SyncError, match="stop"):
        await group.coordinator.offers("a/0", "first", WAIT_S)
    again = await asyncio.gather(group.begin_one(0, 1), group.begin_one(1, 1))
    assert [len(requests) for _, requests, _ in again] == [1, 0]
    await group.coordinator.offer(0, again[0][0], [wire.encode(offer(asked[0]))], [[]])
    offers, refs = await group.coordinator.offers("a/0", "first", 0)
    assert [wire.decode(one, wire.LinkOffer).source for one in offers] == [0, 1]
    assert refs == [[], ["ref 1", "ref 2"]]


@virtual
async def test_a_new_incarnation_is_asked_for_again() -> None:
    group = await Group.make(1, a=1)
    sync, requests, _ = await group.begin_one(0, 1)
    asked = wire.decode(requests[0], wire.ReadRequest)
    await group.coordinator.offer(0, sync, [wire.encode(offer(asked))], [[]])
    await group.account(sync, 1)
    await group.coordinator.commit(sync, 0, 1.0, {})
    await group.coordinator.connect(wire.encode(engine("a", 0, 1, sources=1, incarnation="second")))
    assert await group.states() == {"a": "connected"}
    sync, requests, _ = await group.begin_one(0, 2)
    assert [wire.decode(one, wire.ReadRequest).incarnation for one in requests] == ["second"]
    with pytest.raises(WireError, match=r"incarnation 'first', is for no reader of sync 2"):
        await group.coordinator.offer(0, sync, [wire.encode(offer(asked))], [[]])


@virtual
async def test_offers_that_answer_nothing_are_refused_and_none_of_their_batch_is_taken() -> None:
    group = await Group.make(2, a=1)
    sync = await group.begin(1)
    asked = group.coordinator._syncs.latest.readers["a/0"].manifest.requests
    good = wire.encode(offer(asked[0]))
    for bad, beside, expected in (
        (offer(asked[0], reader="b/0"), [[], []], "for no reader"),
        (offer(asked[1]), [[], []], "names source rank 1"),
        (offer(asked[0], refs=1), [[], []], "declares 1 references, 0 came"),
        (offer(asked[0]), [[]], "2 offers with 1 lists"),
    ):
        with pytest.raises(WireError, match=expected):
            await group.coordinator.offer(0, sync, [good, wire.encode(bad)], beside)
    assert not group.coordinator._syncs.latest.readers["a/0"].offers
    await group.coordinator.connect(wire.encode(engine("b", 0, 1, sources=1)))
    await group.coordinator.fail(sync, "x", "y", "z")
    sync = await group.begin(1)
    unasked = wire.encode(offer(asked[1], reader="b/0"))
    with pytest.raises(WireError, match="answers no request"):
        await group.coordinator.offer(1, sync, [unasked], [[]])


@virtual
async def test_a_deadline_for_offers_fails_the_sync_and_names_the_silent_source_ranks() -> None:
    group = await Group.make(2, a=1)
    sync = await group.begin(1)
    asked = group.coordinator._syncs.latest.readers["a/0"].manifest.requests
    await group.coordinator.offer(0, sync, [wire.encode(offer(asked[0]))], [[]])
    with pytest.raises(DeadlineError, match=r"a/0 failed in offers: waited 60 s .* no answer from source rank 1$"):
        await group.coordinator.offers("a/0", "first", WAIT_S)
    with pytest.raises(SyncError, match="a/0 failed in offers"):
        await group.coordinator.published(0, sync, 0, None, 0)


# --- rounds


@virtual
async def test_rounds_are_ordered_by_publishing_and_reading() -> None:
    group = await Group.make(2, rounds=3, a=2)
    coordinator = group.coordinator
    sync = await group.begin(1)
    first = asyncio.create_task(coordinator.await_round("a/0", sync, 0, WAIT_S))
    second = asyncio.create_task(coordinator.await_round("a/1", sync, 1, WAIT_S))
    await coordinator.published(0, sync, 0, None, 0)
    await coordinator.published(0, sync, 0, None, 0)
    free = asyncio.create_task(coordinator.published(0, sync, 1, 0, WAIT_S))
    await settle()
    assert not first.done(), "one rank's duplicate must not stand for the other's"
    await coordinator.published(1, sync, 0, None, 0)
    await first
    await settle()
    assert not second.done()
    assert not free.done(), "a/0 was told that the round is readable, not that it has read it"
    third = [asyncio.create_task(coordinator.await_round("a/0", sync, 1, WAIT_S)) for _ in range(2)]
    await free
    assert not second.done()
    await coordinator.published(1, sync, 1, None, 0)
    await asyncio.gather(second, *third)
    with pytest.raises(WireError, match="published round 3; it declared 3"):
        await coordinator.published(1, sync, 3, None, 0)
    with pytest.raises(WireError, match="round 3 of sync 1 does not exist"):
        await coordinator.await_round("a/0", sync, 3, WAIT_S)
    with pytest.raises(WireError, match="round 3 of sync 1 does not exist"):
        await coordinator.published(1, sync, 1, 3, 0)
    await coordinator.await_round("a/1", sync, 1, 0)


@virtual
async def test_asking_for_a_round_gives_back_every_round_before_it_and_accounting_gives_back_all() -> None:
    group = await Group.make(1, rounds=4, a=1, b=1)
    coordinator = group.coordinator
    sync = await group.begin(1)
    for round in range(3):
        await coordinator.published(0, sync, round, None, 0)
    await coordinator.await_round("a/0", sync, 2, 0)
    free = asyncio.create_task(coordinator.published(0, sync, 3, 1, WAIT_S))
    await coordinator.done(wire.encode(report("b/0", 1)), sync)
    await free
    last = asyncio.create_task(coordinator.published(0, sync, 3, 2, WAIT_S))
    await settle()
    assert not last.done(), "a/0 is still reading round 2"
    await coordinator.await_round("a/0", sync, 3, 0)
    await last


@virtual
async def test_an_engine_rank_enters_the_running_sync_of_its_version_when_the_first_round_is_published() -> None:
    group = await Group.make(2, a=1)
    coordinator = group.coordinator
    with pytest.raises(SyncError, match="not syncing version 1: no sync is running"):
        await coordinator.enter("a/0", "first", 1, WAIT_S)
    sync = await group.begin(1)
    with pytest.raises(SyncError, match="not syncing version 2: version 1 is running"):
        await coordinator.enter("a/0", "first", 2, WAIT_S)
    with pytest.raises(SyncError, match="a/0 pulls as incarnation 'zeroth', which is gone"):
        await coordinator.enter("a/0", "zeroth", 1, WAIT_S)
    assert await group.states() == {"a": "connected"}, "nobody may have received bytes yet"
    waiting = asyncio.create_task(coordinator.enter("a/0", "first", 1, WAIT_S))
    await coordinator.published(0, sync, 0, None, 0)
    await settle()
    assert not waiting.done()
    assert await group.states() == {"a": "updating"}
    await coordinator.published(1, sync, 0, None, 0)
    assert await waiting == (sync, "off")
    await coordinator.fail(sync, "somebody", "something", "stop")
    with pytest.raises(SyncError, match=r"^version 1: somebody failed in something: stop$"):
        await coordinator.enter("a/0", "first", 1, WAIT_S)
    with pytest.raises(SyncError, match="no sync is running; the latest failure was: version 1: somebody failed"):
        await coordinator.enter("a/0", "first", 2, WAIT_S)


@virtual
async def test_an_engine_rank_that_is_refused_is_torn_where_it_reads_already() -> None:
    group = await Group.make(2, a=1)
    await group.commit(1)
    with pytest.raises(SyncError, match="no sync is running"):
        await group.coordinator.enter("a/0", "first", 2, WAIT_S)
    assert await group.states() == {"a": "serving"}
    with pytest.raises(SyncError, match="no sync is running"):
        await group.coordinator.enter("a/0", "zeroth", 2, WAIT_S, True)
    assert await group.states() == {"a": "serving"}, "another incarnation reads into other memory"
    with pytest.raises(SyncError, match="no sync is running"):
        await group.coordinator.enter("a/0", "first", 2, WAIT_S, True)
    assert await group.states() == {"a": "torn"}


@virtual
async def test_rounds_that_were_readable_before_are_published_with_the_start_of_the_sync() -> None:
    group = await Group.make(2, rounds=2, a=1)
    coordinator = group.coordinator
    sync = await group.begin(1)
    asked = coordinator._syncs.latest.readers["a/0"].manifest.requests
    await coordinator.offer(0, sync, [wire.encode(offer(asked[0]))], [[]])
    await coordinator.fail(sync, "x", "y", "z")
    # rank 1 has not answered its reader: what it said of its rounds cannot have counted that reader
    begun = [group.begin_one(rank, 2, readable=1) for rank in range(2)]
    sync = (await asyncio.gather(*begun))[0][0]
    with pytest.raises(DeadlineError, match=r"no answer from source rank 1$"):
        await coordinator.enter("a/0", "first", 2, 0)
    begun = [group.begin_one(rank, 3) for rank in range(2)]
    sync = (await asyncio.gather(*begun))[0][0]
    await coordinator.offer(1, sync, [wire.encode(offer(asked[1]))], [[]])
    begun = [group.begin_one(0, 4, readable=2), group.begin_one(1, 4, readable=1)]
    sync = (await asyncio.gather(*begun))[0][0]
    assert await coordinator.enter("a/0", "first", 4, 0) == (sync, "off")
    with pytest.raises(DeadlineError, match=r"no answer from source rank 1$"):
        await coordinator.await_round("a/0", sync, 1, 0)
    for readable in (-1, 3):
        with pytest.raises(WireError, match=rf"begins with {readable} readable rounds; it declared 2 rounds"):
            await group.begin_one(0, 5, readable=readable)


@virtual
async def test_a_deadline_in_a_round_fails_the_sync_for_everybody() -> None:
    group = await Group.make(3, a=1, b=1)
    coordinator = group.coordinator
    sync = await group.begin(1)
    waits = [
        asyncio.create_task(coordinator.await_round("a/0", sync, 0, 10)),
        asyncio.create_task(coordinator.published(1, sync, 0, 0, WAIT_S)),
        asyncio.create_task(coordinator.outcome(sync, 2, WAIT_S)),
        asyncio.create_task(coordinator.offers("b/0", "first", WAIT_S)),
    ]
    found = await asyncio.gather(*waits, return_exceptions=True)
    expected = (
        "version 1: engine rank a/0 failed in await_round: waited 10 s for round 0 of sync 1 to be published; no "
        "answer from source rank 0, source rank 2"
    )
    assert [type(one) for one in found] == [DeadlineError, SyncError, SyncError, SyncError]
    assert {str(one) for one in found} == {expected}
    assert asyncio.get_running_loop().time() == pytest.approx(10)
    assert await group.states() == {"a": "torn", "b": "connected"}
    assert (await group.status()).last_failure == expected


@virtual
async def test_deadlines_of_the_trainer_name_engine_ranks() -> None:
    group = await Group.make(2, a=2)
    sync = await group.begin(1)
    await group.coordinator.done(wire.encode(report("a/0", 1)), sync)
    with pytest.raises(DeadlineError, match=r"source rank 1 failed in await_read: waited 60 s.*from engine rank a/1$"):
        await group.coordinator.published(1, sync, 0, 0, WAIT_S)
    sync = await group.begin(1)
    await group.coordinator.done(wire.encode(report("a/1", 1)), sync)
    expected = r"failed in outcome: waited 60 s for every engine rank to account .* no answer from engine rank a/0$"
    with pytest.raises(DeadlineError, match=expected):
        await group.coordinator.outcome(sync, 1, WAIT_S)
    sync = await group.begin(1)
    waiting = asyncio.create_task(group.coordinator.outcome(sync, 1, WAIT_S))
    await asyncio.sleep(WAIT_S - 1)
    await group.account(sync, 1)
    began = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineError, match=r"failed in outcome: .*the driver did not commit$"):
        await waiting
    assert asyncio.get_running_loop().time() - began == pytest.approx(WAIT_S), "the commit has a deadline of its own"


# --- accounts and the commit


@virtual
async def test_a_commit_stamps_the_version_and_gives_everybody_one_report() -> None:
    group = await Group.make(2, a=2, b=1)
    sync = await group.begin(7)
    waiting = asyncio.create_task(group.coordinator.outcome(sync, 1, WAIT_S))
    await group.account(sync, 7)
    await group.account(sync, 7)
    committed = await group.coordinator.commit(sync, 0, 1.5, {"pull": 1.0})
    assert await waiting == committed
    assert await group.coordinator.commit(sync, 0, 9.0, {}) == committed
    found = wire.decode(committed, wire.SyncReport)
    assert (found.group, found.version, found.seconds, found.phases) == (GROUP, 7, 1.5, {"pull": 1.0})
    assert (found.mode, found.mode_reason, found.replicas) == ("live", "as asked", ("a", "b"))
    assert found.bytes == 3 * NBYTES
    assert [one.reader for one in found.readers] == ["a/0", "a/1", "b/0"]
    assert await group.coordinator.current() == (7, None)
    assert {one.name: one.version for one in (await group.status()).replicas} == {"a": 7, "b": 7}
    with pytest.raises(SyncError, match="not syncing version 7: no sync is running"):
        await group.coordinator.enter("a/0", "first", 7, WAIT_S)


@virtual
async def test_the_accounts_of_a_large_group_are_told_to_its_driver_alone() -> None:
    group = await Group.make(2, a=1)
    sync = await group.begin(1)
    links = tuple(
        wire.LinkReport(source=0, reader="a/0", kind="local", bytes=1, seconds=1.0) for _ in range(MAX_TOLD_LINKS + 1)
    )
    await group.coordinator.done(wire.encode(report("a/0", 1, links=links)), sync)
    told = wire.decode(await group.coordinator.commit(sync, 0, 1.0, {}), wire.SyncReport)
    brief = wire.decode(await group.coordinator.outcome(sync, 1, WAIT_S), wire.SyncReport)
    assert len(told.links) == MAX_TOLD_LINKS + 1
    assert brief == told.in_short()
    assert not brief.readers
    assert brief.bytes == told.bytes


@virtual
async def test_a_commit_without_every_account_fails_the_sync() -> None:
    group = await Group.make(2, a=2)
    await group.commit(1)
    sync = await group.begin(2)
    await group.coordinator.done(wire.encode(report("a/0", 2)), sync)
    waited = r"failed in commit: waited 5 s for every engine rank to account for .*; no answer from engine rank a/1$"
    with pytest.raises(DeadlineError, match=waited):
        await group.coordinator.commit(sync, 0, 1.0, {}, timeout_s=5.0)
    with pytest.raises(SyncError, match="failed in commit"):
        await group.coordinator.done(wire.encode(report("a/1", 2)), sync)
    with pytest.raises(SyncError, match="failed in commit"):
        await group.coordinator.commit(sync, 0, 1.0, {})
    assert await group.coordinator.current() == (1, None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"bytes": NBYTES - 1}, f"{NBYTES - 1} bytes arrived, {NBYTES} were expected"),
        ({"bytes": 0, "expected_bytes": 0}, f"0 bytes arrived, 0 were expected, and the plan .* has {NBYTES}"),
        ({"expected_bytes": NBYTES + 1}, f"{NBYTES + 1} were expected"),
        ({"digest": "other"}, "executed plan other, but connected with plan plan"),
        ({"version": 1}, "it pulled version 1"),
    ],
)
def test_an_account_that_does_not_match_fails_the_sync_and_the_version_stays(
    changes: dict[str, Any], expected: str
) -> None:
    async def main() -> None:
        group = await Group.make(2, a=1)
        await group.commit(1)
        sync = await group.begin(2)
        await group.publish(sync)
        await group.coordinator.await_round("a/0", sync, 0, 0)
        waiting = asyncio.create_task(group.coordinator.outcome(sync, 1, WAIT_S))
        await settle()
        message = report("a/0", **({"version": 2} | changes))
        with pytest.raises(SyncError, match=f"version 2: engine rank a/0 failed in accounting: .*{expected}"):
            await group.coordinator.done(wire.encode(message), sync)
        with pytest.raises(SyncError, match="failed in accounting"):
            await waiting
        with pytest.raises(SyncError, match="failed in accounting"):
            await group.coordinator.commit(sync, 0, 1.0, {})
        assert await group.coordinator.current() == (1, None)
        assert await group.states() == {"a": "torn"}

    run(main())


@virtual
async def test_accounts_of_an_incarnation_that_is_gone_or_after_the_commit_are_refused() -> None:
    group = await Group.make(2, a=1)
    sync = await group.begin(1)
    with pytest.raises(SyncError, match="reports as incarnation 'zeroth', which is gone"):
        await group.coordinator.done(wire.encode(report("a/0", 1, incarnation="zeroth")), sync)
    await group.account(sync, 1)
    await group.coordinator.commit(sync, 0, 1.0, {})
    await group.account(sync, 1)
    with pytest.raises(SyncError, match="reports otherwise than before"):
        await group.coordinator.done(wire.encode(report("a/0", 1, bytes=1)), sync)


@virtual
async def test_calls_that_travel_as_one_message_are_those_of_a_sync() -> None:
    group = await Group.make(1, a=1)
    sync = await group.begin(1)
    await group.publish(sync)
    call = msgspec.msgpack.encode(("enter", ("a/0", "first", 1, WAIT_S)))
    assert msgspec.msgpack.decode(await group.coordinator.plain(call)) == [sync, "off"]
    with pytest.raises(WireError, match="'detach' is no call that travels as one message"):
        await group.coordinator.plain(msgspec.msgpack.encode(("detach", ("a",))))
    assert await group.states() == {"a": "updating"}


@virtual
async def test_only_a_member_commits() -> None:
    group = await Group.make(2)
    sync = await group.begin(1, [])
    with pytest.raises(MembershipError, match="source rank 9 is not a member"):
        await group.coordinator.commit(sync, 9, 1.0, {})


@virtual
async def test_settled_waits_until_every_rank_knows_the_outcome_or_left() -> None:
    group = await Group.make(3, a=1)
    await group.coordinator.settled(0)
    sync = await group.commit(1)
    with pytest.raises(DeadlineError, match="no answer from source rank 1, source rank 2"):
        await group.coordinator.settled(1)
    waiting = asyncio.create_task(group.coordinator.settled(WAIT_S))
    await group.coordinator.outcome(sync, 1, 0)
    await settle()
    assert not waiting.done()
    await group.coordinator.leave(2, token(2))
    await waiting


# --- failures


@virtual
async def test_the_first_failure_is_everybodys_and_later_ones_are_told_about_it() -> None:
    group = await Group.make(2, a=1)
    coordinator = group.coordinator
    sync = await group.begin(3)
    waits = [
        asyncio.create_task(coordinator.published(0, sync, 0, 0, WAIT_S)),
        asyncio.create_task(coordinator.enter("a/0", "first", 3, WAIT_S)),
        asyncio.create_task(coordinator.outcome(sync, 1, WAIT_S)),
        asyncio.create_task(coordinator.offers("a/0", "first", WAIT_S)),
    ]
    await settle()
    expected = "version 3: engine rank a/0 failed in pull: the link broke"
    assert await coordinator.fail(sync, "engine rank a/0", "pull", "the link broke") == expected
    assert await coordinator.fail(sync, "source rank 1", "await_read", "something later") == expected
    found = await asyncio.gather(*waits, return_exceptions=True)
    assert [(type(one), str(one)) for one in found] == [(SyncError, expected)] * 4
    for late in (
        coordinator.published(0, sync, 0, None, 0),
        coordinator.published(0, sync, 0, 0, WAIT_S),
        coordinator.await_round("a/0", sync, 0, WAIT_S),
        coordinator.offer(0, sync, [], []),
        coordinator.done(wire.encode(report("a/0", 3)), sync),
        coordinator.commit(sync, 0, 1.0, {}),
        coordinator.outcome(sync, 1, WAIT_S),
    ):
        with pytest.raises(SyncError, match=expected):
            await late
    assert await coordinator.current() == (None, None)


@virtual
async def test_a_failure_without_a_sync_ends_whatever_is_going_on() -> None:
    group = await Group.make(2, a=1)
    assert await group.coordinator.fail(None, "source rank 1", "publish", "early") is None
    waiting = group.begin_one(0, 4)
    await settle()
    expected = "version 4: source rank 1 failed in publish: a shard moved"
    assert await group.coordinator.fail(None, "source rank 1", "publish", "a shard moved") == expected
    with pytest.raises(SyncError, match=expected):
        await waiting
    sync = await group.begin(4)
    assert await group.coordinator.fail(None, "source rank 1", "publish", "again") is not None
    with pytest.raises(SyncError, match="again"):
        await group.coordinator.published(0, sync, 0, None, 0)


@virtual
async def test_a_failure_after_the_commit_changes_nothing() -> None:
    group = await Group.make(2, a=1)
    sync = await group.commit(1)
    assert await group.coordinator.fail(sync, "replica a", "resume", "late") is None
    assert await group.coordinator.fail(99, "replica a", "resume", "never begun") is None
    assert await group.states() == {"a": "serving"}


@virtual
async def test_replicas_that_may_have_received_bytes_are_torn_until_a_complete_sync() -> None:
    group = await Group.make(2, a=1, b=1)
    await group.commit(1)
    sync = await group.begin(2)
    await group.publish(sync)
    await group.coordinator.enter("a/0", "first", 2, WAIT_S)
    assert await group.states() == {"a": "updating", "b": "serving"}
    await group.coordinator.fail(sync, "source rank 0", "await_read", "died")
    assert await group.states() == {"a": "torn", "b": "serving"}
    torn = (await group.status()).replicas[0]
    assert torn.version is None
    assert torn.torn == "version 2: source rank 0 failed in await_read: died"
    # planning again does not heal what is in the engine's memory
    await group.coordinator.connect(wire.encode(engine("a", 0, 1, incarnation="second")))
    assert (await group.states())["a"] == "torn"
    await group.coordinator.connect(wire.encode(engine("a", 0, 1)))
    await group.commit(2)
    assert await group.states() == {"a": "serving", "b": "serving"}
    assert (await group.coordinator.current())[0] == 2


@virtual
async def test_messages_of_an_old_sync_are_stale_and_not_counted_in_the_new_one() -> None:
    group = await Group.make(2, rounds=2, a=1)
    coordinator = group.coordinator
    old = await group.commit(1)
    new = await group.begin(2)
    for late in (
        coordinator.published(0, old, 0, None, 0),
        coordinator.await_round("a/0", old, 1, 0),
        coordinator.done(wire.encode(report("a/0", 1)), old),
        coordinator.outcome(old, 0, 0),
        coordinator.published(0, new + 1, 0, None, 0),
    ):
        with pytest.raises(
            SyncError, match=r"stale: sync \d+ of group 'policy' is over; the latest is sync 2 of version 2"
        ):
            await late
    with pytest.raises(DeadlineError, match="no answer from source rank 0, source rank 1"):
        await coordinator.await_round("a/0", new, 0, 0)
    # a sync that failed keeps its message, also after the next one has begun
    third = await group.begin(2)
    assert third == new + 1
    with pytest.raises(SyncError, match="a/0 failed in await_round"):
        await coordinator.published(0, new, 0, None, 0)


@virtual
async def test_members_that_go_away_fail_the_sync_they_take_part_in() -> None:
    group = await Group.make(2, a=1, b=1)
    coordinator = group.coordinator

    async def lose(action: Callable[[], Awaitable[Any]], expected: str, replicas: list[str] | None = None) -> None:
        sync = await group.begin(1, replicas)
        waiting = asyncio.create_task(coordinator.outcome(sync, 1, WAIT_S))
        await settle()
        await action()
        with pytest.raises(SyncError, match=expected):
            await waiting

    await lose(lambda: coordinator.disconnect("a/0", "first"), "engine rank a/0 failed in disconnect: it disconnected")
    await coordinator.connect(wire.encode(engine("a", 0, 1)))
    second = wire.encode(engine("a", 0, 1, incarnation="second"))
    await lose(lambda: coordinator.connect(second), "a/0 failed in connect: it connected again")
    await lose(lambda: coordinator.detach("a"), "a/0 failed in detach", ["a"])
    moved = wire.encode(source(1, 2, mode="snapshot"))
    await lose(lambda: coordinator.join(moved, token(1)), "source rank 1 failed in join: it joined again", [])
    await lose(lambda: coordinator.leave(1, token(1)), "source rank 1 failed in leave: it left the group", [])


@virtual
async def test_members_outside_the_sync_may_come_and_go() -> None:
    group = await Group.make(2, a=1, b=1)
    sync = await group.begin(1, ["a"])
    await group.coordinator.detach("b")
    await group.coordinator.connect(wire.encode(engine("c", 0, 1)))
    await group.coordinator.connect(wire.encode(engine("a", 0, 1)))
    await group.coordinator.done(wire.encode(report("a/0", 1)), sync)
    await group.coordinator.commit(sync, 0, 1.0, {})
    assert await group.states() == {"a": "serving", "c": "connected"}


@virtual
async def test_a_rank_that_leaves_ends_the_wait_in_begin() -> None:
    group = await Group.make(3)
    waiting = group.begin_one(0, 1)
    await settle()
    await group.coordinator.leave(2, token(2))
    with pytest.raises(SyncError, match="version 1: source rank 2 failed in leave"):
        await waiting
    await group.coordinator.leave(2, token(2))
    status = await group.status()
    assert status.missing == (2,)
    assert [one.rank for one in status.sources] == [0, 1]


@virtual
async def test_a_sync_that_everybody_forgot_ends_by_itself() -> None:
    group = await Group.make(2, a=1)
    sync = await group.begin(1)
    await asyncio.sleep(STALL_S - 1)
    await group.coordinator.published(0, sync, 0, None, 0)
    await asyncio.sleep(STALL_S - 1)
    assert (await group.coordinator.current())[1] == sync
    await asyncio.sleep(2)
    assert await group.coordinator.current() == (None, None)
    with pytest.raises(SyncError, match=r"a/0 failed in pause, begin .*: no progress for 600 s .*; no account .* a/0$"):
        await group.coordinator.outcome(sync, 1, 0)


@virtual
async def test_a_wait_with_a_long_deadline_is_no_stall() -> None:
    group = await Group.make(2, a=1)
    sync = await group.begin(1)
    waiting = asyncio.create_task(group.coordinator.outcome(sync, 1, 5 * STALL_S))
    await asyncio.sleep(4 * STALL_S)
    await group.account(sync, 1)
    await group.coordinator.commit(sync, 0, 1.0, {})
    assert await waiting


@virtual
async def test_engines_may_use_a_long_deadline_up_before_they_call() -> None:
    group = await Group.make(1, a=1)
    sync, *_ = await group.begin_one(0, 1, timeout_s=STALL_S)
    await asyncio.sleep(3 * STALL_S - 1)
    assert await group.coordinator.current() == (None, sync)
    await asyncio.sleep(2)
    assert await group.coordinator.current() == (None, None)


@virtual
async def test_the_memory_of_failures_is_bounded() -> None:
    group = await Group.make(1)
    for _ in range(100):
        sync = await group.begin(1)
        await group.coordinator.fail(sync, "source rank 0", "test", "again")
    assert len(group.coordinator._syncs._failures) == 64
    with pytest.raises(SyncError, match="stale: sync 1 "):
        await group.coordinator.published(0, 1, 0, None, 0)


def test_a_group_needs_a_source_rank() -> None:
    with pytest.raises(MembershipError, match="at least one source rank, not 0"):
        Coordinator(GROUP, 0, STALL_S)


@virtual
async def test_joins_that_contradict_the_group_reach_the_caller() -> None:
    group = await Group.make(2)
    with pytest.raises(MembershipError, match="two joins under one rank"):
        await group.coordinator.join(wire.encode(source(1, 2)), "stranger")
    other = (wire.TensorMeta(name=TENSORS[1].name, shape=(5,), dtype="int8"),)
    with pytest.raises(CoverageError, match="declares checkpoint tensor"):
        await group.coordinator.join(
            wire.encode(source(1, 2, tensors=other)),
            token(1),
        )


@virtual
async def test_whoever_waits_for_a_rank_hears_why_it_cannot_join() -> None:
    coordinator = Coordinator(GROUP, 2, STALL_S)
    await coordinator.join(wire.encode(source(0, 2)), token(0))
    waiting = asyncio.create_task(coordinator.joined(WAIT_S))
    await asyncio.sleep(0)
    other = (wire.TensorMeta(name=TENSORS[1].name, shape=(5,), dtype="int8"),)
    with pytest.raises(CoverageError, match="source rank 1 declares"):
        await coordinator.join(wire.encode(source(1, 2, tensors=other)), token(1))
    with pytest.raises(CoverageError, match="source rank 1 declares"):
        await waiting
    await coordinator.join(wire.encode(source(1, 2)), token(1))
    await coordinator.joined(WAIT_S)


# --- all of it at once


class Chaos:
    """Source and engine ranks as a real group runs them, with random pauses between calls and random faults.

    Every member follows its protocol until the sync ends for it, then goes on with the next one. Faults: a member
    reports a failure, goes silent for good in this sync, repeats its calls, sends calls of older syncs, or miscounts.
    """

    def __init__(self, seed: int, world_size: int, engines: int, rounds: int, slots: int, syncs: int) -> None:
        self.dice = random.Random(seed)
        self.world_size, self.rounds, self.slots, self.syncs = world_size, rounds, slots, syncs
        self.names = [f"r{index}" for index in range(engines)]
        self.outcomes: list[list[str]] = [[] for _ in range(syncs)]
        self.stamped: list[int] = []
        self.started: list[asyncio.Event] = []

    async def pause(self) -> None:
        for _ in range(self.dice.randrange(4)):
            await asyncio.sleep(0)
        if self.dice.random() < 0.2:
            await asyncio.sleep(self.dice.random())

    async def call(self, method: Callable[..., Awaitable[Any]], *args: Any, repeat: bool = False) -> Any:
        await self.pause()
        found = await method(*args)
        if repeat and self.dice.random() < 0.2:
            found = await method(*args)
        return found

    def fault(self, step: int) -> str:
        return self.faults[step] if self.dice.random() < 0.15 else ""

    async def run(self) -> None:
        self.group = await Group.make(self.world_size, self.rounds, **dict.fromkeys(self.names, 2))
        self.faults = [self.dice.choice(["", "fail", "silent", "miscount"]) for _ in range(self.syncs)]
        for step in range(self.syncs):
            trainers = [asyncio.create_task(self.trainer(rank, step)) for rank in range(self.world_size)]
            found = await asyncio.gather(*trainers)
            self.outcomes[step] = found

    async def trainer(self, rank: int, step: int) -> str:
        coordinator, version, sync = self.group.coordinator, step + 1, None
        me = f"source rank {rank}"
        engines: list[asyncio.Task[None]] = []
        try:
            if self.fault(step) == "silent":
                return "silent"
            await self.pause()
            names = self.names if rank == 0 else None
            # all of its rounds or none: a rank that must still publish may fail to
            readable = self.rounds if self.rounds <= self.slots and self.dice.random() < 0.5 else 0
            sync, requests, _ = await coordinator.begin(rank, token(rank), version, names, readable, "require_all", 20)
            if requests:
                readable = 0
            if rank == 0:
                engines = [
                    asyncio.create_task(self.reader(f"{name}/{one}", sync, step))
                    for name in self.names
                    for one in (0, 1)
                ]
            answers = [wire.encode(offer(wire.decode(one, wire.ReadRequest))) for one in requests]
            await self.call(coordinator.offer, rank, sync, answers, [[] for _ in answers], repeat=True)
            for round in range(readable, self.rounds):
                fault = self.fault(step)
                if fault == "silent":
                    return "silent"
                if fault == "fail":
                    raise RuntimeError("a fault of the trainer")
                freed = round + 1 - self.slots
                awaited = freed if freed >= 0 else None
                await self.call(coordinator.published, rank, sync, round, awaited, 20, repeat=True)
            if rank == 0:
                await asyncio.gather(*engines)
                found = await self.call(coordinator.commit, sync, 0, 1.0, {}, repeat=True)
                self.stamped.append(version)
            else:
                found = await self.call(coordinator.outcome, sync, rank, 60)
            return f"served {wire.decode(found, wire.SyncReport).version}"
        except (SyncError, DeadlineError, RuntimeError) as error:
            if not isinstance(error, RuntimeError):
                return str(error)
            return await coordinator.fail(sync, me, "trainer", str(error)) or "nothing to fail"
        finally:
            await asyncio.gather(*engines, return_exceptions=True)

    async def reader(self, name: str, sync: int, step: int) -> None:
        coordinator, version = self.group.coordinator, step + 1
        await self.call(coordinator.enter, name, "first", version, 20, repeat=True)
        await self.call(coordinator.offers, name, "first", 20)
        for round in range(self.rounds):
            if round:
                await self.call(coordinator.await_round, name, sync, round, 20, repeat=True)
            fault = self.fault(step)
            if fault == "silent":
                raise SyncError("silent")
            if fault == "fail":
                await self.call(coordinator.fail, sync, name, "pull", "a fault of the engine")
            if sync > 1 and self.dice.random() < 0.1:
                with pytest.raises(SyncError):
                    await coordinator.await_round(name, sync - 1, round, 20)
        changes = {"bytes": 1} if self.fault(step) == "miscount" else {}
        await self.call(coordinator.done, wire.encode(report(name, version, **changes)), sync, repeat=True)


@hypothesis.given(
    seed=st.integers(0, 2**32),
    world_size=st.integers(1, 4),
    engines=st.integers(0, 2),
    rounds=st.integers(1, 4),
    slots=st.integers(1, 3),
)
@hypothesis.settings(max_examples=150)
def test_any_interleaving_ends_and_every_rank_has_the_same_outcome(
    seed: int, world_size: int, engines: int, rounds: int, slots: int
) -> None:
    async def main() -> None:
        chaos = Chaos(seed, world_size, engines, rounds, min(slots, rounds), syncs=6)
        await chaos.run()
        await asyncio.sleep(STALL_S)  # the last sync may have lost everybody
        served = 0
        for step, outcomes in enumerate(chaos.outcomes):
            # with no engine rank to wait for, the driver may commit before another source rank fails
            slow = {"silent"} if engines else {"silent", "nothing to fail"}
            heard = set(outcomes) - slow
            assert len(heard) <= 1, outcomes
            if heard == {f"served {step + 1}"}:
                assert "silent" not in outcomes or not engines, "bytes were accounted for that were never published"
                served = step + 1
            else:
                assert chaos.faults[step], outcomes
        assert (await chaos.group.coordinator.current()) == (served or None, None)
        assert chaos.stamped == sorted(chaos.stamped)
        for replica in (await chaos.group.status()).replicas:
            if replica.state == "serving":
                assert replica.version == served
            else:
                assert replica.version is None

    run(main())
