"""The status of a group: what its coordinator says before, in and after a sync, and how it is shown."""

from __future__ import annotations

import asyncio
import io

import msgspec
import pytest
from rich.console import Console

from rdt_core import wire
from rdt_core.coordinator import Coordinator
from rdt_core.errors import SyncError
from rdt_core.statusview import ago, head, view
from rdt_testbed.clock import run
from rdt_testbed.group import GROUP, engine, report, source, token

pytestmark = pytest.mark.unit

WAIT_S = 60.0


def shown(status: wire.GroupStatus) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(view(status))
    return out.getvalue()


async def status(coordinator: Coordinator) -> wire.GroupStatus:
    return wire.decode(await coordinator.status(), wire.GroupStatus)


async def make(joined: int = 2, replicas: tuple[str, ...] = ("a", "b")) -> Coordinator:
    coordinator = Coordinator(GROUP, 2, 600.0)
    for rank in range(joined):
        await coordinator.join(wire.encode(source(rank, 2)), token(rank))
    for name in replicas:
        await coordinator.connect(wire.encode(engine(name, 0, 1)))
    return coordinator


async def begin(coordinator: Coordinator, version: int, policy: str = "require_all") -> int:
    found = await asyncio.gather(
        *(coordinator.begin(rank, token(rank), version, None, 0, policy, WAIT_S) for rank in range(2))
    )
    for rank in range(2):
        await coordinator.published(rank, found[0][0], 0, None, 0)
    return found[0][0]


async def sync(coordinator: Coordinator, version: int, names: tuple[str, ...] = ("a", "b")) -> int:
    number = await begin(coordinator, version)
    links = (wire.LinkReport(source=1, reader="a/0", kind="local", bytes=72, seconds=0.5),)
    for name in names:
        await coordinator.done(wire.encode(report(f"{name}/0", version, links=links)), number)
    await coordinator.commit(number, 0, 1.5, {"pull": 1.0})
    return number


def test_before_the_first_sync() -> None:
    async def scenario() -> wire.GroupStatus:
        return await status(await make(joined=1))

    found = run(scenario())
    assert (found.sync, found.waits_for, found.last) == (None, "", None)
    assert 0 <= found.sources[0].heard_s <= found.sources[0].since_s < 60
    text = shown(found)
    assert "no version yet, epoch 0, 1 of 2 source ranks, 2 replicas" in text
    assert "absent" in text
    assert "has not joined" in text
    assert "72" not in text.split("72 B a sync")[1]


def test_a_sync_that_runs_says_whom_it_waits_for() -> None:
    async def scenario() -> tuple[wire.GroupStatus, wire.GroupStatus]:
        coordinator = await make()
        await sync(coordinator, 1)
        number = await begin(coordinator, 2)
        pulling = asyncio.create_task(coordinator.enter("a/0", "first", 2, WAIT_S))
        await pulling
        early = await status(coordinator)
        await coordinator.done(wire.encode(report("a/0", 2)), number)
        return early, await status(coordinator)

    early, late = run(scenario())
    assert (early.version, early.sync_version, early.last.version) == (1, 2, 1)
    assert {one.name: one.state for one in early.replicas} == {"a": "updating", "b": "serving"}
    assert early.waits_for == "engine rank b/0 in pause, begin or the start of the pull"
    assert late.waits_for == early.waits_for
    text = shown(early)
    assert "sync 2 of version 2 for" in text
    assert "receiving" in text
    assert "updating" in text


def test_the_last_sync() -> None:
    async def scenario() -> tuple[wire.GroupStatus, wire.GroupStatus]:
        coordinator = await make()
        await sync(coordinator, 1)
        good = await status(coordinator)
        number = await begin(coordinator, 2)
        await coordinator.enter("a/0", "first", 2, WAIT_S)
        await coordinator.fail(number, "engine rank a/0", "pull", "the link\nis down")
        return good, await status(coordinator)

    good, bad = run(scenario())
    last = good.last
    assert (last.version, last.outcome, last.seconds, last.bytes, last.mode) == (1, "committed", 1.5, 144, "live")
    assert last.slowest.source == 1
    assert "last sync: version 1 committed 0.0 s ago: 144 B in 1.500 s" in shown(good)
    assert "slowest link 1 -> a/0 (local)" in shown(good)
    assert (bad.last.version, bad.last.outcome) == (2, "failed")
    assert bad.last.error == bad.last_failure == "version 2: engine rank a/0 failed in pull: the link\nis down"
    assert {one.name: one.state for one in bad.replicas} == {"a": "torn", "b": "serving"}
    assert len(list(head(bad))) == 2, "a failure is not said twice"
    assert "the link is down" in shown(bad)


def test_replicas_that_were_left_out() -> None:
    async def scenario() -> tuple[wire.GroupStatus, wire.GroupStatus]:
        coordinator = await make()
        number = await begin(coordinator, 1, "best_effort")
        await coordinator.done(wire.encode(report("a/0", 1)), number)
        await coordinator.commit(number, 0, 1.5, {}, {"b": "it is on fire"})
        partial = await status(coordinator)
        await coordinator.detach("b")
        return partial, await status(coordinator)

    partial, gone = run(scenario())
    assert partial.last.outcome == "partial"
    assert list(partial.last.failed) == ["b"]
    assert "left out 'b'" in shown(partial)
    assert shown(partial).count("replica b") == 1
    row = next(line for line in shown(gone).splitlines() if "replica b" in line)
    assert "absent" in row
    for one in (partial, gone):
        assert (
            "replica 'b' was left out of the last sync: version 1: replica 'b' failed in drive: it is on fire"
            in " ".join(shown(one).split())
        )


def test_an_engine_rank_that_is_missing() -> None:
    async def scenario() -> wire.GroupStatus:
        coordinator = await make(replicas=())
        await coordinator.connect(wire.encode(engine("a", 1, 2)))
        return await status(coordinator)

    found = run(scenario())
    assert found.replicas[0].state == "connecting"
    assert "engine rank a/0" in shown(found)
    assert "has not connected" in shown(found)


def test_a_rank_that_begins_is_heard() -> None:
    async def scenario() -> None:
        coordinator = await make()
        members = coordinator._members
        members.sources[0].heard -= 100
        reader = members.replicas["a"].readers[0]
        reader.heard -= 100
        assert (await status(coordinator)).sources[0].heard_s >= 100
        await asyncio.gather(
            *(coordinator.begin(rank, token(rank), 1, None, 1, "require_all", WAIT_S, "off", 1) for rank in range(2))
        )
        await coordinator.published(0, 1, 0, None, 0)
        await coordinator.published(1, 1, 0, None, 0)
        await coordinator.enter("a/0", "first", 1, WAIT_S)
        found = await status(coordinator)
        assert found.sources[0].heard_s < 50
        assert found.replicas[0].readers[0].heard_s < 50

    run(scenario())


def test_timelines_of_source_ranks_come_with_their_last_round_or_with_their_question() -> None:
    def line(member: str) -> bytes:
        return wire.encode(wire.Timeline(member=member, host="h", pid=1, began=1.0, spans=()))

    async def scenario() -> None:
        coordinator = await make(replicas=("a",))
        found = await asyncio.gather(
            *(coordinator.begin(rank, token(rank), 1, None, 0, "require_all", WAIT_S) for rank in range(2))
        )
        number = found[0][0]
        await coordinator.published(0, number, 0, None, 0)
        await coordinator.published(1, number, 0, None, 0, line("early"))
        await coordinator.done(wire.encode(report("a/0", 1)), number)
        asking = asyncio.create_task(coordinator.outcome(number, 1, WAIT_S, line("late")))
        await asyncio.sleep(0)
        told = wire.decode(await coordinator.commit(number, 0, 1.0, {}), wire.SyncReport)
        assert [one.member for one in told.timelines] == ["late"]
        assert wire.decode(await asking, wire.SyncReport) == told.without_timelines()
        # one that comes after the commit changes nothing
        await coordinator.outcome(number, 1, WAIT_S, line("after"))
        assert wire.decode(await coordinator.commit(number, 0, 1.0, {}), wire.SyncReport) == told

    run(scenario())


def test_a_damaged_timeline_is_refused() -> None:
    async def scenario() -> None:
        coordinator = await make(replicas=("a",))
        number = await begin(coordinator, 1)
        with pytest.raises(wire.WireError):
            await coordinator.outcome(number, 1, WAIT_S, b"12345")

    run(scenario())


def test_a_status_of_an_older_coordinator_is_shown() -> None:
    async def scenario() -> wire.GroupStatus:
        coordinator = await make()
        await sync(coordinator, 1)
        return await status(coordinator)

    fields = msgspec.to_builtins(run(scenario()))
    for new in ("last", "sync_s", "waits_for"):
        del fields[new]
    assert "version 1" in shown(msgspec.convert(fields, wire.GroupStatus))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (12, "12 s"), (125, "2 min"), (7300, "2 h"), (200_000, "2 d")],
)
def test_ago(seconds: float, said: str) -> None:
    assert ago(seconds) == said


RAY_SAYS = """a worker of replica 'b' died (called for pull): its worker process has died (pid 4711 on 192.0.2.7)"""


@pytest.mark.parametrize("width", [80, 200])
def test_a_torn_replica_is_torn_in_all_its_ranks_and_its_reason_is_a_line(width: int) -> None:
    async def scenario() -> wire.GroupStatus:
        coordinator = await make()
        number = await begin(coordinator, 2)
        await coordinator.enter("b/0", "first", 2, WAIT_S)
        await coordinator.fail(number, "replica 'b'", "pull", RAY_SAYS, None, "b")
        return await status(coordinator)

    out = io.StringIO()
    found = run(scenario())
    Console(file=out, width=width).print(view(found))
    lines = out.getvalue().splitlines()
    rows = {name: next(line for line in lines if name in line) for name in ("engine rank a/0", "engine rank b/0")}
    assert "connected" in rows["engine rank a/0"]
    assert "torn" in rows["engine rank b/0"]
    assert "connected" not in rows["engine rank b/0"]
    assert len(lines) <= 24
    said = " ".join(out.getvalue().split())
    assert said.count(RAY_SAYS) == 1
    assert "replica 'b' is torn by this failure" in said
    assert all(len(line) <= width for line in lines)
    later = " ".join(shown(msgspec.structs.replace(found, last=None)).split())
    assert f"replica 'b' is torn: version 2: replica 'b' failed in pull: {RAY_SAYS}" in later


def test_what_a_failed_sync_leaves_is_forgotten_by_the_next() -> None:
    async def scenario() -> wire.GroupStatus:
        coordinator = await make()
        number = await begin(coordinator, 1)
        await coordinator.fail(number, "engine rank a/0", "pull", "boom")
        with pytest.raises(SyncError):
            await coordinator.commit(number, 0, 1.0, {})
        await sync(coordinator, 2)
        return await status(coordinator)

    found = run(scenario())
    assert found.last.outcome == "committed"
    assert "latest failure: version 1" in shown(found)
