"""Fair sharing and the simulated sync: by hand where numbers are known, by definition where they are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdt_core.plan.fairness import fair_rates
from rdt_core.plan.simulate import Run, simulate
from rdt_core.plan.traffic import Resource, Traffic, balance, owner_floor

pytestmark = pytest.mark.unit

#: a flow: its chunk at its reader, the resources that it passes, bytes
Flow = tuple[int, int, tuple[int, ...], float]


def run(flows: list[Flow], capacities: list[float], land: list[list[float]] | None = None) -> Run:
    """Simulates flows (reader, chunk, resources, bytes) over resources with these bytes a second."""
    flows = sorted(flows)
    way, need = np.zeros((len(flows), 3), np.int64), np.zeros((len(flows), 3))
    for at, (_, _, passed, nbytes) in enumerate(flows):
        for place, one in enumerate(passed):
            way[at, place], need[at, place] = one, nbytes / capacities[one]
    resources = tuple(Resource("nic in", 0, index) for index in range(len(capacities)))
    reader, chunk = np.array([flow[0] for flow in flows]), np.array([flow[1] for flow in flows])
    nbytes = np.array([flow[3] for flow in flows])
    landing = np.array(land) if land is not None else np.zeros((reader.max() + 1, chunk.max() + 1))
    return simulate(reader, chunk, nbytes, Traffic(resources, way, need, np.zeros(len(capacities))), landing)


def test_one_transfer_takes_its_bytes_at_the_slowest_rate_on_its_way() -> None:
    assert run([(0, 0, (0, 1), 100.0)], [10.0, 5.0]).seconds == pytest.approx(20)


def test_two_share_what_both_need_and_the_rest_goes_to_who_can_use_it() -> None:
    # both leave one owner (10 a second), one of the readers takes only 2 a second
    found = run([(0, 0, (0, 1), 20.0), (1, 0, (0, 2), 80.0)], [10.0, 2.0, 100.0])
    assert found.finished.tolist() == pytest.approx([10, 10])
    # and what is left is used when one is done
    found = run([(0, 0, (0, 1), 10.0), (1, 0, (0, 2), 80.0)], [10.0, 100.0, 100.0])
    assert found.finished.tolist() == pytest.approx([2, 9])


def test_two_chunks_are_in_flight_and_the_third_waits_for_the_first_to_land() -> None:
    # chunks at three owners: the first two together, the third only once the first has landed
    flows: list[Flow] = [(0, 0, (0,), 10.0), (0, 1, (1,), 40.0), (0, 2, (2,), 10.0)]
    assert run(flows, [10.0, 10.0, 10.0]).seconds == pytest.approx(4)
    assert run(flows, [10.0, 10.0, 2.0]).seconds == pytest.approx(6)
    assert run(flows, [10.0, 10.0, 2.0], [[3.0, 0.0, 0.0]]).seconds == pytest.approx(9)
    # the landing of what came early waits for its turn
    early: list[Flow] = [(0, 0, (0,), 40.0), (0, 1, (1,), 10.0)]
    assert run(early, [10.0, 10.0], [[1.0, 1.0]]).seconds == pytest.approx(6)


def test_readers_that_walk_together_wait_for_the_same_owners() -> None:
    together: list[Flow] = [(reader, chunk, (chunk, 4 + reader), 10.0) for reader in range(4) for chunk in range(4)]
    apart: list[Flow] = [(r, c, ((c + r) % 4, 4 + r), 10.0) for r in range(4) for c in range(4)]
    capacities = [10.0] * 8
    assert run(together, capacities).seconds == pytest.approx(8)
    assert run(apart, capacities).seconds == pytest.approx(4)


@st.composite
def networks(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    resources = draw(st.integers(1, 5))
    count = draw(st.integers(1, 8))
    way = np.array(draw(st.lists(st.tuples(*[st.integers(0, resources - 1)] * 2), min_size=count, max_size=count)))
    weight = np.array(
        draw(
            st.lists(
                st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.0, 1.0])), min_size=count, max_size=count
            )
        )
    )
    weight[:, 1] = np.where(way[:, 0] == way[:, 1], 0.0, weight[:, 1])
    return way, weight, resources


@settings(max_examples=300)
@given(networks())
def test_rates_are_max_min_fair(network: tuple[np.ndarray, np.ndarray, int]) -> None:
    """The definition: nobody is above capacity, and each flow is among the fastest at a resource that is full."""
    way, weight, resources = network
    rates = fair_rates(way, weight, resources)
    used = np.bincount(way.ravel(), (weight * rates[:, None]).ravel(), resources)
    assert (used <= 1 + 1e-9).all()
    for flow in range(len(way)):
        reasons = []
        for place in range(2):
            if weight[flow, place]:
                resource = way[flow, place]
                others = rates[((way == resource) & (weight > 0)).any(axis=1)]
                reasons.append(used[resource] > 1 - 1e-9 and rates[flow] >= others.max() * (1 - 1e-9))
        assert any(reasons)


@settings(max_examples=100)
@given(st.data())
def test_no_sync_is_faster_than_its_busiest_resource_or_slower_than_one_after_the_other(data: st.DataObject) -> None:
    flows = data.draw(
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(0, 3), st.tuples(st.integers(0, 2), st.integers(3, 5)), st.integers(1, 99)),
            min_size=1, max_size=20, unique_by=lambda flow: flow[:3],
        )
    )  # fmt: skip
    capacities = [10.0, 5.0, 20.0, 10.0, 2.0, 7.0]
    found = run([(r, c, way, float(nbytes)) for r, c, way, nbytes in flows], capacities)
    busy = [sum(nbytes / capacities[i] for _, _, way, nbytes in flows if i in way) for i in range(6)]
    assert found.seconds >= max(busy) * (1 - 1e-6)
    alone = sum(max(nbytes / capacities[i] for i in way) for _, _, way, nbytes in flows)
    assert found.seconds <= alone * (1 + 1e-6)


def test_nothing_takes_no_time() -> None:
    none = np.zeros(0, np.int64)
    traffic = Traffic((), np.zeros((0, 3), np.int64), np.zeros((0, 3)), none)
    assert simulate(none, none, none, traffic, np.zeros((0, 0))).seconds == 0


def test_balance_and_what_no_choice_can_mend() -> None:
    one = balance("ranks", np.array([10, 20, 30]))
    assert (one.count, one.total, one.largest, one.mean, one.ratio) == (3, 60, 30, 20.0, 1.5)
    assert balance("ranks", np.zeros(3)).ratio == 1
    # rank 0 alone holds two thirds
    assert owner_floor([(20.0, frozenset({0})), (10.0, frozenset({0, 1, 2}))], 3) == pytest.approx(2)
    # ranks 0 and 1 share most, each alone holds little
    demand = [(2.0, frozenset({0})), (26.0, frozenset({0, 1})), (2.0, frozenset({2}))]
    assert owner_floor(demand, 3) == pytest.approx(28 / 2 / 10)
    assert owner_floor([(30.0, frozenset({0, 1, 2}))], 3) == 1
    assert owner_floor([], 3) == 1
