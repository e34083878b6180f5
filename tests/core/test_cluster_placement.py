"""Seats in order and ranks on seats: pure, for any mix of nodes, with the refusals."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_core.errors import PlacementError
from rdt_core.placement import EngineShape, Placement, Seat, assign, demand, order

pytestmark = pytest.mark.unit


def node(name: str, address: str, gpus: int, first_bundle: int = 0) -> list[Seat]:
    return [Seat(first_bundle + gpu, name, address, str(gpu)) for gpu in range(gpus)]


def cluster(*sizes: int) -> list[Seat]:
    """Nodes a, b, … of these sizes."""
    seats: list[Seat] = []
    for number, size in enumerate(sizes):
        seats += node("abcdefgh"[number], f"10.0.0.{number + 1}", size, len(seats))
    return seats


def nodes(placement: Placement) -> list[str]:
    """Each engine as the string of its ranks' nodes."""
    return ["".join(engine.node_ids) for engine in placement.engines]


def test_order_is_density_then_node_then_gpu() -> None:
    seats = [
        Seat(0, "x", "10.0.0.10", "10"),
        Seat(1, "x", "10.0.0.10", "9"),
        Seat(2, "y", "10.0.0.9", "1"),
        Seat(3, "y", "10.0.0.9", "0"),
        Seat(4, "z", "10.0.0.1", "0"),
        Seat(5, "w", "10.0.0.77", "2"),
        Seat(6, "w", "10.0.0.77", "0"),
        Seat(7, "w", "10.0.0.77", "1"),
    ]
    assert [seat.bundle for seat in order(seats)] == [6, 7, 5, 3, 2, 1, 0, 4]


def test_names_and_uuids_have_an_order_too() -> None:
    seats = [
        Seat(0, "n", "host-b", "GPU-b"),
        Seat(1, "n", "host-b", "GPU-a"),
        Seat(2, "m", "10.0.0.1", "0"),
        Seat(3, "m", "10.0.0.1", "1"),
        Seat(4, "k", "fd00::1", "0"),
        Seat(5, "k", "fd00::1", "1"),
    ]
    assert [seat.bundle for seat in order(seats)] == [2, 3, 4, 5, 1, 0]


def test_six_trainers_and_an_engine_of_two_on_one_node() -> None:
    placement = assign(cluster(8), trainers=6, engines=[EngineShape(tp=2)])
    assert placement.trainers.bundles == (0, 1, 2, 3, 4, 5)
    assert placement.engines[0].bundles == (6, 7)
    assert placement.engines[0].bundle_list == "6,7"
    assert placement.engines[0].gpus == ("6", "7")
    assert placement.spare == ()
    assert placement.notes == ()


def test_eight_and_eight_on_two_nodes() -> None:
    placement = assign(cluster(8, 8), trainers=8, engines=[EngineShape(tp=4, replicas=2)])
    assert placement.trainers.nodes == ("a",)
    assert nodes(placement) == ["bbbb", "bbbb"]


def test_an_engine_over_two_nodes_takes_both_whole_and_in_order() -> None:
    placement = assign(cluster(8, 8, 8), trainers=8, engines=[EngineShape(tp=8, pp=2)])
    assert nodes(placement) == ["b" * 8 + "c" * 8]
    assert placement.engines[0].gpus == tuple("01234567" * 2)


def test_an_engine_that_fits_never_straddles() -> None:
    placement = assign(cluster(8, 8), trainers=6, engines=[EngineShape(tp=4), EngineShape(tp=2), EngineShape(tp=4)])
    assert nodes(placement) == ["bbbb", "aa", "bbbb"]
    with pytest.raises(PlacementError, match=r"engine 0 of 6 ranks \(tp 3, pp 2\) fits on one node and would straddle"):
        assign(cluster(8, 8), trainers=3, engines=[EngineShape(tp=3, pp=2), EngineShape(tp=7)])


def test_a_small_engine_fills_the_tightest_gap() -> None:
    assert nodes(assign(cluster(8, 8), trainers=6, engines=[EngineShape(tp=2)])) == ["aa"]


def test_large_engines_come_first_and_keep_their_number() -> None:
    placement = assign(cluster(8, 4), trainers=0, engines=[EngineShape(tp=2, replicas=2), EngineShape(tp=8)])
    assert nodes(placement) == ["bb", "bb", "a" * 8]


def test_trainers_give_way_where_the_densest_node_is_needed_whole() -> None:
    placement = assign(cluster(8, 6), trainers=6, engines=[EngineShape(tp=8)])
    assert placement.trainers.nodes == ("b",)
    assert nodes(placement) == ["a" * 8]
    assert "least dense" in placement.notes[0]
    assert "note: trainers start on the least dense node" in str(placement)


@pytest.mark.parametrize(
    ("sizes", "trainers", "tp"),
    [((8, 8), 4, 12), ((8, 4), 0, 12), ((8, 6), 0, 14), ((8, 4, 4), 4, 12), ((4, 4), 0, 7)],
)
def test_a_large_engine_without_whole_equal_nodes_is_refused(sizes: tuple[int, ...], trainers: int, tp: int) -> None:
    with pytest.raises(PlacementError, match=r"takes whole nodes of equal size: seats are .* of .* free on 10\."):
        assign(cluster(*sizes), trainers=trainers, engines=[EngineShape(tp=tp)])


def test_more_ranks_than_bundles_names_the_numbers_and_the_ways_out() -> None:
    with pytest.raises(PlacementError) as raised:
        assign(cluster(8), trainers=8, others={"critic": 8}, engines=[EngineShape(tp=2, replicas=2)])
    text = str(raised.value)
    assert "20 bundles of one GPU are needed (trainers 8, critic 8, 2 engines of 2)" in text
    assert "has 8" in text
    assert "shared=True" in text
    assert "registered with NIXL" in text


def test_other_roles_have_seats_of_their_own() -> None:
    placement = assign(cluster(8, 8), trainers=4, others={"critic": 4}, engines=[EngineShape(tp=8)])
    assert placement.others["critic"].bundles == (4, 5, 6, 7)
    assert nodes(placement) == ["b" * 8]
    with pytest.raises(PlacementError, match="are taken"):
        assign(cluster(8), trainers=1, others={"trainer": 1})
    with pytest.raises(PlacementError, match="are taken"):
        assign(cluster(8), trainers=1, others={"engine 0": 1})


def test_shared_roles_start_at_the_same_seat_and_say_what_it_costs() -> None:
    placement = assign(
        cluster(4), trainers=4, others={"critic": 2}, engines=[EngineShape(tp=2, replicas=2)], shared=True
    )
    assert placement.trainers.bundles == (0, 1, 2, 3)
    assert placement.others["critic"].bundles == (0, 1)
    assert [engine.bundles for engine in placement.engines] == [(0, 1), (2, 3)]
    assert [placement.share(bundle) for bundle in range(4)] == [0.3333, 0.3333, 0.5, 0.5]
    assert "registered with NIXL" in placement.notes[0]
    with pytest.raises(PlacementError, match="5 bundles of one GPU are needed"):
        assign(cluster(4), trainers=5, shared=True)


def test_a_gpu_in_two_bundles_is_refused() -> None:
    same = [Seat(0, "a", "10.0.0.1", "0", "GPU-1"), Seat(1, "a", "10.0.0.1", "1", "GPU-1")]
    with pytest.raises(PlacementError, match="GPU GPU-1 of node a appears twice: more than one rank"):
        assign(same, trainers=2)
    with pytest.raises(PlacementError, match="bundle 0 appears twice"):
        assign([Seat(0, "a", "", "0"), Seat(0, "a", "", "1")], trainers=2)


def test_demand() -> None:
    engines = [EngineShape(tp=4, pp=2, replicas=2), EngineShape()]
    assert demand(8, engines, {"critic": 4}) == 29
    assert demand(8, engines, {"critic": 4}, shared=True) == 17
    with pytest.raises(PlacementError, match="nothing to place"):
        demand(0, [])
    with pytest.raises(PlacementError, match="negative"):
        demand(-1, engines)
    with pytest.raises(PlacementError, match="at least 1"):
        EngineShape(tp=0)


def test_the_table_names_every_seat() -> None:
    seats = [*cluster(2), Seat(2, "b", "10.0.0.2", "5", "GPU-55"), Seat(3, "b", "10.0.0.2", "6", "GPU-66")]
    lines = str(assign(seats, trainers=1, engines=[EngineShape(tp=2)])).splitlines()
    assert lines[0].split() == ["role", "rank", "bundle", "node", "address", "GPU", "UUID"]
    assert [line.split() for line in lines[1:]] == [
        ["trainer", "0", "0", "a", "10.0.0.1", "0", "logical"],
        ["engine", "0", "0", "2", "b", "10.0.0.2", "5", "GPU-55"],
        ["engine", "0", "1", "3", "b", "10.0.0.2", "6", "GPU-66"],
        ["spare", "0", "1", "a", "10.0.0.1", "1", "logical"],
    ]


@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    trainers=st.integers(0, 12),
    critics=st.integers(0, 4),
    engines=st.lists(
        st.builds(EngineShape, tp=st.integers(1, 9), pp=st.integers(1, 2), replicas=st.integers(1, 2)), max_size=3
    ),
    shared=st.booleans(),
    mixed=st.randoms(),
)
def test_whatever_is_placed_keeps_the_rules(sizes, trainers, critics, engines, shared, mixed) -> None:
    seats = cluster(*sizes)
    mixed.shuffle(seats)
    try:
        placement = assign(seats, trainers=trainers, others={"critic": critics}, engines=engines, shared=shared)
    except PlacementError:
        return
    assert len(placement.trainers) == trainers
    assert len(placement.others["critic"]) == critics
    assert [len(engine) for engine in placement.engines] == [
        shape.ranks for shape in engines for _ in range(shape.replicas)
    ]
    load = Counter(bundle for role in placement.roles for bundle in role.bundles)
    assert {seat.bundle for seat in placement.spare} == {seat.bundle for seat in seats} - load.keys()
    assert max(load.values()) <= (3 if shared else 1)
    assert all(count * placement.share(bundle) <= 1 for bundle, count in load.items())
    served = Counter(bundle for engine in placement.engines for bundle in engine.bundles)
    assert set(served.values()) <= {1}
    for engine in placement.engines:
        if len(engine) <= max(sizes):
            assert len(engine.nodes) == 1
        else:
            # whole nodes, one after the other, the same number of ranks on each
            counts = Counter(engine.node_ids)
            assert len(set(counts.values())) == 1
            assert all(counts[name] == sizes["abcdefgh".index(name)] for name in counts)
            assert engine.node_ids == tuple(name for name in engine.nodes for _ in range(counts[name]))
    if "least dense" not in str(placement):
        assert placement.trainers.seats == tuple(order(seats)[:trainers])
