"""Comparisons without a sync: what engines hold against what source ranks hold, by tensor, with nothing moved."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from rdt_core.checking import CHANGED
from rdt_core.errors import MembershipError, SyncError
from rdt_core.wire import CheckReport, decode, encode
from rdt_testbed.halves import SHAPES, Elsewhere, Group, value

pytestmark = pytest.mark.unit

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


def check(made: Group) -> CheckReport:
    """Compares, on every rank at once; all must get the same report."""
    reports = list(made.pool.map(lambda sync: sync.verify(), made.syncs))
    assert all(report == reports[0] for report in reports)
    assert decode(encode(reports[0]), CheckReport) == reports[0]
    return reports[0]


def states(report: CheckReport, replica: str = "a") -> dict[str, str]:
    found = {tensor.name: tensor.state for tensor in report.tensors if tensor.replica == replica}
    assert list(found) == list(SHAPES)
    return found


@pytest.mark.parametrize("pack", [0, 1 << 20], ids=["direct", "packed"])
@pytest.mark.parametrize("mode", MODES)
def test_equal_before_and_after_and_different_where_it_differs(group, mode: str, pack: int) -> None:
    made = group(2, 2, ("a", "b"), mode=mode, pack_threshold=pack)
    for source in made.sources:
        source.fill(1)
    # before the first sync no request was answered yet
    assert set(states(check(made)).values()) == {"differs"}
    made.publish(1)
    report = check(made)
    assert report.is_equal
    assert report.version == 1
    assert report.replicas == ("a", "b")
    assert set(states(report, "a").values()) == set(states(report, "b").values()) == {"equal"}
    whole = sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())
    # embed and norm lie on both ranks of a replica
    twice = 4 * (40 * 16 + 16)
    assert report.bytes == 2 * (whole + twice)
    before = {key: tensor.clone() for key, tensor in made.worker(1).state().items()}
    made.worker(1).module.layers[1].qk.data[9, 3] += 1  # row 8 + 1 of the part of k that rank 1 takes
    report = check(made)
    assert not report.is_equal
    wrong = [tensor for tensor in report.tensors if tensor.state == "differs"]
    assert [(tensor.name, tensor.replica) for tensor in wrong] == [("layers.1.k", "a")]
    assert wrong[0].detail.startswith("rows 4 to 7 of 8 (source rank 1 and a/1)")
    # nothing was written, and the engine serves on
    made.worker(1).module.layers[1].qk.data[9, 3] = before["layers.1.qk"][9, 3]
    made.serves(1, "a")
    made.serves(1, "b")
    made.publish(2)
    made.serves(2, "a")
    assert check(made).is_equal


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_s_present_weights_are_compared_and_not_the_published_ones(group, mode: str) -> None:
    made = group(2, 1, mode=mode)
    made.publish(1)
    name, low, part = made.sources[1].parts[3]
    part[2, 20] += 1
    report = check(made)
    assert {one for one, state in states(report).items() if state == "differs"} == {name}
    made.worker(0).module.layers[0].down.data[low + 2, 20] += 1
    assert check(made).is_equal


def test_what_is_cast_or_does_not_land_in_place_is_told_as_such(group) -> None:
    made = group(2, 2, wire="bfloat16")
    made.publish(1)
    report = check(made)
    assert set(states(report).values()) == {"not comparable"}
    assert report.bytes == 0
    assert report.tensors[0].detail == CHANGED
    made = group(2, 2, landing=Elsewhere)
    made.publish(1)
    assert set(states(check(made)).values()) == {"not comparable"}


def test_what_nobody_takes_is_told_as_such(group) -> None:
    made = group(1, 1, ignored=("norm",))
    made.attach("late", forget="norm")
    made.publish(1)
    report = check(made)
    assert states(report, "late")["norm"] == "not taken"
    assert states(report, "late")["embed"] == "equal"


def test_a_torn_replica_can_be_looked_at(group) -> None:
    made = group(verify="full")
    made.publish(1)
    name = "layers.0.down"
    made.spoil(lambda: made.worker(1).module.layers[0].down.data[3].copy_(value(name, 2)[3, 12:] + 1), rank=1)
    made.fails(2)
    report = check(made)
    assert states(report)[name] == "differs"
    assert "rows 0 to 7 of 16, columns 12 to 23 of 24 (source rank 0 and a/1)" in next(
        tensor.detail for tensor in report.tensors if tensor.state == "differs"
    )
    assert made.control.status().replicas[0].state == "torn"


def test_parameters_that_moved_are_compared_where_they_are_now(group) -> None:
    made = group(2, 1, mode="live")
    made.publish(1)
    source = made.sources[0]
    source.parts = [(name, low, part.clone()) for name, low, part in source.parts]
    assert check(made).is_equal
    made.publish(2)
    made.serves(2)


def test_a_rank_that_does_not_come_is_named_and_the_next_check_works(group) -> None:
    made = group(3, 1, timeout_s=0.5)
    made.publish(1)
    futures = [made.pool.submit(sync.verify) for sync in made.syncs[:2]]
    errors = [str(future.exception(30)) for future in futures]
    assert all("for every source rank to begin the check; no answer from source rank 2" in error for error in errors)
    assert check(made).is_equal


def test_a_replica_that_fails_fails_the_check_for_all_ranks(group) -> None:
    made = group(2, 2)
    made.publish(1)
    made.worker(1).receiver.check = lambda number: (_ for _ in ()).throw(RuntimeError("the device is gone"))
    futures = [made.pool.submit(sync.verify) for sync in made.syncs]
    errors = [future.exception(30) for future in futures]
    assert all(isinstance(error, SyncError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "the device is gone" in str(errors[0])
    del made.worker(1).receiver.check
    assert check(made).is_equal
    made.publish(2)
    made.serves(2)


def test_a_detached_replica_is_not_compared_and_one_that_went_is_connected_again(group) -> None:
    made = group(2, 1, ("a", "b"))
    made.publish(1)
    made.syncs[0].detach("b")
    assert check(made).replicas == ("a",)
    made.control.disconnect("a/0", made.worker(0).receiver._connection.manifest.incarnation)
    assert check(made).is_equal


def test_ranks_and_readers_of_another_check_are_refused(group) -> None:
    made = group(1, 1)
    made.publish(1)
    with pytest.raises(MembershipError, match="was joined by process"):
        made.control.check_begin(0, "another", 1.0)
    sync = made.syncs[0]
    number = made.control.check_begin(0, sync._token, 1.0)
    with pytest.raises(SyncError, match=f"check {number + 1} of group 'test' is over"):
        made.control.check_source(0, number + 1, {})
    with pytest.raises(MembershipError, match="replica 'c' is not connected"):
        made.control.check_open(number, ["c"])
    waiting = []
    thread = threading.Thread(target=lambda: waiting.append(made.control.check_begin(0, sync._token, 1.0)))
    thread.start()
    thread.join()
    assert waiting == [number + 1]
    with pytest.raises(SyncError, match=f"check {number} of group 'test' is over"):
        made.control.check_open(number, ["a"])
    assert check(made).is_equal
