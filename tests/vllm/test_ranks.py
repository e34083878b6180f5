from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest

from rdt_vllm.ranks import Ranks

pytestmark = pytest.mark.integration


def member(rank: int, world_size: int, path: str, absent: int, answers: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    ranks = Ranks(rank, world_size, [dist.group.WORLD])
    found: dict[str, Any] = {"speaks": ranks.speaks}
    found["gathered"] = sorted(ranks.gather(rank, 30))
    found["fine"] = ranks.agree(None, 30)
    found["failed"] = ranks.agree(ValueError("no bytes") if rank == 0 else None, 30)
    if rank == absent:
        time.sleep(6)
    else:
        began = time.monotonic()
        try:
            ranks.agree(None, 2)
        except Exception as error:
            found["late"] = f"{type(error).__name__}: {error}"
            found["after"] = time.monotonic() - began
    answers.put((rank, found))


def test_all_ranks_hear_of_one_failure_and_one_of_them_speaks(tmp_path):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [
        context.Process(target=member, args=(rank, 3, str(tmp_path / "meet"), 1, answers), daemon=True)
        for rank in range(3)
    ]
    for child in children:
        child.start()
    found = dict(answers.get(timeout=120) for _ in children)
    for child in children:
        child.join(30)
    assert [found[rank]["speaks"] for rank in range(3)] == [False, False, True]
    for rank in range(3):
        assert found[rank]["gathered"] == [0, 1, 2]
        assert found[rank]["fine"] is None
        assert found[rank]["failed"] == "rank 0: ValueError: no bytes"
    # a rank that does not come is a deadline, not a hang
    assert found[0]["late"].startswith("DeadlineError: rank 0 of 3 waited 2 s")
    assert found[0]["after"] < 20


def test_a_single_rank_needs_no_group():
    ranks = Ranks(0, 1)
    assert ranks.speaks
    assert ranks.gather("x", 1) == ["x"]
    assert ranks.agree(None, 1) is None
    assert ranks.agree(ValueError("bad"), 1) == "rank 0: ValueError: bad"
