"""The bed that Megatron's tests lie in: ranks end with their call, failures name their rank, layouts have plain names."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rdt_testbed.megatron import Layout
from rdt_testbed.megatron.ranks import RankError, Ranks

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(Path(__file__).with_name("failing_ranks.py")) as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def _no_rank_stays(ranks: Ranks) -> Iterator[None]:
    yield
    left = [one for one in psutil.Process(ranks.pid).children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    assert left == []


def test_names() -> None:
    assert Layout().name == "one"
    assert Layout(tp=2, pp=2, etp=1, distopt=True).name == "tp2-pp2-etp1-distopt"
    assert Layout(tp=2, pp=2, dp=3).world == 12


def test_every_rank_answers(ranks: Ranks) -> None:
    answers = ranks.run("sizes", Layout(tp=2, dp=2))
    assert answers == [{"rank": rank, "tp": 2, "pp": 1, "dp": 2} for rank in range(4)]


def test_values_differ_where_parameters_do(ranks: Ranks) -> None:
    first, other, copy, _ = ranks.run("filled", Layout(tp=2, dp=2, ep=2, etp=1))
    assert first.keys() == other.keys() == copy.keys()
    cut = {name for name in first if not torch.equal(first[name], other[name])}
    replicated = ("layernorm.weight", "router.weight")
    assert {name for name in first if not name.endswith(replicated)} == cut
    # the next data parallel rank: with two ranks for tensor parallelism, expert ranks are those
    assert [name for name in first if not torch.equal(first[name], copy[name])] == []


@pytest.mark.parametrize(
    ("function", "told"),
    [("raises", "rank 1: (?s:.*)the second rank fails"), ("dies", "rank 1: the process ended without an answer")],
)
def test_a_failing_rank_is_named_and_holds_nobody_up(ranks: Ranks, function: str, told: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=told):
        ranks.run(function, Layout(dp=2))
    assert time.monotonic() - began < 30


def test_a_late_rank_is_ended(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 0: no answer within 3 s\nrank 1: no answer within 3 s"):
        ranks.run("hangs", Layout(dp=2), timeout_s=3)


def test_the_next_call_works(ranks: Ranks) -> None:
    assert len(ranks.run("sizes", Layout(pp=2))) == 2
