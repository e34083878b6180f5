"""Verified syncs inside one process: what may go wrong between two memories is found before the commit, and named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from rdt_core.errors import DeadlineError, RdtError, TornReplicaError
from rdt_core.naming import Names
from rdt_core.report import log_line
from rdt_core.verifying import link_blocks
from rdt_testbed.halves import Elsewhere, Group, value
from rdt_testbed.reports import are_alike

pytestmark = pytest.mark.unit

#: rows of `layers.0.down` that lie together at source rank 0: a bucket holds a few
ROWS = {"live": 8, "snapshot": 8, "bucket": 5}
MODES = ["live", "snapshot", "bucket"]


@pytest.fixture
def group() -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(*args, **options) -> Group:
        made.append(Group(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("verify", ["sample", "full"])
@pytest.mark.parametrize("pack", [0, 1 << 20], ids=["direct", "packed"])
@pytest.mark.parametrize("mode", MODES)
def test_verified_syncs_go_well_and_say_what_it_cost(group, mode: str, pack: int, verify: str) -> None:
    made = group(3, 2, ("a", "b"), mode=mode, pack_threshold=pack, verify=verify)
    for version in (1, 2, 3):
        reports = made.publish(version)
        made.serves(version, "a")
        made.serves(version, "b")
        assert are_alike(reports)
        assert reports[0].verify == verify
        assert reports[0].phases["verify"] > 0
        assert all(reader.phases["verify"] > 0 for reader in reports[0].readers)
        assert f"verified ({verify})" in log_line(reports[0])
    assert made.publish(4, verify="off")[0].verify == "off"
    assert "verify" not in made.publish(5, verify="off")[0].phases


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("pack", [0, 1 << 20], ids=["direct", "packed"])
def test_buckets_are_digested_before_they_are_written_again(group, lookahead: int, pack: int) -> None:
    made = group(2, 2, mode="bucket", lookahead=lookahead, pack_threshold=pack, bucket_bytes=300, verify="full")
    assert made.syncs[0]._publisher.rounds > 5
    for version in (1, 2):
        made.publish(version)
        made.serves(version)


@pytest.mark.parametrize("landing", [None, Elsewhere], ids=["in_place", "elsewhere"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_what_is_cast_or_used_up_when_its_module_closes_is_digested_before(group, landing, wire: str) -> None:
    made = group(2, 2, landing=landing, wire=wire, verify="full", pack_threshold=16)
    for version in (1, 2):
        made.publish(version)
        made.serves(version)
    connection = made.worker(1).receiver._connection
    link = connection.program.chunks[0].links[0]
    memory, place = connection.tensors[int(link.copies.destination[0])], int(link.copies.destination_offset[0])
    # nothing of a cast box or of memory lent to a module is left when the sync ends
    made.spoil(lambda: memory[place : place + 1].add_(1), rank=1)
    text = str(made.fails(3)[0])
    assert text.startswith(f"version 3: a/1 failed in verify: what it received of source rank {link.source} is not ")


def spoil_scattered(made: Group, rank: int, spoil: Callable[[], None]) -> Callable[[], None]:
    """From here on something happens to what was packed, after it was scattered. Returns what ends that."""
    steps = [step for step in made.worker(rank).receiver._connection.steps if step.scatter is not None]

    def after(run: Callable[[], None]) -> None:
        run()
        spoil()

    for step in steps:
        step.scatter.run = partial(after, step.scatter.run)

    def heal() -> None:
        for step in steps:
            del step.scatter.run

    return heal


def flip(made: Group, version: int) -> None:
    row = value("layers.0.down", version)[3, 12:].clone()
    row.view(torch.uint8)[9] ^= 4
    made.worker(1).module.layers[0].down.data[3] = row


def swap(made: Group, version: int) -> None:
    made.worker(1).module.layers[0].down.data[[2, 4]] = value("layers.0.down", version)[[4, 2], 12:]


def signs(made: Group, version: int) -> None:
    rows = value("layers.0.down", version)[:5, 12:].clone()
    rows[1, 4] *= -1
    rows[3, 4] *= -1
    made.worker(1).module.layers[0].down.data[:5] = rows


@pytest.mark.parametrize("fault", [flip, swap, signs])
@pytest.mark.parametrize("pack", [0, 1 << 20], ids=["direct", "packed"])
@pytest.mark.parametrize("mode", MODES)
def test_what_changes_on_the_way_is_found_and_named(group, mode: str, pack: int, fault) -> None:
    made = group(mode=mode, pack_threshold=pack, verify="full")
    made.publish(1)
    before = made.worker(0).version()
    heal = spoil_scattered(made, 1, lambda: fault(made, 2)) if pack else partial(made.heal, 1)
    if not pack:
        made.spoil(lambda: fault(made, 2), rank=1)
    errors = made.fails(2)
    text = str(errors[0])
    assert text.startswith(
        "version 2: a/1 failed in verify: what it received of source rank 0 is not what that rank holds: "
    )
    last = ROWS[mode] - 1
    assert f"'layers.0.down' rows 0 to {last} of 16, columns 12 to 23 of 24 (1 of " in text
    assert "source rank 1" not in text
    assert before == 1
    for worker in made.replicas["a"].workers:
        assert worker.version() is None
        with pytest.raises(TornReplicaError, match=r"layers\.0\.down"):
            worker.state()
    assert made.control.status().replicas[0].state == "torn"
    heal()
    made.publish(3)
    made.serves(3)


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_finds_what_stays_wrong_after_a_few_syncs(group, mode: str) -> None:
    made = group(mode=mode, verify="sample")
    made.publish(1)
    current = 1
    made.spoil(lambda: flip(made, current), rank=1)
    found = None
    for current in range(2, 200):
        for source in made.sources:
            source.fill(current)
        futures = [made.pool.submit(sync.publish, current) for sync in made.syncs]
        found = next((error for error in (future.exception(30) for future in futures) if error is not None), None)
        if found is not None:
            break
    assert f"'layers.0.down' rows 0 to {ROWS[mode] - 1} of 16" in str(found)
    assert current > 2 or "1 of" in str(found)


@pytest.mark.parametrize("mode", MODES)
def test_a_wrong_pack_is_found_because_the_original_is_digested(group, mode: str) -> None:
    made = group(mode=mode, pack_threshold=1 << 20, verify="full")
    made.publish(1)
    publisher = made.syncs[1]._publisher
    request = publisher._served["a/0"].request
    link = link_blocks(request, publisher.manifest)
    (first,) = Names(publisher.manifest).tensors(link.blocks, 0, 0)  # what the arena starts with
    right = publisher._pack

    def wrong(number: int) -> None:
        right(number)
        for served in publisher._served.values():
            if served.request.reader == "a/0" and number == 0:
                served.arena.tensor[:8] = served.arena.tensor[8:16].clone()

    publisher._pack = wrong
    text = str(made.fails(2)[0])
    assert text.startswith("version 2: a/0 failed in verify: what it received of source rank 1 ")
    assert f": {publisher.manifest.tensors[first].name!r} rows " in text
    publisher._pack = right
    made.publish(3)
    made.serves(3)


def test_without_verification_the_same_fault_is_served(group) -> None:
    """What the tests above show is the digests' doing."""
    made = group()
    made.publish(1)
    made.spoil(lambda: flip(made, 2), rank=1)
    made.publish(2)
    assert not torch.equal(made.worker(1).module.layers[0].down, value("layers.0.down", 2)[:, 12:])
    assert made.replicas["a"].version(deadline=float("inf")) == 2


def test_with_best_effort_only_the_spoiled_replica_fails(group) -> None:
    made = group(2, 2, ("a", "b"), verify="full", policy="best_effort")
    made.publish(1)
    made.spoil(lambda: flip(made, 2), rank=1)
    report = made.publish(2)[0]
    assert report.replicas == ("b",)
    assert list(report.failed) == ["a"]
    assert "'layers.0.down' rows 0 to 7 of 16" in report.failed["a"]
    made.serves(2, "b")
    assert {one.name: one.state for one in made.control.status().replicas} == {"a": "torn", "b": "serving"}
    made.heal(1)
    made.publish(3)
    made.serves(3, "a")
    made.serves(3, "b")


def test_ranks_that_disagree_about_verification_are_told_so(group) -> None:
    made = group()
    made.publish(1)
    modes = {0: "full", 1: "off"}
    futures = [made.pool.submit(sync.publish, 2, verify=modes[sync.rank]) for sync in made.syncs]
    errors = [str(future.exception(30)) for future in futures]
    assert errors[0] == errors[1]
    assert "with verify 'full'" in errors[0]
    assert "with verify 'off'" in errors[0]
    made.publish(2, verify="full")
    made.serves(2)
    with pytest.raises(RdtError, match="verify must be one of off, sample, full; found 'all'"):
        made.syncs[0].publish(3, verify="all")


def test_a_source_rank_that_never_digests_is_named(group) -> None:
    made = group(timeout_s=1.0, verify="full")
    made.publish(1)
    digests = made.control.digests
    made.control.digests = lambda rank, *args: None if rank == 1 else digests(rank, *args)
    error = made.fails(2)[0]
    assert "s for the digests of version 2; no answer from source rank 1" in str(error)
    made.control.digests = digests
    made.publish(3)
    made.serves(3)


def test_a_failure_while_digests_are_awaited_ends_the_wait(group) -> None:
    made = group(verify="full")
    made.publish(1)
    digests = made.control.digests
    reached = threading.Event()

    def fail(rank: int, sync: int, *args) -> None:
        if rank == 0:
            digests(rank, sync, *args)
            return
        reached.set()
        raise RuntimeError("the device is gone")

    made.control.digests = fail
    error = made.fails(2)[0]
    assert str(error) == "version 2: source rank 1 failed in verify: the device is gone"
    assert not isinstance(error, DeadlineError)
    assert reached.is_set()


def test_other_numbers_of_blocks_on_both_ends_are_refused(group) -> None:
    made = group(verify="full")
    made.publish(1)
    digests = made.control.digests
    made.control.digests = lambda rank, sync, some, seconds: digests(
        rank, sync, {reader: one[8:] for reader, one in some.items()}, seconds
    )
    text = str(made.fails(2)[0])
    assert "digested" in text
    assert "both ends must run the same rdt version" in text
