"""Which engine a scheduler's name belongs to. Whole searches: test_routes."""

from __future__ import annotations

import pytest

from rdt_core.errors import EngineError
from rdt_sglang.discover import engines_among, find_actors

pytestmark = pytest.mark.unit


def name(node: str, tp: int, group: str, bundle: int, dp: int = 0, pp: int = 0) -> str:
    return f"sglang_scheduler_node{node}_dp{dp}_pp{pp}_tp{tp}_pg{group}_bundle{bundle}"


def test_names_are_sorted_into_engines():
    first = [name("10.0.0.1", tp, "0123abcd", tp + 4) for tp in range(2)]
    second = [name("10.0.0.1", tp, "ffffffff", 0, pp=pp) for tp in range(2) for pp in range(2)]
    found = engines_among([*first, *second, "rdt.group", "sglang_scheduler_other", first[0] + "x"])
    assert found == {
        ("10.0.0.1", "0123abcd"): {(0, 0, 0): first[0], (0, 0, 1): first[1]},
        ("10.0.0.1", "ffffffff"): dict(zip([(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)], second, strict=True)),
    }


def test_two_engines_in_one_placement_group_are_not_one():
    names = [name("n", 0, "0123abcd", bundle) for bundle in (0, 2)]
    assert [list(ranks.values()) for ranks in engines_among(names).values()] == [[names[0]], [names[1]]]


def test_without_a_cluster_nothing_is_looked_for():
    with pytest.raises(EngineError, match="not connected to a Ray cluster"):
        find_actors("http://host:1")
